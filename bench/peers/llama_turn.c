/* llama_turn: llama.cpp behind the line protocol of bench/peers (see README.md), as its own C API
   gives it: the libraries of the npm package node-llama-cpp, without its binding.

       llama_turn MODEL THREADS N_CTX KV_TYPE N_SEQS      KV_TYPE: f16 or f32

   N_CTX is the most that each of N_SEQS sequences holds; all turns but those of a batch use the
   first. BACKENDS is the folder of the libraries, which hold one backend for each kind of
   processor. Everything is left at llama.cpp's defaults: memory-mapped weights, laid out anew where
   it sees fit, flash attention where it can, 512 tokens in a micro-batch, K and V of each sequence
   in a buffer of its own (in one for all, attention would go over every sequence's positions and
   mask those of the others, which is slower). The threads are a pool with default parameters, as
   its own benchmark has one; without it llama.cpp makes new threads for every token. Between turns
   the pool is paused: its threads spin for a while when there is nothing to do, which would disturb
   the other engine. */
#define _GNU_SOURCE   /* clock_gettime, dladdr */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"

enum { ID_STEP = 197, ID_COUNT = 499 };

typedef struct engine {
    struct llama_model *model;
    struct llama_context *ctx;
    struct ggml_threadpool *pool;
    void (*pause)(struct ggml_threadpool *);
    struct llama_batch batch;   /* of n_batch tokens */
    llama_token *tokens;    /* [n_ctx + n_seqs]; sequence i begins with entry i, so that no two are
                               alike */
    uint32_t *lengths;      /* [n_seqs] */
    uint32_t n_ctx, n_seqs, n_batch;
} engine;

static void fail(const char *what)
{
    fprintf(stderr, "llama_turn: %s\n", what);
    exit(2);
}

static void *get(size_t n, size_t size)
{
    void *p = calloc(n, size);
    if (!p) fail("no memory");
    return p;
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- turns ---- */

/* Puts the next token of sequence i into the batch. */
static void put(engine *e, uint32_t i, int wants_logits)
{
    struct llama_batch *b = &e->batch;
    int32_t row = b->n_tokens++;
    b->token[row] = e->tokens[i + e->lengths[i]];
    b->pos[row] = (llama_pos)e->lengths[i]++;
    b->n_seq_id[row] = 1;
    b->seq_id[row][0] = (llama_seq_id)i;
    b->logits[row] = (int8_t)wants_logits;
}

static void compute(engine *e)
{
    if (llama_decode(e->ctx, e->batch) != 0) fail("llama_decode failed");
    e->batch.n_tokens = 0;
}

/* Computes the next n tokens of sequence i, with the logits of the last one of each batch. */
static void append(engine *e, uint32_t i, uint32_t n)
{
    while (n > 0) {
        uint32_t part = n < e->n_batch ? n : e->n_batch;
        for (uint32_t k = 0; k < part; k++) put(e, i, k == part - 1);
        compute(e);
        n -= part;
    }
    llama_synchronize(e->ctx);
}

/* Computes the next token of each of the first n sequences in one batch, with its logits. */
static void step(engine *e, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) put(e, i, 1);
    compute(e);
    llama_synchronize(e->ctx);
}

/* Each of the first n sequences holds its first `length` tokens. */
static void set_length(engine *e, uint32_t n, uint32_t length)
{
    llama_memory_t memory = llama_get_memory(e->ctx);
    for (uint32_t i = 0; i < n; i++) {
        if (e->lengths[i] > length) {
            if (!llama_memory_seq_rm(memory, (llama_seq_id)i, (llama_pos)length, -1)) {
                fail("positions cannot be removed");
            }
            e->lengths[i] = length;
        }
        append(e, i, length - e->lengths[i]);
    }
}

/* One step that is not counted: the threads are awake and have found their places. */
static void warm_up(engine *e, uint32_t n, uint32_t length)
{
    set_length(e, n, length);
    step(e, n);
    set_length(e, n, length);
}

static double prefill(engine *e, uint32_t n)
{
    double start;
    warm_up(e, 1, 0);
    start = now_ms();
    append(e, 0, n);
    return now_ms() - start;
}

/* A batch of one sequence is a decode. */
static double batch(engine *e, uint32_t n_seqs, uint32_t past, uint32_t n)
{
    double start;
    warm_up(e, n_seqs, past);
    start = now_ms();
    for (uint32_t i = 0; i < n; i++) step(e, n_seqs);
    return now_ms() - start;
}

/* Whether n tokens behind `past` others fit into a sequence. */
static int is_room(const engine *e, uint32_t past, uint32_t n)
{
    return n >= 1 && n <= e->n_ctx && past <= e->n_ctx - n;
}

static int take_turn(engine *e, const char *line)
{
    unsigned seqs, past, n;
    double took;
    if (sscanf(line, "prefill %u", &n) == 1 && is_room(e, 0, n)) took = prefill(e, n);
    else if (sscanf(line, "decode %u %u", &past, &n) == 2 && is_room(e, past, n))
        took = batch(e, 1, past, n);
    else if (sscanf(line, "batch %u %u %u", &seqs, &past, &n) == 3 && is_room(e, past, n) &&
        seqs >= 1 && seqs <= e->n_seqs)
        took = batch(e, seqs, past, n);
    else return 0;
    printf("%.3f\n", took);
    return 1;
}

/* The first batch of a turn wakes the threads again. */
static void serve(engine *e)
{
    char line[64];
    while (fgets(line, sizeof line, stdin) && strcmp(line, "quit\n") != 0) {
        if (!take_turn(e, line)) printf("error %s", line);
        e->pause(e->pool);
        fflush(stdout);
    }
}

/* ---- start ---- */

/* Keeps the lines of the log that tell how it computes. */
static void on_log(enum ggml_log_level level, const char *text, void *user)
{
    static const char *const telling[] = {"loaded CPU backend", "model buffer size",
        "Flash Attention", " cells,"};
    char *facts = user;
    (void)level;
    for (size_t i = 0; i < sizeof telling / sizeof telling[0]; i++) {
        size_t used = strlen(facts);
        if (strstr(text, telling[i]) && used + strlen(text) < BUFSIZ) {
            snprintf(facts + used, BUFSIZ - used, "; %.*s", (int)strcspn(text, "\n"), text);
        }
    }
}

/* Gives the context a pool of threads. The functions are in the backend, a library that llama.cpp
   chose and loaded; it hands out the first by name, and that one's address tells the library. */
static void add_threads(engine *e, int n_threads)
{
    struct ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    struct ggml_threadpool *(*pool_new)(struct ggml_threadpool_params *);
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void *address = device ? ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_threadpool_new") : NULL;
    void *library;
    Dl_info info;
    if (!address || !dladdr(address, &info)) fail("no backend for this processor");
    memcpy(&pool_new, &address, sizeof address);
    library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    address = library ? dlsym(library, "ggml_threadpool_pause") : NULL;
    if (!address) fail("threads cannot be paused");
    memcpy(&e->pause, &address, sizeof address);
    e->pool = pool_new(&params);
    if (!e->pool) fail("no threads");
    llama_attach_threadpool(e->ctx, e->pool, NULL);
}

static void make_context(engine *e, int n_threads, enum ggml_type type)
{
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = e->n_ctx * e->n_seqs;
    params.n_seq_max = e->n_seqs;
    params.n_threads = params.n_threads_batch = n_threads;
    params.type_k = params.type_v = type;
    e->ctx = llama_init_from_model(e->model, params);
    if (!e->ctx) fail("no context");
    e->n_batch = llama_n_batch(e->ctx);
    if (e->n_batch < e->n_seqs) fail("more sequences than a batch takes");
    e->batch = llama_batch_init((int32_t)e->n_batch, 0, 1);
}

static void start(engine *e, const char *path, int n_threads, enum ggml_type type)
{
    ggml_backend_load_all_from_path(BACKENDS);
    e->model = llama_model_load_from_file(path, llama_model_default_params());
    if (!e->model) fail("the model cannot be loaded");
    make_context(e, n_threads, type);
    add_threads(e, n_threads);
    e->lengths = get(e->n_seqs, sizeof *e->lengths);
    e->tokens = get((size_t)e->n_ctx + e->n_seqs, sizeof *e->tokens);
    for (uint32_t i = 0; i < e->n_ctx + e->n_seqs; i++) {
        e->tokens[i] = (llama_token)(i * ID_STEP % ID_COUNT);
    }
}

int main(int argc, char **argv)
{
    static char facts[BUFSIZ];
    engine e = {0};
    int f16 = argc == 6 && strcmp(argv[4], "f16") == 0;
    if (argc != 6 || (!f16 && strcmp(argv[4], "f32") != 0)) {
        fprintf(stderr, "usage: llama_turn MODEL THREADS N_CTX f16|f32 N_SEQS\n");
        return 2;
    }
    llama_log_set(on_log, facts);
    e.n_ctx = (uint32_t)strtoul(argv[3], NULL, 10);
    e.n_seqs = (uint32_t)strtoul(argv[5], NULL, 10);
    start(&e, argv[1], (int)strtol(argv[2], NULL, 10), f16 ? GGML_TYPE_F16 : GGML_TYPE_F32);
    printf("ready llama.cpp; %sn_batch = %u, n_ubatch = %u%s\n", llama_print_system_info(),
        e.n_batch, llama_n_ubatch(e.ctx), facts);
    fflush(stdout);
    serve(&e);
    llama_batch_free(e.batch);
    llama_free(e.ctx);
    llama_model_free(e.model);
    free(e.lengths);
    free(e.tokens);
    return 0;
}
