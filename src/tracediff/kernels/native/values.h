/* Elements of any type of a trace as float64, a cache-sized part at a time.
 *
 * Sums have one order on every machine, which ../in_numpy.py has for error figures as well: element i
 * of a block is added to lane i mod LANES, and the lanes are folded in halves. Nothing here may be
 * contracted to a fused multiply-add or reordered.
 */
#ifndef TRACEDIFF_VALUES_H
#define TRACEDIFF_VALUES_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 64
#define ROWS 8
#define PART (LANES * ROWS) /* elements that are widened at a time: two parts fit the L1 cache */
#define BLOCK (1 << 15)     /* elements whose lanes are folded at once */

#define BUCKETS 256         /* of a sketch */

#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

#if defined(__has_attribute)
#if __has_attribute(target_clones) && defined(__x86_64__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef CLONES
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))
#define HIDDEN __attribute__((visibility("hidden")))

/* Codes of types of elements. */
enum { BOOL, U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64, CODES };

static const unsigned char WIDTH[CODES] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};

/* Arrays are aligned (arrays.c checks that), and are read as numbers and as bits. */
#define ALIAS __attribute__((may_alias))
typedef uint16_t ALIAS u16;
typedef int16_t ALIAS i16;
typedef uint32_t ALIAS u32;
typedef int32_t ALIAS i32;
typedef uint64_t ALIAS u64;
typedef int64_t ALIAS i64;
typedef float ALIAS f32;
typedef double ALIAS f64;

INLINE float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* IEEE half to float, by integers: a mode that flushes subnormals must not show. */
INLINE float of_half(uint32_t half)
{
    uint32_t rest = half & 0x7fffu, sign = (half & 0x8000u) << 16, subnormal;
    uint32_t special = (uint32_t) - (int32_t)(rest >= 0x7c00u) & 112u << 23;
    uint32_t normal = (rest << 13) + (112u << 23) + special;
    uint32_t is_small = (uint32_t) - (int32_t)(rest < 0x400u);
    float small = (float)(int32_t)rest * 0x1p-24f;
    memcpy(&subnormal, &small, sizeof small);
    return of_bits(sign | (is_small & subnormal) | (~is_small & normal));
}

#define PLAIN(TYPE)                                                                                \
    for (size_t i = 0; i < n; i++)                                                                 \
        to[i] = (double)((const TYPE *)from)[i];                                                   \
    return 0

/* Two loops: the first compares as many at once as a register holds in their own width. */
#define FLOATING(BITS, VALUE, EXPONENT)                                                            \
    {                                                                                              \
        BITS special = 0;                                                                          \
        for (size_t i = 0; i < n; i++)                                                             \
            special |= (((const BITS *)from)[i] & (EXPONENT)) == (EXPONENT);                       \
        for (size_t i = 0; i < n; i++)                                                             \
            to[i] = (double)(VALUE);                                                               \
        return special != 0;                                                                       \
    }

/* Writes n elements as float64; returns whether there may be a NaN or an infinity among them. */
INLINE int widen(const void *restrict from, int code, size_t n, double *restrict to)
{
    switch (code) {
    case BOOL:
        for (size_t i = 0; i < n; i++)
            to[i] = ((const uint8_t *)from)[i] != 0;
        return 0;
    case U8: PLAIN(uint8_t);
    case I8: PLAIN(int8_t);
    case U16: PLAIN(u16);
    case I16: PLAIN(i16);
    case U32: PLAIN(u32);
    case I32: PLAIN(i32);
    case U64: PLAIN(u64);
    case I64: PLAIN(i64);
    case F16: FLOATING(u16, of_half(((const u16 *)from)[i]), 0x7c00u)
    case BF16: FLOATING(u16, of_bits((uint32_t)((const u16 *)from)[i] << 16), 0x7f80u)
    case F32: FLOATING(u32, ((const f32 *)from)[i], 0x7f800000u)
    default: FLOATING(u64, ((const f64 *)from)[i], 0x7ff0000000000000u)
    }
}

/* Asks for the part that comes next while this one is worked on; beyond the end it does nothing. */
INLINE void ask(const void *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += 64)
        __builtin_prefetch((const char *)from + at, 0, 2);
}

/* The sum of all lanes, which are overwritten. */
INLINE double fold(double *restrict lane)
{
    for (size_t half = LANES / 2; half; half /= 2)
        for (size_t i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

typedef struct {
    double sum, abs, square, cube, fourth, low, high;
    size_t nan, inf, zero;
} Moments;

/* One row of `differences`, in the order of ../__init__.py's FIGURES. */
typedef struct {
    double max_abs, delta, a, b, worst, different, nonfinite, used;
} Figures;

/* The sums of a block in the making, and extremes and counts of zeros of all blocks so far. */
typedef struct {
    double sum[LANES], abs[LANES], square[LANES], cube[LANES], fourth[LANES];
    double low[LANES], high[LANES];
    int64_t zero[LANES];
} Sums;

typedef struct {
    float low[LANES], high[LANES];
} Narrow;

/* What the processor has: nothing that these sources know of, AVX2 with FMA, or AVX-512 as well. Found
 * when the module is loaded; lowered by tests only. */
enum { PLAIN_PROCESSOR, AVX2_PROCESSOR, AVX512_PROCESSOR };
HIDDEN extern int processor;
HIDDEN int processor_found(void);

/* A hash of bytes in the making: those up to `at` are in it, but for the last stripe. */
typedef struct {
    uint64_t sum[8];
    const char *at, *last, *end;
    size_t stripe;
    uint64_t *apart; /* where the sum of each block goes, in place of being scrambled; or NULL */
} Hash;

/* XXH3-128 of more than SHORT bytes, from AVX2_PROCESSOR on. `hash_to` adds what lies before an address
 * and was not added yet. `digest` has 16 bytes. */
#define SHORT 240
#define STRIPE 64
#define STRIPES 16 /* of a block, after which the accumulators are scrambled */
#define HASH_PRIME 0x9E3779B1 /* that they are multiplied by */
#define HASH_SCRAMBLING 128 /* where in the secret the keys of that step begin */
HIDDEN extern const unsigned char hash_secret[192];
HIDDEN void hash_start(Hash *hash, const char *from, size_t bytes);
HIDDEN void hash_to(Hash *hash, const char *upto);
/* Adds whole blocks right after the start, each given by what it adds to the accumulators. */
HIDDEN void hash_blocks(Hash *hash, const uint64_t *sums, size_t blocks);
HIDDEN void hash_end(Hash *hash, size_t bytes, unsigned char *digest);

/* A count sketch in the making. */
typedef struct {
    const char *at, *end;
    int code;
    size_t row;
    double *total;
    __attribute__((aligned(64))) double bucket[2 * BUCKETS];
} Sketch;

/* `total` has BUCKETS sums; `sketch_to` adds what lies before an address and was not added yet. */
HIDDEN void sketch_start(Sketch *sketch, const char *from, int code, size_t n, double *total);
HIDDEN void sketch_to(Sketch *sketch, const char *upto);

/* What else is found of the elements while they are in the cache; either may be NULL. */
typedef struct {
    Hash *hash;
    Sketch *sketch;
} Beside;

INLINE void beside_to(const Beside *beside, const char *upto)
{
    if (beside->hash)
        hash_to(beside->hash, upto);
    if (beside->sketch)
        sketch_to(beside->sketch, upto);
}

#define TILE (1 << 12) /* elements that stay in the L1 cache */

/* From AVX2_PROCESSOR on. Adds n elements of F32 or BF16, a multiple of LANES, but no cubes and fourth
 * powers. Returns 0 if they were not added, because of a NaN or an infinity among them. */
HIDDEN int add_tiles(
    const void *from, int code, size_t n, Sums *to, Narrow *extremes, const Beside *beside);

/* With AVX512_PROCESSOR. As `hash_to`, of whole stripes before the last. */
HIDDEN void hash_wide(Hash *hash, const char *end);

/* As `add_tiles`, but for the sketch, whatever the elements are. */
HIDDEN void add_wide(const char *from, int code, size_t n, Sums *to, Narrow *extremes, Hash *hash);

/* A row of BUCKETS elements of F32 or BF16, with a sign for each, and the bucket of the first one. */
HIDDEN void sketch_wide(
    const char *from, int code, const uint64_t *signs, size_t start, double *bucket);

typedef void (*Work)(void *data, size_t from, size_t to);

/* Does the work on items, on as many threads as `team` says, each of which has some that follow one
 * another. */
HIDDEN int team(void);
HIDDEN void together(size_t items, Work work, void *data);

/* Of n elements; `full` adds third and fourth powers. */
HIDDEN void moments(
    const void *from, int code, size_t n, int full, Moments *found, const Beside *beside);

/* What `moments` (brief), `sketch_to` (only with them) and `hash_to` find of n elements, on several
 * threads; each may be NULL. Of a hash, which was started, the end may be left to be added. 0 for want of
 * memory. */
HIDDEN int in_units(
    const char *from, int code, size_t n, Moments *found, double *total, Hash *hash);

/* The finite elements at `count` ascending quantiles, NaN if there are none; 0 for want of memory. */
HIDDEN int order_statistics(
    const void *from, int code, size_t n, const double *quantile, size_t count, double *found);

/* Adds n elements to the 256 signed buckets of a count sketch. */
HIDDEN void signed_buckets(const void *from, int code, size_t n, double *total);

/* One row per BLOCK elements. `keep` may be NULL. */
HIDDEN void differences(const void *a, int code_a, const void *b, int code_b, const uint8_t *keep,
    size_t n, double scale, Figures *rows);

/* Largest distance in units in the last place; of F16, BF16, F32, F64, and U8 for 8-bit floats. */
HIDDEN uint64_t largest_ulp(const void *a, const void *b, int code, size_t n);

/* Whether each pair is equal or within rel * max(|a|, |b|) + abs. */
HIDDEN int within(
    const void *a, int code_a, const void *b, int code_b, size_t n, double rel, double abs);

typedef struct {
    size_t size;
    ptrdiff_t step; /* in bytes */
} Axis;

#define MOST_AXES 64 /* that NumPy has */

/* Copies an array of elements of 1, 2, 4, 8 or 16 bytes to C order. */
HIDDEN void pack(const char *from, int axes, const Axis *axis, size_t width, char *to);

/* The same, of one axis at least, on several threads. */
HIDDEN void pack_together(const char *from, int axes, const Axis *axis, size_t width, char *to);

/* Copies n bytes past the caches. */
HIDDEN void stream(const char *from, size_t n, char *to);

/* CRC-32 as zlib computes it; only if `has_crc` says so. */
HIDDEN int has_crc(void);
HIDDEN uint32_t crc(uint32_t crc, const uint8_t *data, size_t n);

/* The same, from 0, of bytes that are copied past the caches meanwhile. */
HIDDEN uint32_t crc_copied(const uint8_t *data, size_t n, uint8_t *to);

#endif
