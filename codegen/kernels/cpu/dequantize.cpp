
// --- dequantize ---

INLINE void unpack(const uint8_t* packed, Floats* levels) {
    constexpr int bytes = CODE_BYTES / LANES;
    UNROLL
    for (int p = 0; p < bytes; p++) {
        const Ints wide = ints_of(read<Chars>(packed + p * LANES));
        UNROLL
        for (int place = 0; place < 8 / BITS; place++) {  // shift up to the top, and down with sign extension
            const Ints code = wide << (32 - (place + 1) * BITS) >> (32 - BITS);
            levels[p + place * bytes] = __builtin_convertvector(code, Floats) + AFTER;
        }
    }
}

struct Divisor {
    float value, inverse;
    bool power_of_two;  // if so, multiplying by the inverse gives the same bits and is much faster

    INLINE Divisor of(float value) {
        return {value, 1.0f / value, (read<uint32_t>(&value) & 0x7fffff) == 0};
    }
};

INLINE void put(Output* to, const Floats* sums, Divisor divisor, bool accumulate) {
    UNROLL
    for (int p = 0; p < PARTS; p++) {
        Floats sum = divisor.power_of_two ? sums[p] * divisor.inverse : sums[p] / divisor.value;
        if (accumulate) sum = load(to + p * LANES) + sum;
        store(to + p * LANES, sum);
    }
}

extern "C" void dequantize_sum(
    const Member* members, Output* const* outputs, int64_t count, int64_t ranks, int64_t stretches,
    const uint8_t* received, int64_t row_bytes, uint32_t step, uint32_t first_rank, uint32_t salt, float divisor,
    bool accumulate, int32_t threads
) {
    const Divisor by = Divisor::of(divisor);
    for_groups(members, count, stretches, threads, [&](int64_t m, int64_t stretch, int64_t first, int64_t last) {
        const Member& member = members[m];
        for (int64_t g = first; g < last; g++) {
            const int64_t at = stretch * member.groups() + g;
            uint32_t hashes[hashes_of(1)];
            Floats sums[PARTS], values[PARTS];
            for (int64_t rank = 0; rank < ranks; rank++) {
                const uint8_t* row = received + rank * row_bytes;
                const float scale = from_bf16(((const uint16_t*)(row + member.scales_at))[at]);
                unpack(row + member.codes_at + at * CODE_BYTES, values);
                if constexpr (ROTATE) hash_blocks(g, 1, sign_key(step, first_rank + rank, salt), hashes);
                decode(values, scale, ROTATE ? Signs::of(hashes) : Signs{});
                UNROLL
                for (int p = 0; p < PARTS; p++) sums[p] = rank == 0 ? values[p] : sums[p] + values[p];
            }
            Output* to = outputs[m] + stretch * member.numel + g * GROUP;
            const int64_t left = member.numel - g * GROUP;
            if (left >= GROUP) {
                put(to, sums, by, accumulate);
            } else {
                Output filled[GROUP] = {};
                memcpy(filled, to, left * sizeof(Output));
                put(filled, sums, by, accumulate);
                memcpy(to, filled, left * sizeof(Output));
            }
        }
    });
}
