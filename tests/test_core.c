/* The section >>core: scalar arithmetic against libm, number formats over all their values,
   checked sizes, text building. The implementation lies in this file: private functions, too. */
#define _POSIX_C_SOURCE 200809L
#define KVC_IMPLEMENTATION
#include "../kvc.h"

#include "testing.h"

/* Uniform in [low, high). */
static double uniform(uint64_t *state, double low, double high) {
    return low + (high - low) * ((double)(model_random(state) >> 11) / 9007199254740992.0);
}

static double relative(double got, double want) {
    return fabs(got - want) / fabs(want);
}

/* ---- functions instead of libm's ---- */

static void test_exp(void **s) {
    uint64_t state = 1;
    int i;
    (void)s;
    for (i = 0; i < 200000; i++) {
        double x = i % 2 ? uniform(&state, -700, 700) : uniform(&state, -2, 2);
        assert_true(relative(kvc__exp(x), exp(x)) < 1e-14);
    }
    assert_true(kvc__exp(0.0) >= 1.0 && kvc__exp(0.0) <= 1.0);
    assert_true(kvc__exp(-1000.0) <= 0.0 && kvc__exp(-INFINITY) <= 0.0);
    assert_true(isinf(kvc__exp(1000.0)) && isinf(kvc__exp(INFINITY)));
    assert_true(isnan(kvc__exp(NAN)));
    assert_true(fabs(kvc__exp(-740.0) - exp(-740.0)) <= 5e-324);
}

static void test_log(void **s) {
    uint64_t state = 2;
    int i;
    (void)s;
    for (i = 0; i < 200000; i++) {
        double x = i % 2 ? exp(uniform(&state, -700, 700)) : uniform(&state, 0.5, 2);
        assert_true(fabs(kvc__log(x) - log(x)) <= 1e-14 * fabs(log(x)) + 1e-16);
    }
    assert_true(fabs(kvc__log(1.0)) <= 0.0);
}

/* What RoPE needs of it: base^(-2i/dim) for every base and dimension in use. */
static void test_pow(void **s) {
    static const double bases[] = {10000, 50000, 150000, 500000, 1e6, 1e7, 25.5};
    size_t b;
    int dim, i;
    (void)s;
    for (b = 0; b < COUNT(bases); b++) {
        for (dim = 2; dim <= 256; dim += 2) {
            for (i = 0; i < dim / 2; i++) {
                double y = -2.0 * i / dim;
                assert_true(relative(kvc__pow(bases[b], y), pow(bases[b], y)) < 2e-14);
            }
        }
    }
}

static void check_sincos(double x) {
    double si, co;
    kvc__sincos(x, &si, &co);
    if (fabs(si - sin(x)) < 1e-14 && fabs(co - cos(x)) < 1e-14) return;
    print_error("x %.17g: sin %.17g not %.17g, cos %.17g not %.17g\n", x, si, sin(x), co, cos(x));
    fail();
}

/* Angles reach the highest position: 2^20 and more. */
static void test_sincos(void **s) {
    uint64_t state = 3;
    int i;
    (void)s;
    for (i = 0; i < 100000; i++) {
        check_sincos(uniform(&state, -10, 10));
        check_sincos(uniform(&state, 0, 2e6));
        check_sincos((double)(i * 20));
    }
    for (i = -1000; i < 1000; i++) check_sincos(i * 0.78539816339744830962);
}

/* ---- fused multiply-add of the base instruction set ---- */

static void check_fma(float a, float b, float c) {
    float got = kvc__fmaf(a, b, c), want = fmaf(a, b, c);
    if (isnan(got) && isnan(want)) return;
    if (!memcmp(&got, &want, sizeof got)) return;
    print_error("fma(%a, %a, %a) is %a, not %a\n", (double)a, (double)b, (double)c, (double)got,
        (double)want);
    fail();
}

static float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static void test_fma_nasty(void **s) {
    static const uint32_t bits[] = {
        0, 1, 2, 3, 0x7fffff, 0x800000, 0x800001, 0xffffff, 0x1000000, 0x33800000, 0x33800001,
        0x337fffff, 0x34000000, 0x3f7fffff, 0x3f800000, 0x3f800001, 0x3fffffff, 0x40000000,
        0x4b7fffff, 0x4b800000, 0x4b800001, 0x7effffff, 0x7f000000, 0x7f7fffff, 0x7f800000,
        0x7fc00000, 0x3eaaaaab, 0x20000000, 0x1f800001, 0x5f000001
    };
    size_t n = COUNT(bits) * 2, i, j, k;
    (void)s;
    for (i = 0; i < n; i++) for (j = 0; j < n; j++) for (k = 0; k < n; k++) {
        check_fma(from_bits(bits[i / 2] | (uint32_t)(i & 1) << 31),
            from_bits(bits[j / 2] | (uint32_t)(j & 1) << 31),
            from_bits(bits[k / 2] | (uint32_t)(k & 1) << 31));
    }
}

/* Any bits; sums that nearly cancel; addends far below the product, which decide ties. */
static void test_fma_random(void **s) {
    uint64_t state = 4;
    int i;
    (void)s;
    for (i = 0; i < 500000; i++) {
        uint64_t r = model_random(&state), q = model_random(&state);
        float a = from_bits((uint32_t)r), b = from_bits((uint32_t)(r >> 32));
        float x = from_bits(0x3f800000u | ((uint32_t)r & 0x7fffffu));
        float y = from_bits(0x3f800000u | ((uint32_t)(r >> 32) & 0x7fffffu));
        check_fma(a, b, from_bits((uint32_t)q));
        check_fma(x, y, -x * y);
        check_fma(x, y, from_bits(0x20000000u + (uint32_t)(q & 0xbfffffffu) % 0x28000000u));
        check_fma(from_bits((uint32_t)q & 0xfff000u), y, a);
    }
    for (i = 0; i < 200; i++) {     /* ties of the product, broken by an addend of any size */
        float half = from_bits(0x3f800001u), three = from_bits(0x3fc00000u);
        check_fma(half, three, ldexpf(1.0f, -i));
        check_fma(half, three, -ldexpf(1.0f, -i));
    }
}

/* ---- half precision and bfloat16 ---- */

static void test_f16_to_f32(void **s) {
    uint32_t h;
    (void)s;
    for (h = 0; h < 65536; h++) {
        float got = kvc__f16_to_f32((uint16_t)h), want;
        if ((h & 0x7fffu) > 0x7c00u) {
            assert_true(isnan(got));
            continue;
        }
        want = gguf_from_f16((uint16_t)h);
        if ((h & 0x7fffu) == 0x7c00u) want = h & 0x8000u ? -INFINITY : INFINITY;
        if (h == 0x8000u) want = -0.0f;
        assert_memory_equal(&got, &want, sizeof got);
    }
}

/* Every half-precision number comes back, and every float between two neighbours goes to the
   nearer, the middle to the even one. */
static void test_f32_to_f16(void **s) {
    uint32_t h, u;
    (void)s;
    for (h = 0; h < 0x7c00u; h++) {
        float x = kvc__f16_to_f32((uint16_t)h), up, middle;
        up = h + 1 < 0x7c00u ? kvc__f16_to_f32((uint16_t)(h + 1)) : 65536.0f;
        middle = (x + up) / 2;
        assert_int_equal(kvc__f32_to_f16(x), h);
        assert_int_equal(kvc__f32_to_f16(-x), h | 0x8000u);
        assert_int_equal(kvc__f32_to_f16(middle), h + (h & 1));
        assert_int_equal(kvc__f32_to_f16(nextafterf(middle, 0.0f)), h);
        assert_int_equal(kvc__f32_to_f16(nextafterf(middle, 1e9f)), h + 1);
    }
    for (u = 0; u < 0x7f800000u; u += 4099)
        assert_int_equal(kvc__f32_to_f16(from_bits(u)), gguf_to_f16(from_bits(u)));
    assert_int_equal(kvc__f32_to_f16(INFINITY), 0x7c00);
    assert_int_equal(kvc__f32_to_f16(-INFINITY), 0xfc00);
    assert_int_equal(kvc__f32_to_f16(FLT_MAX), 0x7c00);
    assert_true(isnan(kvc__f16_to_f32(kvc__f32_to_f16(NAN))));
}

static void test_bf16(void **s) {
    uint32_t h;
    (void)s;
    for (h = 0; h < 65536; h++) {
        float got = kvc__bf16_to_f32((uint16_t)h), want = from_bits(h << 16);
        assert_memory_equal(&got, &want, sizeof got);
    }
}

/* ---- sizes, bytes, text ---- */

static void test_sizes(void **s) {
    const size_t half = SIZE_MAX / 2;
    size_t out = 7;
    (void)s;
    assert_true(kvc__mul_size(&out, 0, SIZE_MAX) && out == 0);
    assert_true(kvc__mul_size(&out, SIZE_MAX, 0) && out == 0);
    assert_true(kvc__mul_size(&out, SIZE_MAX, 1) && out == SIZE_MAX);
    assert_true(kvc__mul_size(&out, half, 2) && out == SIZE_MAX - 1);
    assert_false(kvc__mul_size(&out, half + 1, 2));
    assert_false(kvc__mul_size(&out, SIZE_MAX, SIZE_MAX));
    assert_true(kvc__add_size(&out, half, half + 1) && out == SIZE_MAX);
    assert_false(kvc__add_size(&out, half + 1, half + 1));
    assert_false(kvc__add_size(&out, SIZE_MAX, 1));
    assert_true(kvc__add_size(&out, SIZE_MAX, 0) && out == SIZE_MAX);
}

static void test_reads(void **s) {
    static const unsigned char bytes[12] = {9, 1, 2, 3, 4, 5, 6, 7, 0xf8, 0, 0x80, 0x3f};
    (void)s;
    assert_int_equal(kvc__rd16(bytes + 1), 0x0201);
    assert_int_equal(kvc__rd32(bytes + 1), 0x04030201);
    assert_true(kvc__rd64(bytes + 1) == 0xf807060504030201u);
    assert_true(kvc__rdf32(bytes + 8) > 1.0f && kvc__rdf32(bytes + 8) < 1.01f);
}

static void test_text(void **s) {
    char buf[12];
    kvc__msg m;
    (void)s;
    kvc__msg_start(&m, buf, sizeof buf);
    assert_string_equal(buf, "");
    kvc__msg_text(&m, "ab");
    kvc__msg_bytes(&m, "c\n\x80", 3);
    kvc__msg_u64(&m, 0);
    assert_string_equal(buf, "abc??0");
    kvc__msg_u64(&m, UINT64_MAX);
    assert_string_equal(buf, "abc??018446");
    kvc__msg_text(&m, "more");
    assert_string_equal(buf, "abc??018446");
}

static void test_mix(void **s) {
    uint64_t i, seen = 0;
    (void)s;
    for (i = 0; i < 64; i++) seen |= kvc__mix64((uint64_t)1 << i);
    assert_true(seen == UINT64_MAX);
    assert_true(kvc__hash_bytes("abc", 3, 0) != kvc__hash_bytes("abd", 3, 0));
    assert_true(kvc__hash_bytes("abc", 3, 0) != kvc__hash_bytes("abc\0", 4, 0));
    assert_true(kvc__hash_bytes("abc", 3, 0) != kvc__hash_bytes("abc", 3, 1));
}

/* ---- results ---- */

static void test_results(void **s) {
    int i;
    (void)s;
    for (i = 0; i < KVC_RESULT_COUNT; i++) {
        assert_non_null(kvc_result_text((kvc_result)i));
        assert_true(strlen(kvc_result_text((kvc_result)i)) > 3);
    }
    assert_non_null(kvc_result_text((kvc_result)99));
    assert_non_null(kvc_result_text((kvc_result)-1));
    assert_int_equal(kvc_version(), KVC_VERSION);
    assert_int_equal(KVC_VERSION,
        KVC_VERSION_MAJOR << 16 | KVC_VERSION_MINOR << 8 | KVC_VERSION_PATCH);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_log),
        cmocka_unit_test(test_pow),
        cmocka_unit_test(test_sincos),
        cmocka_unit_test(test_fma_nasty),
        cmocka_unit_test(test_fma_random),
        cmocka_unit_test(test_f16_to_f32),
        cmocka_unit_test(test_f32_to_f16),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_reads),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_mix),
        cmocka_unit_test(test_results)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
