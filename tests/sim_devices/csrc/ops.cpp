// The ops that the fallback cannot do: those that make, move or re-point memory, and those without a CPU kernel.
#include "kernels.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
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

void record_stream(Tensor& self, at::Stream stream) {
  if (auto* history = history_of(self.storage().data_ptr())) {
    record_use(*history, stream);
  }
}

// The question by which nn.TransformerEncoder decides to go on with a nested tensor, which there is none of here.
bool can_be_nested(const Tensor&, const Tensor&) { return false; }

// Autograd's lazily made zeros. A plain tensor of zeros serves the same end.
Tensor efficient_zeros(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory) {
  return empty(size, dtype, layout, device, pin_memory, std::nullopt).zero_();
}

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

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// LSTM, gates in the order input, forget, cell, output:
//   cy = f * cx + i * g, hy = o * tanh(cy). The workspace holds the gates after their activations.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  const bool has_hy = grad_hy && grad_hy->defined(), has_cy = grad_cy && grad_cy->defined();
  if (!has_hy && !has_cy) {
    return {};
  }
  const auto gates = workspace.chunk(4, 1);
  const auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const auto tanh_cy = cy.tanh();
  const auto zero = at::zeros_like(cy);
  const auto grad_h = has_hy ? *grad_hy : zero;
  const auto grad_c = grad_h * o * (1 - tanh_cy * tanh_cy) + (has_cy ? *grad_cy : zero);
  const auto grad_gates = at::cat(
      {grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g),
       grad_h * tanh_cy * o * (1 - o)},
      1);
  return {grad_gates, grad_c * f, has_bias ? grad_gates.sum(0) : Tensor()};
}

// GRU, gates in the order reset, update, new:
//   n = tanh(in + r * hn), hy = n + z * (hx - n). The workspace holds r, z, n, hx and hn.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto inputs = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hiddens = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto r = (inputs[0] + hiddens[0]).sigmoid(), z = (inputs[1] + hiddens[1]).sigmoid();
  const auto n = (inputs[2] + r * hiddens[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, hiddens[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &r = saved[0], &z = saved[1], &n = saved[2], &hx = saved[3], &hn = saved[4];
  const auto grad_n = grad_hy * (1 - z) * (1 - n * n);
  const auto grad_z = grad_hy * (hx - n) * z * (1 - z);
  const auto grad_r = grad_n * hn * r * (1 - r);
  const auto grad_inputs = at::cat({grad_r, grad_z, grad_n}, 1);
  const auto grad_hiddens = at::cat({grad_r, grad_z, grad_n * r}, 1);
  return {
      grad_inputs, grad_hiddens, grad_hy * z, has_bias ? grad_inputs.sum(0) : Tensor(),
      has_bias ? grad_hiddens.sum(0) : Tensor()};
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
  m.impl("_efficientzerotensor", TORCH_FN(sim::efficient_zeros));
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
