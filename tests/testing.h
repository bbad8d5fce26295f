/* testing.h - what the tests share: an allocator that counts, short forms for making the objects,
   comparisons by bits. Include it after kvc.h. A program that
   defines TESTING_ALONE does without cmocka: there a failed check ends it. */
#ifndef TESTING_H
#define TESTING_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gguf_write.h"

#ifdef TESTING_ALONE
#define print_error(...) fprintf(stderr, __VA_ARGS__)
static inline void check_failed(const char *file, int line) {
    fprintf(stderr, "%s:%d: a check failed\n", file, line);
    exit(1);
}
#else
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#define check_failed(file, line) _fail(file, line)
#endif

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- results ---- */

static kvc_error last;          /* every call of a test reports here */

static inline void check_ok(kvc_result result, const char *call, const char *file, int line) {
    if (result == KVC_OK) return;
    print_error("%s\n%s: %s: %s\n", call, kvc_result_text(result), last.where, last.message);
    check_failed(file, line);
}

/* The call must fail with this code, and err.where must be the given text, if it is not NULL. */
static inline void check_fails(kvc_result result, kvc_result code, const char *where,
    const char *call, const char *file, int line) {
    int named = !where || (result == code && !strcmp(last.where, where));
    if (result == code && named && last.code == code && last.message[0]) return;
    print_error("%s\ngave %d %s: \"%s\": %s\nnot %d %s: \"%s\"\n", call, result,
        kvc_result_text(result), last.where, last.message, code, kvc_result_text(code),
        where ? where : "(any)");
    check_failed(file, line);
}

#define OK(call) \
    (memset(&last, 0, sizeof last), check_ok(call, #call, __FILE__, __LINE__))
#define FAILS(code, where, call) \
    (memset(&last, 0, sizeof last), check_fails(call, code, where, #call, __FILE__, __LINE__))

/* ---- an allocator that counts ---- */

typedef struct counter {
    size_t n_allocs, n_frees;   /* calls */
    size_t bytes, peak;         /* handed out now, and at most */
    size_t limit;               /* bytes it may hand out, 0: any number */
    size_t fail_at;             /* the call that gets no memory, counted from 1; 0: none */
    size_t n_refused;           /* calls that asked for more than the limit */
    size_t n_faults;            /* frees that fit no alloc, alignments that are not allowed */
    struct {
        void *ptr;
        size_t size;
    } block[256];
} counter;

/* Memory is filled, so that nothing can rely on finding zeros, and has exactly the size asked for,
   so that a sanitizer sees every step past its end. */
static inline void *counter_alloc(size_t size, size_t align, void *user) {
    counter *c = (counter *)user;
    void *p = NULL;
    size_t i = 0;
    c->n_allocs++;
    if (!align || (align & (align - 1)) || align > 64) c->n_faults++;
    if (c->n_allocs == c->fail_at) return NULL;
    if (c->limit && (size > c->limit || c->bytes > c->limit - size)) {
        c->n_refused++;
        return NULL;
    }
    while (i < COUNT(c->block) && c->block[i].ptr) i++;
    if (i == COUNT(c->block)) return NULL;
    if (posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, size)) return NULL;
    memset(p, 0xa5, size);
    c->block[i].ptr = p;
    c->block[i].size = size;
    c->bytes += size;
    if (c->bytes > c->peak) c->peak = c->bytes;
    return p;
}

static inline void counter_free(void *p, size_t size, void *user) {
    counter *c = (counter *)user;
    size_t i;
    c->n_frees++;
    for (i = 0; i < COUNT(c->block); i++) {
        if (c->block[i].ptr != p || !p) continue;
        if (c->block[i].size != size) c->n_faults++;
        c->bytes -= c->block[i].size;
        c->block[i].ptr = NULL;
        memset(p, 0x5a, c->block[i].size);
        free(p);
        return;
    }
    c->n_faults++;
}

static inline kvc_allocator counter_hook(counter *c) {
    kvc_allocator a;
    a.alloc = counter_alloc;
    a.free = counter_free;
    a.user = c;
    return a;
}

/* Everything must have been given back, in the right sizes. */
static inline void check_clean(const counter *c, const char *file, int line) {
    if (!c->bytes && !c->n_faults) return;
    print_error("%lu bytes not given back, %lu wrong calls of the allocator\n",
        (unsigned long)c->bytes, (unsigned long)c->n_faults);
    check_failed(file, line);
}

#define CLEAN(c) check_clean(c, __FILE__, __LINE__)

/* ---- objects ---- */

/* A random model, opened: the usual start of a test. */
typedef struct rig {
    counter mem;
    void *image;
    size_t image_size;
    kvc_model *model;
    kvc_model_info info;
} rig;

static inline void rig_open(rig *r, const model_shape *shape) {
    kvc_model_desc desc = {0};
    memset(r, 0, sizeof *r);
    r->image = model_build(shape, &r->image_size);
    desc.data = r->image;
    desc.data_size = r->image_size;
    desc.allocator = counter_hook(&r->mem);
    OK(kvc_model_open(&r->model, &desc, &last));
    kvc_model_query(r->model, &r->info);
}

/* Every object of the model must be freed before. */
static inline void rig_close(rig *r) {
    kvc_model_close(r->model);
    CLEAN(&r->mem);
    free(r->image);
}

static inline kvc_ctx *new_ctx(const rig *r, uint32_t n_batch, uint32_t n_threads, kvc_isa isa) {
    kvc_ctx_desc desc = {0};
    kvc_ctx *ctx;
    desc.model = r->model;
    desc.n_batch = n_batch;
    desc.n_threads = n_threads;
    desc.isa = isa;
    OK(kvc_ctx_new(&ctx, &desc, &last));
    return ctx;
}

static inline kvc_cache *new_cache(const rig *r, uint32_t n_ctx, uint32_t n_seqs,
    uint32_t page_size, kvc_kv_type type) {
    kvc_cache_desc desc = {0};
    kvc_cache *cache;
    desc.model = r->model;
    desc.n_ctx = n_ctx;
    desc.n_seqs = n_seqs;
    desc.page_size = page_size;
    desc.n_back = n_ctx;            /* a test may go back anywhere */
    desc.type_k = type;
    desc.type_v = type;
    OK(kvc_cache_new(&cache, &desc, &last));
    return cache;
}

static inline kvc_seq *new_seq(kvc_cache *cache) {
    kvc_seq *seq;
    OK(kvc_seq_open(&seq, cache, &last));
    return seq;
}

/* The instruction sets this machine runs, base first; returns their number. */
static inline size_t isas_here(const rig *r, kvc_isa out[5], const char *names[5]) {
    int cap;
    size_t n = 0;
    for (cap = KVC_ISA_BASE; cap <= KVC_ISA_AVX512_VNNI; cap++) {
        kvc_ctx *ctx = new_ctx(r, 16, 1, (kvc_isa)cap);
        kvc_ctx_info info;
        kvc_ctx_query(ctx, &info);
        kvc_ctx_free(ctx);
        if (info.desc.isa != (kvc_isa)cap) continue;
        names[n] = info.isa_name;
        out[n++] = (kvc_isa)cap;
    }
    return n;
}

/* ---- files ---- */

/* What was written through file_write, a kvc_write_fn; the caller frees the bytes. */
typedef struct bytes_out {
    unsigned char *bytes;
    size_t size, cap;
} bytes_out;

static inline int file_write(const void *data, size_t size, void *user) {
    bytes_out *f = (bytes_out *)user;
    if (f->size + size > f->cap) {
        f->cap = 2 * (f->size + size);
        f->bytes = (unsigned char *)gguf_must(realloc(f->bytes, f->cap));
    }
    memcpy(f->bytes + f->size, data, size);
    f->size += size;
    return 0;
}

/* ---- tokens and bits ---- */

static inline void random_tokens(kvc_token *out, size_t n, uint32_t n_vocab, uint64_t seed) {
    uint64_t state = seed;
    size_t i;
    for (i = 0; i < n; i++) out[i] = (kvc_token)(model_random(&state) % n_vocab);
}

static inline uint64_t hash_floats(const float *x, size_t n, uint64_t seed) {
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], 4);
        seed = model_mix(seed ^ bits) + 1;
    }
    return seed;
}

/* The logits of all n positions of a text, computed cold: a new cache, one context, one prefill.
   The caller frees them. */
static inline float *cold_run(const rig *r, const kvc_token *tokens, size_t n, kvc_kv_type type) {
    kvc_cache *cache = new_cache(r, (uint32_t)n, 1, 0, type);
    kvc_ctx *ctx = new_ctx(r, 0, 1, KVC_ISA_BEST);
    kvc_seq *seq = new_seq(cache);
    size_t *rows = (size_t *)gguf_must(malloc(n * sizeof *rows)), i;
    float *logits = (float *)gguf_must(malloc(n * r->info.n_vocab * sizeof *logits));
    for (i = 0; i < n; i++) rows[i] = i;
    OK(kvc_prefill_rows(ctx, seq, tokens, n, rows, n, logits, &last));
    free(rows);
    kvc_seq_close(seq);
    kvc_ctx_free(ctx);
    kvc_cache_free(cache);
    return logits;
}

/* Rows [n_rows, n_vocab] must be equal bit for bit; `what` tells which run it was. */
static inline void check_same(const float *got, const float *want, size_t n_rows, size_t n_vocab,
    const char *what, const char *file, int line) {
    size_t i;
    if (!memcmp(got, want, n_rows * n_vocab * sizeof *got)) return;
    for (i = 0; i < n_rows * n_vocab; i++) {
        if (!memcmp(&got[i], &want[i], sizeof *got)) continue;
        print_error("%s: row %u, token %u: %.9g is not %.9g\n", what, (unsigned)(i / n_vocab),
            (unsigned)(i % n_vocab), (double)got[i], (double)want[i]);
        check_failed(file, line);
    }
}

#define SAME(got, want, n_rows, n_vocab, what) \
    check_same(got, want, n_rows, n_vocab, what, __FILE__, __LINE__)

#endif
