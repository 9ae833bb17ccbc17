// Which memory kernels of the current device reach. A call asks the runtime for its device once and
// for each tensor once: a question takes a microsecond or two.
#pragma once

#include <atomic>

#include "extent.h"
#include "kvx/kvx_abi.h"

namespace kvx::cuda {

// Another device's memory.
enum class Peers : uint8_t {
  kRefused,  // in every case
  kReached,  // by peer access, where some memory is the current device's
};

// What a call has asked.
class Reach {
 public:
  // owner: the device that has allocated all that is not in HOST memory; -1: not known
  // reached_by: the device for which what the call's plan keeps has been checked; NULL: no plan
  explicit Reach(Peers peers, int owner = -1, std::atomic<int> *reached_by = nullptr)
      : peers_(peers), owner_(owner), reached_by_(reached_by) {}

  // Asks which device is current. First of all.
  kvx_status_t begin();
  int device() const { return device_; }

  // Whether all that is not in HOST memory is known to be the current device's.
  bool is_owned() const { return owner_ == device_; }
  // Whether what the plan keeps has been checked for the current device.
  bool is_kept() const { return is_kept_; }
  // Says that it has been.
  void keep() const {
    if (reached_by_) reached_by_->store(device_, std::memory_order_relaxed);
  }

  // Checks that kernels reach the first byte of a tensor, which errors call `name` `field`. Asks
  // nothing if that byte is among those of a tensor that was checked a little before, or the owner
  // is known to be the current device.
  kvx_status_t check(const char *name, const char *field, const Extent &tensor);
  // The same of a tensor in HOST memory, of which pinned memory may hold a part: the last byte too.
  kvx_status_t check_whole(const char *name, const Extent &tensor);
  // The same of an array whose size is not known.
  kvx_status_t check(const char *name, const char *field, const void *data) {
    const auto *const begin = static_cast<const uint8_t *>(data);
    return check(name, field, Extent{begin, begin + 1});
  }

  // Checks that not all device memory is other devices'.
  kvx_status_t check_owners() const;

 private:
  static constexpr size_t kRemembered = 8;  // K and V, at both ends, and their scales

  kvx_status_t ask(const char *name, const char *field, const void *data);
  bool remembers(const uint8_t *first, const uint8_t *last);
  void remember(const Extent &tensor);

  const Peers peers_;
  const int owner_;
  std::atomic<int> *const reached_by_;
  int device_ = 0;
  bool is_kept_ = false;
  bool has_current_ = false;         // some memory is the current device's
  const char *peer_name_ = nullptr;  // the first that is another device's
  int peer_ = 0;                     // that device
  Extent remembered_[kRemembered];   // the latest first
  size_t num_remembered_ = 0;
};

}  // namespace kvx::cuda
