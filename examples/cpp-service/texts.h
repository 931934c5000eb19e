// Texts of the bundle's tokenizer, where the library knows it.
#pragma once

#include <headport/headport.hpp>
#include <string>
#include <unordered_map>

namespace service {

class Texts {
 public:
  // `bundle` is the folder that the generator was opened with.
  Texts(const headport::Generator& generator, const std::string& bundle);

  bool known() const { return reason_.empty(); }
  // Why there are none.
  const std::string& reason() const { return reason_; }
  // Errors: Fault 400, if texts cannot become token ids here.
  headport::TokenIds encode(const std::string& text) const;
  // Text of one token alone; of a special token its name. Only where texts are known.
  std::string spell(std::int64_t token_id) const;

 private:
  const headport::Generator& generator_;
  std::string reason_;
  std::unordered_map<std::int64_t, std::string> names_;  // as tokenizer.json has them
};

}  // namespace service
