/* sequences: what it costs to fork, roll back, reorder and cut sequences of 100, 1,000 and 10,000
   tokens. The model is tiny and random, since its weights do not matter here.

       sequences            a table of nanoseconds; medians of 31 rounds */
#define _DEFAULT_SOURCE   /* clock_gettime */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kvc.h"
#include "../tests/gguf_write.h"

#define TOOL "sequences"
#include "tool.h"

enum { N_BEAMS = 16, ROUNDS = 31, TIMES = 64, LONGEST = 10000, SPARE = 128 };

typedef enum operation {
    FORK, BACK, REMOVE, REORDER, N_OPERATIONS
} operation;

static const char *const names[N_OPERATIONS] = {
    "fork", "roll back by 8 tokens", "remove 64 tokens from the middle", "reorder 16 beams"};

/* ---- one round of each; nanoseconds of one operation ---- */

typedef struct bench {
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *past;              /* the sequence in question */
    kvc_token tokens[LONGEST + SPARE];
} bench;

static double time_fork(bench *b)
{
    kvc_seq *seqs[TIMES];
    kvc_error err;
    double start = now(), took;
    for (int i = 0; i < TIMES; i++) need(kvc_seq_fork(&seqs[i], b->past, &err), &err);
    took = now() - start;
    for (int i = 0; i < TIMES; i++) kvc_seq_close(seqs[i]);
    return took / TIMES;
}

static double time_back(bench *b)
{
    kvc_seq *seqs[TIMES];
    kvc_error err;
    double start, took;
    for (int i = 0; i < TIMES; i++) need(kvc_seq_fork(&seqs[i], b->past, &err), &err);
    start = now();
    for (int i = 0; i < TIMES; i++)
        need(kvc_seq_rollback(seqs[i], kvc_seq_length(seqs[i]) - 8), &err);
    took = now() - start;
    for (int i = 0; i < TIMES; i++) kvc_seq_close(seqs[i]);
    return took / TIMES;
}

/* Of 64 tokens at least one page is gone, and the pages before it get other numbers. */
static double time_remove(bench *b)
{
    kvc_seq *seq;
    kvc_error err;
    uint32_t middle = kvc_seq_length(b->past) / 2 - 32;
    double start, took;
    need(kvc_seq_fork(&seq, b->past, &err), &err);
    start = now();
    need(kvc_seq_remove(seq, middle, middle + 64, &err), &err);
    took = now() - start;
    kvc_seq_close(seq);
    return took;
}

/* Beams that have each written a token of their own. */
static double time_reorder(bench *b)
{
    kvc_seq *seqs[N_BEAMS];
    kvc_error err;
    uint32_t from[N_BEAMS], state = 1;
    double start, took;
    for (int i = 0; i < N_BEAMS; i++) {
        need(kvc_seq_fork(&seqs[i], b->past, &err), &err);
        need(kvc_prefill(b->ctx, seqs[i], b->tokens + i, 1, NULL, &err), &err);
    }
    start = now();
    for (int i = 0; i < TIMES; i++) {
        for (int k = 0; k < N_BEAMS; k++)
            from[k] = (state = state * 1664525u + 1013904223u) >> 28;
        need(kvc_seq_reorder(seqs, from, N_BEAMS, &err), &err);
    }
    took = now() - start;
    for (int i = 0; i < N_BEAMS; i++) kvc_seq_close(seqs[i]);
    return took / TIMES;
}

static double time_of(bench *b, operation op)
{
    switch (op) {
    case FORK: return time_fork(b);
    case BACK: return time_back(b);
    case REMOVE: return time_remove(b);
    default: return time_reorder(b);
    }
}

int main(void)
{
    static const uint32_t lengths[] = {100, 1000, LONGEST};
    enum { N_LENGTHS = sizeof lengths / sizeof lengths[0] };
    static bench b;
    static double times[N_OPERATIONS][N_LENGTHS][ROUNDS];
    model_shape shape = {.n_layers = 1, .n_embd = 32, .n_heads = 2, .n_kv_heads = 1, .n_ff = 32,
        .n_vocab = 64};
    kvc_model_desc model_desc = {0};
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc ctx_desc = {0};
    kvc_model *model;
    kvc_seq *seqs[N_LENGTHS];
    kvc_error err;
    void *image = model_build(&shape, &model_desc.data_size);
    model_desc.data = image;
    need(kvc_model_open(&model, &model_desc, &err), &err);
    cache_desc.model = model;
    cache_desc.n_ctx = LONGEST + SPARE;
    cache_desc.n_seqs = TIMES + N_LENGTHS;
    cache_desc.n_pages = 2000;
    need(kvc_cache_new(&b.cache, &cache_desc, &err), &err);
    ctx_desc.model = model;
    need(kvc_ctx_new(&b.ctx, &ctx_desc, &err), &err);
    for (int i = 0; i < LONGEST + SPARE; i++) b.tokens[i] = i * 31 % 64;
    for (int i = 0; i < N_LENGTHS; i++) {
        need(kvc_seq_open(&seqs[i], b.cache, &err), &err);
        need(kvc_prefill(b.ctx, seqs[i], b.tokens, lengths[i], NULL, &err), &err);
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int op = 0; op < N_OPERATIONS; op++)
            for (int i = 0; i < N_LENGTHS; i++) {
                b.past = seqs[i];
                times[op][i][round] = time_of(&b, (operation)op);
            }
    printf("%-34s", "nanoseconds, by tokens held");
    for (int i = 0; i < N_LENGTHS; i++) printf(" %8u", (unsigned)lengths[i]);
    printf("\n");
    for (int op = 0; op < N_OPERATIONS; op++) {
        printf("%-34s", names[op]);
        for (int i = 0; i < N_LENGTHS; i++) printf(" %8.0f", median(times[op][i], ROUNDS) * 1e9);
        printf("\n");
    }
    kvc_ctx_free(b.ctx);
    kvc_cache_free(b.cache);
    kvc_model_close(model);
    free(image);
    return 0;
}
