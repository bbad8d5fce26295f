/* naive.h - what a llama model computes, in its plainest form

   The oracle of the tests, and a page to learn from. naive_forward takes a whole text and computes
   everything for every position: no K/V cache, no batching, no float tricks, all in double. It
   shares no code with kvc.h; even the GGUF reader is its own, and it trusts the file.

       naive_model m;
       naive_open(&m, image);
       double *logits = naive_forward(&m, tokens, n);      [n, m.n_vocab]
       free(logits);

   The forward pass begins at the end of the file; what comes before is its vocabulary. */
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

static inline naive_tensor naive_find(const unsigned char *image, const char *name) {
    naive_tensor t = {0, 0, 0, NULL};
    const unsigned char *counts = image + 8, *p = naive_walk(image, NULL, NULL);
    uint64_t n = naive_read(&counts, 8), offset = 0, alignment, end;
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
    alignment = (uint64_t)naive_number(image, "general.alignment", 32);
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

/* ---- the model ---- */

typedef struct naive_model {
    const unsigned char *image;
    size_t n_layers, n_embd, n_heads, n_kv_heads, head_dim, head_dim_v, n_ff, n_vocab;
    size_t rope_dim, window;
    size_t pattern;             /* every so many layers, one sees everything; 0: none does */
    double epsilon;
    int round_q8;               /* set by a test: activations that meet a quantized matrix are
                                   rounded to 8 bits, as kvc.h does */
    int round_kv;               /* set by a test: K and V are rounded to half precision; or in
                                   blocks of 32 to this many bits, 8 or 4 (then the keys after a
                                   rotation that the queries share), and the queries to 8 */
    int rope_half;              /* set by a test: see naive_rope */
} naive_model;

static inline size_t naive_size(const unsigned char *image, const char *key, size_t otherwise) {
    return (size_t)naive_number(image, key, (double)otherwise);
}

static inline void naive_open(naive_model *m, const void *gguf) {
    const unsigned char *image = (const unsigned char *)gguf;
    memset(m, 0, sizeof *m);
    m->image = image;
    m->n_layers = naive_size(image, "llama.block_count", 0);
    m->n_embd = naive_size(image, "llama.embedding_length", 0);
    m->n_heads = naive_size(image, "llama.attention.head_count", 0);
    m->n_kv_heads = naive_size(image, "llama.attention.head_count_kv", m->n_heads);
    m->head_dim = naive_size(image, "llama.attention.key_length", m->n_embd / m->n_heads);
    m->head_dim_v = naive_size(image, "llama.attention.value_length", m->n_embd / m->n_heads);
    m->n_ff = naive_size(image, "llama.feed_forward_length", 0);
    m->n_vocab = naive_find(image, "token_embd.weight").n_out;
    m->rope_dim = naive_size(image, "llama.rope.dimension_count", m->head_dim);
    m->window = naive_size(image, "llama.attention.sliding_window", 0);
    m->pattern = naive_size(image, "llama.attention.sliding_window_pattern", 0);
    m->epsilon = naive_number(image, "llama.attention.layer_norm_rms_epsilon", 0);
}

/* The tensor "blk.<layer>.<name>". */
static inline naive_tensor naive_weight(const naive_model *m, size_t layer, const char *name) {
    char full[80];
    snprintf(full, sizeof full, "blk.%d.%s", (int)layer, name);
    return naive_find(m->image, full);
}

static inline double *naive_new(size_t n, size_t width) {
    double *p = (double *)calloc(n * width + 1, sizeof *p);
    if (!p) exit(1);
    return p;
}

/* ---- the pieces of the formula ---- */

/* y = x / sqrt(mean(x^2) + epsilon) * w, for each position of x [n, n_embd]. */
static inline void naive_norm(const naive_model *m, double *y, const double *x, size_t n,
    const char *name, int layer) {
    naive_tensor w = layer < 0 ? naive_find(m->image, name) : naive_weight(m, (size_t)layer, name);
    size_t t, i, d = m->n_embd;
    for (t = 0; t < n; t++) {
        double sum = 0;
        for (i = 0; i < d; i++) sum += x[t * d + i] * x[t * d + i];
        for (i = 0; i < d; i++) {
            double unit = x[t * d + i] / sqrt(sum / (double)d + m->epsilon);
            y[t * d + i] = unit * naive_element(&w, 0, i);
        }
    }
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
            double sum = bias.data ? naive_element(&bias, 0, r) : 0;
            for (i = 0; i < w.n_in; i++) sum += row[i] * in[t * w.n_in + i];
            y[t * w.n_out + r] = sum;
        }
    }
    free(in);
    free(row);
}

/* The pair i of a head turns by position * angle[i]. Plain RoPE (Su et al. 2021): angle[i] is
   base^(-2i/dim). rope_freqs divides it. Linear scaling divides it by the factor. YaRN (Peng et al.
   2023) divides the slow pairs and leaves the fast ones: a pair that makes `beta` turns over the
   original context has the index dim * ln(context / (2 pi beta)) / (2 ln base); between the indices
   of beta_fast (rounded down) and beta_slow (rounded up) it goes over linearly. Returns the length
   of a turned vector, which YaRN raises to 1 + 0.1 ln(factor) and attn_factor multiplies. */
static inline double naive_rope_angles(const naive_model *m, double *angle) {
    naive_tensor freqs = naive_find(m->image, "rope_freqs.weight");
    naive_value kind = {0, NULL, 0};
    double dim = (double)m->rope_dim, pi = 3.14159265358979323846;
    double base = naive_number(m->image, "llama.rope.freq_base", 10000);
    double factor = naive_number(m->image, "llama.rope.scaling.factor", 1);
    double context = naive_number(m->image, "llama.rope.scaling.original_context_length",
        naive_number(m->image, "llama.context_length", 0));
    double fast = naive_number(m->image, "llama.rope.scaling.yarn_beta_fast", 32);
    double slow = naive_number(m->image, "llama.rope.scaling.yarn_beta_slow", 1);
    double low = floor(dim * log(context / (2 * pi * fast)) / (2 * log(base)));
    double high = ceil(dim * log(context / (2 * pi * slow)) / (2 * log(base)));
    int linear, yarn;
    size_t i;
    naive_walk(m->image, "llama.rope.scaling.type", &kind);
    linear = kind.type == 8 && kind.size == 6 && !memcmp(kind.data, "linear", 6);
    yarn = kind.type == 8 && kind.size == 4 && !memcmp(kind.data, "yarn", 4);
    if (low < 0) low = 0;
    if (high > dim - 1) high = dim - 1;
    for (i = 0; i < m->rope_dim / 2; i++) {
        double full = pow(base, -2 * (double)i / dim), ramp;
        if (freqs.data) full /= naive_element(&freqs, 0, i);
        ramp = ((double)i - low) / (high - low > 0.001 ? high - low : 0.001);
        ramp = linear ? 1 : !yarn ? 0 : ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        angle[i] = full * (1 - ramp) + full / factor * ramp;
    }
    return naive_number(m->image, "llama.rope.scaling.attn_factor", 1) *
        (yarn ? 1 + 0.1 * log(factor) : 1);
}

/* Turns the pairs (2i, 2i + 1), or (i, i + rope_dim / 2) if m->rope_half, of every head of
   x [n, heads, head_dim], which are at the positions from `first` on. */
static inline void naive_rope(const naive_model *m, double *x, size_t first, size_t n,
    size_t heads) {
    double *angle = naive_new(1, m->rope_dim / 2);
    double length = naive_rope_angles(m, angle);
    size_t t, h, i;
    for (t = 0; t < n; t++) {
        for (h = 0; h < heads; h++) {
            double *head = x + (t * heads + h) * m->head_dim;
            for (i = 0; i < m->rope_dim / 2; i++) {
                double *x1 = m->rope_half ? head + i : head + 2 * i;
                double *x2 = m->rope_half ? head + i + m->rope_dim / 2 : head + 2 * i + 1;
                double a = *x1, b = *x2, turn = (double)(first + t) * angle[i];
                double c = length * cos(turn), s = length * sin(turn);
                *x1 = a * c - b * s;
                *x2 = a * s + b * c;
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

/* out [n, n_heads, head_dim_v]: row t of a head, at position past + t, looks back at the positions
   up to its own (the last `window` of them, if that is not 0), scores each by q.k / sqrt(head_dim),
   and takes the mean of their v weighted by the softmax of the scores. n_heads / n_kv_heads query
   heads share one key and value head. k and v: [past + n]. received [past + n], if not NULL: the
   weights of a position are added to it. */
static inline void naive_attention(const naive_model *m, double *out, const double *q,
    const double *k, const double *v, size_t past, size_t n, size_t window, double *received) {
    size_t d = m->head_dim, dv = m->head_dim_v, t, h, j, i;
    double *p = naive_new(1, past + n);
    for (t = 0; t < n; t++) {
        size_t own = past + t, first = window && own + 1 > window ? own + 1 - window : 0;
        for (h = 0; h < m->n_heads; h++) {
            size_t g = h / (m->n_heads / m->n_kv_heads);
            double largest = -INFINITY, sum = 0, *o = out + (t * m->n_heads + h) * dv;
            for (j = first; j <= own; j++) {
                p[j] = 0;
                for (i = 0; i < d; i++) {
                    p[j] += q[(t * m->n_heads + h) * d + i] * k[(j * m->n_kv_heads + g) * d + i];
                }
                p[j] /= sqrt((double)d);
                if (p[j] > largest) largest = p[j];
            }
            for (j = first; j <= own; j++) sum += p[j] = exp(p[j] - largest);
            for (i = 0; i < dv; i++) o[i] = 0;
            for (j = first; j <= own; j++) {
                if (received) received[j] += p[j] / sum;
                for (i = 0; i < dv; i++) {
                    o[i] += p[j] / sum * v[(j * m->n_kv_heads + g) * dv + i];
                }
            }
        }
    }
    free(p);
}

static inline double naive_silu(double x) {
    return x / (1 + exp(-x));
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

/* Logits [n, n_vocab] after each of n more tokens; the caller frees them. */
static inline double *naive_append(const naive_model *m, naive_past *past, const int32_t *tokens,
    size_t n) {
    size_t q_size = m->n_heads * m->head_dim, k_size = past->k_size, v_size = past->v_size;
    size_t o_size = m->n_heads * m->head_dim_v, held = past->n, all = held + n;
    double *x = naive_new(n, m->n_embd);            /* the residual stream */
    double *h = naive_new(n, m->n_embd);            /* its norm */
    double *q = naive_new(n, q_size), *k = naive_new(all, k_size), *v = naive_new(all, v_size);
    double *o = naive_new(n, o_size), *y = naive_new(n, m->n_embd);
    double *gate = naive_new(n, m->n_ff), *up = naive_new(n, m->n_ff);
    double *logits = naive_new(n, m->n_vocab);
    naive_tensor none = {0, 0, 0, NULL};
    naive_tensor embd = naive_find(m->image, "token_embd.weight");
    naive_tensor head = naive_find(m->image, "output.weight");
    size_t il, t, i, window;

    if (all > past->cap) exit(1);
    memset(past->received + held, 0, n * sizeof(double));
    for (t = 0; t < n; t++) {
        for (i = 0; i < m->n_embd; i++) {
            x[t * m->n_embd + i] = naive_element(&embd, (size_t)tokens[t], i);
        }
    }
    for (il = 0; il < m->n_layers; il++) {
#define W(name) naive_weight(m, il, name ".weight")
#define B(name) naive_weight(m, il, name ".bias")
        naive_norm(m, h, x, n, "attn_norm.weight", (int)il);
        naive_linear(m, q, h, n, W("attn_q"), B("attn_q"));
        naive_linear(m, past->k[il] + held * k_size, h, n, W("attn_k"), B("attn_k"));
        naive_linear(m, past->v[il] + held * v_size, h, n, W("attn_v"), B("attn_v"));
        memcpy(k, past->k[il], all * k_size * sizeof *k);
        memcpy(v, past->v[il], all * v_size * sizeof *v);
        naive_rope(m, q, held, n, m->n_heads);
        naive_rope(m, k, 0, all, m->n_kv_heads);
        for (i = 0; m->round_kv == 1 && i < all * k_size; i++) k[i] = naive_round_f16(k[i]);
        for (i = 0; m->round_kv == 1 && i < all * v_size; i++) v[i] = naive_round_f16(v[i]);
        if (m->round_kv > 1) naive_round_qkv(m, q, n, k, v, all);
        window = m->pattern && il % m->pattern == m->pattern - 1 ? 0 : m->window;
        naive_attention(m, o, q, k, v, held, n, window, window ? NULL : past->received);
        naive_linear(m, y, o, n, W("attn_output"), B("attn_output"));
        for (i = 0; i < n * m->n_embd; i++) x[i] += y[i];

        naive_norm(m, h, x, n, "ffn_norm.weight", (int)il);
        naive_linear(m, gate, h, n, W("ffn_gate"), none);
        naive_linear(m, up, h, n, W("ffn_up"), none);
        for (i = 0; i < n * m->n_ff; i++) gate[i] = naive_silu(gate[i]) * up[i];
        naive_linear(m, y, gate, n, W("ffn_down"), none);
        for (i = 0; i < n * m->n_embd; i++) x[i] += y[i];
#undef W
#undef B
    }
    naive_norm(m, h, x, n, "output_norm.weight", -1);
    naive_linear(m, logits, h, n, head.data ? head : embd, none);
    past->n = all;

    free(x), free(h), free(q), free(k), free(v), free(o), free(y), free(gate), free(up);
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
