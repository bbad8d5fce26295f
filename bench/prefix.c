/* prefix: what the prefix table costs, and what it saves.

       prefix               nanoseconds to look up, enter and evict, in tables of 1,000 to 1,000,000
                            pages of a tiny random model; nothing is computed
       prefix MODEL.gguf [THREADS]
                            milliseconds to the first token of 2,032 tokens, cold, with 2,000 of
                            them in the table, and with all whole pages in a tier in memory */
#define _DEFAULT_SOURCE   /* clock_gettime */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KVC_IMPLEMENTATION
#include "../kvc.h"
#include "../tests/gguf_write.h"
#include "../tests/attic.h"

#define TOOL "prefix"
#include "tool.h"

enum { PAGE = 32, TEXT = 10000, PAGES = TEXT / PAGE, N_VOCAB = 512, ROUNDS = 101 };

static kvc_error err;

/* ---- the table alone ---- */

typedef struct times {
    double enter, evict, find;      /* nanoseconds: of a page, of a page, of a token */
} times;

/* Text i: its first half is that of its neighbour, too. */
static void write_text(kvc_token *text, uint32_t i)
{
    uint64_t state = i / 2;
    for (int k = 0; k < TEXT; k++) {
        if (k == TEXT / 2) state = 1000000 + i;
        text[k] = (kvc_token)(model_random(&state) % N_VOCAB);
    }
}

/* Appends the tokens as a prefill would, but without computing anything. Counts seconds. */
static void feed(kvc_seq *seq, const kvc_token *text, uint32_t n, double *take, double *enter)
{
    double start;
    need(kvc__seq_reserve(seq, text, n, n - 1, &err), &err);
    for (uint32_t at = seq->n_hit, part; at < n; at += part) {
        start = now();
        part = kvc__seq_advance(seq, n - at < 256 ? n - at : 256);
        *take += now() - start;
        for (uint32_t i = 0; i < part; i++)
            *kvc__token_of(seq, kvc__seq_last(seq), seq->n_pos + i) = text[at + i];
        start = now();
        kvc__seq_add(seq, part);
        *enter += now() - start;
    }
    kvc__seq_settle(seq);
}

static times run(const kvc_model *model, uint32_t n_pages)
{
    static kvc_token text[TEXT];
    static double finds[ROUNDS];
    kvc_cache_desc desc = {.model = model, .n_ctx = TEXT, .n_seqs = 2, .page_size = PAGE,
        .n_pages = n_pages + PAGES + 1, .n_prefix = n_pages + PAGES + 1};
    uint32_t n_texts = n_pages / (PAGES / 2 * 3) * 2 + 2, n_fed = 0;
    double take = 0, enter = 0, spare = 0;
    uint64_t state = 1;
    times t = {0, 0, 0};
    kvc_cache_info before, after;
    kvc_cache *cache;
    kvc_seq *seq;
    need(kvc_cache_new(&cache, &desc, &err), &err);
    for (uint32_t i = 0; i < n_texts; i++) {
        write_text(text, i);
        need(kvc_seq_open_shared(&seq, cache, NULL, &err), &err);
        feed(seq, text, TEXT, &take, &enter);
        n_fed += (TEXT - seq->n_hit) / PAGE;
        kvc_seq_close(seq);
    }
    t.enter = enter / n_fed * 1e9;
    for (int i = 0; i < ROUNDS; i++) {
        kvc__hit hit;
        double start;
        write_text(text, n_texts - 1 - (uint32_t)(model_random(&state) % (n_texts < 20 ? 1 :
            n_texts / 2)));
        need(kvc_seq_open_shared(&seq, cache, NULL, &err), &err);
        start = now();
        kvc__prefix_find(seq, text, TEXT, TEXT - 1, &hit);
        finds[i] = (now() - start) / hit.n_pos * 1e9;
        if (hit.n_pos < TEXT / PAGE * PAGE - 1) fail("a text is not there", "table");
        kvc_seq_close(seq);
    }
    t.find = median(finds, ROUNDS);
    take = 0;
    kvc_cache_query(cache, &before);
    for (uint32_t i = 0; i < 20; i++) {     /* the table is full */
        write_text(text, n_texts + 2 * i);
        need(kvc_seq_open_shared(&seq, cache, NULL, &err), &err);
        feed(seq, text, TEXT, &take, &spare);
        kvc_seq_close(seq);
    }
    kvc_cache_query(cache, &after);
    t.evict = take / (double)(after.prefix_evicted - before.prefix_evicted) * 1e9;
    kvc_cache_free(cache);
    return t;
}

static void tables(void)
{
    static const model_shape shape = {.n_layers = 1, .n_embd = 32, .n_heads = 2, .n_kv_heads = 1,
        .n_ff = 32, .head_dim = 4, .n_vocab = N_VOCAB, .n_ctx = TEXT};
    kvc_model_desc desc = {0};
    kvc_model *model;
    size_t size;
    desc.data = model_build(&shape, &size);
    desc.data_size = size;
    need(kvc_model_open(&model, &desc, &err), &err);
    printf("%-12s %16s %16s %20s\n", "pages", "enter a page", "take and evict",
        "look up a token of");
    printf("%-12s %16s %16s %20s\n", "", "ns", "ns", "10,000, ns");
    for (uint32_t n = 1000; n <= 1000000; n *= 10) {
        times t = run(model, n);
        printf("%-12u %16.0f %16.0f %20.2f\n", n, t.enter, t.evict, t.find);
    }
    kvc_model_close(model);
    free((void *)(uintptr_t)desc.data);
}

/* ---- the first token ---- */

/* The same when another cache has put the text's whole pages into a tier in memory. */
static void from_tier(kvc_cache_desc *desc, kvc_ctx *ctx, const kvc_token *text, uint32_t n)
{
    enum { TURNS = 5 };
    double first[TURNS], start;
    kvc_cache *cache;
    kvc_seq *seq;
    kvc_seq_info found;
    const float *logits;
    uint32_t n_put;
    attic a;
    attic_open(&a, n);
    desc->prefix_key = "a key of 16 byte";
    desc->tier = attic_tier(&a);
    need(kvc_cache_new(&cache, desc, &err), &err);
    need(kvc_seq_open_shared(&seq, cache, NULL, &err), &err);
    need(kvc_prefill(ctx, seq, text, n, NULL, &err), &err);
    start = now();
    n_put = kvc_prefix_flush(cache, 0);
    printf("%u pages of %.2f MB put, %.2f ms each", (unsigned)n_put,
        (double)a.pages[0].size * 1e-6, (now() - start) * 1e3 / n_put);
    kvc_cache_free(cache);
    for (int i = 0; i < TURNS; i++) {
        need(kvc_cache_new(&cache, desc, &err), &err);
        need(kvc_seq_open_shared(&seq, cache, NULL, &err), &err);
        start = now();
        need(kvc_prefill(ctx, seq, text, n, &logits, &err), &err);
        first[i] = (now() - start) * 1e3;
        kvc_seq_query(seq, &found);
        kvc_cache_free(cache);
    }
    printf("; first token with %u of %u got from there %.1f ms\n", (unsigned)found.prefix_hit,
        (unsigned)n, median(first, TURNS));
    attic_close(&a);
}

static void first_token(const char *path, uint32_t threads)
{
    enum { SHARED = 2000, OWN = 32, TURNS = 5 };
    static kvc_token text[SHARED + OWN];
    double cold[TURNS], warm[TURNS], limit;
    kvc_model_desc model_desc = {.path = path, .n_threads = threads};
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc ctx_desc = {.n_threads = threads};
    kvc_model_info info;
    kvc_model *model;
    kvc_cache *cache;
    kvc_ctx *ctx;
    uint64_t state = 1;
    need(kvc_model_open(&model, &model_desc, &err), &err);
    kvc_model_query(model, &info);
    cache_desc.model = ctx_desc.model = model;
    cache_desc.n_ctx = SHARED + OWN;
    cache_desc.n_seqs = 1;
    cache_desc.n_pages = cache_desc.n_prefix = (uint32_t)(TURNS + 1) * (SHARED + OWN) / 32 + 8;
    cache_desc.type_k = cache_desc.type_v = KVC_KV_F16;
    need(kvc_cache_new(&cache, &cache_desc, &err), &err);
    need(kvc_ctx_new(&ctx, &ctx_desc, &err), &err);
    for (int i = 0; i < 2 * TURNS; i++) {       /* a new text, then the same with another end */
        kvc_seq *seq;
        kvc_seq_info found;
        const float *logits;
        double start;
        int from = i % 2 ? SHARED : 0;
        for (int k = from; k < SHARED + OWN; k++)
            text[k] = (kvc_token)(model_random(&state) % info.n_vocab);
        start = now();
        need(kvc_seq_open_shared(&seq, cache, NULL, &err), &err);
        need(kvc_prefill(ctx, seq, text, SHARED + OWN, &logits, &err), &err);
        (i % 2 ? warm : cold)[i / 2] = (now() - start) * 1e3;
        kvc_seq_query(seq, &found);
        if (found.prefix_hit != (uint32_t)from) fail("another number was reused", "table");
        kvc_seq_close(seq);
    }
    limit = median(cold, TURNS) * (OWN + 32) / (SHARED + OWN) + 2;
    printf("first token of %d tokens: cold %.1f ms, with %d in the table %.1f ms; "
        "64 of 2,032 of it and 2 ms are %.1f ms\n", SHARED + OWN, median(cold, TURNS), SHARED,
        median(warm, TURNS), limit);
    kvc_cache_free(cache);
    cache_desc.n_pages = cache_desc.n_prefix = (SHARED + OWN) / 32 + 8;
    from_tier(&cache_desc, ctx, text, SHARED + OWN);
    kvc_ctx_free(ctx);
    kvc_model_close(model);
}

int main(int argc, char **argv)
{
    if (argc > 1) first_token(argv[1], argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 2);
    else tables();
    return 0;
}
