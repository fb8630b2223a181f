// Memory that is given back and handed out again, perhaps while it is still in use.
#include "order_state.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <utility>

namespace sim {
namespace {

// A block that was given back while other streams than its home's may still be at work with it.
struct Freed {
  size_t bytes;
  std::vector<Access> accesses;
};

// By home. Never destroyed, as the state of the streams; with their lock.
std::map<int, std::vector<Freed>>& g_freed = *new std::map<int, std::vector<Freed>>();

}  // namespace

void hand_out(History& history, c10::DeviceIndex index, size_t bytes) {
  std::string message;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto home = number_of(current_stream({kSim, index}));
    const auto& clock = up_to_date(home).clock;
    history.allocated = {home, clock.of(home)};
    auto& freed = g_freed[home];
    for (auto block = freed.begin(); block != freed.end() && message.empty();) {
      const auto other = std::find_if(block->accesses.begin(), block->accesses.end(), [&](const Access& access) {
        return !clock.covers(access.moment);
      });
      if (other == block->accesses.end()) {
        block = freed.erase(block);
      } else if (block->bytes >= bytes) {
        message = c10::str(
            "Race: memory of ", name_of(home), " was freed while ", other->op, " on ", name_of(other->moment.stream),
            " may still use it, and is handed out again. Call `tensor.record_stream(stream)` before it is freed, or ",
            "let its own stream wait first.");
        freed.erase(block);
        break;
      } else {
        ++block;
      }
    }
  }
  if (!message.empty()) {
    race(message);
  }
}

void take_back(const History& history, size_t bytes) noexcept {
  if (!is_strict()) {
    return;
  }
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto home = history.allocated.stream;
  // The allocator waits for the home stream and for the recorded ones, and for what these wait for.
  Clock waited_for = up_to_date(home).clock;
  for (const auto number : history.recorded) {
    waited_for.join(up_to_date(number).clock);
  }
  Freed freed{bytes, {}};
  for (const auto* accesses : {&history.writes, &history.reads}) {
    for (const auto& access : *accesses) {
      if (access.moment.stream != home && !waited_for.covers(access.moment)) {
        freed.accesses.push_back(access);
      }
    }
  }
  if (!freed.accesses.empty() && bytes > 0) {
    g_freed[home].push_back(std::move(freed));
  }
}

}  // namespace sim
