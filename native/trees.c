/* Whether a model still consists of the modules and parameters it was made of, see keelscope.changes.Tree. */

#include "kernel.h"

static PyObject *children, *parameters; /* names */

/* 1 if the values of a dictionary are what a tuple says from a place on, which moves behind them; -1 of no dict. */
static int is_as_known(PyObject *owner, PyObject *name, PyObject *known, Py_ssize_t *place, int by_number) {
    PyObject *values = PyObject_GetAttr(owner, name), *key, *value;
    Py_ssize_t at = 0;
    int same = values == NULL || !PyDict_CheckExact(values) ? -1 : 1;
    while (same == 1 && PyDict_Next(values, &at, &key, &value)) {
        PyObject *there = *place < PyTuple_Size(known) ? PyTuple_GetItem(known, (*place)++) : NULL;
        same = there != NULL && value == (by_number ? (PyObject *)PyLong_AsVoidPtr(there) : there);
    }
    Py_XDECREF(values);
    return same;
}

/* tree_changed([(module, *children, *numbers of parameters)]) -> whether; None where only Python can tell */
PyObject *tree_changed(PyObject *module, PyObject *entries) {
    (void)module;
    if (children == NULL) children = PyUnicode_InternFromString("_modules");
    if (parameters == NULL) parameters = PyUnicode_InternFromString("_parameters");
    for (Py_ssize_t i = 0; PyList_Check(entries) && i < PyList_Size(entries); i++) {
        PyObject *known = PyList_GetItem(entries, i), *owner = PyTuple_GetItem(known, 0);
        Py_ssize_t place = 1;
        if (owner == NULL) return NULL;
        int same = is_as_known(owner, children, known, &place, 0);
        if (same == 1) same = is_as_known(owner, parameters, known, &place, 1);
        if (PyErr_Occurred()) return NULL;
        if (same < 0) Py_RETURN_NONE;
        if (!same || place != PyTuple_Size(known)) Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}
