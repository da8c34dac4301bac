/* What a model consists of, as addresses side by side, see keelscope.changes.Tree. */

#include "kernel.h"

/* Written side by side, or compared with those that were written before. */
typedef struct {
    const void **all;
    size_t count, room;
    const char *known;
    size_t expected;
    int is_other;
} Addresses;

static PyObject *children, *parameters; /* names */

static int compare(Addresses *found, const void *address) {
    const size_t at = found->count++;
    found->is_other = at >= found->expected || memcmp(found->known + at * sizeof address, &address, sizeof address) != 0;
    return !found->is_other;
}

static int add(Addresses *found, const void *address) {
    if (found->known != NULL) return compare(found, address);
    if (found->count == found->room) {
        const size_t room = 2 * found->room + 64;
        const void **more = PyMem_Realloc((void *)found->all, room * sizeof *more);
        if (more == NULL) return 0;
        found->all = more;
        found->room = room;
    }
    found->all[found->count++] = address;
    return 1;
}

static PyObject *packed(Addresses *found, int done) {
    const Py_ssize_t size = (Py_ssize_t)(found->count * sizeof *found->all);
    PyObject *bytes = done ? PyBytes_FromStringAndSize((const char *)found->all, size) : NULL;
    PyMem_Free((void *)found->all);
    forgive();
    if (bytes != NULL || PyErr_Occurred()) return bytes;
    Py_RETURN_NONE;
}

/* Whether all that was added is what was known, and all of that. */
static PyObject *answer(const Addresses *found, int done) {
    forgive();
    if (PyErr_Occurred()) return NULL;
    if (!done && !found->is_other) Py_RETURN_NONE;
    return PyBool_FromLong(done && found->count == found->expected);
}

/* How many values a dictionary has, and their addresses; 0 where there is no such dictionary. */
static int add_values(Addresses *found, PyObject *attributes, PyObject *name) {
    PyObject *values = PyDict_GetItemWithError(attributes, name), *key, *value;
    Py_ssize_t at = 0;
    if (values == NULL || !PyDict_CheckExact(values)) return 0;
    int done = add(found, (const void *)PyDict_Size(values));
    while (done && PyDict_Next(values, &at, &key, &value)) done = add(found, value);
    return done;
}

static int add_module(Addresses *found, PyObject *module) {
    PyObject *attributes = module == NULL ? NULL : PyObject_GenericGetDict(module, NULL); /* no lookup by the class */
    const int done = attributes != NULL && add_values(found, attributes, children) &&
                     add_values(found, attributes, parameters);
    Py_XDECREF(attributes);
    return done;
}

static int add_modules(Addresses *found, PyObject *modules) {
    if (children == NULL) children = PyUnicode_InternFromString("_modules");
    if (parameters == NULL) parameters = PyUnicode_InternFromString("_parameters");
    int done = PyList_Check(modules) && children != NULL && parameters != NULL;
    for (Py_ssize_t i = 0; done && i < PyList_Size(modules); i++) done = add_module(found, PyList_GetItem(modules, i));
    return done;
}

static int add_objects(Addresses *found, PyObject *objects) {
    int done = PyList_Check(objects);
    for (Py_ssize_t i = 0; done && i < PyList_Size(objects); i++) done = add(found, PyList_GetItem(objects, i));
    return done;
}

/* tree_of([module]) -> packed addresses of the children and parameters of each; None where only Python can tell */
PyObject *tree_of(PyObject *module, PyObject *modules) {
    Addresses found = {0};
    (void)module;
    const int done = add_modules(&found, modules);
    return packed(&found, done);
}

/* identities([object]) -> packed addresses */
PyObject *identities(PyObject *module, PyObject *objects) {
    Addresses found = {0};
    (void)module;
    const int done = add_objects(&found, objects);
    return packed(&found, done);
}

static PyObject *is_same(PyObject *args, int (*add_all)(Addresses *, PyObject *)) {
    Addresses found = {0};
    PyObject *list;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "Oy#", &list, &found.known, &size)) return NULL;
    found.expected = (size_t)size / sizeof(void *);
    const int done = add_all(&found, list);
    return answer(&found, done);
}

/* is_tree([module], packed), are_identities([object], packed) -> whether the other would give that; None as there */
PyObject *is_tree(PyObject *module, PyObject *args) {
    (void)module;
    return is_same(args, add_modules);
}

PyObject *are_identities(PyObject *module, PyObject *args) {
    (void)module;
    return is_same(args, add_objects);
}
