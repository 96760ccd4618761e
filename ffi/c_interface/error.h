// Errors that the parts of the C interface report to each other; jaxsok.cc catches them before they reach a caller.
#ifndef JAXSOK_C_INTERFACE_ERROR_H_
#define JAXSOK_C_INTERFACE_ERROR_H_

#include <locale>
#include <sstream>
#include <string>

#include "../../jaxsok/include/jaxsok.h"

namespace jaxsok {

struct Error {
  jaxsok_status status;
  std::string text;
};

/// Throws an Error whose text is joined from several parts.
template <typename... Parts>
[[noreturn]] void Refuse(jaxsok_status status, const Parts&... parts) {
  std::ostringstream text;
  text.imbue(std::locale::classic());  // the program may have set one that groups digits
  (text << ... << parts);
  throw Error{status, text.str()};
}

}  // namespace jaxsok

#endif  // JAXSOK_C_INTERFACE_ERROR_H_
