// Allocators. Device memory is CPU memory whose owner is a device: every block counts its bytes there until it is
// freed.
#include "order.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <mutex>
#include <unordered_set>

namespace sim {
namespace {

// What a sim DataPtr keeps: the memory itself (owned directly, or through the CPU storage that a kernel made).
struct Block {
  c10::DeviceIndex index;
  int64_t bytes;
  c10::DataPtr memory;
  c10::Storage storage;
  History history = {};
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  take_back(block->history, static_cast<size_t>(block->bytes));
  give_bytes(block->index, block->bytes);
  delete block;
}

c10::DataPtr make_block(void* data, Block&& block) {
  const c10::Device device(kSim, block.index);
  hand_out(block.history, block.index, static_cast<size_t>(block.bytes));
  return {data, new Block(std::move(block)), &free_block, device};
}

struct DeviceAllocator final : c10::DeviceAllocator {
  // On the current device, as every c10 allocator.
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device();
    const auto signed_bytes = static_cast<int64_t>(bytes);
    take_bytes(index, signed_bytes);
    try {
      auto memory = c10::GetCPUAllocator()->allocate(bytes);
      void* data = memory.get();
      return make_block(data, {index, signed_bytes, std::move(memory), {}});
    } catch (...) {
      give_bytes(index, signed_bytes);
      throw;
    }
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return device_count() > 0; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override { record_use(memory, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const auto memory = memory_counters(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = memory.allocated;
      (*bytes)[0].peak = memory.peak;
    }
    stats.num_ooms = memory.ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const auto total = total_memory(index);
    const auto free = std::max<int64_t>(0, total - memory_counters(index).allocated);
    return {static_cast<size_t>(free), static_cast<size_t>(total)};
  }
};

// "Pinned" memory is plain CPU memory that remembers having been asked for, so that is_pinned() tells the truth.
struct PinnedAllocator final : at::HostAllocator {
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex();
    return *mutex;
  }
  static std::unordered_set<const void*>& pointers() {
    static auto* pointers = new std::unordered_set<const void*>();
    return *pointers;
  }
  struct Pinned {
    c10::DataPtr memory;
    History history = {};
  };
  c10::DataPtr allocate(size_t bytes) override {
    auto* pinned = new Pinned{c10::GetCPUAllocator()->allocate(bytes)};
    void* data = pinned->memory.get();
    std::lock_guard<std::mutex> lock(mutex());
    if (data != nullptr) {
      pointers().insert(data);
    }
    return {data, pinned, &free, c10::Device(c10::kCPU)};
  }
  static void free(void* context) {
    auto* pinned = static_cast<Pinned*>(context);
    {
      std::lock_guard<std::mutex> lock(mutex());
      pointers().erase(pinned->memory.get());
    }
    delete pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator& g_device_allocator = *new DeviceAllocator();
PinnedAllocator& g_pinned_allocator = *new PinnedAllocator();

REGISTER_ALLOCATOR(kSim, &g_device_allocator)
REGISTER_HOST_ALLOCATOR(kSim, &g_pinned_allocator)

}  // namespace

c10::Allocator* device_allocator() { return &g_device_allocator; }
c10::Allocator* pinned_allocator() { return &g_pinned_allocator; }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(PinnedAllocator::mutex());
  return PinnedAllocator::pointers().count(data) > 0;
}

History* history_of(const c10::DataPtr& memory) {
  if (auto* block = memory.cast_context<Block>(&free_block)) {
    return &block->history;
  }
  auto* pinned = memory.cast_context<PinnedAllocator::Pinned>(&PinnedAllocator::free);
  return pinned == nullptr ? nullptr : &pinned->history;
}

c10::DataPtr adopt(c10::Storage cpu, c10::DeviceIndex index) {
  const auto bytes = static_cast<int64_t>(cpu.nbytes());
  take_bytes(index, bytes);
  try {
    void* data = cpu.mutable_data();
    return make_block(data, {index, bytes, {}, std::move(cpu)});
  } catch (...) {
    give_bytes(index, bytes);
    throw;
  }
}

c10::Storage adopt_storage(c10::Storage cpu, c10::DeviceIndex index) {
  const auto bytes = cpu.nbytes();
  return {c10::Storage::use_byte_size_t(), bytes, adopt(std::move(cpu), index), device_allocator(), /*resizable=*/true};
}

}  // namespace sim
