// A speed per device. Ops run at the CPU's speed and then wait; the waits of different devices overlap.
#include "sim.h"

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <chrono>
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
  std::mutex mutex;               // held while waiting: two threads on one device share its time, as on a GPU
  double seconds_per_op = 0;
  double seconds_per_element = 0;
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

}  // namespace

void set_speed(c10::DeviceIndex index, double seconds_per_op, double seconds_per_element) {
  auto& clock = g_clocks[full_device({kSim, index}).index()];
  WithoutGil without_gil;
  std::lock_guard<std::mutex> lock(clock.mutex);
  clock.seconds_per_op = seconds_per_op;
  clock.seconds_per_element = seconds_per_element;
  clock.debt = 0;
  clock.runs = seconds_per_op > 0 || seconds_per_element > 0;
}

std::pair<double, double> speed(c10::DeviceIndex index) {
  auto& clock = g_clocks[full_device({kSim, index}).index()];
  WithoutGil without_gil;
  std::lock_guard<std::mutex> lock(clock.mutex);
  return {clock.seconds_per_op, clock.seconds_per_element};
}

double busy_seconds(c10::DeviceIndex index) {
  auto& clock = g_clocks[full_device({kSim, index}).index()];
  WithoutGil without_gil;
  std::lock_guard<std::mutex> lock(clock.mutex);
  return clock.busy;
}

void charge(c10::DeviceIndex index, int64_t elements) {
  auto& clock = g_clocks[index];
  if (!clock.runs.load(std::memory_order_relaxed)) {
    return;
  }
  WithoutGil without_gil;  // before the lock: its holder may sleep
  std::lock_guard<std::mutex> lock(clock.mutex);
  const double seconds = clock.seconds_per_op + clock.seconds_per_element * static_cast<double>(elements);
  clock.debt += seconds;
  clock.busy += seconds;
  if (clock.debt >= kShortestSleep) {
    sleep_off(clock);
  }
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
