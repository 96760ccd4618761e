// What XLA could get wrong, said with the op and the argument. Shapes that a user chooses are checked in Python.
#ifndef JAXSOK_HANDLERS_CHECK_H_
#define JAXSOK_HANDLERS_CHECK_H_

#include <initializer_list>
#include <string>

#include "../kernels/stream.h"
#include "xla/ffi/api/ffi.h"

#define JAXSOK_RETURN_IF_ERROR(expression)           \
  do {                                               \
    ::xla::ffi::Error jaxsok_error = (expression);   \
    if (jaxsok_error.failure()) return jaxsok_error; \
  } while (false)

namespace jaxsok {

/// `expected` may hold -1: any size.
inline ::xla::ffi::Error CheckShape(::xla::ffi::Span<const int64_t> dims, std::initializer_list<int64_t> expected,
                                    const char* argument, const char* op) {
  bool same = dims.size() == expected.size();
  size_t i = 0;
  for (int64_t size : expected) {
    if (same && size >= 0 && dims[i] != size) same = false;
    ++i;
  }
  if (same) return ::xla::ffi::Error::Success();
  auto text = [](auto begin, auto end) {
    std::string out = "[";
    for (auto it = begin; it != end; ++it) out += (it == begin ? "" : ", ") + std::to_string(*it);
    return out + "]";
  };
  return ::xla::ffi::Error::InvalidArgument(std::string(op) + ": " + argument + ": got shape " +
                                            text(dims.begin(), dims.end()) + ", wanted " +
                                            text(expected.begin(), expected.end()) + " (-1: any)");
}

/// A buffer that must be at least so many bytes.
inline ::xla::ffi::Error CheckBytes(int64_t got, int64_t wanted, const char* argument, const char* op) {
  if (got >= wanted) return ::xla::ffi::Error::Success();
  return ::xla::ffi::Error::InvalidArgument(std::string(op) + ": " + argument + ": got " + std::to_string(got) +
                                            " bytes, wanted at least " + std::to_string(wanted));
}

/// State is updated in place: a result must be the operand that it aliases.
inline ::xla::ffi::Error CheckAlias(const void* operand, const void* result, const char* argument, const char* op) {
  if (operand == result) return ::xla::ffi::Error::Success();
  return ::xla::ffi::Error::Internal(std::string(op) + ": " + argument +
                                     ": operand and result have different buffers, wanted one (input_output_aliases)");
}

/// What a launcher said.
inline ::xla::ffi::Error FromLaunch(LaunchError error, const char* op) {
  if (error == nullptr) return ::xla::ffi::Error::Success();
  return ::xla::ffi::Error::Internal(std::string(op) + ": " + error);
}

}  // namespace jaxsok

#endif  // JAXSOK_HANDLERS_CHECK_H_
