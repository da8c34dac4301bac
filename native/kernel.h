/* What the parts of the kernel share: tensors where they lie, and what is taken from them. */

#ifndef KEELSCOPE_KERNEL_H
#define KEELSCOPE_KERNEL_H

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

#define LONG_ENOUGH (1 << 14) /* entries; below this giving the interpreter lock away costs more than the pass */

typedef struct {
    double count, mean, m2, max_abs, zeros, nonfinite;
} Moments;

typedef struct {
    size_t width;
    void (*moments)(const void *, size_t, Moments *);
    double (*squares)(const void *, size_t);
} Kind;

/* Where the entries of a tensor lie. */
typedef struct {
    const Kind *kind;
    const char *address;
    size_t count;
    int has_tokens; /* three dimensions */
    size_t shape[3]; /* of those */
} Place;

/* An attribute of torch.Tensor, and where the class has a plain getter for it, the way straight there. */
typedef struct {
    PyObject *name, *descriptor;
    descrgetfunc get;
} Attribute;

enum { MOMENTS, SQUARES, LATE_TOKENS, ROUTINES, GAIN_SUMS = ROUTINES, GAIN_COUNTS }; /* the last two: of gains only */
#define GAINS 6        /* columns of keelscope.jacobian.closed_forms.RowGains */
#define GAIN_BINS 386 /* of keelscope_probes.norms: eight per octave of the gain, a quarter in log2 of its square */
#define KINDS 4

/* What torch gives to recognise a tensor by, set once by prepare() and kept for the life of the process. */
typedef struct {
    PyObject *tensor, *parameter, *strided, *dtypes[KINDS];
    PyObject *is_contiguous, *is_neg, *numel, *data_ptr; /* methods of torch.Tensor, to be called with a tensor */
    PyObject *capsule;                                   /* kept alive */
    Attribute layout, is_cpu, dtype, shape;
} Torch;

/* What hooks ask torch with, set once by prepare_hooks(). */
typedef struct {
    PyObject *is_grad_enabled, *graph_task, *transforms, *tracing, *ordered; /* callables */
    PyObject *register_hooks, *first, *another, *begins, *accumulates, *cut, *distance; /* names */
    Attribute base, grad_fn, hooks, requires_grad, grad, version, is_leaf, is_meta, slot, accumulated;
} Known;

extern Torch torch;
extern Known known;
extern const Kind kinds[KINDS]; /* float32, float64, bfloat16, float16 */

/* An attribute of a tensor, new. */
PyObject *ask(PyObject *tensor, const Attribute *attribute);

/* Finds the way to an attribute, once the classes are known. */
void get_to(Attribute *attribute, const char *name);

/* The node behind a tensor, new; NULL for leaves. */
PyObject *node_of(PyObject *tensor);

/* As keelscope.leaves.hook_plainly: puts a hook on the gradient of a tensor without hooks that an operation made. The node
   behind it, new; NULL where none was put. */
PyObject *hook_plainly(PyObject *tensor, PyObject *hook);

/* Takes a new reference; whether it is True. */
int is_true(PyObject *owned);

/* Takes a new reference; (size_t)-1 where it is no size. */
size_t as_size(PyObject *owned);

/* Finds a tensor that lies in host memory as it reads: contiguous, not negated, really written. An exception may be
   set where it does not. */
int find(PyObject *tensor, Place *place);

/* Columns that a routine fills. */
size_t columns_of(int routine);

/* Fills the columns of one routine; the shape is that of [batch, position, feature], or NULL. Gives the interpreter
   lock away while it works on a large tensor. */
void fill(int routine, const Place *place, const size_t *shape, double *columns);

/* Of norms.c: gains [row, 6] summed over rows, and counted by the first column. */
void sum_gains(const double *gains, size_t rows, double *columns);
void count_gains(const double *gains, size_t rows, double *bins);
PyObject *norm_gains(PyObject *module, PyObject *args);
PyObject *norm_transport(PyObject *module, PyObject *args);

/* Of places.c. */
PyObject *prepare(PyObject *module, PyObject *const *arguments, Py_ssize_t given);

/* Of trees.c. */
PyObject *tree_of(PyObject *module, PyObject *modules);
PyObject *identities(PyObject *module, PyObject *objects);
PyObject *is_tree(PyObject *module, PyObject *args);
PyObject *are_identities(PyObject *module, PyObject *args);

/* Of hooks.c: seconds of a steady clock; new objects of a type of ours, and their end; calls a method of an object that
   may be gone; lets an error of ours pass, and no interrupt; adds a type to the module. */
double now(void);
PyObject *begin(PyTypeObject *type);
void end(PyObject *self);
void tell(PyObject *reference, PyObject *name, PyObject *first, PyObject *second, PyObject *third);
void forgive(void);
PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec);

/* Of passes.c: adds its types. */
int add_passes(PyObject *module);

/* Of residuals.c. The columns of one sub-layer from its six gradients; 0, perhaps with an exception, where only torch can
   read them. */
enum { WAYS = 6, GRADIENT_COLUMNS = 2 * WAYS + 1 };
int gradient_columns(PyObject *const *gradients, double *columns);
PyObject *residual_sums(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
PyObject *residual_weight(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
PyObject *residual_rows(PyObject *module, PyObject *args);
PyObject *plain_operands(PyObject *module, PyObject *args);
PyObject *residual_gradients(PyObject *module, PyObject *const *arguments, Py_ssize_t given);

/* Of calls.c. */
PyObject *hear_call(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
PyObject *hang_hooks(PyObject *module, PyObject *args);
PyObject *place_hooks(PyObject *module, PyObject *args);

/* Of ways.c: adds its types. */
int add_ways(PyObject *module);

/* Of imprint.c. */
PyObject *same_nodes(PyObject *module, PyObject *args);
PyObject *same_calls(PyObject *module, PyObject *args);
PyObject *other_tensors(PyObject *module, PyObject *args);
PyObject *same_numbers(PyObject *module, PyObject *args);
PyObject *kept_tensors(PyObject *module, PyObject *args);

/* Of hooks.c: adds its types to the module; says what its hooks ask torch with. */
int add_hooks(PyObject *module);
PyObject *prepare_hooks(PyObject *module, PyObject *const *arguments, Py_ssize_t given);

#endif
