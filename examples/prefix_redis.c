/* prefix_redis: processes, also on several machines, share what they have read through Redis.

       prefix_redis [HOST [PORT [MODEL.gguf]]] < lines

   Each line is the name of a file with a character's description and a question to it. The program
   prints the likeliest reply and where the tokens of the prompt came from. Each whole page that it
   computes it puts into Redis, and what any other process with the same model has put there it does
   not compute again. Lines are conversations of their own, over one prefix table.
   Redis is a second tier (kvc_tier): a page is a value under the page's key. Nothing depends on it.
   If it is gone, slow, empty or full of something else, the tokens are computed, and the reply is
   the same. */
#define _DEFAULT_SOURCE   /* struct timeval */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <hiredis.h>

#define KVC_IMPLEMENTATION
#include "../kvc.h"

enum { TEXT = 4096, TOKENS = 2048, REPLY = 96, PIPELINE = 64 };

/* All processes must have the same 16 bytes, and nobody else: who knows them can make up pages. */
static const char prefix_key[] = "kvc.h's example!";

static const struct timeval patience = {0, 100000};
static const char day[] = "86400";      /* seconds that Redis keeps a page */

/* ---- Redis as a tier ----
   The functions are called by whoever is in a step; here that is one thread, so that one connection
   without a lock will do. */

typedef struct server {
    const char *host;
    int port;
    redisContext *redis;                /* NULL: there is none at the moment */
    time_t retry;                       /* not before then */
    unsigned char sent[PIPELINE][KVC_TIER_KEY];     /* GETs whose replies are on their way: */
    uint32_t n_sent, n_read;
} server;

static void server_drop(server *s)
{
    if (s->redis != NULL) redisFree(s->redis);
    s->redis = NULL;
    s->retry = time(NULL) + 1;
    s->n_sent = s->n_read = 0;
}

static int server_ready(server *s)
{
    if (s->redis != NULL) return 1;
    if (time(NULL) < s->retry) return 0;
    s->redis = redisConnectWithTimeout(s->host, s->port, patience);
    if (s->redis == NULL || s->redis->err || redisSetTimeout(s->redis, patience) != REDIS_OK)
        server_drop(s);
    return s->redis != NULL;
}

/* The next reply; NULL if the server is gone or too slow. */
static redisReply *server_reply(server *s)
{
    void *reply = NULL;
    if (redisGetReply(s->redis, &reply) == REDIS_OK) return reply;
    server_drop(s);
    return NULL;
}

/* Reads replies that nobody asked for in the end. */
static int server_drain(server *s)
{
    while (server_ready(s) && s->n_read < s->n_sent) {
        redisReply *reply = server_reply(s);
        if (reply == NULL) break;
        s->n_read++;
        freeReplyObject(reply);
    }
    return s->redis != NULL;
}

typedef struct key_text {
    char hex[2 * KVC_TIER_KEY + 1];
} key_text;

static key_text spell(const unsigned char *key)
{
    key_text text;
    for (unsigned i = 0; i < KVC_TIER_KEY; i++) snprintf(text.hex + 2 * i, 3, "%02x", key[i]);
    return text;
}

/* All at once, so that the pages come one after the other without a way to and fro for each. */
static void ahead(const unsigned char *keys, uint32_t n, void *user)
{
    server *s = user;
    if (!server_drain(s)) return;
    s->n_sent = s->n_read = 0;
    for (uint32_t i = 0; i < n && i < PIPELINE; i++) {
        if (redisAppendCommand(s->redis, "GET kvc:%s", spell(keys + i * KVC_TIER_KEY).hex)
            != REDIS_OK) {
            server_drop(s);
            return;
        }
        memcpy(s->sent[s->n_sent++], keys + i * KVC_TIER_KEY, KVC_TIER_KEY);
    }
}

static int get(const unsigned char *key, kvc_parcel *parcel, void *user)
{
    server *s = user;
    redisReply *reply = NULL;
    int found = 0;
    if (!server_ready(s)) return 0;
    while (!found && s->n_read < s->n_sent) {
        if (reply != NULL) freeReplyObject(reply);
        reply = server_reply(s);
        if (reply == NULL) return 0;
        found = memcmp(s->sent[s->n_read++], key, KVC_TIER_KEY) == 0;
    }
    if (!found) {
        if (reply != NULL) freeReplyObject(reply);
        if (redisAppendCommand(s->redis, "GET kvc:%s", spell(key).hex) != REDIS_OK) return 0;
        reply = server_reply(s);
        if (reply == NULL) return 0;
    }
    if (reply->type != REDIS_REPLY_STRING) {
        freeReplyObject(reply);
        return 0;
    }
    parcel->data = reply->str;
    parcel->size = reply->len;
    parcel->host = reply;
    return 1;
}

static void get_done(const unsigned char *key, kvc_parcel *parcel, void *user)
{
    (void)key, (void)user;
    freeReplyObject(parcel->host);
}

static int put(const unsigned char *key, kvc_parcel *parcel, void *user)
{
    (void)key;
    if (!server_ready(user)) return 0;
    parcel->data = malloc(parcel->size);
    return parcel->data != NULL;
}

static void put_done(const unsigned char *key, kvc_parcel *parcel, void *user)
{
    server *s = user;
    if (server_drain(s)) {
        redisReply *reply = redisCommand(s->redis, "SET kvc:%s %b EX %s", spell(key).hex,
            parcel->data, parcel->size, day);
        if (reply != NULL) freeReplyObject(reply);
        else server_drop(s);
    }
    free(parcel->data);
}

/* ---- the characters ---- */

static void need(kvc_result result, const kvc_error *err)
{
    if (result == KVC_OK) return;
    fprintf(stderr, "prefix_redis: %s: %s\n", err->where, err->message);
    exit(2);
}

/* The whole file as text, without the line's end; 0 if it cannot be read or is too long. */
static size_t read_file(const char *path, char *text, size_t cap)
{
    FILE *file = fopen(path, "r");
    size_t n = file != NULL ? fread(text, 1, cap, file) : 0;
    if (file != NULL) fclose(file);
    if (n == cap) return 0;
    while (n > 0 && text[n - 1] == '\n') n--;
    return n;
}

/* To see that a run has the same bits as another one (FNV-1a). */
static uint32_t checksum(const float *logits, uint32_t n)
{
    const unsigned char *bytes = (const unsigned char *)logits;
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < n * sizeof *logits; i++) hash = (hash ^ bytes[i]) * 16777619u;
    return hash;
}

static void say(kvc_ctx *ctx, kvc_seq *seq, const kvc_model *model, const float *logits)
{
    kvc_text_stream stream = {0};
    kvc_model_info info;
    kvc_error err;
    char piece[64];
    size_t n;
    kvc_model_query(model, &info);
    for (int i = 0; i < REPLY; i++) {
        kvc_token best = 0;
        for (uint32_t k = 1; k < info.n_tokens; k++)
            if (logits[k] > logits[best]) best = (kvc_token)k;
        if (kvc_token_is_end(model, best)) break;
        need(kvc_text_push(model, &stream, best, piece, sizeof piece, &n, &err), &err);
        fwrite(piece, 1, n, stdout);
        need(kvc_decode(ctx, seq, best, &logits, &err), &err);
    }
    putchar('\n');
}

static void answer(kvc_cache *cache, kvc_ctx *ctx, const kvc_model *model, const char *description,
    size_t size, const char *question)
{
    static char text[2 * TEXT + 64];
    static kvc_token prompt[TOKENS];
    kvc_cache_info before, after;
    kvc_model_info info;
    kvc_seq_info state;
    kvc_error err;
    kvc_seq *seq;
    const float *logits;
    size_t n;
    uint32_t bits;
    int length = snprintf(text, sizeof text, "<|system|>%.*s<|end|><|user|>%s<|end|><|char|>",
        (int)size, description, question);
    need(kvc_tokenize(model, text, (size_t)length, KVC_TEXT_SPECIAL_PARSE, prompt, TOKENS, &n,
        NULL, &err), &err);
    need(kvc_seq_open_shared(&seq, cache, NULL, &err), &err);
    kvc_cache_query(cache, &before);
    need(kvc_prefill(ctx, seq, prompt, n, &logits, &err), &err);
    kvc_cache_query(cache, &after);
    kvc_seq_query(seq, &state);
    kvc_model_query(model, &info);
    printf("> %s\n", question);
    bits = checksum(logits, info.n_vocab);
    say(ctx, seq, model, logits);
    printf("  [%lu tokens: %u reused, %lu computed; Redis gave %lu pages, %lu were not right, and "
        "got %u; logits %08x]\n", (unsigned long)n, (unsigned)state.prefix_hit,
        (unsigned long)n - state.prefix_hit, (unsigned long)(after.tier_got - before.tier_got),
        (unsigned long)(after.tier_refused - before.tier_refused),
        (unsigned)kvc_prefix_flush(cache, 0), (unsigned)bits);
    fflush(stdout);
    kvc_seq_close(seq);
}

int main(int argc, char **argv)
{
    static char line[TEXT], description[TEXT];
    kvc_model_desc model_desc = {0};
    kvc_cache_desc cache_desc = {0};
    kvc_ctx_desc ctx_desc = {0};
    server s = {0};
    kvc_model *model;
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_error err;
    signal(SIGPIPE, SIG_IGN);           /* writing to a server that is gone is a plain error */
    s.host = argc > 1 ? argv[1] : "127.0.0.1";
    s.port = argc > 2 ? atoi(argv[2]) : 6379;
    model_desc.path = argc > 3 ? argv[3] : "examples/models/tavern-f16.gguf";
    need(kvc_model_open(&model, &model_desc, &err), &err);
    cache_desc.model = model;
    cache_desc.n_ctx = 1024;
    cache_desc.page_size = 16;
    cache_desc.n_pages = cache_desc.n_prefix = 512;
    cache_desc.prefix_key = prefix_key;
    cache_desc.tier = (kvc_tier){put, put_done, get, get_done, ahead, &s};
    need(kvc_cache_new(&cache, &cache_desc, &err), &err);
    ctx_desc.model = model;
    need(kvc_ctx_new(&ctx, &ctx_desc, &err), &err);
    while (fgets(line, sizeof line, stdin) != NULL) {
        char *question = strchr(line, ' ');
        size_t size;
        line[strcspn(line, "\n")] = 0;
        if (question == NULL) continue;
        *question++ = 0;
        size = read_file(line, description, sizeof description);
        if (size == 0) {
            fprintf(stderr, "prefix_redis: %s: cannot be read, empty or too long\n", line);
            return 2;
        }
        answer(cache, ctx, model, description, size, question);
    }
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    kvc_model_close(model);
    if (s.redis != NULL) redisFree(s.redis);
    return 0;
}
