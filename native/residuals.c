/* What residual sub-layers show, as keelscope_probes.sublayers adds it up with torch operations: sums over the operands of
   a residual sum, and squares and one product of the gradients around it. */

#include "kernel.h"

enum { OPERANDS = 3, SUMS = 8, SHORTCUT = 2, BRANCH = 3 };

/* TYPE: of the entries; the sum is rounded as torch rounds it. */
#define OVER_OPERANDS(NAME, TYPE)                                                                                     \
    FOR_EACH_PROCESSOR                                                                                                \
    static void sums_##NAME(const TYPE *x, const TYPE *a, const TYPE *f, size_t count, double *sums) {                \
        double xx = 0, aa = 0, ff = 0, fx = 0, absorbed = 0, moving = 0;                                              \
        _Pragma("omp simd reduction(+ : xx, aa, ff, fx, absorbed, moving)")                                           \
        for (size_t i = 0; i < count; i++) {                                                                          \
            const double stream = (double)x[i], shortcut = (double)a[i], branch = (double)f[i];                       \
            const TYPE total = a[i] + f[i];                                                                           \
            xx += stream * stream;                                                                                    \
            aa += shortcut * shortcut;                                                                                \
            ff += branch * branch;                                                                                    \
            fx += branch * stream;                                                                                    \
            absorbed += (double)((total == a[i]) & (f[i] != 0));                                                      \
            moving += (double)(f[i] != 0);                                                                            \
        }                                                                                                             \
        sums[0] = xx, sums[1] = aa, sums[2] = ff, sums[3] = fx, sums[4] = absorbed, sums[5] = moving;                 \
    }                                                                                                                 \
    FOR_EACH_PROCESSOR                                                                                                \
    static double product_##NAME(const TYPE *a, const TYPE *b, size_t count) {                                        \
        double sum = 0;                                                                                               \
        _Pragma("omp simd reduction(+ : sum)")                                                                        \
        for (size_t i = 0; i < count; i++) sum += (double)a[i] * (double)b[i];                                        \
        return sum;                                                                                                   \
    }

OVER_OPERANDS(f32, float)
OVER_OPERANDS(f64, double)

static int is_wide(const Place *place) { return place->kind->width >= sizeof(float); }

static int are_alike(const Place *a, const Place *b) { return a->kind == b->kind && a->count == b->count; }

static double product(const Place *a, const Place *b) {
    const void *left = a->address, *right = b->address;
    return a->kind->width == sizeof(float) ? product_f32(left, right, a->count) : product_f64(left, right, a->count);
}

static PyObject *packed_or_none(const double *columns, Py_ssize_t count) {
    if (columns != NULL) return PyBytes_FromStringAndSize((const char *)columns, count * (Py_ssize_t)sizeof *columns);
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* Columns of residual_sum from stream, shortcut, branch; flags are None where they are all 0. */
static int sum_columns(PyObject *const *tensors, PyObject *flags, double *sums) {
    Place places[OPERANDS + 1];
    for (int i = 0; i < OPERANDS; i++) {
        if (i == 1 && tensors[1] == tensors[0]) places[1] = places[0];
        else if (!find(tensors[i], &places[i])) return 0;
        if (!is_wide(&places[i]) || !are_alike(&places[i], &places[0])) return 0;
    }
    if (flags != Py_None && !find(flags, &places[OPERANDS])) return 0;
    const void *x = places[0].address, *a = places[1].address, *f = places[2].address;
    const size_t count = places[0].count;
    PyThreadState *state = count >= LONG_ENOUGH ? PyEval_SaveThread() : NULL;
    if (places[0].kind->width == sizeof(float)) sums_f32(x, a, f, count, sums);
    else sums_f64(x, a, f, count, sums);
    if (state != NULL) PyEval_RestoreThread(state);
    sums[6] = (double)count;
    sums[7] = flags == Py_None ? 0 : places[3].kind->squares(places[3].address, places[3].count); /* each is 0 or 1 */
    return 1;
}

/* residual_sums(stream, shortcut, branch, flags) -> packed columns of residual_sum; None where only torch can read them */
PyObject *residual_sums(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    double sums[SUMS];
    (void)module;
    const int found = given == OPERANDS + 1 && sum_columns(arguments, arguments[OPERANDS], sums);
    return packed_or_none(found ? sums : NULL, SUMS);
}

/* 1 and the ratio of squares, from stream and shortcut. */
static int weight_columns(PyObject *const *tensors, PyObject *none, double *columns) {
    Place x, a;
    (void)none;
    if (!find(tensors[0], &x)) return 0;
    if (tensors[1] == tensors[0]) a = x;
    else if (!find(tensors[1], &a)) return 0;
    const double squares = x.kind->squares(x.address, x.count);
    const double above = a.address == x.address && are_alike(&a, &x) ? squares : a.kind->squares(a.address, a.count);
    columns[0] = 1;
    columns[1] = above / squares;
    return 1;
}

/* residual_weight(stream, shortcut) -> packed 1 and ratio of squares; None where only torch can read them */
PyObject *residual_weight(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    double columns[2];
    (void)module;
    return packed_or_none(given == 2 && weight_columns(arguments, NULL, columns) ? columns : NULL, 2);
}

/* residual_rows(flags of each, operands of each): packed columns of residual_sum of many sub-layers, zeros where only torch
   can read, and the places of those; without flags the columns of residual_weight. */
PyObject *residual_rows(PyObject *module, PyObject *args) {
    PyObject *flags, *several, *operands[OPERANDS], *left = PyList_New(0), *found = NULL;
    (void)module;
    if (left == NULL || !PyArg_ParseTuple(args, "OO!", &flags, &PyList_Type, &several)) return NULL;
    const int is_weight = flags == Py_None;
    const Py_ssize_t count = PyList_Size(several), width = is_weight ? 2 : SUMS;
    double *rows = PyMem_Calloc((size_t)(count * width) + 1, sizeof *rows);
    int failed = rows == NULL || (!is_weight && (!PyList_Check(flags) || PyList_Size(flags) != count));
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        double *row = rows + i * width;
        PyObject *flag = is_weight ? Py_None : PyList_GetItem(flags, i), *index = NULL;
        failed = !PyArg_ParseTuple(PyList_GetItem(several, i), "OOO", &operands[0], &operands[1], &operands[2]);
        if (failed || (is_weight ? weight_columns : sum_columns)(operands, flag, row)) continue;
        PyErr_Clear();
        index = PyLong_FromSsize_t(i);
        failed = index == NULL || PyList_Append(left, index) < 0;
        Py_XDECREF(index);
    }
    if (!failed) found = Py_BuildValue("y#O", rows, count * width * (Py_ssize_t)sizeof *rows, left);
    else if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "residual_rows() takes as many flags as operands");
    PyMem_Free(rows);
    Py_XDECREF(left);
    return found;
}

static int has_dtype(PyObject *tensor, PyObject *dtype) {
    PyObject *found = ask(tensor, &torch.dtype);
    Py_XDECREF(found);
    return found == dtype;
}

static int have_one_shape(PyObject *first, PyObject *second) {
    PyObject *one = ask(first, &torch.shape), *other = ask(second, &torch.shape);
    const int is_same = one != NULL && other != NULL && PyObject_RichCompareBool(one, other, Py_EQ) == 1;
    Py_XDECREF(one);
    Py_XDECREF(other);
    return is_same;
}

/* Stream, stream and branch, new, by their places in a list, if both are of one type and shape; else None. */
static PyObject *meeting(PyObject *type, PyObject *tensors, PyObject *wanted) {
    PyObject *stream = NULL, *branch = NULL, *dtype, *found = NULL;
    if (PyTuple_Check(wanted) && PyTuple_Size(wanted) == 3) {
        stream = PyList_GetItem(tensors, PyLong_AsSsize_t(PyTuple_GetItem(wanted, 0)));
        branch = PyList_GetItem(tensors, PyLong_AsSsize_t(PyTuple_GetItem(wanted, 1)));
        dtype = PyTuple_GetItem(wanted, 2);
    }
    if (stream != NULL && branch != NULL && has_dtype(stream, dtype) && has_dtype(branch, dtype) &&
        have_one_shape(stream, branch))
        found = PyObject_CallFunctionObjArgs(type, stream, stream, branch, NULL);
    if (found != NULL) return found;
    forgive();
    return Py_NewRef(Py_None);
}

/* plain_operands(type, tensors, wanted): wanted as places of stream and branch and the type of both, or None -> objects made of
   stream, shortcut and branch, None of those that are left to Python */
PyObject *plain_operands(PyObject *module, PyObject *args) {
    PyObject *type, *tensors, *wanted, *found;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!O!", &type, &PyList_Type, &tensors, &PyList_Type, &wanted)) return NULL;
    if ((found = PyList_New(PyList_Size(wanted))) == NULL) return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(wanted); i++)
        PyList_SetItem(found, i, meeting(type, tensors, PyList_GetItem(wanted, i)));
    if (!PyErr_Occurred()) return found;
    Py_DECREF(found);
    return NULL;
}

/* Squares of one of several tensors, from an earlier one if it is the same. */
static double squares_of(const Place *places, int index, const double *known) {
    for (int i = 0; i < index; i++) {
        if (places[i].address == places[index].address && are_alike(&places[i], &places[index])) return known[i];
    }
    return places[index].kind->squares(places[index].address, places[index].count);
}

int gradient_columns(PyObject *const *gradients, double *columns) {
    Place places[WAYS];
    for (int i = 0; i < WAYS; i++) {
        int same = 0;
        while (same < i && gradients[same] != gradients[i]) same++;
        if (same < i) places[i] = places[same];
        else if (!find(gradients[i], &places[i])) return 0;
    }
    const Place *shortcut = &places[SHORTCUT], *branch = &places[BRANCH];
    if (!is_wide(shortcut) || !are_alike(shortcut, branch)) return 0;
    PyThreadState *state = shortcut->count >= LONG_ENOUGH ? PyEval_SaveThread() : NULL;
    for (int i = 0; i < WAYS; i++) {
        columns[i] = squares_of(places, i, columns);
        columns[WAYS + i] = (double)places[i].count;
    }
    columns[2 * WAYS] = product(shortcut, branch);
    if (state != NULL) PyEval_RestoreThread(state);
    return 1;
}

/* residual_gradients(leaving, total, shortcut, branch, entering, alone) -> packed squares, numbers of entries, product of
   shortcut and branch; None where only torch can read them */
PyObject *residual_gradients(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    double columns[GRADIENT_COLUMNS];
    (void)module;
    const int found = given == WAYS && gradient_columns(arguments, columns);
    return packed_or_none(found ? columns : NULL, GRADIENT_COLUMNS);
}
