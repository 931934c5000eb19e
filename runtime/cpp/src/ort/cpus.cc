#include "ort/cpus.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

namespace headport::internal {
namespace {

// "200000 100000": microseconds of CPU time in each period of microseconds; "max" is no quota.
int cpu_quota() {
  std::ifstream stream("/sys/fs/cgroup/cpu.max");
  std::string quota;
  long period = 0;
  if (!(stream >> quota >> period) || quota == "max" || period <= 0) return 0;
  const long allowed = std::strtol(quota.c_str(), nullptr, 10);
  return static_cast<int>((allowed + period - 1) / period);
}

}  // namespace

int usable_cpus() {
  int allowed = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) allowed = CPU_COUNT(&set);
  const int quota = cpu_quota();
  return std::max(1, quota > 0 ? std::min(allowed, quota) : allowed);
}

}  // namespace headport::internal
