// CPUs that this process may use.
#pragma once

namespace headport::internal {

// Containers often allow fewer than the machine has, by affinity or by a quota of the control
// group; spinning threads beyond them hurt.
int usable_cpus();

}  // namespace headport::internal
