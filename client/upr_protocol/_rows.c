/* Rows of a block as Python objects, made from its columns in one pass; columns, made from such objects or from those of
other blocks.

The functions here do what block_changes and block_items of upr_client/changes/events.py, row_numbers of upr_client/arrow.py,
and pairs_bytes, blocks_of_pairs, build_block, join_blocks and check_block of block.py, do in Python, and, in a server, put_ends and summary of
upr/storage/blocks.py, and what upr/engine/bucket.py does to number a write; and nothing else: those are the reference. What contradicts itself or is out of its range is not for this module: then it returns None, the caller asks
the reference, and so both always agree. Every offset is compared with the end of its column before anything is read there.
*/

#include "_columns.h"

#ifdef Py_GIL_DISABLED
#error "lists are filled here without a lock"
#endif

enum { FIELDS = 5 };
/* As in limits.py and block.py. */
enum { VALUE_BYTES_MAX = 20 << 20, ROW_BYTES = 9, BLOCK_ROWS_MAX = 1 << 18 };

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

/* Whether offsets, one more than rows, run from 0 to at most the end of their data and never fall. */
static int
offsets_fit(const char *offsets, Py_ssize_t rows, Py_ssize_t data_bytes)
{
    /* Without a way out of the loop, so that the compiler makes it one over vectors; so below. */
    int falls = 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        falls |= number_at(offsets, row + 1) < number_at(offsets, row);
    }
    uint32_t last = number_at(offsets, rows);
    return !falls && last <= (uint64_t)data_bytes && last <= INT32_MAX;
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
        if (long_at(run + START_AT) > START_MAX) {
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
    unsigned char op_codes = 0;
    for (Py_ssize_t row = 0; row < sizes[2]; row++) {
        op_codes |= (unsigned char)data[2][row];
    }
    if (op_codes > OP_DELETE || !runs_fit(columns) || !offsets_fit(data[3], rows, sizes[4])) {
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
        uint64_t start = long_at(run + START_AT);
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

/* Whether a row may be written. */
static int
row_fits(PyObject *key, PyObject *value)
{
    if (!PyBytes_CheckExact(key) || PyBytes_GET_SIZE(key) < 1 || PyBytes_GET_SIZE(key) > KEY_BYTES_MAX) {
        return 0;
    }
    return value == Py_None || (PyBytes_CheckExact(value) && PyBytes_GET_SIZE(value) <= VALUE_BYTES_MAX);
}

static Py_ssize_t
value_bytes(PyObject *value)
{
    return value == Py_None ? 0 : PyBytes_GET_SIZE(value);
}

/* A row to be written; both are borrowed. */
typedef struct {
    PyObject *key;
    PyObject *value;
} Row;

/* Take a pair apart; whether it may be written. */
static int
take_pair(PyObject *pair, Row *row)
{
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) {
        return 0;
    }
    row->key = PyTuple_GET_ITEM(pair, 0);
    row->value = PyTuple_GET_ITEM(pair, 1);
    return row_fits(row->key, row->value);
}

static Py_ssize_t
row_bytes(const Row *row)
{
    return ROW_BYTES + PyBytes_GET_SIZE(row->key) + value_bytes(row->value);
}

PyDoc_STRVAR(size_doc, "size(rows)\n--\n\n"
                       "Return the bytes of a list of pairs in the columns of blocks, or None if one may not be written.");

static PyObject *
size(PyObject *module, PyObject *list)
{
    if (!PyList_CheckExact(list)) {
        Py_RETURN_NONE;
    }
    Py_ssize_t total = 0;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(list); at++) {
        Row row;
        if (!take_pair(PyList_GET_ITEM(list, at), &row)) {
            Py_RETURN_NONE;
        }
        total += row_bytes(&row);
    }
    return PyLong_FromSsize_t(total);
}

/* Of zlib's CRC-32. */
static CrcSteps crc_steps;

static unsigned
partition_of(const char *key, Py_ssize_t size)
{
    return (~add_by_steps(crc_steps, UINT32_MAX, key, size) >> 16) % PARTITIONS;
}

/* Columns that are being made. */
enum { RUNS, OP_CODES, KEY_OFFSETS, KEYS, VALUE_OFFSETS, VALUES, TIMES, MADE };

/* Make so many columns of these sizes, to be filled; -1 with an exception. */
static int
make(PyObject **made, const Py_ssize_t *sizes, int count)
{
    for (int at = 0; at < count; at++) {
        made[at] = PyBytes_FromStringAndSize(NULL, sizes[at]);
        if (made[at] == NULL) {
            while (at) {
                Py_DECREF(made[--at]);
            }
            return -1;
        }
    }
    return 0;
}

/* Return filled columns. */
static PyObject *
finished(PyObject **made)
{
    return Py_BuildValue("(NNNNNNN)", made[0], made[1], made[2], made[3], made[4], made[5], made[6]);
}

static void
put_number(char *column, Py_ssize_t index, uint32_t number)
{
    memcpy(column + 4 * index, &number, sizeof number);
}

PyDoc_STRVAR(numbers_doc, "numbers(runs, seqnos, rows)\n--\n\n"
                          "Return each row's partition as uint32, its seqno and its run's time as uint64: the bytes of each column.\n"
                          "None if there are not so many rows.");

static PyObject *
numbers(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "numbers takes a run table, seqnos and the number of rows");
        return NULL;
    }
    Py_ssize_t run_bytes, seqno_bytes;
    Columns columns = {.runs = column_of(args[0], &run_bytes), .seqnos = column_of(args[1], &seqno_bytes)};
    columns.rows = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    columns.run_count = run_bytes / RUN_BYTES;
    if (run_bytes < 0 || run_bytes % RUN_BYTES || seqno_bytes < 0 || columns.rows < 0 || columns.rows > INT32_MAX / 8
        || (seqno_bytes && seqno_bytes != 4 * columns.rows) || !runs_fit(&columns)) {
        Py_RETURN_NONE;
    }
    const Py_ssize_t sizes[3] = {4 * columns.rows, 8 * columns.rows, 8 * columns.rows};
    PyObject *made[3];
    if (make(made, sizes, 3) < 0) {
        return NULL;
    }
    char *partitions = PyBytes_AS_STRING(made[0]), *seqnos = PyBytes_AS_STRING(made[1]), *times = PyBytes_AS_STRING(made[2]);
    Py_ssize_t row = 0;
    for (Py_ssize_t at = 0; at < columns.run_count; at++) {
        const char *run = columns.runs + at * RUN_BYTES;
        uint64_t start = long_at(run + START_AT);
        uint32_t partition = number_at(run, 0), inside = 0, rows = number_at(run + COUNT_AT, 0);
        for (; inside < rows; inside++, row++) {
            uint64_t seqno = start + (columns.seqnos == NULL ? inside + UINT64_C(1) : number_at(columns.seqnos, row));
            put_number(partitions, row, partition);
            memcpy(seqnos + 8 * row, &seqno, sizeof seqno);
            memcpy(times + 8 * row, run + TIME_AT, 8);
        }
    }
    return Py_BuildValue("(NNN)", made[0], made[1], made[2]);
}

/* Rows that become columns, sorted by partition. */
typedef struct {
    Row *rows;
    Row *sorted;
    uint16_t *partitions;
    Py_ssize_t count;
    uint32_t counts[PARTITIONS];
    Py_ssize_t touched;
    uint64_t key_size;
    uint64_t value_size;
    int deletes;
} Sorting;

/* Find each row's partition, unless that was chosen (uint16 each); whether they fit into one block. */
static int
count_rows(Sorting *sorting, const char *chosen)
{
    for (Py_ssize_t row = 0; row < sorting->count; row++) {
        PyObject *key = sorting->rows[row].key, *value = sorting->rows[row].value;
        uint16_t partition = (uint16_t)partition_of(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key));
        if (chosen != NULL) {
            memcpy(&partition, chosen + 2 * row, sizeof partition);
        }
        if (partition >= PARTITIONS) {
            return 0;
        }
        sorting->partitions[row] = partition;
        sorting->touched += !sorting->counts[partition]++;
        sorting->key_size += PyBytes_GET_SIZE(key);
        sorting->value_size += value_bytes(value);
        sorting->deletes |= value == Py_None;
    }
    return sorting->key_size <= INT32_MAX && sorting->value_size <= INT32_MAX;
}

/* Write the run table, and bring the rows into the order of their partitions. */
static void
sort_rows(Sorting *sorting, char *run)
{
    uint32_t next[PARTITIONS], before = 0;
    for (uint32_t partition = 0; partition < PARTITIONS; partition++) {
        next[partition] = before;
        if (sorting->counts[partition]) {
            memset(run, 0, RUN_BYTES);
            put_number(run, 0, partition);
            put_number(run + COUNT_AT, 0, sorting->counts[partition]);
            run += RUN_BYTES;
            before += sorting->counts[partition];
        }
    }
    for (Py_ssize_t row = 0; row < sorting->count; row++) {
        sorting->sorted[next[sorting->partitions[row]]++] = sorting->rows[row];
    }
}

/* Write a cell behind those before it, and where it ends; return that. */
static uint32_t
put_cell(PyObject *cell, Py_ssize_t row, uint32_t begin, char *offsets, char *data)
{
    if (cell != Py_None) {
        memcpy(data + begin, PyBytes_AS_STRING(cell), PyBytes_GET_SIZE(cell));
        begin += (uint32_t)PyBytes_GET_SIZE(cell);
    }
    put_number(offsets, row + 1, begin);
    return begin;
}

/* Return the columns of rows, or None if they do not fit into one block. */
static PyObject *
sorted_columns(Sorting *sorting, const char *chosen)
{
    if (!count_rows(sorting, chosen)) {
        Py_RETURN_NONE;
    }
    Py_ssize_t sizes[MADE] = {
        [RUNS] = RUN_BYTES * sorting->touched,
        [OP_CODES] = sorting->deletes ? sorting->count : 0,
        [KEY_OFFSETS] = 4 * (sorting->count + 1),
        [KEYS] = (Py_ssize_t)sorting->key_size,
        [VALUE_OFFSETS] = 4 * (sorting->count + 1),
        [VALUES] = (Py_ssize_t)sorting->value_size,
    };
    PyObject *made[MADE];
    if (make(made, sizes, MADE) < 0) {
        return NULL;
    }
    sort_rows(sorting, PyBytes_AS_STRING(made[RUNS]));
    char *ops = PyBytes_AS_STRING(made[OP_CODES]);
    char *key_offsets = PyBytes_AS_STRING(made[KEY_OFFSETS]), *value_offsets = PyBytes_AS_STRING(made[VALUE_OFFSETS]);
    char *keys = PyBytes_AS_STRING(made[KEYS]), *values = PyBytes_AS_STRING(made[VALUES]);
    uint32_t key_end = 0, value_end = 0;
    put_number(key_offsets, 0, 0);
    put_number(value_offsets, 0, 0);
    for (Py_ssize_t at = 0; at < sorting->count; at++) {
        const Row *row = &sorting->sorted[at];
        key_end = put_cell(row->key, at, key_end, key_offsets, keys);
        value_end = put_cell(row->value, at, value_end, value_offsets, values);
        if (sorting->deletes) {
            ops[at] = row->value == Py_None ? OP_DELETE : 0;
        }
    }
    return finished(made);
}

/* Make room for rows; -1 with an exception. */
static int
make_room(Sorting *sorting, Py_ssize_t count)
{
    memset(sorting, 0, sizeof *sorting);
    sorting->rows = PyMem_Malloc((2 * sizeof *sorting->rows + sizeof *sorting->partitions) * count);
    if (sorting->rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    sorting->sorted = sorting->rows + count;
    sorting->partitions = (uint16_t *)(sorting->sorted + count);
    sorting->count = count;
    return 0;
}

PyDoc_STRVAR(columns_doc, "columns(keys, values, partitions)\n--\n\n"
                          "Return run table, ops, key offsets, keys, value offsets, values and times of rows, sorted by\n"
                          "partition (of the key, or as uint16 each), or None if they do not fit into one block.");

static PyObject *
columns(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "columns takes keys, values and partitions");
        return NULL;
    }
    Py_ssize_t rows = PyList_CheckExact(args[0]) ? PyList_GET_SIZE(args[0]) : 0;
    if (rows < 1 || rows > BLOCK_ROWS_MAX || !PyList_CheckExact(args[1]) || PyList_GET_SIZE(args[1]) != rows) {
        Py_RETURN_NONE;
    }
    const char *chosen = NULL;
    if (args[2] != Py_None) {
        if (!PyBytes_CheckExact(args[2]) || PyBytes_GET_SIZE(args[2]) != 2 * rows) {
            Py_RETURN_NONE;
        }
        chosen = PyBytes_AS_STRING(args[2]);
    }
    Sorting sorting;
    if (make_room(&sorting, rows) < 0) {
        return NULL;
    }
    int fit = 1;
    for (Py_ssize_t row = 0; fit && row < rows; row++) {
        sorting.rows[row] = (Row){PyList_GET_ITEM(args[0], row), PyList_GET_ITEM(args[1], row)};
        fit = row_fits(sorting.rows[row].key, sorting.rows[row].value);
    }
    PyObject *made = fit ? sorted_columns(&sorting, chosen) : Py_NewRef(Py_None);
    PyMem_Free(sorting.rows);
    return made;
}

PyDoc_STRVAR(packed_doc, "packed(rows, first, most)\n--\n\n"
                         "Return what columns does, of as many of a list of pairs, from the first on, as stay within so many\n"
                         "bytes and the rows of a block, or of a single larger one.");

static PyObject *
packed(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "packed takes rows, the first one and a number of bytes");
        return NULL;
    }
    Py_ssize_t first = PyLong_AsSsize_t(args[1]), most = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (!PyList_CheckExact(args[0]) || first < 0 || first >= PyList_GET_SIZE(args[0])) {
        Py_RETURN_NONE;
    }
    Py_ssize_t rows = PyList_GET_SIZE(args[0]) - first;
    Sorting sorting;
    if (make_room(&sorting, rows < BLOCK_ROWS_MAX ? rows : BLOCK_ROWS_MAX) < 0) {
        return NULL;
    }
    int fit = 1;
    for (rows = 0; fit && rows < sorting.count; rows++) {
        fit = take_pair(PyList_GET_ITEM(args[0], first + rows), &sorting.rows[rows]);
        if (fit && (most -= row_bytes(&sorting.rows[rows])) < 0 && rows > 0) {
            break;
        }
    }
    sorting.count = rows;
    PyObject *made = fit ? sorted_columns(&sorting, NULL) : Py_NewRef(Py_None);
    PyMem_Free(sorting.rows);
    return made;
}

/* What blocks have of a partition together; and then, in the same fields, where its next row goes. */
typedef struct {
    char run[RUN_BYTES];
    int touched;
    uint64_t rows;
    uint64_t key_size;
    uint64_t value_size;
} Share;

/* Blocks that become one. */
typedef struct {
    Columns *blocks;
    Py_ssize_t count;
    Share *shares;
    Py_ssize_t touched;
    Share total;
    int ops;
    int values;
    int dated;
} Joining;

/* Put a run behind those that its partition has. */
static void
add_run(Share *share, const char *run)
{
    if (!share->touched) {
        memcpy(share->run, run, RUN_BYTES);
        share->touched = 1;
        return;
    }
    uint32_t count = number_at(share->run + COUNT_AT, 0) + number_at(run + COUNT_AT, 0);
    put_number(share->run + COUNT_AT, 0, count);
    /* End and horizon are those of the last one, the time is the newest. */
    memcpy(share->run + START_AT + 8, run + START_AT + 8, 16);
    if (long_at(run + TIME_AT) > long_at(share->run + TIME_AT)) {
        memcpy(share->run + TIME_AT, run + TIME_AT, 8);
    }
}

static uint32_t
span(const char *offsets, Py_ssize_t first, Py_ssize_t last)
{
    return number_at(offsets, last) - number_at(offsets, first);
}

/* Whether offsets that fit begin at 0, and end where the data does. */
static int
offsets_fill(const char *offsets, Py_ssize_t rows, Py_ssize_t data_bytes)
{
    return number_at(offsets, 0) == 0 && number_at(offsets, rows) == (uint64_t)data_bytes;
}

/* Add the runs of a block to the shares of their partitions; whether it can be joined. */
static int
add_block(Joining *joining, const Columns *block)
{
    if (block->seqnos != NULL || (block->value_offsets != NULL) != joining->values
        || !offsets_fill(block->key_offsets, block->rows, block->key_bytes)
        || (joining->values && !offsets_fill(block->value_offsets, block->rows, block->value_bytes))) {
        return 0;
    }
    joining->ops |= block->op_codes != NULL;
    Py_ssize_t first = 0;
    for (Py_ssize_t at = 0; at < block->run_count; at++) {
        const char *run = block->runs + at * RUN_BYTES;
        uint32_t partition = number_at(run, 0);
        if (partition >= PARTITIONS) {
            return 0;
        }
        Share *share = &joining->shares[partition];
        joining->touched += !share->touched;
        add_run(share, run);
        Py_ssize_t last = first + number_at(run + COUNT_AT, 0);
        share->rows += last - first;
        share->key_size += span(block->key_offsets, first, last);
        if (joining->values) {
            share->value_size += span(block->value_offsets, first, last);
        }
        first = last;
    }
    return 1;
}

/* Have each share say where its first row goes; the total is what they have together. */
static void
place_shares(Joining *joining)
{
    Share *total = &joining->total;
    for (Share *share = joining->shares; share < joining->shares + PARTITIONS; share++) {
        Share has = *share;
        share->rows = total->rows;
        share->key_size = total->key_size;
        share->value_size = total->value_size;
        total->rows += has.rows;
        total->key_size += has.key_size;
        total->value_size += has.value_size;
    }
}

/* Copy the cells of some rows to the place of a row and a byte; return their bytes. */
static uint32_t
copy_cells(const char *offsets, const char *data, Py_ssize_t first, Py_ssize_t last, char *to_offsets, char *to, uint64_t row, uint64_t byte)
{
    uint32_t begin = number_at(offsets, first), size = span(offsets, first, last);
    for (Py_ssize_t at = first; at < last; at++) {
        put_number(to_offsets, (Py_ssize_t)++row, number_at(offsets, at + 1) - begin + (uint32_t)byte);
    }
    if (size) {
        memcpy(to + byte, data + begin, size);
    }
    return size;
}

/* Copy the rows of a block to the places of their partitions. */
static void
copy_block(Joining *joining, const Columns *block, PyObject **made)
{
    Py_ssize_t first = 0;
    for (Py_ssize_t at = 0; at < block->run_count; at++) {
        const char *run = block->runs + at * RUN_BYTES;
        Share *share = &joining->shares[number_at(run, 0)];
        Py_ssize_t last = first + number_at(run + COUNT_AT, 0);
        uint64_t row = share->rows;
        if (joining->ops) {
            char *to = PyBytes_AS_STRING(made[OP_CODES]) + row;
            block->op_codes ? memcpy(to, block->op_codes + first, last - first) : memset(to, 0, last - first);
        }
        if (joining->dated) {
            for (Py_ssize_t inside = 0; inside < last - first; inside++) {
                memcpy(PyBytes_AS_STRING(made[TIMES]) + 8 * (row + inside), run + TIME_AT, 8);
            }
        }
        share->key_size += copy_cells(block->key_offsets, block->keys, first, last, PyBytes_AS_STRING(made[KEY_OFFSETS]),
                                      PyBytes_AS_STRING(made[KEYS]), row, share->key_size);
        if (joining->values) {
            share->value_size += copy_cells(block->value_offsets, block->values, first, last,
                                            PyBytes_AS_STRING(made[VALUE_OFFSETS]), PyBytes_AS_STRING(made[VALUES]), row,
                                            share->value_size);
        }
        share->rows += last - first;
        first = last;
    }
}

/* Return the columns of blocks that become one, or None if they cannot. */
static PyObject *
joined_columns(Joining *joining)
{
    for (Py_ssize_t at = 0; at < joining->count; at++) {
        if (!add_block(joining, &joining->blocks[at])) {
            Py_RETURN_NONE;
        }
    }
    place_shares(joining);
    const Share *total = &joining->total;
    if (total->rows > INT32_MAX / 8 || total->key_size > INT32_MAX || total->value_size > INT32_MAX) {
        Py_RETURN_NONE;
    }
    Py_ssize_t rows = (Py_ssize_t)total->rows;
    Py_ssize_t sizes[MADE] = {
        [RUNS] = RUN_BYTES * joining->touched,
        [OP_CODES] = joining->ops ? rows : 0,
        [KEY_OFFSETS] = 4 * (rows + 1),
        [KEYS] = (Py_ssize_t)total->key_size,
        [VALUE_OFFSETS] = joining->values ? 4 * (rows + 1) : 0,
        [VALUES] = (Py_ssize_t)total->value_size,
        [TIMES] = joining->dated ? 8 * rows : 0,
    };
    PyObject *made[MADE];
    if (make(made, sizes, MADE) < 0) {
        return NULL;
    }
    char *run = PyBytes_AS_STRING(made[RUNS]);
    for (const Share *share = joining->shares; share < joining->shares + PARTITIONS; share++) {
        if (share->touched) {
            memcpy(run, share->run, RUN_BYTES);
            run += RUN_BYTES;
        }
    }
    put_number(PyBytes_AS_STRING(made[KEY_OFFSETS]), 0, 0);
    if (joining->values) {
        put_number(PyBytes_AS_STRING(made[VALUE_OFFSETS]), 0, 0);
    }
    for (Py_ssize_t at = 0; at < joining->count; at++) {
        copy_block(joining, &joining->blocks[at], made);
    }
    return finished(made);
}

PyDoc_STRVAR(joined_doc, "joined(blocks, dated)\n--\n\n"
                         "Return what columns does, of blocks: run table, seqnos, ops, key offsets, keys, value offsets and\n"
                         "values each; with times if dated. None if they cannot be joined.");

static PyObject *
joined(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyList_CheckExact(args[0]) || !PyBool_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "joined takes a list of blocks, and whether rows keep their times");
        return NULL;
    }
    Joining joining = {.count = PyList_GET_SIZE(args[0]), .dated = args[1] == Py_True};
    joining.shares = PyMem_Calloc(PARTITIONS, sizeof *joining.shares);
    joining.blocks = PyMem_Calloc(joining.count, sizeof *joining.blocks);
    PyObject *made = NULL;
    if (joining.shares == NULL || joining.blocks == NULL) {
        PyErr_NoMemory();
    }
    else {
        int fit = joining.count > 0;
        for (Py_ssize_t at = 0; fit && at < joining.count; at++) {
            PyObject *block = PyList_GET_ITEM(args[0], at);
            fit = PyTuple_CheckExact(block) && PyTuple_GET_SIZE(block) == 7
                  && columns_fit(((PyTupleObject *)block)->ob_item, &joining.blocks[at]);
        }
        joining.values = fit && joining.blocks[0].value_offsets != NULL;
        made = fit ? joined_columns(&joining) : Py_NewRef(Py_None);
    }
    PyMem_Free(joining.shares);
    PyMem_Free(joining.blocks);
    return made;
}

/* As in limits.py. */
enum { COLUMNS_BYTES_MAX = (24 << 20) - (64 << 10) };

/* Whether the seqnos of a run rise, and lie within it. */
static int
seqnos_sound(const char *seqnos, Py_ssize_t first, uint32_t count, uint64_t span)
{
    uint32_t before = 0;
    for (uint32_t inside = 0; inside < count; inside++) {
        uint32_t offset = number_at(seqnos, first + inside);
        if (offset <= before || offset > span) {
            return 0;
        }
        before = offset;
    }
    return 1;
}

/* Whether the runs, whose rows are those of the columns, ascend, and are numbered or not at all. */
static int
runs_sound(const Columns *columns, int numbered)
{
    int64_t before = -1;
    Py_ssize_t row = 0;
    for (Py_ssize_t at = 0; at < columns->run_count; at++) {
        const char *run = columns->runs + at * RUN_BYTES;
        uint32_t partition = number_at(run, 0), count = number_at(run + COUNT_AT, 0);
        uint64_t seqnos[3];
        memcpy(seqnos, run + START_AT, sizeof seqnos);
        uint64_t start = seqnos[0], end = seqnos[1], horizon = seqnos[2];
        if (partition >= PARTITIONS || partition <= before) {
            return 0;
        }
        before = partition;
        if (!numbered) {
            if (count == 0 || start != 0 || end != 0) {
                return 0;
            }
            continue;
        }
        if (end <= start || horizon < end || horizon > SEQNO_MAX || end - start > SPAN_MAX || count > end - start) {
            return 0;
        }
        if (columns->seqnos == NULL ? count != 0 && count != end - start
                                    : !seqnos_sound(columns->seqnos, row, count, end - start)) {
            return 0;
        }
        row += count;
    }
    return 1;
}

PyDoc_STRVAR(sound_doc, "sound(numbered, runs, seqnos, op_codes, key_offsets, keys, value_offsets, values, times)\n--\n\n"
                        "Return whether nothing is wrong with a block that has rows; its checksum is not looked at.");

static PyObject *
sound(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 9 || !PyBool_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "sound takes whether the block is numbered, its run table and seven columns");
        return NULL;
    }
    int numbered = args[0] == Py_True;
    Columns columns;
    Py_ssize_t times, bytes = 0;
    column_of(args[8], &times);
    if (times < 0 || !columns_fit(args + 1, &columns) || columns.rows == 0 || columns.rows > BLOCK_ROWS_MAX
        || (times != 0 && times != 8 * columns.rows)) {
        Py_RETURN_FALSE;
    }
    for (int at = 2; at < 9; at++) {
        bytes += PyBytes_GET_SIZE(args[at]);
    }
    int as_told = numbered || (columns.seqnos == NULL && times == 0 && columns.value_offsets != NULL);
    if (bytes > COLUMNS_BYTES_MAX || !as_told || !runs_sound(&columns, numbered)
        || !cells_sound(columns.key_offsets, NULL, columns.rows, columns.key_bytes, 1, KEY_BYTES_MAX)) {
        Py_RETURN_FALSE;
    }
    return PyBool_FromLong(columns.value_offsets == NULL
                               ? columns.value_bytes == 0
                               : cells_sound(columns.value_offsets, columns.op_codes, columns.rows, columns.value_bytes, 0,
                                             VALUE_BYTES_MAX));
}

/* What a server keeps for each partition, as one number of this size each; NULL with an exception. */
static char *
table_of(PyObject *object, Py_buffer *view, int item_bytes, int flags)
{
    if (PyObject_GetBuffer(object, view, flags) < 0) {
        return NULL;
    }
    if (view->len != (Py_ssize_t)item_bytes * PARTITIONS) {
        PyErr_SetString(PyExc_ValueError, "a table has another size than one number for each partition");
        PyBuffer_Release(view);
        return NULL;
    }
    return view->buf;
}

/* The bytes of a run table whose partitions all exist, and the number of its runs; NULL for any other object. */
static const char *
table_runs(PyObject *object, Py_ssize_t *count)
{
    Py_ssize_t size;
    const char *runs = column_of(object, &size);
    if (runs == NULL || size % RUN_BYTES) {
        return NULL;
    }
    *count = size / RUN_BYTES;
    for (Py_ssize_t at = 0; at < *count; at++) {
        if (number_at(runs + at * RUN_BYTES, 0) >= PARTITIONS) {
            return NULL;
        }
    }
    return runs;
}

PyDoc_STRVAR(admitted_doc, "admitted(runs, active, states, highs)\n--\n\n"
                           "Return whether each partition of a run table has the state active, and room for the rows below its last seqno.");

static PyObject *
admitted(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "admitted takes a run table, a state, and each partition's state and high seqno");
        return NULL;
    }
    Py_ssize_t runs_count;
    const char *runs = table_runs(args[0], &runs_count);
    long active = PyLong_AsLong(args[1]);
    if (runs == NULL || PyErr_Occurred()) {
        return PyErr_Occurred() ? NULL : PyBool_FromLong(0);
    }
    Py_buffer state_view, high_view;
    const unsigned char *states = (unsigned char *)table_of(args[2], &state_view, 1, PyBUF_SIMPLE);
    if (states == NULL) {
        return NULL;
    }
    const char *highs = table_of(args[3], &high_view, 8, PyBUF_SIMPLE);
    if (highs == NULL) {
        PyBuffer_Release(&state_view);
        return NULL;
    }
    int all = 1;
    for (Py_ssize_t at = 0; at < runs_count; at++) {
        const char *run = runs + at * RUN_BYTES;
        uint32_t partition = number_at(run, 0), rows = number_at(run + COUNT_AT, 0);
        uint64_t high = long_at(highs + 8 * partition);
        all &= states[partition] == active && high <= SEQNO_MAX && rows <= SEQNO_MAX - high;
    }
    PyBuffer_Release(&state_view);
    PyBuffer_Release(&high_view);
    return PyBool_FromLong(all);
}

PyDoc_STRVAR(numbered_doc, "numbered(runs, time, highs)\n--\n\n"
                           "Return a run table whose rows have the seqnos above each partition's high one, and a time. None if it has no runs.");

static PyObject *
numbered(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "numbered takes a run table, a time, and each partition's high seqno");
        return NULL;
    }
    Py_ssize_t runs_count;
    const char *runs = table_runs(args[0], &runs_count);
    uint64_t time = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (runs == NULL) {
        Py_RETURN_NONE;
    }
    Py_buffer view;
    const char *highs = table_of(args[2], &view, 8, PyBUF_SIMPLE);
    if (highs == NULL) {
        return NULL;
    }
    PyObject *made = PyBytes_FromStringAndSize(runs, runs_count * RUN_BYTES);
    for (Py_ssize_t at = 0; made != NULL && at < runs_count; at++) {
        char *run = PyBytes_AS_STRING(made) + at * RUN_BYTES;
        uint64_t start = long_at(highs + 8 * number_at(run, 0)), end = start + number_at(run + COUNT_AT, 0);
        memcpy(run + START_AT, &start, sizeof start);
        memcpy(run + END_AT, &end, sizeof end);
        memcpy(run + HORIZON_AT, &end, sizeof end);
        memcpy(run + TIME_AT, &time, sizeof time);
    }
    PyBuffer_Release(&view);
    return made;
}

PyDoc_STRVAR(put_ends_doc, "put_ends(runs, *tables)\n--\n\n"
                           "Note in each table, of a uint64 for each partition, where the runs end. Return whether that was done.");

static PyObject *
put_ends(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Py_ssize_t runs_count;
    const char *runs = count ? table_runs(args[0], &runs_count) : NULL;
    if (runs == NULL) {
        Py_RETURN_FALSE;
    }
    for (Py_ssize_t table = 1; table < count; table++) {
        Py_buffer view;
        char *ends = table_of(args[table], &view, 8, PyBUF_WRITABLE);
        if (ends == NULL) {
            return NULL;
        }
        for (Py_ssize_t at = 0; at < runs_count; at++) {
            const char *run = runs + at * RUN_BYTES;
            memcpy(ends + 8 * number_at(run, 0), run + END_AT, 8);
        }
        PyBuffer_Release(&view);
    }
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(summary_doc, "summary(runs)\n--\n\n"
                          "Return how many rows runs have, and whether each ends in a snapshot marker; None where they are not for this function.");

static PyObject *
summary(PyObject *module, PyObject *table)
{
    Py_ssize_t runs_count;
    const char *runs = table_runs(table, &runs_count);
    if (runs == NULL) {
        Py_RETURN_NONE;
    }
    uint64_t rows = 0;
    int complete = 1;
    for (const char *run = runs, *end = runs + runs_count * RUN_BYTES; run < end; run += RUN_BYTES) {
        rows += number_at(run + COUNT_AT, 0);
        complete &= long_at(run + HORIZON_AT) == long_at(run + END_AT);
    }
    return Py_BuildValue("(KO)", (unsigned long long)rows, complete ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"admitted", (PyCFunction)(void (*)(void))admitted, METH_FASTCALL, admitted_doc},
    {"columns", (PyCFunction)(void (*)(void))columns, METH_FASTCALL, columns_doc},
    {"items", (PyCFunction)(void (*)(void))items, METH_FASTCALL, items_doc},
    {"joined", (PyCFunction)(void (*)(void))joined, METH_FASTCALL, joined_doc},
    {"numbers", (PyCFunction)(void (*)(void))numbers, METH_FASTCALL, numbers_doc},
    {"numbered", (PyCFunction)(void (*)(void))numbered, METH_FASTCALL, numbered_doc},
    {"packed", (PyCFunction)(void (*)(void))packed, METH_FASTCALL, packed_doc},
    {"put_ends", (PyCFunction)(void (*)(void))put_ends, METH_FASTCALL, put_ends_doc},
    {"rows", (PyCFunction)(void (*)(void))rows, METH_FASTCALL, rows_doc},
    {"size", size, METH_O, size_doc},
    {"sound", (PyCFunction)(void (*)(void))sound, METH_FASTCALL, sound_doc},
    {"summary", summary, METH_O, summary_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "upr_protocol._rows",
    .m_doc = "Rows of a block as Python objects, and its columns made from such.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__rows(void)
{
    fill_crc_steps(crc_steps, UINT32_C(0xEDB88320));
    return PyModuleDef_Init(&definition);
}
