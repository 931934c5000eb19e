// The CPUs of this machine. Mirrors headport.machine.
#pragma once

#include <string>

namespace headport::internal {

// CPUs that this process may use. Containers often allow fewer than the machine has, by affinity or
// by a quota of the control group; spinning threads beyond them hurt.
int usable_cpus();

// What kind of CPU this is, as the operating system names it; empty where it does not.
std::string cpu_model();

// The same of the text of /proc/cpuinfo.
std::string cpu_model_of(const std::string& cpuinfo);

}  // namespace headport::internal
