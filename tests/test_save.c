/* Saved sequences: what is loaded goes on with the same bits; what is foreign, cut short or damaged
   is refused whole. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include "testing.h"

/* A cache of HEAVY_CTX positions is one for KVC_POLICY_HEAVY. */
enum { N_VOCAB = 48, PAGE = 16, N = 90, MUTANTS = 10000, HEAVY_CTX = 80 };
#define TINY .n_embd = 32, .n_heads = 2, .n_kv_heads = 1, .n_ff = 48, .n_vocab = N_VOCAB, \
    .n_ctx = 4096

/* ---- objects ---- */

typedef struct desk {
    rig rig;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;               /* N tokens of text */
    kvc_token text[2 * N];
    unsigned char *file;
    size_t size;
} desk;

static kvc_cache *desk_cache(const desk *d, kvc_kv_type kv, uint32_t page_size, uint32_t n_ctx) {
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    desc.model = d->rig.model;
    desc.n_ctx = n_ctx;
    desc.n_seqs = 3;
    desc.page_size = page_size;
    desc.n_batch = 16;
    desc.n_back = 5;
    desc.n_heavy = n_ctx == HEAVY_CTX ? 30 : 0;
    desc.type_k = desc.type_v = kv;
    OK(kvc_cache_new(&cache, &desc, &last));
    return cache;
}

static void desk_save(desk *d, kvc_save what) {
    size_t written = 0, needed = (size_t)kvc_seq_save_size(d->seq, what);
    free(d->file);
    d->file = (unsigned char *)gguf_must(malloc(needed));
    d->size = needed;
    OK(kvc_seq_save_memory(d->seq, what, d->file, needed, &written, &last));
    assert_int_equal(written, needed);
}

static void desk_open(desk *d, const model_shape *shape, kvc_kv_type kv) {
    memset(d, 0, sizeof *d);
    rig_open(&d->rig, shape);
    random_tokens(d->text, 2 * N, N_VOCAB, 3);
    d->cache = desk_cache(d, kv, PAGE, 400);
    d->ctx = new_ctx(&d->rig, 64, 1, KVC_ISA_BEST);
    d->seq = new_seq(d->cache);
    OK(kvc_prefill(d->ctx, d->seq, d->text, N, NULL, &last));
}

static void desk_close(desk *d) {
    kvc_cache_info info;
    kvc_seq_close(d->seq);
    kvc_cache_query(d->cache, &info);
    assert_int_equal(info.pages_free, info.pages_total);
    assert_int_equal(info.n_seqs_open, 0);
    free(d->file);
    kvc_ctx_free(d->ctx);
    kvc_cache_free(d->cache);
    rig_close(&d->rig);
}

/* Goes on with both sequences; the logits must be the same. */
static void same_future(desk *d, kvc_seq *other, size_t n) {
    static float want[N * N_VOCAB], got[N * N_VOCAB];
    size_t rows[N], i;
    for (i = 0; i < n; i++) rows[i] = i;
    OK(kvc_prefill_rows(d->ctx, d->seq, d->text + N, n, rows, n, want, &last));
    OK(kvc_prefill_rows(d->ctx, other, d->text + N, n, rows, n, got, &last));
    SAME(got, want, n, N_VOCAB, "after loading");
}

static const struct {
    const char *name;
    kvc_kv_type kv;
    model_shape shape;
} kinds[] = {
    {"f32", KVC_KV_F32, {TINY}}, {"f16", KVC_KV_F16, {TINY, .head_dim = 20, .head_dim_v = 24}},
    {"windows", KVC_KV_F16, {TINY, .window = 20, .pattern = 2, .n_layers = 3}},
    {"windows only", KVC_KV_F32, {TINY, .window = 33}},
    {"q8", KVC_KV_Q8, {TINY, .head_dim = 48, .head_dim_v = 80}},
    {"q4", KVC_KV_Q4, {TINY, .head_dim = 20, .head_dim_v = 24, .window = 20, .pattern = 2}}
};

/* ---- what comes back ---- */

static void test_round_trip(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(kinds); i++) {
        kvc_seq_info a, b;
        kvc_seq *other;
        kvc_token tokens[N];
        desk d;
        desk_open(&d, &kinds[i].shape, kinds[i].kv);
        desk_save(&d, KVC_SAVE_ALL);
        OK(kvc_seq_load_memory(&other, d.cache, NULL, d.file, d.size, &last));
        kvc_seq_query(d.seq, &a);
        kvc_seq_query(other, &b);
        assert_memory_equal(&a, &b, sizeof a);
        OK(kvc_seq_tokens(other, N - 20, 20, tokens, &last));
        assert_memory_equal(tokens, d.text + N - 20, 20 * sizeof *tokens);
        same_future(&d, other, 60);
        kvc_seq_close(other);
        desk_close(&d);
    }
}

/* A file holds the positions and not the pages. */
static void test_size(void **state) {
    desk d;
    (void)state;
    desk_open(&d, &kinds[0].shape, KVC_KV_F32);
    OK(kvc_seq_rollback(d.seq, 10));
    desk_save(&d, KVC_SAVE_ALL);
    /* head, extent, first page, tokens, rows of 2 layers, hash */
    assert_int_equal(d.size, 64 + 12 + 4 + 10 * 4 + 10 * 2 * (16 + 16) * 4 + 8);
    desk_save(&d, KVC_SAVE_TOKENS);
    assert_int_equal(d.size, 64 + 12 + 4 + 10 * 4 + 8);
    desk_close(&d);
}

static void test_tokens_only(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < 3; i++) {
        kvc_seq *other;
        desk d;
        desk_open(&d, &kinds[i].shape, kinds[i].kv);
        desk_save(&d, KVC_SAVE_TOKENS);
        FAILS(KVC_ERROR_ARGUMENT, "ctx",
            kvc_seq_load_memory(&other, d.cache, NULL, d.file, d.size, &last));
        assert_null(other);
        OK(kvc_seq_load_memory(&other, d.cache, d.ctx, d.file, d.size, &last));
        same_future(&d, other, 40);
        kvc_seq_close(other);
        desk_close(&d);
    }
}

static void test_empty(void **state) {
    kvc_seq *other;
    desk d;
    (void)state;
    desk_open(&d, &kinds[2].shape, KVC_KV_F16);
    OK(kvc_seq_rollback(d.seq, 0));
    desk_save(&d, KVC_SAVE_ALL);
    OK(kvc_seq_load_memory(&other, d.cache, NULL, d.file, d.size, &last));
    same_future(&d, other, 30);
    kvc_seq_close(other);
    desk_save(&d, KVC_SAVE_TOKENS);
    OK(kvc_seq_load_memory(&other, d.cache, d.ctx, d.file, d.size, &last));
    kvc_seq_close(other);
    desk_close(&d);
}

static void test_with_cuts(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < 2; i++) {
        kvc_seq *other;
        desk d;
        desk_open(&d, &kinds[i].shape, kinds[i].kv);
        OK(kvc_seq_remove(d.seq, 20, 60, &last));
        OK(kvc_seq_remove(d.seq, 3, 7, &last));
        desk_save(&d, KVC_SAVE_ALL);
        OK(kvc_seq_load_memory(&other, d.cache, NULL, d.file, d.size, &last));
        assert_int_equal(kvc_seq_length(other), N - 44);
        same_future(&d, other, 70);
        kvc_seq_close(other);
        FAILS(KVC_ERROR_ARGUMENT, "what",
            kvc_seq_save_memory(d.seq, KVC_SAVE_TOKENS, d.file, d.size, NULL, &last));
        desk_close(&d);
    }
}

static void test_with_policy(void **state) {
    kvc_cache *small;
    kvc_seq *seq, *other;
    desk d;
    (void)state;
    desk_open(&d, &kinds[0].shape, KVC_KV_F32);
    small = desk_cache(&d, KVC_KV_F32, PAGE, 64);
    seq = d.seq;
    d.seq = new_seq(small);
    OK(kvc_seq_set_policy(d.seq, KVC_POLICY_WINDOW, 5, 0, &last));
    OK(kvc_prefill(d.ctx, d.seq, d.text, N, NULL, &last));
    desk_save(&d, KVC_SAVE_ALL);
    OK(kvc_seq_load_memory(&other, small, NULL, d.file, d.size, &last));
    same_future(&d, other, N);
    kvc_cache_free(small);
    d.seq = seq;
    desk_close(&d);
}

/* ---- what is refused ---- */

static void refused(desk *d, kvc_cache *cache, kvc_result code, const char *where) {
    kvc_seq *other;
    FAILS(code, where, kvc_seq_load_memory(&other, cache, d->ctx, d->file, d->size, &last));
    assert_null(other);
}

static void test_foreign(void **state) {
    model_shape shape = {TINY};
    kvc_cache *cache;
    desk d, e;
    (void)state;
    desk_open(&d, &shape, KVC_KV_F32);
    desk_save(&d, KVC_SAVE_ALL);
    cache = desk_cache(&d, KVC_KV_F16, PAGE, 400);
    refused(&d, cache, KVC_ERROR_UNSUPPORTED, "fingerprint");
    kvc_cache_free(cache);
    cache = desk_cache(&d, KVC_KV_Q8, PAGE, 400);
    refused(&d, cache, KVC_ERROR_UNSUPPORTED, "fingerprint");
    kvc_cache_free(cache);
    cache = desk_cache(&d, KVC_KV_F32, 32, 400);
    refused(&d, cache, KVC_ERROR_UNSUPPORTED, "fingerprint");
    kvc_cache_free(cache);
    cache = desk_cache(&d, KVC_KV_F32, PAGE, N - 1);
    refused(&d, cache, KVC_ERROR_FULL, "n_ctx");
    kvc_cache_free(cache);
    shape.seed = 5;                     /* other weights */
    desk_open(&e, &shape, KVC_KV_F32);
    refused(&d, e.cache, KVC_ERROR_UNSUPPORTED, "fingerprint");
    desk_close(&e);
    shape.seed = 0;
    shape.rope_base = 5000;             /* another rotation */
    desk_open(&e, &shape, KVC_KV_F32);
    refused(&d, e.cache, KVC_ERROR_UNSUPPORTED, "fingerprint");
    desk_close(&e);
    d.file[8]++;                        /* version */
    refused(&d, d.cache, KVC_ERROR_UNSUPPORTED, "version");
    desk_close(&d);
}

/* The model is another one if any bit of any weight is. */
static void test_one_weight(void **state) {
    uint64_t random = 1;
    size_t i, round;
    desk d;
    (void)state;
    desk_open(&d, &kinds[0].shape, KVC_KV_F32);
    desk_save(&d, KVC_SAVE_ALL);
    for (round = 0; round < 8; round++)
        for (i = 0; i < d.rig.model->gguf.n_tensors; i++) {
            const kvc__tensor *t = &d.rig.model->gguf.tensors[i];
            size_t at = (size_t)(model_random(&random) % t->size);
            unsigned char *byte = (unsigned char *)d.rig.image +
                ((const unsigned char *)t->data - (const unsigned char *)d.rig.image) + at;
            const unsigned char bit = (unsigned char)(1u << model_random(&random) % 8);
            kvc_cache *cache = desk_cache(&d, KVC_KV_F32, PAGE, 400);
            kvc_seq *seq;
            *byte ^= bit;
            refused(&d, cache, KVC_ERROR_UNSUPPORTED, "fingerprint");
            *byte ^= bit;
            kvc_cache_free(cache);
            cache = desk_cache(&d, KVC_KV_F32, PAGE, 400);
            OK(kvc_seq_load_memory(&seq, cache, d.ctx, d.file, d.size, &last));
            kvc_cache_free(cache);
        }
    desk_close(&d);
}

static void test_no_room(void **state) {
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    kvc_seq *a, *b, *c;
    kvc_cache_info info;
    desk d;
    (void)state;
    desk_open(&d, &kinds[0].shape, KVC_KV_F32);
    desk_save(&d, KVC_SAVE_ALL);
    desc.model = d.rig.model;
    desc.n_ctx = 400;
    desc.page_size = PAGE;
    desc.n_seqs = 2;
    desc.n_pages = 2 * ((N + PAGE - 1) / PAGE) - 1;
    OK(kvc_cache_new(&cache, &desc, &last));
    OK(kvc_seq_load_memory(&a, cache, NULL, d.file, d.size, &last));
    FAILS(KVC_ERROR_FULL, "cache",
        kvc_seq_load_memory(&b, cache, NULL, d.file, d.size, &last));
    b = new_seq(cache);
    FAILS(KVC_ERROR_FULL, "n_seqs",
        kvc_seq_load_memory(&c, cache, NULL, d.file, d.size, &last));
    kvc_seq_close(a);
    kvc_seq_close(b);
    kvc_cache_query(cache, &info);
    assert_int_equal(info.pages_free, info.pages_total);
    kvc_cache_free(cache);
    desk_close(&d);
}

static int refuse_to_write(const void *data, size_t size, void *user) {
    (void)data, (void)size;
    return --*(int *)user < 0;
}

static void test_arguments(void **state) {
    kvc_token token;
    kvc_seq *other;
    size_t needed;
    int calls = 2;
    desk d;
    (void)state;
    desk_open(&d, &kinds[0].shape, KVC_KV_F32);
    desk_save(&d, KVC_SAVE_ALL);
    FAILS(KVC_ERROR_SPACE, "size", kvc_seq_save_memory(d.seq, KVC_SAVE_ALL, d.file, d.size - 1,
        &needed, &last));
    assert_int_equal(needed, d.size);
    FAILS(KVC_ERROR_FILE, "write", kvc_seq_save(d.seq, KVC_SAVE_ALL, refuse_to_write, &calls,
        &last));
    assert_int_equal(calls, -1);        /* and was not called again */
    FAILS(KVC_ERROR_ARGUMENT, "write", kvc_seq_save(d.seq, KVC_SAVE_ALL, NULL, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "what",
        kvc_seq_save(d.seq, (kvc_save)9, refuse_to_write, &calls, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq",
        kvc_seq_save(NULL, KVC_SAVE_ALL, refuse_to_write, &calls, &last));
    FAILS(KVC_ERROR_ARGUMENT, "read", kvc_seq_load(&other, d.cache, NULL, NULL, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "cache",
        kvc_seq_load_memory(&other, NULL, NULL, d.file, d.size, &last));
    FAILS(KVC_ERROR_ARGUMENT, "out",
        kvc_seq_load_memory(NULL, d.cache, NULL, d.file, d.size, &last));
    FAILS(KVC_ERROR_FORMAT, "head", kvc_seq_load_memory(&other, d.cache, NULL, NULL, 0, &last));
    FAILS(KVC_ERROR_ARGUMENT, "n", kvc_seq_tokens(d.seq, N, 1, &token, &last));
    FAILS(KVC_ERROR_ARGUMENT, "n", kvc_seq_tokens(d.seq, N + 1, 0, &token, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_seq_tokens(NULL, 0, 0, &token, &last));
    OK(kvc_seq_tokens(d.seq, N, 0, &token, &last));
    desk_close(&d);
}

/* ---- damage ---- */

static void test_cut_short(void **state) {
    size_t full;
    desk d;
    (void)state;
    desk_open(&d, &kinds[2].shape, KVC_KV_F16);
    OK(kvc_seq_rollback(d.seq, N - 5));
    desk_save(&d, KVC_SAVE_ALL);
    full = d.size;
    for (d.size = 0; d.size < full; d.size += d.size < 300 || d.size > full - 300 ? 1 : 97) {
        kvc_seq *other = d.seq;
        assert_int_equal(kvc_seq_load_memory(&other, d.cache, d.ctx, d.file, d.size, &last),
            KVC_ERROR_FORMAT);
        assert_null(other);
    }
    desk_close(&d);
}

/* Bytes of a file as the library reads them, with the right hash at the end whatever they are. */
typedef struct forger {
    const unsigned char *file;
    size_t at, size;
    uint64_t hash;
} forger;

static int forge(void *data, size_t size, void *user) {
    forger *f = (forger *)user;
    if (size > f->size - f->at) return 1;
    memcpy(data, f->file + f->at, size);
    f->at += size;
    if (f->at == f->size && size == 8) memcpy(data, &f->hash, 8);
    else f->hash = kvc__hash_bytes(data, size, f->hash);
    return 0;
}

static void mutate(desk *d, uint64_t *state) {
    uint32_t n = 1 + (uint32_t)(model_random(state) % 3);
    while (n-- > 0) {
        size_t at = model_random(state) % (model_random(state) % 2 ? d->size : 130);
        switch (model_random(state) % 4) {
        case 0: d->file[at] ^= (unsigned char)(1u << model_random(state) % 8); break;
        case 1: d->file[at] = (unsigned char)model_random(state); break;
        case 2: d->file[at] = (unsigned char)(model_random(state) % 2 ? 0xff : 0); break;
        default: memmove(d->file + at, d->file + model_random(state) % d->size,
            model_random(state) % 16 < d->size - at ? 1 : 0);
        }
    }
}

/* Damaged files are refused, or nothing was changed; with a hash that fits they may be taken, and
   then the sequence can be used and closed. */
static void test_mutants(void **state) {
    unsigned n_same = 0, n_refused = 0, n_taken = 0, i;
    uint64_t random = 1;
    (void)state;
    for (i = 0; i < COUNT(kinds); i++) {
        unsigned char *whole;
        unsigned k;
        desk d;
        desk_open(&d, &kinds[i].shape, kinds[i].kv);
        OK(kvc_seq_rollback(d.seq, N - 3));
        if (i % 2) OK(kvc_seq_set_policy(d.seq, KVC_POLICY_WINDOW, 4, 0, &last));
        if (i < 2) OK(kvc_seq_remove(d.seq, 10, 40, &last));
        if (i % 4 == 0) {
            kvc_cache_free(d.cache);
            d.cache = desk_cache(&d, kinds[i].kv, PAGE, HEAVY_CTX);
            d.seq = new_seq(d.cache);
            OK(kvc_seq_set_policy(d.seq, KVC_POLICY_HEAVY, 4, 26, &last));
            OK(kvc_prefill(d.ctx, d.seq, d.text, N, NULL, &last));
        }
        desk_save(&d, KVC_SAVE_ALL);
        whole = (unsigned char *)gguf_must(malloc(d.size));
        memcpy(whole, d.file, d.size);
        for (k = 0; k < MUTANTS / COUNT(kinds); k++) {
            const float *logits;
            forger f = {d.file, 0, d.size, 0};
            kvc_seq *other;
            kvc_result r;
            mutate(&d, &random);
            r = kvc_seq_load_memory(&other, d.cache, d.ctx, d.file, d.size, &last);
            if (r == KVC_OK) {
                assert_memory_equal(d.file, whole, d.size);
                kvc_seq_close(other);
                n_same++;
            } else {
                assert_null(other);
                n_refused++;
            }
            r = kvc_seq_load(&other, d.cache, d.ctx, forge, &f, &last);
            if (r == KVC_OK) {
                n_taken++;
                if (kvc_decode(d.ctx, other, 1, &logits, &last) == KVC_OK)
                    kvc_seq_rollback(other, kvc_seq_length(other) - 1);
                kvc_prefill(d.ctx, other, d.text, 20, NULL, &last);     /* may let pages go */
                kvc_seq_close(other);
            }
            memcpy(d.file, whole, d.size);
        }
        free(whole);
        desk_close(&d);
    }
    print_message("%u refused, %u unchanged; with a forged hash %u were taken\n", n_refused,
        n_same, n_taken);
    assert_true(n_refused > MUTANTS / 2);
    assert_true(n_taken > 100);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_size),
        cmocka_unit_test(test_tokens_only),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_with_cuts),
        cmocka_unit_test(test_with_policy),
        cmocka_unit_test(test_foreign),
        cmocka_unit_test(test_one_weight),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_cut_short),
        cmocka_unit_test(test_mutants)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
