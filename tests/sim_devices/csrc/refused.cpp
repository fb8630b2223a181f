// What ops refuse, on CUDA and here.
#include "rules.h"

#include <optional>

namespace sim {

c10::Device device_of_op(const c10::OperatorHandle& op, const Arguments& arguments) {
  const auto& name = arguments.op_name();
  std::optional<c10::Device> device;
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), name,
      " has no CPU kernel, so that simulated devices cannot run it.");
  std::optional<c10::Device> seen;  // of the tensors that must agree
  arguments.for_each([&](const c10::Argument& argument, const c10::IValue& value) {
    if (value.isDevice() && value.toDevice().type() == kSim) {
      device = full_device(value.toDevice());
    }
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      const bool free_to_differ =
          tensor.is_cpu() && ((tensor.dim() == 0 && !written) ||
                              (argument.name() == "indices" && takes_cpu_indices(name)));
      if (free_to_differ) {
        return;
      }
      TORCH_CHECK(
          !seen || *seen == tensor.device(),
          "Expected all tensors to be on the same device, but found at least two devices, ", *seen, " and ",
          tensor.device(), "! (when checking argument '", argument.name(), "' of ", op.operator_name(), ")");
      TORCH_CHECK_NOT_IMPLEMENTED(
          tensor.layout() == c10::kStrided, name, " was given a tensor of layout ", tensor.layout(),
          "; simulated devices have strided tensors only.");
      seen = tensor.device();
    });
  });
  if (seen && seen->type() == kSim) {
    device = seen;
  }
  TORCH_INTERNAL_ASSERT(device, op.operator_name(), " came here without a simulated device.");
  return *device;
}

void check_strides(const Arguments& arguments) {
  const auto& name = arguments.op_name();
  if (!is_strict() || name.rfind("aten::_fused_", 0) != 0 || !arguments.at(0).isTensorList()) {
    return;
  }
  const auto parameters = arguments.at(0).toTensorVector();
  arguments.for_each([&](const c10::Argument& argument, const c10::IValue& value) {
    if (!value.isTensorList() || argument.name() == "state_steps") {
      return;
    }
    const auto tensors = value.toTensorVector();
    for (size_t i = 0; i < tensors.size() && i < parameters.size(); ++i) {
      TORCH_CHECK(
          tensors[i].strides() == parameters[i].strides(), name, ": expected ", argument.name(), "[", i,
          "] of the strides of its parameter, ", parameters[i].strides(), ", got ", tensors[i].strides(), ".");
    }
  });
}

}  // namespace sim
