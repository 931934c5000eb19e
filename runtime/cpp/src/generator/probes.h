// Hidden states that are chosen to break a kernel.
#pragma once

#include <vector>

#include "bundle/bundle.h"

namespace headport::internal {

using States = std::vector<std::vector<double>>;

// `rounded` holds dequantised rows of the weight: every integer of a probe is at its limit and of the
// sign of one of them, where sums of pairs saturate. One huge channel; numbers below float32's normal
// range; zeros; large norms; and states of the bundle's self-test, if it has any.
// `largest` bounds their sizes: of a head with a softcap, which else would hide what the kernel does.
States probes_of(const Bundle& bundle, const States& rounded, double largest);

}  // namespace headport::internal
