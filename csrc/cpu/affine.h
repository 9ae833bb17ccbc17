// Runs pairs of planes with zero points on HOST memory. Spec: E.14
#pragma once

#include "plan/plan.h"

namespace kvx::cpu {

// Moves the plan's affine pairs, and no others: `tokens` tokens, which check_data has counted.
void run_affine(const Plan &plan, uint64_t tokens);

// The number of threads that run_affine uses if they are free.
uint32_t count_affine_threads(const Plan &plan, uint64_t tokens);

}  // namespace kvx::cpu
