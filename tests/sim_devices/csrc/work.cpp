// How many floating point operations an op has, by its name and its shapes.
#include "sim.h"

#include <unordered_map>

namespace sim {
namespace {

double numel(const std::vector<int64_t>& shape) {
  double product = 1;
  for (const auto size : shape) {
    product *= static_cast<double>(size);
  }
  return product;
}

// Which of its tensors is the left matrix of a product, whose last dimension is summed over.
const std::unordered_map<std::string, size_t>& left_matrices() {
  static const auto& positions = *new std::unordered_map<std::string, size_t>{
      {"aten::mm", 0},     {"aten::bmm", 0},   {"aten::mv", 0},    {"aten::dot", 0},
      {"aten::addmm", 1},  {"aten::addmm_", 1}, {"aten::addmv", 1}, {"aten::baddbmm", 1},
      {"aten::baddbmm_", 1}, {"aten::_addmm_activation", 1}};
  return positions;
}

double of_convolution(const std::vector<int64_t>& small, const std::vector<int64_t>& weight) {
  return 2 * numel(small) * numel({weight.begin() + 1, weight.end()});
}

}  // namespace

double flops_of(const std::string& op, const Shapes& shapes, int64_t outputs) {
  const auto& inputs = shapes.inputs;
  const auto left = left_matrices().find(op);
  if (left != left_matrices().end() && inputs.size() > left->second && !inputs[left->second].empty()) {
    return 2 * static_cast<double>(outputs) * static_cast<double>(inputs[left->second].back());
  }
  // A weight's first dimension is that of the outputs' channels; of the inputs', if it is transposed.
  if (op == "aten::convolution_overrideable" && inputs.size() > 1 && !inputs[1].empty()) {
    return of_convolution(shapes.transposed ? inputs[0] : std::vector<int64_t>{outputs}, inputs[1]);
  }
  if (op == "aten::convolution_backward_overrideable" && inputs.size() > 2 && !inputs[2].empty()) {
    return shapes.gradients * of_convolution(shapes.transposed ? inputs[1] : inputs[0], inputs[2]);
  }
  return static_cast<double>(outputs);
}

}  // namespace sim
