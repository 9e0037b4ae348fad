
constexpr int64_t GRAIN = 32768;  // minimum number of elements that is worth another thread

// --- LANES numbers at a time: the capacity of a register, but at most the bytes of a group's codes ---

#if defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int NATIVE = 16;
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif
constexpr int CODE_BYTES = GROUP * BITS / 8;  // bytes of a group's codes
constexpr int LANES = CODE_BYTES < NATIVE ? CODE_BYTES : NATIVE;
constexpr int PARTS = GROUP / LANES;  // vectors per group
constexpr int RUN = 8;  // neighbours that belong to the same block
constexpr int BLOCKS = GROUP > HADAMARD ? GROUP / HADAMARD : 1;
constexpr int ROW = RUN * BLOCKS;  // distance between consecutive runs of a block, in elements
constexpr int WORDS = LANES < ROW ? ROW / LANES : 1;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef int16_t SignedShorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t Chars __attribute__((vector_size(LANES)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

template <class To, class From> INLINE To read(const From* from) {
    To to;
    memcpy(&to, from, sizeof to);
    return to;
}

INLINE Words lanes() {  // 0, 1, 2, ...
    Words lane;
    UNROLL
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane;
}

INLINE Floats all(float value) { return Floats{} + value; }

INLINE Words words_of(Shorts shorts) { return __builtin_convertvector(shorts, Words); }

INLINE Floats load(const float* from) { return read<Floats>(from); }

INLINE Floats load(const Bf16* from) { return (Floats)(words_of(read<Shorts>(from)) << 16); }

INLINE Floats load(const Half* from) {
    const Words bits = words_of(read<Shorts>(from));
    const Words magnitude = (bits & 0x7fff) << 13;
    const Words finite = (Words)((Floats)magnitude * 0x1p112f);  // moves the exponent; right for denormals, too
    const Words special = (Words)(magnitude >= (0x7c00u << 13)) & 0x7f800000;
    return (Floats)(finite | special | ((bits & 0x8000) << 16));
}

// In two steps: GCC would scalarise a single conversion that widens fourfold.
INLINE Ints ints_of(Chars chars) {
#ifdef __AVX512F__
    if constexpr (LANES == 16) {
        const __m512i wide = _mm512_cvtepi8_epi32(read<__m128i>(&chars));
        return read<Ints>(&wide);
    }
#endif
#ifdef __AVX2__
    if constexpr (LANES == 8) {
        const __m256i wide = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(read<int64_t>(&chars)));
        return read<Ints>(&wide);
    }
#endif
    return __builtin_convertvector(__builtin_convertvector(chars, SignedShorts), Ints);
}

INLINE Floats load(const int8_t* from) { return __builtin_convertvector(ints_of(read<Chars>(from)), Floats); }

INLINE void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

INLINE Words bf16_bits(Floats values) {
    const Words bits = (Words)values;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return values == values ? rounded : Words{} + BF16_NAN;
}

INLINE void store(Bf16* to, Floats values) {
    const Shorts shorts = __builtin_convertvector(bf16_bits(values), Shorts);
    memcpy(to, &shorts, sizeof shorts);
}

INLINE void store(Half* to, Floats values) {
    const Words sign = (Words)values & 0x80000000, magnitude = (Words)values ^ sign;
    const Words normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    const Words denormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000;  // the addition rounds
    const Words special = (Words)(magnitude > 0x7f800000) & 0x200 | 0x7c00;
    const Words finite = magnitude < 0x38800000 ? denormal : normal;
    const Words half = (magnitude >= 0x47800000 ? special : finite) | sign >> 16;
    const Shorts shorts = __builtin_convertvector(half, Shorts);
    memcpy(to, &shorts, sizeof shorts);
}

INLINE float from_bf16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    return read<float>(&wide);
}

INLINE uint16_t upper_half(float value) { return read<uint32_t>(&value) >> 16; }

// 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits of the sum.
constexpr float ROUNDER = 12582912.0f;

// values * by + more, rounded once; without an FMA instruction in doubles, which can hold the product and that sum.
#ifdef __FMA__
INLINE __m128 fused(__m128 values, __m128 by, __m128 more) { return _mm_fmadd_ps(values, by, more); }
INLINE __m256 fused(__m256 values, __m256 by, __m256 more) { return _mm256_fmadd_ps(values, by, more); }
#ifdef __AVX512F__
INLINE __m512 fused(__m512 values, __m512 by, __m512 more) { return _mm512_fmadd_ps(values, by, more); }
#endif
template <class Vector> INLINE Vector fused(Vector values, Vector by, Vector more) {
    Vector sums;
    UNROLL
    for (int i = 0; i < LANES; i++) sums[i] = __builtin_fmaf(values[i], by[i], more[i]);
    return sums;
}
#else
typedef double Doubles __attribute__((vector_size(8 * LANES)));

INLINE Floats fused(Floats values, Floats by, Floats more) {
    const Doubles product = __builtin_convertvector(values, Doubles) * __builtin_convertvector(by, Doubles);
    return __builtin_convertvector(product + __builtin_convertvector(more, Doubles), Floats);
}
#endif

// values * by + more for exact products, for which it does not matter whether they are rounded first.
INLINE Floats times_plus(Floats values, Floats by, Floats more) {
#ifdef __FMA__
    return fused(values, by, more);
#else
    return values * by + more;
#endif
}

// The integer nearest to an unrounded product, plus ROUNDER.
INLINE Floats rounded_product(Floats values, float by) {
#ifdef __FMA__
    return fused(values, all(by), all(ROUNDER));
#else
    constexpr double WIDE = 6755399441055744.0;  // 1.5 * 2^52
    const Doubles product = __builtin_convertvector(values, Doubles) * double(by);
    return __builtin_convertvector(product + WIDE - WIDE, Floats) + ROUNDER;
#endif
}

// 1 / values by Newton's method, for positive numbers that are neither tiny nor huge; arbitrary for others.
INLINE Floats reciprocal(Floats values) {
    Floats found = (Floats)(RECIPROCAL - (Ints)values);
    UNROLL
    for (int step = 0; step < NEWTON_STEPS; step++) found *= fused(-values, found, all(2.0f));
    return found;
}

// For low < 0 < high and no NaN. As signed integers, the bits of positive floats are in order and those of negative
// floats are below them; as unsigned integers, it is the other way round. GCC has one instruction for each minimum.
INLINE Floats clamp(Floats values, float low, float high) {
    const Ints top = (Ints)all(high);
    const Words bottom = (Words)all(low);
    const Ints below = (Ints)values < top ? (Ints)values : top;
    return (Floats)((Words)below < bottom ? (Words)below : bottom);
}

// Clamps to 0 ... 1, for values that are not NaN; as signed integers, all negative numbers are also below 0.
INLINE Floats clamp_share(Floats values) {
    const Ints above = (Ints)values > 0 ? (Ints)values : Ints{}, one = (Ints)all(1);
    return (Floats)(above < one ? above : one);
}

// The lowest byte of each integer; also in two steps.
INLINE Bytes low_bytes(Ints integers) {
#ifdef __AVX512F__
    if constexpr (LANES == 16) {
        const __m128i narrow = _mm512_cvtepi32_epi8(read<__m512i>(&integers));
        return read<Bytes>(&narrow);
    }
#endif
    return __builtin_convertvector(__builtin_convertvector(integers, SignedShorts), Bytes);
}

// Lane i of the result is lane[i] of `values`.
template <class Vector> INLINE Vector pick(Vector values, Words lane) {
#ifdef __clang__
    Vector picked;
    UNROLL
    for (int i = 0; i < LANES; i++) picked[i] = values[lane[i]];
    return picked;
#else
    return __builtin_shuffle(values, lane);
#endif
}

// Swaps lanes i and i ^ distance.
template <int distance, class Vector> INLINE Vector exchange(Vector values) { return pick(values, lanes() ^ distance); }

// --- sums ---

// Adds elements, or sums of them, that are `distance` apart. Returns the number of remaining vectors: half of `parts`,
// or all of them, with each sum repeated in several lanes.
template <int distance> INLINE int halve(Floats* values, int parts) {
    if constexpr (distance >= LANES) {
        constexpr int apart = distance / LANES;
        int written = 0;
        UNROLL
        for (int p = 0; p < parts; p++)
            if (!(p & apart)) values[written++] = values[p] + values[p + apart];
        return written;
    } else {
        UNROLL
        for (int p = 0; p < parts; p++) values[p] += exchange<distance>(values[p]);
        return parts;
    }
}

template <int distance, int last> INLINE int halve_down_to(Floats* values, int parts) {
    if constexpr (distance >= last) {
        parts = halve<distance>(values, parts);
        return halve_down_to<distance / 2, last>(values, parts);
    } else return parts;
}

// Merges lanes that are `distance` apart, in two vectors together. In the result, lanes whose number has that bit set
// belong to the other vector.
template <int distance, class Vector, class Merge> INLINE Vector merge_pair(Vector one, Vector other, Merge merge) {
    const Ints second = (lanes() & distance) != 0;
    return merge(second ? other : one, exchange<distance>(second ? one : other));
}

INLINE Floats add(Floats one, Floats other) { return one + other; }

// Adds lanes that are `distance` apart; half of the `parts` vectors remain, but at least one.
template <int distance, int parts> INLINE void halve_runs(Floats* values) {
    UNROLL
    for (int p = 0; p < (parts + 1) / 2; p++) {
        if constexpr (parts > 1) values[p] = merge_pair<distance>(values[p], values[p + parts / 2], add);
        else values[p] += exchange<distance>(values[p]);
    }
}

// The sum of products over a group, if its order matters: first within blocks, then over blocks. Both sums repeatedly
// add the second half to the first.
INLINE float ordered_sum(const Floats* first, const Floats* second) {
    if constexpr (GROUP == 4 * ROW && RUN <= LANES && LANES <= ROW) {
        constexpr int parts = ROW / LANES, left = parts > 8 ? parts / 8 : 1;
        Floats sums[parts];
        UNROLL
        for (int p = 0; p < parts; p++) {
            const auto product = [&](int row) { return first[row * parts + p] * second[row * parts + p]; };
            sums[p] = (product(0) + product(2)) + (product(1) + product(3));
        }
        halve_runs<4, parts>(sums);
        halve_runs<2, (parts + 1) / 2>(sums);
        halve_runs<1, (parts + 3) / 4>(sums);
        // These are sums of blocks now. The blocks whose vectors were merged first are farthest apart.
        if constexpr (parts > 1) halve<4>(sums, left);
        if constexpr (parts > 2) halve<2>(sums, left);
        if constexpr (parts > 4) halve<1>(sums, left);
        halve_down_to<LANES * left / 2, RUN>(sums, left);
        return sums[0][0];
    } else {  // vectors shorter than a run, or longer than a row
        Floats products[PARTS];
        UNROLL
        for (int p = 0; p < PARTS; p++) products[p] = first[p] * second[p];
        int parts = halve_down_to<GROUP / 2, ROW>(products, PARTS);
        parts = halve_down_to<RUN / 2, 1>(products, parts);
        constexpr int between = LANES < RUN ? LANES : RUN;  // distance between blocks now
        halve_down_to<between * BLOCKS / 2, between>(products, parts);
        return products[0][0];
    }
}

// --- rotation ---

template <class Word> INLINE Word hash_32(Word words) {
    words ^= words >> 16;
    words *= 0x7FEB352Du;
    words ^= words >> 15;
    words *= 0x846CA68Bu;
    return words ^ (words >> 16);
}

INLINE uint32_t sign_key(uint32_t step, uint32_t rank, uint32_t salt) {
    return hash_32<uint32_t>(step * 0x9E3779B1u + rank * 0x85EBCA77u + salt * 0xC2B2AE3Du + 1);
}

// The hashes of all blocks of `groups` groups, from group `first` on.
INLINE void hash_blocks(int64_t first, int groups, uint32_t key, uint32_t* hashes) {
    for (int block = 0; block < groups * BLOCKS; block += LANES) {
        const Words hashed = hash_32<Words>((lanes() + uint32_t(first * BLOCKS + block)) ^ key);
        memcpy(hashes + block, &hashed, sizeof hashed);
    }
}

// Words to reserve for these hashes: whole vectors are written, and read from any group's first block on.
constexpr int hashes_of(int groups) { return groups * BLOCKS + 2 * LANES; }

// The signs of a group: bit 31 - place of the hash of a block's number.
struct Signs {
    Words words[WORDS];  // for the first ROW elements; one row further on is also 8 places further on in a block

    INLINE Signs of(const uint32_t* hashes) {  // hashes of the group's blocks
        Signs signs;
        UNROLL
        for (int w = 0; w < WORDS; w++) {
            const Words element = lanes() + uint32_t(LANES * w);
            const Words place = element % RUN + element / ROW * RUN;
            const int block = LANES * w / RUN;  // first block of the vector
            const Words near = read<Words>(hashes + block / LANES * LANES);
            signs.words[w] = pick(near, block % LANES + lanes() / RUN % BLOCKS) << place;
        }
        return signs;
    }

    inline __attribute__((always_inline)) Floats times(Floats values, int part) const {
        const Words sign = words[part % WORDS] << (part * LANES / ROW * RUN) & 0x80000000;
        return (Floats)((Words)values ^ sign);
    }
};

// Butterflies between elements of a block, widest first: elements GROUP / 2, GROUP / 4, 4, 2 and 1 apart.
template <int distance = GROUP / 2> INLINE void hadamard(Floats* x) {
    if constexpr (distance >= LANES) {
        constexpr int apart = distance / LANES;
        UNROLL
        for (int p = 0; p < PARTS; p++) {
            if (p & apart) continue;
            const Floats first = x[p], second = x[p + apart];
            x[p] = first + second;
            x[p + apart] = first - second;
        }
    } else {
        const Floats sign = (lanes() & distance) != 0 ? all(-1) : all(1);  // -1 for the second lane of each pair
        UNROLL
        for (int p = 0; p < PARTS; p++) x[p] = times_plus(x[p], sign, exchange<distance>(x[p]));
    }
    if constexpr (distance > 1) hadamard<distance == ROW ? RUN / 2 : distance / 2>(x);
}

// --- decoding ---

INLINE void decode(Floats* levels, float scale, const Signs& signs) {
    if constexpr (ROTATE) hadamard(levels);
    UNROLL
    for (int p = 0; p < PARTS; p++) {
        const Floats sizes = all(scale);
        levels[p] = levels[p] * (ROTATE ? signs.times(sizes, p) : sizes);
    }
}

// --- buckets ---

struct Member {  // a gradient of the bucket
    int64_t numel;      // elements of a chunk
    int64_t codes_at;   // offset of its first stretch's codes from the start of a row, in bytes
    int64_t scales_at;  // same for scales

    int64_t groups() const { return (numel + GROUP - 1) / GROUP; }
};

// Calls visit(member, chunk, first, last) for all groups of `chunks` chunks of each member, on up to `threads` threads.
template <class Visit>
INLINE void for_groups(const Member* members, int64_t count, int64_t chunks, int threads, const Visit& visit) {
    int64_t total = 0;
    for (int64_t m = 0; m < count; m++) total += chunks * members[m].groups();
    const auto share = [&](int64_t begin, int64_t end) {
        int64_t before = 0;
        for (int64_t m = 0; m < count && before < end; m++) {
            const int64_t groups = members[m].groups();
            for (int64_t chunk = 0; chunk < chunks; chunk++, before += groups) {
                const int64_t last = end - before < groups ? end - before : groups;
                const int64_t first = begin > before ? begin - before : 0;
                if (first < last) visit(m, chunk, first, last);
            }
        }
    };
    const int64_t useful = 1 + total * GROUP / GRAIN;
    if (threads > useful) threads = useful;
    if (threads <= 1) return share(0, total);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) share(total * thread / threads, total * (thread + 1) / threads);
}
