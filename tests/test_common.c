/* Rows of different sequences that read the pages they have in common together: the bits of one
   sequence after the other. What is read together test_step.c looks at. */
#define _POSIX_C_SOURCE 200809L
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
    uint32_t n = 1 + draw(f, N_SEQS), first = draw(f, N_SEQS), step = 1 + 2 * draw(f, 2), i;
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
        family_close(&f);
    }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_families)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
