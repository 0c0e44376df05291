/* What is found of NumPy's arrays, and tensors of other libraries as such arrays. */
#define IMPORTS_ARRAYS
#include "arrays.h"

static PyArray_Descr *bfloat16;

int load_arrays(void)
{
    if (PyArray_ImportNumPyAPI() < 0)
        return -1;
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    PyObject *type = module ? PyObject_GetAttrString(module, "bfloat16") : NULL;
    int found = type && PyArray_DescrConverter(type, &bfloat16);
    Py_XDECREF(type);
    Py_XDECREF(module);
    return found ? 0 : -1;
}

/* By kind and width: some types of one kind and width have several numbers. */
int code_of(const PyArray_Descr *dtype)
{
    if (dtype->type_num == bfloat16->type_num)
        return BF16;
    if (!PyTypeNum_ISNUMBER(dtype->type_num) && !PyTypeNum_ISBOOL(dtype->type_num))
        return CODES;
    switch (dtype->kind << 8 | (int)PyDataType_ELSIZE(dtype)) {
    case 'b' << 8 | 1: return BOOL;
    case 'u' << 8 | 1: return U8;
    case 'i' << 8 | 1: return I8;
    case 'u' << 8 | 2: return U16;
    case 'i' << 8 | 2: return I16;
    case 'u' << 8 | 4: return U32;
    case 'i' << 8 | 4: return I32;
    case 'u' << 8 | 8: return U64;
    case 'i' << 8 | 8: return I64;
    case 'f' << 8 | 2: return F16;
    case 'f' << 8 | 4:
    case 'c' << 8 | 8: return F32;
    case 'f' << 8 | 8:
    case 'c' << 8 | 16: return F64;
    default: return CODES;
    }
}

int elements_of(PyObject *object, Elements *to)
{
    if (!PyArray_Check(object) || !PyArray_ISCARRAY_RO((PyArrayObject *)object))
        return 0;
    PyArrayObject *array = (PyArrayObject *)object;
    to->code = code_of(PyArray_DESCR(array));
    to->from = PyArray_DATA(array);
    to->bytes = (size_t)PyArray_NBYTES(array);
    to->n = to->code < CODES ? to->bytes / WIDTH[to->code] : 0;
    return to->code < CODES;
}

/* In the order of ../__init__.py's STATISTICS. Zero is added to make -0.0 the 0.0 that it equals, so
 * that one value has one fingerprint. */
static void put_statistics(
    const Moments *m, size_t n, int full, const double *chosen, double *to)
{
    double finite = (double)(n - m->nan - m->inf);
    double known[STATISTICS] = {(double)n, (double)m->nan, (double)m->inf, (double)m->zero,
        m->sum / finite, m->abs / finite, sqrt(m->square), full ? m->cube / finite : NAN,
        full ? m->fourth / finite : NAN, m->low, chosen[0], chosen[1], chosen[2], chosen[3],
        chosen[4], m->high};
    for (size_t i = 0; i < STATISTICS; i++)
        to[i] = finite || i < 3 ? known[i] + 0.0 : 0.0;
}

PyObject *summarised(const Elements *of, int full, double *total, double *statistics)
{
    static const double quantile[] = {0.05, 0.25, 0.5, 0.75, 0.95};
    double chosen[] = {NAN, NAN, NAN, NAN, NAN};
    unsigned char digest[16];
    Moments m;
    Hash hash;
    Sketch sketch;
    int done = 1, hashed = of->bytes > SHORT && processor >= AVX2_PROCESSOR;
    Beside beside = {hashed ? &hash : NULL, total ? &sketch : NULL};
    RUN(of->bytes, {
        int many = !full && of->bytes >= SHARED && team() > 1;
        if (hashed)
            hash_start(&hash, of->from, of->bytes);
        if (total)
            sketch_start(&sketch, of->from, of->code, of->n, total);
        many = many
            && in_units(of->from, of->code, of->n, statistics ? &m : NULL, total, beside.hash);
        if (statistics) {
            if (!many)
                moments(of->from, of->code, of->n, full, &m, &beside);
            done = !full || order_statistics(of->from, of->code, of->n, quantile, 5, chosen);
            put_statistics(&m, of->n, full, chosen, statistics);
        }
        if (hashed)
            hash_end(&hash, of->bytes, digest);
    });
    if (!done)
        return PyErr_NoMemory();
    return hashed ? PyBytes_FromStringAndSize((char *)digest, sizeof digest) : Py_NewRef(Py_None);
}

void packed(PyArrayObject *array, char *to)
{
    Axis axis[NPY_MAXDIMS];
    for (int a = 0; a < PyArray_NDIM(array); a++)
        axis[a].size = (size_t)PyArray_DIM(array, a), axis[a].step = PyArray_STRIDE(array, a);
    size_t bytes = (size_t)PyArray_NBYTES(array);
    RUN(bytes,
        (bytes < SHARED ? pack : pack_together)(PyArray_BYTES(array), PyArray_NDIM(array), axis,
            (size_t)PyArray_ITEMSIZE(array), to));
}

PyObject *every(PyArrayObject *array, npy_intp step)
{
    npy_intp width = PyArray_ITEMSIZE(array), size = PyArray_SIZE(array);
    PyObject *result = PyBytes_FromStringAndSize(NULL, (size + step - 1) / step * width);
    for (npy_intp i = 0; result && i < size; i += step) {
        const char *element = PyArray_BYTES(array);
        npy_intp rest = i;
        for (int a = PyArray_NDIM(array) - 1; a >= 0; rest /= PyArray_DIM(array, a--))
            element += rest % PyArray_DIM(array, a) * PyArray_STRIDE(array, a);
        memcpy(PyBytes_AS_STRING(result) + i / step * width, element, (size_t)width);
    }
    return result;
}

/* DLPack, version 1.3 (https://github.com/dmlc/dlpack, include/dlpack/dlpack.h): what is needed of the
 * functions that a library offers for its tensors. */
enum { ON_THE_CPU = 1 };
enum { INTEGER = 0, UNSIGNED = 1, FLOATING_POINT = 2, BRAIN = 4, BOOLEAN = 6 };

typedef struct {
    void *data;
    int32_t device, device_number;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* in elements; without strides it is in C order */
    uint64_t offset;
} Tensor;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *from_object, *to_object;
    int (*tensor_of)(void *object, Tensor *to);
    void *stream;
} Exchange;

static PyArray_Descr *dtype_of(const Tensor *tensor)
{
    int type;
    switch (tensor->code << 8 | tensor->bits) {
    case BOOLEAN << 8 | 8: type = NPY_BOOL; break;
    case UNSIGNED << 8 | 8: type = NPY_UINT8; break;
    case INTEGER << 8 | 8: type = NPY_INT8; break;
    case INTEGER << 8 | 16: type = NPY_INT16; break;
    case INTEGER << 8 | 32: type = NPY_INT32; break;
    case INTEGER << 8 | 64: type = NPY_INT64; break;
    case FLOATING_POINT << 8 | 16: type = NPY_FLOAT16; break;
    case FLOATING_POINT << 8 | 32: type = NPY_FLOAT32; break;
    case FLOATING_POINT << 8 | 64: type = NPY_FLOAT64; break;
    case BRAIN << 8 | 16: return (PyArray_Descr *)Py_NewRef(bfloat16);
    default: return NULL;
    }
    return PyArray_DescrFromType(type);
}

PyObject *py_exchanged(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Tensor tensor;
    npy_intp shape[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    (void)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "it takes 2 arguments, not %zd", count);
    const Exchange *exchange = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    if (!exchange)
        return NULL;
    if (exchange->major != 1 || !exchange->tensor_of)
        Py_RETURN_NONE;
    if (exchange->tensor_of(args[1], &tensor)) { /* it has no memory of its own, or no such type */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    if (tensor.device != ON_THE_CPU || !tensor.data || tensor.lanes != 1
        || tensor.ndim > NPY_MAXDIMS)
        Py_RETURN_NONE;
    PyArray_Descr *dtype = dtype_of(&tensor);
    if (!dtype)
        Py_RETURN_NONE;
    for (int axis = 0; axis < tensor.ndim; axis++) {
        shape[axis] = (npy_intp)tensor.shape[axis];
        if (tensor.strides)
            strides[axis] = (npy_intp)tensor.strides[axis] * (tensor.bits / 8);
    }
    char *data = (char *)tensor.data + tensor.offset;
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, dtype, tensor.ndim, shape,
        tensor.strides ? strides : NULL, data, 0, NULL);
    if (array && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(args[1]))) {
        Py_DECREF(array);
        return NULL;
    }
    return array;
}
