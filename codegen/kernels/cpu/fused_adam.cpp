// Adam and AdamW for fp32 parameters and moments, to the bits of torch's fused CPU kernel: kernels/cpu/fused_adam.py.
//
// Torch computes whole vectors of `lanes` elements in one way, and what is left at a tensor's end in another: compilers
// have contracted other products with sums there. Both are written out below, a fused multiply-add as one call.
// Bytes per element: 4 of gradient, read; 4 of parameter and of each moment, read and written; 28 in all.

#include <math.h>
#include <stdint.h>

constexpr int64_t GRAIN = 32768;  // elements below which another thread does not pay
constexpr int64_t LINE = 16;      // elements of a cache line, which threads do not share

struct Factors {
    float grad_scale, sign, coupled, decay, gain1, beta2, gain2, bias2, eps, step_size;
};

struct Member {  // a parameter
    float *parameter, *grad, *exp_avg, *exp_avg_sq;
    int64_t numel;
};

// SCALED: gradients are divided by a scale. COUPLED: weight decay is added to them. NEAR: averages are moved from where
// they are, not from gradients. TAIL: what is left at the end.
template <bool SCALED, bool COUPLED, bool NEAR, bool TAIL>
static void update(const Member& member, const Factors& by, int64_t begin, int64_t end) {
    float* __restrict parameter = member.parameter + begin;
    float* __restrict grad = member.grad + begin;
    float* __restrict exp_avg = member.exp_avg + begin;
    float* __restrict exp_avg_sq = member.exp_avg_sq + begin;
    const int64_t count = end - begin;
    for (int64_t i = 0; i < count; i++) {
        float used = grad[i];
        if (SCALED) grad[i] = used = used / by.grad_scale;
        used = used * by.sign;
        if (COUPLED) used = fmaf(parameter[i], by.coupled, used);
        const float before = exp_avg[i], away = used - before;
        const float average = NEAR   ? fmaf(by.gain1, away, before)
                              : TAIL ? fmaf(-away, 1 - by.gain1, used)
                                     : fmaf(by.gain1 - 1, away, used);
        const float gained = by.gain2 * used;
        const float square = TAIL ? fmaf(exp_avg_sq[i], by.beta2, gained * used)
                                  : fmaf(gained, used, exp_avg_sq[i] * by.beta2);
        const float root = sqrtf(square) / by.bias2 + by.eps;
        exp_avg[i] = average;
        exp_avg_sq[i] = square;
        parameter[i] = parameter[i] * by.decay + by.step_size * average / root;
    }
}

using Update = void (*)(const Member&, const Factors&, int64_t, int64_t);

template <bool TAIL>
static Update choose(bool scaled, bool coupled, bool near) {
    static const Update known[] = {
        update<false, false, false, TAIL>, update<false, false, true, TAIL>, update<false, true, false, TAIL>,
        update<false, true, true, TAIL>,   update<true, false, false, TAIL>, update<true, false, true, TAIL>,
        update<true, true, false, TAIL>,   update<true, true, true, TAIL>,
    };
    return known[4 * scaled + 2 * coupled + near];
}

// All members in one region of threads: a region for each would make them wait for each other that often.
extern "C" void fused_adam_fp32(
    const Member* members,
    const Factors* factors,
    int64_t count,
    bool scaled,
    bool coupled,
    bool near,
    int64_t lanes,
    int32_t threads
) {
    const Update body = choose<false>(scaled, coupled, near), tail = choose<true>(scaled, coupled, near);
    int64_t total = 0;
    for (int64_t m = 0; m < count; m++) total += members[m].numel;
    const auto share = [&](int64_t begin, int64_t end) {
        int64_t before = 0;
        for (int64_t m = 0; m < count && before < end; before += members[m++].numel) {
            const Member& member = members[m];
            const auto place = [&](int64_t at) {  // in this member, at a cache line
                const int64_t line = (at - before) / LINE * LINE;
                return at <= before ? 0 : at >= before + member.numel ? member.numel : line;
            };
            const int64_t last = place(end), whole = member.numel / lanes * lanes;
            int64_t at = place(begin);
            if (at < last && at < whole) body(member, factors[m], at, last < whole ? last : whole);
            if (at < last && last > whole) tail(member, factors[m], at > whole ? at : whole, last);
        }
    };
    const int64_t useful = 1 + total / GRAIN;
    if (threads > useful) threads = useful;
    if (threads <= 1) return share(0, total);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) share(total * thread / threads, total * (thread + 1) / threads);
}
