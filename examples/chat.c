/* chat: a conversation with a character in the terminal. Shows how turns share one sequence: the
   description is read once, and each turn prefills only what is new - the player's line - because
   everything before it is still in the cache. `chat --help` lists the options. */
#define _DEFAULT_SOURCE   /* clock_gettime, isatty */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define KVC_IMPLEMENTATION
#include "../kvc.h"

enum { LINE_CAP = 2048, REPLY = 96 };   /* bytes of a line; tokens kept free for a reply */

static const char default_model[] = "examples/models/tavern-f16.gguf";
static const char default_system[] =
    "You are Gordin, a blacksmith in Felmoor. You are proud today because the harvest was good. "
    "You live in the little house behind the old mill. Your daughter is called Selana. "
    "You sell a steel shovel for 24 coins. The lowest price for the steel shovel is 19 coins. "
    "Your dog is called Brando. For an iron helmet you ask 40 coins. "
    "The lowest price for the iron helmet is 33 coins. You fear the gray wolf of Harhill. "
    "Your secret is that the golden crown lies under the broken bridge. Only Merila may hear it. "
    "You like dark ale best. You were born in Torhaven.";

typedef struct chat {
    const char *model_path, *system_path;
    float temp;
    uint64_t seed;
    int stats;
    kvc_model *model;
    kvc_cache *cache;
    kvc_seq *seq;
    kvc_ctx *ctx;
    kvc_sampler *sampler;
    kvc_token system, user, character, end;     /* the markers between the parts */
    uint32_t n_system;          /* positions of the description, which is never forgotten */
    size_t n_prefilled, n_replied;
    double prefill_time, reply_time;    /* seconds */
} chat;

static int complain(const char *what, const char *why)
{
    fprintf(stderr, "chat: %s%s%s\n", what, *what ? ": " : "", why);
    return 0;
}

static int complain_of(const char *what, const kvc_error *err)
{
    const char *gap = *err->where ? ": " : "";
    fprintf(stderr, "chat: %s: %s%s%s\n", what, err->where, gap, err->message);
    return 0;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- options ---- */

static void print_help(void)
{
    printf("usage: chat [options]\n"
        "  -m FILE        a GGUF model with the tavern's markers (%s)\n"
        "  --system FILE  the character's description, - for the one built in (-)\n"
        "  --temp X       temperature; 0 takes the likeliest token (0)\n"
        "  --seed N       of the random numbers (0)\n"
        "  --stats        print speed to standard error at the end\n"
        "  --help         print this\n"
        "A line is a turn; the end of input ends the conversation.\n", default_model);
}

static int set_option(chat *c, const char *name, const char *value)
{
    char *rest;
    errno = 0;
    if (strcmp(name, "-m") == 0) c->model_path = value;
    else if (strcmp(name, "--system") == 0) c->system_path = value;
    else if (strcmp(name, "--temp") == 0) {
        c->temp = strtof(value, &rest);
        if (rest == value || *rest) return complain(name, "not a number");
    } else if (strcmp(name, "--seed") == 0) {
        c->seed = strtoull(value, &rest, 10);
        if (*value < '0' || *value > '9' || *rest || errno) {
            return complain(name, "not a whole number");
        }
    } else return complain(name, "no such option; see --help");
    return 1;
}

static int parse_options(chat *c, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--stats") == 0) c->stats = 1;
        else if (i + 1 == argc) return complain(argv[i], "no such option or no value; see --help");
        else if (!set_option(c, argv[i], argv[i + 1])) return 0;
        else i++;
    }
    return 1;
}

/* ---- the model ---- */

/* The id of a control token, by its spelling. */
static int find_marker(chat *c, const char *spelling, kvc_token *token)
{
    size_t n = 0;
    kvc_token_kind kind;
    if (kvc_tokenize(c->model, spelling, strlen(spelling), KVC_TEXT_SPECIAL_PARSE, token, 1, &n,
        NULL, NULL) || n != 1) {
        return complain(spelling, "the model has no such token");
    }
    kvc_token_spelling(c->model, *token, &n, &kind);
    return kind == KVC_TOKEN_CONTROL || complain(spelling, "not a control token of the model");
}

static int open_all(chat *c)
{
    kvc_model_desc model = {.path = c->model_path};
    kvc_cache_desc cache = {0};
    kvc_ctx_desc ctx = {0};
    kvc_sampler_desc sampler = {.temperature = c->temp, .seed = c->seed};
    kvc_error err;
    if (kvc_model_open(&c->model, &model, &err)) return complain_of(c->model_path, &err);
    cache.model = ctx.model = sampler.model = c->model;
    if (kvc_cache_new(&c->cache, &cache, &err)) return complain_of("cache", &err);
    if (kvc_seq_open(&c->seq, c->cache, &err)) return complain_of("sequence", &err);
    if (kvc_ctx_new(&c->ctx, &ctx, &err)) return complain_of("context", &err);
    if (kvc_sampler_new(&c->sampler, &sampler, &err)) return complain_of("sampler", &err);
    return find_marker(c, "<|system|>", &c->system) && find_marker(c, "<|user|>", &c->user) &&
        find_marker(c, "<|char|>", &c->character) && find_marker(c, "<|end|>", &c->end);
}

static void close_all(chat *c)
{
    kvc_sampler_free(c->sampler);
    kvc_ctx_free(c->ctx);
    kvc_seq_close(c->seq);
    kvc_cache_free(c->cache);
    kvc_model_close(c->model);
}

static size_t room(const chat *c)
{
    return kvc_seq_capacity(c->seq) - kvc_seq_length(c->seq);
}

/* Appends marker, text and <|end|>; after a line of the player also <|char|>, and the logits of the
   reply's first token. Markers that a player types stay plain text. */
static int read_part(chat *c, kvc_token marker, const char *text, const float **logits)
{
    size_t n = 0, size = strlen(text), cap = size + 3;
    kvc_token *tokens = (kvc_token *)malloc(cap * sizeof *tokens);
    double start = now();
    kvc_error err;
    int ok = 0;
    if (!tokens) return complain("", "no memory");
    tokens[0] = marker;
    if (kvc_tokenize(c->model, text, size, 0, tokens + 1, cap - 3, &n, NULL, &err)) {
        complain_of("text", &err);
    } else {
        n++;
        tokens[n++] = c->end;
        if (logits) tokens[n++] = c->character;
        if (n + REPLY > room(c) && c->n_system) {
            fprintf(stderr, "(the cache is full: all but the description is forgotten)\n");
            kvc_seq_rollback(c->seq, c->n_system);
        }
        if (n + REPLY > room(c)) complain("text", "too long for the model's context");
        else if (kvc_prefill(c->ctx, c->seq, tokens, n, logits, &err)) complain_of("prefill", &err);
        else ok = 1;
    }
    c->n_prefilled += n;
    c->prefill_time += now() - start;
    free(tokens);
    return ok;
}

/* ---- the conversation ---- */

static int print_token(chat *c, kvc_text_stream *stream, kvc_token token)
{
    char text[512];
    size_t n = 0;
    kvc_error err;
    if (kvc_text_push(c->model, stream, token, text, sizeof text, &n, &err)) {
        return complain_of("text", &err);
    }
    fwrite(text, 1, n, stdout);
    return !fflush(stdout) || complain("standard output", strerror(errno));
}

/* Streams a reply; its tokens and its end stay in the cache for the turns that follow. */
static int reply(chat *c, const float *logits)
{
    kvc_text_stream stream = {.started = 0};
    double start = now();
    kvc_token token = KVC_NO_TOKEN;
    kvc_error err;
    for (int i = 0; i < REPLY && token != c->end; i++) {
        if (kvc_sampler_sample(c->sampler, logits, &token, &err)) {
            return complain_of("sampler", &err);
        }
        if (i == REPLY - 1 || kvc_token_is_end(c->model, token)) token = c->end;
        if (!print_token(c, &stream, token)) return 0;
        if (kvc_decode(c->ctx, c->seq, token, &logits, &err)) return complain_of("decode", &err);
        c->n_replied++;
    }
    c->reply_time += now() - start;
    return putchar('\n') != EOF || complain("standard output", strerror(errno));
}

/* One line without its end; 0 at the end of input. What is longer than a line can be is cut. */
static int read_line(char line[LINE_CAP], int terminal)
{
    size_t n;
    int byte;
    printf("> ");
    fflush(stdout);
    if (!fgets(line, LINE_CAP, stdin)) {
        putchar('\n');
        return 0;
    }
    n = strcspn(line, "\r\n");
    if (!line[n]) while ((byte = getchar()) != EOF && byte != '\n') continue;
    line[n] = 0;
    if (!terminal) puts(line);
    return 1;
}

static int converse(chat *c)
{
    char line[LINE_CAP];
    const float *logits;
    int terminal = isatty(STDIN_FILENO);
    while (read_line(line, terminal)) {
        if (!*line) continue;
        if (!read_part(c, c->user, line, &logits) || !reply(c, logits)) return 0;
    }
    return 1;
}

/* The description: a file's text in one line, or the one built in. */
static int read_system(chat *c)
{
    char text[8192];
    size_t n;
    FILE *f;
    if (!c->system_path || strcmp(c->system_path, "-") == 0) {
        return read_part(c, c->system, default_system, NULL);
    }
    f = fopen(c->system_path, "rb");
    if (!f) return complain(c->system_path, strerror(errno));
    n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    while (n > 0 && strchr(" \r\n", text[n - 1])) n--;
    text[n] = 0;
    for (char *p = text; *p; p++) if (*p == '\n') *p = ' ';
    return read_part(c, c->system, text, NULL);
}

static void print_stats(const chat *c)
{
    kvc_ctx_info info;
    kvc_ctx_query(c->ctx, &info);
    fprintf(stderr, "prefill  %zu tokens, %.1f tokens/s\n", c->n_prefilled,
        (double)c->n_prefilled / c->prefill_time);
    fprintf(stderr, "replies  %zu tokens, %.1f tokens/s\n", c->n_replied,
        c->n_replied ? (double)c->n_replied / c->reply_time : 0.0);
    fprintf(stderr, "positions computed %llu, isa %s\n", (unsigned long long)info.n_rows,
        info.isa_name);
}

int main(int argc, char **argv)
{
    chat c = {.model_path = default_model};
    int ok;
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        print_help();
        return 0;
    }
    ok = parse_options(&c, argc, argv) && open_all(&c) && read_system(&c);
    if (ok) {
        c.n_system = kvc_seq_length(c.seq);
        ok = converse(&c);
    }
    if (ok && c.stats) print_stats(&c);
    close_all(&c);
    return ok ? 0 : 2;
}
