/* The hooks on parameters that note them: after an accumulation, or before it (early), see keelscope.marks. */

#include "passes.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    Passes *passes;
    PyObject *hooks; /* the dictionary of a parameter that it is put in */
    Py_ssize_t index;
    int is_early;
} Mark;

static PyTypeObject *mark_type;

PyObject *passes_mark(PyObject *object, PyObject *args) {
    PyObject *hooks;
    Py_ssize_t index;
    int is_early;
    if (!PyArg_ParseTuple(args, "nO!p", &index, &PyDict_Type, &hooks, &is_early)) return NULL;
    Mark *mark = (Mark *)begin(mark_type);
    if (mark == NULL) return NULL;
    mark->passes = (Passes *)Py_NewRef(object);
    mark->hooks = Py_NewRef(hooks);
    mark->index = index;
    mark->is_early = is_early;
    return (PyObject *)mark;
}

static PyObject *none(void) { return Py_NewRef(Py_None); }

/* What a parameter keeps hooks of that kind in, new; None, also where an exception was passed over. */
static PyObject *kept(PyObject *parameter, const Attribute *kind) {
    PyObject *hooks = ask(parameter, kind);
    forgive();
    return hooks == NULL ? none() : hooks;
}

int has_others(const Passes *self, Py_ssize_t index) {
    PyObject *parameter = parameter_of(self, index);
    PyObject *hooks = parameter == NULL ? none() : kept(parameter, &known.accumulated);
    const int found = hooks != Py_None && PyMapping_Size(hooks) != 0;
    Py_DECREF(hooks);
    Py_XDECREF(parameter);
    forgive();
    return found;
}

/* Gives torch a dictionary of hooks on the gradient of a parameter, or takes it away again (None). */
static int give(PyObject *parameter, PyObject *hooks) { return PyObject_SetAttr(parameter, known.hooks.name, hooks); }

static int put_in(Mark *mark) { return PyObject_SetItem(mark->hooks, (PyObject *)mark, (PyObject *)mark); }

/* An early mark leaves nothing behind: where there is no other hook of the kind, torch is given none. */
static int put_early(Mark *mark, PyObject *parameter, int is_free) {
    PyObject *early = kept(parameter, &known.hooks), *late = kept(parameter, &known.accumulated);
    const Py_ssize_t others = PyDict_Size(mark->hooks) - PyMapping_HasKey(mark->hooks, (PyObject *)mark);
    const int is_new = early == Py_None && is_free && others == 0;
    int done = late == Py_None && (is_new || early == mark->hooks);
    Py_DECREF(early);
    Py_DECREF(late);
    if (done && (put_in(mark) < 0 || (is_new && give(parameter, mark->hooks) < 0))) done = -1;
    return done;
}

static int put_late(Mark *mark, PyObject *parameter) {
    PyObject *hooks = kept(parameter, &known.accumulated);
    Py_DECREF(hooks);
    if (hooks != mark->hooks) return 0;
    return put_in(mark) < 0 ? -1 : 1;
}

/* Whether it was done: where the parameter still is one whose gradient is noted, and keeps its hooks where it did. */
static int put(const Passes *self, Mark *mark, int is_free) {
    PyObject *parameter = mark->hooks == NULL ? NULL : parameter_of(self, mark->index);
    if (parameter == NULL) return 0;
    int done = is_true(ask(parameter, &known.requires_grad)) && is_true(ask(parameter, &known.is_leaf));
    if (done) done = mark->is_early ? put_early(mark, parameter, is_free) : put_late(mark, parameter);
    Py_DECREF(parameter);
    return done;
}

/* Takes a dictionary away that holds an early mark and nothing else; the mark stays in it. */
static int take_away(const Passes *self, Mark *mark) {
    PyObject *parameter = PyDict_Size(mark->hooks) == 1 ? parameter_of(self, mark->index) : NULL;
    if (parameter == NULL) return 0;
    PyObject *hooks = kept(parameter, &known.hooks);
    const int is_ours = hooks == mark->hooks, failed = is_ours && give(parameter, Py_None) < 0;
    Py_DECREF(hooks);
    Py_DECREF(parameter);
    return failed ? -1 : is_ours;
}

static int take_off(const Passes *self, Mark *mark, int is_free) {
    if (mark->hooks == NULL || !PyMapping_HasKey(mark->hooks, (PyObject *)mark)) return 0;
    const int is_away = mark->is_early && is_free ? take_away(self, mark) : 0;
    return is_away ? is_away : PyObject_DelItem(mark->hooks, (PyObject *)mark);
}

static int take_off_all(const Passes *self, PyObject *marks, Py_ssize_t count, int is_free) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *mark = PyList_GetItem(marks, i);
        if (Py_TYPE(mark) == mark_type && take_off(self, (Mark *)mark, is_free) < 0) return -1;
    }
    return 0;
}

/* put_back(marks, free) -> whether all of them are among the hooks of their parameters again; if one does not fit, none
   is. Free: no backward pass is running, which may be looking at the hooks of a parameter. */
PyObject *passes_put_back(PyObject *object, PyObject *args) {
    PyObject *marks;
    int is_free, done = 1;
    Py_ssize_t count = 0;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &marks, &is_free)) return NULL;
    for (; done > 0 && count < PyList_Size(marks); count++) {
        PyObject *mark = PyList_GetItem(marks, count);
        done = Py_TYPE(mark) == mark_type ? put((Passes *)object, (Mark *)mark, is_free) : 0;
    }
    forgive();
    if (done < 1 && take_off_all((Passes *)object, marks, count, is_free) < 0) return NULL;
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done > 0);
}

PyObject *passes_take_off(PyObject *object, PyObject *args) {
    PyObject *marks;
    int is_free;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &marks, &is_free)) return NULL;
    if (take_off_all((Passes *)object, marks, PyList_Size(marks), is_free) < 0) return NULL;
    Py_RETURN_NONE;
}

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

/* Whether no other hook is called at the same place, which may change the gradient and not show it. */
static int is_alone(const Mark *self) { return self->hooks != NULL && PyDict_Size(self->hooks) == 1; }

static PyObject *mark_call(PyObject *object, PyObject *args, PyObject *kwargs) {
    Mark *self = (Mark *)object;
    PyObject *given = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL; /* the parameter, or its gradient */
    (void)kwargs;
    if (given == Py_None) Py_RETURN_NONE;
    const int found = given == NULL ? -1 : note(self->passes, self->index, self->is_early);
    if (found < 0) return NULL;
    if (found && self->passes->is_summing && is_alone(self)) {
        if (self->is_early)
            sum_ahead(self->passes, self->index, given);
        else
            sum_up(self->passes, self->index, given);
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* So named by torch.utils.hooks.unserializable_hook: nobody is to be warned who sends a parameter to another process. */
static struct PyMemberDef MARK_MEMBERS[] = {
    {"__torch_unserializable__", T_INT, offsetof(Mark, is_early), READONLY, "it is not copied"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot MARK_SLOTS[] = {{Py_tp_dealloc, mark_end},       {Py_tp_call, mark_call},   {Py_tp_traverse, mark_visit},
                                   {Py_tp_members, MARK_MEMBERS}, {Py_tp_clear, mark_clear}, {0, NULL}};
static PyType_Spec MARK = {"keelscope._kernel.Mark", sizeof(Mark), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, MARK_SLOTS};

int add_marks(PyObject *module) {
    mark_type = add_type(module, "Mark", &MARK);
    return mark_type != NULL ? 0 : -1;
}
