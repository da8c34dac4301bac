/* Which parameters backward passes reach, and how their gradients stand: what keelscope.passes does in Python. */

#include "kernel.h"

#include <structmember.h>

/* What is known of one parameter on one step. */
typedef struct {
    PyObject *gradient; /* borrowed, only compared */
    long long version;  /* of the gradient */
    unsigned char is_reached, is_noted, is_stepped, is_summed;
} Standing;

typedef struct {
    PyObject_HEAD
    PyObject *owner;      /* weak reference to the object with _backward_begins() */
    PyObject *parameters; /* weak references */
    Py_ssize_t size, first;
    long long weight; /* version of the first parameter, which an optimizer writes whose gradient stays as it is */
    Standing *standings;
    double *sums; /* [parameter, 2]: count and squares of gradients that were summed when they arrived */
    long long pass;
    double seconds;
    int is_summing;
} Passes;

typedef struct {
    PyObject_HEAD
    Passes *passes;
    PyObject *hooks; /* the dictionary of a parameter that it is put in */
    Py_ssize_t index;
} Mark;

static PyTypeObject *mark_type;


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
    if (index < 0 || index >= passes->size) return 0;
    passes->standings[index].is_reached = 1;
    passes->standings[index].is_summed = 0;
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

/* The squares of a gradient that has just been accumulated, which lies in the cache now and not when the pass ends. */
static void sum_up(Passes *self, Py_ssize_t index, PyObject *parameter) {
    Standing *standing = &self->standings[index];
    const double start = now();
    Place place;
    PyObject *gradient = standing->is_stepped ? NULL : stand(parameter, standing);
    if (gradient != NULL && find(gradient, &place)) {
        fill(SQUARES, &place, NULL, self->sums + 2 * index);
        standing->is_summed = 1;
    }
    Py_XDECREF(gradient);
    forgive();
    self->seconds += now() - start;
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
    const int is_same = then.is_summed && then.gradient == now->gradient && then.version == now->version;
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

static PyObject *passes_mark(PyObject *object, PyObject *args) {
    PyObject *hooks;
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "nO!", &index, &PyDict_Type, &hooks)) return NULL;
    Mark *mark = (Mark *)begin(mark_type);
    if (mark == NULL) return NULL;
    mark->passes = (Passes *)Py_NewRef(object);
    mark->hooks = Py_NewRef(hooks);
    mark->index = index;
    return (PyObject *)mark;
}

/* Whether a parameter still is one whose gradient is noted, and keeps its hooks where it did. */
static int fits(const Passes *self, const Mark *mark) {
    PyObject *parameter = mark->hooks == NULL ? NULL : parameter_of(self, mark->index);
    if (parameter == NULL) return 0;
    PyObject *hooks = NULL;
    if (is_true(ask(parameter, &known.requires_grad)) && is_true(ask(parameter, &known.is_leaf))) {
        hooks = ask(parameter, &known.accumulated);
    }
    Py_XDECREF(hooks);
    Py_DECREF(parameter);
    return hooks != NULL && hooks == mark->hooks;
}

/* put_back(marks) -> whether all of them are among the hooks of their parameters again; if one does not fit, none is */
static PyObject *passes_put_back(PyObject *object, PyObject *marks) {
    int done = PyList_Check(marks);
    for (Py_ssize_t i = 0; done && i < PyList_Size(marks); i++) {
        PyObject *mark = PyList_GetItem(marks, i);
        done = Py_TYPE(mark) == mark_type && fits((Passes *)object, (Mark *)mark);
    }
    for (Py_ssize_t i = 0; done && i < PyList_Size(marks); i++) {
        PyObject *mark = PyList_GetItem(marks, i);
        if (PyObject_SetItem(((Mark *)mark)->hooks, mark, mark) < 0) return NULL;
    }
    forgive();
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

static PyObject *passes_take_off(PyObject *object, PyObject *marks) {
    (void)object;
    for (Py_ssize_t i = 0; PyList_Check(marks) && i < PyList_Size(marks); i++) {
        PyObject *mark = PyList_GetItem(marks, i);
        PyObject *hooks = Py_TYPE(mark) == mark_type ? ((Mark *)mark)->hooks : NULL;
        if (hooks != NULL && PyMapping_HasKey(hooks, mark) && PyObject_DelItem(hooks, mark) < 0) return NULL;
    }
    Py_RETURN_NONE;
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
    {"mark", passes_mark, METH_VARARGS, "mark(index, hooks) -> what notes a parameter, to be put among its hooks"},
    {"put_back", passes_put_back, METH_O, "put_back(marks) -> whether all are among the hooks of their parameters again"},
    {"take_off", passes_take_off, METH_O, "take_off(marks): take them from there"},
    {"take", passes_take, METH_NOARGS, "take() -> who is reached; summed; sums; indices and gradients of the rest"},
    {"stepping", passes_stepping, METH_O,
     "stepping(indices) -> indices and gradients of those not noted; whether any has one"},
    {"rewritten", passes_rewritten, METH_O, "rewritten(indices) -> whether one has changed since it was noted"},
    {"untouched", passes_untouched, METH_NOARGS, "untouched() -> whether the first noted gradient is as it was"},
    {NULL, NULL, 0, NULL},
};

static int mark_visit(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Mark *)self)->hooks);
    return 0;
}

static int mark_clear(PyObject *self) {
    Py_CLEAR(((Mark *)self)->hooks);
    return 0;
}

static void mark_end(PyObject *self) {
    PyObject_GC_UnTrack(self);
    mark_clear(self);
    Py_XDECREF((PyObject *)((Mark *)self)->passes);
    end(self);
}

/* Whether no other hook is called after an accumulation, which may change the gradient and not show it. */
static int is_alone(const Mark *self) { return self->hooks != NULL && PyDict_Size(self->hooks) == 1; }

static PyObject *mark_call(PyObject *object, PyObject *args, PyObject *kwargs) {
    Mark *self = (Mark *)object;
    PyObject *parameter = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;
    (void)kwargs;
    if (parameter == NULL || note(self->passes, self->index) < 0) return NULL;
    if (self->passes->is_summing && is_alone(self)) sum_up(self->passes, self->index, parameter);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyType_Slot PASSES_SLOTS[] = {{Py_tp_new, passes_new},
                                     {Py_tp_dealloc, passes_end},
                                     {Py_tp_methods, PASSES_METHODS},
                                     {Py_tp_members, PASSES_MEMBERS},
                                     {0, NULL}};
static PyType_Slot MARK_SLOTS[] = {{Py_tp_dealloc, mark_end},   {Py_tp_call, mark_call}, {Py_tp_traverse, mark_visit},
                                   {Py_tp_clear, mark_clear}, {0, NULL}};

static PyType_Spec PASSES = {"keelscope._kernel.Passes", sizeof(Passes), 0, Py_TPFLAGS_DEFAULT, PASSES_SLOTS};
static PyType_Spec MARK = {"keelscope._kernel.Mark", sizeof(Mark), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, MARK_SLOTS};

int add_passes(PyObject *module) {
    mark_type = add_type(module, "Mark", &MARK);
    return mark_type != NULL && add_type(module, "Passes", &PASSES) != NULL ? 0 : -1;
}
