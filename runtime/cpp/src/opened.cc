#include "opened.h"

#include <algorithm>
#include <cstdlib>

#include "bundle/bundle.h"
#include "bundle/conditions.h"
#include "bundle/vocabulary.h"
#include "c_support.h"
#include "error.h"
#include "generator/certificate_check.h"
#include "generator/in_place_runner.h"
#include "generator/tuned_threads.h"
#include "tensorrt/open.h"

namespace headport::internal {
namespace {

constexpr std::int64_t kMostRows = 16;  // runtime/scheduling/capacity.py has the same number
constexpr std::int64_t kLargestVocabulary = std::int64_t{1} << 31;  // ids of a map are int32
constexpr std::int64_t kLongestContext = std::int64_t{1} << 30;     // graphs count slots in int32

// Whether a head's tokens are to be those of the original one.
bool is_exact(const Bundle& bundle, const std::string& name, std::int32_t wanted) {
  if (wanted < HEADPORT_EXACT_AUTO || wanted > HEADPORT_EXACT_ALWAYS) {
    throw Error(HEADPORT_REQUEST_ERROR,
                    text("exact must be HEADPORT_EXACT_AUTO, _NEVER or _ALWAYS, ", wanted,
                             " was given"));
  }
  const auto head = bundle.manifest().heads.find(name);
  if (head == bundle.manifest().heads.end()) return false;  // refused where it is opened
  const auto& form = head->second.candidates;
  const bool certified = form.has_value() && form->certified;
  if (wanted == HEADPORT_EXACT_ALWAYS && !certified) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                    text(bundle.path().string(), ": exact answers need a certified head, this "
                             "one gives ",
                             form.has_value() ? "candidates without a certificate" : "all logits",
                             "; make the bundle with `headport quantize --head int8 --certify`"));
  }
  return wanted == HEADPORT_EXACT_AUTO ? certified : wanted == HEADPORT_EXACT_ALWAYS;
}

std::string text_of(const char* given) { return given != nullptr ? given : ""; }

// Plans need no ONNX Runtime, but texts are encoded by a library that does.
bool names_onnxruntime(const headport_settings& settings) {
  const char* named = std::getenv("HEADPORT_ORT");
  return settings.onnxruntime != nullptr || (named != nullptr && *named != '\0');
}

// The runner of a bundle's target; lowers `max_context` to what its rows may have.
std::unique_ptr<Runner> open_runner(const Bundle& bundle, const std::string& head,
                                    const headport_settings& settings, headport_generator& found,
                                    std::int64_t& max_context) {
  const bool plans = bundle.manifest().target == "tensorrt";
  if (!plans && settings.cuda_graphs != 0) {
    throw Error(HEADPORT_REQUEST_ERROR,
                text("cuda_graphs are for bundles of TensorRT plans, this one is lowered to ",
                     bundle.manifest().target));
  }
  if (!plans || names_onnxruntime(settings)) found.library = Library::load(text_of(settings.onnxruntime));
  if (plans) {
    auto runner = open_plans(bundle, head, text_of(settings.tensorrt), settings.cuda_graphs != 0);
    max_context = std::min(max_context, runner->max_context());
    return runner;
  }
  const TunedThreads chosen = tuned_threads(bundle.manifest(), settings.threads);
  found.threads = chosen.threads;
  found.tuned = chosen.tuned;
  auto runner = std::make_unique<InPlaceRunner>(found.library, bundle, head, chosen.threads);
  if (found.exact) require_certificate(bundle, head, runner->head());
  return runner;
}

}  // namespace

headport_settings default_settings() {
  headport_settings found{};
  found.struct_size = sizeof found;
  found.verify = 1;
  found.max_rows = kMostRows;
  found.head = "lm";
  found.exact = HEADPORT_EXACT_AUTO;
  return found;
}

void open_generator(const char* path, const headport_settings& settings,
                    headport_generator& found) {
  const Bundle bundle = Bundle::open(path, settings.verify != 0);
  const Manifest& manifest = bundle.manifest();
  const std::int64_t size = manifest.vocabulary.size;
  if (size < 1 || size > kLargestVocabulary || manifest.max_context < 1 ||
      manifest.max_context > kLongestContext) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                    text(path, ": a vocabulary from 1 to 2^31 and a context from 1 to 2^30 "
                             "were expected, ", size, " and ", manifest.max_context,
                             " were found"));
  }
  if (settings.max_context < 0 || settings.max_context > manifest.max_context) {
    throw Error(HEADPORT_REQUEST_ERROR,
                    text("max_context must be from 1 to the model's ", manifest.max_context,
                             ", or 0 for that; ", settings.max_context, " was given"));
  }
  if (settings.max_rows < 1 || settings.threads < 0) {
    throw Error(HEADPORT_REQUEST_ERROR,
                    text("max_rows must be from 1 up and threads from 0 up, ",
                             settings.max_rows, " and ", settings.threads, " were given"));
  }
  if (settings.reply_limit < 0) {
    throw Error(HEADPORT_REQUEST_ERROR,
                    text("reply_limit must be from 1 up, or 0 for none; ",
                             settings.reply_limit, " was given"));
  }
  if (settings.ignore_count > 0) require(settings.ignore, "ignore");
  std::vector<std::string> ignore;
  for (std::size_t n = 0; n < settings.ignore_count; ++n) {
    require(settings.ignore[n], "ignore");
    ignore.emplace_back(settings.ignore[n]);
  }
  found.architecture = manifest.architecture;
  found.defaults = read_defaults(manifest.defaults, ignore);
  check_ids(found.defaults.sampling, found.defaults.ends, size, HEADPORT_BUNDLE_ERROR);
  found.lists = std::make_unique<DefaultLists>(found.defaults);
  IdMap ids = IdMap::from_bundle(bundle);
  std::optional<Conditions> conditions = Conditions::from_bundle(bundle);
  if (conditions) {
    found.condition_size = static_cast<std::int64_t>(conditions->size());
    found.conditions = conditions->names();
    for (const std::string& name : found.conditions) found.condition_names.push_back(name.c_str());
  }
  const std::string head = settings.head != nullptr ? settings.head : "lm";
  found.exact = is_exact(bundle, head, settings.exact);
  for (const auto& [name, _] : manifest.heads) found.heads.push_back(name);
  for (const std::string& name : found.heads) found.head_names.push_back(name.c_str());
  std::int64_t max_context = manifest.max_context;
  auto runner = open_runner(bundle, head, settings, found, max_context);
  if (settings.max_context > max_context) {
    throw Error(HEADPORT_REQUEST_ERROR,
                text("max_context must be from 1 to the ", max_context, " tokens that the plans were "
                     "built for; ", settings.max_context, " was given"));
  }
  found.texts = std::make_shared<BundleTexts>(bundle, text_of(settings.tokenizer), found.library);
  found.generator = std::make_unique<Generator>(
      std::move(runner), std::move(ids), static_cast<std::size_t>(settings.max_rows),
      settings.max_context > 0 ? settings.max_context : max_context,
      settings.reply_limit, found.exact, found.texts, std::move(conditions));
}

}  // namespace headport::internal
