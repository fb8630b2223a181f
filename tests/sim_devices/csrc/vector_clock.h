// Up to which op of every stream something has waited.
#pragma once

#include "order.h"

#include <algorithm>
#include <vector>

namespace sim {

struct Clock {
  std::vector<uint64_t> counts;  // by stream; none: 0
  RecordId mark = -1;            // of an event, on virtual time

  uint64_t of(int stream) const { return static_cast<size_t>(stream) < counts.size() ? counts[stream] : 0; }
  bool covers(Moment moment) const { return of(moment.stream) >= moment.count; }
  bool covers(const Clock& other) const {
    for (size_t i = 0; i < other.counts.size(); ++i) {
      if (of(static_cast<int>(i)) < other.counts[i]) {
        return false;
      }
    }
    return true;
  }
  void join(const Clock& other) {
    if (counts.size() < other.counts.size()) {
      counts.resize(other.counts.size());
    }
    for (size_t i = 0; i < other.counts.size(); ++i) {
      counts[i] = std::max(counts[i], other.counts[i]);
    }
  }
  uint64_t next(int stream) {
    if (static_cast<size_t>(stream) >= counts.size()) {
      counts.resize(stream + 1);
    }
    return ++counts[stream];
  }
};

}  // namespace sim
