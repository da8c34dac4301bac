/* The node behind a tensor, and hooks on its gradient. */

#include "kernel.h"

PyObject *node_of(PyObject *tensor) {
    PyObject *node = ask(tensor, &known.grad_fn);
    if (node == Py_None) Py_CLEAR(node);
    return node;
}

PyObject *hook_plainly(PyObject *tensor, PyObject *hook) {
    PyObject *node = node_of(tensor), *there = ask(tensor, &known.hooks);
    PyObject *hooks = NULL, *done = NULL;
    if (node != NULL && there == Py_None && (PyObject *)Py_TYPE(tensor) == torch.tensor) {
        hooks = PyObject_CallNoArgs(known.ordered);
        if (hooks != NULL && PyObject_SetItem(hooks, hook, hook) == 0 &&
            PyObject_SetAttr(tensor, known.hooks.name, hooks) == 0) {
            done = PyObject_CallMethodObjArgs(node, known.register_hooks, tensor, NULL);
        }
    }
    if (done == NULL) Py_CLEAR(node);
    Py_XDECREF(done);
    Py_XDECREF(hooks);
    Py_XDECREF(there);
    return node;
}
