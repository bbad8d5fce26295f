/* naive.h - what a language model computes, in its plainest form

   The oracle of the tests, and a page to learn from. naive_forward takes a whole text and computes
   everything for every position: no K/V cache, no batching, no float tricks, all in double. It
   shares no code with kvc.h; even the GGUF reader is its own, and it trusts the file.

       naive_model m;
       naive_open(&m, image);
       double *logits = naive_forward(&m, tokens, n);      [n, m.n_vocab]
       free(logits);

   All architectures are one forward pass, which stands at the end of the file; what comes before is
   its vocabulary. They differ in a few rules, a table row for each (naive_rules), in the keys of
   the file, and in the tensors that it has: a bias or a norm that is there is applied. */
#ifndef NAIVE_H
#define NAIVE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- reading GGUF: header, metadata, tensor table, data ---- */

typedef struct naive_value {
    uint32_t type;
    const unsigned char *data;  /* NULL if there is no such key */
    uint64_t size;              /* of a string */
} naive_value;

typedef struct naive_tensor {
    uint32_t type;
    size_t n_in, n_out;         /* length of a row, number of rows */
    const unsigned char *data;  /* NULL if there is no such tensor */
} naive_tensor;

static inline uint64_t naive_read(const unsigned char **p, int n_bytes) {
    uint64_t x = 0;
    int i;
    for (i = 0; i < n_bytes; i++) x |= (uint64_t)(*p)[i] << (8 * i);
    *p += n_bytes;
    return x;
}

/* Steps over one value. The sizes are of the value types 0 to 12; 8 is a string, 9 an array. */
static inline void naive_skip(const unsigned char **p, uint32_t type) {
    static const unsigned char size[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    if (type == 8) {
        uint64_t n = naive_read(p, 8);
        *p += n;
    } else if (type == 9) {
        uint32_t item = (uint32_t)naive_read(p, 4);
        uint64_t n = naive_read(p, 8);
        while (n--) naive_skip(p, item);
    } else {
        *p += size[type];
    }
}

/* Walks the metadata; returns where it ends and, if key is not NULL, the value with this key. */
static inline const unsigned char *naive_walk(const unsigned char *image, const char *key,
    naive_value *out) {
    const unsigned char *p = image + 16;
    uint64_t n = naive_read(&p, 8);
    while (n--) {
        uint64_t size = naive_read(&p, 8);
        int found = key && size == strlen(key) && !memcmp(p, key, (size_t)size);
        uint32_t type;
        p += size;
        type = (uint32_t)naive_read(&p, 4);
        if (found) {
            out->type = type;
            out->data = p;
            if (type == 8) out->size = naive_read(&out->data, 8);
        }
        naive_skip(&p, type);
    }
    return p;
}

static inline double naive_number(const unsigned char *image, const char *key, double otherwise) {
    naive_value v = {0, NULL, 0};
    uint64_t bits;
    float single;
    double wide;
    naive_walk(image, key, &v);
    if (!v.data) return otherwise;
    switch (v.type) {
    case 4: return (double)naive_read(&v.data, 4);
    case 7: return *v.data ? 1 : 0;
    case 10: return (double)naive_read(&v.data, 8);
    case 6:
        bits = naive_read(&v.data, 4);
        memcpy(&single, &bits, 4);      /* little-endian machines */
        return (double)single;
    case 12:
        bits = naive_read(&v.data, 8);
        memcpy(&wide, &bits, 8);
        return wide;
    default: return otherwise;
    }
}

/* `table` is where the metadata ends. */
static inline naive_tensor naive_find(const unsigned char *image, const unsigned char *table,
    uint64_t alignment, const char *name) {
    naive_tensor t = {0, 0, 0, NULL};
    const unsigned char *counts = image + 8, *p = table;
    uint64_t n = naive_read(&counts, 8), offset = 0, end;
    int found = 0;
    while (n--) {
        uint64_t size = naive_read(&p, 8), dims[4] = {1, 1, 1, 1}, at;
        int this_one = size == strlen(name) && !memcmp(p, name, (size_t)size);
        uint32_t n_dims, i, type;
        p += size;
        n_dims = (uint32_t)naive_read(&p, 4);
        for (i = 0; i < n_dims; i++) dims[i] = naive_read(&p, 8);
        type = (uint32_t)naive_read(&p, 4);
        at = naive_read(&p, 8);
        if (this_one) {
            t.type = type;
            t.n_in = (size_t)dims[0];
            t.n_out = (size_t)(dims[1] * dims[2] * dims[3]);
            offset = at;
            found = 1;
        }
    }
    end = (uint64_t)(p - image);
    if (found) t.data = image + (end + alignment - 1) / alignment * alignment + offset;
    return t;
}

/* ---- number formats ---- */

static inline double naive_f16(uint64_t h) {
    double sign = h >> 15 & 1 ? -1.0 : 1.0;
    int exponent = (int)(h >> 10 & 31), fraction = (int)(h & 1023);
    if (exponent == 0) return sign * ldexp(fraction, -24);
    return sign * ldexp(1024 + fraction, exponent - 25);
}

static inline double naive_f32(uint64_t bits) {
    float x;
    uint32_t u = (uint32_t)bits;
    memcpy(&x, &u, 4);
    return (double)x;
}

/* Rounds to half precision: 11 significant bits, multiples of 2^-24 below 2^-14. */
static inline double naive_round_f16(double x) {
    int exponent;
    double unit;
    frexp(x, &exponent);
    unit = ldexp(1.0, exponent < -13 ? -24 : exponent - 11);
    return nearbyint(x / unit) * unit;
}

/* Element i of row r of a tensor. Types 0 F32, 1 F16, 2 Q4_0, 8 Q8_0, 30 BF16. */
static inline double naive_element(const naive_tensor *t, size_t r, size_t i) {
    const unsigned char *p;
    double scale;
    switch (t->type) {
    case 0:
        p = t->data + 4 * (r * t->n_in + i);
        return naive_f32(naive_read(&p, 4));
    case 1:
        p = t->data + 2 * (r * t->n_in + i);
        return naive_f16(naive_read(&p, 2));
    case 30:
        p = t->data + 2 * (r * t->n_in + i);
        return naive_f32(naive_read(&p, 2) << 16);
    case 8:                     /* blocks of 32: scale, 32 signed bytes */
        p = t->data + 34 * ((r * t->n_in + i) / 32);
        scale = naive_f16(naive_read(&p, 2));
        return scale * (double)(signed char)p[i % 32];
    case 2:                     /* blocks of 32: scale, 16 bytes with elements j and j + 16 */
        p = t->data + 18 * ((r * t->n_in + i) / 32);
        scale = naive_f16(naive_read(&p, 2));
        return scale * (double)((i % 32 < 16 ? p[i % 32] & 15 : p[i % 32 - 16] >> 4) - 8);
    default:
        return NAN;
    }
}

/* ---- the architectures ---- */

typedef enum naive_rope_kind {
    NAIVE_NO_ROPE,
    NAIVE_PAIRS,                /* dimensions (2i, 2i + 1) turn together */
    NAIVE_HALVES                /* dimensions (i, i + rope_dim / 2) do */
} naive_rope_kind;

typedef enum naive_activation {
    NAIVE_SILU,
    NAIVE_GELU,                 /* in its tanh form */
    NAIVE_GELU_ERF,             /* in its exact form */
    NAIVE_CLAMPED               /* gpt-oss: see naive_gate */
} naive_activation;

typedef enum naive_order {
    NAIVE_SEQUENTIAL,           /* the FFN sees what the attention added */
    NAIVE_PARALLEL,             /* both see the same, and both are added */
    NAIVE_BY_KEY,               /* use_parallel_residual; parallel if there is no such key */
    NAIVE_BY_NORM               /* layers without a ffn_norm are parallel */
} naive_order;

typedef enum naive_gating {     /* what a router's logits become; as in expert_gating_func */
    NAIVE_SOFTMAX = 1,          /* over all experts */
    NAIVE_SIGMOID = 2,
    NAIVE_SOFTMAX_CHOSEN = 3    /* over those that were chosen */
} naive_gating;

/* What neither keys nor tensors tell. Zero is the ordinary case. */
typedef struct naive_rule {
    const char *name;           /* general.architecture */
    naive_rope_kind rope;
    naive_activation act;
    naive_order order;
    int layer_norm;             /* LayerNorm in place of RMSNorm, for queries and keys too */
    const char *ffn_norm;       /* the norm before the FFN, if it is not "ffn_norm" */
    size_t window, pattern;     /* attention.sliding_window and _pattern where there is no key */
    double local_base;          /* rope.freq_base of layers with a window */
    int local_rope;             /* only layers with a window turn */
    size_t still;               /* every so manieth layer does not turn */
    double alibi;               /* attention.max_alibi_bias where there is no key */
    double score_cap, logit_cap;        /* the same for the soft caps */
    int embd_root;              /* embeddings times sqrt(n_embd) */
    double embd_scale;          /* embedding_scale where there is no key */
    double depth_scale;         /* both branches times this / sqrt(n_layers) */
    double base_width;          /* logits times this / n_embd */
    double logit_scale;         /* logit_scale where there is no key */
    int divide_logits;          /* logit_scale divides */
    int scores_yarn;            /* YaRN lengthens the scores, not the vectors */
    naive_gating gating;        /* 0: softmax */
    int renormalise;            /* the chosen experts' weights add up to 1 */
} naive_rule;

static const naive_rule naive_rules[] = {
    {.name = "llama", .rope = NAIVE_PAIRS, .renormalise = 1},
    {.name = "qwen2", .rope = NAIVE_HALVES},
    {.name = "qwen3", .rope = NAIVE_HALVES},
    {.name = "qwen2moe", .rope = NAIVE_HALVES},
    {.name = "qwen3moe", .rope = NAIVE_HALVES, .renormalise = 1},
    {.name = "gemma", .rope = NAIVE_HALVES, .act = NAIVE_GELU, .embd_root = 1},
    {.name = "gemma2", .rope = NAIVE_HALVES, .act = NAIVE_GELU, .embd_root = 1, .window = 4096,
        .pattern = 2, .score_cap = 50, .logit_cap = 30},
    {.name = "gemma3", .rope = NAIVE_HALVES, .act = NAIVE_GELU, .embd_root = 1, .pattern = 6,
        .local_base = 10000},
    {.name = "phi2", .rope = NAIVE_HALVES, .act = NAIVE_GELU, .layer_norm = 1,
        .order = NAIVE_PARALLEL},
    {.name = "phi3", .rope = NAIVE_HALVES},
    {.name = "gpt2", .act = NAIVE_GELU, .layer_norm = 1},
    {.name = "gptneox", .rope = NAIVE_HALVES, .act = NAIVE_GELU_ERF, .layer_norm = 1,
        .order = NAIVE_BY_KEY},
    {.name = "bloom", .act = NAIVE_GELU, .layer_norm = 1, .alibi = 8},
    {.name = "mpt", .act = NAIVE_GELU_ERF, .layer_norm = 1},
    {.name = "falcon", .rope = NAIVE_HALVES, .act = NAIVE_GELU_ERF, .layer_norm = 1,
        .order = NAIVE_PARALLEL},
    {.name = "stablelm", .rope = NAIVE_HALVES, .layer_norm = 1, .order = NAIVE_BY_NORM},
    {.name = "olmo2", .rope = NAIVE_HALVES},
    {.name = "olmoe", .rope = NAIVE_HALVES},
    {.name = "starcoder2", .rope = NAIVE_HALVES, .act = NAIVE_GELU, .layer_norm = 1},
    {.name = "granite", .rope = NAIVE_PAIRS, .divide_logits = 1},
    {.name = "command-r", .rope = NAIVE_PAIRS, .layer_norm = 1, .order = NAIVE_PARALLEL,
        .logit_scale = 0.0625},
    {.name = "cohere2", .rope = NAIVE_PAIRS, .layer_norm = 1, .order = NAIVE_PARALLEL,
        .pattern = 4, .local_rope = 1, .logit_scale = 0.0625},
    {.name = "smollm3", .rope = NAIVE_PAIRS, .still = 4},
    {.name = "gpt-oss", .rope = NAIVE_HALVES, .act = NAIVE_CLAMPED, .pattern = 2,
        .ffn_norm = "post_attention_norm", .gating = NAIVE_SOFTMAX_CHOSEN},
    {.name = "glm4", .rope = NAIVE_PAIRS},
    {.name = "deepseek2", .rope = NAIVE_PAIRS, .scores_yarn = 1},
    {.name = "minicpm3", .rope = NAIVE_HALVES, .embd_scale = 12, .depth_scale = 1.4,
        .base_width = 256}
};

/* ---- the model ---- */

/* A rule with what the file's keys say put in; a test may change fields after naive_open. */
typedef struct naive_model {
    const unsigned char *image;
    const unsigned char *table; /* of tensors */
    uint64_t alignment;
    naive_rule rule;
    size_t n_layers, n_embd, n_heads, n_kv_heads, head_dim, head_dim_v, n_ff, n_vocab;
    size_t n_ctx;               /* context of the run, which chooses longrope's factors: at first
                                   the file's context_length */
    size_t q_rank, kv_rank;     /* latent attention: lengths of the latent vectors; 0: none */
    double epsilon;
    size_t rope_dim, window;
    size_t pattern;             /* every so many layers, one sees everything; 0: none does */
    const unsigned char *locals;        /* or [n_layers]: 1 for those with the window */
    double rope_base, local_base;       /* local_base 0: as rope_base */
    int rope_linear, rope_yarn;
    double rope_factor, rope_context, yarn_fast, yarn_slow, attn_factor, yarn_log;
    double score_scale, score_cap, logit_cap, alibi, clamp;     /* 0: no cap, slope or clamp */
    double embd_scale, residual_scale, logit_scale;
    size_t n_experts, n_used, n_groups, n_groups_used;
    naive_gating gating;
    int renormalise, parallel;
    double expert_scale;
    int gelu_tanh;              /* set by a test: the tanh form wherever GELU is meant */
    int round_q8;               /* set by a test: activations that meet a quantized matrix are
                                   rounded to 8 bits, as kvc.h does */
    int round_kv;               /* set by a test: K and V are rounded to half precision; or in
                                   blocks of 32 to this many bits, 8 or 4 (then the keys after a
                                   rotation that the queries share), and the queries to 8. Not for
                                   latent attention, whose cache holds latent vectors */
    int rope_half;              /* naive_rope turns halves, not pairs; may be set by a test */
} naive_model;

/* The number with the key "<architecture>.<name>". */
static inline double naive_key(const naive_model *m, const char *name, double otherwise) {
    char full[96];
    snprintf(full, sizeof full, "%s.%s", m->rule.name, name);
    return naive_number(m->image, full, otherwise);
}

static inline size_t naive_size(const naive_model *m, const char *name, size_t otherwise) {
    return (size_t)naive_key(m, name, (double)otherwise);
}

static inline naive_value naive_raw(const naive_model *m, const char *name) {
    naive_value v = {0, NULL, 0};
    char full[96];
    snprintf(full, sizeof full, "%s.%s", m->rule.name, name);
    naive_walk(m->image, full, &v);
    return v;
}

static inline int naive_is(const naive_value *v, const char *text) {
    return v->type == 8 && v->size == strlen(text) && !memcmp(v->data, text, strlen(text));
}

/* The tensor "blk.<layer>.<name>.<part>", or "<name>.<part>" for layer -1. A bias becomes a column:
   as many rows as it has numbers. */
static inline naive_tensor naive_part(const naive_model *m, int layer, const char *name,
    const char *part) {
    char full[96];
    naive_tensor t;
    if (layer < 0) snprintf(full, sizeof full, "%s.%s", name, part);
    else snprintf(full, sizeof full, "blk.%d.%s.%s", layer, name, part);
    t = naive_find(m->image, m->table, m->alignment, full);
    if (!strcmp(part, "bias")) t.n_out *= t.n_in, t.n_in = 1;
    return t;
}

static inline naive_tensor naive_weight(const naive_model *m, int layer, const char *name) {
    return naive_part(m, layer, name, "weight");
}

static inline naive_tensor naive_bias(const naive_model *m, int layer, const char *name) {
    return naive_part(m, layer, name, "bias");
}

static inline int naive_has(const naive_model *m, int layer, const char *name) {
    return naive_weight(m, layer, name).data != NULL;
}

/* n rows of a tensor, if there is one. */
static inline naive_tensor naive_rows(naive_tensor t, size_t from, size_t n) {
    size_t row = t.type == 0 ? 4 * t.n_in : t.type == 8 ? t.n_in / 32 * 34 :
        t.type == 2 ? t.n_in / 32 * 18 : 2 * t.n_in;
    if (t.data) t.data += from * row;
    t.n_out = n;
    return t;
}

static inline void naive_open_sizes(naive_model *m) {
    m->n_layers = naive_size(m, "block_count", 0);
    m->n_embd = naive_size(m, "embedding_length", 0);
    m->n_heads = naive_size(m, "attention.head_count", 0);
    m->n_kv_heads = naive_size(m, "attention.head_count_kv", m->n_heads);
    m->head_dim = naive_size(m, "attention.key_length", m->n_embd / m->n_heads);
    m->head_dim_v = naive_size(m, "attention.value_length", m->n_embd / m->n_heads);
    m->n_ff = naive_size(m, "feed_forward_length", 0);
    m->n_vocab = naive_weight(m, -1, "token_embd").n_out;
    m->n_ctx = naive_size(m, "context_length", 0);
    m->q_rank = naive_size(m, "attention.q_lora_rank", 0);
    m->kv_rank = naive_size(m, "attention.kv_lora_rank", 0);
    if (m->kv_rank) {           /* every head has a key of its own */
        m->n_kv_heads = m->n_heads;
        m->head_dim = naive_size(m, "attention.key_length_mla", m->head_dim);
        m->head_dim_v = naive_size(m, "attention.value_length_mla", m->head_dim_v);
    }
    m->epsilon = naive_key(m, "attention.layer_norm_rms_epsilon",
        naive_key(m, "attention.layer_norm_epsilon", 0));
}

static inline void naive_open_attention(naive_model *m) {
    naive_value pattern = naive_raw(m, "attention.sliding_window_pattern");
    naive_value kind = naive_raw(m, "rope.scaling.type");
    m->rope_half = m->rule.rope == NAIVE_HALVES;
    m->rope_dim = m->rule.rope == NAIVE_NO_ROPE ? 0 :
        naive_size(m, "rope.dimension_count", m->head_dim);
    m->rope_base = naive_key(m, "rope.freq_base", 10000);
    m->local_base = naive_key(m, "rope.freq_base_swa", m->rule.local_base);
    m->rope_linear = naive_is(&kind, "linear");
    m->rope_yarn = naive_is(&kind, "yarn");
    m->rope_factor = naive_key(m, "rope.scaling.factor", 1);
    m->rope_context = naive_key(m, "rope.scaling.original_context_length", (double)m->n_ctx);
    m->yarn_fast = naive_key(m, "rope.scaling.yarn_beta_fast", 32);
    m->yarn_slow = naive_key(m, "rope.scaling.yarn_beta_slow", 1);
    m->yarn_log = naive_key(m, "rope.scaling.yarn_log_multiplier", 0);
    m->attn_factor = naive_key(m, "rope.scaling.attn_factor", 1);
    m->window = naive_size(m, "attention.sliding_window", m->rule.window);
    m->pattern = naive_size(m, "attention.sliding_window_pattern", m->rule.pattern);
    if (pattern.type == 9) m->locals = pattern.data + 12;   /* behind item type and count */
    m->alibi = naive_key(m, "attention.max_alibi_bias", m->rule.alibi);
    m->clamp = naive_key(m, "attention.clamp_kqv", 0);
    m->score_cap = naive_key(m, "attn_logit_softcapping", m->rule.score_cap);
    m->score_scale = naive_key(m, "attention.scale", 0);
    if (!(m->score_scale > 0)) m->score_scale = 1 / sqrt((double)m->head_dim);
    if (m->rope_yarn && m->rule.scores_yarn)
        m->score_scale *= pow(1 + m->yarn_log * log(m->rope_factor), 2);
}

static inline void naive_open_scales(naive_model *m) {
    double root = sqrt((double)m->n_embd), given;
    m->embd_scale = naive_key(m, "embedding_scale",
        m->rule.embd_root ? root : m->rule.embd_scale > 0 ? m->rule.embd_scale : 1);
    m->residual_scale = naive_key(m, "residual_scale",
        m->rule.depth_scale > 0 ? m->rule.depth_scale / sqrt((double)m->n_layers) : 1);
    given = naive_key(m, "logit_scale", m->rule.logit_scale > 0 ? m->rule.logit_scale : 1);
    m->logit_scale = m->rule.divide_logits ? 1 / given : given;
    if (m->rule.base_width > 0) m->logit_scale *= m->rule.base_width / (double)m->n_embd;
    m->logit_cap = naive_key(m, "final_logit_softcapping", m->rule.logit_cap);
    m->parallel = m->rule.order == NAIVE_PARALLEL ||
        (m->rule.order == NAIVE_BY_KEY && naive_key(m, "use_parallel_residual", 1) > 0);
}

static inline void naive_open_experts(naive_model *m) {
    naive_gating otherwise = m->rule.gating ? m->rule.gating : NAIVE_SOFTMAX;
    m->n_experts = naive_size(m, "expert_count", 0);
    m->n_used = naive_size(m, "expert_used_count", 0);
    m->n_groups = naive_size(m, "expert_group_count", 0);
    m->n_groups_used = naive_size(m, "expert_group_used_count", 0);
    m->gating = (naive_gating)naive_size(m, "expert_gating_func", (size_t)otherwise);
    m->renormalise = naive_key(m, "expert_weights_norm", m->rule.renormalise) > 0;
    m->expert_scale = naive_key(m, "expert_weights_scale", 1);
}

static inline void naive_open(naive_model *m, const void *gguf) {
    naive_value name = {0, NULL, 0};
    size_t i;
    memset(m, 0, sizeof *m);
    m->image = (const unsigned char *)gguf;
    m->table = naive_walk(m->image, "general.architecture", &name);
    m->alignment = (uint64_t)naive_number(m->image, "general.alignment", 32);
    for (i = 0; i < sizeof naive_rules / sizeof *naive_rules; i++)
        if (naive_is(&name, naive_rules[i].name)) m->rule = naive_rules[i];
    if (!m->rule.name) {
        fprintf(stderr, "naive.h: another architecture\n");
        exit(1);
    }
    naive_open_sizes(m);
    naive_open_attention(m);
    naive_open_scales(m);
    naive_open_experts(m);
}

static inline double *naive_new(size_t n, size_t width) {
    double *p = (double *)calloc(n * width + 1, sizeof *p);
    if (!p) exit(1);
    return p;
}

/* ---- the pieces of the formula ---- */

/* One vector of d numbers. RMSNorm (Zhang and Sennrich 2019):
       y = x / sqrt(mean(x^2) + epsilon) * w
   LayerNorm (Ba et al. 2016):
       y = (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * w + b */
static inline void naive_norm_one(const naive_model *m, double *y, const double *x, size_t d,
    const naive_tensor *w, size_t row, const naive_tensor *b) {
    double mean = 0, square = 0;
    size_t i;
    for (i = 0; m->rule.layer_norm && i < d; i++) mean += x[i] / (double)d;
    for (i = 0; i < d; i++) square += (x[i] - mean) * (x[i] - mean) / (double)d;
    for (i = 0; i < d; i++) {
        double unit = (x[i] - mean) / sqrt(square + m->epsilon);
        y[i] = unit * naive_element(w, row, i) + (b->data ? naive_element(b, row * d + i, 0) : 0);
    }
}

/* Each position of x [n, width] with the weights and the bias of this name, in as many pieces as a
   row of the weights fits into the width: one, or the heads, which share one row or have rows of
   their own. Without weights it is a copy. y may be x. */
static inline void naive_norm(const naive_model *m, double *y, const double *x, size_t n,
    size_t width, int layer, const char *name) {
    naive_tensor w = naive_weight(m, layer, name), b = naive_bias(m, layer, name);
    size_t at, piece;
    if (!w.data) {
        memmove(y, x, n * width * sizeof *y);
        return;
    }
    for (at = 0, piece = 0; at < n * width; at += w.n_in, piece++)
        naive_norm_one(m, y + at, x + at, w.n_in, &w, piece % w.n_out, &b);
}

/* Rounds blocks of 32 numbers to multiples of (largest magnitude) / 127. */
static inline void naive_to_8bit(double *x, size_t n) {
    size_t i, j;
    for (i = 0; i < n; i += 32) {
        double largest = 0, step;
        for (j = i; j < i + 32; j++) if (fabs(x[j]) > largest) largest = fabs(x[j]);
        step = largest / 127;
        for (j = i; j < i + 32; j++) x[j] = step > 0 ? nearbyint(x[j] / step) * step : 0;
    }
}

/* y [n, n_out] = x [n, n_in] times W transposed, plus the bias if there is one. */
static inline void naive_linear(const naive_model *m, double *y, const double *x, size_t n,
    naive_tensor w, naive_tensor bias) {
    double *in = naive_new(n, w.n_in), *row = naive_new(1, w.n_in);
    size_t t, r, i;
    memcpy(in, x, n * w.n_in * sizeof *in);
    if (m->round_q8 && (w.type == 2 || w.type == 8)) naive_to_8bit(in, n * w.n_in);
    for (r = 0; r < w.n_out; r++) {
        for (i = 0; i < w.n_in; i++) row[i] = naive_element(&w, r, i);
        for (t = 0; t < n; t++) {
            double sum = bias.data ? naive_element(&bias, r, 0) : 0;
            for (i = 0; i < w.n_in; i++) sum += row[i] * in[t * w.n_in + i];
            y[t * w.n_out + r] = sum;
        }
    }
    free(in);
    free(row);
}

static inline void naive_named(const naive_model *m, double *y, const double *x, size_t n,
    int layer, const char *name) {
    naive_linear(m, y, x, n, naive_weight(m, layer, name), naive_bias(m, layer, name));
}

/* Whether a layer sees the window only: all do, or all but every `pattern`-th, or those listed. */
static inline int naive_local(const naive_model *m, size_t layer) {
    if (m->locals) return m->locals[layer] != 0;
    return !m->pattern || layer % m->pattern + 1 < m->pattern;
}

/* The pair i of a head turns by position * angle[i]. Plain RoPE (Su et al. 2021): angle[i] is
   base^(-2i/dim). Factors from a tensor divide it: rope_freqs, or longrope's (Ding et al. 2024), of
   which there is one list for runs within the original context and one for longer ones. Linear
   scaling divides it by the factor. YaRN (Peng et al. 2023) divides the slow pairs and leaves the
   fast ones: a pair that makes `beta` turns over the original context has the index dim *
   ln(context / (2 pi beta)) / (2 ln base); between the indices of beta_fast (rounded down) and
   beta_slow (rounded up) it goes over linearly. Returns the length of a turned vector, which YaRN
   raises to 1 + 0.1 ln(factor) and attn_factor multiplies. A base of its own for layers with a
   window comes without any scaling. */
static inline double naive_rope_angles(const naive_model *m, size_t layer, double *angle) {
    int own = naive_local(m, layer) && m->local_base > 0, yarn = m->rope_yarn && !own;
    const char *run = (double)m->n_ctx > m->rope_context ? "rope_factors_long" :
        "rope_factors_short";
    naive_tensor freqs = naive_weight(m, -1, naive_has(m, -1, "rope_freqs") ? "rope_freqs" : run);
    double dim = (double)m->rope_dim, turn = 2 * 3.14159265358979323846;
    double base = own ? m->local_base : m->rope_base;
    double low = floor(dim * log(m->rope_context / (turn * m->yarn_fast)) / (2 * log(base)));
    double high = ceil(dim * log(m->rope_context / (turn * m->yarn_slow)) / (2 * log(base)));
    size_t i;
    if (low < 0) low = 0;
    if (high > dim - 1) high = dim - 1;
    for (i = 0; i < m->rope_dim / 2; i++) {
        double full = pow(base, -2 * (double)i / dim), ramp;
        if (freqs.data && !own) full /= naive_element(&freqs, 0, i);
        ramp = ((double)i - low) / (high - low > 0.001 ? high - low : 0.001);
        ramp = yarn ? ramp < 0 ? 0 : ramp > 1 ? 1 : ramp : m->rope_linear && !own ? 1 : 0;
        angle[i] = full * (1 - ramp) + full / m->rope_factor * ramp;
    }
    if (own) return 1;
    return m->attn_factor * (yarn && !m->rule.scores_yarn ? 1 + 0.1 * log(m->rope_factor) : 1);
}

/* Turns the pairs (2i, 2i + 1), or (i, i + rope_dim / 2) if m->rope_half, of every head of
   x [n, heads, head_dim], which are at the positions from `first` on. They are the first rope_dim
   dimensions of a head, or the last with latent attention; the others stay as they are. */
static inline void naive_rope(const naive_model *m, size_t layer, double *x, size_t first, size_t n,
    size_t heads) {
    double *angle = naive_new(1, m->rope_dim / 2), length;
    size_t t, h, i, from = m->kv_rank ? m->head_dim - m->rope_dim : 0;
    int still = (m->rule.still && layer % m->rule.still + 1 == m->rule.still) ||
        (m->rule.local_rope && !naive_local(m, layer));
    if (m->rope_dim && !still) {
        length = naive_rope_angles(m, layer, angle);
        for (t = 0; t < n; t++) {
            for (i = 0; i < m->rope_dim / 2; i++) {
                double turn = (double)(first + t) * angle[i];
                double c = length * cos(turn), s = length * sin(turn);
                for (h = 0; h < heads; h++) {
                    double *head = x + (t * heads + h) * m->head_dim + from;
                    double *x1 = m->rope_half ? head + i : head + 2 * i;
                    double *x2 = m->rope_half ? head + i + m->rope_dim / 2 : head + 2 * i + 1;
                    double a = *x1, b = *x2;
                    *x1 = a * c - b * s;
                    *x2 = a * s + b * c;
                }
            }
        }
    }
    free(angle);
}

/* Rounds each head of x [n, width] in blocks of 32 numbers, the last shorter: to multiples of a
   scale in half precision, (largest magnitude) / 127 for 8 bits; for 4 bits the number of largest
   magnitude is -8 of them, and 7 is the most. */
static inline void naive_round_heads(double *x, size_t n, size_t width, int bits) {
    size_t t, i, j;
    for (t = 0; t < n; t++) {
        for (i = 0; i < width; i += 32) {
            double *b = x + t * width + i, peak = 0, scale;
            size_t size = width - i < 32 ? width - i : 32;
            for (j = 0; j < size; j++) if (fabs(b[j]) > fabs(peak)) peak = b[j];
            scale = naive_round_f16(bits == 8 ? fabs(peak) / 127 : peak / -8);
            for (j = 0; j < size; j++) {
                double q = fabs(scale) > 0 ? nearbyint(b[j] / scale) : 0;
                b[j] = (bits == 4 && q > 7 ? 7 : q) * scale;
            }
        }
    }
}

/* The Walsh-Hadamard transform of each block of `size` numbers, the largest power of two that
   divides the width: element i is the sum of all b[j], negative where i and j share an odd number
   of bits, over the root of the size. */
static inline void naive_rotate_heads(double *x, size_t n, size_t width) {
    size_t size = 1, at, i, j, bits;
    double *y;
    while (width % (2 * size) == 0) size *= 2;
    y = naive_new(1, size);
    for (at = 0; at < n * width; at += size) {
        for (i = 0; i < size; i++) {
            y[i] = 0;
            for (j = 0; j < size; j++) {
                int odd = 0;
                for (bits = i & j; bits; bits &= bits - 1) odd = !odd;
                y[i] += odd ? -x[at + j] : x[at + j];
            }
        }
        for (i = 0; i < size; i++) x[at + i] = y[i] / sqrt((double)size);
    }
    free(y);
}

/* Queries, keys and values as a K/V store of m->round_kv bits has them. Queries are rounded after
   their scale, which makes no difference here, as steps go with the largest magnitude. */
static inline void naive_round_qkv(const naive_model *m, double *q, size_t n, double *k, double *v,
    size_t all) {
    size_t d = m->head_dim, t, i, j;
    if (m->round_kv == 4) {
        naive_rotate_heads(q, n * m->n_heads, d);
        naive_rotate_heads(k, all * m->n_kv_heads, d);
    }
    naive_round_heads(k, all * m->n_kv_heads, d, m->round_kv);
    naive_round_heads(v, all * m->n_kv_heads, m->head_dim_v, m->round_kv);
    for (t = 0; t < n * m->n_heads; t++) {
        for (i = 0; i < d; i += 32) {
            double largest = 0;
            size_t end = i + 32 < d ? i + 32 : d;
            for (j = i; j < end; j++)
                if (fabs(q[t * d + j]) > largest) largest = fabs(q[t * d + j]);
            for (j = i; largest > 0 && j < end; j++)
                q[t * d + j] = nearbyint(q[t * d + j] / largest * 127) * largest / 127;
        }
    }
}

/* ALiBi (Press et al. 2022): a score falls by slope * distance. The slopes of 2^k heads are a
   geometric series that ends at 2^-max; heads beyond a power of two take every other slope of the
   series for twice as many. */
static inline double naive_slope(const naive_model *m, size_t head) {
    size_t whole = 1;
    if (!(m->alibi > 0)) return 0;
    while (2 * whole <= m->n_heads) whole *= 2;
    if (head < whole) return pow(2, -m->alibi * (double)(head + 1) / (double)whole);
    return pow(2, -m->alibi * (double)(2 * (head - whole) + 1) / (double)(2 * whole));
}

/* cap * tanh(x / cap): near x when it is small, never beyond the cap. 0 is no cap. */
static inline double naive_soft_cap(double x, double cap) {
    return cap > 0 ? cap * tanh(x / cap) : x;
}

/* out [n, n_heads, head_dim_v]: row t of a head, at position past + t, looks back at the positions
   up to its own (the last m->window of them in a local layer), scores each by q.k / sqrt(head_dim),
   and takes the mean of their v weighted by the softmax of the scores. n_heads / n_kv_heads query
   heads share one key and value head. A sink is one more score of a head, with nothing behind it
   (Xiao et al. 2023). k and v: [past + n]. received [past + n]: the weights that a layer without a
   window gives a position are added to it. */
static inline void naive_attention(const naive_model *m, size_t layer, double *out,
    const double *q, const double *k, const double *v, size_t past, size_t n, double *received) {
    size_t d = m->head_dim, dv = m->head_dim_v, t, h, j, i;
    size_t window = naive_local(m, layer) ? m->window : 0;
    naive_tensor sinks = naive_weight(m, (int)layer, "attn_sinks");
    double *p = naive_new(1, past + n);
    for (t = 0; t < n; t++) {
        size_t own = past + t, first = window && own + 1 > window ? own + 1 - window : 0;
        for (h = 0; h < m->n_heads; h++) {
            size_t g = h / (m->n_heads / m->n_kv_heads);
            double sink = sinks.data ? naive_element(&sinks, 0, h) : -INFINITY;
            double largest = sink, sum, *o = out + (t * m->n_heads + h) * dv;
            for (j = first; j <= own; j++) {
                p[j] = 0;
                for (i = 0; i < d; i++) {
                    p[j] += q[(t * m->n_heads + h) * d + i] * k[(j * m->n_kv_heads + g) * d + i];
                }
                p[j] = naive_soft_cap(p[j] * m->score_scale, m->score_cap);
                p[j] -= naive_slope(m, h) * (double)(own - j);
                if (p[j] > largest) largest = p[j];
            }
            sum = exp(sink - largest);
            for (j = first; j <= own; j++) sum += p[j] = exp(p[j] - largest);
            for (i = 0; i < dv; i++) o[i] = 0;
            for (j = first; j <= own; j++) {
                if (!window) received[j] += p[j] / sum;
                for (i = 0; i < dv; i++) {
                    o[i] += p[j] / sum * v[(j * m->n_kv_heads + g) * dv + i];
                }
            }
        }
    }
    free(p);
}

/* Queries, keys and values of h [n, n_embd] before RoPE. One matrix may hold all three, the rows of
   the queries first. */
static inline void naive_qkv(const naive_model *m, int layer, double *q, double *k, double *v,
    const double *h, size_t n) {
    size_t q_size = m->n_heads * m->head_dim, k_size = m->n_kv_heads * m->head_dim;
    size_t v_size = m->n_kv_heads * m->head_dim_v, i;
    naive_tensor w = naive_weight(m, layer, "attn_qkv"), b = naive_bias(m, layer, "attn_qkv");
    if (w.data) {
        naive_linear(m, q, h, n, naive_rows(w, 0, q_size), naive_rows(b, 0, q_size));
        naive_linear(m, k, h, n, naive_rows(w, q_size, k_size), naive_rows(b, q_size, k_size));
        naive_linear(m, v, h, n, naive_rows(w, q_size + k_size, v_size),
            naive_rows(b, q_size + k_size, v_size));
    } else {
        naive_named(m, q, h, n, layer, "attn_q");
        naive_named(m, k, h, n, layer, "attn_k");
        naive_named(m, v, h, n, layer, "attn_v");
    }
    if (m->clamp > 0) {
        for (i = 0; i < n * q_size; i++) q[i] = fmax(-m->clamp, fmin(q[i], m->clamp));
        for (i = 0; i < n * k_size; i++) k[i] = fmax(-m->clamp, fmin(k[i], m->clamp));
        for (i = 0; i < n * v_size; i++) v[i] = fmax(-m->clamp, fmin(v[i], m->clamp));
    }
    naive_norm(m, q, q, n, q_size, layer, "attn_q_norm");
    naive_norm(m, k, k, n, k_size, layer, "attn_k_norm");
}

/* The heads' keys (the part that RoPE leaves) and values from the latent vectors c [n, kv_rank].
   attn_kv_b has for each head rows for its key and then rows for its value. In another layout they
   are apart, and attn_k_b lies crosswise: [heads, kv_rank, dims]. That is how it meets the query in
   place of the key, which gives the same scores; if it is quantized, the query is what m->round_q8
   rounds. */
static inline void naive_from_latent(const naive_model *m, int layer, double *q, double *k,
    double *v, const double *c, size_t n) {
    naive_tensor both = naive_weight(m, layer, "attn_kv_b"), none = {0, 0, 0, NULL};
    naive_tensor wk = naive_weight(m, layer, "attn_k_b"), wv = naive_weight(m, layer, "attn_v_b");
    size_t d = m->head_dim, dv = m->head_dim_v, plain = d - m->rope_dim, t, h, i, r;
    double *kv = naive_new(n, m->n_heads * (plain + dv));
    if (both.data) naive_linear(m, kv, c, n, both, none);
    else naive_linear(m, v, c, n, wv, none);
    for (t = 0; t < n; t++) {
        for (h = 0; h < m->n_heads; h++) {
            double *key = k + (t * m->n_heads + h) * d, *value = v + (t * m->n_heads + h) * dv;
            const double *from = kv + (t * m->n_heads + h) * (plain + dv);
            if (both.data) {
                memcpy(key, from, plain * sizeof *key);
                memcpy(value, from + plain, dv * sizeof *value);
                continue;
            }
            for (i = 0; i < plain; i++) {
                key[i] = 0;
                for (r = 0; r < m->kv_rank; r++)
                    key[i] += naive_element(&wk, h * m->kv_rank + r, i) * c[t * m->kv_rank + r];
            }
            if (m->round_q8 && (wk.type == 2 || wk.type == 8))
                naive_to_8bit(q + (t * m->n_heads + h) * d, plain);
        }
    }
    free(kv);
}

/* Latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one short vector,
   and all heads share the part of the key that RoPE turns. Queries may come from a short vector
   too. */
static inline void naive_latent_qkv(const naive_model *m, int layer, double *q, double *k,
    double *v, const double *h, size_t n) {
    size_t rank = m->kv_rank, turned = m->rope_dim, d = m->head_dim, t, i;
    double *a = naive_new(n, rank + turned), *c = naive_new(n, rank);
    double *cq = naive_new(n, m->q_rank);
    if (m->q_rank) {
        naive_named(m, cq, h, n, layer, "attn_q_a");
        naive_norm(m, cq, cq, n, m->q_rank, layer, "attn_q_a_norm");
        naive_named(m, q, cq, n, layer, "attn_q_b");
    } else {
        naive_named(m, q, h, n, layer, "attn_q");
    }
    naive_named(m, a, h, n, layer, "attn_kv_a_mqa");
    for (t = 0; t < n; t++) {
        memcpy(c + t * rank, a + t * (rank + turned), rank * sizeof *c);
        for (i = 0; i < m->n_heads; i++)
            memcpy(k + (t * m->n_heads + i) * d + d - turned, a + t * (rank + turned) + rank,
                turned * sizeof *k);
    }
    naive_norm(m, c, c, n, rank, layer, "attn_kv_a_norm");
    naive_from_latent(m, layer, q, k, v, c, n);
    free(a), free(c), free(cq);
}

static inline double naive_silu(double x) {
    return x / (1 + exp(-x));
}

/* GELU (Hendrycks and Gimpel 2016): x times the normal distribution's share below x, or a formula
   with tanh that is close to it. */
static inline double naive_gelu(double x, int exact) {
    if (exact) return 0.5 * x * (1 + erf(x * sqrt(0.5)));
    return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static inline double naive_act(const naive_model *m, double x) {
    if (m->rule.act == NAIVE_SILU) return naive_silu(x);
    return naive_gelu(x, m->rule.act == NAIVE_GELU_ERF && !m->gelu_tanh);
}

/* A gated unit (Shazeer 2020). gpt-oss clamps both inputs, takes x * sigmoid(1.702 x) for the
   activation, and adds 1 to the upper one. */
static inline double naive_gate(const naive_model *m, double gate, double up) {
    if (m->rule.act != NAIVE_CLAMPED) return naive_act(m, gate) * up;
    gate = fmin(gate, 7);
    up = fmax(-7, fmin(up, 7));
    return gate / (1 + exp(-1.702 * gate)) * (up + 1);
}

/* The matrices of a feed-forward network, and their biases; without a gate it is a plain one. */
typedef struct naive_net {
    naive_tensor gate, up, down, gate_b, up_b, down_b;
} naive_net;

/* Those whose names end so: "" or "_shexp". The rows of the gate may lie before those of ffn_up. */
static inline naive_net naive_net_of(const naive_model *m, int layer, const char *end) {
    char gate[32], up[32], down[32];
    naive_net f;
    snprintf(gate, sizeof gate, "ffn_gate%s", end);
    snprintf(up, sizeof up, "ffn_up%s", end);
    snprintf(down, sizeof down, "ffn_down%s", end);
    f.gate = naive_weight(m, layer, gate), f.gate_b = naive_bias(m, layer, gate);
    f.up = naive_weight(m, layer, up), f.up_b = naive_bias(m, layer, up);
    f.down = naive_weight(m, layer, down), f.down_b = naive_bias(m, layer, down);
    if (!f.gate.data && f.up.n_out == 2 * f.down.n_in) {
        size_t half = f.down.n_in;
        f.gate = naive_rows(f.up, 0, half), f.up = naive_rows(f.up, half, half);
        f.gate_b = naive_rows(f.up_b, 0, half), f.up_b = naive_rows(f.up_b, half, half);
    }
    return f;
}

/* One expert's; their matrices lie one after another. */
static inline naive_net naive_expert(const naive_model *m, int layer, size_t e) {
    naive_net f = naive_net_of(m, layer, "_exps");
    size_t n_ff = f.down.n_in, d = m->n_embd;
    f.gate = naive_rows(f.gate, e * n_ff, n_ff), f.gate_b = naive_rows(f.gate_b, e * n_ff, n_ff);
    f.up = naive_rows(f.up, e * n_ff, n_ff), f.up_b = naive_rows(f.up_b, e * n_ff, n_ff);
    f.down = naive_rows(f.down, e * d, d), f.down_b = naive_rows(f.down_b, e * d, d);
    return f;
}

/* y [n, n_embd] of h [n, n_embd]. */
static inline void naive_ffn(const naive_model *m, const naive_net *f, double *y, const double *h,
    size_t n) {
    size_t n_ff = f->down.n_in, i;
    double *gate = naive_new(n, n_ff), *up = naive_new(n, n_ff);
    naive_linear(m, up, h, n, f->up, f->up_b);
    if (f->gate.data) naive_linear(m, gate, h, n, f->gate, f->gate_b);
    for (i = 0; i < n * n_ff; i++)
        up[i] = f->gate.data ? naive_gate(m, gate[i], up[i]) : naive_act(m, up[i]);
    naive_linear(m, y, up, n, f->down, f->down_b);
    free(gate), free(up);
}

/* x [n] becomes its softmax. */
static inline void naive_softmax(double *x, size_t n) {
    double largest = -INFINITY, sum = 0;
    size_t i;
    for (i = 0; i < n; i++) largest = fmax(largest, x[i]);
    for (i = 0; i < n; i++) sum += x[i] = exp(x[i] - largest);
    for (i = 0; i < n; i++) x[i] /= sum;
}

/* Where the largest of n numbers is. It becomes -infinity, so that the next call finds the next. */
static inline size_t naive_take_best(double *x, size_t n) {
    size_t i, best = 0;
    for (i = 1; i < n; i++) if (x[i] > x[best]) best = i;
    x[best] = -INFINITY;
    return best;
}

/* Experts of all but the best groups lose their rank (DeepSeek-V2 and V3). With softmax a group is
   as good as its best expert, with sigmoid as its two best together. */
static inline void naive_rank_groups(const naive_model *m, double *rank) {
    size_t size = m->n_experts / m->n_groups, g, i;
    double *best = naive_new(1, m->n_groups), *rest = naive_new(1, size);
    double *out = naive_new(1, m->n_experts);
    for (i = 0; i < m->n_experts; i++) out[i] = -INFINITY;
    for (g = 0; g < m->n_groups; g++) {
        memcpy(rest, rank + g * size, size * sizeof *rest);
        best[g] = rank[g * size + naive_take_best(rest, size)];
        if (m->gating == NAIVE_SIGMOID) best[g] += rank[g * size + naive_take_best(rest, size)];
    }
    for (i = 0; i < m->n_groups_used; i++) {
        g = naive_take_best(best, m->n_groups);
        memcpy(out + g * size, rank + g * size, size * sizeof *out);
    }
    memcpy(rank, out, m->n_experts * sizeof *rank);
    free(best), free(rest), free(out);
}

/* chosen [n_used] and their weights from p [n_experts], the router's logits. Experts are ranked by
   softmax or sigmoid, to which a bias may be added for the choice alone. */
static inline void naive_route(const naive_model *m, int layer, double *p, size_t *chosen,
    double *weight) {
    naive_tensor b = naive_bias(m, layer, "exp_probs_b");
    double *rank = naive_new(1, m->n_experts), sum = 0;
    size_t i;
    if (m->gating == NAIVE_SOFTMAX) naive_softmax(p, m->n_experts);
    for (i = 0; m->gating == NAIVE_SIGMOID && i < m->n_experts; i++) p[i] = 1 / (1 + exp(-p[i]));
    for (i = 0; i < m->n_experts; i++) rank[i] = p[i] + (b.data ? naive_element(&b, i, 0) : 0);
    if (m->n_groups > 1) naive_rank_groups(m, rank);
    for (i = 0; i < m->n_used; i++) {
        chosen[i] = naive_take_best(rank, m->n_experts);
        weight[i] = p[chosen[i]];
    }
    if (m->gating == NAIVE_SOFTMAX_CHOSEN) naive_softmax(weight, m->n_used);
    for (i = 0; i < m->n_used; i++) sum += weight[i];
    for (i = 0; i < m->n_used; i++)
        weight[i] = (m->renormalise ? weight[i] / sum : weight[i]) * m->expert_scale;
    free(rank);
}

/* A mixture of experts (Shazeer et al. 2017): the router chooses n_used of them for each position,
   whose results are added up by their weights. Shared experts take part always, all in one network,
   which may have a gate of its own: the sigmoid of one more product. */
static inline void naive_experts(const naive_model *m, int layer, double *y, const double *h,
    size_t n) {
    double *p = naive_new(n, m->n_experts), *part = naive_new(1, m->n_embd), gate;
    double *weight = naive_new(1, m->n_used);
    size_t *chosen = (size_t *)calloc(m->n_used + 1, sizeof *chosen), t, i, k;
    naive_net shared = naive_net_of(m, layer, "_shexp");
    naive_tensor own = naive_weight(m, layer, "ffn_gate_inp_shexp"), none = {0, 0, 0, NULL};
    if (!chosen) exit(1);
    naive_named(m, p, h, n, layer, "ffn_gate_inp");
    memset(y, 0, n * m->n_embd * sizeof *y);
    for (t = 0; t < n; t++) {
        const double *x = h + t * m->n_embd;
        naive_route(m, layer, p + t * m->n_experts, chosen, weight);
        for (k = 0; k < m->n_used; k++) {
            naive_net f = naive_expert(m, layer, chosen[k]);
            naive_ffn(m, &f, part, x, 1);
            for (i = 0; i < m->n_embd; i++) y[t * m->n_embd + i] += weight[k] * part[i];
        }
        if (!shared.up.data) continue;
        naive_ffn(m, &shared, part, x, 1);
        gate = 1;
        if (own.data) {
            naive_linear(m, &gate, x, 1, own, none);
            gate = 1 / (1 + exp(-gate));
        }
        for (i = 0; i < m->n_embd; i++) y[t * m->n_embd + i] += gate * part[i];
    }
    free(p), free(part), free(weight), free(chosen);
}

/* ---- what was computed before ---- */

/* Keys, not yet turned, and values of n positions of every layer. A position is an index here, so
   that what lies behind removed positions is nearer from then on. */
typedef struct naive_past {
    double **k, **v;            /* [n_layers][cap] positions */
    double *received;           /* [cap] attention that layers without a window have paid them */
    size_t n, cap, n_layers, k_size, v_size;
} naive_past;

static inline void naive_past_open(naive_past *p, const naive_model *m, size_t cap) {
    size_t il;
    p->n = 0;
    p->cap = cap;
    p->n_layers = m->n_layers;
    p->k_size = m->n_kv_heads * m->head_dim;
    p->v_size = m->n_kv_heads * m->head_dim_v;
    p->received = naive_new(1, cap);
    p->k = (double **)calloc(m->n_layers, sizeof *p->k);
    p->v = (double **)calloc(m->n_layers, sizeof *p->v);
    if (!p->k || !p->v) exit(1);
    for (il = 0; il < m->n_layers; il++) {
        p->k[il] = naive_new(cap, p->k_size);
        p->v[il] = naive_new(cap, p->v_size);
    }
}

static inline void naive_past_close(naive_past *p) {
    size_t il;
    for (il = 0; il < p->n_layers; il++) free(p->k[il]), free(p->v[il]);
    free(p->k);
    free(p->v);
    free(p->received);
}

/* Forgets the positions [from, to). */
static inline void naive_past_remove(naive_past *p, size_t from, size_t to) {
    size_t il, left = p->n - to;
    for (il = 0; il < p->n_layers; il++) {
        memmove(p->k[il] + from * p->k_size, p->k[il] + to * p->k_size,
            left * p->k_size * sizeof(double));
        memmove(p->v[il] + from * p->v_size, p->v[il] + to * p->v_size,
            left * p->v_size * sizeof(double));
    }
    memmove(p->received + from, p->received + to, left * sizeof(double));
    p->n -= to - from;
}

/* ---- the forward pass ---- */

/* x [n, n_embd]: embeddings, which gpt2 adds a learned vector of the position to. */
static inline void naive_embed(const naive_model *m, double *x, const int32_t *tokens,
    size_t first, size_t n) {
    naive_tensor embd = naive_weight(m, -1, "token_embd");
    naive_tensor place = naive_weight(m, -1, "position_embd");
    size_t t, i, d = m->n_embd;
    for (t = 0; t < n; t++) {
        for (i = 0; i < d; i++) {
            x[t * d + i] = naive_element(&embd, (size_t)tokens[t], i) * m->embd_scale;
            if (place.data) x[t * d + i] += naive_element(&place, first + t, i);
        }
    }
    naive_norm(m, x, x, n, d, -1, "token_embd_norm");
}

/* y [n, n_embd]: what the attention of a layer makes of h [n, n_embd]. */
static inline void naive_attend(const naive_model *m, naive_past *past, size_t layer, double *y,
    const double *h, size_t n) {
    size_t held = past->n, all = held + n, k_size = past->k_size, v_size = past->v_size, i;
    double *q = naive_new(n, m->n_heads * m->head_dim);
    double *k = naive_new(all, k_size), *v = naive_new(all, v_size);
    double *o = naive_new(n, m->n_heads * m->head_dim_v);
    double *new_k = past->k[layer] + held * k_size, *new_v = past->v[layer] + held * v_size;
    if (m->kv_rank) naive_latent_qkv(m, (int)layer, q, new_k, new_v, h, n);
    else naive_qkv(m, (int)layer, q, new_k, new_v, h, n);
    memcpy(k, past->k[layer], all * k_size * sizeof *k);
    memcpy(v, past->v[layer], all * v_size * sizeof *v);
    naive_rope(m, layer, q, held, n, m->n_heads);
    naive_rope(m, layer, k, 0, all, m->n_kv_heads);
    for (i = 0; m->round_kv == 1 && i < all * k_size; i++) k[i] = naive_round_f16(k[i]);
    for (i = 0; m->round_kv == 1 && i < all * v_size; i++) v[i] = naive_round_f16(v[i]);
    if (m->round_kv > 1) naive_round_qkv(m, q, n, k, v, all);
    naive_attention(m, layer, o, q, k, v, held, n, past->received);
    naive_named(m, y, o, n, (int)layer, "attn_output");
    free(q), free(k), free(v), free(o);
}

/* x [n, n_embd], the residual stream, through one layer: x += attention(norm(x)), then
   x += ffn(norm(x)), or both at once. Norms stand before a branch, after it, or on both sides; a
   parallel FFN without a norm of its own shares the attention's. */
static inline void naive_layer(const naive_model *m, naive_past *past, int layer, double *x,
    size_t n) {
    const char *ffn_norm = m->rule.ffn_norm ? m->rule.ffn_norm : "ffn_norm";
    int own = naive_has(m, layer, ffn_norm), wide = naive_has(m, layer, "attn_norm_2");
    int parallel = m->parallel || (m->rule.order == NAIVE_BY_NORM && !own);
    size_t d = m->n_embd, i;
    double *h = naive_new(n, d), *y = naive_new(n, d);

    naive_norm(m, h, x, n, d, layer, wide ? "attn_norm_2" : "attn_norm");
    naive_attend(m, past, (size_t)layer, y, h, n);
    if (!m->rule.ffn_norm) naive_norm(m, y, y, n, d, layer, "post_attention_norm");
    if (parallel) naive_norm(m, h, x, n, d, layer, own ? ffn_norm : "attn_norm");
    for (i = 0; i < n * d; i++) x[i] += y[i] * m->residual_scale;

    if (!parallel) naive_norm(m, h, x, n, d, layer, ffn_norm);
    if (naive_has(m, layer, "ffn_gate_inp")) {
        naive_experts(m, layer, y, h, n);
    } else {
        naive_net f = naive_net_of(m, layer, "");
        naive_ffn(m, &f, y, h, n);
    }
    naive_norm(m, y, y, n, d, layer, "post_ffw_norm");
    for (i = 0; i < n * d; i++) x[i] += y[i] * m->residual_scale;
    free(h), free(y);
}

/* Logits [n, n_vocab] after each of n more tokens; the caller frees them. */
static inline double *naive_append(const naive_model *m, naive_past *past, const int32_t *tokens,
    size_t n) {
    double *x = naive_new(n, m->n_embd), *logits = naive_new(n, m->n_vocab);
    const char *head = naive_has(m, -1, "output") ? "output" : "token_embd";
    size_t il, i;

    if (past->n + n > past->cap) exit(1);
    memset(past->received + past->n, 0, n * sizeof(double));
    naive_embed(m, x, tokens, past->n, n);
    for (il = 0; il < m->n_layers; il++) naive_layer(m, past, (int)il, x, n);
    naive_norm(m, x, x, n, m->n_embd, -1, "output_norm");
    naive_linear(m, logits, x, n, naive_weight(m, -1, head), naive_bias(m, -1, "output"));
    for (i = 0; i < n * m->n_vocab; i++)
        logits[i] = naive_soft_cap(logits[i] * m->logit_scale, m->logit_cap);
    past->n += n;
    free(x);
    return logits;
}

/* The same for a text from its start. */
static inline double *naive_forward(const naive_model *m, const int32_t *tokens, size_t n) {
    naive_past past;
    double *logits;
    naive_past_open(&past, m, n);
    logits = naive_append(m, &past, tokens, n);
    naive_past_close(&past);
    return logits;
}

#endif
