#include "recorder.h"

#include <Python.h>

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>
#include <torch/csrc/PyInterpreter.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace sim {

namespace {

const std::string kKey = "lightning_dp.sim";  // among PyTorch's thread-local objects

struct State {
  std::mutex mutex;
  int recording = 0;
  int64_t version = 0;  // changes with every change
  RecordId first = 0;
  std::vector<Record> records;
  std::vector<std::string> threads;
};

// Never destroyed: threads may outlive main().
State& state() {
  static auto* state = new State();
  return *state;
}

std::atomic<bool> g_records{false};
thread_local int t_thread = -1;

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

[[noreturn]] void raise_python_error() {
  PyErr_Print();
  TORCH_CHECK(false, "Expected lightning_dp.sim.virtual_time to answer; its error is printed above.");
}

// Needs the interpreter, as all that calls Python.
PyObject* ask(const char* function, PyObject* arguments) {
  auto* module = PyImport_ImportModule("lightning_dp.sim.virtual_time");
  auto* callable = module == nullptr ? nullptr : PyObject_GetAttrString(module, function);
  auto* answer = callable == nullptr ? nullptr : PyObject_CallObject(callable, arguments);
  Py_XDECREF(callable);
  Py_XDECREF(module);
  Py_XDECREF(arguments);
  if (answer == nullptr) {
    raise_python_error();
  }
  return answer;
}

// Names tell threads apart from one run to the next, which numbers do not. Autograd's have none in Python.
std::string name_here() {
  auto name = c10::getThreadName();
  if (name.rfind("pt_", 0) == 0) {
    return name;
  }
  WithGil gil;
  auto* answer = ask("thread_name", nullptr);
  name = PyUnicode_AsUTF8(answer);
  Py_DECREF(answer);
  return name;
}

int thread_here() {
  if (t_thread < 0) {
    auto name = name_here();
    std::lock_guard<std::mutex> lock(state().mutex);
    t_thread = static_cast<int>(state().threads.size());
    state().threads.push_back(std::move(name));
  }
  return t_thread;
}

ScopePointer scope_in(PyObject* capsule) {
  return *static_cast<ScopePointer*>(PyCapsule_GetPointer(capsule, kKey.c_str()));
}

// What is found among the thread's objects; of an earlier recording, too.
ScopePointer found_scope() {
  using Objects = at::impl::ThreadLocalPythonObjects;
  if (!Objects::contains(kKey)) {
    return nullptr;
  }
  return scope_in(Objects::get(kKey)->ptr(getPyInterpreter()));
}

void free_scope(PyObject* capsule) {
  delete static_cast<ScopePointer*>(PyCapsule_GetPointer(capsule, kKey.c_str()));
}

void put_scope(const ScopePointer& scope) {
  using Objects = at::impl::ThreadLocalPythonObjects;
  WithGil gil;
  if (scope == nullptr) {
    if (Objects::contains(kKey)) {
      Objects::erase(kKey);
    }
    return;
  }
  auto* capsule = PyCapsule_New(new ScopePointer(scope), kKey.c_str(), &free_scope);
  Objects::set(kKey, std::make_shared<c10::SafePyObject>(capsule, getPyInterpreter()));
}

// The latest records of those who have worked for a scope, and of their helpers. Called with the lock.
void join_helpers(Scope& scope, std::vector<RecordId>& after) {
  for (const auto& [helper, latest] : scope.helpers) {
    after.push_back(latest);
    join_helpers(*helper, after);
  }
  scope.helpers.clear();
}

RecordId append(const ScopePointer& scope, Record record) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& all = state();
  if (scope->recording != all.recording) {
    return -1;  // another one has begun meanwhile
  }
  const auto parent = scope->parent.lock();
  if (scope->latest < 0 && parent != nullptr && parent->latest >= 0) {
    record.after.push_back(parent->latest);
  }
  join_helpers(*scope, record.after);
  record.thread = scope->thread;
  all.records.push_back(std::move(record));
  ++all.version;
  scope->latest = all.first + static_cast<RecordId>(all.records.size()) - 1;
  if (parent != nullptr) {
    parent->helpers[scope] = scope->latest;
  }
  return scope->latest;
}

// A record of the present recording, to be changed; nullptr for others. Called with the lock.
Record* at(RecordId id) {
  auto& all = state();
  const auto index = id - all.first;
  ++all.version;
  const bool is_known = id >= all.first && index < static_cast<RecordId>(all.records.size());
  return is_known ? &all.records[static_cast<size_t>(index)] : nullptr;
}

}  // namespace

bool is_recording() { return g_records.load(std::memory_order_relaxed); }

void start_recording() {
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto& all = state();
    all.first += static_cast<RecordId>(all.records.size());
    all.records.clear();
    ++all.recording;
    ++all.version;
  }
  g_records = true;
  own_scope();  // whoever works for this thread finds it
}

void stop_recording() { g_records = false; }

Recorded recorded() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return {state().first, state().records, state().threads};
}

int64_t recording_version() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().version;
}

ScopePointer own_scope() {
  const auto thread = thread_here();
  auto found = found_scope();
  int recording = 0;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    recording = state().recording;
  }
  if (found != nullptr && found->recording != recording) {
    found = nullptr;
  }
  if (found == nullptr || found->thread != thread) {
    found = std::make_shared<Scope>(Scope{thread, recording, found, -1, {}});
    put_scope(found);
  }
  return found;
}

ScopePointer exchange_scope(const ScopePointer& scope) {
  auto before = found_scope();
  put_scope(scope);
  return before;
}

Recorder::Recorder() : scope_(is_recording() ? own_scope() : nullptr) {}

int Recorder::thread() const { return scope_ == nullptr ? 0 : scope_->thread; }

RecordId Recorder::add(int stream, std::string name, std::vector<RecordId> needs) const {
  Record record;
  record.stream = stream;
  record.name = std::move(name);
  record.needs = std::move(needs);
  return append(scope_, std::move(record));
}

void Recorder::host_wait(std::vector<RecordId> needs) const {
  Record record;
  record.kind = Kind::host_wait;
  record.needs = std::move(needs);
  append(scope_, std::move(record));
}

void set_op(RecordId id, int64_t nanoseconds) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (auto* record = at(id)) {
    record->kind = Kind::op;
    record->nanoseconds = nanoseconds;
  }
}

void set_copy(RecordId id, int source, int target, int64_t bytes, int64_t nanoseconds) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (auto* record = at(id)) {
    record->kind = Kind::copy;
    record->source = source;
    record->target = target;
    record->bytes = bytes;
    record->nanoseconds = nanoseconds;
  }
}

double milliseconds_between(RecordId start, RecordId end) {
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    TORCH_CHECK(
        std::min(start, end) >= state().first,
        "Expected two events that were recorded since torch.sim.set_clock(\"virtual\"), got one from before. Record both "
        "after it.");
  }
  WithGil gil;
  auto* answer = ask("milliseconds_between", Py_BuildValue("(LL)", static_cast<long long>(start), static_cast<long long>(end)));
  const auto milliseconds = PyFloat_AsDouble(answer);
  Py_DECREF(answer);
  return milliseconds;
}

}  // namespace sim
