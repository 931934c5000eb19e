// How many threads a session runs with, and how they wait.
#pragma once

namespace headport::internal {

struct Threads {
  int count = 1;
  bool spinning = true;  // for the next operator, briefly, not asleep
};

}  // namespace headport::internal
