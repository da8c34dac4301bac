/* What passes.c and marks.c share. */

#ifndef KEELSCOPE_PASSES_H
#define KEELSCOPE_PASSES_H

#include "kernel.h"

enum { NOT_SUMMED, SUMMED, SUMMED_AHEAD };

/* What is known of one parameter on one step. */
typedef struct {
    PyObject *gradient; /* borrowed, only compared */
    long long version;  /* of the gradient */
    const char *address; /* where that lay which was summed ahead */
    unsigned char is_reached, is_noted, is_stepped, is_summed, is_early;
} Standing;

typedef struct {
    PyObject_HEAD
    PyObject *owner;      /* weak reference to the object with _backward_begins() and _accumulates(index) */
    PyObject *parameters; /* weak references */
    Py_ssize_t size, first;
    long long weight; /* version of the first parameter, which an optimizer writes whose gradient stays as it is */
    Standing *standings;
    double *sums; /* [parameter, 2]: count and squares of gradients that were summed */
    long long pass, ignored;
    double seconds;
    int is_summing;
} Passes;

/* The running pass reaches a parameter: 1; 0 where the pass accumulates nothing; -1 with an exception. */
int note(Passes *passes, Py_ssize_t index, int is_early);
void sum_up(Passes *self, Py_ssize_t index, PyObject *parameter);
void sum_ahead(Passes *self, Py_ssize_t index, PyObject *gradient);
long long version_of(PyObject *tensor);

/* The parameter, new; NULL where it is gone. */
PyObject *parameter_of(const Passes *self, Py_ssize_t index);

/* Of marks.c: methods of Passes, and whether hooks are called after a parameter's accumulation; adds its type. */
PyObject *passes_mark(PyObject *object, PyObject *args);
PyObject *passes_put_back(PyObject *object, PyObject *args);
PyObject *passes_take_off(PyObject *object, PyObject *args);
int has_others(const Passes *self, Py_ssize_t index);
int add_marks(PyObject *module);

#endif
