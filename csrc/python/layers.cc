// The bound call of kvx_write_layers: the keys and values of several layers, read through DLPack.
#include <memory>
#include <new>

#include "binding.h"

namespace kvx {
namespace {

struct WriteLayers {
  static constexpr char kName[] = "kvx.write_layers";

  Binding bound;
  decltype(&kvx_write_layers) function;
  const kvx_cache_desc_t *const *caches;
  const kvx_write_desc_t *likes;  // [num_layers], the constant part of each call
  uint32_t num_layers;
  const kvx_write_options_t *options;

  PyObject *kept() const { return bound.kept; }

  // (slots, a key of each layer, a value or None of each layer[, stream[, all of these as
  // structs]])
  // -> status, or minus a sum of Left
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    const auto layers = static_cast<Py_ssize_t>(num_layers);
    const Arguments given{args, 1 + 2 * layers, num_args};
    long left = bound.moved(given);
    kvx_slot_mapping_t slots = likes[0].slots;
    if (!bound.read(given, 0, &slots)) left |= kIndices;
    if (left) return left_to_python(left);

    const std::unique_ptr<kvx_write_desc_t[]> writes(new (std::nothrow)
                                                         kvx_write_desc_t[num_layers]);
    const std::unique_ptr<const kvx_write_desc_t *[]> all(new (std::nothrow)
                                                              const kvx_write_desc_t *[num_layers]);
    if (!writes || !all) return PyErr_NoMemory();
    for (Py_ssize_t l = 0; l < layers; ++l) {
      kvx_write_desc_t &write = writes[static_cast<size_t>(l)];
      write = likes[l];
      write.slots = slots;
      write.io.num_tokens = slots.token_count;
      if (!bound.read(given, 1 + l, &write.io.key)) left |= kKey;
      if (!bound.read_value(given, 1 + layers + l, &write.io.value)) left |= kValue;
      all[static_cast<size_t>(l)] = &write;
    }
    if (left) return left_to_python(left);

    kvx_status_t status;
    kvx_write_options_t now = *options;
    now.flags |= bound.owner_flag(given);
    const auto run = [&](void *stream) {
      return function(caches, all.get(), num_layers, &now, stream);
    };
    if (!bound.call(given, /*is_brief=*/false, &status, run)) return nullptr;
    return PyLong_FromLong(status);
  }
};

}  // namespace
}  // namespace kvx

extern "C" KVX_API PyObject *kvx_python_layers(const kvx::Binding *bound,
                                               decltype(&kvx_write_layers) function,
                                               const kvx_cache_desc_t *const *caches,
                                               const kvx_write_desc_t *likes, uint32_t num_layers,
                                               const kvx_write_options_t *options) {
  return kvx::function_of(kvx::WriteLayers{*bound, function, caches, likes, num_layers, options});
}
