/* Sequences from whose middle positions were removed, by kvc_seq_remove or by KVC_POLICY_WINDOW. A
   cold run is another computation then; the reference is naive.h, which keeps keys unturned in
   double precision and turns them by their index anew for every token. */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include "testing.h"
#include "naive.h"

enum { N_VOCAB = 48, PAGE = 16 };
#define TINY_FULL .n_embd = 32, .n_heads = 2, .n_ff = 48, .n_vocab = N_VOCAB, .n_ctx = 4096
#define TINY TINY_FULL, .n_kv_heads = 1

/* ---- kvc.h and the reference side by side ---- */

typedef struct pair {
    rig rig;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    naive_model naive;
    naive_past past;
    uint64_t state;
    double largest;             /* difference of logits since this was last set to 0 */
} pair;

static void pair_open(pair *p, const model_shape *shape, kvc_kv_type kv, uint32_t n_ctx) {
    kvc_cache_desc desc = {0};
    memset(p, 0, sizeof *p);
    p->state = 3;
    rig_open(&p->rig, shape);
    desc.model = p->rig.model;
    desc.n_ctx = n_ctx;
    desc.n_seqs = 2;
    desc.page_size = PAGE;
    desc.n_back = 600;          /* windows keep all, so that anything may be removed */
    desc.type_k = desc.type_v = kv;
    OK(kvc_cache_new(&p->cache, &desc, &last));
    p->ctx = new_ctx(&p->rig, 24, 2, KVC_ISA_BEST);
    p->seq = new_seq(p->cache);
    naive_open(&p->naive, p->rig.image);
    naive_past_open(&p->past, &p->naive, 4096);
}

static void pair_close(pair *p) {
    kvc_cache_info info;
    kvc_seq_close(p->seq);
    kvc_cache_query(p->cache, &info);
    assert_int_equal(info.pages_free, info.pages_total);
    naive_past_close(&p->past);
    kvc_ctx_free(p->ctx);
    kvc_cache_free(p->cache);
    rig_close(&p->rig);
}

static void pair_look(pair *p, const float *got, const double *want, size_t n) {
    size_t i;
    for (i = 0; i < n * N_VOCAB; i++) {
        double d = fabs((double)got[i] - want[i]);
        assert_true(got[i] - got[i] >= 0);
        if (d > p->largest) p->largest = d;
    }
}

/* n random tokens, of which every logit is compared. */
static void pair_append(pair *p, size_t n) {
    kvc_token text[256];
    float *got = (float *)gguf_must(malloc(n * N_VOCAB * sizeof *got));
    size_t rows[256], i;
    double *want;
    random_tokens(text, n, N_VOCAB, model_random(&p->state));
    for (i = 0; i < n; i++) rows[i] = i;
    OK(kvc_prefill_rows(p->ctx, p->seq, text, n, rows, n, got, &last));
    want = naive_append(&p->naive, &p->past, text, n);
    pair_look(p, got, want, n);
    assert_int_equal(kvc_seq_length(p->seq), p->past.n);
    free(want);
    free(got);
}

static void pair_remove(pair *p, uint32_t from, uint32_t to) {
    OK(kvc_seq_remove(p->seq, from, to, &last));
    naive_past_remove(&p->past, from, to);
    assert_int_equal(kvc_seq_length(p->seq), p->past.n);
}

/* ---- ranges ---- */

static const struct {
    const char *name;
    kvc_kv_type kv;
    double bound;
    model_shape shape;
} kinds[] = {
    {"plain", KVC_KV_F32, 1e-4, {TINY}},
    {"K and V in f16", KVC_KV_F16, 2e-2, {TINY}},
    {"K and V in q8", KVC_KV_Q8, 0.6, {TINY}},
    {"K and V in q4, heads of 40", KVC_KV_Q4, 4, {TINY, .n_layers = 1, .head_dim = 40}},
    {"heads of 20, rotated in part", KVC_KV_F32, 1e-4, {TINY, .head_dim = 20, .rope_dim = 10}},
    {"linear scaling", KVC_KV_F32, 1e-4, {TINY, .rope = MODEL_ROPE_LINEAR, .rope_factor = 2.5f}},
    {"YaRN", KVC_KV_F32, 1e-4, {TINY, .rope = MODEL_ROPE_YARN, .rope_orig_ctx = 64}},
    {"YaRN, attn_factor", KVC_KV_F32, 1e-4, {TINY, .rope = MODEL_ROPE_YARN, .attn_factor = 0.8f}},
    {"rope_freqs", KVC_KV_F32, 1e-4, {TINY, .rope_freqs = 1}},
    {"a window of 50 in every 2nd layer", KVC_KV_F32, 1e-4,
        {TINY, .window = 50, .pattern = 2, .n_layers = 4}},
    {"a window of 50", KVC_KV_F32, 1e-4, {TINY, .window = 50}},
    {"windows that turn otherwise (gemma3)", KVC_KV_F32, 1e-4, {.arch = "gemma3", TINY,
        .n_layers = 7, .window = 50, .rope_base = 1e6f, .rope = MODEL_ROPE_LINEAR}},
    {"only windows turn (cohere2)", KVC_KV_F32, 1e-4, {.arch = "cohere2", TINY, .n_layers = 4,
        .window = 50}},
    {"some layers do not turn (smollm3)", KVC_KV_F32, 1e-4, {.arch = "smollm3", TINY,
        .n_layers = 4}},
    {"ALiBi (bloom)", KVC_KV_F32, 1e-4, {.arch = "bloom", TINY_FULL}},
    {"ALiBi in q8", KVC_KV_Q8, 0.6, {.arch = "mpt", TINY_FULL}},
    {"soft caps (gemma2)", KVC_KV_F32, 1e-4, {.arch = "gemma2", TINY, .window = 50}},
    {"sinks (gpt-oss)", KVC_KV_F32, 1e-4, {.arch = "gpt-oss", TINY, .window = 50, .n_experts = 3,
        .n_experts_used = 3}},
    {"latent attention (minicpm3)", KVC_KV_F32, 1e-4, {.arch = "minicpm3", TINY_FULL,
        .head_dim = 24, .rope_dim = 8, .q_rank = 20, .kv_rank = 24}},
    {"latent attention in f16", KVC_KV_F16, 5e-2, {.arch = "minicpm3", TINY_FULL,
        .head_dim = 24, .rope_dim = 8, .q_rank = 20, .kv_rank = 24}}
};

static void test_ranges(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(kinds); i++) {
        pair p;
        pair_open(&p, &kinds[i].shape, kinds[i].kv, 700);
        pair_append(&p, 90);
        pair_remove(&p, 20, 45);
        pair_append(&p, 30);
        pair_remove(&p, 5, 10);         /* before the other */
        pair_append(&p, 1);
        pair_remove(&p, 60, 61);        /* after it */
        pair_append(&p, 17);
        pair_remove(&p, 14, 18);        /* with one inside */
        pair_append(&p, 5);
        pair_remove(&p, 100, (uint32_t)p.past.n);   /* the end: a roll-back */
        pair_append(&p, 40);
        pair_remove(&p, 0, 12);         /* the beginning */
        pair_append(&p, 250);
        pair_remove(&p, 30, 300);       /* pages in number */
        pair_append(&p, 60);
        OK(kvc_seq_rollback(p.seq, 20));            /* before all of that */
        p.past.n = 20;
        pair_append(&p, 30);
        print_message("%-34s largest difference %.1e\n", kinds[i].name, p.largest);
        assert_true(p.largest < kinds[i].bound);
        assert_true(p.largest > 0);
        pair_close(&p);
    }
}

/* Random ranges, up to `length` positions, with forks that are checked after the parent went on. */
static void random_ranges(const model_shape *shape, uint32_t n_ctx, uint32_t length,
    unsigned rounds) {
    unsigned n_removed = 0, n_full = 0, n_gone = 0, round;
    pair p;
    pair_open(&p, shape, KVC_KV_F32, n_ctx);
    if (shape->window != 0) {           /* windows that give back what they can */
        kvc_cache_desc desc = {0};
        kvc_cache_free(p.cache);
        desc.model = p.rig.model;
        desc.n_ctx = n_ctx;
        desc.n_seqs = 2;
        desc.page_size = PAGE;
        desc.n_batch = 16;
        desc.n_back = 100;
        OK(kvc_cache_new(&p.cache, &desc, &last));
        p.seq = new_seq(p.cache);
    }
    for (round = 0; round < rounds; round++) {
        uint32_t n = (uint32_t)p.past.n, what = (uint32_t)(model_random(&p.state) % 8), from, to;
        kvc_seq_info info;
        if (n < 10 || (what < 3 && n < length)) {
            pair_append(&p, 1 + model_random(&p.state) % 60);
            continue;
        }
        from = (uint32_t)(model_random(&p.state) % n);
        to = from + 1 + (uint32_t)(model_random(&p.state) % (n - from < 40 ? n - from : 40));
        if (what == 3) {
            kvc_seq *other;
            OK(kvc_seq_fork(&other, p.seq, &last));
            kvc_seq_close(p.seq);
            p.seq = other;
        } else if (what == 4) {
            kvc_seq_query(p.seq, &info);
            if (from < info.rollback_least) continue;
            OK(kvc_seq_rollback(p.seq, from));
            p.past.n = from;
        } else if (kvc_seq_remove(p.seq, from, to, &last) == KVC_OK) {
            naive_past_remove(&p.past, from, to);
            n_removed++;
        } else if (last.code == KVC_ERROR_ARGUMENT) {
            assert_true(shape->window != 0);
            assert_int_equal(kvc_seq_length(p.seq), n);
            n_gone++;
        } else {
            assert_int_equal(last.code, KVC_ERROR_FULL);
            assert_string_equal(last.where, "n_cuts");
            assert_int_equal(kvc_seq_length(p.seq), n);
            n_full++;
            OK(kvc_seq_remove(p.seq, 0, n / 2, &last));
            naive_past_remove(&p.past, 0, n / 2);
        }
        pair_append(&p, 1);
    }
    print_message("%u ranges removed, %u refused, %u out of reach, largest difference %.1e\n",
        n_removed, n_full, n_gone, p.largest);
    assert_true(n_removed > 50 && n_full > 1);
    assert_true((n_gone > 0) == (shape->window != 0));
    assert_true(p.largest < 1e-4);
    pair_close(&p);
}

static void test_random_ranges(void **state) {
    static const model_shape plain = {TINY, .head_dim = 24};
    static const model_shape windows = {TINY, .window = 60, .pattern = 2};
    (void)state;
    random_ranges(&plain, 300, 200, 400);
    random_ranges(&plain, 1040, 1000, 600);     /* 65 pages: one more than a leaf */
    random_ranges(&windows, 1040, 400, 400);
}

/* Ranges are removed from a sequence that slides, until what is to be kept is scattered over all
   pages; then it is refused, and goes on once there is room. */
static void test_scattered(void **state) {
    enum { N_KEEP = 40 };
    unsigned n_removed = 0, n_shifts = 0, n_full = 0, round;
    pair p;
    (void)state;
    pair_open(&p, &kinds[0].shape, KVC_KV_F32, 112);
    OK(kvc_seq_set_policy(p.seq, KVC_POLICY_WINDOW, N_KEEP, 0, &last));
    for (round = 0; round < 4000; round++) {
        uint32_t n = kvc_seq_length(p.seq), from, removed;
        kvc_token token = (kvc_token)(model_random(&p.state) % N_VOCAB);
        const float *logits;
        double *want;
        kvc_result r;
        if (n > 10 && model_random(&p.state) % 20 == 0) {
            from = (uint32_t)(model_random(&p.state) % (n < N_KEEP ? n - 8 : N_KEEP - 8));
            removed = 1 + (uint32_t)(model_random(&p.state) % 7);
            if (kvc_seq_remove(p.seq, from, from + removed, &last) == KVC_OK) {
                naive_past_remove(&p.past, from, from + removed);
                n_removed++;
            }
            continue;
        }
        memset(&last, 0, sizeof last);
        r = kvc_decode(p.ctx, p.seq, token, &logits, &last);
        if (r == KVC_ERROR_FULL) {
            assert_string_equal(last.where, "n_keep");
            assert_int_equal(kvc_seq_length(p.seq), n);
            n_full++;
            OK(kvc_seq_rollback(p.seq, 0));
            p.past.n = 0;
            continue;
        }
        OK(r);
        removed = n + 1 - kvc_seq_length(p.seq);
        if (removed) naive_past_remove(&p.past, N_KEEP, N_KEEP + removed);
        n_shifts += removed != 0;
        want = naive_append(&p.naive, &p.past, &token, 1);
        pair_look(&p, logits, want, 1);
        free(want);
    }
    print_message("%u ranges removed, %u shifts, %u times scattered, largest difference %.1e\n",
        n_removed, n_shifts, n_full, p.largest);
    assert_true(n_removed > 50 && n_shifts > 10 && n_full > 0);
    assert_true(p.largest < 1e-4);
    pair_close(&p);
}

/* ---- the policy ---- */

/* A text without end in 64 positions, the first n_keep kept; after 1 shift and after many. */
static void slide(const model_shape *shape, kvc_kv_type kv, uint32_t n_keep, uint32_t n_shifts,
    double bound) {
    uint32_t shifts = 0;
    double once = 0;
    kvc_cache_info info;
    pair p;
    pair_open(&p, shape, kv, 64);
    OK(kvc_seq_set_policy(p.seq, KVC_POLICY_WINDOW, n_keep, 0, &last));
    while (shifts < n_shifts) {
        kvc_token token = (kvc_token)(model_random(&p.state) % N_VOCAB);
        const float *logits;
        double *want;
        uint32_t before = kvc_seq_length(p.seq), removed;
        OK(kvc_decode(p.ctx, p.seq, token, &logits, &last));
        removed = before + 1 - kvc_seq_length(p.seq);
        assert_true(removed <= 2 * PAGE && (!removed || before + PAGE >= 64));
        if (removed) naive_past_remove(&p.past, n_keep, n_keep + removed);
        shifts += removed != 0;
        want = naive_append(&p.naive, &p.past, &token, 1);
        pair_look(&p, logits, want, 1);
        free(want);
        if (shifts == 1) once = p.largest;
    }
    kvc_cache_query(p.cache, &info);
    assert_true(info.pages_peak <= 4 * info.n_reaches);
    print_message("n_keep %2u: largest difference after 1 shift %.1e, after %u %.1e\n", n_keep,
        once, shifts, p.largest);
    assert_true(p.largest < bound);
    pair_close(&p);
}

static void test_policy(void **state) {
    static const uint32_t keep[] = {0, 1, 4, 16, 20, 32};
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(keep); i++) slide(&kinds[0].shape, KVC_KV_F32, keep[i], 12, 1e-4);
    for (i = 0; i < COUNT(kinds); i++)
        slide(&kinds[i].shape, kinds[i].kv, 4, 12, kinds[i].bound);
}

static void test_thousand_shifts(void **state) {
    static const model_shape shape = {TINY, .n_layers = 1};
    (void)state;
    slide(&shape, KVC_KV_F32, 4, 1000, 1e-4);
    slide(&shape, KVC_KV_F16, 4, 1000, 2e-2);
    slide(&shape, KVC_KV_Q8, 4, 1000, 0.6);
}

/* What is removed, and when, is the sequence's own: not a matter of chunks, threads or sets. */
static void test_policy_bits(void **state) {
    static const struct {
        uint32_t n_batch, n_threads, piece;
        kvc_isa isa;
    } ways[] = {
        {1, 1, 1, KVC_ISA_BEST}, {256, 1, 500, KVC_ISA_BEST}, {256, 2, 77, KVC_ISA_BEST},
        {7, 3, 31, KVC_ISA_BEST}, {64, 1, 100, KVC_ISA_BASE}
    };
    static const model_shape shapes[] = {
        {TINY}, {TINY, .window = 30, .pattern = 2, .n_layers = 3}, {TINY, .head_dim = 40}, {TINY}
    };
    static const kvc_kv_type kvs[] = {KVC_KV_F16, KVC_KV_F16, KVC_KV_Q8, KVC_KV_Q4};
    enum { N = 500 };
    kvc_token text[N];
    size_t i, k;
    (void)state;
    random_tokens(text, N, N_VOCAB, 4);
    for (k = 0; k < COUNT(shapes); k++) {
        float *first = NULL;
        rig r;
        rig_open(&r, &shapes[k]);
        for (i = 0; i < COUNT(ways); i++) {
            kvc_cache *cache = new_cache(&r, 80, 1, PAGE, kvs[k]);
            kvc_ctx *ctx = new_ctx(&r, ways[i].n_batch, ways[i].n_threads, ways[i].isa);
            kvc_seq *seq = new_seq(cache);
            float *got = (float *)gguf_must(malloc(N * N_VOCAB * sizeof *got));
            size_t at, n, rows[N];
            for (at = 0; at < N; at++) rows[at] = at;
            OK(kvc_seq_set_policy(seq, KVC_POLICY_WINDOW, 5, 0, &last));
            for (at = 0; at < N; at += n) {
                n = N - at < ways[i].piece ? N - at : ways[i].piece;
                OK(kvc_prefill_rows(ctx, seq, text + at, n, rows, n, got + at * N_VOCAB, &last));
            }
            if (first == NULL) first = got;
            else {
                SAME(got, first, N, N_VOCAB, "another way through the same text");
                free(got);
            }
            kvc_ctx_free(ctx);
            kvc_cache_free(cache);
        }
        free(first);
        rig_close(&r);
    }
}

/* ---- refusals ---- */

static void test_refusals(void **state) {
    static const model_shape windows = {TINY, .window = 30};
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    const float *logits;
    pair p;
    (void)state;
    pair_open(&p, &kinds[0].shape, KVC_KV_F32, 200);
    FAILS(KVC_ERROR_ARGUMENT, "from", kvc_seq_remove(p.seq, 0, 0, &last));
    FAILS(KVC_ERROR_ARGUMENT, "to", kvc_seq_remove(p.seq, 0, 1, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_seq_remove(NULL, 0, 1, &last));
    pair_append(&p, 10);
    FAILS(KVC_ERROR_ARGUMENT, "from", kvc_seq_remove(p.seq, 5, 5, &last));
    FAILS(KVC_ERROR_ARGUMENT, "from", kvc_seq_remove(p.seq, 6, 5, &last));
    FAILS(KVC_ERROR_ARGUMENT, "to", kvc_seq_remove(p.seq, 6, 11, &last));
    FAILS(KVC_ERROR_ARGUMENT, "policy",
        kvc_seq_set_policy(p.seq, (kvc_policy)7, 0, 0, &last));
    FAILS(KVC_ERROR_ARGUMENT, "n_keep",
        kvc_seq_set_policy(p.seq, KVC_POLICY_WINDOW, 169, 0, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_seq_set_policy(NULL, KVC_POLICY_ERROR, 0, 0, &last));
    OK(kvc_seq_set_policy(p.seq, KVC_POLICY_WINDOW, 168, 0, &last));
    OK(kvc_seq_set_policy(p.seq, KVC_POLICY_ERROR, 0, 0, &last));
    pair_remove(&p, 0, 10);
    assert_int_equal(kvc_seq_length(p.seq), 0);
    pair_append(&p, 3);
    assert_true(p.largest < 1e-4);
    pair_close(&p);

    /* A window whose pages are gone cannot be filled from before. */
    pair_open(&p, &windows, KVC_KV_F32, 700);
    desc.model = p.rig.model;
    desc.page_size = 16;
    desc.n_batch = 16;
    desc.n_back = 1;
    OK(kvc_cache_new(&cache, &desc, &last));
    kvc_seq_close(p.seq);
    p.seq = new_seq(cache);
    pair_append(&p, 200);
    FAILS(KVC_ERROR_ARGUMENT, "from", kvc_seq_remove(p.seq, 150, 195, &last));
    FAILS(KVC_ERROR_ARGUMENT, "from", kvc_seq_remove(p.seq, 100, 200, &last));
    assert_int_equal(kvc_seq_length(p.seq), 200);
    pair_remove(&p, 3, 100);            /* beyond the window */
    pair_append(&p, 5);
    assert_true(p.largest < 1e-4);
    OK(kvc_decode(p.ctx, p.seq, 1, &logits, &last));
    kvc_seq_close(p.seq);
    kvc_cache_free(cache);
    p.seq = NULL;
    pair_close(&p);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_random_ranges),
        cmocka_unit_test(test_scattered),
        cmocka_unit_test(test_policy),
        cmocka_unit_test(test_thousand_shifts),
        cmocka_unit_test(test_policy_bits),
        cmocka_unit_test(test_refusals)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
