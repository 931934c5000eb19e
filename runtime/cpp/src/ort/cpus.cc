#include "ort/cpus.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
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

// A virtual machine may call many kinds of CPU by one name; these numbers tell them apart.
constexpr const char* kName = "model name";
constexpr const char* kNumbers[] = {"cpu family", "model", "CPU implementer", "CPU part"};

std::string stripped(const std::string& text) {
  constexpr const char* kSpace = " \t\r";
  const auto first = text.find_first_not_of(kSpace);
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
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

std::string cpu_model_of(const std::string& cpuinfo) {
  std::map<std::string, std::string> found;  // of the first CPU
  std::istringstream lines(cpuinfo);
  for (std::string line; std::getline(lines, line) && !line.empty();) {
    const auto colon = line.find(':');
    if (colon != std::string::npos) {
      found[stripped(line.substr(0, colon))] = stripped(line.substr(colon + 1));
    }
  }
  std::string numbers;
  for (const char* name : kNumbers) {
    if (found[name].empty()) continue;
    numbers += (numbers.empty() ? "" : ", ") + std::string(name) + " " + found[name];
  }
  const std::string name = found[kName];
  if (name.empty() || numbers.empty()) return name + numbers;
  return name + " (" + numbers + ")";
}

std::string cpu_model() {
  std::ifstream stream("/proc/cpuinfo");
  std::ostringstream text;
  text << stream.rdbuf();
  return cpu_model_of(text.str());
}

}  // namespace headport::internal
