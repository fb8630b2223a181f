// How ops run on simulated devices.
#pragma once

#include "order.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace sim {

// Whether a tensor lies on a simulated device.
inline bool is_sim(const at::Tensor& tensor) { return tensor.device().type() == kSim; }

// Runs any op through its CPU kernel.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The bytes of a tensor in its block (uses.cpp).
Bytes bytes_of(const at::Tensor& tensor);
// Notes that an op reads or writes a tensor, if it lies in memory that devices use: theirs, or pinned.
void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool writes);

// A CPU tensor on the same memory, which it keeps alive; a CPU tensor itself (aliases.cpp).
at::Tensor cpu_alias(const at::Tensor& tensor);

// Gives a storage other memory, with what fits of its content (copies.cpp).
void resize_storage(const c10::Storage& storage, size_t bytes);

// Copies of any two devices, of which at least one is simulated (copies.cpp).
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target);

// Copies between CPU tensors that stand for a copy from a device to host memory, or the other way round, which the host
// has not waited for (pending.cpp). One to a device is staged, unless it reads its source itself.
void copy_to_host_later(const at::Tensor& from, const at::Tensor& host, const c10::Stream& stream, Moment moment);
void copy_to_device_later(
    const at::Tensor& host, const at::Tensor& to, const c10::Stream& stream, Moment moment, bool is_staged);

}  // namespace sim
