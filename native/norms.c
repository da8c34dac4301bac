/* What norms over the last dimensions do to a gradient, row by row: the sums and closed forms of
   keelscope.jacobian.closed_forms, where the words are explained, without a torch operation. */

#include "kernel.h"

#define TINY 1e-300

enum { ROOT, SUM, MAX };

typedef struct {
    int is_centred, floor, of_length;
    double eps;
    const double *gamma; /* [width] */
    size_t width;
} Form;

/* Part of the loops over rows below, which are compiled for each processor. */
#define WITHIN static inline __attribute__((always_inline))
#define LANES 16 /* sums side by side, so that no addition waits for the one before */

static inline double one(const Place *place, size_t i) {
    if (place->kind->width == sizeof(double)) return ((const double *)place->address)[i];
    return (double)((const float *)place->address)[i];
}

WITHIN void widen(const Place *place, size_t start, size_t count, double *restrict row) {
    if (place->kind->width == sizeof(double)) {
        memcpy(row, (const double *)place->address + start, count * sizeof *row);
        return;
    }
    const float *entries = (const float *)place->address + start;
    for (size_t i = 0; i < count; i++) row[i] = (double)entries[i];
}

/* Sum of a function of i over a row. */
#define SUM_OVER(COUNT, TERM)                                        \
    double sums[LANES] = {0}, sum = 0;                               \
    size_t i = 0;                                                    \
    for (; i + LANES <= (COUNT); i += LANES) {                       \
        _Pragma("omp simd")                                          \
        for (size_t lane = 0; lane < LANES; lane++) {                \
            const size_t at = i + lane;                              \
            sums[lane] += TERM;                                      \
        }                                                            \
    }                                                                \
    for (size_t at = i; at < (COUNT); at++) sum += TERM;             \
    for (size_t lane = 0; lane < LANES; lane++) sum += sums[lane];   \
    return sum

WITHIN double sum_of(const double *a, size_t count) { SUM_OVER(count, a[at]); }

WITHIN double product_of(const double *a, const double *b, size_t count) { SUM_OVER(count, a[at] * b[at]); }

/* Sum of a[i]^2 b[i]^2. */
WITHIN double squares_of(const double *a, const double *b, size_t count) {
    SUM_OVER(count, a[at] * a[at] * b[at] * b[at]);
}

/* Takes the mean away, if the norm does; returns it. */
WITHIN double centre(const Form *form, double *row) {
    if (!form->is_centred) return 0;
    const double mean = sum_of(row, form->width) / (double)form->width;
    for (size_t i = 0; i < form->width; i++) row[i] -= mean;
    return mean;
}

/* As keelscope.jacobian.norms.row_scale. */
WITHIN void scale_of(const Form *form, double mean_square, double *scale, double *share) {
    const double m = form->of_length ? mean_square * (double)form->width : mean_square, root = sqrt(m);
    if (form->floor == ROOT) {
        const double inverse = 1 / (m + form->eps);
        *scale = sqrt(inverse);
        *share = form->eps * inverse;
    } else if (form->floor == SUM) {
        *scale = 1 / (root + form->eps);
        *share = form->eps / (root + form->eps);
    } else {
        *scale = 1 / (root < form->eps ? form->eps : root);
        *share = root < form->eps;
    }
}

WITHIN double above_zero(double value) { return value < 0 ? 0 : value; }

WITHIN void gains_of(const Form *form, double *row, double power, double peak, double *gains) {
    const double size = (double)form->width, lost = form->is_centred ? 2 : 1;
    const double mean = centre(form, row), total = product_of(row, row, form->width);
    double scale, share, inside, top;
    scale_of(form, total / size, &scale, &share);
    if (size > lost) {
        const double along = squares_of(row, form->gamma, form->width) / (total + TINY);
        inside = above_zero(power * (size - lost + 1) - along * (1 - share * share));
        top = scale * sqrt(peak);
    } else {
        inside = share * share * power * (size == lost);
        top = share * scale * sqrt(power) * (size == lost);
    }
    gains[0] = inside * (scale * scale / size);
    gains[1] = top;
    gains[2] = share;
    gains[3] = total / size + mean * mean;
    gains[4] = power;
    gains[5] = scale;
}

/* |J'g|^2 and |g|^2 of one row; the gradient is overwritten. */
WITHIN void transport(const Form *form, double *row, double *gradient, double *after, double *before) {
    const double size = (double)form->width, lost = form->is_centred ? 2 : 1;
    double scale, share;
    *before = product_of(gradient, gradient, form->width);
    for (size_t i = 0; i < form->width; i++) gradient[i] *= form->gamma[i];
    double power = product_of(gradient, gradient, form->width);
    if (form->is_centred) {
        const double shift = sum_of(gradient, form->width);
        power -= shift * shift / size;
    }
    centre(form, row);
    const double total = product_of(row, row, form->width), inner = product_of(row, gradient, form->width);
    scale_of(form, total / size, &scale, &share);
    if (size > lost) {
        const double left = power - inner * inner / (total + TINY) * (1 - share * share);
        *after = above_zero(left) * (scale * scale);
    } else {
        *after = power * (share * scale) * (share * scale) * (size == lost);
    }
}

FOR_EACH_PROCESSOR
static void gains_of_all(const Form *form, const Place *x, double *row, double power, double peak, double *gains) {
    for (size_t i = 0; i < x->count / form->width; i++) {
        widen(x, i * form->width, form->width, row);
        gains_of(form, row, power, peak, gains + GAINS * i);
    }
}

FOR_EACH_PROCESSOR
static void transport_all(const Form *form, const Place *x, const Place *g, double *row, double *squares) {
    const size_t rows = x->count / form->width;
    double *through = row + form->width;
    for (size_t i = 0; i < rows; i++) {
        widen(x, i * form->width, form->width, row);
        widen(g, i * form->width, form->width, through);
        transport(form, row, through, squares + i, squares + rows + i);
    }
}

/* Reads rows and gains; 0 where they are not of these two types, or lie elsewhere. */
static int read_form(PyObject *args, PyObject **input, PyObject **gradient, Form *form, double **memory, Place *x) {
    PyObject *gamma;
    Py_ssize_t width;
    Place gains;
    if (!PyArg_ParseTuple(args, "OOOndiii", input, gradient, &gamma, &width, &form->eps, &form->is_centred, &form->floor,
                          &form->of_length))
        return 0;
    if (width < 1 || !find(*input, x) || x->kind->width < sizeof(float) || x->count % (size_t)width) return 0;
    form->width = (size_t)width;
    double *gamma_of = *memory = PyMem_Malloc(3 * form->width * sizeof **memory);
    if (gamma_of == NULL) return 0;
    form->gamma = gamma_of;
    if (PyFloat_Check(gamma)) {
        for (size_t i = 0; i < form->width; i++) gamma_of[i] = PyFloat_AsDouble(gamma);
        return 1;
    }
    if (!find(gamma, &gains) || gains.kind->width < sizeof(float) || (gains.count != 1 && gains.count != form->width))
        return 0;
    for (size_t i = 0; i < form->width; i++) gamma_of[i] = one(&gains, gains.count == 1 ? 0 : i);
    return 1;
}

static PyObject *ended(double *memory, PyObject *found) {
    PyMem_Free(memory);
    if (found != NULL) return found;
    if (PyErr_Occurred()) PyErr_Clear();
    Py_RETURN_NONE;
}

/* norm_gains(x, None, gamma, width, eps, centred, floor, of_length) -> the gains of each row, doubles [row, 6] */
PyObject *norm_gains(PyObject *module, PyObject *args) {
    PyObject *input, *none;
    Form form;
    double *memory = NULL, power = 0, peak = 0;
    Place x;
    (void)module;
    if (!read_form(args, &input, &none, &form, &memory, &x)) return ended(memory, NULL);
    const size_t rows = x.count / form.width;
    double *row = memory + form.width;
    power = product_of(form.gamma, form.gamma, form.width) / (double)form.width;
    for (size_t i = 0; i < form.width; i++) {
        const double square = form.gamma[i] * form.gamma[i];
        if (!(square <= peak)) peak = square;
        if (isnan(peak)) break;
    }
    PyObject *found = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(rows * GAINS * sizeof(double)));
    if (found == NULL) return ended(memory, NULL);
    double *gains = (double *)(void *)PyByteArray_AsString(found);
    PyThreadState *state = x.count >= LONG_ENOUGH ? PyEval_SaveThread() : NULL;
    gains_of_all(&form, &x, row, power, peak, gains);
    if (state != NULL) PyEval_RestoreThread(state);
    return ended(memory, found);
}

/* norm_transport(x, gradient, gamma, width, eps, centred, floor, of_length) -> |J'g|^2 of each row, then |g|^2, doubles [2, row] */
PyObject *norm_transport(PyObject *module, PyObject *args) {
    PyObject *input, *gradient;
    Form form;
    double *memory = NULL;
    Place x, g;
    (void)module;
    if (!read_form(args, &input, &gradient, &form, &memory, &x)) return ended(memory, NULL);
    if (!find(gradient, &g) || g.kind->width < sizeof(float) || g.count != x.count) return ended(memory, NULL);
    const size_t rows = x.count / form.width;
    PyObject *found = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(2 * rows * sizeof(double)));
    if (found == NULL) return ended(memory, NULL);
    double *squares = (double *)(void *)PyByteArray_AsString(found);
    double *row = memory + form.width;
    PyThreadState *state = x.count >= LONG_ENOUGH ? PyEval_SaveThread() : NULL;
    transport_all(&form, &x, &g, row, squares);
    if (state != NULL) PyEval_RestoreThread(state);
    return ended(memory, found);
}

void sum_gains(const double *gains, size_t rows, double *columns) {
    memset(columns, 0, (2 + GAINS) * sizeof *columns);
    columns[0] = (double)rows;
    for (size_t i = 0; i < rows; i++) {
        const double *row = gains + GAINS * i;
        if (i == 0 || !(row[1] <= columns[1])) columns[1] = isnan(columns[1]) ? columns[1] : row[1];
        for (int j = 0; j < GAINS; j++) columns[2 + j] += row[j];
    }
}

void count_gains(const double *gains, size_t rows, double *bins) {
    static double edges[GAIN_BINS - 1];
    if (edges[0] == 0) {
        for (int i = GAIN_BINS - 2; i >= 0; i--) edges[i] = exp2(0.25 * (i - (GAIN_BINS - 2) / 2));
    }
    memset(bins, 0, GAIN_BINS * sizeof *bins);
    for (size_t i = 0; i < rows; i++) {
        int low = 0, high = GAIN_BINS - 1; /* the first edge that is not below; all are below what is no number */
        while (low < high) {
            const int middle = (low + high) / 2;
            if (edges[middle] >= gains[GAINS * i]) high = middle;
            else low = middle + 1;
        }
        bins[low] += 1;
    }
}
