/* Error figures of two arrays, in one pass over both. */
#include "values.h"

typedef struct {
    double top[LANES], delta[LANES], a[LANES], b[LANES], worst[LANES];
    int64_t different[LANES];
} Lanes;

INLINE void add_part(
    const double *restrict x, const double *restrict y, double scale, Lanes *restrict to)
{
    for (size_t i = 0; i < LANES; i++) {
        double top = to->top[i], delta = to->delta[i], a = to->a[i], b = to->b[i];
        double worst = to->worst[i];
        int64_t different = to->different[i];
#define ROW(R)                                                                                     \
    {                                                                                              \
        double v = x[R * LANES + i], w = y[R * LANES + i], d = fabs(v - w), size = fabs(v);        \
        double relative = d / (size > scale ? size : scale);                                       \
        top = d > top ? d : top;                                                                   \
        worst = relative > worst ? relative : worst;                                               \
        delta += d * d;                                                                            \
        a += v * v;                                                                                \
        b += w * w;                                                                                \
        different += v != w;                                                                       \
    }
        EACH_ROW(ROW)
#undef ROW
        to->top[i] = top, to->delta[i] = delta, to->a[i] = a, to->b[i] = b;
        to->worst[i] = worst;
        to->different[i] = different;
    }
}

/* Sets what does not count to zero on both sides, and counts. */
INLINE void tidy(
    double *restrict x, double *restrict y, const uint8_t *restrict keep, size_t n, Figures *row)
{
    int64_t nonfinite = 0, used = 0;
    for (size_t i = 0; i < n; i++) {
        double v = x[i], w = y[i];
        int64_t finite = (fabs(v) <= DBL_MAX) & (fabs(w) <= DBL_MAX);
        int64_t same = (v == w) | ((v != v) & (w != w));
        int64_t counts = keep ? finite & (keep[i] != 0) : finite;
        nonfinite += !finite & !same;
        used += counts;
        x[i] = counts ? v : 0;
        y[i] = counts ? w : 0;
    }
    memset(x + n, 0, (PART - n) * sizeof *x);
    memset(y + n, 0, (PART - n) * sizeof *y);
    row->nonfinite += (double)nonfinite;
    row->used += (double)used;
}

INLINE double largest(const double *lane)
{
    double found = 0;
    for (size_t i = 0; i < LANES; i++)
        found = lane[i] > found ? lane[i] : found;
    return found;
}

CLONES void differences(const void *a, int code_a, const void *b, int code_b, const uint8_t *keep,
    size_t n, double scale, Figures *rows)
{
    double x[PART], y[PART];
    Lanes lanes;
    const char *at_a = a, *at_b = b;
    for (; n; rows++) {
        size_t block = n < BLOCK ? n : BLOCK;
        Figures row = {0};
        n -= block;
        memset(&lanes, 0, sizeof lanes);
        while (block) {
            size_t part = block < PART ? block : PART;
            int bad = widen(at_a, code_a, part, x) | widen(at_b, code_b, part, y);
            ask(at_a + PART * WIDTH[code_a], PART * WIDTH[code_a]);
            ask(at_b + PART * WIDTH[code_b], PART * WIDTH[code_b]);
            if (bad || keep || part < PART)
                tidy(x, y, keep, part, &row);
            else
                row.used += PART;
            add_part(x, y, scale, &lanes);
            at_a += part * WIDTH[code_a];
            at_b += part * WIDTH[code_b];
            keep = keep ? keep + part : NULL;
            block -= part;
        }
        for (size_t i = 0; i < LANES; i++)
            row.different += (double)lanes.different[i];
        row.max_abs = largest(lanes.top);
        row.worst = largest(lanes.worst);
        row.delta = fold(lanes.delta);
        row.a = fold(lanes.a);
        row.b = fold(lanes.b);
        *rows = row;
    }
}

/* Floats of one format, read as sign and magnitude, are numbered along the real line. Distances take
 * all bits of their width, without a sign. */
#define ULP(WIDTH, LOWEST)                                                                         \
    {                                                                                              \
        typedef int##WIDTH##_t ALIAS number;                                                       \
        typedef uint##WIDTH##_t distance;                                                          \
        const number *p = a, *q = b;                                                               \
        distance found = 0;                                                                        \
        for (size_t i = 0; i < n; i++) {                                                           \
            number v = p[i], w = q[i];                                                             \
            v = v < 0 ? (number)((LOWEST) - v) : v;                                                \
            w = w < 0 ? (number)((LOWEST) - w) : w;                                                \
            distance up = (distance)((distance)v - (distance)w);                                   \
            distance apart = v > w ? up : (distance)-up;                                           \
            found = apart > found ? apart : found;                                                 \
        }                                                                                          \
        return found;                                                                              \
    }

CLONES uint64_t largest_ulp(const void *a, const void *b, int code, size_t n)
{
    switch (WIDTH[code]) {
    case 1: ULP(8, INT8_MIN)
    case 2: ULP(16, INT16_MIN)
    case 4: ULP(32, INT32_MIN)
    default: ULP(64, INT64_MIN)
    }
}

CLONES int within(
    const void *a, int code_a, const void *b, int code_b, size_t n, double rel, double abs)
{
    double x[PART], y[PART];
    const char *at_a = a, *at_b = b;
    for (size_t part; n; n -= part) {
        part = n < PART ? n : PART;
        widen(at_a, code_a, part, x);
        widen(at_b, code_b, part, y);
        ask(at_a + PART * WIDTH[code_a], PART * WIDTH[code_a]);
        ask(at_b + PART * WIDTH[code_b], PART * WIDTH[code_b]);
        int64_t beyond = 0;
        for (size_t i = 0; i < part; i++) {
            double v = x[i], w = y[i], size = fabs(v) > fabs(w) ? fabs(v) : fabs(w);
            int64_t same = (v == w) | ((v != v) & (w != w));
            int64_t close = fabs(v - w) <= rel * size + abs;
            beyond += !(same | close);
        }
        if (beyond)
            return 0;
        at_a += part * WIDTH[code_a];
        at_b += part * WIDTH[code_b];
    }
    return 1;
}
