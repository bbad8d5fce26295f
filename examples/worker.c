/* worker: characters that answer in the background.

       worker [MODEL.gguf]

   The pattern for programs with threads to spare: each worker is one thread with one context, all
   of them on one model and one cache. The main thread gives a worker a request with kvc_submit,
   rings its bell and goes on; the worker computes all that it was given in common passes. Words
   come back through callbacks on the worker's thread, which puts them into a box with a lock; the
   main thread looks into the box once a frame. Nobody waits for anybody but the box's lock.
   Six characters are asked at once, by two workers, and the last one is told to be quiet again.
   Then all are asked anew, one by one and without workers: the same words must come, else the
   program ends with 1. */
#define _DEFAULT_SOURCE   /* clock_gettime, nanosleep */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KVC_IMPLEMENTATION
#include "../kvc.h"

enum { N_CHARACTERS = 6, N_WORKERS = 2, REPLY = 24, TEXT = 1024, TOKENS = 512, SAID = 256 };

static const char *const names[N_CHARACTERS] = {"Gordin", "Selana", "Merila", "Urlo", "Borna",
    "Melbert"};
static const char *const trades[] = {"blacksmith", "miller", "bard"};
static const char *const homes[] = {"little house behind the old mill",
    "old house beside the stone bridge"};
static const char question[] = "Where do you live?";

/* ---- workers ---- */

typedef struct worker {
    kvc_ctx *ctx;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t bell;
    int rung, quit;
} worker;

static void ring(worker *w, int quit)
{
    pthread_mutex_lock(&w->lock);
    w->rung = 1;
    w->quit |= quit;
    pthread_cond_signal(&w->bell);
    pthread_mutex_unlock(&w->lock);
}

static void *work(void *arg)
{
    worker *w = (worker *)arg;
    int quit = 0;
    while (!quit) {
        kvc_run(w->ctx, KVC_NO_LIMIT);
        pthread_mutex_lock(&w->lock);
        while (!w->rung) pthread_cond_wait(&w->bell, &w->lock);
        w->rung = 0;
        quit = w->quit;
        pthread_mutex_unlock(&w->lock);
    }
    return NULL;
}

/* ---- characters ---- */

/* What the worker's thread writes and the main thread reads. */
typedef struct box {
    pthread_mutex_t lock;
    char said[SAID];
    size_t n;
    int is_done;
    kvc_result result;
} box;

typedef struct character {
    const kvc_model *model;
    kvc_seq *seq;
    kvc_sampler *sampler;
    kvc_text_stream stream;
    kvc_token prompt[TOKENS];
    float *logits;
    kvc_request request;
    kvc_error err;
    box box;
} character;

static void need(kvc_result result, const kvc_error *err)
{
    if (result == KVC_OK) return;
    fprintf(stderr, "worker: %s: %s\n", err->where, err->message);
    exit(2);
}

/* On the worker's thread. */
static int hear_token(kvc_request *request, kvc_token token)
{
    character *c = (character *)request->user;
    size_t n = 0;
    if (kvc_token_is_end(c->model, token)) return 0;
    pthread_mutex_lock(&c->box.lock);
    if (kvc_text_push(c->model, &c->stream, token, c->box.said + c->box.n, SAID - 1 - c->box.n, &n,
        NULL) == KVC_OK) c->box.n += n;
    pthread_mutex_unlock(&c->box.lock);
    return 0;
}

static void hear_end(kvc_request *request)
{
    character *c = (character *)request->user;
    pthread_mutex_lock(&c->box.lock);
    c->box.is_done = 1;
    c->box.result = request->result;
    pthread_mutex_unlock(&c->box.lock);
}

static void write_prompt(character *c, int i)
{
    char text[TEXT];
    kvc_error err;
    size_t n;
    int size = snprintf(text, sizeof text, "<|system|>You are %s, a %s in Felmoor. You live in the "
        "%s.<|end|><|user|>%s<|end|><|char|>", names[i], trades[i % 3], homes[i % 2], question);
    need(kvc_tokenize(c->model, text, (size_t)size, KVC_TEXT_SPECIAL_PARSE, c->prompt, TOKENS, &n,
        NULL, &err), &err);
    c->request.n_tokens = n;
}

static void open_character(character *c, kvc_cache *cache, const kvc_model *model, int i)
{
    kvc_sampler_desc desc = {0};
    kvc_model_info info;
    desc.model = model;
    kvc_model_query(model, &info);
    c->model = model;
    c->logits = (float *)malloc(info.n_vocab * sizeof *c->logits);
    if (!c->logits) exit(2);
    pthread_mutex_init(&c->box.lock, NULL);
    need(kvc_seq_open_shared(&c->seq, cache, NULL, &c->err), &c->err);
    need(kvc_sampler_new(&c->sampler, &desc, &c->err), &c->err);
    write_prompt(c, i);
    c->request.seq = c->seq;
    c->request.tokens = c->prompt;
    c->request.n_rows = 1;
    c->request.logits = c->logits;
    c->request.sampler = c->sampler;
    c->request.limit = REPLY;
    c->request.on_token = hear_token;
    c->request.on_done = hear_end;
    c->request.err = &c->err;
    c->request.user = c;
}

static void close_character(character *c)
{
    kvc_seq_close(c->seq);
    kvc_sampler_free(c->sampler);
    pthread_mutex_destroy(&c->box.lock);
    free(c->logits);
}

/* Prints what is new; 1 if the character is done. */
static int look_into(character *c, int i, size_t *seen)
{
    int is_done;
    pthread_mutex_lock(&c->box.lock);
    is_done = c->box.is_done;
    if (c->box.n > *seen)
        printf("    %-8s %.*s\n", names[i], (int)(c->box.n - *seen), c->box.said + *seen);
    *seen = c->box.n;
    pthread_mutex_unlock(&c->box.lock);
    return is_done;
}

/* The game: frame after frame, while others compute. */
static void play(character *characters, worker *workers)
{
    const struct timespec frame = {0, 16666667};
    size_t seen[N_CHARACTERS] = {0};
    int n_frames = 0, n_done = 0;
    while (n_done < N_CHARACTERS) {
        n_done = 0;
        for (int i = 0; i < N_CHARACTERS; i++) n_done += look_into(&characters[i], i, &seen[i]);
        if (n_frames++ == 0)
            kvc_cancel(workers[(N_CHARACTERS - 1) % N_WORKERS].ctx,
                &characters[N_CHARACTERS - 1].request);
        nanosleep(&frame, NULL);
    }
    printf("%d frames\n", n_frames);
}

/* ---- all together ---- */

/* What the character says without workers is what it has said, as far as that went. */
static int agrees(character *c, kvc_ctx *ctx)
{
    char said[SAID];
    memcpy(said, c->box.said, SAID);
    c->box.n = 0;
    c->stream.started = 0;
    memset(c->box.said, 0, SAID);
    kvc_seq_rollback(c->seq, 0);
    need(kvc_submit(ctx, &c->request, &c->err), &c->err);
    kvc_run(ctx, KVC_NO_LIMIT);
    need(c->request.result, &c->err);
    return strncmp(said, c->box.said, strlen(said)) == 0;
}

int main(int argc, char **argv)
{
    static character characters[N_CHARACTERS];
    worker workers[N_WORKERS];
    kvc_model_desc model_desc = {0};
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc ctx_desc = {0};
    kvc_model *model;
    kvc_cache *cache;
    kvc_error err;
    int same = 1;
    model_desc.path = argc > 1 ? argv[1] : "examples/models/tavern-f16.gguf";
    need(kvc_model_open(&model, &model_desc, &err), &err);
    cache_desc.model = ctx_desc.model = model;
    cache_desc.n_seqs = N_CHARACTERS;
    cache_desc.n_prefix = 256;
    need(kvc_cache_new(&cache, &cache_desc, &err), &err);
    memset(workers, 0, sizeof workers);
    for (int i = 0; i < N_CHARACTERS; i++) open_character(&characters[i], cache, model, i);
    for (int i = 0; i < N_WORKERS; i++) {
        worker *w = &workers[i];
        need(kvc_ctx_new(&w->ctx, &ctx_desc, &err), &err);
        pthread_mutex_init(&w->lock, NULL);
        pthread_cond_init(&w->bell, NULL);
        if (pthread_create(&w->thread, NULL, work, w) != 0) return 2;
    }
    for (int i = 0; i < N_CHARACTERS; i++) {
        need(kvc_submit(workers[i % N_WORKERS].ctx, &characters[i].request, &err), &err);
        ring(&workers[i % N_WORKERS], 0);
    }
    play(characters, workers);
    for (int i = 0; i < N_WORKERS; i++) {
        ring(&workers[i], 1);
        pthread_join(workers[i].thread, NULL);
        pthread_cond_destroy(&workers[i].bell);
        pthread_mutex_destroy(&workers[i].lock);
    }
    for (int i = 0; i < N_CHARACTERS; i++) {
        printf("%-8s %s%s\n", names[i], characters[i].box.said,
            characters[i].box.result == KVC_ERROR_CANCELLED ? " (was told to be quiet)" : "");
        same &= agrees(&characters[i], workers[0].ctx);
        close_character(&characters[i]);
    }
    for (int i = 0; i < N_WORKERS; i++) kvc_ctx_free(workers[i].ctx);
    kvc_cache_free(cache);
    kvc_model_close(model);
    if (!same) printf("the two runs differ\n");
    return !same;
}
