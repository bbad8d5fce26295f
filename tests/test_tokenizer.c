/* The sections >>unicode and >>tokenizer: toy vocabularies built in memory, compared with slow and
   obvious references, with recorded splits, and with what hostile files deserve. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include <limits.h>
#include <pthread.h>
#include <time.h>

#include "testing.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STACK_SIZE (1024u * 1024u)      /* a sanitizer's frames and guards need more */
#else
#define STACK_SIZE (64u * 1024u)
#endif

#define MARK "\xe2\x96\x81"             /* U+2581, a space in "llama" spellings */
#define SPECIAL_ADD KVC_TEXT_SPECIAL_ADD
#define SPECIAL_PARSE KVC_TEXT_SPECIAL_PARSE

enum { NORMAL = 1, UNKNOWN, CONTROL, USER, UNUSED, BYTE };

/* ---- toy vocabularies ---- */

typedef struct piece {
    char text[64];
    size_t size;
    float score;
    int kind;
} piece;

typedef struct toy {
    const char *model, *pre;    /* pre NULL: no key */
    piece *tokens;
    size_t n_tokens, cap;
    const char *merges[600];
    size_t n_merges;
    int bos, eos, unk;          /* -1: no key */
    int add_bos, space;         /* -1: no key */
    int no_types, no_scores, no_merges;
    const char *architecture;
    const gguf_edit *edits;
    size_t n_edits;
    uint32_t n_rows;            /* 0: as many as the embedding could have */

    gguf_writer writer;
    kvc__gguf gguf;
    kvc__vocab v;
    counter mem;
    kvc_allocator a;
    kvc_token ids[1024];        /* of the last encode */
    size_t n_ids;
} toy;

static int add_bytes(toy *t, const void *text, size_t size, float score, int kind)
{
    piece *p;
    if (t->n_tokens == t->cap) {
        t->cap = t->cap * 2 + 64;
        t->tokens = (piece *)gguf_must(realloc(t->tokens, t->cap * sizeof *t->tokens));
    }
    p = &t->tokens[t->n_tokens];
    assert_true(size <= sizeof p->text);
    memset(p, 0, sizeof *p);
    memcpy(p->text, text, size);
    p->size = size;
    p->score = score;
    p->kind = kind;
    return (int)t->n_tokens++;
}

static int add(toy *t, const char *text, float score, int kind)
{
    return add_bytes(t, text, strlen(text), score, kind);
}

static void toy_start(toy *t, const char *model, const char *pre)
{
    memset(t, 0, sizeof *t);
    t->model = model;
    t->pre = pre;
    t->bos = t->eos = t->unk = t->add_bos = t->space = -1;
}

/* <unk> <s> </s> and, if asked, the 256 byte tokens. */
static void spm_start(toy *t, int with_bytes)
{
    int b;
    char text[8];
    toy_start(t, "llama", "default");
    t->unk = add(t, "<unk>", 0, UNKNOWN);
    t->bos = add(t, "<s>", 0, CONTROL);
    t->eos = add(t, "</s>", 0, CONTROL);
    for (b = 0; with_bytes && b < 256; b++) {
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
        add(t, text, 0, BYTE);
    }
}

/* The characters that stand for bytes, from the definition in words: printable Latin-1 itself, then
   U+0100 and up for the rest. */
static size_t byte_char(unsigned b, char out[3])
{
    unsigned c, rest = 0, code = 0;
    for (c = 0; c <= b; c++) {
        int printable = (c >= '!' && c <= '~') || (c >= 0xA1 && c <= 0xFF && c != 0xAD);
        code = printable ? c : 256 + rest++;
    }
    if (code < 128) return (size_t)snprintf(out, 3, "%c", (char)code);
    out[0] = (char)(0xC0 | code >> 6);
    out[1] = (char)(0x80 | (code & 63));
    out[2] = 0;
    return 2;
}

/* Token b is byte b, except for the missing ones, which get an odd name. */
static void bytes_start(toy *t, const char *pre, const char *missing)
{
    unsigned b;
    char text[16];
    toy_start(t, "gpt2", pre);
    for (b = 0; b < 256; b++) {
        byte_char(b, text);
        if (b != 0 && strchr(missing, (int)b)) snprintf(text, sizeof text, "missing %u", b);
        add(t, text, 0, NORMAL);
    }
}

static void toy_write_strings(gguf_writer *w, const char *key, const toy *t)
{
    size_t i;
    if (!gguf_meta_times(w, key)) return;
    gguf_array_start(w, key, GGUF_VALUE_STRING, t->n_tokens);
    for (i = 0; i < t->n_tokens; i++) {
        gguf_int(&w->meta, t->tokens[i].size, 8);
        gguf_bytes(&w->meta, t->tokens[i].text, t->tokens[i].size);
    }
    gguf_meta_end(w, key);
}

static void toy_write_numbers(gguf_writer *w, const toy *t)
{
    float *scores = (float *)gguf_must(calloc(t->n_tokens + 1, sizeof *scores));
    int32_t *kinds = (int32_t *)gguf_must(calloc(t->n_tokens + 1, sizeof *kinds));
    size_t i;
    for (i = 0; i < t->n_tokens; i++) {
        scores[i] = t->tokens[i].score;
        kinds[i] = t->tokens[i].kind;
    }
    if (!t->no_scores)
        gguf_meta_array(w, "tokenizer.ggml.scores", GGUF_VALUE_F32, t->n_tokens, scores);
    if (!t->no_types)
        gguf_meta_array(w, "tokenizer.ggml.token_type", GGUF_VALUE_I32, t->n_tokens, kinds);
    free(scores);
    free(kinds);
}

static void toy_write_id(gguf_writer *w, const char *key, int id)
{
    if (id >= 0) gguf_meta_u32(w, key, (uint32_t)id);
}

static void toy_write(toy *t)
{
    gguf_writer *w = &t->writer;
    gguf_start(w, 3, 32);
    w->edits = t->edits;
    w->n_edits = t->n_edits;
    if (t->architecture) gguf_meta_string(w, "general.architecture", t->architecture);
    gguf_meta_string(w, "tokenizer.ggml.model", t->model);
    if (t->pre) gguf_meta_string(w, "tokenizer.ggml.pre", t->pre);
    toy_write_strings(w, "tokenizer.ggml.tokens", t);
    toy_write_numbers(w, t);
    if (!t->no_merges)
        gguf_meta_strings(w, "tokenizer.ggml.merges", t->n_merges, t->merges);
    toy_write_id(w, "tokenizer.ggml.bos_token_id", t->bos);
    toy_write_id(w, "tokenizer.ggml.eos_token_id", t->eos);
    toy_write_id(w, "tokenizer.ggml.unknown_token_id", t->unk);
    if (t->add_bos >= 0)
        gguf_meta_number(w, "tokenizer.ggml.add_bos_token", GGUF_VALUE_BOOL, t->add_bos);
    if (t->space >= 0)
        gguf_meta_number(w, "tokenizer.ggml.add_space_prefix", GGUF_VALUE_BOOL, t->space);
    gguf_finish(w);
}

static kvc_result toy_try(toy *t)
{
    toy_write(t);
    memset(&t->mem, 0, sizeof t->mem);
    t->a = counter_hook(&t->mem);
    OK(kvc__gguf_open(&t->gguf, t->writer.image, t->writer.image_size, &t->a, &last));
    return kvc__vocab_open(&t->v, &t->gguf, t->n_rows ? t->n_rows : 1u << 30, &t->a, &last);
}

static void toy_open(toy *t)
{
    size_t before;
    OK(toy_try(t));
    before = t->mem.bytes - t->v.memory_size;
    assert_int_equal(before, t->gguf.block_size);       /* memory_size is what was taken */
}

static void toy_close(toy *t)
{
    kvc__vocab_close(&t->v, &t->a);
    kvc__gguf_close(&t->gguf, &t->a);
    CLEAN(&t->mem);
    gguf_free(&t->writer);
    free(t->tokens);
}

/* ---- short forms ---- */

static void encode(toy *t, const void *text, size_t size, unsigned flags)
{
    OK(kvc__vocab_tokenize(&t->v, &t->a, (const char *)text, size, flags, t->ids, COUNT(t->ids),
        &t->n_ids, NULL, &last));
}

/* The ids of a text as the tokens' spellings with | between them. */
static const char *spelled(toy *t, const void *text, size_t size, unsigned flags)
{
    static char out[8192];
    size_t i, n = 0, length;
    encode(t, text, size, flags);
    for (i = 0; i < t->n_ids; i++) {
        const char *p = kvc__vocab_spelling(&t->v, t->ids[i], &length, NULL);
        assert_true(n + length + 2 < sizeof out);
        if (i > 0) out[n++] = '|';
        memcpy(out + n, p, length);
        n += length;
    }
    out[n] = 0;
    return out;
}

#define SPELLED(t, text, flags, want) \
    assert_string_equal(spelled(t, text, strlen(text), flags), want)

/* Pushes ids through a stream into out; returns the bytes, an unfinished character included. */
static size_t decode(const toy *t, const kvc_token *ids, size_t n, kvc_text_stream s, char *out,
    size_t cap)
{
    size_t i, size = 0, step;
    for (i = 0; i < n; i++) {
        OK(kvc__vocab_push(&t->v, &s, ids[i], out + size, cap - size, &step, &last));
        size += step;
    }
    assert_true(cap - size >= 4);
    return size + kvc_text_end(&s, out + size);
}

static kvc_text_stream stream_of(int show_control, int keep_space)
{
    kvc_text_stream s;
    memset(&s, 0, sizeof s);
    s.show_control = (uint8_t)show_control;
    s.keep_space = (uint8_t)keep_space;
    return s;
}

/* decode(encode(text)) with control tokens hidden */
static void check_round_trip(toy *t, const void *text, size_t size, unsigned flags,
    const void *want, size_t want_size)
{
    char out[2048];
    size_t n;
    encode(t, text, size, flags);
    n = decode(t, t->ids, t->n_ids, stream_of(0, 0), out, sizeof out);
    if (n == want_size && memcmp(out, want, n) == 0) return;
    print_error("a text of %u bytes, 0x%02x first, came back as another of %u\n", (unsigned)size,
        size ? *(const unsigned char *)text : 0u, (unsigned)n);
    check_failed(__FILE__, __LINE__);
}

#define ROUND_TRIP(t, text, size) check_round_trip(t, text, size, 0, text, size)

/* ---- unicode ---- */

static size_t put_utf8(uint32_t c, unsigned char out[4])
{
    if (c < 0x80) {
        out[0] = (unsigned char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (unsigned char)(0xC0 | c >> 6);
        out[1] = (unsigned char)(0x80 | (c & 63));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (unsigned char)(0xE0 | c >> 12);
        out[1] = (unsigned char)(0x80 | (c >> 6 & 63));
        out[2] = (unsigned char)(0x80 | (c & 63));
        return 3;
    }
    out[0] = (unsigned char)(0xF0 | c >> 18);
    out[1] = (unsigned char)(0x80 | (c >> 12 & 63));
    out[2] = (unsigned char)(0x80 | (c >> 6 & 63));
    out[3] = (unsigned char)(0x80 | (c & 63));
    return 4;
}

/* Every code point is read back, and each of its proper starts is "cut off"; surrogates are bad. */
static void utf8_reads_every_code_point(void **unused)
{
    uint32_t c, got;
    unsigned char text[4];
    size_t size, i;
    (void)unused;
    for (c = 0; c < 0x110000; c++) {
        size = put_utf8(c, text);
        if (c >= 0xD800 && c <= 0xDFFF) {
            assert_int_equal(kvc__utf8_read(text, size, &got), 1);
            assert_int_equal(got, KVC__UTF8_BAD);
            continue;
        }
        if (kvc__utf8_read(text, size, &got) != size || got != c) fail_msg("U+%04X", (unsigned)c);
        for (i = 1; i < size; i++) {
            assert_int_equal(kvc__utf8_read(text, i, &got), i);
            assert_int_equal(got, KVC__UTF8_CUT);
        }
    }
}

/* Sizes of the parts as in table 3-8 of the Unicode standard and its neighbours. */
static void utf8_parts_of_ill_formed_text(void **unused)
{
    static const struct {
        const char *text;
        size_t parts[8];
    } cases[] = {
        { "\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64", { 1, 3, 2, 1, 1, 1, 1, 1 } },
        { "\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", { 1, 1, 1, 1, 1, 1, 1, 1 } },
        { "\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", { 1, 1, 1, 1, 1, 1, 1, 1 } },
        { "\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", { 1, 1, 1, 1, 1, 1, 1, 1 } },
        { "\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", { 2, 1, 3, 2, 1, 0, 0, 0 } }
    };
    size_t i, k, at;
    uint32_t c;
    (void)unused;
    for (i = 0; i < COUNT(cases); i++) {
        size_t n = strlen(cases[i].text);
        for (k = at = 0; k < 8 && cases[i].parts[k] != 0; k++) {
            const unsigned char *p = (const unsigned char *)cases[i].text + at;
            assert_int_equal(kvc__utf8_read(p, n - at, &c), cases[i].parts[k]);
            at += cases[i].parts[k];
        }
    }
}

static void classes_are_those_of_the_standard(void **unused)
{
    static const struct {
        uint32_t first, last;
        unsigned kind;
    } ranges[] = {
        { 'a', 'z', KVC__CLASS_LETTER }, { 0xAA, 0xAA, KVC__CLASS_LETTER },
        { 0xB2, 0xB3, KVC__CLASS_NUMBER }, { 0xBC, 0xBE, KVC__CLASS_NUMBER },
        { 0xD7, 0xD7, KVC__CLASS_SYMBOL }, { 0x300, 0x36F, KVC__CLASS_MARK },
        { 0x378, 0x379, KVC__CLASS_OTHER }, { 0x660, 0x669, KVC__CLASS_NUMBER },
        { 0x2018, 0x201F, KVC__CLASS_PUNCT }, { 0x2160, 0x2182, KVC__CLASS_NUMBER },
        { 0x3000, 0x3000, KVC__CLASS_OTHER }, { 0x4E00, 0x9FFF, KVC__CLASS_LETTER },
        { 0xAC00, 0xD7A3, KVC__CLASS_LETTER }, { 0xD7A4, 0xD7AF, KVC__CLASS_OTHER },
        { 0xE000, 0xF8FF, KVC__CLASS_OTHER }, { 0x1F600, 0x1F64F, KVC__CLASS_SYMBOL },
        { 0x20000, 0x2A6DF, KVC__CLASS_LETTER }, { 0xE0100, 0xE01EF, KVC__CLASS_MARK },
        { 0x10FFFF, 0x10FFFF, KVC__CLASS_OTHER },
        { KVC__UTF8_BAD, KVC__UTF8_CUT, KVC__CLASS_SYMBOL }
    };
    size_t i;
    uint32_t c, n_space = 0;
    (void)unused;
    for (i = 0; i < COUNT(ranges); i++) {
        for (c = ranges[i].first; c <= ranges[i].last; c++) {
            if (kvc__class_of(c) != ranges[i].kind) fail_msg("U+%04X", (unsigned)c);
        }
    }
    for (c = 0; c < 0x80; c++) assert_int_equal(kvc__class_of(c), kvc__class_search(c));
    for (c = 0; c < 0x110000; c++) n_space += (uint32_t)kvc__is_space(c);
    assert_int_equal(n_space, 25);
    for (i = 1; i < KVC__CLASS_COUNT; i++)
        assert_true(kvc__class_table[i - 1] >> 3 < kvc__class_table[i] >> 3);
}

/* ---- splits ---- */

/* Expected by Python's `regex` module with the expressions written at the rules. */
static void splits_follow_their_expressions(void **unused)
{
#define CJK "\xe4\xb8\xad\xe6\x96\x87\xe3\x81\x8b\xe3\x81\xaa"
#define HANGUL "\xed\x95\x9c"
#define HALF "\xc2\xbd"
#define TWELVE "\xe2\x85\xab"
#define WIDE "\xe3\x80\x80"
#define DOTS "\xe2\x80\xa6"
    static const char text[] = "I'll DON'T  can't 12345 x=42;  " HALF TWELVE "\n\n  foo\t\tbar !!? "
        CJK HANGUL " \xc3\xa9lan (a) " WIDE DOTS "\r\nend   ";
    static const char *const want[KVC__RULE_COUNT] = {
        "I'll| DON'T| | can't| 12345| x=42;| | " HALF TWELVE "|\n\n | foo|\t\t|bar| !!?| " CJK
        HANGUL "| \xc3\xa9lan| (|a|) " WIDE DOTS "\r\n|end|   ",
        "I|'ll| DON|'T| | can|'t| |123|45| x|=|42|;|  |" HALF TWELVE "|\n\n| | foo|\t|\tbar| !!?| |"
        CJK "|" HANGUL "| \xc3\xa9lan| (|a|)| |" WIDE "|" DOTS "\r\n|end|   ",
        "I|'|ll| DON|'|T| | can|'|t| |1|2|3|4|5| x|=|4|2|;|  |" HALF "|" TWELVE "|\n|\n| | foo|\t|"
        "\tbar| !!?| |" CJK HANGUL "| \xc3\xa9lan| (|a|)| |" WIDE DOTS "|\r|\n|end|   ",
        "I|'|ll| DON|'|T| | can|'|t| |12345| x|=|42|;|  |" HALF "|" TWELVE "|\n|\n| | foo|\t|\tbar"
        "| !!?| |" CJK HANGUL "| \xc3\xa9|lan| (|a|)| |" WIDE "|" DOTS "|\r|\n|end|   ",
        "I|'|ll| DON|'|T| | can|'|t| |123|45| x|=|42|;| | |" HALF TWELVE "|\n\n | foo|\t|\t|bar| |"
        "!!?| " CJK HANGUL "| \xc3\xa9lan| |(|a|)| " WIDE "|" DOTS "|\r|\n|end|   ",
        "I|'|ll| DON|'|T| | can|'|t| |123|45| x|=|42|;| | " HALF TWELVE "|\n\n | foo|\t|\t|bar| |"
        "!!?| " CJK HANGUL "| \xc3\xa9lan| |(|a|)| " WIDE "|" DOTS "|\r|\n|end|   ",
        "I|'ll| DON|'|T| | can|'t| 12345| x|=|42|;| | " HALF TWELVE "|\n\n | foo|\t|\t|bar| !!?| "
        CJK HANGUL "| \xc3\xa9lan| (|a|)| |" WIDE "|" DOTS "|\r|\n|end|   ",
        "I|'ll| DON|'T| | can|'t| |123|45| x|=|42|;| | |" HALF TWELVE "|\n\n| | foo|\t|\tbar| !!?| "
        CJK HANGUL "| \xc3\xa9lan| (|a|)| |" WIDE "|" DOTS "\r\n|end|   ",
        "I|'ll| DON|'T| | can|'t| |1|2|3|4|5| x|=|4|2|;| | |" HALF "|" TWELVE "|\n\n| | foo|\t|"
        "\tbar| !!?| " CJK HANGUL "| \xc3\xa9lan| (|a|)| |" WIDE "|" DOTS "\r\n|end|   ",
        "I|'ll| DON|'|T| | can|'t| |1|2|3|4|5| x|=|4|2|;|  |" HALF "|" TWELVE "|\n\n | foo|\t|\t|"
        "bar| !!?| " CJK HANGUL "| \xc3\xa9lan| (|a|)| |" WIDE "|" DOTS "|\r|\n|end|   ",
        "I'll| DON'T| | can't| |1|2|3|4|5| x=|4|2|;| | |" HALF "|" TWELVE "|\n\n | foo|\t\t|bar"
        "| !!?| " CJK HANGUL "| \xc3\xa9lan| (|a|) " WIDE DOTS "\r\n|end|   "
    };
    int rule;
    (void)unused;
    for (rule = 0; rule < KVC__RULE_COUNT; rule++) {
        char out[512];
        size_t n = 0, size;
        kvc__words w;
        kvc__words_start(&w, kvc__split_rules[rule], (const unsigned char *)text, sizeof text - 1);
        while ((size = kvc__words_next(&w)) != 0) {
            if (n) out[n++] = '|';
            memcpy(out + n, text + w.at - size, size);
            n += size;
        }
        out[n] = 0;
        if (strcmp(out, want[rule]) != 0) fail_msg("rule %d\n%s\n%s", rule, out, want[rule]);
    }
}

/* Words cover any bytes, one after the other, and each rule ends with a free stage. */
static void splits_cover_any_bytes(void **unused)
{
    static const char alphabet[] = "aB7 '\n\r\t.\x80\xc3\xa9\xe2\x96\x81\xff(s";
    uint64_t state = 7;
    int round, rule;
    (void)unused;
    for (round = 0; round < 4000; round++) {
        unsigned char text[64];
        size_t n = (size_t)(kvc__mix64(++state) % sizeof text), i, sum = 0, size;
        kvc__words w;
        for (i = 0; i < n; i++)
            text[i] = (unsigned char)alphabet[kvc__mix64(++state) % (sizeof alphabet - 1)];
        rule = round % KVC__RULE_COUNT;
        kvc__words_start(&w, kvc__split_rules[rule], text, n);
        while ((size = kvc__words_next(&w)) != 0) sum += size;
        assert_int_equal(sum, n);
    }
    for (rule = 0; rule < KVC__RULE_COUNT; rule++)
        assert_int_equal(kvc__split_rules[rule][KVC__SPLIT_STAGES].kind, KVC__SPLIT_END);
}

static void pre_table_is_sorted(void **unused)
{
    size_t i;
    (void)unused;
    for (i = 1; i < KVC__PRE_COUNT; i++)
        assert_true(strcmp(kvc__pre_table[i - 1].name, kvc__pre_table[i].name) < 0);
}

/* ---- merges ---- */

static void spm_merges_by_score_then_leftmost(void **unused)
{
    toy t;
    (void)unused;
    spm_start(&t, 1);
    t.space = 0;
    add(&t, "a", -9, NORMAL);
    add(&t, "b", -9, NORMAL);
    add(&t, "c", -9, NORMAL);
    add(&t, "ab", -2, NORMAL);
    add(&t, "bc", -1, NORMAL);
    add(&t, "aa", -3, NORMAL);
    add(&t, "abc", -5, NORMAL);
    add(&t, "cab", -0.5f, NORMAL);
    add(&t, "x", -9, NORMAL);
    add(&t, "xx", 2, UNUSED);
    toy_open(&t);
    SPELLED(&t, "abc", 0, "abc");           /* bc first, then a + bc */
    SPELLED(&t, "ab", 0, "ab");
    SPELLED(&t, "aaa", 0, "aa|a");          /* the leftmost of two equal pairs */
    SPELLED(&t, "aaaaa", 0, "aa|aa|a");
    SPELLED(&t, "aaab", 0, "aa|ab");        /* ab before aa */
    SPELLED(&t, "cabc", 0, "c|abc");        /* bc takes the b that ca would need */
    SPELLED(&t, "cab", 0, "cab");
    SPELLED(&t, "xx", 0, "x|x");            /* tokens not in use are not made */
    toy_close(&t);
}

static void bpe_merges_by_rank_then_leftmost(void **unused)
{
    toy t;
    (void)unused;
    bytes_start(&t, "gpt-2", "");
    add(&t, "bc", 0, NORMAL);
    add(&t, "ab", 0, NORMAL);
    add(&t, "aa", 0, NORMAL);
    add(&t, "abc", 0, NORMAL);
    add(&t, "\xc4\xa0" "a", 0, NORMAL);      /* the character for a space */
    t.merges[t.n_merges++] = "b c";
    t.merges[t.n_merges++] = "a b";
    t.merges[t.n_merges++] = "a a";
    t.merges[t.n_merges++] = "a bc";
    t.merges[t.n_merges++] = "\xc4\xa0 a";
    t.merges[t.n_merges++] = "z z";         /* gives no token: does not apply */
    t.merges[t.n_merges++] = "q none";      /* of a part that is no token */
    t.merges[t.n_merges++] = "b c";         /* twice: the first counts */
    toy_open(&t);
    assert_int_equal(t.v.n_joins, 5);
    SPELLED(&t, "abc", 0, "abc");
    SPELLED(&t, "ab", 0, "ab");
    SPELLED(&t, "aaaab", 0, "aa|a|ab");
    SPELLED(&t, "zz a", 0, "z|z|\xc4\xa0" "a");
    SPELLED(&t, "a a", 0, "a|\xc4\xa0" "a");    /* never across words */
    toy_close(&t);
}

/* The word is a token, but no merge leads to it. */
static void whole_words_only_where_the_rule_says_so(void **unused)
{
    static const struct {
        const char *pre, *want;
    } cases[] = {
        { "llama-bpe", "Vi\xc3\xa1\xc2\xbb\xc4\xa9t|\xc4\xa0|a" }, { "gpt-2", NULL },
        { "qwen2", NULL }
    };
    size_t i;
    (void)unused;
    for (i = 0; i < COUNT(cases); i++) {
        toy t;
        bytes_start(&t, cases[i].pre, "");
        add(&t, "Vi\xc3\xa1\xc2\xbb\xc4\xa9t", 0, NORMAL);       /* e1 bb 87 as characters */
        add(&t, "Vi\xe1\xbb\x87t", 0, NORMAL);                   /* not a byte-level spelling */
        toy_open(&t);
        encode(&t, "Vi\xe1\xbb\x87t a", 8, 0);
        assert_int_equal(t.n_ids, cases[i].want ? 3 : 8);
        if (cases[i].want) SPELLED(&t, "Vi\xe1\xbb\x87t a", 0, cases[i].want);
        ROUND_TRIP(&t, "Vi\xe1\xbb\x87t a", 8);
        toy_close(&t);
    }
}

/* ---- a slow reference over random vocabularies ---- */

static int first_token(const toy *t, const char *text, size_t size)
{
    size_t i;
    for (i = 0; i < t->n_tokens; i++) {
        const piece *p = &t->tokens[i];
        if (p->size == size && (p->kind == NORMAL || p->kind == USER) &&
            memcmp(p->text, text, size) == 0) return (int)i;
    }
    return -1;
}

/* The rank of a pair in the list of merges, or -1; like first_token it searches all of it. */
static int first_merge(const toy *t, const char *a, size_t a_size, const char *b, size_t b_size)
{
    char line[160];
    size_t i;
    if (first_token(t, a, a_size) < 0 || first_token(t, b, b_size) < 0) return -1;
    memcpy(line, a, a_size);
    line[a_size] = ' ';
    memcpy(line + a_size + 1, b, b_size);
    line[a_size + 1 + b_size] = 0;
    for (i = 0; i < t->n_merges; i++) {
        if (strcmp(t->merges[i], line) == 0) return (int)i;
    }
    return -1;
}

/* How good it is to join two neighbours (the larger the better); 0 if they cannot be joined. */
static int worth(const toy *t, const char *text, const size_t *cut, size_t i, double *value)
{
    size_t size = cut[i + 1] - cut[i], both = cut[i + 2] - cut[i];
    int id = both <= sizeof t->tokens->text ? first_token(t, text + cut[i], both) : -1, rank;
    if (id < 0) return 0;
    *value = (double)t->tokens[id].score;
    if (strcmp(t->model, "llama") == 0) return 1;
    rank = first_merge(t, text + cut[i], size, text + cut[i + 1], both - size);
    *value = -rank;
    return rank >= 0;
}

/* Merges as the definition says: again and again the best pair, the leftmost of equals. cut[0..n]
   are the ends of the symbols; returns the new n. */
static size_t slow_merge(const toy *t, const char *text, size_t *cut, size_t n)
{
    for (;;) {
        size_t i, best = n;
        double value, best_value = 0;
        for (i = 0; i + 2 <= n; i++) {
            if (!worth(t, text, cut, i, &value)) continue;
            if (best < n && value <= best_value) continue;
            best = i;
            best_value = value;
        }
        if (best == n) return n;
        memmove(cut + best + 1, cut + best + 2, (n - best - 1) * sizeof *cut);
        n--;
    }
}

/* A random token from the alphabet, or two tokens joined. */
static void random_piece(toy *t, const char *const *alphabet, size_t n, uint64_t *state,
    size_t first)
{
    char text[64] = "";
    size_t i, parts = 2 + model_random(state) % 2;
    for (i = 0; i < parts; i++) {
        size_t have = t->n_tokens - first;
        const char *part = alphabet[model_random(state) % n];
        if (have && model_random(state) % 2)
            part = t->tokens[first + model_random(state) % have].text;
        if (strlen(text) + strlen(part) < 30) strcat(text, part);
    }
    add(t, text, -(float)(model_random(state) % 4), NORMAL);
}

static void check_against_slow(toy *t, const char *text, const size_t *ends, size_t n)
{
    size_t cut[600], i, want = 0;
    memcpy(cut, ends, (n + 1) * sizeof *cut);
    n = slow_merge(t, text, cut, n);
    encode(t, text, cut[n], 0);
    for (i = 0; i < n; i++) {
        int id = first_token(t, text + cut[i], cut[i + 1] - cut[i]);
        if (want < t->n_ids && id >= 0 && t->ids[want] == id) want++;
        else fail_msg("symbol %u of %u: token %d, not %d", (unsigned)i, (unsigned)n,
            want < t->n_ids ? (int)t->ids[want] : -1, id);
    }
    assert_int_equal(want, t->n_ids);
}

static void spm_equals_the_slow_reference(void **unused)
{
    static const char *const alphabet[] = { "a", "b", "c", "\xc3\xa9", "\xe4\xb8\xad" };
    uint64_t state = 11;
    int round, k;
    (void)unused;
    for (round = 0; round < 40; round++) {
        toy t;
        size_t i;
        spm_start(&t, 1);
        t.space = 0;
        for (i = 0; i < COUNT(alphabet); i++) add(&t, alphabet[i], -5, NORMAL);
        for (i = 0; i < 4 + (size_t)round; i++)
            random_piece(&t, alphabet, COUNT(alphabet), &state, t.n_tokens - i);
        toy_open(&t);
        for (k = 0; k < 12; k++) {
            char text[2048] = "";
            size_t ends[600], n = model_random(&state) % (k == 0 ? 500 : 40);
            size_t kinds = 1 + model_random(&state) % COUNT(alphabet);
            ends[0] = 0;
            for (i = 0; i < n; i++) {
                strcat(text, alphabet[model_random(&state) % kinds]);
                ends[i + 1] = strlen(text);
            }
            check_against_slow(&t, text, ends, n);
        }
        toy_close(&t);
    }
}

static void bpe_equals_the_slow_reference(void **unused)
{
    static const char *const alphabet[] = { "a", "b", "c", "d" };
    uint64_t state = 12;
    int round, k;
    (void)unused;
    for (round = 0; round < 40; round++) {
        toy t;
        static char lines[600][140];
        size_t i;
        bytes_start(&t, "gpt-2", "");
        for (i = 0; i < 3 + (size_t)round; i++)
            random_piece(&t, alphabet, COUNT(alphabet), &state, t.n_tokens - i);
        for (i = 256; i < t.n_tokens && t.n_merges < COUNT(lines); i++) {
            size_t cut = 1 + model_random(&state) % (t.tokens[i].size - 1);
            snprintf(lines[t.n_merges], sizeof lines[0], "%.*s %s", (int)cut, t.tokens[i].text,
                t.tokens[i].text + cut);
            t.merges[t.n_merges] = lines[t.n_merges];
            t.n_merges++;
        }
        toy_open(&t);
        for (k = 0; k < 12; k++) {
            char text[600] = "";
            size_t ends[600], n = model_random(&state) % (k == 0 ? 500 : 40);
            for (i = 0; i < n; i++) strcat(text, alphabet[model_random(&state) % COUNT(alphabet)]);
            for (i = 0; i <= n; i++) ends[i] = i;
            check_against_slow(&t, text, ends, n);
        }
        toy_close(&t);
    }
}

/* ---- any bytes ---- */

static void spm_vocabulary(toy *t)
{
    spm_start(t, 1);
    add(t, MARK, -1, NORMAL);
    add(t, "a", -2, NORMAL);
    add(t, MARK "a", -3, NORMAL);
    add(t, MARK MARK, -4, NORMAL);
    add(t, "\xc3\xa9", -5, NORMAL);
    add(t, "hello", -6, USER);
    add(t, "<|eot|>", 0, CONTROL);
    add(t, "<|", 0, CONTROL);
    add(t, "<|x|>", 0, USER);
}

static void bytes_vocabulary(toy *t)
{
    bytes_start(t, "llama-bpe", "");
    add(t, "\xc4\xa0" "a", 0, NORMAL);
    add(t, "\xc3\x83\xc2\xa9", 0, NORMAL);      /* c3 a9 as characters */
    t->merges[t->n_merges++] = "\xc4\xa0 a";
    t->merges[t->n_merges++] = "\xc3\x83 \xc2\xa9";
    add(t, "hello", 0, USER);
    t->eos = add(t, "<|eot|>", 0, CONTROL);
    add(t, "<|", 0, CONTROL);
    add(t, "<|x|>", 0, USER);
}

/* All strings of one and two bytes, all of three over the critical bytes, and longer odd ones. The
   mark for a space is the one text that SPM cannot bring back; no string of this test holds it. */
static void check_all_bytes(toy *t)
{
    static const unsigned char critical[] = {
        0x00, 0x20, 0x61, 0x7f, 0x80, 0xa0, 0xbf, 0xc0, 0xc2, 0xc3, 0xe0, 0xe2, 0xed, 0xf0, 0xf4,
        0xff
    };
    static const char *const odd[] = {
        "\xf0\x9f\x98", "\xf0\x9f\x98 a", "\xe2\x96", " \xe2\x96 ", "\xed\xa0\x80",
        "\xf4\x90\x80\x80", "\xc0\xaf", "\xe4\xb8\xad\xe4\xb8", "\xf8\x88\x80\x80\x80",
        "a\xc3" "a\xc3\xa9", "<0x41>",
        "\xff" "hello", "<s>", "</s>", "<unk>", "<|eot|>", "<|x|>", "<|<|eot|>", "\n\n\t\r\n "
    };
    unsigned char text[3];
    size_t i, j, k;
    for (i = 0; i < 256; i++) {
        text[0] = (unsigned char)i;
        ROUND_TRIP(t, text, 1);
        for (j = 0; j < 256; j++) {
            text[1] = (unsigned char)j;
            ROUND_TRIP(t, text, 2);
        }
    }
    for (i = 0; i < 16 * 16 * 16; i++) {
        for (k = 0; k < 3; k++) text[k] = critical[i >> (4 * k) & 15];
        ROUND_TRIP(t, text, 3);
    }
    for (i = 0; i < COUNT(odd); i++) ROUND_TRIP(t, odd[i], strlen(odd[i]));
    ROUND_TRIP(t, "a\0b\0\0", 5);
    ROUND_TRIP(t, "", 0);
}

static void byte_fallback_brings_any_bytes_back(void **unused)
{
    toy t;
    (void)unused;
    spm_vocabulary(&t);
    toy_open(&t);
    SPELLED(&t, "\xc3\xa9", 0, MARK "|\xc3\xa9");
    SPELLED(&t, "z\xe4\xb8", 0, MARK "|<0x7A>|<0xE4>|<0xB8>");
    SPELLED(&t, "<0x41>", 0, MARK "|<0x3C>|<0x30>|<0x78>|<0x34>|<0x31>|<0x3E>");
    check_all_bytes(&t);
    toy_close(&t);
    spm_start(&t, 1);                           /* not even the mark has a token */
    toy_open(&t);
    SPELLED(&t, "a b", 0, "<0x20>|<0x61>|<0x20>|<0x62>");
    check_all_bytes(&t);
    toy_close(&t);
}

static void byte_level_brings_any_bytes_back(void **unused)
{
    toy t;
    (void)unused;
    bytes_vocabulary(&t);
    toy_open(&t);
    check_all_bytes(&t);
    ROUND_TRIP(&t, "hello\xff<|x|>hello \xe2\x96\x81", 20);
    toy_close(&t);
}

/* Bytes without a token: the characters that need them become U+FFFD, each ill-formed part one. */
static void missing_bytes_become_replacement_characters(void **unused)
{
    static const struct {
        const char *text, *want;
    } cases[] = {
        { "a\xff z", "a\xef\xbf\xbd z" }, { "\xf1\x80\x80\x80", "\xef\xbf\xbd" },
        { "\xe2\x82\x80\x80", "\xe2\x82\x80\xef\xbf\xbd" }, { "\xc3\xa9", "\xc3\xa9" },
        { "\xf0\x9f\x98" "a", "\xef\xbf\xbd" "a" }, { "\xff\xfe", "\xef\xbf\xbd\xef\xbf\xbd" }
    };
    toy t;
    size_t i;
    (void)unused;
    bytes_start(&t, "gpt-2", "\xf1\xff");
    toy_open(&t);
    for (i = 0; i < COUNT(cases); i++)
        check_round_trip(&t, cases[i].text, strlen(cases[i].text), 0, cases[i].want,
            strlen(cases[i].want));
    toy_close(&t);
}

static void unknown_text_gives_one_unknown_token(void **unused)
{
    toy t;
    size_t n = 7;
    (void)unused;
    spm_start(&t, 0);
    t.space = 0;
    add(&t, "a", 0, NORMAL);
    add(&t, "<0x7A>", 0, BYTE);
    toy_open(&t);
    SPELLED(&t, "axyz a", 0, "a|<unk>|<0x7A>|<unk>|a");
    SPELLED(&t, "\xc3\xa9\xe4\xb8\xad\xff", 0, "<unk>");
    SPELLED(&t, "x<s>x", SPECIAL_PARSE, "<unk>|<s>|<unk>");
    toy_close(&t);
    spm_start(&t, 0);
    t.unk = -1;
    add(&t, "a", 0, NORMAL);
    toy_open(&t);
    FAILS(KVC_ERROR_UNSUPPORTED, "tokenizer.ggml.unknown_token_id",
        kvc__vocab_tokenize(&t.v, &t.a, "ab", 2, 0, t.ids, 9, &n, NULL, &last));
    assert_int_equal(n, 0);
    toy_close(&t);
}

/* ---- the caller's buffer, memory ---- */

static void capacity_protocol(void **unused)
{
    static const char text[] = "a aa hello <|eot|> \xc3\xa9 zz";
    int family;
    (void)unused;
    for (family = 0; family < 2; family++) {
        toy t;
        kvc_token full[64], some[64];
        size_t need, n, cap;
        const size_t size = sizeof text - 1;
        if (family) bytes_vocabulary(&t);
        else spm_vocabulary(&t);
        toy_open(&t);
        OK(kvc__vocab_tokenize(&t.v, &t.a, text, size, 3, full, 64, &need, NULL, &last));
        assert_true(need > 8);
        for (cap = 0; cap <= need + 1; cap++) {
            memset(some, 0x11, sizeof some);
            if (cap < need)
                FAILS(KVC_ERROR_SPACE, "tokens_cap", kvc__vocab_tokenize(&t.v, &t.a, text, size, 3,
                    cap ? some : NULL, cap, &n, NULL, &last));
            else
                OK(kvc__vocab_tokenize(&t.v, &t.a, text, size, 3, some, cap, &n, NULL, &last));
            assert_int_equal(n, need);
            assert_memory_equal(some, full, (cap < need ? cap : need) * sizeof *full);
            assert_int_equal(some[cap < need ? cap : need], 0x11111111);
        }
        OK(kvc__vocab_tokenize(&t.v, &t.a, NULL, 0, 0, NULL, 0, &n, NULL, NULL));
        assert_int_equal(n, 0);
        toy_close(&t);
    }
}

static void *fill(const char *pattern, size_t size)
{
    size_t i, n = strlen(pattern);
    char *text = (char *)gguf_must(malloc(size + n));
    for (i = 0; i < size; i++) text[i] = pattern[i % n];
    return text;
}

/* Short text asks for nothing; with work memory no text does. */
static void memory_is_asked_for_only_by_long_stretches(void **unused)
{
    static const char *const patterns[] = { "a", " ", "\xc3\xa9", "\xff", "aa ", "hello" };
    int family;
    size_t i, at, n, before;
    (void)unused;
    for (family = 0; family < 3; family++) {
        toy t;
        if (family == 0) spm_vocabulary(&t);
        if (family == 1) bytes_vocabulary(&t);
        if (family == 2) bytes_start(&t, "gpt-2", "\xff");
        add(&t, "aa", 0, NORMAL);           /* so that a run of a has no place to cut */
        toy_open(&t);
        for (i = 0; i < COUNT(patterns); i++) {
            char *text = (char *)fill(patterns[i], 5000);
            kvc_memory work;
            before = t.mem.n_allocs;
            FAILS(KVC_ERROR_SPACE, NULL, kvc__vocab_tokenize(&t.v, &t.a, text, 100, 0, NULL, 0, &n,
                NULL, &last));
            assert_int_equal(t.mem.n_allocs, before);
            work.size = kvc__vocab_work_size(&t.v, 5000);
            for (at = 0; at < 9; at += 4) {         /* any alignment will do */
                char *block = (char *)gguf_must(malloc(work.size + at));
                work.ptr = block + at;
                FAILS(KVC_ERROR_SPACE, NULL, kvc__vocab_tokenize(&t.v, &t.a, text, 5000, 0, NULL, 0,
                    &n, &work, &last));
                assert_int_equal(t.mem.n_allocs, before);
                free(block);
            }
            free(text);
        }
        toy_close(&t);
    }
}

static void long_stretch_makes_one_alloc(void **unused)
{
    toy t;
    size_t n, allocs, bytes;
    char *text = (char *)fill("a", 9000), small[64];
    kvc_memory work;
    (void)unused;
    bytes_vocabulary(&t);
    add(&t, "aa", 0, NORMAL);
    t.merges[t.n_merges++] = "a a";
    toy_open(&t);
    text[3000] = text[6000] = ' ';
    allocs = t.mem.n_allocs;
    bytes = t.mem.bytes;
    work.ptr = small;
    work.size = sizeof small;                       /* too small: as if there were none */
    FAILS(KVC_ERROR_SPACE, NULL,
        kvc__vocab_tokenize(&t.v, &t.a, text, 9000, 0, NULL, 0, &n, &work, &last));
    assert_int_equal(t.mem.n_allocs - allocs, 3);
    assert_int_equal(t.mem.bytes, bytes);
    t.mem.fail_at = t.mem.n_allocs + 2;
    FAILS(KVC_ERROR_MEMORY, NULL,
        kvc__vocab_tokenize(&t.v, &t.a, text, 9000, 0, NULL, 0, &n, NULL, &last));
    assert_int_equal(n, 0);
    assert_int_equal(t.mem.bytes, bytes);
    free(text);
    toy_close(&t);
}

static void open_survives_every_failed_alloc(void **unused)
{
    toy t;
    (void)unused;
    bytes_vocabulary(&t);
    toy_open(&t);
    kvc__vocab_close(&t.v, &t.a);
    t.mem.fail_at = t.mem.n_allocs + 1;
    FAILS(KVC_ERROR_MEMORY, NULL, kvc__vocab_open(&t.v, &t.gguf, 1000, &t.a, &last));
    OK(kvc__vocab_open(&t.v, &t.gguf, 1000, &t.a, &last));
    toy_close(&t);
}

/* ---- special tokens ---- */

static void control_tokens_only_when_asked_for(void **unused)
{
    int family;
    (void)unused;
    for (family = 0; family < 2; family++) {
        toy t;
        size_t i;
        if (family) bytes_vocabulary(&t);
        else spm_vocabulary(&t);
        toy_open(&t);
        encode(&t, "<|eot|>a<s></s><unk><|", 22, 0);
        for (i = 0; i < t.n_ids; i++) {
            kvc_token_kind kind = KVC_TOKEN_CONTROL;
            size_t size;
            assert_non_null(kvc__vocab_spelling(&t.v, t.ids[i], &size, &kind));
            assert_true(kind == KVC_TOKEN_NORMAL || kind == KVC_TOKEN_BYTE);
        }
        SPELLED(&t, "<|eot|>", SPECIAL_PARSE, "<|eot|>");
        SPELLED(&t, "<|x|><|eot|><|<|eot|>", SPECIAL_PARSE, "<|x|>|<|eot|>|<||<|eot|>");
        SPELLED(&t, "hello<|x|>hello", 0, "hello|<|x|>|hello");
        toy_close(&t);
    }
}

/* Even where the merges would build the control token's spelling. */
static void merges_never_make_a_control_token(void **unused)
{
    toy t;
    (void)unused;
    spm_start(&t, 1);
    t.space = 0;
    add(&t, "<", -1, NORMAL);
    add(&t, "s", -1, NORMAL);
    add(&t, ">", -1, NORMAL);
    add(&t, "<s", -1, NORMAL);
    toy_open(&t);
    SPELLED(&t, "<s>", 0, "<s|>");
    SPELLED(&t, "<s>", SPECIAL_PARSE, "<s>");
    assert_int_equal(t.ids[0], t.bos);
    toy_close(&t);
    bytes_start(&t, "llama-bpe", "");
    add(&t, "<s", 0, NORMAL);
    t.bos = add(&t, "<s>", 0, CONTROL);
    t.merges[t.n_merges++] = "< s";
    t.merges[t.n_merges++] = "<s >";
    toy_open(&t);
    SPELLED(&t, "<s>", 0, "<s|>");
    SPELLED(&t, "<s>", SPECIAL_PARSE, "<s>");
    toy_close(&t);
}

static void longest_special_wins_and_first_of_equals(void **unused)
{
    toy t;
    int ab, abcd;
    (void)unused;
    bytes_start(&t, "gpt-2", "");
    ab = add(&t, "ab", 0, USER);
    add(&t, "bcde", 0, USER);
    abcd = add(&t, "abcd", 0, USER);
    add(&t, "abcd", 0, CONTROL);
    add(&t, "ab", 0, USER);
    add(&t, "", 0, USER);
    toy_open(&t);
    encode(&t, "abcdeabcab", 10, 0);        /* abcd, then e; ab, then c; ab */
    assert_int_equal(t.n_ids, 5);
    assert_int_equal(t.ids[0], abcd);
    assert_int_equal(t.ids[1], 'e');
    assert_int_equal(t.ids[2], ab);
    assert_int_equal(t.ids[3], 'c');
    assert_int_equal(t.ids[4], ab);
    encode(&t, "xbcdeabc", 8, SPECIAL_PARSE);   /* x, bcde, ab, c */
    assert_int_equal(t.n_ids, 4);
    toy_close(&t);
}

static void phi3_drops_space_after_special_tokens(void **unused)
{
    toy t;
    (void)unused;
    spm_vocabulary(&t);
    t.architecture = "phi3";
    toy_open(&t);
    SPELLED(&t, "<|eot|>\n\t a", SPECIAL_PARSE, "<|eot|>|" MARK "a");
    SPELLED(&t, "<|eot|> \n", SPECIAL_PARSE, "<|eot|>");
    SPELLED(&t, "<s> a", SPECIAL_PARSE, "<s>|" MARK "|" MARK "a");
    SPELLED(&t, "hello  a", 0, "hello|" MARK "a");
    toy_close(&t);
}

static void bos_and_eos_follow_the_metadata(void **unused)
{
    static const struct {
        int spm;
        const char *pre;
        int bos, add_bos, want;
    } cases[] = {
        { 1, "default", 1, -1, 1 }, { 1, "default", 1, 0, 0 }, { 1, "default", 0, 1, 0 },
        { 0, "gpt-2", 1, -1, 0 }, { 0, "gpt-2", 1, 1, 1 }, { 0, "llama-bpe", 1, -1, 1 },
        { 0, "llama-bpe", 1, 0, 0 }, { 0, "llama-bpe", 0, -1, 0 }
    };
    size_t i;
    (void)unused;
    for (i = 0; i < COUNT(cases); i++) {
        toy t;
        if (cases[i].spm) spm_vocabulary(&t);
        else bytes_vocabulary(&t);
        t.pre = cases[i].pre;
        t.bos = cases[i].bos ? 1 : -1;
        t.add_bos = cases[i].add_bos;
        toy_open(&t);
        assert_int_equal(t.v.bos, cases[i].bos ? 1 : KVC_NO_TOKEN);
        assert_int_equal(t.v.add_bos, cases[i].want);
        assert_int_equal(t.v.add_eos, 0);
        encode(&t, "", 0, SPECIAL_ADD);
        assert_int_equal(t.n_ids, cases[i].want);
        encode(&t, "", 0, 0);
        assert_int_equal(t.n_ids, 0);
        toy_close(&t);
    }
}

static void ends_are_those_of_the_metadata(void **unused)
{
    static const uint32_t ends[] = { 5, 7 };
    toy t;
    gguf_writer *w = &t.writer;
    kvc_token id;
    (void)unused;
    spm_start(&t, 1);
    gguf_start(w, 3, 32);
    gguf_meta_string(w, "tokenizer.ggml.model", "llama");
    toy_write_strings(w, "tokenizer.ggml.tokens", &t);
    toy_write_numbers(w, &t);
    gguf_meta_u32(w, "tokenizer.ggml.eos_token_id", 2);
    gguf_meta_u32(w, "tokenizer.ggml.eot_token_id", 3);
    gguf_meta_number(w, "tokenizer.ggml.add_eos_token", GGUF_VALUE_BOOL, 1);
    gguf_meta_array(w, "tokenizer.ggml.eog_token_ids", GGUF_VALUE_U32, 2, ends);
    gguf_finish(w);
    memset(&t.mem, 0, sizeof t.mem);
    t.a = counter_hook(&t.mem);
    OK(kvc__gguf_open(&t.gguf, w->image, w->image_size, &t.a, &last));
    OK(kvc__vocab_open(&t.v, &t.gguf, 1000, &t.a, &last));
    for (id = -2; id < 300; id++)
        assert_int_equal(kvc__vocab_is_end(&t.v, id), id == 2 || id == 3 || id == 5 || id == 7);
    assert_int_equal(t.v.eot, 3);
    encode(&t, "a", 1, SPECIAL_ADD);
    assert_int_equal(t.ids[t.n_ids - 1], 2);
    toy_close(&t);
}

/* ---- spaces and streams ---- */

static void leading_spaces_come_back(void **unused)
{
    int space, n, where;
    (void)unused;
    for (space = -1; space <= 1; space++) {
        toy t;
        spm_vocabulary(&t);
        t.space = space;
        toy_open(&t);
        for (n = 0; n <= 5; n++) {
            char text[96], want[64];
            snprintf(want, sizeof want, "%*sa a", n, "");
            ROUND_TRIP(&t, want, strlen(want));
            check_round_trip(&t, want, strlen(want), SPECIAL_ADD, want, strlen(want));
            for (where = 0; where < 2; where++) {       /* after a control token, twice */
                snprintf(text, sizeof text, "<|eot|>%s%s", where ? "<s>" : "", want);
                check_round_trip(&t, text, strlen(text), SPECIAL_PARSE, want, strlen(want));
            }
        }
        toy_close(&t);
    }
}

static void only_the_space_that_was_added_is_dropped(void **unused)
{
    toy t;
    char out[32];
    kvc_token ids[4];
    (void)unused;
    spm_vocabulary(&t);
    toy_open(&t);
    encode(&t, " a", 2, 0);
    assert_int_equal(decode(&t, t.ids, t.n_ids, stream_of(0, 1), out, sizeof out), 3);
    assert_memory_equal(out, "  a", 3);                 /* kept on request */
    encode(&t, "hello a", 7, 0);
    assert_int_equal(decode(&t, t.ids, t.n_ids, stream_of(0, 0), out, sizeof out), 8);
    assert_memory_equal(out, "hello  a", 8);            /* the encoder added one in mid-text */
    ids[0] = t.bos;
    ids[1] = t.ids[t.n_ids - 1];                        /* MARK MARK or a */
    assert_int_equal(decode(&t, ids, 1, stream_of(1, 0), out, sizeof out), 3);
    assert_memory_equal(out, "<s>", 3);
    encode(&t, "a", 1, 0);
    ids[1] = t.ids[0];
    assert_int_equal(decode(&t, ids, 2, stream_of(1, 0), out, sizeof out), 5);
    assert_memory_equal(out, "<s> a", 5);
    assert_int_equal(decode(&t, ids, 2, stream_of(0, 0), out, sizeof out), 1);
    ids[0] = 3 + ' ';                                   /* the byte token of a space is content */
    assert_int_equal(decode(&t, ids, 1, stream_of(0, 0), out, sizeof out), 1);
    toy_close(&t);
}

/* What each push puts out: whole characters, and bad bytes as soon as they are certain. */
static void stream_gives_whole_characters(void **unused)
{
    static const struct {
        const char *bytes;
        const char *parts[8];
    } cases[] = {
        { "\xe2\x82\xac", { "", "", "\xe2\x82\xac" } },
        { "\xf0\x9f\x98\x80", { "", "", "", "\xf0\x9f\x98\x80" } },
        { "\xe2\x82" "a", { "", "", "\xe2\x82" "a" } },
        { "\xff" "a", { "\xff", "a" } },
        { "\x80\xc3\xa9", { "\x80", "", "\xc3\xa9" } },
        { "\xc3\xc3\xa9", { "", "\xc3", "\xc3\xa9" } },
        { "\xe0\x80\x80", { "", "\xe0\x80", "\x80" } },
        { "\xed\xa0\x80", { "", "\xed\xa0", "\x80" } },
        { "\xf4\x90\x80", { "", "\xf4\x90", "\x80" } },
        { "\xf0\x9f\xf0\x9f\x98\x80", { "", "", "\xf0\x9f", "", "", "\xf0\x9f\x98\x80" } }
    };
    toy t;
    size_t i, k, n;
    (void)unused;
    bytes_vocabulary(&t);
    toy_open(&t);
    for (i = 0; i < COUNT(cases); i++) {
        kvc_text_stream s = stream_of(0, 0), copy;
        for (k = 0; k < strlen(cases[i].bytes); k++) {
            kvc_token id = (unsigned char)cases[i].bytes[k];
            const char *want = cases[i].parts[k];
            char out[16];
            copy = s;
            if (*want) {
                FAILS(KVC_ERROR_SPACE, "buf_cap", kvc__vocab_push(&t.v, &s, id, out,
                    strlen(want) - 1, &n, &last));
                assert_int_equal(n, strlen(want));
                assert_memory_equal(&s, &copy, sizeof s);       /* nothing changed */
            }
            OK(kvc__vocab_push(&t.v, &s, id, out, strlen(want), &n, &last));
            assert_int_equal(n, strlen(want));
            assert_memory_equal(out, want, n);
            OK(kvc__vocab_push(&t.v, &copy, id, out, sizeof out, &n, &last));    /* a branch */
            assert_int_equal(n, strlen(want));
        }
        assert_int_equal(s.n_held, 0);
    }
    toy_close(&t);
}

/* A token of several characters that ends in mid-character; hidden tokens between. */
static void stream_holds_across_tokens(void **unused)
{
    toy t;
    kvc_text_stream s = stream_of(0, 0);
    char out[32];
    size_t n;
    kvc_token id;
    (void)unused;
    bytes_vocabulary(&t);
    id = add(&t, "ab\xc3\xa2\xc4\xa4", 0, NORMAL);       /* a b e2 82 */
    toy_open(&t);
    OK(kvc__vocab_push(&t.v, &s, id, out, sizeof out, &n, &last));
    assert_int_equal(n, 2);
    OK(kvc__vocab_push(&t.v, &s, t.eos, out, 0, &n, &last));
    assert_int_equal(n, 0);
    OK(kvc__vocab_push(&t.v, &s, 0xac, out, sizeof out, &n, &last));
    assert_int_equal(n, 3);
    assert_memory_equal(out, "\xe2\x82\xac", 3);
    OK(kvc__vocab_push(&t.v, &s, 0xe2, out, sizeof out, &n, &last));
    s.show_control = 1;
    OK(kvc__vocab_push(&t.v, &s, t.eos, out, sizeof out, &n, &last));
    assert_int_equal(n, 8);
    assert_memory_equal(out, "\xe2<|eot|>", 8);
    OK(kvc__vocab_push(&t.v, &s, 0xe2, out, sizeof out, &n, &last));
    assert_int_equal(kvc_text_end(&s, out), 1);
    toy_close(&t);
}

static void push_refuses_what_is_no_id(void **unused)
{
    static const kvc_token wrong[] = { -1, INT32_MIN, 1000, INT32_MAX };
    toy t;
    kvc_text_stream s = stream_of(0, 0);
    char out[8];
    size_t n, i, size = 1;
    (void)unused;
    spm_vocabulary(&t);
    t.n_rows = 1000;
    toy_open(&t);
    for (i = 0; i < COUNT(wrong); i++) {
        FAILS(KVC_ERROR_ARGUMENT, "token", kvc__vocab_push(&t.v, &s, wrong[i], out, 8, &n, &last));
        assert_null(kvc__vocab_spelling(&t.v, wrong[i], &size, NULL));
        assert_int_equal(size, 0);
    }
    OK(kvc__vocab_push(&t.v, &s, 999, out, 0, &n, &last));       /* padding says nothing */
    assert_int_equal(n, 0);
    assert_null(kvc__vocab_spelling(&t.v, 999, &size, NULL));
    FAILS(KVC_ERROR_ARGUMENT, "buf", kvc__vocab_push(&t.v, &s, 10, NULL, 8, &n, &last));
    s.n_held = 4;
    FAILS(KVC_ERROR_ARGUMENT, "stream", kvc__vocab_push(&t.v, &s, 10, out, 8, &n, &last));
    toy_close(&t);
}

/* ---- files ---- */

static void check_refused(int spm, const gguf_edit *edit, kvc_result code, const char *where)
{
    toy t;
    if (spm) spm_vocabulary(&t);
    else bytes_vocabulary(&t);
    t.edits = edit;
    t.n_edits = 1;
    FAILS(code, where ? where : edit->name, toy_try(&t));
    assert_null(t.v.block);
    kvc__gguf_close(&t.gguf, &t.a);
    CLEAN(&t.mem);
    gguf_free(&t.writer);
    free(t.tokens);
}

#define KEY(name) "tokenizer.ggml." name
#define OMIT(name) { KEY(name), GGUF_EDIT_OMIT, 0, 0, NULL, 0, { 0, 0, 0, 0 } }
#define NUMBER(name, type, number) \
    { KEY(name), GGUF_EDIT_NUMBER, GGUF_VALUE_##type, number, NULL, 0, { 0, 0, 0, 0 } }
#define TEXT(name, text) { KEY(name), GGUF_EDIT_TEXT, 0, 0, text, 0, { 0, 0, 0, 0 } }
#define ARRAY(name, type, n) \
    { KEY(name), GGUF_EDIT_ARRAY, GGUF_VALUE_##type, n, NULL, 0, { 0, 0, 0, 0 } }

static void hostile_metadata_is_refused_by_name(void **unused)
{
    static const gguf_edit both[] = {
        OMIT("model"), OMIT("tokens"), NUMBER("model", U32, 1), ARRAY("model", STRING, 1),
        TEXT("tokens", "a"), ARRAY("tokens", U32, 300), ARRAY("tokens", STRING, 0),
        NUMBER("pre", U32, 0), ARRAY("pre", STRING, 1),
        NUMBER("scores", F32, 1), ARRAY("scores", F64, 268), ARRAY("scores", F32, 2),
        NUMBER("token_type", I32, 1), ARRAY("token_type", F32, 268), ARRAY("token_type", I32, 2),
        ARRAY("token_type", I32, 0), TEXT("merges", "a b"), ARRAY("merges", U32, 2),
        ARRAY("bos_token_id", U32, 1), TEXT("bos_token_id", "1"), NUMBER("bos_token_id", F32, 1),
        NUMBER("bos_token_id", BOOL, 1), NUMBER("bos_token_id", U32, 268),
        NUMBER("eos_token_id", U64, 1e15), NUMBER("eos_token_id", I32, -2),
        NUMBER("eot_token_id", U32, 4294967294.0), NUMBER("eom_token_id", I64, -1e15),
        NUMBER("unknown_token_id", U32, 1e9), NUMBER("eog_token_ids", U32, 1),
        ARRAY("eog_token_ids", STRING, 1), NUMBER("add_bos_token", U32, 1),
        TEXT("add_eos_token", "true"), NUMBER("add_space_prefix", U8, 1)
    };
    static const gguf_edit spm[] = { OMIT("scores") };
    static const gguf_edit bytes[] = { OMIT("merges"), ARRAY("merges", STRING, 1) };
    size_t i;
    (void)unused;
    for (i = 0; i < COUNT(both); i++) {
        check_refused(1, &both[i], KVC_ERROR_FORMAT, NULL);
        check_refused(0, &both[i], KVC_ERROR_FORMAT, NULL);
    }
    for (i = 0; i < COUNT(spm); i++) check_refused(1, &spm[i], KVC_ERROR_FORMAT, NULL);
    for (i = 0; i < COUNT(bytes); i++) check_refused(0, &bytes[i], KVC_ERROR_FORMAT, NULL);
}

static void check_bad_toy(toy *t, const char *where)
{
    FAILS(KVC_ERROR_FORMAT, where, toy_try(t));
    kvc__gguf_close(&t->gguf, &t->a);
    CLEAN(&t->mem);
    gguf_free(&t->writer);
    free(t->tokens);
}

static void hostile_values_are_refused_by_name(void **unused)
{
    static const char *const merges[] = { "ab", "", " ", "a ", " a", "\xc4\xa0" };
    toy t;
    size_t i;
    (void)unused;
    for (i = 0; i < COUNT(merges); i++) {
        bytes_vocabulary(&t);
        t.merges[t.n_merges++] = merges[i];
        check_bad_toy(&t, "tokenizer.ggml.merges");
    }
    spm_vocabulary(&t);
    t.tokens[270 - 10].score = NAN;
    check_bad_toy(&t, "tokenizer.ggml.scores");
    spm_vocabulary(&t);
    t.tokens[9].kind = 7;
    check_bad_toy(&t, "tokenizer.ggml.token_type");
    spm_vocabulary(&t);
    t.tokens[9].kind = -1;
    check_bad_toy(&t, "tokenizer.ggml.token_type");
    spm_vocabulary(&t);
    t.n_rows = (uint32_t)t.n_tokens - 1;
    check_bad_toy(&t, "tokenizer.ggml.tokens");
}

/* Odd, but found in real files: the first of equal strings counts, empty ones say nothing, scores
   may be infinite, -1 is no token, a type of 0 is a normal token. */
static void odd_files_are_tolerated(void **unused)
{
    static const gguf_edit edits[] = { NUMBER("bos_token_id", U32, 4294967295.0),
        NUMBER("eos_token_id", I32, -1), NUMBER("eot_token_id", U64, 2) };
    toy t;
    int first;
    (void)unused;
    spm_start(&t, 1);
    t.space = 0;
    first = add(&t, "a", -1, 0);
    add(&t, "a", 5, NORMAL);
    add(&t, "", 5, NORMAL);
    add(&t, "", 0, USER);
    add(&t, "b", -INFINITY, NORMAL);
    add(&t, "ab", INFINITY, NORMAL);
    add(&t, "ba", -INFINITY, NORMAL);
    add_bytes(&t, "a\0b", 3, 0, NORMAL);
    add_bytes(&t, "\xff\xc3", 2, 0, NORMAL);
    t.edits = edits;
    t.n_edits = COUNT(edits);
    t.n_rows = (uint32_t)t.n_tokens;
    toy_open(&t);
    assert_int_equal(t.v.bos, KVC_NO_TOKEN);
    assert_int_equal(t.v.eos, KVC_NO_TOKEN);
    assert_int_equal(t.v.eot, 2);
    SPELLED(&t, "bab", 0, "b|ab");
    SPELLED(&t, "bb", 0, "b|b");
    encode(&t, "a", 1, 0);
    assert_int_equal(t.ids[0], first);
    check_all_bytes(&t);
    toy_close(&t);
}

static void untyped_files_take_the_ids_of_the_metadata(void **unused)
{
    toy t;
    kvc_token_kind kind;
    size_t size;
    (void)unused;
    spm_vocabulary(&t);
    t.no_types = 1;
    toy_open(&t);
    kvc__vocab_spelling(&t.v, t.bos, &size, &kind);
    assert_int_equal(kind, KVC_TOKEN_CONTROL);
    kvc__vocab_spelling(&t.v, t.unk, &size, &kind);
    assert_int_equal(kind, KVC_TOKEN_UNKNOWN);
    kvc__vocab_spelling(&t.v, 3 + 'a', &size, &kind);
    assert_int_equal(kind, KVC_TOKEN_BYTE);
    encode(&t, "</s>", 4, 0);
    assert_true(t.n_ids > 1);
    encode(&t, "</s>", 4, SPECIAL_PARSE);
    assert_int_equal(t.n_ids, 1);
    ROUND_TRIP(&t, "a z\xff", 4);
    toy_close(&t);
}

static void unknown_tokenizers_are_named(void **unused)
{
    toy t;
    size_t n, size;
    kvc_text_stream s = stream_of(0, 0);
    char out[8];
    (void)unused;
    bytes_vocabulary(&t);
    t.pre = "tomorrow\x1b";
    toy_open(&t);
    FAILS(KVC_ERROR_UNSUPPORTED, "tokenizer.ggml.pre",
        kvc__vocab_tokenize(&t.v, &t.a, "a", 1, 0, t.ids, 9, &n, NULL, &last));
    assert_non_null(strstr(last.message, "tomorrow?"));
    assert_int_equal(kvc__vocab_tokenize(&t.v, &t.a, "a", 1, 0, t.ids, 9, &n, NULL, NULL),
        KVC_ERROR_UNSUPPORTED);
    OK(kvc__vocab_push(&t.v, &s, 'a', out, 8, &n, &last));       /* decoding needs no splits */
    assert_int_equal(n, 1);
    toy_close(&t);
    spm_vocabulary(&t);
    t.model = "unigram-of-some-kind";
    toy_open(&t);
    assert_true(t.v.has_tokenizer);
    FAILS(KVC_ERROR_UNSUPPORTED, "tokenizer.ggml.model",
        kvc__vocab_tokenize(&t.v, &t.a, "a", 1, 0, t.ids, 9, &n, NULL, &last));
    assert_non_null(strstr(last.message, "unigram-of-some-kind"));
    FAILS(KVC_ERROR_UNSUPPORTED, "tokenizer.ggml.model",
        kvc__vocab_push(&t.v, &s, 1, out, 8, &n, &last));
    assert_memory_equal(kvc__vocab_spelling(&t.v, 1, &size, NULL), "<s>", 3);
    assert_true(kvc__vocab_is_end(&t.v, t.eos));
    toy_close(&t);
}

static void no_tokenizer_is_no_error(void **unused)
{
    static const char *const models[] = { NULL, "none", "no_vocab" };
    size_t i, n, size;
    (void)unused;
    for (i = 0; i < COUNT(models); i++) {
        gguf_writer w;
        kvc__gguf g;
        kvc__vocab v;
        counter mem = { 0 };
        kvc_allocator a = counter_hook(&mem);
        gguf_start(&w, 3, 32);
        gguf_meta_u32(&w, "general.quantization_version", 2);
        if (models[i]) gguf_meta_string(&w, "tokenizer.ggml.model", models[i]);
        gguf_finish(&w);
        OK(kvc__gguf_open(&g, w.image, w.image_size, &a, &last));
        OK(kvc__vocab_open(&v, &g, 100, &a, &last));
        assert_false(v.has_tokenizer);
        assert_int_equal(v.memory_size, 0);
        v.n_tokens = 100;                   /* as a model sets it */
        FAILS(KVC_ERROR_UNSUPPORTED, "tokenizer.ggml.model",
            kvc__vocab_tokenize(&v, &a, "a", 1, 0, NULL, 0, &n, NULL, &last));
        assert_null(kvc__vocab_spelling(&v, 5, &size, NULL));
        assert_false(kvc__vocab_is_end(&v, 5));
        kvc__vocab_close(&v, &a);
        kvc__gguf_close(&g, &a);
        CLEAN(&mem);
        gguf_free(&w);
    }
}

/* ---- through the public functions ---- */

static void public_functions_check_their_arguments(void **unused)
{
    static const model_shape shape = { .n_layers = 1, .n_embd = 32, .n_ff = 32, .n_vocab = 300 };
    rig r;
    kvc_token ids[8];
    char text[4];
    size_t n = 1;
    kvc_text_stream s = stream_of(0, 0);
    (void)unused;
    rig_open(&r, &shape);
    FAILS(KVC_ERROR_ARGUMENT, "text_size",
        kvc_tokenize(r.model, "a", ((size_t)1 << 30) + 1, 0, ids, 8, &n, NULL, &last));
    assert_int_equal(n, 0);
    FAILS(KVC_ERROR_ARGUMENT, "text_size",
        kvc_tokenize(r.model, NULL, SIZE_MAX, 0, ids, 8, &n, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "text", kvc_tokenize(r.model, NULL, 1, 0, ids, 8, &n, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "tokens", kvc_tokenize(r.model, "a", 1, 0, NULL, 8, &n, NULL, &last));
    FAILS(KVC_ERROR_ARGUMENT, "flags", kvc_tokenize(r.model, "a", 1, 4, ids, 8, &n, NULL, &last));
    OK(kvc_tokenize(r.model, "ab", 2, SPECIAL_ADD, ids, 8, &n, NULL, &last));
    assert_true(n >= 2 && ids[0] == r.info.bos);
    assert_true(kvc_token_is_end(r.model, r.info.eos));
    assert_true(kvc_tokenize_work_size(r.model, 1000) > 1000);
    OK(kvc_text_push(r.model, &s, ids[0], text, 4, &n, &last));
    assert_int_equal(n, 0);
    FAILS(KVC_ERROR_ARGUMENT, "token", kvc_text_push(r.model, &s, 300, text, 4, &n, &last));
    assert_non_null(kvc_token_spelling(r.model, ids[0], &n, NULL));
    rig_close(&r);
}

/* ---- size of the work ---- */

static void run_vocabulary(toy *t, int family)
{
    size_t size;
    if (family) bytes_start(t, "gpt-2", "");
    else spm_start(t, 1);
    for (size = family ? 2 : 1; size <= 16; size *= 2) {
        char text[17] = "aaaaaaaaaaaaaaaa", line[40];
        text[size] = 0;
        add(t, text, -(float)size, NORMAL);
        snprintf(line, sizeof line, "%.*s %.*s", (int)size / 2, text, (int)size / 2, text);
        if (family) t->merges[t->n_merges++] = strcpy((char *)gguf_must(malloc(40)), line);
    }
    add(t, MARK, -20, NORMAL);
    add(t, MARK MARK, -21, NORMAL);
    add(t, "..", -22, NORMAL);
    if (family) t->merges[t->n_merges++] = strcpy((char *)gguf_must(malloc(40)), ". .");
}

static void run_vocabulary_free(toy *t)
{
    size_t i;
    for (i = 0; i < t->n_merges; i++) free((void *)(size_t)t->merges[i]);
    toy_close(t);
}

typedef struct big_job {
    toy *t;
    char *text;
    size_t size, n;
    kvc_result result;
} big_job;

static void *big_run(void *user)
{
    big_job *j = (big_job *)user;
    j->result = kvc__vocab_tokenize(&j->t->v, &j->t->a, j->text, j->size, 0, NULL, 0, &j->n, NULL,
        NULL);
    return NULL;
}

/* A stack of STACK_SIZE, or the smallest that the system grants: linked libraries may keep
   thread-local data in it. */
static pthread_t start_small(big_job *j)
{
    pthread_t thread;
    pthread_attr_t attr;
    size_t size = STACK_SIZE;
    assert_int_equal(pthread_attr_init(&attr), 0);
    do {
        assert_int_equal(pthread_attr_setstacksize(&attr, size), 0);
        size += STACK_SIZE;
    } while (pthread_create(&thread, &attr, big_run, j) != 0 && size < 64 * STACK_SIZE);
    assert_true(size < 64 * STACK_SIZE);
    pthread_attr_destroy(&attr);
    return thread;
}

/* A megabyte of one character, on a small stack, in a bounded time. */
static void uniform_text_is_no_trouble(void **unused)
{
    static const char *const patterns[] = { "a", ".", " ", "\xe4\xb8\xad" };
    int family;
    size_t i;
    (void)unused;
    for (family = 0; family < 2; family++) {
        toy t;
        run_vocabulary(&t, family);
        toy_open(&t);
        for (i = 0; i < COUNT(patterns); i++) {
            pthread_t thread;
            clock_t start = clock();
            big_job j;
            j.t = &t;
            j.size = ((size_t)1 << 20) / strlen(patterns[i]) * strlen(patterns[i]);
            j.text = (char *)fill(patterns[i], j.size);
            thread = start_small(&j);
            assert_int_equal(pthread_join(thread, NULL), 0);
            assert_int_equal(j.result, KVC_ERROR_SPACE);
            if (i == 0) assert_int_equal(j.n, ((size_t)1 << 20) / 16 + (family ? 0 : 1));
            assert_true((double)(clock() - start) / CLOCKS_PER_SEC < 20);
            free(j.text);
        }
        run_vocabulary_free(&t);
    }
}

static double fastest(toy *t, const char *text, size_t size)
{
    double best = 1e9;
    int i;
    for (i = 0; i < 3; i++) {
        clock_t start = clock();
        size_t n;
        kvc__vocab_tokenize(&t->v, &t->a, text, size, 0, NULL, 0, &n, NULL, NULL);
        if ((double)(clock() - start) < best) best = (double)(clock() - start);
    }
    return best + 1;
}

/* Sixteen times the text: sixteen times the work or somewhat more; quadratic would be 256. */
static void work_grows_with_the_text(void **unused)
{
    int family;
    (void)unused;
    for (family = 0; family < 2; family++) {
        toy t;
        char *text = (char *)fill("a", (size_t)1 << 19);
        double small, large;
        run_vocabulary(&t, family);
        toy_open(&t);
        small = fastest(&t, text, (size_t)1 << 15);
        large = fastest(&t, text, (size_t)1 << 19);
        if (large / small > 90) fail_msg("%.0f and %.0f clocks", small, large);
        free(text);
        run_vocabulary_free(&t);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(utf8_reads_every_code_point),
        cmocka_unit_test(utf8_parts_of_ill_formed_text),
        cmocka_unit_test(classes_are_those_of_the_standard),
        cmocka_unit_test(splits_follow_their_expressions),
        cmocka_unit_test(splits_cover_any_bytes),
        cmocka_unit_test(pre_table_is_sorted),
        cmocka_unit_test(spm_merges_by_score_then_leftmost),
        cmocka_unit_test(bpe_merges_by_rank_then_leftmost),
        cmocka_unit_test(whole_words_only_where_the_rule_says_so),
        cmocka_unit_test(spm_equals_the_slow_reference),
        cmocka_unit_test(bpe_equals_the_slow_reference),
        cmocka_unit_test(byte_fallback_brings_any_bytes_back),
        cmocka_unit_test(byte_level_brings_any_bytes_back),
        cmocka_unit_test(missing_bytes_become_replacement_characters),
        cmocka_unit_test(unknown_text_gives_one_unknown_token),
        cmocka_unit_test(capacity_protocol),
        cmocka_unit_test(memory_is_asked_for_only_by_long_stretches),
        cmocka_unit_test(long_stretch_makes_one_alloc),
        cmocka_unit_test(open_survives_every_failed_alloc),
        cmocka_unit_test(control_tokens_only_when_asked_for),
        cmocka_unit_test(merges_never_make_a_control_token),
        cmocka_unit_test(longest_special_wins_and_first_of_equals),
        cmocka_unit_test(phi3_drops_space_after_special_tokens),
        cmocka_unit_test(bos_and_eos_follow_the_metadata),
        cmocka_unit_test(ends_are_those_of_the_metadata),
        cmocka_unit_test(leading_spaces_come_back),
        cmocka_unit_test(only_the_space_that_was_added_is_dropped),
        cmocka_unit_test(stream_gives_whole_characters),
        cmocka_unit_test(stream_holds_across_tokens),
        cmocka_unit_test(push_refuses_what_is_no_id),
        cmocka_unit_test(hostile_metadata_is_refused_by_name),
        cmocka_unit_test(hostile_values_are_refused_by_name),
        cmocka_unit_test(odd_files_are_tolerated),
        cmocka_unit_test(untyped_files_take_the_ids_of_the_metadata),
        cmocka_unit_test(unknown_tokenizers_are_named),
        cmocka_unit_test(no_tokenizer_is_no_error),
        cmocka_unit_test(public_functions_check_their_arguments),
        cmocka_unit_test(uniform_text_is_no_trouble),
        cmocka_unit_test(work_grows_with_the_text)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
