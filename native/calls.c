/* Notes a module call by the tensors it took and gave, as keelscope.topology.listener does, for the usual calls: tensors in,
   one tensor out. Everything else is left to Python, before anything is noted. Puts hooks on modules and takes them off, those that
   keelscope.placements keeps too. */

#include "kernel.h"

#define MOST 6 /* tensors of a call */

static struct {
    PyObject *grad_fn, *slot, *version, *requires_grad, *is_meta, *before, *after, *with_kwargs, *module, *is_refused; /* names */
} words;

typedef struct {
    PyObject *tensor, *node, *slot, *version; /* the first is borrowed */
} Noted;

static int get_ready(void) {
    if (words.is_refused != NULL) return 1;
    words.grad_fn = PyUnicode_InternFromString("grad_fn");
    words.slot = PyUnicode_InternFromString("output_nr");
    words.version = PyUnicode_InternFromString("_version");
    words.requires_grad = PyUnicode_InternFromString("requires_grad");
    words.is_meta = PyUnicode_InternFromString("is_meta");
    words.before = PyUnicode_InternFromString("_forward_pre_hooks");
    words.after = PyUnicode_InternFromString("_forward_hooks");
    words.with_kwargs = PyUnicode_InternFromString("_forward_hooks_with_kwargs");
    words.module = PyUnicode_InternFromString("module");
    words.is_refused = PyUnicode_InternFromString("is_refused");
    return words.is_refused != NULL;
}

/* 1: noted; 0: needs no gradient; -1: Python must look. */
static int look_at(PyObject *tensor, Noted *noted) {
    if ((PyObject *)Py_TYPE(tensor) != torch.tensor) return tensor == Py_None ? 0 : -1;
    if (!is_true(PyObject_GetAttr(tensor, words.requires_grad))) return 0;
    if (is_true(PyObject_GetAttr(tensor, words.is_meta))) return -1;
    noted->tensor = tensor;
    noted->node = PyObject_GetAttr(tensor, words.grad_fn);
    noted->slot = PyObject_GetAttr(tensor, words.slot);
    noted->version = PyObject_GetAttr(tensor, words.version);
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

/* When the latest call began, borrowed, and forgets it; NULL where it is another call that has ended. */
static PyObject *began(PyObject *open, PyObject *path) {
    const Py_ssize_t last = PyList_Size(open) - 1;
    PyObject *entry = last < 0 ? NULL : PyList_GetItem(open, last);
    return entry != NULL && PyTuple_GetItem(entry, 0) == path ? PyTuple_GetItem(entry, 1) : NULL;
}

/* note_call(path, module, args, output, number, open, calls, nodes, slots, tensors, versions) -> whether it was noted */
PyObject *note_call(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    Noted noted[MOST + 1];
    PyObject *call = NULL, *start;
    (void)module;
    memset(noted, 0, sizeof noted);
    if (given != 11 || !get_ready()) return PyErr_Format(PyExc_TypeError, "note_call() takes 11 arguments");
    PyObject *open = arguments[5], *const *lists = arguments + 7;
    const int count = (start = began(open, arguments[0])) == NULL ? -1 : look_at_all(arguments[2], arguments[3], noted);
    if (count > 0) {
        const Py_ssize_t first = PyList_Size(lists[0]);
        PyObject *number = PyObject_CallNoArgs(arguments[4]);
        if (number != NULL) call = Py_BuildValue("OO(ON)nnn", arguments[0], arguments[1], start, number, first, first + 1, first + count);
        int failed = call == NULL || PyList_Append(arguments[6], call) < 0;
        for (int i = 0; !failed && i < count; i++) failed = add(lists, &noted[i]) < 0;
        Py_XDECREF(call);
        if (!failed) PyList_SetSlice(open, PyList_Size(open) - 1, PyList_Size(open), NULL);
    }
    let_go(noted, MOST + 1);
    if (count > 0 && PyErr_Occurred()) return NULL;
    PyErr_Clear();
    return PyBool_FromLong(count > 0);
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
    int failed = module == NULL || refused == NULL;
    if (!failed && module != Py_None && refused != Py_True) {
        Py_INCREF(module);
        failed = set(module, words.before, number, on ? ear : NULL) < 0 ||
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

/* One placement, a tuple (weak reference to a module, number, hook); 0, or -1 with an exception. */
static int place(PyObject *placement, int on) {
    PyObject *module = PyWeakref_GetObject(PyTuple_GetItem(placement, 0));
    PyObject *number = PyTuple_GetItem(placement, 1), *hook = PyTuple_GetItem(placement, 2);
    if (module == NULL || number == NULL || hook == NULL) return -1;
    if (module == Py_None) return 0;
    Py_INCREF(module);
    const int failed = set(module, words.after, number, on ? hook : NULL) < 0 ||
                       set(module, words.with_kwargs, number, on ? Py_True : NULL) < 0;
    Py_DECREF(module);
    return failed ? -1 : 0;
}

/* place_hooks(placements, on): see keelscope.placements */
PyObject *place_hooks(PyObject *module, PyObject *args) {
    PyObject *list;
    int on, failed = 0;
    (void)module;
    if (!get_ready() || !PyArg_ParseTuple(args, "O!p", &PyList_Type, &list, &on)) return NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(list); i++) failed = place(PyList_GetItem(list, i), on) < 0;
    if (failed) return NULL;
    Py_RETURN_NONE;
}
