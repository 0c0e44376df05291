/* The count sketch: every element is added to one of 256 buckets, or taken from it. */
#include "values.h"

#define SKETCH_BLOCK (1 << 16) /* elements whose sums are added to the total at once */
#define WORDS 5                /* of hash a row: four of signs, and the place that it starts at */

#define GAMMA UINT64_C(0x9E3779B97F4A7C15)
#define MINUS UINT64_C(0x8000000000000000)

/* splitmix64 of the index: Steele, Lea and Flood, "Fast splittable pseudorandom number
 * generators", OOPSLA 2014. */
INLINE uint64_t mix(uint64_t index)
{
    uint64_t z = index * GAMMA;
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* Adds up to 64 elements with the signs that the bits of a word say, the lowest first. */
INLINE void add_signed(const double *restrict x, uint64_t signs, size_t n, double *restrict to)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bits;
        double value;
        memcpy(&bits, x + i, sizeof bits);
        bits ^= signs << (63 - i) & MINUS;
        memcpy(&value, &bits, sizeof value);
        to[i] += value;
    }
}

/* Adds a row of up to 256 elements, each to another bucket: from where the row starts, and in turn.
 * What would come round to the first bucket goes to a second set of them. */
INLINE void add_row(const double *restrict x, uint64_t row, size_t n, double *restrict bucket)
{
    uint64_t index = row * WORDS;
    double *to = bucket + (mix(index + WORDS - 1) & (BUCKETS - 1));
    for (; n >= 64; n -= 64, x += 64, to += 64)
        add_signed(x, mix(index++), 64, to);
    if (n)
        add_signed(x, mix(index), n, to);
}

CLONES void signed_buckets(const void *from, int code, size_t n, double *total)
{
    double x[BUCKETS], bucket[2 * BUCKETS];
    const char *at = from;
    memset(total, 0, BUCKETS * sizeof *total);
    for (size_t done = 0; done < n;) {
        size_t end = n - done < SKETCH_BLOCK ? n : done + SKETCH_BLOCK;
        memset(bucket, 0, sizeof bucket);
        for (size_t row; done < end; done += row) {
            row = end - done < BUCKETS ? end - done : BUCKETS;
            widen(at, code, row, x);
            ask(at + 4 * row * WIDTH[code], row * WIDTH[code]);
            add_row(x, done / BUCKETS, row, bucket);
            at += row * WIDTH[code];
        }
        for (size_t i = 0; i < BUCKETS; i++)
            total[i] += bucket[i] + bucket[i + BUCKETS];
    }
}
