#include "generator/certificate_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "bundle/ledger.h"
#include "error.h"
#include "generator/ports.h"
#include "generator/probes.h"

namespace headport::internal {
namespace {

using Numbers = std::vector<double>;

constexpr std::size_t kSampledRows = 2048;  // at load; a kernel's faults do not pick rows
constexpr double kZeroPoint = 128.0;        // of the lowered weight
// src/headport/certificate.py explains each.
constexpr double kUnit = 0x1p-24, kUnderflow = 0x1p-90, kNormUnderflow = 0x1p-58;
constexpr double kTanhError = 0x1p-19;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool ends_in(const std::string& name, const std::string& end) {
  return name.size() >= end.size() &&
         name.compare(name.size() - end.size(), end.size(), end) == 0;
}

std::string stem_of(std::string initializer) {
  for (const char* end : {".nbits", ".int8"}) {
    if (ends_in(initializer, end)) initializer.resize(initializer.size() - std::strlen(end));
  }
  return initializer;
}

// The weight that a head's graph reads, and its name in there.
std::pair<const Tensor*, std::string> weight_of(const Manifest& manifest, const Head& head) {
  const std::string prefix = head.graph + ":";
  for (const Tensor& tensor : manifest.tensors) {
    if (tensor.name != head.weight) continue;
    for (const std::string& consumer : tensor.consumers) {
      if (consumer.compare(0, prefix.size(), prefix) == 0) {
        return {&tensor, consumer.substr(prefix.size())};
      }
    }
  }
  throw Error(HEADPORT_BUNDLE_ERROR, text("the tensor ledger has no weight ", head.weight, " that ",
                                          head.graph, " reads"));
}

const Tensor& original_of(const Manifest& manifest, const Head& head) {
  for (const Tensor& tensor : manifest.tensors) {
    if (tensor.name == head.candidates->original) return tensor;
  }
  throw Error(HEADPORT_BUNDLE_ERROR,
              text("the tensor ledger has no weight ", head.candidates->original));
}

// A certified head's tensors, by rows, in float64.
class Weights {
 public:
  Weights(const Bundle& bundle, const Head& head)
      : head_(head),
        stored_(bundle, *weight_of(bundle.manifest(), head).first),
        scale_(bundle, find_tensor(bundle.manifest(), head.graph,
                                   stem_of(weight_of(bundle.manifest(), head).second) + ".scale")),
        original_(bundle, original_of(bundle.manifest(), head)) {
    if (head.bias) {
      bias_.emplace(bundle, find_tensor(bundle.manifest(), head.graph, "candidates.bias"));
    }
    block_ = static_cast<std::size_t>(head.quantization->block.value_or(0));
    const bool fits = block_ > 0 && scale_.width() * block_ >= width() &&
                      stored_.width() >= width() && stored_.rows() == rows() &&
                      scale_.rows() == rows();
    if (!fits) {
      throw Error(HEADPORT_BUNDLE_ERROR,
                  text(bundle.path().string(), ": the weights of a certified head do not fit each "
                       "other; quantise the bundle again"));
    }
  }

  std::size_t rows() const { return original_.rows(); }
  std::size_t width() const { return original_.width(); }
  std::size_t block() const { return block_; }
  std::size_t blocks() const { return scale_.width(); }
  const Head& head() const { return head_; }

  void read(std::size_t row) {
    original_.read(row, original);
    scale_.read(row, scale);
    stored_.read(row, rounded);
    const double zero = stored_.dtype() == "uint8" ? kZeroPoint : 0.0;
    rounded.resize(width());
    for (std::size_t n = 0; n < width(); ++n) rounded[n] = (rounded[n] - zero) * scale[n / block_];
    if (bias_) {
      bias_->read(row, one_);
      bias = one_[0];
    }
  }
  // softcap(scale · linear)
  double mapped(double linear) const {
    const double logit = head_.scale * linear;
    return head_.softcap ? *head_.softcap * std::tanh(logit / *head_.softcap) : logit;
  }
  // What the float32 softcap may be off by.
  double map_error() const { return head_.softcap.value_or(0.0) * (kTanhError + 0x1p-21); }

  // Of the row that was read: W, Ŵ, the scales of its blocks, b.
  Numbers original, rounded, scale;
  double bias = 0.0;

 private:
  const Head& head_;
  RowReader stored_, scale_, original_;
  std::optional<RowReader> bias_;
  std::size_t block_ = 0;
  Numbers one_;
};

// Euclidean norm of each block.
void block_norms(const Numbers& values, std::size_t block, std::size_t blocks, Numbers& norms) {
  norms.assign(blocks, 0.0);
  for (std::size_t n = 0; n < values.size(); ++n) norms[n / block] += values[n] * values[n];
  for (double& each : norms) each = std::sqrt(each);
}

double product(const Numbers& a, const Numbers& b) {
  double sum = 0.0;
  for (std::size_t n = 0; n < a.size(); ++n) sum += a[n] * b[n];
  return sum;
}

// INT8 multiples of max|x_k| / 127, as the graph computes them in float32.
Numbers round_activations(const Numbers& x, std::size_t block) {
  Numbers found(x.size());
  for (std::size_t first = 0; first < x.size(); first += block) {
    const std::size_t last = std::min(x.size(), first + block);
    float largest = 0.0f;
    for (std::size_t n = first; n < last; ++n) {
      largest = std::max(largest, std::abs(static_cast<float>(x[n])));
    }
    const float step = largest / 127.0f;
    const float safe = step == 0.0f ? 1.0f : step;
    for (std::size_t n = first; n < last; ++n) {
      found[n] = static_cast<double>(std::nearbyint(static_cast<float>(x[n]) / safe) * safe);
    }
  }
  return found;
}

// One hidden state and what the proof needs of it.
struct Probe {
  Numbers x, given, norms, lost;  // given: what the kernel is given; norms of x and of x - given
};

// How far the kernel may be from Ŵ_v·x + b_v, per unit of ‖x_k‖, of each block.
void kernel_allowance(const Weights& weights, const Numbers& norms, Numbers& allowance) {
  const auto blocks = static_cast<double>(weights.blocks());
  const auto block = static_cast<double>(weights.block());
  const std::string& activations = weights.head().quantization->activations;
  const double lost = activations == "residual" ? 1.0 / (4.0 * 127.0 * 127.0)
                      : activations == "rounded" ? 1.0 / (2.0 * 127.0)
                                                 : 0.0;
  double share = lost * std::sqrt(block) * (1.0 + 0x1p-10);
  double floats = kUnit * (static_cast<double>(weights.width()) + 3.0 * blocks + 64.0);
  double integers = kUnit * (2.0 * blocks + 64.0) * 512.0 * std::sqrt(block);
  if (activations == "rounded") {
    floats *= 1.0 + share;
    integers *= 1.0 + share;
    share = 0.0;
  }
  allowance.resize(norms.size());
  for (std::size_t k = 0; k < norms.size(); ++k) {
    allowance[k] = norms[k] * (share + floats) + weights.scale[k] * integers;
  }
}

double constant_slack(const Weights& weights, const Numbers& norms, const Numbers& allowance) {
  double columns = 0.0;
  for (std::size_t k = 0; k < norms.size(); ++k) columns += norms[k] + allowance[k];
  const double slack = kUnderflow + kNormUnderflow * columns;
  if (!weights.head().bias) return slack;
  const double terms = static_cast<double>(weights.width() + 3 * weights.blocks() + 64);
  return slack + kUnit * terms * std::abs(weights.bias);
}

double or_infinity(double share) { return std::isnan(share) ? kInfinity : share; }

States sampled_rows(Weights& weights, std::size_t count) {
  States found;
  for (std::size_t n = 0; n < count; ++n) {
    weights.read(count == 1 ? 0 : n * (weights.rows() - 1) / (count - 1));
    found.push_back(weights.rounded);
  }
  return found;
}

// A head with a softcap is given states that leave it its slope.
double largest_state(Weights& weights) {
  if (!weights.head().softcap) return 1.0;
  double size = 0.0;
  for (const Numbers& row : sampled_rows(weights, std::min<std::size_t>(64, weights.rows()))) {
    double sum = 0.0;
    for (const double each : row) sum += std::abs(each);
    size = std::max(size, sum);
  }
  return *weights.head().softcap / (weights.head().scale * (size > 0.0 ? size : 1.0));
}

std::vector<Probe> prepared(Weights& weights, States states, bool half) {
  std::vector<Probe> found;
  const bool rounds = weights.head().quantization->activations == "rounded";
  for (Numbers& x : states) {
    for (double& each : x) {
      each = half ? from_half(to_half(each)) : static_cast<double>(static_cast<float>(each));
    }
    Probe probe;
    probe.given = rounds ? round_activations(x, weights.block()) : x;
    block_norms(x, weights.block(), weights.blocks(), probe.norms);
    Numbers rest(x.size());
    for (std::size_t n = 0; n < x.size(); ++n) rest[n] = x[n] - probe.given[n];
    block_norms(rest, weights.block(), weights.blocks(), probe.lost);
    probe.x = std::move(x);
    found.push_back(std::move(probe));
  }
  return found;
}

// Hidden states in the type that the head takes.
std::vector<char> encoded(const std::vector<Probe>& probes, bool half) {
  std::vector<char> found;
  for (const Probe& probe : probes) {
    for (const double each : probe.x) {
      const auto single = static_cast<float>(each);
      const std::uint16_t narrow = to_half(each);
      const char* bytes = half ? reinterpret_cast<const char*>(&narrow)
                               : reinterpret_cast<const char*>(&single);
      found.insert(found.end(), bytes, bytes + (half ? sizeof narrow : sizeof single));
    }
  }
  return found;
}

// What the head said of one probe, kept while others are asked for.
struct Answer {
  std::vector<float> logits, upper;
  std::vector<std::int64_t> ids;
  Numbers values;
  std::size_t proved = 0;
  double error = 0.0;
};

std::vector<Answer> ask(HeadSession& session, std::size_t count) {
  std::vector<Answer> found(count);
  for (std::size_t n = 0; n < count; ++n) {
    Answer& answer = found[n];
    const QuantisedLogits quantised = session.quantised(n);
    answer.logits.assign(quantised.logits, quantised.logits + session.width());
    answer.upper.assign(quantised.upper_bounds, quantised.upper_bounds + session.width());
    const Candidates best = session.pick({&n, 1}, nullptr);
    answer.ids.assign(best.columns, best.columns + best.count);
    answer.values.assign(best.logits, best.logits + best.count);
    answer.proved = static_cast<std::size_t>(std::max<std::int64_t>(0, best.proved[0]));
    answer.error = best.error[0];
  }
  return found;
}

// One row of the weight against all probes.
void compare_row(const Weights& weights, std::size_t row, const std::vector<Probe>& probes,
                 const std::vector<Answer>& answers, CertificateCheck& found) {
  Numbers norms, lost, allowance, rest(weights.width());
  for (std::size_t n = 0; n < rest.size(); ++n) rest[n] = weights.original[n] - weights.rounded[n];
  block_norms(weights.rounded, weights.block(), weights.blocks(), norms);
  block_norms(rest, weights.block(), weights.blocks(), lost);
  kernel_allowance(weights, norms, allowance);
  const double constant = constant_slack(weights, norms, allowance);
  const auto map = [&](double linear) { return weights.mapped(linear); };
  for (std::size_t n = 0; n < probes.size(); ++n) {
    const Probe& probe = probes[n];
    const Answer& answer = answers[n];
    const double linear = product(probe.given, weights.rounded) + weights.bias;
    const double exact = map(product(probe.x, weights.original) + weights.bias);
    const double needed = product(probe.norms, lost) + product(probe.lost, norms);
    const double allowed = product(probe.norms, allowance) + constant;
    const double centre = map(linear), slack = weights.map_error();
    const double error = static_cast<double>(answer.logits[row]) - centre;
    const double room = error >= 0.0 ? map(linear + allowed) + slack - centre
                                     : map(linear - allowed) - slack - centre;
    found.kernel_share = std::max(found.kernel_share, or_infinity(error / room));
    const double upper = static_cast<double>(answer.upper[row]);
    // What the kernel was off by is the bound's to cover, and float64 rounds as well.
    const double above = upper - centre + kUnit * std::abs(upper) + 0x1p-140;
    const double share = (map(linear + needed) - centre) / std::max(above, 0x1p-149);
    found.bound_share = std::max(found.bound_share, or_infinity(share));
    ++found.logits;
    if (answer.proved == 0) continue;
    const auto end = answer.ids.begin() + static_cast<std::ptrdiff_t>(answer.proved);
    const bool outside = std::find(answer.ids.begin(), end, static_cast<std::int64_t>(row)) == end;
    const double limit = answer.values[answer.proved - 1] + 2.0 * answer.error;
    if (outside && exact > limit) ++found.wrong;
  }
}

// Candidates' logits, and their order.
std::size_t inexact(Weights& weights, const std::vector<Probe>& probes,
                    const std::vector<Answer>& answers) {
  std::size_t count = 0;
  for (std::size_t n = 0; n < probes.size(); ++n) {
    const Answer& answer = answers[n];
    for (std::size_t rank = 0; rank < answer.ids.size(); ++rank) {
      const auto id = static_cast<std::size_t>(answer.ids[rank]);
      if (id >= weights.rows()) {
        ++count;
        continue;
      }
      weights.read(id);
      const double exact = weights.mapped(product(probes[n].x, weights.original) + weights.bias);
      if (!(std::abs(answer.values[rank] - exact) <= 2.0 * answer.error)) ++count;
      if (rank > 0 && answer.values[rank] > answer.values[rank - 1]) ++count;
    }
  }
  return count;
}

}  // namespace

CertificateCheck check_certificate(const Bundle& bundle, const std::string& name,
                                   HeadSession& session, std::size_t rows) {
  constexpr std::size_t kAlignedRows = 3;
  const Head& head = bundle.manifest().heads.at(name);
  if (!head.quantization || !head.candidates) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(bundle.path().string(), ": head '", name,
                                            "' says nothing of its quantisation"));
  }
  Weights weights(bundle, head);
  const double largest = largest_state(weights);
  States states = probes_of(bundle, sampled_rows(weights, kAlignedRows), largest);
  for (const Numbers& x : states) {
    if (x.size() != weights.width()) {
      throw Error(HEADPORT_BUNDLE_ERROR, text(bundle.path().string(), ": hidden states of ",
                                              weights.width(), " numbers were expected, of ",
                                              x.size(), " were found"));
    }
  }
  const bool half = session.hidden_dtype() == "float16";
  const std::vector<Probe> probes = prepared(weights, std::move(states), half);
  const std::vector<char> hidden = encoded(probes, half);
  session.use(hidden.data(), probes.size());
  const std::vector<Answer> answers = ask(session, probes.size());
  CertificateCheck found;
  const std::size_t count = std::min(weights.rows(), session.width());
  const std::size_t step = std::max<std::size_t>(1, count / rows);
  for (std::size_t row = 0; row < count; row += step) {
    weights.read(row);
    compare_row(weights, row, probes, answers, found);
  }
  found.wrong += inexact(weights, probes, answers);
  return found;
}

void require_certificate(const Bundle& bundle, const std::string& name, HeadSession& session) {
  const CertificateCheck found = check_certificate(bundle, name, session, kSampledRows);
  if (found.holds()) return;
  throw Error(HEADPORT_BUNDLE_ERROR,
              text(bundle.path().string(), ": head '", name, "': certificate BROKEN: kernel within ",
                   found.kernel_share * 100.0, "% of its allowance, bound used to ",
                   found.bound_share * 100.0, "%, ", found.wrong, " wrong candidates (",
                   found.logits, " logits); this CPU or ONNX Runtime computes in another way than "
                   "the proof assumes, or the bundle was changed"));
}

}  // namespace headport::internal
