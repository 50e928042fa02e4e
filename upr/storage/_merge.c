/* Blocks of one run each, made from blocks of many: what merge_slice of compact.py does where no tombstone is purged, no stretch is
kept apart and no block has further columns, without the interpreter lock. And the search of stored blocks for a key, as in
blocks.py: checks of a block, and what its index says. These functions in Python are the reference.
What is not for this module, or contradicts itself, is left to it: then the answer is None. Every place in a block is compared
with the end of its data before anything is read there.
*/

#include "../../client/upr_protocol/_columns.h"

/* As in blocks.py. */
enum { ROW_BYTES = 21 };
enum { SEQNOS, OPS, KEY_OFFSETS, KEYS, VALUE_OFFSETS, VALUES, TIMES, COLUMNS };
/* Fields of a block, which are its columns between these, and their wire types. */
enum { RUNS_FIELD = 1, FIRST_COLUMN = 2, COLUMNS_CRC_FIELD = 9, TABLE_CRC_FIELD = 10 };
enum { BYTES_TYPE = 2, FIXED_TYPE = 5, CRC_BYTES = 4 };
/* Of a row of hashes: its kind and the start of its block; and of the key under which it is stored. */
enum { HASHES_KIND = 1, HASHES_HEAD = 12, BLOCK_KEY_BYTES = 10 };
enum { WORD = 8, WEIGHTS = KEY_BYTES_MAX / WORD + 2 };
/* More comparisons than this for each row are made only by keys whose hashes are forged. */
enum { LOOKS = 16 };

static uint64_t weights[WEIGHTS];
static CrcSteps crc_steps;

/* CRC32C. The library that computes it elsewhere can only be called with the interpreter lock. */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(CRC_BY_TABLES)
#define CRC_BY_PROCESSOR
#endif

static uint32_t
crc_by_tables(uint32_t crc, const char *data, size_t size)
{
    return add_by_steps(crc_steps, crc, data, size);
}

#ifdef CRC_BY_PROCESSOR
/* A processor begins three of its instructions in the time that one takes. */
enum { STRIDE = 1024 };
/* Of each byte of a CRC: what STRIDE zeros behind it make of it. */
static uint32_t past_zeros[4][256];

static inline uint32_t
with_zeros(uint32_t crc)
{
    return past_zeros[0][crc & 0xFF] ^ past_zeros[1][crc >> 8 & 0xFF] ^ past_zeros[2][crc >> 16 & 0xFF] ^ past_zeros[3][crc >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t
crc_by_processor(uint32_t crc, const char *data, size_t size)
{
    for (; size >= 3 * STRIDE; data += 3 * STRIDE, size -= 3 * STRIDE) {
        uint64_t first = crc, second = 0, third = 0;
        for (int line = 0; line < 3 * STRIDE; line += 64) {
            __builtin_prefetch(data + 3 * STRIDE + line);
        }
        for (const char *at = data; at < data + STRIDE; at += WORD) {
            first = __builtin_ia32_crc32di(first, long_at(at));
            second = __builtin_ia32_crc32di(second, long_at(at + STRIDE));
            third = __builtin_ia32_crc32di(third, long_at(at + 2 * STRIDE));
        }
        crc = with_zeros(with_zeros((uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    uint64_t wide = crc;
    for (; size >= WORD; data += WORD, size -= WORD) {
        wide = __builtin_ia32_crc32di(wide, long_at(data));
    }
    crc = (uint32_t)wide;
    for (; size; data++, size--) {
        crc = __builtin_ia32_crc32qi(crc, (unsigned char)*data);
    }
    return crc;
}
#endif

static uint32_t (*add_to_crc)(uint32_t, const char *, size_t) = crc_by_tables;

static void
choose_crc(void)
{
    fill_crc_steps(crc_steps, UINT32_C(0x82F63B78));
#ifdef CRC_BY_PROCESSOR
    if (__builtin_cpu_supports("sse4.2")) {
        add_to_crc = crc_by_processor;
        static const char zeros[STRIDE];
        for (uint32_t at = 0; at < 4 * 256; at++) {
            past_zeros[at / 256][at % 256] = crc_by_processor(at % 256 << 8 * (at / 256), zeros, STRIDE);
        }
    }
#endif
}

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

/* Read a number of at most 35 bits; NULL where there is none. */
static const unsigned char *
take_varint(const unsigned char *at, const unsigned char *end, uint64_t *number)
{
    *number = 0;
    for (int shift = 0; shift < 35 && at < end; shift += 7) {
        *number |= (uint64_t)(*at & 0x7F) << shift;
        if (*at++ < 0x80) {
            return at;
        }
    }
    return NULL;
}

/* Take an encoded block apart into its fields 1 to 10, each once at most; whether it has no others. */
static int
take_fields(const char *block, Py_ssize_t length, const char **places, uint32_t *sizes)
{
    const unsigned char *at = (const unsigned char *)block, *end = at + length;
    while (at < end) {
        int tag = *at++, field = tag >> 3;
        uint64_t size = CRC_BYTES;
        if (field < RUNS_FIELD || field > TABLE_CRC_FIELD || places[field] != NULL
            || (tag & 7) != (field >= COLUMNS_CRC_FIELD ? FIXED_TYPE : BYTES_TYPE)) {
            return 0;
        }
        if (field < COLUMNS_CRC_FIELD && (at = take_varint(at, end, &size)) == NULL) {
            return 0;
        }
        if (size > (uint64_t)(end - at)) {
            return 0;
        }
        places[field] = (const char *)at;
        sizes[field] = (uint32_t)size;
        at += size;
    }
    return 1;
}

/* Whether the checksums of a block that was taken apart are right. */
static int
crcs_fit(const char *const *places, const uint32_t *sizes)
{
    uint32_t told[2] = {0, 0};
    for (int at = 0; at < 2; at++) {
        if (places[COLUMNS_CRC_FIELD + at] != NULL) {
            memcpy(&told[at], places[COLUMNS_CRC_FIELD + at], CRC_BYTES);
        }
    }
    uint32_t crc = add_to_crc(UINT32_MAX, (const char *)(sizes + FIRST_COLUMN), COLUMNS * sizeof *sizes);
    for (int column = 0; column < COLUMNS; column++) {
        crc = add_to_crc(crc, places[FIRST_COLUMN + column], sizes[FIRST_COLUMN + column]);
    }
    return ~crc == told[0] && ~add_to_crc(UINT32_MAX, places[RUNS_FIELD], sizes[RUNS_FIELD]) == told[1];
}

/* Take a block apart; whether its parts fit each other, and, where that is to be checked, its checksums. */
static int
take_source(PyObject *block, int check, Source *source)
{
    const char *places[TABLE_CRC_FIELD + 1] = {NULL};
    uint32_t sizes[TABLE_CRC_FIELD + 1] = {0}, *columns = sizes + FIRST_COLUMN;
    if (!take_fields(PyBytes_AS_STRING(block), PyBytes_GET_SIZE(block), places, sizes) || sizes[RUNS_FIELD] % RUN_BYTES
        || (check && !crcs_fit(places, sizes))) {
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

/* Write the key of a block, as block_key of keyspace.py. */
static void
write_key(char *to, uint32_t partition, uint64_t end)
{
    *to++ = (char)(partition >> 8);
    *to++ = (char)partition;
    for (int shift = 56; shift >= 0; shift -= 8) {
        *to++ = (char)(end >> shift);
    }
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
    fit = take_fields(view.buf, view.len, places, sizes) && sizes[RUNS_FIELD] % RUN_BYTES == 0 && crcs_fit(places, sizes);
    Py_END_ALLOW_THREADS
    PyObject *spans = fit ? spans_of(view.buf, places, sizes) : Py_NewRef(Py_None);
    PyBuffer_Release(&view);
    return spans;
}

PyDoc_STRVAR(candidate_doc, "candidate(rows, partition, end, above, most, blocks, hash)\n--\n\n"
                            "As BlockCursor.candidate, which is the reference; rows iterates over key and value of stored hashes, newest first.");

/* What is looked for in the rows of hashes, and what was found. */
typedef struct {
    unsigned partition;
    uint64_t end;
    uint64_t above;
    Py_ssize_t most;
    Py_ssize_t blocks;
    unsigned hash;
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
        if (number_at(hashes, row) == search->hash) {
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
    if (!PyArg_ParseTuple(args, "OIKKnnI", &rows, &search.partition, &end, &above, &search.most, &search.blocks, &search.hash)) {
        return NULL;
    }
    if (!PyIter_Check(rows)) {
        PyErr_SetString(PyExc_TypeError, "rows are no iterator");
        return NULL;
    }
    search.end = end, search.above = above;
    int more = end > above;
    while (more > 0 && (row = PyIter_Next(rows)) != NULL) {
        more = look_at_row(&search, row);
        Py_DECREF(row);
    }
    if (PyErr_Occurred()) {
        Py_XDECREF(search.found);
        return NULL;
    }
    return Py_BuildValue("(Nn)", search.found == NULL ? Py_NewRef(Py_None) : search.found, search.size);
}

static PyMethodDef methods[] = {
    {"merge", (PyCFunction)(void (*)(void))merge, METH_FASTCALL, merge_doc},
    {"opened", opened, METH_O, opened_doc},
    {"candidate", candidate, METH_VARARGS, candidate_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "upr.storage._merge",
    .m_doc = "Blocks of one run each, made from blocks of many, and searched.",
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
