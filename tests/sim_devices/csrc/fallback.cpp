// Every op of a simulated device: check that its tensors lie on one device, run the CPU's kernel on the same memory,
// and hand the results to the device. Nothing is copied.
//
// In-place and out= arguments need no copy back, as the CPU tensors share their memory; only metadata (a resized out=,
// squeeze_) is carried over. A result that shares an argument's storage is a view of that argument.
#include "aliases.h"
#include "rules.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

namespace sim {
namespace {

// One call of one op.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        arguments_(schema_, stack),
        device_(device_of_op(op, arguments_)) {}

  void run() {
    const bool waits = tells_the_host(arguments_);
    const bool asks_a_device = !asks_no_device(schema_.name());
    if (asks_a_device) {
      check_strides(arguments_);
      launch_op();
    }
    try {
      compute();
    } catch (...) {
      forget_launch(moment_, uses_);
      throw;
    }
    if (waits || (asks_a_device && !has_tensors_ && !schema_.returns().empty())) {
      if (is_recording()) {
        read_result();
      }
      host_waits_for(current_stream(device_));
    }
  }

 private:
  void compute() {
    if (has_speed(device_.index())) {
      note_shapes();
    }
    if (schema_.returns().empty()) {
      count_written();
    }
    to_cpu();
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    keep_resized_arguments();
    to_sim();
    if (computed_elements_ > 0 || !has_tensors_) {
      take_time();
    }
  }

  // Begins the op on the device's current stream: it reads its arguments and writes those that it changes. What it only
  // makes a view of is not looked at.
  void launch_op() {
    arguments_.for_each([&](const c10::Argument& argument, const c10::IValue& value) {
      const bool aliases = argument.alias_info() != nullptr;
      const bool writes = (aliases && argument.alias_info()->isWrite()) || is_running_statistic(argument);
      if (aliases && !writes) {
        return;
      }
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        if (is_sim(tensor)) {
          add_use(uses_, tensor, writes);
        }
      });
    });
    moment_ = launch(current_stream(device_), schema_.name().c_str(), uses_);
  }

  // Batch norm's schemas do not say that it writes these.
  bool is_running_statistic(const c10::Argument& argument) {
    if (argument.name() != "running_mean" && argument.name() != "running_var") {
      return false;
    }
    const auto& name = schema_.name();
    return name == "aten::batch_norm_update_stats" || (name == "aten::native_batch_norm" && arguments_["training"].toBool());
  }

  // For its duration: the arguments are gone when the op has run.
  void note_shapes() {
    arguments_.for_each([&](const c10::Argument& argument, const c10::IValue& value) {
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        shapes_.inputs.push_back(tensor.sizes().vec());
        touched_bytes_ += static_cast<double>(tensor.nbytes());
      });
      if (argument.name() == "output_mask" && value.isBoolList() && value.toBoolList().size() > 1) {
        const auto mask = value.toBoolList();
        shapes_.gradients = static_cast<int>(mask[0]) + static_cast<int>(mask[1]);
      }
    });
  }

  // Likewise, for an op that returns nothing.
  void count_written() {
    arguments_.for_each([&](const c10::Argument& argument, const c10::IValue& value) {
      if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
        for_each_tensor(value, [&](const at::Tensor& tensor) { computed_elements_ += tensor.numel(); });
      }
    });
  }

  void to_cpu() {
    arguments_.for_each([&](const c10::Argument& argument, c10::IValue& value) {
      if (value.isTensor()) {
        value = aliases_.cpu_of(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> tensors;
        for (const at::Tensor& tensor : value.toTensorList()) {
          tensors.push_back(aliases_.cpu_of(tensor));
        }
        value = std::move(tensors);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
          tensors.push_back(tensor ? std::optional<at::Tensor>(aliases_.cpu_of(*tensor)) : std::nullopt);
        }
        value = std::move(tensors);
      } else if (value.isDevice()) {
        value = c10::Device(c10::kCPU);
      } else if (value.isGenerator()) {
        value = cpu_generator(value.toGenerator(), device_);
      } else if (value.isNone() && *argument.type() == *generator_type()) {
        value = cpu_generator(default_generator(device_.index()), device_);
      }
    });
  }

  static const c10::TypePtr& generator_type() {
    static const auto& type = *new c10::TypePtr(c10::OptionalType::create(c10::GeneratorType::get()));
    return type;
  }

  void keep_resized_arguments() {
    aliases_.for_each_resized([&](const c10::Storage& storage, const c10::Storage& cpu) {
      // The old block, and its history with it, is freed next; `run` looks at the uses again after an error.
      const auto* history = history_of(storage.data_ptr());
      uses_.erase(
          std::remove_if(uses_.begin(), uses_.end(), [&](const Use& use) { return use.history == history; }),
          uses_.end());
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap(adopt(cpu, device_.index()));
      note_made(storage);
    });
    aliases_.carry_sizes();
  }

  void to_sim() {
    const auto count = schema_.returns().size();
    for (auto value = stack_->end() - static_cast<std::ptrdiff_t>(count); value != stack_->end(); ++value) {
      if (value->isTensor()) {
        *value = sim_of(value->toTensor());
      } else if (value->isTensorList()) {
        c10::List<at::Tensor> tensors;
        for (const at::Tensor& tensor : value->toTensorList()) {
          tensors.push_back(sim_of(tensor));
        }
        *value = std::move(tensors);
      }
    }
  }

  at::Tensor sim_of(const at::Tensor& cpu) {
    if (!cpu.defined()) {
      return cpu;
    }
    has_tensors_ = true;
    if (auto argument = aliases_.sim_of(cpu); argument.defined()) {  // in-place and out=: the argument itself
      count_output(cpu);
      return argument;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        cpu.layout() == c10::kStrided && !cpu.is_nested(), schema_.name(),
        " makes a sparse or nested tensor; simulated devices have strided tensors only.");
    auto& storage = aliases_.sim_storage_of(cpu);
    if (!storage) {
      storage = adopt_storage(cpu.storage(), device_.index());
      note_made(storage);
      count_output(cpu);
    }
    return tensor_on(storage, cpu, c10::DispatchKey::PrivateUse1);
  }

  void count_output(const at::Tensor& cpu) {
    computed_elements_ += cpu.numel();
    touched_bytes_ += static_cast<double>(cpu.nbytes());
  }

  void take_time() const {
    const auto flops = has_speed(device_.index()) ? flops_of(schema_.name(), shapes_, computed_elements_) : 0;
    set_op(moment_.record, charge(device_.index(), {computed_elements_, flops, touched_bytes_}));
  }

  // What the host reads comes over the link, as a number.
  void read_result() const {
    constexpr int64_t kBytes = 8;
    const auto copy = launch(current_stream(device_), "a number for the host", {});
    set_copy(copy.record, device_.index(), -1, transfer_nanoseconds(device_.index(), -1, kBytes));
  }

  void note_made(const c10::Storage& storage) const {
    made_by(*history_of(storage.data_ptr()), moment_, storage.nbytes(), schema_.name().c_str());
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  const Arguments arguments_;
  const c10::Device device_;
  Aliases aliases_;
  Moment moment_;
  std::vector<Use> uses_;
  Shapes shapes_;
  double touched_bytes_ = 0;
  int64_t computed_elements_ = 0;
  bool has_tensors_ = false;
};

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }
