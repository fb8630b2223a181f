// A speed per device. Ops run at the CPU's speed and then wait; the waits of different devices overlap. On virtual time
// nothing waits: how long an op takes is written down.
#include "recorder.h"

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>

namespace sim {
namespace {

// Shorter sleeps than this are mostly the scheduler's own delay, so that debts are collected first.
constexpr double kShortestSleep = 200e-6;
// What a sleep overran is paid back by the next ones, but a stalled machine does not buy more than this.
constexpr double kLargestCredit = 5e-3;

struct Clock {
  std::atomic<bool> runs{false};  // false: no speed set, nothing to wait for
  std::atomic<bool> counts_work{false};
  std::mutex mutex;  // held while waiting: two threads on one device share its time, as on a GPU
  Speed speed;
  double debt = 0;
  double busy = 0;
};

Clock* const g_clocks = new Clock[128];

// Python must run on in other threads while this one waits, for the time and for the mutex.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

void sleep_off(Clock& clock) {
  using seconds = std::chrono::duration<double>;
  const auto start = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(seconds(clock.debt));
  const seconds slept = std::chrono::steady_clock::now() - start;
  clock.debt = std::max(clock.debt - slept.count(), -kLargestCredit);
}

double seconds_of(const Work& work, const Speed& speed) {
  const double computing = speed.flops_per_second > 0 ? work.flops / speed.flops_per_second : 0;
  const double moving = speed.bytes_per_second > 0 ? work.bytes / speed.bytes_per_second : 0;
  return speed.seconds_per_op + speed.seconds_per_element * static_cast<double>(work.elements) +
         std::max(computing, moving);
}

}  // namespace

void set_speed(c10::DeviceIndex index, Speed speed) {
  auto& clock = g_clocks[full_device({kSim, index}).index()];
  WithoutGil without_gil;
  std::lock_guard<std::mutex> lock(clock.mutex);
  clock.speed = speed;
  clock.debt = 0;
  clock.counts_work = speed.flops_per_second > 0 || speed.bytes_per_second > 0;
  clock.runs = speed.seconds_per_op > 0 || speed.seconds_per_element > 0 || clock.counts_work;
}

bool counts_work(c10::DeviceIndex index) { return g_clocks[index].counts_work.load(std::memory_order_relaxed); }

Speed speed(c10::DeviceIndex index) {
  auto& clock = g_clocks[full_device({kSim, index}).index()];
  WithoutGil without_gil;
  std::lock_guard<std::mutex> lock(clock.mutex);
  return clock.speed;
}

double busy_seconds(c10::DeviceIndex index) {
  auto& clock = g_clocks[full_device({kSim, index}).index()];
  WithoutGil without_gil;
  std::lock_guard<std::mutex> lock(clock.mutex);
  return clock.busy;
}

int64_t charge(c10::DeviceIndex index, const Work& work) {
  auto& clock = g_clocks[index];
  if (!clock.runs.load(std::memory_order_relaxed)) {
    return 0;
  }
  WithoutGil without_gil;  // before the lock: its holder may sleep
  std::lock_guard<std::mutex> lock(clock.mutex);
  const double seconds = seconds_of(work, clock.speed);
  clock.busy += seconds;
  if (!is_recording()) {
    clock.debt += seconds;
    if (clock.debt >= kShortestSleep) {
      sleep_off(clock);
    }
  }
  return std::llround(seconds * 1e9);
}

void settle(c10::DeviceIndex index) {
  auto& clock = g_clocks[index];
  if (!clock.runs.load(std::memory_order_relaxed)) {
    return;
  }
  WithoutGil without_gil;
  std::lock_guard<std::mutex> lock(clock.mutex);
  if (clock.debt > 0) {
    sleep_off(clock);
  }
}

}  // namespace sim
