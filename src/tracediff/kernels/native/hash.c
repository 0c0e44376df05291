/* XXH3-128 of long inputs (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md), a part at a time,
 * so that the statistics of a part can be found while it is in the cache. */
#include "values.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define STRIPE 64
#define STRIPES 16 /* of a block, after which the accumulators are scrambled */

#define PRIME32_1 UINT64_C(0x9E3779B1)
#define PRIME32_2 UINT64_C(0x85EBCA77)
#define PRIME32_3 UINT64_C(0xC2B2AE3D)
#define PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME64_5 UINT64_C(0x27D4EB2F165667C5)
#define AVALANCHE UINT64_C(0x165667919E3779F9)

/* The secret of the specification, little-endian. */
static const uint64_t SECRET[24] = {
    UINT64_C(0xbe4ba423396cfeb8), UINT64_C(0x1cad21f72c81017c), UINT64_C(0xdb979083e96dd4de),
    UINT64_C(0x1f67b3b7a4a44072), UINT64_C(0x78e5c0cc4ee679cb), UINT64_C(0x2172ffcc7dd05a82),
    UINT64_C(0x8e2443f7744608b8), UINT64_C(0x4c263a81e69035e0), UINT64_C(0xcb00c391bb52283c),
    UINT64_C(0xa32e531b8b65d088), UINT64_C(0x4ef90da297486471), UINT64_C(0xd8acdea946ef1938),
    UINT64_C(0x3f349ce33f76faa8), UINT64_C(0x1d4f0bc7c7bbdcf9), UINT64_C(0x3159b4cd4be0518a),
    UINT64_C(0x647378d9c97e9fc8), UINT64_C(0xc3ebd33483acc5ea), UINT64_C(0xeb6313faffa081c5),
    UINT64_C(0x49daf0b751dd0d17), UINT64_C(0x9e68d429265516d3), UINT64_C(0xfca1477d58be162b),
    UINT64_C(0xce31d07ad1b8f88f), UINT64_C(0x280416958f3acb45), UINT64_C(0x7e404bbbcafbd7af)};

#define SCRAMBLING 128 /* where in the secret, in bytes, the keys of a step begin */
#define LAST 121
#define LOW 11
#define HIGH 117

int has_hash(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
}

void hash_start(Hash *hash, const char *from, size_t bytes)
{
    const uint64_t begin[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2,
        PRIME64_5, PRIME32_1};
    memcpy(hash->sum, begin, sizeof begin);
    hash->at = from;
    hash->stripe = 0;
    hash->end = from + bytes;
    hash->last = from + (bytes - 1) / STRIPE * STRIPE;
}

AVX2 INLINE __m256i load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

AVX2 INLINE __m256i key_at(size_t offset, int half)
{
    return load((const char *)SECRET + offset + 32 * half);
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

AVX2 void hash_to(Hash *hash, const char *upto)
{
    const char *at = hash->at, *end = upto < hash->last ? upto : hash->last;
    __m256i low = load(hash->sum), high = load(hash->sum + 4);
    size_t stripe = hash->stripe;
    for (; end - at >= STRIPE; at += STRIPE) {
        low = add_half(low, load(at), key_at(8 * stripe, 0));
        high = add_half(high, load(at + 32), key_at(8 * stripe, 1));
        if (++stripe == STRIPES) {
            low = scramble(low, key_at(SCRAMBLING, 0));
            high = scramble(high, key_at(SCRAMBLING, 1));
            stripe = 0;
        }
    }
    _mm256_storeu_si256((__m256i *)hash->sum, low);
    _mm256_storeu_si256((__m256i *)(hash->sum + 4), high);
    hash->at = at, hash->stripe = stripe;
}

/* The accumulators, pair by pair, as one number. */
static uint64_t merged(const uint64_t *sum, size_t offset, uint64_t start)
{
    uint64_t key[8];
    memcpy(key, (const char *)SECRET + offset, sizeof key);
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

int has_hash(void) { return 0; }
void hash_start(Hash *hash, const char *from, size_t bytes) { (void)hash, (void)from, (void)bytes; }
void hash_to(Hash *hash, const char *upto) { (void)hash, (void)upto; }
void hash_end(Hash *hash, size_t bytes, unsigned char *digest)
{
    (void)hash, (void)bytes, (void)digest;
}

#endif
