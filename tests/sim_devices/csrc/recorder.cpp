#include "recorder.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace sim {
namespace {

// --- the calling thread's scope, among the thread-local state that PyTorch hands on to autograd's threads ---
//
// [Note: no Python object in thread-local state]
// A thread destroys its thread-local state when it ends, for which nobody waits: `Thread.join` returns earlier, and the
// interpreter may be finalizing by then, or gone. To release a Python object there it would take the interpreter lock,
// with a thread state that finalization may free at the same time. So this state is of C++ alone.

using Info = c10::ThreadLocalDebugInfo;

const c10::DebugInfoKind kKind = c10::DebugInfoKind::TEST_INFO_2;

struct ScopeInfo final : c10::DebugInfoBase {
  explicit ScopeInfo(ScopePointer scope) : scope(std::move(scope)) {}
  const ScopePointer scope;
};

// The entry that this thread has pushed last. Others, such as a profiler's, may lie on top of it.
thread_local std::weak_ptr<Info> t_pushed;

bool is_on_top(const std::weak_ptr<Info>& entry) {
  const auto found = entry.lock();
  return found != nullptr && found == Info::current();
}

// The scope found there; of an earlier recording, too.
ScopePointer found_scope() {
  const auto* info = static_cast<ScopeInfo*>(Info::get(kKind));
  return info == nullptr ? nullptr : info->scope;
}

void put_scope(const ScopePointer& scope) {
  if (is_on_top(t_pushed)) {  // replaced, so that entries do not pile up
    Info::_pop(kKind);
  }
  if (found_scope() != scope) {
    Info::_push(kKind, std::make_shared<ScopeInfo>(scope));
    t_pushed = Info::current();
  }
}

// --- records ---

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

int thread_here() {
  if (t_thread < 0) {
    auto name = thread_name();
    std::lock_guard<std::mutex> lock(state().mutex);
    t_thread = static_cast<int>(state().threads.size());
    state().threads.push_back(std::move(name));
  }
  return t_thread;
}

// The latest records of those who have worked for a scope, and of their helpers. Called with the lock.
void join_helpers(Scope& scope, std::vector<RecordId>& after) {
  for (const auto& [helper, latest] : scope.helpers) {
    if (latest >= 0) {
      after.push_back(latest);
    }
    join_helpers(*helper, after);
  }
  scope.helpers.clear();
}

// The latest record of whom a scope works for. Called with the lock.
void begin_after(const Scope& scope, std::vector<RecordId>& after) {
  for (auto other = scope.parent.lock(); other != nullptr; other = other->parent.lock()) {
    if (other->latest >= 0) {
      after.push_back(other->latest);
      return;
    }
  }
}

// Those whom a scope works for will go on after it. Called with the lock.
void tell(ScopePointer scope) {
  for (auto parent = scope->parent.lock(); parent != nullptr; parent = scope->parent.lock()) {
    parent->helpers[scope] = scope->latest;
    scope = parent;
  }
}

RecordId append(const ScopePointer& scope, Record record) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& all = state();
  if (scope->recording != all.recording) {
    return -1;  // another one has begun meanwhile
  }
  if (scope->latest < 0) {
    begin_after(*scope, record.after);
  }
  join_helpers(*scope, record.after);
  record.thread = scope->thread;
  all.records.push_back(std::move(record));
  ++all.version;
  scope->latest = all.first + static_cast<RecordId>(all.records.size()) - 1;
  tell(scope);
  return scope->latest;
}

// Changes a record of the present recording.
template <typename Change>
void change(RecordId id, Change change) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& all = state();
  if (id >= all.first && id - all.first < static_cast<RecordId>(all.records.size())) {
    change(all.records[static_cast<size_t>(id - all.first)]);
    ++all.version;
  }
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
  change(id, [&](Record& record) {
    record.kind = Kind::op;
    record.nanoseconds = nanoseconds;
  });
}

void set_copy(RecordId id, int source, int target, int64_t nanoseconds) {
  change(id, [&](Record& record) {
    record.kind = Kind::copy;
    record.source = source;
    record.target = target;
    record.nanoseconds = nanoseconds;
  });
}

std::optional<double> milliseconds_between(RecordId start, RecordId end) {
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (std::min(start, end) < state().first) {
      return std::nullopt;
    }
  }
  return computed_milliseconds(start, end);
}

}  // namespace sim
