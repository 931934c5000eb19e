// The operator library that ONNX Runtime loads: domain headport.kernels.
#include "ort_api.h"
#include "product.h"
#include "selftest.h"

#if defined(_WIN32)
#define HEADPORT_EXPORT __declspec(dllexport)
#else
#define HEADPORT_EXPORT __attribute__((visibility("default")))
#endif

namespace headport::kernels {
namespace {

constexpr std::uint32_t kOldestApi = 17;  // has KernelContext_ParallelFor

// The newest API that both ONNX Runtime and this library know. Sessions may be opened by several
// threads at once.
bool find_api(const OrtApiBase* base) {
  static const OrtApi* const found = [base] {
    const OrtApi* one = nullptr;
    for (std::uint32_t version = ORT_API_VERSION; one == nullptr && version >= kOldestApi; --version)
      one = base->GetApi(version);
    return api = one;
  }();
  return found != nullptr;
}

void add_operators(OrtSessionOptions* options) {
  static OrtCustomOpDomain* const domain = [] {
    OrtCustomOpDomain* made = nullptr;
    check(api->CreateCustomOpDomain("headport.kernels", &made));
    for (const OrtCustomOp* each : {block_matmul(), cached_attention(), ranked_candidates()})
      check(api->CustomOpDomain_Add(made, each));
    return made;
  }();
  check(api->AddCustomOpDomain(options, domain));
}

}  // namespace
}  // namespace headport::kernels

// ONNX Runtime calls it when the library is registered with a session's options.
extern "C" HEADPORT_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                        const OrtApiBase* base) {
  using namespace headport::kernels;
  if (!find_api(base)) return nullptr;  // nothing is registered, so its operators are refused
  return guarded("headport's kernels", [&] {
    static const std::string fault = find_fault(find_kernel());
    if (!fault.empty()) throw Failure("the self-test failed: " + fault);
    add_operators(options);
  });
}

// The form of operators and weights; a manifest names the one its graphs were made for.
extern "C" HEADPORT_EXPORT int headport_kernels_version() { return 4; }

extern "C" HEADPORT_EXPORT const char* headport_kernels_name() {
  return headport::kernels::find_kernel().name;
}
