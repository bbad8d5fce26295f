/* KVC_POLICY_GROW: sequences and caches that become longer than they were made for, from the host's
   allocator, to the byte, seldom, and without a change of bits. */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include "testing.h"

enum { N_VOCAB = 48, PAGE = 16, LONG = 3000 };
#define TINY .n_embd = 32, .n_heads = 2, .n_kv_heads = 1, .n_ff = 48, .n_vocab = N_VOCAB, \
    .n_ctx = 4096

typedef struct shop {
    rig rig;
    counter mem;                /* of the cache alone */
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_token text[LONG];
} shop;

static void shop_open(shop *s, const model_shape *shape, uint32_t n_ctx, uint32_t n_pages) {
    kvc_cache_desc desc = {0};
    memset(s, 0, sizeof *s);
    rig_open(&s->rig, shape);
    random_tokens(s->text, LONG, N_VOCAB, 3);
    desc.model = s->rig.model;
    desc.n_ctx = n_ctx;
    desc.n_seqs = 4;
    desc.n_pages = n_pages;
    desc.page_size = PAGE;
    desc.n_batch = 32;
    desc.allocator = counter_hook(&s->mem);
    OK(kvc_cache_new(&s->cache, &desc, &last));
    s->ctx = new_ctx(&s->rig, 64, 2, KVC_ISA_BEST);
}

static void shop_close(shop *s) {
    kvc_cache_info info;
    kvc_cache_query(s->cache, &info);
    assert_int_equal(info.pages_free, info.pages_total);
    kvc_ctx_free(s->ctx);
    kvc_cache_free(s->cache);
    CLEAN(&s->mem);
    rig_close(&s->rig);
}

static kvc_seq *growing(shop *s) {
    kvc_seq *seq = new_seq(s->cache);
    OK(kvc_seq_set_policy(seq, KVC_POLICY_GROW, 0, 0, &last));
    return seq;
}

/* The ledger agrees with the allocator. */
static void count(const shop *s) {
    kvc_cache_info info;
    kvc_cache_query(s->cache, &info);
    assert_int_equal(info.memory_size, s->mem.bytes);
}

static void test_long(void **state) {
    static const model_shape shapes[] = {{TINY}, {TINY, .window = 40, .pattern = 2}};
    size_t i, at, n;
    (void)state;
    for (i = 0; i < COUNT(shapes); i++) {
        kvc_cache_info info;
        const float *logits;
        float *cold;
        kvc_seq *seq;
        shop s;
        shop_open(&s, &shapes[i], 32, 0);
        cold = cold_run(&s.rig, s.text, LONG, KVC_KV_F32);
        seq = growing(&s);
        assert_true(kvc_seq_capacity(seq) > 1000000);
        for (at = 0; at < LONG; at += n) {
            n = at % 200 + 1 < LONG - at ? at % 200 + 1 : LONG - at;
            OK(kvc_prefill(s.ctx, seq, s.text + at, n, &logits, &last));
            SAME(logits, cold + (at + n - 1) * N_VOCAB, 1, N_VOCAB, "grown");
            count(&s);
        }
        kvc_cache_query(s.cache, &info);
        print_message("%u pages in %u blocks\n", info.pages_total, (unsigned)s.mem.n_allocs);
        assert_true(info.reaches[info.n_reaches - 1].pages_total < 2 * LONG / PAGE);
        assert_true(s.mem.n_allocs < 30);
        if (i == 1) assert_true(info.reaches[0].pages_peak <= 8);   /* the window's */
        n = s.mem.n_allocs;
        OK(kvc_seq_rollback(seq, 0));
        OK(kvc_prefill(s.ctx, seq, s.text, LONG, &logits, &last));
        SAME(logits, cold + (LONG - 1) * N_VOCAB, 1, N_VOCAB, "in what was grown before");
        assert_int_equal(s.mem.n_allocs, n);
        kvc_seq_close(seq);
        free(cold);
        shop_close(&s);
    }
}

/* Others get the past of a sequence that has grown, and go on. */
static void test_fork_and_reorder(void **state) {
    static const model_shape shape = {TINY};
    static const uint32_t from[3] = {1, 2, 0};
    const float *logits;
    float *cold;
    kvc_seq *seqs[3], *fork;
    shop s;
    (void)state;
    shop_open(&s, &shape, 64, 0);
    cold = cold_run(&s.rig, s.text, LONG, KVC_KV_F32);
    seqs[0] = new_seq(s.cache);                     /* does not grow */
    seqs[1] = growing(&s);
    seqs[2] = growing(&s);
    OK(kvc_prefill(s.ctx, seqs[0], s.text, 50, NULL, &last));
    OK(kvc_prefill(s.ctx, seqs[1], s.text, 2500, NULL, &last));
    OK(kvc_prefill(s.ctx, seqs[2], s.text, 1500, NULL, &last));
    OK(kvc_seq_fork(&fork, seqs[1], &last));
    OK(kvc_decode(s.ctx, fork, s.text[2500], &logits, &last));
    SAME(logits, cold + (size_t)2500 * N_VOCAB, 1, N_VOCAB, "a fork");
    OK(kvc_seq_reorder(seqs, from, 3, &last));
    assert_int_equal(kvc_seq_length(seqs[0]), 2500);
    assert_int_equal(kvc_seq_length(seqs[1]), 1500);
    assert_int_equal(kvc_seq_length(seqs[2]), 50);
    OK(kvc_decode(s.ctx, seqs[0], s.text[2500], &logits, &last));
    SAME(logits, cold + (size_t)2500 * N_VOCAB, 1, N_VOCAB, "reordered");
    OK(kvc_decode(s.ctx, seqs[1], s.text[1500], &logits, &last));
    SAME(logits, cold + (size_t)1500 * N_VOCAB, 1, N_VOCAB, "reordered");
    FAILS(KVC_ERROR_FULL, "sequence", kvc_prefill(s.ctx, seqs[2], s.text, 15, NULL, &last));
    count(&s);
    kvc_seq_close(fork);
    kvc_seq_close(seqs[0]), kvc_seq_close(seqs[1]), kvc_seq_close(seqs[2]);
    free(cold);
    shop_close(&s);
}

/* Each allocation in turn fails: the step is refused, nothing is lost, and works the next time. */
static void test_no_memory(void **state) {
    static const model_shape shape = {TINY};
    unsigned n_failed = 0, at;
    (void)state;
    for (at = 1; at <= 8; at++) {
        const float *logits;
        float *cold;
        kvc_seq *seq, *fork;
        kvc_result r;
        shop s;
        shop_open(&s, &shape, 32, 0);
        cold = cold_run(&s.rig, s.text, LONG, KVC_KV_F32);
        seq = growing(&s);
        OK(kvc_prefill(s.ctx, seq, s.text, 30, NULL, &last));
        s.mem.fail_at = s.mem.n_allocs + at;
        memset(&last, 0, sizeof last);
        r = kvc_prefill(s.ctx, seq, s.text + 30, 1800, NULL, &last);
        if (r != KVC_OK) {
            assert_int_equal(r, KVC_ERROR_MEMORY);
            assert_string_equal(last.where, "allocator");
            assert_int_equal(kvc_seq_length(seq), 30);
            n_failed++;
            count(&s);
            OK(kvc_prefill(s.ctx, seq, s.text + 30, 1800, NULL, &last));
        }
        OK(kvc_decode(s.ctx, seq, s.text[1830], &logits, &last));
        SAME(logits, cold + (size_t)1830 * N_VOCAB, 1, N_VOCAB, "after a refusal");
        s.mem.fail_at = s.mem.n_allocs + 1;
        FAILS(KVC_ERROR_MEMORY, "allocator", kvc_seq_fork(&fork, seq, &last));
        assert_null(fork);
        OK(kvc_seq_fork(&fork, seq, &last));
        kvc_seq_close(fork);
        kvc_seq_close(seq);
        free(cold);
        shop_close(&s);
    }
    assert_true(n_failed >= 2);
}

/* A saved one finds room again; a head that claims much more than there is gets nothing. */
static void test_saved(void **state) {
    static const model_shape shape = {TINY};
    const float *logits;
    float *cold;
    kvc_seq *seq, *other;
    unsigned char *file;
    size_t size, before;
    uint32_t huge = 1u << 29;
    shop s, t;
    (void)state;
    shop_open(&s, &shape, 32, 0);
    cold = cold_run(&s.rig, s.text, LONG, KVC_KV_F32);
    seq = growing(&s);
    OK(kvc_prefill(s.ctx, seq, s.text, 2000, NULL, &last));
    size = (size_t)kvc_seq_save_size(seq, KVC_SAVE_ALL);
    file = (unsigned char *)gguf_must(malloc(size));
    OK(kvc_seq_save_memory(seq, KVC_SAVE_ALL, file, size, NULL, &last));
    shop_open(&t, &shape, 32, 0);
    OK(kvc_seq_load_memory(&other, t.cache, NULL, file, size, &last));
    OK(kvc_decode(t.ctx, other, s.text[2000], &logits, &last));
    SAME(logits, cold + (size_t)2000 * N_VOCAB, 1, N_VOCAB, "loaded");
    count(&t);
    kvc_seq_close(other);
    before = t.mem.bytes;
    memcpy(file + 40, &huge, 4);                    /* n_pos */
    memcpy(file + 64 + 4, &huge, 4);                /* the extent's end */
    FAILS(KVC_ERROR_FORMAT, NULL, kvc_seq_load_memory(&other, t.cache, NULL, file, size, &last));
    assert_int_equal(t.mem.bytes, before);
    kvc_seq_close(seq);
    free(file);
    free(cold);
    shop_close(&t);
    shop_close(&s);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_long),
        cmocka_unit_test(test_fork_and_reorder),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_saved)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
