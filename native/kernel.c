/* One pass over a tensor in host memory: what keelscope.statistics takes from it with torch operations, without them.

   places.c asks tensors where they lie: no torch headers, the stable ABI, so that one build serves every torch.
   Sums are double, centred on the first entry of each block and joined as Chan, Golub and LeVeque (1979) join them.
   A block is read twice while it lies in the first cache: an integer scan of the bit patterns for the largest
   magnitude, zeros and non-finite entries, then the moments; each loop alone is one that compilers vectorise. */

#include "kernel.h"

#define BLOCK 1024 /* counts of a block fit into 16 bits */
#define LANES 16   /* sums side by side, so that no addition waits for the one before */

static inline double of_f64(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double of_f32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static inline double of_bf16(uint16_t bits) { return of_f32((uint32_t)bits << 16); }

/* Finite entries only: the exponent is moved by a multiplication, which is exact, also for subnormal entries. */
static inline double of_finite_f16(uint16_t bits) {
    const double magnitude = of_f32((uint32_t)(bits & 0x7FFF) << 13) * 0x1p112;
    return bits & 0x8000 ? -magnitude : magnitude;
}

static inline double of_f16(uint16_t bits) {
    if ((bits & 0x7C00) != 0x7C00) return of_finite_f16(bits);
    if (bits & 0x03FF) return (double)NAN;
    return bits & 0x8000 ? -(double)INFINITY : (double)INFINITY;
}

/* BITS: type of the bit pattern; INT: signed type of the same width; INF: pattern of infinity;
   FINITE, ANY: pattern to double, for finite and for all entries; SCANNED: whether they differ. */
#define KERNELS(NAME, BITS, INT, INF, FINITE, ANY, SCANNED)                                                           \
    FOR_EACH_PROCESSOR                                                                                                \
    static void moments_##NAME(const void *address, size_t count, Moments *found) {                                   \
        const BITS *entries = address;                                                                                \
        INT peak = 0;                                                                                                 \
        double mean = 0, m2 = 0, zeros = 0, nonfinite = 0;                                                            \
        for (size_t start = 0; start < count; start += BLOCK) {                                                       \
            const BITS *block = entries + start;                                                                      \
            const int size = count - start < BLOCK ? (int)(count - start) : BLOCK;                                    \
            INT top = 0, none = 0, bad = 0;                                                                           \
            _Pragma("omp simd reduction(max : top) reduction(+ : none, bad)")                                         \
            for (int i = 0; i < size; i++) {                                                                          \
                const INT magnitude = (INT)(block[i] & (BITS)~((BITS)1 << (8 * sizeof(BITS) - 1)));                   \
                top = magnitude > top ? magnitude : top;                                                              \
                none = (INT)(none + (magnitude == 0));                                                                \
                bad = (INT)(bad + (magnitude >= (INT)(INF)));                                                         \
            }                                                                                                         \
            peak = top > peak ? top : peak;                                                                           \
            zeros += none;                                                                                            \
            nonfinite += bad;                                                                                         \
            if (nonfinite > 0) continue;                                                                              \
            const double shift = FINITE(block[0]), joint = (double)(start + (size_t)size);                            \
            double sums[LANES] = {0}, powers[LANES] = {0}, sum = 0, squares = 0;                                      \
            int i = 0;                                                                                                \
            for (; i + LANES <= size; i += LANES) {                                                                   \
                _Pragma("omp simd")                                                                                   \
                for (int lane = 0; lane < LANES; lane++) {                                                            \
                    const double centred = FINITE(block[i + lane]) - shift;                                           \
                    sums[lane] += centred;                                                                            \
                    powers[lane] += centred * centred;                                                                \
                }                                                                                                     \
            }                                                                                                         \
            for (; i < size; i++) {                                                                                   \
                const double centred = FINITE(block[i]) - shift;                                                      \
                sum += centred;                                                                                       \
                squares += centred * centred;                                                                         \
            }                                                                                                         \
            for (int lane = 0; lane < LANES; lane++) {                                                                \
                sum += sums[lane];                                                                                    \
                squares += powers[lane];                                                                              \
            }                                                                                                         \
            const double gap = shift + sum / size - mean, spread = squares - sum * (sum / size);                      \
            mean += gap * (size / joint);                                                                             \
            m2 += (spread > 0 ? spread : spread * 0) + gap * gap * (double)start * (size / joint);                    \
        }                                                                                                             \
        if (nonfinite > 0 || isnan(m2)) { /* or squares above what a double holds */                                  \
            mean = 0;                                                                                                 \
            for (size_t i = 0; i < count; i++) mean += ANY(entries[i]);                                               \
            mean /= (double)count;                                                                                    \
            m2 = nonfinite > 0 ? (double)NAN : (double)INFINITY;                                                      \
        }                                                                                                             \
        *found = (Moments){(double)count, mean, m2, ANY((BITS)peak), zeros, nonfinite};                               \
    }                                                                                                                 \
    FOR_EACH_PROCESSOR                                                                                                \
    static INT top_##NAME(const BITS *entries, size_t count) {                                                        \
        INT top = 0;                                                                                                  \
        _Pragma("omp simd reduction(max : top)")                                                                      \
        for (size_t i = 0; i < count; i++) {                                                                          \
            const INT magnitude = (INT)(entries[i] & (BITS)~((BITS)1 << (8 * sizeof(BITS) - 1)));                     \
            top = magnitude > top ? magnitude : top;                                                                  \
        }                                                                                                             \
        return top;                                                                                                   \
    }                                                                                                                 \
    FOR_EACH_PROCESSOR                                                                                                \
    static double squares_##NAME(const void *address, size_t count) {                                                 \
        const BITS *entries = address;                                                                                \
        double powers[LANES] = {0}, squares = 0;                                                                      \
        size_t i = 0;                                                                                                 \
        for (size_t end = 0; i + LANES <= count; i = end) {                                                           \
            end = (count - i < BLOCK ? count : i + BLOCK) / LANES * LANES;                                            \
            if (SCANNED && top_##NAME(entries + i, end - i) >= (INT)(INF)) break;                                     \
            for (; i < end; i += LANES) {                                                                             \
                _Pragma("omp simd")                                                                                   \
                for (int lane = 0; lane < LANES; lane++) {                                                            \
                    const double value = FINITE(entries[i + lane]);                                                   \
                    powers[lane] += value * value;                                                                    \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
        for (; i < count; i++) {                                                                                      \
            const double value = ANY(entries[i]);                                                                     \
            squares += value * value;                                                                                 \
        }                                                                                                             \
        for (int lane = 0; lane < LANES; lane++) squares += powers[lane];                                             \
        return squares;                                                                                               \
    }

KERNELS(f32, uint32_t, int32_t, 0x7F800000, of_f32, of_f32, 0)
KERNELS(f64, uint64_t, int64_t, 0x7FF0000000000000, of_f64, of_f64, 0)
KERNELS(bf16, uint16_t, int16_t, 0x7F80, of_bf16, of_bf16, 0)
KERNELS(f16, uint16_t, int16_t, 0x7C00, of_finite_f16, of_f16, 1)

const Kind kinds[KINDS] = {
    {4, moments_f32, squares_f32},
    {8, moments_f64, squares_f64},
    {2, moments_bf16, squares_bf16},
    {2, moments_f16, squares_f16},
};

/* Over the later half of positions: sum of log10 of norms, tokens with a norm above 0, tokens at 0. */
static void late_norms(const Place *place, const size_t *shape, double *found) {
    const size_t batch = shape[0], length = shape[1], width = shape[2], stride = width * place->kind->width;
    for (size_t sample = 0; sample < batch; sample++) {
        for (size_t token = length / 2; token < length; token++) {
            const double squares = place->kind->squares(place->address + (sample * length + token) * stride, width);
            if (squares == 0) {
                found[2] += 1;
            } else {
                found[0] += 0.5 * log10(squares);
                found[1] += 1;
            }
        }
    }
}

size_t columns_of(int routine) {
    static const size_t columns[ROUTINES] = {sizeof(Moments) / sizeof(double), 2, 3};
    return columns[routine];
}

void fill(int routine, const Place *place, const size_t *shape, double *columns) {
    PyThreadState *state = place->count >= LONG_ENOUGH ? PyEval_SaveThread() : NULL;
    if (routine == MOMENTS) {
        Moments found;
        place->kind->moments(place->address, place->count, &found);
        memcpy(columns, &found, sizeof found);
    } else if (routine == SQUARES) {
        columns[0] = (double)place->count;
        columns[1] = place->kind->squares(place->address, place->count);
    } else {
        columns[0] = columns[1] = columns[2] = 0;
        if (shape != NULL && place->count > 0) late_norms(place, shape, columns);
    }
    if (state != NULL) PyEval_RestoreThread(state);
}

static PyObject *packed(const double *columns, size_t count) {
    return PyBytes_FromStringAndSize((const char *)columns, (Py_ssize_t)(count * sizeof *columns));
}

/* Counts in the narrowest integers that hold them all: few rows, many bins, and one such block per norm. */
static PyObject *packed_counts(const double *counts, size_t most) {
    const size_t width = most <= UINT8_MAX ? 1 : most <= UINT16_MAX ? 2 : sizeof *counts;
    if (width > 2) return packed(counts, GAIN_BINS);
    union {
        uint8_t one[GAIN_BINS];
        uint16_t two[GAIN_BINS];
    } narrow;
    for (int i = 0; i < GAIN_BINS; i++) {
        if (width == 1) narrow.one[i] = (uint8_t)counts[i];
        else narrow.two[i] = (uint16_t)counts[i];
    }
    return PyBytes_FromStringAndSize((const char *)&narrow, (Py_ssize_t)(width * GAIN_BINS));
}

/* NULL without an exception where these are no gains. */
static PyObject *of_gains(const Place *place, long routine) {
    double columns[GAIN_BINS];
    const double *gains = (const double *)(const void *)place->address;
    if (place->kind != &kinds[1] || place->count % GAINS) return NULL;
    if (routine == GAIN_COUNTS) {
        count_gains(gains, place->count / GAINS, columns);
        return packed_counts(columns, place->count / GAINS);
    }
    sum_gains(gains, place->count / GAINS, columns);
    return packed(columns, 2 + GAINS);
}

/* Packed terms; NULL without an exception where there are no tokens, or gains. */
static PyObject *run(const Place *place, long routine) {
    double columns[sizeof(Moments) / sizeof(double)];
    if (routine < 0 || routine > GAIN_COUNTS) {
        PyErr_Format(PyExc_ValueError, "no routine has the number %ld", routine);
        return NULL;
    }
    if (routine >= ROUTINES) return of_gains(place, routine);
    if (routine == LATE_TOKENS && (!place->has_tokens || place->count == 0)) return NULL;
    fill((int)routine, place, place->shape, columns);
    return packed(columns, columns_of((int)routine));
}

/* measure(program, tensor): the program is a tuple key, routine, key, routine, ... */
static PyObject *measure(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    Place place;
    (void)module;
    if (given != 2 || !PyTuple_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "measure() takes a program, a tuple, and a tensor");
        return NULL;
    }
    if (!find(arguments[1], &place)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *found = PyDict_New();
    for (Py_ssize_t i = 0; found != NULL && i + 1 < PyTuple_Size(arguments[0]); i += 2) {
        PyObject *terms = run(&place, PyLong_AsLong(PyTuple_GetItem(arguments[0], i + 1)));
        const int failed = terms == NULL || PyDict_SetItem(found, PyTuple_GetItem(arguments[0], i), terms) < 0;
        Py_XDECREF(terms);
        if (failed) Py_CLEAR(found);
    }
    if (found == NULL && !PyErr_Occurred()) Py_RETURN_NONE;
    return found;
}

/* measure_all(routine, tensors): packed terms of each tensor of a list, None of those that only torch can read. */
static PyObject *measure_all(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    (void)module;
    if (given != 2 || !PyList_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "measure_all() takes the number of a routine and a list of tensors");
        return NULL;
    }
    const Py_ssize_t count = PyList_Size(arguments[1]);
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        Place place;
        PyObject *tensor = PyList_GetItem(arguments[1], i), *terms = NULL;
        if (find(tensor, &place)) terms = run(&place, PyLong_AsLong(arguments[0]));
        else PyErr_Clear();
        if (terms == NULL && PyErr_Occurred()) {
            Py_CLEAR(found);
            break;
        }
        if (terms == NULL) terms = Py_NewRef(Py_None);
        if (PyList_SetItem(found, i, terms) < 0) Py_CLEAR(found);
    }
    return found;
}

/* pack_all(routine, tensors): packed terms of all tensors of a list, zeros where only torch can read, and their places */
static PyObject *pack_all(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    (void)module;
    const long routine = given == 2 ? PyLong_AsLong(arguments[0]) : -1;
    if (routine < 0 || routine >= LATE_TOKENS || !PyList_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "pack_all() takes the number of a routine without shapes and a list of tensors");
        return NULL;
    }
    const Py_ssize_t count = PyList_Size(arguments[1]);
    const size_t width = columns_of((int)routine);
    double *columns = PyMem_Calloc((size_t)count * width + 1, sizeof *columns);
    PyObject *left = PyList_New(0), *found = NULL;
    int failed = columns == NULL || left == NULL;
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        Place place;
        if (find(PyList_GetItem(arguments[1], i), &place)) {
            fill((int)routine, &place, NULL, columns + (size_t)i * width);
            continue;
        }
        PyErr_Clear();
        PyObject *index = PyLong_FromSsize_t(i);
        failed = index == NULL || PyList_Append(left, index) < 0;
        Py_XDECREF(index);
    }
    if (!failed) found = Py_BuildValue("y#O", columns, (Py_ssize_t)((size_t)count * width * sizeof *columns), left);
    PyMem_Free(columns);
    Py_XDECREF(left);
    return found == NULL && !PyErr_Occurred() ? PyErr_NoMemory() : found;
}

static PyMethodDef METHODS[] = {
    {"prepare", (PyCFunction)(void (*)(void))prepare, METH_FASTCALL, "Say what tensors are recognised by."},
    {"prepare_hooks", (PyCFunction)(void (*)(void))prepare_hooks, METH_FASTCALL, "Say what hooks ask torch with."},
    {"measure", (PyCFunction)(void (*)(void))measure, METH_FASTCALL,
     "measure(program, tensor) -> key: packed terms; None where only torch can read the tensor"},
    {"measure_all", (PyCFunction)(void (*)(void))measure_all, METH_FASTCALL,
     "measure_all(routine, tensors) -> packed terms of each; None where only torch can read the tensor"},
    {"norm_gains", norm_gains, METH_VARARGS, "gains of the rows of a norm; None where only torch can read it"},
    {"norm_transport", norm_transport, METH_VARARGS, "squares of a gradient after and before a norm, by row; or None"},
    {"pack_all", (PyCFunction)(void (*)(void))pack_all, METH_FASTCALL,
     "pack_all(routine, tensors) -> packed terms of all, and the places of those that only torch can read"},
    {"tree_of", tree_of, METH_O, "addresses of what modules consist of; None where Python must look"},
    {"identities", identities, METH_O, "addresses of the entries of a list"},
    {"is_tree", is_tree, METH_VARARGS, "whether tree_of gives what it gave"},
    {"are_identities", are_identities, METH_VARARGS, "whether identities gives what it gave"},
    {"residual_sums", (PyCFunction)(void (*)(void))residual_sums, METH_FASTCALL, "packed sums over operands; or None"},
    {"residual_weight", (PyCFunction)(void (*)(void))residual_weight, METH_FASTCALL, "packed ratio of squares; or None"},
    {"residual_rows", residual_rows, METH_VARARGS, "either of many sub-layers, and the places of those only torch can read"},
    {"residual_gradients", (PyCFunction)(void (*)(void))residual_gradients, METH_FASTCALL,
     "packed squares and a product of gradients; or None"},
    {"hear_call", (PyCFunction)(void (*)(void))hear_call, METH_FASTCALL, "whether a usual call was noted"},
    {"hang_hooks", hang_hooks, METH_VARARGS, "hang_hooks(ears, number, on): put hooks on modules, or take them off"},
    {"place_hooks", place_hooks, METH_VARARGS, "place_hooks(placements, on): put hooks back, or take them off"},
    {"same_calls", same_calls, METH_VARARGS, "whether the same modules were called in the same way"},
    {"same_numbers", same_numbers, METH_VARARGS, "whether nodes keep numbers"},
    {"kept_tensors", kept_tensors, METH_VARARGS, "tensors into which nothing was written"},
    {"plain_operands", plain_operands, METH_VARARGS, "what meets in sums"},
    {"other_tensors", other_tensors, METH_VARARGS, "what nodes put out that is not of a shape and type"},
    {"same_nodes", same_nodes, METH_VARARGS, "nodes of a graph of a known shape; or None"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, add_hooks}, {Py_mod_exec, add_ways}, {0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernel", "One pass over tensors in host memory; see keelscope.kernel.", 0, METHODS, SLOTS,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&MODULE); }
