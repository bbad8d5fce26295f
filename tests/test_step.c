/* The numeric contract, by memcmp. The bits of a logit depend on the weights, the tokens before it
   and the KV type, and on nothing else: not on how a prompt is cut, on threads, instruction set,
   page size, other sequences, forks or roll-backs. Each test computes a text cold and then some
   other way, for every kind of model in the table. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include <fenv.h>
#include <unistd.h>

#include "testing.h"

#define N 70                    /* positions of a text: two pages of 32 and a bit */

/* ---- the models ---- */

typedef struct kind {
    const char *name;
    kvc_kv_type kv;
    model_shape shape;
} kind;

#define TINY .n_embd = 64, .n_heads = 4, .n_kv_heads = 2, .n_ff = 96, .n_vocab = 48
static const kind kinds[] = {
    {"F32 kv f32", KVC_KV_F32, {TINY, .type = GGUF_F32}},
    {"F32 kv f16", KVC_KV_F16, {TINY, .type = GGUF_F32}},
    {"F16 kv f32", KVC_KV_F32, {TINY, .type = GGUF_F16}},
    {"F16 kv f16", KVC_KV_F16, {TINY, .type = GGUF_F16}},
    {"BF16 kv f32", KVC_KV_F32, {TINY, .type = GGUF_BF16}},
    {"BF16 kv f16", KVC_KV_F16, {TINY, .type = GGUF_BF16}},
    {"Q8_0 kv f32", KVC_KV_F32, {TINY, .type = GGUF_Q8_0}},
    {"Q8_0 kv f16", KVC_KV_F16, {TINY, .type = GGUF_Q8_0}},
    {"Q4_0 kv f32", KVC_KV_F32, {TINY, .type = GGUF_Q4_0}},
    {"Q4_0 kv f16", KVC_KV_F16, {TINY, .type = GGUF_Q4_0}},
    {"window 20", KVC_KV_F32, {TINY, .window = 20, .tied = 1}},
    {"windows of two lengths", KVC_KV_F16, {TINY, .window = 20, .pattern = 2, .n_layers = 3}},
    {"odd sizes, MQA, biases", KVC_KV_F16,
        {.n_embd = 50, .n_heads = 3, .n_kv_heads = 1, .head_dim = 20, .n_ff = 71, .n_vocab = 37,
         .biases = 1}},
    {"YaRN, one head of 80", KVC_KV_F32,
        {.n_embd = 96, .n_heads = 1, .head_dim = 80, .n_ff = 64, .n_vocab = 33, .n_layers = 1,
         .rope = MODEL_ROPE_YARN, .rope_orig_ctx = 32, .type = GGUF_BF16}},
    {"F32 kv q8", KVC_KV_Q8, {TINY, .type = GGUF_F32}},
    {"Q8_0 kv q4", KVC_KV_Q4, {TINY, .type = GGUF_Q8_0}},
    {"windows, kv q8, heads of 80 and 48", KVC_KV_Q8,
        {TINY, .window = 20, .pattern = 2, .n_layers = 3, .head_dim = 80, .head_dim_v = 48}},
    {"odd sizes, kv q4", KVC_KV_Q4,
        {.n_embd = 50, .n_heads = 3, .n_kv_heads = 1, .head_dim = 20, .n_ff = 71, .n_vocab = 37,
         .biases = 1}}
};

/* A model with a text and its logits, computed cold. */
typedef struct setting {
    const char *name;
    rig rig;
    kvc_kv_type kv;
    size_t n_vocab;
    kvc_token text[N];
    float *cold;                /* [N, n_vocab] */
    float *out;                 /* [N, n_vocab] scratch */
} setting;

static void setting_open(setting *s, const kind *k) {
    s->name = k->name;
    s->kv = k->kv;
    rig_open(&s->rig, &k->shape);
    s->n_vocab = s->rig.info.n_vocab;
    random_tokens(s->text, N, s->rig.info.n_vocab, 5);
    s->cold = cold_run(&s->rig, s->text, N, k->kv);
    s->out = (float *)gguf_must(malloc(N * s->n_vocab * sizeof *s->out));
}

static void setting_close(setting *s) {
    free(s->cold);
    free(s->out);
    rig_close(&s->rig);
}

static void each_kind(void (*test)(setting *)) {
    size_t i;
    for (i = 0; i < COUNT(kinds); i++) {
        setting s;
        setting_open(&s, &kinds[i]);
        test(&s);
        setting_close(&s);
    }
}

/* ---- short forms ---- */

/* Prefills text[from..to) asking for every row, and compares all of them. */
static void prefill_and_compare(setting *s, kvc_ctx *ctx, kvc_seq *seq, size_t from, size_t to) {
    size_t rows[N], n = to - from, i;
    for (i = 0; i < n; i++) rows[i] = i;
    assert_int_equal(kvc_seq_length(seq), from);
    OK(kvc_prefill_rows(ctx, seq, s->text + from, n, rows, n, s->out, &last));
    SAME(s->out, s->cold + from * s->n_vocab, n, s->n_vocab, s->name);
    assert_int_equal(kvc_seq_length(seq), to);
}

static void decode_and_compare(setting *s, kvc_ctx *ctx, kvc_seq *seq, size_t from, size_t to) {
    const float *logits;
    size_t i;
    for (i = from; i < to; i++) {
        OK(kvc_decode(ctx, seq, s->text[i], &logits, &last));
        SAME(logits, s->cold + i * s->n_vocab, 1, s->n_vocab, s->name);
    }
}

/* The whole text with a context and a cache of these properties: prefill, the last ones decoded. */
static void whole_text(setting *s, uint32_t n_batch, uint32_t n_threads, kvc_isa isa,
    uint32_t page_size) {
    kvc_cache *cache = new_cache(&s->rig, N, 1, page_size, s->kv);
    kvc_ctx *ctx = new_ctx(&s->rig, n_batch, n_threads, isa);
    kvc_seq *seq = new_seq(cache);
    prefill_and_compare(s, ctx, seq, 0, N - 3);
    decode_and_compare(s, ctx, seq, N - 3, N);
    kvc_seq_close(seq);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
}

/* ---- cutting a prompt ---- */

/* In two, at every step-th place. */
static void split(setting *s, kvc_isa isa, size_t step) {
    kvc_cache *cache = new_cache(&s->rig, N, 1, 0, s->kv);
    kvc_ctx *ctx = new_ctx(&s->rig, 0, 1, isa);
    size_t cut;
    for (cut = 1; cut < N; cut += step) {
        kvc_seq *seq = new_seq(cache);
        prefill_and_compare(s, ctx, seq, 0, cut);
        prefill_and_compare(s, ctx, seq, cut, N);
        kvc_seq_close(seq);
    }
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
}

static void split_everywhere(setting *s) {
    split(s, KVC_ISA_BEST, 1);
}

static void split_base(setting *s) {
    split(s, KVC_ISA_BASE, 11);
}

/* Equal pieces of every size up to 17, and the same cuts made by n_batch. */
static void pieces(setting *s) {
    kvc_cache *cache = new_cache(&s->rig, N, 1, 0, s->kv);
    uint32_t size;
    for (size = 1; size <= 17; size++) {
        kvc_ctx *ctx = new_ctx(&s->rig, size, 1, KVC_ISA_BEST);
        kvc_seq *seq = new_seq(cache);
        size_t at;
        for (at = 0; at < N; at += size)
            prefill_and_compare(s, ctx, seq, at, at + size < N ? at + size : N);
        OK(kvc_seq_rollback(seq, 0));
        prefill_and_compare(s, ctx, seq, 0, N);
        kvc_seq_close(seq);
        kvc_ctx_free(ctx);
    }
    kvc_cache_free(cache);
    whole_text(s, 64, 1, KVC_ISA_BEST, 0);
    whole_text(s, 1000, 1, KVC_ISA_BEST, 0);
}

static void decode_all(setting *s) {
    kvc_cache *cache = new_cache(&s->rig, N, 1, 0, s->kv);
    kvc_ctx *ctx = new_ctx(&s->rig, 1, 1, KVC_ISA_BEST);
    kvc_seq *seq = new_seq(cache);
    decode_and_compare(s, ctx, seq, 0, N);
    kvc_seq_close(seq);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
}

/* ---- which rows are asked for ---- */

static void chosen_rows(setting *s) {
    kvc_cache *cache = new_cache(&s->rig, N, 1, 0, s->kv);
    kvc_ctx *ctx = new_ctx(&s->rig, 16, 1, KVC_ISA_BEST);
    kvc_ctx_info info;
    const float *logits;
    uint64_t state = 11, expected = 0;
    int round;
    for (round = 0; round < 12; round++) {
        kvc_seq *seq = new_seq(cache);
        size_t rows[N], n = 0, i;
        for (i = 0; i < N; i++) if (model_random(&state) % 12 < (uint64_t)round) rows[n++] = i;
        OK(kvc_prefill_rows(ctx, seq, s->text, N, rows, n, n ? s->out : NULL, &last));
        for (i = 0; i < n; i++)
            SAME(s->out + i * s->n_vocab, s->cold + rows[i] * s->n_vocab, 1, s->n_vocab, s->name);
        expected += n;
        kvc_seq_close(seq);
    }
    kvc_ctx_query(ctx, &info);
    assert_int_equal(info.n_logit_rows, expected);      /* only the rows asked for were computed */
    assert_int_equal(info.n_rows, 12 * N);
    {
        kvc_seq *seq = new_seq(cache);
        OK(kvc_prefill(ctx, seq, s->text, N - 1, NULL, &last));
        OK(kvc_prefill(ctx, seq, s->text + N - 1, 1, &logits, &last));
        SAME(logits, s->cold + (N - 1) * s->n_vocab, 1, s->n_vocab, s->name);
        kvc_seq_close(seq);
    }
    kvc_ctx_query(ctx, &info);
    assert_int_equal(info.n_logit_rows, expected + 1);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
}

/* ---- who computes, and where K and V lie ---- */

static void threads(setting *s) {
    uint32_t n;
    for (n = 1; n <= 3; n++) {
        whole_text(s, 7, n, KVC_ISA_BEST, 0);
        whole_text(s, 256, n, KVC_ISA_BEST, 0);
    }
}

static void instruction_sets(setting *s) {
    kvc_isa isa[5];
    const char *name[5];
    size_t n = isas_here(&s->rig, isa, name), i;
    for (i = 0; i < n; i++) {
        whole_text(s, 256, 1, isa[i], 0);
        whole_text(s, 5, 2, isa[i], 0);
    }
}

/* The same file opened again, its weights read elsewhere or packed by several threads. */
static void weights(setting *s) {
    kvc_model *model = s->rig.model;
    kvc_model_desc desc = {0};
    kvc_model_info info;
    uint32_t round;
    desc.data = s->rig.image;
    desc.data_size = s->rig.image_size;
    for (round = 0; round < 3; round++) {
        desc.weights = round == 0 ? KVC_WEIGHTS_IN_PLACE : KVC_WEIGHTS_PACKED;
        desc.n_threads = 2 * round;
        OK(kvc_model_open(&s->rig.model, &desc, &last));
        kvc_model_query(s->rig.model, &info);
        assert_true(round > 0 || info.packed_size == 0);
        assert_true(info.memory_size > info.packed_size);
        whole_text(s, 7, 1, KVC_ISA_BEST, 0);
        whole_text(s, 64, 2, KVC_ISA_BEST, 0);
        whole_text(s, 64, 1, KVC_ISA_BASE, 0);
        kvc_model_close(s->rig.model);
    }
    s->rig.model = model;
}

static void page_sizes(setting *s) {
    uint32_t size;
    for (size = 16; size <= 256; size *= 2) whole_text(s, 48, 1, KVC_ISA_BEST, size);
}

/* A host may round upwards; a step must not care, nor change it. */
static void rounding_modes(setting *s) {
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    size_t i;
    for (i = 0; i < COUNT(modes); i++) {
        kvc_cache *cache = new_cache(&s->rig, N, 1, 0, s->kv);
        kvc_ctx *ctx = new_ctx(&s->rig, 0, 2, KVC_ISA_BEST);
        kvc_seq *seq = new_seq(cache);
        const float *logits;
        int mode;
        fesetround(modes[i]);
        OK(kvc_prefill(ctx, seq, s->text, N - 1, NULL, &last));
        OK(kvc_decode(ctx, seq, s->text[N - 1], &logits, &last));
        mode = fegetround();
        fesetround(FE_TONEAREST);
        assert_int_equal(mode, modes[i]);
        SAME(logits, s->cold + (N - 1) * s->n_vocab, 1, s->n_vocab, s->name);
        kvc_seq_close(seq);
        kvc_ctx_free(ctx);
        kvc_cache_free(cache);
    }
}

/* The tables that a model is opened with (RoPE's angles) are numbers of the contract, too. */
static void test_open_rounding(void **state) {
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    size_t k, i;
    (void)state;
    for (k = 0; k < COUNT(kinds); k++) {
        for (i = 0; i < COUNT(modes); i++) {
            setting s;
            kvc_model *first, *second;
            kvc_model_desc desc = {0};
            float *cold;
            setting_open(&s, &kinds[k]);
            desc.data = s.rig.image;
            desc.data_size = s.rig.image_size;
            fesetround(modes[i]);
            OK(kvc_model_open(&second, &desc, &last));
            fesetround(FE_TONEAREST);
            first = s.rig.model;
            s.rig.model = second;
            cold = cold_run(&s.rig, s.text, N, s.kv);
            SAME(cold, s.cold, N, s.n_vocab, s.name);
            free(cold);
            s.rig.model = first;
            kvc_model_close(second);
            setting_close(&s);
        }
    }
}

/* ---- the plan ---- */

/* The cursor has 16 bits for the tile of an operation, and each waiting thread counts one up. */
static void test_tile_counts(void **state) {
    static const uint32_t rows[] = {1, 2, 255, 257, 4096, 9000, 1u << 17, 1u << 20};
    static const model_shape shape = {.n_layers = 1, .n_embd = 64, .n_heads = 4, .n_ff = 9000,
        .n_vocab = 20000, .n_tokens = 1};
    rig r;
    kvc_cache *cache;
    kvc_seq *seq;
    kvc_ctx *ctx;
    size_t i;
    uint32_t op;
    (void)state;
    rig_open(&r, &shape);
    ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
    /* each row a group of its own: the same position again and again */
    ctx->plan.rows = (kvc__row *)gguf_must(calloc(1u << 20, sizeof *ctx->plan.rows));
    ctx->plan.groups = (kvc__group *)gguf_must(calloc(1u << 20, sizeof *ctx->plan.groups));
    cache = new_cache(&r, 16, 1, 16, KVC_KV_F32);
    seq = new_seq(cache);
    for (i = 0; i < 1u << 20; i++) ctx->plan.rows[i].seq = seq;
    for (i = 0; i < COUNT(rows); i++) {
        ctx->plan.n_rows = ctx->plan.n_wanted = rows[i];
        kvc__plan_prepare(&ctx->plan);
        for (op = 0; op < ctx->plan.n_ops; op++) {
            if (ctx->plan.ops[op].n_tiles <= 65535 - KVC__MAX_THREADS) continue;
            print_error("%u rows: operation %u has %u tiles\n", rows[i], op,
                ctx->plan.ops[op].n_tiles);
            fail();
        }
    }
    free(ctx->plan.rows);
    free(ctx->plan.groups);
    kvc_cache_free(cache);
    kvc_ctx_free(ctx);
    rig_close(&r);
}

/* ---- going back, going apart ---- */

/* Other tokens are written over the same positions in between. */
static void roll_back(setting *s) {
    kvc_cache *cache = new_cache(&s->rig, N, 1, 16, s->kv);
    kvc_ctx *ctx = new_ctx(&s->rig, 16, 1, KVC_ISA_BEST);
    kvc_seq *seq = new_seq(cache);
    kvc_token other[N];
    uint64_t state = 17;
    int round;
    random_tokens(other, N, (uint32_t)s->n_vocab, 18);
    prefill_and_compare(s, ctx, seq, 0, N);
    for (round = 0; round < 40; round++) {
        uint32_t back = (uint32_t)(model_random(&state) % N), n = N - back;
        OK(kvc_seq_rollback(seq, back));
        assert_int_equal(kvc_seq_length(seq), back);
        n = 1 + (uint32_t)(model_random(&state) % n);
        OK(kvc_prefill(ctx, seq, other, n, NULL, &last));
        OK(kvc_seq_rollback(seq, back));
        prefill_and_compare(s, ctx, seq, back, N);
    }
    kvc_seq_close(seq);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
}

/* Two texts grow on one cache in turns, computed by different contexts, beside a third that is in
   the way. */
static void interleave(setting *s) {
    kvc_cache *cache = new_cache(&s->rig, N, 3, 16, s->kv);
    kvc_ctx *ctx[2];
    kvc_seq *seq[2], *third = new_seq(cache);
    size_t at[2] = {0, 0};
    uint64_t state = 23;
    ctx[0] = new_ctx(&s->rig, 9, 1, KVC_ISA_BEST);
    ctx[1] = new_ctx(&s->rig, 256, 2, KVC_ISA_BEST);
    seq[0] = new_seq(cache);
    seq[1] = new_seq(cache);
    while (at[0] < N || at[1] < N) {
        int i = (int)(model_random(&state) % 2);
        size_t n = 1 + (size_t)(model_random(&state) % 9);
        kvc_ctx *c = ctx[model_random(&state) % 2];
        if (n > N - at[i]) n = N - at[i];
        if (n == 1) decode_and_compare(s, c, seq[i], at[i], at[i] + 1);
        else if (n) prefill_and_compare(s, c, seq[i], at[i], at[i] + n);
        at[i] += n;
        if (kvc_seq_length(third) < N)
            OK(kvc_decode(c, third, s->text[N - 1], NULL, &last));
    }
    kvc_seq_close(seq[0]);
    kvc_seq_close(seq[1]);
    kvc_seq_close(third);
    kvc_ctx_free(ctx[0]);
    kvc_ctx_free(ctx[1]);
    kvc_cache_free(cache);
}

/* A fork goes another way, in turns with its origin; both give what each text gives alone. The
   origin ends first, and the fork takes over its text. */
static void fork_at(setting *s, size_t at) {
    kvc_cache *cache = new_cache(&s->rig, N, 2, 16, s->kv);
    kvc_ctx *ctx = new_ctx(&s->rig, 32, 1, KVC_ISA_BEST);
    kvc_seq *seq = new_seq(cache), *fork;
    kvc_token text[N];
    float *cold;
    const float *logits;
    size_t i, n;
    memcpy(text, s->text, sizeof text);
    random_tokens(text + at, N - at, (uint32_t)s->n_vocab, 31 + at);
    cold = cold_run(&s->rig, text, N, s->kv);
    prefill_and_compare(s, ctx, seq, 0, at);
    OK(kvc_seq_fork(&fork, seq, &last));
    assert_int_equal(kvc_seq_length(fork), at);
    for (i = at; i < N; i += n) {
        n = N - i < 3 ? N - i : 3;
        OK(kvc_prefill(ctx, fork, text + i, n, &logits, &last));
        SAME(logits, cold + (i + n - 1) * s->n_vocab, 1, s->n_vocab, s->name);
        prefill_and_compare(s, ctx, seq, i, i + n);
    }
    OK(kvc_seq_rollback(fork, (uint32_t)at));
    kvc_seq_close(seq);
    prefill_and_compare(s, ctx, fork, at, N);
    kvc_seq_close(fork);
    free(cold);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
}

static void forks(setting *s) {
    static const size_t at[] = {1, 15, 16, 17, 40, 48, 64, 69};
    size_t i;
    for (i = 0; i < COUNT(at); i++) fork_at(s, at[i]);
}

/* ---- any schedule ---- */

#define N_STORIES 4
#define N_CTX 112

/* A sequence, the tokens it holds and a hash of the logits after each (0: not asked for). */
typedef struct story {
    kvc_seq *seq;
    kvc_token text[N_CTX];
    uint64_t hash[N_CTX];
    size_t n;
} story;

/* Recomputes a story cold and compares every hash. */
static void check_story(setting *s, const story *t) {
    float *cold;
    size_t i;
    if (!t->n) return;
    cold = cold_run(&s->rig, t->text, t->n, s->kv);
    for (i = 0; i < t->n; i++) {
        uint64_t want = hash_floats(cold + i * s->n_vocab, s->n_vocab, 1);
        if (!t->hash[i] || t->hash[i] == want) continue;
        print_error("%s: position %u of %u differs\n", s->name, (unsigned)i, (unsigned)t->n);
        fail();
    }
    free(cold);
}

static void close_story(setting *s, story *t) {
    if (!t->seq) return;
    check_story(s, t);
    kvc_seq_close(t->seq);
    t->seq = NULL;
}

static void extend_story(setting *s, story *t, kvc_ctx *ctx, uint64_t *state) {
    size_t n = 1 + (size_t)(model_random(state) % 24), i, rows[N_CTX], n_rows = 0;
    const float *logits;
    if (n > N_CTX - t->n) n = N_CTX - t->n;
    if (!n) return;
    random_tokens(t->text + t->n, n, (uint32_t)s->n_vocab, model_random(state));
    for (i = 0; i < n; i++) t->hash[t->n + i] = 0;
    if (n == 1) {
        OK(kvc_decode(ctx, t->seq, t->text[t->n], &logits, &last));
        t->hash[t->n] = hash_floats(logits, s->n_vocab, 1);
    } else {
        for (i = 0; i < n; i++) if (model_random(state) % 3 == 0) rows[n_rows++] = i;
        OK(kvc_prefill_rows(ctx, t->seq, t->text + t->n, n, rows, n_rows, s->out, &last));
        for (i = 0; i < n_rows; i++) {
            t->hash[t->n + rows[i]] = hash_floats(s->out + i * s->n_vocab, s->n_vocab, 1);
        }
    }
    t->n += n;
}

static void random_action(setting *s, story *stories, kvc_cache *cache, kvc_ctx **ctx, size_t n_ctx,
    uint64_t *state) {
    story *t = &stories[model_random(state) % N_STORIES];
    story *u = &stories[model_random(state) % N_STORIES];
    uint64_t action = model_random(state) % 10;
    if (!t->seq) {
        t->seq = new_seq(cache);
        t->n = 0;
    } else if (action == 0) {
        close_story(s, t);
    } else if (action == 1 && u != t) {
        kvc_seq *seq;
        close_story(s, u);
        OK(kvc_seq_fork(&seq, t->seq, &last));
        *u = *t;
        u->seq = seq;
    } else if (action <= 3) {
        t->n = t->n ? (size_t)(model_random(state) % (t->n + 1)) : 0;
        OK(kvc_seq_rollback(t->seq, (uint32_t)t->n));
    } else {
        extend_story(s, t, ctx[model_random(state) % n_ctx], state);
    }
    if (t->seq) assert_int_equal(kvc_seq_length(t->seq), t->n);
}

static void schedule(setting *s) {
    kvc_cache *cache = new_cache(&s->rig, N_CTX, N_STORIES, 16, s->kv);
    story stories[N_STORIES];
    kvc_ctx *ctx[4];
    kvc_cache_info info;
    uint64_t state = 41;
    size_t i;
    memset(stories, 0, sizeof stories);
    ctx[0] = new_ctx(&s->rig, 1, 1, KVC_ISA_BEST);
    ctx[1] = new_ctx(&s->rig, 7, 3, KVC_ISA_BEST);
    ctx[2] = new_ctx(&s->rig, 64, 2, KVC_ISA_AVX2);
    ctx[3] = new_ctx(&s->rig, 0, 1, KVC_ISA_BASE);
    for (i = 0; i < 250; i++) random_action(s, stories, cache, ctx, COUNT(ctx), &state);
    for (i = 0; i < N_STORIES; i++) close_story(s, &stories[i]);
    kvc_cache_query(cache, &info);
    assert_int_equal(info.pages_free, info.pages_total);
    for (i = 0; i < COUNT(ctx); i++) kvc_ctx_free(ctx[i]);
    kvc_cache_free(cache);
}

/* ---- long texts: attention merges spans of 256 positions ---- */

#define LONG 600

/* Prefill up to each cut in turn, decode three tokens there, go back, go on. */
static void long_text(const kind *k, const float *cold, rig *r, const kvc_token *text,
    uint32_t n_batch, uint32_t n_threads, kvc_isa isa, uint32_t page_size) {
    static const uint32_t cuts[] = {200, 255, 256, 257, 510, 512, 513, 597};
    kvc_cache *cache = new_cache(r, LONG, 1, page_size, k->kv);
    kvc_ctx *ctx = new_ctx(r, n_batch, n_threads, isa);
    kvc_seq *seq = new_seq(cache);
    size_t i, j, at = 0;
    for (i = 0; i < COUNT(cuts); i++) {
        const float *logits;
        OK(kvc_prefill(ctx, seq, text + at, cuts[i] - at, &logits, &last));
        at = cuts[i];
        SAME(logits, cold + (at - 1) * r->info.n_vocab, 1, r->info.n_vocab, k->name);
        for (j = at; j < at + 3; j++) {
            OK(kvc_decode(ctx, seq, text[j], &logits, &last));
            SAME(logits, cold + j * r->info.n_vocab, 1, r->info.n_vocab, k->name);
        }
        OK(kvc_seq_rollback(seq, (uint32_t)at));
    }
    kvc_seq_close(seq);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
}

static void test_long(void **state) {
    static const kind longer[] = {
        {"long, kv f32", KVC_KV_F32, {TINY}},
        {"long, kv f16", KVC_KV_F16, {TINY, .type = GGUF_Q8_0}},
        {"long, window 300", KVC_KV_F32, {TINY, .window = 300}},
        {"long, kv q8", KVC_KV_Q8, {TINY, .head_dim = 64}},
        {"long, kv q4", KVC_KV_Q4, {TINY, .window = 300, .pattern = 2}},
    };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(longer); i++) {
        kvc_token text[LONG];
        rig r;
        float *cold;
        rig_open(&r, &longer[i].shape);
        random_tokens(text, LONG, r.info.n_vocab, 51);
        cold = cold_run(&r, text, LONG, longer[i].kv);
        long_text(&longer[i], cold, &r, text, 256, 1, KVC_ISA_BEST, 32);
        long_text(&longer[i], cold, &r, text, 100, 3, KVC_ISA_BEST, 16);
        long_text(&longer[i], cold, &r, text, 600, 2, KVC_ISA_AVX2, 256);
        long_text(&longer[i], cold, &r, text, 64, 1, KVC_ISA_BASE, 128);
        free(cold);
        rig_close(&r);
    }
}

/* ---- steps of few rows after a long text: its spans are cut into runs ---- */

#define FAR 4700                /* more spans than are kept apart for 8 rows */

/* Steps of these many rows at the end of the text, undone after each. */
static void check_runs(const rig *r, kvc_seq *seq, const kvc_token *text, const float *want,
    uint32_t n_threads, kvc_isa isa) {
    static const size_t steps[] = {1, 2, 7, 8, 9, 30};
    kvc_ctx *ctx = new_ctx(r, 32, n_threads, isa);
    float *got = (float *)gguf_must(malloc(30 * r->info.n_vocab * sizeof *got));
    size_t rows[30], i;
    for (i = 0; i < COUNT(rows); i++) rows[i] = i;
    for (i = 0; i < COUNT(steps); i++) {
        OK(kvc_prefill_rows(ctx, seq, text, steps[i], rows, steps[i], got, &last));
        SAME(got, want, steps[i], r->info.n_vocab, "runs");
        OK(kvc_seq_rollback(seq, kvc_seq_length(seq) - (uint32_t)steps[i]));
    }
    free(got);
    kvc_ctx_free(ctx);
}

static void test_runs(void **state) {
    static const model_shape shapes[] = {
        {TINY, .n_layers = 1},
        {.n_layers = 1, .n_embd = 36, .n_heads = 6, .n_kv_heads = 1, .n_ff = 32, .n_vocab = 20},
        {TINY, .n_layers = 1, .window = 1100}, {TINY, .n_layers = 1}, {TINY, .n_layers = 1}
    };
    static const kvc_kv_type kvs[] = {KVC_KV_F32, KVC_KV_F16, KVC_KV_F32, KVC_KV_Q8, KVC_KV_Q4};
    static const uint32_t ends[] = {520, 1500, FAR - 30};
    size_t i, j;
    (void)state;
    for (i = 0; i < COUNT(shapes); i++) {
        kvc_kv_type kv = kvs[i];
        kvc_token text[FAR];
        kvc_ctx *ctx;
        kvc_cache *cache;
        kvc_seq *seq;
        float *cold;
        rig r;
        rig_open(&r, &shapes[i]);
        random_tokens(text, FAR, r.info.n_vocab, 61);
        cold = cold_run(&r, text, FAR, kv);
        cache = new_cache(&r, FAR, 1, 0, kv);
        ctx = new_ctx(&r, 0, 1, KVC_ISA_BEST);
        seq = new_seq(cache);
        for (j = 0; j < COUNT(ends); j++) {
            const float *logits, *want = cold + ends[j] * r.info.n_vocab;
            uint32_t at = kvc_seq_length(seq);
            OK(kvc_prefill(ctx, seq, text + at, ends[j] - at, &logits, &last));
            check_runs(&r, seq, text + ends[j], want, 2, KVC_ISA_BEST);
            check_runs(&r, seq, text + ends[j], want, 3, KVC_ISA_AVX2);
            check_runs(&r, seq, text + ends[j], want, 16, KVC_ISA_BEST);
        }
        kvc_seq_close(seq);
        kvc_ctx_free(ctx);
        kvc_cache_free(cache);
        free(cold);
        rig_close(&r);
    }
}

/* A thread that is held up between opening an operation and showing it must not take back what
   others have shown since. */
static void test_late_show(void **state) {
    kvc__cursor c;
    kvc__run runs[2];
    (void)state;
    memset(&c, 0, sizeof c);
    memset(runs, 0, sizeof runs);
    c.runs = runs;
    c.n_runs = 2;
    kvc__cursor_open(&c, 1);
    kvc__cursor_open(&c, 3);
    kvc__cursor_show(&c, 3);
    kvc__cursor_show(&c, 1);
    assert_int_equal(kvc__atomic_load(&c.op), 3);
    assert_int_equal(kvc__atomic_load(&runs[0].at) >> 16, 3);
    assert_int_equal(kvc__atomic_load(&runs[1].at) >> 16, 3);
}

/* Far more threads than cores: each is held up at every place in the end. Hanging fails. */
static void test_crowd(void **state) {
    static const model_shape shape = {TINY, .n_layers = 2};
    static const uint32_t threads[] = {3, 8, 48};
    kvc_token text[256];
    const float *logits;
    float *cold;
    size_t i, j;
    rig r;
    (void)state;
    rig_open(&r, &shape);
    random_tokens(text, 256, r.info.n_vocab, 71);
    cold = cold_run(&r, text, 256, KVC_KV_F32);
    alarm(300);
    for (i = 0; i < COUNT(threads); i++) {
        kvc_cache *cache = new_cache(&r, 256, 1, 0, KVC_KV_F32);
        kvc_ctx *ctx = new_ctx(&r, 16, threads[i], KVC_ISA_BEST);
        kvc_seq *seq = new_seq(cache);
        for (j = 0; j < 2560; j++) {
            const float *want = cold + (j % 256) * r.info.n_vocab;
            if (j % 256 == 0) assert_int_equal(kvc_seq_rollback(seq, 0), KVC_OK);
            OK(kvc_decode(ctx, seq, text[j % 256], &logits, &last));
            assert_memory_equal(logits, want, r.info.n_vocab * sizeof *want);
        }
        kvc_seq_close(seq);
        kvc_ctx_free(ctx);
        kvc_cache_free(cache);
    }
    alarm(0);
    free(cold);
    rig_close(&r);
}

/* ---- pages in common ---- */

/* Only whole spans that both sequences see count, and only where nothing was removed. */
static void test_common(void **state) {
    static const model_shape shape = {TINY};
    static const struct {
        uint32_t back, more, spans;
    } cases[] = {{0, 1, 4}, {1, 1, 3}, {0, 100, 4}, {511, 1, 2}, {512, 1, 2}, {513, 600, 1},
        {800, 1, 0}, {1024, 5, 0}};
    kvc_token text[1024];
    kvc_cache *cache;
    kvc_seq *seq, *fork;
    kvc_ctx *ctx;
    size_t i;
    rig r;
    (void)state;
    rig_open(&r, &shape);
    cache = new_cache(&r, 1400, 2, 16, KVC_KV_F32);
    ctx = new_ctx(&r, 256, 1, KVC_ISA_BEST);
    random_tokens(text, 1024, r.info.n_vocab, 1);
    seq = new_seq(cache);
    OK(kvc_prefill(ctx, seq, text, 1024, NULL, &last));
    for (i = 0; i < COUNT(cases); i++) {
        kvc__row a, b;
        kvc_request q[2];
        int k;
        OK(kvc_seq_fork(&fork, seq, &last));
        OK(kvc_seq_rollback(fork, 1024 - cases[i].back));
        OK(kvc_prefill(ctx, fork, text, cases[i].more, NULL, &last));
        a.seq = seq;
        a.slot = 1024;
        b.seq = fork;
        b.slot = kvc_seq_length(fork);
        assert_int_equal(kvc__common_spans(&ctx->plan, &a, &b), cases[i].spans);
        assert_int_equal(kvc__common_spans(&ctx->plan, &b, &a), cases[i].spans);
        memset(q, 0, sizeof q);
        for (k = 0; k < 2; k++) {
            q[k].seq = k ? fork : seq;
            q[k].tokens = text;
            q[k].n_tokens = 1;
        }
        OK(kvc_batch(ctx, q, 2, &last));
        assert_int_equal(ctx->plan.n_groups, cases[i].spans ? 1 : 2);
        assert_int_equal(ctx->plan.groups[0].n_common, cases[i].spans);
        OK(kvc_seq_rollback(seq, 1024));
        if (cases[i].spans) OK(kvc_seq_remove(fork, 100, 110, &last));
        assert_int_equal(kvc__common_spans(&ctx->plan, &a, &b), 0);
        kvc_seq_close(fork);
    }
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* In a time slice groups get shorter as the text gets longer. */
static void test_short_tiles(void **state) {
    static const model_shape shape = {TINY};
    kvc_cache *cache;
    kvc_seq *seq;
    kvc_ctx *ctx;
    uint32_t i, rows, at, before = UINT32_MAX;
    rig r;
    (void)state;
    rig_open(&r, &shape);
    cache = new_cache(&r, 1 << 18, 1, 256, KVC_KV_Q4);
    ctx = new_ctx(&r, 64, 1, KVC_ISA_BEST);
    seq = new_seq(cache);
    ctx->plan.n_rows = 64;
    for (at = 0; at < 1 << 18; at = 2 * at + 64) {
        for (i = 0; i < 64; i++) {
            ctx->plan.rows[i].seq = seq;
            ctx->plan.rows[i].slot = at + i;
        }
        ctx->plan.is_sliced = 0;
        kvc__plan_prepare(&ctx->plan);
        rows = ctx->plan.groups[0].n_rows;
        assert_int_equal(rows, KVC__MAX_QUERIES / 2);
        ctx->plan.is_sliced = 1;
        kvc__plan_prepare(&ctx->plan);
        rows = ctx->plan.groups[0].n_rows;
        assert_true(rows >= 1 && rows <= before);
        assert_true(rows == 1 || 2 * rows * (at / 256) <= KVC__SHORT_WORK);
        before = rows;
    }
    assert_int_equal(before, 1);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* ---- the list ---- */

#define EACH_KIND(X) \
    X(split_everywhere) X(split_base) X(pieces) X(decode_all) X(chosen_rows) X(threads) \
    X(instruction_sets) X(weights) X(page_sizes) X(rounding_modes) X(roll_back) X(interleave) \
    X(forks) \
    X(schedule)

#define DEFINE(name) static void test_##name(void **state) { (void)state; each_kind(name); }
EACH_KIND(DEFINE)
#define ENTRY(name) cmocka_unit_test(test_##name),

int main(void) {
    const struct CMUnitTest tests[] = {
        EACH_KIND(ENTRY)
        cmocka_unit_test(test_open_rounding),
        cmocka_unit_test(test_tile_counts),
        cmocka_unit_test(test_long),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_late_show),
        cmocka_unit_test(test_crowd),
        cmocka_unit_test(test_common),
        cmocka_unit_test(test_short_tiles)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
