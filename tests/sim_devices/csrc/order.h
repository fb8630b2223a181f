// What is ordered after what: streams, events, the host, and the accesses to each block of memory.
//
// A device runs its work later than it is told to, stream by stream. Here ops are done when they return; what is
// simulated is what may be relied upon. Every stream counts its ops, and knows by a vector clock up to which count of
// every other stream it has to wait. The host has one, too: what it has waited for comes before all that it issues
// afterwards. An access that another stream's access neither precedes nor follows is a race.
//
// The host is one for all threads: who waits in one thread and tells another by a queue or a join has ordered both.
#pragma once

#include "recorder.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

namespace sim {

// One op on one stream: the count-th there.
struct Moment {
  int stream = 0;
  uint64_t count = 0;
  RecordId record = -1;  // on virtual time
  int thread = 0;        // likewise: the one that issued it
};

// A stretch of a block, or of host memory.
struct Bytes {
  size_t begin = 0;
  size_t end = 0;
  bool overlaps(const Bytes& other) const { return begin < other.end && other.begin < end; }
  bool contains(const Bytes& other) const { return begin <= other.begin && other.end <= end; }
};

// Bytes of a block that an op has read or written.
struct Access {
  Moment moment;
  Bytes bytes;
  const char* op = "";
};

// What is known of one block of memory.
struct History {
  Moment allocated;            // its home is the stream that was current then
  std::vector<Access> writes;  // the latest ones of every byte
  std::vector<Access> reads;   // since then
  std::vector<int> recorded;   // streams given to record_stream
};

struct Use {
  History* history;
  Bytes bytes;
  bool writes;
};

// Up to which op of every stream something has waited.
struct Clock {
  std::vector<uint64_t> counts;  // by stream; none: 0
  RecordId mark = -1;            // of an event, on virtual time

  bool covers(Moment moment) const { return of(moment.stream) >= moment.count; }
  uint64_t of(int stream) const { return static_cast<size_t>(stream) < counts.size() ? counts[stream] : 0; }
  void join(const Clock& other) {
    counts.resize(std::max(counts.size(), other.counts.size()));
    for (size_t i = 0; i < other.counts.size(); ++i) {
      counts[i] = std::max(counts[i], other.counts[i]);
    }
  }
  uint64_t next(int stream) {
    counts.resize(std::max(counts.size(), static_cast<size_t>(stream) + 1));
    return ++counts[stream];
  }
};
using ClockPointer = std::shared_ptr<const Clock>;

// --- streams and waits (streams.cpp) ---

c10::Stream current_stream(c10::Device device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::Device device);  // the next of the device's pool
int number_of(const c10::Stream& stream);
c10::DeviceIndex device_of_stream(int number);

ClockPointer record(const c10::Stream& stream);
void wait(const c10::Stream& stream, const ClockPointer& event);
void host_waits_for(const c10::Stream& stream);
void host_waits_for(const ClockPointer& event);
void host_waits_for_device(c10::DeviceIndex index);
// The host hears that all before an event, or on a stream, is through, and need not wait.
void host_asks(const ClockPointer& event);
void host_asks(const c10::Stream& stream);
ClockPointer host_now();  // what the host has waited for
bool has_waited_for(const c10::Stream& stream, Moment moment);
int64_t host_waits();  // how often the host has waited for a device

// What is known of every stream, and of the host. All of it is looked at and changed with one lock.
struct StreamState {
  Clock clock;
  uint64_t host_seen = 0;  // the host's version that is in the clock
  c10::DeviceIndex device = 0;
};
struct State {
  std::mutex mutex;
  std::vector<StreamState> streams = std::vector<StreamState>(kMostDevices);  // first the default ones
  Clock host;
  uint64_t host_version = 0;
};
State& state();
// The clock of a stream with all that it has to wait for. This, and the next, with the lock.
Clock& clock_of(int stream);
std::string name_of(int stream);

// --- accesses (races.cpp) ---

// Whether races raise: until the process ends.
void set_strict(bool strict);
// An op begins on a stream: it is the next one there. Raises a RaceError where one of the uses is not ordered.
Moment launch(const c10::Stream& stream, const char* op, const std::vector<Use>& uses);
// The op has failed before it did anything.
void forget_launch(Moment moment, const std::vector<Use>& uses);
// A copy between two devices runs on the source's stream; both streams wait for each other, as on CUDA.
Moment launch_copy(const c10::Stream& source, const c10::Stream& target, const std::vector<Use>& uses);
// The block has come from an op.
void made_by(History& history, Moment moment, size_t bytes, const char* op);
// `record_stream` has been called for a block.
void record_use(const c10::DataPtr& memory, const c10::Stream& stream);
// A block of so many bytes is handed out to the current stream of a device, and given back.
void hand_out(History& history, c10::DeviceIndex index, size_t bytes);
void take_back(const History& history, size_t bytes) noexcept;
// Raises torch.sim.RaceError.
[[noreturn]] void race(const std::string& message);

// What is known of a device's memory, or of pinned memory; nullptr for memory of others (memory.cpp).
History* history_of(const c10::DataPtr& memory);

// The host has waited: copies that it has not waited for before may have arrived (copies.cpp).
void deliver();

// --- ops ---

// Whether a tensor lies on a simulated device.
inline bool is_sim(const at::Tensor& tensor) { return tensor.device().type() == kSim; }

// Runs any op through its CPU kernel.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The bytes of a tensor in its block (races.cpp).
Bytes bytes_of(const at::Tensor& tensor);
// Notes that an op reads or writes a tensor, if it lies in memory that devices use: theirs, or pinned.
void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool writes);

// Gives a storage other memory, with what fits of its content (copies.cpp).
void resize_storage(const c10::Storage& storage, size_t bytes);

// Copies of any two devices, of which at least one is simulated (copies.cpp).
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target);

}  // namespace sim
