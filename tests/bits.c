/* bits - prints fingerprints of logits, to compare machines; it needs no library

   One line for each tensor type and KV type: "TYPE KV HASH", computed with the best instruction set
   here. Then kernels as these models do not use them: "ROWS all HASH" for those that take rows, and
   "KEYS KV HASH" for attention with caps, slopes, sinks and values that lie in keys. The lines of
   any two builds must be equal, whatever the processor: compare them by diff. With --all-isa every
   instruction set that runs here is tried, and the exit status is 1 if one gives another hash. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#define TESTING_ALONE
#include "testing.h"

#define N 300                   /* past the first span of attention */

static const struct {
    const char *name;
    model_shape shape;
} models[] = {
#define SIZES .n_embd = 64, .n_heads = 8, .n_kv_heads = 2, .head_dim = 20, .n_vocab = 48
    {"F32", {.n_embd = 52, .n_heads = 3, .n_kv_heads = 1, .head_dim = 18, .n_ff = 1101,
             .n_vocab = 45}},   /* longer than a chunk of float products, as the next */
    {"F16", {SIZES, .n_ff = 2110, .type = GGUF_F16, .rope_freqs = 1}},
    {"BF16", {SIZES, .n_ff = 96, .type = GGUF_BF16, .window = 40}},
    {"Q8_0", {SIZES, .n_ff = 96, .type = GGUF_Q8_0, .rope = MODEL_ROPE_YARN, .biases = 1}},
    {"Q4_0", {SIZES, .n_ff = 96, .type = GGUF_Q4_0, .tied = 1}}
};

/* Lines of new types come after all others. */
static const struct {
    const char *name;
    kvc_kv_type type;
} kvs[] = {
    {"f32", KVC_KV_F32}, {"f16", KVC_KV_F16}, {"q8", KVC_KV_Q8}, {"q4", KVC_KV_Q4}
};

/* A prefill that asks for some rows, then decoded tokens. */
static uint64_t fingerprint(const rig *r, kvc_kv_type kv, kvc_isa isa) {
    kvc_cache *cache = new_cache(r, N, 1, 0, kv);
    kvc_ctx *ctx = new_ctx(r, 64, 1, isa);
    kvc_seq *seq = new_seq(cache);
    kvc_token text[N];
    size_t n = N - 8, i;
    uint64_t hash = 1;
    const float *logits;
    random_tokens(text, N, r->info.n_vocab, 1);
    for (i = 0; i < n; i += 73) {
        OK(kvc_prefill(ctx, seq, text + i, n - i < 73 ? n - i : 73, &logits, &last));
        hash = hash_floats(logits, r->info.n_vocab, hash);
    }
    for (i = n; i < N; i++) {
        OK(kvc_decode(ctx, seq, text[i], &logits, &last));
        hash = hash_floats(logits, r->info.n_vocab, hash);
    }
    kvc_seq_close(seq);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    return hash;
}

/* The number of instruction sets that disagree with the best one. */
static int check_isas(const rig *r, kvc_kv_type kv, uint64_t want) {
    kvc_isa isa[5];
    const char *name[5];
    size_t n = isas_here(r, isa, name), i;
    int bad = 0;
    for (i = 0; i + 1 < n; i++) {           /* the last is the best */
        uint64_t got = fingerprint(r, kv, isa[i]);
        if (got == want) continue;
        printf("  %s gives %08lx%08lx\n", name[i], (unsigned long)(got >> 32),
            (unsigned long)(got & 0xffffffffu));
        bad++;
    }
    return bad;
}

/* ---- kernels alone ---- */

static void random_floats(float *x, size_t n, float reach, uint64_t *state) {
    size_t i;
    for (i = 0; i < n; i++)
        x[i] = (float)((int32_t)(model_random(state) >> 40) - 8388608) * (reach / 8388608.0f);
}

static void put_f16(unsigned char *to, float x) {
    uint16_t half = kvc__f32_to_f16(x);
    memcpy(to, &half, 2);
}

/* Those that take rows. */
static uint64_t rows_fingerprint(const kvc__kernels *k) {
    enum { WIDTH = 333 };
    float x[WIDTH], y[WIDTH], w[WIDTH], b[WIDTH];
    uint64_t state = 3, hash = 1;
    int act, round;
    for (round = 0; round < 6; round++) {
        float reach = round % 3 == 0 ? 0.7f : round % 3 == 1 ? 7.0f : 200.0f;
        random_floats(x, WIDTH, reach, &state);
        random_floats(w, WIDTH, 1.5f, &state);
        random_floats(b, WIDTH, 9.0f, &state);
        k->layer_norm(y, x, w, round % 2 ? b : NULL, WIDTH, 1e-5f);
        hash = hash_floats(y, WIDTH, hash);
        for (act = KVC__ACT_SILU; act <= KVC__ACT_CLAMPED; act++) {
            int gated = round % 2 || act == KVC__ACT_CLAMPED;
            memcpy(y, x, sizeof y);
            k->activate(y, gated ? b : NULL, WIDTH, (kvc__act)act);
            hash = hash_floats(y, WIDTH, hash);
        }
        k->accumulate(y, x, 0.3f, WIDTH);
        hash = hash_floats(y, WIDTH, hash);
        k->soft_cap(x, 11.0f, WIDTH);
        k->clamp(x, 8.0f, WIDTH);
        k->multiply(x, 1.7f, WIDTH);
        hash = hash_floats(x, WIDTH, hash);
    }
    return hash;
}

#define KEY 208u                /* 48 elements that are turned, then the values; rotated by 16 */
#define TURNED 48u
#define VALUE (KEY - TURNED)
#define HEADS 7u
#define ROWS 3u

/* Three rows behind 300 slots with a gap, in one page: cap, slopes, sinks, values in keys. */
static uint64_t keys_fingerprint(const kvc__kernels *k, kvc_kv_type type) {
    const size_t size = 512 * kvc__kv_row(type, KEY);
    const uint32_t slots = 300, blocks = (KEY + 31) / 32;
    uint64_t state = 5, hash;
    unsigned char *keys = (unsigned char *)gguf_must(malloc(size));
    float *q = (float *)gguf_must(malloc(ROWS * HEADS * KEY * sizeof *q));
    float *work = (float *)gguf_must(malloc(sizeof *q *
        kvc__attn_floats(ROWS * HEADS, KEY, VALUE)));
    float *sums = (float *)gguf_must(malloc(ROWS * HEADS * kvc__part_floats(VALUE) * sizeof *q));
    float *out = (float *)gguf_must(malloc(ROWS * HEADS * VALUE * sizeof *q));
    float turns[2 * TURNED], slopes[HEADS], sinks[HEADS];
    kvc__extent extents[2];
    kvc__plane plane;
    kvc__slab slab;
    kvc__leaf leaf, *ring = &leaf;
    kvc__attn a;
    size_t i;
    memset(&slab, 0, sizeof slab);
    memset(&leaf, 0, sizeof leaf);
    memset(extents, 0, sizeof extents);
    memset(&a, 0, sizeof a);
    random_floats(q, ROWS * HEADS * KEY, 0.5f, &state);
    random_floats(turns, 2 * TURNED, 1.0f, &state);
    random_floats(slopes, HEADS, 0.1f, &state);
    random_floats(sinks, HEADS, 3.0f, &state);
    for (i = 0; i < size; i++) keys[i] = (unsigned char)(model_random(&state) >> 56);
    for (i = 0; !kvc__kv_coded(type) && i < size; i += kvc__kv_size(type)) {
        float x;
        random_floats(&x, 1, 1.5f, &state);
        if (type == KVC_KV_F16) put_f16(keys + i, x);
        else memcpy(keys + i, &x, 4);
    }
    for (i = 0; kvc__kv_coded(type) && i < 512 * blocks; i++) {
        const uint32_t pos = (uint32_t)i / blocks;
        unsigned char *tile = keys + pos / 16 * (16 * kvc__kv_row(type, KEY));
        kvc__kv_place place = kvc__key_place(type, tile, pos % 16, (uint32_t)i % blocks);
        float scale = type == KVC_KV_Q8 ? 0.01f : 0.2f;
        random_floats(&scale, 1, scale, &state);
        put_f16(place.scale, scale);
    }
    extents[0].end = 101;
    extents[0].gap = 20;
    extents[1].slot = 121;
    extents[1].end = slots;
    plane.k = keys;
    plane.v = NULL;
    slab.n_pages = 1;
    slab.planes = &plane;
    a.q = q;
    a.out = out;
    a.q_stride = HEADS * KEY;
    a.out_stride = HEADS * VALUE;
    a.slabs = &slab;
    a.k_piece = size;
    a.ring = &ring;
    a.ring_cap = 1;
    a.page_shift = 9;
    a.extents = extents;
    a.n_extents = 2;
    a.turns = turns;
    a.rope_dim = TURNED;
    a.apart = 1;
    a.n_rows = ROWS;
    a.n_q = HEADS;
    a.head_dim = KEY;
    a.head_dim_v = a.v_stride = VALUE;
    a.slot = slots;
    a.soft_cap = 9.0f;
    a.slopes = slopes;
    a.sinks = sinks;
    a.v_in_k = 1;
    a.v_from = TURNED;
    a.to = kvc__span_end(extents, 2, slots + ROWS - 1);
    a.type_k = type;
    a.state = sums;
    a.work = work;
    k->attention(&a);
    a.from = a.to;
    k->attention_merge(&a);
    hash = hash_floats(out, ROWS * HEADS * VALUE, 1);
    free(keys);
    free(q);
    free(work);
    free(sums);
    free(out);
    return hash;
}

/* Prints the best set's; the number of others that disagree, if they are asked for. */
static int kernels_line(size_t kv, int all) {
    const kvc__kernels *best = kvc__kernels_pick(KVC_ISA_BEST), *k;
    const int keys = kv < COUNT(kvs);
    uint64_t want = keys ? keys_fingerprint(best, kvs[kv].type) : rows_fingerprint(best), got;
    int bad = 0, cap;
    printf("%s %s %08lx%08lx\n", keys ? "KEYS" : "ROWS", keys ? kvs[kv].name : "all",
        (unsigned long)(want >> 32), (unsigned long)(want & 0xffffffffu));
    for (cap = KVC_ISA_BASE; all && cap < (int)best->isa; cap++) {
        k = kvc__kernels_pick((kvc_isa)cap);
        if (k->isa != (kvc_isa)cap) continue;
        got = keys ? keys_fingerprint(k, kvs[kv].type) : rows_fingerprint(k);
        if (got == want) continue;
        printf("  %s gives %08lx%08lx\n", k->name, (unsigned long)(got >> 32),
            (unsigned long)(got & 0xffffffffu));
        bad++;
    }
    return bad;
}

int main(int argc, char **argv) {
    int all = argc == 2 && !strcmp(argv[1], "--all-isa"), bad = 0;
    size_t i, kv, round;
    if (argc > 1 && !all) {
        fprintf(stderr, "usage: bits [--all-isa]\n");
        return 2;
    }
    for (round = 0; round < 2; round++)         /* floats, then quantized types */
        for (i = 0; i < COUNT(models); i++) {
            rig r;
            rig_open(&r, &models[i].shape);
            for (kv = 2 * round; kv < 2 * round + 2; kv++) {
                uint64_t hash = fingerprint(&r, kvs[kv].type, KVC_ISA_BEST);
                printf("%s %s %08lx%08lx\n", models[i].name, kvs[kv].name,
                    (unsigned long)(hash >> 32), (unsigned long)(hash & 0xffffffffu));
                if (all) bad += check_isas(&r, kvs[kv].type, hash);
            }
            rig_close(&r);
        }
    for (i = 0; i <= COUNT(kvs); i++)
        bad += kernels_line(i == 0 ? COUNT(kvs) : i - 1, all);
    return bad != 0;
}
