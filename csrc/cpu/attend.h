// Attention of one query on HOST memory.
#pragma once

#include "plan/attend.h"

namespace kvx::cpu {

// Fills plan.out. The result is the same, to the bit, for any number of threads and on every
// instruction set.
void attend(const Attention &plan);

}  // namespace kvx::cpu
