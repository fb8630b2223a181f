// How ops run on simulated devices.
#pragma once

#include "order.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace sim {

// Runs any op through its CPU kernel.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Notes that an op reads or writes a tensor's bytes.
void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool writes);

// A CPU tensor on the same memory, which it keeps alive; a CPU tensor itself.
at::Tensor cpu_alias(const at::Tensor& tensor);

// Copies of any two devices, of which at least one is simulated (copies.cpp).
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target);

}  // namespace sim
