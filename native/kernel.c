/* One pass over a tensor in host memory: what keelscope.statistics takes from it with torch operations, without them.

   Knows addresses and counts only: no torch headers, the stable ABI of Python, so that one build serves every torch.
   Sums are double, centred on the first entry of each block and joined as Chan, Golub and LeVeque (1979) join them.
   A block is read twice while it lies in the first cache: an integer scan of the bit patterns for the largest
   magnitude, zeros and non-finite entries, then the moments; each loop alone is one that compilers vectorise. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Compiled once per instruction set, chosen when the module is loaded: wheels are moved between machines. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#endif
#ifndef FOR_EACH_PROCESSOR
#define FOR_EACH_PROCESSOR
#endif

#define BLOCK 1024            /* counts of a block fit into 16 bits */
#define LONG_ENOUGH (1 << 14) /* entries; below this giving the interpreter lock away costs more than the pass */

typedef struct {
    double count, mean, m2, max_abs, zeros, nonfinite;
} Moments;

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
   FINITE, ANY: pattern to double, for finite and for all entries. */
#define KERNELS(NAME, BITS, INT, INF, FINITE, ANY)                                                                    \
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
            double sum = 0, squares = 0;                                                                              \
            _Pragma("omp simd reduction(+ : sum, squares)")                                                           \
            for (int i = 0; i < size; i++) {                                                                          \
                const double centred = FINITE(block[i]) - shift;                                                      \
                sum += centred;                                                                                       \
                squares += centred * centred;                                                                         \
            }                                                                                                         \
            const double gap = shift + sum / size - mean, spread = squares - sum * (sum / size);                      \
            mean += gap * (size / joint);                                                                             \
            m2 += (spread > 0 ? spread : spread * 0) + gap * gap * (double)start * (size / joint);                    \
        }                                                                                                             \
        if (nonfinite > 0) {                                                                                          \
            mean = 0;                                                                                                 \
            for (size_t i = 0; i < count; i++) mean += ANY(entries[i]);                                               \
            mean /= (double)count;                                                                                    \
            m2 = (double)NAN;                                                                                         \
        }                                                                                                             \
        *found = (Moments){(double)count, mean, m2, ANY((BITS)peak), zeros, nonfinite};                               \
    }                                                                                                                 \
    FOR_EACH_PROCESSOR                                                                                                \
    static double squares_##NAME(const void *address, size_t count) {                                                 \
        const BITS *entries = address;                                                                                \
        double squares = 0;                                                                                           \
        _Pragma("omp simd reduction(+ : squares)")                                                                    \
        for (size_t i = 0; i < count; i++) {                                                                          \
            const double value = ANY(entries[i]);                                                                     \
            squares += value * value;                                                                                 \
        }                                                                                                             \
        return squares;                                                                                               \
    }

KERNELS(f32, uint32_t, int32_t, 0x7F800000, of_f32, of_f32)
KERNELS(f64, uint64_t, int64_t, 0x7FF0000000000000, of_f64, of_f64)
KERNELS(bf16, uint16_t, int16_t, 0x7F80, of_bf16, of_bf16)
KERNELS(f16, uint16_t, int16_t, 0x7C00, of_finite_f16, of_f16)

typedef struct {
    size_t width;
    void (*moments)(const void *, size_t, Moments *);
    double (*squares)(const void *, size_t);
} Kind;

static const Kind KINDS[] = {
    {4, moments_f32, squares_f32},
    {8, moments_f64, squares_f64},
    {2, moments_bf16, squares_bf16},
    {2, moments_f16, squares_f16},
};

/* Reads [address, kind, number, ...] as numbers; -1 with an exception set if they are none. */
static int read_numbers(PyObject *const *arguments, Py_ssize_t given, Py_ssize_t wanted, size_t *numbers) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
        return -1;
    }
    for (Py_ssize_t i = 0; i < wanted; i++) {
        numbers[i] = PyLong_AsSize_t(arguments[i]);
        if (numbers[i] == (size_t)-1 && PyErr_Occurred()) return -1;
    }
    if (numbers[1] >= sizeof KINDS / sizeof *KINDS) {
        PyErr_Format(PyExc_ValueError, "no kind of entry has the number %zu", numbers[1]);
        return -1;
    }
    return 0;
}

static PyObject *packed(const double *values, size_t count) {
    return PyBytes_FromStringAndSize((const char *)values, (Py_ssize_t)(count * sizeof *values));
}

static PyObject *moments(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    size_t n[3];
    Moments found;
    (void)module;
    if (read_numbers(arguments, given, 3, n) < 0) return NULL;
    PyThreadState *state = n[2] >= LONG_ENOUGH ? PyEval_SaveThread() : NULL;
    KINDS[n[1]].moments((const void *)n[0], n[2], &found);
    if (state != NULL) PyEval_RestoreThread(state);
    return packed(&found.count, 6);
}

static PyObject *squares(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    (void)module;
    const Py_ssize_t tensors = given / 3;
    double *found = PyMem_Calloc((size_t)tensors * 2 + 1, sizeof *found);
    if (found == NULL) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < tensors; i++) {
        size_t n[3];
        if (read_numbers(arguments + 3 * i, given - 3 * i < 3 ? given - 3 * i : 3, 3, n) < 0) {
            PyMem_Free(found);
            return NULL;
        }
        PyThreadState *state = n[2] >= LONG_ENOUGH ? PyEval_SaveThread() : NULL;
        found[2 * i] = (double)n[2];
        found[2 * i + 1] = KINDS[n[1]].squares((const void *)n[0], n[2]);
        if (state != NULL) PyEval_RestoreThread(state);
    }
    PyObject *result = packed(found, (size_t)tensors * 2);
    PyMem_Free(found);
    return result;
}

static void late_norms(const Kind *kind, const char *address, const size_t *shape, double *found) {
    const size_t batch = shape[0], length = shape[1], width = shape[2];
    for (size_t sample = 0; sample < batch; sample++) {
        for (size_t token = length / 2; token < length; token++) {
            const double squares = kind->squares(address + (sample * length + token) * width * kind->width, width);
            if (squares == 0) {
                found[2] += 1;
            } else {
                found[0] += 0.5 * log10(squares);
                found[1] += 1;
            }
        }
    }
}

static PyObject *late_tokens(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    size_t n[5];
    double found[3] = {0, 0, 0};
    (void)module;
    if (read_numbers(arguments, given, 5, n) < 0) return NULL;
    PyThreadState *state = n[2] * n[3] * n[4] >= LONG_ENOUGH ? PyEval_SaveThread() : NULL;
    late_norms(&KINDS[n[1]], (const char *)n[0], n + 2, found);
    if (state != NULL) PyEval_RestoreThread(state);
    return packed(found, 3);
}

static PyMethodDef METHODS[] = {
    {"moments", (PyCFunction)(void (*)(void))moments, METH_FASTCALL,
     "moments(address, kind, count) -> count, mean, m2, max_abs, zeros, nonfinite as packed doubles"},
    {"squares", (PyCFunction)(void (*)(void))squares, METH_FASTCALL,
     "squares(address, kind, count, ...) -> count, sum of squares of each tensor as packed doubles"},
    {"late_tokens", (PyCFunction)(void (*)(void))late_tokens, METH_FASTCALL,
     "late_tokens(address, kind, batch, length, width) -> sum of log10 norms, tokens above 0, at 0 as packed doubles"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernel", "One pass over tensors in host memory; see keelscope.kernel.", 0, METHODS, NULL,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&MODULE); }
