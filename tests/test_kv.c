/* The section >>kv and what surrounds it: pages, sequences, contexts; memory to the byte, refusals
   that change nothing, and arguments that make no sense. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include <pthread.h>
#include <time.h>

#include "testing.h"

#define N_VOCAB 330             /* with a tokenizer, and rows that are padding */
static const model_shape small = {.n_layers = 2, .n_embd = 32, .n_heads = 2, .n_kv_heads = 1,
    .head_dim = 20, .n_ff = 48, .n_vocab = N_VOCAB, .n_tokens = 310, .n_ctx = 200};

/* ---- short forms ---- */

static void query(kvc_cache *cache, kvc_cache_info *info) {
    kvc_cache_query(cache, info);
    assert_int_equal(info->pages_free + info->pages_live, info->pages_total);
    assert_true(info->pages_shared <= info->pages_live);
    assert_true(info->pages_live <= info->pages_peak);
}

/* The page counts must be these. */
static void check_pages(kvc_cache *cache, uint32_t n_seqs, uint32_t live, uint32_t shared,
    const char *file, int line) {
    kvc_cache_info info;
    query(cache, &info);
    if (info.n_seqs_open == n_seqs && info.pages_live == live && info.pages_shared == shared)
        return;
    print_error("%u sequences, %u pages live, %u shared; not %u, %u, %u\n", info.n_seqs_open,
        info.pages_live, info.pages_shared, n_seqs, live, shared);
    _fail(file, line);
}

#define PAGES(cache, n_seqs, live, shared) \
    check_pages(cache, n_seqs, live, shared, __FILE__, __LINE__)

static void append(kvc_ctx *ctx, kvc_seq *seq, const kvc_token *tokens, size_t n) {
    OK(kvc_prefill(ctx, seq, tokens, n, NULL, &last));
}

/* The last logits after the next tokens as a hash. */
static uint64_t hash_after(kvc_ctx *ctx, kvc_seq *seq, const kvc_token *tokens, size_t n) {
    const float *logits;
    OK(kvc_prefill(ctx, seq, tokens, n, &logits, &last));
    return hash_floats(logits, N_VOCAB, 1);
}

/* ---- memory to the byte ---- */

static void check_cache_size(const rig *r, kvc_cache_desc desc) {
    counter mem = {0};
    kvc_cache *cache;
    kvc_cache_info info;
    size_t size = kvc_cache_size(&desc);
    desc.allocator = counter_hook(&mem);
    (void)r;
    assert_true(size > 0);
    assert_int_equal(mem.n_allocs, 0);
    OK(kvc_cache_new(&cache, &desc, &last));
    assert_int_equal(mem.n_allocs, 1);
    assert_int_equal(mem.bytes, size);
    kvc_cache_query(cache, &info);
    assert_int_equal(info.memory_size, size);
    assert_true(size >= info.pages_total * info.page_bytes);
    assert_true(info.page_bytes >= info.bytes_per_token * info.desc.page_size);
    kvc_cache_free(cache);
    CLEAN(&mem);
}

static void test_cache_size(void **state) {
    static const kvc_cache_desc rows[] = {
        {.n_ctx = 0}, {.n_ctx = 1}, {.n_ctx = 33, .n_seqs = 3}, {.n_ctx = 100, .page_size = 16},
        {.n_ctx = 100, .page_size = 256, .type_k = KVC_KV_F16},
        {.n_ctx = 100, .type_v = KVC_KV_F16, .n_pages = 7},
        {.n_ctx = 1000, .type_k = KVC_KV_F16, .type_v = KVC_KV_F16, .n_seqs = 100, .n_pages = 1},
        {.n_ctx = 100, .type_k = KVC_KV_Q8, .type_v = KVC_KV_Q4},
        {.n_ctx = 100, .type_k = KVC_KV_Q4, .type_v = KVC_KV_Q8, .n_edge = 1, .edge_v = KVC_KV_Q4}
    };
    size_t i;
    rig r;
    (void)state;
    rig_open(&r, &small);
    for (i = 0; i < COUNT(rows); i++) {
        kvc_cache_desc desc = rows[i];
        desc.model = r.model;
        check_cache_size(&r, desc);
    }
    rig_close(&r);
}

/* 2 layers, 1 key head: (20 + 20) elements of 4 or 2 bytes for each layer and position, or two
   blocks of 34 or 18 bytes. */
static void test_bytes_per_token(void **state) {
    static const struct {
        kvc_kv_type k, v;
        size_t bytes;
    } rows[] = {
        {KVC_KV_DEFAULT, KVC_KV_DEFAULT, 2 * 40 * 4}, {KVC_KV_F32, KVC_KV_F32, 2 * 40 * 4},
        {KVC_KV_F16, KVC_KV_F16, 2 * 40 * 2}, {KVC_KV_F16, KVC_KV_F32, 2 * (20 * 2 + 20 * 4)},
        {KVC_KV_Q8, KVC_KV_Q8, 2 * 68}, {KVC_KV_Q4, KVC_KV_Q8, 2 * (18 + 34)},
        {KVC_KV_F16, KVC_KV_Q4, 2 * (40 + 18)}
    };
    size_t i;
    rig r;
    (void)state;
    rig_open(&r, &small);
    for (i = 0; i < COUNT(rows); i++) {
        kvc_cache_desc desc = {0};
        kvc_cache *cache;
        kvc_cache_info info;
        desc.model = r.model;
        desc.type_k = rows[i].k;
        desc.type_v = rows[i].v;
        OK(kvc_cache_new(&cache, &desc, &last));
        kvc_cache_query(cache, &info);
        assert_int_equal(info.bytes_per_token, rows[i].bytes);
        kvc_cache_free(cache);
    }
    rig_close(&r);
}

static kvc_cache *edge_cache(const rig *r, uint32_t n_edge, kvc_kv_type edge_k,
    kvc_kv_type edge_v) {
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    desc.model = r->model;
    desc.type_k = KVC_KV_Q8;
    desc.type_v = KVC_KV_Q4;
    desc.n_edge = n_edge;
    desc.edge_k = edge_k;
    desc.edge_v = edge_v;
    OK(kvc_cache_new(&cache, &desc, &last));
    return cache;
}

/* Bytes of a token and the logits after a text. */
static size_t edge_run(const rig *r, uint32_t n_edge, kvc_kv_type edge_k, kvc_kv_type edge_v,
    float *out) {
    kvc_token text[50];
    kvc_cache *cache = edge_cache(r, n_edge, edge_k, edge_v);
    kvc_ctx *ctx = new_ctx(r, 16, 1, KVC_ISA_BEST);
    kvc_seq *seq = new_seq(cache);
    kvc_cache_info info;
    const float *logits;
    random_tokens(text, 50, N_VOCAB, 3);
    OK(kvc_prefill(ctx, seq, text, 50, &logits, &last));
    memcpy(out, logits, N_VOCAB * sizeof *out);
    query(cache, &info);
    kvc_seq_close(seq);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    return info.bytes_per_token;
}

/* 5 layers of 20 + 20 elements; a layer takes 34 + 18 bytes, one at the edge 80 or 40 * 4. */
static void test_edges(void **state) {
    static float plain[N_VOCAB], edges[N_VOCAB], all[N_VOCAB], other[N_VOCAB], inner[N_VOCAB];
    model_shape shape = small;
    rig r;
    (void)state;
    shape.n_layers = 5;
    rig_open(&r, &shape);
    assert_int_equal(edge_run(&r, 0, KVC_KV_F16, KVC_KV_F16, plain), 5 * 52);
    assert_int_equal(edge_run(&r, 1, KVC_KV_F16, KVC_KV_F16, edges), 3 * 52 + 2 * 80);
    assert_int_equal(edge_run(&r, 2, KVC_KV_F16, KVC_KV_F16, inner), 52 + 4 * 80);
    assert_int_equal(edge_run(&r, 3, KVC_KV_F16, KVC_KV_F16, all), 5 * 80);
    assert_int_equal(edge_run(&r, UINT32_MAX, KVC_KV_F16, KVC_KV_F16, other), 5 * 80);
    SAME(other, all, 1, N_VOCAB, "all layers");
    assert_memory_not_equal(plain, edges, sizeof plain);
    assert_memory_not_equal(edges, inner, sizeof plain);
    assert_memory_not_equal(inner, all, sizeof plain);
    assert_int_equal(edge_run(&r, 1, KVC_KV_DEFAULT, KVC_KV_DEFAULT, other), 3 * 52 + 2 * 160);
    assert_int_equal(edge_run(&r, 2, KVC_KV_Q8, KVC_KV_Q4, other), 5 * 52);
    SAME(other, plain, 1, N_VOCAB, "edges of the same types");
    rig_close(&r);
}

static void test_ctx_size(void **state) {
    static const kvc_ctx_desc rows[] = {
        {.n_batch = 0}, {.n_batch = 1}, {.n_batch = 7, .n_threads = 3}, {.n_batch = 300},
        {.n_threads = 2, .isa = KVC_ISA_BASE}
    };
    static const int types[] = {GGUF_F32, GGUF_Q8_0};
    size_t i, t;
    (void)state;
    for (t = 0; t < COUNT(types); t++) {
        model_shape shape = small;
        rig r;
        shape.type = types[t];
        shape.n_ff = 64;
        shape.head_dim = 16;
        rig_open(&r, &shape);
        for (i = 0; i < COUNT(rows); i++) {
            kvc_ctx_desc desc = rows[i];
            counter mem = {0};
            kvc_ctx *ctx;
            kvc_ctx_info info;
            size_t size;
            desc.model = r.model;
            size = kvc_ctx_size(&desc);
            assert_true(size > 0);
            desc.allocator = counter_hook(&mem);
            OK(kvc_ctx_new(&ctx, &desc, &last));
            assert_int_equal(mem.n_allocs, 1);
            assert_int_equal(mem.bytes, size);
            kvc_ctx_query(ctx, &info);
            assert_int_equal(info.memory_size, size);
            kvc_ctx_free(ctx);
            CLEAN(&mem);
        }
        rig_close(&r);
    }
}

static void test_sampler_size(void **state) {
    static const kvc_logit_bias bias[2] = {{1, 0.5f}, {9, -INFINITY}};
    kvc_sampler_desc desc = {0};
    kvc_sampler *sampler;
    counter mem = {0};
    size_t size;
    rig r;
    (void)state;
    rig_open(&r, &small);
    desc.model = r.model;
    desc.top_k = 5;
    desc.penalty_window = 100;
    desc.bias = bias;
    desc.n_bias = 2;
    size = kvc_sampler_size(&desc);
    assert_true(size > 0);
    desc.allocator = counter_hook(&mem);
    OK(kvc_sampler_new(&sampler, &desc, &last));
    assert_int_equal(mem.n_allocs, 1);
    assert_int_equal(mem.bytes, size);
    kvc_sampler_free(sampler);
    CLEAN(&mem);
    rig_close(&r);
}

/* An object of each kind in memory of the host: a byte less is refused, so is an odd address, and
   the allocator is not asked. The bytes behind the block must survive a step. */
static void test_own_memory(void **state) {
    kvc_cache_desc cd = {0};
    kvc_ctx_desc xd = {0};
    kvc_sampler_desc sd = {0};
    unsigned char *block[3];
    size_t size[3], i, before;
    kvc_token text[9], token;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_sampler *sampler;
    kvc_seq *seq;
    const float *logits;
    rig r;
    (void)state;
    rig_open(&r, &small);
    cd.model = xd.model = sd.model = r.model;
    size[0] = kvc_cache_size(&cd);
    size[1] = kvc_ctx_size(&xd);
    size[2] = kvc_sampler_size(&sd);
    for (i = 0; i < 3; i++) {
        assert_int_equal(posix_memalign((void **)&block[i], 64, size[i] + 64), 0);
        memset(block[i], 0xa5, size[i] + 64);
    }
    before = r.mem.n_allocs;
    cd.memory.ptr = block[0];
    xd.memory.ptr = block[1];
    sd.memory.ptr = block[2];
    cd.memory.size = size[0] - 1;
    xd.memory.size = size[1] - 1;
    sd.memory.size = size[2] - 1;
    FAILS(KVC_ERROR_MEMORY, "memory.size", kvc_cache_new(&cache, &cd, &last));
    FAILS(KVC_ERROR_MEMORY, "memory.size", kvc_ctx_new(&ctx, &xd, &last));
    FAILS(KVC_ERROR_MEMORY, NULL, kvc_sampler_new(&sampler, &sd, &last));
    assert_null(cache);
    assert_null(ctx);
    assert_null(sampler);
    cd.memory.size = size[0];
    xd.memory.size = size[1];
    sd.memory.size = size[2];
    cd.memory.ptr = block[0] + 32;
    FAILS(KVC_ERROR_ARGUMENT, "memory.ptr", kvc_cache_new(&cache, &cd, &last));
    xd.memory.ptr = block[1] + 1;
    FAILS(KVC_ERROR_ARGUMENT, "memory.ptr", kvc_ctx_new(&ctx, &xd, &last));
    sd.memory.ptr = block[2] + 8;
    FAILS(KVC_ERROR_ARGUMENT, NULL, kvc_sampler_new(&sampler, &sd, &last));
    cd.memory.ptr = block[0];
    xd.memory.ptr = block[1];
    sd.memory.ptr = block[2];
    OK(kvc_cache_new(&cache, &cd, &last));
    OK(kvc_ctx_new(&ctx, &xd, &last));
    OK(kvc_sampler_new(&sampler, &sd, &last));
    random_tokens(text, 9, N_VOCAB, 1);
    seq = new_seq(cache);
    OK(kvc_prefill(ctx, seq, text, 9, &logits, &last));
    OK(kvc_sampler_sample(sampler, logits, &token, &last));
    kvc_sampler_free(sampler);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    assert_int_equal(r.mem.n_allocs, before);
    for (i = 0; i < 3; i++) {
        size_t k;
        for (k = 0; k < 64; k++) assert_int_equal(block[i][size[i] + k], 0xa5);
        free(block[i]);
    }
    rig_close(&r);
}

/* The allocator has nothing: each constructor says so and leaves nothing behind. */
static void test_no_memory(void **state) {
    counter mem = {0};
    kvc_cache_desc cd = {0};
    kvc_ctx_desc xd = {0};
    kvc_sampler_desc sd = {0};
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_sampler *sampler;
    rig r;
    (void)state;
    rig_open(&r, &small);
    mem.limit = 1;
    cd.model = xd.model = sd.model = r.model;
    cd.allocator = xd.allocator = sd.allocator = counter_hook(&mem);
    xd.n_threads = 3;
    FAILS(KVC_ERROR_MEMORY, NULL, kvc_cache_new(&cache, &cd, &last));
    FAILS(KVC_ERROR_MEMORY, NULL, kvc_ctx_new(&ctx, &xd, &last));
    FAILS(KVC_ERROR_MEMORY, NULL, kvc_sampler_new(&sampler, &sd, &last));
    assert_null(cache);
    assert_null(ctx);
    assert_null(sampler);
    CLEAN(&mem);
    rig_close(&r);
}

/* "ererer...": the vocabulary has "er" and "re", so no place in it is safe to cut. */
static void test_tokenize_work(void **state) {
    enum { SIZE = 6000 };
    char *text = (char *)gguf_must(malloc(SIZE));
    kvc_token *tokens[2];
    kvc_memory work;
    size_t i, n[2], calls;
    rig r;
    (void)state;
    rig_open(&r, &small);
    for (i = 0; i < SIZE; i++) text[i] = "er"[i % 2];
    for (i = 0; i < 2; i++) tokens[i] = (kvc_token *)gguf_must(calloc(SIZE + 1, sizeof(kvc_token)));
    work.size = kvc_tokenize_work_size(r.model, SIZE);
    work.ptr = gguf_must(malloc(work.size));
    calls = r.mem.n_allocs;
    OK(kvc_tokenize(r.model, text, SIZE, 0, tokens[0], SIZE + 1, &n[0], &work, &last));
    assert_int_equal(r.mem.n_allocs, calls);
    OK(kvc_tokenize(r.model, text, SIZE, 0, tokens[1], SIZE + 1, &n[1], NULL, &last));
    assert_int_equal(r.mem.n_allocs, calls + 1);        /* one alloc and free, as the API says */
    assert_int_equal(n[0], n[1]);
    assert_memory_equal(tokens[0], tokens[1], n[0] * sizeof(kvc_token));
    free(work.ptr);
    free(tokens[0]);
    free(tokens[1]);
    free(text);
    rig_close(&r);
}

/* From the first token to the last no call of the allocator, whatever is done. */
static void test_steps_allocate_nothing(void **state) {
    static const char text[] = "the rain in _the_ <s> \xE2\x96\x81 \xf0\x9f\x98\x80 and 1234";
    kvc_memory work;
    kvc_token tokens[200], more[30], token = 1;
    kvc_text_stream stream = {{0}, 0, 0, 0, 0};
    kvc_sampler_desc sd = {0};
    kvc_sampler *sampler;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq, *fork;
    const float *logits;
    size_t n, calls, i;
    char out[64];
    rig r;
    (void)state;
    rig_open(&r, &small);
    cache = new_cache(&r, 200, 2, 16, KVC_KV_F16);
    ctx = new_ctx(&r, 16, 3, KVC_ISA_BEST);
    sd.model = r.model;
    sd.temperature = 0.8f;
    sd.top_k = 20;
    sd.top_p = 0.9f;
    sd.min_p = 0.01f;
    sd.repeat_penalty = 1.1f;
    OK(kvc_sampler_new(&sampler, &sd, &last));
    random_tokens(more, 30, N_VOCAB, 1);
    work.size = kvc_tokenize_work_size(r.model, sizeof text - 1);
    work.ptr = gguf_must(malloc(work.size + 1));
    calls = r.mem.n_allocs + r.mem.n_frees;

    OK(kvc_tokenize(r.model, text, sizeof text - 1,
        KVC_TEXT_SPECIAL_ADD | KVC_TEXT_SPECIAL_PARSE, tokens, COUNT(tokens), &n, &work, &last));
    seq = new_seq(cache);
    OK(kvc_prefill(ctx, seq, tokens, n, &logits, &last));
    for (i = 0; i < 40; i++) {
        OK(kvc_sampler_sample(sampler, logits, &token, &last));
        OK(kvc_text_push(r.model, &stream, token, out, sizeof out, &n, &last));
        OK(kvc_decode(ctx, seq, token, &logits, &last));
    }
    OK(kvc_seq_fork(&fork, seq, &last));
    append(ctx, fork, more, 30);
    OK(kvc_seq_rollback(fork, 3));
    kvc_seq_close(fork);
    kvc_sampler_accept(sampler, 5);
    kvc_sampler_reset(sampler, 9);
    FAILS(KVC_ERROR_ARGUMENT, NULL, kvc_decode(ctx, seq, -5, &logits, &last));
    kvc_seq_close(seq);

    assert_int_equal(r.mem.n_allocs + r.mem.n_frees, calls);
    free(work.ptr);
    kvc_sampler_free(sampler);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* ---- pages ---- */

static void test_defaults(void **state) {
    kvc_cache_desc cd = {0};
    kvc_ctx_desc xd = {0};
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_cache_info ci;
    kvc_ctx_info xi;
    kvc_seq *seq;
    rig r;
    (void)state;
    rig_open(&r, &small);
    cd.model = xd.model = r.model;
    OK(kvc_cache_new(&cache, &cd, &last));
    OK(kvc_ctx_new(&ctx, &xd, &last));
    kvc_cache_query(cache, &ci);
    kvc_ctx_query(ctx, &xi);
    assert_ptr_equal(ci.desc.model, r.model);
    assert_int_equal(ci.desc.n_ctx, 200);       /* n_ctx_train */
    assert_int_equal(ci.desc.n_seqs, 1);
    assert_int_equal(ci.desc.page_size, 32);
    assert_int_equal(ci.desc.n_pages, 7);
    assert_int_equal(ci.desc.type_k, KVC_KV_F32);
    assert_int_equal(ci.desc.type_v, KVC_KV_F32);
    assert_int_equal(xi.desc.n_batch, 256);
    assert_int_equal(xi.desc.n_threads, 1);
    assert_true(xi.desc.isa != KVC_ISA_BEST);
    assert_true(strlen(xi.isa_name) > 3);
    assert_int_equal(xi.n_rows, 0);
    seq = new_seq(cache);
    assert_int_equal(kvc_seq_capacity(seq), 200);
    assert_int_equal(kvc_seq_length(seq), 0);
    PAGES(cache, 1, 0, 0);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);          /* with the sequence still open */
    rig_close(&r);
}

/* Counts by hand, pages of 16. */
static void test_page_counts(void **state) {
    kvc_token text[100];
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *a, *b, *c;
    kvc_cache_info info;
    rig r;
    (void)state;
    rig_open(&r, &small);
    random_tokens(text, 100, N_VOCAB, 1);
    cache = new_cache(&r, 100, 3, 16, KVC_KV_F32);
    ctx = new_ctx(&r, 64, 1, KVC_ISA_BEST);
    a = new_seq(cache);
    append(ctx, a, text, 15);
    PAGES(cache, 1, 1, 0);
    append(ctx, a, text, 1);            /* 16: the page is full, no more is taken */
    PAGES(cache, 1, 1, 0);
    append(ctx, a, text, 1);            /* 17 */
    PAGES(cache, 1, 2, 0);
    append(ctx, a, text, 23);           /* 40 */
    PAGES(cache, 1, 3, 0);
    OK(kvc_seq_fork(&b, a, &last));
    PAGES(cache, 2, 3, 3);
    append(ctx, b, text, 1);            /* copies the third page */
    PAGES(cache, 2, 4, 2);
    append(ctx, a, text, 1);            /* which is a's own now */
    PAGES(cache, 2, 4, 2);
    append(ctx, b, text, 7);            /* 48: full */
    OK(kvc_seq_fork(&c, b, &last));
    PAGES(cache, 3, 4, 3);
    append(ctx, c, text, 1);            /* begins a page: nothing to copy */
    PAGES(cache, 3, 5, 3);
    OK(kvc_seq_rollback(c, 48));
    PAGES(cache, 3, 4, 3);
    OK(kvc_seq_rollback(c, 33));        /* still on the third page */
    PAGES(cache, 3, 4, 3);
    OK(kvc_seq_rollback(c, 32));
    PAGES(cache, 3, 4, 2);
    OK(kvc_seq_rollback(c, 31));
    append(ctx, c, text, 1);            /* into the shared second page */
    PAGES(cache, 3, 5, 2);
    kvc_seq_close(a);
    PAGES(cache, 2, 4, 1);
    kvc_seq_close(b);
    PAGES(cache, 1, 2, 0);
    kvc_seq_close(c);
    PAGES(cache, 0, 0, 0);
    query(cache, &info);
    assert_int_equal(info.pages_peak, 5);
    assert_int_equal(info.pages_total, 21);
    kvc_seq_close(NULL);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* Leaves go back, whatever was shared, cut and rolled back. */
static void test_leaves(void **state) {
    enum { LONG = 2500 };
    kvc_token *text = (kvc_token *)gguf_must(malloc(LONG * sizeof *text));
    kvc_seq *seqs[4];
    kvc_cache *cache;
    kvc_ctx *ctx;
    rig r;
    int i;
    (void)state;
    rig_open(&r, &small);
    random_tokens(text, LONG, N_VOCAB, 1);
    cache = new_cache(&r, LONG + 100, 4, 16, KVC_KV_F32);
    ctx = new_ctx(&r, 0, 1, KVC_ISA_BEST);
    seqs[0] = new_seq(cache);
    append(ctx, seqs[0], text, LONG);
    for (i = 1; i < 4; i++) OK(kvc_seq_fork(&seqs[i], seqs[0], &last));
    assert_int_equal(cache->pools[0].n_leaves - cache->pools[0].n_free_leaves, 3);
    OK(kvc_seq_rollback(seqs[1], 1500));        /* 94 pages: into the middle of a leaf */
    OK(kvc_seq_remove(seqs[2], 100, 2000, &last));
    append(ctx, seqs[3], text, 50);
    append(ctx, seqs[1], text, 700);
    for (i = 0; i < 4; i++) kvc_seq_close(seqs[i]);
    assert_int_equal(cache->pools[0].n_free_leaves, cache->pools[0].n_leaves);
    PAGES(cache, 0, 0, 0);
    free(text);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

static void test_open_close(void **state) {
    kvc_token text[20];
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq[3], *none;
    uint64_t want = 0;
    int i;
    rig r;
    (void)state;
    rig_open(&r, &small);
    random_tokens(text, 20, N_VOCAB, 1);
    cache = new_cache(&r, 20, 3, 16, KVC_KV_F32);
    ctx = new_ctx(&r, 32, 1, KVC_ISA_BEST);
    for (i = 0; i < 10000; i++) {
        seq[0] = new_seq(cache);
        seq[1] = new_seq(cache);
        if (i % 1000 == 0) {
            uint64_t hash = hash_after(ctx, seq[1], text, 20);
            if (!i) want = hash;
            assert_true(hash == want);
        }
        OK(kvc_seq_fork(&seq[2], seq[1], &last));
        kvc_seq_close(seq[i % 3]);
        kvc_seq_close(seq[(i + 1) % 3]);
        kvc_seq_close(seq[(i + 2) % 3]);
    }
    PAGES(cache, 0, 0, 0);
    seq[0] = new_seq(cache);
    seq[1] = new_seq(cache);
    seq[2] = new_seq(cache);
    FAILS(KVC_ERROR_FULL, "n_seqs", kvc_seq_open(&none, cache, &last));
    assert_null(none);
    FAILS(KVC_ERROR_FULL, "n_seqs", kvc_seq_fork(&none, seq[0], &last));
    assert_null(none);
    PAGES(cache, 3, 0, 0);
    kvc_seq_close(seq[1]);
    seq[1] = new_seq(cache);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* ---- full ---- */

/* More than the sequence can hold: refused whole, at every length around the limit. */
static void test_sequence_full(void **state) {
    kvc_token text[80];
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    const float *logits;
    float *cold, out[N_VOCAB];
    size_t row = 64;
    uint32_t at;
    rig r;
    (void)state;
    rig_open(&r, &small);
    random_tokens(text, 80, N_VOCAB, 1);
    cache = new_cache(&r, 64, 1, 16, KVC_KV_F32);
    ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
    cold = cold_run(&r, text, 64, KVC_KV_F32);
    seq = new_seq(cache);
    FAILS(KVC_ERROR_FULL, NULL, kvc_prefill(ctx, seq, text, 65, &logits, &last));
    assert_null(logits);
    FAILS(KVC_ERROR_FULL, NULL, kvc_prefill_rows(ctx, seq, text, 65, &row, 1, out, &last));
    FAILS(KVC_ERROR_FULL, NULL, kvc_prefill(ctx, seq, text, SIZE_MAX, NULL, &last));
    FAILS(KVC_ERROR_FULL, NULL, kvc_prefill(ctx, seq, text, (size_t)1 << 31, NULL, &last));
    PAGES(cache, 1, 0, 0);
    for (at = 0; at < 64; at += 7) {
        OK(kvc_seq_rollback(seq, 0));
        if (at) append(ctx, seq, text, at);
        FAILS(KVC_ERROR_FULL, NULL, kvc_prefill(ctx, seq, text + at, 65 - at, &logits, &last));
        assert_int_equal(kvc_seq_length(seq), at);
        PAGES(cache, 1, (at + 15) / 16, 0);
        OK(kvc_prefill(ctx, seq, text + at, 64 - at, &logits, &last));
        SAME(logits, cold + 63 * N_VOCAB, 1, N_VOCAB, "filled after a refusal");
        FAILS(KVC_ERROR_FULL, NULL, kvc_decode(ctx, seq, text[0], &logits, &last));
        assert_null(logits);
        assert_int_equal(kvc_seq_length(seq), 64);
    }
    OK(kvc_seq_rollback(seq, 63));
    OK(kvc_decode(ctx, seq, text[63], &logits, &last));
    SAME(logits, cold + 63 * N_VOCAB, 1, N_VOCAB, "decoded after a refusal");
    free(cold);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* Another sequence holds the pages; nothing is lost, and what it gives back can be used. */
static void test_cache_full(void **state) {
    kvc_token text[80];
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *a, *b, *c;
    const float *logits;
    float *cold;
    rig r;
    (void)state;
    rig_open(&r, &small);
    random_tokens(text, 80, N_VOCAB, 1);
    cold = cold_run(&r, text, 80, KVC_KV_F32);
    desc.model = r.model;
    desc.n_ctx = 80;
    desc.n_seqs = 3;
    desc.n_pages = 6;
    desc.page_size = 16;
    OK(kvc_cache_new(&cache, &desc, &last));
    ctx = new_ctx(&r, 0, 1, KVC_ISA_BEST);
    a = new_seq(cache);
    b = new_seq(cache);
    append(ctx, b, text, 60);           /* 4 pages */
    append(ctx, a, text, 20);           /* 2 pages */
    PAGES(cache, 2, 6, 0);
    FAILS(KVC_ERROR_FULL, "cache", kvc_prefill(ctx, a, text + 20, 13, &logits, &last));
    assert_null(logits);
    assert_int_equal(kvc_seq_length(a), 20);
    PAGES(cache, 2, 6, 0);
    append(ctx, a, text + 20, 12);      /* what the second page has left */
    FAILS(KVC_ERROR_FULL, "cache", kvc_decode(ctx, a, text[32], &logits, &last));
    OK(kvc_seq_rollback(b, 32));
    PAGES(cache, 2, 4, 0);
    FAILS(KVC_ERROR_FULL, "cache", kvc_prefill(ctx, a, text + 32, 33, &logits, &last));
    PAGES(cache, 2, 4, 0);
    OK(kvc_prefill(ctx, a, text + 32, 32, &logits, &last));
    SAME(logits, cold + 63 * N_VOCAB, 1, N_VOCAB, "after refusals");
    kvc_seq_close(b);
    OK(kvc_prefill(ctx, a, text + 64, 16, &logits, &last));
    SAME(logits, cold + 79 * N_VOCAB, 1, N_VOCAB, "after refusals");

    OK(kvc_seq_rollback(a, 78));
    OK(kvc_seq_fork(&b, a, &last));
    OK(kvc_seq_open(&c, cache, &last));
    append(ctx, c, text, 1);            /* takes the sixth page */
    FAILS(KVC_ERROR_FULL, "cache", kvc_decode(ctx, b, text[78], &logits, &last));   /* no copy */
    FAILS(KVC_ERROR_FULL, "cache", kvc_decode(ctx, a, text[78], &logits, &last));
    assert_int_equal(kvc_seq_length(b), 78);
    PAGES(cache, 3, 6, 5);
    kvc_seq_close(c);
    OK(kvc_decode(ctx, b, text[78], &logits, &last));
    SAME(logits, cold + 78 * N_VOCAB, 1, N_VOCAB, "fork");
    PAGES(cache, 2, 6, 4);
    OK(kvc_prefill(ctx, a, text + 78, 2, &logits, &last));      /* the last page is a's alone */
    SAME(logits, cold + 79 * N_VOCAB, 1, N_VOCAB, "origin");
    free(cold);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* ---- going back ---- */

static void test_rollback(void **state) {
    kvc_token text[40];
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    const float *logits;
    float *cold;
    rig r;
    (void)state;
    rig_open(&r, &small);
    random_tokens(text, 40, N_VOCAB, 1);
    cold = cold_run(&r, text, 40, KVC_KV_F32);
    cache = new_cache(&r, 40, 1, 16, KVC_KV_F32);
    ctx = new_ctx(&r, 0, 1, KVC_ISA_BEST);
    seq = new_seq(cache);
    OK(kvc_seq_rollback(seq, 0));
    assert_int_equal(kvc_seq_rollback(seq, 1), KVC_ERROR_ARGUMENT);
    append(ctx, seq, text, 30);
    assert_int_equal(kvc_seq_rollback(seq, 31), KVC_ERROR_ARGUMENT);
    assert_int_equal(kvc_seq_rollback(seq, UINT32_MAX), KVC_ERROR_ARGUMENT);
    assert_int_equal(kvc_seq_length(seq), 30);
    OK(kvc_seq_rollback(seq, 30));
    PAGES(cache, 1, 2, 0);
    OK(kvc_prefill(ctx, seq, text + 30, 10, &logits, &last));
    SAME(logits, cold + 39 * N_VOCAB, 1, N_VOCAB, "after rollbacks");
    OK(kvc_seq_rollback(seq, 0));
    PAGES(cache, 1, 0, 0);
    OK(kvc_decode(ctx, seq, text[0], &logits, &last));
    SAME(logits, cold, 1, N_VOCAB, "after a rollback to 0");
    assert_int_equal(kvc_seq_rollback(NULL, 0), KVC_ERROR_ARGUMENT);
    free(cold);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* ---- arguments ---- */

static void test_step_arguments(void **state) {
    kvc_token text[20], bad[20];
    kvc_cache *cache, *other_cache;
    kvc_ctx *ctx;
    kvc_seq *seq, *other;
    const float *logits = NULL;
    float out[3 * N_VOCAB];
    size_t rows[3] = {2, 5, 9};
    size_t falling[3] = {2, 5, 4}, twice[3] = {2, 5, 5}, past[3] = {2, 5, 20};
    uint64_t want;
    int i;
    rig r, r2;
    (void)state;
    rig_open(&r, &small);
    rig_open(&r2, &small);
    random_tokens(text, 20, N_VOCAB, 1);
    cache = new_cache(&r, 64, 2, 0, KVC_KV_F32);
    other_cache = new_cache(&r2, 64, 2, 0, KVC_KV_F32);
    ctx = new_ctx(&r, 0, 1, KVC_ISA_BEST);
    other = new_seq(other_cache);
    seq = new_seq(cache);
    append(ctx, seq, text, 10);
    want = hash_after(ctx, seq, text + 10, 10);
    OK(kvc_seq_rollback(seq, 10));

    FAILS(KVC_ERROR_ARGUMENT, "ctx", kvc_prefill(NULL, seq, text, 1, &logits, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_prefill(ctx, NULL, text, 1, &logits, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_prefill(ctx, other, text, 1, &logits, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_decode(ctx, other, text[0], &logits, &last));
    FAILS(KVC_ERROR_ARGUMENT, "tokens", kvc_prefill(ctx, seq, NULL, 1, &logits, &last));
    FAILS(KVC_ERROR_ARGUMENT, "tokens", kvc_prefill(ctx, seq, text, 0, &logits, &last));
    FAILS(KVC_ERROR_ARGUMENT, "tokens", kvc_prefill_rows(ctx, seq, text, 0, NULL, 0, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "rows", kvc_prefill_rows(ctx, seq, text, 10, NULL, 1, out, &last));
    FAILS(KVC_ERROR_ARGUMENT, "logits", kvc_prefill_rows(ctx, seq, text, 10, rows, 3, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "rows", kvc_prefill_rows(ctx, seq, text, 10, falling, 3, out, &last));
    FAILS(KVC_ERROR_ARGUMENT, "rows", kvc_prefill_rows(ctx, seq, text, 10, twice, 3, out, &last));
    FAILS(KVC_ERROR_ARGUMENT, "rows", kvc_prefill_rows(ctx, seq, text, 20, past, 3, out, &last));
    for (i = 0; i < 20; i++) {
        static const kvc_token ids[4] = {-1, N_VOCAB, INT32_MAX, INT32_MIN};
        memcpy(bad, text, sizeof bad);
        bad[i] = ids[i % 4];
        FAILS(KVC_ERROR_ARGUMENT, "tokens", kvc_prefill(ctx, seq, bad, 20, &logits, &last));
        assert_null(logits);
        FAILS(KVC_ERROR_ARGUMENT, "tokens", kvc_decode(ctx, seq, bad[i], &logits, &last));
        assert_int_equal(kvc_seq_length(seq), 10);
    }
    assert_int_equal(kvc_prefill(ctx, seq, text, 0, &logits, NULL), KVC_ERROR_ARGUMENT);
    PAGES(cache, 1, 1, 0);
    assert_true(hash_after(ctx, seq, text + 10, 10) == want);      /* nothing was disturbed */
    OK(kvc_prefill_rows(ctx, seq, text, 10, NULL, 0, NULL, &last));

    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    kvc_cache_free(other_cache);
    rig_close(&r);
    rig_close(&r2);
}

static void *no_alloc(size_t size, size_t align, void *user) {
    (void)size;
    (void)align;
    (void)user;
    return NULL;
}

static void test_cache_arguments(void **state) {
    static const struct {
        kvc_cache_desc desc;
        const char *where;
    } rows[] = {
        {{.start_canary = 1}, "desc"}, {{.end_canary = 7}, "desc"},
        {{.n_ctx = UINT32_MAX}, "n_ctx"}, {{.n_ctx = 0x80000000u}, "n_ctx"},
        {{.n_seqs = UINT32_MAX}, "n_seqs"}, {{.n_pages = UINT32_MAX}, "n_pages"},
        {{.page_size = 1}, "page_size"}, {{.page_size = 8}, "page_size"},
        {{.page_size = 48}, "page_size"}, {{.page_size = 512}, "page_size"},
        {{.page_size = UINT32_MAX}, "page_size"},
        {{.type_k = (kvc_kv_type)5}, "type_k"}, {{.type_v = (kvc_kv_type)99}, "type_v"},
        {{.edge_k = (kvc_kv_type)5}, "edge_k"}, {{.edge_v = (kvc_kv_type)-1}, "edge_v"},
        {{.allocator = {no_alloc, NULL, NULL}}, "allocator"},
        {{.n_ctx = 1u << 30, .n_seqs = 1u << 20}, NULL}
    };
    kvc_cache_desc none = {0};
    kvc_cache *cache;
    size_t i;
    rig r;
    (void)state;
    rig_open(&r, &small);
    for (i = 0; i < COUNT(rows); i++) {
        kvc_cache_desc desc = rows[i].desc;
        desc.model = r.model;
        FAILS(KVC_ERROR_ARGUMENT, rows[i].where, kvc_cache_new(&cache, &desc, &last));
        assert_null(cache);
        assert_int_equal(kvc_cache_size(&desc), 0);
    }
    FAILS(KVC_ERROR_ARGUMENT, "model", kvc_cache_new(&cache, &none, &last));
    FAILS(KVC_ERROR_ARGUMENT, "desc", kvc_cache_new(&cache, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "out", kvc_cache_new(NULL, &none, &last));
    assert_int_equal(kvc_cache_size(&none), 0);
    assert_int_equal(kvc_cache_size(NULL), 0);
    kvc_cache_free(NULL);
    rig_close(&r);
}

static void test_ctx_arguments(void **state) {
    static const struct {
        kvc_ctx_desc desc;
        const char *where;
    } rows[] = {
        {{.start_canary = 1}, "desc"}, {{.end_canary = 7}, "desc"},
        {{.n_batch = UINT32_MAX}, "n_batch"}, {{.n_threads = 257}, "n_threads"},
        {{.n_threads = UINT32_MAX}, "n_threads"}, {{.isa = (kvc_isa)6}, "isa"},
        {{.isa = (kvc_isa)77}, "isa"}, {{.gemm = (kvc_gemm)2}, "gemm"},
        {{.allocator = {no_alloc, NULL, NULL}}, "allocator"}
    };
    kvc_ctx_desc none = {0};
    kvc_ctx *ctx;
    size_t i;
    rig r;
    (void)state;
    rig_open(&r, &small);
    for (i = 0; i < COUNT(rows); i++) {
        kvc_ctx_desc desc = rows[i].desc;
        desc.model = r.model;
        FAILS(KVC_ERROR_ARGUMENT, rows[i].where, kvc_ctx_new(&ctx, &desc, &last));
        assert_null(ctx);
        assert_int_equal(kvc_ctx_size(&desc), 0);
    }
    FAILS(KVC_ERROR_ARGUMENT, "model", kvc_ctx_new(&ctx, &none, &last));
    FAILS(KVC_ERROR_ARGUMENT, "desc", kvc_ctx_new(&ctx, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "out", kvc_ctx_new(NULL, &none, &last));
    assert_int_equal(kvc_ctx_size(&none), 0);
    assert_int_equal(kvc_ctx_size(NULL), 0);
    kvc_ctx_free(NULL);
    rig_close(&r);
}

static void test_seq_arguments(void **state) {
    kvc_seq *seq;
    kvc_cache *cache;
    rig r;
    (void)state;
    rig_open(&r, &small);
    cache = new_cache(&r, 64, 1, 0, KVC_KV_F32);
    FAILS(KVC_ERROR_ARGUMENT, "cache", kvc_seq_open(&seq, NULL, &last));
    assert_null(seq);
    FAILS(KVC_ERROR_ARGUMENT, "out", kvc_seq_open(NULL, cache, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_seq_fork(&seq, NULL, &last));
    assert_null(seq);
    PAGES(cache, 0, 0, 0);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* ---- threads ---- */

/* Made and freed again and again, with and without a step in between. */
static void test_ctx_cycles(void **state) {
    kvc_token text[5];
    kvc_cache *cache;
    kvc_seq *seq;
    uint64_t want = 0;
    uint32_t i;
    rig r;
    (void)state;
    rig_open(&r, &small);
    random_tokens(text, 5, N_VOCAB, 1);
    cache = new_cache(&r, 64, 1, 0, KVC_KV_F32);
    seq = new_seq(cache);
    for (i = 0; i < 200; i++) {
        kvc_ctx *ctx = new_ctx(&r, 8, 1 + i % 4, KVC_ISA_BEST);
        if (i % 3) {
            uint64_t hash = hash_after(ctx, seq, text, 5);
            if (!want) want = hash;
            assert_true(hash == want);
            OK(kvc_seq_rollback(seq, 0));
        }
        kvc_ctx_free(ctx);
    }
    kvc_cache_free(cache);
    rig_close(&r);
}

/* Threads without work sleep: a third of a second idle costs next to no processor time. */
static void test_idle(void **state) {
    const struct timespec third = {0, 333000000};
    kvc_token text[30];
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    clock_t before;
    rig r;
    (void)state;
    rig_open(&r, &small);
    random_tokens(text, 30, N_VOCAB, 1);
    cache = new_cache(&r, 64, 1, 0, KVC_KV_F32);
    ctx = new_ctx(&r, 0, 4, KVC_ISA_BEST);
    seq = new_seq(cache);
    append(ctx, seq, text, 30);
    before = clock();
    nanosleep(&third, NULL);
    assert_true((double)(clock() - before) / CLOCKS_PER_SEC < 0.1);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* A host's thread: its own context and sequences on the cache of all. */
typedef struct worker {
    kvc_ctx *ctx;
    kvc_cache *cache;
    const kvc_token *text;
    size_t n;
    uint64_t hash;
    int failed;
} worker;

static void *work(void *arg) {
    worker *w = (worker *)arg;
    int round;
    for (round = 0; round < 30; round++) {
        kvc_seq *seq = NULL, *fork = NULL;
        const float *logits;
        size_t i, cut = 1 + (size_t)round;
        kvc_error err;
        uint64_t hash;
        kvc_result r = kvc_seq_open(&seq, w->cache, &err);
        if (r == KVC_OK) r = kvc_prefill(w->ctx, seq, w->text, cut, NULL, &err);
        if (r == KVC_OK) r = kvc_seq_fork(&fork, seq, &err);
        for (i = cut; r == KVC_OK && i < w->n; i++)
            r = kvc_decode(w->ctx, fork, w->text[i], &logits, &err);
        if (r != KVC_OK) {
            w->failed = 1;
            return NULL;
        }
        hash = hash_floats(logits, N_VOCAB, 1);
        if (w->hash && hash != w->hash) w->failed = 1;
        w->hash = hash;
        kvc_seq_close(seq);
        kvc_seq_close(fork);
    }
    return NULL;
}

static void test_two_threads(void **state) {
    kvc_token text[2][40];
    pthread_t thread[2];
    worker w[2], alone;
    kvc_cache *cache;
    int i;
    rig r;
    (void)state;
    rig_open(&r, &small);
    cache = new_cache(&r, 48, 4, 16, KVC_KV_F32);
    for (i = 0; i < 2; i++) {
        random_tokens(text[i], 40, N_VOCAB, (uint64_t)i);
        memset(&w[i], 0, sizeof w[i]);
        w[i].ctx = new_ctx(&r, 16, 1 + (uint32_t)i, KVC_ISA_BEST);
        w[i].cache = cache;
        w[i].text = text[i];
        w[i].n = 40;
    }
    for (i = 0; i < 2; i++) assert_int_equal(pthread_create(&thread[i], NULL, work, &w[i]), 0);
    for (i = 0; i < 2; i++) assert_int_equal(pthread_join(thread[i], NULL), 0);
    PAGES(cache, 0, 0, 0);
    for (i = 0; i < 2; i++) {
        assert_false(w[i].failed);
        alone = w[i];
        alone.hash = 0;
        work(&alone);
        assert_false(alone.failed);
        assert_true(alone.hash == w[i].hash);
        kvc_ctx_free(w[i].ctx);
    }
    kvc_cache_free(cache);
    rig_close(&r);
}

/* With `touch` the allocator's bytes are gone from all of the cache, and of what it grows by. */
static void test_touch(void **state) {
    static const model_shape shape = {.n_embd = 32, .n_heads = 2, .n_kv_heads = 1, .n_ff = 48,
        .n_vocab = 48};
    kvc_cache_desc desc = {0};
    kvc_token text[200];
    rig r;
    uint32_t touch, slab;
    (void)state;
    rig_open(&r, &shape);
    random_tokens(text, COUNT(text), 48, 1);
    desc.model = r.model;
    desc.n_ctx = 32;
    for (touch = 0; touch < 2; touch++) {
        kvc_ctx *ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
        const kvc__pool *pool;
        kvc_cache *cache;
        kvc_seq *seq;
        desc.touch = touch;
        OK(kvc_cache_new(&cache, &desc, &last));
        seq = new_seq(cache);
        pool = &cache->pools[0];
        assert_int_equal(pool->slabs[0].planes[0].k[0], touch ? 0 : 0xa5);
        OK(kvc_seq_set_policy(seq, KVC_POLICY_GROW, 0, 0, &last));
        OK(kvc_prefill(ctx, seq, text, COUNT(text), NULL, &last));
        assert_true(pool->n_slabs > 1);
        for (slab = 1; slab < pool->n_slabs; slab++) {
            const kvc__slab *s = &pool->slabs[slab];
            const size_t end = s->n_pages * cache->layers[0].v_piece;
            assert_int_equal(s->planes[0].v[end - 1], touch ? 0 : 0xa5);
        }
        kvc_seq_close(seq);
        kvc_cache_free(cache);
        kvc_ctx_free(ctx);
    }
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cache_size),
        cmocka_unit_test(test_bytes_per_token),
        cmocka_unit_test(test_edges), cmocka_unit_test(test_ctx_size),
        cmocka_unit_test(test_sampler_size),
        cmocka_unit_test(test_own_memory),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_tokenize_work),
        cmocka_unit_test(test_steps_allocate_nothing),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_page_counts),
        cmocka_unit_test(test_leaves),
        cmocka_unit_test(test_open_close),
        cmocka_unit_test(test_sequence_full),
        cmocka_unit_test(test_cache_full),
        cmocka_unit_test(test_rollback),
        cmocka_unit_test(test_step_arguments),
        cmocka_unit_test(test_cache_arguments),
        cmocka_unit_test(test_ctx_arguments),
        cmocka_unit_test(test_seq_arguments),
        cmocka_unit_test(test_ctx_cycles),
        cmocka_unit_test(test_idle),
        cmocka_unit_test(test_two_threads),
        cmocka_unit_test(test_touch)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
