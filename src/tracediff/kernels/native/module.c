/* The kernels as Python functions: arrays in, numbers out. They check types and sizes, and nothing else. */
#include "arrays.h"

#define INTERFACE 13 /* raised with every change that ../in_c.py has to know of */

/* The buffers of one call, of what need not be an array. */
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

static int read_array(PyObject *object, Elements *to)
{
    if (elements_of(object, to))
        return 1;
    PyErr_SetString(PyExc_ValueError, "an array is not aligned numbers in C order");
    return 0;
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

/* Where a sketch is to be put; NULL with an exception for any other object. */
static double *sketch_in(PyObject *object)
{
    Elements to;
    if (elements_of(object, &to) && to.code == F64 && to.n == BUCKETS)
        return (double *)to.from;
    PyErr_Format(PyExc_ValueError, "the sketch is no array of %d float64", BUCKETS);
    return NULL;
}

/* Digest and statistics of an array, and a sketch unless it is None; None for one that is not read as it
 * lies. */
static PyObject *py_summary(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    double statistics[STATISTICS];
    Elements elements;
    (void)self;
    if (!takes(3, count))
        return NULL;
    double *total = args[2] == Py_None ? NULL : sketch_in(args[2]);
    if (!total && args[2] != Py_None)
        return NULL;
    if (!elements_of(args[0], &elements))
        return Py_NewRef(Py_None);
    PyObject *digest = summarised(&elements, args[1] == Py_True, total, statistics);
    Py_ssize_t size = sizeof statistics;
    return digest ? Py_BuildValue("Ny#", digest, (char *)statistics, size) : NULL;
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
    Elements of;
    (void)self;
    if (!takes(2, count) || !read_array(args[0], &of))
        return NULL;
    double *total = sketch_in(args[1]);
    if (!total)
        return NULL;
    RUN(of.bytes, signed_buckets(of.from, of.code, of.n, total));
    return Py_NewRef(Py_None);
}

static PyObject *py_differences(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    Elements a, b;
    size_t kept = 0, size = 0;
    const uint8_t *keep = NULL;
    (void)self;
    if (!takes(5, count) || !read_array(args[0], &a) || !read_array(args[1], &b))
        return NULL;
    double scale = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred())
        return NULL;
    Figures *rows = opened(&buffers, args[4], PyBUF_WRITABLE, &size);
    if (rows && args[2] != Py_None) {
        keep = opened(&buffers, args[2], PyBUF_SIMPLE, &kept);
        rows = keep ? rows : NULL;
    }
    if (!rows)
        return closed(&buffers, NULL);
    if (a.n != b.n || (keep && kept != a.n) || size != (a.n + BLOCK - 1) / BLOCK * sizeof *rows)
        return sizes_differ(&buffers);
    RUN(a.bytes, differences(a.from, a.code, b.from, b.code, keep, a.n, scale, rows));
    return closed(&buffers, Py_NewRef(Py_None));
}

static PyObject *py_largest_ulp(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    Elements a, b;
    uint64_t found;
    (void)self;
    if (!takes(2, count) || !read_array(args[0], &a) || !read_array(args[1], &b))
        return NULL;
    if (a.n != b.n || a.code != b.code)
        return sizes_differ(&buffers);
    RUN(a.bytes, found = largest_ulp(a.from, b.from, a.code, a.n));
    return PyLong_FromUnsignedLongLong(found);
}

static PyObject *py_within(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Buffers buffers = {.count = 0};
    Elements a, b;
    int found;
    (void)self;
    if (!takes(4, count) || !read_array(args[0], &a) || !read_array(args[1], &b))
        return NULL;
    double relative = PyFloat_AsDouble(args[2]), absolute = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (a.n != b.n)
        return sizes_differ(&buffers);
    RUN(a.bytes, found = within(a.from, a.code, b.from, b.code, a.n, relative, absolute));
    return PyBool_FromLong(found);
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
    (void)self;
    if (!takes(2, count))
        return NULL;
    if (!PyArray_Check(args[0]) || !PyArray_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "only arrays can be packed");
    PyArrayObject *from = (PyArrayObject *)args[0], *to = (PyArrayObject *)args[1];
    size_t width = (size_t)PyArray_ITEMSIZE(from);
    if (!PyArray_ISCARRAY(to) || PyArray_NBYTES(to) != PyArray_NBYTES(from) || width > 16
        || !width || width & (width - 1))
        return PyErr_Format(PyExc_ValueError, "the arrays cannot be packed into one another");
    packed(from, PyArray_BYTES(to));
    return Py_NewRef(Py_None);
}

/* Every `step`th element of an array of any layout, in C order, as bytes. */
static PyObject *py_every(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!takes(2, count))
        return NULL;
    Py_ssize_t step = PyLong_AsSsize_t(args[1]);
    if (step < 1 || !PyArray_Check(args[0]))
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_ValueError, "no array, or the step is below 1");
    return every((PyArrayObject *)args[0], step);
}

/* For tests: threads that large arrays are shared among. */
static PyObject *py_threads(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return PyLong_FromLong(team());
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
    FUNCTION(threads, METH_NOARGS),
    FUNCTION(exchanged, METH_FASTCALL),
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module)
{
    processor = processor_found();
    if (load_arrays())
        return -1;
    PyObject *memo = PyType_FromModuleAndSpec(module, &memo_spec, NULL);
    int failed = PyModule_AddIntConstant(module, "interface", INTERFACE)
        || PyModule_AddObjectRef(module, "has_crc32", has_crc() ? Py_True : Py_False)
        || PyModule_AddObjectRef(module, "Memo", memo);
    Py_XDECREF(memo);
    return failed ? -1 : 0;
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
