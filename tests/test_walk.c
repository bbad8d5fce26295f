/* The section >>kv as a whole: long random walks over many sequences of one cache. After whatever
   was opened, prefilled, decoded, forked, rolled back and closed before, the logits of a sequence
   have the bits of a cold run of its tokens, and no page is lost. And what window layers hold. */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include "testing.h"

enum { N_VOCAB = 48, N_CTX = 120, N_SEQS = 16, PAGE = 16, OPERATIONS = 10000, FEWER = 3000 };
#define TINY .n_embd = 32, .n_heads = 2, .n_kv_heads = 1, .n_ff = 48, .n_vocab = N_VOCAB, \
    .n_ctx = 4096

/* ---- a walk ---- */

typedef struct track {
    kvc_seq *seq;               /* NULL: closed */
    uint32_t book;              /* with a prefix table: the text that it follows, mostly */
    kvc_token text[N_CTX];
    uint32_t n, top;            /* tokens; the most it had */
} track;

typedef struct walk {
    rig rig;
    kvc_kv_type kv;
    kvc_policy policy;
    int prefix;                 /* sequences take part in the prefix table */
    kvc_token books[5][N_CTX];
    uint64_t n_hit;
    kvc_cache *cache, *cold_cache;
    kvc_ctx *ctx[3], *cold_ctx;
    track tracks[N_SEQS];
    uint64_t state;
    unsigned n_compared, n_full, n_forks, n_back, n_refused, n_reorders, n_saves;
    uint32_t peak;              /* most pages seen live */
} walk;

static uint32_t draw(walk *w, uint32_t n) {
    return (uint32_t)(model_random(&w->state) % n);
}

static void walk_open(walk *w, const model_shape *shape, kvc_kv_type kv, kvc_policy policy,
    int prefix, uint32_t n_pages, uint64_t seed) {
    kvc_cache_desc desc = {0};
    int i;
    memset(w, 0, sizeof *w);
    w->kv = kv;
    w->policy = policy;
    w->prefix = prefix;
    w->state = seed;
    for (i = 0; i < 5; i++) {           /* with beginnings in common */
        random_tokens(w->books[i], N_CTX, N_VOCAB, seed);
        random_tokens(w->books[i] + 21 * i, N_CTX - 21 * (size_t)i, N_VOCAB,
            seed + 10 + (unsigned)i);
    }
    desc.n_prefix = prefix ? (prefix > 1 ? (uint32_t)prefix : 400) : 0;
    rig_open(&w->rig, shape);
    desc.model = w->rig.model;
    desc.n_ctx = policy == KVC_POLICY_GROW ? PAGE : N_CTX;
    desc.n_seqs = N_SEQS;
    desc.n_pages = n_pages;             /* not enough for all */
    desc.page_size = PAGE;
    desc.n_batch = 24;
    desc.n_back = 10;
    desc.type_k = desc.type_v = kv;
    OK(kvc_cache_new(&w->cache, &desc, &last));
    w->ctx[0] = new_ctx(&w->rig, 7, 1, KVC_ISA_BEST);
    w->ctx[1] = new_ctx(&w->rig, 64, 2, KVC_ISA_BEST);
    w->ctx[2] = new_ctx(&w->rig, 17, 1, KVC_ISA_BASE);
    w->cold_cache = new_cache(&w->rig, N_CTX, 1, 0, kv);
    w->cold_ctx = new_ctx(&w->rig, 256, 1, KVC_ISA_BEST);
}

static void walk_close(walk *w) {
    kvc_ctx_free(w->ctx[0]), kvc_ctx_free(w->ctx[1]), kvc_ctx_free(w->ctx[2]);
    kvc_ctx_free(w->cold_ctx);
    kvc_cache_free(w->cache);
    kvc_cache_free(w->cold_cache);
    rig_close(&w->rig);
}

static void compare(walk *w, const track *t, const float *logits) {
    kvc_seq *seq = new_seq(w->cold_cache);
    const float *cold;
    OK(kvc_prefill(w->cold_ctx, seq, t->text, t->n, &cold, &last));
    SAME(logits, cold, 1, N_VOCAB, "after a walk");
    kvc_seq_close(seq);
    w->n_compared++;
}

/* ---- operations; each checks what it can see ---- */

static void append(walk *w, track *t, uint32_t n) {
    kvc_ctx *ctx = w->ctx[draw(w, 3)];
    const float *logits = NULL;
    kvc_result r;
    random_tokens(t->text + t->n, n < N_CTX - t->n ? n : N_CTX - t->n, N_VOCAB, w->state);
    if (w->prefix && draw(w, 8) != 0)
        memcpy(t->text + t->n, w->books[t->book] + t->n,
            (n < N_CTX - t->n ? n : N_CTX - t->n) * sizeof *t->text);
    if (t->n + n > N_CTX && w->policy == KVC_POLICY_GROW) return;
    if (t->n + n > N_CTX) {
        kvc_token many[2 * N_CTX] = {0};
        FAILS(KVC_ERROR_FULL, "sequence", kvc_prefill(ctx, t->seq, many, n, &logits, &last));
        assert_int_equal(kvc_seq_length(t->seq), t->n);
        return;
    }
    memset(&last, 0, sizeof last);
    r = n == 1 ? kvc_decode(ctx, t->seq, t->text[t->n], &logits, &last) :
        kvc_prefill(ctx, t->seq, t->text + t->n, n, &logits, &last);
    if (r == KVC_ERROR_FULL) {
        assert_string_equal(last.where, "cache");
        assert_int_equal(kvc_seq_length(t->seq), t->n);
        w->n_full++;
        kvc_seq_close(t->seq);
        t->seq = NULL;
        return;
    }
    OK(r);
    if (w->prefix) {
        kvc_seq_info info;
        kvc_seq_query(t->seq, &info);
        assert_true(info.prefix_hit < n);
        w->n_hit += info.prefix_hit;
    }
    t->n += n;
    if (t->n > t->top) t->top = t->n;
    compare(w, t, logits);
}

static void fork_to(walk *w, track *t) {
    track *to = &w->tracks[draw(w, N_SEQS)];
    if (to->seq != NULL) return;
    OK(kvc_seq_fork(&to->seq, t->seq, &last));
    memcpy(to->text, t->text, sizeof t->text);
    to->n = t->n;
    to->top = t->top;
    w->n_forks++;
}

static void go_back(walk *w, track *t) {
    uint32_t length = draw(w, t->n + 1);
    kvc_seq_info info;
    if (draw(w, 2)) length = t->n - (t->n < 10 ? t->n : draw(w, 11));
    kvc_seq_query(t->seq, &info);
    assert_true(info.rollback_least <= (t->top > 10 ? t->top - 10 : 0));    /* n_back is 10 */
    if (length != 0 && length < info.rollback_least) {
        assert_int_equal(kvc_seq_rollback(t->seq, length), KVC_ERROR_ARGUMENT);
        assert_int_equal(kvc_seq_length(t->seq), t->n);
        w->n_refused++;
        return;
    }
    OK(kvc_seq_rollback(t->seq, length));
    t->n = length;
    if (length == 0) t->top = 0;
    w->n_back++;
}

/* Some open sequences, each with the past of any of them. */
static void reorder(walk *w) {
    kvc_seq *seqs[N_SEQS];
    track *tracks[N_SEQS], old[N_SEQS];
    uint32_t from[N_SEQS], n = 0, i;
    int permute = (int)draw(w, 2);
    for (i = 0; i < N_SEQS; i++) {
        if (w->tracks[i].seq == NULL || draw(w, 3) == 0) continue;
        tracks[n] = &w->tracks[i];
        old[n] = w->tracks[i];
        seqs[n] = old[n].seq;
        n++;
    }
    for (i = 0; i < n; i++) {
        from[i] = permute ? i : draw(w, n);
        if (permute) {
            uint32_t j = draw(w, i + 1);
            from[i] = from[j];
            from[j] = i;
        }
    }
    OK(kvc_seq_reorder(seqs, from, n, &last));
    for (i = 0; i < n; i++) {
        memcpy(tracks[i]->text, old[from[i]].text, sizeof old[0].text);
        tracks[i]->n = old[from[i]].n;
        tracks[i]->top = old[from[i]].top;
        assert_int_equal(kvc_seq_length(seqs[i]), tracks[i]->n);
    }
    w->n_reorders++;
}

/* Saved, closed and loaded again: as it was, but with pages of its own. */
static void save_and_load(walk *w, track *t) {
    size_t size = (size_t)kvc_seq_save_size(t->seq, KVC_SAVE_ALL), written;
    void *file = gguf_must(malloc(size));
    kvc_result r;
    OK(kvc_seq_save_memory(t->seq, KVC_SAVE_ALL, file, size, &written, &last));
    assert_int_equal(written, size);
    kvc_seq_close(t->seq);
    memset(&last, 0, sizeof last);
    r = kvc_seq_load_memory(&t->seq, w->cache, NULL, file, size, &last);
    free(file);
    if (r == KVC_ERROR_FULL) {          /* its pages were shared */
        assert_string_equal(last.where, "cache");
        assert_null(t->seq);
        w->n_full++;
        return;
    }
    OK(r);
    assert_int_equal(kvc_seq_length(t->seq), t->n);
    w->n_saves++;
}

static void look(walk *w) {
    kvc_cache_info info;
    uint32_t i, live = 0;
    kvc_cache_query(w->cache, &info);
    for (i = 0; i < info.n_reaches; i++) {
        const kvc_reach_info *r = &info.reaches[i];
        assert_int_equal(r->pages_live + r->pages_cached + r->pages_free, r->pages_total);
        assert_true(r->pages_live <= r->pages_peak);
        live += r->pages_live;
        assert_int_equal(r->pages_promised, 0);
    }
    assert_int_equal(live, info.pages_live);
    if (live > w->peak) w->peak = live;
}

static void operate(walk *w) {
    track *t = &w->tracks[draw(w, N_SEQS)];
    uint32_t what = draw(w, 20);
    if (t->seq == NULL) {
        if (what >= 6) return;
        if (w->prefix) OK(kvc_seq_open_shared(&t->seq, w->cache, NULL, &last));
        else t->seq = new_seq(w->cache);
        t->book = draw(w, 5);
        t->n = t->top = 0;
        OK(kvc_seq_set_policy(t->seq, w->policy, 0, 0, &last));
    } else if (what < 6) {
        append(w, t, 1 + draw(w, 40));
    } else if (what < 12) {
        append(w, t, 1);
    } else if (what < 15) {
        fork_to(w, t);
    } else if (what < 18) {
        go_back(w, t);
    } else if (what < 19) {
        if (draw(w, 2)) reorder(w);
        else save_and_load(w, t);
    } else {
        kvc_seq_close(t->seq);
        t->seq = NULL;
    }
    look(w);
}

static void random_walk(const model_shape *shape, kvc_kv_type kv, kvc_policy policy, int prefix,
    uint32_t n_pages, uint64_t seed) {
    const int n = prefix ? FEWER : OPERATIONS;
    walk w;
    kvc_cache_info info;
    int i;
    walk_open(&w, shape, kv, policy, prefix, n_pages, seed);
    for (i = 0; i < n; i++) operate(&w);
    for (i = 0; i < N_SEQS; i++) kvc_seq_close(w.tracks[i].seq);
    kvc_cache_query(w.cache, &info);
    print_message("%d operations: %u times compared, %u forks, %u ways back, %u refused, "
        "%u reorders, %u saved and loaded, %u times full; peak %u of %u pages\n", n,
        w.n_compared, w.n_forks, w.n_back, w.n_refused, w.n_reorders, w.n_saves, w.n_full,
        info.pages_peak, info.pages_total);
    if (prefix) {
        print_message("%lu tokens from the prefix table, %lu computed, %lu pages evicted\n",
            (unsigned long)w.n_hit, (unsigned long)info.prefix_computed,
            (unsigned long)info.prefix_evicted);
        assert_int_equal(w.n_hit, info.prefix_hit);
        assert_true(w.n_hit > 1000 && info.prefix_evicted > 100);
        assert_int_equal(info.pages_cached + info.pages_free, info.pages_total);
    } else {
        assert_int_equal(info.pages_free, info.pages_total);
    }
    assert_int_equal(info.n_seqs_open, 0);
    assert_true(info.pages_peak >= w.peak);
    assert_true(w.n_compared > (unsigned)n / 4);
    assert_true(w.n_forks > (unsigned)n / 100 && w.n_back > (unsigned)n / 100);
    if (!prefix) assert_true((w.n_full > 0) == (policy == KVC_POLICY_ERROR));
    walk_close(&w);
}

/* ---- forks ---- */

/* Sixteen forks of 1,000 tokens hold the same pages, until each writes: its last page then. */
static void test_forks(void **state) {
    static const model_shape shape = {TINY};
    enum { LONG = 1000 };
    kvc_token *text = (kvc_token *)gguf_must(malloc(LONG * sizeof *text));
    kvc_seq *seqs[17];
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_cache_info info;
    kvc_seq_info one;
    rig r;
    uint32_t i, pages = (LONG + 31) / 32;
    (void)state;
    rig_open(&r, &shape);
    random_tokens(text, LONG, N_VOCAB, 9);
    desc.model = r.model;
    desc.n_ctx = 2 * LONG;
    desc.n_seqs = 17;
    desc.n_pages = pages + 16;
    OK(kvc_cache_new(&cache, &desc, &last));
    ctx = new_ctx(&r, 256, 1, KVC_ISA_BEST);
    seqs[0] = new_seq(cache);
    OK(kvc_prefill(ctx, seqs[0], text, LONG, NULL, &last));
    for (i = 1; i < 17; i++) OK(kvc_seq_fork(&seqs[i], seqs[0], &last));
    kvc_cache_query(cache, &info);
    assert_int_equal(info.pages_live, pages);
    assert_int_equal(info.pages_shared, pages);
    for (i = 1; i < 17; i++) {
        OK(kvc_prefill(ctx, seqs[i], text, 1, NULL, &last));
        kvc_cache_query(cache, &info);
        assert_int_equal(info.pages_live, pages + i);   /* one each */
        kvc_seq_query(seqs[i], &one);
        assert_int_equal(one.pages_own, 1);
        assert_int_equal(one.pages_shared, pages - 1);
        assert_int_equal(one.bytes_own, info.page_bytes);
        assert_int_equal(one.bytes_shared, (pages - 1) * info.page_bytes);
    }
    for (i = 0; i < 17; i++) kvc_seq_close(seqs[i]);
    kvc_cache_query(cache, &info);
    assert_int_equal(info.pages_free, info.pages_total);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    free(text);
    rig_close(&r);
}

static void test_reorder_arguments(void **state) {
    static const model_shape shape = {TINY};
    uint32_t from[3] = {0, 1, 2};
    kvc_cache *cache, *other;
    kvc_seq *seqs[3];
    rig r;
    (void)state;
    rig_open(&r, &shape);
    cache = new_cache(&r, 64, 2, 0, KVC_KV_F32);
    other = new_cache(&r, 64, 1, 0, KVC_KV_F32);
    seqs[0] = new_seq(cache), seqs[1] = new_seq(cache), seqs[2] = new_seq(other);
    OK(kvc_seq_reorder(NULL, NULL, 0, &last));
    OK(kvc_seq_reorder(seqs, from, 2, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seqs", kvc_seq_reorder(NULL, from, 1, &last));
    FAILS(KVC_ERROR_ARGUMENT, "from", kvc_seq_reorder(seqs, NULL, 1, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seqs", kvc_seq_reorder(seqs, from, 3, &last));
    FAILS(KVC_ERROR_ARGUMENT, "from", kvc_seq_reorder(seqs, from + 1, 1, &last));
    seqs[2] = seqs[0];
    FAILS(KVC_ERROR_ARGUMENT, "seqs", kvc_seq_reorder(seqs, from, 3, &last));
    seqs[2] = NULL;
    FAILS(KVC_ERROR_ARGUMENT, "seqs", kvc_seq_reorder(seqs, from, 3, &last));
    kvc_cache_free(cache);
    kvc_cache_free(other);
    rig_close(&r);
}

static void test_walk(void **state) {
    static const model_shape shape = {TINY};
    (void)state;
    random_walk(&shape, KVC_KV_F32, KVC_POLICY_ERROR, 0, 70, 1);
}

static void test_walk_windows(void **state) {
    static const model_shape shape = {TINY, .window = 20, .pattern = 2, .n_layers = 3};
    (void)state;
    random_walk(&shape, KVC_KV_F16, KVC_POLICY_ERROR, 0, 70, 2);
}

static void test_walk_q8(void **state) {
    static const model_shape shape = {TINY, .head_dim = 40};
    (void)state;
    random_walk(&shape, KVC_KV_Q8, KVC_POLICY_ERROR, 0, 70, 4);
}

static void test_walk_q4(void **state) {
    static const model_shape shape = {TINY, .window = 20, .pattern = 2, .n_layers = 3};
    (void)state;
    random_walk(&shape, KVC_KV_Q4, KVC_POLICY_ERROR, 0, 70, 5);
}

/* From one page for each sequence to what all of them need. */
static void test_walk_grow(void **state) {
    static const model_shape shape = {TINY}, windows = {TINY, .window = 20, .pattern = 2};
    (void)state;
    random_walk(&shape, KVC_KV_F32, KVC_POLICY_GROW, 0, 2, 4);
    random_walk(&windows, KVC_KV_F32, KVC_POLICY_GROW, 0, 2, 5);
}

static void test_walk_window_only(void **state) {
    static const model_shape shape = {TINY, .window = 33};
    (void)state;
    random_walk(&shape, KVC_KV_F32, KVC_POLICY_ERROR, 0, 40, 3);
}

/* The same with a prefix table, also one that knows fewer pages than there are. */
static void test_walk_prefix(void **state) {
    static const model_shape plain = {TINY}, narrow = {TINY, .head_dim = 40},
        windows = {TINY, .window = 20, .pattern = 2, .n_layers = 3},
        windows_only = {TINY, .window = 33};
    (void)state;
    random_walk(&plain, KVC_KV_F32, KVC_POLICY_ERROR, 1, 70, 1);
    random_walk(&plain, KVC_KV_F16, KVC_POLICY_ERROR, 30, 70, 2);
    random_walk(&narrow, KVC_KV_Q8, KVC_POLICY_ERROR, 1, 70, 3);
    random_walk(&windows, KVC_KV_Q4, KVC_POLICY_ERROR, 1, 70, 4);
    random_walk(&windows_only, KVC_KV_F32, KVC_POLICY_ERROR, 1, 40, 5);
    random_walk(&windows, KVC_KV_F16, KVC_POLICY_GROW, 1, 2, 6);
}

/* ---- what window layers hold ---- */

/* Layers 0, 2 and 4 see 40 positions, 1 and 3 all. */
static void test_window_pages(void **state) {
    static const model_shape shape = {TINY, .window = 40, .pattern = 2, .pattern_list = 1,
        .n_layers = 5};
    enum { LONG = 4096, STEP = 128 };
    kvc_cache_desc desc = {0};
    kvc_cache_info info;
    kvc_token *text = (kvc_token *)gguf_must(malloc(LONG * sizeof *text));
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq, *other;
    const float *logits;
    float *cold;
    size_t at, size;
    rig r;
    (void)state;
    rig_open(&r, &shape);
    random_tokens(text, LONG, N_VOCAB, 9);
    cold = cold_run(&r, text, LONG, KVC_KV_F32);
    desc.model = r.model;
    desc.n_ctx = LONG;
    desc.n_seqs = 2;
    desc.page_size = PAGE;
    desc.n_batch = 32;
    desc.n_back = 16;
    OK(kvc_cache_new(&cache, &desc, &last));
    kvc_cache_query(cache, &info);
    assert_int_equal(info.n_reaches, 2);
    assert_int_equal(info.reaches[0].window, 40);
    assert_int_equal(info.reaches[0].n_layers, 3);
    /* 39 + 16 + 32 positions touch 7 pages of 16 at most */
    assert_int_equal(info.reaches[0].seq_pages, 7);
    assert_int_equal(info.reaches[0].pages_total, 14);
    assert_int_equal(info.reaches[0].page_bytes, 3 * PAGE * (16 + 16) * 4);
    assert_int_equal(info.reaches[1].window, 0);
    assert_int_equal(info.reaches[1].n_layers, 2);
    assert_int_equal(info.reaches[1].pages_total, 2 * LONG / PAGE);
    size = 14 * info.reaches[0].page_bytes + info.reaches[1].pages_total *
        info.reaches[1].page_bytes;
    assert_true(info.memory_size >= size && info.memory_size < size + size / 16);
    ctx = new_ctx(&r, 256, 2, KVC_ISA_BEST);
    seq = new_seq(cache);
    for (at = 0; at < LONG; at += STEP) {
        OK(kvc_prefill(ctx, seq, text + at, STEP, &logits, &last));
        SAME(logits, cold + (at + STEP - 1) * N_VOCAB, 1, N_VOCAB, "windows");
        kvc_cache_query(cache, &info);
        assert_true(info.reaches[0].pages_live <= 5);   /* 39 + 16 positions touch 5 */
        assert_int_equal(info.reaches[1].pages_live, (at + STEP) / PAGE);
        if (at != LONG / 2) continue;
        OK(kvc_seq_fork(&other, seq, &last));
        OK(kvc_decode(ctx, other, text[at + STEP], &logits, &last));
        SAME(logits, cold + (at + STEP) * N_VOCAB, 1, N_VOCAB, "a fork with windows");
        kvc_seq_close(other);
    }
    assert_true(info.reaches[0].pages_peak <= 14);
    FAILS(KVC_ERROR_FULL, "sequence", kvc_decode(ctx, seq, 0, &logits, &last));
    OK(kvc_seq_rollback(seq, LONG - 16));
    OK(kvc_prefill(ctx, seq, text + LONG - 16, 16, &logits, &last));
    SAME(logits, cold + (LONG - 1) * N_VOCAB, 1, N_VOCAB, "after a rollback");
    assert_int_equal(kvc_seq_rollback(seq, 100), KVC_ERROR_ARGUMENT);
    OK(kvc_seq_rollback(seq, 0));
    OK(kvc_prefill(ctx, seq, text, 100, &logits, &last));
    SAME(logits, cold + 99 * N_VOCAB, 1, N_VOCAB, "from the start again");
    free(cold);
    free(text);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forks),
        cmocka_unit_test(test_reorder_arguments),
        cmocka_unit_test(test_walk),
        cmocka_unit_test(test_walk_windows),
        cmocka_unit_test(test_walk_q8), cmocka_unit_test(test_walk_q4),
        cmocka_unit_test(test_walk_window_only),
        cmocka_unit_test(test_walk_grow),
        cmocka_unit_test(test_walk_prefix),
        cmocka_unit_test(test_window_pages)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
