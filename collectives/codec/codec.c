// The codec in C: the same bits as fallback.py, which defines them. native.py compiles this file and calls codec_run.
//
// Kernels encode or decode one block of 256 elements, also in bf16 and fp16, which have no scales. They are written three times: in
// portable C here, and in vector_kernels.h for the primitives of avx2.h and of avx512.h. codec_run calls them block by block, so a
// block is in the first-level cache when it is read a second time.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 256, CACHE_LINE = 64 };
enum format { BF16, FP16, INT8, FP8, NUM_FORMATS };
enum action { ENCODE, DECODE, DECODE_ADD };

typedef float element __attribute__((aligned(1)));  // of an array, which may have any address

typedef void encode_block(const element *x, uint8_t *data);
typedef void decode_block(const uint8_t *data, element *x);

struct kernels {
    encode_block *encode[NUM_FORMATS];
    decode_block *decode[NUM_FORMATS], *decode_add[NUM_FORMATS];
};

static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline float scale_of(const uint8_t *data) { float scale; memcpy(&scale, data, 4); return scale; }

// Writes the scale of a block whose largest magnitude has the bits `largest`, and returns by what its elements are multiplied. A block
// with NaN or infinity (both have the largest bits) gets the scale NaN and zeros: then it returns 0. The constants are fallback.py's.
static inline float write_scale(enum format format, uint32_t largest, uint8_t *data) {
    const float number = format == INT8 ? 127.0f : 448.0f, least = format == INT8 ? 127 * 0x1p-126f : 448 * 0x1p-117f;
    const float largest_scale = float_of(0x7c010203);  // the float below FLT_MAX / 127
    float scale = float_of(0x7fc00000), multiplier = 0;
    if (largest < 0x7f800000) {
        float magnitude = float_of(largest);
        magnitude = magnitude < least ? least : magnitude;
        scale = magnitude / number;
        scale = scale > largest_scale ? largest_scale : scale;
        multiplier = number / magnitude;
    } else {
        memset(data + 4, 0, BLOCK);
    }
    memcpy(data, &scale, 4);
    return multiplier;
}

// Portable kernels. The additions of a large number (2^23 and half of it, 2^14, 1/2) round to nearest even in the adder.

static inline uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

static inline int8_t to_int8(float scaled) { return (int8_t)(bits_of(scaled + 0x1.8p23f) - bits_of(0x1.8p23f)); }

static inline uint8_t to_fp8(float scaled) {  // at most 448 and a rounding error
    uint32_t bits = bits_of(scaled), a = bits & 0x7fffffff;
    uint32_t normal = (a + 0x7ffff + (a >> 20 & 1) - (120u << 23)) >> 20;
    uint32_t subnormal = bits_of(float_of(a) + 0x1p14f) - bits_of(0x1p14f);
    return (uint8_t)((a < bits_of(0x1p-6f) ? subnormal : normal) | (bits >> 24 & 0x80));
}

static inline float from_fp8(uint8_t code) {
    uint32_t a = code & 0x7f, sign = (uint32_t)(code & 0x80) << 24;
    float normal = float_of((a << 20) + (120u << 23)), subnormal = float_of((a << 20) + (121u << 23)) - 0x1p-6f;
    return float_of(bits_of(a < 8 ? subnormal : normal) | sign);
}

static inline uint16_t to_bf16(float x) {
    uint32_t bits = bits_of(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (uint16_t)((x != x ? bits | 0x400000 : rounded) >> 16);
}

static inline float from_bf16(uint16_t code) { return float_of((uint32_t)code << 16); }

static inline uint16_t to_fp16(float x) {
    uint32_t bits = bits_of(x), a = bits & 0x7fffffff;
    uint32_t normal = smaller((a + 0xfff + (a >> 13 & 1) - (112u << 23)) >> 13, 0x7c00);
    uint32_t subnormal = bits_of(float_of(a) + 0.5f) - bits_of(0.5f);
    uint32_t nan = 0x7e00 | (a >> 13 & 0x3ff);
    return (uint16_t)((x != x ? nan : a < bits_of(0x1p-14f) ? subnormal : normal) | (bits >> 16 & 0x8000));
}

static inline float from_fp16(uint16_t code) {
    uint32_t a = (uint32_t)(code & 0x7fff) << 13, sign = (uint32_t)(code & 0x8000) << 16;
    uint32_t normal = a + (112u << 23) + (a >= 31u << 23 ? 112u << 23 : 0);
    float subnormal = float_of(a + (113u << 23)) - 0x1p-14f;
    return float_of((a < 1u << 23 ? bits_of(subnormal) : normal) | sign);
}

#define SCALED_KERNELS(format, FORMAT, type)                                                  \
    static void encode_##format##_c(const element *restrict x, uint8_t *restrict data) {        \
        uint32_t largest = 0;                                                                 \
        for (int i = 0; i < BLOCK; i++) {                                                     \
            uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;                                  \
            largest = magnitude > largest ? magnitude : largest;                              \
        }                                                                                     \
        float multiplier = write_scale(FORMAT, largest, data);                                \
        if (multiplier != 0)                                                                  \
            for (int i = 0; i < BLOCK; i++) data[4 + i] = (uint8_t)to_##format(x[i] * multiplier); \
    }                                                                                         \
    static void decode_##format##_c(const uint8_t *restrict data, element *restrict x) {        \
        float scale = scale_of(data);                                                         \
        for (int i = 0; i < BLOCK; i++) x[i] = from_##format((type)data[4 + i]) * scale;      \
    }                                                                                         \
    static void decode_add_##format##_c(const uint8_t *restrict data, element *restrict x) {    \
        float scale = scale_of(data);                                                         \
        for (int i = 0; i < BLOCK; i++) x[i] += from_##format((type)data[4 + i]) * scale;     \
    }

#define HALF_KERNELS(format)                                                                  \
    static void encode_##format##_c(const element *restrict x, uint8_t *restrict data) {        \
        for (int i = 0; i < BLOCK; i++) {                                                     \
            uint16_t code = to_##format(x[i]);                                                \
            memcpy(data + 2 * i, &code, 2);                                                   \
        }                                                                                     \
    }                                                                                         \
    static void decode_##format##_c(const uint8_t *restrict data, element *restrict x) {        \
        for (int i = 0; i < BLOCK; i++) {                                                     \
            uint16_t code;                                                                    \
            memcpy(&code, data + 2 * i, 2);                                                   \
            x[i] = from_##format(code);                                                       \
        }                                                                                     \
    }                                                                                         \
    static void decode_add_##format##_c(const uint8_t *restrict data, element *restrict x) {    \
        for (int i = 0; i < BLOCK; i++) {                                                     \
            uint16_t code;                                                                    \
            memcpy(&code, data + 2 * i, 2);                                                   \
            x[i] += from_##format(code);                                                      \
        }                                                                                     \
    }

#define from_int8(code) ((float)(code))
SCALED_KERNELS(int8, INT8, int8_t)
SCALED_KERNELS(fp8, FP8, uint8_t)
HALF_KERNELS(bf16)
HALF_KERNELS(fp16)

#define ALL_FORMATS(action, isa) \
    { action##_bf16_##isa, action##_fp16_##isa, action##_int8_##isa, action##_fp8_##isa }
#define KERNELS(isa) \
    { ALL_FORMATS(encode, isa), ALL_FORMATS(decode, isa), ALL_FORMATS(decode_add, isa) }

static const struct kernels portable = KERNELS(c);

#if defined(__x86_64__) && defined(__GNUC__)  // clang defines it too
#include <cpuid.h>
#include "avx2.h"
#include "vector_kernels.h"
static const struct kernels avx2 = KERNELS(avx2);
#include "avx512.h"
#include "vector_kernels.h"
static const struct kernels avx512 = KERNELS(avx512);
#else
static const struct kernels avx2, avx512;
#endif

static const struct kernels *const levels[] = {&portable, &avx2, &avx512};

// The best level of kernels that this CPU (and its system) can run: an index of `levels`.
int codec_level(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    unsigned a, b, c = 0, d;
    if (!__builtin_cpu_supports("avx2") || !__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C)) return 0;
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? 2 : 1;
#else
    return 0;
#endif
}

// Asks for the block that is encoded four blocks later (an eighth more speed from DRAM). A prefetch beyond the end of x does nothing.
static inline void prefetch(const element *x) {
#if defined(__GNUC__)
    uintptr_t block = (uintptr_t)x + 4 * BLOCK * sizeof(float);
    for (size_t i = 0; i < BLOCK * sizeof(float); i += CACHE_LINE) __builtin_prefetch((const void *)(block + i));
#else
    (void)x;
#endif
}

static size_t nbytes_of(enum format format, size_t count) {
    return format < INT8 ? 2 * count : count + 4;  // of one block
}

// Encodes `count` elements x into data, decodes data into x, or adds the decoded data to x. The short last block is copied into a
// block of its own, which zeros fill up.
void codec_run(int level, int action, int format, element *x, uint8_t *data, size_t count) {
    const struct kernels *kernels = levels[level];
    encode_block *encode = kernels->encode[format];
    decode_block *decode = action == DECODE ? kernels->decode[format] : kernels->decode_add[format];
    size_t step = nbytes_of(format, BLOCK);
    for (; count >= BLOCK; count -= BLOCK, x += BLOCK, data += step) {
        if (action == ENCODE) {
            prefetch(x);
            encode(x, data);
        } else {
            decode(data, x);
        }
    }
    if (count == 0) return;
    float block[BLOCK] = {0};
    uint8_t encoded[2 * BLOCK] = {0};
    size_t nbytes = nbytes_of(format, count);
    if (action != DECODE) memcpy(block, x, count * sizeof(float));
    if (action == ENCODE) {
        encode(block, encoded);
        memcpy(data, encoded, nbytes);
    } else {
        memcpy(encoded, data, nbytes);
        decode(encoded, block);
        memcpy(x, block, count * sizeof(float));
    }
}
