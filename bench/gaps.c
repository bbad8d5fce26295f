/* gaps: what texts that are being written notice of a long prompt.

       gaps MODEL.gguf [THREADS [PROMPT]]

   Eight sequences write, and a prompt of 2,000 tokens arrives for a ninth. For prompts that are
   read in chunks of several sizes (n_chunk; the last: as many rows as a pass has) prints the time
   from token to token of a text without and beside the prompt, the largest of them, and how long
   the prompt took. */
#define _DEFAULT_SOURCE   /* clock_gettime */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kvc.h"
#include "../tests/gguf_write.h"

#define TOOL "gaps"
#include "tool.h"

enum { WRITERS = 8, ALONE = 24, MOST = 1 << 16, CONTEXT = 64, N_BATCH = 256 };

typedef struct bench {
    kvc_model *model;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_request q[WRITERS + 1];
    kvc_sampler *samplers[WRITERS];
    float *logits;              /* [WRITERS + 1, n_vocab] */
    kvc_token *text;
    uint32_t n_vocab;
    size_t n;
    double last, gaps[MOST];    /* seconds between tokens of the first text */
    size_t n_gaps;
} bench;

static int note(kvc_request *q, kvc_token token)
{
    bench *b = q->user;
    (void)token;
    if (q != &b->q[0]) return 0;
    if (b->n_gaps < MOST) b->gaps[b->n_gaps++] = now() - b->last;
    b->last = now();
    return 0;
}

static void submit(bench *b, int i, size_t n, kvc_sampler *sampler)
{
    kvc_request *q = &b->q[i];
    kvc_error err;
    memset(q, 0, sizeof *q);
    need(kvc_seq_open(&q->seq, b->cache, &err), &err);
    q->tokens = b->text;
    q->n_tokens = n;
    q->n_rows = 1;
    q->logits = b->logits + (size_t)i * b->n_vocab;
    q->sampler = sampler;
    q->on_token = note;
    q->user = b;
    need(kvc_submit(b->ctx, q, &err), &err);
}

static void measure(bench *b, uint32_t n_chunk, uint32_t n_threads)
{
    kvc_ctx_desc desc = {0};
    kvc_error err;
    double start, took, alone, beside;
    size_t n_alone;
    desc.model = b->model;
    desc.n_batch = N_BATCH;
    desc.n_chunk = n_chunk;
    desc.n_threads = n_threads;
    need(kvc_ctx_new(&b->ctx, &desc, &err), &err);
    b->n_gaps = 0;
    for (int i = 0; i < WRITERS; i++) submit(b, i, CONTEXT, b->samplers[i]);
    while (b->n_gaps < ALONE) kvc_run(b->ctx, 0);
    /* the first ones are those of the prompts */
    n_alone = b->n_gaps;
    alone = median(b->gaps + 4, n_alone - 4);
    start = now();
    submit(b, WRITERS, b->n, NULL);
    while (!b->q[WRITERS].is_done) kvc_run(b->ctx, 0);
    took = now() - start;
    if (b->n_gaps == n_alone) note(&b->q[0], 0);
    beside = median(b->gaps + n_alone, b->n_gaps - n_alone);
    printf("%7u %12.1f %12.1f %12.1f %12.2f\n", n_chunk, 1e3 * alone, 1e3 * beside,
        1e3 * b->gaps[b->n_gaps - 1], took);
    kvc_cancel(b->ctx, NULL);
    kvc_run(b->ctx, KVC_NO_LIMIT);
    for (int i = 0; i <= WRITERS; i++) kvc_seq_close(b->q[i].seq);
    kvc_ctx_free(b->ctx);
}

int main(int argc, char **argv)
{
    static const uint32_t chunks[] = {8, 16, 32, 64, 128, N_BATCH};
    static bench b;
    kvc_model_desc model_desc = {0};
    kvc_cache_desc cache_desc = {0};
    kvc_sampler_desc sampler_desc = {0};
    kvc_model_info info;
    kvc_logit_bias no_end[2];
    kvc_error err;
    uint32_t n_threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 2;
    uint64_t state = 1;
    if (argc < 2) fail("usage: gaps MODEL.gguf [THREADS [PROMPT]]", "");
    model_desc.path = argv[1];
    model_desc.n_threads = n_threads;
    b.n = argc > 3 ? (size_t)atol(argv[3]) : 2000;
    need(kvc_model_open(&b.model, &model_desc, &err), &err);
    kvc_model_query(b.model, &info);
    b.n_vocab = info.n_vocab;
    b.logits = get((size_t)(WRITERS + 1) * b.n_vocab, sizeof *b.logits);
    b.text = get(b.n > CONTEXT ? b.n : CONTEXT, sizeof *b.text);
    for (size_t i = 0; i < b.n || i < CONTEXT; i++)
        b.text[i] = (kvc_token)(model_random(&state) % b.n_vocab);
    cache_desc.model = b.model;
    cache_desc.n_ctx = b.n > 1024 ? (uint32_t)b.n : 1024;
    cache_desc.n_seqs = WRITERS + 1;
    cache_desc.type_k = cache_desc.type_v = KVC_KV_F16;
    need(kvc_cache_new(&b.cache, &cache_desc, &err), &err);
    sampler_desc.model = b.model;
    sampler_desc.bias = no_end;
    for (int i = 0; i < 2; i++) {
        const kvc_token end = i ? info.eot : info.eos;
        if (end == KVC_NO_TOKEN) continue;
        no_end[sampler_desc.n_bias].token = end;
        no_end[sampler_desc.n_bias++].bias = -HUGE_VALF;
    }
    for (int i = 0; i < WRITERS; i++)
        need(kvc_sampler_new(&b.samplers[i], &sampler_desc, &err), &err);
    printf("%7s %12s %12s %12s %12s\n", "n_chunk", "ms alone", "ms beside", "largest", "prompt s");
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++)
        measure(&b, chunks[i], n_threads);
    for (int i = 0; i < WRITERS; i++) kvc_sampler_free(b.samplers[i]);
    free(b.text), free(b.logits);
    kvc_cache_free(b.cache);
    kvc_model_close(b.model);
    return 0;
}
