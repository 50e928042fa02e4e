/* Stored blocks and their rows of hashes, as the modules in C read them: fields, keys, checksums. Every place in a block is compared
with the end of its data before anything is read there.
*/

#ifndef UPR_BLOCKS_H
#define UPR_BLOCKS_H

#include "../../client/upr_protocol/_columns.h"

enum { SEQNOS, OPS, KEY_OFFSETS, KEYS, VALUE_OFFSETS, VALUES, TIMES, COLUMNS };
/* Fields of a block, which are its columns between these, and their wire types. */
enum { RUNS_FIELD = 1, FIRST_COLUMN = 2, COLUMNS_CRC_FIELD = 9, TABLE_CRC_FIELD = 10 };
enum { BYTES_TYPE = 2, FIXED_TYPE = 5, CRC_BYTES = 4 };
/* Of a row of hashes: its kind and the start of its block; and of the key under which it is stored. */
enum { HASHES_KIND = 1, HASHES_HEAD = 12, BLOCK_KEY_BYTES = 10 };
enum { WORD = 8 };

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

/* Take an encoded block apart; whether it has a table of whole runs, and, where that is to be checked, its checksums are right. */
static int
take_block(const char *block, Py_ssize_t length, int check, const char **places, uint32_t *sizes)
{
    return take_fields(block, length, places, sizes) && sizes[RUNS_FIELD] % RUN_BYTES == 0 && (!check || crcs_fit(places, sizes));
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

#endif
