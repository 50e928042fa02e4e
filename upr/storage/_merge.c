/* Blocks of one run each, made from blocks of many: what merge_slice of compact.py does where no tombstone is purged, no stretch is
kept apart and no block has further columns, without the interpreter lock. That function in Python is the reference. What is not
for this module, or contradicts itself, is left to it: then the answer is None.
*/

#include "_blocks.h"

/* As in blocks.py. */
enum { ROW_BYTES = 21 };
enum { WEIGHTS = KEY_BYTES_MAX / WORD + 2 };
/* More comparisons than this for each row are made only by keys whose hashes are forged. */
enum { LOOKS = 16 };

static uint64_t weights[WEIGHTS];

/* The hash of a key, as hashes_of of keyspace.py. */

static void
fill_weights(void)
{
    for (uint64_t at = 0; at < WEIGHTS; at++) {
        uint64_t mixed = (at + 1) * UINT64_C(0x9E3779B97F4A7C15);
        mixed = (mixed ^ mixed >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
        mixed = (mixed ^ mixed >> 27) * UINT64_C(0x94D049BB133111EB);
        weights[at] = (mixed ^ mixed >> 31) | 1;
    }
}

static uint32_t
hash_of(const char *key, uint32_t size)
{
    uint64_t sum = size * weights[WEIGHTS - 1];
    uint32_t at = 0;
    for (; at + WORD <= size; at += WORD) {
        uint64_t word = long_at(key + at);
        sum += (word ^ word >> 32) * weights[at / WORD];
    }
    if (at < size) {
        uint64_t word = 0;
        memcpy(&word, key + at, size - at);
        sum += (word ^ word >> 32) * weights[at / WORD];
    }
    sum ^= sum >> 32;
    return (uint32_t)(sum * weights[WEIGHTS - 2] >> 32);
}

/* Block whose rows are merged; a column is NULL where it is absent. */
typedef struct {
    const char *runs;
    Py_ssize_t run_count;
    const char *columns[COLUMNS];
} Source;

typedef struct {
    const char *key;
    const char *value;
    uint64_t seqno;
    int64_t time;
    uint32_t key_size;
    uint32_t value_size;
    uint32_t hash;
    char op;
    char superseded;
} Row;

/* What the blocks have of a partition. */
typedef struct {
    uint64_t end;
    uint64_t horizon;
    Py_ssize_t first;
    Py_ssize_t count;
} Share;

/* Block that is to be made. */
typedef struct {
    uint32_t partition;
    uint64_t start;
    uint64_t end;
    uint64_t horizon;
    int64_t time;
    const Row *rows;
    Py_ssize_t count;
    uint32_t sizes[COLUMNS];
    PyObject *data;
    PyObject *hashes;
} Piece;

typedef struct {
    PyObject *blocks;
    int check;
    Source *sources;
    Py_ssize_t source_count;
    uint32_t first;
    uint32_t last;
    uint64_t most;
    const char *stored;
    /* Limits of a purge, as in PurgeLimits; NULL for none. */
    const char *passed;
    const char *never;
    int64_t old;
    int64_t very_old;
    Share shares[PARTITIONS];
    Row *rows;
    Py_ssize_t row_count;
    uint32_t *places;
    Piece *pieces;
    Py_ssize_t piece_count;
    Py_ssize_t piece_room;
} Merge;

/* What a step without the interpreter lock ends with. */
typedef enum { DONE, NOT_HERE, NO_MEMORY } Outcome;

/* Take a block apart; whether its parts fit each other, and, where that is to be checked, its checksums. */
static int
take_source(PyObject *block, int check, Source *source)
{
    const char *places[TABLE_CRC_FIELD + 1] = {NULL};
    uint32_t sizes[TABLE_CRC_FIELD + 1] = {0}, *columns = sizes + FIRST_COLUMN;
    if (!take_block(PyBytes_AS_STRING(block), PyBytes_GET_SIZE(block), check, places, sizes)) {
        return 0;
    }
    source->runs = places[RUNS_FIELD];
    source->run_count = sizes[RUNS_FIELD] / RUN_BYTES;
    uint64_t rows = 0;
    for (Py_ssize_t at = 0; at < source->run_count; at++) {
        rows += number_at(source->runs + RUN_BYTES * at + COUNT_AT, 0);
    }
    for (int column = 0; column < COLUMNS; column++) {
        source->columns[column] = columns[column] ? places[FIRST_COLUMN + column] : NULL;
    }
    if (rows == 0) {
        return 1;
    }
    if (rows > INT32_MAX / 8 || columns[KEY_OFFSETS] != 4 * (rows + 1) || columns[VALUE_OFFSETS] != 4 * (rows + 1)
        || (columns[SEQNOS] && columns[SEQNOS] != 4 * rows) || (columns[OPS] && columns[OPS] != rows)
        || (columns[TIMES] && columns[TIMES] != 8 * rows)) {
        return 0;
    }
    return cells_sound(source->columns[KEY_OFFSETS], NULL, rows, columns[KEYS], 0, KEY_BYTES_MAX)
           && cells_sound(source->columns[VALUE_OFFSETS], NULL, rows, columns[VALUES], 0, INT32_MAX);
}

/* Take all blocks apart; whether each one fits. */
static int
take_sources(Merge *merge)
{
    int fit = 1;
    for (Py_ssize_t at = 0; fit && at < merge->source_count; at++) {
        fit = take_source(PyTuple_GET_ITEM(merge->blocks, at), merge->check, &merge->sources[at]);
    }
    return fit;
}

/* The seqno of a row of a run, whose rows begin at ``first``. */
static uint64_t
seqno_of(const Source *source, const char *run, Py_ssize_t first, Py_ssize_t row)
{
    uint64_t offset = source->columns[SEQNOS] ? number_at(source->columns[SEQNOS], row) : (uint64_t)(row - first + 1);
    return long_at(run + START_AT) + offset;
}

/* Count each partition's rows, and note where its runs end; whether the runs say nothing impossible. */
static int
count_rows(Merge *merge)
{
    for (const Source *source = merge->sources; source < merge->sources + merge->source_count; source++) {
        for (Py_ssize_t at = 0; at < source->run_count; at++) {
            const char *run = source->runs + RUN_BYTES * at;
            uint32_t partition = number_at(run, 0);
            if (partition >= PARTITIONS) {
                return 0;
            }
            Share *share = &merge->shares[partition];
            uint64_t start = long_at(run + START_AT), end = long_at(run + END_AT), horizon = long_at(run + HORIZON_AT);
            if (end <= start || end - start > SPAN_MAX || horizon < end || horizon > SEQNO_MAX
                || number_at(run + COUNT_AT, 0) > end - start) {
                return 0;
            }
            share->end = end > share->end ? end : share->end;
            share->horizon = horizon > share->horizon ? horizon : share->horizon;
            if (partition >= merge->first && partition < merge->last) {
                share->count += number_at(run + COUNT_AT, 0);
            }
        }
    }
    Py_ssize_t first = 0;
    for (Share *share = merge->shares; share < merge->shares + PARTITIONS; share++) {
        share->first = first;
        first += share->count;
        /* It counts the rows that are placed. */
        share->count = 0;
    }
    merge->row_count = first;
    return 1;
}

/* Place the rows of a source that are not stored yet behind those of their partitions; whether the seqnos of each run rise. */
static int
place_rows(Merge *merge, const Source *source)
{
    const char *const *columns = source->columns;
    Py_ssize_t first = 0, last = 0;
    for (Py_ssize_t at = 0; at < source->run_count; at++, first = last) {
        const char *run = source->runs + RUN_BYTES * at;
        uint32_t partition = number_at(run, 0);
        last = first + number_at(run + COUNT_AT, 0);
        if (partition < merge->first || partition >= merge->last) {
            continue;
        }
        Share *share = &merge->shares[partition];
        uint64_t stored = long_at(merge->stored + 8 * partition), before = long_at(run + START_AT);
        for (Py_ssize_t row = first; row < last; row++) {
            uint64_t seqno = seqno_of(source, run, first, row);
            if (seqno <= before || seqno > long_at(run + END_AT)) {
                return 0;
            }
            before = seqno;
            if (seqno <= stored) {
                continue;
            }
            uint32_t key = number_at(columns[KEY_OFFSETS], row), value = number_at(columns[VALUE_OFFSETS], row);
            Row *placed = &merge->rows[share->first + share->count++];
            placed->key = columns[KEYS] + key;
            placed->key_size = number_at(columns[KEY_OFFSETS], row + 1) - key;
            placed->value = columns[VALUES] + value;
            placed->value_size = number_at(columns[VALUE_OFFSETS], row + 1) - value;
            placed->seqno = seqno;
            placed->time = (int64_t)long_at(columns[TIMES] ? columns[TIMES] + 8 * row : run + TIME_AT);
            placed->op = columns[OPS] ? columns[OPS][row] : 0;
            placed->hash = hash_of(placed->key, placed->key_size);
            placed->superseded = 0;
        }
    }
    return 1;
}

/* Drop the rows of a partition whose key a later one has; whether that took no more comparisons than it should. */
static int
drop_superseded(Merge *merge, Share *share)
{
    Row *rows = merge->rows + share->first;
    size_t size = 2;
    while (size < 2 * (size_t)share->count) {
        size *= 2;
    }
    memset(merge->places, 0, size * sizeof *merge->places);
    Py_ssize_t left = LOOKS * (share->count + 1), superseded = 0;
    for (Py_ssize_t at = share->count - 1; at >= 0; at--) {
        Row *row = &rows[at];
        size_t place = row->hash & (size - 1);
        for (; merge->places[place]; place = (place + 1) & (size - 1)) {
            const Row *later = &rows[merge->places[place] - 1];
            if (left-- == 0) {
                return 0;
            }
            if (later->hash == row->hash && later->key_size == row->key_size
                && memcmp(later->key, row->key, row->key_size) == 0) {
                break;
            }
        }
        row->superseded = merge->places[place] != 0;
        superseded += row->superseded;
        if (!row->superseded) {
            merge->places[place] = (uint32_t)at + 1;
        }
    }
    if (superseded) {
        Py_ssize_t kept = 0;
        for (Py_ssize_t at = 0; at < share->count; at++) {
            if (!rows[at].superseded) {
                rows[kept++] = rows[at];
            }
        }
        share->count = kept;
    }
    return 1;
}

/* Whether one of a partition's tombstones may be purged. */
static int
purges(const Merge *merge, uint32_t partition)
{
    const Share *share = &merge->shares[partition];
    const Row *row = merge->rows + share->first, *end = row + share->count;
    if (merge->passed == NULL || long_at(merge->stored + 8 * partition) != 0) {
        return 0;
    }
    uint64_t passed = long_at(merge->passed + 8 * partition), never = long_at(merge->never + 8 * partition);
    int going = 0;
    for (; row < end; row++) {
        int one = (row->seqno <= never && row->time <= merge->very_old) || (row->seqno <= passed && row->time <= merge->old);
        going |= row->op && one;
    }
    return going;
}

static Py_ssize_t
varint_size(uint32_t number)
{
    Py_ssize_t size = 1;
    while (number >>= 7) {
        size++;
    }
    return size;
}

/* Choose the rows of a piece, from its start on: as many as stay within so many bytes, or one; ``left`` are those of its partition. */
static void
fill_piece(Piece *piece, Py_ssize_t left, uint64_t end, uint64_t most)
{
    const Row *rows = piece->rows;
    uint64_t size = 0;
    Py_ssize_t count = 0;
    while (count < left) {
        size += (uint64_t)rows[count].key_size + rows[count].value_size + ROW_BYTES;
        if (size > most && count > 0) {
            break;
        }
        count++;
    }
    piece->end = count == left ? end : rows[count - 1].seqno;
    if (piece->end - piece->start > SPAN_MAX) {
        piece->end = piece->start + SPAN_MAX;
        while (count > 0 && rows[count - 1].seqno > piece->end) {
            count--;
        }
    }
    piece->count = count;
    uint64_t keys = 0, values = 0;
    char ops = 0;
    int dated = 0;
    piece->time = count ? rows[0].time : 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        keys += rows[at].key_size;
        values += rows[at].value_size;
        ops |= rows[at].op;
        dated |= rows[at].time != rows[0].time;
        piece->time = rows[at].time > piece->time ? rows[at].time : piece->time;
    }
    piece->sizes[SEQNOS] = (uint64_t)count == piece->end - piece->start ? 0 : (uint32_t)(4 * count);
    piece->sizes[OPS] = ops ? (uint32_t)count : 0;
    piece->sizes[KEY_OFFSETS] = piece->sizes[VALUE_OFFSETS] = (uint32_t)(4 * (count + 1));
    piece->sizes[KEYS] = (uint32_t)keys;
    piece->sizes[VALUES] = (uint32_t)values;
    piece->sizes[TIMES] = dated ? (uint32_t)(8 * count) : 0;
}

/* Plan the blocks of a partition: one, or several that share its horizon. */
static Outcome
plan_pieces(Merge *merge, uint32_t partition)
{
    const Share *share = &merge->shares[partition];
    uint64_t start = long_at(merge->stored + 8 * partition);
    Py_ssize_t taken = 0;
    while (start < share->end) {
        if (merge->piece_count == merge->piece_room) {
            Py_ssize_t room = 2 * merge->piece_room + 128;
            Piece *more = PyMem_RawRealloc(merge->pieces, room * sizeof *more);
            if (more == NULL) {
                return NO_MEMORY;
            }
            merge->pieces = more;
            merge->piece_room = room;
        }
        Piece *piece = &merge->pieces[merge->piece_count++];
        *piece = (Piece){.partition = partition, .start = start, .horizon = share->horizon};
        piece->rows = merge->rows + share->first + taken;
        fill_piece(piece, share->count - taken, share->end, merge->most);
        if (piece->end <= start) {
            return NOT_HERE;
        }
        taken += piece->count;
        start = piece->end;
    }
    return taken == share->count ? DONE : NOT_HERE;
}

/* Take the blocks apart, sort the rows by partition, drop what is superseded, and plan the blocks. */
static Outcome
plan(Merge *merge)
{
    if (!take_sources(merge) || !count_rows(merge)) {
        return NOT_HERE;
    }
    merge->rows = PyMem_RawMalloc((merge->row_count + 1) * sizeof *merge->rows);
    if (merge->rows == NULL || merge->row_count > INT32_MAX) {
        return merge->rows == NULL ? NO_MEMORY : NOT_HERE;
    }
    for (Py_ssize_t at = 0; at < merge->source_count; at++) {
        if (!place_rows(merge, &merge->sources[at])) {
            return NOT_HERE;
        }
    }
    Py_ssize_t most = 0;
    for (const Share *share = merge->shares + merge->first; share < merge->shares + merge->last; share++) {
        most = share->count > most ? share->count : most;
    }
    /* Twice as many, up to the next power of two. */
    merge->places = PyMem_RawMalloc((4 * most + 2) * sizeof *merge->places);
    if (merge->places == NULL) {
        return NO_MEMORY;
    }
    for (uint32_t partition = merge->first; partition < merge->last; partition++) {
        if (!drop_superseded(merge, &merge->shares[partition]) || purges(merge, partition)) {
            return NOT_HERE;
        }
        Outcome outcome = plan_pieces(merge, partition);
        if (outcome != DONE) {
            return outcome;
        }
    }
    return DONE;
}

static char *
put(char *to, const void *from, size_t size)
{
    /* A column without bytes has no place. */
    if (size) {
        memcpy(to, from, size);
    }
    return to + size;
}

/* Put the tag and the length of a field. */
static char *
put_head(char *to, int field, uint32_t size)
{
    *to++ = (char)(field << 3 | BYTES_TYPE);
    for (; size > 0x7F; size >>= 7) {
        *to++ = (char)((size & 0x7F) | 0x80);
    }
    *to++ = (char)size;
    return to;
}

/* Put a column of a piece; returns where it ends. */
static char *
put_column(const Piece *piece, int column, char *to)
{
    const Row *rows = piece->rows, *end = piece->rows + piece->count;
    uint32_t key_end = 0, value_end = 0;
    if (column == KEY_OFFSETS || column == VALUE_OFFSETS) {
        to = put(to, &key_end, sizeof key_end);
    }
    for (const Row *row = rows; row < end; row++) {
        uint32_t seqno = (uint32_t)(row->seqno - piece->start);
        switch (column) {
        case SEQNOS:
            to = put(to, &seqno, sizeof seqno);
            break;
        case OPS:
            *to++ = row->op;
            break;
        case KEY_OFFSETS:
            key_end += row->key_size;
            to = put(to, &key_end, sizeof key_end);
            break;
        case KEYS:
            to = put(to, row->key, row->key_size);
            break;
        case VALUE_OFFSETS:
            value_end += row->value_size;
            to = put(to, &value_end, sizeof value_end);
            break;
        case VALUES:
            to = put(to, row->value, row->value_size);
            break;
        default:
            to = put(to, &row->time, sizeof row->time);
        }
    }
    return to;
}

static char *
put_crc(char *to, int field, uint32_t crc)
{
    *to++ = (char)(field << 3 | FIXED_TYPE);
    return put(to, &crc, sizeof crc);
}

/* Write a block as the bytes of a Block message; whether protobuf would have its checksums: it leaves out those that are 0. */
static int
write_block(const Piece *piece)
{
    char run[RUN_BYTES];
    uint32_t head[2] = {piece->partition, (uint32_t)piece->count};
    uint64_t told[4] = {piece->start, piece->end, piece->horizon, (uint64_t)piece->time};
    memcpy(run, head, sizeof head);
    memcpy(run + START_AT, told, sizeof told);
    char *to = PyBytes_AS_STRING(piece->data);
    to = put(put_head(to, RUNS_FIELD, RUN_BYTES), run, RUN_BYTES);
    uint32_t crc = add_to_crc(UINT32_MAX, (const char *)piece->sizes, sizeof piece->sizes);
    for (int column = 0; column < COLUMNS; column++) {
        if (piece->sizes[column]) {
            char *first = put_head(to, FIRST_COLUMN + column, piece->sizes[column]);
            to = put_column(piece, column, first);
            crc = add_to_crc(crc, first, to - first);
        }
    }
    uint32_t table_crc = ~add_to_crc(UINT32_MAX, run, RUN_BYTES);
    put_crc(put_crc(to, COLUMNS_CRC_FIELD, ~crc), TABLE_CRC_FIELD, table_crc);
    return ~crc != 0 && table_crc != 0;
}

/* Write the hashes of a block's keys, as pack_hashes of keyspace.py. */
static void
write_hashes(const Piece *piece)
{
    char *first = PyBytes_AS_STRING(piece->hashes), *to = first;
    uint32_t kind = HASHES_KIND;
    to = put(put(to, &kind, sizeof kind), &piece->start, sizeof piece->start);
    for (Py_ssize_t at = 0; at < piece->count; at++) {
        to = put(to, &piece->rows[at].hash, sizeof piece->rows[at].hash);
    }
    char key[BLOCK_KEY_BYTES];
    write_key(key, piece->partition, piece->end);
    uint32_t crc = ~add_to_crc(add_to_crc(UINT32_MAX, key, sizeof key), first, to - first);
    put(to, &crc, sizeof crc);
}

/* Make room for the bytes of all blocks and hashes; -1 with an exception. */
static int
make_room(Merge *merge)
{
    for (Piece *piece = merge->pieces; piece < merge->pieces + merge->piece_count; piece++) {
        Py_ssize_t size = 2 + RUN_BYTES + 2 * (1 + CRC_BYTES);
        for (int column = 0; column < COLUMNS; column++) {
            uint32_t bytes = piece->sizes[column];
            size += bytes ? 1 + varint_size(bytes) + (Py_ssize_t)bytes : 0;
        }
        piece->data = PyBytes_FromStringAndSize(NULL, size);
        piece->hashes = PyBytes_FromStringAndSize(NULL, HASHES_HEAD + 4 * piece->count + CRC_BYTES);
        if (piece->data == NULL || piece->hashes == NULL) {
            return -1;
        }
    }
    return 0;
}

/* Return the pieces as tuples in a list. */
static PyObject *
told(const Merge *merge)
{
    PyObject *list = PyList_New(merge->piece_count);
    for (Py_ssize_t at = 0; list != NULL && at < merge->piece_count; at++) {
        const Piece *piece = &merge->pieces[at];
        PyObject *one = Py_BuildValue("(IKKnOO)", piece->partition, (unsigned long long)piece->end,
                                      (unsigned long long)piece->horizon, piece->count, piece->data, piece->hashes);
        if (one == NULL) {
            Py_CLEAR(list);
        }
        else {
            PyList_SET_ITEM(list, at, one);
        }
    }
    return list;
}

/* Return what merge does, once everything is taken apart. */
static PyObject *
merged(Merge *merge)
{
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = plan(merge);
    Py_END_ALLOW_THREADS
    if (outcome == NO_MEMORY) {
        return PyErr_NoMemory();
    }
    if (outcome == NOT_HERE) {
        Py_RETURN_NONE;
    }
    if (make_room(merge) < 0) {
        return NULL;
    }
    int whole = 1;
    Py_BEGIN_ALLOW_THREADS
    for (const Piece *piece = merge->pieces; piece < merge->pieces + merge->piece_count; piece++) {
        whole &= write_block(piece);
        write_hashes(piece);
    }
    Py_END_ALLOW_THREADS
    return whole ? told(merge) : Py_NewRef(Py_None);
}

static void
give_back(Merge *merge)
{
    for (Py_ssize_t at = 0; at < merge->piece_count; at++) {
        Py_XDECREF(merge->pieces[at].data);
        Py_XDECREF(merge->pieces[at].hashes);
    }
    PyMem_RawFree(merge->sources);
    PyMem_RawFree(merge->rows);
    PyMem_RawFree(merge->places);
    PyMem_RawFree(merge->pieces);
    PyMem_RawFree(merge);
}

PyDoc_STRVAR(merge_doc, "merge(blocks, check, first, last, most, stored, limits)\n--\n\n"
                        "Return partition, end, horizon, rows, bytes and hashes of the new blocks of partitions first to last - 1.\n"
                        "A new one has at most so many bytes, or one row. check says whether the checksums of the old ones are\n"
                        "verified. None if a delete may be purged, by limits as in PurgeLimits, or if the blocks are not for this\n"
                        "function.");

/* Borrow a table of a uint64 for each partition; NULL with an exception. */
static const char *
table_of(PyObject *object, Py_buffer *view)
{
    if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_ND) < 0) {
        return NULL;
    }
    if (view->len != 8 * PARTITIONS || view->itemsize != 8 || view->format == NULL || strchr("LQ", view->format[0]) == NULL) {
        PyErr_SetString(PyExc_ValueError, "a table is not one uint64 for each partition");
        return NULL;
    }
    return view->buf;
}

/* Take the arguments apart, and merge; ``views`` are to be released. */
static PyObject *
taken_apart(Merge *work, PyObject *const *args, Py_buffer *views)
{
    PyObject *limits = args[6], *passed, *never;
    long first = PyLong_AsLong(args[2]), last = PyLong_AsLong(args[3]), most = PyLong_AsLong(args[4]);
    long long old, very_old;
    if (PyErr_Occurred() || (work->stored = table_of(args[5], &views[0])) == NULL) {
        return NULL;
    }
    if (limits != Py_None) {
        if (!PyArg_ParseTuple(limits, "OLOL", &passed, &old, &never, &very_old)
            || (work->passed = table_of(passed, &views[1])) == NULL || (work->never = table_of(never, &views[2])) == NULL) {
            return NULL;
        }
        work->old = old, work->very_old = very_old;
    }
    work->blocks = args[0];
    work->check = args[1] == Py_True;
    work->source_count = PyTuple_GET_SIZE(args[0]);
    work->sources = PyMem_RawCalloc(work->source_count + 1, sizeof *work->sources);
    if (work->sources == NULL) {
        return PyErr_NoMemory();
    }
    int fit = first >= 0 && first <= last && last <= PARTITIONS && most >= 0 && most <= INT32_MAX;
    for (Py_ssize_t at = 0; fit && at < work->source_count; at++) {
        fit = PyBytes_CheckExact(PyTuple_GET_ITEM(work->blocks, at));
    }
    work->first = (uint32_t)first, work->last = (uint32_t)last, work->most = (uint64_t)most;
    return fit ? merged(work) : Py_NewRef(Py_None);
}

static PyObject *
merge(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 7 || !PyTuple_CheckExact(args[0]) || !PyBool_Check(args[1])
        || (args[6] != Py_None && !PyTuple_Check(args[6]))) {
        PyErr_SetString(PyExc_TypeError, "merge takes a tuple of blocks, whether to check them, two partitions, bytes, a table of seqnos, and limits");
        return NULL;
    }
    Merge *work = PyMem_RawCalloc(1, sizeof *work);
    if (work == NULL) {
        return PyErr_NoMemory();
    }
    Py_buffer views[3] = {{0}, {0}, {0}};
    PyObject *made = taken_apart(work, args, views);
    give_back(work);
    for (int at = 0; at < 3; at++) {
        PyBuffer_Release(&views[at]);
    }
    return made;
}

static PyMethodDef methods[] = {
    {"merge", (PyCFunction)(void (*)(void))merge, METH_FASTCALL, merge_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "upr.storage._merge",
    .m_doc = "Blocks of one run each, made from blocks of many.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__merge(void)
{
    choose_crc();
    fill_weights();
    return PyModuleDef_Init(&definition);
}
