/* NumPy's arrays, where to open their buffers would take longer than to summarise small values. */
#ifndef TRACEDIFF_ARRAYS_H
#define TRACEDIFF_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL tracediff_arrays
#ifndef IMPORTS_ARRAYS
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "values.h"

#define MANY (1 << 17) /* bytes from which other threads may run meanwhile */

#define SHARED (1 << 19) /* bytes from which several threads are worth their start */

#define RUN(BYTES, CALL)                                                                           \
    do {                                                                                           \
        if ((BYTES) >= MANY) {                                                                     \
            Py_BEGIN_ALLOW_THREADS;                                                                \
            CALL;                                                                                  \
            Py_END_ALLOW_THREADS;                                                                  \
        } else {                                                                                   \
            CALL;                                                                                  \
        }                                                                                          \
    } while (0)

/* Loads what the functions below need; returns -1 with an exception set where it cannot. */
HIDDEN int load_arrays(void);

/* The code of a type; CODES where it has none. */
HIDDEN int code_of(const PyArray_Descr *dtype);

/* The elements of an array, two for a complex one. */
typedef struct {
    const void *from;
    int code;
    size_t n, bytes;
} Elements;

/* Of an array in C order, aligned, of the machine's byte order and a type that has a code; 0 with no
 * exception set for any other object. */
HIDDEN int elements_of(PyObject *object, Elements *to);

#define STATISTICS 16

/* All of an array in one pass over the memory: its digest, as bytes; None of few bytes, or of a
 * PLAIN_PROCESSOR. Statistics, whole if `full`, and a sketch, unless there is no room for them (one of
 * BUCKETS only with the statistics). NULL for want of memory. */
HIDDEN PyObject *summarised(const Elements *of, int full, double *total, double *statistics);

/* Copies an array of any layout, and elements of 1, 2, 4, 8 or 16 bytes, to C order. */
HIDDEN void packed(PyArrayObject *array, char *to);

/* Every `step`th element of an array of any layout, in C order, as bytes. */
HIDDEN PyObject *every(PyArrayObject *array, npy_intp step);

/* For Python. */
HIDDEN PyObject *py_exchanged(PyObject *self, PyObject *const *args, Py_ssize_t count);
HIDDEN extern PyType_Spec memo_spec;

#endif
