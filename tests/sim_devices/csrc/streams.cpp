// Streams, and what they and the host wait for.
#include "order.h"

#include <c10/util/StringUtil.h>

#include <atomic>

namespace sim {
namespace {

// Of each device, as torch has of a GPU: whoever asks for more shares them, in turn.
constexpr size_t kStreamsInPool = 32;

struct Pool {
  std::vector<c10::StreamId> streams;
  size_t next = 0;
};

// With the lock of the state.
Pool* const g_pools = new Pool[kMostDevices];

std::atomic<int64_t> g_host_waits{0};
thread_local std::vector<c10::StreamId> t_current(kMostDevices, 0);

c10::DeviceIndex device_of(int stream) {
  return stream < kMostDevices ? static_cast<c10::DeviceIndex>(stream) : state().streams[stream].device;
}

void host_joins(const Clock& clock) {
  state().host.join(clock);
  ++state().host_version;
}

void host_knows(const Clock& clock) {
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    host_joins(clock);
  }
  deliver();
}

}  // namespace

// Never destroyed: tensors of global lifetime are freed after main() has ended.
State& state() {
  static auto* state = new State();
  return *state;
}

std::string name_of(int stream) {
  const auto device = c10::str("sim:", static_cast<int>(device_of(stream)));
  return stream < kMostDevices ? c10::str("the default stream of ", device) : c10::str("stream ", stream, " of ", device);
}

Clock& clock_of(int number) {
  auto& stream = state().streams[number];
  if (stream.host_seen != state().host_version) {
    stream.clock.join(state().host);
    stream.host_seen = state().host_version;
  }
  return stream.clock;
}

// --- streams ---

int number_of(const c10::Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}

c10::DeviceIndex device_of_stream(int number) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return device_of(number);
}

c10::Stream current_stream(c10::Device device) {
  const auto full = full_device(device);
  return c10::Stream(c10::Stream::UNSAFE, full, t_current[full.index()]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device());
  t_current[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(c10::Device device) {
  const auto full = full_device(device);
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& pool = g_pools[full.index()];
  if (pool.streams.size() < kStreamsInPool) {
    auto& streams = state().streams;
    streams.emplace_back();
    streams.back().device = full.index();
    pool.streams.push_back(static_cast<c10::StreamId>(streams.size() - 1));
  }
  return c10::Stream(c10::Stream::UNSAFE, full, pool.streams[pool.next++ % kStreamsInPool]);
}

// --- waits ---

ClockPointer record(const c10::Stream& stream) {
  const Recorder recorder;
  const auto number = number_of(stream);
  std::lock_guard<std::mutex> lock(state().mutex);
  auto event = std::make_shared<Clock>(clock_of(number));
  event->mark = recorder ? recorder.mark(number) : -1;
  return event;
}

void wait(const c10::Stream& stream, const ClockPointer& event) {
  if (!event) {
    return;
  }
  const Recorder recorder;
  const auto number = number_of(stream);
  std::lock_guard<std::mutex> lock(state().mutex);
  clock_of(number).join(*event);
  if (recorder && event->mark >= 0) {
    recorder.mark(number, {event->mark});
  }
}

void host_waits_for(const c10::Stream& stream) { host_waits_for(record(stream)); }

void host_waits_for(const ClockPointer& event) {
  if (event) {
    ++g_host_waits;
    if (const Recorder recorder; recorder && event->mark >= 0) {
      recorder.host_wait({event->mark});
    }
    host_knows(*event);
  }
}

void host_waits_for_device(c10::DeviceIndex index) {
  ++g_host_waits;
  const Recorder recorder;
  std::vector<RecordId> marks;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto count = static_cast<int>(state().streams.size());
    for (int number = 0; number < count; ++number) {
      if (device_of(number) == index) {
        host_joins(clock_of(number));
        if (recorder) {
          marks.push_back(recorder.mark(number));
        }
      }
    }
  }
  if (recorder) {
    recorder.host_wait(std::move(marks));
  }
  deliver();
}

void host_asks(const ClockPointer& event) {
  if (event) {
    host_knows(*event);
  }
}

void host_asks(const c10::Stream& stream) {
  std::unique_lock<std::mutex> lock(state().mutex);
  host_joins(clock_of(number_of(stream)));
  lock.unlock();
  deliver();
}

ClockPointer host_now() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return std::make_shared<const Clock>(state().host);
}

bool has_waited_for(const c10::Stream& stream, Moment moment) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return clock_of(number_of(stream)).covers(moment);
}

int64_t host_waits() { return g_host_waits; }

}  // namespace sim
