// Scales that are read lie apart from the elements that the call writes.
#pragma once

#include "kvx/kvx_migrate.h"
#include "rules/path.h"

namespace kvx {

// Scales may lie in the gaps of `tensor`, beside the vectors that they are of: refused is what
// lies within a tensor without gaps. Nothing to check where either is absent.
kvx_status_t check_scales_apart(const Path &path, const kvx_scale_desc_t &scales,
                                const Path &tensor_path, const kvx_tensor_desc_t &tensor);

// The scales of both ends, and the tensors of the destination.
kvx_status_t check_scales_apart(const Path &src_path, const Path &dst_path,
                                const kvx_migrate_desc_t &migrate);

}  // namespace kvx
