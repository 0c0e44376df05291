/* The count sketch: every element is added to one of 256 buckets, or taken from it. */
#include "values.h"

#include <stdatomic.h>
#include <stdlib.h>

#define SKETCH_BLOCK (1 << 16)
#define KNOWN 64 /* blocks whose places are kept: 128 KiB each */

#define GAMMA UINT64_C(0x9E3779B97F4A7C15)
#define MINUS 0x8000u

/* splitmix64 of the index: Steele, Lea and Flood, "Fast splittable pseudorandom number
 * generators", OOPSLA 2014. */
INLINE uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* Bucket and sign of n elements from `index` on. */
static void places(uint64_t index, size_t n, uint16_t *place)
{
    uint64_t state = index * GAMMA;
    for (size_t i = 0; i < n; i++, state += GAMMA) {
        uint64_t z = mix(state);
        place[i] = (uint16_t)((z & (BUCKETS - 1)) | (z >> 63 ? MINUS : 0));
    }
}

/* The places of a whole block, which take four times as long to find as to use; NULL for a block
 * that is not kept. Several threads may come here at once: the first one's table stays. */
static const uint16_t *kept(uint64_t number)
{
    static _Atomic(uint16_t *) table[KNOWN];
    if (number >= KNOWN)
        return NULL;
    uint16_t *known = atomic_load(&table[number]), *other = NULL;
    if (known)
        return known;
    known = malloc(SKETCH_BLOCK * sizeof *known);
    if (!known)
        return NULL;
    places(number * SKETCH_BLOCK, SKETCH_BLOCK, known);
    if (atomic_compare_exchange_strong(&table[number], &other, known))
        return known;
    free(known);
    return other;
}

/* Adds a part, whose elements are overwritten. */
INLINE void add_part(double *restrict x, const uint16_t *restrict place, size_t n, double *bucket)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits ^= (uint64_t)(place[i] & MINUS) << 48; /* times minus one */
        memcpy(x + i, &bits, sizeof bits);
    }
    for (size_t i = 0; i < n; i++)
        bucket[place[i] & (BUCKETS - 1)] += x[i];
}

CLONES void signed_buckets(const void *from, int code, size_t n, double *total)
{
    double x[PART], bucket[BUCKETS];
    uint16_t found[PART];
    const char *at = from;
    memset(total, 0, BUCKETS * sizeof *total);
    for (uint64_t index = 0; index < n;) {
        size_t block = n - index < SKETCH_BLOCK ? n - index : SKETCH_BLOCK;
        const uint16_t *place = kept(index / SKETCH_BLOCK);
        memset(bucket, 0, sizeof bucket);
        for (size_t part, done = 0; done < block; done += part) {
            part = block - done < PART ? block - done : PART;
            widen(at, code, part, x);
            ask(at + PART * WIDTH[code], PART * WIDTH[code]);
            if (!place)
                places(index + done, part, found);
            add_part(x, place ? place + done : found, part, bucket);
            at += part * WIDTH[code];
        }
        index += block;
        for (size_t i = 0; i < BUCKETS; i++)
            total[i] += bucket[i];
    }
}
