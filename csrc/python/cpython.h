// Declares the part of CPython's stable ABI that KVX uses: one build without Python's headers then
// serves every CPython from 3.11 on.
// Source: https://docs.python.org/3/c-api/stable.html
#pragma once

#include <sys/types.h>

extern "C" {

typedef struct _object PyObject;
typedef struct _ts PyThreadState;
typedef ssize_t Py_ssize_t;
typedef PyObject *(*PyCFunctionFast)(PyObject *self, PyObject *const *args, Py_ssize_t num_args);
typedef void (*PyCapsule_Destructor)(PyObject *capsule);

typedef struct PyMethodDef {
  const char *ml_name;
  PyCFunctionFast ml_meth;
  int ml_flags;
  const char *ml_doc;
} PyMethodDef;

enum { METH_FASTCALL = 0x0080 };

// In the stable ABI since 3.11.
typedef struct Py_buffer {
  void *buf;
  PyObject *obj;
  Py_ssize_t len, itemsize;
  int readonly, ndim;
  char *format;
  Py_ssize_t *shape, *strides, *suboffsets;
  void *internal;
} Py_buffer;

enum { PyBUF_WRITABLE = 1 };

extern PyObject _Py_NoneStruct;

inline bool is_none(PyObject *object) { return object == &_Py_NoneStruct; }

void Py_DecRef(PyObject *object);
PyObject *PyObject_CallObject(PyObject *callable, PyObject *args);
int PyObject_IsInstance(PyObject *object, PyObject *type);
PyObject *PyCFunction_NewEx(PyMethodDef *method, PyObject *self, PyObject *module);
PyObject *PyTuple_Pack(Py_ssize_t size, ...);
PyObject *PyTuple_GetItem(PyObject *tuple, Py_ssize_t index);
PyObject *PyCapsule_New(void *pointer, const char *name, PyCapsule_Destructor destructor);
void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
Py_ssize_t PyTuple_Size(PyObject *tuple);
char *PyBytes_AsString(PyObject *bytes);
const char *PyUnicode_AsUTF8AndSize(PyObject *text, Py_ssize_t *num_bytes);
int PyObject_GetBuffer(PyObject *object, Py_buffer *buffer, int flags);
void PyBuffer_Release(Py_buffer *buffer);
PyObject *PyBytes_FromStringAndSize(const char *bytes, Py_ssize_t num_bytes);
PyObject *PyBool_FromLong(long value);
PyObject *PyLong_FromLong(long value);
long PyLong_AsLong(PyObject *number);
void *PyLong_AsVoidPtr(PyObject *number);
PyObject *PyErr_Occurred(void);
PyObject *PyErr_NoMemory(void);
void PyErr_Clear(void);
PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *state);

}  // extern "C"
