// Replies and tokens → the bodies of answers.
#pragma once

#include <headport/headport.hpp>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "job.h"
#include "request.h"
#include "texts.h"

namespace service {

// One answer of the service, whole or in parts.
class Answer {
 public:
  // `model`: the name that the request gave.
  Answer(const std::string& model, const Asked& asked, const Texts& texts);

  std::string whole(const std::vector<headport::TokenIds>& prompts,
                    const std::vector<headport::Reply>& replies) const;
  // What is sent for a token; nothing where it says nothing yet.
  std::string part(const Piece& piece) const;
  // What ends a stream that is to tell its counts.
  std::string usage_part(const std::vector<headport::TokenIds>& prompts,
                         const std::vector<headport::Reply>& replies) const;

 private:
  nlohmann::json head() const;
  nlohmann::json choice(std::size_t index, const std::string& text, headport_finish finish,
                        const headport::TokenIds& token_ids,
                        const std::vector<headport::Likelihood>& likelihoods) const;
  nlohmann::json logprobs(const headport::TokenIds& token_ids,
                          const std::vector<headport::Likelihood>& likelihoods) const;

  std::string id_;
  std::string model_;
  std::int64_t created_;
  bool token_ids_;
  bool logprobs_;
  const Texts& texts_;
};

std::string error_body(const Fault& fault);

}  // namespace service
