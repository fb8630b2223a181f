// Links: how long a copy between two devices, or a device and the CPU, takes on virtual time.
#include "sim.h"

#include <algorithm>
#include <cmath>
#include <mutex>

namespace sim {
namespace {

constexpr int kCpu = -1;

std::mutex& g_mutex = *new std::mutex();
std::map<std::pair<int, int>, Link>& g_links = *new std::map<std::pair<int, int>, Link>();

// One that was not set costs nothing. Called with the lock.
Link link_of(int source, int target) {
  const auto found = g_links.find({source, target});
  return found == g_links.end() ? Link() : found->second;
}

// The slower of two rates, of which 0 has no limit.
double slower(double first, double second) {
  return first == 0 || second == 0 ? std::max(first, second) : std::min(first, second);
}

// Called with the lock.
Link way(int source, int target) {
  const bool is_direct = source == kCpu || target == kCpu || g_links.count({source, target}) > 0;
  if (is_direct) {
    return link_of(source, target);
  }
  const auto out = link_of(source, kCpu), in = link_of(kCpu, target);
  return {slower(out.bytes_per_second, in.bytes_per_second), out.seconds + in.seconds};
}

}  // namespace

void set_link(int source, int target, std::optional<Link> link) {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (link) {
    g_links[{source, target}] = *link;
  } else {
    g_links.erase({source, target});
  }
}

bool can_access_peer(int source, int target) {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_links.count({source, target}) > 0) {
    return true;
  }
  const auto link = way(source, target);
  return link.bytes_per_second == 0 && link.seconds == 0;
}

int64_t transfer_nanoseconds(int source, int target, int64_t bytes) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto link = way(source, target);
  const double moving = link.bytes_per_second > 0 ? static_cast<double>(bytes) / link.bytes_per_second : 0;
  return std::llround((link.seconds + moving) * 1e9);
}

}  // namespace sim
