// Virtual time: what is issued, by whom, on which stream, what it waits for, and how long it takes.
//
// Here it is only written down. When each of it begins and ends is computed afterwards (schedule.py), from the order
// within each host thread and from what waits for what. How fast the threads were, and in which order they came here,
// is not looked at: so that the result is the same on an idle machine and on a busy one.
//
// Of two host threads one goes on after the other where it uses memory or an event of the other's, and where it works
// for the other, which waits meanwhile: in a backward, or as a replica. The latter is known by scopes. Every thread has
// its scope among what PyTorch hands on to autograd's threads; who finds the scope of another thread there works for
// that one.
#pragma once

#include "sim.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sim {

using RecordId = int64_t;  // -1: none. They go on counting from one recording to the next.

enum class Kind { mark, op, copy, host_wait };

struct Record {
  Kind kind = Kind::mark;  // a mark is a point on a stream: an event, or the beginning of what waits
  int thread = 0;
  int stream = -1;               // none: the thread itself waits
  std::string name;
  std::vector<RecordId> needs;   // it begins when these have ended, and is issued after them
  std::vector<RecordId> after;   // it is issued after these
  int64_t nanoseconds = 0;
  int source = -1, target = -1;  // devices of a copy; -1: the CPU
};

// What one thread does for itself, or for the one that handed work over to it.
struct Scope {
  int thread = 0;
  int recording = 0;  // scopes of earlier recordings do not count
  std::weak_ptr<Scope> parent;  // whom it works for
  RecordId latest = -1;         // of its thread
  // The latest records of those who work for it, since it last went on.
  std::map<std::shared_ptr<Scope>, RecordId> helpers;
};
using ScopePointer = std::shared_ptr<Scope>;

bool is_recording();
// Recording begins anew; virtual time is zero.
void start_recording();
void stop_recording();
// What was recorded; `first` is the number of the first record.
struct Recorded {
  RecordId first;
  std::vector<Record> records;
  std::vector<std::string> threads;  // their names
};
Recorded recorded();
int64_t recording_version();  // changes with every change of what was recorded

// The calling thread's part in the recording; none on wall time. Make it before taking a lock: it may have to wait for
// the interpreter.
class Recorder {
 public:
  Recorder();
  explicit operator bool() const { return scope_ != nullptr; }
  int thread() const;
  RecordId add(int stream, std::string name, std::vector<RecordId> needs) const;
  RecordId mark(int stream, std::vector<RecordId> needs = {}) const { return add(stream, "", std::move(needs)); }
  void host_wait(std::vector<RecordId> needs) const;

 private:
  ScopePointer scope_;
};

// What has been added turns out to be an op or a copy that takes time. Nothing happens without a record.
void set_op(RecordId id, int64_t nanoseconds);
void set_copy(RecordId id, int source, int target, int64_t nanoseconds);

// Milliseconds between two events on virtual time; none if that is not known of both any more, or was not yet.
std::optional<double> milliseconds_between(RecordId start, RecordId end);

// The calling thread's scope, for threads that work for it; and what a thread's scope is from now on. None: no scope.
ScopePointer own_scope();
ScopePointer exchange_scope(const ScopePointer& scope);

// --- what is asked of Python (module.cpp) ---

// Names tell threads apart from one run to the next, which numbers do not.
std::string thread_name();
double computed_milliseconds(RecordId start, RecordId end);

}  // namespace sim
