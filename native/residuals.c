/* What residual sub-layers show, as keelscope_probes.sublayers adds it up with torch operations: sums over the operands of
   a residual sum, and squares and one product of the gradients around it. */

#include "kernel.h"

enum { OPERANDS = 3, SUMS = 8, WAYS = 6, SHORTCUT = 2, BRANCH = 3 };

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

/* residual_sums(stream, shortcut, branch, flags) -> packed columns of residual_sum; None where only torch can read them */
PyObject *residual_sums(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    Place places[OPERANDS + 1];
    double sums[SUMS];
    (void)module;
    for (Py_ssize_t i = 0; i <= OPERANDS; i++) {
        if (i == 1 && arguments[1] == arguments[0]) places[1] = places[0];
        else if (given != OPERANDS + 1 || !find(arguments[i], &places[i])) return packed_or_none(NULL, 0);
        if (i < OPERANDS && (!is_wide(&places[i]) || !are_alike(&places[i], &places[0]))) return packed_or_none(NULL, 0);
    }
    const void *x = places[0].address, *a = places[1].address, *f = places[2].address;
    const size_t count = places[0].count;
    PyThreadState *state = count >= LONG_ENOUGH ? PyEval_SaveThread() : NULL;
    if (places[0].kind->width == sizeof(float)) sums_f32(x, a, f, count, sums);
    else sums_f64(x, a, f, count, sums);
    if (state != NULL) PyEval_RestoreThread(state);
    sums[6] = (double)count;
    sums[7] = places[3].kind->squares(places[3].address, places[3].count); /* each is 0 or 1 */
    return packed_or_none(sums, SUMS);
}

/* residual_weight(stream, shortcut) -> packed 1 and ratio of squares; None where only torch can read them */
PyObject *residual_weight(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    Place x, a;
    (void)module;
    if (given != 2 || !find(arguments[0], &x)) return packed_or_none(NULL, 0);
    if (arguments[1] == arguments[0]) a = x;
    else if (!find(arguments[1], &a)) return packed_or_none(NULL, 0);
    const double squares = x.kind->squares(x.address, x.count);
    const double above = a.address == x.address && are_alike(&a, &x) ? squares : a.kind->squares(a.address, a.count);
    const double columns[] = {1, above / squares};
    return packed_or_none(columns, 2);
}

/* Squares of one of several tensors, from an earlier one if it is the same. */
static double squares_of(const Place *places, int index, const double *known) {
    for (int i = 0; i < index; i++) {
        if (places[i].address == places[index].address && are_alike(&places[i], &places[index])) return known[i];
    }
    return places[index].kind->squares(places[index].address, places[index].count);
}

/* residual_gradients(leaving, total, shortcut, branch, entering, alone) -> packed squares, numbers of entries, product of
   shortcut and branch; None where only torch can read them */
PyObject *residual_gradients(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    Place places[WAYS];
    double columns[2 * WAYS + 1];
    (void)module;
    for (Py_ssize_t i = 0; i < WAYS; i++) {
        Py_ssize_t same = 0;
        while (same < i && arguments[same] != arguments[i]) same++;
        if (same < i) places[i] = places[same];
        else if (given != WAYS || !find(arguments[i], &places[i])) return packed_or_none(NULL, 0);
    }
    const Place *shortcut = &places[SHORTCUT], *branch = &places[BRANCH];
    if (!is_wide(shortcut) || !are_alike(shortcut, branch)) return packed_or_none(NULL, 0);
    PyThreadState *state = shortcut->count >= LONG_ENOUGH ? PyEval_SaveThread() : NULL;
    for (int i = 0; i < WAYS; i++) {
        columns[i] = squares_of(places, i, columns);
        columns[WAYS + i] = (double)places[i].count;
    }
    columns[2 * WAYS] = product(shortcut, branch);
    if (state != NULL) PyEval_RestoreThread(state);
    return packed_or_none(columns, 2 * WAYS + 1);
}
