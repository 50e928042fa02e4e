/* Columns of blocks, as the modules in C read them: numbers at places, cells, and checksums eight bytes at a time. */

#ifndef UPR_COLUMNS_H
#define UPR_COLUMNS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if PY_BIG_ENDIAN
#error "columns are little-endian, and are read here as they lie"
#endif

enum { RUN_BYTES = 40, COUNT_AT = 4, START_AT = 8, END_AT = 16, HORIZON_AT = 24, TIME_AT = 32 };
enum { OP_DELETE = 1 };
/* As in limits.py. */
enum { PARTITIONS = 1024, KEY_BYTES_MAX = 4096 };
static const uint64_t SPAN_MAX = UINT32_MAX, SEQNO_MAX = (UINT64_C(1) << 48) - 1;

static inline uint32_t
number_at(const char *column, Py_ssize_t index)
{
    uint32_t number;
    memcpy(&number, column + 4 * index, sizeof number);
    return number;
}

static inline uint64_t
long_at(const char *place)
{
    uint64_t number;
    memcpy(&number, place, sizeof number);
    return number;
}

/* Whether cells have lengths that are allowed, a delete's none, and are all of their data; so their offsets never fall. */
static inline int
cells_sound(const char *offsets, const char *op_codes, Py_ssize_t rows, Py_ssize_t bytes, uint32_t least, uint32_t most)
{
    int wrong = number_at(offsets, 0) != 0 || number_at(offsets, rows) != (uint64_t)bytes;
    for (Py_ssize_t row = 0; row < rows; row++) {
        uint32_t length = number_at(offsets, row + 1) - number_at(offsets, row);
        wrong |= (length < least) | (length > most);
    }
    for (Py_ssize_t row = 0; op_codes != NULL && row < rows; row++) {
        wrong |= (op_codes[row] == OP_DELETE) & (number_at(offsets, row + 1) != number_at(offsets, row));
    }
    return !wrong;
}

/* Of a CRC of 32 bits: that of each byte with so many zeros behind it. */
typedef uint32_t CrcSteps[8][256];

static inline void
fill_crc_steps(CrcSteps steps, uint32_t polynomial)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) {
            crc = crc & 1 ? polynomial ^ (crc >> 1) : crc >> 1;
        }
        steps[0][byte] = crc;
    }
    for (int zeros = 1; zeros < 8; zeros++) {
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = steps[zeros - 1][byte];
            steps[zeros][byte] = steps[0][crc & 0xFF] ^ (crc >> 8);
        }
    }
}

static inline uint32_t
add_by_steps(CrcSteps steps, uint32_t crc, const char *data, size_t size)
{
    for (; size >= 8; data += 8, size -= 8) {
        uint32_t low = number_at(data, 0) ^ crc, high = number_at(data, 1);
        crc = steps[7][low & 0xFF] ^ steps[6][low >> 8 & 0xFF] ^ steps[5][low >> 16 & 0xFF] ^ steps[4][low >> 24]
              ^ steps[3][high & 0xFF] ^ steps[2][high >> 8 & 0xFF] ^ steps[1][high >> 16 & 0xFF] ^ steps[0][high >> 24];
    }
    for (; size; data++, size--) {
        crc = steps[0][(crc ^ (unsigned char)*data) & 0xFF] ^ (crc >> 8);
    }
    return crc;
}

#endif
