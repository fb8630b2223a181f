// Accesses to memory, and those among them that nothing orders.
#include "order_state.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <set>

namespace sim {
namespace {

// More stretches than this of one block are put together, at the price of a false alarm where they interleave.
constexpr size_t kMostStretches = 256;

struct RaceError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override {
    static PyObject* type = PyObject_GetAttrString(PyImport_ImportModule("sim_devices.device_module"), "RaceError");
    return type;
  }
};

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

void race(const std::string& message) { throw RaceError(message); }

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

}  // namespace sim
