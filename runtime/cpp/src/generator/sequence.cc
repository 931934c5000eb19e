#include "generator/sequence.h"

#include <algorithm>

namespace headport::internal {

std::string Sequence::accept(std::int64_t token, const Request& request) {
  reply.token_ids.push_back(token);
  std::string part;
  if (text && watched) part = text->push(reply.token_ids);
  if (std::find(request.ends.begin(), request.ends.end(), token) != request.ends.end()) {
    reply.finish = HEADPORT_EOS;
  } else if (text && text->stopped()) {
    reply.finish = HEADPORT_STOP;
  } else if (reply.token_ids.size() == limit) {
    reply.finish = HEADPORT_LENGTH;
  }
  if (!text || reply.finish == HEADPORT_NOT_FINISHED) return part;
  part += text->finish(reply.token_ids);
  // It may have stood in text that was held back until now.
  if (text->stopped() && reply.finish == HEADPORT_LENGTH) reply.finish = HEADPORT_STOP;
  reply.text = text->text();
  return part;
}

}  // namespace headport::internal
