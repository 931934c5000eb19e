// The runner of TensorRT plans over a stand-in for the library, the driver's absence in all its forms,
// and build records that do not fit. What only a GPU can show is not shown here.
#include <functional>
#include <numeric>

#include "check.h"
#include "error.h"
#include "generator/generator.h"
#include "gpu/driver.h"
#include "tensorrt/engine.h"
#include "tensorrt/plan_runner.h"
#include "tensorrt/record.h"
#include "toy_plan.h"

namespace headport::internal {
namespace {

using test::kToySize;
using test::ToyState;

void check_refused(const std::string& name, headport_status status, const std::string& words,
                   const std::function<void()>& work) {
  try {
    work();
    CHECK_NAMED(false, name);
  } catch (const Error& error) {
    const std::string message = error.what();
    CHECK_NAMED(error.status() == status, name + ": " + message);
    CHECK_NAMED(message.find(words) != std::string::npos, name + ": " + message);
  }
}

// The same logits from all tokens of a row, without any cache.
class SumRunner final : public Runner {
 public:
  std::size_t width() const override { return kToySize; }
  void reserve(std::size_t rows, std::size_t) override { rows_.resize(std::max(rows, rows_.size())); }
  void begin(std::size_t row, IdSpan tokens) override { rows_[row] = {tokens.begin(), tokens.end()}; }
  void step(const std::int64_t* tokens, std::size_t count) override {
    for (std::size_t row = 0; row < count; ++row) rows_[row].push_back(tokens[row]);
  }
  const float* logits(std::size_t count) override {
    logits_.clear();
    for (std::size_t row = 0; row < count; ++row) {
      const auto sum = std::accumulate(rows_[row].begin(), rows_[row].end(), 0.0);
      for (std::size_t id = 0; id < kToySize; ++id) {
        logits_.push_back(test::toy_logit(sum, static_cast<double>(rows_[row].size()), id));
      }
    }
    return logits_.data();
  }
  void copy(std::size_t source, std::size_t target) override { rows_[target] = rows_[source]; }
  void reorder(RowSpan sources) override {
    const auto before = rows_;
    for (std::size_t row = 0; row < sources.size; ++row) rows_[row] = before[sources[row]];
  }

 private:
  std::vector<std::vector<std::int64_t>> rows_;
  std::vector<float> logits_;
};

std::unique_ptr<PlanRunner> plan_runner(ToyState& state, const std::string& dtype = "float",
                                        const std::string& ids = "int64",
                                        const std::string& head_dtype = "") {
  auto device = std::make_unique<test::ToyDevice>(state);
  auto backbone = std::make_unique<test::ToyBackbone>(state, dtype);
  backbone->ids = ids;
  auto head = std::make_unique<test::ToyHead>(state, head_dtype.empty() ? dtype : head_dtype);
  Device& where = *device;
  return std::make_unique<PlanRunner>(std::move(device),
                                      std::make_unique<Plan>("backbone.plan", std::move(backbone), where),
                                      std::make_unique<Plan>("head.plan", std::move(head), where));
}

Request request(std::int64_t limit) {
  Request found;
  found.max_new_tokens = limit;
  found.explicit_limit = true;
  return found;
}

void check_same_replies(const std::string& name, std::unique_ptr<Runner> runner, const Request& wanted,
                        const std::vector<Ids>& prompts) {
  Generator plans(std::move(runner), IdMap(kToySize), 3, 31);
  Generator plain(std::make_unique<SumRunner>(), IdMap(kToySize), 3, 31);
  const std::vector<IdSpan> spans(prompts.begin(), prompts.end());
  for (int again = 0; again < 2; ++again) {
    const auto found = plans.generate(spans, wanted), expected = plain.generate(spans, wanted);
    CHECK_NAMED(found.size() == expected.size(), name);
    for (std::size_t n = 0; n < found.size(); ++n) {
      CHECK_NAMED(found[n].token_ids == expected[n].token_ids, name);
      CHECK_NAMED(!found[n].token_ids.empty(), name);
    }
  }
}

void check_replies() {
  // More rows than a head takes at once, and prompts of one run, of several, and of single tokens.
  Ids longest(19);
  std::iota(longest.begin(), longest.end(), 3);
  const std::vector<Ids> prompts = {{1}, {2, 3}, {4, 5, 6, 7, 8, 9, 10, 11, 12}, longest, {36, 0, 5}};
  Request greedy = request(12);
  greedy.ends = {7};
  Request drawn = greedy;
  drawn.sampling.temperature = 1.0;
  drawn.seeds = {1, 2, 3, 4, 5};
  Request beams = request(8);
  beams.beams.num_beams = 4;
  beams.ends = {7};
  beams.n = 2;
  ToyState state;
  for (const std::string dtype : {"float", "float16"}) {
    for (const std::string ids : {"int64", "int32"}) {
      const std::string name = dtype + ", " + ids;
      check_same_replies("greedy, " + name, plan_runner(state, dtype, ids), greedy, prompts);
      check_same_replies("drawn, " + name, plan_runner(state, dtype, ids), drawn, prompts);
      check_same_replies("beams, " + name, plan_runner(state, dtype, ids), beams, prompts);
    }
  }
  CHECK(state.live.empty() && state.allocations > 0);
}

void check_steps() {
  ToyState state;
  auto runner = plan_runner(state);
  CHECK(runner->max_context() == 31);
  runner->reserve(2, 31);
  const auto runs = [&](std::size_t length) {
    state.runs = 0;
    runner->begin(0, Ids(length, 1));
    return state.runs;
  };
  CHECK(runs(1) == 1);
  CHECK(runs(6) == 1);
  CHECK(runs(9) == 2);   // 6 and 3
  CHECK(runs(13) == 3);  // 6, 6 and 1: the profile of prompts ends behind 8 tokens
  runner->begin(1, Ids{2, 3});
  // Blocks come back: a step takes no more memory once each of two rows has had its own.
  const std::int64_t tokens[] = {1, 2};
  runner->step(tokens, 2);
  const std::size_t before = state.allocations;
  for (int step = 0; step < 10; ++step) runner->step(tokens, 2);
  CHECK(state.allocations <= before + 2);  // the mask's own memory grows by doubling
}

void check_failures() {
  ToyState state;
  auto runner = plan_runner(state);
  PlanRunner& plans = *runner;
  plans.reserve(1, 31);
  plans.begin(0, Ids{4, 5});
  const std::int64_t token = 6;
  state.refuses = true;
  check_refused("a run", HEADPORT_LIBRARY_ERROR, "backbone.plan: the library refuses to run it (toy",
                [&] { plans.step(&token, 1); });
  plans.step(&token, 1);  // as if nothing had been
  CHECK(plans.logits(1)[5] == test::toy_logit(15.0, 3.0, 5));
  plans.begin(0, Ids(31, 1));
  check_refused("beyond the profiles", HEADPORT_LIBRARY_ERROR,
                "built for no such shapes: attention_mask [1, 32], input_ids [1, 1]",
                [&] { plans.step(&token, 1); });
  check_refused("types that do not meet", HEADPORT_BUNDLE_ERROR, "2 of float; it takes float16",
                [&] { plan_runner(state, "float", "int64", "float16"); });
  check_refused("ids of a strange type", HEADPORT_UNSUPPORTED, "int64 or int32 was expected", [&] {
    auto strange = plan_runner(state, "float", "bool");
    strange->reserve(1, 4);
    strange->begin(0, Ids{1});
  });
}

// A driver whose memory is main memory. Its functions have no state but this.
struct ToyDriver {
  static inline int init = 0, count = 1, allocate = 0, copy = 0, entered = 0;
  static inline int blocks = 0, contexts = 0, streams = 0;

  static DriverApi api() {
    DriverApi found{};
    found.init = [](unsigned) { return init; };
    found.device_count = [](int* number) { return *number = count, 0; };
    found.device_get = [](int* device, int ordinal) { return *device = ordinal, 0; };
    found.device_name = [](char* name, int, int) { return std::strcpy(name, "card"), 0; };
    found.device_attribute = [](int* value, int which, int) { return *value = which == 75 ? 8 : 9, 0; };
    found.context_retain = [](void** context, int) { return *context = &contexts, ++contexts, 0; };
    found.context_release = [](int) { return --contexts, 0; };
    found.context_use = [](void* context) { return ++entered, context == &contexts ? 0 : 1; };
    found.stream_create = [](void** stream, unsigned) { return *stream = &streams, ++streams, 0; };
    found.stream_destroy = [](void*) { return --streams, 0; };
    found.stream_wait = [](void* stream) { return stream == &streams ? 0 : 1; };
    found.allocate = [](std::uint64_t* address, std::size_t size) {
      *address = reinterpret_cast<std::uintptr_t>(std::malloc(size));
      return ++blocks, allocate;
    };
    found.free = [](std::uint64_t address) {
      std::free(reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)));
      return --blocks, 0;
    };
    found.upload = [](std::uint64_t to, const void* from, std::size_t size, void*) {
      std::memcpy(reinterpret_cast<void*>(static_cast<std::uintptr_t>(to)), from, size);
      return copy;
    };
    found.download = [](void* to, std::uint64_t from, std::size_t size, void*) {
      std::memcpy(to, reinterpret_cast<void*>(static_cast<std::uintptr_t>(from)), size);
      return copy;
    };
    return found;
  }
};

void check_driver() {
  check_refused("no driver", HEADPORT_NO_GPU, "libnone.so, was looked for and cannot be loaded",
                [] { load_driver("libnone.so"); });
  check_refused("another library", HEADPORT_NO_GPU, "without cuInit was found",
                [] { load_driver("libm.so.6"); });
  const DriverApi api = ToyDriver::api();
  ToyDriver::init = 100;
  check_refused("no device", HEADPORT_NO_GPU, "cuInit gives 100", [&] { find_gpu(api); });
  ToyDriver::init = 0;
  ToyDriver::count = 0;
  check_refused("no card", HEADPORT_NO_GPU, "knows none", [&] { find_gpu(api); });
  ToyDriver::count = 1;
  const Gpu gpu = find_gpu(api);
  CHECK(gpu.name == "card" && gpu.compute_capability == "SM89");
  {
    CudaDevice device(api);
    const std::vector<int> sent = {1, 2, 3};
    std::vector<int> back(3);
    const std::size_t size = sent.size() * sizeof(int);
    BlockPool pool(device, size);
    void* first = pool.get().get();
    CHECK(pool.get().get() == first);
    const BlockPool::Block block = pool.get();
    device.upload(block.get(), sent.data(), size);
    device.download(back.data(), block.get(), size);
    CHECK(back == sent && ToyDriver::entered > 2);
    ToyDriver::copy = 700;
    check_refused("a copy", HEADPORT_LIBRARY_ERROR, "cuMemcpyDtoHAsync: CUDA error 700",
                  [&] { device.download(back.data(), block.get(), size); });
    ToyDriver::copy = 0;
    CHECK(ToyDriver::blocks == 1 && ToyDriver::contexts == 1 && ToyDriver::streams == 1);
  }
  CHECK(ToyDriver::blocks == 0 && ToyDriver::contexts == 0 && ToyDriver::streams == 0);
}

void check_records() {
  EngineRecord record;
  record.plan = "engines/backbone.plan";
  record.backend = "tensorrt-rtx";
  record.backend_version = "1.7.1.116";
  record.compute_capabilities = {"SM86", "SM89"};
  record.command = "headport engine a -o b";
  require_gpu(record, {"card", "SM89"});
  check_refused("another GPU", HEADPORT_NO_GPU, "was built for SM86, SM89; the GPU here, card, is SM90",
                [&] { require_gpu(record, {"card", "SM90"}); });
  require_version(record, "1.7.1.116");
  check_refused("another version", HEADPORT_LIBRARY_ERROR, "1.8.0.1 was loaded",
                [&] { require_version(record, "1.8.0.1"); });
  record.flags = {"VERSION_COMPATIBLE"};
  require_version(record, "1.8.0.1");
  record.compute_capabilities = {};
  require_gpu(record, {"card", "SM90"});
  for (const char* name : {"tensorrt", "tensorrt-rtx"}) {
    try {  // of one of the two at most this build has the headers
      load_tensorrt(name, "/nowhere/libtensorrt.so");
      CHECK_NAMED(false, name);
    } catch (const Error& error) {
      CHECK_NAMED(error.status() == HEADPORT_UNSUPPORTED || error.status() == HEADPORT_LIBRARY_ERROR,
                  error.what());
      CHECK_NAMED(std::string(error.what()).find("TENSORRT") != std::string::npos, error.what());
    }
  }
}

}  // namespace
}  // namespace headport::internal

int main() {
  using namespace headport::internal;
  check_replies();
  check_steps();
  check_failures();
  check_driver();
  check_records();
  return headport::test::result();
}
