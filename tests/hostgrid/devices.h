// The devices of the host grid: one that reaches all memory or, for tests, several that own some.
// A launch on a device faults at memory of another to which it has no access.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <vector>

namespace hostgrid {

constexpr int kMostDevices = 4;

// Whole pages of a device.
struct Owned {
  char *begin;
  size_t bytes;
  int device;
  bool is_shared;  // other devices have access once they have peer access
};

struct Machine {
  int devices = 1, current = 0;
  bool peers = false;                          // each can have access to each
  bool enabled[kMostDevices][kMostDevices]{};  // of a device to a peer
  std::vector<Owned> owned;
};
inline Machine machine;

inline bool is_device(int device) { return device >= 0 && device < machine.devices; }

// NULL: memory of the host, or of the only device.
inline const Owned *owner_of(const void *p) {
  for (const Owned &owned : machine.owned)
    if (p >= owned.begin && p < owned.begin + owned.bytes) return &owned;
  return nullptr;
}

// Whether the current device has access.
inline bool can_access(const Owned &owned) {
  return owned.device == machine.current ||
         (owned.is_shared && machine.enabled[machine.current][owned.device]);
}

// While it lives, memory that the current device has no access to faults.
struct Fence {
  Fence() { protect(PROT_NONE); }
  ~Fence() { protect(PROT_READ | PROT_WRITE); }

 private:
  static void protect(int rights) {
    for (const Owned &owned : machine.owned)
      if (!can_access(owned)) mprotect(owned.begin, owned.bytes, rights);
  }
};

}  // namespace hostgrid
