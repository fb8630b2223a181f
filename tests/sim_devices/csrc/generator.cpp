// One random generator per device. The state is a CPU generator's, so that equal seeds give equal numbers on any
// device.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <vector>

namespace sim {
namespace {

class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(c10::DeviceIndex index, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const { return cpu_; }

  void set_current_seed(uint64_t seed) override {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    cpu_.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override { cpu_.set_offset(offset); }
  uint64_t get_offset() const override { return cpu_.get_offset(); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    return cpu_.unsafeGetGeneratorImpl()->seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  SimGenerator* clone_impl() const override {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    return new SimGenerator(device().index(), cpu_.clone());
  }
  mutable at::Generator cpu_;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex index) {
  const auto device = index < 0 ? full_device({kSim, current_device()}) : full_device({kSim, index});
  return at::make_generator<SimGenerator>(device.index());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto& generators = *[] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      made->push_back(new_generator(i));
    }
    return made;
  }();
  return generators[index < 0 ? current_device() : full_device({kSim, index}).index()];
}

at::Generator cpu_generator(const at::Generator& generator, c10::Device device) {
  TORCH_CHECK(
      generator.device() == device, "Expected a generator on ", device, ", got one on ", generator.device(),
      ". Make it with torch.Generator(device='", device, "').");
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

}  // namespace sim
