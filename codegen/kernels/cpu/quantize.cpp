
// --- quantize ---

// Number of groups that go through each step together. The steps of a single group wait for one another; in a batch
// they overlap, and per-group values such as scales are lanes of a vector. 2048 elements fit in the L1 cache.
constexpr int BATCH = GROUP * LANES <= 2048 ? LANES : 2048 / GROUP;

struct Place {
    const Grad* grad;
    int64_t present;  // elements of the gradient, without padding
    void* error;
    uint16_t* error_scale;
};

// Levels c + b of integers u.
template <int clip> INLINE Floats levels_of(Floats integers) {
    if constexpr (!ROTATE) return clamp(rounded_product(integers, SLOPES[clip]) - ROUNDER, LOW, HIGH);
    Floats grid = integers + ROUNDER;
    float begin = ROUNDER;
    if constexpr (CLIPPED[clip]) {
        grid = rounded_product(clamp_share(fused(integers, all(SLOPES[clip]), all(0.5f))), 2 * TOP + 1);
        begin += TOP + 1;
    }
    return times_plus((Floats)((Ints)grid & -STEP), all(1.0f / STEP), all(AFTER - begin / STEP));
}

INLINE void pack(const Floats* levels, uint8_t* to) {
    constexpr int bytes = CODE_BYTES / LANES;  // number of byte vectors that the codes of a group fill
    constexpr int half = 1 << (BITS - 1), ones = 255 / ((1 << BITS) - 1);  // a one for each code of a byte
    UNROLL
    for (int p = 0; p < bytes; p++) {
        Floats packed = levels[p + (8 / BITS - 1) * bytes];
        UNROLL
        for (int place = 8 / BITS - 2; place >= 0; place--)
            packed = times_plus(packed, all(1 << BITS), levels[p + place * bytes]);
        // Codes plus `half`, so that no code is negative and borrows from the next; this flips each code's top bit.
        const Floats integers = packed + (half - AFTER) * ones + ROUNDER;
        const Bytes narrow = low_bytes((Ints)integers ^ (half * ones));
        memcpy(to + p * LANES, &narrow, LANES);
    }
}

INLINE Ints larger(Ints one, Ints other) { return one > other ? one : other; }

// The bits of the largest magnitude in each lane.
INLINE Ints largest_in(const Floats* values) {
    Ints largest = {};
    UNROLL
    for (int p = 0; p < PARTS; p++) largest = larger((Ints)values[p] & 0x7fffffff, largest);
    return largest;
}

// If sums are exact in any order, the sum of each lane, which `totals` adds up; otherwise the whole sum.
INLINE Floats sum_of_products(const Floats* first, const Floats* second) {
    if constexpr (EXACT_SUMS) {
        Floats sum = first[0] * second[0];
        UNROLL
        for (int p = 1; p < PARTS; p++) sum = times_plus(first[p], second[p], sum);
        return sum;
    }
    return all(ordered_sum(first, second));
}

// Lane s of the result is values[s] with all its lanes merged. `values` is overwritten.
template <int distance = LANES / 2, class Vector, class Merge>
INLINE Vector merge_lanes(Vector (&values)[BATCH], const Merge& merge) {
    if constexpr (distance > 0) {
        UNROLL
        for (int s = 0; s < BATCH && s < distance; s++) {
            if constexpr (distance < BATCH) values[s] = merge_pair<distance>(values[s], values[s + distance], merge);
            else values[s] = merge(values[s], exchange<distance>(values[s]));
        }
        return merge_lanes<distance / 2>(values, merge);
    }
    return values[0];
}

// Lane s of the result is the sum over group s.
INLINE Floats totals(Floats (&sums)[BATCH]) {
    if constexpr (EXACT_SUMS) return merge_lanes(sums, add);
    Floats found = {};
    UNROLL
    for (int s = 0; s < BATCH; s++) found[s] = sums[s][0];
    return found;
}

struct Batch {  // consecutive groups: addresses of their inputs and outputs
    int count;
    const Grad* grad;
    Error* error;
    uint16_t* error_scale;
    uint8_t* codes;
    uint16_t* scale;
};

struct Tried {  // results for a clipping level: c + b, <u, c + b> and |c + b|^2
    Floats levels[BATCH][PARTS];
    Floats along[BATCH] = {}, square[BATCH] = {};
};

template <int clip = 0> INLINE void try_levels(Floats integers, Tried* tried, int s, int p) {
    if constexpr (clip < CLIPS) {
        tried[clip].levels[s][p] = levels_of<clip>(integers);
        try_levels<clip + 1>(integers, tried, s, p);
    }
}

// Groups that are not finite get codes of 0 and a scale of NaN, and keep their error.
INLINE void quantize_batch(const Batch& batch, const uint32_t* hashes) {
    Floats lost[BATCH][PARTS];  // at first, the values to send
    Floats power[BATCH] = {};  // |u|^2
    Ints top[BATCH] = {};
    Tried tried[CLIPS];

    for (int s = 0; s < batch.count; s++) {
        const Signs signs = ROTATE ? Signs::of(hashes + s * BLOCKS) : Signs{};
        const float wide = FEEDBACK && ERROR_INT8 ? from_bf16(batch.error_scale[s]) : 1.0f;
        Floats* const rotated = tried[0].levels[s];  // overwritten by levels later
        UNROLL
        for (int p = 0; p < PARTS; p++) {
            const int at = s * GROUP + p * LANES;
            rotated[p] = load(batch.grad + at);
            if constexpr (FEEDBACK) {
                const Floats old = load(batch.error + at);
                rotated[p] += ERROR_INT8 ? old * wide : old;
                // The new error is RESIDUAL_DECAY * old + RESIDUAL_GAIN * (compensated - sent). In 8 bits, all of it is
                // divided by RESIDUAL_GAIN, so that the factor only enters the scale.
                lost[s][p] = ERROR_INT8 ? rotated[p] + old * (wide * OLD_OVER_LOST) : rotated[p];
            }
            if constexpr (ROTATE) rotated[p] = signs.times(rotated[p], p);
        }
        if constexpr (ROTATE) hadamard(rotated);
        top[s] = largest_in(rotated);
    }
    const Ints top_bits = merge_lanes(top, larger), is_finite = top_bits < HUGE_BITS;
    const Floats largest = (Floats)top_bits;
    const Ints used = is_finite & (largest >= TINY);
    float inverse[LANES];
    store(inverse, used ? reciprocal(largest) * TOP : Floats{});

    for (int s = 0; s < batch.count; s++) {
        Floats integers[PARTS];
        UNROLL
        for (int p = 0; p < PARTS; p++) {
            const Floats rounded = rounded_product(tried[0].levels[s][p], inverse[s]) - ROUNDER;
            integers[p] = inverse[s] != 0 ? rounded : Floats{};
            try_levels(integers[p], tried, s, p);
        }
        UNROLL
        for (int clip = 0; clip < CLIPS; clip++) {
            const Floats* const levels = tried[clip].levels[s];
            tried[clip].along[s] = sum_of_products(integers, levels);
            if constexpr (CLIPS > 1 || !UNBIASED) tried[clip].square[s] = sum_of_products(levels, levels);
        }
        if constexpr (UNBIASED) power[s] = sum_of_products(integers, integers);
    }
    Ints best = {};
    Floats best_along = totals(tried[0].along), best_square = totals(tried[0].square);
    UNROLL
    for (int clip = 1; clip < CLIPS; clip++) {
        const Floats along = totals(tried[clip].along), square = totals(tried[clip].square);
        const Ints better = along * along * best_square > best_along * best_along * square;
        best = better ? Ints{} + clip : best;
        best_along = better ? along : best_along, best_square = better ? square : best_square;
    }
    const Floats over = UNBIASED ? totals(power) : best_along, under = UNBIASED ? best_along : best_square;
    const Floats ratio = used ? over * reciprocal(under) * (largest * UNIT) : Floats{};
    const Words scale_bits = is_finite ? bf16_bits(ratio) : Words{} + NO_NUMBER;
    float scale[LANES];
    int32_t chosen[LANES], finite[LANES];
    store(scale, (Floats)(scale_bits << 16));
    memcpy(chosen, &best, sizeof best);
    memcpy(finite, &is_finite, sizeof is_finite);

    for (int s = 0; s < batch.count; s++) {
        Floats* const levels = tried[chosen[s]].levels[s];
        pack(levels, batch.codes + s * CODE_BYTES);
        batch.scale[s] = upper_half(scale[s]);
        if constexpr (FEEDBACK) {
            decode(levels, scale[s], ROTATE ? Signs::of(hashes + s * BLOCKS) : Signs{});
            UNROLL
            for (int p = 0; p < PARTS; p++) lost[s][p] -= levels[p];
            if constexpr (ERROR_INT8) top[s] = largest_in(lost[s]);
            else if (finite[s]) {
                float* const error = (float*)batch.error + s * GROUP;
                UNROLL
                for (int p = 0; p < PARTS; p++)
                    store(error + p * LANES, RESIDUAL_DECAY * load(error + p * LANES) + RESIDUAL_GAIN * lost[s][p]);
            }
        }
    }
    if constexpr (FEEDBACK && ERROR_INT8) {
        const Floats most = (Floats)merge_lanes(top, larger);
        const Floats sizes = (Floats)(bf16_bits(most >= TINY ? most * LOST_SHARE_127TH : Floats{}) << 16);
        store(scale, sizes);
        store(inverse, sizes > 0 ? reciprocal(sizes) * RESIDUAL_GAIN : Floats{});
        for (int s = 0; s < batch.count; s++) {
            if (!finite[s]) continue;
            batch.error_scale[s] = upper_half(scale[s]);
            UNROLL
            for (int p = 0; p < PARTS; p++) {
                const Bytes narrow = low_bytes((Ints)rounded_product(lost[s][p], inverse[s]));
                memcpy(batch.error + s * GROUP + p * LANES, &narrow, LANES);
            }
        }
    }
}

extern "C" void quantize(
    const Member* members, const Place* places, int64_t count, int64_t world, int64_t stretches, uint8_t* payload,
    int64_t row_bytes, uint32_t step, uint32_t rank, uint32_t salt, int32_t threads
) {
    const uint32_t key = sign_key(step, rank, salt);
    for_groups(members, count, stretches * world, threads, [&](int64_t m, int64_t chunk, int64_t first, int64_t last) {
        const Member& member = members[m];
        const Place& place = places[m];
        const int64_t groups = member.groups();
        uint8_t* row = payload + chunk % world * row_bytes;  // chunk s * world + d is stretch s of row d
        int64_t present = place.present - chunk * member.numel;
        if (present > member.numel) present = member.numel;
        // Groups before the one in which the chunk or the gradient ends; that group is a batch of its own.
        const int64_t full = present < 0 ? 0 : present / GROUP;
        for (int64_t g = first, size; g < last; g += size) {
            const int64_t left = (full < last ? full : last) - g;
            size = left < 1 ? 1 : left < BATCH ? left : BATCH;
            const int64_t at = chunk / world * groups + g, error_at = chunk * groups + g;
            Batch batch = {
                int(size),
                place.grad + chunk * member.numel + g * GROUP,
                (Error*)place.error + error_at * GROUP,
                place.error_scale + error_at,
                row + member.codes_at + at * CODE_BYTES,
                (uint16_t*)(row + member.scales_at) + at,
            };
            Grad filled[GROUP];
            if (g >= full) {
                memset(filled, 0, sizeof filled);
                if (g * GROUP < present) memcpy(filled, batch.grad, (present - g * GROUP) * sizeof(Grad));
                batch.grad = filled;
            }
            uint32_t hashes[hashes_of(BATCH)];
            if constexpr (ROTATE) hash_blocks(g, size, key, hashes);
            quantize_batch(batch, hashes);
        }
    });
}
