/* zoo.h - a small random model of each kind that there is a golden model of

   Each has what its architecture has, with numbers so that leaving any of it out moves some logit
   by more than 0.01 (the form of GELU: by 0.001): windows are shorter than the text, caps and
   clamps are reached, scales are far from 1. Some widths are no multiples of 16. Names ending in a
   number format have their matrices in it. */
#ifndef ZOO_H
#define ZOO_H

#include "gguf_write.h"

typedef struct zoo_entry {
    const char *name;
    model_shape shape;
} zoo_entry;

/* A text of so many tokens, in a context as long, by which longrope's factors are chosen. */
#define ZOO_TEXT 64

/* Token i of the text. With it no router is so undecided that rounding could change its choice: the
   last chosen and the first rejected expert or group are 0.001 apart. Seeds are chosen for that. */
static inline int32_t zoo_token(size_t i) {
    return (int32_t)(i ? 3 + (i * i * 37 + i * 101) % 280 : 1);
}

#define ZOO_VOCAB .n_vocab = 290, .n_ctx = 256, .epsilon = 0.01f
#define ZOO_GQA ZOO_VOCAB, .n_heads = 4, .n_kv_heads = 2
#define ZOO_LATENT ZOO_VOCAB, .head_dim = 24, .head_dim_v = 12, .rope_dim = 8, .n_ff = 96
#define ZOO_EXPERTS .arch = "deepseek2", ZOO_LATENT, .n_dense = 1, .n_ff_exp = 24
#define ZOO_YARN .rope = MODEL_ROPE_YARN, .rope_orig_ctx = 40

static const zoo_entry zoo[] = {
    /* ---- llama and what is near it ---- */
    {"llama", {ZOO_GQA, .n_ff = 112}},
    {"llama-tied", {ZOO_VOCAB, .n_kv_heads = 1, .n_layers = 3, .n_embd = 72, .n_ff = 100,
        .tied = 1}},
    {"llama-head-dim", {ZOO_GQA, .head_dim = 24, .n_embd = 72}},
    {"llama-bias", {ZOO_GQA, .biases = 1}},
    {"llama-linear", {ZOO_GQA, .rope = MODEL_ROPE_LINEAR}},
    {"llama-yarn", {ZOO_VOCAB, .n_heads = 2, .n_kv_heads = 1, ZOO_YARN}},
    {"llama-rope-freqs", {ZOO_GQA, .rope_base = 500000.0f, .rope_freqs = 1}},
    {"llama-window", {ZOO_GQA, .n_layers = 3, .window = 16}},
    {"llama-pattern", {ZOO_GQA, .n_layers = 4, .window = 12, .pattern = 2}},
    {"llama-q8_0", {ZOO_GQA, .type = GGUF_Q8_0}},
    {"llama-q4_0", {ZOO_GQA, .n_embd = 96, .type = GGUF_Q4_0}},
    {"llama-f16", {ZOO_GQA, .n_embd = 56, .type = GGUF_F16}},
    {"qwen2", {.arch = "qwen2", ZOO_GQA, .rope_base = 1e6f}},
    {"qwen2-q4_0", {.arch = "qwen2", ZOO_GQA, .type = GGUF_Q4_0}},
    {"qwen3", {.arch = "qwen3", ZOO_GQA, .head_dim = 32, .n_ff = 96, .rope_base = 1e6f}},
    {"smollm3", {.arch = "smollm3", ZOO_GQA, .n_layers = 4, .n_ff = 80, .tied = 1}},
    {"granite", {.arch = "granite", ZOO_GQA, .attn_scale = 0.4f, .embd_scale = 3.0f,
        .residual_scale = 0.4f, .logit_scale = 0.6f, .tied = 1}},
    {"glm4", {.arch = "glm4", ZOO_GQA, .rope_dim = 8, .n_ff = 112}},
    {"olmo2", {.arch = "olmo2", ZOO_VOCAB, .n_layers = 3, .n_ff = 80}},
    {"minicpm3", {.arch = "minicpm3", ZOO_VOCAB, .head_dim = 24, .rope_dim = 8, .q_rank = 32,
        .n_layers = 3, .tied = 1}},

    /* ---- gemma and phi ---- */
    {"gemma", {.arch = "gemma", ZOO_VOCAB, .n_kv_heads = 1, .head_dim = 32, .n_ff = 96,
        .tied = 1}},
    {"gemma-q8_0", {.arch = "gemma", ZOO_VOCAB, .n_kv_heads = 1, .head_dim = 32, .n_ff = 96,
        .tied = 1, .type = GGUF_Q8_0}},
    {"gemma2", {.arch = "gemma2", ZOO_GQA, .n_layers = 4, .n_embd = 48, .head_dim = 16, .n_ff = 88,
        .window = 16, .score_cap = 3.0f, .logit_cap = 5.0f, .tied = 1}},
    {"gemma3", {.arch = "gemma3", ZOO_GQA, .n_layers = 7, .n_embd = 48, .head_dim = 16, .n_ff = 64,
        .window = 16, .rope_base = 1e6f, .rope = MODEL_ROPE_LINEAR, .rope_factor = 8.0f,
        .tied = 1}},
    {"gemma3-noscale", {.arch = "gemma3", ZOO_VOCAB, .n_kv_heads = 1, .n_layers = 6, .n_embd = 48,
        .head_dim = 16, .n_ff = 64, .window = 20, .rope_base = 1e6f, .tied = 1}},
    {"phi2", {.arch = "phi2", ZOO_VOCAB, .rope_dim = 8, .n_ff = 150}},
    {"phi2-fused", {.arch = "phi2", ZOO_VOCAB, .n_heads = 2, .rope_dim = 12, .fused = 1}},
    {"phi3", {.arch = "phi3", ZOO_GQA, .window = 262144}},
    {"phi3-window", {.arch = "phi3", ZOO_VOCAB, .n_ff = 112, .window = 20}},
    {"phi3-long-short", {.arch = "phi3", ZOO_VOCAB, .n_heads = 2, .rope = MODEL_ROPE_LONG,
        .rope_orig_ctx = 128, .attn_factor = 1.2f, .window = 262144}},
    {"phi3-long-long", {.arch = "phi3", ZOO_GQA, .rope = MODEL_ROPE_LONG, .rope_orig_ctx = 32,
        .attn_factor = 1.26f, .window = 262144}},
    {"phi3-q4_0", {.arch = "phi3", ZOO_GQA, .type = GGUF_Q4_0}},

    /* ---- LayerNorm ---- */
    {"gpt2", {.arch = "gpt2", .n_vocab = 290, .n_ctx = 128, .epsilon = 0.01f, .n_ff = 180}},
    {"gpt2-tied", {.arch = "gpt2", ZOO_VOCAB, .n_heads = 2, .tied = 1}},
    {"gptneox", {.arch = "gptneox", ZOO_VOCAB, .rope_dim = 4, .n_ff = 160}},
    {"gptneox-seq", {.arch = "gptneox", ZOO_VOCAB, .n_heads = 2, .rope_dim = 16, .sequential = 1}},
    {"bloom", {.arch = "bloom", ZOO_VOCAB, .n_layers = 3, .n_ff = 104}},
    {"mpt", {.arch = "mpt", ZOO_VOCAB, .n_embd = 96, .n_heads = 6, .n_ff = 112, .tied = 1}},
    {"mpt-clamp", {.arch = "mpt", ZOO_VOCAB, .clamp = 1.0f}},
    {"falcon", {.arch = "falcon", ZOO_VOCAB, .n_kv_heads = 1, .n_ff = 192}},
    {"falcon-40b", {.arch = "falcon", ZOO_GQA, .n_ff = 190, .two_norms = 1}},
    {"stablelm", {.arch = "stablelm", ZOO_GQA, .rope_dim = 4, .n_ff = 112}},
    {"stablelm-12b", {.arch = "stablelm", ZOO_GQA, .rope_dim = 4, .qk_norm = 1, .one_norm = 1}},
    {"starcoder2", {.arch = "starcoder2", ZOO_GQA, .rope_base = 1e5f, .n_ff = 196}},
    {"command-r", {.arch = "command-r", ZOO_GQA, .logit_scale = 0.5f, .tied = 1}},
    {"command-r-norm", {.arch = "command-r", ZOO_GQA, .logit_scale = 0.25f, .qk_norm = 1,
        .tied = 1}},
    {"cohere2", {.arch = "cohere2", ZOO_GQA, .n_layers = 4, .n_ff = 80, .window = 16,
        .logit_scale = 0.5f, .tied = 1}},

    /* ---- experts ---- */
    {"mixtral", {ZOO_GQA, .n_ff = 48, .rope_base = 1e6f, .n_experts = 4, .seed = 4}},
    {"mixtral-q8_0", {ZOO_GQA, .n_ff = 64, .n_experts = 4, .type = GGUF_Q8_0, .seed = 3}},
    {"qwen2moe", {.arch = "qwen2moe", ZOO_GQA, .n_ff = 72, .n_experts = 6, .n_ff_exp = 24,
        .seed = 1}},
    {"qwen3moe", {.arch = "qwen3moe", ZOO_GQA, .head_dim = 32, .n_ff = 96, .n_experts = 6,
        .rope_base = 1e6f, .n_experts_used = 3, .n_ff_exp = 24, .seed = 235}},
    {"qwen3moe-q4_0", {.arch = "qwen3moe", ZOO_GQA, .head_dim = 32, .n_ff = 96, .n_experts = 6,
        .rope_base = 1e6f, .n_experts_used = 3, .n_ff_exp = 32, .type = GGUF_Q4_0, .seed = 180}},
    {"olmoe", {.arch = "olmoe", ZOO_VOCAB, .n_ff = 24, .n_experts = 6, .n_experts_used = 3,
        .seed = 16}},
    {"gpt-oss", {.arch = "gpt-oss", ZOO_GQA, .head_dim = 32, .n_ff = 24, ZOO_YARN, .window = 16,
        .rope_base = 150000.0f, .n_experts = 5, .n_ff_exp = 24}},
    {"deepseek2", {ZOO_EXPERTS, .q_rank = 32, ZOO_YARN, .yarn_log = 0.2f, .n_experts = 5,
        .n_shared = 2, .gating = 1, .expert_scale = 1.5f}},
    {"deepseek2-v3", {ZOO_EXPERTS, .q_rank = 24, .kv_rank = 28, .n_experts = 12,
        .n_experts_used = 3, .n_groups = 4, .n_groups_used = 2, .n_shared = 1, .gating = 2,
        .expert_probs = 1, .expert_norm = 1, .expert_scale = 2.5f, .seed = 1}},
    {"deepseek2-lite", {ZOO_EXPERTS, .n_layers = 3, ZOO_YARN, .yarn_log = 0.15f, .n_experts = 9,
        .n_groups = 3, .n_groups_used = 1, .n_shared = 2, .seed = 402}},
    {"deepseek2-kb", {ZOO_EXPERTS, .q_rank = 32, ZOO_YARN, .yarn_log = 0.1f, .split_latent = 1,
        .n_experts = 5, .n_shared = 2, .gating = 2, .expert_probs = 1, .expert_norm = 1,
        .expert_scale = 1.5f, .seed = 1}},
    {"deepseek2-q8_0", {.arch = "deepseek2", ZOO_VOCAB, .head_dim = 48, .head_dim_v = 32,
        .rope_dim = 16, .q_rank = 32, .kv_rank = 32, .n_dense = 1, .n_ff_exp = 32, .n_experts = 5,
        .n_shared = 1, .type = GGUF_Q8_0, .seed = 2}},
    {"deepseek2-kb-q8_0", {.arch = "deepseek2", ZOO_VOCAB, .head_dim = 48, .head_dim_v = 32,
        .rope_dim = 16, .kv_rank = 32, .split_latent = 1, .n_dense = 1, .n_ff_exp = 32,
        .n_experts = 5, .n_shared = 1, .type = GGUF_Q8_0, .seed = 2}}
};

#define ZOO_SIZE (sizeof zoo / sizeof *zoo)

#endif
