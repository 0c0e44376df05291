/* The kernels as Python functions: buffers in, numbers out. They check sizes, and nothing else. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "values.h"

#define MANY (1 << 17) /* bytes from which other threads may run meanwhile */
#define INTERFACE 10 /* raised with every change that ../in_c.py has to know of */

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

/* The buffers of one call. */
typedef struct {
    Py_buffer view[3];
    int count;
} Buffers;

static PyObject *closed(Buffers *buffers, PyObject *result)
{
    while (buffers->count)
        PyBuffer_Release(&buffers->view[--buffers->count]);
    return result;
}

static void *opened(Buffers *buffers, PyObject *object, int flags, size_t *size)
{
    Py_buffer *view = &buffers->view[buffers->count];
    if (PyObject_GetBuffer(object, view, flags))
        return NULL;
    buffers->count++;
    *size = (size_t)view->len;
    return view->buf ? view->buf : "";
}

/* An array given by a buffer and the code of its elements. */
static const void *array(Buffers *buffers, PyObject *const *args, int *code, size_t *n)
{
    long number = PyLong_AsLong(args[1]);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    if (number < 0 || number >= CODES)
        return PyErr_Format(PyExc_ValueError, "%ld is no code of an element type", number);
    *code = (int)number;
    const void *found = opened(buffers, args[0], PyBUF_SIMPLE, n);
    if (found && (uintptr_t)found % WIDTH[number] && *n)
        return PyErr_Format(PyExc_ValueError, "the array is not aligned to its elements");
    *n /= WIDTH[number];
    return found;
}

static int takes(Py_ssize_t wanted, Py_ssize_t found)
{
    if (wanted != found)
        PyErr_Format(PyExc_TypeError, "it takes %zd arguments, not %zd", wanted, found);
    return wanted == found;
}

static PyObject *sizes_differ(Buffers *buffers)
{
    PyErr_SetString(PyExc_ValueError, "the sizes of the buffers do not belong together");
    return closed(buffers, NULL);
}

/* In the order of ../__init__.py's STATISTICS. Zero is added to make -0.0 the 0.0 that it equals, so
 * that one value has one fingerprint. */
static PyObject *statistics(const Moments *m, size_t n, int full, const double *chosen)
{
    double finite = (double)(n - m->nan - m->inf);
    double known[] = {(double)n, (double)m->nan, (double)m->inf, (double)m->zero, m->sum / finite,
        m->abs / finite, sqrt(m->square), full ? m->cube / finite : NAN,
        full ? m->fourth / finite : NAN, m->low, chosen[0], chosen[1], chosen[2], chosen[3],
        chosen[4], m->high};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        known[i] = finite || i < 3 ? known[i] + 0.0 : 0.0;
    return PyBytes_FromStringAndSize((const char *)known, sizeof known);
}

/* Digest (None of few bytes, or of a PLAIN_PROCESSOR) and statistics; adds to the buckets of a sketch,
 * unless they are None. */
static PyObject *py_summary(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    static const double quantile[] = {0.05, 0.25, 0.5, 0.75, 0.95};
    double chosen[] = {NAN, NAN, NAN, NAN, NAN}, *total = NULL;
    Buffers buffers = {.count = 0};
    Moments m;
    Hash hash;
    Sketch sketch;
    unsigned char digest[16];
    int code, done = 1;
    size_t n = 0, size = 0;
    (void)self;
    if (!takes(5, count))
        return NULL;
    int full = PyObject_IsTrue(args[2]);
    const void *from = array(&buffers, args, &code, &n);
    if (from && args[4] != Py_None) {
        total = opened(&buffers, args[4], PyBUF_WRITABLE, &size);
        if (total && size != BUCKETS * sizeof *total)
            return sizes_differ(&buffers);
    }
    if (!from || (args[4] != Py_None && !total))
        return closed(&buffers, NULL);
    size_t bytes = n * WIDTH[code];
    int hashed = PyObject_IsTrue(args[3]) && bytes > SHORT && processor >= AVX2_PROCESSOR;
    Beside beside = {hashed ? &hash : NULL, total ? &sketch : NULL};
    RUN(bytes, {
        if (hashed)
            hash_start(&hash, from, bytes);
        if (total)
            sketch_start(&sketch, from, code, n, total);
        moments(from, code, n, full, &m, &beside);
        if (hashed)
            hash_end(&hash, bytes, digest);
        done = !full || order_statistics(from, code, n, quantile, 5, chosen);
    });
    closed(&buffers, NULL);
    if (!done)
        return PyErr_NoMemory();
    PyObject *of_bytes = hashed ? PyBytes_FromStringAndSize((char *)digest, sizeof digest)
                                : Py_NewRef(Py_None);
    PyObject *numbers = statistics(&m, n, full, chosen);
    PyObject *result = of_bytes && numbers ? PyTuple_Pack(2, of_bytes, numbers) : NULL;
    Py_XDECREF(of_bytes);
    Py_XDECREF(numbers);
    return result;
}

/* XXH3-128 of bytes that are elsewhere: of their whole blocks but the last one, which may be whole, what
 * each adds to the accumulators, and the bytes from there on, or the last STRIPE of all. None for a
 * PLAIN_PROCESSOR. */
static PyObject *py_digest_of_blocks(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    Hash hash;
    unsigned char digest[16];
    size_t size = 0, length = 0;
    (void)self;
    if (!takes(3, count))
        return NULL;
    size_t bytes = PyLong_AsSize_t(args[2]);
    if (bytes == (size_t)-1 && PyErr_Occurred())
        return NULL;
    const uint64_t *sums = opened(&buffers, args[0], PyBUF_SIMPLE, &size);
    const char *tail = sums ? opened(&buffers, args[1], PyBUF_SIMPLE, &length) : NULL;
    if (!tail)
        return closed(&buffers, NULL);
    size_t blocks = bytes ? (bytes - 1) / (STRIPE * STRIPES) : 0;
    size_t rest = bytes - blocks * STRIPE * STRIPES;
    if (bytes <= SHORT || size != 8 * blocks * sizeof *sums || length < rest || length < STRIPE)
        return sizes_differ(&buffers);
    if (processor < AVX2_PROCESSOR)
        return closed(&buffers, Py_NewRef(Py_None));
    RUN(size, {
        hash_start(&hash, tail + length - rest, rest);
        hash_blocks(&hash, sums, blocks);
        hash_end(&hash, bytes, digest);
    });
    return closed(&buffers, PyBytes_FromStringAndSize((char *)digest, sizeof digest));
}

static PyObject *py_signed_buckets(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    int code;
    size_t n = 0, size = 0;
    (void)self;
    if (!takes(3, count))
        return NULL;
    const void *from = array(&buffers, args, &code, &n);
    double *total = from ? opened(&buffers, args[2], PyBUF_WRITABLE, &size) : NULL;
    if (!total)
        return closed(&buffers, NULL);
    if (size != BUCKETS * sizeof *total)
        return sizes_differ(&buffers);
    RUN(buffers.view->len, signed_buckets(from, code, n, total));
    return closed(&buffers, Py_NewRef(Py_None));
}

static PyObject *py_differences(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0}, others = {.count = 0};
    int code_a, code_b;
    size_t n = 0, n_b = 0, kept = 0, size = 0;
    const uint8_t *keep = NULL;
    (void)self;
    if (!takes(7, count))
        return NULL;
    double scale = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred())
        return NULL;
    const void *a = array(&buffers, args, &code_a, &n);
    const void *b = a ? array(&buffers, args + 2, &code_b, &n_b) : NULL;
    Figures *rows = b ? opened(&buffers, args[6], PyBUF_WRITABLE, &size) : NULL;
    if (rows && args[4] != Py_None) {
        keep = opened(&others, args[4], PyBUF_SIMPLE, &kept);
        rows = keep ? rows : NULL;
    }
    PyObject *result = NULL;
    if (rows) {
        if (n != n_b || (keep && kept != n) || size != (n + BLOCK - 1) / BLOCK * sizeof *rows)
            sizes_differ(&others);
        else {
            RUN(buffers.view->len, differences(a, code_a, b, code_b, keep, n, scale, rows));
            result = Py_NewRef(Py_None);
        }
    }
    closed(&others, NULL);
    return closed(&buffers, result);
}

static PyObject *py_largest_ulp(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    int code_a, code_b;
    size_t n = 0, n_b = 0;
    uint64_t found;
    (void)self;
    if (!takes(4, count))
        return NULL;
    const void *a = array(&buffers, args, &code_a, &n);
    const void *b = a ? array(&buffers, args + 2, &code_b, &n_b) : NULL;
    if (!b)
        return closed(&buffers, NULL);
    if (n != n_b || code_a != code_b)
        return sizes_differ(&buffers);
    RUN(buffers.view->len, found = largest_ulp(a, b, code_a, n));
    return closed(&buffers, PyLong_FromUnsignedLongLong(found));
}

static PyObject *py_within(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    int code_a, code_b, found;
    size_t n = 0, n_b = 0;
    (void)self;
    if (!takes(6, count))
        return NULL;
    double rel = PyFloat_AsDouble(args[4]), abs = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred())
        return NULL;
    const void *a = array(&buffers, args, &code_a, &n);
    const void *b = a ? array(&buffers, args + 2, &code_b, &n_b) : NULL;
    if (!b)
        return closed(&buffers, NULL);
    if (n != n_b)
        return sizes_differ(&buffers);
    RUN(buffers.view->len, found = within(a, code_a, b, code_b, n, rel, abs));
    return closed(&buffers, PyBool_FromLong(found));
}

static PyObject *py_crc32(PyObject *self, PyObject *data)
{
    Buffers buffers = {.count = 0};
    size_t n = 0;
    uint32_t found;
    (void)self;
    const void *from = opened(&buffers, data, PyBUF_SIMPLE, &n);
    if (!from)
        return NULL;
    RUN(n, found = crc(0, from, n));
    return closed(&buffers, PyLong_FromUnsignedLong(found));
}

static PyObject *py_stream(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    size_t n = 0, size = 0;
    (void)self;
    if (!takes(2, count))
        return NULL;
    const char *from = opened(&buffers, args[0], PyBUF_SIMPLE, &n);
    char *to = from ? opened(&buffers, args[1], PyBUF_WRITABLE, &size) : NULL;
    if (!to)
        return closed(&buffers, NULL);
    if (size != n)
        return sizes_differ(&buffers);
    RUN(n, stream(from, n, to));
    return closed(&buffers, Py_NewRef(Py_None));
}

/* Head, then data to a place in a piece of memory; the CRC-32 of the data goes to the head, too. */
static PyObject *py_place(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    size_t size = 0, length = 0, n = 0;
    uint32_t found;
    (void)self;
    if (!takes(5, count))
        return NULL;
    size_t at = PyLong_AsSize_t(args[1]), crc_at = PyLong_AsSize_t(args[3]);
    if (PyErr_Occurred())
        return NULL;
    char *piece = opened(&buffers, args[0], PyBUF_WRITABLE, &size);
    const char *head = piece ? opened(&buffers, args[2], PyBUF_SIMPLE, &length) : NULL;
    const void *data = head ? opened(&buffers, args[4], PyBUF_SIMPLE, &n) : NULL;
    if (!data)
        return closed(&buffers, NULL);
    if (at > size || length > size - at || n > size - at - length || length < 4
        || crc_at > length - 4)
        return sizes_differ(&buffers);
    memcpy(piece + at, head, length);
    RUN(n, found = crc_copied(data, n, (uint8_t *)piece + at + length));
    for (int i = 0; i < 4; i++)
        piece[at + crc_at + (size_t)i] = (char)(found >> 8 * i);
    return closed(&buffers, PyLong_FromUnsignedLong(found));
}

static PyObject *py_pack(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    Axis axis[MOST_AXES];
    size_t n = 0, size = 0;
    (void)self;
    if (!takes(2, count))
        return NULL;
    const char *from = opened(&buffers, args[0], PyBUF_STRIDED_RO, &n);
    char *to = from ? opened(&buffers, args[1], PyBUF_WRITABLE, &size) : NULL;
    if (!to)
        return closed(&buffers, NULL);
    const Py_buffer *view = &buffers.view[0];
    size_t width = (size_t)view->itemsize;
    if (size != n || view->ndim > MOST_AXES || width > 16 || width & (width - 1))
        return sizes_differ(&buffers);
    for (int a = 0; a < view->ndim; a++)
        axis[a].size = (size_t)view->shape[a], axis[a].step = view->strides[a];
    RUN(n, pack(from, view->ndim, axis, width, to));
    return closed(&buffers, Py_NewRef(Py_None));
}

/* Every `step`th element of an array of any layout, in C order, as bytes. */
static PyObject *py_every(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    size_t n = 0;
    (void)self;
    if (!takes(2, count))
        return NULL;
    Py_ssize_t step = PyLong_AsSsize_t(args[1]);
    if (step < 1)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "the step is below 1");
    const char *from = opened(&buffers, args[0], PyBUF_STRIDED_RO, &n);
    if (!from)
        return NULL;
    const Py_buffer *view = &buffers.view[0];
    Py_ssize_t width = view->itemsize, size = view->len / width;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (size + step - 1) / step * width);
    for (Py_ssize_t i = 0; result && i < size; i += step) {
        const char *element = from;
        for (Py_ssize_t a = view->ndim - 1, rest = i; a >= 0; rest /= view->shape[a--])
            element += rest % view->shape[a] * view->strides[a];
        memcpy(PyBytes_AS_STRING(result) + i / step * width, element, (size_t)width);
    }
    return closed(&buffers, result);
}

/* For tests: leaves unused what the processor has beyond a level of `values.h`; returns the highest. */
static PyObject *py_restrict(PyObject *self, PyObject *level)
{
    long wanted = PyLong_AsLong(level);
    (void)self;
    if (wanted == -1 && PyErr_Occurred())
        return NULL;
    int found = processor_found();
    processor = wanted < found ? (int)wanted : found;
    return PyLong_FromLong(found);
}

#define FUNCTION(NAME, FLAGS) {#NAME, (PyCFunction)(void (*)(void))py_##NAME, FLAGS, NULL}

static PyMethodDef functions[] = {
    FUNCTION(summary, METH_FASTCALL),
    FUNCTION(digest_of_blocks, METH_FASTCALL),
    FUNCTION(signed_buckets, METH_FASTCALL),
    FUNCTION(differences, METH_FASTCALL),
    FUNCTION(largest_ulp, METH_FASTCALL),
    FUNCTION(within, METH_FASTCALL),
    FUNCTION(pack, METH_FASTCALL),
    FUNCTION(every, METH_FASTCALL),
    FUNCTION(stream, METH_FASTCALL),
    FUNCTION(crc32, METH_O),
    FUNCTION(place, METH_FASTCALL),
    FUNCTION(restrict, METH_O),
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module)
{
    processor = processor_found();
    return PyModule_AddIntConstant(module, "interface", INTERFACE)
        || PyModule_AddObjectRef(module, "has_crc32", has_crc() ? Py_True : Py_False)
        ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, start},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tracediff.kernels._native", NULL, 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
