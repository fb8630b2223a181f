#include "aliases.h"

#include "kernels.h"

#include <c10/core/CPUAllocator.h>

namespace sim {
namespace {

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

}  // namespace

at::Tensor sim_tensor(c10::Storage storage, const at::Tensor& cpu) {
  return tensor_on(std::move(storage), cpu, c10::DispatchKey::PrivateUse1);
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  return is_sim(tensor) ? tensor_on(share_with_cpu(tensor.storage()), tensor, c10::DispatchKey::CPU) : tensor;
}

at::Tensor Aliases::cpu_of(const at::Tensor& tensor) {
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

const c10::Storage& Aliases::cpu_storage_of(const c10::Storage& storage) {
  auto [known, is_new] = cpu_storages_.try_emplace(storage.unsafeGetStorageImpl());
  if (is_new) {
    known->second = {storage, share_with_cpu(storage)};
    sim_storages_[known->second.second.unsafeGetStorageImpl()] = storage;
  }
  return known->second.second;
}

at::Tensor Aliases::sim_of(const at::Tensor& cpu) const {
  const auto known = sim_tensors_.find(cpu.unsafeGetTensorImpl());
  return known == sim_tensors_.end() ? at::Tensor() : known->second;
}

c10::Storage& Aliases::sim_storage_of(const at::Tensor& cpu) {
  return sim_storages_[cpu.storage().unsafeGetStorageImpl()];
}

std::vector<std::pair<c10::Storage, c10::Storage>> Aliases::resized() const {
  std::vector<std::pair<c10::Storage, c10::Storage>> found;
  for (const auto& [_, pair] : cpu_storages_) {
    if (pair.second.data() != pair.first.data()) {
      found.push_back(pair);
    }
  }
  return found;
}

void Aliases::carry_sizes() const {
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

}  // namespace sim
