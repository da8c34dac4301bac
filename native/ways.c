/* Hooks on the nodes around every stream tensor: what keelscope.paths.flow does in Python, by a plan made of its routes.

   A Flow is one backward pass. It adds up the parts of gradients by the way they came, and takes the sums of a sub-layer
   when all have arrived. What it cannot do is left to its owner: shortcuts that do more than hand a gradient on, and
   gradients that only torch can read. */

#include "kernel.h"

typedef struct {
    PyObject *shortcut, *branch, *carried;
    int is_unknown, is_done;
} Stream;

typedef struct {
    PyObject_HEAD
    PyObject *owner; /* weak reference to a keelscope.paths.flow.PathFlow */
    PyObject *plan;  /* bytes: the numbers below */
    const int32_t *numbers, *places; /* all records; where that of each stream tensor begins */
    Stream *streams;
    PyObject **leaving, **totals; /* by sub-layer */
    double *rows;
    unsigned char *seen;
    Py_ssize_t stream_count, size;
    int is_open, takes_sums;
} Flow;

typedef struct {
    PyObject_HEAD
    Flow *flow;
    const int32_t *record;
    int is_after;
} Passing;

/* Of a stream tensor: its hop, whether that starts here, whether it is an end, then three lists: the sub-layers that it
   enters and leaves, the stream tensors that its hop leads to. */
enum { HOP, STARTS_HERE, IS_END, LISTS };
enum { NO_HOP, PLAIN };

static PyTypeObject *passing_type;
static struct {
    PyObject *before, *after, *detach, *emit, *carry, *failed;
} words;

/* ---- The gradients of one pass */

static void put(PyObject **place, PyObject *owned) {
    PyObject *before = *place;
    *place = owned;
    Py_XDECREF(before);
}

static int plus(PyObject **total, PyObject *part) {
    PyObject *sum = *total == NULL ? Py_NewRef(part) : PyNumber_Add(*total, part);
    if (sum == NULL) return 0;
    put(total, sum);
    return 1;
}

static const int32_t *record_of(const Flow *flow, int32_t stream) { return flow->numbers + flow->places[stream]; }

static const int32_t *after_list(const int32_t *list) { return list + 1 + list[0]; }

/* Hands what shortcuts carried on to the stream tensors before. */
static int carry_on(Flow *flow, int32_t which) {
    const int32_t *record = record_of(flow, which), *targets = after_list(after_list(record + LISTS));
    Stream *stream = &flow->streams[which];
    if (record[HOP] == NO_HOP) return 1;
    PyObject *carried = stream->carried;
    int done = 1;
    stream->carried = NULL;
    if (record[HOP] != PLAIN && !stream->is_unknown) {
        PyObject *index = PyLong_FromLong(which);
        if (index != NULL) tell(flow->owner, words.carry, index, carried == NULL ? Py_None : carried, NULL);
        Py_XDECREF(index);
        done = !PyErr_Occurred();
    } else {
        for (int32_t i = 1; done && i <= targets[0]; i++) {
            if (stream->is_unknown) flow->streams[targets[i]].is_unknown = 1;
            else if (carried != NULL) done = plus(&flow->streams[targets[i]].carried, carried);
        }
    }
    Py_XDECREF(carried);
    return done;
}

static PyObject *or_none(PyObject *found) { return found == NULL ? Py_None : found; }

/* Reports a sub-layer; what did not arrive is left to the owner, as gradients that are not read here. */
static int emit(Flow *flow, int32_t position, const Stream *stream, PyObject *gradient) {
    PyObject *six[WAYS] = {flow->leaving[position], flow->totals[position], stream->shortcut, stream->branch, gradient,
                           stream->is_unknown ? NULL : stream->carried};
    int is_whole = flow->takes_sums, done = 1;
    for (int i = 0; i < WAYS; i++) {
        is_whole &= six[i] != NULL;
        Py_XINCREF(six[i]); /* sums of large tensors give the interpreter lock away, and another thread may detach */
    }
    if (is_whole && gradient_columns(six, flow->rows + (size_t)position * GRADIENT_COLUMNS)) {
        flow->seen[position] = 1;
    } else {
        PyErr_Clear();
        PyObject *several = PyTuple_New(WAYS), *index = PyLong_FromLong(position);
        for (int i = 0; several != NULL && i < WAYS; i++) PyTuple_SetItem(several, i, Py_NewRef(or_none(six[i])));
        if (several != NULL && index != NULL)
            tell(flow->owner, words.emit, index, several, stream->is_unknown ? Py_False : Py_True);
        Py_XDECREF(several);
        Py_XDECREF(index);
        done = !PyErr_Occurred();
    }
    for (int i = 0; i < WAYS; i++) Py_XDECREF(six[i]);
    put(&flow->leaving[position], NULL);
    put(&flow->totals[position], NULL);
    return done;
}

/* The whole gradient of a stream tensor. */
static int arrived(Flow *flow, int32_t which, PyObject *gradient) {
    Stream *stream = &flow->streams[which];
    if (stream->is_done || gradient == NULL) return 1;
    stream->is_done = 1;
    const int32_t *record = record_of(flow, which), *enters = record + LISTS, *leaves = after_list(enters);
    if (record[IS_END]) put(&stream->carried, Py_NewRef(gradient));
    int done = 1;
    for (int32_t i = 1; done && i <= enters[0]; i++) done = emit(flow, enters[i], stream, gradient);
    for (int32_t i = 1; done && i <= leaves[0]; i++) put(&flow->leaving[leaves[i]], Py_NewRef(gradient));
    put(&stream->shortcut, NULL);
    put(&stream->branch, NULL);
    return done && (record[HOP] == NO_HOP || record[STARTS_HERE] ? carry_on(flow, which) : 1);
}

/* A node hands over its part of a stream tensor's gradient; the reader is a stream tensor, whether it leads into a branch,
   and whether what it hands over is known from following the shortcut. */
static int hand(Flow *flow, const int32_t *reader, PyObject *part) {
    Stream *stream = &flow->streams[reader[0]];
    if (stream->is_done) return 1;
    if (reader[1]) return plus(&stream->branch, part);
    return plus(&stream->shortcut, part) && (reader[2] || plus(&stream->carried, part));
}

/* ---- Hooks. New references, or NULL where there is none; several names of one gradient stay one tensor. */

static PyObject *detached(PyObject *gradients, Py_ssize_t index) {
    PyObject *gradient = PyTuple_Check(gradients) && index < PyTuple_Size(gradients) ? PyTuple_GetItem(gradients, index) : NULL;
    if (gradient == NULL || gradient == Py_None) return NULL;
    if (!is_true(ask(gradient, &known.requires_grad)) && !PyErr_Occurred()) return Py_NewRef(gradient);
    PyErr_Clear();
    return PyObject_CallMethodObjArgs(gradient, words.detach, NULL);
}

/* Record: arrivals as stream tensor and output, starts of hops, sub-layers whose sum it is, readers. */
static int before_node(Flow *flow, const int32_t *record, PyObject *gradients) {
    PyObject *first = detached(gradients, 0);
    int done = first != NULL || !PyErr_Occurred();
    for (int32_t left = *record++; left > 0; left--, record += 2) {
        PyObject *gradient = record[1] == 0 ? Py_XNewRef(first) : detached(gradients, record[1]);
        done = done && !PyErr_Occurred() && arrived(flow, record[0], gradient);
        Py_XDECREF(gradient);
    }
    for (int32_t left = *record++; left > 0; left--, record++) done = done && carry_on(flow, *record);
    for (int32_t left = first == NULL ? 0 : *record++; left > 0; left--, record++) {
        if (flow->totals[*record] == NULL) flow->totals[*record] = Py_NewRef(first);
    }
    for (int32_t left = first == NULL ? 0 : *record++; left > 0; left--, record += 3)
        done = done && hand(flow, record, first);
    Py_XDECREF(first);
    return done;
}

/* Record: readers, and which of the node's inputs the stream tensor is. */
static int after_node(Flow *flow, const int32_t *record, PyObject *gradients) {
    int done = 1;
    for (int32_t left = *record++; done && left > 0; left--, record += 4) {
        PyObject *part = detached(gradients, record[3]);
        if (part != NULL) done = hand(flow, record, part);
        else done = !PyErr_Occurred();
        Py_XDECREF(part);
    }
    return done;
}

/* An error is handed to the owner, which says what is missing; an interrupt stays. */
static void say(Flow *flow) {
    PyObject *type, *value, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value != NULL) tell(flow->owner, words.failed, value, NULL, NULL);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

static PyObject *passing_call(PyObject *object, PyObject *args, PyObject *kwargs) {
    const Passing *hook = (Passing *)object;
    Flow *flow = hook->flow;
    PyObject *gradients = PyTuple_GetItem(args, 0);
    (void)kwargs;
    if (gradients == NULL) return NULL;
    if (!flow->is_open) Py_RETURN_NONE;
    Py_INCREF((PyObject *)flow);
    if (!(hook->is_after ? after_node : before_node)(flow, hook->record, gradients)) say(flow);
    Py_DECREF((PyObject *)flow);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static void passing_end(PyObject *self) {
    Py_XDECREF((PyObject *)((Passing *)self)->flow);
    end(self);
}

/* ---- Flow */

/* Flow(owner, plan, stream tensors, sub-layers, whether sums are taken); the plan begins with the places of the records of
   the stream tensors. */
static PyObject *flow_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *owner, *plan;
    Py_ssize_t streams, size;
    int takes;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OSnnp", &owner, &plan, &streams, &size, &takes)) return NULL;
    Flow *self = (Flow *)begin(type);
    if (self == NULL) return NULL;
    self->owner = Py_NewRef(owner);
    self->plan = Py_NewRef(plan);
    self->numbers = self->places = (const int32_t *)(const void *)PyBytes_AsString(plan);
    self->stream_count = streams;
    self->size = size;
    self->takes_sums = takes;
    self->streams = PyMem_Calloc((size_t)streams + 1, sizeof *self->streams);
    self->leaving = PyMem_Calloc((size_t)size + 1, sizeof *self->leaving);
    self->totals = PyMem_Calloc((size_t)size + 1, sizeof *self->totals);
    self->rows = PyMem_Calloc((size_t)size + 1, GRADIENT_COLUMNS * sizeof *self->rows);
    self->seen = PyMem_Calloc((size_t)size + 1, 1);
    self->is_open = 1;
    if (self->streams != NULL && self->leaving && self->totals && self->rows && self->seen)
        return (PyObject *)self;
    self->is_open = 0;
    Py_DECREF((PyObject *)self);
    return PyErr_NoMemory();
}

static void let_go(Flow *self) {
    for (Py_ssize_t i = 0; self->streams != NULL && i < self->stream_count; i++) {
        put(&self->streams[i].shortcut, NULL);
        put(&self->streams[i].branch, NULL);
        put(&self->streams[i].carried, NULL);
    }
    for (Py_ssize_t i = 0; i < self->size; i++) {
        if (self->leaving != NULL) put(&self->leaving[i], NULL);
        if (self->totals != NULL) put(&self->totals[i], NULL);
    }
}

static void flow_end(PyObject *object) {
    Flow *self = (Flow *)object;
    let_go(self);
    Py_XDECREF(self->owner);
    Py_XDECREF(self->plan);
    PyMem_Free(self->streams);
    PyMem_Free(self->leaving);
    PyMem_Free(self->totals);
    PyMem_Free(self->rows);
    PyMem_Free(self->seen);
    end(object);
}

static int put_hook(Flow *flow, PyObject *node, const int32_t *record, int is_after) {
    Passing *hook = node == NULL ? NULL : (Passing *)begin(passing_type);
    if (hook == NULL) return 0;
    hook->flow = (Flow *)Py_NewRef((PyObject *)flow);
    hook->record = record;
    hook->is_after = is_after;
    PyObject *handle = PyObject_CallMethodObjArgs(node, is_after ? words.after : words.before, (PyObject *)hook, NULL);
    Py_DECREF((PyObject *)hook);
    Py_XDECREF(handle); /* hooks go with the graph, and do nothing once the flow is closed */
    return handle != NULL;
}

/* attach(nodes, hooks): hooks are packed as node, place of its record, whether it comes after the node */
static PyObject *flow_attach(PyObject *object, PyObject *args) {
    Flow *flow = (Flow *)object;
    PyObject *nodes;
    const char *packed;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "Oy#", &nodes, &packed, &size)) return NULL;
    const int32_t *hooks = (const int32_t *)(const void *)packed;
    for (Py_ssize_t i = 0; i + 3 <= size / (Py_ssize_t)sizeof *hooks; i += 3) {
        PyObject *node = PySequence_GetItem(nodes, hooks[i]);
        const int is_put = put_hook(flow, node, flow->numbers + hooks[i + 1], hooks[i + 2]);
        Py_XDECREF(node);
        if (!is_put) return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *flow_detach(PyObject *object, PyObject *none) {
    Flow *flow = (Flow *)object;
    (void)none;
    flow->is_open = 0;
    let_go(flow);
    Py_RETURN_NONE;
}

/* carry(stream tensor, part): what shortcuts carry there; None makes it unknown */
static PyObject *flow_carry(PyObject *object, PyObject *args) {
    Flow *flow = (Flow *)object;
    PyObject *part;
    Py_ssize_t which;
    if (!PyArg_ParseTuple(args, "nO", &which, &part)) return NULL;
    if (which < 0 || which >= flow->stream_count) return PyErr_Format(PyExc_IndexError, "no stream tensor %zd", which);
    if (part == Py_None) flow->streams[which].is_unknown = 1;
    else if (flow->is_open && !plus(&flow->streams[which].carried, part)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *flow_take(PyObject *object, PyObject *none) {
    const Flow *flow = (Flow *)object;
    (void)none;
    const Py_ssize_t size = flow->size * GRADIENT_COLUMNS * (Py_ssize_t)sizeof(double);
    return Py_BuildValue("y#y#", (const char *)flow->seen, flow->size, (const char *)flow->rows, size);
}

static PyMethodDef FLOW_METHODS[] = {
    {"attach", flow_attach, METH_VARARGS, "attach(nodes, hooks): put the hooks on"},
    {"detach", flow_detach, METH_NOARGS, "take no more, and let go of what has arrived"},
    {"carry", flow_carry, METH_VARARGS, "carry(stream tensor, part): what shortcuts carry there; None: it is unknown"},
    {"take", flow_take, METH_NOARGS, "take() -> whether sums were taken [sub-layer], the sums [sub-layer, column]"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot FLOW_SLOTS[] = {{Py_tp_new, flow_new},         {Py_tp_dealloc, flow_end},
                                   {Py_tp_methods, FLOW_METHODS}, {Py_tp_doc, "One backward pass through a graph."},
                                   {0, NULL}};
static PyType_Slot PASSING_SLOTS[] = {{Py_tp_dealloc, passing_end}, {Py_tp_call, passing_call}, {0, NULL}};
static PyType_Spec FLOW = {"keelscope._kernel.Flow", sizeof(Flow), 0, Py_TPFLAGS_DEFAULT, FLOW_SLOTS};
static PyType_Spec PASSING = {"keelscope._kernel.Passing", sizeof(Passing), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, PASSING_SLOTS};

int add_ways(PyObject *module) {
    words.before = PyUnicode_InternFromString("register_prehook");
    words.after = PyUnicode_InternFromString("register_hook");
    words.detach = PyUnicode_InternFromString("detach");
    words.emit = PyUnicode_InternFromString("_emit_found");
    words.carry = PyUnicode_InternFromString("_carry_along");
    words.failed = PyUnicode_InternFromString("_failed");
    passing_type = add_type(module, "Passing", &PASSING);
    return passing_type != NULL && add_type(module, "Flow", &FLOW) != NULL ? 0 : -1;
}
