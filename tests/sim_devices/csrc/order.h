// What is ordered after what: streams, events, the host, and the accesses to each block of memory.
//
// A device runs its work later than it is told to, stream by stream. Here ops are done when they return; what is
// simulated is what may be relied upon. Every stream counts its ops, and knows by a vector clock up to which count of
// every other stream it has to wait. The host has one, too: what it has waited for comes before all that it issues
// afterwards. An access that another stream's access neither precedes nor follows is a race.
//
// The host is one for all threads: who waits in one thread and tells another by a queue or a join has ordered both.
#pragma once

#include "bytes.h"
#include "recorder.h"

#include <c10/core/Stream.h>

#include <memory>
#include <vector>

namespace sim {

// One op on one stream: the count-th there.
struct Moment {
  int stream = 0;
  uint64_t count = 0;
  RecordId record = -1;  // on virtual time
  int thread = 0;        // likewise: the one that issued it
};

// Bytes of a block that an op has read or written.
struct Access {
  Moment moment;
  Bytes bytes;
  const char* op = "";
};

// What is known of one block of memory.
struct History {
  Moment allocated;             // its home is the stream that was current then
  std::vector<Access> writes;   // the latest ones of every byte
  std::vector<Access> reads;    // since then
  std::vector<int> recorded;    // streams given to record_stream
};

struct Use {
  History* history;
  Bytes bytes;
  bool writes;
};

void set_strict(bool strict);
bool is_strict();
// Whether anybody looks at what reads and writes what: strict devices, or virtual time.
inline bool is_watched() { return is_strict() || is_recording(); }

// --- streams (streams.cpp) ---

c10::Stream current_stream(c10::Device device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::Device device);  // the next of the device's pool
int number_of(const c10::Stream& stream);
c10::DeviceIndex device_of_stream(int number);

// --- waits (streams.cpp) ---

struct Clock;  // up to which count of every stream
using ClockPointer = std::shared_ptr<const Clock>;

ClockPointer record(const c10::Stream& stream);
RecordId mark_of(const ClockPointer& event);  // where it stands on virtual time; -1: nowhere
void wait(const c10::Stream& stream, const ClockPointer& event);
void host_waits_for(const c10::Stream& stream);
void host_waits_for(const ClockPointer& event);
void host_waits_for_device(c10::DeviceIndex index);
ClockPointer host_now();  // what the host has waited for
bool covers(const ClockPointer& clock, Moment moment);
bool has_waited_for(const c10::Stream& stream, Moment moment);
// Whether devices are through whenever the host asks; else they are, if strict, when it asks again.
void set_prompt(bool prompt);
// The host asks whether all before an event is through, and need not wait.
bool host_asks(const ClockPointer& event, bool again);
bool host_asks(const c10::Stream& stream);
// How often the host has waited for a device.
int64_t host_waits();

// --- accesses (races.cpp) ---

// An op begins on a stream: it is the next one there. Raises a RaceError where one of the uses is not ordered, if
// devices are strict.
Moment launch(const c10::Stream& stream, const char* op, const std::vector<Use>& uses);
// The op has failed before it did anything.
void forget_launch(Moment moment, const std::vector<Use>& uses);
// A copy between two devices runs on the source's stream; both streams wait for each other, as on CUDA.
Moment launch_copy(const c10::Stream& source, const c10::Stream& target, const std::vector<Use>& uses);
// The block has come from an op.
void made_by(History& history, Moment moment, size_t bytes, const char* op);
// `record_stream` has been called for the block.
void record_use(History& history, const c10::Stream& stream);
// Raises torch.sim.RaceError.
[[noreturn]] void race(const std::string& message);

// --- blocks of memory ---

// What is known of a device's memory, or of pinned memory; nullptr for memory of others (memory.cpp).
History* history_of(const c10::DataPtr& memory);
// A block of so many bytes is handed out to the current stream of a device, and given back (reuse.cpp).
void hand_out(History& history, c10::DeviceIndex index, size_t bytes);
void take_back(const History& history, size_t bytes) noexcept;

// --- copies that the host has not waited for (pending.cpp) ---

// Called whenever the host has waited.
void deliver();

}  // namespace sim
