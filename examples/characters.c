/* characters: forty characters of one town, who share what they know of it.

       characters [MODEL.gguf]

   Each has the description of the town and a few lines of its own in front of the conversation.
   With the prefix table the town is computed once, by whoever speaks first, and held once; each
   later character computes its own lines only. The program asks everybody two questions, first with
   sequences that know nothing of each other, then with the table, and prints what that saves. Both
   runs say the same, since a warm answer has the bits of a cold one; it ends with 1 if not. */
#define _DEFAULT_SOURCE   /* clock_gettime */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KVC_IMPLEMENTATION
#include "../kvc.h"

enum { N_CHARACTERS = 40, N_QUESTIONS = 2, REPLY = 24, TEXT = 2048, TOKENS = 1024 };

static const char town[] =
    "The town is called Felmoor. It lies between the river and the old wood. The mill stands "
    "beside the stone bridge. The inn is called the Tin Harp. The market is held in front of the "
    "inn. The well is behind the smithy. The harvest was good this year, and the tax was raised. "
    "The road to Torhaven is closed because the bridge at Harhill is broken. The gray wolf of "
    "Harhill was seen near the wood. The guard closes the gate at night. ";

static const char *const names[] = {"Gordin", "Selana", "Merila", "Urlo", "Borna", "Loriric",
    "Tarnala", "Holvata", "Melbert", "Korbin"};
static const char *const trades[] = {"a blacksmith", "a miller", "a tanner", "a bard"};
static const char *const homes[] = {"the mill", "the old bridge", "the gray smithy", "the market"};
static const char *const fears[] = {"the gray wolf of Harhill", "the deep well", "the dark wood",
    "the carved eagle of Isnewick", "the blue toad of Volgate"};
static const char *const questions[N_QUESTIONS] = {"Who are you?", "What do you fear?"};

typedef struct town_run {
    kvc_model *model;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seqs[N_CHARACTERS];
    double first_token[N_QUESTIONS];    /* seconds, sums over the characters but the first */
    size_t n_asked, n_reused;           /* tokens */
    char said[N_CHARACTERS][N_QUESTIONS][256];
} town_run;

static void need(kvc_result result, const kvc_error *err)
{
    if (result == KVC_OK) return;
    fprintf(stderr, "characters: %s: %s\n", err->where, err->message);
    exit(2);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* What comes before a character's reply to a question. */
static size_t write_prompt(char *text, int character, int question)
{
    int n = 0;
    if (question == 0)
        n = snprintf(text, TEXT, "<|system|>%sYour name is %s. You are %s. Your home is beside %s. "
            "You fear %s.<|end|>", town, names[character % 10], trades[character % 4],
            homes[character / 10], fears[character % 5]);
    n += snprintf(text + n, TEXT - (size_t)n, "%s<|user|>%s<|end|><|char|>",
        question == 0 ? "" : "<|end|>", questions[question]);
    return (size_t)n;
}

/* Asks, and writes down the likeliest reply. */
static void ask(town_run *t, int character, int question)
{
    static char text[TEXT];
    static kvc_token prompt[TOKENS];
    char *said = t->said[character][question];
    kvc_seq *seq = t->seqs[character];
    kvc_text_stream stream = {0};
    kvc_model_info model;
    kvc_seq_info info;
    kvc_error err;
    const float *logits;
    size_t n_prompt, n_said = 0, n;
    double start;
    kvc_model_query(t->model, &model);
    need(kvc_tokenize(t->model, text, write_prompt(text, character, question),
        KVC_TEXT_SPECIAL_PARSE, prompt, TOKENS, &n_prompt, NULL, &err), &err);
    start = now();
    need(kvc_prefill(t->ctx, seq, prompt, n_prompt, &logits, &err), &err);
    if (character > 0) t->first_token[question] += now() - start;
    kvc_seq_query(seq, &info);
    t->n_asked += n_prompt;
    t->n_reused += info.prefix_hit;
    for (int i = 0; i < REPLY; i++) {
        kvc_token best = 0;
        for (uint32_t k = 1; k < model.n_tokens; k++)
            if (logits[k] > logits[best]) best = (kvc_token)k;
        if (kvc_token_is_end(t->model, best)) break;
        need(kvc_text_push(t->model, &stream, best, said + n_said, 255 - n_said, &n, &err), &err);
        n_said += n;
        need(kvc_decode(t->ctx, seq, best, &logits, &err), &err);
    }
    said[n_said] = 0;
}

/* Everybody's conversation; all stay open. Pages that are held: *live. */
static void run(town_run *t, int shared, uint32_t *live, size_t *page_bytes)
{
    kvc_cache_desc desc = {0};
    kvc_cache_info info;
    kvc_error err;
    desc.model = t->model;
    desc.n_ctx = 512;
    desc.n_seqs = N_CHARACTERS;
    desc.page_size = 16;
    desc.n_prefix = N_CHARACTERS * 512 / 16;
    need(kvc_cache_new(&t->cache, &desc, &err), &err);
    for (int i = 0; i < N_CHARACTERS; i++) {
        if (shared) need(kvc_seq_open_shared(&t->seqs[i], t->cache, NULL, &err), &err);
        else need(kvc_seq_open(&t->seqs[i], t->cache, &err), &err);
    }
    for (int question = 0; question < N_QUESTIONS; question++)
        for (int i = 0; i < N_CHARACTERS; i++) ask(t, i, question);
    kvc_cache_query(t->cache, &info);
    *live = info.pages_live;
    *page_bytes = info.page_bytes;
    kvc_cache_free(t->cache);
}

int main(int argc, char **argv)
{
    static town_run alone, together;
    kvc_model_desc model_desc = {0};
    kvc_ctx_desc ctx_desc = {0};
    kvc_error err;
    uint32_t live[2];
    size_t page;
    model_desc.path = argc > 1 ? argv[1] : "examples/models/tavern-f16.gguf";
    need(kvc_model_open(&alone.model, &model_desc, &err), &err);
    ctx_desc.model = together.model = alone.model;
    need(kvc_ctx_new(&alone.ctx, &ctx_desc, &err), &err);
    together.ctx = alone.ctx;
    run(&alone, 0, &live[0], &page);
    run(&together, 1, &live[1], &page);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < N_QUESTIONS; k++)
            printf("%-8s %-18s %s\n", names[i], questions[k], together.said[i][k]);
    printf("and %d others\n\n", N_CHARACTERS - 4);
    printf("%-34s %12s %12s\n", "", "alone", "with a table");
    printf("%-34s %12lu %12lu\n", "tokens of prompts", (unsigned long)alone.n_asked,
        (unsigned long)together.n_asked);
    printf("%-34s %12lu %12lu\n", "  of them reused", (unsigned long)alone.n_reused,
        (unsigned long)together.n_reused);
    printf("%-34s %12.2f %12.2f\n", "K and V held, MB", (double)live[0] * (double)page / 1e6,
        (double)live[1] * (double)page / 1e6);
    for (int k = 0; k < N_QUESTIONS; k++)
        printf("first token of \"%s\"%*s %9.2f ms %9.2f ms\n", questions[k],
            (int)(17 - strlen(questions[k])), "", alone.first_token[k] * 1e3 / (N_CHARACTERS - 1),
            together.first_token[k] * 1e3 / (N_CHARACTERS - 1));
    kvc_ctx_free(alone.ctx);
    kvc_model_close(alone.model);
    if (memcmp(alone.said, together.said, sizeof alone.said) == 0) return 0;
    printf("the two runs differ\n");
    return 1;
}
