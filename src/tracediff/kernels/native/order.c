/* Order statistics by radix selection. */
#include "values.h"

#include <stdlib.h>

#define DIGIT 11
#define DIGITS (1 << DIGIT)
#define FEW 24
#define RANKS 16 /* most that are asked for at once */

/* An integer that sorts as the number does. Zeros of both signs are neighbours. What float32 can
 * hold takes the upper half only, for which a few digits suffice. */
INLINE uint64_t key_of(double value, int narrow)
{
    if (narrow) {
        float half = (float)value;
        uint32_t bits;
        memcpy(&bits, &half, sizeof bits);
        return (uint64_t)(bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u)) << 32;
    }
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits ^ ((uint64_t)((int64_t)bits >> 63) | (UINT64_C(1) << 63));
}

INLINE double of_key(uint64_t key, int narrow)
{
    if (narrow) {
        uint32_t upper = (uint32_t)(key >> 32);
        return (double)of_bits(upper >> 31 ? upper ^ 0x80000000u : ~upper);
    }
    uint64_t bits = key >> 63 ? key ^ (UINT64_C(1) << 63) : ~key;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void sort_few(uint64_t *key, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        uint64_t moved = key[i];
        size_t j = i;
        for (; j && key[j - 1] > moved; j--)
            key[j] = key[j - 1];
        key[j] = moved;
    }
}

/* The keys at `count` ascending ranks of n. They are told apart by the digit that ends at bit
 * `shift`, and those that share it with a rank by the next one, down to bit `last`. `key` and
 * `spare`, of n each, are overwritten. */
static void choose(uint64_t *key, uint64_t *spare, size_t n, int shift, int last,
    const size_t *rank, size_t count, uint64_t *found)
{
    if (n <= FEW || shift + DIGIT <= last) {
        if (n <= FEW)
            sort_few(key, n); /* else all are equal */
        for (size_t r = 0; r < count; r++)
            found[r] = key[rank[r]];
        return;
    }
    int down = shift > 0 ? shift : 0;
    /* Two counts in turns: equal digits follow each other, and would wait for each other. */
    uint32_t size[DIGITS] = {0}, other[DIGITS] = {0};
    for (size_t i = 0; i < n / 2; i++) {
        size[key[2 * i] >> down & (DIGITS - 1)]++;
        other[key[2 * i + 1] >> down & (DIGITS - 1)]++;
    }
    if (n % 2)
        size[key[n - 1] >> down & (DIGITS - 1)]++;
    for (size_t d = 0; d < DIGITS; d++)
        size[d] += other[d];
    /* The digits that hold a rank, where each begins, and the ranks within. */
    size_t digit[RANKS], to[RANKS], first[RANKS + 1], inside[RANKS], digits = 0;
    size_t passed = 0, at = 0, r = 0;
    for (size_t d = 0; r < count; passed += size[d++]) {
        if (rank[r] >= passed + size[d])
            continue;
        digit[digits] = d, first[digits] = r;
        while (r < count && rank[r] < passed + size[d])
            inside[r] = rank[r] - passed, r++;
        to[digits++] = at;
        at += size[d];
    }
    first[digits] = count;
    uint8_t place[DIGITS] = {0};
    size_t end[RANKS];
    for (size_t d = 0; d < digits; d++)
        place[digit[d]] = (uint8_t)(d + 1), end[d] = to[d];
    /* First without branches, which would be mispredicted, and without a look at where it goes. */
    size_t chosen = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t candidate = key[i];
        key[chosen] = candidate;
        chosen += place[candidate >> down & (DIGITS - 1)] != 0;
    }
    for (size_t i = 0; i < chosen; i++)
        spare[end[place[key[i] >> down & (DIGITS - 1)] - 1]++] = key[i];
    for (size_t d = 0; d < digits; d++)
        choose(spare + to[d], key + to[d], size[digit[d]], shift - DIGIT, last,
            inside + first[d], first[d + 1] - first[d], found + first[d]);
}

CLONES int order_statistics(
    const void *from, int code, size_t n, const double *quantile, size_t count, double *found)
{
    uint64_t *key = malloc((n ? n : 1) * 2 * sizeof *key);
    if (!key || count > RANKS) {
        free(key);
        return 0;
    }
    int narrow = code != U32 && code != I32 && code != U64 && code != I64 && code != F64;
    double x[PART];
    size_t finite = 0;
    const char *at = from;
    for (size_t part, left = n; left; left -= part) {
        part = left < PART ? left : PART;
        if (widen(at, code, part, x)) {
            for (size_t i = 0; i < part; i++)
                if (fabs(x[i]) <= DBL_MAX)
                    key[finite++] = key_of(x[i], narrow);
        } else {
            for (size_t i = 0; i < part; i++)
                key[finite + i] = key_of(x[i], narrow);
            finite += part;
        }
        at += part * WIDTH[code];
    }
    size_t rank[RANKS] = {0};
    uint64_t chosen[RANKS];
    if (finite) {
        for (size_t r = 0; r < count; r++)
            rank[r] = (size_t)(quantile[r] * (double)(finite - 1));
        choose(key, key + n, finite, 64 - DIGIT, narrow ? 32 : 0, rank, count, chosen);
    }
    for (size_t r = 0; r < count; r++)
        found[r] = finite ? of_key(chosen[r], narrow) : NAN;
    free(key);
    return 1;
}
