// What is known of every stream, and of the host. All of it is looked at and changed with one lock.
#pragma once

#include "vector_clock.h"

#include <mutex>
#include <string>
#include <vector>

namespace sim {

constexpr int kMostDevices = 128;  // the default stream of a device has its number

struct StreamState {
  Clock clock;
  uint64_t host_seen = 0;  // the host's version that is in the clock
  uint64_t asked_at = 0;  // the op up to which the host has asked last whether it is through
  c10::DeviceIndex device = 0;
};

struct State {
  std::mutex mutex;
  std::vector<StreamState> streams = std::vector<StreamState>(kMostDevices);
  Clock host;
  uint64_t host_version = 0;
};

State& state();

// Below: called with the lock.

// The stream with all that it has to wait for.
StreamState& up_to_date(int stream);
c10::DeviceIndex device_of(int stream);
std::string name_of(int stream);

}  // namespace sim
