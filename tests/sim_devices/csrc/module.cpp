// The extension's face towards tests/sim_devices/device_module.py.
#include "order.h"

#include <c10/util/thread_name.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

namespace py = pybind11;

namespace {

constexpr const char* kVirtualTime = "sim_devices.virtual_time";

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
        " simulated devices were asked for. Call sim_devices.enable() before the first backward().");
  }
};

// Gives every thread of autograd's a task. One that has not met the interpreter when the process ends aborts it. So does
// one that is the last to hold an object of Python's then, as it may be after `torch.autograd.backward`, which gives each
// task its context: hence the tasks are made here.
void wake_threads(c10::DeviceIndex device_count) {
  const at::AutoGradMode enabled(true);
  const c10::InferenceMode disabled(false);
  for (c10::DeviceIndex index = 0; index < device_count; ++index) {
    const c10::Device device(c10::DeviceType::PrivateUse1, index);
    const auto leaf = torch::autograd::make_variable(at::ones({}, device), /*requires_grad=*/true);
    torch::autograd::backward({leaf.clone()}, {});
  }
}

// The same, for so long at most: whether all have done it. One may be in a hook of Python's that never returns. Done is
// when the thread here has let go of its thread-local objects too, some of which may be Python's.
bool settle_threads(c10::DeviceIndex device_count, double seconds) {
  auto done = std::make_shared<std::promise<void>>();
  auto is_done = done->get_future();
  std::thread([=] {
    try {
      wake_threads(device_count);
      done->set_value_at_thread_exit();
    } catch (...) {
      done->set_exception_at_thread_exit(std::current_exception());
    }
  }).detach();
  if (is_done.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready) {
    return false;
  }
  is_done.get();
  return true;
}

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

// What was recorded for virtual time, in the form of tests/sim_devices/virtual_time.py.
py::tuple recorded() {
  const auto all = sim::recorded();
  py::list records;
  for (const auto& record : all.records) {
    const char* kinds[] = {"mark", "op", "copy", "host"};
    records.append(py::make_tuple(
        kinds[static_cast<int>(record.kind)], record.thread, record.stream, record.name, record.needs, record.after,
        record.nanoseconds, record.source, record.target));
  }
  return py::make_tuple(all.first, records, all.threads);
}

}  // namespace

namespace sim {

std::string thread_name() {
  auto name = c10::getThreadName();
  if (name.rfind("pt_", 0) == 0) {  // autograd's have none in Python
    return name;
  }
  py::gil_scoped_acquire gil;
  return py::module_::import(kVirtualTime).attr("thread_name")().cast<std::string>();
}

double computed_milliseconds(RecordId start, RecordId end) {
  py::gil_scoped_acquire gil;
  return py::module_::import(kVirtualTime).attr("milliseconds_between")(start, end).cast<double>();
}

}  // namespace sim

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
  m.def("wake_autograd_threads", &wake_threads, no_gil);
  m.def("settle_autograd_threads", &settle_threads, no_gil);
  m.def("device_count", &sim::device_count);
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_current_device);
  m.def("synchronize", &sim::host_waits_for_device, no_gil);
  m.def("set_strict", &sim::set_strict);
  m.def("host_waits", &sim::host_waits);
  py::class_<sim::Scope, sim::ScopePointer>(m, "Scope");
  m.def("is_recording", &sim::is_recording);
  m.def("start_recording", &sim::start_recording);
  m.def("stop_recording", &sim::stop_recording);
  m.def("recorded", &recorded);
  m.def("recording_version", &sim::recording_version);
  m.def("own_scope", &sim::own_scope);
  m.def("exchange_scope", &sim::exchange_scope, py::arg("scope").none(true));
  m.def("device_of_stream", &sim::device_of_stream);
  m.def("set_link", &sim::set_link);
  m.def("remove_links", &sim::remove_links);
  m.def("memory_allocated", [](c10::DeviceIndex index) { return sim::memory_counters(index).allocated; });
  m.def("max_memory_allocated", [](c10::DeviceIndex index) { return sim::memory_counters(index).peak; });
  m.def("set_memory_limit", &sim::set_memory_limit);
  m.def("total_memory", &sim::total_memory);
  m.def("set_speed", [](c10::DeviceIndex index, double per_op, double per_element, double flops, double bytes) {
    sim::set_speed(index, {per_op, per_element, flops, bytes});
  });
  m.def("busy_seconds", &sim::busy_seconds);
  m.def("default_generator", [](c10::DeviceIndex index) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(sim::default_generator(index)));
  });
  m.def("copies", &sim::copy_table);
  m.def("reset_copies", &sim::reset_copy_table);
}
