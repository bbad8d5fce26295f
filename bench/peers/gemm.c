/* gemm: cblas_sgemm beside the built-in float kernels, on the matrices of real models.

       gemm [THREADS [TURNS]]

   For each matrix and number of rows, as CSV on standard output:

       model,matrix,n_in,n_out,rows,threads,cblas_gflops,f32_gflops,f16_gflops,f32_ratio,f16_ratio

   The built-in kernel is measured from outside, so that nothing depends on how it works: a model
   whose LM head has the matrix's shape, and next to nothing else, computes `rows` tokens with the
   logits of all of them, and once more with none; the difference is the product. So it contains the
   norm and the hand-out to the threads that every product of a model has, and sgemm contains its
   own. Both sides take turns; medians. */
#define _DEFAULT_SOURCE   /* clock_gettime, nanosleep */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cblas.h>

#define KVC_IMPLEMENTATION
#include "../../kvc.h"
#include "../../tests/gguf_write.h"

enum { MAX_ROWS = 512, MAX_TURNS = 31, N_TYPES = 2 };

static const double LEAST = 0.06;   /* seconds of work in one measurement */

static const struct {
    const char *model, *name;
    uint32_t n_in, n_out;
} matrices[] = {
    {"135m", "q/o", 576, 576}, {"135m", "k/v", 576, 192}, {"135m", "gate/up", 576, 1536},
    {"135m", "down", 1536, 576}, {"1b", "q/o", 2048, 2048}, {"1b", "k/v", 2048, 512},
    {"1b", "gate/up", 2048, 8192}, {"1b", "down", 8192, 2048}
};

static const int types[N_TYPES] = {GGUF_F32, GGUF_F16};
static const uint32_t row_counts[] = {128, 512};

/* One matrix, as the head of a model. */
typedef struct head {
    void *image;
    kvc_model *model;
    kvc_cache *cache;
    kvc_seq *seq;
    kvc_ctx *ctx;
} head;

typedef struct product {
    uint32_t n_in, n_out, n_rows;
    head heads[N_TYPES];
    float *x, *w, *y;           /* [n_rows, n_in], [n_out, n_in], [n_rows, n_out] */
    kvc_token tokens[MAX_ROWS];
    size_t rows[MAX_ROWS];
} product;

static void fail(const char *what)
{
    fprintf(stderr, "gemm: %s\n", what);
    exit(2);
}

static void need(kvc_result result, const kvc_error *err)
{
    if (result != KVC_OK) fail(err->message);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Until the threads of the other side have fallen asleep: OpenBLAS's spin for long when their work
   is done. */
static void rest(void)
{
    struct timespec t = {0, 500 * 1000 * 1000};
    nanosleep(&t, NULL);
}

static float *floats(size_t n)
{
    float *p = malloc(n * sizeof *p);
    if (!p) fail("no memory");
    for (size_t i = 0; i < n; i++) p[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return p;
}

/* ---- the two sides ---- */

static void run_cblas(const product *p)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)p->n_rows, (int)p->n_out,
        (int)p->n_in, 1.0f, p->x, (int)p->n_in, p->w, (int)p->n_in, 0.0f, p->y, (int)p->n_out);
}

/* All of the model, with the logits of the first n_logits rows. */
static void run_model(product *p, const head *h, size_t n_logits)
{
    kvc_error err;
    need(kvc_seq_rollback(h->seq, 0), &err);
    need(kvc_prefill_rows(h->ctx, h->seq, p->tokens, p->n_rows, p->rows, n_logits, p->y, &err),
        &err);
}

typedef enum side { CBLAS, MODEL, BODY } side;

static void run(product *p, const head *h, side which)
{
    if (which == CBLAS) run_cblas(p);
    else run_model(p, h, which == MODEL ? p->n_rows : 0);
}

/* Seconds of one run, as the mean of enough of them. */
static double measure(product *p, const head *h, side which)
{
    double start, seconds;
    int n = 0;
    rest();
    run(p, h, which);
    start = now();
    do {
        run(p, h, which);
        n++;
        seconds = now() - start;
    } while (seconds < LEAST);
    return seconds / n;
}

/* ---- one product ---- */

static void open_head(head *h, const product *p, int type, uint32_t n_threads)
{
    model_shape shape = {.n_layers = 1, .n_embd = p->n_in, .n_heads = 1, .head_dim = 32,
        .n_ff = 32, .n_vocab = p->n_out, .n_ctx = MAX_ROWS, .type = type, .tied = 1, .seed = 1};
    kvc_model_desc model_desc = {0};
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc ctx_desc = {.n_batch = p->n_rows, .n_threads = n_threads};
    kvc_error err;
    model_desc.data = h->image = model_build(&shape, &model_desc.data_size);
    need(kvc_model_open(&h->model, &model_desc, &err), &err);
    cache_desc.model = ctx_desc.model = h->model;
    need(kvc_cache_new(&h->cache, &cache_desc, &err), &err);
    need(kvc_seq_open(&h->seq, h->cache, &err), &err);
    need(kvc_ctx_new(&h->ctx, &ctx_desc, &err), &err);
}

static void close_head(head *h)
{
    kvc_ctx_free(h->ctx);
    kvc_seq_close(h->seq);
    kvc_cache_free(h->cache);
    kvc_model_close(h->model);
    free(h->image);
}

static void open_product(product *p, uint32_t n_threads)
{
    p->x = floats((size_t)p->n_rows * p->n_in);
    p->w = floats((size_t)p->n_out * p->n_in);
    p->y = floats((size_t)p->n_rows * p->n_out);
    for (uint32_t i = 0; i < p->n_rows; i++) {
        p->tokens[i] = (kvc_token)(i % p->n_out);
        p->rows[i] = i;
    }
    for (int t = 0; t < N_TYPES; t++) open_head(&p->heads[t], p, types[t], n_threads);
}

static void close_product(product *p)
{
    for (int t = 0; t < N_TYPES; t++) close_head(&p->heads[t]);
    free(p->x);
    free(p->w);
    free(p->y);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, by_value);
    return values[n / 2];
}

/* Billions of floating-point operations per second: of cblas, then of the built-in kernels for each
   type. */
static void compare(product *p, int n_turns, double gflops[1 + N_TYPES])
{
    double seconds[1 + N_TYPES][MAX_TURNS];
    double work = 2e-9 * p->n_rows * p->n_in * p->n_out;
    for (int turn = 0; turn < n_turns; turn++) {
        seconds[0][turn] = measure(p, NULL, CBLAS);
        for (int t = 0; t < N_TYPES; t++) {
            double all = measure(p, &p->heads[t], MODEL);
            seconds[1 + t][turn] = all - measure(p, &p->heads[t], BODY);
        }
    }
    for (int i = 0; i <= N_TYPES; i++) gflops[i] = work / median(seconds[i], n_turns);
}

int main(int argc, char **argv)
{
    long n_threads = argc > 1 ? strtol(argv[1], NULL, 10) : 2;
    long n_turns = argc > 2 ? strtol(argv[2], NULL, 10) : 5;
    if (argc > 3 || n_threads < 1 || n_threads > 256 || n_turns < 1 || n_turns > MAX_TURNS) {
        fail("usage: gemm [THREADS [TURNS]]");
    }
    openblas_set_num_threads((int)n_threads);
    printf("# %s\n", openblas_get_config());
    printf("model,matrix,n_in,n_out,rows,threads,cblas_gflops,f32_gflops,f16_gflops,f32_ratio,"
        "f16_ratio\n");
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) {
        for (size_t r = 0; r < sizeof row_counts / sizeof row_counts[0]; r++) {
            static product p;
            double g[1 + N_TYPES];
            p.n_in = matrices[i].n_in;
            p.n_out = matrices[i].n_out;
            p.n_rows = row_counts[r];
            open_product(&p, (uint32_t)n_threads);
            compare(&p, (int)n_turns, g);
            close_product(&p);
            printf("%s,%s,%u,%u,%u,%ld,%.1f,%.1f,%.1f,%.2f,%.2f\n", matrices[i].model,
                matrices[i].name, p.n_in, p.n_out, p.n_rows, n_threads, g[0], g[1], g[2],
                g[1] / g[0], g[2] / g[0]);
            fflush(stdout);
        }
    }
    return 0;
}
