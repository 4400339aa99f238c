// The primitives of vector_kernels.h with AVX-512 (BW, VL): vectors of 16 elements.

#include <immintrin.h>

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,f16c")))
#define WIDTH 16
#define FLOATS __m512
#define INTS __m512i
#define ALL(value) _mm512_set1_ps(value)
#define ALL_INTS(value) _mm512_set1_epi32(value)
#define LOAD(x) _mm512_loadu_ps(x)
#define STORE(x, v) _mm512_storeu_ps(x, v)
#define BITS(v) _mm512_castps_si512(v)
#define FLOAT_OF(bits) _mm512_castsi512_ps(bits)
#define ADD(a, b) _mm512_add_ps(a, b)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define MIN(a, b) _mm512_min_ps(a, b)
#define ADD_INTS(a, b) _mm512_add_epi32(a, b)
#define SUB_INTS(a, b) _mm512_sub_epi32(a, b)
#define MAX_INTS(a, b) _mm512_max_epi32(a, b)
#define AND(a, b) _mm512_and_si512(a, b)
#define OR(a, b) _mm512_or_si512(a, b)
#define SHIFT_RIGHT(a, count) _mm512_srai_epi32(a, count)
#define TO_INTS(v) _mm512_cvtps_epi32(v)  // to nearest even
#define IF_NAN(v, a, b) _mm512_mask_mov_epi32(b, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), a)

TARGET static inline uint32_t largest_int_avx512(__m512i v) { return (uint32_t)_mm512_reduce_max_epi32(v); }

TARGET static inline void store_bytes_avx512(uint8_t *data, const __m512i *v) {  // 32 integers of -128 to 127
    _mm_storeu_si128((__m128i *)data, _mm512_cvtepi32_epi8(v[0]));
    _mm_storeu_si128((__m128i *)(data + 16), _mm512_cvtepi32_epi8(v[1]));
}

TARGET static inline void store_halves_avx512(uint8_t *data, __m512i v) {
    _mm256_storeu_si256((__m256i *)data, _mm512_cvtepi32_epi16(v));
}

TARGET static inline void store_fp16_avx512(uint8_t *data, __m512 v) {
    _mm256_storeu_si256((__m256i *)data, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

TARGET static inline __m512 load_bf16_avx512(const uint8_t *data) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)data)), 16));
}

TARGET static inline __m512 load_fp16_avx512(const uint8_t *data) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)data));
}

TARGET static inline __m512 load_int8_avx512(const uint8_t *data) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)data)));
}

TARGET static inline __m512 load_fp8_avx512(const uint8_t *data) {  // the values divided by 256
    __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)data)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16((short)0xbf80)));
}
