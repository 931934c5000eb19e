// One row of a head that gives candidates: its best tokens by their bounds, scored with the original
// weight, and how many of them are proved to be in their place. docs/exact-head.md has the proof.
#pragma once

#include <cstdint>

#include "product.h"

namespace headport::kernels {

// What the row's logits go through, and how far float64 may be off.
struct Terms {
  double scale;
  double softcap;  // 0: none
  double error_slope;
  double error_rest;  // error = ‖x‖ · slope + rest
};

struct Candidates {
  std::int64_t V, H, count;
  bool certified;
  Terms terms;
  const float* x;       // [H]
  Keys keys;            // bounds and noise, [V]
  const float* logits;  // quantised, [V]
  const float* weight;  // original, [V, H]
  const float* bias;    // [V]; null: none
  const std::int64_t* firsts;  // lowest id of equal rows, [V]; null: no two rows are equal

  // What is found.
  std::int64_t* ids;       // [count], by logit, equal ones by id
  double* candidate_logits;  // [count]
  double* logsumexp;
  std::int64_t* certified_k;
  double* cut;
  double* error;

  void run(const Kernel& kernel) const;
};

}  // namespace headport::kernels
