// Adam and AdamW for fp32 parameters with stochastically rounded bf16 moments; specified by kernels/adam_reference.py.
//
// Bytes per element: 4 of gradient, read; 4 of parameter and 2 of each moment, read and written; 20 in all.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

constexpr int64_t GRAIN = 32768;  // minimum number of elements that is worth another thread
constexpr uint32_t NO_NUMBER = 0x7fc0;

struct Factors {
    float grad_scale, sign, coupled, decay, gain1, beta2, gain2, bias2, eps, step_size;
};

struct Member {  // a parameter
    float *parameter, *grad;
    uint16_t *exp_avg, *exp_avg_sq;
    int64_t numel;
    int64_t first;  // place of its first element in the unsharded parameter
    int64_t key;    // key of its random numbers
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

INLINE float from_bf16(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t to_bf16(float value, uint32_t random) {
    const uint32_t rounded = (bits_of(value) + random) >> 16;
    return uint16_t(value == value ? rounded : NO_NUMBER);
}

template <bool SCALED, bool COUPLED>
static void update(const Member& member, const Factors& by, int64_t begin, int64_t end) {
    float* __restrict parameter = member.parameter + begin;
    float* __restrict grad = member.grad + begin;
    uint16_t* __restrict exp_avg = member.exp_avg + begin;
    uint16_t* __restrict exp_avg_sq = member.exp_avg_sq + begin;
    const uint32_t key = uint32_t(member.key), place = uint32_t(member.first + begin);
    const uint32_t count = uint32_t(end - begin);  // at most GRAIN
    for (uint32_t i = 0; i < count; i++) {
        float used = grad[i];
        if (SCALED) grad[i] = used = used / by.grad_scale;
        used = used * by.sign;
        if (COUPLED) used = used + parameter[i] * by.coupled;
        const float before = from_bf16(exp_avg[i]);
        const float average = before + (used - before) * by.gain1;
        const float square = from_bf16(exp_avg_sq[i]) * by.beta2 + used * used * by.gain2;
        const float root = sqrtf(square) / by.bias2 + by.eps;
        parameter[i] = parameter[i] * by.decay + average * by.step_size / root;
        const uint32_t random = hash_32((place + i) ^ key);
        exp_avg[i] = to_bf16(average, random & 0xffff);
        exp_avg_sq[i] = to_bf16(square, random >> 16);
    }
}

extern "C" void fused_adam(
    const Member* members, const Factors* factors, int64_t count, bool scaled, bool coupled, int32_t threads
) {
    int64_t total = 0;
    for (int64_t m = 0; m < count; m++) total += members[m].numel;
    const auto share = [&](int64_t begin, int64_t end) {
        int64_t before = 0;
        for (int64_t m = 0; m < count && before < end; before += members[m++].numel) {
            const int64_t last = end - before < members[m].numel ? end - before : members[m].numel;
            for (int64_t at = begin > before ? begin - before : 0; at < last; at += GRAIN) {
                const int64_t until = at + GRAIN < last ? at + GRAIN : last;
                const auto run = scaled ? (coupled ? update<true, true> : update<true, false>)
                                        : (coupled ? update<false, true> : update<false, false>);
                run(members[m], factors[m], at, until);
            }
        }
    };
    const int64_t useful = 1 + total / GRAIN;
    if (threads > useful) threads = useful;
    if (threads <= 1) return share(0, total);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) share(total * thread / threads, total * (thread + 1) / threads);
}
