// Appends a token to the keys and values of a packed cache: rows that are read through DLPack are
// copied into the room behind those held. What a decode step does in every layer, so it takes a
// fraction of a microsecond.
#include <cstring>

#include "binding.h"

namespace kvx {
namespace {

constexpr int64_t kMostBytes = 1 << 20;  // of keys or values: torch copies more on several threads

struct Append {
  static constexpr char kName[] = "kvx.append";

  TensorType type;
  HeldTensor halves[2];  // keys and values, (batch, capacity, dim), contiguous, on the host
  PyObject *owner;       // owner of these; the function keeps it alive
  DLTensor like;         // what both are; its pointers are not used
  int64_t batch, capacity, dim, row_bytes;

  PyObject *kept() const { return owner; }

  // Reads what does not change of the tensors. False if they are no such.
  bool bind() {
    for (const HeldTensor &half : halves) {
      DLTensor found;
      if (!type.read(half.tensor, &found) || !is_in(KVX_MEMORY_HOST, found) || found.ndim != 3 ||
          found.lanes != 1 || found.bits % 8) {
        return false;
      }
      like = found;
      batch = found.shape[0], capacity = found.shape[1], dim = found.shape[2];
      row_bytes = dim * (found.bits / 8);
      if (found.strides[2] != 1 || found.strides[1] != dim || found.strides[0] != capacity * dim) {
        return false;
      }
    }
    return batch * row_bytes <= kMostBytes;
  }

  // Whether this is (batch, 1, dim) of the dtype of the cache, each row in one piece.
  bool is_token(const DLTensor &found) const {
    return is_in(KVX_MEMORY_HOST, found) && found.ndim == 3 && found.shape[0] == batch &&
           found.shape[1] == 1 && found.shape[2] == dim && (dim == 1 || found.strides[2] == 1) &&
           found.code == like.code && found.bits == like.bits && found.lanes == 1;
  }

  void copy(const DLTensor &token, char *rows, int64_t seq_len) const {
    const auto *from = static_cast<const char *>(address_of(token));
    const int64_t step = token.strides[0] * (like.bits / 8);
    for (int64_t b = 0; b < batch; ++b) {
      char *const to = rows + (b * capacity + seq_len) * row_bytes;
      std::memmove(to, from + b * step, static_cast<size_t>(row_bytes));
    }
  }

  // (keys, values, seq_len) -> whether they are token `seq_len` of every sequence now. False:
  // nothing is written, since they are something else or there is no room.
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    DLTensor tokens[2];
    const int64_t seq_len = num_args == 3 ? PyLong_AsLong(args[2]) : -1;
    bool can = 0 <= seq_len && seq_len < capacity && row_bytes;
    for (int i = 0; can && i < 2; ++i) {
      can = type.read(args[i], &tokens[i]) && is_token(tokens[i]) && halves[i].is_in_place(type);
    }
    if (can) {
      const bool is_brief = 2 * batch * row_bytes <= static_cast<int64_t>(kBriefBytes);
      PyThreadState *const state = is_brief ? nullptr : PyEval_SaveThread();
      for (int i = 0; i < 2; ++i) copy(tokens[i], static_cast<char *>(halves[i].data), seq_len);
      if (state) PyEval_RestoreThread(state);
    }
    return PyBool_FromLong(can);
  }
};

}  // namespace
}  // namespace kvx

// The function of these keys and values (an array of both); False where C cannot append to them.
extern "C" KVX_API PyObject *kvx_python_append(const kvx::TensorType *type,
                                               const kvx::HeldTensor *halves, PyObject *owner) {
  kvx::Append append{*type, {halves[0], halves[1]}, owner, {}, 0, 0, 0, 0};
  return append.bind() ? kvx::function_of(append) : PyBool_FromLong(0);
}
