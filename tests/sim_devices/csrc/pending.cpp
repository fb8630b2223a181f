// Copies that the host has not waited for: of what comes to host memory only poison is there, and what goes to a device
// must stay as it is. A stream that goes on with such memory finds there what it should.
#include "kernels.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <deque>
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
using Copies = std::vector<Pending>;

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
  auto bytes = bytes_of(host);
  const auto address = reinterpret_cast<size_t>(host.storage().data());
  bytes.begin += address;
  bytes.end += address;
  return bytes;
}

// Takes those out that pass a test. Called with the lock; to be let go without it.
template <typename Test>
Copies taken(Test test) {
  Copies out;
  for (auto pending = g_pending.begin(); pending != g_pending.end();) {
    if (test(*pending)) {
      out.push_back(std::move(*pending));
      pending = g_pending.erase(pending);
    } else {
      ++pending;
    }
  }
  return out;
}

// Host memory as a stream finds it, while this lives. Made with the lock.
class SeenBy {
 public:
  SeenBy(const c10::Stream& stream, const at::Tensor& host) {
    const auto place = place_of(host);
    for (const auto& pending : g_pending) {
      const bool arrives = pending.data.defined() && overlap(place_of(pending.host), place);
      if (arrives && has_waited_for(stream, pending.moment)) {
        hidden_.emplace_back(pending.host, pending.host.clone());
        pending.host.copy_(pending.data);
      }
    }
  }
  ~SeenBy() {
    for (auto hidden = hidden_.rbegin(); hidden != hidden_.rend(); ++hidden) {
      hidden->first.copy_(hidden->second);
    }
  }
  SeenBy(const SeenBy&) = delete;
  SeenBy& operator=(const SeenBy&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> hidden_;
};

void check(bool is_unchanged) {
  if (!is_unchanged) {
    race(
        "Race: the pinned source of a copy with non_blocking=True was changed before the copy was through. Wait for the "
        "stream that copies, or write to other memory.");
  }
}

}  // namespace

void copy_to_host_later(const at::Tensor& from, const at::Tensor& host, const c10::Stream& stream, Moment moment) {
  Plain plain;
  const auto place = place_of(host);
  Copies readers, overwritten;
  bool is_unchanged = true;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    readers = taken([&](const Pending& pending) {
      const bool reads = !pending.data.defined() && overlap(place_of(pending.host), place);
      return reads && has_waited_for(stream, pending.moment);
    });
    for (const auto& reader : readers) {
      SeenBy seen(stream, reader.host);
      is_unchanged = is_unchanged && hash_of(reader.host) == reader.hash;
    }
    overwritten = taken([&](const Pending& pending) {
      return pending.data.defined() && contains(place, place_of(pending.host));
    });
    auto data = at::empty_like(host, host.options().pinned_memory(false)).copy_(from);
    poison(host, data);
    g_pending.push_back({moment, host, std::move(data)});
  }
  check(is_unchanged);
}

void copy_to_device_later(
    const at::Tensor& host, const at::Tensor& to, const c10::Stream& stream, Moment moment, bool is_staged) {
  Plain plain;
  std::lock_guard<std::mutex> lock(g_mutex);
  SeenBy seen(stream, host);
  to.copy_(host);
  if (!is_staged) {
    g_pending.push_back({moment, host, {}, hash_of(host)});
  }
}

void deliver() {
  Plain plain;
  Copies arrived;
  bool is_unchanged = true;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    if (g_pending.empty()) {
      return;
    }
    const auto known = host_now();  // for all of them the same, whatever others wait for meanwhile
    arrived = taken([&](const Pending& pending) { return covers(known, pending.moment); });
    for (const auto& pending : arrived) {
      if (pending.data.defined()) {
        pending.host.copy_(pending.data);
      } else {
        is_unchanged = is_unchanged && hash_of(pending.host) == pending.hash;
      }
    }
  }
  check(is_unchanged);
}

}  // namespace sim
