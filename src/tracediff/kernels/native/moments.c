/* Counts, extremes and power sums of the finite elements, in one pass. */
#include "values.h"

INLINE void add_part(const double *restrict x, Sums *restrict to, double *restrict lows,
    double *restrict highs, int full)
{
    for (size_t i = 0; i < LANES; i++) {
        double sum = to->sum[i], abs = to->abs[i], square = to->square[i];
        double cube = to->cube[i], fourth = to->fourth[i], low = lows[i], high = highs[i];
        int64_t zero = to->zero[i];
#define ROW(R)                                                                                     \
    {                                                                                              \
        double v = x[R * LANES + i], v2 = v * v;                                                   \
        sum += v;                                                                                  \
        abs += fabs(v);                                                                            \
        square += v2;                                                                              \
        if (full) {                                                                                \
            cube += v2 * v;                                                                        \
            fourth += v2 * v2;                                                                     \
        }                                                                                          \
        low = v < low ? v : low;                                                                   \
        high = v > high ? v : high;                                                                \
        zero += v == 0;                                                                            \
    }
        EACH_ROW(ROW)
#undef ROW
        to->sum[i] = sum, to->abs[i] = abs, to->square[i] = square;
        if (full)
            to->cube[i] = cube, to->fourth[i] = fourth;
        lows[i] = low, highs[i] = high;
        to->zero[i] = zero;
    }
}

/* Extremes of a part that is not full. */
INLINE void stretch(const double *restrict x, size_t n, double *restrict low, double *restrict high)
{
    while (n) {
        size_t row = n < LANES ? n : LANES;
        for (size_t i = 0; i < row; i++) {
            low[i] = x[i] < low[i] ? x[i] : low[i];
            high[i] = x[i] > high[i] ? x[i] : high[i];
        }
        x += row, n -= row;
    }
}

/* Counts NaN and infinities, and sets them to zero. */
static void tidy(double *x, size_t n, double *low, double *high, Moments *found)
{
    for (size_t i = 0; i < n; i++) {
        if (fabs(x[i]) <= DBL_MAX) {
            stretch(x + i, 1, low, high);
            continue;
        }
        if (x[i] != x[i])
            found->nan++;
        else
            found->inf++;
        x[i] = 0;
        found->zero--; /* it comes up as one next */
    }
}

INLINE void start(double *lane, double value)
{
    for (size_t i = 0; i < LANES; i++)
        lane[i] = value;
}

INLINE void of_blocks(
    const void *from, int code, size_t n, int full, Moments *found, const Beside *beside)
{
    double x[PART], low[LANES], high[LANES];
    Sums lanes;
    Narrow extremes;
    int in_tiles = !full && (code == F32 || code == BF16) && processor >= AVX2_PROCESSOR;
    for (size_t i = 0; i < LANES; i++)
        extremes.low[i] = INFINITY, extremes.high[i] = -INFINITY;
    start(lanes.low, INFINITY);
    start(lanes.high, -INFINITY);
    memset(lanes.zero, 0, sizeof lanes.zero);
    const char *at = from;
    while (n) {
        size_t block = n < BLOCK ? n : BLOCK;
        n -= block;
        memset(lanes.sum, 0, 5 * sizeof lanes.sum);
        size_t whole = in_tiles ? block - block % LANES : 0;
        if (whole && add_tiles(at, code, whole, &lanes, &extremes, beside)) {
            at += whole * WIDTH[code];
            block -= whole;
        }
        while (block) {
            size_t part = block < PART ? block : PART;
            beside_to(beside, at + part * WIDTH[code]);
            int bad = widen(at, code, part, x);
            ask(at + PART * WIDTH[code], PART * WIDTH[code]);
            if (bad || part < PART) {
                if (bad)
                    tidy(x, part, lanes.low, lanes.high, found);
                else
                    stretch(x, part, lanes.low, lanes.high);
                memset(x + part, 0, (PART - part) * sizeof *x);
                found->zero -= PART - part;
                start(low, 0), start(high, 0); /* taken already */
                add_part(x, &lanes, low, high, full);
            } else
                add_part(x, &lanes, lanes.low, lanes.high, full);
            at += part * WIDTH[code];
            block -= part;
        }
        found->sum += fold(lanes.sum);
        found->abs += fold(lanes.abs);
        found->square += fold(lanes.square);
        if (full) {
            found->cube += fold(lanes.cube);
            found->fourth += fold(lanes.fourth);
        }
    }
    for (size_t i = 0; i < LANES; i++) {
        found->low = extremes.low[i] < found->low ? extremes.low[i] : found->low;
        found->high = extremes.high[i] > found->high ? extremes.high[i] : found->high;
        found->low = lanes.low[i] < found->low ? lanes.low[i] : found->low;
        found->high = lanes.high[i] > found->high ? lanes.high[i] : found->high;
        found->zero += (size_t)lanes.zero[i];
    }
}

CLONES HIDDEN void moments_brief(
    const void *from, int code, size_t n, Moments *found, const Beside *beside)
{
    of_blocks(from, code, n, 0, found, beside);
}

CLONES HIDDEN void moments_full(
    const void *from, int code, size_t n, Moments *found, const Beside *beside)
{
    of_blocks(from, code, n, 1, found, beside);
}

void moments(
    const void *from, int code, size_t n, int full, Moments *found, const Beside *beside)
{
    Moments none = {.low = INFINITY, .high = -INFINITY};
    *found = none;
    if (full)
        moments_full(from, code, n, found, beside);
    else
        moments_brief(from, code, n, found, beside);
}
