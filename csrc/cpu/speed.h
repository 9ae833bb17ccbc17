// Measures how fast this machine copies memory.
#pragma once

#include <cstdint>

namespace kvx::cpu {

// Bytes per second of a copy that exceeds the caches, by one thread or by all that a large call
// uses. Measured once per process, in some milliseconds; 0 if memory ran out.
double copy_speed(bool by_all_threads);

}  // namespace kvx::cpu
