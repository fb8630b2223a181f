#include "order.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace sim {

struct Clock {
  std::vector<uint64_t> counts;  // by stream; none: 0
  RecordId mark = -1;            // of an event, on virtual time

  uint64_t of(int stream) const { return static_cast<size_t>(stream) < counts.size() ? counts[stream] : 0; }
  bool covers(Moment moment) const { return of(moment.stream) >= moment.count; }
  bool covers(const Clock& other) const {
    for (size_t i = 0; i < other.counts.size(); ++i) {
      if (of(static_cast<int>(i)) < other.counts[i]) {
        return false;
      }
    }
    return true;
  }
  void join(const Clock& other) {
    if (counts.size() < other.counts.size()) {
      counts.resize(other.counts.size());
    }
    for (size_t i = 0; i < other.counts.size(); ++i) {
      counts[i] = std::max(counts[i], other.counts[i]);
    }
  }
  uint64_t next(int stream) {
    if (static_cast<size_t>(stream) >= counts.size()) {
      counts.resize(stream + 1);
    }
    return ++counts[stream];
  }
};

namespace {

constexpr int kMostDevices = 128;  // the default stream of a device has its number
// More stretches than this of one block are put together, at the price of a false alarm where they interleave.
constexpr size_t kMostStretches = 256;

struct StreamState {
  Clock clock;
  uint64_t host_seen = 0;  // the host's version that is in the clock
  uint64_t asked_at = 0;  // the op up to which the host has asked last whether it is through
  c10::DeviceIndex device = 0;
};

// A block that was given back while other streams than its home's may still be at work with it.
struct Freed {
  size_t bytes;
  std::vector<Access> accesses;
};

// Never destroyed: tensors of global lifetime are freed after main() has ended.
struct State {
  std::mutex mutex;
  std::vector<StreamState> streams = std::vector<StreamState>(kMostDevices);
  Clock host;
  uint64_t host_version = 0;
  std::map<int, std::vector<Freed>> freed;  // by home
};

State& state() {
  static auto* state = new State();
  return *state;
}

std::atomic<bool> g_strict{true};
std::atomic<bool> g_prompt{true};
std::atomic<int64_t> g_host_waits{0};
thread_local std::vector<c10::StreamId> t_current(kMostDevices, 0);

struct RaceError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override {
    static PyObject* type = PyObject_GetAttrString(PyImport_ImportModule("lightning_dp.sim.device_module"), "RaceError");
    return type;
  }
};

c10::DeviceIndex device_of(int stream) {
  return stream < kMostDevices ? static_cast<c10::DeviceIndex>(stream) : state().streams[stream].device;
}

std::string name_of(int stream) {
  const auto device = c10::str("sim:", static_cast<int>(device_of(stream)));
  return stream < kMostDevices ? c10::str("the default stream of ", device) : c10::str("stream ", stream, " of ", device);
}

// The stream with all that it has to wait for. Called with the lock.
StreamState& up_to_date(int number) {
  auto& stream = state().streams[number];
  if (stream.host_seen != state().host_version) {
    stream.clock.join(state().host);
    stream.host_seen = state().host_version;
  }
  return stream;
}

void host_joins(const Clock& clock) {
  state().host.join(clock);
  ++state().host_version;
}

std::string advice(int first, int second) {
  return c10::str(
      "Let the second one wait: `second.wait_stream(first)`, or an event recorded on the first (", name_of(first),
      ") and waited for by the second (", name_of(second), "), or synchronize the first.");
}

// The first access among them that the stream does not wait for. Own ones are in order.
const Access* unordered(const std::vector<Access>& accesses, const Use& use, const Clock& clock) {
  for (const auto& access : accesses) {
    if (overlap(access.bytes, use.bytes) && !clock.covers(access.moment)) {
      return &access;
    }
  }
  return nullptr;
}

template <typename Test>
void erase_if(std::vector<Access>& accesses, Test test) {
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), test), accesses.end());
}

bool is_successor(Moment moment, Moment earlier) {
  return moment.stream == earlier.stream && moment.thread == earlier.thread;
}

// All in it that lies in these bytes has come before; or that alone which this moment is a successor of.
void forget(std::vector<Access>& accesses, const Bytes& bytes, const Moment* moment = nullptr) {
  erase_if(accesses, [&](const Access& access) {
    return (moment == nullptr || is_successor(*moment, access.moment)) && contains(bytes, access.bytes);
  });
}

// One stretch for both, at the price of what lies between them.
void extend(Access& known, const Access& access) {
  const auto begin = std::min(known.bytes.begin, access.bytes.begin);
  known = {access.moment, {begin, std::max(known.bytes.end, access.bytes.end)}, access.op};
}

// Notes an access. It stands for earlier ones of its bytes that its thread issued to its stream.
void note(std::vector<Access>& accesses, const Access& access) {
  const auto& bytes = access.bytes;
  forget(accesses, bytes, &access.moment);
  const bool is_full = accesses.size() >= kMostStretches;
  for (auto& known : accesses) {
    const bool is_same_stream = is_successor(access.moment, known.moment);
    const bool are_stretches = known.bytes.pitch == 0 && bytes.pitch == 0;
    const bool touches = are_stretches && bytes.begin <= known.bytes.end && known.bytes.begin <= bytes.end;
    if (is_same_stream && (is_full || (touches && known.moment.count == access.moment.count))) {
      extend(known, access);
      return;
    }
  }
  accesses.push_back(access);
}

std::string told(const Use& use, const Access& other, bool other_wrote, const char* op, int stream) {
  return c10::str(
      "Race: ", op, " on ", name_of(stream), use.writes ? " writes" : " reads", " memory that ", other.op, " on ",
      name_of(other.moment.stream), other_wrote ? " has written" : " has read", ", and nothing orders the two. ",
      advice(other.moment.stream, stream));
}

// Checks the uses of an op. Called with the lock; the message is empty where all is in order.
std::string check_all(Moment moment, const Clock& clock, const char* op, const std::vector<Use>& uses) {
  for (const auto& use : uses) {
    auto& history = *use.history;
    if (const auto* other = unordered(history.writes, use, clock)) {
      return told(use, *other, true, op, moment.stream);
    }
    if (const auto* other = use.writes ? unordered(history.reads, use, clock) : nullptr) {
      return told(use, *other, false, op, moment.stream);
    }
    if (!clock.covers(history.allocated)) {
      return c10::str(
          "Race: ", op, " on ", name_of(moment.stream), " uses memory that was allocated on ",
          name_of(history.allocated.stream), ", whose earlier work may still be using it. ",
          advice(history.allocated.stream, moment.stream));
    }
  }
  return "";
}

// Notes the uses of an op. Called with the lock.
void note_all(Moment moment, const char* op, const std::vector<Use>& uses) {
  for (const auto& use : uses) {
    auto& history = *use.history;
    if (use.writes) {
      forget(history.reads, use.bytes);
      forget(history.writes, use.bytes);
    }
    note(use.writes ? history.writes : history.reads, {moment, use.bytes, op});
  }
}

// The records of what an op needs to be through on virtual time: who wrote what it uses, and who read what it writes.
std::vector<RecordId> needs_of(const std::vector<Use>& uses) {
  std::set<RecordId> needs;
  for (const auto& use : uses) {
    for (const auto* accesses : {&use.history->writes, use.writes ? &use.history->reads : nullptr}) {
      for (size_t i = 0; accesses != nullptr && i < accesses->size(); ++i) {
        const auto& access = (*accesses)[i];
        if (access.moment.record >= 0 && overlap(access.bytes, use.bytes)) {
          needs.insert(access.moment.record);
        }
      }
    }
  }
  return {needs.begin(), needs.end()};
}

}  // namespace

void set_strict(bool strict) { g_strict = strict; }
void set_prompt(bool prompt) { g_prompt = prompt; }
bool is_strict() { return g_strict.load(std::memory_order_relaxed); }
int64_t host_waits() { return g_host_waits; }

void race(const std::string& message) { throw RaceError(message); }

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
  auto& streams = state().streams;
  streams.emplace_back();
  streams.back().device = full.index();
  return c10::Stream(c10::Stream::UNSAFE, full, static_cast<c10::StreamId>(streams.size() - 1));
}

// --- waits ---

namespace {

void host_knows(const Clock& clock) {
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    host_joins(clock);
  }
  deliver();
}

}  // namespace

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

// --- accesses ---

Moment launch(const c10::Stream& stream, const char* op, const std::vector<Use>& uses) {
  const Recorder recorder;
  const auto number = number_of(stream);
  std::string message;
  Moment moment;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto& clock = up_to_date(number).clock;
    moment = {number, clock.next(number)};
    if (recorder) {
      moment.record = recorder.add(number, op, needs_of(uses));
      moment.thread = recorder.thread();
    }
    message = is_strict() ? check_all(moment, clock, op, uses) : "";
    if (message.empty()) {
      note_all(moment, op, uses);
    }
  }
  if (!message.empty()) {
    race(message);
  }
  return moment;
}

void forget_launch(Moment moment, const std::vector<Use>& uses) {
  std::lock_guard<std::mutex> lock(state().mutex);
  for (const auto& use : uses) {
    for (auto* accesses : {&use.history->writes, &use.history->reads}) {
      erase_if(*accesses, [&](const Access& access) {
        return access.moment.stream == moment.stream && access.moment.count == moment.count;
      });
    }
  }
}

Moment launch_copy(const c10::Stream& source, const c10::Stream& target, const std::vector<Use>& uses) {
  if (source.device() != target.device()) {
    wait(source, record(target));
  }
  const auto moment = launch(source, "a copy", uses);
  if (source.device() != target.device()) {
    wait(target, record(source));
  }
  return moment;
}

void made_by(History& history, Moment moment, size_t bytes, const char* op) {
  std::lock_guard<std::mutex> lock(state().mutex);
  note(history.writes, {moment, {0, bytes}, op});
}

void record_use(History& history, const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& recorded = history.recorded;
  const auto number = number_of(stream);
  if (std::find(recorded.begin(), recorded.end(), number) == recorded.end()) {
    recorded.push_back(number);
  }
}

void hand_out(History& history, c10::DeviceIndex index, size_t bytes) {
  std::string message;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto home = number_of(current_stream({kSim, index}));
    const auto& clock = up_to_date(home).clock;
    history.allocated = {home, clock.of(home)};
    auto& freed = state().freed[home];
    for (auto block = freed.begin(); block != freed.end() && message.empty();) {
      const auto other = std::find_if(block->accesses.begin(), block->accesses.end(), [&](const Access& access) {
        return !clock.covers(access.moment);
      });
      if (other == block->accesses.end()) {
        block = freed.erase(block);
      } else if (block->bytes >= bytes) {
        message = c10::str(
            "Race: memory of ", name_of(home), " was freed while ", other->op, " on ", name_of(other->moment.stream),
            " may still use it, and is handed out again. Call `tensor.record_stream(stream)` before it is freed, or ",
            "let its own stream wait first.");
        freed.erase(block);
        break;
      } else {
        ++block;
      }
    }
  }
  if (!message.empty()) {
    race(message);
  }
}

void take_back(const History& history, size_t bytes) noexcept {
  if (!is_strict()) {
    return;
  }
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto home = history.allocated.stream;
  // The allocator waits for the home stream and for the recorded ones, and for what these wait for.
  Clock waited_for = up_to_date(home).clock;
  for (const auto number : history.recorded) {
    waited_for.join(up_to_date(number).clock);
  }
  Freed freed{bytes, {}};
  for (const auto* accesses : {&history.writes, &history.reads}) {
    for (const auto& access : *accesses) {
      if (access.moment.stream != home && !waited_for.covers(access.moment)) {
        freed.accesses.push_back(access);
      }
    }
  }
  if (!freed.accesses.empty() && bytes > 0) {
    state().freed[home].push_back(std::move(freed));
  }
}

}  // namespace sim
