// The extension's face towards lightning_dp/sim/device_module.py.
#include "order.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>

namespace py = pybind11;

namespace {

// Autograd makes its threads, one per device, at the first backward of the process. If that one has been when there
// was no device yet, they are made now; the function for it is open to engines only, hence the derived class.
struct EngineAccess : torch::autograd::Engine {
  static void start_threads(c10::DeviceIndex device_count) {
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.initialize_device_threads_pool();
    const auto threads = (engine.*(&EngineAccess::device_ready_queues_)).size();
    if (threads == 0) {
      (engine.*(&EngineAccess::start_device_threads))();
      return;
    }
    TORCH_CHECK(
        threads >= static_cast<size_t>(device_count), "Autograd has already started threads for ", threads,
        " devices, but ", static_cast<int>(device_count),
        " simulated devices were asked for. Call lightning_dp.sim.enable() before the first backward().");
  }
};

// `tensor.data = data` between the CPU and a simulated device, which PyTorch refuses for out-of-tree devices and allows
// for GPUs. A gradient accumulator made for the old device would meet gradients of the new one.
void set_data(const at::Tensor& tensor, const at::Tensor& data) {
  const bool moves = tensor.device() != data.device();
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
  auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (moves && meta != nullptr) {
    const std::lock_guard<std::mutex> lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (torch::PyTorchError& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("initialize", &sim::initialize);
  m.def("set_data", &set_data);
  m.def("start_autograd_threads", &EngineAccess::start_threads, no_gil);
  m.def("device_count", &sim::device_count);
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_current_device);
  m.def("synchronize", &sim::synchronize, no_gil);
  m.def("set_strict", &sim::set_strict);
  m.def("host_waits", &sim::host_waits);
  m.def("memory_allocated", [](c10::DeviceIndex index) { return sim::memory_counters(index).allocated; });
  m.def("max_memory_allocated", [](c10::DeviceIndex index) { return sim::memory_counters(index).peak; });
  m.def("memory_limit", [](c10::DeviceIndex index) { return sim::memory_counters(index).limit; });
  m.def("set_memory_limit", &sim::set_memory_limit);
  m.def("total_memory", &sim::total_memory);
  m.def("reset_peak", &sim::reset_peak);
  m.def("speed", &sim::speed);
  m.def("set_speed", &sim::set_speed);
  m.def("busy_seconds", &sim::busy_seconds);
  m.def("default_generator", [](c10::DeviceIndex index) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(sim::default_generator(index)));
  });
  m.def("copies", [] {
    py::dict copies;
    for (const auto& [devices, counter] : sim::copy_table()) {
      copies[py::make_tuple(devices.first, devices.second)] = py::make_tuple(counter.count, counter.bytes);
    }
    return copies;
  });
  m.def("reset_copies", &sim::reset_copy_table);
}
