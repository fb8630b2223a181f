// The device table: which device is current, what each one has in use, what was copied between them, and one random
// generator for each.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
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
Device* const g_devices = new Device[kMostDevices];
std::mutex& g_copies_mutex = *new std::mutex();
CopyTable& g_copies = *new CopyTable();

Device& at_index(c10::DeviceIndex index) {
  TORCH_CHECK_VALUE(
      index >= 0 && index < g_count,
      "Expected a simulated device from sim:0 to sim:", static_cast<int>(g_count) - 1, ", got sim:",
      static_cast<int>(index), ". Call sim_devices.enable(device_count=...) with a larger count.");
  return g_devices[index];
}

// The state is a CPU generator's, so that equal seeds give equal numbers on any device.
class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(c10::DeviceIndex index, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const { return cpu_; }

  void set_current_seed(uint64_t seed) override {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    cpu_.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override { cpu_.set_offset(offset); }
  uint64_t get_offset() const override { return cpu_.get_offset(); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    return cpu_.unsafeGetGeneratorImpl()->seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  SimGenerator* clone_impl() const override {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    return new SimGenerator(device().index(), cpu_.clone());
  }
  mutable at::Generator cpu_;
};

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
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim:", static_cast<int>(index), " out of memory. Tried to allocate ", bytes,
        " bytes; ", memory.allocated, " of ", memory.limit, " are in use (torch.sim.set_memory_limit; a "
        "GPU says \"CUDA out of memory\", as Lightning expects).");
  }
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
  auto& [count, sum] = g_copies[{from.str(), to.str()}];
  ++count;
  sum += bytes;
}

CopyTable copy_table() {
  std::lock_guard<std::mutex> lock(g_copies_mutex);
  return g_copies;
}

void reset_copy_table() {
  std::lock_guard<std::mutex> lock(g_copies_mutex);
  g_copies.clear();
}

at::Generator new_generator(c10::DeviceIndex index) {
  const auto device = index < 0 ? full_device({kSim, current_device()}) : full_device({kSim, index});
  return at::make_generator<SimGenerator>(device.index());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto& generators = *[] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      made->push_back(new_generator(i));
    }
    return made;
  }();
  return generators[index < 0 ? current_device() : full_device({kSim, index}).index()];
}

at::Generator cpu_generator(const at::Generator& generator, c10::Device device) {
  TORCH_CHECK(
      generator.device() == device, "Expected a generator on ", device, ", got one on ", generator.device(),
      ". Make it with torch.Generator(device='", device, "').");
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

}  // namespace sim
