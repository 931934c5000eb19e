// In place of library.cc, where TensorRT's headers are not there.
#include "error.h"
#include "tensorrt/engine.h"

namespace headport::internal {

void require_headers(const std::string& backend) {
  throw Error(HEADPORT_UNSUPPORTED,
              text("this build of the library runs no TensorRT plans, because it was built without "
                   "TensorRT's headers; build it with -DTENSORRT_INCLUDE_DIR=FOLDER of ",
                   backend == "tensorrt-rtx" ? "TensorRT-RTX" : "TensorRT",
                   ", which holds NvInferRuntime.h, and -DCUDA_INCLUDE_DIR=FOLDER, which holds "
                   "cuda_runtime_api.h; or run the bundle with the Python runtime"));
}

std::unique_ptr<TensorRt> load_tensorrt(const std::string& backend, const std::string&) {
  require_headers(backend);
  return nullptr;
}

}  // namespace headport::internal
