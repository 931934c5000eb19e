// What ends a call from another thread.
#pragma once

#include <atomic>

struct headport_cancel {
  std::atomic<bool> requested{false};
};
