// A bundle that is open: what a `headport_generator` of the C ABI is.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "generator/defaults.h"
#include "generator/generator.h"
#include "generator/options.h"
#include "headport/headport.h"
#include "ort/library.h"
#include "ort/threads.h"
#include "text/texts.h"

struct headport_generator {
  headport::internal::Defaults defaults;
  std::unique_ptr<headport::internal::DefaultLists> lists;
  std::shared_ptr<headport::internal::Library> library;
  std::shared_ptr<headport::internal::BundleTexts> texts;
  std::unique_ptr<headport::internal::Generator> generator;
  std::string architecture;
  bool exact = false;
  headport::internal::Threads threads{0, false};  // of ONNX Runtime; none where plans run
  headport_tuned tuned = HEADPORT_NOT_TUNED;
  std::vector<std::string> heads;
  std::vector<const char*> head_names;
  std::int64_t condition_size = 0;  // values of a condition; 0: the bundle takes none
  std::vector<std::string> conditions;
  std::vector<const char*> condition_names;
  // What the last call of headport_get_stats gave.
  std::vector<std::pair<std::string, headport::internal::Counts>> modes;
  std::vector<headport_mode_counts> lent_modes;
};

namespace headport::internal {

headport_settings default_settings();

// Errors: as headport_open.
void open_generator(const char* path, const headport_settings& settings, headport_generator& found);

}  // namespace headport::internal
