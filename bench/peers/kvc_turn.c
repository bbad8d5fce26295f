/* kvc_turn: kvc.h behind the line protocol of bench/peers (see README.md).

       kvc_turn MODEL THREADS N_CTX KV_TYPE N_SEQS      KV_TYPE: f16 or f32

   A turn answers with one time in milliseconds: from the call until the logits of the last token
   are there. N_CTX is the most that each of N_SEQS sequences holds; all turns but those of a batch
   use the first. */
#define _DEFAULT_SOURCE   /* clock_gettime */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KVC_IMPLEMENTATION
#include "../../kvc.h"

enum { ID_STEP = 197, ID_COUNT = 499 };

typedef struct engine {
    kvc_model *model;
    kvc_cache *cache;
    kvc_seq **seqs;         /* [n_seqs] */
    kvc_ctx *ctx;
    kvc_token *tokens;      /* [n_ctx + n_seqs]; sequence i begins with entry i, so that no two are
                               alike */
    kvc_request *requests;  /* [n_seqs] */
    float *logits;          /* [n_seqs, n_vocab] */
    uint32_t n_ctx, n_seqs, n_vocab;
} engine;

static void need(kvc_result result, const kvc_error *err)
{
    if (result == KVC_OK) return;
    fprintf(stderr, "kvc_turn: %s: %s\n", err->where, err->message);
    exit(2);
}

static void *get(size_t n, size_t size)
{
    void *p = calloc(n, size);
    if (!p) exit(2);
    return p;
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- turns ---- */

/* Each of the first n sequences holds its first `length` tokens. */
static void set_length(const engine *e, uint32_t n, uint32_t length)
{
    kvc_error err = {0};
    for (uint32_t i = 0; i < n; i++) {
        uint32_t held = kvc_seq_length(e->seqs[i]);
        if (held > length) need(kvc_seq_rollback(e->seqs[i], length), &err);
        if (held >= length) continue;
        need(kvc_prefill(e->ctx, e->seqs[i], e->tokens + i + held, length - held, NULL, &err),
            &err);
    }
}

/* The next token of each of the first n sequences, which hold `length`, in one pass. */
static void step(const engine *e, uint32_t n, uint32_t length)
{
    kvc_error err;
    for (uint32_t i = 0; i < n; i++) {
        e->requests[i] = (kvc_request){.seq = e->seqs[i], .tokens = e->tokens + i + length,
            .n_tokens = 1, .n_rows = 1, .logits = e->logits + (size_t)i * e->n_vocab, .err = &err};
    }
    need(kvc_batch(e->ctx, e->requests, n, &err), &err);
    for (uint32_t i = 0; i < n; i++) need(e->requests[i].result, &err);
}

/* One step that is not counted: the threads are awake. */
static void warm_up(const engine *e, uint32_t n, uint32_t length)
{
    set_length(e, n, length);
    step(e, n, length);
    set_length(e, n, length);
}

static double prefill(const engine *e, uint32_t n)
{
    const float *logits;
    kvc_error err;
    double start;
    warm_up(e, 1, 0);
    start = now_ms();
    need(kvc_prefill(e->ctx, e->seqs[0], e->tokens, n, &logits, &err), &err);
    return now_ms() - start;
}

static double decode(const engine *e, uint32_t past, uint32_t n)
{
    const float *logits;
    kvc_error err;
    double start;
    warm_up(e, 1, past);
    start = now_ms();
    for (uint32_t i = past; i < past + n; i++) {
        need(kvc_decode(e->ctx, e->seqs[0], e->tokens[i], &logits, &err), &err);
    }
    return now_ms() - start;
}

static double batch(const engine *e, uint32_t n_seqs, uint32_t past, uint32_t n)
{
    double start;
    warm_up(e, n_seqs, past);
    start = now_ms();
    for (uint32_t i = past; i < past + n; i++) step(e, n_seqs, i);
    return now_ms() - start;
}

/* Whether n tokens behind `past` others fit into a sequence. */
static int is_room(const engine *e, uint32_t past, uint32_t n)
{
    return n >= 1 && n <= e->n_ctx && past <= e->n_ctx - n;
}

static int take_turn(const engine *e, const char *line)
{
    unsigned seqs, past, n;
    double took;
    if (sscanf(line, "prefill %u", &n) == 1 && is_room(e, 0, n)) took = prefill(e, n);
    else if (sscanf(line, "decode %u %u", &past, &n) == 2 && is_room(e, past, n))
        took = decode(e, past, n);
    else if (sscanf(line, "batch %u %u %u", &seqs, &past, &n) == 3 && is_room(e, past, n) &&
        seqs >= 1 && seqs <= e->n_seqs)
        took = batch(e, seqs, past, n);
    else return 0;
    printf("%.3f\n", took);
    return 1;
}

static void serve(const engine *e)
{
    char line[64];
    while (fgets(line, sizeof line, stdin) && strcmp(line, "quit\n") != 0) {
        if (!take_turn(e, line)) printf("error %s", line);
        fflush(stdout);
    }
}

/* ---- start ---- */

static void start(engine *e, const char *path, uint32_t n_threads, kvc_kv_type type)
{
    kvc_model_desc model_desc = {.path = path, .n_threads = n_threads};
    kvc_cache_desc cache_desc = {.n_ctx = e->n_ctx, .n_seqs = e->n_seqs, .type_k = type,
        .type_v = type};
    kvc_ctx_desc ctx_desc = {.n_threads = n_threads};
    kvc_model_info info;
    kvc_error err;
    need(kvc_model_open(&e->model, &model_desc, &err), &err);
    kvc_model_query(e->model, &info);
    e->n_vocab = info.n_vocab;
    cache_desc.model = ctx_desc.model = e->model;
    need(kvc_cache_new(&e->cache, &cache_desc, &err), &err);
    need(kvc_ctx_new(&e->ctx, &ctx_desc, &err), &err);
    e->seqs = get(e->n_seqs, sizeof *e->seqs);
    e->requests = get(e->n_seqs, sizeof *e->requests);
    e->logits = get((size_t)e->n_seqs * e->n_vocab, sizeof *e->logits);
    e->tokens = get((size_t)e->n_ctx + e->n_seqs, sizeof *e->tokens);
    for (uint32_t i = 0; i < e->n_seqs; i++) need(kvc_seq_open(&e->seqs[i], e->cache, &err), &err);
    for (uint32_t i = 0; i < e->n_ctx + e->n_seqs; i++) {
        e->tokens[i] = (kvc_token)(i * ID_STEP % ID_COUNT);
    }
}

static void print_ready(const engine *e)
{
    kvc_ctx_info ctx;
    kvc_cache_info cache;
    kvc_ctx_query(e->ctx, &ctx);
    kvc_cache_query(e->cache, &cache);
    printf("ready kvc.h %s; %s; n_batch = %u; %zu bytes of K and V per token\n",
        KVC_VERSION_STRING, ctx.isa_name, ctx.desc.n_batch, cache.bytes_per_token);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    engine e = {0};
    int f16 = argc == 6 && strcmp(argv[4], "f16") == 0;
    if (argc != 6 || (!f16 && strcmp(argv[4], "f32") != 0)) {
        fprintf(stderr, "usage: kvc_turn MODEL THREADS N_CTX f16|f32 N_SEQS\n");
        return 2;
    }
    e.n_ctx = (uint32_t)strtoul(argv[3], NULL, 10);
    e.n_seqs = (uint32_t)strtoul(argv[5], NULL, 10);
    start(&e, argv[1], (uint32_t)strtoul(argv[2], NULL, 10), f16 ? KVC_KV_F16 : KVC_KV_F32);
    print_ready(&e);
    serve(&e);
    kvc_ctx_free(e.ctx);
    for (uint32_t i = 0; i < e.n_seqs; i++) kvc_seq_close(e.seqs[i]);
    kvc_cache_free(e.cache);
    kvc_model_close(e.model);
    free(e.seqs);
    free(e.requests);
    free(e.logits);
    free(e.tokens);
    return 0;
}
