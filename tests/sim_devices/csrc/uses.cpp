// Which memory an op uses.
#include "kernels.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

namespace sim {

// Where dimensions are no multiples of each other, what lies between counts, too.
Bytes bytes_of(const at::Tensor& tensor) {
  const auto item = tensor.dtype().itemsize();
  const auto begin = static_cast<size_t>(tensor.storage_offset()) * item;
  c10::SmallVector<std::pair<size_t, size_t>, 6> dims;  // stride in bytes, size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) > 0) {
      dims.emplace_back(static_cast<size_t>(tensor.stride(dim)) * item, static_cast<size_t>(tensor.size(dim)));
    }
  }
  std::sort(dims.begin(), dims.end());
  size_t run = item, pitch = 0, length = item;
  for (const auto& [stride, size] : dims) {
    if (stride > run && pitch == 0) {
      pitch = stride;
    } else if (pitch > 0 && stride % pitch != 0) {
      run = length;
      pitch = stride > length ? stride : 0;
    }
    length += stride * (size - 1);
    run = pitch == 0 ? length : run;
  }
  return {begin, begin + length, run, pitch};
}

void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) {
    return;
  }
  if (auto* history = history_of(tensor.storage().data_ptr())) {
    uses.push_back({history, bytes_of(tensor), writes});
  }
}

}  // namespace sim
