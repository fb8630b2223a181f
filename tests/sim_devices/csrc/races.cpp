// Accesses to memory, and those among them that nothing orders.
#include "order.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <atomic>
#include <set>

namespace sim {
namespace {

// More stretches than this of one block are put together, at the price of a false alarm where they interleave.
constexpr size_t kMostStretches = 256;

std::atomic<bool> g_strict{true};

struct RaceError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override {
    static PyObject* type = PyObject_GetAttrString(PyImport_ImportModule("sim_devices.device_module"), "RaceError");
    return type;
  }
};

void raise_if_strict(const std::string& message) {
  if (!message.empty() && g_strict) {
    race(message);
  }
}

template <typename Test>
void erase_if(std::vector<Access>& accesses, Test test) {
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), test), accesses.end());
}

bool is_successor(Moment moment, Moment earlier) {
  return moment.stream == earlier.stream && moment.thread == earlier.thread;
}

// Notes an access. It stands for earlier ones of its bytes that its thread issued to its stream.
void note(std::vector<Access>& accesses, const Access& access) {
  const auto& bytes = access.bytes;
  erase_if(accesses, [&](const Access& known) {
    return is_successor(access.moment, known.moment) && bytes.contains(known.bytes);
  });
  const bool is_full = accesses.size() >= kMostStretches;
  for (auto& known : accesses) {
    const bool touches = bytes.begin <= known.bytes.end && known.bytes.begin <= bytes.end;
    const bool is_same_op = known.moment.count == access.moment.count && touches;
    if (is_successor(access.moment, known.moment) && (is_full || is_same_op)) {  // one stretch for both
      const auto begin = std::min(known.bytes.begin, bytes.begin);
      known = {access.moment, {begin, std::max(known.bytes.end, bytes.end)}, access.op};
      return;
    }
  }
  accesses.push_back(access);
}

// Notes the uses of an op. Called with the lock.
void note_all(Moment moment, const char* op, const std::vector<Use>& uses) {
  for (const auto& use : uses) {
    auto& history = *use.history;
    if (use.writes) {  // all that lies in these bytes has come before
      for (auto* accesses : {&history.reads, &history.writes}) {
        erase_if(*accesses, [&](const Access& access) { return use.bytes.contains(access.bytes); });
      }
    }
    note(use.writes ? history.writes : history.reads, {moment, use.bytes, op});
  }
}

std::string advice(int first, int second) {
  return c10::str(
      "Let the second one wait: `second.wait_stream(first)`, or an event recorded on the first (", name_of(first),
      ") that the second one (", name_of(second), ") waits for.");
}

// The first access among them that the op's stream does not wait for; empty if there is none.
std::string unordered(
    Moment moment, const Clock& clock, const char* op, const Use& use, const std::vector<Access>& accesses,
    const char* has_done) {
  for (const auto& access : accesses) {
    if (access.bytes.overlaps(use.bytes) && !clock.covers(access.moment)) {
      return c10::str(
          "Race: ", op, " on ", name_of(moment.stream), use.writes ? " writes" : " reads", " memory that ", access.op,
          " on ", name_of(access.moment.stream), has_done, ", and nothing orders the two. ",
          advice(access.moment.stream, moment.stream));
    }
  }
  return "";
}

// Checks the uses of an op. Called with the lock; the message is empty where all is in order.
std::string check_all(Moment moment, const Clock& clock, const char* op, const std::vector<Use>& uses) {
  std::string message;
  for (const auto& use : uses) {
    const auto& history = *use.history;
    message = unordered(moment, clock, op, use, history.writes, " has written");
    if (message.empty() && use.writes) {
      message = unordered(moment, clock, op, use, history.reads, " has read");
    }
    if (message.empty() && !clock.covers(history.allocated)) {
      message = c10::str(
          "Race: ", op, " on ", name_of(moment.stream), " uses memory that was allocated on ",
          name_of(history.allocated.stream), ", whose earlier work may still be using it. ",
          advice(history.allocated.stream, moment.stream));
    }
    if (!message.empty()) {
      break;
    }
  }
  return message;
}

// The records of what an op needs to be through on virtual time: who wrote what it uses, and who read what it writes.
std::vector<RecordId> needs_of(const std::vector<Use>& uses) {
  std::set<RecordId> needs;
  const auto add = [&](const std::vector<Access>& accesses, const Bytes& bytes) {
    for (const auto& access : accesses) {
      if (access.moment.record >= 0 && access.bytes.overlaps(bytes)) {
        needs.insert(access.moment.record);
      }
    }
  };
  for (const auto& use : uses) {
    add(use.history->writes, use.bytes);
    if (use.writes) {
      add(use.history->reads, use.bytes);
    }
  }
  return {needs.begin(), needs.end()};
}

// A block that was given back while other streams than its home's may still be at work with it.
struct Freed {
  size_t bytes;
  std::vector<Access> accesses;
};

// By home. Never destroyed, as the state of the streams; with their lock.
std::map<int, std::vector<Freed>>& g_freed = *new std::map<int, std::vector<Freed>>();

}  // namespace

void set_strict(bool strict) { g_strict = strict; }

void race(const std::string& message) { throw RaceError(message); }

// What lies between its elements counts as a tensor's, too.
Bytes bytes_of(const at::Tensor& tensor) {
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto begin = static_cast<size_t>(tensor.storage_offset()) * tensor.dtype().itemsize();
  return {begin, begin + static_cast<size_t>(elements) * tensor.dtype().itemsize()};
}

void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) {
    return;
  }
  if (auto* history = history_of(tensor.storage().data_ptr())) {
    uses.push_back({history, bytes_of(tensor), writes});
  }
}

Moment launch(const c10::Stream& stream, const char* op, const std::vector<Use>& uses) {
  const Recorder recorder;
  const auto number = number_of(stream);
  std::string message;
  Moment moment;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto& clock = clock_of(number);
    moment = {number, clock.next(number)};
    if (recorder) {
      moment.record = recorder.add(number, op, needs_of(uses));
      moment.thread = recorder.thread();
    }
    message = check_all(moment, clock, op, uses);
    if (message.empty()) {
      note_all(moment, op, uses);
    }
  }
  raise_if_strict(message);
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

void record_use(const c10::DataPtr& memory, const c10::Stream& stream) {
  if (auto* history = history_of(memory)) {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto& recorded = history->recorded;
    if (std::find(recorded.begin(), recorded.end(), number_of(stream)) == recorded.end()) {
      recorded.push_back(number_of(stream));
    }
  }
}

// --- memory that is given back and handed out again, perhaps while it is still in use ---

void hand_out(History& history, c10::DeviceIndex index, size_t bytes) {
  std::string message;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto home = number_of(current_stream({kSim, index}));
    const auto& clock = clock_of(home);
    history.allocated = {home, clock.of(home)};
    auto& freed = g_freed[home];
    for (auto block = freed.begin(); block != freed.end() && message.empty();) {
      const auto other = std::find_if(block->accesses.begin(), block->accesses.end(), [&](const Access& access) {
        return !clock.covers(access.moment);
      });
      if (other != block->accesses.end() && block->bytes < bytes) {
        ++block;  // too small to be handed out now
        continue;
      }
      if (other != block->accesses.end()) {
        message = c10::str(
            "Race: memory of ", name_of(home), " was freed while ", other->op, " on ", name_of(other->moment.stream),
            " may still use it, and is handed out again. Call `tensor.record_stream(stream)` before it is freed, or ",
            "let its own stream wait first.");
      }
      block = freed.erase(block);
    }
  }
  raise_if_strict(message);
}

void take_back(const History& history, size_t bytes) noexcept {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto home = history.allocated.stream;
  // The allocator waits for the home stream and for the recorded ones, and for what these wait for.
  Clock waited_for = clock_of(home);
  for (const auto number : history.recorded) {
    waited_for.join(clock_of(number));
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
    g_freed[home].push_back(std::move(freed));
  }
}

}  // namespace sim
