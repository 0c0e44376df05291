/* CRC-32 by carry-less products: Gopal et al., "Fast CRC computation for generic polynomials using
 * PCLMULQDQ instruction", Intel 2009. Five times as fast as zlib's on x86; elsewhere zlib uses the
 * processor's own instruction. */
#include "values.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define POLYNOMIAL 0xEDB88320u

int has_crc(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

static uint32_t bytewise(uint32_t crc, const uint8_t *data, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
    }
    return crc;
}

#define LOAD(AT) _mm_loadu_si128((const __m128i *)(AT))
#define FOLD(X, K, NEXT)                                                                           \
    X = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(X, K, 0x00),                              \
                          _mm_clmulepi64_si128(X, K, 0x11)),                                       \
        NEXT)

/* Powers of x modulo the polynomial, reflected: two for each distance in bytes by which a remainder is
 * folded. Those of 128 bytes are worked out as the paper's others are, as x^(8 * 128 -+ 32). */
#define BY16 _mm_set_epi64x(0x00ccaa009e, 0x01751997d0)
#define BY64 _mm_set_epi64x(0x01c6e41596, 0x0154442bd4)
#define BY128 _mm_set_epi64x(0x014a7fe880, 0x01e88ef372)

#define WIDE __attribute__((target("vpclmulqdq,avx2,pclmul,sse4.1")))
#define NARROW __attribute__((target("pclmul,sse4.1")))

/* Folds whole 128 bytes, `n` of them at least one; leaves their remainder as 128 bytes. Copies them past
 * the caches where there is a `copy`, which is aligned to 32 bytes. */
WIDE INLINE void fold_lines(uint32_t crc, const uint8_t *data, size_t n, __m128i *to, uint8_t *copy)
{
    const __m256i by128 = _mm256_broadcastsi128_si256(BY128);
    __m256i x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_loadu_si256((const __m256i *)data + i);
        if (copy)
            _mm256_stream_si256((__m256i *)copy + i, x[i]);
    }
    x[0] = _mm256_xor_si256(x[0], _mm256_setr_epi32((int)crc, 0, 0, 0, 0, 0, 0, 0));
    for (data += 128, n -= 128; n; data += 128, n -= 128) {
        copy = copy ? copy + 128 : copy;
        for (int i = 0; i < 4; i++) {
            __m256i low = _mm256_clmulepi64_epi128(x[i], by128, 0x00);
            __m256i high = _mm256_clmulepi64_epi128(x[i], by128, 0x11);
            __m256i next = _mm256_loadu_si256((const __m256i *)data + i);
            _mm_prefetch((const char *)data + 1024 + 32 * i, _MM_HINT_T0);
            if (copy)
                _mm256_stream_si256((__m256i *)copy + i, next);
            x[i] = _mm256_xor_si256(_mm256_xor_si256(low, high), next);
        }
    }
    for (int i = 0; i < 4; i++)
        _mm256_storeu_si256((__m256i *)to + i, x[i]);
}

WIDE static void of_lines(uint32_t crc, const uint8_t *data, size_t n, __m128i *to)
{
    fold_lines(crc, data, n, to, NULL);
}

WIDE static void of_copied_lines(
    uint32_t crc, const uint8_t *data, size_t n, __m128i *to, uint8_t *copy)
{
    fold_lines(crc, data, n, to, copy);
}

/* The same of whole 64 bytes, without AVX2. */
NARROW static void of_quarters(uint32_t crc, const uint8_t *data, size_t n, __m128i *to)
{
    __m128i x[4];
    for (int i = 0; i < 4; i++)
        x[i] = LOAD(data + 16 * i);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)crc));
    for (data += 64, n -= 64; n; data += 64, n -= 64)
        for (int i = 0; i < 4; i++)
            FOLD(x[i], BY64, LOAD(data + 16 * i));
    memcpy(to, x, sizeof x);
}

static int is_wide(void)
{
    return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2");
}

/* `n` is a multiple of 16, and 64 or more; 128 or more and only on wide processors with a `copy`, which
 * gets the whole 128 bytes. */
NARROW static uint32_t folded(uint32_t crc, const uint8_t *data, size_t n, uint8_t *copy)
{
    const __m128i by16 = BY16, last = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i x[8], a, b;
    int wide = n >= 128 && is_wide();
    size_t whole = n - n % (wide ? 128 : 64);
    if (copy)
        of_copied_lines(crc, data, whole, x, copy);
    else
        (wide ? of_lines : of_quarters)(crc, data, whole, x);
    a = x[0];
    for (int i = 1; i < (wide ? 8 : 4); i++)
        FOLD(a, by16, x[i]);
    for (data += whole, n -= whole; n; data += 16, n -= 16)
        FOLD(a, by16, LOAD(data));
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by16, 0x10));
    a = _mm_xor_si128(
        _mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low), last, 0x00));
    b = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), barrett, 0x10), low);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(b, barrett, 0x00));
    return (uint32_t)_mm_extract_epi32(a, 1);
}

uint32_t crc(uint32_t crc, const uint8_t *data, size_t n)
{
    size_t whole = n < 64 ? 0 : n & ~(size_t)15;
    crc = ~crc;
    if (whole)
        crc = folded(crc, data, whole, NULL);
    return ~bytewise(crc, data + whole, n - whole);
}

#define HELD (1 << 14) /* bytes that stay in the L1 cache from the checksum to the copy */

uint32_t crc_copied(const uint8_t *data, size_t n, uint8_t *to)
{
    uint32_t found = 0;
    size_t lines = n & ~(size_t)127, whole = n & ~(size_t)15;
    if (lines && (uintptr_t)to % 32 == 0 && is_wide()) {
        found = folded(~found, data, whole, to);
        _mm_sfence(); /* before another thread is told of it */
        memcpy(to + lines, data + lines, n - lines);
        return ~bytewise(found, data + whole, n - whole);
    }
    for (size_t at = 0; at < n; at += HELD) {
        size_t part = n - at < HELD ? n - at : HELD;
        found = crc(found, data + at, part);
        stream((const char *)data + at, part, (char *)to + at);
    }
    return found;
}

#else

int has_crc(void)
{
    return 0;
}

uint32_t crc(uint32_t crc, const uint8_t *data, size_t n)
{
    (void)data, (void)n;
    return crc;
}

uint32_t crc_copied(const uint8_t *data, size_t n, uint8_t *to)
{
    (void)data, (void)n, (void)to;
    return 0;
}

#endif
