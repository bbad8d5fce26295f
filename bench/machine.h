/* machine.h: what the machine can do at most, with the threads and instruction set of a measurement

       machine_open(&m, 1 << 30);                        bytes of the buffer that is read
       machine_measure(&m, MACHINE_READ_1, "avx2", 2)    bytes per second from memory
       machine_measure(&m, MACHINE_F32, "avx2", 2)       additions and multiplications per second
       machine_close(&m);

   Instruction sets go by the names that kvc_ctx_info gives. A peak is 0 for a set without a loop
   here (base). A measurement takes some hundredths of a second, so that it can be repeated between
   others. kvc.h and its implementation come first.

   The loops of peaks hold the operations that are counted and nothing else. Sums go into enough
   independent registers to hide the latency of one. HOLD tells the compiler that a register is used
   and may have changed, so that it can neither move an operation out of the loop, nor merge two,
   nor leave one out. */
#ifndef MACHINE_H
#define MACHINE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum machine_kind {
    MACHINE_READ_1,     /* memory: each thread reads one stream */
    MACHINE_READ_4,     /* each thread reads four streams in turn, which is faster where a processor
                           fetches ahead only within a page of memory */
    MACHINE_READ_ASK,   /* the same, and asks for what follows */
    MACHINE_F32,        /* fused multiply-adds of floats, counted as two */
    MACHINE_INT8,       /* products of 8-bit numbers added up in 32 bits, counted as two */
    MACHINE_N_KINDS
} machine_kind;

typedef struct machine {
    unsigned char *block, *data;        /* data: block, aligned */
    size_t size;
} machine;

/* One thread's part of a measurement. */
typedef struct machine_share {
    void (*fn)(struct machine_share *s);
    kvc__atomic *n_ready;               /* threads that have come to the start */
    uint32_t n_threads;
    const unsigned char *data;          /* of a read: n_streams parts, one behind the other */
    size_t part_size, n_streams;
    size_t ahead;                       /* bytes that a read asks ahead, 0: it does not */
    size_t reps;                        /* of a peak */
    double start, end;
} machine_share;

enum { MACHINE_THREADS = 256, MACHINE_CHUNK = 512, MACHINE_ALIGN = 4096, MACHINE_REPS = 4000000,
    MACHINE_AHEAD = 1536 };

static double now(void)     /* seconds */
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- loops ---- */

/* 12 sums fit a file of 16 registers with their operands, 24 a file of 32. */
#define MACHINE_12(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define MACHINE_24(X) MACHINE_12(X) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) \
    X(22) X(23)
#define MACHINE_ZERO(k) a##k = z,
#define MACHINE_HOLD(k) HOLD(a##k);

/* Defines a function that does `step` with each sum of `list`, again and again. x and y are the
   operands. */
#define MACHINE_PEAK(name, target, vector, list, step) \
    target static void name(machine_share *s) \
    { \
        vector z = {0}, list(MACHINE_ZERO) x, y; \
        memset(&x, 0x3d, sizeof x); \
        y = x; \
        list(MACHINE_HOLD) \
        for (size_t i = 0; i < s->reps; i++) { \
            list(step) \
        } \
        list(MACHINE_HOLD) \
    }

/* Defines a function that reads a chunk of each stream in turn. */
#define MACHINE_READ(name, target, vector) \
    target static void name(machine_share *s) \
    { \
        vector a = {0}, b = a, c = a, d = a; \
        for (size_t at = 0; at < s->part_size; at += MACHINE_CHUNK) { \
            for (size_t k = 0; k < s->n_streams; k++) { \
                const void *chunk = s->data + k * s->part_size + at; \
                const vector *p = (const vector *)chunk; \
                for (size_t i = 0; s->ahead != 0 && i < MACHINE_CHUNK; i += 64) \
                    __builtin_prefetch((const char *)chunk + s->ahead + i); \
                for (size_t i = 0; i < MACHINE_CHUNK / sizeof a; i += 4) { \
                    a ^= p[i]; \
                    b ^= p[i + 1]; \
                    c ^= p[i + 2]; \
                    d ^= p[i + 3]; \
                } \
            } \
        } \
        a ^= b ^ c ^ d; \
        { \
            vector result = a; \
            __asm__ __volatile__("" : : "m"(result)); \
        } \
    }

typedef uint64_t machine_word;
MACHINE_READ(machine_read_base, , machine_word)

#if KVC__SIMD_X86
#define MACHINE_AVX2 __attribute__((target("avx2,fma")))
#define MACHINE_AVX512 __attribute__((target("avx512f,avx512bw")))
#define MACHINE_VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))
#define HOLD(v) __asm__ __volatile__("" : "+v"(v))

#define MACHINE_STEP(k) a##k = _mm256_fmadd_ps(x, y, a##k);
MACHINE_PEAK(machine_f32_avx2, MACHINE_AVX2, __m256, MACHINE_12, MACHINE_STEP)
#undef MACHINE_STEP

/* Unsigned times signed in pairs to 16 bits, in pairs to 32 bits, added. */
#define MACHINE_STEP(k) HOLD(x); a##k = _mm256_add_epi32(a##k, \
    _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1)));
MACHINE_PEAK(machine_int8_avx2, MACHINE_AVX2, __m256i, MACHINE_12, MACHINE_STEP)
#undef MACHINE_STEP
MACHINE_READ(machine_read_avx2, MACHINE_AVX2, __m256i)

#define MACHINE_STEP(k) a##k = _mm512_fmadd_ps(x, y, a##k);
MACHINE_PEAK(machine_f32_avx512, MACHINE_AVX512, __m512, MACHINE_24, MACHINE_STEP)
#undef MACHINE_STEP

#define MACHINE_STEP(k) HOLD(x); a##k = _mm512_add_epi32(a##k, \
    _mm512_madd_epi16(_mm512_maddubs_epi16(x, y), _mm512_set1_epi16(1)));
MACHINE_PEAK(machine_int8_avx512, MACHINE_AVX512, __m512i, MACHINE_24, MACHINE_STEP)
#undef MACHINE_STEP
MACHINE_READ(machine_read_avx512, MACHINE_AVX512, __m512i)

#define MACHINE_STEP(k) a##k = _mm512_dpbusd_epi32(a##k, x, y);
MACHINE_PEAK(machine_int8_vnni, MACHINE_VNNI, __m512i, MACHINE_24, MACHINE_STEP)
#undef MACHINE_STEP
#endif

#if KVC__SIMD_NEON
#define HOLD(v) __asm__ __volatile__("" : "+w"(v))

#define MACHINE_STEP(k) a##k = vfmaq_f32(a##k, x, y);
MACHINE_PEAK(machine_f32_neon, , float32x4_t, MACHINE_24, MACHINE_STEP)
#undef MACHINE_STEP

#if defined(__ARM_FEATURE_DOTPROD)
#define MACHINE_STEP(k) a##k = vdotq_s32(a##k, vreinterpretq_s8_s32(x), vreinterpretq_s8_s32(y));
#else   /* products of both halves to 16 bits, in pairs to 32 bits */
#define MACHINE_S8(v) vreinterpretq_s8_s32(v)
#define MACHINE_STEP(k) HOLD(x); a##k = vpadalq_s16(a##k, vmlal_high_s8( \
    vmull_s8(vget_low_s8(MACHINE_S8(x)), vget_low_s8(MACHINE_S8(y))), MACHINE_S8(x), \
    MACHINE_S8(y)));
#endif
MACHINE_PEAK(machine_int8_neon, , int32x4_t, MACHINE_24, MACHINE_STEP)
#undef MACHINE_STEP
MACHINE_READ(machine_read_neon, , uint8x16_t)
#endif

/* ---- instruction sets ---- */

typedef struct machine_isa {
    const char *name;
    void (*read)(machine_share *s);
    void (*f32)(machine_share *s);
    void (*int8)(machine_share *s);
    int n_f32, n_int8;          /* multiply-adds of one round of a loop */
} machine_isa;

static const machine_isa machine_isas[] = {
#if KVC__SIMD_X86
    {"avx2", machine_read_avx2, machine_f32_avx2, machine_int8_avx2, 12 * 8, 12 * 32},
    {"avx512", machine_read_avx512, machine_f32_avx512, machine_int8_avx512, 24 * 16, 24 * 64},
    {"avx512vnni", machine_read_avx512, machine_f32_avx512, machine_int8_vnni, 24 * 16, 24 * 64},
#endif
#if KVC__SIMD_NEON
    {"neon", machine_read_neon, machine_f32_neon, machine_int8_neon, 24 * 4, 24 * 16},
#endif
    {"base", machine_read_base, NULL, NULL, 0, 0}
};

static const machine_isa *machine_find(const char *name)
{
    const machine_isa *isa = machine_isas;
    while (strcmp(isa->name, name) != 0 && strcmp(isa->name, "base") != 0) isa++;
    return isa;
}

/* ---- measuring ---- */

static kvc__thread_result KVC__THREAD_CALL machine_thread(void *arg)
{
    machine_share *s = (machine_share *)arg;
    kvc__atomic_add(s->n_ready, 1);
    while (kvc__atomic_load(s->n_ready) < s->n_threads) kvc__thread_yield();
    s->start = now();
    s->fn(s);
    s->end = now();
    return 0;
}

/* Seconds from the first start to the last end of all shares, each on a thread of its own. */
static double machine_run(machine_share *shares, uint32_t n)
{
    static kvc__atomic n_ready;
    kvc__thread threads[MACHINE_THREADS];
    double start, end;
    kvc__atomic_store(&n_ready, 0);
    for (uint32_t i = 0; i < n; i++) {
        shares[i].n_ready = &n_ready;
        shares[i].n_threads = n;
        if (i > 0 && !kvc__thread_start(&threads[i], machine_thread, &shares[i])) {
            fprintf(stderr, "bench: no thread can be made\n");
            exit(2);
        }
    }
    machine_thread(&shares[0]);
    start = shares[0].start;
    end = shares[0].end;
    for (uint32_t i = 1; i < n; i++) {
        kvc__thread_join(threads[i]);
        if (shares[i].start < start) start = shares[i].start;
        if (shares[i].end > end) end = shares[i].end;
    }
    return end - start;
}

/* Bytes or operations per second; 0 if the set has no such loop. */
static double machine_measure(const machine *m, machine_kind kind, const char *isa_name,
    uint32_t threads)
{
    static machine_share shares[MACHINE_THREADS];
    const machine_isa *isa = machine_find(isa_name);
    double work = 0.0;
    memset(shares, 0, sizeof shares);
    for (uint32_t i = 0; i < threads; i++) {
        machine_share *s = &shares[i];
        s->fn = kind == MACHINE_F32 ? isa->f32 : kind == MACHINE_INT8 ? isa->int8 : isa->read;
        if (!s->fn) return 0.0;
        s->reps = MACHINE_REPS;
        s->n_streams = kind == MACHINE_READ_1 ? 1 : 4;
        s->ahead = kind == MACHINE_READ_ASK ? MACHINE_AHEAD : 0;
        s->part_size = m->size / threads / s->n_streams / MACHINE_ALIGN * MACHINE_ALIGN;
        s->data = m->data + i * s->part_size * s->n_streams;
        if (kind == MACHINE_F32) work += 2.0 * isa->n_f32 * MACHINE_REPS;
        else if (kind == MACHINE_INT8) work += 2.0 * isa->n_int8 * MACHINE_REPS;
        else work += (double)(s->part_size * s->n_streams);
    }
    return work / machine_run(shares, threads);
}

static void machine_open(machine *m, size_t size)
{
    m->size = size;
    m->block = (unsigned char *)malloc(size + MACHINE_ALIGN);
    if (!m->block) {
        fprintf(stderr, "bench: no memory for a buffer of %zu bytes\n", size);
        exit(2);
    }
    m->data = m->block + (MACHINE_ALIGN - (uintptr_t)m->block % MACHINE_ALIGN) % MACHINE_ALIGN;
    memset(m->data, 1, size);       /* so that each page has memory of its own */
}

static void machine_close(machine *m)
{
    free(m->block);
}

#endif
