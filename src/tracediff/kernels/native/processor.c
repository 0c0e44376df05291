/* What the processor has that the other sources make use of. */
#include "values.h"

int processor = PLAIN_PROCESSOR;

int processor_found(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return PLAIN_PROCESSOR;
    /* Older ones than those with VBMI2 (Ice Lake, Zen 4) become slower for all that runs on them. */
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512vbmi2"))
        return AVX512_PROCESSOR;
    return AVX2_PROCESSOR;
#else
    return PLAIN_PROCESSOR;
#endif
}
