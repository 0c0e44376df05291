/* Copies memory that is not read again soon: it is not brought into the caches, where it would take the
 * place of what the program works on, and is not read before it is overwritten. */
#include "values.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define LINE 64
#define AHEAD (16 * LINE)

void stream(const char *from, size_t n, char *to)
{
    size_t head = -(uintptr_t)to % LINE;
    if (n < head + LINE) {
        memcpy(to, from, n);
        return;
    }
    memcpy(to, from, head);
    for (from += head, to += head, n -= head; n >= LINE; from += LINE, to += LINE, n -= LINE) {
        __m128i line[4];
        _mm_prefetch(from + AHEAD, _MM_HINT_T0);
        for (int i = 0; i < 4; i++)
            line[i] = _mm_loadu_si128((const __m128i *)from + i);
        for (int i = 0; i < 4; i++)
            _mm_stream_si128((__m128i *)to + i, line[i]);
    }
    _mm_sfence(); /* before another thread is told of it */
    memcpy(to, from, n);
}

#else

void stream(const char *from, size_t n, char *to) { memcpy(to, from, n); }

#endif
