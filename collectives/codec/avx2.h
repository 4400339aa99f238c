// The primitives of vector_kernels.h with AVX2 and F16C: vectors of 8 elements.

#include <immintrin.h>

#define ISA avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define WIDTH 8
#define FLOATS __m256
#define INTS __m256i
#define ALL(value) _mm256_set1_ps(value)
#define ALL_INTS(value) _mm256_set1_epi32(value)
#define LOAD(x) _mm256_loadu_ps(x)
#define STORE(x, v) _mm256_storeu_ps(x, v)
#define BITS(v) _mm256_castps_si256(v)
#define FLOAT_OF(bits) _mm256_castsi256_ps(bits)
#define ADD(a, b) _mm256_add_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define MIN(a, b) _mm256_min_ps(a, b)
#define ADD_INTS(a, b) _mm256_add_epi32(a, b)
#define SUB_INTS(a, b) _mm256_sub_epi32(a, b)
#define MAX_INTS(a, b) _mm256_max_epi32(a, b)
#define AND(a, b) _mm256_and_si256(a, b)
#define OR(a, b) _mm256_or_si256(a, b)
#define SHIFT_RIGHT(a, count) _mm256_srai_epi32(a, count)
#define TO_INTS(v) _mm256_cvtps_epi32(v)  // to nearest even
#define IF_NAN(v, a, b) \
    _mm256_blendv_epi8(b, a, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)))

TARGET static inline uint32_t largest_int_avx2(__m256i v) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

// 32 integers of -128 to 127 as bytes. The packing works in halves of 128 bits, and the permutation puts these in order.
TARGET static inline void store_bytes_avx2(uint8_t *data, const __m256i *v) {
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)data, packed);
}

TARGET static inline void store_halves_avx2(uint8_t *data, __m256i v) {  // 8 integers of 0 to 65535
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0x08);
    _mm_storeu_si128((__m128i *)data, _mm256_castsi256_si128(packed));
}

TARGET static inline void store_fp16_avx2(uint8_t *data, __m256 v) {
    _mm_storeu_si128((__m128i *)data, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

TARGET static inline __m256 load_bf16_avx2(const uint8_t *data) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)data)), 16));
}

TARGET static inline __m256 load_fp16_avx2(const uint8_t *data) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)data));
}

TARGET static inline __m256 load_int8_avx2(const uint8_t *data) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)data)));
}

TARGET static inline __m256 load_fp8_avx2(const uint8_t *data) {  // the values divided by 256
    __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)data)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16((short)0xbf80)));
}
