/* golden.h - reads the JSON beside a golden model: a prompt, the exact logits at some positions,
   the greedy continuation. The files lie in ../shared/goldens, whose README describes them. */
#ifndef GOLDEN_H
#define GOLDEN_H

#include <cjson/cJSON.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct golden {
    char type[16];              /* storage format of the matrices, "" if the file names none: F32 */
    int32_t *prompt;            /* [n_prompt] */
    int32_t *greedy;            /* [n_greedy] */
    int32_t *positions;         /* [n_positions], indices into prompt */
    double *logits;             /* [n_positions, n_vocab] */
    size_t n_prompt, n_greedy, n_positions, n_vocab;
    double tolerance;
} golden;

/* The whole file with a zero byte behind it, or NULL; *size is without that byte. */
static inline char *golden_read_file(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    char *data = NULL;
    long n;
    *size = 0;
    if (!f) return NULL;
    if (!fseek(f, 0, SEEK_END) && (n = ftell(f)) >= 0 && !fseek(f, 0, SEEK_SET)) {
        data = (char *)malloc((size_t)n + 1);
        if (data && fread(data, 1, (size_t)n, f) == (size_t)n) {
            data[n] = 0;
            *size = (size_t)n;
        } else {
            free(data);
            data = NULL;
        }
    }
    fclose(f);
    return data;
}

static inline int32_t *golden_ints(const cJSON *json, const char *name, size_t *n) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, name), *item;
    int32_t *out;
    *n = 0;
    if (!cJSON_IsArray(list)) return NULL;
    out = (int32_t *)malloc(((size_t)cJSON_GetArraySize(list) + 1) * sizeof *out);
    if (!out) return NULL;
    cJSON_ArrayForEach(item, list) out[(*n)++] = (int32_t)item->valuedouble;
    return out;
}

/* The rows of "logits" in one block; all must have the same length. */
static inline double *golden_logits(const cJSON *json, size_t n_rows, size_t *n_vocab) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, "logits"), *row, *item;
    double *out;
    size_t n = 0;
    *n_vocab = 0;
    if (!cJSON_IsArray(list) || (size_t)cJSON_GetArraySize(list) != n_rows || !n_rows) return NULL;
    *n_vocab = (size_t)cJSON_GetArraySize(cJSON_GetArrayItem(list, 0));
    out = (double *)malloc((n_rows * *n_vocab + 1) * sizeof *out);
    if (!out) return NULL;
    cJSON_ArrayForEach(row, list) {
        if ((size_t)cJSON_GetArraySize(row) != *n_vocab) {
            free(out);
            return NULL;
        }
        cJSON_ArrayForEach(item, row) out[n++] = item->valuedouble;
    }
    return out;
}

static inline void golden_free(golden *g) {
    free(g->prompt);
    free(g->greedy);
    free(g->positions);
    free(g->logits);
    memset(g, 0, sizeof *g);
}

/* Returns NULL, or what is wrong with the file. */
static inline const char *golden_load(golden *g, const char *path) {
    size_t size;
    char *text = golden_read_file(path, &size);
    cJSON *json = text ? cJSON_Parse(text) : NULL;
    const cJSON *type, *tolerance;
    memset(g, 0, sizeof *g);
    free(text);
    if (!text) return "no JSON beside it";
    if (!json) return "its JSON cannot be parsed";
    type = cJSON_GetObjectItemCaseSensitive(json, "type");
    tolerance = cJSON_GetObjectItemCaseSensitive(json, "tolerance");
    if (cJSON_IsString(type)) snprintf(g->type, sizeof g->type, "%s", type->valuestring);
    g->tolerance = cJSON_IsNumber(tolerance) ? tolerance->valuedouble : 0;
    g->prompt = golden_ints(json, "prompt", &g->n_prompt);
    g->greedy = golden_ints(json, "greedy", &g->n_greedy);
    g->positions = golden_ints(json, "positions", &g->n_positions);
    g->logits = golden_logits(json, g->n_positions, &g->n_vocab);
    cJSON_Delete(json);
    if (g->prompt && g->greedy && g->positions && g->logits && g->tolerance > 0) return NULL;
    golden_free(g);
    return "its JSON lacks a field";
}

#endif
