// A Python function that runs a C++ object: `run(args, num_args)` of a T with a `kName`.
#pragma once

#include "cpython.h"

namespace kvx {

// Nobody else gets the capsules, so they need no names, which each call would compare.
template <class T>
T *state_of(PyObject *capsule) {
  return static_cast<T *>(PyCapsule_GetPointer(capsule, nullptr));
}

// `self`: (capsule of the state, objects that it needs), a tuple that the garbage collector can
// traverse.
template <class T>
PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  const T *state = state_of<T>(PyTuple_GetItem(self, 0));
  return state ? state->run(args, num_args) : nullptr;
}

// A Python function that runs this state; NULL with a Python exception.
template <class T>
PyObject *function_of(const T &state) {
  static PyMethodDef method = {T::kName, &run<T>, METH_FASTCALL, nullptr};
  T *owned = new T(state);
  PyObject *capsule =
      PyCapsule_New(owned, nullptr, [](PyObject *capsule) { delete state_of<T>(capsule); });
  if (!capsule) {
    delete owned;
    return nullptr;
  }
  PyObject *self = PyTuple_Pack(2, capsule, state.kept());
  Py_DecRef(capsule);
  if (!self) return nullptr;
  PyObject *function = PyCFunction_NewEx(&method, self, nullptr);
  Py_DecRef(self);
  return function;
}

}  // namespace kvx
