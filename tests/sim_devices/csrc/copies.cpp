// Copies, as CUDA makes them. One that does not block is through when the host has waited for it: what comes to the
// host is not there before, and pinned memory is read when the stream gets there. Pageable memory is staged, so that
// the host may change it at once.
#include "kernels.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

namespace sim {
namespace {

void copy_now(const at::Tensor& from, const at::Tensor& to) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  to.copy_(from);
}

// Between a device and the host.
void copy_by_host(
    const at::Tensor& source, const at::Tensor& target, bool non_blocking, const c10::Stream& stream, Moment moment) {
  const auto from = cpu_alias(source), to = cpu_alias(target);
  const auto& host = is_sim(source) ? to : from;
  if (!non_blocking) {  // after all that the stream has done to this memory before
    settle(stream.device_index());
    host_waits_for(stream);
  }
  if (!non_blocking || !is_strict() || host.numel() == 0) {
    copy_now(from, to);
  } else if (is_sim(source)) {
    copy_to_host_later(from, to, stream, moment);
  } else {
    copy_to_device_later(from, to, stream, moment, !is_pinned(host.storage().data()));
  }
}

int index_of(const at::Tensor& tensor) { return tensor.device().type() == kSim ? tensor.device().index() : -1; }

// Within a device a copy is an op. On virtual time one between devices takes their link's time, and none of theirs.
void take_time(const at::Tensor& source, const at::Tensor& target, RecordId record) {
  const auto from = index_of(source), to = index_of(target);
  const auto bytes = static_cast<int64_t>(source.nbytes());
  if (from != to && record >= 0) {
    set_copy(record, from, to, bytes, bytes > 0 ? transfer_nanoseconds(from, to, bytes) : 0);
    return;
  }
  const double moved = static_cast<double>(source.nbytes() + target.nbytes());
  const auto device = static_cast<c10::DeviceIndex>(to >= 0 ? to : from);
  const auto nanoseconds = charge(device, {target.numel(), static_cast<double>(target.numel()), moved});
  if (record >= 0) {
    set_op(record, nanoseconds);
  }
}

}  // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool is_between_sims = is_sim(source) && is_sim(target);
  if (source.device() != target.device()) {
    count_copy(source.device(), target.device(), static_cast<int64_t>(source.nbytes()));
    if (is_sim(source)) {
      settle(source.device().index());
    }
  }
  const auto stream = current_stream((is_sim(source) ? source : target).device());
  Moment moment;
  if (is_watched()) {
    std::vector<Use> uses;
    add_use(uses, source, false);
    add_use(uses, target, true);
    moment = launch_copy(stream, is_between_sims ? current_stream(target.device()) : stream, uses);
  }
  take_time(source, target, moment.record);
  if (is_between_sims) {
    copy_now(cpu_alias(source), cpu_alias(target));
  } else {
    copy_by_host(source, target, non_blocking, stream, moment);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto memory = device_allocator()->allocate(bytes);
  if (const auto kept = std::min(bytes, storage.nbytes())) {
    if (is_watched()) {
      launch(current_stream(storage.device()), "a resize",
             {{history_of(storage.data_ptr()), {0, kept}, false}, {history_of(memory), {0, kept}, true}});
    }
    device_allocator()->copy_data(memory.get(), storage.data(), kept);
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

}  // namespace sim
