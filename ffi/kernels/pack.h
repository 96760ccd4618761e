// Packs a batch on the host: the arrays of a reader become the buffers that a store reads. This is the contract of
// pack_cpu.cc, which Python calls by ctypes (jaxsok/kernels/pack.py), outside of any program.
//
// There are two passes. JaxsokPackBags turns the lengths or offsets of ragged features into int32 offsets, in place,
// and returns where the keys of each shard's part begin; the sizes of the buffers follow from that. The second pass
// writes keys and weights into their places and fills the remainder with padding: JaxsokBeginKeys begins it and
// returns, JaxsokEndKeys ends it. Both passes check what they read. They refuse bad data without the reason: the caller
// reads the batch again with NumPy, which raises the error.
#ifndef JAXSOK_KERNELS_PACK_H_
#define JAXSOK_KERNELS_PACK_H_

#include <cstdint>

namespace jaxsok {

/// The type of the numbers that are read. Every field of the items below has 8 bytes, so that Python writes them as one
/// array.
enum class PackType : int64_t { kI8, kI16, kI32, kI64, kU8, kU16, kU32, kU64, kF32, kF64 };

/// The bags of one ragged feature.
struct PackBags {
  const char* given;  // lengths [num_bags], or offsets [num_bags + 1] from 0
  int64_t stride;     // bytes from one number to the next
  PackType type;      // an integer
  int64_t is_offsets;
  int64_t num_bags;
  int64_t num_keys;   // of the feature: no bag may end after them
  int64_t num_parts;  // each part gets bags_of_part bags; those after num_bags are empty
  int64_t bags_of_part;
  int32_t* offsets;      // out: [bags_of_part + 1] of the first part, each part counting from 0
  int64_t offsets_step;  // int32 numbers from one part's offsets to the next
  int64_t* ends;         // out: [num_parts + 1], the begin of each part among the keys, and the end of the last
};

/// Keys of one feature, with their weights.
///
/// Row i of the input holds keys i * width to (i + 1) * width - 1 of the feature. Each part gets `size` numbers: its
/// keys, then padding. With `square` the keys of each bag take `square` places; the other places are padding.
struct PackKeys {
  const char* keys;
  int64_t line_stride;  // bytes from one input row to the next
  int64_t key_stride;   // bytes from one key of an input row to the next
  PackType type;        // an integer
  int64_t width;
  int64_t num_keys;     // keys after the last part must be PADDING_KEY
  const int64_t* ends;  // [num_parts + 1], of PackBags; null: each part has `size` keys, the last one possibly fewer
  int64_t num_parts;
  int64_t part_bytes;  // from one part's numbers to the next, of keys and of weights
  int64_t size;
  char* packed;  // out: the first part's uint64_t [size]; or with is_narrow uint32_t [size], the low words
  int64_t is_narrow;
  const char* weights;  // like keys; null: none
  int64_t weight_line_stride;
  int64_t weight_stride;
  PackType weight_type;    // kF32 or kF64
  char* packed_weights;    // out: the first part's float [size]
  const int32_t* offsets;  // used with square: [num_bags + 1] of each part, each from 0
  int64_t num_bags;        // of a part
  int64_t square;          // 0: none
};

}  // namespace jaxsok

extern "C" {

/// Replaces pointers to PyArrayInterface, which NumPy's `__array_struct__` holds, by pointers to the arrays' elements.
/// Returns 0.
int64_t JaxsokPackAddresses(int64_t* pointers, int64_t num_arrays);

/// Writes the offsets of ragged features. Returns 0, or the number of a refused item, counted from 1: a negative
/// length, offsets that decrease or do not begin at 0, an end after the keys. The output is undefined then.
int64_t JaxsokPackBags(const jaxsok::PackBags* items, int64_t num_items, int32_t num_threads);

/// Begins to write keys and weights with up to `num_threads` threads, that of JaxsokEndKeys among them, and sets
/// `begun` for that call. Until it returns, threads read and write all arrays of the items, but not `items` itself.
void JaxsokBeginKeys(const jaxsok::PackKeys* items, int64_t num_items, int32_t num_threads, void** begun);

/// Takes part in the writing and waits for its end. Returns 0, or the number of a refused item, counted from 1: keys
/// other than padding after the last bag, a weight that is not finite as a float, a bag of more than `square` keys; and
/// -1 in a process that was forked in between, since the threads are its parent's. The output is undefined then.
/// Clears `begun`; returns 0 at once if it is clear.
int64_t JaxsokEndKeys(void** begun);
}

#endif  // JAXSOK_KERNELS_PACK_H_
