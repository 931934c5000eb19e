// What chunks of keys weigh, put together: the online softmax of Milakov and Gimelshein 2018
// (arXiv:1805.02867).
#pragma once

#include "product.h"

namespace headport::kernels {

// Takes in what the next chunk weighs. Chunks are folded one by one in their order, whoever computed
// them, so that the result is the same bit for bit.
void fold(const Partial& found, const Partial& next, std::int64_t queries, std::int64_t D);

// Divides by the sums: out = softmax(s) · values. NaN where nothing weighs anything.
void finish(const Partial& found, std::int64_t queries, std::int64_t D);

}  // namespace headport::kernels
