/* Hooks that torch calls at every module, output and parameter of a recorded step: what keelscope.hooks and
   keelscope.parameters do in Python, for the calls in which nothing is out of the ordinary.

   A Page is one step: terms of the first call of each module, and of the first gradient of its output. Whatever it does
   not take is left to Python, which looks at all the rest: look() says so, and gradients go to Page.owner. */

#include "kernel.h"

#include <structmember.h>
#include <time.h>

#define HALF 11 /* columns of the output, then of the gradient */
static const size_t OFFSETS[ROUTINES] = {0, 6, 8};

enum { CALLED = 1, ARRIVED = 2, ELSEWHERE = 4 }; /* what has been seen of a site; gradients that Python has taken */
enum { FOR_GRADIENT = 3, LEFT_ALONE = 128 }; /* of a duty: one bit per routine, those of gradients moved by 3 */

typedef struct {
    PyObject_HEAD
    PyObject *modules; /* weak references */
    PyObject *owner;   /* weak reference to the object with _first_arrives() and _another_arrives(site, gradient, shape) */
    PyObject *breaks;  /* keelscope.unwinding.Breaks: its cut(node) is called at some of the nodes that get a hook */
    Py_ssize_t sites;
    unsigned char *duties, *seen;
    double *terms, seconds;
    int is_armed, is_open, is_reached;
    long passed, distance; /* nodes that got a hook since the last that was shown; from one to the next */
} Page;

typedef struct {
    PyObject_HEAD
    Page *page;
    Py_ssize_t site;
    size_t shape[3];
    int has_tokens;
} Arrival;

/* What is known of one parameter on one step. */
typedef struct {
    PyObject *gradient; /* borrowed, only compared */
    long long version;  /* of gradient and parameter together */
    unsigned char is_reached, is_noted, is_stepped;
} Standing;

typedef struct {
    PyObject_HEAD
    PyObject *owner;      /* weak reference to the object with _backward_begins() */
    PyObject *parameters; /* weak references */
    Py_ssize_t size, first;
    Standing *standings;
    long long pass;
} Passes;

typedef struct {
    PyObject_HEAD
    Passes *passes;
    Py_ssize_t index;
} Mark;

static PyTypeObject *arrival_type, *mark_type;
static struct {
    PyObject *is_grad_enabled, *graph_task, *transforms, *tracing, *ordered; /* callables */
    PyObject *base, *grad_fn, *hooks, *register_hooks, *requires_grad, *grad, *version; /* names */
    PyObject *first, *another, *begins, *cut, *distance;                                /* names of methods */
} known;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void end(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *begin(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

/* ---- Page */

static PyObject *page_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *modules, *owner, *breaks;
    const char *duties;
    Py_ssize_t sites;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!OOy#", &PyList_Type, &modules, &owner, &breaks, &duties, &sites)) return NULL;
    if (PyList_Size(modules) < sites) {
        PyErr_Format(PyExc_ValueError, "%zd duties for %zd modules", sites, PyList_Size(modules));
        return NULL;
    }
    Page *self = (Page *)begin(type);
    if (self == NULL) return NULL;
    self->sites = sites;
    self->modules = Py_NewRef(modules);
    self->owner = Py_NewRef(owner);
    self->breaks = Py_NewRef(breaks);
    self->terms = PyMem_Calloc((size_t)sites + 1, 2 * HALF * sizeof *self->terms);
    self->duties = PyMem_Malloc((size_t)sites + 1);
    self->seen = PyMem_Calloc((size_t)sites + 1, 1);
    self->is_open = 1;
    PyObject *distance = PyObject_GetAttr(breaks, known.distance);
    self->distance = distance == NULL ? -1 : PyLong_AsLong(distance);
    Py_XDECREF(distance);
    if (self->terms == NULL || self->duties == NULL || self->seen == NULL || PyErr_Occurred()) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    memcpy(self->duties, duties, (size_t)sites);
    return (PyObject *)self;
}

static void page_end(PyObject *object) {
    Page *self = (Page *)object;
    Py_XDECREF(self->modules);
    Py_XDECREF(self->owner);
    Py_XDECREF(self->breaks);
    PyMem_Free(self->terms);
    PyMem_Free(self->duties);
    PyMem_Free(self->seen);
    end(object);
}

static void take_terms(Page *page, Py_ssize_t site, int duty, int half, const Place *place, const size_t *shape) {
    double *row = page->terms + 2 * HALF * site + HALF * half;
    for (int routine = 0; routine < ROUTINES; routine++) {
        if (duty & 1 << routine) fill(routine, place, shape, row + OFFSETS[routine]);
    }
}

static int gives(PyObject *callable, PyObject *expected) {
    PyObject *found = PyObject_CallNoArgs(callable);
    Py_XDECREF(found);
    return found == expected;
}

/* Whether this is an ordinary forward that trains: not a recomputation inside backward, not traced or transformed. */
static int is_plain_forward(void) {
    PyObject *task;
    if (!gives(known.is_grad_enabled, Py_True)) return 0;
    if (!gives(known.transforms, Py_None) || !gives(known.tracing, Py_None)) return 0;
    task = PyObject_CallNoArgs(known.graph_task);
    const long long number = task == NULL ? 0 : PyLong_AsLongLong(task);
    Py_XDECREF(task);
    return number == -1;
}

/* The node behind a tensor, new; NULL for leaves. */
static PyObject *node_of(PyObject *tensor) {
    PyObject *node = PyObject_GetAttr(tensor, known.grad_fn);
    if (node == Py_None) Py_CLEAR(node);
    return node;
}

static int requires_grad(PyObject *tensor) { return is_true(PyObject_GetAttr(tensor, known.requires_grad)); }

/* The one tensor that the call was given, borrowed; NULL if it was given something else. */
static PyObject *only_input(PyObject *args, PyObject *kwargs) {
    if (!PyTuple_Check(args) || PyTuple_Size(args) != 1 || !PyDict_Check(kwargs) || PyDict_Size(kwargs) != 0) return NULL;
    PyObject *input = PyTuple_GetItem(args, 0);
    return (PyObject *)Py_TYPE(input) == torch.tensor ? input : NULL;
}

/* As keelscope.leaves.hookable: the tensor, or the base that it is a full view of; new. NULL: Python must look. */
static PyObject *hookable(PyObject *tensor, const Place *place, PyObject *args, PyObject *kwargs) {
    Place there;
    PyObject *base = PyObject_GetAttr(tensor, known.base);
    if (base == NULL || base == Py_None) {
        Py_XDECREF(base);
        return base == NULL ? NULL : Py_NewRef(tensor);
    }
    PyObject *node = node_of(base);
    Py_XDECREF(node);
    if (node == NULL || !find(base, &there) || there.count != place->count || there.kind != place->kind ||
        !requires_grad(base)) {
        PyErr_Clear();
        Py_DECREF(base);
        return Py_NewRef(tensor);
    }
    PyObject *input = only_input(args, kwargs), *source = NULL;
    if (input != NULL) {
        source = PyObject_GetAttr(input, known.base);
        if (source == Py_None) {
            Py_DECREF(source);
            source = Py_NewRef(input);
        }
    }
    if (source == NULL || source == base) {
        Py_DECREF(base);
        base = source == NULL ? NULL : Py_NewRef(tensor);
    }
    Py_XDECREF(source);
    return base;
}

/* An error of ours is none of the user's; an interrupt is. */
static void forgive(void) {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
}

/* Every so-many-th node that gets a hook is shown to keelscope.unwinding.Breaks. */
static void show_node(Page *page, PyObject *node) {
    if (++page->passed < page->distance) return;
    page->passed = 0;
    PyObject *told = PyObject_CallMethodObjArgs(page->breaks, known.cut, node, NULL);
    if (told == NULL) forgive();
    Py_XDECREF(told);
}

/* As keelscope.leaves.hook_gradient, for tensors without hooks. */
static int put_hook(PyObject *tensor, PyObject *hook, Page *page) {
    PyObject *node = node_of(tensor), *there = PyObject_GetAttr(tensor, known.hooks);
    PyObject *hooks = NULL, *done = NULL;
    int is_put = 0;
    if (node != NULL && there == Py_None && (PyObject *)Py_TYPE(tensor) == torch.tensor) {
        hooks = PyObject_CallNoArgs(known.ordered);
        if (hooks != NULL && PyObject_SetItem(hooks, hook, hook) == 0 &&
            PyObject_SetAttr(tensor, known.hooks, hooks) == 0) {
            done = PyObject_CallMethodObjArgs(node, known.register_hooks, tensor, NULL);
            is_put = done != NULL;
            if (is_put) show_node(page, node);
        }
    }
    Py_XDECREF(done);
    Py_XDECREF(hooks);
    Py_XDECREF(there);
    Py_XDECREF(node);
    return is_put;
}

static int put_arrival(Page *page, Py_ssize_t site, PyObject *target, PyObject *output) {
    Arrival *hook = (Arrival *)begin(arrival_type);
    if (hook == NULL) return 0;
    hook->page = (Page *)Py_NewRef((PyObject *)page);
    hook->site = site;
    hook->has_tokens = sizes_of(output, hook->shape);
    const int is_put = put_hook(target, (PyObject *)hook, page);
    Py_DECREF((PyObject *)hook);
    return is_put;
}

static int look(Page *page, Py_ssize_t site, PyObject *const *call) {
    PyObject *module = call[1], *output = call[4];
    Place place;
    size_t shape[3];
    const int duty = page->duties[site], of_gradient = duty >> FOR_GRADIENT, of_output = duty & 7;
    if ((PyObject *)Py_TYPE(output) != torch.tensor || !PyTuple_Check(call[2])) return 0;
    if (PyWeakref_GetObject(PyList_GetItem(page->modules, site)) != module) return 0;
    if (!is_plain_forward() || !requires_grad(output) || !find(output, &place)) return 0;
    if (of_gradient) {
        PyObject *target = hookable(output, &place, call[2], call[3]);
        const int is_put = target != NULL && put_arrival(page, site, target, output);
        Py_XDECREF(target);
        if (!is_put || PyErr_Occurred()) return 0;
    }
    page->seen[site] |= CALLED;
    const int has_tokens = of_output & 1 << LATE_TOKENS && sizes_of(output, shape);
    take_terms(page, site, of_output, 0, &place, has_tokens ? shape : NULL);
    return 1;
}

/* look(site, module, args, kwargs, output) -> whether the call is recorded */
static PyObject *page_look(PyObject *object, PyObject *const *arguments, Py_ssize_t given) {
    Page *page = (Page *)object;
    if (given != 5) {
        PyErr_Format(PyExc_TypeError, "look() takes a site and what a forward hook gets; got %zd arguments", given);
        return NULL;
    }
    const Py_ssize_t site = page->is_armed ? PyLong_AsSsize_t(arguments[0]) : -1;
    if (site < 0 || site >= page->sites || page->duties[site] & LEFT_ALONE || page->seen[site]) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_FALSE;
    }
    const double start = now();
    const int done = look(page, site, arguments);
    forgive();
    if (PyErr_Occurred()) return NULL;
    if (done) page->seconds += now() - start;
    return PyBool_FromLong(done);
}

static PyObject *page_mark(PyObject *object, PyObject *argument) {
    Page *page = (Page *)object;
    const Py_ssize_t site = PyLong_AsSsize_t(argument);
    if (PyErr_Occurred()) return NULL;
    if (site >= 0 && site < page->sites && !page->seen[site]) page->duties[site] |= LEFT_ALONE;
    Py_RETURN_NONE;
}

static PyObject *page_has(PyObject *object, PyObject *argument) {
    const Page *page = (Page *)object;
    const Py_ssize_t site = PyLong_AsSsize_t(argument);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(site >= 0 && site < page->sites && page->seen[site]);
}

static PyObject *page_take(PyObject *object, PyObject *none) {
    const Page *page = (Page *)object;
    (void)none;
    const Py_ssize_t size = page->sites * 2 * HALF * (Py_ssize_t)sizeof(double);
    return Py_BuildValue("y#y#", (const char *)page->seen, page->sites, (const char *)page->terms, size);
}

static struct PyMemberDef PAGE_MEMBERS[] = {
    {"armed", T_INT, offsetof(Page, is_armed), 0, "whether calls are taken"},
    {"open", T_INT, offsetof(Page, is_open), 0, "whether gradients are taken"},
    {"reached", T_INT, offsetof(Page, is_reached), READONLY, "whether a gradient has arrived"},
    {"seconds", T_DOUBLE, offsetof(Page, seconds), 0, "time spent"},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef PAGE_METHODS[] = {
    {"look", (PyCFunction)(void (*)(void))page_look, METH_FASTCALL,
     "look(site, module, args, kwargs, output) -> whether the call is recorded here"},
    {"leave", page_mark, METH_O, "leave(site): a site that was not seen yet is left to Python"},
    {"has", page_has, METH_O, "has(site) -> whether a call of the site is recorded here"},
    {"take", page_take, METH_NOARGS, "take() -> what was seen of each site [site], terms [site, column]"},
    {NULL, NULL, 0, NULL},
};

/* ---- Arrival: the hook on the output of one call */

static void arrival_end(PyObject *self) {
    Py_XDECREF((PyObject *)((Arrival *)self)->page);
    end(self);
}

static void tell(PyObject *reference, PyObject *name, PyObject *first, PyObject *second, PyObject *third) {
    PyObject *owner = PyWeakref_GetObject(reference);
    if (owner == NULL || owner == Py_None) return;
    Py_INCREF(owner);
    PyObject *done = PyObject_CallMethodObjArgs(owner, name, first, second, third, NULL);
    Py_XDECREF(done);
    Py_DECREF(owner);
}

static void tell_of_another(const Arrival *hook, PyObject *gradient) {
    PyObject *shape = hook->has_tokens
                          ? Py_BuildValue("nnn", hook->shape[0], hook->shape[1], hook->shape[2])
                          : Py_NewRef(Py_None);
    PyObject *site = PyLong_FromSsize_t(hook->site);
    if (shape != NULL && site != NULL) tell(hook->page->owner, known.another, site, gradient, shape);
    Py_XDECREF(site);
    Py_XDECREF(shape);
}

static PyObject *arrival_call(PyObject *object, PyObject *args, PyObject *kwargs) {
    const Arrival *hook = (Arrival *)object;
    Page *page = hook->page;
    PyObject *gradient = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;
    Place place;
    (void)kwargs;
    if (gradient == NULL) return NULL;
    if (!page->is_open) Py_RETURN_NONE;
    if (!page->is_reached) {
        page->is_reached = 1;
        page->is_armed = 0;
        tell(page->owner, known.first, NULL, NULL, NULL);
        if (PyErr_Occurred()) return NULL;
    }
    const double start = now();
    if (!(page->seen[hook->site] & (ARRIVED | ELSEWHERE)) && find(gradient, &place)) {
        page->seen[hook->site] |= ARRIVED;
        const int duty = page->duties[hook->site] >> FOR_GRADIENT & 7;
        take_terms(page, hook->site, duty, 1, &place, hook->has_tokens ? hook->shape : NULL);
        page->seconds += now() - start;
    } else {
        PyErr_Clear();
        page->seen[hook->site] |= ELSEWHERE;
        tell_of_another(hook, gradient);
        if (PyErr_Occurred()) return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- Passes: which parameters backward passes reach, and how their gradients stand */

static PyObject *passes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *owner, *parameters;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!", &owner, &PyList_Type, &parameters)) return NULL;
    Passes *self = (Passes *)begin(type);
    if (self == NULL) return NULL;
    self->owner = Py_NewRef(owner);
    self->parameters = Py_NewRef(parameters);
    self->size = PyList_Size(parameters);
    self->first = self->pass = -1;
    self->standings = PyMem_Calloc((size_t)self->size + 1, sizeof *self->standings);
    if (self->standings != NULL) return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static void passes_end(PyObject *self) {
    Py_XDECREF(((Passes *)self)->owner);
    Py_XDECREF(((Passes *)self)->parameters);
    PyMem_Free(((Passes *)self)->standings);
    end(self);
}

static int note(Passes *passes, Py_ssize_t index) {
    PyObject *task = PyObject_CallNoArgs(known.graph_task);
    const long long pass = task == NULL ? -1 : PyLong_AsLongLong(task);
    Py_XDECREF(task);
    if (PyErr_Occurred()) return -1;
    if (pass != passes->pass) { /* a new backward pass, also after one that raised half-way */
        passes->pass = pass;
        tell(passes->owner, known.begins, NULL, NULL, NULL);
        if (PyErr_Occurred()) return -1;
    }
    if (index >= 0 && index < passes->size) passes->standings[index].is_reached = 1;
    return 0;
}

static PyObject *passes_note(PyObject *object, PyObject *argument) {
    const Py_ssize_t index = PyLong_AsSsize_t(argument);
    if (PyErr_Occurred() || note((Passes *)object, index) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *passes_begin(PyObject *object, PyObject *none) {
    Passes *self = (Passes *)object;
    (void)none;
    for (Py_ssize_t i = 0; i < self->size; i++) self->standings[i].is_noted = self->standings[i].is_stepped = 0;
    self->first = -1;
    Py_RETURN_NONE;
}

/* The parameter, new; NULL where it is gone. */
static PyObject *parameter_of(const Passes *self, Py_ssize_t index) {
    PyObject *parameter = PyWeakref_GetObject(PyList_GetItem(self->parameters, index));
    return parameter == NULL || parameter == Py_None ? NULL : Py_NewRef(parameter);
}

static long long version_of(PyObject *tensor) {
    PyObject *version = PyObject_GetAttr(tensor, known.version);
    const long long number = version == NULL ? -1 : PyLong_AsLongLong(version);
    Py_XDECREF(version);
    return number;
}

/* The gradient of a parameter, new, and how it stands; NULL without one. */
static PyObject *stand(PyObject *parameter, Standing *now) {
    PyObject *gradient = PyObject_GetAttr(parameter, known.grad);
    if (gradient == NULL) return NULL;
    now->gradient = gradient;
    now->version = (gradient == Py_None ? -1 : version_of(gradient)) + version_of(parameter);
    if (gradient != Py_None) return gradient;
    Py_DECREF(gradient);
    return NULL;
}

static int add_pair(PyObject *indices, PyObject *gradients, Py_ssize_t index, PyObject *gradient) {
    PyObject *number = PyLong_FromSsize_t(index);
    const int done = number != NULL && PyList_Append(indices, number) == 0 &&
                     (gradient == NULL || PyList_Append(gradients, gradient) == 0);
    Py_XDECREF(number);
    return done ? 0 : -1;
}

/* Of one reached parameter: the running gradient, unless its optimizer has stepped. */
static int take_one(Passes *self, Py_ssize_t index, PyObject *indices, PyObject *gradients) {
    Standing *standing = &self->standings[index];
    PyObject *parameter = parameter_of(self, index);
    PyObject *gradient = parameter == NULL || standing->is_stepped ? NULL : stand(parameter, standing);
    int failed = 0;
    if (gradient != NULL) {
        if (self->first < 0) self->first = index;
        standing->is_noted = 1;
        failed = add_pair(indices, gradients, index, gradient);
    }
    Py_XDECREF(gradient);
    Py_XDECREF(parameter);
    return failed || PyErr_Occurred() ? -1 : 0;
}

static PyObject *passes_take(PyObject *object, PyObject *none) {
    Passes *self = (Passes *)object;
    PyObject *reached = PyList_New(0), *indices = PyList_New(0), *gradients = PyList_New(0);
    int failed = reached == NULL || indices == NULL || gradients == NULL;
    (void)none;
    for (Py_ssize_t i = 0; !failed && i < self->size; i++) {
        if (!self->standings[i].is_reached) continue;
        self->standings[i].is_reached = 0;
        failed = add_pair(reached, NULL, i, NULL) < 0 || take_one(self, i, indices, gradients) < 0;
    }
    PyObject *found = failed ? NULL : PyTuple_Pack(3, reached, indices, gradients);
    Py_XDECREF(reached);
    Py_XDECREF(indices);
    Py_XDECREF(gradients);
    return found;
}

/* stepping(indices) -> indices, gradients of those that have one and were not noted since the step began; and whether
   any has one */
static PyObject *passes_stepping(PyObject *object, PyObject *argument) {
    Passes *self = (Passes *)object;
    PyObject *indices = PyList_New(0), *gradients = PyList_New(0);
    int has_any = 0, failed = indices == NULL || gradients == NULL || !PyList_Check(argument);
    for (Py_ssize_t k = 0; !failed && k < PyList_Size(argument); k++) {
        const Py_ssize_t i = PyLong_AsSsize_t(PyList_GetItem(argument, k));
        PyObject *parameter = i < 0 || i >= self->size ? NULL : parameter_of(self, i);
        PyObject *gradient = parameter == NULL ? NULL : PyObject_GetAttr(parameter, known.grad);
        if (gradient != NULL && gradient != Py_None) {
            Standing *standing = &self->standings[i];
            has_any = 1;
            if (!standing->is_stepped && !standing->is_noted) failed = add_pair(indices, gradients, i, gradient) < 0;
            standing->is_stepped = 1;
        }
        Py_XDECREF(gradient);
        Py_XDECREF(parameter);
        failed |= PyErr_Occurred() != NULL;
    }
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "stepping() takes a list of indices");
    PyObject *found = failed ? NULL : PyTuple_Pack(3, indices, gradients, has_any ? Py_True : Py_False);
    Py_XDECREF(indices);
    Py_XDECREF(gradients);
    return found;
}

/* Whether a noted gradient stands as it did; -1 of one that was not noted or whose parameter is gone. */
static int stands_still(Passes *self, Py_ssize_t index, int *has_gradient) {
    if (index < 0 || index >= self->size || !self->standings[index].is_noted) return -1;
    PyObject *parameter = parameter_of(self, index);
    if (parameter == NULL) return -1;
    Standing now;
    PyObject *gradient = stand(parameter, &now);
    const int still = now.gradient == self->standings[index].gradient && now.version == self->standings[index].version;
    *has_gradient = gradient != NULL;
    Py_XDECREF(gradient);
    Py_DECREF(parameter);
    return still;
}

static PyObject *passes_rewritten(PyObject *object, PyObject *argument) {
    int has_gradient, found = 0;
    if (!PyList_Check(argument)) {
        PyErr_SetString(PyExc_TypeError, "rewritten() takes a list of indices");
        return NULL;
    }
    for (Py_ssize_t k = 0; !found && k < PyList_Size(argument); k++) {
        found = stands_still((Passes *)object, PyLong_AsSsize_t(PyList_GetItem(argument, k)), &has_gradient) == 0;
        if (PyErr_Occurred()) return NULL;
    }
    return PyBool_FromLong(found);
}

static PyObject *passes_untouched(PyObject *object, PyObject *none) {
    Passes *self = (Passes *)object;
    int has_gradient = 0;
    (void)none;
    const int still = stands_still(self, self->first, &has_gradient);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(still == 1 && has_gradient);
}

static PyObject *passes_mark(PyObject *object, PyObject *argument) {
    const Py_ssize_t index = PyLong_AsSsize_t(argument);
    if (PyErr_Occurred()) return NULL;
    Mark *mark = (Mark *)begin(mark_type);
    if (mark == NULL) return NULL;
    mark->passes = (Passes *)Py_NewRef(object);
    mark->index = index;
    return (PyObject *)mark;
}

static PyMethodDef PASSES_METHODS[] = {
    {"begin", passes_begin, METH_NOARGS, "begin(): a step begins"},
    {"note", passes_note, METH_O, "note(index): the running pass has reached a parameter"},
    {"mark", passes_mark, METH_O, "mark(index) -> a hook on a parameter that notes it"},
    {"take", passes_take, METH_NOARGS, "take() -> reached since the last time; indices and gradients of those that run"},
    {"stepping", passes_stepping, METH_O, "stepping(indices) -> indices and gradients of those not noted; whether any has one"},
    {"rewritten", passes_rewritten, METH_O, "rewritten(indices) -> whether one has changed since it was noted"},
    {"untouched", passes_untouched, METH_NOARGS, "untouched() -> whether the first noted gradient is as it was"},
    {NULL, NULL, 0, NULL},
};

static void mark_end(PyObject *self) {
    Py_XDECREF((PyObject *)((Mark *)self)->passes);
    end(self);
}

static PyObject *mark_call(PyObject *object, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    if (note(((Mark *)object)->passes, ((Mark *)object)->index) < 0) return NULL;
    Py_RETURN_NONE;
}

/* ---- */

static PyType_Slot PAGE_SLOTS[] = {{Py_tp_new, page_new},           {Py_tp_dealloc, page_end},
                                   {Py_tp_methods, PAGE_METHODS},   {Py_tp_members, PAGE_MEMBERS},
                                   {Py_tp_doc, "One recorded step."}, {0, NULL}};
static PyType_Slot ARRIVAL_SLOTS[] = {{Py_tp_dealloc, arrival_end}, {Py_tp_call, arrival_call}, {0, NULL}};
static PyType_Slot PASSES_SLOTS[] = {
    {Py_tp_new, passes_new}, {Py_tp_dealloc, passes_end}, {Py_tp_methods, PASSES_METHODS}, {0, NULL}};
static PyType_Slot MARK_SLOTS[] = {{Py_tp_dealloc, mark_end}, {Py_tp_call, mark_call}, {0, NULL}};

static PyType_Spec PAGE = {"keelscope._kernel.Page", sizeof(Page), 0, Py_TPFLAGS_DEFAULT, PAGE_SLOTS};
static PyType_Spec ARRIVAL = {"keelscope._kernel.Arrival", sizeof(Arrival), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, ARRIVAL_SLOTS};
static PyType_Spec PASSES = {"keelscope._kernel.Passes", sizeof(Passes), 0, Py_TPFLAGS_DEFAULT, PASSES_SLOTS};
static PyType_Spec MARK = {"keelscope._kernel.Mark", sizeof(Mark), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, MARK_SLOTS};

static PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL || PyModule_AddObjectRef(module, name, type) < 0) return NULL;
    return (PyTypeObject *)type;
}

int add_hooks(PyObject *module) {
    arrival_type = add_type(module, "Arrival", &ARRIVAL);
    mark_type = add_type(module, "Mark", &MARK);
    const int is_done = arrival_type != NULL && mark_type != NULL && add_type(module, "Page", &PAGE) != NULL &&
                        add_type(module, "Passes", &PASSES) != NULL;
    return is_done ? 0 : -1;
}

/* prepare_hooks(is_grad_enabled, current_graph_task_id, peek_interpreter_stack, get_tracing_state, OrderedDict) */
PyObject *prepare_hooks(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    (void)module;
    if (given != 5) {
        PyErr_Format(PyExc_TypeError, "expected 5 arguments, got %zd", given);
        return NULL;
    }
    known.is_grad_enabled = Py_NewRef(arguments[0]);
    known.graph_task = Py_NewRef(arguments[1]);
    known.transforms = Py_NewRef(arguments[2]);
    known.tracing = Py_NewRef(arguments[3]);
    known.ordered = Py_NewRef(arguments[4]);
    known.base = PyUnicode_InternFromString("_base");
    known.grad_fn = PyUnicode_InternFromString("grad_fn");
    known.hooks = PyUnicode_InternFromString("_backward_hooks");
    known.register_hooks = PyUnicode_InternFromString("_register_hook_dict");
    known.requires_grad = PyUnicode_InternFromString("requires_grad");
    known.grad = PyUnicode_InternFromString("grad");
    known.version = PyUnicode_InternFromString("_version");
    known.first = PyUnicode_InternFromString("_first_arrives");
    known.another = PyUnicode_InternFromString("_another_arrives");
    known.cut = PyUnicode_InternFromString("cut");
    known.distance = PyUnicode_InternFromString("distance");
    known.begins = PyUnicode_InternFromString("_backward_begins");
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
