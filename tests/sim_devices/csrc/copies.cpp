// Copies, as CUDA makes them. One that does not block is through when the host has waited for it: of what comes to host
// memory only poison is there before, and pinned memory is read when the stream gets there: it must stay as it is. A
// stream that has waited, and goes on with such memory, finds there what it should. Pageable memory is staged, so that
// the host may change it at once.
#include "aliases.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <string_view>

namespace sim {
namespace {

struct Pending {
  Moment moment;
  at::Tensor host;
  at::Tensor data;  // what will be there; undefined for a copy to a device
  size_t hash = 0;  // of what was there, for a copy to a device
};

// Held while host memory is looked at or written to: who has waited finds all of it, though another thread delivers it.
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

Bytes place_of(const at::Tensor& host) {
  const auto address = reinterpret_cast<size_t>(host.storage().data());
  const auto bytes = bytes_of(host);
  return {address + bytes.begin, address + bytes.end};
}

// What passes the test has arrived, or its source been read. Called with the lock; what is returned is let go without
// it. Raises, at the end, where a source was changed before.
std::vector<Pending> finish(const std::function<bool(const Pending&)>& test, bool& is_unchanged) {
  std::vector<Pending> done;
  for (auto pending = g_pending.begin(); pending != g_pending.end();) {
    if (!test(*pending)) {
      ++pending;
      continue;
    }
    if (pending->data.defined()) {
      pending->host.copy_(pending->data);
    } else {
      is_unchanged = is_unchanged && hash_of(pending->host) == pending->hash;
    }
    done.push_back(std::move(*pending));
    pending = g_pending.erase(pending);
  }
  return done;
}

void check(bool is_unchanged) {
  if (!is_unchanged) {
    race(
        "Race: the pinned source of a copy with non_blocking=True was changed before the copy was through. Wait for the "
        "stream that copies, or write to other memory.");
  }
}

// Between CPU tensors that stand for a copy from a device to the host, or the other way round.
void copy_later(const at::Tensor& from, const at::Tensor& to, bool to_host, const c10::Stream& stream, Moment moment) {
  Plain plain;
  const auto& host = to_host ? to : from;
  const auto place = place_of(host);
  bool is_unchanged = true;
  std::vector<Pending> done;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    const auto is_known = [&](const Pending& pending) {
      return place_of(pending.host).overlaps(place) && has_waited_for(stream, pending.moment);
    };
    done = finish(is_known, is_unchanged);
    if (to_host) {
      auto data = at::empty_like(host, host.options().pinned_memory(false)).copy_(from);
      poison(host, data);
      g_pending.push_back({moment, host, std::move(data)});
    } else {
      to.copy_(host);
      if (is_pinned(host.storage().data())) {
        g_pending.push_back({moment, host, {}, hash_of(host)});
      }
    }
  }
  check(is_unchanged);
}

void copy_now(const at::Tensor& from, const at::Tensor& to) {
  Plain plain;
  to.copy_(from);
}

// Between a device and the host.
void copy_by_host(
    const at::Tensor& source, const at::Tensor& target, bool non_blocking, const c10::Stream& stream, Moment moment) {
  const auto from = cpu_alias(source), to = cpu_alias(target);
  if (!non_blocking) {  // after all that the stream has done to this memory before
    host_waits_for(stream);
  }
  if (!non_blocking || target.numel() == 0) {
    copy_now(from, to);
  } else {
    copy_later(from, to, is_sim(source), stream, moment);
  }
}

// Within a device a copy is an op; on virtual time one between devices takes their link's time, and none of theirs.
void take_time(const at::Tensor& source, const at::Tensor& target, RecordId record) {
  const auto index_of = [](const at::Tensor& tensor) { return is_sim(tensor) ? tensor.device().index() : -1; };
  const auto from = index_of(source), to = index_of(target);
  if (from != to && record >= 0) {
    const auto bytes = static_cast<int64_t>(source.nbytes());
    set_copy(record, from, to, bytes > 0 ? transfer_nanoseconds(from, to, bytes) : 0);
    return;
  }
  const double moved = static_cast<double>(source.nbytes() + target.nbytes());
  const auto device = static_cast<c10::DeviceIndex>(to >= 0 ? to : from);
  set_op(record, charge(device, {target.numel(), static_cast<double>(target.numel()), moved}));
}

}  // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool is_between_sims = is_sim(source) && is_sim(target);
  if (source.device() != target.device()) {
    count_copy(source.device(), target.device(), static_cast<int64_t>(source.nbytes()));
  }
  const auto stream = current_stream((is_sim(source) ? source : target).device());
  std::vector<Use> uses;
  add_use(uses, source, false);
  add_use(uses, target, true);
  const auto moment = launch_copy(stream, is_between_sims ? current_stream(target.device()) : stream, uses);
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
    launch(current_stream(storage.device()), "a resize",
           {{history_of(storage.data_ptr()), {0, kept}, false}, {history_of(memory), {0, kept}, true}});
    device_allocator()->copy_data(memory.get(), storage.data(), kept);
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

void deliver() {
  Plain plain;
  bool is_unchanged = true;
  std::vector<Pending> done;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    if (g_pending.empty()) {
      return;
    }
    const auto known = host_now();  // for all of them the same, whatever others wait for meanwhile
    done = finish([&](const Pending& pending) { return known->covers(pending.moment); }, is_unchanged);
  }
  check(is_unchanged);
}

}  // namespace sim
