/* oracle_naive - checks the oracle of the other tests, naive.h, against the golden models: its
   logits must be theirs to the digits the files hold, and so must be its greedy continuation.

   usage: oracle_naive DIR

   Every DIR/NAME.json is checked with its NAME.gguf, and so are four of DIR/quant. The last line is
   `N passed, N failed, N skipped`; files that are absent are skipped. */
#include <dirent.h>

#include "golden.h"
#include "naive.h"

#define MAX_MODELS 256

static int32_t argmax(const double *x, size_t n) {
    size_t i, best = 0;
    for (i = 1; i < n; i++) if (x[i] > x[best]) best = i;
    return (int32_t)best;
}

/* The largest difference in units of a number's seventh digit, the last that the files hold: 0.5 if
   all numbers are the same before they were rounded. */
static double largest_difference(const golden *g, const double *logits) {
    double largest = 0;
    size_t p, i;
    for (p = 0; p < g->n_positions; p++) {
        const double *row = logits + (size_t)g->positions[p] * g->n_vocab;
        for (i = 0; i < g->n_vocab; i++) {
            double want = g->logits[p * g->n_vocab + i];
            double unit = fabs(want) > 0 ? pow(10, floor(log10(fabs(want))) - 6) : 1e-12;
            double d = fabs(row[i] - want) / unit;
            if (!(d <= largest)) largest = d;
        }
    }
    return largest;
}

static size_t n_greedy_equal(const golden *g, const double *logits) {
    size_t i;
    for (i = 0; i < g->n_greedy; i++) {
        const double *row = logits + (g->n_prompt - 1 + i) * g->n_vocab;
        if (argmax(row, g->n_vocab) != g->greedy[i]) break;
    }
    return i;
}

/* All positions in one go: the prompt and the greedy tokens. Returns 1 if they agree. */
static int check_model(const golden *g, const void *image) {
    size_t n = g->n_prompt + g->n_greedy, n_equal;
    int32_t *tokens = (int32_t *)malloc(n * sizeof *tokens);
    double *logits, largest;
    naive_model m;
    naive_open(&m, image);
    m.n_ctx = 64;               /* as the README of the goldens asks for longrope */
    m.gelu_tanh = 1;            /* theirs is the tanh form, where falcon means the exact one too */
    if (!tokens || m.n_vocab != g->n_vocab) {
        printf("FAIL: another vocabulary size\n");
        free(tokens);
        return 0;
    }
    memcpy(tokens, g->prompt, g->n_prompt * sizeof *tokens);
    memcpy(tokens + g->n_prompt, g->greedy, g->n_greedy * sizeof *tokens);
    logits = naive_forward(&m, tokens, n);
    largest = largest_difference(g, logits);
    n_equal = n_greedy_equal(g, logits);
    free(logits);
    free(tokens);
    printf("%.2f  greedy %u of %u\n", largest, (unsigned)n_equal, (unsigned)g->n_greedy);
    return largest < 0.51 && n_equal == g->n_greedy;
}

static int by_name(const void *a, const void *b) {
    return strcmp((const char *)a, (const char *)b);
}

/* The names of the directory's .json files and of four formats, in order. */
static size_t list_models(const char *dir, char (*names)[64]) {
    static const char *const formats[] = {"quant/f16", "quant/bf16", "quant/q8_0", "quant/q4_0"};
    DIR *d = opendir(dir);
    struct dirent *entry;
    size_t n = 0, i;
    while (d && n < MAX_MODELS && (entry = readdir(d)) != NULL) {
        size_t size = strlen(entry->d_name);
        if (size < 6 || size >= 64 || strcmp(entry->d_name + size - 5, ".json")) continue;
        memcpy(names[n], entry->d_name, size - 5);
        names[n++][size - 5] = 0;
    }
    if (d) closedir(d);
    qsort(names, n, sizeof *names, by_name);
    for (i = 0; i < 4; i++) snprintf(names[n++], sizeof *names, "%s", formats[i]);
    return n;
}

/* 1 passed, 0 failed, -1 skipped. */
static int check_file(const char *dir, const char *name) {
    char path[1024];
    const char *why;
    size_t size;
    golden g;
    char *image;
    int result;
    snprintf(path, sizeof path, "%s/%s.gguf", dir, name);
    image = golden_read_file(path, &size);
    snprintf(path, sizeof path, "%s/%s.json", dir, name);
    why = image ? golden_load(&g, path) : "absent";
    printf("%-20s ", name);
    if (why) printf("%s\n", why);
    result = !image ? -1 : !why && check_model(&g, image);
    if (!why) golden_free(&g);
    free(image);
    return result;
}

int main(int argc, char **argv) {
    static char names[MAX_MODELS + 4][64];
    unsigned passed = 0, failed = 0, skipped = 0;
    size_t i, n;
    if (argc != 2) {
        fprintf(stderr, "usage: oracle_naive DIR\n");
        return 2;
    }
    n = list_models(argv[1], names);
    printf("largest difference in units of the seventh digit\n");
    for (i = 0; i < n; i++) {
        int result = check_file(argv[1], names[i]);
        if (result < 0) skipped++;
        else if (result) passed++;
        else failed++;
    }
    printf("%u passed, %u failed, %u skipped\n", passed, failed, skipped);
    return failed != 0;
}
