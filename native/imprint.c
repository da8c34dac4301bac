/* Walks the autograd graph of a forward beside one that was read before, see keelscope.topology.imprint. */

#include "kernel.h"

static struct {
    PyObject *next_functions, *number, *variable, *name, *metadata, *shape, *dtype;
} words;

typedef struct {
    const int32_t *edges;   /* per node the number of its inputs, then each as node (-1: none) and output */
    const int64_t *numbers; /* per node its place in the order of execution */
    PyObject *kinds;        /* per node its type */
    PyObject *marks; /* per node None; of a leaf a reference to its parameter, or False for data; or the name of the node */
    Py_ssize_t size;
    int64_t origin;
} Expected;

/* Notes that a node stands at a place; 0 if another one does. */
static int put(PyObject **found, Py_ssize_t size, int32_t place, PyObject *node) {
    if (place < 0 || place >= size) return 0;
    if (found[place] == NULL) found[place] = Py_NewRef(node);
    return found[place] == node;
}

static int is_number(PyObject *node, int64_t expected) {
    PyObject *number = PyObject_CallMethodObjArgs(node, words.number, NULL);
    const long long found = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    return !PyErr_Occurred() && found == expected;
}

static int is_leaf(PyObject *node, PyObject *mark) {
    PyObject *variable = PyObject_GetAttr(node, words.variable);
    int is_same = variable != NULL;
    if (is_same && mark == Py_False) is_same = PyObject_IsInstance(variable, torch.parameter) == 0;
    else if (is_same) is_same = PyWeakref_GetObject(mark) == variable;
    Py_XDECREF(variable);
    return is_same;
}

static int has_name(PyObject *node, PyObject *name) {
    PyObject *found = PyObject_CallMethodObjArgs(node, words.name, NULL);
    const int is_same = found != NULL && PyUnicode_Compare(found, name) == 0;
    Py_XDECREF(found);
    return is_same;
}

static int is_like(const Expected *known, Py_ssize_t place, PyObject *node) {
    PyObject *mark = PyTuple_GetItem(known->marks, place);
    if ((PyObject *)Py_TYPE(node) != PyTuple_GetItem(known->kinds, place)) return 0;
    if (mark != Py_None && !PyUnicode_Check(mark)) return is_leaf(node, mark);
    if (mark != Py_None && !has_name(node, mark)) return 0;
    return is_number(node, known->origin + known->numbers[place]);
}

/* Notes the nodes that a node takes its inputs from; moves on to the edges of the node before. */
static int follow(const Expected *known, PyObject **found, PyObject *node, const int32_t *edges) {
    PyObject *sources = PyObject_GetAttr(node, words.next_functions);
    int is_same = sources != NULL && PyTuple_Size(sources) == edges[0];
    for (Py_ssize_t i = 0; is_same && i < edges[0]; i++) {
        PyObject *edge = PyTuple_GetItem(sources, i), *source = PyTuple_GetItem(edge, 0);
        const int32_t place = edges[1 + 2 * i], output = edges[2 + 2 * i];
        if (place < 0 || source == Py_None) is_same = place < 0 && source == Py_None;
        else is_same = PyLong_AsLong(PyTuple_GetItem(edge, 1)) == output && put(found, known->size, place, source);
    }
    Py_XDECREF(sources);
    return is_same;
}

/* A leaf takes no inputs. */
static int is_end(const Expected *known, Py_ssize_t place, const int32_t *edges) {
    PyObject *mark = PyTuple_GetItem(known->marks, place);
    return edges[0] == 0 && mark != Py_None && !PyUnicode_Check(mark);
}

static int walk(const Expected *known, PyObject *starts, const int32_t *places, PyObject **found) {
    const int32_t *edges = known->edges;
    for (Py_ssize_t i = 0; i < PyList_Size(starts); i++) {
        if (places[i] >= 0 && !put(found, known->size, places[i], PyList_GetItem(starts, i))) return 0;
    }
    for (Py_ssize_t place = known->size - 1; place >= 0; place--) { /* from the output side */
        PyObject *node = found[place];
        if (node == NULL || !is_like(known, place, node)) return 0;
        if (!is_end(known, place, edges) && !follow(known, found, node, edges)) return 0;
        edges += 1 + 2 * edges[0];
    }
    return 1;
}

static PyObject *as_list(PyObject **found, Py_ssize_t size) {
    PyObject *nodes = PyList_New(size);
    for (Py_ssize_t i = 0; nodes != NULL && i < size; i++) PyList_SetItem(nodes, i, Py_NewRef(found[i]));
    return nodes;
}

/* same_nodes(starts, places, edges, numbers, kinds, marks, origin) -> nodes in the order that is known; None if another
   graph is behind the starts. Edges are those of the last node first. */
PyObject *same_nodes(PyObject *module, PyObject *args) {
    Expected known;
    PyObject *starts, *nodes = NULL, **found;
    const char *places, *edges, *numbers;
    Py_ssize_t size[3];
    long long origin;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!y#y#y#O!O!L", &PyList_Type, &starts, &places, &size[0], &edges, &size[1], &numbers,
                          &size[2], &PyTuple_Type, &known.kinds, &PyTuple_Type, &known.marks, &origin))
        return NULL;
    known.size = PyTuple_Size(known.kinds);
    known.edges = (const int32_t *)(const void *)edges;
    known.numbers = (const int64_t *)(const void *)numbers;
    known.origin = origin;
    if (PyTuple_Size(known.marks) != known.size || size[2] != known.size * (Py_ssize_t)sizeof(int64_t) ||
        size[0] != PyList_Size(starts) * (Py_ssize_t)sizeof(int32_t)) {
        PyErr_SetString(PyExc_ValueError, "same_nodes() takes as many places as starts, and as many numbers as kinds");
        return NULL;
    }
    if (words.name == NULL) {
        words.next_functions = PyUnicode_InternFromString("next_functions");
        words.number = PyUnicode_InternFromString("_sequence_nr");
        words.variable = PyUnicode_InternFromString("variable");
        words.name = PyUnicode_InternFromString("name");
    }
    found = PyMem_Calloc((size_t)known.size + 1, sizeof *found);
    if (found == NULL) return PyErr_NoMemory();
    if (walk(&known, starts, (const int32_t *)(const void *)places, found)) nodes = as_list(found, known.size);
    for (Py_ssize_t i = 0; i < known.size; i++) Py_XDECREF(found[i]);
    PyMem_Free(found);
    if (nodes != NULL) return nodes;
    PyErr_Clear();
    Py_RETURN_NONE;
}

static int is_offset(PyObject *number, long long origin, PyObject *expected) {
    return PyLong_AsLongLong(number) - origin == PyLong_AsLongLong(expected);
}

/* None is expected of a call whose beginning is not heard, -1 in the row. */
static int is_time(PyObject *number, long long origin, PyObject *expected) {
    return expected == Py_None ? PyLong_AsLongLong(number) < 0 : is_offset(number, origin, expected);
}

/* A row as path, module, (start, end), first, middle, last; expected without the module, and counted from the origin. */
static int is_same_call(PyObject *row, PyObject *expected, PyObject *module, long long origin) {
    PyObject *span = PyTuple_GetItem(row, 2), *path = PyTuple_GetItem(row, 0), *other = PyTuple_GetItem(expected, 0);
    if (span == NULL || PyWeakref_GetObject(module) != PyTuple_GetItem(row, 1)) return 0;
    if (path != other && PyUnicode_Compare(path, other) != 0) return 0;
    for (Py_ssize_t i = 0; i < 2; i++) {
        if (!is_time(PyTuple_GetItem(span, i), origin, PyTuple_GetItem(expected, 1 + i))) return 0;
        if (!is_offset(PyTuple_GetItem(row, 4 + i), 0, PyTuple_GetItem(expected, 4 + i))) return 0;
    }
    return is_offset(PyTuple_GetItem(row, 3), 0, PyTuple_GetItem(expected, 3));
}

/* same_calls(rows, expected, modules, origin) -> whether the same modules were called in the same way */
PyObject *same_calls(PyObject *module, PyObject *args) {
    PyObject *rows, *expected, *modules;
    long long origin;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!L", &PyList_Type, &rows, &PyList_Type, &expected, &PyList_Type, &modules, &origin))
        return NULL;
    const Py_ssize_t size = PyList_Size(rows);
    int is_same = PyList_Size(expected) == size && PyList_Size(modules) == size;
    for (Py_ssize_t i = 0; is_same && i < size; i++)
        is_same = is_same_call(PyList_GetItem(rows, i), PyList_GetItem(expected, i), PyList_GetItem(modules, i), origin);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_same);
}

static int has(PyObject *owner, PyObject *name, PyObject *expected) {
    if (expected == Py_None) return 1;
    PyObject *found = PyObject_GetAttr(owner, name);
    if (found != NULL && PyTuple_Check(expected) && !PyTuple_Check(found)) {
        PyObject *list = found;
        found = PySequence_Tuple(list);
        Py_DECREF(list);
    }
    const int is_same = found != NULL && (found == expected || PyObject_RichCompareBool(found, expected, Py_EQ) == 1);
    Py_XDECREF(found);
    return is_same;
}

static int is_tensor(PyObject *node, PyObject *wanted) {
    PyObject *all = node == NULL ? NULL : PyObject_GetAttr(node, words.metadata);
    PyObject *one = all == NULL ? NULL : PySequence_GetItem(all, PyLong_AsSsize_t(PyTuple_GetItem(wanted, 1)));
    const int is_same = one != NULL && has(one, words.shape, PyTuple_GetItem(wanted, 2)) &&
                        has(one, words.dtype, PyTuple_GetItem(wanted, 3));
    Py_XDECREF(one);
    Py_XDECREF(all);
    PyErr_Clear();
    return is_same;
}

/* Whether a tensor was kept and nothing written into it since. */
static int is_unwritten(PyObject *tensor, PyObject *then) {
    if (tensor == NULL || then == NULL || tensor == Py_None) return 0;
    PyObject *version = ask(tensor, &known.version);
    const int is_same = version != NULL && PyObject_RichCompareBool(version, then, Py_EQ) == 1;
    Py_XDECREF(version);
    return is_same;
}

/* Whether what a module took or gave, which is asked in place of its node, has a shape and type. */
static int is_heard(PyObject *tensors, PyObject *versions, int32_t position, PyObject *wanted) {
    PyObject *tensor = position < 0 ? NULL : PyList_GetItem(tensors, position);
    if (tensor == NULL || (PyObject *)Py_TYPE(tensor) != torch.tensor) return 0;
    return is_unwritten(tensor, PyList_GetItem(versions, position)) && has(tensor, torch.shape.name, PyTuple_GetItem(wanted, 2)) &&
           has(tensor, torch.dtype.name, PyTuple_GetItem(wanted, 3));
}

/* other_tensors(nodes, wanted, tensors, versions, positions): wanted as place of a node, output, shape and type, or None;
   packed positions of the wanted among kept tensors, -1 of others -> places among the wanted of those that are not as
   wanted, or cannot be told here. */
PyObject *other_tensors(PyObject *module, PyObject *args) {
    PyObject *nodes, *wanted, *tensors, *versions, *left = PyList_New(0);
    const char *packed;
    Py_ssize_t size;
    (void)module;
    if (left == NULL || !PyArg_ParseTuple(args, "O!O!O!O!y#", &PyList_Type, &nodes, &PyList_Type, &wanted, &PyList_Type,
                                          &tensors, &PyList_Type, &versions, &packed, &size))
        return NULL;
    const int32_t *positions = (const int32_t *)(const void *)packed;
    if (size != PyList_Size(wanted) * (Py_ssize_t)sizeof *positions) {
        PyErr_SetString(PyExc_ValueError, "other_tensors() takes as many positions as are wanted");
        return NULL;
    }
    if (words.dtype == NULL) {
        words.metadata = PyUnicode_InternFromString("_input_metadata");
        words.shape = PyUnicode_InternFromString("shape");
        words.dtype = PyUnicode_InternFromString("dtype");
    }
    for (Py_ssize_t i = 0; i < PyList_Size(wanted); i++) {
        PyObject *one = PyList_GetItem(wanted, i);
        if (is_heard(tensors, versions, positions[i], one)) continue;
        PyErr_Clear();
        if (is_tensor(PyList_GetItem(nodes, PyLong_AsSsize_t(PyTuple_GetItem(one, 0))), one)) continue;
        PyErr_Clear();
        PyObject *place = PyLong_FromSsize_t(i);
        if (place == NULL || PyList_Append(left, place) < 0) return NULL;
        Py_DECREF(place);
    }
    return left;
}

/* kept_tensors(tensors, versions, positions) -> those at packed positions; None where one was written into since, or none is
   kept */
PyObject *kept_tensors(PyObject *module, PyObject *args) {
    PyObject *tensors, *versions, *found;
    const char *packed;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!y#", &PyList_Type, &tensors, &PyList_Type, &versions, &packed, &size)) return NULL;
    const int32_t *positions = (const int32_t *)(const void *)packed;
    const Py_ssize_t count = size / (Py_ssize_t)sizeof *positions;
    int is_same = (found = PyList_New(count)) != NULL;
    for (Py_ssize_t i = 0; is_same && i < count; i++) {
        PyObject *tensor = PyList_GetItem(tensors, positions[i]);
        is_same = is_unwritten(tensor, PyList_GetItem(versions, positions[i]));
        if (is_same) PyList_SetItem(found, i, Py_NewRef(tensor));
    }
    if (is_same) return found;
    Py_XDECREF(found);
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* same_numbers(nodes, wanted): wanted as place of a node, name of an attribute and number -> whether all are kept */
PyObject *same_numbers(PyObject *module, PyObject *args) {
    PyObject *nodes, *wanted;
    int is_same = 1;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &nodes, &PyList_Type, &wanted)) return NULL;
    for (Py_ssize_t i = 0; is_same && i < PyList_Size(wanted); i++) {
        PyObject *one = PyList_GetItem(wanted, i), *node = PyList_GetItem(nodes, PyLong_AsSsize_t(PyTuple_GetItem(one, 0)));
        is_same = node != NULL && has(node, PyTuple_GetItem(one, 1), PyTuple_GetItem(one, 2));
    }
    PyErr_Clear();
    return PyBool_FromLong(is_same);
}
