/* The work of ./hash.c, ./tile.c and ./sketch.c on processors with AVX-512: the same numbers, as every
 * lane sums the same elements in the same order. The lanes of all sums stay in registers, so that the
 * digest is taken of what is loaded for them. */
#include "values.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

#define AHEAD 4096 /* bytes */

/* Asks for what lies a page ahead, past which a processor foresees nothing by itself: there is too much
 * to do for a line for those after it to be under way meanwhile. */
WIDE INLINE void ask_ahead(const char *at, const char *end)
{
    if (end - at > AHEAD)
        _mm_prefetch(at + AHEAD, _MM_HINT_T0);
}

/* 16 elements of float32 or bfloat16, of which the mask says; the others are zeros. */
WIDE INLINE __m512 narrow(const void *from, int code, __mmask16 mask)
{
    if (code == F32)
        return _mm512_maskz_loadu_ps(mask, from);
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

WIDE INLINE __m512d half(__m512 x, int upper)
{
    return _mm512_cvtps_pd(upper ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x));
}

/* The same of elements in memory, which is read again where that is as good as to extract it. */
WIDE INLINE __m512d half_of(const char *from, int code, __m512 x, int upper)
{
    if (code == F32)
        return _mm512_cvtps_pd(_mm256_loadu_ps((const f32 *)from + 8 * upper));
    return half(x, upper);
}

/* ---- digests ------------------------------------------------------------------------------- */

/* Accumulators, and what of the data is still to be added to them, each half of a pair to the other. */
typedef struct {
    __m512i sum, data;
} Digest;

WIDE INLINE void add_stripe(Digest *to, const char *from, size_t stripe)
{
    __m512i data = _mm512_loadu_si512(from);
    __m512i keyed = _mm512_xor_si512(data, _mm512_loadu_si512(hash_secret + 8 * stripe));
    to->sum = _mm512_add_epi64(to->sum, _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)));
    to->data = _mm512_add_epi64(to->data, data);
}

WIDE INLINE __m512i all_of(const Digest *digest)
{
    return _mm512_add_epi64(digest->sum, _mm512_shuffle_epi32(digest->data, _MM_PERM_BADC));
}

WIDE INLINE Digest digest_of(__m512i sum)
{
    Digest digest = {sum, _mm512_setzero_si512()};
    return digest;
}

WIDE INLINE Digest scramble(const Digest *digest)
{
    __m512i sum = all_of(digest);
    const __m512i prime = _mm512_set1_epi64(HASH_PRIME);
    __m512i key = _mm512_loadu_si512(hash_secret + HASH_SCRAMBLING);
    sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), key);
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
    return digest_of(
        _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(high, 32)));
}

WIDE INLINE Digest end_block(const Digest *digest, uint64_t **apart)
{
    if (!*apart)
        return scramble(digest);
    _mm512_storeu_si512(*apart, all_of(digest));
    *apart += 8;
    return digest_of(_mm512_setzero_si512());
}

WIDE void hash_wide(Hash *hash, const char *end)
{
    const char *at = hash->at;
    Digest digest = digest_of(_mm512_loadu_si512(hash->sum));
    size_t stripe = hash->stripe;
    uint64_t *apart = hash->apart;
    for (; end - at >= STRIPE; at += STRIPE) {
        ask_ahead(at, hash->end);
        add_stripe(&digest, at, stripe);
        if (++stripe == STRIPES)
            digest = end_block(&digest, &apart), stripe = 0;
    }
    _mm512_storeu_si512(hash->sum, all_of(&digest));
    hash->at = at, hash->stripe = stripe, hash->apart = apart;
}

/* ---- sums ---------------------------------------------------------------------------------- */

#define EIGHTS (LANES / 8)

#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif

/* Rows of all lanes. If `hashed`, they are added to the digest as well, which has all before them,
 * and of whose blocks each begins with a row. */
WIDE INLINE void add_rows(
    const char *from, int code, size_t n, Sums *to, Narrow *extremes, Hash *hash, int hashed)
{
    __m512d sum[EIGHTS], abs[EIGHTS], square[EIGHTS];
    __m512 low = _mm512_loadu_ps(extremes->low), high = _mm512_loadu_ps(extremes->high);
    Digest digest = digest_of(hashed ? _mm512_loadu_si512(hash->sum) : _mm512_setzero_si512());
    uint64_t *apart = hashed ? hash->apart : NULL;
    size_t zeros = 0, stripe = hashed ? hash->stripe : 0, quarter = 16 * WIDTH[code];
    UNROLLED for (int i = 0; i < EIGHTS; i++) {
        sum[i] = _mm512_loadu_pd(to->sum + 8 * i);
        abs[i] = _mm512_loadu_pd(to->abs + 8 * i);
        square[i] = _mm512_loadu_pd(to->square + 8 * i);
    }
    for (; n; n -= LANES, from += 4 * quarter) {
        UNROLLED for (int i = 0; i < 4; i++) {
            const char *at = from + i * quarter;
            if (hashed)
                ask_ahead(at, hash->end);
            __m512 x = narrow(at, code, 0xffff);
            low = _mm512_min_ps(x, low);
            high = _mm512_max_ps(x, high);
            __mmask16 is_zero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ);
            zeros += (size_t)__builtin_popcount(is_zero);
            if (hashed && (code == F32 || i % 2 == 0))
                add_stripe(&digest, at, stripe++);
            UNROLLED for (int j = 2 * i; j < 2 * i + 2; j++) {
                __m512d v = half_of(at, code, x, j % 2);
                sum[j] = _mm512_add_pd(sum[j], v);
                abs[j] = _mm512_add_pd(abs[j], _mm512_abs_pd(v));
                square[j] = _mm512_fmadd_pd(v, v, square[j]);
            }
        }
        if (hashed && stripe == STRIPES)
            digest = end_block(&digest, &apart), stripe = 0;
    }
    UNROLLED for (int i = 0; i < EIGHTS; i++) {
        _mm512_storeu_pd(to->sum + 8 * i, sum[i]);
        _mm512_storeu_pd(to->abs + 8 * i, abs[i]);
        _mm512_storeu_pd(to->square + 8 * i, square[i]);
    }
    _mm512_storeu_ps(extremes->low, low);
    _mm512_storeu_ps(extremes->high, high);
    to->zero[0] += (int64_t)zeros;
    if (hashed) {
        _mm512_storeu_si512(hash->sum, all_of(&digest));
        hash->at = from, hash->stripe = stripe, hash->apart = apart;
    }
}

WIDE static void add_hashed_rows(
    const char *from, int code, size_t n, Sums *to, Narrow *extremes, Hash *hash)
{
    if (code == F32)
        add_rows(from, F32, n, to, extremes, hash, 1);
    else
        add_rows(from, BF16, n, to, extremes, hash, 1);
}

WIDE static void add_plain_rows(
    const char *from, int code, size_t n, Sums *to, Narrow *extremes)
{
    if (code == F32)
        add_rows(from, F32, n, to, extremes, NULL, 0);
    else
        add_rows(from, BF16, n, to, extremes, NULL, 0);
}

void add_wide(const char *from, int code, size_t n, Sums *to, Narrow *extremes, Hash *hash)
{
    size_t row = LANES * WIDTH[code];
    if (hash && hash->at == from && hash->stripe * STRIPE % row == 0 && from < hash->last) {
        size_t rows = (size_t)(hash->last - from) / row, most = n / LANES;
        size_t both = (rows < most ? rows : most) * LANES;
        add_hashed_rows(from, code, both, to, extremes, hash);
        from += both * WIDTH[code], n -= both;
    }
    if (hash)
        hash_to(hash, from + n * WIDTH[code]);
    add_plain_rows(from, code, n, to, extremes);
}

/* ---- sketches ------------------------------------------------------------------------------ */

WIDE INLINE void add_eight(__m512d x, double *to)
{
    _mm512_store_pd(to, _mm512_add_pd(_mm512_load_pd(to), x));
}

/* The elements in eights as the buckets lie in lines: what is beside the row is zero, and adds nothing
 * to buckets, none of which can be a negative zero. */
WIDE INLINE void add_wide_row(
    const char *from, int code, const uint64_t *signs, size_t start, double *bucket)
{
    const __m512 minus = _mm512_set1_ps(-0.0f);
    const size_t before = start % 8, sixteen = 16 * WIDTH[code];
    double *to = bucket + start - before;
    uint64_t carried = 0;
    from -= before * WIDTH[code];
    __mmask16 mask = (__mmask16)(0xffffu << before);
    for (int word = 0; word < BUCKETS / 64; word++) {
        uint64_t bits = signs[word] << before | carried;
        carried = signs[word] >> 1 >> (63 - before);
        for (int i = 0; i < 4; i++, from += sixteen, to += 16, bits >>= 16) {
            __m512 x = narrow(from, code, mask);
            x = _mm512_mask_xor_ps(x, (__mmask16)bits, x, minus);
            add_eight(half(x, 0), to);
            add_eight(half(x, 1), to + 8);
            mask = 0xffff;
        }
    }
    __m512 x = narrow(from, code, (__mmask16)((1u << before) - 1));
    add_eight(half(_mm512_mask_xor_ps(x, (__mmask16)carried, x, minus), 0), to);
}

WIDE void sketch_wide(
    const char *from, int code, const uint64_t *signs, size_t start, double *bucket)
{
    if (code == F32)
        add_wide_row(from, F32, signs, start, bucket);
    else
        add_wide_row(from, BF16, signs, start, bucket);
}

#else

void hash_wide(Hash *hash, const char *end) { (void)hash, (void)end; }
void add_wide(const char *from, int code, size_t n, Sums *to, Narrow *extremes, Hash *hash)
{
    (void)from, (void)code, (void)n, (void)to, (void)extremes, (void)hash;
}
void sketch_wide(
    const char *from, int code, const uint64_t *signs, size_t start, double *bucket)
{
    (void)from, (void)code, (void)signs, (void)start, (void)bucket;
}

#endif
