/* Batches: several sequences in the same passes give the bits of one call for each, and what fails
   does so alone. */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include "testing.h"

#include "pairs.h"

static void one_batch(pair *p) {
    uint32_t n = 1 + draw(p, N_SEQS), first = draw(p, N_SEQS);
    make_requests(p, first, n);
    OK(kvc_batch(p->ctx[0], p->requests, n, &last));
    pair_check(p, first, n);
}

static void random_batches(const model_shape *shape, kvc_kv_type kv, kvc_policy policy, int shared,
    uint32_t n_batch, uint32_t n_threads) {
    static pair p;
    int i;
    pair_open(&p, shape, kv, policy, shared, n_batch, n_threads);
    for (i = 0; i < 40; i++) {
        one_batch(&p);
        disturb(&p);
        disturb(&p);
    }
    print_message("%u rows equal, %u requests found no room\n", p.n_rows, p.n_full);
    assert_true(p.n_rows > 1000);
    assert_int_equal(p.n_full > 0, policy == KVC_POLICY_ERROR);
    pair_close(&p);
}

static void test_random(void **state) {
    (void)state;
    random_batches(&plain, KVC_KV_F32, KVC_POLICY_ERROR, 0, 64, 1);
    random_batches(&plain, KVC_KV_F32, KVC_POLICY_ERROR, 0, 7, 2);
    random_batches(&heads, KVC_KV_Q8, KVC_POLICY_ERROR, 1, 50, 3);
    random_batches(&windows, KVC_KV_F16, KVC_POLICY_ERROR, 1, 128, 2);
    random_batches(&windows, KVC_KV_F32, KVC_POLICY_GROW, 0, 300, 1);
    random_batches(&plain, KVC_KV_Q4, KVC_POLICY_WINDOW, 0, 33, 2);
    random_batches(&plain, KVC_KV_F16, KVC_POLICY_HEAVY, 0, 90, 3);
    random_batches(&plain, KVC_KV_Q8, KVC_POLICY_HEAVY, 0, 20, 1);
}

/* A request for the logits of the last token. */
static kvc_request ask(kvc_seq *seq, const kvc_token *tokens, size_t n, float *logits,
    kvc_error *err) {
    kvc_request q = {0};
    q.seq = seq;
    q.tokens = tokens;
    q.n_tokens = n;
    q.n_rows = 1;
    q.logits = logits;
    q.err = err;
    return q;
}

/* ---- what fails ---- */

static void test_bad_requests(void **state) {
    static const model_shape shape = {TINY};
    enum { N = 8 };
    kvc_token text[200], bad[3] = {1, N_VOCAB, 2};
    size_t rows[2] = {1, 1};
    float logits[N * N_VOCAB], *want;
    kvc_request q[N];
    kvc_error err[N];
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq[4];
    rig r;
    int i;
    (void)state;
    rig_open(&r, &shape);
    cache = new_cache(&r, 100, 4, PAGE, KVC_KV_F32);
    ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
    random_tokens(text, 200, N_VOCAB, 3);
    want = cold_run(&r, text, 100, KVC_KV_F32);
    for (i = 0; i < 4; i++) {
        seq[i] = new_seq(cache);
        OK(kvc_prefill(ctx, seq[i], text, 10, NULL, &last));
    }
    for (i = 0; i < N; i++)
        q[i] = ask(seq[i % 4], text + 10, 20, logits + i * N_VOCAB, &err[i]);
    q[1].tokens = bad;                  /* no such token */
    q[1].n_tokens = 3;
    q[2].n_tokens = 91;                 /* too many */
    q[3].rows = rows;                   /* not rising */
    q[3].n_rows = 2;
    q[5].seq = NULL;
    q[6].n_tokens = 0;
    q[7].seq = seq[0];                  /* again, as q[4] is */
    OK(kvc_batch(ctx, q, N, &last));
    assert_int_equal(q[0].result, KVC_OK);
    SAME(logits, want + 29 * N_VOCAB, 1, N_VOCAB, "beside others that fail");
    for (i = 1; i < N; i++) {
        static const char *const where[N] = {"", "tokens", "sequence", "rows", "seq", "seq", "seq",
            "seq"};
        assert_int_equal(q[i].result, i == 2 ? KVC_ERROR_FULL : KVC_ERROR_ARGUMENT);
        assert_string_equal(err[i].where, where[i]);
    }
    assert_int_equal(kvc_seq_length(seq[0]), 30);
    for (i = 1; i < 4; i++) assert_int_equal(kvc_seq_length(seq[i]), 10);
    q[0].seq = seq[1];
    q[0].err = NULL;
    q[0].n_rows = 21;                   /* more than there are tokens; nobody hears why */
    q[1] = q[2];
    q[1].seq = seq[2];
    q[1].n_tokens = 90;
    q[2] = q[1];
    q[2].seq = seq[3];
    q[2].logits = NULL;
    OK(kvc_batch(ctx, q, 3, &last));
    assert_int_equal(q[0].result, KVC_ERROR_ARGUMENT);
    assert_int_equal(q[1].result, KVC_OK);
    assert_int_equal(q[2].result, KVC_ERROR_ARGUMENT);
    SAME(q[1].logits, want + 99 * N_VOCAB, 1, N_VOCAB, "to the last position");
    OK(kvc_batch(ctx, NULL, 0, &last));
    FAILS(KVC_ERROR_ARGUMENT, "requests", kvc_batch(ctx, NULL, 1, &last));
    FAILS(KVC_ERROR_ARGUMENT, "ctx", kvc_batch(NULL, q, 1, &last));
    free(want);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* Pages that do not suffice for all: the first requests get theirs. */
static void test_few_pages(void **state) {
    static const model_shape shape = {TINY};
    kvc_cache_desc desc = {0};
    kvc_token text[40];
    kvc_request q[6];
    float logits[6 * N_VOCAB], *want;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_error err;
    rig r;
    int i;
    (void)state;
    rig_open(&r, &shape);
    desc.model = r.model;
    desc.n_ctx = 64;
    desc.n_seqs = 6;
    desc.n_pages = 10;
    desc.page_size = PAGE;
    OK(kvc_cache_new(&cache, &desc, &last));
    ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
    random_tokens(text, 40, N_VOCAB, 3);
    want = cold_run(&r, text, 40, KVC_KV_F32);
    for (i = 0; i < 6; i++)
        q[i] = ask(new_seq(cache), text, i == 4 ? 1 : 40, logits + i * N_VOCAB, &err);
    OK(kvc_batch(ctx, q, 6, &last));
    for (i = 0; i < 6; i++) {
        assert_int_equal(q[i].result, i < 3 || i == 4 ? KVC_OK : KVC_ERROR_FULL);
        if (q[i].result == KVC_OK)
            SAME(q[i].logits, want + (q[i].n_tokens - 1) * N_VOCAB, 1, N_VOCAB, "beside others");
        else assert_int_equal(kvc_seq_length(q[i].seq), 0);
    }
    assert_string_equal(err.where, "cache");
    free(want);
    kvc_cache_free(cache);
    kvc_ctx_free(ctx);
    rig_close(&r);
}

/* ---- nothing is allocated ---- */

static void test_no_allocation(void **state) {
    static const model_shape shape = {TINY};
    kvc_token text[50];
    kvc_request q[4];
    float logits[4 * N_VOCAB];
    kvc_cache *cache;
    kvc_ctx *ctx;
    size_t before;
    rig r;
    int i;
    (void)state;
    rig_open(&r, &shape);
    cache = new_cache(&r, 64, 4, PAGE, KVC_KV_F32);
    ctx = new_ctx(&r, 16, 2, KVC_ISA_BEST);
    random_tokens(text, 50, N_VOCAB, 3);
    for (i = 0; i < 4; i++)
        q[i] = ask(new_seq(cache), text, i % 2 ? 1 : 50, logits + i * N_VOCAB, NULL);
    before = r.mem.n_allocs;
    OK(kvc_batch(ctx, q, 4, &last));
    assert_int_equal(r.mem.n_allocs, before);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* ---- cblas ---- */

/* A context with cblas computes prefills with it and decodes without, in a batch as alone. */
static void test_cblas(void **state) {
#if KVC_USE_CBLAS
    static const model_shape shape = {TINY};
    kvc_ctx_desc desc = {0};
    kvc_token text[60];
    kvc_request q[4];
    float logits[4 * N_VOCAB], *want;
    kvc_cache *cache;
    kvc_ctx *ctx, *builtin;
    rig r;
    int i, k;
    rig_open(&r, &shape);
    cache = new_cache(&r, 64, 4, PAGE, KVC_KV_F32);
    desc.model = r.model;
    desc.n_batch = 32;
    desc.gemm = KVC_GEMM_CBLAS;
    OK(kvc_ctx_new(&ctx, &desc, &last));
    builtin = new_ctx(&r, 32, 1, KVC_ISA_BEST);
    random_tokens(text, 60, N_VOCAB, 3);
    want = cold_run(&r, text, 60, KVC_KV_F32);
    for (i = 0; i < 4; i++) {
        q[i] = ask(new_seq(cache), i % 2 ? text + 30 : text, i % 2 ? 1 : 60,
            logits + i * N_VOCAB, NULL);
        if (i % 2) OK(kvc_prefill(builtin, q[i].seq, text, 30, NULL, &last));
    }
    OK(kvc_batch(ctx, q, 4, &last));
    for (i = 0; i < 4; i++) {
        const float *row = want + (i % 2 ? 30 : 59) * N_VOCAB;
        assert_int_equal(q[i].result, KVC_OK);
        if (i % 2) SAME(q[i].logits, row, 1, N_VOCAB, "a decode beside cblas");
        for (k = 0; k < N_VOCAB; k++)
            assert_true(fabsf(q[i].logits[k] - row[k]) < 1e-4f);
    }
    free(want);
    kvc_ctx_free(builtin);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
#endif
    (void)state;
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_bad_requests),
        cmocka_unit_test(test_few_pages),
        cmocka_unit_test(test_no_allocation),
        cmocka_unit_test(test_cblas)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
