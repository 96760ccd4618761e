// Lookups for callers on the host, without XLA: keys and rows cross to the device and back within one native call.
//
// A program of JAX takes its caller 0.3 to 0.5 ms, most of it with Python's lock. Here the lock is free from the first
// copy to the last: threads look up at the same time, on one device or on several.
#ifndef JAXSOK_C_INTERFACE_READER_H_
#define JAXSOK_C_INTERFACE_READER_H_

#include <cstdint>

namespace jaxsok {

/// A frozen store, by the addresses of its arrays: all of them, but `more_rows`, in the memory of the device.
struct ReaderStore {
  const void* index;
  int64_t num_buckets;
  const void* counters;
  const void* tables;  // kNumTableWords words of each table
  int64_t num_tables;
  const void* seed;
  const void* rows;
  int64_t num_rows;
  const void* more_rows;  // the rows beyond, in host memory that the device reads; nullptr: there are none
  int64_t num_more_rows;
  const void* scales;  // nullptr: rows are not quantized
  int64_t dtype;       // RowDtype
  int64_t dim;
};

/// Keys that read one table, each its own row; inputs of one store follow each other, and stores ascend.
struct ReaderInput {
  int64_t store;
  int64_t table;         // within its store
  const uint64_t* keys;  // of the host
  int64_t num_keys;
  float* rows;  // set by a lookup: [num_keys, dim], in the memory of the answer
};

/// The rows of one device: all, or those whose keys it owns.
struct ReaderPart {
  void* reader;
  const ReaderStore* stores;
};

/// An answer, whose memory is lent until it is given back.
struct ReaderAnswer {
  int32_t* counts;  // kNumCounts of each table of the stores that inputs read, store by store
  void* memory;
  int64_t num_bytes;
};

}  // namespace jaxsok

#endif  // JAXSOK_C_INTERFACE_READER_H_
