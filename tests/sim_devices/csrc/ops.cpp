// The ops that the fallback cannot do: those that make, move or re-point memory, and those without a CPU kernel.
#include "order.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// --- memory ---

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(at::kStrided) == at::kStrided, "Simulated devices have strided tensors only, got layout ",
      *layout, ".");
  TORCH_CHECK(!pin_memory.value_or(false), "Only CPU tensors can be pinned.");
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  check_options(layout, pin_memory);
  c10::DeviceGuard guard(full_device(device.value_or(at::Device(kSim))));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  c10::DeviceGuard guard(full_device(device.value_or(at::Device(kSim))));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  const auto item = self.dtype().itemsize();
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, item, self.storage_offset());
  if (bytes > self.storage().nbytes()) {  // PyTorch would do it as on the CPU
    resize_storage(self.storage(), bytes);
  }
  return at::native::resize_(self, size, format);
}

Tensor& set_storage(
    Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(
      storage.device() == self.device(),
      "Expected all tensors to be on the same device, but found at least two devices, ", self.device(),
      " and ", storage.device(), "! (when checking argument 'source' of aten::set_)");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {size}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_storage(
      self, {c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true}, 0, {0},
      {1});
}

void record_stream(Tensor& self, at::Stream stream) { record_use(self.storage().data_ptr(), stream); }

// The question by which nn.TransformerEncoder decides to go on with a nested tensor, which there is none of here.
bool can_be_nested(const Tensor&, const Tensor&) { return false; }

// --- random ---

// The CPU's kernel takes no generator and would draw from the CPU's own.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  const auto keep = 1 - p;
  auto mask = at::empty(input.sizes(), input.options().dtype(at::kBool)).bernoulli_(keep);
  return {input.mul(mask).mul_(keep == 0 ? 0.0 : 1 / keep), mask};
}

// --- CPU kernels of ops that PyTorch has for accelerators only ---

namespace cpu {

Tensor convolution(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  return at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> output_mask) {
  const int64_t out_channels = transposed ? weight.size(1) * groups : weight.size(0);
  return at::convolution_backward(
      grad_output, input, weight, at::IntArrayRef{out_channels}, stride, padding, dilation, transposed, output_padding,
      groups, output_mask);
}

// RNN cells. What their backward needs lies in the workspace: the inputs of the differentiable formulas that PyTorch has
// for second derivatives.

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// Gates in the order input, forget, cell, output.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto all = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  const auto gates = all.chunk(4, 1);
  const auto cy = gates[1].sigmoid() * cx + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cy.tanh(), cy, all};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  const bool has_hy = grad_hy && grad_hy->defined(), has_cy = grad_cy && grad_cy->defined();
  if (!has_hy && !has_cy) {
    return {};
  }
  const auto zero = at::zeros_like(workspace);
  const auto [gates, _, grad_cx, __, ___] = at::_thnn_differentiable_lstm_cell_backward(
      grad_hy, grad_cy, workspace, zero, std::nullopt, std::nullopt, cx, cy);
  return {gates, grad_cx, has_bias ? gates.sum(0) : Tensor()};
}

// Gates in the order reset, update, new.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias), hidden = with_bias(hidden_gates, hidden_bias);
  const auto i = input.chunk(3, 1), h = hidden.chunk(3, 1);
  const auto n = (i[2] + (i[0] + h[0]).sigmoid() * h[2]).tanh();
  return {n + (i[1] + h[1]).sigmoid() * (hx - n), at::cat({input, hidden, hx}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto size = workspace.size(1) / 7;
  const auto saved = workspace.split_with_sizes({3 * size, 3 * size, size}, 1);
  const auto [input, hidden, hx, _, __] = at::_thnn_differentiable_gru_cell_backward(
      grad_hy, saved[0], saved[1], saved[2], std::nullopt, std::nullopt);
  return {input, hidden, hx, has_bias ? input.sum(0) : Tensor(), has_bias ? hidden.sum(0) : Tensor()};
}

}  // namespace cpu
}  // namespace

torch::CppFunction through_fallback() { return torch::CppFunction::makeFromBoxedFunction<&fallback>(); }

// The dispatcher prefers an op's default kernel, which is made of other ops, to the fallback. Where the CPU has a
// kernel of its own, it is used here too: numbers are the CPU's, one op counts as one, and errors name the op that
// was called.
void prefer_cpu_kernels(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      const auto full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library.impl(full_name.c_str(), through_fallback());
    }
  }
}

}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(sim::empty));
  m.impl("empty_strided", TORCH_FN(sim::empty_strided));
  m.impl("resize_", TORCH_FN(sim::resize));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage", TORCH_FN(sim::set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(sim::set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(sim::set_tensor));
  m.impl("set_", TORCH_FN(sim::set_empty));
  m.impl("record_stream", TORCH_FN(sim::record_stream));
  m.impl("_nested_tensor_from_mask_left_aligned", TORCH_FN(sim::can_be_nested));
  m.impl("_copy_from", TORCH_FN(sim::copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(sim::copy_from_and_resize));
  m.impl("native_dropout", TORCH_FN(sim::native_dropout));
  m.impl("convolution_overrideable", sim::through_fallback());
  m.impl("convolution_backward_overrideable", sim::through_fallback());
  sim::prefer_cpu_kernels(m);
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("convolution_overrideable", TORCH_FN(sim::cpu::convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(sim::cpu::convolution_backward));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(sim::cpu::lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(sim::cpu::lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(sim::cpu::gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(sim::cpu::gru_cell_backward));
}

// copy_from reads the bits of a lazy conj() or negative view itself. PyTorch would resolve them by a copy, endlessly.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

// Autocast: the same ops are cast as on CUDA; PyTorch lists them.
namespace at::autocast {
namespace {

Tensor refuse_binary_cross_entropy(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(
      false,
      "binary_cross_entropy and BCELoss are not safe under autocast. Use binary_cross_entropy_with_logits or "
      "BCEWithLogitsLoss, which take the values before the sigmoid.");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
  m.impl("binary_cross_entropy", TORCH_FN(refuse_binary_cross_entropy));
}

}  // namespace
}  // namespace at::autocast
