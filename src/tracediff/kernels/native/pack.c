/* Elements in C order from an array of any layout.
 *
 * Where the last axis is not the one that runs along the memory, the two are gone through in tiles:
 * row by row, every element would be read from another cache line, of which the rest is lost before
 * it is used. */
#include "values.h"

#define LINE 64 /* bytes: a tile has one line of the cache in both directions */
#define PIECE (2 * LINE) /* places of an axis that stay on one thread: whole tiles of any width */
#define AHEAD 16 /* tiles of one row before the next row: as many columns as there are pages at hand */

/* A tile of `down` rows and `across` columns; steps in bytes, those of the target's columns are one
 * element. It is read whole before it is written: rows that are a power of two apart share a set of
 * the cache, which holds a few of them only. */
INLINE void one_tile(const char *restrict from, ptrdiff_t row, ptrdiff_t column, size_t width,
    char *restrict to, size_t to_row, size_t down, size_t across)
{
    char tile[LINE][LINE];
    for (size_t j = 0; j < across; j++)
        for (size_t i = 0; i < down; i++)
            memcpy(tile[j] + i * width, from + (ptrdiff_t)j * column + (ptrdiff_t)i * row, width);
    for (size_t i = 0; i < down; i++)
        for (size_t j = 0; j < across; j++)
            memcpy(to + i * to_row + j * width, tile[j] + i * width, width);
}

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))

/* Of 8 x 8 elements of 4 bytes: pairs of rows are interleaved, then pairs of pairs, then halves. */
AVX2 INLINE void turn_8_of_4(const char *from, char *to, size_t to_row)
{
    __m256 row[8], pair[8], four[8];
    for (int i = 0; i < 8; i++)
        row[i] = _mm256_loadu_ps((const f32 *)(from + i * LINE));
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0x44);
            four[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        __m256 low = _mm256_permute2f128_ps(four[i], four[i + 4], 0x20);
        __m256 high = _mm256_permute2f128_ps(four[i], four[i + 4], 0x31);
        _mm256_storeu_ps((f32 *)(to + i * to_row), low);
        _mm256_storeu_ps((f32 *)(to + (i + 4) * to_row), high);
    }
}

/* Of 8 x 8 elements of 2 bytes, likewise. */
AVX2 INLINE void turn_8_of_2(const char *from, char *to, size_t to_row)
{
    __m128i row[8], pair[8], four[8];
    for (int i = 0; i < 8; i++)
        row[i] = _mm_loadu_si128((const __m128i *)(from + i * LINE));
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm_unpacklo_epi16(row[i], row[i + 1]);
        pair[i + 1] = _mm_unpackhi_epi16(row[i], row[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = _mm_unpacklo_epi32(pair[i + j], pair[i + j + 2]);
            four[i + 2 * j + 1] = _mm_unpackhi_epi32(pair[i + j], pair[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        __m128i low = _mm_unpacklo_epi64(four[i], four[i + 4]);
        __m128i high = _mm_unpackhi_epi64(four[i], four[i + 4]);
        _mm_storeu_si128((__m128i *)(to + 2 * i * to_row), low);
        _mm_storeu_si128((__m128i *)(to + (2 * i + 1) * to_row), high);
    }
}

/* As `one_tile`, of a full tile whose rows run along the memory. */
AVX2 static void turn_tile(
    const char *restrict from, ptrdiff_t column, size_t width, char *restrict to, size_t to_row)
{
    char tile[LINE][LINE];
    size_t side = LINE / width;
    for (size_t j = 0; j < side; j++)
        memcpy(tile[j], from + (ptrdiff_t)j * column, LINE);
    for (size_t i = 0; i < side; i += 8)
        for (size_t j = 0; j < side; j += 8) {
            if (width == 4)
                turn_8_of_4(tile[j] + 4 * i, to + i * to_row + 4 * j, to_row);
            else
                turn_8_of_2(tile[j] + 2 * i, to + i * to_row + 2 * j, to_row);
        }
}

#define AVX512 __attribute__((target("avx512f")))

/* As `turn_tile`, of 16 x 16 elements of 4 bytes: whole lines are read, and whole ones written. Pairs of
 * rows are interleaved, then pairs of pairs, and so on. */
AVX512 static void turn_wide(
    const char *restrict from, ptrdiff_t column, char *restrict to, size_t to_row)
{
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i++)
        a[i] = _mm512_loadu_ps(from + i * column);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d x = _mm512_castps_pd(b[i + j]), y = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            b[i + j] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0x88);
            b[i + j + 4] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        a[j] = _mm512_shuffle_f32x4(b[j], b[j + 8], 0x88);
        a[j + 8] = _mm512_shuffle_f32x4(b[j], b[j + 8], 0xdd);
    }
    for (int i = 0; i < 16; i++)
        _mm512_storeu_ps(to + i * to_row, a[i]);
}

#else
static void turn_tile(
    const char *from, ptrdiff_t column, size_t width, char *to, size_t to_row)
{
    (void)from, (void)column, (void)width, (void)to, (void)to_row;
}
static void turn_wide(const char *from, ptrdiff_t column, char *to, size_t to_row)
{
    (void)from, (void)column, (void)to, (void)to_row;
}
#endif

INLINE void in_tiles(const char *from, size_t rows, ptrdiff_t row, size_t columns,
    ptrdiff_t column, size_t width, char *to, size_t to_row)
{
    const size_t side = LINE / width, many = AHEAD * side;
    const int turned
        = row == (ptrdiff_t)width && (width == 2 || width == 4) && processor >= AVX2_PROCESSOR;
    const int wide = turned && width == 4 && processor == AVX512_PROCESSOR;
    for (size_t first = 0; first < columns; first += many)
        for (size_t r = 0; r < rows; r += side)
            for (size_t c = first; c < columns && c < first + many; c += side) {
                const char *source = from + (ptrdiff_t)r * row + (ptrdiff_t)c * column;
                char *target = to + r * to_row + c * width;
                size_t down = rows - r < side ? rows - r : side;
                size_t across = columns - c < side ? columns - c : side;
                /* The lines after the next of all columns, and those that the next rows go to: too
                 * many for the processor to foresee, and for the L1 cache to keep. */
                for (size_t j = 0; row == (ptrdiff_t)width && j < across; j++)
                    __builtin_prefetch(source + (ptrdiff_t)j * column + 2 * LINE, 0, 2);
                for (size_t i = 0; row == (ptrdiff_t)width && i < down; i++)
                    __builtin_prefetch(target + (side + i) * to_row, 1, 2);
                if (down == side && across == side && wide)
                    turn_wide(source, column, target, to_row);
                else if (down == side && across == side && turned)
                    turn_tile(source, column, width, target, to_row);
                else if (down == side && across == side) /* the compiler knows the size */
                    one_tile(source, row, column, width, target, to_row, side, side);
                else
                    one_tile(source, row, column, width, target, to_row, down, across);
            }
}

/* Where rows follow each other in the memory, of which the compiler can make whole lines. */
INLINE void of_width(const char *from, size_t rows, ptrdiff_t row, size_t columns, ptrdiff_t column,
    size_t width, char *to, size_t to_row)
{
    if (row == (ptrdiff_t)width)
        in_tiles(from, rows, (ptrdiff_t)width, columns, column, width, to, to_row);
    else
        in_tiles(from, rows, row, columns, column, width, to, to_row);
}

CLONES HIDDEN void tiles(const char *from, size_t rows, ptrdiff_t row, size_t columns,
    ptrdiff_t column, size_t width, char *to, size_t to_row)
{
    if (column == (ptrdiff_t)width) {
        for (size_t i = 0; i < rows; i++)
            memcpy(to + i * to_row, from + (ptrdiff_t)i * row, columns * width);
        return;
    }
    switch (width) {
    case 1: of_width(from, rows, row, columns, column, 1, to, to_row); break;
    case 2: of_width(from, rows, row, columns, column, 2, to, to_row); break;
    case 4: of_width(from, rows, row, columns, column, 4, to, to_row); break;
    case 8: of_width(from, rows, row, columns, column, 8, to, to_row); break;
    default: of_width(from, rows, row, columns, column, 16, to, to_row);
    }
}

/* The axis before the last that runs along the memory most closely. */
static int closest(int axes, const Axis *axis)
{
    int found = axes - 2;
    for (int a = axes - 3; a >= 0; a--)
        if (axis[a].size > 1
            && (axis[found].size < 2 || llabs(axis[a].step) < llabs(axis[found].step)))
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

typedef struct {
    const char *from;
    char *to;
    int axes, shared; /* the axis whose pieces are shared out */
    Axis axis[MOST_AXES];
    size_t width, step; /* bytes of the target that a piece has */
} Pieces;

static void pack_pieces(void *data, size_t from, size_t to)
{
    Pieces part = *(const Pieces *)data;
    Axis *axis = &part.axis[part.shared];
    size_t piece = axis->size < PIECE ? 1 : PIECE, last = axis->size;
    axis->size = (to * piece < last ? to * piece : last) - from * piece;
    pack(part.from + axis->step * (ptrdiff_t)(from * piece), part.axes, part.axis, part.width,
        part.to + from * piece * part.step);
}

void pack_together(const char *from, int axes, const Axis *axis, size_t width, char *to)
{
    Pieces all = {.from = from, .to = to, .axes = axes, .width = width, .step = width};
    memcpy(all.axis, axis, (size_t)axes * sizeof *axis);
    while (all.shared < axes - 1 && axis[all.shared].size == 1)
        all.shared++;
    for (int a = all.shared + 1; a < axes; a++)
        all.step *= axis[a].size;
    size_t piece = axis[all.shared].size < PIECE ? 1 : PIECE;
    together((axis[all.shared].size + piece - 1) / piece, pack_pieces, &all);
}
