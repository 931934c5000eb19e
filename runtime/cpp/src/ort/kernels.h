// headport's own kernels, which bundles lowered with --kernels need: runtime/kernels.
#pragma once

#include <map>
#include <string>

#include "ort/library.h"

namespace headport::internal {

// The entry among a manifest's session options that names the kernels' version. It is no option of
// ONNX Runtime's.
constexpr const char* kKernelsOption = "headport.kernels";

// Registers the library that HEADPORT_KERNELS names, where `options` ask for it.
// Errors: HEADPORT_UNSUPPORTED if they ask for a version that is not known; HEADPORT_LIBRARY_ERROR
// if no library is named, or it is none, of another version, or its self-test fails.
void register_kernels(const Library& library, OrtSessionOptions* settings,
                      const std::map<std::string, std::string>& options);

}  // namespace headport::internal
