// Time per token outside ONNX Runtime: `overhead_benchmark [V]`, 49,152 by default.
//
// The generator runs over a table of logits, so nothing but choosing and keeping books is timed.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "generator/generator.h"
#include "table_runner.h"

namespace headport::internal {
namespace {

constexpr std::size_t kRows = 16;  // different rows of logits
constexpr std::int64_t kTokens = 2000;

// `peaked` lifts a few ids far above the others, as models do where they know how a text goes on.
std::vector<std::vector<float>> table(std::size_t size, bool peaked) {
  std::mt19937 random(0);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<std::vector<float>> found(kRows, std::vector<float>(size));
  for (auto& row : found) {
    for (float& each : row) each = normal(random);
    for (std::size_t n = 0; peaked && n < 20; ++n) row[random() % size] = 16.0f + normal(random);
  }
  return found;
}

void time_mode(const char* name, const Sampling& sampling, std::size_t size, bool peaked = false) {
  using Clock = std::chrono::steady_clock;
  Generator generator(std::make_unique<test::TableRunner>(table(size, peaked)),
                      IdMap(static_cast<std::int64_t>(size)), 1, kTokens + 1);
  std::vector<double> times_us;
  times_us.reserve(static_cast<std::size_t>(kTokens));
  Clock::time_point before = Clock::now();
  Request request;
  request.sampling = sampling;
  request.seeds = {1};
  request.max_new_tokens = kTokens;
  request.on_token = [&](const headport_token&) {
    const Clock::time_point now = Clock::now();
    times_us.push_back(std::chrono::duration<double, std::micro>(now - before).count());
    before = now;
    return true;
  };
  const Ids prompt = {1};
  generator.generate({prompt}, request);
  std::sort(times_us.begin(), times_us.end());
  std::printf("%-28s %8.1f %8.1f %8.1f\n", name, times_us.front(), times_us[times_us.size() / 2],
              times_us[times_us.size() * 95 / 100]);
}

void run(std::size_t size) {
  std::printf("V = %zu, %lld tokens each\n%-28s %8s %8s %8s\n", size,
              static_cast<long long>(kTokens), "us per token", "least", "median", "p95");
  Sampling sampling;
  time_mode("greedy", sampling, size);
  sampling.repetition_penalty = 1.1;
  time_mode("greedy, repetition penalty", sampling, size);
  sampling = {};
  sampling.temperature = 1.0;
  time_mode("temperature", sampling, size);
  sampling.top_k = 50;
  time_mode("top-k 50", sampling, size);
  sampling.top_p = 0.9;
  time_mode("top-k 50, top-p 0.9", sampling, size);
  sampling.repetition_penalty = 1.1;
  time_mode("the same, repetition penalty", sampling, size);
  sampling = {};
  sampling.temperature = 1.0;
  sampling.min_p = 0.1;
  time_mode("min-p 0.1", sampling, size);
  sampling = {};
  sampling.temperature = 1.0;
  sampling.top_p = 0.9;
  time_mode("top-p 0.9", sampling, size);
  time_mode("top-p 0.9, peaked", sampling, size, true);
}

}  // namespace
}  // namespace headport::internal

int main(int count, char** arguments) {
  headport::internal::run(count > 1 ? std::strtoul(arguments[1], nullptr, 10) : 49152);
}
