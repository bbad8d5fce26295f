/* tool.h: what the small programs of the benchmark share. TOOL is the program's name; kvc.h comes
   first. */
#ifndef TOOL_H
#define TOOL_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static inline void fail(const char *what, const char *name)
{
    fprintf(stderr, TOOL ": %s: %s\n", name, what);
    exit(2);
}

static inline void need(kvc_result result, const kvc_error *err)
{
    if (result != KVC_OK) fail(err->message, err->where);
}

static inline double now(void)      /* seconds */
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Sorts x. */
static inline double median(double *x, size_t n)
{
    qsort(x, n, sizeof *x, compare);
    return x[n / 2];
}

/* Zeroed memory for n items. */
static inline void *get(size_t n, size_t size)
{
    void *p = calloc(n, size);
    if (!p) fail("no memory", "allocation");
    return p;
}

/* The bytes of a file with a zero behind them; the caller frees them. */
static inline char *read_file(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    char *text;
    long n = 0;
    if (!f || fseek(f, 0, SEEK_END) || (n = ftell(f)) < 0 || fseek(f, 0, SEEK_SET))
        fail("the file cannot be read", path);
    text = (char *)get((size_t)n + 1, 1);
    if (fread(text, 1, (size_t)n, f) != (size_t)n) fail("the file cannot be read", path);
    fclose(f);
    *size = (size_t)n;
    return text;
}

#endif
