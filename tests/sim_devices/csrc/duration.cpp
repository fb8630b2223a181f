// What ops and copies take: nobody waits for it, it is counted and, on virtual time, written down.
#include "sim.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <unordered_map>

namespace sim {
namespace {

struct Meter {
  std::atomic<bool> has_speed{false};
  std::mutex mutex;
  Speed speed;
  double busy = 0;
};

Meter* const g_meters = new Meter[kMostDevices];

struct Link {
  double bytes_per_second = std::numeric_limits<double>::infinity();
  double seconds = 0;  // before the first byte arrives
};

constexpr int kCpu = -1;
std::mutex& g_links_mutex = *new std::mutex();
std::map<std::pair<int, int>, Link>& g_links = *new std::map<std::pair<int, int>, Link>();

// One that was not set costs nothing. Called with the lock.
Link link_of(int source, int target) {
  const auto found = g_links.find({source, target});
  return found == g_links.end() ? Link() : found->second;
}

double numel(const std::vector<int64_t>& shape) {
  double product = 1;
  for (const auto size : shape) {
    product *= static_cast<double>(size);
  }
  return product;
}

// Which of its tensors is the left matrix of a product, whose last dimension is summed over.
const std::unordered_map<std::string, size_t>& left_matrices() {
  static const auto& positions = *new std::unordered_map<std::string, size_t>{
      {"aten::mm", 0},     {"aten::bmm", 0},    {"aten::mv", 0},    {"aten::dot", 0},
      {"aten::addmm", 1},  {"aten::addmm_", 1}, {"aten::addmv", 1}, {"aten::baddbmm", 1},
      {"aten::baddbmm_", 1}, {"aten::_addmm_activation", 1}};
  return positions;
}

}  // namespace

double flops_of(const std::string& op, const Shapes& shapes, int64_t outputs) {
  const auto& inputs = shapes.inputs;
  const auto left = left_matrices().find(op);
  if (left != left_matrices().end() && inputs.size() > left->second && !inputs[left->second].empty()) {
    return 2 * static_cast<double>(outputs) * static_cast<double>(inputs[left->second].back());
  }
  // Each output is a sum over a weight but for its first dimension, the channels of the outputs.
  const auto per_output = [](const std::vector<int64_t>& weight) { return 2 * numel({weight.begin() + 1, weight.end()}); };
  if (op == "aten::convolution_overrideable" && inputs.size() > 1 && !inputs[1].empty()) {
    return static_cast<double>(outputs) * per_output(inputs[1]);
  }
  if (op == "aten::convolution_backward_overrideable" && inputs.size() > 2 && !inputs[2].empty()) {
    return shapes.gradients * numel(inputs[0]) * per_output(inputs[2]);
  }
  return static_cast<double>(outputs);
}

void set_speed(c10::DeviceIndex index, Speed speed) {
  auto& meter = g_meters[full_device({kSim, index}).index()];
  std::lock_guard<std::mutex> lock(meter.mutex);
  meter.speed = speed;
  meter.has_speed = speed.seconds_per_op > 0 || speed.seconds_per_element > 0 ||
                    std::isfinite(speed.flops_per_second) || std::isfinite(speed.bytes_per_second);
}

bool has_speed(c10::DeviceIndex index) { return g_meters[index].has_speed.load(std::memory_order_relaxed); }

int64_t charge(c10::DeviceIndex index, const Work& work) {
  if (!has_speed(index)) {
    return 0;
  }
  auto& meter = g_meters[index];
  std::lock_guard<std::mutex> lock(meter.mutex);
  const auto& speed = meter.speed;
  const double computing = std::max(work.flops / speed.flops_per_second, work.bytes / speed.bytes_per_second);
  const double seconds =
      speed.seconds_per_op + speed.seconds_per_element * static_cast<double>(work.elements) + computing;
  meter.busy += seconds;
  return std::llround(seconds * 1e9);
}

double busy_seconds(c10::DeviceIndex index) {
  auto& meter = g_meters[full_device({kSim, index}).index()];
  std::lock_guard<std::mutex> lock(meter.mutex);
  return meter.busy;
}

void set_link(int source, int target, double bytes_per_second, double seconds) {
  std::lock_guard<std::mutex> lock(g_links_mutex);
  g_links[{source, target}] = {bytes_per_second, seconds};
}

void remove_links() {
  std::lock_guard<std::mutex> lock(g_links_mutex);
  g_links.clear();
}

// Through the CPU a copy is made in pieces, which go in while the next come out: it takes the time of the slower way,
// and the delays of both.
int64_t transfer_nanoseconds(int source, int target, int64_t bytes) {
  std::lock_guard<std::mutex> lock(g_links_mutex);
  auto link = link_of(source, target);
  if (source != kCpu && target != kCpu && g_links.count({source, target}) == 0) {
    const auto out = link_of(source, kCpu), in = link_of(kCpu, target);
    link = {std::min(out.bytes_per_second, in.bytes_per_second), out.seconds + in.seconds};
  }
  return std::llround((link.seconds + static_cast<double>(bytes) / link.bytes_per_second) * 1e9);
}

}  // namespace sim
