/* llama_turn: llama.cpp behind the line protocol of bench/peers (see README.md), as its own C API
   gives it: the libraries of the npm package node-llama-cpp, without its binding.

       llama_turn MODEL THREADS N_CTX KV_TYPE      KV_TYPE: f16 or f32

   BACKENDS is the folder of the libraries, which hold one backend for each kind of processor.
   Everything is left at llama.cpp's defaults: memory-mapped weights, laid out anew where it sees
   fit, flash attention where it can, 512 tokens in a micro-batch. The threads are a pool with
   default parameters, as its own benchmark has one; without it llama.cpp makes new threads for
   every token. Between turns the pool is paused: its threads spin for a while when there is nothing
   to do, which would disturb the other engine. */
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
    llama_token *tokens;    /* [n_ctx] */
    uint32_t n_ctx, n_batch, length;
} engine;

static void fail(const char *what)
{
    fprintf(stderr, "llama_turn: %s\n", what);
    exit(2);
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- turns ---- */

/* Computes the next n tokens; llama_decode gives the logits of the last one of each batch. */
static void append(engine *e, uint32_t n)
{
    while (n > 0) {
        uint32_t part = n < e->n_batch ? n : e->n_batch;
        struct llama_batch batch = llama_batch_get_one(e->tokens + e->length, (int32_t)part);
        if (llama_decode(e->ctx, batch) != 0) fail("llama_decode failed");
        e->length += part;
        n -= part;
    }
    llama_synchronize(e->ctx);
}

static void set_length(engine *e, uint32_t length)
{
    if (e->length > length) {
        if (!llama_memory_seq_rm(llama_get_memory(e->ctx), 0, (llama_pos)length, -1)) {
            fail("positions cannot be removed");
        }
        e->length = length;
    }
    append(e, length - e->length);
}

/* One token that is not counted: the threads are awake and have found their places. */
static void warm_up(engine *e, uint32_t length)
{
    set_length(e, length);
    append(e, 1);
    set_length(e, length);
}

static double prefill(engine *e, uint32_t n)
{
    double start;
    warm_up(e, 0);
    start = now_ms();
    append(e, n);
    return now_ms() - start;
}

static double decode(engine *e, uint32_t past, uint32_t n)
{
    double start;
    warm_up(e, past);
    start = now_ms();
    for (uint32_t i = 0; i < n; i++) append(e, 1);
    return now_ms() - start;
}

static int take_turn(engine *e, const char *line)
{
    unsigned a, b;
    if (sscanf(line, "prefill %u", &a) == 1 && a >= 1 && a <= e->n_ctx) {
        printf("%.3f\n", prefill(e, a));
        return 1;
    }
    if (sscanf(line, "decode %u %u", &a, &b) == 2 && b >= 1 && b <= e->n_ctx && a <= e->n_ctx - b) {
        printf("%.3f\n", decode(e, a, b));
        return 1;
    }
    return 0;
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
    params.n_ctx = e->n_ctx;
    params.n_threads = params.n_threads_batch = n_threads;
    params.type_k = params.type_v = type;
    e->ctx = llama_init_from_model(e->model, params);
    if (!e->ctx) fail("no context");
    e->n_batch = llama_n_batch(e->ctx);
}

static void start(engine *e, const char *path, int n_threads, enum ggml_type type)
{
    ggml_backend_load_all_from_path(BACKENDS);
    e->model = llama_model_load_from_file(path, llama_model_default_params());
    if (!e->model) fail("the model cannot be loaded");
    make_context(e, n_threads, type);
    add_threads(e, n_threads);
    e->tokens = malloc(e->n_ctx * sizeof *e->tokens);
    if (!e->tokens) fail("no memory");
    for (uint32_t i = 0; i < e->n_ctx; i++) {
        e->tokens[i] = (llama_token)(i * ID_STEP % ID_COUNT);
    }
}

int main(int argc, char **argv)
{
    static char facts[BUFSIZ];
    engine e = {0};
    int f16 = argc == 5 && strcmp(argv[4], "f16") == 0;
    if (argc != 5 || (!f16 && strcmp(argv[4], "f32") != 0)) {
        fprintf(stderr, "usage: llama_turn MODEL THREADS N_CTX f16|f32\n");
        return 2;
    }
    llama_log_set(on_log, facts);
    e.n_ctx = (uint32_t)strtoul(argv[3], NULL, 10);
    start(&e, argv[1], (int)strtol(argv[2], NULL, 10), f16 ? GGML_TYPE_F16 : GGML_TYPE_F32);
    printf("ready llama.cpp; %sn_batch = %u, n_ubatch = %u%s\n", llama_print_system_info(),
        e.n_batch, llama_n_ubatch(e.ctx), facts);
    fflush(stdout);
    serve(&e);
    llama_free(e.ctx);
    llama_model_free(e.model);
    free(e.tokens);
    return 0;
}
