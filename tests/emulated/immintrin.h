/* AVX-512 for processors that have AVX2 alone: with this folder in front of the system's headers
   kvc.h is compiled over SIMDe, whose functions stand in for the intrinsics, and every pass runs.
   What SIMDe lacks is below. What neither has does not compile: it is the system's function then,
   which needs a target that is not on. */
#ifndef EMULATED_IMMINTRIN_H
#define EMULATED_IMMINTRIN_H

#pragma GCC system_header               /* #include_next, and all that SIMDe does */
#include_next <immintrin.h>             /* the types, and the real functions up to AVX2 */
#include <stdint.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__) || defined(__AVX512F__)
#error "to be compiled with -mavx2 -mfma -mf16c and no more"
#endif

/* kvc.h opens no target regions, in which the compiler would use AVX-512, and takes every set to be
   there. */
#define KVC__EMULATED

/* ---- what SIMDe lacks: mostly two halves of 8 lanes, for which there are instructions ---- */

typedef union emulated {
    __m512 ps;
    __m512i si;
    __m256 ps8[2];
    __m256i si8[2];
    __m128 ps4[4];
    float f[16];
    int32_t i[16];
} emulated;

/* SIMDe 0.7.4 gives it the parameters of the masked one. */
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)

/* From 16 bytes or 16-bit numbers: `high` is the second half of x. */
#define EMULATED_WIDEN(name, from, convert, low, high) \
    static inline __m512i emulated_##name(from x) \
    { \
        emulated r; \
        r.si8[0] = convert(low); \
        r.si8[1] = convert(high); \
        return r.si; \
    }
EMULATED_WIDEN(cvtepi8_epi32, __m128i, _mm256_cvtepi8_epi32, x, _mm_srli_si128(x, 8))
EMULATED_WIDEN(cvtepu8_epi32, __m128i, _mm256_cvtepu8_epi32, x, _mm_srli_si128(x, 8))
EMULATED_WIDEN(cvtepu16_epi32, __m256i, _mm256_cvtepu16_epi32, _mm256_castsi256_si128(x),
    _mm256_extracti128_si256(x, 1))
#undef EMULATED_WIDEN
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepi8_epi32(x) emulated_cvtepi8_epi32(x)
#define _mm512_cvtepu8_epi32(x) emulated_cvtepu8_epi32(x)
#define _mm512_cvtepu16_epi32(x) emulated_cvtepu16_epi32(x)

static inline __m128i emulated_cvtepi32_epi8(__m512i x)     /* the low bytes */
{
    emulated a;
    uint8_t r[16];
    int i;
    a.si = x;
    for (i = 0; i < 16; i++) r[i] = (uint8_t)a.i[i];
    return _mm_loadu_si128((const __m128i *)(const void *)r);
}
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8(x) emulated_cvtepi32_epi8(x)

static inline __m512 emulated_cvtepi32_ps(__m512i x)
{
    emulated a, r;
    a.si = x;
    r.ps8[0] = _mm256_cvtepi32_ps(a.si8[0]);
    r.ps8[1] = _mm256_cvtepi32_ps(a.si8[1]);
    return r.ps;
}
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(x) emulated_cvtepi32_ps(x)

static inline __m512i emulated_cvtps_epi32(__m512 x)
{
    emulated a, r;
    a.ps = x;
    r.si8[0] = _mm256_cvtps_epi32(a.ps8[0]);
    r.si8[1] = _mm256_cvtps_epi32(a.ps8[1]);
    return r.si;
}
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(x) emulated_cvtps_epi32(x)

static inline __m512 emulated_cvtph_ps(__m256i x)
{
    emulated r;
    r.ps8[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
    r.ps8[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
    return r.ps;
}
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(x) emulated_cvtph_ps(x)

/* To nearest; the array has no size if another rounding is asked for. */
static inline __m256i emulated_maskz_cvtps_ph(__mmask16 k, __m512 x)
{
    emulated a;
    uint16_t r[16];
    int i;
    a.ps = x;
    _mm_storeu_si128((__m128i *)(void *)r,
        _mm256_cvtps_ph(a.ps8[0], _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(void *)(r + 8),
        _mm256_cvtps_ph(a.ps8[1], _MM_FROUND_TO_NEAREST_INT));
    for (i = 0; i < 16; i++) if (!(k >> i & 1)) r[i] = 0;
    return _mm256_loadu_si256((const __m256i *)(const void *)r);
}
#undef _mm512_maskz_cvtps_ph
#define _mm512_maskz_cvtps_ph(k, x, rounding) \
    ((void)sizeof(char[(rounding) == _MM_FROUND_TO_NEAREST_INT ? 1 : -1]), \
    emulated_maskz_cvtps_ph(k, x))

static inline __m512i emulated_sra_epi32(__m512i x, __m128i n)
{
    emulated a, r;
    a.si = x;
    r.si8[0] = _mm256_sra_epi32(a.si8[0], n);
    r.si8[1] = _mm256_sra_epi32(a.si8[1], n);
    return r.si;
}
#undef _mm512_sra_epi32
#define _mm512_sra_epi32(x, n) emulated_sra_epi32(x, n)

static inline __m512 emulated_permute_ps(__m512 x, int pick)
{
    emulated a, r;
    int i;
    a.ps = x;
    for (i = 0; i < 16; i++) r.f[i] = a.f[(i & ~3) | (pick >> 2 * (i & 3) & 3)];
    return r.ps;
}
#undef _mm512_permute_ps
#define _mm512_permute_ps(x, pick) emulated_permute_ps(x, pick)

static inline __m512 emulated_shuffle_f32x4(__m512 x, __m512 y, int pick)
{
    emulated a, b, r;
    a.ps = x;
    b.ps = y;
    r.ps4[0] = a.ps4[pick & 3];
    r.ps4[1] = a.ps4[pick >> 2 & 3];
    r.ps4[2] = b.ps4[pick >> 4 & 3];
    r.ps4[3] = b.ps4[pick >> 6 & 3];
    return r.ps;
}
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(x, y, pick) emulated_shuffle_f32x4(x, y, pick)

static inline __m256 emulated_extractf32x8_ps(__m512 x, int half)
{
    emulated a;
    a.ps = x;
    return a.ps8[half & 1];
}
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(x, half) emulated_extractf32x8_ps(x, half)

#endif
