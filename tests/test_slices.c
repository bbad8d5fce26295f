/* Steps in slices of time: however they are cut, whatever is cancelled and whoever's threads
   compute them, sequences and logits are those of one call after the other. Time is counted in
   looks at the clock here, so that slices end at every place. */
#define _GNU_SOURCE   /* sched_getaffinity, in the test of on_thread */
#include "../kvc.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "testing.h"

#include "pairs.h"

/* ---- clocks and job systems ---- */

static uint64_t tick(void *user) {
    return __atomic_add_fetch((uint64_t *)user, 1, __ATOMIC_SEQ_CST);
}

/* A host whose jobs run one after the other, the last first. */
static void one_after_the_other(uint32_t n, void (*fn)(void *, uint32_t), void *arg, void *user) {
    ++*(unsigned *)user;
    while (n > 0) fn(arg, --n);
}

typedef struct part {
    void (*fn)(void *, uint32_t);
    void *arg;
    uint32_t i;
} part;

static void *run_part(void *arg) {
    part *p = (part *)arg;
    p->fn(p->arg, p->i);
    return NULL;
}

/* A host with a thread for each job, the caller doing none, and a call with a number too high. */
static void all_at_once(uint32_t n, void (*fn)(void *, uint32_t), void *arg, void *user) {
    pthread_t threads[8];
    part parts[8];
    uint32_t i;
    ++*(unsigned *)user;
    for (i = 0; i < n; i++) {
        parts[i].fn = fn;
        parts[i].arg = arg;
        parts[i].i = i;
        pthread_create(&threads[i], NULL, run_part, &parts[i]);
    }
    fn(arg, n + 1);
    for (i = 0; i < n; i++) pthread_join(threads[i], NULL);
}

/* ---- random slices and cancels ---- */

enum { OWN_THREADS, HOST_IN_TURN, HOST_AT_ONCE };

static unsigned n_told, n_calls, n_slices, n_cancelled;
static uint64_t now_ticks;

static void tell(kvc_request *request) {
    assert_true(request->is_done);
    n_told++;
}

/* Requests are submitted now and then while others run. */
static void one_sliced_batch(pair *p) {
    uint32_t n = 1 + draw(p, N_SEQS), first = draw(p, N_SEQS), i = 0, most = 1 + draw(p, 60);
    const uint32_t cancels = draw(p, 3) == 0 ? 1000000 : 1 + draw(p, 12);
    int runs = 0;
    n_told = 0;
    make_requests(p, first, n);
    while (i < n || runs) {
        while (i < n && (draw(p, 3) != 0 || !runs)) {
            kvc_request *q = &p->requests[i++];
            q->on_done = tell;
            q->priority = draw(p, 3);
            OK(kvc_submit(p->ctx[0], q, &last));
            FAILS(KVC_ERROR_ARGUMENT, "request", kvc_submit(p->ctx[0], q, &last));
            runs = 1;
        }
        runs = kvc_run(p->ctx[0], draw(p, most));
        n_slices++;
        if (draw(p, cancels) == 0) kvc_cancel(p->ctx[0], &p->requests[draw(p, i)]);
        if (draw(p, 10 * cancels) == 0) kvc_cancel(p->ctx[0], NULL);
    }
    assert_int_equal(n_told, n);
    pair_check(p, first, n);
}

static void random_slices(const model_shape *shape, kvc_kv_type kv, kvc_policy policy, int shared,
    uint32_t n_batch, uint32_t n_threads, int jobs) {
    static pair p;
    kvc_ctx_desc desc = {0};
    int i;
    pair_open(&p, shape, kv, policy, shared, n_batch, n_threads);
    kvc_ctx_free(p.ctx[0]);
    desc.model = p.rig.model;
    desc.n_batch = n_batch;
    desc.n_chunk = n_batch / 2;
    desc.n_threads = n_threads;
    desc.clock_us = tick;
    desc.user = &now_ticks;
    if (jobs != OWN_THREADS)
        desc.jobs.parallel_for = jobs == HOST_IN_TURN ? one_after_the_other : all_at_once;
    desc.jobs.user = &n_calls;
    n_calls = n_slices = 0;
    OK(kvc_ctx_new(&p.ctx[0], &desc, &last));
    for (i = 0; i < 70; i++) {
        one_sliced_batch(&p);
        disturb(&p);
        disturb(&p);
    }
    print_message("%u rows equal in %u slices, %u requests cancelled\n", p.n_rows, n_slices,
        p.n_cancelled);
    assert_true(p.n_rows > 500);
    assert_true(p.n_cancelled > 50 && n_slices > 500);
    if (n_threads > 1 && jobs != OWN_THREADS) assert_true(n_calls > 100);
    n_cancelled += p.n_cancelled;
    pair_close(&p);
}

static void test_random(void **state) {
    (void)state;
    random_slices(&plain, KVC_KV_F32, KVC_POLICY_ERROR, 0, 64, 1, OWN_THREADS);
    random_slices(&heads, KVC_KV_F32, KVC_POLICY_ERROR, 0, 7, 2, HOST_IN_TURN);
    random_slices(&heads, KVC_KV_Q8, KVC_POLICY_ERROR, 1, 50, 3, OWN_THREADS);
    random_slices(&windows, KVC_KV_F16, KVC_POLICY_ERROR, 1, 128, 2, HOST_AT_ONCE);
    random_slices(&windows, KVC_KV_F32, KVC_POLICY_GROW, 0, 300, 1, OWN_THREADS);
    random_slices(&windows, KVC_KV_Q4, KVC_POLICY_WINDOW, 0, 33, 2, OWN_THREADS);
    random_slices(&plain, KVC_KV_F16, KVC_POLICY_HEAVY, 0, 90, 3, HOST_IN_TURN);
    random_slices(&plain, KVC_KV_Q8, KVC_POLICY_HEAVY, 1, 20, 1, OWN_THREADS);
    print_message("%u requests cancelled in all\n", n_cancelled);
    assert_true(n_cancelled > 1000);
}

/* ---- one step ---- */

/* A model, a cache and a context whose clock is counted. */
typedef struct bench {
    rig rig;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_token text[300];
    float *cold;                /* [300, N_VOCAB] */
    float logits[8 * N_VOCAB];
    kvc_request q[8];
    kvc_error err[8];
} bench;

static void bench_open(bench *b, const model_shape *shape, kvc_ctx_desc desc) {
    memset(b, 0, sizeof *b);
    rig_open(&b->rig, shape);
    b->cache = new_cache(&b->rig, 400, 8, PAGE, KVC_KV_F32);
    desc.model = b->rig.model;
    desc.clock_us = tick;
    desc.user = &now_ticks;
    OK(kvc_ctx_new(&b->ctx, &desc, &last));
    random_tokens(b->text, 300, N_VOCAB, 3);
    b->cold = cold_run(&b->rig, b->text, 300, KVC_KV_F32);
}

static void bench_close(bench *b) {
    kvc_ctx_free(b->ctx);
    kvc_cache_free(b->cache);
    free(b->cold);
    rig_close(&b->rig);
}

/* Submits the i-th request: n tokens of the text for a sequence, from its end on. */
static void bench_submit(bench *b, int i, kvc_seq *seq, size_t n) {
    memset(&b->q[i], 0, sizeof b->q[i]);
    b->q[i].seq = seq;
    b->q[i].tokens = b->text + kvc_seq_length(seq);
    b->q[i].n_tokens = n;
    b->q[i].n_rows = 1;
    b->q[i].logits = b->logits + i * N_VOCAB;
    b->q[i].err = &b->err[i];
    OK(kvc_submit(b->ctx, &b->q[i], &last));
}

static void bench_check(const bench *b, int i) {
    assert_int_equal(b->q[i].result, KVC_OK);
    assert_true(b->q[i].is_done);
    SAME(b->q[i].logits, b->cold + (b->q[i].n_tokens - 1) * N_VOCAB, 1, N_VOCAB, "in slices");
}

/* With no time at all each call still gets on by a tile, and nothing is allocated. */
static void test_no_time(void **state) {
    kvc_ctx_desc desc = {0};
    unsigned n = 0;
    size_t before;
    kvc_ctx_info info;
    bench b;
    (void)state;
    desc.n_batch = 64;
    bench_open(&b, &plain, desc);
    before = b.rig.mem.n_allocs;
    bench_submit(&b, 0, new_seq(b.cache), 300);
    bench_submit(&b, 1, new_seq(b.cache), 1);
    while (kvc_run(b.ctx, 0)) n++;
    assert_true(n > 100 && n < 2000);
    bench_check(&b, 0);
    bench_check(&b, 1);
    assert_int_equal(b.rig.mem.n_allocs, before);
    kvc_ctx_query(b.ctx, &info);
    assert_int_equal(info.n_rows, 301);
    assert_int_equal(info.n_logit_rows, 2);
    assert_true(info.run_us_most > 0 && info.run_us_late <= info.run_us_most);
    assert_int_equal(kvc_run(b.ctx, 5), 0);
    assert_int_equal(kvc_run(NULL, 5), 0);
    bench_close(&b);
}

/* A clock that is set back ends a slice and nothing else. */
static void test_clock_back(void **state) {
    kvc_ctx_desc desc = {0};
    unsigned n = 0;
    bench b;
    (void)state;
    bench_open(&b, &plain, desc);
    now_ticks = 1000000;
    bench_submit(&b, 0, new_seq(b.cache), 300);
    for (; kvc_run(b.ctx, 3); n++)
        if (n == 5) now_ticks = 100;
    bench_check(&b, 0);
    bench_close(&b);
}

static void test_progress(void **state) {
    kvc_ctx_desc desc = {0};
    uint32_t left, most = 0;
    float done = 0, now;
    unsigned n = 0;
    bench b;
    (void)state;
    desc.n_batch = 32;
    bench_open(&b, &plain, desc);
    assert_true(kvc_progress(b.ctx, NULL) == 1);
    bench_submit(&b, 0, new_seq(b.cache), 300);
    assert_true(kvc_run(b.ctx, 1));
    for (; kvc_run(b.ctx, 3); n++) {
        now = kvc_progress(b.ctx, &left);
        assert_true(now >= done && now <= 1);
        done = now;
        if (left != UINT32_MAX && left > most) most = left;
    }
    assert_true(n > 50 && most > n);
    assert_true(kvc_progress(b.ctx, &left) == 1);
    assert_int_equal(left, 0);
    bench_close(&b);
}

/* Tokens that were there count as the time that their computing would have taken. */
static void test_saved_time(void **state) {
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc desc = {0};
    kvc_cache_info info;
    kvc_cache *cache;
    kvc_seq *seq;
    uint64_t start, took;
    bench b;
    (void)state;
    bench_open(&b, &plain, desc);
    cache_desc.model = b.rig.model;
    cache_desc.n_ctx = 300;
    cache_desc.n_seqs = 2;
    cache_desc.n_prefix = 100;
    OK(kvc_cache_new(&cache, &cache_desc, &last));
    OK(kvc_seq_open_shared(&seq, cache, NULL, &last));
    start = now_ticks;
    OK(kvc_prefill(b.ctx, seq, b.text, 300, NULL, &last));
    took = now_ticks - start;
    kvc_cache_query(cache, &info);
    assert_int_equal(info.prefix_saved_us, 0);
    OK(kvc_seq_open_shared(&seq, cache, NULL, &last));
    OK(kvc_prefill(b.ctx, seq, b.text, 300, NULL, &last));
    kvc_cache_query(cache, &info);
    assert_int_equal(info.prefix_hit, 299);
    assert_true(info.prefix_saved_us > took / 2 && info.prefix_saved_us <= took);
    kvc_cache_free(cache);
    bench_close(&b);
}

/* A sequence in a request is the context's, and so is the context the request's. */
static void test_busy(void **state) {
    kvc_ctx_desc desc = {0};
    const uint32_t from[1] = {0};
    const float *logits;
    kvc_seq *seq, *other;
    kvc_cache_info info;
    kvc_token token;
    kvc_pin pin;
    size_t n;
    bench b;
    (void)state;
    bench_open(&b, &plain, desc);
    seq = new_seq(b.cache);
    bench_submit(&b, 0, seq, 300);
    assert_true(kvc_run(b.ctx, 20));
    FAILS(KVC_ERROR_ARGUMENT, "ctx", kvc_decode(b.ctx, seq, 1, &logits, &last));
    FAILS(KVC_ERROR_ARGUMENT, "ctx", kvc_prefill(b.ctx, seq, b.text, 2, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "ctx", kvc_batch(b.ctx, NULL, 0, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_seq_fork(&other, seq, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_seq_remove(seq, 0, 1, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seqs", kvc_seq_reorder(&seq, from, 1, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_prefix_pin(&pin, seq, 0, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_prefix_fetch(seq, &token, 0, &n, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_seq_set_policy(seq, KVC_POLICY_GROW, 0, 0, &last));
    assert_int_equal(kvc_seq_rollback(seq, 0), KVC_ERROR_ARGUMENT);
    assert_int_equal(kvc_seq_save_size(seq, KVC_SAVE_ALL), 0);
    assert_int_equal(kvc_seq_length(seq), 0);
    bench_submit(&b, 1, seq, 300);              /* at the same time as the other */
    bench_submit(&b, 2, new_seq(b.cache), 200);
    assert_int_equal(kvc_run(b.ctx, KVC_NO_LIMIT), 0);
    bench_check(&b, 0);
    bench_check(&b, 2);
    assert_int_equal(b.q[1].result, KVC_ERROR_ARGUMENT);
    assert_string_equal(b.err[1].where, "seq");
    FAILS(KVC_ERROR_ARGUMENT, "request", kvc_submit(b.ctx, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "ctx", kvc_submit(NULL, &b.q[0], &last));
    kvc_cancel(NULL, NULL);

    /* one is closed on the way, the others when the context is freed */
    OK(kvc_seq_rollback(seq, 0));
    bench_submit(&b, 0, seq, 300);
    bench_submit(&b, 1, b.q[2].seq, 50);
    assert_true(kvc_run(b.ctx, 20));
    kvc_seq_close(seq);
    assert_true(kvc_run(b.ctx, 1000) || b.q[1].is_done);
    assert_int_equal(b.q[0].result, KVC_ERROR_CANCELLED);
    kvc_cache_query(b.cache, &info);
    assert_int_equal(info.n_seqs_open, 1);
    kvc_run(b.ctx, KVC_NO_LIMIT);
    OK(b.q[1].result);
    bench_submit(&b, 0, new_seq(b.cache), 300);
    bench_submit(&b, 1, new_seq(b.cache), 300);
    assert_true(kvc_run(b.ctx, 20));
    bench_submit(&b, 3, new_seq(b.cache), 300);
    kvc_ctx_free(b.ctx);
    b.ctx = NULL;
    assert_int_equal(b.q[0].result, KVC_ERROR_CANCELLED);
    assert_int_equal(b.q[1].result, KVC_ERROR_CANCELLED);
    assert_int_equal(b.q[3].result, KVC_ERROR_CANCELLED);
    kvc_cache_query(b.cache, &info);
    assert_int_equal(info.pages_live, (200 + 50 + PAGE - 1) / PAGE);
    assert_int_equal(info.reaches[0].pages_promised, 0);
    bench_close(&b);
}

/* Where there is no page to keep what a window gives up, a cancelled request is finished. */
static void test_lossy(void **state) {
    static const model_shape shape = {TINY, .window = 20};
    kvc_cache_desc desc = {0};
    kvc_ctx_desc none = {0};
    kvc_cache *cache;
    kvc_seq *seq;
    bench b;
    uint32_t pages;
    (void)state;
    for (pages = 0; pages < 2; pages++) {
        bench_open(&b, &shape, none);
        desc.model = b.rig.model;
        desc.n_ctx = 400;
        desc.n_seqs = 1 + pages;
        desc.page_size = PAGE;
        desc.n_batch = 32;
        OK(kvc_cache_new(&cache, &desc, &last));
        seq = new_seq(cache);
        OK(kvc_prefill(b.ctx, seq, b.text, 100, NULL, &last));
        bench_submit(&b, 0, seq, 200);
        assert_true(kvc_run(b.ctx, 30));
        kvc_cancel(b.ctx, &b.q[0]);
        assert_int_equal(kvc_run(b.ctx, KVC_NO_LIMIT), 0);
        assert_int_equal(b.q[0].result, pages ? KVC_ERROR_CANCELLED : KVC_OK);
        assert_int_equal(kvc_seq_length(seq), pages ? 100 : 300);
        if (pages) OK(kvc_prefill_rows(b.ctx, seq, b.text + 100, 200, (size_t[]){199}, 1,
            b.logits, &last));
        SAME(b.logits, b.cold + 299 * N_VOCAB, 1, N_VOCAB, "after the cancel");
        kvc_cache_free(cache);
        bench_close(&b);
    }
}

/* ---- texts ---- */

typedef struct writer {
    kvc_token tokens[64];
    uint32_t n, stop_at;
} writer;

static int write_token(kvc_request *q, kvc_token token) {
    writer *w = (writer *)q->user;
    w->tokens[w->n++] = token;
    return w->n == w->stop_at;
}

static kvc_sampler *new_sampler(const rig *r, uint64_t seed) {
    kvc_sampler_desc desc = {0};
    kvc_sampler *sampler;
    desc.model = r->model;
    desc.temperature = 1;
    desc.top_k = 20;
    desc.seed = seed;
    OK(kvc_sampler_new(&sampler, &desc, &last));
    return sampler;
}

/* More texts than rows of a pass, begun one after the other: each as if it were alone. */
static void test_texts(void **state) {
    kvc_ctx_desc desc = {0};
    writer writers[8];
    kvc_ctx *alone;
    bench b;
    int i, k;
    (void)state;
    desc.n_batch = 5;
    desc.n_chunk = 2;
    bench_open(&b, &plain, desc);
    memset(writers, 0, sizeof writers);
    for (i = 0; i < 8; i++) {
        bench_submit(&b, i, new_seq(b.cache), (size_t)(3 + 5 * i));
        b.q[i].sampler = new_sampler(&b.rig, (uint64_t)i);
        b.q[i].user = &writers[i];
        b.q[i].on_token = write_token;
        b.q[i].limit = (uint32_t)(40 - i);
        b.q[i].priority = (uint32_t)i % 2;
        if (i == 6) writers[i].stop_at = 3;
        for (k = 0; k < 3; k++) kvc_run(b.ctx, 7);
    }
    while (kvc_run(b.ctx, 50)) continue;
    alone = new_ctx(&b.rig, 64, 1, KVC_ISA_BEST);
    for (i = 0; i < 8; i++) {
        kvc_sampler *sampler = new_sampler(&b.rig, (uint64_t)i);
        kvc_seq *seq = b.q[i].seq;
        const uint32_t length = kvc_seq_length(seq);
        const float *logits;
        kvc_token token;
        uint32_t n;
        OK(b.q[i].result);
        OK(kvc_seq_rollback(seq, 0));
        OK(kvc_prefill(alone, seq, b.text, b.q[i].n_tokens, &logits, &last));
        for (n = 1;; n++) {
            OK(kvc_sampler_sample(sampler, logits, &token, &last));
            assert_int_equal(token, writers[i].tokens[n - 1]);
            if (kvc_token_is_end(b.rig.model, token) || n == b.q[i].limit ||
                n == writers[i].stop_at) break;
            OK(kvc_decode(alone, seq, token, &logits, &last));
        }
        assert_int_equal(writers[i].n, n);
        assert_int_equal(b.q[i].n_generated, n);
        assert_int_equal(b.q[i].token, token);
        assert_int_equal(kvc_seq_length(seq), length);
        kvc_sampler_free(sampler);
        kvc_sampler_free(b.q[i].sampler);
    }
    kvc_ctx_free(alone);
    bench_close(&b);
}

/* A text ends with an error where the sequence does; a cancelled one keeps what was told. */
static void test_text_ends(void **state) {
    kvc_ctx_desc desc = {0};
    kvc_cache *small;
    writer w = {{0}, 0, 0};
    bench b;
    (void)state;
    bench_open(&b, &plain, desc);
    small = new_cache(&b.rig, 32, 1, PAGE, KVC_KV_F32);
    bench_submit(&b, 0, new_seq(small), 30);
    b.q[0].sampler = new_sampler(&b.rig, 2);
    b.q[0].n_rows = 2;
    kvc_run(b.ctx, KVC_NO_LIMIT);
    assert_int_equal(b.q[0].result, KVC_ERROR_ARGUMENT);
    assert_string_equal(b.err[0].where, "n_rows");
    b.q[0].n_rows = 1;
    b.q[0].on_token = write_token;
    b.q[0].user = &w;
    OK(kvc_submit(b.ctx, &b.q[0], &last));
    kvc_run(b.ctx, KVC_NO_LIMIT);
    assert_int_equal(b.q[0].result, KVC_ERROR_FULL);
    assert_int_equal(w.n, 3);
    assert_int_equal(kvc_seq_length(b.q[0].seq), 32);
    OK(kvc_seq_rollback(b.q[0].seq, 0));
    w.n = 0;
    b.q[0].n_tokens = 5;
    OK(kvc_submit(b.ctx, &b.q[0], &last));
    while (w.n < 4) assert_true(kvc_run(b.ctx, 1));
    kvc_cancel(b.ctx, NULL);
    assert_int_equal(kvc_run(b.ctx, 1), 0);
    assert_int_equal(b.q[0].result, KVC_ERROR_CANCELLED);
    assert_int_equal(b.q[0].n_generated, 4);
    assert_int_equal(kvc_seq_length(b.q[0].seq), 5 + 3);
    kvc_sampler_free(b.q[0].sampler);
    kvc_cache_free(small);
    bench_close(&b);
}

/* The request of the highest priority is read first, a text that is being written goes on beside
   it, and what is told may be answered at once. */
static void answer(kvc_request *q) {
    bench *b = (bench *)q->user;
    n_told = n_told * 10 + (unsigned)(q - b->q) + 1;
    if (n_told < 1000 && q->n_tokens > 1) {
        q->n_tokens = 1;
        OK(kvc_submit(b->ctx, q, &last));
    }
}

static void test_order(void **state) {
    kvc_ctx_desc desc = {0};
    bench b;
    int i;
    (void)state;
    desc.n_batch = 16;
    bench_open(&b, &plain, desc);
    n_told = 0;
    for (i = 0; i < 3; i++) {
        bench_submit(&b, i, new_seq(b.cache), 100);
        b.q[i].priority = i == 1 ? 5 : 1;
        b.q[i].on_done = answer;
        b.q[i].user = &b;
    }
    assert_int_equal(kvc_run(b.ctx, KVC_NO_LIMIT), 0);
    /* 2 is read first, 1 before 3, and the answers come beside what is read */
    assert_int_equal(n_told, 22113);
    bench_close(&b);
}

/* ---- threads ---- */

static unsigned n_threads_now(void) {
    DIR *dir = opendir("/proc/self/task");
    unsigned n = 0;
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

/* A thread that was joined may be counted for a moment yet. */
static void wait_for_threads(unsigned n) {
    const struct timespec pause = {0, 1000000};
    int i;
    for (i = 0; i < 2000 && n_threads_now() != n; i++) nanosleep(&pause, NULL);
    assert_int_equal(n_threads_now(), n);
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* With the host's job system the library makes no thread, to pack weights neither; its own sleep
   between slices. */
static void test_whose_threads(void **state) {
    const struct timespec pause = {0, 200000000};
    unsigned before;
    kvc_ctx_desc desc = {0};
    kvc_model_desc model_desc = {0};
    kvc_model *model;
    double used;
    bench b;
    (void)state;
    nanosleep(&pause, NULL);            /* for threads of other tests */
    before = n_threads_now();
    n_calls = 0;
    desc.n_threads = 4;
    desc.jobs.parallel_for = one_after_the_other;
    desc.jobs.user = &n_calls;
    bench_open(&b, &plain, desc);
    bench_submit(&b, 0, new_seq(b.cache), 300);
    while (kvc_run(b.ctx, 5)) assert_int_equal(n_threads_now(), before);
    bench_check(&b, 0);
    assert_true(n_calls > 10);
    model_desc.data = b.rig.image;
    model_desc.data_size = b.rig.image_size;
    model_desc.n_threads = 4;
    model_desc.jobs = desc.jobs;
    n_calls = 0;
    OK(kvc_model_open(&model, &model_desc, &last));
    assert_true(n_calls > 0);
    kvc_model_close(model);
    bench_close(&b);

    desc.jobs.parallel_for = NULL;
    bench_open(&b, &plain, desc);
    if (before) assert_int_equal(n_threads_now(), before + 3);
    bench_submit(&b, 0, new_seq(b.cache), 300);
    assert_true(kvc_run(b.ctx, 20));
    used = cpu_seconds();
    nanosleep(&pause, NULL);
    assert_true(cpu_seconds() - used < 0.01);
    kvc_run(b.ctx, KVC_NO_LIMIT);
    bench_check(&b, 0);
    bench_close(&b);
    wait_for_threads(before);
}

typedef struct places {
    unsigned n_begun, n_ended, workers;
} places;

/* Pins each thread to the first processor that it may use. */
static void place(uint32_t worker, int begins, void *user) {
    places *p = (places *)user;
    cpu_set_t set;
    size_t cpu = 0;
    __atomic_add_fetch(begins ? &p->n_begun : &p->n_ended, 1, __ATOMIC_SEQ_CST);
    __atomic_or_fetch(&p->workers, 1u << worker, __ATOMIC_SEQ_CST);
    if (!begins || pthread_getaffinity_np(pthread_self(), sizeof set, &set) != 0) return;
    while (!CPU_ISSET(cpu, &set)) cpu++;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void test_on_thread(void **state) {
    kvc_ctx_desc desc = {0};
    places p = {0, 0, 0};
    bench b;
    (void)state;
    desc.n_threads = 4;
    desc.jobs.on_thread = place;
    desc.jobs.user = &p;
    bench_open(&b, &plain, desc);
    bench_submit(&b, 0, new_seq(b.cache), 300);
    kvc_run(b.ctx, KVC_NO_LIMIT);
    bench_check(&b, 0);
    bench_close(&b);
    assert_int_equal(p.n_begun, 3);
    assert_int_equal(p.n_ended, 3);
    assert_int_equal(p.workers, 2 + 4 + 8);
}

/* ---- cancelled by another thread ---- */

typedef struct canceller {
    kvc_ctx *ctx;
    unsigned stop;
} canceller;

static void *cancel_now_and_then(void *arg) {
    canceller *c = (canceller *)arg;
    struct timespec pause = {0, 0};
    long i;
    for (i = 0; !__atomic_load_n(&c->stop, __ATOMIC_SEQ_CST); i++) {
        pause.tv_nsec = 1000 * (i % 50) * (i % 7);
        nanosleep(&pause, NULL);
        kvc_progress(c->ctx, NULL);
        kvc_cancel(c->ctx, NULL);
    }
    return NULL;
}

static void test_from_another_thread(void **state) {
    kvc_ctx_desc desc = {0};
    unsigned i, n_cancelled_here = 0, n_done = 0;
    canceller c = {NULL, 0};
    pthread_t thread;
    kvc_cache_info info;
    kvc_seq *seq;
    bench b;
    (void)state;
    desc.n_threads = 2;
    desc.n_batch = 32;
    bench_open(&b, &plain, desc);
    seq = new_seq(b.cache);
    c.ctx = b.ctx;
    pthread_create(&thread, NULL, cancel_now_and_then, &c);
    for (i = 0; i < 3000 && (n_cancelled_here < 200 || n_done < 20); i++) {
        const uint32_t length = kvc_seq_length(seq), n = length < 200 ? 100 : 300 - length;
        const float *logits;
        kvc_result r = kvc_prefill(b.ctx, seq, b.text + length, n, &logits, &last);
        if (r == KVC_ERROR_CANCELLED) {
            assert_int_equal(kvc_seq_length(seq), length);
            n_cancelled_here++;
            continue;
        }
        assert_int_equal(r, KVC_OK);
        SAME(logits, b.cold + (length + n - 1) * N_VOCAB, 1, N_VOCAB, "after cancels");
        n_done++;
        if (length + n == 300) OK(kvc_seq_rollback(seq, i % 150));
    }
    __atomic_store_n(&c.stop, 1, __ATOMIC_SEQ_CST);
    pthread_join(thread, NULL);
    print_message("%u prefills cancelled, %u done\n", n_cancelled_here, n_done);
    assert_true(n_cancelled_here > 0);
    OK(kvc_seq_rollback(seq, 0));
    bench_submit(&b, 0, seq, 300);
    kvc_run(b.ctx, KVC_NO_LIMIT);
    bench_check(&b, 0);
    kvc_seq_close(seq);
    kvc_cache_query(b.cache, &info);
    assert_int_equal(info.pages_free, info.pages_total);
    bench_close(&b);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_no_time),
        cmocka_unit_test(test_clock_back),
        cmocka_unit_test(test_progress),
        cmocka_unit_test(test_saved_time),
        cmocka_unit_test(test_busy),
        cmocka_unit_test(test_lossy),
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_text_ends),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_whose_threads),
        cmocka_unit_test(test_on_thread),
        cmocka_unit_test(test_from_another_thread)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
