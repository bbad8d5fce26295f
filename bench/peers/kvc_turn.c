/* kvc_turn: kvc.h behind the line protocol of bench/peers (see README.md).

       kvc_turn MODEL THREADS N_CTX KV_TYPE      KV_TYPE: f16 or f32

   A turn answers with one time in milliseconds: from the call until the logits of the last token
   are there. */
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
    kvc_seq *seq;
    kvc_ctx *ctx;
    kvc_token *tokens;      /* [n_ctx] */
    uint32_t n_ctx;
} engine;

static void need(kvc_result result, const kvc_error *err)
{
    if (result == KVC_OK) return;
    fprintf(stderr, "kvc_turn: %s: %s\n", err->where, err->message);
    exit(2);
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- turns ---- */

/* The sequence holds the first `length` tokens. */
static void set_length(const engine *e, uint32_t length)
{
    kvc_error err;
    uint32_t n = kvc_seq_length(e->seq);
    if (n > length) need(kvc_seq_rollback(e->seq, length), &err);
    if (n < length) need(kvc_prefill(e->ctx, e->seq, e->tokens + n, length - n, NULL, &err), &err);
}

/* One token that is not counted: the threads are awake. */
static void warm_up(const engine *e, uint32_t length)
{
    const float *logits;
    kvc_error err;
    set_length(e, length);
    need(kvc_decode(e->ctx, e->seq, e->tokens[length], &logits, &err), &err);
    set_length(e, length);
}

static double prefill(const engine *e, uint32_t n)
{
    const float *logits;
    kvc_error err;
    double start;
    warm_up(e, 0);
    start = now_ms();
    need(kvc_prefill(e->ctx, e->seq, e->tokens, n, &logits, &err), &err);
    return now_ms() - start;
}

static double decode(const engine *e, uint32_t past, uint32_t n)
{
    const float *logits;
    kvc_error err;
    double start;
    warm_up(e, past);
    start = now_ms();
    for (uint32_t i = past; i < past + n; i++) {
        need(kvc_decode(e->ctx, e->seq, e->tokens[i], &logits, &err), &err);
    }
    return now_ms() - start;
}

static int take_turn(const engine *e, const char *line)
{
    unsigned a, b;
    if (sscanf(line, "prefill %u", &a) == 1 && a >= 1 && a <= e->n_ctx) {
        printf("%.3f\n", prefill(e, a));
        return 1;
    }
    if (sscanf(line, "decode %u %u", &a, &b) == 2 && b >= 1 && b <= e->n_ctx && a <= e->n_ctx - b) {
        printf("%.3f\n", decode(e, a, b));
        return 1;
    }
    return 0;
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
    kvc_cache_desc cache_desc = {.n_ctx = e->n_ctx, .type_k = type, .type_v = type};
    kvc_ctx_desc ctx_desc = {.n_threads = n_threads};
    kvc_error err;
    need(kvc_model_open(&e->model, &model_desc, &err), &err);
    cache_desc.model = ctx_desc.model = e->model;
    need(kvc_cache_new(&e->cache, &cache_desc, &err), &err);
    need(kvc_seq_open(&e->seq, e->cache, &err), &err);
    need(kvc_ctx_new(&e->ctx, &ctx_desc, &err), &err);
    e->tokens = malloc(e->n_ctx * sizeof *e->tokens);
    if (!e->tokens) exit(2);
    for (uint32_t i = 0; i < e->n_ctx; i++) {
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
    int f16 = argc == 5 && strcmp(argv[4], "f16") == 0;
    if (argc != 5 || (!f16 && strcmp(argv[4], "f32") != 0)) {
        fprintf(stderr, "usage: kvc_turn MODEL THREADS N_CTX f16|f32\n");
        return 2;
    }
    e.n_ctx = (uint32_t)strtoul(argv[3], NULL, 10);
    start(&e, argv[1], (uint32_t)strtoul(argv[2], NULL, 10), f16 ? KVC_KV_F16 : KVC_KV_F32);
    print_ready(&e);
    serve(&e);
    free(e.tokens);
    kvc_ctx_free(e.ctx);
    kvc_seq_close(e.seq);
    kvc_cache_free(e.cache);
    kvc_model_close(e.model);
    return 0;
}
