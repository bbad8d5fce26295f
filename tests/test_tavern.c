/* Meaning: the tavern model answers 200 held-out questions through the public API, greedily.
   A reply counts only if it is the expected one, letter for letter. The questions are in
   examples/models/eval.txt: their names, goods and places were never seen in training, so every
   fact must be read from the description, up to 900 tokens back. Runs in the repository's root;
   TAVERN names another folder of models. */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include "testing.h"

#ifndef TAVERN
#define TAVERN "examples/models/"
#endif

#define N_ITEMS 200
#define N_REPLY 64              /* most tokens of a reply */
#define N_RANGES 5
enum { UNKNOWABLE, NEAR, MIDDLE, FAR, FARTHEST };

/* ---- the questions ---- */

typedef struct item {
    char kind[16];
    unsigned distance;          /* tokens between the fact and the reply, 0: unknowable */
    char *prompt;               /* the whole dialogue with its markers; a reply is to follow */
    const char *want;
} item;

static char *eval_text;
static item items[N_ITEMS];
static size_t n_items;

static char *read_text(const char *path) {
    FILE *f = fopen(path, "rb");
    char *text = NULL;
    long n = 0;
    assert_non_null(f);
    assert_true(!fseek(f, 0, SEEK_END) && (n = ftell(f)) > 0 && !fseek(f, 0, SEEK_SET));
    text = (char *)gguf_must(malloc((size_t)n + 1));
    assert_true(fread(text, 1, (size_t)n, f) == (size_t)n);
    text[n] = 0;
    fclose(f);
    return text;
}

/* A line's first word tells what it is; the lines of a dialogue become the prompt. */
static void read_line(item *it, char *line) {
    char *rest = strchr(line, ' ');
    size_t used = strlen(it->prompt);
    assert_non_null(rest);
    *rest++ = 0;
    if (!strcmp(line, "want")) it->want = rest;
    else sprintf(it->prompt + used, "<|%s|>%s<|end|>", line, rest);
}

static void read_items(void) {
    char *line, *next;
    eval_text = read_text(TAVERN "eval.txt");
    for (line = eval_text; line; line = next) {
        next = strchr(line, '\n');
        if (next) *next++ = 0;
        if (!*line || *line == '#') continue;
        if (!strncmp(line, "item ", 5)) {
            assert_true(n_items < N_ITEMS);
            items[n_items].prompt = (char *)gguf_must(calloc(1, 16384));
            assert_int_equal(sscanf(line, "item %15s %u", items[n_items].kind,
                &items[n_items].distance), 2);
            n_items++;
        } else {
            assert_true(n_items > 0 && strlen(items[n_items - 1].prompt) + strlen(line) < 16000);
            read_line(&items[n_items - 1], line);
        }
    }
    assert_int_equal(n_items, N_ITEMS);
}

static int range_of(const item *it) {
    unsigned d = it->distance;
    return !d ? UNKNOWABLE : d < 100 ? NEAR : d < 300 ? MIDDLE : d < 600 ? FAR : FARTHEST;
}

/* ---- the model at work ---- */

typedef struct tavern {
    kvc_model *model;
    kvc_cache *cache;
    kvc_ctx *ctx;
} tavern;

static void tavern_open(tavern *t, const char *path, kvc_kv_type kv, uint32_t n_threads) {
    kvc_model_desc model = {.path = path};
    kvc_cache_desc cache = {.n_ctx = 1024, .n_seqs = 2, .type_k = kv, .type_v = kv};
    kvc_ctx_desc ctx = {.n_threads = n_threads};
    OK(kvc_model_open(&t->model, &model, &last));
    cache.model = ctx.model = t->model;
    OK(kvc_cache_new(&t->cache, &cache, &last));
    OK(kvc_ctx_new(&t->ctx, &ctx, &last));
}

static void tavern_close(tavern *t) {
    kvc_ctx_free(t->ctx);
    kvc_cache_free(t->cache);
    kvc_model_close(t->model);
}

static kvc_token largest(const float *logits, size_t n) {
    size_t i, best = 0;
    for (i = 1; i < n; i++) if (logits[i] > logits[best]) best = i;
    return (kvc_token)best;
}

static void prefill_text(const tavern *t, kvc_seq *seq, const char *text, const float **logits) {
    kvc_token tokens[1024];
    size_t n = 0;
    OK(kvc_tokenize(t->model, text, strlen(text), KVC_TEXT_SPECIAL_PARSE, tokens, 1024, &n, NULL,
        &last));
    OK(kvc_prefill(t->ctx, seq, tokens, n, logits, &last));
}

/* A greedy reply as text; the logits of every step go into *hash. */
static void reply_to(const tavern *t, kvc_seq *seq, const float *logits, char text[1024],
    uint64_t *hash) {
    kvc_text_stream stream = {0};
    kvc_model_info info;
    size_t i, n, used = 0;
    kvc_model_query(t->model, &info);
    for (i = 0; i < N_REPLY; i++) {
        kvc_token token = largest(logits, info.n_tokens);
        *hash = hash_floats(logits, info.n_vocab, *hash);
        if (kvc_token_is_end(t->model, token)) break;
        OK(kvc_text_push(t->model, &stream, token, text + used, 1023 - used, &n, &last));
        used += n;
        OK(kvc_decode(t->ctx, seq, token, &logits, &last));
    }
    text[used] = 0;
}

static int answer(const tavern *t, const item *it, char text[1024], uint64_t *hash) {
    const float *logits;
    kvc_seq *seq;
    OK(kvc_seq_open(&seq, t->cache, &last));
    prefill_text(t, seq, it->prompt, NULL);
    prefill_text(t, seq, "<|char|>", &logits);
    reply_to(t, seq, logits, text, hash);
    kvc_seq_close(seq);
    return !strcmp(text, it->want);
}

typedef struct score {
    int right[N_RANGES], all[N_RANGES], n_right;
    uint64_t hash;
} score;

static score evaluate(const char *path, kvc_kv_type kv, size_t every) {
    static const char *const names[N_RANGES] = {"unknowable", "under 100", "100 to 299",
        "300 to 599", "600 and more"};
    char text[1024];
    score s = {{0}, {0}, 0, 0};
    tavern t;
    size_t i;
    int r;
    tavern_open(&t, path, kv, 1);
    for (i = 0; i < n_items; i += every) {
        int right = answer(&t, &items[i], text, &s.hash);
        r = range_of(&items[i]);
        s.n_right += right;
        s.right[r] += right;
        s.all[r]++;
        if (!right) print_message("%s %u: %s\n    not %s\n", items[i].kind, items[i].distance, text,
            items[i].want);
    }
    tavern_close(&t);
    print_message("%s: %d right\n", path, s.n_right);
    for (r = 0; r < N_RANGES; r++)
        print_message("    %-12s  %3d of %3d\n", names[r], s.right[r], s.all[r]);
    return s;
}

/* ---- tests ---- */

static const char f16_path[] = TAVERN "tavern-f16.gguf", q8_path[] = TAVERN "tavern-q8_0.gguf";
static score f16, q8;

static void test_score_f16(void **state) {
    (void)state;
    f16 = evaluate(f16_path, KVC_KV_F32, 1);
    assert_true(f16.n_right >= 180);
}

static void test_score_q8_0(void **state) {
    (void)state;
    q8 = evaluate(q8_path, KVC_KV_F32, 1);
    assert_true(q8.n_right >= 180);
    assert_true(q8.n_right >= f16.n_right - 2 && q8.n_right <= f16.n_right + 2);
}

static void test_far_facts(void **state) {
    (void)state;
    assert_int_equal(f16.all[FARTHEST], 40);
    assert_true(f16.right[FARTHEST] * 10 >= f16.all[FARTHEST] * 9);
    assert_true(q8.right[FARTHEST] * 10 >= q8.all[FARTHEST] * 9);
}

/* K and V of half precision or 8 bits cost no more than a reply in every 40, those of 4 bits no
   more than one in 10. */
static void test_score_kv(void **state) {
    static const kvc_kv_type types[] = {KVC_KV_F16, KVC_KV_Q8, KVC_KV_Q4};
    score full;
    size_t i;
    (void)state;
    full = evaluate(f16_path, KVC_KV_F32, 5);
    for (i = 0; i < COUNT(types); i++) {
        score s = evaluate(f16_path, types[i], 5);
        assert_true(abs(s.n_right - full.n_right) <= (types[i] == KVC_KV_Q4 ? 4 : 1));
    }
}

static void test_same_run_same_bytes(void **state) {
    score a, b;
    (void)state;
    a = evaluate(q8_path, KVC_KV_F32, 10);
    b = evaluate(q8_path, KVC_KV_F32, 10);
    assert_true(a.hash == b.hash && a.n_right == b.n_right);
}

/* A conversation read turn by turn, as a game does, ends in the same bits as the whole at once. */
static void test_turn_by_turn(void **state) {
    size_t i;
    tavern t;
    (void)state;
    tavern_open(&t, f16_path, KVC_KV_F32, 2);
    for (i = 0; i < n_items; i += 41) {
        char text[1024], whole[1024], part[16384];
        uint64_t hash = 0, whole_hash = 0;
        const char *at = items[i].prompt, *end;
        const float *logits;
        kvc_seq *seq;
        answer(&t, &items[i], whole, &whole_hash);
        OK(kvc_seq_open(&seq, t.cache, &last));
        for (; *at; at = end) {
            end = strstr(at, "<|end|>") + strlen("<|end|>");
            memcpy(part, at, (size_t)(end - at));
            part[end - at] = 0;
            prefill_text(&t, seq, part, NULL);
        }
        prefill_text(&t, seq, "<|char|>", &logits);
        reply_to(&t, seq, logits, text, &hash);
        assert_string_equal(text, whole);
        assert_true(hash == whole_hash);
        kvc_seq_close(seq);
    }
    tavern_close(&t);
}

static int set_up(void **state) {
    (void)state;
    read_items();
    return 0;
}

static int tear_down(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < n_items; i++) free(items[i].prompt);
    free(eval_text);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_score_f16), cmocka_unit_test(test_score_q8_0),
        cmocka_unit_test(test_far_facts), cmocka_unit_test(test_score_kv),
        cmocka_unit_test(test_same_run_same_bytes), cmocka_unit_test(test_turn_by_turn)
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
