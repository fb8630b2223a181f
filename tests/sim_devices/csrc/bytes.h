// Which bytes of a block a tensor lies in: a stretch, or equal runs at equal distances.
//
// Columns of a matrix, every other element, some channels of images: two of them may lie in one stretch and share no
// byte.
#pragma once

#include <algorithm>
#include <cstddef>

namespace sim {

struct Bytes {
  size_t begin = 0;
  size_t end = 0;
  size_t run = 0;    // of every `pitch` bytes the first ones
  size_t pitch = 0;  // 0: all of them

  size_t length() const { return end - begin; }
  // How many there are in a row.
  size_t in_a_row() const { return pitch == 0 ? length() : run; }
};

// Whether they may share a byte. Of patterns with different distances nothing finer is known.
inline bool overlap(const Bytes& a, const Bytes& b) {
  if (a.begin >= b.end || b.begin >= a.end) {
    return false;
  }
  const auto pitch = std::max(a.pitch, b.pitch);
  const bool is_comparable = pitch > 0 && (a.pitch == 0 || b.pitch == 0 || a.pitch == b.pitch);
  if (!is_comparable || a.in_a_row() >= pitch || b.in_a_row() >= pitch) {
    return true;
  }
  const auto from_a = (b.begin % pitch + pitch - a.begin % pitch) % pitch;  // to where b's first run begins
  return from_a < a.in_a_row() || from_a + b.in_a_row() > pitch;
}

// Whether `inner` lies in `outer`.
inline bool contains(const Bytes& outer, const Bytes& inner) {
  if (inner.begin < outer.begin || outer.end < inner.end) {
    return false;
  }
  if (outer.pitch == 0) {
    return true;
  }
  const bool is_comparable = inner.pitch == outer.pitch || (inner.pitch == 0 && inner.length() <= outer.run);
  return is_comparable && (inner.begin - outer.begin) % outer.pitch + inner.in_a_row() <= outer.run;
}

}  // namespace sim
