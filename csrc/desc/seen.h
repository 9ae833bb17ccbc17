// Numbers that have been seen. Allocates memory only for more than 512.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

namespace kvx {

// A set of `most` numbers: a hash table of which at most half is filled.
class Seen {
 public:
  explicit Seen(uint64_t most) : left_(most) {
    uint64_t size = 16;
    for (shift_ = 60; size < 2 * most; size *= 2) --shift_;
    mask_ = size - 1;
    if (size > kNear) far_.reset(items_ = new uint64_t[size]);
    std::fill_n(items_, size, uint64_t{0});
  }

  // False: it is in the set, or the set is full.
  bool add(uint64_t number) {
    if (left_-- == 0) return false;
    ++number;  // 0 is a free place
    uint64_t at = number * 0x9e3779b97f4a7c15u >> shift_;
    for (; items_[at]; at = (at + 1) & mask_)
      if (items_[at] == number) return false;
    items_[at] = number;
    return true;
  }

 private:
  static constexpr uint64_t kNear = 1024;

  uint64_t near_[kNear];
  std::unique_ptr<uint64_t[]> far_;
  uint64_t *items_ = near_;
  uint64_t mask_, left_;
  uint32_t shift_;
};

// Whether each of these numbers, which `each` passes to a function until it returns false, is
// certainly another one.
template <class Each>
bool are_different(Each each) {
  uint64_t count = 0, last = 0;
  bool in_order = true;
  each([&](uint64_t number) {
    in_order &= count == 0 || number > last;
    last = number;
    ++count;
    return true;
  });
  if (in_order) return true;
  Seen seen(count);
  bool different = true;
  each([&](uint64_t number) { return different = seen.add(number); });
  return different;
}

}  // namespace kvx
