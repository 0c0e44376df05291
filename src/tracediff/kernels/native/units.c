/* All of a large array, a unit at a time, on several threads: the same numbers as in one pass. Sums are
 * those of whole blocks, which are added up in their order; what a block of bytes adds to a digest does not
 * depend on those before it, until the accumulators are scrambled. */
#include "values.h"

#define UNIT (2 * BLOCK)      /* elements: whole blocks of a sketch, of sums and of bytes */
#define BYTES (STRIPE * STRIPES)
#define ROUND 64              /* units whose results are kept at a time */

/* What is found of one unit. */
typedef struct {
    Moments moments[UNIT / BLOCK];
    double sketch[BUCKETS];
} Found;

typedef struct {
    const char *from;
    size_t n, width, first; /* the first unit of the round */
    size_t blocks;          /* of bytes, of all the array, that are whole and not the last */
    int code, counted;
    double *total;
    Hash *hash;
    uint64_t *sums; /* of the round's blocks */
    Found *found;   /* of its units */
} Round;

static void of_unit(const Round *round, size_t i, Hash *hash)
{
    const size_t start = (round->first + i) * UNIT, width = round->width;
    const size_t n = round->n - start < UNIT ? round->n - start : UNIT;
    const char *from = round->from + start * width;
    Found *found = &round->found[i];
    Sketch sketch;
    Beside beside = {hash, round->total ? &sketch : NULL};
    if (round->total) {
        sketch_start(&sketch, from, round->code, n, found->sketch);
        sketch.row = start / BUCKETS;
    }
    for (size_t at = 0; round->counted && at < n; at += BLOCK)
        moments(from + at * width, round->code, n - at < BLOCK ? n - at : BLOCK, 0,
            &found->moments[at / BLOCK], &beside);
    if (hash)
        hash_to(hash, from + n * width);
}

/* The first thread's follow what is hashed already, and are added to it. */
static void of_units(void *data, size_t from, size_t to)
{
    const Round *round = data;
    for (size_t i = from; i < to; i++) {
        size_t bytes = UNIT * round->width;
        Hash apart = {.at = round->from + (round->first + i) * bytes,
            .last = round->from + round->blocks * BYTES,
            .end = round->from + round->n * round->width,
            .apart = round->sums + i * (bytes / BYTES) * 8};
        of_unit(round, i, from && round->hash ? &apart : round->hash);
    }
}

/* Adds what was found of units to what was found of those before them. */
static void add_round(const Round *round, size_t units, Moments *to)
{
    size_t start = round->first * UNIT, end = start + units * UNIT;
    end = end < round->n ? end : round->n;
    for (size_t i = 0; to && i < (end - start + BLOCK - 1) / BLOCK; i++) {
        const Moments *found = &round->found[i / (UNIT / BLOCK)].moments[i % (UNIT / BLOCK)];
        to->sum += found->sum, to->abs += found->abs, to->square += found->square;
        to->low = found->low < to->low ? found->low : to->low;
        to->high = found->high > to->high ? found->high : to->high;
        to->nan += found->nan, to->inf += found->inf, to->zero += found->zero;
    }
    for (size_t i = 0; round->total && i < units; i++)
        for (size_t j = 0; j < BUCKETS; j++)
            round->total[j] += round->found[i].sketch[j];
    if (!round->hash)
        return;
    size_t first = start * round->width / BYTES, upto = end * round->width / BYTES;
    size_t next = (size_t)(round->hash->at - round->from) / BYTES;
    upto = upto < round->blocks ? upto : round->blocks;
    if (next >= upto)
        return;
    hash_blocks(round->hash, round->sums + 8 * (next - first), upto - next);
    round->hash->at = round->from + upto * BYTES;
}

int in_units(const char *from, int code, size_t n, Moments *found, double *total, Hash *hash)
{
    const size_t width = WIDTH[code], units = (n + UNIT - 1) / UNIT;
    const size_t most = units < ROUND ? units : ROUND;
    Round round = {.from = from, .n = n, .width = width, .code = code, .counted = found != NULL,
        .total = total, .hash = hash, .blocks = (n * width - 1) / BYTES};
    round.sums = malloc(most * (UNIT * width / BYTES) * 8 * sizeof *round.sums);
    round.found = malloc(most * sizeof *round.found);
    int enough = round.sums && round.found;
    if (enough && found)
        *found = (Moments){.low = INFINITY, .high = -INFINITY};
    if (enough && total)
        memset(total, 0, BUCKETS * sizeof *total);
    for (; enough && round.first < units; round.first += most) {
        size_t many = units - round.first < most ? units - round.first : most;
        together(many, of_units, &round);
        add_round(&round, many, found);
    }
    free(round.sums);
    free(round.found);
    return enough;
}
