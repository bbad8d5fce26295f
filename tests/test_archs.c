/* What loading makes of an architecture's keys and tensors: defaults, other names, contradictions,
   hostile numbers; and what a model's kind lets its sequences do. */
#define _POSIX_C_SOURCE 200809L
#include "../kvc.h"

#include "testing.h"
#include "zoo.h"

static const zoo_entry *entry(const char *name) {
    size_t i;
    for (i = 0; i < COUNT(zoo); i++) if (!strcmp(zoo[i].name, name)) return &zoo[i];
    fail_msg("no such model: %s", name);
    return NULL;
}

/* Opens an image with all memory counted; what opens must work. */
static kvc_result try_image(const void *image, size_t size) {
    static const kvc_token text[5] = {1, 7, 3, 5, 6};
    counter mem;
    kvc_model_desc desc = {0};
    kvc_model *model;
    kvc_result r;
    memset(&mem, 0, sizeof mem);
    mem.limit = 1u << 27;
    desc.data = image;
    desc.data_size = size;
    desc.allocator = counter_hook(&mem);
    memset(&last, 0, sizeof last);
    r = kvc_model_open(&model, &desc, &last);
    if (r == KVC_OK) {
        kvc_error after = last;
        kvc_cache_desc cache_desc = {0};
        kvc_ctx_desc ctx_desc = {0};
        kvc_cache *cache = NULL;
        kvc_ctx *ctx = NULL;
        kvc_seq *seq = NULL;
        cache_desc.model = ctx_desc.model = model;
        cache_desc.n_ctx = ctx_desc.n_batch = 16;
        if (kvc_cache_new(&cache, &cache_desc, NULL) == KVC_OK &&
            kvc_ctx_new(&ctx, &ctx_desc, NULL) == KVC_OK) {
            OK(kvc_seq_open(&seq, cache, &last));
            OK(kvc_prefill(ctx, seq, text, 5, NULL, &last));
        }
        kvc_seq_close(seq);
        kvc_ctx_free(ctx);
        kvc_cache_free(cache);
        kvc_model_close(model);
        last = after;
    }
    CLEAN(&mem);
    return r;
}

static kvc_result try_edits(const model_shape *shape, const gguf_edit *edits, size_t n) {
    model_shape s = *shape;
    gguf_writer w;
    kvc_result r;
    s.edits = edits;
    s.n_edits = n;
    model_write(&w, &s);
    r = try_image(w.image, w.image_size);
    gguf_free(&w);
    return r;
}

/* ---- contradictions and damage ---- */

#define NUMBER(key, type, value) {key, GGUF_EDIT_NUMBER, GGUF_VALUE_##type, value, NULL, 0, {0}}
#define TEXT(key, value) {key, GGUF_EDIT_TEXT, 0, 0, value, 0, {0}}
#define OMIT(name) {name, GGUF_EDIT_OMIT, 0, 0, NULL, 0, {0}}
#define DIMS(name, n, ...) {name, GGUF_EDIT_DIMS, 0, 0, NULL, n, {__VA_ARGS__}}
#define BAD KVC_ERROR_FORMAT
#define ALIEN KVC_ERROR_UNSUPPORTED

/* An edit of a model, the error's code and place, and what its message must say. */
static const struct {
    const char *model;
    gguf_edit edit;
    kvc_result code;
    const char *where, *said;
} damages[] = {
    {"llama", NUMBER("llama.expert_count", U32, 4), BAD, "llama.expert_used_count", "missing"},
    {"qwen2", NUMBER("qwen2.expert_count", U32, 4), ALIEN, "qwen2.expert_count", "experts"},
    {"mixtral", NUMBER("llama.expert_count", U32, 5), BAD, "blk.0.ffn_gate_inp.weight",
        "expert_count"},
    {"mixtral", NUMBER("llama.expert_count", U32, 100000), BAD, "llama.expert_count", "range"},
    {"mixtral", NUMBER("llama.expert_used_count", U32, 5), BAD, "llama.expert_used_count",
        "expert_count"},
    {"mixtral", NUMBER("llama.expert_used_count", U32, 0), BAD, "llama.expert_used_count", "range"},
    {"mixtral", NUMBER("llama.expert_gating_func", U32, 4), BAD, "llama.expert_gating_func",
        "range"},
    {"mixtral", NUMBER("llama.expert_weights_norm", U32, 1), BAD, "llama.expert_weights_norm",
        "truth"},
    {"mixtral", OMIT("blk.1.ffn_up_exps.weight"), BAD, "blk.1.ffn_up_exps.weight", "missing"},
    {"mixtral", OMIT("blk.0.ffn_gate_inp.weight"), BAD, "blk.0.ffn_gate_inp.weight", "missing"},
    {"mixtral", DIMS("blk.0.ffn_down_exps.weight", 3, 48, 64, 3), BAD,
        "blk.0.ffn_down_exps.weight", "expert_count"},
    {"mixtral", DIMS("blk.0.ffn_gate_exps.weight", 2, 64, 192), BAD,
        "blk.0.ffn_gate_exps.weight", "expert_feed_forward_length"},
    {"qwen2moe", NUMBER("qwen2moe.expert_shared_feed_forward_length", U32, 64), BAD,
        "blk.0.ffn_gate_shexp.weight", "expert_shared_feed_forward_length"},
    {"gpt-oss", DIMS("blk.0.ffn_up_exps.bias", 2, 24, 4), BAD, "blk.0.ffn_up_exps.bias",
        "expert_count"},
    {"gpt-oss", OMIT("blk.0.attn_sinks.weight"), BAD, "blk.0.attn_sinks.weight", "missing"},
    {"gpt-oss", DIMS("blk.0.attn_sinks.weight", 1, 3), BAD, "blk.0.attn_sinks.weight",
        "attention.head_count"},
    {"deepseek2-v3", NUMBER("deepseek2.expert_group_count", U32, 5), BAD,
        "deepseek2.expert_group_count", "expert_count"},
    {"deepseek2-v3", NUMBER("deepseek2.expert_group_count", U32, 12), BAD,
        "deepseek2.expert_group_used_count", "expert_used_count"},
    {"deepseek2-v3", NUMBER("deepseek2.leading_dense_block_count", U32, 3), BAD,
        "deepseek2.leading_dense_block_count", "range"},
    {"deepseek2-v3", NUMBER("deepseek2.leading_dense_block_count", U32, 0), BAD,
        "blk.0.ffn_gate_inp.weight", "missing"},
    {"deepseek2", OMIT("deepseek2.attention.kv_lora_rank"), BAD,
        "deepseek2.attention.kv_lora_rank", "missing"},
    {"deepseek2", NUMBER("deepseek2.attention.kv_lora_rank", U32, 23), BAD,
        "blk.0.attn_kv_a_mqa.weight", "kv_lora_rank"},
    {"deepseek2", NUMBER("deepseek2.rope.dimension_count", U32, 24), BAD,
        "deepseek2.rope.dimension_count", "dimensions"},
    {"deepseek2", OMIT("blk.0.attn_kv_b.weight"), BAD, "blk.0.attn_kv_b.weight", "missing"},
    {"deepseek2", OMIT("blk.1.attn_q_a_norm.weight"), BAD, "blk.1.attn_q_a_norm.weight", "missing"},
    {"deepseek2-kb", OMIT("blk.0.attn_v_b.weight"), BAD, "blk.0.attn_v_b.weight", "missing"},
    {"deepseek2-kb", NUMBER("deepseek2.attention.value_length_mla", U32, 13), BAD,
        "blk.0.attn_v_b.weight", "value_length"},
    {"gpt2", OMIT("position_embd.weight"), BAD, "position_embd.weight", "missing"},
    {"gpt2", NUMBER("gpt2.context_length", U32, 127), BAD, "position_embd.weight",
        "context_length"},
    {"gpt2", OMIT("blk.0.attn_norm.weight"), BAD, "blk.0.attn_norm.weight", "missing"},
    {"gpt2", DIMS("blk.0.attn_qkv.weight", 2, 64, 191), BAD, "blk.0.attn_qkv.weight",
        "head_count"},
    {"phi3", DIMS("blk.0.ffn_up.weight", 2, 64, 254), BAD, "blk.0.ffn_up.weight",
        "feed_forward_length"},
    {"phi3-long-long", OMIT("rope_factors_short.weight"), BAD, "rope_factors_short.weight",
        "missing"},
    {"phi3-long-long", OMIT("rope_factors_long.weight"), BAD, "rope_factors_long.weight",
        "missing"},
    {"gemma2", NUMBER("gemma2.attn_logit_softcapping", F32, -1), BAD,
        "gemma2.attn_logit_softcapping", "positive"},
    {"gemma2", OMIT("blk.2.post_ffw_norm.weight"), BAD, "blk.2.post_ffw_norm.weight", "missing"},
    {"granite", NUMBER("granite.logit_scale", F32, 0), BAD, "granite.logit_scale", "positive"},
    {"qwen3", OMIT("blk.0.attn_q_norm.weight"), BAD, "blk.0.attn_q_norm.weight", "missing"},
    {"qwen3", DIMS("blk.0.attn_k_norm.weight", 1, 16), BAD, "blk.0.attn_k_norm.weight",
        "key_length"},
    {"olmo2", NUMBER("olmo2.attention.causal", BOOL, 0), ALIEN, "olmo2.attention.causal", "later"},
    {"falcon", OMIT("blk.0.attn_norm.weight"), BAD, "blk.0.attn_norm.weight", "missing"},
    {"bloom", OMIT("token_embd_norm.weight"), BAD, "token_embd_norm.weight", "missing"},
    {"llama", TEXT("llama.rope.scaling.type", "spiral"), ALIEN, "llama.rope.scaling.type", "known"}
};

static void test_damages(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(damages); i++) {
        kvc_result r = try_edits(&entry(damages[i].model)->shape, &damages[i].edit, 1);
        if (r == damages[i].code && !strcmp(last.where, damages[i].where) &&
            strstr(last.message, damages[i].said)) continue;
        print_error("%s, %s: %d \"%s\": \"%s\"\n", damages[i].model, damages[i].edit.name, r,
            last.where, last.message);
        fail();
    }
}

/* A tensor that the kind of model has no place for would change the result: it is named. */
static void test_strangers(void **state) {
    static const char *const rows[][2] = {{"qwen3", "llama"}, {"gemma3", "gemma2"}};
    size_t i, k;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        const size_t size = strlen(rows[i][1]);
        model_shape s = entry(rows[i][0])->shape;
        gguf_edit e = TEXT("general.architecture", NULL);
        gguf_writer w;
        e.text = rows[i][1];
        s.edits = &e;
        s.n_edits = 1;
        model_write(&w, &s);
        for (k = 0; k < gguf_mark_count(&w); k++) {     /* its keys under the other's name */
            const gguf_mark *m = gguf_mark_at(&w, k);
            if (m->field == GGUF_KEY_SIZE && !strncmp(m->name, rows[i][0], size))
                memcpy(w.image + m->at + 8, rows[i][1], size);
        }
        assert_int_equal(try_image(w.image, w.image_size), KVC_ERROR_UNSUPPORTED);
        assert_true(!strncmp(last.where, "blk.0.attn_", 11));
        assert_non_null(strstr(last.where, "_norm"));
        gguf_free(&w);
    }
}

/* ---- what is left out, or has another name ---- */

/* The logits after a text, as a hash. */
static uint64_t hash_model(const model_shape *shape, const gguf_edit *edits, size_t n) {
    model_shape s = *shape;
    rig r;
    kvc_token text[ZOO_TEXT];
    float *logits;
    uint64_t h;
    size_t i;
    s.edits = edits;
    s.n_edits = n;
    rig_open(&r, &s);
    for (i = 0; i < ZOO_TEXT; i++) text[i] = zoo_token(i);
    logits = cold_run(&r, text, ZOO_TEXT, KVC_KV_F32);
    h = hash_floats(logits, ZOO_TEXT * r.info.n_vocab, 0);
    free(logits);
    rig_close(&r);
    return h;
}

/* Files without the keys compute what files with these values do. */
static const struct {
    const char *model;
    gguf_edit without, with;
} defaults[] = {
    {"qwen3", OMIT("qwen3.rope.dimension_count"), NUMBER("qwen3.rope.dimension_count", U32, 32)},
    {"llama", OMIT("llama.rope.freq_base"), NUMBER("llama.rope.freq_base", F32, 10000)},
    {"llama-bias", OMIT("llama.expert_count"), NUMBER("llama.expert_count", U32, 0)},
    {"gemma2", OMIT("gemma2.attn_logit_softcapping"),
        NUMBER("gemma2.attn_logit_softcapping", F32, 50)},
    {"gemma2", OMIT("gemma2.final_logit_softcapping"),
        NUMBER("gemma2.final_logit_softcapping", F32, 30)},
    {"gemma2", OMIT("gemma2.attention.sliding_window"),
        NUMBER("gemma2.attention.sliding_window", U32, 4096)},
    {"gemma2", OMIT("gemma2.attention.sliding_window_pattern"),
        NUMBER("gemma2.attention.sliding_window_pattern", U32, 2)},
    {"gemma3", OMIT("gemma3.attention.sliding_window_pattern"),
        NUMBER("gemma3.attention.sliding_window_pattern", U32, 6)},
    {"gemma3", OMIT("gemma3.rope.freq_base_swa"), NUMBER("gemma3.rope.freq_base_swa", F32, 10000)},
    {"gemma3", OMIT("gemma3.rope.freq_base"), NUMBER("gemma3.rope.freq_base", F32, 1000000)},
    {"command-r", OMIT("command-r.logit_scale"), NUMBER("command-r.logit_scale", F32, 0.0625)},
    {"cohere2", OMIT("cohere2.attention.sliding_window_pattern"),
        NUMBER("cohere2.attention.sliding_window_pattern", U32, 4)},
    {"bloom", OMIT("bloom.attention.max_alibi_bias"),
        NUMBER("bloom.attention.max_alibi_bias", F32, 8)},
    {"gptneox", OMIT("gptneox.use_parallel_residual"),
        NUMBER("gptneox.use_parallel_residual", BOOL, 1)},
    {"mixtral", OMIT("llama.expert_feed_forward_length"),
        NUMBER("llama.expert_feed_forward_length", U32, 48)},
    {"mixtral", OMIT("llama.expert_weights_norm"), NUMBER("llama.expert_weights_norm", BOOL, 1)},
    {"olmoe", OMIT("olmoe.expert_weights_norm"), NUMBER("olmoe.expert_weights_norm", BOOL, 0)},
    {"qwen3moe", OMIT("qwen3moe.expert_weights_norm"),
        NUMBER("qwen3moe.expert_weights_norm", BOOL, 1)},
    {"deepseek2-lite", OMIT("deepseek2.expert_gating_func"),
        NUMBER("deepseek2.expert_gating_func", U32, 1)},
    {"gpt-oss", OMIT("gpt-oss.expert_gating_func"), NUMBER("gpt-oss.expert_gating_func", U32, 3)},
    {"smollm3", OMIT("smollm3.no_rope_layer_interval"),
        NUMBER("smollm3.no_rope_layer_interval", U32, 4)},
    {"minicpm3", OMIT("minicpm3.embedding_scale"), NUMBER("minicpm3.embedding_scale", F32, 12)},
    {"phi3", OMIT("phi3.attention.sliding_window"),
        NUMBER("phi3.attention.sliding_window", U32, 0)}
};

static void test_defaults(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNT(defaults); i++) {
        const model_shape *shape = &entry(defaults[i].model)->shape;
        uint64_t a = hash_model(shape, &defaults[i].without, 1);
        uint64_t b = hash_model(shape, &defaults[i].with, 1);
        if (a == b) continue;
        print_error("%s without %s computes something else\n", defaults[i].model,
            defaults[i].with.name);
        fail();
    }
}

/* The window of Phi 3's short models, which files once left out: shown by what is queried. */
static void test_conditional_default(void **state) {
    static const uint32_t contexts[2] = {4096, 4095}, windows[2] = {2047, 0};
    static const gguf_edit edits[] = {OMIT("phi3.attention.sliding_window")};
    size_t i;
    (void)state;
    for (i = 0; i < 2; i++) {
        model_shape s = entry("phi3")->shape;
        rig r;
        s.n_ctx = contexts[i];
        s.edits = edits;
        s.n_edits = 1;
        rig_open(&r, &s);
        assert_int_equal(r.info.window, windows[i]);
        rig_close(&r);
    }
}

/* Each norm's epsilon is found under the other's name; a list that says the same for all layers is
   as good as a number. */
static void test_other_names(void **state) {
    static const gguf_edit rms[] = {OMIT("llama.attention.layer_norm_rms_epsilon"),
        NUMBER("llama.attention.layer_norm_epsilon", F32, 0.01f)};
    static const gguf_edit layer[] = {OMIT("gpt2.attention.layer_norm_epsilon"),
        NUMBER("gpt2.attention.layer_norm_rms_epsilon", F32, 0.01f)};
    static const gguf_edit none[] = {OMIT("gpt2.attention.layer_norm_epsilon")};
    const model_shape *llama = &entry("llama")->shape, *gpt2 = &entry("gpt2")->shape;
    (void)state;
    assert_true(hash_model(llama, rms, 2) == hash_model(llama, NULL, 0));
    assert_true(hash_model(gpt2, layer, 2) == hash_model(gpt2, NULL, 0));
    assert_int_equal(try_edits(gpt2, none, 1), KVC_ERROR_FORMAT);
    assert_string_equal(last.where, "gpt2.attention.layer_norm_epsilon");
}

static uint32_t listed[2];

static void write_list(gguf_writer *w) {
    gguf_meta_array(w, "llama.attention.head_count_kv", GGUF_VALUE_U32, 2, listed);
}

static void test_lists(void **state) {
    static const gguf_edit no_number = OMIT("llama.attention.head_count_kv");
    model_shape s = entry("llama")->shape;
    gguf_writer w;
    int i;
    (void)state;
    for (i = 0; i < 2; i++) {
        listed[0] = 2;
        listed[1] = i ? 4 : 2;
        s.more = write_list;
        s.edits = NULL;
        s.n_edits = 0;
        model_write(&w, &s);        /* the key is there twice: the first is renamed */
        memcpy(w.image + gguf_mark_find(&w, GGUF_KEY_SIZE, no_number.name, 0)->at + 8, "xxxxx", 5);
        assert_int_equal(try_image(w.image, w.image_size), i ? KVC_ERROR_UNSUPPORTED : KVC_OK);
        if (i) assert_string_equal(last.where, no_number.name);
        gguf_free(&w);
    }
}

/* ---- hostile numbers in every field, for every architecture ---- */

static void test_hostile(void **state) {
    static const uint64_t values[] = {0, 1, 2, 255, 65536, 0x7fffffff, 0xffffffff, UINT64_MAX};
    size_t i, k, v;
    unsigned n = 0, opened = 0;
    (void)state;
    for (i = 0; i < COUNT(zoo); i++) {
        gguf_writer w;
        unsigned char was[8];
        if (zoo[i].shape.type) continue;
        model_write(&w, &zoo[i].shape);
        for (k = 0; k < gguf_mark_count(&w); k++) {
            const gguf_mark *m = gguf_mark_at(&w, k);
            if (m->field != GGUF_VALUE && m->field != GGUF_DIM) continue;
            if (!strncmp(m->name, "tokenizer.", 10)) continue;
            memcpy(was, w.image + m->at, m->size);
            for (v = 0; v < COUNT(values); v++) {
                gguf_patch(&w, m, values[v]);
                opened += try_image(w.image, w.image_size) == KVC_OK;
                n++;
            }
            memcpy(w.image + m->at, was, m->size);
        }
        gguf_free(&w);
    }
    print_message("%u files, %u of them opened and computed something\n", n, opened);
    assert_true(n > 10000);
    assert_true(opened > 100);
}

/* ---- what the kind of model decides ---- */

/* Positions of GPT-2 are learned: there are no more than those, and none can move. */
static void test_learned_positions(void **state) {
    kvc_cache_desc desc = {0};
    kvc_token text[128];
    kvc_cache *cache;
    kvc_ctx *ctx;
    kvc_seq *seq;
    rig r;
    (void)state;
    rig_open(&r, &entry("gpt2")->shape);
    random_tokens(text, 128, r.info.n_vocab, 1);
    ctx = new_ctx(&r, 0, 1, KVC_ISA_BEST);
    desc.model = r.model;
    desc.n_ctx = 129;
    FAILS(KVC_ERROR_ARGUMENT, "n_ctx", kvc_cache_new(&cache, &desc, &last));
    assert_int_equal(kvc_cache_size(&desc), 0);
    desc.n_ctx = 40;
    desc.n_heavy = 4;
    desc.page_size = 16;
    OK(kvc_cache_new(&cache, &desc, &last));
    seq = new_seq(cache);
    FAILS(KVC_ERROR_UNSUPPORTED, "policy",
        kvc_seq_set_policy(seq, KVC_POLICY_WINDOW, 0, 0, &last));
    FAILS(KVC_ERROR_UNSUPPORTED, "policy", kvc_seq_set_policy(seq, KVC_POLICY_HEAVY, 0, 4, &last));
    OK(kvc_seq_set_policy(seq, KVC_POLICY_GROW, 0, 0, &last));
    assert_int_equal(kvc_seq_capacity(seq), 128);
    OK(kvc_prefill(ctx, seq, text, 120, NULL, &last));
    FAILS(KVC_ERROR_UNSUPPORTED, "from", kvc_seq_remove(seq, 10, 20, &last));
    FAILS(KVC_ERROR_FULL, "sequence", kvc_prefill(ctx, seq, text, 9, NULL, &last));
    OK(kvc_prefill(ctx, seq, text, 8, NULL, &last));
    FAILS(KVC_ERROR_FULL, "sequence", kvc_decode(ctx, seq, 1, NULL, &last));
    OK(kvc_seq_remove(seq, 100, 128, &last));       /* the end is a roll-back */
    assert_int_equal(kvc_seq_length(seq), 100);
    kvc_seq_close(seq);
    kvc_cache_free(cache);
    kvc_ctx_free(ctx);
    rig_close(&r);
}

/* LongRoPE: one model, two caches; n_ctx decides which frequencies each has, and what was computed
   in one is not taken for the other's. */
static void test_long_rope(void **state) {
    static const uint32_t contexts[2] = {128, 129};
    kvc_token text[40];
    float *logits[2];
    bytes_out f = {NULL, 0, 0};
    kvc_cache *cache;
    kvc_seq *seq, *loaded;
    kvc_ctx *ctx;
    rig r;
    int i;
    (void)state;
    rig_open(&r, &entry("phi3-long-short")->shape);
    random_tokens(text, 40, r.info.n_vocab, 1);
    ctx = new_ctx(&r, 0, 1, KVC_ISA_BEST);
    for (i = 0; i < 2; i++) {
        const size_t row = 39;
        logits[i] = (float *)gguf_must(malloc(r.info.n_vocab * sizeof(float)));
        cache = new_cache(&r, contexts[i], 1, 16, KVC_KV_F32);
        if (i) {
            FAILS(KVC_ERROR_UNSUPPORTED, "fingerprint",
                kvc_seq_load_memory(&loaded, cache, NULL, f.bytes, f.size, &last));
        }
        seq = new_seq(cache);
        OK(kvc_prefill_rows(ctx, seq, text, 40, &row, 1, logits[i], &last));
        if (!i) OK(kvc_seq_save(seq, KVC_SAVE_ALL, file_write, &f, &last));
        kvc_seq_close(seq);
        kvc_cache_free(cache);
    }
    assert_memory_not_equal(logits[0], logits[1], r.info.n_vocab * sizeof(float));
    free(logits[0]);
    free(logits[1]);
    free(f.bytes);
    kvc_ctx_free(ctx);
    rig_close(&r);
}

/* Latent attention stores one key of rank and turned dimensions, and no value. */
static void test_latent_size(void **state) {
    static const kvc_kv_type types[2] = {KVC_KV_F32, KVC_KV_F16};
    kvc_cache_info info;
    kvc_cache *cache;
    rig r;
    int i;
    (void)state;
    rig_open(&r, &entry("deepseek2")->shape);
    assert_int_equal(r.info.n_kv_heads, 1);
    assert_int_equal(r.info.n_latent, 24);
    assert_int_equal(r.info.head_dim, 24 + 8);
    for (i = 0; i < 2; i++) {
        size_t one = r.info.n_layers * (24 + 8) * (i ? 2 : 4);
        size_t full = r.info.n_layers * 4 * (24 + 12) * (i ? 2 : 4);
        cache = new_cache(&r, 64, 1, 16, types[i]);
        kvc_cache_query(cache, &info);
        assert_int_equal(info.bytes_per_token, one);
        print_message("bytes per token %u, with full heads %u\n", (unsigned)one, (unsigned)full);
        kvc_cache_free(cache);
    }
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_damages),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_conditional_default),
        cmocka_unit_test(test_other_names),
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_learned_positions),
        cmocka_unit_test(test_long_rope),
        cmocka_unit_test(test_latent_size)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
