/* tool.h: what the small programs of the benchmark share. TOOL is the program's name; kvc.h comes
   first. */
#ifndef TOOL_H
#define TOOL_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void need(kvc_result result, const kvc_error *err)
{
    if (result == KVC_OK) return;
    fprintf(stderr, TOOL ": %s: %s\n", err->where, err->message);
    exit(2);
}

static double now(void)     /* seconds */
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Sorts x. */
static double median(double *x, size_t n)
{
    qsort(x, n, sizeof *x, compare);
    return x[n / 2];
}

#endif
