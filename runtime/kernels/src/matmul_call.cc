#include "matmul_call.h"

#include <array>
#include <utility>

namespace headport::kernels {
namespace {

constexpr std::array<std::pair<const char*, Activation>, 3> kActivations{
    {{"none", Activation::kNone},
     {"silu", Activation::kSilu},
     {"gelu_tanh", Activation::kGeluTanh}}};

}  // namespace

Form read_form(const OrtKernelInfo* info) {
  const Form form{whole_attribute(info, "N"), whole_attribute(info, "K"),
                  whole_attribute(info, "block_size"),
                  static_cast<int>(whole_attribute(info, "bits")),
                  static_cast<int>(whole_attribute(info, "activation_bits"))};
  const bool sizes = form.N > 0 && form.K > 0;
  const bool block = form.block == 32 || form.block == 64 || form.block == 128 || form.block == 256;
  if (!sizes || !block || (form.bits != 4 && form.bits != 8))
    throw Failure("N and K above 0, bits 4 or 8 and a block_size of 32, 64, 128 or 256 were "
                  "expected; N " + std::to_string(form.N) + ", K " + std::to_string(form.K) + ", bits " +
                  std::to_string(form.bits) + ", block_size " + std::to_string(form.block) +
                  " were found");
  if (form.activation_bits != 16 && (form.activation_bits != 8 || form.bits != 4))
    throw Failure("activation_bits 16, or 8 with weights of 4 bits, were expected; " +
                  std::to_string(form.activation_bits) + " with weights of " +
                  std::to_string(form.bits) + " were found");
  return form;
}

Activation read_activation(const OrtKernelInfo* info, const Form& form) {
  const std::string given = text_attribute(info, "activation");
  for (const auto& [name, activation] : kActivations)
    if (given == name) {
      if (activation != Activation::kNone && form.N % 2 != 0)
        throw Failure("an even N was expected for activation " + given + ", " +
                      std::to_string(form.N) + " was found");
      return activation;
    }
  throw Failure("activation none, silu or gelu_tanh was expected, " + given + " was found");
}

}  // namespace headport::kernels
