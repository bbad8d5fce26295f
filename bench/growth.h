/* growth.h: how the time of a token grows with the positions it sees, for prefill and decode, with
   the line that fits best. Its slope is what attention costs for each position. */
#ifndef GROWTH_H
#define GROWTH_H

enum { MAX_POINTS = 1024 };

/* Times of a token at one length. */
typedef struct point {
    uint32_t past;              /* positions held */
    double seen;                /* positions that a token sees, on average over those timed */
    double least;               /* seconds a token takes at the machine's limit */
    samples times;              /* seconds of a token */
} point;

typedef struct line {
    double start, slope;        /* seconds; seconds for each position */
} line;

typedef struct growth {
    int decode, n;
    point at[MAX_POINTS];
    line fit, least;
} growth;

/* Least squares through (seen, y), y being the median time or the machine's limit. */
static line fit_line(growth *g, int limits)
{
    double n = g->n, x = 0, y = 0, xx = 0, xy = 0;
    line l;
    for (int i = 0; i < g->n; i++) {
        double u = g->at[i].seen, v = limits ? g->at[i].least : median(&g->at[i].times);
        x += u;
        y += v;
        xx += u * u;
        xy += u * v;
    }
    l.slope = (n * xy - x * y) / (n * xx - x * x);
    l.start = (y - l.slope * x) / n;
    return l;
}

/* One walk to the longest context: at each step the decode, then the prefill that leads to the
   next. */
static void walk(bench *b, kvc_ctx *ctx, growth *prefill, growth *decode)
{
    uint32_t step = b->o->growth_step, n = b->o->tokens;
    kvc_error err;
    need(kvc_seq_rollback(b->past, 0), &err);
    for (int i = 0; i < decode->n; i++) {
        uint32_t past = decode->at[i].past;
        double start;
        sample_add(&decode->at[i].times, run_decode(b, ctx, past, n) / n);
        start = now();
        need(kvc_prefill(ctx, b->past, b->tokens + past, step, NULL, &err), &err);
        sample_add(&prefill->at[i].times, (now() - start) / step);
    }
}

static void set_points(const bench *b, growth *g)
{
    double n = g->decode ? b->o->tokens : b->o->growth_step;
    for (g->n = 0; g->n < MAX_POINTS; g->n++) {
        point *p = &g->at[g->n];
        uint32_t past = (uint32_t)g->n * b->o->growth_step;
        if (past > b->o->growth) return;
        memset(p, 0, sizeof *p);
        p->past = past;
        p->seen = past + (g->decode ? 1 : 0) + (n + 1) / 2;
    }
}

static const char growth_header[] = "model,type,kv,weights,engine,isa,threads,phase,context,seen,"
    "turns,us_per_token,fit_us,limit_us,fit_start_us,fit_slope_ns,limit_slope_ns";

static void print_growth(bench *b, growth *g, kvc_ctx *ctx)
{
    const options *o = b->o;
    const subject *s = b->subject;
    const char *phase = g->decode ? "decode" : "prefill";
    kvc_ctx_info info;
    bounds l;
    kvc_ctx_query(ctx, &info);
    l = bounds_of(b, &info);
    for (int i = 0; i < g->n; i++) {
        work w = work_of(s, 1, g->at[i].seen - 1);
        w.f32 -= g->decode ? 0 : s->head.f32;       /* the prefills ask for no logits */
        w.int8 -= g->decode ? 0 : s->head.int8;
        g->at[i].least = least_time(&l, &w, g->decode);
    }
    g->fit = fit_line(g, 0);
    g->least = fit_line(g, 1);
    for (int i = 0; i < g->n; i++) {
        point *p = &g->at[i];
        csv(o, "%s,%s,%s,%s,%s,%s,%u,%s,", s->name, s->type, s->kv, s->weights, engine_name(&info),
            info.isa_name, (unsigned)info.desc.n_threads, phase);
        csv(o, "%u,%.1f,%d,%.3f,%.3f,%.3f,%.3f,%.4f,%.4f\n", (unsigned)p->past, p->seen,
            p->times.n, median(&p->times) * 1e6, (g->fit.start + g->fit.slope * p->seen) * 1e6,
            p->least * 1e6, g->fit.start * 1e6, g->fit.slope * 1e9, g->least.slope * 1e9);
    }
    if (!o->table) return;
    printf("%s %s: a token takes %.1f us and %.2f ns for each position it sees"
        " (at the limit %.1f us and %.2f ns)\n", s->name, phase, g->fit.start * 1e6,
        g->fit.slope * 1e9, g->least.start * 1e6, g->least.slope * 1e9);
}

/* The best set, the built-in engine, the largest number of threads. */
static void bench_growth(const options *o, const machine *m, subject *s)
{
    static bench b;
    static growth prefill, decode;
    kvc_ctx *ctx;
    uint32_t longest = o->growth + (o->growth_step > o->tokens ? o->growth_step : o->tokens + 1);
    bench_start(&b, o, m, s);
    decode.decode = 1;
    set_points(&b, &prefill);
    set_points(&b, &decode);
    open_cache(&b, longest, o->tokens + 1);
    ctx = new_context(&b, KVC_ISA_BEST, largest(&o->threads), KVC_GEMM_BUILTIN);
    for (int turn = 0; turn < o->turns; turn++) {
        measure_limits(&b);
        walk(&b, ctx, &prefill, &decode);
    }
    print_growth(&b, &prefill, ctx);
    print_growth(&b, &decode, ctx);
    kvc_ctx_free(ctx);
    close_cache(&b);
}

#endif
