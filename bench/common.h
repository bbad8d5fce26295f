/* common.h: what the benchmark's parts share: options, output, medians, and the work that a model
   causes. */
#ifndef COMMON_H
#define COMMON_H

#include <stdarg.h>

enum { MAX_LIST = 8, MAX_TURNS = 31, PAGE = 32 };

typedef struct numbers {
    uint32_t n, at[MAX_LIST];
} numbers;

typedef struct options {
    const char *model, *types, *isas, *engines;
    numbers threads, prefill, decode;   /* counts; tokens; positions that are already held */
    kvc_kv_type kv;
    kvc_weights weights;
    uint32_t n_batch;                   /* 0: the library's */
    uint32_t tokens;                    /* timed decodes in a turn */
    int turns, table;
    double patience;                    /* seconds */
    size_t buffer;                      /* bytes that machine_measure reads */
    uint32_t growth, growth_step;       /* positions; 0: no growth */
    model_shape shape;                  /* of the random model */
    FILE *csv;                          /* a second place for the CSV, or NULL */
} options;

static void need(kvc_result result, const kvc_error *err)
{
    if (result == KVC_OK) return;
    fprintf(stderr, "bench: %s: %s\n", err->where, err->message);
    exit(2);
}

/* A piece of the CSV. */
static void csv(const options *o, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (!o->table) vprintf(format, args);
    va_end(args);
    if (!o->csv) return;
    va_start(args, format);
    vfprintf(o->csv, format, args);
    va_end(args);
}

/* The first line of the CSV, in the file only where it is empty. */
static void csv_header(options *o, const char *text)
{
    if (!o->table) printf("%s\n", text);
    if (!o->csv) return;
    fseek(o->csv, 0, SEEK_END);
    if (ftell(o->csv) == 0) fprintf(o->csv, "%s\n", text);
}

/* 1 if the list "a,b,c" has the name, or is NULL. */
static int listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *p = list; p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL) {
        if (strncmp(p, name, n) == 0 && (p[n] == ',' || p[n] == '\0')) return 1;
    }
    return !list;
}

static uint32_t largest(const numbers *l)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < l->n; i++) if (l->at[i] > most) most = l->at[i];
    return most;
}

/* ---- samples of one quantity ---- */

typedef struct samples {
    int n;
    double at[MAX_TURNS];
} samples;

static void sample_add(samples *s, double value)
{
    if (s->n < MAX_TURNS) s->at[s->n++] = value;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Sorts; 0 if there is none. */
static double median(samples *s)
{
    if (s->n == 0) return 0.0;
    qsort(s->at, (size_t)s->n, sizeof s->at[0], by_size);
    return (s->at[(s->n - 1) / 2] + s->at[s->n / 2]) / 2;
}

/* ---- the work of a model ---- */

typedef struct work {
    double bytes;               /* read from memory: weights, K and V */
    double f32, int8;           /* additions and multiplications */
} work;

/* A model and what a token of it costs. */
typedef struct subject {
    const kvc_model *model;
    kvc_model_info info;
    char name[64];              /* of the file, without its folder and ending */
    const char *type, *kv, *weights;
    samples load;               /* seconds */
    double weight_bytes;        /* of all that a decode reads */
    work layers, head;          /* of one row; without bytes */
    double pair_ops;            /* of a query and one position it sees, over all layers and heads */
    double kv_bytes;            /* of a position */
} subject;

static int is_tensor(const kvc__tensor *t, const char *name)
{
    return t->name_size == strlen(name) && memcmp(t->name, name, t->name_size) == 0;
}

/* Parts of a stack of matrices that a token meets: of experts those that it is sent to. */
static double parts_met(const subject *s, const kvc__tensor *t)
{
    const char *end = "_exps.weight";
    size_t n = strlen(end);
    int experts = t->name_size > n && memcmp(t->name + t->name_size - n, end, n) == 0;
    return experts ? (double)s->info.n_experts_used : (double)t->dims[2];
}

/* Two operations for each element of a matrix. An embedding that is not the LM head too is looked
   up, not multiplied. */
static void count_work(subject *s)
{
    const kvc__gguf *g = &s->model->gguf;
    int tied = 1;
    for (size_t i = 0; i < g->n_tensors; i++) {
        if (is_tensor(&g->tensors[i], "output.weight")) tied = 0;
    }
    for (size_t i = 0; i < g->n_tensors; i++) {
        const kvc__tensor *t = &g->tensors[i];
        int embedding = is_tensor(t, "token_embd.weight"), output = is_tensor(t, "output.weight");
        work *w = embedding || output ? &s->head : &s->layers;
        double parts = parts_met(s, t), ops = 2.0 * (double)t->dims[0] * (double)t->dims[1] * parts;
        if (embedding && !tied) continue;
        s->weight_bytes += (double)t->size / (double)t->dims[2] * parts;
        if (is_tensor(t, "blk.0.ffn_up.weight") || is_tensor(t, "blk.0.ffn_up_exps.weight"))
            s->type = kvc__type(t->type)->name;
        if (t->n_dims < 2) continue;
        if (kvc__type(t->type)->quantized) w->int8 += ops;
        else w->f32 += ops;
    }
    s->pair_ops = 2.0 * s->info.n_layers * s->info.n_heads
        * (double)(s->info.head_dim + s->info.head_dim_v);
}

/* A step over n tokens after `past` others, with logits for the last one. Attention is computed in
   floats; a token sees itself and all before it. */
static work work_of(const subject *s, double n, double past)
{
    double pairs = n * past + n * (n + 1) / 2;
    work w;
    w.bytes = s->weight_bytes + s->kv_bytes * (past + n);
    w.f32 = n * s->layers.f32 + s->head.f32 + s->pair_ops * pairs;
    w.int8 = n * s->layers.int8 + s->head.int8;
    return w;
}
#endif
