/* bench: how fast prefill and decode are, for each storage type, engine, instruction set and number
   of threads, as CSV on standard output.

   The model is a GGUF file (-m) or one with random weights, made in memory. All variants of a type
   take turns, five times, so that a slow moment of the machine hits all alike; the median counts.
   A variant whose turn takes longer than --patience seconds gets no further turns; the column
   `turns` tells. Columns:

       type,engine,isa,threads,phase,tokens,turns,median_ms,tokens_per_s,vs_builtin,vs_base

   vs_builtin: speed relative to the built-in engine with the same instruction set and threads;
   vs_base: relative to plain C with one thread. `bench --help` lists the options. */
#define _DEFAULT_SOURCE   /* clock_gettime */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KVC_IMPLEMENTATION
#include "../kvc.h"
#include "../tests/gguf_write.h"

enum { MAX_TURNS = 15, MAX_VARIANTS = 128, MAX_THREADS = 4, DECODE_PAST = 128, DECODE_TOKENS = 32 };

typedef struct options {
    const char *model, *types, *isas, *engines;
    uint32_t threads[MAX_THREADS], n_threads;
    int turns;
    double patience;            /* seconds */
    model_shape shape;          /* of the random model */
} options;

typedef enum phase { PREFILL_128, PREFILL_512, DECODE, N_PHASES } phase;

static const struct {
    const char *name;
    size_t n_tokens;            /* computed in one turn */
} phases[N_PHASES] = {{"prefill", 128}, {"prefill", 512}, {"decode", DECODE_TOKENS}};

typedef struct variant {
    kvc_ctx *ctx;
    kvc_ctx_info info;
    phase phase;
    int n_turns;
    double times[MAX_TURNS];    /* seconds; sorted at the end */
} variant;

static void need(kvc_result result, const kvc_error *err)
{
    if (result == KVC_OK) return;
    fprintf(stderr, "bench: %s: %s\n", err->where, err->message);
    exit(2);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
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

/* ---- one turn ---- */

static double run_turn(const variant *v, kvc_seq *seq, const kvc_token *tokens)
{
    const float *logits;
    double start;
    kvc_error err;
    need(kvc_seq_rollback(seq, 0), &err);
    if (v->phase != DECODE) {
        start = now();
        need(kvc_prefill(v->ctx, seq, tokens, phases[v->phase].n_tokens, &logits, &err), &err);
        return now() - start;
    }
    need(kvc_prefill(v->ctx, seq, tokens, DECODE_PAST, NULL, &err), &err);
    start = now();
    for (size_t i = 0; i < DECODE_TOKENS; i++) {
        need(kvc_decode(v->ctx, seq, tokens[DECODE_PAST + i], &logits, &err), &err);
    }
    return now() - start;
}

static int by_time(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double speed(const variant *v)   /* tokens per second, of the median turn */
{
    return (double)phases[v->phase].n_tokens / v->times[v->n_turns / 2];
}

/* ---- one model ---- */

static int is_float(const char *type)
{
    return type[0] != 'Q';
}

/* Adds what can be measured with one context: the phases it makes a difference to, which for cblas
   is the prefill. Returns how many variants there are then; a set this machine lacks adds none. */
static int add_variants(const options *o, const kvc_ctx_desc *desc, variant *v, int n)
{
    int last = desc->gemm == KVC_GEMM_CBLAS ? PREFILL_512 : DECODE;
    kvc_ctx_info info;
    kvc_ctx *ctx;
    kvc_error err;
    need(kvc_ctx_new(&ctx, desc, &err), &err);
    kvc_ctx_query(ctx, &info);
    if (info.desc.isa != desc->isa || !listed(o->isas, info.isa_name)
        || n + N_PHASES > MAX_VARIANTS) {
        kvc_ctx_free(ctx);
        return n;
    }
    for (int p = PREFILL_128; p <= last; p++, n++) {
        memset(&v[n], 0, sizeof v[n]);
        v[n].ctx = ctx;
        v[n].info = info;
        v[n].phase = (phase)p;
    }
    return n;
}

static int make_variants(const options *o, const kvc_model *model, const char *type, variant *v)
{
    kvc_ctx_desc desc = {.model = model};
    int n = 0;
    for (int isa = KVC_ISA_BASE; isa <= KVC_ISA_AVX512_VNNI; isa++) {
        for (uint32_t t = 0; t < o->n_threads; t++) {
            desc.isa = (kvc_isa)isa;
            desc.n_threads = o->threads[t];
            desc.gemm = KVC_GEMM_BUILTIN;
            if (listed(o->engines, "builtin")) n = add_variants(o, &desc, v, n);
            desc.gemm = KVC_GEMM_CBLAS;
            if (KVC_USE_CBLAS && is_float(type) && listed(o->engines, "cblas")) {
                n = add_variants(o, &desc, v, n);
            }
        }
    }
    return n;
}

/* The speed of the variant that differs from `like` in what is given; 0 if there is none. */
static double speed_of(const variant *v, int n, const variant *like, kvc_isa isa, uint32_t threads)
{
    for (int i = 0; i < n; i++) {
        const kvc_ctx_desc *d = &v[i].info.desc;
        if (v[i].phase == like->phase && d->isa == isa && d->gemm == KVC_GEMM_BUILTIN
            && d->n_threads == threads) {
            return speed(&v[i]);
        }
    }
    return 0.0;
}

static void print_ratio(double mine, double other)
{
    if (other > 0.0) printf(",%.3f", mine / other);
    else printf(",");
}

static void print_row(const variant *v, int n, const variant *row, const char *type)
{
    const kvc_ctx_desc *d = &row->info.desc;
    printf("%s,%s,%s,%u,", type, d->gemm == KVC_GEMM_CBLAS ? "cblas" : "builtin",
        row->info.isa_name, (unsigned)d->n_threads);
    printf("%s,%zu,%d,%.3f,%.2f", phases[row->phase].name, phases[row->phase].n_tokens,
        row->n_turns, row->times[row->n_turns / 2] * 1e3, speed(row));
    print_ratio(speed(row), speed_of(v, n, row, d->isa, d->n_threads));
    print_ratio(speed(row), speed_of(v, n, row, KVC_ISA_BASE, 1));
    printf("\n");
    fflush(stdout);
}

static void bench_model(const options *o, const kvc_model *model, const char *type)
{
    static variant v[MAX_VARIANTS];
    kvc_cache_desc desc = {.model = model, .n_ctx = 512};
    kvc_token tokens[512];
    kvc_model_info info;
    kvc_cache *cache;
    kvc_seq *seq;
    kvc_error err;
    int n = make_variants(o, model, type, v);
    uint64_t state = 1;
    kvc_model_query(model, &info);
    for (int i = 0; i < 512; i++) tokens[i] = (kvc_token)(model_random(&state) % info.n_vocab);
    need(kvc_cache_new(&cache, &desc, &err), &err);
    need(kvc_seq_open(&seq, cache, &err), &err);
    for (int turn = 0; turn < o->turns; turn++) {
        for (int i = 0; i < n; i++) {
            if (turn > 0 && v[i].times[0] > o->patience) continue;
            v[i].times[v[i].n_turns++] = run_turn(&v[i], seq, tokens);
        }
    }
    for (int i = 0; i < n; i++) qsort(v[i].times, (size_t)v[i].n_turns, sizeof(double), by_time);
    for (int i = 0; i < n; i++) print_row(v, n, &v[i], type);
    for (int i = n - 1; i >= 0; i--) {
        if (i == 0 || v[i - 1].ctx != v[i].ctx) kvc_ctx_free(v[i].ctx);
    }
    kvc_seq_close(seq);
    kvc_cache_free(cache);
}

static void bench_file(const options *o)
{
    kvc_model_desc desc = {.path = o->model};
    kvc_model *model;
    kvc_error err;
    need(kvc_model_open(&model, &desc, &err), &err);
    bench_model(o, model, "file");
    kvc_model_close(model);
}

static void bench_random(const options *o)
{
    static const struct {
        const char *name;
        int type;
    } types[] = {{"F32", GGUF_F32}, {"F16", GGUF_F16}, {"Q8_0", GGUF_Q8_0}, {"Q4_0", GGUF_Q4_0}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        model_shape shape = o->shape;
        kvc_model_desc desc = {0};
        kvc_model *model;
        kvc_error err;
        void *image;
        if (!listed(o->types, types[i].name)) continue;
        shape.type = types[i].type;
        image = model_build(&shape, &desc.data_size);
        desc.data = image;
        need(kvc_model_open(&model, &desc, &err), &err);
        bench_model(o, model, types[i].name);
        kvc_model_close(model);
        free(image);
    }
}

/* ---- options ---- */

static void print_help(void)
{
    printf("usage: bench [options]\n"
        "  -m FILE          a GGUF file; default: random weights of each type\n"
        "  --types LIST     of F32,F16,Q8_0,Q4_0\n"
        "  --isas LIST      of base,neon,avx2,avx512,avx512vnni\n"
        "  --engines LIST   of builtin,cblas\n"
        "  --threads LIST   up to four counts (1,2)\n"
        "  --turns N        1 to %d (5)\n"
        "  --patience S     seconds after which a variant gets no further turn (4)\n"
        "  --layers N --embd N --heads N --kv-heads N --ff N --vocab N\n"
        "                   the random model's shape\n",
        MAX_TURNS);
}

static long to_number(const char *name, const char *text, long max)
{
    char *end;
    long value = text ? strtol(text, &end, 10) : 0;
    if (text && (*end == '\0' || *end == ',') && value >= 1 && value <= max) return value;
    fprintf(stderr, "bench: %s: not a number from 1 to %ld\n", name, max);
    exit(2);
}

static void set_threads(options *o, const char *list)
{
    o->n_threads = 0;
    for (const char *p = list; p && o->n_threads < MAX_THREADS;) {
        o->threads[o->n_threads++] = (uint32_t)to_number("--threads", p, 256);
        p = strchr(p, ',');
        if (p) p++;
    }
}

static int set_shape(model_shape *s, const char *name, const char *text)
{
    uint32_t *field = !strcmp(name, "--layers") ? &s->n_layers
        : !strcmp(name, "--embd") ? &s->n_embd
        : !strcmp(name, "--heads") ? &s->n_heads
        : !strcmp(name, "--kv-heads") ? &s->n_kv_heads
        : !strcmp(name, "--ff") ? &s->n_ff
        : !strcmp(name, "--vocab") ? &s->n_vocab : NULL;
    if (field) *field = (uint32_t)to_number(name, text, 1 << 20);
    return field != NULL;
}

static int set_option(options *o, const char *name, const char *text)
{
    if (!strcmp(name, "-m")) o->model = text;
    else if (!strcmp(name, "--types")) o->types = text;
    else if (!strcmp(name, "--isas")) o->isas = text;
    else if (!strcmp(name, "--engines")) o->engines = text;
    else if (!strcmp(name, "--threads")) set_threads(o, text);
    else if (!strcmp(name, "--turns")) o->turns = (int)to_number(name, text, MAX_TURNS);
    else if (!strcmp(name, "--patience")) o->patience = (double)to_number(name, text, 100000);
    else return set_shape(&o->shape, name, text);
    return text != NULL;
}

int main(int argc, char **argv)
{
    options o = {.threads = {1, 2}, .n_threads = 2, .turns = 5, .patience = 4.0,
        .shape = {.n_layers = 4, .n_embd = 512, .n_heads = 8, .n_kv_heads = 4, .n_ff = 1536,
            .n_vocab = 4096, .seed = 1}};
    for (int i = 1; i < argc; i += 2) {
        if (!strcmp(argv[i], "--help")) return print_help(), 0;
        if (!set_option(&o, argv[i], argv[i + 1])) {
            fprintf(stderr, "bench: %s: no such option, or no value; see --help\n", argv[i]);
            return 2;
        }
    }
    printf("type,engine,isa,threads,phase,tokens,turns,median_ms,tokens_per_s,vs_builtin,"
        "vs_base\n");
    if (o.model) bench_file(&o);
    else bench_random(&o);
    return 0;
}
