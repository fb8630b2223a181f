// The device table: which device is current, what each one has in use, what was copied between them.
#include "sim.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace sim {
namespace {

struct Device {
  std::mutex mutex;
  MemoryCounters memory;
};

c10::DeviceIndex g_count = 0;
int64_t g_host_memory = 0;
std::atomic<bool> g_forked{false};
thread_local c10::DeviceIndex t_current = 0;

// Never destroyed: tensors of global lifetime give their bytes back after main() has ended.
Device* const g_devices = new Device[128];
std::mutex& g_copies_mutex = *new std::mutex();
CopyTable& g_copies = *new CopyTable();

Device& at_index(c10::DeviceIndex index) {
  TORCH_CHECK_VALUE(
      index >= 0 && index < g_count,
      "Expected a simulated device from sim:0 to sim:", static_cast<int>(g_count) - 1, ", got sim:",
      static_cast<int>(index), ". Call sim_devices.enable(device_count=...) with a larger count.");
  return g_devices[index];
}

std::string readable(int64_t bytes) {
  constexpr int64_t kKib = 1 << 10, kMib = 1 << 20;
  if (bytes < kKib) {
    return std::to_string(bytes) + " bytes";
  }
  char text[32];
  const bool small = bytes < kMib;
  std::snprintf(
      text, sizeof(text), "%.2f %s", static_cast<double>(bytes) / static_cast<double>(small ? kKib : kMib),
      small ? "KiB" : "MiB");
  return text;
}

}  // namespace

void initialize(c10::DeviceIndex count, int64_t host_memory) {
  g_count = count;
  g_host_memory = host_memory;
#ifndef _WIN32
  pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
#endif
}

c10::DeviceIndex device_count() { return g_count; }
c10::DeviceIndex current_device() { return t_current; }

void set_current_device(c10::DeviceIndex index) {
  at_index(index);
  t_current = index;
}

c10::Device full_device(c10::Device device) {
  const auto index = device.has_index() ? device.index() : t_current;
  at_index(index);
  return c10::Device(kSim, index);
}

void take_bytes(c10::DeviceIndex index, int64_t bytes) {
  TORCH_CHECK(
      !g_forked,
      "Simulated devices cannot be used in a forked process, just as GPUs cannot. Keep tensors of sim devices out of "
      "DataLoader workers, or start processes with the 'spawn' method.");
  auto& device = at_index(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  auto& memory = device.memory;
  if (memory.limit > 0 && memory.allocated + bytes > memory.limit) {
    ++memory.ooms;
    const auto device_name = c10::str("sim:", static_cast<int>(index));
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, device_name, " out of memory. Tried to allocate ", readable(bytes), ". ", device_name,
        " has a limit of ", readable(memory.limit), " of which ", readable(memory.limit - memory.allocated),
        " is free; ", readable(memory.allocated), " is in use (peak ", readable(memory.peak),
        "). The limit is set by torch.sim.set_memory_limit; a GPU would say \"CUDA out of memory\".");
  }
  ++memory.allocations;
  memory.allocated += bytes;
  memory.peak = std::max(memory.peak, memory.allocated);
}

void give_bytes(c10::DeviceIndex index, int64_t bytes) {
  auto& device = g_devices[index];
  std::lock_guard<std::mutex> lock(device.mutex);
  device.memory.allocated -= bytes;
}

MemoryCounters memory_counters(c10::DeviceIndex index) {
  auto& device = at_index(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  return device.memory;
}

int64_t total_memory(c10::DeviceIndex index) {
  const auto limit = memory_counters(index).limit;
  return limit > 0 ? limit : g_host_memory;
}

void reset_peak(c10::DeviceIndex index) {
  auto& device = at_index(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.memory.peak = device.memory.allocated;
}

void set_memory_limit(c10::DeviceIndex index, int64_t bytes) {
  auto& device = at_index(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.memory.limit = bytes;
}

void count_copy(c10::Device from, c10::Device to, int64_t bytes) {
  std::lock_guard<std::mutex> lock(g_copies_mutex);
  auto& counter = g_copies[{from.str(), to.str()}];
  ++counter.count;
  counter.bytes += bytes;
}

CopyTable copy_table() {
  std::lock_guard<std::mutex> lock(g_copies_mutex);
  return g_copies;
}

void reset_copy_table() {
  std::lock_guard<std::mutex> lock(g_copies_mutex);
  g_copies.clear();
}

}  // namespace sim
