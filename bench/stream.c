/* stream: a text much longer than the context, read token by token with KVC_POLICY_WINDOW and
   KVC_POLICY_HEAVY: whether the time of a token or the perplexity of the text rises as positions
   fall out.

       stream [MODEL.gguf [TEXT [TOKENS [CONTEXT]]]]

   The text (the default model's evaluation, its lines written as the model knows dialogues) is read
   again from its start when it ends. For each number of first positions that are kept, and of heavy
   hitters beside them, a table of blocks of tokens: microseconds of a decode (median; in brackets
   the longest of all, which moves K and V) and perplexity. "start anew" does what a host without
   the policy would: it begins with an empty sequence when the context is full. */
#define _DEFAULT_SOURCE   /* clock_gettime */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kvc.h"

#define TOOL "stream"
#include "tool.h"

enum { N_BLOCKS = 10 };

typedef struct block {
    double perplexity, us, longest;
} block;

typedef struct stream {
    kvc_model *model;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_token *tokens;
    size_t n_tokens, n_text;
    uint32_t n_vocab, n_ctx;
} stream;

/* The evaluation's lines begin with a word that tells what they are. */
static char *write_dialogues(char *text, size_t *size)
{
    char *out = (char *)get(*size, 8), *line, *end, *to = out;
    for (line = text; line < text + *size; line = end + 1) {
        char *rest;
        end = (char *)memchr(line, '\n', (size_t)(text + *size - line));
        if (!end) break;
        *end = 0;
        rest = strchr(line, ' ');
        if (!rest || *line == '#' || !strncmp(line, "item ", 5)) continue;
        *rest++ = 0;
        to += sprintf(to, "<|%s|>%s<|end|>", strcmp(line, "want") ? line : "char", rest);
    }
    *size = (size_t)(to - out);
    free(text);
    return out;
}

static void tokenize(stream *s, const char *path, int is_eval)
{
    size_t size;
    kvc_error err;
    char *text = read_file(path, &size);
    if (is_eval) text = write_dialogues(text, &size);
    s->tokens = (kvc_token *)get(size + 8, sizeof *s->tokens);
    need(kvc_tokenize(s->model, text, size, KVC_TEXT_SPECIAL_PARSE, s->tokens, size + 8, &s->n_text,
        NULL, &err), &err);
    free(text);
}

/* -log of the probability of a token */
static double surprise(const float *logits, size_t n, kvc_token token)
{
    double top = -INFINITY, sum = 0;
    for (size_t i = 0; i < n; i++) if (logits[i] > top) top = (double)logits[i];
    for (size_t i = 0; i < n; i++) sum += exp((double)logits[i] - top);
    return top + log(sum) - (double)logits[token];
}

/* keep < 0: starts anew; heavy: parts of 8 of the context */
static void run(stream *s, int keep, int heavy, block out[N_BLOCKS])
{
    size_t n = s->n_tokens / N_BLOCKS, at = 0;
    double *times = (double *)get(n, sizeof *times);
    kvc_seq *seq;
    kvc_error err;
    need(kvc_seq_open(&seq, s->cache, &err), &err);
    if (keep >= 0)
        need(kvc_seq_set_policy(seq, heavy ? KVC_POLICY_HEAVY : KVC_POLICY_WINDOW, (uint32_t)keep,
            s->n_ctx / 8 * (uint32_t)heavy, &err), &err);
    for (int b = 0; b < N_BLOCKS; b++) {
        double sum = 0;
        for (size_t i = 0; i < n; i++, at++) {
            const float *logits;
            double start = now();
            if (keep < 0 && kvc_seq_length(seq) == kvc_seq_capacity(seq))
                need(kvc_seq_rollback(seq, 0), &err);
            need(kvc_decode(s->ctx, seq, s->tokens[at % s->n_text], &logits, &err), &err);
            times[i] = now() - start;
            sum += surprise(logits, s->n_vocab, s->tokens[(at + 1) % s->n_text]);
        }
        out[b].us = median(times, n) * 1e6;
        out[b].longest = times[n - 1] * 1e6;
        out[b].perplexity = exp(sum / (double)n);
    }
    kvc_seq_close(seq);
    free(times);
}

int main(int argc, char **argv)
{
    static const int keeps[][2] = {{-1, 0}, {0, 0}, {4, 0}, {16, 0}, {4, 4}, {4, 6}};
    enum { N_KEEPS = sizeof keeps / sizeof keeps[0] };
    const char *path = argc > 1 ? argv[1] : "examples/models/tavern-f16.gguf";
    const char *text = argc > 2 ? argv[2] : "examples/models/eval.txt";
    block blocks[N_KEEPS][N_BLOCKS];
    stream s = {0};
    kvc_model_desc model_desc = {0};
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc ctx_desc = {0};
    kvc_model_info info;
    kvc_error err;
    model_desc.path = path;
    need(kvc_model_open(&s.model, &model_desc, &err), &err);
    kvc_model_query(s.model, &info);
    s.n_vocab = info.n_vocab;
    s.n_tokens = argc > 3 ? strtoul(argv[3], NULL, 10) : 20000;
    tokenize(&s, text, argc <= 2);
    cache_desc.model = ctx_desc.model = s.model;
    cache_desc.n_ctx = s.n_ctx = argc > 4 ? (uint32_t)strtoul(argv[4], NULL, 10) : 256;
    cache_desc.n_heavy = 4 + s.n_ctx / 8 * 6;
    cache_desc.page_size = 16;
    need(kvc_cache_new(&s.cache, &cache_desc, &err), &err);
    need(kvc_ctx_new(&s.ctx, &ctx_desc, &err), &err);
    for (int k = 0; k < N_KEEPS; k++) run(&s, keeps[k][0], keeps[k][1], blocks[k]);
    printf("%-10s %26s", "tokens", "start anew");
    for (int k = 1; k < N_KEEPS; k++)
        printf("        %2d + %4u kept", keeps[k][0], s.n_ctx / 8 * (unsigned)keeps[k][1]);
    printf("\n");
    for (int b = 0; b < N_BLOCKS; b++) {
        size_t n = s.n_tokens / N_BLOCKS;
        printf("to %-12zu", n * (size_t)(b + 1));
        for (int k = 0; k < N_KEEPS; k++)
            printf(" %5.2f %4.0f (%4.0f) us", blocks[k][b].perplexity, blocks[k][b].us,
                blocks[k][b].longest);
        printf("\n");
    }
    kvc_ctx_free(s.ctx);
    kvc_cache_free(s.cache);
    kvc_model_close(s.model);
    free(s.tokens);
    return 0;
}
