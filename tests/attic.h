/* attic.h - a second tier in memory for tests: it keeps what is put, may lose things, be slow or
   hand out damaged bytes, and counts wrong calls. Any number of threads. Include it after kvc.h and
   gguf_write.h. */
#ifndef ATTIC_H
#define ATTIC_H

#include <pthread.h>

typedef struct attic_page {
    unsigned char key[KVC_TIER_KEY];
    unsigned char *bytes;
    size_t size;
    int is_late;                /* it comes when ahead was called and time has passed */
    uint32_t asked;             /* attic->time when it was, 0: not yet */
} attic_page;

typedef struct attic {
    pthread_mutex_t lock;
    attic_page *pages;          /* [n], at most cap */
    uint32_t n, cap;
    uint32_t *table;            /* [4 * cap] by the key: the index of a page, and 1; 0: none */
    uint32_t time;
    int is_slow;                /* pages come only after ahead and a tick */
    int is_shut;                /* nothing is taken, nothing is given */
    uint32_t lose_one_in;       /* get fails at random, 0: never */
    uint64_t random;
    unsigned n_put, n_again, n_got, n_asked, n_ahead, n_open, n_faults;
    void (*damage)(kvc_parcel *parcel, void *user);     /* of what is handed out, or NULL */
    void *damage_user;
} attic;

static inline void attic_open(attic *a, uint32_t cap) {
    memset(a, 0, sizeof *a);
    a->cap = cap;
    a->pages = (attic_page *)gguf_must(calloc(cap, sizeof *a->pages));
    a->table = (uint32_t *)gguf_must(calloc(4 * (size_t)cap, sizeof *a->table));
    a->random = 1;
    a->time = 1;
    pthread_mutex_init(&a->lock, NULL);
}

static inline void attic_close(attic *a) {
    uint32_t i;
    for (i = 0; i < a->n; i++) free(a->pages[i].bytes);
    free(a->pages);
    free(a->table);
    pthread_mutex_destroy(&a->lock);
}

/* Where the page of a key is, or is to be; the lock is held. */
static inline uint32_t *attic_slot(attic *a, const unsigned char *key) {
    uint64_t words[3] = {0, 0, 0};
    uint32_t at;
    memcpy(words, key, KVC_TIER_KEY);
    at = (uint32_t)(model_mix(words[0] ^ model_mix(words[1] ^ model_mix(words[2]))) %
        (4 * (uint64_t)a->cap));
    while (a->table[at] && memcmp(a->pages[a->table[at] - 1].key, key, KVC_TIER_KEY))
        at = (at + 1) % (4 * a->cap);
    return &a->table[at];
}

static inline attic_page *attic_find(attic *a, const unsigned char *key) {
    const uint32_t *slot = attic_slot(a, key);
    return *slot ? &a->pages[*slot - 1] : NULL;
}

static inline int attic_put(const unsigned char *key, kvc_parcel *parcel, void *user) {
    attic *a = (attic *)user;
    int here;
    pthread_mutex_lock(&a->lock);
    if (a->is_shut) {
        pthread_mutex_unlock(&a->lock);
        return 0;
    }
    here = attic_find(a, key) != NULL;
    a->n_again += here != 0;
#ifdef KVC__SHORT_KEYS
    here = 0;                   /* it may be another one, which makes room */
#endif
    a->n_open += !here;
    pthread_mutex_unlock(&a->lock);
    if (here) return 1;         /* with no data */
    parcel->data = gguf_must(malloc(parcel->size));
    parcel->host = parcel->data;
    return 1;
}

static inline void attic_put_done(const unsigned char *key, kvc_parcel *parcel, void *user) {
    attic *a = (attic *)user;
    attic_page *page;
    uint32_t *slot;
    pthread_mutex_lock(&a->lock);
    slot = attic_slot(a, key);
    if (parcel->host != parcel->data) a->n_faults++;
    if (!*slot && a->n < a->cap) *slot = ++a->n;
    if (!*slot) {
        free(parcel->data);
    } else {
        page = &a->pages[*slot - 1];
        free(page->bytes);
        memcpy(page->key, key, KVC_TIER_KEY);
        page->bytes = (unsigned char *)parcel->data;
        page->size = parcel->size;
        page->is_late = a->is_slow;
        page->asked = 0;
        a->n_put++;
    }
    a->n_open--;
    pthread_mutex_unlock(&a->lock);
}

static inline int attic_get(const unsigned char *key, kvc_parcel *parcel, void *user) {
    attic *a = (attic *)user;
    const attic_page *page;
    pthread_mutex_lock(&a->lock);
    a->n_asked++;
    page = a->is_shut ? NULL : attic_find(a, key);
    if (page && page->is_late && (page->asked == 0 || page->asked >= a->time)) page = NULL;
    if (a->lose_one_in && model_random(&a->random) % a->lose_one_in == 0) page = NULL;
    if (page) {                 /* a copy, so that a page too large is one for the sanitizer */
        parcel->size = page->size;
        parcel->data = parcel->host = gguf_must(malloc(page->size));
        memcpy(parcel->data, page->bytes, page->size);
        if (a->damage) a->damage(parcel, a->damage_user);
        a->n_got++;
        a->n_open++;
    }
    pthread_mutex_unlock(&a->lock);
    return page != NULL;
}

static inline void attic_get_done(const unsigned char *key, kvc_parcel *parcel, void *user) {
    attic *a = (attic *)user;
    (void)key;
    pthread_mutex_lock(&a->lock);
    a->n_open--;
    free(parcel->host);
    pthread_mutex_unlock(&a->lock);
}

static inline void attic_ahead(const unsigned char *keys, uint32_t n, void *user) {
    attic *a = (attic *)user;
    attic_page *page;
    uint32_t i;
    pthread_mutex_lock(&a->lock);
    if (n == 0 || n > 64) a->n_faults++;
    for (i = 0; i < n; i++) {
        page = attic_find(a, keys + (size_t)i * KVC_TIER_KEY);
        if (page && page->asked == 0) page->asked = a->time;
    }
    a->n_ahead += n;
    pthread_mutex_unlock(&a->lock);
}

static inline kvc_tier attic_tier(attic *a) {
    kvc_tier tier;
    tier.put = attic_put;
    tier.put_done = attic_put_done;
    tier.get = attic_get;
    tier.get_done = attic_get_done;
    tier.ahead = attic_ahead;
    tier.user = a;
    return tier;
}

#endif
