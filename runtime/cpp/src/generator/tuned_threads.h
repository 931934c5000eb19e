// Threads as `headport tune` chose them: on the kind of machine that they were measured on. Mirrors
// headport.tuned.
#pragma once

#include "bundle/manifest.h"
#include "headport/headport.h"
#include "ort/threads.h"

namespace headport::internal {

struct TunedThreads {
  Threads threads;
  headport_tuned tuned = HEADPORT_NOT_TUNED;
};

// `asked` is the caller's number; 0: as the bundle records for this kind of machine, else one thread
// per CPU that this process may use.
TunedThreads tuned_threads(const Manifest& manifest, int asked);

}  // namespace headport::internal
