// Streams, and what they and the host wait for.
#include "order_state.h"

#include <c10/util/StringUtil.h>

#include <atomic>
#include <utility>

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

std::atomic<bool> g_strict{true};
std::atomic<bool> g_prompt{true};
std::atomic<int64_t> g_host_waits{0};
thread_local std::vector<c10::StreamId> t_current(kMostDevices, 0);

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

c10::DeviceIndex device_of(int stream) {
  return stream < kMostDevices ? static_cast<c10::DeviceIndex>(stream) : state().streams[stream].device;
}

std::string name_of(int stream) {
  const auto device = c10::str("sim:", static_cast<int>(device_of(stream)));
  return stream < kMostDevices ? c10::str("the default stream of ", device) : c10::str("stream ", stream, " of ", device);
}

StreamState& up_to_date(int number) {
  auto& stream = state().streams[number];
  if (stream.host_seen != state().host_version) {
    stream.clock.join(state().host);
    stream.host_seen = state().host_version;
  }
  return stream;
}

void set_strict(bool strict) { g_strict = strict; }
void set_prompt(bool prompt) { g_prompt = prompt; }
bool is_strict() { return g_strict.load(std::memory_order_relaxed); }
int64_t host_waits() { return g_host_waits; }

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
  auto event = std::make_shared<Clock>(up_to_date(number).clock);
  event->mark = recorder ? recorder.mark(number) : -1;
  return event;
}

RecordId mark_of(const ClockPointer& event) { return event ? event->mark : -1; }

void wait(const c10::Stream& stream, const ClockPointer& event) {
  if (!event) {
    return;
  }
  const Recorder recorder;
  const auto number = number_of(stream);
  std::lock_guard<std::mutex> lock(state().mutex);
  up_to_date(number).clock.join(*event);
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

bool host_asks(const ClockPointer& event, bool again) {
  if (!event) {
    return true;
  }
  if (is_strict() && !g_prompt && !again) {
    std::lock_guard<std::mutex> lock(state().mutex);
    return state().host.covers(*event);
  }
  host_knows(*event);
  return true;
}

bool host_asks(const c10::Stream& stream) {
  bool again = false;
  ClockPointer now;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto number = number_of(stream);
    auto& known = up_to_date(number);
    again = std::exchange(known.asked_at, known.clock.of(number)) == known.clock.of(number);
    now = std::make_shared<const Clock>(known.clock);
  }
  return host_asks(now, again);
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
        host_joins(up_to_date(number).clock);
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

void synchronize(c10::DeviceIndex index) {
  settle(index);
  host_waits_for_device(index);
}

ClockPointer host_now() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return std::make_shared<const Clock>(state().host);
}

bool covers(const ClockPointer& clock, Moment moment) { return clock->covers(moment); }

bool has_waited_for(const c10::Stream& stream, Moment moment) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return up_to_date(number_of(stream)).clock.covers(moment);
}

}  // namespace sim
