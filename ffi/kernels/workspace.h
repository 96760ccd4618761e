// The workspace of a call, apart from its operands: how it is cut, and the bounds of its size.
#ifndef JAXSOK_KERNELS_WORKSPACE_H_
#define JAXSOK_KERNELS_WORKSPACE_H_

#include "../core/platform.h"

namespace jaxsok {

// Bounds of workspaces. Programs are compiled with buffers of these sizes: jaxsok/kernels/library.py calls these
// functions.

/// The alignment of a workspace's parts, relative to the workspace, which XLA aligns to at least 64 bytes.
constexpr int64_t kWorkspaceLine = 256;
/// Bytes for the control words of a call, at most four structs.
constexpr int64_t kControlBytes = 4 * kWorkspaceLine;
/// The number of positions or rows for which a pass writes one count.
constexpr int64_t kCountedTogether = 1024;

/// Returns a number of words of 4 bytes, rounded up to whole parts.
constexpr int64_t PaddedToLine(int64_t num_words) { return CeilDiv<int64_t>(num_words, 64) * 64; }

/// Returns the bytes for the counts of `size` positions or rows, at most 8 bytes each, and for the ends of two parts.
constexpr int64_t CountsBytes(int64_t size) { return CeilDiv(size, kCountedTogether) * 8 + 2 * kWorkspaceLine; }

/// Cuts a workspace into aligned parts.
class WorkspaceCutter {
 public:
  explicit WorkspaceCutter(void* begin) : begin_(static_cast<char*>(begin)), at_(0) {}
  template <typename T>
  T* Take(int64_t count) {
    T* part = reinterpret_cast<T*>(begin_ + at_);
    at_ += CeilDiv<int64_t>(count * static_cast<int64_t>(sizeof(T)), kWorkspaceLine) * kWorkspaceLine;
    return part;
  }
  void* Rest() const { return begin_ + at_; }
  int64_t used() const { return at_; }

 private:
  char* begin_;
  int64_t at_;
};

}  // namespace jaxsok

#endif  // JAXSOK_KERNELS_WORKSPACE_H_
