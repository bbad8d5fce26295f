/* generate: continues a text. Shows the whole way through the library: open a model, reserve a
   cache, read the prompt, then decode token by token, each sampled from the logits of the one
   before. `generate --help` lists the options. */
#define _DEFAULT_SOURCE   /* clock_gettime, isatty, sysconf */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define KVC_IMPLEMENTATION
#include "../kvc.h"

enum { CHUNK = 256 };   /* prompt tokens between two progress lines */

/* ---- options ---- */

typedef struct options {
    const char *model, *prompt, *file, *isa, *gemm;
    uint64_t n, top_k, seed, threads, ctx;
    float temp, top_p, min_p, repeat_penalty;
    int stats, no_cache, special, no_echo, help;
} options;

typedef enum option_kind { FLAG, TEXT, COUNT, REAL } option_kind;

typedef struct option_row {
    const char *name, *value, *help;
    option_kind kind;
    size_t offset;              /* of the field in options */
    uint64_t max;               /* of a COUNT */
} option_row;

#define AT(field) offsetof(options, field)
static const option_row rows[] = {
    {"-m", "FILE", "the model, a GGUF file", TEXT, AT(model), 0},
    {"-p", "TEXT", "the prompt", TEXT, AT(prompt), 0},
    {"-f", "FILE", "or a file that holds it, - for standard input", TEXT, AT(file), 0},
    {"-n", "N", "most tokens to generate (256)", COUNT, AT(n), UINT32_MAX},
    {"--temp", "X", "temperature; 0 takes the likeliest token (0)", REAL, AT(temp), 0},
    {"--top-k", "N", "sample from the N likeliest (0: off)", COUNT, AT(top_k), UINT32_MAX},
    {"--top-p", "X", "from the fewest with this probability (0: off)", REAL, AT(top_p), 0},
    {"--min-p", "X", "from those X times as likely as the likeliest (0: off)", REAL, AT(min_p), 0},
    {"--repeat-penalty", "X", "against the latest 64 tokens (0: off)", REAL, AT(repeat_penalty), 0},
    {"--seed", "N", "of the random numbers (0)", COUNT, AT(seed), UINT64_MAX},
    {"--threads", "N", "threads that compute (0: one per processor)", COUNT, AT(threads), 256},
    {"--isa", "NAME", "at most base, neon, avx2, avx512, avx512vnni (best)", TEXT, AT(isa), 0},
    {"--gemm", "NAME", "builtin or cblas, for the prompt (builtin)", TEXT, AT(gemm), 0},
    {"--ctx", "N", "tokens the cache holds (0: the model's)", COUNT, AT(ctx), UINT32_MAX},
    {"--stats", "", "print speed and memory to standard error", FLAG, AT(stats), 0},
    {"--no-cache", "", "compute the whole text anew for each token", FLAG, AT(no_cache), 0},
    {"--special", "", "control tokens written out in the prompt count", FLAG, AT(special), 0},
    {"--no-echo", "", "do not print the prompt", FLAG, AT(no_echo), 0},
    {"--help", "", "print this", FLAG, AT(help), 0},
};
enum { N_ROWS = sizeof rows / sizeof rows[0] };

static int complain(const char *what, const char *why)
{
    fprintf(stderr, "generate: %s%s%s\n", what, *what ? ": " : "", why);
    return 0;
}

static int complain_of(const char *what, const kvc_error *err)
{
    const char *gap = *err->where ? ": " : "";
    fprintf(stderr, "generate: %s: %s%s%s\n", what, err->where, gap, err->message);
    return 0;
}

static void print_help(void)
{
    printf("usage: generate -m FILE -p TEXT [options]\n");
    for (size_t i = 0; i < N_ROWS; i++) {
        printf("  %s %-*s  %s\n", rows[i].name, 20 - (int)strlen(rows[i].name), rows[i].value,
            rows[i].help);
    }
}

/* Stores one value; 0 if the text is not one. */
static int set_option(options *o, const option_row *row, const char *text)
{
    char *field = (char *)o + row->offset, *end;
    errno = 0;
    if (row->kind == COUNT) {
        uint64_t value = strtoull(text, &end, 10);
        memcpy(field, &value, sizeof value);
        return *text >= '0' && *text <= '9' && *end == '\0' && errno == 0 && value <= row->max;
    }
    if (row->kind == REAL) {
        float value = strtof(text, &end);
        memcpy(field, &value, sizeof value);
        return end != text && *end == '\0';
    }
    memcpy(field, &text, sizeof text);
    return 1;
}

static int parse_options(options *o, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const option_row *row = rows;
        while (row < rows + N_ROWS && strcmp(row->name, argv[i]) != 0) row++;
        if (row == rows + N_ROWS) return complain(argv[i], "no such option; see --help");
        if (row->kind == FLAG) {
            *(int *)(void *)((char *)o + row->offset) = 1;
        } else if (++i == argc) {
            return complain(row->name, "needs a value");
        } else if (!set_option(o, row, argv[i])) {
            return complain(row->name, "not a number in its range");
        }
    }
    if (o->help) return 1;
    if (!o->model) return complain("", "no model; give one with -m FILE");
    if (!o->prompt == !o->file) return complain("", "give either -p TEXT or -f FILE");
    return 1;
}

/* The place of a name in a list; -1 if it is not there, 0 for NULL. */
static int name_index(const char *const *names, int n, const char *name)
{
    for (int i = 0; name && i < n; i++) {
        if (strcmp(names[i], name) == 0) return i;
    }
    return name ? -1 : 0;
}

/* ---- one run ---- */

typedef struct run {
    options o;
    kvc_model *model;
    kvc_cache *cache;
    kvc_seq *seq;
    kvc_ctx *ctx;
    kvc_sampler *sampler;
    kvc_model_info info;
    kvc_token *tokens;          /* prompt and what was generated */
    size_t n_prompt, n_tokens;
    kvc_text_stream stream;
    char *text;                 /* one piece of text on its way out */
    size_t text_cap;
    double prefill_time, first_time, decode_time;   /* seconds */
    size_t n_decoded;           /* tokens computed after the prompt */
} run;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int open_all(run *r)
{
    static const char *const isas[] = {"best", "base", "neon", "avx2", "avx512", "avx512vnni"};
    static const char *const gemms[] = {"builtin", "cblas"};
    int isa = name_index(isas, 6, r->o.isa), gemm = name_index(gemms, 2, r->o.gemm);
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    kvc_model_desc model = {.path = r->o.model};
    kvc_cache_desc cache = {.n_ctx = (uint32_t)r->o.ctx};
    kvc_ctx_desc ctx = {.n_threads = (uint32_t)r->o.threads, .isa = (kvc_isa)isa,
        .gemm = (kvc_gemm)gemm};
    kvc_sampler_desc sampler = {.temperature = r->o.temp, .top_k = (uint32_t)r->o.top_k,
        .top_p = r->o.top_p, .min_p = r->o.min_p, .repeat_penalty = r->o.repeat_penalty,
        .seed = r->o.seed};
    kvc_error err;
    if (isa < 0) return complain("--isa", "not the name of an instruction set; see --help");
    if (gemm < 0) return complain("--gemm", "neither builtin nor cblas");
    if (ctx.n_threads == 0) {
        ctx.n_threads = processors < 1 ? 1 : processors > 256 ? 256 : (uint32_t)processors;
    }
    model.n_threads = ctx.n_threads;
    if (kvc_model_open(&r->model, &model, &err)) return complain_of(r->o.model, &err);
    kvc_model_query(r->model, &r->info);
    cache.model = ctx.model = sampler.model = r->model;
    if (kvc_cache_new(&r->cache, &cache, &err)) return complain_of("cache", &err);
    if (kvc_seq_open(&r->seq, r->cache, &err)) return complain_of("sequence", &err);
    if (kvc_ctx_new(&r->ctx, &ctx, &err)) return complain_of("context", &err);
    if (kvc_sampler_new(&r->sampler, &sampler, &err)) return complain_of("sampler", &err);
    return 1;
}

static void close_all(run *r)
{
    kvc_sampler_free(r->sampler);
    kvc_ctx_free(r->ctx);
    kvc_seq_close(r->seq);
    kvc_cache_free(r->cache);
    kvc_model_close(r->model);
    free(r->tokens);
    free(r->text);
}

/* The bytes of a file, which the caller frees; NULL after a complaint. */
static char *read_file(const char *path, size_t *size)
{
    FILE *f = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    char *data = NULL, *more;
    size_t cap = 0, n = 1;
    if (!f) {
        complain(path, strerror(errno));
        return NULL;
    }
    *size = 0;
    while (n > 0 && (more = (char *)realloc(data, cap += 1 << 16)) != NULL) {
        data = more;
        n = fread(data + *size, 1, cap - *size, f);
        *size += n;
    }
    if (n > 0 || ferror(f)) {
        complain(path, n > 0 ? "no memory" : strerror(errno));
        free(data);
        data = NULL;
    }
    if (f != stdin) fclose(f);
    return data;
}

/* Fills r->tokens with the prompt, with room for all that may follow. */
static int read_tokens(run *r, const char *text, size_t size)
{
    unsigned flags = KVC_TEXT_SPECIAL_ADD | (r->o.special ? KVC_TEXT_SPECIAL_PARSE : 0u);
    size_t n = 0, cap = kvc_seq_capacity(r->seq);
    kvc_error err;
    kvc_result result = kvc_tokenize(r->model, text, size, flags, NULL, 0, &n, NULL, &err);
    if (result == KVC_OK) return complain("prompt", "it has no tokens");
    if (result != KVC_ERROR_SPACE) return complain_of("prompt", &err);
    if (n > cap) {
        fprintf(stderr, "generate: prompt: %zu tokens, but the context holds %zu\n", n, cap);
        return 0;
    }
    r->tokens = (kvc_token *)malloc((cap + 1) * sizeof *r->tokens);
    if (!r->tokens) return complain("prompt", "no memory");
    if (kvc_tokenize(r->model, text, size, flags, r->tokens, cap, &n, NULL, &err)) {
        return complain_of("prompt", &err);
    }
    if (n > 1 && r->info.add_eos && r->tokens[n - 1] == r->info.eos) n--;   /* it is to go on */
    for (size_t i = 0; i < n; i++) kvc_sampler_accept(r->sampler, r->tokens[i]);
    r->n_prompt = r->n_tokens = n;
    return 1;
}

static int read_prompt(run *r)
{
    size_t size = 0;
    char *data;
    int ok;
    if (r->o.prompt) return read_tokens(r, r->o.prompt, strlen(r->o.prompt));
    data = read_file(r->o.file, &size);
    ok = data && read_tokens(r, data, size);
    free(data);
    return ok;
}

/* ---- text out ---- */

static int print_token(run *r, kvc_token token)
{
    size_t n = 0;
    kvc_error err;
    kvc_result result;
    while ((result = kvc_text_push(r->model, &r->stream, token, r->text, r->text_cap, &n, &err))
        == KVC_ERROR_SPACE) {
        char *more = (char *)realloc(r->text, n);
        if (!more) return complain("text", "no memory");
        r->text = more;
        r->text_cap = n;
    }
    if (result != KVC_OK) return complain_of("text", &err);
    if (n > 0 && (fwrite(r->text, 1, n, stdout) != n || fflush(stdout))) {
        return complain("standard output", strerror(errno));
    }
    return 1;
}

static int print_end(run *r)
{
    char rest[4];
    size_t n = kvc_text_end(&r->stream, rest);
    if (fwrite(rest, 1, n, stdout) == n && putchar('\n') != EOF && !fflush(stdout)) return 1;
    return complain("standard output", strerror(errno));
}

/* ---- the model at work ---- */

/* Reads tokens [0, n_tokens) in chunks; a terminal sees how far it is. */
static int prefill(run *r, int show, const float **logits)
{
    size_t at = 0;
    kvc_error err;
    while (at < r->n_tokens) {
        size_t n = r->n_tokens - at < CHUNK ? r->n_tokens - at : CHUNK;
        int last = at + n == r->n_tokens;
        if (kvc_prefill(r->ctx, r->seq, r->tokens + at, n, last ? logits : NULL, &err)) {
            return complain_of("prefill", &err);
        }
        at += n;
        if (show) fprintf(stderr, "\rreading the prompt: %zu of %zu tokens", at, r->n_tokens);
    }
    if (show) fprintf(stderr, "\r%60s\r", "");
    return 1;
}

/* The logits after the latest token, which is the only new one; or, without a cache, after all. */
static int advance(run *r, const float **logits)
{
    kvc_error err;
    r->n_decoded++;
    if (r->o.no_cache) {
        kvc_seq_rollback(r->seq, 0);
        return prefill(r, 0, logits);
    }
    if (kvc_decode(r->ctx, r->seq, r->tokens[r->n_tokens - 1], logits, &err)) {
        return complain_of("decode", &err);
    }
    return 1;
}

static int generate(run *r)
{
    const float *logits = NULL;
    double start = now();
    kvc_error err;
    if (!prefill(r, r->n_tokens > CHUNK && isatty(STDERR_FILENO), &logits)) return 0;
    r->prefill_time = now() - start;
    for (size_t i = 0; i < r->n_prompt && !r->o.no_echo; i++) {
        if (!print_token(r, r->tokens[i])) return 0;
    }
    for (uint64_t i = 0; i < r->o.n; i++) {
        kvc_token token;
        if (i > 0 && r->n_tokens > kvc_seq_capacity(r->seq)) {
            complain("", "the context is full; --ctx N makes a larger one");
            break;
        }
        if (i > 0 && !advance(r, &logits)) return 0;
        if (kvc_sampler_sample(r->sampler, logits, &token, &err)) {
            return complain_of("sampler", &err);
        }
        if (i == 0) r->first_time = now() - start;
        if (token == r->info.bos || kvc_token_is_end(r->model, token)) break;
        r->tokens[r->n_tokens++] = token;
        if (!print_token(r, token)) return 0;
    }
    r->decode_time = now() - start - r->first_time;
    return print_end(r);
}

static void print_stats(run *r)
{
    kvc_cache_info cache;
    kvc_ctx_info ctx;
    kvc_cache_query(r->cache, &cache);
    kvc_ctx_query(r->ctx, &ctx);
    fprintf(stderr, "prompt              %zu tokens\n", r->n_prompt);
    fprintf(stderr, "generated           %zu tokens\n", r->n_tokens - r->n_prompt);
    fprintf(stderr, "time to first token %.3f ms\n", r->first_time * 1e3);
    fprintf(stderr, "prefill             %.1f tokens/s\n", (double)r->n_prompt / r->prefill_time);
    fprintf(stderr, "decode              %.1f tokens/s\n",
        r->n_decoded ? (double)r->n_decoded / r->decode_time : 0.0);
    fprintf(stderr, "positions computed  %llu\n", (unsigned long long)ctx.n_rows);
    fprintf(stderr, "KV cache            %zu bytes per token, %zu bytes in all\n",
        cache.bytes_per_token, cache.page_bytes * cache.pages_total);
    fprintf(stderr, "threads %u, isa %s, gemm %s\n", (unsigned)ctx.desc.n_threads, ctx.isa_name,
        ctx.desc.gemm == KVC_GEMM_CBLAS ? "cblas" : "builtin");
}

int main(int argc, char **argv)
{
    run r = {.o = {.n = 256}};
    int ok = parse_options(&r.o, argc, argv);
    if (ok && r.o.help) {
        print_help();
        return 0;
    }
    ok = ok && open_all(&r) && read_prompt(&r) && generate(&r);
    if (ok && r.o.stats) print_stats(&r);
    close_all(&r);
    return ok ? 0 : 2;
}
