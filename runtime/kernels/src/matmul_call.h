// One call of BlockMatMul: its attributes, its memory, and what is done to rows before the product.
#pragma once

#include "ort_api.h"
#include "product.h"
#include "scratch.h"

namespace headport::kernels {

Form read_form(const OrtKernelInfo* info);
Activation read_activation(const OrtKernelInfo* info, const Form& form);

// For each thread that runs a session.
struct Buffers {
  Scratch<std::int16_t> q;
  Scratch<std::int8_t> byte_q;
  Scratch<float> step;
  Scratch<std::int32_t> offset;
  Scratch<std::int16_t> byte_offset;
  Scratch<float> normed;
  Scratch<float> product;

  void round_into(Operands& operands) {
    const Form& form = operands.form;
    const std::int64_t blocks = operands.rows * form.blocks();
    float* steps = step.sized(blocks);
    if (form.activation_bits == 8)
      operands.bytes = {
          byte_q.sized(operands.rows * RoundedBytes::padded(form)), steps,
          byte_offset.sized(operands.rows * RoundedBytes::sums(form) * kByteParts)};
    else
      operands.rounded = {q.sized(operands.rows * form.padded()), steps,
                          offset.sized(blocks * kParts)};
  }
};

// One call: what is done to rows before the product, and where all of it lies.
struct Before {
  const float* x = nullptr;
  const float* skip = nullptr;
  const float* gamma = nullptr;  // null: rows are multiplied as they are
  float epsilon = 0;
  float* sum = nullptr;
  float* normed = nullptr;

  void run(std::int64_t K, std::int64_t row, const Kernel& kernel) const {
    const std::int64_t at = row * K;
    kernel.normalise({x + at, skip == nullptr ? nullptr : skip + at, gamma, epsilon, K,
                      (sum == nullptr ? normed : sum) + at, normed + at});
  }
};

}  // namespace headport::kernels
