/* The sampler: each step of the chain against a plain reference, the traps that other engines fell
   into, and the promises about memory. Private parts are tested too. */
#define _POSIX_C_SOURCE 200809L   /* posix_memalign */
#define KVC_IMPLEMENTATION
#include "../kvc.h"
#include "testing.h"

/* ---- models of which only the vocabulary matters ---- */

typedef struct test_model {
    uint32_t n_vocab, n_tokens;
    void *image;
    kvc_model *model;
} test_model;

static test_model models[80];
static size_t n_models;

/* Kept until the end. Below 259 ids there is no tokenizer, so no padding either. */
static kvc_model *model_of(uint32_t n_vocab, uint32_t n_tokens)
{
    model_shape shape = {.n_layers = 1, .n_embd = 8, .n_heads = 1, .n_ff = 8, .n_vocab = n_vocab,
        .n_tokens = n_tokens};
    kvc_model_desc desc = {0};
    test_model *m;
    for (size_t i = 0; i < n_models; i++) {
        if (models[i].n_vocab == n_vocab && models[i].n_tokens == n_tokens) return models[i].model;
    }
    assert_true(n_models < COUNT(models));
    m = &models[n_models++];
    m->n_vocab = n_vocab;
    m->n_tokens = n_tokens;
    m->image = model_build(&shape, &desc.data_size);
    desc.data = m->image;
    OK(kvc_model_open(&m->model, &desc, &last));
    return m->model;
}

static int close_models(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < n_models; i++) {
        kvc_model_close(models[i].model);
        free(models[i].image);
    }
    return 0;
}

static kvc_sampler *sampler_of(const kvc_sampler_desc *desc)
{
    kvc_sampler *s;
    OK(kvc_sampler_new(&s, desc, &last));
    return s;
}

static kvc_token pick(kvc_sampler *s, const float *logits)
{
    kvc_token token = KVC_NO_TOKEN;
    OK(kvc_sampler_sample(s, logits, &token, &last));
    return token;
}

static void expect_refused(const kvc_sampler_desc *desc, const char *where)
{
    static char nowhere;
    kvc_sampler *s = (kvc_sampler *)(void *)&nowhere;
    FAILS(KVC_ERROR_ARGUMENT, where, kvc_sampler_new(&s, desc, &last));
    assert_null(s);
    assert_int_equal(kvc_sampler_size(desc), 0);
}

static float noise(uint64_t *state)   /* uniform in [-8, 8), in steps that make many ties */
{
    return (float)(kvc__random_u64(state) >> 54) / 64.0f - 8.0f;
}

/* ---- the generator ---- */

static void generator_matches_published_values(void **unused)
{
    uint64_t state = 1234567;
    (void)unused;
    assert_true(kvc__random_u64(&state) == UINT64_C(6457827717110365317));
    assert_true(kvc__random_u64(&state) == UINT64_C(3203168211198807973));
    assert_true(kvc__random_u64(&state) == UINT64_C(9817491932198370423));
    assert_true(kvc__random_u64(&state) == UINT64_C(4593380528125082431));
    assert_true(kvc__random_u64(&state) == UINT64_C(16408922859458223821));
}

static void unit_is_below_one(void **unused)
{
    uint64_t state = 5;
    double sum = 0.0;
    (void)unused;
    for (int i = 0; i < 100000; i++) {
        double u = kvc__random_unit(&state);
        assert_true(u >= 0.0 && u < 1.0);
        sum += u;
    }
    assert_true(fabs(sum / 100000 - 0.5) < 0.005);
}

/* ---- temperature ---- */

static void greedy_takes_first_of_equals_and_draws_nothing(void **unused)
{
    const float logits[6] = {1.0f, 4.0f, 4.0f, -2.0f, 4.0f, 0.0f};
    const float zeros[2] = {0.0f, -0.0f};
    (void)unused;
    for (int i = 0; i < 2; i++) {
        kvc_sampler_desc desc = {.model = model_of(6, 6), .temperature = zeros[i], .seed = 7};
        kvc_sampler *s = sampler_of(&desc);
        for (int n = 0; n < 20; n++) assert_int_equal(pick(s, logits), 1);
        assert_true(s->random == 7);
        kvc_sampler_free(s);
    }
}

static void tiny_temperature_stays_among_the_largest(void **unused)
{
    const float near[6] = {1.0f, 4.0f, 4.0f, -2.0f, 4.0f, nextafterf(4.0f, 0.0f)};
    const float far[6] = {-FLT_MAX, FLT_MAX, INFINITY, -INFINITY, FLT_MAX, 0.0f};
    const float tiny[3] = {1e-30f, 1e-38f, 1e-45f};
    (void)unused;
    for (int i = 0; i < 6; i++) {
        const float *logits = i < 3 ? near : far;
        kvc_sampler_desc desc = {.model = model_of(6, 6), .temperature = tiny[i % 3], .seed = 3};
        kvc_sampler *s = sampler_of(&desc);
        int seen[6] = {0};
        for (int n = 0; n < 300; n++) seen[pick(s, logits)]++;
        assert_int_equal(seen[0] + seen[3] + seen[5], 0);
        assert_true(seen[1] > 60 && seen[2] > 60 && seen[4] > 60);
        kvc_sampler_free(s);
    }
}

static void largest_temperature_is_uniform(void **unused)
{
    const float logits[4] = {-1000.0f, 1000.0f, 0.0f, 3.0f};
    kvc_sampler_desc desc = {.model = model_of(4, 4), .temperature = FLT_MAX};
    kvc_sampler *s = sampler_of(&desc);
    int seen[4] = {0};
    (void)unused;
    for (int n = 0; n < 4000; n++) seen[pick(s, logits)]++;
    for (int i = 0; i < 4; i++) assert_in_range(seen[i], 850, 1150);
    kvc_sampler_free(s);
}

/* ---- top-k, top-p, min-p ---- */

static uint32_t kept_by_top_p(const double *weights, uint32_t n, float p)
{
    kvc__candidate c[8];
    for (uint32_t i = 0; i < n; i++) {
        c[i].weight = weights[i];
        c[i].logit = (float)weights[i];
        c[i].id = i;
    }
    return kvc__candidates_top_p(c, n, p);
}

static void top_p_is_the_smallest_set_that_reaches_p(void **unused)
{
    const double halves[4] = {.5, .25, .125, .125}, mixed[4] = {.125, .5, .125, .25};
    (void)unused;
    assert_int_equal(kept_by_top_p(halves, 4, .5f), 1);
    assert_int_equal(kept_by_top_p(halves, 4, .6f), 2);
    assert_int_equal(kept_by_top_p(halves, 4, .75f), 2);
    assert_int_equal(kept_by_top_p(halves, 4, .76f), 3);
    assert_int_equal(kept_by_top_p(halves, 4, 1.0f), 4);
    assert_int_equal(kept_by_top_p(mixed, 4, .5f), 1);
    assert_int_equal(kept_by_top_p(mixed, 4, .75f), 2);
    assert_int_equal(kept_by_top_p(mixed, 4, .76f), 3);
    assert_int_equal(kept_by_top_p(mixed, 4, 1e-45f), 1);
}

static void top_p_through_the_api_keeps_what_it_says(void **unused)
{
    const float logits[4] = {0.0f, 0.0f, 0.0f, 0.0f};   /* each has exactly a quarter */
    const float p[5] = {.25f, .26f, .5f, .75f, .76f};
    const int kept[5] = {1, 2, 2, 3, 4};
    (void)unused;
    for (int i = 0; i < 5; i++) {
        kvc_sampler_desc desc = {.model = model_of(4, 4), .temperature = 1.0f, .top_p = p[i]};
        kvc_sampler *s = sampler_of(&desc);
        int seen[4] = {0};
        for (int n = 0; n < 400; n++) seen[pick(s, logits)]++;
        for (int id = 0; id < 4; id++) assert_int_equal(seen[id] > 0, id < kept[i]);
        kvc_sampler_free(s);
    }
}

static void top_p_just_under_one_stays_inside(void **unused)
{
    const uint32_t sizes[2] = {32000, 256000};
    (void)unused;
    for (int i = 0; i < 2; i++) {
        uint32_t n = sizes[i];
        float *logits = (float *)calloc(n, sizeof *logits);
        kvc__candidate *c = (kvc__candidate *)calloc(n, sizeof *c);
        kvc_sampler_desc desc = {.model = model_of(n, n), .temperature = 1.0f};
        assert_non_null(logits);
        assert_non_null(c);
        desc.top_p = nextafterf(1.0f, 0.0f);
        for (int turn = 0; turn < 2; turn++) {   /* all equal, then noise */
            uint64_t state = 9;
            kvc_sampler *s = sampler_of(&desc);
            for (int k = 0; k < 3; k++) assert_in_range(pick(s, logits), 0, n - 1);
            kvc_sampler_free(s);
            for (uint32_t k = 0; k < n; k++) {
                logits[k] = noise(&state);
                c[k].id = k;
                c[k].weight = turn == 0 ? 1.0 / 3.0 : exp((double)logits[k]);
            }
            assert_in_range(kvc__candidates_draw(c, n, 1.0 - ldexp(1.0, -24)), 0, n - 1);
            assert_in_range(kvc__candidates_draw(c, n, 1.0 - ldexp(1.0, -53)), 0, n - 1);
            assert_int_equal(kvc__candidates_draw(c, n, 1.0), n - 1);   /* past the end: clamped */
            assert_int_equal(kvc__candidates_draw(c, n, 0.0), 0);
        }
        free(c);
        free(logits);
    }
}

static void clamped_draw_has_a_weight(void **unused)
{
    const kvc__candidate c[4] = {{0.0, 0, 0}, {1.0, 0, 1}, {2.0, 0, 2}, {0.0, 0, 3}};
    (void)unused;
    assert_int_equal(kvc__candidates_draw(c, 4, 0.0), 1);
    assert_int_equal(kvc__candidates_draw(c, 4, 0.34), 2);
    assert_int_equal(kvc__candidates_draw(c, 4, 1.0), 2);
}

static void top_k_breaks_ties_by_id(void **unused)
{
    const float logits[6] = {2.0f, 5.0f, 5.0f, 5.0f, 9.0f, 5.0f};
    kvc_sampler_desc desc = {.model = model_of(6, 6), .temperature = 100.0f, .top_k = 3};
    kvc_sampler *s = sampler_of(&desc);
    int seen[6] = {0};
    (void)unused;
    for (int n = 0; n < 300; n++) seen[pick(s, logits)]++;
    assert_true(seen[4] > 60 && seen[1] > 60 && seen[2] > 60);
    assert_int_equal(seen[0] + seen[3] + seen[5], 0);
    kvc_sampler_free(s);
}

static void top_k_of_one_or_too_many(void **unused)
{
    const float logits[3] = {1.0f, 3.0f, 3.0f};
    (void)unused;
    for (uint32_t k = 1; k; k = k == 1 ? 4 : k == 4 ? UINT32_MAX : 0) {
        kvc_sampler_desc desc = {.model = model_of(3, 3), .temperature = 50.0f, .top_k = k};
        kvc_sampler *s = sampler_of(&desc);
        int seen[3] = {0};
        for (int n = 0; n < 300; n++) seen[pick(s, logits)]++;
        assert_int_equal(seen[0] > 0, k > 1);
        assert_int_equal(seen[2] > 0, k > 1);
        kvc_sampler_free(s);
    }
}

static void min_p_is_relative_to_the_likeliest(void **unused)
{
    const float logits[4] = {0.0f, -0.6f, -0.75f, -3.0f};   /* exp: 1, .549, .472, .05 */
    kvc_sampler_desc desc = {.model = model_of(4, 4), .temperature = 1.0f, .min_p = .5f};
    kvc_sampler *s = sampler_of(&desc);
    int seen[4] = {0};
    (void)unused;
    for (int n = 0; n < 300; n++) seen[pick(s, logits)]++;
    assert_true(seen[0] > 60 && seen[1] > 60);
    assert_int_equal(seen[2] + seen[3], 0);
    kvc_sampler_free(s);
    desc.min_p = 1.0f;
    s = sampler_of(&desc);
    for (int n = 0; n < 100; n++) assert_int_equal(pick(s, logits), 0);
    kvc_sampler_free(s);
}

/* ---- bias and penalties ---- */

static float penalized(const kvc_sampler_desc *desc, float logit, uint32_t count)
{
    return kvc__logit_penalize(desc, logit, count);
}

static void repeat_penalty_never_favours(void **unused)
{
    kvc_sampler_desc desc = {.repeat_penalty = 1.5f};
    (void)unused;
    assert_true(penalized(&desc, 3.0f, 1) == 2.0f);
    assert_true(penalized(&desc, -2.0f, 1) == -3.0f);
    assert_true(penalized(&desc, 0.0f, 1) == 0.0f);
    assert_true(penalized(&desc, 3.0f, 5) == 2.0f);
    desc.repeat_penalty = 0.5f;
    assert_true(penalized(&desc, 3.0f, 5) == 6.0f);
    assert_true(penalized(&desc, -2.0f, 5) == -1.0f);
    desc.repeat_penalty = 1e-45f;
    assert_true(penalized(&desc, 3.0f, 1) == FLT_MAX);
    desc.repeat_penalty = FLT_MAX;
    assert_true(penalized(&desc, -3.0f, 1) == -FLT_MAX);   /* unlikely is not banned */
    assert_true(penalized(&desc, -INFINITY, 1) == -INFINITY);
}

static void frequency_counts_and_presence_does_not(void **unused)
{
    kvc_sampler_desc desc = {.frequency_penalty = 0.25f, .presence_penalty = 1.0f};
    (void)unused;
    assert_true(penalized(&desc, 3.0f, 1) == 1.75f);
    assert_true(penalized(&desc, 3.0f, 4) == 1.0f);
    desc.repeat_penalty = 1.5f;
    assert_true(penalized(&desc, 3.0f, 4) == 0.0f);
    desc.frequency_penalty = -0.25f;
    assert_true(penalized(&desc, 3.0f, 4) == 2.0f);
}

static void repeats_cost_once_and_change_the_choice(void **unused)
{
    const float logits[3] = {2.0f, -2.0f, 1.5f};
    (void)unused;
    for (int times = 1; times <= 5; times += 4) {
        kvc_sampler_desc desc = {.model = model_of(3, 3), .repeat_penalty = 1.5f};
        kvc_sampler *s = sampler_of(&desc);
        for (int n = 0; n < times; n++) kvc_sampler_accept(s, 0);
        assert_int_equal(pick(s, logits), 2);   /* 2 / 1.5 < 1.5 */
        assert_int_equal(pick(s, logits), 0);   /* now 1.5 / 1.5 < 2 / 1.5 */
        kvc_sampler_free(s);
    }
}

/* The window as a plain list, counted anew each time. */
static void window_counts_equal_a_recount(void **unused)
{
    enum { N = 500 };
    const uint32_t windows[4] = {1, 2, 7, 0};
    (void)unused;
    for (int w = 0; w < 4; w++) {
        uint32_t size = windows[w] ? windows[w] : 64;
        kvc_sampler_desc desc = {
            .model = model_of(10, 10), .presence_penalty = 1.0f, .penalty_window = windows[w]};
        kvc_sampler *s = sampler_of(&desc);
        kvc_token said[N];
        uint64_t state = 11;
        assert_int_equal(s->desc.penalty_window, size);
        for (uint32_t n = 0; n < N; n++) {
            uint32_t counts[10] = {0};
            said[n] = (kvc_token)(kvc__random_u64(&state) % 10);
            kvc_sampler_accept(s, said[n]);
            kvc_sampler_accept(s, -1);
            kvc_sampler_accept(s, 10);
            kvc_sampler_accept(s, INT32_MAX);
            kvc_sampler_accept(s, INT32_MIN);
            for (uint32_t k = 0; k < size && k <= n; k++) counts[said[n - k]]++;
            assert_memory_equal(counts, s->counts, sizeof counts);
        }
        kvc_sampler_reset(s, 1);
        for (int id = 0; id < 10; id++) assert_int_equal(s->counts[id], 0);
        kvc_sampler_free(s);
    }
}

static void bias_adds_bans_and_the_last_entry_counts(void **unused)
{
    const float logits[4] = {1.0f, 2.0f, 3.0f, -INFINITY};
    const kvc_logit_bias bias[6] = {
        {2, 100.0f}, {0, 1.5f}, {2, -INFINITY}, {1, -FLT_MAX}, {3, 50.0f}, {0, 1.25f}};
    kvc_sampler_desc desc = {.model = model_of(4, 4), .bias = bias, .n_bias = 6};
    kvc_sampler *s = sampler_of(&desc);
    (void)unused;
    assert_int_equal(pick(s, logits), 0);
    assert_true(s->candidates[0].logit == 2.25f);
    assert_int_equal(s->candidates[1].id, 1);        /* very unlikely, but not banned */
    assert_true(s->candidates[1].logit == -FLT_MAX);
    kvc_sampler_free(s);
}

static void bias_out_of_range_is_refused(void **unused)
{
    const kvc_logit_bias bad[7] = {{-1, 1}, {6, 1}, {7, 1}, {INT32_MAX, 1}, {INT32_MIN, 1},
        {0, NAN}, {0, INFINITY}};
    kvc_sampler_desc desc = {.model = model_of(6, 6), .n_bias = 1};
    (void)unused;
    expect_refused(&desc, "bias");
    for (size_t i = 0; i < COUNT(bad); i++) {
        desc.bias = &bad[i];
        expect_refused(&desc, "bias");
    }
    desc.bias = &(kvc_logit_bias){5, 1};
    assert_int_not_equal(kvc_sampler_size(&desc), 0);
}

static void padding_is_never_chosen(void **unused)
{
    const kvc_logit_bias bias[1] = {{262, 1000.0f}};
    float logits[264] = {0};
    (void)unused;
    logits[260] = 100.0f;
    logits[261] = INFINITY;
    for (int i = 0; i < 3; i++) {
        kvc_sampler_desc desc = {.model = model_of(264, 260), .temperature = (float)i, .bias = bias,
            .n_bias = 1, .top_k = i == 2 ? 263 : 0};
        kvc_sampler *s = sampler_of(&desc);
        for (int n = 0; n < 2000; n++) assert_in_range(pick(s, logits), 0, 259);
        kvc_sampler_free(s);
    }
}

/* ---- logits that are no numbers ---- */

static void refuse_logits(kvc_sampler *s, const float *logits)
{
    kvc_token token = 3;
    uint64_t before = s->random;
    FAILS(KVC_ERROR_NUMERIC, "logits", kvc_sampler_sample(s, logits, &token, &last));
    assert_int_equal(token, KVC_NO_TOKEN);
    assert_true(s->random == before);
    assert_int_equal(s->n_window, 0);
}

static void nan_and_nothing_left_are_errors(void **unused)
{
    kvc_logit_bias ban_all[260];
    float none[264], fine[264] = {0};
    (void)unused;
    for (int i = 0; i < 264; i++) none[i] = i < 260 ? -INFINITY : 9.0f;
    for (int i = 0; i < 260; i++) ban_all[i] = (kvc_logit_bias){i, -INFINITY};
    fine[2] = INFINITY;
    for (int t = 0; t < 2; t++) {
        kvc_sampler_desc desc = {
            .model = model_of(264, 260), .temperature = (float)t, .presence_penalty = 1.0f};
        kvc_sampler *s = sampler_of(&desc);
        for (int i = 0; i < 264; i++) {   /* also in padding, where only a broken step leaves one */
            float logits[264] = {0};
            logits[i] = NAN;
            refuse_logits(s, logits);
        }
        refuse_logits(s, none);
        assert_int_equal(pick(s, fine), 2);
        kvc_sampler_free(s);
        desc.bias = ban_all;
        desc.n_bias = 260;
        s = sampler_of(&desc);
        refuse_logits(s, fine);
        kvc_sampler_free(s);
    }
}

static void extreme_rows_give_a_token(void **unused)
{
    const float rows[4][3] = {{1000, 1000, 1000}, {1e38f, 0, 0}, {-INFINITY, 5, -INFINITY},
        {-FLT_MAX, -FLT_MAX, -INFINITY}};
    const int most[4] = {2, 0, 1, 1};
    (void)unused;
    for (int i = 0; i < 4; i++) {
        kvc_sampler_desc desc = {.model = model_of(3, 3), .temperature = 1.0f, .top_p = 0.999f};
        kvc_sampler *s = sampler_of(&desc);
        for (int n = 0; n < 50; n++) assert_in_range(pick(s, rows[i]), 0, most[i]);
        kvc_sampler_free(s);
    }
}

/* ---- the whole chain against a plain one ---- */

typedef struct plain {
    double weight;
    float logit;
    int id;
} plain;

static int plain_order(const void *a, const void *b)
{
    const plain *x = (const plain *)a, *y = (const plain *)b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id - y->id;
}

static double plain_sum(const plain *p, int n)
{
    double sum = 0.0;
    for (int i = 0; i < n; i++) sum += p[i].weight;
    return sum;
}

/* Sorts everything and follows the manual word by word. */
static int plain_choose(const kvc_sampler_desc *d, const float *logits, int n, double unit)
{
    plain p[64];
    int kept = 0, i;
    double target, sum = 0.0;
    float largest = -INFINITY;
    for (i = 0; i < n; i++) {
        p[i].logit = logits[i];
        p[i].id = i;
        if (logits[i] > largest) largest = logits[i];
    }
    if (d->top_k > 0 && (int)d->top_k < n) {
        qsort(p, (size_t)n, sizeof p[0], plain_order);
        n = (int)d->top_k;
    }
    for (i = 0; i < n; i++) {
        p[i].weight = kvc__exp(((double)p[i].logit - (double)largest) / (double)d->temperature);
    }
    if (d->top_p > 0.0f && d->top_p < 1.0f) {
        target = (double)d->top_p * plain_sum(p, n);
        qsort(p, (size_t)n, sizeof p[0], plain_order);
        for (i = 0; i < n && plain_sum(p, i) < target; i++) {}
        n = i;
    }
    for (i = 0; i < n; i++) {
        if (p[i].weight >= (double)d->min_p) p[kept++] = p[i];
    }
    target = unit * plain_sum(p, kept);
    for (i = 0; i < kept - 1; i++) {
        sum += p[i].weight;
        if (sum > target) break;
    }
    return p[i].id;
}

static void chain_equals_a_plain_one(void **unused)
{
    uint64_t state = 2024;
    (void)unused;
    for (int turn = 0; turn < 3000; turn++) {
        uint32_t n = 1 + (uint32_t)(kvc__random_u64(&state) % 60);
        float logits[64];
        kvc_sampler_desc desc = {.model = model_of(n, n)};
        uint64_t draws;
        kvc_sampler *s;
        desc.temperature = 0.1f + (float)kvc__random_unit(&state) * 3.0f;
        if (turn % 2) desc.top_k = (uint32_t)(kvc__random_u64(&state) % 64);
        if (turn % 3) desc.top_p = (float)kvc__random_unit(&state);
        if (turn % 5 > 2) desc.min_p = (float)kvc__random_unit(&state);
        desc.seed = kvc__random_u64(&state);
        draws = desc.seed;
        s = sampler_of(&desc);
        for (int k = 0; k < 5; k++) {
            for (uint32_t i = 0; i < n; i++) logits[i] = noise(&state);
            assert_int_equal(pick(s, logits),
                plain_choose(&desc, logits, (int)n, kvc__random_unit(&draws)));
        }
        kvc_sampler_free(s);
    }
}

/* The heap alone, on sizes around powers of two. */
static void ranking_equals_a_sort(void **unused)
{
    uint64_t state = 77;
    (void)unused;
    for (uint32_t n = 1; n <= 64; n++) {
        for (uint32_t k = 0; k <= n; k++) {
            kvc__candidate c[64];
            plain p[64];
            for (uint32_t i = 0; i < n; i++) {
                c[i].weight = 0.0;
                c[i].logit = p[i].logit = noise(&state);
                c[i].id = i;
                p[i].id = (int)i;
            }
            qsort(p, n, sizeof p[0], plain_order);
            assert_int_equal(kvc__candidates_rank(c, n, k, 1.0), k);
            for (uint32_t i = 0; i < k; i++) assert_int_equal(c[i].id, p[i].id);
        }
    }
}

/* ---- the draw ---- */

static void draws_follow_the_probabilities(void **unused)
{
    enum { N = 40000 };
    const float logits[8] = {0.0f, 1.0f, -1.0f, 0.5f, -0.5f, 2.0f, -2.0f, 0.25f};
    const float temperatures[3] = {0.7f, 1.0f, 2.0f};
    (void)unused;
    for (int t = 0; t < 3; t++) {
        kvc_sampler_desc desc = {
            .model = model_of(8, 8), .temperature = temperatures[t], .seed = 1};
        kvc_sampler *s = sampler_of(&desc);
        double p[8], sum = 0.0, chi2 = 0.0;
        int seen[8] = {0};
        for (int i = 0; i < 8; i++) sum += p[i] = exp((double)logits[i] / (double)temperatures[t]);
        for (int n = 0; n < N; n++) seen[pick(s, logits)]++;
        for (int i = 0; i < 8; i++) {
            double expected = N * p[i] / sum;
            chi2 += (seen[i] - expected) * (seen[i] - expected) / expected;
        }
        assert_true(chi2 < 24.32);   /* 7 degrees of freedom: one in a thousand is larger */
        kvc_sampler_free(s);
    }
}

static void golden_logits(float logits[100], int step)
{
    for (int i = 0; i < 100; i++) logits[i] = (float)((i * 37 + step * 11) % 101) / 16.0f;
}

static void golden_sequence_is_the_same_everywhere(void **unused)
{
    /* From a separate program with a 60-digit exp; no choice was closer than 1e-4. */
    static const kvc_token golden[16] = {
        46, 87, 73, 59, 37, 58, 50, 93, 63, 68, 57, 32, 89, 15, 31, 20};
    kvc_sampler_desc desc = {.model = model_of(100, 100), .temperature = 0.8f, .top_k = 40,
        .top_p = 0.95f, .min_p = 0.02f, .repeat_penalty = 1.25f, .penalty_window = 8, .seed = 42};
    kvc_sampler *s = sampler_of(&desc);
    (void)unused;
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < 16; i++) {
            float logits[100], before[100];
            golden_logits(logits, i);
            memcpy(before, logits, sizeof logits);
            assert_int_equal(pick(s, logits), golden[i]);
            assert_memory_equal(logits, before, sizeof logits);   /* they stay as they are */
        }
        kvc_sampler_reset(s, 42);
    }
    kvc_sampler_free(s);
}

static void seeds_differ_and_resets_repeat(void **unused)
{
    const float logits[50] = {0};
    kvc_sampler_desc desc = {.model = model_of(50, 50), .temperature = 1.0f, .seed = 1};
    kvc_sampler *a = sampler_of(&desc), *b;
    kvc_token first[32];
    int equal = 0;
    (void)unused;
    desc.seed = 2;
    b = sampler_of(&desc);
    for (int i = 0; i < 32; i++) {
        first[i] = pick(a, logits);
        equal += first[i] == pick(b, logits);
    }
    assert_true(equal < 8);
    kvc_sampler_reset(b, 1);
    for (int i = 0; i < 32; i++) assert_int_equal(pick(b, logits), first[i]);
    kvc_sampler_free(a);
    kvc_sampler_free(b);
}

/* ---- arguments and memory ---- */

static void numbers_out_of_range_are_refused(void **unused)
{
    const float bad[4] = {-1.0f, NAN, INFINITY, -INFINITY};
    const kvc_sampler_desc good = {.model = model_of(5, 5)};
    kvc_sampler_desc d;
    (void)unused;
    for (int i = 0; i < 4; i++) {
        d = good, d.temperature = bad[i], expect_refused(&d, "temperature");
        d = good, d.top_p = bad[i], expect_refused(&d, "top_p");
        d = good, d.min_p = bad[i], expect_refused(&d, "min_p");
        d = good, d.repeat_penalty = bad[i], expect_refused(&d, "repeat_penalty");
        if (i == 0) continue;   /* -1 is a fair value of these two */
        d = good, d.frequency_penalty = bad[i], expect_refused(&d, "frequency_penalty");
        d = good, d.presence_penalty = bad[i], expect_refused(&d, "presence_penalty");
    }
    d = good, d.top_p = nextafterf(1.0f, 2.0f), expect_refused(&d, "top_p");
    d = good, d.min_p = nextafterf(1.0f, 2.0f), expect_refused(&d, "min_p");
    d = good, d.penalty_window = UINT32_MAX, expect_refused(&d, "penalty_window");
    d = good, d.model = NULL, expect_refused(&d, "model");
    d = good, d.start_canary = 1, expect_refused(&d, "desc");
    d = good, d.end_canary = 1, expect_refused(&d, "desc");
}

static void null_pointers_are_refused(void **unused)
{
    const float logits[5] = {0};
    kvc_sampler_desc desc = {.model = model_of(5, 5)};
    kvc_sampler *s = sampler_of(&desc);
    kvc_token token = 3;
    (void)unused;
    expect_refused(NULL, "desc");
    FAILS(KVC_ERROR_ARGUMENT, "out", kvc_sampler_new(NULL, &desc, &last));
    FAILS(KVC_ERROR_ARGUMENT, "sampler", kvc_sampler_sample(NULL, logits, &token, &last));
    assert_int_equal(token, KVC_NO_TOKEN);
    FAILS(KVC_ERROR_ARGUMENT, "logits", kvc_sampler_sample(s, NULL, &token, &last));
    FAILS(KVC_ERROR_ARGUMENT, "token", kvc_sampler_sample(s, logits, NULL, &last));
    kvc_sampler_accept(NULL, 1);
    kvc_sampler_reset(NULL, 1);
    kvc_sampler_free(NULL);
    kvc_sampler_free(s);
}

/* A desc that uses every part of the block. */
static kvc_sampler_desc full_desc(kvc_model *model)
{
    static const kvc_logit_bias bias[2] = {{3, 1.0f}, {4, -INFINITY}};
    kvc_sampler_desc desc = {.model = model, .temperature = 0.9f, .top_k = 50, .top_p = 0.9f,
        .min_p = 0.01f, .repeat_penalty = 1.1f, .frequency_penalty = 0.1f, .presence_penalty = 0.1f,
        .penalty_window = 33, .bias = bias, .n_bias = 2, .seed = 5};
    return desc;
}

static void one_block_of_the_announced_size_and_no_calls_while_sampling(void **unused)
{
    counter c = {0};
    kvc_sampler_desc desc = full_desc(model_of(1003, 1001));
    float logits[1003];
    kvc_sampler *s;
    uint64_t state = 1;
    size_t size;
    (void)unused;
    desc.allocator = counter_hook(&c);
    size = kvc_sampler_size(&desc);
    assert_int_equal(c.n_allocs, 0);
    s = sampler_of(&desc);
    assert_int_equal(c.n_allocs, 1);
    assert_int_equal(c.bytes, size);
    for (int n = 0; n < 200; n++) {
        for (int i = 0; i < 1003; i++) logits[i] = noise(&state);
        pick(s, logits);
        kvc_sampler_accept(s, n);
    }
    kvc_sampler_reset(s, 3);
    assert_int_equal(c.n_allocs, 1);
    assert_int_equal(c.n_frees, 0);
    kvc_sampler_free(s);
    assert_int_equal(c.n_frees, 1);
    CLEAN(&c);
    c.fail_at = 2;
    FAILS(KVC_ERROR_MEMORY, "allocator", kvc_sampler_new(&s, &desc, &last));
    assert_null(s);
    desc.allocator.free = NULL;
    expect_refused(&desc, "allocator");
    desc.allocator = counter_hook(&c);
    desc.allocator.alloc = NULL;
    expect_refused(&desc, "allocator");
}

static void host_memory_is_used_to_the_byte(void **unused)
{
    counter c = {0};
    kvc_sampler_desc desc = full_desc(model_of(303, 301));
    void *block = NULL;
    kvc_sampler *s;
    float logits[303] = {0};
    size_t size = kvc_sampler_size(&desc);
    (void)unused;
    assert_int_equal(posix_memalign(&block, 64, size + 64), 0);
    memset(block, 0xee, size + 64);
    desc.allocator = counter_hook(&c);
    desc.memory = (kvc_memory){block, size - 1};
    FAILS(KVC_ERROR_MEMORY, "memory.size", kvc_sampler_new(&s, &desc, &last));
    assert_null(s);
    desc.memory.size = size;
    for (int off = 1; off < 64; off += 31) {
        desc.memory.ptr = (char *)block + off;
        FAILS(KVC_ERROR_ARGUMENT, "memory.ptr", kvc_sampler_new(&s, &desc, &last));
        assert_null(s);
    }
    desc.memory.ptr = block;
    s = sampler_of(&desc);
    assert_ptr_equal(s, block);
    for (int i = 0; i < 100; i++) pick(s, logits);
    for (size_t i = 0; i < 64; i++) assert_int_equal(((unsigned char *)block)[size + i], 0xee);
    kvc_sampler_free(s);
    assert_int_equal(c.n_allocs + c.n_frees, 0);
    free(block);
}

static void size_is_what_the_parts_need(void **unused)
{
    kvc_sampler_desc desc = {.model = model_of(1000, 1000)};
    size_t plain_size = kvc_sampler_size(&desc);
    (void)unused;
    desc.repeat_penalty = 1.0f;   /* off, like 0 */
    assert_int_equal(kvc_sampler_size(&desc), plain_size);
    desc.presence_penalty = 1.0f;
    assert_int_equal(kvc_sampler_size(&desc), plain_size + 4032 + 256);
    desc.penalty_window = 100;
    assert_int_equal(kvc_sampler_size(&desc), plain_size + 4032 + 448);
    desc = (kvc_sampler_desc){.model = desc.model, .bias = &(kvc_logit_bias){1, 1}, .n_bias = 1};
    assert_int_equal(kvc_sampler_size(&desc), plain_size + 4032);
}

static void bias_list_may_go_after_creation(void **unused)
{
    const float logits[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    kvc_logit_bias *bias = (kvc_logit_bias *)calloc(1, sizeof *bias);
    kvc_sampler_desc desc = {.model = model_of(4, 4), .bias = bias, .n_bias = 1};
    kvc_sampler *s;
    (void)unused;
    assert_non_null(bias);
    *bias = (kvc_logit_bias){0, 10.0f};
    s = sampler_of(&desc);
    free(bias);
    kvc_sampler_reset(s, 4);
    assert_int_equal(pick(s, logits), 0);
    kvc_sampler_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generator_matches_published_values),
        cmocka_unit_test(unit_is_below_one),
        cmocka_unit_test(greedy_takes_first_of_equals_and_draws_nothing),
        cmocka_unit_test(tiny_temperature_stays_among_the_largest),
        cmocka_unit_test(largest_temperature_is_uniform),
        cmocka_unit_test(top_p_is_the_smallest_set_that_reaches_p),
        cmocka_unit_test(top_p_through_the_api_keeps_what_it_says),
        cmocka_unit_test(top_p_just_under_one_stays_inside),
        cmocka_unit_test(clamped_draw_has_a_weight),
        cmocka_unit_test(top_k_breaks_ties_by_id),
        cmocka_unit_test(top_k_of_one_or_too_many),
        cmocka_unit_test(min_p_is_relative_to_the_likeliest),
        cmocka_unit_test(repeat_penalty_never_favours),
        cmocka_unit_test(frequency_counts_and_presence_does_not),
        cmocka_unit_test(repeats_cost_once_and_change_the_choice),
        cmocka_unit_test(window_counts_equal_a_recount),
        cmocka_unit_test(bias_adds_bans_and_the_last_entry_counts),
        cmocka_unit_test(bias_out_of_range_is_refused),
        cmocka_unit_test(padding_is_never_chosen),
        cmocka_unit_test(nan_and_nothing_left_are_errors),
        cmocka_unit_test(extreme_rows_give_a_token),
        cmocka_unit_test(chain_equals_a_plain_one),
        cmocka_unit_test(ranking_equals_a_sort),
        cmocka_unit_test(draws_follow_the_probabilities),
        cmocka_unit_test(golden_sequence_is_the_same_everywhere),
        cmocka_unit_test(seeds_differ_and_resets_repeat),
        cmocka_unit_test(numbers_out_of_range_are_refused),
        cmocka_unit_test(null_pointers_are_refused),
        cmocka_unit_test(one_block_of_the_announced_size_and_no_calls_while_sampling),
        cmocka_unit_test(host_memory_is_used_to_the_byte),
        cmocka_unit_test(size_is_what_the_parts_need),
        cmocka_unit_test(bias_list_may_go_after_creation),
    };
    return cmocka_run_group_tests(tests, NULL, close_models);
}
