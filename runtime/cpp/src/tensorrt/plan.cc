#include "tensorrt/plan.h"

#include <algorithm>

#include "error.h"
#include "ort/session.h"

namespace headport::internal {
namespace {

bool within(const Shape& shape, const ShapeRange& range) {
  if (shape.size() != range.smallest.size() || shape.size() != range.largest.size()) return false;
  for (std::size_t n = 0; n < shape.size(); ++n) {
    if (shape[n] < range.smallest[n] || shape[n] > range.largest[n]) return false;
  }
  return true;
}

bool all_within(const Plan::Shapes& shapes, const std::map<std::string, ShapeRange>& profile) {
  return std::all_of(shapes.begin(), shapes.end(), [&](const auto& each) {
    const auto range = profile.find(each.first);
    return range != profile.end() && within(each.second, range->second);
  });
}

std::string listed(const Plan::Shapes& shapes) {
  std::string all;
  for (const auto& [name, shape] : shapes) {
    std::string sizes;
    for (const std::int64_t size : shape) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    all += text(all.empty() ? "" : ", ", name, " [", sizes, "]");
  }
  return all;
}

}  // namespace

std::size_t array_bytes(const Shape& shape, const std::string& dtype) {
  std::size_t bytes = element_bytes(dtype);
  for (const std::int64_t size : shape) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

Plan::Plan(std::string file, std::unique_ptr<Engine> engine, Device& device)
    : file_(std::move(file)),
      device_(device),
      engine_(std::move(engine)),
      ports_(engine_->ports()),
      profiles_(engine_->profiles()) {}

void Plan::refuse(const std::string& what) const {
  const std::string fault = engine_->fault();
  throw Error(HEADPORT_LIBRARY_ERROR,
              text(file_, ": ", what, fault.empty() ? "" : " (" + fault + ")"));
}

const EnginePort& Plan::port(const std::string& name, bool input) const {
  for (const EnginePort& each : ports_) {
    if (each.name == name && each.input == input) return each;
  }
  throw Error(HEADPORT_BUNDLE_ERROR,
              text(file_, ": the plan has no ", input ? "input " : "output ", name,
                   "; build it again with `headport engine`"));
}

std::vector<std::string> Plan::names(bool input) const {
  std::vector<std::string> found;
  for (const EnginePort& each : ports_) {
    if (each.input == input) found.push_back(each.name);
  }
  return found;
}

std::size_t Plan::profile_of(const Shapes& shapes) const {
  // The one in use first: changing it costs time.
  if (profile_ < profiles_.size() && all_within(shapes, profiles_[profile_])) return profile_;
  const auto found = std::find_if(profiles_.begin(), profiles_.end(),
                                  [&](const auto& each) { return all_within(shapes, each); });
  return static_cast<std::size_t>(found - profiles_.begin());
}

std::int64_t Plan::largest(const std::string& name, std::size_t dimension,
                           const Shapes& shapes) const {
  std::int64_t most = 0;
  for (const auto& profile : profiles_) {
    const auto range = profile.find(name);
    if (range == profile.end() || dimension >= range->second.largest.size()) continue;
    if (all_within(shapes, profile)) most = std::max(most, range->second.largest[dimension]);
  }
  return most;
}

void* Plan::own(const std::string& port, std::size_t bytes) {
  Memory& held = memory_[port];
  if (held.block == nullptr || held.size < bytes) {
    bytes = std::max(bytes, 2 * held.size);  // a mask grows with every token
    held.block.reset();
    held.size = 0;
    held.block = std::shared_ptr<void>(device_.allocate(bytes),
                                       [this](void* address) { device_.free(address); });
    held.size = bytes;
  }
  return held.block.get();
}

OnDevice Plan::upload(const std::string& input, const void* data, Shape shape) {
  const std::size_t bytes = array_bytes(shape, port(input, true).dtype);
  void* address = own(input, bytes);
  device_.upload(address, data, bytes);
  return {address, std::move(shape)};
}

OnDevice Plan::upload_ids(const std::string& input, const std::vector<std::int64_t>& ids,
                          Shape shape) {
  const std::string& dtype = port(input, true).dtype;
  if (dtype == "int64") return upload(input, ids.data(), std::move(shape));
  if (dtype != "int32") {
    throw Error(HEADPORT_UNSUPPORTED, text(file_, ": int64 or int32 was expected as the type of ",
                                           input, ", the plan has ", dtype));
  }
  std::vector<std::int32_t> narrow;
  for (const std::int64_t id : ids) narrow.push_back(static_cast<std::int32_t>(id));
  return upload(input, narrow.data(), std::move(shape));
}

std::map<std::string, OnDevice> Plan::run(const std::map<std::string, OnDevice>& feeds,
                                          const Place& place) {
  Shapes shapes;
  for (const auto& [name, array] : feeds) shapes[name] = array.shape;
  const std::size_t profile = profile_of(shapes);
  if (profile == profiles_.size()) {
    throw Error(HEADPORT_LIBRARY_ERROR,
                text(file_, ": it was built for no such shapes: ", listed(shapes),
                     "; build it again with `headport engine --profile`"));
  }
  if (profile != profile_) {
    if (!engine_->use_profile(profile)) refuse("the library refuses another profile");
    profile_ = profile;
  }
  for (const auto& [name, array] : feeds) {
    if (!engine_->set_shape(name, array.shape) || !engine_->set_address(name, array.address)) {
      refuse("the library refuses " + listed({{name, array.shape}}));
    }
  }
  std::map<std::string, OnDevice> found;
  for (const EnginePort& each : ports_) {
    if (each.input) continue;
    Shape shape = engine_->shape(each.name);
    if (std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size < 0; })) {
      refuse("the library does not know how large this output is: " + listed({{each.name, shape}}));
    }
    void* address = place(each.name, shape);
    if (address == nullptr) address = own(each.name, array_bytes(shape, each.dtype));
    if (!engine_->set_address(each.name, address)) refuse("the library refuses output " + each.name);
    found[each.name] = {address, std::move(shape)};
  }
  if (!engine_->run()) refuse("the library refuses to run it");
  return found;
}

}  // namespace headport::internal
