// CPU tensors on a device's memory, for the CPU's kernels, and back. Nothing is copied.
#pragma once

#include "order.h"

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace sim {

// A device's tensor on its storage, of the metadata of a CPU tensor.
at::Tensor sim_tensor(c10::Storage storage, const at::Tensor& cpu);

// Those of one call of an op. A tensor or a storage that is met twice is the same there.
class Aliases {
 public:
  // The CPU tensor on a device's memory; others as they are.
  at::Tensor cpu_of(const at::Tensor& tensor);
  // The device's tensor that a CPU tensor stands for; undefined: none.
  at::Tensor sim_of(const at::Tensor& cpu) const;
  // The device's storage of a CPU tensor's memory; none yet for memory that a kernel has made.
  c10::Storage& sim_storage_of(const at::Tensor& cpu);
  // A kernel that resizes (out=, resize_) has given these storages, the first ones, the memory of the second ones.
  std::vector<std::pair<c10::Storage, c10::Storage>> resized() const;
  // What kernels have changed of storages' and tensors' sizes is carried over.
  void carry_sizes() const;

 private:
  const c10::Storage& cpu_storage_of(const c10::Storage& storage);

  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> cpu_tensors_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> sim_tensors_;
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> cpu_storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> sim_storages_;
};

}  // namespace sim
