// Replies and tokens → the bodies of answers.
#pragma once

#include <headport/headport.hpp>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "job.h"

namespace service {

// One answer of the service, whole or in parts.
class Answer {
 public:
  // `model`: the name that the request gave; `token_ids`: they are wanted.
  Answer(const std::string& model, bool token_ids);

  std::string whole(const std::vector<headport::TokenIds>& prompts,
                    const std::vector<headport::Reply>& replies) const;
  // What is sent for a token.
  std::string part(const Piece& piece) const;
  // What ends a stream that is to tell its counts.
  std::string usage_part(const std::vector<headport::TokenIds>& prompts,
                         const std::vector<headport::Reply>& replies) const;

 private:
  nlohmann::json head() const;

  std::string id_;
  std::string model_;
  std::int64_t created_;
  bool token_ids_;
};

std::string error_body(const Fault& fault);

}  // namespace service
