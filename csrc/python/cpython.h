// Declares the part of CPython's stable ABI that KVX uses: one build without Python's headers then
// serves every CPython from 3.11 on.
// Source: https://docs.python.org/3/c-api/stable.html
#pragma once

#include <sys/types.h>

extern "C" {

typedef struct _object PyObject;
typedef struct _ts PyThreadState;
typedef struct _typeobject PyTypeObject;
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

enum {
  PyBUF_WRITABLE = 0x01,
  PyBUF_RECORDS_RO = 0x1c,  // strides and format; perhaps read-only
};

extern PyObject _Py_NoneStruct;
extern PyTypeObject PyList_Type, PyLong_Type, PyTuple_Type;

inline bool is_none(PyObject *object) { return object == &_Py_NoneStruct; }
inline PyObject *as_object(PyTypeObject &type) { return reinterpret_cast<PyObject *>(&type); }

PyObject *Py_BuildValue(const char *format, ...);
void Py_DecRef(PyObject *object);
int PyObject_GenericSetAttr(PyObject *object, PyObject *name, PyObject *value);
PyObject *PyObject_GetAttr(PyObject *object, PyObject *name);
PyObject *PyObject_CallObject(PyObject *callable, PyObject *args);
int PyObject_IsInstance(PyObject *object, PyObject *type);
PyObject *PyCFunction_NewEx(PyMethodDef *method, PyObject *self, PyObject *module);
PyObject *PyTuple_Pack(Py_ssize_t size, ...);
PyObject *PyTuple_GetItem(PyObject *tuple, Py_ssize_t index);
PyObject *PyCapsule_New(void *pointer, const char *name, PyCapsule_Destructor destructor);
void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
Py_ssize_t PyTuple_Size(PyObject *tuple);
PyObject *PyList_GetItem(PyObject *list, Py_ssize_t index);
Py_ssize_t PyList_Size(PyObject *list);
char *PyBytes_AsString(PyObject *bytes);
const char *PyUnicode_AsUTF8AndSize(PyObject *text, Py_ssize_t *num_bytes);
Py_ssize_t PyBytes_Size(PyObject *bytes);
char *PyByteArray_AsString(PyObject *bytes);
PyObject *PyByteArray_FromStringAndSize(const char *bytes, Py_ssize_t num_bytes);
int PyObject_CheckBuffer(PyObject *object);
int PyObject_GetBuffer(PyObject *object, Py_buffer *buffer, int flags);
void PyBuffer_Release(Py_buffer *buffer);
PyObject *PyBytes_FromStringAndSize(const char *bytes, Py_ssize_t num_bytes);
PyObject *PyBool_FromLong(long value);
PyObject *PyLong_FromLong(long value);
long PyLong_AsLong(PyObject *number);
long long PyLong_AsLongLong(PyObject *number);
void *PyLong_AsVoidPtr(PyObject *number);
PyObject *PyErr_Occurred(void);
PyObject *PyErr_NoMemory(void);
void PyErr_Clear(void);
PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *state);

}  // extern "C"
