/* Every architecture, as one table: the logits are the oracle's, and their bits do not depend on
   how they came to be: cut, in a batch, from the prefix table, forked, rolled back, in slices of
   time, cancelled and done again, saved and loaded, by any instruction set and number of threads,
   with weights packed or in place. */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include "testing.h"
#include "naive.h"
#include "zoo.h"

enum { N = ZOO_TEXT, PAGE = 16, N_SEQS = 5 };

/* One model, its text and the bits that are wanted. */
typedef struct stand {
    const char *name;
    rig rig;
    kvc_model *in_place;
    kvc_kv_type kv;
    kvc_token text[N], other[N];
    float *want;                /* [N, n_vocab] a cold run */
    float *got;                 /* [N, n_vocab] */
    kvc_cache *cache;
    kvc_ctx *ctx;
    uint64_t state;
} stand;

static uint32_t draw(stand *s, uint32_t n) {
    return (uint32_t)(model_random(&s->state) % n);
}

static kvc_cache *stand_cache(const stand *s, uint32_t n_prefix) {
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    desc.model = s->rig.model;
    desc.n_ctx = N;
    desc.n_seqs = N_SEQS;
    desc.page_size = PAGE;
    desc.n_back = N;
    desc.n_prefix = n_prefix;
    desc.n_pages = n_prefix ? 2 * N_SEQS * N / PAGE : 0;
    desc.type_k = desc.type_v = s->kv;
    OK(kvc_cache_new(&cache, &desc, &last));
    return cache;
}

static void stand_open(stand *s, const zoo_entry *e, kvc_kv_type kv) {
    kvc_model_desc desc = {0};
    uint32_t i;
    memset(s, 0, sizeof *s);
    s->name = e->name;
    s->kv = kv;
    rig_open(&s->rig, &e->shape);
    desc.data = s->rig.image;
    desc.data_size = s->rig.image_size;
    desc.weights = KVC_WEIGHTS_IN_PLACE;
    OK(kvc_model_open(&s->in_place, &desc, &last));
    for (i = 0; i < N; i++) s->text[i] = zoo_token(i);
    random_tokens(s->other, N, s->rig.info.n_vocab, 3);
    s->want = cold_run(&s->rig, s->text, N, kv);
    s->got = (float *)gguf_must(malloc(N * s->rig.info.n_vocab * sizeof(float)));
    s->cache = stand_cache(s, 0);
    s->ctx = new_ctx(&s->rig, 24, 2, KVC_ISA_BEST);
}

static void stand_close(stand *s) {
    kvc_cache_info info;
    kvc_cache_query(s->cache, &info);
    assert_int_equal(info.pages_live, 0);
    kvc_ctx_free(s->ctx);
    kvc_cache_free(s->cache);
    kvc_model_close(s->in_place);
    rig_close(&s->rig);
    free(s->want);
    free(s->got);
}

/* The logits of positions [from, from + n) are as wanted. */
static void check_rows(const stand *s, const float *got, uint32_t from, uint32_t n,
    const char *how) {
    char what[160];
    snprintf(what, sizeof what, "%s, K/V type %d, %s", s->name, (int)s->kv, how);
    SAME(got, s->want + (size_t)from * s->rig.info.n_vocab, n, s->rig.info.n_vocab, what);
}

/* Appends tokens [from, to) of the text in chunks of at most `most`, each position's logits
   checked. */
static void append(stand *s, kvc_ctx *ctx, kvc_seq *seq, uint32_t from, uint32_t to, uint32_t most,
    const char *how) {
    size_t rows[N];
    uint32_t i, n;
    for (i = 0; i < N; i++) rows[i] = i;
    for (; from < to; from += n) {
        n = 1 + draw(s, most);
        if (n > to - from) n = to - from;
        OK(kvc_prefill_rows(ctx, seq, s->text + from, n, rows, n, s->got, &last));
        check_rows(s, s->got, from, n, how);
    }
}

/* ---- the properties, each a function of a stand ---- */

static void check_split(stand *s) {
    kvc_seq *seq = new_seq(s->cache);
    const float *logits;
    uint32_t i;
    append(s, s->ctx, seq, 0, N, 30, "cut");
    OK(kvc_seq_rollback(seq, 0));
    for (i = 0; i < N; i++) {
        OK(kvc_decode(s->ctx, seq, s->text[i], &logits, &last));
        check_rows(s, logits, i, 1, "token by token");
    }
    kvc_seq_close(seq);
}

static void check_machines(stand *s) {
    kvc_isa isas[5];
    const char *names[5];
    size_t n = isas_here(&s->rig, isas, names), i;
    for (i = 0; i < 2 * n; i++) {
        kvc_ctx_desc desc = {0};
        kvc_ctx *ctx;
        kvc_seq *seq = new_seq(s->cache);
        desc.model = i % 2 ? s->in_place : s->rig.model;
        desc.n_batch = 40;
        desc.n_threads = 1 + (uint32_t)(i / 2) % 3;
        desc.isa = isas[i / 2];
        if (i % 2) {            /* another model, though of the same file: with its own cache */
            kvc_cache_desc own = {0};
            kvc_cache *cache;
            kvc_seq_close(seq);
            own.model = s->in_place;
            own.n_ctx = N;
            own.type_k = own.type_v = s->kv;
            OK(kvc_cache_new(&cache, &own, &last));
            OK(kvc_ctx_new(&ctx, &desc, &last));
            seq = new_seq(cache);
            append(s, ctx, seq, 0, N, 20, names[i / 2]);
            kvc_seq_close(seq);
            kvc_ctx_free(ctx);
            kvc_cache_free(cache);
            continue;
        }
        OK(kvc_ctx_new(&ctx, &desc, &last));
        append(s, ctx, seq, 0, N, 20, names[i / 2]);
        kvc_seq_close(seq);
        kvc_ctx_free(ctx);
    }
}

/* Sequences at different places of the text, some of them in strangers' texts, together. */
static void check_batch(stand *s) {
    kvc_request q[N_SEQS];
    kvc_seq *seq[N_SEQS];
    float *logits[N_SEQS];
    uint32_t at[N_SEQS] = {0}, i, n, busy, n_vocab = s->rig.info.n_vocab;
    for (i = 0; i < N_SEQS; i++) {
        seq[i] = new_seq(s->cache);
        logits[i] = (float *)gguf_must(malloc(N * n_vocab * sizeof(float)));
    }
    do {
        memset(q, 0, sizeof q);
        for (busy = i = 0; i < N_SEQS; i++) {
            if (at[i] == N) continue;
            n = draw(s, 3) ? 1 : 1 + draw(s, 20);
            if (n > N - at[i]) n = N - at[i];
            q[busy].seq = seq[i];
            q[busy].tokens = (i % 2 ? s->other : s->text) + at[i];
            q[busy].n_tokens = q[busy].n_rows = n;
            q[busy].logits = logits[i];
            busy++;
        }
        if (!busy) break;
        OK(kvc_batch(s->ctx, q, busy, &last));
        for (busy = i = 0; i < N_SEQS; i++) {
            if (at[i] == N) continue;
            assert_int_equal(q[busy].result, KVC_OK);
            if (i % 2 == 0) check_rows(s, logits[i], at[i], (uint32_t)q[busy].n_rows, "in a batch");
            at[i] += (uint32_t)q[busy++].n_tokens;
        }
    } while (1);
    for (i = 0; i < N_SEQS; i++) {
        kvc_seq_close(seq[i]);
        free(logits[i]);
    }
}

/* Once to fill the table, then with all but the last token there, then with less. */
static void check_prefix(stand *s) {
    kvc_cache *cache = stand_cache(s, 64);
    const float *logits;
    kvc_seq_info info;
    kvc_seq *seq;
    uint32_t i, n, hits = 0;
    for (i = 0; i < 6; i++) {
        n = i < 2 ? N : 1 + draw(s, N);
        OK(kvc_seq_open_shared(&seq, cache, NULL, &last));
        OK(kvc_prefill(s->ctx, seq, s->text, n, &logits, &last));
        check_rows(s, logits, n - 1, 1, "after what the prefix table had");
        kvc_seq_query(seq, &info);
        hits += info.prefix_hit;
        if (i == 1) assert_int_equal(info.prefix_hit, N - 1);
        append(s, s->ctx, seq, n, N, 9, "after a prefix");
        kvc_seq_close(seq);
    }
    assert_true(hits > N);
    kvc_cache_free(cache);
}

/* A fork goes on with the text while the other reads something else, which it then forgets. */
static void check_fork(stand *s) {
    kvc_seq *seq = new_seq(s->cache), *fork;
    uint32_t i, at;
    for (i = 0; i < 3; i++) {
        at = 1 + draw(s, N - 2);
        OK(kvc_seq_rollback(seq, 0));
        append(s, s->ctx, seq, 0, at, 30, "before a fork");
        OK(kvc_seq_fork(&fork, seq, &last));
        OK(kvc_prefill(s->ctx, seq, s->other, 1 + draw(s, N - at), NULL, &last));
        append(s, s->ctx, fork, at, N, 12, "after a fork");
        kvc_seq_close(fork);
        OK(kvc_seq_rollback(seq, at));
        append(s, s->ctx, seq, at, N, 12, "after a roll-back");
    }
    kvc_seq_close(seq);
}

/* As requests, in slices of a microsecond; one is cancelled under way and done again. */
static void check_slices(stand *s) {
    kvc_request q = {0};
    kvc_seq *seq = new_seq(s->cache);
    uint32_t at = 0, n, slices, cancel;
    while (at < N) {
        n = 1 + draw(s, N - at);
        for (cancel = 1; cancel < 2; cancel--) {
            memset(&q, 0, sizeof q);
            q.seq = seq;
            q.tokens = s->text + at;
            q.n_tokens = n;
            q.n_rows = n;
            q.logits = s->got;
            OK(kvc_submit(s->ctx, &q, &last));
            for (slices = 0; kvc_run(s->ctx, 1); slices++)
                if (cancel && slices == 3) kvc_cancel(s->ctx, &q);
            if (q.result == KVC_OK) break;
            assert_int_equal(q.result, KVC_ERROR_CANCELLED);
            assert_int_equal(kvc_seq_length(seq), at);
        }
        assert_int_equal(q.result, KVC_OK);
        check_rows(s, s->got, at, n, "in slices of time");
        at += n;
    }
    kvc_seq_close(seq);
}

static void check_saved(stand *s) {
    kvc_seq *seq = new_seq(s->cache), *loaded;
    kvc_cache *cache = stand_cache(s, 0);
    bytes_out f = {NULL, 0, 0};
    uint32_t at = 1 + draw(s, N - 2);
    append(s, s->ctx, seq, 0, at, 30, "before it is saved");
    OK(kvc_seq_save(seq, KVC_SAVE_ALL, file_write, &f, &last));
    OK(kvc_seq_load_memory(&loaded, cache, NULL, f.bytes, f.size, &last));
    append(s, s->ctx, loaded, at, N, 12, "after it was loaded");
    kvc_seq_close(loaded);
    kvc_seq_close(seq);
    kvc_cache_free(cache);
    free(f.bytes);
}

static const struct {
    const char *name;
    void (*check)(stand *s);
} properties[] = {
    {"split", check_split}, {"machines", check_machines}, {"batch", check_batch},
    {"prefix", check_prefix}, {"fork", check_fork}, {"slices", check_slices},
    {"saved", check_saved}
};

static void every_property(const zoo_entry *e, kvc_kv_type kv) {
    size_t k;
    stand s;
    stand_open(&s, e, kv);
    for (k = 0; k < COUNT(properties); k++) properties[k].check(&s);
    stand_close(&s);
}

static void test_properties(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(zoo); i++) every_property(&zoo[i], KVC_KV_F32);
    print_message("%u models, %u properties\n", (unsigned)COUNT(zoo), (unsigned)COUNT(properties));
}

/* Each model with one of the other types of K and V. */
static void test_kv_types(void **state) {
    static const kvc_kv_type types[] = {KVC_KV_F16, KVC_KV_Q8, KVC_KV_Q4};
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(zoo); i++) every_property(&zoo[i], types[i % COUNT(types)]);
}

/* ---- beside the oracle ---- */

static double largest_difference(const float *got, const double *want, size_t n) {
    double largest = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        double d = fabs((double)got[i] - want[i]);
        if (!(d <= largest)) largest = d;
    }
    return largest;
}

/* With float matrices all rows are close. With others the oracle rounds activations as kvc.h does;
   where a value lies between two roundings, or two experts are as good, a row may differ. It cannot
   round a latent alike that kvc.h, having absorbed the key's up-projection, never multiplies: there
   most rows are as near as 8-bit activations are to exact ones. */
static void test_exact(void **state) {
    size_t i, row;
    (void)state;
    for (i = 0; i < COUNT(zoo); i++) {
        const int rounded = zoo[i].shape.type == GGUF_Q8_0 || zoo[i].shape.type == GGUF_Q4_0;
        const int absorbed = rounded && zoo[i].shape.kv_rank != 0;
        double *exact, d, largest = 0;
        unsigned n_close = 0;
        naive_model m;
        stand s;
        stand_open(&s, &zoo[i], KVC_KV_F32);
        naive_open(&m, s.rig.image);
        m.n_ctx = N;
        m.round_q8 = rounded && !absorbed;
        exact = naive_forward(&m, s.text, N);
        for (row = 0; row < N; row++) {
            const size_t at = row * s.rig.info.n_vocab;
            d = largest_difference(s.want + at, exact + at, s.rig.info.n_vocab);
            n_close += d < (absorbed ? 0.6 : 2e-4);
            if (d > largest) largest = d;
        }
        print_message("%-20s largest difference %.1e, %u of %u rows close\n", zoo[i].name, largest,
            n_close, (unsigned)N);
        assert_true(n_close >= (rounded ? N * 3 / 4 : N));
        free(exact);
        stand_close(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact),
        cmocka_unit_test(test_properties),
        cmocka_unit_test(test_kv_types)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
