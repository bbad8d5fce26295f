/* picture.h: all that npc_sdl draws: texts, a town square, people with speech bubbles, a graph. It
   knows SDL and nothing of language models. Drawn economically, since a software renderer pays for
   each pixel: what stands still is drawn once, and a text when it changes. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <SDL.h>
#include <SDL_ttf.h>

enum { WIDTH = 960, HEIGHT = 540, GROUND = 400, PANEL = 440, GRAPH = 240, LABEL = 512,
    BUBBLE = 160 };

static const SDL_Color dark = {38, 36, 44, 255}, pale = {224, 224, 224, 255},
    gold = {240, 170, 60, 255}, paper = {252, 250, 244, 255};

typedef struct picture {
    SDL_Window *window;
    SDL_Renderer *renderer;
    SDL_Texture *scenery;
    TTF_Font *font;
} picture;

typedef struct label {          /* a text, and its letters as they were drawn last */
    char text[LABEL];
    SDL_Texture *texture;
    int w, h;
} label;

/* ---- texts and shapes ---- */

/* wrap: pixels of a line, 0 for one line. Letters that the font lacks are boxes. */
static void set_label(const picture *p, label *l, const char *text, int wrap, SDL_Color color)
{
    SDL_Surface *surface;
    if (strcmp(l->text, text) == 0) return;
    snprintf(l->text, sizeof l->text, "%s", text);
    if (l->texture) SDL_DestroyTexture(l->texture);
    l->texture = NULL;
    surface = TTF_RenderUTF8_Blended_Wrapped(p->font, text, color, (Uint32)wrap);
    if (!surface) return;       /* such as that of an empty text */
    l->texture = SDL_CreateTextureFromSurface(p->renderer, surface);
    l->w = surface->w;
    l->h = surface->h;
    SDL_FreeSurface(surface);
}

static void draw_label(const picture *p, const label *l, int x, int y)
{
    const SDL_Rect at = {x, y, l->w, l->h};
    if (l->texture) SDL_RenderCopy(p->renderer, l->texture, NULL, &at);
}

static void fill(const picture *p, const SDL_Rect *rects, int n, SDL_Color color)
{
    SDL_SetRenderDrawColor(p->renderer, color.r, color.g, color.b, color.a);
    SDL_RenderFillRects(p->renderer, rects, n);
}

static void box(const picture *p, int x, int y, int w, int h, SDL_Color color)
{
    const SDL_Rect rect = {x, y, w, h};
    fill(p, &rect, 1, color);
}

static void disc(const picture *p, int x, int y, int radius, SDL_Color color)
{
    SDL_Rect rows[128];
    for (int i = 0; i < 2 * radius; i++) {
        const double up = i + 0.5 - radius;
        const int half = (int)sqrt(radius * radius - up * up);
        rows[i] = (SDL_Rect){x - half, y - radius + i, 2 * half, 1};
    }
    fill(p, rows, 2 * radius, color);
}

/* ---- the town square ---- */

static void draw_house(const picture *p, int x, int w, int h, SDL_Color wall, SDL_Color roof)
{
    const int top = GROUND - 60 - h;
    for (int i = 0; i < w / 4; i++) box(p, x - 10 + 2 * i, top - i, w + 20 - 4 * i, 1, roof);
    box(p, x, top, w, h, wall);
    for (int i = x + 14; i + 24 <= x + w; i += 44) box(p, i, top + 16, 20, 26, gold);
}

/* What stands still, into a texture. */
static int draw_scenery(picture *p)
{
    const SDL_Color hill = {120, 160, 100, 255}, street = {186, 170, 140, 255},
        wood = {96, 66, 44, 255};
    p->scenery = SDL_CreateTexture(p->renderer, SDL_PIXELFORMAT_RGB888, SDL_TEXTUREACCESS_TARGET,
        WIDTH, HEIGHT);
    if (!p->scenery || SDL_SetRenderTarget(p->renderer, p->scenery)) return 0;
    for (int y = 0; y < PANEL; y++)
        box(p, 0, y, WIDTH, 1, (SDL_Color){(Uint8)(110 + y / 4), (Uint8)(170 + y / 8), 230, 255});
    disc(p, 860, 60, 34, (SDL_Color){255, 236, 150, 255});
    for (int i = 0; i < 4; i++) disc(p, 120 + 240 * i, 330, 60, hill);
    box(p, 0, 320, WIDTH, 30, hill);
    draw_house(p, 40, 150, 70, (SDL_Color){220, 200, 170, 255}, (SDL_Color){150, 80, 60, 255});
    draw_house(p, 352, 238, 110, (SDL_Color){180, 140, 100, 255}, (SDL_Color){110, 60, 50, 255});
    draw_house(p, 740, 160, 80, (SDL_Color){200, 206, 214, 255}, (SDL_Color){90, 100, 120, 255});
    box(p, 0, GROUND - 60, WIDTH, PANEL - GROUND + 60, street);
    box(p, 550, 70, 60, 280, wood);     /* a clock */
    disc(p, 580, 100, 24, paper);
    box(p, 579, 82, 2, 20, wood);
    box(p, 580, 99, 14, 2, wood);
    box(p, 558, 132, 44, 94, paper);
    box(p, 0, PANEL, WIDTH, HEIGHT - PANEL, dark);
    SDL_SetRenderTarget(p->renderer, NULL);
    return 1;
}

/* What moves by itself: clouds, the clock's pendulum and a cat. */
static void draw_moving(const picture *p, double time)
{
    const SDL_Color cloud = {250, 250, 252, 255}, brass = {180, 130, 40, 255},
        fur = {150, 86, 40, 255};
    const double swing = 0.2 * sin(time * 4);
    const int bob_x = 580 + (int)(76 * sin(swing)), bob_y = 134 + (int)(76 * cos(swing));
    const int cat = (int)fmod(time * 70, WIDTH + 120) - 60, step = (int)(5 * sin(time * 14));
    for (int i = 0; i < 3; i++) {
        const int x = (int)fmod(time * (14 + 5 * i) + 330 * i, WIDTH + 160) - 80, y = 36 + 22 * i;
        disc(p, x - 24, y + 6, 16, cloud);
        disc(p, x, y, 22, cloud);
        disc(p, x + 26, y + 5, 17, cloud);
    }
    SDL_SetRenderDrawColor(p->renderer, brass.r, brass.g, brass.b, 255);
    for (int i = -1; i <= 1; i++) SDL_RenderDrawLine(p->renderer, 580 + i, 134, bob_x + i, bob_y);
    disc(p, bob_x, bob_y, 9, brass);
    box(p, cat - 22, PANEL - 30, 40, 13, fur);
    disc(p, cat + 22, PANEL - 31, 9, fur);
    box(p, cat + 15, PANEL - 44, 4, 8, fur);
    box(p, cat + 25, PANEL - 44, 4, 8, fur);
    box(p, cat - 26, PANEL - 46 + step / 2, 4, 24, fur);
    for (int i = 0; i < 4; i++)
        box(p, cat - 18 + 11 * i + (i % 2 ? -step : step), PANEL - 18, 4, 11, fur);
}

/* ---- people ---- */

typedef struct look {
    SDL_Color coat, hair;
} look;

static void draw_person(const picture *p, int x, const look *l, int is_speaking, int is_chosen)
{
    const SDL_Color skin = {236, 196, 160, 255};
    box(p, x - 14, GROUND - 24, 10, 26, dark);
    box(p, x + 4, GROUND - 24, 10, 26, dark);
    box(p, x - 20, GROUND - 78, 40, 58, l->coat);
    disc(p, x, GROUND - 95, 19, l->hair);
    disc(p, x, GROUND - 91, 16, skin);
    box(p, x - 7, GROUND - 95, 3, 4, dark);
    box(p, x + 4, GROUND - 95, 3, 4, dark);
    box(p, x - 4, GROUND - 85, 8, is_speaking ? 5 : 2, dark);
    if (is_chosen) box(p, x - 32, GROUND + 22, 64, 3, dark);
}

static void draw_bubble(const picture *p, int x, const label *said)
{
    const int left = x - said->w / 2, top = GROUND - 129 - said->h;
    if (!said->texture) return;
    box(p, left - 9, top - 6, said->w + 18, said->h + 12, dark);
    box(p, left - 8, top - 5, said->w + 16, said->h + 10, paper);
    box(p, x - 3, GROUND - 124, 6, 6, paper);
    draw_label(p, said, left, top);
}

/* ---- the graph ---- */

/* [GRAPH] frames from `first` on, rings: their work in ms, and a part of it in front, four pixels
   for a millisecond; and a line at `limit` ms. */
static void draw_graph(const picture *p, const double *work, const double *part, size_t first,
    double limit)
{
    const SDL_Color blue = {90, 130, 190, 255}, red = {230, 70, 70, 255}, black = {20, 22, 28, 255};
    const int left = WIDTH - 12 - GRAPH, bottom = HEIGHT - 8;
    SDL_Rect works[GRAPH], parts[GRAPH];
    for (int i = 0; i < GRAPH; i++) {
        const size_t k = (first + (size_t)i) % GRAPH;
        const int high = (int)(4 * fmin(work[k], 21)), low = (int)(4 * fmin(part[k], 21));
        works[i] = (SDL_Rect){left + i, bottom - high, 1, high};
        parts[i] = (SDL_Rect){left + i, bottom - low, 1, low};
    }
    box(p, left, bottom - 84, GRAPH, 84, black);
    fill(p, works, GRAPH, blue);
    fill(p, parts, GRAPH, gold);
    box(p, left, bottom - (int)(4 * limit), GRAPH, 1, red);
}

/* ---- the window ---- */

static TTF_Font *open_font(const char *path)
{
    static const char *const usual[] = {"/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf",
        "/usr/share/fonts/dejavu-sans-fonts/DejaVuSans.ttf", "/usr/share/fonts/TTF/DejaVuSans.ttf",
        "/usr/local/share/fonts/dejavu/DejaVuSans.ttf"};
    TTF_Font *font = NULL;
    if (path) return TTF_OpenFont(path, 13);
    for (size_t i = 0; !font && i < sizeof usual / sizeof *usual; i++)
        font = TTF_OpenFont(usual[i], 13);
    if (!font) TTF_SetError("no DejaVu Sans in the usual places; name a font with --font FILE");
    return font;
}

/* 0: SDL_GetError tells why not. The picture does not wait for the display, so that the time that
   showing it takes can be counted. font: a TrueType file, or NULL. */
static int open_picture(picture *p, const char *title, const char *font)
{
    if (SDL_Init(SDL_INIT_VIDEO) || TTF_Init()) return 0;
    p->font = open_font(font);
    if (!p->font) return 0;
    p->window = SDL_CreateWindow(title, SDL_WINDOWPOS_CENTERED, SDL_WINDOWPOS_CENTERED, WIDTH,
        HEIGHT, 0);
    if (!p->window) return 0;
    p->renderer = SDL_CreateRenderer(p->window, -1, SDL_RENDERER_TARGETTEXTURE);
    return p->renderer && draw_scenery(p);
}

/* What was drawn since it was shown last, as a BMP file. 0: SDL_GetError tells why not. */
static int save_picture(const picture *p, const char *path)
{
    SDL_Surface *s = SDL_CreateRGBSurfaceWithFormat(0, WIDTH, HEIGHT, 24, SDL_PIXELFORMAT_BGR24);
    int ok;
    if (!s) return 0;
    ok = SDL_RenderReadPixels(p->renderer, NULL, SDL_PIXELFORMAT_BGR24, s->pixels, s->pitch) == 0 &&
        SDL_SaveBMP(s, path) == 0;
    SDL_FreeSurface(s);
    return ok;
}

/* The renderer takes all textures along. */
static void close_picture(picture *p)
{
    if (p->renderer) SDL_DestroyRenderer(p->renderer);
    if (p->window) SDL_DestroyWindow(p->window);
    if (p->font) TTF_CloseFont(p->font);
    if (TTF_WasInit()) TTF_Quit();
    SDL_Quit();
}
