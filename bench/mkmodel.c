/* mkmodel: writes a GGUF file of random weights in the shape of a real model, for the benchmark.

       mkmodel SHAPE TYPE OUT       TYPE: F32, F16, BF16, Q8_0, Q4_0
                                    SHAPE: 135m, 0.6b, 1b; with experts, and more memory than
                                    these: olmoe (of OLMoE 1B-7B), v2-lite (of DeepSeek V2-Lite)

   The file is complete: it has a SentencePiece vocabulary of the model's size, with byte tokens, so
   that any reader of GGUF files opens it. Speed depends on shapes and types alone, so it measures
   like the real one; its text is noise. The same arguments give the same bytes on every machine. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../tests/gguf_write.h"

static const struct {
    const char *name;
    model_shape shape;
} shapes[] = {
    {"135m", {.n_embd = 576, .n_layers = 30, .n_heads = 9, .n_kv_heads = 3, .n_ff = 1536,
        .n_vocab = 49152, .tied = 1}},
    {"0.6b", {.n_embd = 1024, .n_layers = 28, .n_heads = 16, .n_kv_heads = 8, .head_dim = 128,
        .n_ff = 3072, .n_vocab = 151936, .tied = 1}},
    {"1b", {.n_embd = 2048, .n_layers = 16, .n_heads = 32, .n_kv_heads = 8, .n_ff = 8192,
        .n_vocab = 128256, .tied = 1}},
    {"olmoe", {.arch = "olmoe", .n_embd = 2048, .n_layers = 16, .n_heads = 16, .n_ff = 1024,
        .n_vocab = 50304, .n_experts = 64, .n_experts_used = 8}},
    {"v2-lite", {.arch = "deepseek2", .n_embd = 2048, .n_layers = 27, .n_heads = 16,
        .head_dim = 192, .head_dim_v = 128, .rope_dim = 64, .kv_rank = 512, .n_dense = 1,
        .n_ff = 10944, .n_ff_exp = 1408, .n_experts = 64, .n_experts_used = 6, .n_shared = 2,
        .n_vocab = 102400}}
};

static const struct {
    const char *name;
    int type;
    uint32_t file_type;         /* general.file_type */
} types[] = {
    {"F32", GGUF_F32, 0}, {"F16", GGUF_F16, 1}, {"BF16", GGUF_BF16, 32}, {"Q8_0", GGUF_Q8_0, 7},
    {"Q4_0", GGUF_Q4_0, 2}
};

enum { N_SHAPES = sizeof shapes / sizeof shapes[0], N_TYPES = sizeof types / sizeof types[0],
    N_DRAWS = 65536 };

static void fail(const char *what, const char *name)
{
    fprintf(stderr, "mkmodel: %s: %s\n", name, what);
    exit(2);
}

static void put(FILE *f, const void *p, size_t n)
{
    if (fwrite(p, 1, n, f) != n) fail("cannot be written", "OUT");
}

/* ---- the file's head ---- */

/* Header, metadata and the table of tensors, up to where the tensors' data begins. */
static void write_head(FILE *f, gguf_writer *w)
{
    gguf_buf head = {NULL, 0, 0};
    gguf_bytes(&head, "GGUF", 4);
    gguf_int(&head, w->version, 4);
    gguf_int(&head, w->n_tensors, 8);
    gguf_int(&head, w->n_meta, 8);
    gguf_bytes(&head, w->meta.data, w->meta.size);
    for (size_t i = 0; i < w->n_tensors; i++) {
        gguf_write_info(w, &head, 0, gguf_tensor_at(w, i));
    }
    gguf_extend(&head, (size_t)gguf_aligned(head.size, w->alignment) - head.size);
    put(f, head.data, head.size);
    free(head.data);
}

/* What the tests' models do without. */
static void write_file_type(gguf_writer *w, size_t type)
{
    gguf_meta_u32(w, "general.file_type", types[type].file_type);
    if (types[type].name[0] == 'Q') gguf_meta_u32(w, "general.quantization_version", 2);
}

/* ---- weights ---- */

/* Floats: uniform in middle +- reach, drawn from a table of N_DRAWS values in the tensor's type. */
static void fill_floats(uint64_t *state, const unsigned char *draws, size_t size, size_t n,
    unsigned char *out)
{
    for (size_t i = 0; i < n; i += 4) {
        uint64_t r = model_random(state);
        for (size_t k = 0; k < 4; k++, r >>= 16) {
            memcpy(out + (i + k) * size, draws + (r & (N_DRAWS - 1)) * size, size);
        }
    }
}

/* Blocks of 32: a scale from the table, with either sign in Q4_0, since its numbers run from -8 to
   7; then random numbers. Q8_0 has no -128. */
static void fill_blocks(uint64_t *state, const unsigned char *draws, int type, size_t n,
    unsigned char *out)
{
    size_t size = type == GGUF_Q8_0 ? 32 : 16;
    for (size_t i = 0; i < n; i += 32, out += 2 + size) {
        uint64_t r = model_random(state);
        memcpy(out, draws + (r & (N_DRAWS - 1)) * 2, 2);
        if (type == GGUF_Q4_0) out[1] ^= (unsigned char)(r >> 32 & 0x80);
        for (size_t k = 0; k < size; k += 8) {
            r = model_random(state);
            memcpy(out + 2 + k, &r, 8);
        }
        for (size_t k = 0; type == GGUF_Q8_0 && k < 32; k++) {
            if (out[2 + k] == 0x80) out[2 + k] = 0;
        }
    }
}

/* The values that a tensor's numbers, or its blocks' scales, are drawn from. Block numbers fill the
   same range as the floats would: 127 steps of a scale in Q8_0, 8 in Q4_0; scales differ by up to a
   quarter. */
static void make_draws(const model_tensor *t, int type, unsigned char *draws)
{
    double steps = type == GGUF_Q8_0 ? 127.0 : type == GGUF_Q4_0 ? 8.0 : 0.0;
    size_t size = type == GGUF_F32 ? 4 : 2;
    for (size_t i = 0; i < N_DRAWS; i++) {
        double u = ((double)i + 0.5) * (2.0 / N_DRAWS) - 1.0;
        double v = steps > 0 ? t->reach / steps * (1.0 + 0.25 * u) : t->middle + t->reach * u;
        float x = (float)v;
        gguf_to_type(steps > 0 ? GGUF_F16 : type, &x, 1, draws + i * size);
    }
}

static void write_tensor(FILE *f, const gguf_writer *w, const model_tensor *t)
{
    static unsigned char draws[N_DRAWS * 4];
    const gguf_tensor_info *info = gguf_tensor_at(w, t->tensor);
    size_t n = (size_t)info->dims[0], row_size = gguf_row_size(info->type, n);
    uint64_t state = t->tensor << 32;
    unsigned char *row = gguf_must(calloc(row_size + w->alignment, 1));
    make_draws(t, info->type, draws);
    for (uint64_t done = 0; done < info->size; done += row_size) {
        if (info->type == GGUF_Q8_0 || info->type == GGUF_Q4_0) {
            fill_blocks(&state, draws, info->type, n, row);
        } else {
            fill_floats(&state, draws, info->type == GGUF_F32 ? 4 : 2, n, row);
        }
        put(f, row, row_size);
    }
    memset(row, 0, w->alignment);
    put(f, row, (size_t)(gguf_aligned(info->size, w->alignment) - info->size));
    free(row);
}

/* ---- the model ---- */

static void write_model(FILE *f, size_t shape, size_t type)
{
    model_shape s = shapes[shape].shape;
    gguf_writer w;
    gguf_buf list = {NULL, 0, 0};
    s.type = types[type].type;
    s.n_ctx = 32768;
    model_defaults(&s);
    gguf_start(&w, s.version, s.alignment);
    model_write_shape(&w, &s);
    write_file_type(&w, type);
    model_write_vocab(&w, &s);
    model_declare_all(&w, &list, &s);
    write_head(f, &w);
    for (size_t i = 0; i < list.size / sizeof(model_tensor); i++) {
        write_tensor(f, &w, (const model_tensor *)(const void *)list.data + i);
    }
    free(list.data);
    gguf_free(&w);
}

int main(int argc, char **argv)
{
    size_t shape = 0, type = 0;
    FILE *f;
    if (argc != 4) fail("usage: mkmodel SHAPE TYPE OUT", "arguments");
    while (shape < N_SHAPES && strcmp(shapes[shape].name, argv[1]) != 0) shape++;
    while (type < N_TYPES && strcmp(types[type].name, argv[2]) != 0) type++;
    if (shape == N_SHAPES) fail("no such shape; there are 135m, 0.6b, 1b, olmoe, v2-lite", argv[1]);
    if (type == N_TYPES) fail("no such type; there are F32, F16, BF16, Q8_0, Q4_0", argv[2]);
    f = fopen(argv[3], "wb");
    if (!f) fail("cannot be opened", argv[3]);
    setvbuf(f, NULL, _IOFBF, 1 << 20);
    write_model(f, shape, type);
    if (fclose(f) != 0) fail("cannot be written", argv[3]);
    return 0;
}
