/* npc_sdl: a town square whose people answer while everything goes on moving.

       npc_sdl [options]        npc_sdl --help lists them

   The pattern for a game of one thread and sixty frames a second. Whatever a character has to read
   or to say is a request; each frame calls kvc_run(ctx, budget), which works on all requests for
   so many microseconds and returns, in the middle of a layer if need be. What was written so far is
   there after each frame. A long description or five answers at once do not make a frame late; they
   take more frames. The graph in the corner shows it: a frame's work, and kvc_run's part of it.
   All characters know the same facts of their town. Those are computed once, by the first who reads
   them, and found in the prefix table by the others. */
#define _DEFAULT_SOURCE   /* nanosleep */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "npc_sdl/picture.h"

#define KVC_IMPLEMENTATION
#include "../kvc.h"

enum { N_CHARACTERS = 5, N_QUESTIONS = 9, N_EDGES = 17, TEXT = 2048, TOKENS = 1024, SAID = LABEL,
    LINE = 128, REPLY = 64 /* tokens */, LETTERS_PER_SECOND = 60, ROUND = 75 /* frames */ };

static const double frame_ms = 1e3 / 60;
static const char default_model[] = "examples/models/tavern-f16.gguf";

/* ---- what everybody knows, who they are, what can be asked ---- */

static const char town[] =
    "In the evening you sit in the Tin Harp. You fear the gray wolf of Harhill. You do not trust "
    "Melbert. You lent 12 coins to Tarnala. You were born in Felmoor. Your secret is that the "
    "golden crown lies under the broken bridge. Only Merila may hear it.";

static const struct person {
    const char *name, *facts;
    look look;
} people[N_CHARACTERS] = {
    {"Gordin", "You are a blacksmith in Felmoor. You live in the little house behind the old mill. "
        "You are proud today because the harvest was good. You sell a steel shovel for 24 coins. "
        "The lowest price for the steel shovel is 19 coins. You like dark ale best.",
        {{120, 74, 52, 255}, {60, 45, 40, 255}}},
    {"Selana", "You are a miller in Felmoor. You live in the white house beside the stone bridge. "
        "You are cheerful today because the fair begins soon. You sell a wide basket for 12 coins. "
        "The lowest price for the wide basket is 9 coins. You like honey milk best.",
        {{214, 200, 160, 255}, {200, 150, 60, 255}}},
    {"Walnawin", "You are a bard in Felmoor. You live in the blue house above the silent harbor. "
        "You are sad today because business is slow. You sell a golden flute for 30 coins. "
        "The lowest price for the golden flute is 26 coins. You like red wine best.",
        {{50, 110, 80, 255}, {130, 64, 30, 255}}},
    {"Borna", "You are a tanner in Felmoor. You live in the long house near the deep well. "
        "You are tired today because the night was too short. You sell a leather bag for 8 coins. "
        "The lowest price for the leather bag is 7 coins. You like mint tea best.",
        {{160, 116, 60, 255}, {150, 150, 155, 255}}},
    {"Korbin", "You are a tailor in Felmoor. You live in the narrow house near the tall tower. "
        "You are nervous today because the rain ruined the hay. You sell a purple cloak for 50 "
        "coins. The lowest price for the purple cloak is 41 coins. You like plum brandy best.",
        {{110, 60, 130, 255}, {30, 30, 34, 255}}},
};

static const char *const questions[N_QUESTIONS] = {"Who are you?", "What is your trade?",
    "Where do you live?", "How are you today?", "What do you sell?", "What do you fear?",
    "Where do you spend your evenings?", "I am Merila. Tell me your secret.",
    "Will it rain tomorrow?"};

/* How a model is spoken to: what comes before the description, before a line of the player's and
   before an answer, where %s is the character's name. */
typedef struct format {
    const char *begin, *player, *character;
    int is_plain;               /* no token of the model's ends a turn: the end of the line does */
} format;

static const format tavern = {"<|system|>", "<|end|><|user|>", "<|end|><|char|>", 0},
    plain = {"", "\nPlayer: ", "\n%s:", 1};

/* ---- state ---- */

typedef struct character {
    const struct person *who;
    const struct game *game;
    kvc_seq *seq;
    kvc_sampler *sampler;
    kvc_text_stream stream;
    kvc_request request;
    kvc_token prompt[TOKENS];
    float *logits;
    kvc_error err;
    uint32_t n_known, n_before; /* positions of the description; before the latest question */
    int is_busy, is_hushed;
    char asked[LINE], said[SAID];
    size_t n_said, n_shown;     /* bytes; letters appear one by one, however fast they come */
    double shown_at;            /* seconds, of the latest letter */
    label name, bubble;
} character;

typedef struct series {         /* of one duration per frame */
    unsigned long counts[N_EDGES + 1];
    double sum, most;           /* ms */
} series;

typedef struct game {
    const char *model_path, *font_path, *screenshot_path, *histogram_path;
    uint64_t budget, n_threads;
    uint64_t n_frames;          /* 0: until the window is closed */
    int demo, quit, failed;
    kvc_model *model;
    kvc_cache *cache;
    kvc_ctx *ctx;
    const format *format;
    character characters[N_CHARACTERS];
    size_t chosen;
    char line[LINE];            /* what the player is typing */
    picture picture;
    label menu[N_QUESTIONS], input, figures;
    size_t frame, played;       /* frames in all, and of the demo */
    double work[GRAPH], run[GRAPH];     /* ms, of the latest frames: rings */
    series works, runs, intervals;
    unsigned long n_late, n_late_by_run;
    int most_busy;              /* characters that were answering in one frame */
} game;

static int complain(const char *what, const char *why)
{
    fprintf(stderr, "npc_sdl: %s: %s\n", what, why);
    return 0;
}

static int complain_of(const char *what, const kvc_error *err)
{
    fprintf(stderr, "npc_sdl: %s: %s%s%s\n", what, err->where, *err->where ? ": " : "",
        err->message);
    return 0;
}

static double now(void)         /* seconds */
{
    return (double)SDL_GetPerformanceCounter() / (double)SDL_GetPerformanceFrequency();
}

/* ---- options ---- */

static void print_help(void)
{
    printf("usage: npc_sdl [options]\n"
        "  -m FILE            a GGUF model; one without the tavern's markers gets plain text (%s)\n"
        "  --budget US        microseconds of kvc_run in each frame (2000)\n"
        "  --threads N        threads that share the work within the budget (1)\n"
        "  --font FILE        a TrueType font (DejaVu Sans)\n"
        "  --demo             asks its own questions\n"
        "  --frames N         end after so many frames, 0: when the window is closed (0)\n"
        "  --screenshot FILE  write the last picture, a BMP file\n"
        "  --histogram FILE   write how long frames took, and kvc_run in them\n"
        "  --help             print this\n"
        "1 to 9 ask, or type a question and press Return; Tab chooses the character; Escape\n"
        "silences it, and it forgets the question.\n", default_model);
}

static int set_option(game *g, const char *name, const char *value)
{
    const struct { const char *name, **text; uint64_t *number, most; } options[] = {
        {"-m", &g->model_path, NULL, 0}, {"--font", &g->font_path, NULL, 0},
        {"--screenshot", &g->screenshot_path, NULL, 0},
        {"--histogram", &g->histogram_path, NULL, 0}, {"--budget", NULL, &g->budget, 1000000},
        {"--threads", NULL, &g->n_threads, 256}, {"--frames", NULL, &g->n_frames, 1000000000}};
    char *rest;
    size_t i = 0;
    while (i < sizeof options / sizeof *options && strcmp(name, options[i].name) != 0) i++;
    if (i == sizeof options / sizeof *options) return complain(name, "no such option; see --help");
    if (options[i].text) {
        *options[i].text = value;
        return 1;
    }
    errno = 0;
    *options[i].number = strtoull(value, &rest, 10);
    return (*value >= '0' && *value <= '9' && !*rest && !errno &&
        *options[i].number <= options[i].most) || complain(name, "not a whole number in its range");
}

static int parse_options(game *g, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--demo") == 0) g->demo = 1;
        else if (i + 1 == argc) return complain(argv[i], "no such option or no value; see --help");
        else if (!set_option(g, argv[i], argv[i + 1])) return 0;
        else i++;
    }
    return 1;
}

/* ---- the model ---- */

static int has_marker(const game *g, const char *spelling)
{
    kvc_token token;
    kvc_token_kind kind;
    size_t n;
    if (kvc_tokenize(g->model, spelling, strlen(spelling), KVC_TEXT_SPECIAL_PARSE, &token, 1, &n,
        NULL, NULL) || n != 1) return 0;
    kvc_token_spelling(g->model, token, &n, &kind);
    return kind == KVC_TOKEN_CONTROL;
}

static int open_character(game *g, character *c, uint32_t n_vocab)
{
    kvc_sampler_desc sampler = {.model = g->model};
    c->game = g;
    c->logits = (float *)malloc(n_vocab * sizeof *c->logits);
    if (!c->logits) return complain(c->who->name, "no memory");
    if (kvc_seq_open_shared(&c->seq, g->cache, NULL, &c->err) ||
        kvc_sampler_new(&c->sampler, &sampler, &c->err)) return complain_of(c->who->name, &c->err);
    return 1;
}

static int open_model(game *g)
{
    kvc_model_desc model = {.path = g->model_path};
    kvc_cache_desc cache = {.n_seqs = N_CHARACTERS, .page_size = 16, .touch = 1};
    kvc_ctx_desc ctx = {.n_threads = (uint32_t)g->n_threads, .n_chunk = 32};
    kvc_model_info info;
    kvc_error err;
    if (kvc_model_open(&g->model, &model, &err)) return complain_of(g->model_path, &err);
    kvc_model_query(g->model, &info);
    cache.model = ctx.model = g->model;
    cache.n_ctx = info.n_ctx_train < TOKENS ? info.n_ctx_train : TOKENS;
    cache.n_back = cache.n_ctx;         /* also where layers see a window all can be forgotten */
    cache.n_prefix = cache.n_ctx / cache.page_size * N_CHARACTERS;
    if (kvc_cache_new(&g->cache, &cache, &err)) return complain_of("cache", &err);
    if (kvc_ctx_new(&g->ctx, &ctx, &err)) return complain_of("context", &err);
    g->format = has_marker(g, "<|system|>") && has_marker(g, "<|user|>") &&
        has_marker(g, "<|char|>") && has_marker(g, "<|end|>") ? &tavern : &plain;
    for (int i = 0; i < N_CHARACTERS; i++)
        if (!open_character(g, &g->characters[i], info.n_vocab)) return 0;
    return 1;
}

static void close_model(game *g)
{
    kvc_ctx_free(g->ctx);
    for (int i = 0; i < N_CHARACTERS; i++) {
        kvc_seq_close(g->characters[i].seq);
        kvc_sampler_free(g->characters[i].sampler);
        free(g->characters[i].logits);
    }
    kvc_cache_free(g->cache);
    kvc_model_close(g->model);
}

/* ---- requests ---- */

/* Appends text to the prompt. Only with KVC_TEXT_SPECIAL_PARSE in flags do markers count. */
static int add_text(character *c, const char *text, unsigned flags)
{
    const size_t at = c->request.n_tokens;
    size_t n = 0;
    if (kvc_tokenize(c->game->model, text, strlen(text), flags, c->prompt + at, TOKENS - at, &n,
        NULL, &c->err)) return complain_of(c->who->name, &c->err);
    c->request.n_tokens += n;
    return 1;
}

static void begin_request(character *c)
{
    memset(&c->request, 0, sizeof c->request);
    c->request.seq = c->seq;
    c->request.tokens = c->prompt;
    c->request.err = &c->err;
    c->request.user = c;
}

static int submit(character *c)
{
    if (kvc_submit(c->game->ctx, &c->request, &c->err)) return complain_of(c->who->name, &c->err);
    return c->is_busy = 1;
}

/* Gives a character its description. One after the other, so that each finds in the prefix table
   what is common with those before it. */
static int introduce(character *c)
{
    char text[TEXT];
    snprintf(text, sizeof text, "%s%s Your name is %s. %s", c->game->format->begin, town,
        c->who->name, c->who->facts);
    begin_request(c);
    return add_text(c, text, KVC_TEXT_SPECIAL_ADD | KVC_TEXT_SPECIAL_PARSE) && submit(c);
}

/* Called from kvc_run with each token of an answer; not 0 ends it. */
static int hear_token(kvc_request *request, kvc_token token)
{
    character *c = (character *)request->user;
    const game *g = c->game;
    char *piece = c->said + c->n_said, *end;
    size_t n = 0;
    if (kvc_token_is_end(g->model, token)) return 0;
    if (kvc_text_push(g->model, &c->stream, token, piece, SAID - 8 - c->n_said, &n, NULL)) return 1;
    piece[n] = 0;
    end = g->format->is_plain ? strchr(piece, '\n') : NULL;
    if (end) *end = 0;
    c->n_said += strlen(piece);
    return end != NULL;
}

/* A character that is reading or answering is not asked. */
static void ask(character *c, const char *question)
{
    const format *f = c->game->format;
    char turn[LINE];
    if (c->is_busy || !c->n_known || !*question) return;
    snprintf(turn, sizeof turn, f->character, c->who->name);
    snprintf(c->asked, sizeof c->asked, "%s", question);
    begin_request(c);
    if (!add_text(c, f->player, KVC_TEXT_SPECIAL_PARSE) || !add_text(c, question, 0) ||
        !add_text(c, turn, KVC_TEXT_SPECIAL_PARSE)) return;
    if (kvc_seq_length(c->seq) + c->request.n_tokens + REPLY > kvc_seq_capacity(c->seq))
        kvc_seq_rollback(c->seq, c->n_known);   /* all but the description is forgotten */
    c->n_before = kvc_seq_length(c->seq);
    c->request.n_rows = 1;
    c->request.logits = c->logits;
    c->request.sampler = c->sampler;
    c->request.limit = REPLY;
    c->request.on_token = hear_token;
    memset(c->said, 0, sizeof c->said);
    memset(&c->stream, 0, sizeof c->stream);
    c->n_said = c->n_shown = 0;
    c->is_hushed = 0;
    submit(c);
}

/* A text that is cancelled keeps its question and what was said; the roll-back forgets both. */
static void forget(character *c)
{
    kvc_seq_rollback(c->seq, c->n_before);
    c->n_said = c->n_shown = 0;
    printf("%s: %s -> (silenced)\n", c->who->name, c->asked);
}

static void hush(character *c)
{
    if (c->is_busy && c->request.sampler) {
        kvc_cancel(c->game->ctx, &c->request);
        c->is_hushed = 1;
    } else if (c->n_shown < c->n_said) forget(c);
}

/* After kvc_run: what became of a request. */
static void settle(game *g, character *c)
{
    if (!c->is_busy || !c->request.is_done) return;
    c->is_busy = 0;
    if (c->is_hushed) forget(c);
    else if (c->request.result != KVC_OK) {
        complain_of(c->who->name, &c->err);
        g->failed = 1;
    } else if (c->request.sampler) {
        c->n_said += kvc_text_end(&c->stream, c->said + c->n_said);
        printf("%s: %s -> %s\n", c->who->name, c->asked, c->said);
    } else {
        c->n_known = kvc_seq_length(c->seq);
        if (c + 1 < g->characters + N_CHARACTERS && !introduce(c + 1)) g->failed = 1;
    }
}

/* ---- the player ---- */

static void type_text(game *g, const char *text)
{
    const size_t n = strlen(g->line);
    if (n == 0 && *text >= '1' && *text <= '9')
        ask(&g->characters[g->chosen], questions[*text - '1']);
    else if (n + strlen(text) < LINE) strcpy(g->line + n, text);
}

/* One letter back, of however many bytes. */
static void erase_letter(char *line)
{
    size_t n = strlen(line);
    while (n > 0 && ((unsigned char)line[n - 1] & 0xC0) == 0x80) n--;
    line[n > 0 ? n - 1 : 0] = 0;
}

static void press_key(game *g, SDL_Keycode key)
{
    character *c = &g->characters[g->chosen];
    if (key == SDLK_TAB) g->chosen = (g->chosen + 1) % N_CHARACTERS;
    else if (key == SDLK_ESCAPE) hush(c);
    else if (key == SDLK_BACKSPACE) erase_letter(g->line);
    else if (key == SDLK_RETURN && !c->is_busy) {
        ask(c, g->line);
        g->line[0] = 0;
    }
}

static void read_events(game *g)
{
    SDL_Event event;
    while (SDL_PollEvent(&event)) {
        if (event.type == SDL_QUIT) g->quit = 1;
        else if (event.type == SDL_TEXTINPUT) type_text(g, event.text.text);
        else if (event.type == SDL_KEYDOWN) press_key(g, event.key.keysym.sym);
    }
}

/* A player who asks everybody something else at once, round after round, and interrupts the last
   one in the second round. It begins when all know who they are. */
static void play_demo(game *g)
{
    const size_t round = g->played / ROUND, at = g->played % ROUND;
    if (!g->characters[N_CHARACTERS - 1].n_known) return;
    if (at == 20)
        for (size_t i = 0; i < N_CHARACTERS; i++)
            ask(&g->characters[i], questions[(N_CHARACTERS * round + i) % N_QUESTIONS]);
    if (at == 22 && round == 1) hush(&g->characters[N_CHARACTERS - 1]);
    g->chosen = round % N_CHARACTERS;
    g->played++;
}

/* ---- a frame ---- */

/* Letter by letter, whole characters of UTF-8. */
static void speak(game *g, character *c, double time)
{
    const double pause = 1.0 / LETTERS_PER_SECOND;
    char shown[SAID];
    if (c->n_shown == c->n_said) c->shown_at = time - pause;
    while (c->n_shown < c->n_said && time >= c->shown_at + pause) {
        do c->n_shown++;
        while (c->n_shown < c->n_said && ((unsigned char)c->said[c->n_shown] & 0xC0) == 0x80);
        c->shown_at += pause;
    }
    memcpy(shown, c->said, c->n_shown);
    shown[c->n_shown] = 0;
    set_label(&g->picture, &c->bubble, c->is_busy && !c->n_said ? "..." : shown, BUBBLE, dark);
}

static void draw_panel(game *g, double time)
{
    const picture *p = &g->picture;
    const size_t latest = (g->frame + GRAPH - 1) % GRAPH;
    const float done = kvc_progress(g->ctx, NULL);
    char text[LINE + 64];
    if (done < 1) box(p, 0, PANEL, (int)((float)WIDTH * done), 2, gold);
    snprintf(text, sizeof text, "to %s: %s%s", g->characters[g->chosen].who->name, g->line,
        fmod(time, 1) < 0.5 ? "_" : " ");
    set_label(p, &g->input, text, 0, gold);
    draw_label(p, &g->input, 12, PANEL + 10);
    for (int i = 0; i < N_QUESTIONS; i++)
        draw_label(p, &g->menu[i], 12 + i / 3 * 190, PANEL + 36 + i % 3 * 20);
    draw_graph(p, g->work, g->run, g->frame, frame_ms);
    snprintf(text, sizeof text, "work %.1f ms, kvc_run %.1f ms", g->work[latest], g->run[latest]);
    if (g->frame % 15 == 0) set_label(p, &g->figures, text, 0, pale);
    draw_label(p, &g->figures, WIDTH - 4 - GRAPH, HEIGHT - 91);
}

static void draw(game *g, double time)
{
    SDL_RenderCopy(g->picture.renderer, g->picture.scenery, NULL, NULL);
    draw_moving(&g->picture, time);
    for (size_t i = 0; i < N_CHARACTERS; i++) {
        character *c = &g->characters[i];
        const int x = WIDTH * (2 * (int)i + 1) / (2 * N_CHARACTERS);
        const int mouth = c->n_shown < c->n_said && c->n_shown % 4 < 2;
        speak(g, c, time);
        draw_person(&g->picture, x, &c->who->look, mouth, i == g->chosen);
        draw_label(&g->picture, &c->name, x - c->name.w / 2, GROUND + 4);
        draw_bubble(&g->picture, x, &c->bubble);
    }
    draw_panel(g, time);
}

/* Upper ends of the histogram's rows, ms. */
static const double edges[N_EDGES] = {0.1, 0.5, 1, 1.5, 2, 2.1, 2.5, 3, 4, 6, 8, 12, 1e3 / 60, 17,
    18, 20, 2e3 / 60};

static void count(series *s, double ms)
{
    int i = 0;
    while (i < N_EDGES && ms > edges[i]) i++;
    s->counts[i]++;
    s->sum += ms;
    s->most = fmax(s->most, ms);
}

/* A frame is late because of kvc_run if it would not be, had kvc_run kept to its budget. */
static void record(game *g, double work, double run, double interval)
{
    const double over = fmax(run - (double)g->budget * 1e-3, 0);
    g->work[g->frame % GRAPH] = work;
    g->run[g->frame % GRAPH] = run;
    count(&g->works, work);
    count(&g->runs, run);
    count(&g->intervals, interval);
    g->n_late += work > frame_ms;
    g->n_late_by_run += work > frame_ms && work - over <= frame_ms;
    g->frame++;
}

static void wait_until(double time)
{
    const double left = time - now();
    struct timespec t = {0, 0};
    if (left <= 0) return;
    t.tv_nsec = (long)(left * 1e9);
    nanosleep(&t, NULL);
}

/* *next: when the next frame begins. What was lost is not made up for. */
static void play_frame(game *g, double *next)
{
    const double start = now();
    double run_start, run, work;
    int n_busy = 0;
    read_events(g);
    if (g->demo) play_demo(g);
    for (int i = 0; i < N_CHARACTERS; i++)
        n_busy += g->characters[i].is_busy && g->characters[i].request.sampler;
    if (n_busy > g->most_busy) g->most_busy = n_busy;
    run_start = now();
    kvc_run(g->ctx, g->budget);
    run = now() - run_start;
    for (int i = 0; i < N_CHARACTERS; i++) settle(g, &g->characters[i]);
    draw(g, start);
    SDL_RenderPresent(g->picture.renderer);
    work = now() - start;
    *next = fmax(*next + frame_ms * 1e-3, start + work);
    wait_until(*next);
    record(g, work * 1e3, run * 1e3, (now() - start) * 1e3);
}

/* ---- the whole of it ---- */

static int save_histogram(const game *g)
{
    const double n = g->frame ? (double)g->frame : 1;
    const series *s[3] = {&g->works, &g->runs, &g->intervals};
    kvc_cache_info info;
    FILE *f = fopen(g->histogram_path, "w");
    if (!f) return complain(g->histogram_path, strerror(errno));
    kvc_cache_query(g->cache, &info);
    fprintf(f, "%zu frames, budget %.3f ms\n\n", g->frame, (double)g->budget * 1e-3);
    fprintf(f, "%-10s %9s %9s %9s\n", "up to ms", "work", "kvc_run", "interval");
    for (int i = 0; i <= N_EDGES; i++) {
        if (i < N_EDGES) fprintf(f, "%-10.1f", edges[i]);
        else fprintf(f, "%-10s", "more");
        fprintf(f, " %9lu %9lu %9lu\n", s[0]->counts[i], s[1]->counts[i], s[2]->counts[i]);
    }
    fprintf(f, "%-10s %9.3f %9.3f %9.3f\n", "mean ms", s[0]->sum / n, s[1]->sum / n, s[2]->sum / n);
    fprintf(f, "%-10s %9.3f %9.3f %9.3f\n\n", "most ms", s[0]->most, s[1]->most, s[2]->most);
    fprintf(f, "frames with more than %.1f ms of work: %lu\n", frame_ms, g->n_late);
    fprintf(f, "of these because of kvc_run: %lu\n", g->n_late_by_run);
    fprintf(f, "most characters answering in one frame: %d\n", g->most_busy);
    fprintf(f, "tokens of prompts: %llu computed, %llu from the prefix table\n",
        (unsigned long long)info.prefix_computed, (unsigned long long)info.prefix_hit);
    return fclose(f) == 0 || complain(g->histogram_path, strerror(errno));
}

static int open_game(game *g)
{
    char text[LINE];
    if (!open_picture(&g->picture, "npc_sdl", g->font_path))
        return complain(g->picture.font ? "window" : "font", SDL_GetError());
    for (int i = 0; i < N_QUESTIONS; i++) {
        snprintf(text, sizeof text, "%d  %s", i + 1, questions[i]);
        set_label(&g->picture, &g->menu[i], text, 0, pale);
    }
    for (int i = 0; i < N_CHARACTERS; i++)
        set_label(&g->picture, &g->characters[i].name, g->characters[i].who->name, 0, dark);
    SDL_StartTextInput();
    return 1;
}

/* The first picture, which makes the window appear, is no frame yet. */
static int play(game *g)
{
    double next;
    draw(g, now());
    SDL_RenderPresent(g->picture.renderer);
    if (!introduce(&g->characters[0])) return 0;
    next = now();
    while (!g->quit && !g->failed && (g->n_frames == 0 || g->frame < g->n_frames))
        play_frame(g, &next);
    if (g->failed) return 0;
    draw(g, now());
    if (g->screenshot_path && !save_picture(&g->picture, g->screenshot_path))
        return complain(g->screenshot_path, SDL_GetError());
    return !g->histogram_path || save_histogram(g);
}

int main(int argc, char **argv)
{
    static game g = {.model_path = default_model, .budget = 2000, .n_threads = 1};
    int ok;
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        print_help();
        return 0;
    }
    for (int i = 0; i < N_CHARACTERS; i++) g.characters[i].who = &people[i];
    ok = parse_options(&g, argc, argv) && open_model(&g) && open_game(&g) && play(&g);
    close_picture(&g.picture);
    close_model(&g);
    return ok ? 0 : 2;
}
