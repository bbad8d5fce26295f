/* KVC_POLICY_HEAVY: sequences that keep the positions which received the most attention. What stays
   is chosen here once more from the tallies, these are compared with sums in double precision, and
   the logits with naive.h, which has keys unturned and knows a position by its index alone. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include "testing.h"
#include "naive.h"

enum { N_VOCAB = 48, PAGE = 16, N_CTX = 112, N_KEEP = 3, N_HEAVY = 40, MAX_POS = 4096 };
#define TINY_FULL .n_embd = 32, .n_heads = 2, .n_ff = 48, .n_vocab = N_VOCAB, .n_ctx = 4096
#define TINY TINY_FULL, .n_kv_heads = 1

typedef struct kind {
    const char *name;
    kvc_kv_type kv;
    int half;                   /* pairs of dimensions half a head apart */
    double bound;
    model_shape shape;
} kind;

static const kind kinds[] = {
    {"plain", KVC_KV_F32, 0, 1e-4, {TINY}},
    {"three heads to a key head", KVC_KV_F32, 0, 1e-4, {.n_embd = 32, .n_heads = 6,
        .n_kv_heads = 2, .head_dim = 16, .n_ff = 48, .n_vocab = N_VOCAB, .n_ctx = 4096}},
    {"K and V in f16", KVC_KV_F16, 0, 2e-2, {TINY}},
    {"K and V in q8", KVC_KV_Q8, 0, 0.6, {TINY}},
    {"K and V in q4, heads of 40", KVC_KV_Q4, 0, 4, {TINY, .n_layers = 1, .head_dim = 40}},
    {"heads of 20, rotated in part", KVC_KV_F32, 0, 1e-4, {TINY, .head_dim = 20, .rope_dim = 10}},
    {"pairs half a head apart", KVC_KV_F32, 1, 1e-4, {TINY, .head_dim = 20, .rope_dim = 12}},
    {"pairs half a head apart in f16", KVC_KV_F16, 1, 2e-2, {TINY}},
    {"linear scaling", KVC_KV_F32, 0, 1e-4, {TINY, .rope = MODEL_ROPE_LINEAR, .rope_factor = 2.5f}},
    {"YaRN", KVC_KV_F32, 0, 1e-4, {TINY, .rope = MODEL_ROPE_YARN, .rope_orig_ctx = 64}},
    {"rope_freqs", KVC_KV_F32, 0, 1e-4, {TINY, .rope_freqs = 1}},
    {"ALiBi (bloom)", KVC_KV_F32, 0, 1e-4, {.arch = "bloom", TINY_FULL}},
    {"ALiBi in q8", KVC_KV_Q8, 0, 0.6, {.arch = "mpt", TINY_FULL}},
    {"soft caps (gemma2)", KVC_KV_F32, 0, 1e-4, {.arch = "gemma2", TINY, .window = 20}},
    {"sinks (gpt-oss)", KVC_KV_F32, 0, 1e-4, {.arch = "gpt-oss", TINY, .window = 20,
        .n_experts = 3, .n_experts_used = 3}},
    {"latent attention (minicpm3)", KVC_KV_F32, 0, 1e-4, {.arch = "minicpm3", TINY_FULL,
        .head_dim = 24, .rope_dim = 8, .q_rank = 20, .kv_rank = 24}},
    {"a window of 20 in every 2nd layer", KVC_KV_F32, 0, 1e-4,
        {TINY, .window = 20, .pattern = 2, .n_layers = 4}}
};

/* ---- kvc.h and the reference side by side ---- */

typedef struct pair {
    rig rig;
    kvc__arch arch;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    naive_model naive;
    naive_past past;
    uint64_t state;
    unsigned n_shifts;
    double largest, largest_tally;      /* differences of logits, of tallies */
} pair;

static kvc_cache *heavy_cache(const rig *r, kvc_kv_type kv, uint32_t n_ctx, uint32_t n_pages) {
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    desc.model = r->model;
    desc.n_ctx = n_ctx;
    desc.n_seqs = 3;
    desc.n_pages = n_pages;
    desc.page_size = PAGE;
    desc.n_batch = 16;
    desc.n_back = 8;
    desc.n_heavy = N_KEEP + N_HEAVY;
    desc.type_k = desc.type_v = kv;
    OK(kvc_cache_new(&cache, &desc, &last));
    return cache;
}

static kvc_seq *heavy_seq(kvc_cache *cache) {
    kvc_seq *seq = new_seq(cache);
    OK(kvc_seq_set_policy(seq, KVC_POLICY_HEAVY, N_KEEP, N_HEAVY, &last));
    return seq;
}

static void pair_open(pair *p, const kind *k) {
    memset(p, 0, sizeof *p);
    p->state = 3;
    rig_open(&p->rig, &k->shape);
    if (k->half) {
        p->arch = *p->rig.model->arch;
        p->arch.traits |= KVC__ROPE_HALVES;
        p->rig.model->arch = &p->arch;
    }
    p->cache = heavy_cache(&p->rig, k->kv, N_CTX, 0);
    p->ctx = new_ctx(&p->rig, 24, 2, KVC_ISA_BEST);
    p->seq = heavy_seq(p->cache);
    naive_open(&p->naive, p->rig.image);
    if (k->half) p->naive.rope_half = 1;
    naive_past_open(&p->past, &p->naive, MAX_POS);
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

/* Of the positions before `end`, forgets in the reference what must have gone: `n` of them, those
   with the smallest tallies past N_KEEP, of equal ones the first. */
static void forget(pair *p, const uint64_t *tally, uint32_t end, uint32_t n) {
    char gone[N_CTX] = {0};
    uint32_t i, k, least;
    for (k = 0; k < n; k++) {
        least = UINT32_MAX;
        for (i = N_KEEP; i < end; i++)
            if (!gone[i] && (least == UINT32_MAX || tally[i] < tally[least])) least = i;
        assert_true(least != UINT32_MAX);
        gone[least] = 1;
    }
    for (i = end; i-- > 0;)
        if (gone[i]) naive_past_remove(&p->past, i, i + 1);
    p->n_shifts++;
}

/* A random token, after which the logits and all tallies are compared. */
static void pair_decode(pair *p) {
    static uint64_t tally[N_CTX];
    const uint32_t n = kvc_seq_length(p->seq);
    const kvc_token token = (kvc_token)(model_random(&p->state) % N_VOCAB);
    const float *logits;
    uint32_t left, i;
    double *want;
    memcpy(tally, p->seq->tally, n * sizeof *tally);
    OK(kvc_decode(p->ctx, p->seq, token, &logits, &last));
    left = kvc_seq_length(p->seq) - 1;
    if (left < n) forget(p, tally, p->seq->n_marked + n - left, n - left);
    want = naive_append(&p->naive, &p->past, &token, 1);
    assert_int_equal(left + 1, p->past.n);
    for (i = 0; i < N_VOCAB; i++) {
        double d = fabs((double)logits[i] - want[i]);
        assert_true(logits[i] - logits[i] >= 0);
        if (d > p->largest) p->largest = d;
    }
    for (i = 0; i < p->past.n; i++) {
        double d = fabs((double)p->seq->tally[i] / 1048576 - p->past.received[i]);
        if (d > p->largest_tally) p->largest_tally = d;
    }
    free(want);
}

static void test_reference(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(kinds); i++) {
        kvc_cache_info info;
        pair p;
        pair_open(&p, &kinds[i]);
        while (p.n_shifts < 9) pair_decode(&p);
        assert_int_equal(p.seq->n_marked, N_KEEP + N_HEAVY);
        kvc_cache_query(p.cache, &info);
        assert_int_equal(info.reaches[p.cache->token_reach].pages_peak, N_CTX / PAGE);
        print_message("%-34s largest difference of logits %.1e, of tallies %.1e\n", kinds[i].name,
            p.largest, p.largest_tally);
        assert_true(p.largest > 0 && p.largest < kinds[i].bound);
        /* each query's share of a position is rounded to 2^-20 */
        if (kinds[i].bound < 1e-3) assert_true(p.largest_tally < 1e-3);
        pair_close(&p);
    }
}

static void test_thousand_shifts(void **state) {
    static const int which[] = {0, 2};
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(which); i++) {
        double once = 0;
        kind k = kinds[which[i]];
        pair p;
        k.shape.n_layers = 1;
        pair_open(&p, &k);
        while (p.n_shifts < 1000) {
            pair_decode(&p);
            if (p.n_shifts == 1) once = p.largest;
        }
        print_message("%-34s after 1 shift %.1e, after 1000 %.1e\n", k.name, once, p.largest);
        assert_true(p.largest < k.bound);
        pair_close(&p);
    }
}

/* Roll-backs, to where only chosen positions are left and further, and ranges removed anywhere. */
static void test_changes(void **state) {
    static const int which[] = {0, 3, 6};
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(which); i++) {
        unsigned round, n_inside = 0;
        pair p;
        pair_open(&p, &kinds[which[i]]);
        for (round = 0; round < 120; round++) {
            uint32_t n = (uint32_t)p.past.n, from, to;
            unsigned more = (unsigned)(model_random(&p.state) % 30);
            if (n > 60 && model_random(&p.state) % 3 == 0) {
                from = (uint32_t)(model_random(&p.state) % n);
                if (model_random(&p.state) % 4) from = n - 1 - from % 20;
                n_inside += from < p.seq->n_marked;
                OK(kvc_seq_rollback(p.seq, from));
                p.past.n = from;
            } else if (n > 60 && model_random(&p.state) % 2) {
                from = (uint32_t)(model_random(&p.state) % (n - 20));
                to = from + 1 + (uint32_t)(model_random(&p.state) % 18);
                if (kvc_seq_remove(p.seq, from, to, &last) == KVC_OK)
                    naive_past_remove(&p.past, from, to);
                else assert_string_equal(last.where, "n_cuts");
            }
            while (more-- > 0) pair_decode(&p);
        }
        print_message("%-34s %u shifts, %u roll-backs into what was kept, largest difference "
            "%.1e\n", kinds[which[i]].name, p.n_shifts, n_inside, p.largest);
        assert_true(p.n_shifts > 5 && n_inside > 2);
        assert_true(p.largest < kinds[which[i]].bound);
        pair_close(&p);
    }
}

/* ---- the same bits ---- */

enum { N = 500 };

/* Logits of all positions; the caller frees them. */
static float *run(kvc_ctx *ctx, kvc_seq *seq, const kvc_token *text, size_t n, size_t piece) {
    float *got = (float *)gguf_must(malloc(n * N_VOCAB * sizeof *got));
    size_t at, part, rows[N];
    for (at = 0; at < n; at++) rows[at] = at;
    for (at = 0; at < n; at += part) {
        part = n - at < piece ? n - at : piece;
        OK(kvc_prefill_rows(ctx, seq, text + at, part, rows, part, got + at * N_VOCAB, &last));
    }
    return got;
}

/* What goes, and when, is the sequence's own: not a matter of chunks, threads or sets. */
static void test_bits(void **state) {
    static const struct {
        uint32_t n_batch, n_threads, piece;
        kvc_isa isa;
    } ways[] = {
        {1, 1, 1, KVC_ISA_BEST}, {256, 1, 500, KVC_ISA_BEST}, {256, 2, 77, KVC_ISA_BEST},
        {7, 3, 31, KVC_ISA_BEST}, {64, 2, 100, KVC_ISA_BASE}, {64, 1, 500, KVC_ISA_AVX2},
        {64, 1, 500, KVC_ISA_AVX512}
    };
    kvc_token text[N];
    size_t i, k;
    (void)state;
    random_tokens(text, N, N_VOCAB, 4);
    for (k = 0; k < COUNT(kinds); k++) {
        float *first = NULL;
        rig r;
        rig_open(&r, &kinds[k].shape);
        for (i = 0; i < COUNT(ways); i++) {
            /* more than a span of recent positions and of chosen ones, too */
            kvc_cache *cache = heavy_cache(&r, kinds[k].kv, k % 2 ? 400 : N_CTX, 0);
            kvc_ctx *ctx = new_ctx(&r, ways[i].n_batch, ways[i].n_threads, ways[i].isa);
            float *got = run(ctx, heavy_seq(cache), text, N, ways[i].piece);
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

/* Forks go their own ways, in as few pages as three sequences need; a saved one goes on as the one
   that was not. */
static void test_forks_and_files(void **state) {
    enum { SPLIT = 200 };
    kvc_token text[N], other_text[N];
    size_t k;
    (void)state;
    random_tokens(text, N, N_VOCAB, 4);
    random_tokens(other_text, N, N_VOCAB, 5);
    for (k = 0; k < COUNT(kinds); k++) {
        rig r;
        rig_open(&r, &kinds[k].shape);
        {
            kvc_cache *cache = heavy_cache(&r, kinds[k].kv, N_CTX, 3 * N_CTX / PAGE);
            kvc_ctx *ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
            kvc_seq *seq = heavy_seq(cache), *fork, *loaded;
            size_t left = N - SPLIT, size, written;
            float *want, *got;
            unsigned char *file;
            kvc_cache_info info;
            free(run(ctx, seq, text, SPLIT, 50));
            OK(kvc_seq_fork(&fork, seq, &last));
            size = (size_t)kvc_seq_save_size(seq, KVC_SAVE_ALL);
            file = (unsigned char *)gguf_must(malloc(size));
            OK(kvc_seq_save_memory(seq, KVC_SAVE_ALL, file, size, &written, &last));
            assert_int_equal(written, size);
            FAILS(KVC_ERROR_ARGUMENT, "what",
                kvc_seq_save_memory(seq, KVC_SAVE_TOKENS, file, size, &written, &last));
            free(run(ctx, fork, other_text + SPLIT, left, 50));
            want = run(ctx, seq, text + SPLIT, left, 50);
            kvc_seq_close(seq);
            OK(kvc_seq_load_memory(&loaded, cache, NULL, file, size, &last));
            got = run(ctx, loaded, text + SPLIT, left, 30);
            SAME(got, want, left, N_VOCAB, "saved, loaded, and next to a fork");
            free(got);
            free(want);

            seq = heavy_seq(cache);         /* and the fork as if it were alone */
            free(run(ctx, seq, text, SPLIT, 50));
            free(run(ctx, seq, other_text + SPLIT, left, 50));
            assert_int_equal(kvc_seq_length(seq), kvc_seq_length(fork));
            want = run(ctx, seq, text, 20, 20);
            got = run(ctx, fork, text, 20, 20);
            SAME(got, want, 20, N_VOCAB, "the fork");
            free(got);
            free(want);
            free(file);
            kvc_seq_close(seq);
            kvc_seq_close(fork);
            kvc_seq_close(loaded);
            kvc_cache_query(cache, &info);
            assert_int_equal(info.pages_free, info.pages_total);
            kvc_ctx_free(ctx);
            kvc_cache_free(cache);
        }
        rig_close(&r);
    }
}

/* Tokens alone suffice while nothing has gone: the tallies are in the file. */
static void test_tokens_only(void **state) {
    kvc_token text[N];
    pair p;
    kvc_seq *other;
    float *want, *got;
    unsigned char file[4096];
    size_t size;
    (void)state;
    random_tokens(text, N, N_VOCAB, 4);
    pair_open(&p, &kinds[0]);
    OK(kvc_seq_set_policy(p.seq, KVC_POLICY_ERROR, 0, 0, &last));
    free(run(p.ctx, p.seq, text, 30, 30));
    OK(kvc_seq_set_policy(p.seq, KVC_POLICY_HEAVY, 1, 20, &last));  /* of 30 queries no tally */
    free(run(p.ctx, p.seq, text, 70, 30));
    OK(kvc_seq_save_memory(p.seq, KVC_SAVE_TOKENS, file, sizeof file, &size, &last));
    OK(kvc_seq_load_memory(&other, p.cache, p.ctx, file, size, &last));
    want = run(p.ctx, p.seq, text, 200, 30);
    got = run(p.ctx, other, text, 200, 30);
    SAME(got, want, 200, N_VOCAB, "from its tokens");
    free(want);
    free(got);
    kvc_seq_close(other);
    pair_close(&p);
}

/* The policy comes and goes. */
static void test_switching(void **state) {
    kvc_token text[N];
    pair p;
    (void)state;
    random_tokens(text, N, N_VOCAB, 4);
    pair_open(&p, &kinds[0]);
    free(run(p.ctx, p.seq, text, 300, 300));
    assert_int_equal(p.seq->n_marked, N_KEEP + N_HEAVY);
    OK(kvc_seq_set_policy(p.seq, KVC_POLICY_GROW, 0, 0, &last));
    free(run(p.ctx, p.seq, text, 300, 300));
    FAILS(KVC_ERROR_ARGUMENT, "seq",
        kvc_seq_set_policy(p.seq, KVC_POLICY_HEAVY, N_KEEP, N_HEAVY, &last));
    OK(kvc_seq_rollback(p.seq, 100));
    OK(kvc_seq_set_policy(p.seq, KVC_POLICY_WINDOW, 10, 0, &last));
    free(run(p.ctx, p.seq, text, 90, 90));
    OK(kvc_seq_set_policy(p.seq, KVC_POLICY_HEAVY, 1, 5, &last));
    free(run(p.ctx, p.seq, text, 200, 90));
    assert_int_equal(p.seq->n_marked, 6);
    kvc_cache_free(p.cache);
    p.cache = heavy_cache(&p.rig, KVC_KV_F32, N_CTX, 0);
    p.seq = heavy_seq(p.cache);
    pair_close(&p);
}

static void test_refusals(void **state) {
    static const model_shape windows = {TINY, .window = 30}, far = {TINY, .window = 60,
        .pattern = 2};
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    kvc_seq *seq;
    pair p;
    rig r;
    (void)state;
    pair_open(&p, &kinds[0]);
    FAILS(KVC_ERROR_ARGUMENT, "n_heavy",
        kvc_seq_set_policy(p.seq, KVC_POLICY_HEAVY, 1, N_KEEP + N_HEAVY, &last));
    FAILS(KVC_ERROR_ARGUMENT, "n_heavy", kvc_seq_set_policy(p.seq, KVC_POLICY_HEAVY, 1, 0, &last));
    FAILS(KVC_ERROR_ARGUMENT, "n_heavy",
        kvc_seq_set_policy(p.seq, KVC_POLICY_HEAVY, UINT32_MAX, 2, &last));
    FAILS(KVC_ERROR_ARGUMENT, "n_heavy", kvc_seq_set_policy(p.seq, KVC_POLICY_WINDOW, 1, 1, &last));
    desc.model = p.rig.model;
    desc.page_size = PAGE;
    desc.n_ctx = 64;
    desc.n_heavy = 33;
    FAILS(KVC_ERROR_ARGUMENT, "n_heavy", kvc_cache_new(&cache, &desc, &last));
    desc.n_heavy = 65;
    FAILS(KVC_ERROR_ARGUMENT, "n_heavy", kvc_cache_new(&cache, &desc, &last));
    desc.n_heavy = 32;
    OK(kvc_cache_new(&cache, &desc, &last));
    kvc_cache_free(cache);
    desc.n_heavy = 0;
    OK(kvc_cache_new(&cache, &desc, &last));
    seq = new_seq(cache);
    FAILS(KVC_ERROR_ARGUMENT, "n_heavy", kvc_seq_set_policy(seq, KVC_POLICY_HEAVY, 0, 1, &last));
    kvc_cache_free(cache);
    pair_close(&p);

    desc.n_ctx = N_CTX;
    desc.n_heavy = 40;
    rig_open(&r, &windows);
    desc.model = r.model;
    FAILS(KVC_ERROR_ARGUMENT, "n_heavy", kvc_cache_new(&cache, &desc, &last));
    rig_close(&r);
    rig_open(&r, &far);
    desc.model = r.model;
    FAILS(KVC_ERROR_ARGUMENT, "n_heavy", kvc_cache_new(&cache, &desc, &last));
    rig_close(&r);

    pair_open(&p, &kinds[COUNT(kinds) - 1]);
    while (p.n_shifts < 2) pair_decode(&p);
    FAILS(KVC_ERROR_ARGUMENT, "from", kvc_seq_remove(p.seq, 3, 5, &last));
    pair_decode(&p);
    pair_close(&p);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference),
        cmocka_unit_test(test_thousand_shifts),
        cmocka_unit_test(test_changes),
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_forks_and_files),
        cmocka_unit_test(test_tokens_only),
        cmocka_unit_test(test_switching),
        cmocka_unit_test(test_refusals)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
