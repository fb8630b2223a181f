// What the host learns from an op, and has to wait for.
#include "rules.h"

#include <unordered_set>

namespace sim {
namespace {

// Ops whose result, or whether there is one, depends on values.
bool makes_sizes(const std::string& op_name) {
  static const auto& names = *new std::unordered_set<std::string>{
      "aten::nonzero",  "aten::masked_select",      "aten::_unique",           "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount",
      "aten::repeat_interleave", "aten::multinomial"};
  return names.count(op_name) > 0;
}

}  // namespace

bool asks_no_device(const std::string& op_name) {
  return op_name == "aten::is_set_to" || op_name == "aten::_fused_sdp_choice";
}

bool takes_cpu_indices(const std::string& op_name) {
  return op_name == "aten::index" || op_name == "aten::_index_put_impl_" || op_name == "aten::_unsafe_index";
}

bool tells_the_host(const Arguments& arguments) {
  const auto& name = arguments.op_name();
  if (makes_sizes(name)) {
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
