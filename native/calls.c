/* Notes a module call by the tensors it took and gave, as keelscope.topology.listener does, for the usual calls: tensors in,
   one tensor out. Everything else is left to Python, before anything is noted. Puts hooks on modules and takes them off, those that
   keelscope.placements keeps too. */

#include "kernel.h"

#define MOST 6 /* tensors of a call */

static struct {
    PyObject *before, *after, *with_kwargs, *module, *is_refused, *begun, *passed; /* names */
    PyObject *unheard; /* when a call began of which only the end is heard */
} words;

typedef struct {
    PyObject *tensor, *node, *slot, *version; /* the first is borrowed */
} Noted;

static int get_ready(void) {
    if (words.unheard != NULL) return 1;
    words.before = PyUnicode_InternFromString("_forward_pre_hooks");
    words.after = PyUnicode_InternFromString("_forward_hooks");
    words.with_kwargs = PyUnicode_InternFromString("_forward_hooks_with_kwargs");
    words.module = PyUnicode_InternFromString("module");
    words.is_refused = PyUnicode_InternFromString("is_refused");
    words.begun = PyUnicode_InternFromString("hears_beginning");
    words.passed = PyUnicode_InternFromString("passed");
    words.unheard = PyLong_FromLong(-1);
    return words.unheard != NULL;
}

/* 1: noted; 0: needs no gradient; -1: Python must look. */
static int look_at(PyObject *tensor, Noted *noted) {
    if ((PyObject *)Py_TYPE(tensor) != torch.tensor) return tensor == Py_None ? 0 : -1;
    if (!is_true(ask(tensor, &known.requires_grad))) return 0;
    if (is_true(ask(tensor, &known.is_meta))) return -1;
    noted->tensor = tensor;
    noted->node = ask(tensor, &known.grad_fn);
    noted->slot = ask(tensor, &known.slot);
    noted->version = ask(tensor, &known.version);
    const int is_known = noted->node != NULL && noted->node != Py_None && noted->slot != NULL && noted->version != NULL;
    return is_known ? 1 : -1;
}

static void let_go(Noted *noted, int count) {
    for (int i = 0; i < count; i++) {
        Py_XDECREF(noted[i].node);
        Py_XDECREF(noted[i].slot);
        Py_XDECREF(noted[i].version);
    }
}

/* The output first, then the inputs; how many, or -1 where Python must look. Whatever was taken is to be let go of. */
static int look_at_all(PyObject *args, PyObject *output, Noted *noted) {
    int count = 0;
    if (!PyTuple_Check(args) || PyTuple_Size(args) >= MOST) return -1;
    for (Py_ssize_t i = -1; i < PyTuple_Size(args); i++) {
        const int found = look_at(i < 0 ? output : PyTuple_GetItem(args, i), &noted[count]);
        if (found < 0 || (i < 0 && found == 0)) return -1;
        count += found;
    }
    return count;
}

static int add(PyObject *const *lists, const Noted *noted) {
    if (PyList_Append(lists[0], noted->node) < 0 || PyList_Append(lists[1], noted->slot) < 0) return -1;
    return PyList_Append(lists[2], noted->tensor) < 0 || PyList_Append(lists[3], noted->version) < 0 ? -1 : 0;
}

/* Of a listener, in this order: what tells sequence numbers; its open calls, as path and number; the lists that calls are
   noted in; how many of the open calls are around the first call of a forward (-1: that has not ended), and whether a step
   is yet to begin; the paths of wrappers; how many calls are noted at most; the paths of modules of which only the end is
   heard, and of those that ran inside no other; the hook on what these give, and keelscope.unwinding.Breaks. */
enum { NUMBER, OPEN, CALLS, LISTS, FLOOR = LISTS + 4, WRAPPERS, MOST_CALLS, ENDS, OUTERMOST, BEGINS, BREAKS, PARTS };

static PyObject *part(PyObject *listener, int which) { return PyTuple_GetItem(listener, which); }

static PyObject *path_of(PyObject *open, Py_ssize_t index) { return PyTuple_GetItem(PyList_GetItem(open, index), 0); }

static int set_floor(PyObject *listener, Py_ssize_t floor) {
    PyObject *number = PyLong_FromSsize_t(floor);
    return number == NULL ? -1 : PyList_SetItem(part(listener, FLOOR), 0, number);
}

/* As Listener.before; 0: Python is to forget what was heard before. */
static int starts(PyObject *listener, PyObject *path) {
    PyObject *open = part(listener, OPEN), *number = PyObject_CallNoArgs(part(listener, NUMBER));
    int is_again = PyList_Size(open) == 0;
    for (Py_ssize_t i = 0; !is_again && i < PyList_Size(open); i++)
        is_again = PyUnicode_Compare(path_of(open, i), path) == 0;
    if (is_again && PyList_GetItem(part(listener, FLOOR), 1) == Py_True) {
        Py_XDECREF(number);
        return 0;
    }
    PyObject *entry = number == NULL ? NULL : PyTuple_Pack(2, path, number);
    const int failed = entry == NULL || (is_again && set_floor(listener, -1) < 0) || PyList_Append(open, entry) < 0;
    Py_XDECREF(entry);
    Py_XDECREF(number);
    return failed ? -1 : 1;
}

/* As Listener.is_inside, after a call has ended; -1 with an exception. */
static int is_inside(PyObject *listener) {
    PyObject *open = part(listener, OPEN);
    Py_ssize_t floor = PyLong_AsSsize_t(PyList_GetItem(part(listener, FLOOR), 0));
    int found = 0;
    if (floor < 0 && set_floor(listener, floor = PyList_Size(open)) < 0) return -1;
    for (; found == 0 && floor < PyList_Size(open); floor++) {
        const int is_wrapper = PySet_Contains(part(listener, WRAPPERS), path_of(open, floor));
        found = is_wrapper < 0 ? -1 : !is_wrapper;
    }
    return found;
}

/* When the latest call began, borrowed; NULL where it is another call that has ended, or no more are noted. */
static PyObject *began(PyObject *listener, PyObject *path) {
    PyObject *open = part(listener, OPEN);
    const Py_ssize_t last = PyList_Size(open) - 1;
    if (PyList_Size(part(listener, CALLS)) >= PyLong_AsSsize_t(part(listener, MOST_CALLS))) return NULL;
    if (PySet_Contains(part(listener, ENDS), path) > 0) return words.unheard;
    PyObject *entry = last < 0 ? NULL : PyList_GetItem(open, last);
    return entry != NULL && PyTuple_GetItem(entry, 0) == path ? PyTuple_GetItem(entry, 1) : NULL;
}

static int note(PyObject *listener, PyObject *const *call, PyObject *start, const Noted *noted, int count) {
    PyObject *open = part(listener, OPEN), *lists[4];
    for (int i = 0; i < 4; i++) lists[i] = part(listener, LISTS + i);
    const Py_ssize_t first = PyList_Size(lists[0]), last = PyList_Size(open) - 1;
    PyObject *row = NULL, *number = PyObject_CallNoArgs(part(listener, NUMBER));
    if (number != NULL) row = Py_BuildValue("OO(ON)nnn", call[0], call[1], start, number, first, first + 1, first + count);
    int failed = row == NULL || PyList_Append(part(listener, CALLS), row) < 0;
    for (int i = 0; !failed && i < count; i++) failed = add(lists, &noted[i]) < 0;
    Py_XDECREF(row);
    if (!failed && start != words.unheard) failed = PyList_SetSlice(open, last, last + 1, NULL) < 0;
    return failed ? -1 : 1;
}

/* Whether a tensor has a hook; the last module and the model give the same. */
static int is_hooked(PyObject *tensor, PyObject *hook) {
    PyObject *hooks = ask(tensor, &known.hooks);
    const int found = hooks != NULL && hooks != Py_None && PyMapping_HasKey(hooks, hook);
    Py_XDECREF(hooks);
    return found;
}

/* A call inside no other has ended, as keelscope.structure.Look.ended; 2: its output is left to Python. */
static int end_outermost(PyObject *listener, PyObject *path, PyObject *output) {
    PyObject *told = NULL;
    if (PySet_Add(part(listener, OUTERMOST), path) < 0) return -1;
    PyObject *hook = part(listener, BEGINS);
    if (known.register_hooks != NULL && is_hooked(output, hook)) return 1;
    PyObject *node = hook == Py_None || known.register_hooks == NULL ? NULL : hook_plainly(output, hook);
    if (node != NULL) told = PyObject_CallMethodObjArgs(part(listener, BREAKS), words.passed, node, NULL);
    forgive();
    Py_XDECREF(told);
    Py_XDECREF(node);
    return PyErr_Occurred() ? -1 : node != NULL ? 1 : 2;
}

/* 1: noted; 2: noted, and no other is running; 0: left to Python; -1 with an exception. */
static int ends(PyObject *listener, PyObject *const *call, PyObject *output) {
    Noted noted[MOST + 1];
    memset(noted, 0, sizeof noted);
    PyObject *start = began(listener, call[0]);
    const int count = start == NULL ? -1 : look_at_all(call[2], output, noted);
    int found = count > 0 ? note(listener, call, start, noted, count) : 0;
    let_go(noted, MOST + 1);
    if (found == 0) PyErr_Clear();
    if (found <= 0) return found;
    const int inside = is_inside(listener);
    return inside ? inside : end_outermost(listener, call[0], output);
}

/* hear_call(listener, path, module, args, others): what a hook before or after a module gets; the answer of `ends`, and 1
   where a call starts. Calls in backward passes are left to Python. */
PyObject *hear_call(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    (void)module;
    if (given != 5 || !get_ready() || !PyTuple_Check(arguments[0]) || PyTuple_Size(arguments[0]) != PARTS)
        return PyErr_Format(PyExc_TypeError, "hear_call() takes a listener and a call");
    PyObject *listener = arguments[0], *others = arguments[4];
    PyObject *task = PyObject_CallNoArgs(known.graph_task);
    const int is_ordinary = task != NULL && PyLong_AsLongLong(task) == -1;
    const Py_ssize_t more = PyTuple_Size(others);
    int found = 0;
    Py_XDECREF(task);
    if (is_ordinary && more == 0) found = starts(listener, arguments[1]);
    else if (is_ordinary && more == 2 && PyDict_Size(PyTuple_GetItem(others, 0)) == 0)
        found = ends(listener, arguments + 1, PyTuple_GetItem(others, 1));
    forgive();
    return PyErr_Occurred() ? NULL : PyLong_FromLong(found < 0 ? 0 : found);
}

static int set(PyObject *module, PyObject *name, PyObject *key, PyObject *value) {
    PyObject *hooks = PyObject_GetAttr(module, name);
    if (hooks == NULL) return -1;
    int done = value != NULL ? PyObject_SetItem(hooks, key, value) : PyObject_DelItem(hooks, key);
    Py_DECREF(hooks);
    if (done < 0 && value == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) { /* it is not there */
        PyErr_Clear();
        done = 0;
    }
    return done;
}

/* Under one number in the dictionaries of its module; 0, or -1 with an exception. */
static int hang(PyObject *ear, PyObject *number, int on) {
    PyObject *reference = PyObject_GetAttr(ear, words.module), *refused = PyObject_GetAttr(ear, words.is_refused);
    PyObject *module = reference == NULL ? NULL : PyWeakref_GetObject(reference);
    const int is_begun = is_true(PyObject_GetAttr(ear, words.begun));
    int failed = module == NULL || refused == NULL || PyErr_Occurred();
    if (!failed && module != Py_None && refused != Py_True) {
        Py_INCREF(module);
        failed = (is_begun && set(module, words.before, number, on ? ear : NULL) < 0) ||
                 set(module, words.after, number, on ? ear : NULL) < 0 ||
                 set(module, words.with_kwargs, number, on ? Py_True : NULL) < 0;
        Py_DECREF(module);
    }
    Py_XDECREF(reference);
    Py_XDECREF(refused);
    return failed ? -1 : 0;
}

/* hang_hooks(ears, number, on): see keelscope.ears */
PyObject *hang_hooks(PyObject *module, PyObject *args) {
    PyObject *list, *number;
    int on, failed = 0;
    (void)module;
    if (!get_ready() || !PyArg_ParseTuple(args, "O!Op", &PyList_Type, &list, &number, &on)) return NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(list); i++) failed = hang(PyList_GetItem(list, i), number, on) < 0;
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* Whether a module has other hooks than the one that is to come or to go. */
static int has_company(PyObject *module, int on) {
    PyObject *hooks = PyObject_GetAttr(module, words.after);
    const Py_ssize_t others = hooks == NULL ? -1 : PyDict_Size(hooks) - !on;
    Py_XDECREF(hooks);
    return others < 0 && PyErr_Occurred() ? -1 : others > 0;
}

/* One placement, a tuple (weak reference to a module, number, hook); 0, 1 if the order is left to Python, or -1 with an
   exception. */
static int place(PyObject *placement, int on) {
    PyObject *module = PyWeakref_GetObject(PyTuple_GetItem(placement, 0));
    PyObject *number = PyTuple_GetItem(placement, 1), *hook = PyTuple_GetItem(placement, 2);
    if (module == NULL || number == NULL || hook == NULL) return -1;
    if (module == Py_None) return 0;
    Py_INCREF(module);
    int found = has_company(module, on);
    if (found == 0 && (set(module, words.after, number, on ? hook : NULL) < 0 ||
                       set(module, words.with_kwargs, number, on ? Py_True : NULL) < 0))
        found = -1;
    Py_DECREF(module);
    return found;
}

/* place_hooks(placements, on) -> those that are left to Python; see keelscope.placements */
PyObject *place_hooks(PyObject *module, PyObject *args) {
    PyObject *list, *left;
    int on, found = 0;
    (void)module;
    if (!get_ready() || !PyArg_ParseTuple(args, "O!p", &PyList_Type, &list, &on)) return NULL;
    if ((left = PyList_New(0)) == NULL) return NULL;
    for (Py_ssize_t i = 0; found >= 0 && i < PyList_Size(list); i++) {
        PyObject *placement = PyList_GetItem(list, i);
        found = place(placement, on);
        if (found > 0) found = PyList_Append(left, placement);
    }
    if (found >= 0) return left;
    Py_DECREF(left);
    return NULL;
}
