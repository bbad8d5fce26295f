/* Rows of different sequences that read the pages they have in common together: the bits of one
   sequence after the other. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include "testing.h"

enum { N_VOCAB = 48, PAGE = 16, N_SEQS = 20, N_CTX = 1400 };

typedef struct family {
    rig rig;
    kvc_cache *cache;
    kvc_ctx *ctx, *plain;
    kvc_seq *seqs[N_SEQS];
    float logits[N_SEQS * N_VOCAB];
    uint64_t state;
    unsigned n_common, n_apart;
} family;

static uint32_t draw(family *f, uint32_t n) {
    return (uint32_t)(model_random(&f->state) % n);
}

static void family_open(family *f, const model_shape *shape, kvc_kv_type kv, uint32_t n_threads) {
    kvc_cache_desc desc = {0};
    memset(f, 0, sizeof *f);
    f->state = n_threads;
    rig_open(&f->rig, shape);
    desc.model = f->rig.model;
    desc.n_ctx = N_CTX;
    desc.n_seqs = N_SEQS + 1;
    desc.page_size = PAGE;
    desc.n_back = N_CTX;
    desc.n_prefix = 1000;
    desc.type_k = desc.type_v = kv;
    OK(kvc_cache_new(&f->cache, &desc, &last));
    f->ctx = new_ctx(&f->rig, 64, n_threads, KVC_ISA_BEST);
    f->plain = new_ctx(&f->rig, 256, 1, KVC_ISA_BEST);
}

static void family_close(family *f) {
    kvc_ctx_free(f->ctx);
    kvc_ctx_free(f->plain);
    kvc_cache_free(f->cache);
    rig_close(&f->rig);
}

/* Half of them are forks of the others, cut back by some tokens and led on by others; some begin
   alike by way of the prefix table alone, and some have nothing in common. */
static void beget(family *f) {
    static kvc_token text[N_CTX];
    uint32_t i, n;
    for (i = 0; i < N_SEQS; i++) {
        random_tokens(text, N_CTX, N_VOCAB, 7 + (i % 5 == 4));
        if (i % 2 && i != 3) {
            kvc_seq *parent = f->seqs[draw(f, i)];
            OK(kvc_seq_fork(&f->seqs[i], parent, &last));
            n = kvc_seq_length(parent);
            OK(kvc_seq_rollback(f->seqs[i], n - draw(f, n < 300 ? n : 300)));
        } else {
            OK(kvc_seq_open_shared(&f->seqs[i], f->cache, NULL, &last));
            OK(kvc_prefill(f->plain, f->seqs[i], text, 200 + draw(f, 900), NULL, &last));
        }
        n = 1 + draw(f, 40);
        random_tokens(text, n, N_VOCAB, model_random(&f->state));
        OK(kvc_prefill(f->plain, f->seqs[i], text, n, NULL, &last));
    }
}

/* A token for each of some sequences, in any order, and a few for one of them. */
static void one_pass(family *f) {
    kvc_request q[N_SEQS];
    kvc_token text[N_SEQS][8];
    const kvc__plan *plan = &f->ctx->plan;
    uint32_t n = 1 + draw(f, N_SEQS), first = draw(f, N_SEQS), step = 1 + 2 * draw(f, 2), i, g;
    memset(q, 0, sizeof q);
    for (i = 0; i < n; i++) {
        q[i].seq = f->seqs[(first + step * i) % N_SEQS];
        q[i].tokens = text[i];
        q[i].n_tokens = i == n / 2 && draw(f, 3) == 0 ? 8 : 1;
        q[i].n_rows = 1;
        q[i].logits = f->logits + i * N_VOCAB;
        random_tokens(text[i], 8, N_VOCAB, model_random(&f->state));
    }
    OK(kvc_batch(f->ctx, q, n, &last));
    for (g = 0; g < plan->n_groups; g++) {
        f->n_common += plan->groups[g].n_common != 0 ? plan->groups[g].n_rows : 0;
        f->n_apart += plan->groups[g].n_common == 0;
    }
    for (i = 0; i < n; i++) {
        const float *logits;
        OK(q[i].result);
        OK(kvc_seq_rollback(q[i].seq, kvc_seq_length(q[i].seq) - (uint32_t)q[i].n_tokens));
        OK(kvc_prefill(f->plain, q[i].seq, text[i], q[i].n_tokens, &logits, &last));
        SAME(q[i].logits, logits, 1, N_VOCAB, "with pages in common");
    }
}

static void test_families(void **state) {
    static const model_shape plain = {.n_embd = 32, .n_heads = 4, .n_kv_heads = 2, .n_ff = 48,
        .n_vocab = N_VOCAB, .n_ctx = 4096};
    static const model_shape windows = {.n_embd = 32, .n_heads = 4, .n_kv_heads = 1, .n_ff = 48,
        .n_vocab = N_VOCAB, .n_ctx = 4096, .window = 300, .pattern = 2, .n_layers = 3};
    static const struct {
        const model_shape *shape;
        kvc_kv_type kv;
        uint32_t n_threads;
    } cases[] = {{&plain, KVC_KV_F32, 1}, {&plain, KVC_KV_F16, 2}, {&plain, KVC_KV_Q8, 1},
        {&plain, KVC_KV_Q4, 3}, {&windows, KVC_KV_F32, 1}, {&windows, KVC_KV_Q8, 2}};
    size_t i;
    int k;
    (void)state;
    for (i = 0; i < COUNT(cases); i++) {
        static family f;
        family_open(&f, cases[i].shape, cases[i].kv, cases[i].n_threads);
        beget(&f);
        for (k = 0; k < 30; k++) one_pass(&f);
        print_message("%u rows with pages in common, %u groups without\n", f.n_common, f.n_apart);
        assert_true(f.n_common > 20 && f.n_apart > 20);
        family_close(&f);
    }
}

/* Only whole spans that both see count, and only where nothing was removed. */
static void test_what_is_common(void **state) {
    static const model_shape shape = {.n_embd = 32, .n_heads = 2, .n_kv_heads = 1, .n_ff = 48,
        .n_vocab = N_VOCAB, .n_ctx = 4096};
    static const struct {
        uint32_t back, more, spans;
    } cases[] = {{0, 1, 4}, {1, 1, 3}, {0, 100, 4}, {511, 1, 2}, {512, 1, 2}, {513, 600, 1},
        {800, 1, 0}, {1024, 5, 0}};
    static family f;
    kvc_token text[1024];
    size_t i;
    (void)state;
    family_open(&f, &shape, KVC_KV_F32, 1);
    random_tokens(text, 1024, N_VOCAB, 1);
    f.seqs[0] = new_seq(f.cache);
    OK(kvc_prefill(f.plain, f.seqs[0], text, 1024, NULL, &last));
    for (i = 0; i < COUNT(cases); i++) {
        kvc__row a, b;
        OK(kvc_seq_fork(&f.seqs[1], f.seqs[0], &last));
        OK(kvc_seq_rollback(f.seqs[1], 1024 - cases[i].back));
        OK(kvc_prefill(f.plain, f.seqs[1], text, cases[i].more, NULL, &last));
        a.seq = f.seqs[0];
        a.slot = 1024;
        b.seq = f.seqs[1];
        b.slot = kvc_seq_length(f.seqs[1]);
        assert_int_equal(kvc__common_spans(&f.ctx->plan, &a, &b), cases[i].spans);
        assert_int_equal(kvc__common_spans(&f.ctx->plan, &b, &a), cases[i].spans);
        if (cases[i].spans) OK(kvc_seq_remove(f.seqs[1], 100, 110, &last));
        assert_int_equal(kvc__common_spans(&f.ctx->plan, &a, &b), 0);
        kvc_seq_close(f.seqs[1]);
    }
    family_close(&f);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_what_is_common)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
