/* prefix.h - what the tests of the prefix table share: a plain trie of what was computed, the table
   from inside, models of every K/V type and with windows, conversations. Include it after kvc.h
   with its implementation. */
#ifndef PREFIX_H
#define PREFIX_H

#include "testing.h"

enum { N_VOCAB = 48, PAGE = 16 };
#define TINY .n_embd = 32, .n_heads = 2, .n_kv_heads = 1, .n_ff = 48, .n_vocab = N_VOCAB, \
    .n_ctx = 4096

/* ---- a plain trie of what was computed ---- */

typedef struct trie {
    uint32_t (*next)[N_VOCAB];  /* [cap] 0: none */
    uint32_t n, cap;
} trie;

static inline void trie_open(trie *t, uint32_t cap) {
    t->next = (uint32_t (*)[N_VOCAB])gguf_must(calloc(cap, sizeof *t->next));
    t->n = 1;
    t->cap = cap;
}

static inline void trie_add(trie *t, const kvc_token *text, uint32_t n) {
    uint32_t at = 0, i;
    for (i = 0; i < n; i++) {
        uint32_t *next = &t->next[at][text[i]];
        if (!*next) {
            assert_true(t->n < t->cap);
            *next = t->n++;
        }
        at = *next;
    }
}

static inline uint32_t trie_run(const trie *t, const kvc_token *text, uint32_t n) {
    uint32_t at = 0, i;
    for (i = 0; i < n && t->next[at][text[i]]; i++) at = t->next[at][text[i]];
    return i;
}

/* ---- the table from inside ---- */

/* Counts in all directions: entries and their pages, children, sequences, shelves. */
static inline void check_table(const kvc_cache *c) {
    const kvc__table *t = &c->table;
    uint32_t *refs = (uint32_t *)gguf_must(calloc(t->n_entries, sizeof *refs));
    char *is_free = (char *)gguf_must(calloc(t->n_entries, 1));
    uint32_t e, i, n_free = 0, page, cached;
    for (e = t->free; e != KVC__NONE; e = t->entries[e].next, n_free++) is_free[e] = 1;
    assert_int_equal(n_free, t->n_free);
    for (i = 0; i < c->desc.n_seqs; i++)
        if (c->seqs[i].is_open && c->seqs[i].salt != KVC__NONE) refs[c->seqs[i].tail]++;
    for (e = 0; e < t->n_entries; e++) {
        const kvc__entry *one = &t->entries[e];
        uint32_t pages = 0;
        if (is_free[e]) continue;
        if (one->parent != KVC__NONE) {
            assert_false(is_free[one->parent]);
            refs[one->parent]++;
            assert_int_equal(kvc__kids_nearest(t, one->parent, kvc__entry_text(t, e),
                one->n_tokens), e);
            assert_true(one->n_tokens > 0 && one->n_tokens <= t->page_size);
        }
        if (one->n_tokens == t->page_size)
            assert_int_equal(kvc__table_find(t, one->parent, one->key, kvc__entry_text(t, e)), e);
        for (i = 0; i < t->n_reaches; i++) {
            page = *kvc__entry_page(t, e, i);
            if (page == KVC__NONE) continue;
            pages++;
            assert_int_equal(kvc__page_entry(&c->pools[i], page), e);
            if (i == c->token_reach)
                assert_memory_equal(kvc__page_tokens(c, page), kvc__entry_text(t, e),
                    one->n_tokens * sizeof(kvc_token));
        }
        assert_int_equal(pages, one->n_pages);
    }
    for (i = 0; i < t->n_reaches; i++) {
        const kvc__pool *pool = &c->pools[i];
        for (cached = page = 0; page < pool->n_pages; page++) {
            uint32_t entry = kvc__page_entry(pool, page);
            if (kvc__page_keep(pool, page)->parting != KVC__NONE) {
                refs[kvc__page_keep(pool, page)->parting]++;
                assert_int_equal(*kvc__page_refs(pool, page), 0);
            }
            cached += entry != KVC__NONE && *kvc__page_refs(pool, page) == 0;
            if (entry != KVC__NONE) assert_int_equal(*kvc__entry_page(t, entry, i), page);
        }
        assert_int_equal(cached, pool->n_cached);
    }
    for (e = 0; e < t->n_entries; e++) {
        if (is_free[e]) continue;
        assert_int_equal(refs[e], t->entries[e].refs);
        assert_int_equal(t->entries[e].guards, 0);
    }
    free(refs);
    free(is_free);
}

/* ---- objects ---- */

typedef struct kind {
    const char *name;
    kvc_kv_type k, v;
    model_shape shape;
} kind;

static const kind kinds[] = {
    {"f32", KVC_KV_F32, KVC_KV_F32, {TINY}},
    {"f16", KVC_KV_F16, KVC_KV_F16, {TINY, .head_dim = 20, .head_dim_v = 24}},
    {"q8", KVC_KV_Q8, KVC_KV_Q8, {TINY, .head_dim = 40}},
    {"q4", KVC_KV_Q4, KVC_KV_Q4, {TINY}},
    {"q8 and q4", KVC_KV_Q8, KVC_KV_Q4, {TINY, .n_layers = 1}},
    {"windows in every 2nd layer", KVC_KV_F16, KVC_KV_F16,
        {TINY, .window = 20, .pattern = 2, .n_layers = 3}},
    {"windows only", KVC_KV_F32, KVC_KV_F32, {TINY, .window = 33}}
};

static inline kvc_cache_desc table_desc(const rig *r, const kind *k, uint32_t n_ctx,
    uint32_t n_pages) {
    kvc_cache_desc desc = {0};
    desc.model = r->model;
    desc.n_ctx = n_ctx;
    desc.n_seqs = 8;
    desc.n_pages = n_pages;
    desc.page_size = PAGE;
    desc.n_batch = 32;
    desc.n_back = 4;
    desc.n_prefix = 3 * n_pages;
    desc.type_k = k->k;
    desc.type_v = k->v;
    return desc;
}

static inline kvc_cache *table_cache(const rig *r, const kind *k, uint32_t n_ctx,
    uint32_t n_pages) {
    kvc_cache_desc desc = table_desc(r, k, n_ctx, n_pages);
    kvc_cache *cache;
    OK(kvc_cache_new(&cache, &desc, &last));
    return cache;
}

static inline kvc_seq *shared_seq(kvc_cache *cache) {
    kvc_seq *seq;
    OK(kvc_seq_open_shared(&seq, cache, NULL, &last));
    return seq;
}

static inline uint32_t hit_of(const kvc_seq *seq) {
    kvc_seq_info info;
    kvc_seq_query(seq, &info);
    return info.prefix_hit;
}

/* The last logits of a text, computed by a sequence that takes no part. */
static inline void cold_last(const rig *r, const kind *k, kvc_ctx *ctx, const kvc_token *text,
    size_t n, float *out) {
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    kvc_seq *seq;
    const float *logits;
    desc.model = r->model;
    desc.n_ctx = (uint32_t)n;
    desc.type_k = k->k;
    desc.type_v = k->v;
    OK(kvc_cache_new(&cache, &desc, &last));
    seq = new_seq(cache);
    OK(kvc_prefill(ctx, seq, text, n, &logits, &last));
    memcpy(out, logits, N_VOCAB * sizeof *out);
    kvc_cache_free(cache);
}

/* ---- conversations ---- */

enum { N_TALKS = 500, TALK = 240 };

typedef struct workload {
    kvc_token text[N_TALKS][TALK];
    uint32_t n[N_TALKS], first[N_TALKS];    /* tokens; of them in the first prefill */
} workload;

/* Most talks go on from a cut of an earlier one. */
static inline workload *make_workload(uint64_t seed) {
    workload *w = (workload *)gguf_must(calloc(1, sizeof *w));
    uint64_t state = seed;
    uint32_t i;
    for (i = 0; i < N_TALKS; i++) {
        uint32_t keep = 0, from = i ? (uint32_t)(model_random(&state) % i) : 0, more;
        if (i && model_random(&state) % 8)
            keep = (uint32_t)(model_random(&state) % (w->n[from] + 1));
        more = 1 + (uint32_t)(model_random(&state) % 60);
        if (more > TALK - keep) more = TALK - keep;
        memcpy(w->text[i], w->text[from], keep * sizeof(kvc_token));
        random_tokens(w->text[i] + keep, more, N_VOCAB, model_random(&state));
        w->n[i] = keep + more;
        if (w->n[i] == 0) w->n[i] = 1;
        w->first[i] = 1 + (uint32_t)(model_random(&state) % w->n[i]);
    }
    return w;
}

typedef struct reuse {
    uint64_t hit, best, whole, asked;   /* tokens: reused, at best, at best in whole pages */
    uint32_t n_pages;                   /* known at the end */
} reuse;

enum { TAKES_ALL, TAKES_WHOLE_PAGES, TAKES_ANY };

/* Plays it in a cache, which is freed then: a prefill, then some decodes and another prefill.
   How much is taken of what was computed before: all of it, at least its whole pages, or any part.
   Every logit that is given is compared. */
static inline reuse play(const rig *r, const kind *k, const workload *w, kvc_cache *cache,
    uint32_t n_threads, int takes) {
    kvc_ctx *ctx = new_ctx(r, 24, n_threads, KVC_ISA_BEST), *cold = new_ctx(r, 64, 1, KVC_ISA_BEST);
    reuse sum = {0};
    kvc_cache_info info;
    trie all;
    uint32_t i;
    trie_open(&all, N_TALKS * TALK + 1);
    for (i = 0; i < N_TALKS; i++) {
        const kvc_token *text = w->text[i];
        uint32_t n = w->n[i], at = 0, part, best, whole;
        kvc_seq *seq = shared_seq(cache);
        while (at < n) {
            const float *logits;
            float want[N_VOCAB];
            part = at == 0 ? w->first[i] : at % 3 && n - at > 3 ? 1 : n - at;
            if (part == 1) OK(kvc_decode(ctx, seq, text[at], &logits, &last));
            else OK(kvc_prefill(ctx, seq, text + at, part, &logits, &last));
            best = trie_run(&all, text, at + part);
            best = best > at + part - 1 ? at + part - 1 : best;
            best = best > at && part > 1 ? best - at : 0;
            whole = (at + best) / PAGE * PAGE > at ? (at + best) / PAGE * PAGE - at : 0;
            if (takes == TAKES_ALL) assert_int_equal(hit_of(seq), best);
            if (takes == TAKES_WHOLE_PAGES) assert_true(hit_of(seq) >= whole);
            assert_true(hit_of(seq) <= best);
            sum.hit += hit_of(seq);
            sum.best += best;
            sum.asked += part;
            sum.whole += whole;
            at += part;
            if (at == n || i % 4 == 0) {
                cold_last(r, k, cold, text, at, want);
                SAME(logits, want, 1, N_VOCAB, "in a conversation");
            }
            trie_add(&all, text, at);
        }
        kvc_seq_close(seq);
        if (i % 50 == 0) check_table(cache);
    }
    check_table(cache);
    kvc_cache_query(cache, &info);
    sum.n_pages = info.n_prefix_entries;
    free(all.next);
    kvc_ctx_free(ctx);
    kvc_ctx_free(cold);
    kvc_cache_free(cache);
    return sum;
}

#endif
