// Whether a certified head deserves trust on this machine: its kernel, its data, its answers.
// Mirrors src/headport/certificate_check.py, which says what is compared and why; the constants are
// those of src/headport/certificate.py.
#pragma once

#include <string>

#include "bundle/bundle.h"
#include "generator/candidate_head.h"
#include "generator/head_session.h"

namespace headport::internal {

// How much of what the proof allows was used.
struct CertificateCheck {
  double kernel_share = 0.0;  // largest |q - (Ŵ·x + b)| by what the kernel is allowed; ≤ 1
  double bound_share = 0.0;   // largest share of U - (Ŵ·x + b) that the rounding of W needs; ≤ 1
  std::size_t wrong = 0;      // proved ranks that float64 contradicts, and logits that are not exact
  std::size_t logits = 0;     // compared

  bool holds() const {
    return logits > 0 && kernel_share <= 1.0 && bound_share <= 1.0 && wrong == 0;
  }
};

// Compares up to `rows` rows of the weight, evenly spread, with float64.
CertificateCheck check_certificate(const Bundle& bundle, const std::string& name,
                                   HeadSession& session, std::size_t rows);

// Errors: HEADPORT_BUNDLE_ERROR if the certificate does not hold on this machine.
void require_certificate(const Bundle& bundle, const std::string& name, HeadSession& session);

}  // namespace headport::internal
