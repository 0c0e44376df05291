/* Summaries of the values of a step and of the one before, each found once: what `_Known` of
 * ../../summaries.py does with any array, for those that are read as they lie or copied to C order. Of a
 * value that is expected to be new, all is found in one pass over the memory: steps are alike, so one is
 * new where the step before had a new one. */
#include "arrays.h"

#define SAMPLED (1 << 16) /* bytes from which a value has a sample, as there */
#define SAMPLE 8          /* elements of it, likewise */
#define TOGETHER 64       /* sketches that memory is allocated for at a time */
#define SCRATCH (1 << 20) /* bytes of a copy that memory is held for at least, and at most */
#define LARGEST (64 << 20)

enum { DIGEST, DTYPE, FINGERPRINT, SKETCH, TAKEN, FIELDS }; /* of a summary */

typedef struct {
    PyObject_HEAD
    PyTypeObject *summary;    /* a class of tuples of FIELDS */
    PyObject *digest, *name;  /* functions of an array and of a dtype */
    PyObject *complete;       /* a function that gives a summary its sketch and its sample */
    PyObject *otherwise;      /* as `of`, for what C code does not read as it lies */
    PyObject *known, *before; /* (digest, name) -> summary */
    PyObject *kept, *emitted, *events; /* see ../../step_values.py */
    PyArrayObject *sketches;
    int sketched; /* of these */
    void *scratch; /* for a copy in C order */
    size_t held;
    char *was_new, *is_new;
    size_t were, are, room;
    Py_ssize_t detailed; /* elements up to which statistics are whole */
    int sampled;
} Memo;

/* Memory for a sketch, from a piece for many: small pieces that are kept would lie scattered between the
 * framework's tensors, and tear up the room that these leave. */
static PyArrayObject *new_sketch(Memo *self)
{
    npy_intp shape[] = {TOGETHER, BUCKETS};
    if (!self->sketches || self->sketched == TOGETHER) {
        Py_XSETREF(self->sketches, (PyArrayObject *)PyArray_SimpleNew(2, shape, NPY_FLOAT64));
        self->sketched = 0;
    }
    if (!self->sketches)
        return NULL;
    double *row = (double *)PyArray_DATA(self->sketches) + BUCKETS * self->sketched++;
    PyArrayObject *sketch
        = (PyArrayObject *)PyArray_SimpleNewFromData(1, shape + 1, NPY_FLOAT64, row);
    if (sketch && PyArray_SetBaseObject(sketch, Py_NewRef(self->sketches)))
        Py_CLEAR(sketch);
    return sketch;
}

/* Remembers for the next step whether the value at this place was new. */
static int remember(Memo *self, int is_new)
{
    if (self->are == self->room) {
        size_t room = 2 * self->room + 256;
        char *is = PyMem_Realloc(self->is_new, room), *was = PyMem_Realloc(self->was_new, room);
        self->is_new = is ? is : self->is_new;
        self->was_new = was ? was : self->was_new;
        if (!is || !was) {
            PyErr_NoMemory();
            return -1;
        }
        self->room = room;
    }
    self->is_new[self->are++] = (char)is_new;
    return 0;
}

/* A new reference to what is known of a value; NULL, perhaps with an exception, where nothing is. */
static PyObject *find(Memo *self, PyObject *key)
{
    PyObject *known = PyDict_GetItemWithError(self->known, key);
    if (!known && !PyErr_Occurred())
        known = PyDict_GetItemWithError(self->before, key);
    return Py_XNewRef(known);
}

static PyObject *made(Memo *self, PyObject *key, const double *statistics, PyArrayObject *sketch,
    PyArrayObject *array, int sampled)
{
    npy_intp step = PyArray_SIZE(array) / SAMPLE | 1;
    PyObject *summary = self->summary->tp_alloc(self->summary, FIELDS);
    PyObject *numbers
        = PyBytes_FromStringAndSize((const char *)statistics, STATISTICS * sizeof *statistics);
    PyObject *taken = sampled ? every(array, step) : PyBytes_FromStringAndSize(NULL, 0);
    if (!summary || !numbers || !taken) {
        Py_XDECREF(summary);
        Py_XDECREF(numbers);
        Py_XDECREF(taken);
        return NULL;
    }
    PyTuple_SET_ITEM(summary, DIGEST, Py_NewRef(PyTuple_GET_ITEM(key, 0)));
    PyTuple_SET_ITEM(summary, DTYPE, Py_NewRef(PyTuple_GET_ITEM(key, 1)));
    PyTuple_SET_ITEM(summary, FINGERPRINT, numbers);
    PyTuple_SET_ITEM(summary, SKETCH, Py_NewRef(sketch ? (PyObject *)sketch : Py_None));
    PyTuple_SET_ITEM(summary, TAKEN, taken);
    return summary;
}

/* Digest and name of the type of an array; takes the digest. */
static PyObject *key_of(Memo *self, PyObject *digest, PyArrayObject *array)
{
    if (digest == Py_None) /* it is not for the C code to find */
        Py_SETREF(digest, PyObject_CallOneArg(self->digest, (PyObject *)array));
    PyObject *name = PyObject_CallOneArg(self->name, (PyObject *)PyArray_DESCR(array));
    PyObject *key = digest && name ? PyTuple_Pack(2, digest, name) : NULL;
    Py_XDECREF(digest);
    Py_XDECREF(name);
    return key;
}

/* The summary of an array. A sketch is given where one is wanted and the value is expected to be new. */
static PyObject *of(Memo *self, PyArrayObject *array, const Elements *elements, int sketched,
    PyArrayObject *sketch, int expected)
{
    int sampled = self->sampled && elements->bytes >= SAMPLED;
    double statistics[STATISTICS], *total = sketch ? PyArray_DATA(sketch) : NULL;
    int full = PyArray_SIZE(array) <= self->detailed;
    PyObject *digest = summarised(elements, full, total, expected ? statistics : NULL);
    PyObject *key = digest ? key_of(self, digest, array) : NULL;
    PyObject *summary = key ? find(self, key) : NULL;
    if (!key || PyErr_Occurred() || remember(self, !summary)) {
        Py_XDECREF(key);
        Py_XDECREF(summary);
        return NULL;
    }
    if (!summary) {
        if (!expected)
            Py_XDECREF(summarised(elements, full, NULL, statistics));
        summary = made(self, key, statistics, sketch, array, sampled);
    }
    if (summary
        && ((sketched && PyTuple_GET_ITEM(summary, SKETCH) == Py_None)
            || (sampled && !PyBytes_GET_SIZE(PyTuple_GET_ITEM(summary, TAKEN)))))
        Py_SETREF(summary,
            PyObject_CallFunction(self->complete, "OOii", summary, array, sketched, sampled));
    if (summary && PyDict_SetItem(self->known, key, summary))
        Py_CLEAR(summary);
    Py_DECREF(key);
    return summary;
}

/* As `elements_of`, by a copy of what is not in C order: to the same memory each time, as new memory
 * costs as much as copying. -1 with an exception for want of it. */
static int elements_in(Memo *self, PyObject *object, Elements *to)
{
    if (elements_of(object, to))
        return 1;
    if (!PyArray_Check(object))
        return 0;
    PyArrayObject *array = (PyArrayObject *)object;
    to->code = code_of(PyArray_DESCR(array));
    to->bytes = (size_t)PyArray_NBYTES(array);
    if (to->code == CODES || !PyArray_ISBEHAVED_RO(array) || to->bytes > LARGEST)
        return 0;
    if (to->bytes > self->held) {
        self->held = to->bytes > SCRATCH ? to->bytes : SCRATCH;
        PyMem_RawFree(self->scratch);
        self->scratch = PyMem_RawMalloc(self->held);
        if (!self->scratch) {
            self->held = 0;
            PyErr_NoMemory();
            return -1;
        }
    }
    packed(array, self->scratch);
    to->from = self->scratch;
    to->n = to->bytes / WIDTH[to->code];
    return 1;
}

static PyObject *summary_of(Memo *self, PyObject *object, int sketched)
{
    Elements elements;
    PyArrayObject *sketch = NULL;
    int readable = elements_in(self, object, &elements);
    if (readable < 1)
        return readable ? NULL
                        : PyObject_CallFunction(self->otherwise, "Oi", object, sketched);
    int expected = self->are >= self->were || self->was_new[self->are];
    if (expected && sketched && !(sketch = new_sketch(self)))
        return NULL;
    PyObject *summary
        = of(self, (PyArrayObject *)object, &elements, sketched, sketch, expected);
    Py_XDECREF(sketch);
    return summary;
}

static PyObject *memo_of(Memo *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "it takes 2 arguments, not %zd", count);
    return summary_of(self, args[0], args[1] == Py_True);
}

/* The summary of the event that has the same value, by its order, unless the value is small or seen to
 * have changed; NULL, perhaps with an exception, where there is none. */
static PyObject *still(Memo *self, PyArrayObject *array, PyObject *twin, int sketched)
{
    PyObject *known = PyDict_GetItemWithError(self->emitted, twin);
    if (!known || PyArray_NBYTES(array) < SAMPLED)
        return NULL;
    PyObject *was = PyTuple_GET_ITEM(known, TAKEN);
    PyObject *is = every(array, PyArray_SIZE(array) / SAMPLE | 1);
    int same = is ? PyObject_RichCompareBool(was, is, Py_EQ) : 0;
    Py_XDECREF(is);
    if (same != 1)
        return NULL;
    if (sketched && PyTuple_GET_ITEM(known, SKETCH) == Py_None)
        return PyObject_CallFunction(self->complete, "OOii", known, array, 1, 0);
    return Py_NewRef(known);
}

static PyObject *shape_of(PyArrayObject *array)
{
    PyObject *shape = PyTuple_New(PyArray_NDIM(array));
    for (int axis = 0; shape && axis < PyArray_NDIM(array); axis++) {
        PyObject *size = PyLong_FromSsize_t(PyArray_DIM(array, axis));
        if (size)
            PyTuple_SET_ITEM(shape, axis, size);
        else
            Py_CLEAR(shape);
    }
    return shape;
}

/* As `StepValues.add` of an array of which nothing but the summary is kept; False for another value. */
static PyObject *memo_add(Memo *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "it takes 6 arguments, not %zd", count);
    PyObject *order = args[1], *about = args[2], *kind = args[3], *twin = args[5];
    if (!PyArray_CheckExact(args[0]) || !self->events)
        Py_RETURN_FALSE;
    PyObject *key = PyTuple_Pack(3, PyTuple_GET_ITEM(about, 0), kind, PyTuple_GET_ITEM(about, 3));
    PyObject *kept = key ? PyDict_GetItemWithError(self->kept, key) : NULL;
    Py_XDECREF(key);
    if (!kept || PyTuple_GET_ITEM(kept, 0) != Py_True)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    Py_INCREF(kept);
    PyArrayObject *array = (PyArrayObject *)args[0];
    PyObject *buckets = PyTuple_GET_ITEM(kept, 2);
    int sketched = PyObject_IsTrue(buckets);
    PyObject *summary = twin == Py_None ? NULL : still(self, array, twin, sketched);
    if (!summary && !PyErr_Occurred())
        summary = summary_of(self, args[0], sketched);
    PyObject *shape = summary ? shape_of(array) : NULL;
    PyObject *event = shape
        ? PyTuple_Pack(8, order, about, kind, shape, Py_None, summary, buckets, args[4]) : NULL;
    int failed = !event || PyDict_SetItem(self->emitted, order, summary)
        || PyList_Append(self->events, event);
    Py_XDECREF(summary);
    Py_XDECREF(shape);
    Py_XDECREF(event);
    Py_DECREF(kept);
    return failed ? NULL : Py_NewRef(Py_True);
}

/* Where `add` finds what is kept of a value, and puts summaries and events. */
static PyObject *memo_attach(Memo *self, PyObject *args)
{
    PyObject *kept, *emitted, *events;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyDict_Type, &kept, &PyDict_Type, &emitted,
            &PyList_Type, &events))
        return NULL;
    Py_XSETREF(self->kept, Py_NewRef(kept));
    Py_XSETREF(self->emitted, Py_NewRef(emitted));
    Py_XSETREF(self->events, Py_NewRef(events));
    return Py_NewRef(Py_None);
}

static PyObject *memo_advance(Memo *self, PyObject *none)
{
    PyObject *known = PyDict_New();
    (void)none;
    if (!known)
        return NULL;
    Py_SETREF(self->before, self->known);
    self->known = known;
    char *was_new = self->was_new;
    self->was_new = self->is_new;
    self->is_new = was_new;
    self->were = self->are;
    self->are = 0;
    return Py_NewRef(Py_None);
}

static PyObject *memo_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *summary, *digest, *name, *complete, *otherwise;
    Py_ssize_t detailed;
    int sampled;
    (void)names;
    if (!PyArg_ParseTuple(args, "O!OOOOnp", &PyType_Type, &summary, &digest, &name, &complete,
            &otherwise, &detailed, &sampled))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)summary, &PyTuple_Type))
        return PyErr_Format(PyExc_TypeError, "a summary is a tuple");
    Memo *self = (Memo *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->summary = (PyTypeObject *)Py_NewRef(summary);
    self->digest = Py_NewRef(digest);
    self->name = Py_NewRef(name);
    self->complete = Py_NewRef(complete);
    self->otherwise = Py_NewRef(otherwise);
    self->detailed = detailed;
    self->sampled = sampled;
    self->known = PyDict_New();
    self->before = PyDict_New();
    if (!self->known || !self->before)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void memo_dealloc(Memo *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->summary);
    Py_XDECREF(self->digest);
    Py_XDECREF(self->name);
    Py_XDECREF(self->complete);
    Py_XDECREF(self->otherwise);
    Py_XDECREF(self->known);
    Py_XDECREF(self->before);
    Py_XDECREF(self->kept);
    Py_XDECREF(self->emitted);
    Py_XDECREF(self->events);
    Py_XDECREF(self->sketches);
    PyMem_RawFree(self->scratch);
    PyMem_Free(self->was_new);
    PyMem_Free(self->is_new);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"of", (PyCFunction)(void (*)(void))memo_of, METH_FASTCALL, NULL},
    {"add", (PyCFunction)(void (*)(void))memo_add, METH_FASTCALL, NULL},
    {"attach", (PyCFunction)memo_attach, METH_VARARGS, NULL},
    {"advance", (PyCFunction)memo_advance, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, memo_new},
    {Py_tp_dealloc, memo_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec memo_spec = {
    .name = "tracediff.kernels._native.Memo",
    .basicsize = sizeof(Memo),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
