/* The sections >>gguf and >>model: what a file may hold, and every way in which one can be hostile.

   A hostile file is a good one with a single thing wrong. It lies in a block of exactly its size,
   so that a sanitizer sees a read past its end. Opening it must give the right code and name the
   key or tensor; the allocator counts, so nothing may stay behind, and it hands out 64 MB at most,
   which no count or length of a small file may exceed. */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include <unistd.h>

#include "testing.h"

#define SMALL_BUT .n_heads = 2, .n_kv_heads = 1
#define SMALL .n_layers = 1, .n_embd = 32, .n_ff = 32, .n_vocab = 264, SMALL_BUT
#define LIMIT (64u << 20)

static const model_shape small = {SMALL};

/* Opens a copy of the bytes; the model, if there is one, goes back at once. */
static kvc_result open_bytes(const void *bytes, size_t size) {
    void *copy = gguf_must(malloc(size + !size));
    counter mem = {0};
    kvc_model_desc desc = {0};
    kvc_model *model = (kvc_model *)&mem;
    kvc_result r;
    memcpy(copy, bytes, size);
    mem.limit = LIMIT;
    desc.data = copy;
    desc.data_size = size;
    desc.allocator = counter_hook(&mem);
    memset(&last, 0, sizeof last);
    r = kvc_model_open(&model, &desc, &last);
    if (r == KVC_OK) kvc_model_close(model);
    else assert_null(model);
    CLEAN(&mem);
    assert_int_equal(mem.n_refused, 0);
    free(copy);
    return r;
}

static kvc_result open_image(const gguf_writer *w) {
    return open_bytes(w->image, w->image_size);
}

/* The shape with edits. */
static kvc_result open_edited(const model_shape *shape, const gguf_edit *edits, size_t n) {
    model_shape s = *shape;
    gguf_writer w;
    kvc_result r;
    s.edits = edits;
    s.n_edits = n;
    model_write(&w, &s);
    r = open_image(&w);
    gguf_free(&w);
    return r;
}

static void check_edit(const model_shape *shape, const gguf_edit *e, kvc_result code,
    const char *where) {
    kvc_result r = open_edited(shape, e, 1);
    if (r == code && (code == KVC_OK || (!strcmp(last.where, where) && last.message[0]))) return;
    print_error("edit %d of %s (type %d, number %g, \"%s\")\ngave %d \"%s\": %s\nnot %d \"%s\"\n",
        e->op, e->name, e->type, e->number, e->text ? e->text : "", r, last.where, last.message,
        code, where);
    fail();
}

/* ---- cut short ---- */

/* What an error about a file cut at byte n may name. */
static int names_cut(const gguf_writer *w, size_t n) {
    size_t i;
    if (n < GGUF_HEADER_SIZE) return !strcmp(last.where, "header");
    if (!strcmp(last.where, "metadata_kv_count") || !strcmp(last.where, "tensor_count")) {
        return n < w->data_start;       /* less is left than so many entries need */
    }
    if (n < w->data_start) {
        const char *name = "tensor data";
        char entry[64];
        unsigned n_keys = 0, n_names = 0;
        for (i = 0; i < gguf_mark_count(w); i++) {
            const gguf_mark *m = gguf_mark_at(w, i);
            if (m->field == GGUF_KEY_SIZE || m->field == GGUF_NAME_SIZE) {
                int is_key = m->field == GGUF_KEY_SIZE;
                size_t end = m->at + 8 + strlen(m->name);
                snprintf(entry, sizeof entry, "%s %u", is_key ? "metadata entry" : "tensor",
                    is_key ? n_keys++ : n_names++);
                if (n >= m->at && n < end) name = entry;
                if (n >= m->at && n < end) break;
            }
            if ((m->field == GGUF_META_END || m->field == GGUF_TENSOR_END) && n < m->at) {
                name = m->name;
                break;
            }
        }
        return !strcmp(last.where, name);
    }
    for (i = 0; i < w->n_tensors; i++) {
        const gguf_tensor_info *t = gguf_tensor_at(w, i);
        if (!strcmp(t->name, last.where)) return n < w->data_start + t->offset + t->size;
    }
    return 0;
}

static void check_cut(const gguf_writer *w, size_t n) {
    kvc_result r = open_bytes(w->image, n);
    if (r == KVC_ERROR_FORMAT && names_cut(w, n)) return;
    print_error("cut at %u of %u: %d \"%s\": %s\n", (unsigned)n, (unsigned)w->image_size, r,
        last.where, last.message);
    fail();
}

static void test_truncated(void **state) {
    gguf_writer w;
    size_t n, step;
    (void)state;
    model_write(&w, &small);
    assert_int_equal(open_image(&w), KVC_OK);
    for (n = 1; n <= w.data_start; n++) check_cut(&w, n);
    step = (w.image_size - w.data_start) / 400;
    for (; n < w.image_size - 64; n += step) check_cut(&w, n);
    for (n = w.image_size - 64; n < w.image_size; n++) check_cut(&w, n);
    FAILS(KVC_ERROR_FORMAT, "header", open_bytes(w.image, 0));
    gguf_free(&w);
}

/* ---- counts, lengths, offsets ---- */

static const uint64_t hostile[] = {
    0x7fffffff, 0x80000000u, 0xffffffffu, 0x100000000u, 0x100000001u, ((uint64_t)1 << 42) + 1,
    ((uint64_t)1 << 57) + 1, (uint64_t)1 << 61, (uint64_t)1 << 62, 0x7fffffffffffffffu,
    0x8000000000000000u, 0x8000000000000001u, 0xffffffffffffffe0u, 0xfffffffffffffff0u,
    0xffffffffffffffffu
};

/* The key or tensor a mark belongs to, as errors name it. */
static void owner(const gguf_writer *w, const gguf_mark *m, char out[64]) {
    unsigned i, n = 0;
    snprintf(out, 64, "%s", m->name);
    if (m->field == GGUF_N_META) snprintf(out, 64, "metadata_kv_count");
    if (m->field == GGUF_N_TENSORS) snprintf(out, 64, "tensor_count");
    if (m->field != GGUF_KEY_SIZE && m->field != GGUF_NAME_SIZE) return;
    for (i = 0; gguf_mark_at(w, i) != m; i++) n += gguf_mark_at(w, i)->field == m->field;
    snprintf(out, 64, "%s %u", m->field == GGUF_KEY_SIZE ? "metadata entry" : "tensor", n);
}

static void check_patch(gguf_writer *w, const gguf_mark *m, uint64_t value, kvc_result code) {
    unsigned char kept[8];
    char name[64];
    kvc_result r;
    owner(w, m, name);
    memcpy(kept, w->image + m->at, m->size);
    gguf_patch(w, m, value);
    r = open_image(w);
    memcpy(w->image + m->at, kept, m->size);
    if (r == code && !strcmp(last.where, name) && last.message[0]) return;
    print_error("field %d of \"%s\" set to %llx\ngave %d \"%s\": %s\nnot %d \"%s\"\n", m->field,
        m->name, (unsigned long long)value, r, last.where, last.message, code, name);
    fail();
}

static void test_hostile_numbers(void **state) {
    gguf_writer w;
    size_t i, k;
    (void)state;
    model_write(&w, &small);
    for (i = 0; i < gguf_mark_count(&w); i++) {
        const gguf_mark *m = gguf_mark_at(&w, i);
        if (m->size != 8 || m->field == GGUF_VALUE) continue;
        for (k = 0; k < COUNT(hostile); k++) check_patch(&w, m, hostile[k], KVC_ERROR_FORMAT);
        if (m->field == GGUF_KEY_SIZE || m->field == GGUF_NAME_SIZE || m->field == GGUF_DIM) {
            gguf_patch(&w, m, 0);
            assert_int_equal(open_image(&w), KVC_ERROR_FORMAT);
            gguf_free(&w);
            model_write(&w, &small);
        }
    }
    gguf_free(&w);
}

static void test_hostile_types(void **state) {
    static const uint32_t no_value_type[] = {13, 14, 255, 0x7fffffff, 0x80000000u, 0xffffffffu};
    static const uint32_t no_tensor_type[] = {4, 5, 31, 32, 36, 40, 255, 0x80000000u, 0xffffffffu};
    static const uint32_t no_dims[] = {0, 5, 6, 0x7fffffff, 0x80000000u, 0xffffffffu};
    gguf_writer w;
    size_t i, k;
    (void)state;
    model_write(&w, &small);
    for (i = 0; i < gguf_mark_count(&w); i++) {
        const gguf_mark *m = gguf_mark_at(&w, i);
        for (k = 0; k < COUNT(no_value_type); k++) {
            if (m->field == GGUF_VALUE_TYPE || m->field == GGUF_ITEM_TYPE)
                check_patch(&w, m, no_value_type[k], KVC_ERROR_FORMAT);
        }
        if (m->field == GGUF_ITEM_TYPE)
            check_patch(&w, m, GGUF_VALUE_ARRAY, KVC_ERROR_UNSUPPORTED);
        for (k = 0; k < COUNT(no_tensor_type); k++) {
            if (m->field == GGUF_TENSOR_TYPE)
                check_patch(&w, m, no_tensor_type[k], KVC_ERROR_FORMAT);
        }
        for (k = 0; k < COUNT(no_dims); k++) {
            if (m->field == GGUF_N_DIMS) check_patch(&w, m, no_dims[k], KVC_ERROR_FORMAT);
        }
    }
    gguf_free(&w);
}

/* The bytes of a tensor are rows * 128; 2^57 + 1 rows wrap to one row, which the file has. Nothing
   comes after the last tensor whose offset could give it away. */
static void test_product_overflow(void **state) {
    static const char *const names[] = {"token_embd.weight", "output.weight"};
    gguf_writer w;
    size_t i;
    (void)state;
    model_write(&w, &small);
    assert_string_equal(gguf_tensor_at(&w, 0)->name, names[0]);
    assert_string_equal(gguf_tensor_at(&w, (size_t)w.n_tensors - 1)->name, names[1]);
    for (i = 0; i < COUNT(names); i++) {
        const gguf_mark *rows = gguf_mark_find(&w, GGUF_DIM, names[i], 1);
        check_patch(&w, rows, ((uint64_t)1 << 57) + 1, KVC_ERROR_FORMAT);
        check_patch(&w, rows, ((uint64_t)1 << 59) + 1, KVC_ERROR_FORMAT);
        check_patch(&w, rows, ((uint64_t)1 << 42) + 1, KVC_ERROR_FORMAT);
    }
    gguf_free(&w);
}

/* Any byte before the tensor data may be anything: no crash, no leak, no large allocation. */
static void test_any_byte(void **state) {
    gguf_writer w;
    uint64_t random = 1;
    size_t i, n_open = 0;
    (void)state;
    model_write(&w, &small);
    for (i = 0; i < w.data_start; i++) {
        unsigned char kept = w.image[i];
        w.image[i] = (unsigned char)(kept ^ (1u << model_random(&random) % 8));
        n_open += open_image(&w) == KVC_OK;
        w.image[i] = (unsigned char)model_random(&random);
        n_open += open_image(&w) == KVC_OK;
        w.image[i] = kept;
    }
    assert_true(n_open > 100);          /* spellings may change, at least */
    gguf_free(&w);
}

/* ---- the header ---- */

static void test_header(void **state) {
    static const struct {
        size_t at;
        const char *bytes;
        kvc_result code;
    } rows[] = {
        {0, "GGUG", KVC_ERROR_FORMAT},
        {0, "FUGG", KVC_ERROR_FORMAT},
        {0, "ggjt", KVC_ERROR_FORMAT},
        {0, "\0\0\0\0", KVC_ERROR_FORMAT},
        {4, "\0\0\0\0", KVC_ERROR_UNSUPPORTED},
        {4, "\1\0\0\0", KVC_ERROR_UNSUPPORTED},
        {4, "\4\0\0\0", KVC_ERROR_UNSUPPORTED},
        {4, "\377\377\377\377", KVC_ERROR_UNSUPPORTED},
        {4, "\0\0\0\3", KVC_ERROR_UNSUPPORTED},         /* big-endian */
        {4, "\0\0\0\2", KVC_ERROR_UNSUPPORTED}
    };
    gguf_writer w;
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        model_write(&w, &small);
        memcpy(w.image + rows[i].at, rows[i].bytes, 4);
        FAILS(rows[i].code, "header", open_image(&w));
        gguf_free(&w);
    }
    model_write(&w, &small);
    memcpy(w.image + 4, "\0\0\0\3", 4);
    FAILS(KVC_ERROR_UNSUPPORTED, "header", open_image(&w));
    assert_non_null(strstr(last.message, "big-endian"));
    gguf_free(&w);
}

/* ---- keys ---- */

#define LLAMA(key) "llama." key
#define NUMBER(key, type, value) {key, GGUF_EDIT_NUMBER, GGUF_VALUE_##type, value, NULL, 0, {0}}
#define TEXT(key, value) {key, GGUF_EDIT_TEXT, 0, 0, value, 0, {0}}
#define ARRAY(key, type, n) {key, GGUF_EDIT_ARRAY, GGUF_VALUE_##type, n, NULL, 0, {0}}

static const char *const required[] = {
    "general.architecture", LLAMA("context_length"), LLAMA("embedding_length"),
    LLAMA("block_count"), LLAMA("feed_forward_length"), LLAMA("attention.head_count"),
    LLAMA("attention.layer_norm_rms_epsilon")
};

static void test_missing_keys(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(required); i++) {
        gguf_edit e = {0};
        e.name = required[i];
        e.op = GGUF_EDIT_OMIT;
        check_edit(&small, &e, KVC_ERROR_FORMAT, required[i]);
    }
}

/* Every key that the loader reads, as a string, a number, an array: whatever it is not. */
static void test_wrong_types(void **state) {
    static const gguf_edit rows[] = {
        NUMBER("general.architecture", U32, 7),
        ARRAY("general.architecture", U8, 5),
        TEXT(LLAMA("context_length"), "512"),
        NUMBER(LLAMA("context_length"), F32, 512),
        NUMBER(LLAMA("context_length"), BOOL, 1),
        TEXT(LLAMA("embedding_length"), ""),
        NUMBER(LLAMA("embedding_length"), F64, 32),
        TEXT(LLAMA("block_count"), "1"),
        NUMBER(LLAMA("block_count"), F32, 1),
        TEXT(LLAMA("feed_forward_length"), "x"),
        TEXT(LLAMA("attention.head_count"), "2"),
        TEXT(LLAMA("attention.head_count_kv"), "1"),
        NUMBER(LLAMA("attention.head_count_kv"), F32, 1),
        TEXT(LLAMA("attention.layer_norm_rms_epsilon"), "1e-5"),
        NUMBER(LLAMA("attention.layer_norm_rms_epsilon"), BOOL, 1),
        TEXT(LLAMA("attention.key_length"), "16"),
        TEXT(LLAMA("attention.value_length"), "16"),
        TEXT(LLAMA("attention.sliding_window"), "16"),
        TEXT(LLAMA("attention.sliding_window_pattern"), "2"),
        ARRAY(LLAMA("attention.sliding_window_pattern"), U32, 2),
        ARRAY(LLAMA("attention.sliding_window_pattern"), BOOL, 3),  /* not one for each layer */
        TEXT(LLAMA("rope.dimension_count"), "16"),
        NUMBER(LLAMA("rope.dimension_count"), F32, 16),
        TEXT(LLAMA("rope.freq_base"), "10000"),
        TEXT(LLAMA("rope.scaling.factor"), "4"),
        NUMBER(LLAMA("rope.scaling.type"), U32, 1),
        TEXT(LLAMA("vocab_size"), "264"),
        NUMBER("tokenizer.ggml.model", U32, 1),
        TEXT("tokenizer.ggml.tokens", "a"),
        NUMBER("tokenizer.ggml.tokens", U32, 264),
        ARRAY("tokenizer.ggml.tokens", U32, 264),
        TEXT("tokenizer.ggml.scores", "a"),
        ARRAY("tokenizer.ggml.scores", STRING, 264),
        TEXT("tokenizer.ggml.token_type", "a"),
        ARRAY("tokenizer.ggml.token_type", F32, 264),
        TEXT("tokenizer.ggml.bos_token_id", "1"),
        TEXT("tokenizer.ggml.eos_token_id", "2"),
        TEXT("tokenizer.ggml.add_bos_token", "true")
    };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++)
        check_edit(&small, &rows[i], KVC_ERROR_FORMAT, rows[i].name);
}

/* Values of the right type that no model can have. */
static void test_bad_values(void **state) {
    static const gguf_edit rows[] = {
        NUMBER(LLAMA("context_length"), U32, 0),
        NUMBER(LLAMA("context_length"), U64, 18446744073709551615.0),
        NUMBER(LLAMA("embedding_length"), U32, 0),
        NUMBER(LLAMA("embedding_length"), U32, 4294967295.0),
        NUMBER(LLAMA("embedding_length"), I32, -32),
        NUMBER(LLAMA("block_count"), U32, 0),
        NUMBER(LLAMA("block_count"), U32, 4294967295.0),
        NUMBER(LLAMA("block_count"), U64, 4294967297.0),
        NUMBER(LLAMA("block_count"), I64, -1),
        NUMBER(LLAMA("feed_forward_length"), U32, 0),
        NUMBER(LLAMA("feed_forward_length"), U32, 2147483648.0),
        NUMBER(LLAMA("attention.head_count"), U32, 0),
        NUMBER(LLAMA("attention.head_count"), U32, 4294967295.0),
        NUMBER(LLAMA("attention.head_count_kv"), U32, 0),
        NUMBER(LLAMA("attention.head_count_kv"), U32, 3),           /* 2 heads */
        NUMBER(LLAMA("attention.head_count_kv"), U32, 2147483648.0),
        NUMBER(LLAMA("attention.key_length"), U32, 0),
        NUMBER(LLAMA("attention.key_length"), U32, 2147483648.0),
        NUMBER(LLAMA("attention.value_length"), U32, 0),
        NUMBER(LLAMA("attention.layer_norm_rms_epsilon"), F32, -1e-5),
        NUMBER(LLAMA("attention.layer_norm_rms_epsilon"), F32, NAN),
        NUMBER(LLAMA("attention.layer_norm_rms_epsilon"), F32, INFINITY),
        NUMBER(LLAMA("rope.freq_base"), F32, 0),
        NUMBER(LLAMA("rope.freq_base"), F32, -10000),
        NUMBER(LLAMA("rope.freq_base"), F32, NAN),
        NUMBER(LLAMA("rope.freq_base"), F32, INFINITY),
        NUMBER(LLAMA("rope.dimension_count"), U32, 15),             /* odd */
        NUMBER(LLAMA("rope.dimension_count"), U32, 18),             /* heads have 16 */
        NUMBER(LLAMA("rope.scaling.factor"), F32, 0),
        NUMBER(LLAMA("rope.scaling.factor"), F32, NAN),
        NUMBER(LLAMA("vocab_size"), U32, 263),
        NUMBER("tokenizer.ggml.bos_token_id", U32, 264),            /* 264 tokens */
        NUMBER("tokenizer.ggml.bos_token_id", U32, 4294967294.0),
        NUMBER("tokenizer.ggml.bos_token_id", U64, 1099511627776.0),
        NUMBER("tokenizer.ggml.bos_token_id", I32, -2),
        NUMBER("tokenizer.ggml.eos_token_id", U32, 264),
        NUMBER("tokenizer.ggml.unknown_token_id", U32, 264),
        ARRAY("tokenizer.ggml.tokens", STRING, 265),                /* more than embedding rows */
        ARRAY("tokenizer.ggml.tokens", STRING, 0),
        ARRAY("tokenizer.ggml.scores", F32, 263),
        ARRAY("tokenizer.ggml.scores", F32, 0),
        ARRAY("tokenizer.ggml.token_type", I32, 263)
    };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++)
        check_edit(&small, &rows[i], KVC_ERROR_FORMAT, rows[i].name);
}

/* Two keys that contradict each other name one of them. */
static void test_contradictions(void **state) {
    static const gguf_edit heads = NUMBER(LLAMA("attention.head_count"), U32, 3);
    static const gguf_edit kv = NUMBER(LLAMA("attention.head_count_kv"), U32, 4);
    (void)state;
    assert_int_equal(open_edited(&small, &heads, 1), KVC_ERROR_FORMAT);     /* 32 / 3 */
    assert_true(!strncmp(last.where, LLAMA("attention."), 16));
    assert_int_equal(open_edited(&small, &kv, 1), KVC_ERROR_FORMAT);        /* 2 / 4 */
    assert_string_equal(last.where, LLAMA("attention.head_count_kv"));
}

static void test_unsupported(void **state) {
    static const struct {
        gguf_edit edit;
        const char *said;           /* in the message */
    } rows[] = {
        {TEXT("general.architecture", "mamba"), "mamba"},
        {TEXT("general.architecture", ""), "''"},
        {TEXT("general.architecture", "a\n\033[1mb"), "a??[1mb"},
        {TEXT("general.architecture",
            "a name as long as this one must not leave the message, whatever it is that makes it"),
            "a name as long as this one"},
        {TEXT(LLAMA("rope.scaling.type"), "spiral"), ""},
        {ARRAY(LLAMA("attention.head_count"), U32, 2), ""},
        {ARRAY("general.tags", ARRAY, 2), ""},
    };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        check_edit(&small, &rows[i].edit, KVC_ERROR_UNSUPPORTED, rows[i].edit.name);
        if (strstr(last.message, rows[i].said)) continue;
        print_error("\"%s\" does not say \"%s\"\n", last.message, rows[i].said);
        fail();
    }
}

static void test_duplicates(void **state) {
    gguf_writer w;
    size_t i;
    (void)state;
    model_write(&w, &small);
    for (i = 0; i < gguf_mark_count(&w); i++) {
        const gguf_mark *m = gguf_mark_at(&w, i);
        gguf_edit e = {0};
        if (m->field != GGUF_KEY_SIZE && m->field != GGUF_NAME_SIZE) continue;
        e.name = m->name;
        e.op = GGUF_EDIT_TWICE;
        check_edit(&small, &e, KVC_ERROR_FORMAT, m->name);
    }
    gguf_free(&w);
}

/* ---- alignment ---- */

static void test_bad_alignment(void **state) {
    static const gguf_edit rows[] = {
        NUMBER("general.alignment", U32, 0),
        NUMBER("general.alignment", U32, 3),
        NUMBER("general.alignment", U32, 33),
        NUMBER("general.alignment", U32, 2147483648.0),
        NUMBER("general.alignment", U32, 4294967295.0),
        NUMBER("general.alignment", U8, 32),
        NUMBER("general.alignment", U64, 32),
        NUMBER("general.alignment", I32, 32),
        NUMBER("general.alignment", F32, 32),
        NUMBER("general.alignment", BOOL, 1),
        TEXT("general.alignment", "32"),
        ARRAY("general.alignment", U32, 1)
    };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++)
        check_edit(&small, &rows[i], KVC_ERROR_FORMAT, "general.alignment");
}

/* An offset off its alignment, even where the data would be there. */
static void test_unaligned_offset(void **state) {
    gguf_writer w;
    (void)state;
    model_write(&w, &small);
    check_patch(&w, gguf_mark_find(&w, GGUF_OFFSET, "token_embd.weight", 0), 4, KVC_ERROR_FORMAT);
    gguf_free(&w);
}

/* ---- tensors ---- */

static void test_tensors(void **state) {
    gguf_writer w;
    size_t i;
    (void)state;
    model_write(&w, &small);
    for (i = 0; i < w.n_tensors; i++) {
        const gguf_tensor_info *t = gguf_tensor_at(&w, i);
        int is_output = !strcmp(t->name, "output.weight");
        int is_embd = !strcmp(t->name, "token_embd.weight");
        gguf_edit e = {0};
        e.name = t->name;
        e.op = GGUF_EDIT_OMIT;          /* without an output, the embedding serves */
        check_edit(&small, &e, is_output ? KVC_OK : KVC_ERROR_FORMAT, t->name);

        e.op = GGUF_EDIT_DIMS;
        e.n_dims = t->n_dims;
        memcpy(e.dims, t->dims, sizeof e.dims);
        e.dims[0] += 32;                /* longer rows */
        check_edit(&small, &e, KVC_ERROR_FORMAT, t->name);
        e.dims[0] = 1;
        check_edit(&small, &e, KVC_ERROR_FORMAT, t->name);
        e.dims[0] = t->dims[0];
        e.n_dims = 2;
        e.dims[1] = t->n_dims == 2 ? t->dims[1] - 1 : 2;    /* a row less; a vector with two */
        check_edit(&small, &e, KVC_ERROR_FORMAT, is_embd ? "tokenizer.ggml.tokens" : t->name);
        e.n_dims = 3;
        e.dims[1] = t->n_dims == 2 ? t->dims[1] : 1;
        e.dims[2] = 2;
        check_edit(&small, &e, KVC_ERROR_FORMAT, t->name);
        e.dims[2] = 1;                  /* a dimension of 1 more says the same */
        check_edit(&small, &e, KVC_OK, "");
        e.dims[2] = 0;
        check_edit(&small, &e, KVC_ERROR_FORMAT, t->name);
    }
    gguf_free(&w);
}

/* Types that are known but not computed with are named. */
static void test_tensor_types(void **state) {
    static const model_shape wide = {SMALL_BUT, .n_layers = 1, .n_embd = 256, .n_ff = 256};
    static const struct {
        int type;
        const char *name;
    } rows[] = {
        {3, "Q4_1"}, {6, "Q5_0"}, {7, "Q5_1"}, {10, "Q2_K"}, {11, "Q3_K"}, {12, "Q4_K"},
        {13, "Q5_K"}, {14, "Q6_K"}, {20, "IQ4_NL"}, {16, "IQ2_XXS"}, {24, "I8"}, {26, "I32"},
        {39, "MXFP4"}
    };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        gguf_edit e = {"blk.0.ffn_up.weight", GGUF_EDIT_TYPE, 0, 0, NULL, 0, {0}};
        e.type = rows[i].type;
        check_edit(&wide, &e, KVC_ERROR_UNSUPPORTED, e.name);
        assert_non_null(strstr(last.message, rows[i].name));
    }
}

/* Rows that are no whole number of blocks. */
static void test_partial_blocks(void **state) {
    static const model_shape odd = {SMALL_BUT, .n_layers = 1, .n_embd = 40, .n_ff = 32};
    static const int types[] = {GGUF_Q8_0, GGUF_Q4_0, 12};
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(types); i++) {
        gguf_edit e = {"blk.0.ffn_up.weight", GGUF_EDIT_TYPE, 0, 0, NULL, 0, {0}};
        e.type = types[i];
        check_edit(&odd, &e, KVC_ERROR_FORMAT, e.name);
    }
}

/* Layers that the file has but block_count does not would be left out of the sum. */
static void test_unused_tensors(void **state) {
    static const model_shape two = {SMALL_BUT, .n_layers = 2, .n_embd = 32};
    static const gguf_edit one = NUMBER(LLAMA("block_count"), U32, 1);
    static const gguf_edit three = NUMBER(LLAMA("block_count"), U32, 3);
    static const gguf_edit many = NUMBER(LLAMA("block_count"), U32, 4096);
    (void)state;
    check_edit(&two, &one, KVC_ERROR_UNSUPPORTED, "blk.1.attn_norm.weight");
    check_edit(&two, &three, KVC_ERROR_FORMAT, "blk.2.attn_norm.weight");
    check_edit(&two, &many, KVC_ERROR_FORMAT, "blk.2.attn_norm.weight");
}

/* ---- arguments ---- */

static int never(float fraction, void *user) {
    (void)fraction;
    (void)user;
    return 0;
}

static void *no_alloc(size_t size, size_t align, void *user) {
    (void)size;
    (void)align;
    (void)user;
    return NULL;
}

static void test_arguments(void **state) {
    kvc_model_desc good = {0}, desc;
    kvc_model *model;
    size_t size;
    void *image = model_build(&small, &size);
    (void)state;
    good.data = image;
    good.data_size = size;
    FAILS(KVC_ERROR_ARGUMENT, NULL, kvc_model_open(NULL, &good, &last));
    FAILS(KVC_ERROR_ARGUMENT, NULL, kvc_model_open(&model, NULL, &last));
    assert_null(model);
    desc = good;
    desc.start_canary = 1;
    FAILS(KVC_ERROR_ARGUMENT, "desc", kvc_model_open(&model, &desc, &last));
    desc = good;
    desc.end_canary = 1;
    FAILS(KVC_ERROR_ARGUMENT, "desc", kvc_model_open(&model, &desc, &last));
    desc = good;
    desc.path = "both";
    FAILS(KVC_ERROR_ARGUMENT, "path", kvc_model_open(&model, &desc, &last));
    desc = good;
    desc.data = NULL;
    FAILS(KVC_ERROR_ARGUMENT, NULL, kvc_model_open(&model, &desc, &last));
    desc = good;
    desc.allocator.alloc = no_alloc;
    FAILS(KVC_ERROR_ARGUMENT, "allocator", kvc_model_open(&model, &desc, &last));
    desc = good;
    desc.start_canary = 1;
    assert_int_equal(kvc_model_open(&model, &desc, NULL), KVC_ERROR_ARGUMENT);
    assert_null(model);
    desc = good;
    desc.weights = (kvc_weights)3;
    FAILS(KVC_ERROR_ARGUMENT, "weights", kvc_model_open(&model, &desc, &last));
    desc = good;
    desc.n_threads = 257;
    FAILS(KVC_ERROR_ARGUMENT, "n_threads", kvc_model_open(&model, &desc, &last));
    desc = good;
    desc.progress = never;
    assert_int_equal(kvc_model_open(&model, &desc, NULL), KVC_ERROR_CANCELLED);
    assert_null(model);
    kvc_model_close(NULL);
    free(image);
}

/* The allocator says no at its k-th call, for every k; packed weights need one more. */
static void test_no_memory(void **state) {
    model_shape shape = small;
    size_t size, k;
    void *image;
    (void)state;
    shape.type = GGUF_Q8_0;
    image = model_build(&shape, &size);
    for (k = 1; k < 100; k++) {
        counter mem = {0};
        kvc_model_desc desc = {0};
        kvc_model *model;
        kvc_result r;
        mem.fail_at = k;
        desc.data = image;
        desc.data_size = size;
        desc.allocator = counter_hook(&mem);
        r = kvc_model_open(&model, &desc, &last);
        if (r == KVC_OK) {
            kvc_model_close(model);
            CLEAN(&mem);
            break;
        }
        assert_int_equal(r, KVC_ERROR_MEMORY);
        assert_null(model);
        CLEAN(&mem);
    }
    assert_true(k > 1 && k < 100);
    free(image);
}

/* ---- progress ---- */

typedef struct progress {
    float fraction;
    int n, stop_at;             /* reports so far; the one that answers stop, 0: none */
} progress;

static int on_progress(float fraction, void *user) {
    progress *p = (progress *)user;
    assert_true(fraction >= p->fraction && fraction <= 1.0f);
    assert_true(p->fraction < 1.0f);            /* the end comes once */
    p->fraction = fraction;
    return ++p->n != p->stop_at;
}

/* Weights are packed by two threads meanwhile. */
static void test_progress(void **state) {
    model_shape shape = small;
    size_t size;
    void *image;
    int stop_at, n = 1;
    (void)state;
    shape.type = GGUF_Q8_0;
    image = model_build(&shape, &size);
    for (stop_at = 0; stop_at <= n; stop_at++) {
        progress p = {-1.0f, 0, 0};
        counter mem = {0};
        kvc_model_desc desc = {0};
        kvc_model *model;
        p.stop_at = stop_at;
        desc.data = image;
        desc.data_size = size;
        desc.allocator = counter_hook(&mem);
        desc.progress = on_progress;
        desc.user = &p;
        desc.n_threads = 2;
        if (!stop_at) {
            OK(kvc_model_open(&model, &desc, &last));
            assert_true(p.fraction >= 1.0f);
            n = p.n;
            kvc_model_close(model);
        } else {
            FAILS(KVC_ERROR_CANCELLED, NULL, kvc_model_open(&model, &desc, &last));
            assert_null(model);
            assert_int_equal(p.n, stop_at);     /* it was not asked again */
        }
        CLEAN(&mem);
    }
    assert_true(n >= 2);
    free(image);
}

/* ---- good files ---- */

static void write_metas(gguf_writer *w) {
    static const float floats[3] = {1.5f, -2.0f, 0.25f};
    static const unsigned char bytes[4] = {1, 2, 254, 255}, flags[2] = {1, 0};
    static const uint64_t wide[2] = {UINT64_MAX, 1};
    static const char *const texts[4] = {"", "a", "two words", "\xE2\x96\x81x"};
    gguf_meta_number(w, "t.u8", GGUF_VALUE_U8, 200);
    gguf_meta_number(w, "t.i8", GGUF_VALUE_I8, -100);
    gguf_meta_number(w, "t.u16", GGUF_VALUE_U16, 60000);
    gguf_meta_number(w, "t.i16", GGUF_VALUE_I16, -30000);
    gguf_meta_number(w, "t.u32", GGUF_VALUE_U32, 4000000000.0);
    gguf_meta_number(w, "t.i32", GGUF_VALUE_I32, -2000000000.0);
    gguf_meta_number(w, "t.f32", GGUF_VALUE_F32, -0.75);
    gguf_meta_number(w, "t.bool", GGUF_VALUE_BOOL, 1);
    gguf_meta_string(w, "t.text", "hello");
    gguf_meta_number(w, "t.u64", GGUF_VALUE_U64, 9007199254740992.0);
    gguf_meta_number(w, "t.i64", GGUF_VALUE_I64, -9007199254740992.0);
    gguf_meta_number(w, "t.f64", GGUF_VALUE_F64, 1e300);
    gguf_meta_array(w, "t.floats", GGUF_VALUE_F32, 3, floats);
    gguf_meta_array(w, "t.bytes", GGUF_VALUE_I8, 4, bytes);
    gguf_meta_array(w, "t.flags", GGUF_VALUE_BOOL, 2, flags);
    gguf_meta_array(w, "t.wide", GGUF_VALUE_U64, 2, wide);
    gguf_meta_array(w, "t.empty", GGUF_VALUE_U32, 0, floats);
    gguf_meta_strings(w, "t.texts", 4, texts);
}

static const model_shape with_metas = {SMALL, .more = write_metas};

static void check_number(const kvc_model *model, const char *key, kvc_meta_type type, double want) {
    kvc_meta m;
    double got = 7;
    assert_true(kvc_model_meta_find(model, key, &m));
    assert_int_equal(m.type, type);
    assert_int_equal(m.n_items, 1);
    assert_int_equal(m.key_size, strlen(key));
    assert_memory_equal(m.key, key, m.key_size);
    assert_true(kvc_meta_number(&m, &got));
    assert_true(got <= want && got >= want);
}

static void check_items(const kvc_model *model, const char *key, kvc_meta_type type, size_t n,
    const double *want) {
    kvc_meta m, item;
    double got;
    size_t i;
    assert_true(kvc_model_meta_find(model, key, &m));
    assert_int_equal(m.type, KVC_META_ARRAY);
    assert_int_equal(m.item_type, type);
    assert_int_equal(m.n_items, n);
    assert_false(kvc_meta_number(&m, &got));
    for (i = 0; i < n; i++) {
        OK(kvc_meta_item(&m, i, &item));
        assert_int_equal(item.type, type);
        assert_true(kvc_meta_number(&item, &got));
        assert_true(got <= want[i] && got >= want[i]);
    }
    assert_int_equal(kvc_meta_item(&m, n, &item), KVC_ERROR_ARGUMENT);
    assert_int_equal(kvc_meta_item(&m, UINT64_MAX, &item), KVC_ERROR_ARGUMENT);
}

static void check_texts(const kvc_model *model) {
    static const char *const texts[4] = {"", "a", "two words", "\xE2\x96\x81x"};
    kvc_meta m, item;
    double got = 7;
    size_t i;
    assert_true(kvc_model_meta_find(model, "t.text", &m));
    assert_int_equal(m.type, KVC_META_STRING);
    assert_int_equal(m.data_size, 5);
    assert_memory_equal(m.data, "hello", 5);
    assert_false(kvc_meta_number(&m, &got));
    assert_true(got >= 0.0 && got <= 0.0);
    assert_int_equal(kvc_meta_item(&m, 0, &item), KVC_ERROR_ARGUMENT);
    assert_true(kvc_model_meta_find(model, "t.texts", &m));
    assert_int_equal(m.n_items, 4);
    for (i = 0; i < 4; i++) {
        OK(kvc_meta_item(&m, i, &item));
        assert_int_equal(item.type, KVC_META_STRING);
        assert_int_equal(item.data_size, strlen(texts[i]));
        assert_memory_equal(item.data, texts[i], item.data_size);
    }
    assert_int_equal(kvc_meta_item(&m, 4, &item), KVC_ERROR_ARGUMENT);
}

static void check_metas(const kvc_model *model) {
    static const double floats[3] = {1.5, -2, 0.25}, bytes[4] = {1, 2, -2, -1}, flags[2] = {1, 0};
    static const double wide[2] = {18446744073709551615.0, 1};
    kvc_meta m;
    size_t i, n = kvc_model_meta_count(model);
    check_number(model, "t.u8", KVC_META_U8, 200);
    check_number(model, "t.i8", KVC_META_I8, -100);
    check_number(model, "t.u16", KVC_META_U16, 60000);
    check_number(model, "t.i16", KVC_META_I16, -30000);
    check_number(model, "t.u32", KVC_META_U32, 4000000000.0);
    check_number(model, "t.i32", KVC_META_I32, -2000000000.0);
    check_number(model, "t.f32", KVC_META_F32, -0.75);
    check_number(model, "t.bool", KVC_META_BOOL, 1);
    check_number(model, "t.u64", KVC_META_U64, 9007199254740992.0);
    check_number(model, "t.i64", KVC_META_I64, -9007199254740992.0);
    check_number(model, "t.f64", KVC_META_F64, 1e300);
    check_items(model, "t.floats", KVC_META_F32, 3, floats);
    check_items(model, "t.bytes", KVC_META_I8, 4, bytes);
    check_items(model, "t.flags", KVC_META_BOOL, 2, flags);
    check_items(model, "t.wide", KVC_META_U64, 2, wide);
    check_items(model, "t.empty", KVC_META_U32, 0, NULL);
    check_texts(model);
    assert_false(kvc_model_meta_find(model, "t.absent", &m));
    assert_null(m.key);
    assert_false(kvc_model_meta_find(model, "", &m));
    assert_false(kvc_model_meta_find(model, "token_embd.weight", &m));      /* a tensor's name */
    for (i = 0; i < n; i++) {           /* every entry can be walked to and found again */
        kvc_meta found;
        char key[128];
        assert_int_equal(kvc_model_meta_at(model, i, &m), KVC_OK);
        snprintf(key, sizeof key, "%.*s", (int)m.key_size, m.key);
        assert_true(kvc_model_meta_find(model, key, &found));
        assert_memory_equal(&m, &found, sizeof m);
    }
    assert_int_equal(kvc_model_meta_at(model, n, &m), KVC_ERROR_ARGUMENT);
}

/* Logits after a few tokens, as a hash: two openings of one model must agree. */
static uint64_t try_model(const kvc_model *model) {
    rig r;
    kvc_token text[9];
    float *logits;
    uint64_t hash;
    memset(&r, 0, sizeof r);
    r.model = (kvc_model *)(uintptr_t)model;
    kvc_model_query(model, &r.info);
    random_tokens(text, 9, r.info.n_vocab, 1);
    logits = cold_run(&r, text, 9, KVC_KV_F32);
    hash = hash_floats(logits, 9 * (size_t)r.info.n_vocab, 1);
    free(logits);
    return hash;
}

static uint64_t try_buffer(const void *data, size_t size) {
    kvc_model_desc desc = {0};
    kvc_model *model;
    uint64_t hash;
    desc.data = data;
    desc.data_size = size;
    OK(kvc_model_open(&model, &desc, &last));
    check_metas(model);
    hash = try_model(model);
    kvc_model_close(model);
    return hash;
}

static void test_versions(void **state) {
    model_shape shape = with_metas;
    size_t size;
    void *image;
    uint64_t hash[2];
    uint32_t version;
    (void)state;
    for (version = 2; version <= 3; version++) {
        shape.version = version;
        image = model_build(&shape, &size);
        hash[version - 2] = try_buffer(image, size);
        free(image);
    }
    assert_true(hash[0] == hash[1]);
}

/* Alignments of the file, and a buffer at an odd address: weights are read wherever they lie. */
static void test_alignments(void **state) {
    static const uint32_t alignments[] = {32, 1, 2, 8, 64, 256, 65536};
    static const int types[] = {GGUF_F32, GGUF_F16, GGUF_BF16, GGUF_Q8_0, GGUF_Q4_0};
    size_t i, t;
    (void)state;
    for (t = 0; t < COUNT(types); t++) {
        uint64_t want = 0;
        for (i = 0; i < COUNT(alignments); i++) {
            model_shape shape = with_metas;
            size_t size;
            unsigned char *image, *moved;
            shape.type = types[t];
            shape.alignment = alignments[i];
            image = (unsigned char *)model_build(&shape, &size);
            if (!i) want = try_buffer(image, size);
            moved = (unsigned char *)gguf_must(malloc(size + 1));
            memcpy(moved + 1, image, size);
            assert_true(try_buffer(image, size) == want);
            assert_true(try_buffer(moved + 1, size) == want);
            assert_memory_equal(moved + 1, image, size);        /* nothing was written there */
            free(moved);
            free(image);
        }
    }
}

/* Whole numbers may have any integer type. */
static void test_integer_types(void **state) {
    static const gguf_edit rows[] = {
        NUMBER(LLAMA("block_count"), U8, 1),
        NUMBER(LLAMA("block_count"), I32, 1),
        NUMBER(LLAMA("block_count"), U64, 1),
        NUMBER(LLAMA("context_length"), U16, 512),
        NUMBER(LLAMA("embedding_length"), I64, 32),
        NUMBER(LLAMA("attention.layer_norm_rms_epsilon"), F64, 1e-5)
    };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) check_edit(&small, &rows[i], KVC_OK, "");
}

/* An id of -1, signed or not, says that there is no such token. */
static void test_no_token(void **state) {
    static const gguf_edit rows[] = {
        NUMBER("tokenizer.ggml.bos_token_id", I32, -1),
        NUMBER("tokenizer.ggml.bos_token_id", U32, 4294967295.0)
    };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        model_shape shape = {SMALL, .n_edits = 1};
        rig r;
        shape.edits = &rows[i];
        rig_open(&r, &shape);
        assert_int_equal(r.info.bos, KVC_NO_TOKEN);
        assert_false(r.info.add_bos);
        rig_close(&r);
    }
}

static void test_query(void **state) {
    model_shape shape = {.n_layers = 3, .n_embd = 64, .n_heads = 4, .n_kv_heads = 2,
        .head_dim = 20, .head_dim_v = 12, .n_ff = 96, .n_vocab = 300, .n_tokens = 280, .n_ctx = 777,
        .rope_dim = 10, .window = 99};
    size_t embd = 64 * 300, layer = 64 * (80 + 40 + 24) + 48 * 64 + 3 * 64 * 96 + 2 * 64;
    rig r;
    (void)state;
    rig_open(&r, &shape);
    assert_string_equal(r.info.architecture, "llama");
    assert_string_equal(r.info.name, "random");
    assert_int_equal(r.info.n_layers, 3);
    assert_int_equal(r.info.n_embd, 64);
    assert_int_equal(r.info.n_heads, 4);
    assert_int_equal(r.info.n_kv_heads, 2);
    assert_int_equal(r.info.head_dim, 20);
    assert_int_equal(r.info.head_dim_v, 12);
    assert_int_equal(r.info.n_ff, 96);
    assert_int_equal(r.info.n_vocab, 300);
    assert_int_equal(r.info.n_tokens, 280);
    assert_int_equal(r.info.n_ctx_train, 777);
    assert_int_equal(r.info.rope_dim, 10);
    assert_int_equal(r.info.window, 99);
    assert_int_equal(r.info.n_params, 2 * embd + 3 * layer + 64);
    assert_int_equal(r.info.weights_size, 4 * r.info.n_params);
    assert_int_equal(r.info.memory_size, r.mem.bytes);
    assert_int_equal(r.info.bos, 1);
    assert_int_equal(r.info.eos, 2);
    assert_int_equal(r.info.eot, KVC_NO_TOKEN);
    assert_true(r.info.add_bos);
    assert_false(r.info.add_eos);
    assert_true(r.info.has_tokenizer);
    rig_close(&r);
    shape.n_vocab = 100;
    shape.n_tokens = 0;
    rig_open(&r, &shape);               /* no tokenizer in the file: ids alone */
    assert_false(r.info.has_tokenizer);
    assert_int_equal(r.info.n_tokens, 100);
    assert_int_equal(r.info.bos, KVC_NO_TOKEN);
    rig_close(&r);
}

/* ---- files ---- */

static void test_path(void **state) {
    char path[] = "/tmp/kvc_test_XXXXXX";
    int fd = mkstemp(path);
    size_t size;
    void *image = model_build(&with_metas, &size);
    kvc_model_desc desc = {0};
    kvc_model *model;
    uint64_t want = try_buffer(image, size);
    (void)state;
    assert_true(fd >= 0);
    desc.path = path;
    FAILS(KVC_ERROR_FILE, NULL, kvc_model_open(&model, &desc, &last));      /* empty */
    assert_true(write(fd, image, size) == (ssize_t)size);
    OK(kvc_model_open(&model, &desc, &last));
    check_metas(model);
    assert_true(try_model(model) == want);
    kvc_model_close(model);
    assert_int_equal(ftruncate(fd, (off_t)size - 1), 0);
    FAILS(KVC_ERROR_FORMAT, "output.weight", kvc_model_open(&model, &desc, &last));
    close(fd);
    unlink(path);
    FAILS(KVC_ERROR_FILE, path, kvc_model_open(&model, &desc, &last));
    assert_null(model);
    desc.path = "/tmp";
    FAILS(KVC_ERROR_FILE, NULL, kvc_model_open(&model, &desc, &last));      /* a folder */
    desc.path = "";
    FAILS(KVC_ERROR_FILE, NULL, kvc_model_open(&model, &desc, &last));
    free(image);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_hostile_numbers),
        cmocka_unit_test(test_hostile_types),
        cmocka_unit_test(test_product_overflow),
        cmocka_unit_test(test_any_byte),
        cmocka_unit_test(test_header),
        cmocka_unit_test(test_missing_keys),
        cmocka_unit_test(test_wrong_types),
        cmocka_unit_test(test_bad_values),
        cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_unsupported),
        cmocka_unit_test(test_duplicates),
        cmocka_unit_test(test_bad_alignment),
        cmocka_unit_test(test_unaligned_offset),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_tensor_types),
        cmocka_unit_test(test_partial_blocks),
        cmocka_unit_test(test_unused_tensors),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_progress),
        cmocka_unit_test(test_versions),
        cmocka_unit_test(test_alignments),
        cmocka_unit_test(test_integer_types),
        cmocka_unit_test(test_no_token),
        cmocka_unit_test(test_query),
        cmocka_unit_test(test_path)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
