// A list that allocates memory only if it becomes long: the plan of a call of one layer allocates
// nothing.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>

namespace kvx {

template <class T, size_t kNear>
class SmallVector {
 public:
  SmallVector() = default;
  SmallVector(const SmallVector &) = delete;
  SmallVector &operator=(const SmallVector &) = delete;

  // Makes room for `count` items. Called once, before the first.
  void reserve(size_t count) {
    if (count <= kNear) return;
    far_.reset(new T[count]);
    items_ = far_.get();
  }
  // Adds an item of zeros.
  T &add() {
    static_assert(std::is_trivially_copyable_v<T>);
    size_t bytes = sizeof(T);
    asm("" : "+r"(bytes));  // hides the size from GCC, whose `rep stos` takes longer
    return *static_cast<T *>(std::memset(static_cast<void *>(&items_[size_++]), 0, bytes));
  }
  void push(const T &item) { items_[size_++] = item; }
  void drop_last() { --size_; }
  // Shows the items of another list, which outlives this one.
  void borrow(const SmallVector &other) {
    items_ = other.items_;
    size_ = other.size_;
  }

  size_t size() const { return size_; }
  T &operator[](size_t i) { return items_[i]; }
  const T &operator[](size_t i) const { return items_[i]; }
  const T *begin() const { return items_; }
  const T *end() const { return items_ + size_; }

 private:
  T near_[kNear];
  std::unique_ptr<T[]> far_;
  T *items_ = near_;
  size_t size_ = 0;
};

}  // namespace kvx
