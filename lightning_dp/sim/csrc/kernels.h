// How ops run on simulated devices.
#pragma once

#include "sim.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace sim {

// Runs any op through its CPU kernel.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// A CPU tensor on the same memory, which it keeps alive; a CPU tensor itself.
at::Tensor cpu_alias(const at::Tensor& tensor);

}  // namespace sim
