/* gguf_write.h - writes GGUF files into memory, and builds random-weight models with that

   For the tests and the benchmark; it shares no code with kvc.h, so that a mistake in the reader is
   not repeated in the writer. In three steps:

       gguf_writer w;
       gguf_start(&w, 3, 32);                             format version, alignment
       gguf_meta_u32(&w, "llama.block_count", 2);         metadata
       t = gguf_tensor(&w, "output_norm.weight", GGUF_F32, 1, dims);
       gguf_finish(&w);                                   lays out w.image [w.image_size]
       fill(gguf_tensor_data(&w, t));                     tensor data lies in the image
       gguf_free(&w);

   Every count, length, type and offset of the file is recorded as a mark, so that a test can patch
   any one of them. Edits change the file while it is written: a key left out, or of another type.

   model_write and model_build make a whole model from a model_shape, whose zeroed fields have
   defaults. The same shape gives the same bytes on every machine. zoo.h has one of each kind. */
#ifndef GGUF_WRITE_H
#define GGUF_WRITE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tensor types and value types, with the numbers of the file format. */
enum { GGUF_F32 = 0, GGUF_F16 = 1, GGUF_Q4_0 = 2, GGUF_Q8_0 = 8, GGUF_BF16 = 30 };
enum {
    GGUF_VALUE_U8 = 0, GGUF_VALUE_I8 = 1, GGUF_VALUE_U16 = 2, GGUF_VALUE_I16 = 3,
    GGUF_VALUE_U32 = 4, GGUF_VALUE_I32 = 5, GGUF_VALUE_F32 = 6, GGUF_VALUE_BOOL = 7,
    GGUF_VALUE_STRING = 8, GGUF_VALUE_ARRAY = 9, GGUF_VALUE_U64 = 10, GGUF_VALUE_I64 = 11,
    GGUF_VALUE_F64 = 12
};

/* ---- growing memory ---- */

typedef struct gguf_buf {
    unsigned char *data;
    size_t size, cap;
} gguf_buf;

static inline void *gguf_must(void *p) {
    if (!p) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return p;
}

/* Room for n more bytes at the end, zeroed. */
static inline unsigned char *gguf_extend(gguf_buf *b, size_t n) {
    unsigned char *p;
    if (b->size + n > b->cap) {
        b->cap = (b->size + n) * 2;
        b->data = (unsigned char *)gguf_must(realloc(b->data, b->cap));
    }
    p = b->data + b->size;
    memset(p, 0, n);
    b->size += n;
    return p;
}

static inline void gguf_store(void *at, uint64_t value, size_t n_bytes) {
    size_t i;
    for (i = 0; i < n_bytes; i++) ((unsigned char *)at)[i] = (unsigned char)(value >> (8 * i));
}

static inline void gguf_int(gguf_buf *b, uint64_t value, size_t n_bytes) {
    gguf_store(gguf_extend(b, n_bytes), value, n_bytes);
}

static inline void gguf_bytes(gguf_buf *b, const void *p, size_t n) {
    if (n) memcpy(gguf_extend(b, n), p, n);
}

/* ---- the writer ---- */

/* What a mark points at. */
typedef enum gguf_field {
    GGUF_MAGIC, GGUF_VERSION, GGUF_N_TENSORS, GGUF_N_META,                          /* header */
    GGUF_KEY_SIZE, GGUF_VALUE_TYPE, GGUF_VALUE, GGUF_TEXT_SIZE,                     /* metadata */
    GGUF_ITEM_TYPE, GGUF_N_ITEMS, GGUF_META_END,
    GGUF_NAME_SIZE, GGUF_N_DIMS, GGUF_DIM, GGUF_TENSOR_TYPE, GGUF_OFFSET,           /* tensors */
    GGUF_TENSOR_END
} gguf_field;

typedef struct gguf_mark {
    gguf_field field;
    char name[64];              /* the key or tensor */
    uint32_t index;             /* of the string in an array, or of the dimension */
    size_t at;                  /* byte offset in the image once it is finished */
    size_t size;                /* bytes of the field */
} gguf_mark;

typedef enum gguf_edit_op {
    GGUF_EDIT_OMIT,             /* leave the key or tensor out */
    GGUF_EDIT_TWICE,            /* write it twice */
    GGUF_EDIT_NUMBER,           /* the key gets this value type and number; added if missing */
    GGUF_EDIT_TEXT,             /* the key gets this string; added if missing */
    GGUF_EDIT_ARRAY,            /* the key gets an array of `number` zero items of type `type` */
    GGUF_EDIT_DIMS,             /* the tensor gets this shape, and room for it */
    GGUF_EDIT_TYPE              /* the tensor gets this type, and room for it where it is known */
} gguf_edit_op;

typedef struct gguf_edit {
    const char *name;
    gguf_edit_op op;
    int type;
    double number;
    const char *text;
    uint32_t n_dims;
    uint64_t dims[4];
} gguf_edit;

typedef struct gguf_tensor_info {
    char name[64];
    int type;
    uint32_t n_dims;
    uint64_t dims[4];
    uint64_t offset;            /* in the data section */
    uint64_t size;              /* bytes */
} gguf_tensor_info;

typedef struct gguf_writer {
    uint32_t version, alignment;
    const gguf_edit *edits;     /* [n_edits], set between gguf_start and the first value */
    size_t n_edits;
    gguf_buf meta, marks, tensors;
    uint64_t n_meta, n_tensors;
    unsigned char *image;       /* malloc'd to the exact size */
    size_t image_size;
    size_t data_start;          /* of the data section in the image */
} gguf_writer;

#define GGUF_HEADER_SIZE 24
#define GGUF_NONE ((size_t)-1)

static inline void gguf_start(gguf_writer *w, uint32_t version, uint32_t alignment) {
    memset(w, 0, sizeof *w);
    w->version = version;
    w->alignment = alignment;
}

static inline void gguf_free(gguf_writer *w) {
    free(w->meta.data);
    free(w->marks.data);
    free(w->tensors.data);
    free(w->image);
    memset(w, 0, sizeof *w);
}

/* Marks the next `size` bytes of the header part being written, which begins at byte `base`. */
static inline void gguf_mark_next(gguf_writer *w, gguf_field field, const char *name, size_t index,
    size_t at, size_t size) {
    gguf_mark m;
    memset(&m, 0, sizeof m);
    m.field = field;
    snprintf(m.name, sizeof m.name, "%s", name);
    m.index = (uint32_t)index;
    m.at = at;
    m.size = size;
    gguf_bytes(&w->marks, &m, sizeof m);
}

static inline size_t gguf_mark_count(const gguf_writer *w) {
    return w->marks.size / sizeof(gguf_mark);
}

static inline const gguf_mark *gguf_mark_at(const gguf_writer *w, size_t i) {
    return (const gguf_mark *)(const void *)w->marks.data + i;
}

/* The mark of a field, or NULL. name is "" for the header's fields. */
static inline const gguf_mark *gguf_mark_find(const gguf_writer *w, gguf_field field,
    const char *name, uint32_t index) {
    size_t i;
    for (i = 0; i < gguf_mark_count(w); i++) {
        const gguf_mark *m = gguf_mark_at(w, i);
        if (m->field == field && m->index == index && !strcmp(m->name, name)) return m;
    }
    return NULL;
}

static inline const gguf_edit *gguf_edit_of(const gguf_writer *w, const char *name) {
    size_t i;
    for (i = 0; i < w->n_edits; i++) {
        if (!strcmp(w->edits[i].name, name)) return &w->edits[i];
    }
    return NULL;
}

/* ---- metadata ---- */

static inline size_t gguf_value_size(int type) {
    static const unsigned char size[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type >= 0 && type < 13 ? size[type] : 0;
}

/* A number as the bytes of a value type; returns their count. */
static inline size_t gguf_encode(int type, double number, unsigned char out[8]) {
    uint64_t bits = 0;
    float single = (float)number;
    if (type == GGUF_VALUE_F64) memcpy(&bits, &number, 8);
    else if (type == GGUF_VALUE_F32) memcpy(&bits, &single, 4);
    else bits = number < 0 ? (uint64_t)(int64_t)number : (uint64_t)number;
    gguf_store(out, bits, 8);
    return gguf_value_size(type);
}

static inline void gguf_meta_start(gguf_writer *w, const char *key, int type) {
    size_t size = strlen(key);
    gguf_mark_next(w, GGUF_KEY_SIZE, key, 0, GGUF_HEADER_SIZE + w->meta.size, 8);
    gguf_int(&w->meta, size, 8);
    gguf_bytes(&w->meta, key, size);
    gguf_mark_next(w, GGUF_VALUE_TYPE, key, 0, GGUF_HEADER_SIZE + w->meta.size, 4);
    gguf_int(&w->meta, (uint64_t)type, 4);
    w->n_meta++;
}

static inline void gguf_meta_end(gguf_writer *w, const char *key) {
    gguf_mark_next(w, GGUF_META_END, key, 0, GGUF_HEADER_SIZE + w->meta.size, 0);
}

static inline void gguf_text(gguf_writer *w, const char *key, size_t index, const char *text) {
    size_t size = strlen(text);
    gguf_mark_next(w, GGUF_TEXT_SIZE, key, index, GGUF_HEADER_SIZE + w->meta.size, 8);
    gguf_int(&w->meta, size, 8);
    gguf_bytes(&w->meta, text, size);
}

static inline void gguf_meta_bytes(gguf_writer *w, const char *key, int type, const void *p) {
    size_t size = gguf_value_size(type);
    gguf_meta_start(w, key, type);
    gguf_mark_next(w, GGUF_VALUE, key, 0, GGUF_HEADER_SIZE + w->meta.size, size);
    gguf_bytes(&w->meta, p, size);
    gguf_meta_end(w, key);
}

static inline void gguf_array_start(gguf_writer *w, const char *key, int item_type, uint64_t n) {
    gguf_meta_start(w, key, GGUF_VALUE_ARRAY);
    gguf_mark_next(w, GGUF_ITEM_TYPE, key, 0, GGUF_HEADER_SIZE + w->meta.size, 4);
    gguf_int(&w->meta, (uint64_t)item_type, 4);
    gguf_mark_next(w, GGUF_N_ITEMS, key, 0, GGUF_HEADER_SIZE + w->meta.size, 8);
    gguf_int(&w->meta, n, 8);
}

/* Writes what an edit says in place of a value. */
static inline void gguf_meta_edited(gguf_writer *w, const gguf_edit *e) {
    unsigned char raw[8];
    if (e->op == GGUF_EDIT_NUMBER) {
        gguf_encode(e->type, e->number, raw);
        gguf_meta_bytes(w, e->name, e->type, raw);
    } else if (e->op == GGUF_EDIT_TEXT) {
        gguf_meta_start(w, e->name, GGUF_VALUE_STRING);
        gguf_text(w, e->name, 0, e->text);
        gguf_meta_end(w, e->name);
    } else if (e->op == GGUF_EDIT_ARRAY) {
        size_t n = (size_t)e->number, item = gguf_value_size(e->type);
        if (e->type == GGUF_VALUE_STRING) item = 8;         /* empty strings */
        if (e->type == GGUF_VALUE_ARRAY) item = 12;         /* empty arrays of u8 */
        gguf_array_start(w, e->name, e->type, n);
        gguf_extend(&w->meta, n * item);
        gguf_meta_end(w, e->name);
    }
}

/* How often a key is to be written as the caller has it: 0 if an edit took its place. */
static inline int gguf_meta_times(gguf_writer *w, const char *key) {
    const gguf_edit *e = gguf_edit_of(w, key);
    if (!e) return 1;
    if (e->op == GGUF_EDIT_TWICE) return 2;
    gguf_meta_edited(w, e);
    return 0;
}

/* A number or boolean of any type. */
static inline void gguf_meta_number(gguf_writer *w, const char *key, int type, double number) {
    unsigned char raw[8];
    int i, times = gguf_meta_times(w, key);
    gguf_encode(type, number, raw);
    for (i = 0; i < times; i++) gguf_meta_bytes(w, key, type, raw);
}

static inline void gguf_meta_u32(gguf_writer *w, const char *key, uint32_t value) {
    gguf_meta_number(w, key, GGUF_VALUE_U32, (double)value);
}

static inline void gguf_meta_f32(gguf_writer *w, const char *key, float value) {
    gguf_meta_number(w, key, GGUF_VALUE_F32, (double)value);
}

static inline void gguf_meta_string(gguf_writer *w, const char *key, const char *text) {
    int i, times = gguf_meta_times(w, key);
    for (i = 0; i < times; i++) {
        gguf_meta_start(w, key, GGUF_VALUE_STRING);
        gguf_text(w, key, 0, text);
        gguf_meta_end(w, key);
    }
}

/* An array of numbers: items are their bytes in the file. */
static inline void gguf_meta_array(gguf_writer *w, const char *key, int item_type, size_t n,
    const void *items) {
    int i, times = gguf_meta_times(w, key);
    for (i = 0; i < times; i++) {
        gguf_array_start(w, key, item_type, n);
        gguf_bytes(&w->meta, items, n * gguf_value_size(item_type));
        gguf_meta_end(w, key);
    }
}

static inline void gguf_meta_strings(gguf_writer *w, const char *key, size_t n,
    const char *const *items) {
    int i, times = gguf_meta_times(w, key);
    size_t k;
    for (i = 0; i < times; i++) {
        gguf_array_start(w, key, GGUF_VALUE_STRING, n);
        for (k = 0; k < n; k++) gguf_text(w, key, k, items[k]);
        gguf_meta_end(w, key);
    }
}

/* ---- tensors ---- */

/* Bytes of a row of n elements; n is a multiple of 32 for the quantized types. */
static inline size_t gguf_row_size(int type, size_t n) {
    switch (type) {
    case GGUF_F32: return n * 4;
    case GGUF_F16: case GGUF_BF16: return n * 2;
    case GGUF_Q8_0: return n / 32 * 34;
    case GGUF_Q4_0: return n / 32 * 18;
    default: return n * 4;
    }
}

static inline gguf_tensor_info *gguf_tensor_at(const gguf_writer *w, size_t i) {
    return (gguf_tensor_info *)(void *)w->tensors.data + i;
}

static inline uint64_t gguf_aligned(uint64_t size, uint64_t alignment) {
    return alignment ? (size + alignment - 1) / alignment * alignment : size;
}

/* Declares a tensor; dims[0] is the length of a row. Returns its number, or GGUF_NONE if an edit
   left it out. */
static inline size_t gguf_tensor(gguf_writer *w, const char *name, int type, uint32_t n_dims,
    const uint64_t *dims) {
    const gguf_edit *e = gguf_edit_of(w, name);
    gguf_tensor_info t;
    uint32_t i;
    uint64_t n_rows = 1;
    if (e && e->op == GGUF_EDIT_OMIT) return GGUF_NONE;
    memset(&t, 0, sizeof t);
    snprintf(t.name, sizeof t.name, "%s", name);
    t.type = e && e->op == GGUF_EDIT_TYPE ? e->type : type;
    t.n_dims = n_dims;
    for (i = 0; i < n_dims; i++) t.dims[i] = dims[i];
    if (e && e->op == GGUF_EDIT_DIMS) {
        t.n_dims = e->n_dims;
        memcpy(t.dims, e->dims, sizeof t.dims);
    }
    for (i = 1; i < t.n_dims; i++) n_rows *= t.dims[i];
    t.size = t.n_dims ? gguf_row_size(t.type, (size_t)t.dims[0]) * n_rows : 4;
    if (w->n_tensors) {
        const gguf_tensor_info *last = gguf_tensor_at(w, (size_t)w->n_tensors - 1);
        t.offset = gguf_aligned(last->offset + last->size, w->alignment);
    }
    gguf_bytes(&w->tensors, &t, sizeof t);
    w->n_tensors++;
    if (e && e->op == GGUF_EDIT_TWICE) {
        t.offset = gguf_aligned(t.offset + t.size, w->alignment);
        gguf_bytes(&w->tensors, &t, sizeof t);
        w->n_tensors++;
    }
    return (size_t)w->n_tensors - 1;
}

/* One line of the tensor table; `base` is the byte of the image where `out` begins. */
static inline void gguf_write_info(gguf_writer *w, gguf_buf *out, size_t base,
    const gguf_tensor_info *t) {
    size_t size = strlen(t->name);
    uint32_t i;
    gguf_mark_next(w, GGUF_NAME_SIZE, t->name, 0, base + out->size, 8);
    gguf_int(out, size, 8);
    gguf_bytes(out, t->name, size);
    gguf_mark_next(w, GGUF_N_DIMS, t->name, 0, base + out->size, 4);
    gguf_int(out, t->n_dims, 4);
    for (i = 0; i < t->n_dims; i++) {
        gguf_mark_next(w, GGUF_DIM, t->name, i, base + out->size, 8);
        gguf_int(out, t->dims[i & 3], 8);
    }
    gguf_mark_next(w, GGUF_TENSOR_TYPE, t->name, 0, base + out->size, 4);
    gguf_int(out, (uint64_t)t->type, 4);
    gguf_mark_next(w, GGUF_OFFSET, t->name, 0, base + out->size, 8);
    gguf_int(out, t->offset, 8);
    gguf_mark_next(w, GGUF_TENSOR_END, t->name, 0, base + out->size, 0);
}

/* Keys that only edits name. */
static inline void gguf_write_added(gguf_writer *w) {
    size_t i;
    for (i = 0; i < w->n_edits; i++) {
        if (gguf_mark_find(w, GGUF_KEY_SIZE, w->edits[i].name, 0)) continue;
        gguf_meta_edited(w, &w->edits[i]);
    }
}

static inline void gguf_write_header(gguf_writer *w) {
    memcpy(w->image, "GGUF", 4);
    gguf_store(w->image + 4, w->version, 4);
    gguf_store(w->image + 8, w->n_tensors, 8);
    gguf_store(w->image + 16, w->n_meta, 8);
    gguf_mark_next(w, GGUF_MAGIC, "", 0, 0, 4);
    gguf_mark_next(w, GGUF_VERSION, "", 0, 4, 4);
    gguf_mark_next(w, GGUF_N_TENSORS, "", 0, 8, 8);
    gguf_mark_next(w, GGUF_N_META, "", 0, 16, 8);
}

/* Lays the file out in w->image, in a block of exactly its size. Tensor data is zero. */
static inline void gguf_finish(gguf_writer *w) {
    gguf_buf infos = {NULL, 0, 0};
    size_t i, base, data_size = 0;
    gguf_write_added(w);
    base = GGUF_HEADER_SIZE + w->meta.size;
    for (i = 0; i < w->n_tensors; i++) {
        const gguf_tensor_info *t = gguf_tensor_at(w, i);
        gguf_write_info(w, &infos, base, t);
        data_size = (size_t)(t->offset + t->size);
    }
    w->data_start = (size_t)gguf_aligned(base + infos.size, w->alignment);
    w->image_size = w->data_start + data_size;
    w->image = (unsigned char *)gguf_must(calloc(w->image_size, 1));
    gguf_write_header(w);
    if (w->meta.size) memcpy(w->image + GGUF_HEADER_SIZE, w->meta.data, w->meta.size);
    if (infos.size) memcpy(w->image + base, infos.data, infos.size);
    free(infos.data);
}

static inline unsigned char *gguf_tensor_data(const gguf_writer *w, size_t tensor) {
    return w->image + w->data_start + gguf_tensor_at(w, tensor)->offset;
}

/* Overwrites a marked field of the image. */
static inline void gguf_patch(gguf_writer *w, const gguf_mark *m, uint64_t value) {
    gguf_store(w->image + m->at, value, m->size);
}

/* ---- number formats ---- */

/* To half precision, ties to even. */
static inline uint16_t gguf_to_f16(float x) {
    uint32_t u, sign;
    memcpy(&u, &x, 4);
    sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (u >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
    if (u < 0x38800000u) {      /* below 2^-14: a multiple of 2^-24 */
        return (uint16_t)(sign | (uint32_t)nearbyint(fabs((double)x) * 16777216.0));
    }
    u += 0xfffu + (u >> 13 & 1u);
    return (uint16_t)(sign | (u - 0x38000000u) >> 13);
}

static inline float gguf_from_f16(uint16_t h) {
    double mantissa = (double)(h & 0x3ffu);
    int exponent = (int)(h >> 10 & 0x1fu);
    double x = exponent ? ldexp(1024.0 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return (float)(h & 0x8000u ? -x : x);
}

/* To bfloat16, ties to even; finite numbers only. */
static inline uint16_t gguf_to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* 32 numbers as a half-precision scale and 32 signed bytes. */
static inline void gguf_to_q8_0(const float *x, unsigned char *out) {
    float largest = 0, scale;
    int i;
    for (i = 0; i < 32; i++) if (fabsf(x[i]) > largest) largest = fabsf(x[i]);
    gguf_store(out, gguf_to_f16(largest / 127.0f), 2);
    scale = gguf_from_f16(gguf_to_f16(largest / 127.0f));
    for (i = 0; i < 32; i++) {
        float q = scale > 0 ? nearbyintf(x[i] / scale) : 0.0f;
        out[2 + i] = (unsigned char)(int)(q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q);
    }
}

/* 32 numbers as a half-precision scale and 32 nibbles q, standing for scale * (q - 8). The scale
   has the sign that gives the number of largest magnitude the nibble 0. Nibble i is the low half of
   byte i, nibble i + 16 its high half. */
static inline void gguf_to_q4_0(const float *x, unsigned char *out) {
    float peak = 0, scale;
    int i;
    for (i = 0; i < 32; i++) if (fabsf(x[i]) > fabsf(peak)) peak = x[i];
    gguf_store(out, gguf_to_f16(peak / -8.0f), 2);
    scale = gguf_from_f16(gguf_to_f16(peak / -8.0f));
    memset(out + 2, 0, 16);
    for (i = 0; i < 32; i++) {
        float q = fabsf(scale) > 0 ? nearbyintf(x[i] / scale) + 8.0f : 8.0f;
        int nibble = q < 0 ? 0 : q > 15.0f ? 15 : (int)q;
        out[2 + (i & 15)] = (unsigned char)(out[2 + (i & 15)] | nibble << (i < 16 ? 0 : 4));
    }
}

/* A row of n numbers in a tensor's type. */
static inline void gguf_to_type(int type, const float *x, size_t n, unsigned char *out) {
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], 4);
        if (type == GGUF_F32) gguf_store(out + 4 * i, bits, 4);
        else if (type == GGUF_F16) gguf_store(out + 2 * i, gguf_to_f16(x[i]), 2);
        else if (type == GGUF_BF16) gguf_store(out + 2 * i, gguf_to_bf16(x[i]), 2);
        else if (i % 32 || n - i < 32) continue;        /* whole blocks */
        else if (type == GGUF_Q8_0) gguf_to_q8_0(x + i, out + i / 32 * 34);
        else if (type == GGUF_Q4_0) gguf_to_q4_0(x + i, out + i / 32 * 18);
    }
}

/* ---- random models ---- */

typedef enum model_rope {
    MODEL_ROPE_PLAIN, MODEL_ROPE_LINEAR, MODEL_ROPE_YARN,
    MODEL_ROPE_LONG             /* rope_factors_long and _short, chosen by the context of a run */
} model_rope;

/* A model; zero is the default beside a field. What an architecture always has needs no field. */
typedef struct model_shape {
    uint32_t n_layers;          /* 2 */
    uint32_t n_embd;            /* 64 */
    uint32_t n_heads;           /* 4 */
    uint32_t n_kv_heads;        /* n_heads */
    uint32_t head_dim;          /* n_embd / n_heads; another value is written as a key */
    uint32_t head_dim_v;        /* head_dim */
    uint32_t n_ff;              /* 2 n_embd */
    uint32_t n_vocab;           /* 320. Below 259 no tokenizer is written, there is no room */
    uint32_t n_tokens;          /* n_vocab. Fewer: the last rows of the embedding are padding */
    uint32_t n_ctx;             /* 512 */
    int type;                   /* of the matrices, GGUF_F32; norms and biases are always F32 */
    int tied;                   /* no output.weight */
    int biases;                 /* on q, k, v and the attention's output */
    float epsilon;              /* 1e-5 */
    uint32_t rope_dim;          /* head_dim: rotated dimensions */
    float rope_base;            /* 10000 */
    model_rope rope;
    float rope_factor;          /* 4, where the scaling needs one */
    uint32_t rope_orig_ctx;     /* n_ctx / 4: the original context of YaRN and longrope */
    float attn_factor;          /* no key: length of a turned vector */
    float yarn_beta_fast, yarn_beta_slow;   /* no keys */
    int rope_freqs;             /* a rope_freqs.weight tensor with factors from 1 to 8 */
    uint32_t window;            /* attention.sliding_window, no key */
    uint32_t pattern;           /* attention.sliding_window_pattern, no key */
    int pattern_list;           /* the pattern is written as a truth value for each layer */
    uint32_t version;           /* of the format, 3 */
    uint32_t alignment;         /* 32; another value is written as a key */
    uint64_t seed;
    void (*more)(gguf_writer *w);   /* NULL, or adds metadata */
    const gguf_edit *edits;     /* [n_edits], damage on purpose */
    size_t n_edits;
    const char *arch;           /* "llama"; see model_archs */
    int fused;                  /* phi2: attn_qkv in place of three matrices */
    int qk_norm;                /* command-r, stablelm: a norm for each head of q and k */
    int one_norm;               /* stablelm: no ffn_norm and no biases, so that it is parallel */
    int two_norms;              /* falcon: attn_norm_2 */
    int sequential;             /* gptneox: use_parallel_residual is false */
    uint32_t q_rank;            /* latent attention: 0, queries come from one matrix */
    uint32_t kv_rank;           /* 24, for deepseek2 and minicpm3 alone */
    int split_latent;           /* attn_k_b and attn_v_b in place of attn_kv_b */
    float yarn_log;             /* no key: rope.scaling.yarn_log_multiplier */
    float local_base;           /* no key: rope.freq_base_swa */
    float score_cap, logit_cap; /* no keys: attn_logit_softcapping, final_logit_softcapping */
    float alibi;                /* 8 for mpt, else no key: attention.max_alibi_bias */
    float clamp;                /* no key: attention.clamp_kqv */
    float attn_scale, embd_scale, residual_scale, logit_scale;      /* no keys */
    uint32_t n_experts;         /* 0, a dense network */
    uint32_t n_experts_used;    /* 2 */
    uint32_t n_ff_exp;          /* no key, and n_ff */
    uint32_t n_shared;          /* deepseek2: so many shared experts, as wide as the others */
    uint32_t n_ff_shared;       /* qwen2moe: width of the shared expert, n_ff; it has a gate */
    uint32_t n_dense;           /* deepseek2: layers before those with experts */
    uint32_t n_groups, n_groups_used;       /* no keys: groups of experts */
    int gating;                 /* no key: 1 softmax, 2 sigmoid, 3 softmax over the chosen */
    int expert_norm;            /* deepseek2: expert_weights_norm is true */
    float expert_scale;         /* no key: expert_weights_scale */
    int expert_probs;           /* exp_probs_b, which steers the choice */
} model_shape;

/* What an architecture always has. */
enum {
    MODEL_LAYER_NORM = 1, MODEL_NORM_BIAS = 2, MODEL_NO_ATTN_NORM = 4, MODEL_NO_FFN_NORM = 8,
    MODEL_POST_NORMS = 16,      /* post_attention_norm, post_ffw_norm */
    MODEL_QKV = 32,             /* attn_qkv */
    MODEL_GATE_UP = 64,         /* ffn_up has the rows of the gate first */
    MODEL_NO_GATE = 128, MODEL_QKV_BIAS = 256, MODEL_OUT_BIAS = 512, MODEL_FFN_BIAS = 1024,
    MODEL_HEAD_BIAS = 2048,     /* output.bias */
    MODEL_QK_NORM = 4096,       /* one for all heads */
    MODEL_QK_OWN = 8192,        /* one for each head */
    MODEL_QK_WIDE = 16384,      /* one over all heads */
    MODEL_NO_ROPE = 32768, MODEL_POSITIONS = 65536, MODEL_EMBD_NORM = 131072,
    MODEL_GPT_OSS = 262144,     /* sinks, biased experts, the FFN's norm has another name */
    MODEL_LATENT = 524288,
    MODEL_HEAD_KEYS = 1048576,  /* the head's size has keys always, rope.dimension_count has not */
    MODEL_BIASES = MODEL_NORM_BIAS | MODEL_QKV_BIAS | MODEL_OUT_BIAS | MODEL_FFN_BIAS,
    MODEL_GPT = MODEL_LAYER_NORM | MODEL_NO_GATE
};

typedef struct model_arch {
    const char *name;
    unsigned traits;
} model_arch;

static const model_arch model_archs[] = {
    {"llama", 0},
    {"qwen2", MODEL_QKV_BIAS},
    {"qwen3", MODEL_QK_NORM | MODEL_HEAD_KEYS},
    {"qwen2moe", MODEL_QKV_BIAS},
    {"qwen3moe", MODEL_QK_NORM | MODEL_HEAD_KEYS},
    {"gemma", MODEL_HEAD_KEYS},
    {"gemma2", MODEL_HEAD_KEYS | MODEL_POST_NORMS},
    {"gemma3", MODEL_HEAD_KEYS | MODEL_POST_NORMS | MODEL_QK_NORM},
    {"phi2", MODEL_GPT | MODEL_BIASES | MODEL_NO_FFN_NORM | MODEL_HEAD_BIAS},
    {"phi3", MODEL_QKV | MODEL_GATE_UP},
    {"gpt2", MODEL_GPT | MODEL_BIASES | MODEL_QKV | MODEL_NO_ROPE | MODEL_POSITIONS},
    {"gptneox", MODEL_GPT | MODEL_BIASES | MODEL_QKV},
    {"bloom", MODEL_GPT | MODEL_BIASES | MODEL_QKV | MODEL_NO_ROPE | MODEL_EMBD_NORM},
    {"mpt", MODEL_GPT | MODEL_QKV | MODEL_NO_ROPE},
    {"falcon", MODEL_GPT | MODEL_NORM_BIAS | MODEL_QKV | MODEL_NO_FFN_NORM},
    {"stablelm", MODEL_LAYER_NORM | MODEL_NORM_BIAS | MODEL_QKV_BIAS},
    {"olmo2", MODEL_NO_ATTN_NORM | MODEL_NO_FFN_NORM | MODEL_POST_NORMS | MODEL_QK_WIDE},
    {"olmoe", MODEL_QK_WIDE},
    {"starcoder2", MODEL_GPT | MODEL_BIASES},
    {"granite", 0},
    {"command-r", MODEL_LAYER_NORM | MODEL_NO_FFN_NORM},
    {"cohere2", MODEL_LAYER_NORM | MODEL_NO_FFN_NORM},
    {"smollm3", 0},
    {"gpt-oss", MODEL_QKV_BIAS | MODEL_OUT_BIAS | MODEL_GPT_OSS},
    {"glm4", MODEL_POST_NORMS | MODEL_QKV_BIAS | MODEL_GATE_UP},
    {"deepseek2", MODEL_LATENT},
    {"minicpm3", MODEL_LATENT}
};

static inline int model_is(const model_shape *s, const char *arch) {
    return !strcmp(s->arch, arch);
}

/* With what the shape adds and takes. */
static inline unsigned model_traits(const model_shape *s) {
    unsigned traits = 0;
    size_t i, n = sizeof model_archs / sizeof *model_archs;
    for (i = 0; i < n && !model_is(s, model_archs[i].name); i++) continue;
    if (i < n) traits = model_archs[i].traits;
    if (s->biases) traits |= MODEL_QKV_BIAS | MODEL_OUT_BIAS;
    if (s->fused) traits |= MODEL_QKV;
    if (s->qk_norm) traits |= MODEL_QK_OWN;
    if (s->one_norm) traits = (traits | MODEL_NO_FFN_NORM) & ~(unsigned)MODEL_QKV_BIAS;
    return traits;
}

static inline void model_defaults(model_shape *s) {
    if (!s->arch) s->arch = "llama";
    if (!s->n_layers) s->n_layers = 2;
    if (!s->n_embd) s->n_embd = 64;
    if (!s->n_heads) s->n_heads = 4;
    if (!s->n_kv_heads) s->n_kv_heads = s->n_heads;
    if (!s->head_dim) s->head_dim = s->n_embd / s->n_heads;
    if (!s->head_dim_v)
        s->head_dim_v = model_is(s, "minicpm3") ? s->n_embd / s->n_heads : s->head_dim;
    if (!s->n_ff) s->n_ff = 2 * s->n_embd;
    if (!s->n_vocab) s->n_vocab = 320;
    if (!s->n_tokens) s->n_tokens = s->n_vocab;
    if (!s->n_ctx) s->n_ctx = 512;
    if (!(s->epsilon > 0)) s->epsilon = 1e-5f;
    if (!s->rope_dim) s->rope_dim = s->head_dim;
    if (!(s->rope_base > 0)) s->rope_base = 10000.0f;
    if (!(s->rope_factor > 0)) s->rope_factor = 4.0f;
    if (!s->rope_orig_ctx) s->rope_orig_ctx = s->n_ctx / 4;
    if (!s->kv_rank && model_traits(s) & MODEL_LATENT) s->kv_rank = 24;
    if (!s->n_experts_used) s->n_experts_used = 2;
    if (!(s->alibi > 0) && model_is(s, "mpt")) s->alibi = 8.0f;
    if (!s->version) s->version = 3;
    if (!s->alignment) s->alignment = 32;
}

/* A bijective mixer of 64 bits (the finalizer of the SplitMix generator, Steele et al. 2014). */
static inline uint64_t model_mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint64_t model_random(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15u;
    return model_mix(*state);
}

/* Weights uniform in middle +- reach. Either `middle` is 0 or `reach` is a power of two, so fusing
   the product with the sum changes nothing, and every machine makes the same bits. */
static inline void model_fill(const gguf_writer *w, size_t tensor, float middle, float reach,
    uint64_t seed) {
    const gguf_tensor_info *t;
    float *row, scale = reach / 8388608.0f;
    uint64_t state = seed;
    uint64_t n_rows = 1, r;
    size_t i, n, row_size;
    const char *c;
    if (tensor == GGUF_NONE) return;
    t = gguf_tensor_at(w, tensor);
    if (!t->n_dims) return;
    for (c = t->name; *c; c++) state = model_mix(state ^ (uint64_t)(unsigned char)*c) + 1;
    n = (size_t)t->dims[0];
    for (i = 1; i < t->n_dims; i++) n_rows *= t->dims[i];
    row_size = gguf_row_size(t->type, n);
    row = (float *)gguf_must(malloc(n * sizeof *row + 1));
    for (r = 0; r < n_rows; r++) {
        for (i = 0; i < n; i++) {
            int32_t k = (int32_t)(model_random(&state) >> 40) - 8388608;
            row[i] = middle + (float)k * scale;
        }
        gguf_to_type(t->type, row, n, gguf_tensor_data(w, tensor) + (size_t)r * row_size);
    }
    free(row);
}

/* The key "<architecture>.<name>". */
static inline const char *model_key(char buf[64], const model_shape *s, const char *name) {
    snprintf(buf, 64, "%s.%s", s->arch, name);
    return buf;
}

static inline void model_meta_u32(gguf_writer *w, const model_shape *s, const char *name,
    uint32_t value) {
    char key[64];
    gguf_meta_u32(w, model_key(key, s, name), value);
}

static inline void model_meta_f32(gguf_writer *w, const model_shape *s, const char *name,
    float value) {
    char key[64];
    gguf_meta_f32(w, model_key(key, s, name), value);
}

static inline void model_meta_bool(gguf_writer *w, const model_shape *s, const char *name,
    int value) {
    char key[64];
    gguf_meta_number(w, model_key(key, s, name), GGUF_VALUE_BOOL, value ? 1 : 0);
}

static inline void model_meta_string(gguf_writer *w, const model_shape *s, const char *name,
    const char *text) {
    char key[64];
    gguf_meta_string(w, model_key(key, s, name), text);
}

/* Numbers that have no key when they are 0. */
static inline void model_some_u32(gguf_writer *w, const model_shape *s, const char *name,
    uint32_t value) {
    if (value) model_meta_u32(w, s, name, value);
}

static inline void model_some_f32(gguf_writer *w, const model_shape *s, const char *name,
    float value) {
    if (value > 0) model_meta_f32(w, s, name, value);
}

static inline void model_write_pattern(gguf_writer *w, const model_shape *s) {
    char key[64];
    uint32_t i;
    model_key(key, s, "attention.sliding_window_pattern");
    if (s->pattern && s->pattern_list) {
        gguf_array_start(w, key, GGUF_VALUE_BOOL, s->n_layers);
        for (i = 0; i < s->n_layers; i++)
            gguf_int(&w->meta, i % s->pattern + 1 < s->pattern, 1);
        gguf_meta_end(w, key);
    } else if (s->pattern) {
        gguf_meta_u32(w, key, s->pattern);
    }
}

static inline void model_write_rope(gguf_writer *w, const model_shape *s) {
    unsigned traits = model_traits(s);
    int yarn = s->rope == MODEL_ROPE_YARN, linear = s->rope == MODEL_ROPE_LINEAR;
    if (traits & MODEL_NO_ROPE) return;
    if (!(traits & MODEL_HEAD_KEYS) || s->rope_dim != s->head_dim)
        model_meta_u32(w, s, "rope.dimension_count", s->rope_dim);
    if (!(traits & MODEL_HEAD_KEYS) || s->rope_base < 10000.0f || s->rope_base > 10000.0f)
        model_meta_f32(w, s, "rope.freq_base", s->rope_base);
    model_some_f32(w, s, "rope.freq_base_swa", s->local_base);
    model_some_f32(w, s, "rope.scaling.attn_factor", s->attn_factor);
    if (yarn || linear) {
        model_meta_string(w, s, "rope.scaling.type", yarn ? "yarn" : "linear");
        model_meta_f32(w, s, "rope.scaling.factor", s->rope_factor);
    } else if (model_is(s, "command-r") || model_is(s, "cohere2")) {
        model_meta_string(w, s, "rope.scaling.type", "none");
    }
    if (yarn || s->rope == MODEL_ROPE_LONG)
        model_meta_u32(w, s, "rope.scaling.original_context_length", s->rope_orig_ctx);
    else if (model_is(s, "phi3"))
        model_meta_u32(w, s, "rope.scaling.original_context_length", s->n_ctx);
    if (!yarn) return;
    model_some_f32(w, s, "rope.scaling.yarn_beta_fast", s->yarn_beta_fast);
    model_some_f32(w, s, "rope.scaling.yarn_beta_slow", s->yarn_beta_slow);
    model_some_f32(w, s, "rope.scaling.yarn_log_multiplier", s->yarn_log);
}

/* With the latent layout of two matrices the ordinary keys describe the one key and value that all
   heads share in a cache. */
static inline void model_write_heads(gguf_writer *w, const model_shape *s) {
    unsigned traits = model_traits(s);
    int split = s->split_latent;
    if (traits & MODEL_LATENT) {
        model_some_u32(w, s, "attention.q_lora_rank", s->q_rank);
        model_meta_u32(w, s, "attention.kv_lora_rank", s->kv_rank);
    }
    if (split) {
        model_meta_u32(w, s, "attention.key_length_mla", s->head_dim);
        model_meta_u32(w, s, "attention.value_length_mla", s->head_dim_v);
    }
    if (traits & (MODEL_HEAD_KEYS | MODEL_LATENT) || s->head_dim * s->n_heads != s->n_embd ||
        s->head_dim_v != s->head_dim) {
        model_meta_u32(w, s, "attention.key_length",
            split ? s->kv_rank + s->rope_dim : s->head_dim);
        if (!model_is(s, "minicpm3"))
            model_meta_u32(w, s, "attention.value_length", split ? s->kv_rank : s->head_dim_v);
    }
}

static inline void model_write_experts(gguf_writer *w, const model_shape *s) {
    int deepseek = model_is(s, "deepseek2");
    if (!s->n_experts) return;
    model_meta_u32(w, s, "expert_count", s->n_experts);
    model_meta_u32(w, s, "expert_used_count", s->n_experts_used);
    model_some_u32(w, s, "expert_feed_forward_length", s->n_ff_exp);
    if (model_is(s, "qwen2moe"))
        model_meta_u32(w, s, "expert_shared_feed_forward_length",
            s->n_ff_shared ? s->n_ff_shared : s->n_ff);
    if (deepseek) model_meta_u32(w, s, "leading_dense_block_count", s->n_dense);
    if (deepseek) model_meta_u32(w, s, "expert_shared_count", s->n_shared);
    if (deepseek) model_meta_bool(w, s, "expert_weights_norm", s->expert_norm);
    model_some_f32(w, s, "expert_weights_scale", s->expert_scale);
    model_some_u32(w, s, "expert_gating_func", (uint32_t)s->gating);
    model_some_u32(w, s, "expert_group_count", s->n_groups);
    model_some_u32(w, s, "expert_group_used_count", s->n_groups_used);
}

/* Keys of some architectures. */
static inline void model_write_rest(gguf_writer *w, const model_shape *s) {
    model_some_f32(w, s, "attn_logit_softcapping", s->score_cap);
    model_some_f32(w, s, "final_logit_softcapping", s->logit_cap);
    model_some_f32(w, s, "attention.max_alibi_bias", s->alibi);
    model_some_f32(w, s, "attention.clamp_kqv", s->clamp);
    model_some_f32(w, s, "attention.scale", s->attn_scale);
    model_some_f32(w, s, "embedding_scale", s->embd_scale);
    model_some_f32(w, s, "residual_scale", s->residual_scale);
    model_some_f32(w, s, "logit_scale", s->logit_scale);
    if (model_is(s, "deepseek2")) model_meta_u32(w, s, "vocab_size", s->n_vocab);
    if (model_is(s, "falcon")) model_meta_string(w, s, "tensor_data_layout", "jploski");
    if (model_is(s, "gptneox")) model_meta_bool(w, s, "use_parallel_residual", !s->sequential);
    if (model_is(s, "stablelm")) model_meta_bool(w, s, "use_parallel_residual", s->one_norm);
}

static inline void model_write_shape(gguf_writer *w, const model_shape *s) {
    gguf_meta_string(w, "general.architecture", s->arch);
    gguf_meta_string(w, "general.name", "random");
    if (s->alignment != 32) gguf_meta_u32(w, "general.alignment", s->alignment);
    model_meta_u32(w, s, "context_length", s->n_ctx);
    model_meta_u32(w, s, "embedding_length", s->n_embd);
    model_meta_u32(w, s, "block_count", s->n_layers);
    model_meta_u32(w, s, "feed_forward_length", s->n_ff);
    model_meta_u32(w, s, "attention.head_count", s->n_heads);
    model_meta_u32(w, s, "attention.head_count_kv", s->split_latent ? 1 : s->n_kv_heads);
    model_meta_f32(w, s, model_traits(s) & MODEL_LAYER_NORM ? "attention.layer_norm_epsilon" :
        "attention.layer_norm_rms_epsilon", s->epsilon);
    model_write_heads(w, s);
    model_some_u32(w, s, "attention.sliding_window", s->window);
    model_write_pattern(w, s);
    model_write_rope(w, s);
    model_write_experts(w, s);
    model_write_rest(w, s);
}

/* Pieces after the 259 specials and byte tokens, those merged first come first; '_' stands for the
   mark of a space, U+2581. */
#define MODEL_N_PIECES 48
static inline const char *model_piece(size_t i) {
    static const char *const pieces[MODEL_N_PIECES] = {
        "_t", "he", "_the", "in", "_a", "er", "an", "on", "re", "_s", "_w", "ing", "nd", "_and",
        "it", "ou", "at", "or", "_was", "as", "is", "_o", "_of", "_b", "en",
        "_", "e", "t", "a", "o", "n", "i", "h", "s", "r", "d", "l", "u", "w", "m", "c", "g", "f",
        "y", "p", "b", "v", "k"
    };
    return pieces[i];
}

/* The spelling and the kind (tokenizer.ggml.token_type) of a token. */
static inline int model_spell(size_t id, char out[24]) {
    static const char *const special[3] = {"<unk>", "<s>", "</s>"};
    if (id < 3) snprintf(out, 24, "%s", special[id]);
    else if (id < 259) snprintf(out, 24, "<0x%02X>", (unsigned)(id - 3));
    else if (id < 259 + MODEL_N_PIECES) {
        const char *piece = model_piece(id - 259);
        snprintf(out, 24, "%s%s", *piece == '_' ? "\xE2\x96\x81" : "", piece + (*piece == '_'));
    } else snprintf(out, 24, "<extra_%u>", (unsigned)id);
    return id == 0 ? 2 : id < 3 ? 3 : id < 259 ? 6 : id < 259 + MODEL_N_PIECES ? 1 : 5;
}

static inline void model_write_vocab(gguf_writer *w, const model_shape *s) {
    size_t i, n = s->n_tokens;
    char (*text)[24] = (char (*)[24])gguf_must(malloc(n * 24));
    const char **items = (const char **)gguf_must(malloc(n * sizeof *items));
    float *scores = (float *)gguf_must(malloc(n * sizeof *scores));
    int32_t *kinds = (int32_t *)gguf_must(malloc(n * sizeof *kinds));
    for (i = 0; i < n; i++) {
        kinds[i] = model_spell(i, text[i]);
        items[i] = text[i];
        scores[i] = kinds[i] == 1 ? -(float)(i - 259) : 0.0f;
    }
    gguf_meta_string(w, "tokenizer.ggml.model", "llama");
    gguf_meta_string(w, "tokenizer.ggml.pre", "default");
    gguf_meta_strings(w, "tokenizer.ggml.tokens", n, items);
    gguf_meta_array(w, "tokenizer.ggml.scores", GGUF_VALUE_F32, n, scores);
    gguf_meta_array(w, "tokenizer.ggml.token_type", GGUF_VALUE_I32, n, kinds);
    gguf_meta_u32(w, "tokenizer.ggml.bos_token_id", 1);
    gguf_meta_u32(w, "tokenizer.ggml.eos_token_id", 2);
    gguf_meta_u32(w, "tokenizer.ggml.unknown_token_id", 0);
    gguf_meta_number(w, "tokenizer.ggml.add_bos_token", GGUF_VALUE_BOOL, 1);
    gguf_meta_number(w, "tokenizer.ggml.add_eos_token", GGUF_VALUE_BOOL, 0);
    free(text);
    free(items);
    free(scores);
    free(kinds);
}

/* A tensor and how its numbers are spread. */
typedef struct model_tensor {
    size_t tensor;
    float middle, reach;
} model_tensor;

/* What the tensors of a model are declared with. */
typedef struct model_maker {
    gguf_writer *w;
    gguf_buf *list;             /* of model_tensor */
    const model_shape *s;
    unsigned traits;
    int layer;                  /* -1: outside the layers */
} model_maker;

static inline model_maker model_make(gguf_writer *w, gguf_buf *list, const model_shape *s,
    int layer) {
    model_maker k = {w, list, s, model_traits(s), layer};
    return k;
}

static inline void model_put(const model_maker *k, const char *name, int type, uint32_t n_dims,
    const uint64_t *dims, float middle, double reach) {
    char full[64];
    model_tensor t;
    if (k->layer < 0) snprintf(full, sizeof full, "%s", name);
    else snprintf(full, sizeof full, "blk.%d.%s", k->layer, name);
    memset(&t, 0, sizeof t);
    t.tensor = gguf_tensor(k->w, full, type, n_dims, dims);
    t.middle = middle;
    t.reach = (float)reach;
    gguf_bytes(k->list, &t, sizeof t);
}

static inline void model_vector(const model_maker *k, const char *name, uint64_t n, float middle,
    double reach) {
    model_put(k, name, GGUF_F32, 1, &n, middle, reach);
}

static inline void model_matrix(const model_maker *k, const char *name, uint64_t n_in,
    uint64_t n_out, double reach) {
    uint64_t dims[2];
    dims[0] = n_in;
    dims[1] = n_out;
    model_put(k, name, k->s->type, 2, dims, 0, reach);
}

/* One matrix for each expert or head. */
static inline void model_matrices(const model_maker *k, const char *name, uint64_t n_in,
    uint64_t n_out, uint64_t n, double reach) {
    uint64_t dims[3];
    dims[0] = n_in;
    dims[1] = n_out;
    dims[2] = n;
    model_put(k, name, k->s->type, 3, dims, 0, reach);
}

/* One vector for each expert or head. */
static inline void model_vectors(const model_maker *k, const char *name, uint64_t size, uint64_t n,
    float middle, double reach) {
    uint64_t dims[2];
    dims[0] = size;
    dims[1] = n;
    model_put(k, name, GGUF_F32, 2, dims, middle, reach);
}

static inline void model_norm(const model_maker *k, const char *name, uint64_t n) {
    char full[40];
    snprintf(full, sizeof full, "%s.weight", name);
    model_vector(k, full, n, 1.0f, 0.25);
    snprintf(full, sizeof full, "%s.bias", name);
    if (k->traits & MODEL_NORM_BIAS) model_vector(k, full, n, 0, 0.25);
}

/* Half the width of a uniform distribution with which the sum of n products with numbers near 1 has
   standard deviation 1. */
static inline double model_reach(uint64_t n) {
    return sqrt(3.0 / (double)n);
}

static inline void model_declare_qkv(const model_maker *k) {
    const model_shape *s = k->s;
    uint64_t e = s->n_embd, q = (uint64_t)s->n_heads * s->head_dim;
    uint64_t kk = (uint64_t)s->n_kv_heads * s->head_dim;
    uint64_t v = (uint64_t)s->n_kv_heads * s->head_dim_v, o = (uint64_t)s->n_heads * s->head_dim_v;
    int fused = (k->traits & MODEL_QKV) != 0, biased = (k->traits & MODEL_QKV_BIAS) != 0;
    double in = model_reach(e);
    if (fused) model_matrix(k, "attn_qkv.weight", e, q + kk + v, 1.3 * in);
    if (fused && biased) model_vector(k, "attn_qkv.bias", q + kk + v, 0, 0.5);
    if (!fused) {
        model_matrix(k, "attn_q.weight", e, q, 1.4 * in);
        model_matrix(k, "attn_k.weight", e, kk, 1.4 * in);
        model_matrix(k, "attn_v.weight", e, v, in);
    }
    model_matrix(k, "attn_output.weight", o, e, 1.5 * model_reach(o));
    if (!fused && biased) {
        model_vector(k, "attn_q.bias", q, 0, 0.5);
        model_vector(k, "attn_k.bias", kk, 0, 0.5);
        model_vector(k, "attn_v.bias", v, 0, 0.5);
    }
    if (k->traits & MODEL_OUT_BIAS) model_vector(k, "attn_output.bias", e, 0, 0.5);
}

/* Norms of queries and keys, which make them longer, so that scores have a spread; and sinks. */
static inline void model_declare_scores(const model_maker *k) {
    const model_shape *s = k->s;
    uint64_t d = s->head_dim, wide = k->traits & MODEL_QK_WIDE ? 1 : 0;
    if (k->traits & (MODEL_QK_NORM | MODEL_QK_WIDE)) {
        model_vector(k, "attn_q_norm.weight", wide ? s->n_heads * d : d, 1.5f, 0.25);
        model_vector(k, "attn_k_norm.weight", wide ? s->n_kv_heads * d : d, 1.5f, 0.25);
    }
    if (k->traits & MODEL_QK_OWN) {
        model_vectors(k, "attn_q_norm.weight", d, s->n_heads, 1.5f, 0.25);
        model_vectors(k, "attn_k_norm.weight", d, s->n_kv_heads, 1.5f, 0.25);
    }
    if (k->traits & MODEL_GPT_OSS) model_vector(k, "attn_sinks.weight", s->n_heads, 0, 2.0);
}

static inline void model_declare_latent(const model_maker *k) {
    const model_shape *s = k->s;
    uint64_t e = s->n_embd, n = s->n_heads, q = n * s->head_dim, c = s->kv_rank, cq = s->q_rank;
    uint64_t plain = s->head_dim - s->rope_dim, v = s->head_dim_v, o = n * v;
    double in = model_reach(e), out = 1.2 * model_reach(c);
    if (cq) {
        model_matrix(k, "attn_q_a.weight", e, cq, in);
        model_norm(k, "attn_q_a_norm", cq);
        model_matrix(k, "attn_q_b.weight", cq, q, 1.4 * model_reach(cq));
    } else {
        model_matrix(k, "attn_q.weight", e, q, 1.4 * in);
    }
    model_matrix(k, "attn_kv_a_mqa.weight", e, c + s->rope_dim, 1.2 * in);
    model_norm(k, "attn_kv_a_norm", c);
    if (s->split_latent) {
        model_matrices(k, "attn_k_b.weight", plain, c, n, out);
        model_matrices(k, "attn_v_b.weight", c, v, n, out);
    } else {
        model_matrix(k, "attn_kv_b.weight", c, n * (plain + v), out);
    }
    model_matrix(k, "attn_output.weight", o, e, 1.5 * model_reach(o));
}

/* A network whose tensors end so: "" or "_shexp". */
static inline void model_declare_net(const model_maker *k, const char *end, uint64_t f) {
    char name[40];
    uint64_t e = k->s->n_embd;
    int paired = (k->traits & MODEL_GATE_UP) != 0, biased = (k->traits & MODEL_FFN_BIAS) != 0;
    double in = model_reach(e);
    snprintf(name, sizeof name, "ffn_gate%s.weight", end);
    if (!paired && !(k->traits & MODEL_NO_GATE)) model_matrix(k, name, e, f, 1.2 * in);
    snprintf(name, sizeof name, "ffn_up%s.weight", end);
    model_matrix(k, name, e, paired ? 2 * f : f, in);
    snprintf(name, sizeof name, "ffn_down%s.weight", end);
    model_matrix(k, name, f, e, 1.5 * model_reach(f));
    if (biased) model_vector(k, "ffn_up.bias", f, 0, 0.5);
    if (biased) model_vector(k, "ffn_down.bias", e, 0, 0.5);
}

/* gpt-oss has biases that lead beyond its clamps, and results of the size of those. */
static inline void model_declare_experts(const model_maker *k) {
    const model_shape *s = k->s;
    uint64_t e = s->n_embd, f = s->n_ff_exp ? s->n_ff_exp : s->n_ff, n = s->n_experts;
    int oss = (k->traits & MODEL_GPT_OSS) != 0;
    double in = model_reach(e);
    model_vectors(k, "ffn_gate_inp.weight", e, n, 0, 2.0 * in);
    model_matrices(k, "ffn_gate_exps.weight", e, f, n, 1.2 * in);
    model_matrices(k, "ffn_up_exps.weight", e, f, n, in);
    model_matrices(k, "ffn_down_exps.weight", f, e, n, (oss ? 0.1 : 1.5) * model_reach(f));
    if (oss) {
        model_vector(k, "ffn_gate_inp.bias", n, 0, 0.5);
        model_vectors(k, "ffn_gate_exps.bias", f, n, 0, 9.0);
        model_vectors(k, "ffn_up_exps.bias", f, n, 0, 9.0);
        model_vectors(k, "ffn_down_exps.bias", e, n, 0, 0.5);
    }
    if (s->expert_probs) model_vector(k, "exp_probs_b.bias", n, 0, 0.5);
    if (model_is(s, "qwen2moe")) {
        model_vector(k, "ffn_gate_inp_shexp.weight", e, 0, in);
        model_declare_net(k, "_shexp", s->n_ff_shared ? s->n_ff_shared : s->n_ff);
    }
    if (s->n_shared) model_declare_net(k, "_shexp", s->n_shared * f);
}

/* Activations stay near 1; scores and logits have a spread near 2. */
static inline void model_declare_layer(gguf_writer *w, gguf_buf *list, const model_shape *s,
    int il) {
    model_maker maker = model_make(w, list, s, il), *k = &maker;
    uint64_t e = s->n_embd;
    int post = (k->traits & MODEL_POST_NORMS) != 0;
    if (!(k->traits & MODEL_NO_ATTN_NORM)) model_norm(k, "attn_norm", e);
    if (s->two_norms) model_norm(k, "attn_norm_2", e);
    if (k->traits & MODEL_LATENT) model_declare_latent(k);
    else model_declare_qkv(k);
    model_declare_scores(k);
    if (post || k->traits & MODEL_GPT_OSS) model_norm(k, "post_attention_norm", e);
    if (!(k->traits & (MODEL_NO_FFN_NORM | MODEL_GPT_OSS))) model_norm(k, "ffn_norm", e);
    if (s->n_experts && k->layer >= (int)s->n_dense) model_declare_experts(k);
    else model_declare_net(k, "", s->n_ff);
    if (post) model_norm(k, "post_ffw_norm", e);
}

/* Divisors of frequencies, from 1 to `most`. */
static inline void model_fill_factors(const gguf_writer *w, size_t tensor, size_t most) {
    size_t i, n;
    if (tensor == GGUF_NONE) return;
    n = (size_t)gguf_tensor_at(w, tensor)->dims[0];
    for (i = 0; i < n; i++) {
        double part = (double)((most - 1) * i) / (double)(n > 1 ? n - 1 : 1);
        float x = (float)(1.0 + part);
        gguf_to_type(GGUF_F32, &x, 1, gguf_tensor_data(w, tensor) + 4 * i);
    }
}

/* What an architecture multiplies its logits by. */
static inline double model_logit_scale(const model_shape *s) {
    if (model_is(s, "minicpm3")) return 256.0 / (double)s->n_embd;
    if (model_is(s, "granite") && s->logit_scale > 0) return 1 / (double)s->logit_scale;
    return s->logit_scale > 0 ? (double)s->logit_scale : 1.0;
}

/* A matrix, or a vector if n_out is 0. */
static inline void model_declare(gguf_writer *w, gguf_buf *list, const char *name, int layer,
    int type, uint64_t n_in, uint64_t n_out, float middle, double reach) {
    model_maker k = {w, list, NULL, 0, layer};
    uint64_t dims[2];
    dims[0] = n_in;
    dims[1] = n_out;
    model_put(&k, name, type, n_out ? 2 : 1, dims, middle, reach);
}

static inline void model_declare_all(gguf_writer *w, gguf_buf *list, const model_shape *s) {
    model_maker k = model_make(w, list, s, -1);
    uint64_t e = s->n_embd;
    double head = 2.0 * model_reach(e) / model_logit_scale(s), embd = s->tied ? head : 1.0;
    uint32_t i;
    model_matrix(&k, "token_embd.weight", e, s->n_vocab, embd);
    if (k.traits & MODEL_POSITIONS) model_vectors(&k, "position_embd.weight", e, s->n_ctx, 0, embd);
    if (k.traits & MODEL_EMBD_NORM) model_norm(&k, "token_embd_norm", e);
    for (i = 0; i < s->n_layers; i++) model_declare_layer(w, list, s, (int)i);
    model_norm(&k, "output_norm", e);
    if (!s->tied) model_matrix(&k, "output.weight", e, s->n_vocab, head);
    if (k.traits & MODEL_HEAD_BIAS) model_vector(&k, "output.bias", s->n_vocab, 0, 1.0);
}

/* Writes the whole model; w->image and the marks stay for the caller, who ends with gguf_free. */
static inline void model_write(gguf_writer *w, const model_shape *shape) {
    model_shape s = *shape;
    gguf_buf list = {NULL, 0, 0};
    size_t i, freqs = GGUF_NONE, shorter = GGUF_NONE, longer = GGUF_NONE;
    uint64_t dims[1];
    model_defaults(&s);
    gguf_start(w, s.version, s.alignment);
    w->edits = s.edits;
    w->n_edits = s.n_edits;
    model_write_shape(w, &s);
    if (s.n_tokens >= 259) model_write_vocab(w, &s);
    if (s.more) s.more(w);
    model_declare_all(w, &list, &s);
    dims[0] = s.rope_dim / 2;
    if (s.rope_freqs) freqs = gguf_tensor(w, "rope_freqs.weight", GGUF_F32, 1, dims);
    if (s.rope == MODEL_ROPE_LONG) {
        longer = gguf_tensor(w, "rope_factors_long.weight", GGUF_F32, 1, dims);
        shorter = gguf_tensor(w, "rope_factors_short.weight", GGUF_F32, 1, dims);
    }
    gguf_finish(w);
    for (i = 0; i < list.size / sizeof(model_tensor); i++) {
        const model_tensor *t = (const model_tensor *)(const void *)list.data + i;
        model_fill(w, t->tensor, t->middle, t->reach, s.seed);
    }
    model_fill_factors(w, freqs, 8);
    model_fill_factors(w, longer, 6);
    model_fill_factors(w, shorter, 3);
    free(list.data);
}

/* The model as a GGUF image of *size bytes; the caller frees it. */
static inline void *model_build(const model_shape *shape, size_t *size) {
    gguf_writer w;
    void *image;
    model_write(&w, shape);
    image = w.image;
    *size = w.image_size;
    w.image = NULL;
    gguf_free(&w);
    return image;
}

#endif
