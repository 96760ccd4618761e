// The memory that a call needs beside its operands: how it is cut, and what the bounds of its size are made of.
#ifndef JAXSOK_KERNELS_WORKSPACE_H_
#define JAXSOK_KERNELS_WORKSPACE_H_

#include "../core/platform.h"

namespace jaxsok {

// Bounds of workspaces. Programs are compiled with buffers of these sizes: jaxsok/kernels/library.py asks for them.

/// A part of a workspace begins a multiple of so many bytes after the workspace, which XLA aligns to 64 at least.
constexpr int64_t kWorkspaceLine = 256;
/// Room for the control words of a call, four structs of them at most.
constexpr int64_t kControlBytes = 4 * kWorkspaceLine;
/// Positions or rows of which a pass writes down one count.
constexpr int64_t kCountedTogether = 1024;

/// A number of words of 4 bytes, in whole lines.
constexpr int64_t PaddedToLine(int64_t num_words) { return CeilDiv<int64_t>(num_words, 64) * 64; }

/// Bytes for the counts of `size` positions or rows, of 8 bytes at most, and for the ends of two lines.
constexpr int64_t CountsBytes(int64_t size) { return CeilDiv(size, kCountedTogether) * 8 + 2 * kWorkspaceLine; }

/// Parts of a workspace, each on lines of its own.
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
