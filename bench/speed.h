/* speed.h: prefill and decode of one model in all variants of engine, instruction set and threads,
   in turn with what the machine can do at that time. */
#ifndef SPEED_H
#define SPEED_H

enum { MAX_VARIANTS = 512, MAX_LIMITS = 64 };

typedef struct variant {
    kvc_ctx *ctx;
    kvc_ctx_info info;
    int decode;
    uint32_t tokens, past;      /* computed in a turn; held before */
    samples times;              /* seconds */
} variant;

typedef struct limit {
    machine_kind kind;
    const char *isa;
    uint32_t threads;
    samples values;             /* bytes or operations per second */
} limit;

typedef struct bench {
    const options *o;
    const machine *machine;
    subject *subject;
    variant v[MAX_VARIANTS];
    limit limits[MAX_LIMITS];
    int n, n_limits;
    kvc_isa best;               /* the best set of this machine, which reads memory too */
    const char *best_name;
    kvc_cache *cache;
    kvc_seq *past;              /* the longest context; turns fork it */
    kvc_token *tokens;          /* random ones, enough for any turn */
} bench;

/* ---- limits ---- */

static void add_limit(bench *b, machine_kind kind, const char *isa, uint32_t threads)
{
    limit l = {kind, isa, threads, {0}};
    if (b->n_limits < MAX_LIMITS) b->limits[b->n_limits++] = l;
}

/* The buffer has lain idle; an untimed pass brings back what the system took from it. */
static void measure_limits(bench *b)
{
    machine_measure(b->machine, MACHINE_READ_4, b->best_name, largest(&b->o->threads));
    for (int i = 0; i < b->n_limits; i++) {
        limit *l = &b->limits[i];
        double value = machine_measure(b->machine, l->kind, l->isa, l->threads);
        if (value > 0) sample_add(&l->values, value);
    }
}

static double limit_of(bench *b, machine_kind kind, const char *isa, uint32_t threads)
{
    for (int i = 0; i < b->n_limits; i++) {
        limit *l = &b->limits[i];
        if (l->kind == kind && l->threads == threads && !strcmp(l->isa, isa)) {
            return median(&l->values);
        }
    }
    return 0.0;
}

/* What bounds a context: memory as fast as the fastest way of reading it, peaks of its set, or of
   the best set for cblas, which chooses its own. */
typedef struct bounds {
    double read, f32, int8;
} bounds;

static bounds bounds_of(bench *b, const kvc_ctx_info *info)
{
    uint32_t t = info->desc.n_threads;
    const char *isa = info->desc.gemm == KVC_GEMM_CBLAS ? b->best_name : info->isa_name;
    bounds l = {0.0, limit_of(b, MACHINE_F32, isa, t), limit_of(b, MACHINE_INT8, isa, t)};
    for (int kind = MACHINE_READ_1; kind <= MACHINE_READ_ASK; kind++) {
        double read = limit_of(b, (machine_kind)kind, b->best_name, t);
        if (read > l.read) l.read = read;
    }
    return l;
}

/* The least seconds that the work can take: a decode is bound by memory, a prefill by arithmetic.
   0 if that is not known. */
static double least_time(const bounds *l, const work *w, int decode)
{
    if (decode) return l->read > 0 ? w->bytes / l->read : 0.0;
    if (l->f32 <= 0 || (l->int8 <= 0 && w->int8 > 0)) return 0.0;
    return w->f32 / l->f32 + (w->int8 > 0 ? w->int8 / l->int8 : 0.0);
}

/* ---- variants ---- */

static void add_variant(bench *b, kvc_ctx *ctx, int decode, uint32_t tokens, uint32_t past)
{
    variant *v = &b->v[b->n];
    if (b->n == MAX_VARIANTS) return;
    memset(v, 0, sizeof *v);
    v->ctx = ctx;
    kvc_ctx_query(ctx, &v->info);
    v->decode = decode;
    v->tokens = tokens;
    v->past = past;
    b->n++;
}

static kvc_ctx *new_context(const bench *b, kvc_isa isa, uint32_t threads, kvc_gemm gemm)
{
    kvc_ctx_desc desc = {.model = b->subject->model, .n_threads = threads, .isa = isa,
        .n_batch = b->o->n_batch, .gemm = gemm};
    kvc_ctx *ctx;
    kvc_error err;
    need(kvc_ctx_new(&ctx, &desc, &err), &err);
    return ctx;
}

/* All phases of an engine; decodes never use cblas. */
static void add_engine(bench *b, kvc_isa isa, uint32_t threads, kvc_gemm gemm)
{
    const options *o = b->o;
    uint32_t n_decodes = gemm == KVC_GEMM_CBLAS ? 0 : o->decode.n;
    kvc_ctx *ctx;
    if (o->prefill.n + n_decodes == 0) return;
    ctx = new_context(b, isa, threads, gemm);
    for (uint32_t i = 0; i < o->prefill.n; i++) add_variant(b, ctx, 0, o->prefill.at[i], 0);
    for (uint32_t i = 0; i < n_decodes; i++) add_variant(b, ctx, 1, o->tokens, o->decode.at[i]);
}

/* The name of a set if this machine has it and the options ask for it, else NULL. */
static const char *set_name(const bench *b, kvc_isa isa)
{
    kvc_ctx *ctx = new_context(b, isa, 1, KVC_GEMM_BUILTIN);
    kvc_ctx_info info;
    kvc_ctx_query(ctx, &info);
    kvc_ctx_free(ctx);
    return info.desc.isa == isa && listed(b->o->isas, info.isa_name) ? info.isa_name : NULL;
}

static void add_set(bench *b, kvc_isa isa)
{
    const options *o = b->o;
    const char *name = set_name(b, isa);
    int floats = b->subject->layers.int8 <= 0;
    for (uint32_t i = 0; name && i < o->threads.n; i++) {
        uint32_t t = o->threads.at[i];
        if (listed(o->engines, "builtin")) add_engine(b, isa, t, KVC_GEMM_BUILTIN);
        if (KVC_USE_CBLAS && floats && listed(o->engines, "cblas")) {
            add_engine(b, isa, t, KVC_GEMM_CBLAS);
        }
        if (isa != b->best) add_limit(b, MACHINE_F32, name, t);
        if (isa != b->best) add_limit(b, MACHINE_INT8, name, t);
    }
}

static void add_best_limits(bench *b)
{
    for (uint32_t i = 0; i < b->o->threads.n; i++) {
        for (int kind = 0; kind < MACHINE_N_KINDS; kind++) {
            add_limit(b, (machine_kind)kind, b->best_name, b->o->threads.at[i]);
        }
    }
}

/* ---- one turn ---- */

static double run_prefill(const bench *b, const variant *v)
{
    const float *logits;
    double start, time;
    kvc_seq *seq;
    kvc_error err;
    need(kvc_seq_open(&seq, b->cache, &err), &err);
    start = now();
    need(kvc_prefill(v->ctx, seq, b->tokens, v->tokens, &logits, &err), &err);
    time = now() - start;
    kvc_seq_close(seq);
    return time;
}

/* The first decode, which wakes the threads, is not timed. */
static double run_decode(const bench *b, kvc_ctx *ctx, uint32_t past, uint32_t n)
{
    const float *logits;
    double start = 0.0, time;
    kvc_seq *seq;
    kvc_error err;
    need(kvc_seq_fork(&seq, b->past, &err), &err);
    need(kvc_seq_rollback(seq, past), &err);
    for (uint32_t i = 0; i <= n; i++) {
        if (i == 1) start = now();
        need(kvc_decode(ctx, seq, b->tokens[past + i], &logits, &err), &err);
    }
    time = now() - start;
    kvc_seq_close(seq);
    return time;
}

/* 1 if a turn has taken too long, or would by what a shorter prefill took. */
static int too_slow(const bench *b, const variant *v)
{
    if (v->times.n > 0) return v->times.at[0] > b->o->patience;
    for (int i = 0; i < b->n; i++) {
        const variant *u = &b->v[i];
        if (u->ctx == v->ctx && !u->decode && !v->decode && u->times.n > 0 && u->tokens < v->tokens
            && u->times.at[0] / u->tokens * v->tokens > b->o->patience) {
            return 1;
        }
    }
    return 0;
}

static void run_turns(bench *b)
{
    for (int turn = 0; turn < b->o->turns; turn++) {
        measure_limits(b);
        for (int i = 0; i < b->n; i++) {
            variant *v = &b->v[i];
            if (too_slow(b, v)) continue;
            sample_add(&v->times,
                v->decode ? run_decode(b, v->ctx, v->past, v->tokens) : run_prefill(b, v));
        }
    }
}

/* ---- the longest context ---- */

/* Makes a cache for sequences of `longest` positions, beside one of `other`, and random tokens for
   both. */
static void open_cache(bench *b, uint32_t longest, uint32_t other)
{
    uint32_t n = longest > other ? longest : other;
    kvc_cache_desc desc = {.model = b->subject->model, .n_ctx = n, .n_seqs = 2,
        .n_pages = longest / PAGE + other / PAGE + 4, .page_size = PAGE, .type_k = b->o->kv,
        .type_v = b->o->kv};
    kvc_cache_info info;
    uint64_t state = 1;
    kvc_error err;
    need(kvc_cache_new(&b->cache, &desc, &err), &err);
    kvc_cache_query(b->cache, &info);
    b->subject->kv_bytes = (double)info.bytes_per_token;
    b->tokens = (kvc_token *)gguf_must(malloc(n * sizeof *b->tokens));
    for (uint32_t i = 0; i < n; i++) {
        b->tokens[i] = (kvc_token)(model_random(&state) % b->subject->info.n_vocab);
    }
    need(kvc_seq_open(&b->past, b->cache, &err), &err);
}

/* All engines and sets that keep the numeric contract give the same bits, so the fastest fills the
   context that all of them decode at. */
static void fill_past(bench *b, uint32_t n)
{
    kvc_ctx *ctx;
    kvc_error err;
    if (n == 0) return;
    ctx = new_context(b, KVC_ISA_BEST, largest(&b->o->threads), KVC_GEMM_BUILTIN);
    need(kvc_prefill(ctx, b->past, b->tokens, n, NULL, &err), &err);
    kvc_ctx_free(ctx);
}

static void close_cache(bench *b)
{
    kvc_cache_free(b->cache);
    free(b->tokens);
}

/* ---- rows ---- */

static const char speed_header[] = "model,type,kv,weights,engine,isa,threads,phase,tokens,context,"
    "turns,median_ms,best_ms,tokens_per_s,limit_tokens_per_s,fraction,gbyte,gflop,gop_int8,"
    "read_gb_s,f32_gflop_s,int8_gop_s";

/* What a turn works; the untimed first decode is not counted. */
static work work_of_variant(const bench *b, const variant *v)
{
    work sum = {0, 0, 0};
    if (!v->decode) return work_of(b->subject, v->tokens, v->past);
    for (uint32_t i = 1; i <= v->tokens; i++) {
        work w = work_of(b->subject, 1, v->past + i);
        sum.bytes += w.bytes;
        sum.f32 += w.f32;
        sum.int8 += w.int8;
    }
    return sum;
}

static const char *engine_name(const kvc_ctx_info *info)
{
    return info->desc.gemm == KVC_GEMM_CBLAS ? "cblas" : "builtin";
}

static void print_row(bench *b, variant *v)
{
    const options *o = b->o;
    const subject *s = b->subject;
    const char *phase = v->decode ? "decode" : "prefill";
    bounds l = bounds_of(b, &v->info);
    work w = work_of_variant(b, v);
    double time = median(&v->times), least = least_time(&l, &w, v->decode), n = v->tokens;
    unsigned threads = (unsigned)v->info.desc.n_threads;
    csv(o, "%s,%s,%s,%s,%s,%s,%u,%s,%u,%u,%d,%.4f,%.4f,%.3f,", s->name, s->type, s->kv, s->weights,
        engine_name(&v->info), v->info.isa_name, threads, phase, (unsigned)v->tokens,
        (unsigned)v->past, v->times.n, time * 1e3, v->times.at[0] * 1e3, n / time);
    if (least > 0) csv(o, "%.3f,%.4f,", n / least, least / time);
    else csv(o, ",,");
    csv(o, "%.6f,%.3f,%.3f,%.2f,%.1f,%.1f\n", w.bytes * 1e-9, w.f32 * 1e-9, w.int8 * 1e-9,
        l.read * 1e-9, l.f32 * 1e-9, l.int8 * 1e-9);
    if (!o->table) return;
    printf("%-8s %-11s %7u  %-7s %6u %7u %10.2f", engine_name(&v->info), v->info.isa_name, threads,
        phase, (unsigned)v->tokens, (unsigned)v->past, n / time);
    if (least > 0) printf(" %10.2f %9.3f", n / least, least / time);
    printf("\n");
}

/* A model's title, the time to open it, and the machine's limits. */
static void print_subject(bench *b)
{
    const options *o = b->o;
    subject *s = b->subject;
    double load = median(&s->load);
    csv(o, "%s,%s,%s,%s,,,%u,load,,,%d,%.4f,%.4f,,,,,,,,,\n", s->name, s->type, s->kv, s->weights,
        (unsigned)largest(&o->threads), s->load.n, load * 1e3, s->load.at[0] * 1e3);
    if (!o->table) return;
    printf("\n%s: %s, K/V %s, weights %s; opened in %.3f s\n", s->name, s->type, s->kv, s->weights,
        load);
    for (int i = 0; i < b->n_limits; i++) {
        static const char *const names[MACHINE_N_KINDS] = {
            "read, one stream", "read, four streams", "read, asking ahead", "multiply-adds f32",
            "multiply-adds int8"};
        limit *l = &b->limits[i];
        if (l->values.n == 0) continue;
        printf("  %u thread%s %-11s %-18s %8.1f %s\n", (unsigned)l->threads,
            l->threads > 1 ? "s" : " ", l->isa, names[l->kind], median(&l->values) * 1e-9,
            l->kind <= MACHINE_READ_ASK ? "GB/s" : "Gop/s");
    }
    printf("%-8s %-11s %7s  %-7s %6s %7s %10s %10s %9s\n", "engine", "isa", "threads", "phase",
        "tokens", "context", "tokens/s", "limit", "fraction");
}

/* ---- all of it ---- */

static void find_best(bench *b)
{
    kvc_ctx *ctx = new_context(b, KVC_ISA_BEST, 1, KVC_GEMM_BUILTIN);
    kvc_ctx_info info;
    kvc_ctx_query(ctx, &info);
    b->best = info.desc.isa;
    b->best_name = info.isa_name;
    kvc_ctx_free(ctx);
}

static void bench_start(bench *b, const options *o, const machine *m, subject *s)
{
    memset(b, 0, sizeof *b);
    b->o = o;
    b->machine = m;
    b->subject = s;
    find_best(b);
    add_best_limits(b);
}

static void bench_speed(const options *o, const machine *m, subject *s)
{
    static bench b;
    uint32_t past = largest(&o->decode);
    bench_start(&b, o, m, s);
    for (int isa = KVC_ISA_BASE; isa <= (int)b.best; isa++) add_set(&b, (kvc_isa)isa);
    open_cache(&b, past + o->tokens + 1, largest(&o->prefill));
    fill_past(&b, past);
    run_turns(&b);
    print_subject(&b);
    for (int i = 0; i < b.n; i++) {
        if (b.v[i].times.n > 0) print_row(&b, &b.v[i]);
    }
    for (int i = b.n - 1; i >= 0; i--) {
        if (i == 0 || b.v[i - 1].ctx != b.v[i].ctx) kvc_ctx_free(b.v[i].ctx);
    }
    close_cache(&b);
}

#endif
