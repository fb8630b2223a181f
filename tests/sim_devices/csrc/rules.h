// What is known of ops by their names and their arguments, as CUDA has it.
#pragma once

#include "arguments.h"
#include "order.h"

namespace sim {

// --- what an op refuses (refused.cpp) ---

// The device that an op runs on. A CPU tensor may only be a number (0 dimensions, read only) or, where CUDA allows it,
// an index.
c10::Device device_of_op(const c10::OperatorHandle& op, const Arguments& arguments);
// A fused optimizer reads all its lists element by element in memory, so that CUDA's refuses others.
void check_strides(const Arguments& arguments);

// --- what an op tells the host (told.cpp) ---

// Ops whose index tensors may lie on the CPU.
bool takes_cpu_indices(const std::string& op_name);
// Whether its result is as large as the values say, so that CUDA's kernels wait, too; or an index has to be copied.
bool tells_the_host(const Arguments& arguments);
// Ops that look at tensors, and not at what is in them.
bool asks_no_device(const std::string& op_name);

}  // namespace sim
