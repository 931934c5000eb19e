#include "product.h"

namespace headport::kernels {

const Kernel& find_kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
  return kPortable;
}

}  // namespace headport::kernels
