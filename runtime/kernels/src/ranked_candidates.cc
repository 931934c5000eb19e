// candidate_ids, candidate_logits, logsumexp, certified_k, cut, error =
//     RankedCandidates(x, upper, noise, logits, weight, terms, bias, firsts)
//     attributes count, certified
//
// A head that gives candidates behind its quantised product: x float32 [N, H]; upper float32 [N, V],
// which no exact logit exceeds; noise float32 [N or 1, V or 1]; logits float32 [N, V], quantised;
// weight float32 [V, H], the original one; terms float64 [4]: scale, softcap (0: none), and slope and
// rest of what float64 may be off by; bias float32 [V], firsts int64 [V]: the lowest id of equal rows;
// these two may be left out. Candidates are `count` per row; certified 0 proves nothing.
#include "candidates.h"

#include "operator.h"

namespace headport::kernels {
namespace {

enum Input : std::size_t {
  kX, kUpper, kNoise, kLogits, kWeight, kTerms, kBias, kFirsts, kInputs
};
enum Output : std::size_t { kIds, kValues, kLogsumexp, kProved, kCut, kError, kOutputs };
constexpr std::int64_t kTermCount = 4;

struct RankedCandidates {
  static constexpr const char* kName = "RankedCandidates";
  static constexpr std::size_t kInputCount = kInputs;
  static constexpr std::size_t kOutputCount = kOutputs;
  static ONNXTensorElementDataType input_type(std::size_t index) {
    if (index == kTerms) return ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
    return index == kFirsts ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                            : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static ONNXTensorElementDataType output_type(std::size_t index) {
    return index == kIds || index == kProved ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                                             : ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  }
  static bool is_optional_input(std::size_t index) { return index >= kBias; }
  static bool is_optional_output(std::size_t) { return false; }

  std::int64_t count;
  bool certified;
  const Kernel& kernel;

  explicit RankedCandidates(const OrtKernelInfo* info)
      : count(whole_attribute(info, "count")),
        certified(whole_attribute(info, "certified") != 0),
        kernel(find_kernel()) {}

  // All but what differs from row to row.
  Candidates read(OrtKernelContext* context, const std::vector<std::int64_t>& weight) const {
    const std::int64_t V = weight[0];
    const OrtValue* bias = find_input(context, kBias);
    const OrtValue* firsts = find_input(context, kFirsts);
    const auto* terms = read_input<double>(context, kTerms, kTermCount, "terms");
    Candidates call{};
    call.V = V;
    call.H = weight[1];
    call.count = count;
    call.certified = certified;
    call.terms = {terms[0], terms[1], terms[2], terms[3]};
    call.weight = data_of<float>(find_input(context, kWeight));
    if (bias != nullptr) call.bias = elements_of<float>(bias, V, "bias");
    if (firsts != nullptr) call.firsts = elements_of<std::int64_t>(firsts, V, "firsts");
    return call;
  }

  void compute(OrtKernelContext* context) const {
    const std::vector<std::int64_t> dims = dims_of(find_input(context, kX));
    const std::vector<std::int64_t> weight = dims_of(find_input(context, kWeight));
    if (dims.size() != 2 || weight.size() != 2 || weight[1] != dims[1] || count < 1 ||
        weight[0] <= count)
      throw Failure("x [N, H] and a weight [V, H] with V above " + std::to_string(count) +
                    ", which is at least 1, were expected");
    const std::int64_t N = dims[0];
    const std::int64_t V = weight[0];
    const Candidates shared = read(context, weight);
    const auto* x = data_of<float>(find_input(context, kX));
    const auto* upper = read_input<float>(context, kUpper, N * V, "upper");
    const auto* logits = read_input<float>(context, kLogits, N * V, "logits");
    const OrtValue* given = find_input(context, kNoise);
    const std::vector<std::int64_t> noise = dims_of(given);
    if (noise.size() != 2 || (noise[0] != 1 && noise[0] != N) || (noise[1] != 1 && noise[1] != V))
      throw Failure("noise [1, 1], [N, 1], [1, V] or [N, V] was expected");
    auto* ids = data_of<std::int64_t>(make_output(context, kIds, {N, count}));
    auto* values = data_of<double>(make_output(context, kValues, {N, count}));
    auto* logsumexp = data_of<double>(make_output(context, kLogsumexp, {N}));
    auto* proved = data_of<std::int64_t>(make_output(context, kProved, {N}));
    auto* cut = data_of<double>(make_output(context, kCut, {N}));
    auto* error = data_of<double>(make_output(context, kError, {N}));
    const auto run = [&](std::int64_t n) {
      Candidates row = shared;
      const float* noise_row = data_of<float>(given) + (noise[0] == 1 ? 0 : n * noise[1]);
      row.x = x + n * row.H;
      row.keys = {upper + n * V, noise_row, noise[1] == 1 ? 0 : 1};
      row.logits = logits + n * V;
      row.ids = ids + n * count;
      row.candidate_logits = values + n * count;
      row.logsumexp = logsumexp + n;
      row.certified_k = proved + n;
      row.cut = cut + n;
      row.error = error + n;
      row.run(kernel);
    };
    if (N == 1) return run(0);
    in_parallel(context, N, run);
  }
};

}  // namespace

const OrtCustomOp* ranked_candidates() {
  static const Operator<RankedCandidates> made;
  return &made;
}

}  // namespace headport::kernels
