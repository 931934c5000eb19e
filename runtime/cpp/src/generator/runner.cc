#include "generator/runner.h"

#include "error.h"

namespace headport::internal {

void Runner::add(std::size_t, const float*) {
  throw Error(HEADPORT_UNSUPPORTED, "condition: this bundle's target keeps hidden states to itself; "
                                    "use one lowered to ort-cpu");
}

}  // namespace headport::internal
