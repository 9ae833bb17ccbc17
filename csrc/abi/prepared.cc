#include "abi/prepared.h"

#include "desc/plane.h"
#include "error.h"
#include "rules/plane.h"

namespace kvx {

kvx_status_t prepare(const kvx_migrate_desc_t &migrate, Prepared *prepared) {
  auto &tensors = prepared->tensors;
  auto &planes = prepared->planes;
  tensors.reserve(size_t{4} * migrate.src->num_layers + size_t{2} * migrate.src->num_planes);
  planes.reserve(size_t{2} * migrate.src->num_planes);  // `tensors` points into it
  for (uint32_t l = 0; l < migrate.src->num_layers; ++l) {
    const kvx_cache_desc_t &src = *migrate.src->layers[l], &dst = *migrate.dst->layers[l];
    tensors.push({"src.layers[].k", &src.k});
    tensors.push({"src.layers[].v", &src.v});
    tensors.push({"dst.layers[].k", &dst.k});
    tensors.push({"dst.layers[].v", &dst.v});
  }
  for (uint32_t i = 0; i < migrate.src->num_planes; ++i) {
    planes.push_back(bytes_of(*migrate.src->planes[i]));
    tensors.push({"src.planes[]", &planes.back()});
    planes.push_back(bytes_of(*migrate.dst->planes[i]));
    tensors.push({"dst.planes[]", &planes.back()});
  }
  KVX_TRY(backend::place(tensors.begin(), tensors.size(), &prepared->on_device));
  if (prepared->on_device) KVX_TRY(check_planes_for_device(migrate));
  plan_migrate(migrate, &prepared->plan);
  return KVX_STATUS_OK;
}

}  // namespace kvx
