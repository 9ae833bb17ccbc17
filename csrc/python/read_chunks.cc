// Reads files of chunks into memory and checks every byte, many in one call that holds the GIL only
// at its ends. It tells good files; of any other one it says nothing, and
// kvx_core/snapshot/chunk_file.py finds what is wrong. docs/store_format.md has the format.
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "cpython.h"
#include "files.h"
#include "function.h"
#include "kvx/kvx_abi.h"

namespace kvx {
namespace {

constexpr Py_ssize_t kMostFiles = 64;
constexpr int kMostRuns = 62;  // of the data of a file
constexpr int64_t kMostStart = int64_t{1} << 62;
constexpr int64_t kParentAt = 68, kKindAt = 100, kStartAt = 132, kIdsAt = 140;  // of a record
constexpr int64_t kKeyBytes = 32, kCheckBytes = 16, kRowBytes = 4 + kCheckBytes;

// Source: https://github.com/Cyan4973/xxHash/blob/dev/xxhash.h, XXH128_hash_t
struct Hash {
  uint64_t low, high;
};
using Xxh3 = Hash (*)(const void *data, size_t num_bytes);

bool are_same(const void *one, const void *other, int64_t num_bytes) {
  return !memcmp(one, other, static_cast<size_t>(num_bytes));
}

// Bytes of a file's data: where they are in its memory, or in that of what nobody wants.
struct Run {
  int64_t begin, end, is_wanted;

  size_t num_bytes() const { return static_cast<size_t>(end - begin); }
};

// A piece that is wanted.
struct Piece {
  int64_t index;  // among all pieces of the file
  int64_t num_runs;
};

// What is read of plain files of one kind and number of tokens: _packed_plan of file_layout.py.
// Behind it are the arrays that `arrays` names, without gaps.
struct Plan {
  int64_t num_tokens, file_bytes, head_bytes;
  int64_t digits_at, record_bytes;  // of the record in the head
  int64_t step;                     // files begin at multiples of so many tokens
  int64_t memory_bytes, unwanted_bytes;
  int64_t most_joined;  // bytes of a piece with several runs
  int64_t num_runs, num_piece_runs, num_wanted, num_pieces;

  struct Arrays {
    const Run *runs;        // of the data
    const Run *piece_runs;  // of all wanted pieces, one after another
    const Piece *wanted;
    const int64_t *sizes;   // of all pieces of the file
    const uint8_t *record;  // kIdsAt bytes, of which those count that all files have
    const uint8_t *head;    // with any digits
  };

  Arrays arrays() const {
    const auto *runs = reinterpret_cast<const Run *>(this + 1);
    const Run *piece_runs = runs + num_runs;
    const auto *wanted = reinterpret_cast<const Piece *>(piece_runs + num_piece_runs);
    const auto *sizes = reinterpret_cast<const int64_t *>(wanted + num_wanted);
    const auto *record = reinterpret_cast<const uint8_t *>(sizes + num_pieces);
    return {runs, piece_runs, wanted, sizes, record, record + kIdsAt};
  }

  int64_t found_bytes() const { return kKeyBytes + 8 * num_tokens; }  // of parent and ids
  int64_t buffer_bytes() const { return head_bytes + record_bytes + unwanted_bytes + most_joined; }
};

// False unless all of them are digits of hex, in lower case.
bool decode(const uint8_t *digits, int64_t num_bytes, uint8_t *to) {
  const auto value = [](uint8_t digit) {
    const auto number = static_cast<uint8_t>(digit - '0');
    const auto letter = static_cast<uint8_t>(digit - 'a');
    return static_cast<uint8_t>(number < 10 ? number : letter < 6 ? letter + 10 : 0xff);
  };
  uint8_t all = 0;
  for (int64_t i = 0; i < num_bytes; ++i) {
    const uint8_t high = value(digits[2 * i]), low = value(digits[2 * i + 1]);
    to[i] = static_cast<uint8_t>(high << 4 | low);
    all |= high | low;
  }
  return all < 16;
}

struct File {
  const char *path;  // below the folder
  const Plan *plan;
  int64_t start;    // that it must have: the position of its first token
  uint8_t *memory;  // of its data
  uint8_t *found;   // its parent and ids go there
};

// A file that is open, and memory for what nobody keeps of it.
struct Reading {
  Xxh3 xxh3;
  const File &file;
  uint8_t *head, *record, *unwanted, *joined;

  Reading(Xxh3 xxh3, const File &file, uint8_t *buffer) : xxh3(xxh3), file(file) {
    const Plan &plan = *file.plan;
    head = buffer, record = head + plan.head_bytes;
    unwanted = record + plan.record_bytes, joined = unwanted + plan.unwanted_bytes;
  }

  uint8_t *at(const Run &run) const { return (run.is_wanted ? file.memory : unwanted) + run.begin; }

  bool is_good(const void *data, int64_t num_bytes, const uint8_t *check) const {
    const Hash hash = xxh3(data, static_cast<size_t>(num_bytes));
    const uint64_t words[2] = {__builtin_bswap64(hash.high), __builtin_bswap64(hash.low)};
    return are_same(words, check, kCheckBytes);
  }

  bool read(int handle, const Run *runs) const {
    const Plan &plan = *file.plan;
    iovec parts[1 + kMostRuns] = {{head, static_cast<size_t>(plan.head_bytes)}};
    size_t num_bytes = parts[0].iov_len;
    for (int64_t i = 0; i < plan.num_runs; ++i) {
      parts[1 + i] = {at(runs[i]), runs[i].num_bytes()};
      num_bytes += runs[i].num_bytes();
    }
    const int64_t count = filled(handle, parts, static_cast<int>(1 + plan.num_runs));
    return count == static_cast<int64_t>(num_bytes);
  }

  // Decodes the record, and checks all of the head.
  bool is_head_good(const Plan::Arrays &expected) const {
    const Plan &plan = *file.plan;
    const int64_t end = plan.digits_at + 2 * plan.record_bytes;
    const int64_t checked = plan.record_bytes - kCheckBytes;
    if (!are_same(head, expected.head, plan.digits_at) ||
        !are_same(head + end, expected.head + end, plan.head_bytes - end) ||
        !decode(head + plan.digits_at, plan.record_bytes, record) ||
        !are_same(record, expected.record, kParentAt) ||
        !are_same(record + kKindAt, expected.record + kKindAt, kStartAt - kKindAt) ||
        !is_good(record, checked, record + checked)) {
      return false;
    }
    int64_t start;
    memcpy(&start, record + kStartAt, sizeof start);
    return start == file.start && 0 <= start && start <= kMostStart && start % plan.step == 0;
  }

  bool are_pieces_good(const Plan::Arrays &expected) const {
    const Plan &plan = *file.plan;
    const uint8_t *const rows = record + kIdsAt + 8 * plan.num_tokens;
    for (int64_t i = 0; i < plan.num_pieces; ++i) {
      uint32_t size;
      memcpy(&size, rows + i * kRowBytes, sizeof size);
      if (size != expected.sizes[i]) return false;
    }
    const Run *runs = expected.piece_runs;
    for (int64_t i = 0; i < plan.num_wanted; ++i) {
      const Piece &piece = expected.wanted[i];
      const uint8_t *data = at(runs[0]);
      if (piece.num_runs > 1) {
        data = joined;
        uint8_t *to = joined;
        for (int64_t j = 0; j < piece.num_runs; to += runs[j++].num_bytes()) {
          memcpy(to, at(runs[j]), runs[j].num_bytes());
        }
      }
      runs += piece.num_runs;
      const uint8_t *const check = rows + piece.index * kRowBytes + sizeof(uint32_t);
      if (!is_good(data, expected.sizes[piece.index], check)) return false;
    }
    return true;
  }

  bool is_good(int handle) const {
    const Plan::Arrays expected = file.plan->arrays();
    if (!read(handle, expected.runs) || !is_head_good(expected) || !are_pieces_good(expected)) {
      return false;
    }
    memcpy(file.found, record + kParentAt, kKeyBytes);
    memcpy(file.found + kKeyBytes, record + kIdsAt, static_cast<size_t>(8 * file.plan->num_tokens));
    return true;
  }
};

bool is_good(Xxh3 xxh3, int folder, const File &file, uint8_t *buffer) {
  const int handle = opened(folder, file.path);
  if (handle < 0) return false;
  bool is_good = size_of(handle) == file.plan->file_bytes;
  if (is_good) {
    mark_as_used(handle);
    is_good = Reading(xxh3, file, buffer).is_good(handle);
  }
  close(handle);
  return is_good;
}

struct ReadChunks {
  static constexpr char kName[] = "kvx.read_chunks";

  Xxh3 xxh3;
  PyObject *owner;  // of that function

  PyObject *kept() const { return owner; }

  // Reads what to look for. False with or without a Python exception.
  static bool take(PyObject *const *args, Py_ssize_t i, const Py_buffer &memory, File *file) {
    PyObject *const plan = PyTuple_GetItem(args[2], i);
    const char *const path = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(args[1], i), nullptr);
    const long start = PyLong_AsLong(PyTuple_GetItem(args[3], i));
    const long place = PyLong_AsLong(PyTuple_GetItem(args[5], i));
    if (PyErr_Occurred()) return false;
    *file = {path, nullptr, start, static_cast<uint8_t *>(memory.buf) + place, nullptr};
    file->plan = reinterpret_cast<const Plan *>(PyBytes_AsString(plan));
    return file->plan && 0 <= place && place <= memory.len - file->plan->memory_bytes;
  }

  void look(int folder, const File *files, Py_ssize_t num, int64_t buffer_bytes, char *good) const {
    auto *const buffer = static_cast<uint8_t *>(malloc(static_cast<size_t>(buffer_bytes)));
    for (Py_ssize_t i = 0; i < num; ++i) {
      good[i] = buffer && is_good(xxh3, folder, files[i], buffer);
    }
    free(buffer);
  }

  // (folder, names, plans, starts, memory, places) -> (of each file 1 if it is good, else 0;
  // parents and ids of all files, one after another, of good ones alone). All are tuples but for
  // the handle of a folder, and memory, in which the data of a file go to its place.
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    if (num_args != 6) return nullptr;
    const auto folder = static_cast<int>(PyLong_AsLong(args[0]));
    const Py_ssize_t num = PyTuple_Size(args[1]);
    Py_buffer memory;
    if (PyErr_Occurred() || num > kMostFiles) return nullptr;
    if (PyObject_GetBuffer(args[4], &memory, PyBUF_WRITABLE)) return nullptr;
    File files[kMostFiles];
    int64_t buffer_bytes = 1, found_bytes = 0;
    bool can = true;
    for (Py_ssize_t i = 0; can && i < num; ++i) {
      can = take(args, i, memory, &files[i]);
      if (!can) break;
      buffer_bytes = std::max(buffer_bytes, files[i].plan->buffer_bytes());
      found_bytes += files[i].plan->found_bytes();
    }
    PyObject *const good = can ? PyBytes_FromStringAndSize(nullptr, num) : nullptr;
    PyObject *const found = good ? PyBytes_FromStringAndSize(nullptr, found_bytes) : nullptr;
    if (found) {
      auto *to = reinterpret_cast<uint8_t *>(PyBytes_AsString(found));
      for (Py_ssize_t i = 0; i < num; ++i) {
        files[i].found = to;
        to += files[i].plan->found_bytes();
      }
      char *const each = PyBytes_AsString(good);
      PyThreadState *const state = PyEval_SaveThread();
      look(folder, files, num, buffer_bytes, each);
      PyEval_RestoreThread(state);
    }
    PyBuffer_Release(&memory);
    PyObject *const both = found ? PyTuple_Pack(2, good, found) : nullptr;
    if (good) Py_DecRef(good);
    if (found) Py_DecRef(found);
    return both;
  }
};

}  // namespace
}  // namespace kvx

// The function that checks with this XXH3 of 128 bits, which its owner keeps alive.
extern "C" KVX_API PyObject *kvx_python_read_chunks(void *xxh3, PyObject *owner) {
  return kvx::function_of(kvx::ReadChunks{reinterpret_cast<kvx::Xxh3>(xxh3), owner});
}
