/* The sums of ./moments.c for float32 and bfloat16 on processors with AVX2: the same additions in the
 * same order, with the lanes in registers for many rows. */
#include "values.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define WIDE 8 /* elements of float32 in a register */

int has_tiles(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2");
}

AVX2 static int has_special(const float *x)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (size_t i = 0; i < TILE; i += WIDE) {
        __m256i bits = _mm256_loadu_si256((const __m256i *)(x + i));
        largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude));
    }
    __m256i special = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7f7fffff));
    return !_mm256_testz_si256(special, special);
}

/* Loads, changes and stores four lanes of one sum. */
#define EACH_SUM(DO) DO(sum, 0) DO(sum, 4) DO(abs, 0) DO(abs, 4) DO(square, 0) DO(square, 4)
#define LOAD(SUM, AT) __m256d SUM##AT = _mm256_loadu_pd(to->SUM + lane + AT);
#define STORE(SUM, AT) _mm256_storeu_pd(to->SUM + lane + AT, SUM##AT);

#define ADD(AT)                                                                                    \
    {                                                                                              \
        __m256d v = _mm256_cvtps_pd(_mm_loadu_ps(at + AT));                                        \
        sum##AT = _mm256_add_pd(sum##AT, v);                                                       \
        abs##AT = _mm256_add_pd(abs##AT, _mm256_andnot_pd(sign, v));                               \
        square##AT = _mm256_add_pd(square##AT, _mm256_mul_pd(v, v));                               \
    }

AVX2 static void of_bfloats(const u16 *from, float *to)
{
    for (size_t i = 0; i < TILE; i += WIDE) {
        __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + i)));
        _mm256_store_si256((__m256i *)(to + i), _mm256_slli_epi32(bits, 16));
    }
}

AVX2 int add_tile(const void *from, int code, Sums *to, Narrow *extremes)
{
    __attribute__((aligned(32))) float widened[TILE];
    const float *x = from;
    if (code == BF16)
        of_bfloats(from, widened), x = widened;
    if (has_special(x))
        return 0;
    const __m256d sign = _mm256_set1_pd(-0.0);
    for (size_t lane = 0; lane < LANES; lane += WIDE) {
        EACH_SUM(LOAD)
        __m256 low = _mm256_loadu_ps(extremes->low + lane);
        __m256 high = _mm256_loadu_ps(extremes->high + lane);
        __m256i zero = _mm256_setzero_si256();
        const float *at = x + lane;
        for (size_t row = 0; row < TILE / LANES; row++, at += LANES) {
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
    return 1;
}

#else

int has_tiles(void) { return 0; }
int add_tile(const void *from, int code, Sums *to, Narrow *extremes)
{
    (void)from, (void)code, (void)to, (void)extremes;
    return 0;
}

#endif
