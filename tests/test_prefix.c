/* The prefix table: what is taken from it has the bits of a cold run, and it is all that there is.
   How much there is, a plain trie of every token that was computed tells. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include "prefix.h"

/* ---- keys ---- */

/* The first of the vectors that the authors publish: bytes 0, 1, 2, ... of these lengths under the
   key 00 to 0f. */
static void test_siphash(void **state) {
    static const struct {
        size_t size;
        unsigned char want[16];
    } vectors[] = {
        {0, {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55,
            0x02, 0x93}},
        {1, {0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22,
            0xfc, 0x45}},
        {2, {0x81, 0x77, 0x22, 0x8d, 0xa4, 0xa4, 0x5d, 0xc7, 0xfc, 0xa3, 0x8b, 0xde, 0xf6, 0x0a,
            0xff, 0xe4}}
    };
    unsigned char bytes[32];
    uint64_t key[2], out[2], other[2];
    kvc__sip h;
    size_t i;
    (void)state;
    for (i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)i;
    memcpy(key, bytes, 16);
    for (i = 0; i < COUNT(vectors); i++) {
        kvc__sip_start(&h, key);
        kvc__sip_end(&h, bytes, vectors[i].size, out);
        assert_memory_equal(out, vectors[i].want, 16);
    }
    for (i = 0; i < 16; i++) {          /* in parts it is the same */
        kvc__sip_start(&h, key);
        kvc__sip_end(&h, bytes, 16 + i, out);
        kvc__sip_start(&h, key);
        kvc__sip_add(&h, bytes, 8);
        kvc__sip_add(&h, bytes + 8, 8);
        kvc__sip_end(&h, bytes + 16, i, other);
        assert_memory_equal(out, other, 16);
    }
}

/* ---- every length ---- */

/* A text of 1 to 300 tokens was computed; then it comes again with other ends. */
static void test_lengths(void **state) {
    enum { MOST = 300, TAIL = 40 };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(kinds); i++) {
        kvc_token text[MOST + TAIL];
        float want[N_VOCAB];
        const float *logits;
        uint32_t n, tail;
        kvc_cache *cache;
        kvc_ctx *ctx, *cold;
        kvc_seq *seq;
        rig r;
        rig_open(&r, &kinds[i].shape);
        ctx = new_ctx(&r, 32, 1, KVC_ISA_BEST);
        cold = new_ctx(&r, 64, 1, KVC_ISA_BEST);
        for (n = 1; n <= MOST; n += i < 2 ? 1 : 1 + n / 20) {
            cache = table_cache(&r, &kinds[i], MOST + TAIL, 60);
            random_tokens(text, n, N_VOCAB, 3);
            seq = shared_seq(cache);
            OK(kvc_prefill(ctx, seq, text, n, NULL, &last));
            assert_int_equal(hit_of(seq), 0);
            kvc_seq_close(seq);
            tail = 1 + (n * 7 + 3) % TAIL;
            random_tokens(text + n, tail, N_VOCAB, 1000 + n);
            seq = shared_seq(cache);
            OK(kvc_prefill(ctx, seq, text, n + tail, &logits, &last));
            cold_last(&r, &kinds[i], cold, text, n + tail, want);
            SAME(logits, want, 1, N_VOCAB, "warm");
            assert_int_equal(hit_of(seq), n);
            /* and the whole of it once more: all but one */
            kvc_seq_close(seq);
            seq = shared_seq(cache);
            OK(kvc_prefill(ctx, seq, text, n + tail, &logits, &last));
            SAME(logits, want, 1, N_VOCAB, "warm, all but one");
            assert_int_equal(hit_of(seq), n + tail - 1);
            kvc_seq_close(seq);
            check_table(cache);
            kvc_cache_free(cache);
        }
        kvc_ctx_free(ctx);
        kvc_ctx_free(cold);
        rig_close(&r);
    }
}

/* Rows whose logits are wanted are computed, whatever is there. */
static void test_wanted_rows(void **state) {
    enum { N = 60 };
    static const size_t rows[] = {0, 17, 40, N - 1};
    kvc_token text[N];
    float got[4 * N_VOCAB], *want;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    size_t i, k;
    rig r;
    (void)state;
    rig_open(&r, &kinds[0].shape);
    cache = table_cache(&r, &kinds[0], N, 20);
    ctx = new_ctx(&r, 32, 1, KVC_ISA_BEST);
    random_tokens(text, N, N_VOCAB, 3);
    want = cold_run(&r, text, N, KVC_KV_F32);
    seq = shared_seq(cache);
    OK(kvc_prefill(ctx, seq, text, N, NULL, &last));
    kvc_seq_close(seq);
    for (i = 0; i < COUNT(rows); i++) {
        seq = shared_seq(cache);
        OK(kvc_prefill_rows(ctx, seq, text, N, rows + i, COUNT(rows) - i, got, &last));
        assert_int_equal(hit_of(seq), rows[i]);
        for (k = i; k < COUNT(rows); k++)
            SAME(got + (k - i) * N_VOCAB, want + rows[k] * N_VOCAB, 1, N_VOCAB, "a wanted row");
        kvc_seq_close(seq);
    }
    free(want);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* ---- conversations ---- */

static void test_conversations(void **state) {
    static const uint32_t parts[] = {2, 4, 10};
    workload *w = make_workload(7);
    size_t i, part;
    (void)state;
    for (i = 0; i < COUNT(kinds); i++) {
        uint32_t n_pages = 4000;
        reuse whole;
        rig r;
        rig_open(&r, &kinds[i].shape);
        whole = play(&r, &kinds[i], w, table_cache(&r, &kinds[i], TALK, n_pages), 1,
            TAKES_ALL);
        print_message("%-28s of %lu tokens %lu could be reused, %lu of them in whole pages; with "
            "room for all %lu were\n", kinds[i].name, (unsigned long)whole.asked,
            (unsigned long)whole.best, (unsigned long)whole.whole, (unsigned long)whole.hit);
        assert_int_equal(whole.hit, whole.best);
        for (part = 0; i % 2 == 0 && part < COUNT(parts); part++) {
            reuse some = play(&r, &kinds[i], w,
                table_cache(&r, &kinds[i], TALK, whole.n_pages / parts[part]), part ? 1 : 4,
                TAKES_ANY);
            print_message("    with 1/%u of the pages %lu\n", parts[part],
                (unsigned long)some.hit);
            assert_true(some.hit > whole.best / 4);
        }
        rig_close(&r);
    }
    free(w);
}

/* ---- one copy ---- */

/* Two sequences compute the same text side by side: one copy is left, and both go on. */
static void test_side_by_side(void **state) {
    enum { N = 100 };
    kvc_token text[N];
    const float *logits;
    float want[N_VOCAB];
    kvc_cache_info info;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *a, *b;
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(kinds); i++) {
        size_t at;
        rig r;
        rig_open(&r, &kinds[i].shape);
        cache = table_cache(&r, &kinds[i], N + 20, 40);
        ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
        random_tokens(text, N, N_VOCAB, 3);
        a = shared_seq(cache), b = shared_seq(cache);
        for (at = 0; at < N; at++) {
            OK(kvc_decode(ctx, a, text[at], &logits, &last));
            OK(kvc_decode(ctx, b, text[at], &logits, &last));
            check_table(cache);
        }
        cold_last(&r, &kinds[i], ctx, text, N, want);
        SAME(logits, want, 1, N_VOCAB, "side by side");
        kvc_cache_query(cache, &info);
        /* whole pages are shared; the last ones are not whole */
        assert_true(info.reaches[cache->token_reach].pages_live <= N / PAGE + 2);
        assert_int_equal(info.n_prefix_entries, kinds[i].shape.window && !kinds[i].shape.pattern ?
            info.n_prefix_entries : N / PAGE + 1);
        kvc_seq_close(a);
        kvc_seq_close(b);
        check_table(cache);
        kvc_ctx_free(ctx);
        kvc_cache_free(cache);
        rig_close(&r);
    }
}

/* ---- salts ---- */

static void test_salts(void **state) {
    enum { N = 50 };
    static const struct {
        const char *salt;
        size_t size;
    } salts[] = {{"", 0}, {"a", 1}, {"b", 1}, {"ab", 2}, {"a\0", 2}, {"\0", 1}};
    kvc_share share = {0};
    kvc_token text[N];
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq, *held[6];
    size_t i, round;
    rig r;
    (void)state;
    rig_open(&r, &kinds[0].shape);
    desc.model = r.model;
    desc.n_ctx = 64;
    desc.n_seqs = 8;
    desc.n_pages = 100;
    desc.page_size = PAGE;
    desc.n_prefix = 100;
    desc.n_salts = COUNT(salts);
    OK(kvc_cache_new(&cache, &desc, &last));
    ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
    random_tokens(text, N, N_VOCAB, 3);
    for (round = 0; round < 2; round++)
        for (i = 0; i < COUNT(salts); i++) {
            share.salt = salts[i].salt;
            share.salt_size = salts[i].size;
            OK(kvc_seq_open_shared(&seq, cache, &share, &last));
            OK(kvc_prefill(ctx, seq, text, N, NULL, &last));
            assert_int_equal(hit_of(seq), round ? N - 1 : 0);
            kvc_seq_close(seq);
        }
    for (i = 0; i < COUNT(salts); i++) {
        share.salt = salts[i].salt;
        share.salt_size = salts[i].size;
        OK(kvc_seq_open_shared(&held[i], cache, &share, &last));
    }
    share.salt = "new";
    share.salt_size = 3;
    FAILS(KVC_ERROR_FULL, "n_salts", kvc_seq_open_shared(&seq, cache, &share, &last));
    assert_null(seq);
    share.salt_size = 65;
    FAILS(KVC_ERROR_ARGUMENT, "salt", kvc_seq_open_shared(&seq, cache, &share, &last));
    share.salt_size = 3;
    share.priority = 101;
    FAILS(KVC_ERROR_ARGUMENT, "priority", kvc_seq_open_shared(&seq, cache, &share, &last));
    share.start_canary = 1;
    FAILS(KVC_ERROR_ARGUMENT, "share", kvc_seq_open_shared(&seq, cache, &share, &last));
    check_table(cache);
    kvc_cache_free(cache);
    desc.n_prefix = 0;
    OK(kvc_cache_new(&cache, &desc, &last));
    FAILS(KVC_ERROR_ARGUMENT, "cache", kvc_seq_open_shared(&seq, cache, NULL, &last));
    kvc_cache_free(cache);
    kvc_ctx_free(ctx);
    rig_close(&r);
}

/* ---- what goes first ---- */

/* Pages of a low priority go before those of a high one, whoever came first. */
static void test_priorities(void **state) {
    enum { N = 65 };
    kvc_token text[4][N];
    kvc_share share = {0};
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    uint32_t i;
    rig r;
    (void)state;
    rig_open(&r, &kinds[0].shape);
    cache = table_cache(&r, &kinds[0], 80, 16);     /* three texts of five pages, and one page */
    ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
    for (i = 0; i < 4; i++) {
        random_tokens(text[i], N, N_VOCAB, 3 + i);
        share.priority = i == 0 ? 90 : i == 2 ? 10 : 0;
        OK(kvc_seq_open_shared(&seq, cache, &share, &last));
        OK(kvc_prefill(ctx, seq, text[i], N, NULL, &last));
        kvc_seq_close(seq);
        check_table(cache);
    }
    for (i = 0; i < 4; i++) {
        /* of the third four pages had to go, from its end; and then the oldest, the second */
        static const uint32_t order[] = {2, 0, 1, 3}, want[] = {16, N - 1, 0, 0};
        seq = shared_seq(cache);
        OK(kvc_prefill(ctx, seq, text[order[i]], N, NULL, &last));
        if (i < 2) assert_int_equal(hit_of(seq), want[i]);
        else assert_true(hit_of(seq) < N - 1);
        kvc_seq_close(seq);
        check_table(cache);
    }
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* ---- a cache of few pages, for one text after another ---- */

enum { N_TEXT = 64 };           /* four pages; with the token behind it five */

typedef struct shelf_test {
    rig rig;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_token text[8][N_TEXT + 1];
    uint64_t now;
    unsigned n_stored, n_gone;
    uint64_t stored[64][2];     /* keys of those that are there; 0: free */
} shelf_test;

static uint64_t clock_of(void *user) {
    return ((shelf_test *)user)->now;
}

/* A page is stored after the one before it, and goes only if it was stored. */
static void note(const kvc_prefix_event *event, void *user) {
    shelf_test *t = (shelf_test *)user;
    static const uint64_t none[2];
    unsigned i, k = 64, spare = 64;
    for (i = 0; i < 64; i++) {
        if (!memcmp(t->stored[i], event->key, 16)) k = i;
        if (!memcmp(t->stored[i], none, 16)) spare = i;
    }
    for (i = 0; i < 8; i++)             /* its tokens are those of a page of one of the texts */
        if (!memcmp(t->text[i], event->tokens, PAGE * sizeof(kvc_token)) ||
            !memcmp(t->text[i] + PAGE, event->tokens, PAGE * sizeof(kvc_token)) ||
            !memcmp(t->text[i] + 2 * PAGE, event->tokens, PAGE * sizeof(kvc_token)) ||
            !memcmp(t->text[i] + 3 * PAGE, event->tokens, PAGE * sizeof(kvc_token))) break;
    assert_true(i < 8);
#ifndef KVC__SHORT_KEYS
    assert_true((k < 64) == !event->stored);
#endif
    if (event->stored) {
        assert_true(spare < 64);
        memcpy(t->stored[spare], event->key, 16);
        t->n_stored++;
    } else {
        t->n_gone++;
        if (k < 64) memset(t->stored[k], 0, 16);
    }
}

static void shelf_open(shelf_test *t, uint32_t n_pages) {
    kvc_cache_desc desc = {0};
    uint32_t i;
    memset(t, 0, sizeof *t);
    t->now = 1000;
    rig_open(&t->rig, &kinds[0].shape);
    desc.model = t->rig.model;
    desc.n_ctx = 80;
    desc.n_seqs = 4;
    desc.page_size = PAGE;
    desc.n_pages = n_pages;
    desc.n_prefix = n_pages;
    desc.now = clock_of;
    desc.on_prefix = note;
    desc.prefix_key = "a key of 16 byte";   /* which reasons are remembered depends on it */
    desc.user = t;
    OK(kvc_cache_new(&t->cache, &desc, &last));
    t->ctx = new_ctx(&t->rig, 16, 1, KVC_ISA_BEST);
    for (i = 0; i < 8; i++) random_tokens(t->text[i], N_TEXT + 1, N_VOCAB, 3 + i);
}

static void shelf_close(shelf_test *t) {
    check_table(t->cache);
    kvc_ctx_free(t->ctx);
    kvc_cache_free(t->cache);
    rig_close(&t->rig);
}

/* Computes a text and closes it; what the table had of it. */
static uint32_t pass(shelf_test *t, uint32_t text, const kvc_share *share, kvc_miss *miss) {
    kvc_seq_info info;
    kvc_seq *seq;
    OK(kvc_seq_open_shared(&seq, t->cache, share, &last));
    OK(kvc_prefill(t->ctx, seq, t->text[text], N_TEXT + 1, NULL, &last));
    kvc_seq_query(seq, &info);
    if (miss) *miss = info.prefix_miss;
    OK(kvc_seq_rollback(seq, N_TEXT));
    kvc_seq_close(seq);
    return info.prefix_hit;
}

static void test_reasons(void **state) {
    shelf_test t;
    kvc_cache_info info;
    kvc_miss miss;
    (void)state;
    shelf_open(&t, 12);
    assert_int_equal(pass(&t, 0, NULL, &miss), 0);
    assert_int_equal(miss, KVC_MISS_ABSENT);
    assert_int_equal(pass(&t, 0, NULL, &miss), N_TEXT);
    assert_int_equal(miss, KVC_MISS_NONE);
    pass(&t, 1, NULL, NULL), pass(&t, 2, NULL, NULL), pass(&t, 3, NULL, NULL);
    assert_int_equal(pass(&t, 0, NULL, &miss), 0);
    assert_int_equal(miss, KVC_MISS_EVICTED);
    assert_true(t.n_stored > 16 && t.n_gone >= t.n_stored - 12);
    kvc_cache_query(t.cache, &info);
    assert_int_equal(info.prefix_asked, 6);
    assert_int_equal(info.prefix_answered, 1);
    assert_int_equal(info.prefix_hit, N_TEXT);
    assert_int_equal(info.prefix_computed, 5 * (N_TEXT + 1) + 1);
    assert_int_equal(info.prefix_bytes, info.pages_cached * info.page_bytes);
    assert_int_equal(info.prefix_bytes_peak, 12 * info.page_bytes);
    shelf_close(&t);
}

static void test_pins(void **state) {
    shelf_test t;
    kvc_pin pin, end;
    kvc_seq *seq;
    uint32_t i;
    (void)state;
    shelf_open(&t, 16);
    OK(kvc_seq_open_shared(&seq, t.cache, NULL, &last));
    OK(kvc_prefill(t.ctx, seq, t.text[0], N_TEXT - 3, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "length", kvc_prefix_pin(&pin, seq, N_TEXT - 2, &last));
    OK(kvc_prefix_pin(&pin, seq, 40, &last));
    assert_int_equal(pin.n_tokens, 32);         /* whole pages */
    OK(kvc_prefix_pin(&end, seq, N_TEXT - 3, &last));
    assert_int_equal(end.n_tokens, N_TEXT - 3);
    kvc_seq_close(seq);
    for (i = 1; i < 8; i++) pass(&t, i, NULL, NULL);
    assert_int_equal(pass(&t, 0, NULL, NULL), N_TEXT - 3);
    for (i = 1; i < 8; i++) pass(&t, i, NULL, NULL);
    kvc_prefix_unpin(&end);
    kvc_prefix_unpin(&end);                     /* nothing: it is zeroed */
    for (i = 1; i < 8; i++) pass(&t, i, NULL, NULL);
    assert_int_equal(pass(&t, 0, NULL, NULL), 32);
    kvc_prefix_unpin(&pin);
    for (i = 1; i < 8; i++) pass(&t, i, NULL, NULL);
    assert_int_equal(pass(&t, 0, NULL, NULL), 0);
    seq = new_seq(t.cache);
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_prefix_pin(&pin, seq, 0, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_prefix_pin(&pin, NULL, 0, &last));
    assert_null(pin.cache);
    kvc_seq_close(seq);
    shelf_close(&t);
}

static void test_time_to_live(void **state) {
    kvc_share share = {0}, longer = {0};
    shelf_test t;
    kvc_miss miss;
    (void)state;
    share.ttl = 10;
    longer.ttl = 100;
    shelf_open(&t, 24);
    pass(&t, 0, &share, NULL);
    t.now += 9;
    assert_int_equal(pass(&t, 0, &share, NULL), N_TEXT);    /* used again: ten seconds more */
    t.now += 9;
    assert_int_equal(pass(&t, 0, &share, NULL), N_TEXT);
    t.now += 10;
    assert_int_equal(pass(&t, 0, &share, &miss), 0);
    assert_int_equal(miss, KVC_MISS_EVICTED);
    assert_int_equal(kvc_prefix_sweep(t.cache, NULL), 0);   /* it was computed anew */
    pass(&t, 1, &longer, NULL);
    pass(&t, 2, NULL, NULL);
    t.now += 10;
    assert_int_equal(kvc_prefix_sweep(t.cache, NULL), 5);   /* the pages of text 0 */
    assert_int_equal(pass(&t, 1, &share, NULL), N_TEXT);
    t.now += 80;
    assert_int_equal(pass(&t, 1, &share, NULL), N_TEXT);    /* the longest time counts */
    t.now += 1000000;
    assert_int_equal(pass(&t, 2, NULL, NULL), N_TEXT);
    assert_int_equal(kvc_prefix_sweep(t.cache, NULL), 5);
    shelf_close(&t);
}

/* A salt with a quota does not push out the others, however much it computes. */
static void test_quota(void **state) {
    kvc_share greedy = {0};
    shelf_test t;
    kvc_cache_info info;
    uint32_t i;
    (void)state;
    greedy.salt = "greedy";
    greedy.salt_size = 6;
    greedy.quota = 6;
    shelf_open(&t, 20);
    pass(&t, 0, NULL, NULL);
    pass(&t, 1, NULL, NULL);
    for (i = 2; i < 8; i++) {
        pass(&t, i, &greedy, NULL);
        kvc_cache_query(t.cache, &info);
        assert_true(info.pages_cached <= 10 + 6);
        check_table(t.cache);
    }
    assert_int_equal(pass(&t, 7, &greedy, NULL), N_TEXT);
    assert_int_equal(pass(&t, 0, NULL, NULL), N_TEXT);
    assert_int_equal(pass(&t, 1, NULL, NULL), N_TEXT);
    assert_int_equal(kvc_prefix_sweep(t.cache, &greedy), 6);
    assert_int_equal(pass(&t, 7, &greedy, NULL), 0);
    assert_int_equal(pass(&t, 1, NULL, NULL), N_TEXT);
    greedy.salt = "other.";
    assert_int_equal(kvc_prefix_sweep(t.cache, &greedy), 0);
    shelf_close(&t);
}

/* ---- files ---- */

static int file_refuse(const void *data, size_t size, void *user) {
    (void)data, (void)size, (void)user;
    return 1;
}

enum { N_SAVED = 6, SAVED = 90 };

/* Texts with beginnings in common, computed and closed; then saved. */
static void save_texts(const rig *r, const kind *k, kvc_ctx *ctx,
    kvc_token text[N_SAVED][SAVED + 1], bytes_out *f) {
    kvc_cache *cache = table_cache(r, k, SAVED + 10, 60);
    uint32_t i;
    for (i = 0; i < N_SAVED; i++) {
        kvc_seq *seq = shared_seq(cache);
        random_tokens(text[i], SAVED + 1, N_VOCAB, 3);
        random_tokens(text[i] + 15 * i, SAVED + 1 - 15 * i, N_VOCAB, 10 + i);
        OK(kvc_prefill(ctx, seq, text[i], SAVED, NULL, &last));
        kvc_seq_close(seq);
    }
    memset(f, 0, sizeof *f);
    OK(kvc_prefix_save(cache, file_write, f, &last));
    check_table(cache);
    FAILS(KVC_ERROR_FILE, "write", kvc_prefix_save(cache, file_refuse, NULL, &last));
    check_table(cache);
    kvc_cache_free(cache);
}

/* Another process, with a random key of its own, goes on where the first one was. */
static void test_files(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(kinds); i++) {
        kvc_token text[N_SAVED][SAVED + 1];
        uint32_t n, k, round;
        kvc_cache *cache;
        kvc_ctx *ctx;
        bytes_out f;
        rig r;
        rig_open(&r, &kinds[i].shape);
        ctx = new_ctx(&r, 32, 1, KVC_ISA_BEST);
        save_texts(&r, &kinds[i], ctx, text, &f);
        cache = table_cache(&r, &kinds[i], SAVED + 10, 60);
        for (round = 0; round < 2; round++) {       /* the second time all is there */
            kvc_cache_info info;
            uint32_t known;
            kvc_cache_query(cache, &info);
            known = info.n_prefix_entries;
            OK(kvc_prefix_load_memory(cache, f.bytes, f.size, &n, &last));
            assert_true(n > N_SAVED);
            kvc_cache_query(cache, &info);
            assert_int_equal(info.pages_live, 0);
            if (round) assert_int_equal(info.n_prefix_entries, known);
            check_table(cache);
            for (k = 0; k < N_SAVED; k++) {
                kvc_seq *seq = shared_seq(cache);
                const float *logits;
                float want[N_VOCAB];
                OK(kvc_prefill(ctx, seq, text[k], SAVED + 1, &logits, &last));
                assert_int_equal(hit_of(seq), SAVED);
                cold_last(&r, &kinds[i], ctx, text[k], SAVED + 1, want);
                SAME(logits, want, 1, N_VOCAB, "from a file");
                OK(kvc_seq_rollback(seq, SAVED));
                kvc_seq_close(seq);
            }
            check_table(cache);
        }
        kvc_cache_free(cache);
        cache = table_cache(&r, &kinds[i], SAVED + 10, 10);     /* room for a part */
        OK(kvc_prefix_load_memory(cache, f.bytes, f.size, &n, &last));
        assert_true(n > 0 && n <= 10);
        check_table(cache);
        kvc_cache_free(cache);
        kvc_ctx_free(ctx);
        free(f.bytes);
        rig_close(&r);
    }
}

/* Whatever is flipped, cut or made up, what is found has the bits of a cold run. */
static void test_damaged_files(void **state) {
    enum { MUTANTS = 1500 };
    kvc_token text[N_SAVED][SAVED + 1];
    float want[N_SAVED][N_VOCAB];
    unsigned n_refused = 0, n_whole = 0, n_hits = 0, i, n;
    uint64_t random = 1;
    uint32_t k, whole, pages;
    unsigned char *bytes;
    kvc_cache *cache;
    kvc_ctx *ctx;
    bytes_out f;
    rig r, other;
    (void)state;
    rig_open(&r, &kinds[0].shape);
    ctx = new_ctx(&r, 32, 1, KVC_ISA_BEST);
    save_texts(&r, &kinds[0], ctx, text, &f);
    bytes = (unsigned char *)gguf_must(malloc(f.size));
    for (k = 0; k < N_SAVED; k++) cold_last(&r, &kinds[0], ctx, text[k], SAVED + 1, want[k]);
    cache = table_cache(&r, &kinds[0], SAVED + 10, 60);
    OK(kvc_prefix_load_memory(cache, f.bytes, f.size, &whole, &last));
    kvc_cache_free(cache);
    for (i = 0; i < MUTANTS; i++) {
        size_t size = f.size;
        kvc_seq *seq;
        const float *logits;
        memcpy(bytes, f.bytes, size);
        for (n = 1 + (unsigned)(model_random(&random) % 3); n > 0; n--)
            bytes[model_random(&random) % (model_random(&random) % 2 ? size : 400)] ^=
                (unsigned char)(1u << model_random(&random) % 8);
        if (i % 8 == 0) size = model_random(&random) % (size + 1);
        cache = table_cache(&r, &kinds[0], SAVED + 10, 60);
        if (kvc_prefix_load_memory(cache, bytes, size, &pages, &last) != KVC_OK) {
            assert_int_equal(pages, 0);
            n_refused++;
        }
        assert_true(pages <= whole);
        n_whole += pages == whole;
        check_table(cache);
        k = i % N_SAVED;
        seq = shared_seq(cache);
        OK(kvc_prefill(ctx, seq, text[k], SAVED + 1, &logits, &last));
        n_hits += hit_of(seq) > 0;
        SAME(logits, want[k], 1, N_VOCAB, "from a damaged file");
        kvc_cache_free(cache);
    }
    print_message("%u refused, %u of %u with all pages, %u of use\n", n_refused, n_whole, MUTANTS,
        n_hits);
    assert_true(n_refused > 50 && n_hits > 200 && n_whole < MUTANTS / 10);

    rig_open(&other, &kinds[3].shape);
    cache = table_cache(&other, &kinds[3], SAVED, 60);
    FAILS(KVC_ERROR_UNSUPPORTED, "fingerprint",
        kvc_prefix_load_memory(cache, f.bytes, f.size, &pages, &last));
    FAILS(KVC_ERROR_FORMAT, "head", kvc_prefix_load_memory(cache, NULL, 0, &pages, &last));
    kvc_cache_free(cache);
    cache = new_cache(&r, 64, 1, 0, KVC_KV_F32);
    FAILS(KVC_ERROR_ARGUMENT, "cache",
        kvc_prefix_load_memory(cache, f.bytes, f.size, &pages, &last));
    FAILS(KVC_ERROR_ARGUMENT, "cache", kvc_prefix_save(cache, file_write, &f, &last));
    FAILS(KVC_ERROR_ARGUMENT, "write", kvc_prefix_save(cache, NULL, &f, &last));
    kvc_cache_free(cache);
    rig_close(&other);
    free(bytes);
    free(f.bytes);
    kvc_ctx_free(ctx);
    rig_close(&r);
}

/* Saving changes nothing: the same pages go first as without it. */
static void test_saving_keeps_order(void **state) {
    uint32_t hits[2], round, i;
    (void)state;
    for (round = 0; round < 2; round++) {
        shelf_test t;
        bytes_out f = {0};
        shelf_open(&t, 20);
        for (i = 0; i < 3; i++) pass(&t, i, NULL, NULL);
        pass(&t, 0, NULL, NULL);
        if (round) OK(kvc_prefix_save(t.cache, file_write, &f, &last));
        pass(&t, 3, NULL, NULL), pass(&t, 4, NULL, NULL);
        hits[round] = pass(&t, 0, NULL, NULL);
        free(f.bytes);
        shelf_close(&t);
    }
    assert_int_equal(hits[0], hits[1]);
    assert_int_equal(hits[0], N_TEXT);
}

/* A step in the midst of saving: a sequence computes a text again whose pages of windows were
   needed, each page when its entry is being written, so that the page comes back to it. */
typedef struct busy_file {
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    const kvc_token *text;      /* [n_pages, PAGE] */
    uint32_t page, n_pages, n_met;
} busy_file;

static void compute_page(busy_file *f) {
    uint32_t i;
    for (i = 0; i < PAGE; i++)
        OK(kvc_decode(f->ctx, f->seq, f->text[f->page * PAGE + i], NULL, &last));
    f->page++;
}

static int file_compute(const void *data, size_t size, void *user) {
    busy_file *f = (busy_file *)user;
    const kvc__table *t = &f->cache->table;
    uint32_t next = kvc__kids_nearest(t, f->seq->tail, f->text + f->page * PAGE, PAGE);
    (void)data, (void)size;
    if (f->page == f->n_pages || t->entries[next].guards == 0) return 0;
    f->n_met++;
    compute_page(f);
    return 0;
}

static void test_saving_beside_steps(void **state) {
    enum { N = 8 * PAGE };
    kvc_token text[3][N];
    kvc_cache_info info;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *first, *seq;
    busy_file f = {0};
    uint32_t i;
    rig r;
    (void)state;
    rig_open(&r, &kinds[5].shape);
    cache = table_cache(&r, &kinds[5], N + 8, 18);
    ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
    for (i = 0; i < 3; i++) random_tokens(text[i], N, N_VOCAB, 3 + i);
    first = shared_seq(cache);
    OK(kvc_prefill(ctx, first, text[0], N, NULL, &last));
    for (i = 1; i < 3; i++) {
        seq = shared_seq(cache);
        OK(kvc_prefill(ctx, seq, text[i], N, NULL, &last));
        kvc_seq_close(seq);
    }
    f.cache = cache;
    f.ctx = ctx;
    f.seq = shared_seq(cache);
    f.text = text[0];
    f.n_pages = N / PAGE;
    while (f.page < f.n_pages) {
        uint32_t page = f.page;
        OK(kvc_prefix_save(cache, file_compute, &f, &last));
        if (f.page == page) compute_page(&f);
    }
    assert_true(f.n_met > 2);
    kvc_seq_close(f.seq);
    kvc_seq_close(first);
    check_table(cache);
    kvc_cache_query(cache, &info);
    assert_int_equal(info.pages_live, 0);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

/* ---- what takes no part ---- */

static void test_no_part(void **state) {
    enum { N = 60 };
    kvc_token text[200];
    kvc_seq_info info;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq, *other;
    rig r;
    (void)state;
    rig_open(&r, &kinds[0].shape);
    cache = table_cache(&r, &kinds[0], 96, 40);
    ctx = new_ctx(&r, 16, 1, KVC_ISA_BEST);
    random_tokens(text, 200, N_VOCAB, 3);
    seq = shared_seq(cache);
    OK(kvc_prefill(ctx, seq, text, N, NULL, &last));
    OK(kvc_seq_remove(seq, 10, 20, &last));
    OK(kvc_prefill(ctx, seq, text + N, 30, NULL, &last));   /* not what a cold run gives */
    kvc_seq_query(seq, &info);
    assert_int_equal(info.prefix_miss, KVC_MISS_OFF);
    other = shared_seq(cache);
    OK(kvc_prefill(ctx, other, text, N + 30, NULL, &last));
    assert_int_equal(hit_of(other), N);
    kvc_seq_query(other, &info);
    assert_int_equal(info.prefix_miss, KVC_MISS_ABSENT);
    check_table(cache);
    OK(kvc_seq_rollback(seq, 10));          /* and now it is what a cold run gives again */
    OK(kvc_prefill(ctx, seq, text + 10, 40, NULL, &last));
    assert_int_equal(hit_of(seq), 39);
    kvc_seq_close(seq);
    seq = new_seq(cache);                   /* one that was opened without it */
    OK(kvc_prefill(ctx, seq, text, N, NULL, &last));
    assert_int_equal(hit_of(seq), 0);
    kvc_seq_close(seq);
    OK(kvc_seq_set_policy(other, KVC_POLICY_WINDOW, 0, 0, &last));
    OK(kvc_prefill(ctx, other, text + 90, 100, NULL, &last));
    check_table(cache);
    kvc_seq_close(other);
    check_table(cache);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    rig_close(&r);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_siphash),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_wanted_rows),
        cmocka_unit_test(test_conversations),
        cmocka_unit_test(test_side_by_side),
        cmocka_unit_test(test_salts),
        cmocka_unit_test(test_priorities),
        cmocka_unit_test(test_reasons),
        cmocka_unit_test(test_pins),
        cmocka_unit_test(test_time_to_live),
        cmocka_unit_test(test_quota),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_damaged_files),
        cmocka_unit_test(test_saving_keeps_order),
        cmocka_unit_test(test_saving_beside_steps),
        cmocka_unit_test(test_no_part)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
