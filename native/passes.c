/* Which parameters backward passes reach, and how their gradients stand: what keelscope.passes does in Python. */

#include "passes.h"

#include <structmember.h>

static PyObject *passes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *owner, *parameters;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!", &owner, &PyList_Type, &parameters)) return NULL;
    Passes *self = (Passes *)begin(type);
    if (self == NULL) return NULL;
    self->owner = Py_NewRef(owner);
    self->parameters = Py_NewRef(parameters);
    self->size = PyList_Size(parameters);
    self->first = self->pass = self->ignored = -1;
    self->standings = PyMem_Calloc((size_t)self->size + 1, sizeof *self->standings);
    self->sums = PyMem_Calloc((size_t)self->size + 1, 2 * sizeof *self->sums);
    if (self->standings != NULL && self->sums != NULL) return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static void passes_end(PyObject *self) {
    Py_XDECREF(((Passes *)self)->owner);
    Py_XDECREF(((Passes *)self)->parameters);
    PyMem_Free(((Passes *)self)->standings);
    PyMem_Free(((Passes *)self)->sums);
    end(self);
}

/* Whether the running pass is of torch.autograd.grad, which calls hooks of leaves and accumulates nothing. */
static int accumulates(const Passes *passes, Py_ssize_t index) {
    PyObject *owner = PyWeakref_GetObject(passes->owner), *number = PyLong_FromSsize_t(index);
    if (owner == NULL || owner == Py_None || number == NULL) {
        Py_XDECREF(number);
        return 0;
    }
    Py_INCREF(owner);
    const int found = is_true(PyObject_CallMethodObjArgs(owner, known.accumulates, number, NULL));
    Py_DECREF(owner);
    Py_DECREF(number);
    return found;
}

int note(Passes *passes, Py_ssize_t index, int is_early) {
    PyObject *task = PyObject_CallNoArgs(known.graph_task);
    const long long pass = task == NULL ? -1 : PyLong_AsLongLong(task);
    Py_XDECREF(task);
    if (PyErr_Occurred()) return -1;
    if (is_early && pass == passes->ignored) return 0;
    if (pass != passes->pass) { /* a new backward pass, also after one that raised half-way */
        if (is_early && !accumulates(passes, index)) {
            passes->ignored = pass;
            return PyErr_Occurred() ? -1 : 0;
        }
        passes->pass = pass;
        tell(passes->owner, known.begins, NULL, NULL, NULL);
        if (PyErr_Occurred()) return -1;
    }
    if (index < 0 || index >= passes->size) return 0;
    passes->standings[index].is_reached = 1;
    passes->standings[index].is_summed = NOT_SUMMED;
    passes->standings[index].is_early = (unsigned char)is_early;
    return 1;
}

static PyObject *passes_note(PyObject *object, PyObject *argument) {
    const Py_ssize_t index = PyLong_AsSsize_t(argument);
    if (PyErr_Occurred() || note((Passes *)object, index, 0) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *passes_begin(PyObject *object, PyObject *none) {
    Passes *self = (Passes *)object;
    (void)none;
    for (Py_ssize_t i = 0; i < self->size; i++) self->standings[i].is_noted = self->standings[i].is_stepped = 0;
    self->first = -1;
    Py_RETURN_NONE;
}

PyObject *parameter_of(const Passes *self, Py_ssize_t index) {
    PyObject *parameter = PyWeakref_GetObject(PyList_GetItem(self->parameters, index));
    return parameter == NULL || parameter == Py_None ? NULL : Py_NewRef(parameter);
}

long long version_of(PyObject *tensor) {
    PyObject *version = ask(tensor, &known.version);
    const long long number = version == NULL ? -1 : PyLong_AsLongLong(version);
    Py_XDECREF(version);
    return number;
}

/* The gradient of a parameter, new, and how it stands; NULL without one. */
static PyObject *stand(PyObject *parameter, Standing *now) {
    PyObject *gradient = ask(parameter, &known.grad);
    if (gradient == NULL) return NULL;
    now->gradient = gradient;
    now->version = gradient == Py_None ? -1 : version_of(gradient);
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

static void sum(Passes *self, Py_ssize_t index, const Place *place) {
    fill(SQUARES, place, NULL, self->sums + 2 * index);
    self->standings[index].is_summed = SUMMED;
}

/* The squares of a gradient that has just been accumulated, which lies in the cache now and not when the pass ends. */
void sum_up(Passes *self, Py_ssize_t index, PyObject *parameter) {
    Standing *standing = &self->standings[index];
    const double start = now();
    Place place;
    PyObject *gradient = standing->is_stepped ? NULL : stand(parameter, standing);
    if (gradient != NULL && find(gradient, &place)) sum(self, index, &place);
    Py_XDECREF(gradient);
    forgive();
    self->seconds += now() - start;
}

/* The squares of a gradient that is to be the parameter's own, which has none yet; if it has become another one when the
   pass ends, they are taken again. */
void sum_ahead(Passes *self, Py_ssize_t index, PyObject *gradient) {
    Standing *standing = &self->standings[index];
    const double start = now();
    Place place;
    PyObject *parameter = standing->is_stepped ? NULL : parameter_of(self, index);
    PyObject *there = parameter == NULL ? NULL : ask(parameter, &known.grad);
    if (there == Py_None && find(gradient, &place)) {
        sum(self, index, &place);
        standing->is_summed = SUMMED_AHEAD;
        standing->address = place.address;
        standing->version = version_of(gradient);
    }
    Py_XDECREF(there);
    Py_XDECREF(parameter);
    forgive();
    self->seconds += now() - start;
}

/* Of a gradient that was noted early, and is accumulated now: whether it is summed. */
static int sum_late(Passes *self, Py_ssize_t index, const Standing *then, PyObject *gradient) {
    Place place;
    if (!self->is_summing || has_others(self, index) || !find(gradient, &place)) return 0;
    const int is_same = then->is_summed == SUMMED_AHEAD && then->address == place.address &&
                        then->version == self->standings[index].version;
    if (!is_same) sum(self, index, &place);
    return 1;
}

/* Whether a noted gradient stands as it did; -1 of one that was not noted or whose parameter is gone. */
static int stands_still(Passes *self, Py_ssize_t index) {
    if (index < 0 || index >= self->size || !self->standings[index].is_noted) return -1;
    PyObject *parameter = parameter_of(self, index);
    if (parameter == NULL) return -1;
    Standing now;
    PyObject *gradient = stand(parameter, &now);
    const int still = now.gradient == self->standings[index].gradient && now.version == self->standings[index].version;
    Py_XDECREF(gradient);
    Py_DECREF(parameter);
    return still;
}

/* Notes the gradient of a parameter that a pass has reached; new, NULL where it has none. */
static PyObject *note_gradient(Passes *self, Py_ssize_t index) {
    Standing *standing = &self->standings[index];
    PyObject *parameter = parameter_of(self, index);
    PyObject *gradient = parameter == NULL ? NULL : stand(parameter, standing);
    if (gradient != NULL) {
        standing->is_noted = 1;
        if (self->first < 0) self->first = index;
        if (self->first == index) self->weight = version_of(parameter);
    } else if (standing->is_summed) {
        standing->is_noted = 0;
    }
    Py_XDECREF(parameter);
    return gradient;
}

/* Of one reached parameter: 1 where its gradient was summed and has not changed since, by a hook of another tensor or
   module; otherwise the running gradient is given, unless its optimizer has stepped. */
static int take_one(Passes *self, Py_ssize_t index, PyObject *indices, PyObject *gradients) {
    const Standing then = self->standings[index], *now = &self->standings[index];
    PyObject *gradient = then.is_stepped ? NULL : note_gradient(self, index);
    if (gradient == NULL) return PyErr_Occurred() ? -1 : 0;
    const int is_same = then.is_early ? sum_late(self, index, &then, gradient)
                                      : then.is_summed && then.gradient == now->gradient && then.version == now->version;
    const int failed = !is_same && add_pair(indices, gradients, index, gradient) < 0;
    Py_DECREF(gradient);
    return failed || PyErr_Occurred() ? -1 : is_same;
}

/* take() -> flags of those reached, and of those summed; packed sums [parameter, 2] where any was; indices and gradients
   of the rest that run */
static PyObject *passes_take(PyObject *object, PyObject *none) {
    Passes *self = (Passes *)object;
    PyObject *indices = PyList_New(0), *gradients = PyList_New(0);
    char *flags = PyMem_Calloc((size_t)self->size + 1, 2), *summed = flags + self->size;
    int failed = indices == NULL || gradients == NULL || flags == NULL, has_any = 0;
    (void)none;
    for (Py_ssize_t i = 0; !failed && i < self->size; i++) {
        if (!self->standings[i].is_reached) continue;
        self->standings[i].is_reached = 0;
        const int found = take_one(self, i, indices, gradients);
        flags[i] = 1;
        summed[i] = found == 1;
        has_any |= found == 1;
        failed = found < 0;
    }
    const Py_ssize_t size = has_any ? self->size : 0, bytes = 2 * size * (Py_ssize_t)sizeof *self->sums;
    PyObject *which = failed ? NULL : PyByteArray_FromStringAndSize(summed, size);
    PyObject *sums = failed ? NULL : PyByteArray_FromStringAndSize((const char *)self->sums, bytes);
    PyObject *found = NULL;
    if (which != NULL && sums != NULL) {
        found = Py_BuildValue("y#OOOO", flags, self->size, which, sums, indices, gradients);
    }
    PyMem_Free(flags);
    Py_XDECREF(which);
    Py_XDECREF(sums);
    Py_XDECREF(indices);
    Py_XDECREF(gradients);
    return found == NULL && !PyErr_Occurred() ? PyErr_NoMemory() : found;
}

/* Whether a parameter has a gradient that its optimizer is about to use: one that was noted on this step has. */
static int is_about_to_step(Passes *self, Py_ssize_t index, PyObject *indices, PyObject *gradients) {
    Standing *standing = &self->standings[index];
    if (standing->is_stepped || standing->is_noted) return 1;
    PyObject *parameter = parameter_of(self, index);
    PyObject *gradient = parameter == NULL ? NULL : ask(parameter, &known.grad);
    const int has_gradient = gradient != NULL && gradient != Py_None;
    if (has_gradient) add_pair(indices, gradients, index, gradient);
    Py_XDECREF(gradient);
    Py_XDECREF(parameter);
    return has_gradient;
}

/* stepping(indices) -> indices, gradients of those that have one and were not noted since the step began; and whether
   any has one */
static PyObject *passes_stepping(PyObject *object, PyObject *argument) {
    Passes *self = (Passes *)object;
    PyObject *indices = PyList_New(0), *gradients = PyList_New(0);
    int has_any = 0, failed = indices == NULL || gradients == NULL || !PyList_Check(argument);
    for (Py_ssize_t k = 0; !failed && k < PyList_Size(argument); k++) {
        const Py_ssize_t i = PyLong_AsSsize_t(PyList_GetItem(argument, k));
        if (i >= 0 && i < self->size && is_about_to_step(self, i, indices, gradients)) {
            self->standings[i].is_stepped = 1;
            has_any = 1;
        }
        failed = PyErr_Occurred() != NULL;
    }
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "stepping() takes a list of indices");
    PyObject *found = failed ? NULL : PyTuple_Pack(3, indices, gradients, has_any ? Py_True : Py_False);
    Py_XDECREF(indices);
    Py_XDECREF(gradients);
    return found;
}

static PyObject *passes_rewritten(PyObject *object, PyObject *argument) {
    int found = 0;
    if (!PyList_Check(argument)) {
        PyErr_SetString(PyExc_TypeError, "rewritten() takes a list of indices");
        return NULL;
    }
    for (Py_ssize_t k = 0; !found && k < PyList_Size(argument); k++) {
        found = stands_still((Passes *)object, PyLong_AsSsize_t(PyList_GetItem(argument, k))) == 0;
        if (PyErr_Occurred()) return NULL;
    }
    return PyBool_FromLong(found);
}

static PyObject *passes_untouched(PyObject *object, PyObject *none) {
    Passes *self = (Passes *)object;
    (void)none;
    int is_still = stands_still(self, self->first) == 1;
    PyObject *parameter = is_still ? parameter_of(self, self->first) : NULL;
    if (parameter != NULL) is_still = version_of(parameter) == self->weight;
    Py_XDECREF(parameter);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(is_still);
}

static struct PyMemberDef PASSES_MEMBERS[] = {
    {"summing", T_INT, offsetof(Passes, is_summing), 0, "whether gradients are summed when they arrive"},
    {"seconds", T_DOUBLE, offsetof(Passes, seconds), 0, "time spent on sums"},
    {"first", T_PYSSIZET, offsetof(Passes, first), READONLY, "the first noted parameter of the step; negative: none"},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef PASSES_METHODS[] = {
    {"begin", passes_begin, METH_NOARGS, "begin(): a step begins"},
    {"note", passes_note, METH_O, "note(index): the running pass has reached a parameter"},
    {"mark", passes_mark, METH_VARARGS, "mark(index, hooks, early) -> what notes a parameter, to be put among its hooks"},
    {"put_back", passes_put_back, METH_VARARGS,
     "put_back(marks, free) -> whether all are among the hooks of their parameters again"},
    {"take_off", passes_take_off, METH_VARARGS, "take_off(marks, free): take them from there"},
    {"take", passes_take, METH_NOARGS, "take() -> who is reached; summed; sums; indices and gradients of the rest"},
    {"stepping", passes_stepping, METH_O,
     "stepping(indices) -> indices and gradients of those not noted; whether any has one"},
    {"rewritten", passes_rewritten, METH_O, "rewritten(indices) -> whether one has changed since it was noted"},
    {"untouched", passes_untouched, METH_NOARGS, "untouched() -> whether the first noted gradient is as it was"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot PASSES_SLOTS[] = {{Py_tp_new, passes_new},
                                     {Py_tp_dealloc, passes_end},
                                     {Py_tp_methods, PASSES_METHODS},
                                     {Py_tp_members, PASSES_MEMBERS},
                                     {0, NULL}};
static PyType_Spec PASSES = {"keelscope._kernel.Passes", sizeof(Passes), 0, Py_TPFLAGS_DEFAULT, PASSES_SLOTS};
int add_passes(PyObject *module) {
    return add_marks(module) == 0 && add_type(module, "Passes", &PASSES) != NULL ? 0 : -1;
}
