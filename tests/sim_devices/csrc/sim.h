// Simulated devices: what the files of this extension share.
//
// A simulated device is a counter of bytes, a random generator and a speed. Its memory is host memory and its kernels
// are the CPU's (fallback.cpp), but every storage belongs to exactly one device, and no op takes tensors of two.
#pragma once

// Only c10 is included here, as ATen's headers are most of the build time.
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace at {
struct Generator;
}

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 128;

// --- devices (device.cpp) ---

struct MemoryCounters {
  int64_t allocated = 0;  // bytes in use now
  int64_t peak = 0;       // most bytes in use since the last reset
  int64_t limit = 0;      // bytes; 0: no limit
  int64_t ooms = 0;       // requests refused so far
};

// Called once, before anything else here.
void initialize(c10::DeviceIndex device_count, int64_t host_memory);
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
// Raises for an index outside 0..device_count()-1, as every function below that takes one.
void set_current_device(c10::DeviceIndex index);
c10::Device full_device(c10::Device device);  // "sim" -> "sim:<current>", checked

MemoryCounters memory_counters(c10::DeviceIndex index);
int64_t total_memory(c10::DeviceIndex index);  // the limit, or the host's memory where there is none
void reset_peak(c10::DeviceIndex index);
void set_memory_limit(c10::DeviceIndex index, int64_t bytes);
// Counts `bytes` as in use, or raises OutOfMemoryError and leaves the counters as they were.
void take_bytes(c10::DeviceIndex index, int64_t bytes);
void give_bytes(c10::DeviceIndex index, int64_t bytes);

// Copies from one device to another: how many, and their bytes.
using CopyTable = std::map<std::pair<std::string, std::string>, std::pair<int64_t, int64_t>>;
void count_copy(c10::Device from, c10::Device to, int64_t bytes);
CopyTable copy_table();
void reset_copy_table();

// --- memory (memory.cpp) ---

// Memory of a CPU storage, kept alive and counted as memory of device `index`. No copy.
c10::DataPtr adopt(c10::Storage cpu, c10::DeviceIndex index);
c10::Storage adopt_storage(c10::Storage cpu, c10::DeviceIndex index);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// --- what ops and copies take (duration.cpp) ---

struct Speed {
  double seconds_per_op = 0;
  double seconds_per_element = 0;
  double flops_per_second = std::numeric_limits<double>::infinity();
  double bytes_per_second = std::numeric_limits<double>::infinity();
};

// What an op has to do.
struct Work {
  int64_t elements = 0;  // of its outputs
  double flops = 0;
  double bytes = 0;      // read and written
};

// What the number of an op's floating point operations depends on.
struct Shapes {
  std::vector<std::vector<int64_t>> inputs;  // of its tensors, in their order
  int gradients = 1;                         // of a convolution's backward: how many are asked for
};

// Matrix products and convolutions by their sums of products; all else has one operation for each element.
double flops_of(const std::string& op, const Shapes& shapes, int64_t outputs);
void set_speed(c10::DeviceIndex index, Speed speed);
bool has_speed(c10::DeviceIndex index);
// Adds an op to what the device has been busy with; returns its nanoseconds.
int64_t charge(c10::DeviceIndex index, const Work& work);
double busy_seconds(c10::DeviceIndex index);

// From and to a device's index, or -1 for the CPU. Without a link, copies of two devices go through the CPU.
void set_link(int source, int target, double bytes_per_second, double seconds);
void remove_links();
int64_t transfer_nanoseconds(int source, int target, int64_t bytes);

// --- random numbers (device.cpp) ---

const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// The CPU generator that holds the state of `generator`; raises unless it belongs to `device`.
at::Generator cpu_generator(const at::Generator& generator, c10::Device device);

}  // namespace sim
