/* batch: what it is worth to decode several sequences in one pass over the weights.

       batch MODEL.gguf [THREADS [CONTEXT]]

   Tokens per second of 1, 4, 16 and 32 sequences together, each behind CONTEXT positions of its own
   (64), the latency of a token, and the same for forks, which have those positions in common. The
   sizes take turns; medians of 15 rounds. */
#define _DEFAULT_SOURCE   /* clock_gettime */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kvc.h"
#include "../tests/gguf_write.h"

#define TOOL "batch"
#include "tool.h"

enum { MOST = 32, N_SIZES = 4, ROUNDS = 15, STEPS = 4 };

static const int sizes[N_SIZES] = {1, 4, 16, MOST};

typedef struct bench {
    kvc_ctx *ctx;
    kvc_seq *seqs[MOST], *forks[MOST];
    kvc_token tokens[MOST];
    kvc_request requests[MOST];
    float *logits;              /* [MOST, n_vocab] */
    uint32_t n_vocab, context;
} bench;

/* Seconds of a step, the sequences being rolled back afterwards. */
static double time_steps(bench *b, kvc_seq *const *seqs, int n)
{
    kvc_error err;
    double start, took = 0;
    for (int step = 0; step < STEPS + 1; step++) {
        memset(b->requests, 0, sizeof b->requests);
        for (int i = 0; i < n; i++) {
            b->requests[i].seq = seqs[i];
            b->requests[i].tokens = &b->tokens[i];
            b->requests[i].n_tokens = b->requests[i].n_rows = 1;
            b->requests[i].logits = b->logits + (size_t)i * b->n_vocab;
            b->requests[i].err = &err;
        }
        start = now();
        need(kvc_batch(b->ctx, b->requests, (size_t)n, &err), &err);
        if (step > 0) took += now() - start;        /* the first one wakes the threads */
        for (int i = 0; i < n; i++) need(b->requests[i].result, &err);
    }
    for (int i = 0; i < n; i++) need(kvc_seq_rollback(seqs[i], b->context), &err);
    return took / STEPS;
}

int main(int argc, char **argv)
{
    static bench b;
    static double took[N_SIZES][ROUNDS], forks[N_SIZES][ROUNDS];
    kvc_model_desc model_desc = {0};
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc ctx_desc = {0};
    kvc_model_info info;
    kvc_model *model;
    kvc_cache *cache;
    kvc_error err;
    kvc_token *text;
    uint64_t state = 1;
    double one;
    if (argc < 2) fail("usage: batch MODEL.gguf [THREADS [CONTEXT]]", "");
    model_desc.path = argv[1];
    model_desc.n_threads = ctx_desc.n_threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 2;
    b.context = argc > 3 ? (uint32_t)atoi(argv[3]) : 64;
    need(kvc_model_open(&model, &model_desc, &err), &err);
    kvc_model_query(model, &info);
    b.n_vocab = info.n_vocab;
    b.logits = get((size_t)MOST * b.n_vocab, sizeof *b.logits);
    text = get(b.context, sizeof *text);
    cache_desc.model = ctx_desc.model = model;
    cache_desc.n_ctx = b.context + STEPS + 1;
    cache_desc.n_seqs = 2 * MOST;
    cache_desc.n_pages = (MOST + 1) * ((cache_desc.n_ctx + 31) / 32) + MOST;
    cache_desc.type_k = cache_desc.type_v = KVC_KV_F16;
    need(kvc_cache_new(&cache, &cache_desc, &err), &err);
    need(kvc_ctx_new(&b.ctx, &ctx_desc, &err), &err);
    for (int i = 0; i < MOST; i++) {
        for (uint32_t k = 0; k < b.context; k++)
            text[k] = (kvc_token)(model_random(&state) % b.n_vocab);
        b.tokens[i] = text[0];
        need(kvc_seq_open(&b.seqs[i], cache, &err), &err);
        need(kvc_prefill(b.ctx, b.seqs[i], text, b.context, NULL, &err), &err);
        need(kvc_seq_fork(&b.forks[i], b.seqs[0], &err), &err);
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int k = 0; k < N_SIZES; k++) {
            took[k][round] = time_steps(&b, b.seqs, sizes[k]);
            forks[k][round] = time_steps(&b, b.forks, sizes[k]);
        }
    printf("%-10s %14s %12s %10s %16s\n", "sequences", "tokens/s", "ms a token", "of one",
        "forks, tokens/s");
    one = 1 / median(took[0], ROUNDS);
    for (int k = 0; k < N_SIZES; k++) {
        double step = median(took[k], ROUNDS);
        printf("%-10d %14.1f %12.2f %9.2fx %16.1f\n", sizes[k], sizes[k] / step, step * 1e3,
            sizes[k] / step / one, sizes[k] / median(forks[k], ROUNDS));
    }
    free(text);
    free(b.logits);
    kvc_ctx_free(b.ctx);
    kvc_cache_free(cache);
    kvc_model_close(model);
    return 0;
}
