// The calling thread's scope, among the thread-local state that PyTorch hands on to autograd's threads.
//
// [Note: no Python object in thread-local state]
// A thread destroys its thread-local state when it ends, for which nobody waits: `Thread.join` returns earlier, and the
// interpreter may be finalizing by then, or gone. To release a Python object there it would take the interpreter lock,
// with a thread state that finalization may free at the same time. So this state is of C++ alone.
#include "recorder.h"

#include <c10/util/ThreadLocalDebugInfo.h>

namespace sim {
namespace {

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

}  // namespace

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

}  // namespace sim
