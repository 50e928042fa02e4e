/* The search of stored blocks and of the tail for keys, as in blocks.py: what the index of a partition says, checks of a block, and rows
of it. These functions in Python are the reference. What is not for this module, or contradicts itself, is left to it: then the
answer is None.
*/

#include "_blocks.h"

PyDoc_STRVAR(opened_doc, "opened(block)\n--\n\n"
                         "Return where each field of an encoded block lies, in a dict, as column_spans; its checksums are verified. None if\n"
                         "they do not fit, or the block is not for this function.");

static PyObject *
spans_of(const char *block, const char *const *places, const uint32_t *sizes)
{
    PyObject *spans = PyDict_New();
    for (int field = RUNS_FIELD; spans != NULL && field <= TABLE_CRC_FIELD; field++) {
        if (places[field] == NULL) {
            continue;
        }
        Py_ssize_t first = places[field] - block;
        PyObject *number = PyLong_FromLong(field), *span = Py_BuildValue("(nn)", first, first + sizes[field]);
        if (number == NULL || span == NULL || PyDict_SetItem(spans, number, span) < 0) {
            Py_CLEAR(spans);
        }
        Py_XDECREF(number);
        Py_XDECREF(span);
    }
    return spans;
}

static PyObject *
opened(PyObject *module, PyObject *block)
{
    Py_buffer view;
    if (PyObject_GetBuffer(block, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const char *places[TABLE_CRC_FIELD + 1] = {NULL};
    uint32_t sizes[TABLE_CRC_FIELD + 1] = {0};
    int fit;
    /* The block may lie in a file that is mapped. */
    Py_BEGIN_ALLOW_THREADS
    fit = take_block(view.buf, view.len, 1, places, sizes);
    Py_END_ALLOW_THREADS
    PyObject *spans = fit ? spans_of(view.buf, places, sizes) : Py_NewRef(Py_None);
    PyBuffer_Release(&view);
    return spans;
}

PyDoc_STRVAR(wanted_rows_doc, "wanted_rows(hashes, wanted)\n--\n\n"
                            "As rows_with of blocks.py, in numbers of 8 bytes. The wanted hashes are numbers of 4 bytes, ascending.");

/* Bits of a hash that rule out most of those that are not wanted, before these are gone through. */
enum { FILTER_BITS = 15 };

/* Wanted hashes, ascending. */
typedef struct {
    Py_buffer hashes;
    unsigned char filter[1 << FILTER_BITS >> 3];
} Wanted;

static void
fill_filter(Wanted *wanted)
{
    for (Py_ssize_t at = 0; at < wanted->hashes.len / 4; at++) {
        uint32_t bits = number_at(wanted->hashes.buf, at) & ((1 << FILTER_BITS) - 1);
        wanted->filter[bits >> 3] |= 1 << (bits & 7);
    }
}

static inline int
is_wanted(const Wanted *wanted, uint32_t hash)
{
    uint32_t bits = hash & ((1 << FILTER_BITS) - 1);
    if (!(wanted->filter[bits >> 3] >> (bits & 7) & 1)) {
        return 0;
    }
    Py_ssize_t low = 0, high = wanted->hashes.len / 4;
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        uint32_t one = number_at(wanted->hashes.buf, middle);
        if (one == hash) {
            return 1;
        }
        if (one < hash) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return 0;
}

static PyObject *
wanted_rows(PyObject *module, PyObject *args)
{
    Py_buffer hashes;
    Wanted wanted = {0};
    if (!PyArg_ParseTuple(args, "y*y*", &hashes, &wanted.hashes)) {
        return NULL;
    }
    Py_ssize_t total = hashes.len / 4, count = 0;
    PyObject *found = PyBytes_FromStringAndSize(NULL, total * sizeof(int64_t));
    if (found != NULL) {
        char *rows = PyBytes_AS_STRING(found);
        Py_BEGIN_ALLOW_THREADS
        fill_filter(&wanted);
        for (int64_t row = 0; row < total; row++) {
            if (is_wanted(&wanted, number_at(hashes.buf, row))) {
                memcpy(rows + count++ * sizeof row, &row, sizeof row);
            }
        }
        Py_END_ALLOW_THREADS
        _PyBytes_Resize(&found, count * sizeof(int64_t));
    }
    PyBuffer_Release(&wanted.hashes);
    PyBuffer_Release(&hashes);
    return found;
}

PyDoc_STRVAR(candidate_doc, "candidate(rows, partition, end, above, most, blocks, hashes)\n--\n\n"
                            "As BlockCursor.candidate, which is the reference; rows iterates over key and value of stored hashes, newest first. The\n"
                            "wanted hashes are numbers of 4 bytes, ascending.");

/* What is looked for in the rows of hashes, and what was found. */
typedef struct {
    unsigned partition;
    uint64_t end;
    uint64_t above;
    Py_ssize_t most;
    Py_ssize_t blocks;
    Wanted wanted;
    Py_ssize_t size;
    PyObject *found;
} Search;

/* The start of the block that ends where the search is, if this row has the hashes of its keys and passes its checks. */
static int
start_of(const Search *search, const Py_buffer *key, const Py_buffer *value, uint64_t *start)
{
    char wanted[BLOCK_KEY_BYTES];
    write_key(wanted, search->partition, search->end);
    const char *data = value->buf;
    if (key->len != BLOCK_KEY_BYTES || memcmp(key->buf, wanted, BLOCK_KEY_BYTES) != 0 || value->len < HASHES_HEAD + CRC_BYTES
        || value->len % 4 != 0 || number_at(data, 0) != HASHES_KIND) {
        return 0;
    }
    Py_ssize_t sealed = value->len - CRC_BYTES;
    uint32_t crc = ~add_to_crc(add_to_crc(UINT32_MAX, key->buf, key->len), data, sealed);
    *start = long_at(data + 4);
    return crc == number_at(data + sealed, 0);
}

/* Note the block of these hashes, and which of its rows may have the key; whether the search goes on, or -1. */
static int
look_at(Search *search, uint64_t start, const Py_buffer *value)
{
    const char *hashes = (const char *)value->buf + HASHES_HEAD;
    Py_ssize_t total = (value->len - HASHES_HEAD - CRC_BYTES) / 4;
    PyObject *rows = PyList_New(0);
    for (Py_ssize_t row = 0; rows != NULL && row < total; row++) {
        if (is_wanted(&search->wanted, number_at(hashes, row))) {
            PyObject *number = PyLong_FromSsize_t(row);
            if (number == NULL || PyList_Append(rows, number) < 0) {
                Py_CLEAR(rows);
            }
            Py_XDECREF(number);
        }
    }
    if (rows == NULL) {
        return -1;
    }
    int more = PyList_GET_SIZE(rows) == 0;
    Py_XSETREF(search->found, Py_BuildValue("(KKnN)", (unsigned long long)start, (unsigned long long)search->end, total, rows));
    search->size += value->len;
    search->end = start;
    return search->found == NULL ? -1 : more && search->size < search->most && --search->blocks > 0 && start > search->above;
}

/* Look at one row of hashes, a tuple; as look_at. */
static int
look_at_row(Search *search, PyObject *row)
{
    Py_buffer key, value;
    uint64_t start;
    int more = -1;
    if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != 2) {
        PyErr_SetString(PyExc_TypeError, "a row is not a key and a value");
        return -1;
    }
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(row, 0), &key, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(row, 1), &value, PyBUF_SIMPLE) == 0) {
        more = start_of(search, &key, &value, &start) ? look_at(search, start, &value) : 0;
        PyBuffer_Release(&value);
    }
    PyBuffer_Release(&key);
    return more;
}

static PyObject *
candidate(PyObject *module, PyObject *args)
{
    PyObject *rows, *row;
    unsigned long long end, above;
    Search search = {0};
    if (!PyArg_ParseTuple(args, "OIKKnny*", &rows, &search.partition, &end, &above, &search.most, &search.blocks, &search.wanted.hashes)) {
        return NULL;
    }
    if (!PyIter_Check(rows)) {
        PyErr_SetString(PyExc_TypeError, "rows are no iterator");
    }
    fill_filter(&search.wanted);
    search.end = end, search.above = above;
    int more = !PyErr_Occurred() && end > above;
    while (more > 0 && (row = PyIter_Next(rows)) != NULL) {
        more = look_at_row(&search, row);
        Py_DECREF(row);
    }
    PyBuffer_Release(&search.wanted.hashes);
    if (PyErr_Occurred()) {
        Py_XDECREF(search.found);
        return NULL;
    }
    return Py_BuildValue("(Nn)", search.found == NULL ? Py_NewRef(Py_None) : search.found, search.size);
}

PyDoc_STRVAR(rows_at_doc, "rows_at(block, rows, check)\n--\n\n"
                          "Return rows of an encoded block as rows_of, the last first; its checksums are verified if check. None if they do not\n"
                          "fit, or the block is not for this function.");

/* Block that was taken apart, and the run in which the next row is looked for, from behind the last one down. */
typedef struct {
    const char *places[TABLE_CRC_FIELD + 1];
    uint32_t sizes[TABLE_CRC_FIELD + 1];
    const char *run;
    uint64_t first;
    uint64_t count;
} Rows;

/* Where a cell lies, and its size; NULL if it lies outside of its column. */
static const char *
cell_at(const Rows *block, int offsets, uint64_t row, uint32_t *size)
{
    const char *edges = block->places[FIRST_COLUMN + offsets], *data = block->places[FIRST_COLUMN + offsets + 1];
    *size = 0;
    if (block->sizes[FIRST_COLUMN + offsets] / 4 < row + 2) {
        return NULL;
    }
    uint32_t first = number_at(edges, row), end = number_at(edges, row + 1);
    *size = end - first;
    if (first > end || end > block->sizes[FIRST_COLUMN + offsets + 1]) {
        return NULL;
    }
    /* A column without bytes is absent. */
    return data == NULL ? "" : data + first;
}

/* A row as a tuple; NULL without an exception if the block has no such row. */
static PyObject *
row_at(Rows *block, uint64_t row)
{
    while (row < block->first && block->run > block->places[RUNS_FIELD]) {
        block->run -= RUN_BYTES;
        block->count = number_at(block->run + COUNT_AT, 0);
        block->first -= block->count;
    }
    const uint32_t *columns = block->sizes + FIRST_COLUMN;
    if (row < block->first || row - block->first >= block->count || (columns[SEQNOS] && columns[SEQNOS] / 4 <= row)
        || (columns[OPS] && columns[OPS] <= row)) {
        return NULL;
    }
    uint64_t offset = columns[SEQNOS] ? number_at(block->places[FIRST_COLUMN + SEQNOS], row) : row - block->first + 1;
    int deleted = columns[OPS] && block->places[FIRST_COLUMN + OPS][row] == OP_DELETE;
    uint32_t key_size, value_size;
    const char *key = cell_at(block, KEY_OFFSETS, row, &key_size), *value = cell_at(block, VALUE_OFFSETS, row, &value_size);
    if (key == NULL || value == NULL) {
        return NULL;
    }
    /* Of a NULL it makes None. */
    return Py_BuildValue("(IKy#y#)", number_at(block->run, 0), (unsigned long long)(long_at(block->run + START_AT) + offset), key,
                         (Py_ssize_t)key_size, deleted ? NULL : value, (Py_ssize_t)value_size);
}

static PyObject *
rows_of(Rows *block, PyObject *numbers)
{
    PyObject *found = PyList_New(PyList_GET_SIZE(numbers));
    Py_ssize_t count = found == NULL ? 0 : PyList_GET_SIZE(found);
    for (Py_ssize_t at = 0; at < count; at++) {
        unsigned long long number = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(numbers, count - 1 - at));
        PyObject *row = PyErr_Occurred() ? NULL : row_at(block, number);
        if (row == NULL) {
            Py_DECREF(found);
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        }
        PyList_SET_ITEM(found, at, row);
    }
    return found;
}

static PyObject *
rows_at(PyObject *module, PyObject *args)
{
    Py_buffer view;
    PyObject *numbers;
    int check, fit;
    if (!PyArg_ParseTuple(args, "y*O!p", &view, &PyList_Type, &numbers, &check)) {
        return NULL;
    }
    Rows block = {0};
    /* The block may lie in a file that is mapped. */
    Py_BEGIN_ALLOW_THREADS
    fit = take_block(view.buf, view.len, check, block.places, block.sizes);
    Py_END_ALLOW_THREADS
    PyObject *found;
    if (fit) {
        uint32_t runs = block.sizes[RUNS_FIELD];
        block.run = block.places[RUNS_FIELD] + runs;
        for (uint32_t at = 0; at < runs; at += RUN_BYTES) {
            block.first += number_at(block.places[RUNS_FIELD] + at + COUNT_AT, 0);
        }
        found = rows_of(&block, numbers);
    } else {
        found = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&view);
    return found;
}

static PyMethodDef methods[] = {
    {"opened", opened, METH_O, opened_doc},
    {"wanted_rows", wanted_rows, METH_VARARGS, wanted_rows_doc},
    {"candidate", candidate, METH_VARARGS, candidate_doc},
    {"rows_at", rows_at, METH_VARARGS, rows_at_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "upr.storage._search",
    .m_doc = "Searches of blocks for keys.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__search(void)
{
    choose_crc();
    return PyModuleDef_Init(&definition);
}
