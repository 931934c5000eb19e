#include "generator/tuned_threads.h"

#include "ort/cpus.h"

namespace headport::internal {

TunedThreads tuned_threads(const Manifest& manifest, int asked) {
  if (asked > 0) return {{asked, asked > 1}, HEADPORT_NOT_TUNED};
  const int cpus = usable_cpus();
  const TunedThreads all{{cpus, cpus > 1}, HEADPORT_NOT_TUNED};
  if (manifest.tuned.empty()) return all;
  const std::string cpu = cpu_model();
  for (const Tuning& each : manifest.tuned) {
    if (each.cpu != cpu || each.cpus != cpus) continue;
    return {{static_cast<int>(each.threads), each.spinning && each.threads > 1},
            HEADPORT_TUNED_HERE};
  }
  return {all.threads, HEADPORT_TUNED_ELSEWHERE};
}

}  // namespace headport::internal
