// One call of a handler: it reads operands and results in order by name, and checks them.
//
// jaxsok/kernels/call.py makes the call, with the same names. `InPlace` reads operands that are returned in their
// buffers, before the first `Result`. After the first error nothing more is read or launched: a handler continues
// without checking, and gets empty arrays. Python checks shapes that a user chooses.
#ifndef JAXSOK_HANDLERS_CALL_H_
#define JAXSOK_HANDLERS_CALL_H_

#include <initializer_list>
#include <sstream>
#include <string>
#include <utility>

#include "bind.h"

namespace jaxsok {

/// A buffer that is an operand or a result.
class Array {
 public:
  Array() = default;
  explicit Array(const ffi::AnyBuffer& buffer)
      : data_(buffer.untyped_data()), dtype_(buffer.element_type()), dims_(buffer.dimensions()) {}

  /// Returns its elements. `T` is the dtype of the array, or several of its elements together.
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  ffi::DataType dtype() const { return dtype_; }
  ffi::Span<const int64_t> dims() const { return dims_; }
  /// Returns the length of an axis; 0 if there is none.
  int64_t size(size_t axis) const { return axis < dims_.size() ? dims_[axis] : 0; }
  int64_t num_elements() const {
    int64_t product = 1;
    for (int64_t size : dims_) product *= size;
    return product;
  }
  int64_t num_bytes() const { return num_elements() * static_cast<int64_t>(ffi::ByteWidth(dtype_)); }

 private:
  void* data_ = nullptr;
  ffi::DataType dtype_ = ffi::DataType::U8;
  ffi::Span<const int64_t> dims_;
};

/// Lengths of the axes of an array; -1 accepts any.
using Shape = std::initializer_list<int64_t>;

class Call {
 public:
  Call(const char* op, StreamArgument stream, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
       const ffi::Dictionary& attributes, int32_t device = 0)
      : op_(op), stream_(stream), operands_(operands), results_(results), attributes_(attributes), device_(device) {}

  /// Returns the ordinal of the device; known in handlers of windows and eager ones only.
  int32_t device() const { return device_; }
  bool failed() const { return error_.failure(); }
  size_t num_operands_left() const { return operands_.size() - next_operand_; }
  size_t num_results_left() const { return results_.size() - next_result_; }

  template <typename T>
  T Attribute(const char* name) {
    auto value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    Refuse(name, value.error().message());
    return T{};
  }

  /// Returns an attribute that files of older programs lack.
  template <typename T>
  T AttributeOr(const char* name, T otherwise) {
    auto value = attributes_.get<T>(name);
    return value.has_value() ? *value : otherwise;
  }

  /// Returns the next operand, of any dtype.
  Array Operand(const char* name) {
    if (failed()) return {};
    auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_++);
    if (buffer.has_value()) return Array(*buffer);
    Refuse(name, buffer.error().message());
    return {};
  }

  /// Returns the next result, of any dtype.
  Array Result(const char* name) {
    if (failed()) return {};
    auto buffer = results_.get<ffi::AnyBuffer>(next_result_++);
    if (buffer.has_value()) return Array(**buffer);
    Refuse(name, buffer.error().message());
    return {};
  }

  /// Returns the next operand, which must also be the next result: state is updated in place.
  Array InPlace(const char* name) {
    const Array operand = Operand(name), result = Result(name);
    if (operand.as<void>() != result.as<void>() && !failed()) {
      error_ = ffi::Error::Internal(std::string(op_) + ": " + name +
                                    ": operand and result have different buffers, wanted one (input_output_aliases)");
    }
    return operand;
  }

  Array Operand(const char* name, ffi::DataType dtype, Shape shape) {
    return Checked(Operand(name), name, dtype, shape);
  }
  Array Result(const char* name, ffi::DataType dtype, Shape shape) { return Checked(Result(name), name, dtype, shape); }
  Array InPlace(const char* name, ffi::DataType dtype, Shape shape) {
    return Checked(InPlace(name), name, dtype, shape);
  }

  /// Returns the next result, of at least `num_bytes` bytes.
  void* Workspace(int64_t num_bytes) {
    const Array workspace = Result("workspace");
    const int64_t got = workspace.num_bytes();
    Require(got >= num_bytes, "workspace", "got ", got, " bytes, wanted at least ", num_bytes);
    return workspace.as<void>();
  }

  void CheckShape(const char* name, ffi::Span<const int64_t> got, Shape wanted) {
    bool is_same = got.size() == wanted.size();
    for (size_t axis = 0; is_same && axis < got.size(); ++axis) {
      const int64_t size = wanted.begin()[axis];
      is_same = size < 0 || got[axis] == size;
    }
    if (!is_same) Refuse(name, "got shape ", InBrackets(got), ", wanted ", InBrackets(wanted), " (-1: any)");
  }

  /// Refuses the call if a condition does not hold, with a message in several parts; the first refusal counts.
  template <typename... Parts>
  void Require(bool holds, const char* name, const Parts&... message) {
    if (!holds) Refuse(name, message...);
  }
  template <typename... Parts>
  void Refuse(const char* name, const Parts&... message) {
    if (failed()) return;
    std::ostringstream text;
    text << op_ << ": " << name << ": ";
    (text << ... << message);
    error_ = ffi::Error::InvalidArgument(text.str());
  }
  /// Refuses the call as above, because of array contents that no op could have written.
  template <typename... Parts>
  void RequireWhole(bool holds, const char* name, const Parts&... message) {
    Require(holds, name, message..., "; the state is damaged: restore it from a checkpoint.");
  }

  /// Calls `launch` with the stream, unless the call was refused.
  template <typename Launcher>
  ffi::Error Launch(const Launcher& launch) {
    Require(num_operands_left() == 0, "operands", "got ", num_operands_left(), " too many");
    Require(num_results_left() == 0, "results", "got ", num_results_left(), " too many");
    if (failed()) return error_;
    StreamScope scope(stream_);
    const LaunchError error = launch(scope.get());
    return error == nullptr ? ffi::Error::Success() : ffi::Error::Internal(std::string(op_) + ": " + error);
  }

 private:
  Array Checked(const Array& array, const char* name, ffi::DataType dtype, Shape shape) {
    if (failed()) return {};
    Require(array.dtype() == dtype, name, "got dtype ", array.dtype(), ", wanted ", dtype);
    CheckShape(name, array.dims(), shape);
    return failed() ? Array() : array;
  }

  template <typename Sizes>
  static std::string InBrackets(const Sizes& sizes) {
    std::string out = "[";
    for (auto it = sizes.begin(); it != sizes.end(); ++it)
      out += (it == sizes.begin() ? "" : ", ") + std::to_string(*it);
    return out + "]";
  }

  const char* op_;
  StreamArgument stream_;
  const ffi::RemainingArgs& operands_;
  const ffi::RemainingRets& results_;
  const ffi::Dictionary& attributes_;
  int32_t device_;
  size_t next_operand_ = 0, next_result_ = 0;
  ffi::Error error_;
};

/// Defines the handler `symbol`, named `op` in errors. `Impl` reads its operands and results from a Call and launches.
#define JAXSOK_DEFINE_HANDLER(symbol, op, Impl)                                                                        \
  JAXSOK_DEFINE_SYMBOL(                                                                                                \
      symbol,                                                                                                          \
      [](StreamArgument stream, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) { \
        Call call(op, stream, operands, results, attributes);                                                          \
        return Impl(call);                                                                                             \
      },                                                                                                               \
      ffi::Ffi::Bind().Ctx<StreamContext>().RemainingArgs().RemainingRets().Attrs())

/// Defines a handler as above that also knows its device.
#define JAXSOK_DEFINE_WINDOW_HANDLER(symbol, op, Impl) JAXSOK_DEFINE_ON_DEVICE(JAXSOK_DEFINE_SYMBOL, symbol, op, Impl)
/// Defines a handler that knows its device, and is not captured in CUDA graphs.
#define JAXSOK_DEFINE_EAGER_HANDLER(symbol, op, Impl) \
  JAXSOK_DEFINE_ON_DEVICE(XLA_FFI_DEFINE_HANDLER_SYMBOL, symbol, op, Impl)

#define JAXSOK_DEFINE_ON_DEVICE(define, symbol, op, Impl)                                                \
  define(                                                                                                \
      symbol,                                                                                            \
      [](StreamArgument stream, int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results, \
         ffi::Dictionary attributes) {                                                                   \
        Call call(op, stream, operands, results, attributes, device);                                    \
        return Impl(call);                                                                               \
      },                                                                                                 \
      ffi::Ffi::Bind().Ctx<StreamContext>().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs())

}  // namespace jaxsok

#endif  // JAXSOK_HANDLERS_CALL_H_
