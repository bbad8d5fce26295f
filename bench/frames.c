/* frames: a prompt that is read in slices of the frames of a game.

       frames MODEL.gguf [--threads N] [--budget US] [--prompt N] [--rounds N]
           [--busy | --no-pause]

   Each frame, 60 a second, spends the budget (2,000 us) in kvc_run until a prompt of 512 tokens is
   read; then the same prompt is read by one call. Prints the lengths of the slices, which are those
   of kvc_run as the caller sees them, and the time of all slices over that of the call. --busy: the
   rest of a frame is not slept through but spent on the frame's own work, 16 MB of memory that is
   written over. --no-pause: each slice follows the one before at once. */
#define _DEFAULT_SOURCE   /* clock_gettime, nanosleep */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kvc.h"
#include "../tests/gguf_write.h"

#define TOOL "frames"
#include "tool.h"

#define FRAME (1.0 / 60)

enum { MOST_SLICES = 1 << 20, GAME = 16 << 20 };

typedef struct bench {
    kvc_ctx *ctx;
    kvc_seq *seq;
    kvc_token *text;
    float *logits;              /* [n_vocab] */
    uint32_t n_vocab;
    unsigned char *game;        /* NULL: sleeps, */
    int no_pause;               /* or does not even that */
    uint64_t budget;
    size_t n;
    double *slices;             /* [n_slices] seconds */
    size_t n_slices;
} bench;

static void rest_of_frame(const bench *b, double end)
{
    static unsigned char frame;
    if (b->no_pause) return;
    while (b->game && now() < end - 1e-3) memset(b->game, ++frame, GAME);
    if (now() < end) {
        const double left = end - now();
        struct timespec t = {0, (long)(left * 1e9)};
        nanosleep(&t, NULL);
    }
}

/* Seconds of all slices. */
static double read_sliced(bench *b)
{
    kvc_request q = {0};
    kvc_error err;
    double sum = 0, start, end = now(), took;
    int more;
    q.seq = b->seq;
    q.tokens = b->text;
    q.n_tokens = b->n;
    q.n_rows = 1;
    q.logits = b->logits;
    q.err = &err;
    need(kvc_submit(b->ctx, &q, &err), &err);
    do {
        end += FRAME;
        start = now();
        more = kvc_run(b->ctx, b->budget);
        took = now() - start;
        sum += took;
        if (b->n_slices < MOST_SLICES) b->slices[b->n_slices++] = took;
        rest_of_frame(b, end);
    } while (more);
    need(q.result, &err);
    need(kvc_seq_rollback(b->seq, 0), &err);
    return sum;
}

static double read_at_once(bench *b)
{
    const float *logits;
    kvc_error err;
    double start = now(), took;
    need(kvc_prefill(b->ctx, b->seq, b->text, b->n, &logits, &err), &err);
    took = now() - start;
    if (memcmp(logits, b->logits, b->n_vocab * sizeof *logits) != 0) fail("other logits", "slices");
    need(kvc_seq_rollback(b->seq, 0), &err);
    return took;
}

static void report(bench *b, double *sliced, double *at_once, size_t rounds)
{
    static const double parts[] = {0.5, 0.9, 0.99, 0.999};
    double sum = median(sliced, rounds), call = median(at_once, rounds);
    const size_t n = b->n_slices;
    qsort(b->slices, n, sizeof *b->slices, compare);
    printf("%zu slices of %llu us, %zu prompts of %zu tokens\n", n,
        (unsigned long long)b->budget, rounds, b->n);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        printf("%5.1f %%  %8.3f ms\n", 100 * parts[i],
            1e3 * b->slices[(size_t)((double)(n - 1) * parts[i])]);
    printf("largest  %8.3f ms\n", 1e3 * b->slices[n - 1]);
    printf("in slices %.1f ms, at once %.1f ms: %+.1f %%\n", 1e3 * sum, 1e3 * call,
        100 * (sum / call - 1));
}

int main(int argc, char **argv)
{
    static bench b;
    kvc_model_desc model_desc = {0};
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc ctx_desc = {0};
    kvc_model_info info;
    kvc_model *model;
    kvc_cache *cache;
    kvc_error err;
    double sliced[1000], at_once[1000];
    size_t rounds = 8;
    uint64_t state = 1;
    b.budget = 2000;
    b.n = 512;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : "0";
        if (!strcmp(name, "--busy")) b.game = get(GAME, 1);
        else if (!strcmp(name, "--no-pause")) b.no_pause = 1;
        else if (!strcmp(name, "--threads")) ctx_desc.n_threads = (uint32_t)atoi(value), i++;
        else if (!strcmp(name, "--budget")) b.budget = (uint64_t)atol(value), i++;
        else if (!strcmp(name, "--prompt")) b.n = (size_t)atol(value), i++;
        else if (!strcmp(name, "--rounds")) rounds = (size_t)atol(value), i++;
        else model_desc.path = name;
    }
    if (!model_desc.path || b.n < 1 || rounds < 1 || rounds > 1000)
        fail("frames MODEL.gguf [--threads N] [--budget US] [--prompt N] [--rounds N] "
            "[--busy | --no-pause]", "usage");
    need(kvc_model_open(&model, &model_desc, &err), &err);
    kvc_model_query(model, &info);
    b.text = get(b.n, sizeof *b.text);
    b.n_vocab = info.n_vocab;
    b.logits = get(b.n_vocab, sizeof *b.logits);
    b.slices = get(MOST_SLICES, sizeof *b.slices);
    for (size_t i = 0; i < b.n; i++)
        b.text[i] = (kvc_token)(model_random(&state) % b.n_vocab);
    cache_desc.model = ctx_desc.model = model;
    cache_desc.n_ctx = (uint32_t)b.n;
    need(kvc_cache_new(&cache, &cache_desc, &err), &err);
    need(kvc_seq_open(&b.seq, cache, &err), &err);
    need(kvc_ctx_new(&b.ctx, &ctx_desc, &err), &err);
    for (size_t i = 0; i <= rounds; i++) {
        const double a = read_sliced(&b), c = read_at_once(&b);
        if (i > 0) sliced[i - 1] = a, at_once[i - 1] = c;
        else b.n_slices = 0;    /* the first round wakes the memory */
    }
    report(&b, sliced, at_once, rounds);
    kvc_ctx_free(b.ctx);
    kvc_cache_free(cache);
    kvc_model_close(model);
    free(b.game), free(b.slices), free(b.logits), free(b.text);
    return 0;
}
