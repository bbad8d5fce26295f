#define KVC_IMPLEMENTATION   /* in one file of the program */
#include "kvc.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static kvc_error err;

static void need(kvc_result result)
{
    if (result == KVC_OK) return;
    fprintf(stderr, "%s: %s\n", err.where, err.message);
    exit(1);
}

int main(int argc, char **argv)
{
    const char *path = argc > 1 ? argv[1] : "model.gguf", *prompt = "Once upon a time";
    kvc_model *model;
    kvc_cache *cache;
    kvc_seq *seq;
    kvc_ctx *ctx;
    kvc_sampler *sampler;
    kvc_text_stream stream = {0};
    kvc_token tokens[256], token;
    const float *logits;
    char text[256];
    size_t n, size;

    need(kvc_model_open(&model, &(kvc_model_desc){.path = path}, &err));
    need(kvc_cache_new(&cache, &(kvc_cache_desc){.model = model}, &err));
    need(kvc_seq_open(&seq, cache, &err));
    need(kvc_ctx_new(&ctx, &(kvc_ctx_desc){.model = model, .n_threads = 2}, &err));
    need(kvc_sampler_new(&sampler, &(kvc_sampler_desc){.model = model, .temperature = 0.8f}, &err));

    need(kvc_tokenize(model, prompt, strlen(prompt), KVC_TEXT_SPECIAL_ADD, tokens, 256, &n,
        NULL, &err));
    need(kvc_prefill(ctx, seq, tokens, n, &logits, &err));
    for (int i = 0; i < 100; i++) {
        need(kvc_sampler_sample(sampler, logits, &token, &err));
        if (kvc_token_is_end(model, token)) break;
        need(kvc_text_push(model, &stream, token, text, sizeof text, &size, &err));
        fwrite(text, 1, size, stdout);
        need(kvc_decode(ctx, seq, token, &logits, &err));
    }
    putchar('\n');

    kvc_sampler_free(sampler);
    kvc_ctx_free(ctx);
    kvc_seq_close(seq);
    kvc_cache_free(cache);
    kvc_model_close(model);
    return 0;
}
