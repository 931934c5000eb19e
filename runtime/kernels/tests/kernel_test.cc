// The plain form against float64, the fast one too, and faults that must be found.
#include <cstdio>

#include "checks.h"
#include "product.h"

int main() {
  check_products();
  check_attention();
  check_around();
  check_faults_are_found();
  if (failures == 0)
    std::printf("%s: all checks passed\n", headport::kernels::find_kernel().name);
  return failures == 0 ? 0 : 1;
}
