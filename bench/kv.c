/* kv: what the types of K and V cost in accuracy, or the policies that let positions go. Every
   position of a text is predicted with K and V in floats and all of the past, and again with each
   pair of types, or each policy: the table tells how far apart the two are.

       kv [-m FILE] [-t TEXT] [--policies 1] [--every N] [--length N] [--threads N] [--csv FILE]

   Without options the model is examples/models/tavern-f16.gguf, the text examples/models/eval.txt.
   A text of questions, as examples/models/eval.txt, is read dialogue by dialogue, and a reply is
   right if each of its tokens is the likeliest one after those before. Any other text is cut into
   pieces of --length tokens (512). --every N takes each N-th dialogue or piece only. */
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kvc.h"

#define TOOL "kv"
#include "tool.h"

#define F32 KVC_KV_F32
#define F16 KVC_KV_F16
#define Q8 KVC_KV_Q8
#define Q4 KVC_KV_Q4

/* A row of the table; the first one is what the others are held against. */
typedef struct row {
    const char *name;
    kvc_kv_type k, v;
    uint32_t n_edge;
    kvc_kv_type edge;
    uint32_t n_ctx;             /* 0: the whole piece */
    uint32_t n_keep, n_heavy;   /* n_heavy 0: KVC_POLICY_WINDOW */
} row;

static const row types[] = {
    {"f32/f32", F32, F32, 0, F32, 0, 0, 0}, {"f16/f16", F16, F16, 0, F32, 0, 0, 0},
    {"f16/q8", F16, Q8, 0, F32, 0, 0, 0}, {"q8/q8", Q8, Q8, 0, F32, 0, 0, 0},
    {"q8/q8, edges f16", Q8, Q8, 1, F16, 0, 0, 0}, {"q8/q4", Q8, Q4, 0, F32, 0, 0, 0},
    {"q4/q8", Q4, Q8, 0, F32, 0, 0, 0}, {"q4/q4", Q4, Q4, 0, F32, 0, 0, 0},
    {"q4/q4, edges q8", Q4, Q4, 1, Q8, 0, 0, 0}
};

#define AT(n, half, most) \
    {#n ", window", F32, F32, 0, F32, n, 0, 0}, {#n ", keep 4", F32, F32, 0, F32, n, 4, 0}, \
    {#n ", keep 4+" #half, F32, F32, 0, F32, n, 4, half}, \
    {#n ", keep 4+" #most, F32, F32, 0, F32, n, 4, most}

static const row policies[] = {
    {"everything", F32, F32, 0, F32, 0, 0, 0}, AT(64, 12, 28), AT(96, 44, 60), AT(128, 60, 92),
    AT(192, 92, 156), AT(256, 124, 220)
};

#undef F32
#undef F16
#undef Q8
#undef Q4
#undef AT

enum {
    N_TYPES = sizeof types / sizeof types[0],
    N_POLICIES = sizeof policies / sizeof policies[0],
    MAX_ROWS = N_TYPES > N_POLICIES ? N_TYPES : N_POLICIES,
    MAX_LINE = 16384
};

typedef struct tally {
    size_t bytes;               /* of a position */
    double kl, loss;            /* sums over positions */
    size_t n, n_next, n_same, n_items, n_right;
} tally;

typedef struct bench {
    kvc_model *model;
    kvc_model_info info;
    kvc_ctx *ctx;
    const row *rows;            /* [n_rows] */
    int n_rows;
    kvc_cache *cache[MAX_ROWS];
    tally tallies[MAX_ROWS];
    const char *path, *text_path, *csv_path;
    uint32_t every, length, threads;
    kvc_token *tokens;          /* [length] of a piece */
    size_t n, reply;            /* tokens; where the reply begins, n if there is none */
    size_t n_pieces;
    size_t *wanted;             /* [length] */
    float *exact, *logits;      /* [length, n_vocab] */
} bench;

static kvc_error err;

/* ---- one piece with one pair of types ---- */

static size_t likeliest(const float *x, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++) if (x[i] > x[best]) best = i;
    return best;
}

/* The logarithm of the sum of e^x. */
static double log_sum(const float *x, size_t n)
{
    double top = (double)x[likeliest(x, n)], sum = 0;
    for (size_t i = 0; i < n; i++) sum += exp((double)x[i] - top);
    return top + log(sum);
}

/* Kullback and Leibler's divergence of y from x. */
static double divergence(const float *x, const float *y, size_t n)
{
    double x_sum = log_sum(x, n), y_sum = log_sum(y, n), sum = 0;
    for (size_t i = 0; i < n; i++) {
        double log_p = (double)x[i] - x_sum, log_q = (double)y[i] - y_sum;
        sum += exp(log_p) * (log_p - log_q);
    }
    return sum;
}

static void run(const bench *b, int i, float *logits)
{
    const row *r = &b->rows[i];
    kvc_policy policy = r->n_ctx == 0 ? KVC_POLICY_ERROR
        : r->n_heavy == 0 ? KVC_POLICY_WINDOW : KVC_POLICY_HEAVY;
    kvc_seq *seq;
    need(kvc_seq_open(&seq, b->cache[i], &err), &err);
    need(kvc_seq_set_policy(seq, policy, r->n_keep, r->n_heavy, &err), &err);
    need(kvc_prefill_rows(b->ctx, seq, b->tokens, b->n, b->wanted, b->n, logits, &err), &err);
    kvc_seq_close(seq);
}

static void count(bench *b, int i_row, const float *logits)
{
    tally *t = &b->tallies[i_row];
    size_t n_vocab = b->info.n_vocab;
    int right = 1;
    for (size_t i = 0; i < b->n; i++, logits += n_vocab) {
        const float *exact = b->exact + i * n_vocab;
        size_t top = likeliest(logits, n_vocab);
        t->kl += divergence(exact, logits, n_vocab);
        t->n_same += top == likeliest(exact, n_vocab);
        if (i + 1 == b->n) continue;
        t->loss += log_sum(logits, n_vocab) - (double)logits[b->tokens[i + 1]];
        if (i + 1 >= b->reply && top != (size_t)b->tokens[i + 1]) right = 0;
    }
    t->n += b->n;
    t->n_next += b->n - 1;
    if (b->reply == b->n) return;
    t->n_items++;
    t->n_right += (size_t)right;
}

/* The piece in b->tokens, if it is its turn. */
static void piece(bench *b)
{
    if (b->n < 2 || b->n_pieces++ % b->every != 0) return;
    run(b, 0, b->exact);
    count(b, 0, b->exact);
    for (int i = 1; i < b->n_rows; i++) {
        run(b, i, b->logits);
        count(b, i, b->logits);
    }
}

/* ---- texts ---- */

/* Appends the tokens of a text to the piece; returns their number. */
static size_t add_text(bench *b, const char *text, size_t size)
{
    size_t n;
    need(kvc_tokenize(b->model, text, size, KVC_TEXT_SPECIAL_PARSE, b->tokens + b->n,
        b->length - b->n, &n, NULL, &err), &err);
    b->n += n;
    return n;
}

/* A line of a dialogue: its first word is who speaks, or "want" where the reply begins. */
static void add_line(bench *b, const char *line, size_t size)
{
    static char text[MAX_LINE];
    int word = (int)strcspn(line, " "), want = !strncmp(line, "want ", 5);
    if (size + 32 > sizeof text || (size_t)word >= size) fail("no dialogue", b->text_path);
    if (want) b->reply = b->n + 1;      /* past the marker */
    sprintf(text, "<|%.*s|>%.*s<|end|>", want ? 4 : word, want ? "char" : line,
        (int)size - word - 1, line + word + 1);
    add_text(b, text, strlen(text));
    if (!want) b->reply = b->n;
}

static void clear(bench *b)
{
    b->n = b->reply = 0;
}

static void dialogues(bench *b, const char *text)
{
    for (const char *line = text, *end; *line; line = *end ? end + 1 : end) {
        end = line + strcspn(line, "\n");
        if (end == line || *line == '#') continue;
        if (strncmp(line, "item ", 5)) {
            add_line(b, line, (size_t)(end - line));
            continue;
        }
        piece(b);
        clear(b);
    }
    piece(b);
}

static void pieces(bench *b, const char *text, size_t size)
{
    kvc_token *all;
    size_t n;
    kvc_tokenize(b->model, text, size, 0, NULL, 0, &n, NULL, &err);
    all = (kvc_token *)get(n, sizeof *all);
    need(kvc_tokenize(b->model, text, size, 0, all, n, &n, NULL, &err), &err);
    for (size_t i = 0; i + b->length <= n; i += b->length) {
        memcpy(b->tokens, all + i, b->length * sizeof *all);
        b->n = b->reply = b->length;
        piece(b);
    }
    free(all);
}

/* ---- output ---- */

static void print(const bench *b)
{
    FILE *csv = b->csv_path ? fopen(b->csv_path, "w") : NULL;
    if (b->csv_path && !csv) fail("the file cannot be written", b->csv_path);
    printf("%-16s %11s %10s %8s %11s", b->rows == types ? "K/V" : "positions", "bytes/token", "KL",
        "top-1", "perplexity");
    printf(" %9s\n", b->tallies[0].n_items ? "right" : "");
    if (csv) fprintf(csv, "kv,bytes_per_token,kl,top1,perplexity,positions,right,items\n");
    for (int i = 0; i < b->n_rows; i++) {
        const tally *t = &b->tallies[i];
        double kl = t->kl / (double)t->n, same = (double)t->n_same / (double)t->n;
        double perplexity = exp(t->loss / (double)t->n_next);
        printf("%-16s %11u %10.2e %7.2f%% %11.4f", b->rows[i].name, (unsigned)t->bytes, kl,
            100 * same, perplexity);
        if (t->n_items) printf(" %4u/%u", (unsigned)t->n_right, (unsigned)t->n_items);
        printf("\n");
        if (csv)
            fprintf(csv, "\"%s\",%u,%.4e,%.6f,%.6f,%u,%u,%u\n", b->rows[i].name,
                (unsigned)t->bytes, kl, same, perplexity, (unsigned)t->n, (unsigned)t->n_right,
                (unsigned)t->n_items);
    }
    if (csv) fclose(csv);
}

/* ---- the objects ---- */

static void open_model(bench *b)
{
    kvc_model_desc model = {.path = b->path, .n_threads = b->threads};
    kvc_ctx_desc ctx = {.n_threads = b->threads};
    need(kvc_model_open(&b->model, &model, &err), &err);
    kvc_model_query(b->model, &b->info);
    ctx.model = b->model;
    need(kvc_ctx_new(&b->ctx, &ctx, &err), &err);
    for (int i = 0; i < b->n_rows; i++) {
        const row *r = &b->rows[i];
        kvc_cache_desc cache = {.model = b->model, .n_ctx = r->n_ctx ? r->n_ctx : b->length,
            .page_size = 16, .n_heavy = r->n_heavy ? r->n_keep + r->n_heavy : 0, .type_k = r->k,
            .type_v = r->v, .n_edge = r->n_edge, .edge_k = r->edge, .edge_v = r->edge};
        kvc_cache_info info;
        need(kvc_cache_new(&b->cache[i], &cache, &err), &err);
        kvc_cache_query(b->cache[i], &info);
        b->tallies[i].bytes = info.bytes_per_token;
    }
    b->tokens = (kvc_token *)get(b->length, sizeof *b->tokens);
    b->wanted = (size_t *)get(b->length, sizeof *b->wanted);
    b->exact = (float *)get((size_t)b->length * b->info.n_vocab, sizeof *b->exact);
    b->logits = (float *)get((size_t)b->length * b->info.n_vocab, sizeof *b->logits);
    for (uint32_t i = 0; i < b->length; i++) b->wanted[i] = i;
}

static void close_model(bench *b)
{
    for (int i = 0; i < b->n_rows; i++) kvc_cache_free(b->cache[i]);
    kvc_ctx_free(b->ctx);
    kvc_model_close(b->model);
    free(b->tokens);
    free(b->wanted);
    free(b->exact);
    free(b->logits);
}

static uint32_t number(const char *text)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);
    if (*end || n < 1 || n > 65536) fail("not a number from 1 to 65536", text);
    return (uint32_t)n;
}

static void options(bench *b, int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (!value) fail("no value", name);
        if (!strcmp(name, "-m")) b->path = value;
        else if (!strcmp(name, "-t")) b->text_path = value;
        else if (!strcmp(name, "--every")) b->every = number(value);
        else if (!strcmp(name, "--length")) b->length = number(value);
        else if (!strcmp(name, "--threads")) b->threads = number(value);
        else if (!strcmp(name, "--csv")) b->csv_path = value;
        else if (!strcmp(name, "--policies")) {
            b->rows = policies;
            b->n_rows = N_POLICIES;
        }
        else fail("no such option", name);
    }
}

int main(int argc, char **argv)
{
    static bench b = {.path = "examples/models/tavern-f16.gguf",
        .text_path = "examples/models/eval.txt", .every = 1, .threads = 2,
        .rows = types, .n_rows = N_TYPES};
    char *text;
    size_t size;
    int talk;
    options(&b, argc, argv);
    text = read_file(b.text_path, &size);
    talk = !strncmp(text, "item ", 5) || strstr(text, "\nitem ");
    if (!b.length) b.length = talk ? 1024 : 512;
    open_model(&b);
    if (talk) dialogues(&b, text);
    else pieces(&b, text, size);
    if (!b.tallies[0].n) fail("the text is too short", b.text_path);
    print(&b);
    close_model(&b);
    free(text);
    return 0;
}
