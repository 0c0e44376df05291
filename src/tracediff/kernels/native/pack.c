/* Elements in C order from an array of any layout.
 *
 * Where the last axis is not the one that runs along the memory, the two are gone through in tiles:
 * row by row, every element would be read from another cache line, of which the rest is lost before
 * it is used. */
#include "values.h"

#define LINE 64 /* bytes: a tile has one line of the cache in both directions */

/* `rows` rows of `columns` elements; steps in bytes, those of the target's columns are one element.
 * A tile is read whole before it is written: rows that are a power of two apart share a set of the
 * cache, which holds a few of them only. */
#define ONE_TILE(TYPE, DOWN, ACROSS)                                                                   \
    for (size_t j = 0; j < (ACROSS); j++)                                                          \
        for (size_t i = 0; i < (DOWN); i++)                                                        \
            memcpy(&tile[j][i], source + (ptrdiff_t)j * column + (ptrdiff_t)i * row, sizeof(TYPE)); \
    for (size_t i = 0; i < (DOWN); i++)                                                            \
        for (size_t j = 0; j < (ACROSS); j++)                                                      \
            memcpy(target + i * to_row + j * sizeof(TYPE), &tile[j][i], sizeof(TYPE))

/* Some tiles of one row of tiles after the other: as many columns as there are pages at hand. */
#define TILES(TYPE)                                                                                \
    {                                                                                              \
        enum { SIDE = LINE / sizeof(TYPE), MANY = 8 * SIDE };                                      \
        TYPE tile[SIDE][SIDE];                                                                     \
        for (size_t first = 0; first < columns; first += MANY)                                     \
            for (size_t r = 0; r < rows; r += SIDE)                                                \
                for (size_t c = first; c < columns && c < first + MANY; c += SIDE) {               \
                    const char *source = from + (ptrdiff_t)r * row + (ptrdiff_t)c * column;        \
                    char *target = to + r * to_row + c * sizeof(TYPE);                             \
                    size_t down = rows - r < SIDE ? rows - r : SIDE;                               \
                    size_t across = columns - c < SIDE ? columns - c : SIDE;                       \
                    if (down == SIDE && across == SIDE) {                                          \
                        ONE_TILE(TYPE, SIDE, SIDE);                                                    \
                    } else {                                                                       \
                        ONE_TILE(TYPE, down, across);                                                  \
                    }                                                                              \
                }                                                                                  \
    }                                                                                              \
    break

INLINE void in_tiles(const char *restrict from, size_t rows, ptrdiff_t row, size_t columns,
    ptrdiff_t column, size_t width, char *restrict to, size_t to_row)
{
    switch (width) {
    case 1: TILES(uint8_t);
    case 2: TILES(uint16_t);
    case 4: TILES(uint32_t);
    case 8: TILES(uint64_t);
    default: TILES(Wide);
    }
}

CLONES HIDDEN void tiles(const char *from, size_t rows, ptrdiff_t row, size_t columns, ptrdiff_t column,
    size_t width, char *to, size_t to_row)
{
    if (column == (ptrdiff_t)width)
        for (size_t i = 0; i < rows; i++)
            memcpy(to + i * to_row, from + (ptrdiff_t)i * row, columns * width);
    else if (row == (ptrdiff_t)width) /* of which the compiler can make whole lines */
        in_tiles(from, rows, (ptrdiff_t)width, columns, column, width, to, to_row);
    else
        in_tiles(from, rows, row, columns, column, width, to, to_row);
}

/* The axis before the last that runs along the memory most closely. */
static int closest(int axes, const Axis *axis)
{
    int found = axes - 2;
    for (int a = axes - 3; a >= 0; a--)
        if (axis[a].size > 1 && (axis[found].size < 2 || llabs(axis[a].step) < llabs(axis[found].step)))
            found = a;
    return found;
}

void pack(const char *from, int axes, const Axis *axis, size_t width, char *to)
{
    static const Axis single = {1, 0};
    Axis last = axes ? axis[axes - 1] : single;
    if (axes < 2) {
        tiles(from, 1, 0, last.size, last.step, width, to, 0);
        return;
    }
    int inner = closest(axes, axis);
    size_t at[MOST_AXES] = {0}, to_step[MOST_AXES], step = width;
    for (int a = axes - 1; a >= 0; a--) {
        if (!axis[a].size)
            return;
        to_step[a] = step;
        step *= axis[a].size;
    }
    for (;;) {
        tiles(from, axis[inner].size, axis[inner].step, last.size, last.step, width, to,
            to_step[inner]);
        int a = axes - 2; /* the next place of the other axes, as a counter's */
        for (; a >= 0; a--) {
            if (a == inner)
                continue;
            from += axis[a].step, to += to_step[a];
            if (++at[a] < axis[a].size)
                break;
            from -= axis[a].step * (ptrdiff_t)at[a], to -= to_step[a] * at[a];
            at[a] = 0;
        }
        if (a < 0)
            return;
    }
}
