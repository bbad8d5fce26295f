/* The sections >>formats, >>dispatch and >>kernels: each kernel of every instruction set that runs
   here against the base one, bit for bit, and the base one against the formula in double. Buffers
   have exactly the size that a kernel may touch. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include "testing.h"
#include "naive.h"

/* The tables that run here, base first. */
static size_t tables(const kvc__kernels *out[5]) {
    size_t n = 0;
    int cap;
    for (cap = KVC_ISA_BASE; cap <= KVC_ISA_AVX512_VNNI; cap++) {
        const kvc__kernels *k = kvc__kernels_pick((kvc_isa)cap);
        if (k->isa == (kvc_isa)cap) out[n++] = k;
    }
    assert_int_equal(out[0]->isa, KVC_ISA_BASE);
    return n;
}

static float *new_floats(size_t n) {
    return (float *)gguf_must(malloc(n * sizeof(float) + !n));
}

/* Uniform in [-reach, reach]. */
static void fill(float *x, size_t n, float reach, uint64_t *state) {
    size_t i;
    for (i = 0; i < n; i++) {
        x[i] = (float)((int32_t)(model_random(state) >> 40) - 8388608) * (reach / 8388608.0f);
    }
}

static uint32_t pick(uint32_t n, uint64_t *state) {
    return (uint32_t)(model_random(state) >> 32) % n;
}

static void check_bits(const float *got, const float *want, size_t n, const char *isa,
    const char *what, size_t size) {
    size_t i;
    for (i = 0; i < n; i++) {
        if (!memcmp(&got[i], &want[i], sizeof *got)) continue;
        print_error("%s of %s at size %u: [%u] is %.9g, not %.9g\n", what, isa, (unsigned)size,
            (unsigned)i, (double)got[i], (double)want[i]);
        fail();
    }
}

/* ---- matrix products ---- */

static const struct {
    uint32_t type;
    const char *name;
    uint32_t multiple;          /* of which rows are */
} types[] = {
    {KVC__F32, "F32", 1}, {KVC__F16, "F16", 1}, {KVC__BF16, "BF16", 1}, {KVC__Q8_0, "Q8_0", 32},
    {KVC__Q4_0, "Q4_0", 32}
};

/* A product of every operand, in memory of exactly the size that a kernel may touch. */
typedef struct product {
    kvc__mm mm;
    unsigned char *w, *packed, *x8;
    float *x, *lanes, *y, *sums;
    naive_tensor tensor;
} product;

/* Blocks hold any bytes, -128 too; their scales are moderate. */
static void product_open(product *p, uint32_t type, uint32_t n_out, uint32_t n_rows, uint32_t k,
    const kvc__kernels *base, uint64_t *state) {
    size_t row_size = gguf_row_size((int)type, k), i;
    int quantized = kvc__type(type)->quantized;
    float *row = new_floats(k);
    uint32_t r;
    memset(p, 0, sizeof *p);
    p->w = (unsigned char *)gguf_must(malloc(n_out * row_size));
    p->x = new_floats((size_t)n_rows * k);
    p->mm.y_stride = (n_out + 15) / 16 * 16;
    p->y = new_floats(n_rows * p->mm.y_stride);
    p->sums = new_floats(KVC__SUM_FLOATS);
    fill(p->x, (size_t)n_rows * k, 2.0f, state);
    for (r = 0; r < n_out; r++) {
        fill(row, k, 1.0f, state);
        gguf_to_type((int)type, row, k, p->w + r * row_size);
        for (i = 0; quantized && i < row_size; i++) {
            if (i % (type == KVC__Q8_0 ? 34 : 18) < 2) continue;
            p->w[r * row_size + i] = (unsigned char)(model_random(state) >> 56);
        }
    }
    free(row);
    if (quantized) {
        uint32_t height = kvc__q8_height(n_rows);
        p->x8 = (unsigned char *)gguf_must(malloc((n_rows + 5) / 6 * 6 * k / 32 * KVC__Q8_BYTES));
        memset(p->x8, 0xff, (n_rows + 5) / 6 * 6 * k / 32 * KVC__Q8_BYTES);     /* NaNs between */
        for (r = 0; r < n_rows; r++)
            base->quantize(p->x + (size_t)r * k, k, p->x8 + kvc__q8_offset(r, height, k, 0),
                r % height, height);
    } else {
        size_t stride = kvc__lanes_stride(k), n = (n_rows + KVC__LANE_ROWS - 1) / KVC__LANE_ROWS;
        n *= KVC__LANE_ROWS * stride;
        p->lanes = new_floats(n);
        memset(p->lanes, 0xff, n * sizeof *p->lanes);
        for (r = 0; r < n_rows; r++) {
            uint32_t from = 16 * (k / 32);          /* in two parts */
            base->to_lanes(p->lanes + r * stride, p->x + (size_t)r * k, k, 0, from);
            base->to_lanes(p->lanes + r * stride, p->x + (size_t)r * k + from, k, from, k - from);
        }
    }
    p->packed = (unsigned char *)gguf_must(malloc(p->mm.y_stride / 16 * kvc__group_size(type, k)));
    for (r = 0; r < n_out; r += 16)
        kvc__pack_group(p->packed + r / 16 * kvc__group_size(type, k), p->w + r * row_size,
            n_out - r < 16 ? n_out - r : 16, k, type);
    p->mm.w = p->w;
    p->mm.w_stride = row_size;
    p->mm.x = p->x;
    p->mm.x_stride = k;
    p->mm.x8 = p->x8;
    p->mm.x8_height = kvc__q8_height(n_rows);
    p->mm.y = p->y;
    p->mm.sums = p->sums;
    p->mm.n_out = n_out;
    p->mm.n_rows = n_rows;
    p->mm.k = k;
    p->tensor.type = type;
    p->tensor.n_in = k;
    p->tensor.data = p->w;
}

static void product_close(product *p) {
    free(p->w);
    free(p->packed);
    free(p->sums);
    free(p->lanes);
    free(p->x);
    free(p->y);
    free(p->x8);
}

/* Element i of a row in 8 bits. */
static double q8_element(const kvc__mm *a, uint32_t row, uint32_t i) {
    uint32_t h = a->x8_height, slot = row % h;
    const unsigned char *group = a->x8 + kvc__q8_offset(row, h, a->k, i);
    double d = (double)kvc__rdf32(group + 32 * h + 4 * slot);
    return (double)(int8_t)group[32 * slot + i % 32] * d;
}

/* The sum in double, with the 8-bit activations where the kernel sees those. */
static void check_product(const product *p, const char *name) {
    const kvc__mm *a = &p->mm;
    uint32_t r, o, i;
    for (r = 0; r < a->n_rows; r++) {
        for (o = 0; o < a->n_out; o++) {
            double sum = 0, size = 0, got = (double)a->y[r * a->y_stride + o];
            for (i = 0; i < a->k; i++) {
                size_t at = (size_t)r * a->k + i;
                double x = a->x8 ? q8_element(a, r, i) : (double)a->x[at];
                double term = x * naive_element(&p->tensor, o, i);
                sum += term;
                size += fabs(term);
            }
            if (fabs(got - sum) <= 2e-6 * size + 1e-30) continue;
            print_error("%s, k %u: row %u, output %u is %.9g, not %.9g\n", name, a->k, r, o, got,
                sum);
            fail();
        }
    }
}

/* Runs one kernel; gives [n_rows, n_out] without the room between rows. */
static float *run_product(product *p, const kvc__kernels *k, int packed) {
    kvc__mm a = p->mm;
    float *y = new_floats(a.n_rows * a.n_out);
    uint32_t r;
    a.y = p->y;
    if (packed) {
        a.w = p->packed;
        a.w_stride = kvc__group_size(p->tensor.type, a.k);
        a.next = a.w + p->mm.y_stride / 16 * a.w_stride;
        if (p->lanes != NULL) {
            a.x = p->lanes;
            a.x_stride = kvc__lanes_stride(a.k);
        }
    }
    kvc__mm_pick(k, p->tensor.type, packed)(&a);
    for (r = 0; r < a.n_rows; r++)
        memcpy(y + r * a.n_out, a.y + r * a.y_stride, a.n_out * sizeof *y);
    return y;
}

/* One product on every set, weights in place and packed: all like the base's in place. */
static void check_shape(size_t type, uint32_t n_out, uint32_t n_rows, uint32_t k_in,
    uint64_t *random) {
    const kvc__kernels *k[5];
    size_t n = tables(k), i;
    int packed;
    float *want, *got;
    product p;
    product_open(&p, types[type].type, n_out, n_rows, k_in, k[0], random);
    want = run_product(&p, k[0], 0);
    check_product(&p, types[type].name);
    for (i = 0; i < n; i++) {
        for (packed = 0; packed <= 1; packed++) {
            got = run_product(&p, k[i], packed);
            check_bits(got, want, n_rows * n_out, k[i]->name, types[type].name, k_in);
            free(got);
        }
    }
    free(want);
    product_close(&p);
}

static void test_products(void **state) {
    static const uint32_t sizes[] = {1, 2, 15, 16, 17, 31, 32, 33, 48, 96, 100, 160, 172, 257};
    size_t t, s;
    uint64_t random = 1;
    (void)state;
    for (t = 0; t < COUNT(types); t++) {
        for (s = 0; s < COUNT(sizes); s++) {
            uint32_t shape, unit = types[t].multiple, k_in = (sizes[s] + unit - 1) / unit * unit;
            for (shape = 0; shape < 25; shape++)        /* 1 to 11 outputs, 1 to 9 rows */
                check_shape(t, 1 + shape % 11, 1 + shape % 9, k_in, &random);
        }
    }
}

/* Whole blocks of a step: every height of the last register tile, k in one chunk and in several,
   groups that are full and not. */
static void test_large_products(void **state) {
    static const uint32_t outs[] = {64, 61, 48, 33, 32, 17}, k_in[] = {64, 1024, 1536, 1568, 2592};
    size_t t, o, k = 0;
    uint32_t rows;
    uint64_t random = 7;
    (void)state;
    for (t = 0; t < COUNT(types); t++) {
        for (o = 0; o < COUNT(outs); o++) {
            for (rows = 5; rows < 100; rows += rows < 13 || (rows > 44 && rows < 56) ? 1 : 8, k++)
                check_shape(t, outs[o], rows, o > 1 ? k_in[k % 2] : k_in[k % COUNT(k_in)], &random);
        }
    }
    check_shape(0, 5, 50, 1024 + 1024 + 7, &random);
    check_shape(1, 64, 53, 1024 + 512 + 15, &random);
}

/* A few rows, as a step of several sequences has them: every number of rows by blocks of outputs
   that fill the tiles and that do not, k in one stretch and in several. */
static void test_few_rows(void **state) {
    static const uint32_t outs[] = {16, 32, 48, 64, 80, 96}, k_in[] = {32, 256, 288, 576, 1056};
    size_t t, k = 0;
    uint32_t rows, o;
    uint64_t random = 11;
    (void)state;
    for (t = 0; t < COUNT(types); t++) {
        if (!kvc__type(types[t].type)->quantized) continue;
        for (rows = 1; rows <= 48; rows++) {
            for (o = 0; o < 3; o++, k++)
                check_shape(t, outs[(k + rows) % COUNT(outs)], rows, k_in[k % COUNT(k_in)],
                    &random);
        }
    }
}

/* Rows in their lanes, whole and in two parts: each element where the packed weights have theirs,
   zeros after the last. */
static void test_to_lanes(void **state) {
    const kvc__kernels *tables_here[5];
    size_t n = tables(tables_here), t;
    uint32_t k, i, cut;
    uint64_t random = 3;
    float x[300], row[336];
    (void)state;
    fill(x, COUNT(x), 2.0f, &random);
    for (t = 0; t < n; t++) {
        const kvc__kernels *kern = tables_here[t];
        for (k = 1; k <= COUNT(x); k += k < 140 ? 1 : 13) {
            uint32_t steps = (k + 15) / 16;
            cut = pick(k / 16 + 1, &random) * 16;
            memset(row, 0xff, sizeof row);
            kern->to_lanes(row, x, k, 0, cut);
            kern->to_lanes(row, x + cut, k, cut, k - cut);
            for (i = 0; i < 16 * steps; i++) {
                uint32_t at = 16 * (i % steps) + kvc__lane_order[i / steps];
                assert_true(row[i] == (at < k ? x[at] : 0.0f));
            }
            assert_true(row[i] != row[i]);      /* nothing past the end */
        }
    }
}

/* Any bits, NaN and numbers too small for a normal half among them: as the scalar conversion. */
static void test_to_f16(void **state) {
    const kvc__kernels *k[5];
    size_t n_tables = tables(k), t, i;
    uint64_t random = 5;
    (void)state;
    for (t = 0; t < n_tables; t++) {
        uint32_t round, n;
        for (round = 0; round < 2000; round++) {
            float x[40];
            uint16_t y[41];
            n = round % 41;
            for (i = 0; i < n; i++) {
                uint64_t bits = model_random(&random);
                uint32_t u = (uint32_t)(bits >> 32);
                if (bits & 1)
                    u = (u & 0x87ffffffu) | (0x30000000u + ((uint32_t)bits & 0x18000000u));
                memcpy(&x[i], &u, 4);
            }
            memset(y, 0x55, sizeof y);
            k[t]->to_f16(y, x, n);
            for (i = 0; i < n; i++) assert_int_equal(y[i], kvc__f32_to_f16(x[i]));
            assert_int_equal(y[n], 0x5555);
        }
    }
}

/* A block as a kernel of this type rounds it: nothing behind it may change. */
static void to_block(const kvc__kernels *k, int nibbles, const float *x, uint32_t n,
    unsigned char block[35]) {
    memset(block, 0xa5, 35);
    if (nibbles) k->to_q4_0(block, x, n);
    else k->to_q8_0(block, x, n);
    assert_int_equal(block[nibbles ? 18 : 34], 0xa5);
}

/* The rounding as the header lays it down. */
static void plain_block(int nibbles, const float *x, uint32_t n, unsigned char *block) {
    float least = nibbles ? -8.0f : -127.0f, most = nibbles ? 7.0f : 127.0f, peak = 0, d, by;
    int odd = 0;
    uint16_t half;
    uint32_t i;
    for (i = 0; i < n; i++) {
        odd |= !(fabsf(x[i]) < INFINITY);
        if (fabsf(x[i]) > fabsf(peak) || (x[i] > 0 && x[i] >= fabsf(peak))) peak = x[i];
    }
    d = nibbles ? -peak / 8.0f : fabsf(peak) / 127.0f;
    half = odd ? 0x7e00 : kvc__f32_to_f16(d);
    memcpy(block, &half, 2);
    by = odd || !(half & 0x7fff) ? 0 : 1.0f / kvc__f16_to_f32(half);
    memset(block + 2, nibbles ? 0x88 : 0, nibbles ? 16 : 32);
    for (i = 0; i < n && !odd; i++) {
        float q = x[i] * by;
        q = nearbyintf(q);
        q = q < least ? least : q > most ? most : q;
        if (!nibbles) block[2 + i] = (unsigned char)(signed char)q;
        else if (i < 16) block[2 + i] = (unsigned char)((block[2 + i] & 0xf0) | ((int)q + 8));
        else block[i - 14] = (unsigned char)((block[i - 14] & 15) | ((int)q + 8) << 4);
    }
}

/* Numbers of all sizes, ties, blocks that are cut short, and what is no finite number. */
static void test_to_blocks(void **state) {
    static const float odd[] = {INFINITY, -INFINITY, NAN, 1e30f, -1e30f, 3e-8f, -1e-6f, 1e-40f};
    const kvc__kernels *k[5];
    size_t n_tables = tables(k), t;
    uint64_t random = 6;
    uint32_t round, i;
    (void)state;
    for (round = 0; round < 6000; round++) {
        unsigned char want[35], got[35];
        float x[32];
        int nibbles = (int)(round & 1);
        uint32_t n = round % 5 == 4 ? 1 + pick(32, &random) : 32;
        fill(x, 32, ldexpf(1.0f, (int)(round % 60) - 36), &random);
        if (round % 3 == 2)     /* halves of a scale that is a power of two */
            for (i = 0; i < 32; i++)
                x[i] = (float)pick(29, &random) * 0.5f - 7.0f;
        if (round % 3 == 2) x[pick(n, &random)] = nibbles ? -8.0f : 127.0f;
        if (round % 7 == 6) x[pick(n, &random)] = odd[pick(COUNT(odd), &random)];
        if (round % 11 == 10) memset(x, 0, sizeof x);
        memset(want, 0xa5, sizeof want);
        plain_block(nibbles, x, n, want);
        for (t = 0; t < n_tables; t++) {
            to_block(k[t], nibbles, x, n, got);
            if (memcmp(got, want, sizeof got)) print_error("%s, round %u\n", k[t]->name, round);
            assert_memory_equal(got, want, sizeof got);
        }
    }
}

/* Both ways of pairing, whole and broken vectors, dimensions that are not turned. */
static void test_rope(void **state) {
    static const uint32_t dims[] = {2, 6, 16, 20, 32, 40, 64, 80, 128};
    const kvc__kernels *k[5];
    size_t n_tables = tables(k), t, d;
    uint64_t random = 9;
    (void)state;
    for (d = 0; d < COUNT(dims); d++) {
        uint32_t mode, i, h, rope_dim = dims[d], head_dim = rope_dim + pick(5, &random);
        for (mode = 0; mode < 2; mode++) {
            uint32_t apart = mode ? rope_dim / 2 : 1;
            float x[3 * 140], turn[2 * 128], want[3 * 140], got[3 * 140];
            fill(x, 3 * head_dim, 2.0f, &random);
            fill(turn, 2 * rope_dim, 1.0f, &random);
            for (h = 0; h < 3; h++) {
                for (i = 0; i < head_dim; i++) {
                    const float *at = x + h * head_dim;
                    uint32_t partner = apart == 1 ? i ^ 1 : i < apart ? i + apart : i - apart;
                    float own = i < rope_dim ? at[i] * turn[i] : at[i];
                    float other = i < rope_dim ? at[partner] * turn[rope_dim + i] : 0.0f;
                    want[h * head_dim + i] = (own + other) * 0.375f;
                }
            }
            for (t = 0; t < n_tables; t++) {
                memcpy(got, x, sizeof got);
                k[t]->rope(got, 3, head_dim, rope_dim, apart, turn, 0.375f);
                check_bits(got, want, 3 * head_dim, k[t]->name, "rope", rope_dim);
            }
        }
    }
}

/* ---- attention ---- */

#define MOST_DIM 192u

/* Rows of one sequence with the query heads of one key head, over pages in any order. What no row
   may look at is NaN. */
typedef struct scene {
    kvc__attn attn;
    unsigned char *k, *v;       /* planes */
    kvc__slab slabs[2];         /* of two heads; the scene is the second */
    kvc__plane planes[2];
    kvc__leaf leaves[3];
    kvc__leaf *ring[3];
    kvc__extent extents[3];
    float turns[2 * 2 * MOST_DIM];
    float *mark_turns;
    float slopes[KVC__MAX_QUERIES], sinks[KVC__MAX_QUERIES];
    float *q, *out;
    uint32_t n_rows;            /* the last ones of the sequence */
    uint32_t n_pos;             /* slots, those of the rows too */
} scene;

/* The extent that a slot lies in; -1 if it was removed. */
static int scene_extent(const scene *s, uint32_t slot) {
    int i, n = (int)s->attn.n_extents;
    for (i = 0; i < n; i++)
        if (slot >= s->extents[i].slot && (slot < s->extents[i].end || i == n - 1)) return i;
    return -1;
}

static uint32_t scene_page(const scene *s, uint32_t slot) {
    const kvc__attn *a = &s->attn;
    const kvc__extent *t = &s->extents[scene_extent(s, slot)];
    return kvc__ring_page(a->ring, a->ring_cap,
        t->page + (slot >> a->page_shift) - (t->slot >> a->page_shift));
}

/* The piece of a slot's page. */
static unsigned char *scene_piece(const scene *s, uint32_t pos, int of_v) {
    uint32_t page = scene_page(s, pos), n = s->slabs[0].n_pages;
    const kvc__slab *slab = &s->slabs[page >= n];
    size_t piece = slab->n_pages + (page >= n ? page - n : page);
    return of_v ? slab->planes->v + piece * s->attn.v_piece :
        slab->planes->k + piece * s->attn.k_piece;
}

static int is_coded(kvc_kv_type type) {
    return type == KVC_KV_Q8 || type == KVC_KV_Q4;
}

/* Bytes of a row of n elements. */
static size_t row_bytes(kvc_kv_type type, size_t n) {
    size_t blocks = (n + 31) / 32;
    switch (type) {
    case KVC_KV_F16: return 2 * n;
    case KVC_KV_Q8: return 34 * blocks;
    case KVC_KV_Q4: return 18 * blocks;
    default: return 4 * n;
    }
}

/* Byte i of the key of a position. */
static unsigned char *scene_k(const scene *s, uint32_t pos, size_t i) {
    const kvc__attn *a = &s->attn;
    uint32_t at = pos & ((1u << a->page_shift) - 1), lane = at % 16;
    size_t row = row_bytes(a->type_k, a->head_dim), size = a->type_k == KVC_KV_F16 ? 2 : 4;
    unsigned char *tile = scene_piece(s, pos, 0) + at / 16 * 16 * row;
    if (is_coded(a->type_k)) {
        size_t block = a->type_k == KVC_KV_Q8 ? 34 : 18, in = i % block;
        tile += i / block * 16 * block;
        if (in < 2) return tile + 2 * lane + in;
        return tile + 32 + (in - 2) / 4 * 64 + 4 * lane + (in - 2) % 4;
    }
    return tile + (i / size * 16 + lane) * size + i % size;
}

/* Byte i of the value of a position. */
static unsigned char *scene_v(const scene *s, uint32_t pos, size_t i) {
    const kvc__attn *a = &s->attn;
    uint32_t at = pos & ((1u << a->page_shift) - 1), lane = at % 16;
    size_t row = row_bytes(a->type_v, a->v_stride), blocks = (a->v_stride + 31) / 32;
    unsigned char *tile = scene_piece(s, pos, 1) + at / 16 * 16 * row;
    if (is_coded(a->type_v)) {
        size_t block = a->type_v == KVC_KV_Q8 ? 34 : 18, in = i % block;
        if (in < 2) return tile + i / block * 32 + 2 * lane + in;
        return tile + 32 * blocks + (lane * blocks + i / block) * (block - 2) + in - 2;
    }
    return tile + lane * row + i;
}

typedef unsigned char *(*scene_byte)(const scene *, uint32_t, size_t);

/* Stores n floats, of which those past n_set are zero. */
static void scene_set(const scene *s, scene_byte byte, uint32_t pos, kvc_kv_type type, uint32_t n,
    uint32_t n_set, float reach, uint64_t *state) {
    static const int types_of[] = {0, GGUF_F32, GGUF_F16, GGUF_Q8_0, GGUF_Q4_0};
    unsigned char row[4 * MOST_DIM];
    float x[MOST_DIM] = {0};
    size_t i;
    fill(x, n_set, reach, state);
    gguf_to_type(types_of[type], x, is_coded(type) ? (n + 31) / 32 * 32 : n, row);
    for (i = 0; i < row_bytes(type, n); i++) *byte(s, pos, i) = row[i];
}

/* The number that element i stands for, without its scale, which is 1 for floats. */
static float scene_get(const scene *s, scene_byte byte, uint32_t pos, kvc_kv_type type, uint32_t i,
    float *scale) {
    unsigned char b[4];
    size_t at = type == KVC_KV_F16 ? 2 * i : 4 * i, block = type == KVC_KV_Q8 ? 34 : 18, j;
    *scale = 1.0f;
    if (!is_coded(type)) {
        for (j = 0; j < (type == KVC_KV_F16 ? 2 : 4); j++) b[j] = *byte(s, pos, at + j);
        return type == KVC_KV_F16 ? gguf_from_f16(kvc__rd16(b)) : kvc__rdf32(b);
    }
    at = i / 32 * block;
    b[0] = *byte(s, pos, at);
    b[1] = *byte(s, pos, at + 1);
    *scale = gguf_from_f16(kvc__rd16(b));
    if (type == KVC_KV_Q8) return (float)(signed char)*byte(s, pos, at + 2 + i % 32);
    b[0] = *byte(s, pos, at + 2 + i % 16);
    return (float)((i % 32 < 16 ? b[0] & 15 : b[0] >> 4) - 8);
}

static void scene_fill(scene *s, uint64_t *state) {
    const kvc__attn *a = &s->attn;
    uint32_t p;
    for (p = 0; p < s->n_pos; p++) {
        if (scene_extent(s, p) < 0) continue;
        scene_set(s, scene_k, p, a->type_k, a->head_dim, a->head_dim, 1.5f, state);
        if (a->v_in_k) continue;
        scene_set(s, scene_v, p, a->type_v, a->v_stride, a->head_dim_v, 1.0f, state);
    }
}

/* Removes up to two ranges before the rows; their turns are by any angles. Returns the pages that
   are left. */
static uint32_t scene_cut(scene *s, uint64_t *state) {
    kvc__attn *a = &s->attn;
    uint32_t held = s->n_pos - s->n_rows, slot = 0, page = 0, i, j;
    a->extents = s->extents;
    a->turns = s->turns;
    a->rope_dim = (a->v_in_k ? a->v_from : a->head_dim) & ~1u;
    a->apart = pick(2, state) ? 1 : a->rope_dim / 2;
    for (i = 0; i < 2 && pick(2, state) && held > slot + 2; i++) {
        kvc__extent *t = &s->extents[a->n_extents++];
        t->slot = slot;
        t->end = slot + 1 + pick(held - slot - 2, state);
        t->page = page;
        slot = t->end + 1 + pick(held - t->end - 1, state);
        page += ((t->end - 1) >> a->page_shift) - (t->slot >> a->page_shift);
        page += (t->end - 1) >> a->page_shift != slot >> a->page_shift;
    }
    s->extents[a->n_extents].slot = slot;
    s->extents[a->n_extents].end = held;
    s->extents[a->n_extents++].page = page;
    for (i = 0; i + 1 < a->n_extents; i++)
        for (j = i; j + 1 < a->n_extents; j++)
            s->extents[i].gap += s->extents[j + 1].slot - s->extents[j].end;
    for (i = 0; i < 2; i++) {
        float *own = s->turns + 2 * i * a->rope_dim, *other = own + a->rope_dim;
        for (j = 0; j < a->rope_dim / 2; j++) {
            uint32_t at = a->apart == 1 ? 2 * j : j;
            fill(&own[at], 1, 1, state);
            own[at + a->apart] = own[at];
            fill(&other[at], 1, 1, state);
            other[at + a->apart] = -other[at];
        }
    }
    return page + ((s->n_pos - 1) >> a->page_shift) - (slot >> a->page_shift) + 1;
}

/* What some models have: values inside of keys, at any place; a cap, slopes, sinks. */
static void scene_vary(scene *s, uint64_t *state) {
    kvc__attn *a = &s->attn;
    uint32_t i;
    for (i = 0; i < KVC__MAX_QUERIES; i++) s->slopes[i] = ldexpf(1.0f, -(int)(i % 9) - 1);
    fill(s->sinks, KVC__MAX_QUERIES, 4.0f, state);
    if (pick(2, state)) a->soft_cap = pick(2, state) ? 5.0f : 50.0f;
    if (pick(2, state)) a->slopes = s->slopes;
    if (pick(2, state)) a->sinks = s->sinks;
    if (!pick(3, state)) return;
    a->v_in_k = 1;
    a->type_v = (kvc_kv_type)0;
    if (!pick(3, state)) a->head_dim = MOST_DIM;
    if (!pick(3, state)) a->n_q = 10 + pick(12, state);
    a->v_from = pick(2, state) ? pick(a->head_dim, state) : pick(a->head_dim / 16, state) * 16;
    a->head_dim_v = a->head_dim - a->v_from;
    if (pick(2, state)) a->head_dim_v = 1 + pick(a->head_dim_v, state);
    a->v_stride = (a->head_dim_v + 15) & ~15u;
}

/* The keys of the first slots are turned on by any angles. */
static void scene_mark(scene *s, uint64_t *state) {
    kvc__attn *a = &s->attn;
    uint32_t half = a->rope_dim / 2, slot, i, end;
    a->n_marked = pick(2, state) ? s->extents[0].end : pick(s->extents[0].end + 1, state);
    end = (a->n_marked + 15u) & ~15u;
    s->mark_turns = new_floats((size_t)end * a->rope_dim);
    fill(s->mark_turns, (size_t)end * a->rope_dim, 1.0f, state);
    for (slot = a->n_marked; slot < end; slot++) {
        for (i = 0; i < half; i++) {
            float *turn = s->mark_turns + (slot / 16 * half + i) * 32 + slot % 16;
            turn[0] = 1.0f;
            turn[16] = 0.0f;
        }
    }
    a->mark_turns = s->mark_turns;
}

static void scene_open(scene *s, int more, uint64_t *state) {
    static const uint32_t dims[] = {16, 18, 20, 48, 64, 80, 96, 112, 128};
    static const uint32_t windows[] = {0, 0, 0, 1, 5, 40, 256, 300};
    kvc__attn *a = &s->attn;
    uint32_t i, n_pages, n_pieces;
    memset(s, 0, sizeof *s);
    a->head_dim = dims[pick(COUNT(dims), state)];
    a->head_dim_v = pick(2, state) ? a->head_dim : 1 + pick(70, state);
    a->v_stride = (a->head_dim_v + 15) & ~15u;
    a->n_q = 1 + pick(9, state);
    a->window = windows[pick(COUNT(windows), state)];
    a->page_shift = 4 + pick(5, state);
    a->type_k = (kvc_kv_type)(KVC_KV_F32 + pick(4, state));
    a->type_v = (kvc_kv_type)(KVC_KV_F32 + pick(4, state));
    if (more) scene_vary(s, state);
    s->n_rows = 1 + pick((more ? 60 : 100) / a->n_q, state);
    s->n_pos = s->n_rows + pick(800, state);
    a->k_piece = row_bytes(a->type_k, a->head_dim) << a->page_shift;
    a->v_piece = a->v_in_k ? 0 : row_bytes(a->type_v, a->v_stride) << a->page_shift;
    n_pages = scene_cut(s, state);
    if (more && pick(2, state)) scene_mark(s, state);
    a->ring_cap = (n_pages > KVC__LEAF_PAGES ? 2u : 1u) + pick(2, state);
    memset(s->leaves, 0xff, sizeof s->leaves);
    for (i = 0; i < 3; i++) s->ring[i] = &s->leaves[2 - i];
    for (i = 0; i < n_pages; i++) {         /* shuffled: each takes the place of one before */
        uint32_t j = pick(i + 1, state);
        uint32_t *to = &s->ring[i / KVC__LEAF_PAGES]->pages[i % KVC__LEAF_PAGES];
        uint32_t *of = &s->ring[j / KVC__LEAF_PAGES]->pages[j % KVC__LEAF_PAGES];
        *to = *of;
        *of = i;
    }
    s->slabs[0].n_pages = 1 + pick(n_pages, state);
    s->slabs[1].first = s->slabs[0].n_pages;
    s->slabs[1].n_pages = n_pages - s->slabs[0].n_pages + pick(2, state);
    n_pieces = 2 * (n_pages + 1) + 1;
    s->k = (unsigned char *)gguf_must(malloc(n_pieces * a->k_piece));
    s->v = (unsigned char *)gguf_must(malloc(n_pieces * a->v_piece + 1));
    memset(s->k, 0xff, n_pieces * a->k_piece);
    memset(s->v, 0xff, n_pieces * a->v_piece);
    for (i = 0; i < 2; i++) {               /* with a piece between them */
        s->slabs[i].planes = &s->planes[i];
        s->planes[i].k = s->k + i * (2 * s->slabs[0].n_pages + 1) * a->k_piece;
        if (a->v_in_k) continue;
        s->planes[i].v = s->v + i * (2 * s->slabs[0].n_pages + 1) * a->v_piece;
    }
    a->slabs = s->slabs;
    a->head = 1;
    a->ring = s->ring;
    a->q_stride = a->n_q * a->head_dim + pick(3, state);
    a->out_stride = a->n_q * a->head_dim_v + pick(3, state);
    s->q = new_floats(s->n_rows * a->q_stride);
    s->out = new_floats(s->n_rows * a->out_stride);
    fill(s->q, s->n_rows * a->q_stride, 0.5f, state);
    scene_fill(s, state);
}

static void scene_close(scene *s) {
    free(s->k);
    free(s->v);
    free(s->q);
    free(s->out);
    free(s->mark_turns);
}

static float plain_exp(float x) {
    return kvc__exp_base(kvc__set1_base(x)).v[0];
}

/* A query as keys in codes see it: rotated for those of 4 bits, then in 8 bits. */
static void plain_round(const kvc__attn *a, const float *q, unsigned char q8[MOST_DIM / 32 * 40]) {
    float x[MOST_DIM] = {0}, y[MOST_DIM];
    uint32_t i, apart, n = a->head_dim;
    memcpy(x, q, n * sizeof *x);
    for (apart = 1; a->type_k == KVC_KV_Q4 && n % (2 * apart) == 0; apart *= 2) {
        for (i = 0; i < n; i++)
            y[i] = i / apart % 2 ? x[i - apart] - x[i] : x[i] + x[i + apart];
        memcpy(x, y, n * sizeof *x);
    }
    for (i = 0; a->type_k == KVC_KV_Q4 && i < n; i++) x[i] *= 1.0f / sqrtf((float)apart);
    kvc__quantize_base(x, (n + 31) / 32 * 32, q8, 0, 1);
}

/* Whether the span that begins at the slot or holds it has marks. */
static int scene_marked(const scene *s, uint32_t slot) {
    uint32_t n = s->attn.n_marked;
    return s->extents[scene_extent(s, slot)].slot < n && slot / KVC__SPAN * KVC__SPAN < n;
}

/* A key of such a span. */
static void plain_key(const scene *s, uint32_t p, float *key) {
    const kvc__attn *a = &s->attn;
    const float *turn = s->mark_turns + (size_t)(p / 16) * a->rope_dim * 16 + p % 16;
    uint32_t i;
    for (i = 0; i < a->head_dim; i++) {
        float scale, x = scene_get(s, scene_k, p, a->type_k, i, &scale);
        key[i] = x * scale;
    }
    if (a->type_k == KVC_KV_Q4) kvc__key_rotate(key, a->head_dim);
    if (p / 16 * 16 >= a->n_marked) return;
    for (i = 0; i < a->rope_dim / 2; i++, turn += 32) {
        uint32_t at = a->apart == 1 ? 2 * i : i;
        float x = key[at], y = key[at + a->apart], xc = x * turn[0], ys = y * turn[16];
        float yc = y * turn[0], xs = x * turn[16];
        key[at] = xc - ys;
        key[at + a->apart] = yc + xs;
    }
}

static float plain_score(const scene *s, const float *q, const unsigned char *q8, uint32_t p) {
    const kvc__attn *a = &s->attn;
    float x = 0, scale = 0, by;
    uint32_t d, end;
    if (scene_marked(s, p)) {
        float key[MOST_DIM];
        plain_key(s, p, key);
        for (d = 0; d < a->head_dim; d++) x = fmaf(q[d], key[d], x);
        return x;
    }
    if (!is_coded(a->type_k)) {
        for (d = 0; d < a->head_dim; d++)
            x = fmaf(q[d], scene_get(s, scene_k, p, a->type_k, d, &scale), x);
        return x;
    }
    for (d = 0; d < a->head_dim; d = end, q8 += 40) {
        int32_t sum = 0;
        for (end = d + 32; d < end; d++)
            sum += (int32_t)(signed char)q8[d % 32] *
                (int32_t)scene_get(s, scene_k, p, a->type_k, d, &scale);
        by = scale * kvc__rdf32(q8 + 32);
        x = fmaf((float)sum, by, x);
    }
    return x;
}

/* One query: its head, and the slot of its row. */
typedef struct ask {
    const float *q;
    uint32_t head, own;
} ask;

static ask scene_ask(const scene *s, uint32_t row, uint32_t head) {
    ask a;
    a.q = s->q + row * s->attn.q_stride + head * s->attn.head_dim;
    a.head = head;
    a.own = s->n_pos - s->n_rows + row;
    return a;
}

/* Positions from a slot to the query's. */
static uint32_t scene_distance(const scene *s, const ask *k, uint32_t slot) {
    return k->own - slot - s->extents[scene_extent(s, slot)].gap;
}

/* Scores of the span's positions from lo to hi become weights; gives their sum, returns the largest
   score. q: the query as it is turned for them. */
static float plain_weights(const scene *s, const ask *k, const float *q, uint32_t lo, uint32_t hi,
    float weight[KVC__SPAN], float *sum) {
    const kvc__attn *a = &s->attn;
    float lane[16] = {0}, top = -INFINITY;
    unsigned char q8[MOST_DIM / 32 * 40];
    uint32_t p, i;
    if (is_coded(a->type_k)) plain_round(a, q, q8);
    for (p = lo; p < hi; p++) {
        float x = plain_score(s, q, q8, p);
        if (a->soft_cap > 0)
            x = kvc__soft_cap16_base(kvc__set1_base(x), kvc__set1_base(a->soft_cap)).v[0];
        if (a->slopes) x = fmaf(a->slopes[k->head], -(float)scene_distance(s, k, p), x);
        weight[p % KVC__SPAN] = x;
        if (x > top) top = x;
    }
    for (p = lo; p < hi; p++) {
        weight[p % KVC__SPAN] = plain_exp(weight[p % KVC__SPAN] - top);
        lane[p % 16] += weight[p % KVC__SPAN];
    }
    for (i = 8; i > 0; i /= 2) for (p = 0; p < i; p++) lane[p] += lane[p + i];
    *sum = lane[0];
    return top;
}

/* The weighted sum of the values of the span's positions from lo to hi. */
static void plain_values(const scene *s, uint32_t lo, uint32_t hi, const float weight[KVC__SPAN],
    float *o) {
    const kvc__attn *a = &s->attn;
    uint32_t p, d;
    for (d = 0; d < a->head_dim_v; d++) {
        o[d] = 0;
        for (p = lo; p < hi; p++) {
            float scale, v = scene_get(s, scene_v, p, a->type_v, d, &scale);
            float by = weight[p % KVC__SPAN] * scale;
            o[d] = fmaf(by, v, o[d]);
        }
    }
}

/* The same of values that lie in keys. */
static void plain_in_keys(const scene *s, uint32_t lo, uint32_t hi, const float weight[KVC__SPAN],
    float *o) {
    const kvc__attn *a = &s->attn;
    float sums[MOST_DIM];
    uint32_t p, d, i;
    for (d = 0; d < a->head_dim; d++) {
        float lane[16] = {0};
        for (p = lo & ~15u; p < ((hi + 15u) & ~15u); p++) {
            int seen = p >= lo && p < hi;
            float scale = 0, x = seen ? scene_get(s, scene_k, p, a->type_k, d, &scale) : 0;
            x *= scale;
            lane[p % 16] = fmaf(seen ? weight[p % KVC__SPAN] : 0, x, lane[p % 16]);
        }
        for (i = 8; i > 0; i /= 2) for (p = 0; p < i; p++) lane[p] += lane[p + i];
        sums[d] = lane[0];
    }
    if (a->type_k == KVC_KV_Q4) kvc__key_rotate(sums, a->head_dim);
    memcpy(o, sums + a->v_from, a->head_dim_v * sizeof *o);
}

/* A query as the keys of an extent see it. */
static void plain_turn(const scene *s, int extent, const float *q, float *out) {
    const kvc__attn *a = &s->attn;
    memcpy(out, q, a->head_dim * sizeof *q);
    if ((uint32_t)extent + 1 == a->n_extents) return;
    kvc__rope_base(out, 1, a->head_dim, a->rope_dim, a->apart,
        s->turns + 2 * (uint32_t)extent * a->rope_dim, 1.0f);
}

/* The next run of slots in one span, from *lo to *hi - 1, that a query sees all of or nothing;
   whether it does. */
static int scene_run(const scene *s, const ask *k, uint32_t *lo, uint32_t *hi) {
    const kvc__attn *a = &s->attn;
    int extent = scene_extent(s, *lo = *hi);
    *hi = *lo + 1;
    if (extent < 0) return 0;
    if (a->window && scene_distance(s, k, *lo) >= a->window) return 0;
    while (*hi <= k->own && *hi % KVC__SPAN != 0 && scene_extent(s, *hi) == extent) ++*hi;
    return 1;
}

/* One query in the order of sums that the header lays down; tops: m and l. */
static void plain_attention(const scene *s, const ask *k, float *out, float *tops) {
    const kvc__attn *a = &s->attn;
    uint32_t lo, hi = 0, d;
    float m = -INFINITY, l = 0, q[MOST_DIM], o[MOST_DIM], top, keep, take;
    for (d = 0; d < a->head_dim_v; d++) out[d] = 0;
    while (hi <= k->own) {
        float weight[KVC__SPAN], l_span, m_span;
        if (!scene_run(s, k, &lo, &hi)) continue;
        plain_turn(s, scene_extent(s, lo), k->q, q);
        m_span = plain_weights(s, k, q, lo, hi, weight, &l_span);
        top = m_span > m ? m_span : m;
        keep = plain_exp(m - top);
        take = plain_exp(m_span - top);
        l = l * keep + l_span * take;
        m = top;
        if (a->v_in_k) plain_in_keys(s, lo, hi, weight, o);
        else plain_values(s, lo, hi, weight, o);
        for (d = 0; d < a->head_dim_v; d++) out[d] = fmaf(o[d], take, out[d] * keep);
    }
    if (a->sinks) {
        top = m > a->sinks[k->head] ? m : a->sinks[k->head];
        keep = plain_exp(m - top);
        l = l * keep + plain_exp(a->sinks[k->head] - top);
        m = top;
        for (d = 0; d < a->head_dim_v; d++) out[d] *= keep;
    }
    for (d = 0; d < a->head_dim_v; d++) out[d] /= l;
    tops[0] = m;
    tops[1] = l;
}

/* The spans of a group: the first ones merged, the others kept apart in runs if `apart` is set. */
static void attend_group(const kvc__kernels *k, kvc__attn *a, int apart, uint64_t *state) {
    uint32_t n = a->n_rows * a->n_q, cut, tile;
    uint32_t to = kvc__span_end(a->extents, a->n_extents, a->slot + a->n_rows - 1);
    uint32_t from = kvc__span_first(a->extents, a->n_extents, a->slot, a->window);
    size_t part = (size_t)n * kvc__part_floats(a->v_stride);
    float *parts = new_floats(part * (to - from));
    a->work = new_floats(kvc__attn_floats(n, a->head_dim, a->v_stride));
    a->state = new_floats(part);
    a->from = from;
    a->to = cut = apart ? from + 1 + pick(to - from, state) : to;
    a->parts = NULL;
    a->goes_on = 0;
    if (apart && cut > from + 1) {          /* in two calls */
        a->to = from + 1;
        k->attention(a);
        a->goes_on = 1;
        a->from = a->to;
        a->to = cut;
    }
    k->attention(a);
    for (a->from = cut; a->from < to; a->from = a->to) {
        a->to = a->from + 1 + pick(to - a->from, state);
        a->parts = parts + part * (a->from - cut);
        k->attention(a);
    }
    a->from = cut;
    a->to = to;
    a->parts = parts;
    k->attention_merge(a);
    for (; a->tally != NULL && from < to; from++)
        for (tile = 0; tile < KVC__SPAN_TILES; tile += 4) k->attention_tally(a, from, tile);
    free(parts);
    free(a->state);
    free(a->work);
}

/* All rows, in groups of random sizes. */
static void attend_scene(const kvc__kernels *k, const scene *s, int apart, uint64_t *state) {
    kvc__attn a = s->attn;
    uint32_t row;
    for (row = 0; row < s->n_rows; row += a.n_rows) {
        uint32_t left = s->n_rows - row, most = KVC__MAX_QUERIES / a.n_q;
        a.n_rows = 1 + pick(left < most ? left : most, state);
        a.slot = s->n_pos - left;
        a.q = s->q + row * a.q_stride;
        a.out = s->out + row * a.out_stride;
        if (a.tops != NULL) a.tops = s->attn.tops + row * a.tops_stride;
        attend_group(k, &a, apart, state);
    }
}

static void test_attention(void **state) {
    const kvc__kernels *k[5];
    size_t n = tables(k), i;
    uint64_t random = 7;
    uint32_t run, row, h;
    (void)state;
    for (run = 0; run < 120; run++) {
        scene s;
        float *want, tops[2];
        scene_open(&s, 0, &random);
        want = new_floats(s.n_rows * s.attn.out_stride);
        fill(s.out, s.n_rows * s.attn.out_stride, 1, &random);
        memcpy(want, s.out, s.n_rows * s.attn.out_stride * sizeof *want);
        for (row = 0; row < s.n_rows; row++)
            for (h = 0; h < s.attn.n_q; h++) {
                ask query = scene_ask(&s, row, h);
                plain_attention(&s, &query,
                    want + row * s.attn.out_stride + h * s.attn.head_dim_v, tops);
            }
        for (i = 0; i < n; i++) {
            attend_scene(k[i], &s, 0, &random);
            check_bits(s.out, want, s.n_rows * s.attn.out_stride, k[i]->name, "attention", run);
            attend_scene(k[i], &s, 1, &random);
            check_bits(s.out, want, s.n_rows * s.attn.out_stride, k[i]->name, "parts", run);
        }
        free(want);
        scene_close(&s);
    }
}

/* A score in double, of a query that is turned for the slot; q8: in 8 bits. */
static double exact_score(const scene *s, const ask *k, const float *q, const unsigned char *q8,
    uint32_t p) {
    const kvc__attn *a = &s->attn;
    int coded = is_coded(a->type_k) && !scene_marked(s, p);
    double x = 0;
    float key[MOST_DIM], scale;
    uint32_t d;
    if (scene_marked(s, p)) plain_key(s, p, key);
    for (d = 0; d < a->head_dim; d++) {
        double of_key = scene_marked(s, p) ? (double)key[d]
            : (double)scene_get(s, scene_k, p, a->type_k, d, &scale);
        double of_q = (double)q[d];
        if (coded) of_key *= (double)scale;
        if (coded) of_q = (double)(signed char)q8[d / 32 * 40 + d % 32] *
            (double)kvc__rdf32(q8 + d / 32 * 40 + 32);
        x += of_key * of_q;
    }
    if (a->soft_cap > 0) x = (double)a->soft_cap * tanh(x / (double)a->soft_cap);
    if (a->slopes) x -= (double)a->slopes[k->head] * scene_distance(s, k, p);
    return x;
}

/* An element of a value. */
static double exact_value(const scene *s, uint32_t p, uint32_t d) {
    const kvc__attn *a = &s->attn;
    float row[MOST_DIM], scale, x;
    uint32_t i, block = a->head_dim & (0u - a->head_dim), from;
    if (!a->v_in_k) {
        x = scene_get(s, scene_v, p, a->type_v, d, &scale);
        return (double)x * (double)scale;
    }
    d += a->v_from;
    if (a->type_k != KVC_KV_Q4) {
        x = scene_get(s, scene_k, p, a->type_k, d, &scale);
        return (double)x * (double)scale;
    }
    from = d / block * block;
    for (i = 0; i < block; i++) {
        x = scene_get(s, scene_k, p, a->type_k, from + i, &scale);
        row[i] = x * scale;
    }
    kvc__key_rotate(row, block);
    return (double)row[d - from];
}

/* One query in double: the probabilities of all slots, and one element of the result, against what
   the kernels gave. */
static void check_exact(const scene *s, const ask *k, const float *got, double *tally) {
    const kvc__attn *a = &s->attn;
    double *score = (double *)gguf_must(malloc((k->own + 1) * sizeof *score)), top, l = 0, o = 0;
    uint32_t lo, hi = 0, p, d = (k->own + k->head * 7) % a->head_dim_v, pos = 0;
    top = a->sinks ? (double)a->sinks[k->head] : -INFINITY;
    for (p = 0; p <= k->own; p++) score[p] = -INFINITY;
    while (hi <= k->own) {
        unsigned char q8[MOST_DIM / 32 * 40];
        float q[MOST_DIM];
        if (!scene_run(s, k, &lo, &hi)) continue;
        plain_turn(s, scene_extent(s, lo), k->q, q);
        if (is_coded(a->type_k)) plain_round(a, q, q8);
        for (p = lo; p < hi; p++) {
            score[p] = exact_score(s, k, q, q8, p);
            top = fmax(top, score[p]);
        }
    }
    for (p = 0; p <= k->own; p++) l += exp(score[p] - top);
    if (a->sinks) l += exp((double)a->sinks[k->head] - top);
    for (p = 0; p <= k->own; p++) {
        if (scene_extent(s, p) < 0) continue;
        tally[pos++] += exp(score[p] - top) / l * 1048576;
        if (score[p] > -INFINITY) o += exp(score[p] - top) / l * exact_value(s, p, d);
    }
    if (fabs((double)got[d] - o) > 5e-5) {
        print_error("element %u is %.9g, not %.9g\n", d, (double)got[d], o);
        fail();
    }
    free(score);
}

/* All sets by all ways give one result, that of want, and its m and l; so do their tallies. */
static void check_varied(const kvc__kernels *k, scene *s, const float *want, const float *tops,
    uint64_t *tally, uint32_t run, uint64_t *random) {
    uint32_t apart, n = s->n_rows * s->attn.n_q;
    s->attn.tops_stride = 2 * s->attn.n_q;
    for (apart = 0; apart < 2; apart++) {
        s->attn.tops = new_floats(2 * n);
        memset(s->attn.tops, 0xff, 2 * n * sizeof(float));
        s->attn.tally = (uint64_t *)gguf_must(calloc(s->n_pos, sizeof *tally));
        memset(s->out, 0, s->n_rows * s->attn.out_stride * sizeof *s->out);
        attend_scene(k, s, (int)apart, random);
        check_bits(s->out, want, s->n_rows * s->attn.out_stride, k->name, "attention", run);
        check_bits(s->attn.tops, tops, 2 * n, k->name, "tops", run);
        if (apart == 0 && k->isa == KVC_ISA_BASE)
            memcpy(tally, s->attn.tally, s->n_pos * sizeof *tally);
        assert_memory_equal(s->attn.tally, tally, s->n_pos * sizeof *tally);
        free(s->attn.tally);
        free(s->attn.tops);
        s->attn.tops = NULL;
        s->attn.tally = NULL;
    }
}

/* Caps, slopes, sinks, values in keys, marks: in the order of sums, and in double. */
static void test_varied_attention(void **state) {
    const kvc__kernels *k[5];
    size_t n = tables(k), i;
    uint64_t random = 17;
    uint32_t run, row, h;
    (void)state;
    for (run = 0; run < 50; run++) {
        scene s;
        float *want, *tops;
        double *exact;
        uint64_t *tally;
        scene_open(&s, 1, &random);
        want = (float *)gguf_must(calloc(s.n_rows * s.attn.out_stride, sizeof *want));
        tops = new_floats(2 * s.n_rows * s.attn.n_q);
        tally = (uint64_t *)gguf_must(calloc(s.n_pos, sizeof *tally));
        exact = (double *)gguf_must(calloc(s.n_pos, sizeof *exact));
        for (row = 0; row < s.n_rows; row++)
            for (h = 0; h < s.attn.n_q; h++) {
                float *to = want + row * s.attn.out_stride + h * s.attn.head_dim_v;
                ask query = scene_ask(&s, row, h);
                plain_attention(&s, &query, to, tops + 2 * (row * s.attn.n_q + h));
                check_exact(&s, &query, to, exact);
            }
        for (i = 0; i < n; i++) check_varied(k[i], &s, want, tops, tally, run, &random);
        for (i = 0; i < s.n_pos; i++)       /* each query rounds to whole numbers */
            assert_true(fabs((double)tally[i] - exact[i]) <=
                0.51 * s.n_rows * s.attn.n_q + 5e-5 * exact[i]);
        free(want);
        free(tops);
        free(tally);
        free(exact);
        scene_close(&s);
    }
}

/* ---- rows ---- */

static void test_rms_norm(void **state) {
    const kvc__kernels *k[5];
    size_t n_tables = tables(k), i, t;
    uint64_t random = 2;
    uint32_t n;
    (void)state;
    for (n = 1; n < 150; n++) {
        float *x = new_floats(n), *w = new_floats(n), *want = new_floats(n), *y = new_floats(n);
        double sum = 0;
        fill(x, n, 3.0f, &random);
        fill(w, n, 1.5f, &random);
        k[0]->rms_norm(want, x, w, n, 1e-5f);
        for (i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
        for (i = 0; i < n; i++) {
            double exact = (double)x[i] / sqrt(sum / n + 1e-5) * (double)w[i];
            assert_true(fabs((double)want[i] - exact) <= 1e-6 * fabs(exact));
        }
        for (t = 0; t < n_tables; t++) {
            k[t]->rms_norm(y, x, w, n, 1e-5f);
            check_bits(y, want, n, k[t]->name, "rms_norm", n);
            memcpy(y, x, n * sizeof *y);
            k[t]->rms_norm(y, y, w, n, 1e-5f);
            check_bits(y, want, n, k[t]->name, "rms_norm in place", n);
        }
        free(x);
        free(w);
        free(want);
        free(y);
    }
}

/* The formula in double; `size` takes what the error is measured by. */
static double exact_norm(const float *x, uint32_t n, uint32_t i, double *size) {
    double mean = 0, squares = 0, largest = 0;
    uint32_t j;
    for (j = 0; j < n; j++) mean += (double)x[j] / n;
    for (j = 0; j < n; j++) {
        squares += ((double)x[j] - mean) * ((double)x[j] - mean);
        if (fabs((double)x[j]) > largest) largest = fabs((double)x[j]);
    }
    *size = largest / sqrt(squares / n + 1e-5);
    return ((double)x[i] - mean) / sqrt(squares / n + 1e-5);
}

/* Rows around zero and far from it, with b and without, in place and not. */
static void test_layer_norm(void **state) {
    const kvc__kernels *k[5];
    size_t n_tables = tables(k), i, t;
    uint64_t random = 12;
    uint32_t n, round;
    (void)state;
    for (round = 0; round < 600; round++) {
        float *x = new_floats(n = 1 + round % 150), *w = new_floats(n), *b = new_floats(n);
        float *want = new_floats(n), *y = new_floats(n), *bias = round % 4 < 2 ? b : NULL;
        fill(x, n, 3.0f, &random);
        for (i = 0; round % 3 == 0 && i < n; i++) x[i] += 40.0f;
        fill(w, n, 1.5f, &random);
        fill(b, n, 1.0f, &random);
        k[0]->layer_norm(want, x, w, bias, n, 1e-5f);
        for (i = 0; i < n; i++) {
            double size, exact = exact_norm(x, n, (uint32_t)i, &size) * (double)w[i];
            exact += bias ? (double)b[i] : 0;
            assert_true(fabs((double)want[i] - exact) <= 1e-6 * (1 + size));
        }
        for (t = 0; t < n_tables; t++) {
            k[t]->layer_norm(y, x, w, bias, n, 1e-5f);
            check_bits(y, want, n, k[t]->name, "layer_norm", n);
            memcpy(y, x, n * sizeof *y);
            k[t]->layer_norm(y, y, w, bias, n, 1e-5f);
            check_bits(y, want, n, k[t]->name, "layer_norm in place", n);
        }
        free(x);
        free(w);
        free(b);
        free(want);
        free(y);
    }
}

/* What a kernel must come through: NaN first, then the infinities. */
static const float odd_values[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e30f, -1e30f, 3.4e38f,
    -3.4e38f, 1e-40f, -1e-40f, 1e-45f, -1e-45f, 7.0f, -7.0f, 88.5f, -88.5f, 0.625f, -0.625f, 5e18f,
    -5e18f, 20.0f, -20.0f, 1e-20f};

/* Fills x with numbers of all sizes; n odd ones come first. */
static void fill_odd(float *x, uint32_t n, uint32_t round, uint64_t *state) {
    uint32_t i;
    fill(x, n, round % 3 == 0 ? 6.0f : round % 3 == 1 ? 120.0f : 0.7f, state);
    for (i = 0; round % 2 && i < n && i < COUNT(odd_values); i++)
        x[i] = odd_values[(i + round / 2) % COUNT(odd_values)];
}

/* The same bits, or NaN both. */
static void check_bits_or_nan(const float *got, const float *want, size_t n, const char *isa,
    const char *what, size_t size) {
    size_t i;
    for (i = 0; i < n; i++)
        if (!isnan(got[i]) || !isnan(want[i])) check_bits(got + i, want + i, 1, isa, what, size);
}

/* act(g) * u in double, and the error that is allowed: exponentials lose in proportion to what they
   are taken of. */
static double exact_act(kvc__act act, double g, double u, double *allowed) {
    double y = act == KVC__ACT_GELU ? 2 * sqrt(2 / acos(-1.0)) * (g + 0.044715 * g * g * g) : g;
    double power = act == KVC__ACT_GELU_ERF ? g * g / 2 : fabs(y);
    if (act == KVC__ACT_CLAMPED) {
        g = fmin(g, 7);
        u = fmax(fmin(u, 7), -7) + 1;
        y = 1.702 * g;
        power = fabs(y);
    }
    y = act == KVC__ACT_GELU_ERF ? g * 0.5 * erfc(-g / sqrt(2)) : g / (1 + exp(-y));
    *allowed = fabs(y * u) * 6e-7 * (1 + fmin(power, 100) / 4) + 2e-36 * (1 + fabs(u));
    return y * u;
}

/* One run of all sets, with up and without. */
static void check_act(kvc__act act, uint32_t n, uint32_t round, int gated, uint64_t *random) {
    const kvc__kernels *k[5];
    size_t n_tables = tables(k), i, t;
    float *g = new_floats(n), *u = new_floats(n), *want = new_floats(n), *y = new_floats(n);
    fill_odd(g, n, round, random);
    fill(u, n, round % 4 < 2 ? 2.0f : 12.0f, random);
    if (n > 40) u[40] = NAN;
    if (n > 41) u[41] = -1.0f;
    memcpy(want, g, n * sizeof *g);
    k[0]->activate(want, gated ? u : NULL, n, act);
    for (i = 0; i < n; i++) {
        double by = gated ? (double)u[i] : 1, allowed, exact;
        if (isnan(g[i]) || isnan(by)) {
            assert_true(isnan(want[i]));
            continue;
        }
        if (isinf(g[i])) continue;
        exact = exact_act(act, (double)g[i], by, &allowed);
        if (fabs(exact) > 3.3e38) continue;
        if (fabs((double)want[i] - exact) <= allowed) continue;
        print_error("act %d of %.9g by %.9g is %.9g, not %.9g\n", (int)act, (double)g[i], by,
            (double)want[i], exact);
        fail();
    }
    for (t = 1; t < n_tables; t++) {
        memcpy(y, g, n * sizeof *g);
        k[t]->activate(y, gated ? u : NULL, n, act);
        check_bits_or_nan(y, want, n, k[t]->name, "activate", n);
    }
    free(g);
    free(u);
    free(want);
    free(y);
}

/* Over the whole range of gates, tails of all lengths. */
static void test_activate(void **state) {
    static const kvc__act acts[] = {KVC__ACT_SILU, KVC__ACT_GELU, KVC__ACT_GELU_ERF,
        KVC__ACT_CLAMPED};
    uint64_t random = 3;
    uint32_t n, round;
    size_t a;
    (void)state;
    for (a = 0; a < COUNT(acts); a++)
        for (round = 0; round < 24; round++)
            for (n = 1; n < 70; n++) {
                check_act(acts[a], n, round, 1, &random);
                if (acts[a] != KVC__ACT_CLAMPED) check_act(acts[a], n, round, 0, &random);
            }
}

/* The error of erf as gelu has it, from its argument's whole range. */
static void test_erf(void **state) {
    double worst = 0;
    int i;
    (void)state;
    for (i = -60000; i <= 60000; i++) {
        float x = (float)i * 1e-4f, y = x;
        if (i == 0) continue;
        kvc__kernels_pick(KVC_ISA_BASE)->activate(&y, NULL, 1, KVC__ACT_GELU_ERF);
        worst = fmax(worst, fabs(2 * (double)y / (double)x - 1 - erf((double)x / sqrt(2))));
    }
    if (worst > 2e-7) print_error("erf is off by %.3g\n", worst);
    assert_true(worst <= 2e-7);
}

static void test_accumulate(void **state) {
    const kvc__kernels *k[5];
    size_t n_tables = tables(k), t;
    uint64_t random = 8;
    uint32_t n, i, round;
    (void)state;
    for (n = 1; n < 70; n++) {
        for (round = 0; round < 2; round++) {
            float *x = new_floats(n), *y = new_floats(n), *want = new_floats(n);
            float scale = round ? 0.7f : 1.0f;
            fill(x, n, 2.0f, &random);
            for (t = 0; t < n_tables; t++) {
                for (i = 0; i < n; i++) {
                    y[i] = i % 16 == 5 ? -0.0f : (float)i / 7;
                    if (i % 16 == 5) x[i] = -0.0f;
                    want[i] = round ? fmaf(x[i], scale, y[i]) : y[i] + x[i];
                }
                k[t]->accumulate(y, x, scale, n);
                check_bits(y, want, n, k[t]->name, "accumulate", n);
            }
            free(x);
            free(y);
            free(want);
        }
    }
}

/* multiply and clamp, exactly; soft_cap against tanh. */
static void test_bounds(void **state) {
    const kvc__kernels *k[5];
    size_t n_tables = tables(k), t;
    uint64_t random = 13;
    uint32_t n, i, round;
    (void)state;
    for (round = 0; round < 24; round++) {
        for (n = 1; n < 70; n++) {
            float *x = new_floats(n), *y = new_floats(n), *want = new_floats(n);
            float cap = round % 4 < 2 ? 30.0f : 0.4f;
            fill_odd(x, n, round, &random);
            for (t = 0; t < n_tables; t++) {
                for (i = 0; i < n; i++) want[i] = x[i] * cap;
                memcpy(y, x, n * sizeof *x);
                k[t]->multiply(y, cap, n);
                check_bits_or_nan(y, want, n, k[t]->name, "multiply", n);
                for (i = 0; i < n; i++)
                    want[i] = x[i] > cap ? cap : x[i] < -cap ? -cap : x[i];
                memcpy(y, x, n * sizeof *x);
                k[t]->clamp(y, cap, n);
                check_bits_or_nan(y, want, n, k[t]->name, "clamp", n);
                memcpy(want, x, n * sizeof *x);
                k[0]->soft_cap(want, cap, n);
                memcpy(y, x, n * sizeof *x);
                k[t]->soft_cap(y, cap, n);
                check_bits_or_nan(y, want, n, k[t]->name, "soft_cap", n);
            }
            for (i = 0; i < n; i++) {
                double exact = (double)cap * tanh((double)x[i] / (double)cap);
                if (isnan(x[i])) assert_true(isnan(want[i]));
                else assert_true(fabs((double)want[i] - exact) <= 5e-7 * fabs(exact) + 1e-43);
                if (x[i] >= 0 && x[i] <= 0) assert_memory_equal(&want[i], &x[i], sizeof *x);
            }
            free(x);
            free(y);
            free(want);
        }
    }
}

/* ---- rounding to 8 bits ---- */

typedef struct q8 { int8_t q[32]; float d; int32_t sum; } q8;

/* Rounds n elements as the row in this place of a group; other places must stay as they are. */
static void quantize(const kvc__kernels *k, const float *x, uint32_t n, uint32_t slot,
    uint32_t height, q8 *out) {
    size_t block = height * KVC__Q8_BYTES, size = n / 32 * block, b, i;
    unsigned char *group = (unsigned char *)gguf_must(malloc(size));
    memset(group, 0xa5, size);
    k->quantize(x, n, group, slot, height);
    for (b = 0; b < n / 32; b++) {
        unsigned char *p = group + b * block;
        memcpy(out[b].q, p + 32 * slot, 32);
        memcpy(&out[b].d, p + 32 * height + 4 * slot, 4);
        memcpy(&out[b].sum, p + 36 * height + 4 * slot, 4);
        memset(p + 32 * slot, 0xa5, 32);
        memset(p + 32 * height + 4 * slot, 0xa5, 4);
        memset(p + 36 * height + 4 * slot, 0xa5, 4);
        for (i = 0; i < block; i++) assert_int_equal(p[i], 0xa5);
    }
    free(group);
}

static void check_block(const float *x, const q8 *b) {
    float largest = 0, d = b->d;
    int32_t total = 0;
    int i;
    for (i = 0; i < 32; i++) if (fabsf(x[i]) > largest) largest = fabsf(x[i]);
    assert_true(fabs((double)d - (double)largest / 127) <= 1e-7 * (double)d);
    for (i = 0; i < 32; i++) {
        assert_true(b->q[i] >= -127);
        assert_true(fabs((double)x[i] - (double)b->q[i] * (double)d) <= 0.5001 * (double)d);
        total += b->q[i];
    }
    assert_int_equal(total, b->sum);
}

/* Values that lie on the middle between two steps go to the even one: with 127 the largest, x is
   its own step. */
static void check_ties(const kvc__kernels *k) {
    static const float x[32] = {
        127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 125.5f, 126.5f, -126.5f
    };
    static const int8_t want[10] = {127, 0, 2, 2, 0, -2, -2, 126, 126, -126};
    q8 b;
    quantize(k, x, 32, 0, 1, &b);
    assert_true(b.d >= 1.0f && b.d <= 1.0f);
    assert_memory_equal(b.q, want, 10);
}

/* No number is a finite one here: NaN must stay visible, tiny blocks become zero. */
static void check_odd_blocks(const kvc__kernels *k) {
    static const float values[] = {INFINITY, -INFINITY, NAN, 1e-31f, 0.0f, 1e-40f, -0.0f, 1e38f};
    size_t i;
    for (i = 0; i < COUNT(values); i++) {
        float x[32];
        q8 b;
        int32_t j, at;
        for (at = 0; at < 32; at += 9) {
            for (j = 0; j < 32; j++) x[j] = i < 3 ? (float)j : 0.0f;
            x[at] = values[i];
            quantize(k, x, 32, 0, 1, &b);
            if (i < 3) assert_true(isnan(b.d));
            else if (i == 7) assert_true(b.d > 7e35f && b.q[at] == 127);
            else assert_true(b.d >= 0.0f && b.d <= 0.0f && b.sum == 0);
        }
    }
}

static void test_quantize(void **state) {
    const kvc__kernels *k[5];
    size_t n_tables = tables(k), t;
    uint64_t random = 4;
    uint32_t round;
    (void)state;
    for (t = 0; t < n_tables; t++) {
        check_ties(k[t]);
        check_odd_blocks(k[t]);
    }
    for (round = 0; round < 2000; round++) {
        float x[96];
        q8 want[3], got[3];
        int b;
        fill(x, 96, ldexpf(1.0f, (int)(round % 200) - 90), &random);
        quantize(k[0], x, 96, 0, 1, want);
        for (b = 0; b < 3; b++) check_block(x + 32 * b, &want[b]);
        for (t = 0; t < n_tables; t++) {
            quantize(k[t], x, 96, round % KVC__Q8_ROWS, KVC__Q8_ROWS, got);
            assert_memory_equal(got, want, sizeof got);
            quantize(k[t], x, 96, 0, 1, got);
            assert_memory_equal(got, want, sizeof got);
        }
    }
}

/* ---- formats ---- */

static void test_decode(void **state) {
    size_t t, i, n;
    uint64_t random = 5;
    (void)state;
    for (t = 0; t < COUNT(types); t++) {
        for (n = types[t].multiple; n < 200; n += types[t].multiple) {
            float *x = new_floats(n), *y = new_floats(n);
            size_t size = gguf_row_size((int)types[t].type, n);
            unsigned char *row = (unsigned char *)gguf_must(malloc(size));
            naive_tensor tensor = {0, 0, 0, NULL};
            fill(x, n, 2.0f, &random);
            gguf_to_type((int)types[t].type, x, n, row);
            kvc__decode_row(y, row, types[t].type, n);
            tensor.type = types[t].type;
            tensor.n_in = n;
            tensor.data = row;
            for (i = 0; i < n; i++)     /* a product of 11 by 8 bits is exact */
                assert_true(fabs((double)y[i] - naive_element(&tensor, 0, i)) <= 0);
            free(x);
            free(y);
            free(row);
        }
    }
}

/* Sizes of the storage formats, from the layouts of their blocks. */
static void test_types(void **state) {
    static const struct {
        uint32_t type, block, size;
        const char *name;
    } rows[] = {
        {0, 1, 4, "F32"}, {1, 1, 2, "F16"}, {2, 32, 2 + 16, "Q4_0"}, {3, 32, 4 + 16, "Q4_1"},
        {6, 32, 2 + 4 + 16, "Q5_0"}, {7, 32, 4 + 4 + 16, "Q5_1"}, {8, 32, 2 + 32, "Q8_0"},
        {10, 256, 16 + 64 + 4, "Q2_K"}, {11, 256, 32 + 64 + 12 + 2, "Q3_K"},
        {12, 256, 4 + 12 + 128, "Q4_K"}, {13, 256, 4 + 12 + 32 + 128, "Q5_K"},
        {14, 256, 128 + 64 + 16 + 2, "Q6_K"}, {24, 1, 1, "I8"}, {25, 1, 2, "I16"},
        {26, 1, 4, "I32"}, {27, 1, 8, "I64"}, {28, 1, 8, "F64"}, {30, 1, 2, "BF16"},
        {39, 32, 1 + 16, "MXFP4"}
    };
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        const kvc__type_info *t = kvc__type(rows[i].type);
        assert_non_null(t);
        assert_int_equal(t->block, rows[i].block);
        assert_int_equal(t->block_size, rows[i].size);
        assert_string_equal(t->name, rows[i].name);
    }
    assert_null(kvc__type(4));
    assert_null(kvc__type(5));
    assert_null(kvc__type(1000));
    assert_null(kvc__type(UINT32_MAX));
}

/* ---- choosing ---- */

static void test_pick(void **state) {
    const kvc__kernels *best = kvc__kernels_pick(KVC_ISA_BEST);
    const kvc__kernels *k[5];
    size_t n = tables(k), i;
    int cap;
    (void)state;
    assert_ptr_equal(best, k[n - 1]);
    for (i = 0; i < n; i++) print_message("%s\n", k[i]->name);
    for (cap = KVC_ISA_BASE; cap <= KVC_ISA_AVX512_VNNI; cap++) {
        const kvc__kernels *got = kvc__kernels_pick((kvc_isa)cap);
        assert_true(got->isa <= (kvc_isa)cap);
        for (i = 0; i < n; i++) if (k[i]->isa <= (kvc_isa)cap) best = k[i];
        assert_ptr_equal(got, best);
        assert_non_null(kvc__mm_pick(got, KVC__F32, 0));
        assert_null(kvc__mm_pick(got, 99, 0));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_large_products),
        cmocka_unit_test(test_few_rows),
        cmocka_unit_test(test_to_lanes),
        cmocka_unit_test(test_to_f16),
        cmocka_unit_test(test_to_blocks),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_varied_attention),
        cmocka_unit_test(test_rms_norm),
        cmocka_unit_test(test_layer_norm),
        cmocka_unit_test(test_activate),
        cmocka_unit_test(test_erf),
        cmocka_unit_test(test_accumulate),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_quantize),
        cmocka_unit_test(test_decode),
        cmocka_unit_test(test_types),
        cmocka_unit_test(test_pick)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
