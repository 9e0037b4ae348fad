
// --- multiply ---

// The sum of all lanes.
INLINE float sum_of(Floats values) {
    float sum = 0;
    UNROLL
    for (int i = 0; i < LANES; i++) sum += values[i];
    return sum;
}

constexpr int MOST_ROWS = 4;  // with more, sums and weights do not fit into 16 registers

// Multiplies `ROWS` rows of inputs, `numel` elements each, with one row of weights; each weight is decoded once.
template <int ROWS>
INLINE void multiply_row(
    const float* inputs, int64_t numel, const uint8_t* codes, const uint16_t* scales, float* outputs, int64_t stride
) {
    constexpr int CHAINS = MOST_ROWS / ROWS;  // of additions: in a single one, each would wait for the last
    Floats sums[ROWS][CHAINS] = {};
    for (int64_t g = 0; g < numel / GROUP; g++) {
        const Floats scale = all(from_bf16(scales[g]));
        Floats weights[PARTS];
        unpack(codes + g * CODE_BYTES, weights);
        UNROLL
        for (int p = 0; p < PARTS; p++) {
            const Floats weight = weights[p] * scale;
            UNROLL
            for (int row = 0; row < ROWS; row++)
                sums[row][p % CHAINS] =
                    times_plus(weight, load(inputs + row * numel + g * GROUP + p * LANES), sums[row][p % CHAINS]);
        }
    }
    UNROLL
    for (int row = 0; row < ROWS; row++) {
        Floats sum = sums[row][0];
        UNROLL
        for (int chain = 1; chain < CHAINS; chain++) sum += sums[row][chain];
        outputs[row * stride] = sum_of(sum);
    }
}

extern "C" void multiply(
    const float* inputs, int64_t input_rows, int64_t numel, const uint8_t* received, int64_t row_bytes,
    int64_t codes_at, int64_t scales_at, int64_t rank_rows, int64_t weight_rows, float* outputs, int32_t threads
) {
    const auto share = [&](int64_t first, int64_t last) {
        for (int64_t row = 0; row < input_rows;) {  // a few inputs at a time, which stay in the cache
            const int64_t left = input_rows - row;
            const float* from = inputs + row * numel;
            for (int64_t n = first; n < last; n++) {
                const uint8_t* payload = received + n / rank_rows * row_bytes;
                const int64_t group = n % rank_rows * (numel / GROUP);
                const uint8_t* codes = payload + codes_at + group * CODE_BYTES;
                const uint16_t* scales = (const uint16_t*)(payload + scales_at) + group;
                float* to = outputs + row * weight_rows + n;
                if (left >= MOST_ROWS) multiply_row<MOST_ROWS>(from, numel, codes, scales, to, weight_rows);
                else if (left == 3) multiply_row<3>(from, numel, codes, scales, to, weight_rows);
                else if (left == 2) multiply_row<2>(from, numel, codes, scales, to, weight_rows);
                else multiply_row<1>(from, numel, codes, scales, to, weight_rows);
            }
            row += left < MOST_ROWS ? left : MOST_ROWS;
        }
    };
    const int64_t useful = 1 + weight_rows * numel / GRAIN;
    if (threads > useful) threads = useful;
    if (threads <= 1) return share(0, weight_rows);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++)
        share(weight_rows * thread / threads, weight_rows * (thread + 1) / threads);
}
