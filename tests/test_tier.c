/* The second tier: a page whose memory is needed goes out, and comes back with the same bits; what
   is damaged, foreign, late or lost is computed. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include "prefix.h"

#include "attic.h"

/* With keys of 8 bits pages take each other's place. */
#ifdef KVC__SHORT_KEYS
#define FOUND(got, want) assert_true((got) <= (want))
#define MISTAKEN 2u     /* pages that a short key may mistake for what is asked for in vain */
#else
#define FOUND(got, want) assert_int_equal(got, want)
#define MISTAKEN 0u
#endif

static const char table_key[] = "a key of 16 byte";

static kvc_cache_desc tier_desc(const rig *r, const kind *k, uint32_t n_ctx, uint32_t n_pages,
    attic *a) {
    kvc_cache_desc desc = table_desc(r, k, n_ctx, n_pages);
    desc.prefix_key = table_key;
    desc.tier = attic_tier(a);
    return desc;
}

static kvc_cache *tier_cache(const rig *r, const kind *k, uint32_t n_pages, attic *a) {
    kvc_cache_desc desc = tier_desc(r, k, TALK, n_pages, a);
    kvc_cache *cache;
    OK(kvc_cache_new(&cache, &desc, &last));
    return cache;
}

static kvc_cache_info info_of(kvc_cache *cache) {
    kvc_cache_info info;
    kvc_cache_query(cache, &info);
    return info;
}

/* Every parcel was given back, and none was asked for in a wrong way. */
static void check_attic(const attic *a) {
    assert_int_equal(a->n_open, 0);
    assert_int_equal(a->n_faults, 0);
}

/* What most tests begin with, and end. */
static void desk_open(rig *r, kvc_ctx **ctx, attic *a, const kind *k, uint32_t cap) {
    rig_open(r, &k->shape);
    *ctx = new_ctx(r, 32, 1, KVC_ISA_BEST);
    attic_open(a, cap);
}

static void desk_close(rig *r, kvc_ctx *ctx, attic *a) {
    check_attic(a);
    attic_close(a);
    kvc_ctx_free(ctx);
    rig_close(r);
}

/* What the table and the tier had of a text, whose last logits must be those of a cold run. */
static uint32_t take(const rig *r, const kind *k, kvc_cache *cache, kvc_ctx *ctx,
    const kvc_token *text, uint32_t n) {
    kvc_seq *seq = shared_seq(cache);
    const float *logits;
    float want[N_VOCAB];
    uint32_t hit;
    OK(kvc_prefill(ctx, seq, text, n, &logits, &last));
    hit = hit_of(seq);
    cold_last(r, k, ctx, text, n, want);
    SAME(logits, want, 1, N_VOCAB, "with a tier");
    kvc_seq_close(seq);
    check_table(cache);
    return hit;
}

/* ---- two caches ---- */

/* What one has computed and flushed, another one, which knows nothing but the key, goes on from. */
static void test_second_process(void **state) {
    enum { N = 7 * PAGE + 5, TAIL = 20 };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(kinds); i++) {
        kvc_token text[N + TAIL];
        kvc_cache *cache;
        kvc_ctx *ctx;
        uint32_t n_put, again;
        attic a;
        rig r;
        desk_open(&r, &ctx, &a, &kinds[i], 1000);
        random_tokens(text, N + TAIL, N_VOCAB, 3);
        cache = tier_cache(&r, &kinds[i], 40, &a);
        assert_int_equal(take(&r, &kinds[i], cache, ctx, text, N), 0);
        assert_int_equal(a.n_put, 0);
        n_put = kvc_prefix_flush(cache, 3);
        assert_int_equal(n_put, 3);
        n_put += kvc_prefix_flush(cache, 0);
        assert_int_equal(n_put, 7 * info_of(cache).n_reaches);
        assert_int_equal(info_of(cache).tier_put, n_put);
        assert_int_equal(kvc_prefix_flush(cache, 0), 0);
        kvc_cache_free(cache);

        cache = tier_cache(&r, &kinds[i], 40, &a);
        a.n_ahead = a.n_asked = 0;
        FOUND(take(&r, &kinds[i], cache, ctx, text, N + TAIL), 7 * PAGE);
        FOUND(info_of(cache).tier_got, a.n_got);
        /* layers with a window need the last pages alone; and the next page is asked for in vain */
        if (i == 5) FOUND(a.n_got, 7 + 2 + MISTAKEN);
        else FOUND(a.n_got, 7 + MISTAKEN);
        FOUND(a.n_asked, a.n_got + 1);
#ifndef KVC__SHORT_KEYS
        assert_true(a.n_ahead >= a.n_asked);
#endif
        again = kvc_prefix_flush(cache, 0);         /* what was not there */
        FOUND(again, info_of(cache).n_reaches == 1 ? 1 : 1 + 1);
        assert_true(info_of(cache).tier_refused <= MISTAKEN);
        kvc_cache_free(cache);
        desk_close(&r, ctx, &a);
    }
}

/* Nobody gets what is another one's: salts, keys, models, K/V types, page sizes. */
static void test_strangers(void **state) {
    enum { N = 5 * PAGE + 3 };
    kind other = kinds[0];
    kvc_token text[N];
    kvc_share share = {0};
    kvc_cache_desc desc;
    kvc_cache *cache;
    kvc_ctx *ctx, *ctx2;
    kvc_seq *seq;
    unsigned i;
    attic a;
    rig r, r2;
    (void)state;
    desk_open(&r, &ctx, &a, &kinds[0], 1000);
    random_tokens(text, N, N_VOCAB, 3);
    cache = tier_cache(&r, &kinds[0], 40, &a);
    take(&r, &kinds[0], cache, ctx, text, N);
    FOUND(kvc_prefix_flush(cache, 0), 5);
    share.salt = "another";
    share.salt_size = 7;
    OK(kvc_seq_open_shared(&seq, cache, &share, &last));
    OK(kvc_prefill(ctx, seq, text, N, NULL, &last));
    assert_int_equal(hit_of(seq), 0);
    kvc_cache_free(cache);
    for (i = 0; i < 4; i++) {
        kind k = kinds[0];
        if (i == 0) k.k = KVC_KV_F16;
        desc = table_desc(&r, &k, TALK, 40);
        desc.tier = attic_tier(&a);
        desc.prefix_key = i == 1 ? NULL : i == 2 ? "Another key of 16" : table_key;
        if (i == 3) desc.page_size = 32;
        OK(kvc_cache_new(&cache, &desc, &last));
        seq = shared_seq(cache);
        OK(kvc_prefill(ctx, seq, text, N, NULL, &last));
        assert_int_equal(hit_of(seq), 0);
        kvc_cache_free(cache);
    }
    other.shape.seed = 9;               /* other weights */
    rig_open(&r2, &other.shape);
    ctx2 = new_ctx(&r2, 32, 1, KVC_ISA_BEST);
    cache = tier_cache(&r2, &other, 40, &a);
    assert_int_equal(take(&r2, &other, cache, ctx2, text, N), 0);
    kvc_cache_free(cache);
    kvc_ctx_free(ctx2);
    rig_close(&r2);
    desk_close(&r, ctx, &a);
}

/* ---- few pages ---- */

/* With room for a part of the pages, all whole pages that were ever computed are found again. */
static void test_conversations(void **state) {
    static const uint32_t pages[] = {500, 250, 100};
    workload *w = make_workload(7);
    size_t i, k;
    (void)state;
    for (i = 0; i < COUNT(kinds); i++) {
        rig r;
        rig_open(&r, &kinds[i].shape);
        for (k = i % 2 ? 2 : 0; k < COUNT(pages); k++) {
            attic a;
            reuse sum;
            attic_open(&a, 10000);
            sum = play(&r, &kinds[i], w, tier_cache(&r, &kinds[i], pages[k], &a),
                k == 1 ? 4 : 1,
#ifdef KVC__SHORT_KEYS
                TAKES_ANY);
#else
                TAKES_WHOLE_PAGES);
#endif
            print_message("%-28s %3u pages: %lu tokens of %lu, %lu in whole pages; %u pages put, "
                "%u got, %u again\n", kinds[i].name, (unsigned)pages[k], (unsigned long)sum.hit,
                (unsigned long)sum.best, (unsigned long)sum.whole, a.n_put, a.n_got, a.n_again);
#ifndef KVC__SHORT_KEYS
            assert_true(sum.hit >= sum.whole && a.n_got > 0);
#endif
            check_attic(&a);
            attic_close(&a);
        }
        rig_close(&r);
    }
    free(w);
}

/* The same with a tier that loses every third page, and with one that is shut now and then. */
static void test_lossy(void **state) {
    workload *w = make_workload(7);
    attic a;
    rig r;
    (void)state;
    rig_open(&r, &kinds[5].shape);
    attic_open(&a, 10000);
    a.lose_one_in = 3;
    play(&r, &kinds[5], w, tier_cache(&r, &kinds[5], 100, &a), 1, TAKES_ANY);
    assert_true(a.n_got > 100);
    check_attic(&a);
    attic_close(&a);
    attic_open(&a, 50);                 /* it is soon full */
    play(&r, &kinds[5], w, tier_cache(&r, &kinds[5], 100, &a), 1, TAKES_ANY);
    check_attic(&a);
    attic_close(&a);
    attic_open(&a, 50);
    a.is_shut = 1;
    play(&r, &kinds[5], w, tier_cache(&r, &kinds[5], 100, &a), 1, TAKES_ANY);
    assert_int_equal(a.n_put + a.n_got, 0);
    attic_close(&a);
    rig_close(&r);
    free(w);
}

/* Pages that go because the table knows too few go out as well. */
static void test_few_entries(void **state) {
    enum { N = 4 * PAGE + 5 };
    kvc_token text[8][N];
    kvc_cache_desc desc;
    kvc_cache *cache;
    kvc_ctx *ctx;
    uint32_t i;
    attic a;
    rig r;
    (void)state;
    desk_open(&r, &ctx, &a, &kinds[0], 1000);
    desc = tier_desc(&r, &kinds[0], TALK, 200, &a);
    desc.n_prefix = 11;                 /* two texts */
    OK(kvc_cache_new(&cache, &desc, &last));
    for (i = 0; i < 8; i++) {
        random_tokens(text[i], N, N_VOCAB, 3 + i);
        take(&r, &kinds[0], cache, ctx, text[i], N);
    }
    for (i = 0; i < 8; i++)
        if (i < 6) FOUND(take(&r, &kinds[0], cache, ctx, text[i], N), 4 * PAGE);
    kvc_cache_free(cache);
    desk_close(&r, ctx, &a);
}

/* A cache that grows makes room for what comes. */
static void test_growing(void **state) {
    enum { N = 9 * PAGE + 1 };
    kvc_token text[N];
    kvc_cache_desc desc;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    attic a;
    rig r;
    (void)state;
    desk_open(&r, &ctx, &a, &kinds[0], 1000);
    random_tokens(text, N, N_VOCAB, 3);
    cache = tier_cache(&r, &kinds[0], 40, &a);
    take(&r, &kinds[0], cache, ctx, text, N);
    kvc_prefix_flush(cache, 0);
    kvc_cache_free(cache);
    desc = tier_desc(&r, &kinds[0], 2 * PAGE, 2, &a);
    desc.n_prefix = 40;
    OK(kvc_cache_new(&cache, &desc, &last));
    seq = shared_seq(cache);
    OK(kvc_seq_set_policy(seq, KVC_POLICY_GROW, 0, 0, &last));
    OK(kvc_prefill(ctx, seq, text, N, NULL, &last));
    FOUND(hit_of(seq), 9 * PAGE);
    kvc_seq_close(seq);
    check_table(cache);
    kvc_cache_free(cache);
    desk_close(&r, ctx, &a);
}

/* ---- what comes back ---- */

typedef struct damage {
    size_t at;                  /* a bit of this byte, */
    long size;                  /* or so many bytes more */
    unsigned n_until;           /* the page to be damaged, the first is 0 */
} damage;

static void do_damage(kvc_parcel *parcel, void *user) {
    damage *d = (damage *)user;
    if (d->n_until-- != 0) return;
    if (d->size == 0) {
        ((unsigned char *)parcel->data)[d->at] ^= (unsigned char)(1u << d->at % 8);
        return;
    }
    parcel->size = (size_t)((long)parcel->size + d->size);
    parcel->data = gguf_must(realloc(parcel->data, parcel->size ? parcel->size : 1));
    parcel->host = parcel->data;
    if (d->size > 0) memset((char *)parcel->data + parcel->size - d->size, 0, (size_t)d->size);
}

/* Any byte that is not as it was put makes the page one that is missing, and all that follow. */
static void test_any_byte(void **state) {
    enum { N = 2 * PAGE + 4 };
    kvc_token text[N];
    float want[N_VOCAB];
    const float *logits;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    size_t size, page, i;
    damage d = {0};
    attic a;
    rig r;
    (void)state;
    rig_open(&r, &kinds[3].shape);      /* small pages */
    ctx = new_ctx(&r, 32, 1, KVC_ISA_BEST);
    attic_open(&a, 10);
    random_tokens(text, N, N_VOCAB, 3);
    cache = tier_cache(&r, &kinds[3], 20, &a);
    take(&r, &kinds[3], cache, ctx, text, N);
    kvc_prefix_flush(cache, 0);
    kvc_cache_free(cache);
    cold_last(&r, &kinds[3], ctx, text, N, want);
    a.damage = do_damage;
    a.damage_user = &d;
    for (page = 0; page < 2; page++) {
        size = a.pages[page].size;
        for (i = 0; i < size + 40; i++) {
            d.n_until = (unsigned)page;
            d.at = i < size ? i : 0;
            d.size = i < size ? 0 : (long)(i - size) + 1;
            if (i >= size + 20) d.size = -d.size * d.size;
            if (d.size < -(long)size) d.size = -(long)size;
            cache = tier_cache(&r, &kinds[3], 20, &a);
            seq = shared_seq(cache);
            OK(kvc_prefill(ctx, seq, text, N, &logits, &last));
            FOUND(hit_of(seq), (uint32_t)page * PAGE);
            SAME(logits, want, 1, N_VOCAB, "with a damaged page");
            assert_true(info_of(cache).tier_refused >= 1);
            kvc_cache_free(cache);
        }
    }
    desk_close(&r, ctx, &a);
}

/* A page under the key of another one, also of another reach or salt: whoever answers for the tier
   may mix them up, or mean it. */
static void test_swapped(void **state) {
    enum { N = 4 * PAGE + 4 };
    kvc_token text[2][N];
    kvc_share share = {0};
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    uint32_t i, k;
    attic a;
    rig r;
    (void)state;
    desk_open(&r, &ctx, &a, &kinds[5], 100);
    random_tokens(text[0], N, N_VOCAB, 3);
    random_tokens(text[1], N, N_VOCAB, 3);
    random_tokens(text[1], PAGE, N_VOCAB, 4);       /* from the second page on equal tokens */
    cache = tier_cache(&r, &kinds[5], 40, &a);
    take(&r, &kinds[5], cache, ctx, text[0], N);
    take(&r, &kinds[5], cache, ctx, text[1], N);
    share.salt = "another";
    share.salt_size = 7;
    OK(kvc_seq_open_shared(&seq, cache, &share, &last));
    OK(kvc_prefill(ctx, seq, text[0], N, NULL, &last));
    kvc_seq_close(seq);
    kvc_prefix_flush(cache, 0);
    kvc_cache_free(cache);
    FOUND(a.n, 24);
    for (i = 0; i < a.n; i++)
        for (k = i + 1; k < a.n; k++) {
            unsigned char *bytes = a.pages[i].bytes;
            size_t size = a.pages[i].size;
            a.pages[i].bytes = a.pages[k].bytes, a.pages[i].size = a.pages[k].size;
            a.pages[k].bytes = bytes, a.pages[k].size = size;
            cache = tier_cache(&r, &kinds[5], 40, &a);
            take(&r, &kinds[5], cache, ctx, text[0], N);
            take(&r, &kinds[5], cache, ctx, text[1], N);
            kvc_cache_free(cache);
            a.pages[k].bytes = a.pages[i].bytes, a.pages[k].size = a.pages[i].size;
            a.pages[i].bytes = bytes, a.pages[i].size = size;
        }
    desk_close(&r, ctx, &a);
}

/* A tier that answers later: who waits finds it, who does not computes. */
static void test_later(void **state) {
    enum { N = 80 * PAGE + 4 };         /* more than are asked for at once */
    static kvc_token text[N];
    kvc_cache_desc desc;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    size_t n_there, rounds;
    uint32_t i;
    attic a;
    rig r;
    (void)state;
    desk_open(&r, &ctx, &a, &kinds[5], 1000);
    a.is_slow = 1;
    random_tokens(text, N, N_VOCAB, 3);
    desc = tier_desc(&r, &kinds[5], N, 200, &a);
    OK(kvc_cache_new(&cache, &desc, &last));
    take(&r, &kinds[5], cache, ctx, text, N);
    kvc_prefix_flush(cache, 0);
    kvc_cache_free(cache);

    OK(kvc_cache_new(&cache, &desc, &last));
    assert_int_equal(take(&r, &kinds[5], cache, ctx, text, N), 0);
    kvc_cache_free(cache);
    for (i = 0; i < a.n; i++) a.pages[i].asked = 0;

    OK(kvc_cache_new(&cache, &desc, &last));
    seq = shared_seq(cache);
    OK(kvc_prefix_fetch(seq, text, N, &n_there, &last));
    assert_int_equal(n_there, 0);
    for (rounds = 0; n_there < 80 * PAGE && rounds < 5; rounds++) {
        a.time++;
        OK(kvc_prefix_fetch(seq, text, N, &n_there, &last));
    }
    FOUND(n_there, 80 * PAGE);
    check_table(cache);
    assert_int_equal(kvc_seq_length(seq), 0);
    a.is_shut = 1;
    OK(kvc_prefix_fetch(seq, text, N, &n_there, &last));
    FOUND(n_there, 80 * PAGE);
    FOUND(take(&r, &kinds[5], cache, ctx, text, N), 80 * PAGE);
    OK(kvc_prefix_fetch(seq, NULL, 0, &n_there, &last));
    assert_int_equal(n_there, 0);
    text[3] = N_VOCAB;
    FAILS(KVC_ERROR_ARGUMENT, "tokens", kvc_prefix_fetch(seq, text, N, &n_there, &last));
    FAILS(KVC_ERROR_ARGUMENT, "tokens", kvc_prefix_fetch(seq, NULL, N, &n_there, &last));
    FAILS(KVC_ERROR_ARGUMENT, "n_there", kvc_prefix_fetch(seq, text, N, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "seq", kvc_prefix_fetch(NULL, text, N, &n_there, &last));
    kvc_seq_close(seq);
    seq = new_seq(cache);               /* takes no part */
    OK(kvc_prefix_fetch(seq, text + 4, 40, &n_there, &last));
    assert_int_equal(n_there, 0);
    kvc_cache_free(cache);
    desk_close(&r, ctx, &a);
}

/* ---- what does not go out ---- */

static uint64_t no_time(void *user) {
    (void)user;
    return 1000;
}

/* Pages that expire, pages of a salt that is given up, pages that are not whole, pages that the
   tier has. */
static void test_not_put(void **state) {
    enum { N = 3 * PAGE + 9 };
    kvc_token text[6][N];
    kvc_share mortal = {0}, gone = {0};
    kvc_cache_desc desc;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    uint32_t i, k;
    attic a;
    rig r;
    (void)state;
    desk_open(&r, &ctx, &a, &kinds[0], 1000);
    desc = tier_desc(&r, &kinds[0], TALK, 8, &a);
    desc.now = no_time;
    OK(kvc_cache_new(&cache, &desc, &last));
    mortal.ttl = 10;
    gone.salt = "g";
    gone.salt_size = 1;
    for (i = 0; i < 6; i++) random_tokens(text[i], N, N_VOCAB, 3 + i);
    OK(kvc_seq_open_shared(&seq, cache, &mortal, &last));
    OK(kvc_prefill(ctx, seq, text[0], N, NULL, &last));
    kvc_seq_close(seq);
    OK(kvc_seq_open_shared(&seq, cache, &gone, &last));
    OK(kvc_prefill(ctx, seq, text[1], N, NULL, &last));
    kvc_seq_close(seq);
    assert_true(kvc_prefix_sweep(cache, &gone) >= 4);
    gone.salt = "h";                    /* also of those that wait for their memory to be needed */
    gone.quota = 1;
    OK(kvc_seq_open_shared(&seq, cache, &gone, &last));
    OK(kvc_prefill(ctx, seq, text[1], N, NULL, &last));
    kvc_seq_close(seq);
    assert_int_equal(kvc_prefix_sweep(cache, &gone), 1);
    check_table(cache);
    assert_int_equal(kvc_prefix_flush(cache, 0), 0);
    take(&r, &kinds[0], cache, ctx, text[2], N);
    take(&r, &kinds[0], cache, ctx, text[3], N);
    assert_int_equal(a.n_put, 0);       /* those before were not to go out */
    take(&r, &kinds[0], cache, ctx, text[4], N);
    take(&r, &kinds[0], cache, ctx, text[5], N);
    FOUND(a.n_put, 6);                  /* of 2 and 3; nothing that is not whole */
    for (k = 0; k < 4; k++)
        for (i = 2; i < 6; i++) take(&r, &kinds[0], cache, ctx, text[i], N);
#ifndef KVC__SHORT_KEYS
    assert_int_equal(a.n_put, 12);
    assert_int_equal(a.n_again, 0);
#endif
    kvc_cache_free(cache);
    desk_close(&r, ctx, &a);
}

/* ---- one half ---- */

static int no_data(const unsigned char *key, kvc_parcel *parcel, void *user) {
    (void)key, (void)parcel, (void)user;
    return 1;
}

static void test_halves(void **state) {
    enum { N = 3 * PAGE + 9 };
    kvc_token text[4][N];
    kvc_cache_desc desc;
    kvc_cache *cache;
    kvc_ctx *ctx;
    uint32_t i, k;
    attic a;
    rig r;
    (void)state;
    desk_open(&r, &ctx, &a, &kinds[0], 1000);
    for (i = 0; i < 4; i++) random_tokens(text[i], N, N_VOCAB, 3 + i);
    desc = table_desc(&r, &kinds[0], TALK, 9);
    desc.tier = attic_tier(&a);
    desc.tier.ahead = NULL;
    for (k = 0; k < 3; k++) {
        kvc_cache_desc half = desc;
        if (k == 0) half.tier.put = NULL, half.tier.put_done = NULL;
        if (k == 1) half.tier.get = NULL, half.tier.get_done = NULL;
        if (k == 2) half.tier.get = no_data, half.tier.put = no_data;
        OK(kvc_cache_new(&cache, &half, &last));
        for (i = 0; i < 12; i++) take(&r, &kinds[0], cache, ctx, text[i % 4], N);
        if (k == 2) assert_true(info_of(cache).tier_refused > 0 && info_of(cache).tier_put > 0);
        else assert_int_equal(info_of(cache).tier_refused, 0);
        assert_int_equal(info_of(cache).tier_got, 0);
        if (k != 1) assert_int_equal(kvc_prefix_flush(cache, 0) > 0, k == 2);
        kvc_cache_free(cache);
        if (k == 2) a.n_open = 0;       /* no_data opened nothing, and the attic closed it */
        check_attic(&a);
    }
    desc.tier.put_done = NULL;
    FAILS(KVC_ERROR_ARGUMENT, "tier", kvc_cache_new(&cache, &desc, &last));
    desc.tier = attic_tier(&a);
    desc.tier.get = NULL;
    FAILS(KVC_ERROR_ARGUMENT, "tier", kvc_cache_new(&cache, &desc, &last));
    desc.tier = attic_tier(&a);
    desc.n_prefix = 0;
    FAILS(KVC_ERROR_ARGUMENT, "tier", kvc_cache_new(&cache, &desc, &last));
    attic_close(&a);
    kvc_ctx_free(ctx);
    rig_close(&r);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_second_process),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_conversations),
        cmocka_unit_test(test_lossy),
        cmocka_unit_test(test_few_entries),
        cmocka_unit_test(test_growing),
        cmocka_unit_test(test_any_byte),
        cmocka_unit_test(test_swapped),
        cmocka_unit_test(test_later),
        cmocka_unit_test(test_not_put),
        cmocka_unit_test(test_halves)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
