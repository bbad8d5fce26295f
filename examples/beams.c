/* beams: the likeliest continuations of a text by beam search (Graves 2012; Sutskever et al. 2014).

       beams MODEL.gguf TEXT [BEAMS [TOKENS [PENALTY]]]      4 beams, 40 tokens, penalty 1

   Every beam is a sequence of the same cache. After each step the best continuations of all beams
   are chosen, and kvc_seq_reorder gives each beam the past that it goes on from: beams share the
   pages of what they have in common, and nothing is copied but the last page of two that part.
   A continuation that ends is finished; of those the best has the largest sum of log probabilities
   divided by ((5 + length) / 6) ^ PENALTY (Wu et al. 2016): 0 prefers short ones. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KVC_IMPLEMENTATION
#include "../kvc.h"

enum { MAX_BEAMS = 64, MAX_TOKENS = 1024, MAX_PROMPT = 4096 };

/* A continuation: the sum of its log probabilities and its tokens. */
typedef struct hypothesis {
    double sum, score;          /* score: sum over the penalty of its length, once it is finished */
    uint32_t n;
    kvc_token tokens[MAX_TOKENS];
} hypothesis;

typedef struct candidate {
    double sum;
    uint32_t beam;
    kvc_token token;
} candidate;

typedef struct search {
    const kvc_model *model;
    kvc_ctx *ctx;
    kvc_seq *seqs[MAX_BEAMS];
    uint32_t n_beams;           /* at most */
    uint32_t n_live;            /* beams that go on */
    uint32_t n_tokens;          /* of a continuation, at most */
    uint32_t n_vocab;
    double penalty;
    double *log_p;              /* [n_beams, n_vocab] of each live beam's next token */
    hypothesis live[MAX_BEAMS], next[MAX_BEAMS], best[MAX_BEAMS];
    uint32_t n_best;            /* finished ones, best first */
} search;

/* ---- pieces ---- */

static void log_softmax(double *out, const float *logits, uint32_t n)
{
    double top = -INFINITY, sum = 0.0;
    uint32_t i;
    for (i = 0; i < n; i++) if ((double)logits[i] > top) top = (double)logits[i];
    for (i = 0; i < n; i++) sum += exp((double)logits[i] - top);
    for (i = 0; i < n; i++) out[i] = (double)logits[i] - top - log(sum);
}

static double finished_score(const search *s, double sum, uint32_t n)
{
    return sum / pow((5.0 + n) / 6.0, s->penalty);
}

/* Larger sums first; equal ones in the order of beams and ids, so that a run can be repeated. */
static int is_before(const candidate *a, const candidate *b)
{
    if (a->sum > b->sum || a->sum < b->sum) return a->sum > b->sum;
    return a->beam != b->beam ? a->beam < b->beam : a->token < b->token;
}

/* The best `most` continuations of all live beams, best first; returns how many there are. */
static uint32_t choose(const search *s, candidate *best, uint32_t most)
{
    uint32_t beam, n = 0, at;
    kvc_token token;
    for (beam = 0; beam < s->n_live; beam++) {
        const double *log_p = s->log_p + (size_t)beam * s->n_vocab;
        for (token = 0; token < (kvc_token)s->n_vocab; token++) {
            candidate c;
            c.sum = s->live[beam].sum + log_p[token];
            c.beam = beam;
            c.token = token;
            if (n == most && !is_before(&c, &best[n - 1])) continue;
            if (n < most) n++;
            for (at = n - 1; at > 0 && is_before(&c, &best[at - 1]); at--) best[at] = best[at - 1];
            best[at] = c;
        }
    }
    return n;
}

/* Keeps a finished continuation if it is among the best. */
static void finish(search *s, const hypothesis *h, double sum, kvc_token last)
{
    hypothesis done = *h;
    uint32_t at;
    if (last != KVC_NO_TOKEN) done.tokens[done.n++] = last;
    done.sum = sum;
    done.score = finished_score(s, sum, done.n);
    if (s->n_best == s->n_beams && done.score <= s->best[s->n_best - 1].score) return;
    if (s->n_best < s->n_beams) s->n_best++;
    for (at = s->n_best - 1; at > 0 && done.score > s->best[at - 1].score; at--)
        s->best[at] = s->best[at - 1];
    s->best[at] = done;
}

/* No live beam can become better than the worst of the best: sums only fall. */
static int is_over(const search *s)
{
    double hope;
    if (s->n_live == 0 || s->live[0].n == s->n_tokens) return 1;
    if (s->n_best < s->n_beams) return 0;
    hope = finished_score(s, s->live[0].sum, s->penalty > 0.0 ? s->n_tokens : s->live[0].n);
    return hope <= s->best[s->n_best - 1].score;
}

/* ---- the search ---- */

/* One token more for every beam. */
static kvc_result step(search *s, kvc_error *err)
{
    candidate chosen[2 * MAX_BEAMS];
    uint32_t from[MAX_BEAMS], n = choose(s, chosen, 2 * s->n_beams), i, n_next = 0;
    kvc_result r;
    for (i = 0; i < n && n_next < s->n_beams; i++) {
        const hypothesis *h = &s->live[chosen[i].beam];
        if (kvc_token_is_end(s->model, chosen[i].token)) {
            finish(s, h, chosen[i].sum, chosen[i].token);
            continue;
        }
        s->next[n_next] = *h;
        s->next[n_next].sum = chosen[i].sum;
        s->next[n_next].tokens[s->next[n_next].n++] = chosen[i].token;
        from[n_next++] = chosen[i].beam;
    }
    for (i = n_next; i < s->n_beams; i++) from[i] = i;
    if ((r = kvc_seq_reorder(s->seqs, from, s->n_beams, err)) != KVC_OK) return r;
    s->n_live = n_next;
    memcpy(s->live, s->next, n_next * sizeof *s->live);
    for (i = 0; i < n_next; i++) {
        const hypothesis *h = &s->live[i];
        const float *logits;
        r = kvc_decode(s->ctx, s->seqs[i], h->tokens[h->n - 1], &logits, err);
        if (r != KVC_OK) return r;
        log_softmax(s->log_p + (size_t)i * s->n_vocab, logits, s->n_vocab);
    }
    return KVC_OK;
}

/* seqs [n_beams] are open; the first one gets the prompt. */
static kvc_result beam_search(search *s, const kvc_token *prompt, size_t n_prompt, kvc_error *err)
{
    const float *logits;
    kvc_result r = kvc_prefill(s->ctx, s->seqs[0], prompt, n_prompt, &logits, err);
    uint32_t i;
    if (r != KVC_OK) return r;
    log_softmax(s->log_p, logits, s->n_vocab);
    s->n_best = 0;
    s->n_live = 1;
    s->live[0].sum = 0.0;
    s->live[0].n = 0;
    while (!is_over(s))
        if ((r = step(s, err)) != KVC_OK) return r;
    for (i = 0; i < s->n_live; i++)         /* cut off by n_tokens */
        if (s->live[i].n == s->n_tokens) finish(s, &s->live[i], s->live[i].sum, KVC_NO_TOKEN);
    return KVC_OK;
}

/* ---- the program ---- */

static int complain(const kvc_error *err)
{
    fprintf(stderr, "beams: %s: %s\n", err->where, err->message);
    return 1;
}

static void print_text(const kvc_model *model, const hypothesis *h)
{
    kvc_text_stream stream = {0};
    char text[256];
    kvc_error err;
    size_t n;
    uint32_t i;
    for (i = 0; i < h->n && !kvc_token_is_end(model, h->tokens[i]); i++)
        if (kvc_text_push(model, &stream, h->tokens[i], text, sizeof text, &n, &err) == KVC_OK)
            fwrite(text, 1, n, stdout);
    printf("\n");
}

static int run(search *s, kvc_model *model, const char *text)
{
    kvc_token prompt[MAX_PROMPT];
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc ctx_desc = {0};
    kvc_model_info info;
    kvc_cache *cache;
    kvc_error err;
    size_t n;
    uint32_t i;
    kvc_model_query(model, &info);
    s->model = model;
    s->n_vocab = info.n_vocab;
    s->log_p = (double *)malloc((size_t)s->n_beams * s->n_vocab * sizeof *s->log_p);
    if (s->log_p == NULL) return 1;
    if (kvc_tokenize(model, text, strlen(text), KVC_TEXT_SPECIAL_ADD | KVC_TEXT_SPECIAL_PARSE,
        prompt, MAX_PROMPT, &n, NULL, &err)) return complain(&err);
    cache_desc.model = ctx_desc.model = model;
    cache_desc.n_ctx = (uint32_t)n + s->n_tokens;
    cache_desc.n_seqs = s->n_beams;
    if (kvc_cache_new(&cache, &cache_desc, &err)) return complain(&err);
    if (kvc_ctx_new(&s->ctx, &ctx_desc, &err)) return complain(&err);
    for (i = 0; i < s->n_beams; i++)
        if (kvc_seq_open(&s->seqs[i], cache, &err)) return complain(&err);
    if (beam_search(s, prompt, n, &err)) return complain(&err);
    for (i = 0; i < s->n_best; i++) {
        printf("%8.3f  ", s->best[i].score);
        print_text(model, &s->best[i]);
    }
    kvc_ctx_free(s->ctx);
    kvc_cache_free(cache);
    free(s->log_p);
    return 0;
}

static uint32_t number(const char *text, uint32_t otherwise, uint32_t most)
{
    unsigned long n = text != NULL ? strtoul(text, NULL, 10) : otherwise;
    return n < 1 ? 1 : n > most ? most : (uint32_t)n;
}

int main(int argc, char **argv)
{
    static search s;
    kvc_model_desc desc = {0};
    kvc_model *model;
    kvc_error err;
    int status;
    if (argc < 3) {
        fprintf(stderr, "usage: beams MODEL.gguf TEXT [BEAMS [TOKENS [PENALTY]]]\n");
        return 2;
    }
    s.n_beams = number(argc > 3 ? argv[3] : NULL, 4, MAX_BEAMS);
    s.n_tokens = number(argc > 4 ? argv[4] : NULL, 40, MAX_TOKENS);
    s.penalty = argc > 5 ? strtod(argv[5], NULL) : 1.0;
    desc.path = argv[1];
    if (kvc_model_open(&model, &desc, &err)) return complain(&err);
    status = run(&s, model, argv[2]);
    kvc_model_close(model);
    return status;
}
