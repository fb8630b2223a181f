// Every op of a simulated device: check that its tensors lie on one device, run the CPU's kernel on the same memory,
// and hand the results to the device. Nothing is copied.
//
// In-place and out= arguments need no copy back, as the CPU tensors share their memory; only metadata (a resized out=,
// squeeze_) is carried over. A result that shares an argument's storage is a view of that argument.
#include "kernels.h"
#include "order.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace sim {
namespace {

bool is_sim(const at::Tensor& tensor) { return tensor.device().type() == kSim; }

void copy_metadata(const at::Tensor& from, const at::Tensor& to) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}

at::Tensor tensor_on(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  copy_metadata(like, tensor);
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  // A scalar made on the device by PyTorch itself must not take part in type promotion as a tensor would.
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

c10::Storage share_with_cpu(const c10::Storage& storage) {
  auto* owner = new c10::Storage(storage);
  const auto free = [](void* context) { delete static_cast<c10::Storage*>(context); };
  return {
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), owner, free, c10::Device(c10::kCPU)), c10::GetCPUAllocator(),
      /*resizable=*/true};
}

// Ops whose index tensors may lie on the CPU, as with CUDA.
bool takes_cpu_indices(const std::string& op_name) {
  return op_name == "aten::index" || op_name == "aten::_index_put_impl_" || op_name == "aten::_unsafe_index";
}

// Ops whose result is as large as the values say, so that CUDA's kernels wait, too.
bool tells_the_host(const std::string& op_name) {
  static const auto& names = *new std::unordered_set<std::string>{
      "aten::nonzero",      "aten::masked_select", "aten::_unique",      "aten::_unique2",
      "aten::unique_dim",   "aten::bincount",      "aten::unique_consecutive", "aten::repeat_interleave",
      "aten::unique_dim_consecutive"};
  return names.count(op_name) > 0;
}

// One call of one op.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {}

  void run() {
    check_devices();
    if (is_strict()) {
      check_strides();
      launch_op();
    }
    to_cpu();
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    keep_resized_arguments();
    to_sim();
    wait();
  }

 private:
  template <typename Function>
  void for_each_argument(Function function) {
    const auto& arguments = schema_.arguments();
    const auto begin = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      function(arguments[i], (*stack_)[begin + i]);
    }
  }

  template <typename Function>
  static void for_each_tensor(const c10::IValue& value, Function function) {
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

  // Finds the op's device. A CPU tensor may only be a number (0 dimensions, read only) or, where CUDA allows it, an
  // index.
  void check_devices() {
    TORCH_CHECK_NOT_IMPLEMENTED(
        op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), schema_.name(),
        " has no CPU kernel, so that simulated devices cannot run it.");
    std::optional<c10::Device> seen;  // of the tensors that must agree
    for_each_argument([&](const c10::Argument& argument, const c10::IValue& value) {
      if (value.isDevice() && value.toDevice().type() == kSim) {
        device_ = full_device(value.toDevice());
      }
      const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        const bool free_to_differ =
            tensor.is_cpu() && ((tensor.dim() == 0 && !written) ||
                                (argument.name() == "indices" && takes_cpu_indices(schema_.name())));
        if (free_to_differ) {
          return;
        }
        TORCH_CHECK(
            !seen || *seen == tensor.device(),
            "Expected all tensors to be on the same device, but found at least two devices, ", *seen, " and ",
            tensor.device(), "! (when checking argument '", argument.name(), "' of ", op_.operator_name(), ")");
        TORCH_CHECK_NOT_IMPLEMENTED(
            tensor.layout() == c10::kStrided, schema_.name(), " was given a tensor of layout ", tensor.layout(),
            "; simulated devices have strided tensors only.");
        seen = tensor.device();
        if (written) {
          written_elements_ += tensor.numel();
        }
      });
    });
    if (seen && seen->type() == kSim) {
      device_ = seen;
    }
    TORCH_INTERNAL_ASSERT(device_, op_.operator_name(), " came here without a simulated device.");
  }

  // A fused optimizer reads all its lists element by element in memory, so that CUDA's refuses others.
  void check_strides() {
    if (schema_.name().rfind("aten::_fused_", 0) != 0) {
      return;
    }
    const auto& arguments = schema_.arguments();
    const auto begin = stack_->size() - arguments.size();
    if (!(*stack_)[begin].isTensorList()) {
      return;
    }
    const auto parameters = (*stack_)[begin].toTensorVector();
    for_each_argument([&](const c10::Argument& argument, const c10::IValue& value) {
      if (!value.isTensorList() || argument.name() == "state_steps") {
        return;
      }
      const auto tensors = value.toTensorVector();
      for (size_t i = 0; i < tensors.size() && i < parameters.size(); ++i) {
        TORCH_CHECK(
            tensors[i].strides() == parameters[i].strides(), schema_.name(), ": expected ", argument.name(), "[", i,
            "] of the strides of its parameter, ", parameters[i].strides(), ", got ", tensors[i].strides(), ".");
      }
    });
  }

  // Begins the op on the device's current stream: it reads its arguments and writes those that it changes. What it only
  // makes a view of is not looked at.
  void launch_op() {
    std::vector<Use> uses;
    for_each_argument([&](const c10::Argument& argument, const c10::IValue& value) {
      const bool aliases = argument.alias_info() != nullptr;
      const bool writes = aliases && argument.alias_info()->isWrite();
      if (aliases && !writes) {
        return;
      }
      for_each_tensor(value, [&](const at::Tensor& tensor) { add_use(uses, tensor, writes); });
    });
    moment_ = launch(current_stream(*device_), schema_.name().c_str(), uses);
  }

  void to_cpu() {
    for_each_argument([&](const c10::Argument& argument, c10::IValue& value) {
      if (value.isTensor()) {
        value = cpu_of(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> tensors;
        for (const at::Tensor& tensor : value.toTensorList()) {
          tensors.push_back(cpu_of(tensor));
        }
        value = std::move(tensors);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
          tensors.push_back(tensor ? std::optional<at::Tensor>(cpu_of(*tensor)) : std::nullopt);
        }
        value = std::move(tensors);
      } else if (value.isDevice()) {
        value = c10::Device(c10::kCPU);
      } else if (value.isGenerator()) {
        value = cpu_generator(value.toGenerator(), *device_);
      } else if (value.isNone() && *argument.type() == *generator_type()) {
        value = cpu_generator(default_generator(device_->index()), *device_);
      }
    });
  }

  static const c10::TypePtr& generator_type() {
    static const auto& type = *new c10::TypePtr(c10::OptionalType::create(c10::GeneratorType::get()));
    return type;
  }

  at::Tensor cpu_of(const at::Tensor& tensor) {
    if (!tensor.defined() || !is_sim(tensor)) {
      return tensor;
    }
    auto [known, is_new] = cpu_tensors_.try_emplace(tensor.unsafeGetTensorImpl());
    if (is_new) {
      known->second = {tensor, tensor_on(cpu_storage_of(tensor.storage()), tensor, c10::DispatchKey::CPU)};
      sim_tensors_[known->second.second.unsafeGetTensorImpl()] = tensor;
    }
    return known->second.second;
  }

  const c10::Storage& cpu_storage_of(const c10::Storage& storage) {
    auto [known, is_new] = cpu_storages_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) {
      known->second = {storage, share_with_cpu(storage)};
      sim_storages_[known->second.second.unsafeGetStorageImpl()] = storage;
    }
    return known->second.second;
  }

  // A kernel that resizes (out=, resize_) has given the CPU storage other memory: it becomes the device's.
  void keep_resized_arguments() {
    for (auto& [_, pair] : cpu_storages_) {
      auto& [storage, cpu] = pair;
      auto* impl = storage.unsafeGetStorageImpl();
      if (cpu.data() != storage.data()) {
        impl->set_data_ptr_noswap(adopt(cpu, device_->index()));
        note_made(storage);
      }
      impl->set_nbytes(cpu.nbytes());
    }
    for (auto& [_, pair] : cpu_tensors_) {
      auto& [tensor, cpu] = pair;
      if (tensor.sizes() != cpu.sizes() || tensor.strides() != cpu.strides() ||
          tensor.storage_offset() != cpu.storage_offset()) {
        copy_metadata(cpu, tensor);
      }
    }
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
    const auto argument = sim_tensors_.find(cpu.unsafeGetTensorImpl());
    if (argument != sim_tensors_.end()) {  // in-place and out=: the argument itself
      computed_elements_ += cpu.numel();
      return argument->second;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        cpu.layout() == c10::kStrided && !cpu.is_nested(), schema_.name(),
        " makes a sparse or nested tensor; simulated devices have strided tensors only.");
    auto& storage = sim_storages_[cpu.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = adopt_storage(cpu.storage(), device_->index());
      note_made(storage);
      computed_elements_ += cpu.numel();
    }
    return tensor_on(storage, cpu, c10::DispatchKey::PrivateUse1);
  }

  void wait() const {
    if (computed_elements_ > 0 || !has_tensors_) {
      charge(device_->index(), schema_.returns().empty() ? written_elements_ : computed_elements_);
    }
    // item(), equal(): the host reads a result; nonzero(): it reads how large one is.
    if ((!has_tensors_ && !schema_.returns().empty()) || tells_the_host(schema_.name())) {
      settle(device_->index());
      host_waits_for(current_stream(*device_));
    }
  }

  void note_made(const c10::Storage& storage) const {
    if (is_strict()) {
      made_by(*history_of(storage.data_ptr()), moment_, storage.nbytes(), schema_.name().c_str());
    }
  }

  Moment moment_;
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::optional<c10::Device> device_;
  int64_t written_elements_ = 0;
  int64_t computed_elements_ = 0;
  bool has_tensors_ = false;
  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> cpu_tensors_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> sim_tensors_;
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> cpu_storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> sim_storages_;
};

}  // namespace

void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool writes) {
  if (!is_sim(tensor) || tensor.numel() == 0) {
    return;
  }
  auto* history = history_of(tensor.storage().data_ptr());
  if (history == nullptr) {
    return;
  }
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto size = tensor.dtype().itemsize();
  uses.push_back({history, static_cast<size_t>(tensor.storage_offset()) * size, static_cast<size_t>(last + 1) * size, writes});
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

at::Tensor cpu_alias(const at::Tensor& tensor) {
  return is_sim(tensor) ? tensor_on(share_with_cpu(tensor.storage()), tensor, c10::DispatchKey::CPU) : tensor;
}

}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }
