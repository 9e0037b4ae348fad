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
INLINE float whole(float weight, int32_t) { return weight; }
template <int BITS>
INLINE float whole(uint16_t weight, int32_t remainder) { return joined<BITS>(weight, remainder); }

template <int BITS>
INLINE int32_t split(float value, uint32_t, float& weight) {
    weight = value;
    return 0;
}

template <int BITS>
INLINE int32_t split(float value, uint32_t random, uint16_t& weight) {
    const uint32_t kept = (bits_of(value) + random) >> (16 - BITS);
    const uint32_t upper = (kept + (1u << BITS >> 1)) >> BITS;
    weight = uint16_t(value == value ? upper : NO_NUMBER);
    return has_remainder(upper) ? int32_t(kept - (upper << BITS)) : 0;
}

// The smaller of two positive numbers; of NaN and a number, the number.
INLINE float least(float one, float other) {
    const uint32_t bits = bits_of(one), bound = bits_of(other);
    return from_bits(bits < bound ? bits : bound);
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

template <bool HALF>
struct Numbers {
    using type = float;
};
template <>
struct Numbers<true> {
    using type = uint16_t;
};

INLINE float widened(float value) { return value; }
INLINE float widened(uint16_t half) { return from_bf16(half); }
INLINE void narrow(float value, float& into) { into = value; }
INLINE void narrow(float value, uint16_t& into) { into = nearest_bf16(value); }

// The gradient to use; a loss scale is divided out in place.
template <bool SCALED, typename Number>
INLINE float gradient(Number& grad, const Factors& by) {
    float used = widened(grad);
    if (SCALED) {
        used = used / by.grad_scale;
        narrow(used, grad);
    }
    return used * by.sign;
}

// Loops run over arrays of fixed size that nothing else points to, so that the compiler vectorizes them. Maxima and
// minima are those of bits, because comparisons of floats that may be NaN become masks, which are slower.
template <bool HALF, bool SCALED>
static void update_codes(const Member& member, const Factors& by, int64_t begin, int64_t end) {
    constexpr int WORDS = HALF ? 25 : 17;
    using Number = typename Numbers<HALF>::type;
    const uint32_t key = uint32_t(member.key);
    for (int64_t at = begin; at < end; at += GROUP) {
        uint32_t* const record = member.state + at / GROUP * WORDS;
        Number* const parameter = static_cast<Number*>(member.parameter) + at;
        Number* const grad = static_cast<Number*>(member.grad) + at;
        Number weights[GROUP], grads[GROUP];
        int8_t first[GROUP], remainders[GROUP];
        uint8_t second[GROUP];
        memcpy(weights, parameter, sizeof weights);
        memcpy(grads, grad, sizeof grads);
        memcpy(first, record, GROUP);
        memcpy(second, record + 8, GROUP);
        if (HALF) memcpy(remainders, record + 16, GROUP);
        const float scale1 = from_bf16(uint16_t(record[WORDS - 1])), scale2 = from_bf16(uint16_t(record[WORDS - 1] >> 16));
        float values[GROUP], averages[GROUP], roots[GROUP];
        uint32_t largest1 = 0, largest2 = 0;
        for (int i = 0; i < GROUP; i++) {
            const float used = gradient<SCALED>(grads[i], by);
            const float share1 = float(first[i]) * FIRST_SHARE, share2 = float(second[i]) * SECOND_SHARE;
            const float root = share2 * share2 * scale2;
            const float value = whole<8>(weights[i], HALF ? remainders[i] : 0);
            const Updated found = updated(value, used, share1 * fabsf(share1) * scale1, root * root, by);
            values[i] = found.value;
            averages[i] = found.average;
            roots[i] = found.root;
            const uint32_t one = bits_of(found.average) & MAGNITUDE, two = bits_of(found.root) & MAGNITUDE;
            largest1 = one > largest1 ? one : largest1;
            largest2 = two > largest2 ? two : largest2;
        }
        const uint32_t bits1 = scale_bits(largest1), bits2 = scale_bits(largest2);
        const float inverse1 = bits1 ? 1 / from_bits(bits1 << 16) : 0, inverse2 = bits2 ? 1 / from_bits(bits2 << 16) : 0;
        for (int i = 0; i < GROUP; i++) {
            const uint32_t random = hash_32((bits_of(values[i]) + bits_of(averages[i]) * MIXER) ^ key);
            const float dither = float(int32_t(random & 0xFFF)) * DITHER;
            const float code1 = least(sqrtf(fabsf(averages[i]) * inverse1) * FIRST_STEPS + 0.5f, FIRST_STEPS);
            const float code2 = least(sqrtf(roots[i] * inverse2) * SECOND_STEPS + dither, SECOND_STEPS);
            const int32_t magnitude = int32_t(code1), found = int32_t(code2), smallest = roots[i] > 0;
            first[i] = int8_t(averages[i] < 0 ? -magnitude : magnitude);
            second[i] = uint8_t(found > smallest ? found : smallest);
            remainders[i] = int8_t(split<8>(values[i], random >> 24, weights[i]));
        }
        memcpy(parameter, weights, sizeof weights);
        if (SCALED) memcpy(grad, grads, sizeof grads);
        memcpy(record, first, GROUP);
        memcpy(record + 8, second, GROUP);
        if (HALF) memcpy(record + 16, remainders, GROUP);
        record[WORDS - 1] = bits2 << 16 | bits1;
    }
}

template <bool HALF, bool SCALED>
static void update_words(const Member& member, const Factors& by, int64_t begin, int64_t end) {
    constexpr int WORDS = HALF ? 3 : 2;
    using Number = typename Numbers<HALF>::type;
    for (int64_t at = begin; at < end; at++) {
        uint32_t* const record = member.state + at * WORDS;
        Number& weight = static_cast<Number*>(member.parameter)[at];
        const float used = gradient<SCALED>(static_cast<Number*>(member.grad)[at], by);
        const float value = whole<16>(weight, HALF ? int32_t(record[2]) : 0);
        const Updated found = updated(value, used, from_bits(record[0]), from_bits(record[1]), by);
        record[0] = bits_of(found.average);
        record[1] = bits_of(found.square);
        const int32_t remainder = split<16>(found.value, 0, weight);
        if (HALF) record[2] = uint32_t(remainder);
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
