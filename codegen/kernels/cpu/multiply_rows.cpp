
// --- multiply_rows ---

constexpr int64_t SUMS = 8192;  // sums of a tile, which the first level of a cache holds
constexpr int TOGETHER = 8;  // rows of weights for which a sum is loaded and stored once

// Adds one group of each of ROWS rows of weights, times the input of that row, to the sums of all rows of inputs.
template <int ROWS>
INLINE void add_groups(
    const float* inputs, int64_t input_rows, int64_t weight_rows, const uint8_t* const* codes,
    const uint16_t* const* scales, int64_t g, float* outputs, int64_t stride
) {
    float weights[ROWS][GROUP];
    UNROLL
    for (int k = 0; k < ROWS; k++) {
        Floats levels[PARTS];
        unpack(codes[k] + g * CODE_BYTES, levels);
        const Floats scale = all(from_bf16(scales[k][g]));
        UNROLL
        for (int p = 0; p < PARTS; p++) store(weights[k] + p * LANES, levels[p] * scale);
    }
    for (int64_t row = 0; row < input_rows; row++) {
        const float* input = inputs + row * weight_rows;
        float* to = outputs + row * stride + g * GROUP;
        for (int p = 0; p < PARTS; p++) {
            Floats sum = load(to + p * LANES);
            UNROLL
            for (int k = 0; k < ROWS; k++) sum = times_plus(load(weights[k] + p * LANES), all(input[k]), sum);
            store(to + p * LANES, sum);
        }
    }
}

extern "C" void multiply_rows(
    const float* inputs, int64_t input_rows, int64_t weight_rows, const uint8_t* received, int64_t row_bytes,
    int64_t codes_at, int64_t scales_at, int64_t rank_rows, int64_t columns, float* outputs, int32_t threads
) {
    const int64_t groups = columns / GROUP;
    const auto share = [&](int64_t first, int64_t last) {  // groups of each row
        for (int64_t row = 0; row < input_rows; row++)
            memset(outputs + row * columns + first * GROUP, 0, (last - first) * GROUP * sizeof(float));
        const int64_t fitting = SUMS / (GROUP * (input_rows ? input_rows : 1)), most = fitting ? fitting : 1;
        for (int64_t begin = first; begin < last; begin += most) {
            const int64_t end = begin + most < last ? begin + most : last;
            for (int64_t k = 0; k < weight_rows;) {
                const uint8_t* codes[TOGETHER];
                const uint16_t* scales[TOGETHER];
                const bool together = k + TOGETHER <= weight_rows;
                for (int i = 0; i < (together ? TOGETHER : 1); i++) {
                    const uint8_t* payload = received + (k + i) / rank_rows * row_bytes;
                    const int64_t at = (k + i) % rank_rows * groups;
                    codes[i] = payload + codes_at + at * CODE_BYTES;
                    scales[i] = (const uint16_t*)(payload + scales_at) + at;
                }
                for (int64_t g = begin; g < end; g++) {
                    const float* from = inputs + k;
                    if (together) add_groups<TOGETHER>(from, input_rows, weight_rows, codes, scales, g, outputs, columns);
                    else add_groups<1>(from, input_rows, weight_rows, codes, scales, g, outputs, columns);
                }
                k += together ? TOGETHER : 1;
            }
        }
    };
    const int64_t useful = 1 + weight_rows * columns / GRAIN, most = useful < groups ? useful : groups;
    if (threads > most) threads = most;
    if (threads <= 1) return share(0, groups);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++)
        share(groups * thread / threads, groups * (thread + 1) / threads);
}
