/* kvc.h 0.1.0
   Runs decoder-only transformer language models on a CPU, inside your program. One file, C99 or
   C++, needs libc, libm and threads. MIT licence, at the end of this file.

   Do this in one C or C++ file of the program, and include the header plainly in the others:

       #define KVC_IMPLEMENTATION
       #include "kvc.h"

   QUICK START
   Opens a model, reads a prompt in one prefill, then writes a hundred tokens, one decode each. A
   zeroed desc means the defaults: one thread, the best kernels, a cache for the model's context,
   the likeliest token. When a call fails, err says where and why. In C++ zero the descs and set
   their fields one by one.

       #define KVC_IMPLEMENTATION
       #include "kvc.h"
       #include <stdio.h>

       int main(void)
       {
           kvc_model *model; kvc_cache *cache; kvc_seq *seq; kvc_ctx *ctx; kvc_sampler *sampler;
           kvc_error err; kvc_text_stream stream = {0}; kvc_token token, prompt[64];
           const float *logits; char text[256]; size_t n; int i;
           if (kvc_model_open(&model, &(kvc_model_desc){.path = "model.gguf"}, &err) ||
               kvc_cache_new(&cache, &(kvc_cache_desc){.model = model}, &err) ||
               kvc_seq_open(&seq, cache, &err) ||
               kvc_ctx_new(&ctx, &(kvc_ctx_desc){.model = model}, &err) ||
               kvc_sampler_new(&sampler, &(kvc_sampler_desc){.model = model}, &err) ||
               kvc_tokenize(model, "Once upon a time", 16, KVC_TEXT_SPECIAL_ADD, prompt, 64, &n,
                   NULL, &err) ||
               kvc_prefill(ctx, seq, prompt, n, &logits, &err))
               return 1;
           for (i = 0; i < 100; i++) {
               if (kvc_sampler_sample(sampler, logits, &token, &err)) break;
               if (kvc_token_is_end(model, token)) break;
               if (kvc_text_push(model, &stream, token, text, sizeof text, &n, &err)) break;
               fwrite(text, 1, n, stdout);
               if (kvc_decode(ctx, seq, token, &logits, &err)) break;
           }
           kvc_sampler_free(sampler); kvc_ctx_free(ctx);
           kvc_cache_free(cache); kvc_model_close(model);
           return 0;
       }

   Build with cc -O2 main.c -lm -pthread; the vector kernels need no compiler flags.

   CONTENTS (search for the tag)
       >>config  Compile-time switches
       >>api  Everything a host calls
       >>platform  The compiler, the processor and the operating system
       >>core  Errors, memory, bytes, scalar arithmetic
       >>threads  A crew of sleeping threads
       >>formats  How tensors are stored
       >>dispatch  One set of kernels, compiled once per instruction set
       >>gguf  The reader of GGUF files
       >>unicode  UTF-8 and character classes
       >>tokenizer  Text to token ids and back
       >>arch  Architectures as rows of data
       >>model  Hyper-parameters, layers, weights
       >>prefix  Which text a page holds
       >>kv  Pages, the ring, sequences
       >>forward  The transformer as a plan of operations
       >>sampler  From logits to one token
       >>step  Contexts and their requests; walking the plan
       >>public  The API's functions
       >>kernels  What is compiled once per instruction set

   SWITCHES (define to 1 before every inclusion, the same in all files)
       KVC_STATIC        all functions are static; copies of the library can live side by side
       KVC_NO_THREADS    makes no thread and takes no lock; the host lets one thread in at a time
       KVC_NO_FILES      no file system; models come from buffers
       KVC_NO_SIMD       only the plain C kernels: the same bits, less code, slow
       KVC_USE_CBLAS     adds KVC_GEMM_CBLAS; link OpenBLAS or another cblas
   Strings: KVC_HEADER_FILENAME, the name of a renamed copy, since the header includes itself;
   default
   "kvc.h". KVC_API, the linkage of the functions.

   CONCEPTS
   A decoder-only transformer reads tokens from left to right. Each layer makes of a token a
   query, a key and a value; the query looks at the keys and values of the token itself and of
   those before it. Keys and values depend on nothing that comes later. So they are computed once,
   kept in memory that was reserved beforehand, and found again by position. The query is used
   once and thrown away.

       token      an id of the model's vocabulary; text is tokenized into ids and put together again
       position   the index of a token in its sequence, from 0
       model      weights, hyper-parameters, vocabulary; does not change once open
       page       K and V of page_size consecutive positions, for all layers; the unit of sharing
       cache      all pages, reserved at creation; serves every sequence and context of one model
       sequence   a conversation or document: references to its pages and the next position
       context    a worker: scratch memory, its threads, the cursor of the running step
       step       one pass over the weights for a number of rows
       row        one token at one position of one sequence, inside a step
       batch      prefills and decodes of several sequences in one step: the weights are read once
                  for all, so sixteen characters do not wait sixteen times as long as one
       request    tokens for a sequence, and perhaps a text that goes on from them
       prefill    a step over many known tokens; bound by arithmetic
       decode     a step over one new token; bound by reading the weights and the cache
       logits     one number for each token of the vocabulary: how likely it is to come next
       sampler    turns logits into a token

   A fork is a second sequence with the same past: it shares the pages until one of the two
   writes. A roll-back forgets the latest positions, kvc_seq_remove any others, kvc_seq_reorder
   gives sequences each other's past. None of them touches K or V, and the length of a sequence
   hardly counts: a fork counts up a reference for each 64 pages.
   A full sequence refuses the step, or, with KVC_POLICY_WINDOW, lets its oldest positions go and
   reads on without end. KVC_POLICY_HEAVY does so, too, but keeps those that got the most attention:
   it forgets less of one long dialogue, and adapts more slowly when the text turns to something
   else. kvc_seq_save and kvc_seq_load carry a sequence to another process. Models with a learned
   vector for each position (GPT-2) end at the last one, and only the end of a sequence can be
   removed.

   The prefix table knows the text of pages, of those too that no sequence holds any more. A
   sequence that is opened with kvc_seq_open_shared finds there what any other computed after the
   same tokens: forty characters over one description of the world hold it once, and the next turn
   of a conversation computes what is new. A prefill needs no call of its own for that; the bits are
   those of a cold run, and kvc_seq_query tells how much was there and why the rest was not. Texts
   that are read at the same time cannot find each other's: let one read what all begin with, then
   submit the others. Salts keep tenants apart, who can then not even measure what others have
   computed.
   kvc_prefix_save and kvc_prefix_load carry the table to another process, and a tier (kvc_tier) of
   the host's takes the pages whose memory is needed and gives them back: a disk, say, or a server
   that several processes share. Nothing that comes from there is trusted: its tokens are compared,
   its bytes authenticated; what does not come in time is computed.

   kvc_prefill, kvc_decode and kvc_batch return when they are done. A program that must not wait
   gives a context its requests with kvc_submit and calls kvc_run(ctx, 2000) in each frame, which
   works on them for two milliseconds, stops between two tiles and goes on from there the next time;
   until then nothing runs and nothing is locked. A request that is submitted joins the next pass
   over the weights, so that texts of many characters are written at once, and leaves when it is
   done; n_chunk keeps a long prompt from holding up the others. One with a sampler writes its text
   on its own and tells each token. kvc_cancel leaves every sequence as it was. kvc_progress tells
   how far it is. A program with threads to spare has one of them call kvc_run(ctx, KVC_NO_LIMIT),
   and submits from the others: see examples/worker.c.

   Layers that see only a window of positions (sliding-window attention) need K and V of that window
   alone: they have a pool of pages of their own, and give back what fell out. A sequence of such a
   model cannot be rolled back further than n_back positions of kvc_cache_desc, since what the
   window would show then is gone.

   ERRORS
   Functions that can fail return kvc_result, 0 for success, and fill a kvc_error (which may be
   NULL) with the code, a sentence and the key, tensor or argument at fault. A call that fails has
   changed nothing: a sequence keeps its position, a full cache keeps its pages. When a sequence
   has reached n_ctx or the pages are used up, the step is refused with KVC_ERROR_FULL, unless
   kvc_seq_set_policy says otherwise; nothing is ever cut off silently. The library never prints,
   never ends the program and keeps no global state. Pointers that are not NULL are trusted: a freed
   object or too small an array cannot be detected.

   MEMORY
   Model, cache, context and sampler get their memory when they are made, from the host's
   allocator or from malloc; cache, context and sampler are one block each, whose size can be
   asked for beforehand and which the host may bring itself. After that no step, sampler or
   sequence function allocates, but for sequences with KVC_POLICY_GROW; kvc_tokenize does for
   unusual text unless it is given work memory.
   Opening a model copies its matrices into one block, in the order in which kernels read them
   (desc.n_threads of kvc_model_desc shares the work); the mapping's own pages are then given back,
   so the process holds the weights once. KVC_WEIGHTS_IN_PLACE makes no copy and opens at once:
   decodes are slower, and prefills pack a block each time they read it. A mapped file
   must not be changed or cut while it is open: the operating system answers a read past its new
   end with a signal. The cache takes n_pages * page_size * (bytes per token) and a little: bytes
   per token = layers * kv_heads * (head_dim * bytes of type_k + head_dim_v * bytes of type_v),
   head_dim_v rounded up to 16, both to 32 for quantized types (see kvc_kv_type). With latent
   attention (DeepSeek V2 and V3, MiniCPM3) it is layers * head_dim * bytes of type_k, where
   head_dim is the latent's rank and the turned dimensions of one key that all heads share: of
   V2-Lite 576 elements a layer, where keys and values of its 16 heads would be 5,120. Layers with a
   window of W positions take, for each sequence, the pages that W - 1 + n_back + n_batch positions
   touch, however long it is. kvc_cache_query tells all of it, kvc_seq_query what one sequence holds
   alone and with others.

   THREADS
   A model may be used by any number of threads. A cache locks itself: sequences of one cache may
   be opened, computed and closed by different threads at once, each with its own context. A
   sequence, a context, a sampler and a text stream are used by one thread at a time; any number may
   fork a sequence that nobody changes meanwhile, and kvc_submit, kvc_cancel and kvc_progress may be
   called beside what the context is doing. A context with n_threads of 0 or 1 makes no thread. With
   more, its threads sleep between steps; within a step a thread that finds nothing to do spins for
   some microseconds, then yields, then sleeps. With a job system of the host's (kvc_jobs) the
   library makes no thread at all.
   Kernels run in the standard floating-point mode and put the host's mode back.

   NUMBERS
   N1  The bits of every K, V and logit depend on the weights, the token ids, their positions and
       the KV types, and on nothing else: not on how a prompt was cut, n_batch, page_size, the
       number of threads, whose they are, who else is computed, time slices, what was cancelled, the
       prefix table, forks, roll-backs, reorders, saving and loading.
       Where positions were removed, they depend on the tokens and removals of the sequence and
       their order alone; with KVC_POLICY_WINDOW also on n_ctx, page_size and n_keep, which decide
       what is removed when, and with KVC_POLICY_HEAVY on n_heavy and on roll-backs, whose queries
       have counted.
   N2  The built-in kernels give the same bits on every instruction set, compiler and system. Each
       sum has one order, written beside the kernel; multiplications and additions are fused where
       the kernel says so and nowhere else; exp, sin, cos and pow are the header's own.
   Prefills with KVC_GEMM_CBLAS keep neither promise: the order of cblas's sums depends on the
   number of rows, the library and the machine. They are close: the tests allow 1e-4 between the
   logits of the two, which spread by about 2. Decodes always use the built-in kernels.
   32-bit x86 without SSE2 arithmetic (-msse2 -mfpmath=sse) keeps N1 but not N2. -ffast-math is
   refused.

   WHAT IT DOES NOT DO
   No training, no GPU, no work in the background: the host decides when a token is computed. No
   big-endian machines. No downloads. Architectures: those of the table in >>arch, which says what
   public models each covers. Formats: GGUF versions 2 and 3 with tensors in F32, F16, BF16, Q8_0,
   Q4_0. Files of other kinds are refused by name.
*/
#ifndef KVC__PASS

/* ------------------------------------------------------------------------------------------------
   >>config  Compile-time switches
   One block; each switch may be set to 1 before the header is included. The manual lists them.
   ---------------------------------------------------------------------------------------------- */
#ifndef KVC_H
#define KVC_H

#include <stddef.h>
#include <stdint.h>

#define KVC_VERSION_MAJOR 0
#define KVC_VERSION_MINOR 1
#define KVC_VERSION_PATCH 0
#define KVC_VERSION_STRING "0.1.0"
/* One comparable number: 0xMMmmpp. */
#define KVC_VERSION 0x000100

#ifndef KVC_STATIC       /* 1: every function is static; several copies can live in one program */
#define KVC_STATIC 0
#endif
#ifndef KVC_NO_THREADS   /* 1: no thread is ever made and no lock taken; the host serializes */
#define KVC_NO_THREADS 0
#endif
#ifndef KVC_NO_FILES     /* 1: no file system; models come from buffers */
#define KVC_NO_FILES 0
#endif
#ifndef KVC_NO_SIMD      /* 1: only the plain C kernels; saves code, loses most speed, same bits */
#define KVC_NO_SIMD 0
#endif
#ifndef KVC_USE_CBLAS    /* 1: KVC_GEMM_CBLAS becomes available; link OpenBLAS or another cblas */
#define KVC_USE_CBLAS 0
#endif

#ifndef KVC_API
#if KVC_STATIC && defined(__GNUC__)
#define KVC_API static __attribute__((unused))
#elif KVC_STATIC
#define KVC_API static
#else
#define KVC_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------
   >>api  Everything a host calls
   Constructors take (out, desc, err): on success *out is the new object, on failure it is NULL and
   nothing is left behind. Every desc is zero-initialised by the host ( = {0} ); a zero field means
   the default written beside it. `err` may be NULL everywhere.
   ---------------------------------------------------------------------------------------------- */

/* ---- results and errors ---- */

/* One list gives the enum, the texts and the tests. */
#define KVC__RESULTS(X) \
    X(KVC_OK,                0, "no error") \
    X(KVC_ERROR_ARGUMENT,    1, "an argument is out of its range") \
    X(KVC_ERROR_MEMORY,      2, "no memory from the allocator, or the given block is too small") \
    X(KVC_ERROR_FILE,        3, "the file cannot be opened, read or mapped") \
    X(KVC_ERROR_FORMAT,      4, "the file is damaged or contradicts itself") \
    X(KVC_ERROR_UNSUPPORTED, 5, "valid, but not supported by this build or version") \
    X(KVC_ERROR_FULL,        6, "no free page or no free position; nothing was changed") \
    X(KVC_ERROR_SPACE,       7, "the output buffer is too small; the needed size is returned") \
    X(KVC_ERROR_NUMERIC,     8, "no finite logit to choose from") \
    X(KVC_ERROR_THREAD,      9, "a thread or lock could not be made") \
    X(KVC_ERROR_CANCELLED,  10, "a callback or kvc_cancel asked to stop")

typedef enum kvc_result {
#define KVC__ENUM(name, value, text) name = value,
    KVC__RESULTS(KVC__ENUM)
#undef KVC__ENUM
    KVC_RESULT_COUNT
} kvc_result;

/* What went wrong, for a person and for a program. Filled only when a call fails. All text is
   zero-terminated ASCII or bytes copied from the file with unprintable ones replaced by '?'. */
typedef struct kvc_error {
    kvc_result code;
    char where[96];      /* the metadata key, tensor or argument at fault; "" if none */
    char message[160];   /* one sentence, without a final period */
    uint64_t position;   /* byte offset in the file where that helps, else 0 */
} kvc_error;

/* A static English text for a result, never NULL. Any thread. */
KVC_API const char *kvc_result_text(kvc_result result);

/* KVC_VERSION of the implementation that is linked. Any thread. */
KVC_API unsigned kvc_version(void);

/* ---- hooks ---- */

/* The host's memory. Both functions or neither (zeroed: malloc and free). `align` is a power of
   two, at most 64. `free` gets the size that was asked for. They are called by constructors,
   destructors and where a function says so; never during a step, while sampling or on a worker
   thread. */
typedef struct kvc_allocator {
    void *(*alloc)(size_t size, size_t align, void *user);
    void (*free)(void *ptr, size_t size, void *user);
    void *user;
} kvc_allocator;

/* Where the threads come from that share work. Zeroed: the library makes n_threads - 1 of its own,
   which sleep while there is nothing to do and end with the object that they were made for. */
typedef struct kvc_jobs {
    /* The host's job system: calls fn(arg, i) once for each i below n, on any of its threads, at
       the same time as far as it can, and returns when all have returned; n is n_threads. The
       library then makes no thread. Each fn works until the step, or the time that kvc_run was
       given, is over: it is one long job for each thread, not one for each part. Calls that come
       one after the other instead give the same bits. NULL: none. */
    void (*parallel_for)(uint32_t n, void (*fn)(void *arg, uint32_t i), void *arg, void *user);
    /* Called on each thread that the library made, with begins 1 at its start and 0 at its end:
       the place to give it a name, a priority and the processors it may run on. worker: 1 to
       n_threads - 1. NULL: not called. */
    void (*on_thread)(uint32_t worker, int begins, void *user);
    void *user;                 /* for both */
} kvc_jobs;

/* A block of the host's own memory: aligned to 64 bytes where an object is built in it. */
typedef struct kvc_memory {
    void *ptr;
    size_t size;         /* bytes */
} kvc_memory;

/* ---- metadata ---- */

/* Value types of GGUF metadata, with the numbers of the file format (ggml docs, gguf.md). */
typedef enum kvc_meta_type {
    KVC_META_U8 = 0, KVC_META_I8 = 1, KVC_META_U16 = 2, KVC_META_I16 = 3, KVC_META_U32 = 4,
    KVC_META_I32 = 5, KVC_META_F32 = 6, KVC_META_BOOL = 7, KVC_META_STRING = 8, KVC_META_ARRAY = 9,
    KVC_META_U64 = 10, KVC_META_I64 = 11, KVC_META_F64 = 12
} kvc_meta_type;

/* One metadata value. Pointers lead into the file's bytes and live as long as the model. */
typedef struct kvc_meta {
    const char *key;            /* not zero-terminated */
    size_t key_size;
    kvc_meta_type type;
    kvc_meta_type item_type;    /* of an array; arrays of arrays are refused at load */
    uint64_t n_items;           /* of an array, else 1 */
    const void *data;           /* the value as in the file, little-endian, perhaps unaligned;
                                   a string's bytes (not zero-terminated); an array's first item */
    size_t data_size;           /* bytes at data */
} kvc_meta;

/* ---- model ---- */

typedef int32_t kvc_token;      /* a token id, 0 <= id < n_vocab; KVC_NO_TOKEN is none */
#define KVC_NO_TOKEN (-1)

typedef struct kvc_model kvc_model;

typedef enum kvc_weights {      /* where kernels read matrices */
    KVC_WEIGHTS_DEFAULT = 0,    /* KVC_WEIGHTS_PACKED */
    KVC_WEIGHTS_PACKED = 1,     /* a copy made while loading, in large pages, with 16 outputs side
                                   by side: as many bytes again as the matrices have, and faster */
    KVC_WEIGHTS_IN_PLACE = 2    /* the file's mapping or the host's buffer: no memory, opened at
                                   once. The same bits. */
} kvc_weights;

typedef struct kvc_model_desc {
    uint32_t start_canary;      /* 0; catches a desc that was not zeroed */
    const char *path;           /* UTF-8 path of a GGUF file, mapped read-only; or NULL and data */
    const void *data;           /* or a GGUF image in memory; used in place, never copied or
                                   written: it must outlive the model. Any alignment. */
    size_t data_size;           /* bytes at data */
    kvc_allocator allocator;    /* zeroed: malloc and free. Also used by every object made from this
                                   model whose own allocator is zeroed. */
    /* Called by kvc_model_open from its thread with the fraction done, which never falls and ends
       at 1. Return 0 to stop: the call then gives KVC_ERROR_CANCELLED. NULL: not called. */
    int (*progress)(float fraction, void *user);
    /* One line about something odd but harmless in the file. NULL: silent. */
    void (*log)(const char *text, void *user);
    void *user;                 /* for progress and log */
    kvc_weights weights;
    uint32_t n_threads;         /* threads that pack weights, the caller's included, until
                                   kvc_model_open returns; 0 and 1: no thread is made. At most
                                   256. */
    kvc_jobs jobs;              /* whose threads; zeroed: the library's */
    uint32_t end_canary;        /* 0 */
} kvc_model_desc;

/* Opens and checks a model. Matrices are read where desc->weights says, the embedding where it is
   in the file; small tensors and tables are copied. Errors: FILE, FORMAT,
   UNSUPPORTED (architecture, tensor type), MEMORY, ARGUMENT, CANCELLED, THREAD; err names the key,
   tensor or argument. */
KVC_API kvc_result kvc_model_open(kvc_model **out, const kvc_model_desc *desc, kvc_error *err);

/* Frees the model; NULL is allowed. Everything made from it must be freed before. */
KVC_API void kvc_model_close(kvc_model *model);

typedef struct kvc_model_info {
    char architecture[32];      /* general.architecture */
    char name[96];              /* general.name, cut to fit; "" if absent */
    uint32_t n_layers;
    uint32_t n_embd;            /* width of the residual stream */
    uint32_t n_heads;           /* query heads */
    uint32_t n_kv_heads;        /* key and value heads; n_heads / n_kv_heads queries share one. With
                                   latent attention 1: the latent is all heads' */
    uint32_t head_dim;          /* of one query or key head, as it is stored */
    uint32_t head_dim_v;        /* of one value head; with latent attention these are elements of
                                   the key, which are not stored again */
    uint32_t n_latent;          /* rank of the latent of keys and values; 0: no latent attention */
    uint32_t n_ff;              /* width of the feed-forward layer */
    uint32_t n_experts;         /* of the layers with a mixture of experts, 0: none */
    uint32_t n_experts_used;    /* of them by each token */
    uint32_t n_ff_expert;       /* width of one expert */
    uint32_t n_ff_shared;       /* of the shared expert, which all tokens use; 0: none */
    uint32_t n_vocab;           /* columns of the logits; ids at or above n_tokens are padding */
    uint32_t n_tokens;          /* entries of the vocabulary */
    uint32_t n_ctx_train;       /* positions the model was trained for; longer is allowed */
    uint32_t rope_dim;          /* rotated dimensions of a head */
    uint32_t window;            /* positions that a row sees in layers with a window, 0: none */
    uint64_t n_params;          /* elements of all tensors */
    uint64_t weights_size;      /* bytes of all tensors as stored */
    size_t memory_size;         /* bytes the model took from the allocator */
    size_t packed_size;         /* those of them that packed weights take */
    kvc_token bos, eos, eot;    /* KVC_NO_TOKEN where the file names none */
    int add_bos, add_eos;       /* whether kvc_tokenize adds them when asked for
                                   KVC_TEXT_SPECIAL_ADD */
    int has_tokenizer;          /* 0: only token ids can be used; tokenizer functions fail */
} kvc_model_info;

/* Fills *info. Any thread. */
KVC_API void kvc_model_query(const kvc_model *model, kvc_model_info *info);

/* Number of metadata entries, and entry i (KVC_ERROR_ARGUMENT if i is past the end). Any thread. */
KVC_API size_t kvc_model_meta_count(const kvc_model *model);
KVC_API kvc_result kvc_model_meta_at(const kvc_model *model, size_t i, kvc_meta *out);

/* The entry with this zero-terminated key; 0 and *out zeroed if there is none, else 1. Any
   thread. */
KVC_API int kvc_model_meta_find(const kvc_model *model, const char *key, kvc_meta *out);

/* Item i of an array as a value of its own (key is the array's). Time: constant for numbers, O(i)
   for strings. KVC_ERROR_ARGUMENT if `array` is no array or i is past the end. Any thread. */
KVC_API kvc_result kvc_meta_item(const kvc_meta *array, uint64_t i, kvc_meta *out);

/* The value as a number; a boolean is 0 or 1. Returns 0 (and *out = 0) for strings and arrays. */
KVC_API int kvc_meta_number(const kvc_meta *meta, double *out);

/* ---- text ---- */

enum {                          /* flags of kvc_tokenize */
    KVC_TEXT_SPECIAL_ADD = 1,   /* add BOS in front and EOS behind where the model's metadata says
                                   so */
    KVC_TEXT_SPECIAL_PARSE = 2  /* control tokens written out in the text ("<|eot|>") become their
                                   id; leave it out for text of users: they then stay plain text */
};

/* Text to token ids. `text` is bytes, any bytes: what the vocabulary cannot spell falls back to
   byte tokens, or to the unknown token. *n_tokens gets the number of ids; if it is more than
   `tokens_cap`, KVC_ERROR_SPACE, *n_tokens is the number needed and no id was written past the
   cap. tokens may be NULL if tokens_cap is 0. Text longer than 2^30 bytes: KVC_ERROR_ARGUMENT.
   `work` (NULL, or at least kvc_tokenize_work_size bytes): used for stretches of text that the
   vocabulary offers no place to cut, a few hundred bytes and more; without it such a stretch
   makes one alloc and free of the model's allocator. Errors: UNSUPPORTED if the model has no
   tokenizer that this version knows, or no token for a part of the text and no unknown token either
   (err names the key), MEMORY. Any thread. */
KVC_API kvc_result kvc_tokenize(const kvc_model *model, const char *text, size_t text_size,
    unsigned flags, kvc_token *tokens, size_t tokens_cap, size_t *n_tokens,
    const kvc_memory *work, kvc_error *err);

/* Bytes of work memory with which no text of text_size bytes makes kvc_tokenize allocate. */
KVC_API size_t kvc_tokenize_work_size(const kvc_model *model, size_t text_size);

typedef enum kvc_token_kind {   /* numbers of the file format (tokenizer.ggml.token_type) */
    KVC_TOKEN_NORMAL = 1, KVC_TOKEN_UNKNOWN = 2, KVC_TOKEN_CONTROL = 3, KVC_TOKEN_USER = 4,
    KVC_TOKEN_UNUSED = 5, KVC_TOKEN_BYTE = 6
} kvc_token_kind;

/* The vocabulary's own spelling of a token (with its marks for spaces and bytes), not
   zero-terminated, alive as long as the model. NULL and *size = 0 for an id without an entry.
   kind may be NULL. */
KVC_API const char *kvc_token_spelling(const kvc_model *model, kvc_token token, size_t *size,
    kvc_token_kind *kind);

/* 1 if generation ends with this token (end of text or of turn, as the metadata says), else 0. */
KVC_API int kvc_token_is_end(const kvc_model *model, kvc_token token);

/* Token ids to text, one token at a time, so that only whole UTF-8 characters leave. Plain data:
   zero it to start a new text, copy it to branch. */
typedef struct kvc_text_stream {
    unsigned char held[4];      /* the first bytes of a character that is not complete yet */
    uint8_t n_held;
    uint8_t started;            /* the leading space that some tokenizers add was handled */
    uint8_t show_control;       /* host: 1 lets control tokens appear as their spelling */
    uint8_t keep_space;         /* host: 1 keeps that leading space, for text that goes on in
                                   mid-line */
} kvc_text_stream;

/* Appends a token: up to buf_cap bytes go to buf, *n gets their number (not zero-terminated). Bytes
   that can never become a character are passed through as they are. KVC_ERROR_SPACE: *n is the size
   needed and the stream is unchanged. KVC_ERROR_ARGUMENT: not an id of this model. */
KVC_API kvc_result kvc_text_push(const kvc_model *model, kvc_text_stream *stream, kvc_token token,
    char *buf, size_t buf_cap, size_t *n, kvc_error *err);

/* Ends the text: held bytes of an unfinished character, at most 4, go to buf; the stream is as
   new. */
KVC_API size_t kvc_text_end(kvc_text_stream *stream, char buf[4]);

/* ---- cache ---- */

/* How K and V are stored. Quantized types round blocks of 32 elements of a head (a head of another
   width is filled up with zeros) when a position is stored; attention reads them as they are, with
   queries rounded to 8 bits for quantized keys. What each costs is measured by bench/kv.c on the
   model of examples/models: the divergence (Kullback and Leibler) of its predictions from those
   with K and V in F32, and the share of positions whose likeliest token changes. */
typedef enum kvc_kv_type {
    KVC_KV_DEFAULT = 0,         /* KVC_KV_F32 */
    KVC_KV_F32 = 1,             /* 4 bytes an element: the reference */
    KVC_KV_F16 = 2,             /* 2 bytes. 1e-7, 0.01 %: for every use, if no K or V passes
                                   65,504 */
    KVC_KV_Q8 = 3,              /* 34 bytes for 32: 8 bits and a scale. 3e-5, 0.2 %: for long
                                   contexts and many sequences */
    KVC_KV_Q4 = 4               /* 18 bytes for 32: 4 bits and a scale, keys rotated. 7e-3, 3 %:
                                   where memory is short. For V alone, beside K in Q8, 2e-3, 2 % */
} kvc_kv_type;

typedef struct kvc_cache kvc_cache;

/* What a sequence does whose positions are used up. */
typedef enum kvc_policy {
    KVC_POLICY_ERROR = 0,       /* the step is refused with KVC_ERROR_FULL; nothing is lost */
    KVC_POLICY_WINDOW = 1,      /* the oldest positions are removed, a page at a time, but for the
                                   first n_keep ("attention sinks", Xiao et al. 2023,
                                   StreamingLLM) */
    KVC_POLICY_GROW = 2,        /* the cache takes more pages from its allocator before the step,
                                   half as many again as it has, or as many as are needed if those
                                   cannot be had; up to 2^30 positions */
    KVC_POLICY_HEAVY = 3        /* as WINDOW, and of the positions that would go those n_heavy stay
                                   that have received the most attention from all queries so far,
                                   summed over heads and over the layers that see everything ("heavy
                                   hitters", Zhang et al. 2023, H2O). To add it up, every score
                                   of these layers is computed twice. */
} kvc_policy;

/* What becomes of pages in the prefix table, for hosts that tell others which texts are here. */
typedef struct kvc_prefix_event {
    int stored;                 /* 1: a page became known; 0: it is gone */
    uint64_t key[2], parent[2]; /* of the page, and of that before it or of the salt: a SipHash
                                   keyed with prefix_key */
    const kvc_token *tokens;    /* [page_size], valid during the call */
} kvc_prefix_event;

#define KVC_TIER_KEY 20u            /* bytes */

/* The bytes of a page on their way to the host or from it. */
typedef struct kvc_parcel {
    void *data;                 /* the host's memory, of any alignment */
    size_t size;                /* bytes */
    void *host;                 /* the host's own, such as what it frees afterwards */
} kvc_parcel;

/* A second place for pages of the prefix table, behind the memory of the cache: a disk, another
   process, a server. A whole page goes there before it is overwritten, and a prefill of a sequence
   that takes part asks there for what the table lacks. The bytes hold the salt and all tokens up to
   the end of the page as they are. They come back only if model, K/V types, page_size and salt are
   the same, all tokens are equal and a SipHash of all bytes, keyed with prefix_key, is right; else
   the page is missing.
   What has come from there or was put there is not put again; pages with a time to live, and those
   that are swept or go for lack of n_prefix while running steps need all pages, are never put.
   The functions are called by threads that are in a call of this library, several at once, without
   a lock; they must not call this library. A slow one makes that one call slow. key: KVC_TIER_KEY
   bytes, another one for each page and reach, valid during the call. All NULL: no tier. */
typedef struct kvc_tier {
    /* 1: parcel->data is memory for parcel->size bytes, which the page is written to. After
       put_done it is the host's again, who may send it on in its own time. 1 with NULL: the page is
       there already. 0: it is not wanted. put NULL: pages only come back. */
    int (*put)(const unsigned char *key, kvc_parcel *parcel, void *user);
    void (*put_done)(const unsigned char *key, kvc_parcel *parcel, void *user);
    /* 1: *parcel has the page, until get_done. 0: it is not there, or not yet: the page is then
       computed, and need not be waited for. get NULL: pages only go out. */
    int (*get)(const unsigned char *key, kvc_parcel *parcel, void *user);
    void (*get_done)(const unsigned char *key, kvc_parcel *parcel, void *user);
    /* keys: [n, KVC_TIER_KEY] of pages that get may be asked for next, in this order, to be read
       together or in the background. NULL: not called. */
    void (*ahead)(const unsigned char *keys, uint32_t n, void *user);
    void *user;
} kvc_tier;

typedef struct kvc_cache_desc {
    uint32_t start_canary;      /* 0 */
    const kvc_model *model;     /* must outlive the cache */
    uint32_t n_ctx;             /* positions one sequence can hold, 0: the model's n_ctx_train. With
                                   LongRoPE (Phi 3) it decides which of the file's two sets of
                                   frequencies is used: above the original context length the
                                   second, for all positions. Where positions are learned it cannot
                                   be more than there are. */
    uint32_t n_seqs;            /* sequences open at once, 0: 1 */
    uint32_t n_pages;           /* pages in all, of each reach (see kvc_reach_info); 0: enough for
                                   n_seqs full sequences */
    uint32_t page_size;         /* positions in a page, a power of two from 16 to 256; 0: 32 */
    uint32_t n_batch;           /* most rows of a chunk, where layers see a window only: as many
                                   positions are kept beside the window, and contexts with a larger
                                   n_batch cut their prefills accordingly. 0: 256 */
    uint32_t n_back;            /* positions that kvc_seq_rollback can surely go back from the
                                   longest that the sequence was, where layers see a window only.
                                   0: page_size */
    uint32_t n_cuts;            /* ranges that may be missing inside a sequence at once (see
                                   kvc_seq_remove), at most 4,096; 0: 8 */
    uint32_t n_heavy;           /* most positions that a sequence with KVC_POLICY_HEAVY can keep,
                                   n_keep and n_heavy together; each takes 4 * rope_dim + 8 bytes,
                                   and each of n_ctx 16, for every sequence. 0: the policy cannot
                                   be used */
    kvc_kv_type type_k, type_v; /* 0: KVC_KV_F32 */
    uint32_t n_edge;            /* the first and the last n_edge layers use the next two types
                                   instead: better ones where errors cost most. 0: none */
    kvc_kv_type edge_k, edge_v; /* 0: KVC_KV_F32 */
    uint32_t n_prefix;          /* pages whose text the prefix table knows at most, see
                                   kvc_seq_open_shared; n_pages is what it can use, or more where
                                   all layers see a window only. A page takes 4 * page_size + 132
                                   bytes more. With a table, layers that see a window have n_pages
                                   pages, too, if it is not 0: more places to go on from. 0: no
                                   table */
    uint32_t n_salts;           /* different salts in the table at once, 0: 16 */
    /* Called for each whole page that comes or goes, with the cache locked: it must not call this
       library. NULL: not called. */
    void (*on_prefix)(const kvc_prefix_event *event, void *user);
    uint64_t (*now)(void *user);        /* seconds, for ttl; never falls. NULL: libc's time */
    void *user;                 /* for both */
    const void *prefix_key;     /* 16 bytes that the table's hash is keyed with, the same in all
                                   processes that are to know each other's pages; copied.
                                   kvc_cache_new then takes the time to read all weights, whose
                                   hash the table's begins with. NULL: random */
    kvc_tier tier;              /* where pages go whose memory is needed; zeroed: nowhere. With
                                   n_prefix only. */
    uint32_t touch;             /* 1: all memory is written to when it is reserved, so that no step
                                   waits for the system to hand it out, which can take longer than
                                   a time slice. 0: as it comes from the allocator */
    kvc_memory memory;          /* kvc_cache_size bytes of the host's, aligned to 64; zeroed:
                                   allocator */
    kvc_allocator allocator;    /* zeroed: the model's */
    uint32_t end_canary;        /* 0 */
} kvc_cache_desc;

/* Bytes that kvc_cache_new takes for this desc, all of them, in one block; 0 if the desc is not
   valid or the size passes the address space. Allocates nothing. */
KVC_API size_t kvc_cache_size(const kvc_cache_desc *desc);

/* Reserves all K/V memory. Errors: ARGUMENT (err names the field), MEMORY. The cache is shared by
   any number of contexts and threads; it locks itself. */
KVC_API kvc_result kvc_cache_new(kvc_cache **out, const kvc_cache_desc *desc, kvc_error *err);

/* Frees the cache and every sequence still open in it; NULL is allowed. No step may be running. */
KVC_API void kvc_cache_free(kvc_cache *cache);

/* Layers whose rows see equally far back share their pages. */
#define KVC_MAX_REACHES 4u

typedef struct kvc_reach_info {
    uint32_t window;            /* positions that a row sees, its own included; 0: all */
    uint32_t n_layers;
    uint32_t seq_pages;         /* most pages that a sequence holds, whatever its length */
    size_t page_bytes;          /* K and V of one page of these layers */
    uint32_t pages_total, pages_free;
    uint32_t pages_promised;    /* of the free ones: to steps that are running */
    uint32_t pages_live;        /* held by at least one sequence */
    uint32_t pages_cached;      /* held by the prefix table alone: to be had like free ones */
    uint32_t pages_shared;      /* held by more than one sequence */
    uint32_t pages_peak;        /* most pages ever live */
} kvc_reach_info;

typedef struct kvc_cache_info {
    kvc_cache_desc desc;        /* with every default filled in */
    size_t memory_size;         /* bytes of its block, and of those that it has grown by */
    size_t bytes_per_token;     /* K and V of one position over all layers */
    size_t page_bytes;          /* K and V of page_size positions over all layers */
    uint32_t n_seqs_open;
    uint32_t pages_total, pages_free, pages_live, pages_shared, pages_peak; /* sums over reaches */
    uint32_t pages_cached;      /* the same; and of the prefix table since the cache was made: */
    uint32_t n_prefix_entries;  /* pages whose text it knows now */
    uint64_t prefix_bytes;      /* K and V of those pages, held by sequences or not; now, */
    uint64_t prefix_bytes_peak; /* and at most */
    uint64_t prefix_asked;      /* prefills that could take tokens over, */
    uint64_t prefix_answered;   /* and those that did */
    uint64_t prefix_hit;        /* tokens of requests that were there */
    uint64_t prefix_computed;   /* tokens of requests that sequences which use it had to compute */
    uint64_t prefix_saved_us;   /* microseconds that prefix_hit tokens would have taken, at the mean
                                   speed of this cache's prefills */
    uint64_t prefix_evicted;    /* pages */
    uint64_t tier_put;          /* pages that the tier took, */
    uint64_t tier_got;          /* that came back from it, */
    uint64_t tier_refused;      /* and that were something else than what was asked for */
    uint32_t n_reaches;
    kvc_reach_info reaches[KVC_MAX_REACHES];
} kvc_cache_info;

/* Fills *info. Any thread. */
KVC_API void kvc_cache_query(kvc_cache *cache, kvc_cache_info *info);

/* ---- sequence ---- */

typedef struct kvc_seq kvc_seq;
typedef struct kvc_ctx kvc_ctx;

/* Opens an empty sequence in a free slot of the cache. Allocates nothing. KVC_ERROR_FULL if
   n_seqs are open. A sequence is used by one thread at a time; opening and closing are safe from
   any thread. */
KVC_API kvc_result kvc_seq_open(kvc_seq **out, kvc_cache *cache, kvc_error *err);

typedef enum kvc_gemm {         /* who multiplies float matrices in a prefill */
    KVC_GEMM_BUILTIN = 0,       /* promises N1 and N2 of the manual's chapter on numbers */
    KVC_GEMM_CBLAS = 1          /* cblas_sgemm, close but not equal; only with KVC_USE_CBLAS. The
                                   built-in kernels still multiply the matrices of experts, and of
                                   single heads in latent attention */
} kvc_gemm;

/* How a sequence takes part in the prefix table (n_prefix of kvc_cache_desc): what it computes is
   entered there as it fills pages, and a prefill takes from there what any sequence of the same
   salt has computed after the same tokens, to the token. The bits are those of a cold run. Pages
   that nobody holds stay until the memory is needed; then those go first that were let go first. A
   page is found by a keyed hash, and taken only if its tokens are equal.
   A sequence from which positions were removed takes no part any more, nor does one under
   KVC_POLICY_HEAVY take anything, since queries that are not computed are not counted; a prefill at
   whose end positions must go does not either. Layers that see a window of W need the pages of the
   W - 1 + n_back positions before; where those are gone, the prefill goes on from the last place
   where they are not. */
typedef struct kvc_share {
    uint32_t start_canary;      /* 0 */
    const void *salt;           /* sequences of different salts never share; copied */
    size_t salt_size;           /* bytes, at most 64; 0: the salt of all that have none */
    uint32_t priority;          /* 1 (its pages go first) to 100; 0: 50. A page has the highest of
                                   those that used it. */
    uint32_t ttl;               /* seconds after its latest use from which a page is no longer
                                   found, see kvc_prefix_sweep; 0: it does not expire. The longest
                                   of those that used it counts. */
    uint32_t quota;             /* pages (of each reach) that may stay of this salt while nobody
                                   holds them; when there are more, its own go. 0: any number. The
                                   latest sequence's counts. */
    kvc_gemm gemm;              /* who computes its prefills. cblas's K and V have bits of their
                                   own, so they are shared apart; a prefill by the other one ends
                                   the sequence's part. No matter where all matrices are
                                   quantized. */
    uint32_t end_canary;        /* 0 */
} kvc_share;

/* kvc_seq_open for a sequence that takes part in the prefix table. share NULL: the defaults.
   Errors: ARGUMENT (err names the field; "cache" if it has no table), FULL (also n_salts are in
   use). Forks take part as their parent does. */
KVC_API kvc_result kvc_seq_open_shared(kvc_seq **out, kvc_cache *cache, const kvc_share *share,
    kvc_error *err);

/* Why tokens of a prefill had to be computed. */
typedef enum kvc_miss {
    KVC_MISS_NONE = 0,          /* all but those that wanted logits were there */
    KVC_MISS_OFF = 1,           /* the sequence takes no part, or its policy forbids it */
    KVC_MISS_ABSENT = 2,        /* they were not computed after the same tokens, under this salt,
                                   or nothing is remembered of it */
    KVC_MISS_EVICTED = 3,       /* they were, but the memory was needed, or they have expired */
    KVC_MISS_WINDOW = 4,        /* they are there, but not all that layers with a window see */
    KVC_MISS_PAGES = 5          /* they are there, but too few pages are free to go on from them */
} kvc_miss;

/* Keeps pages of the prefix table as if a sequence held them. */
typedef struct kvc_pin {
    kvc_cache *cache;           /* NULL: nothing is pinned */
    uint32_t entry, n_tokens;   /* the library's; tokens that are kept */
} kvc_pin;

/* Keeps what the table has of the sequence's first `length` tokens, until kvc_prefix_unpin; the
   sequence may be closed. *out: the caller's. Errors: ARGUMENT (also: the sequence takes no part,
   or `length` is more than it has; out->n_tokens tells how many are kept, down to whole pages),
   FULL (pages of windows that were given back cannot be kept as well). */
KVC_API kvc_result kvc_prefix_pin(kvc_pin *out, kvc_seq *seq, uint32_t length, kvc_error *err);
KVC_API void kvc_prefix_unpin(kvc_pin *pin);

/* Frees pages that have expired and those that nobody holds of a salt that is given up: `share`
   NULL for the former, else all of its salt (and gemm). Returns how many. Takes time for each page
   that the table knows. */
KVC_API uint32_t kvc_prefix_sweep(kvc_cache *cache, const kvc_share *share);

/* Puts pages into the tier that it does not have yet, n_most at most, 0: all; so others find them
   at once, and no step has to do it later. Returns how many it took. Any thread. It stops early
   while running steps may need all pages. */
KVC_API uint32_t kvc_prefix_flush(kvc_cache *cache, uint32_t n_most);

/* Asks the tier for pages as a prefill of these n tokens does that is to follow, but computes
   nothing. *n_there: how many of the tokens a prefill could take over now. If the tier answers
   later, call it again until that is enough or time is up. Without a tier it only looks. Errors:
   ARGUMENT. */
KVC_API kvc_result kvc_prefix_fetch(kvc_seq *seq, const kvc_token *tokens, size_t n,
    size_t *n_there, kvc_error *err);

/* Gives its pages back; NULL is allowed. */
KVC_API void kvc_seq_close(kvc_seq *seq);

/* What happens when the sequence is full; KVC_POLICY_ERROR if this is never called. n_keep: first
   positions that KVC_POLICY_WINDOW and KVC_POLICY_HEAVY keep; n_heavy: what the latter keeps beside
   them, else 0. Both together are at most n_ctx less two pages; the rest of n_ctx is for the most
   recent positions. Attention is added up from when KVC_POLICY_HEAVY is set. A roll-back does not
   take back what the forgotten queries have added. A fork has its parent's policy. What a cache has
   grown by it keeps until it is freed. Errors: ARGUMENT (also: more than n_heavy of the cache; no
   layer sees all positions, or those with a window see more than the recent ones; the sequence is
   longer than n_ctx). */
KVC_API kvc_result kvc_seq_set_policy(kvc_seq *seq, kvc_policy policy, uint32_t n_keep,
    uint32_t n_heavy, kvc_error *err);

/* A second sequence with the same past, which costs no K/V memory: pages are shared until one of
   the two writes into a shared page, which copies that page alone. KVC_ERROR_FULL as
   kvc_seq_open; KVC_ERROR_MEMORY only if the sequence has grown (KVC_POLICY_GROW). */
KVC_API kvc_result kvc_seq_fork(kvc_seq **out, const kvc_seq *seq, kvc_error *err);

/* Gives seqs[i] the past that seqs[from[i]] had before the call, as beam search does after each
   step; seqs: [n] open sequences of one cache, each once; from: [n] indices, any number of times.
   Like a fork, it costs no K/V memory, and a count for each 64 pages of a sequence. Errors:
   ARGUMENT; MEMORY only if one of them has grown (KVC_POLICY_GROW). */
KVC_API kvc_result kvc_seq_reorder(kvc_seq *const *seqs, const uint32_t *from, uint32_t n,
    kvc_error *err);

/* Positions held: the position of the next token. */
KVC_API uint32_t kvc_seq_length(const kvc_seq *seq);

/* Positions it can hold: the cache's n_ctx; with KVC_POLICY_GROW 2^30. */
KVC_API uint32_t kvc_seq_capacity(const kvc_seq *seq);

typedef struct kvc_seq_info {
    uint32_t length;            /* kvc_seq_length */
    uint32_t rollback_least;    /* shortest length that kvc_seq_rollback can go back to, apart from
                                   0. Not 0 once layers that see a window have given back pages */
    uint32_t pages_own;         /* held by this sequence alone, over all reaches */
    uint32_t pages_shared;      /* held by others, too */
    size_t bytes_own, bytes_shared;     /* of those pages */
    uint32_t prefix_hit;        /* tokens of the latest prefill that the prefix table had */
    kvc_miss prefix_miss;       /* why the others were computed */
} kvc_seq_info;

/* Fills *info. */
KVC_API void kvc_seq_query(const kvc_seq *seq, kvc_seq_info *info);

/* Goes back so that `length` positions remain; later ones are forgotten and their pages given back.
   KVC_ERROR_ARGUMENT if length is more than kvc_seq_length, or is not 0 and less than
   rollback_least of kvc_seq_info. */
KVC_API kvc_result kvc_seq_rollback(kvc_seq *seq, uint32_t length);

/* Forgets positions [from, to). Later ones move up: they keep what they were computed from, and
   their distance to what lies before the range shrinks by its length. The logits that follow are
   those of such a cache, not of a cold run of the tokens that are left. Costs no time for the
   positions that stay, and no precision, however often it is done: keys are not touched, queries
   are turned to meet them. Errors: ARGUMENT (from < to <= kvc_seq_length does not hold; or window
   layers have given back positions that come into their window again), FULL (more than n_cuts
   ranges would be missing; adjoining ones count as one, and one that reaches the end is a
   roll-back). After an error the sequence is as before. */
KVC_API kvc_result kvc_seq_remove(kvc_seq *seq, uint32_t from, uint32_t to, kvc_error *err);

/* Tokens at the positions [from, from + n). Errors: ARGUMENT (past kvc_seq_length, or layers that
   all see a window have given the positions back). */
KVC_API kvc_result kvc_seq_tokens(const kvc_seq *seq, uint32_t from, uint32_t n, kvc_token *out,
    kvc_error *err);

typedef enum kvc_save {
    KVC_SAVE_ALL = 0,           /* K and V: goes on at once, with the same bits */
    KVC_SAVE_TOKENS = 1         /* tokens alone: 4 bytes each, to be computed again when loaded */
} kvc_save;

/* Take bytes from the library or give it the next ones; all of them, or the call fails. 0: done. */
typedef int (*kvc_write_fn)(const void *data, size_t size, void *user);
typedef int (*kvc_read_fn)(void *data, size_t size, void *user);

/* Writes the prefix table and its pages, in pieces of at most 4 KiB, so that another process (or
   this one, tomorrow) need not compute them again. The file knows the model, the K/V types and
   page_size, not prefix_key; it holds the tokens of all salts as they are. Others may use the cache
   meanwhile; pages are left out while running steps may need all that are free. Errors: ARGUMENT
   (no table), FILE (`write` failed), MEMORY (12 bytes for each page that the table can know, while
   it writes). */
KVC_API kvc_result kvc_prefix_save(kvc_cache *cache, kvc_write_fn write, void *user,
    kvc_error *err);

/* Reads such a file into the table, as far as pages are free, beside what is there; *n_pages: how
   many pages of it the table has now; may be NULL. A page whose bytes are damaged is left out, with
   those that follow it in its texts; where the bytes that tell what comes next are damaged, the
   file ends. Errors: ARGUMENT (no table), FORMAT (not such a file), UNSUPPORTED (of another model,
   K/V type, page_size or version), MEMORY (as above). After an error nothing has come in. */
KVC_API kvc_result kvc_prefix_load(kvc_cache *cache, kvc_read_fn read, void *user,
    uint32_t *n_pages, kvc_error *err);

/* The same from memory, such as a mapped file. */
KVC_API kvc_result kvc_prefix_load_memory(kvc_cache *cache, const void *data, size_t size,
    uint32_t *n_pages, kvc_error *err);

/* Bytes that kvc_seq_save writes for the sequence as it is. */
KVC_API uint64_t kvc_seq_save_size(const kvc_seq *seq, kvc_save what);

/* Writes the sequence, its positions alone, in pieces of at most 4 KiB. The file knows the model (a
   hash of its shape and of all its weights, which the first saving or loading in a cache takes the
   time to read), the K/V types and page_size, and ends with a hash. Errors: ARGUMENT (tokens alone
   do not give a sequence again from which positions were removed), FILE (`write` failed). Allocates
   nothing. */
KVC_API kvc_result kvc_seq_save(const kvc_seq *seq, kvc_save what, kvc_write_fn write, void *user,
    kvc_error *err);

/* Opens a sequence as it was saved, with its policy: the logits that follow have the bits of the
   sequence that was not saved. ctx computes saved tokens; NULL if none are expected. Errors: FORMAT
   (damaged, cut short), UNSUPPORTED (of another model, K/V type, page_size or version), FULL (the
   cache has no room for it), ARGUMENT (ctx is NULL and needed). After an error nothing is open. It
   takes no part in the prefix table. A sequence with KVC_POLICY_GROW makes the cache grow by what
   the head of the file claims; from a buffer it can claim no more than the buffer holds. */
KVC_API kvc_result kvc_seq_load(kvc_seq **out, kvc_cache *cache, kvc_ctx *ctx, kvc_read_fn read,
    void *user, kvc_error *err);

/* The same with a buffer. *written: bytes needed, also after KVC_ERROR_SPACE. */
KVC_API kvc_result kvc_seq_save_memory(const kvc_seq *seq, kvc_save what, void *buffer, size_t size,
    size_t *written, kvc_error *err);
KVC_API kvc_result kvc_seq_load_memory(kvc_seq **out, kvc_cache *cache, kvc_ctx *ctx,
    const void *data, size_t size, kvc_error *err);

/* ---- context and steps ---- */

typedef enum kvc_isa {          /* instruction sets, in rising order within a processor family */
    KVC_ISA_BEST = 0,           /* the best one this processor has */
    KVC_ISA_BASE = 1,           /* plain C */
    KVC_ISA_NEON = 2,           /* AArch64 */
    KVC_ISA_AVX2 = 3,           /* with FMA and F16C */
    KVC_ISA_AVX512 = 4,         /* F, BW, DQ, VL */
    KVC_ISA_AVX512_VNNI = 5
} kvc_isa;

typedef struct kvc_ctx_desc {
    uint32_t start_canary;      /* 0 */
    const kvc_model *model;     /* must outlive the context */
    uint32_t n_batch;           /* most rows computed in one pass over the weights; longer prefills
                                   are cut into such chunks, which changes no bit. 0: 256 */
    uint32_t n_chunk;           /* most rows of prefills in a pass that has decodes as well: so
                                   texts that are being written need not stand still while another
                                   is read. 0: 64; n_batch: as many as there is room for */
    uint32_t n_threads;         /* threads that share a step, the caller's included; 0 and 1: no
                                   thread is made. At most 256. */
    kvc_jobs jobs;              /* whose threads; zeroed: the library's */
    uint64_t (*clock_us)(void *user);   /* microseconds of any clock, for kvc_run, called on all
                                   threads of a step; never falls. NULL: the system's */
    void *user;                 /* for clock_us */
    kvc_isa isa;                /* a cap: the best set up to this one is used */
    kvc_gemm gemm;
    kvc_memory memory;          /* kvc_ctx_size bytes of the host's, aligned to 64; zeroed:
                                   allocator */
    kvc_allocator allocator;    /* zeroed: the model's */
    uint32_t end_canary;        /* 0 */
} kvc_ctx_desc;

/* Bytes that kvc_ctx_new takes for this desc, in one block; 0 if the desc is not valid. Thread
   stacks are the operating system's and not counted. */
KVC_API size_t kvc_ctx_size(const kvc_ctx_desc *desc);

/* Makes a worker with its scratch memory and, for n_threads > 1 and without a job system of the
   host's, its n_threads - 1 sleeping threads. Errors: ARGUMENT, MEMORY, THREAD, UNSUPPORTED (gemm
   not compiled in). One thread uses it at a time, but for what may be called beside it. */
KVC_API kvc_result kvc_ctx_new(kvc_ctx **out, const kvc_ctx_desc *desc, kvc_error *err);

/* Joins the threads and frees; NULL is allowed. Requests that are not done are cancelled. */
KVC_API void kvc_ctx_free(kvc_ctx *ctx);

typedef struct kvc_ctx_info {
    kvc_ctx_desc desc;          /* with every default filled in; isa is the one in use */
    const char *isa_name;       /* "base", "neon", "avx2", "avx512", "avx512vnni" */
    size_t memory_size;         /* bytes of the one block */
    uint64_t n_rows;            /* token positions computed so far */
    uint64_t n_logit_rows;      /* rows that went through the LM head so far */
    uint64_t run_us_most;       /* the longest call of kvc_run with a limit, microseconds, */
    uint64_t run_us_late;       /* and the most by which one passed its limit */
} kvc_ctx_info;

/* Fills *info. No other thread may be in a call of the context. */
KVC_API void kvc_ctx_query(const kvc_ctx *ctx, kvc_ctx_info *info);

/* Prefill: appends n_tokens >= 1 known tokens to the sequence. If `logits` is not NULL, *logits
   points to the logits after the last token, [n_vocab], owned by the context and valid until its
   next step; with NULL the LM head is not computed. The sequence's cache and the context must be
   of one model. Errors: ARGUMENT (a token out of range, objects of different models), FULL (the
   sequence's capacity or the cache's pages do not suffice for all n_tokens), MEMORY (the same with
   KVC_POLICY_GROW), CANCELLED (by kvc_cancel on another thread). After an error the sequence is as
   before. */
KVC_API kvc_result kvc_prefill(kvc_ctx *ctx, kvc_seq *seq, const kvc_token *tokens, size_t n_tokens,
    const float **logits, kvc_error *err);

/* Prefill with the logits of chosen rows: rows[0..n_rows) are indices into tokens, strictly rising,
   and logits [n_rows, n_vocab] is the caller's. n_rows may be 0. */
KVC_API kvc_result kvc_prefill_rows(kvc_ctx *ctx, kvc_seq *seq, const kvc_token *tokens,
    size_t n_tokens, const size_t *rows, size_t n_rows, float *logits, kvc_error *err);

/* Decode: appends one token and gives the logits after it, as kvc_prefill does; the same bits as a
   prefill of that token. Always the built-in kernels. */
KVC_API kvc_result kvc_decode(kvc_ctx *ctx, kvc_seq *seq, kvc_token token, const float **logits,
    kvc_error *err);

typedef struct kvc_sampler kvc_sampler;

/* Tokens that a sequence is to be given, and perhaps a text that goes on from them. Zeroed by the
   host, filled in, and left where it is until is_done; so are the arrays. The sequence is the
   context's until then: all that may be done with it is to ask its length, tokens and kvc_seq_info,
   between calls, and to close it, which cancels the request. */
typedef struct kvc_request {
    kvc_seq *seq;
    const kvc_token *tokens;    /* [n_tokens] to be appended, at least 1 */
    size_t n_tokens;
    const size_t *rows;         /* [n_rows] whose logits are wanted: indices into tokens, strictly
                                   rising; NULL: the last n_rows of the tokens */
    size_t n_rows;              /* 0: no logits */
    float *logits;              /* [n_rows, n_vocab], the host's; written only if result is
                                   KVC_OK */
    uint32_t priority;          /* the highest go first; among equals those that came first */
    /* a text */
    kvc_sampler *sampler;       /* draws a token from the last logits, which is appended and gives
                                   the next ones, until one ends the text (kvc_token_is_end) or as
                                   below. That last token is not appended. Needs n_rows 1 and rows
                                   NULL; logits are overwritten with each token. NULL: no text */
    uint32_t limit;             /* most tokens to be drawn; 0: any number */
    /* Called with each token that was drawn. Not 0: the text ends with it. NULL: not called. */
    int (*on_token)(struct kvc_request *request, kvc_token token);
    /* Called when is_done was set; the request can be used again from there on, the sequence be
       closed. NULL: not called. */
    void (*on_done)(struct kvc_request *request);
    void *user;                 /* the host's */
    kvc_error *err;             /* why it failed; the host's, or NULL */
    /* set by the library */
    kvc_result result;          /* what became of the request */
    int is_done;
    uint32_t n_generated;       /* tokens drawn */
    kvc_token token;            /* the latest of them */
    size_t at;                  /* tokens of n_tokens that are done, those from the prefix table
                                   included; of a text that is being written, 0 or 1 */
    /* the library's own */
    struct kvc_request *next;
    const kvc_token *part;
    size_t n_part, row;
    uint64_t ticket;
    double work_now;
    uint32_t n_now, is_decode, is_submitted, is_started, is_ready, is_cancelled, cancel;
} kvc_request;

/* Appends tokens to several sequences in the same passes over the weights, prefills and decodes
   mixed, of any lengths. The bits are those of one call for each. A pass takes n_batch rows of the
   context at most: requests of a single token, which are decodes, first, then tokens of the others
   as they come, n_chunk at most beside decodes. A request that fails does so alone, with the errors
   of kvc_prefill, also where a sequence is in the batch for a second time; its sequence is as
   before. Returns when all are done. Errors of the call itself: ARGUMENT (also if the context has
   requests of kvc_submit that are not done); nothing is done then. */
KVC_API kvc_result kvc_batch(kvc_ctx *ctx, kvc_request *requests, size_t n_requests,
    kvc_error *err);

/* ---- steps in slices of time ---- */

/* Gives the context a request, which joins the others in the next pass over the weights (see
   kvc_batch). It is checked by kvc_run. Any thread; kvc_prefill and the like leave it alone. From
   on_done and on_token, too. Errors: ARGUMENT (NULL; it is submitted and not done). */
KVC_API kvc_result kvc_submit(kvc_ctx *ctx, kvc_request *request, kvc_error *err);

#define KVC_NO_LIMIT UINT64_MAX

/* Works on the requests that were submitted, for budget_us microseconds or until none is left.
   Returns 1 while some are, else 0. It stops between two tiles of an operation, which take
   microseconds, or some hundred with large models and long contexts, and always gets on by one; so
   kvc_run(ctx, 2000) in each frame spends two milliseconds of it. In between no thread of the
   library runs and no lock is held. A pass with KVC_GEMM_CBLAS stops between operations only.
   on_token and on_done are called from here, on the calling thread. KVC_NO_LIMIT: until all are
   done. A NULL context has no request.
   What no budget can bound is the operating system: memory that is touched for the first time (see
   touch of kvc_cache_desc), a model's mapped file that has not been read yet, a processor that is
   taken away. */
KVC_API int kvc_run(kvc_ctx *ctx, uint64_t budget_us);

/* The requests that were submitted or are computed by a blocking call, or one of them, are not to
   go on: they end with KVC_ERROR_CANCELLED, and their sequences are what they were before, to the
   bit. If a text has begun, its sequence keeps the tokens of the request and what on_token was
   given but for the latest token; kvc_seq_rollback forgets those. Pages that were whole stay in the
   prefix table. That happens in the call that is running, after the tiles that are being
   computed (where rows of other requests are in the same pass, after that), or in the next kvc_run.
   Where a policy removes positions or layers see a window, what a request takes away is kept until
   it is done, in pages that are free; if there are not as many, and in blocking calls, it is
   finished instead and the result KVC_OK. Any thread. request NULL: all so far. */
KVC_API void kvc_cancel(kvc_ctx *ctx, kvc_request *request);

/* The part of the work that is done, 0 to 1, of all requests that have begun since the context last
   had none; 1 if it has none. Of texts that are being written only the token that is computed
   counts. *us_left (may be NULL): microseconds of work that are left, an estimate from the time
   that the part took which is done; UINT32_MAX: not known. Any thread. */
KVC_API float kvc_progress(kvc_ctx *ctx, uint32_t *us_left);

/* ---- sampler ---- */

typedef struct kvc_logit_bias {
    kvc_token token;
    float bias;                 /* added to the logit; -INFINITY bans the token; NaN and +INFINITY
                                   are refused */
} kvc_logit_bias;

/* The order of the steps: bias, penalties, temperature, top_k, top_p, min_p, draw. */
typedef struct kvc_sampler_desc {
    uint32_t start_canary;      /* 0 */
    const kvc_model *model;     /* gives n_vocab and n_tokens (padding ids are never chosen); must
                                   outlive the sampler */
    float temperature;          /* 0: greedy, the largest logit, the smallest id among equals, and
                                   no random number is drawn. Finite and >= 0. */
    uint32_t top_k;             /* keep the k largest; 0: off */
    float top_p;                /* keep the smallest set of largest whose probability is >= top_p
                                   (Holtzman et al. 2020); 0 and 1: off */
    float min_p;                /* drop what is less likely than min_p times the likeliest; 0:
                                   off */
    float repeat_penalty;       /* divides positive and multiplies negative logits of tokens in the
                                   window (Keskar et al. 2019); 0 and 1: off */
    float frequency_penalty;    /* subtracted once for each time the token is in the window */
    float presence_penalty;     /* subtracted once if the token is in the window */
    uint32_t penalty_window;    /* how many of the latest tokens count, at most 2^28; 0: 64 */
    const kvc_logit_bias *bias; /* [n_bias], copied; the last entry of a token counts */
    size_t n_bias;
    uint64_t seed;              /* of the header's own generator: the same seed, logits and settings
                                   give the same tokens on every machine */
    kvc_memory memory;          /* kvc_sampler_size bytes, aligned to 64; zeroed: allocator */
    kvc_allocator allocator;    /* zeroed: the model's */
    uint32_t end_canary;        /* 0 */
} kvc_sampler_desc;

/* Bytes that kvc_sampler_new takes for this desc, in one block; 0 if the desc is not valid. */
KVC_API size_t kvc_sampler_size(const kvc_sampler_desc *desc);

/* Errors: ARGUMENT (err names the field), MEMORY. */
KVC_API kvc_result kvc_sampler_new(kvc_sampler **out, const kvc_sampler_desc *desc, kvc_error *err);

/* NULL is allowed. */
KVC_API void kvc_sampler_free(kvc_sampler *sampler);

/* Chooses a token from logits [n_vocab], which stay as they are, and records it for the
   penalties. KVC_ERROR_NUMERIC: a logit is NaN, or none is above -INFINITY (or all were banned);
   nothing is drawn or recorded. +INFINITY counts as the largest number. */
KVC_API kvc_result kvc_sampler_sample(kvc_sampler *sampler, const float *logits, kvc_token *token,
    kvc_error *err);

/* Records a token that came from elsewhere (a prompt, the player) for the penalties. Ids that are
   not the model's are ignored. */
KVC_API void kvc_sampler_accept(kvc_sampler *sampler, kvc_token token);

/* Forgets recorded tokens and starts the generator again from `seed`. */
KVC_API void kvc_sampler_reset(kvc_sampler *sampler, uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif /* KVC_H */

/* ---- end of the API: what follows is the implementation ---- */
#ifdef KVC_IMPLEMENTATION
#ifndef KVC__IMPLEMENTED
#define KVC__IMPLEMENTED

/* ------------------------------------------------------------------------------------------------
   >>platform  The compiler, the processor and the operating system
   Turns facts about them into macros and a few functions of our own; nothing below this section
   names a compiler or an operating system. All system headers are included here, before the first
   target region of >>dispatch, because intrinsics headers must not be read inside one.
   ---------------------------------------------------------------------------------------------- */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(_WIN32)
#define KVC__WINDOWS 1
#else
#define KVC__WINDOWS 0
#endif

#if KVC__WINDOWS && (!KVC_NO_THREADS || !KVC_NO_FILES)
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#define KVC__UNDEF_LEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#define KVC__UNDEF_NOMINMAX
#endif
#include <windows.h>
#ifdef KVC__UNDEF_LEAN
#undef WIN32_LEAN_AND_MEAN
#undef KVC__UNDEF_LEAN
#endif
#ifdef KVC__UNDEF_NOMINMAX
#undef NOMINMAX
#undef KVC__UNDEF_NOMINMAX
#endif
#elif !KVC__WINDOWS
#include <sys/time.h>
#if !KVC_NO_THREADS
#include <pthread.h>
#include <sched.h>
#endif
#if !KVC_NO_FILES
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif
#endif

#if KVC_USE_CBLAS
#include <cblas.h>
#endif

#if defined(__x86_64__) || defined(_M_X64) || defined(__i386__) || defined(_M_IX86)
#define KVC__X86 1
#else
#define KVC__X86 0
#endif
#if defined(__aarch64__) || defined(_M_ARM64)
#define KVC__ARM64 1
#else
#define KVC__ARM64 0
#endif
/* The vector kernels: 64-bit x86 and AArch64; 32-bit builds run the base kernels. So do builds by
   GCC for Windows, which keeps vectors on the stack without the alignment that it then relies on
   (GCC PR 54412). */
#if !KVC_NO_SIMD && (defined(__x86_64__) || defined(_M_X64)) && \
    !(KVC__WINDOWS && defined(__GNUC__) && !defined(__clang__))
#define KVC__SIMD_X86 1
#else
#define KVC__SIMD_X86 0
#endif
#if !KVC_NO_SIMD && KVC__ARM64
#define KVC__SIMD_NEON 1
#else
#define KVC__SIMD_NEON 0
#endif
#if KVC__SIMD_X86 || (KVC__X86 && defined(__SSE__))
#include <immintrin.h>
#endif
#if KVC__SIMD_X86 && defined(_MSC_VER)
#include <intrin.h>
#elif KVC__SIMD_X86
#include <cpuid.h>
#endif
#if KVC__SIMD_NEON
#include <arm_neon.h>
#endif

#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__)
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvc.h needs a little-endian machine: weights are used in place"
#endif
#endif
#if defined(__FAST_MATH__)
#error "compile the file with KVC_IMPLEMENTATION without -ffast-math: it changes the numbers"
#endif

/* Builds that check every access or emulate instructions: the same code, but not every copy of it
   that speed asks for, which would take minutes to compile. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(KVC__EMULATED)
#define KVC__CHECKED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define KVC__CHECKED 1
#endif
#endif
#ifndef KVC__CHECKED
#define KVC__CHECKED 0
#endif

#if defined(__GNUC__) && KVC__CHECKED
#define KVC__INLINE static inline __attribute__((unused))
#define KVC__UNUSED __attribute__((unused))
#elif defined(__GNUC__)
#define KVC__INLINE static inline __attribute__((always_inline, unused))
#define KVC__UNUSED __attribute__((unused))
#elif defined(_MSC_VER)
#define KVC__INLINE static __forceinline
#define KVC__UNUSED
#else
#define KVC__INLINE static inline
#define KVC__UNUSED
#endif
#if KVC__CHECKED
#define KVC__UNROLL
#elif defined(__clang__)
#define KVC__UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define KVC__UNROLL _Pragma("GCC unroll 16")
#else
#define KVC__UNROLL
#endif

/* No a*b+c may become a fused operation behind our back, whatever flags the host compiles with: the
   two round differently. The end of the implementation restores the host's setting. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#endif

/* ---- atomics: 32 bits wide, sequentially consistent; add returns the value before ---- */
#if KVC_NO_THREADS
typedef uint32_t kvc__atomic;
static uint32_t kvc__atomic_load(const kvc__atomic *p) { return *p; }
static void kvc__atomic_store(kvc__atomic *p, uint32_t v) { *p = v; }
static uint32_t kvc__atomic_add(kvc__atomic *p, uint32_t v) { uint32_t o = *p; *p += v; return o; }
static int kvc__atomic_swap(kvc__atomic *p, uint32_t from, uint32_t v)
{
    if (*p != from) return 0;
    *p = v;
    return 1;
}
#elif defined(__GNUC__)
typedef uint32_t kvc__atomic;
static uint32_t kvc__atomic_load(const kvc__atomic *p)
{
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
static void kvc__atomic_store(kvc__atomic *p, uint32_t v)
{
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
}
static uint32_t kvc__atomic_add(kvc__atomic *p, uint32_t v)
{
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
static int kvc__atomic_swap(kvc__atomic *p, uint32_t from, uint32_t v)
{
    return __atomic_compare_exchange_n(p, &from, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
#elif defined(_MSC_VER)
typedef volatile LONG kvc__atomic;
static uint32_t kvc__atomic_load(const kvc__atomic *p)
{
    return (uint32_t)InterlockedOr((kvc__atomic *)p, 0);
}
static void kvc__atomic_store(kvc__atomic *p, uint32_t v) { InterlockedExchange(p, (LONG)v); }
static uint32_t kvc__atomic_add(kvc__atomic *p, uint32_t v)
{
    return (uint32_t)InterlockedExchangeAdd(p, (LONG)v);
}
static int kvc__atomic_swap(kvc__atomic *p, uint32_t from, uint32_t v)
{
    return InterlockedCompareExchange(p, (LONG)v, (LONG)from) == (LONG)from;
}
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L && !defined(__STDC_NO_ATOMICS__)
#include <stdatomic.h>
typedef _Atomic uint32_t kvc__atomic;
static uint32_t kvc__atomic_load(const kvc__atomic *p) { return atomic_load((kvc__atomic *)p); }
static void kvc__atomic_store(kvc__atomic *p, uint32_t v) { atomic_store(p, v); }
static uint32_t kvc__atomic_add(kvc__atomic *p, uint32_t v) { return atomic_fetch_add(p, v); }
static int kvc__atomic_swap(kvc__atomic *p, uint32_t from, uint32_t v)
{
    return atomic_compare_exchange_strong(p, &from, v);
}
#else
#error "no atomics known for this compiler; define KVC_NO_THREADS to 1"
#endif

/* ---- locks, conditions, threads ---- */
#if KVC_NO_THREADS
typedef struct kvc__lock { char none; } kvc__lock;
static int kvc__lock_init(kvc__lock *l) { l->none = 0; return 1; }
static void kvc__lock_free(kvc__lock *l) { (void)l; }
static void kvc__lock_enter(kvc__lock *l) { (void)l; }
static void kvc__lock_leave(kvc__lock *l) { (void)l; }
#elif KVC__WINDOWS
typedef SRWLOCK kvc__lock;
typedef CONDITION_VARIABLE kvc__cond;
typedef HANDLE kvc__thread;
typedef DWORD kvc__thread_result;
#define KVC__THREAD_CALL WINAPI
static int kvc__lock_init(kvc__lock *l) { InitializeSRWLock(l); return 1; }
static void kvc__lock_free(kvc__lock *l) { (void)l; }
static void kvc__lock_enter(kvc__lock *l) { AcquireSRWLockExclusive(l); }
static void kvc__lock_leave(kvc__lock *l) { ReleaseSRWLockExclusive(l); }
static int kvc__cond_init(kvc__cond *c) { InitializeConditionVariable(c); return 1; }
static void kvc__cond_free(kvc__cond *c) { (void)c; }
static void kvc__cond_wait(kvc__cond *c, kvc__lock *l)
{
    SleepConditionVariableSRW(c, l, INFINITE, 0);
}
static void kvc__cond_wake(kvc__cond *c) { WakeAllConditionVariable(c); }
static void kvc__thread_yield(void) { SwitchToThread(); }
static int kvc__thread_start(kvc__thread *t, kvc__thread_result(KVC__THREAD_CALL *fn)(void *),
    void *arg)
{
    *t = CreateThread(NULL, 0, fn, arg, 0, NULL);
    return *t != NULL;
}
static void kvc__thread_join(kvc__thread t)
{
    WaitForSingleObject(t, INFINITE);
    CloseHandle(t);
}
#else
typedef pthread_mutex_t kvc__lock;
typedef pthread_cond_t kvc__cond;
typedef pthread_t kvc__thread;
typedef void *kvc__thread_result;
#define KVC__THREAD_CALL
static int kvc__lock_init(kvc__lock *l) { return pthread_mutex_init(l, NULL) == 0; }
static void kvc__lock_free(kvc__lock *l) { pthread_mutex_destroy(l); }
static void kvc__lock_enter(kvc__lock *l) { pthread_mutex_lock(l); }
static void kvc__lock_leave(kvc__lock *l) { pthread_mutex_unlock(l); }
static int kvc__cond_init(kvc__cond *c) { return pthread_cond_init(c, NULL) == 0; }
static void kvc__cond_free(kvc__cond *c) { pthread_cond_destroy(c); }
static void kvc__cond_wait(kvc__cond *c, kvc__lock *l) { pthread_cond_wait(c, l); }
static void kvc__cond_wake(kvc__cond *c) { pthread_cond_broadcast(c); }
static void kvc__thread_yield(void) { sched_yield(); }
static int kvc__thread_start(kvc__thread *t, kvc__thread_result(KVC__THREAD_CALL *fn)(void *),
    void *arg)
{
    return pthread_create(t, NULL, fn, arg) == 0;
}
static void kvc__thread_join(kvc__thread t) { pthread_join(t, NULL); }
#endif

/* ---- the clock: microseconds from any time on ---- */
#if KVC__WINDOWS && (!KVC_NO_THREADS || !KVC_NO_FILES)
static uint64_t kvc__clock(void)
{
    LARGE_INTEGER now, rate;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&rate);
    return (uint64_t)(now.QuadPart / rate.QuadPart) * 1000000u +
        (uint64_t)(now.QuadPart % rate.QuadPart) * 1000000u / (uint64_t)rate.QuadPart;
}
#elif KVC__WINDOWS
static uint64_t kvc__clock(void)
{
    return (uint64_t)clock() * 1000000u / CLOCKS_PER_SEC;
}
#elif defined(CLOCK_MONOTONIC)
static uint64_t kvc__clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}
#else   /* a strict C99 build: it can be set back, which ends a time slice */
static uint64_t kvc__clock(void)
{
    struct timeval t;
    gettimeofday(&t, NULL);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_usec;
}
#endif

/* A hint to the processor inside a short wait. */
#if !KVC_NO_THREADS
static void kvc__cpu_relax(void)
{
#if KVC__SIMD_X86 || (KVC__X86 && defined(__SSE2__))
    _mm_pause();
#elif KVC__ARM64 && defined(__GNUC__)
    __asm__ __volatile__("yield");
#endif
}
#endif

/* A hint that the cache line at p will be read; any address is allowed. */
KVC__INLINE void kvc__prefetch(const void *p)
{
#if defined(__GNUC__)
    __builtin_prefetch(p);
#elif KVC__SIMD_X86
    _mm_prefetch((const char *)p, _MM_HINT_T0);
#else
    (void)p;
#endif
}

/* The floating-point mode of the calling thread. Hosts set flush-to-zero or other roundings;
   kernels run in the standard mode, or bits would depend on the thread that ran them, and the
   host's mode is put back afterwards. */
typedef uint64_t kvc__fp_mode;
static kvc__fp_mode kvc__fp_enter(void)
{
#if KVC__SIMD_X86 || (KVC__X86 && defined(__SSE__))
    unsigned mode = _mm_getcsr();
    _mm_setcsr(0x1f80u);
    return mode;
#elif KVC__ARM64 && defined(__GNUC__)
    uint64_t mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    __asm__ __volatile__("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return mode;
#else
    return 0;
#endif
}
static void kvc__fp_leave(kvc__fp_mode mode)
{
#if KVC__SIMD_X86 || (KVC__X86 && defined(__SSE__))
    _mm_setcsr((unsigned)mode);
#elif KVC__ARM64 && defined(__GNUC__)
    __asm__ __volatile__("msr fpcr, %0" : : "r"(mode) : "memory");
#else
    (void)mode;
#endif
}

/* ---- files: the whole file as one read-only block ---- */
typedef struct kvc__file {
    const void *data;
    size_t size;
} kvc__file;

#if KVC_NO_FILES
static int kvc__file_map(kvc__file *f, const char *path)
{
    (void)f;
    (void)path;
    return 0;
}
static void kvc__file_unmap(kvc__file *f) { (void)f; }
#elif KVC__WINDOWS
static int kvc__file_map(kvc__file *f, const char *path)
{
    WCHAR wide[1024];
    HANDLE file, mapping;
    LARGE_INTEGER size;
    if (MultiByteToWideChar(CP_UTF8, 0, path, -1, wide, 1024) == 0) return 0;
    file = CreateFileW(wide, GENERIC_READ, FILE_SHARE_READ, NULL, OPEN_EXISTING,
        FILE_ATTRIBUTE_NORMAL, NULL);
    if (file == INVALID_HANDLE_VALUE) return 0;
    f->data = NULL;
    if (GetFileSizeEx(file, &size) && size.QuadPart > 0 &&
        (uint64_t)size.QuadPart <= (uint64_t)SIZE_MAX) {
        mapping = CreateFileMappingW(file, NULL, PAGE_READONLY, 0, 0, NULL);
        if (mapping != NULL) {
            f->data = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
            f->size = (size_t)size.QuadPart;
            CloseHandle(mapping);
        }
    }
    CloseHandle(file);
    return f->data != NULL;
}
static void kvc__file_unmap(kvc__file *f)
{
    if (f->data != NULL) UnmapViewOfFile(f->data);
}
#else
static int kvc__file_map(kvc__file *f, const char *path)
{
    struct stat st;
    void *p = MAP_FAILED;
    int fd = open(path, O_RDONLY);
    if (fd < 0) return 0;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0 &&
        (uint64_t)st.st_size <= (uint64_t)SIZE_MAX) {
        f->size = (size_t)st.st_size;
        p = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    close(fd);
    if (p == MAP_FAILED) return 0;
    f->data = p;
    return 1;
}
static void kvc__file_unmap(kvc__file *f)
{
    if (f->data != NULL) munmap((void *)(uintptr_t)f->data, f->size);
}
#endif

/* Advice for a large block that is about to be filled: pages of 2 MiB, where the system has them,
   fault and miss the TLB less often. Only whole pages inside the block are named. */
#if !KVC_NO_FILES && !KVC__WINDOWS && defined(MADV_HUGEPAGE)
static void kvc__memory_large(void *p, size_t size)
{
    const uintptr_t page = (uintptr_t)1 << 21;
    uintptr_t from = ((uintptr_t)p + page - 1) & ~(page - 1);
    uintptr_t to = ((uintptr_t)p + size) & ~(page - 1);
    if (from < to) (void)madvise((void *)from, to - from, MADV_HUGEPAGE);
}
#else
static void kvc__memory_large(void *p, size_t size)
{
    (void)p;
    (void)size;
}
#endif

/* The mapping will be read little from now on: the process need not keep its pages. */
#if !KVC_NO_FILES && !KVC__WINDOWS && defined(MADV_DONTNEED)
static void kvc__file_rest(const kvc__file *f)
{
    if (f->data != NULL) (void)madvise((void *)(uintptr_t)f->data, f->size, MADV_DONTNEED);
}
#else
static void kvc__file_rest(const kvc__file *f) { (void)f; }
#endif

/* ---- randomness ---- */

/* 16 bytes that others cannot guess, as far as the system gives some. */
static void kvc__random_key(uint64_t key[2])
{
    key[0] = (uint64_t)(uintptr_t)key;
    key[1] = (uint64_t)(uintptr_t)&kvc__random_key;
#if KVC__WINDOWS && (!KVC_NO_THREADS || !KVC_NO_FILES)
    {
        typedef BOOLEAN (WINAPI *random_fn)(PVOID, ULONG);
        HMODULE library = LoadLibraryA("advapi32.dll");
        LARGE_INTEGER ticks;
        QueryPerformanceCounter(&ticks);
        key[0] ^= (uint64_t)ticks.QuadPart;
        if (library != NULL) {
            random_fn fill = (random_fn)(void (*)(void))GetProcAddress(library,
                "SystemFunction036");       /* RtlGenRandom */
            if (fill != NULL) fill(key, 16);
            FreeLibrary(library);
        }
    }
#elif !KVC_NO_FILES
    {
        int file = open("/dev/urandom", O_RDONLY);
        if (file >= 0) {
            if (read(file, key, 16) != 16) key[0] ^= (uint64_t)(unsigned)file;
            close(file);
        }
    }
#endif
}

/* ------------------------------------------------------------------------------------------------
   >>core  Errors, memory, bytes, scalar arithmetic
   The small things every section uses. Sizes are computed with checked arithmetic wherever a factor
   comes from a file or a desc. The scalar functions here stand in for libm, whose last bit differs
   between platforms: the numeric contract needs one sequence of operations everywhere.
   ---------------------------------------------------------------------------------------------- */

/* ---- text without printf ---- */
typedef struct kvc__msg {
    char *buf;
    size_t cap, n;          /* n < cap; buf[n] is 0 */
} kvc__msg;

static void kvc__msg_start(kvc__msg *m, char *buf, size_t cap)
{
    m->buf = buf;
    m->cap = cap;
    m->n = 0;
    buf[0] = 0;
}

/* Unprintable bytes become '?': the text may reach a terminal. */
static void kvc__msg_bytes(kvc__msg *m, const char *s, size_t size)
{
    size_t i;
    for (i = 0; i < size && m->n + 1 < m->cap; i++) {
        unsigned char c = (unsigned char)s[i];
        m->buf[m->n++] = (c < 32 || c > 126) ? '?' : (char)c;
    }
    m->buf[m->n] = 0;
}

static void kvc__msg_text(kvc__msg *m, const char *s)
{
    kvc__msg_bytes(m, s, strlen(s));
}

static void kvc__msg_u64(kvc__msg *m, uint64_t v)
{
    char digits[20];
    size_t i = sizeof digits;
    do {
        digits[--i] = (char)('0' + (int)(v % 10));
        v /= 10;
    } while (v != 0);
    kvc__msg_bytes(m, digits + i, sizeof digits - i);
}

/* ---- errors ---- */
static kvc_result kvc__fail_bytes(kvc_error *err, kvc_result code, const char *where,
    size_t where_size, const char *message)
{
    kvc__msg m;
    if (err == NULL) return code;
    err->code = code;
    err->position = 0;
    kvc__msg_start(&m, err->where, sizeof err->where);
    kvc__msg_bytes(&m, where, where_size);
    kvc__msg_start(&m, err->message, sizeof err->message);
    kvc__msg_text(&m, message);
    return code;
}

static kvc_result kvc__fail(kvc_error *err, kvc_result code, const char *where, const char *message)
{
    return kvc__fail_bytes(err, code, where, strlen(where), message);
}

/* "<a> <x> <b> <y>" as the message: for contradictions between two numbers. */
static kvc_result kvc__fail_numbers(kvc_error *err, kvc_result code, const char *where,
    const char *a, uint64_t x, const char *b, uint64_t y)
{
    kvc__msg m;
    kvc__fail(err, code, where, "");
    if (err == NULL) return code;
    kvc__msg_start(&m, err->message, sizeof err->message);
    kvc__msg_text(&m, a);
    kvc__msg_text(&m, " ");
    kvc__msg_u64(&m, x);
    kvc__msg_text(&m, " ");
    kvc__msg_text(&m, b);
    kvc__msg_text(&m, " ");
    kvc__msg_u64(&m, y);
    return code;
}

/* ---- checked sizes: 1 if the result fits, else 0 ---- */
static int kvc__mul_size(size_t *out, size_t a, size_t b)
{
    if (b != 0 && a > SIZE_MAX / b) return 0;
    *out = a * b;
    return 1;
}

static int kvc__add_size(size_t *out, size_t a, size_t b)
{
    if (a > SIZE_MAX - b) return 0;
    *out = a + b;
    return 1;
}

static int kvc__mul_u64(uint64_t *out, uint64_t a, uint64_t b)
{
    if (b != 0 && a > UINT64_MAX / b) return 0;
    *out = a * b;
    return 1;
}

/* ---- memory ---- */

/* malloc gives no more than its own alignment: the block's start is kept just below the result. */
static void *kvc__libc_alloc(size_t size, size_t align, void *user)
{
    size_t total;
    unsigned char *raw, *p;
    (void)user;
    if (!kvc__add_size(&total, size, align + sizeof(void *))) return NULL;
    raw = (unsigned char *)malloc(total);
    if (raw == NULL) return NULL;
    p = raw + sizeof(void *);
    p += (align - ((uintptr_t)p & (align - 1))) & (align - 1);
    memcpy(p - sizeof(void *), &raw, sizeof raw);
    return p;
}

static void kvc__libc_free(void *ptr, size_t size, void *user)
{
    unsigned char *raw;
    (void)size;
    (void)user;
    memcpy(&raw, (unsigned char *)ptr - sizeof(void *), sizeof raw);
    free(raw);
}

/* Fills *out with the allocator to use: the given one, else `fallback`, else libc's. 0 if only
   one of its functions is set. */
static int kvc__allocator_resolve(kvc_allocator *out, const kvc_allocator *given,
    const kvc_allocator *fallback)
{
    if ((given->alloc == NULL) != (given->free == NULL)) return 0;
    if (given->alloc != NULL) {
        *out = *given;
    } else if (fallback != NULL) {
        *out = *fallback;
    } else {
        out->alloc = kvc__libc_alloc;
        out->free = kvc__libc_free;
        out->user = NULL;
    }
    return 1;
}

static void *kvc__alloc(const kvc_allocator *a, size_t size, size_t align)
{
    return a->alloc(size, align, a->user);
}

static void kvc__free(const kvc_allocator *a, void *p, size_t size)
{
    if (p != NULL) a->free(p, size, a->user);
}

/* Every object is one block. Its layout function runs twice over an arena: without a base it only
   measures, with one it places. Everything is aligned to 64 bytes, a cache line. */
typedef struct kvc__arena {
    unsigned char *base;    /* NULL: measuring */
    size_t used;
    int overflow;           /* the size passes the address space */
} kvc__arena;

static void *kvc__take(kvc__arena *a, size_t n, size_t item_size)
{
    size_t size, at = a->used;
    if (!kvc__mul_size(&size, n, item_size) || size > SIZE_MAX - 64 - at) {
        a->overflow = 1;
        return NULL;
    }
    a->used = at + ((size + 63) & ~(size_t)63);
    return a->base != NULL ? a->base + at : NULL;
}

/* The block of an object: the host's memory if given, else from the allocator. *owned tells
   which. */
static kvc_result kvc__block_get(void **out, size_t size, const kvc_memory *memory,
    const kvc_allocator *a, int *owned, kvc_error *err)
{
    *owned = memory->ptr == NULL;
    if (memory->ptr == NULL) {
        *out = kvc__alloc(a, size, 64);
        if (*out == NULL)
            return kvc__fail(err, KVC_ERROR_MEMORY, "allocator",
                "the allocator returned no memory");
        kvc__memory_large(*out, size);
        return KVC_OK;
    }
    if (((uintptr_t)memory->ptr & 63) != 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "memory.ptr", "not aligned to 64 bytes");
    if (memory->size < size)
        return kvc__fail_numbers(err, KVC_ERROR_MEMORY, "memory.size", "needed are", size,
            "bytes, given", memory->size);
    *out = memory->ptr;
    return KVC_OK;
}

/* ---- unaligned little-endian reads ---- */
static uint16_t kvc__rd16(const void *p) { uint16_t v; memcpy(&v, p, sizeof v); return v; }
static uint32_t kvc__rd32(const void *p) { uint32_t v; memcpy(&v, p, sizeof v); return v; }
static uint64_t kvc__rd64(const void *p) { uint64_t v; memcpy(&v, p, sizeof v); return v; }
static float kvc__rdf32(const void *p) { float v; memcpy(&v, p, sizeof v); return v; }
static double kvc__rdf64(const void *p) { double v; memcpy(&v, p, sizeof v); return v; }

/* ---- bits and hashes ---- */
static uint32_t kvc__f32_bits(float x) { uint32_t u; memcpy(&u, &x, sizeof u); return u; }
static float kvc__bits_f32(uint32_t u) { float x; memcpy(&x, &u, sizeof x); return x; }
static uint64_t kvc__f64_bits(double x) { uint64_t u; memcpy(&u, &x, sizeof u); return u; }
static double kvc__bits_f64(uint64_t u) { double x; memcpy(&x, &u, sizeof x); return x; }

/* A bijection of 64 bits with good avalanche: the finalizer of SplitMix64 (Steele, Lea and Flood,
   "Fast splittable pseudorandom number generators", 2014). */
static uint64_t kvc__mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* For tables over text from a file; not meant to resist an attacker who chooses the text. */
static uint64_t kvc__hash_bytes(const void *p, size_t n, uint64_t seed)
{
    const unsigned char *s = (const unsigned char *)p;
    uint64_t h = kvc__mix64(seed + 0x9e3779b97f4a7c15u + (uint64_t)n), tail = 0;
    size_t i;
    for (; n >= 8; n -= 8, s += 8) h = kvc__mix64(h ^ kvc__rd64(s));
    for (i = 0; i < n; i++) tail |= (uint64_t)s[i] << (8 * i);
    return kvc__mix64(h ^ tail);
}

/* 128 bits for as many bytes as a model has, at the speed of memory: eight words side by side, none
   of which waits for another. Every step is a bijection of its word. */
static void kvc__hash_bulk(const void *p, size_t n, uint64_t h[2])
{
    const unsigned char *s = (const unsigned char *)p;
    uint64_t lane[8], size = n;
    uint32_t i;
    for (i = 0; i < 8; i++) lane[i] = kvc__mix64(h[i % 2] + i);
    for (; n >= 64; n -= 64, s += 64)
        for (i = 0; i < 8; i++) {
            lane[i] = (lane[i] ^ kvc__rd64(s + 8 * i)) * 0x9e3779b97f4a7c15u;
            lane[i] ^= lane[i] >> 32;
        }
    for (i = 0; i < 2; i++) {
        h[i] = kvc__hash_bytes(lane, sizeof lane, h[i] ^ size);
        h[i] = kvc__hash_bytes(s, n, h[i]);
    }
}

static uint32_t kvc__div_up(uint32_t a, uint32_t b)
{
    return a / b + (a % b != 0);
}

/* ---- float formats ---- */
static float kvc__f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023u;
    if (exp == 31) return kvc__bits_f32(sign | 0x7f800000u | (man << 13));
    if (exp != 0) return kvc__bits_f32(sign | ((exp + 112) << 23) | (man << 13));
    /* zero and subnormals: man * 2^-24, exact */
    return kvc__bits_f32(sign | kvc__f32_bits((float)man * 5.9604644775390625e-8f));
}

/* Round to nearest, ties to even; overflow gives infinity, NaN stays NaN and keeps what of its
   payload fits, as the processors have it. */
static KVC__UNUSED uint16_t kvc__f32_to_f16(float x)
{
    uint32_t u = kvc__f32_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu, shift, m;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (a >> 13 & 0x3ffu));
    if (a >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
    if (a >= 0x38800000u) {                     /* normal: 2^-14 and more */
        m = a - 0x38000000u;
        return (uint16_t)(sign | ((m + 0xfffu + ((m >> 13) & 1u)) >> 13));
    }
    if (a < 0x33000000u) return (uint16_t)sign; /* below half of the smallest subnormal */
    shift = 126u - (a >> 23);                   /* 14 .. 24 */
    m = (a & 0x7fffffu) | 0x800000u;
    return (uint16_t)(sign | ((m + (1u << (shift - 1)) - 1u + ((m >> shift) & 1u)) >> shift));
}

static float kvc__bf16_to_f32(uint16_t h)
{
    return kvc__bits_f32((uint32_t)h << 16);
}

/* ---- arithmetic ---- */

/* a*b + c rounded once. Without the instruction: the product of two floats is exact in double;
   the sum is rounded to odd there (its last bit records whether anything was lost), after which
   rounding to float is the correct one (Boldo and Melquiond, "Emulation of FMA and correctly
   rounded sums", 2008). The error of the sum comes from Knuth's two-sum. */
KVC__INLINE float kvc__fmaf(float a, float b, float c)
{
#if defined(__FMA__) || KVC__ARM64 || FLT_EVAL_METHOD != 0
    return fmaf(a, b, c);
#else
    double p = (double)a * (double)b, d = (double)c, s = p + d, t = s - p;
    double e = (p - (s - t)) + (d - t);
    if (e > 0 || e < 0) {
        uint64_t u = kvc__f64_bits(s);
        if ((u & 1) == 0) {
            u = ((e > 0) == (s > 0)) ? u + 1 : u - 1;
            s = kvc__bits_f64(u);
        }
    }
    return (float)s;
#endif
}

/* 2^k for -1022 <= k <= 1023 */
static double kvc__exp2i(int k)
{
    return kvc__bits_f64((uint64_t)(k + 1023) << 52);
}

/* e^x: x = k ln 2 + r, Taylor series of degree 13 on |r| <= ln 2 / 2. */
static double kvc__exp(double x)
{
    double k, r, y = 1.0;
    int i;
    if (!(x > -745.2)) return x != x ? x : 0.0;
    if (x > 709.79) return x * 1e308;
    k = floor(x * 1.4426950408889634 + 0.5);
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    for (i = 13; i >= 1; i--) y = 1.0 + y * r / (double)i;
    if (k < -1000.0) return y * kvc__exp2i((int)k + 200) * kvc__exp2i(-200);
    if (k > 1000.0) return y * kvc__exp2i((int)k - 200) * kvc__exp2i(200);
    return y * kvc__exp2i((int)k);
}

/* ln x for normal x > 0: x = 2^k m, ln m = 2 atanh((m - 1) / (m + 1)) by its series. */
static double kvc__log(double x)
{
    uint64_t u = kvc__f64_bits(x);
    int k = (int)(u >> 52) - 1023, i;
    double m, f, f2, s = 0.0;
    if (!(x >= 2.3e-308) || x > 1.7e308)
        return x > 0 ? (x > 1 ? x : -708.4) : (x < 0 ? 0.0 : -1e308);
    m = kvc__bits_f64((u & 0xfffffffffffffu) | 0x3ff0000000000000u);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        k++;
    }
    f = (m - 1.0) / (m + 1.0);
    f2 = f * f;
    for (i = 25; i >= 3; i -= 2) s = (s + 1.0 / (double)i) * f2;
    return (double)k * 6.93147180369123816490e-01 +
        (2.0 * f + (2.0 * f * s + (double)k * 1.90821492927058770002e-10));
}

/* x^y for x > 0 */
static double kvc__pow(double x, double y)
{
    return kvc__exp(y * kvc__log(x));
}

/* Sine and cosine: x = k pi/2 + r with pi/2 in two parts (the first of 33 bits, so that k times
   it is exact for the positions a model can have), Taylor series on |r| <= pi/4. */
static void kvc__sincos(double x, double *s, double *c)
{
    double k = floor(x * 0.63661977236758134308 + 0.5), r, r2, a = 1.0, b = 1.0;
    int i, q = (int)(k - 4.0 * floor(k * 0.25));
    r = (x - k * 1.57079632673412561417e+00) - k * 6.07710050650619224932e-11;
    r2 = r * r;
    for (i = 18; i >= 2; i -= 2) b = 1.0 - b * r2 / (double)(i * (i - 1));
    for (i = 19; i >= 3; i -= 2) a = 1.0 - a * r2 / (double)(i * (i - 1));
    a *= r;
    *s = (q & 1) ? ((q & 2) ? -b : b) : ((q & 2) ? -a : a);
    *c = (q & 1) ? ((q & 2) ? a : -a) : ((q & 2) ? -b : b);
}

/* ------------------------------------------------------------------------------------------------
   >>threads  A crew of sleeping threads
   A crew runs one function on the caller and on its own threads at once. Its threads sleep on a
   condition while there is no work; a job does not wait for threads that have not woken by the
   time it is done, so a short job costs no more than the waking call. A crew of one makes no
   thread, nor does one whose threads are the host's.
   ---------------------------------------------------------------------------------------------- */
#define KVC__MAX_THREADS 256u

typedef void (*kvc__job)(void *arg, uint32_t worker);

static kvc_result kvc__threads_check(uint32_t n_threads, kvc_error *err)
{
    if (n_threads > KVC__MAX_THREADS)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_threads", "more than 256");
    if (KVC_NO_THREADS && n_threads > 1)
        return kvc__fail(err, KVC_ERROR_UNSUPPORTED, "n_threads", "built with KVC_NO_THREADS");
    return KVC_OK;
}

#if KVC_NO_THREADS
typedef struct kvc__crew { uint32_t n; } kvc__crew;
typedef struct kvc__crew_member { char none; } kvc__crew_member;

static int kvc__crew_start(kvc__crew *crew, kvc__crew_member *members, uint32_t n,
    const kvc_jobs *jobs)
{
    (void)members;
    (void)jobs;
    crew->n = n;
    return n == 1;
}
static void kvc__crew_stop(kvc__crew *crew) { (void)crew; }
static void kvc__crew_run(kvc__crew *crew, kvc__job job, void *arg)
{
    (void)crew;
    job(arg, 0);
}
#else
typedef struct kvc__crew {
    kvc__lock lock;
    kvc__cond wake;         /* there is work, or the end */
    kvc__cond left;         /* the last active thread has left the job */
    struct kvc__crew_member *members;
    uint32_t n;             /* the caller included */
    uint32_t n_started;
    uint32_t generation;    /* of the job; a thread joins each one at most once */
    uint32_t n_active;      /* threads inside the job */
    int open;               /* the job may still be joined */
    int quit;
    kvc__job job;
    void *arg;
    kvc_jobs jobs;
} kvc__crew;

typedef struct kvc__crew_member {
    kvc__crew *crew;
    kvc__thread thread;
    uint32_t worker;        /* 1 .. n - 1; the caller is 0 */
} kvc__crew_member;

static kvc__thread_result KVC__THREAD_CALL kvc__crew_main(void *arg)
{
    kvc__crew_member *self = (kvc__crew_member *)arg;
    kvc__crew *crew = self->crew;
    const kvc_jobs *jobs = &crew->jobs;
    uint32_t seen = 0;
    if (jobs->on_thread != NULL) jobs->on_thread(self->worker, 1, jobs->user);
    kvc__lock_enter(&crew->lock);
    for (;;) {
        while (!crew->quit && (!crew->open || crew->generation == seen))
            kvc__cond_wait(&crew->wake, &crew->lock);
        if (crew->quit) break;
        seen = crew->generation;
        crew->n_active++;
        kvc__lock_leave(&crew->lock);
        crew->job(crew->arg, self->worker);
        kvc__lock_enter(&crew->lock);
        if (--crew->n_active == 0) kvc__cond_wake(&crew->left);
    }
    kvc__lock_leave(&crew->lock);
    if (jobs->on_thread != NULL) jobs->on_thread(self->worker, 0, jobs->user);
    return 0;
}

static void kvc__crew_stop(kvc__crew *crew)
{
    uint32_t i;
    if (crew->n <= 1 || crew->jobs.parallel_for != NULL) return;
    kvc__lock_enter(&crew->lock);
    crew->quit = 1;
    kvc__cond_wake(&crew->wake);
    kvc__lock_leave(&crew->lock);
    for (i = 0; i < crew->n_started; i++) kvc__thread_join(crew->members[i].thread);
    kvc__cond_free(&crew->wake);
    kvc__cond_free(&crew->left);
    kvc__lock_free(&crew->lock);
    crew->n = 0;
}

/* members: [n - 1], alive as long as the crew. 0 if a thread could not be made; nothing is left
   then. */
static int kvc__crew_start(kvc__crew *crew, kvc__crew_member *members, uint32_t n,
    const kvc_jobs *jobs)
{
    uint32_t i;
    memset(crew, 0, sizeof *crew);
    crew->n = n;
    crew->members = members;
    crew->jobs = *jobs;
    if (n <= 1 || jobs->parallel_for != NULL) return 1;
    if (!kvc__lock_init(&crew->lock)) return 0;
    if (!kvc__cond_init(&crew->wake)) {
        kvc__lock_free(&crew->lock);
        return 0;
    }
    if (!kvc__cond_init(&crew->left)) {
        kvc__cond_free(&crew->wake);
        kvc__lock_free(&crew->lock);
        return 0;
    }
    for (i = 0; i < n - 1; i++) {
        members[i].crew = crew;
        members[i].worker = i + 1;
        if (!kvc__thread_start(&members[i].thread, kvc__crew_main, &members[i])) {
            kvc__crew_stop(crew);
            return 0;
        }
        crew->n_started++;
    }
    return 1;
}

/* One of the host's calls. A number that is none of the crew's has no memory to work in. */
static void kvc__crew_call(void *arg, uint32_t i)
{
    const kvc__crew *crew = (const kvc__crew *)arg;
    if (i < crew->n) crew->job(crew->arg, i);
}

static void kvc__crew_run(kvc__crew *crew, kvc__job job, void *arg)
{
    if (crew->n <= 1) {
        job(arg, 0);
        return;
    }
    if (crew->jobs.parallel_for != NULL) {
        crew->job = job;
        crew->arg = arg;
        crew->jobs.parallel_for(crew->n, kvc__crew_call, crew, crew->jobs.user);
        return;
    }
    kvc__lock_enter(&crew->lock);
    crew->job = job;
    crew->arg = arg;
    crew->generation++;
    crew->open = 1;
    kvc__cond_wake(&crew->wake);
    kvc__lock_leave(&crew->lock);
    job(arg, 0);
    kvc__lock_enter(&crew->lock);
    crew->open = 0;
    while (crew->n_active != 0) kvc__cond_wait(&crew->left, &crew->lock);
    kvc__lock_leave(&crew->lock);
}
#endif

/* ------------------------------------------------------------------------------------------------
   >>formats  How tensors are stored
   One row per GGUF tensor type. A type with a decoder can be computed with; the others are listed
   so that sizes can be checked and an error can say the type's name. The decoders here define
   what the bytes mean; kernels must agree with them bit for bit.
   ---------------------------------------------------------------------------------------------- */
enum {
    KVC__F32 = 0, KVC__F16 = 1, KVC__Q4_0 = 2, KVC__Q8_0 = 8, KVC__BF16 = 30,
    KVC__N_TYPES = 40
};

typedef struct kvc__type_info {
    const char *name;       /* NULL: no such type */
    uint16_t block;         /* elements in a block */
    uint16_t block_size;    /* bytes of a block */
    uint8_t supported;
    uint8_t quantized;      /* activations are rounded to 8 bits before the product */
} kvc__type_info;

static const kvc__type_info kvc__types[KVC__N_TYPES] = {
    /*  0 */ {"F32", 1, 4, 1, 0},
    /*  1 */ {"F16", 1, 2, 1, 0},
    /*  2 */ {"Q4_0", 32, 18, 1, 1},
    /*  3 */ {"Q4_1", 32, 20, 0, 1},
    /*  4 */ {NULL, 0, 0, 0, 0},
    /*  5 */ {NULL, 0, 0, 0, 0},
    /*  6 */ {"Q5_0", 32, 22, 0, 1},
    /*  7 */ {"Q5_1", 32, 24, 0, 1},
    /*  8 */ {"Q8_0", 32, 34, 1, 1},
    /*  9 */ {"Q8_1", 32, 36, 0, 1},
    /* 10 */ {"Q2_K", 256, 84, 0, 1},
    /* 11 */ {"Q3_K", 256, 110, 0, 1},
    /* 12 */ {"Q4_K", 256, 144, 0, 1},
    /* 13 */ {"Q5_K", 256, 176, 0, 1},
    /* 14 */ {"Q6_K", 256, 210, 0, 1},
    /* 15 */ {"Q8_K", 256, 292, 0, 1},
    /* 16 */ {"IQ2_XXS", 256, 66, 0, 1},
    /* 17 */ {"IQ2_XS", 256, 74, 0, 1},
    /* 18 */ {"IQ3_XXS", 256, 98, 0, 1},
    /* 19 */ {"IQ1_S", 256, 50, 0, 1},
    /* 20 */ {"IQ4_NL", 32, 18, 0, 1},
    /* 21 */ {"IQ3_S", 256, 110, 0, 1},
    /* 22 */ {"IQ2_S", 256, 82, 0, 1},
    /* 23 */ {"IQ4_XS", 256, 136, 0, 1},
    /* 24 */ {"I8", 1, 1, 0, 0},
    /* 25 */ {"I16", 1, 2, 0, 0},
    /* 26 */ {"I32", 1, 4, 0, 0},
    /* 27 */ {"I64", 1, 8, 0, 0},
    /* 28 */ {"F64", 1, 8, 0, 0},
    /* 29 */ {"IQ1_M", 256, 56, 0, 1},
    /* 30 */ {"BF16", 1, 2, 1, 0},
    /* 31 */ {NULL, 0, 0, 0, 0},
    /* 32 */ {NULL, 0, 0, 0, 0},
    /* 33 */ {NULL, 0, 0, 0, 0},
    /* 34 */ {"TQ1_0", 256, 54, 0, 1},
    /* 35 */ {"TQ2_0", 256, 66, 0, 1},
    /* 36 */ {NULL, 0, 0, 0, 0},
    /* 37 */ {NULL, 0, 0, 0, 0},
    /* 38 */ {NULL, 0, 0, 0, 0},
    /* 39 */ {"MXFP4", 32, 17, 0, 1},
};

/* NULL for a number that is no type. */
static const kvc__type_info *kvc__type(uint32_t type)
{
    return type < KVC__N_TYPES && kvc__types[type].name != NULL ? &kvc__types[type] : NULL;
}

/* Decodes n elements (whole blocks) of a supported type to floats. */
static void kvc__decode_row(float *dst, const unsigned char *src, uint32_t type, size_t n)
{
    size_t i, j;
    switch (type) {
    case KVC__F32: memcpy(dst, src, n * sizeof(float)); break;
    case KVC__F16: for (i = 0; i < n; i++) dst[i] = kvc__f16_to_f32(kvc__rd16(src + 2 * i)); break;
    case KVC__BF16:
        for (i = 0; i < n; i++) dst[i] = kvc__bf16_to_f32(kvc__rd16(src + 2 * i));
        break;
    case KVC__Q8_0:     /* f16 scale, 32 signed bytes */
        for (i = 0; i < n; i += 32, src += 34) {
            float d = kvc__f16_to_f32(kvc__rd16(src));
            for (j = 0; j < 32; j++) dst[i + j] = d * (float)(int8_t)src[2 + j];
        }
        break;
    case KVC__Q4_0:     /* f16 scale, 16 bytes: low halves are elements 0..15, high halves 16..31 */
        for (i = 0; i < n; i += 32, src += 18) {
            float d = kvc__f16_to_f32(kvc__rd16(src));
            for (j = 0; j < 16; j++) {
                dst[i + j] = d * (float)((int)(src[2 + j] & 15) - 8);
                dst[i + j + 16] = d * (float)((int)(src[2 + j] >> 4) - 8);
            }
        }
        break;
    default: break;
    }
}

/* Packed weights: 16 outputs form a group, so that a register holds neighbouring outputs, a decode
   reads memory in order, and no sum runs across a register. Packing takes as many bytes as before,
   but for the zeros that fill up a last group of outputs and, of float types, a last vector.

   A group of blocks of 32 elements: block after block, each the 16 scales, then the codes word by
   word, 4 bytes of each output. A group of floats: the sums run in 16 lanes, lane i taking the
   elements i, i + 16, ...; here lane follows lane, and in each element follows element, the 16
   outputs side by side. So a register tile of many outputs sums one lane after the other. The
   lanes come in the order in which the tree adds them: four quarters of four. */
static const uint8_t kvc__lane_order[16] = {
    0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15
};

/* Elements of each lane. */
static uint32_t kvc__lane_steps(uint32_t k)
{
    return kvc__div_up(k, 16);
}

/* Bytes of a packed group of 16 outputs; the rows' size is known to fit. */
static size_t kvc__group_size(uint32_t type, uint32_t k)
{
    const kvc__type_info *t = &kvc__types[type];
    if (t->quantized) return (size_t)(k / t->block) * t->block_size * 16;
    return (size_t)kvc__lane_steps(k) * 256 * t->block_size;
}

static void kvc__pack_blocks(unsigned char *dst, const unsigned char *rows, uint32_t n_rows,
    size_t row_size, size_t block_size)
{
    size_t at, word, words = (block_size - 2) / 4;
    uint32_t r;
    if (n_rows < 16) memset(dst, 0, 16 * row_size);
    for (at = 0; at < row_size; at += block_size, dst += 16 * block_size) {
        for (r = 0; r < n_rows; r++) {
            const unsigned char *src = rows + r * row_size + at;
            memcpy(dst + 2 * r, src, 2);
            for (word = 0; word < words; word++)
                memcpy(dst + 32 + 64 * word + 4 * r, src + 2 + 4 * word, 4);
        }
    }
}

/* size: bytes of an element, a constant */
KVC__INLINE void kvc__pack_lanes(unsigned char *dst, const unsigned char *rows, uint32_t n_rows,
    uint32_t k, const size_t size)
{
    const size_t steps = kvc__lane_steps(k);
    unsigned char tile[16 * 16 * 4];        /* 16 elements of each output */
    uint32_t r, i, lane;
    memset(tile, 0, sizeof tile);
    for (i = 0; i < k; i += 16) {
        uint32_t n = k - i < 16 ? k - i : 16;
        if (n < 16) memset(tile, 0, sizeof tile);
        for (r = 0; r < n_rows; r++)
            memcpy(tile + 16 * r * size, rows + ((size_t)r * k + i) * size, n * size);
        for (lane = 0; lane < 16; lane++) {
            unsigned char *to = dst + (lane * steps + i / 16) * 16 * size;
            const unsigned char *from = tile + kvc__lane_order[lane] * size;
            for (r = 0; r < 16; r++) memcpy(to + r * size, from + 16 * r * size, size);
        }
    }
}

/* rows: the first of n_rows <= 16 rows of k elements; of quantized types those whose block is an
   f16 scale and whole words. */
static void kvc__pack_group(unsigned char *dst, const unsigned char *rows, uint32_t n_rows,
    uint32_t k, uint32_t type)
{
    const kvc__type_info *t = &kvc__types[type];
    if (t->quantized)
        kvc__pack_blocks(dst, rows, n_rows, (size_t)(k / t->block) * t->block_size, t->block_size);
    else if (t->block_size == 2) kvc__pack_lanes(dst, rows, n_rows, k, 2);
    else kvc__pack_lanes(dst, rows, n_rows, k, 4);
}

/* ------------------------------------------------------------------------------------------------
   >>dispatch  One set of kernels, compiled once per instruction set
   This header includes itself once per set: the last section, >>kernels, is what such a pass
   sees. The list below gives the fields of the table, each pass's table and the prototypes. Every
   set gives the same bits; which one runs is a matter of speed only.
   ---------------------------------------------------------------------------------------------- */

/* Rows of activations for products with packed float weights, in the same order of lanes: row after
   row, kvc__lanes_stride floats apart. A tile of rows may read rows that do not exist, up to a
   multiple of KVC__LANE_ROWS; they may hold anything. */
#define KVC__LANE_ROWS 12u          /* a multiple of KVC__Q8_ROWS */

/* A power of two from row to row would crowd a few sets of the cache. */
static size_t kvc__lanes_stride(uint32_t k)
{
    return (size_t)kvc__lane_steps(k) * 16 + 16;
}

/* Rows of activations in 8 bits, for products with quantized weights. Rows lie in groups of
   `height`: KVC__Q8_ROWS of them, or 1 if a step has a single row. For each 32 elements a group
   holds 32 bytes of each row, then a float scale of each, then the int32 sum of its bytes: so a
   register tile of rows reads one place. Places of rows that do not exist may hold anything. */
#define KVC__Q8_ROWS 6u             /* a multiple of the highest register tiles' rows */
#define KVC__Q8_BYTES 40u           /* of 32 elements of one row */

static uint32_t kvc__q8_height(uint32_t n_rows)
{
    return n_rows > 1 ? KVC__Q8_ROWS : 1;
}

/* The group of a row of `width` elements, from element `from` on; the row is number row % height
   there. */
static size_t kvc__q8_offset(uint32_t row, uint32_t height, uint32_t width, uint32_t from)
{
    return ((size_t)(row / height) * (width / 32) + from / 32) * height * KVC__Q8_BYTES;
}

/* A block of a matrix product: y[r][o] = sum over i of w[o][i] * x[r][i]. */
typedef struct kvc__mm {
    const unsigned char *w;     /* first row, [n_out] rows of k elements; packed: first group */
    size_t w_stride;            /* bytes from row to row; packed: from group to group */
    const float *x;             /* float types: [n_rows, k]; packed: [n_rows] rows of lanes */
    size_t x_stride;            /* elements from row to row */
    const unsigned char *x8;    /* quantized types: the same rows in 8 bits, from a group on */
    uint32_t x8_height;
    float *y;                   /* [n_rows, y_stride]; what lies past n_out is overwritten */
    size_t y_stride;            /* at least n_out rounded up to 16 */
    float *sums;                /* [KVC__SUM_FLOATS] scratch of packed float types */
    const unsigned char *next;  /* the groups to be read after these, asked for ahead; may lie past
                                   the end */
    uint32_t n_out, n_rows, k;  /* more rows than one: at most a block's outputs and rows */
} kvc__mm;

/* The largest block of a product of many rows. */
#define KVC__BLOCK_OUTS 64u
#define KVC__BLOCK_ROWS 96u         /* a multiple of KVC__LANE_ROWS */
#define KVC__BLOCK_FLOATS (KVC__BLOCK_OUTS * KVC__BLOCK_ROWS)
#define KVC__PAIR_FLOATS 512u       /* of any register tile */
#define KVC__SUM_FLOATS (4u * KVC__BLOCK_FLOATS + KVC__PAIR_FLOATS)

/* A row is attended to in spans of this many positions, cut at multiples of it: the one place where
   the order of attention's sums is decided. A multiple of the largest page. */
#define KVC__SPAN 256u
#define KVC__SPAN_TILES (KVC__SPAN / 16u)
/* From query to query in the weights of a span: a power of two would crowd a few sets of the
   cache. */
#define KVC__WEIGHT_STRIDE (KVC__SPAN + 16u)
#define KVC__MAX_QUERIES 48u    /* of a group; their weights of a span take 51 KiB */
#define KVC__PART_TAIL 16u

/* Slots of a sequence that follow each other without a gap. A slot is the place that a position got
   when it was computed; its key is turned by it for good. Where positions were removed, a new
   extent begins, and what lies before is `gap` positions nearer than its slots tell: queries are
   turned back by that much to meet its keys (rotations add up: Su et al. 2021), so that no key is
   ever touched again. */
typedef struct kvc__extent {
    uint32_t slot, end;         /* slots from slot to end - 1; of the last extent: what a step adds
                                   is not counted yet */
    uint32_t page;              /* the number in the ring of the page that slot lies in */
    uint32_t gap;               /* positions removed between this extent and the last */
} kvc__extent;

/* A part of a ring: the numbers of its pages, of which those from `lo` to `hi` - 1 are held. Rings
   share leaves, so that a fork need not touch every page. */
#define KVC__LEAF_PAGES 64u

typedef struct kvc__leaf {
    struct kvc__leaf *next;     /* of those that no ring has */
    uint32_t refs;              /* rings that have it */
    uint32_t lo, hi;
    uint32_t pages[KVC__LEAF_PAGES];
} kvc__leaf;

/* A run of pages with memory of their own: the cache's first ones, and what it grew by. */
typedef struct kvc__plane {
    unsigned char *k, *v;       /* [n_kv_heads, n_pages of the slab] pieces of a layer */
} kvc__plane;

typedef struct kvc__slab {
    uint32_t first, n_pages;    /* numbers of its pages: from first on */
    kvc__plane *planes;         /* [n_layers]; set for the layers of the pool */
    uint32_t *refs;             /* [n_pages] leaves that hold a page */
    kvc_token *tokens;          /* [n_pages, page_size], in one pool */
    struct kvc__keep *keeps;    /* [n_pages] what the prefix table knows; NULL without one */
    void *block;                /* NULL: in the cache's own */
    size_t block_size;
} kvc__slab;

/* The slab of a page. Only slabs up to its own are looked at, so others may be added meanwhile. */
KVC__INLINE const kvc__slab *kvc__slab_of(const kvc__slab *slabs, uint32_t page)
{
    while (page - slabs->first >= slabs->n_pages) slabs++;
    return slabs;
}

/* Attention of a group: consecutive rows of one sequence, and query heads that share one key head.
   Its queries are counted row by row: query i is head i % n_q of row i / n_q. A part is what a span
   gives for a query: the weighted sum of the values [v_stride], then in KVC__PART_TAIL floats the
   largest score and the sum of the weights. Spans are numbered through all extents. */
typedef struct kvc__attn {
    const float *q;             /* [n_rows, q_stride]: n_q heads of head_dim, rotated and scaled */
    float *out;                 /* [n_rows, out_stride]: n_q heads of head_dim_v */
    size_t q_stride, out_stride;
    const kvc__slab *slabs;
    uint32_t layer, head;       /* key head */
    size_t k_piece, v_piece;    /* bytes from page to page */
    kvc__leaf *const *ring;     /* the leaf of page i at [i / KVC__LEAF_PAGES % ring_cap] */
    uint32_t ring_cap, page_shift;
    const kvc__extent *extents;
    uint32_t n_extents;
    const float *turns;         /* [n_extents - 1, 2, rope_dim]: back by the gap of each; see the
                                   kernel rope */
    uint32_t rope_dim, apart;   /* as that kernel takes them */
    uint32_t n_marked;          /* slots below it whose keys are to be turned on by */
    const float *mark_turns;    /* [tiles, rope_dim / 2, 2, 16]: cosines and sines of a pair of
                                   dimensions, for the positions of a tile */
    uint32_t n_rows, n_q;       /* at most KVC__MAX_QUERIES queries */
    uint32_t head_dim, head_dim_v, v_stride;    /* v_stride: elements from row to row */
    uint32_t slot, window;      /* row r sees the slots up to its own, slot + r, and of these the
                                   last `window` if that is not 0 */
    float soft_cap;             /* scores become soft_cap * tanh(score / soft_cap); 0: they stay */
    const float *slopes;        /* [n_q]: after that the score of a key loses the head's slope for
                                   each position that it is back from the query; NULL: nothing */
    const float *sinks;         /* [n_q]: one more score for each head, of a position that has no
                                   value; NULL: none */
    int v_in_k;                 /* no values are stored: that of a position is elements v_from to
                                   v_from + head_dim_v of its key as it is stored, none of which is
                                   turned; type_v and v_piece mean nothing */
    uint32_t v_from;
    uint32_t from, to;          /* the spans of this call, by number */
    kvc_kv_type type_k, type_v;
    float *state;               /* [queries, part] the spans so far, merged */
    int goes_on;                /* state is that of the spans before `from`, not to be set up */
    float *parts;               /* [to - from, queries, part] the spans' own */
    float *work;                /* [kvc__attn_floats] */
    float *tops;                /* [n_rows, tops_stride]: n_q pairs of the largest score and the sum
                                   of the weights over all spans, written for and read by the
                                   tally; or NULL */
    size_t tops_stride;
    uint64_t *tally;            /* [positions] see "heavy hitters" in >>kv */
} kvc__attn;

static uint32_t kvc__part_floats(uint32_t v_stride)
{
    return v_stride + KVC__PART_TAIL;
}

/* Where values lie in keys: a block of 32 elements of the tiles of a span, and two copies of tiles
   of it. From tile to tile: a power of two would crowd a few sets of the cache. */
#define KVC__KEY_BLOCK (32u * 16u + 16u)
#define KVC__KEY_BLOCKS (KVC__SPAN_TILES + 2u)

/* Floats of working memory: the weights of a span, its parts, a copy of the queries in floats or 8
   bits, one of them turned, four tiles of keys (or of each query and of sixteen once more the sums
   over all elements of keys), and blocks of keys. */
static size_t kvc__attn_floats(uint32_t n_queries, uint32_t head_dim, uint32_t v_stride)
{
    const size_t whole = (size_t)kvc__div_up(head_dim, 32) * 32;
    return n_queries * (KVC__WEIGHT_STRIDE + kvc__part_floats(v_stride) + whole) + 65 * whole +
        KVC__KEY_BLOCKS * KVC__KEY_BLOCK;
}

/* Keys in 4 bits are rotated by the Walsh-Hadamard transform before they are rounded, and the
   queries alike, which leaves every score what it was: it spreads the few dimensions that are far
   larger than others, as trained keys have them, over their neighbours, whose scale they would take
   (Ashkboos et al. 2024, "QuaRot"). In blocks of the largest power of two that divides the width;
   sums and differences of elements that are 1, 2, 4, ... apart, then one product. */
static void kvc__key_rotate(float *x, uint32_t width)
{
    const uint32_t block = width & (0u - width);
    const float scale = 1.0f / sqrtf((float)block);
    uint32_t apart, i, j;
    for (apart = 1; apart < block; apart *= 2)
        for (i = 0; i < width; i += 2 * apart)
            for (j = i; j < i + apart; j++) {
                float a = x[j], b = x[j + apart];
                x[j] = a + b;
                x[j + apart] = a - b;
            }
    for (i = 0; i < width; i++) x[i] *= scale;
}

/* A span as the queries of a group see it. Tiles beyond its own are the first of the next span;
   for a tile that no query sees, the nearest one that some query sees is given. */
typedef struct kvc__span {
    const unsigned char *k[KVC__SPAN_TILES + 8], *v[KVC__SPAN_TILES + 8];   /* tiles; v is k if
                                                                               values lie there */
    uint32_t extent;
    int marked;                 /* has slots with marks; then scores are computed in floats */
    uint32_t start;             /* the first slot */
    uint32_t lo[KVC__MAX_QUERIES], hi[KVC__MAX_QUERIES];    /* lo <= slot - start < hi, and */
    uint32_t n_queries;                                     /* lo == hi for none; both rise */
    uint32_t first, last;       /* first <= tile < last: the tiles that any query sees */
} kvc__span;

/* What the tiles of queries ask the memory for while they compute: the i-th of n its share. */
typedef struct kvc__ahead {
    const unsigned char *const *at;     /* tiles */
    uint32_t i, n;
} kvc__ahead;

/* `offset` may lead past the end of everything. */
KVC__INLINE void kvc__ask_ahead(const kvc__ahead *a, uint32_t tile, size_t offset)
{
    kvc__prefetch((const void *)((uintptr_t)a->at[tile] + offset));
}

/* Asks for the beginnings of n tiles. They lie in as many pages of memory, in each of which the
   processor's own prefetching has to find its stream again. */
KVC__INLINE void kvc__ask_begin(const unsigned char *const *at, uint32_t n)
{
    uint32_t i, j;
    for (i = 0; i < n; i++)
        for (j = 0; j < 256; j += 64) kvc__prefetch((const void *)((uintptr_t)at[i] + j));
}

/* Asks for what lies KVC__STREAM_AHEAD bytes behind p in a stream of weights, which may be past the
   end. A stream goes through many pages of memory, as above. */
#define KVC__STREAM_AHEAD 1536u

KVC__INLINE void kvc__ask_stream(const unsigned char *p)
{
    kvc__prefetch((const void *)((uintptr_t)p + KVC__STREAM_AHEAD));
}

/* ---- tiles of K and V ----
   A tile is 16 positions of a head's keys or values, a lane one of them. Floats: keys lie element
   by element, the 16 positions side by side, values position by position. In 8 and 4 bits a row is
   cut into blocks of 32 elements, the last filled up with zeros, each with a half-precision scale,
   and a block of one position has the bytes of a block of Q8_0 or Q4_0. Keys lie as the outputs of
   a packed group (see kvc__pack_blocks): block by block the 16 scales, then the codes word by word.
   Values: the scales first, block by block for the 16 positions, then the codes, position by
   position. */

KVC__INLINE int kvc__kv_coded(kvc_kv_type type)
{
    return type == KVC_KV_Q8 || type == KVC_KV_Q4;
}

/* Bytes of an element in floats. */
KVC__INLINE size_t kvc__kv_size(kvc_kv_type type)
{
    return type == KVC_KV_F16 ? 2 : 4;
}

/* Bytes of the codes of a block. */
KVC__INLINE uint32_t kvc__kv_codes(kvc_kv_type type)
{
    return type == KVC_KV_Q8 ? 32 : 16;
}

/* Bytes of one position. */
KVC__INLINE size_t kvc__kv_row(kvc_kv_type type, uint32_t width)
{
    if (!kvc__kv_coded(type)) return width * kvc__kv_size(type);
    return (size_t)kvc__div_up(width, 32) * (2 + kvc__kv_codes(type));
}

/* Where one position's block lies in a tile of keys or values: its scale, and its codes as
   `n_words` words of `word` bytes that are `apart` bytes from each other. */
typedef struct kvc__kv_place {
    unsigned char *scale, *codes;
    size_t word, apart;
    uint32_t n_words;
} kvc__kv_place;

static kvc__kv_place kvc__key_place(kvc_kv_type type, unsigned char *tile, uint32_t lane,
    uint32_t block)
{
    kvc__kv_place p;
    tile += (size_t)block * 16 * (2 + kvc__kv_codes(type));
    p.scale = tile + 2 * lane;
    p.codes = tile + 32 + 4 * lane;
    p.word = 4;
    p.apart = 64;
    p.n_words = kvc__kv_codes(type) / 4;
    return p;
}

static kvc__kv_place kvc__value_place(kvc_kv_type type, unsigned char *tile, uint32_t lane,
    uint32_t block, uint32_t n_blocks)
{
    kvc__kv_place p;
    p.scale = tile + 32 * block + 2 * lane;
    p.codes = tile + 32 * n_blocks + ((size_t)lane * n_blocks + block) * kvc__kv_codes(type);
    p.word = p.apart = kvc__kv_codes(type);
    p.n_words = 1;
    return p;
}

static void kvc__place_put(const kvc__kv_place *p, const unsigned char *block)
{
    uint32_t i;
    memcpy(p->scale, block, 2);
    for (i = 0; i < p->n_words; i++)
        memcpy(p->codes + i * p->apart, block + 2 + i * p->word, p->word);
}

static void kvc__place_get(const kvc__kv_place *p, unsigned char *block)
{
    uint32_t i;
    memcpy(block, p->scale, 2);
    for (i = 0; i < p->n_words; i++)
        memcpy(block + 2 + i * p->word, p->codes + i * p->apart, p->word);
}

/* Keys of a tile in codes as floats, [width of whole blocks, 16]; those of 4 bits stay rotated. */
static KVC__UNUSED void kvc__key_floats(kvc_kv_type type, const unsigned char *tile,
    uint32_t head_dim, float *k)
{
    const size_t size = 16 * (2 + (size_t)kvc__kv_codes(type));
    uint32_t b, j, lane;
    for (b = 0; b < kvc__div_up(head_dim, 32); b++, tile += size) {
        for (lane = 0; lane < 16; lane++) {
            const float scale = kvc__f16_to_f32(kvc__rd16(tile + 2 * lane));
            for (j = 0; j < kvc__kv_codes(type); j++) {
                const unsigned char code = tile[32 + j / 4 * 64 + 4 * lane + j % 4];
                float *to = k + 16 * (32 * b + j) + lane;
                if (type == KVC_KV_Q8) {
                    to[0] = scale * (float)(int8_t)code;
                } else {
                    to[0] = scale * (float)((int)(code & 15u) - 8);
                    to[16 * 16] = scale * (float)((int)(code >> 4) - 8);
                }
            }
        }
    }
}

/* The first position that the row at `pos` sees. */
static uint32_t kvc__first_seen(uint32_t pos, uint32_t window)
{
    return window != 0 && pos >= window ? pos - window + 1 : 0;
}

/* Spans that [slot, end) touches; at least one. */
static uint32_t kvc__spans_touched(uint32_t slot, uint32_t end)
{
    return end <= slot ? 1 : (end - 1) / KVC__SPAN - slot / KVC__SPAN + 1;
}

/* The first of those slots of an extent that a row sees. */
static uint32_t kvc__extent_seen(const kvc__extent *t, uint32_t slot, uint32_t window)
{
    uint32_t first = kvc__first_seen(slot - t->gap, window);
    return first < t->slot ? t->slot : first;
}

/* The number of the span that holds the first slot that a row sees. */
static uint32_t kvc__span_first(const kvc__extent *t, uint32_t n, uint32_t slot, uint32_t window)
{
    uint32_t i, number = 0, seen;
    for (i = 0; i + 1 < n; i++, t++) {
        seen = kvc__extent_seen(t, slot, window);
        if (seen < t->end) return number + seen / KVC__SPAN - t->slot / KVC__SPAN;
        number += kvc__spans_touched(t->slot, t->end);
    }
    return number + kvc__extent_seen(t, slot, window) / KVC__SPAN - t->slot / KVC__SPAN;
}

/* One past the number of the span that holds a row's own slot. */
static uint32_t kvc__span_end(const kvc__extent *t, uint32_t n, uint32_t slot)
{
    uint32_t number = 0;
    for (; n > 1; n--, t++) number += kvc__spans_touched(t->slot, t->end);
    return number + kvc__spans_touched(t->slot, slot + 1);
}

/* Which extent a span lies in, and where it starts there. */
static void kvc__span_find(kvc__span *s, const kvc__attn *a, uint32_t number)
{
    const kvc__extent *t = a->extents;
    uint32_t n;
    for (s->extent = 0; s->extent + 1 < a->n_extents; s->extent++, t++, number -= n) {
        n = kvc__spans_touched(t->slot, t->end);
        if (number < n) break;
    }
    s->start = (t->slot / KVC__SPAN + number) * KVC__SPAN;
    s->marked = t->slot < a->n_marked && s->start < a->n_marked;
}

static uint32_t kvc__span_clamp(uint32_t slot, uint32_t start)
{
    return slot <= start ? 0 : slot - start < KVC__SPAN ? slot - start : KVC__SPAN;
}

/* All but the tiles' places. */
static KVC__UNUSED void kvc__span_bounds(kvc__span *s, const kvc__attn *a, uint32_t number)
{
    const kvc__extent *t;
    uint32_t r, i, lo, hi, own;
    kvc__span_find(s, a, number);
    t = &a->extents[s->extent];
    s->n_queries = 0;
    for (r = 0; r < a->n_rows; r++) {
        own = a->slot + r;
        hi = s->extent + 1 < a->n_extents ? t->end : own + 1;
        hi = kvc__span_clamp(hi, s->start);
        lo = kvc__span_clamp(kvc__extent_seen(t, own, a->window), s->start);
        if (lo > hi) lo = hi;
        for (i = 0; i < a->n_q; i++) {
            s->lo[s->n_queries] = lo;
            s->hi[s->n_queries++] = hi;
        }
    }
    s->first = s->lo[0] / 16;
    s->last = (s->hi[s->n_queries - 1] + 15) / 16;
}

/* The i-th page of a ring. */
static uint32_t kvc__ring_page(kvc__leaf *const *ring, uint32_t cap, uint32_t i)
{
    return ring[i / KVC__LEAF_PAGES % cap]->pages[i % KVC__LEAF_PAGES];
}

static KVC__UNUSED void kvc__span_tiles(kvc__span *s, const kvc__attn *a)
{
    const kvc__extent *t = &a->extents[s->extent];
    const size_t k_tile = 16 * kvc__kv_row(a->type_k, a->head_dim);
    const size_t v_tile = a->v_in_k ? k_tile : 16 * kvc__kv_row(a->type_v, a->v_stride);
    const uint32_t end = s->extent + 1 < a->n_extents ? t->end : a->slot + a->n_rows;
    const uint32_t first = s->start / 16 + s->first, last = (end - 1) / 16;
    const uint32_t shift = a->page_shift - 4, mask = (1u << shift) - 1u;
    const uint32_t base = t->page - (t->slot >> a->page_shift);
    const unsigned char *k = NULL, *v = NULL;
    uint32_t i, tile, was = UINT32_MAX;
    for (i = 0; i < KVC__SPAN_TILES + 8; i++) {
        tile = s->start / 16 + i;
        tile = tile < first ? first : tile < last ? tile : last;
        if (tile >> shift != was) {
            uint32_t page = kvc__ring_page(a->ring, a->ring_cap, base + (tile >> shift));
            const kvc__slab *slab = kvc__slab_of(a->slabs, page);
            size_t piece = (size_t)a->head * slab->n_pages + page - slab->first;
            was = tile >> shift;
            k = slab->planes[a->layer].k + piece * a->k_piece;
            v = a->v_in_k ? k : slab->planes[a->layer].v + piece * a->v_piece;
        }
        s->k[i] = k + (tile & mask) * k_tile;
        s->v[i] = v + (tile & mask) * v_tile;
    }
}

/* What becomes of a gate before it is multiplied by its partner: see the kernel activate. */
typedef enum kvc__act {
    KVC__ACT_SILU,              /* x / (1 + exp(-x)) */
    KVC__ACT_GELU,              /* x times the normal distribution, approximated by tanh */
    KVC__ACT_GELU_ERF,          /* the same by erf */
    KVC__ACT_CLAMPED            /* SiLU of a steeper slope, gate and partner held in bounds */
} kvc__act;

#define KVC__KERNELS(X) \
    X(void, mm_f32, (const kvc__mm *a)) \
    X(void, mm_f16, (const kvc__mm *a)) \
    X(void, mm_bf16, (const kvc__mm *a)) \
    X(void, mm_q8_0, (const kvc__mm *a)) \
    X(void, mm_q4_0, (const kvc__mm *a)) \
    X(void, mm_f32_packed, (const kvc__mm *a)) \
    X(void, mm_f16_packed, (const kvc__mm *a)) \
    X(void, mm_bf16_packed, (const kvc__mm *a)) \
    X(void, mm_q8_0_packed, (const kvc__mm *a)) \
    X(void, mm_q4_0_packed, (const kvc__mm *a)) \
    X(void, to_lanes, (float *row, const float *x, uint32_t k, uint32_t from, uint32_t n)) \
    X(void, quantize, (const float *x, uint32_t n, unsigned char *q8, uint32_t slot, \
        uint32_t height)) \
    X(void, rms_norm, (float *y, const float *x, const float *w, uint32_t n, float eps)) \
    X(void, layer_norm, (float *y, const float *x, const float *w, const float *b, uint32_t n, \
        float eps)) \
    X(void, rope, (float *x, uint32_t n_heads, uint32_t head_dim, uint32_t rope_dim, \
        uint32_t apart, const float *turn, float scale)) \
    X(void, to_f16, (uint16_t *y, const float *x, uint32_t n)) \
    X(void, to_q8_0, (unsigned char *block, const float *x, uint32_t n)) \
    X(void, to_q4_0, (unsigned char *block, const float *x, uint32_t n)) \
    X(void, activate, (float *gate, const float *up, uint32_t n, kvc__act act)) \
    X(void, accumulate, (float *y, const float *x, float scale, uint32_t n)) \
    X(void, multiply, (float *x, float by, uint32_t n)) \
    X(void, clamp, (float *x, float limit, uint32_t n)) \
    X(void, soft_cap, (float *x, float cap, uint32_t n)) \
    X(void, attention, (const kvc__attn *a)) \
    X(void, attention_merge, (const kvc__attn *a)) \
    X(void, attention_tally, (const kvc__attn *a, uint32_t number, uint32_t tile))

#define KVC__FIELD(ret, name, args) ret (*name) args;
typedef struct kvc__kernels {
    kvc_isa isa;
    const char *name;
    KVC__KERNELS(KVC__FIELD)
} kvc__kernels;
#undef KVC__FIELD

#ifndef KVC_HEADER_FILENAME
#define KVC_HEADER_FILENAME "kvc.h"     /* a renamed copy defines its own name before inclusion */
#endif
#define KVC__STRING(x) #x
#define KVC__XSTRING(x) KVC__STRING(x)
#define KVC__XCAT(a, b) a##_##b
#define KVC__CAT(a, b) KVC__XCAT(a, b)
/* One instruction set for the functions between region and end; MSVC needs none. Nor do the tests
   that run AVX-512 on any processor: their intrinsics are functions of other instructions, which a
   region would turn into AVX-512 again (tests/emulated). */
#if defined(KVC__EMULATED)
#define KVC__REGION(t)
#define KVC__REGION_END
#elif defined(__clang__)
#define KVC__REGION(t) _Pragma(KVC__STRING(clang attribute push(__attribute__((target(t))), \
    apply_to = function)))
#define KVC__REGION_END _Pragma("clang attribute pop")
#elif defined(__GNUC__)
/* GCC 12's own AVX-512 headers set off its warning about uninitialised variables (PR 105593). */
#define KVC__REGION(t) _Pragma("GCC push_options") _Pragma(KVC__STRING(GCC target(t))) \
    _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wuninitialized\"") \
    _Pragma("GCC diagnostic ignored \"-Wmaybe-uninitialized\"")
#define KVC__REGION_END _Pragma("GCC diagnostic pop") _Pragma("GCC pop_options")
#else
#define KVC__REGION(t)
#define KVC__REGION_END
#endif

/* The passes, numbered as kvc_isa. Kernels take most of the time to compile; so tests that look
   inside can share an object with the tables: it is built with KVC__TABLE defined as nothing, and
   they with KVC__KERNELS_APART. */
#ifndef KVC__TABLE
#define KVC__TABLE static
#endif
#ifdef KVC__KERNELS_APART
extern const kvc__kernels kvc__table_base;
#if KVC__SIMD_NEON
extern const kvc__kernels kvc__table_neon;
#elif KVC__SIMD_X86
extern const kvc__kernels kvc__table_avx2, kvc__table_avx512, kvc__table_avx512vnni;
#endif
#else
#define KVC__PASS 1
#define KVC__ISA base
#include KVC_HEADER_FILENAME
#if KVC__SIMD_NEON
#define KVC__PASS 2
#define KVC__ISA neon
#include KVC_HEADER_FILENAME
#endif
#if KVC__SIMD_X86
#define KVC__PASS 3
#define KVC__ISA avx2
KVC__REGION("avx2,fma,f16c")
#include KVC_HEADER_FILENAME
KVC__REGION_END
#define KVC__PASS 4
#define KVC__ISA avx512
KVC__REGION("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#include KVC_HEADER_FILENAME
KVC__REGION_END
#define KVC__PASS 5
#define KVC__ISA avx512vnni
KVC__REGION("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#include KVC_HEADER_FILENAME
KVC__REGION_END
#endif
#endif /* KVC__KERNELS_APART */

#if KVC__SIMD_X86 && !defined(KVC__EMULATED)
static void kvc__cpuid(uint32_t leaf, uint32_t r[4])
{
#if defined(_MSC_VER) && !defined(__clang__)
    int t[4];
    __cpuidex(t, (int)leaf, 0);
    memcpy(r, t, sizeof t);
#else
    __cpuid_count(leaf, 0, r[0], r[1], r[2], r[3]);
#endif
}

/* Which register files the operating system saves (XCR0). */
static uint32_t kvc__xcr0(void)
{
#if defined(_MSC_VER) && !defined(__clang__)
    return (uint32_t)_xgetbv(0);
#else
    uint32_t lo, hi;
    __asm__ __volatile__("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return lo;
#endif
}
#endif

/* The best set that the processor and the operating system can run. */
static kvc_isa kvc__isa_detect(void)
{
#if defined(KVC__EMULATED)
    return KVC_ISA_AVX512_VNNI;
#elif KVC__SIMD_X86
    uint32_t r[4], c1, b7, c7, xcr0;
    const uint32_t f512 = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);    /* F DQ BW VL */
    kvc__cpuid(0, r);
    if (r[0] < 7) return KVC_ISA_BASE;
    kvc__cpuid(1, r);
    c1 = r[2];
    if ((c1 & (1u << 27)) == 0) return KVC_ISA_BASE;                            /* OSXSAVE */
    xcr0 = kvc__xcr0();
    kvc__cpuid(7, r);
    b7 = r[1];
    c7 = r[2];
    if ((xcr0 & 6u) != 6u || (b7 & (1u << 5)) == 0 || (c1 & (1u << 12)) == 0 ||
        (c1 & (1u << 29)) == 0)                                                 /* AVX2 FMA F16C */
        return KVC_ISA_BASE;
    if ((xcr0 & 0xe6u) != 0xe6u || (b7 & f512) != f512) return KVC_ISA_AVX2;
    return (c7 & (1u << 11)) != 0 ? KVC_ISA_AVX512_VNNI : KVC_ISA_AVX512;
#elif KVC__SIMD_NEON
    return KVC_ISA_NEON;
#else
    return KVC_ISA_BASE;
#endif
}

/* The best table up to the cap. */
static const kvc__kernels *kvc__kernels_pick(kvc_isa cap)
{
    kvc_isa isa = kvc__isa_detect();
    if (cap != KVC_ISA_BEST && cap < isa) isa = cap;
#if KVC__SIMD_X86
    if (isa == KVC_ISA_AVX512_VNNI) return &kvc__table_avx512vnni;
    if (isa == KVC_ISA_AVX512) return &kvc__table_avx512;
    if (isa == KVC_ISA_AVX2) return &kvc__table_avx2;
#endif
#if KVC__SIMD_NEON
    if (isa == KVC_ISA_NEON) return &kvc__table_neon;
#endif
    return &kvc__table_base;
}

typedef void (*kvc__mm_fn)(const kvc__mm *a);

/* packed: the kernel for weights in groups, else for rows as they lie in the file */
static kvc__mm_fn kvc__mm_pick(const kvc__kernels *k, uint32_t type, int packed)
{
    switch (type) {
    case KVC__F32: return packed ? k->mm_f32_packed : k->mm_f32;
    case KVC__F16: return packed ? k->mm_f16_packed : k->mm_f16;
    case KVC__BF16: return packed ? k->mm_bf16_packed : k->mm_bf16;
    case KVC__Q8_0: return packed ? k->mm_q8_0_packed : k->mm_q8_0;
    case KVC__Q4_0: return packed ? k->mm_q4_0_packed : k->mm_q4_0;
    default: return NULL;
    }
}

/* ------------------------------------------------------------------------------------------------
   >>gguf  The reader of GGUF files
   Source: ggml's docs/gguf.md, versions 2 and 3. The file is a block of bytes; the reader checks
   every length, count, offset and type against what is left before it uses it and keeps pointers
   into the block, never copies of tensor data. One allocation holds the index: entries, tensors
   and a hash table over the names of both, which also finds duplicates.
   ---------------------------------------------------------------------------------------------- */
typedef struct kvc__tensor {
    const char *name;       /* in the file, not zero-terminated */
    size_t name_size;
    uint32_t type;
    uint32_t n_dims;        /* 1 .. 4; dims past it are 1 */
    uint64_t dims[4];       /* dims[0] is the length of a row */
    uint64_t offset;        /* from the first byte of tensor data */
    const unsigned char *data;
    size_t size;            /* bytes */
} kvc__tensor;

typedef struct kvc__gguf {
    kvc_meta *metas;
    kvc__tensor *tensors;
    unsigned char *used;    /* [n_tensors] 1: the model took it */
    uint32_t *slots;        /* open addressing; 1 + index, metas first, then tensors; 0 is free */
    size_t n_metas, n_tensors, n_slots;
    uint32_t version;
    void *block;
    size_t block_size;
} kvc__gguf;

/* What is left of the file. Every take checks first. */
typedef struct kvc__reader {
    const unsigned char *p;
    size_t left;
    const unsigned char *start;
} kvc__reader;

static const unsigned char *kvc__reader_take(kvc__reader *c, uint64_t size)
{
    const unsigned char *p = c->p;
    if (size > c->left) return NULL;
    c->p += size;
    c->left -= (size_t)size;
    return p;
}

static int kvc__reader_u32(kvc__reader *c, uint32_t *v)
{
    const unsigned char *p = kvc__reader_take(c, 4);
    if (p != NULL) *v = kvc__rd32(p);
    return p != NULL;
}

static int kvc__reader_u64(kvc__reader *c, uint64_t *v)
{
    const unsigned char *p = kvc__reader_take(c, 8);
    if (p != NULL) *v = kvc__rd64(p);
    return p != NULL;
}

static int kvc__reader_string(kvc__reader *c, const char **s, size_t *size)
{
    uint64_t n;
    if (!kvc__reader_u64(c, &n)) return 0;
    *s = (const char *)kvc__reader_take(c, n);
    *size = (size_t)n;
    return *s != NULL;
}

/* Bytes of a fixed-size metadata value; 0 for strings, arrays and unknown types. */
static uint32_t kvc__meta_size(uint32_t type)
{
    static const unsigned char sizes[13] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
    return type < 13 ? sizes[type] : 0;
}

/* "metadata entry 7" for errors before a name is known */
static kvc_result kvc__gguf_cut(kvc_error *err, const kvc__reader *c, const char *what,
    uint64_t index)
{
    kvc__msg m;
    if (err == NULL) return KVC_ERROR_FORMAT;
    kvc__fail(err, KVC_ERROR_FORMAT, "", "the file ends in the middle of it");
    kvc__msg_start(&m, err->where, sizeof err->where);
    kvc__msg_text(&m, what);
    kvc__msg_u64(&m, index);
    err->position = (uint64_t)(c->p - c->start);
    return KVC_ERROR_FORMAT;
}

/* An error about the thing with this name, at the cursor. */
static kvc_result kvc__gguf_bad(kvc_error *err, const kvc__reader *c, kvc_result code,
    const char *name, size_t name_size, const char *message)
{
    kvc__fail_bytes(err, code, name, name_size, message);
    if (err != NULL) err->position = (uint64_t)(c->p - c->start);
    return code;
}

/* Reads an array's header and steps over its items. */
static kvc_result kvc__gguf_array(kvc__reader *c, kvc_meta *m, kvc_error *err)
{
    uint32_t item_type, item_size;
    uint64_t i, bytes;
    const char *s;
    size_t size;
    if (!kvc__reader_u32(c, &item_type) || !kvc__reader_u64(c, &m->n_items))
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
            "the file ends in this array");
    if (item_type == KVC_META_ARRAY)
        return kvc__gguf_bad(err, c, KVC_ERROR_UNSUPPORTED, m->key, m->key_size,
            "an array of arrays");
    item_size = kvc__meta_size(item_type);
    if (item_size == 0 && item_type != KVC_META_STRING)
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
            "unknown type of array items");
    m->item_type = (kvc_meta_type)item_type;
    m->data = c->p;
    if (item_size != 0) {
        if (!kvc__mul_u64(&bytes, m->n_items, item_size) || kvc__reader_take(c, bytes) == NULL)
            return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
                "more array items than the file has bytes for");
    } else {
        if (m->n_items > c->left / 8)
            return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
                "more array items than the file has bytes for");
        for (i = 0; i < m->n_items; i++) {
            if (!kvc__reader_string(c, &s, &size))
                return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
                    "a string that is longer than the file");
        }
    }
    m->data_size = (size_t)(c->p - (const unsigned char *)m->data);
    return KVC_OK;
}

static kvc_result kvc__gguf_meta(kvc__reader *c, kvc_meta *m, uint64_t index, kvc_error *err)
{
    uint32_t type, size;
    const char *s;
    memset(m, 0, sizeof *m);
    if (!kvc__reader_string(c, &m->key, &m->key_size))
        return kvc__gguf_cut(err, c, "metadata entry ", index);
    if (m->key_size == 0 || m->key_size > 65535)
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
            "a key of 0 or over 65535 bytes");
    if (!kvc__reader_u32(c, &type))
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
            "the file ends before its type");
    m->n_items = 1;
    m->type = (kvc_meta_type)type;
    if (type == KVC_META_ARRAY) return kvc__gguf_array(c, m, err);
    if (type == KVC_META_STRING) {
        if (!kvc__reader_string(c, &s, &m->data_size))
            return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
                "a string that is longer than the file");
        m->data = s;
        return KVC_OK;
    }
    size = kvc__meta_size(type);
    if (size == 0)
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size, "unknown value type");
    m->data = kvc__reader_take(c, size);
    m->data_size = size;
    if (m->data == NULL)
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
            "the file ends in its value");
    if (type == KVC_META_BOOL && *(const unsigned char *)m->data > 1)
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
            "a boolean other than 0 and 1");
    return KVC_OK;
}

/* Reads name, shape, type and offset; where the data starts is known only after the last entry. */
static kvc_result kvc__gguf_tensor(kvc__reader *c, kvc__tensor *t, uint64_t index, kvc_error *err)
{
    const kvc__type_info *info;
    uint64_t n = 1, bytes;
    uint32_t i;
    memset(t, 0, sizeof *t);
    if (!kvc__reader_string(c, &t->name, &t->name_size))
        return kvc__gguf_cut(err, c, "tensor ", index);
    if (t->name_size == 0 || t->name_size > 65535)
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
            "a tensor name of 0 or over 65535 bytes");
    if (!kvc__reader_u32(c, &t->n_dims))
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
            "the file ends in its shape");
    if (t->n_dims < 1 || t->n_dims > 4)
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
            "not 1 to 4 dimensions");
    for (i = 0; i < 4; i++) t->dims[i] = 1;
    for (i = 0; i < t->n_dims; i++) {
        if (!kvc__reader_u64(c, &t->dims[i]))
            return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
                "the file ends in its shape");
        if (t->dims[i] == 0)
            return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
                "a dimension is zero");
        if (!kvc__mul_u64(&n, n, t->dims[i]) || n > (uint64_t)INT64_MAX)
            return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
                "the dimensions multiply to more than 2^63 elements");
    }
    if (!kvc__reader_u32(c, &t->type) || !kvc__reader_u64(c, &t->offset))
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
            "the file ends before its type and offset");
    info = kvc__type(t->type);
    if (info == NULL)
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
            "unknown tensor type");
    if (t->dims[0] % info->block != 0)
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
            "the row length is not a multiple of its type's block");
    if (!kvc__mul_u64(&bytes, n / info->block, info->block_size) || bytes > SIZE_MAX)
        return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
            "its size passes the address space");
    t->size = (size_t)bytes;
    return KVC_OK;
}

static const char *kvc__gguf_name(const kvc__gguf *g, size_t i, size_t *size)
{
    if (i < g->n_metas) {
        *size = g->metas[i].key_size;
        return g->metas[i].key;
    }
    *size = g->tensors[i - g->n_metas].name_size;
    return g->tensors[i - g->n_metas].name;
}

/* The slot of a name: its own or the free one where it belongs. Keys and tensors hash apart. */
static size_t kvc__gguf_slot(const kvc__gguf *g, const char *name, size_t size, int is_tensor)
{
    size_t mask = g->n_slots - 1, i, s, other_size;
    const char *other;
    i = (size_t)kvc__hash_bytes(name, size, (uint64_t)is_tensor) & mask;
    for (; g->slots[i] != 0; i = (i + 1) & mask) {
        s = g->slots[i] - 1;
        if ((s >= g->n_metas) != (is_tensor != 0)) continue;
        other = kvc__gguf_name(g, s, &other_size);
        if (other_size == size && memcmp(other, name, size) == 0) break;
    }
    return i;
}

/* Enters name i; 0 if it is there already. */
static int kvc__gguf_enter(kvc__gguf *g, size_t i)
{
    size_t size, slot;
    const char *name = kvc__gguf_name(g, i, &size);
    slot = kvc__gguf_slot(g, name, size, i >= g->n_metas);
    if (g->slots[slot] != 0) return 0;
    g->slots[slot] = (uint32_t)(i + 1);
    return 1;
}

static int kvc__gguf_find(const kvc__gguf *g, const char *key, kvc_meta *out)
{
    size_t slot = kvc__gguf_slot(g, key, strlen(key), 0);
    memset(out, 0, sizeof *out);
    if (g->slots[slot] == 0) return 0;
    *out = g->metas[g->slots[slot] - 1];
    return 1;
}

/* The tensor of this name, marked as used, or NULL. */
static const kvc__tensor *kvc__gguf_find_tensor(kvc__gguf *g, const char *name)
{
    size_t slot = kvc__gguf_slot(g, name, strlen(name), 1), i;
    if (g->slots[slot] == 0) return NULL;
    i = g->slots[slot] - 1 - g->n_metas;
    g->used[i] = 1;
    return &g->tensors[i];
}

/* Magic, version and counts; the counts are bounded by the bytes that the smallest entries need. */
static kvc_result kvc__gguf_header(kvc__reader *c, kvc__gguf *g, kvc_error *err)
{
    const unsigned char *magic = kvc__reader_take(c, 4);
    uint64_t n_tensors, n_metas;
    if (magic == NULL || memcmp(magic, "GGUF", 4) != 0)
        return kvc__fail(err, KVC_ERROR_FORMAT, "header", "not a GGUF file");
    if (!kvc__reader_u32(c, &g->version) || !kvc__reader_u64(c, &n_tensors) ||
        !kvc__reader_u64(c, &n_metas))
        return kvc__fail(err, KVC_ERROR_FORMAT, "header", "the file ends in its header");
    if (g->version != 0 && (g->version & 0xffffu) == 0)
        return kvc__fail(err, KVC_ERROR_UNSUPPORTED, "header", "a big-endian file");
    if (g->version != 2 && g->version != 3)
        return kvc__fail_numbers(err, KVC_ERROR_UNSUPPORTED, "header", "GGUF version", g->version,
            "is not one of the known versions 2 and", 3);
    if (n_metas > c->left / 13)
        return kvc__fail(err, KVC_ERROR_FORMAT, "metadata_kv_count",
            "more metadata entries than the file has bytes for");
    if (n_tensors > c->left / 32 || n_tensors + n_metas > 0x7fffffffu)
        return kvc__fail(err, KVC_ERROR_FORMAT, "tensor_count",
            "more tensors than the file has bytes for");
    g->n_metas = (size_t)n_metas;
    g->n_tensors = (size_t)n_tensors;
    return KVC_OK;
}

static kvc_result kvc__gguf_index(kvc__gguf *g, const kvc_allocator *a, kvc_error *err)
{
    kvc__arena arena;
    int pass;
    g->n_slots = 16;
    while (g->n_slots < 2 * (g->n_metas + g->n_tensors)) g->n_slots *= 2;
    memset(&arena, 0, sizeof arena);
    for (pass = 0; pass < 2; pass++) {
        arena.used = 0;
        g->metas = (kvc_meta *)kvc__take(&arena, g->n_metas, sizeof *g->metas);
        g->tensors = (kvc__tensor *)kvc__take(&arena, g->n_tensors, sizeof *g->tensors);
        g->used = (unsigned char *)kvc__take(&arena, g->n_tensors, 1);
        g->slots = (uint32_t *)kvc__take(&arena, g->n_slots, sizeof *g->slots);
        if (pass == 1) break;
        g->block_size = arena.used;
        g->block = arena.overflow ? NULL : kvc__alloc(a, arena.used, 64);
        if (g->block == NULL)
            return kvc__fail(err, KVC_ERROR_MEMORY, "allocator", "no memory for the index");
        arena.base = (unsigned char *)g->block;
    }
    memset(g->slots, 0, g->n_slots * sizeof *g->slots);
    if (g->n_tensors != 0) memset(g->used, 0, g->n_tensors);
    return KVC_OK;
}

static kvc_result kvc__gguf_alignment(const kvc__gguf *g, uint64_t *out, kvc_error *err)
{
    kvc_meta m;
    *out = 32;
    if (!kvc__gguf_find(g, "general.alignment", &m)) return KVC_OK;
    if (m.type != KVC_META_U32)
        return kvc__fail(err, KVC_ERROR_FORMAT, "general.alignment",
            "not an unsigned 32-bit number");
    *out = kvc__rd32(m.data);
    if (*out == 0 || (*out & (*out - 1)) != 0 || *out > (1u << 20))
        return kvc__fail(err, KVC_ERROR_FORMAT, "general.alignment",
            "not a power of two up to 2^20");
    return KVC_OK;
}

/* Places the tensors: the offsets are relative to the first aligned byte after the index. */
static kvc_result kvc__gguf_place(kvc__gguf *g, kvc__reader *c, uint64_t alignment, kvc_error *err)
{
    uint64_t at = (uint64_t)(c->p - c->start), pad = (alignment - at % alignment) % alignment;
    size_t i;
    if (g->n_tensors == 0) return KVC_OK;
    if (kvc__reader_take(c, pad) == NULL)
        return kvc__fail(err, KVC_ERROR_FORMAT, "tensor data", "the file ends before its tensors");
    for (i = 0; i < g->n_tensors; i++) {
        kvc__tensor *t = &g->tensors[i];
        if (t->offset % alignment != 0)
            return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
                "its offset is not aligned");
        if (t->offset > c->left || t->size > c->left - (size_t)t->offset)
            return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
                "its data lies past the end of the file");
        t->data = c->p + (size_t)t->offset;
    }
    return KVC_OK;
}

static void kvc__gguf_close(kvc__gguf *g, const kvc_allocator *a)
{
    kvc__free(a, g->block, g->block_size);
    memset(g, 0, sizeof *g);
}

static kvc_result kvc__gguf_parse(kvc__gguf *g, kvc__reader *c, kvc_error *err)
{
    uint64_t alignment;
    size_t i;
    kvc_result r;
    for (i = 0; i < g->n_metas; i++) {
        kvc_meta *m = &g->metas[i];
        if ((r = kvc__gguf_meta(c, m, i, err)) != KVC_OK) return r;
        if (!kvc__gguf_enter(g, i))
            return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, m->key, m->key_size,
                "the key appears twice");
    }
    if ((r = kvc__gguf_alignment(g, &alignment, err)) != KVC_OK) return r;
    for (i = 0; i < g->n_tensors; i++) {
        kvc__tensor *t = &g->tensors[i];
        if ((r = kvc__gguf_tensor(c, t, i, err)) != KVC_OK) return r;
        if (!kvc__gguf_enter(g, g->n_metas + i))
            return kvc__gguf_bad(err, c, KVC_ERROR_FORMAT, t->name, t->name_size,
                "the tensor appears twice");
    }
    return kvc__gguf_place(g, c, alignment, err);
}

static kvc_result kvc__gguf_open(kvc__gguf *g, const void *data, size_t size,
    const kvc_allocator *a, kvc_error *err)
{
    kvc__reader c;
    kvc_result r;
    memset(g, 0, sizeof *g);
    c.p = c.start = (const unsigned char *)data;
    c.left = size;
    if ((r = kvc__gguf_header(&c, g, err)) != KVC_OK) return r;
    if ((r = kvc__gguf_index(g, a, err)) != KVC_OK) return r;
    r = kvc__gguf_parse(g, &c, err);
    if (r != KVC_OK) kvc__gguf_close(g, a);
    return r;
}

/* ---- values ---- */
static int kvc__meta_number(const kvc_meta *m, double *out)
{
    const unsigned char *p = (const unsigned char *)m->data;
    *out = 0.0;
    switch (m->type) {
    case KVC_META_U8: case KVC_META_BOOL: *out = p[0]; return 1;
    case KVC_META_I8: *out = (int8_t)p[0]; return 1;
    case KVC_META_U16: *out = kvc__rd16(p); return 1;
    case KVC_META_I16: *out = (int16_t)kvc__rd16(p); return 1;
    case KVC_META_U32: *out = kvc__rd32(p); return 1;
    case KVC_META_I32: *out = (int32_t)kvc__rd32(p); return 1;
    case KVC_META_F32: *out = (double)kvc__rdf32(p); return 1;
    case KVC_META_U64: *out = (double)kvc__rd64(p); return 1;
    case KVC_META_I64: *out = (double)(int64_t)kvc__rd64(p); return 1;
    case KVC_META_F64: *out = kvc__rdf64(p); return 1;
    default: return 0;
    }
}

static int kvc__meta_is_integer(const kvc_meta *m)
{
    return m->type <= KVC_META_I32 || m->type == KVC_META_U64 || m->type == KVC_META_I64;
}

static int kvc__meta_is_text(const kvc_meta *m, const char *text)
{
    return m->type == KVC_META_STRING && m->data_size == strlen(text) &&
        memcmp(m->data, text, m->data_size) == 0;
}

static kvc_result kvc__meta_item(const kvc_meta *array, uint64_t i, kvc_meta *out)
{
    const unsigned char *p = (const unsigned char *)array->data;
    uint32_t size;
    memset(out, 0, sizeof *out);
    if (array->type != KVC_META_ARRAY || i >= array->n_items) return KVC_ERROR_ARGUMENT;
    out->key = array->key;
    out->key_size = array->key_size;
    out->type = array->item_type;
    out->n_items = 1;
    size = kvc__meta_size((uint32_t)array->item_type);
    if (size != 0) {
        out->data = p + (size_t)i * size;
        out->data_size = size;
        return KVC_OK;
    }
    for (; i > 0; i--) p += 8 + (size_t)kvc__rd64(p);
    out->data = p + 8;
    out->data_size = (size_t)kvc__rd64(p);
    return KVC_OK;
}

/* ------------------------------------------------------------------------------------------------
   >>unicode  UTF-8 and character classes
   Owns the UTF-8 reader and writer and the general category of every code point, as far as the
   tokenizers' splits ask for it. The reader takes any bytes: what is ill-formed comes out as one
   "bad" character for each maximal part (Unicode standard, section 3.9, U+FFFD substitution of
   maximal subparts), so no input is refused and none is read past its end.
   ---------------------------------------------------------------------------------------------- */

#define KVC__UTF8_BAD 0x110000u     /* ill-formed; past the last code point */
#define KVC__UTF8_CUT 0x110001u     /* the start of a character that the end cuts off */

/* Reads one character of p[0..n), n > 0, and returns its size in bytes. Bounds of the second byte
   keep out overlong forms, surrogates and what is above U+10FFFF (Unicode standard, table 3-7). */
static size_t kvc__utf8_read(const unsigned char *p, size_t n, uint32_t *cp)
{
    uint32_t c = p[0], low = 0x80, high = 0xBF;
    size_t i, size;
    *cp = c;
    if (c < 0x80) return 1;
    *cp = KVC__UTF8_BAD;
    if (c < 0xC2 || c > 0xF4) return 1;
    size = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    if (c == 0xE0) low = 0xA0;
    if (c == 0xED) high = 0x9F;
    if (c == 0xF0) low = 0x90;
    if (c == 0xF4) high = 0x8F;
    c &= 0x7Fu >> size;
    for (i = 1; i < size; i++) {
        if (i == n) {
            *cp = KVC__UTF8_CUT;
            return n;
        }
        if (p[i] < low || p[i] > high) return i;
        c = c << 6 | (p[i] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    *cp = c;
    return size;
}

/* Classes of code points, as bits so that sets of them can be written with |. */
enum {
    KVC__CLASS_OTHER = 1,       /* separators, controls, unassigned */
    KVC__CLASS_LETTER = 2,      /* L: Lu Ll Lt Lm Lo */
    KVC__CLASS_MARK = 4,        /* M */
    KVC__CLASS_NUMBER = 8,      /* N: Nd Nl No */
    KVC__CLASS_PUNCT = 16,      /* P */
    KVC__CLASS_SYMBOL = 32      /* S, and ill-formed bytes */
};

/* (first code point << 3 | bit number of the class), rising; good up to the next entry. Unicode
   15.0, printed by tests/unicode_tables.py from UnicodeData.txt. */
static const uint32_t kvc__class_table[] = {
    0x0,0x10c,0x125,0x12c,0x15d,0x164,0x183,0x1d4,0x1e5,0x1fc,0x209,0x2dc,0x2f5,0x2fc,0x305,0x309,
    0x3dc,0x3e5,0x3ec,0x3f5,0x3f8,0x50c,0x515,0x53c,0x545,0x551,0x55c,0x565,0x568,0x575,0x593,0x5a5,
    0x5a9,0x5b4,0x5c5,0x5cb,0x5d1,0x5dc,0x5e3,0x5fc,0x601,0x6bd,0x6c1,0x7bd,0x7c1,0x1615,0x1631,
    0x1695,0x1701,0x172d,0x1761,0x176d,0x1771,0x177d,0x1802,0x1b81,0x1bad,0x1bb1,0x1bc0,0x1bd1,
    0x1bf4,0x1bf9,0x1c00,0x1c25,0x1c31,0x1c3c,0x1c41,0x1c58,0x1c61,0x1c68,0x1c71,0x1d10,0x1d19,
    0x1fb5,0x1fb9,0x2415,0x241a,0x2451,0x2980,0x2989,0x2ab8,0x2ac9,0x2ad4,0x2b01,0x2c4c,0x2c58,
    0x2c6d,0x2c80,0x2c8a,0x2df4,0x2dfa,0x2e04,0x2e0a,0x2e1c,0x2e22,0x2e34,0x2e3a,0x2e40,0x2e81,
    0x2f58,0x2f79,0x2f9c,0x2fa8,0x3035,0x304c,0x305d,0x3064,0x3075,0x3082,0x30dc,0x30e0,0x30ec,
    0x3101,0x325a,0x3303,0x3354,0x3371,0x3382,0x3389,0x36a4,0x36a9,0x36b2,0x36e8,0x36f5,0x36fa,
    0x3729,0x373a,0x374d,0x3752,0x3771,0x3783,0x37d1,0x37ed,0x37f9,0x3804,0x3870,0x3881,0x388a,
    0x3891,0x3982,0x3a58,0x3a69,0x3d32,0x3d89,0x3d90,0x3e03,0x3e51,0x3f5a,0x3fa1,0x3fb5,0x3fbc,
    0x3fd1,0x3fd8,0x3fea,0x3ff5,0x4001,0x40b2,0x40d1,0x40da,0x4121,0x412a,0x4141,0x414a,0x4170,
    0x4184,0x41f8,0x4201,0x42ca,0x42e0,0x42f4,0x42f8,0x4301,0x4358,0x4381,0x4445,0x4449,0x4478,
    0x44c2,0x4501,0x4652,0x4710,0x471a,0x4821,0x49d2,0x49e9,0x49f2,0x4a81,0x4a8a,0x4ac1,0x4b12,
    0x4b24,0x4b33,0x4b84,0x4b89,0x4c0a,0x4c20,0x4c29,0x4c68,0x4c79,0x4c88,0x4c99,0x4d48,0x4d51,
    0x4d88,0x4d91,0x4d98,0x4db1,0x4dd0,0x4de2,0x4de9,0x4df2,0x4e28,0x4e3a,0x4e48,0x4e5a,0x4e71,
    0x4e78,0x4eba,0x4ec0,0x4ee1,0x4ef0,0x4ef9,0x4f12,0x4f20,0x4f33,0x4f81,0x4f95,0x4fa3,0x4fd5,
    0x4fe1,0x4fec,0x4ff2,0x4ff8,0x500a,0x5020,0x5029,0x5058,0x5079,0x5088,0x5099,0x5148,0x5151,
    0x5188,0x5191,0x51a0,0x51a9,0x51b8,0x51c1,0x51d0,0x51e2,0x51e8,0x51f2,0x5218,0x523a,0x5248,
    0x525a,0x5270,0x528a,0x5290,0x52c9,0x52e8,0x52f1,0x52f8,0x5333,0x5382,0x5391,0x53aa,0x53b4,
    0x53b8,0x540a,0x5420,0x5429,0x5470,0x5479,0x5490,0x5499,0x5548,0x5551,0x5588,0x5591,0x55a0,
    0x55a9,0x55d0,0x55e2,0x55e9,0x55f2,0x5630,0x563a,0x5650,0x565a,0x5670,0x5681,0x5688,0x5701,
    0x5712,0x5720,0x5733,0x5784,0x578d,0x5790,0x57c9,0x57d2,0x5800,0x580a,0x5820,0x5829,0x5868,
    0x5879,0x5888,0x5899,0x5948,0x5951,0x5988,0x5991,0x59a0,0x59a9,0x59d0,0x59e2,0x59e9,0x59f2,
    0x5a28,0x5a3a,0x5a48,0x5a5a,0x5a70,0x5aaa,0x5ac0,0x5ae1,0x5af0,0x5af9,0x5b12,0x5b20,0x5b33,
    0x5b85,0x5b89,0x5b93,0x5bc0,0x5c12,0x5c19,0x5c20,0x5c29,0x5c58,0x5c71,0x5c88,0x5c91,0x5cb0,
    0x5cc9,0x5cd8,0x5ce1,0x5ce8,0x5cf1,0x5d00,0x5d19,0x5d28,0x5d41,0x5d58,0x5d71,0x5dd0,0x5df2,
    0x5e18,0x5e32,0x5e48,0x5e52,0x5e70,0x5e81,0x5e88,0x5eba,0x5ec0,0x5f33,0x5f9d,0x5fd8,0x6002,
    0x6029,0x6068,0x6071,0x6088,0x6091,0x6148,0x6151,0x61d0,0x61e2,0x61e9,0x61f2,0x6228,0x6232,
    0x6248,0x6252,0x6270,0x62aa,0x62b8,0x62c1,0x62d8,0x62e9,0x62f0,0x6301,0x6312,0x6320,0x6333,
    0x6380,0x63bc,0x63c3,0x63fd,0x6401,0x640a,0x6424,0x6429,0x6468,0x6471,0x6488,0x6491,0x6548,
    0x6551,0x65a0,0x65a9,0x65d0,0x65e2,0x65e9,0x65f2,0x6628,0x6632,0x6648,0x6652,0x6670,0x66aa,
    0x66b8,0x66e9,0x66f8,0x6701,0x6712,0x6720,0x6733,0x6780,0x6789,0x679a,0x67a0,0x6802,0x6821,
    0x6868,0x6871,0x6888,0x6891,0x69da,0x69e9,0x69f2,0x6a28,0x6a32,0x6a48,0x6a52,0x6a71,0x6a7d,
    0x6a80,0x6aa1,0x6aba,0x6ac3,0x6af9,0x6b12,0x6b20,0x6b33,0x6bcd,0x6bd1,0x6c00,0x6c0a,0x6c20,
    0x6c29,0x6cb8,0x6cd1,0x6d90,0x6d99,0x6de0,0x6de9,0x6df0,0x6e01,0x6e38,0x6e52,0x6e58,0x6e7a,
    0x6ea8,0x6eb2,0x6eb8,0x6ec2,0x6f00,0x6f33,0x6f80,0x6f92,0x6fa4,0x6fa8,0x7009,0x718a,0x7191,
    0x71a2,0x71d8,0x71fd,0x7201,0x723a,0x727c,0x7283,0x72d4,0x72e0,0x7409,0x7418,0x7421,0x7428,
    0x7431,0x7458,0x7461,0x7520,0x7529,0x7530,0x7539,0x758a,0x7591,0x75a2,0x75e9,0x75f0,0x7601,
    0x7628,0x7631,0x7638,0x7642,0x7678,0x7683,0x76d0,0x76e1,0x7700,0x7801,0x780d,0x7824,0x789d,
    0x78a4,0x78ad,0x78c2,0x78d5,0x7903,0x79a5,0x79aa,0x79b5,0x79ba,0x79c5,0x79ca,0x79d4,0x79f2,
    0x7a01,0x7a40,0x7a49,0x7b68,0x7b8a,0x7c2c,0x7c32,0x7c41,0x7c6a,0x7cc0,0x7cca,0x7de8,0x7df5,
    0x7e32,0x7e3d,0x7e68,0x7e75,0x7e84,0x7ead,0x7ecc,0x7ed8,0x8001,0x815a,0x81f9,0x8203,0x8254,
    0x8281,0x82b2,0x82d1,0x82f2,0x8309,0x8312,0x8329,0x833a,0x8371,0x838a,0x83a9,0x8412,0x8471,
    0x847a,0x8483,0x84d2,0x84f5,0x8501,0x8630,0x8639,0x8640,0x8669,0x8670,0x8681,0x87dc,0x87e1,
    0x9248,0x9251,0x9270,0x9281,0x92b8,0x92c1,0x92c8,0x92d1,0x92f0,0x9301,0x9448,0x9451,0x9470,
    0x9481,0x9588,0x9591,0x95b0,0x95c1,0x95f8,0x9601,0x9608,0x9611,0x9630,0x9641,0x96b8,0x96c1,
    0x9888,0x9891,0x98b0,0x98c1,0x9ad8,0x9aea,0x9b04,0x9b4b,0x9be8,0x9c01,0x9c85,0x9cd0,0x9d01,
    0x9fb0,0x9fc1,0x9ff0,0xa004,0xa009,0xb36d,0xb374,0xb379,0xb400,0xb409,0xb4dc,0xb4e8,0xb501,
    0xb75c,0xb773,0xb789,0xb7c8,0xb801,0xb892,0xb8b0,0xb8f9,0xb992,0xb9ac,0xb9b8,0xba01,0xba92,
    0xbaa0,0xbb01,0xbb68,0xbb71,0xbb88,0xbb92,0xbba0,0xbc01,0xbda2,0xbea4,0xbeb9,0xbec4,0xbedd,
    0xbee1,0xbeea,0xbef0,0xbf03,0xbf50,0xbf83,0xbfd0,0xc004,0xc05a,0xc070,0xc07a,0xc083,0xc0d0,
    0xc101,0xc3c8,0xc401,0xc42a,0xc439,0xc54a,0xc551,0xc558,0xc581,0xc7b0,0xc801,0xc8f8,0xc902,
    0xc960,0xc982,0xc9e0,0xca05,0xca08,0xca24,0xca33,0xca81,0xcb70,0xcb81,0xcba8,0xcc01,0xcd60,
    0xcd81,0xce50,0xce83,0xced8,0xcef5,0xd001,0xd0ba,0xd0e0,0xd0f4,0xd101,0xd2aa,0xd2f8,0xd302,
    0xd3e8,0xd3fa,0xd403,0xd450,0xd483,0xd4d0,0xd504,0xd539,0xd544,0xd570,0xd582,0xd678,0xd802,
    0xd829,0xd9a2,0xda29,0xda68,0xda83,0xdad4,0xdb0d,0xdb5a,0xdba5,0xdbec,0xdbf8,0xdc02,0xdc19,
    0xdd0a,0xdd71,0xdd83,0xddd1,0xdf32,0xdfa0,0xdfe4,0xe001,0xe122,0xe1c0,0xe1dc,0xe203,0xe250,
    0xe269,0xe283,0xe2d1,0xe3f4,0xe401,0xe448,0xe481,0xe5d8,0xe5e9,0xe604,0xe640,0xe682,0xe69c,
    0xe6a2,0xe749,0xe76a,0xe771,0xe7a2,0xe7a9,0xe7ba,0xe7d1,0xe7d8,0xe801,0xee02,0xf001,0xf8b0,
    0xf8c1,0xf8f0,0xf901,0xfa30,0xfa41,0xfa70,0xfa81,0xfac0,0xfac9,0xfad0,0xfad9,0xfae0,0xfae9,
    0xfaf0,0xfaf9,0xfbf0,0xfc01,0xfda8,0xfdb1,0xfded,0xfdf1,0xfdfd,0xfe11,0xfe28,0xfe31,0xfe6d,
    0xfe81,0xfea0,0xfeb1,0xfee0,0xfeed,0xff01,0xff6d,0xff80,0xff91,0xffa8,0xffb1,0xffed,0xfff8,
    0x10084,0x10140,0x10184,0x10225,0x1022c,0x10295,0x1029c,0x102f8,0x10383,0x10389,0x10390,0x103a3,
    0x103d5,0x103ec,0x103f9,0x10403,0x10455,0x1046c,0x10478,0x10481,0x104e8,0x10505,0x10608,0x10682,
    0x10788,0x10805,0x10811,0x1081d,0x10839,0x10845,0x10851,0x108a5,0x108a9,0x108b5,0x108c9,0x108f5,
    0x10921,0x1092d,0x10931,0x1093d,0x10941,0x1094d,0x10951,0x10975,0x10979,0x109d5,0x109e1,0x10a05,
    0x10a29,0x10a55,0x10a71,0x10a7d,0x10a83,0x10c19,0x10c2b,0x10c55,0x10c60,0x10c85,0x11844,0x11865,
    0x1194c,0x1195d,0x12138,0x12205,0x12258,0x12303,0x124e5,0x12753,0x12805,0x13b44,0x13bb3,0x13ca5,
    0x13e2c,0x13e3d,0x13f34,0x13f85,0x14c1c,0x14ccd,0x14ec4,0x14ee5,0x14fe4,0x14ff5,0x15ba0,0x15bb5,
    0x15cb0,0x15cbd,0x16001,0x1672d,0x16759,0x1677a,0x16791,0x167a0,0x167cc,0x167eb,0x167f4,0x16801,
    0x16930,0x16939,0x16940,0x16969,0x16970,0x16981,0x16b40,0x16b79,0x16b84,0x16b88,0x16bfa,0x16c01,
    0x16cb8,0x16d01,0x16d38,0x16d41,0x16d78,0x16d81,0x16db8,0x16dc1,0x16df8,0x16e01,0x16e38,0x16e41,
    0x16e78,0x16e81,0x16eb8,0x16ec1,0x16ef8,0x16f02,0x17004,0x17179,0x17184,0x17285,0x17294,0x172f0,
    0x17405,0x174d0,0x174dd,0x177a0,0x17805,0x17eb0,0x17f85,0x17fe0,0x1800c,0x18025,0x18029,0x1803b,
    0x18044,0x18095,0x180a4,0x18105,0x1810b,0x18152,0x18184,0x18189,0x181b5,0x181c3,0x181d9,0x181ec,
    0x181f5,0x18200,0x18209,0x184b8,0x184ca,0x184dd,0x184e9,0x18504,0x18509,0x187dc,0x187e1,0x18800,
    0x18829,0x18980,0x18989,0x18c78,0x18c85,0x18c93,0x18cb5,0x18d01,0x18e05,0x18f20,0x18f81,0x19005,
    0x190f8,0x19103,0x19155,0x19243,0x19285,0x1928b,0x19305,0x19403,0x19455,0x1958b,0x19605,0x1a001,
    0x26e05,0x27001,0x52468,0x52485,0x52638,0x52681,0x527f4,0x52801,0x5306c,0x53081,0x53103,0x53151,
    0x53160,0x53201,0x5337a,0x5339c,0x533a2,0x533f4,0x533f9,0x534f2,0x53501,0x53733,0x53782,0x53794,
    0x537c0,0x53805,0x538b9,0x53905,0x53911,0x53c4d,0x53c59,0x53e58,0x53e81,0x53e90,0x53e99,0x53ea0,
    0x53ea9,0x53ed0,0x53f91,0x54012,0x54019,0x54032,0x54039,0x5405a,0x54061,0x5411a,0x54145,0x54162,
    0x54168,0x54183,0x541b5,0x541d0,0x54201,0x543a4,0x543c0,0x54402,0x54411,0x545a2,0x54630,0x54674,
    0x54683,0x546d0,0x54702,0x54791,0x547c4,0x547d9,0x547e4,0x547e9,0x547fa,0x54803,0x54851,0x54932,
    0x54974,0x54981,0x54a3a,0x54aa0,0x54afc,0x54b01,0x54be8,0x54c02,0x54c21,0x54d9a,0x54e0c,0x54e70,
    0x54e79,0x54e83,0x54ed0,0x54ef4,0x54f01,0x54f2a,0x54f31,0x54f83,0x54fd1,0x54ff8,0x55001,0x5514a,
    0x551b8,0x55201,0x5521a,0x55221,0x55262,0x55270,0x55283,0x552d0,0x552e4,0x55301,0x553bd,0x553d1,
    0x553da,0x553f1,0x55582,0x55589,0x55592,0x555a9,0x555ba,0x555c9,0x555f2,0x55601,0x5560a,0x55611,
    0x55618,0x556d9,0x556f4,0x55701,0x5575a,0x55784,0x55791,0x557aa,0x557b8,0x55809,0x55838,0x55849,
    0x55878,0x55889,0x558b8,0x55901,0x55938,0x55941,0x55978,0x55981,0x55add,0x55ae1,0x55b55,0x55b60,
    0x55b81,0x55f1a,0x55f5c,0x55f62,0x55f70,0x55f83,0x55fd0,0x56001,0x6bd20,0x6bd81,0x6be38,0x6be59,
    0x6bfe0,0x7c801,0x7d370,0x7d381,0x7d6d0,0x7d801,0x7d838,0x7d899,0x7d8c0,0x7d8e9,0x7d8f2,0x7d8f9,
    0x7d94d,0x7d951,0x7d9b8,0x7d9c1,0x7d9e8,0x7d9f1,0x7d9f8,0x7da01,0x7da10,0x7da19,0x7da28,0x7da31,
    0x7dd95,0x7de18,0x7de99,0x7e9f4,0x7ea05,0x7ea81,0x7ec80,0x7ec91,0x7ee40,0x7ee7d,0x7ee80,0x7ef81,
    0x7efe5,0x7f002,0x7f084,0x7f0d0,0x7f102,0x7f184,0x7f298,0x7f2a4,0x7f315,0x7f31c,0x7f325,0x7f338,
    0x7f344,0x7f34d,0x7f354,0x7f360,0x7f381,0x7f3a8,0x7f3b1,0x7f7e8,0x7f80c,0x7f825,0x7f82c,0x7f85d,
    0x7f864,0x7f883,0x7f8d4,0x7f8e5,0x7f8fc,0x7f909,0x7f9dc,0x7f9f5,0x7f9fc,0x7fa05,0x7fa09,0x7fadc,
    0x7fae5,0x7faec,0x7faf5,0x7fafc,0x7fb31,0x7fdf8,0x7fe11,0x7fe40,0x7fe51,0x7fe80,0x7fe91,0x7fec0,
    0x7fed1,0x7fee8,0x7ff05,0x7ff38,0x7ff45,0x7ff78,0x7ffe5,0x7fff0,0x80001,0x80060,0x80069,0x80138,
    0x80141,0x801d8,0x801e1,0x801f0,0x801f9,0x80270,0x80281,0x802f0,0x80401,0x807d8,0x80804,0x80818,
    0x8083b,0x809a0,0x809bd,0x80a03,0x80bcd,0x80c53,0x80c65,0x80c78,0x80c85,0x80ce8,0x80d05,0x80d08,
    0x80e85,0x80fea,0x80ff0,0x81401,0x814e8,0x81501,0x81688,0x81702,0x8170b,0x817e0,0x81801,0x81903,
    0x81920,0x81969,0x81a0b,0x81a11,0x81a53,0x81a58,0x81a81,0x81bb2,0x81bd8,0x81c01,0x81cf0,0x81cfc,
    0x81d01,0x81e20,0x81e41,0x81e84,0x81e8b,0x81eb0,0x82001,0x824f0,0x82503,0x82550,0x82581,0x826a0,
    0x826c1,0x827e0,0x82801,0x82940,0x82981,0x82b20,0x82b7c,0x82b81,0x82bd8,0x82be1,0x82c58,0x82c61,
    0x82c98,0x82ca1,0x82cb0,0x82cb9,0x82d10,0x82d19,0x82d90,0x82d99,0x82dd0,0x82dd9,0x82de8,0x83001,
    0x839b8,0x83a01,0x83ab0,0x83b01,0x83b40,0x83c01,0x83c30,0x83c39,0x83d88,0x83d91,0x83dd8,0x84001,
    0x84030,0x84041,0x84048,0x84051,0x841b0,0x841b9,0x841c8,0x841e1,0x841e8,0x841f9,0x842b0,0x842bc,
    0x842c3,0x84301,0x843bd,0x843cb,0x84401,0x844f8,0x8453b,0x84580,0x84701,0x84798,0x847a1,0x847b0,
    0x847db,0x84801,0x848b3,0x848e0,0x848fc,0x84901,0x849d0,0x849fc,0x84a00,0x84c01,0x84dc0,0x84de3,
    0x84df1,0x84e03,0x84e80,0x84e93,0x85001,0x8500a,0x85020,0x8502a,0x85038,0x85062,0x85081,0x850a0,
    0x850a9,0x850c0,0x850c9,0x851b0,0x851c2,0x851d8,0x851fa,0x85203,0x85248,0x85284,0x852c8,0x85301,
    0x853eb,0x853fc,0x85401,0x854eb,0x85500,0x85601,0x85645,0x85649,0x8572a,0x85738,0x8575b,0x85784,
    0x857b8,0x85801,0x859b0,0x859cc,0x85a01,0x85ab0,0x85ac3,0x85b01,0x85b98,0x85bc3,0x85c01,0x85c90,
    0x85ccc,0x85ce8,0x85d4b,0x85d80,0x86001,0x86248,0x86401,0x86598,0x86601,0x86798,0x867d3,0x86801,
    0x86922,0x86940,0x86983,0x869d0,0x87303,0x873f8,0x87401,0x87550,0x8755a,0x8756c,0x87570,0x87581,
    0x87590,0x877ea,0x87801,0x878eb,0x87939,0x87940,0x87981,0x87a32,0x87a8b,0x87aac,0x87ad0,0x87b81,
    0x87c12,0x87c34,0x87c50,0x87d81,0x87e2b,0x87e60,0x87f01,0x87fb8,0x88002,0x88019,0x881c2,0x8823c,
    0x88270,0x88293,0x88382,0x88389,0x8839a,0x883a9,0x883b0,0x883fa,0x88419,0x88582,0x885dc,0x885e8,
    0x885f4,0x88612,0x88618,0x88681,0x88748,0x88783,0x887d0,0x88802,0x88819,0x8893a,0x889a8,0x889b3,
    0x88a04,0x88a21,0x88a2a,0x88a39,0x88a40,0x88a81,0x88b9a,0x88ba4,0x88bb1,0x88bb8,0x88c02,0x88c19,
    0x88d9a,0x88e09,0x88e2c,0x88e4a,0x88e6c,0x88e72,0x88e83,0x88ed1,0x88edc,0x88ee1,0x88eec,0x88f00,
    0x88f0b,0x88fa8,0x89001,0x89090,0x89099,0x89162,0x891c4,0x891f2,0x891f9,0x8920a,0x89210,0x89401,
    0x89438,0x89441,0x89448,0x89451,0x89470,0x89479,0x894f0,0x894f9,0x8954c,0x89550,0x89581,0x896fa,
    0x89758,0x89783,0x897d0,0x89802,0x89820,0x89829,0x89868,0x89879,0x89888,0x89899,0x89948,0x89951,
    0x89988,0x89991,0x899a0,0x899a9,0x899d0,0x899da,0x899e9,0x899f2,0x89a28,0x89a3a,0x89a48,0x89a5a,
    0x89a70,0x89a81,0x89a88,0x89aba,0x89ac0,0x89ae9,0x89b12,0x89b20,0x89b32,0x89b68,0x89b82,0x89ba8,
    0x8a001,0x8a1aa,0x8a239,0x8a25c,0x8a283,0x8a2d4,0x8a2e0,0x8a2ec,0x8a2f2,0x8a2f9,0x8a310,0x8a401,
    0x8a582,0x8a621,0x8a634,0x8a639,0x8a640,0x8a683,0x8a6d0,0x8ac01,0x8ad7a,0x8adb0,0x8adc2,0x8ae0c,
    0x8aec1,0x8aee2,0x8aef0,0x8b001,0x8b182,0x8b20c,0x8b221,0x8b228,0x8b283,0x8b2d0,0x8b304,0x8b368,
    0x8b401,0x8b55a,0x8b5c1,0x8b5cc,0x8b5d0,0x8b603,0x8b650,0x8b801,0x8b8d8,0x8b8ea,0x8b960,0x8b983,
    0x8b9e4,0x8b9fd,0x8ba01,0x8ba38,0x8c001,0x8c162,0x8c1dc,0x8c1e0,0x8c501,0x8c703,0x8c798,0x8c7f9,
    0x8c838,0x8c849,0x8c850,0x8c861,0x8c8a0,0x8c8a9,0x8c8b8,0x8c8c1,0x8c982,0x8c9b0,0x8c9ba,0x8c9c8,
    0x8c9da,0x8c9f9,0x8ca02,0x8ca09,0x8ca12,0x8ca24,0x8ca38,0x8ca83,0x8cad0,0x8cd01,0x8cd40,0x8cd51,
    0x8ce8a,0x8cec0,0x8ced2,0x8cf09,0x8cf14,0x8cf19,0x8cf22,0x8cf28,0x8d001,0x8d00a,0x8d059,0x8d19a,
    0x8d1d1,0x8d1da,0x8d1fc,0x8d23a,0x8d240,0x8d281,0x8d28a,0x8d2e1,0x8d452,0x8d4d4,0x8d4e9,0x8d4f4,
    0x8d518,0x8d581,0x8d7c8,0x8d804,0x8d850,0x8e001,0x8e048,0x8e051,0x8e17a,0x8e1b8,0x8e1c2,0x8e201,
    0x8e20c,0x8e230,0x8e283,0x8e368,0x8e384,0x8e391,0x8e480,0x8e492,0x8e540,0x8e54a,0x8e5b8,0x8e801,
    0x8e838,0x8e841,0x8e850,0x8e859,0x8e98a,0x8e9b8,0x8e9d2,0x8e9d8,0x8e9e2,0x8e9f0,0x8e9fa,0x8ea31,
    0x8ea3a,0x8ea40,0x8ea83,0x8ead0,0x8eb01,0x8eb30,0x8eb39,0x8eb48,0x8eb51,0x8ec52,0x8ec78,0x8ec82,
    0x8ec90,0x8ec9a,0x8ecc1,0x8ecc8,0x8ed03,0x8ed50,0x8f701,0x8f79a,0x8f7bc,0x8f7c8,0x8f802,0x8f811,
    0x8f81a,0x8f821,0x8f888,0x8f891,0x8f9a2,0x8f9d8,0x8f9f2,0x8fa1c,0x8fa83,0x8fad0,0x8fd81,0x8fd88,
    0x8fe03,0x8fead,0x8ff90,0x8fffc,0x90001,0x91cd0,0x92003,0x92378,0x92384,0x923a8,0x92401,0x92a20,
    0x97c81,0x97f8c,0x97f98,0x98001,0x9a180,0x9a202,0x9a209,0x9a23a,0x9a2b0,0xa2001,0xa3238,0xb4001,
    0xb51c8,0xb5201,0xb52f8,0xb5303,0xb5350,0xb5374,0xb5381,0xb55f8,0xb5603,0xb5650,0xb5681,0xb5770,
    0xb5782,0xb57ac,0xb57b0,0xb5801,0xb5982,0xb59bc,0xb59e5,0xb5a01,0xb5a24,0xb5a2d,0xb5a30,0xb5a83,
    0xb5ad0,0xb5adb,0xb5b10,0xb5b19,0xb5bc0,0xb5be9,0xb5c80,0xb7201,0xb7403,0xb74bc,0xb74d8,0xb7801,
    0xb7a58,0xb7a7a,0xb7a81,0xb7a8a,0xb7c40,0xb7c7a,0xb7c99,0xb7d00,0xb7f01,0xb7f14,0xb7f19,0xb7f22,
    0xb7f28,0xb7f82,0xb7f90,0xb8001,0xc3fc0,0xc4001,0xc66b0,0xc6801,0xc6848,0xd7f81,0xd7fa0,0xd7fa9,
    0xd7fe0,0xd7fe9,0xd7ff8,0xd8001,0xd8918,0xd8991,0xd8998,0xd8a81,0xd8a98,0xd8aa9,0xd8ab0,0xd8b21,
    0xd8b40,0xd8b81,0xd97e0,0xde001,0xde358,0xde381,0xde3e8,0xde401,0xde448,0xde481,0xde4d0,0xde4e5,
    0xde4ea,0xde4fc,0xde500,0xe7802,0xe7970,0xe7982,0xe7a38,0xe7a85,0xe7e20,0xe8005,0xe87b0,0xe8805,
    0xe8938,0xe894d,0xe8b2a,0xe8b55,0xe8b6a,0xe8b98,0xe8bda,0xe8c1d,0xe8c2a,0xe8c65,0xe8d52,0xe8d75,
    0xe8f58,0xe9005,0xe9212,0xe922d,0xe9230,0xe9603,0xe96a0,0xe9703,0xe97a0,0xe9805,0xe9ab8,0xe9b03,
    0xe9bc8,0xea001,0xea2a8,0xea2b1,0xea4e8,0xea4f1,0xea500,0xea511,0xea518,0xea529,0xea538,0xea549,
    0xea568,0xea571,0xea5d0,0xea5d9,0xea5e0,0xea5e9,0xea620,0xea629,0xea830,0xea839,0xea858,0xea869,
    0xea8a8,0xea8b1,0xea8e8,0xea8f1,0xea9d0,0xea9d9,0xea9f8,0xeaa01,0xeaa28,0xeaa31,0xeaa38,0xeaa51,
    0xeaa88,0xeaa91,0xeb530,0xeb541,0xeb60d,0xeb611,0xeb6dd,0xeb6e1,0xeb7dd,0xeb7e1,0xeb8ad,0xeb8b1,
    0xeb9ad,0xeb9b1,0xeba7d,0xeba81,0xebb7d,0xebb81,0xebc4d,0xebc51,0xebd4d,0xebd51,0xebe1d,0xebe21,
    0xebe60,0xebe73,0xec005,0xed002,0xed1bd,0xed1da,0xed36d,0xed3aa,0xed3b5,0xed422,0xed42d,0xed43c,
    0xed460,0xed4da,0xed500,0xed50a,0xed580,0xef801,0xef8f8,0xef929,0xef958,0xf0002,0xf0038,0xf0042,
    0xf00c8,0xf00da,0xf0110,0xf011a,0xf0128,0xf0132,0xf0158,0xf0181,0xf0370,0xf047a,0xf0480,0xf0801,
    0xf0968,0xf0982,0xf09b9,0xf09f0,0xf0a03,0xf0a50,0xf0a71,0xf0a7d,0xf0a80,0xf1481,0xf1572,0xf1578,
    0xf1601,0xf1762,0xf1783,0xf17d0,0xf17fd,0xf1800,0xf2681,0xf2762,0xf2783,0xf27d0,0xf3f01,0xf3f38,
    0xf3f41,0xf3f60,0xf3f69,0xf3f78,0xf3f81,0xf3ff8,0xf4001,0xf4628,0xf463b,0xf4682,0xf46b8,0xf4801,
    0xf4a22,0xf4a59,0xf4a60,0xf4a83,0xf4ad0,0xf4af4,0xf4b00,0xf638b,0xf6565,0xf656b,0xf6585,0xf658b,
    0xf65a8,0xf680b,0xf6975,0xf697b,0xf69f0,0xf7001,0xf7020,0xf7029,0xf7100,0xf7109,0xf7118,0xf7121,
    0xf7128,0xf7139,0xf7140,0xf7149,0xf7198,0xf71a1,0xf71c0,0xf71c9,0xf71d0,0xf71d9,0xf71e0,0xf7211,
    0xf7218,0xf7239,0xf7240,0xf7249,0xf7250,0xf7259,0xf7260,0xf7269,0xf7280,0xf7289,0xf7298,0xf72a1,
    0xf72a8,0xf72b9,0xf72c0,0xf72c9,0xf72d0,0xf72d9,0xf72e0,0xf72e9,0xf72f0,0xf72f9,0xf7300,0xf7309,
    0xf7318,0xf7321,0xf7328,0xf7339,0xf7358,0xf7361,0xf7398,0xf73a1,0xf73c0,0xf73c9,0xf73e8,0xf73f1,
    0xf73f8,0xf7401,0xf7450,0xf7459,0xf74e0,0xf7509,0xf7520,0xf7529,0xf7550,0xf7559,0xf75e0,0xf7785,
    0xf7790,0xf8005,0xf8160,0xf8185,0xf84a0,0xf8505,0xf8578,0xf858d,0xf8600,0xf860d,0xf8680,0xf868d,
    0xf87b0,0xf8803,0xf886d,0xf8d70,0xf8f35,0xf9018,0xf9085,0xf91e0,0xf9205,0xf9248,0xf9285,0xf9290,
    0xf9305,0xf9330,0xf9805,0xfb6c0,0xfb6e5,0xfb768,0xfb785,0xfb7e8,0xfb805,0xfbbb8,0xfbbdd,0xfbed0,
    0xfbf05,0xfbf60,0xfbf85,0xfbf88,0xfc005,0xfc060,0xfc085,0xfc240,0xfc285,0xfc2d0,0xfc305,0xfc440,
    0xfc485,0xfc570,0xfc585,0xfc590,0xfc805,0xfd2a0,0xfd305,0xfd370,0xfd385,0xfd3e8,0xfd405,0xfd448,
    0xfd485,0xfd5f0,0xfd5fd,0xfd630,0xfd675,0xfd6e0,0xfd705,0xfd748,0xfd785,0xfd7c8,0xfd805,0xfdc98,
    0xfdca5,0xfde58,0xfdf83,0xfdfd0,0x100001,0x153700,0x153801,0x15b9d0,0x15ba01,0x15c0f0,0x15c101,
    0x167510,0x167581,0x175f08,0x17c001,0x17d0f0,0x180001,0x189a58,0x189a81,0x191d80,0x700802,
    0x700f80,0x880005
};

#define KVC__CLASS_COUNT (sizeof kvc__class_table / sizeof kvc__class_table[0])

static unsigned kvc__class_search(uint32_t cp)
{
    size_t low = 0, high = KVC__CLASS_COUNT;    /* the entry wanted is in [low, high) */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (kvc__class_table[middle] >> 3 <= cp) low = middle;
        else high = middle;
    }
    return 1u << (kvc__class_table[low] & 7u);
}

static unsigned kvc__class_of(uint32_t cp)
{
    if (cp >= 0x80) return kvc__class_search(cp);
    if ((cp | 32) - 'a' < 26) return KVC__CLASS_LETTER;
    if (cp - '0' < 10) return KVC__CLASS_NUMBER;
    if (cp <= ' ' || cp == 127) return KVC__CLASS_OTHER;
    if (cp == '$' || cp == '+' || (cp >= '<' && cp <= '>') || cp == '^' || cp == '`' || cp == '|' ||
        cp == '~') return KVC__CLASS_SYMBOL;
    return KVC__CLASS_PUNCT;
}

/* The property White_Space (PropList.txt), which regular expressions write \s. */
static int kvc__is_space(uint32_t cp)
{
    if (cp < 0x80) return cp == ' ' || cp - 9 < 5;
    if (cp < 0x2000) return cp == 0x85 || cp == 0xA0 || cp == 0x1680;
    return cp <= 0x200A || cp == 0x2028 || cp == 0x2029 || cp == 0x202F || cp == 0x205F ||
        cp == 0x3000;
}
/* ------------------------------------------------------------------------------------------------
   >>tokenizer  Text to token ids and back
   Owns the vocabulary: tables built once over the file's bytes, which stay where they are; only
   offsets, hash slots and the ids of special tokens are kept, in one block. Both families merge
   adjacent symbols, the best pair first: "llama" (SentencePiece) takes the pair whose joined
   spelling has the highest score, "gpt2" (byte-level) the one earliest in the list of merges. What
   differs between models is rows of data. Text is cut into pieces that no token can span, so nearly
   all pieces fit the stack; the cost is n log n at worst and nothing recurses. A literal U+2581 in
   the text of a "llama" vocabulary is its mark for a space and comes back as one.
   ---------------------------------------------------------------------------------------------- */

#define KVC__KEY_MODEL "tokenizer.ggml.model"
#define KVC__KEY_PRE "tokenizer.ggml.pre"
#define KVC__KEY_TOKENS "tokenizer.ggml.tokens"
#define KVC__KEY_SCORES "tokenizer.ggml.scores"
#define KVC__KEY_TYPES "tokenizer.ggml.token_type"
#define KVC__KEY_MERGES "tokenizer.ggml.merges"
#define KVC__KEY_UNKNOWN "tokenizer.ggml.unknown_token_id"
#define KVC__KEY_ENDS "tokenizer.ggml.eog_token_ids"
#define KVC__KEY_ADD_BOS "tokenizer.ggml.add_bos_token"
#define KVC__KEY_ADD_EOS "tokenizer.ggml.add_eos_token"
#define KVC__KEY_ADD_SPACE "tokenizer.ggml.add_space_prefix"

#define KVC__SPACE_MARK 0x2581u     /* "llama" spells a space as this character */

/* ---- splits ----
   A pre-tokenizer cuts text into words that merge apart. Its published form is a list of regular
   expressions, each applied to the parts that the one before left; matches and what lies between
   them are the parts. Here each expression is a stage: a scanner that is told what to look for and
   returns the size of the next part. Scanners look ahead, never back, and pass each byte a fixed
   number of times. */

enum {
    KVC__SPLIT_END,         /* after the last stage */
    KVC__SPLIT_GPT2,        /* 's|'t|'re|'ve|'m|'ll|'d| ?L+| ?N+| ?[^\sLN]+|\s+(?!\S)|\s+ */
    KVC__SPLIT_LLAMA3,      /* the same in any case, [^\r\nLN]?L+|N{1,max}| ?[^\sLN]+[\r\n]*|
                               \s*[\r\n]+|\s+(?!\S)|\s+ */
    KVC__SPLIT_MARKS,       /* [!-/:-@[-`{-~][A-Za-z]+|[^\r\nLPS]?[LM]+| ?[PS]+[\r\n]*|\s*[\r\n]+|
                               \s+(?!\S)|\s+ */
    KVC__SPLIT_RUN,         /* lead?[set]{min,max} */
    KVC__SPLIT_TAIL         /* \s+$ */
};

enum { KVC__LEAD_NONE, KVC__LEAD_BLANK, KVC__LEAD_SPACE };  /* in front of a run: -, ' '?, \s? */

enum {
    KVC__SET_NEWLINE,       /* [\r\n] */
    KVC__SET_LETTER,        /* L */
    KVC__SET_NUMBER,        /* N */
    KVC__SET_DIGIT,         /* [0-9] */
    KVC__SET_PUNCT,         /* P */
    KVC__SET_PUNCT_MATH,    /* [P$+<=>^~|] */
    KVC__SET_PUNCT_TICK,    /* [P$+<=>^~|`] */
    KVC__SET_PUNCT_WIDE,    /* [!-/:-~] and the full-width and CJK marks of deepseek-llm */
    KVC__SET_CASED,         /* kvc__cased_table */
    KVC__SET_ASIAN,         /* [U+0800-U+9FA5 U+AC00-U+D7FF] */
    KVC__SET_HAN_KANA,      /* [U+3040-U+30FF U+4E00-U+9FA5] */
    KVC__SET_NOT_STOP       /* [^(\s|.,!?)] and more sentence marks */
};

typedef struct kvc__split {
    uint8_t kind;
    uint8_t set, lead;      /* of a run */
    uint8_t min, max;       /* characters of a run, numbers of LLAMA3; max 0: any */
} kvc__split;

#define KVC__SPLIT_STAGES 6

enum {
    KVC__RULE_BLOOM, KVC__RULE_DEEPSEEK3, KVC__RULE_DEEPSEEK_CODER, KVC__RULE_DEEPSEEK_LLM,
    KVC__RULE_DEFAULT, KVC__RULE_FALCON, KVC__RULE_GPT2, KVC__RULE_LLAMA3, KVC__RULE_QWEN2,
    KVC__RULE_STARCODER, KVC__RULE_VIKING, KVC__RULE_COUNT
};

static const kvc__split kvc__split_rules[KVC__RULE_COUNT][KVC__SPLIT_STAGES + 1] = {
    { { KVC__SPLIT_RUN, KVC__SET_NOT_STOP, KVC__LEAD_BLANK, 1, 0 } },
    { { KVC__SPLIT_RUN, KVC__SET_NUMBER, KVC__LEAD_NONE, 1, 3 },
      { KVC__SPLIT_RUN, KVC__SET_HAN_KANA, KVC__LEAD_NONE, 1, 0 },
      { KVC__SPLIT_MARKS, 0, 0, 0, 0 } },
    { { KVC__SPLIT_RUN, KVC__SET_NEWLINE, KVC__LEAD_NONE, 1, 1 },
      { KVC__SPLIT_RUN, KVC__SET_LETTER, KVC__LEAD_SPACE, 1, 0 },
      { KVC__SPLIT_RUN, KVC__SET_PUNCT, KVC__LEAD_SPACE, 1, 0 },
      { KVC__SPLIT_RUN, KVC__SET_ASIAN, KVC__LEAD_NONE, 1, 0 },
      { KVC__SPLIT_RUN, KVC__SET_NUMBER, KVC__LEAD_NONE, 1, 1 } },
    { { KVC__SPLIT_RUN, KVC__SET_NEWLINE, KVC__LEAD_NONE, 1, 1 },
      { KVC__SPLIT_RUN, KVC__SET_CASED, KVC__LEAD_SPACE, 1, 0 },
      { KVC__SPLIT_RUN, KVC__SET_PUNCT_WIDE, KVC__LEAD_SPACE, 1, 0 },
      { KVC__SPLIT_TAIL, 0, 0, 0, 0 },
      { KVC__SPLIT_RUN, KVC__SET_ASIAN, KVC__LEAD_NONE, 1, 0 },
      { KVC__SPLIT_RUN, KVC__SET_NUMBER, KVC__LEAD_NONE, 1, 0 } },
    { { KVC__SPLIT_RUN, KVC__SET_PUNCT_MATH, KVC__LEAD_NONE, 1, 0 },
      { KVC__SPLIT_GPT2, 0, 0, 0, 0 },
      { KVC__SPLIT_RUN, KVC__SET_NUMBER, KVC__LEAD_NONE, 1, 0 },
      { KVC__SPLIT_RUN, KVC__SET_DIGIT, KVC__LEAD_NONE, 3, 3 } },
    { { KVC__SPLIT_RUN, KVC__SET_PUNCT_TICK, KVC__LEAD_NONE, 1, 0 },
      { KVC__SPLIT_GPT2, 0, 0, 0, 0 },
      { KVC__SPLIT_RUN, KVC__SET_DIGIT, KVC__LEAD_NONE, 3, 3 } },
    { { KVC__SPLIT_GPT2, 0, 0, 0, 0 } },
    { { KVC__SPLIT_LLAMA3, 0, 0, 1, 3 } },
    { { KVC__SPLIT_LLAMA3, 0, 0, 1, 1 } },
    { { KVC__SPLIT_RUN, KVC__SET_NUMBER, KVC__LEAD_NONE, 1, 1 },
      { KVC__SPLIT_GPT2, 0, 0, 0, 0 } },
    { { KVC__SPLIT_RUN, KVC__SET_NOT_STOP, KVC__LEAD_BLANK, 1, 0 },
      { KVC__SPLIT_RUN, KVC__SET_NUMBER, KVC__LEAD_NONE, 1, 1 } }
};

#define KVC__PRE_WHOLE_WORDS 1
#define KVC__PRE_ADD_BOS 2

typedef struct kvc__pre {
    const char *name;           /* value of tokenizer.ggml.pre */
    uint8_t rule, flags;
} kvc__pre;

static const kvc__pre kvc__pre_table[] = {
    { "a.x-4.0", KVC__RULE_GPT2, 0 },
    { "bloom", KVC__RULE_BLOOM, 0 },
    { "chatglm-bpe", KVC__RULE_LLAMA3, 0 },
    { "codeshell", KVC__RULE_STARCODER, 0 },
    { "command-r", KVC__RULE_STARCODER, 0 },
    { "dbrx", KVC__RULE_LLAMA3, 0 },
    { "deepseek-coder", KVC__RULE_DEEPSEEK_CODER, 0 },
    { "deepseek-llm", KVC__RULE_DEEPSEEK_LLM, 0 },
    { "deepseek-r1-qwen", KVC__RULE_QWEN2, 0 },
    { "deepseek-v3", KVC__RULE_DEEPSEEK3, 0 },
    { "default", KVC__RULE_DEFAULT, 0 },
    { "exaone", KVC__RULE_STARCODER, 0 },
    { "exaone4", KVC__RULE_GPT2, 0 },
    { "falcon", KVC__RULE_FALCON, 0 },
    { "falcon-h1", KVC__RULE_LLAMA3, KVC__PRE_WHOLE_WORDS | KVC__PRE_ADD_BOS },
    { "falcon3", KVC__RULE_LLAMA3, KVC__PRE_WHOLE_WORDS | KVC__PRE_ADD_BOS },
    { "gigachat", KVC__RULE_GPT2, 0 },
    { "glm4", KVC__RULE_LLAMA3, 0 },
    { "gpt-2", KVC__RULE_GPT2, 0 },
    { "gpt3-finnish", KVC__RULE_BLOOM, 0 },
    { "granite-docling", KVC__RULE_GPT2, 0 },
    { "grok-2", KVC__RULE_QWEN2, 0 },
    { "hunyuan", KVC__RULE_QWEN2, 0 },
    { "hunyuan-dense", KVC__RULE_DEEPSEEK3, 0 },
    { "jais", KVC__RULE_GPT2, 0 },
    { "jina-de", KVC__RULE_GPT2, 0 },
    { "jina-es", KVC__RULE_GPT2, 0 },
    { "jina-v1-en", KVC__RULE_GPT2, 0 },
    { "jina-v2-code", KVC__RULE_GPT2, 0 },
    { "jina-v2-de", KVC__RULE_GPT2, 0 },
    { "jina-v2-es", KVC__RULE_GPT2, 0 },
    { "kormo", KVC__RULE_QWEN2, 0 },
    { "lfm2", KVC__RULE_LLAMA3, KVC__PRE_WHOLE_WORDS | KVC__PRE_ADD_BOS },
    { "llama-bpe", KVC__RULE_LLAMA3, KVC__PRE_WHOLE_WORDS | KVC__PRE_ADD_BOS },
    { "llama-v3", KVC__RULE_LLAMA3, KVC__PRE_WHOLE_WORDS | KVC__PRE_ADD_BOS },
    { "llama3", KVC__RULE_LLAMA3, KVC__PRE_WHOLE_WORDS | KVC__PRE_ADD_BOS },
    { "megrez", KVC__RULE_QWEN2, 0 },
    { "mellum", KVC__RULE_GPT2, 0 },
    { "midm-2.0", KVC__RULE_LLAMA3, KVC__PRE_WHOLE_WORDS | KVC__PRE_ADD_BOS },
    { "minerva-7b", KVC__RULE_STARCODER, 0 },
    { "mpt", KVC__RULE_GPT2, 0 },
    { "olmo", KVC__RULE_GPT2, 0 },
    { "phi-2", KVC__RULE_GPT2, 0 },
    { "pixtral", KVC__RULE_LLAMA3, KVC__PRE_WHOLE_WORDS | KVC__PRE_ADD_BOS },
    { "poro-chat", KVC__RULE_BLOOM, 0 },
    { "qwen2", KVC__RULE_QWEN2, 0 },
    { "refact", KVC__RULE_STARCODER, 0 },
    { "roberta-bpe", KVC__RULE_GPT2, 0 },
    { "smaug-bpe", KVC__RULE_LLAMA3, 0 },
    { "smollm", KVC__RULE_STARCODER, 0 },
    { "stablelm2", KVC__RULE_QWEN2, 0 },
    { "starcoder", KVC__RULE_STARCODER, 0 },
    { "trillion", KVC__RULE_GPT2, 0 },
    { "viking", KVC__RULE_VIKING, 0 }
};

#define KVC__PRE_COUNT (sizeof kvc__pre_table / sizeof kvc__pre_table[0])

/* The letters with case that deepseek-llm's expression lists: first and last of each range. */
static const uint32_t kvc__cased_table[] = {
    0x41,0x5a, 0x61,0x7a, 0xb5,0xb5, 0xc0,0xd6, 0xd8,0xf6, 0xf8,0x1ba, 0x1bc,0x1bf, 0x1c4,0x293,
    0x295,0x2af, 0x370,0x373, 0x376,0x377, 0x37b,0x37d, 0x37f,0x37f, 0x386,0x386, 0x388,0x38a,
    0x38c,0x38c, 0x38e,0x3a1, 0x3a3,0x3f5, 0x3f7,0x481, 0x48a,0x52f, 0x531,0x556, 0x10a0,0x10c5,
    0x13a0,0x13f5, 0x13f8,0x13fd, 0x1c90,0x1cba, 0x1cbd,0x1cbf, 0x1d00,0x1d2b, 0x1d6b,0x1d77,
    0x1d79,0x1d9a, 0x1e00,0x1f15, 0x1f18,0x1f1d, 0x1f20,0x1f45, 0x1f48,0x1f4d, 0x1f50,0x1f57,
    0x1f59,0x1f59, 0x1f5b,0x1f5b, 0x1f5d,0x1f5d, 0x1f5f,0x1f7d, 0x1f80,0x1fb4, 0x1fb6,0x1fbc,
    0x1fbe,0x1fbe, 0x1fc2,0x1fc4, 0x1fc6,0x1fcc, 0x1fd0,0x1fd3, 0x1fd6,0x1fdb, 0x1fe0,0x1fec,
    0x1ff2,0x1ff4, 0x1ff6,0x1ffc, 0x2102,0x2102, 0x2107,0x2107, 0x210a,0x2113, 0x2115,0x2115,
    0x2119,0x211d, 0x2124,0x2124, 0x2126,0x2126, 0x2128,0x2128, 0x212a,0x212d, 0x212f,0x2134,
    0x2139,0x2139, 0x213c,0x213f, 0x2145,0x2149, 0x214e,0x214e, 0x2183,0x2184, 0x2c00,0x2c7b,
    0x2c7e,0x2ce4, 0x2ceb,0x2cee, 0x2cf2,0x2cf3, 0xa640,0xa66d, 0xa680,0xa69b, 0xa722,0xa76f,
    0xa771,0xa787, 0xa78b,0xa78e, 0xab70,0xabbf, 0xfb00,0xfb06, 0xfb13,0xfb17, 0xff21,0xff3a,
    0xff41,0xff5a, 0x10400,0x1044f, 0x104b0,0x104d3, 0x104d8,0x104fb, 0x10c80,0x10cb2,
    0x10cc0,0x10cf2, 0x118a0,0x118df, 0x1e900,0x1e943
};

static int kvc__is_cased(uint32_t cp)
{
    size_t low = 0, high = sizeof kvc__cased_table / sizeof kvc__cased_table[0] / 2;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (cp > kvc__cased_table[2 * middle + 1]) low = middle + 1;
        else high = middle;
    }
    return low < sizeof kvc__cased_table / sizeof kvc__cased_table[0] / 2 &&
        cp >= kvc__cased_table[2 * low];
}

static int kvc__is_newline(uint32_t cp) { return cp == '\n' || cp == '\r'; }

static int kvc__between(uint32_t cp, uint32_t first, uint32_t last)
{
    return cp >= first && cp <= last;
}

static int kvc__is_stop(uint32_t cp)
{
    static const uint16_t stops[] = {
        '(', ')', '|', '.', ',', '!', '?', 0x060C, 0x06D4, 0x0964, 0x2026, 0x3001, 0x3002, 0xFF0C
    };
    size_t i;
    for (i = 0; i < sizeof stops / sizeof stops[0]; i++) {
        if (cp == stops[i]) return 1;
    }
    return 0;
}

static int kvc__in_set(int set, uint32_t cp)
{
    switch (set) {
    case KVC__SET_NEWLINE: return kvc__is_newline(cp);
    case KVC__SET_LETTER: return kvc__class_of(cp) == KVC__CLASS_LETTER;
    case KVC__SET_NUMBER: return kvc__class_of(cp) == KVC__CLASS_NUMBER;
    case KVC__SET_DIGIT: return kvc__between(cp, '0', '9');
    case KVC__SET_PUNCT: return kvc__class_of(cp) == KVC__CLASS_PUNCT;
    case KVC__SET_PUNCT_MATH:       /* in ASCII the two differ from P and S by the accent alone */
        return kvc__class_of(cp) == KVC__CLASS_PUNCT ||
            (cp < 0x80 && cp != '`' && kvc__class_of(cp) == KVC__CLASS_SYMBOL);
    case KVC__SET_PUNCT_TICK:
        return kvc__class_of(cp) == KVC__CLASS_PUNCT ||
            (cp < 0x80 && kvc__class_of(cp) == KVC__CLASS_SYMBOL);
    case KVC__SET_PUNCT_WIDE:
        return kvc__between(cp, '!', '/') || kvc__between(cp, ':', '~') ||
            kvc__between(cp, 0xFF01, 0xFF0F) || kvc__between(cp, 0xFF1A, 0xFF5E) ||
            kvc__between(cp, 0x2018, 0x201F) || kvc__between(cp, 0x3000, 0x3002);
    case KVC__SET_CASED: return kvc__is_cased(cp);
    case KVC__SET_ASIAN:
        return kvc__between(cp, 0x0800, 0x9FA5) || kvc__between(cp, 0xAC00, 0xD7FF);
    case KVC__SET_HAN_KANA:
        return kvc__between(cp, 0x3040, 0x30FF) || kvc__between(cp, 0x4E00, 0x9FA5);
    default: return !kvc__is_space(cp) && !kvc__is_stop(cp);
    }
}

/* Bytes of the longest start of p[0..n) that is in the set, at most `max` characters (0: any). */
static size_t kvc__span_set(const unsigned char *p, size_t n, int set, size_t max, size_t *count)
{
    size_t i = 0, chars = 0, step;
    uint32_t cp;
    while (i < n && (max == 0 || chars < max)) {
        step = kvc__utf8_read(p + i, n - i, &cp);
        if (!kvc__in_set(set, cp)) break;
        i += step;
        chars++;
    }
    *count = chars;
    return i;
}

/* The same for classes: wanted classes (bits), and white space or not. */
static size_t kvc__span_class(const unsigned char *p, size_t n, unsigned classes, size_t max)
{
    size_t i = 0, chars, step;
    uint32_t cp;
    for (chars = 0; i < n && (max == 0 || chars < max); chars++) {
        step = kvc__utf8_read(p + i, n - i, &cp);
        if ((kvc__class_of(cp) & classes) == 0 || kvc__is_space(cp)) break;
        i += step;
    }
    return i;
}

static size_t kvc__span_newlines(const unsigned char *p, size_t n)
{
    size_t i = 0;
    while (i < n && kvc__is_newline(p[i])) i++;
    return i;
}

/* White space from p on: bytes in all, *last: up to the start of its last character, *line: up to
   the end of its last line break. */
static size_t kvc__span_space(const unsigned char *p, size_t n, size_t *last, size_t *line)
{
    size_t i = 0, step;
    uint32_t cp;
    *last = *line = 0;
    while (i < n) {
        step = kvc__utf8_read(p + i, n - i, &cp);
        if (!kvc__is_space(cp)) break;
        *last = i;
        i += step;
        if (kvc__is_newline(cp)) *line = i;
    }
    return i;
}

/* \s+(?!\S)|\s+ : white space before a word leaves its last character to the word. */
static size_t kvc__split_space(const unsigned char *p, size_t n, int lines)
{
    size_t last, line, size = kvc__span_space(p, n, &last, &line);
    if (lines && line != 0) return line;
    return size < n && last != 0 ? last : size;
}

/* Bytes of 's 't 're 've 'm 'll 'd at p, or 0. */
static size_t kvc__split_contraction(const unsigned char *p, size_t n, int any_case)
{
    unsigned fold = any_case ? 32 : 0, a, b;
    if (n < 2 || p[0] != '\'') return 0;
    a = p[1] | fold;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (n < 3) return 0;
    b = p[2] | fold;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

#define KVC__CLASS_NOT_WORD \
    (KVC__CLASS_OTHER | KVC__CLASS_MARK | KVC__CLASS_PUNCT | KVC__CLASS_SYMBOL)

static size_t kvc__split_gpt2(const unsigned char *p, size_t n)
{
    static const uint8_t kinds[3] = { KVC__CLASS_LETTER, KVC__CLASS_NUMBER, KVC__CLASS_NOT_WORD };
    size_t blank = p[0] == ' ', size = kvc__split_contraction(p, n, 0);
    int i;
    if (size != 0) return size;
    for (i = 0; i < 3; i++) {
        size = kvc__span_class(p + blank, n - blank, kinds[i], 0);
        if (size != 0) return blank + size;
    }
    return kvc__split_space(p, n, 0);
}

static size_t kvc__split_llama3(const unsigned char *p, size_t n, size_t max)
{
    size_t size = kvc__split_contraction(p, n, 1), blank = p[0] == ' ', first;
    uint32_t cp;
    unsigned kind;
    if (size != 0) return size;
    first = kvc__utf8_read(p, n, &cp);
    kind = kvc__class_of(cp);
    if (kind == KVC__CLASS_NUMBER) return kvc__span_class(p, n, KVC__CLASS_NUMBER, max);
    if (kind == KVC__CLASS_LETTER || kvc__is_newline(cp)) first = 0;
    size = kvc__span_class(p + first, n - first, KVC__CLASS_LETTER, 0);
    if (size != 0) return first + size;
    size = kvc__span_class(p + blank, n - blank, KVC__CLASS_NOT_WORD, 0);
    if (size != 0) return blank + size + kvc__span_newlines(p + blank + size, n - blank - size);
    return kvc__split_space(p, n, 1);
}

static size_t kvc__span_ascii_letters(const unsigned char *p, size_t n)
{
    size_t i = 0;
    while (i < n && (p[i] | 32u) - 'a' < 26u) i++;
    return i;
}

/* Bytes of the match at p, or 0: numbers and controls may stand between matches. */
static size_t kvc__marks_match(const unsigned char *p, size_t n)
{
    const unsigned marks = KVC__CLASS_PUNCT | KVC__CLASS_SYMBOL;
    const unsigned word = KVC__CLASS_LETTER | KVC__CLASS_MARK;
    size_t blank = p[0] == ' ', size, first;
    uint32_t cp;
    unsigned kind;
    first = kvc__utf8_read(p, n, &cp);
    kind = kvc__class_of(cp);
    if (cp < 0x80 && (kind & marks) != 0) {
        size = kvc__span_ascii_letters(p + 1, n - 1);
        if (size != 0) return 1 + size;
    }
    if ((kind & (marks | KVC__CLASS_LETTER)) == 0 && !kvc__is_newline(cp)) {
        size = kvc__span_class(p + first, n - first, word, 0);
        if (size != 0) return first + size;
    }
    size = kvc__span_class(p, n, word, 0);
    if (size != 0) return size;
    size = kvc__span_class(p + blank, n - blank, marks, 0);
    if (size != 0) return blank + size + kvc__span_newlines(p + blank + size, n - blank - size);
    return kvc__split_space(p, n, 1);
}

static size_t kvc__split_marks(const unsigned char *p, size_t n)
{
    size_t at = kvc__marks_match(p, n);
    uint32_t cp;
    if (at != 0) return at;
    do at += kvc__utf8_read(p + at, n - at, &cp);
    while (at < n && kvc__marks_match(p + at, n - at) == 0);
    return at;
}

/* Bytes of lead?[set]{min,max} at p, or 0. */
static size_t kvc__run_match(const kvc__split *s, const unsigned char *p, size_t n)
{
    size_t first = 0, size, count;
    uint32_t cp;
    if (s->lead == KVC__LEAD_BLANK && p[0] == ' ') first = 1;
    if (s->lead == KVC__LEAD_SPACE) {
        first = kvc__utf8_read(p, n, &cp);
        if (!kvc__is_space(cp)) first = 0;
    }
    size = kvc__span_set(p + first, n - first, s->set, s->max, &count);
    if (count >= s->min) return first + size;
    if (first == 0) return 0;
    size = kvc__span_set(p, n, s->set, s->max, &count);
    return count >= s->min ? size : 0;
}

/* Whether the run could start here is known from its first characters, so the gap before a match is
   found without scanning the run for each of its characters. */
static size_t kvc__split_run(const kvc__split *s, const unsigned char *p, size_t n)
{
    kvc__split probe = *s;
    size_t at = kvc__run_match(s, p, n);
    uint32_t cp;
    if (at != 0) return at;
    probe.max = probe.min;
    do at += kvc__utf8_read(p + at, n - at, &cp);
    while (at < n && kvc__run_match(&probe, p + at, n - at) == 0);
    return at;
}

static size_t kvc__split_tail(const unsigned char *p, size_t n)
{
    size_t at = 0, size, last, line;
    uint32_t cp;
    while (at < n) {
        size = kvc__span_space(p + at, n - at, &last, &line);
        if (size != 0 && at + size == n) return at != 0 ? at : size;
        at += size;
        if (at < n) at += kvc__utf8_read(p + at, n - at, &cp);
    }
    return n;
}

/* Bytes of the first part of p[0..n), n > 0. */
static size_t kvc__split_next(const kvc__split *s, const unsigned char *p, size_t n)
{
    switch (s->kind) {
    case KVC__SPLIT_GPT2: return kvc__split_gpt2(p, n);
    case KVC__SPLIT_LLAMA3: return kvc__split_llama3(p, n, s->max);
    case KVC__SPLIT_MARKS: return kvc__split_marks(p, n);
    case KVC__SPLIT_TAIL: return kvc__split_tail(p, n);
    default: return kvc__split_run(s, p, n);
    }
}

/* Walks the words of a text. end[k] is where the current part of stage k ends; 0 is the text. */
typedef struct kvc__words {
    const kvc__split *stages;
    const unsigned char *text;
    size_t n_stages, at;
    size_t end[KVC__SPLIT_STAGES + 1];
} kvc__words;

static void kvc__words_start(kvc__words *w, const kvc__split *stages, const unsigned char *text,
    size_t n)
{
    size_t k;
    w->stages = stages;
    w->text = text;
    w->at = 0;
    w->n_stages = 0;
    while (stages[w->n_stages].kind != KVC__SPLIT_END) w->n_stages++;
    for (k = 0; k <= w->n_stages; k++) w->end[k] = k == 0 ? n : 0;
}

/* The size of the next word, which starts at text + at before the call; 0 at the end. */
static size_t kvc__words_next(kvc__words *w)
{
    size_t k = w->n_stages, start = w->at;
    while (k > 0 && w->end[k] == start) k--;
    if (w->end[k] == start) return 0;
    for (; k < w->n_stages; k++)
        w->end[k + 1] = start + kvc__split_next(&w->stages[k], w->text + start, w->end[k] - start);
    w->at = w->end[w->n_stages];
    return w->at - start;
}

/* ---- the vocabulary ---- */

typedef enum kvc__family {
    KVC__FAMILY_NONE,       /* no tokenizer, or one that is not known */
    KVC__FAMILY_SPM,        /* "llama" */
    KVC__FAMILY_BYTES       /* "gpt2" */
} kvc__family;

/* One line of the list of merges: left and right give joined. The index is the rank. */
typedef struct kvc__join {
    uint32_t left, right, joined;
} kvc__join;

typedef struct kvc__vocab {
    uint32_t n_tokens;
    uint32_t n_rows;            /* of the embedding; ids from n_tokens up to it are padding */
    kvc_token bos, eos, eot, eom, unk;
    int add_bos, add_eos;
    int has_tokenizer;
    size_t memory_size;         /* of block */
    void *block;

    kvc__family family;
    const char *problem_key;    /* set if text cannot be tokenized: the key at fault ... */
    kvc_meta problem;           /* ... and its value */
    const kvc__split *splits;   /* BYTES: the stages of the pre-tokenizer */
    int whole_words;            /* BYTES: a word that is a token is not merged but taken */
    int space_prefix;           /* SPM: text gets a space in front */
    int strips;                 /* white space behind special tokens is dropped */

    const unsigned char *spellings; /* tokenizer.ggml.tokens in the file: u64 size, bytes, ... */
    uint32_t *at;               /* [n_tokens] offset of a token's size field in spellings */
    const unsigned char *types; /* tokenizer.ggml.token_type in the file, or NULL */
    const unsigned char *scores;/* SPM: tokenizer.ggml.scores in the file */
    kvc_meta ends;              /* tokenizer.ggml.eog_token_ids in the file, or zeroed */
    size_t size_max;            /* of the longest spelling in the table of strings */

    uint32_t *slots;            /* strings that text can become; id or KVC__FREE */
    size_t slot_mask;
    uint32_t *pair_bits;        /* a set bit: this pair of characters may occur inside a token */
    size_t pair_mask;
    kvc__join *joins;           /* BYTES [n_joins] */
    uint32_t n_joins;
    uint32_t *join_slots;       /* BYTES: index into joins or KVC__FREE */
    size_t join_mask;

    uint32_t *special;          /* [n_special] tokens found in raw text, by spelling, then id */
    uint32_t n_special;
    uint32_t special_first[2][8];   /* bits: first bytes of user tokens; of control tokens */
    kvc_token byte_token[256];  /* the token of a single byte, or KVC_NO_TOKEN */
    int all_bytes;              /* every byte has a token */
    int space_is_token;         /* SPM: the space mark alone is a token */
} kvc__vocab;

#define KVC__FREE 0xFFFFFFFFu   /* of a hash slot: nothing here */

static const unsigned char *kvc__vocab_text(const kvc__vocab *v, uint32_t id, size_t *size)
{
    const unsigned char *p = v->spellings + v->at[id];
    *size = (size_t)kvc__rd64(p);
    return p + 8;
}

/* ---- bytes in spellings ---- */

/* Byte-level spellings use one printable character for each byte: printable Latin-1 stands for
   itself, the other 68 bytes, in rising order, are U+0100 and up (GPT-2's encoder). */
static uint32_t kvc__byte_to_char(uint32_t byte)
{
    if (byte < 33) return 256 + byte;
    if (byte >= 127 && byte <= 160) return 289 + (byte - 127);
    return byte == 173 ? 323 : byte;
}

/* The byte, or 256 if the character stands for none. */
static uint32_t kvc__char_to_byte(uint32_t cp)
{
    if (cp < 256) return kvc__byte_to_char(cp) == cp ? cp : 256;
    if (cp < 289) return cp - 256;
    if (cp < 323) return cp - 289 + 127;
    return cp == 323 ? 173 : 256;
}

/* The UTF-8 form of kvc__byte_to_char(byte): one or two bytes. */
static size_t kvc__byte_spelling(uint32_t byte, unsigned char out[2])
{
    uint32_t c = kvc__byte_to_char(byte);
    out[0] = (unsigned char)c;
    if (c < 0x80) return 1;
    out[0] = (unsigned char)(0xC0 | c >> 6);
    out[1] = (unsigned char)(0x80 | (c & 0x3F));
    return 2;
}

static uint32_t kvc__hex_digit(uint32_t c)
{
    if (c - '0' < 10) return c - '0';
    if (c - 'A' < 6) return c - 'A' + 10;
    return c - 'a' < 6 ? c - 'a' + 10 : 16;
}

/* The byte that "<0x0A>" spells, or 256. */
static uint32_t kvc__hex_byte(const unsigned char *p, size_t size)
{
    uint32_t high, low;
    if (size != 6 || memcmp(p, "<0x", 3) != 0 || p[5] != '>') return 256;
    high = kvc__hex_digit(p[3]);
    low = kvc__hex_digit(p[4]);
    return high < 16 && low < 16 ? high * 16 + low : 256;
}

/* Without types in the file the ids that metadata names are the special tokens. */
static kvc_token_kind kvc__vocab_kind_untyped(const kvc__vocab *v, uint32_t id)
{
    size_t size;
    const unsigned char *p = kvc__vocab_text(v, id, &size);
    kvc_token t = (kvc_token)id;
    if (t == v->unk) return KVC_TOKEN_UNKNOWN;
    if (t == v->bos || t == v->eos || t == v->eot || t == v->eom) return KVC_TOKEN_CONTROL;
    if (v->family == KVC__FAMILY_SPM && kvc__hex_byte(p, size) < 256) return KVC_TOKEN_BYTE;
    return KVC_TOKEN_NORMAL;
}

static kvc_token_kind kvc__vocab_kind(const kvc__vocab *v, uint32_t id)
{
    uint32_t type;
    if (v->types == NULL) return kvc__vocab_kind_untyped(v, id);
    type = kvc__rd32(v->types + (size_t)id * 4);
    return type == 0 ? KVC_TOKEN_NORMAL : (kvc_token_kind)type;
}

/* ---- the table of strings ---- */

/* FNV-1a (Fowler, Noll and Vo), a byte at a time so that a string may come in parts. */
#define KVC__FNV_START 0xcbf29ce484222325u
static uint64_t kvc__fnv(uint64_t h, const unsigned char *p, size_t n)
{
    size_t i;
    for (i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

/* Smallest power of two that leaves a third of the slots free. */
static int kvc__slot_count(size_t *out, size_t n)
{
    size_t slots = 16, wanted;
    if (!kvc__mul_size(&wanted, n, 3)) return 0;
    while (slots < wanted / 2 + 1) {
        if (slots > SIZE_MAX / 2) return 0;
        slots *= 2;
    }
    *out = slots;
    return 1;
}

/* The slot of the string a then b, or the free slot where it belongs; some are always free. */
static size_t kvc__string_slot(const kvc__vocab *v, const unsigned char *a, size_t a_size,
    const unsigned char *b, size_t b_size)
{
    uint64_t h = kvc__fnv(kvc__fnv(KVC__FNV_START, a, a_size), b, b_size);
    size_t slot = (size_t)kvc__mix64(h) & v->slot_mask, size;
    while (v->slots[slot] != KVC__FREE) {
        const unsigned char *p = kvc__vocab_text(v, v->slots[slot], &size);
        if (size == a_size + b_size && memcmp(p, a, a_size) == 0 &&
            (b_size == 0 || memcmp(p + a_size, b, b_size) == 0)) break;
        slot = (slot + 1) & v->slot_mask;
    }
    return slot;
}

static kvc_token kvc__string_find(const kvc__vocab *v, const unsigned char *p, size_t size)
{
    uint32_t id;
    if (size > v->size_max) return KVC_NO_TOKEN;
    id = v->slots[kvc__string_slot(v, p, size, NULL, 0)];
    return id == KVC__FREE ? KVC_NO_TOKEN : (kvc_token)id;
}

/* Whether the spelling is that of the word, byte for character. */
static int kvc__word_equal(const unsigned char *spelling, size_t size, const unsigned char *word,
    size_t n)
{
    unsigned char c[2];
    size_t i, at = 0, step;
    for (i = 0; i < n; i++) {
        step = kvc__byte_spelling(word[i], c);
        if (size - at < step || memcmp(spelling + at, c, step) != 0) return 0;
        at += step;
    }
    return at == size;
}

/* The token that spells a whole word of raw bytes in a byte-level vocabulary. */
static kvc_token kvc__word_find(const kvc__vocab *v, const unsigned char *word, size_t n)
{
    unsigned char c[2];
    uint64_t h = KVC__FNV_START;
    size_t i, slot, size;
    if (n > v->size_max) return KVC_NO_TOKEN;
    for (i = 0; i < n; i++) h = kvc__fnv(h, c, kvc__byte_spelling(word[i], c));
    slot = (size_t)kvc__mix64(h) & v->slot_mask;
    for (; v->slots[slot] != KVC__FREE; slot = (slot + 1) & v->slot_mask) {
        const unsigned char *p = kvc__vocab_text(v, v->slots[slot], &size);
        if (kvc__word_equal(p, size, word, n)) return (kvc_token)v->slots[slot];
    }
    return KVC_NO_TOKEN;
}

/* ---- pairs inside tokens ----
   Two neighbours that no token has inside it can never become one symbol: text is cut between them
   and the parts merge apart, with the same result. The set is a bitmap over hashes; a false member
   costs a cut, nothing else. Neighbours are characters for SPM, bytes for byte-level. */

static size_t kvc__pair_hash(const kvc__vocab *v, uint32_t a, uint32_t b)
{
    return (size_t)kvc__mix64((uint64_t)a << 32 | b) & v->pair_mask;
}

static int kvc__pair_has(const kvc__vocab *v, uint32_t a, uint32_t b)
{
    size_t bit = kvc__pair_hash(v, a, b);
    return (int)(v->pair_bits[bit / 32] >> (bit % 32) & 1);
}

static void kvc__pair_add_all(kvc__vocab *v, const unsigned char *p, size_t size)
{
    uint32_t before = 0, cp;
    size_t i = 0, bit;
    while (i < size) {
        size_t start = i;
        i += kvc__utf8_read(p + i, size - i, &cp);
        if (v->family == KVC__FAMILY_BYTES) cp = kvc__char_to_byte(cp);
        else if (cp > KVC__UTF8_BAD) cp = KVC__UTF8_BAD;
        if (start != 0) {
            bit = kvc__pair_hash(v, before, cp);
            v->pair_bits[bit / 32] |= 1u << (bit % 32);
        }
        before = cp;
    }
}

/* ---- the table of merges ---- */

static size_t kvc__join_slot(const kvc__vocab *v, uint32_t left, uint32_t right)
{
    size_t slot = (size_t)kvc__mix64((uint64_t)left << 32 | right) & v->join_mask;
    while (v->join_slots[slot] != KVC__FREE) {
        const kvc__join *j = &v->joins[v->join_slots[slot]];
        if (j->left == left && j->right == right) break;
        slot = (slot + 1) & v->join_mask;
    }
    return slot;
}

/* ---- tokens written out in raw text ---- */

static int kvc__special_before(const kvc__vocab *v, uint32_t a, uint32_t b)
{
    size_t a_size, b_size;
    const unsigned char *p = kvc__vocab_text(v, a, &a_size), *q = kvc__vocab_text(v, b, &b_size);
    int order = memcmp(p, q, a_size < b_size ? a_size : b_size);
    if (order != 0) return order < 0;
    return a_size != b_size ? a_size < b_size : a < b;
}

/* Moves item i of the first n down to its place in a heap with the last one on top. */
static void kvc__special_sift(kvc__vocab *v, size_t i, size_t n)
{
    uint32_t moving = v->special[i];
    size_t child;
    while ((child = 2 * i + 1) < n) {
        if (child + 1 < n && kvc__special_before(v, v->special[child], v->special[child + 1]))
            child++;
        if (!kvc__special_before(v, moving, v->special[child])) break;
        v->special[i] = v->special[child];
        i = child;
    }
    v->special[i] = moving;
}

/* Heap sort: no memory, no recursion, n log n for any file. */
static void kvc__special_sort(kvc__vocab *v)
{
    size_t n = v->n_special, i;
    for (i = n / 2; i > 0; i--) kvc__special_sift(v, i - 1, n);
    for (; n > 1; n--) {
        uint32_t last = v->special[0];
        v->special[0] = v->special[n - 1];
        v->special[n - 1] = last;
        kvc__special_sift(v, 0, n - 1);
    }
}

/* The first entry of [low, high) whose byte at `depth` is at least c; all are longer than depth and
   equal before it. */
static uint32_t kvc__special_bound(const kvc__vocab *v, uint32_t low, uint32_t high, size_t depth,
    unsigned c)
{
    size_t size;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (kvc__vocab_text(v, v->special[middle], &size)[depth] < c) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The longest special token that p[0..n) starts with: its size, or 0 if there is none. Entries that
   agree with the text so far are a range of the sorted list, which narrows with every byte. */
static size_t kvc__special_match(const kvc__vocab *v, const unsigned char *p, size_t n, int control,
    uint32_t *id)
{
    uint32_t low = 0, high = v->n_special;
    size_t depth = 0, found = 0, size;
    for (;;) {
        for (; low < high; low++) {
            kvc__vocab_text(v, v->special[low], &size);
            if (size != depth) break;
            if (found == depth) continue;
            if (!control && kvc__vocab_kind(v, v->special[low]) != KVC_TOKEN_USER) continue;
            found = depth;
            *id = v->special[low];
        }
        if (low == high || depth == n) return found;
        low = kvc__special_bound(v, low, high, depth, p[depth]);
        high = kvc__special_bound(v, low, high, depth, p[depth] + 1u);
        depth++;
    }
}

/* The next special token of text[at..n): its start, its size in *size. n and 0 if there is none. */
static size_t kvc__special_next(const kvc__vocab *v, const unsigned char *text, size_t at, size_t n,
    int control, size_t *size, uint32_t *id)
{
    for (; at < n; at++) {
        unsigned c = text[at], bit = 1u << (c % 32);
        uint32_t first = v->special_first[0][c / 32] | (control ? v->special_first[1][c / 32] : 0);
        if ((first & bit) == 0) continue;
        *size = kvc__special_match(v, text + at, n - at, control, id);
        if (*size != 0) return at;
    }
    *size = 0;
    return n;
}

/* ---- opening ---- */

/* What the metadata holds, checked, before tables are made. */
typedef struct kvc__vocab_file {
    kvc_meta model, pre, tokens, scores, types, merges;
    int add_bos, add_eos, add_space;    /* -1: not in the file */
    uint32_t n_strings, n_special;      /* room in each table */
} kvc__vocab_file;

static kvc_result kvc__vocab_find(const kvc__gguf *g, const char *key, kvc_meta_type type,
    kvc_meta *out, kvc_error *err)
{
    if (!kvc__gguf_find(g, key, out) || out->type == type) return KVC_OK;
    return kvc__fail(err, KVC_ERROR_FORMAT, key, "the value is of another type than it must be");
}

static kvc_result kvc__vocab_find_array(const kvc__gguf *g, const char *key, kvc_meta_type item,
    kvc_meta *out, kvc_error *err)
{
    kvc_result r = kvc__vocab_find(g, key, KVC_META_ARRAY, out, err);
    if (r != KVC_OK || out->key == NULL || out->item_type == item) return r;
    if (item == KVC_META_I32 && out->item_type == KVC_META_U32) return r;
    return kvc__fail(err, KVC_ERROR_FORMAT, key, "the items are of another type than they must be");
}

static kvc_result kvc__vocab_find_flag(const kvc__gguf *g, const char *key, int *out,
    kvc_error *err)
{
    kvc_meta m;
    kvc_result r = kvc__vocab_find(g, key, KVC_META_BOOL, &m, err);
    *out = -1;
    if (r == KVC_OK && m.key != NULL) *out = *(const unsigned char *)m.data != 0;
    return r;
}

static kvc_result kvc__vocab_check_id(const kvc__vocab *v, const char *key, double id,
    kvc_error *err)
{
    if (id >= 0 && id < (double)v->n_tokens) return KVC_OK;
    return kvc__fail(err, KVC_ERROR_FORMAT, key, "the id is not in the vocabulary");
}

/* Converters write -1, also as an unsigned number, where a model has no such token. */
static kvc_result kvc__vocab_find_id(const kvc__vocab *v, const kvc__gguf *g, const char *key,
    kvc_token *out, kvc_error *err)
{
    kvc_meta m;
    double id;
    kvc_result r;
    *out = KVC_NO_TOKEN;
    if (!kvc__gguf_find(g, key, &m)) return KVC_OK;
    if (!kvc__meta_is_integer(&m))
        return kvc__fail(err, KVC_ERROR_FORMAT, key, "the value is no integer");
    kvc__meta_number(&m, &id);
    if ((id >= -1 && id < 0) || (m.type == KVC_META_U32 && id >= 4294967295.0)) return KVC_OK;
    r = kvc__vocab_check_id(v, key, id, err);
    if (r == KVC_OK) *out = (kvc_token)id;
    return r;
}

static kvc_result kvc__vocab_find_ids(kvc__vocab *v, const kvc__gguf *g, kvc_error *err)
{
    static const char *const keys[5] = {
        "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id", KVC__KEY_UNKNOWN
    };
    kvc_token *ids[5];
    kvc_result r;
    int i;
    ids[0] = &v->bos;
    ids[1] = &v->eos;
    ids[2] = &v->eot;
    ids[3] = &v->eom;
    ids[4] = &v->unk;
    for (i = 0; i < 5; i++) {
        if ((r = kvc__vocab_find_id(v, g, keys[i], ids[i], err)) != KVC_OK) return r;
    }
    return KVC_OK;
}

static kvc_result kvc__vocab_find_ends(kvc__vocab *v, const kvc__gguf *g, kvc_error *err)
{
    kvc_result r = kvc__vocab_find_array(g, KVC__KEY_ENDS, KVC_META_I32, &v->ends, err);
    kvc_meta item;
    uint64_t i;
    double id;
    for (i = 0; r == KVC_OK && i < v->ends.n_items; i++) {
        kvc__meta_item(&v->ends, i, &item);
        kvc__meta_number(&item, &id);
        r = kvc__vocab_check_id(v, KVC__KEY_ENDS, id, err);
    }
    return r;
}

static kvc_result kvc__vocab_find_all(kvc__vocab_file *f, const kvc__gguf *g, kvc_error *err)
{
    kvc_result r = kvc__vocab_find(g, KVC__KEY_MODEL, KVC_META_STRING, &f->model, err);
    if (r == KVC_OK) r = kvc__vocab_find(g, KVC__KEY_PRE, KVC_META_STRING, &f->pre, err);
    if (r == KVC_OK)
        r = kvc__vocab_find_array(g, KVC__KEY_TOKENS, KVC_META_STRING, &f->tokens, err);
    if (r == KVC_OK) r = kvc__vocab_find_array(g, KVC__KEY_SCORES, KVC_META_F32, &f->scores, err);
    if (r == KVC_OK) r = kvc__vocab_find_array(g, KVC__KEY_TYPES, KVC_META_I32, &f->types, err);
    if (r == KVC_OK)
        r = kvc__vocab_find_array(g, KVC__KEY_MERGES, KVC_META_STRING, &f->merges, err);
    if (r == KVC_OK) r = kvc__vocab_find_flag(g, KVC__KEY_ADD_BOS, &f->add_bos, err);
    if (r == KVC_OK) r = kvc__vocab_find_flag(g, KVC__KEY_ADD_EOS, &f->add_eos, err);
    if (r == KVC_OK) r = kvc__vocab_find_flag(g, KVC__KEY_ADD_SPACE, &f->add_space, err);
    return r;
}

/* Sizes that must agree, and values that must be in range. */
static kvc_result kvc__vocab_check(kvc__vocab *v, const kvc__vocab_file *f, kvc_error *err)
{
    uint64_t n = f->tokens.n_items;
    size_t i;
    if (n == 0) return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_TOKENS, "no token is listed");
    if (n > v->n_rows || n > 0x7FFFFFFFu)
        return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_TOKENS,
            "more tokens than the embedding has rows");
    if (f->tokens.data_size > 0xFFFFFFFFu)
        return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_TOKENS, "spellings of more than 4 GiB");
    if (f->types.key != NULL && f->types.n_items != n)
        return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_TYPES, "not one item for each token");
    if (f->scores.key != NULL && f->scores.n_items != n)
        return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_SCORES, "not one item for each token");
    v->n_tokens = (uint32_t)n;
    v->spellings = (const unsigned char *)f->tokens.data;
    v->types = (const unsigned char *)f->types.data;
    v->scores = (const unsigned char *)f->scores.data;
    for (i = 0; v->types != NULL && i < v->n_tokens; i++) {
        if (kvc__rd32(v->types + i * 4) > KVC_TOKEN_BYTE)
            return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_TYPES, "an item is no token type");
    }
    for (i = 0; v->scores != NULL && i < v->n_tokens; i++) {
        float score = kvc__rdf32(v->scores + i * 4);
        if (score != score)
            return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_SCORES, "an item is not a number");
    }
    return KVC_OK;
}

static const kvc__pre *kvc__pre_find(const kvc_meta *pre)
{
    size_t i;
    for (i = 0; i < KVC__PRE_COUNT; i++) {
        const kvc__pre *row = &kvc__pre_table[i];
        if (pre->key != NULL && kvc__meta_is_text(pre, row->name)) return row;
        if (pre->key == NULL && strcmp(row->name, "default") == 0) return row;
    }
    return NULL;
}

static kvc_result kvc__vocab_family_bytes(kvc__vocab *v, const kvc__vocab_file *f, kvc_error *err)
{
    const kvc__pre *pre = kvc__pre_find(&f->pre);
    if (f->merges.key == NULL)
        return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_MERGES, "missing; \"gpt2\" needs it");
    v->family = KVC__FAMILY_BYTES;
    if (pre == NULL) {
        v->problem_key = KVC__KEY_PRE;
        v->problem = f->pre;
        return KVC_OK;
    }
    v->splits = kvc__split_rules[pre->rule];
    v->whole_words = (pre->flags & KVC__PRE_WHOLE_WORDS) != 0;
    v->add_bos = (pre->flags & KVC__PRE_ADD_BOS) != 0;
    return KVC_OK;
}

/* GGUF does not say which special tokens swallow the white space behind them. In the phi3 family
   all do but those for the beginning, the end and the unknown. */
static int kvc__vocab_strips(const kvc__gguf *g)
{
    kvc_meta m;
    return kvc__gguf_find(g, "general.architecture", &m) && kvc__meta_is_text(&m, "phi3");
}

/* Chooses the family and its defaults, then what the file says about them. */
static kvc_result kvc__vocab_family(kvc__vocab *v, const kvc__vocab_file *f, const kvc__gguf *g,
    kvc_error *err)
{
    kvc_result r = KVC_OK;
    if (kvc__meta_is_text(&f->model, "gpt2")) {
        r = kvc__vocab_family_bytes(v, f, err);
    } else if (kvc__meta_is_text(&f->model, "llama")) {
        if (v->scores == NULL)
            return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_SCORES, "missing; \"llama\" needs it");
        v->family = KVC__FAMILY_SPM;
        v->add_bos = 1;
        v->space_prefix = f->add_space != 0;
        v->strips = kvc__vocab_strips(g);
    } else {
        v->problem_key = KVC__KEY_MODEL;
        v->problem = f->model;
    }
    if (f->add_bos >= 0) v->add_bos = f->add_bos;
    if (f->add_eos >= 0) v->add_eos = f->add_eos;
    v->add_bos = v->add_bos && v->bos != KVC_NO_TOKEN;
    v->add_eos = v->add_eos && v->eos != KVC_NO_TOKEN;
    return r;
}

static int kvc__is_special(kvc_token_kind kind)
{
    return kind == KVC_TOKEN_CONTROL || kind == KVC_TOKEN_UNKNOWN || kind == KVC_TOKEN_USER;
}

/* Whether a token's string can come out of merges. Control tokens cannot, whatever the file says:
   text of users then never becomes one. */
static int kvc__is_mergeable(const kvc__vocab *v, kvc_token_kind kind)
{
    if (v->family == KVC__FAMILY_SPM) return kind == KVC_TOKEN_NORMAL || kind == KVC_TOKEN_USER;
    return kind == KVC_TOKEN_NORMAL;
}

/* The tables lie in one block. Without a base the arena only measures. */
static void kvc__vocab_layout(kvc__vocab *v, const kvc__vocab_file *f, kvc__arena *arena)
{
    size_t slots = 0, bits = 1024, joins = 0;
    int fits = kvc__slot_count(&slots, f->n_strings);
    while (bits / 8 < v->n_tokens && bits <= SIZE_MAX / 16) bits *= 2;
    v->slot_mask = slots - 1;
    v->pair_mask = bits - 1;
    v->at = (uint32_t *)kvc__take(arena, v->n_tokens, sizeof *v->at);
    v->special = (uint32_t *)kvc__take(arena, f->n_special, sizeof *v->special);
    v->pair_bits = (uint32_t *)kvc__take(arena, bits / 32, sizeof *v->pair_bits);
    if (v->family == KVC__FAMILY_BYTES) {
        fits = fits && f->merges.n_items < KVC__FREE &&
            kvc__slot_count(&joins, (size_t)f->merges.n_items);
        v->join_mask = joins - 1;
        v->joins = (kvc__join *)kvc__take(arena, (size_t)f->merges.n_items, sizeof *v->joins);
        v->join_slots = (uint32_t *)kvc__take(arena, joins, sizeof *v->join_slots);
    }
    v->slots = (uint32_t *)kvc__take(arena, slots, sizeof *v->slots);
    if (!fits) arena->overflow = 1;
}

/* Upper bounds of what goes to each table. */
static void kvc__vocab_count(const kvc__vocab *v, kvc__vocab_file *f)
{
    uint32_t id;
    f->n_strings = v->n_tokens;
    f->n_special = 5;           /* without types: the ids that metadata can name */
    if (v->types == NULL) return;
    f->n_special = 0;
    for (id = 0; id < v->n_tokens; id++)
        f->n_special += (uint32_t)kvc__is_special(kvc__vocab_kind(v, id));
}

static kvc_result kvc__vocab_reserve(kvc__vocab *v, const kvc__vocab_file *f,
    const kvc_allocator *a, kvc_error *err)
{
    kvc__arena arena;
    memset(&arena, 0, sizeof arena);
    kvc__vocab_layout(v, f, &arena);
    if (!arena.overflow) v->block = kvc__alloc(a, arena.used, 64);
    if (v->block == NULL)
        return kvc__fail(err, KVC_ERROR_MEMORY, KVC__KEY_TOKENS, "no memory for the tables");
    v->memory_size = arena.used;
    arena.base = (unsigned char *)v->block;
    arena.used = 0;
    kvc__vocab_layout(v, f, &arena);
    memset(v->pair_bits, 0, (v->pair_mask + 1) / 8);
    memset(v->slots, 0xFF, (v->slot_mask + 1) * sizeof *v->slots);
    if (v->join_slots != NULL)
        memset(v->join_slots, 0xFF, (v->join_mask + 1) * sizeof *v->join_slots);
    return KVC_OK;
}

/* Whether a byte-level spelling is made of characters that stand for bytes. */
static int kvc__spells_bytes(const unsigned char *p, size_t size)
{
    uint32_t cp;
    size_t i = 0;
    while (i < size) {
        i += kvc__utf8_read(p + i, size - i, &cp);
        if (kvc__char_to_byte(cp) > 255) return 0;
    }
    return 1;
}

/* Enters a token into the table of strings; of equal strings the first keeps its place. */
static void kvc__vocab_enter_string(kvc__vocab *v, uint32_t id, const unsigned char *p, size_t size)
{
    size_t slot;
    if (v->family == KVC__FAMILY_BYTES && !kvc__spells_bytes(p, size)) return;
    slot = kvc__string_slot(v, p, size, NULL, 0);
    if (v->slots[slot] != KVC__FREE) return;
    v->slots[slot] = id;
    if (size > v->size_max) v->size_max = size;
    kvc__pair_add_all(v, p, size);
}

static void kvc__vocab_enter_special(kvc__vocab *v, uint32_t id, const unsigned char *p,
    kvc_token_kind kind)
{
    v->special[v->n_special++] = id;
    v->special_first[kind != KVC_TOKEN_USER][p[0] / 32] |= 1u << (p[0] % 32);
}

/* Empty spellings stand for nothing in a text; their ids can still be decoded. */
static void kvc__vocab_enter_tokens(kvc__vocab *v)
{
    uint32_t id, byte, at = 0;
    for (id = 0; id < v->n_tokens; id++) {
        v->at[id] = at;
        at += 8 + (uint32_t)kvc__rd64(v->spellings + at);
    }
    for (id = 0; id < v->n_tokens; id++) {
        size_t size;
        const unsigned char *p = kvc__vocab_text(v, id, &size);
        kvc_token_kind kind = kvc__vocab_kind(v, id);
        if (size == 0) continue;
        if (kvc__is_mergeable(v, kind)) kvc__vocab_enter_string(v, id, p, size);
        if (kvc__is_special(kind)) kvc__vocab_enter_special(v, id, p, kind);
        if (kind != KVC_TOKEN_BYTE || v->family != KVC__FAMILY_SPM) continue;
        byte = kvc__hex_byte(p, size);
        if (byte < 256 && v->byte_token[byte] == KVC_NO_TOKEN) v->byte_token[byte] = (kvc_token)id;
    }
}

static void kvc__vocab_enter_bytes(kvc__vocab *v)
{
    static const unsigned char mark[3] = { 0xE2, 0x96, 0x81 };
    unsigned char c[2];
    uint32_t byte;
    v->all_bytes = 1;
    v->space_is_token = kvc__string_find(v, mark, 3) != KVC_NO_TOKEN;
    for (byte = 0; byte < 256; byte++) {
        if (v->family == KVC__FAMILY_BYTES)
            v->byte_token[byte] = kvc__string_find(v, c, kvc__byte_spelling(byte, c));
        if (v->byte_token[byte] == KVC_NO_TOKEN) v->all_bytes = 0;
    }
}

/* "left right": the first space that is not at the start parts them. 0 if there is none. */
static size_t kvc__merge_space(const unsigned char *p, size_t size)
{
    size_t i;
    for (i = 1; i + 1 < size; i++) {
        if (p[i] == ' ') return i;
    }
    return 0;
}

/* Lines whose parts or result are no tokens cannot apply to anything and are left out. */
static void kvc__vocab_enter_merge(kvc__vocab *v, const unsigned char *p, size_t left, size_t size)
{
    const unsigned char *q = p + left + 1;
    size_t right = size - left - 1, slot;
    kvc__join *j = &v->joins[v->n_joins];
    kvc_token a = kvc__string_find(v, p, left), b = kvc__string_find(v, q, right);
    if (a == KVC_NO_TOKEN || b == KVC_NO_TOKEN) return;
    j->left = (uint32_t)a;
    j->right = (uint32_t)b;
    j->joined = v->slots[kvc__string_slot(v, p, left, q, right)];
    if (j->joined == KVC__FREE) return;
    slot = kvc__join_slot(v, j->left, j->right);
    if (v->join_slots[slot] != KVC__FREE) return;
    v->join_slots[slot] = v->n_joins++;
}

static kvc_result kvc__vocab_enter_merges(kvc__vocab *v, const kvc_meta *merges, kvc_error *err)
{
    const unsigned char *p = (const unsigned char *)merges->data;
    uint64_t i;
    for (i = 0; i < merges->n_items; i++) {
        size_t size = (size_t)kvc__rd64(p), left = kvc__merge_space(p + 8, size);
        if (left == 0)
            return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_MERGES,
                "an item is not two parts with a space between");
        kvc__vocab_enter_merge(v, p + 8, left, size);
        p += 8 + size;
    }
    return KVC_OK;
}

static void kvc__vocab_close(kvc__vocab *v, const kvc_allocator *a)
{
    kvc__free(a, v->block, v->memory_size);
    memset(v, 0, sizeof *v);
}

static kvc_result kvc__vocab_build(kvc__vocab *v, kvc__vocab_file *f, const kvc_allocator *a,
    kvc_error *err)
{
    kvc_result r;
    kvc__vocab_count(v, f);
    if ((r = kvc__vocab_reserve(v, f, a, err)) != KVC_OK) return r;
    kvc__vocab_enter_tokens(v);
    kvc__special_sort(v);
    kvc__vocab_enter_bytes(v);
    if (v->family == KVC__FAMILY_BYTES) r = kvc__vocab_enter_merges(v, &f->merges, err);
    return r;
}

static kvc_result kvc__vocab_open_tables(kvc__vocab *v, kvc__vocab_file *f, const kvc__gguf *g,
    const kvc_allocator *a, kvc_error *err)
{
    kvc_result r;
    if ((r = kvc__vocab_check(v, f, err)) != KVC_OK) return r;
    if ((r = kvc__vocab_find_ids(v, g, err)) != KVC_OK) return r;
    if ((r = kvc__vocab_find_ends(v, g, err)) != KVC_OK) return r;
    if ((r = kvc__vocab_family(v, f, g, err)) != KVC_OK) return r;
    v->has_tokenizer = 1;
    return kvc__vocab_build(v, f, a, err);
}

/* n_rows: rows of the token embedding. A file without any tokenizer gives has_tokenizer = 0. */
static kvc_result kvc__vocab_open(kvc__vocab *v, const kvc__gguf *g, uint32_t n_rows,
    const kvc_allocator *a, kvc_error *err)
{
    kvc__vocab_file f;
    kvc_result r;
    memset(v, 0, sizeof *v);
    memset(&f, 0, sizeof f);
    memset(v->byte_token, 0xFF, sizeof v->byte_token);
    v->n_rows = n_rows;
    v->bos = v->eos = v->eot = v->eom = v->unk = KVC_NO_TOKEN;
    if ((r = kvc__vocab_find_all(&f, g, err)) != KVC_OK) return r;
    if (f.tokens.key == NULL) {
        if (f.model.key == NULL || kvc__meta_is_text(&f.model, "none") ||
            kvc__meta_is_text(&f.model, "no_vocab")) return KVC_OK;
        return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_TOKENS, "missing");
    }
    if (f.model.key == NULL) return kvc__fail(err, KVC_ERROR_FORMAT, KVC__KEY_MODEL, "missing");
    r = kvc__vocab_open_tables(v, &f, g, a, err);
    if (r != KVC_OK) kvc__vocab_close(v, a);
    return r;
}

/* ---- merging ----
   A piece of text is a chain of symbols; each knows what it would give together with the next one:
   its offer. A heap holds all offers, the best on top, the leftmost among equals. Offers that a
   merge made void stay in it and are passed over when they come up: a merge takes one offer out and
   puts at most two in, so a piece of n symbols never has 2n of them. */

#define KVC__NO_SYM 0xFFFFFFFFu
#define KVC__NO_OFFER 0xFFFFFFFFu

typedef struct kvc__sym {
    uint32_t start;         /* SPM: first byte in the piece's text; the next one's is the end */
    uint32_t prev, next;    /* KVC__NO_SYM at the ends */
    kvc_token id;           /* KVC_NO_TOKEN: no token spells it */
    uint32_t offer;         /* SPM: the token, BYTES: the rank in the list of merges */
} kvc__sym;

typedef struct kvc__piece {
    const kvc__vocab *v;
    uint64_t *heap;         /* [2 n] order of the offer << 32 | symbol; the smallest first */
    kvc__sym *syms;
    unsigned char *text;    /* SPM: the piece as spellings have it */
    size_t n_heap;
    uint32_t n_syms, n_text;
} kvc__piece;

/* The order of floats as unsigned integers, reversed: the highest score comes first. */
static uint32_t kvc__score_order(const kvc__vocab *v, uint32_t id)
{
    uint32_t bits = kvc__f32_bits(kvc__rdf32(v->scores + (size_t)id * 4) + 0.0f);
    return bits >> 31 ? bits : 0x7FFFFFFFu - bits;
}

static void kvc__heap_push(kvc__piece *p, uint64_t x)
{
    size_t i = p->n_heap++, up;
    for (; i > 0; i = up) {
        up = (i - 1) / 4;
        if (p->heap[up] <= x) break;
        p->heap[i] = p->heap[up];
    }
    p->heap[i] = x;
}

/* Four children to a node: half the levels of two, and the four lie in one cache line or two. */
static uint64_t kvc__heap_pop(kvc__piece *p)
{
    uint64_t top = p->heap[0], x = p->heap[--p->n_heap];
    size_t i = 0, child, k, least;
    while ((child = 4 * i + 1) < p->n_heap) {
        least = child;
        for (k = child + 1; k < child + 4 && k < p->n_heap; k++) {
            if (p->heap[k] < p->heap[least]) least = k;
        }
        if (p->heap[least] >= x) break;
        p->heap[i] = p->heap[least];
        i = least;
    }
    p->heap[i] = x;
    return top;
}

static uint32_t kvc__offer_bytes(const kvc__piece *p, const kvc__sym *left, const kvc__sym *right)
{
    const kvc__vocab *v = p->v;
    if (left->id == KVC_NO_TOKEN || right->id == KVC_NO_TOKEN) return KVC__NO_OFFER;
    return v->join_slots[kvc__join_slot(v, (uint32_t)left->id, (uint32_t)right->id)];
}

static uint32_t kvc__offer_spm(const kvc__piece *p, const kvc__sym *left, const kvc__sym *right)
{
    uint32_t end = right->next == KVC__NO_SYM ? p->n_text : p->syms[right->next].start;
    return (uint32_t)kvc__string_find(p->v, p->text + left->start, end - left->start);
}

static uint32_t kvc__offer_order(const kvc__piece *p, uint32_t offer)
{
    return p->v->family == KVC__FAMILY_SPM ? kvc__score_order(p->v, offer) : offer;
}

/* Finds anew what a symbol and the next one give. */
static void kvc__piece_offer(kvc__piece *p, uint32_t sym)
{
    kvc__sym *s = &p->syms[sym], *next;
    s->offer = KVC__NO_OFFER;
    if (s->next == KVC__NO_SYM) return;
    next = &p->syms[s->next];
    s->offer = p->v->family == KVC__FAMILY_SPM ? kvc__offer_spm(p, s, next)
                                               : kvc__offer_bytes(p, s, next);
    if (s->offer != KVC__NO_OFFER)
        kvc__heap_push(p, (uint64_t)kvc__offer_order(p, s->offer) << 32 | sym);
}

static void kvc__piece_join(kvc__piece *p, uint32_t sym)
{
    kvc__sym *s = &p->syms[sym], *gone = &p->syms[s->next];
    s->id = (kvc_token)s->offer;
    if (p->v->family == KVC__FAMILY_BYTES) s->id = (kvc_token)p->v->joins[s->offer].joined;
    gone->offer = KVC__NO_OFFER;
    s->next = gone->next;
    if (s->next != KVC__NO_SYM) p->syms[s->next].prev = sym;
    kvc__piece_offer(p, sym);
    if (s->prev != KVC__NO_SYM) kvc__piece_offer(p, s->prev);
}

static void kvc__piece_merge(kvc__piece *p)
{
    uint32_t i;
    for (i = 0; i + 1 < p->n_syms; i++) kvc__piece_offer(p, i);
    while (p->n_heap > 0) {
        uint64_t top = kvc__heap_pop(p);
        uint32_t sym = (uint32_t)top, offer = p->syms[sym].offer;
        if (offer != KVC__NO_OFFER && kvc__offer_order(p, offer) == top >> 32)
            kvc__piece_join(p, sym);
    }
}

static void kvc__piece_push(kvc__piece *p, kvc_token id)
{
    uint32_t i = p->n_syms++;
    kvc__sym *s = &p->syms[i];
    s->start = p->n_text;
    s->prev = i == 0 ? KVC__NO_SYM : i - 1;
    s->next = KVC__NO_SYM;
    s->id = id;
    s->offer = KVC__NO_OFFER;
    if (i > 0) p->syms[i - 1].next = i;
}

/* ---- from text to pieces ---- */

/* One character of the text and the symbols it becomes. */
typedef struct kvc__char {
    size_t size;            /* bytes in the text */
    uint32_t n_syms;
    uint32_t n_text;        /* SPM: bytes of its spelling */
    uint32_t first, last;   /* how kvc__pair_has knows its two ends */
    int replaced;           /* BYTES: U+FFFD stands for it */
} kvc__char;

static const unsigned char kvc__replacement[3] = { 0xEF, 0xBF, 0xBD };

static int kvc__has_byte_tokens(const kvc__vocab *v, const unsigned char *p, size_t n)
{
    size_t i;
    for (i = 0; i < n; i++) {
        if (v->byte_token[p[i]] == KVC_NO_TOKEN) return 0;
    }
    return 1;
}

/* A byte-level vocabulary without some byte (as a rule, those that no UTF-8 has) cannot spell all
   ill-formed text; then every such part becomes U+FFFD, not some this way and some that. */
static void kvc__char_read_bytes(const kvc__vocab *v, const unsigned char *p, uint32_t cp,
    kvc__char *c)
{
    c->replaced = !v->all_bytes && (cp >= KVC__UTF8_BAD || !kvc__has_byte_tokens(v, p, c->size));
    c->n_syms = c->replaced ? 3 : (uint32_t)c->size;
    c->n_text = 0;
    c->first = c->replaced ? kvc__replacement[0] : p[0];
    c->last = c->replaced ? kvc__replacement[2] : p[c->size - 1];
}

static void kvc__char_read(const kvc__vocab *v, const unsigned char *p, size_t n, kvc__char *c)
{
    uint32_t cp;
    c->size = kvc__utf8_read(p, n, &cp);
    if (v->family == KVC__FAMILY_BYTES) {
        kvc__char_read_bytes(v, p, cp, c);
        return;
    }
    c->replaced = 0;
    c->n_syms = 1;
    c->n_text = cp == ' ' ? 3 : (uint32_t)c->size;
    if (cp == ' ') cp = KVC__SPACE_MARK;
    c->first = c->last = cp > KVC__UTF8_BAD ? KVC__UTF8_BAD : cp;
}

/* A stretch of text that merges on its own. */
typedef struct kvc__stretch {
    const unsigned char *text;
    size_t size;
    size_t n_syms, n_text;  /* what the piece will need */
    int prefix;             /* SPM: a space comes in front */
} kvc__stretch;

static void kvc__stretch_space(kvc__stretch *s, uint32_t *last)
{
    s->n_syms = 1;
    s->n_text = 3;
    *last = KVC__SPACE_MARK;
}

/* The stretch at p, n > 0: up to the first two characters that no token holds together. A space put
   in front can be a stretch of its own, without text. */
static void kvc__stretch_find(const kvc__vocab *v, const unsigned char *p, size_t n, int prefix,
    kvc__stretch *s)
{
    kvc__char c;
    uint32_t last = 0;
    memset(s, 0, sizeof *s);
    s->text = p;
    s->prefix = prefix;
    if (prefix) kvc__stretch_space(s, &last);
    while (s->size < n) {
        kvc__char_read(v, p + s->size, n - s->size, &c);
        if (s->n_syms != 0 && !kvc__pair_has(v, last, c.first)) return;
        s->size += c.size;
        s->n_syms += c.n_syms;
        s->n_text += c.n_text;
        last = c.last;
    }
}

static void kvc__piece_add_bytes(kvc__piece *p, const unsigned char *bytes, size_t n)
{
    size_t i;
    for (i = 0; i < n; i++) kvc__piece_push(p, p->v->byte_token[bytes[i]]);
}

static void kvc__piece_add_spelling(kvc__piece *p, const unsigned char *spelling, uint32_t n)
{
    memcpy(p->text + p->n_text, spelling, n);
    kvc__piece_push(p, kvc__string_find(p->v, spelling, n));
    p->n_text += n;
}

static void kvc__piece_add_space(kvc__piece *p)
{
    static const unsigned char mark[3] = { 0xE2, 0x96, 0x81 };
    kvc__piece_add_spelling(p, mark, 3);
}

static void kvc__piece_fill(kvc__piece *p, const kvc__stretch *s)
{
    kvc__char c;
    size_t i;
    if (s->prefix) kvc__piece_add_space(p);
    for (i = 0; i < s->size; i += c.size) {
        const unsigned char *at = s->text + i;
        kvc__char_read(p->v, at, s->size - i, &c);
        if (p->v->family == KVC__FAMILY_BYTES)
            kvc__piece_add_bytes(p, c.replaced ? kvc__replacement : at, c.n_syms);
        else if (*at == ' ')
            kvc__piece_add_space(p);
        else
            kvc__piece_add_spelling(p, at, c.n_text);
    }
}

/* Bytes of memory for a piece; 0 if they pass the address space. */
static size_t kvc__piece_size(size_t n_syms, size_t n_text)
{
    size_t size;
    if (!kvc__mul_size(&size, n_syms, sizeof(kvc__sym) + 2 * sizeof(uint64_t))) return 0;
    return kvc__add_size(&size, size, n_text) ? size : 0;
}

/* ---- encoding ---- */

#define KVC__LOCAL_WORDS 960    /* 7.5 KiB of stack: nearly 200 characters */

typedef struct kvc__encoder {
    const kvc__vocab *v;
    const kvc_allocator *a;
    const kvc_memory *work;
    kvc_error *err;
    kvc_token *tokens;      /* [cap] */
    size_t cap, n;          /* n goes on past cap: it is the number needed */
    int in_unknown;         /* the last token stands for unknown text: more of it adds nothing */
    uint64_t local[KVC__LOCAL_WORDS];
} kvc__encoder;

static void kvc__encoder_put(kvc__encoder *e, kvc_token id)
{
    if (e->n < e->cap) e->tokens[e->n] = id;
    e->n++;
    e->in_unknown = 0;
}

/* A run of text that nothing spells gives one unknown token, as SentencePiece has it. */
static kvc_result kvc__encoder_unknown(kvc__encoder *e)
{
    if (e->v->unk == KVC_NO_TOKEN)
        return kvc__fail(e->err, KVC_ERROR_UNSUPPORTED, KVC__KEY_UNKNOWN,
            "missing, and the text has a character that no token spells");
    if (!e->in_unknown) kvc__encoder_put(e, e->v->unk);
    e->in_unknown = 1;
    return KVC_OK;
}

/* A character without a token of its own: its bytes, all or none. A space is spelled by the mark,
   whose bytes mean the mark itself; the byte of a space is what comes back as one. */
static kvc_result kvc__encoder_fallback(kvc__encoder *e, const unsigned char *p, size_t n)
{
    static const unsigned char mark[3] = { 0xE2, 0x96, 0x81 }, space[1] = { ' ' };
    size_t i;
    if (n == 3 && memcmp(p, mark, 3) == 0) {
        p = space;
        n = 1;
    }
    if (n == 0 || !kvc__has_byte_tokens(e->v, p, n)) return kvc__encoder_unknown(e);
    for (i = 0; i < n; i++) kvc__encoder_put(e, e->v->byte_token[p[i]]);
    return KVC_OK;
}

static kvc_result kvc__encoder_put_piece(kvc__encoder *e, const kvc__piece *p)
{
    kvc_result r = KVC_OK;
    uint32_t i, end;
    for (i = 0; r == KVC_OK && i != KVC__NO_SYM; i = p->syms[i].next) {
        const kvc__sym *s = &p->syms[i];
        end = s->next == KVC__NO_SYM ? p->n_text : p->syms[s->next].start;
        if (s->id != KVC_NO_TOKEN) kvc__encoder_put(e, s->id);
        else r = kvc__encoder_fallback(e, p->text + s->start, end - s->start);
    }
    return r;
}

static kvc_result kvc__encoder_merge(kvc__encoder *e, const kvc__stretch *s, void *memory)
{
    kvc__piece p;
    memset(&p, 0, sizeof p);
    p.v = e->v;
    p.heap = (uint64_t *)memory;
    p.syms = (kvc__sym *)(void *)(p.heap + 2 * s->n_syms);
    p.text = (unsigned char *)(p.syms + s->n_syms);
    kvc__piece_fill(&p, s);
    kvc__piece_merge(&p);
    return kvc__encoder_put_piece(e, &p);
}

/* The host's work memory from its first aligned byte; 0 bytes if there is none. */
static void *kvc__work_start(const kvc_memory *work, size_t *size)
{
    size_t skip;
    *size = 0;
    if (work == NULL || work->ptr == NULL) return NULL;
    skip = (size_t)(-(uintptr_t)work->ptr & 7);
    if (work->size < skip) return NULL;
    *size = work->size - skip;
    return (unsigned char *)work->ptr + skip;
}

static kvc_result kvc__encoder_stretch(kvc__encoder *e, const kvc__stretch *s)
{
    size_t need = kvc__piece_size(s->n_syms, s->n_text), given;
    void *work = kvc__work_start(e->work, &given), *memory;
    kvc_result r;
    if (need != 0 && need <= sizeof e->local) return kvc__encoder_merge(e, s, e->local);
    if (need != 0 && need <= given) return kvc__encoder_merge(e, s, work);
    memory = need != 0 ? kvc__alloc(e->a, need, 64) : NULL;
    if (memory == NULL)
        return kvc__fail(e->err, KVC_ERROR_MEMORY, "text", "no memory for a long stretch of text");
    r = kvc__encoder_merge(e, s, memory);
    kvc__free(e->a, memory, need);
    return r;
}

static kvc_result kvc__encoder_stretches(kvc__encoder *e, const unsigned char *p, size_t n,
    int prefix)
{
    kvc__stretch s;
    kvc_result r = KVC_OK;
    size_t at;
    for (at = 0; r == KVC_OK && at < n; at += s.size) {
        kvc__stretch_find(e->v, p + at, n - at, prefix, &s);
        prefix = 0;
        r = kvc__encoder_stretch(e, &s);
    }
    return r;
}

static kvc_result kvc__encoder_words(kvc__encoder *e, const unsigned char *p, size_t n)
{
    kvc__words words;
    kvc_result r = KVC_OK;
    kvc_token id;
    size_t size;
    kvc__words_start(&words, e->v->splits, p, n);
    while (r == KVC_OK && (size = kvc__words_next(&words)) != 0) {
        const unsigned char *word = p + words.at - size;
        id = e->v->whole_words ? kvc__word_find(e->v, word, size) : KVC_NO_TOKEN;
        if (id != KVC_NO_TOKEN) kvc__encoder_put(e, id);
        else r = kvc__encoder_stretches(e, word, size, 0);
    }
    return r;
}

/* Text between special tokens. SentencePiece models see every such part as a text of its own. */
static kvc_result kvc__encoder_raw(kvc__encoder *e, const unsigned char *p, size_t n)
{
    e->in_unknown = 0;
    if (n == 0) return KVC_OK;
    if (e->v->family == KVC__FAMILY_BYTES) return kvc__encoder_words(e, p, n);
    return kvc__encoder_stretches(e, p, n, e->v->space_prefix);
}

/* White space that a special token swallows. */
static size_t kvc__encoder_strip(const kvc__encoder *e, uint32_t id, const unsigned char *p,
    size_t n)
{
    kvc_token t = (kvc_token)id;
    size_t i = 0;
    if (!e->v->strips || t == e->v->bos || t == e->v->eos || t == e->v->unk) return 0;
    while (i < n && (p[i] == ' ' || p[i] - 9u < 5u)) i++;
    return i;
}

static kvc_result kvc__encoder_text(kvc__encoder *e, const unsigned char *text, size_t n,
    int control)
{
    kvc_result r = KVC_OK;
    size_t at = 0, found, size;
    uint32_t id = 0;
    while (r == KVC_OK && at < n) {
        found = kvc__special_next(e->v, text, at, n, control, &size, &id);
        r = kvc__encoder_raw(e, text + at, found - at);
        at = found + size;
        if (r != KVC_OK || size == 0) continue;
        kvc__encoder_put(e, (kvc_token)id);
        at += kvc__encoder_strip(e, id, text + at, n - at);
    }
    return r;
}

/* KVC_OK if the vocabulary can tokenize, else an error that names the key and its value. */
static kvc_result kvc__vocab_ready(const kvc__vocab *v, kvc_error *err)
{
    kvc__msg m;
    if (!v->has_tokenizer)
        return kvc__fail(err, KVC_ERROR_UNSUPPORTED, KVC__KEY_MODEL, "the file has no tokenizer");
    if (v->problem_key == NULL) return KVC_OK;
    kvc__fail(err, KVC_ERROR_UNSUPPORTED, v->problem_key, "");
    if (err == NULL) return KVC_ERROR_UNSUPPORTED;
    kvc__msg_start(&m, err->message, sizeof err->message);
    kvc__msg_text(&m, "\"");
    kvc__msg_bytes(&m, (const char *)v->problem.data,
        v->problem.data_size < 64 ? v->problem.data_size : 64);
    kvc__msg_text(&m, "\" is not among the tokenizers that this version knows");
    return KVC_ERROR_UNSUPPORTED;
}

/* The arguments are in range: the public function saw to it. */
static kvc_result kvc__vocab_tokenize(const kvc__vocab *v, const kvc_allocator *a,
    const char *text, size_t text_size, unsigned flags, kvc_token *tokens, size_t cap, size_t *n,
    const kvc_memory *work, kvc_error *err)
{
    kvc__encoder e;
    kvc_result r;
    int add = (flags & KVC_TEXT_SPECIAL_ADD) != 0;
    *n = 0;
    if ((r = kvc__vocab_ready(v, err)) != KVC_OK) return r;
    e.v = v;
    e.a = a;
    e.work = work;
    e.err = err;
    e.tokens = tokens;
    e.cap = cap;
    e.n = 0;
    e.in_unknown = 0;
    if (add && v->add_bos) kvc__encoder_put(&e, v->bos);
    r = kvc__encoder_text(&e, (const unsigned char *)text, text_size,
        (flags & KVC_TEXT_SPECIAL_PARSE) != 0);
    if (r != KVC_OK) return r;
    if (add && v->add_eos) kvc__encoder_put(&e, v->eos);
    *n = e.n;
    if (e.n > cap)
        return kvc__fail(err, KVC_ERROR_SPACE, "tokens_cap",
            "too small; *n_tokens is the number needed");
    return KVC_OK;
}

/* Enough for the longest stretch that a text of this size can be; all the memory there is if that
   passes the address space. */
static size_t kvc__vocab_work_size(const kvc__vocab *v, size_t text_size)
{
    size_t syms = text_size, text = 0, size = 0;
    int fits = 1;
    if (v->family == KVC__FAMILY_SPM) {
        fits = kvc__mul_size(&text, text_size, 3) && kvc__add_size(&syms, text_size, 1) &&
            kvc__add_size(&text, text, 3 + 64);
    } else {
        fits = v->all_bytes || kvc__mul_size(&syms, text_size, 3);
        text = 64;
    }
    if (fits) size = kvc__piece_size(syms, text);
    return size != 0 ? size : SIZE_MAX;
}

/* ---- decoding ---- */

static const char *kvc__vocab_spelling(const kvc__vocab *v, kvc_token token, size_t *size,
    kvc_token_kind *kind)
{
    *size = 0;
    if (!v->has_tokenizer || token < 0 || (uint32_t)token >= v->n_tokens) return NULL;
    if (kind != NULL) *kind = kvc__vocab_kind(v, (uint32_t)token);
    return (const char *)kvc__vocab_text(v, (uint32_t)token, size);
}

static int kvc__vocab_is_end(const kvc__vocab *v, kvc_token token)
{
    const unsigned char *ends = (const unsigned char *)v->ends.data;
    uint64_t i;
    if (token < 0) return 0;
    if (token == v->eos || token == v->eot || token == v->eom) return 1;
    for (i = 0; i < v->ends.n_items; i++) {
        if (kvc__rd32(ends + (size_t)i * 4) == (uint32_t)token) return 1;
    }
    return 0;
}

/* Where decoded bytes go: through the held ones into the caller's buffer, as whole characters. */
typedef struct kvc__sink {
    char *buf;
    size_t cap, n;          /* n goes on past cap */
    unsigned char held[4];
    size_t n_held;
} kvc__sink;

static void kvc__sink_out(kvc__sink *s, size_t size)
{
    size_t i;
    for (i = 0; i < size; i++, s->n++) {
        if (s->n < s->cap) s->buf[s->n] = (char)s->held[i];
    }
    s->n_held -= size;
    memmove(s->held, s->held + size, s->n_held);
}

static void kvc__sink_byte(kvc__sink *s, unsigned char byte)
{
    uint32_t cp;
    size_t size;
    s->held[s->n_held++] = byte;
    while (s->n_held > 0) {
        size = kvc__utf8_read(s->held, s->n_held, &cp);
        if (cp == KVC__UTF8_CUT) return;
        kvc__sink_out(s, size);
    }
}

static void kvc__sink_bytes(kvc__sink *s, const unsigned char *p, size_t n)
{
    size_t i;
    for (i = 0; i < n; i++) kvc__sink_byte(s, p[i]);
}

/* Byte-level: one byte for each character; a character that stands for none is itself. */
static void kvc__sink_bytes_spelled(kvc__sink *s, const unsigned char *p, size_t n)
{
    size_t i, size;
    uint32_t cp, byte;
    for (i = 0; i < n; i += size) {
        size = kvc__utf8_read(p + i, n - i, &cp);
        byte = kvc__char_to_byte(cp);
        if (byte < 256) kvc__sink_byte(s, (unsigned char)byte);
        else kvc__sink_bytes(s, p + i, size);
    }
}

/* SPM: the mark is a space. With `drop` the first one goes. */
static void kvc__sink_spm_spelled(kvc__sink *s, const unsigned char *p, size_t n, int drop)
{
    size_t i, size;
    uint32_t cp;
    for (i = 0; i < n; i += size) {
        size = kvc__utf8_read(p + i, n - i, &cp);
        if (cp != KVC__SPACE_MARK) kvc__sink_bytes(s, p + i, size);
        else if (!(drop && i == 0)) kvc__sink_byte(s, ' ');
    }
}

static void kvc__sink_token(kvc__sink *s, const kvc__vocab *v, uint32_t id, int drop)
{
    size_t size;
    const unsigned char *p = kvc__vocab_text(v, id, &size);
    kvc_token_kind kind = kvc__vocab_kind(v, id);
    uint32_t byte = kind == KVC_TOKEN_BYTE ? kvc__hex_byte(p, size) : 256;
    if (byte < 256) {
        if (!(drop && byte == ' ' && !v->space_is_token)) kvc__sink_byte(s, (unsigned char)byte);
    } else if (kvc__is_special(kind)) {
        kvc__sink_bytes(s, p, size);
    } else if (v->family == KVC__FAMILY_BYTES) {
        kvc__sink_bytes_spelled(s, p, size);
    } else {
        kvc__sink_spm_spelled(s, p, size, drop);
    }
}

static kvc_result kvc__push_check(const kvc__vocab *v, const kvc_text_stream *stream,
    kvc_token token, const char *buf, size_t cap, const size_t *n, kvc_error *err)
{
    if (n == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "n", "NULL");
    if (stream == NULL || stream->n_held > 3)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "stream", "NULL or not zeroed at its start");
    if (buf == NULL && cap != 0) return kvc__fail(err, KVC_ERROR_ARGUMENT, "buf", "NULL");
    if (v->family == KVC__FAMILY_NONE) return kvc__vocab_ready(v, err);
    if (token < 0 || (uint32_t)token >= v->n_rows)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "token", "not an id of this model");
    return KVC_OK;
}

/* A token that adds nothing to the text: padding, an empty spelling, a hidden control token. */
static int kvc__push_is_silent(const kvc__vocab *v, const kvc_text_stream *stream, kvc_token token)
{
    size_t size;
    kvc_token_kind kind;
    if (kvc__vocab_spelling(v, token, &size, &kind) == NULL || size == 0) return 1;
    return !stream->show_control && (kind == KVC_TOKEN_CONTROL || kind == KVC_TOKEN_UNKNOWN);
}

static kvc_result kvc__vocab_push(const kvc__vocab *v, kvc_text_stream *stream, kvc_token token,
    char *buf, size_t cap, size_t *n, kvc_error *err)
{
    kvc__sink s;
    kvc_result r = kvc__push_check(v, stream, token, buf, cap, n, err);
    if (n != NULL) *n = 0;
    if (r != KVC_OK) return r;
    if (kvc__push_is_silent(v, stream, token)) return KVC_OK;
    s.buf = buf;
    s.cap = cap;
    s.n = 0;
    s.n_held = stream->n_held;
    memcpy(s.held, stream->held, sizeof s.held);
    kvc__sink_token(&s, v, (uint32_t)token,
        v->space_prefix && !stream->started && !stream->keep_space);
    *n = s.n;
    if (s.n > cap)
        return kvc__fail(err, KVC_ERROR_SPACE, "buf_cap", "too small; *n is the size needed");
    memcpy(stream->held, s.held, sizeof s.held);
    stream->n_held = (uint8_t)s.n_held;
    stream->started = 1;
    return KVC_OK;
}
/* ------------------------------------------------------------------------------------------------
   >>arch  Architectures as rows of data
   The forward pass is one; what architectures differ in is described by a row of kvc__archs: a set
   of traits, an activation, and what keys mean that the file leaves out. Sizes, scales and soft
   caps come from the file's keys, and whatever tensors an architecture may have or not, such as
   biases, from the tensors that are there. A new architecture made of known parts is a new row.
   ---------------------------------------------------------------------------------------------- */
enum {
    /* norms: of the mean square (Zhang and Sennrich, "Root mean square layer normalization", 2019)
       before attention and before the feed-forward part, unless: */
    KVC__LAYER_NORM = 1u << 0,      /* of the deviation from the mean, with or without a bias (Ba,
                                       Kiros and Hinton, "Layer normalization", 2016) */
    KVC__NO_PRE_NORM = 1u << 1,     /* none before */
    KVC__POST_NORM = 1u << 2,       /* another of what each part gives, before it is added */
    KVC__EMBD_NORM = 1u << 3,       /* another of the embedding */
    /* queries and keys, head by head before they are turned: */
    KVC__QK_NORM = 1u << 4,         /* are normed */
    KVC__QK_NORM_MAY = 1u << 5,     /* are if the file has the weights, for each head its own */
    KVC__QK_NORM_WHOLE = 1u << 6,   /* are, all heads together */
    /* positions: pairs of neighbouring dimensions are turned (Su et al., "RoFormer", 2021),
       unless: */
    KVC__ROPE_HALVES = 1u << 7,     /* pairs are dimensions half of the turned ones apart */
    KVC__ROPE_WINDOW = 1u << 8,     /* only layers that see a window turn */
    KVC__ROPE_LOCAL = 1u << 9,      /* those have a base of their own, and no scaling */
    KVC__LEARNED = 1u << 10,        /* a vector for each position is added to the embedding */
    KVC__ALIBI = 1u << 11,          /* scores fall with the distance (Press et al., "Train short,
                                       test long", 2022) */
    KVC__YARN_SCORES = 1u << 12,    /* YaRN's factor is on the scores, not on cosine and sine */
    /* the feed-forward part: down(act(gate x) * up x), after attention, unless: */
    KVC__NO_GATE = 1u << 13,        /* down(act(up x)) */
    KVC__GATE_UP = 1u << 14,        /* gate and up may be one matrix, gate first */
    KVC__PARALLEL = 1u << 15,       /* it reads what attention reads, through the same norm if it
                                       has no own (Wang and Komatsuzaki, "GPT-J-6B", 2021) */
    KVC__PARALLEL_KEY = 1u << 16,   /* does unless the key use_parallel_residual says no */
    KVC__PARALLEL_BARE = 1u << 17,  /* does in a layer that has no ffn_norm */
    KVC__EXPERTS = 1u << 18,        /* expert_count may be more than 0 */
    KVC__SHARED_GATE = 1u << 19,    /* the shared expert's output is gated by a sigmoid */
    KVC__FF_OF_ALL = 1u << 20,      /* feed_forward_length is what a token's experts have together,
                                       if expert_feed_forward_length is absent; else of one */
    /* the rest */
    KVC__LATENT = 1u << 21,         /* keys and values are made from a latent, which is kept instead
                                       (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1) */
    KVC__SINKS = 1u << 22,          /* one more logit in each head's softmax, that has no value */
    KVC__LOGITS_OVER = 1u << 23     /* logits are divided by logit_scale, not multiplied */
};

/* What a key means in files that do not have it: by * n_embd^embd * n_layers^layers; if `when` is
   not NULL only in files where that key has the value `is`. */
typedef struct kvc__default {
    const char *key;                /* without the architecture */
    double by, embd, layers;
    const char *when;
    double is;
} kvc__default;

/* The tensors that an architecture has under another's name. */
typedef struct kvc__rename {
    const char *name, *as;
} kvc__rename;

typedef struct kvc__arch {
    const char *name;               /* general.architecture */
    uint32_t traits;
    kvc__act act;
    const kvc__default *defaults;   /* ends with a NULL key; NULL: none */
    const kvc__rename *renames;     /* ends with a NULL name; NULL: none */
} kvc__arch;

/* How the experts of a token are found (key expert_gating_func): the probabilities of all are their
   logits' softmax or sigmoids, or those of the chosen are their logits' softmax. */
enum {
    KVC__ROUTE_SOFTMAX = 1, KVC__ROUTE_SIGMOID = 2, KVC__ROUTE_CHOSEN = 3
};

#define KVC__DEFAULTS_END {NULL, 0, 0, 0, NULL, 0}

static const kvc__default kvc__defaults_llama[] = {
    {"expert_weights_norm", 1, 0, 0, NULL, 0},
    KVC__DEFAULTS_END
};

/* The file has the constants of the configuration but for these (config.json of MiniCPM3-4B:
   scale_emb, scale_depth, dim_model_base). */
static const kvc__default kvc__defaults_minicpm3[] = {
    {"embedding_scale", 12, 0, 0, NULL, 0},
    {"residual_scale", 1.4, 0, -0.5, NULL, 0},
    {"logit_scale", 256, -1, 0, NULL, 0},
    KVC__DEFAULTS_END
};

static const kvc__default kvc__defaults_gemma[] = {
    {"embedding_scale", 1, 0.5, 0, NULL, 0},
    KVC__DEFAULTS_END
};

/* Scores are scaled by query_pre_attn_scalar^-1/2 (config.json), which is the heads' size but in
   the largest model: 144. */
static const kvc__default kvc__defaults_gemma2[] = {
    {"embedding_scale", 1, 0.5, 0, NULL, 0},
    {"attention.scale", 0.083333333333333333, 0, 0, "embedding_length", 4608},
    {"attn_logit_softcapping", 50, 0, 0, NULL, 0},
    {"final_logit_softcapping", 30, 0, 0, NULL, 0},
    {"attention.sliding_window", 4096, 0, 0, NULL, 0},
    {"attention.sliding_window_pattern", 2, 0, 0, NULL, 0},
    KVC__DEFAULTS_END
};

/* The largest model's: 168. */
static const kvc__default kvc__defaults_gemma3[] = {
    {"embedding_scale", 1, 0.5, 0, NULL, 0},
    {"attention.scale", 0.077151674981045956, 0, 0, "embedding_length", 5376},
    {"attention.sliding_window", 1024, 0, 0, NULL, 0},
    {"attention.sliding_window_pattern", 6, 0, 0, NULL, 0},
    {"rope.freq_base", 1000000, 0, 0, NULL, 0},
    {"rope.freq_base_swa", 10000, 0, 0, NULL, 0},
    KVC__DEFAULTS_END
};

/* Converters once left out the window of the models for 4,096 positions. */
static const kvc__default kvc__defaults_phi3[] = {
    {"attention.sliding_window", 2047, 0, 0, "context_length", 4096},
    KVC__DEFAULTS_END
};

static const kvc__default kvc__defaults_alibi[] = {
    {"attention.max_alibi_bias", 8, 0, 0, NULL, 0},
    KVC__DEFAULTS_END
};

static const kvc__default kvc__defaults_qwen3moe[] = {
    {"expert_weights_norm", 1, 0, 0, NULL, 0},
    KVC__DEFAULTS_END
};

static const kvc__default kvc__defaults_command_r[] = {
    {"logit_scale", 0.0625, 0, 0, NULL, 0},
    KVC__DEFAULTS_END
};

static const kvc__default kvc__defaults_cohere2[] = {
    {"logit_scale", 0.0625, 0, 0, NULL, 0},
    {"attention.sliding_window", 4096, 0, 0, NULL, 0},
    {"attention.sliding_window_pattern", 4, 0, 0, NULL, 0},
    KVC__DEFAULTS_END
};

static const kvc__default kvc__defaults_smollm3[] = {
    {"no_rope_layer_interval", 4, 0, 0, NULL, 0},
    KVC__DEFAULTS_END
};

static const kvc__default kvc__defaults_gpt_oss[] = {
    {"expert_gating_func", KVC__ROUTE_CHOSEN, 0, 0, NULL, 0},
    {"attention.sliding_window", 128, 0, 0, NULL, 0},
    {"attention.sliding_window_pattern", 2, 0, 0, NULL, 0},
    KVC__DEFAULTS_END
};

#define KVC__RENAMES_END {NULL, NULL}

/* Falcon 40B has a norm for each part, and the feed-forward part's is the one that 7B has for
   both. */
static const kvc__rename kvc__renames_falcon[] = {
    {"ffn_norm", "attn_norm"},
    {"attn_norm", "attn_norm_2"},
    KVC__RENAMES_END
};

static const kvc__rename kvc__renames_gpt_oss[] = {
    {"ffn_norm", "post_attention_norm"},
    KVC__RENAMES_END
};

/* Sorted by name. What each covers, and where its ways are written down:
   - bloom: BLOOM, BLOOMZ (Le Scao et al., "BLOOM", 2022; Press et al. 2022).
   - cohere2: Command R7B, Command A (Cohere, model cards, 2024): as command-r; of four layers three
     see a window, and only those turn.
   - command-r: Command R, R+ and Aya 23 (Cohere, model cards, 2024): parallel; norms without bias;
     R+ norms queries and keys.
   - deepseek2: DeepSeek V2, V2-Lite, V2.5, V3, R1, Moonlight, Kimi K2 (DeepSeek-AI, "DeepSeek-V2",
     2024, and "DeepSeek-V3", 2024): V2 routes by softmax, V3 by sigmoids with a bias that steers
     the choice alone; groups of experts; in a YaRN model the scores have the factor squared.
   - falcon: Falcon 7B, 40B and 180B (Almazrouei et al., "The Falcon series", 2023).
   - gemma: Gemma 1, CodeGemma (Gemma team, "Gemma", 2024); files hold norms with their 1 added.
   - gemma2: Gemma 2 (Gemma team, "Gemma 2", 2024): caps; even layers see a window.
   - gemma3: Gemma 3, its text part (Gemma team, "Gemma 3 technical report", 2025): five of six
     layers see a window.
   - glm4: GLM-4-0414, GLM-Z1-0414 (GLM team, "ChatGLM", 2024; reference code of transformers).
   - gpt-oss: gpt-oss 20B and 120B (OpenAI, model card, 2025): sinks; gate and up are clamped;
     every expert has biases.
   - gpt2: GPT-2, DistilGPT2, Cerebras-GPT (Radford et al., "Language models are unsupervised
     multitask learners", 2019).
   - gptneox: GPT-NeoX-20B, Pythia, RedPajama-INCITE, Dolly 2 (Black et al., "GPT-NeoX-20B", 2022).
   - granite: Granite 3 dense (IBM, model cards, 2024): attention, embedding, residual and logit
     scales.
   - llama: Llama 1 to 3.3, TinyLlama, SmolLM 1 and 2, Yi, Mistral 7B, Mixtral and the many that use
     their form (Touvron et al., "LLaMA", 2023; Jiang et al., "Mistral 7B", 2023: a window if the
     key is there; "Mixtral of experts", 2024). Files hold the rows of q and k in an order for which
     neighbouring dimensions turn together.
   - minicpm3: MiniCPM3-4B (Hu et al., "MiniCPM", 2024): latent attention and scales.
   - mpt: MPT 7B and 30B (MosaicML, "Introducing MPT-7B", 2023; clip_qkv of its configuration).
   - olmo2: OLMo 2 (OLMo team, "2 OLMo 2 furious", 2025): norms after the parts only.
   - olmoe: OLMoE 1B-7B (Muennighoff et al., "OLMoE", 2024): probabilities are not normalised.
   - phi2: Phi 1, 1.5 and 2 (Li et al., "Textbooks are all you need II", 2023).
   - phi3: Phi 3, 3.5 and 4 (Abdin et al., "Phi-3 technical report", 2024; Ding et al., "LongRoPE",
     2024).
   - qwen2: Qwen 2 and 2.5 (Yang et al., "Qwen2 technical report", 2024).
   - qwen2moe: Qwen 1.5 MoE A2.7B, Qwen 2 57B-A14B (the same).
   - qwen3: Qwen 3 (Yang et al., "Qwen3 technical report", 2025).
   - qwen3moe: Qwen 3 30B-A3B and 235B-A22B (the same).
   - smollm3: SmolLM3 3B (Hugging Face, model card, 2025): every fourth layer does not turn.
   - stablelm: StableLM 3B-4E1T, Zephyr 3B, StableLM 2 1.6B and 12B (Bellagente et al., "Stable LM 2
     1.6B", 2024); 12B is parallel and norms queries and keys.
   - starcoder2: StarCoder 2 (Lozhkov et al., "StarCoder 2 and The Stack v2", 2024). */
static const kvc__arch kvc__archs[] = {
    {"bloom", KVC__LAYER_NORM | KVC__EMBD_NORM | KVC__ALIBI | KVC__NO_GATE, KVC__ACT_GELU,
        kvc__defaults_alibi, NULL},
    {"cohere2", KVC__LAYER_NORM | KVC__ROPE_WINDOW | KVC__PARALLEL, KVC__ACT_SILU,
        kvc__defaults_cohere2, NULL},
    {"command-r", KVC__LAYER_NORM | KVC__QK_NORM_MAY | KVC__PARALLEL, KVC__ACT_SILU,
        kvc__defaults_command_r, NULL},
    {"deepseek2", KVC__LATENT | KVC__YARN_SCORES | KVC__EXPERTS, KVC__ACT_SILU, NULL, NULL},
    {"falcon", KVC__LAYER_NORM | KVC__ROPE_HALVES | KVC__NO_GATE | KVC__PARALLEL,
        KVC__ACT_GELU_ERF, NULL, kvc__renames_falcon},
    {"gemma", KVC__ROPE_HALVES, KVC__ACT_GELU, kvc__defaults_gemma, NULL},
    {"gemma2", KVC__ROPE_HALVES | KVC__POST_NORM, KVC__ACT_GELU, kvc__defaults_gemma2, NULL},
    {"gemma3", KVC__ROPE_HALVES | KVC__ROPE_LOCAL | KVC__QK_NORM | KVC__POST_NORM, KVC__ACT_GELU,
        kvc__defaults_gemma3, NULL},
    {"glm4", KVC__POST_NORM | KVC__GATE_UP, KVC__ACT_SILU, NULL, NULL},
    {"gpt-oss", KVC__ROPE_HALVES | KVC__EXPERTS | KVC__SINKS, KVC__ACT_CLAMPED,
        kvc__defaults_gpt_oss, kvc__renames_gpt_oss},
    {"gpt2", KVC__LAYER_NORM | KVC__LEARNED | KVC__NO_GATE, KVC__ACT_GELU, NULL, NULL},
    {"gptneox", KVC__LAYER_NORM | KVC__ROPE_HALVES | KVC__NO_GATE | KVC__PARALLEL_KEY,
        KVC__ACT_GELU_ERF, NULL, NULL},
    {"granite", KVC__LOGITS_OVER, KVC__ACT_SILU, NULL, NULL},
    {"llama", KVC__EXPERTS, KVC__ACT_SILU, kvc__defaults_llama, NULL},
    {"minicpm3", KVC__LATENT | KVC__ROPE_HALVES, KVC__ACT_SILU, kvc__defaults_minicpm3, NULL},
    {"mpt", KVC__LAYER_NORM | KVC__ALIBI | KVC__NO_GATE, KVC__ACT_GELU_ERF, kvc__defaults_alibi,
        NULL},
    {"olmo2", KVC__NO_PRE_NORM | KVC__POST_NORM | KVC__QK_NORM_WHOLE | KVC__ROPE_HALVES,
        KVC__ACT_SILU, NULL, NULL},
    {"olmoe", KVC__QK_NORM_WHOLE | KVC__ROPE_HALVES | KVC__EXPERTS, KVC__ACT_SILU, NULL, NULL},
    {"phi2", KVC__LAYER_NORM | KVC__ROPE_HALVES | KVC__NO_GATE | KVC__PARALLEL, KVC__ACT_GELU, NULL,
        NULL},
    {"phi3", KVC__ROPE_HALVES | KVC__GATE_UP, KVC__ACT_SILU, kvc__defaults_phi3, NULL},
    {"qwen2", KVC__ROPE_HALVES, KVC__ACT_SILU, NULL, NULL},
    {"qwen2moe", KVC__ROPE_HALVES | KVC__EXPERTS | KVC__SHARED_GATE | KVC__FF_OF_ALL,
        KVC__ACT_SILU, NULL, NULL},
    {"qwen3", KVC__ROPE_HALVES | KVC__QK_NORM, KVC__ACT_SILU, NULL, NULL},
    {"qwen3moe", KVC__ROPE_HALVES | KVC__QK_NORM | KVC__EXPERTS | KVC__FF_OF_ALL, KVC__ACT_SILU,
        kvc__defaults_qwen3moe, NULL},
    {"smollm3", 0, KVC__ACT_SILU, kvc__defaults_smollm3, NULL},
    {"stablelm", KVC__LAYER_NORM | KVC__ROPE_HALVES | KVC__QK_NORM_MAY | KVC__PARALLEL_BARE,
        KVC__ACT_SILU, NULL, NULL},
    {"starcoder2", KVC__LAYER_NORM | KVC__ROPE_HALVES | KVC__NO_GATE, KVC__ACT_GELU, NULL, NULL},
    {NULL, 0, KVC__ACT_SILU, NULL, NULL}
};

/* ------------------------------------------------------------------------------------------------
   >>model  Hyper-parameters, layers, weights
   Loading finds the row of the architecture, fills the hyper-parameters from metadata, binds the
   tensors of each layer, checks every shape, and refuses what it does not understand by name.
   Matrices stay where they are; vectors are decoded to floats in the model's own block. The model
   does not change after that.
   ---------------------------------------------------------------------------------------------- */

/* A matrix, or a stack of parts of the same shape: one for each expert, or for each head. */
typedef struct kvc__matrix {
    const unsigned char *data;      /* [n_parts, n_out, n_in], rows of row_size bytes; NULL: there
                                       is none */
    const unsigned char *packed;    /* [n_parts] the same in groups of 16 rows, or NULL */
    size_t row_size, part_size;     /* bytes in data from row to row, from part to part */
    uint32_t n_in, n_out, n_parts;
    uint32_t type;
    const float *bias;              /* [n_parts, n_out] or NULL */
} kvc__matrix;

typedef struct kvc__norm {
    const float *w, *b;             /* w NULL: absent; b NULL: no bias */
} kvc__norm;

/* Layers whose rows see equally far back. */
typedef struct kvc__reach {
    uint32_t window;                /* positions, a row's own included; 0: all */
    uint32_t n_layers;
} kvc__reach;

#define KVC__MAX_ROPES 2u           /* of layers that see all, and of those that see a window */
#define KVC__NO_ROPE UINT32_MAX

typedef struct kvc__layer {
    uint32_t reach;                 /* index into the model's reaches */
    uint32_t rope;                  /* and ropes; KVC__NO_ROPE: nothing is turned */
    int is_parallel;                /* the feed-forward part reads what attention reads */
    kvc__norm attn_norm, attn_post, q_norm, k_norm, ffn_norm, ffn_post;     /* see traits */
    kvc__norm q_low_norm, v_norm;   /* latent attention */
    const float *sinks;             /* [n_heads] or NULL */
    /* With latent attention k gives the turned part of the key, which all heads share, v the
       latent, which after v_norm is the rest of the key, and the value; queries come from x, or
       from q_low of it. */
    kvc__matrix q_low, q, k, v, o;
    kvc__matrix k_up, v_up;         /* [n_heads] from the rest of a query to the latent's space, and
                                       from there to a head's output */
    kvc__matrix gate, up, down;     /* of the dense part, or of the shared expert */
    kvc__matrix router, shared_gate, gates, ups, downs;     /* [n_experts] the last three */
    const float *router_bias;       /* [n_experts] it is added for the choice alone; or NULL */
} kvc__layer;

static const size_t kvc__layer_matrices[] = {
    offsetof(kvc__layer, q_low), offsetof(kvc__layer, q), offsetof(kvc__layer, k),
    offsetof(kvc__layer, v), offsetof(kvc__layer, k_up), offsetof(kvc__layer, v_up),
    offsetof(kvc__layer, o), offsetof(kvc__layer, gate), offsetof(kvc__layer, up),
    offsetof(kvc__layer, down), offsetof(kvc__layer, router), offsetof(kvc__layer, shared_gate),
    offsetof(kvc__layer, gates), offsetof(kvc__layer, ups), offsetof(kvc__layer, downs)
};
#define KVC__N_LAYER_MATRICES (sizeof kvc__layer_matrices / sizeof *kvc__layer_matrices)

#define KVC__HUGE 1e300
#define KVC__MAX_EXPERTS 1024u
#define KVC__MAX_GROUPS 64u         /* of experts */
#define KVC__MAX_USED 64u           /* experts of a token */

struct kvc_model {
    kvc_allocator allocator;
    kvc__file file;                 /* the mapping, if the model was opened by path */
    kvc__gguf gguf;
    kvc__vocab vocab;
    const kvc__arch *arch;
    uint32_t n_layers, n_embd, n_heads, n_ff, n_vocab, n_ctx_train, window;
    /* As attention sees them: n_heads queries of head_dim, n_kv_heads keys, values of head_dim_v.
       Latent attention has one key for all heads, of which the last head_dim_v elements are the
       value; then its q gives head_q elements a head, and its o takes head_o. */
    uint32_t n_kv_heads, head_dim, head_dim_v, head_q, head_o;
    uint32_t q_rank;                /* of q_low, 0: none */
    uint32_t rope_dim, n_ropes;
    uint32_t n_dense;               /* layers before the first with experts, if there are experts */
    uint32_t n_experts, n_used, n_expert_groups, n_used_groups, n_ff_expert, n_ff_shared;
    uint32_t route;                 /* KVC__ROUTE_... */
    int route_norm;                 /* a token's probabilities are made to add up to 1 */
    float route_scale;              /* and multiplied by this */
    kvc__reach reaches[KVC_MAX_REACHES];
    uint32_t n_reaches;
    float norm_eps;
    float score_scale;              /* of q k */
    float score_cap, logit_cap;     /* soft caps, 0: none */
    float qkv_clamp;                /* 0: none */
    float embd_scale, residual_scale, logit_scale;
    float rope_scale[KVC__MAX_ROPES];   /* factor on cos and sin */
    uint32_t n_rope_sets;           /* 2: LongRoPE, the second set for n_ctx above n_ctx_short */
    uint32_t n_ctx_short;
    double *rope_freq;              /* [n_rope_sets, n_ropes, rope_dim / 2] radians per position */
    float *slopes;                  /* [n_heads] of ALiBi, or NULL */
    kvc__layer *layers;
    kvc__matrix embd, output;       /* output is embd again where the file ties them */
    kvc__matrix pos_embd;           /* absent, or [positions, n_embd] */
    kvc__norm embd_norm, output_norm;
    uint64_t n_params, weights_size;
    void *block;                    /* layers, vectors, rope_freq, slopes, transposed matrices */
    size_t block_size;
    void *packed;                   /* all packed weights */
    size_t packed_size;
    uint64_t fingerprint[2];        /* of shape, rotation and samples of the weights; see also
                                       kvc__model_identity */
    int has_quantized, has_floats;  /* among the matrices */
    size_t in_place_group;          /* bytes of the largest group of rows read in place, or 0 */
};

static uint32_t kvc__model_n_vocab(const kvc_model *m) { return m->n_vocab; }
static uint32_t kvc__model_n_tokens(const kvc_model *m) { return m->vocab.n_tokens; }
static const kvc_allocator *kvc__model_allocator(const kvc_model *m) { return &m->allocator; }

static int kvc__has(const kvc_model *m, uint32_t trait)
{
    return (m->arch->traits & trait) != 0;
}

/* Elements of a value that are stored beside the key. */
static uint32_t kvc__stored_v(const kvc_model *m)
{
    return kvc__has(m, KVC__LATENT) ? 0 : m->head_dim_v;
}

/* ---- hyper-parameters ---- */

/* Reads keys "<arch>.<suffix>". The first failure stays in `result`; later reads do nothing. */
typedef struct kvc__keys {
    const kvc_model *model;
    kvc_error *err;
    kvc_result result;
    char key[96];
} kvc__keys;

static kvc__keys kvc__keys_start(const kvc_model *m, kvc_error *err)
{
    kvc__keys k;
    memset(&k, 0, sizeof k);
    k.model = m;
    k.err = err;
    return k;
}

static void kvc__keys_bad(kvc__keys *k, kvc_result code, const char *message)
{
    if (k->result == KVC_OK) k->result = kvc__fail(k->err, code, k->key, message);
}

/* A list with a value for each layer is as good as the value if all are equal. */
static int kvc__keys_all_equal(kvc__keys *k, kvc_meta *m)
{
    kvc_meta first, item;
    double a, b;
    uint64_t i;
    if (m->type != KVC_META_ARRAY) return 1;
    if (m->n_items == k->model->n_layers && kvc__meta_item(m, 0, &first) == KVC_OK &&
        kvc__meta_number(&first, &a)) {
        for (i = 1; i < m->n_items; i++)
            if (kvc__meta_item(m, i, &item) != KVC_OK || !kvc__meta_number(&item, &b) ||
                b < a || b > a) break;
        if (i == m->n_items) {
            *m = first;
            return 1;
        }
    }
    kvc__keys_bad(k, KVC_ERROR_UNSUPPORTED, "not one value for all layers");
    return 0;
}

/* The entry as it is. */
static int kvc__keys_find(kvc__keys *k, const char *suffix, kvc_meta *m)
{
    kvc__msg text;
    if (k->result != KVC_OK) return 0;
    kvc__msg_start(&text, k->key, sizeof k->key);
    kvc__msg_text(&text, k->model->arch->name);
    kvc__msg_text(&text, ".");
    kvc__msg_text(&text, suffix);
    return kvc__gguf_find(&k->model->gguf, k->key, m);
}

/* What an absent key means. */
static double kvc__keys_default(kvc__keys *k, const char *suffix, double fallback)
{
    const kvc_model *m = k->model;
    const kvc__default *d;
    kvc_meta meta;
    double v;
    if (k->result != KVC_OK || m->arch->defaults == NULL) return fallback;
    for (d = m->arch->defaults; d->key != NULL; d++) {
        if (strcmp(d->key, suffix) != 0) continue;
        if (d->when != NULL && (!kvc__keys_find(k, d->when, &meta) ||
            !kvc__meta_number(&meta, &v) || v < d->is || v > d->is)) continue;
        v = d->by * kvc__pow((double)m->n_embd, d->embd);
        return v * kvc__pow((double)m->n_layers, d->layers);
    }
    return fallback;
}

/* A whole number from min to max; absent: the architecture's, else `fallback`, or an error if that
   is UINT32_MAX. */
static uint32_t kvc__keys_u32(kvc__keys *k, const char *suffix, uint32_t fallback, uint32_t min,
    uint32_t max)
{
    const double missing = kvc__keys_default(k, suffix, (double)fallback);
    kvc_meta m;
    double v;
    if (!kvc__keys_find(k, suffix, &m)) {
        if (missing >= UINT32_MAX) kvc__keys_bad(k, KVC_ERROR_FORMAT, "the key is missing");
        return (uint32_t)missing;
    }
    if (!kvc__keys_all_equal(k, &m)) return min;
    if (!kvc__meta_is_integer(&m)) {
        kvc__keys_bad(k, KVC_ERROR_FORMAT, "not a whole number");
        return min;
    }
    kvc__meta_number(&m, &v);
    if (v < (double)min || v > (double)max) {
        kvc__keys_bad(k, KVC_ERROR_FORMAT, "the number is out of its range");
        return min;
    }
    return (uint32_t)v;
}

/* A finite number, > 0 or (if zero_allowed) >= 0; absent: the architecture's, else `fallback`, an
   error if that is < 0. */
static double kvc__keys_real(kvc__keys *k, const char *suffix, double fallback, int zero_allowed)
{
    const double missing = kvc__keys_default(k, suffix, fallback);
    kvc_meta m;
    double v;
    if (!kvc__keys_find(k, suffix, &m)) {
        if (missing < 0) kvc__keys_bad(k, KVC_ERROR_FORMAT, "the key is missing");
        return missing;
    }
    if (!kvc__keys_all_equal(k, &m)) return 1.0;
    if (!kvc__meta_number(&m, &v) || m.type == KVC_META_BOOL) {
        kvc__keys_bad(k, KVC_ERROR_FORMAT, "not a number");
        return 1.0;
    }
    if (!(v >= 0) || v > 1e30 || (v <= 0 && !zero_allowed)) {
        kvc__keys_bad(k, KVC_ERROR_FORMAT, "not a finite positive number");
        return 1.0;
    }
    return v;
}

/* A truth value. */
static int kvc__keys_flag(kvc__keys *k, const char *suffix, int fallback)
{
    const double missing = kvc__keys_default(k, suffix, fallback);
    kvc_meta m;
    double v;
    if (!kvc__keys_find(k, suffix, &m)) return missing > 0;
    if (!kvc__keys_all_equal(k, &m)) return 0;
    if (m.type != KVC_META_BOOL || !kvc__meta_number(&m, &v)) {
        kvc__keys_bad(k, KVC_ERROR_FORMAT, "not a truth value");
        return 0;
    }
    return v > 0;
}

/* Two numbers of keys that do not fit together; the second key is in `text`. */
static void kvc__keys_clash(kvc__keys *k, const char *suffix, uint64_t x, const char *text,
    uint64_t y)
{
    kvc_meta m;
    kvc__keys_find(k, suffix, &m);
    if (k->result == KVC_OK)
        k->result = kvc__fail_numbers(k->err, KVC_ERROR_FORMAT, k->key, "it is", x, text, y);
}

/* The architecture's row, or an error that lists the known ones. */
static kvc_result kvc__arch_find(const kvc__gguf *g, const kvc__arch **out, kvc_error *err)
{
    kvc_meta m;
    kvc__msg text;
    const kvc__arch *a;
    if (!kvc__gguf_find(g, "general.architecture", &m))
        return kvc__fail(err, KVC_ERROR_FORMAT, "general.architecture", "the key is missing");
    if (m.type != KVC_META_STRING)
        return kvc__fail(err, KVC_ERROR_FORMAT, "general.architecture", "not a string");
    for (a = kvc__archs; a->name != NULL; a++) {
        if (kvc__meta_is_text(&m, a->name)) {
            *out = a;
            return KVC_OK;
        }
    }
    kvc__fail(err, KVC_ERROR_UNSUPPORTED, "general.architecture", "");
    if (err == NULL) return KVC_ERROR_UNSUPPORTED;
    kvc__msg_start(&text, err->message, sizeof err->message);
    kvc__msg_text(&text, "unknown architecture '");
    kvc__msg_bytes(&text, (const char *)m.data, m.data_size < 64 ? m.data_size : 64);
    kvc__msg_text(&text, "'; known are");
    for (a = kvc__archs; a->name != NULL; a++) {
        kvc__msg_text(&text, " ");
        kvc__msg_text(&text, a->name);
    }
    return KVC_ERROR_UNSUPPORTED;
}

/* The sizes of heads. */
static void kvc__shape_heads(kvc_model *m, kvc__keys *k)
{
    m->n_heads = kvc__keys_u32(k, "attention.head_count", UINT32_MAX, 1, 1u << 14);
    m->n_kv_heads = kvc__keys_u32(k, "attention.head_count_kv", m->n_heads, 1, 1u << 14);
    if (k->result == KVC_OK && m->n_heads % m->n_kv_heads != 0)
        kvc__keys_clash(k, "attention.head_count_kv", m->n_kv_heads,
            "of which attention.head_count is no multiple:", m->n_heads);
    m->head_dim = kvc__keys_u32(k, "attention.key_length", 0, 1, 4096);
    if (k->result == KVC_OK && m->head_dim == 0) {
        if (m->n_embd % m->n_heads != 0 || m->n_embd / m->n_heads > 4096)
            k->result = kvc__fail_numbers(k->err, KVC_ERROR_FORMAT, k->key,
                "absent, and embedding_length", m->n_embd, "gives no head size with head_count",
                m->n_heads);
        m->head_dim = m->n_embd / m->n_heads;
    }
    m->head_dim_v = kvc__keys_u32(k, "attention.value_length", m->head_dim, 1, 4096);
    m->rope_dim = kvc__keys_u32(k, "rope.dimension_count", m->head_dim, 0, 1u << 20);
    if (kvc__has(m, KVC__LEARNED | KVC__ALIBI)) m->rope_dim = 0;
    if (k->result == KVC_OK && (m->rope_dim > m->head_dim || m->rope_dim % 2 != 0))
        kvc__keys_clash(k, "rope.dimension_count", m->rope_dim,
            "odd, or more than a head's dimensions:", m->head_dim);
    m->head_q = m->head_dim;
    m->head_o = m->head_dim_v;
}

/* Latent attention (DeepSeek-V2, section 2.1): a head's query is a part that meets the latent and a
   turned part. The former's product with the key's up-projection is the query that meets the latent
   itself, and the value's up-projection is left for after the sum, so all heads share one key of
   turned part and latent. Files with attn_kv_b give the sizes of the heads' own keys and values;
   those with its two halves give these in keys of their own. */
static void kvc__shape_latent(kvc_model *m, kvc__keys *k)
{
    kvc_meta meta;
    uint32_t rank;
    m->n_heads = kvc__keys_u32(k, "attention.head_count", UINT32_MAX, 1, 1u << 14);
    m->n_kv_heads = 1;
    m->q_rank = kvc__keys_u32(k, "attention.q_lora_rank", 0, 0, 1u << 16);
    rank = kvc__keys_u32(k, "attention.kv_lora_rank", UINT32_MAX, 1, 3072);
    m->rope_dim = kvc__keys_u32(k, "rope.dimension_count", UINT32_MAX, 2, 1024);
    if (kvc__keys_find(k, "attention.key_length_mla", &meta)) {
        m->head_q = kvc__keys_u32(k, "attention.key_length_mla", 0, 1, 4096);
        m->head_o = kvc__keys_u32(k, "attention.value_length_mla", UINT32_MAX, 1, 4096);
    } else {
        m->head_q = kvc__keys_u32(k, "attention.key_length", UINT32_MAX, 1, 4096);
        m->head_o = kvc__keys_u32(k, "attention.value_length", m->n_embd / m->n_heads, 1, 4096);
    }
    if (k->result == KVC_OK && (m->rope_dim >= m->head_q || m->rope_dim % 2 != 0))
        kvc__keys_clash(k, "rope.dimension_count", m->rope_dim,
            "odd, or not less than a head's dimensions:", m->head_q);
    m->head_dim = m->rope_dim + rank;
    m->head_dim_v = rank;
}

static void kvc__shape_experts(kvc_model *m, kvc__keys *k)
{
    uint32_t shared;
    m->n_experts = kvc__keys_u32(k, "expert_count", 0, 0, KVC__MAX_EXPERTS);
    if (m->n_experts == 0) return;
    if (!kvc__has(m, KVC__EXPERTS)) {
        kvc__keys_bad(k, KVC_ERROR_UNSUPPORTED, "experts in this architecture");
        return;
    }
    m->n_used = kvc__keys_u32(k, "expert_used_count", UINT32_MAX, 1, KVC__MAX_USED);
    if (m->n_used > m->n_experts)
        kvc__keys_clash(k, "expert_used_count", m->n_used, "but expert_count is", m->n_experts);
    m->n_dense = kvc__keys_u32(k, "leading_dense_block_count", 0, 0, m->n_layers);
    m->n_ff_expert = kvc__keys_u32(k, "expert_feed_forward_length",
        kvc__has(m, KVC__FF_OF_ALL) && m->n_used != 0 ? m->n_ff / m->n_used : m->n_ff, 1, 1u << 24);
    m->n_ff_expert += m->n_ff_expert == 0;
    shared = kvc__keys_u32(k, "expert_shared_count", 0, 0, (1u << 24) / m->n_ff_expert);
    m->n_ff_shared = kvc__keys_u32(k, "expert_shared_feed_forward_length",
        kvc__has(m, KVC__SHARED_GATE) ? m->n_ff : shared * m->n_ff_expert, 0, 1u << 24);
    m->route = kvc__keys_u32(k, "expert_gating_func", KVC__ROUTE_SOFTMAX, 0, KVC__ROUTE_CHOSEN);
    if (m->route == 0) m->route = KVC__ROUTE_SOFTMAX;
    m->route_norm = kvc__keys_flag(k, "expert_weights_norm", 0);
    m->route_scale = (float)kvc__keys_real(k, "expert_weights_scale", 1.0, 1);
    if (!(m->route_scale > 0)) m->route_scale = 1.0f;
    m->n_expert_groups = kvc__keys_u32(k, "expert_group_count", 1, 0, KVC__MAX_GROUPS);
    m->n_expert_groups += m->n_expert_groups == 0;
    if (k->result == KVC_OK && m->n_experts % m->n_expert_groups != 0)
        kvc__keys_clash(k, "expert_group_count", m->n_expert_groups,
            "of which expert_count is no multiple:", m->n_experts);
    m->n_used_groups = kvc__keys_u32(k, "expert_group_used_count", m->n_expert_groups, 0,
        m->n_expert_groups);
    m->n_used_groups += m->n_used_groups == 0;
    if (k->result == KVC_OK &&
        m->n_used > m->n_experts / m->n_expert_groups * m->n_used_groups)
        kvc__keys_clash(k, "expert_group_used_count", m->n_used_groups,
            "groups, which have fewer experts than expert_used_count:", m->n_used);
}

/* Epsilons go by two names, of which one is an architecture's; some converters took the other. */
static float kvc__shape_eps(const kvc_model *m, kvc__keys *k)
{
    const char *const names[2] = {"attention.layer_norm_rms_epsilon",
        "attention.layer_norm_epsilon"};
    const int layer_norm = kvc__has(m, KVC__LAYER_NORM);
    kvc_meta meta;
    if (!kvc__keys_find(k, names[layer_norm], &meta) &&
        kvc__keys_find(k, names[!layer_norm], &meta))
        return (float)kvc__keys_real(k, names[!layer_norm], -1.0, 1);
    return (float)kvc__keys_real(k, names[layer_norm], -1.0, 1);
}

static void kvc__shape_scales(kvc_model *m, kvc__keys *k)
{
    float over;
    m->norm_eps = kvc__shape_eps(m, k);
    m->score_scale = (float)kvc__keys_real(k, "attention.scale", 0.0, 1);
    if (!(m->score_scale > 0)) m->score_scale = 1.0f / sqrtf((float)m->head_q);
    m->score_cap = (float)kvc__keys_real(k, "attn_logit_softcapping", 0.0, 1);
    m->logit_cap = (float)kvc__keys_real(k, "final_logit_softcapping", 0.0, 1);
    m->qkv_clamp = (float)kvc__keys_real(k, "attention.clamp_kqv", 0.0, 1);
    m->embd_scale = (float)kvc__keys_real(k, "embedding_scale", 1.0, 0);
    m->residual_scale = (float)kvc__keys_real(k, "residual_scale", 1.0, 0);
    over = (float)kvc__keys_real(k, "logit_scale", 1.0, 0);
    m->logit_scale = kvc__has(m, KVC__LOGITS_OVER) ? 1.0f / over : over;
}

static kvc_result kvc__model_shape(kvc_model *m, kvc_error *err)
{
    kvc__keys k = kvc__keys_start(m, err);
    m->n_ctx_train = kvc__keys_u32(&k, "context_length", UINT32_MAX, 1, 1u << 30);
    m->n_embd = kvc__keys_u32(&k, "embedding_length", UINT32_MAX, 1, 1u << 20);
    m->n_layers = kvc__keys_u32(&k, "block_count", UINT32_MAX, 1, 4096);
    m->n_ff = kvc__keys_u32(&k, "feed_forward_length", UINT32_MAX, 1, 1u << 24);
    if (kvc__has(m, KVC__LATENT)) kvc__shape_latent(m, &k);
    else kvc__shape_heads(m, &k);
    m->window = kvc__keys_u32(&k, "attention.sliding_window", 0, 0, UINT32_MAX - 1);
    if (!kvc__keys_flag(&k, "attention.causal", 1))
        kvc__keys_bad(&k, KVC_ERROR_UNSUPPORTED, "attention to later positions");
    kvc__shape_scales(m, &k);
    kvc__shape_experts(m, &k);
    return k.result;
}

/* The place of a window among the reaches. */
static uint32_t kvc__reach_find(kvc_model *m, uint32_t window)
{
    uint32_t i;
    for (i = 0; i < m->n_reaches; i++)
        if (m->reaches[i].window == window) return i;
    m->reaches[m->n_reaches].window = window;
    return m->n_reaches++;
}

/* Which rope a layer has. Every how-manieth layer that the key says has none. */
static uint32_t kvc__layer_rope(const kvc_model *m, uint32_t layer, uint32_t window,
    uint32_t no_rope)
{
    if (m->rope_dim == 0 || (no_rope != 0 && layer % no_rope + 1 == no_rope)) return KVC__NO_ROPE;
    if (kvc__has(m, KVC__ROPE_WINDOW) && m->window != 0 && window == 0) return KVC__NO_ROPE;
    return m->n_ropes > 1 && window != 0 ? 1 : 0;
}

/* Which layers see a window only: all, or those for which the pattern holds true; as a number it
   says that every how-manieth layer sees everything. */
static kvc_result kvc__model_reaches(kvc_model *m, kvc_error *err)
{
    kvc__keys k = kvc__keys_start(m, err);
    kvc_meta pattern, item;
    uint32_t i, every = 0, window, no_rope;
    double inside = 1.0;
    int listed = kvc__keys_find(&k, "attention.sliding_window_pattern", &pattern) &&
        pattern.type == KVC_META_ARRAY;
    if (listed && (pattern.item_type != KVC_META_BOOL || pattern.n_items != m->n_layers))
        return kvc__fail(err, KVC_ERROR_FORMAT, k.key, "not a truth value for each layer");
    if (!listed) every = kvc__keys_u32(&k, "attention.sliding_window_pattern", 0, 0, 4096);
    no_rope = kvc__keys_u32(&k, "no_rope_layer_interval", 0, 0, 4096);
    if (k.result != KVC_OK) return k.result;
    for (i = 0; i < m->n_layers; i++) {
        if (listed) {
            kvc__meta_item(&pattern, i, &item);
            kvc__meta_number(&item, &inside);
        } else if (every != 0) {
            inside = i % every + 1 < every;
        }
        window = inside > 0 ? m->window : 0;
        m->layers[i].reach = kvc__reach_find(m, window);
        m->layers[i].rope = kvc__layer_rope(m, i, window, no_rope);
        m->reaches[m->layers[i].reach].n_layers++;
    }
    return KVC_OK;
}

/* ---- rope: radians per position of each pair, with the file's scaling ---- */

/* What divides frequencies pair by pair: rope_freqs.weight (Llama 3.1), or in LongRoPE one set for
   texts of the original length and one for longer ones. */
typedef struct kvc__rope_factors {
    const float *set[2];            /* [rope_dim / 2] each, or NULL */
    const char *name[2];
} kvc__rope_factors;

typedef struct kvc__rope_scaling {
    double base, factor;
    int yarn;
    double low, high;               /* YaRN: pairs below low keep their frequency; above high it is
                                       divided by factor */
} kvc__rope_scaling;

/* The dimension whose wavelength fits `turns` times into the original context (Peng et al., "YaRN",
   2023, section 3.2). */
static double kvc__yarn_dim(double rope_dim, double base, double n_ctx, double turns)
{
    return rope_dim * kvc__log(n_ctx / (turns * 6.283185307179586)) / (2.0 * kvc__log(base));
}

static void kvc__yarn_read(kvc_model *m, kvc__keys *k, kvc__rope_scaling *s, double n_orig)
{
    const double d = (double)m->rope_dim, log_factor = kvc__log(s->factor);
    const double fast = kvc__keys_real(k, "rope.scaling.yarn_beta_fast", 32.0, 0);
    const double slow = kvc__keys_real(k, "rope.scaling.yarn_beta_slow", 1.0, 0);
    double scale;
    if (s->base <= 1.0) {
        kvc__keys_bad(k, KVC_ERROR_FORMAT, "yarn needs a rope.freq_base above 1");
        return;
    }
    s->low = floor(kvc__yarn_dim(d, s->base, n_orig, fast));
    s->high = ceil(kvc__yarn_dim(d, s->base, n_orig, slow));
    if (!(s->low > 0)) s->low = 0;
    if (!(s->high < d - 1)) s->high = d - 1;
    if (!kvc__has(m, KVC__YARN_SCORES)) {
        m->rope_scale[0] *= (float)(1.0 + 0.1 * log_factor);
        return;
    }
    scale = 1.0 + log_factor * kvc__keys_real(k, "rope.scaling.yarn_log_multiplier", 0.0, 1);
    m->score_scale *= (float)(scale * scale);
}

/* LongRoPE's factor on cosine and sine, where the file does not have it (Ding et al. 2024, as in
   the configuration code of Phi 3). */
static double kvc__long_rope_scale(const kvc_model *m, double n_orig)
{
    const double longer = (double)m->n_ctx_train / n_orig;
    if (m->n_rope_sets < 2 || !(longer > 1.0) || !(n_orig > 1.0)) return 1.0;
    return sqrt(1.0 + kvc__log(longer) / kvc__log(n_orig));
}

static void kvc__rope_read(kvc_model *m, kvc__keys *k, kvc__rope_scaling *s)
{
    kvc_meta type;
    double n_orig;
    memset(s, 0, sizeof *s);
    s->base = kvc__keys_real(k, "rope.freq_base", 10000.0, 0);
    s->factor = kvc__keys_real(k, "rope.scale_linear", 1.0, 0);     /* the older spelling */
    s->factor = kvc__keys_real(k, "rope.scaling.factor", s->factor, 0);
    m->n_ctx_short = kvc__keys_u32(k, "rope.scaling.original_context_length", m->n_ctx_train, 1,
        1u << 30);
    n_orig = (double)m->n_ctx_short;
    m->rope_scale[0] = (float)kvc__keys_real(k, "rope.scaling.attn_factor",
        kvc__long_rope_scale(m, n_orig), 0);
    m->rope_scale[1] = 1.0f;
    if (!kvc__keys_find(k, "rope.scaling.type", &type)) return;
    s->yarn = kvc__meta_is_text(&type, "yarn");
    if (kvc__meta_is_text(&type, "none") || kvc__meta_is_text(&type, "longrope")) s->factor = 1.0;
    else if (!s->yarn && !kvc__meta_is_text(&type, "linear"))
        kvc__keys_bad(k, type.type == KVC_META_STRING ? KVC_ERROR_UNSUPPORTED : KVC_ERROR_FORMAT,
            "not one of the known scalings none, linear, yarn, longrope");
    if (s->yarn) kvc__yarn_read(m, k, s, n_orig);
}

/* base^(-2i/d) (RoFormer), divided by the pair's factor; linear scaling divides by `factor` (Chen
   et al., "Position interpolation", 2023), YaRN only the slow ones, with a ramp between. */
static kvc_result kvc__rope_fill(const kvc_model *m, const kvc__rope_scaling *s,
    const float *factors, const char *name, double *freq, kvc_error *err)
{
    const double d = (double)m->rope_dim, width = s->high - s->low > 0.001
        ? s->high - s->low : 0.001;
    uint32_t i;
    for (i = 0; i < m->rope_dim / 2; i++) {
        double f = kvc__pow(s->base, -2.0 * (double)i / d), ramp;
        if (factors != NULL) {
            if (!(factors[i] > 0.0f) || factors[i] > 1e30f)
                return kvc__fail(err, KVC_ERROR_FORMAT, name,
                    "a factor is not a finite positive number");
            f /= (double)factors[i];
        }
        ramp = ((double)i - s->low) / width;
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        freq[i] = s->yarn ? f / s->factor * ramp + f * (1.0 - ramp) : f / s->factor;
    }
    return KVC_OK;
}

static kvc_result kvc__model_ropes(kvc_model *m, const kvc__rope_factors *factors, kvc_error *err)
{
    kvc__keys k = kvc__keys_start(m, err);
    kvc__rope_scaling s[KVC__MAX_ROPES];
    double *freq = m->rope_freq;
    kvc_result r = KVC_OK;
    uint32_t set, i;
    if (m->rope_dim == 0) return KVC_OK;
    kvc__rope_read(m, &k, &s[0]);
    memset(&s[1], 0, sizeof s[1]);
    s[1].base = kvc__keys_real(&k, "rope.freq_base_swa", s[0].base, 0);
    s[1].factor = 1.0;
    if (k.result != KVC_OK) return k.result;
    for (set = 0; set < m->n_rope_sets; set++) {
        for (i = 0; r == KVC_OK && i < m->n_ropes; i++, freq += m->rope_dim / 2)
            r = kvc__rope_fill(m, &s[i], i == 0 ? factors->set[set] : NULL, factors->name[set],
                freq, err);
    }
    return r;
}

/* The slopes of ALiBi: those of the heads up to the largest power of two are a geometric series
   that ends with 2^-bias; the rest fill in between (Press et al. 2022, and its code). */
static kvc_result kvc__model_slopes(kvc_model *m, kvc_error *err)
{
    kvc__keys k = kvc__keys_start(m, err);
    const double bias = kvc__keys_real(&k, "attention.max_alibi_bias", 8.0, 1);
    uint32_t whole = 1, i;
    if (!(bias > 0)) m->slopes = NULL;
    if (m->slopes == NULL || k.result != KVC_OK) return k.result;
    while (2 * whole <= m->n_heads) whole *= 2;
    for (i = 0; i < m->n_heads; i++) {
        const double steps = i < whole ? i + 1.0 : (2.0 * (i - whole) + 1.0) / 2.0;
        m->slopes[i] = (float)kvc__pow(2.0, -bias * steps / (double)whole);
    }
    return KVC_OK;
}

/* Dimensions that a layer turns. */
static uint32_t kvc__layer_turns(const kvc_model *m, uint32_t layer)
{
    return m->layers[layer].rope == KVC__NO_ROPE ? 0 : m->rope_dim;
}

/* Elements between the two of a pair. */
static uint32_t kvc__rope_apart(const kvc_model *m)
{
    return kvc__has(m, KVC__ROPE_HALVES) ? m->rope_dim / 2 : 1;
}

/* Which set of frequencies a sequence of a cache for n_ctx positions has. */
static uint32_t kvc__rope_set(const kvc_model *m, uint32_t n_ctx)
{
    return m->n_rope_sets > 1 && n_ctx > m->n_ctx_short ? 1 : 0;
}

static const double *kvc__rope_freq(const kvc_model *m, uint32_t set, uint32_t rope)
{
    return m->rope_freq + (size_t)(set * m->n_ropes + rope) * (m->rope_dim / 2);
}

/* The turn of a position, as the kernel rope reads it, [2, rope_dim]. */
static void kvc__rope_turn(const kvc_model *m, const double *freq, double pos, float scale,
    float *turn)
{
    float *own = turn, *other = turn + m->rope_dim;
    uint32_t apart = kvc__rope_apart(m), i, a;
    for (i = 0; i < m->rope_dim / 2; i++) {
        double s, c;
        kvc__sincos(pos * freq[i], &s, &c);
        a = apart == 1 ? 2 * i : i;
        own[a] = own[a + apart] = (float)c * scale;
        other[a + apart] = (float)s * scale;
        other[a] = -other[a + apart];
    }
}

/* ---- weights ---- */

/* The lengths that tensors' sides have. */
typedef enum kvc__side {
    KVC__SIDE_1, KVC__SIDE_EMBD, KVC__SIDE_HEADS, KVC__SIDE_HEAD, KVC__SIDE_KV_HEADS, KVC__SIDE_Q,
    KVC__SIDE_K, KVC__SIDE_V, KVC__SIDE_QKV, KVC__SIDE_O, KVC__SIDE_FF, KVC__SIDE_GATE_UP,
    KVC__SIDE_Q_RANK, KVC__SIDE_RANK, KVC__SIDE_KV_LOW, KVC__SIDE_KV_B, KVC__SIDE_NOPE,
    KVC__SIDE_HEAD_O, KVC__SIDE_EXPERTS, KVC__SIDE_FF_EXPERT, KVC__SIDE_FF_SHARED, KVC__SIDE_PAIRS,
    KVC__SIDE_CTX, KVC__SIDE_VOCAB, KVC__SIDE_ANY
} kvc__side;

static uint64_t kvc__side_length(const kvc_model *m, kvc__side side)
{
    const uint64_t heads = m->n_heads, kv_heads = m->n_kv_heads;
    switch (side) {
    case KVC__SIDE_EMBD: return m->n_embd;
    case KVC__SIDE_HEADS: return heads;
    case KVC__SIDE_HEAD: return m->head_dim;
    case KVC__SIDE_KV_HEADS: return kv_heads;
    case KVC__SIDE_Q: return heads * m->head_q;
    case KVC__SIDE_K: return kv_heads * m->head_dim;
    case KVC__SIDE_V: return kv_heads * m->head_dim_v;
    case KVC__SIDE_QKV: return heads * m->head_q + kv_heads * (m->head_dim + m->head_dim_v);
    case KVC__SIDE_O: return heads * m->head_o;
    case KVC__SIDE_FF: return m->n_ff;
    case KVC__SIDE_GATE_UP: return (uint64_t)2 * m->n_ff;
    case KVC__SIDE_Q_RANK: return m->q_rank;
    case KVC__SIDE_RANK: return m->head_dim_v;
    case KVC__SIDE_KV_LOW: return m->head_dim;
    case KVC__SIDE_KV_B: return heads * (m->head_q - m->rope_dim + m->head_o);
    case KVC__SIDE_NOPE: return m->head_q - m->rope_dim;
    case KVC__SIDE_HEAD_O: return m->head_o;
    case KVC__SIDE_EXPERTS: return m->n_experts;
    case KVC__SIDE_FF_EXPERT: return m->n_ff_expert;
    case KVC__SIDE_FF_SHARED: return m->n_ff_shared;
    case KVC__SIDE_PAIRS: return m->rope_dim / 2;
    case KVC__SIDE_CTX: return m->n_ctx_train;
    case KVC__SIDE_VOCAB: return m->n_vocab;
    default: return 1;
    }
}

/* The keys that a side's length comes from. */
static const char *kvc__side_keys(kvc__side side)
{
    static const char *const keys[] = {
        "one", "embedding_length", "attention.head_count", "attention.key_length",
        "attention.head_count_kv", "attention.head_count and key_length",
        "attention.head_count_kv and key_length", "attention.head_count_kv and value_length",
        "attention.head_count, head_count_kv and the lengths of key and value",
        "attention.head_count and value_length", "feed_forward_length",
        "feed_forward_length, twice,", "attention.q_lora_rank", "attention.kv_lora_rank",
        "attention.kv_lora_rank and rope.dimension_count",
        "attention.head_count and the lengths of key and value",
        "attention.key_length without rope.dimension_count", "attention.value_length",
        "expert_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
        "rope.dimension_count, halved,", "context_length", "the vocabulary's size", "any"
    };
    return keys[side];
}

/* Binds tensors, in two passes: the first measures the arena. The first failure stays in `result`;
   later calls do nothing. */
typedef struct kvc__binder {
    kvc_model *m;
    kvc__arena *arena;
    uint32_t layer;                 /* UINT32_MAX: tensors of the whole model */
    kvc_error *err;
    kvc_result result;
    char name[96];
} kvc__binder;

static kvc__binder kvc__binder_start(kvc_model *m, kvc__arena *arena, kvc_error *err)
{
    kvc__binder b;
    memset(&b, 0, sizeof b);
    b.m = m;
    b.arena = arena;
    b.layer = UINT32_MAX;
    b.err = err;
    return b;
}

/* "blk.<layer>.<name><end>", with what the architecture calls it */
static const kvc__tensor *kvc__bind_find(kvc__binder *b, const char *name, const char *end)
{
    const kvc__rename *r = b->m->arch->renames;
    kvc__msg m;
    if (b->result != KVC_OK) return NULL;
    kvc__msg_start(&m, b->name, sizeof b->name);
    if (b->layer != UINT32_MAX) {
        kvc__msg_text(&m, "blk.");
        kvc__msg_u64(&m, b->layer);
        kvc__msg_text(&m, ".");
        for (; r != NULL && r->name != NULL; r++) {
            if (strcmp(r->name, name) != 0) continue;
            name = r->as;
            break;
        }
    }
    kvc__msg_text(&m, name);
    kvc__msg_text(&m, end);
    return kvc__gguf_find_tensor(&b->m->gguf, b->name);
}

static void kvc__bind_missing(kvc__binder *b)
{
    if (b->result == KVC_OK)
        b->result = kvc__fail(b->err, KVC_ERROR_FORMAT, b->name, "the tensor is missing");
}

/* "<what> <n> <unit>, but <keys> say <want>" */
static void kvc__bind_clash(kvc__binder *b, const char *what, uint64_t n, const char *unit,
    kvc__side side)
{
    char text[160];
    kvc__msg m;
    kvc__msg_start(&m, text, sizeof text);
    kvc__msg_text(&m, unit);
    kvc__msg_text(&m, ", but by ");
    kvc__msg_text(&m, kvc__side_keys(side));
    kvc__msg_text(&m, " they are");
    b->result = kvc__fail_numbers(b->err, KVC_ERROR_FORMAT, b->name, what, n, text,
        kvc__side_length(b->m, side));
}

/* The tensor must be [parts, rows, columns] of a type that this version computes with. */
static void kvc__bind_check(kvc__binder *b, const kvc__tensor *t, kvc__side n_in, kvc__side n_out,
    kvc__side n_parts)
{
    const kvc__type_info *info = kvc__type(t->type);
    kvc__msg text;
    if (t->dims[0] != kvc__side_length(b->m, n_in))
        kvc__bind_clash(b, "its rows have", t->dims[0], "elements", n_in);
    else if (n_out != KVC__SIDE_ANY && t->dims[1] != kvc__side_length(b->m, n_out))
        kvc__bind_clash(b, "it has", t->dims[1], "rows", n_out);
    else if (t->dims[2] != kvc__side_length(b->m, n_parts) || t->dims[3] != 1)
        kvc__bind_clash(b, "it has", t->dims[2] * t->dims[3], "parts", n_parts);
    else if (t->dims[1] > 0x7fffffffu / t->dims[2])
        b->result = kvc__fail(b->err, KVC_ERROR_FORMAT, b->name, "more than 2^31 rows");
    if (b->result != KVC_OK || info->supported) return;
    b->result = kvc__fail(b->err, KVC_ERROR_UNSUPPORTED, b->name, "");
    if (b->err == NULL) return;
    kvc__msg_start(&text, b->err->message, sizeof b->err->message);
    kvc__msg_text(&text, "tensor type ");
    kvc__msg_text(&text, info->name);
    kvc__msg_text(&text, " is not supported; F32, F16, BF16, Q8_0 and Q4_0 are");
}

/* Decodes a tensor of [rows, columns] into the arena, if it is there. NULL also while the arena
   only measures. */
static const float *kvc__bind_floats(kvc__binder *b, const char *name, const char *end,
    kvc__side n_in, kvc__side n_out)
{
    const kvc__tensor *t = kvc__bind_find(b, name, end);
    const size_t row = (size_t)kvc__side_length(b->m, n_in);
    uint64_t i;
    float *v;
    if (t == NULL) return NULL;
    kvc__bind_check(b, t, n_in, n_out, KVC__SIDE_1);
    if (b->result != KVC_OK) return NULL;
    v = (float *)kvc__take(b->arena, (size_t)t->dims[1], row * sizeof(float));
    for (i = 0; v != NULL && i < t->dims[1]; i++)
        kvc__decode_row(v + i * row, t->data + i * (t->size / t->dims[1]), t->type, row);
    return v;
}

/* Returns whether the file has it. */
static int kvc__bind_norm(kvc__binder *b, const char *name, kvc__side n_in, kvc__side n_out,
    int optional, kvc__norm *out)
{
    memset(out, 0, sizeof *out);
    if (kvc__bind_find(b, name, ".weight") == NULL) {
        if (!optional) kvc__bind_missing(b);
        return 0;
    }
    out->w = kvc__bind_floats(b, name, ".weight", n_in, n_out);
    if (kvc__has(b->m, KVC__LAYER_NORM))
        out->b = kvc__bind_floats(b, name, ".bias", n_in, n_out);
    return b->result == KVC_OK;
}

/* Returns whether the file has it. */
static int kvc__bind_stack(kvc__binder *b, const char *name, kvc__side n_in, kvc__side n_out,
    kvc__side n_parts, int optional, kvc__matrix *out)
{
    const kvc__tensor *t = kvc__bind_find(b, name, ".weight");
    memset(out, 0, sizeof *out);
    if (t == NULL) {
        if (!optional) kvc__bind_missing(b);
        return 0;
    }
    kvc__bind_check(b, t, n_in, n_out, n_parts);
    if (b->result != KVC_OK) return 0;
    out->data = t->data;
    out->n_in = (uint32_t)t->dims[0];
    out->n_out = (uint32_t)t->dims[1];
    out->n_parts = (uint32_t)t->dims[2];
    out->type = t->type;
    out->part_size = t->size / out->n_parts;
    out->row_size = out->part_size / out->n_out;
    if (n_out != KVC__SIDE_ANY) out->bias = kvc__bind_floats(b, name, ".bias", n_out, n_parts);
    return b->result == KVC_OK;
}

static int kvc__bind_matrix(kvc__binder *b, const char *name, kvc__side n_in, kvc__side n_out,
    int optional, kvc__matrix *out)
{
    return kvc__bind_stack(b, name, n_in, n_out, KVC__SIDE_1, optional, out);
}

/* Rows [from, from + n) of a matrix. */
static kvc__matrix kvc__matrix_rows(const kvc__matrix *m, uint32_t from, uint32_t n)
{
    kvc__matrix rows = *m;
    if (m->data == NULL) return rows;
    rows.data += from * m->row_size;
    rows.n_out = n;
    if (m->bias != NULL) rows.bias += from;
    return rows;
}

/* One part of a stack. */
static kvc__matrix kvc__matrix_part(const kvc__matrix *m, uint32_t part)
{
    kvc__matrix one = *m;
    one.data += part * m->part_size;
    if (m->packed != NULL)
        one.packed += (size_t)part * kvc__div_up(m->n_out, 16) * kvc__group_size(m->type, m->n_in);
    if (m->bias != NULL) one.bias += (size_t)part * m->n_out;
    one.n_parts = 1;
    return one;
}

/* Queries, keys and values, each of its own or rows of one matrix. */
static void kvc__bind_qkv(kvc__binder *b, kvc__layer *l)
{
    const kvc_model *m = b->m;
    const uint32_t n_q = m->n_heads * m->head_dim, n_k = m->n_kv_heads * m->head_dim;
    kvc__matrix all;
    if (kvc__bind_matrix(b, "attn_qkv", KVC__SIDE_EMBD, KVC__SIDE_QKV, 1, &all)) {
        l->q = kvc__matrix_rows(&all, 0, n_q);
        l->k = kvc__matrix_rows(&all, n_q, n_k);
        l->v = kvc__matrix_rows(&all, n_q + n_k, m->n_kv_heads * m->head_dim_v);
        return;
    }
    kvc__bind_matrix(b, "attn_q", KVC__SIDE_EMBD, KVC__SIDE_Q, 0, &l->q);
    kvc__bind_matrix(b, "attn_k", KVC__SIDE_EMBD, KVC__SIDE_K, 0, &l->k);
    kvc__bind_matrix(b, "attn_v", KVC__SIDE_EMBD, KVC__SIDE_V, 0, &l->v);
}

/* attn_kv_b holds for each head rows that make its key from the latent, and rows that make its
   value. Queries need the former transposed: in the model's block, floats as they are, others
   decoded. */
static void kvc__bind_kv_b(kvc__binder *b, kvc__layer *l)
{
    const kvc_model *m = b->m;
    const uint32_t nope = m->head_q - m->rope_dim, rank = m->head_dim_v;
    kvc__matrix all, *k = &l->k_up;
    const kvc__type_info *info;
    unsigned char *to;
    float *row;
    size_t item;
    uint32_t h, n, i;
    if (!kvc__bind_matrix(b, "attn_kv_b", KVC__SIDE_RANK, KVC__SIDE_KV_B, 0, &all)) return;
    l->v_up = kvc__matrix_rows(&all, nope, m->head_o);
    l->v_up.n_parts = m->n_heads;
    l->v_up.part_size = (nope + m->head_o) * all.row_size;
    info = kvc__type(all.type);
    *k = all;
    k->type = info->block == 1 ? all.type : (uint32_t)KVC__F32;
    item = kvc__type(k->type)->block_size;
    k->n_in = nope;
    k->n_out = rank;
    k->n_parts = m->n_heads;
    k->row_size = nope * item;
    k->part_size = rank * k->row_size;
    k->bias = NULL;
    if (all.bias != NULL)
        b->result = kvc__fail(b->err, KVC_ERROR_UNSUPPORTED, b->name, "a bias of the latent");
    to = (unsigned char *)kvc__take(b->arena, m->n_heads, k->part_size);
    row = (float *)kvc__take(b->arena, rank, sizeof *row);
    if (to == NULL || row == NULL) return;
    k->data = to;
    for (h = 0; h < m->n_heads; h++, to += k->part_size)
        for (n = 0; n < nope; n++) {
            const unsigned char *from = all.data + h * l->v_up.part_size + n * all.row_size;
            if (k->type != all.type) kvc__decode_row(row, from, all.type, rank);
            for (i = 0; i < rank; i++)
                memcpy(to + (size_t)i * k->row_size + n * item, k->type != all.type
                    ? (const unsigned char *)&row[i] : from + i * item, item);
        }
}

static void kvc__bind_latent(kvc__binder *b, kvc__layer *l)
{
    const kvc_model *m = b->m;
    kvc__matrix low;
    if (m->q_rank != 0) {
        kvc__bind_matrix(b, "attn_q_a", KVC__SIDE_EMBD, KVC__SIDE_Q_RANK, 0, &l->q_low);
        kvc__bind_norm(b, "attn_q_a_norm", KVC__SIDE_Q_RANK, KVC__SIDE_1, 0, &l->q_low_norm);
        kvc__bind_matrix(b, "attn_q_b", KVC__SIDE_Q_RANK, KVC__SIDE_Q, 0, &l->q);
    } else {
        kvc__bind_matrix(b, "attn_q", KVC__SIDE_EMBD, KVC__SIDE_Q, 0, &l->q);
    }
    kvc__bind_matrix(b, "attn_kv_a_mqa", KVC__SIDE_EMBD, KVC__SIDE_KV_LOW, 0, &low);
    l->v = kvc__matrix_rows(&low, 0, m->head_dim_v);
    l->k = kvc__matrix_rows(&low, m->head_dim_v, m->rope_dim);
    kvc__bind_norm(b, "attn_kv_a_norm", KVC__SIDE_RANK, KVC__SIDE_1, 0, &l->v_norm);
    if (kvc__bind_stack(b, "attn_k_b", KVC__SIDE_NOPE, KVC__SIDE_RANK, KVC__SIDE_HEADS, 1,
        &l->k_up))
        kvc__bind_stack(b, "attn_v_b", KVC__SIDE_RANK, KVC__SIDE_HEAD_O, KVC__SIDE_HEADS, 0,
            &l->v_up);
    else kvc__bind_kv_b(b, l);
}

static void kvc__bind_attention(kvc__binder *b, kvc__layer *l)
{
    const kvc_model *m = b->m;
    const int own = kvc__has(m, KVC__QK_NORM_MAY), whole = kvc__has(m, KVC__QK_NORM_WHOLE);
    if (kvc__has(m, KVC__LATENT)) kvc__bind_latent(b, l);
    else kvc__bind_qkv(b, l);
    if (own || whole || kvc__has(m, KVC__QK_NORM)) {
        kvc__bind_norm(b, "attn_q_norm", whole ? KVC__SIDE_Q : KVC__SIDE_HEAD,
            own ? KVC__SIDE_HEADS : KVC__SIDE_1, own, &l->q_norm);
        kvc__bind_norm(b, "attn_k_norm", whole ? KVC__SIDE_K : KVC__SIDE_HEAD,
            own ? KVC__SIDE_KV_HEADS : KVC__SIDE_1, own, &l->k_norm);
    }
    if (kvc__has(m, KVC__SINKS)) {
        l->sinks = kvc__bind_floats(b, "attn_sinks", ".weight", KVC__SIDE_HEADS, KVC__SIDE_1);
        if (kvc__bind_find(b, "attn_sinks", ".weight") == NULL) kvc__bind_missing(b);
    }
    kvc__bind_matrix(b, "attn_output", KVC__SIDE_O, KVC__SIDE_EMBD, 0, &l->o);
}

static void kvc__bind_dense(kvc__binder *b, kvc__layer *l)
{
    const kvc_model *m = b->m;
    const int gated = !kvc__has(m, KVC__NO_GATE), fused = kvc__has(m, KVC__GATE_UP);
    kvc__matrix both;
    if (gated && !kvc__bind_matrix(b, "ffn_gate", KVC__SIDE_EMBD, KVC__SIDE_FF, fused, &l->gate) &&
        fused) {
        kvc__bind_matrix(b, "ffn_up", KVC__SIDE_EMBD, KVC__SIDE_GATE_UP, 0, &both);
        l->gate = kvc__matrix_rows(&both, 0, m->n_ff);
        l->up = kvc__matrix_rows(&both, m->n_ff, m->n_ff);
    } else {
        kvc__bind_matrix(b, "ffn_up", KVC__SIDE_EMBD, KVC__SIDE_FF, 0, &l->up);
    }
    kvc__bind_matrix(b, "ffn_down", KVC__SIDE_FF, KVC__SIDE_EMBD, 0, &l->down);
}

static void kvc__bind_experts(kvc__binder *b, kvc__layer *l)
{
    const kvc__side in = KVC__SIDE_EMBD, ff = KVC__SIDE_FF_EXPERT, all = KVC__SIDE_EXPERTS;
    kvc__bind_matrix(b, "ffn_gate_inp", in, all, 0, &l->router);
    l->router_bias = kvc__bind_floats(b, "exp_probs_b", ".bias", all, KVC__SIDE_1);
    kvc__bind_stack(b, "ffn_gate_exps", in, ff, all, 0, &l->gates);
    kvc__bind_stack(b, "ffn_up_exps", in, ff, all, 0, &l->ups);
    kvc__bind_stack(b, "ffn_down_exps", ff, in, all, 0, &l->downs);
    if (b->m->n_ff_shared == 0) return;
    kvc__bind_matrix(b, "ffn_gate_shexp", in, KVC__SIDE_FF_SHARED, 0, &l->gate);
    kvc__bind_matrix(b, "ffn_up_shexp", in, KVC__SIDE_FF_SHARED, 0, &l->up);
    kvc__bind_matrix(b, "ffn_down_shexp", KVC__SIDE_FF_SHARED, in, 0, &l->down);
    if (kvc__has(b->m, KVC__SHARED_GATE))
        kvc__bind_matrix(b, "ffn_gate_inp_shexp", in, KVC__SIDE_1, 0, &l->shared_gate);
}

/* Each part's norm; in a parallel layer one may stand for both. */
static void kvc__bind_norms(kvc__binder *b, kvc__layer *l)
{
    const kvc_model *m = b->m;
    kvc__keys k = kvc__keys_start(m, b->err);
    int has_attn, has_ffn, bare = kvc__has(m, KVC__PARALLEL_BARE);
    l->is_parallel = kvc__has(m, KVC__PARALLEL) || (kvc__has(m, KVC__PARALLEL_KEY) &&
        kvc__keys_flag(&k, "use_parallel_residual", 1));
    if (k.result != KVC_OK) b->result = k.result;
    if (kvc__has(m, KVC__POST_NORM)) {
        kvc__bind_norm(b, "post_attention_norm", KVC__SIDE_EMBD, KVC__SIDE_1, 0, &l->attn_post);
        kvc__bind_norm(b, "post_ffw_norm", KVC__SIDE_EMBD, KVC__SIDE_1, 0, &l->ffn_post);
    }
    if (kvc__has(m, KVC__NO_PRE_NORM)) return;
    has_attn = kvc__bind_norm(b, "attn_norm", KVC__SIDE_EMBD, KVC__SIDE_1, l->is_parallel,
        &l->attn_norm);
    has_ffn = kvc__bind_norm(b, "ffn_norm", KVC__SIDE_EMBD, KVC__SIDE_1,
        (l->is_parallel && has_attn) || bare, &l->ffn_norm);
    if (bare && !has_ffn) l->is_parallel = 1;
    if (l->is_parallel && !has_attn) l->attn_norm = l->ffn_norm;
}

static void kvc__bind_layer(kvc__binder *b, kvc__layer *l)
{
    memset(l, 0, sizeof *l);
    kvc__bind_norms(b, l);
    kvc__bind_attention(b, l);
    if (b->m->n_experts != 0 && b->layer >= b->m->n_dense) kvc__bind_experts(b, l);
    else kvc__bind_dense(b, l);
}

/* The tensors that lead the frequencies of the ropes off their formula. */
static void kvc__bind_ropes(kvc__binder *b, kvc__rope_factors *f)
{
    kvc_model *m = b->m;
    int has_long;
    memset(f, 0, sizeof *f);
    f->name[0] = "rope_freqs.weight";
    m->n_ropes = kvc__has(m, KVC__ROPE_LOCAL) ? 2 : 1;
    m->n_rope_sets = 1;
    if (m->rope_dim != 0) {
        f->set[0] = kvc__bind_floats(b, "rope_freqs", ".weight", KVC__SIDE_PAIRS, KVC__SIDE_1);
        has_long = kvc__bind_find(b, "rope_factors_long", ".weight") != NULL;
        if (has_long != (kvc__bind_find(b, "rope_factors_short", ".weight") != NULL)) {
            if (has_long == 0) kvc__bind_find(b, "rope_factors_long", ".weight");
            kvc__bind_missing(b);
        } else if (has_long) {
            m->n_rope_sets = 2;
            f->name[0] = "rope_factors_short.weight";
            f->name[1] = "rope_factors_long.weight";
            f->set[0] = kvc__bind_floats(b, "rope_factors_short", ".weight", KVC__SIDE_PAIRS,
                KVC__SIDE_1);
            f->set[1] = kvc__bind_floats(b, "rope_factors_long", ".weight", KVC__SIDE_PAIRS,
                KVC__SIDE_1);
        }
    }
    m->rope_freq = (double *)kvc__take(b->arena, (size_t)m->n_rope_sets * m->n_ropes,
        m->rope_dim / 2 * sizeof *m->rope_freq);
    m->slopes = kvc__has(m, KVC__ALIBI)
        ? (float *)kvc__take(b->arena, m->n_heads, sizeof *m->slopes) : NULL;
}

/* Runs twice: measuring, then placing. Layer by layer into a scratch layer while measuring. */
static kvc_result kvc__bind_all(kvc_model *m, kvc__arena *arena, kvc__rope_factors *factors,
    kvc_error *err)
{
    kvc__layer scratch;
    kvc__binder b = kvc__binder_start(m, arena, err);
    m->layers = (kvc__layer *)kvc__take(arena, m->n_layers, sizeof *m->layers);
    kvc__bind_ropes(&b, factors);
    kvc__bind_norm(&b, "output_norm", KVC__SIDE_EMBD, KVC__SIDE_1, 0, &m->output_norm);
    if (!kvc__bind_matrix(&b, "output", KVC__SIDE_EMBD, KVC__SIDE_VOCAB, 1, &m->output)) {
        m->output = m->embd;
        m->output.bias = kvc__bind_floats(&b, "output", ".bias", KVC__SIDE_VOCAB, KVC__SIDE_1);
    }
    if (kvc__has(m, KVC__EMBD_NORM))
        kvc__bind_norm(&b, "token_embd_norm", KVC__SIDE_EMBD, KVC__SIDE_1, 0, &m->embd_norm);
    if (kvc__has(m, KVC__LEARNED | KVC__ALIBI))
        kvc__bind_matrix(&b, "position_embd", KVC__SIDE_EMBD, KVC__SIDE_CTX,
            kvc__has(m, KVC__ALIBI), &m->pos_embd);
    for (b.layer = 0; b.result == KVC_OK && b.layer < m->n_layers; b.layer++)
        kvc__bind_layer(&b, m->layers != NULL ? &m->layers[b.layer] : &scratch);
    return b.result;
}

/* A tensor of a layer that the architecture has no place for would change the result if it were
   left out: refused. Others (of towers that text does not use, say) are only logged. */
static kvc_result kvc__check_unused(const kvc_model *m, const kvc_model_desc *desc, kvc_error *err)
{
    char line[128];
    kvc__msg text;
    size_t i;
    for (i = 0; i < m->gguf.n_tensors; i++) {
        const kvc__tensor *t = &m->gguf.tensors[i];
        int inv_freq = t->name_size > 8 && memcmp(t->name + t->name_size - 8, "inv_freq", 8) == 0;
        if (m->gguf.used[i]) continue;
        if (t->name_size > 4 && memcmp(t->name, "blk.", 4) == 0 && !inv_freq)
            return kvc__fail_bytes(err, KVC_ERROR_UNSUPPORTED, t->name, t->name_size,
                "a tensor that this architecture has no place for");
        if (desc->log == NULL) continue;
        kvc__msg_start(&text, line, sizeof line);
        kvc__msg_text(&text, "tensor not used: ");
        kvc__msg_bytes(&text, t->name, t->name_size);
        desc->log(line, desc->user);
    }
    return KVC_OK;
}

/* Everything that K and V of a token depend on, but of the weights only the first bytes of each
   tensor: enough within one process. */
static void kvc__model_fingerprint(kvc_model *m)
{
    const size_t size = strlen(m->arch->name), n_freq = (size_t)m->n_rope_sets * m->n_ropes;
    uint32_t i;
    size_t j;
    for (i = 0; i < 2; i++) {
        uint64_t h = kvc__hash_bytes(m->arch->name, size, i);
        for (j = 0; j < m->gguf.n_metas; j++) {
            const kvc_meta *meta = &m->gguf.metas[j];
            if (meta->key_size <= size || memcmp(meta->key, m->arch->name, size) != 0) continue;
            h = kvc__hash_bytes(meta->key, meta->key_size, h);
            h = kvc__hash_bytes(meta->data, meta->data_size, h);
        }
        h = kvc__hash_bytes(m->rope_freq, n_freq * (m->rope_dim / 2) * sizeof *m->rope_freq, h);
        for (j = 0; j < m->n_layers; j++) h = kvc__mix64(h ^ m->layers[j].reach);
        for (j = 0; j < m->gguf.n_tensors; j++) {
            const kvc__tensor *t = &m->gguf.tensors[j];
            h = kvc__hash_bytes(t->name, t->name_size, h ^ t->type);
            h = kvc__hash_bytes(t->data, t->size < 256 ? (size_t)t->size : 256, h);
        }
        m->fingerprint[i] = h;
    }
}

/* Tells all models apart. It reads every weight. */
static void kvc__model_identity(const kvc_model *m, uint64_t out[2])
{
    size_t i;
    memcpy(out, m->fingerprint, sizeof m->fingerprint);
    for (i = 0; i < m->gguf.n_tensors; i++)
        kvc__hash_bulk(m->gguf.tensors[i].data, (size_t)m->gguf.tensors[i].size, out);
}

static kvc_result kvc__model_weights(kvc_model *m, kvc_error *err)
{
    kvc__rope_factors factors;
    kvc__arena arena;
    kvc_result r;
    size_t i;
    memset(&arena, 0, sizeof arena);
    if ((r = kvc__bind_all(m, &arena, &factors, err)) != KVC_OK) return r;
    m->block_size = arena.used;
    m->block = arena.overflow ? NULL : kvc__alloc(&m->allocator, arena.used, 64);
    if (m->block == NULL)
        return kvc__fail(err, KVC_ERROR_MEMORY, "allocator", "no memory for the layers");
    arena.base = (unsigned char *)m->block;
    arena.used = 0;
    if ((r = kvc__bind_all(m, &arena, &factors, err)) != KVC_OK) return r;
    for (i = 0; i < m->gguf.n_tensors; i++) {
        const kvc__tensor *t = &m->gguf.tensors[i];
        m->n_params += t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
        m->weights_size += t->size;
    }
    if ((r = kvc__model_reaches(m, err)) != KVC_OK) return r;
    if ((r = kvc__model_ropes(m, &factors, err)) != KVC_OK) return r;
    if ((r = kvc__model_slopes(m, err)) != KVC_OK) return r;
    kvc__model_fingerprint(m);
    return KVC_OK;
}

/* ---- packing ---- */

static int kvc__is_quantized(const kvc__matrix *m)
{
    return kvc__type(m->type)->quantized;
}

/* Goes through the matrices of the model: the LM head, then those that the layers have. *i: 0 at
   first. NULL past the last one. */
static kvc__matrix *kvc__model_matrix(kvc_model *m, uint32_t *i)
{
    const uint32_t n = (uint32_t)KVC__N_LAYER_MATRICES;
    kvc__matrix *w;
    if (*i == 0) {
        ++*i;
        return &m->output;
    }
    for (; (*i - 1) / n < m->n_layers; ++*i) {
        w = (kvc__matrix *)(void *)((char *)&m->layers[(*i - 1) / n] +
            kvc__layer_matrices[(*i - 1) % n]);
        if (w->data == NULL) continue;
        ++*i;
        return w;
    }
    return NULL;
}

/* Groups of 16 rows; those of a stack begin anew with each part. */
static uint32_t kvc__matrix_groups(const kvc__matrix *w)
{
    return kvc__div_up(w->n_out, 16) * w->n_parts;
}

typedef struct kvc__packing {
    const kvc__matrix *matrix;
    unsigned char *dst;
    kvc__atomic next;               /* group */
} kvc__packing;

static void kvc__pack_one(const kvc__packing *p, uint32_t group)
{
    const kvc__matrix *w = p->matrix;
    const uint32_t in_part = kvc__div_up(w->n_out, 16), row = group % in_part * 16;
    kvc__pack_group(p->dst + group * kvc__group_size(w->type, w->n_in),
        w->data + group / in_part * w->part_size + row * w->row_size,
        w->n_out - row < 16 ? w->n_out - row : 16, w->n_in, w->type);
}

static void kvc__pack_job(void *arg, uint32_t worker)
{
    const uint32_t batch = 8;
    kvc__packing *p = (kvc__packing *)arg;
    uint32_t group, end, n_groups = kvc__matrix_groups(p->matrix);
    (void)worker;
    while ((group = kvc__atomic_add(&p->next, batch)) < n_groups)
        for (end = group + batch; group < end && group < n_groups; group++) kvc__pack_one(p, group);
}

static kvc_result kvc__model_progress(const kvc_model_desc *desc, double fraction, kvc_error *err)
{
    if (desc->progress == NULL || desc->progress((float)fraction, desc->user) != 0) return KVC_OK;
    return kvc__fail(err, KVC_ERROR_CANCELLED, "progress", "the callback asked to stop");
}

/* The fraction of the loading time that is over when packing begins. */
#define KVC__PACK_BEGINS 0.1

static kvc_result kvc__pack_all(kvc_model *m, const kvc_model_desc *desc, kvc__crew *crew,
    kvc_error *err)
{
    unsigned char *dst = (unsigned char *)m->packed;
    kvc__matrix *w;
    kvc_result r;
    uint32_t i = 0;
    while ((w = kvc__model_matrix(m, &i)) != NULL) {
        double done = (double)(dst - (unsigned char *)m->packed) / (double)m->packed_size;
        kvc__packing p;
        r = kvc__model_progress(desc, KVC__PACK_BEGINS + done * (1 - KVC__PACK_BEGINS), err);
        if (r != KVC_OK) return r;
        p.matrix = w;
        p.dst = dst;
        kvc__atomic_store(&p.next, 0);
        kvc__crew_run(crew, kvc__pack_job, &p);
        w->packed = dst;
        dst += kvc__matrix_groups(w) * kvc__group_size(w->type, w->n_in);
    }
    return KVC_OK;
}

/* Bytes that packing takes; 0 in *fits if they pass the address space. */
static size_t kvc__pack_size(kvc_model *m, int *fits)
{
    const kvc__matrix *w;
    size_t size = 0, one = 0, group;
    uint32_t i = 0;
    *fits = 1;
    while ((w = kvc__model_matrix(m, &i)) != NULL) {
        if (kvc__is_quantized(w)) m->has_quantized = 1;
        else m->has_floats = 1;
        group = kvc__group_size(w->type, w->n_in);
        if (group > m->in_place_group) m->in_place_group = group;
        *fits = *fits && kvc__mul_size(&one, kvc__matrix_groups(w), group) &&
            kvc__add_size(&size, size, one);
    }
    return size;
}

static kvc_result kvc__model_pack(kvc_model *m, const kvc_model_desc *desc, kvc_error *err)
{
    kvc__crew_member members[KVC__MAX_THREADS];
    kvc__crew crew;
    kvc_result r;
    int fits;
    size_t size = kvc__pack_size(m, &fits);
    if (desc->weights == KVC_WEIGHTS_IN_PLACE) return KVC_OK;
    m->packed = fits ? kvc__alloc(&m->allocator, size, 64) : NULL;
    if (m->packed == NULL)
        return kvc__fail(err, KVC_ERROR_MEMORY, "weights",
            "no memory for packed weights; KVC_WEIGHTS_IN_PLACE needs none");
    m->packed_size = size;
    m->in_place_group = 0;
    kvc__memory_large(m->packed, size);
    if (!kvc__crew_start(&crew, members, desc->n_threads > 1 ? desc->n_threads : 1,
        &desc->jobs))
        return kvc__fail(err, KVC_ERROR_THREAD, "n_threads", "a thread could not be made");
    r = kvc__pack_all(m, desc, &crew, err);
    kvc__crew_stop(&crew);
    kvc__file_rest(&m->file);
    return r;
}

/* ---- vocabulary ---- */

/* The embedding decides the vocabulary's size; a vocab_size key must agree with it. */
static kvc_result kvc__model_vocab(kvc_model *m, kvc_error *err)
{
    kvc__keys k = kvc__keys_start(m, err);
    kvc__binder b = kvc__binder_start(m, NULL, err);
    uint32_t n;
    kvc_result r;
    kvc__bind_matrix(&b, "token_embd", KVC__SIDE_EMBD, KVC__SIDE_ANY, 0, &m->embd);
    if (b.result != KVC_OK) return b.result;
    m->n_vocab = m->embd.n_out;
    n = kvc__keys_u32(&k, "vocab_size", m->n_vocab, 1, 0x7fffffffu);
    if (k.result != KVC_OK) return k.result;
    if (n != m->n_vocab)
        return kvc__fail_numbers(err, KVC_ERROR_FORMAT, k.key, "it says", n,
            "but token_embd.weight has rows", m->n_vocab);
    r = kvc__vocab_open(&m->vocab, &m->gguf, m->n_vocab, &m->allocator, err);
    if (r == KVC_OK && !m->vocab.has_tokenizer && m->vocab.n_tokens == 0)
        m->vocab.n_tokens = m->n_vocab;
    return r;
}

/* ---- opening and closing ---- */

static void kvc__model_close(kvc_model *m)
{
    kvc_allocator a = m->allocator;
    kvc__vocab_close(&m->vocab, &a);
    kvc__free(&a, m->packed, m->packed_size);
    kvc__free(&a, m->block, m->block_size);
    kvc__gguf_close(&m->gguf, &a);
    kvc__file_unmap(&m->file);
    kvc__free(&a, m, sizeof *m);
}

static kvc_result kvc__model_load(kvc_model *m, const kvc_model_desc *desc, kvc_error *err)
{
    const void *data = desc->data;
    size_t size = desc->data_size;
    kvc_result r;
    if ((r = kvc__model_progress(desc, 0.0, err)) != KVC_OK) return r;
    if (desc->path != NULL) {
        if (!kvc__file_map(&m->file, desc->path))
            return kvc__fail(err, KVC_ERROR_FILE, desc->path, "cannot be opened, or is empty");
        data = m->file.data;
        size = m->file.size;
    }
    if ((r = kvc__gguf_open(&m->gguf, data, size, &m->allocator, err)) != KVC_OK) return r;
    if ((r = kvc__model_progress(desc, KVC__PACK_BEGINS / 4, err)) != KVC_OK) return r;
    if ((r = kvc__arch_find(&m->gguf, &m->arch, err)) != KVC_OK) return r;
    if ((r = kvc__model_shape(m, err)) != KVC_OK) return r;
    if ((r = kvc__model_vocab(m, err)) != KVC_OK) return r;
    if ((r = kvc__model_progress(desc, KVC__PACK_BEGINS / 2, err)) != KVC_OK) return r;
    if ((r = kvc__model_weights(m, err)) != KVC_OK) return r;
    if ((r = kvc__check_unused(m, desc, err)) != KVC_OK) return r;
    if ((r = kvc__model_pack(m, desc, err)) != KVC_OK) return r;
    return kvc__model_progress(desc, 1.0, err);
}

/* ------------------------------------------------------------------------------------------------
   >>prefix  Which text a page holds
   An entry of the prefix table stands for the tokens of one page after all the tokens before it:
   its parent is the entry of the page before, and that of a text's first page is a root, of which
   there is one for each salt. An entry is found by its key, a keyed hash of the parent's key and
   the tokens. It counts only if parent and tokens are equal as well, so that two texts with the
   same key cost time and nothing else.
   The children of an entry are the leaves of a tree over the bits of their tokens, whose inner
   nodes tell the first bit in which the two sides differ (Morrison 1968, "PATRICIA"). Following a
   text's own bits down leads to a child that has the longest run of tokens in common with it. An
   entry may have fewer tokens than a page: the end of a text, which may grow.
   The table knows nothing of the pages but their numbers; >>kv takes them and gives them. The lock
   of the cache guards all of it.
   ---------------------------------------------------------------------------------------------- */
#define KVC__NONE UINT32_MAX
#define KVC__MAX_SALT 64u

typedef struct kvc__entry {
    uint64_t key[2];
    uint32_t parent;                    /* of a root: KVC__NONE */
    uint32_t n_tokens;                  /* of a root: 0 */
    uint32_t next;                      /* in its bucket, or of those that are free */
    uint32_t kids;                      /* the tree of its children: see kvc__leaf_ref */
    uint32_t refs;                      /* children, and sequences whose last whole page it is */
    uint32_t n_pages;                   /* pages that it knows, over all reaches */
    uint32_t root, priority;
    uint32_t pins;                      /* holders of each of its pages beside sequences */
    uint32_t guards;                    /* who reads its pages without holding them: they stay */
    uint32_t out;                       /* a bit for each page that the tier has, too */
    uint32_t serial;                    /* another one for each use of this memory */
    uint64_t expires;                   /* 0: never */
    uint32_t bit, side[2];              /* an inner node of its siblings' tree, or KVC__NONE */
    uint32_t path;                      /* the child by which a look-up went on */
} kvc__entry;

/* The root of a salt is the entry of the same number. */
typedef struct kvc__salt {
    uint32_t is_set, n_seqs;
    uint32_t quota;                     /* pages on shelves, of each reach; 0: any number */
    uint32_t gemm, size;
    unsigned char bytes[KVC__MAX_SALT];
} kvc__salt;

typedef struct kvc__table {
    uint64_t key[2];
    uint32_t page_size, n_reaches;
    uint32_t n_entries, n_free, free;
    uint32_t n_made;                    /* serial of the latest entry */
    kvc__entry *entries;                /* [n_entries] */
    kvc_token *tokens;                  /* [n_entries, page_size] */
    uint32_t *pages;                    /* [n_entries, n_reaches], KVC__NONE: it has none */
    uint32_t *buckets, mask;            /* [mask + 1] of entries with a whole page */
    kvc__salt *salts;                   /* [n_salts] */
    uint32_t n_salts;
    uint32_t *graves;                   /* [mask + 1] a part of the key of a page that is gone,
                                           where its bucket is */
    void (*event)(const kvc_prefix_event *event, void *user);
    void *user;
    int can_expire;                     /* a page was given a time to live */
    int can_put;                        /* there is a tier that takes pages */
    uint64_t n_asked, n_answered;       /* prefills */
    uint64_t n_hit, n_computed;         /* tokens */
    uint64_t n_evicted;                 /* pages */
    uint64_t n_bytes, n_bytes_peak;     /* of the pages that entries know */
    uint64_t n_put, n_got, n_refused;   /* pages, of the tier */
} kvc__table;

/* ---- keys ---- */

static void kvc__sip_rounds(uint64_t v[4], int n)
{
    for (; n > 0; n--) {
        v[0] += v[1];
        v[1] = (v[1] << 13 | v[1] >> 51) ^ v[0];
        v[0] = v[0] << 32 | v[0] >> 32;
        v[2] += v[3];
        v[3] = (v[3] << 16 | v[3] >> 48) ^ v[2];
        v[0] += v[3];
        v[3] = (v[3] << 21 | v[3] >> 43) ^ v[0];
        v[2] += v[1];
        v[1] = (v[1] << 17 | v[1] >> 47) ^ v[2];
        v[2] = v[2] << 32 | v[2] >> 32;
    }
}

/* SipHash-2-4 with 128 bits (Aumasson and Bernstein 2012) of what is added, in whole words but for
   the end. */
typedef struct kvc__sip {
    uint64_t v[4];
    size_t size;
} kvc__sip;

static void kvc__sip_start(kvc__sip *h, const uint64_t key[2])
{
    h->v[0] = key[0] ^ 0x736f6d6570736575u;
    h->v[1] = key[1] ^ 0x646f72616e646f6du ^ 0xee;
    h->v[2] = key[0] ^ 0x6c7967656e657261u;
    h->v[3] = key[1] ^ 0x7465646279746573u;
    h->size = 0;
}

static void kvc__sip_word(kvc__sip *h, uint64_t word)
{
    h->v[3] ^= word;
    kvc__sip_rounds(h->v, 2);
    h->v[0] ^= word;
}

/* size: a multiple of 8 */
static void kvc__sip_add(kvc__sip *h, const void *data, size_t size)
{
    const unsigned char *p = (const unsigned char *)data;
    h->size += size;
    for (; size >= 8; size -= 8, p += 8) kvc__sip_word(h, kvc__rd64(p));
}

static void kvc__sip_end(kvc__sip *h, const void *data, size_t size, uint64_t out[2])
{
    const unsigned char *p = (const unsigned char *)data;
    uint64_t *v = h->v, last;
    size_t i, n = size & ~(size_t)7;
    kvc__sip_add(h, data, n);
    last = (uint64_t)(h->size + size - n) << 56;
    for (i = n; i < size; i++) last |= (uint64_t)p[i] << (8 * (i - n));
    kvc__sip_word(h, last);
    v[2] ^= 0xee;
    kvc__sip_rounds(v, 4);
    out[0] = v[0] ^ v[1] ^ v[2] ^ v[3];
    v[1] ^= 0xdd;
    kvc__sip_rounds(v, 4);
    out[1] = v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* The key of a page after the one whose key is `parent`. KVC__SHORT_KEYS, of a test, cuts keys to 8
   bits. */
static void kvc__page_key(const kvc__table *t, const uint64_t parent[2], const kvc_token *text,
    uint64_t out[2])
{
    kvc__sip h;
    kvc__sip_start(&h, t->key);
    kvc__sip_add(&h, parent, 2 * sizeof *parent);
    kvc__sip_end(&h, text, t->page_size * sizeof *text, out);
#ifdef KVC__SHORT_KEYS
    out[0] &= 0xff;
    out[1] = 0;
#endif
}

/* ---- the tree of an entry's children ---- */

/* A reference: an entry as a leaf, or the inner node that an entry has room for. */
static uint32_t kvc__leaf_ref(uint32_t entry) { return entry << 1 | 1u; }
static uint32_t kvc__node_ref(uint32_t entry) { return entry << 1; }

static kvc_token *kvc__entry_text(const kvc__table *t, uint32_t entry)
{
    return t->tokens + (size_t)entry * t->page_size;
}

/* A bit of a text, whose end is followed by ones: no token begins so. */
static uint32_t kvc__text_bit(const kvc_token *text, uint32_t n, uint32_t bit)
{
    return bit / 32 < n ? (uint32_t)text[bit / 32] >> (31 - bit % 32) & 1u : 1u;
}

/* Tokens that an entry has in common with a text from the start on. */
static uint32_t kvc__entry_run(const kvc__table *t, uint32_t entry, const kvc_token *text,
    uint32_t n)
{
    const kvc_token *own = kvc__entry_text(t, entry);
    uint32_t i, end = t->entries[entry].n_tokens < n ? t->entries[entry].n_tokens : n;
    for (i = 0; i < end && own[i] == text[i]; i++) continue;
    return i;
}

/* Of an entry's children, one with the longest run in common with the text; KVC__NONE if there are
   no children. */
static uint32_t kvc__kids_nearest(const kvc__table *t, uint32_t parent, const kvc_token *text,
    uint32_t n)
{
    uint32_t ref = t->entries[parent].kids;
    if (ref == KVC__NONE) return KVC__NONE;
    while ((ref & 1u) == 0) {
        const kvc__entry *e = &t->entries[ref >> 1];
        ref = e->side[kvc__text_bit(text, n, e->bit)];
    }
    return ref >> 1;
}

/* Puts an entry, whose tokens are set and differ from all its siblings', below its parent. */
static void kvc__kids_add(kvc__table *t, uint32_t entry)
{
    kvc__entry *e = &t->entries[entry];
    const kvc_token *text = kvc__entry_text(t, entry);
    uint32_t *ref = &t->entries[e->parent].kids, near, run, side;
    near = kvc__kids_nearest(t, e->parent, text, e->n_tokens);
    e->bit = KVC__NONE;
    t->entries[e->parent].refs++;
    if (near == KVC__NONE) {
        *ref = kvc__leaf_ref(entry);
        return;
    }
    run = kvc__entry_run(t, near, text, e->n_tokens);
    for (e->bit = 32 * run; kvc__text_bit(text, e->n_tokens, e->bit) ==
        kvc__text_bit(kvc__entry_text(t, near), t->entries[near].n_tokens, e->bit); e->bit++)
        continue;
    while ((*ref & 1u) == 0 && t->entries[*ref >> 1].bit < e->bit) {
        kvc__entry *node = &t->entries[*ref >> 1];
        ref = &node->side[kvc__text_bit(text, e->n_tokens, node->bit)];
    }
    side = kvc__text_bit(text, e->n_tokens, e->bit);
    e->side[side] = kvc__leaf_ref(entry);
    e->side[1 - side] = *ref;
    *ref = kvc__node_ref(entry);
}

/* Takes it out again. The node in an entry is always above its leaf, or not in use. */
static void kvc__kids_remove(kvc__table *t, uint32_t entry)
{
    kvc__entry *e = &t->entries[entry], *node;
    const kvc_token *text = kvc__entry_text(t, entry);
    uint32_t *ref = &t->entries[e->parent].kids, *above = NULL, *own = NULL, side;
    t->entries[e->parent].refs--;
    while ((*ref & 1u) == 0) {
        if (*ref == kvc__node_ref(entry)) own = ref;
        above = ref;
        node = &t->entries[*ref >> 1];
        ref = &node->side[kvc__text_bit(text, e->n_tokens, node->bit)];
    }
    if (above == NULL) {
        *ref = KVC__NONE;
        return;
    }
    node = &t->entries[*above >> 1];
    side = kvc__text_bit(text, e->n_tokens, node->bit);
    *above = node->side[1 - side];
    node->bit = KVC__NONE;
    if (node == e || own == NULL) return;
    node->bit = e->bit;
    node->side[0] = e->side[0];
    node->side[1] = e->side[1];
    *own = kvc__node_ref((uint32_t)(node - t->entries));
}

/* ---- entries ---- */

static uint32_t *kvc__entry_page(const kvc__table *t, uint32_t entry, uint32_t reach)
{
    return &t->pages[(size_t)entry * t->n_reaches + reach];
}

/* The entry of a whole page below `parent`; KVC__NONE if there is none. */
static uint32_t kvc__table_find(const kvc__table *t, uint32_t parent, const uint64_t key[2],
    const kvc_token *text)
{
    uint32_t e = t->buckets[key[0] & t->mask];
    for (; e != KVC__NONE; e = t->entries[e].next) {
        const kvc__entry *one = &t->entries[e];
        if (one->key[0] == key[0] && one->key[1] == key[1] && one->parent == parent &&
            memcmp(kvc__entry_text(t, e), text, t->page_size * sizeof *text) == 0) break;
    }
    return e;
}

/* A free entry, without children and pages; there is one. */
static uint32_t kvc__entry_take(kvc__table *t, uint32_t parent)
{
    uint32_t entry = t->free, i;
    kvc__entry *e = &t->entries[entry];
    t->free = e->next;
    t->n_free--;
    memset(e, 0, sizeof *e);
    e->serial = ++t->n_made;
    e->parent = parent;
    e->root = parent == KVC__NONE ? entry : t->entries[parent].root;
    e->next = e->kids = e->bit = KVC__NONE;
    for (i = 0; i < t->n_reaches; i++) *kvc__entry_page(t, entry, i) = KVC__NONE;
    return entry;
}

static void kvc__entry_tell(const kvc__table *t, uint32_t entry, int stored)
{
    const kvc__entry *e = &t->entries[entry];
    kvc_prefix_event event;
    if (t->event == NULL || e->n_tokens != t->page_size) return;
    event.stored = stored;
    memcpy(event.key, e->key, sizeof event.key);
    memcpy(event.parent, t->entries[e->parent].key, sizeof event.parent);
    event.tokens = kvc__entry_text(t, entry);
    t->event(&event, t->user);
}

/* What a grave remembers of a key; 0 is none. */
static uint32_t kvc__grave_mark(const uint64_t key[2])
{
    return (uint32_t)(key[1] >> 32) | 1u;
}

/* Gives an entry its tokens, a whole page with its key or fewer, and its place. */
static void kvc__entry_set(kvc__table *t, uint32_t entry, const kvc_token *text, uint32_t n,
    const uint64_t key[2])
{
    kvc__entry *e = &t->entries[entry];
    memcpy(kvc__entry_text(t, entry), text, n * sizeof *text);
    e->n_tokens = n;
    kvc__kids_add(t, entry);
    if (n < t->page_size) return;
    e->key[0] = key[0];
    e->key[1] = key[1];
    e->next = t->buckets[key[0] & t->mask];
    t->buckets[key[0] & t->mask] = entry;
    kvc__entry_tell(t, entry, 1);
}

/* Whether its pages must stay its own. */
static int kvc__entry_fixed(const kvc__table *t, uint32_t entry)
{
    return t->entries[entry].pins != 0 || t->entries[entry].guards != 0;
}

/* Takes an entry from its place; it keeps its pages. */
static void kvc__entry_unset(kvc__table *t, uint32_t entry)
{
    kvc__entry *e = &t->entries[entry];
    kvc__kids_remove(t, entry);
    if (e->n_tokens == t->page_size) {
        uint32_t *ref = &t->buckets[e->key[0] & t->mask];
        while (*ref != entry) ref = &t->entries[*ref].next;
        *ref = e->next;
    }
}

/* Frees an entry that nothing needs any more, and then, perhaps, its parent. Roots stay. */
static void kvc__entry_drop(kvc__table *t, uint32_t entry)
{
    for (;;) {
        kvc__entry *e = &t->entries[entry];
        uint32_t parent = e->parent;
        if (parent == KVC__NONE || e->refs != 0 || e->n_pages != 0) return;
        kvc__entry_tell(t, entry, 0);
        if (e->n_tokens == t->page_size)
            t->graves[e->key[0] & t->mask] = kvc__grave_mark(e->key);
        kvc__entry_unset(t, entry);
        e->parent = KVC__NONE;
        e->next = t->free;
        t->free = entry;
        t->n_free++;
        entry = parent;
    }
}

/* ---- salts ---- */

/* Every field with a tag and its length, so that no two different sets read the same. */
static size_t kvc__root_field(unsigned char *to, char tag, const void *data, uint32_t size)
{
    to[0] = (unsigned char)tag;
    memcpy(to + 1, &size, sizeof size);
    memcpy(to + 1 + sizeof size, data, size);
    return 1 + sizeof size + size;
}

#define KVC__MAX_ROOT (KVC__MAX_SALT + 64u)

/* What sets a root apart; `store`: model, K/V types and page size. Returns the bytes. */
static uint32_t kvc__root_message(const kvc__salt *salt, const uint64_t store[2],
    unsigned char message[KVC__MAX_ROOT])
{
    uint32_t adapter = 0;
    size_t n = kvc__root_field(message, 'm', store, 16);
    n += kvc__root_field(message + n, 'g', &salt->gemm, sizeof salt->gemm);
    n += kvc__root_field(message + n, 'a', &adapter, sizeof adapter);
    n += kvc__root_field(message + n, 's', salt->bytes, salt->size);
    return (uint32_t)n;
}

static void kvc__root_key(const kvc__table *t, const kvc__salt *salt, const uint64_t store[2],
    uint64_t out[2])
{
    unsigned char message[KVC__MAX_ROOT];
    kvc__sip h;
    kvc__sip_start(&h, t->key);
    kvc__sip_end(&h, message, kvc__root_message(salt, store, message), out);
}

static uint32_t kvc__salt_find(const kvc__table *t, const kvc_share *share)
{
    uint32_t i;
    for (i = 0; i < t->n_salts; i++) {
        const kvc__salt *one = &t->salts[i];
        if (one->is_set && one->size == share->salt_size && one->gemm == (uint32_t)share->gemm &&
            (one->size == 0 || memcmp(one->bytes, share->salt, one->size) == 0)) return i;
    }
    return KVC__NONE;
}

/* The number of a salt, which one more sequence now uses; KVC__NONE if all are in use. */
static uint32_t kvc__salt_open(kvc__table *t, const kvc_share *share, const uint64_t store[2])
{
    uint32_t i = kvc__salt_find(t, share);
    if (i == KVC__NONE) {
        for (i = 0; i < t->n_salts; i++)
            if (t->salts[i].n_seqs == 0 && t->entries[i].refs == 0) break;
        if (i == t->n_salts) return KVC__NONE;
        t->salts[i].is_set = 1;
        t->salts[i].gemm = (uint32_t)share->gemm;
        t->salts[i].size = (uint32_t)share->salt_size;
        if (share->salt_size != 0) memcpy(t->salts[i].bytes, share->salt, share->salt_size);
        kvc__root_key(t, &t->salts[i], store, t->entries[i].key);
    }
    t->salts[i].n_seqs++;
    t->salts[i].quota = share->quota;
    return i;
}

/* ---- memory ---- */

/* n_prefix entries for pages, and one for each salt. */
static void kvc__table_layout(kvc__arena *arena, kvc__table *t, uint32_t n_prefix,
    uint32_t n_salts, uint32_t page_size, uint32_t n_reaches)
{
    const uint32_t n = n_prefix + n_salts;
    uint32_t i, n_buckets = 1;
    kvc__table own;
    memset(&own, 0, sizeof own);
    while (n_buckets < n) n_buckets *= 2;
    own.entries = (kvc__entry *)kvc__take(arena, n, sizeof *own.entries);
    own.tokens = (kvc_token *)kvc__take(arena, n, page_size * sizeof *own.tokens);
    own.pages = (uint32_t *)kvc__take(arena, n, n_reaches * sizeof *own.pages);
    own.buckets = (uint32_t *)kvc__take(arena, n_buckets, sizeof *own.buckets);
    own.salts = (kvc__salt *)kvc__take(arena, n_salts, sizeof *own.salts);
    own.graves = (uint32_t *)kvc__take(arena, n_buckets, sizeof *own.graves);
    if (arena->base == NULL) return;
    own.page_size = page_size;
    own.n_reaches = n_reaches;
    own.n_entries = own.n_free = n;
    own.mask = n_buckets - 1;
    own.n_salts = n_salts;
    memset(own.entries, 0, n * sizeof *own.entries);
    memset(own.buckets, 0xff, n_buckets * sizeof *own.buckets);
    memset(own.graves, 0, n_buckets * sizeof *own.graves);
    memset(own.salts, 0, n_salts * sizeof *own.salts);
    for (i = 0; i < n; i++) own.entries[i].next = i + 1 < n ? i + 1 : KVC__NONE;
    for (i = 0; i < n_salts; i++) kvc__entry_take(&own, KVC__NONE);
    *t = own;
}

/* ------------------------------------------------------------------------------------------------
   >>kv  Pages, the ring, sequences
   Layers that see equally far back (see kvc__reach) share their pages: a page holds K and V of
   page_size positions for all layers of one reach, and each reach has a pool of pages. The bytes of
   a page lie apart: each layer has one run of memory for the keys, and one for the values, of each
   of its heads, which holds the head's piece of page 0, of page 1 and so on; so a sequence whose
   pages follow each other, as those of a new one do, is read in one stream. A piece is tiles of 16
   positions (a vector of scores is as many), of head_dim elements for keys and of v_stride for
   values: head_dim_v rounded up to 16 and padded with zeros. See "tiles of K and V" in >>dispatch.
   A sequence is a ring of page numbers for each reach and the position of its next token. Where
   layers see only a window, pages that fell out of it are given back, so the ring holds a window
   however long the sequence is. Pages are counted by reference: the first write into a page that
   others hold copies it. A ring is cut into leaves, which are counted likewise: a fork counts up a
   few leaves, not all pages, and whoever changes a leaf that others have makes a copy.
   Where positions were removed from the middle, the numbers of the pages before move up to close
   the ring, and the rest of the sequence is another extent (see kvc__extent): a slot is the
   place of a position before anything was removed.
   A step promises itself all pages that it may take before it takes the first, so that it cannot
   fail half-way. The lock guards counts, promises, free lists and slots; rows that a sequence has
   written are never written again while shared, so reading them needs no lock.
   ---------------------------------------------------------------------------------------------- */

/* How one layer's K and V are stored. */
typedef struct kvc__layer_kv {
    size_t k_piece, v_piece;            /* bytes of one head's keys and values in a page */
    kvc_kv_type type_k, type_v;
} kvc__layer_kv;

/* Leaves that were made together. */
typedef struct kvc__bush {
    struct kvc__bush *next;
    kvc__leaf *leaves;                  /* [n_leaves] */
    uint32_t n_leaves;
    void *block;                        /* NULL: in the cache's own */
    size_t block_size;
} kvc__bush;

/* A page in the prefix table. */
typedef struct kvc__keep {
    uint32_t entry;                     /* KVC__NONE: it is not in it */
    uint32_t before[2], after[2];       /* older and younger: on its shelf, and of its salt */
    uint32_t parting;                   /* the entry whose page this was, which the rows still are,
                                           and which the tier is to have before they are written
                                           over; KVC__NONE */
} kvc__keep;

/* Pages that no sequence holds, only the table: the one that was let go first, and the last. */
typedef struct kvc__shelf {
    uint32_t first, last, n;
} kvc__shelf;

#define KVC__MAX_SLABS 32u
#define KVC__N_SHELVES 101u             /* one for each priority */

/* The pages of a reach. */
typedef struct kvc__pool {
    uint32_t window;                    /* positions that a row sees, 0: all */
    uint32_t n_layers;
    uint32_t ring_cap;                  /* most pages of a sequence that does not grow */
    uint32_t window_pages;              /* most pages of any sequence; no window: UINT32_MAX */
    uint32_t n_pages, n_free, peak;
    uint32_t n_cached;                  /* pages on shelves, to be had like free ones */
    uint32_t n_promised;                /* of these and the free ones */
    uint32_t reach;
    kvc__table *table;                  /* NULL: none */
    kvc__shelf shelves[KVC__N_SHELVES];
    kvc__shelf *of_salt;                /* [n_salts] the same pages */
    uint64_t filled[2];                 /* a bit for each shelf that is not empty */
    uint32_t flushed;                   /* where kvc_prefix_flush goes on */
    size_t page;                        /* bytes */
    uint32_t n_slabs;
    kvc__slab slabs[KVC__MAX_SLABS];
    uint32_t *free_pages;               /* a stack, [n_pages] */
    uint32_t ring_leaves;               /* of a ring that has not grown */
    uint32_t n_leaves, n_free_leaves;   /* as many as all rings can have */
    kvc__leaf *free_leaves;
    kvc__bush *bushes;
} kvc__pool;

/* The pages of a sequence in a pool. */
typedef struct kvc__ring {
    kvc__leaf **leaves;                 /* see kvc__attn; where it holds no page, anything */
    uint32_t cap;                       /* leaves */
    uint32_t first, end;                /* held are the pages first to end - 1 */
    uint32_t promised;                  /* pages that the running step may still take */
} kvc__ring;

struct kvc_seq {
    kvc_cache *cache;
    uint32_t is_open;
    uint32_t is_busy, closes;           /* in a request that is not done; to be closed then */
    uint32_t index, n_uses;             /* scratch of kvc_seq_reorder; kvc_batch uses index */
    uint32_t n_pos;                     /* positions held; the next token's position */
    kvc_policy policy;
    uint32_t n_keep;
    uint32_t n_extents;                 /* at least 1; tokens are added to the last */
    kvc__extent *extents;               /* [n_cuts + 2] */
    float *turns;                       /* [n_ropes, n_cuts + 1, 2, rope_dim] see kvc__attn */
    kvc__ring rings[KVC_MAX_REACHES];
    /* see "the prefix table at work" */
    uint32_t salt;                      /* KVC__NONE: the sequence takes no part */
    uint32_t priority, ttl;
    uint32_t tail, depth;               /* the entry of its last whole page, and how many there are
                                           up to it; the root and 0 */
    uint32_t n_hit;                     /* tokens of the latest request that were there */
    kvc_miss miss;
    uint32_t is_foreign;                /* the running step's engine is not the salt's */
    /* see "undoing a step" */
    uint32_t n_before;                  /* n_pos when the step began */
    uint32_t is_kept, is_lossy;         /* its shadow is what it was; there was no page for that */
    /* see "heavy hitters" */
    uint32_t n_heavy;
    uint32_t n_marked;                  /* slots from 0 on whose keys are turned by others, */
    uint32_t *marks;                    /* [n_heavy of the desc] these */
    float *mark_turns;                  /* [tiles, rope_dim / 2, 2, 16] see kvc__attn; of the first
                                           rope, for layers that see everything have no other */
    uint64_t *tally;                    /* [pages of n_ctx * page_size] by position */
};

struct kvc_cache {
    kvc_cache_desc desc;                /* resolved */
    uint32_t page_shift, v_stride;
    uint32_t rope_set;                  /* which of the model's frequencies: see kvc__rope_set */
    kvc__pool pools[KVC_MAX_REACHES];   /* one for each reach of the model */
    kvc__layer_kv *layers;              /* [n_layers] */
    kvc__table table;                   /* n_entries 0: none */
    uint64_t store[2];                  /* what roots are made of: see kvc__cache_store */
    uint64_t identity[2];               /* of the model, if has_identity */
    int has_identity;
    uint32_t token_reach;               /* the reach whose pages also hold the tokens: one that sees
                                           all, if there is one */
    kvc__lock lock;
    kvc_seq *seqs;                      /* [n_seqs], then the shadow of each */
    uint32_t n_open;
    uint64_t n_timed;                   /* positions that prefills have computed, */
    double us_timed;                    /* and the microseconds that it took */
    size_t block_size, grown;           /* bytes: its own block; the others */
    int owned;
};

/* ---- the desc ---- */

static int kvc__kv_type_known(kvc_kv_type t)
{
    return (uint32_t)t >= KVC_KV_F32 && (uint32_t)t <= KVC_KV_Q4;
}

static kvc_result kvc__kv_type_resolve(kvc_kv_type *t, const char *field, kvc_error *err)
{
    if (*t == KVC_KV_DEFAULT) *t = KVC_KV_F32;
    if (kvc__kv_type_known(*t)) return KVC_OK;
    return kvc__fail(err, KVC_ERROR_ARGUMENT, field, "not a kvc_kv_type");
}

/* Pages that n positions take from the first place of a page on. */
static uint32_t kvc__pages_for(const kvc_cache_desc *d, uint32_t n)
{
    return (uint32_t)(((uint64_t)n + d->page_size - 1) / d->page_size);
}

/* Room for the recent positions: a page to be written, one that joins the choice, and all that a
   window sees. */
static kvc_result kvc__heavy_check(const kvc_cache_desc *d, kvc_error *err)
{
    const kvc_model *m = d->model;
    uint32_t i, pages = kvc__pages_for(d, d->n_ctx), most, full = 0;
    if (d->n_heavy == 0) return KVC_OK;
    if (d->n_heavy > d->n_ctx || kvc__pages_for(d, d->n_heavy) + 2 > pages)
        return kvc__fail_numbers(err, KVC_ERROR_ARGUMENT, "n_heavy",
            "two pages must stay free of positions", d->n_ctx, "and kept would be", d->n_heavy);
    most = (pages - kvc__pages_for(d, d->n_heavy) - 2) * d->page_size;
    for (i = 0; i < m->n_reaches; i++) {
        if (m->reaches[i].window == 0) full = 1;
        else if ((uint64_t)m->reaches[i].window + d->n_back > most)
            return kvc__fail_numbers(err, KVC_ERROR_ARGUMENT, "n_heavy",
                "recent positions would be", most, "and layers with a window see, with n_back,",
                m->reaches[i].window + d->n_back);
    }
    if (full) return KVC_OK;
    return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_heavy", "no layer sees all positions");
}

/* Fills in the defaults; fails naming the field. */
static kvc_result kvc__cache_defaults(kvc_cache_desc *d, kvc_error *err)
{
    kvc_result r;
    if (d->start_canary != 0 || d->end_canary != 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "desc", "not zero-initialised");
    if (d->model == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "model", "NULL");
    if (d->n_ctx == 0) d->n_ctx = d->model->n_ctx_train;
    if (d->n_ctx > (1u << 30)) return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_ctx", "more than 2^30");
    if (d->model->pos_embd.data != NULL && d->n_ctx > d->model->pos_embd.n_out)
        return kvc__fail_numbers(err, KVC_ERROR_ARGUMENT, "n_ctx", "it is", d->n_ctx,
            "and the model knows positions", d->model->pos_embd.n_out);
    if (d->n_seqs == 0) d->n_seqs = 1;
    if (d->n_seqs > (1u << 24))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_seqs", "more than 2^24");
    if (d->page_size == 0) d->page_size = 32;
    if (d->page_size < 16 || d->page_size > KVC__SPAN || (d->page_size & (d->page_size - 1)) != 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "page_size", "not a power of two from 16 to 256");
    if (d->n_batch == 0) d->n_batch = 256;
    if (d->n_batch > (1u << 20))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_batch", "more than 2^20");
    if (d->n_back == 0) d->n_back = d->page_size;
    if (d->n_back > (1u << 30))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_back", "more than 2^30");
    if (d->n_cuts == 0) d->n_cuts = 8;
    if (d->n_cuts > 4096)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_cuts", "more than 4096");
    if ((r = kvc__heavy_check(d, err)) != KVC_OK) return r;
    if ((r = kvc__kv_type_resolve(&d->type_k, "type_k", err)) != KVC_OK ||
        (r = kvc__kv_type_resolve(&d->type_v, "type_v", err)) != KVC_OK ||
        (r = kvc__kv_type_resolve(&d->edge_k, "edge_k", err)) != KVC_OK ||
        (r = kvc__kv_type_resolve(&d->edge_v, "edge_v", err)) != KVC_OK) return r;
    if (d->n_pages > 0x7fffffffu)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_pages", "2^31 or more");
    if (d->n_salts == 0) d->n_salts = 16;
    if (d->n_prefix > (1u << 30))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_prefix", "more than 2^30");
    if (d->n_salts > (1u << 24))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_salts", "more than 2^24");
    if ((d->tier.put == NULL) != (d->tier.put_done == NULL) ||
        (d->tier.get == NULL) != (d->tier.get_done == NULL))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "tier",
            "put and put_done, get and get_done belong together");
    if (d->n_prefix == 0 && (d->tier.put != NULL || d->tier.get != NULL))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "tier", "there is no prefix table (n_prefix)");
    if (!kvc__allocator_resolve(&d->allocator, &d->allocator, &d->model->allocator))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "allocator", "only one of alloc and free is set");
    return KVC_OK;
}

/* Pages that n positions can touch at most, wherever they begin. */
static uint64_t kvc__pages_touched(uint64_t n, uint32_t page_size)
{
    return (n + page_size - 2) / page_size + 1;
}

/* Sequences and their shadows. */
static uint32_t kvc__n_slots(const kvc_cache_desc *d)
{
    return 2 * d->n_seqs;
}

/* Leaves that n pages in a row touch at most. */
static uint32_t kvc__ring_leaves(uint32_t n)
{
    return n > 1 ? (n - 2) / KVC__LEAF_PAGES + 2 : 1;
}

/* Pages that a sequence may hold beside those that its positions need, since the pages at the ends
   of an extent may be nearly empty. */
static uint32_t kvc__pages_spare(uint32_t n_extents)
{
    return 2 * (n_extents - 1);
}

/* Sizes, without places. Pages of a window reach that n_seqs sequences cannot use are not made, but
   for a prefix table. */
static kvc_result kvc__pool_measure(kvc__pool *pool, const kvc__reach *reach, kvc_cache_desc *d,
    kvc_error *err)
{
    uint64_t need = ((uint64_t)d->n_ctx + d->page_size - 1) / d->page_size, all;
    memset(pool, 0, sizeof *pool);
    pool->window = reach->window;
    pool->n_layers = reach->n_layers;
    pool->window_pages = UINT32_MAX;
    if (reach->window != 0) {
        uint64_t some = kvc__pages_touched((uint64_t)reach->window - 1 + d->n_back + d->n_batch,
            d->page_size);
        pool->window_pages = (uint32_t)some;
        if (some < need) need = some;
    }
    all = need * d->n_seqs;
    if (d->n_pages != 0 && d->n_pages < all) all = d->n_pages;
    if (d->n_pages != 0 && (reach->window == 0 || d->n_prefix != 0)) all = d->n_pages;
    if (all > 0x7fffffffu)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_seqs", "n_ctx * n_seqs needs too many pages");
    pool->ring_leaves = kvc__ring_leaves((uint32_t)need + kvc__pages_spare(d->n_cuts + 2));
    if ((uint64_t)pool->ring_leaves * kvc__n_slots(d) > 0x7fffffffu)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_seqs", "n_ctx * n_seqs needs too many pages");
    pool->ring_cap = (uint32_t)need;
    pool->n_pages = (uint32_t)all;
    return KVC_OK;
}

/* Elements of a row of so many, filled up to whole vectors. */
static uint32_t kvc__padded(uint32_t n)
{
    return (n + 15u) & ~15u;
}

/* Elements from row to row of stored values. */
static uint32_t kvc__v_stride(const kvc_model *m)
{
    return kvc__padded(kvc__stored_v(m));
}

/* 0 if a size passes the address space */
static int kvc__layer_kv_measure(kvc__layer_kv *l, const kvc_cache_desc *d, uint32_t layer,
    size_t *bytes)
{
    const kvc_model *m = d->model;
    const int edge = layer < d->n_edge || m->n_layers - layer <= d->n_edge;
    memset(l, 0, sizeof *l);
    l->type_k = edge ? d->edge_k : d->type_k;
    l->type_v = edge ? d->edge_v : d->type_v;
    l->k_piece = d->page_size * kvc__kv_row(l->type_k, m->head_dim);
    l->v_piece = d->page_size * kvc__kv_row(l->type_v, kvc__v_stride(m));
    return kvc__mul_size(bytes, l->k_piece + l->v_piece, m->n_kv_heads);
}

/* Bytes of K and V of one position in a layer, as the formula has it: without the padding of
   values. */
static size_t kvc__layer_row(const kvc_cache *c, uint32_t layer)
{
    const kvc_model *m = c->desc.model;
    const kvc__layer_kv *l = &c->layers[layer];
    return m->n_kv_heads * (kvc__kv_row(l->type_k, m->head_dim) +
        kvc__kv_row(l->type_v, kvc__stored_v(m)));
}

static size_t kvc__bytes_per_token(const kvc_cache *c)
{
    size_t sum = 0;
    uint32_t i;
    for (i = 0; i < c->desc.model->n_layers; i++) sum += kvc__layer_row(c, i);
    return sum;
}

/* ---- layout: each function measures, or places its part of *c if the arena has a base ---- */

/* The next slab of a pool. Its pages are free from then on, the first of them next. */
static void kvc__slab_layout(kvc__arena *arena, kvc__pool *pool, const kvc_cache_desc *d,
    uint32_t reach, int tokens, uint32_t n_pages)
{
    const kvc_model *m = d->model;
    kvc__slab slab;
    uint32_t i, n_all = n_pages;
    uint32_t *stack;
    memset(&slab, 0, sizeof slab);
    for (i = 0; i < pool->n_slabs; i++) n_all += pool->slabs[i].n_pages;
    slab.first = n_all - n_pages;
    slab.n_pages = n_pages;
    slab.planes = (kvc__plane *)kvc__take(arena, m->n_layers, sizeof *slab.planes);
    slab.refs = (uint32_t *)kvc__take(arena, n_pages, sizeof *slab.refs);
    stack = (uint32_t *)kvc__take(arena, n_all, sizeof *stack);
    if (tokens)
        slab.tokens = (kvc_token *)kvc__take(arena, n_pages, d->page_size * sizeof *slab.tokens);
    if (d->n_prefix != 0)
        slab.keeps = (kvc__keep *)kvc__take(arena, n_pages, sizeof *slab.keeps);
    for (i = 0; i < m->n_layers; i++) {
        kvc__layer_kv l;
        kvc__plane plane;
        size_t bytes;
        if (m->layers[i].reach != reach) continue;
        kvc__layer_kv_measure(&l, d, i, &bytes);
        plane.k = (unsigned char *)kvc__take(arena, n_pages, l.k_piece * m->n_kv_heads);
        plane.v = (unsigned char *)kvc__take(arena, n_pages, l.v_piece * m->n_kv_heads);
        if (arena->base != NULL) slab.planes[i] = plane;
    }
    if (arena->base == NULL) return;
    memset(slab.refs, 0, n_pages * sizeof *slab.refs);
    if (slab.keeps != NULL) memset(slab.keeps, 0xff, n_pages * sizeof *slab.keeps);
    for (i = 0; i < n_pages; i++) stack[i] = n_all - 1 - i;
    if (pool->n_free != 0)
        memcpy(stack + n_pages, pool->free_pages, pool->n_free * sizeof *stack);
    pool->free_pages = stack;
    pool->n_free += n_pages;
    pool->n_pages = n_all;
    pool->slabs[pool->n_slabs++] = slab;
}

/* More leaves for a pool. */
static kvc__bush *kvc__bush_layout(kvc__arena *arena, kvc__pool *pool, uint32_t n)
{
    kvc__bush *bush = (kvc__bush *)kvc__take(arena, 1, sizeof *bush);
    kvc__leaf *leaves = (kvc__leaf *)kvc__take(arena, n, sizeof *leaves);
    uint32_t i;
    if (arena->base == NULL) return NULL;
    memset(bush, 0, sizeof *bush);
    memset(leaves, 0, n * sizeof *leaves);
    bush->leaves = leaves;
    bush->n_leaves = n;
    bush->next = pool->bushes;
    pool->bushes = bush;
    for (i = n; i > 0; i--) {
        leaves[i - 1].next = pool->free_leaves;
        pool->free_leaves = &leaves[i - 1];
    }
    pool->n_leaves += n;
    pool->n_free_leaves += n;
    return bush;
}

static void kvc__rings_layout(kvc__arena *arena, kvc_cache *c, uint32_t reach, uint32_t cap,
    uint32_t n_seqs)
{
    kvc__leaf **leaves = (kvc__leaf **)kvc__take(arena, n_seqs, cap * sizeof *leaves);
    uint32_t i;
    if (arena->base == NULL) return;
    memset(leaves, 0, (size_t)n_seqs * cap * sizeof *leaves);
    for (i = 0; i < n_seqs; i++) {
        c->seqs[i].rings[reach].leaves = leaves + (size_t)i * cap;
        c->seqs[i].rings[reach].cap = cap;
    }
}

static void kvc__extents_layout(kvc__arena *arena, kvc_cache *c, const kvc_cache_desc *d)
{
    const size_t n = d->n_cuts + 2, n_turns = (n - 1) * d->model->n_ropes * 2 * d->model->rope_dim;
    kvc__extent *extents;
    float *turns;
    size_t all = 0, all_turns = 0;
    uint32_t i;
    if (!kvc__mul_size(&all, n, kvc__n_slots(d)) ||
        !kvc__mul_size(&all_turns, n_turns, kvc__n_slots(d)))
        arena->overflow = 1;
    extents = (kvc__extent *)kvc__take(arena, all, sizeof *extents);
    turns = (float *)kvc__take(arena, all_turns, sizeof *turns);
    if (arena->base == NULL) return;
    memset(extents, 0, all * sizeof *extents);
    for (i = 0; i < kvc__n_slots(d); i++) {
        c->seqs[i].extents = extents + i * n;
        c->seqs[i].turns = turns + i * n_turns;
        c->seqs[i].n_extents = 1;
    }
}

static void kvc__heavy_layout(kvc__arena *arena, kvc_cache *c, const kvc_cache_desc *d)
{
    const uint32_t n = (d->n_heavy + 15u) & ~15u, rope_dim = d->model->rope_dim;
    const size_t n_tally = (size_t)kvc__pages_for(d, d->n_ctx) * d->page_size;
    uint32_t *marks;
    float *turns;
    uint64_t *tally;
    uint32_t i;
    size_t turn_size = 0, tally_size = 0;
    if (d->n_heavy == 0) return;
    if (!kvc__mul_size(&turn_size, (size_t)n * sizeof *turns, rope_dim) ||
        !kvc__mul_size(&tally_size, n_tally, sizeof *tally))
        arena->overflow = 1;
    marks = (uint32_t *)kvc__take(arena, kvc__n_slots(d), n * sizeof *marks);
    turns = (float *)kvc__take(arena, d->n_seqs, turn_size);
    tally = (uint64_t *)kvc__take(arena, kvc__n_slots(d), tally_size);
    for (i = 0; arena->base != NULL && i < kvc__n_slots(d); i++) {
        c->seqs[i].marks = marks + (size_t)i * n;
        if (i < d->n_seqs) c->seqs[i].mark_turns = turns + (size_t)i * n * rope_dim;
        c->seqs[i].tally = tally + i * n_tally;
    }
}

/* The reach whose pages hold the tokens. */
static uint32_t kvc__token_reach(const kvc_model *m)
{
    uint32_t i;
    for (i = 0; i + 1 < m->n_reaches && m->reaches[i].window != 0; i++) continue;
    return i;
}

static kvc_cache *kvc__cache_layout(kvc__arena *arena, const kvc_cache_desc *d,
    const kvc__pool *pools)
{
    const kvc_model *m = d->model;
    kvc_cache *c = (kvc_cache *)kvc__take(arena, 1, sizeof *c);
    kvc_seq *seqs = (kvc_seq *)kvc__take(arena, kvc__n_slots(d), sizeof *seqs);
    kvc__layer_kv *layers = (kvc__layer_kv *)kvc__take(arena, m->n_layers, sizeof *layers);
    uint32_t i;
    if (c != NULL) {
        memset(c, 0, sizeof *c);
        memset(seqs, 0, kvc__n_slots(d) * sizeof *seqs);
        c->desc = *d;
        while ((1u << c->page_shift) < d->page_size) c->page_shift++;
        c->v_stride = kvc__v_stride(m);
        c->rope_set = kvc__rope_set(m, d->n_ctx);
        c->layers = layers;
        c->seqs = seqs;
        memcpy(c->pools, pools, sizeof c->pools);
        for (i = 0; i < kvc__n_slots(d); i++) {
            seqs[i].cache = c;
            seqs[i].salt = seqs[i].tail = KVC__NONE;
        }
    }
    if (d->n_prefix != 0)
        kvc__table_layout(arena, c != NULL ? &c->table : NULL, d->n_prefix, d->n_salts,
            d->page_size, m->n_reaches);
    for (i = 0; i < m->n_reaches; i++) {
        kvc__pool pool = pools[i];
        pool.reach = i;
        if (d->n_prefix != 0) {
            pool.of_salt = (kvc__shelf *)kvc__take(arena, d->n_salts, sizeof *pool.of_salt);
            if (c != NULL) memset(pool.of_salt, 0, d->n_salts * sizeof *pool.of_salt);
            if (c != NULL) pool.table = &c->table;
        }
        kvc__slab_layout(arena, &pool, d, i, i == kvc__token_reach(m), pool.n_pages);
        kvc__bush_layout(arena, &pool, pool.ring_leaves * kvc__n_slots(d));
        kvc__rings_layout(arena, c, i, pool.ring_leaves, kvc__n_slots(d));
        if (c != NULL) c->pools[i] = pool;
    }
    kvc__extents_layout(arena, c, d);
    kvc__heavy_layout(arena, c, d);
    if (c == NULL) return NULL;
    c->token_reach = kvc__token_reach(m);
    for (i = 0; i < m->n_layers; i++) {
        size_t bytes;
        kvc__layer_kv_measure(&layers[i], d, i, &bytes);
        c->pools[m->layers[i].reach].page += bytes;
    }
    return c;
}

/* Resolves *d, fills pools [KVC_MAX_REACHES] and computes the size of the block. */
static kvc_result kvc__cache_measure(kvc_cache_desc *d, kvc__pool *pools, size_t *size,
    kvc_error *err)
{
    kvc__arena arena;
    kvc__layer_kv layer;
    size_t bytes, page = 0;
    uint32_t i;
    kvc_result r = kvc__cache_defaults(d, err);
    if (r != KVC_OK) return r;
    memset(pools, 0, KVC_MAX_REACHES * sizeof *pools);
    for (i = 0; i < d->model->n_reaches; i++)
        if ((r = kvc__pool_measure(&pools[i], &d->model->reaches[i], d, err)) != KVC_OK) return r;
    memset(&arena, 0, sizeof arena);
    for (i = 0; i < d->model->n_layers; i++)
        if (!kvc__layer_kv_measure(&layer, d, i, &bytes) || !kvc__add_size(&page, page, bytes))
            return kvc__fail(err, KVC_ERROR_ARGUMENT, "page_size",
                "a page passes the address space");
    kvc__cache_layout(&arena, d, pools);
    if (arena.overflow)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_pages", "the cache passes the address space");
    *size = arena.used;
    return KVC_OK;
}

/* What K and V depend on, `model`, and how they are stored. */
static void kvc__cache_store(const kvc_cache *c, const uint64_t model[2], uint64_t out[2])
{
    uint32_t i;
    for (i = 0; i < 2; i++) out[i] = model[i];
    for (i = 0; i < c->desc.model->n_layers; i++) {
        uint64_t types = (uint64_t)c->layers[i].type_k << 32 | (uint64_t)c->layers[i].type_v;
        out[0] = kvc__mix64(out[0] ^ types);
        out[1] = kvc__mix64(out[1] + types);
    }
    out[0] = kvc__mix64(out[0] ^ c->desc.page_size ^ (uint64_t)c->rope_set << 32);
    out[1] = kvc__mix64(out[1] + c->desc.page_size + ((uint64_t)c->rope_set << 32));
}

/* The same for what other processes are to read. The first call takes the time to read all weights;
   the lock is not held for it. */
static void kvc__cache_fingerprint(kvc_cache *c, uint64_t out[2])
{
    uint64_t identity[2] = {0, 0};
    int has_identity;
    kvc__lock_enter(&c->lock);
    has_identity = c->has_identity;
    if (has_identity) memcpy(identity, c->identity, sizeof identity);
    kvc__lock_leave(&c->lock);
    if (!has_identity) {
        kvc__model_identity(c->desc.model, identity);
        kvc__lock_enter(&c->lock);
        memcpy(c->identity, identity, sizeof identity);
        c->has_identity = 1;
        kvc__lock_leave(&c->lock);
    }
    kvc__cache_store(c, identity, out);
}

static kvc_result kvc__cache_new(kvc_cache **out, const kvc_cache_desc *desc, kvc_error *err)
{
    kvc_cache_desc d = *desc;
    kvc__pool pools[KVC_MAX_REACHES];
    kvc__arena arena;
    void *block;
    size_t size = 0;
    int owned;
    kvc_result r = kvc__cache_measure(&d, pools, &size, err);
    if (r != KVC_OK) return r;
    if ((r = kvc__block_get(&block, size, &d.memory, &d.allocator, &owned, err)) != KVC_OK)
        return r;
    if (d.touch) memset(block, 0, size);
    memset(&arena, 0, sizeof arena);
    arena.base = (unsigned char *)block;
    *out = kvc__cache_layout(&arena, &d, pools);
    if (d.n_pages == 0) (*out)->desc.n_pages = pools[0].n_pages;
    (*out)->block_size = size;
    (*out)->owned = owned;
    if (d.prefix_key != NULL) memcpy((*out)->table.key, d.prefix_key, 16);
    else kvc__random_key((*out)->table.key);
    (*out)->desc.prefix_key = NULL;
    (*out)->table.event = d.on_prefix;
    (*out)->table.user = d.user;
    (*out)->table.can_put = d.tier.put != NULL;
    if (kvc__lock_init(&(*out)->lock)) {
        if (d.prefix_key != NULL) kvc__cache_fingerprint(*out, (*out)->store);
        else kvc__cache_store(*out, d.model->fingerprint, (*out)->store);
        return KVC_OK;
    }
    if (owned) kvc__free(&d.allocator, block, size);
    *out = NULL;
    return kvc__fail(err, KVC_ERROR_THREAD, "lock", "the lock could not be made");
}

static void kvc__cache_free(kvc_cache *c)
{
    kvc_allocator a = c->desc.allocator;
    uint32_t i, j;
    for (i = 0; i < c->desc.model->n_reaches; i++) {
        kvc__bush *bush = c->pools[i].bushes, *next;
        for (j = 0; j < c->pools[i].n_slabs; j++)
            kvc__free(&a, c->pools[i].slabs[j].block, c->pools[i].slabs[j].block_size);
        for (; bush != NULL; bush = next) {     /* which lies in its own block */
            next = bush->next;
            kvc__free(&a, bush->block, bush->block_size);
        }
    }
    kvc__lock_free(&c->lock);
    if (c->owned) kvc__free(&a, c, c->block_size);
}

/* ---- pages; the lock is held ---- */

static uint32_t *kvc__page_refs(const kvc__pool *pool, uint32_t page)
{
    const kvc__slab *slab = kvc__slab_of(pool->slabs, page);
    return &slab->refs[page - slab->first];
}

/* ---- pages that the prefix table alone holds; the lock is held ---- */

static kvc__keep *kvc__page_keep(const kvc__pool *pool, uint32_t page)
{
    const kvc__slab *slab = kvc__slab_of(pool->slabs, page);
    return &slab->keeps[page - slab->first];
}

/* The entry that knows a page; KVC__NONE: none. */
static uint32_t kvc__page_entry(const kvc__pool *pool, uint32_t page)
{
    return pool->table == NULL ? KVC__NONE : kvc__page_keep(pool, page)->entry;
}

static void kvc__list_add(const kvc__pool *pool, kvc__shelf *list, uint32_t which, uint32_t page)
{
    kvc__keep *keep = kvc__page_keep(pool, page);
    keep->before[which] = list->n != 0 ? list->last : KVC__NONE;
    keep->after[which] = KVC__NONE;
    if (list->n == 0) list->first = page;
    else kvc__page_keep(pool, list->last)->after[which] = page;
    list->last = page;
    list->n++;
}

static void kvc__list_remove(const kvc__pool *pool, kvc__shelf *list, uint32_t which,
    uint32_t page)
{
    const kvc__keep *keep = kvc__page_keep(pool, page);
    const uint32_t before = keep->before[which], after = keep->after[which];
    if (before != KVC__NONE) kvc__page_keep(pool, before)->after[which] = after;
    else list->first = after;
    if (after != KVC__NONE) kvc__page_keep(pool, after)->before[which] = before;
    else list->last = before;
    list->n--;
}

static void kvc__shelf_add(kvc__pool *pool, uint32_t page)
{
    const kvc__entry *e = &pool->table->entries[kvc__page_keep(pool, page)->entry];
    kvc__list_add(pool, &pool->shelves[e->priority], 0, page);
    kvc__list_add(pool, &pool->of_salt[e->root], 1, page);
    pool->filled[e->priority / 64] |= (uint64_t)1 << (e->priority % 64);
    pool->n_cached++;
}

static void kvc__shelf_remove(kvc__pool *pool, uint32_t page)
{
    const kvc__entry *e = &pool->table->entries[kvc__page_keep(pool, page)->entry];
    kvc__list_remove(pool, &pool->shelves[e->priority], 0, page);
    kvc__list_remove(pool, &pool->of_salt[e->root], 1, page);
    if (pool->shelves[e->priority].n == 0)
        pool->filled[e->priority / 64] &= ~((uint64_t)1 << (e->priority % 64));
    pool->n_cached--;
}

/* Lets an entry know a page. */
static void kvc__page_attach(kvc__pool *pool, uint32_t page, uint32_t entry)
{
    kvc__page_keep(pool, page)->entry = entry;
    *kvc__entry_page(pool->table, entry, pool->reach) = page;
    pool->table->entries[entry].out &= ~((uint32_t)1 << pool->reach);
    pool->table->entries[entry].n_pages++;
    pool->table->n_bytes += pool->page;
    if (pool->table->n_bytes > pool->table->n_bytes_peak)
        pool->table->n_bytes_peak = pool->table->n_bytes;
    *kvc__page_refs(pool, page) += pool->table->entries[entry].pins;
}

/* The table forgets a page, and frees it if nobody else holds it. The entry stays. */
static void kvc__page_detach(kvc__pool *pool, uint32_t page)
{
    kvc__keep *keep = kvc__page_keep(pool, page);
    const uint32_t entry = keep->entry;
    if (*kvc__page_refs(pool, page) == 0) {
        kvc__shelf_remove(pool, page);
        pool->free_pages[pool->n_free++] = page;
    }
    keep->entry = KVC__NONE;
    *kvc__entry_page(pool->table, entry, pool->reach) = KVC__NONE;
    pool->table->entries[entry].n_pages--;
    pool->table->n_bytes -= pool->page;
}

/* Whether the tier is to have a page of an entry before it is lost. */
static int kvc__page_due(const kvc__pool *pool, uint32_t entry)
{
    const kvc__table *t = pool->table;
    const kvc__entry *e = &t->entries[entry];
    return t->can_put && e->n_tokens == t->page_size && e->expires == 0 &&
        (e->out >> pool->reach & 1u) == 0;
}

/* Frees a page that is on a shelf. parting: whoever takes it puts it out first, if it is due. */
static void kvc__page_evict(kvc__pool *pool, uint32_t page, int parting)
{
    const uint32_t entry = kvc__page_entry(pool, page);
    if (parting && kvc__page_due(pool, entry)) {
        kvc__page_keep(pool, page)->parting = entry;
        pool->table->entries[entry].refs++;
    }
    kvc__page_detach(pool, page);
    kvc__entry_drop(pool->table, entry);
    pool->table->n_evicted++;
}

/* The page is no longer what it was. */
static void kvc__page_parted(kvc__pool *pool, uint32_t page)
{
    kvc__keep *keep = kvc__page_keep(pool, page);
    const uint32_t entry = keep->parting;
    keep->parting = KVC__NONE;
    pool->table->entries[entry].refs--;
    kvc__entry_drop(pool->table, entry);
}

/* The first page of a list that nobody reads at the moment; KVC__NONE if there is none. */
static uint32_t kvc__list_first(const kvc__pool *pool, const kvc__shelf *list, uint32_t which)
{
    uint32_t page = list->n != 0 ? list->first : KVC__NONE;
    while (page != KVC__NONE && pool->table->entries[kvc__page_entry(pool, page)].guards != 0)
        page = kvc__page_keep(pool, page)->after[which];
    return page;
}

/* The page to be freed next: that which was let go first, of the lowest priority that there is.
   Sequences let their last pages go first, and what was read again was let go again; so a page's
   children are freed before it. KVC__NONE: there is no such page. */
static uint32_t kvc__pool_next(const kvc__pool *pool)
{
    uint32_t priority, page = KVC__NONE;
    for (priority = 0; priority < KVC__N_SHELVES && pool->n_cached != 0; priority++) {
        if ((pool->filled[priority / 64] >> (priority % 64) & 1u) == 0) continue;
        page = kvc__list_first(pool, &pool->shelves[priority], 0);
        if (page != KVC__NONE) break;
    }
    return page;
}

static int kvc__pool_evict(kvc__pool *pool, int parting)
{
    const uint32_t page = kvc__pool_next(pool);
    if (page != KVC__NONE) kvc__page_evict(pool, page, parting);
    return page != KVC__NONE;
}

/* ---- counts of pages; the lock is held ---- */

/* Pages that can be promised. */
static uint32_t kvc__pool_left(const kvc__pool *pool)
{
    return pool->n_free + pool->n_cached - pool->n_promised;
}

static uint32_t kvc__pool_live(const kvc__pool *pool)
{
    return pool->n_pages - pool->n_free - pool->n_cached;
}

static void kvc__pool_peak(kvc__pool *pool)
{
    if (kvc__pool_live(pool) > pool->peak) pool->peak = kvc__pool_live(pool);
}

/* A page that the ring was promised. Before it is written to, kvc__page_leave. */
static uint32_t kvc__page_take(kvc__pool *pool, kvc__ring *ring)
{
    uint32_t page;
    if (pool->n_free == 0) kvc__pool_evict(pool, 1);
    page = pool->free_pages[--pool->n_free];
    ring->promised--;
    pool->n_promised--;
    *kvc__page_refs(pool, page) = 1;
    kvc__pool_peak(pool);
    return page;
}

/* A page for who has no ring; KVC__NONE if all are promised. */
static uint32_t kvc__page_get(kvc__pool *pool)
{
    kvc__ring ring;
    if (kvc__pool_left(pool) == 0) return KVC__NONE;
    memset(&ring, 0, sizeof ring);
    pool->n_promised++;
    ring.promised = 1;
    return kvc__page_take(pool, &ring);
}

/* The page of an entry stays while the lock is not held: it is promised, in case that it is on a
   shelf or comes there. 0: that cannot be. */
static int kvc__page_guard(kvc__pool *pool, uint32_t entry)
{
    if (kvc__pool_left(pool) == 0) return 0;
    pool->n_promised++;
    pool->table->entries[entry].guards++;
    return 1;
}

static void kvc__page_unguard(kvc__pool *pool, uint32_t entry)
{
    pool->n_promised--;
    pool->table->entries[entry].guards--;
}

/* Whether one can hold a page: others may have been promised those on shelves. */
static int kvc__page_can_hold(const kvc__pool *pool, uint32_t page)
{
    return *kvc__page_refs(pool, page) != 0 || kvc__pool_left(pool) != 0;
}

/* One holder more of a page that is held or on a shelf. */
static void kvc__page_hold(kvc__pool *pool, uint32_t page)
{
    uint32_t *refs = kvc__page_refs(pool, page);
    if (*refs == 0) kvc__shelf_remove(pool, page);
    ++*refs;
    kvc__pool_peak(pool);
}

/* The table alone has the page now, as far as the salt's quota goes. */
static void kvc__page_shelve(kvc__pool *pool, uint32_t page, uint32_t entry)
{
    const uint32_t root = pool->table->entries[entry].root;
    const uint32_t quota = pool->table->salts[root].quota;
    kvc__shelf_add(pool, page);
    while (quota != 0 && pool->of_salt[root].n > quota) {
        page = kvc__list_first(pool, &pool->of_salt[root], 1);
        if (page == KVC__NONE) return;
        kvc__page_evict(pool, page, 1);
    }
}

/* One holder less. Tells whether the page can be had now: it is free, or on a shelf if the table
   knows it. */
static int kvc__page_drop(kvc__pool *pool, uint32_t page)
{
    uint32_t entry;
    if (--*kvc__page_refs(pool, page) != 0) return 0;
    entry = kvc__page_entry(pool, page);
    if (entry != KVC__NONE) kvc__page_shelve(pool, page, entry);
    else pool->free_pages[pool->n_free++] = page;
    return 1;
}

/* ---- rings and leaves; the lock is held where something changes ---- */

static kvc__leaf **kvc__leaf_at(const kvc__ring *ring, uint32_t i)
{
    return &ring->leaves[i / KVC__LEAF_PAGES % ring->cap];
}

/* The i-th page of the sequence. */
static uint32_t kvc__ring_at(const kvc__ring *ring, uint32_t i)
{
    return kvc__ring_page(ring->leaves, ring->cap, i);
}

/* Whether no other sequence has it. */
static int kvc__ring_alone(const kvc__pool *pool, const kvc__ring *ring, uint32_t i)
{
    return (*kvc__leaf_at(ring, i))->refs == 1 &&
        *kvc__page_refs(pool, kvc__ring_at(ring, i)) == 1;
}

/* Whether rows from place `at` of a page on can be written: nobody else sees them, the prefix table
   included. */
static int kvc__ring_writable(const kvc__pool *pool, const kvc__ring *ring, uint32_t i,
    uint32_t at)
{
    const uint32_t entry = kvc__page_entry(pool, kvc__ring_at(ring, i));
    if (!kvc__ring_alone(pool, ring, i)) return 0;
    return entry == KVC__NONE || pool->table->entries[entry].n_tokens <= at;
}

static kvc__leaf *kvc__leaf_take(kvc__pool *pool, kvc__ring *ring, uint32_t i)
{
    kvc__leaf *leaf = pool->free_leaves;
    pool->free_leaves = leaf->next;
    pool->n_free_leaves--;
    leaf->refs = 1;
    return *kvc__leaf_at(ring, i) = leaf;
}

/* The leaf of page i, which no other ring has from here on. */
static kvc__leaf *kvc__leaf_own(kvc__pool *pool, kvc__ring *ring, uint32_t i)
{
    kvc__leaf *old = *kvc__leaf_at(ring, i), *leaf;
    uint32_t j;
    if (old->refs == 1) return old;
    old->refs--;
    leaf = kvc__leaf_take(pool, ring, i);
    leaf->lo = old->lo;
    leaf->hi = old->hi;
    for (j = old->lo; j < old->hi; j++) {
        leaf->pages[j] = old->pages[j];
        ++*kvc__page_refs(pool, leaf->pages[j]);
    }
    return leaf;
}

static void kvc__leaf_free(kvc__pool *pool, kvc__leaf *leaf)
{
    leaf->refs = 0;
    leaf->next = pool->free_leaves;
    pool->free_leaves = leaf;
    pool->n_free_leaves++;
}

/* Puts a page at the end. */
static void kvc__ring_push(kvc__pool *pool, kvc__ring *ring, uint32_t page)
{
    const uint32_t i = ring->end++, at = i % KVC__LEAF_PAGES;
    kvc__leaf *leaf;
    if (at == 0 || i == ring->first) {
        leaf = kvc__leaf_take(pool, ring, i);
        leaf->lo = at;
    } else {
        leaf = kvc__leaf_own(pool, ring, i);
    }
    leaf->pages[at] = page;
    leaf->hi = at + 1;
}

/* Drops the first page or the last; tells whether it is free now. */
static int kvc__ring_drop(kvc__pool *pool, kvc__ring *ring, int last)
{
    const uint32_t i = last ? --ring->end : ring->first++;
    kvc__leaf *leaf = kvc__leaf_own(pool, ring, i);
    int freed = kvc__page_drop(pool, leaf->pages[i % KVC__LEAF_PAGES]);
    if (last) leaf->hi--;
    else leaf->lo++;
    if (leaf->lo == leaf->hi) kvc__leaf_free(pool, leaf);
    return freed;
}

/* Drops all pages, the last ones first; shared leaves as a whole. */
static void kvc__ring_clear(kvc__pool *pool, kvc__ring *ring)
{
    uint32_t i, j;
    for (i = ring->end; i > ring->first; i = (i - 1) / KVC__LEAF_PAGES * KVC__LEAF_PAGES) {
        kvc__leaf *leaf = *kvc__leaf_at(ring, i - 1);
        if (--leaf->refs != 0) continue;
        for (j = leaf->hi; j > leaf->lo; j--) kvc__page_drop(pool, leaf->pages[j - 1]);
        kvc__leaf_free(pool, leaf);
    }
    ring->first = ring->end = 0;
}

/* Gives back pages from the end until `end` is the next. */
static void kvc__ring_trim(kvc__pool *pool, kvc__ring *ring, uint32_t end)
{
    if (end <= ring->first) kvc__ring_clear(pool, ring);
    while (ring->end > end) kvc__ring_drop(pool, ring, 1);
    if (ring->end == 0) ring->first = ring->end = end;
}

/* The same pages as another ring, with its leaves. */
static void kvc__ring_share(kvc__ring *to, const kvc__ring *from)
{
    uint32_t i;
    to->first = from->first;
    to->end = from->end;
    for (i = from->first; i < from->end; i = (i / KVC__LEAF_PAGES + 1) * KVC__LEAF_PAGES) {
        kvc__leaf *leaf = *kvc__leaf_at(from, i);
        *kvc__leaf_at(to, i) = leaf;
        leaf->refs++;
    }
}

/* What is left of a promise. */
static void kvc__ring_settle(kvc__pool *pool, kvc__ring *ring)
{
    pool->n_promised -= ring->promised;
    ring->promised = 0;
}

/* Drops the first page; a running step may use it again. */
static void kvc__ring_give(kvc__pool *pool, kvc__ring *ring, int again)
{
    if (!kvc__ring_drop(pool, ring, 0) || !again) return;
    ring->promised++;
    pool->n_promised++;
}

/* Drops the pages numbered from `from` to `to` - 1 and gives those before higher numbers, so that
   the ring has no gap: the front pages are put in the places of the dropped ones, which then are
   the first. */
static void kvc__ring_cut(kvc__pool *pool, kvc__ring *ring, uint32_t from, uint32_t to, int again)
{
    uint32_t i, n = to - from, page;
    for (i = from; n > 0 && i > ring->first; i--) {
        kvc__leaf *front = kvc__leaf_own(pool, ring, i - 1);
        kvc__leaf *back = kvc__leaf_own(pool, ring, i - 1 + n);
        page = front->pages[(i - 1) % KVC__LEAF_PAGES];
        front->pages[(i - 1) % KVC__LEAF_PAGES] = back->pages[(i - 1 + n) % KVC__LEAF_PAGES];
        back->pages[(i - 1 + n) % KVC__LEAF_PAGES] = page;
    }
    if (ring->first < from) to = ring->first + n;
    while (ring->first < to && ring->first < ring->end) kvc__ring_give(pool, ring, again);
    if (ring->first < to) ring->first = ring->end = to;
}

/* A piece of keys or values of a layer. */
static unsigned char *kvc__k_piece(const kvc_cache *c, uint32_t layer, uint32_t head, uint32_t page)
{
    const kvc__pool *pool = &c->pools[c->desc.model->layers[layer].reach];
    const kvc__slab *slab = kvc__slab_of(pool->slabs, page);
    return slab->planes[layer].k +
        ((size_t)head * slab->n_pages + page - slab->first) * c->layers[layer].k_piece;
}
static unsigned char *kvc__v_piece(const kvc_cache *c, uint32_t layer, uint32_t head, uint32_t page)
{
    const kvc__pool *pool = &c->pools[c->desc.model->layers[layer].reach];
    const kvc__slab *slab = kvc__slab_of(pool->slabs, page);
    return slab->planes[layer].v +
        ((size_t)head * slab->n_pages + page - slab->first) * c->layers[layer].v_piece;
}

/* The tokens of a page of c->token_reach. */
static kvc_token *kvc__page_tokens(const kvc_cache *c, uint32_t page)
{
    const kvc__slab *slab = kvc__slab_of(c->pools[c->token_reach].slabs, page);
    return slab->tokens + (size_t)(page - slab->first) * c->desc.page_size;
}

/* The tile that place `at` of a page lies in. */
static unsigned char *kvc__k_tile(const kvc_cache *c, uint32_t layer, uint32_t head, uint32_t page,
    uint32_t at)
{
    return kvc__k_piece(c, layer, head, page) +
        (at & ~15u) * kvc__kv_row(c->layers[layer].type_k, c->desc.model->head_dim);
}

static unsigned char *kvc__v_tile(const kvc_cache *c, uint32_t layer, uint32_t head, uint32_t page,
    uint32_t at)
{
    return kvc__v_piece(c, layer, head, page) +
        (at & ~15u) * kvc__kv_row(c->layers[layer].type_v, c->v_stride);
}

/* Copies a key from one lane of a tile to one of another, or of the same. */
static void kvc__key_move(kvc_kv_type type, unsigned char *from, uint32_t lane, unsigned char *to,
    uint32_t to_lane, uint32_t head_dim)
{
    const size_t size = kvc__kv_size(type);
    unsigned char block[34];
    uint32_t i;
    if (kvc__kv_coded(type)) {
        for (i = 0; i < kvc__div_up(head_dim, 32); i++) {
            kvc__kv_place a = kvc__key_place(type, from, lane, i);
            kvc__kv_place b = kvc__key_place(type, to, to_lane, i);
            kvc__place_get(&a, block);
            kvc__place_put(&b, block);
        }
        return;
    }
    for (i = 0; i < head_dim; i++)
        memcpy(to + (16 * i + to_lane) * size, from + (16 * i + lane) * size, size);
}

static void kvc__value_move(kvc_kv_type type, unsigned char *from, uint32_t lane,
    unsigned char *to, uint32_t to_lane, uint32_t v_stride)
{
    const size_t row = v_stride * kvc__kv_size(type);
    unsigned char block[34];
    uint32_t i, n_blocks = kvc__div_up(v_stride, 32);
    if (!kvc__kv_coded(type)) {
        memcpy(to + to_lane * row, from + lane * row, row);
        return;
    }
    for (i = 0; i < n_blocks; i++) {
        kvc__kv_place a = kvc__value_place(type, from, lane, i, n_blocks);
        kvc__kv_place b = kvc__value_place(type, to, to_lane, i, n_blocks);
        kvc__place_get(&a, block);
        kvc__place_put(&b, block);
    }
}

/* Copies one position of a reach from its place in one page to one in another. */
static void kvc__position_move(const kvc_cache *c, uint32_t reach, uint32_t page, uint32_t at,
    uint32_t to_page, uint32_t to_at)
{
    const kvc_model *m = c->desc.model;
    uint32_t i, h;
    if (page == to_page && at == to_at) return;
    if (reach == c->token_reach)
        kvc__page_tokens(c, to_page)[to_at] = kvc__page_tokens(c, page)[at];
    for (i = 0; i < m->n_layers; i++) {
        const kvc__layer_kv *l = &c->layers[i];
        if (m->layers[i].reach != reach) continue;
        for (h = 0; h < m->n_kv_heads; h++) {
            kvc__key_move(l->type_k, kvc__k_tile(c, i, h, page, at), at % 16,
                kvc__k_tile(c, i, h, to_page, to_at), to_at % 16, m->head_dim);
            kvc__value_move(l->type_v, kvc__v_tile(c, i, h, page, at), at % 16,
                kvc__v_tile(c, i, h, to_page, to_at), to_at % 16, c->v_stride);
        }
    }
}

/* Copies the first n positions of a page and touches no other: somebody may be writing there. */
static void kvc__page_copy(const kvc_cache *c, uint32_t reach, uint32_t to, uint32_t from,
    uint32_t n)
{
    const kvc_model *m = c->desc.model;
    const uint32_t whole = n & ~15u;
    uint32_t i, h;
    if (reach == c->token_reach)
        memcpy(kvc__page_tokens(c, to), kvc__page_tokens(c, from), whole * sizeof(kvc_token));
    for (i = 0; i < m->n_layers; i++) {
        const kvc__layer_kv *l = &c->layers[i];
        if (m->layers[i].reach != reach) continue;
        for (h = 0; h < m->n_kv_heads; h++) {
            memcpy(kvc__k_piece(c, i, h, to), kvc__k_piece(c, i, h, from),
                whole * kvc__kv_row(l->type_k, m->head_dim));
            memcpy(kvc__v_piece(c, i, h, to), kvc__v_piece(c, i, h, from),
                whole * kvc__kv_row(l->type_v, c->v_stride));
        }
    }
    for (i = whole; i < n; i++) kvc__position_move(c, reach, from, i, to, i);
}

/* ---- places ---- */

#define KVC__MAX_SLOTS (1u << 30)   /* with a policy, a sequence ends here at last */

/* Or where the model has no more vectors for positions. */
static uint32_t kvc__max_slots(const kvc_cache *c)
{
    const kvc__matrix *w = &c->desc.model->pos_embd;
    return w->data != NULL && w->n_out < KVC__MAX_SLOTS ? w->n_out : KVC__MAX_SLOTS;
}

static kvc__extent *kvc__seq_last(const kvc_seq *s)
{
    return &s->extents[s->n_extents - 1];
}

/* The number in the rings of the page that a slot lies in. */
static uint32_t kvc__page_of(const kvc_cache *c, const kvc__extent *t, uint32_t slot)
{
    return t->page + (slot >> c->page_shift) - (t->slot >> c->page_shift);
}

/* The slot of a position; pos may be the next one. */
static uint32_t kvc__slot_of(const kvc_seq *s, uint32_t pos, uint32_t *extent)
{
    const kvc__extent *t = s->extents;
    for (*extent = 0; *extent + 1 < s->n_extents; ++*extent, t++) {
        if (pos < t->end - t->slot) break;
        pos -= t->end - t->slot;
    }
    return t->slot + pos;
}

/* The page of a position. */
static uint32_t kvc__page_at(const kvc_seq *s, uint32_t pos)
{
    uint32_t extent, slot = kvc__slot_of(s, pos, &extent);
    return kvc__page_of(s->cache, &s->extents[extent], slot);
}

/* The first position that lies in page `page` or after it. */
static uint32_t kvc__pos_of_page(const kvc_seq *s, uint32_t page)
{
    const kvc_cache *c = s->cache;
    const kvc__extent *t = s->extents;
    uint32_t pos = 0, i;
    for (i = 0; i + 1 < s->n_extents && kvc__page_of(c, t, t->end - 1) < page; i++, t++)
        pos += t->end - t->slot;
    if (page <= t->page) return pos;
    return pos + ((page - t->page + (t->slot >> c->page_shift)) << c->page_shift) - t->slot;
}

/* Where the token of a slot is kept. */
static kvc_token *kvc__token_of(const kvc_seq *s, const kvc__extent *t, uint32_t slot)
{
    const kvc_cache *c = s->cache;
    uint32_t page = kvc__page_of(c, t, slot);
    page = kvc__ring_at(&s->rings[c->token_reach], page);
    return kvc__page_tokens(c, page) + (slot & (c->desc.page_size - 1));
}

/* The same for a position; NULL if its page was given back. */
static kvc_token *kvc__token_at(const kvc_seq *s, uint32_t pos)
{
    uint32_t i, slot = kvc__slot_of(s, pos, &i);
    if (kvc__page_of(s->cache, &s->extents[i], slot) < s->rings[s->cache->token_reach].first)
        return NULL;
    return kvc__token_of(s, &s->extents[i], slot);
}

/* Where the turns of a layer's rope lie in those of a sequence. */
static size_t kvc__turns_place(const kvc_cache *c, uint32_t rope)
{
    if (rope == KVC__NO_ROPE) return 0;
    return (size_t)rope * (c->desc.n_cuts + 1) * 2 * c->desc.model->rope_dim;
}

/* Writes down the gaps and turns of all extents anew. */
static void kvc__seq_measure(kvc_seq *s)
{
    const kvc_cache *c = s->cache;
    const kvc_model *m = c->desc.model;
    uint32_t i, rope, n = s->n_extents, pos = 0;
    for (i = 0; i < n; i++) {
        kvc__extent *t = &s->extents[i];
        t->gap = t->slot - pos;
        pos += t->end - t->slot;
    }
    s->n_pos = pos;
    for (i = 0; i < n; i++) {
        kvc__extent *t = &s->extents[i];
        t->gap = s->extents[n - 1].gap - t->gap;
        for (rope = 0; i + 1 < n && m->rope_dim != 0 && rope < m->n_ropes; rope++)
            kvc__rope_turn(m, kvc__rope_freq(m, c->rope_set, rope), -(double)t->gap, 1.0f,
                s->turns + kvc__turns_place(c, rope) + (size_t)i * 2 * m->rope_dim);
    }
    s->extents[n - 1].gap = 0;
}

/* ---- a step's pages ---- */

/* Pages of a full sequence. */
static uint32_t kvc__ctx_pages(const kvc_cache *c)
{
    return (c->desc.n_ctx + c->desc.page_size - 1) >> c->page_shift;
}

/* The first page that must stay: of the window of the next position, and of those that a roll-back
   may lead to. */
static uint32_t kvc__first_kept(const kvc_seq *s, const kvc__pool *pool)
{
    uint64_t back = (uint64_t)pool->window - 1 + s->cache->desc.n_back;
    if (pool->window == 0 || s->n_pos <= back) return 0;
    return kvc__page_at(s, s->n_pos - (uint32_t)back);
}

/* Most pages that the sequence can hold at once. */
static uint32_t kvc__ring_most(const kvc_seq *s, const kvc__pool *pool)
{
    uint32_t most = s->policy == KVC_POLICY_GROW ? pool->window_pages : pool->ring_cap;
    return most == UINT32_MAX ? most : most + kvc__pages_spare(s->n_extents);
}

/* Rows that fit before another page would be one too many for n_ctx; may be negative. */
static int64_t kvc__seq_room(const kvc_seq *s)
{
    const kvc_cache *c = s->cache;
    const kvc__extent *t = kvc__seq_last(s);
    int64_t pages = (int64_t)s->extents[0].page + kvc__ctx_pages(c) - t->page;
    return (pages + (t->slot >> c->page_shift)) * c->desc.page_size - t->end;
}

/* Pages of what KVC_POLICY_HEAVY keeps. */
static uint32_t kvc__heavy_pages(const kvc_seq *s)
{
    return kvc__pages_for(&s->cache->desc, s->n_keep + s->n_heavy);
}

/* kvc__ring_need with KVC_POLICY_HEAVY, where n positions take `need` pages: what was chosen must
   lie in pages of its own, and pages that are given back are used again if nobody holds them. */
static uint32_t kvc__heavy_need(const kvc_seq *s, uint32_t reach, uint32_t need, uint32_t n)
{
    const kvc__pool *pool = &s->cache->pools[reach];
    const kvc__ring *ring = &s->rings[reach];
    const uint32_t held = ring->end - ring->first, ctx = kvc__ctx_pages(s->cache);
    uint32_t i, most = ctx > held ? ctx - held : 0, front = kvc__heavy_pages(s);
    if ((int64_t)n <= kvc__seq_room(s)) return need;
    for (i = ring->first; i < ring->end; i++) {
        if (kvc__ring_writable(pool, ring, i, 0)) continue;
        most++;
        need += i - ring->first < front;
    }
    return need < most ? need : most;
}

/* Pages that the ring must find free for n more positions, which may be computed in chunks. What is
   given back on the way is used again, if nobody else holds it. */
static uint32_t kvc__ring_need(const kvc_seq *s, uint32_t reach, uint32_t n)
{
    const kvc_cache *c = s->cache;
    const kvc__pool *pool = &c->pools[reach];
    const kvc__ring *ring = &s->rings[reach];
    const kvc__extent *t = kvc__seq_last(s);
    uint32_t last = kvc__page_of(c, t, t->end), alone = 0, i, need, most;
    need = kvc__page_of(c, t, t->end + n - 1) + 1;
    need = need > ring->end ? need - ring->end : 0;
    need += last < ring->end &&
        !kvc__ring_writable(pool, ring, last, t->end & (c->desc.page_size - 1));
    if (pool->window == 0 && s->policy == KVC_POLICY_HEAVY)
        return kvc__heavy_need(s, reach, need, n);
    if (need == 0 || (pool->window == 0 && s->policy != KVC_POLICY_WINDOW)) return need;
    most = kvc__ring_most(s, pool);
    if (s->policy == KVC_POLICY_WINDOW && most > kvc__ctx_pages(c)) most = kvc__ctx_pages(c);
    for (i = ring->first; i < ring->end; i++) alone += (uint32_t)kvc__ring_alone(pool, ring, i);
    return need < most - alone ? need : most - alone;
}

/* The most rows of a chunk, for which rings have room. */
static uint32_t kvc__seq_chunk(const kvc_seq *s, uint32_t n_batch)
{
    const kvc_cache *c = s->cache;
    uint32_t i;
    for (i = 0; i < c->desc.model->n_reaches; i++)
        if (c->pools[i].window != 0 && n_batch > c->desc.n_batch) return c->desc.n_batch;
    return n_batch;
}

/* Whether two pages are left beside what the policy keeps: then there is always one to go. */
static int kvc__seq_can_slide(const kvc_seq *s)
{
    const kvc_cache *c = s->cache;
    const kvc__extent *t = kvc__seq_last(s);
    uint32_t page;
    if (s->n_keep == 0) return 1;
    if (s->n_keep <= s->n_pos) page = kvc__page_at(s, s->n_keep - 1);
    else page = kvc__page_of(c, t, t->end + (s->n_keep - s->n_pos) - 1);
    return page - s->extents[0].page + 3 <= kvc__ctx_pages(c);
}

/* ---- the prefix table at work; the lock is held ---- */

static void kvc__prefix_none(kvc_seq *s)
{
    s->salt = KVC__NONE;
    s->tail = KVC__NONE;
    s->depth = 0;
}

/* Another place in the table. */
static void kvc__prefix_move(kvc_seq *s, uint32_t tail, uint32_t depth)
{
    kvc__table *t = &s->cache->table;
    const uint32_t old = s->tail;
    if (tail != KVC__NONE) t->entries[tail].refs++;
    s->tail = tail;
    s->depth = depth;
    if (old == KVC__NONE) return;
    t->entries[old].refs--;
    kvc__entry_drop(t, old);
}

static void kvc__prefix_leave(kvc_seq *s)
{
    if (s->salt == KVC__NONE) return;
    kvc__prefix_move(s, KVC__NONE, 0);
    s->cache->table.salts[s->salt].n_seqs--;
    kvc__prefix_none(s);
}

/* A prefill by this engine: another than its K and V in the table are from ends the sequence's
   part, when the step is done. */
static void kvc__prefix_engine(kvc_seq *s, kvc_gemm gemm)
{
    const kvc_cache *c = s->cache;
    s->is_foreign = s->salt != KVC__NONE && c->desc.model->has_floats &&
        c->table.salts[s->salt].gemm != (uint32_t)gemm;
}

static void kvc__prefix_join(kvc_seq *s, uint32_t salt, uint32_t priority, uint32_t ttl)
{
    s->salt = salt;
    s->priority = priority;
    s->ttl = ttl;
    s->miss = KVC_MISS_NONE;
}

/* The sequence is `length` long now. */
static void kvc__prefix_back(kvc_seq *s, uint32_t length)
{
    const uint32_t depth = length >> s->cache->page_shift;
    while (s->salt != KVC__NONE && s->depth > depth)
        kvc__prefix_move(s, s->cache->table.entries[s->tail].parent, s->depth - 1);
}

/* Whether a position of the sequence is what a cold run would have. */
static int kvc__prefix_whole(const kvc_seq *s)
{
    return s->salt != KVC__NONE && !s->is_foreign && s->n_extents == 1 &&
        s->extents[0].slot == 0 && s->extents[0].page == 0 && s->n_marked == 0;
}

static uint64_t kvc__cache_now(const kvc_cache *c)
{
    return c->desc.now != NULL ? c->desc.now(c->desc.user) : (uint64_t)time(NULL);
}

/* Raises an entry's priority; those of its pages that are on a shelf go to another. */
static void kvc__entry_raise(kvc_cache *c, uint32_t entry, uint32_t priority)
{
    kvc__entry *e = &c->table.entries[entry];
    uint32_t i, page[KVC_MAX_REACHES];
    if (e->priority >= priority) return;
    for (i = 0; i < c->table.n_reaches; i++) {
        page[i] = *kvc__entry_page(&c->table, entry, i);
        if (page[i] != KVC__NONE && *kvc__page_refs(&c->pools[i], page[i]) != 0)
            page[i] = KVC__NONE;
        if (page[i] != KVC__NONE) kvc__shelf_remove(&c->pools[i], page[i]);
    }
    e->priority = priority;
    for (i = 0; i < c->table.n_reaches; i++)
        if (page[i] != KVC__NONE) kvc__shelf_add(&c->pools[i], page[i]);
}

/* The sequence uses an entry. */
static void kvc__entry_use(const kvc_seq *s, uint32_t entry)
{
    kvc__entry *e = &s->cache->table.entries[entry];
    kvc__entry_raise(s->cache, entry, s->priority);
    if (s->ttl == 0) {
        e->expires = 0;
    } else if (e->expires != 0) {
        uint64_t until = kvc__cache_now(s->cache) + s->ttl;
        if (until > e->expires) e->expires = until;
    }
}

/* Forgets all pages of an entry, and with them the entry, if it has no children. */
static void kvc__entry_forget(kvc_cache *c, uint32_t entry)
{
    uint32_t i, page;
    for (i = 0; i < c->table.n_reaches; i++) {
        page = *kvc__entry_page(&c->table, entry, i);
        if (page != KVC__NONE) kvc__page_detach(&c->pools[i], page);
    }
    kvc__entry_drop(&c->table, entry);
}

static int kvc__entry_held(const kvc_cache *c, uint32_t entry)
{
    uint32_t i, page;
    if (kvc__entry_fixed(&c->table, entry)) return 1;
    for (i = 0; i < c->table.n_reaches; i++) {
        page = *kvc__entry_page(&c->table, entry, i);
        if (page != KVC__NONE && *kvc__page_refs(&c->pools[i], page) != 0) return 1;
    }
    return 0;
}

/* Lets entries go that only wait for their page to be put out. */
static void kvc__entries_part(kvc_cache *c)
{
    uint32_t i, k;
    for (i = 0; i < c->table.n_reaches && c->table.can_put; i++) {
        kvc__pool *pool = &c->pools[i];
        for (k = 0; k < pool->n_free; k++)
            if (kvc__page_keep(pool, pool->free_pages[k])->parting != KVC__NONE)
                kvc__page_parted(pool, pool->free_pages[k]);
    }
}

/* A new entry for the sequence below `parent`; KVC__NONE if there is no room for it. */
static uint32_t kvc__entry_make(kvc_seq *s, uint32_t parent)
{
    kvc_cache *c = s->cache;
    uint32_t i, entry;
    for (i = 0; i < c->table.n_reaches && c->table.n_free == 0;)
        if (!kvc__pool_evict(&c->pools[i], 0)) i++;
    if (c->table.n_free == 0) kvc__entries_part(c);
    if (c->table.n_free == 0) return KVC__NONE;
    entry = kvc__entry_take(&c->table, parent);
    c->table.entries[entry].priority = s->priority;
    if (s->ttl != 0) {
        c->table.entries[entry].expires = kvc__cache_now(c) + s->ttl;
        c->table.can_expire = 1;
    }
    return entry;
}

/* Page `number` of the sequence becomes the entry's, in every reach; where the entry has one, the
   sequence takes that and drops its own. */
static void kvc__entry_merge(kvc_seq *s, uint32_t number, uint32_t entry)
{
    kvc_cache *c = s->cache;
    const kvc__table *t = &c->table;
    uint32_t i, page, other, known;
    for (i = 0; i < t->n_reaches; i++) {
        kvc__ring *ring = &s->rings[i];
        if (number < ring->first || number >= ring->end) continue;
        page = kvc__ring_at(ring, number);
        other = *kvc__entry_page(&c->table, entry, i);
        known = kvc__page_entry(&c->pools[i], page);
        if (other == page) continue;
        if (known != KVC__NONE && kvc__entry_fixed(t, known)) {
            if (other == KVC__NONE) continue;
            known = KVC__NONE;          /* it stays what it is, with that page */
        }
        if (other != KVC__NONE && !kvc__page_can_hold(&c->pools[i], other) &&
            !kvc__ring_alone(&c->pools[i], ring, number)) continue;
        if (known != KVC__NONE) kvc__page_detach(&c->pools[i], page);
        if (other == KVC__NONE) {
            kvc__page_attach(&c->pools[i], page, entry);
        } else {
            kvc__leaf *leaf = kvc__leaf_own(&c->pools[i], ring, number);
            kvc__page_hold(&c->pools[i], other);
            leaf->pages[number % KVC__LEAF_PAGES] = other;
            kvc__page_drop(&c->pools[i], page);
        }
        if (known != KVC__NONE) kvc__entry_drop(&c->table, known);
    }
}

/* The entry that knows page `number` of the sequence as its own text so far; KVC__NONE: none. */
static uint32_t kvc__prefix_own(const kvc_seq *s, uint32_t number)
{
    const kvc_cache *c = s->cache;
    const kvc__ring *ring = &s->rings[c->token_reach];
    if (number < ring->first || number >= ring->end) return KVC__NONE;
    return kvc__page_entry(&c->pools[c->token_reach], kvc__ring_at(ring, number));
}

/* Enters the next whole page. 0: there is no room. */
static int kvc__prefix_enter_page(kvc_seq *s)
{
    kvc_cache *c = s->cache;
    kvc__table *t = &c->table;
    const kvc__ring *ring = &s->rings[c->token_reach];
    uint32_t own = kvc__prefix_own(s, s->depth), entry;
    const kvc_token *text;
    uint64_t key[2];
    if (s->depth < ring->first) return 0;
    text = kvc__page_tokens(c, kvc__ring_at(ring, s->depth));
    kvc__page_key(t, t->entries[s->tail].key, text, key);
    entry = kvc__table_find(t, s->tail, key, text);
    if (entry == KVC__NONE) {
        if (own != KVC__NONE && t->entries[own].n_tokens < t->page_size &&
            t->entries[own].parent == s->tail) {
            kvc__entry_unset(t, own);
            entry = own;
        } else {
            entry = kvc__entry_make(s, s->tail);
        }
        if (entry == KVC__NONE) return 0;
        kvc__entry_set(t, entry, text, t->page_size, key);
    }
    kvc__entry_use(s, entry);
    kvc__entry_merge(s, s->depth, entry);
    kvc__prefix_move(s, entry, s->depth + 1);
    return 1;
}

/* Enters the last page, which is not whole, and takes out one that says the beginning of the
   same. */
static void kvc__prefix_enter_end(kvc_seq *s)
{
    kvc_cache *c = s->cache;
    kvc__table *t = &c->table;
    const uint32_t n = s->n_pos & (t->page_size - 1);
    uint32_t own, near, run = 0;
    const kvc_token *text;
    if (n == 0 || !kvc__prefix_whole(s) || s->depth != s->n_pos >> c->page_shift) return;
    own = kvc__prefix_own(s, s->depth);
    if (own != KVC__NONE && t->entries[own].n_tokens >= n) return;
    text = kvc__page_tokens(c, kvc__ring_at(&s->rings[c->token_reach], s->depth));
    if (own != KVC__NONE) kvc__entry_unset(t, own);
    near = kvc__kids_nearest(t, s->tail, text, n);
    if (near != KVC__NONE) run = kvc__entry_run(t, near, text, n);
    if (run == n) {
        kvc__entry_use(s, near);
        if (own == KVC__NONE) return;
        kvc__entry_set(t, own, text, t->entries[own].n_tokens, NULL);
        if (!kvc__entry_fixed(t, own)) kvc__entry_forget(c, own);
        return;
    }
    if (near != KVC__NONE && t->entries[near].n_tokens == run && !kvc__entry_held(c, near))
        kvc__entry_forget(c, near);
    if (own == KVC__NONE) own = kvc__entry_make(s, s->tail);
    if (own == KVC__NONE) return;
    kvc__entry_set(t, own, text, n, NULL);
    kvc__entry_use(s, own);
    kvc__entry_merge(s, s->depth, own);
}

/* Whether the next n tokens may be taken from the table. */
static int kvc__prefix_can_take(const kvc_seq *s, uint32_t n)
{
    const kvc_cache *c = s->cache;
    if (!kvc__prefix_whole(s) || s->policy == KVC_POLICY_HEAVY ||
        s->depth != s->n_pos >> c->page_shift) return 0;
    return s->policy != KVC_POLICY_WINDOW || s->n_pos + n <= kvc__ctx_pages(c) << c->page_shift;
}

/* What a look-up found. */
typedef struct kvc__hit {
    uint32_t n_pos;                     /* positions that the sequence would have */
    uint32_t tail, depth;               /* its last whole page then */
    uint32_t first[KVC_MAX_REACHES];    /* the pages to be held: from here to that of position */
                                        /* n_pos - 1 */
    kvc_miss miss;
} kvc__hit;

#define KVC__LOOK_AHEAD 8u

/* The walk of a look-up. */
typedef struct kvc__walker {
    const kvc_seq *s;
    const kvc_token *tokens;            /* [n], to follow the sequence's own */
    uint32_t n, most;                   /* positions that may be taken over in all */
    uint32_t entry, depth;
    uint32_t since[KVC_MAX_REACHES];    /* pages are there from here on */
    int ended;                          /* one is missing in layers that see everything */
    uint64_t now;                       /* 0: no page in the table can expire */
    kvc_token text[KVC__SPAN];          /* of the page in question */
    uint64_t keys[KVC__LOOK_AHEAD][2];  /* of n_keys pages from first_key on */
    uint32_t first_key, n_keys;
} kvc__walker;

static void kvc__walk_start(kvc__walker *w, const kvc_seq *s, const kvc_token *tokens, uint32_t n,
    uint32_t most)
{
    w->s = s;
    w->tokens = tokens;
    w->n = n;
    w->most = s->n_pos + most;
    w->entry = s->tail;
    w->depth = s->depth;
    w->n_keys = w->first_key = 0;
    w->ended = 0;
    w->now = s->cache->table.can_expire ? kvc__cache_now(s->cache) : 0;
}

/* Whether an entry has outlived its time. */
static int kvc__walk_expired(const kvc__walker *w, uint32_t entry)
{
    const uint64_t expires = w->s->cache->table.entries[entry].expires;
    return w->now != 0 && expires != 0 && expires <= w->now;
}

/* Fills in the text of page w->depth; returns its tokens. */
static uint32_t kvc__walk_text(kvc__walker *w)
{
    const kvc_cache *c = w->s->cache;
    const uint32_t size = c->desc.page_size, start = w->depth * size, end = w->s->n_pos;
    uint32_t own = start < end ? end - start : 0, from = start + own - end, n;
    if (own != 0)
        memcpy(w->text, kvc__page_tokens(c, kvc__ring_at(&w->s->rings[c->token_reach], w->depth)),
            own * sizeof *w->text);
    n = w->n - from < size - own ? w->n - from : size - own;
    memcpy(w->text + own, w->tokens + from, n * sizeof *w->text);
    return own + n;
}

/* The key of page w->depth, whose text is w->text. Keys depend on tokens alone, so those of the
   pages that follow are computed, too, and what they lead to is asked for before it is needed. */
static const uint64_t *kvc__walk_key(kvc__walker *w)
{
    const kvc__table *t = &w->s->cache->table;
    const uint32_t size = t->page_size;
    const uint64_t *parent = t->entries[w->entry].key;
    uint32_t i, entry;
    if (w->depth - w->first_key < w->n_keys) return w->keys[w->depth - w->first_key];
    w->first_key = w->depth;
    for (i = 0; i < KVC__LOOK_AHEAD; i++) {
        const uint32_t start = (w->depth + i) * size;
        if (start + size > w->s->n_pos + w->n) break;
        kvc__page_key(t, parent, i == 0 ? w->text : w->tokens + (start - w->s->n_pos),
            w->keys[i]);
        parent = w->keys[i];
        kvc__prefetch(&t->buckets[parent[0] & t->mask]);
    }
    w->n_keys = i;
    for (i = 0; i < w->n_keys; i++) {
        entry = t->buckets[w->keys[i][0] & t->mask];
        if (entry == KVC__NONE) break;
        kvc__prefetch(&t->entries[entry]);
        kvc__prefetch((const char *)&t->entries[entry] + 64);
        kvc__prefetch(kvc__entry_text(t, entry));
        kvc__prefetch(kvc__entry_text(t, entry) + 16);
        kvc__prefetch(kvc__entry_page(t, entry, 0));
    }
    return w->keys[0];
}

/* The first page that going on behind n positions needs: of the window, and of those that a
   roll-back may lead to. */
static uint32_t kvc__hit_first(const kvc_cache *c, uint32_t reach, uint32_t n)
{
    const uint32_t window = c->pools[reach].window;
    const uint64_t back = (uint64_t)window - 1 + c->desc.n_back;
    return window == 0 || n <= back ? 0 : (n - (uint32_t)back) >> c->page_shift;
}

/* Page w->depth has `run` tokens in common with an entry below w->entry. */
static void kvc__walk_note(kvc__walker *w, uint32_t entry, uint32_t run, kvc__hit *hit)
{
    const kvc_cache *c = w->s->cache;
    const uint32_t size = c->desc.page_size;
    uint32_t n = w->depth * size + run, i, first[KVC_MAX_REACHES];
    int there = 1;
    if (n > w->most) n = w->most;
    for (i = 0; i < c->table.n_reaches; i++) {
        if (*kvc__entry_page(&c->table, entry, i) == KVC__NONE) w->since[i] = w->depth + 1;
        if (c->pools[i].window == 0 && w->since[i] != 0) w->ended = 1;
        first[i] = kvc__hit_first(c, i, n);
        if (first[i] < w->since[i]) there = 0;
    }
    if (w->ended) hit->miss = KVC_MISS_EVICTED;
    if (n <= w->s->n_pos || w->ended) return;
    if (!there) hit->miss = KVC_MISS_WINDOW;
    if (!there) return;
    if (hit->miss != KVC_MISS_EVICTED) hit->miss = KVC_MISS_ABSENT;
    hit->n_pos = n;
    hit->depth = n >> c->page_shift;
    hit->tail = hit->depth > w->depth ? entry : w->entry;
    memcpy(hit->first, first, sizeof first);
}

/* Finds how much of the tokens that are to follow is there, `most` of them. */
static void kvc__prefix_find(const kvc_seq *s, const kvc_token *tokens, uint32_t n, uint32_t most,
    kvc__hit *hit)
{
    kvc__table *t = &s->cache->table;
    kvc__walker w;
    uint32_t i, size, entry, run;
    kvc__walk_start(&w, s, tokens, n, most);
    hit->n_pos = s->n_pos;
    hit->miss = KVC_MISS_ABSENT;
    for (i = 0; i < t->n_reaches; i++) w.since[i] = s->rings[i].first;
    while (w.depth * t->page_size < w.most) {
        size = kvc__walk_text(&w);
        entry = KVC__NONE;
        run = size;
        if (size == t->page_size) {
            const uint64_t *key = kvc__walk_key(&w);
            entry = kvc__table_find(t, w.entry, key, w.text);
            if (entry == KVC__NONE && t->graves[key[0] & t->mask] == kvc__grave_mark(key))
                hit->miss = KVC_MISS_EVICTED;
        }
        if (entry == KVC__NONE) {
            entry = kvc__kids_nearest(t, w.entry, w.text, size);
            if (entry == KVC__NONE) break;
            run = kvc__entry_run(t, entry, w.text, size);
        }
        if (kvc__walk_expired(&w, entry)) {
            hit->miss = KVC_MISS_EVICTED;
            break;
        }
        t->entries[w.entry].path = entry;
        kvc__walk_note(&w, entry, run, hit);
        if (run < t->page_size || w.ended) break;
        w.entry = entry;
        w.depth++;
    }
    if (hit->n_pos == w.most) hit->miss = KVC_MISS_NONE;
}

/* The page of a hit after that of `entry`, which becomes its own. */
static uint32_t kvc__hit_next(const kvc_seq *s, uint32_t *entry, uint32_t reach)
{
    const kvc__table *t = &s->cache->table;
    *entry = t->entries[*entry].path;
    return *kvc__entry_page(t, *entry, reach);
}

/* Pages that the sequence needs beside those of a hit, for positions up to `end`; *taken: those of
   the hit that are on a shelf. */
static uint32_t kvc__hit_need(const kvc_seq *s, uint32_t reach, const kvc__hit *hit, uint32_t end,
    uint32_t *taken)
{
    const kvc_cache *c = s->cache;
    const kvc__pool *pool = &c->pools[reach];
    const uint32_t size = c->desc.page_size, last = (hit->n_pos - 1) / size;
    uint32_t need = (end - 1) / size - last + (hit->n_pos % size != 0), number, page;
    uint32_t entry = s->tail;
    *taken = 0;
    for (number = s->depth; number <= last; number++) {
        page = kvc__hit_next(s, &entry, reach);
        if (number >= hit->first[reach]) *taken += *kvc__page_refs(pool, page) == 0;
    }
    return need < kvc__ring_most(s, pool) ? need : kvc__ring_most(s, pool);
}

/* Puts a hit's pages, which are held, into a ring. */
static void kvc__hit_ring(kvc_seq *s, uint32_t reach, const kvc__hit *hit)
{
    kvc__pool *pool = &s->cache->pools[reach];
    kvc__ring *ring = &s->rings[reach];
    const uint32_t last = (hit->n_pos - 1) >> s->cache->page_shift, first = hit->first[reach];
    uint32_t number, entry = s->tail, page;
    if (first > s->depth || ring->end == ring->first) {
        kvc__ring_clear(pool, ring);
        ring->first = ring->end = first;
    } else {
        kvc__ring_trim(pool, ring, s->depth);
        while (ring->first < first) kvc__ring_drop(pool, ring, 0);
    }
    for (number = s->depth; number <= last; number++) {
        page = kvc__hit_next(s, &entry, reach);
        if (number >= first) kvc__ring_push(pool, ring, page);
    }
}

/* The sequence goes on from the end of the hit. Its pages are held before others are let go, which
   may take pages off the shelves. */
static void kvc__hit_take(kvc_seq *s, const kvc__hit *hit)
{
    kvc_cache *c = s->cache;
    const uint32_t last = (hit->n_pos - 1) >> c->page_shift;
    uint32_t i, entry, page, number;
    for (i = 0; i < c->table.n_reaches; i++) {
        for (entry = s->tail, number = s->depth; number <= last; number++) {
            page = kvc__hit_next(s, &entry, i);
            if (number >= hit->first[i]) kvc__page_hold(&c->pools[i], page);
        }
    }
    for (entry = s->tail, number = s->depth; number <= last; number++) {
        kvc__hit_next(s, &entry, 0);
        kvc__entry_use(s, entry);
    }
    for (i = 0; i < c->table.n_reaches; i++) kvc__hit_ring(s, i, hit);
    s->n_hit = hit->n_pos - s->n_pos;
    s->n_pos = s->extents[0].end = hit->n_pos;
    kvc__prefix_move(s, hit->tail, hit->depth);
}

/* ---- the second tier ----
   A parcel is a head, the message of the root (filled up with zeros to whole words), the tokens of
   the page, those of the page before and so on up to the first one's, then the pieces of the page's
   rows as they lie in memory, then a keyed hash of all that. Whoever asks for a page knows all of
   it but rows and hash, and compares it; the hash is that of what has arrived, so nobody can change
   it in between. The host is called without the lock. */
#define KVC__PARCEL_MAGIC 0x1a0a0d706572766bu   /* "kvrep", then what a text transfer would break */
#define KVC__PARCEL_VERSION 1u

typedef struct kvc__parcel_head {
    uint64_t magic;
    uint32_t version, reach;
    uint64_t key[2];
    uint64_t size;                      /* of all */
    uint32_t n_tokens, root_size;
} kvc__parcel_head;                     /* 48 bytes */

/* A page that is put or got. */
typedef struct kvc__parcel {
    uint32_t parent;                    /* its entry's, which stays */
    const kvc_token *text;              /* [page_size] */
    const uint64_t *key;
    uint32_t reach;
    unsigned char *to;                  /* one of the two: what comes next goes here, */
    const unsigned char *from;          /* or is compared with this */
    int equal;                          /* so far */
    kvc__sip hash;
} kvc__parcel;

static void kvc__tier_key(unsigned char out[KVC_TIER_KEY], const uint64_t key[2], uint32_t reach)
{
    memcpy(out, key, 16);
    memcpy(out + 16, &reach, 4);
}

/* size: a multiple of 8 */
static void kvc__parcel_pass(kvc__parcel *p, const void *data, size_t size)
{
    kvc__sip_add(&p->hash, data, size);
    if (p->to != NULL) {
        memcpy(p->to, data, size);
        p->to += size;
    } else {
        p->equal &= memcmp(p->from, data, size) == 0;
        p->from += size;
    }
}

/* What sets the page apart. size: the bytes that there are, or 0 to find out. Returns the bytes of
   the parcel; if it is not `size`, nothing was passed. */
static size_t kvc__parcel_start(kvc__parcel *p, const kvc_cache *c, size_t size)
{
    const kvc__table *t = &c->table;
    const kvc_model *m = c->desc.model;
    const uint32_t root = t->entries[p->parent].root;
    unsigned char message[KVC__MAX_ROOT];
    kvc__parcel_head head;
    uint64_t bytes;
    uint32_t i;
    memset(&head, 0, sizeof head);
    memset(message, 0, sizeof message);
    head.magic = KVC__PARCEL_MAGIC;
    head.version = KVC__PARCEL_VERSION;
    head.reach = p->reach;
    memcpy(head.key, p->key, sizeof head.key);
    head.n_tokens = t->page_size;
    for (i = p->parent; i != root; i = t->entries[i].parent) head.n_tokens += t->page_size;
    head.root_size = (kvc__root_message(&t->salts[root], c->store, message) + 7u) & ~7u;
    bytes = sizeof head + head.root_size + (uint64_t)head.n_tokens * sizeof *p->text + 16;
    for (i = 0; i < m->n_layers; i++)
        if (m->layers[i].reach == p->reach)
            bytes += (uint64_t)m->n_kv_heads * (c->layers[i].k_piece + c->layers[i].v_piece);
    head.size = bytes;
    if (bytes > SIZE_MAX || bytes != size) return bytes > SIZE_MAX ? 0 : (size_t)bytes;
    p->equal = 1;
    kvc__sip_start(&p->hash, t->key);
    kvc__parcel_pass(p, &head, sizeof head);
    kvc__parcel_pass(p, message, head.root_size);
    kvc__parcel_pass(p, p->text, t->page_size * sizeof *p->text);
    for (i = p->parent; i != root; i = t->entries[i].parent)
        kvc__parcel_pass(p, kvc__entry_text(t, i), t->page_size * sizeof *p->text);
    return size;
}

static void kvc__piece_pass(kvc__parcel *p, unsigned char *piece, size_t size)
{
    if (p->from != NULL) memcpy(piece, p->from, size);
    kvc__parcel_pass(p, piece, size);
}

/* The rest. Returns whether all is as it was put. */
static int kvc__parcel_end(kvc__parcel *p, const kvc_cache *c, uint32_t page)
{
    const kvc_model *m = c->desc.model;
    uint64_t hash[2];
    uint32_t layer, head;
    for (layer = 0; layer < m->n_layers; layer++) {
        if (m->layers[layer].reach != p->reach) continue;
        for (head = 0; head < m->n_kv_heads; head++) {
            kvc__piece_pass(p, kvc__k_piece(c, layer, head, page), c->layers[layer].k_piece);
            kvc__piece_pass(p, kvc__v_piece(c, layer, head, page), c->layers[layer].v_piece);
        }
    }
    kvc__sip_end(&p->hash, NULL, 0, hash);
    if (p->to != NULL) memcpy(p->to, hash, sizeof hash);
    else p->equal &= memcmp(p->from, hash, sizeof hash) == 0;
    return p->equal;
}

/* Puts a page out that was, or is, the entry's; neither changes meanwhile. Returns whether the tier
   has it. */
static int kvc__tier_put(kvc_cache *c, uint32_t entry, uint32_t reach, uint32_t page)
{
    const kvc_tier *tier = &c->desc.tier;
    unsigned char key[KVC_TIER_KEY];
    kvc_parcel parcel;
    kvc__parcel p;
    memset(&parcel, 0, sizeof parcel);
    memset(&p, 0, sizeof p);
    p.parent = c->table.entries[entry].parent;
    p.text = kvc__entry_text(&c->table, entry);
    p.key = c->table.entries[entry].key;
    p.reach = reach;
    kvc__tier_key(key, p.key, reach);
    parcel.size = kvc__parcel_start(&p, c, 0);
    if (parcel.size == 0 || !tier->put(key, &parcel, tier->user)) return 0;
    if (parcel.data == NULL) return 1;
    p.to = (unsigned char *)parcel.data;
    kvc__parcel_start(&p, c, parcel.size);
    kvc__parcel_end(&p, c, page);
    tier->put_done(key, &parcel, tier->user);
    return 1;
}

/* Puts out what a page was that is now the caller's. */
static void kvc__page_leave(kvc_cache *c, uint32_t reach, uint32_t page)
{
    kvc__pool *pool = &c->pools[reach];
    uint32_t entry;
    int put;
    if (!c->table.can_put) return;
    entry = kvc__page_keep(pool, page)->parting;
    if (entry == KVC__NONE) return;
    put = kvc__tier_put(c, entry, reach, page);
    kvc__lock_enter(&c->lock);
    c->table.n_put += (uint64_t)put;
    kvc__page_parted(pool, page);
    kvc__lock_leave(&c->lock);
}

/* The same for the pages of a ring from number `from` on. */
static void kvc__ring_leave(kvc_cache *c, const kvc__ring *ring, uint32_t reach, uint32_t from)
{
    for (; c->table.can_put && from < ring->end; from++)
        kvc__page_leave(c, reach, kvc__ring_at(ring, from));
}

/* Puts out a page that stays. Returns whether the tier has it, -1 if the page could not be guarded.
   The lock is held, but not on the way. */
static int kvc__tier_copy(kvc_cache *c, uint32_t reach, uint32_t page)
{
    kvc__pool *pool = &c->pools[reach];
    const uint32_t entry = kvc__page_entry(pool, page);
    int put;
    if (!kvc__page_guard(pool, entry)) return -1;
    kvc__lock_leave(&c->lock);
    put = kvc__tier_put(c, entry, reach, page);
    kvc__lock_enter(&c->lock);
    kvc__page_unguard(pool, entry);
    c->table.n_put += (uint64_t)put;
    if (put) c->table.entries[entry].out |= (uint32_t)1 << reach;
    return put;
}

/* Lets pages go until the table has n free entries, and puts them out before. The lock is held, but
   not on the way. */
static void kvc__tier_entries(kvc_cache *c, uint32_t n)
{
    uint32_t i, page, entry;
    for (i = 0; i < c->table.n_reaches && c->table.can_put; i++) {
        kvc__pool *pool = &c->pools[i];
        while (c->table.n_free < n && (page = kvc__pool_next(pool)) != KVC__NONE) {
            entry = kvc__page_entry(pool, page);
            if (kvc__page_due(pool, entry) && kvc__tier_copy(c, i, page) < 0) return;
            if (kvc__page_entry(pool, page) == entry && *kvc__page_refs(pool, page) == 0)
                kvc__page_evict(pool, page, 0);
        }
    }
}

/* Enters what was computed since, but for a page that is not whole. */
static void kvc__prefix_enter(kvc_seq *s)
{
    while (kvc__prefix_whole(s) && s->depth < s->n_pos >> s->cache->page_shift) {
        kvc__tier_entries(s->cache, 1);
        if (!kvc__prefix_enter_page(s)) break;
    }
}

static uint32_t kvc__tier_flush(kvc_cache *c, uint32_t most)
{
    uint32_t i, k, n = 0, entry;
    int put = 0;
    if (!c->table.can_put) return 0;
    kvc__lock_enter(&c->lock);
    for (i = 0; i < c->table.n_reaches && put >= 0; i++) {
        kvc__pool *pool = &c->pools[i];
        for (k = 0; k < pool->n_pages && put >= 0 && (most == 0 || n < most); k++) {
            const uint32_t page = pool->flushed++ % pool->n_pages;
            entry = kvc__page_entry(pool, page);
            if (entry == KVC__NONE || !kvc__page_due(pool, entry)) continue;
            put = kvc__tier_copy(c, i, page);
            n += put > 0;
        }
    }
    kvc__lock_leave(&c->lock);
    return n;
}

/* A page for one that comes in after the pages up to `entry`, of which those after `tail` are to
   stay; KVC__NONE if there is none. The lock is held. */
static uint32_t kvc__tier_room(kvc_cache *c, uint32_t reach, uint32_t entry, uint32_t tail)
{
    kvc__pool *pool = &c->pools[reach];
    uint32_t next;
    if (pool->n_free == 0) {
        next = kvc__pool_next(pool);
        if (next == KVC__NONE) return KVC__NONE;
        for (; entry != tail; entry = c->table.entries[entry].parent)
            if (entry == kvc__page_entry(pool, next)) return KVC__NONE;
    }
    return kvc__page_get(pool);
}

/* A page has come: an entry for it, or into the one that has none. The lock is held. */
static uint32_t kvc__tier_enter(kvc_seq *s, const kvc__parcel *p, uint32_t page)
{
    kvc_cache *c = s->cache;
    kvc__table *t = &c->table;
    uint32_t entry = kvc__table_find(t, p->parent, p->key, p->text);
    if (entry == KVC__NONE) {
        entry = kvc__entry_make(s, p->parent);
        if (entry == KVC__NONE) return KVC__NONE;
        kvc__entry_set(t, entry, p->text, t->page_size, p->key);
    }
    if (*kvc__entry_page(t, entry, p->reach) == KVC__NONE) {
        kvc__page_attach(&c->pools[p->reach], page, entry);
        t->entries[entry].out |= (uint32_t)1 << p->reach;
        t->n_got++;
    }
    return entry;
}

/* Gets a page, for a walk that has come to w->entry. Returns its entry; KVC__NONE if it does not
   come. The lock is held, but not on the way. */
static uint32_t kvc__tier_get(kvc_seq *s, const kvc__walker *w, kvc__parcel *p)
{
    kvc_cache *c = s->cache;
    const kvc_tier *tier = &c->desc.tier;
    unsigned char key[KVC_TIER_KEY];
    uint32_t page = KVC__NONE, entry = KVC__NONE;
    kvc_parcel parcel;
    int right = 0;
    memset(&parcel, 0, sizeof parcel);
    kvc__tier_key(key, p->key, p->reach);
    kvc__lock_leave(&c->lock);
    if (!tier->get(key, &parcel, tier->user)) {
        kvc__lock_enter(&c->lock);
        return KVC__NONE;
    }
    p->from = (const unsigned char *)parcel.data;
    right = p->from != NULL && kvc__parcel_start(p, c, parcel.size) == parcel.size && p->equal;
    kvc__lock_enter(&c->lock);
    if (right) page = kvc__tier_room(c, p->reach, w->entry, s->tail);
    kvc__lock_leave(&c->lock);
    if (page != KVC__NONE) {
        kvc__page_leave(c, p->reach, page);
        right = kvc__parcel_end(p, c, page);
        if (p->reach == c->token_reach)
            memcpy(kvc__page_tokens(c, page), p->text, c->desc.page_size * sizeof *p->text);
    }
    tier->get_done(key, &parcel, tier->user);
    kvc__lock_enter(&c->lock);
    c->table.n_refused += !right;
    if (page == KVC__NONE) return KVC__NONE;
    if (right) {
        kvc__tier_entries(c, 1);
        entry = kvc__tier_enter(s, p, page);
    }
    kvc__page_drop(&c->pools[p->reach], page);
    return entry;
}

#define KVC__TELL 64u               /* most keys that the tier is told at once */

static void kvc__tier_tell(kvc_cache *c, const unsigned char *keys, uint32_t n)
{
    if (c->desc.tier.ahead == NULL || n == 0) return;
    kvc__lock_leave(&c->lock);
    c->desc.tier.ahead(keys, n, c->desc.tier.user);
    kvc__lock_enter(&c->lock);
}

/* Tells the keys of the pages from w->depth on; returns the first page that was not told. */
static uint32_t kvc__tier_tell_text(kvc_cache *c, const kvc__walker *w)
{
    const kvc__table *t = &c->table;
    const uint32_t size = t->page_size;
    unsigned char keys[KVC__TELL * KVC_TIER_KEY];
    uint64_t key[2];
    uint32_t i, start;
    memcpy(key, t->entries[w->entry].key, sizeof key);
    for (i = 0; i < KVC__TELL; i++) {
        start = (w->depth + i) * size;
        if (start + size > w->s->n_pos + w->n || start >= w->most) break;
        kvc__page_key(t, key, i == 0 ? w->text : w->tokens + (start - w->s->n_pos), key);
        kvc__tier_key(keys + i * KVC_TIER_KEY, key, c->token_reach);
    }
    kvc__tier_tell(c, keys, i);
    return w->depth + i;
}

/* Pages before `end` that layers of a reach need for going on there: from which one on. */
static uint32_t kvc__tier_first(const kvc_seq *s, uint32_t reach, uint32_t end, uint32_t most)
{
    const kvc_cache *c = s->cache;
    const uint32_t n = end << c->page_shift < most ? end << c->page_shift : most;
    const uint32_t first = kvc__hit_first(c, reach, n);
    return first > s->depth ? first : s->depth;
}

/* Tells the keys of the pages of a reach that are lacking: `entry` is that of page end - 1. */
static void kvc__tier_tell_window(const kvc_seq *s, uint32_t reach, uint32_t first, uint32_t end,
    uint32_t entry)
{
    const kvc__table *t = &s->cache->table;
    unsigned char keys[KVC__TELL * KVC_TIER_KEY];
    uint32_t n = 0;
    for (; end > first && n < KVC__TELL; end--, entry = t->entries[entry].parent)
        if (*kvc__entry_page(t, entry, reach) == KVC__NONE)
            kvc__tier_key(keys + KVC_TIER_KEY * n++, t->entries[entry].key, reach);
    kvc__tier_tell(s->cache, keys, n);
}

/* Gets the pages of one other reach that going on at the end of *entry needs, the last first. Where
   one does not come, *entry and *end move before it, and 0 is returned. */
static int kvc__tier_window(kvc_seq *s, const kvc__walker *w, uint32_t reach, uint32_t *entry,
    uint32_t *end)
{
    const kvc__table *t = &s->cache->table;
    const uint32_t first = kvc__tier_first(s, reach, *end, w->most);
    uint32_t e = *entry, number = *end;
    kvc__parcel p;
    kvc__tier_tell_window(s, reach, first, number, e);
    for (; number > first; number--, e = t->entries[e].parent) {
        if (*kvc__entry_page(t, e, reach) != KVC__NONE) continue;
        memset(&p, 0, sizeof p);
        p.parent = t->entries[e].parent;
        p.text = kvc__entry_text(t, e);
        p.key = t->entries[e].key;
        p.reach = reach;
        if (kvc__tier_get(s, w, &p) != KVC__NONE) continue;
        *entry = p.parent;
        *end = number - 1;
        return 0;
    }
    return 1;
}

/* For the tokens that are to follow, up to `most` of them, gets those pages into the table that it
   lacks, as long as they come and have room. The entries on the way are kept by a reference to the
   last; their pages may go meanwhile, as any others. In the end they are let go anew, the last
   first. */
static void kvc__tier_fetch(kvc_seq *s, const kvc_token *tokens, uint32_t n, uint32_t most)
{
    kvc_cache *c = s->cache;
    kvc__table *t = &c->table;
    uint32_t entry, end, i, told = 0, page;
    kvc__walker w;
    kvc__parcel p;
    kvc__lock_enter(&c->lock);
    kvc__walk_start(&w, s, tokens, n, most);
    t->entries[w.entry].refs++;
    while (w.depth * t->page_size < w.most && kvc__walk_text(&w) == t->page_size) {
        memset(&p, 0, sizeof p);
        p.parent = w.entry;
        p.text = w.text;
        p.key = kvc__walk_key(&w);
        p.reach = c->token_reach;
        entry = kvc__table_find(t, w.entry, p.key, w.text);
        if (entry == KVC__NONE || *kvc__entry_page(t, entry, p.reach) == KVC__NONE) {
            if (w.depth >= told) told = kvc__tier_tell_text(c, &w);
            entry = kvc__tier_get(s, &w, &p);
        }
        if (entry == KVC__NONE || kvc__walk_expired(&w, entry)) break;
        t->entries[entry].refs++;
        t->entries[w.entry].refs--;
        w.entry = entry;
        w.depth++;
    }
    entry = w.entry;
    end = w.depth;
    for (i = 0; i < t->n_reaches && end > s->depth;)
        if (i == c->token_reach || kvc__tier_window(s, &w, i, &entry, &end)) i++;
        else i = 0;
    for (entry = w.entry; entry != s->tail; entry = t->entries[entry].parent)
        for (i = 0; i < t->n_reaches; i++) {
            page = *kvc__entry_page(t, entry, i);
            if (page == KVC__NONE || *kvc__page_refs(&c->pools[i], page) != 0) continue;
            kvc__shelf_remove(&c->pools[i], page);
            kvc__shelf_add(&c->pools[i], page);
        }
    t->entries[w.entry].refs--;
    kvc__entry_drop(t, w.entry);
    kvc__lock_leave(&c->lock);
}

static kvc_result kvc__prefix_fetch(kvc_seq *s, const kvc_token *tokens, size_t n, size_t *n_there,
    kvc_error *err)
{
    kvc_cache *c = s->cache;
    kvc__hit hit;
    size_t i;
    if (n > KVC__MAX_SLOTS - s->n_pos) n = KVC__MAX_SLOTS - s->n_pos;
    for (i = 0; i < n; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= c->desc.model->n_vocab)
            return kvc__fail_numbers(err, KVC_ERROR_ARGUMENT, "tokens", "entry", i,
                "is not an id below", c->desc.model->n_vocab);
    if (n == 0 || !kvc__prefix_can_take(s, (uint32_t)n)) return KVC_OK;
    if (c->desc.tier.get != NULL) kvc__tier_fetch(s, tokens, (uint32_t)n, (uint32_t)n);
    kvc__lock_enter(&c->lock);
    kvc__prefix_find(s, tokens, (uint32_t)n, (uint32_t)n, &hit);
    kvc__lock_leave(&c->lock);
    *n_there = hit.n_pos - s->n_pos;
    return KVC_OK;
}

/* ---- growing ---- */

/* Another slab for a pool, unless somebody else adds one meanwhile. The lock is not held: the
   host's allocator may take its time. */
static kvc_result kvc__pool_add(kvc_cache *c, uint32_t reach, uint32_t n_pages, kvc_error *err)
{
    kvc__pool *pool = &c->pools[reach];
    kvc__arena arena;
    uint32_t n_slabs;
    void *block;
    memset(&arena, 0, sizeof arena);
    kvc__lock_enter(&c->lock);
    n_slabs = pool->n_slabs;
    kvc__slab_layout(&arena, pool, &c->desc, reach, reach == c->token_reach, n_pages);
    kvc__lock_leave(&c->lock);
    if (n_slabs == KVC__MAX_SLABS || n_pages > 0x7fffffffu - pool->n_pages || arena.overflow)
        return kvc__fail(err, KVC_ERROR_FULL, "cache", "it cannot grow any further");
    block = kvc__alloc(&c->desc.allocator, arena.used, 64);
    if (block == NULL)
        return kvc__fail(err, KVC_ERROR_MEMORY, "allocator", "no memory for more pages");
    if (c->desc.touch) memset(block, 0, arena.used);
    arena.base = (unsigned char *)block;
    kvc__lock_enter(&c->lock);
    if (pool->n_slabs == n_slabs) {
        size_t size = arena.used;
        arena.used = 0;
        kvc__slab_layout(&arena, pool, &c->desc, reach, reach == c->token_reach, n_pages);
        pool->slabs[n_slabs].block = block;
        pool->slabs[n_slabs].block_size = size;
        c->grown += size;
        block = NULL;
    }
    kvc__lock_leave(&c->lock);
    kvc__free(&c->desc.allocator, block, arena.used);
    return KVC_OK;
}

/* So that at least n pages more can be promised, as far as nobody else takes them. */
static kvc_result kvc__pool_grow(kvc_cache *c, uint32_t reach, uint32_t n, kvc_error *err)
{
    uint32_t half;
    kvc__lock_enter(&c->lock);
    half = c->pools[reach].n_pages / 2;
    kvc__lock_leave(&c->lock);
    if (half > n && kvc__pool_add(c, reach, half, NULL) == KVC_OK) return KVC_OK;
    return kvc__pool_add(c, reach, n, err);
}

/* Room for `cap` leaves in a ring, and that many more leaves. The sequence is the caller's. */
static kvc_result kvc__ring_grow(kvc_cache *c, kvc__ring *ring, uint32_t reach, uint32_t cap,
    kvc_error *err)
{
    kvc__pool *pool = &c->pools[reach];
    kvc__leaf **leaves;
    kvc__arena arena;
    kvc__bush *bush;
    size_t size;
    uint32_t i;
    if (cap <= ring->cap) return KVC_OK;
    if (cap < 2 * ring->cap) cap = 2 * ring->cap;
    memset(&arena, 0, sizeof arena);
    kvc__bush_layout(&arena, pool, cap - ring->cap);
    kvc__take(&arena, cap, sizeof *leaves);
    size = arena.used;
    arena.used = 0;
    arena.base = arena.overflow ? NULL :
        (unsigned char *)kvc__alloc(&c->desc.allocator, size, 64);
    if (arena.base == NULL)
        return kvc__fail(err, KVC_ERROR_MEMORY, "allocator", "no memory for a longer sequence");
    kvc__lock_enter(&c->lock);
    bush = kvc__bush_layout(&arena, pool, cap - ring->cap);
    bush->block = arena.base;
    bush->block_size = size;
    c->grown += size;
    kvc__lock_leave(&c->lock);
    leaves = (kvc__leaf **)kvc__take(&arena, cap, sizeof *leaves);
    memset(leaves, 0, cap * sizeof *leaves);
    for (i = ring->first / KVC__LEAF_PAGES; i * KVC__LEAF_PAGES < ring->end; i++)
        leaves[i % cap] = ring->leaves[i % ring->cap];
    ring->leaves = leaves;
    ring->cap = cap;
    return KVC_OK;
}

/* Rings that hold n positions more. */
static kvc_result kvc__seq_grow(kvc_seq *s, uint32_t n, kvc_error *err)
{
    kvc_cache *c = s->cache;
    const kvc__extent *t = kvc__seq_last(s);
    uint32_t i, end = kvc__page_of(c, t, t->end + n - 1) + 1;
    kvc_result r = KVC_OK;
    for (i = 0; i < c->desc.model->n_reaches && r == KVC_OK; i++) {
        uint32_t pages = end - s->rings[i].first, most = kvc__ring_most(s, &c->pools[i]);
        r = kvc__ring_grow(c, &s->rings[i], i, kvc__ring_leaves(pages < most ? pages : most), err);
    }
    return r;
}

/* Tokens to be appended, for the pages they need. */
typedef struct kvc__want {
    const kvc_token *tokens;            /* [n] */
    uint32_t n;
    uint32_t n_known;                   /* the first of them whose logits nobody wants */
    uint32_t reach, lack;               /* set where pages are lacking: where, and how many */
} kvc__want;

/* Looks in the prefix table and, if there are pages to go on, takes what is there and promises the
   sequence the rest. 0: there is nothing to take. The lock is held. */
static int kvc__prefix_take(kvc_seq *s, const kvc__want *want)
{
    kvc_cache *c = s->cache;
    const uint32_t end = s->n_pos + want->n;
    uint32_t i, need[KVC_MAX_REACHES], taken;
    kvc__hit hit;
    s->miss = KVC_MISS_OFF;
    if (!kvc__prefix_can_take(s, want->n)) return 0;
    kvc__prefix_find(s, want->tokens, want->n, want->n_known, &hit);
    s->miss = hit.miss;
    if (hit.n_pos == s->n_pos) return 0;
    for (i = 0; i < c->table.n_reaches; i++) {
        need[i] = kvc__hit_need(s, i, &hit, end, &taken);
        if (need[i] + taken <= kvc__pool_left(&c->pools[i])) continue;
        s->miss = KVC_MISS_PAGES;
        return 0;
    }
    kvc__hit_take(s, &hit);
    for (i = 0; i < c->table.n_reaches; i++) {
        c->pools[i].n_promised += need[i];
        s->rings[i].promised = need[i];
    }
    return 1;
}

/* Promises the sequence all pages for the tokens, or none. */
static kvc_result kvc__seq_promise(kvc_seq *s, kvc__want *want, kvc_error *err)
{
    kvc_cache *c = s->cache;
    uint32_t need[KVC_MAX_REACHES], i, n_reaches = c->desc.model->n_reaches;
    kvc_result r = KVC_OK;
    kvc__lock_enter(&c->lock);
    if (want->n_known != 0 && s->salt != KVC__NONE && kvc__prefix_take(s, want)) n_reaches = 0;
    for (i = 0; i < n_reaches && r == KVC_OK; i++) {
        uint32_t left = kvc__pool_left(&c->pools[i]);
        need[i] = kvc__ring_need(s, i, want->n);
        if (need[i] <= left) continue;
        want->reach = i;
        want->lack = need[i] - left;
        r = kvc__fail_numbers(err, KVC_ERROR_FULL, "cache", "pages free", left, "and needed",
            need[i]);
    }
    for (i = 0; i < n_reaches && r == KVC_OK; i++) {
        c->pools[i].n_promised += need[i];
        s->rings[i].promised = need[i];
    }
    if (r == KVC_OK && s->salt != KVC__NONE) {
        c->table.n_asked += want->n_known != 0;
        c->table.n_answered += s->n_hit != 0;
        c->table.n_hit += s->n_hit;
    }
    kvc__lock_leave(&c->lock);
    return r;
}

/* Asks the tier for what a prefill could use. A cache that grows does so before, since the pages
   would be needed anyway. */
static void kvc__tier_ask(kvc_seq *s, const kvc__want *want)
{
    kvc_cache *c = s->cache;
    uint32_t i, lack;
    if (c->desc.tier.get == NULL || want->n_known == 0 || !kvc__prefix_can_take(s, want->n)) return;
    for (i = 0; i < c->table.n_reaches && s->policy == KVC_POLICY_GROW; i++) {
        kvc__lock_enter(&c->lock);
        lack = kvc__ring_need(s, i, want->n);
        lack = lack > kvc__pool_left(&c->pools[i]) ? lack - kvc__pool_left(&c->pools[i]) : 0;
        kvc__lock_leave(&c->lock);
        if (lack != 0 && kvc__pool_grow(c, i, lack, NULL) != KVC_OK) return;
    }
    kvc__tier_fetch(s, want->tokens, want->n, want->n_known);
}

/* Makes sure of all pages for n more positions; s->n_hit of them are there then. After an error
   nothing is changed. */
static kvc_result kvc__seq_reserve(kvc_seq *s, const kvc_token *tokens, size_t n, size_t n_known,
    kvc_error *err)
{
    kvc_cache *c = s->cache;
    uint32_t most = s->n_pos < c->desc.n_ctx ? c->desc.n_ctx - s->n_pos : 0;
    kvc__want want;
    kvc_result r;
    if (s->policy != KVC_POLICY_ERROR || most > kvc__max_slots(c) - kvc__seq_last(s)->end)
        most = kvc__max_slots(c) - kvc__seq_last(s)->end;
    if (s->policy == KVC_POLICY_WINDOW && !kvc__seq_can_slide(s))
        return kvc__fail(err, KVC_ERROR_FULL, "n_keep",
            "removed ranges have scattered what is to be kept over too many pages");
    if (n > most)
        return kvc__fail_numbers(err, KVC_ERROR_FULL, "sequence", "positions free", most,
            "and needed", n);
    memset(&want, 0, sizeof want);
    want.tokens = tokens;
    want.n = (uint32_t)n;
    want.n_known = (uint32_t)n_known;
    s->n_hit = 0;
    s->miss = s->salt == KVC__NONE ? KVC_MISS_OFF : KVC_MISS_NONE;
    kvc__tier_ask(s, &want);
    if (s->policy != KVC_POLICY_GROW) return kvc__seq_promise(s, &want, err);
    r = kvc__seq_grow(s, want.n, err);
    while (r == KVC_OK && (r = kvc__seq_promise(s, &want, err)) != KVC_OK) {
        if (s->is_kept) return r;           /* the cache does not grow for what may be undone */
        r = kvc__pool_grow(c, want.reach, want.lack, err);
    }
    return r;
}

/* Gives back what no row sees any more; it may be used again by the running step. */
static void kvc__seq_give(kvc_seq *s, uint32_t reach)
{
    kvc__pool *pool = &s->cache->pools[reach];
    kvc__ring *ring = &s->rings[reach];
    uint32_t keep = kvc__first_kept(s, pool);
    while (ring->first < keep && ring->first < ring->end) kvc__ring_give(pool, ring, 1);
}

/* Takes the pages that the next n positions are written to. Returns a page to be copied, to the one
   that now has its place; UINT32_MAX for none. */
static uint32_t kvc__ring_extend(kvc_seq *s, uint32_t reach, uint32_t n)
{
    const kvc_cache *c = s->cache;
    kvc__pool *pool = &s->cache->pools[reach];
    kvc__ring *ring = &s->rings[reach];
    const kvc__extent *t = kvc__seq_last(s);
    uint32_t end = kvc__page_of(c, t, t->end + n - 1) + 1;
    uint32_t last = kvc__page_of(c, t, t->end), old = UINT32_MAX;
    if (last < ring->end &&
        !kvc__ring_writable(pool, ring, last, t->end & (c->desc.page_size - 1))) {
        kvc__leaf *leaf = kvc__leaf_own(pool, ring, last);
        old = leaf->pages[last % KVC__LEAF_PAGES];
        leaf->pages[last % KVC__LEAF_PAGES] = kvc__page_take(pool, ring);
    }
    while (ring->end < end) kvc__ring_push(pool, ring, kvc__page_take(pool, ring));
    return old;
}

/* Removes the range; the checks are done. again: the pages may be used by the running step. */
static void kvc__seq_cut(kvc_seq *s, uint32_t from, uint32_t to, int again)
{
    kvc_cache *c = s->cache;
    kvc__extent *t = s->extents;
    uint32_t i, j, slot_i = kvc__slot_of(s, from, &i), slot_j = kvc__slot_of(s, to, &j), left, n;
    uint32_t page_j = kvc__page_of(c, &t[j], slot_j), page_i = page_j, moved, end = t[j].end;
    if (s->policy == KVC_POLICY_HEAVY)
        memmove(s->tally + from, s->tally + to, (s->n_pos - to) * sizeof *s->tally);
    left = i + (slot_i > t[i].slot);            /* extents before the range */
    if (from > 0) page_i = kvc__page_at(s, from - 1) + 1;
    moved = page_j > page_i ? page_j - page_i : 0;
    for (n = 0; n < c->desc.model->n_reaches; n++)
        kvc__ring_cut(&c->pools[n], &s->rings[n], from > 0 ? page_j - moved : 0, page_j, again);
    if (slot_i > t[i].slot) t[i].end = slot_i;
    memmove(&t[left + 1], &t[j + 1], (s->n_extents - j - 1) * sizeof *t);
    t[left].slot = slot_j;
    t[left].end = end;
    t[left].page = page_j;
    for (n = 0; n < left; n++) t[n].page += moved;
    s->n_extents -= j;
    s->n_extents += left;
    kvc__seq_measure(s);
}

/* Rows that fit before another page would be one too many; at least one, after removing the oldest
   that need not be kept. When that happens depends on the sequence's own past alone. */
static uint32_t kvc__seq_slide(kvc_seq *s, uint32_t n)
{
    const kvc_cache *c = s->cache;
    uint32_t end, i, slot;
    for (;;) {
        int64_t room = kvc__seq_room(s);
        if (room > 0) return n < room ? n : (uint32_t)room;
        slot = kvc__slot_of(s, s->n_keep, &i);
        end = ((slot >> c->page_shift) + 1) << c->page_shift;
        if (end > s->extents[i].end) end = s->extents[i].end;
        kvc__seq_cut(s, s->n_keep, s->n_keep + end - slot, 1);
    }
}

/* ---- heavy hitters ----
   With KVC_POLICY_HEAVY the tally of a position is the attention that all queries have paid it, in
   fractions of 2^20 and whole numbers, so that the order in which threads and chunks add is of no
   account. When n_ctx is used up, the oldest of the recent pages joins those that were chosen
   before: of all their positions the first n_keep stay, and of the others those with the largest
   tallies. They are put together in the first pages in their old order, as one extent whose slots
   are positions. Their keys and values move as they are; a key stays turned by the slot that it was
   computed at, its mark, and attention turns it on in passing. So no key is rounded twice, however
   often it moves. */

/* The slot that the key of a slot is turned by. */
static uint32_t kvc__slot_mark(const kvc_seq *s, uint32_t slot)
{
    return slot < s->n_marked ? s->marks[slot] : slot;
}

/* Writes down the turns from tile `tile` on. */
static void kvc__heavy_measure(kvc_seq *s, uint32_t tile)
{
    const kvc_model *m = s->cache->desc.model;
    const uint32_t half = m->rope_dim / 2;
    const double *freq = kvc__rope_freq(m, s->cache->rope_set, 0);
    uint32_t slot, i;
    for (slot = 16 * tile; slot < ((s->n_marked + 15u) & ~15u); slot++) {
        float *turn = s->mark_turns + (size_t)(slot / 16) * half * 32 + slot % 16;
        double back = (double)slot - (double)kvc__slot_mark(s, slot), sine, cosine;
        for (i = 0; i < half; i++, turn += 32) {
            kvc__sincos(back * freq[i], &sine, &cosine);
            turn[0] = (float)cosine;
            turn[16] = (float)sine;
        }
    }
}

/* The n-th largest tally of the positions [from, to), found bit by bit. *spare: how many of its
   equals are too many. */
static uint64_t kvc__heavy_least(const kvc_seq *s, uint32_t from, uint32_t to, uint32_t n,
    uint32_t *spare)
{
    uint64_t least = 0, bit;
    uint32_t i, count;
    *spare = 0;
    if (to <= from || to - from <= n) return 0;
    for (bit = (uint64_t)1 << 63; bit != 0; bit >>= 1) {
        for (count = 0, i = from; i < to; i++) count += s->tally[i] >= (least | bit);
        if (count >= n) least |= bit;
    }
    for (count = 0, i = from; i < to; i++) count += s->tally[i] >= least;
    *spare = count - n;
    return least;
}

/* Makes the first n pages the sequence's own. The lock is not held. */
static void kvc__heavy_own(kvc_seq *s, uint32_t n)
{
    kvc_cache *c = s->cache;
    kvc__pool *pool = &c->pools[c->token_reach];
    kvc__ring *ring = &s->rings[c->token_reach];
    uint32_t i, old, page;
    kvc__leaf *leaf;
    kvc__lock_enter(&c->lock);
    for (i = ring->first; i < ring->first + n; i++) {
        if (kvc__ring_writable(pool, ring, i, 0)) continue;
        leaf = kvc__leaf_own(pool, ring, i);
        old = leaf->pages[i % KVC__LEAF_PAGES];
        page = leaf->pages[i % KVC__LEAF_PAGES] = kvc__page_take(pool, ring);
        kvc__lock_leave(&c->lock);
        kvc__page_leave(c, c->token_reach, page);
        kvc__page_copy(c, c->token_reach, page, old, c->desc.page_size);
        kvc__lock_enter(&c->lock);
        kvc__page_drop(pool, old);
    }
    kvc__lock_leave(&c->lock);
}

/* Puts what stays of the positions before `end` together in the first places; returns their
   number. A position never moves up. */
static uint32_t kvc__heavy_gather(kvc_seq *s, uint32_t end)
{
    kvc_cache *c = s->cache;
    const kvc__ring *ring = &s->rings[c->token_reach];
    const kvc__extent *t = s->extents;
    const uint32_t mask = c->desc.page_size - 1;
    uint32_t pos, slot = t->slot, n = 0, spare, page;
    uint64_t least = kvc__heavy_least(s, s->n_keep, end, s->n_heavy, &spare);
    for (pos = 0; pos < end; pos++, slot++) {
        if (slot == t->end) slot = (++t)->slot;
        if (pos >= s->n_keep && s->tally[pos] < least) continue;
        if (pos >= s->n_keep && s->tally[pos] == least && spare > 0) {
            spare--;
            continue;
        }
        page = kvc__ring_at(ring, kvc__page_of(c, t, slot));
        kvc__position_move(c, c->token_reach, page, slot & mask,
            kvc__ring_at(ring, ring->first + (n >> c->page_shift)), n & mask);
        s->marks[n] = kvc__slot_mark(s, slot);
        s->tally[n++] = s->tally[pos];
    }
    memmove(s->tally + n, s->tally + end, (s->n_pos - end) * sizeof *s->tally);
    return n;
}

/* Makes room for a page. */
static void kvc__seq_distil(kvc_seq *s)
{
    kvc_cache *c = s->cache;
    const kvc__ring *ring = &s->rings[c->token_reach];
    const uint32_t first = ring->first, kept = kvc__heavy_pages(s);
    const uint32_t recent = ring->end - (kvc__ctx_pages(c) - kept - 1);
    uint32_t end = kvc__pos_of_page(s, recent), slot, extent, n, i;
    kvc__extent *t = s->extents;
    kvc__heavy_own(s, kept);
    slot = kvc__slot_of(s, end, &extent);
    n = kvc__heavy_gather(s, end);
    t[extent].slot = slot;
    t[extent].page = recent;
    memmove(t + 1, t + extent, (s->n_extents - extent) * sizeof *t);
    s->n_extents -= extent;
    s->n_extents++;
    t->slot = 0;
    t->end = s->n_marked = n;
    t->page = recent - kvc__pages_for(&c->desc, n);
    kvc__lock_enter(&c->lock);
    for (i = 0; i < c->desc.model->n_reaches; i++)
        kvc__ring_cut(&c->pools[i], &s->rings[i], first + recent - t->page, recent, 1);
    kvc__lock_leave(&c->lock);
    kvc__seq_measure(s);
    kvc__heavy_measure(s, 0);
}

/* Makes ready for the next rows, n at most, and returns how many. The last page becomes the
   sequence's own if others hold it; copying it needs no lock, since nobody writes into a page that
   is shared. */
static uint32_t kvc__seq_advance(kvc_seq *s, uint32_t n)
{
    kvc_cache *c = s->cache;
    uint32_t old[KVC_MAX_REACHES], fresh[KVC_MAX_REACHES];
    uint32_t i, n_reaches = c->desc.model->n_reaches, copies = 0, page;
    if (s->policy == KVC_POLICY_HEAVY) {
        if (kvc__seq_room(s) <= 0) kvc__seq_distil(s);
        if ((int64_t)n > kvc__seq_room(s)) n = (uint32_t)kvc__seq_room(s);
        memset(s->tally + s->n_pos, 0, n * sizeof *s->tally);
    }
    kvc__lock_enter(&c->lock);
    if (s->policy == KVC_POLICY_WINDOW) n = kvc__seq_slide(s, n);
    page = kvc__page_of(c, kvc__seq_last(s), kvc__seq_last(s)->end);
    for (i = 0; i < n_reaches; i++) {
        kvc__seq_give(s, i);
        fresh[i] = page < s->rings[i].end ? page : s->rings[i].end;
        old[i] = kvc__ring_extend(s, i, n);
        copies += old[i] != UINT32_MAX;
    }
    kvc__lock_leave(&c->lock);
    for (i = 0; i < n_reaches; i++) kvc__ring_leave(c, &s->rings[i], i, fresh[i]);
    if (copies == 0) return n;
    for (i = 0; i < n_reaches; i++)
        if (old[i] != UINT32_MAX)
            kvc__page_copy(c, i, kvc__ring_at(&s->rings[i], page), old[i],
                kvc__seq_last(s)->end & (c->desc.page_size - 1));
    kvc__lock_enter(&c->lock);
    for (i = 0; i < n_reaches; i++)
        if (old[i] != UINT32_MAX) kvc__page_drop(&c->pools[i], old[i]);
    kvc__lock_leave(&c->lock);
    return n;
}

/* Counts n rows that were computed. */
static void kvc__seq_add(kvc_seq *s, uint32_t n)
{
    kvc__seq_last(s)->end += n;
    s->n_pos += n;
    if (s->salt == KVC__NONE) return;
    kvc__lock_enter(&s->cache->lock);
    s->cache->table.n_computed += n;
    kvc__prefix_enter(s);
    kvc__lock_leave(&s->cache->lock);
}

/* n rows of a prefill took so long. */
static void kvc__cache_timed(kvc_cache *c, uint32_t n, double us)
{
    kvc__lock_enter(&c->lock);
    c->n_timed += n;
    c->us_timed += us;
    kvc__lock_leave(&c->lock);
}

/* ---- sequences ---- */

/* Whether the host may change the sequence. */
static int kvc__seq_usable(const kvc_seq *s)
{
    return s != NULL && s->is_open && !s->is_busy;
}

static kvc_result kvc__seq_refuse(kvc_error *err)
{
    return kvc__fail(err, KVC_ERROR_ARGUMENT, "seq",
        "NULL, closed or in a request that is not done");
}

/* Everything but the pages. */
static void kvc__seq_inherit(kvc_seq *s, const kvc_seq *parent)
{
    const kvc_cache *c = s->cache;
    const size_t n = parent->n_extents, turn = 2 * c->desc.model->rope_dim;
    uint32_t i;
    s->n_pos = parent->n_pos;
    s->policy = parent->policy;
    s->n_keep = parent->n_keep;
    s->n_extents = parent->n_extents;
    memcpy(s->extents, parent->extents, n * sizeof *s->extents);
    for (i = 0; i < c->desc.model->n_ropes; i++)
        memcpy(s->turns + kvc__turns_place(c, i), parent->turns + kvc__turns_place(c, i),
            (n - 1) * turn * sizeof *s->turns);
    s->n_heavy = parent->n_heavy;
    s->n_marked = parent->n_marked;
    if (s->n_marked != 0) {
        memcpy(s->marks, parent->marks, s->n_marked * sizeof *s->marks);
        if (s->mark_turns != NULL && parent->mark_turns != NULL)    /* neither is a shadow */
            memcpy(s->mark_turns, parent->mark_turns,
                (size_t)((s->n_marked + 15u) & ~15u) * (turn / 2) * sizeof *s->mark_turns);
    }
    if (s->policy == KVC_POLICY_HEAVY)
        memcpy(s->tally, parent->tally, s->n_pos * sizeof *s->tally);
    if (parent->salt == KVC__NONE) return;
    s->cache->table.salts[parent->salt].n_seqs++;
    kvc__prefix_join(s, parent->salt, parent->priority, parent->ttl);
    kvc__prefix_move(s, parent->tail, parent->depth);
}

/* No slot, so that the next token begins again with the first. */
static void kvc__extents_clear(kvc_seq *s)
{
    s->n_extents = 1;
    s->n_marked = 0;
    memset(s->extents, 0, sizeof *s->extents);
}

/* Empty, without pages. */
static void kvc__seq_begin(kvc_seq *s)
{
    s->n_pos = 0;
    s->policy = KVC_POLICY_ERROR;
    s->n_keep = s->n_heavy = s->n_hit = 0;
    s->is_busy = s->closes = s->is_foreign = 0;
    s->miss = KVC_MISS_OFF;
    kvc__prefix_none(s);
    kvc__extents_clear(s);
}

/* Rings as long as the other sequence's, which may have grown. */
static kvc_result kvc__seq_match(kvc_seq *s, const kvc_seq *other, kvc_error *err)
{
    uint32_t i;
    kvc_result r = KVC_OK;
    for (i = 0; i < s->cache->desc.model->n_reaches && r == KVC_OK; i++)
        r = kvc__ring_grow(s->cache, &s->rings[i], i, other->rings[i].cap, err);
    return r;
}

static kvc_result kvc__seq_open(kvc_seq **out, kvc_cache *c, const kvc_seq *parent, kvc_error *err)
{
    uint32_t i;
    kvc_seq *s = NULL;
    kvc_result r;
    kvc__lock_enter(&c->lock);
    for (i = 0; i < c->desc.n_seqs && s == NULL; i++)
        if (!c->seqs[i].is_open) s = &c->seqs[i];
    if (s != NULL && parent != NULL && c->grown != 0) {
        s->is_open = 1;             /* kept while the lock is not */
        kvc__lock_leave(&c->lock);
        r = kvc__seq_match(s, parent, err);
        kvc__lock_enter(&c->lock);
        if (r != KVC_OK) {
            s->is_open = 0;
            kvc__lock_leave(&c->lock);
            return r;
        }
    }
    if (s != NULL) {
        s->is_open = 1;
        c->n_open++;
        kvc__seq_begin(s);
        if (parent != NULL) kvc__seq_inherit(s, parent);
        for (i = 0; i < c->desc.model->n_reaches; i++) {
            s->rings[i].first = s->rings[i].end = 0;
            if (parent != NULL)
                kvc__ring_share(&s->rings[i], &parent->rings[i]);
        }
    }
    kvc__lock_leave(&c->lock);
    *out = s;
    if (s != NULL) return KVC_OK;
    return kvc__fail(err, KVC_ERROR_FULL, "n_seqs", "all sequences of the cache are open");
}

/* The shortest length > 0 that it can go back to: where each window is still whole. */
static uint32_t kvc__seq_least(const kvc_seq *s)
{
    const kvc_cache *c = s->cache;
    uint32_t i, least = 0;
    for (i = 0; i < c->desc.model->n_reaches; i++) {
        uint32_t first = kvc__pos_of_page(s, s->rings[i].first);
        if (c->pools[i].window == 0 || first == 0) continue;
        if (first + c->pools[i].window - 1 > least) least = first + c->pools[i].window - 1;
    }
    return least;
}

static void kvc__seq_rollback(kvc_seq *s, uint32_t length)
{
    kvc_cache *c = s->cache;
    kvc__extent *t;
    uint32_t i, end = 0, slot;
    kvc__lock_enter(&c->lock);
    if (length == 0) {
        kvc__extents_clear(s);
    } else {
        slot = kvc__slot_of(s, length - 1, &i);
        t = &s->extents[i];
        end = kvc__page_of(c, t, slot) + 1;
        t->end = slot + 1;
        s->n_extents = i + 1;
        if (t->end < s->n_marked) {
            s->n_marked = t->end;
            kvc__heavy_measure(s, s->n_marked / 16);
        }
    }
    for (i = 0; i < c->desc.model->n_reaches; i++) kvc__ring_trim(&c->pools[i], &s->rings[i], end);
    kvc__seq_measure(s);
    kvc__prefix_back(s, length);
    kvc__lock_leave(&c->lock);
}

/* Whether windows are whole when [from, to) is gone: the first position that the next row then sees
   must still be held. */
static int kvc__seq_can_cut(const kvc_seq *s, uint32_t from, uint32_t to)
{
    const kvc_cache *c = s->cache;
    uint32_t i, seen;
    for (i = 0; i < c->desc.model->n_reaches; i++) {
        seen = kvc__first_seen(s->n_pos - (to - from), c->pools[i].window);
        if (seen >= from) seen += to - from;
        if (kvc__page_at(s, seen) < s->rings[i].first) return 0;
    }
    return 1;
}

/* Where each position has a vector that was added at the start, what lies behind a gap cannot move
   nearer. */
static kvc_result kvc__gaps_allowed(const kvc_seq *s, const char *where, kvc_error *err)
{
    if (s->cache->desc.model->pos_embd.data == NULL) return KVC_OK;
    return kvc__fail(err, KVC_ERROR_UNSUPPORTED, where,
        "positions of this model are learned: only the end can be removed");
}

static kvc_result kvc__seq_remove(kvc_seq *s, uint32_t from, uint32_t to, kvc_error *err)
{
    uint32_t i, j, n = s->n_extents, slot;
    if (to == s->n_pos) {
        if (from != 0 && from < kvc__seq_least(s))
            return kvc__fail(err, KVC_ERROR_ARGUMENT, "from", "less than rollback_least");
        kvc__seq_rollback(s, from);
        return KVC_OK;
    }
    if (kvc__gaps_allowed(s, "from", err) != KVC_OK) return KVC_ERROR_UNSUPPORTED;
    slot = kvc__slot_of(s, from, &i);
    kvc__slot_of(s, to, &j);
    n = n - (j - i) + (slot > s->extents[i].slot);
    if (n > s->cache->desc.n_cuts + 1)
        return kvc__fail_numbers(err, KVC_ERROR_FULL, "n_cuts", "ranges missing would be", n - 1,
            "and may be", s->cache->desc.n_cuts);
    if (!kvc__seq_can_cut(s, from, to))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "from",
            "layers that see a window have given back what they would see again");
    if (s->policy == KVC_POLICY_HEAVY && s->cache->desc.model->n_reaches > 1)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "from",
            "with KVC_POLICY_HEAVY and layers that see a window only the end can be removed");
    kvc__lock_enter(&s->cache->lock);
    kvc__seq_cut(s, from, to, 0);
    kvc__lock_leave(&s->cache->lock);
    return KVC_OK;
}

/* Drops what `to` has and gives it the same past as `from`. The lock is held. */
static void kvc__seq_become(kvc_seq *to, const kvc_seq *from)
{
    kvc_cache *c = to->cache;
    uint32_t i;
    kvc__prefix_leave(to);
    for (i = 0; i < c->desc.model->n_reaches; i++) {
        kvc__ring_clear(&c->pools[i], &to->rings[i]);
        kvc__ring_share(&to->rings[i], &from->rings[i]);
    }
    kvc__seq_inherit(to, from);
}

/* ---- undoing a step ----
   A step that is cancelled leaves its sequences as they were. Mostly a roll-back does that. Where
   the step gives pages back, which are written over then, the sequence's shadow holds them
   meanwhile, as a fork would; the pages that this takes are promised with the others. If there are
   not as many, the step is lossy: it can be finished only. */

static kvc_seq *kvc__shadow_of(kvc_seq *s)
{
    return s + s->cache->desc.n_seqs;
}

/* Whether pages may be given back while n positions are added. */
static int kvc__seq_loses(const kvc_seq *s, uint32_t n)
{
    const kvc_cache *c = s->cache;
    uint32_t i;
    if ((s->policy == KVC_POLICY_WINDOW || s->policy == KVC_POLICY_HEAVY) &&
        (int64_t)n > kvc__seq_room(s)) return 1;
    for (i = 0; i < c->desc.model->n_reaches; i++) {
        const uint64_t back = (uint64_t)c->pools[i].window - 1 + c->desc.n_back;
        const uint64_t end = (uint64_t)s->n_pos + n;
        if (c->pools[i].window == 0 || s->rings[i].first == s->rings[i].end || end <= back)
            continue;
        if (end - back >= s->n_pos || kvc__page_at(s, (uint32_t)(end - back)) > s->rings[i].first)
            return 1;
    }
    return 0;
}

/* Lets the shadow go. The lock is held. */
static void kvc__shadow_clear(kvc_seq *s)
{
    kvc_seq *shadow = kvc__shadow_of(s);
    uint32_t i;
    if (!s->is_kept) return;
    for (i = 0; i < s->cache->desc.model->n_reaches; i++)
        kvc__ring_clear(&s->cache->pools[i], &shadow->rings[i]);
    kvc__prefix_leave(shadow);
    s->is_kept = 0;
}

/* A step of n positions begins, none of which has pages yet. keep 0: lossy if need be. */
static void kvc__seq_mark(kvc_seq *s, uint32_t n, int keep)
{
    kvc_cache *c = s->cache;
    kvc_seq *shadow = kvc__shadow_of(s);
    s->n_before = s->n_pos;
    s->is_kept = 0;
    s->is_lossy = (uint32_t)kvc__seq_loses(s, n);
    if (s->is_lossy && keep && (c->grown == 0 || kvc__seq_match(shadow, s, NULL) == KVC_OK)) {
        kvc__lock_enter(&c->lock);
        kvc__seq_become(shadow, s);
        kvc__lock_leave(&c->lock);
        s->is_kept = 1;
        s->is_lossy = 0;
    } else if (s->policy == KVC_POLICY_HEAVY) {
        memcpy(shadow->tally, s->tally, s->n_pos * sizeof *s->tally);
    }
}

/* The step has not begun. */
static void kvc__seq_unmark(kvc_seq *s)
{
    kvc__lock_enter(&s->cache->lock);
    kvc__shadow_clear(s);
    kvc__lock_leave(&s->cache->lock);
    s->is_foreign = 0;
}

/* The sequence is what it was before the step, which is not lossy. */
static void kvc__seq_undo(kvc_seq *s)
{
    kvc_cache *c = s->cache;
    const kvc_seq *shadow = kvc__shadow_of(s);
    uint32_t i, kept = s->is_kept;
    kvc__lock_enter(&c->lock);
    for (i = 0; i < c->desc.model->n_reaches; i++)
        kvc__ring_settle(&c->pools[i], &s->rings[i]);
    if (kept) kvc__seq_become(s, shadow);
    kvc__shadow_clear(s);
    kvc__lock_leave(&c->lock);
    s->is_foreign = 0;
    if (!kept) kvc__seq_rollback(s, s->n_before);
    if (!kept && s->policy == KVC_POLICY_HEAVY)
        memcpy(s->tally, shadow->tally, s->n_pos * sizeof *s->tally);
    if (kept && s->n_marked != 0) kvc__heavy_measure(s, 0);
}

/* Ends a step: gives back what no later row sees, and what was promised and not needed. */
static void kvc__seq_settle(kvc_seq *s)
{
    kvc_cache *c = s->cache;
    uint32_t i;
    kvc__lock_enter(&c->lock);
    kvc__shadow_clear(s);
    if (s->is_foreign) kvc__prefix_leave(s);
    s->is_foreign = 0;
    if (s->salt != KVC__NONE) {
        if ((s->n_pos & (c->desc.page_size - 1)) != 0) kvc__tier_entries(c, 1);
        kvc__prefix_enter_end(s);
    }
    for (i = 0; i < c->desc.model->n_reaches; i++) {
        kvc__seq_give(s, i);
        kvc__ring_settle(&c->pools[i], &s->rings[i]);
    }
    kvc__lock_leave(&c->lock);
}

/* ---- several sequences ---- */

/* Whether two sequences begin with the same page. */
static int kvc__seq_kin(const kvc_seq *a, const kvc_seq *b)
{
    const uint32_t reach = a->cache->token_reach;
    const kvc__ring *ring = &a->rings[reach], *other = &b->rings[reach];
    return a->cache == b->cache && ring->first != ring->end && other->first != other->end &&
        kvc__ring_at(ring, ring->first) == kvc__ring_at(other, other->first);
}

/* Whether the sequences are open, different and of one cache; numbers them. */
static int kvc__seqs_check(kvc_seq *const *seqs, uint32_t n)
{
    uint32_t i;
    for (i = 0; i < n; i++) {
        if (!kvc__seq_usable(seqs[i]) || seqs[i]->cache != seqs[0]->cache) return 0;
        seqs[i]->index = i;
        seqs[i]->n_uses = 0;
    }
    for (i = 0; i < n; i++)
        if (seqs[i]->index != i) return 0;
    return 1;
}

/* A past that no other sequence is to get can be replaced at once, and then, maybe, the one it is
   replaced by. What is left are circles, whose sequences change places. */
static kvc_result kvc__seq_reorder(kvc_seq *const *seqs, const uint32_t *from, uint32_t n,
    kvc_error *err)
{
    const uint32_t done = UINT32_MAX;
    uint32_t i, t;
    kvc_result r;
    for (i = 0; i < n; i++)
        if ((r = kvc__seq_match(seqs[i], seqs[from[i]], err)) != KVC_OK) return r;
    for (i = 0; i < n; i++) {
        if (from[i] == i) seqs[i]->index = done;
        else seqs[from[i]]->n_uses++;
    }
    kvc__lock_enter(&seqs[0]->cache->lock);
    for (i = 0; i < n; i++) {
        for (t = i; seqs[t]->index != done && seqs[t]->n_uses == 0; t = from[t]) {
            kvc__seq_become(seqs[t], seqs[from[t]]);
            seqs[t]->index = done;
            seqs[from[t]]->n_uses--;
        }
    }
    for (i = 0; i < n; i++) {
        for (t = i; seqs[t]->index != done; t = from[t]) {
            if (from[t] != i) {
                kvc_seq one = *seqs[t];
                *seqs[t] = *seqs[from[t]];
                *seqs[from[t]] = one;
            }
            seqs[t]->index = done;
        }
    }
    kvc__lock_leave(&seqs[0]->cache->lock);
    return KVC_OK;
}

static void kvc__seq_close(kvc_seq *s)
{
    kvc__seq_rollback(s, 0);
    kvc__lock_enter(&s->cache->lock);
    kvc__prefix_leave(s);
    s->is_open = 0;
    s->cache->n_open--;
    kvc__lock_leave(&s->cache->lock);
}

static kvc_result kvc__share_check(const kvc_cache *c, kvc_share *share, kvc_error *err)
{
    if (share->start_canary != 0 || share->end_canary != 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "share", "not zero-initialised");
    if (c->table.n_entries == 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "cache", "it has no prefix table (n_prefix)");
    if (share->salt_size > KVC__MAX_SALT || (share->salt_size != 0 && share->salt == NULL))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "salt", "NULL or more than 64 bytes");
    if (share->priority == 0) share->priority = 50;
    if (share->priority > 100)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "priority", "more than 100");
    if (share->gemm != KVC_GEMM_BUILTIN && share->gemm != KVC_GEMM_CBLAS)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "gemm", "not a kvc_gemm");
    if (!c->desc.model->has_floats) share->gemm = KVC_GEMM_BUILTIN;
    return KVC_OK;
}

static kvc_result kvc__seq_open_shared(kvc_seq **out, kvc_cache *c, const kvc_share *desc,
    kvc_error *err)
{
    kvc_share share;
    uint32_t salt;
    kvc_result r;
    memset(&share, 0, sizeof share);
    if (desc != NULL) share = *desc;
    if ((r = kvc__share_check(c, &share, err)) != KVC_OK) return r;
    if ((r = kvc__seq_open(out, c, NULL, err)) != KVC_OK) return r;
    kvc__lock_enter(&c->lock);
    salt = kvc__salt_open(&c->table, &share, c->store);
    if (salt != KVC__NONE) {
        kvc__prefix_join(*out, salt, share.priority, share.ttl);
        kvc__prefix_move(*out, salt, 0);
    }
    kvc__lock_leave(&c->lock);
    if (salt != KVC__NONE) return KVC_OK;
    kvc__seq_close(*out);
    *out = NULL;
    return kvc__fail(err, KVC_ERROR_FULL, "n_salts", "as many salts are in use");
}

/* Whether there are pages enough to hold those of an entry and of all before it. */
static int kvc__entry_can_pin(const kvc_cache *c, uint32_t entry)
{
    const kvc__table *t = &c->table;
    uint32_t i, page, n[KVC_MAX_REACHES] = {0, 0, 0, 0};
    for (; t->entries[entry].parent != KVC__NONE; entry = t->entries[entry].parent)
        for (i = 0; i < t->n_reaches; i++) {
            page = *kvc__entry_page(t, entry, i);
            n[i] += page != KVC__NONE && *kvc__page_refs(&c->pools[i], page) == 0;
        }
    for (i = 0; i < t->n_reaches; i++)
        if (n[i] > kvc__pool_left(&c->pools[i])) return 0;
    return 1;
}

/* One holder more, or less, of the pages of an entry and of all before it. */
static void kvc__entry_pin(kvc_cache *c, uint32_t entry, int more)
{
    kvc__table *t = &c->table;
    uint32_t i, page;
    for (; t->entries[entry].parent != KVC__NONE; entry = t->entries[entry].parent) {
        if (more) t->entries[entry].pins++;
        else t->entries[entry].pins--;
        for (i = 0; i < t->n_reaches; i++) {
            page = *kvc__entry_page(t, entry, i);
            if (page == KVC__NONE) continue;
            if (more) kvc__page_hold(&c->pools[i], page);
            else kvc__page_drop(&c->pools[i], page);
        }
    }
}

static kvc_result kvc__prefix_pin(kvc_pin *out, kvc_seq *s, uint32_t length, kvc_error *err)
{
    kvc_cache *c = s->cache;
    kvc__table *t = &c->table;
    uint32_t entry, depth, own;
    int full;
    if (!kvc__prefix_whole(s))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "seq", "it takes no part in a prefix table");
    kvc__lock_enter(&c->lock);
    entry = s->tail;
    own = kvc__prefix_own(s, s->depth);
    for (depth = s->depth; depth > length >> c->page_shift; depth--)
        entry = t->entries[entry].parent;
    out->n_tokens = depth << c->page_shift;
    if (depth == s->depth && length > out->n_tokens && own != KVC__NONE &&
        t->entries[own].n_tokens + out->n_tokens >= length) {
        entry = own;
        out->n_tokens = length;
    }
    full = !kvc__entry_can_pin(c, entry);
    if (!full) {
        out->cache = c;
        out->entry = entry;
        t->entries[entry].refs++;
        kvc__entry_pin(c, entry, 1);
    }
    kvc__lock_leave(&c->lock);
    if (!full) return KVC_OK;
    out->n_tokens = 0;
    return kvc__fail(err, KVC_ERROR_FULL, "cache", "too few pages are free to keep so many");
}

static void kvc__prefix_unpin(kvc_pin *pin)
{
    kvc_cache *c = pin->cache;
    kvc__lock_enter(&c->lock);
    kvc__entry_pin(c, pin->entry, 0);
    c->table.entries[pin->entry].refs--;
    kvc__entry_drop(&c->table, pin->entry);
    kvc__lock_leave(&c->lock);
    memset(pin, 0, sizeof *pin);
}

/* The pages of a reach that have expired or, if root is not KVC__NONE, that are of a salt. Those of
   a salt do not go to the tier either, if they still wait for that. */
static uint32_t kvc__pool_sweep(kvc_cache *c, uint32_t reach, uint32_t root, uint64_t now)
{
    kvc__pool *pool = &c->pools[reach];
    uint32_t page, n = 0;
    for (page = 0; page < pool->n_pages; page++) {
        const uint32_t entry = kvc__page_entry(pool, page);
        const uint32_t parting = kvc__page_keep(pool, page)->parting;
        const kvc__entry *e = &c->table.entries[entry];
        if (*kvc__page_refs(pool, page) == 0 && parting != KVC__NONE &&
            c->table.entries[parting].root == root) kvc__page_parted(pool, page);
        if (entry == KVC__NONE || *kvc__page_refs(pool, page) != 0 || e->guards != 0) continue;
        if (root != KVC__NONE ? e->root != root : e->expires == 0 || e->expires > now) continue;
        kvc__page_evict(pool, page, 0);
        n++;
    }
    return n;
}

static uint32_t kvc__prefix_sweep(kvc_cache *c, const kvc_share *desc)
{
    uint32_t i, n = 0, root = KVC__NONE;
    kvc_share share;
    if (c->table.n_entries == 0) return 0;
    if (desc != NULL) {
        share = *desc;
        if (kvc__share_check(c, &share, NULL) != KVC_OK) return 0;
    }
    kvc__lock_enter(&c->lock);
    if (desc != NULL) root = kvc__salt_find(&c->table, &share);
    for (i = 0; i < c->table.n_reaches && (desc == NULL || root != KVC__NONE); i++)
        n += kvc__pool_sweep(c, i, root, desc == NULL ? kvc__cache_now(c) : 0);
    kvc__lock_leave(&c->lock);
    return n;
}

/* Rounds a block of n <= 32 elements to a quantized type: 2 + 32 or 2 + 16 bytes. */
static void kvc__block_round(const kvc__kernels *kernels, kvc_kv_type type, unsigned char *block,
    const float *x, uint32_t n)
{
    if (type == KVC_KV_Q8) kernels->to_q8_0(block, x, n);
    else kernels->to_q4_0(block, x, n);
}

/* A key goes to its lane of a tile: floats element after element, 16 places apart. */
static void kvc__key_store(const kvc__kernels *kernels, kvc_kv_type type, unsigned char *tile,
    uint32_t lane, const float *k, uint32_t n)
{
    unsigned char block[34];
    uint16_t half[32], *to = (uint16_t *)(void *)tile + lane;
    uint32_t i, j, part;
    for (i = 0; i < n; i += part, k += part) {
        part = n - i < 32 ? n - i : 32;
        if (type == KVC_KV_F32) {
            float *y = (float *)(void *)tile + 16 * i + lane;
            for (j = 0; j < part; j++) y[16 * j] = k[j];
        } else if (type == KVC_KV_F16) {
            kernels->to_f16(half, k, part);
            for (j = 0; j < part; j++) to[16 * (i + j)] = half[j];
        } else {
            kvc__kv_place at = kvc__key_place(type, tile, lane, i / 32);
            kvc__block_round(kernels, type, block, k, part);
            kvc__place_put(&at, block);
        }
    }
}

/* A value goes to its row; what fills the row up is zero. */
static void kvc__value_store(const kvc__kernels *kernels, kvc_kv_type type, unsigned char *tile,
    uint32_t lane, const float *v, uint32_t n, uint32_t v_stride)
{
    const size_t size = kvc__kv_size(type);
    unsigned char block[34], *row = tile + lane * v_stride * size;
    uint32_t i;
    if (kvc__kv_coded(type)) {
        for (i = 0; i < n; i += 32) {
            kvc__kv_place at = kvc__value_place(type, tile, lane, i / 32, kvc__div_up(n, 32));
            kvc__block_round(kernels, type, block, v + i, n - i < 32 ? n - i : 32);
            kvc__place_put(&at, block);
        }
        return;
    }
    if (type == KVC_KV_F16) kernels->to_f16((uint16_t *)(void *)row, v, n);
    else memcpy(row, v, n * sizeof *v);
    memset(row + n * size, 0, (v_stride - n) * size);
}

/* Stores one position's keys and values of one layer. k: [n_kv_heads, head_dim], which may be
   overwritten, v: [n_kv_heads, kvc__stored_v]. The page is the sequence's own. */
static void kvc__kv_store(const kvc__kernels *kernels, const kvc_seq *s, uint32_t layer,
    uint32_t slot, float *k, const float *v)
{
    const kvc_cache *c = s->cache;
    const kvc_model *m = c->desc.model;
    const kvc__layer_kv *l = &c->layers[layer];
    const kvc__ring *ring = &s->rings[m->layers[layer].reach];
    const uint32_t at = slot & (c->desc.page_size - 1), n_v = kvc__stored_v(m);
    const uint32_t page = kvc__ring_at(ring, kvc__page_of(c, kvc__seq_last(s), slot));
    uint32_t h;
    for (h = 0; h < m->n_kv_heads; h++, k += m->head_dim, v += n_v) {
        if (l->type_k == KVC_KV_Q4) kvc__key_rotate(k, m->head_dim);
        kvc__key_store(kernels, l->type_k, kvc__k_tile(c, layer, h, page, at), at % 16, k,
            m->head_dim);
        kvc__value_store(kernels, l->type_v, kvc__v_tile(c, layer, h, page, at), at % 16, v, n_v,
            c->v_stride);
    }
}

/* Whether the cache has room for what a policy keeps. */
static int kvc__policy_fits(const kvc_cache_desc *d, kvc_policy policy, uint32_t n_keep,
    uint32_t n_heavy)
{
    if (policy == KVC_POLICY_HEAVY)
        return n_heavy != 0 && n_heavy <= d->n_heavy && n_keep <= d->n_heavy - n_heavy;
    if (n_heavy != 0) return 0;
    if (policy != KVC_POLICY_WINDOW) return 1;
    return d->n_ctx >= 2 * d->page_size && n_keep <= d->n_ctx - 2 * d->page_size;
}

/* Whether KVC_POLICY_HEAVY can begin: the positions have tallies, and where layers see a window,
   the recent ones fill their pages. */
static int kvc__heavy_can_begin(const kvc_seq *s)
{
    const kvc_cache *c = s->cache;
    const kvc__extent *t = s->extents;
    if (s->n_pos > kvc__ctx_pages(c) << c->page_shift) return 0;
    if (c->desc.model->n_reaches == 1 || s->n_extents == 1) return 1;
    return s->n_extents == 2 && t->slot == 0 && t->end <= s->n_marked;
}

static kvc_result kvc__seq_set_policy(kvc_seq *s, kvc_policy policy, uint32_t n_keep,
    uint32_t n_heavy, kvc_error *err)
{
    const kvc_cache_desc *d = &s->cache->desc;
    if ((policy == KVC_POLICY_WINDOW || policy == KVC_POLICY_HEAVY) &&
        kvc__gaps_allowed(s, "policy", err) != KVC_OK) return KVC_ERROR_UNSUPPORTED;
    if (policy != KVC_POLICY_HEAVY && n_heavy != 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_heavy", "not 0 without KVC_POLICY_HEAVY");
    if (policy == KVC_POLICY_HEAVY && !kvc__policy_fits(d, policy, n_keep, n_heavy))
        return kvc__fail_numbers(err, KVC_ERROR_ARGUMENT, "n_heavy",
            "0, or with n_keep more than the cache allows, which is", d->n_heavy,
            "and they are", (uint64_t)n_keep + n_heavy);
    if (!kvc__policy_fits(d, policy, n_keep, n_heavy))
        return kvc__fail_numbers(err, KVC_ERROR_ARGUMENT, "n_keep", "the sequence holds", d->n_ctx,
            "positions, of which two pages must be free to go; to be kept are", n_keep);
    if (policy == KVC_POLICY_HEAVY && s->policy != policy) {
        if (!kvc__heavy_can_begin(s))
            return kvc__fail(err, KVC_ERROR_ARGUMENT, "seq",
                "longer than n_ctx, or ranges are missing and layers see a window");
        memset(s->tally, 0, s->n_pos * sizeof *s->tally);
    }
    s->policy = policy;
    s->n_keep = n_keep;
    s->n_heavy = n_heavy;
    return KVC_OK;
}

/* ---- saving and loading ----
   A file is a head, the extents, the marks, the number of each reach's first page, the tokens, with
   KVC_POLICY_HEAVY their tallies, then for each reach the rows of its layers: head by head, the key
   and the value of every position held. It ends with a hash of all bytes before. Numbers are
   little-endian. */
#define KVC__SAVE_MAGIC 0x1a0a0d716573766bu     /* "kvseq", then what a text transfer would break */
#define KVC__SAVE_VERSION 3u

typedef struct kvc__save_head {
    uint64_t magic;
    uint32_t version, what;
    uint64_t fingerprint[2];
    uint64_t size;                      /* of all */
    uint32_t n_pos, n_extents, policy, n_keep, n_heavy, n_marked;
} kvc__save_head;                       /* 64 bytes */

/* Bytes on their way from or to the host, gathered to blocks. */
typedef struct kvc__pipe {
    kvc_write_fn write;                 /* one of the two */
    kvc_read_fn read;
    void *user;
    uint64_t hash, n_bytes;
    size_t n;                           /* bytes in the block, when writing */
    int failed;
    unsigned char block[4096];
} kvc__pipe;

static void kvc__pipe_flush(kvc__pipe *p)
{
    if (p->n != 0 && !p->failed) p->failed = p->write(p->block, p->n, p->user) != 0;
    p->n = 0;
}

static void kvc__pipe_put(kvc__pipe *p, const void *data, size_t size)
{
    const unsigned char *from = (const unsigned char *)data;
    size_t n;
    p->n_bytes += size;
    p->hash = kvc__hash_bytes(data, size, p->hash);
    for (; size > 0; size -= n, from += n) {
        n = sizeof p->block - p->n < size ? sizeof p->block - p->n : size;
        memcpy(p->block + p->n, from, n);
        p->n += n;
        if (p->n == sizeof p->block) kvc__pipe_flush(p);
    }
}

/* After a failure there are zeros. */
static void kvc__pipe_get(kvc__pipe *p, void *data, size_t size)
{
    if (!p->failed) p->failed = p->read(data, size, p->user) != 0;
    if (p->failed) memset(data, 0, size);
    p->hash = kvc__hash_bytes(data, size, p->hash);
    p->n_bytes += size;
}

static void kvc__pipe_pass(kvc__pipe *p, void *data, size_t size)
{
    if (p->read != NULL) kvc__pipe_get(p, data, size);
    else kvc__pipe_put(p, data, size);
}

/* A block of one position. */
static void kvc__block_pass(kvc__pipe *p, kvc_kv_type type, const kvc__kv_place *at)
{
    unsigned char block[34];
    if (p->read == NULL) kvc__place_get(at, block);
    kvc__pipe_pass(p, block, 2 + kvc__kv_codes(type));
    if (p->read != NULL) kvc__place_put(at, block);
}

/* The key of one position. Of floats cells that lie 16 apart, for all lanes of a tile, pass through
   row. */
static void kvc__key_pass(kvc__pipe *p, kvc_kv_type type, unsigned char *tile, uint32_t lane,
    uint32_t head_dim)
{
    unsigned char row[512], *cells;
    const size_t size = kvc__kv_size(type), most = sizeof row / size;
    size_t i, j, n;
    if (kvc__kv_coded(type)) {
        for (i = 0; i < head_dim; i += 32) {
            kvc__kv_place at = kvc__key_place(type, tile, lane, (uint32_t)i / 32);
            kvc__block_pass(p, type, &at);
        }
        return;
    }
    cells = tile + lane * size;
    for (i = 0; i < head_dim; i += n) {
        n = head_dim - i < most ? head_dim - i : most;
        for (j = 0; p->read == NULL && j < n; j++)
            memcpy(row + j * size, cells + 16 * size * (i + j), size);
        kvc__pipe_pass(p, row, n * size);
        for (j = 0; p->read != NULL && j < n; j++)
            memcpy(cells + 16 * size * (i + j), row + j * size, size);
    }
}

static void kvc__value_pass(kvc__pipe *p, kvc_kv_type type, unsigned char *tile, uint32_t lane,
    uint32_t head_dim_v, uint32_t v_stride)
{
    const size_t size = kvc__kv_size(type);
    unsigned char *row = tile + lane * v_stride * size;
    uint32_t i, n_blocks = kvc__div_up(head_dim_v, 32);
    if (kvc__kv_coded(type)) {
        for (i = 0; i < n_blocks; i++) {
            kvc__kv_place at = kvc__value_place(type, tile, lane, i, n_blocks);
            kvc__block_pass(p, type, &at);
        }
        return;
    }
    kvc__pipe_pass(p, row, head_dim_v * size);
    if (p->read != NULL) memset(row + head_dim_v * size, 0, (v_stride - head_dim_v) * size);
}

/* One position of a layer's head. */
static void kvc__position_pass(kvc__pipe *p, const kvc_cache *c, uint32_t layer, uint32_t head,
    uint32_t page, uint32_t at)
{
    const kvc_model *m = c->desc.model;
    const kvc__layer_kv *l = &c->layers[layer];
    kvc__key_pass(p, l->type_k, kvc__k_tile(c, layer, head, page, at), at % 16, m->head_dim);
    kvc__value_pass(p, l->type_v, kvc__v_tile(c, layer, head, page, at), at % 16, kvc__stored_v(m),
        c->v_stride);
}

/* All positions of a reach that lie in pages from ring->first on. */
static void kvc__reach_pass(kvc__pipe *p, const kvc_seq *s, uint32_t reach)
{
    const kvc_cache *c = s->cache;
    const kvc_model *m = c->desc.model;
    const kvc__ring *ring = &s->rings[reach];
    uint32_t layer, head, i, slot, page;
    for (layer = 0; layer < m->n_layers; layer++) {
        if (m->layers[layer].reach != reach) continue;
        for (head = 0; head < m->n_kv_heads; head++)
            for (i = 0; i < s->n_extents; i++) {
                const kvc__extent *t = &s->extents[i];
                for (slot = t->slot; slot < t->end && !p->failed; slot++) {
                    page = kvc__page_of(c, t, slot);
                    if (page < ring->first) continue;
                    page = kvc__ring_at(ring, page);
                    kvc__position_pass(p, c, layer, head, page, slot & (c->desc.page_size - 1));
                }
            }
    }
}

static void kvc__tokens_pass(kvc__pipe *p, const kvc_seq *s)
{
    uint32_t i;
    for (i = 0; i < s->n_pos; i++) {
        kvc_token *token = kvc__token_at(s, i), none = KVC_NO_TOKEN;
        kvc__pipe_pass(p, token != NULL ? token : &none, sizeof none);
    }
}

static void kvc__tally_pass(kvc__pipe *p, const kvc_seq *s)
{
    uint32_t i;
    for (i = 0; s->policy == KVC_POLICY_HEAVY && i < s->n_pos; i++)
        kvc__pipe_pass(p, &s->tally[i], sizeof *s->tally);
}

/* Bytes of a file; first: the number of each reach's first page. */
static uint64_t kvc__save_size(const kvc_seq *s, kvc_save what, const uint32_t *first)
{
    const kvc_model *m = s->cache->desc.model;
    uint64_t sum = sizeof(kvc__save_head) + sizeof(uint64_t) +
        ((uint64_t)s->n_extents * 3 + s->n_marked + m->n_reaches + s->n_pos) * sizeof(uint32_t);
    uint32_t i;
    if (s->policy == KVC_POLICY_HEAVY) sum += (uint64_t)s->n_pos * sizeof(uint64_t);
    for (i = 0; what == KVC_SAVE_ALL && i < m->n_layers; i++)
        sum += (uint64_t)kvc__layer_row(s->cache, i) *
            (s->n_pos - kvc__pos_of_page(s, first[m->layers[i].reach]));
    return sum;
}

/* The same for the sequence as it is. */
static uint64_t kvc__seq_save_size(const kvc_seq *s, kvc_save what)
{
    uint32_t first[KVC_MAX_REACHES], i;
    for (i = 0; i < s->cache->desc.model->n_reaches; i++) first[i] = s->rings[i].first;
    return kvc__save_size(s, what, first);
}

/* Everything but the hash. */
static void kvc__save_pass(kvc__pipe *p, const kvc_seq *s, kvc_save what)
{
    kvc__save_head h;
    uint32_t i, n_reaches = s->cache->desc.model->n_reaches;
    memset(&h, 0, sizeof h);
    h.magic = KVC__SAVE_MAGIC;
    h.version = KVC__SAVE_VERSION;
    h.what = (uint32_t)what;
    kvc__cache_fingerprint(s->cache, h.fingerprint);
    h.size = kvc__seq_save_size(s, what);
    h.n_pos = s->n_pos;
    h.n_extents = s->n_extents;
    h.policy = (uint32_t)s->policy;
    h.n_keep = s->n_keep;
    h.n_heavy = s->n_heavy;
    h.n_marked = s->n_marked;
    kvc__pipe_put(p, &h, sizeof h);
    for (i = 0; i < s->n_extents; i++) kvc__pipe_put(p, &s->extents[i], 3 * sizeof(uint32_t));
    for (i = 0; i < s->n_marked; i++) kvc__pipe_put(p, &s->marks[i], sizeof *s->marks);
    for (i = 0; i < n_reaches; i++) kvc__pipe_put(p, &s->rings[i].first, sizeof(uint32_t));
    kvc__tokens_pass(p, s);
    kvc__tally_pass(p, s);
    for (i = 0; what == KVC_SAVE_ALL && i < n_reaches; i++) kvc__reach_pass(p, s, i);
}

static kvc_result kvc__seq_save(const kvc_seq *s, kvc_save what, kvc_write_fn write, void *user,
    kvc_error *err)
{
    kvc__pipe p;
    uint64_t hash;
    if (what == KVC_SAVE_TOKENS && (s->n_extents > 1 || s->extents[0].slot != 0 || s->n_marked))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "what",
            "positions were removed, so computing the tokens again gives something else");
    if (what == KVC_SAVE_TOKENS && s->n_pos > 0 && kvc__token_at(s, 0) == NULL)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "what",
            "all layers see a window, and the first tokens are no longer held");
    memset(&p, 0, sizeof p);
    p.write = write;
    p.user = user;
    kvc__save_pass(&p, s, what);
    hash = p.hash;
    kvc__pipe_put(&p, &hash, sizeof hash);
    kvc__pipe_flush(&p);
    if (p.failed) return kvc__fail(err, KVC_ERROR_FILE, "write", "the host's function failed");
    return KVC_OK;
}

/* The head must fit the cache, else err says why. */
static kvc_result kvc__load_head(kvc__pipe *p, kvc_cache *c, kvc__save_head *h,
    kvc_error *err)
{
    uint64_t fingerprint[2];
    kvc__pipe_get(p, h, sizeof *h);
    if (p->failed || h->magic != KVC__SAVE_MAGIC)
        return kvc__fail(err, KVC_ERROR_FORMAT, "head", "not a saved sequence");
    if (h->version != KVC__SAVE_VERSION)
        return kvc__fail(err, KVC_ERROR_UNSUPPORTED, "version", "of another version of the format");
    kvc__cache_fingerprint(c, fingerprint);
    if (h->fingerprint[0] != fingerprint[0] || h->fingerprint[1] != fingerprint[1])
        return kvc__fail(err, KVC_ERROR_UNSUPPORTED, "fingerprint",
            "saved with another model, other K/V types or another page_size");
    if (h->what > KVC_SAVE_TOKENS || h->policy > KVC_POLICY_HEAVY || h->n_extents == 0 ||
        (h->what == KVC_SAVE_TOKENS && h->n_marked != 0))
        return kvc__fail(err, KVC_ERROR_FORMAT, "head", "damaged");
    if (c->desc.model->pos_embd.data != NULL && (h->n_extents > 1 || h->n_marked != 0 ||
        h->policy == KVC_POLICY_WINDOW || h->policy == KVC_POLICY_HEAVY))
        return kvc__fail(err, KVC_ERROR_FORMAT, "head", "damaged");
    if (h->n_marked > c->desc.n_heavy)
        return kvc__fail_numbers(err, KVC_ERROR_FULL, "n_heavy", "heavy hitters of a sequence",
            c->desc.n_heavy, "and needed", h->n_marked);
    if (h->policy == KVC_POLICY_ERROR && h->n_pos > c->desc.n_ctx)
        return kvc__fail_numbers(err, KVC_ERROR_FULL, "n_ctx", "positions of a sequence",
            c->desc.n_ctx, "and needed", h->n_pos);
    if (h->n_extents > c->desc.n_cuts + 2)
        return kvc__fail_numbers(err, KVC_ERROR_FULL, "n_cuts", "ranges that may be missing",
            c->desc.n_cuts, "and needed", h->n_extents - 1);
    return KVC_OK;
}

/* Extents rise, and pages follow each other without a gap. */
static int kvc__load_extents(kvc__pipe *p, kvc_seq *s, const kvc__save_head *h)
{
    const uint32_t shift = s->cache->page_shift;
    uint32_t i;
    uint64_t n = 0;
    for (i = 0; i < h->n_extents; i++) {
        kvc__extent *t = &s->extents[i];
        kvc__pipe_get(p, t, 3 * sizeof(uint32_t));
        if (t->slot > t->end || t->end > kvc__max_slots(s->cache) ||
            t->page > KVC__MAX_SLOTS) return 0;
        if (t->slot == t->end && h->n_pos > 0) return 0;
        if (i > 0) {
            const kvc__extent *was = t - 1;
            uint32_t same = (was->end - 1) >> shift == t->slot >> shift;
            if (t->slot <= was->end) return 0;
            if (t->page != kvc__page_of(s->cache, was, was->end - 1) + !same) return 0;
        }
        n += t->end - t->slot;
    }
    if (h->n_pos == 0 && (h->n_extents > 1 || s->extents[0].end != 0 || s->extents[0].page != 0))
        return 0;
    s->n_extents = h->n_extents;
    kvc__seq_measure(s);
    return n == h->n_pos && !p->failed;
}

/* A position is computed before its slot is another's. */
static int kvc__load_marks(kvc__pipe *p, kvc_seq *s, const kvc__save_head *h)
{
    uint32_t i;
    for (i = 0; i < h->n_marked; i++) {
        kvc__pipe_get(p, &s->marks[i], sizeof *s->marks);
        if (s->marks[i] < i || s->marks[i] > KVC__MAX_SLOTS) return 0;
        if (i > 0 && s->marks[i] <= s->marks[i - 1]) return 0;
    }
    s->n_marked = h->n_marked;
    if (s->n_marked != 0) kvc__heavy_measure(s, 0);
    return s->policy != KVC_POLICY_HEAVY || kvc__heavy_can_begin(s);
}

/* Room for n pages. */
static int kvc__load_grow(kvc_seq *s, uint32_t reach, uint32_t n)
{
    kvc_cache *c = s->cache;
    uint32_t left;
    if (kvc__ring_grow(c, &s->rings[reach], reach, kvc__ring_leaves(n), NULL) != KVC_OK) return 0;
    kvc__lock_enter(&c->lock);
    left = kvc__pool_left(&c->pools[reach]);
    kvc__lock_leave(&c->lock);
    return left >= n || kvc__pool_grow(c, reach, n - left, NULL) == KVC_OK;
}

/* Takes the pages from number `first` to the last. 0 if the sequence cannot have those or, in
   *full, if there are not enough. */
static int kvc__load_pages(kvc_seq *s, uint32_t reach, uint32_t first, int *full)
{
    kvc_cache *c = s->cache;
    kvc__pool *pool = &c->pools[reach];
    kvc__ring *ring = &s->rings[reach];
    const kvc__extent *t = kvc__seq_last(s);
    uint32_t end = s->n_pos > 0 ? kvc__page_of(c, t, t->end - 1) + 1 : 0, needed = 0;
    const uint32_t seen = kvc__first_seen(s->n_pos, pool->window);
    if (s->n_pos > 0) needed = kvc__page_at(s, seen < s->n_pos ? seen : s->n_pos - 1);
    if (first < s->extents[0].page || first > needed) return s->n_pos == 0 && first == 0;
    if (end - first > kvc__ring_most(s, pool)) return 0;
    if (s->policy == KVC_POLICY_GROW && !kvc__load_grow(s, reach, end - first)) {
        *full = 1;
        return 0;
    }
    kvc__lock_enter(&c->lock);
    *full = end - first > kvc__pool_left(pool);
    if (!*full) {
        ring->promised = end - first;
        pool->n_promised += end - first;
        ring->first = ring->end = first;
        while (ring->end < end) kvc__ring_push(pool, ring, kvc__page_take(pool, ring));
    }
    kvc__lock_leave(&c->lock);
    if (!*full) kvc__ring_leave(c, ring, reach, first);
    return !*full;
}

/* All pages, for the places that the file gives. They are not taken before the size it states is
   known to be right, so that a few bytes cannot claim much memory. */
static int kvc__load_rings(kvc__pipe *p, kvc_seq *s, uint64_t size, int *full)
{
    uint32_t i, first[KVC_MAX_REACHES], n = s->cache->desc.model->n_reaches;
    for (i = 0; i < n; i++) {
        kvc__pipe_get(p, &first[i], sizeof first[i]);
        if (kvc__pos_of_page(s, first[i]) > s->n_pos) return 0;
    }
    if (p->failed || size != kvc__save_size(s, KVC_SAVE_ALL, first)) return 0;
    for (i = 0; i < n; i++)
        if (!kvc__load_pages(s, i, first[i], full)) return 0;
    return 1;
}

/* Reads the tokens and computes them. */
static kvc_result kvc__load_tokens(kvc__pipe *p, kvc_seq *s, kvc_ctx *ctx, uint32_t n,
    kvc_error *err)
{
    kvc_token tokens[256];
    kvc_result r = KVC_OK;
    uint32_t part, i;
    for (; n > 0 && r == KVC_OK && !p->failed; n -= part) {
        part = n < 256 ? n : 256;
        for (i = 0; i < part; i++) kvc__pipe_get(p, &tokens[i], sizeof tokens[i]);
        if (!p->failed) r = kvc_prefill(ctx, s, tokens, part, NULL, err);
    }
    return r;
}

/* What follows the head. */
static kvc_result kvc__load_body(kvc__pipe *p, kvc_seq *s, kvc_ctx *ctx, const kvc__save_head *h,
    kvc_error *err)
{
    uint32_t i, skipped, n_reaches = s->cache->desc.model->n_reaches;
    kvc_result r;
    int full = 0;
    s->policy = (kvc_policy)h->policy;
    s->n_keep = h->n_keep;
    s->n_heavy = h->n_heavy;
    if (h->what == KVC_SAVE_TOKENS) {
        kvc__extent none;
        for (i = 0; i < h->n_extents; i++) kvc__pipe_get(p, &none, 3 * sizeof(uint32_t));
        for (i = 0; i < n_reaches; i++) kvc__pipe_get(p, &skipped, sizeof skipped);
        r = kvc__load_tokens(p, s, ctx, h->n_pos, err);
        if (r == KVC_OK) kvc__tally_pass(p, s);
        return r;
    }
    if (!kvc__load_extents(p, s, h) || !kvc__load_marks(p, s, h) ||
        !kvc__load_rings(p, s, h->size, &full)) {
        if (full)
            return kvc__fail(err, KVC_ERROR_FULL, "cache", "not enough pages are free");
        return kvc__fail(err, KVC_ERROR_FORMAT, "extents", "damaged");
    }
    kvc__tokens_pass(p, s);
    kvc__tally_pass(p, s);
    for (i = 0; i < n_reaches && !p->failed; i++) kvc__reach_pass(p, s, i);
    return KVC_OK;
}

/* limit: bytes that there are, if that is known */
static kvc_result kvc__seq_load(kvc_seq **out, kvc_cache *c, kvc_ctx *ctx, kvc_read_fn read,
    void *user, uint64_t limit, kvc_error *err)
{
    kvc__pipe p;
    kvc__save_head h;
    kvc_seq *s;
    kvc_result r;
    uint64_t hash, stored;
    memset(&p, 0, sizeof p);
    p.read = read;
    p.user = user;
    if ((r = kvc__load_head(&p, c, &h, err)) != KVC_OK) return r;
    if (h.size > limit) return kvc__fail(err, KVC_ERROR_FORMAT, "size", "cut short");
    if (h.what == KVC_SAVE_TOKENS && ctx == NULL)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "ctx", "NULL, and tokens must be computed");
    if (!kvc__policy_fits(&c->desc, (kvc_policy)h.policy, h.n_keep, h.n_heavy))
        return kvc__fail(err, KVC_ERROR_FULL, "n_keep", "more than the cache's sequences can keep");
    if ((r = kvc__seq_open(&s, c, NULL, err)) != KVC_OK) return r;
    r = kvc__load_body(&p, s, ctx, &h, err);
    hash = p.hash;
    if (r == KVC_OK) kvc__pipe_get(&p, &stored, sizeof stored);
    if (r == KVC_OK && (p.failed || stored != hash || h.size != p.n_bytes))
        r = kvc__fail(err, KVC_ERROR_FORMAT, "hash", "cut short or damaged");
    kvc__seq_settle(s);
    if (r == KVC_OK) *out = s;
    else kvc__seq_close(s);
    return r;
}

/* ---- the prefix table in a file ----
   A head, then a record for each entry, parents before their children: what it is, with a hash of
   that, then its bytes with theirs. The bytes of a root are its salt, those of a page its tokens,
   then for each reach whose page is there the rows of its layers. */
#define KVC__TABLE_MAGIC 0x1a0a0d666572766bu    /* "kvref", then what a text transfer would break */
#define KVC__TABLE_VERSION 2u

typedef struct kvc__table_head {
    uint64_t magic;
    uint32_t version, n_records;
    uint64_t fingerprint[2];
} kvc__table_head;

typedef struct kvc__record {
    uint32_t parent;                    /* number of a record; KVC__NONE: a root */
    uint32_t n;                         /* tokens, or bytes of a salt */
    uint32_t reaches;                   /* a bit for each page that follows */
    uint32_t priority;                  /* of a root: gemm */
    uint32_t ttl;                       /* seconds left, 0: it does not expire */
    uint32_t is_gone;                   /* 1: an entry that went while the file was written; no
                                           bytes follow but the hash */
} kvc__record;

/* The first n positions of a page. */
static void kvc__page_pass(kvc__pipe *p, const kvc_cache *c, uint32_t reach, uint32_t page,
    uint32_t n)
{
    const kvc_model *m = c->desc.model;
    uint32_t layer, head, at;
    for (layer = 0; layer < m->n_layers; layer++) {
        if (m->layers[layer].reach != reach) continue;
        for (head = 0; head < m->n_kv_heads; head++)
            for (at = 0; at < n && !p->failed; at++)
                kvc__position_pass(p, c, layer, head, page, at);
    }
}

/* Reads over as many. */
static void kvc__page_skip(kvc__pipe *p, const kvc_cache *c, uint32_t reach, uint32_t n)
{
    const kvc_model *m = c->desc.model;
    unsigned char bytes[256];
    uint32_t layer;
    for (layer = 0; layer < m->n_layers; layer++) {
        size_t left = m->layers[layer].reach == reach ? n * kvc__layer_row(c, layer) : 0, part;
        for (; left > 0 && !p->failed; left -= part) {
            part = left < sizeof bytes ? left : sizeof bytes;
            kvc__pipe_get(p, bytes, part);
        }
    }
}

/* A hash of what came since the last one: written, or compared with what is read. */
static int kvc__hash_pass(kvc__pipe *p)
{
    uint64_t hash = p->hash, stored = hash;
    kvc__pipe_pass(p, &stored, sizeof stored);
    p->hash = 0;
    return stored == hash && !p->failed;
}

/* What kvc__prefix_save writes, and in which order. */
typedef struct kvc__order {
    uint32_t n;
    uint32_t *entries;                  /* [n] parents first */
    uint32_t *serials;                  /* [n] theirs: entries may come and go meanwhile */
    uint32_t *record;                   /* [n_entries of the table] an entry's place in it */
} kvc__order;

/* The lock is held. */
static void kvc__order_entries(const kvc__table *t, kvc__order *o)
{
    uint32_t e, done, ref, at;
    o->n = 0;
    for (e = 0; e < t->n_salts; e++) {
        if (!t->salts[e].is_set) continue;
        o->record[e] = o->n;
        o->entries[o->n++] = e;
    }
    for (done = 0; done < o->n; done++) {
        if (t->entries[o->entries[done]].kids == KVC__NONE) continue;
        at = o->n;                      /* references of the tree, until they are leaves */
        o->entries[o->n++] = t->entries[o->entries[done]].kids;
        while (at < o->n) {
            ref = o->entries[at];
            if ((ref & 1u) != 0) {
                o->record[ref >> 1] = at;
                o->entries[at++] = ref >> 1;
            } else {
                o->entries[at] = t->entries[ref >> 1].side[0];
                o->entries[o->n++] = t->entries[ref >> 1].side[1];
            }
        }
    }
    for (e = 0; e < o->n; e++) o->serials[e] = t->entries[o->entries[e]].serial;
}

/* Guards the pages of an entry while its record is written. Returns the reaches whose pages are;
   page [n_reaches]. The lock is held. */
static uint32_t kvc__record_keep(kvc_cache *c, uint32_t entry, uint32_t *page)
{
    uint32_t i, reaches = 0;
    for (i = 0; i < c->table.n_reaches; i++) {
        page[i] = *kvc__entry_page(&c->table, entry, i);
        if (page[i] != KVC__NONE && kvc__page_guard(&c->pools[i], entry)) reaches |= 1u << i;
    }
    return reaches;
}

static void kvc__record_let_go(kvc_cache *c, uint32_t entry, uint32_t reaches)
{
    uint32_t i;
    kvc__lock_enter(&c->lock);
    for (i = 0; i < c->table.n_reaches; i++)
        if ((reaches >> i & 1u) != 0) kvc__page_unguard(&c->pools[i], entry);
    kvc__lock_leave(&c->lock);
}

/* One record. What may change is read under the lock; the rows of a page that stays do not. */
static void kvc__record_save(kvc__pipe *p, kvc_cache *c, const kvc__order *o, uint32_t number)
{
    kvc__table *t = &c->table;
    const uint32_t entry = o->entries[number];
    const kvc__entry *e = &t->entries[entry];
    unsigned char text[KVC__SPAN * sizeof(kvc_token)];
    uint32_t page[KVC_MAX_REACHES], i;
    size_t size = 0;
    kvc__record r;
    memset(&r, 0, sizeof r);
    kvc__lock_enter(&c->lock);
    if (e->serial != o->serials[number]) {
        r.is_gone = 1;
    } else if (e->parent == KVC__NONE) {
        r.parent = KVC__NONE;
        r.n = t->salts[entry].size;
        r.priority = t->salts[entry].gemm;
        size = KVC__MAX_SALT;
        memcpy(text, t->salts[entry].bytes, size);
        for (i = r.n; i < size; i++) text[i] = 0;
    } else {
        r.parent = o->record[e->parent];
        r.n = e->n_tokens;
        r.priority = e->priority;
        if (e->expires != 0) {
            uint64_t now = kvc__cache_now(c);
            r.ttl = e->expires > now ? (uint32_t)(e->expires - now) : 1;
        }
        size = r.n * sizeof(kvc_token);
        memcpy(text, kvc__entry_text(t, entry), size);
        r.reaches = kvc__record_keep(c, entry, page);
    }
    kvc__lock_leave(&c->lock);
    kvc__pipe_put(p, &r, sizeof r);
    kvc__hash_pass(p);
    kvc__pipe_put(p, text, size);
    for (i = 0; i < t->n_reaches; i++)
        if ((r.reaches >> i & 1u) != 0) kvc__page_pass(p, c, i, page[i], r.n);
    kvc__hash_pass(p);
    kvc__record_let_go(c, entry, r.reaches);
}

static kvc_result kvc__prefix_save(kvc_cache *c, kvc_write_fn write, void *user, kvc_error *err)
{
    const size_t n = c->table.n_entries, size = n * 3 * sizeof(uint32_t);
    kvc__order order;
    kvc__table_head head;
    kvc__pipe p;
    uint32_t i;
    if (n == 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "cache", "it has no prefix table (n_prefix)");
    order.entries = (uint32_t *)kvc__alloc(&c->desc.allocator, size, 64);
    if (order.entries == NULL)
        return kvc__fail(err, KVC_ERROR_MEMORY, "allocator", "no memory for the table's order");
    order.serials = order.entries + n;
    order.record = order.serials + n;
    memset(&p, 0, sizeof p);
    p.write = write;
    p.user = user;
    memset(&head, 0, sizeof head);
    head.magic = KVC__TABLE_MAGIC;
    head.version = KVC__TABLE_VERSION;
    kvc__cache_fingerprint(c, head.fingerprint);
    kvc__lock_enter(&c->lock);
    kvc__order_entries(&c->table, &order);
    kvc__lock_leave(&c->lock);
    head.n_records = order.n;
    kvc__pipe_put(&p, &head, sizeof head);
    kvc__hash_pass(&p);
    for (i = 0; i < order.n && !p.failed; i++) kvc__record_save(&p, c, &order, i);
    kvc__pipe_flush(&p);
    kvc__free(&c->desc.allocator, order.entries, size);
    if (p.failed) return kvc__fail(err, KVC_ERROR_FILE, "write", "the host's function failed");
    return KVC_OK;
}

/* A page that is free now, for a page of a file; KVC__NONE if there is none. */
static uint32_t kvc__page_spare(kvc_cache *c, uint32_t reach)
{
    uint32_t page = KVC__NONE;
    kvc__lock_enter(&c->lock);
    if (c->pools[reach].n_free != 0) page = kvc__page_get(&c->pools[reach]);
    kvc__lock_leave(&c->lock);
    if (page != KVC__NONE) kvc__page_leave(c, reach, page);
    return page;
}

/* A salt of a file. Returns its root, KVC__NONE if there is no room for it. */
static uint32_t kvc__record_root(kvc_cache *c, const kvc__record *r, const unsigned char *salt)
{
    kvc_share share;
    uint32_t root, quota = 0;
    memset(&share, 0, sizeof share);
    share.salt = salt;
    share.salt_size = r->n;
    share.gemm = (kvc_gemm)r->priority;
    root = kvc__salt_find(&c->table, &share);
    if (root != KVC__NONE) quota = c->table.salts[root].quota;
    root = kvc__salt_open(&c->table, &share, c->store);
    if (root == KVC__NONE) return root;
    c->table.salts[root].n_seqs--;
    c->table.salts[root].quota = quota;
    return root;
}

/* The pages of a file are there and right: an entry for them, or into the one that has none. */
static uint32_t kvc__record_enter(kvc_cache *c, const kvc__record *r, uint32_t parent,
    const kvc_token *text, const uint32_t *page)
{
    kvc__table *t = &c->table;
    uint32_t entry = KVC__NONE, i;
    uint64_t key[2];
    if (r->n == t->page_size) {
        kvc__page_key(t, t->entries[parent].key, text, key);
        entry = kvc__table_find(t, parent, key, text);
    } else {
        entry = kvc__kids_nearest(t, parent, text, r->n);
        if (entry != KVC__NONE && kvc__entry_run(t, entry, text, r->n) < r->n) entry = KVC__NONE;
        if (entry != KVC__NONE) return entry;       /* it is there, and perhaps more */
    }
    if (entry == KVC__NONE) {
        if (t->n_free == 0) return KVC__NONE;
        entry = kvc__entry_take(t, parent);
        t->entries[entry].priority = r->priority;
        if (r->ttl != 0) {
            t->entries[entry].expires = kvc__cache_now(c) + r->ttl;
            t->can_expire = 1;
        }
        kvc__entry_set(t, entry, text, r->n, key);
    }
    for (i = 0; i < t->n_reaches; i++)
        if (page[i] != KVC__NONE && *kvc__entry_page(t, entry, i) == KVC__NONE)
            kvc__page_attach(&c->pools[i], page[i], entry);
    return entry;
}

/* Reads one record. Returns its entry, which it keeps from being dropped; KVC__NONE if it was left
   out. */
static uint32_t kvc__record_load(kvc__pipe *p, kvc_cache *c, const kvc__record *r, uint32_t parent)
{
    unsigned char salt[KVC__MAX_SALT];
    kvc_token text[KVC__SPAN];
    uint32_t page[KVC_MAX_REACHES], entry = KVC__NONE, i;
    int right = 1;
    if (r->parent == KVC__NONE) {
        kvc__pipe_get(p, salt, sizeof salt);
        if (!kvc__hash_pass(p)) return KVC__NONE;
        kvc__lock_enter(&c->lock);
        entry = kvc__record_root(c, r, salt);
        if (entry != KVC__NONE) c->table.entries[entry].refs++;
        kvc__lock_leave(&c->lock);
        return entry;
    }
    kvc__pipe_get(p, text, r->n * sizeof *text);
    for (i = 0; i < r->n; i++)
        right = right && text[i] >= 0 && (uint32_t)text[i] < c->desc.model->n_vocab;
    for (i = 0; i < c->table.n_reaches; i++) {
        page[i] = KVC__NONE;
        if ((r->reaches >> i & 1u) == 0) continue;
        page[i] = kvc__page_spare(c, i);
        if (page[i] != KVC__NONE) kvc__page_pass(p, c, i, page[i], r->n);
        else kvc__page_skip(p, c, i, r->n);
        right = right && page[i] != KVC__NONE;
        if (i == c->token_reach && page[i] != KVC__NONE)
            memcpy(kvc__page_tokens(c, page[i]), text, r->n * sizeof *text);
    }
    right = kvc__hash_pass(p) && right && parent != KVC__NONE;
    kvc__lock_enter(&c->lock);
    if (right) entry = kvc__record_enter(c, r, parent, text, page);
    if (entry != KVC__NONE) c->table.entries[entry].refs++;
    for (i = 0; i < c->table.n_reaches; i++)
        if (page[i] != KVC__NONE) kvc__page_drop(&c->pools[i], page[i]);
    kvc__lock_leave(&c->lock);
    return entry;
}

/* Whether a record can be what it says. */
static int kvc__record_check(const kvc_cache *c, const kvc__record *r, uint32_t number)
{
    if (r->is_gone != 0) return r->is_gone == 1 && r->n == 0 && r->reaches == 0;
    if (r->parent == KVC__NONE)
        return r->n <= KVC__MAX_SALT && r->priority <= (uint32_t)KVC_GEMM_CBLAS && r->reaches == 0;
    return r->parent < number && r->n > 0 && r->n <= c->desc.page_size && r->priority > 0 &&
        r->priority < KVC__N_SHELVES && r->reaches >> c->table.n_reaches == 0;
}

static kvc_result kvc__prefix_load(kvc_cache *c, kvc_read_fn read, void *user, uint32_t *n_pages,
    kvc_error *err)
{
    const size_t size = (size_t)c->table.n_entries * sizeof(uint32_t);
    uint64_t store[2];
    uint32_t *entries, i;
    kvc__table_head head;
    kvc__pipe p;
    if (c->table.n_entries == 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "cache", "it has no prefix table (n_prefix)");
    memset(&p, 0, sizeof p);
    p.read = read;
    p.user = user;
    kvc__pipe_get(&p, &head, sizeof head);
    if (p.failed || head.magic != KVC__TABLE_MAGIC)
        return kvc__fail(err, KVC_ERROR_FORMAT, "head", "not a saved prefix table");
    if (head.version != KVC__TABLE_VERSION)
        return kvc__fail(err, KVC_ERROR_UNSUPPORTED, "version", "of another version of the format");
    kvc__cache_fingerprint(c, store);
    if (head.fingerprint[0] != store[0] || head.fingerprint[1] != store[1])
        return kvc__fail(err, KVC_ERROR_UNSUPPORTED, "fingerprint",
            "saved with another model, other K/V types or another page_size");
    if (!kvc__hash_pass(&p)) return kvc__fail(err, KVC_ERROR_FORMAT, "head", "damaged");
    entries = (uint32_t *)kvc__alloc(&c->desc.allocator, size, 64);
    if (entries == NULL)
        return kvc__fail(err, KVC_ERROR_MEMORY, "allocator", "no memory for the table's order");
    for (i = 0; i < head.n_records && i < c->table.n_entries; i++) {
        kvc__record r;
        uint32_t parent = KVC__NONE;
        kvc__pipe_get(&p, &r, sizeof r);
        if (!kvc__hash_pass(&p) || !kvc__record_check(c, &r, i)) break;
        if (r.is_gone != 0) {
            kvc__hash_pass(&p);
            entries[i] = KVC__NONE;
            continue;
        }
        if (r.parent != KVC__NONE) parent = entries[r.parent];
        entries[i] = kvc__record_load(&p, c, &r, parent);
        *n_pages += r.parent != KVC__NONE && entries[i] != KVC__NONE;
    }
    kvc__lock_enter(&c->lock);
    while (i-- > 0) {                   /* children first */
        if (entries[i] == KVC__NONE) continue;
        c->table.entries[entries[i]].refs--;
        kvc__entry_drop(&c->table, entries[i]);
    }
    kvc__lock_leave(&c->lock);
    kvc__free(&c->desc.allocator, entries, size);
    return KVC_OK;
}

static void kvc__pool_query(const kvc__pool *pool, kvc_reach_info *info)
{
    const kvc__bush *bush;
    uint32_t i, j;
    info->window = pool->window;
    info->n_layers = pool->n_layers;
    info->seq_pages = pool->ring_cap;
    info->page_bytes = pool->page;
    info->pages_total = pool->n_pages;
    info->pages_free = pool->n_free;
    info->pages_promised = pool->n_promised;
    info->pages_cached = pool->n_cached;
    info->pages_live = kvc__pool_live(pool);
    info->pages_peak = pool->peak;
    for (i = 0; i < pool->n_pages; i++) info->pages_shared += *kvc__page_refs(pool, i) > 1;
    for (bush = pool->bushes; bush != NULL; bush = bush->next)
        for (i = 0; i < bush->n_leaves; i++) {  /* a page with one holder is in one leaf */
            const kvc__leaf *leaf = &bush->leaves[i];
            for (j = leaf->lo; leaf->refs > 1 && j < leaf->hi; j++)
                info->pages_shared += *kvc__page_refs(pool, leaf->pages[j]) == 1;
        }
}

static void kvc__cache_query(kvc_cache *c, kvc_cache_info *info)
{
    uint32_t i;
    memset(info, 0, sizeof *info);
    info->desc = c->desc;
    info->bytes_per_token = kvc__bytes_per_token(c);
    info->n_reaches = c->desc.model->n_reaches;
    kvc__lock_enter(&c->lock);
    info->memory_size = c->block_size + c->grown;
    info->n_seqs_open = c->n_open;
    for (i = 0; i < info->n_reaches; i++) {
        kvc_reach_info *one = &info->reaches[i];
        kvc__pool_query(&c->pools[i], one);
        info->page_bytes += one->page_bytes;
        info->pages_total += one->pages_total;
        info->pages_free += one->pages_free;
        info->pages_live += one->pages_live;
        info->pages_shared += one->pages_shared;
        info->pages_cached += one->pages_cached;
        info->pages_peak += one->pages_peak;
    }
    info->prefix_bytes = c->table.n_bytes;
    info->prefix_bytes_peak = c->table.n_bytes_peak;
    info->prefix_asked = c->table.n_asked;
    info->prefix_answered = c->table.n_answered;
    info->prefix_hit = c->table.n_hit;
    info->prefix_computed = c->table.n_computed;
    if (c->n_timed != 0)
        info->prefix_saved_us = (uint64_t)((double)c->table.n_hit * c->us_timed /
            (double)c->n_timed);
    info->prefix_evicted = c->table.n_evicted;
    info->tier_put = c->table.n_put;
    info->tier_got = c->table.n_got;
    info->tier_refused = c->table.n_refused;
    if (c->table.n_entries != 0)
        info->n_prefix_entries = c->table.n_entries - c->table.n_free - c->table.n_salts;
    kvc__lock_leave(&c->lock);
}

static void kvc__seq_query(const kvc_seq *s, kvc_seq_info *info)
{
    kvc_cache *c = s->cache;
    uint32_t i, j;
    memset(info, 0, sizeof *info);
    info->length = s->n_pos;
    info->rollback_least = kvc__seq_least(s);
    info->prefix_hit = s->n_hit;
    info->prefix_miss = s->miss;
    kvc__lock_enter(&c->lock);
    for (i = 0; i < c->desc.model->n_reaches; i++) {
        const kvc__ring *ring = &s->rings[i];
        uint32_t own = 0, all = ring->end - ring->first;
        for (j = ring->first; j < ring->end; j++)
            own += (uint32_t)kvc__ring_alone(&c->pools[i], ring, j);
        info->pages_own += own;
        info->pages_shared += all - own;
        info->bytes_own += own * c->pools[i].page;
        info->bytes_shared += (all - own) * c->pools[i].page;
    }
    kvc__lock_leave(&c->lock);
}

/* ------------------------------------------------------------------------------------------------
   >>forward  The transformer as a plan of operations
   kvc__plan_build writes the forward pass down as a list of operations, once, when a context is
   made; it reads like the formula. For each step kvc__plan_prepare cuts every operation into
   tiles, and kvc__op_run computes one tile. A tile depends on the results of earlier operations
   only and writes what no other tile writes, so tiles of an operation may run in any order on any
   thread.
   ---------------------------------------------------------------------------------------------- */
typedef enum kvc__op_kind {
    KVC__OP_EMBED,      /* x = embedding of the row's token; turns of its position */
    KVC__OP_NORM,       /* dst = norm(src) * w, also in the forms that matrices read */
    KVC__OP_MATRIX,     /* up to 3 products of one input; added to x, written to dst, or gated */
    KVC__OP_SPLIT,      /* the heads of src, each head's rows together, in the forms that stacks
                           read */
    KVC__OP_ROPE,       /* turns q and k, stores k and v in the page */
    KVC__OP_ATTEND,     /* att = attention of a group of rows over its sequence */
    KVC__OP_MERGE,      /* the same from its parts, if the sequence was cut into runs */
    KVC__OP_TALLY,      /* adds up how much attention positions received, if the policy asks */
    KVC__OP_FORM,       /* the input in the forms that matrices read */
    KVC__OP_GATE,       /* gate = act(gate) * up, where MATRIX has not done it */
    KVC__OP_CHOOSE,     /* the experts of each row */
    KVC__OP_SORT,       /* puts the rows of each expert together: places, and runs of them */
    KVC__OP_GATHER,     /* the rows at their places, in the forms that stacks read */
    KVC__OP_COMBINE     /* the weighted sum of what a row's experts gave */
} kvc__op_kind;

/* Rows of activations in the forms that products read; NULL for one that nothing needs. */
typedef struct kvc__forms {
    unsigned char *q8;              /* quantized matrices */
    float *lanes;                   /* packed float matrices */
} kvc__forms;

/* Which part of a stack a row meets: each head's rows the head's, or as the experts were chosen.
   Rows are then counted in places: see kvc__head_place and kvc__sort. */
typedef enum kvc__stack {
    KVC__STACK_NONE, KVC__STACK_HEADS, KVC__STACK_EXPERTS
} kvc__stack;

typedef struct kvc__op {
    kvc__op_kind kind;
    uint32_t layer;
    const kvc__norm *norm;
    const kvc__matrix *mats[3];
    float *dst[3];                  /* [rows, stride] of each matrix; of NORM the first */
    size_t stride[3];
    size_t head_stride;             /* STACK_HEADS: from head to head in a row of dst */
    uint32_t n_mats;
    kvc__stack stack;
    int add_to_x;                   /* the result is added to the residual stream */
    int to_host;                    /* row r is written to `out` of the plan instead of dst */
    int gated;                      /* dst[0] = act(product 0) * product 1 */
    int acted;                      /* dst[0] = act(product 0) */
    kvc__forms make;                /* the forms of the result that matrices read */
    int wanted_rows;                /* works on the rows that want logits, not on all */
    const float *src;               /* [rows, src_stride] */
    size_t src_stride;
    kvc__forms forms;               /* the same as matrices read it */
    uint32_t width;                 /* elements of a row that count */
    /* set for each step */
    uint32_t n_rows;
    uint32_t block_rows, block_outs;    /* of a unit of MATRIX */
    uint64_t n_units;               /* blocks of MATRIX, groups x heads (x runs) of attention,
                                       quarters of spans of TALLY, else rows */
    uint64_t tile_units;            /* units in a tile */
    uint32_t n_tiles;               /* at most KVC__MAX_TILES */
    int use_cblas;
    double before;                  /* the part of the step's work that lies before it */
} kvc__op;

/* One row of a step: one token at one slot of one sequence. */
typedef struct kvc__row {
    const kvc_seq *seq;
    uint32_t slot;
    kvc_token token;
} kvc__row;

/* Consecutive rows of one sequence, which attend to it together; or rows of several, one each,
   which have pages in common and attend to those together. */
typedef struct kvc__group {
    uint32_t row, n_rows;
    uint32_t n_common;              /* spans, 0: of one sequence */
} kvc__group;

/* An expert of a row. */
typedef struct kvc__pick {
    uint32_t expert, place;
    float weight;
} kvc__pick;

/* Places of one part of a stack that follow each other, at most a block's rows. */
typedef struct kvc__bunch {
    uint32_t part, place, n_rows;
} kvc__bunch;

#define KVC__PACK_ROWS 8u           /* from so many rows on packing a block first pays */
#define KVC__LONG_OUTS 256u         /* most outputs in a block of any rows */
#define KVC__ASK_FIRST 1024u        /* of each stream, asked for when an operation is done, */
#define KVC__ASK_STEP 256u          /* at each look while waiting for the others, */
#define KVC__ASK_MOST 16384u        /* and in all: four streams fit any second-level cache */
#define KVC__MAX_TILES 16384u       /* of an operation; the cursor counts them in 16 bits */
#define KVC__SHORT_WORK 1024u       /* queries x spans of a tile of attention in a time slice */
#define KVC__MAX_PARTS 128u         /* rows x spans whose attention is kept apart */
#define KVC__PANEL 256u             /* weight rows decoded at a time for cblas */

/* Scratch memory, sized by n_batch or n_threads. */
typedef struct kvc__scratch {
    float *x;                       /* [n_batch, n_embd] the residual stream */
    float *norm;                    /* [n_batch, n_embd] */
    float *q, *k, *v;               /* [n_batch, heads * head_dim] of each */
    float *q_low;                   /* [n_batch, q_rank] */
    float *q_own;                   /* [n_batch, n_heads * head_q] latent attention: what q gives */
    float *att;                     /* [n_batch, n_heads * head_dim_v] */
    float *heads;                   /* [n_batch, n_heads * head_o] latent attention: what v_up
                                       gives */
    float *gate, *up;               /* [n_batch, n_ff] */
    float *part;                    /* [n_batch, n_embd] what a part of a layer gives, where it is
                                       not added at once */
    float *turns;                   /* [n_batch, n_ropes, 2, rope_dim]: see the kernel rope */
    kvc__forms narrow, wide;        /* [n_batch] rows: of norm, q_low, att and heads; of gate */
    kvc__forms split;               /* [n_heads, n_batch] rows of q_own or att */
    float *splits;                  /* the same as floats, for matrices in place */
    float *routes;                  /* [n_batch, n_experts] the router's logits */
    float *shares;                  /* [n_batch] those of the shared expert's gate */
    kvc__pick *picks;               /* [n_batch, n_used] by falling probability */
    kvc__bunch *bunches;            /* [kvc__max_bunches] */
    uint32_t *n_bunches;
    kvc__forms places, place_gates; /* [kvc__max_places] rows of norm; of place_gate */
    float *place_rows;              /* [kvc__max_places, n_embd] the former as floats, for matrices
                                       in place */
    float *place_gate;              /* [kvc__max_places, n_ff_expert] */
    float *place_outs;              /* [kvc__max_places, n_embd] */
    float *logits;                  /* [n_vocab] */
    float *blocks;                  /* [n_threads, 2, KVC__BLOCK_FLOATS] */
    float *sums;                    /* [n_threads, KVC__SUM_FLOATS] */
    unsigned char *packs;           /* [n_threads, pack_size] blocks packed for a while */
    size_t pack_size;
    float *panel;                   /* [KVC__PANEL, widest input], with cblas */
    float *attn;                    /* [n_threads, attn_floats] */
    size_t attn_floats;
    float *parts;                   /* [KVC__MAX_PARTS, n_heads, part], with threads */
    float *tops;                    /* [n_batch, n_heads, 2] see kvc__attn */
} kvc__scratch;

/* How attention over a reach is cut into runs of spans. */
typedef struct kvc__cut {
    uint32_t n_runs, run;           /* of spans in a unit of ATTEND, and spans in a run */
    uint32_t n_apart;               /* the most spans of a unit that are kept apart */
} kvc__cut;

typedef struct kvc__plan {
    const kvc_model *model;
    const kvc__kernels *kernels;
    kvc_gemm gemm;
    uint32_t n_threads;
    uint32_t n_head_groups;         /* key heads, each as often as its query heads need */
    kvc__scratch s;
    kvc__op *ops;
    uint32_t n_ops;
    /* the step */
    kvc__row *rows;                 /* [n_batch] */
    uint32_t *wanted;               /* [n_batch] rows that want logits, rising, */
    float **out;                    /* [n_batch] and where those go, [n_vocab] each */
    uint32_t n_rows, n_wanted;
    int is_decode;
    int is_sliced;                  /* tiles are to be short */
    kvc__group *groups;             /* [n_batch] the rows in n_groups parts */
    uint32_t n_groups;
    int has_common;                 /* some of them have spans in common */
    kvc__cut cuts[KVC_MAX_REACHES];
} kvc__plan;

static const kvc__cut *kvc__cut_of(const kvc__plan *p, const kvc__op *op)
{
    return &p->cuts[p->model->layers[op->layer].reach];
}

/* Elements from row to row of values, for attention. */
static uint32_t kvc__attn_v_stride(const kvc_model *m)
{
    return kvc__padded(m->head_dim_v);
}

/* ---- places: where the rows of stacks lie ----
   A tile of rows in 8 bits reads groups of KVC__Q8_ROWS rows, which must be of one part, so the
   rows of each part begin at a multiple of that; a step of one row has groups of one. */

static uint32_t kvc__place_up(uint32_t n_rows, uint32_t n)
{
    const uint32_t height = kvc__q8_height(n_rows);
    return kvc__div_up(n, height) * height;
}

static uint32_t kvc__head_place(uint32_t n_rows, uint32_t head, uint32_t row)
{
    return head * kvc__place_up(n_rows, n_rows) + row;
}

/* Experts that n_rows rows can have in all. */
static uint32_t kvc__most_experts(const kvc_model *m, uint32_t n_rows)
{
    const uint64_t n = (uint64_t)n_rows * m->n_used;
    return n < m->n_experts ? (uint32_t)n : m->n_experts;
}

static uint64_t kvc__max_places(const kvc_model *m, uint32_t n_rows)
{
    return (uint64_t)n_rows * m->n_used +
        (uint64_t)kvc__most_experts(m, n_rows) * (KVC__Q8_ROWS - 1) + KVC__LANE_ROWS;
}

/* Blocks of at most block_rows rows that the experts' rows can make. */
static uint64_t kvc__max_bunches(const kvc_model *m, uint32_t n_rows, uint32_t block_rows)
{
    return (uint64_t)n_rows * m->n_used / block_rows + kvc__most_experts(m, n_rows);
}

/* ---- building ---- */

static kvc__op *kvc__plan_add(kvc__plan *p, kvc__op_kind kind, uint32_t layer)
{
    kvc__op *op = &p->ops[p->n_ops++];
    memset(op, 0, sizeof *op);
    op->kind = kind;
    op->layer = layer;
    return op;
}

/* Those of the forms that the product `m` reads. */
static void kvc__forms_add(kvc__forms *make, const kvc__forms *forms, const kvc__matrix *m)
{
    if (kvc__is_quantized(m)) make->q8 = forms->q8;
    else make->lanes = forms->lanes;
}

/* dst [rows, width] = norm of src. */
static kvc__op *kvc__plan_norm(kvc__plan *p, uint32_t layer, const kvc__norm *norm,
    const float *src, float *dst, uint32_t width)
{
    kvc__op *op = kvc__plan_add(p, KVC__OP_NORM, layer);
    op->norm = norm;
    op->src = src;
    op->dst[0] = dst;
    op->src_stride = op->stride[0] = op->width = width;
    return op;
}

/* src [rows, width] in the forms that the products which follow read. */
static kvc__op *kvc__plan_form(kvc__plan *p, uint32_t layer, const float *src, uint32_t width)
{
    kvc__op *op = kvc__plan_add(p, KVC__OP_FORM, layer);
    op->src = src;
    op->src_stride = op->width = width;
    return op;
}

static void kvc__plan_also(kvc__op *op, const kvc__matrix *m, kvc__op *from, float *dst,
    size_t stride)
{
    kvc__forms_add(&from->make, &op->forms, m);
    op->mats[op->n_mats] = m;
    op->dst[op->n_mats] = dst;
    op->stride[op->n_mats++] = stride;
}

/* from: the operation that makes the input's forms; dst: [rows, stride] */
static kvc__op *kvc__plan_matrix(kvc__plan *p, uint32_t layer, const kvc__matrix *m,
    const float *src, const kvc__forms *forms, kvc__op *from, float *dst, size_t stride)
{
    kvc__op *op = kvc__plan_add(p, KVC__OP_MATRIX, layer);
    op->src = src;
    op->src_stride = m->n_in;
    op->forms = *forms;
    op->width = m->n_in;
    kvc__plan_also(op, m, from, dst, stride);
    return op;
}

/* What a part of a layer gives is added to the residual stream, perhaps after a norm. */
static void kvc__plan_add_part(kvc__plan *p, kvc__op *last, const kvc__norm *post)
{
    const uint32_t width = p->model->n_embd;
    if (post->w == NULL) {
        last->dst[0] = p->s.x;
        last->add_to_x = 1;
        return;
    }
    last->dst[0] = p->s.part;
    kvc__plan_norm(p, last->layer, post, p->s.part, p->s.x, width)->add_to_x = 1;
}

/* The input of a part: the norm of x, or x. */
static kvc__op *kvc__plan_input(kvc__plan *p, uint32_t layer, const kvc__norm *norm,
    const float **src)
{
    *src = norm->w != NULL ? p->s.norm : p->s.x;
    if (norm->w != NULL)
        return kvc__plan_norm(p, layer, norm, p->s.x, p->s.norm, p->model->n_embd);
    return kvc__plan_form(p, layer, p->s.x, p->model->n_embd);
}

/* Each head's rows of src, which is [rows, heads of `stride`], as many elements as m has inputs,
   times the part of m that is the head's. */
static void kvc__plan_heads(kvc__plan *p, uint32_t layer, const kvc__matrix *m, const float *src,
    size_t stride, float *dst, size_t dst_head)
{
    const kvc_model *model = p->model;
    kvc__op *split = kvc__plan_add(p, KVC__OP_SPLIT, layer), *op;
    split->src = src;
    split->src_stride = model->n_heads * stride;
    split->head_stride = stride;
    split->width = m->n_in;
    split->dst[0] = p->s.splits;
    op = kvc__plan_matrix(p, layer, m, p->s.splits, &p->s.split, split, dst,
        model->n_heads * dst_head);
    op->stack = KVC__STACK_HEADS;
    op->head_stride = dst_head;
}

/* Latent attention (see kvc__shape_latent): keys are written as [turned part, latent], queries as
   what meets them. */
static kvc__op *kvc__plan_latent(kvc__plan *p, uint32_t i)
{
    const kvc_model *m = p->model;
    const kvc__layer *l = &m->layers[i];
    const kvc__scratch *s = &p->s;
    const float *src;
    const size_t own = (size_t)m->n_heads * m->head_q;
    kvc__op *norm = kvc__plan_input(p, i, &l->attn_norm, &src), *op, *low;
    op = kvc__plan_matrix(p, i, &l->k, src, &s->narrow, norm, s->k, m->head_dim);
    kvc__plan_also(op, &l->v, norm, s->k + m->rope_dim, m->head_dim);
    if (m->q_rank == 0) {
        kvc__plan_also(op, &l->q, norm, s->q_own, own);
    } else {
        kvc__plan_also(op, &l->q_low, norm, s->q_low, m->q_rank);
        low = kvc__plan_norm(p, i, &l->q_low_norm, s->q_low, s->q_low, m->q_rank);
        kvc__plan_matrix(p, i, &l->q, s->q_low, &s->narrow, low, s->q_own, own);
    }
    kvc__plan_heads(p, i, &l->k_up, s->q_own, m->head_q, s->q + m->rope_dim, m->head_dim);
    return norm;
}

/* Queries, keys and values of layer i, from the residual stream. Returns what made their input. */
static kvc__op *kvc__plan_qkv(kvc__plan *p, uint32_t i)
{
    const kvc_model *m = p->model;
    const kvc__layer *l = &m->layers[i];
    const kvc__scratch *s = &p->s;
    const float *src;
    kvc__op *norm, *op;
    if (kvc__has(m, KVC__LATENT)) return kvc__plan_latent(p, i);
    norm = kvc__plan_input(p, i, &l->attn_norm, &src);
    op = kvc__plan_matrix(p, i, &l->q, src, &s->narrow, norm, s->q, l->q.n_out);
    kvc__plan_also(op, &l->k, norm, s->k, l->k.n_out);
    kvc__plan_also(op, &l->v, norm, s->v, l->v.n_out);
    return norm;
}

/* The rest of attention, back into the residual stream. */
static void kvc__plan_attend(kvc__plan *p, uint32_t i)
{
    const kvc_model *m = p->model;
    const kvc__layer *l = &m->layers[i];
    const kvc__scratch *s = &p->s;
    const float *att = s->att;
    kvc__op *form;
    kvc__plan_add(p, KVC__OP_ROPE, i)->width = m->n_heads * m->head_dim;
    kvc__plan_add(p, KVC__OP_ATTEND, i);
    kvc__plan_add(p, KVC__OP_MERGE, i);
    if (m->reaches[l->reach].window == 0) kvc__plan_add(p, KVC__OP_TALLY, i);
    if (kvc__has(m, KVC__LATENT)) {
        kvc__plan_heads(p, i, &l->v_up, s->att, m->head_dim_v, s->heads, m->head_o);
        att = s->heads;
    }
    form = kvc__plan_form(p, i, att, l->o.n_in);
    kvc__plan_add_part(p, kvc__plan_matrix(p, i, &l->o, att, &s->narrow, form, NULL, m->n_embd),
        &l->attn_post);
}

/* down(act(gate x) * up x), or without a gate, of the dense matrices. Returns the last product,
   which needs a place for its result. */
static kvc__op *kvc__plan_dense(kvc__plan *p, uint32_t i, const float *src, kvc__op *norm)
{
    const kvc__layer *l = &p->model->layers[i];
    const kvc__scratch *s = &p->s;
    const int gated = l->gate.data != NULL;
    const kvc__matrix *first = gated ? &l->gate : &l->up;
    kvc__op *op, *gate, *down;
    op = kvc__plan_matrix(p, i, first, src, &s->narrow, norm, s->gate, first->n_out);
    if (gated) kvc__plan_also(op, &l->up, norm, s->up, l->up.n_out);
    op->gated = gated;
    op->acted = !gated;
    gate = kvc__plan_add(p, KVC__OP_GATE, i);
    gate->gated = gated;
    gate->width = first->n_out;
    down = kvc__plan_matrix(p, i, &l->down, s->gate, &s->wide, gate, NULL, p->model->n_embd);
    op->make = gate->make;
    return down;
}

/* A mixture of experts (Shazeer et al., "Outrageously large neural networks", 2017): the router
   chooses, then the rows of each expert go through it together. */
static void kvc__plan_experts(kvc__plan *p, uint32_t i, const float *src, kvc__op *norm)
{
    const kvc_model *m = p->model;
    const kvc__layer *l = &m->layers[i];
    const kvc__scratch *s = &p->s;
    kvc__op *op, *gather;
    op = kvc__plan_matrix(p, i, &l->router, src, &s->narrow, norm, s->routes, m->n_experts);
    if (l->shared_gate.data != NULL) kvc__plan_also(op, &l->shared_gate, norm, s->shares, 1);
    if (l->down.data != NULL) kvc__plan_dense(p, i, src, norm)->dst[0] = s->part;
    kvc__plan_add(p, KVC__OP_CHOOSE, i)->width = m->n_experts;
    kvc__plan_add(p, KVC__OP_SORT, i)->width = m->n_used;
    gather = kvc__plan_add(p, KVC__OP_GATHER, i);
    gather->src = src;
    gather->src_stride = gather->width = m->n_embd;
    gather->dst[0] = s->place_rows;
    op = kvc__plan_matrix(p, i, &l->gates, s->place_rows, &s->places, gather, s->place_gate,
        m->n_ff_expert);
    kvc__plan_also(op, &l->ups, gather, NULL, 0);
    op->gated = 1;
    op->stack = KVC__STACK_EXPERTS;
    kvc__plan_matrix(p, i, &l->downs, s->place_gate, &s->place_gates, op, s->place_outs,
        m->n_embd)->stack = KVC__STACK_EXPERTS;
    op = kvc__plan_add(p, KVC__OP_COMBINE, i);
    op->stride[0] = op->width = m->n_embd;
    kvc__plan_add_part(p, op, &l->ffn_post);
}

/* qkv: what made the input of attention, for a parallel layer without another norm. */
static void kvc__plan_ffn(kvc__plan *p, uint32_t i, kvc__op *qkv)
{
    const kvc__layer *l = &p->model->layers[i];
    const float *src = p->s.norm;
    kvc__op *norm = qkv;
    if (!l->is_parallel || l->ffn_norm.w != NULL)
        norm = kvc__plan_input(p, i, &l->ffn_norm, &src);
    if (l->router.data != NULL) kvc__plan_experts(p, i, src, norm);
    else kvc__plan_add_part(p, kvc__plan_dense(p, i, src, norm), &l->ffn_post);
}

#define KVC__OPS_PER_LAYER 28u
#define KVC__OPS_AROUND 4u

/* The last operation is the LM head. A parallel feed-forward part comes before attention is done
   with, for its input is still there then. */
static void kvc__plan_build(kvc__plan *p)
{
    const kvc_model *m = p->model;
    kvc__op *norm, *head;
    uint32_t i;
    p->n_ops = 0;
    kvc__plan_add(p, KVC__OP_EMBED, 0)->width = m->n_embd;
    if (m->embd_norm.w != NULL) kvc__plan_norm(p, 0, &m->embd_norm, p->s.x, p->s.x, m->n_embd);
    for (i = 0; i < m->n_layers; i++) {
        kvc__op *qkv = kvc__plan_qkv(p, i);
        if (m->layers[i].is_parallel) kvc__plan_ffn(p, i, qkv);
        kvc__plan_attend(p, i);
        if (!m->layers[i].is_parallel) kvc__plan_ffn(p, i, qkv);
    }
    norm = kvc__plan_norm(p, 0, &m->output_norm, p->s.x, p->s.norm, m->n_embd);
    norm->wanted_rows = 1;
    head = kvc__plan_matrix(p, 0, &m->output, p->s.norm, &p->s.narrow, norm, NULL, m->n_vocab);
    head->wanted_rows = head->to_host = 1;
}

/* ---- cutting into tiles ---- */

/* The most outputs in a block, from so many rows on that their results are what limits it. Weights
   that are packed for a while, and floats, which are summed apart, have scratch memory for
   KVC__BLOCK_OUTS. */
static uint32_t kvc__most_outs(const kvc__op *op)
{
    const uint32_t rows = kvc__div_up(op->block_rows, KVC__LANE_ROWS) * KVC__LANE_ROWS;
    uint32_t i, most = KVC__BLOCK_FLOATS / rows / 64 * 64;
    for (i = 0; op->n_rows >= KVC__PACK_ROWS && i < op->n_mats; i++)
        if (op->mats[i]->packed == NULL || !kvc__is_quantized(op->mats[i])) return KVC__BLOCK_OUTS;
    return most < KVC__LONG_OUTS ? most : KVC__LONG_OUTS;
}

/* Bunches of places that a stack's rows make: of experts the most that there can be. */
static uint64_t kvc__prepare_bunches(const kvc__plan *p, const kvc__op *op)
{
    if (op->stack == KVC__STACK_EXPERTS)
        return kvc__max_bunches(p->model, op->n_rows, op->block_rows);
    return (uint64_t)p->model->n_heads * kvc__div_up(op->n_rows, op->block_rows);
}

/* Outputs in a block, in multiples of 32 where blocks of 32 are quantized or a register tile of
   several rows takes as many. Long blocks, since each begins with a wait for memory, but two for
   each thread, so that one that is held up can be helped. */
static uint32_t kvc__prepare_outs(const kvc__plan *p, const kvc__op *op)
{
    const uint32_t most = kvc__most_outs(op);
    uint64_t all = 0, outs;
    uint32_t i, least = op->gated || op->acted || op->n_rows > 1 ? 32 : 16;
    if (op->n_rows >= KVC__PACK_ROWS) least = KVC__BLOCK_OUTS;
    for (i = 0; i < op->n_mats; i++) all += op->mats[i]->n_out;
    if (op->stack != KVC__STACK_NONE) all *= kvc__prepare_bunches(p, op);
    outs = all / (2u * p->n_threads) / least * least;
    if (outs >= 64) outs = outs / 64 * 64;      /* four streams of whole groups */
    return outs < least ? least : outs > most ? most : (uint32_t)outs;
}

/* Rows in a block: an even share, in whole groups. */
static uint32_t kvc__prepare_rows(const kvc__op *op)
{
    uint32_t share, n_blocks = kvc__div_up(op->n_rows, KVC__BLOCK_ROWS);
    if (n_blocks <= 1) return op->n_rows > 0 ? op->n_rows : 1;
    if (op->stack == KVC__STACK_EXPERTS) return KVC__BLOCK_ROWS;
    share = kvc__div_up(op->n_rows, n_blocks);
    return kvc__div_up(share, KVC__LANE_ROWS) * KVC__LANE_ROWS;
}

static void kvc__prepare_matrix(const kvc__plan *p, kvc__op *op)
{
    uint64_t row_blocks;
    uint32_t i;
    int floats = 1;
    op->block_rows = kvc__prepare_rows(op);
    op->block_outs = kvc__prepare_outs(p, op);
    row_blocks = op->stack != KVC__STACK_NONE ? kvc__prepare_bunches(p, op)
        : kvc__div_up(op->n_rows, op->block_rows);
    op->n_units = 0;
    op->tile_units = 1;
    for (i = 0; i < op->n_mats; i++) {
        if (i == 0 || !op->gated)
            op->n_units += kvc__div_up(op->mats[i]->n_out, op->block_outs) * row_blocks;
        floats = floats && !kvc__is_quantized(op->mats[i]);
    }
    op->use_cblas = p->gemm == KVC_GEMM_CBLAS && !p->is_decode && floats && op->n_rows > 0 &&
        op->stack == KVC__STACK_NONE;
    if (op->use_cblas) op->n_units = 1;
}

/* Whole spans that both sequences see from their beginning on, up to their next tokens, and that
   lie in the same pages; without those that the policy counts. */
static uint32_t kvc__common_spans(const kvc__plan *p, const kvc__row *r, const kvc__row *other)
{
    const kvc_seq *a = r->seq, *b = other->seq;
    const kvc_cache *c = a->cache;
    const uint32_t least = r->slot < other->slot ? r->slot : other->slot;
    const kvc__ring *ring = &a->rings[c->token_reach], *with = &b->rings[c->token_reach];
    uint32_t i, n = least / KVC__SPAN * (KVC__SPAN >> c->page_shift);
    if (p->model->reaches[c->token_reach].window != 0 || b->cache != c || n == 0 ||
        a->n_extents != 1 || b->n_extents != 1 || a->n_marked != 0 || b->n_marked != 0 ||
        a->policy == KVC_POLICY_HEAVY || b->policy == KVC_POLICY_HEAVY ||
        a->extents[0].slot != 0 || b->extents[0].slot != 0 ||
        a->extents[0].page != b->extents[0].page) return 0;
    for (i = 0; i < n; i++) {
        const uint32_t page = a->extents[0].page + i;
        if (page % KVC__LEAF_PAGES == 0 && *kvc__leaf_at(ring, page) == *kvc__leaf_at(with, page))
            i += KVC__LEAF_PAGES - 1;
        else if (kvc__ring_at(ring, page) != kvc__ring_at(with, page)) break;
    }
    return (i < n ? i : n) / (KVC__SPAN >> c->page_shift);
}

/* Whether the next row can be one of the group, in which it then is. */
static int kvc__group_take(kvc__plan *p, kvc__group *g, const kvc__row *r)
{
    const int last = r + 1 == p->rows + p->n_rows || r[1].seq != r->seq;
    uint32_t n;
    if (g->n_common == 0 && r->seq == r[-1].seq && r->slot == r[-1].slot + 1) return 1;
    if ((g->n_common == 0 && g->n_rows > 1) || r->seq == r[-1].seq || !last) return 0;
    n = kvc__common_spans(p, &p->rows[g->row], r);
    if (n == 0 || 2 * n < g->n_common) return 0;
    if (g->n_common == 0 || n < g->n_common) g->n_common = n;
    p->has_common = 1;
    return 1;
}

/* Rows of a group that make a short tile. */
static uint32_t kvc__short_rows(const kvc__row *r, uint32_t n_heads)
{
    const uint32_t n = KVC__SHORT_WORK / (r->slot / KVC__SPAN + 1) / n_heads;
    return n > 1 ? n : 1;
}

/* Puts rows that follow each other in one sequence into groups, or rows of sequences that have
   pages in common, the larger the better: a group reads keys and values once for all of its rows.
   But there should be work for all threads; few rows of one sequence are cut by spans instead. */
static void kvc__prepare_groups(kvc__plan *p)
{
    const uint32_t n_heads = p->model->n_heads / p->model->n_kv_heads;
    uint32_t most = n_heads < KVC__MAX_QUERIES ? KVC__MAX_QUERIES / n_heads : 1, few = most, row;
    uint64_t share = (uint64_t)p->n_rows * p->n_head_groups / (4 * p->n_threads);
    kvc__group *g = NULL;
    if (p->n_threads > 1 && share < most) few = share > 1 ? (uint32_t)share : 1;
    if (p->n_rows > 8) most = few;
    p->n_groups = 0;
    p->has_common = 0;
    for (row = 0; row < p->n_rows; row++) {
        const kvc__row *r = &p->rows[row];
        uint32_t room = row != 0 && r->seq == r[-1].seq ? most : few;
        if (p->is_sliced && room > kvc__short_rows(r, n_heads)) room = kvc__short_rows(r, n_heads);
        if (g == NULL || g->n_rows >= room || !kvc__group_take(p, g, r)) {
            g = &p->groups[p->n_groups++];
            g->row = row;
            g->n_rows = g->n_common = 0;
        }
        g->n_rows++;
    }
}

/* The slot of a group's last row. */
static uint32_t kvc__group_slot(const kvc__plan *p, const kvc__group *g)
{
    return p->rows[g->row + g->n_rows - 1].slot;
}

/* The most spans that a group sees. */
static uint32_t kvc__most_spans(const kvc__plan *p, uint32_t window)
{
    uint32_t i, n, most = 0;
    for (i = 0; i < p->n_groups; i++) {
        const kvc__group *g = &p->groups[i];
        const kvc__row *r = &p->rows[g->row];
        if (g->n_common != 0) continue;
        n = kvc__span_end(r->seq->extents, r->seq->n_extents, kvc__group_slot(p, g)) -
            kvc__span_first(r->seq->extents, r->seq->n_extents, r->slot, window);
        if (n > most) most = n;
    }
    return most;
}

/* Cuts the spans of each unit into runs if the threads lack units. The merging is a sum from the
   left and must stay one: the first run merges as it goes, the spans of the others are kept apart,
   a part each, until KVC__OP_MERGE. There is memory for KVC__MAX_PARTS parts; if the rows see more
   spans than that, the first run takes what is left. */
static void kvc__prepare_runs(kvc__plan *p, uint32_t reach)
{
    kvc__cut *cut = &p->cuts[reach];
    uint32_t n = kvc__most_spans(p, p->model->reaches[reach].window);
    uint32_t slots = KVC__MAX_PARTS / p->n_rows;
    uint64_t units = (uint64_t)p->n_groups * p->n_head_groups, want = 4 * p->n_threads;
    memset(cut, 0, sizeof *cut);
    cut->n_runs = 1;
    if (p->n_threads == 1 || units >= want || slots < 2 || n < 3 || p->has_common) return;
    cut->run = (uint32_t)((n * units + want - 1) / want);
    cut->n_apart = n - cut->run < slots - 1 ? n - cut->run : slots - 1;
    cut->n_runs = 1 + kvc__div_up(cut->n_apart, cut->run);
}

/* Quarters of spans, up to the last that a sequence with KVC_POLICY_HEAVY has. */
static uint32_t kvc__prepare_tally(const kvc__plan *p)
{
    uint32_t i, n = 0, end;
    for (i = 0; i < p->n_groups; i++) {
        const kvc__group *g = &p->groups[i];
        const kvc__row *r = &p->rows[g->row];
        if (r->seq->policy != KVC_POLICY_HEAVY) continue;
        end = kvc__span_end(r->seq->extents, r->seq->n_extents, kvc__group_slot(p, g));
        if (end > n) n = end;
    }
    return 4 * n;
}

static void kvc__prepare(const kvc__plan *p, kvc__op *op)
{
    uint64_t most;
    op->n_rows = op->wanted_rows ? p->n_wanted : p->n_rows;
    if (op->kind == KVC__OP_MATRIX) {
        kvc__prepare_matrix(p, op);
    } else if (op->kind == KVC__OP_ATTEND) {
        op->n_units = (uint64_t)p->n_groups * p->n_head_groups * kvc__cut_of(p, op)->n_runs;
        op->tile_units = 1;
    } else if (op->kind == KVC__OP_MERGE) {
        op->n_units = (uint64_t)p->n_groups * p->n_head_groups;
        if (kvc__cut_of(p, op)->n_runs == 1) op->n_units = 0;
        op->tile_units = 1;
    } else if (op->kind == KVC__OP_TALLY) {
        op->n_units = kvc__prepare_tally(p);
        op->tile_units = 1;
    } else {
        op->n_units = op->n_rows;
        if (op->kind == KVC__OP_GATE && !op[-1].use_cblas) op->n_units = 0;
        else if (op->kind == KVC__OP_SPLIT) op->n_units *= p->model->n_heads;
        else if (op->kind == KVC__OP_GATHER) op->n_units *= p->model->n_used;
        else if (op->kind == KVC__OP_SORT && op->n_rows > 0) op->n_units = 1;
        op->tile_units = 8192u / op->width + 1u;
    }
    most = (op->n_units + KVC__MAX_TILES - 1) / KVC__MAX_TILES;
    if (op->tile_units < most) op->tile_units = most;
    op->n_tiles = (uint32_t)((op->n_units + op->tile_units - 1) / op->tile_units);
}

/* Positions that rows from a slot on see, all together. */
static double kvc__seen(uint32_t slot, uint32_t n_rows, uint32_t window)
{
    double last = (double)slot + n_rows, whole = window != 0 ? window : last;
    if (slot + 1 >= whole) return whole * n_rows;
    return n_rows * ((double)slot + (last < whole ? last : whole) + 1) / 2;
}

/* Multiplications of a row with matrices. */
static double kvc__matrix_work(const kvc_model *m, const kvc__op *op)
{
    double sum = 0;
    uint32_t i;
    for (i = 0; i < op->n_mats; i++) sum += (double)op->mats[i]->n_out * op->width;
    if (op->stack == KVC__STACK_HEADS) return sum * m->n_heads;
    return op->stack == KVC__STACK_EXPERTS ? sum * m->n_used : sum;
}

/* An operation's work, roughly in multiplications. */
static double kvc__op_work(const kvc__plan *p, const kvc__op *op)
{
    const kvc_model *m = p->model;
    double sum = 0;
    uint32_t i;
    if (op->kind == KVC__OP_MATRIX) return kvc__matrix_work(m, op) * op->n_rows;
    if (op->kind != KVC__OP_ATTEND) return 4.0 * op->n_rows * op->width;
    for (i = 0; i < p->n_groups; i++) {
        const kvc__group *g = &p->groups[i];
        sum += kvc__seen(p->rows[g->row].slot, g->n_rows,
            m->reaches[m->layers[op->layer].reach].window);
    }
    return sum * m->n_heads * (m->head_dim + m->head_dim_v);
}

/* For the rows now in the plan. */
static void kvc__plan_prepare(kvc__plan *p)
{
    double work = 0;
    uint32_t i;
    kvc__prepare_groups(p);
    for (i = 0; i < p->model->n_reaches; i++) kvc__prepare_runs(p, i);
    for (i = 0; i < p->n_ops; i++) {
        kvc__prepare(p, &p->ops[i]);
        p->ops[i].before = work;
        work += kvc__op_work(p, &p->ops[i]);
    }
    for (i = 0; i < p->n_ops; i++) p->ops[i].before /= work;
}

/* ---- operations, a unit each ---- */

/* Elements [from, from + n) of a row of the op's result, whole blocks, in the forms to make; x is
   the first of them. */
static void kvc__form_part(const kvc__plan *p, const kvc__op *op, const float *x, uint32_t width,
    uint32_t row, uint32_t from, uint32_t n)
{
    uint32_t height = kvc__q8_height(op->n_rows);
    if (op->make.q8 != NULL)
        p->kernels->quantize(x, n, op->make.q8 + kvc__q8_offset(row, height, width, from),
            row % height, height);
    if (op->make.lanes != NULL)
        p->kernels->to_lanes(op->make.lanes + row * kvc__lanes_stride(width), x, width, from, n);
}

static void kvc__embed_row(const kvc__plan *p, uint32_t row)
{
    const kvc_model *m = p->model;
    const kvc__row *r = &p->rows[row];
    const kvc_cache *c = r->seq->cache;
    float *x = p->s.x + (size_t)row * m->n_embd, *own = p->s.norm + (size_t)row * m->n_embd;
    uint32_t i;
    kvc__decode_row(x, m->embd.data + (size_t)(uint32_t)r->token * m->embd.row_size, m->embd.type,
        m->n_embd);
    if (m->embd_scale < 1.0f || m->embd_scale > 1.0f)
        p->kernels->multiply(x, m->embd_scale, m->n_embd);
    if (m->pos_embd.data != NULL) {
        kvc__decode_row(own, m->pos_embd.data + (size_t)r->slot * m->pos_embd.row_size,
            m->pos_embd.type, m->n_embd);
        p->kernels->accumulate(x, own, 1.0f, m->n_embd);
    }
    for (i = 0; m->rope_dim != 0 && i < m->n_ropes; i++)
        kvc__rope_turn(m, kvc__rope_freq(m, c->rope_set, i), (double)r->slot, m->rope_scale[i],
            p->s.turns + ((size_t)row * m->n_ropes + i) * 2 * m->rope_dim);
}

/* Norms n rows of `width` elements, w by w. */
static void kvc__norm_rows(const kvc__plan *p, const kvc__norm *norm, const float *x, float *y,
    uint32_t n, uint32_t width, size_t w_stride)
{
    const float eps = p->model->norm_eps;
    uint32_t i;
    for (i = 0; i < n; i++, x += width, y += width) {
        const float *w = norm->w + i * w_stride, *b = norm->b != NULL ? norm->b + i * w_stride
            : NULL;
        if (kvc__has(p->model, KVC__LAYER_NORM)) p->kernels->layer_norm(y, x, w, b, width, eps);
        else p->kernels->rms_norm(y, x, w, width, eps);
    }
}

static void kvc__norm_row(const kvc__plan *p, const kvc__op *op, uint32_t row)
{
    const uint32_t from = op->wanted_rows ? p->wanted[row] : row;
    const float *x = op->src + (size_t)from * op->src_stride;
    float *y = op->dst[0] + (size_t)row * op->stride[0];
    if (op->add_to_x) {
        float *part = p->s.part + (size_t)row * op->width;
        kvc__norm_rows(p, op->norm, x, part, 1, op->width, 0);
        p->kernels->accumulate(y, part, p->model->residual_scale, op->width);
        return;
    }
    kvc__norm_rows(p, op->norm, x, y, 1, op->width, 0);
    kvc__form_part(p, op, y, op->width, row, 0, op->width);
}

/* Heads of `dim` elements, each normed alone, with a weight for all or one for each, or all as
   one. */
static void kvc__norm_heads(const kvc__plan *p, const kvc__norm *norm, float *x, uint32_t n_heads,
    uint32_t dim)
{
    if (norm->w == NULL) return;
    if (kvc__has(p->model, KVC__QK_NORM_WHOLE))
        kvc__norm_rows(p, norm, x, x, 1, n_heads * dim, 0);
    else
        kvc__norm_rows(p, norm, x, x, n_heads, dim, kvc__has(p->model, KVC__QK_NORM_MAY) ? dim : 0);
}

/* Queries also get the scale of the scores, 1 / sqrt(head_dim) if nothing else is known (Vaswani et
   al. 2017). With latent attention they and the key lie half made: see kvc__plan_latent. */
static void kvc__rope_row(const kvc__plan *p, const kvc__op *op, uint32_t row)
{
    const kvc_model *m = p->model;
    const kvc__row *r = &p->rows[row];
    const kvc__layer *l = &m->layers[op->layer];
    const uint32_t rope = l->rope == KVC__NO_ROPE ? 0 : l->rope, apart = kvc__rope_apart(m);
    const uint32_t n_q = m->n_heads * m->head_dim, n_k = m->n_kv_heads * m->head_dim;
    const uint32_t n_v = m->n_kv_heads * kvc__stored_v(m), dim = kvc__layer_turns(m, op->layer);
    const float *turn = p->s.turns + ((size_t)row * m->n_ropes + rope) * 2 * m->rope_dim;
    float *q = p->s.q + (size_t)row * n_q, *k = p->s.k + (size_t)row * n_k;
    float *v = p->s.v + (size_t)row * n_v;
    uint32_t h;
    if (m->qkv_clamp > 0) {
        p->kernels->clamp(q, m->qkv_clamp, n_q);
        p->kernels->clamp(k, m->qkv_clamp, n_k);
        p->kernels->clamp(v, m->qkv_clamp, n_v);
    }
    if (kvc__has(m, KVC__LATENT)) {
        const float *own = p->s.q_own + (size_t)row * m->n_heads * m->head_q;
        for (h = 0; h < m->n_heads; h++)
            memcpy(q + (size_t)h * m->head_dim, own + (size_t)(h + 1) * m->head_q - m->rope_dim,
                m->rope_dim * sizeof *q);
        kvc__norm_rows(p, &l->v_norm, k + m->rope_dim, k + m->rope_dim, 1, m->head_dim_v, 0);
    }
    kvc__norm_heads(p, &l->q_norm, q, m->n_heads, m->head_dim);
    kvc__norm_heads(p, &l->k_norm, k, m->n_kv_heads, m->head_dim);
    p->kernels->rope(q, m->n_heads, m->head_dim, dim, apart, turn, m->score_scale);
    if (dim != 0) p->kernels->rope(k, m->n_kv_heads, m->head_dim, dim, apart, turn, 1.0f);
    kvc__kv_store(p->kernels, r->seq, op->layer, r->slot, k, v);
}

/* The first query head of a unit. A key head with more of them than a group holds has several
   units. */
static uint32_t kvc__first_head(const kvc__plan *p, uint32_t unit)
{
    uint32_t head = unit % p->n_head_groups, cuts = p->n_head_groups / p->model->n_kv_heads;
    return head / cuts * (p->model->n_heads / p->model->n_kv_heads) +
        head % cuts * KVC__MAX_QUERIES;
}

/* n_rows rows from `row` on of a group, the heads of a unit, and all spans. */
static void kvc__attend_rows(const kvc__plan *p, const kvc__op *op, uint32_t unit, uint32_t row,
    uint32_t n_rows, kvc__attn *a)
{
    const kvc_model *m = p->model;
    uint32_t n_heads = m->n_heads / m->n_kv_heads, first = kvc__first_head(p, unit);
    uint32_t head = first / n_heads, left = n_heads - first % n_heads;
    const kvc__row *r = &p->rows[row];
    const kvc_cache *c = r->seq->cache;
    const kvc__layer_kv *l = &c->layers[op->layer];
    const uint32_t reach = m->layers[op->layer].reach;
    a->n_rows = n_rows;
    a->n_q = left < KVC__MAX_QUERIES ? left : KVC__MAX_QUERIES;
    a->q_stride = (size_t)m->n_heads * m->head_dim;
    a->out_stride = (size_t)m->n_heads * m->head_dim_v;
    a->q = p->s.q + row * a->q_stride + (size_t)first * m->head_dim;
    a->out = p->s.att + row * a->out_stride + (size_t)first * m->head_dim_v;
    a->slabs = c->pools[reach].slabs;
    a->layer = op->layer;
    a->head = head;
    a->k_piece = l->k_piece;
    a->v_piece = l->v_piece;
    a->ring = r->seq->rings[reach].leaves;
    a->ring_cap = r->seq->rings[reach].cap;
    a->page_shift = c->page_shift;
    a->head_dim = m->head_dim;
    a->head_dim_v = m->head_dim_v;
    a->v_stride = kvc__attn_v_stride(m);
    a->v_in_k = kvc__has(m, KVC__LATENT);
    a->v_from = m->head_dim - m->head_dim_v;
    a->soft_cap = m->score_cap;
    a->slopes = m->slopes != NULL ? m->slopes + first : NULL;
    a->sinks = m->layers[op->layer].sinks != NULL ? m->layers[op->layer].sinks + first : NULL;
    a->extents = r->seq->extents;
    a->n_extents = r->seq->n_extents;
    a->rope_dim = kvc__layer_turns(m, op->layer);
    a->turns = r->seq->turns + kvc__turns_place(c, m->layers[op->layer].rope);
    a->apart = kvc__rope_apart(m);
    a->n_marked = r->seq->n_marked;
    a->mark_turns = r->seq->mark_turns;
    a->tally = r->seq->tally;
    a->tops_stride = 2 * (size_t)m->n_heads;
    a->tops = NULL;
    if (r->seq->policy == KVC_POLICY_HEAVY && m->reaches[reach].window == 0)
        a->tops = p->s.tops + row * a->tops_stride + 2 * (size_t)first;
    a->slot = r->slot;
    a->window = m->reaches[reach].window;
    a->from = kvc__span_first(a->extents, a->n_extents, a->slot, a->window);
    a->to = kvc__span_end(a->extents, a->n_extents, a->slot + a->n_rows - 1);
    a->type_k = l->type_k;
    a->type_v = l->type_v;
    a->parts = NULL;
    a->goes_on = 0;
}

/* The same of a whole group. */
static void kvc__attend_unit(const kvc__plan *p, const kvc__op *op, uint32_t unit, kvc__attn *a)
{
    const kvc__group *g = &p->groups[unit / p->n_head_groups];
    kvc__attend_rows(p, op, unit, g->row, g->n_rows, a);
}

/* A unit of rows that have spans in common: those first, for all rows; then each row's own. Layers
   that see a window have no use of it. */
static void kvc__attend_apart(const kvc__plan *p, const kvc__op *op, uint32_t unit, kvc__attn *a)
{
    const kvc__group *g = &p->groups[unit / p->n_head_groups];
    const uint32_t n_common = a->window == 0 ? g->n_common : 0;
    float *const state = a->state, *const work = a->work;
    uint32_t i;
    if (n_common != 0) {
        a->to = n_common;
        p->kernels->attention(a);
    }
    for (i = 0; i < g->n_rows; i++) {
        kvc__attend_rows(p, op, unit, g->row + i, 1, a);
        a->state = state + (size_t)i * a->n_q * kvc__part_floats(a->v_stride);
        a->work = work;
        a->goes_on = n_common != 0;
        if (n_common != 0) a->from = n_common;
        p->kernels->attention(a);
        a->from = a->to;
        p->kernels->attention_merge(a);
    }
}

/* Where the parts of a unit's spans are kept: the state first, then those of the last spans, which
   start at *apart. */
static float *kvc__attend_parts(const kvc__plan *p, const kvc__cut *cut, const kvc__attn *a,
    uint32_t unit, uint32_t *apart)
{
    const kvc__group *g = &p->groups[unit / p->n_head_groups];
    size_t part = kvc__part_floats(a->v_stride), query;
    uint32_t n = a->to - a->from;
    query = (size_t)g->row * p->model->n_heads + kvc__first_head(p, unit) * g->n_rows;
    *apart = a->from +
        (n > cut->n_apart + cut->run ? n - cut->n_apart : n < cut->run ? n : cut->run);
    return p->s.parts + query * (cut->n_apart + 1) * part;
}

/* One run of a unit's spans; the runs follow each other in all units. */
static void kvc__attend_run(const kvc__plan *p, const kvc__op *op, uint32_t index, uint32_t worker)
{
    const kvc__cut *cut = kvc__cut_of(p, op);
    uint32_t n_units = p->n_groups * p->n_head_groups, run = index / n_units, apart;
    size_t part;
    kvc__attn a;
    kvc__attend_unit(p, op, index % n_units, &a);
    part = (size_t)a.n_rows * a.n_q * kvc__part_floats(a.v_stride);
    a.work = p->s.attn + worker * p->s.attn_floats;
    if (cut->n_runs == 1) {
        a.state = a.work + kvc__attn_floats(KVC__MAX_QUERIES, a.head_dim, a.v_stride);
        if (p->groups[index / p->n_head_groups].n_common != 0) {
            kvc__attend_apart(p, op, index, &a);
            return;
        }
        p->kernels->attention(&a);
        a.from = a.to;
        p->kernels->attention_merge(&a);
        return;
    }
    a.state = kvc__attend_parts(p, cut, &a, index % n_units, &apart);
    if (run == 0) {
        a.to = apart;
    } else {
        a.from = apart + (run - 1) * cut->run;
        if (a.from >= a.to) return;
        if (a.to - a.from > cut->run) a.to = a.from + cut->run;
        a.parts = a.state + (a.from - apart + 1) * part;
    }
    p->kernels->attention(&a);
}

static void kvc__attend_merge(const kvc__plan *p, const kvc__op *op, uint32_t unit)
{
    kvc__attn a;
    kvc__attend_unit(p, op, unit, &a);
    a.state = kvc__attend_parts(p, kvc__cut_of(p, op), &a, unit, &a.from);
    a.parts = a.state + (size_t)a.n_rows * a.n_q * kvc__part_floats(a.v_stride);
    p->kernels->attention_merge(&a);
}

/* A quarter of a span, for all rows and heads, so that no other unit adds to the same tallies. */
static void kvc__tally_unit(const kvc__plan *p, const kvc__op *op, uint32_t index, uint32_t worker)
{
    uint32_t unit, number = index / 4;
    for (unit = 0; unit < p->n_groups * p->n_head_groups; unit++) {
        kvc__attn a;
        kvc__attend_unit(p, op, unit, &a);
        if (a.tops == NULL || number >= a.to) continue;
        a.work = p->s.attn + worker * p->s.attn_floats;
        p->kernels->attention_tally(&a, number, index % 4 * (KVC__SPAN_TILES / 4));
    }
}

static void kvc__gate_row(const kvc__plan *p, const kvc__op *op, uint32_t row)
{
    float *gate = p->s.gate + (size_t)row * op->width;
    const float *up = p->s.up + (size_t)row * op->width;
    p->kernels->activate(gate, op->gated ? up : NULL, op->width, p->model->arch->act);
    kvc__form_part(p, op, gate, op->width, row, 0, op->width);
}

/* A head's row of src, to its place. */
static void kvc__split_unit(const kvc__plan *p, const kvc__op *op, uint32_t unit)
{
    const uint32_t row = unit / p->model->n_heads, head = unit % p->model->n_heads;
    const uint32_t place = kvc__head_place(op->n_rows, head, row);
    const float *x = op->src + row * op->src_stride + head * op->head_stride;
    if (op->dst[0] != NULL)
        memcpy(op->dst[0] + (size_t)place * op->width, x, op->width * sizeof *x);
    kvc__form_part(p, op, x, op->width, place, 0, op->width);
}

/* ---- experts ---- */

/* Of n numbers marks the `most` largest, the earlier of equals; the others become -infinity. */
static void kvc__keep_largest(double *x, uint32_t n, uint32_t most)
{
    uint32_t i, j, above;
    double all[KVC__MAX_GROUPS];
    memcpy(all, x, n * sizeof *x);
    for (i = 0; i < n; i++) {
        for (above = 0, j = 0; j < n; j++)
            above += all[j] > all[i] || (j < i && all[j] >= all[i]);
        if (above >= most) x[i] = -KVC__HUGE;
    }
}

/* Leaves only the experts of the best groups to be chosen: a group is as good as its best two with
   sigmoids, as its best one with a softmax (DeepSeek-V3, section 2.1.2; DeepSeek-V2, section
   2.2.2). */
static void kvc__route_groups(const kvc_model *m, double *score)
{
    const uint32_t size = m->n_experts / m->n_expert_groups;
    double best[KVC__MAX_GROUPS];
    uint32_t g, i;
    if (m->n_used_groups == m->n_expert_groups) return;
    for (g = 0; g < m->n_expert_groups; g++) {
        double first = -KVC__HUGE, second = -KVC__HUGE;
        for (i = g * size; i < (g + 1) * size; i++) {
            if (score[i] > first) {
                second = first;
                first = score[i];
            } else if (score[i] > second) {
                second = score[i];
            }
        }
        best[g] = m->route == KVC__ROUTE_SIGMOID && size > 1 ? first + second : first;
    }
    kvc__keep_largest(best, m->n_expert_groups, m->n_used_groups);
    for (i = 0; i < m->n_experts; i++)
        if (best[i / size] <= -KVC__HUGE) score[i] = -KVC__HUGE;
}

/* exp of the logits less the largest, over their sum. */
static void kvc__route_softmax(double *x, uint32_t n)
{
    double top = x[0], sum = 0;
    uint32_t i;
    for (i = 1; i < n; i++) if (x[i] > top) top = x[i];
    for (i = 0; i < n; i++) sum += x[i] = kvc__exp(x[i] - top);
    for (i = 0; i < n; i++) x[i] /= sum;
}

/* The experts of a row, by falling score, the lower number first of equals, and their weights. */
static void kvc__choose_row(const kvc__plan *p, const kvc__op *op, uint32_t row)
{
    const kvc_model *m = p->model;
    const float *logit = p->s.routes + (size_t)row * m->n_experts;
    const float *bias = m->layers[op->layer].router_bias;
    kvc__pick *picks = p->s.picks + (size_t)row * m->n_used;
    double prob[KVC__MAX_EXPERTS], score[KVC__MAX_EXPERTS], weight[KVC__MAX_USED], sum = 0;
    uint32_t i, j, best;
    for (i = 0; i < m->n_experts; i++) {
        prob[i] = (double)logit[i];
        if (m->route == KVC__ROUTE_SIGMOID) prob[i] = 1.0 / (1.0 + kvc__exp(-prob[i]));
    }
    if (m->route == KVC__ROUTE_SOFTMAX) kvc__route_softmax(prob, m->n_experts);
    for (i = 0; i < m->n_experts; i++) score[i] = prob[i] + (bias != NULL ? (double)bias[i] : 0.0);
    kvc__route_groups(m, score);
    for (j = 0; j < m->n_used; j++) {
        for (best = 0, i = 1; i < m->n_experts; i++) if (score[i] > score[best]) best = i;
        picks[j].expert = best;
        weight[j] = prob[best];
        sum += weight[j];
        score[best] = -KVC__HUGE * 2;
    }
    if (m->route == KVC__ROUTE_CHOSEN) kvc__route_softmax(weight, m->n_used);
    else if (m->route_norm) for (j = 0; j < m->n_used; j++) weight[j] /= sum > 1e-20 ? sum : 1e-20;
    for (j = 0; j < m->n_used; j++)
        picks[j].weight = (float)(weight[j] * (double)m->route_scale);
}

/* Gives each pick a place, those of an expert together, and cuts them into bunches. */
static void kvc__sort(const kvc__plan *p, const kvc__op *op)
{
    const kvc_model *m = p->model;
    const uint32_t n = op->n_rows * m->n_used;
    const uint32_t most = op->n_rows < KVC__BLOCK_ROWS ? op->n_rows : KVC__BLOCK_ROWS;
    uint32_t at[KVC__MAX_EXPERTS], i, j, place = 0;
    kvc__bunch *s = p->s.bunches;
    memset(at, 0, m->n_experts * sizeof *at);
    for (i = 0; i < n; i++) at[p->s.picks[i].expert]++;
    for (i = 0; i < m->n_experts; i++) {
        const uint32_t count = at[i];
        at[i] = place;
        for (j = 0; j < count; j += most, s++) {
            s->part = i;
            s->place = place + j;
            s->n_rows = count - j < most ? count - j : most;
        }
        place += kvc__place_up(op->n_rows, count);
    }
    for (i = 0; i < n; i++) p->s.picks[i].place = at[p->s.picks[i].expert]++;
    *p->s.n_bunches = (uint32_t)(s - p->s.bunches);
}

static void kvc__gather_unit(const kvc__plan *p, const kvc__op *op, uint32_t unit)
{
    const uint32_t place = p->s.picks[unit].place;
    const float *x = op->src + unit / p->model->n_used * op->src_stride;
    if (op->dst[0] != NULL)
        memcpy(op->dst[0] + (size_t)place * op->width, x, op->width * sizeof *x);
    kvc__form_part(p, op, x, op->width, place, 0, op->width);
}

/* In the order in which the experts were chosen; then the shared expert. */
static void kvc__combine_row(const kvc__plan *p, const kvc__op *op, uint32_t row)
{
    const kvc_model *m = p->model;
    const kvc__layer *l = &m->layers[op->layer];
    const kvc__pick *picks = p->s.picks + (size_t)row * m->n_used;
    const uint32_t n = op->width;
    float *sum = p->s.place_outs + (size_t)picks[0].place * n;
    float *dst = op->dst[0] + (size_t)row * n;
    uint32_t j;
    p->kernels->multiply(sum, picks[0].weight, n);
    for (j = 1; j < m->n_used; j++)
        p->kernels->accumulate(sum, p->s.place_outs + (size_t)picks[j].place * n, picks[j].weight,
            n);
    if (l->down.data != NULL) {
        float share = 1.0f;
        if (l->shared_gate.data != NULL)
            share = (float)(1.0 / (1.0 + kvc__exp(-(double)p->s.shares[row])));
        p->kernels->accumulate(sum, p->s.part + (size_t)row * n, share, n);
    }
    if (op->add_to_x) p->kernels->accumulate(dst, sum, m->residual_scale, n);
    else memcpy(dst, sum, n * sizeof *dst);
}

/* ---- blocks of products ---- */

/* A block of an op's product: rows [row, row + n_rows) by outputs [out, out + n_out) of one of its
   matrices, or of a part of it, the bias added. Rows of a stack are places. */
typedef struct kvc__block {
    uint32_t mat, part, row, out, n_rows, n_out;
    float *y;                       /* [n_rows, stride] */
    uint32_t stride;
} kvc__block;

static void kvc__block_bias(const kvc__plan *p, const kvc__block *b, const float *bias)
{
    uint32_t r;
    for (r = 0; r < b->n_rows; r++)
        p->kernels->accumulate(b->y + (size_t)r * b->stride, bias + b->out, 1.0f, b->n_out);
}

/* Weights in place are packed here if that is worth it. */
static void kvc__block_weights(const kvc__plan *p, const kvc__block *b, const kvc__matrix *m,
    uint32_t worker, kvc__mm *a, int *packed)
{
    uint32_t g;
    a->w_stride = kvc__group_size(m->type, m->n_in);
    *packed = 1;
    if (m->packed != NULL) {
        a->w = m->packed + b->out / 16 * a->w_stride;
    } else if (b->n_rows >= KVC__PACK_ROWS) {
        unsigned char *dst = p->s.packs + worker * p->s.pack_size;
        a->w = dst;
        for (g = 0; g < b->n_out; g += 16, dst += a->w_stride)
            kvc__pack_group(dst, m->data + (size_t)(b->out + g) * m->row_size,
                b->n_out - g < 16 ? b->n_out - g : 16, m->n_in, m->type);
    } else {
        a->w = m->data + b->out * m->row_size;
        a->w_stride = m->row_size;
        *packed = 0;
    }
}

static void kvc__block_compute(const kvc__plan *p, const kvc__op *op, const kvc__block *b,
    uint32_t worker)
{
    const kvc__matrix one = kvc__matrix_part(op->mats[b->mat], b->part), *m = &one;
    kvc__mm a;
    int packed;
    memset(&a, 0, sizeof a);
    kvc__block_weights(p, b, m, worker, &a, &packed);
    a.next = a.w;
    if (op->stack == KVC__STACK_NONE && b->row + b->n_rows == op->n_rows)
        a.next = (const unsigned char *)((uintptr_t)a.w + kvc__div_up(b->n_out, 16) * a.w_stride);
    a.k = m->n_in;
    if (kvc__is_quantized(m)) {
        a.x8_height = kvc__q8_height(op->n_rows);
        a.x8 = op->forms.q8 + kvc__q8_offset(b->row, a.x8_height, a.k, 0);
    } else {
        a.x_stride = packed ? kvc__lanes_stride(a.k) : op->src_stride;
        a.x = (packed ? op->forms.lanes : op->src) + b->row * a.x_stride;
    }
    a.n_out = b->n_out;
    a.n_rows = b->n_rows;
    a.y = b->y;
    a.y_stride = b->stride;
    a.sums = p->s.sums + (size_t)worker * KVC__SUM_FLOATS;
    kvc__mm_pick(p->kernels, m->type, packed)(&a);
    if (m->bias != NULL) kvc__block_bias(p, b, m->bias);
}

/* Where a row, or place, of one of an op's products goes. */
static float *kvc__op_row(const kvc__plan *p, const kvc__op *op, uint32_t mat, uint32_t part,
    uint32_t row)
{
    if (op->to_host) return p->out[row];
    if (op->stack == KVC__STACK_HEADS)
        return op->dst[mat] + part * op->head_stride +
            (row - kvc__head_place(op->n_rows, part, 0)) * op->stride[mat];
    return op->dst[mat] + row * op->stride[mat];
}

/* Logits: scaled, then capped. */
static void kvc__logits_finish(const kvc__plan *p, float *y, uint32_t n)
{
    const kvc_model *m = p->model;
    if (m->logit_scale < 1.0f || m->logit_scale > 1.0f) p->kernels->multiply(y, m->logit_scale, n);
    if (m->logit_cap > 0) p->kernels->soft_cap(y, m->logit_cap, n);
}

/* Writes a finished block to dst, or adds it to the residual stream there. */
static void kvc__block_finish(const kvc__plan *p, const kvc__op *op, const kvc__block *b)
{
    uint32_t r;
    for (r = 0; r < b->n_rows; r++) {
        float *y = b->y + (size_t)r * b->stride;
        float *dst = kvc__op_row(p, op, b->mat, b->part, b->row + r) + b->out;
        if (op->to_host) kvc__logits_finish(p, y, b->n_out);
        if (op->add_to_x) p->kernels->accumulate(dst, y, p->model->residual_scale, b->n_out);
        else memcpy(dst, y, b->n_out * sizeof(float));
    }
}

/* The same of a block, or a pair of them, whose activation is stored; up NULL: there is no gate. */
static void kvc__block_gate(const kvc__plan *p, const kvc__op *op, const kvc__block *gate,
    const kvc__block *up)
{
    uint32_t r, width = op->mats[0]->n_out;
    for (r = 0; r < gate->n_rows; r++) {
        float *g = gate->y + (size_t)r * gate->stride;
        const float *u = up != NULL ? up->y + (size_t)r * up->stride : NULL;
        uint32_t row = gate->row + r;
        p->kernels->activate(g, u, gate->n_out, p->model->arch->act);
        memcpy(op->dst[0] + (size_t)row * width + gate->out, g, gate->n_out * sizeof(float));
        kvc__form_part(p, op, g, width, row, gate->out, gate->n_out);
    }
}

static void kvc__block_outs(const kvc__op *op, kvc__block *b)
{
    const uint32_t n_out = op->mats[b->mat]->n_out;
    b->n_out = n_out - b->out < op->block_outs ? n_out - b->out : op->block_outs;
}

/* Which places and outputs a unit of a stack is: bunch by bunch. Returns 0 if there are fewer
   bunches. */
static int kvc__bunch_locate(const kvc__plan *p, const kvc__op *op, uint64_t unit, kvc__block *b)
{
    const uint32_t in_part = kvc__div_up(op->mats[0]->n_out, op->block_outs);
    const uint32_t bunch = (uint32_t)(unit / in_part);
    b->mat = 0;
    b->out = (uint32_t)(unit % in_part) * op->block_outs;
    kvc__block_outs(op, b);
    if (op->stack == KVC__STACK_HEADS) {
        const uint32_t cuts = kvc__div_up(op->n_rows, op->block_rows);
        const uint32_t row = bunch % cuts * op->block_rows;
        b->part = bunch / cuts;
        b->row = kvc__head_place(op->n_rows, b->part, row);
        b->n_rows = op->n_rows - row < op->block_rows ? op->n_rows - row : op->block_rows;
        return 1;
    }
    if (bunch >= *p->s.n_bunches) return 0;
    b->part = p->s.bunches[bunch].part;
    b->row = p->s.bunches[bunch].place;
    b->n_rows = p->s.bunches[bunch].n_rows;
    return 1;
}

/* Which rows and outputs a unit is. */
static void kvc__block_locate(const kvc__op *op, uint64_t unit, kvc__block *b)
{
    uint32_t row_blocks = kvc__div_up(op->n_rows, op->block_rows);
    uint64_t n;
    for (b->mat = 0;; b->mat++, unit -= n) {
        n = (uint64_t)kvc__div_up(op->mats[b->mat]->n_out, op->block_outs) * row_blocks;
        if (unit < n) break;
    }
    b->part = 0;
    b->row = (uint32_t)(unit % row_blocks) * op->block_rows;
    b->out = (uint32_t)(unit / row_blocks) * op->block_outs;
    b->n_rows = op->n_rows - b->row < op->block_rows ? op->n_rows - b->row : op->block_rows;
    kvc__block_outs(op, b);
}

static void kvc__matrix_block(const kvc__plan *p, const kvc__op *op, uint64_t unit, uint32_t worker)
{
    kvc__block b, up;
    if (op->stack == KVC__STACK_NONE) kvc__block_locate(op, unit, &b);
    else if (!kvc__bunch_locate(p, op, unit, &b)) return;
    b.y = p->s.blocks + (size_t)worker * 2 * KVC__BLOCK_FLOATS;
    b.stride = op->block_outs;
    kvc__block_compute(p, op, &b, worker);
    if (op->acted) {
        kvc__block_gate(p, op, &b, NULL);
        return;
    }
    if (!op->gated) {
        kvc__block_finish(p, op, &b);
        return;
    }
    up = b;
    up.mat = 1;
    up.y += KVC__BLOCK_FLOATS;
    kvc__block_compute(p, op, &up, worker);
    kvc__block_gate(p, op, &b, &up);
}

/* The first weights of a unit, to be asked for before they are needed, in each of the four streams
   that a single row reads. */
typedef struct kvc__ask {
    const unsigned char *w;
    size_t apart, at, end;          /* bytes: from stream to stream, asked for, to ask for in all */
} kvc__ask;

static kvc__ask kvc__matrix_ask(const kvc__plan *p, const kvc__op *op, uint64_t unit)
{
    kvc__matrix m;
    kvc__block b;
    kvc__ask a;
    memset(&a, 0, sizeof a);
    if (op->stack == KVC__STACK_EXPERTS) return a;      /* they may not be known yet */
    if (op->stack == KVC__STACK_NONE) kvc__block_locate(op, unit, &b);
    else kvc__bunch_locate(p, op, unit, &b);
    m = kvc__matrix_part(op->mats[b.mat], b.part);
    if (m.packed != NULL) {
        a.apart = kvc__group_size(m.type, m.n_in);
        a.w = m.packed + b.out / 16 * a.apart;
        a.apart *= b.n_out / 64;
    } else {
        a.w = m.data + b.out * m.row_size;
        a.apart = b.n_out / 4 * m.row_size;
    }
    a.end = a.apart < KVC__ASK_MOST ? a.apart : KVC__ASK_MOST;
    return a;
}

/* Asks for up to n bytes more of each stream. */
static void kvc__ask_more(kvc__ask *a, size_t n)
{
    size_t end = a->at + n < a->end ? a->at + n : a->end, i;
    for (; a->at < end; a->at += 64)
        for (i = 0; i < 4; i++) kvc__prefetch(a->w + i * a->apart + a->at);
}

#if KVC_USE_CBLAS
/* dst (+)= src w^T for outputs [out, out + n) of all rows; those that follow each other in memory
   in one call. */
static void kvc__panel_cblas(const kvc__plan *p, const kvc__op *op, uint32_t mat, uint32_t out,
    uint32_t n, const float *w)
{
    const kvc__matrix *m = op->mats[mat];
    const float scale = op->add_to_x ? p->model->residual_scale : 1.0f;
    uint32_t row, end;
    for (row = 0; row < op->n_rows; row = end) {
        float *dst = kvc__op_row(p, op, mat, 0, row);
        for (end = row + 1; end < op->n_rows; end++)
            if (kvc__op_row(p, op, mat, 0, end) != dst + (end - row) * op->stride[mat]) break;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)(end - row), (int)n,
            (int)m->n_in, scale, op->src + (size_t)row * op->src_stride, (int)op->src_stride, w,
            (int)m->n_in, op->add_to_x ? 1.0f : 0.0f, dst + out, (int)op->stride[mat]);
    }
}

/* Bias, and what logits get. */
static void kvc__rows_cblas(const kvc__plan *p, const kvc__op *op, uint32_t mat)
{
    const kvc__matrix *m = op->mats[mat];
    const float scale = op->add_to_x ? p->model->residual_scale : 1.0f;
    uint32_t r;
    for (r = 0; r < op->n_rows; r++) {
        float *dst = kvc__op_row(p, op, mat, 0, r);
        if (m->bias != NULL) p->kernels->accumulate(dst, m->bias, scale, m->n_out);
        if (op->to_host) kvc__logits_finish(p, dst, m->n_out);
    }
}

/* All of an op's products: F32 weights in place, others decoded a panel at a time. */
static void kvc__matrix_cblas(const kvc__plan *p, const kvc__op *op)
{
    uint32_t i, out, n, o;
    for (i = 0; i < op->n_mats; i++) {
        const kvc__matrix *m = op->mats[i];
        uint32_t panel = m->type == KVC__F32 ? m->n_out : KVC__PANEL;
        for (out = 0; out < m->n_out; out += n) {
            const float *w = p->s.panel;
            n = m->n_out - out < panel ? m->n_out - out : panel;
            if (m->type == KVC__F32 && ((uintptr_t)m->data & 3) == 0) {
                w = (const float *)(const void *)m->data;
            } else {
                n = n < KVC__PANEL ? n : KVC__PANEL;
                for (o = 0; o < n; o++)
                    kvc__decode_row(p->s.panel + (size_t)o * m->n_in,
                        m->data + (size_t)(out + o) * m->row_size, m->type, m->n_in);
            }
            kvc__panel_cblas(p, op, i, out, n, w);
        }
        kvc__rows_cblas(p, op, i);
    }
}
#endif

static void kvc__matrix_unit(const kvc__plan *p, const kvc__op *op, uint64_t unit, uint32_t worker)
{
#if KVC_USE_CBLAS
    if (op->use_cblas) {
        kvc__matrix_cblas(p, op);
        return;
    }
#endif
    kvc__matrix_block(p, op, unit, worker);
}

static void kvc__op_unit(const kvc__plan *p, const kvc__op *op, uint64_t unit, uint32_t worker)
{
    uint32_t row = (uint32_t)unit;
    switch (op->kind) {
    case KVC__OP_EMBED: kvc__embed_row(p, row); break;
    case KVC__OP_NORM: kvc__norm_row(p, op, row); break;
    case KVC__OP_MATRIX: kvc__matrix_unit(p, op, unit, worker); break;
    case KVC__OP_ROPE: kvc__rope_row(p, op, row); break;
    case KVC__OP_ATTEND: kvc__attend_run(p, op, row, worker); break;
    case KVC__OP_MERGE: kvc__attend_merge(p, op, row); break;
    case KVC__OP_TALLY: kvc__tally_unit(p, op, row, worker); break;
    case KVC__OP_FORM:
        kvc__form_part(p, op, op->src + (size_t)row * op->src_stride, op->width, row, 0, op->width);
        break;
    case KVC__OP_GATE: kvc__gate_row(p, op, row); break;
    case KVC__OP_SPLIT: kvc__split_unit(p, op, row); break;
    case KVC__OP_CHOOSE: kvc__choose_row(p, op, row); break;
    case KVC__OP_SORT: kvc__sort(p, op); break;
    case KVC__OP_GATHER: kvc__gather_unit(p, op, row); break;
    case KVC__OP_COMBINE: kvc__combine_row(p, op, row); break;
    }
}

static void kvc__op_run(const kvc__plan *p, const kvc__op *op, uint32_t tile, uint32_t worker)
{
    uint64_t unit = tile * op->tile_units, end = unit + op->tile_units;
    if (end > op->n_units) end = op->n_units;
    for (; unit < end; unit++) kvc__op_unit(p, op, unit, worker);
}

/* ------------------------------------------------------------------------------------------------
   >>sampler  From logits to one token
   Owns the candidate list, the penalty window and the random generator, all in one block that is
   laid out at creation. Each step works on what the step before kept. The k best are taken from a
   binary heap, so a large vocabulary is never sorted. Every sum is over doubles in the order of the
   list: rising ids, or falling logits once top_k or top_p has ranked the list; equal logits rank by
   id. Products are of numbers short enough to be exact, so a compiler that fuses a multiplication
   and an addition changes no bit.
   ---------------------------------------------------------------------------------------------- */

#define KVC__SAMPLER_WINDOW_MAX 0x10000000u   /* 2^28: count * penalty stays exact in a double */

typedef struct kvc__candidate {
    double weight;              /* exp((logit - largest) / temperature), 0 before it is known */
    float logit;                /* after bias and penalties */
    uint32_t id;
} kvc__candidate;

struct kvc_sampler {
    kvc_sampler_desc desc;      /* resolved; the bias list is in `bias` below instead */
    size_t block_size;
    int owned;
    uint32_t n_vocab;
    uint32_t n_ids;             /* ids that may be chosen: [0, n_ids) */
    uint64_t random;            /* state of the generator */
    kvc__candidate *candidates; /* [n_ids], scratch of one call */
    float *bias;                /* [n_vocab], NULL without bias */
    uint32_t *counts;           /* [n_vocab] uses in the window, NULL without penalties */
    uint32_t *window;           /* [penalty_window] ring of the latest tokens, NULL likewise */
    uint32_t n_window;          /* tokens in the ring */
    uint32_t cursor;            /* where the next one goes */
};

/* ---- generator ---- */

/* SplitMix64 (Steele, Lea and Flood 2014): one word of state, and every seed is good. */
static uint64_t kvc__random_u64(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    return kvc__mix64(*state);
}

/* Uniform in [0, 1): the upper 53 bits times 2^-53. Never 1. */
static double kvc__random_unit(uint64_t *state)
{
    return (double)(kvc__random_u64(state) >> 11) * (1.0 / 9007199254740992.0);
}

/* ---- candidates ---- */

static int kvc__candidate_before(const kvc__candidate *a, const kvc__candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

static void kvc__candidates_swap(kvc__candidate *c, uint32_t i, uint32_t j)
{
    kvc__candidate t = c[i];
    c[i] = c[j];
    c[j] = t;
}

/* Restores the heap of n under place i: a parent comes before its children 2i+1 and 2i+2. Children
   are counted in 64 bits, since 2i+2 may pass 2^32. */
static void kvc__candidates_sift(kvc__candidate *c, uint32_t n, uint32_t i)
{
    for (;;) {
        uint64_t child = (uint64_t)i * 2 + 1;
        uint32_t best = i;
        if (child < n && kvc__candidate_before(&c[child], &c[best])) best = (uint32_t)child;
        if (child + 1 < n && kvc__candidate_before(&c[child + 1], &c[best])) {
            best = (uint32_t)(child + 1);
        }
        if (best == i) return;
        kvc__candidates_swap(c, i, best);
        i = best;
    }
}

/* Ranks candidates until there are k of them or their weights reach `mass`, and moves them to the
   front, best first. Returns how many. */
static uint32_t kvc__candidates_rank(kvc__candidate *c, uint32_t n, uint32_t k, double mass)
{
    double sum = 0.0;
    uint32_t i, kept = 0;
    for (i = n / 2; i-- > 0;) kvc__candidates_sift(c, n, i);
    while (kept < n && kept < k && sum < mass) {
        uint32_t last = n - 1 - kept;
        kvc__candidates_swap(c, 0, last);
        kvc__candidates_sift(c, last, 0);
        sum += c[last].weight;
        kept++;
    }
    for (i = 0; i < kept && i < n / 2; i++) kvc__candidates_swap(c, i, n - 1 - i);
    return kept;
}

/* Softmax without its division. The best weight is 1, so the sum is at least 1. Below -746 a weight
   is less than the smallest double; with a tiny temperature the quotient is far below that, but
   finite: its size is at most 2 * FLT_MAX / 2^-149. */
static void kvc__candidates_weigh(kvc__candidate *c, uint32_t n, float largest, float temperature)
{
    uint32_t i;
    for (i = 0; i < n; i++) {
        double x = ((double)c[i].logit - (double)largest) / (double)temperature;
        c[i].weight = x < -746.0 ? 0.0 : kvc__exp(x);
    }
}

static double kvc__candidates_sum(const kvc__candidate *c, uint32_t n)
{
    double sum = 0.0;
    uint32_t i;
    for (i = 0; i < n; i++) sum += c[i].weight;
    return sum;
}

/* The smallest set of best ones whose share of the weights is at least p. */
static uint32_t kvc__candidates_top_p(kvc__candidate *c, uint32_t n, float p)
{
    return kvc__candidates_rank(c, n, n, (double)p * kvc__candidates_sum(c, n));
}

/* Drops what weighs less than p times the best, whose weight is 1. Keeps the order. */
static uint32_t kvc__candidates_min_p(kvc__candidate *c, uint32_t n, float p)
{
    uint32_t i, kept = 0;
    for (i = 0; i < n; i++) {
        if (c[i].weight >= (double)p) c[kept++] = c[i];
    }
    return kept;
}

/* The candidate in whose share of [0, 1) `unit` lies. Rounding may leave none past the last share;
   then it is the last one that has a weight. */
static uint32_t kvc__candidates_draw(const kvc__candidate *c, uint32_t n, double unit)
{
    double target = unit * kvc__candidates_sum(c, n), sum = 0.0;
    uint32_t i, last = 0;
    for (i = 0; i < n && sum <= target; i++) {
        sum += c[i].weight;
        if (c[i].weight > 0.0) last = i;
    }
    return c[last].id;
}

static const kvc__candidate *kvc__candidates_best(const kvc__candidate *c, uint32_t n)
{
    const kvc__candidate *best = c;
    uint32_t i;
    for (i = 1; i < n; i++) {
        if (kvc__candidate_before(&c[i], best)) best = &c[i];
    }
    return best;
}

/* ---- bias and penalties ---- */

/* Back to a float. A finite logit stays finite, so that only a ban gives -INFINITY. */
static float kvc__logit_clamp(double x)
{
    if (x > (double)FLT_MAX) return FLT_MAX;
    if (x < -(double)FLT_MAX) return -FLT_MAX;
    return (float)x;
}

static float kvc__logit_bias(float logit, float bias)
{
    if (logit < -FLT_MAX || bias < -FLT_MAX) return -INFINITY;
    return kvc__logit_clamp((double)logit + (double)bias);
}

/* First the factor, once however often the token occurred, then what is subtracted. */
static float kvc__logit_penalize(const kvc_sampler_desc *desc, float logit, uint32_t count)
{
    double x = (double)logit, factor = (double)desc->repeat_penalty;
    if (x < -(double)FLT_MAX) return logit;
    if (factor > 0.0) x = x > 0.0 ? x / factor : x * factor;
    x -= (double)desc->frequency_penalty * (double)count;
    x -= (double)desc->presence_penalty;
    return kvc__logit_clamp(x);
}

static void kvc__sampler_accept(kvc_sampler *s, kvc_token token)
{
    if (!s->window || token < 0 || (uint32_t)token >= s->n_vocab) return;
    if (s->n_window == s->desc.penalty_window) s->counts[s->window[s->cursor]]--;
    else s->n_window++;
    s->window[s->cursor] = (uint32_t)token;
    s->counts[token]++;
    s->cursor = s->cursor + 1 == s->desc.penalty_window ? 0 : s->cursor + 1;
}

/* ---- one choice ---- */

static int kvc__logits_have_nan(const float *logits, uint32_t n)
{
    uint32_t i, found = 0;
    for (i = 0; i < n; i++) found |= (uint32_t)(logits[i] != logits[i]);
    return found != 0;
}

/* Fills the list with what may be chosen, by rising id, and returns how many there are. */
static uint32_t kvc__sampler_collect(kvc_sampler *s, const float *logits)
{
    kvc__candidate *c = s->candidates;
    uint32_t i, n = 0;
    for (i = 0; i < s->n_ids; i++) {
        float x = logits[i] > FLT_MAX ? FLT_MAX : logits[i];
        if (s->bias) x = kvc__logit_bias(x, s->bias[i]);
        if (s->counts && s->counts[i]) x = kvc__logit_penalize(&s->desc, x, s->counts[i]);
        c[n].weight = 0.0;
        c[n].logit = x;
        c[n].id = i;
        n += x >= -FLT_MAX;
    }
    return n;
}

static uint32_t kvc__sampler_choose(kvc_sampler *s, uint32_t n)
{
    const kvc_sampler_desc *desc = &s->desc;
    kvc__candidate *c = s->candidates;
    const kvc__candidate *best = kvc__candidates_best(c, n);
    float largest = best->logit;
    if (desc->temperature == 0.0f) return best->id;
    if (desc->top_k > 0 && desc->top_k < n) n = kvc__candidates_rank(c, n, desc->top_k, 1.0);
    kvc__candidates_weigh(c, n, largest, desc->temperature);
    if (desc->top_p > 0.0f && desc->top_p < 1.0f) n = kvc__candidates_top_p(c, n, desc->top_p);
    if (desc->min_p > 0.0f) n = kvc__candidates_min_p(c, n, desc->min_p);
    return kvc__candidates_draw(c, n, kvc__random_unit(&s->random));
}

static kvc_result kvc__sampler_sample(kvc_sampler *s, const float *logits, kvc_token *token,
    kvc_error *err)
{
    uint32_t n;
    *token = KVC_NO_TOKEN;
    if (kvc__logits_have_nan(logits, s->n_vocab)) {
        return kvc__fail(err, KVC_ERROR_NUMERIC, "logits", "a logit is not a number");
    }
    n = kvc__sampler_collect(s, logits);
    if (n == 0) {
        return kvc__fail(err, KVC_ERROR_NUMERIC, "logits", "every token is banned or at -INFINITY");
    }
    *token = (kvc_token)kvc__sampler_choose(s, n);
    kvc__sampler_accept(s, *token);
    return KVC_OK;
}

/* ---- creation ---- */

static int kvc__is_between(float x, float low, float high)   /* false for NaN */
{
    return x >= low && x <= high;
}

static int kvc__is_finite(float x)
{
    return kvc__is_between(x, -FLT_MAX, FLT_MAX);
}

static kvc_result kvc__sampler_check_bias(const kvc_sampler_desc *desc, kvc_error *err)
{
    uint32_t n_vocab = kvc__model_n_vocab(desc->model);
    size_t i;
    if (desc->n_bias > 0 && !desc->bias) {
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "bias", "NULL, but n_bias is not 0");
    }
    for (i = 0; i < desc->n_bias; i++) {
        const kvc_logit_bias *b = &desc->bias[i];
        if (b->token < 0 || (uint32_t)b->token >= n_vocab) {
            return kvc__fail(err, KVC_ERROR_ARGUMENT, "bias", "a token id is not the model's");
        }
        if (!(b->bias <= FLT_MAX)) {
            return kvc__fail(err, KVC_ERROR_ARGUMENT, "bias", "a bias is NaN or +INFINITY");
        }
    }
    return KVC_OK;
}

/* Fills in the defaults; fails naming the field. */
static kvc_result kvc__sampler_defaults(kvc_sampler_desc *d, kvc_error *err)
{
    const char *where = NULL;
    if (d->start_canary != 0 || d->end_canary != 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "desc", "not zero-initialised");
    if (d->model == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "model", "NULL");
    if (!kvc__is_between(d->temperature, 0.0f, FLT_MAX)) where = "temperature";
    else if (!kvc__is_between(d->top_p, 0.0f, 1.0f)) where = "top_p";
    else if (!kvc__is_between(d->min_p, 0.0f, 1.0f)) where = "min_p";
    else if (!kvc__is_between(d->repeat_penalty, 0.0f, FLT_MAX)) where = "repeat_penalty";
    else if (!kvc__is_finite(d->frequency_penalty)) where = "frequency_penalty";
    else if (!kvc__is_finite(d->presence_penalty)) where = "presence_penalty";
    else if (d->penalty_window > KVC__SAMPLER_WINDOW_MAX) where = "penalty_window";
    if (where != NULL)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, where, "not a number in its range");
    if (d->repeat_penalty == 1.0f) d->repeat_penalty = 0.0f;
    if (d->penalty_window == 0) d->penalty_window = 64;
    if (!kvc__allocator_resolve(&d->allocator, &d->allocator, kvc__model_allocator(d->model)))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "allocator", "only one of alloc and free is set");
    return kvc__sampler_check_bias(d, err);
}

static int kvc__sampler_has_penalties(const kvc_sampler_desc *desc)
{
    return desc->repeat_penalty != 0.0f || desc->frequency_penalty != 0.0f
        || desc->presence_penalty != 0.0f;
}

/* Measures, or places the parts of the sampler if the arena has a base. */
static kvc_sampler *kvc__sampler_layout(kvc__arena *arena, const kvc_sampler_desc *d)
{
    uint32_t n_vocab = kvc__model_n_vocab(d->model), n_tokens = kvc__model_n_tokens(d->model);
    uint32_t n_ids = n_tokens > 0 && n_tokens < n_vocab ? n_tokens : n_vocab;
    kvc_sampler *s = (kvc_sampler *)kvc__take(arena, 1, sizeof *s);
    void *candidates = kvc__take(arena, n_ids, sizeof(kvc__candidate)), *bias = NULL;
    void *counts = NULL, *window = NULL;
    if (d->n_bias > 0) bias = kvc__take(arena, n_vocab, sizeof(float));
    if (kvc__sampler_has_penalties(d)) {
        counts = kvc__take(arena, n_vocab, sizeof(uint32_t));
        window = kvc__take(arena, d->penalty_window, sizeof(uint32_t));
    }
    if (s == NULL) return NULL;
    memset(s, 0, sizeof *s);
    s->desc = *d;
    s->n_vocab = n_vocab;
    s->n_ids = n_ids;
    s->candidates = (kvc__candidate *)candidates;
    s->bias = (float *)bias;
    s->counts = (uint32_t *)counts;
    s->window = (uint32_t *)window;
    return s;
}

static kvc_result kvc__sampler_measure(kvc_sampler_desc *d, size_t *size, kvc_error *err)
{
    kvc__arena arena;
    kvc_result r = kvc__sampler_defaults(d, err);
    if (r != KVC_OK) return r;
    memset(&arena, 0, sizeof arena);
    kvc__sampler_layout(&arena, d);
    if (arena.overflow)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "penalty_window",
            "the sampler passes the address space");
    *size = arena.used;
    return KVC_OK;
}

static void kvc__sampler_reset(kvc_sampler *s, uint64_t seed)
{
    s->random = seed;
    s->desc.seed = seed;
    s->n_window = 0;
    s->cursor = 0;
    if (s->counts) memset(s->counts, 0, s->n_vocab * sizeof(uint32_t));
}

static void kvc__sampler_copy_bias(kvc_sampler *s, const kvc_logit_bias *bias, size_t n)
{
    size_t i;
    if (!s->bias) return;
    memset(s->bias, 0, s->n_vocab * sizeof(float));
    for (i = 0; i < n; i++) s->bias[bias[i].token] = bias[i].bias;
}

static kvc_result kvc__sampler_new(kvc_sampler **out, const kvc_sampler_desc *desc, kvc_error *err)
{
    kvc_sampler_desc d = *desc;
    kvc_sampler *s;
    kvc__arena arena;
    void *block;
    size_t size;
    int owned;
    kvc_result r = kvc__sampler_measure(&d, &size, err);
    if (r != KVC_OK) return r;
    r = kvc__block_get(&block, size, &d.memory, &d.allocator, &owned, err);
    if (r != KVC_OK) return r;
    memset(&arena, 0, sizeof arena);
    arena.base = (unsigned char *)block;
    s = kvc__sampler_layout(&arena, &d);
    s->block_size = size;
    s->owned = owned;
    s->desc.bias = NULL;
    kvc__sampler_copy_bias(s, desc->bias, desc->n_bias);
    kvc__sampler_reset(s, d.seed);
    *out = s;
    return KVC_OK;
}

static void kvc__sampler_free(kvc_sampler *s)
{
    kvc_allocator a = s->desc.allocator;    /* the struct lies in the block that goes */
    if (s->owned) kvc__free(&a, s, s->block_size);
}

/* ------------------------------------------------------------------------------------------------
   >>step  Contexts and their requests; walking the plan
   A context has a list of requests. Each pass over the weights takes rows of as many of them as
   there is room for; what a request needs is checked and reserved before its first row, so that it
   cannot fail half-way, and the sequence's position moves when a pass is done.
   The cursor of a pass says which operation is computed and which of its tiles are taken. The
   tiles are dealt out in runs, one for each thread, so that a thread reads memory in order; one
   that has finished its run helps with the others. Whoever finishes the last tile of an operation
   moves the cursor to the next. Who takes which tile changes no result. Threads leave before they
   take a tile, when time is up or somebody has cancelled; so no tile is half done then, nobody
   waits for it, and the next call goes on from the cursor.
   ---------------------------------------------------------------------------------------------- */
typedef struct kvc__run {
    kvc__atomic at;             /* operation << 16 | next tile of the run */
    char apart[60];             /* threads must not share a cache line */
} kvc__run;

typedef struct kvc__cursor {
    kvc__run *runs;             /* [n_runs] */
    uint32_t n_runs;
    kvc__atomic op;
    kvc__atomic n_done;         /* finished tiles of the operation */
    kvc__atomic n_sleepers;
#if !KVC_NO_THREADS
    kvc__lock lock;
    kvc__cond moved;
#endif
} kvc__cursor;

/* What a context does next. */
typedef enum kvc__stage {
    KVC__STAGE_START,           /* start requests, put rows of them into a pass */
    KVC__STAGE_PASS,            /* compute its tiles */
    KVC__STAGE_END              /* count the rows, request by request */
} kvc__stage;

/* How far the requests are since the context last had none. */
typedef struct kvc__work {
    double all, done;           /* see kvc__op_work */
    double pass;                /* of rows of the running pass that are not in done */
    uint64_t used;              /* microseconds */
} kvc__work;

#define KVC__NEVER UINT64_MAX
#define KVC__SHORT_PASS 16u         /* rows of a pass whose progress nobody would see */

struct kvc_ctx {
    kvc_ctx_desc desc;          /* resolved */
    kvc__plan plan;
    kvc__cursor cursor;
    kvc__crew crew;
    kvc__crew_member *members;
    uint64_t n_rows, n_logit_rows;
    size_t block_size;
    int owned;
    /* shared with those who submit and cancel, under the lock */
    kvc__lock lock;
    kvc_request *inbox, **inbox_end;
    uint64_t ticket;            /* the number of the next request */
    uint64_t cancelled;         /* requests below this are cancelled */
    kvc__atomic heed;           /* 1: one was, read without the lock */
    /* the running thread's */
    kvc_request *first, **end;  /* by priority, then as they came; where the next one goes */
    uint32_t least;             /* priority: no request has less */
    kvc__stage stage;
    int is_running;
    int is_alone;               /* what was submitted waits */
    int is_crowded;             /* not every decode had room in the pass */
    int is_closing;
    double row_work;            /* of a row, but for attention: see kvc__op_work */
    uint64_t pass_us;           /* that the pass has taken so far */
    uint64_t began, deadline;   /* of the call, microseconds; KVC__NEVER: none */
    uint64_t us_most;           /* the longest call with a deadline, */
    uint64_t late_most;         /* and the latest */
    kvc__work work;
    kvc__atomic progress, us_used;      /* the same to be read by others: in 2^-24, and saturated */
};

/* ---- the cursor ---- */

static int kvc__cursor_start(kvc__cursor *c)
{
#if KVC_NO_THREADS
    (void)c;
#else
    if (!kvc__lock_init(&c->lock)) return 0;
    if (!kvc__cond_init(&c->moved)) {
        kvc__lock_free(&c->lock);
        return 0;
    }
#endif
    return 1;
}

static void kvc__cursor_stop(kvc__cursor *c)
{
#if KVC_NO_THREADS
    (void)c;
#else
    kvc__cond_free(&c->moved);
    kvc__lock_free(&c->lock);
#endif
}

/* Waits until the cursor has left operation `op`: a short spin, since the neighbour's tile is
   short, in which the weights of `ask` are asked for, then yields, which lets it run if there are
   fewer cores than threads, then sleep. */
static void kvc__cursor_wait(kvc__cursor *c, uint32_t op, kvc__ask *ask)
{
#if KVC_NO_THREADS
    (void)c;
    (void)op;
    (void)ask;
#else
    int i;
    for (i = 0; i < 600; i++) {
        if (kvc__atomic_load(&c->op) != op) return;
        if (ask->at < ask->end) kvc__ask_more(ask, KVC__ASK_STEP);
        else if (i < 500) kvc__cpu_relax();
        else kvc__thread_yield();
    }
    kvc__lock_enter(&c->lock);
    kvc__atomic_add(&c->n_sleepers, 1);
    while (kvc__atomic_load(&c->op) == op) kvc__cond_wait(&c->moved, &c->lock);
    kvc__atomic_add(&c->n_sleepers, (uint32_t)-1);
    kvc__lock_leave(&c->lock);
#endif
}

/* Puts the tiles of `op` where threads can take them. The last run is never empty and is opened
   last, so nobody can finish the operation while the runs are being opened. */
static void kvc__cursor_open(kvc__cursor *c, uint32_t op)
{
    uint32_t i;
    kvc__atomic_store(&c->n_done, 0);
    for (i = 0; i < c->n_runs; i++) kvc__atomic_store(&c->runs[i].at, op << 16);
}

/* Shows those who wait that `op` is open. Others may have finished it by now and shown a later
   one, which must stand. The store and the sleepers' count are both sequentially consistent: a
   thread that goes to sleep either sees the new place or is seen here. */
static void kvc__cursor_show(kvc__cursor *c, uint32_t op)
{
    uint32_t shown = kvc__atomic_load(&c->op);
    while (shown < op && !kvc__atomic_swap(&c->op, shown, op)) shown = kvc__atomic_load(&c->op);
#if !KVC_NO_THREADS
    if (kvc__atomic_load(&c->n_sleepers) != 0) {
        kvc__lock_enter(&c->lock);
        kvc__cond_wake(&c->moved);
        kvc__lock_leave(&c->lock);
    }
#endif
}

/* The first operation from `op` on that has tiles; n_ops if there is none. */
static uint32_t kvc__plan_next(const kvc__plan *p, uint32_t op)
{
    while (op < p->n_ops && p->ops[op].n_tiles == 0) op++;
    return op;
}

static uint64_t kvc__ctx_clock(const kvc_ctx *ctx)
{
    return ctx->desc.clock_us != NULL ? ctx->desc.clock_us(ctx->desc.user) : kvc__clock();
}

/* Whether the time of the call is over. A clock that was set back ends it, too. */
static int kvc__step_late(const kvc_ctx *ctx)
{
    uint64_t now;
    if (ctx->deadline == KVC__NEVER) return 0;
    now = kvc__ctx_clock(ctx);
    return now >= ctx->deadline || now < ctx->began;
}

/* Whether threads are to leave. */
static int kvc__walk_ends(const kvc_ctx *ctx)
{
    return kvc__atomic_load(&ctx->heed) != 0 || kvc__step_late(ctx);
}

/* The first operation from `op` on that has tiles, after doing those of one tile on the way:
   handing them out would cost more than they do. */
static uint32_t kvc__plan_skip(const kvc_ctx *ctx, uint32_t op, uint32_t worker)
{
    const kvc__plan *p = &ctx->plan;
    op = kvc__plan_next(p, op);
    while (op < p->n_ops && p->ops[op].n_tiles == 1 && !kvc__walk_ends(ctx)) {
        kvc__op_run(p, &p->ops[op], 0, worker);
        op = kvc__plan_next(p, op + 1);
    }
    return op;
}

/* Lets others see how far the requests are, now that the cursor is at `op`. */
static void kvc__step_show(kvc_ctx *ctx, uint32_t op)
{
    const kvc__work *w = &ctx->work;
    double done = w->done, used = (double)w->used;
    done += w->pass * (op < ctx->plan.n_ops ? ctx->plan.ops[op].before : 1);
    used += (double)(kvc__ctx_clock(ctx) - ctx->began);
    done = w->all > 0 && done < w->all ? done / w->all : 1;
    kvc__atomic_store(&ctx->progress, (uint32_t)(done * 16777216.0));
    kvc__atomic_store(&ctx->us_used, used < 4294967295.0 ? (uint32_t)used : UINT32_MAX);
}

/* The first tile of a run, and with run + 1 its end. */
static uint32_t kvc__run_begin(uint32_t n_tiles, uint32_t run, uint32_t n_runs)
{
    return (uint32_t)((uint64_t)n_tiles * run / n_runs);
}

/* Nothing is left to do in operation `op`: asks for the first of the weights with which the
   worker's run of the next product begins. Gives those that are left, to be asked for while it
   waits. */
static kvc__ask kvc__walk_ask(const kvc_ctx *ctx, uint32_t op, uint32_t worker)
{
    const kvc__plan *p = &ctx->plan;
    const kvc__op *o;
    kvc__ask ask;
    uint32_t tile;
    memset(&ask, 0, sizeof ask);
    for (op++; op < p->n_ops && p->ops[op].kind != KVC__OP_MATRIX; op++) continue;
    if (op >= p->n_ops) return ask;
    o = &p->ops[op];
    if (o->n_tiles == 0 || o->use_cblas || o->n_rows >= KVC__PACK_ROWS) return ask;
    tile = kvc__run_begin(o->n_tiles, worker, ctx->cursor.n_runs);
    if (tile >= o->n_tiles) return ask;
    ask = kvc__matrix_ask(p, o, tile * o->tile_units);
    kvc__ask_more(&ask, KVC__ASK_FIRST);
    return ask;
}

/* Which tile a run is at; 0: it has none left. */
static int kvc__run_at(const kvc_ctx *ctx, uint32_t at, uint32_t run, uint32_t *op, uint32_t *tile)
{
    const uint32_t n = ctx->cursor.n_runs;
    uint32_t n_tiles;
    *op = at >> 16;
    if (*op >= ctx->plan.n_ops) return 0;
    n_tiles = ctx->plan.ops[*op].n_tiles;
    *tile = kvc__run_begin(n_tiles, run, n) + (at & 0xffffu);
    return *tile < kvc__run_begin(n_tiles, run + 1, n);
}

/* Takes a tile: of the worker's own run, else of another. 0 if all are taken. The run tells which
   operation the tile belongs to, which may be a later one than the caller has seen. A look comes
   before the taking, or the tries of many calls that find nothing would fill the 16 bits. */
static int kvc__cursor_take(kvc_ctx *ctx, uint32_t worker, uint32_t *op, uint32_t *tile)
{
    kvc__cursor *c = &ctx->cursor;
    uint32_t i, n = c->n_runs;
    for (i = 0; i < n; i++) {
        uint32_t run = (worker + i) % n;
        if (kvc__run_at(ctx, kvc__atomic_load(&c->runs[run].at), run, op, tile) &&
            kvc__run_at(ctx, kvc__atomic_add(&c->runs[run].at, 1), run, op, tile)) return 1;
        if (*op >= ctx->plan.n_ops) return 0;
    }
    return 0;
}

/* What each thread of a pass does. It takes one tile, however late it is, so that every call gets
   on. */
static void kvc__walk(void *arg, uint32_t worker)
{
    kvc_ctx *ctx = (kvc_ctx *)arg;
    kvc__cursor *c = &ctx->cursor;
    kvc__fp_mode mode = kvc__fp_enter();
    int turn;
    for (turn = 0;; turn = 1) {
        uint32_t seen = kvc__atomic_load(&c->op), op, tile;
        if (seen >= ctx->plan.n_ops || (turn != 0 && kvc__walk_ends(ctx))) break;
        if (!kvc__cursor_take(ctx, worker, &op, &tile)) {
            kvc__ask ask = kvc__walk_ask(ctx, seen, worker);
            kvc__cursor_wait(c, seen, &ask);
            continue;
        }
        kvc__op_run(&ctx->plan, &ctx->plan.ops[op], tile, worker);
        if (kvc__atomic_add(&c->n_done, 1) + 1 == ctx->plan.ops[op].n_tiles) {
            (void)kvc__walk_ask(ctx, op, worker);
            op = kvc__plan_skip(ctx, op + 1, worker);
            if (ctx->plan.n_rows > KVC__SHORT_PASS) kvc__step_show(ctx, op);
            kvc__cursor_open(c, op);
            kvc__cursor_show(c, op);
        }
    }
    kvc__fp_leave(mode);
}

/* ---- contexts ---- */

static kvc_result kvc__ctx_defaults(kvc_ctx_desc *d, kvc_error *err)
{
    kvc_result r;
    if (d->start_canary != 0 || d->end_canary != 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "desc", "not zero-initialised");
    if (d->model == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "model", "NULL");
    if (d->n_batch == 0) d->n_batch = 256;
    if (d->n_batch > (1u << 20))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_batch", "more than 2^20");
    if (d->n_threads == 0) d->n_threads = 1;
    if ((r = kvc__threads_check(d->n_threads, err)) != KVC_OK) return r;
    if (d->n_chunk == 0) d->n_chunk = 64;
    if (d->n_chunk > d->n_batch) d->n_chunk = d->n_batch;
    if ((uint32_t)d->isa > (uint32_t)KVC_ISA_AVX512_VNNI)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "isa", "not a kvc_isa");
    if (d->gemm != KVC_GEMM_BUILTIN && d->gemm != KVC_GEMM_CBLAS)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "gemm", "not a kvc_gemm");
    if (d->gemm == KVC_GEMM_CBLAS && !KVC_USE_CBLAS)
        return kvc__fail(err, KVC_ERROR_UNSUPPORTED, "gemm", "built without KVC_USE_CBLAS");
    if (!kvc__allocator_resolve(&d->allocator, &d->allocator, &d->model->allocator))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "allocator", "only one of alloc and free is set");
    d->isa = kvc__kernels_pick(d->isa)->isa;
    return KVC_OK;
}

/* [n_batch, width] floats */
static float *kvc__take_rows(kvc__arena *arena, uint32_t n_batch, uint64_t width)
{
    size_t n = 0;
    if (width > SIZE_MAX || !kvc__mul_size(&n, n_batch, (size_t)width)) arena->overflow = 1;
    return (float *)kvc__take(arena, n, sizeof(float));
}

/* n_rows rows of `width` elements in the forms that the model's matrices read */
static void kvc__take_forms(kvc__arena *arena, const kvc_ctx_desc *d, uint64_t n_rows,
    uint64_t width, kvc__forms *forms)
{
    const uint32_t n = kvc__div_up((uint32_t)n_rows, KVC__LANE_ROWS) * KVC__LANE_ROWS;
    if (n_rows > UINT32_MAX - KVC__LANE_ROWS) arena->overflow = 1;
    if (d->model->has_quantized)
        forms->q8 = (unsigned char *)kvc__take_rows(arena, n,
            (width + 31) / 32 * (KVC__Q8_BYTES / 4));
    if (d->model->has_floats)
        forms->lanes = kvc__take_rows(arena, n, kvc__lanes_stride((uint32_t)width));
}

/* Each thread's working memory and state of a group, and the parts. */
static void kvc__scratch_attention(kvc__arena *arena, const kvc_ctx_desc *d, kvc__scratch *s)
{
    const kvc_model *m = d->model;
    uint32_t v_stride = kvc__attn_v_stride(m);
    s->attn_floats = kvc__attn_floats(KVC__MAX_QUERIES, m->head_dim, v_stride) +
        KVC__MAX_QUERIES * kvc__part_floats(v_stride);
    s->attn = kvc__take_rows(arena, d->n_threads, s->attn_floats);
    s->tops = kvc__take_rows(arena, d->n_batch, 2 * (uint64_t)m->n_heads);
    if (d->n_threads > 1)
        s->parts = kvc__take_rows(arena, KVC__MAX_PARTS,
            (uint64_t)m->n_heads * kvc__part_floats(v_stride));
}

/* What latent attention needs beside. */
static void kvc__scratch_latent(kvc__arena *arena, const kvc_ctx_desc *d, kvc__scratch *s)
{
    const kvc_model *m = d->model;
    const uint64_t nope = m->head_q - m->rope_dim;
    const uint64_t width = nope > m->head_dim_v ? nope : m->head_dim_v;
    const uint64_t n = (uint64_t)m->n_heads * kvc__place_up(d->n_batch, d->n_batch) +
        KVC__LANE_ROWS;
    if (!kvc__has(m, KVC__LATENT)) return;
    if (n > 0x7fffffffu) arena->overflow = 1;
    s->q_low = kvc__take_rows(arena, d->n_batch, m->q_rank);
    s->q_own = kvc__take_rows(arena, d->n_batch, (uint64_t)m->n_heads * m->head_q);
    s->heads = kvc__take_rows(arena, d->n_batch, (uint64_t)m->n_heads * m->head_o);
    kvc__take_forms(arena, d, n, width, &s->split);
    if (m->packed == NULL && m->has_floats) s->splits = kvc__take_rows(arena, (uint32_t)n, width);
}

static void kvc__scratch_experts(kvc__arena *arena, const kvc_ctx_desc *d, kvc__scratch *s)
{
    const kvc_model *m = d->model;
    const uint64_t n = kvc__max_places(m, d->n_batch);
    if (m->n_experts == 0) return;
    if (n > 0x7fffffffu) arena->overflow = 1;
    s->routes = kvc__take_rows(arena, d->n_batch, m->n_experts);
    s->shares = kvc__take_rows(arena, d->n_batch, 1);
    s->picks = (kvc__pick *)kvc__take(arena, d->n_batch, m->n_used * sizeof *s->picks);
    s->bunches = (kvc__bunch *)kvc__take(arena,
        (size_t)kvc__max_bunches(m, d->n_batch, KVC__BLOCK_ROWS), sizeof *s->bunches);
    s->n_bunches = (uint32_t *)kvc__take(arena, 1, sizeof *s->n_bunches);
    s->place_gate = kvc__take_rows(arena, (uint32_t)n, m->n_ff_expert);
    s->place_outs = kvc__take_rows(arena, (uint32_t)n, m->n_embd);
    kvc__take_forms(arena, d, n, m->n_embd, &s->places);
    kvc__take_forms(arena, d, n, m->n_ff_expert, &s->place_gates);
    if (m->packed == NULL && m->has_floats)
        s->place_rows = kvc__take_rows(arena, (uint32_t)n, m->n_embd);
}

static uint64_t kvc__most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static void kvc__scratch_layout(kvc__arena *arena, const kvc_ctx_desc *d, kvc__scratch *s)
{
    const kvc_model *m = d->model;
    const uint64_t q = (uint64_t)m->n_heads * m->head_dim;
    const uint64_t narrow = kvc__most(kvc__most(m->n_embd, m->q_rank),
        (uint64_t)m->n_heads * m->head_o);
    const uint64_t wide = kvc__most(m->n_ff, m->n_ff_shared);
    const uint32_t n = d->n_batch;
    memset(s, 0, sizeof *s);
    s->x = kvc__take_rows(arena, n, m->n_embd);
    s->norm = kvc__take_rows(arena, n, m->n_embd);
    s->part = kvc__take_rows(arena, n, m->n_embd);
    s->q = kvc__take_rows(arena, n, q);
    s->k = kvc__take_rows(arena, n, (uint64_t)m->n_kv_heads * m->head_dim);
    s->v = kvc__take_rows(arena, n, (uint64_t)m->n_kv_heads * kvc__stored_v(m));
    s->att = kvc__take_rows(arena, n, (uint64_t)m->n_heads * m->head_dim_v);
    s->gate = kvc__take_rows(arena, n, wide);
    s->up = kvc__take_rows(arena, n, wide);
    s->turns = kvc__take_rows(arena, n, (uint64_t)2 * m->n_ropes * m->rope_dim);
    kvc__take_forms(arena, d, n, narrow, &s->narrow);
    kvc__take_forms(arena, d, n, wide, &s->wide);
    kvc__scratch_latent(arena, d, s);
    kvc__scratch_experts(arena, d, s);
    s->pack_size = m->in_place_group * (KVC__BLOCK_OUTS / 16);
    if (s->pack_size != 0)
        s->packs = (unsigned char *)kvc__take_rows(arena, d->n_threads, s->pack_size / 4);
    s->logits = kvc__take_rows(arena, 1, m->n_vocab);
    s->blocks = kvc__take_rows(arena, d->n_threads, 2 * KVC__BLOCK_FLOATS);
    s->sums = kvc__take_rows(arena, d->n_threads, KVC__SUM_FLOATS);
    if (d->gemm == KVC_GEMM_CBLAS)
        s->panel = kvc__take_rows(arena, KVC__PANEL, kvc__most(narrow, wide));
    kvc__scratch_attention(arena, d, s);
}

/* Measures, or builds the context if the arena has a base. */
static kvc_ctx *kvc__ctx_layout(kvc__arena *arena, const kvc_ctx_desc *d)
{
    uint32_t i, max_ops = d->model->n_layers * KVC__OPS_PER_LAYER + KVC__OPS_AROUND;
    kvc_ctx *ctx = (kvc_ctx *)kvc__take(arena, 1, sizeof *ctx);
    kvc__op *ops = (kvc__op *)kvc__take(arena, max_ops, sizeof *ops);
    kvc__row *rows = (kvc__row *)kvc__take(arena, d->n_batch, sizeof *rows);
    uint32_t *wanted = (uint32_t *)kvc__take(arena, d->n_batch, sizeof *wanted);
    float **out = (float **)kvc__take(arena, d->n_batch, sizeof *out);
    kvc__group *groups = (kvc__group *)kvc__take(arena, d->n_batch, sizeof *groups);
    kvc__crew_member *members =
        (kvc__crew_member *)kvc__take(arena, d->n_threads - 1, sizeof *members);
    kvc__run *runs = (kvc__run *)kvc__take(arena, d->n_threads, sizeof *runs);
    kvc__scratch scratch;
    kvc__scratch_layout(arena, d, &scratch);
    if (ctx == NULL) return NULL;
    memset(ctx, 0, sizeof *ctx);
    ctx->desc = *d;
    ctx->end = &ctx->first;
    ctx->inbox_end = &ctx->inbox;
    ctx->deadline = KVC__NEVER;
    ctx->members = members;
    ctx->cursor.runs = runs;
    ctx->cursor.n_runs = d->n_threads;
    ctx->plan.model = d->model;
    ctx->plan.kernels = kvc__kernels_pick(d->isa);
    ctx->plan.gemm = d->gemm;
    ctx->plan.n_threads = d->n_threads;
    ctx->plan.s = scratch;
    ctx->plan.ops = ops;
    ctx->plan.rows = rows;
    ctx->plan.wanted = wanted;
    ctx->plan.out = out;
    ctx->plan.groups = groups;
    ctx->plan.n_head_groups = d->model->n_kv_heads *
        kvc__div_up(d->model->n_heads / d->model->n_kv_heads, KVC__MAX_QUERIES);
    kvc__plan_build(&ctx->plan);
    for (i = 0; i + 1 < ctx->plan.n_ops; i++)
        ctx->row_work += kvc__matrix_work(d->model, &ctx->plan.ops[i]);
    kvc__atomic_store(&ctx->progress, 1u << 24);
    return ctx;
}

static kvc_result kvc__ctx_measure(kvc_ctx_desc *d, size_t *size, kvc_error *err)
{
    kvc__arena arena;
    kvc_result r = kvc__ctx_defaults(d, err);
    if (r != KVC_OK) return r;
    memset(&arena, 0, sizeof arena);
    kvc__ctx_layout(&arena, d);
    if (arena.overflow)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_batch",
            "the scratch memory passes the address space");
    *size = arena.used;
    return KVC_OK;
}

/* 0 if a lock, condition or thread could not be made; nothing is left then */
static int kvc__ctx_start(kvc_ctx *ctx)
{
    const kvc_jobs *jobs = &ctx->desc.jobs;
    if (!kvc__lock_init(&ctx->lock)) return 0;
    if (kvc__cursor_start(&ctx->cursor)) {
        if (kvc__crew_start(&ctx->crew, ctx->members, ctx->desc.n_threads, jobs)) return 1;
        kvc__cursor_stop(&ctx->cursor);
    }
    kvc__lock_free(&ctx->lock);
    return 0;
}

static kvc_result kvc__ctx_new(kvc_ctx **out, const kvc_ctx_desc *desc, kvc_error *err)
{
    kvc_ctx_desc d = *desc;
    kvc__arena arena;
    void *block;
    size_t size = 0;
    int owned;
    kvc_result r = kvc__ctx_measure(&d, &size, err);
    if (r != KVC_OK) return r;
    if ((r = kvc__block_get(&block, size, &d.memory, &d.allocator, &owned, err)) != KVC_OK)
        return r;
    memset(block, 0, size);         /* so that no step waits for the system to hand it out */
    memset(&arena, 0, sizeof arena);
    arena.base = (unsigned char *)block;
    *out = kvc__ctx_layout(&arena, &d);
    (*out)->block_size = size;
    (*out)->owned = owned;
    if (kvc__ctx_start(*out)) return KVC_OK;
    if (owned) kvc__free(&d.allocator, block, size);
    *out = NULL;
    return kvc__fail(err, KVC_ERROR_THREAD, "n_threads", "a thread could not be made");
}

/* ---- requests ---- */

/* The token whose logits come i-th. Tokens that were generated come one by one. */
static size_t kvc__request_row(const kvc_request *q, size_t i)
{
    return q->rows != NULL ? q->rows[i] : q->n_part - q->n_rows + i;
}

static kvc_result kvc__rows_check(const kvc_request *q)
{
    size_t i;
    if (q->n_rows != 0 && q->logits == NULL)
        return kvc__fail(q->err, KVC_ERROR_ARGUMENT, "logits", "NULL");
    if (q->n_rows > q->n_part)
        return kvc__fail(q->err, KVC_ERROR_ARGUMENT, "n_rows", "more than n_tokens");
    if (q->sampler != NULL && (q->rows != NULL || q->n_rows != 1))
        return kvc__fail(q->err, KVC_ERROR_ARGUMENT, "n_rows",
            "a sampler needs the logits of the last token and no others");
    for (i = 0; q->rows != NULL && i < q->n_rows; i++) {
        if (q->rows[i] >= q->n_part || (i > 0 && q->rows[i] <= q->rows[i - 1]))
            return kvc__fail_numbers(q->err, KVC_ERROR_ARGUMENT, "rows", "entry", i,
                "is not rising or not below n_tokens, it is", q->rows[i]);
    }
    return KVC_OK;
}

static kvc_result kvc__request_check(const kvc_ctx *ctx, const kvc_request *q)
{
    const kvc_model *m = ctx->desc.model;
    kvc_result r;
    size_t i;
    if (!q->is_started && !kvc__seq_usable(q->seq)) return kvc__seq_refuse(q->err);
    if (q->seq->cache->desc.model != m)
        return kvc__fail(q->err, KVC_ERROR_ARGUMENT, "seq",
            "its cache is of another model than the context");
    if (q->sampler != NULL && q->sampler->n_vocab != m->n_vocab)
        return kvc__fail(q->err, KVC_ERROR_ARGUMENT, "sampler", "it is of another model");
    if (q->part == NULL || q->n_part == 0)
        return kvc__fail(q->err, KVC_ERROR_ARGUMENT, "tokens", "no tokens");
    if ((r = kvc__rows_check(q)) != KVC_OK) return r;
    /* too many for the sequence: that is what the caller is told, without reading them all */
    if (q->seq->policy == KVC_POLICY_ERROR && q->n_part > q->seq->cache->desc.n_ctx)
        return KVC_OK;
    for (i = 0; i < q->n_part; i++) {
        if (q->part[i] < 0 || (uint32_t)q->part[i] >= m->n_vocab)
            return kvc__fail_numbers(q->err, KVC_ERROR_ARGUMENT, "tokens", "entry", i,
                "is not an id below", m->n_vocab);
    }
    return KVC_OK;
}

/* Pages for the request, and for undoing it if there are as many. Calls that wait for it do without
   these, so that their sequences never hold more than a full one. */
static kvc_result kvc__request_reserve(const kvc_ctx *ctx, kvc_request *q)
{
    const size_t n = q->n_part, known = q->n_rows != 0 ? kvc__request_row(q, 0) : n - 1;
    const uint32_t most = n < KVC__MAX_SLOTS ? (uint32_t)n : KVC__MAX_SLOTS;
    kvc_error err;
    kvc_result r;
    kvc__seq_mark(q->seq, most, !ctx->is_alone);
    r = kvc__seq_reserve(q->seq, q->part, n, known, &err);
    if (r == KVC_ERROR_FULL && q->seq->is_kept) {
        kvc__seq_unmark(q->seq);
        kvc__seq_mark(q->seq, most, 0);
        r = kvc__seq_reserve(q->seq, q->part, n, known, &err);
    }
    if (r == KVC_OK) return r;
    kvc__seq_unmark(q->seq);
    if (q->err != NULL) *q->err = err;
    return r;
}

/* Work on n tokens from q->at on, of which n_wanted want logits. */
static double kvc__request_work(const kvc_ctx *ctx, const kvc_request *q, size_t n, size_t n_wanted)
{
    const kvc_model *m = ctx->desc.model;
    const double pos = kvc_seq_length(q->seq), seen = (double)n * (pos + (double)(n + 1) / 2);
    return (double)n * ctx->row_work + (double)n_wanted * m->output.n_in * m->output.n_out +
        seen * m->n_layers * m->n_heads * (m->head_dim + m->head_dim_v);
}

/* Checks the request's part and reserves what it needs; afterwards it cannot fail. */
static kvc_result kvc__request_start(kvc_ctx *ctx, kvc_request *q)
{
    kvc_result r = kvc__request_check(ctx, q);
    if (r != KVC_OK) return r;
    if (!q->is_decode) kvc__prefix_engine(q->seq, ctx->desc.gemm);
    if ((r = kvc__request_reserve(ctx, q)) != KVC_OK) return r;
    q->is_started = q->is_ready = q->seq->is_busy = 1;
    q->at = q->seq->n_hit;
    q->row = 0;
    ctx->work.all += kvc__request_work(ctx, q, q->n_part - q->at, q->n_rows);
    return r;
}

/* Puts the request's next rows into the pass, n at most. */
static void kvc__request_rows(kvc_ctx *ctx, kvc_request *q, uint32_t n)
{
    kvc__plan *p = &ctx->plan;
    const kvc__extent *t;
    const size_t row = q->row;
    uint32_t i, most = kvc__seq_chunk(q->seq, ctx->desc.n_batch);
    if (n > most) n = most;
    if (n > q->n_part - q->at) n = (uint32_t)(q->n_part - q->at);
    q->n_now = kvc__seq_advance(q->seq, n);
    t = kvc__seq_last(q->seq);
    for (i = 0; i < q->n_now; i++, p->n_rows++) {
        kvc__row *r = &p->rows[p->n_rows];
        r->seq = q->seq;
        r->slot = t->end + i;
        r->token = q->part[q->at + i];
        *kvc__token_of(q->seq, t, r->slot) = r->token;
        if (q->row == q->n_rows || kvc__request_row(q, q->row) != q->at + i) continue;
        p->wanted[p->n_wanted] = p->n_rows;
        p->out[p->n_wanted++] = q->logits + q->row++ * ctx->desc.model->n_vocab;
    }
    q->work_now = kvc__request_work(ctx, q, q->n_now, q->row - row);
    ctx->work.pass += q->work_now;
}

/* ---- the list of requests ---- */

static void kvc__request_init(kvc_request *q, uint32_t is_decode)
{
    q->result = KVC_OK;
    q->is_done = 0;
    q->n_generated = 0;
    q->next = NULL;
    q->part = q->tokens;
    q->n_part = q->n_tokens;
    q->at = q->row = 0;
    q->n_now = q->is_cancelled = q->cancel = q->is_started = q->is_ready = 0;
    q->is_decode = is_decode;
}

static void kvc__request_queue(kvc_ctx *ctx, kvc_request *q)
{
    kvc_request **at = &ctx->first;
    if (ctx->first == NULL || q->priority <= ctx->least) {
        at = ctx->end;
        ctx->least = q->priority;
    }
    while (*at != NULL && (*at)->priority >= q->priority) at = &(*at)->next;
    q->next = *at;
    *at = q;
    if (q->next == NULL) ctx->end = &q->next;
}

static kvc_request *kvc__request_unlink(kvc_ctx *ctx, kvc_request **link)
{
    kvc_request *q = *link;
    *link = q->next;
    if (q->next == NULL) ctx->end = link;
    q->next = NULL;
    return q;
}

/* Tells the host what became of a request that is in no list. */
static void kvc__request_tell(kvc_request *q, kvc_result result)
{
    q->result = result;
    q->is_submitted = 0;
    q->is_done = 1;
    if (q->on_done != NULL) q->on_done(q);
}

/* Ends the request that a link leads to. */
static void kvc__request_end(kvc_ctx *ctx, kvc_request **link, kvc_result result)
{
    kvc_request *q = kvc__request_unlink(ctx, link);
    if (q->is_started) {
        q->seq->is_busy = 0;
        if (q->seq->closes) kvc__seq_close(q->seq);
    }
    kvc__request_tell(q, result);
}

/* Ends it as if it had not been begun. */
static void kvc__request_undo(kvc_ctx *ctx, kvc_request **link)
{
    kvc_request *q = *link;
    if (q->is_ready) {
        kvc__seq_undo(q->seq);
        ctx->work.all -= kvc__request_work(ctx, q, q->n_part - q->at, q->n_rows - q->row);
    }
    kvc__request_end(ctx, link, kvc__fail(q->err, KVC_ERROR_CANCELLED, "request", "cancelled"));
}

/* Takes in what was submitted, and looks what was cancelled. */
static void kvc__step_heed(kvc_ctx *ctx)
{
    kvc_request *q, *next, *fresh;
    kvc__atomic_store(&ctx->heed, 0);
    kvc__lock_enter(&ctx->lock);
    for (q = ctx->first; q != NULL; q = q->next)
        if (q->cancel || q->ticket < ctx->cancelled) q->is_cancelled = 1;
    fresh = ctx->is_alone ? NULL : ctx->inbox;
    if (fresh != NULL) {
        ctx->inbox = NULL;
        ctx->inbox_end = &ctx->inbox;
    }
    for (q = fresh; q != NULL; q = q->next)
        if (q->cancel || q->ticket < ctx->cancelled) q->is_cancelled = 1;
    kvc__lock_leave(&ctx->lock);
    for (q = fresh; q != NULL; q = next) {
        next = q->next;
        kvc__request_queue(ctx, q);
    }
}

/* A number for a request, which orders it before or after cancellations of all. The lock is
   held. */
static void kvc__request_number(kvc_ctx *ctx, kvc_request *q)
{
    q->ticket = ctx->ticket++;
}

/* Whether a request is not to go on, nor must. */
static int kvc__request_goes(const kvc_request *q)
{
    if (!q->is_cancelled && !(q->is_started && q->seq->closes)) return 0;
    return !(q->is_ready && q->seq->is_lossy);
}

/* Ends what was cancelled but for requests with rows in the pass; if that is of no use to others,
   it is left first. */
static void kvc__step_drop(kvc_ctx *ctx)
{
    kvc_request *q, **link;
    int useful = ctx->stage != KVC__STAGE_PASS;
    for (q = ctx->first; q != NULL; q = q->next)
        useful |= q->n_now != 0 && !kvc__request_goes(q);
    for (q = ctx->first; q != NULL && !useful; q = q->next) q->n_now = 0;
    if (!useful) {
        ctx->stage = KVC__STAGE_START;
        ctx->work.pass = 0;
    }
    for (link = &ctx->first; *link != NULL;) {
        if ((*link)->n_now == 0 && kvc__request_goes(*link)) kvc__request_undo(ctx, link);
        else link = &(*link)->next;
    }
}

/* Whether nothing was submitted that is not in the list. */
static int kvc__inbox_empty(kvc_ctx *ctx)
{
    int empty;
    kvc__lock_enter(&ctx->lock);
    empty = ctx->inbox == NULL;
    kvc__lock_leave(&ctx->lock);
    return empty;
}

/* ---- the stages of a pass ---- */

/* Whether pages that a request lacks will be free when others are done that may yet be undone. */
static int kvc__request_waits(const kvc_ctx *ctx, const kvc_request *q)
{
    const kvc_request *other;
    for (other = ctx->first; other != NULL; other = other->next)
        if (other->is_ready && other->seq->is_kept && other->seq->cache == q->seq->cache) return 1;
    return 0;
}

/* Starts requests; 0: time is up before all are. */
static int kvc__step_start(kvc_ctx *ctx)
{
    kvc_request **link = &ctx->first;
    while (*link != NULL) {
        kvc_request *q = *link;
        kvc_error err, *out = q->err;
        kvc_result r;
        if (q->is_ready) {
            link = &q->next;
            continue;
        }
        q->err = &err;
        r = kvc__request_start(ctx, q);
        q->err = out;
        if (r == KVC_ERROR_FULL && kvc__request_waits(ctx, q)) {
            link = &q->next;
            continue;
        }
        if (r != KVC_OK) {
            if (out != NULL) *out = err;
            kvc__request_end(ctx, link, r);
        }
        if (kvc__step_late(ctx)) return 0;
    }
    return 1;
}

/* Puts decodes into the pass, as far as it has rows, of sequences that begin as that of `q` does,
   so that they lie side by side: see kvc__prepare_groups. */
static void kvc__pass_kin(kvc_ctx *ctx, kvc_request *q)
{
    kvc_request *kin;
    for (kin = q->next; kin != NULL && ctx->plan.n_rows < ctx->desc.n_batch; kin = kin->next) {
        if (!kin->is_ready || !kin->is_decode || kin->n_now != 0) continue;
        if (kvc__seq_kin(q->seq, kin->seq)) kvc__request_rows(ctx, kin, 1);
    }
}

/* Puts rows of decodes, or of prefills, into the pass, n at most. Returns how many requests found
   no room. */
static uint32_t kvc__pass_add(kvc_ctx *ctx, uint32_t decodes, uint32_t n)
{
    const uint32_t end = ctx->plan.n_rows + n;
    uint32_t n_waiting = 0;
    kvc_request *q;
    for (q = ctx->first; q != NULL; q = q->next) {
        if (!q->is_ready || q->is_decode != decodes || q->n_now != 0) continue;
        if (ctx->plan.n_rows == end) {
            n_waiting++;
            continue;
        }
        kvc__request_rows(ctx, q, end - ctx->plan.n_rows);
        if (decodes) kvc__pass_kin(ctx, q);
    }
    return n_waiting;
}

/* Decodes first, then prefills as far as n_chunk goes. cblas computes prefills only, so the two
   take turns with it. */
static void kvc__pass_build(kvc_ctx *ctx)
{
    kvc__plan *p = &ctx->plan;
    const int apart = ctx->desc.gemm == KVC_GEMM_CBLAS, was_decode = p->is_decode;
    uint32_t n = ctx->desc.n_batch;
    kvc_request *q;
    p->n_rows = p->n_wanted = 0;
    p->is_sliced = ctx->deadline != KVC__NEVER;
    ctx->work.pass = 0;
    for (q = ctx->first; q != NULL && (q->is_decode || !q->is_ready); q = q->next) continue;
    ctx->is_crowded = 0;
    if (!apart || !was_decode || q == NULL) ctx->is_crowded = kvc__pass_add(ctx, 1, n) != 0;
    p->is_decode = p->n_rows != 0;
    if (p->n_rows != 0) {
        n -= p->n_rows;
        if (n > ctx->desc.n_chunk) n = ctx->desc.n_chunk;
    }
    if (!apart || p->n_rows == 0) kvc__pass_add(ctx, 0, n);
    kvc__plan_prepare(p);
    n = kvc__plan_next(p, 0);
    kvc__cursor_open(&ctx->cursor, n);
    kvc__atomic_store(&ctx->cursor.op, n);          /* back from the end; nobody waits yet */
    ctx->pass_us = 0;
    ctx->stage = KVC__STAGE_PASS;
}

/* The part is done: draws the next token from its logits, as long as the text goes on. */
static void kvc__request_next(kvc_ctx *ctx, kvc_request **link)
{
    kvc_request *q = *link;
    kvc__fp_mode mode;
    kvc_result r;
    int stop;
    q->is_ready = 0;
    if (q->sampler == NULL) {
        kvc__request_end(ctx, link, KVC_OK);
        return;
    }
    if (q->is_cancelled) return;            /* and ends where others do */
    mode = kvc__fp_enter();
    r = kvc__sampler_sample(q->sampler, q->logits, &q->token, q->err);
    kvc__fp_leave(mode);
    if (r == KVC_OK) {
        q->n_generated++;
        stop = q->on_token != NULL && q->on_token(q, q->token) != 0;
        if (!stop && q->n_generated != q->limit &&
            !kvc__vocab_is_end(&ctx->desc.model->vocab, q->token)) {
            q->part = &q->token;
            q->n_part = 1;
            q->is_decode = 1;
            if (ctx->is_crowded) kvc__request_queue(ctx, kvc__request_unlink(ctx, link));
            return;
        }
    }
    kvc__request_end(ctx, link, r);
}

/* Counts a request's rows. */
static void kvc__request_count(kvc_ctx *ctx, kvc_request **link)
{
    kvc_request *q = *link;
    kvc__seq_add(q->seq, q->n_now);
    if (!ctx->plan.is_decode)
        kvc__cache_timed(q->seq->cache, q->n_now,
            (double)ctx->pass_us * q->n_now / ctx->plan.n_rows);
    q->at += q->n_now;
    q->n_now = 0;
    ctx->work.done += q->work_now;
    ctx->work.pass -= q->work_now;
    if (kvc__request_goes(q)) {
        kvc__request_undo(ctx, link);
    } else if (q->at == q->n_part) {
        kvc__seq_settle(q->seq);
        kvc__request_next(ctx, link);
    }
}

/* Counts the rows of all requests; 0: time is up before. */
static int kvc__step_end(kvc_ctx *ctx)
{
    kvc_request **link = &ctx->first;
    while (*link != NULL) {
        kvc_request *q = *link;
        if (q->n_now == 0) {
            link = &q->next;
            continue;
        }
        kvc__request_count(ctx, link);
        if (kvc__step_late(ctx)) return 0;
    }
    return 1;
}

/* Computes tiles of the pass, until it is done or the threads are to leave. */
static void kvc__step_pass(kvc_ctx *ctx)
{
    const uint64_t start = kvc__ctx_clock(ctx);
    kvc__crew_run(&ctx->crew, kvc__walk, ctx);
    ctx->pass_us += kvc__ctx_clock(ctx) - start;
    if (kvc__atomic_load(&ctx->cursor.op) < ctx->plan.n_ops) return;
    ctx->n_rows += ctx->plan.n_rows;
    ctx->n_logit_rows += ctx->plan.n_wanted;
    ctx->stage = KVC__STAGE_END;
}

/* Goes on with what comes next; 0: time is up. */
static int kvc__step_turn(kvc_ctx *ctx)
{
    switch (ctx->stage) {
    case KVC__STAGE_START:
        if (!kvc__step_start(ctx)) return 0;
        if (ctx->first != NULL) kvc__pass_build(ctx);
        break;
    case KVC__STAGE_PASS:
        kvc__step_pass(ctx);
        break;
    case KVC__STAGE_END:
        if (!kvc__step_end(ctx)) return 0;
        ctx->stage = KVC__STAGE_START;
        break;
    }
    return !kvc__step_late(ctx);
}

/* The call is over. */
static void kvc__step_rest(kvc_ctx *ctx, uint64_t budget)
{
    const uint64_t took = kvc__ctx_clock(ctx) - ctx->began;
    ctx->work.used += took;
    ctx->began += took;
    kvc__step_show(ctx, ctx->stage == KVC__STAGE_PASS ? kvc__atomic_load(&ctx->cursor.op) :
        ctx->plan.n_ops);
    if (ctx->deadline != KVC__NEVER) {
        if (took > ctx->us_most) ctx->us_most = took;
        if (took > budget && took - budget > ctx->late_most) ctx->late_most = took - budget;
    }
    ctx->deadline = KVC__NEVER;
    ctx->is_running = 0;
}

/* Works on the requests for so many microseconds. Returns whether some are left. */
static int kvc__step_run(kvc_ctx *ctx, uint64_t budget)
{
    int goes_on = 1;
    ctx->is_running = 1;
    ctx->began = kvc__ctx_clock(ctx);
    ctx->deadline = budget < KVC__NEVER - ctx->began ? ctx->began + budget : KVC__NEVER;
    if (ctx->first == NULL) memset(&ctx->work, 0, sizeof ctx->work);
    while (goes_on) {
        if (ctx->first == NULL) ctx->stage = KVC__STAGE_START;
        if (ctx->stage == KVC__STAGE_START || kvc__atomic_load(&ctx->heed) != 0) {
            kvc__step_heed(ctx);
            kvc__step_drop(ctx);
        }
        if (ctx->first != NULL) goes_on = kvc__step_turn(ctx);
        else goes_on = !ctx->is_alone && !kvc__inbox_empty(ctx) && !kvc__step_late(ctx);
    }
    kvc__step_rest(ctx, budget);
    return ctx->first != NULL || !kvc__inbox_empty(ctx);
}

/* Whether the context can take a call that computes at once. */
static kvc_result kvc__ctx_idle(const kvc_ctx *ctx, kvc_error *err)
{
    if (ctx == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "ctx", "NULL");
    if (ctx->first == NULL && !ctx->is_running) return KVC_OK;
    return kvc__fail(err, KVC_ERROR_ARGUMENT, "ctx", "it has requests that are not done");
}

/* Computes requests at once, without those that were submitted. */
static void kvc__batch_run(kvc_ctx *ctx, kvc_request *q, size_t n)
{
    size_t i;
    kvc__lock_enter(&ctx->lock);
    for (i = 0; i < n; i++) kvc__request_number(ctx, &q[i]);
    kvc__lock_leave(&ctx->lock);
    ctx->is_alone = 1;
    for (i = 0; i < n; i++)
        if (q[i].result == KVC_OK) kvc__request_queue(ctx, &q[i]);
    kvc__step_run(ctx, KVC__NEVER);
    ctx->is_alone = 0;
    for (i = 0; i < n; i++)
        if (q[i].result != KVC_OK && !q[i].is_done) kvc__request_tell(&q[i], q[i].result);
}

/* Requests of a batch: none for a sequence that is in it already. */
static void kvc__batch_begin(kvc_request *q, size_t n)
{
    size_t i;
    for (i = n; i-- > 0;) {
        kvc__request_init(&q[i], q[i].n_tokens == 1);
        if (q[i].seq != NULL) q[i].seq->index = (uint32_t)i;
    }
    for (i = 0; i < n; i++)
        if (q[i].seq != NULL && q[i].seq->index != (uint32_t)i)
            q[i].result = kvc__fail(q[i].err, KVC_ERROR_ARGUMENT, "seq",
                "it is in the batch already");
}

static kvc_result kvc__submit(kvc_ctx *ctx, kvc_request *q, kvc_error *err)
{
    if (q->is_submitted)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "request", "it is submitted and not done");
    if (ctx->is_closing)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "ctx", "it is being freed");
    kvc__request_init(q, q->n_tokens == 1);
    q->is_submitted = 1;
    kvc__lock_enter(&ctx->lock);
    kvc__request_number(ctx, q);
    *ctx->inbox_end = q;
    ctx->inbox_end = &q->next;
    kvc__lock_leave(&ctx->lock);
    return KVC_OK;
}

/* NULL: all that have been submitted */
static void kvc__cancel(kvc_ctx *ctx, kvc_request *q)
{
    kvc__lock_enter(&ctx->lock);
    if (q != NULL) q->cancel = 1;
    else ctx->cancelled = ctx->ticket;
    kvc__lock_leave(&ctx->lock);
    kvc__atomic_store(&ctx->heed, 1);
}

/* Requests that are not done are cancelled, or finished. */
static void kvc__ctx_free(kvc_ctx *ctx)
{
    kvc_allocator a = ctx->desc.allocator;
    ctx->is_closing = 1;
    kvc__cancel(ctx, NULL);
    kvc__step_run(ctx, KVC__NEVER);
    kvc__crew_stop(&ctx->crew);
    kvc__cursor_stop(&ctx->cursor);
    kvc__lock_free(&ctx->lock);
    if (ctx->owned) kvc__free(&a, ctx, ctx->block_size);
}

/* ------------------------------------------------------------------------------------------------
   >>public  The API's functions
   Thin: they check what every caller could get wrong and call the sections above.
   ---------------------------------------------------------------------------------------------- */
KVC_API const char *kvc_result_text(kvc_result result)
{
    switch (result) {
#define KVC__TEXT(name, value, text) case name: return text;
    KVC__RESULTS(KVC__TEXT)
#undef KVC__TEXT
    default: return "unknown result";
    }
}

KVC_API unsigned kvc_version(void)
{
    return KVC_VERSION;
}

/* ---- model ---- */

KVC_API kvc_result kvc_model_open(kvc_model **out, const kvc_model_desc *desc, kvc_error *err)
{
    kvc_allocator a;
    kvc_model *m;
    kvc_result r;
    kvc__fp_mode mode;
    if (out == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "out", "NULL");
    *out = NULL;
    if (desc == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "desc", "NULL");
    if (desc->start_canary != 0 || desc->end_canary != 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "desc", "not zero-initialised");
    if ((desc->path == NULL) == (desc->data == NULL))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "path", "give either path or data");
    if (desc->path != NULL && KVC_NO_FILES)
        return kvc__fail(err, KVC_ERROR_UNSUPPORTED, "path", "built with KVC_NO_FILES");
    if ((uint32_t)desc->weights > (uint32_t)KVC_WEIGHTS_IN_PLACE)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "weights", "not a kvc_weights");
    if ((r = kvc__threads_check(desc->n_threads, err)) != KVC_OK) return r;
    if (!kvc__allocator_resolve(&a, &desc->allocator, NULL))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "allocator", "only one of alloc and free is set");
    m = (kvc_model *)kvc__alloc(&a, sizeof *m, 64);
    if (m == NULL) return kvc__fail(err, KVC_ERROR_MEMORY, "allocator", "no memory for the model");
    memset(m, 0, sizeof *m);
    m->allocator = a;
    mode = kvc__fp_enter();
    r = kvc__model_load(m, desc, err);
    kvc__fp_leave(mode);
    if (r == KVC_OK) *out = m;
    else kvc__model_close(m);
    return r;
}

KVC_API void kvc_model_close(kvc_model *model)
{
    if (model != NULL) kvc__model_close(model);
}

static void kvc__copy_text(char *dst, size_t cap, const kvc_meta *m)
{
    kvc__msg text;
    kvc__msg_start(&text, dst, cap);
    if (m->type == KVC_META_STRING) kvc__msg_bytes(&text, (const char *)m->data, m->data_size);
}

KVC_API void kvc_model_query(const kvc_model *model, kvc_model_info *info)
{
    const kvc_model *m = model;
    kvc_meta meta;
    memset(info, 0, sizeof *info);
    if (kvc__gguf_find(&m->gguf, "general.architecture", &meta))
        kvc__copy_text(info->architecture, sizeof info->architecture, &meta);
    if (kvc__gguf_find(&m->gguf, "general.name", &meta))
        kvc__copy_text(info->name, sizeof info->name, &meta);
    info->n_layers = m->n_layers;
    info->n_embd = m->n_embd;
    info->n_heads = m->n_heads;
    info->n_kv_heads = m->n_kv_heads;
    info->head_dim = m->head_dim;
    info->head_dim_v = m->head_dim_v;
    info->n_latent = kvc__has(m, KVC__LATENT) ? m->head_dim_v : 0;
    info->n_ff = m->n_ff;
    info->n_experts = m->n_experts;
    info->n_experts_used = m->n_used;
    info->n_ff_expert = m->n_ff_expert;
    info->n_ff_shared = m->n_ff_shared;
    info->n_vocab = m->n_vocab;
    info->n_tokens = m->vocab.n_tokens;
    info->n_ctx_train = m->n_ctx_train;
    info->rope_dim = m->rope_dim;
    info->window = m->window;
    info->n_params = m->n_params;
    info->weights_size = m->weights_size;
    info->packed_size = m->packed_size;
    info->memory_size = sizeof *m + m->block_size + m->packed_size + m->gguf.block_size +
        m->vocab.memory_size;
    info->bos = m->vocab.bos;
    info->eos = m->vocab.eos;
    info->eot = m->vocab.eot;
    info->add_bos = m->vocab.add_bos;
    info->add_eos = m->vocab.add_eos;
    info->has_tokenizer = m->vocab.has_tokenizer;
}

KVC_API size_t kvc_model_meta_count(const kvc_model *model)
{
    return model->gguf.n_metas;
}

KVC_API kvc_result kvc_model_meta_at(const kvc_model *model, size_t i, kvc_meta *out)
{
    memset(out, 0, sizeof *out);
    if (i >= model->gguf.n_metas) return KVC_ERROR_ARGUMENT;
    *out = model->gguf.metas[i];
    return KVC_OK;
}

KVC_API int kvc_model_meta_find(const kvc_model *model, const char *key, kvc_meta *out)
{
    return kvc__gguf_find(&model->gguf, key, out);
}

KVC_API kvc_result kvc_meta_item(const kvc_meta *array, uint64_t i, kvc_meta *out)
{
    return kvc__meta_item(array, i, out);
}

KVC_API int kvc_meta_number(const kvc_meta *meta, double *out)
{
    return kvc__meta_number(meta, out);
}

/* ---- text ---- */

KVC_API kvc_result kvc_tokenize(const kvc_model *model, const char *text, size_t text_size,
    unsigned flags, kvc_token *tokens, size_t tokens_cap, size_t *n_tokens, const kvc_memory *work,
    kvc_error *err)
{
    *n_tokens = 0;
    if (text_size > ((size_t)1 << 30))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "text_size", "more than 2^30 bytes");
    if (text == NULL && text_size != 0) return kvc__fail(err, KVC_ERROR_ARGUMENT, "text", "NULL");
    if (tokens == NULL && tokens_cap != 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "tokens", "NULL");
    if (flags > 3u) return kvc__fail(err, KVC_ERROR_ARGUMENT, "flags", "unknown bits are set");
    return kvc__vocab_tokenize(&model->vocab, &model->allocator, text != NULL ? text : "",
        text_size, flags, tokens, tokens_cap, n_tokens, work, err);
}

KVC_API size_t kvc_tokenize_work_size(const kvc_model *model, size_t text_size)
{
    return kvc__vocab_work_size(&model->vocab, text_size);
}

KVC_API const char *kvc_token_spelling(const kvc_model *model, kvc_token token, size_t *size,
    kvc_token_kind *kind)
{
    return kvc__vocab_spelling(&model->vocab, token, size, kind);
}

KVC_API int kvc_token_is_end(const kvc_model *model, kvc_token token)
{
    return kvc__vocab_is_end(&model->vocab, token);
}

KVC_API kvc_result kvc_text_push(const kvc_model *model, kvc_text_stream *stream, kvc_token token,
    char *buf, size_t buf_cap, size_t *n, kvc_error *err)
{
    *n = 0;
    return kvc__vocab_push(&model->vocab, stream, token, buf, buf_cap, n, err);
}

KVC_API size_t kvc_text_end(kvc_text_stream *stream, char buf[4])
{
    size_t n = stream->n_held < 4 ? stream->n_held : 4;
    memcpy(buf, stream->held, n);
    stream->n_held = 0;
    stream->started = 0;
    return n;
}

/* ---- cache and sequences ---- */

KVC_API size_t kvc_cache_size(const kvc_cache_desc *desc)
{
    kvc_cache_desc d;
    kvc__pool pools[KVC_MAX_REACHES];
    size_t size = 0;
    if (desc == NULL) return 0;
    d = *desc;
    return kvc__cache_measure(&d, pools, &size, NULL) == KVC_OK ? size : 0;
}

KVC_API kvc_result kvc_cache_new(kvc_cache **out, const kvc_cache_desc *desc, kvc_error *err)
{
    if (out == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "out", "NULL");
    *out = NULL;
    if (desc == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "desc", "NULL");
    return kvc__cache_new(out, desc, err);
}

KVC_API void kvc_cache_free(kvc_cache *cache)
{
    if (cache != NULL) kvc__cache_free(cache);
}

KVC_API void kvc_cache_query(kvc_cache *cache, kvc_cache_info *info)
{
    kvc__cache_query(cache, info);
}

KVC_API kvc_result kvc_seq_open(kvc_seq **out, kvc_cache *cache, kvc_error *err)
{
    if (out == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "out", "NULL");
    *out = NULL;
    if (cache == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "cache", "NULL");
    return kvc__seq_open(out, cache, NULL, err);
}

KVC_API kvc_result kvc_seq_open_shared(kvc_seq **out, kvc_cache *cache, const kvc_share *share,
    kvc_error *err)
{
    if (out == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "out", "NULL");
    *out = NULL;
    if (cache == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "cache", "NULL");
    return kvc__seq_open_shared(out, cache, share, err);
}

KVC_API kvc_result kvc_prefix_pin(kvc_pin *out, kvc_seq *seq, uint32_t length, kvc_error *err)
{
    if (out == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "out", "NULL");
    memset(out, 0, sizeof *out);
    if (!kvc__seq_usable(seq)) return kvc__seq_refuse(err);
    if (length > seq->n_pos)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "length", "more than kvc_seq_length");
    return kvc__prefix_pin(out, seq, length, err);
}

KVC_API void kvc_prefix_unpin(kvc_pin *pin)
{
    if (pin != NULL && pin->cache != NULL) kvc__prefix_unpin(pin);
}

KVC_API kvc_result kvc_prefix_save(kvc_cache *cache, kvc_write_fn write, void *user,
    kvc_error *err)
{
    if (cache == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "cache", "NULL");
    if (write == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "write", "NULL");
    return kvc__prefix_save(cache, write, user, err);
}

KVC_API kvc_result kvc_prefix_load(kvc_cache *cache, kvc_read_fn read, void *user,
    uint32_t *n_pages, kvc_error *err)
{
    uint32_t n = 0;
    kvc_result r;
    if (n_pages != NULL) *n_pages = 0;
    if (cache == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "cache", "NULL");
    if (read == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "read", "NULL");
    r = kvc__prefix_load(cache, read, user, &n, err);
    if (n_pages != NULL) *n_pages = n;
    return r;
}

KVC_API uint32_t kvc_prefix_sweep(kvc_cache *cache, const kvc_share *share)
{
    return cache != NULL ? kvc__prefix_sweep(cache, share) : 0;
}

KVC_API uint32_t kvc_prefix_flush(kvc_cache *cache, uint32_t n_most)
{
    return cache != NULL ? kvc__tier_flush(cache, n_most) : 0;
}

KVC_API kvc_result kvc_prefix_fetch(kvc_seq *seq, const kvc_token *tokens, size_t n,
    size_t *n_there, kvc_error *err)
{
    if (n_there == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_there", "NULL");
    *n_there = 0;
    if (!kvc__seq_usable(seq)) return kvc__seq_refuse(err);
    if (tokens == NULL && n != 0) return kvc__fail(err, KVC_ERROR_ARGUMENT, "tokens", "NULL");
    return kvc__prefix_fetch(seq, tokens, n, n_there, err);
}

KVC_API void kvc_seq_close(kvc_seq *seq)
{
    if (seq != NULL && seq->is_busy) seq->closes = 1;
    else if (seq != NULL && seq->is_open) kvc__seq_close(seq);
}

KVC_API kvc_result kvc_seq_set_policy(kvc_seq *seq, kvc_policy policy, uint32_t n_keep,
    uint32_t n_heavy, kvc_error *err)
{
    if (!kvc__seq_usable(seq)) return kvc__seq_refuse(err);
    if ((uint32_t)policy > KVC_POLICY_HEAVY)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "policy", "not a kvc_policy");
    return kvc__seq_set_policy(seq, policy, n_keep, n_heavy, err);
}

KVC_API kvc_result kvc_seq_fork(kvc_seq **out, const kvc_seq *seq, kvc_error *err)
{
    if (out == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "out", "NULL");
    *out = NULL;
    if (!kvc__seq_usable(seq)) return kvc__seq_refuse(err);
    return kvc__seq_open(out, seq->cache, seq, err);
}

KVC_API kvc_result kvc_seq_reorder(kvc_seq *const *seqs, const uint32_t *from, uint32_t n,
    kvc_error *err)
{
    uint32_t i;
    if (n == 0) return KVC_OK;
    if (seqs == NULL || from == NULL)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, seqs == NULL ? "seqs" : "from", "NULL");
    for (i = 0; i < n; i++)
        if (from[i] >= n)
            return kvc__fail_numbers(err, KVC_ERROR_ARGUMENT, "from", "entry", i,
                "is not an index below n, it is", from[i]);
    if (!kvc__seqs_check(seqs, n))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "seqs",
            "not all are open, of one cache and there once");
    return kvc__seq_reorder(seqs, from, n, err);
}

KVC_API uint32_t kvc_seq_length(const kvc_seq *seq)
{
    return seq->n_pos;
}

KVC_API uint32_t kvc_seq_capacity(const kvc_seq *seq)
{
    return seq->policy == KVC_POLICY_GROW ? kvc__max_slots(seq->cache) : seq->cache->desc.n_ctx;
}

KVC_API void kvc_seq_query(const kvc_seq *seq, kvc_seq_info *info)
{
    kvc__seq_query(seq, info);
}

KVC_API kvc_result kvc_seq_rollback(kvc_seq *seq, uint32_t length)
{
    if (!kvc__seq_usable(seq) || length > seq->n_pos) return KVC_ERROR_ARGUMENT;
    if (length != 0 && length < kvc__seq_least(seq)) return KVC_ERROR_ARGUMENT;
    kvc__seq_rollback(seq, length);
    return KVC_OK;
}

KVC_API kvc_result kvc_seq_tokens(const kvc_seq *seq, uint32_t from, uint32_t n, kvc_token *out,
    kvc_error *err)
{
    uint32_t i;
    if (seq == NULL || !seq->is_open)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "seq", "NULL or closed");
    if (from > seq->n_pos || n > seq->n_pos - from)
        return kvc__fail_numbers(err, KVC_ERROR_ARGUMENT, "n", "positions asked for end at",
            (uint64_t)from + n, "and the sequence at", seq->n_pos);
    if (n > 0 && kvc__token_at(seq, from) == NULL)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "from", "the position was given back");
    for (i = 0; i < n; i++) out[i] = *kvc__token_at(seq, from + i);
    return KVC_OK;
}

static int kvc__save_known(kvc_save what)
{
    return what == KVC_SAVE_ALL || what == KVC_SAVE_TOKENS;
}

KVC_API uint64_t kvc_seq_save_size(const kvc_seq *seq, kvc_save what)
{
    return kvc__seq_usable(seq) && kvc__save_known(what) ? kvc__seq_save_size(seq, what) : 0;
}

KVC_API kvc_result kvc_seq_save(const kvc_seq *seq, kvc_save what, kvc_write_fn write, void *user,
    kvc_error *err)
{
    if (!kvc__seq_usable(seq)) return kvc__seq_refuse(err);
    if (!kvc__save_known(what))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "what", "not a kvc_save");
    if (write == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "write", "NULL");
    return kvc__seq_save(seq, what, write, user, err);
}

KVC_API kvc_result kvc_seq_load(kvc_seq **out, kvc_cache *cache, kvc_ctx *ctx, kvc_read_fn read,
    void *user, kvc_error *err)
{
    if (out == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "out", "NULL");
    *out = NULL;
    if (cache == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "cache", "NULL");
    if (read == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "read", "NULL");
    return kvc__seq_load(out, cache, ctx, read, user, UINT64_MAX, err);
}

/* A buffer as the host's functions. */
typedef struct kvc__buffer {
    unsigned char *to;
    const unsigned char *from;
    size_t left;
} kvc__buffer;

static int kvc__buffer_write(const void *data, size_t size, void *user)
{
    kvc__buffer *b = (kvc__buffer *)user;
    if (size > b->left) return 1;
    memcpy(b->to, data, size);
    b->to += size;
    b->left -= size;
    return 0;
}

static int kvc__buffer_read(void *data, size_t size, void *user)
{
    kvc__buffer *b = (kvc__buffer *)user;
    if (size > b->left) return 1;
    memcpy(data, b->from, size);
    b->from += size;
    b->left -= size;
    return 0;
}

KVC_API kvc_result kvc_seq_save_memory(const kvc_seq *seq, kvc_save what, void *buffer, size_t size,
    size_t *written, kvc_error *err)
{
    kvc__buffer b;
    uint64_t needed = kvc_seq_save_size(seq, what);
    memset(&b, 0, sizeof b);
    b.to = (unsigned char *)buffer;
    b.left = size;
    if (written != NULL) *written = needed <= SIZE_MAX ? (size_t)needed : SIZE_MAX;
    if (needed > size || (buffer == NULL && needed > 0))
        return kvc__fail_numbers(err, KVC_ERROR_SPACE, "size", "needed are", needed, "bytes, given",
            size);
    return kvc_seq_save(seq, what, kvc__buffer_write, &b, err);
}

KVC_API kvc_result kvc_seq_load_memory(kvc_seq **out, kvc_cache *cache, kvc_ctx *ctx,
    const void *data, size_t size, kvc_error *err)
{
    kvc__buffer b;
    memset(&b, 0, sizeof b);
    b.from = (const unsigned char *)data;
    b.left = data != NULL ? size : 0;
    if (out == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "out", "NULL");
    *out = NULL;
    if (cache == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "cache", "NULL");
    return kvc__seq_load(out, cache, ctx, kvc__buffer_read, &b, b.left, err);
}

KVC_API kvc_result kvc_prefix_load_memory(kvc_cache *cache, const void *data, size_t size,
    uint32_t *n_pages, kvc_error *err)
{
    kvc__buffer b;
    memset(&b, 0, sizeof b);
    b.from = (const unsigned char *)data;
    b.left = data != NULL ? size : 0;
    return kvc_prefix_load(cache, kvc__buffer_read, &b, n_pages, err);
}

KVC_API kvc_result kvc_seq_remove(kvc_seq *seq, uint32_t from, uint32_t to, kvc_error *err)
{
    if (!kvc__seq_usable(seq)) return kvc__seq_refuse(err);
    if (from >= to || to > seq->n_pos)
        return kvc__fail_numbers(err, KVC_ERROR_ARGUMENT, from >= to ? "from" : "to",
            "the range is empty or passes the end: from", from, "to", to);
    return kvc__seq_remove(seq, from, to, err);
}

/* ---- context and steps ---- */

KVC_API size_t kvc_ctx_size(const kvc_ctx_desc *desc)
{
    kvc_ctx_desc d;
    size_t size = 0;
    if (desc == NULL) return 0;
    d = *desc;
    return kvc__ctx_measure(&d, &size, NULL) == KVC_OK ? size : 0;
}

KVC_API kvc_result kvc_ctx_new(kvc_ctx **out, const kvc_ctx_desc *desc, kvc_error *err)
{
    if (out == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "out", "NULL");
    *out = NULL;
    if (desc == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "desc", "NULL");
    return kvc__ctx_new(out, desc, err);
}

KVC_API void kvc_ctx_free(kvc_ctx *ctx)
{
    if (ctx != NULL) kvc__ctx_free(ctx);
}

KVC_API void kvc_ctx_query(const kvc_ctx *ctx, kvc_ctx_info *info)
{
    memset(info, 0, sizeof *info);
    info->desc = ctx->desc;
    info->isa_name = ctx->plan.kernels->name;
    info->memory_size = ctx->block_size;
    info->n_rows = ctx->n_rows;
    info->n_logit_rows = ctx->n_logit_rows;
    info->run_us_most = ctx->us_most;
    info->run_us_late = ctx->late_most;
}

KVC_API kvc_result kvc_prefill_rows(kvc_ctx *ctx, kvc_seq *seq, const kvc_token *tokens,
    size_t n_tokens, const size_t *rows, size_t n_rows, float *logits, kvc_error *err)
{
    kvc_request q;
    kvc_result r = kvc__ctx_idle(ctx, err);
    if (r != KVC_OK) return r;
    if (n_rows != 0 && rows == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "rows", "NULL");
    memset(&q, 0, sizeof q);
    q.seq = seq;
    q.tokens = tokens;
    q.n_tokens = n_tokens;
    q.rows = rows;
    q.n_rows = n_rows;
    q.logits = logits;
    q.err = err;
    kvc__request_init(&q, 0);
    kvc__batch_run(ctx, &q, 1);
    return q.result;
}

/* Logits of the last row in the context's own buffer, or none. */
static kvc_result kvc__request_last(kvc_ctx *ctx, kvc_seq *seq, const kvc_token *tokens,
    size_t n_tokens, uint32_t is_decode, const float **logits, kvc_error *err)
{
    kvc_request q;
    kvc_result r;
    if (logits != NULL) *logits = NULL;
    if ((r = kvc__ctx_idle(ctx, err)) != KVC_OK) return r;
    memset(&q, 0, sizeof q);
    q.seq = seq;
    q.tokens = tokens;
    q.n_tokens = n_tokens;
    q.n_rows = logits != NULL && n_tokens != 0;
    q.logits = ctx->plan.s.logits;
    q.err = err;
    kvc__request_init(&q, is_decode);
    kvc__batch_run(ctx, &q, 1);
    if (q.result == KVC_OK && logits != NULL) *logits = ctx->plan.s.logits;
    return q.result;
}

KVC_API kvc_result kvc_prefill(kvc_ctx *ctx, kvc_seq *seq, const kvc_token *tokens, size_t n_tokens,
    const float **logits, kvc_error *err)
{
    return kvc__request_last(ctx, seq, tokens, n_tokens, 0, logits, err);
}

KVC_API kvc_result kvc_decode(kvc_ctx *ctx, kvc_seq *seq, kvc_token token, const float **logits,
    kvc_error *err)
{
    return kvc__request_last(ctx, seq, &token, 1, 1, logits, err);
}

KVC_API kvc_result kvc_batch(kvc_ctx *ctx, kvc_request *requests, size_t n_requests,
    kvc_error *err)
{
    kvc_result r = kvc__ctx_idle(ctx, err);
    if (r != KVC_OK) return r;
    if (requests == NULL && n_requests != 0)
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "requests", "NULL");
    if (n_requests > (1u << 24))
        return kvc__fail(err, KVC_ERROR_ARGUMENT, "n_requests", "more than 2^24");
    kvc__batch_begin(requests, n_requests);
    kvc__batch_run(ctx, requests, n_requests);
    return KVC_OK;
}

KVC_API kvc_result kvc_submit(kvc_ctx *ctx, kvc_request *request, kvc_error *err)
{
    if (ctx == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "ctx", "NULL");
    if (request == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "request", "NULL");
    return kvc__submit(ctx, request, err);
}

KVC_API int kvc_run(kvc_ctx *ctx, uint64_t budget_us)
{
    if (ctx == NULL) return 0;
    return ctx->is_running ? 1 : kvc__step_run(ctx, budget_us);
}

KVC_API void kvc_cancel(kvc_ctx *ctx, kvc_request *request)
{
    if (ctx != NULL) kvc__cancel(ctx, request);
}

KVC_API float kvc_progress(kvc_ctx *ctx, uint32_t *us_left)
{
    const double done = kvc__atomic_load(&ctx->progress) / 16777216.0;
    const double used = kvc__atomic_load(&ctx->us_used);
    const double left = done > 0 ? used / done - used : 4294967295.0;
    if (us_left != NULL) *us_left = left < 4294967295.0 ? (uint32_t)left : UINT32_MAX;
    return (float)done;
}

/* ---- sampler ---- */

KVC_API size_t kvc_sampler_size(const kvc_sampler_desc *desc)
{
    kvc_sampler_desc d;
    size_t size = 0;
    if (desc == NULL) return 0;
    d = *desc;
    return kvc__sampler_measure(&d, &size, NULL) == KVC_OK ? size : 0;
}

KVC_API kvc_result kvc_sampler_new(kvc_sampler **out, const kvc_sampler_desc *desc, kvc_error *err)
{
    if (out == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "out", "NULL");
    *out = NULL;
    if (desc == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "desc", "NULL");
    return kvc__sampler_new(out, desc, err);
}

KVC_API void kvc_sampler_free(kvc_sampler *sampler)
{
    if (sampler != NULL) kvc__sampler_free(sampler);
}

KVC_API kvc_result kvc_sampler_sample(kvc_sampler *sampler, const float *logits, kvc_token *token,
    kvc_error *err)
{
    kvc__fp_mode mode;
    kvc_result r;
    if (token == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "token", "NULL");
    *token = KVC_NO_TOKEN;
    if (sampler == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "sampler", "NULL");
    if (logits == NULL) return kvc__fail(err, KVC_ERROR_ARGUMENT, "logits", "NULL");
    mode = kvc__fp_enter();
    r = kvc__sampler_sample(sampler, logits, token, err);
    kvc__fp_leave(mode);
    return r;
}

KVC_API void kvc_sampler_accept(kvc_sampler *sampler, kvc_token token)
{
    if (sampler) kvc__sampler_accept(sampler, token);
}

KVC_API void kvc_sampler_reset(kvc_sampler *sampler, uint64_t seed)
{
    if (sampler) kvc__sampler_reset(sampler, seed);
}

#if defined(__clang__)
#pragma STDC FP_CONTRACT DEFAULT
#elif defined(__GNUC__)
#pragma GCC pop_options
#elif defined(_MSC_VER)
#pragma fp_contract(on)
#endif
#endif /* KVC__IMPLEMENTED */
#endif /* KVC_IMPLEMENTATION */

#else /* KVC__PASS */
/* ------------------------------------------------------------------------------------------------
   >>kernels  What is compiled once per instruction set
   First the vocabulary: `vec`, 16 logical float lanes, and 32-byte integer dot products, filled
   in for each set. Then the kernels, which hold no #if and are the same text for all sets.

   Order of sums, the same everywhere:
   - a float product runs over k in 16 lanes, lane i taking elements i, i + 16, ... by fused
     multiply-add from zero; the tail is padded with zeros; the lanes are added as a tree: lane i
     with i + 8, then i + 4, i + 2, i + 1.
   - a quantized product adds, block of 32 by block, (float)(exact integer dot) times the product of
     the two scales, by fused multiply-add: one lane per output.
   - attention: see `attention`.

   A pass is known by KVC__PASS (numbers of kvc_isa) and never by the compiler's own macros, which
   do not follow target regions. KVC__(name) is the name of this pass's copy.
   ---------------------------------------------------------------------------------------------- */
#define KVC__(name) KVC__CAT(kvc__##name, KVC__ISA)

/* Vectors stay in registers only if everything is inlined and short loops over them are unrolled;
   plain C gains nothing from that and would take long to compile. */
#if KVC__PASS == 1
#define KVC__FORCE static inline KVC__UNUSED
#define KVC__FLAT
#else
#define KVC__FORCE KVC__INLINE
#define KVC__FLAT KVC__UNROLL
#endif

/* ---- vocabulary: 16 float lanes ---- */
#if KVC__PASS >= 4          /* AVX-512 */
typedef struct KVC__(vec) { __m512 v; } KVC__(vec);
#define KVC__ROW_TILE 12        /* rows of a register tile, packed floats */
#define KVC__BLOCK_ROW_TILE 6   /* rows of a register tile, packed blocks */
#define KVC__STRETCH 8u         /* most blocks that these go through at a time */
#define KVC__OUT_PIECES 2       /* pieces of outputs of these tiles */
#define KVC__MOST_PIECES 4      /* of any tile */
KVC__FORCE KVC__(vec) KVC__(set1)(float x)
{
    KVC__(vec) r;
    r.v = _mm512_set1_ps(x);
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load)(const float *p)
{
    KVC__(vec) r;
    r.v = _mm512_loadu_ps(p);
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load_f16)(const void *p)
{
    KVC__(vec) r;
    r.v = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load_bf16)(const void *p)
{
    KVC__(vec) r;
    __m512i t = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    r.v = _mm512_castsi512_ps(_mm512_slli_epi32(t, 16));
    return r;
}
/* 16 signed bytes */
KVC__FORCE KVC__(vec) KVC__(load_i8)(const unsigned char *p)
{
    KVC__(vec) r;
    __m128i t = _mm_loadu_si128((const __m128i *)(const void *)p);
    r.v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(t));
    return r;
}
/* The low or high halves of 16 bytes, less 8: a look-up, which reads 4 bits of each index. */
KVC__FORCE KVC__(vec) KVC__(load_i4)(const unsigned char *p, const int high)
{
    const __m512 value = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    KVC__(vec) r;
    __m512i t = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    r.v = _mm512_permutexvar_ps(high ? _mm512_srli_epi32(t, 4) : t, value);
    return r;
}
/* a signed field of each of 16 words: what is left of it if the word, some bits flipped, is shifted
   up, then down */
KVC__FORCE KVC__(vec) KVC__(load_field)(const unsigned char *p, uint32_t flip, int up, int down)
{
    __m512i t = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int32_t)flip));
    KVC__(vec) r;
    t = _mm512_sra_epi32(_mm512_sll_epi32(t, _mm_cvtsi32_si128(up)), _mm_cvtsi32_si128(down));
    r.v = _mm512_cvtepi32_ps(t);
    return r;
}
KVC__FORCE void KVC__(store)(float *p, KVC__(vec) a) { _mm512_storeu_ps(p, a.v); }
KVC__FORCE void KVC__(store_f16)(uint16_t *p, KVC__(vec) a)
{
    /* with a mask: GCC's unmasked form is a macro that warns of its own constant */
    _mm256_storeu_si256((__m256i *)(void *)p,
        _mm512_maskz_cvtps_ph((__mmask16)0xffff, a.v, _MM_FROUND_TO_NEAREST_INT));
}
KVC__FORCE KVC__(vec) KVC__(swap_pairs)(KVC__(vec) a)
{
    a.v = _mm512_permute_ps(a.v, 0xb1);
    return a;
}
#define KVC__OP(name, expr) \
    KVC__FORCE KVC__(vec) KVC__(name)(KVC__(vec) a, KVC__(vec) b) { a.v = expr; return a; }
KVC__OP(add, _mm512_add_ps(a.v, b.v))
KVC__OP(sub, _mm512_sub_ps(a.v, b.v))
KVC__OP(mul, _mm512_mul_ps(a.v, b.v))
KVC__OP(div, _mm512_div_ps(a.v, b.v))
KVC__OP(max, _mm512_max_ps(a.v, b.v))
#undef KVC__OP
KVC__FORCE KVC__(vec) KVC__(fma)(KVC__(vec) a, KVC__(vec) b, KVC__(vec) c)
{
    c.v = _mm512_fmadd_ps(a.v, b.v, c.v);
    return c;
}
KVC__FORCE KVC__(vec) KVC__(if_less)(KVC__(vec) a, KVC__(vec) b, KVC__(vec) x, KVC__(vec) y)
{
    x.v = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v);
    return x;
}
KVC__FORCE KVC__(vec) KVC__(exp2_magic)(KVC__(vec) t)
{
    __m512i i = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
    t.v = _mm512_castsi512_ps(_mm512_add_epi32(i, _mm512_set1_epi32(0x3f800000)));
    return t;
}
KVC__FORCE __m256 KVC__(fold)(KVC__(vec) a, int use_max)
{
    __m256 lo = _mm512_castps512_ps256(a.v), hi = _mm512_extractf32x8_ps(a.v, 1);
    return use_max ? _mm256_max_ps(lo, hi) : _mm256_add_ps(lo, hi);
}
/* whole numbers from -128 to 127 */
KVC__FORCE void KVC__(store_i8)(int8_t *p, KVC__(vec) a)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
#elif KVC__PASS == 3        /* AVX2 */
typedef struct KVC__(vec) { __m256 a, b; } KVC__(vec);
#define KVC__ROW_TILE 6
#define KVC__BLOCK_ROW_TILE 2
#define KVC__STRETCH 32u
#define KVC__OUT_PIECES 2
#define KVC__MOST_PIECES 8
KVC__FORCE KVC__(vec) KVC__(set1)(float x)
{
    KVC__(vec) r;
    r.a = r.b = _mm256_set1_ps(x);
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load)(const float *p)
{
    KVC__(vec) r;
    r.a = _mm256_loadu_ps(p);
    r.b = _mm256_loadu_ps(p + 8);
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load_f16)(const void *p)
{
    KVC__(vec) r;
    r.a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    r.b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1));
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load_bf16)(const void *p)
{
    KVC__(vec) r;
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p + 1));
    r.a = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
    r.b = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
    return r;
}
KVC__FORCE KVC__(vec) KVC__(from_i8)(__m128i t)
{
    KVC__(vec) r;
    r.a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(t));
    r.b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(t, 8)));
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load_i8)(const unsigned char *p)
{
    return KVC__(from_i8)(_mm_loadu_si128((const __m128i *)(const void *)p));
}
KVC__FORCE KVC__(vec) KVC__(load_i4)(const unsigned char *p, const int high)
{
    __m128i t = _mm_loadu_si128((const __m128i *)(const void *)p);
    if (high) t = _mm_srli_epi16(t, 4);
    return KVC__(from_i8)(_mm_sub_epi8(_mm_and_si128(t, _mm_set1_epi8(15)), _mm_set1_epi8(8)));
}
KVC__FORCE KVC__(vec) KVC__(load_field)(const unsigned char *p, uint32_t flip, int up, int down)
{
    const __m256i bits = _mm256_set1_epi32((int32_t)flip);
    const __m128i by_up = _mm_cvtsi32_si128(up), by_down = _mm_cvtsi32_si128(down);
    __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)p);
    __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(p + 32));
    KVC__(vec) r;
    a = _mm256_sra_epi32(_mm256_sll_epi32(_mm256_xor_si256(a, bits), by_up), by_down);
    b = _mm256_sra_epi32(_mm256_sll_epi32(_mm256_xor_si256(b, bits), by_up), by_down);
    r.a = _mm256_cvtepi32_ps(a);
    r.b = _mm256_cvtepi32_ps(b);
    return r;
}
KVC__FORCE void KVC__(store)(float *p, KVC__(vec) x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
KVC__FORCE void KVC__(store_f16)(uint16_t *p, KVC__(vec) x)
{
    __m128i *to = (__m128i *)(void *)p;
    _mm_storeu_si128(to, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(to + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
KVC__FORCE KVC__(vec) KVC__(swap_pairs)(KVC__(vec) x)
{
    x.a = _mm256_permute_ps(x.a, 0xb1);
    x.b = _mm256_permute_ps(x.b, 0xb1);
    return x;
}
#define KVC__OP(name, op) \
    KVC__FORCE KVC__(vec) KVC__(name)(KVC__(vec) x, KVC__(vec) y) \
    { \
        x.a = op(x.a, y.a); \
        x.b = op(x.b, y.b); \
        return x; \
    }
KVC__OP(add, _mm256_add_ps)
KVC__OP(sub, _mm256_sub_ps)
KVC__OP(mul, _mm256_mul_ps)
KVC__OP(div, _mm256_div_ps)
KVC__OP(max, _mm256_max_ps)
#undef KVC__OP
KVC__FORCE KVC__(vec) KVC__(fma)(KVC__(vec) x, KVC__(vec) y, KVC__(vec) z)
{
    z.a = _mm256_fmadd_ps(x.a, y.a, z.a);
    z.b = _mm256_fmadd_ps(x.b, y.b, z.b);
    return z;
}
KVC__FORCE KVC__(vec) KVC__(if_less)(KVC__(vec) p, KVC__(vec) q, KVC__(vec) x, KVC__(vec) y)
{
    x.a = _mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ));
    x.b = _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ));
    return x;
}
KVC__FORCE KVC__(vec) KVC__(exp2_magic)(KVC__(vec) t)
{
    __m256i one = _mm256_set1_epi32(0x3f800000);
    __m256i a = _mm256_slli_epi32(_mm256_castps_si256(t.a), 23);
    __m256i b = _mm256_slli_epi32(_mm256_castps_si256(t.b), 23);
    t.a = _mm256_castsi256_ps(_mm256_add_epi32(a, one));
    t.b = _mm256_castsi256_ps(_mm256_add_epi32(b, one));
    return t;
}
KVC__FORCE __m256 KVC__(fold)(KVC__(vec) x, int use_max)
{
    return use_max ? _mm256_max_ps(x.a, x.b) : _mm256_add_ps(x.a, x.b);
}
KVC__FORCE void KVC__(store_i8)(int8_t *p, KVC__(vec) x)
{
    __m256i t = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    t = _mm256_permute4x64_epi64(t, 0xd8);
    _mm_storeu_si128((__m128i *)p,
        _mm_packs_epi16(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1)));
}
#elif KVC__PASS == 2        /* NEON */
typedef struct KVC__(vec) { float32x4_t a, b, c, d; } KVC__(vec);
#define KVC__ROW_TILE 6
#define KVC__BLOCK_ROW_TILE 3
#define KVC__STRETCH 32u
#define KVC__OUT_PIECES 4
#define KVC__MOST_PIECES 16
KVC__FORCE KVC__(vec) KVC__(set1)(float x)
{
    KVC__(vec) r;
    r.a = r.b = r.c = r.d = vdupq_n_f32(x);
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load)(const float *p)
{
    KVC__(vec) r;
    r.a = vld1q_f32(p);
    r.b = vld1q_f32(p + 4);
    r.c = vld1q_f32(p + 8);
    r.d = vld1q_f32(p + 12);
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load_f16)(const void *p)
{
    KVC__(vec) r;
    uint8x16_t lo = vld1q_u8((const uint8_t *)p), hi = vld1q_u8((const uint8_t *)p + 16);
    float16x8_t x = vreinterpretq_f16_u8(lo), y = vreinterpretq_f16_u8(hi);
    r.a = vcvt_f32_f16(vget_low_f16(x));
    r.b = vcvt_f32_f16(vget_high_f16(x));
    r.c = vcvt_f32_f16(vget_low_f16(y));
    r.d = vcvt_f32_f16(vget_high_f16(y));
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load_bf16)(const void *p)
{
    KVC__(vec) r;
    uint8x16_t lo = vld1q_u8((const uint8_t *)p), hi = vld1q_u8((const uint8_t *)p + 16);
    uint16x8_t x = vreinterpretq_u16_u8(lo), y = vreinterpretq_u16_u8(hi);
    r.a = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16));
    r.b = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(x), 16));
    r.c = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(y), 16));
    r.d = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(y), 16));
    return r;
}
KVC__FORCE KVC__(vec) KVC__(from_i8)(int8x16_t t)
{
    KVC__(vec) r;
    int16x8_t lo = vmovl_s8(vget_low_s8(t)), hi = vmovl_s8(vget_high_s8(t));
    r.a = vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo)));
    r.b = vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo)));
    r.c = vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi)));
    r.d = vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)));
    return r;
}
KVC__FORCE KVC__(vec) KVC__(load_i8)(const unsigned char *p)
{
    return KVC__(from_i8)(vreinterpretq_s8_u8(vld1q_u8(p)));
}
KVC__FORCE KVC__(vec) KVC__(load_i4)(const unsigned char *p, const int high)
{
    uint8x16_t t = vld1q_u8(p);
    t = high ? vshrq_n_u8(t, 4) : vandq_u8(t, vdupq_n_u8(15));
    return KVC__(from_i8)(vsubq_s8(vreinterpretq_s8_u8(t), vdupq_n_s8(8)));
}
KVC__FORCE float32x4_t KVC__(field4)(const unsigned char *p, uint32_t flip, int up, int down)
{
    uint32x4_t t = veorq_u32(vreinterpretq_u32_u8(vld1q_u8(p)), vdupq_n_u32(flip));
    int32x4_t i = vreinterpretq_s32_u32(vshlq_u32(t, vdupq_n_s32(up)));
    return vcvtq_f32_s32(vshlq_s32(i, vdupq_n_s32(-down)));
}
KVC__FORCE KVC__(vec) KVC__(load_field)(const unsigned char *p, uint32_t flip, int up, int down)
{
    KVC__(vec) r;
    r.a = KVC__(field4)(p, flip, up, down);
    r.b = KVC__(field4)(p + 16, flip, up, down);
    r.c = KVC__(field4)(p + 32, flip, up, down);
    r.d = KVC__(field4)(p + 48, flip, up, down);
    return r;
}
KVC__FORCE void KVC__(store)(float *p, KVC__(vec) x)
{
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
KVC__FORCE void KVC__(store_f16)(uint16_t *p, KVC__(vec) x)
{
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x.a)));
    vst1_u16(p + 4, vreinterpret_u16_f16(vcvt_f16_f32(x.b)));
    vst1_u16(p + 8, vreinterpret_u16_f16(vcvt_f16_f32(x.c)));
    vst1_u16(p + 12, vreinterpret_u16_f16(vcvt_f16_f32(x.d)));
}
KVC__FORCE KVC__(vec) KVC__(swap_pairs)(KVC__(vec) x)
{
    x.a = vrev64q_f32(x.a);
    x.b = vrev64q_f32(x.b);
    x.c = vrev64q_f32(x.c);
    x.d = vrev64q_f32(x.d);
    return x;
}
/* a > b ? a : b, also for NaN, as the x86 instruction has it */
KVC__FORCE float32x4_t KVC__(max4)(float32x4_t a, float32x4_t b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
#define KVC__OP(name, op) \
    KVC__FORCE KVC__(vec) KVC__(name)(KVC__(vec) x, KVC__(vec) y) \
    { \
        x.a = op(x.a, y.a); \
        x.b = op(x.b, y.b); \
        x.c = op(x.c, y.c); \
        x.d = op(x.d, y.d); \
        return x; \
    }
KVC__OP(add, vaddq_f32)
KVC__OP(sub, vsubq_f32)
KVC__OP(mul, vmulq_f32)
KVC__OP(div, vdivq_f32)
KVC__OP(max, KVC__(max4))
#undef KVC__OP
KVC__FORCE KVC__(vec) KVC__(fma)(KVC__(vec) x, KVC__(vec) y, KVC__(vec) z)
{
    z.a = vfmaq_f32(z.a, x.a, y.a);
    z.b = vfmaq_f32(z.b, x.b, y.b);
    z.c = vfmaq_f32(z.c, x.c, y.c);
    z.d = vfmaq_f32(z.d, x.d, y.d);
    return z;
}
KVC__FORCE KVC__(vec) KVC__(if_less)(KVC__(vec) p, KVC__(vec) q, KVC__(vec) x, KVC__(vec) y)
{
    x.a = vbslq_f32(vcltq_f32(p.a, q.a), x.a, y.a);
    x.b = vbslq_f32(vcltq_f32(p.b, q.b), x.b, y.b);
    x.c = vbslq_f32(vcltq_f32(p.c, q.c), x.c, y.c);
    x.d = vbslq_f32(vcltq_f32(p.d, q.d), x.d, y.d);
    return x;
}
KVC__FORCE float32x4_t KVC__(exp2_magic4)(float32x4_t t)
{
    uint32x4_t i = vshlq_n_u32(vreinterpretq_u32_f32(t), 23);
    return vreinterpretq_f32_u32(vaddq_u32(i, vdupq_n_u32(0x3f800000u)));
}
KVC__FORCE KVC__(vec) KVC__(exp2_magic)(KVC__(vec) t)
{
    t.a = KVC__(exp2_magic4)(t.a);
    t.b = KVC__(exp2_magic4)(t.b);
    t.c = KVC__(exp2_magic4)(t.c);
    t.d = KVC__(exp2_magic4)(t.d);
    return t;
}
KVC__FORCE void KVC__(store_i8)(int8_t *p, KVC__(vec) x)
{
    int16x4_t a = vqmovn_s32(vcvtnq_s32_f32(x.a)), b = vqmovn_s32(vcvtnq_s32_f32(x.b));
    int16x4_t c = vqmovn_s32(vcvtnq_s32_f32(x.c)), d = vqmovn_s32(vcvtnq_s32_f32(x.d));
    vst1_s8(p, vqmovn_s16(vcombine_s16(a, b)));
    vst1_s8(p + 8, vqmovn_s16(vcombine_s16(c, d)));
}
#else                       /* base: plain C */
typedef struct KVC__(vec) { float v[16]; } KVC__(vec);
#define KVC__ROW_TILE 1
#define KVC__BLOCK_ROW_TILE 1
#define KVC__STRETCH 32u
#define KVC__OUT_PIECES 1
#define KVC__MOST_PIECES 4
#define KVC__EACH(expr) \
    { \
        int i; \
        KVC__(vec) r; \
        for (i = 0; i < 16; i++) r.v[i] = (expr); \
        return r; \
    }
KVC__FORCE KVC__(vec) KVC__(set1)(float x) KVC__EACH(x)
KVC__FORCE KVC__(vec) KVC__(load)(const float *p) KVC__EACH(kvc__rdf32(p + i))
KVC__FORCE KVC__(vec) KVC__(load_f16)(const void *p)
    KVC__EACH(kvc__f16_to_f32(kvc__rd16((const unsigned char *)p + 2 * i)))
KVC__FORCE KVC__(vec) KVC__(load_bf16)(const void *p)
    KVC__EACH(kvc__bf16_to_f32(kvc__rd16((const unsigned char *)p + 2 * i)))
KVC__FORCE KVC__(vec) KVC__(load_i8)(const unsigned char *p) KVC__EACH((float)(int8_t)p[i])
KVC__FORCE KVC__(vec) KVC__(load_i4)(const unsigned char *p, const int high)
    KVC__EACH((float)((int)(high ? p[i] >> 4 : p[i] & 15) - 8))
KVC__INLINE int32_t KVC__(field)(uint32_t word, int up, int down)
{
    const uint32_t sign = 1u << (31 - down);
    return (int32_t)((word << up >> down) ^ sign) - (int32_t)sign;
}
KVC__FORCE KVC__(vec) KVC__(load_field)(const unsigned char *p, uint32_t flip, int up, int down)
    KVC__EACH((float)KVC__(field)(kvc__rd32(p + 4 * i) ^ flip, up, down))
KVC__FORCE void KVC__(store)(float *p, KVC__(vec) a) { memcpy(p, a.v, sizeof a.v); }
KVC__FORCE void KVC__(store_f16)(uint16_t *p, KVC__(vec) a)
{
    int i;
    for (i = 0; i < 16; i++) p[i] = kvc__f32_to_f16(a.v[i]);
}
KVC__FORCE KVC__(vec) KVC__(add)(KVC__(vec) a, KVC__(vec) b) KVC__EACH(a.v[i] + b.v[i])
KVC__FORCE KVC__(vec) KVC__(sub)(KVC__(vec) a, KVC__(vec) b) KVC__EACH(a.v[i] - b.v[i])
KVC__FORCE KVC__(vec) KVC__(mul)(KVC__(vec) a, KVC__(vec) b) KVC__EACH(a.v[i] * b.v[i])
KVC__FORCE KVC__(vec) KVC__(div)(KVC__(vec) a, KVC__(vec) b) KVC__EACH(a.v[i] / b.v[i])
KVC__FORCE KVC__(vec) KVC__(max)(KVC__(vec) a, KVC__(vec) b)
    KVC__EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i])
KVC__FORCE KVC__(vec) KVC__(fma)(KVC__(vec) a, KVC__(vec) b, KVC__(vec) c)
    KVC__EACH(kvc__fmaf(a.v[i], b.v[i], c.v[i]))
KVC__FORCE KVC__(vec) KVC__(if_less)(KVC__(vec) a, KVC__(vec) b, KVC__(vec) x, KVC__(vec) y)
    KVC__EACH(a.v[i] < b.v[i] ? x.v[i] : y.v[i])
KVC__FORCE KVC__(vec) KVC__(swap_pairs)(KVC__(vec) a) KVC__EACH(a.v[i ^ 1])
KVC__FORCE KVC__(vec) KVC__(exp2_magic)(KVC__(vec) t)
    KVC__EACH(kvc__bits_f32((kvc__f32_bits(t.v[i]) << 23) + 0x3f800000u))
#undef KVC__EACH
KVC__FORCE void KVC__(store_i8)(int8_t *p, KVC__(vec) a)
{
    int i;
    for (i = 0; i < 16; i++) p[i] = (int8_t)(int)a.v[i];
}
#endif

/* Vectors by which a register tile of attention with n_q queries is wide: the sums fill the
   registers, or are at least enough to hide the latency of an addition. */
#if KVC__PASS >= 4
#define KVC__WIDE(n_q) 4u
#elif KVC__PASS >= 2
#define KVC__WIDE(n_q) ((n_q) <= 2 ? 2u : 1u)
#else
#define KVC__WIDE(n_q) 1u
#endif

/* The same for keys in codes, in pieces of positions. */
#if KVC__PASS == 3
#define KVC__KEY_PIECES(n_q) ((n_q) <= 4 ? 2u : 1u)
#elif KVC__PASS >= 2
#define KVC__KEY_PIECES(n_q) 4u
#else
#define KVC__KEY_PIECES(n_q) 1u
#endif

/* And for values that lie in keys, in elements, at most 4. */
#if KVC__PASS == 3
#define KVC__ELEMENTS(n_q) ((n_q) <= 2 ? 4u : 2u)
#elif KVC__PASS >= 2
#define KVC__ELEMENTS(n_q) 4u
#else
#define KVC__ELEMENTS(n_q) 1u
#endif

/* The tree: lane i with i + 8, then i + 4, i + 2, i + 1. */
#if KVC__PASS >= 3
KVC__FORCE float KVC__(sum)(KVC__(vec) a)
{
    __m256 t8 = KVC__(fold)(a, 0);
    __m128 t4 = _mm_add_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
    __m128 t2 = _mm_add_ps(t4, _mm_movehl_ps(t4, t4));
    return _mm_cvtss_f32(_mm_add_ss(t2, _mm_shuffle_ps(t2, t2, 1)));
}
KVC__FORCE float KVC__(max_lane)(KVC__(vec) a)
{
    __m256 t8 = KVC__(fold)(a, 1);
    __m128 t4 = _mm_max_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
    __m128 t2 = _mm_max_ps(t4, _mm_movehl_ps(t4, t4));
    return _mm_cvtss_f32(_mm_max_ss(t2, _mm_shuffle_ps(t2, t2, 1)));
}
#elif KVC__PASS == 2
KVC__FORCE float KVC__(sum)(KVC__(vec) x)
{
    float32x4_t t4 = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    float32x2_t t2 = vadd_f32(vget_low_f32(t4), vget_high_f32(t4));
    return vget_lane_f32(t2, 0) + vget_lane_f32(t2, 1);
}
KVC__FORCE float KVC__(max_lane)(KVC__(vec) x)
{
    float32x4_t t4 = KVC__(max4)(KVC__(max4)(x.a, x.c), KVC__(max4)(x.b, x.d));
    float32x4_t t2 = KVC__(max4)(t4, vextq_f32(t4, t4, 2));
    float a = vgetq_lane_f32(t2, 0), b = vgetq_lane_f32(t2, 1);
    return a > b ? a : b;
}
#else
KVC__FORCE float KVC__(sum)(KVC__(vec) a)
{
    int i, half;
    for (half = 8; half > 0; half /= 2)
        for (i = 0; i < half; i++) a.v[i] += a.v[i + half];
    return a.v[0];
}
KVC__FORCE float KVC__(max_lane)(KVC__(vec) a)
{
    int i, half;
    for (half = 8; half > 0; half /= 2)
        for (i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
    return a.v[0];
}
#endif

/* The sums of four vectors that follow each other in memory. */
#if KVC__PASS >= 4
KVC__FORCE void KVC__(sum4)(float *y, const float *p)
{
    const __m512i pick = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
    __m512 c = _mm512_loadu_ps(p + 32), d = _mm512_loadu_ps(p + 48);
    a = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    c = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    a = _mm512_add_ps(_mm512_shuffle_f32x4(a, c, 0x88), _mm512_shuffle_f32x4(a, c, 0xdd));
    a = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4e));
    a = _mm512_add_ps(a, _mm512_permute_ps(a, 0xb1));
    _mm_storeu_ps(y, _mm512_castps512_ps128(_mm512_permutexvar_ps(pick, a)));
}
#elif KVC__PASS == 3
KVC__FORCE void KVC__(sum4)(float *y, const float *p)
{
    __m256 a = _mm256_add_ps(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
    __m256 b = _mm256_add_ps(_mm256_loadu_ps(p + 16), _mm256_loadu_ps(p + 24));
    __m256 c = _mm256_add_ps(_mm256_loadu_ps(p + 32), _mm256_loadu_ps(p + 40));
    __m256 d = _mm256_add_ps(_mm256_loadu_ps(p + 48), _mm256_loadu_ps(p + 56));
    a = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    c = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    a = _mm256_add_ps(_mm256_shuffle_ps(a, c, 0x44), _mm256_shuffle_ps(a, c, 0xee));
    a = _mm256_add_ps(_mm256_shuffle_ps(a, a, 0x88), _mm256_shuffle_ps(a, a, 0xdd));
    _mm_storeu_ps(y, _mm_unpacklo_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
}
#else
KVC__FORCE void KVC__(sum4)(float *y, const float *p)
{
    int o;
    for (o = 0; o < 4; o++) y[o] = KVC__(sum)(KVC__(load)(p + 16 * o));
}
#endif

/* 4 by 4 floats, mirrored: to[i][j] = from[j][i]; strides in floats. */
#if KVC__PASS >= 3
KVC__FORCE void KVC__(turn4)(float *to, size_t to_stride, const float *from, size_t from_stride)
{
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_stride);
    __m128 c = _mm_loadu_ps(from + 2 * from_stride), d = _mm_loadu_ps(from + 3 * from_stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + to_stride, b);
    _mm_storeu_ps(to + 2 * to_stride, c);
    _mm_storeu_ps(to + 3 * to_stride, d);
}
#elif KVC__PASS == 2
KVC__FORCE void KVC__(turn4)(float *to, size_t to_stride, const float *from, size_t from_stride)
{
    float32x4x2_t ab = vtrnq_f32(vld1q_f32(from), vld1q_f32(from + from_stride));
    float32x4x2_t cd = vtrnq_f32(vld1q_f32(from + 2 * from_stride),
        vld1q_f32(from + 3 * from_stride));
    size_t i;
    for (i = 0; i < 2; i++) {
        vst1q_f32(to + i * to_stride,
            vcombine_f32(vget_low_f32(ab.val[i]), vget_low_f32(cd.val[i])));
        vst1q_f32(to + (i + 2) * to_stride,
            vcombine_f32(vget_high_f32(ab.val[i]), vget_high_f32(cd.val[i])));
    }
}
#else
KVC__FORCE void KVC__(turn4)(float *to, size_t to_stride, const float *from, size_t from_stride)
{
    size_t i, j;
    for (i = 0; i < 4; i++)
        for (j = 0; j < 4; j++) to[i * to_stride + j] = from[j * from_stride + i];
}
#endif

/* The first n <= 16 lanes; the others are zero. */
KVC__FORCE KVC__(vec) KVC__(load_n)(const float *p, uint32_t n)
{
    float t[16];
    if (n == 16) return KVC__(load)(p);
    memset(t, 0, sizeof t);
    memcpy(t, p, n * sizeof(float));
    return KVC__(load)(t);
}
KVC__FORCE void KVC__(store_n)(float *p, KVC__(vec) a, uint32_t n)
{
    float t[16];
    if (n == 16) {
        KVC__(store)(p, a);
        return;
    }
    KVC__(store)(t, a);
    memcpy(p, t, n * sizeof(float));
}

/* 16 elements of a float type; `type` is a constant where this is called. */
KVC__FORCE KVC__(vec) KVC__(load_w)(const unsigned char *p, int type)
{
    if (type == KVC__F16) return KVC__(load_f16)(p);
    if (type == KVC__BF16) return KVC__(load_bf16)(p);
    return KVC__(load)((const float *)(const void *)p);
}
KVC__FORCE KVC__(vec) KVC__(load_w_n)(const unsigned char *p, int type, uint32_t n)
{
    unsigned char t[64];
    memset(t, 0, sizeof t);
    memcpy(t, p, n * (type == KVC__F32 ? 4u : 2u));
    return KVC__(load_w)(t, type);
}

/* ---- vocabulary: integer dot products over a block of 32 bytes ----
   `bytes` holds 32 bytes, `ints` 8 partial sums whose total is the exact dot product, `quad` 4
   floats. */
#if KVC__PASS >= 3
typedef __m256i KVC__(bytes);
typedef __m256i KVC__(ints);
typedef __m128 KVC__(quad);
KVC__FORCE KVC__(bytes) KVC__(load_bytes)(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}
/* 16 bytes: low halves first, then high halves */
KVC__FORCE KVC__(bytes) KVC__(load_nibbles)(const void *p)
{
    __m128i t = _mm_loadu_si128((const __m128i *)p);
    return _mm256_and_si256(_mm256_set1_epi8(15),
        _mm256_inserti128_si256(_mm256_castsi128_si256(t), _mm_srli_epi16(t, 4), 1));
}
/* unsigned u times signed s; the pairs of products must fit in 16 bits */
KVC__FORCE KVC__(ints) KVC__(dot_us)(KVC__(bytes) u, KVC__(bytes) s)
{
#if KVC__PASS == 5
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), u, s);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
#endif
}
/* The bits of the largest magnitude of 32 floats. As integers, magnitudes rise from zero over the
   numbers and infinity to NaN. */
KVC__FORCE uint32_t KVC__(magnitude32)(const float *p)
{
    const __m256i mask = _mm256_set1_epi32(0x7fffffff), *x = (const __m256i *)(const void *)p;
    __m256i a = _mm256_max_epi32(_mm256_and_si256(_mm256_loadu_si256(x), mask),
        _mm256_and_si256(_mm256_loadu_si256(x + 1), mask));
    __m256i b = _mm256_max_epi32(_mm256_and_si256(_mm256_loadu_si256(x + 2), mask),
        _mm256_and_si256(_mm256_loadu_si256(x + 3), mask));
    __m128i t;
    a = _mm256_max_epi32(a, b);
    t = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
/* both signed; b has no -128 */
KVC__FORCE KVC__(ints) KVC__(dot_ss)(KVC__(bytes) a, KVC__(bytes) b)
{
    return KVC__(dot_us)(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
}
/* the totals of four dot products, less `less` each, as floats */
KVC__FORCE KVC__(quad) KVC__(totals)(const KVC__(ints) s[4], int32_t less)
{
    __m256i t = _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
    __m128i u = _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
    return _mm_cvtepi32_ps(_mm_sub_epi32(u, _mm_set1_epi32(less)));
}
/* the f16 scales at the four addresses */
KVC__FORCE KVC__(quad) KVC__(scales)(const unsigned char *const p[4])
{
    uint64_t t = (uint64_t)kvc__rd16(p[0]) | (uint64_t)kvc__rd16(p[1]) << 16 |
        (uint64_t)kvc__rd16(p[2]) << 32 | (uint64_t)kvc__rd16(p[3]) << 48;
    return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(const void *)&t));
}
KVC__FORCE KVC__(quad) KVC__(quad_zero)(void) { return _mm_setzero_ps(); }
KVC__FORCE KVC__(quad) KVC__(quad_scale)(KVC__(quad) a, float x)
{
    return _mm_mul_ps(a, _mm_set1_ps(x));
}
KVC__FORCE KVC__(quad) KVC__(quad_fma)(KVC__(quad) a, KVC__(quad) b, KVC__(quad) c)
{
    return _mm_fmadd_ps(a, b, c);
}
KVC__FORCE void KVC__(quad_store)(float *p, KVC__(quad) a) { _mm_storeu_ps(p, a); }
#elif KVC__PASS == 2
typedef struct KVC__(bytes) { int8x16_t a, b; } KVC__(bytes);
typedef struct KVC__(ints) { int32x4_t a, b; } KVC__(ints);
typedef float32x4_t KVC__(quad);
KVC__FORCE KVC__(bytes) KVC__(load_bytes)(const void *p)
{
    KVC__(bytes) r;
    r.a = vld1q_s8((const int8_t *)p);
    r.b = vld1q_s8((const int8_t *)p + 16);
    return r;
}
KVC__FORCE KVC__(bytes) KVC__(load_nibbles)(const void *p)
{
    KVC__(bytes) r;
    uint8x16_t t = vld1q_u8((const uint8_t *)p);
    r.a = vreinterpretq_s8_u8(vandq_u8(t, vdupq_n_u8(15)));
    r.b = vreinterpretq_s8_u8(vshrq_n_u8(t, 4));
    return r;
}
KVC__FORCE uint32_t KVC__(magnitude32)(const float *p)
{
    const uint32x4_t mask = vdupq_n_u32(0x7fffffffu);
    uint32x4_t most = vdupq_n_u32(0);
    int i;
    for (i = 0; i < 32; i += 4)
        most = vmaxq_u32(most, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(p + i)), mask));
    return vmaxvq_u32(most);
}
KVC__FORCE int32x4_t KVC__(dot16)(int8x16_t x, int8x16_t y)
{
    int16x8_t lo = vmull_s8(vget_low_s8(x), vget_low_s8(y));
    int16x8_t hi = vmull_s8(vget_high_s8(x), vget_high_s8(y));
    return vpadalq_s16(vpaddlq_s16(lo), hi);
}
KVC__FORCE KVC__(ints) KVC__(dot_ss)(KVC__(bytes) x, KVC__(bytes) y)
{
    KVC__(ints) r;
    r.a = KVC__(dot16)(x.a, y.a);
    r.b = KVC__(dot16)(x.b, y.b);
    return r;
}
KVC__FORCE KVC__(ints) KVC__(dot_us)(KVC__(bytes) x, KVC__(bytes) y)
{
    return KVC__(dot_ss)(x, y);
}
KVC__FORCE KVC__(quad) KVC__(totals)(const KVC__(ints) s[4], int32_t less)
{
    int32x4_t t0 = vpaddq_s32(vaddq_s32(s[0].a, s[0].b), vaddq_s32(s[1].a, s[1].b));
    int32x4_t t1 = vpaddq_s32(vaddq_s32(s[2].a, s[2].b), vaddq_s32(s[3].a, s[3].b));
    return vcvtq_f32_s32(vsubq_s32(vpaddq_s32(t0, t1), vdupq_n_s32(less)));
}
KVC__FORCE KVC__(quad) KVC__(scales)(const unsigned char *const p[4])
{
    uint64_t t = (uint64_t)kvc__rd16(p[0]) | (uint64_t)kvc__rd16(p[1]) << 16 |
        (uint64_t)kvc__rd16(p[2]) << 32 | (uint64_t)kvc__rd16(p[3]) << 48;
    return vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(t)));
}
KVC__FORCE KVC__(quad) KVC__(quad_zero)(void) { return vdupq_n_f32(0.0f); }
KVC__FORCE KVC__(quad) KVC__(quad_scale)(KVC__(quad) a, float x) { return vmulq_n_f32(a, x); }
KVC__FORCE KVC__(quad) KVC__(quad_fma)(KVC__(quad) a, KVC__(quad) b, KVC__(quad) c)
{
    return vfmaq_f32(c, a, b);
}
KVC__FORCE void KVC__(quad_store)(float *p, KVC__(quad) a) { vst1q_f32(p, a); }
#else
typedef struct KVC__(bytes) { int8_t v[32]; } KVC__(bytes);
typedef struct KVC__(ints) { int32_t v; } KVC__(ints);
typedef struct KVC__(quad) { float v[4]; } KVC__(quad);
KVC__FORCE KVC__(bytes) KVC__(load_bytes)(const void *p)
{
    KVC__(bytes) r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
KVC__FORCE KVC__(bytes) KVC__(load_nibbles)(const void *p)
{
    KVC__(bytes) r;
    const unsigned char *s = (const unsigned char *)p;
    int i;
    for (i = 0; i < 16; i++) {
        r.v[i] = (int8_t)(s[i] & 15);
        r.v[i + 16] = (int8_t)(s[i] >> 4);
    }
    return r;
}
KVC__FORCE uint32_t KVC__(magnitude32)(const float *p)
{
    uint32_t most = 0, bits;
    int i;
    for (i = 0; i < 32; i++) {
        bits = kvc__f32_bits(p[i]) & 0x7fffffffu;
        if (bits > most) most = bits;
    }
    return most;
}
KVC__FORCE KVC__(ints) KVC__(dot_ss)(KVC__(bytes) a, KVC__(bytes) b)
{
    KVC__(ints) r;
    int i;
    for (r.v = 0, i = 0; i < 32; i++) r.v += (int32_t)a.v[i] * b.v[i];
    return r;
}
KVC__FORCE KVC__(ints) KVC__(dot_us)(KVC__(bytes) a, KVC__(bytes) b)
{
    return KVC__(dot_ss)(a, b);
}
#define KVC__EACH(expr) \
    { \
        int i; \
        KVC__(quad) r; \
        for (i = 0; i < 4; i++) r.v[i] = (expr); \
        return r; \
    }
KVC__FORCE KVC__(quad) KVC__(totals)(const KVC__(ints) s[4], int32_t less)
    KVC__EACH((float)(s[i].v - less))
KVC__FORCE KVC__(quad) KVC__(scales)(const unsigned char *const p[4])
    KVC__EACH(kvc__f16_to_f32(kvc__rd16(p[i])))
KVC__FORCE KVC__(quad) KVC__(quad_zero)(void) KVC__EACH(0.0f)
KVC__FORCE KVC__(quad) KVC__(quad_scale)(KVC__(quad) a, float x) KVC__EACH(a.v[i] * x)
KVC__FORCE KVC__(quad) KVC__(quad_fma)(KVC__(quad) a, KVC__(quad) b, KVC__(quad) c)
    KVC__EACH(kvc__fmaf(a.v[i], b.v[i], c.v[i]))
#undef KVC__EACH
KVC__FORCE void KVC__(quad_store)(float *p, KVC__(quad) a) { memcpy(p, a.v, sizeof a.v); }
#endif

/* ---- vocabulary: the processor's own registers ----
   Where many rows are computed at once the accumulators must fit the register file, so these
   kernels work in pieces of KVC__NATIVE lanes. Lane i of a piece that begins at lane j of a `vec`
   holds what lane i + j of the vec would. */
#if KVC__PASS >= 4 || KVC__PASS == 1
#define KVC__NATIVE 16
typedef KVC__(vec) KVC__(native);
KVC__FORCE KVC__(native) KVC__(native_scales)(const unsigned char *p)
{
    return KVC__(load_f16)(p);
}
KVC__FORCE KVC__(native) KVC__(native_set1)(float x) { return KVC__(set1)(x); }
KVC__FORCE KVC__(native) KVC__(native_load)(const float *p) { return KVC__(load)(p); }
KVC__FORCE void KVC__(native_store)(float *p, KVC__(native) a) { KVC__(store)(p, a); }
KVC__FORCE KVC__(native) KVC__(native_load_w)(const unsigned char *p, int type)
{
    return KVC__(load_w)(p, type);
}
KVC__FORCE KVC__(native) KVC__(native_mul)(KVC__(native) a, KVC__(native) b)
{
    return KVC__(mul)(a, b);
}
KVC__FORCE KVC__(native) KVC__(native_add)(KVC__(native) a, KVC__(native) b)
{
    return KVC__(add)(a, b);
}
KVC__FORCE KVC__(native) KVC__(native_fma)(KVC__(native) a, KVC__(native) b, KVC__(native) c)
{
    return KVC__(fma)(a, b, c);
}
#elif KVC__PASS == 3
#define KVC__NATIVE 8
typedef __m256 KVC__(native);
KVC__FORCE KVC__(native) KVC__(native_set1)(float x) { return _mm256_set1_ps(x); }
KVC__FORCE KVC__(native) KVC__(native_load)(const float *p) { return _mm256_loadu_ps(p); }
KVC__FORCE void KVC__(native_store)(float *p, KVC__(native) a) { _mm256_storeu_ps(p, a); }
KVC__FORCE KVC__(native) KVC__(native_load_w)(const unsigned char *p, int type)
{
    __m128i t;
    if (type == KVC__F32) return _mm256_loadu_ps((const float *)(const void *)p);
    t = _mm_loadu_si128((const __m128i *)(const void *)p);
    if (type == KVC__F16) return _mm256_cvtph_ps(t);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(t), 16));
}
KVC__FORCE KVC__(native) KVC__(native_mul)(KVC__(native) a, KVC__(native) b)
{
    return _mm256_mul_ps(a, b);
}
KVC__FORCE KVC__(native) KVC__(native_add)(KVC__(native) a, KVC__(native) b)
{
    return _mm256_add_ps(a, b);
}
KVC__FORCE KVC__(native) KVC__(native_fma)(KVC__(native) a, KVC__(native) b, KVC__(native) c)
{
    return _mm256_fmadd_ps(a, b, c);
}
#else
#define KVC__NATIVE 4
typedef float32x4_t KVC__(native);
KVC__FORCE KVC__(native) KVC__(native_set1)(float x) { return vdupq_n_f32(x); }
KVC__FORCE KVC__(native) KVC__(native_load)(const float *p) { return vld1q_f32(p); }
KVC__FORCE void KVC__(native_store)(float *p, KVC__(native) a) { vst1q_f32(p, a); }
KVC__FORCE KVC__(native) KVC__(native_load_w)(const unsigned char *p, int type)
{
    uint8x8_t t;
    if (type == KVC__F32) return vreinterpretq_f32_u8(vld1q_u8(p));
    t = vld1_u8(p);
    if (type == KVC__F16) return vcvt_f32_f16(vreinterpret_f16_u8(t));
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(t), 16));
}
KVC__FORCE KVC__(native) KVC__(native_mul)(KVC__(native) a, KVC__(native) b)
{
    return vmulq_f32(a, b);
}
KVC__FORCE KVC__(native) KVC__(native_add)(KVC__(native) a, KVC__(native) b)
{
    return vaddq_f32(a, b);
}
KVC__FORCE KVC__(native) KVC__(native_fma)(KVC__(native) a, KVC__(native) b, KVC__(native) c)
{
    return vfmaq_f32(c, a, b);
}
#endif

/* ---- vocabulary: integer dot products over packed blocks ----
   Packed weights hold, for each step of 4 elements, 4 codes of each of 16 outputs; a piece is the
   codes of KVC__NATIVE outputs. dots_add adds the 4 products of every output to its lane; x4 is 4
   bytes of x for all of them. `nibbles` (a constant) says that codes are 0 to 15, not signed bytes.
   A set may read codes as unsigned, `zero` above what they mean: dots_init and dots_end together
   add `start`, which is -zero times the sum of the block's x. */
#define KVC__ZERO_NIBBLES 8
#if KVC__PASS == 5
#define KVC__ZERO_BYTES 128
typedef __m512i KVC__(codes);
typedef __m512i KVC__(dots);
typedef __m512i KVC__(x4);
KVC__FORCE KVC__(codes) KVC__(codes_bytes)(const unsigned char *p)
{
    return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
}
KVC__FORCE KVC__(codes) KVC__(codes_low)(const unsigned char *p)
{
    return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15));
}
KVC__FORCE KVC__(codes) KVC__(codes_high)(const unsigned char *p)
{
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15));
}
KVC__FORCE KVC__(x4) KVC__(x4_load)(const unsigned char *p)
{
    return _mm512_set1_epi32((int)kvc__rd32(p));
}
KVC__FORCE KVC__(dots) KVC__(dots_init)(int32_t start, int nibbles)
{
    (void)nibbles;
    return _mm512_set1_epi32(start);
}
KVC__FORCE KVC__(dots) KVC__(dots_add)(KVC__(dots) acc, KVC__(codes) c, KVC__(x4) x, int nibbles)
{
    (void)nibbles;
    return _mm512_dpbusd_epi32(acc, c, x);
}
KVC__FORCE KVC__(native) KVC__(dots_end)(KVC__(dots) acc, int32_t start, int nibbles)
{
    KVC__(native) r;
    (void)start;
    (void)nibbles;
    r.v = _mm512_cvtepi32_ps(acc);
    return r;
}
#elif KVC__PASS == 4
#define KVC__ZERO_BYTES 0
typedef struct KVC__(codes) { __m512i size; __mmask64 negative; } KVC__(codes);
typedef __m512i KVC__(dots);
typedef __m512i KVC__(x4);
KVC__FORCE KVC__(codes) KVC__(codes_bytes)(const unsigned char *p)
{
    KVC__(codes) r;
    __m512i t = _mm512_loadu_si512(p);
    r.size = _mm512_abs_epi8(t);
    r.negative = _mm512_movepi8_mask(t);
    return r;
}
KVC__FORCE KVC__(codes) KVC__(codes_low)(const unsigned char *p)
{
    KVC__(codes) r;
    r.size = _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15));
    r.negative = 0;
    return r;
}
KVC__FORCE KVC__(codes) KVC__(codes_high)(const unsigned char *p)
{
    KVC__(codes) r;
    r.size = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15));
    r.negative = 0;
    return r;
}
KVC__FORCE KVC__(x4) KVC__(x4_load)(const unsigned char *p)
{
    return _mm512_set1_epi32((int)kvc__rd32(p));
}
KVC__FORCE KVC__(dots) KVC__(dots_init)(int32_t start, int nibbles)
{
    return nibbles ? _mm512_setzero_si512() : _mm512_set1_epi32(start);
}
/* Pairs of products fit in 16 bits; of nibbles all eight steps of a block do. */
KVC__FORCE KVC__(dots) KVC__(dots_add)(KVC__(dots) acc, KVC__(codes) c, KVC__(x4) x, int nibbles)
{
    if (nibbles) return _mm512_add_epi16(acc, _mm512_maddubs_epi16(c.size, x));
    x = _mm512_mask_sub_epi8(x, c.negative, _mm512_setzero_si512(), x);
    return _mm512_add_epi32(acc,
        _mm512_madd_epi16(_mm512_maddubs_epi16(c.size, x), _mm512_set1_epi16(1)));
}
KVC__FORCE KVC__(native) KVC__(dots_end)(KVC__(dots) acc, int32_t start, int nibbles)
{
    KVC__(native) r;
    if (nibbles)
        acc = _mm512_add_epi32(_mm512_madd_epi16(acc, _mm512_set1_epi16(1)),
            _mm512_set1_epi32(start));
    r.v = _mm512_cvtepi32_ps(acc);
    return r;
}
#elif KVC__PASS == 3
#define KVC__ZERO_BYTES 0
typedef struct KVC__(codes) { __m256i size, sign; } KVC__(codes);
typedef __m256i KVC__(dots);
typedef __m256i KVC__(x4);
KVC__FORCE KVC__(codes) KVC__(codes_bytes)(const unsigned char *p)
{
    KVC__(codes) r;
    r.sign = _mm256_loadu_si256((const __m256i *)(const void *)p);
    r.size = _mm256_abs_epi8(r.sign);
    return r;
}
KVC__FORCE KVC__(codes) KVC__(codes_low)(const unsigned char *p)
{
    KVC__(codes) r;
    r.sign = _mm256_loadu_si256((const __m256i *)(const void *)p);
    r.size = _mm256_and_si256(r.sign, _mm256_set1_epi8(15));
    return r;
}
KVC__FORCE KVC__(codes) KVC__(codes_high)(const unsigned char *p)
{
    KVC__(codes) r;
    r.sign = _mm256_loadu_si256((const __m256i *)(const void *)p);
    r.size = _mm256_and_si256(_mm256_srli_epi16(r.sign, 4), _mm256_set1_epi8(15));
    return r;
}
KVC__FORCE KVC__(x4) KVC__(x4_load)(const unsigned char *p)
{
    return _mm256_set1_epi32((int)kvc__rd32(p));
}
KVC__FORCE KVC__(dots) KVC__(dots_init)(int32_t start, int nibbles)
{
    return nibbles ? _mm256_setzero_si256() : _mm256_set1_epi32(start);
}
/* Pairs of products fit in 16 bits; of nibbles all eight steps of a block do. */
KVC__FORCE KVC__(dots) KVC__(dots_add)(KVC__(dots) acc, KVC__(codes) c, KVC__(x4) x, int nibbles)
{
    if (nibbles) return _mm256_add_epi16(acc, _mm256_maddubs_epi16(c.size, x));
    return _mm256_add_epi32(acc,
        _mm256_madd_epi16(_mm256_maddubs_epi16(c.size, _mm256_sign_epi8(x, c.sign)),
            _mm256_set1_epi16(1)));
}
KVC__FORCE KVC__(native) KVC__(dots_end)(KVC__(dots) acc, int32_t start, int nibbles)
{
    if (nibbles)
        acc = _mm256_add_epi32(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)),
            _mm256_set1_epi32(start));
    return _mm256_cvtepi32_ps(acc);
}
KVC__FORCE KVC__(native) KVC__(native_scales)(const unsigned char *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
#elif KVC__PASS == 2
#define KVC__ZERO_BYTES 0
typedef int8x16_t KVC__(codes);
typedef int32x4_t KVC__(dots);
typedef int8x16_t KVC__(x4);
KVC__FORCE KVC__(codes) KVC__(codes_bytes)(const unsigned char *p)
{
    return vreinterpretq_s8_u8(vld1q_u8(p));
}
KVC__FORCE KVC__(codes) KVC__(codes_low)(const unsigned char *p)
{
    return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15)));
}
KVC__FORCE KVC__(codes) KVC__(codes_high)(const unsigned char *p)
{
    return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4));
}
KVC__FORCE KVC__(x4) KVC__(x4_load)(const unsigned char *p)
{
    return vreinterpretq_s8_u32(vdupq_n_u32(kvc__rd32(p)));
}
KVC__FORCE KVC__(dots) KVC__(dots_init)(int32_t start, int nibbles)
{
    (void)nibbles;
    return vdupq_n_s32(start);
}
/* With the dot product extension if the whole build has it: this pass has no region of its own. */
#if defined(__ARM_FEATURE_DOTPROD)
KVC__FORCE KVC__(dots) KVC__(dots_add)(KVC__(dots) acc, KVC__(codes) c, KVC__(x4) x, int nibbles)
{
    (void)nibbles;
    return vdotq_s32(acc, c, x);
}
#else
KVC__FORCE KVC__(dots) KVC__(dots_add)(KVC__(dots) acc, KVC__(codes) c, KVC__(x4) x, int nibbles)
{
    int16x8_t lo = vmull_s8(vget_low_s8(c), vget_low_s8(x));
    int16x8_t hi = vmull_s8(vget_high_s8(c), vget_high_s8(x));
    (void)nibbles;
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(lo), vpaddlq_s16(hi)));
}
#endif
KVC__FORCE KVC__(native) KVC__(dots_end)(KVC__(dots) acc, int32_t start, int nibbles)
{
    (void)start;
    (void)nibbles;
    return vcvtq_f32_s32(acc);
}
KVC__FORCE KVC__(native) KVC__(native_scales)(const unsigned char *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}
#else
#define KVC__ZERO_BYTES 0
typedef struct KVC__(codes) { int8_t v[64]; } KVC__(codes);
typedef struct KVC__(dots) { int32_t v[16]; } KVC__(dots);
typedef struct KVC__(x4) { int8_t v[4]; } KVC__(x4);
KVC__FORCE KVC__(codes) KVC__(codes_bytes)(const unsigned char *p)
{
    KVC__(codes) r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
KVC__FORCE KVC__(codes) KVC__(codes_low)(const unsigned char *p)
{
    KVC__(codes) r;
    int i;
    for (i = 0; i < 64; i++) r.v[i] = (int8_t)(p[i] & 15);
    return r;
}
KVC__FORCE KVC__(codes) KVC__(codes_high)(const unsigned char *p)
{
    KVC__(codes) r;
    int i;
    for (i = 0; i < 64; i++) r.v[i] = (int8_t)(p[i] >> 4);
    return r;
}
KVC__FORCE KVC__(x4) KVC__(x4_load)(const unsigned char *p)
{
    KVC__(x4) r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
KVC__FORCE KVC__(dots) KVC__(dots_init)(int32_t start, int nibbles)
{
    KVC__(dots) r;
    int i;
    (void)nibbles;
    for (i = 0; i < 16; i++) r.v[i] = start;
    return r;
}
KVC__FORCE KVC__(dots) KVC__(dots_add)(KVC__(dots) acc, KVC__(codes) c, KVC__(x4) x, int nibbles)
{
    int i;
    (void)nibbles;
    for (i = 0; i < 16; i++)
        acc.v[i] += c.v[4 * i] * x.v[0] + c.v[4 * i + 1] * x.v[1] + c.v[4 * i + 2] * x.v[2] +
            c.v[4 * i + 3] * x.v[3];
    return acc;
}
KVC__FORCE KVC__(native) KVC__(dots_end)(KVC__(dots) acc, int32_t start, int nibbles)
{
    KVC__(native) r;
    int i;
    (void)start;
    (void)nibbles;
    for (i = 0; i < 16; i++) r.v[i] = (float)acc.v[i];
    return r;
}
#endif

/* ---- element-wise ---- */

/* e^x with a relative error below 2^-22: x = n ln 2 + r, n by adding and subtracting 1.5 * 2^23
   (its low bits then hold n), Taylor series of degree 7 on |r| <= ln 2 / 2. Below -87.33 the
   result is 0, above 88.37 infinity; NaN stays NaN. */
KVC__FORCE KVC__(vec) KVC__(exp_low)(KVC__(vec) x)
{
    static const float c[7] = { 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f,
        1.0f };
    const KVC__(vec) magic = KVC__(set1)(12582912.0f), one = KVC__(set1)(1.0f);
    KVC__(vec) t, n, r, y;
    int i;
    t = KVC__(fma)(x, KVC__(set1)(1.44269504f), magic);
    n = KVC__(sub)(t, magic);
    r = KVC__(fma)(n, KVC__(set1)(-0.693359375f), x);
    r = KVC__(fma)(n, KVC__(set1)(2.12194440e-4f), r);
    y = KVC__(set1)(c[0]);
    for (i = 1; i < 7; i++) y = KVC__(fma)(y, r, KVC__(set1)(c[i]));
    y = KVC__(mul)(KVC__(fma)(y, r, one), KVC__(exp2_magic)(t));
    return KVC__(if_less)(x, KVC__(set1)(-87.33f), KVC__(set1)(0.0f), y);
}

KVC__FORCE KVC__(vec) KVC__(exp)(KVC__(vec) x)
{
    const KVC__(vec) hi = KVC__(set1)(88.37f), inf = KVC__(set1)(kvc__bits_f32(0x7f800000u));
    return KVC__(if_less)(hi, x, inf, KVC__(exp_low)(KVC__(if_less)(hi, x, hi, x)));
}

/* tanh(x) with a relative error below 2^-21: x (1 + x^2 P(x^2)) where that is accurate, beyond it
   (1 - e) / (1 + e) with e = exp(-2 |x|), which cannot overflow. P is the polynomial through the
   five Chebyshev nodes of [0, 0.625^2]. */
KVC__FORCE KVC__(vec) KVC__(tanh)(KVC__(vec) x)
{
    static const float c[5] = { -6.09671417e-3f, 2.09971790e-2f, -5.38509096e-2f, 0.133327697f,
        -0.333333289f };
    const KVC__(vec) zero = KVC__(set1)(0.0f), one = KVC__(set1)(1.0f);
    KVC__(vec) size = KVC__(if_less)(x, zero, KVC__(sub)(zero, x), x);
    KVC__(vec) e = KVC__(exp_low)(KVC__(mul)(size, KVC__(set1)(-2.0f))), outer, inner, square;
    int i;
    outer = KVC__(div)(KVC__(sub)(one, e), KVC__(add)(one, e));
    outer = KVC__(if_less)(x, zero, KVC__(sub)(zero, outer), outer);
    square = KVC__(mul)(x, x);
    inner = KVC__(set1)(c[0]);
    for (i = 1; i < 5; i++) inner = KVC__(fma)(inner, square, KVC__(set1)(c[i]));
    inner = KVC__(mul)(x, KVC__(fma)(square, inner, one));
    return KVC__(if_less)(size, KVC__(set1)(0.625f), inner, outer);
}

/* y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich, "Root mean square layer normalization",
   2019); y may be x. */
static void KVC__(rms_norm)(float *y, const float *x, const float *w, uint32_t n, float eps)
{
    KVC__(vec) acc = KVC__(set1)(0.0f), scale, t;
    uint32_t i, whole = n & ~15u;
    for (i = 0; i < whole; i += 16) {
        t = KVC__(load)(x + i);
        acc = KVC__(fma)(t, t, acc);
    }
    if (i < n) {
        t = KVC__(load_n)(x + i, n - i);
        acc = KVC__(fma)(t, t, acc);
    }
    scale = KVC__(set1)(1.0f / sqrtf(KVC__(sum)(acc) / (float)n + eps));
    for (i = 0; i < whole; i += 16)
        KVC__(store)(y + i, KVC__(mul)(KVC__(mul)(KVC__(load)(x + i), scale), KVC__(load)(w + i)));
    if (i < n) {
        t = KVC__(mul)(KVC__(load_n)(x + i, n - i), scale);
        KVC__(store_n)(y + i, KVC__(mul)(t, KVC__(load_n)(w + i, n - i)), n - i);
    }
}

/* y = (x - mean) / sqrt(mean of the squared deviations + eps) * w + b (Ba et al., "Layer
   normalization", 2016), without b if that is NULL; y may be x. The mean comes first: squares of
   what lies far from zero would leave little of the deviations. */
static void KVC__(layer_norm)(float *y, const float *x, const float *w, const float *b, uint32_t n,
    float eps)
{
    KVC__(vec) acc = KVC__(set1)(0.0f), mean, scale, t;
    float deviation[16];
    uint32_t i, m;
    for (i = 0; i < n; i += 16) {
        m = n - i < 16 ? n - i : 16;
        acc = KVC__(add)(acc, KVC__(load_n)(x + i, m));
    }
    mean = KVC__(set1)(KVC__(sum)(acc) / (float)n);
    acc = KVC__(set1)(0.0f);
    for (i = 0; i < n; i += 16) {
        m = n - i < 16 ? n - i : 16;
        KVC__(store)(deviation, KVC__(sub)(KVC__(load_n)(x + i, m), mean));
        t = KVC__(load_n)(deviation, m);
        acc = KVC__(fma)(t, t, acc);
    }
    scale = KVC__(set1)(1.0f / sqrtf(KVC__(sum)(acc) / (float)n + eps));
    for (i = 0; i < n; i += 16) {
        m = n - i < 16 ? n - i : 16;
        t = KVC__(mul)(KVC__(sub)(KVC__(load_n)(x + i, m), mean), scale);
        t = b == NULL ? KVC__(mul)(t, KVC__(load_n)(w + i, m))
            : KVC__(fma)(t, KVC__(load_n)(w + i, m), KVC__(load_n)(b + i, m));
        KVC__(store_n)(y + i, t, m);
    }
}

/* x / (1 + e^-y) */
KVC__FORCE KVC__(vec) KVC__(sigmoid_mul)(KVC__(vec) x, KVC__(vec) y)
{
    KVC__(vec) e = KVC__(exp)(KVC__(sub)(KVC__(set1)(0.0f), y));
    return KVC__(div)(x, KVC__(add)(KVC__(set1)(1.0f), e));
}

/* x Phi(x), Phi the normal distribution: 0.5 (1 + erf(x / sqrt 2)) (Hendrycks and Gimpel, "Gaussian
   error linear units", 2016). For a = |x| < 1 it is 0.5 + x P(x^2). For others exp(a^2 / 2) Phi(-a)
   is a smooth function of t = 1 / (1 + 0.33 a): t times a polynomial, with a relative error below
   2^-26, so that the far side of Phi keeps its digits. The polynomials go through the five and
   eight Chebyshev nodes of their ranges. */
KVC__FORCE KVC__(vec) KVC__(gelu_erf)(KVC__(vec) x)
{
    static const float p[5] = { 9.43173718e-5f, -1.16951927e-3f, 9.96730152e-3f, -6.64896040e-2f,
        0.398942265f };
    static const float c[8] = { 0.0441851424f, -0.140107401f, 0.111386140f, 4.36197714e-3f,
        0.101646941f, 0.115078080f, 0.131865429f, 0.131642151f };
    const KVC__(vec) zero = KVC__(set1)(0.0f), one = KVC__(set1)(1.0f), half = KVC__(set1)(0.5f);
    KVC__(vec) a = KVC__(if_less)(x, zero, KVC__(sub)(zero, x), x), square = KVC__(mul)(x, x);
    KVC__(vec) t = KVC__(div)(one, KVC__(fma)(a, KVC__(set1)(0.33f), one));
    KVC__(vec) inner = KVC__(set1)(p[0]), outer = KVC__(set1)(c[0]);
    int i;
    for (i = 1; i < 5; i++) inner = KVC__(fma)(inner, square, KVC__(set1)(p[i]));
    inner = KVC__(fma)(inner, x, half);
    for (i = 1; i < 8; i++) outer = KVC__(fma)(outer, t, KVC__(set1)(c[i]));
    outer = KVC__(mul)(KVC__(mul)(outer, t),
        KVC__(exp_low)(KVC__(mul)(square, KVC__(set1)(-0.5f))));
    outer = KVC__(if_less)(x, zero, outer, KVC__(sub)(one, outer));
    return KVC__(mul)(x, KVC__(if_less)(a, one, inner, outer));
}

/* act(g), times u if gated:
   SILU     g / (1 + e^-g) (Shazeer, "GLU variants improve transformer", 2020: SwiGLU)
   GELU     0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) (Hendrycks and Gimpel 2016), which is
            g / (1 + e^-2y) for the tanh of y
   CLAMPED  g / (1 + e^-1.702g) (u + 1), g at most 7 and u from -7 to 7 (OpenAI, "gpt-oss", 2025) */
KVC__FORCE KVC__(vec) KVC__(activate16)(KVC__(vec) g, KVC__(vec) u, const kvc__act act,
    const int gated)
{
    const KVC__(vec) seven = KVC__(set1)(7.0f), less = KVC__(set1)(-7.0f);
    if (act == KVC__ACT_GELU_ERF) {
        g = KVC__(gelu_erf)(g);
    } else if (act == KVC__ACT_GELU) {
        KVC__(vec) by = KVC__(fma)(KVC__(mul)(g, g), KVC__(set1)(0.0713548163f),
            KVC__(set1)(1.59576912f));
        g = KVC__(sigmoid_mul)(g, KVC__(mul)(g, by));
    } else if (act == KVC__ACT_CLAMPED) {
        g = KVC__(if_less)(seven, g, seven, g);
        u = KVC__(if_less)(seven, u, seven, KVC__(if_less)(u, less, less, u));
        u = KVC__(add)(u, KVC__(set1)(1.0f));
        g = KVC__(sigmoid_mul)(g, KVC__(mul)(g, KVC__(set1)(1.702f)));
    } else {
        g = KVC__(sigmoid_mul)(g, g);
    }
    return gated ? KVC__(mul)(g, u) : g;
}

KVC__FORCE void KVC__(activate_all)(float *gate, const float *up, uint32_t n, const kvc__act act,
    const int gated)
{
    uint32_t i;
    KVC__(vec) u = KVC__(set1)(0.0f);
    for (i = 0; i + 16 <= n; i += 16) {
        if (gated) u = KVC__(load)(up + i);
        KVC__(store)(gate + i, KVC__(activate16)(KVC__(load)(gate + i), u, act, gated));
    }
    if (i == n) return;
    if (gated) u = KVC__(load_n)(up + i, n - i);
    u = KVC__(activate16)(KVC__(load_n)(gate + i, n - i), u, act, gated);
    KVC__(store_n)(gate + i, u, n - i);
}

/* gate = act(gate) * up, or act(gate) if up is NULL, which it must not be with CLAMPED. */
static void KVC__(activate)(float *gate, const float *up, uint32_t n, kvc__act act)
{
    switch ((int)act + (up == NULL ? 8 : 0)) {
    case KVC__ACT_SILU: KVC__(activate_all)(gate, up, n, KVC__ACT_SILU, 1); break;
    case KVC__ACT_GELU: KVC__(activate_all)(gate, up, n, KVC__ACT_GELU, 1); break;
    case KVC__ACT_GELU_ERF: KVC__(activate_all)(gate, up, n, KVC__ACT_GELU_ERF, 1); break;
    case KVC__ACT_CLAMPED: KVC__(activate_all)(gate, up, n, KVC__ACT_CLAMPED, 1); break;
    case KVC__ACT_SILU + 8: KVC__(activate_all)(gate, up, n, KVC__ACT_SILU, 0); break;
    case KVC__ACT_GELU + 8: KVC__(activate_all)(gate, up, n, KVC__ACT_GELU, 0); break;
    case KVC__ACT_GELU_ERF + 8: KVC__(activate_all)(gate, up, n, KVC__ACT_GELU_ERF, 0); break;
    default: break;
    }
}

/* (x[i] * own[i] + x[partner of i] * other[i]) * scale, where pairs are `apart` elements apart, 1
   or rope_dim / 2: the turn of a pair by its angle (Su et al., "RoFormer", 2021), with the cosine
   in own and the sine, negative for the first of a pair, in other. Dimensions past rope_dim get the
   scale only. turn: own, then other, [rope_dim] each. */
static void KVC__(rope)(float *x, uint32_t n_heads, uint32_t head_dim, uint32_t rope_dim,
    uint32_t apart, const float *turn, float scale)
{
    const KVC__(vec) by = KVC__(set1)(scale);
    const float *other = turn + rope_dim;
    const uint32_t end = apart == 1 ? rope_dim : apart;
    uint32_t h, i, j, n;
    for (h = 0; h < n_heads; h++, x += head_dim) {
        for (i = 0; i < end; i += n) {
            KVC__(vec) a, b;
            n = end - i < 16 ? end - i : 16;
            a = KVC__(load_n)(x + i, n);
            b = apart == 1 ? KVC__(swap_pairs)(a) : KVC__(load_n)(x + apart + i, n);
            for (j = i; j < rope_dim; j += end) {   /* the first of the pairs, then the second */
                KVC__(vec) y = KVC__(mul)(j == i ? a : b, KVC__(load_n)(turn + j, n));
                y = KVC__(add)(y, KVC__(mul)(j == i ? b : a, KVC__(load_n)(other + j, n)));
                KVC__(store_n)(x + j, KVC__(mul)(y, by), n);
            }
        }
        for (i = rope_dim; i < head_dim; i++) x[i] *= scale;
    }
}

static void KVC__(to_f16)(uint16_t *y, const float *x, uint32_t n)
{
    uint32_t i;
    for (i = 0; i + 16 <= n; i += 16) KVC__(store_f16)(y + i, KVC__(load)(x + i));
    for (; i < n; i++) y[i] = kvc__f32_to_f16(x[i]);
}

/* y += x * scale, by fused multiply-add */
static void KVC__(accumulate)(float *y, const float *x, float scale, uint32_t n)
{
    const KVC__(vec) by = KVC__(set1)(scale);
    uint32_t i, m;
    for (i = 0; i < n; i += 16) {
        m = n - i < 16 ? n - i : 16;
        KVC__(store_n)(y + i,
            KVC__(fma)(KVC__(load_n)(x + i, m), by, KVC__(load_n)(y + i, m)), m);
    }
}

static void KVC__(multiply)(float *x, float by, uint32_t n)
{
    const KVC__(vec) times = KVC__(set1)(by);
    uint32_t i;
    for (i = 0; i + 16 <= n; i += 16)
        KVC__(store)(x + i, KVC__(mul)(KVC__(load)(x + i), times));
    for (; i < n; i++) x[i] *= by;
}

/* x held from -limit to limit; NaN stays NaN. */
static void KVC__(clamp)(float *x, float limit, uint32_t n)
{
    const KVC__(vec) hi = KVC__(set1)(limit), lo = KVC__(set1)(-limit);
    KVC__(vec) t;
    uint32_t i, m;
    for (i = 0; i < n; i += 16) {
        m = n - i < 16 ? n - i : 16;
        t = KVC__(load_n)(x + i, m);
        t = KVC__(if_less)(hi, t, hi, KVC__(if_less)(t, lo, lo, t));
        KVC__(store_n)(x + i, t, m);
    }
}

/* cap * tanh(x / cap) (Bello et al., "Neural combinatorial optimization", 2016) */
KVC__FORCE KVC__(vec) KVC__(soft_cap16)(KVC__(vec) x, KVC__(vec) cap)
{
    return KVC__(mul)(cap, KVC__(tanh)(KVC__(div)(x, cap)));
}

static void KVC__(soft_cap)(float *x, float cap, uint32_t n)
{
    const KVC__(vec) to = KVC__(set1)(cap);
    uint32_t i, m;
    for (i = 0; i < n; i += 16) {
        m = n - i < 16 ? n - i : 16;
        KVC__(store_n)(x + i, KVC__(soft_cap16)(KVC__(load_n)(x + i, m), to), m);
    }
}

/* The nearest whole number, ties to even, of magnitudes below 2^22. */
KVC__FORCE KVC__(vec) KVC__(nearest)(KVC__(vec) a)
{
    const KVC__(vec) magic = KVC__(set1)(12582912.0f);
    return KVC__(sub)(KVC__(add)(a, magic), magic);
}

/* Puts elements [from, from + n) of a row of k into its lanes, from a multiple of 16 on; what is
   left of the last 16 becomes zero. x: the first of them. Four elements of four lanes at a time: of
   the lanes 4 j to 4 j + 3 each quarter has one. */
static void KVC__(to_lanes)(float *row, const float *x, uint32_t k, uint32_t from, uint32_t n)
{
    const size_t steps = kvc__lane_steps(k);
    uint32_t i, j, lane;
    row += from / 16;
    for (i = 0; i + 64 <= n; i += 64, row += 4) {
        KVC__FLAT
        for (j = 0; j < 4; j++)
            KVC__(turn4)(row + kvc__lane_order[j] / 4 * steps, 4 * steps, x + i + 4 * j, 16);
    }
    for (; i < n; i += 16, row++) {
        for (lane = 0; lane < 16; lane++) {
            uint32_t at = i + kvc__lane_order[lane];
            row[lane * steps] = at < n ? x[at] : 0.0f;
        }
    }
}

/* Rounds a row to 8 bits, 32 elements at a time: d = largest magnitude / 127, q = nearest(x / d)
   with ties to even, sum = sum of q. n is a multiple of 32. A block whose largest magnitude is
   below 1e-30 becomes zero; one with infinity or NaN gets the scale NaN, which then shows in the
   logits. */
static void KVC__(quantize)(const float *x, uint32_t n, unsigned char *q8, uint32_t slot,
    uint32_t height)
{
    uint32_t b;
    for (b = 0; b < n / 32; b++, x += 32, q8 += height * KVC__Q8_BYTES) {
        int8_t *q = (int8_t *)q8 + 32 * slot;
        float *d = (float *)(void *)(q8 + 32 * height) + slot;
        int32_t *sum = (int32_t *)(void *)(q8 + 36 * height) + slot;
        uint32_t most = KVC__(magnitude32)(x);
        float amax = kvc__bits_f32(most);
        KVC__(vec) scale, lo, hi;
        if (most >= 0x7f800000u || amax < 1e-30f) {
            memset(q, 0, 32);
            *d = amax < 1e-30f ? 0.0f : kvc__bits_f32(0x7fc00000u);
            *sum = 0;
            continue;
        }
        *d = amax / 127.0f;
        scale = KVC__(set1)(127.0f / amax);
        lo = KVC__(nearest)(KVC__(mul)(KVC__(load)(x), scale));
        hi = KVC__(nearest)(KVC__(mul)(KVC__(load)(x + 16), scale));
        KVC__(store_i8)(q, lo);
        KVC__(store_i8)(q + 16, hi);
        *sum = (int32_t)KVC__(sum)(KVC__(add)(lo, hi));
    }
}

/* A block of n <= 32 elements, filled up with zeros, to Q8_0 or Q4_0: d = largest magnitude / 127,
   or the element of largest magnitude / -8, in half precision; a code is nearest(x * (1 / d)), with
   ties to even, within -127 to 127 or -8 to 7. Where d becomes zero, so do all. A block with
   infinity or NaN gets the scale NaN; one that is too large for d gets infinity, which makes NaN of
   its zeros. Returns the codes as floats. */
KVC__FORCE void KVC__(to_codes)(unsigned char *block, const float *x, uint32_t n, float codes[32],
    const float most_code, const int signed_scale)
{
    float padded[32], amax, top, d;
    KVC__(vec) by, lo, hi;
    const KVC__(vec) least = KVC__(set1)(signed_scale ? -8.0f : -most_code);
    const KVC__(vec) most = KVC__(set1)(most_code);
    uint32_t bits;
    uint16_t half;
    memset(padded, 0, sizeof padded);
    memcpy(padded, x, n * sizeof *x);
    memset(codes, 0, sizeof padded);
    lo = KVC__(load)(padded);
    hi = KVC__(load)(padded + 16);
    bits = KVC__(magnitude32)(padded);
    amax = kvc__bits_f32(bits);
    top = KVC__(max_lane)(KVC__(max)(lo, hi));
    d = signed_scale ? (top >= amax ? -amax : amax) / 8.0f : amax / most_code;
    half = bits < 0x7f800000u ? kvc__f32_to_f16(d) : 0x7e00u;
    memcpy(block, &half, 2);
    if (bits >= 0x7f800000u || (half & 0x7fffu) == 0) return;
    by = KVC__(set1)(1.0f / kvc__f16_to_f32(half));
    lo = KVC__(max)(KVC__(nearest)(KVC__(mul)(lo, by)), least);
    hi = KVC__(max)(KVC__(nearest)(KVC__(mul)(hi, by)), least);
    KVC__(store)(codes, KVC__(if_less)(lo, most, lo, most));
    KVC__(store)(codes + 16, KVC__(if_less)(hi, most, hi, most));
}

static void KVC__(to_q8_0)(unsigned char *block, const float *x, uint32_t n)
{
    float codes[32];
    KVC__(to_codes)(block, x, n, codes, 127.0f, 0);
    KVC__(store_i8)((int8_t *)block + 2, KVC__(load)(codes));
    KVC__(store_i8)((int8_t *)block + 18, KVC__(load)(codes + 16));
}

static void KVC__(to_q4_0)(unsigned char *block, const float *x, uint32_t n)
{
    float codes[32];
    int8_t low[16], high[16];
    uint32_t i;
    KVC__(to_codes)(block, x, n, codes, 7.0f, 1);
    KVC__(store_i8)(low, KVC__(load)(codes));
    KVC__(store_i8)(high, KVC__(load)(codes + 16));
    for (i = 0; i < 16; i++) block[2 + i] = (unsigned char)((low[i] + 8) | (high[i] + 8) << 4);
}

/* A single row of x reads weights four outputs at a time, a quarter of the block apart: four
   streams, each of them in order, are what memory delivers fastest. Outputs past the last one are
   the last again. */
KVC__FORCE void KVC__(streams)(const kvc__mm *a, uint32_t i, uint32_t out[4],
    const unsigned char *w[4])
{
    uint32_t o, apart = (a->n_out + 3) / 4;
    for (o = 0; o < 4; o++) {
        out[o] = i + o * apart < a->n_out ? i + o * apart : a->n_out - 1;
        w[o] = a->w + out[o] * a->w_stride;
    }
}

/* ---- matrix products: weights as they lie in the file ---- */

/* 4 outputs of one row, float weights. */
KVC__FORCE void KVC__(row_float)(const unsigned char *const w[4], const float *x, uint32_t k,
    float y[4], const int type)
{
    const size_t w_size = type == KVC__F32 ? 4 : 2;
    KVC__(vec) acc[4], xv;
    float lanes[64];
    uint32_t i, o;
    KVC__FLAT
    for (o = 0; o < 4; o++) acc[o] = KVC__(set1)(0.0f);
    for (i = 0; i + 16 <= k; i += 16) {
        xv = KVC__(load)(x + i);
        KVC__FLAT
        for (o = 0; o < 4; o++)
            acc[o] = KVC__(fma)(KVC__(load_w)(w[o] + i * w_size, type), xv, acc[o]);
    }
    if (i < k) {
        xv = KVC__(load_n)(x + i, k - i);
        KVC__FLAT
        for (o = 0; o < 4; o++)
            acc[o] = KVC__(fma)(KVC__(load_w_n)(w[o] + i * w_size, type, k - i), xv, acc[o]);
    }
    KVC__FLAT
    for (o = 0; o < 4; o++) KVC__(store)(lanes + 16 * o, acc[o]);
    KVC__(sum4)(y, lanes);
}

/* Where a row's bytes of its first 32 elements lie; its scale and sum follow the group's bytes. */
KVC__FORCE const unsigned char *KVC__(row_q8)(const kvc__mm *a, uint32_t row, uint32_t *slot)
{
    *slot = row % a->x8_height;
    return a->x8 + kvc__q8_offset(row, a->x8_height, a->k, 0);
}

/* 4 outputs of one row, weights in blocks. */
KVC__FORCE void KVC__(row_blocks)(const unsigned char *const w[4], const kvc__mm *a, uint32_t row,
    float y[4], const int type)
{
    const size_t block_size = type == KVC__Q8_0 ? 34 : 18;
    const uint32_t height = a->x8_height;
    KVC__(quad) acc = KVC__(quad_zero)();
    uint32_t b, o, slot;
    const unsigned char *x = KVC__(row_q8)(a, row, &slot);
    for (b = 0; b < a->k / 32; b++, x += height * KVC__Q8_BYTES) {
        const unsigned char *p[4];
        KVC__(bytes) xv = KVC__(load_bytes)(x + 32 * slot);
        float xd = kvc__rdf32(x + 32 * height + 4 * slot);
        int32_t less = type == KVC__Q8_0 ? 0 : 8 * (int32_t)kvc__rd32(x + 36 * height + 4 * slot);
        KVC__(ints) s[4];
        KVC__FLAT
        for (o = 0; o < 4; o++) {
            p[o] = w[o] + b * block_size;
            s[o] = type == KVC__Q8_0 ? KVC__(dot_ss)(KVC__(load_bytes)(p[o] + 2), xv)
                : KVC__(dot_us)(KVC__(load_nibbles)(p[o] + 2), xv);
        }
        acc = KVC__(quad_fma)(KVC__(totals)(s, less),
            KVC__(quad_scale)(KVC__(scales)(p), xd), acc);
    }
    KVC__(quad_store)(y, acc);
}

KVC__FORCE void KVC__(mm_in_place)(const kvc__mm *a, const int type)
{
    const unsigned char *w[4];
    uint32_t row, i, o, out[4];
    float y[4];
    for (i = 0; i < (a->n_out + 3) / 4; i++) {
        KVC__(streams)(a, i, out, w);
        for (row = 0; row < a->n_rows; row++) {
            if (type == KVC__Q8_0 || type == KVC__Q4_0) KVC__(row_blocks)(w, a, row, y, type);
            else KVC__(row_float)(w, a->x + row * a->x_stride, a->k, y, type);
            for (o = 0; o < 4; o++) a->y[row * a->y_stride + out[o]] = y[o];
        }
    }
}

/* ---- matrix products: packed floats ----
   A register tile is some pieces of outputs by some rows. It sums one lane after the other, over
   all of k, four lanes to a quarter of the tree; a block goes through all of its tiles a quarter
   at a time, so that what the tiles share stays in the nearest caches. */

/* What a tile asks the memory for: of each of its groups a share of the quarter that comes next,
   evenly over its steps. `step` may be less than a cache line. */
typedef struct KVC__(asking) {
    uintptr_t at[2];
    size_t step;
} KVC__(asking);

/* A lane: acc[p][r] = sum of w[p] * x[r]; n_p pieces and n_r rows are constants. A tile of one row
   reads in streams of its own and asks for what follows in each. */
KVC__FORCE void KVC__(tile_lane)(const unsigned char *const w[KVC__MOST_PIECES], const float *x,
    size_t x_stride, uint32_t steps, const KVC__(asking) *ask,
    KVC__(native) acc[KVC__MOST_PIECES][KVC__ROW_TILE],
    const int type, const uint32_t n_p, const uint32_t n_r)
{
    const size_t step = type == KVC__F32 ? 64 : 32;
    uint32_t i, p, r;
    KVC__FLAT
    for (p = 0; p < n_p; p++) {
        KVC__FLAT
        for (r = 0; r < n_r; r++) acc[p][r] = KVC__(native_set1)(0.0f);
    }
    for (i = 0; i < steps; i++) {
        KVC__(native) wv[KVC__MOST_PIECES];
        KVC__FLAT
        for (p = 0; p < n_p; p++) {
            wv[p] = KVC__(native_load_w)(w[p] + i * step, type);
            if (p * KVC__NATIVE % 16 != 0) continue;
            if (n_r > 1)
                kvc__prefetch((const void *)(ask->at[p * KVC__NATIVE / 16] + i * ask->step));
            else if (i * step % 64 == 0)
                kvc__ask_stream(w[p] + i * step);
        }
        KVC__FLAT
        for (r = 0; r < n_r; r++) {
            KVC__(native) xv = KVC__(native_set1)(x[r * x_stride + i]);
            KVC__FLAT
            for (p = 0; p < n_p; p++) acc[p][r] = KVC__(native_fma)(wv[p], xv, acc[p][r]);
        }
    }
}

/* The sums of a quarter: (lane 0 + lane 1) + (lane 2 + lane 3) of it. */
KVC__FORCE void KVC__(tile_quarter)(const unsigned char *const from[KVC__MOST_PIECES],
    const float *x, size_t x_stride, uint32_t steps, KVC__(asking) ask, float *sums, float *pair,
    const int type, const uint32_t n_p, const uint32_t n_r)
{
    const size_t size = type == KVC__F32 ? 4 : 2;
    KVC__(native) acc[KVC__MOST_PIECES][KVC__ROW_TILE];
    const unsigned char *w[KVC__MOST_PIECES];
    uint32_t lane, p, r;
    for (p = 0; p < n_p; p++) w[p] = from[p];
    for (lane = 0; lane < 4; lane++, x += steps) {
        KVC__(tile_lane)(w, x, x_stride, steps, &ask, acc, type, n_p, n_r);
        for (p = 0; p < n_p; p++) w[p] += 16 * steps * size;
        for (p = 0; p < 2; p++) ask.at[p] += ask.step * steps;
        KVC__FLAT
        for (r = 0; r < n_r; r++) {
            KVC__FLAT
            for (p = 0; p < n_p; p++) {
                float *one = pair + (r * n_p + p) * KVC__NATIVE;
                float *sum = sums + (r * n_p + p) * KVC__NATIVE;
                if (lane % 2 == 0) {
                    KVC__(native_store)(one, acc[p][r]);
                    continue;
                }
                acc[p][r] = KVC__(native_add)(KVC__(native_load)(one), acc[p][r]);
                if (lane == 3)
                    acc[p][r] = KVC__(native_add)(KVC__(native_load)(sum), acc[p][r]);
                KVC__(native_store)(sum, acc[p][r]);
            }
        }
    }
}

/* A quarter of a tile: pieces of the outputs from group `set` on, and, where they make up several
   groups, of every `apart`-th after it. Past the last group there is the last again. */
KVC__FORCE void KVC__(tile_floats)(const kvc__mm *a, uint32_t set, uint32_t apart, uint32_t row,
    uint32_t quarter, float *sums, const int type, const uint32_t n_p, const uint32_t n_r)
{
    const size_t size = type == KVC__F32 ? 4 : 2;
    const uint32_t steps = kvc__lane_steps(a->k), last = (a->n_out - 1) / 16;
    const size_t quarter_size = (size_t)64 * steps * size;
    const unsigned char *w[KVC__MOST_PIECES];
    KVC__(asking) ask;
    uint32_t p;
    for (p = 0; p < n_p; p++) {
        uint32_t group = set + p * KVC__NATIVE / 16 * apart;
        w[p] = a->w + (group < last ? group : last) * a->w_stride + quarter * quarter_size +
            p * KVC__NATIVE % 16 * size;
    }
    for (p = 0; p < 2; p++) {
        ask.at[p] = (uintptr_t)(quarter < 3 ? a->w : a->next) + (set + p) * a->w_stride +
            (quarter + 1) % 4 * quarter_size + row * quarter_size / a->n_rows;
    }
    ask.step = 16 * size * n_r / a->n_rows;
    KVC__(tile_quarter)(w, a->x + row * a->x_stride + (size_t)quarter * 4 * steps, a->x_stride,
        steps, ask, sums, a->sums + 4 * KVC__BLOCK_FLOATS, type, n_p, n_r);
}

/* Adds the quarters, which lie `next` floats apart, as the tree does. */
KVC__FORCE void KVC__(tile_finish)(const kvc__mm *a, uint32_t set, uint32_t apart, uint32_t row,
    uint32_t n_rows, const float *sums, size_t next, uint32_t n_p)
{
    const uint32_t last = (a->n_out - 1) / 16;
    uint32_t p, r;
    for (r = 0; r < n_rows; r++) {
        for (p = 0; p < n_p; p++, sums += KVC__NATIVE) {
            uint32_t group = set + p * KVC__NATIVE / 16 * apart;
            KVC__(native) even, odd;
            if (group > last) continue;
            even = KVC__(native_add)(KVC__(native_load)(sums),
                KVC__(native_load)(sums + 2 * next));
            odd = KVC__(native_add)(KVC__(native_load)(sums + next),
                KVC__(native_load)(sums + 3 * next));
            KVC__(native_store)(a->y + (row + r) * a->y_stride + group * 16 +
                p * KVC__NATIVE % 16, KVC__(native_add)(even, odd));
        }
    }
}

/* The rows of the next tile if n are left: those that tile_rows has a copy for. */
KVC__FORCE uint32_t KVC__(tile_height)(uint32_t n)
{
    if (KVC__ROW_TILE == 1) return 1;
    if (n > 8 && KVC__ROW_TILE == 12) return 12;
    if (n > 4) return KVC__ROW_TILE == 12 ? 8 : 6;
    return n > 2 ? 4 : 2;
}

KVC__FORCE void KVC__(tile_rows)(const kvc__mm *a, uint32_t set, uint32_t row, uint32_t quarter,
    float *sums, const int type)
{
    const uint32_t n_p = KVC__OUT_PIECES;
#if KVC__PASS == 1
    KVC__(tile_floats)(a, set, 1, row, quarter, sums, type, n_p, 1);
#else
    switch (KVC__(tile_height)(a->n_rows - row)) {
#if KVC__PASS >= 4
    case 12: KVC__(tile_floats)(a, set, 1, row, quarter, sums, type, n_p, 12); break;
    case 8: KVC__(tile_floats)(a, set, 1, row, quarter, sums, type, n_p, 8); break;
#else
    case 6: KVC__(tile_floats)(a, set, 1, row, quarter, sums, type, n_p, 6); break;
#endif
    case 4: KVC__(tile_floats)(a, set, 1, row, quarter, sums, type, n_p, 4); break;
    default: KVC__(tile_floats)(a, set, 1, row, quarter, sums, type, n_p, 2); break;
    }
#endif
}

/* Sets of groups [set, end) by all rows. */
KVC__FORCE void KVC__(mm_lanes_rows)(const kvc__mm *a, uint32_t begin, uint32_t end, uint32_t step,
    const int type)
{
    const uint32_t tile = KVC__OUT_PIECES * KVC__ROW_TILE * KVC__NATIVE;
    uint32_t quarter, set, row, n = 0, i;
    for (quarter = 0; quarter < 4; quarter++) {
        for (i = quarter * n, set = begin; set < end; set += step) {
            for (row = 0; row < a->n_rows; row += KVC__(tile_height)(a->n_rows - row))
                KVC__(tile_rows)(a, set, row, quarter, a->sums + i++ * tile, type);
        }
        if (quarter == 0) n = i;
    }
    for (i = 0, set = begin; set < end; set += step) {
        for (row = 0; row < a->n_rows; i++) {
            uint32_t left = a->n_rows - row, height = KVC__(tile_height)(left);
            KVC__(tile_finish)(a, set, 1, row, height < left ? height : left,
                a->sums + i * tile, (size_t)n * tile, KVC__OUT_PIECES);
            row += height;
        }
    }
}

/* A single row reads four groups, a quarter of the block apart: four streams. If one tile takes all
   rows, groups are read to their ends, too. */
KVC__FORCE void KVC__(mm_lanes)(const kvc__mm *a, const int type)
{
    const uint32_t groups = (a->n_out + 15) / 16, wide = 64 / KVC__NATIVE;
    const uint32_t step = KVC__OUT_PIECES * KVC__NATIVE / 16;
    uint32_t apart = (groups + 3) / 4, stretch = step, set, quarter;
    if (a->n_rows == 1) {
        for (set = 0; set < apart; set++) {
            for (quarter = 0; quarter < 4; quarter++)
                KVC__(tile_floats)(a, set, apart, 0, quarter, a->sums + 64 * quarter, type,
                    wide, 1);
            KVC__(tile_finish)(a, set, apart, 0, 1, a->sums, 64, wide);
        }
        return;
    }
    if (a->n_rows > KVC__ROW_TILE) stretch = groups;
    for (set = 0; set < groups; set += stretch)
        KVC__(mm_lanes_rows)(a, set, set + stretch, step, type);
}

/* ---- matrix products: packed blocks ----
   16 outputs lie together (see kvc__pack_group), so a register holds outputs side by side: no sum
   across lanes is needed. A format joins by saying how the codes of a step and the scales of a
   block are read. */

/* The codes of elements 4 step to 4 step + 3; p: the first codes of the piece's first output. */
KVC__FORCE KVC__(codes) KVC__(codes_at)(const unsigned char *p, uint32_t step, const int type)
{
    if (type == KVC__Q8_0) return KVC__(codes_bytes)(p + 64 * step);
    return step < 4 ? KVC__(codes_low)(p + 64 * step) : KVC__(codes_high)(p + 64 * (step - 4));
}

/* -zero times a sum, which is read without its sign. */
KVC__FORCE int32_t KVC__(less_zero)(uint32_t sum, uint32_t zero)
{
    return (int32_t)(0u - zero * sum);
}

/* Blocks [from, from + n) of a row, and what a tile of them asks the memory for: of each of its
   streams `step` bytes for each block, from `ahead` bytes behind it on. */
typedef struct KVC__(stretch) {
    uint32_t from, n;
    size_t ahead, step;
} KVC__(stretch);

/* n_p pieces of outputs, `apart` outputs from each other, by n_r rows of one group over a stretch,
   added to y if it is not the first; n_p and n_r are constants. */
KVC__FORCE void KVC__(tile_packed)(const kvc__mm *a, uint32_t row, uint32_t out, uint32_t apart,
    const KVC__(stretch) *t, const int type, const uint32_t n_p, const uint32_t n_r)
{
    const size_t block_size = 16 * (type == KVC__Q8_0 ? 34 : 18);
    const size_t x_step = a->x8_height * (size_t)KVC__Q8_BYTES;
    const int nibbles = type == KVC__Q4_0;
    const uint32_t zero = nibbles ? KVC__ZERO_NIBBLES : KVC__ZERO_BYTES;
    const int ask = n_r == 1 && nibbles;    /* bytes leave the processor time to look ahead */
    const unsigned char *w[KVC__MOST_PIECES], *x, *d, *sum;
    KVC__(native) acc[KVC__MOST_PIECES][KVC__BLOCK_ROW_TILE];
    float *y = a->y + row * a->y_stride + out;
    size_t ahead = t->ahead, i;
    uint32_t b, p, r, j, slot;
    x = KVC__(row_q8)(a, row, &slot) + t->from * x_step;
    d = x + 32 * a->x8_height + 4 * slot;
    sum = d + 4 * a->x8_height;
    x += 32 * slot;
    for (p = 0; p < n_p; p++)
        w[p] = a->w + (size_t)((out + p * apart) / 16) * a->w_stride + t->from * block_size;
    KVC__FLAT
    for (p = 0; p < n_p; p++) {
        KVC__FLAT
        for (r = 0; r < n_r; r++)
            acc[p][r] = t->from == 0 ? KVC__(native_set1)(0.0f)
                : KVC__(native_load)(y + r * a->y_stride + p * apart);
    }
    for (b = 0; b < t->n; b++) {
        KVC__(dots) s[KVC__MOST_PIECES][KVC__BLOCK_ROW_TILE];
        KVC__(native) wd[KVC__MOST_PIECES];
        KVC__FLAT
        for (r = 0; r < n_r; r++) {
            int32_t start = KVC__(less_zero)(kvc__rd32(sum + 4 * r), zero);
            KVC__FLAT
            for (p = 0; p < n_p; p++) s[p][r] = KVC__(dots_init)(start, nibbles);
        }
        for (i = 0; !ask && i < t->step; i += 64) {
            KVC__FLAT
            for (p = 0; p < n_p; p++)
                if (p * KVC__NATIVE % 16 == 0)
                    kvc__prefetch((const void *)((uintptr_t)w[p] + ahead + i));
        }
        ahead -= block_size - t->step;
        KVC__FLAT
        for (j = 0; j < 8; j++) {
            KVC__(codes) c[KVC__MOST_PIECES];
            KVC__FLAT
            for (p = 0; p < n_p; p++) {
                c[p] = KVC__(codes_at)(w[p] + 32 + 4 * ((out + p * apart) % 16), j, type);
                if (ask && p * KVC__NATIVE % 16 == 0 && j < 4) kvc__ask_stream(w[p] + 64 * j);
            }
            KVC__FLAT
            for (r = 0; r < n_r; r++) {
                KVC__(x4) xv = KVC__(x4_load)(x + 32 * r + 4 * j);
                KVC__FLAT
                for (p = 0; p < n_p; p++) s[p][r] = KVC__(dots_add)(s[p][r], c[p], xv, nibbles);
            }
        }
        KVC__FLAT
        for (p = 0; p < n_p; p++) {
            wd[p] = KVC__(native_scales)(w[p] + 2 * ((out + p * apart) % 16));
            if (ask && p * KVC__NATIVE % 16 == 0) kvc__ask_stream(w[p] + 256);
            w[p] += block_size;
        }
        KVC__FLAT
        for (r = 0; r < n_r; r++) {
            int32_t start = KVC__(less_zero)(kvc__rd32(sum + 4 * r), zero);
            KVC__(native) xd = KVC__(native_set1)(kvc__rdf32(d + 4 * r));
            KVC__FLAT
            for (p = 0; p < n_p; p++)
                acc[p][r] = KVC__(native_fma)(KVC__(dots_end)(s[p][r], start, nibbles),
                    KVC__(native_mul)(wd[p], xd), acc[p][r]);
        }
        x += x_step;
        d += x_step;
        sum += x_step;
    }
    KVC__FLAT
    for (r = 0; r < n_r; r++) {
        KVC__FLAT
        for (p = 0; p < n_p; p++)
            KVC__(native_store)(y + r * a->y_stride + p * apart, acc[p][r]);
    }
}

/* A tile of n <= KVC__BLOCK_ROW_TILE rows. */
KVC__FORCE void KVC__(rows_packed)(const kvc__mm *a, uint32_t row, uint32_t n, uint32_t out,
    uint32_t apart, const KVC__(stretch) *t, const int type)
{
    const uint32_t n_p = KVC__OUT_PIECES, most = KVC__BLOCK_ROW_TILE;
    if (most >= 6 && n == 6) KVC__(tile_packed)(a, row, out, apart, t, type, n_p, 6);
    else if (most >= 5 && n == 5) KVC__(tile_packed)(a, row, out, apart, t, type, n_p, 5);
    else if (most >= 4 && n == 4) KVC__(tile_packed)(a, row, out, apart, t, type, n_p, 4);
    else if (most >= 3 && n == 3) KVC__(tile_packed)(a, row, out, apart, t, type, n_p, 3);
    else if (most >= 2 && n == 2) KVC__(tile_packed)(a, row, out, apart, t, type, n_p, 2);
    else KVC__(tile_packed)(a, row, out, apart, t, type, n_p, 1);
}

/* Outputs of a tile by all rows, a stretch of blocks at a time: so the weights of a stretch stay in
   the nearest cache, and each tile asks for its share of those of the next one, which come while
   the processor computes. A tile that takes all rows reads its streams to their ends. */
KVC__FORCE void KVC__(outs_packed)(const kvc__mm *a, uint32_t out, uint32_t apart, const int type)
{
    const size_t block_size = 16 * (type == KVC__Q8_0 ? 34 : 18);
    const uint32_t n_blocks = a->k / 32, n_stretches = kvc__div_up(n_blocks, KVC__STRETCH);
    const int lone = a->n_rows <= KVC__BLOCK_ROW_TILE;
    const uint32_t share = lone ? n_blocks : kvc__div_up(n_blocks, n_stretches);
    KVC__(stretch) t;
    uint32_t row, n;
    for (t.from = 0; t.from < n_blocks; t.from += t.n) {
        t.n = n_blocks - t.from < share ? n_blocks - t.from : share;
        for (row = 0; row < a->n_rows; row += n) {
            n = a->n_rows - row < KVC__BLOCK_ROW_TILE ? a->n_rows - row : KVC__BLOCK_ROW_TILE;
            t.ahead = lone ? KVC__STREAM_AHEAD : (row + a->n_rows) * t.n * block_size / a->n_rows;
            t.step = n * block_size / a->n_rows;
            if (lone && type == KVC__Q8_0) t.step = 0;
            KVC__(rows_packed)(a, row, n, out, apart, &t, type);
        }
    }
}

/* Groups of rows in register tiles. Tiles of two groups of outputs take them half of the block
   apart, two streams; of an odd number of groups the last two are a tile of their own. */
KVC__FORCE void KVC__(all_packed)(const kvc__mm *a, const int type)
{
    const int two = KVC__OUT_PIECES * KVC__NATIVE == 32;
    const uint32_t groups = (a->n_out + 15) / 16, half = groups / 2;
    uint32_t i;
    for (i = 0; i < (two ? groups - half : groups); i++) {
        const int odd = two && i == half;
        KVC__(outs_packed)(a, 16 * (odd ? groups - 2 : i), two && !odd ? 16 * half : KVC__NATIVE,
            type);
    }
}

/* Single rows in four streams where whole groups of outputs fill a register, else by 16 outputs,
   which then stay in the cache for the next row. */
KVC__FORCE void KVC__(mm_packed)(const kvc__mm *a, const int type)
{
    const uint32_t all = (a->n_out + 15u) & ~15u;
    KVC__(stretch) t;
    uint32_t row, out;
    t.from = 0;
    t.n = a->k / 32;
    t.ahead = t.step = 0;
    if (KVC__BLOCK_ROW_TILE > 1 && a->x8_height == KVC__Q8_ROWS &&
        all >= KVC__OUT_PIECES * KVC__NATIVE) {
        KVC__(all_packed)(a, type);
    } else if (KVC__NATIVE == 16 && KVC__MOST_PIECES == 4 && all % 64 == 0) {
        for (out = 0; out < all / 4; out += 16)
            for (row = 0; row < a->n_rows; row++)
                KVC__(tile_packed)(a, row, out, all / 4, &t, type, KVC__MOST_PIECES, 1);
    } else {
        for (out = 0; out < all; out += 16)
            for (row = 0; row < a->n_rows; row++)
                KVC__(tile_packed)(a, row, out, KVC__NATIVE, &t, type, 16 / KVC__NATIVE, 1);
    }
}

static void KVC__(mm_f32)(const kvc__mm *a) { KVC__(mm_in_place)(a, KVC__F32); }
static void KVC__(mm_f16)(const kvc__mm *a) { KVC__(mm_in_place)(a, KVC__F16); }
static void KVC__(mm_bf16)(const kvc__mm *a) { KVC__(mm_in_place)(a, KVC__BF16); }
static void KVC__(mm_q8_0)(const kvc__mm *a) { KVC__(mm_in_place)(a, KVC__Q8_0); }
static void KVC__(mm_q4_0)(const kvc__mm *a) { KVC__(mm_in_place)(a, KVC__Q4_0); }
static void KVC__(mm_f32_packed)(const kvc__mm *a) { KVC__(mm_lanes)(a, KVC__F32); }
static void KVC__(mm_f16_packed)(const kvc__mm *a) { KVC__(mm_lanes)(a, KVC__F16); }
static void KVC__(mm_bf16_packed)(const kvc__mm *a) { KVC__(mm_lanes)(a, KVC__BF16); }
static void KVC__(mm_q8_0_packed)(const kvc__mm *a) { KVC__(mm_packed)(a, KVC__Q8_0); }
static void KVC__(mm_q4_0_packed)(const kvc__mm *a) { KVC__(mm_packed)(a, KVC__Q4_0); }

/* ---- attention ----
   softmax(q K^T) V of a group of queries, exact, over pages. Keys of a page lie in tiles [16
   positions] by [head_dim]: lane i of a vector is position 16 t + i, and a score is a sum over
   head_dim by fused multiply-add in that lane. Values lie in rows of v_stride elements: lane i is
   dimension i, and a sum over positions runs upwards in that lane.
   Keys in codes: a query is rounded to 8 bits as `quantize` does, after it was turned back and, for
   4 bits, rotated; a score adds, block of 32 by block, (float)(exact integer dot) times the product
   of the two scales, by fused multiply-add. Values in codes: a weight times the scale of the
   position's block is rounded to a float, which multiplies (float)code as a weight would a value.
   Values inside of keys (multi-head latent attention: DeepSeek-AI, "DeepSeek-V2", 2024): an element
   of o is a sum over the tiles that the query touches in a span, upwards; lane i adds weight times
   element of position 16 t + i by fused multiply-add from zero, where positions that the query does
   not see count as zero; then the lanes are added as a tree. Keys in 8 and 4 bits enter as scale
   times code, which is exact, those of 4 bits rotated: the o of a span is turned back as by
   kvc__key_rotate, over the blocks of that rotation which hold values.
   A score passes through the soft cap (Gemma Team, "Gemma 2", 2024); then the slope of its head
   times the distance is taken off by one fused multiply-add (Press et al., "Train short, test
   long", 2022: ALiBi). Distances are between positions: what was removed in between is not counted.
   Positions are taken in spans of KVC__SPAN, cut at its multiples. A span gives its largest score
   m, the sum l of exp(score - m) (16 lanes, then the tree) and the weighted sum o of the values;
   spans are merged upwards with the rescaling of the online softmax (Milakov and Gimelshein 2018;
   Dao et al., "FlashAttention", 2022). A sink (OpenAI, "gpt-oss", 2025) is merged last, as a span
   with one score and no value. So the result depends on the row's position and on nothing else: not
   on pages, chunks, groups or who else is computed.
   A register tile is 6, 4, 2 or 1 queries by some vectors of positions or dimensions. Which queries
   share one changes no sum, since each has its lanes to itself. */

/* Queries of the next tile if n are left: the sizes that KVC__CHOOSE has a copy for. */
static uint32_t KVC__(tile_queries)(uint32_t n)
{
    return n >= 6 ? 6 : n >= 4 ? 4 : n >= 2 ? 2 : 1;
}

/* Calls the copy of f, or f_codes for quantized types, for n_q queries and a type of the cache,
   which are its last parameters. */
#define KVC__CASES(f, type, ...) \
    case 8 * type + 1: KVC__(f)(__VA_ARGS__, type, 1); break; \
    case 8 * type + 2: KVC__(f)(__VA_ARGS__, type, 2); break; \
    case 8 * type + 4: KVC__(f)(__VA_ARGS__, type, 4); break; \
    case 8 * type + 6: KVC__(f)(__VA_ARGS__, type, 6); break;
#define KVC__CHOOSE(f, type, n_q, ...) \
    switch (8 * (uint32_t)(type) + (n_q)) { \
    KVC__CASES(f, KVC_KV_F32, __VA_ARGS__) \
    KVC__CASES(f, KVC_KV_F16, __VA_ARGS__) \
    KVC__CASES(f##_codes, KVC_KV_Q8, __VA_ARGS__) \
    KVC__CASES(f##_codes, KVC_KV_Q4, __VA_ARGS__) \
    default: break; \
    }

/* 16 elements of a type of the cache, a constant where this is called. */
KVC__FORCE KVC__(vec) KVC__(load_kv)(const unsigned char *p, const kvc_kv_type type)
{
    if (type == KVC_KV_F16) return KVC__(load_f16)(p);
    return KVC__(load)((const float *)(const void *)p);
}

/* Whether queries are in 8 bits. */
KVC__FORCE int KVC__(query_coded)(const kvc__attn *a, const kvc__span *s)
{
    return kvc__kv_coded(a->type_k) && !s->marked;
}

/* Floats that a query takes in the copy that the tiles read. */
KVC__FORCE size_t KVC__(query_floats)(const kvc__attn *a, const kvc__span *s)
{
    if (!KVC__(query_coded)(a, s)) return a->head_dim;
    return (size_t)kvc__div_up(a->head_dim, 32) * (KVC__Q8_BYTES / 4);
}

/* Copies the queries for the tiles of a span: [tile, head_dim, queries of the tile], or in 8 bits,
   a group as high as the tile; turned back by the gap of the extent, if it is not the last. */
static void KVC__(pack_queries)(const kvc__attn *a, const kvc__span *s, float *q)
{
    const float *turn = a->turns + (size_t)s->extent * 2 * a->rope_dim;
    const uint32_t n = a->n_rows * a->n_q, whole = kvc__div_up(a->head_dim, 32) * 32;
    const int coded = KVC__(query_coded)(a, s);
    const size_t size = KVC__(query_floats)(a, s);
    float *turned = q + (size_t)n * whole;
    uint32_t i, j, d, n_q;
    memset(turned, 0, whole * sizeof *turned);
    for (i = 0; i < n; i += n_q, q += n_q * size) {
        n_q = KVC__(tile_queries)(n - i);
        for (j = 0; j < n_q; j++) {
            memcpy(turned, a->q + (i + j) / a->n_q * a->q_stride + (i + j) % a->n_q * a->head_dim,
                a->head_dim * sizeof *turned);
            if (s->extent + 1 < a->n_extents)
                KVC__(rope)(turned, 1, a->head_dim, a->rope_dim, a->apart, turn, 1.0f);
            if (coded && a->type_k == KVC_KV_Q4) kvc__key_rotate(turned, a->head_dim);
            if (coded)
                KVC__(quantize)(turned, whole, (unsigned char *)(void *)q, j, n_q);
            else
                for (d = 0; d < a->head_dim; d++) q[d * n_q + j] = turned[d];
        }
    }
}

/* Scores of the n_q queries of a tile with four tiles of keys. */
KVC__FORCE void KVC__(scores_n)(const float *q, uint32_t head_dim, const unsigned char *const *k,
    const kvc__ahead *ahead, float *score, const kvc_kv_type type, const uint32_t n_q)
{
    const uint32_t wide = KVC__WIDE(n_q);
    const size_t step = 16 * kvc__kv_size(type);
    const size_t skip = step * head_dim / ahead->n * ahead->i, slow = step / ahead->n;
    KVC__(vec) acc[6][4], kv[4], x;
    uint32_t i, h, t, first;
    for (first = 0; first < 4; first += wide, q -= n_q * head_dim) {
        KVC__FLAT
        for (h = 0; h < n_q; h++) {
            KVC__FLAT
            for (t = 0; t < wide; t++) acc[h][t] = KVC__(set1)(0.0f);
        }
        for (i = 0; i < head_dim; i++, q += n_q) {
            KVC__FLAT
            for (t = 0; t < wide; t++) {
                kv[t] = KVC__(load_kv)(k[first + t] + i * step, type);
                kvc__ask_ahead(ahead, first + t, skip + i * slow);
            }
            KVC__FLAT
            for (h = 0; h < n_q; h++) {
                x = KVC__(set1)(q[h]);
                KVC__FLAT
                for (t = 0; t < wide; t++) acc[h][t] = KVC__(fma)(x, kv[t], acc[h][t]);
            }
        }
        KVC__FLAT
        for (h = 0; h < n_q; h++) {
            KVC__FLAT
            for (t = 0; t < wide; t++)
                KVC__(store)(score + h * KVC__WEIGHT_STRIDE + 16 * (first + t), acc[h][t]);
        }
    }
}

/* The same with keys in codes, for which q is in 8 bits. The sums of a block are exact; score takes
   them block by block. */
KVC__FORCE void KVC__(scores_n_codes)(const float *q, uint32_t head_dim,
    const unsigned char *const *k, const kvc__ahead *ahead, float *score, const kvc_kv_type type,
    const uint32_t n_q)
{
    const uint32_t n_p = KVC__KEY_PIECES(n_q), n_blocks = kvc__div_up(head_dim, 32);
    const int nibbles = type == KVC_KV_Q4, packed = nibbles ? KVC__Q4_0 : KVC__Q8_0;
    const uint32_t zero = nibbles ? KVC__ZERO_NIBBLES : KVC__ZERO_BYTES;
    const size_t block = 16 * (2 + (size_t)kvc__kv_codes(type)), skip = block * n_blocks / ahead->n;
    uint32_t first, b, j, h, p;
    for (first = 0; first < 64; first += n_p * KVC__NATIVE) {
        const unsigned char *x = (const unsigned char *)q;
        for (b = 0; b < n_blocks; b++, x += n_q * KVC__Q8_BYTES) {
            const unsigned char *d = x + 32 * n_q, *w[KVC__MOST_PIECES];
            KVC__(dots) s[6][KVC__MOST_PIECES];
            size_t next = skip * ahead->i + b * block / ahead->n;
            KVC__FLAT
            for (p = 0; p < n_p; p++) w[p] = k[(first + p * KVC__NATIVE) / 16] + b * block;
            KVC__FLAT
            for (h = 0; h < n_q; h++) {
                int32_t start = KVC__(less_zero)(kvc__rd32(d + 4 * (n_q + h)), zero);
                KVC__FLAT
                for (p = 0; p < n_p; p++) s[h][p] = KVC__(dots_init)(start, nibbles);
            }
            KVC__FLAT
            for (j = 0; j < 8; j++) {
                KVC__(codes) c[KVC__MOST_PIECES];
                KVC__FLAT
                for (p = 0; p < n_p; p++) {
                    const uint32_t lane = first + p * KVC__NATIVE;
                    c[p] = KVC__(codes_at)(w[p] + 32 + 4 * (lane % 16), j, packed);
                    if (4 * j < kvc__kv_codes(type))
                        kvc__ask_ahead(ahead, lane / 16, next + 64 * j / ahead->n);
                }
                KVC__FLAT
                for (h = 0; h < n_q; h++) {
                    KVC__(x4) xv = KVC__(x4_load)(x + 32 * h + 4 * j);
                    KVC__FLAT
                    for (p = 0; p < n_p; p++) s[h][p] = KVC__(dots_add)(s[h][p], c[p], xv, nibbles);
                }
            }
            KVC__FLAT
            for (h = 0; h < n_q; h++) {
                int32_t start = KVC__(less_zero)(kvc__rd32(d + 4 * (n_q + h)), zero);
                KVC__(native) xd = KVC__(native_set1)(kvc__rdf32(d + 4 * h));
                KVC__FLAT
                for (p = 0; p < n_p; p++) {
                    const uint32_t lane = first + p * KVC__NATIVE;
                    float *sum = score + h * KVC__WEIGHT_STRIDE + lane;
                    KVC__(native) wd = KVC__(native_scales)(w[p] + 2 * (lane % 16));
                    if (h == 0) kvc__ask_ahead(ahead, lane / 16, next + (block - 32) / ahead->n);
                    KVC__(native) was = b == 0 ? KVC__(native_set1)(0.0f) : KVC__(native_load)(sum);
                    KVC__(native_store)(sum, KVC__(native_fma)(
                        KVC__(dots_end)(s[h][p], start, nibbles), KVC__(native_mul)(wd, xd), was));
                }
            }
        }
    }
}

static void KVC__(scores_tile)(const float *q, uint32_t head_dim, const unsigned char *const *k,
    const kvc__ahead *ahead, float *score, kvc_kv_type type, uint32_t n_q)
{
    KVC__CHOOSE(scores_n, type, n_q, q, head_dim, k, ahead, score)
}

/* As kvc__key_rotate, which is its own inverse, for the 16 keys of a tile. */
static void KVC__(rotate_keys)(float *k, uint32_t width)
{
    const uint32_t block = width & (0u - width);
    const KVC__(vec) scale = KVC__(set1)(1.0f / sqrtf((float)block));
    uint32_t apart, i, j;
    for (apart = 1; apart < block; apart *= 2)
        for (i = 0; i < width; i += 2 * apart)
            for (j = i; j < i + apart; j++) {
                KVC__(vec) a = KVC__(load)(k + 16 * j), b = KVC__(load)(k + 16 * (j + apart));
                KVC__(store)(k + 16 * j, KVC__(add)(a, b));
                KVC__(store)(k + 16 * (j + apart), KVC__(sub)(a, b));
            }
    for (i = 0; i < width; i++)
        KVC__(store)(k + 16 * i, KVC__(mul)(KVC__(load)(k + 16 * i), scale));
}

/* Keys of a tile in floats, element by element. */
static void KVC__(load_keys)(const kvc__attn *a, const unsigned char *tile, float *k)
{
    uint32_t i;
    if (kvc__kv_coded(a->type_k)) {
        kvc__key_floats(a->type_k, tile, a->head_dim, k);
        if (a->type_k == KVC_KV_Q4) KVC__(rotate_keys)(k, a->head_dim);
    } else if (a->type_k == KVC_KV_F16) {
        for (i = 0; i < a->head_dim; i++) KVC__(store)(k + 16 * i, KVC__(load_f16)(tile + 32 * i));
    } else {
        memcpy(k, tile, 16 * (size_t)a->head_dim * sizeof *k);
    }
}

/* Turns the keys of a tile on: pairs of dimensions as in `rope`, a lane for each position. */
static void KVC__(turn_keys)(const kvc__attn *a, const float *turn, float *k)
{
    uint32_t i;
    for (i = 0; i < a->rope_dim / 2; i++, turn += 32) {
        float *first = k + 16 * (a->apart == 1 ? 2 * i : i), *second = first + 16 * a->apart;
        KVC__(vec) c = KVC__(load)(turn), s = KVC__(load)(turn + 16);
        KVC__(vec) x = KVC__(load)(first), y = KVC__(load)(second);
        KVC__(store)(first, KVC__(sub)(KVC__(mul)(x, c), KVC__(mul)(y, s)));
        KVC__(store)(second, KVC__(add)(KVC__(mul)(y, c), KVC__(mul)(x, s)));
    }
}

/* Four tiles of a span with marks, in floats and turned on, in k. */
static void KVC__(turn_tiles)(const kvc__attn *a, const kvc__span *s, uint32_t tile, float *k,
    const unsigned char **at)
{
    const size_t turns = (size_t)a->rope_dim * 16;
    uint32_t i, number;
    for (i = 0; i < 4; i++, k += 16 * a->head_dim) {
        at[i] = (const unsigned char *)k;
        KVC__(load_keys)(a, s->k[tile + i], k);
        number = s->start / 16 + tile + i;
        if (16 * number < a->n_marked) KVC__(turn_keys)(a, a->mark_turns + number * turns, k);
    }
}

/* Scores of all queries with four tiles of keys; k is for floats of those. */
static void KVC__(scores_four)(const kvc__attn *a, const kvc__span *s, uint32_t tile,
    kvc__ahead *ahead, const float *q, float *k, float *score)
{
    const unsigned char *turned[4], *const *at = s->k + tile;
    const kvc_kv_type type = s->marked ? KVC_KV_F32 : a->type_k;
    uint32_t i, n_q;
    if (s->marked) {
        KVC__(turn_tiles)(a, s, tile, k, turned);
        at = turned;
    }
    kvc__ask_begin(ahead->at, 4);
    ahead->n = (s->n_queries + 5) / 6;
    ahead->i = 0;
    for (i = 0; i < s->n_queries; i += n_q) {
        n_q = KVC__(tile_queries)(s->n_queries - i);
        KVC__(scores_tile)(q + i * KVC__(query_floats)(a, s), a->head_dim, at, ahead,
            score + i * KVC__WEIGHT_STRIDE, type, n_q);
        ahead->i++;
    }
}

/* Scores of all queries with the positions that any of them sees, four tiles of keys at a time. */
static void KVC__(scores)(const kvc__attn *a, const kvc__span *s, const float *q, float *k,
    float *score)
{
    uint32_t tile;
    kvc__ahead ahead;
    for (tile = s->first & ~3u; tile < s->last; tile += 4) {
        ahead.at = tile + 8 < s->last ? s->k + tile + 8
            : s->v + (s->first & ~7u) + (tile + 4 < s->last ? 0 : 4);
        KVC__(scores_four)(a, s, tile, &ahead, q, k, score + 16 * tile);
    }
}

/* The cap and the slope of one query, for the tiles that positions lo to hi of a span touch; score
   points to the first of them. */
static void KVC__(shape_scores)(const kvc__attn *a, const kvc__span *s, uint32_t query,
    float *score, uint32_t lo, uint32_t hi)
{
    static const float lanes[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    const KVC__(vec) lane = KVC__(load)(lanes);
    const int64_t own = (int64_t)a->slot + query / a->n_q - a->extents[s->extent].gap;
    uint32_t i;
    for (i = lo & ~15u; i < hi; i += 16, score += 16) {
        KVC__(vec) x = KVC__(load)(score);
        if (a->soft_cap > 0) x = KVC__(soft_cap16)(x, KVC__(set1)(a->soft_cap));
        if (a->slopes != NULL) {
            const float distance = (float)(own - s->start - i);     /* of lane 0 */
            x = KVC__(fma)(KVC__(set1)(a->slopes[query % a->n_q]),
                KVC__(sub)(lane, KVC__(set1)(distance)), x);
        }
        KVC__(store)(score, x);
    }
}

KVC__FORCE int KVC__(has_shape)(const kvc__attn *a)
{
    return a->soft_cap > 0 || a->slopes != NULL;
}

/* The largest score of the positions from lo to hi. Of the tiles they touch, the rest becomes
   -infinity. */
KVC__FORCE float KVC__(top_score)(float *score, uint32_t lo, uint32_t hi)
{
    const float none = -kvc__bits_f32(0x7f800000u);
    uint32_t i, first = lo & ~15u, last = (hi + 15u) & ~15u;
    KVC__(vec) top;
    for (i = first; i < lo; i++) score[i] = none;
    for (i = hi; i < last; i++) score[i] = none;
    top = KVC__(load)(score + first);
    for (i = first + 16; i < last; i += 16) top = KVC__(max)(KVC__(load)(score + i), top);
    return KVC__(max_lane)(top);
}

/* score := exp(score - m) over the same tiles; returns the sum. */
KVC__FORCE float KVC__(weights)(float *score, uint32_t lo, uint32_t hi, float m)
{
    const KVC__(vec) top = KVC__(set1)(m);
    KVC__(vec) sum = KVC__(set1)(0.0f), e;
    uint32_t i, last = (hi + 15u) & ~15u;
    for (i = lo & ~15u; i < last; i += 16) {
        e = KVC__(exp_low)(KVC__(sub)(KVC__(load)(score + i), top));
        KVC__(store)(score + i, e);
        sum = KVC__(add)(sum, e);
    }
    return KVC__(sum)(sum);
}

/* Scores to weights, with m and l of each part. Two passes, so that no query waits for another's
   largest score. */
static void KVC__(softmax)(const kvc__attn *a, const kvc__span *s, float *score, float *part)
{
    const size_t stride = kvc__part_floats(a->v_stride);
    uint32_t i;
    for (i = 0; i < s->n_queries; i++) {
        if (s->lo[i] == s->hi[i]) continue;
        if (KVC__(has_shape)(a))
            KVC__(shape_scores)(a, s, i, score + i * KVC__WEIGHT_STRIDE + (s->lo[i] & ~15u),
                s->lo[i], s->hi[i]);
        part[i * stride + a->v_stride] =
            KVC__(top_score)(score + i * KVC__WEIGHT_STRIDE, s->lo[i], s->hi[i]);
    }
    for (i = 0; i < s->n_queries; i++) {
        float *m = part + i * stride + a->v_stride;
        if (s->lo[i] == s->hi[i]) continue;
        m[1] = KVC__(weights)(score + i * KVC__WEIGHT_STRIDE, s->lo[i], s->hi[i], m[0]);
    }
}

/* Adds the weighted values of the positions from lo to hi to n_q sums, `wide` vectors of each. */
KVC__FORCE void KVC__(values_wide)(const kvc__span *s, uint32_t lo, uint32_t hi,
    const kvc__ahead *ahead, const float *weight, float *o, uint32_t v_stride, uint32_t d,
    const kvc_kv_type type, const uint32_t n_q, const uint32_t wide)
{
    const size_t size = kvc__kv_size(type), row = v_stride * size;
    const size_t o_stride = kvc__part_floats(v_stride);
    const size_t skip = 16 * row / ahead->n * ahead->i + d * size, slow = row / ahead->n;
    KVC__(vec) acc[6][4], v[4], x;
    uint32_t h, t, p, stop;
    KVC__FLAT
    for (h = 0; h < n_q; h++) {
        KVC__FLAT
        for (t = 0; t < wide; t++) acc[h][t] = KVC__(load)(o + h * o_stride + d + 16 * t);
    }
    for (p = lo; p < hi;) {
        const unsigned char *at = s->v[p / 16] + d * size + p % 16 * row;
        const uint32_t tile = p / 16 % 8;
        size_t next = skip + p % 16 * slow;
        stop = (p | 15u) + 1u < hi ? (p | 15u) + 1u : hi;
        for (; p < stop; p++, at += row, next += slow) {
            KVC__FLAT
            for (t = 0; t < wide; t++) {
                v[t] = KVC__(load_kv)(at + 16 * t * size, type);
                if (16 * t * size % 64 == 0) kvc__ask_ahead(ahead, tile, next + 16 * t * size);
            }
            KVC__FLAT
            for (h = 0; h < n_q; h++) {
                x = KVC__(set1)(weight[h * KVC__WEIGHT_STRIDE + p]);
                KVC__FLAT
                for (t = 0; t < wide; t++) acc[h][t] = KVC__(fma)(x, v[t], acc[h][t]);
            }
        }
    }
    KVC__FLAT
    for (h = 0; h < n_q; h++) {
        KVC__FLAT
        for (t = 0; t < wide; t++) KVC__(store)(o + h * o_stride + d + 16 * t, acc[h][t]);
    }
}

KVC__FORCE void KVC__(values_n)(const kvc__span *s, uint32_t lo, uint32_t hi,
    const kvc__ahead *ahead, const float *weight, float *o, uint32_t v_stride,
    const kvc_kv_type type, const uint32_t n_q)
{
    const uint32_t wide = KVC__WIDE(n_q);
    uint32_t d = 0;
    for (; d + 16 * wide <= v_stride; d += 16 * wide)
        KVC__(values_wide)(s, lo, hi, ahead, weight, o, v_stride, d, type, n_q, wide);
    for (; d < v_stride; d += 16)
        KVC__(values_wide)(s, lo, hi, ahead, weight, o, v_stride, d, type, n_q, 1);
}

/* 16 elements of a row of codes, the t-th from where a block begins. */
KVC__FORCE KVC__(vec) KVC__(load_code)(const unsigned char *p, const uint32_t t,
    const kvc_kv_type type)
{
    if (type == KVC_KV_Q8) return KVC__(load_i8)(p + 16 * t);
    return KVC__(load_i4)(p + t / 2 * 16, (int)(t % 2));
}

/* As values_wide; the sums begin with the vector `half` (0, or 1 if they are one vector wide) of a
   block. */
KVC__FORCE void KVC__(values_wide_codes)(const kvc__span *s, uint32_t lo, uint32_t hi,
    const kvc__ahead *ahead, const float *weight, float *o, uint32_t v_stride, uint32_t d,
    const kvc_kv_type type, const uint32_t n_q, const uint32_t wide, const uint32_t half)
{
    const uint32_t n_blocks = kvc__div_up(v_stride, 32);
    const size_t o_stride = kvc__part_floats(v_stride);
    const size_t row = (size_t)n_blocks * kvc__kv_codes(type);
    const size_t from = 32 * n_blocks + d / 32 * kvc__kv_codes(type);
    const size_t skip = from + 16 * row / ahead->n * ahead->i, slow = row / ahead->n;
    KVC__(vec) acc[6][4], v[4];
    float scaled[6][2][16];
    uint32_t h, t, p, stop;
    KVC__FLAT
    for (h = 0; h < n_q; h++) {
        KVC__FLAT
        for (t = 0; t < wide; t++) acc[h][t] = KVC__(load)(o + h * o_stride + d + 16 * t);
    }
    for (p = lo; p < hi;) {
        const unsigned char *scales = s->v[p / 16] + d / 32 * 32;
        const unsigned char *at = s->v[p / 16] + from + p % 16 * row;
        const uint32_t tile = p / 16 % 8;
        size_t next = skip + p % 16 * slow;
        KVC__FLAT
        for (t = 0; t < wide; t += 2) {
            KVC__(vec) scale = KVC__(load_f16)(scales + 16 * t);
            KVC__FLAT
            for (h = 0; h < n_q; h++)
                KVC__(store)(scaled[h][t / 2], KVC__(mul)(scale,
                    KVC__(load)(weight + h * KVC__WEIGHT_STRIDE + p / 16 * 16)));
        }
        stop = (p | 15u) + 1u < hi ? (p | 15u) + 1u : hi;
        for (; p < stop; p++, at += row, next += slow) {
            KVC__FLAT
            for (t = 0; t < wide; t++) v[t] = KVC__(load_code)(at, half + t, type);
            kvc__ask_ahead(ahead, tile, next);
            KVC__FLAT
            for (h = 0; h < n_q; h++) {
                KVC__FLAT
                for (t = 0; t < wide; t++)
                    acc[h][t] = KVC__(fma)(KVC__(set1)(scaled[h][t / 2][p % 16]), v[t], acc[h][t]);
            }
        }
    }
    KVC__FLAT
    for (h = 0; h < n_q; h++) {
        KVC__FLAT
        for (t = 0; t < wide; t++) KVC__(store)(o + h * o_stride + d + 16 * t, acc[h][t]);
    }
}

KVC__FORCE void KVC__(values_n_codes)(const kvc__span *s, uint32_t lo, uint32_t hi,
    const kvc__ahead *ahead, const float *weight, float *o, uint32_t v_stride,
    const kvc_kv_type type, const uint32_t n_q)
{
    const uint32_t wide = KVC__WIDE(n_q);
    uint32_t d = 0;
    for (; wide > 1 && d + 16 * wide <= v_stride; d += 16 * wide)
        KVC__(values_wide_codes)(s, lo, hi, ahead, weight, o, v_stride, d, type, n_q, wide, 0);
    for (; d < v_stride; d += 32) {
        KVC__(values_wide_codes)(s, lo, hi, ahead, weight, o, v_stride, d, type, n_q, 1, 0);
        if (d + 16 < v_stride)
            KVC__(values_wide_codes)(s, lo, hi, ahead, weight, o, v_stride, d + 16, type, n_q, 1,
                1);
    }
}

static void KVC__(values_range)(const kvc__attn *a, const kvc__span *s, uint32_t lo, uint32_t hi,
    const kvc__ahead *ahead, const float *weight, float *o, uint32_t n_q)
{
    if (lo >= hi) return;
    KVC__CHOOSE(values_n, a->type_v, n_q, s, lo, hi, ahead, weight, o, a->v_stride)
}

/* Of the positions from `from` to `to`, adds to each query of a tile the values that it sees: those
   that all see together, those before and after for each query alone. */
static void KVC__(values_tile)(const kvc__attn *a, const kvc__span *s, uint32_t query, uint32_t n_q,
    uint32_t from, uint32_t to, const kvc__ahead *ahead, const float *weight, float *o)
{
    const size_t o_stride = kvc__part_floats(a->v_stride);
    const uint32_t *lo = s->lo + query, *hi = s->hi + query;
    uint32_t all_lo = lo[n_q - 1] > from ? lo[n_q - 1] : from, all_hi = hi[0] < to ? hi[0] : to, i;
    if (all_lo >= all_hi) all_lo = all_hi = to;
    for (i = 0; i < n_q; i++)
        KVC__(values_range)(a, s, lo[i] > from ? lo[i] : from, hi[i] < all_lo ? hi[i] : all_lo,
            ahead, weight + i * KVC__WEIGHT_STRIDE, o + i * o_stride, 1);
    KVC__(values_range)(a, s, all_lo, all_hi, ahead, weight, o, n_q);
    for (i = 0; i < n_q; i++)
        KVC__(values_range)(a, s, lo[i] > all_hi ? lo[i] : all_hi, hi[i] < to ? hi[i] : to,
            ahead, weight + i * KVC__WEIGHT_STRIDE, o + i * o_stride, 1);
}

/* The weighted sums of all queries, eight tiles of values at a time. */
static void KVC__(values)(const kvc__attn *a, const kvc__span *s, const float *weight, float *part)
{
    const size_t stride = kvc__part_floats(a->v_stride);
    uint32_t tile, i, n_q;
    kvc__ahead ahead;
    for (i = 0; i < s->n_queries; i++) memset(part + i * stride, 0, a->v_stride * sizeof(float));
    for (tile = s->first & ~7u; tile < s->last; tile += 8) {
        ahead.at = tile + 8 < s->last ? s->v + tile + 8 : s->k + KVC__SPAN_TILES;
        kvc__ask_begin(ahead.at, 8);
        ahead.n = (s->n_queries + 5) / 6;
        ahead.i = 0;
        for (i = 0; i < s->n_queries; i += n_q) {
            n_q = KVC__(tile_queries)(s->n_queries - i);
            KVC__(values_tile)(a, s, i, n_q, 16 * tile, 16 * tile + 128, &ahead,
                weight + i * KVC__WEIGHT_STRIDE, part + i * stride);
            ahead.i++;
        }
    }
}

/* ---- values inside of keys ---- */

/* Sums of n_q queries over the tiles from first to last, `wide` elements from `from` on, in lanes:
   [queries, 4, 16]. */
KVC__FORCE void KVC__(key_lanes)(const unsigned char *const *k, uint32_t first, uint32_t last,
    const float *weight, size_t from, float *sums, const kvc_kv_type type, const uint32_t n_q,
    const uint32_t wide)
{
    const size_t size = kvc__kv_size(type);
    const int format = type == KVC_KV_F16 ? KVC__F16 : KVC__F32;
    KVC__(native) acc[6][4], x[4], w;
    uint32_t lane, t, h, j;
    for (lane = 0; lane < 16; lane += KVC__NATIVE) {
        KVC__FLAT
        for (h = 0; h < n_q; h++) {
            KVC__FLAT
            for (j = 0; j < wide; j++) acc[h][j] = KVC__(native_set1)(0.0f);
        }
        for (t = first; t < last; t++) {
            const unsigned char *at = k[t] + (16 * from + lane) * size;
            KVC__FLAT
            for (j = 0; j < wide; j++) x[j] = KVC__(native_load_w)(at + 16 * j * size, format);
            KVC__FLAT
            for (h = 0; h < n_q; h++) {
                w = KVC__(native_load)(weight + h * KVC__WEIGHT_STRIDE + 16 * t + lane);
                KVC__FLAT
                for (j = 0; j < wide; j++) acc[h][j] = KVC__(native_fma)(w, x[j], acc[h][j]);
            }
        }
        KVC__FLAT
        for (h = 0; h < n_q; h++) {
            KVC__FLAT
            for (j = 0; j < wide; j++)
                KVC__(native_store)(sums + 64 * h + 16 * j + lane, acc[h][j]);
        }
    }
}

/* The sums of n elements, which tiles begin with. */
KVC__FORCE void KVC__(key_sums)(const unsigned char *const *k, uint32_t first, uint32_t last,
    const float *weight, float *o, size_t o_stride, uint32_t n, const kvc_kv_type type,
    const uint32_t n_q)
{
    const uint32_t wide = KVC__ELEMENTS(n_q);
    float sums[6 * 4 * 16];
    uint32_t d, j, h;
    for (d = 0; d + 4 <= n; d += 4) {
        for (j = 0; j < 4; j += wide)
            KVC__(key_lanes)(k, first, last, weight, d + j, sums + 16 * j, type, n_q, wide);
        for (h = 0; h < n_q; h++) KVC__(sum4)(o + h * o_stride + d, sums + 64 * h);
    }
    for (; d < n; d++) {
        KVC__(key_lanes)(k, first, last, weight, d, sums, type, n_q, 1);
        for (h = 0; h < n_q; h++)
            o[h * o_stride + d] = KVC__(sum)(KVC__(load)(sums + 64 * h));
    }
}

/* Copies n elements of a tile, with zeros in the lanes that are not from lo to hi. */
static const unsigned char *KVC__(cut_keys)(float *to, const unsigned char *from, uint32_t n,
    uint32_t lo, uint32_t hi, kvc_kv_type type)
{
    static const float lanes[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    const KVC__(vec) lane = KVC__(load)(lanes), zero = KVC__(set1)(0.0f);
    const KVC__(vec) begin = KVC__(set1)((float)lo), end = KVC__(set1)((float)hi);
    uint16_t *halves = (uint16_t *)(void *)to;
    KVC__(vec) x;
    uint32_t i;
    for (i = 0; i < n; i++) {
        if (type == KVC_KV_F16) x = KVC__(load_f16)(from + 32 * i);
        else x = KVC__(load)((const float *)(const void *)(from + 64 * i));
        x = KVC__(if_less)(lane, begin, zero, KVC__(if_less)(lane, end, x, zero));
        if (type == KVC_KV_F16) KVC__(store_f16)(halves + 16 * i, x);
        else KVC__(store)(to + 16 * i, x);
    }
    return (const unsigned char *)to;
}

/* The sums of n elements, which the tiles `at` begin with, for the queries of a row, which all see
   positions lo to hi. Rows have tiles of queries to themselves, so that each adds its own tiles and
   no others; cut is for two copies of tiles. */
static void KVC__(key_row)(const kvc__attn *a, uint32_t lo, uint32_t hi,
    const unsigned char *const *at, float *cut, const float *weight, float *o, size_t o_stride,
    uint32_t n)
{
    const kvc_kv_type type = kvc__kv_coded(a->type_k) ? KVC_KV_F32 : a->type_k;
    const uint32_t first = lo / 16, last = (hi + 15) / 16;
    const unsigned char *k[KVC__SPAN_TILES];
    uint32_t i, n_q;
    memcpy(k + first, at + first, (last - first) * sizeof *k);
    if (lo % 16 != 0)
        k[first] = KVC__(cut_keys)(cut, at[first], n, lo % 16, hi - 16 * first, type);
    if (hi % 16 != 0 && (lo % 16 == 0 || last > first + 1))
        k[last - 1] = KVC__(cut_keys)(cut + KVC__KEY_BLOCK, at[last - 1], n, 0, hi % 16, type);
    for (i = 0; i < a->n_q; i += n_q, weight += n_q * KVC__WEIGHT_STRIDE, o += n_q * o_stride) {
        n_q = KVC__(tile_queries)(a->n_q - i);
        switch (8 * (uint32_t)type + n_q) {
        KVC__CASES(key_sums, KVC_KV_F32, k, first, last, weight, o, o_stride, n)
        KVC__CASES(key_sums, KVC_KV_F16, k, first, last, weight, o, o_stride, n)
        default: break;
        }
    }
}

/* Block b of 32 elements of a tile in codes as floats; those of 4 bits stay rotated. */
static void KVC__(key_block)(kvc_kv_type type, const unsigned char *tile, uint32_t b, float *to)
{
    const unsigned char *p = tile + (size_t)b * 16 * (2 + kvc__kv_codes(type));
    const KVC__(vec) scale = KVC__(load_f16)(p);
    uint32_t i;
    p += 32;
    for (i = 0; i < 32; i++) {
        const int up = 24 - 8 * (int)(i % 4);
        KVC__(vec) x;
        if (type == KVC_KV_Q8) x = KVC__(load_field)(p + i / 4 * 64, 0, up, 24);
        else x = KVC__(load_field)(p + i % 16 / 4 * 64, 0x88888888u, i < 16 ? up + 4 : up, 28);
        KVC__(store)(to + 16 * i, KVC__(mul)(scale, x));
    }
}

/* As kvc__key_rotate for the sums of n queries, block by block; t: [width, 16] for 16 at a time. */
static void KVC__(rotate_sums)(float *sums, uint32_t n, uint32_t width, uint32_t block, float *t)
{
    uint32_t i, j, d, m;
    for (i = 0; i < n; i += 16, sums += 16 * (size_t)width) {
        m = n - i < 16 ? n - i : 16;
        if (m < 16) memset(t, 0, 16 * (size_t)width * sizeof *t);
        for (d = 0; d < width; d += 4) {
            for (j = 0; j + 4 <= m; j += 4)
                KVC__(turn4)(t + 16 * d + j, 16, sums + (size_t)j * width + d, width);
            for (; j < m; j++) {
                t[16 * d + j] = sums[(size_t)j * width + d];
                t[16 * d + 16 + j] = sums[(size_t)j * width + d + 1];
                t[16 * d + 32 + j] = sums[(size_t)j * width + d + 2];
                t[16 * d + 48 + j] = sums[(size_t)j * width + d + 3];
            }
        }
        for (d = 0; d < width; d += block) KVC__(rotate_keys)(t + 16 * d, block);
        for (d = 0; d < width; d += 4) {
            for (j = 0; j + 4 <= m; j += 4)
                KVC__(turn4)(sums + (size_t)j * width + d, width, t + 16 * d + j, 16);
            for (; j < m; j++) {
                sums[(size_t)j * width + d] = t[16 * d + j];
                sums[(size_t)j * width + d + 1] = t[16 * d + 16 + j];
                sums[(size_t)j * width + d + 2] = t[16 * d + 32 + j];
                sums[(size_t)j * width + d + 3] = t[16 * d + 48 + j];
            }
        }
    }
}

/* The weighted sums of all queries. work: first the sums of keys in codes, of whole blocks; behind
   them what turns these back; last the blocks of a span. */
static void KVC__(values_in_keys)(const kvc__attn *a, const kvc__span *s, const float *weight,
    float *part, float *work)
{
    const int coded = kvc__kv_coded(a->type_k), rotated = a->type_k == KVC_KV_Q4;
    const uint32_t whole = kvc__div_up(a->head_dim, 32) * 32;
    const uint32_t turn = rotated ? a->head_dim & (0u - a->head_dim) : 1;
    const uint32_t unit = !coded ? 1 : turn < 32 ? 32 : turn, end = a->v_from + a->head_dim_v;
    const uint32_t from = a->v_from / unit * unit, to = kvc__div_up(end, unit) * unit;
    const uint32_t width = (to < whole ? to : whole) - from;
    const size_t stride = kvc__part_floats(a->v_stride), o_stride = coded ? width : stride;
    const size_t size = 16 * kvc__kv_size(a->type_k);
    float *o = coded ? work : part, *blocks = work + 64 * (size_t)whole;
    const unsigned char *at[KVC__SPAN_TILES];
    uint32_t i, t, d, n;
    for (i = 0; i < s->n_queries; i++) memset(part + i * stride, 0, a->v_stride * sizeof *part);
    if (coded) memset(work, 0, s->n_queries * o_stride * sizeof *work);
    for (d = 0; d < width; d += 32) {
        n = width - d < 32 ? width - d : 32;
        for (t = s->first; t < s->last; t++) {
            at[t] = s->k[t] + (from + d) * size;
            if (!coded) continue;
            at[t] = (const unsigned char *)(blocks + t * KVC__KEY_BLOCK);
            KVC__(key_block)(a->type_k, s->k[t], (from + d) / 32, blocks + t * KVC__KEY_BLOCK);
        }
        for (i = 0; i < s->n_queries; i += a->n_q) {
            if (s->lo[i] == s->hi[i]) continue;
            KVC__(key_row)(a, s->lo[i], s->hi[i], at, blocks + KVC__SPAN_TILES * KVC__KEY_BLOCK,
                weight + i * KVC__WEIGHT_STRIDE, o + i * o_stride + d, o_stride, n);
        }
    }
    if (rotated)
        KVC__(rotate_sums)(work, s->n_queries, width, turn, work + s->n_queries * (size_t)whole);
    for (i = 0; coded && i < s->n_queries; i++)
        memcpy(part + i * stride, work + i * o_stride + (a->v_from - from),
            a->head_dim_v * sizeof *part);
}

/* state = state * keep + part * take for the queries that see the span. */
static void KVC__(fold_part)(const kvc__attn *a, const kvc__span *s, const float *part)
{
    const size_t stride = kvc__part_floats(a->v_stride);
    float keep[KVC__MAX_QUERIES], take[KVC__MAX_QUERIES];
    uint32_t i, d;
    memset(keep, 0, sizeof keep);
    memset(take, 0, sizeof take);
    for (i = 0; i < s->n_queries; i++) {
        float *m = a->state + i * stride + a->v_stride, m_span = part[i * stride + a->v_stride];
        float top;
        if (s->lo[i] == s->hi[i]) continue;
        top = m_span > *m ? m_span : *m;
        keep[i] = *m - top;
        take[i] = m_span - top;
        *m = top;
    }
    for (i = 0; i < s->n_queries; i += 16) {
        KVC__(store)(keep + i, KVC__(exp)(KVC__(load)(keep + i)));
        KVC__(store)(take + i, KVC__(exp)(KVC__(load)(take + i)));
    }
    for (i = 0; i < s->n_queries; i++) {
        float *o = a->state + i * stride, *l = o + a->v_stride + 1;
        const float *from = part + i * stride;
        KVC__(vec) kept;
        if (s->lo[i] == s->hi[i]) continue;
        *l = *l * keep[i] + from[a->v_stride + 1] * take[i];
        for (d = 0; d < a->v_stride; d += 16) {
            kept = KVC__(mul)(KVC__(load)(o + d), KVC__(set1)(keep[i]));
            KVC__(store)(o + d, KVC__(fma)(KVC__(load)(from + d), KVC__(set1)(take[i]), kept));
        }
    }
}

/* Takes the spans into state, which it sets up, or leaves their parts alone. */
static void KVC__(attention)(const kvc__attn *a)
{
    const uint32_t n = a->n_rows * a->n_q;
    const size_t stride = kvc__part_floats(a->v_stride);
    float *weight = a->work, *part = weight + (size_t)n * KVC__WEIGHT_STRIDE;
    float *q = part + n * stride, *k = q + (n + 1) * (size_t)kvc__div_up(a->head_dim, 32) * 32;
    uint32_t number, i, packed = UINT32_MAX;
    kvc__span s;
    int marked = 0;
    if (a->parts != NULL) part = a->parts;
    else if (!a->goes_on) memset(a->state, 0, n * stride * sizeof(float));
    for (i = 0; a->parts == NULL && !a->goes_on && i < n; i++)
        a->state[i * stride + a->v_stride] = -kvc__bits_f32(0x7f800000u);
        /* makes the first keep 0 and its take 1 */
    for (number = a->from; number < a->to; number++) {
        kvc__span_bounds(&s, a, number);
        kvc__span_tiles(&s, a);
        if (s.extent != packed || s.marked != marked) KVC__(pack_queries)(a, &s, q);
        packed = s.extent;
        marked = s.marked;
        KVC__(scores)(a, &s, q, k, weight);
        KVC__(softmax)(a, &s, weight, part);
        if (a->v_in_k) KVC__(values_in_keys)(a, &s, weight, part, k);
        else KVC__(values)(a, &s, weight, part);
        if (a->parts != NULL) part += n * stride;
        else KVC__(fold_part)(a, &s, part);
    }
}

/* Takes the sinks into state. */
static void KVC__(fold_sinks)(const kvc__attn *a)
{
    const uint32_t n = a->n_rows * a->n_q;
    const size_t stride = kvc__part_floats(a->v_stride);
    float keep[KVC__MAX_QUERIES], take[KVC__MAX_QUERIES];
    uint32_t i, d;
    memset(keep, 0, sizeof keep);
    memset(take, 0, sizeof take);
    for (i = 0; i < n; i++) {
        float *m = a->state + i * stride + a->v_stride, sink = a->sinks[i % a->n_q];
        float top = *m > sink ? *m : sink;
        keep[i] = *m - top;
        take[i] = sink - top;
        *m = top;
    }
    for (i = 0; i < n; i += 16) {
        KVC__(store)(keep + i, KVC__(exp)(KVC__(load)(keep + i)));
        KVC__(store)(take + i, KVC__(exp)(KVC__(load)(take + i)));
    }
    for (i = 0; i < n; i++) {
        float *o = a->state + i * stride, *l = o + a->v_stride + 1;
        *l = *l * keep[i] + take[i];
        for (d = 0; d < a->v_stride; d += 16)
            KVC__(store)(o + d, KVC__(mul)(KVC__(load)(o + d), KVC__(set1)(keep[i])));
    }
}

/* Takes the parts into state and writes the result. */
static void KVC__(attention_merge)(const kvc__attn *a)
{
    const uint32_t n = a->n_rows * a->n_q;
    const size_t stride = kvc__part_floats(a->v_stride);
    uint32_t number, i, d;
    kvc__span s;
    for (number = a->from; number < a->to; number++) {
        kvc__span_bounds(&s, a, number);
        KVC__(fold_part)(a, &s, a->parts + (number - a->from) * n * stride);
    }
    if (a->sinks != NULL) KVC__(fold_sinks)(a);
    for (i = 0; i < n; i++) {
        const float *o = a->state + i * stride;
        float *out = a->out + i / a->n_q * a->out_stride + i % a->n_q * a->head_dim_v;
        KVC__(vec) l = KVC__(set1)(o[a->v_stride + 1]);
        for (d = 0; d + 16 <= a->head_dim_v; d += 16)
            KVC__(store)(out + d, KVC__(div)(KVC__(load)(o + d), l));
        if (d < a->head_dim_v)
            KVC__(store_n)(out + d, KVC__(div)(KVC__(load)(o + d), l), a->head_dim_v - d);
        if (a->tops != NULL)
            memcpy(a->tops + i / a->n_q * a->tops_stride + i % a->n_q * 2, o + a->v_stride,
                2 * sizeof *o);
    }
}

/* The probabilities of the positions from lo to hi, in fractions of 2^20, are added to tally; score
   points to the first tile that they touch. */
KVC__FORCE void KVC__(add_tally)(float *score, uint32_t lo, uint32_t hi, const float *tops,
    uint64_t *tally)
{
    const KVC__(vec) m = KVC__(set1)(tops[0]), by = KVC__(set1)(1048576.0f / tops[1]);
    uint32_t i, first = lo & ~15u;
    for (i = first; i < hi; i += 16) {
        float *at = score + (i - first);
        KVC__(vec) e = KVC__(exp_low)(KVC__(sub)(KVC__(load)(at), m));
        KVC__(store)(at, KVC__(nearest)(KVC__(mul)(e, by)));
    }
    for (i = lo; i < hi; i++) tally[i] += (uint64_t)(int32_t)score[i - first];
}

/* Adds what four tiles of span `number`, from `tile` on, received from all queries. The scores are
   those of `attention`. */
static void KVC__(attention_tally)(const kvc__attn *a, uint32_t number, uint32_t tile)
{
    const uint32_t n = a->n_rows * a->n_q, begin = 16 * tile;
    float *score = a->work, *q = score + (size_t)n * KVC__WEIGHT_STRIDE;
    float *k = q + (n + 1) * (size_t)kvc__div_up(a->head_dim, 32) * 32;
    uint64_t *tally = a->tally;
    uint32_t i, lo, hi;
    kvc__ahead ahead;
    kvc__span s;
    kvc__span_bounds(&s, a, number);
    if (s.last <= tile || s.first >= tile + 4) return;
    kvc__span_tiles(&s, a);
    ahead.at = s.k + tile + 4;
    KVC__(pack_queries)(a, &s, q);
    KVC__(scores_four)(a, &s, tile, &ahead, q, k, score);
    for (i = 0; i < s.extent; i++) tally += a->extents[i].end - a->extents[i].slot;
    for (i = 0; i < n; i++) {
        const float *tops = a->tops + i / a->n_q * a->tops_stride + i % a->n_q * 2;
        float *at = score + i * KVC__WEIGHT_STRIDE;
        lo = s.lo[i] > begin ? s.lo[i] : begin;
        hi = s.hi[i] < begin + 64 ? s.hi[i] : begin + 64;
        if (lo >= hi) continue;
        at += (lo - begin) & ~15u;
        if (KVC__(has_shape)(a)) KVC__(shape_scores)(a, &s, i, at, lo, hi);
        KVC__(add_tally)(at, lo, hi, tops,
            tally + (ptrdiff_t)s.start - (ptrdiff_t)a->extents[s.extent].slot);
    }
}
#undef KVC__CHOOSE
#undef KVC__CASES

#define KVC__ENTRY(ret, name, args) , KVC__(name)
KVC__TABLE const kvc__kernels KVC__(table) = {
    (kvc_isa)KVC__PASS, KVC__XSTRING(KVC__ISA) KVC__KERNELS(KVC__ENTRY)
};
#undef KVC__ENTRY
#undef KVC__ROW_TILE
#undef KVC__WIDE
#undef KVC__KEY_PIECES
#undef KVC__ELEMENTS
#undef KVC__BLOCK_ROW_TILE
#undef KVC__STRETCH
#undef KVC__OUT_PIECES
#undef KVC__MOST_PIECES
#undef KVC__NATIVE
#undef KVC__ZERO_NIBBLES
#undef KVC__ZERO_BYTES
#undef KVC__FORCE
#undef KVC__FLAT
#undef KVC__
#undef KVC__ISA
#undef KVC__PASS
#endif /* KVC__PASS */

/* REVISIONS
   0.1.0  GGUF, 27 architectures, paged cache, prefill and decode, tokenizers, sampler

   LICENCE
   MIT License

   Copyright (c) 2026 the kvc.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software
   and associated documentation files (the "Software"), to deal in the Software without
   restriction, including without limitation the rights to use, copy, modify, merge, publish,
   distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
   Software is furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or
   substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING
   BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */
