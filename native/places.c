/* Where the entries of a tensor lie.

   torch tells it through the DLPack exchange interface, one call without any Python object, where it has that (2.10 and
   later); otherwise its attributes are asked one by one. Both give the same answers. */

#include "kernel.h"

Torch torch;

/* As the DLPack specification lays them out, version 1. */
typedef struct {
    void *data;
    int32_t device, device_number, dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *sizes, *strides;
    uint64_t offset;
} Described;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *to_managed, *from_managed;
    int (*describe)(void *tensor, Described *found);
    void *stream;
} Exchange;

enum { ON_HOST = 1, FLOAT = 2, BRAIN_FLOAT = 4 };

static const Exchange *exchange;
static int asks_layout; /* before the exchange, which takes a millisecond to refuse a layout: from the first one on */

PyObject *ask(PyObject *tensor, const Attribute *attribute) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (attribute->get != NULL && (type == torch.tensor || type == torch.parameter)) {
        return attribute->get(attribute->descriptor, tensor, type);
    }
    return PyObject_GetAttr(tensor, attribute->name);
}

void get_to(Attribute *attribute, const char *name) {
    PyObject *of_tensor = PyObject_GetAttrString(torch.tensor, name);
    PyObject *of_parameter = PyObject_GetAttrString(torch.parameter, name);
    attribute->name = PyUnicode_InternFromString(name);
    if (of_tensor != NULL && of_tensor == of_parameter && Py_TYPE(of_tensor) == &PyGetSetDescr_Type) {
        attribute->descriptor = Py_NewRef(of_tensor); /* written in C, and nothing on an instance hides it */
        attribute->get = (descrgetfunc)PyType_GetSlot(&PyGetSetDescr_Type, Py_tp_descr_get);
    }
    Py_XDECREF(of_tensor);
    Py_XDECREF(of_parameter);
}

int is_true(PyObject *owned) {
    const int yes = owned == Py_True;
    Py_XDECREF(owned);
    return yes;
}

size_t as_size(PyObject *owned) {
    const size_t size = owned == NULL ? (size_t)-1 : PyLong_AsSize_t(owned);
    Py_XDECREF(owned);
    return size;
}

static int kind_of(PyObject *tensor) {
    PyObject *dtype = ask(tensor, &torch.dtype);
    int kind = -1;
    for (int i = 0; dtype != NULL && i < KINDS; i++) {
        if (dtype == torch.dtypes[i]) kind = i;
    }
    Py_XDECREF(dtype);
    return kind;
}

static int is_negated(PyObject *tensor) {
    PyObject *negated = PyObject_CallFunctionObjArgs(torch.is_neg, tensor, NULL);
    return negated == NULL || is_true(negated);
}

static int sizes_of(PyObject *tensor, size_t *shape) {
    PyObject *sizes = ask(tensor, &torch.shape);
    const int is_known = sizes != NULL && PyTuple_Size(sizes) == 3;
    for (int i = 0; is_known && i < 3; i++) shape[i] = PyLong_AsSize_t(PyTuple_GetItem(sizes, i));
    Py_XDECREF(sizes);
    return is_known;
}

static int find_by_attributes(PyObject *tensor, Place *place) {
    if (!is_true(ask(tensor, &torch.is_cpu))) return 0;
    const int kind = kind_of(tensor);
    if (kind < 0 || !is_true(PyObject_CallFunctionObjArgs(torch.is_contiguous, tensor, NULL))) return 0;
    if (is_negated(tensor)) return 0;
    place->kind = &kinds[kind];
    place->count = as_size(PyObject_CallFunctionObjArgs(torch.numel, tensor, NULL));
    if (place->count == (size_t)-1) return 0;
    const size_t address = as_size(PyObject_CallFunctionObjArgs(torch.data_ptr, tensor, NULL));
    if (address == (size_t)-1 || (address == 0 && place->count > 0)) return 0;
    place->address = (const char *)address;
    place->has_tokens = sizes_of(tensor, place->shape);
    return 1;
}

static int kind_described(const Described *found) {
    if (found->lanes != 1) return -1;
    if (found->code == BRAIN_FLOAT) return found->bits == 16 ? 2 : -1;
    if (found->code != FLOAT) return -1;
    return found->bits == 32 ? 0 : found->bits == 64 ? 1 : found->bits == 16 ? 3 : -1;
}

static int find_described(PyObject *tensor, Place *place) {
    Described found;
    if (exchange->describe(tensor, &found) != 0) {
        asks_layout = 1;
        return 0;
    }
    if (found.device != ON_HOST) return 0;
    const int kind = kind_described(&found);
    int64_t count = 1, is_contiguous = 1;
    for (int i = found.dimensions - 1; i >= 0; i--) { /* an empty tensor is contiguous whatever its strides */
        is_contiguous &= found.sizes[i] == 1 || found.strides[i] == count;
        count *= found.sizes[i];
    }
    if (kind < 0 || (count > 0 && (!is_contiguous || found.data == NULL)) || is_negated(tensor)) return 0;
    *place = (Place){&kinds[kind], (const char *)found.data + found.offset, (size_t)count, found.dimensions == 3, {0}};
    for (int i = 0; place->has_tokens && i < 3; i++) place->shape[i] = (size_t)found.sizes[i];
    return 1;
}

int find(PyObject *tensor, Place *place) {
    const PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (torch.tensor == NULL || (type != torch.tensor && type != torch.parameter)) return 0;
    if (exchange != NULL && !asks_layout) return find_described(tensor, place);
    PyObject *layout = ask(tensor, &torch.layout);
    Py_XDECREF(layout);
    if (layout != torch.strided) return 0;
    return exchange != NULL ? find_described(tensor, place) : find_by_attributes(tensor, place);
}

/* Takes what torch offers; NULL, without an exception, where it is not of a version that is understood here. */
static const Exchange *exchange_of(PyObject *capsule) {
    const Exchange *found = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyErr_Clear();
    return found != NULL && found->major == 1 && found->describe != NULL ? found : NULL;
}

/* prepare(torch.Tensor, torch.nn.Parameter, torch.strided, the exchange capsule or None,
           torch.float32, float64, bfloat16, float16) */
PyObject *prepare(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    (void)module;
    if (given != 4 + KINDS) {
        PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", 4 + KINDS, given);
        return NULL;
    }
    torch.is_contiguous = PyObject_GetAttrString(arguments[0], "is_contiguous");
    torch.is_neg = PyObject_GetAttrString(arguments[0], "is_neg");
    torch.numel = PyObject_GetAttrString(arguments[0], "numel");
    torch.data_ptr = PyObject_GetAttrString(arguments[0], "data_ptr");
    torch.tensor = Py_NewRef(arguments[0]);
    torch.parameter = Py_NewRef(arguments[1]);
    get_to(&torch.layout, "layout");
    get_to(&torch.is_cpu, "is_cpu");
    get_to(&torch.dtype, "dtype");
    get_to(&torch.shape, "shape");
    if (PyErr_Occurred()) return NULL;
    torch.strided = Py_NewRef(arguments[2]);
    torch.capsule = Py_NewRef(arguments[3]);
    exchange = exchange_of(arguments[3]);
    for (int i = 0; i < KINDS; i++) torch.dtypes[i] = Py_NewRef(arguments[4 + i]);
    return PyBool_FromLong(exchange != NULL);
}
