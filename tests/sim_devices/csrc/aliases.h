// CPU tensors on a device's memory, for the CPU's kernels, and back. Nothing is copied.
#pragma once

#include "order.h"

#include <c10/core/CPUAllocator.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace sim {

inline void copy_metadata(const at::Tensor& from, const at::Tensor& to) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}

// A tensor of the metadata of another one.
inline at::Tensor tensor_on(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
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

inline c10::Storage share_with_cpu(const c10::Storage& storage) {
  auto* owner = new c10::Storage(storage);
  const auto free = [](void* context) { delete static_cast<c10::Storage*>(context); };
  return {
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), owner, free, c10::Device(c10::kCPU)), c10::GetCPUAllocator(),
      /*resizable=*/true};
}

// A CPU tensor on the same memory, which it keeps alive; a CPU tensor itself.
inline at::Tensor cpu_alias(const at::Tensor& tensor) {
  return is_sim(tensor) ? tensor_on(share_with_cpu(tensor.storage()), tensor, c10::DispatchKey::CPU) : tensor;
}

// Those of one call of an op. A tensor or a storage that is met twice is the same there.
class Aliases {
 public:
  // The CPU tensor on a device's memory; others as they are.
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

  // The device's tensor that a CPU tensor stands for; undefined: none.
  at::Tensor sim_of(const at::Tensor& cpu) const {
    const auto known = sim_tensors_.find(cpu.unsafeGetTensorImpl());
    return known == sim_tensors_.end() ? at::Tensor() : known->second;
  }

  // The device's storage of a CPU tensor's memory; none yet for memory that a kernel has made.
  c10::Storage& sim_storage_of(const at::Tensor& cpu) { return sim_storages_[cpu.storage().unsafeGetStorageImpl()]; }

  // Calls a function with the storages that a kernel has resized (out=, resize_), and with their new memory.
  template <typename Function>
  void for_each_resized(Function function) const {
    for (const auto& [_, pair] : cpu_storages_) {
      if (pair.second.data() != pair.first.data()) {
        function(pair.first, pair.second);
      }
    }
  }

  // What kernels have changed of storages' and tensors' sizes is carried over.
  void carry_sizes() const {
    for (const auto& [_, pair] : cpu_storages_) {
      pair.first.unsafeGetStorageImpl()->set_nbytes(pair.second.nbytes());
    }
    for (const auto& [_, pair] : cpu_tensors_) {
      const auto& [tensor, cpu] = pair;
      if (tensor.sizes() != cpu.sizes() || tensor.strides() != cpu.strides() ||
          tensor.storage_offset() != cpu.storage_offset()) {
        copy_metadata(cpu, tensor);
      }
    }
  }

 private:
  const c10::Storage& cpu_storage_of(const c10::Storage& storage) {
    auto [known, is_new] = cpu_storages_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) {
      known->second = {storage, share_with_cpu(storage)};
      sim_storages_[known->second.second.unsafeGetStorageImpl()] = storage;
    }
    return known->second.second;
  }

  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> cpu_tensors_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> sim_tensors_;
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> cpu_storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> sim_storages_;
};

}  // namespace sim
