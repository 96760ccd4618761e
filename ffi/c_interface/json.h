// Reads untrusted JSON: the depth is bounded, and every error names its byte.
//
// It reads only what a manifest of frozen tables contains: objects, lists, texts and whole numbers from 0. Other
// numbers and words (true, null) are skipped.
#ifndef JAXSOK_C_INTERFACE_JSON_H_
#define JAXSOK_C_INTERFACE_JSON_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace jaxsok {

struct Json {
  enum Kind { kObject, kList, kText, kWhole, kOther };
  Kind kind = kOther;
  std::string text;                // kText, UTF-8 without zero bytes
  uint64_t whole = 0;              // kWhole
  std::vector<std::string> names;  // kObject: the names of `items`
  std::vector<Json> items;         // kObject and kList

  /// Returns the value of a name in an object; nullptr if it is absent.
  const Json* Find(const std::string& name) const {
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i] == name) return &items[i];
    }
    return nullptr;
  }
};

struct JsonError {
  size_t byte;
  const char* wanted;
};

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  /// Reads the whole text as one value; throws JsonError.
  Json Read() {
    CheckUtf8();
    Json value = ReadValue(0);
    SkipSpace();
    if (at_ != text_.size()) Refuse("the end");
    return value;
  }

 private:
  static constexpr int kMostDepth = 16;

  [[noreturn]] void Refuse(const char* wanted) const { throw JsonError{at_, wanted}; }
  char Peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void SkipSpace() {
    while (Peek() == ' ' || Peek() == '\n' || Peek() == '\r' || Peek() == '\t') ++at_;
  }
  bool Take(char wanted) {
    SkipSpace();
    if (Peek() != wanted) return false;
    ++at_;
    return true;
  }

  void CheckUtf8() {
    for (size_t length; at_ < text_.size(); at_ += length) {
      const auto first = static_cast<unsigned char>(text_[at_]);
      length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
      uint32_t code = length == 1 ? first : first & (0xffu >> (length + 1));
      bool is_whole = at_ + length <= text_.size() && (length == 1 || (first >= 0xc2 && first < 0xf8));
      for (size_t i = 1; is_whole && i < length; ++i) {
        const auto next = static_cast<unsigned char>(text_[at_ + i]);
        is_whole = (next & 0xc0) == 0x80;
        code = code << 6 | (next & 0x3f);
      }
      constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
      const bool is_surrogate = code >= 0xd800 && code < 0xe000;
      if (!is_whole || code < kLeast[length - 1] || code > 0x10ffff || is_surrogate) Refuse("UTF-8");
    }
    at_ = 0;
  }

  Json ReadValue(int depth) {
    if (depth > kMostDepth) Refuse("fewer brackets in each other");
    Json value;
    if (Take('{')) {
      value.kind = Json::kObject;
      for (bool more = !Take('}'); more; more = ReadComma('}')) {
        SkipSpace();
        value.names.push_back(ReadText());
        if (!Take(':')) Refuse("a colon");
        value.items.push_back(ReadValue(depth + 1));
      }
    } else if (Take('[')) {
      value.kind = Json::kList;
      for (bool more = !Take(']'); more; more = ReadComma(']')) value.items.push_back(ReadValue(depth + 1));
    } else if (Peek() == '"') {
      value.kind = Json::kText;
      value.text = ReadText();
    } else {
      ReadWord(value);
    }
    return value;
  }

  bool ReadComma(char end) {
    if (Take(',')) return true;
    if (!Take(end)) Refuse("a comma or a closing bracket");
    return false;
  }

  /// Reads a number, true, false or null.
  void ReadWord(Json& value) {
    const size_t first = at_;
    bool is_whole = true;
    for (char c = Peek();
         (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '+' || c == '.';
         c = Peek()) {
      is_whole = is_whole && c >= '0' && c <= '9';
      ++at_;
    }
    if (at_ == first) Refuse("a value");
    if (!is_whole) return;
    for (size_t i = first; i < at_; ++i) {
      const uint64_t digit = static_cast<uint64_t>(text_[i] - '0');
      if (value.whole > (UINT64_MAX - digit) / 10) Refuse("a number below 2^64");
      value.whole = value.whole * 10 + digit;
    }
    value.kind = Json::kWhole;
  }

  std::string ReadText() {
    if (Peek() != '"') Refuse("a text");
    std::string text;
    for (++at_; Peek() != '"'; ++at_) {
      if (static_cast<unsigned char>(Peek()) < ' ') Refuse("a text without control characters, and its end");
      if (Peek() != '\\') {
        text += Peek();
        continue;
      }
      ++at_;
      ReadEscape(text);
    }
    ++at_;
    return text;
  }

  void ReadEscape(std::string& text) {
    static constexpr std::pair<char, char> kEscapes[] = {{'"', '"'},  {'\\', '\\'}, {'/', '/'},  {'b', '\b'},
                                                         {'f', '\f'}, {'n', '\n'},  {'r', '\r'}, {'t', '\t'}};
    for (const auto& [name, meaning] : kEscapes) {
      if (Peek() == name) {
        text += meaning;
        return;
      }
    }
    if (Peek() != 'u') Refuse("an escape");
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i) {
      ++at_;
      const char c = Peek();
      const bool is_digit = c >= '0' && c <= '9', is_letter = (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
      if (!is_digit && !is_letter) Refuse("four hexadecimal digits");
      code = code << 4 | static_cast<uint32_t>(is_digit ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    // Python writes letters unescaped, and escapes control characters only.
    if (code == 0 || code >= 0x80) Refuse("an escape of a character from 1 to 127");
    text += static_cast<char>(code);
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace jaxsok

#endif  // JAXSOK_C_INTERFACE_JSON_H_
