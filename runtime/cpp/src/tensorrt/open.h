// Opens a bundle's plans on this machine's GPU.
#pragma once

#include <memory>
#include <string>

#include "bundle/bundle.h"
#include "tensorrt/plan_runner.h"

namespace headport::internal {

// `library` is TensorRT's, see `load_tensorrt`; `record_graphs` lets it record executions as CUDA
// graphs. The driver has shown a GPU before anything of TensorRT is loaded.
// Errors: HEADPORT_UNSUPPORTED if this build runs no such plans; HEADPORT_BUNDLE_ERROR if the bundle
// carries no plan of its own for the backbone or the head; HEADPORT_NO_GPU if there is no GPU, or
// another than the plans'; HEADPORT_LIBRARY_ERROR if the library or its version is not the plans'.
std::unique_ptr<PlanRunner> open_plans(const Bundle& bundle, const std::string& head,
                                       const std::string& library, bool record_graphs);

}  // namespace headport::internal
