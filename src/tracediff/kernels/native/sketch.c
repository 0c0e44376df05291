/* The count sketch: every element is added to one of 256 buckets, or taken from it. */
#include "values.h"

#define BLOCK_ROWS 256 /* rows whose sums are added to the total at once */
#define WORDS 5        /* of hash a row: four of signs, and the place that it starts at */

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

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma")))

AVX2 INLINE void add_four(__m128 x, double *to)
{
    _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), _mm256_cvtps_pd(x)));
}

/* A whole row of float32 or bfloat16, whose signs are changed before they are widened. */
AVX2 static void add_narrow_row(const char *from, int code, uint64_t row, double *bucket)
{
    const __m256i minus = _mm256_set1_epi32((int)0x80000000);
    const __m256i places = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    uint64_t index = row * WORDS;
    double *to = bucket + (mix(index + WORDS - 1) & (BUCKETS - 1));
    for (size_t word = 0; word < BUCKETS / 64; word++, index++) {
        uint64_t signs = mix(index);
        for (size_t i = 0; i < 64; i += 8, signs >>= 8, to += 8) {
            __m256i bits = code == F32
                ? _mm256_loadu_si256((const __m256i *)((const f32 *)from + 64 * word + i))
                : _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(
                      (const __m128i *)((const u16 *)from + 64 * word + i))), 16);
            __m256i sign = _mm256_sllv_epi32(_mm256_set1_epi32((int)signs), places);
            bits = _mm256_xor_si256(bits, _mm256_and_si256(sign, minus));
            add_four(_mm_castsi128_ps(_mm256_castsi256_si128(bits)), to);
            add_four(_mm_castsi128_ps(_mm256_extracti128_si256(bits, 1)), to + 4);
        }
    }
}

#else
static void add_narrow_row(const char *from, int code, uint64_t row, double *bucket)
{
    (void)from, (void)code, (void)row, (void)bucket;
}
#endif

static void add_wide_row(const char *from, int code, uint64_t row, double *bucket)
{
    uint64_t hashed[WORDS];
    for (size_t i = 0; i < WORDS; i++)
        hashed[i] = mix(row * WORDS + i);
    sketch_wide(from, code, hashed, hashed[WORDS - 1] & (BUCKETS - 1), bucket);
}

void sketch_start(Sketch *sketch, const char *from, int code, size_t n, double *total)
{
    Sketch begin = {.at = from, .end = from + n * WIDTH[code], .code = code, .total = total};
    *sketch = begin;
    memset(total, 0, BUCKETS * sizeof *total);
}

static void add_block(Sketch *sketch)
{
    for (size_t i = 0; i < BUCKETS; i++)
        sketch->total[i] += sketch->bucket[i] + sketch->bucket[i + BUCKETS];
    memset(sketch->bucket, 0, sizeof sketch->bucket);
}

CLONES void sketch_to(Sketch *sketch, const char *upto)
{
    double x[BUCKETS];
    size_t width = WIDTH[sketch->code], whole = BUCKETS * width;
    int is_narrow = (sketch->code == F32 || sketch->code == BF16) && processor >= AVX2_PROCESSOR;
    while (sketch->at < upto) {
        size_t left = (size_t)(sketch->end - sketch->at), bytes = left < whole ? left : whole;
        if ((size_t)(upto - sketch->at) < bytes)
            return; /* a part of a row that goes on */
        ask(sketch->at + (processor == AVX512_PROCESSOR ? TILE * width : 4 * bytes), bytes);
        if (bytes == whole && is_narrow && processor == AVX512_PROCESSOR)
            add_wide_row(sketch->at, sketch->code, sketch->row++, sketch->bucket);
        else if (bytes == whole && is_narrow)
            add_narrow_row(sketch->at, sketch->code, sketch->row++, sketch->bucket);
        else {
            widen(sketch->at, sketch->code, bytes / width, x);
            add_row(x, sketch->row++, bytes / width, sketch->bucket);
        }
        sketch->at += bytes;
        if (sketch->row % BLOCK_ROWS == 0)
            add_block(sketch);
    }
    if (sketch->at == sketch->end)
        add_block(sketch);
}

void signed_buckets(const void *from, int code, size_t n, double *total)
{
    Sketch sketch;
    sketch_start(&sketch, from, code, n, total);
    sketch_to(&sketch, sketch.end);
}
