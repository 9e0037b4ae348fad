// AdamW on packed state; specified by kernels/adam_reference.py and zgraph/compression/packed_state.py.
//
// Bytes per element, of bf16 weights: 2 of gradient, read; 2 of weight and 3.125 of state, read and written.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

constexpr int64_t GRAIN = 32768;  // minimum number of elements that is worth another thread
constexpr int GROUP = 32;
constexpr float FIRST_STEPS = 127, SECOND_STEPS = 255;
constexpr float FIRST_SHARE = 1 / FIRST_STEPS, SECOND_SHARE = 1 / SECOND_STEPS, DITHER = 1 / 4096.0f;
constexpr uint32_t TINY_BITS = 0x0D800000, INF_BITS = 0x7F800000, MAGNITUDE = 0x7FFFFFFF, NO_NUMBER = 0x7FC0;
constexpr uint32_t MIXER = 0x9E3779B1;

struct Factors {
    float grad_scale, sign, decay, gain1, beta2, gain2, bias2, eps, step_size;
};

struct Member {  // a parameter
    void *parameter, *grad;
    uint32_t* state;
    int64_t numel;
    int64_t key;    // of its random numbers
    int64_t coded;  // whether its state consists of codes
    int64_t half;   // whether parameter and gradient are bf16
};

INLINE uint32_t hash_32(uint32_t word) {
    word ^= word >> 16;
    word *= 0x7FEB352Du;
    word ^= word >> 15;
    word *= 0x846CA68Bu;
    return word ^ (word >> 16);
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float from_bf16(uint16_t half) { return from_bits(uint32_t(half) << 16); }

INLINE uint16_t nearest_bf16(float value) {
    const uint32_t bits = bits_of(value), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return uint16_t(value == value ? rounded : NO_NUMBER);
}

// Whether a bf16 is a normal number.
INLINE bool has_remainder(uint32_t upper) { return ((upper + 0x80) & 0x7F80) > 0x80; }

// A weight of bf16 and a remainder of BITS bits.
template <int BITS>
INLINE float joined(uint16_t upper, int32_t remainder) {
    return from_bits((uint32_t(upper) << 16) + (uint32_t(has_remainder(upper) ? remainder : 0) << (16 - BITS)));
}

template <int BITS>
INLINE int32_t split(float value, uint32_t random, uint16_t& weight) {
    const uint32_t kept = uint32_t((uint64_t(bits_of(value)) + random) >> (16 - BITS));
    const uint32_t upper = (kept + (1u << BITS >> 1)) >> BITS;
    weight = uint16_t(value == value ? upper : NO_NUMBER);
    return has_remainder(upper) ? int32_t(kept - (upper << BITS)) : 0;
}

INLINE uint32_t scale_bits(uint32_t largest) {
    return largest < TINY_BITS ? 0 : largest < INF_BITS ? (largest + 0xFFFF) >> 16 : NO_NUMBER;
}

struct Updated {
    float value, average, square, root;
};

INLINE Updated updated(float value, float used, float average, float square, const Factors& by) {
    average = average + (used - average) * by.gain1;
    square = square * by.beta2 + used * used * by.gain2;
    const float root = sqrtf(square);
    return {value * by.decay + average * by.step_size / (root / by.bias2 + by.eps), average, square, root};
}

template <bool HALF, bool SCALED>
INLINE float gradient(void* grads, int64_t place, const Factors& by) {
    float used = HALF ? from_bf16(static_cast<uint16_t*>(grads)[place]) : static_cast<float*>(grads)[place];
    if (SCALED) {
        used = used / by.grad_scale;
        if (HALF) static_cast<uint16_t*>(grads)[place] = nearest_bf16(used);
        else static_cast<float*>(grads)[place] = used;
    }
    return used * by.sign;
}

template <bool HALF, bool SCALED>
static void update_codes(const Member& member, const Factors& by, int64_t begin, int64_t end) {
    constexpr int WORDS = HALF ? 25 : 17;
    const uint32_t key = uint32_t(member.key);
    for (int64_t at = begin; at < end; at += GROUP) {
        uint32_t* const record = member.state + at / GROUP * WORDS;
        int8_t* const first = reinterpret_cast<int8_t*>(record);
        uint8_t* const second = reinterpret_cast<uint8_t*>(record + 8);
        int8_t* const remainders = reinterpret_cast<int8_t*>(record + 16);
        uint16_t* const halves = static_cast<uint16_t*>(member.parameter) + at;
        float* const floats = static_cast<float*>(member.parameter) + at;
        const float scale1 = from_bf16(uint16_t(record[WORDS - 1])), scale2 = from_bf16(uint16_t(record[WORDS - 1] >> 16));
        float values[GROUP], averages[GROUP], roots[GROUP];
        for (int i = 0; i < GROUP; i++) {
            const float used = gradient<HALF, SCALED>(member.grad, at + i, by);
            const float share1 = float(first[i]) * FIRST_SHARE, share2 = float(second[i]) * SECOND_SHARE;
            const float root = share2 * share2 * scale2;
            const float value = HALF ? joined<8>(halves[i], remainders[i]) : floats[i];
            const Updated found = updated(value, used, share1 * fabsf(share1) * scale1, root * root, by);
            values[i] = found.value;
            averages[i] = found.average;
            roots[i] = found.root;
        }
        uint32_t largest1 = 0, largest2 = 0;
        for (int i = 0; i < GROUP; i++) {
            const uint32_t one = bits_of(averages[i]) & MAGNITUDE, two = bits_of(roots[i]) & MAGNITUDE;
            largest1 = one > largest1 ? one : largest1;
            largest2 = two > largest2 ? two : largest2;
        }
        const uint32_t bits1 = scale_bits(largest1), bits2 = scale_bits(largest2);
        const float inverse1 = bits1 ? 1 / from_bits(bits1 << 16) : 0, inverse2 = bits2 ? 1 / from_bits(bits2 << 16) : 0;
        for (int i = 0; i < GROUP; i++) {
            const uint32_t random = hash_32((bits_of(values[i]) + bits_of(averages[i]) * MIXER) ^ key);
            float code1 = sqrtf(fabsf(averages[i]) * inverse1) * FIRST_STEPS + 0.5f;
            float code2 = sqrtf(roots[i] * inverse2) * SECOND_STEPS + float(int32_t(random & 0xFFF)) * DITHER;
            code1 = code1 < FIRST_STEPS ? code1 : FIRST_STEPS;
            code2 = code2 < SECOND_STEPS ? code2 : SECOND_STEPS;
            code2 = roots[i] > 0 && code2 < 1 ? 1 : code2;
            const int32_t magnitude = int32_t(code1);
            first[i] = int8_t(averages[i] < 0 ? -magnitude : magnitude);
            second[i] = uint8_t(int32_t(code2));
            if (HALF) {
                uint16_t weight;
                remainders[i] = int8_t(split<8>(values[i], random >> 24, weight));
                halves[i] = weight;
            } else {
                floats[i] = values[i];
            }
        }
        record[WORDS - 1] = bits2 << 16 | bits1;
    }
}

template <bool HALF, bool SCALED>
static void update_words(const Member& member, const Factors& by, int64_t begin, int64_t end) {
    constexpr int WORDS = HALF ? 3 : 2;
    for (int64_t at = begin; at < end; at++) {
        uint32_t* const record = member.state + at * WORDS;
        uint16_t& half = static_cast<uint16_t*>(member.parameter)[at];
        float& whole = static_cast<float*>(member.parameter)[at];
        const float used = gradient<HALF, SCALED>(member.grad, at, by);
        const float value = HALF ? joined<16>(half, int32_t(record[2])) : whole;
        const Updated found = updated(value, used, from_bits(record[0]), from_bits(record[1]), by);
        record[0] = bits_of(found.average);
        record[1] = bits_of(found.square);
        if (HALF) record[2] = uint32_t(split<16>(found.value, 0, half));
        else whole = found.value;
    }
}

using Update = void (*)(const Member&, const Factors&, int64_t, int64_t);

template <bool HALF, bool SCALED>
INLINE Update update_of(const Member& member) {
    return member.coded ? update_codes<HALF, SCALED> : update_words<HALF, SCALED>;
}

extern "C" void packed_adamw(
    const Member* members, const Factors* factors, int64_t count, bool scaled, int32_t threads
) {
    int64_t total = 0;
    for (int64_t m = 0; m < count; m++) total += members[m].numel;
    const auto share = [&](int64_t begin, int64_t end) {  // a group belongs to the share in which it begins
        int64_t before = 0;
        for (int64_t m = 0; m < count && before < end; before += members[m++].numel) {
            const Member& member = members[m];
            const int64_t unit = member.coded ? GROUP : 1;
            const auto bound = [&](int64_t place) {
                const int64_t units = place > before ? (place - before + unit - 1) / unit * unit : 0;
                return units < member.numel ? units : member.numel;
            };
            const auto run = member.half ? (scaled ? update_of<true, true>(member) : update_of<true, false>(member))
                                         : (scaled ? update_of<false, true>(member) : update_of<false, false>(member));
            const int64_t first = bound(begin), last = bound(end);
            if (first < last) run(member, factors[m], first, last);
        }
    };
    const int64_t useful = 1 + total / GRAIN;
    if (threads > useful) threads = useful;
    if (threads <= 1) return share(0, total);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) share(total * thread / threads, total * (thread + 1) / threads);
}
