/* Several threads of a host on one cache, each with a context of its own: forks of the same
   sequences, steps, roll-backs, and prompts that share a prefix table. Clean under the thread
   sanitizer, and the same bits as alone.

       test_threads [SECONDS]   how long the prompts are played, else a few rounds of each */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include <pthread.h>
#include <time.h>

#include "testing.h"

#include "attic.h"

enum { N_VOCAB = 48, PAGE = 16 };
#define TINY .n_embd = 32, .n_heads = 2, .n_kv_heads = 1, .n_ff = 48, .n_vocab = N_VOCAB, \
    .n_ctx = 4096

enum { N_THREADS = 4, N_BASE = 40, N_OWN = 60, ROUNDS = 40 };

/* A thread with a context of its own, which forks sequences that all threads may fork, writes its
   own text behind them and compares with what a cold run gave. */
typedef struct worker {
    pthread_t thread;
    kvc_cache *cache;
    kvc_ctx *ctx;
    const kvc_seq *base;        /* N_BASE positions of text */
    kvc_token text[N_BASE + N_OWN];
    float *cold;                /* [N_BASE + N_OWN, N_VOCAB] */
    uint64_t state;
    unsigned n_wrong, n_same, n_full;
} worker;

static void worker_look(worker *w, kvc_result r, const float *logits, size_t at) {
    if (r == KVC_ERROR_FULL) w->n_full++;
    else if (r != KVC_OK || memcmp(logits, w->cold + at * N_VOCAB, N_VOCAB * sizeof *logits))
        w->n_wrong++;
    else w->n_same++;
}

static void *worker_run(void *arg) {
    worker *w = (worker *)arg;
    int round;
    for (round = 0; round < ROUNDS; round++) {
        kvc_error err;
        kvc_seq *seq;
        const float *logits = NULL;
        size_t n = N_BASE + 1 + model_random(&w->state) % (N_OWN - 1), back;
        kvc_result r = kvc_seq_fork(&seq, w->base, &err);
        if (r != KVC_OK) {
            w->n_wrong++;
            continue;
        }
        r = kvc_prefill(w->ctx, seq, w->text + N_BASE, n - N_BASE, &logits, &err);
        worker_look(w, r, logits, n - 1);
        if (r == KVC_OK) {
            back = model_random(&w->state) % (n - N_BASE) + N_BASE;
            if (kvc_seq_rollback(seq, (uint32_t)back) != KVC_OK) w->n_wrong++;
            r = kvc_decode(w->ctx, seq, w->text[back], &logits, &err);
            worker_look(w, r, logits, back);
        }
        kvc_seq_close(seq);
    }
    return NULL;
}

/* The counter of testing.h serves one thread at a time. */
static void *plain_alloc(size_t size, size_t align, void *user) {
    void *p = NULL;
    (void)user;
    return posix_memalign(&p, align < sizeof p ? sizeof p : align, size) ? NULL : p;
}

static void plain_free(void *p, size_t size, void *user) {
    (void)size, (void)user;
    free(p);
}

static void run_threads(const model_shape *shape, kvc_policy policy, uint32_t n_pages) {
    static worker workers[N_THREADS];
    kvc_cache_desc desc = {0};
    kvc_token base[N_BASE];
    kvc_cache_info info;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seqs[2];
    unsigned n_same = 0, n_full = 0, i;
    rig r;
    rig_open(&r, shape);
    random_tokens(base, N_BASE, N_VOCAB, 5);
    desc.model = r.model;
    desc.n_ctx = policy == KVC_POLICY_GROW ? N_BASE : N_BASE + N_OWN;
    desc.n_seqs = 2 + N_THREADS;
    desc.n_pages = n_pages;
    desc.page_size = PAGE;
    desc.n_batch = 16;
    desc.n_back = N_OWN;
    desc.allocator.alloc = plain_alloc;
    desc.allocator.free = plain_free;
    OK(kvc_cache_new(&cache, &desc, &last));
    ctx = new_ctx(&r, 64, 1, KVC_ISA_BEST);
    seqs[0] = new_seq(cache);
    OK(kvc_seq_set_policy(seqs[0], policy, 0, 0, &last));
    OK(kvc_prefill(ctx, seqs[0], base, N_BASE, NULL, &last));
    OK(kvc_seq_fork(&seqs[1], seqs[0], &last));
    for (i = 0; i < N_THREADS; i++) {
        worker *w = &workers[i];
        memset(w, 0, sizeof *w);
        w->cache = cache;
        w->base = seqs[i % 2];
        w->state = i + 1;
        memcpy(w->text, base, sizeof base);
        random_tokens(w->text + N_BASE, N_OWN, N_VOCAB, 100 + i);
        w->cold = cold_run(&r, w->text, N_BASE + N_OWN, KVC_KV_F32);
        w->ctx = new_ctx(&r, 7 + i, 1 + i % 2, KVC_ISA_BEST);
    }
    for (i = 0; i < N_THREADS; i++)
        assert_int_equal(pthread_create(&workers[i].thread, NULL, worker_run, &workers[i]), 0);
    for (i = 0; i < N_THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        assert_int_equal(workers[i].n_wrong, 0);
        n_same += workers[i].n_same;
        n_full += workers[i].n_full;
        kvc_ctx_free(workers[i].ctx);
        free(workers[i].cold);
    }
    print_message("%u steps the same, %u found the cache full\n", n_same, n_full);
    assert_true(n_same > 10);
    kvc_seq_close(seqs[0]);
    kvc_seq_close(seqs[1]);
    kvc_cache_query(cache, &info);
    assert_int_equal(info.pages_free, info.pages_total);
    assert_int_equal(info.reaches[0].pages_promised, 0);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

static void test_threads(void **state) {
    static const model_shape plain = {TINY}, windows = {TINY, .window = 20, .pattern = 2};
    (void)state;
    run_threads(&plain, KVC_POLICY_ERROR, 0);
    run_threads(&plain, KVC_POLICY_ERROR, 14);      /* not enough for all at once */
    run_threads(&windows, KVC_POLICY_ERROR, 0);
    run_threads(&plain, KVC_POLICY_GROW, 3);
}

/* ---- a prefix table ---- */

enum { N_PLAYERS = 8, N_PROMPTS = 64, PROMPT = 150, PLAYS = 40 };

typedef struct player {
    pthread_t thread;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_token (*prompts)[PROMPT];
    float **cold;               /* [N_PROMPTS][PROMPT, N_VOCAB] */
    uint64_t state;
    time_t end;                 /* 0: PLAYS rounds */
    unsigned n_wrong, n_same, n_full;
    uint64_t n_hit, n_asked;
} player;

/* A prompt up to some place, in a piece or two, some decodes, perhaps a way back or a fork. */
static void play(player *p) {
    uint32_t k = (uint32_t)(model_random(&p->state) % N_PROMPTS), at = 0, part, i;
    const kvc_token *text = p->prompts[k];
    kvc_seq *seq, *fork;
    const float *logits;
    kvc_error err;
    if (kvc_seq_open_shared(&seq, p->cache, NULL, &err) != KVC_OK) {
        p->n_full++;
        return;
    }
    for (i = 0; i < 6 && at < PROMPT; i++) {
        kvc_seq_info info;
        kvc_result r;
        part = 1;
        if (i < 2) part += (uint32_t)(model_random(&p->state) % (PROMPT - at));
        r = part == 1 ? kvc_decode(p->ctx, seq, text[at], &logits, &err) :
            kvc_prefill(p->ctx, seq, text + at, part, &logits, &err);
        if (r == KVC_ERROR_FULL) {
            p->n_full++;
            break;
        }
        at += part;
        if (r != KVC_OK || memcmp(logits, p->cold[k] + (size_t)(at - 1) * N_VOCAB,
            N_VOCAB * sizeof *logits)) p->n_wrong++;
        else p->n_same++;
        kvc_seq_query(seq, &info);
        p->n_hit += info.prefix_hit;
        p->n_asked += part;
        if (model_random(&p->state) % 4 == 0) {
            uint32_t back = at - (uint32_t)(model_random(&p->state) % (at < 20 ? at : 20));
            if (back >= info.rollback_least) at = back;
            if (kvc_seq_rollback(seq, at) != KVC_OK) p->n_wrong++;
        }
        if (model_random(&p->state) % 8 == 0 && kvc_seq_fork(&fork, seq, &err) == KVC_OK) {
            kvc_seq_close(seq);
            seq = fork;
        }
    }
    kvc_seq_close(seq);
}

static void *player_run(void *arg) {
    player *p = (player *)arg;
    int round;
    for (round = 0; p->end ? time(NULL) < p->end : round < PLAYS; round++) play(p);
    return NULL;
}

static int seconds;

/* What is saved while all of them play can be loaded while they do, and put into the tier. */
static void save_and_load(kvc_cache *cache) {
    bytes_out f = {0};
    uint32_t n = 0;
    int i;
    for (i = 0; i < 4; i++) {
        f.size = 0;
        OK(kvc_prefix_save(cache, file_write, &f, &last));
        OK(kvc_prefix_load_memory(cache, f.bytes, f.size, &n, &last));
        kvc_prefix_flush(cache, 20);
    }
    free(f.bytes);
}

static void run_prefix(const model_shape *shape, kvc_kv_type kv, int with_tier) {
    static player players[N_PLAYERS];
    static kvc_token prompts[N_PROMPTS][PROMPT];
    static float *cold[N_PROMPTS];
    kvc_cache_desc desc = {0};
    kvc_cache_info info;
    kvc_cache *cache;
    unsigned n_same = 0, n_full = 0, i;
    uint64_t n_hit = 0, n_asked = 0;
    attic a;
    rig r;
    rig_open(&r, shape);
    for (i = 0; i < N_PROMPTS; i++) {   /* with beginnings in common */
        random_tokens(prompts[i], PROMPT, N_VOCAB, 1);
        random_tokens(prompts[i] + i % 8 * 12, PROMPT - i % 8 * 12, N_VOCAB, 2 + i % 8);
        random_tokens(prompts[i] + 100, PROMPT - 100, N_VOCAB, 100 + i);
        cold[i] = cold_run(&r, prompts[i], PROMPT, kv);
    }
    desc.model = r.model;
    desc.n_ctx = PROMPT;
    desc.n_seqs = 2 * N_PLAYERS;
    desc.page_size = PAGE;
    desc.n_batch = 16;
    desc.n_back = 20;
    desc.n_pages = N_PROMPTS * (PROMPT / PAGE + 1) / 4;
    desc.n_prefix = desc.n_pages;
    desc.allocator.alloc = plain_alloc;
    desc.allocator.free = plain_free;
    desc.type_k = desc.type_v = kv;
    attic_open(&a, 4000);
    a.lose_one_in = 10;
    if (with_tier) desc.tier = attic_tier(&a);
    OK(kvc_cache_new(&cache, &desc, &last));
    for (i = 0; i < N_PLAYERS; i++) {
        player *p = &players[i];
        memset(p, 0, sizeof *p);
        p->cache = cache;
        p->prompts = prompts;
        p->cold = cold;
        p->state = i + 1;
        p->end = seconds ? time(NULL) + seconds : 0;
        p->ctx = new_ctx(&r, 7 + i, 1 + i % 2, KVC_ISA_BEST);
    }
    for (i = 0; i < N_PLAYERS; i++)
        assert_int_equal(pthread_create(&players[i].thread, NULL, player_run, &players[i]), 0);
    save_and_load(cache);
    for (i = 0; i < N_PLAYERS; i++) {
        pthread_join(players[i].thread, NULL);
        assert_int_equal(players[i].n_wrong, 0);
        n_same += players[i].n_same;
        n_full += players[i].n_full;
        n_hit += players[i].n_hit;
        n_asked += players[i].n_asked;
        kvc_ctx_free(players[i].ctx);
    }
    kvc_cache_query(cache, &info);
    print_message("%u steps the same, %u found the cache full; %lu of %lu tokens were there, %lu "
        "pages evicted; of the tier %u put, %u got\n", n_same, n_full, (unsigned long)n_hit,
        (unsigned long)n_asked, (unsigned long)info.prefix_evicted, a.n_put, a.n_got);
    assert_true(n_hit > 0 && n_same > 100);
    assert_int_equal(info.tier_refused, 0);
    assert_true(!with_tier || (a.n_put > 10 && a.n_got > 10));
    assert_int_equal(a.n_open + a.n_faults, 0);
    attic_close(&a);
    assert_int_equal(info.pages_live, 0);
    assert_int_equal(info.pages_free + info.pages_cached, info.pages_total);
    assert_int_equal(info.reaches[0].pages_promised, 0);
    for (i = 0; i < N_PROMPTS; i++) free(cold[i]);
    kvc_cache_free(cache);
    rig_close(&r);
}

static void test_prefix_threads(void **state) {
    static const model_shape plain = {TINY}, windows = {TINY, .window = 20, .pattern = 2};
    (void)state;
    run_prefix(&plain, KVC_KV_F32, 0);
    run_prefix(&windows, KVC_KV_F16, 0);
    run_prefix(&plain, KVC_KV_Q8, 0);
    run_prefix(&windows, KVC_KV_F32, 1);
}

int main(int argc, char **argv) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_prefix_threads)
    };
    if (argc > 1) seconds = atoi(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
