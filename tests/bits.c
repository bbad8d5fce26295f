/* bits - prints fingerprints of logits, to compare machines; it needs no library

   One line for each tensor type and KV type: "TYPE KV HASH", computed with the best instruction set
   here. The lines of any two builds must be equal, whatever the processor: compare them by diff.
   With --all-isa every instruction set that runs here is tried, and the exit status is 1 if one
   gives another hash. */
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
    return bad != 0;
}
