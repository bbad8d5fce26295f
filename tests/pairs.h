/* pairs.h - many sequences twice: in one cache they are computed in batches, in the other one by
   one. What a program does in between it does to both. Include it after testing.h. */
#ifndef PAIRS_H
#define PAIRS_H

enum { N_VOCAB = 48, PAGE = 16, N_SEQS = 32, N_CTX = 400 };
#define TINY .n_embd = 32, .n_heads = 2, .n_kv_heads = 1, .n_ff = 48, .n_vocab = N_VOCAB, \
    .n_ctx = 4096

static const model_shape plain = {TINY};
static const model_shape windows = {TINY, .window = 20, .pattern = 2, .n_layers = 3};
static const model_shape heads = {.n_embd = 64, .n_heads = 6, .n_kv_heads = 2, .head_dim = 16,
    .n_ff = 96, .n_vocab = N_VOCAB, .n_ctx = 4096, .type = GGUF_Q8_0};

/* Two caches with the same sequences: one is computed in batches, the other by single calls. */
typedef struct pair {
    rig rig;
    kvc_cache *cache[2];
    kvc_ctx *ctx[2];
    kvc_seq *seq[2][N_SEQS];
    kvc_token text[N_SEQS][N_CTX];      /* tokens of a request */
    size_t rows[N_SEQS][N_CTX];
    kvc_request requests[N_SEQS];
    kvc_error err[N_SEQS];
    float *logits[2];                   /* [N_SEQS * N_CTX, N_VOCAB] */
    kvc_policy policy;
    int shared;
    uint64_t state;
    uint32_t before[N_SEQS];            /* lengths */
    unsigned n_rows, n_full, n_cancelled;
} pair;

static uint32_t draw(pair *p, uint32_t n) {
    return (uint32_t)(model_random(&p->state) % n);
}

/* With KVC_POLICY_HEAVY every other sequence has it, the others a window. */
static kvc_seq *open_one(pair *p, int side, uint32_t i) {
    kvc_policy policy = p->policy;
    kvc_seq *seq;
    if (p->shared) OK(kvc_seq_open_shared(&seq, p->cache[side], NULL, &last));
    else OK(kvc_seq_open(&seq, p->cache[side], &last));
    if (policy == KVC_POLICY_HEAVY && i % 2) policy = KVC_POLICY_WINDOW;
    OK(kvc_seq_set_policy(seq, policy, policy == KVC_POLICY_ERROR || policy == KVC_POLICY_GROW ?
        0 : 5, policy == KVC_POLICY_HEAVY ? 100 : 0, &last));
    return seq;
}

static void pair_open(pair *p, const model_shape *shape, kvc_kv_type kv, kvc_policy policy,
    int shared, uint32_t n_batch, uint32_t n_threads) {
    kvc_cache_desc desc = {0};
    int side;
    uint32_t i;
    memset(p, 0, sizeof *p);
    p->state = n_batch + 100 * n_threads;
    p->policy = policy;
    p->shared = shared;
    rig_open(&p->rig, shape);
    desc.model = p->rig.model;
    desc.n_ctx = N_CTX;
    desc.n_seqs = N_SEQS;
    desc.page_size = PAGE;
    desc.n_back = 40;
    desc.n_batch = 64;
    desc.n_prefix = shared ? 4000 : 0;
    desc.n_heavy = policy == KVC_POLICY_HEAVY ? 105 : 0;
    desc.type_k = desc.type_v = kv;
    for (side = 0; side < 2; side++) {
        OK(kvc_cache_new(&p->cache[side], &desc, &last));
        p->ctx[side] = new_ctx(&p->rig, side ? 64 : n_batch, side ? 1 : n_threads, KVC_ISA_BEST);
        p->logits[side] = (float *)gguf_must(malloc(N_SEQS * N_CTX * N_VOCAB * sizeof(float)));
        for (i = 0; i < N_SEQS; i++) p->seq[side][i] = open_one(p, side, i);
    }
}

static void pair_close(pair *p) {
    int side;
    uint32_t i;
    kvc_cache_info info;
    for (side = 0; side < 2; side++) {
        for (i = 0; i < N_SEQS; i++) kvc_seq_close(p->seq[side][i]);
        kvc_cache_query(p->cache[side], &info);
        assert_int_equal(info.pages_live, 0);
        assert_int_equal(info.reaches[0].pages_promised, 0);
        kvc_ctx_free(p->ctx[side]);
        kvc_cache_free(p->cache[side]);
        free(p->logits[side]);
    }
    rig_close(&p->rig);
}

/* Something else happens to a sequence on both sides. */
static void disturb(pair *p) {
    uint32_t i = draw(p, N_SEQS), k = draw(p, N_SEQS), back;
    kvc_seq_info info;
    int side;
    kvc_seq_query(p->seq[0][i], &info);
    back = draw(p, info.length + 1);
    for (side = 0; side < 2; side++) {
        if (draw(p, 1) == 0 && i != k && (i + k) % 3 == 0) {
            kvc_seq_close(p->seq[side][k]);
            OK(kvc_seq_fork(&p->seq[side][k], p->seq[side][i], &last));
        } else if (back == 0 || back >= info.rollback_least) {
            OK(kvc_seq_rollback(p->seq[side][i], back));
        } else {
            kvc_seq_close(p->seq[side][i]);
            p->seq[side][i] = open_one(p, side, i);
        }
    }
}

/* A request for sequence i: a decode or a prefill, with logits of some rows. */
static void make_request(pair *p, kvc_request *q, uint32_t i, uint32_t at) {
    static const uint32_t most[] = {1, 1, 1, 5, 40, 400};
    uint32_t n = 1 + draw(p, most[draw(p, 6)]), k;
    memset(q, 0, sizeof *q);
    q->seq = p->seq[0][i];
    q->n_tokens = n;
    /* often the beginning that others have, too */
    random_tokens(p->text[i], n, N_VOCAB, draw(p, 4) ? 7 : model_random(&p->state));
    q->tokens = p->text[i];
    q->err = &p->err[i];
    q->logits = p->logits[0] + (size_t)at * N_VOCAB;
    if (draw(p, 3) == 0) {
        for (k = 0; k < n; k++)
            if (draw(p, 4) == 0) p->rows[i][q->n_rows++] = k;
        q->rows = p->rows[i];
    } else {
        q->n_rows = draw(p, 4) == 0 ? draw(p, n + 1) : 1;
    }
}

/* Requests for n sequences from `first` on. */
static void make_requests(pair *p, uint32_t first, uint32_t n) {
    uint32_t i, at = 0;
    for (i = 0; i < n; i++) {
        make_request(p, &p->requests[i], (first + i) % N_SEQS, at);
        p->before[i] = kvc_seq_length(p->requests[i].seq);
        at += (uint32_t)p->requests[i].n_rows;
    }
}

/* They were computed in batches. Now one by one: the same, but for those that were cancelled, whose
   sequences are to be what they were. */
static void pair_check(pair *p, uint32_t first, uint32_t n) {
    uint32_t i, k;
    for (i = 0; i < n; i++) {
        const kvc_request *q = &p->requests[i];
        kvc_seq *seq = p->seq[1][(first + i) % N_SEQS];
        size_t rows[N_CTX];
        float *want = p->logits[1];
        kvc_result r;
        assert_true(q->is_done);
        if (q->result == KVC_ERROR_CANCELLED) {
            assert_int_equal(kvc_seq_length(q->seq), p->before[i]);
            p->n_cancelled++;
            continue;
        }
        for (k = 0; k < q->n_rows; k++)
            rows[k] = q->rows ? q->rows[k] : q->n_tokens - q->n_rows + k;
        r = kvc_prefill_rows(p->ctx[1], seq, q->tokens, q->n_tokens, rows, q->n_rows, want, &last);
        assert_int_equal(q->result, r);
        assert_int_equal(kvc_seq_length(q->seq), kvc_seq_length(seq));
        if (r != KVC_OK) {
            assert_int_equal(r, KVC_ERROR_FULL);
            assert_string_equal(q->err->where, last.where);
            p->n_full++;
            continue;
        }
        SAME(q->logits, want, q->n_rows, N_VOCAB, "in a batch");
        p->n_rows += (unsigned)q->n_rows;
    }
}

#endif
