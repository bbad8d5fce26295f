/* oracle_tokenizer [DIR] [--only GLOB]: compares the tokenizer with recorded ids and texts

   DIR (default ../shared/tokenizers) holds vocabularies as GGUF files and, for each, a JSON file of
   inputs with the ids, pieces and texts that two other implementations agreed on; the README there
   gives the meaning of the fields. Prints one line for each vocabulary and `N passed, N failed,
   N skipped`; the exit status is 1 if any failed. A missing DIR passes. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include <dirent.h>
#include <fnmatch.h>
#include <stdio.h>

#include <cjson/cJSON.h>

typedef struct bytes {
    unsigned char *data;
    size_t size;
} bytes;

typedef struct ids {
    kvc_token *data;
    size_t n;
} ids;

/* One vocabulary under test. */
typedef struct oracle {
    kvc_allocator allocator;
    kvc__gguf gguf;
    kvc__vocab vocab;
    bytes file;
    cJSON *json;
    size_t n_checks, n_alt, n_failed;
    char first_failure[240];
} oracle;

/* ---- small things ---- */

static void *must(void *p)
{
    if (p == NULL) {
        fprintf(stderr, "oracle_tokenizer: out of memory\n");
        exit(1);
    }
    return p;
}

static int read_file(const char *path, bytes *out)
{
    FILE *f = fopen(path, "rb");
    long size;
    out->data = NULL;
    out->size = 0;
    if (f == NULL) return 0;
    if (fseek(f, 0, SEEK_END) == 0 && (size = ftell(f)) >= 0 && fseek(f, 0, SEEK_SET) == 0) {
        out->data = must(malloc((size_t)size + 1));
        out->size = fread(out->data, 1, (size_t)size, f);
        out->data[out->size] = 0;
    }
    fclose(f);
    return out->data != NULL;
}

static unsigned nibble(char c)
{
    return (unsigned)(c <= '9' ? c - '0' : c - 'a' + 10);
}

static bytes from_hex(const cJSON *item)
{
    bytes b;
    const char *hex = cJSON_IsString(item) ? item->valuestring : "";
    size_t i;
    b.size = strlen(hex) / 2;
    b.data = must(malloc(b.size + 1));
    for (i = 0; i < b.size; i++)
        b.data[i] = (unsigned char)(nibble(hex[2 * i]) << 4 | nibble(hex[2 * i + 1]));
    return b;
}

static int equals_hex(bytes b, const cJSON *hex)
{
    bytes want = from_hex(hex);
    int equal = b.size == want.size && memcmp(b.data, want.data, b.size) == 0;
    free(want.data);
    return equal;
}

static ids from_array(const cJSON *array)
{
    ids list;
    const cJSON *item;
    list.n = 0;
    list.data = must(malloc(sizeof(kvc_token) * (size_t)(cJSON_GetArraySize(array) + 1)));
    cJSON_ArrayForEach(item, array) list.data[list.n++] = (kvc_token)item->valuedouble;
    return list;
}

static int equals_array(ids list, const cJSON *array)
{
    ids want = from_array(array);
    int equal = list.n == want.n && memcmp(list.data, want.data, list.n * sizeof *list.data) == 0;
    free(want.data);
    return equal && cJSON_IsArray(array);
}

static const cJSON *field(const cJSON *object, const char *name)
{
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

static void check(oracle *o, int good, const char *what, const cJSON *of)
{
    const cJSON *hex = field(of, "hex");
    o->n_checks++;
    if (good) return;
    if (o->n_failed++ == 0)
        snprintf(o->first_failure, sizeof o->first_failure, "%s of %.80s", what,
            cJSON_IsString(hex) ? hex->valuestring : "a list of ids");
}

/* ---- through the tokenizer ---- */

/* Asks for the size first, then for exactly that many ids. */
static kvc_result encode(const oracle *o, bytes text, unsigned flags, ids *out, kvc_error *err)
{
    const kvc_allocator *a = &o->allocator;
    const char *p = (const char *)text.data;
    size_t need = 0, n = 0;
    kvc_result r;
    r = kvc__vocab_tokenize(&o->vocab, a, p, text.size, flags, NULL, 0, &need, NULL, err);
    out->n = 0;
    out->data = must(malloc((need + 1) * sizeof *out->data));
    if (r != KVC_OK && r != KVC_ERROR_SPACE) return r;
    r = kvc__vocab_tokenize(&o->vocab, a, p, text.size, flags, out->data, need, &n, NULL, err);
    out->n = n;
    return r == KVC_OK && n != need ? KVC_ERROR_FORMAT : r;
}

static size_t end_text(kvc_text_stream *s, unsigned char *buf)
{
    size_t n = s->n_held;
    memcpy(buf, s->held, n);
    s->n_held = 0;
    return n;
}

/* Whether the vocabulary puts a space in front of a text, which decoding drops again. */
static int adds_space(const oracle *o)
{
    const cJSON *keys = field(o->json, "keys"), *model = field(keys, "model");
    return cJSON_IsString(model) && strcmp(model->valuestring, "llama") == 0 &&
        !cJSON_IsFalse(field(keys, "add_space_prefix"));
}

/* Whether a push gave this part. Where the file has no list of its own for the stream, the parts
   are the tokens' pieces, and the first still has the space that is dropped. */
static int is_part(const oracle *o, bytes got, const cJSON *part, int first)
{
    bytes want = from_hex(part);
    size_t skip = first && want.size > 0 && want.data[0] == ' ' && adds_space(o);
    int equal = got.size == want.size - skip && memcmp(got.data, want.data + skip, got.size) == 0;
    free(want.data);
    return equal;
}

/* Pushes ids through a stream; `parts`, an array of hex strings, is what each push must give. */
static int decode(const oracle *o, ids list, kvc_text_stream stream, const cJSON *parts,
    int are_pieces, bytes *out)
{
    size_t i, n, cap = 16;
    int good = parts == NULL || (size_t)cJSON_GetArraySize(parts) == list.n;
    const cJSON *part = parts != NULL ? parts->child : NULL;
    bytes piece;
    out->size = 0;
    out->data = must(malloc(cap));
    for (i = 0; i < list.n; i++) {
        kvc_text_stream before = stream;
        kvc__vocab_push(&o->vocab, &before, list.data[i], NULL, 0, &n, NULL);
        if (out->size + n + 4 > cap) {
            cap = (out->size + n + 4) * 2;
            out->data = must(realloc(out->data, cap));
        }
        piece.data = out->data + out->size;
        if (kvc__vocab_push(&o->vocab, &stream, list.data[i], (char *)piece.data, n, &piece.size,
                NULL) != KVC_OK) good = 0;
        if (part != NULL && !is_part(o, piece, part, are_pieces && i == 0)) good = 0;
        if (part != NULL) part = part->next;
        out->size += piece.size;
    }
    out->size += end_text(&stream, out->data + out->size);
    return good;
}

static kvc_text_stream stream_of(int show_control, int keep_space)
{
    kvc_text_stream s;
    memset(&s, 0, sizeof s);
    s.show_control = (uint8_t)show_control;
    s.keep_space = (uint8_t)keep_space;
    return s;
}

/* ---- the lists of a file ---- */

static void check_ids(oracle *o, const cJSON *of, const char *name, unsigned flags)
{
    const cJSON *alt = field(of, "alt");
    bytes text = from_hex(field(of, "hex"));
    ids got;
    kvc_error err;
    kvc_result r = encode(o, text, flags, &got, &err);
    int first = r == KVC_OK && equals_array(got, field(of, name));
    int second = !first && r == KVC_OK && alt != NULL && equals_array(got, field(alt, name));
    if (second) o->n_alt++;
    check(o, first || second, name, of);
    free(text.data);
    free(got.data);
}

/* The pieces of a list of ids, each alone. */
static void check_pieces(oracle *o, const cJSON *of, ids list, const cJSON *pieces,
    const char *what)
{
    size_t i;
    int good = pieces == NULL || (size_t)cJSON_GetArraySize(pieces) == list.n;
    const cJSON *piece = pieces != NULL ? pieces->child : NULL;
    for (i = 0; i < list.n && piece != NULL; i++, piece = piece->next) {
        ids one;
        bytes got;
        one.data = list.data + i;
        one.n = 1;
        if (!decode(o, one, stream_of(1, 1), NULL, 0, &got) || !equals_hex(got, piece)) good = 0;
        free(got.data);
    }
    check(o, good, what, of);
}

static void check_text(oracle *o, const cJSON *of, ids list, kvc_text_stream s,
    const cJSON *stream, const cJSON *pieces, const cJSON *text, const char *what)
{
    bytes got;
    int good = decode(o, list, s, stream, stream != NULL && stream == pieces, &got);
    if (text != NULL) good = good && equals_hex(got, text);
    check(o, good, what, of);
    free(got.data);
}

static const cJSON *first_of(const cJSON *a, const cJSON *b)
{
    return a != NULL ? a : b;
}

static void check_case(oracle *o, const cJSON *of)
{
    ids plain = from_array(field(of, "ids")), special = from_array(field(of, "ids_special"));
    int same = equals_array(plain, field(of, "ids_special"));
    const cJSON *hex = field(of, "hex"), *pieces = field(of, "pieces");
    const cJSON *stream = first_of(field(of, "stream"), pieces);
    const cJSON *text = first_of(field(of, "text"), hex);
    const cJSON *pieces_special = same ? pieces : field(of, "pieces_special");
    const cJSON *stream_special =
        first_of(field(of, "stream_special"), same ? stream : pieces_special);
    const cJSON *text_special = first_of(field(of, "text_special"), same ? text : hex);
    check_ids(o, of, "ids", 0);
    check_ids(o, of, "ids_special", KVC_TEXT_SPECIAL_PARSE);
    check_pieces(o, of, plain, pieces, "pieces");
    check_pieces(o, of, special, pieces_special, "pieces_special");
    check_text(o, of, plain, stream_of(1, 0), stream, pieces, text, "stream");
    check_text(o, of, special, stream_of(1, 0), stream_special, pieces_special, text_special,
        "stream_special");
    if (field(of, "text_skip") != NULL)
        check_text(o, of, special, stream_of(0, 0), NULL, NULL, field(of, "text_skip"),
            "text_skip");
    free(plain.data);
    free(special.data);
}

static void check_bos(oracle *o, const cJSON *of)
{
    check_ids(o, of, "ids", KVC_TEXT_SPECIAL_ADD | KVC_TEXT_SPECIAL_PARSE);
}

static void check_decode(oracle *o, const cJSON *of)
{
    ids list = from_array(field(of, "ids"));
    check_text(o, of, list, stream_of(1, 0), NULL, NULL, field(of, "bytes"), "decode");
    free(list.data);
}

static void check_invalid(oracle *o, const cJSON *of)
{
    bytes text = from_hex(field(of, "hex")), got;
    const cJSON *accept;
    ids list;
    int good = 0;
    if (encode(o, text, 0, &list, NULL) == KVC_OK &&
        decode(o, list, stream_of(1, 0), NULL, 0, &got)) {
        cJSON_ArrayForEach(accept, field(of, "accept")) good = good || equals_hex(got, accept);
        free(got.data);
    }
    check(o, good, "invalid", of);
    free(text.data);
    free(list.data);
}

static int check_list(oracle *o, const char *name, void (*each)(oracle *, const cJSON *))
{
    const cJSON *list = field(o->json, name), *item;
    cJSON_ArrayForEach(item, list) each(o, item);
    return cJSON_GetArraySize(list);
}

/* ---- files ---- */

enum { PASSED, FAILED, SKIPPED };

static int say(const char *name, const char *verdict, const char *why, int status)
{
    printf("%-16s %s: %s\n", name, verdict, why);
    return status;
}

/* Everything is open: compares, prints the line. */
static int compare(oracle *o, const char *name)
{
    kvc_error err;
    size_t n;
    char text[400];
    int n_cases;
    memset(&err, 0, sizeof err);
    if (kvc__vocab_tokenize(&o->vocab, &o->allocator, "", 0, 0, NULL, 0, &n, NULL, &err) ==
        KVC_ERROR_UNSUPPORTED) {
        snprintf(text, sizeof text, "%s: %s", err.where, err.message);
        return say(name, "SKIP", text, SKIPPED);
    }
    n_cases = check_list(o, "cases", check_case);
    n_cases += check_list(o, "bos_cases", check_bos);
    n_cases += check_list(o, "decode", check_decode);
    n_cases += check_list(o, "invalid", check_invalid);
    printf("%-16s %6u tokens, %3d cases, %4zu checks, %2zu as the other reference, %s%s\n", name,
        (unsigned)o->vocab.n_tokens, n_cases, o->n_checks, o->n_alt,
        o->n_failed || n_cases == 0 ? "FAIL: " : "PASS",
        o->n_failed ? o->first_failure : n_cases == 0 ? "no cases" : "");
    if (o->n_failed) printf("%-16s %zu checks failed\n", "", o->n_failed);
    return o->n_failed || n_cases == 0 ? FAILED : PASSED;
}

static int open_and_compare(oracle *o, const char *dir, const char *name)
{
    char path[1024];
    kvc_error err;
    int status = FAILED;
    const cJSON *vocab = field(o->json, "vocab");
    memset(&err, 0, sizeof err);
    snprintf(path, sizeof path, "%s/%s", dir, cJSON_IsString(vocab) ? vocab->valuestring : "");
    if (!cJSON_IsString(vocab) || !read_file(path, &o->file))
        return say(name, "FAIL", "its GGUF file cannot be read", FAILED);
    if (kvc__gguf_open(&o->gguf, o->file.data, o->file.size, &o->allocator, &err) != KVC_OK)
        return say(name, "FAIL", err.message, FAILED);
    if (kvc__vocab_open(&o->vocab, &o->gguf, UINT32_MAX, &o->allocator, &err) == KVC_OK) {
        status = compare(o, name);
        kvc__vocab_close(&o->vocab, &o->allocator);
    } else {
        say(name, "FAIL", err.message, FAILED);
    }
    kvc__gguf_close(&o->gguf, &o->allocator);
    return status;
}

static int run_file(const char *dir, const char *file)
{
    char path[1024], name[256];
    oracle o;
    bytes text;
    kvc_allocator none;
    int status;
    memset(&o, 0, sizeof o);
    memset(&none, 0, sizeof none);
    kvc__allocator_resolve(&o.allocator, &none, NULL);
    snprintf(path, sizeof path, "%s/%s", dir, file);
    snprintf(name, sizeof name, "%.*s", (int)(strlen(file) - 5), file);
    if (!read_file(path, &text)) return say(name, "FAIL", "cannot be read", FAILED);
    o.json = cJSON_Parse((const char *)text.data);
    if (o.json == NULL) status = say(name, "FAIL", "is no JSON", FAILED);
    else status = open_and_compare(&o, dir, name);
    cJSON_Delete(o.json);
    free(o.file.data);
    free(text.data);
    return status;
}

static int is_json(const struct dirent *entry)
{
    size_t n = strlen(entry->d_name);
    return n > 5 && strcmp(entry->d_name + n - 5, ".json") == 0;
}

int main(int argc, char **argv)
{
    const char *dir = "../shared/tokenizers", *only = "*";
    struct dirent **files;
    int i, n, count[3] = { 0, 0, 0 };
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
        else if (argv[i][0] != '-') dir = argv[i];
        else {
            fprintf(stderr, "usage: oracle_tokenizer [DIR] [--only GLOB]\n");
            return 2;
        }
    }
    n = scandir(dir, &files, is_json, alphasort);
    if (n < 0) {
        printf("%s is not there: nothing to compare with\n0 passed, 0 failed, 0 skipped\n", dir);
        return 0;
    }
    for (i = 0; i < n; i++) {
        char name[256];
        snprintf(name, sizeof name, "%.*s", (int)(strlen(files[i]->d_name) - 5), files[i]->d_name);
        if (fnmatch(only, name, 0) == 0) count[run_file(dir, files[i]->d_name)]++;
        free(files[i]);
    }
    free(files);
    printf("%d passed, %d failed, %d skipped\n", count[PASSED], count[FAILED], count[SKIPPED]);
    return count[FAILED] != 0;
}
