/* XXH3-128 of long inputs (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md), a part at a time,
 * so that the statistics of a part can be found while it is in the cache. */
#include "values.h"

/* The secret of the specification. */
const unsigned char hash_secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define PRIME32_1 ((uint64_t)HASH_PRIME)
#define PRIME32_2 UINT64_C(0x85EBCA77)
#define PRIME32_3 UINT64_C(0xC2B2AE3D)
#define PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME64_5 UINT64_C(0x27D4EB2F165667C5)
#define AVALANCHE UINT64_C(0x165667919E3779F9)

#define LAST 121
#define LOW 11
#define HIGH 117

void hash_start(Hash *hash, const char *from, size_t bytes)
{
    const uint64_t begin[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2,
        PRIME64_5, PRIME32_1};
    memcpy(hash->sum, begin, sizeof begin);
    hash->at = from;
    hash->stripe = 0;
    hash->apart = NULL;
    hash->end = from + bytes;
    hash->last = from + (bytes - 1) / STRIPE * STRIPE;
}

AVX2 INLINE __m256i load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

AVX2 INLINE __m256i key_at(size_t offset, int half)
{
    return load(hash_secret + offset + 32 * half);
}

AVX2 INLINE __m256i add_half(__m256i sum, __m256i data, __m256i key)
{
    __m256i keyed = _mm256_xor_si256(data, key);
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(sum, swapped));
}

AVX2 INLINE __m256i scramble(__m256i sum, __m256i key)
{
    const __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    sum = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), key);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(high, 32));
}

AVX2 static void hash_stripes(Hash *hash, const char *end)
{
    const char *at = hash->at;
    __m256i low = load(hash->sum), high = load(hash->sum + 4);
    size_t stripe = hash->stripe;
    for (; end - at >= STRIPE; at += STRIPE) {
        low = add_half(low, load(at), key_at(8 * stripe, 0));
        high = add_half(high, load(at + 32), key_at(8 * stripe, 1));
        if (++stripe == STRIPES && hash->apart) {
            _mm256_storeu_si256((__m256i *)hash->apart, low);
            _mm256_storeu_si256((__m256i *)(hash->apart + 4), high);
            low = high = _mm256_setzero_si256();
            hash->apart += 8;
            stripe = 0;
        } else if (stripe == STRIPES) {
            low = scramble(low, key_at(HASH_SCRAMBLING, 0));
            high = scramble(high, key_at(HASH_SCRAMBLING, 1));
            stripe = 0;
        }
    }
    _mm256_storeu_si256((__m256i *)hash->sum, low);
    _mm256_storeu_si256((__m256i *)(hash->sum + 4), high);
    hash->at = at, hash->stripe = stripe;
}

void hash_to(Hash *hash, const char *upto)
{
    const char *end = upto < hash->last ? upto : hash->last;
    if (processor == AVX512_PROCESSOR)
        hash_wide(hash, end);
    else
        hash_stripes(hash, end);
}

AVX2 void hash_blocks(Hash *hash, const uint64_t *sums, size_t blocks)
{
    __m256i low = load(hash->sum), high = load(hash->sum + 4);
    for (size_t i = 0; i < blocks; i++, sums += 8) {
        low = scramble(_mm256_add_epi64(low, load(sums)), key_at(HASH_SCRAMBLING, 0));
        high = scramble(_mm256_add_epi64(high, load(sums + 4)), key_at(HASH_SCRAMBLING, 1));
    }
    _mm256_storeu_si256((__m256i *)hash->sum, low);
    _mm256_storeu_si256((__m256i *)(hash->sum + 4), high);
}

/* The accumulators, pair by pair, as one number. */
static uint64_t merged(const uint64_t *sum, size_t offset, uint64_t start)
{
    uint64_t key[8];
    memcpy(key, hash_secret + offset, sizeof key);
    for (int i = 0; i < 8; i += 2) {
        unsigned __int128 product
            = (unsigned __int128)(sum[i] ^ key[i]) * (sum[i + 1] ^ key[i + 1]);
        start += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    start = (start ^ start >> 37) * AVALANCHE;
    return start ^ start >> 32;
}

AVX2 void hash_end(Hash *hash, size_t bytes, unsigned char *digest)
{
    hash_to(hash, hash->end);
    const char *stripe = hash->end - STRIPE;
    __m256i low = add_half(load(hash->sum), load(stripe), key_at(LAST, 0));
    __m256i high = add_half(load(hash->sum + 4), load(stripe + 32), key_at(LAST, 1));
    _mm256_storeu_si256((__m256i *)hash->sum, low);
    _mm256_storeu_si256((__m256i *)(hash->sum + 4), high);
    uint64_t found[2] = {merged(hash->sum, HIGH, ~(bytes * PRIME64_2)),
        merged(hash->sum, LOW, bytes * PRIME64_1)};
    for (int i = 0; i < 16; i++)
        digest[i] = (unsigned char)(found[i / 8] >> (56 - 8 * (i % 8)));
}

#else

void hash_start(Hash *hash, const char *from, size_t bytes) { (void)hash, (void)from, (void)bytes; }
void hash_to(Hash *hash, const char *upto) { (void)hash, (void)upto; }
void hash_blocks(Hash *hash, const uint64_t *sums, size_t blocks)
{
    (void)hash, (void)sums, (void)blocks;
}
void hash_end(Hash *hash, size_t bytes, unsigned char *digest)
{
    (void)hash, (void)bytes, (void)digest;
}

#endif
