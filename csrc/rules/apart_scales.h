// Scales that a call reads share no memory with the elements that it writes.
#pragma once

#include "kvx/kvx_migrate.h"
#include "rules/path.h"

namespace kvx {

// Refuses scales within a tensor without gaps. Scales may lie in the gaps of `tensor`, beside their
// vectors. If either is absent, there is nothing to check.
kvx_status_t check_scales_apart(const Path &path, const kvx_scale_desc_t &scales,
                                const Path &tensor_path, const kvx_tensor_desc_t &tensor);

// Checks the scales of both ends against the tensors of the destination.
kvx_status_t check_scales_apart(const Path &src_path, const Path &dst_path,
                                const kvx_migrate_desc_t &migrate);

}  // namespace kvx
