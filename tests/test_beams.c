/* examples/beams.c against a beam search that shares nothing: every beam is a list of tokens, and
   its logits are computed from the start each time. Both must find the same continuations with the
   same scores, bit for bit. */
#define _POSIX_C_SOURCE 200809L
#define main beams_main
#include "../examples/beams.c"
#undef main

#include "testing.h"

/* ---- the reference ---- */

typedef struct full {
    kvc_token tokens[256];      /* prompt and continuation */
    size_t n;
    double sum, score;
    size_t parent;              /* among the beams before, for the order of equal sums */
} full;

typedef struct reference {
    kvc_model *model;
    kvc_ctx *ctx;
    kvc_cache *cache;
    size_t n_vocab, n_prompt, n_beams, n_tokens;
    double penalty;
    full live[16], done[64];
    size_t n_live, n_done;
} reference;

static int by_sum(const void *a, const void *b) {
    const full *x = (const full *)a, *y = (const full *)b;
    if (x->sum > y->sum || x->sum < y->sum) return x->sum > y->sum ? -1 : 1;
    if (x->parent != y->parent) return x->parent < y->parent ? -1 : 1;
    return x->tokens[x->n - 1] < y->tokens[y->n - 1] ? -1 : 1;
}

static int by_score(const void *a, const void *b) {
    const full *x = (const full *)a, *y = (const full *)b;
    return x->score > y->score ? -1 : x->score < y->score;
}

static void done(reference *r, full *f) {
    f->score = f->sum / pow((5.0 + (double)(f->n - r->n_prompt)) / 6.0, r->penalty);
    assert_true(r->n_done < COUNT(r->done));
    r->done[r->n_done++] = *f;
    qsort(r->done, r->n_done, sizeof *r->done, by_score);
    if (r->n_done > r->n_beams) r->n_done = r->n_beams;
}

/* All continuations of all beams by a token. */
static full *extend(reference *r) {
    full *all = (full *)gguf_must(malloc(r->n_live * r->n_vocab * sizeof *all)), *f = all;
    double *log_p = (double *)gguf_must(malloc(r->n_vocab * sizeof *log_p));
    size_t i, token;
    for (i = 0; i < r->n_live; i++) {
        kvc_seq *seq = new_seq(r->cache);
        const float *logits;
        OK(kvc_prefill(r->ctx, seq, r->live[i].tokens, r->live[i].n, &logits, &last));
        log_softmax(log_p, logits, (uint32_t)r->n_vocab);
        kvc_seq_close(seq);
        for (token = 0; token < r->n_vocab; token++, f++) {
            *f = r->live[i];
            f->parent = i;
            f->sum += log_p[token];
            f->tokens[f->n++] = (kvc_token)token;
        }
    }
    free(log_p);
    return all;
}

static void search_fully(reference *r) {
    size_t depth, i;
    r->n_done = 0;
    for (depth = 0; depth < r->n_tokens && r->n_live > 0; depth++) {
        size_t n = r->n_live * r->n_vocab, n_next = 0;
        full *all = extend(r);
        qsort(all, n, sizeof *all, by_sum);
        for (i = 0; i < n && i < 2 * r->n_beams && n_next < r->n_beams; i++) {
            if (kvc_token_is_end(r->model, all[i].tokens[all[i].n - 1])) done(r, &all[i]);
            else r->live[n_next++] = all[i];
        }
        r->n_live = n_next;
        free(all);
    }
    for (i = 0; i < r->n_live; i++) done(r, &r->live[i]);
}

/* ---- side by side ---- */

static unsigned n_ended;        /* continuations that ended before they were cut off */

static void compare_searches(kvc_model *model, const kvc_token *prompt, size_t n_prompt,
    uint32_t n_beams, uint32_t n_tokens, double penalty) {
    static search s;
    static reference r;
    kvc_model_info info;
    kvc_cache_desc desc = {0};
    kvc_ctx_desc ctx_desc = {0};
    kvc_cache_info cache_info;
    kvc_cache *cache;
    uint32_t i;
    kvc_model_query(model, &info);
    memset(&s, 0, sizeof s);
    memset(&r, 0, sizeof r);
    desc.model = ctx_desc.model = model;
    desc.n_ctx = (uint32_t)n_prompt + n_tokens;
    desc.n_seqs = n_beams + 1;
    desc.page_size = 16;
    OK(kvc_cache_new(&cache, &desc, &last));
    OK(kvc_ctx_new(&s.ctx, &ctx_desc, &last));
    s.model = model;
    s.n_vocab = info.n_vocab;
    s.n_beams = n_beams;
    s.n_tokens = n_tokens;
    s.penalty = penalty;
    s.log_p = (double *)gguf_must(malloc((size_t)n_beams * info.n_vocab * sizeof *s.log_p));
    for (i = 0; i < n_beams; i++) s.seqs[i] = new_seq(cache);
    OK(beam_search(&s, prompt, n_prompt, &last));
    r.model = model;
    r.ctx = s.ctx;
    r.cache = cache;
    r.n_vocab = info.n_vocab;
    r.n_prompt = n_prompt;
    r.n_beams = n_beams;
    r.n_tokens = n_tokens;
    r.penalty = penalty;
    r.n_live = 1;
    memcpy(r.live[0].tokens, prompt, n_prompt * sizeof *prompt);
    r.live[0].n = n_prompt;
    search_fully(&r);
    assert_int_equal(s.n_best, r.n_done);
    for (i = 0; i < s.n_best; i++) {
        assert_int_equal(s.best[i].n, r.done[i].n - n_prompt);
        assert_memory_equal(s.best[i].tokens, r.done[i].tokens + n_prompt,
            s.best[i].n * sizeof(kvc_token));
        assert_memory_equal(&s.best[i].sum, &r.done[i].sum, sizeof(double));
        assert_memory_equal(&s.best[i].score, &r.done[i].score, sizeof(double));
        n_ended += s.best[i].n < n_tokens;
    }
    for (i = 0; i < n_beams; i++) kvc_seq_close(s.seqs[i]);
    kvc_cache_query(cache, &cache_info);
    assert_int_equal(cache_info.pages_free, cache_info.pages_total);
    free(s.log_p);
    kvc_ctx_free(s.ctx);
    kvc_cache_free(cache);
}

static void test_random_model(void **state) {
    static const model_shape shape = {.n_layers = 2, .n_embd = 32, .n_heads = 2, .n_kv_heads = 1,
        .n_ff = 48, .n_vocab = 300, .n_tokens = 300, .n_ctx = 256};
    kvc_token prompt[20];
    uint32_t n_beams;
    rig r;
    (void)state;
    rig_open(&r, &shape);
    for (n_beams = 1; n_beams <= 8; n_beams++) {
        random_tokens(prompt, 20, 300, n_beams);
        compare_searches(r.model, prompt, 20, n_beams, 24, 1.0);
        compare_searches(r.model, prompt, 3, n_beams, 12, 0.0);
    }
    rig_close(&r);
}

static void test_default_model(void **state) {
    static const char text[] = "<|system|>You are Mara. You keep an inn at the old bridge.<|end|>"
        "<|user|>Where is your inn?<|end|><|char|>";
    kvc_model_desc desc = {.path = "examples/models/tavern-q8_0.gguf"};
    kvc_token prompt[128];
    kvc_model *model;
    size_t n;
    (void)state;
    OK(kvc_model_open(&model, &desc, &last));
    OK(kvc_tokenize(model, text, strlen(text), KVC_TEXT_SPECIAL_PARSE, prompt, 128, &n, NULL,
        &last));
    n_ended = 0;
    compare_searches(model, prompt, n, 3, 24, 1.0);
    compare_searches(model, prompt, n, 4, 20, 0.6);
    print_message("%u continuations came to their end\n", n_ended);
    assert_true(n_ended >= 3);
    kvc_model_close(model);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_model),
        cmocka_unit_test(test_default_model)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
