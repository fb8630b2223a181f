// Copies, as CUDA makes them: one to pinned memory that does not block is not there until the host has waited for it,
// and one from pinned memory reads its source when the stream gets there. Pageable memory is staged: the host waits
// for what comes from a device, and may change a source at once.
#include "kernels.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <deque>
#include <limits>
#include <mutex>
#include <string_view>

namespace sim {
namespace {

// A copy that the host has not waited for.
struct Pending {
  Moment moment;
  at::Tensor target;  // in pinned memory, full of poison; undefined for a copy to a device
  at::Tensor data;    // what it will hold; or the source of a copy to a device
  size_t hash = 0;    // of that source
};

std::mutex& g_mutex = *new std::mutex();
std::deque<Pending>& g_pending = *new std::deque<Pending>();

// Plain copies between memory that the host can read.
struct Plain {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

void poison(const at::Tensor& target, const at::Tensor& data) {
  if (target.is_floating_point() || target.is_complex()) {
    target.fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (target.scalar_type() == at::kBool) {
    target.copy_(data.logical_not());
  } else {
    target.copy_(data.bitwise_not());
  }
}

size_t hash_of(const at::Tensor& tensor) {
  const auto plain = tensor.contiguous();
  return std::hash<std::string_view>()({static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()});
}

bool is_pinned_tensor(const at::Tensor& tensor) { return is_pinned(tensor.storage().data()); }

void write(const at::Tensor& source, const at::Tensor& target, bool later, Moment moment) {
  const auto from = cpu_alias(source), to = cpu_alias(target);
  if (!later) {
    to.copy_(from);
    return;
  }
  Pending pending{moment, {}, from, 0};
  if (target.is_cpu()) {
    pending.target = to;
    pending.data = at::empty_like(to, to.options().pinned_memory(false)).copy_(from);
    poison(to, pending.data);
  } else {
    to.copy_(from);
    pending.hash = hash_of(from);
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  g_pending.push_back(std::move(pending));
}

}  // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool from_sim = source.device().type() == kSim, to_sim = target.device().type() == kSim;
  const bool crosses = source.device() != target.device();
  if (crosses) {
    count_copy(source.device(), target.device(), static_cast<int64_t>(source.nbytes()));
    if (from_sim) {
      settle(source.device().index());
    }
  }
  const auto stream = current_stream((from_sim ? source : target).device());
  Moment moment;
  if (is_strict()) {
    std::vector<Use> uses;
    add_use(uses, source, false);
    add_use(uses, target, true);
    moment = launch_copy(stream, from_sim && to_sim ? current_stream(target.device()) : stream, uses);
  }
  {
    Plain plain;
    const auto& host = from_sim ? target : source;
    const bool is_host_copy = !(from_sim && to_sim);
    const bool later = is_strict() && is_host_copy && non_blocking && host.numel() > 0 && is_pinned_tensor(host);
    write(source, target, later, moment);
    charge((to_sim ? target : source).device().index(), target.numel());
    if (is_host_copy && !later && (from_sim || !non_blocking)) {
      settle(stream.device_index());
      host_waits_for(stream);
    }
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void deliver() {
  std::vector<Pending> arrived;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    for (auto pending = g_pending.begin(); pending != g_pending.end();) {
      if (host_has_waited_for(pending->moment)) {
        arrived.push_back(std::move(*pending));
        pending = g_pending.erase(pending);
      } else {
        ++pending;
      }
    }
  }
  Plain plain;
  bool has_changed = false;
  for (auto& pending : arrived) {
    if (pending.target.defined()) {
      pending.target.copy_(pending.data);
    } else {
      has_changed = has_changed || hash_of(pending.data) != pending.hash;
    }
  }
  if (has_changed) {
    race(
        "Race: the pinned source of a copy with non_blocking=True was changed before the copy was through. Wait for the "
        "stream that copies, or write to other memory.");
  }
}

}  // namespace sim
