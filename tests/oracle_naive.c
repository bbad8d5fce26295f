/* oracle_naive - checks the oracle of the other tests, naive.h, against the golden models: its
   logits must be theirs to the digits the files hold, and so must be its greedy continuation.

   usage: oracle_naive DIR

   The last line is `N passed, N failed, N skipped`; files that are absent are skipped. */
#include "golden.h"
#include "naive.h"

static const char *const models[] = {
    "llama", "llama-attn-bias", "llama-head-dim", "llama-linear", "llama-rope-freqs", "llama-tied",
    "llama-yarn", "mistral-swa", "quant/f16", "quant/bf16", "quant/q8_0", "quant/q4_0"
};

static int32_t argmax(const double *x, size_t n) {
    size_t i, best = 0;
    for (i = 1; i < n; i++) if (x[i] > x[best]) best = i;
    return (int32_t)best;
}

static double largest_difference(const golden *g, const double *logits) {
    double largest = 0;
    size_t p, i;
    for (p = 0; p < g->n_positions; p++) {
        const double *row = logits + (size_t)g->positions[p] * g->n_vocab;
        for (i = 0; i < g->n_vocab; i++) {
            double d = fabs(row[i] - g->logits[p * g->n_vocab + i]);
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
    printf("%.1e  greedy %u of %u\n", largest, (unsigned)n_equal, (unsigned)g->n_greedy);
    return largest < 2e-6 && n_equal == g->n_greedy;
}

int main(int argc, char **argv) {
    unsigned passed = 0, failed = 0, skipped = 0;
    size_t i;
    if (argc != 2) {
        fprintf(stderr, "usage: oracle_naive DIR\n");
        return 2;
    }
    for (i = 0; i < sizeof models / sizeof *models; i++) {
        char path[1024];
        const char *why;
        size_t size;
        golden g;
        char *image;
        snprintf(path, sizeof path, "%s/%s.gguf", argv[1], models[i]);
        image = golden_read_file(path, &size);
        snprintf(path, sizeof path, "%s/%s.json", argv[1], models[i]);
        why = image ? golden_load(&g, path) : "absent";
        printf("%-18s ", models[i]);
        if (why) printf("%s\n", why);
        if (!image) skipped++;
        else if (!why && check_model(&g, image)) passed++;
        else failed++;
        if (!why) golden_free(&g);
        free(image);
    }
    printf("%u passed, %u failed, %u skipped\n", passed, failed, skipped);
    return failed != 0;
}
