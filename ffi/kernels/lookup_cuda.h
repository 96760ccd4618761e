// The passes of a lookup: kernels by the dtype of rows and by mode, each compiled in a separate file.
#ifndef JAXSOK_KERNELS_LOOKUP_CUDA_H_
#define JAXSOK_KERNELS_LOOKUP_CUDA_H_

#include "bags_cuda.cuh"
#include "index_cuda.cuh"
#include "lookup.h"

namespace jaxsok {

enum Mode : int {
  kModeFind = 0,     // probes; absent keys stay absent
  kModeInsert = 1,   // probes; absent keys are left pending, and their bags to the finishing pass
  kModePlanned = 2,  // row ids are given
  kModeTrack = 3,    // kModeInsert in a store with statistics: the uses of rows are recorded
};

/// Returns whether absent keys are left pending.
constexpr bool Inserts(int mode) { return mode == kModeInsert || mode == kModeTrack; }

struct LookupArguments {
  StoreView store;
  BatchView batch;
  const uint32_t* given_row_ids;  // kModePlanned
  uint32_t* row_ids;              // Inserts
  int32_t* counts;
  InsertWorkspace insert;                           // Inserts
  UseNotes notes{};                                 // Inserts; kept with kModeTrack
  uint64_t* digest = nullptr;                       // of the keys; Inserts
  const uint64_t* key_arrays[kMostKeyArrays] = {};  // of FrozenLookup; kModeFind
  bool has_key_arrays = false;
};

/// The kernels that find keys, or take given row ids, and write every embedding that does not depend on new rows.
template <typename Row, int kMode>
struct LookupOf {
  static LaunchError Main(Stream stream, const LookupArguments& a, const EmbeddingPointers& embeddings);
};

/// The kernel that writes the embeddings that depend on new rows.
template <typename Row>
struct FinishOf {
  static LaunchError Finish(Stream stream, const LookupArguments& a, const EmbeddingPointers& embeddings);
};

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_LOOKUP_CUDA_H_
