// What c10 and autograd ask of a device type: the current device, streams, events, generators.
#include "order.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace sim {
namespace {

struct Event {
  std::chrono::steady_clock::time_point time;
  ClockPointer clock;
};

const ClockPointer& clock_in(void* event) {
  static const auto& none = *new ClockPointer();
  return event == nullptr ? none : static_cast<Event*>(event)->clock;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Device getDevice() const override { return c10::Device(kSim, current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(full_device(device).index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) {
      set_current_device(device.index());
    }
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, full_device(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    host_asks(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits_for(stream); }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    host_waits_for_device(full_device({kSim, index}).index());
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_use(memory, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    auto& recorded = *static_cast<Event*>(*event);
    recorded.time = std::chrono::steady_clock::now();
    recorded.clock = sim::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override { wait(stream, clock_in(event)); }
  bool queryEvent(void* event) const override {
    host_asks(clock_in(event));
    return true;
  }
  void synchronizeEvent(void* event) const override { host_waits_for(clock_in(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before elapsed_time is called.");
    if (const auto computed = milliseconds_between(clock_in(start)->mark, clock_in(end)->mark)) {
      return *computed;
    }
    const std::chrono::duration<double, std::milli> elapsed =
        static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
    return elapsed.count();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return device_count() > 0; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current_device();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }

  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
const bool g_hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace sim
