/* Hooks that torch calls at every module and output of a recorded step: what keelscope.hooks does in
   Python, for the calls in which nothing is out of the ordinary. Those on parameters are in passes.c.

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

static PyTypeObject *arrival_type;
Known known;
double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

void end(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

PyObject *begin(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

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

static int requires_grad(PyObject *tensor) { return is_true(ask(tensor, &known.requires_grad)); }

/* The one tensor that the call was given, borrowed; NULL if it was given something else. */
static PyObject *only_input(PyObject *args, PyObject *kwargs) {
    if (!PyTuple_Check(args) || PyTuple_Size(args) != 1 || !PyDict_Check(kwargs) || PyDict_Size(kwargs) != 0) return NULL;
    PyObject *input = PyTuple_GetItem(args, 0);
    return (PyObject *)Py_TYPE(input) == torch.tensor ? input : NULL;
}

/* As keelscope.leaves.hookable: the tensor, or the base that it is a full view of; new. NULL: Python must look. */
static PyObject *hookable(PyObject *tensor, const Place *place, PyObject *args, PyObject *kwargs) {
    Place there;
    PyObject *base = ask(tensor, &known.base);
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
        source = ask(input, &known.base);
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
void forgive(void) {
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

static int put_hook(PyObject *tensor, PyObject *hook, Page *page) {
    PyObject *node = hook_plainly(tensor, hook);
    if (node != NULL) show_node(page, node);
    Py_XDECREF(node);
    return node != NULL;
}

static int put_arrival(Page *page, Py_ssize_t site, PyObject *target, const Place *output) {
    Arrival *hook = (Arrival *)begin(arrival_type);
    if (hook == NULL) return 0;
    hook->page = (Page *)Py_NewRef((PyObject *)page);
    hook->site = site;
    hook->has_tokens = output->has_tokens;
    memcpy(hook->shape, output->shape, sizeof hook->shape);
    const int is_put = put_hook(target, (PyObject *)hook, page);
    Py_DECREF((PyObject *)hook);
    return is_put;
}

static int look(Page *page, Py_ssize_t site, PyObject *const *call) {
    PyObject *module = call[1], *output = call[4];
    Place place;
    const int duty = page->duties[site], of_gradient = duty >> FOR_GRADIENT, of_output = duty & 7;
    if ((PyObject *)Py_TYPE(output) != torch.tensor || !PyTuple_Check(call[2])) return 0;
    if (PyWeakref_GetObject(PyList_GetItem(page->modules, site)) != module) return 0;
    if (!is_plain_forward() || !requires_grad(output)) return 0;
    if (duty == 0) { /* it is seen */
        page->seen[site] |= CALLED;
        return 1;
    }
    if (!find(output, &place)) return 0;
    if (of_gradient) {
        PyObject *target = hookable(output, &place, call[2], call[3]);
        const int is_put = target != NULL && put_arrival(page, site, target, &place);
        Py_XDECREF(target);
        if (!is_put || PyErr_Occurred()) return 0;
    }
    page->seen[site] |= CALLED;
    take_terms(page, site, of_output, 0, &place, place.has_tokens ? place.shape : NULL);
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

void tell(PyObject *reference, PyObject *name, PyObject *first, PyObject *second, PyObject *third) {
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

/* ---- */

static PyType_Slot PAGE_SLOTS[] = {{Py_tp_new, page_new},           {Py_tp_dealloc, page_end},
                                   {Py_tp_methods, PAGE_METHODS},   {Py_tp_members, PAGE_MEMBERS},
                                   {Py_tp_doc, "One recorded step."}, {0, NULL}};
static PyType_Slot ARRIVAL_SLOTS[] = {{Py_tp_dealloc, arrival_end}, {Py_tp_call, arrival_call}, {0, NULL}};

static PyType_Spec PAGE = {"keelscope._kernel.Page", sizeof(Page), 0, Py_TPFLAGS_DEFAULT, PAGE_SLOTS};
static PyType_Spec ARRIVAL = {"keelscope._kernel.Arrival", sizeof(Arrival), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, ARRIVAL_SLOTS};

PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL || PyModule_AddObjectRef(module, name, type) < 0) return NULL;
    return (PyTypeObject *)type;
}

int add_hooks(PyObject *module) {
    arrival_type = add_type(module, "Arrival", &ARRIVAL);
    const int is_done = arrival_type != NULL && add_type(module, "Page", &PAGE) != NULL;
    return is_done ? add_passes(module) : -1;
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
    get_to(&known.base, "_base");
    get_to(&known.grad_fn, "grad_fn");
    get_to(&known.hooks, "_backward_hooks");
    get_to(&known.requires_grad, "requires_grad");
    get_to(&known.grad, "grad");
    get_to(&known.version, "_version");
    get_to(&known.is_leaf, "is_leaf");
    get_to(&known.is_meta, "is_meta");
    get_to(&known.slot, "output_nr");
    get_to(&known.accumulated, "_post_accumulate_grad_hooks");
    known.register_hooks = PyUnicode_InternFromString("_register_hook_dict");
    known.first = PyUnicode_InternFromString("_first_arrives");
    known.another = PyUnicode_InternFromString("_another_arrives");
    known.cut = PyUnicode_InternFromString("cut");
    known.distance = PyUnicode_InternFromString("distance");
    known.begins = PyUnicode_InternFromString("_backward_begins");
    known.accumulates = PyUnicode_InternFromString("_accumulates");
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
