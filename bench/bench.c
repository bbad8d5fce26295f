/* bench: how fast prefill and decode are, and what part that is of what the machine allows.

   The model is a GGUF file (-m) or one with random weights, made in memory. For each engine,
   instruction set and number of threads it measures prefills of several lengths and decodes at
   several lengths of context. All take turns with measurements of the machine itself (memory, f32
   and int8 multiply-adds, with the same threads), so that a slow moment hits all alike; medians
   count. With --growth it measures instead how the time of a token grows with the context.

   CSV goes to standard output; README.md says what its columns are, --help what the options are. */
#define _DEFAULT_SOURCE   /* clock_gettime */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KVC_IMPLEMENTATION
#include "../kvc.h"
#include "../tests/gguf_write.h"
#include "machine.h"
#include "common.h"
#include "speed.h"
#include "growth.h"

/* ---- models ---- */

/* From KVC_KV_F32 on. */
static const char *const kv_names[] = {"f32", "f16", "q8", "q4"};

/* The last part of a path without its ending. */
static void set_name_of(subject *s, const char *path)
{
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    const char *end = strrchr(name, '.') ? strrchr(name, '.') : name + strlen(name);
    snprintf(s->name, sizeof s->name, "%.*s", (int)(end - name), name);
}

/* Opens the model once for each turn and measures with the last. */
static void bench_model(const options *o, const machine *m, kvc_model_desc *desc, const char *name)
{
    subject s = {.kv = kv_names[o->kv - KVC_KV_F32],
        .weights = o->weights == KVC_WEIGHTS_IN_PLACE ? "in-place" : "packed"};
    kvc_model *model = NULL;
    kvc_error err;
    set_name_of(&s, name);
    desc->weights = o->weights;
    desc->n_threads = largest(&o->threads);
    for (int turn = 0; turn < o->turns; turn++) {
        double start;
        kvc_model_close(model);
        start = now();
        need(kvc_model_open(&model, desc, &err), &err);
        sample_add(&s.load, now() - start);
    }
    s.model = model;
    kvc_model_query(model, &s.info);
    count_work(&s);
    if (o->growth > 0) bench_growth(o, m, &s);
    else bench_speed(o, m, &s);
    kvc_model_close(model);
}

static void bench_random(const options *o, const machine *m)
{
    static const struct {
        const char *name;
        int type;
    } types[] = {{"F32", GGUF_F32}, {"F16", GGUF_F16}, {"BF16", GGUF_BF16}, {"Q8_0", GGUF_Q8_0},
        {"Q4_0", GGUF_Q4_0}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        model_shape shape = o->shape;
        kvc_model_desc desc = {0};
        void *image;
        if (!listed(o->types, types[i].name)) continue;
        shape.type = types[i].type;
        image = model_build(&shape, &desc.data_size);
        desc.data = image;
        bench_model(o, m, &desc, "random");
        free(image);
    }
}

/* ---- options ---- */

static void print_help(void)
{
    printf("usage: bench [options]\n"
        "  -m FILE            a GGUF file; default: random weights of each type\n"
        "  --types LIST       of F32,F16,BF16,Q8_0,Q4_0, without -m\n"
        "  --layers N --embd N --heads N --kv-heads N --ff N --vocab N\n"
        "                     the random model's shape\n"
        "  --isas LIST        of base,neon,avx2,avx512,avx512vnni\n"
        "  --engines LIST     of builtin,cblas\n"
        "  --threads LIST     1,2\n"
        "  --prefill LIST     tokens, 128,512,2048; none\n"
        "  --decode LIST      positions held before, 0,2048,8192; none\n"
        "  --tokens N         decodes timed in a turn, 8\n"
        "  --kv TYPE          f32, f16, q8 or q4: how K and V are stored\n"
        "  --weights HOW      packed or in-place: see kvc_weights\n"
        "  --batch N          n_batch of the contexts; default: the library's\n"
        "  --turns N          1 to %d, 5\n"
        "  --patience S       seconds, 30: a variant whose turn took longer gets no other, and\n"
        "                     prefills that would take longer get none\n"
        "  --buffer N         MiB read to measure memory, 1024\n"
        "  --growth N         instead: time of a token against context, up to N positions\n"
        "  --growth-step N    256\n"
        "  --csv FILE         appends the CSV to a file too\n"
        "  --table            prints tables in place of CSV\n",
        MAX_TURNS);
}

static long to_number(const char *name, const char *text, long min, long max)
{
    char *end;
    long value = text ? strtol(text, &end, 10) : 0;
    if (text && end != text && (*end == '\0' || *end == ',') && value >= min && value <= max) {
        return value;
    }
    fprintf(stderr, "bench: %s: not a number from %ld to %ld\n", name, min, max);
    exit(2);
}

static void to_numbers(numbers *list, const char *name, const char *text, long min, long max)
{
    list->n = 0;
    if (text && !strcmp(text, "none")) return;
    for (const char *p = text; p && list->n < MAX_LIST;) {
        list->at[list->n++] = (uint32_t)to_number(name, p, min, max);
        p = strchr(p, ',');
        if (p) p++;
    }
}

/* Which of two words it is: 0 or 1. */
static int to_choice(const char *name, const char *text, const char *zero, const char *one)
{
    if (text && !strcmp(text, zero)) return 0;
    if (text && !strcmp(text, one)) return 1;
    fprintf(stderr, "bench: %s: neither %s nor %s\n", name, zero, one);
    exit(2);
}

static kvc_kv_type to_kv(const char *name, const char *text)
{
    for (int i = 0; text && i < 4; i++)
        if (!strcmp(text, kv_names[i])) return (kvc_kv_type)(KVC_KV_F32 + i);
    fprintf(stderr, "bench: %s: none of f32, f16, q8, q4\n", name);
    exit(2);
}

static FILE *to_file(const char *name, const char *path)
{
    FILE *f = path ? fopen(path, "a") : NULL;
    if (f) return f;
    fprintf(stderr, "bench: %s: the file cannot be opened\n", name);
    exit(2);
}

static int set_shape(model_shape *s, const char *name, const char *text)
{
    uint32_t *field = !strcmp(name, "--layers") ? &s->n_layers
        : !strcmp(name, "--embd") ? &s->n_embd
        : !strcmp(name, "--heads") ? &s->n_heads
        : !strcmp(name, "--kv-heads") ? &s->n_kv_heads
        : !strcmp(name, "--ff") ? &s->n_ff
        : !strcmp(name, "--vocab") ? &s->n_vocab : NULL;
    if (field) *field = (uint32_t)to_number(name, text, 1, 1 << 20);
    return field != NULL;
}

static int set_count(options *o, const char *name, const char *text)
{
    uint32_t *field = !strcmp(name, "--tokens") ? &o->tokens
        : !strcmp(name, "--batch") ? &o->n_batch
        : !strcmp(name, "--growth") ? &o->growth
        : !strcmp(name, "--growth-step") ? &o->growth_step : NULL;
    if (field) *field = (uint32_t)to_number(name, text, 1, 1 << 20);
    return field != NULL;
}

static int set_option(options *o, const char *name, const char *text)
{
    if (!strcmp(name, "-m")) o->model = text;
    else if (!strcmp(name, "--types")) o->types = text;
    else if (!strcmp(name, "--isas")) o->isas = text;
    else if (!strcmp(name, "--engines")) o->engines = text;
    else if (!strcmp(name, "--threads")) to_numbers(&o->threads, name, text, 1, MACHINE_THREADS);
    else if (!strcmp(name, "--prefill")) to_numbers(&o->prefill, name, text, 1, 1 << 20);
    else if (!strcmp(name, "--decode")) to_numbers(&o->decode, name, text, 0, 1 << 20);
    else if (!strcmp(name, "--kv")) o->kv = to_kv(name, text);
    else if (!strcmp(name, "--weights"))
        o->weights = to_choice(name, text, "packed", "in-place") ? KVC_WEIGHTS_IN_PLACE
            : KVC_WEIGHTS_PACKED;
    else if (!strcmp(name, "--turns")) o->turns = (int)to_number(name, text, 1, MAX_TURNS);
    else if (!strcmp(name, "--patience"))
        o->patience = (double)to_number(name, text, 1, 1000000);
    else if (!strcmp(name, "--buffer"))
        o->buffer = (size_t)to_number(name, text, 1, 1 << 16) << 20;
    else if (!strcmp(name, "--csv")) o->csv = to_file(name, text);
    else return set_count(o, name, text) || set_shape(&o->shape, name, text);
    return text != NULL;
}

static void set_options(options *o, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help")) {
            print_help();
            exit(0);
        }
        if (!strcmp(argv[i], "--table")) o->table = 1;
        else if (set_option(o, argv[i], argv[i + 1])) i++;
        else {
            fprintf(stderr, "bench: %s: no such option, or no value; see --help\n", argv[i]);
            exit(2);
        }
    }
    if (o->threads.n == 0 || o->growth / o->growth_step >= MAX_POINTS) {
        fprintf(stderr, "bench: no threads, or more than %d points of growth\n", MAX_POINTS);
        exit(2);
    }
}

int main(int argc, char **argv)
{
    options o = {.threads = {2, {1, 2}}, .prefill = {3, {128, 512, 2048}},
        .decode = {3, {0, 2048, 8192}}, .tokens = 8, .turns = 5, .patience = 30.0,
        .buffer = (size_t)1 << 30, .growth_step = 256, .kv = KVC_KV_F32,
        .shape = {.n_layers = 4, .n_embd = 512, .n_heads = 8, .n_kv_heads = 4, .n_ff = 1536,
            .n_vocab = 4096, .seed = 1}};
    machine m;
    set_options(&o, argc, argv);
    csv_header(&o, o.growth > 0 ? growth_header : speed_header);
    machine_open(&m, o.buffer);
    if (o.model) {
        kvc_model_desc desc = {.path = o.model};
        bench_model(&o, &m, &desc, o.model);
    } else {
        bench_random(&o, &m);
    }
    machine_close(&m);
    if (o.csv) fclose(o.csv);
    return 0;
}
