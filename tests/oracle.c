/* oracle - checks kvc.h against golden models

   usage: oracle DIR [--only GLOB] [--isa base|neon|avx2|avx512|avx512vnni]
                     [--gemm builtin|cblas] [--threads N]

   For each DIR/NAME.gguf with its NAME.json: the prompt is prefilled in a context of exactly 64
   positions with an F32 cache, the logits at the given positions are compared with the exact ones,
   and kvc_decode must continue with the given tokens. Then all of that must come again with the
   same bits: on every instruction set of this machine (or the given one), with 1 and with 2 (or N)
   threads, each with the prompt in one chunk and token by token, half of these with weights in
   place; and with a prefix table that has the text. One line per model:

       NAME  largest difference (tolerance)  greedy equal|first difference  runs  PASS|FAIL|SKIP why

   and a last line `N passed, N failed, N skipped`. Exit status: 0 if none failed, 1 if one did, 2
   for bad arguments. An absent DIR is said and is no failure.

   SKIP is for what kvc_model_open refuses as unsupported. For quantized matrices kvc.h rounds
   activations to 8 bits, so there the goldens' README is followed: a difference up to 0.6 and a
   cosine of at least 0.998 at every position, greedy tokens not compared. */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include <dirent.h>
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>

#include "golden.h"

#define N_CTX 64

typedef struct options {
    const char *dir, *only;
    kvc_isa isa;
    kvc_gemm gemm;
    uint32_t n_threads;
} options;

typedef struct tally {
    unsigned passed, failed, skipped;
} tally;

/* What the run of one model showed. */
typedef struct outcome {
    double difference;          /* largest over positions and vocabulary */
    double cosine;              /* lowest over positions */
    size_t n_equal;             /* greedy tokens before the first that differs */
    kvc_token other;            /* the token found there */
    unsigned n_runs;            /* that gave the same bits */
} outcome;

static int is_rounded(const golden *g) {
    const char *t = g->type;
    return *t && strcmp(t, "F32") && strcmp(t, "F16") && strcmp(t, "BF16");
}

/* ---- one model ---- */

static void compare_row(outcome *o, const float *got, const double *want, size_t n) {
    double dot = 0, a = 0, b = 0, cosine;
    size_t i;
    for (i = 0; i < n; i++) {
        double d = fabs((double)got[i] - want[i]);
        if (!(d <= o->difference)) o->difference = d;   /* keeps a NaN */
        dot += (double)got[i] * want[i];
        a += (double)got[i] * (double)got[i];
        b += want[i] * want[i];
    }
    cosine = dot / sqrt(a * b);
    if (!(cosine >= o->cosine)) o->cosine = cosine;
}

static kvc_token argmax(const float *x, size_t n) {
    size_t i, best = 0;
    for (i = 1; i < n; i++) if (x[i] > x[best]) best = i;
    return (kvc_token)best;
}

/* Decodes the greedy tokens, beginning with the logits after the prompt. A wrong token ends it. */
static kvc_result run_greedy(outcome *o, kvc_ctx *ctx, kvc_seq *seq, const golden *g,
    const float *logits, kvc_error *err) {
    kvc_result r = KVC_OK;
    size_t i;
    for (i = 0; i < g->n_greedy; i++) {
        o->other = argmax(logits, g->n_vocab);
        if (o->other != g->greedy[i]) break;
        o->n_equal++;
        if (i + 1 == g->n_greedy) break;
        r = kvc_decode(ctx, seq, g->greedy[i], &logits, err);
        if (r != KVC_OK) break;
    }
    return r;
}

/* The last prompt position is computed for the greedy run even if the file does not list it. */
static kvc_result run_prompt(outcome *o, kvc_ctx *ctx, kvc_seq *seq, const golden *g,
    kvc_error *err) {
    size_t n = g->n_positions, i;
    int last_listed = (size_t)g->positions[n - 1] == g->n_prompt - 1;
    size_t *rows = (size_t *)malloc((n + 1) * sizeof *rows);
    float *logits = (float *)malloc((n + 1) * g->n_vocab * sizeof *logits);
    kvc_result r = KVC_ERROR_MEMORY;
    if (rows && logits) {
        for (i = 0; i < n; i++) rows[i] = (size_t)g->positions[i];
        rows[n] = g->n_prompt - 1;
        r = kvc_prefill_rows(ctx, seq, g->prompt, g->n_prompt, rows, n + !last_listed, logits, err);
        for (i = 0; r == KVC_OK && i < n; i++)
            compare_row(o, logits + i * g->n_vocab, g->logits + i * g->n_vocab, g->n_vocab);
        i = last_listed ? n - 1 : n;
        if (r == KVC_OK) r = run_greedy(o, ctx, seq, g, logits + i * g->n_vocab, err);
    }
    free(rows);
    free(logits);
    return r;
}

/* ---- the same again ---- */

/* One way to compute a text. */
typedef struct manner {
    kvc_isa isa;
    uint32_t n_threads, chunk;
} manner;

/* Logits after the prompt's last token and after each greedy token, with the prompt in chunks. */
static kvc_result run_manner(const kvc_model *model, const golden *g, const manner *how,
    float *out, kvc_error *err) {
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc desc = {0};
    kvc_cache *cache = NULL;
    kvc_ctx *ctx = NULL;
    kvc_seq *seq = NULL;
    const float *logits = NULL;
    size_t i, n;
    kvc_result r;
    cache_desc.model = desc.model = model;
    cache_desc.n_ctx = desc.n_batch = N_CTX;
    desc.n_threads = how->n_threads;
    desc.isa = how->isa;
    r = kvc_cache_new(&cache, &cache_desc, err);
    if (r == KVC_OK) r = kvc_ctx_new(&ctx, &desc, err);
    if (r == KVC_OK) r = kvc_seq_open(&seq, cache, err);
    for (i = 0; r == KVC_OK && i < g->n_prompt; i += n) {
        n = g->n_prompt - i < how->chunk ? g->n_prompt - i : how->chunk;
        r = kvc_prefill(ctx, seq, g->prompt + i, n, &logits, err);
    }
    for (i = 0; r == KVC_OK; i++, out += g->n_vocab) {
        memcpy(out, logits, g->n_vocab * sizeof *out);
        if (i == g->n_greedy) break;
        r = kvc_decode(ctx, seq, g->greedy[i], &logits, err);
    }
    kvc_seq_close(seq);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    return r;
}

/* Whether a context gets the instruction set, and not a lesser one. */
static int has_isa(const kvc_model *model, kvc_isa isa) {
    kvc_ctx_desc desc = {0};
    kvc_ctx_info info;
    kvc_ctx *ctx;
    desc.model = model;
    desc.n_batch = 1;
    desc.isa = isa;
    if (kvc_ctx_new(&ctx, &desc, NULL) != KVC_OK) return 0;
    kvc_ctx_query(ctx, &info);
    kvc_ctx_free(ctx);
    return info.desc.isa == isa;
}

/* Every manner that the options allow, in turn with packed weights and in place: the bits of the
   first. */
static kvc_result check_manners(outcome *o, const kvc_model *const models[2], const golden *g,
    const options *opt, kvc_error *err) {
    const size_t size = (g->n_greedy + 1) * g->n_vocab * sizeof(float);
    const uint32_t chunks[] = {N_CTX, 1}, threads[] = {1, opt->n_threads > 2 ? opt->n_threads : 2};
    float *first = (float *)malloc(size), *other = (float *)malloc(size);
    kvc_result r = first && other ? KVC_OK : KVC_ERROR_MEMORY;
    unsigned n = 0, isa, t, c;
    for (isa = KVC_ISA_BASE; isa <= KVC_ISA_AVX512_VNNI; isa++) {
        if (opt->isa != KVC_ISA_BEST && opt->isa != (kvc_isa)isa) continue;
        if (!has_isa(models[0], (kvc_isa)isa)) continue;
        for (t = 0; t < 2; t++)
            for (c = 0; c < 2 && r == KVC_OK; c++) {
                unsigned in_place = t ^ c;
                manner how;
                how.isa = (kvc_isa)isa;
                how.n_threads = threads[t];
                how.chunk = chunks[c];
                r = run_manner(models[in_place], g, &how, n ? other : first, err);
                if (r == KVC_OK && n++ && memcmp(first, other, size)) {
                    printf("(isa %u, %u threads, chunks of %u, %s: other bits) ", isa,
                        (unsigned)threads[t], (unsigned)chunks[c],
                        in_place ? "in place" : "packed");
                    o->difference = INFINITY;
                }
            }
    }
    o->n_runs = n;
    free(first);
    free(other);
    return r;
}

/* The prompt and the greedy tokens with a prefix table that has them all, against the same without:
   every logit must have the same bits. */
static kvc_result check_warm(outcome *o, kvc_ctx *ctx, kvc_cache *cache, const golden *g,
    kvc_error *err) {
    const size_t row = g->n_vocab * sizeof(float);
    float *cold = (float *)malloc((g->n_greedy + 1) * row);
    kvc_result r = cold ? KVC_OK : KVC_ERROR_MEMORY;
    int round;
    for (round = 0; round < 3 && r == KVC_OK; round++) {    /* alone, filling the table, warm */
        const float *logits;
        kvc_seq_info info;
        kvc_seq *seq = NULL;
        size_t i;
        r = round ? kvc_seq_open_shared(&seq, cache, NULL, err) : kvc_seq_open(&seq, cache, err);
        if (r == KVC_OK) r = kvc_prefill(ctx, seq, g->prompt, g->n_prompt, &logits, err);
        if (r == KVC_OK) kvc_seq_query(seq, &info);
        if (r == KVC_OK && info.prefix_hit != (round == 2 ? g->n_prompt - 1 : 0))
            o->difference = INFINITY;
        for (i = 0; r == KVC_OK; i++) {
            if (round == 0) memcpy(cold + i * g->n_vocab, logits, row);
            else if (memcmp(cold + i * g->n_vocab, logits, row)) o->difference = INFINITY;
            if (i == g->n_greedy) break;
            r = kvc_decode(ctx, seq, g->greedy[i], &logits, err);
        }
        kvc_seq_close(seq);
    }
    free(cold);
    return r;
}

static kvc_result run_model(outcome *o, const kvc_model *model, const golden *g, const options *opt,
    kvc_error *err) {
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc ctx_desc = {0};
    kvc_cache *cache = NULL;
    kvc_ctx *ctx = NULL;
    kvc_seq *seq = NULL;
    kvc_result r;
    cache_desc.model = model;
    cache_desc.n_ctx = N_CTX;
    cache_desc.n_seqs = 2;
    cache_desc.n_pages = cache_desc.n_prefix = 2 * N_CTX / 16;
    cache_desc.page_size = 16;
    ctx_desc.model = model;
    ctx_desc.n_batch = N_CTX;
    ctx_desc.n_threads = opt->n_threads;
    ctx_desc.isa = opt->isa;
    ctx_desc.gemm = opt->gemm;
    r = kvc_cache_new(&cache, &cache_desc, err);
    if (r == KVC_OK) r = kvc_ctx_new(&ctx, &ctx_desc, err);
    if (r == KVC_OK) r = kvc_seq_open(&seq, cache, err);
    if (r == KVC_OK) r = run_prompt(o, ctx, seq, g, err);
    kvc_seq_close(seq);
    if (r == KVC_OK && opt->gemm == KVC_GEMM_BUILTIN) r = check_warm(o, ctx, cache, g, err);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    return r;
}

/* The same once more with its weights in place, which is no model of its own to the reader. */
static kvc_result run_again(outcome *o, const kvc_model *model, const char *path, const golden *g,
    const options *opt, kvc_error *err) {
    const kvc_model *models[2];
    kvc_model_desc desc = {0};
    kvc_model *in_place;
    kvc_result r;
    if (opt->gemm != KVC_GEMM_BUILTIN) return KVC_OK;
    desc.path = path;
    desc.weights = KVC_WEIGHTS_IN_PLACE;
    r = kvc_model_open(&in_place, &desc, err);
    if (r != KVC_OK) return r;
    models[0] = model;
    models[1] = in_place;
    r = check_manners(o, models, g, opt, err);
    kvc_model_close(in_place);
    return r;
}

static void report(tally *t, const golden *g, const outcome *o) {
    int rounded = is_rounded(g), greedy = o->n_equal == g->n_greedy;
    double tolerance = rounded ? 0.6 : g->tolerance;
    int pass = o->difference <= tolerance && (rounded ? o->cosine >= 0.998 : greedy);
    printf("%.1e (%g)", o->difference, tolerance);
    if (rounded) printf("  cosine %.5f", o->cosine);
    else if (greedy) printf("  greedy equal  ");
    else printf("  greedy %u: %d, not %d", (unsigned)o->n_equal, (int)o->other,
        (int)g->greedy[o->n_equal]);
    if (o->n_runs) printf("  %2u runs", o->n_runs);
    printf("  %s\n", pass ? "PASS" : "FAIL");
    if (pass) t->passed++;
    else t->failed++;
}

static void fail(tally *t, const char *where, const char *why) {
    printf("FAIL %s%s%s\n", where, *where ? ": " : "", why);
    t->failed++;
}

static void check_model(tally *t, const options *opt, const char *name) {
    char path[1024], json[1024];
    kvc_model_desc desc = {0};
    kvc_model *model;
    kvc_model_info info;
    kvc_error err = {KVC_OK, "", "", 0};
    kvc_result r;
    golden g;
    const char *why;
    outcome o = {0, 1, 0, KVC_NO_TOKEN, 0};
    printf("%-20s ", name);
    fflush(stdout);
    snprintf(path, sizeof path, "%s/%s.gguf", opt->dir, name);
    desc.path = path;
    r = kvc_model_open(&model, &desc, &err);
    if (r == KVC_ERROR_UNSUPPORTED) {
        printf("SKIP %s: %s\n", err.where, err.message);
        t->skipped++;
        return;
    }
    if (r != KVC_OK) {
        fail(t, err.where, err.message);
        return;
    }
    kvc_model_query(model, &info);
    snprintf(json, sizeof json, "%s/%s.json", opt->dir, name);
    why = golden_load(&g, json);
    if (!why && g.n_vocab != info.n_vocab) why = "its JSON has another vocabulary size";
    if (why) {
        fail(t, "", why);
    } else if ((r = run_model(&o, model, &g, opt, &err)) != KVC_OK ||
        (r = run_again(&o, model, path, &g, opt, &err)) != KVC_OK) {
        fail(t, err.where, err.message);
    } else {
        report(t, &g, &o);
    }
    golden_free(&g);
    kvc_model_close(model);
}

/* ---- the folder ---- */

static int compare_names(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Names of the *.gguf in the folder that match, without the ending, sorted; -1 if there is no such
   folder. */
static int list_models(const options *opt, char ***names) {
    DIR *dir = opendir(opt->dir);
    struct dirent *e;
    int n = 0;
    *names = NULL;
    if (!dir) return -1;
    while ((e = readdir(dir)) != NULL) {
        size_t size = strlen(e->d_name);
        char **more, *name;
        if (size < 6 || strcmp(e->d_name + size - 5, ".gguf")) continue;
        name = (char *)malloc(size + 1);
        more = (char **)realloc(*names, ((size_t)n + 1) * sizeof *more);
        if (!name || !more) exit(2);
        memcpy(name, e->d_name, size - 5);
        name[size - 5] = 0;
        *names = more;
        if (opt->only && fnmatch(opt->only, name, 0)) free(name);
        else more[n++] = name;
    }
    closedir(dir);
    if (n) qsort(*names, (size_t)n, sizeof **names, compare_names);
    return n;
}

/* ---- arguments ---- */

static int usage(const char *problem, const char *what) {
    fprintf(stderr, "oracle: %s%s%s (usage: oracle DIR [--only GLOB] "
        "[--isa base|neon|avx2|avx512|avx512vnni] [--gemm builtin|cblas] [--threads N])\n",
        problem, what ? " " : "", what ? what : "");
    return 2;
}

static int parse_isa(options *opt, const char *name) {
    static const char *const names[] = {NULL, "base", "neon", "avx2", "avx512", "avx512vnni"};
    int i;
    for (i = 1; i < 6; i++) {
        if (strcmp(names[i], name)) continue;
        opt->isa = (kvc_isa)i;
        return 0;
    }
    return usage("unknown instruction set", name);
}

static int parse_gemm(options *opt, const char *name) {
    if (!strcmp(name, "builtin")) opt->gemm = KVC_GEMM_BUILTIN;
    else if (strcmp(name, "cblas")) return usage("unknown gemm", name);
    else if (!KVC_USE_CBLAS) {
        fprintf(stderr, "oracle: --gemm cblas: this program was built without cblas\n");
        return 2;
    } else opt->gemm = KVC_GEMM_CBLAS;
    return 0;
}

static int parse_threads(options *opt, const char *text) {
    char *end;
    long n = strtol(text, &end, 10);
    if (*end || end == text || n < 1 || n > 256)
        return usage("--threads takes 1 to 256, not", text);
    opt->n_threads = (uint32_t)n;
    return 0;
}

static int parse(options *opt, int argc, char **argv) {
    int i, bad = 0;
    for (i = 1; i < argc && !bad; i++) {
        const char *a = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (a[0] != '-') {
            if (opt->dir) return usage("more than one folder:", a);
            opt->dir = a;
            continue;
        }
        if (!strcmp(a, "--only")) opt->only = value;
        else if (!strcmp(a, "--isa")) bad = value && parse_isa(opt, value);
        else if (!strcmp(a, "--gemm")) bad = value && parse_gemm(opt, value);
        else if (!strcmp(a, "--threads")) bad = value && parse_threads(opt, value);
        else return usage("unknown option", a);
        if (!value) return usage("a value is missing after", a);
        i++;
    }
    if (bad) return 2;
    return opt->dir ? 0 : usage("no folder given", NULL);
}

int main(int argc, char **argv) {
    options opt = {NULL, NULL, KVC_ISA_BEST, KVC_GEMM_BUILTIN, 1};
    tally t = {0, 0, 0};
    char **names;
    int n, i;
    if (parse(&opt, argc, argv)) return 2;
    n = list_models(&opt, &names);
    if (n < 0) printf("%s is absent: nothing was compared\n", opt.dir);
    for (i = 0; i < n; i++) {
        check_model(&t, &opt, names[i]);
        free(names[i]);
    }
    free(names);
    printf("%u passed, %u failed, %u skipped\n", t.passed, t.failed, t.skipped);
    return t.failed != 0;
}
