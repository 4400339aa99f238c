// The kernels of one instruction set. Its header defines the primitives before this file, which ends by removing their names.

#define JOIN_(name, isa) name##_##isa
#define JOIN(name, isa) JOIN_(name, isa)
#define OF(name) JOIN(name, ISA)

// The bits of the largest magnitude. As integers they compare like the numbers, but NaN is the largest.
TARGET static inline uint32_t OF(largest_bits)(const element *x) {
    const INTS magnitude = ALL_INTS(0x7fffffff);
    INTS m[4] = {ALL_INTS(0), ALL_INTS(0), ALL_INTS(0), ALL_INTS(0)};  // four, as a maximum waits for the one before
    for (int i = 0; i < BLOCK; i += 4 * WIDTH)
        for (int k = 0; k < 4; k++) m[k] = MAX_INTS(m[k], AND(BITS(LOAD(x + i + k * WIDTH)), magnitude));
    return OF(largest_int)(MAX_INTS(MAX_INTS(m[0], m[1]), MAX_INTS(m[2], m[3])));
}

TARGET static inline INTS OF(to_int8)(FLOATS scaled) { return TO_INTS(scaled); }

// The code of e4m3 as a signed byte. A number below 2^-6 is subnormal: adding 2^14 rounds it to a multiple of 2^-9. Of a subnormal
// number the result of the other way is less, and of a normal number it is at least that of 2^-6: so the maximum is right for both.
TARGET static inline INTS OF(to_fp8)(FLOATS scaled) {
    INTS bits = BITS(scaled), a = AND(bits, ALL_INTS(0x7fffffff));
    INTS even = AND(SHIFT_RIGHT(a, 20), ALL_INTS(1));
    INTS normal = SHIFT_RIGHT(ADD_INTS(ADD_INTS(a, even), ALL_INTS(0x7ffff - (120 << 23))), 20);
    FLOATS low = ADD(MIN(FLOAT_OF(a), ALL(0x1p-6f)), ALL(0x1p14f));
    INTS subnormal = SUB_INTS(BITS(low), BITS(ALL(0x1p14f)));
    return OR(MAX_INTS(normal, subnormal), AND(SHIFT_RIGHT(bits, 24), ALL_INTS(-128)));
}

#define SCALED(format, FORMAT, unit)                                                               \
    TARGET static void OF(encode_##format)(const element *x, uint8_t *data) {                        \
        float multiplier = write_scale(FORMAT, OF(largest_bits)(x), data);                         \
        if (multiplier == 0) return;                                                               \
        for (int i = 0; i < BLOCK; i += 32) {                                                      \
            INTS v[32 / WIDTH];                                                                    \
            for (int k = 0; k < 32 / WIDTH; k++)                                                   \
                v[k] = OF(to_##format)(MUL(LOAD(x + i + k * WIDTH), ALL(multiplier)));             \
            OF(store_bytes)(data + 4 + i, v);                                                      \
        }                                                                                          \
    }                                                                                              \
    TARGET static void OF(decode_##format)(const uint8_t *data, element *x) {                        \
        FLOATS scale = ALL(scale_of(data) * unit);                                                 \
        for (int i = 0; i < BLOCK; i += WIDTH) STORE(x + i, MUL(OF(load_##format)(data + 4 + i), scale)); \
    }                                                                                              \
    TARGET static void OF(decode_add_##format)(const uint8_t *data, element *x) {                    \
        FLOATS scale = ALL(scale_of(data) * unit);                                                 \
        for (int i = 0; i < BLOCK; i += WIDTH)                                                     \
            STORE(x + i, ADD(LOAD(x + i), MUL(OF(load_##format)(data + 4 + i), scale)));           \
    }

SCALED(int8, INT8, 1)
SCALED(fp8, FP8, 256)  // exact: a power of two, and scales of fp8 are at most FLT_MAX / 448

TARGET static void OF(encode_bf16)(const element *x, uint8_t *data) {
    for (int i = 0; i < BLOCK; i += WIDTH) {
        FLOATS v = LOAD(x + i);
        INTS bits = BITS(v), even = AND(SHIFT_RIGHT(bits, 16), ALL_INTS(1));
        INTS rounded = ADD_INTS(ADD_INTS(bits, even), ALL_INTS(0x7fff));
        INTS code = SHIFT_RIGHT(IF_NAN(v, OR(bits, ALL_INTS(0x400000)), rounded), 16);
        OF(store_halves)(data + 2 * i, AND(code, ALL_INTS(0xffff)));
    }
}

TARGET static void OF(encode_fp16)(const element *x, uint8_t *data) {
    for (int i = 0; i < BLOCK; i += WIDTH) OF(store_fp16)(data + 2 * i, LOAD(x + i));
}

#define HALF(format)                                                                               \
    TARGET static void OF(decode_##format)(const uint8_t *data, element *x) {                        \
        for (int i = 0; i < BLOCK; i += WIDTH) STORE(x + i, OF(load_##format)(data + 2 * i));      \
    }                                                                                              \
    TARGET static void OF(decode_add_##format)(const uint8_t *data, element *x) {                    \
        for (int i = 0; i < BLOCK; i += WIDTH) STORE(x + i, ADD(LOAD(x + i), OF(load_##format)(data + 2 * i))); \
    }

HALF(bf16)
HALF(fp16)

#undef ISA
#undef TARGET
#undef WIDTH
#undef FLOATS
#undef INTS
#undef ALL
#undef ALL_INTS
#undef LOAD
#undef STORE
#undef BITS
#undef FLOAT_OF
#undef ADD
#undef MUL
#undef MIN
#undef ADD_INTS
#undef SUB_INTS
#undef MAX_INTS
#undef AND
#undef OR
#undef SHIFT_RIGHT
#undef TO_INTS
#undef IF_NAN
#undef SCALED
#undef HALF
#undef JOIN_
#undef JOIN
#undef OF
