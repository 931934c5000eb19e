// Threads on one generator and on several, and calls that another thread ends:
// `threads_test BUNDLE`; ONNX Runtime is $HEADPORT_ORT. Meant for ThreadSanitizer, and right without.
#include <atomic>
#include <cstdio>
#include <functional>
#include <headport/headport.hpp>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using headport::TokenIds;

constexpr int kThreads = 4;
constexpr int kCalls = 5;
constexpr std::int64_t kTokens = 12;

// The same model on one thread of ONNX Runtime's, so that what is looked for is in this library.
headport_settings settings() {
  headport_settings found = headport::default_settings();
  found.threads = 1;
  found.max_rows = 2;
  return found;
}

TokenIds prompt_of(int thread) { return {5 + thread, 9, 2}; }

std::vector<TokenIds> replies_of(headport::Generator& generator, int thread) {
  headport::Options options = generator.options();
  options.max_new_tokens = kTokens;
  options.temperature = 1.0;
  options.n = 3;  // more than there are rows
  options.set_seed(static_cast<std::uint64_t>(thread));
  std::vector<TokenIds> found;
  for (headport::Reply& reply : generator.generate({prompt_of(thread)}, options)) {
    found.push_back(std::move(reply.token_ids));
  }
  return found;
}

void in_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int n = 0; n < kThreads; ++n) threads.emplace_back(work, n);
  for (std::thread& each : threads) each.join();
}

// Each thread gets what it gets alone, whoever else calls.
void check_one_generator(headport::Generator& generator,
                         const std::vector<std::vector<TokenIds>>& expected) {
  std::atomic<int> wrong{0};
  in_threads([&](int thread) {
    for (int call = 0; call < kCalls; ++call) {
      if (replies_of(generator, thread) != expected[static_cast<std::size_t>(thread)]) ++wrong;
      if (generator.info().kept_size < 1) ++wrong;
    }
  });
  CHECK(wrong == 0);
}

// Opened, used and closed at the same time.
void check_several_generators(const char* bundle,
                              const std::vector<std::vector<TokenIds>>& expected) {
  std::atomic<int> wrong{0};
  in_threads([&](int thread) {
    for (int call = 0; call < 2; ++call) {
      headport::Generator own(bundle, settings());
      if (replies_of(own, thread) != expected[static_cast<std::size_t>(thread)]) ++wrong;
    }
  });
  CHECK(wrong == 0);
}

// A call is ended from another thread as soon as its first token is there, or while it waits.
void check_cancellation(headport::Generator& generator,
                        const std::vector<std::vector<TokenIds>>& expected) {
  std::atomic<int> ended{0};
  in_threads([&](int thread) {
    headport::Cancel cancel;
    std::atomic<bool> begun{false};
    headport::Options options = generator.options();
    options.max_new_tokens = 40;
    options.set_eos_token_ids({});
    options.set_cancel(cancel);
    std::thread other([&] {
      while (thread % 2 == 0 && !begun) std::this_thread::yield();
      cancel.request();
    });
    // A second step is not begun before the other thread has asked for the end.
    options.set_on_token([&](const headport_token&) {
      begun = true;
      if (other.joinable()) other.join();
      return true;
    });
    try {
      generator.generate({prompt_of(thread)}, options);
    } catch (const headport::Error& error) {
      if (error.status() == HEADPORT_CANCELLED) ++ended;
    }
    if (other.joinable()) other.join();
  });
  CHECK(ended == kThreads);
  CHECK(replies_of(generator, 0) == expected[0]);
}

// Each thread has its own last error.
void check_errors(headport::Generator& generator) {
  std::atomic<int> wrong{0};
  in_threads([&](int thread) {
    for (int call = 0; call < kCalls; ++call) {
      try {
        generator.generate({{1, -1 - thread}});
        ++wrong;
      } catch (const headport::Error& error) {
        const std::string named = "holds " + std::to_string(-1 - thread) + ",";
        if (std::string(error.what()).find(named) == std::string::npos) ++wrong;
      }
    }
  });
  CHECK(wrong == 0);
}

// Settings of TensorRT plans, for a bundle that has none.
void check_foreign_settings(const char* bundle) {
  headport_settings given = settings();
  given.cuda_graphs = 1;
  try {
    const headport::Generator generator(bundle, given);
    CHECK(false);
  } catch (const headport::Error& error) {
    CHECK(error.status() == HEADPORT_REQUEST_ERROR);
    CHECK(std::string(error.what()).find("cuda_graphs are for bundles of") != std::string::npos);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: threads_test BUNDLE\n");
    return 2;
  }
  try {
    headport::Generator generator(arguments[1], settings());
    std::vector<std::vector<TokenIds>> expected;
    for (int n = 0; n < kThreads; ++n) expected.push_back(replies_of(generator, n));
    check_one_generator(generator, expected);
    check_several_generators(arguments[1], expected);
    check_cancellation(generator, expected);
    check_errors(generator);
    check_foreign_settings(arguments[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return headport::test::result();
}
