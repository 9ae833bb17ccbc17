// How fast this machine copies memory.
#pragma once

#include <cstdint>

namespace kvx::cpu {

// Bytes per second of a copy that does not fit the caches, by one thread or by all that a large
// call uses. Measured once per process, in some milliseconds; 0 if there was no memory for it.
double copy_speed(bool by_all_threads);

}  // namespace kvx::cpu
