// The arguments of one call of an op, as they lie on the interpreter's stack.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

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

}  // namespace sim
