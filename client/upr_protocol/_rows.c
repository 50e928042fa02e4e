/* Rows of a block as Python objects, made from its columns in one pass.

The functions here do what block_changes and block_items of upr_client/changes/events.py do in Python, and nothing else:
those are the reference. Columns that contradict each other are not for this module: then it returns None, the caller asks the
reference, and so both always agree. Every offset is compared with the end of its column before anything is read there.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if PY_BIG_ENDIAN
#error "columns are little-endian, and are read here as they lie"
#endif
#ifdef Py_GIL_DISABLED
#error "lists are filled here without a lock"
#endif

enum { RUN_BYTES = 40, COUNT_AT = 4, START_AT = 8 };
enum { FIELDS = 5, OP_DELETE = 1 };

/* Larger seqnos than a block can hold: their sums would differ from those of Python. */
static const uint64_t START_MAX = UINT64_C(1) << 62;

/* Columns of a block; a pointer is NULL where the column is empty. */
typedef struct {
    PyTypeObject *kind;
    PyObject *ops[2];
    const char *runs;
    Py_ssize_t run_count;
    const char *seqnos;
    const char *op_codes;
    const char *key_offsets;
    const char *keys;
    Py_ssize_t key_bytes;
    const char *value_offsets;
    const char *values;
    Py_ssize_t value_bytes;
    Py_ssize_t rows;
} Columns;

static uint32_t
number_at(const char *column, Py_ssize_t index)
{
    uint32_t number;
    memcpy(&number, column + 4 * index, sizeof number);
    return number;
}

static uint64_t
run_start(const char *run)
{
    uint64_t start;
    memcpy(&start, run + START_AT, sizeof start);
    return start;
}

/* Whether offsets, one more than rows, run from 0 to at most the end of their data and never fall. */
static int
offsets_fit(const char *offsets, Py_ssize_t rows, Py_ssize_t data_bytes)
{
    uint32_t before = 0;
    for (Py_ssize_t row = 0; row <= rows; row++) {
        uint32_t offset = number_at(offsets, row);
        if (offset < before || offset > (uint64_t)data_bytes || offset > INT32_MAX) {
            return 0;
        }
        before = offset;
    }
    return 1;
}

/* Whether the runs have exactly so many rows, and seqnos that cannot wrap. */
static int
runs_fit(const Columns *columns)
{
    uint64_t rows = 0;
    for (Py_ssize_t at = 0; at < columns->run_count; at++) {
        const char *run = columns->runs + at * RUN_BYTES;
        uint32_t count;
        memcpy(&count, run + COUNT_AT, sizeof count);
        if (run_start(run) > START_MAX) {
            return 0;
        }
        rows += count;
        if (rows > (uint64_t)columns->rows) {
            return 0;
        }
    }
    return rows == (uint64_t)columns->rows;
}

/* Return the bytes of a column, NULL with *size 0 for an empty one, NULL with *size -1 if it is not bytes. */
static const char *
column_of(PyObject *object, Py_ssize_t *size)
{
    if (!PyBytes_CheckExact(object)) {
        *size = -1;
        return NULL;
    }
    *size = PyBytes_GET_SIZE(object);
    return *size ? PyBytes_AS_STRING(object) : NULL;
}

/* Take the columns apart; whether they fit each other. */
static int
columns_fit(PyObject *const *args, Columns *columns)
{
    Py_ssize_t sizes[7];
    const char *data[7];
    for (int at = 0; at < 7; at++) {
        data[at] = column_of(args[at], &sizes[at]);
        if (sizes[at] < 0) {
            return 0;
        }
    }
    if (sizes[0] % RUN_BYTES || sizes[3] % 4 || sizes[3] < 4) {
        return 0;
    }
    columns->runs = data[0];
    columns->run_count = sizes[0] / RUN_BYTES;
    columns->seqnos = data[1];
    columns->op_codes = data[2];
    columns->key_offsets = data[3];
    columns->keys = data[4];
    columns->key_bytes = sizes[4];
    columns->value_offsets = data[5];
    columns->values = data[6];
    columns->value_bytes = sizes[6];
    Py_ssize_t rows = columns->rows = sizes[3] / 4 - 1;
    if ((sizes[1] && sizes[1] / 4 != rows) || sizes[1] % 4 || (sizes[2] && sizes[2] != rows)) {
        return 0;
    }
    for (Py_ssize_t row = 0; row < sizes[2]; row++) {
        if ((unsigned char)data[2][row] > OP_DELETE) {
            return 0;
        }
    }
    if (!runs_fit(columns) || !offsets_fit(data[3], rows, sizes[4])) {
        return 0;
    }
    return !sizes[5] || (sizes[5] / 4 == rows + 1 && sizes[5] % 4 == 0 && offsets_fit(data[5], rows, sizes[6]));
}

/* Return a new reference to the bytes of one cell. */
static PyObject *
cell(const char *offsets, const char *data, Py_ssize_t row)
{
    uint32_t first = number_at(offsets, row), end = number_at(offsets, row + 1);
    return PyBytes_FromStringAndSize(first == end ? NULL : data + first, end - first);
}

static int
is_delete(const Columns *columns, Py_ssize_t row)
{
    return columns->op_codes != NULL && columns->op_codes[row] == OP_DELETE;
}

/* Return a new reference to the value of a row, None for a delete and where there are no values. */
static PyObject *
value_of(const Columns *columns, Py_ssize_t row)
{
    if (is_delete(columns, row) || columns->value_offsets == NULL) {
        return Py_NewRef(Py_None);
    }
    return cell(columns->value_offsets, columns->values, row);
}

/* Return the key and the value of a row. */
static PyObject *
item_of(const Columns *columns, Py_ssize_t row)
{
    PyObject *key = cell(columns->key_offsets, columns->keys, row);
    PyObject *value = value_of(columns, row);
    PyObject *made = key == NULL || value == NULL ? NULL : PyTuple_New(2);
    if (made == NULL) {
        Py_XDECREF(key);
        Py_XDECREF(value);
        return NULL;
    }
    PyTuple_SET_ITEM(made, 0, key);
    PyTuple_SET_ITEM(made, 1, value);
    /* As with rows: see there. */
    PyObject_GC_UnTrack(made);
    return made;
}

/* Return one row; its partition and op are borrowed. */
static PyObject *
row_of(const Columns *columns, Py_ssize_t row, PyObject *partition, uint64_t seqno)
{
    PyObject *number = PyLong_FromUnsignedLongLong(seqno);
    PyObject *key = cell(columns->key_offsets, columns->keys, row);
    PyObject *value = value_of(columns, row);
    PyTupleObject *made = NULL;
    if (number != NULL && key != NULL && value != NULL) {
        made = PyObject_GC_NewVar(PyTupleObject, columns->kind, FIELDS);
    }
    if (made == NULL) {
        Py_XDECREF(number);
        Py_XDECREF(key);
        Py_XDECREF(value);
        return NULL;
    }
#if PY_VERSION_HEX >= 0x030E0000
    made->ob_hash = -1;
#endif
    /* The collector is not told of it: what it holds refers to nothing, and looking at each row again and again would
    take longer than making it. */
    PyTuple_SET_ITEM(made, 0, Py_NewRef(partition));
    PyTuple_SET_ITEM(made, 1, number);
    PyTuple_SET_ITEM(made, 2, Py_NewRef(columns->ops[is_delete(columns, row)]));
    PyTuple_SET_ITEM(made, 3, key);
    PyTuple_SET_ITEM(made, 4, value);
    return (PyObject *)made;
}

/* Put the items of all rows into a list that has a place for each. */
static int
fill_items(const Columns *columns, PyObject *list)
{
    for (Py_ssize_t row = 0; row < columns->rows; row++) {
        PyObject *made = item_of(columns, row);
        if (made == NULL) {
            return -1;
        }
        PyList_SET_ITEM(list, row, made);
    }
    return 0;
}

/* Put all rows into a list that has a place for each. */
static int
fill_rows(const Columns *columns, PyObject *list)
{
    Py_ssize_t row = 0;
    for (Py_ssize_t at = 0; at < columns->run_count; at++) {
        const char *run = columns->runs + at * RUN_BYTES;
        uint64_t start = run_start(run);
        uint32_t count = number_at(run + COUNT_AT, 0);
        PyObject *partition = PyLong_FromUnsignedLong(number_at(run, 0));
        if (partition == NULL) {
            return -1;
        }
        for (uint32_t inside = 0; inside < count; inside++, row++) {
            uint64_t offset = columns->seqnos == NULL ? inside + UINT64_C(1) : number_at(columns->seqnos, row);
            PyObject *made = row_of(columns, row, partition, start + offset);
            if (made == NULL) {
                Py_DECREF(partition);
                return -1;
            }
            PyList_SET_ITEM(list, row, made);
        }
        Py_DECREF(partition);
    }
    return 0;
}

/* Return a list that was filled from seven columns, or None if they do not fit each other. */
static PyObject *
listed(PyObject *const *args, Columns *columns, int (*fill)(const Columns *, PyObject *))
{
    if (!columns_fit(args, columns)) {
        Py_RETURN_NONE;
    }
    PyObject *list = PyList_New(columns->rows);
    if (list == NULL) {
        return NULL;
    }
    /* Thousands of new objects and none that could be garbage. */
    int collecting = PyGC_Disable();
    int failed = fill(columns, list);
    if (collecting) {
        PyGC_Enable();
    }
    if (failed) {
        Py_DECREF(list);
        return NULL;
    }
    return list;
}

PyDoc_STRVAR(rows_doc, "rows(kind, ops, runs, seqnos, op_codes, key_offsets, keys, value_offsets, values)\n--\n\n"
                       "Return a block's rows as a list of kind, or None if its columns do not fit each other.");

static PyObject *
rows(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Columns columns;
    if (count != 9 || !PyType_Check(args[0]) || !PyTuple_CheckExact(args[1]) || PyTuple_GET_SIZE(args[1]) != 2) {
        PyErr_SetString(PyExc_TypeError, "rows takes a kind of tuple, the names of two ops and seven columns");
        return NULL;
    }
    columns.kind = (PyTypeObject *)args[0];
    if (!PyType_IsSubtype(columns.kind, &PyTuple_Type) || columns.kind->tp_basicsize != PyTuple_Type.tp_basicsize
        || columns.kind->tp_dictoffset) {
        PyErr_SetString(PyExc_TypeError, "kind must be a named tuple without further attributes");
        return NULL;
    }
    columns.ops[0] = PyTuple_GET_ITEM(args[1], 0);
    columns.ops[1] = PyTuple_GET_ITEM(args[1], 1);
    return listed(args + 2, &columns, fill_rows);
}

PyDoc_STRVAR(items_doc, "items(runs, seqnos, op_codes, key_offsets, keys, value_offsets, values)\n--\n\n"
                        "Return a block's keys and values as a list of pairs, or None if its columns do not fit each other.");

static PyObject *
items(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Columns columns;
    if (count != 7) {
        PyErr_SetString(PyExc_TypeError, "items takes seven columns");
        return NULL;
    }
    return listed(args, &columns, fill_items);
}

static PyMethodDef methods[] = {
    {"items", (PyCFunction)(void (*)(void))items, METH_FASTCALL, items_doc},
    {"rows", (PyCFunction)(void (*)(void))rows, METH_FASTCALL, rows_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "upr_protocol._rows",
    .m_doc = "Rows of a block as Python objects.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__rows(void)
{
    return PyModuleDef_Init(&definition);
}
