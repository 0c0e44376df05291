/* The brief sums of ./moments.c for float32 and bfloat16 on processors with AVX2: the same additions in
 * the same order, with the lanes in registers for many rows. A product of two such numbers has no more
 * than 48 bits, so adding it fused rounds as adding it does, and so does adding a number times one. */
#include "values.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define WIDE 8 /* elements of float32 in a register */

/* Loads, changes and stores four lanes of one sum. */
#define EACH_SUM(DO) DO(sum, 0) DO(sum, 4) DO(abs, 0) DO(abs, 4) DO(square, 0) DO(square, 4)
#define LOAD(SUM, AT) __m256d SUM##AT = _mm256_loadu_pd(to->SUM + lane + AT);
#define STORE(SUM, AT) _mm256_storeu_pd(to->SUM + lane + AT, SUM##AT);

#define ADD(AT)                                                                                    \
    {                                                                                              \
        __m256d v = _mm256_cvtps_pd(_mm_loadu_ps(at + AT));                                        \
        sum##AT = _mm256_fmadd_pd(v, one, sum##AT);                                                \
        abs##AT = _mm256_add_pd(abs##AT, _mm256_andnot_pd(sign, v));                               \
        square##AT = _mm256_fmadd_pd(v, v, square##AT);                                            \
    }

AVX2 static void of_bfloats(const u16 *from, size_t n, float *to)
{
    for (size_t i = 0; i < n; i += WIDE) {
        __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + i)));
        _mm256_store_si256((__m256i *)(to + i), _mm256_slli_epi32(bits, 16));
    }
}

/* Asks for the next tile meanwhile, a line after the other: that eight columns after eight are read
 * is not what the processor foresees. */
AVX2 static void add_tile(const float *x, size_t n, const char *next, Sums *to, Narrow *extremes)
{
    const __m256d sign = _mm256_set1_pd(-0.0), one = _mm256_set1_pd(1.0);
    for (size_t lane = 0; lane < LANES; lane += WIDE) {
        EACH_SUM(LOAD)
        __m256 low = _mm256_loadu_ps(extremes->low + lane);
        __m256 high = _mm256_loadu_ps(extremes->high + lane);
        __m256i zero = _mm256_setzero_si256();
        const char *ahead = next + lane * (TILE / LANES) * sizeof *x;
        for (const float *at = x + lane; at < x + n; at += LANES, ahead += WIDE * sizeof *x) {
            _mm_prefetch(ahead, _MM_HINT_T1);
            __m256 v = _mm256_loadu_ps(at);
            low = _mm256_min_ps(v, low);
            high = _mm256_max_ps(v, high);
            __m256 is_zero = _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_EQ_OQ);
            zero = _mm256_sub_epi32(zero, _mm256_castps_si256(is_zero));
            ADD(0)
            ADD(4)
        }
        EACH_SUM(STORE)
        _mm256_storeu_ps(extremes->low + lane, low);
        _mm256_storeu_ps(extremes->high + lane, high);
        int32_t zeros[WIDE];
        _mm256_storeu_si256((__m256i *)zeros, zero);
        for (size_t i = 0; i < WIDE; i++)
            to->zero[lane + i] += zeros[i];
    }
}

static void add_narrow(const void *from, int code, size_t n, Sums *to, Narrow *extremes)
{
    __attribute__((aligned(32))) float widened[TILE];
    if (code == BF16)
        of_bfloats(from, n, widened);
    add_tile(code == BF16 ? widened : from, n, (const char *)from + n * WIDTH[code], to, extremes);
}

int add_tiles(
    const void *from, int code, size_t n, Sums *to, Narrow *extremes, const Beside *beside)
{
    const Sums sums_before = *to;
    const Narrow extremes_before = *extremes;
    /* A sketch reads what was read for the sums, as long as it is in the cache. */
    size_t most = processor < AVX512_PROCESSOR || beside->sketch ? TILE : n;
    for (size_t tile; n; n -= tile) {
        tile = n < most ? n : most;
        const char *end = (const char *)from + tile * WIDTH[code];
        if (processor == AVX512_PROCESSOR) {
            add_wide(from, code, tile, to, extremes, beside->hash);
            if (beside->sketch)
                sketch_to(beside->sketch, end);
        } else {
            beside_to(beside, end);
            add_narrow(from, code, tile, to, extremes);
        }
        from = end;
    }
    for (size_t lane = 0; lane < LANES; lane++)
        if (!(to->abs[lane] <= DBL_MAX)) { /* there was a NaN or an infinity */
            *to = sums_before, *extremes = extremes_before;
            return 0;
        }
    return 1;
}

#else

int add_tiles(
    const void *from, int code, size_t n, Sums *to, Narrow *extremes, const Beside *beside)
{
    (void)from, (void)code, (void)n, (void)to, (void)extremes, (void)beside;
    return 0;
}

#endif
