// The arguments of one call of an op, as they lie on the interpreter's stack, and what CUDA's ops make of them: what they
// refuse, and what they tell the host.
#pragma once

#include "order.h"

#include <optional>
#include <string>
#include <unordered_set>

namespace sim {

// Looks at each tensor that there is in an argument.
template <typename Function>
void for_each_tensor(const c10::IValue& value, Function function) {
  const auto visit = [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      function(tensor);
    }
  };
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      visit(tensor.value_or(at::Tensor()));
    }
  }
}

class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, torch::jit::Stack* stack) : schema_(schema), stack_(stack) {}

  const std::string& op_name() const { return schema_.name(); }

  template <typename Function>
  void for_each(Function function) const {
    const auto& arguments = schema_.arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      function(arguments[i], at(i));
    }
  }

  c10::IValue& at(size_t i) const { return (*stack_)[stack_->size() - schema_.arguments().size() + i]; }
  const c10::IValue& operator[](const std::string& name) const { return at(*schema_.argumentIndexWithName(name)); }

 private:
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
};

// Ops whose index tensors may lie on the CPU.
inline bool takes_cpu_indices(const std::string& op_name) {
  return op_name == "aten::index" || op_name == "aten::_index_put_impl_" || op_name == "aten::_unsafe_index";
}

// The device that an op runs on. A CPU tensor may only be a number (0 dimensions, read only) or, where CUDA allows it,
// an index.
inline c10::Device device_of_op(const c10::OperatorHandle& op, const Arguments& arguments) {
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

// A fused optimizer reads all its lists element by element in memory, so that CUDA's refuses others.
inline void check_strides(const Arguments& arguments) {
  const auto& name = arguments.op_name();
  if (name.rfind("aten::_fused_", 0) != 0 || !arguments.at(0).isTensorList()) {
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

// Ops that look at tensors, and not at what is in them.
inline bool asks_no_device(const std::string& op_name) {
  return op_name == "aten::is_set_to" || op_name == "aten::_fused_sdp_choice";
}

// Whether its result is as large as the values say, so that CUDA's kernels wait, too; or an index has to be copied.
inline bool tells_the_host(const Arguments& arguments) {
  static const auto& of_values = *new std::unordered_set<std::string>{
      "aten::nonzero",  "aten::masked_select",      "aten::_unique",           "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount",
      "aten::repeat_interleave", "aten::multinomial"};
  const auto& name = arguments.op_name();
  if (of_values.count(name) > 0) {
    return true;
  }
  if (!takes_cpu_indices(name)) {
    return false;
  }
  const bool puts = name == "aten::_index_put_impl_";
  // CUDA fills by the mask itself.
  const bool fills = puts && arguments["values"].toTensor().numel() == 1 && !arguments["accumulate"].toBool();
  bool waits = false;
  for_each_tensor(arguments["indices"], [&](const at::Tensor& index) {
    const bool is_mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    waits = waits || index.is_cpu() || (is_mask && !fills);
  });
  return waits;
}

}  // namespace sim
