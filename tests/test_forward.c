/* Logits against the oracle: kvc.h beside naive.h on random models that differ in one thing each.

   With float matrices only the rounding of floats is between the two. With Q8_0 and Q4_0 matrices
   kvc.h rounds activations to 8 bits; the oracle can do the same, and what remains are single
   values that fall on the other side of a rounding. */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include "testing.h"
#include "naive.h"

#define N 40

/* How far two sets of logits are apart. */
typedef struct distance {
    double largest, rms;        /* of the difference */
    double cosine;              /* lowest over the rows */
    double spread;              /* standard deviation of the exact logits */
    size_t n_close;             /* rows that differ by less than 1e-4 */
} distance;

static distance compare(const float *got, const double *want, size_t n_rows, size_t n_vocab) {
    distance d = {0, 0, 1, 0, 0};
    double mean = 0, squares = 0, n = (double)(n_rows * n_vocab);
    size_t r, i;
    for (r = 0; r < n_rows; r++) {
        double dot = 0, a = 0, b = 0, largest = 0;
        for (i = 0; i < n_vocab; i++) {
            double x = (double)got[r * n_vocab + i], y = want[r * n_vocab + i];
            assert_true(x - x >= 0);            /* finite */
            if (fabs(x - y) > largest) largest = fabs(x - y);
            d.rms += (x - y) * (x - y) / n;
            dot += x * y;
            a += x * x;
            b += y * y;
            mean += y / n;
            squares += y * y / n;
        }
        if (dot / sqrt(a * b) < d.cosine) d.cosine = dot / sqrt(a * b);
        if (largest > d.largest) d.largest = largest;
        d.n_close += largest < 1e-4;
    }
    d.rms = sqrt(d.rms);
    d.spread = sqrt(squares - mean * mean);
    return d;
}

/* kvc.h against the oracle, which rounds what `round_q8` and `round_kv` say. */
static distance measure(const model_shape *shape, kvc_kv_type kv, int round_q8, int round_kv) {
    kvc_token text[N];
    naive_model m;
    double *exact;
    float *logits;
    distance d;
    rig r;
    rig_open(&r, shape);
    random_tokens(text, N, r.info.n_vocab, 7);
    logits = cold_run(&r, text, N, kv);
    naive_open(&m, r.image);
    m.round_q8 = round_q8;
    m.round_kv = round_kv;
    exact = naive_forward(&m, text, N);
    d = compare(logits, exact, N, r.info.n_vocab);
    free(exact);
    free(logits);
    rig_close(&r);
    return d;
}

/* ---- shapes and features, float matrices ---- */

#define SIZES .n_embd = 64, .n_heads = 4, .n_kv_heads = 2, .n_ff = 112, .n_vocab = 70
static const struct {
    const char *name;
    model_shape shape;
} variants[] = {
    {"GQA", {SIZES}},
    {"MQA", {.n_embd = 64, .n_heads = 4, .n_kv_heads = 1, .n_vocab = 70}},
    {"MHA", {.n_embd = 64, .n_heads = 4, .n_vocab = 70}},
    {"one head", {.n_embd = 32, .n_heads = 1, .n_vocab = 70}},
    {"seven heads over one", {.n_embd = 56, .n_heads = 7, .n_kv_heads = 1, .n_vocab = 70}},
    {"one layer", {SIZES, .n_layers = 1}},
    {"eight layers", {SIZES, .n_layers = 8}},
    {"tied", {SIZES, .tied = 1}},
    {"with a vocabulary", {.n_embd = 64, .n_heads = 4, .n_vocab = 330, .n_tokens = 310}},
    {"wide heads", {SIZES, .head_dim = 48}},
    {"heads of 20", {SIZES, .head_dim = 20}},
    {"heads of 80", {SIZES, .head_dim = 80}},
    {"heads of 2", {SIZES, .head_dim = 2}},
    {"value heads of 24", {SIZES, .head_dim_v = 24}},
    {"value heads of 8", {SIZES, .head_dim_v = 8}},
    {"rotated in part", {SIZES, .rope_dim = 10}},
    {"odd widths", {.n_embd = 57, .n_heads = 3, .head_dim = 18, .n_ff = 101, .n_vocab = 41}},
    {"narrow", {.n_embd = 6, .n_heads = 3, .n_kv_heads = 3, .n_ff = 5, .n_vocab = 7}},
    {"biases", {SIZES, .biases = 1}},
    {"epsilon 0.3", {SIZES, .epsilon = 0.3f}},
    {"base 500000", {SIZES, .rope_base = 500000.0f}},
    {"linear scaling", {SIZES, .rope = MODEL_ROPE_LINEAR, .rope_factor = 2.5f}},
    {"YaRN", {SIZES, .rope = MODEL_ROPE_YARN, .rope_orig_ctx = 128}},
    {"YaRN, short context", {SIZES, .rope = MODEL_ROPE_YARN, .rope_orig_ctx = 16,
        .rope_factor = 10}},
    {"YaRN, other betas", {SIZES, .rope = MODEL_ROPE_YARN, .rope_orig_ctx = 64, .head_dim = 64,
        .yarn_beta_fast = 8, .yarn_beta_slow = 2}},
    {"YaRN, attn_factor", {SIZES, .rope = MODEL_ROPE_YARN, .attn_factor = 0.8f}},
    {"attn_factor", {SIZES, .attn_factor = 1.3f}},
    {"rope_freqs", {SIZES, .rope_freqs = 1}},
    {"rope_freqs and linear", {SIZES, .rope_freqs = 1, .rope = MODEL_ROPE_LINEAR}},
    {"window 1", {SIZES, .window = 1}},
    {"window 16", {SIZES, .window = 16}},
    {"window 17", {SIZES, .window = 17}},
    {"window past the end", {SIZES, .window = 4000}},
    {"window 16, every 2nd sees all", {SIZES, .window = 16, .pattern = 2, .n_layers = 5}},
    {"window 5, every 3rd sees all", {SIZES, .window = 5, .pattern = 3, .n_layers = 4}},
    {"window 16, but all see all", {SIZES, .window = 16, .pattern = 1}},
    {"version 2, alignment 256", {SIZES, .version = 2, .alignment = 256}},
    {"F16", {SIZES, .type = GGUF_F16}},
    {"F16, odd widths", {.n_embd = 57, .n_heads = 3, .head_dim = 18, .n_ff = 101, .n_vocab = 41,
        .type = GGUF_F16}},
    {"BF16", {SIZES, .type = GGUF_BF16}},
    {"BF16, odd widths", {.n_embd = 57, .n_heads = 3, .head_dim = 18, .n_ff = 101, .n_vocab = 41,
        .type = GGUF_BF16}}
};

static void test_variants(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(variants); i++) {
        distance d = measure(&variants[i].shape, KVC_KV_F32, 0, 0);
        print_message("%-26s largest %.1e, spread %.2f\n", variants[i].name, d.largest, d.spread);
        assert_true(d.spread > 0.3);
        assert_true(d.largest < 1e-4);
    }
}

/* ---- quantized matrices ---- */

static const struct {
    const char *name;
    model_shape shape;
} quantized[] = {
#define QSIZES .n_layers = 1, .n_embd = 96, .n_heads = 4, .n_kv_heads = 2, .n_ff = 160
    {"Q8_0", {QSIZES, .n_vocab = 70, .type = GGUF_Q8_0}},
    {"Q8_0, tied, biases", {QSIZES, .n_vocab = 70, .type = GGUF_Q8_0, .tied = 1, .biases = 1}},
    {"Q8_0, rows of 32", {.n_embd = 32, .n_heads = 2, .n_ff = 32, .n_vocab = 70, .n_layers = 1,
        .type = GGUF_Q8_0}},
    {"Q4_0", {QSIZES, .n_vocab = 70, .type = GGUF_Q4_0}},
    {"Q4_0, tied, biases", {QSIZES, .n_vocab = 70, .type = GGUF_Q4_0, .tied = 1, .biases = 1}},
    {"Q4_0, rows of 32", {.n_embd = 32, .n_heads = 2, .n_ff = 32, .n_vocab = 70, .n_layers = 1,
        .type = GGUF_Q4_0}}
};

/* Against the exact result the 8-bit activations cost about a tenth. Against an oracle that rounds
   as kvc.h does only rows differ in which some value lay between two roundings, within what floats
   can tell; one layer has few of those. */
static void test_quantized(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(quantized); i++) {
        distance exact = measure(&quantized[i].shape, KVC_KV_F32, 0, 0);
        distance alike = measure(&quantized[i].shape, KVC_KV_F32, 1, 0);
        print_message("%-20s exact: largest %.3f, cosine %.5f   rounding alike: %u of %u rows\n",
            quantized[i].name, exact.largest, exact.cosine, (unsigned)alike.n_close, N);
        assert_true(exact.cosine > 0.998);
        assert_true(exact.largest < 0.6);
        assert_true(alike.largest < exact.largest);
        assert_true(alike.n_close >= N * 3 / 4);
    }
}

/* ---- K and V in half precision ---- */

static void test_kv_f16(void **state) {
    static const model_shape shapes[] = {
        {SIZES}, {SIZES, .head_dim = 20, .biases = 1}, {SIZES, .window = 16, .type = GGUF_F16}
    };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(shapes); i++) {
        distance exact = measure(&shapes[i], KVC_KV_F16, 0, 0);
        distance alike = measure(&shapes[i], KVC_KV_F16, 0, 1);
        print_message("exact: largest %.1e   rounding alike: largest %.1e, rms %.1e\n",
            exact.largest, alike.largest, alike.rms);
        assert_true(exact.largest < 2e-2);
        assert_true(exact.largest > 1e-5);      /* or it was not stored in half precision */
        assert_true(alike.largest < 5e-3);
        assert_true(alike.rms < 2e-4);
    }
}

/* ---- K and V in 8 and 4 bits ---- */

/* Against an oracle that rounds alike little is left: where a number of a key lay between two
   roundings, all rows after it differ a little. */
static void test_kv_codes(void **state) {
    static const model_shape shapes[] = {
        {SIZES, .n_layers = 1}, {SIZES, .n_layers = 1, .head_dim = 80, .head_dim_v = 48},
        {SIZES, .n_layers = 1, .head_dim = 20, .biases = 1}, {SIZES, .n_layers = 1, .window = 16}
    };
    static const struct {
        kvc_kv_type kv;
        int bits;
        double bound;
    } kinds[] = {{KVC_KV_Q8, 8, 0.2}, {KVC_KV_Q4, 4, 3}};
    size_t i, j;
    (void)state;
    for (j = 0; j < COUNT(kinds); j++) {
        for (i = 0; i < COUNT(shapes); i++) {
            distance exact = measure(&shapes[i], kinds[j].kv, 0, 0);
            distance alike = measure(&shapes[i], kinds[j].kv, 0, kinds[j].bits);
            print_message("%d bits, exact: largest %.1e, rms %.1e   rounding alike: largest %.1e, "
                "rms %.1e, %u of %u rows\n", kinds[j].bits, exact.largest, exact.rms,
                alike.largest, alike.rms, (unsigned)alike.n_close, N);
            assert_true(exact.largest < kinds[j].bound);
            assert_true(exact.rms > kinds[j].bound / 1000);     /* or it was not rounded */
            assert_true(alike.rms < exact.rms / 4);
        }
    }
}

/* ---- large numbers ---- */

/* Biases on q and k that raise the scores to about 1e5: beyond half precision, beyond exp. */
static void test_large_scores(void **state) {
    model_shape shape = {SIZES, .biases = 1, .n_layers = 1};
    kvc_token text[N];
    gguf_writer w;
    naive_model m;
    kvc_model_desc desc = {0};
    rig r;
    double *exact;
    float *logits;
    size_t t;
    (void)state;
    memset(&r, 0, sizeof r);
    model_write(&w, &shape);
    for (t = 0; t < w.n_tensors; t++) {
        const char *name = gguf_tensor_at(&w, t)->name;
        if (strcmp(name, "blk.0.attn_q.bias") && strcmp(name, "blk.0.attn_k.bias")) continue;
        model_fill(&w, t, 0, 1000.0f, 3);
    }
    desc.data = w.image;
    desc.data_size = w.image_size;
    OK(kvc_model_open(&r.model, &desc, &last));
    kvc_model_query(r.model, &r.info);
    random_tokens(text, N, r.info.n_vocab, 7);
    logits = cold_run(&r, text, N, KVC_KV_F32);
    naive_open(&m, w.image);
    exact = naive_forward(&m, text, N);
    for (t = 0; t < N * r.info.n_vocab; t++) assert_true(fabs((double)logits[t] - exact[t]) < 0.3);
    free(exact);
    free(logits);
    kvc_model_close(r.model);
    gguf_free(&w);
}

/* ---- the other engine for float matrices ---- */

static void prefill_with(const rig *r, kvc_gemm gemm, uint32_t n_batch, const kvc_token *text,
    float *out) {
    kvc_ctx_desc desc = {0};
    kvc_cache *cache = new_cache(r, N, 1, 0, KVC_KV_F32);
    kvc_seq *seq = new_seq(cache);
    kvc_ctx *ctx;
    size_t rows[N], i;
    for (i = 0; i < N; i++) rows[i] = i;
    desc.model = r->model;
    desc.gemm = gemm;
    desc.n_batch = n_batch;
    desc.n_threads = 2;
    OK(kvc_ctx_new(&ctx, &desc, &last));
    OK(kvc_prefill_rows(ctx, seq, text, N - 1, rows, N - 1, out, &last));
    out += (N - 1) * r->info.n_vocab;
    OK(kvc_prefill_rows(ctx, seq, text + N - 1, 1, rows, 1, out, &last));
    kvc_seq_close(seq);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
}

/* Close, but not equal, for all variants; quantized matrices are not its business. */
static void test_cblas(void **state) {
    size_t i, k;
    (void)state;
    if (!KVC_USE_CBLAS) {
        model_shape shape = {SIZES};
        kvc_ctx_desc desc = {0};
        kvc_ctx *ctx;
        rig r;
        rig_open(&r, &shape);
        desc.model = r.model;
        desc.gemm = KVC_GEMM_CBLAS;
        FAILS(KVC_ERROR_UNSUPPORTED, NULL, kvc_ctx_new(&ctx, &desc, &last));
        assert_null(ctx);
        rig_close(&r);
        print_message("built without cblas: only its refusal was tested\n");
        return;
    }
    for (i = 0; i < COUNT(variants); i++) {
        kvc_token text[N];
        float *a, *b;
        rig r;
        rig_open(&r, &variants[i].shape);
        random_tokens(text, N, r.info.n_vocab, 7);
        a = (float *)gguf_must(malloc(N * r.info.n_vocab * sizeof *a));
        b = (float *)gguf_must(malloc(N * r.info.n_vocab * sizeof *b));
        prefill_with(&r, KVC_GEMM_BUILTIN, 256, text, a);
        prefill_with(&r, KVC_GEMM_CBLAS, i % 2 ? 256 : 7, text, b);
        for (k = 0; k < N * r.info.n_vocab; k++)
            assert_true(fabs((double)a[k] - (double)b[k]) < 1e-4);
        free(a);
        free(b);
        rig_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_variants),
        cmocka_unit_test(test_quantized),
        cmocka_unit_test(test_kv_f16),
        cmocka_unit_test(test_kv_codes),
        cmocka_unit_test(test_large_scores),
        cmocka_unit_test(test_cblas)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
