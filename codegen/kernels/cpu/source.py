"""The C++ of the compression kernels for CPUs, which `zgraph.codegen.kernels.cpu.blocks` compiles and calls.

Written for a method and a dtype; sizes, ranks, the step and pointers are arguments.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import torch

from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.reference import CodeBook
from zgraph.compression import exact_arithmetic as exact
from zgraph.compression.methods import HADAMARD, SCALE_DTYPE, BlockMethod

C_TYPES = MappingProxyType({torch.float32: "float", torch.bfloat16: "Bf16", torch.float16: "Half"})


def emit_quantize(method: BlockMethod, grad_dtype: torch.dtype) -> str:
    """C++ of `extern "C" void quantize(...)`: the payload of those gradients of a bucket that have this dtype.

    Raises:
        KeyError: the dtype is none of C_TYPES.
    """
    wire, error = _wire_bytes(method), _error_bytes(method)
    coded = "H (signs * whole), H being a Hadamard transform of 32 elements" if method.rotate else "whole"
    what = f"""\
Codes and scales of gradients, to which what earlier ones have lost is added; the error becomes the new one.

    whole = grad + error
    codes, scale = those of {coded}
    error = OLD_SHARE * error + LOST_SHARE * (whole - what codes and scale stand for)

grad      [present] {C_TYPES[grad_dtype]}: [stretches * world, numel], and what it lacks counts as zeros
error     {_error_shape(method)}
payload   [world, row_bytes] uint8: {_sections(method)}

Bytes per element: {grad_dtype.itemsize} of gradient, {error:.3f} of error, read and written, {wire:.3f} of codes and
scale; {grad_dtype.itemsize + error + wire:.3f} in all."""
    return _comment(what) + _constants(method, "Grad", grad_dtype) + _COMMON + _QUANTIZE


def emit_dequantize(method: BlockMethod, output_dtype: torch.dtype) -> str:
    """C++ of `extern "C" void dequantize_sum(...)`: those outputs of a bucket that have this dtype.

    Raises:
        KeyError: the dtype is none of C_TYPES.
    """
    what = f"""\
The sum of what ranks have sent, {"each rotated back, " if method.rotate else ""}divided once.

received  [ranks, row_bytes] uint8: {_sections(method)}
output    [stretches, numel] {C_TYPES[output_dtype]}, overwritten or added to

Bytes per element of the output: {_wire_bytes(method):.3f} for each rank, and {output_dtype.itemsize} to store it."""
    return _comment(what) + _constants(method, "Output", output_dtype) + _COMMON + _DEQUANTIZE


def _comment(text: str) -> str:
    return "".join(f"// {line}".rstrip() + "\n" for line in text.splitlines())


def _sections(method: BlockMethod) -> str:
    codes = method.group * method.bits // 8
    return f"for each gradient codes [stretches, groups, {codes}], scales [stretches, groups] bf16"


def _error_shape(method: BlockMethod) -> str:
    if method.residual_decay is None:
        return "none is kept"
    if method.error_dtype.is_floating_point:
        return f"[stretches * world, groups, {method.group}] float"
    return f"[stretches * world, groups, {method.group}] int8, error_scale [stretches * world, groups] bf16"


def _error_bytes(method: BlockMethod) -> float:
    """Bytes of error that an element reads and writes."""
    if method.residual_decay is None:
        return 0.0
    scale = 0.0 if method.error_dtype.is_floating_point else SCALE_DTYPE.itemsize / method.group
    return 2 * (method.error_dtype.itemsize + scale)


def _wire_bytes(method: BlockMethod) -> float:
    """Bytes that an element takes on the wire."""
    return method.bits / 8 + SCALE_DTYPE.itemsize / method.group


def _constants(method: BlockMethod, name: str, dtype: torch.dtype) -> str:
    book = CodeBook.of(method)
    slopes = ", ".join(_literal(book.slope(clip)) for clip in book.clips)
    clipped = ", ".join(str(clip != 1).lower() for clip in book.clips)
    nan_bits = torch.full((1,), math.nan).to(SCALE_DTYPE).view(torch.uint16).item()
    feedback = method.residual_decay is not None
    share = method.residual_decay or 0.0
    return f"""
#include <stdint.h>
#include <string.h>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

struct Bf16 {{ uint16_t bits; }};
struct Half {{ uint16_t bits; }};

using {name} = {C_TYPES[dtype]};

constexpr int GROUP = {method.group};  // elements that share a scale
constexpr int BITS = {method.bits};
constexpr bool ROTATE = {str(method.rotate).lower()};
constexpr int CLIPS = {len(book.clips)};
constexpr bool CLIPPED[CLIPS] = {{{clipped}}};  // whether a clipping level is below the largest magnitude
constexpr float SLOPES[CLIPS] = {{{slopes}}};
constexpr int TOP = {book.top};  // the largest of the integers that values become
constexpr int STEP = {book.step};  // integers that share a code
constexpr float AFTER = {_literal(book.after)};  // added to a code when it is read
constexpr float LOW = {_literal(book.low)}, HIGH = {_literal(book.high)};
constexpr float UNIT = {_literal(book.unit)};
constexpr bool EXACT_SUMS = {str(reference.sums_are_exact(method)).lower()};
constexpr bool FEEDBACK = {str(feedback).lower()};
constexpr bool ERROR_INT8 = {str(method.error_dtype == torch.int8).lower()};
using Error = {"int8_t" if method.error_dtype == torch.int8 else "float"};
constexpr float OLD_SHARE = {_literal(share)}, LOST_SHARE = {_literal(1 - share)};
constexpr float OLD_OVER_LOST = {_literal(share / (1 - share))};
constexpr float TINY = {_literal(reference.TINY)};
constexpr float LOST_SHARE_127TH = {_literal((1 - share) / 127)};
constexpr int32_t RECIPROCAL = {exact.RECIPROCAL:#010x};
constexpr int NEWTON_STEPS = {exact.NEWTON_STEPS};
constexpr int32_t HUGE_BITS = {reference.HUGE_BITS:#010x};  // of magnitudes that count as not finite
constexpr bool UNBIASED = {str(reference.is_unbiased(method)).lower()};
constexpr uint16_t NO_NUMBER = {reference.NO_NUMBER:#06x};  // the scale of a group that is not finite
constexpr uint16_t BF16_NAN = {nan_bits:#06x};  // as torch makes it here
"""


def _literal(value: float) -> str:
    """A number as fp32 in C++; the shortest decimal of a double that fp32 holds is read back as it was."""
    return f"{torch.tensor(value, dtype=torch.float32).item()!r}f"


_COMMON = (
    f"""
constexpr int HADAMARD = {HADAMARD};"""
    + r"""
constexpr int64_t GRAIN = 32768;  // elements below which another thread does not pay

// --- LANES numbers at a time: as many as a register holds, but no more than a group has bytes of codes ---

#if defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int NATIVE = 16;
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif
constexpr int CODE_BYTES = GROUP * BITS / 8;  // of a group
constexpr int LANES = CODE_BYTES < NATIVE ? CODE_BYTES : NATIVE;
constexpr int PARTS = GROUP / LANES;  // vectors of a group
constexpr int RUN = 8;  // neighbours that belong to the same block
constexpr int BLOCKS = GROUP > HADAMARD ? GROUP / HADAMARD : 1;
constexpr int ROW = RUN * BLOCKS;  // elements after which a block goes on
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

// In two steps: GCC takes one that widens fourfold apart, element by element.
INLINE Ints ints_of(Chars chars) {
#ifdef __AVX512F__
    if constexpr (LANES == 16) {
        const __m512i wide = _mm512_cvtepi8_epi32(read<__m128i>(&chars));
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

// 1.5 * 2^23, to which adding rounds to an integer, which then stands in the low bits of the sum.
constexpr float ROUNDER = 12582912.0f;

// values * by + more, rounded once; without such an instruction by way of doubles, which hold the product and that sum.
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

// values * by + more, where the product is exact: then it does not matter whether that is rounded first.
INLINE Floats times_plus(Floats values, Floats by, Floats more) {
#ifdef __FMA__
    return fused(values, by, more);
#else
    return values * by + more;
#endif
}

// The integer nearest to a product, which is not rounded before, plus ROUNDER.
INLINE Floats rounded_product(Floats values, float by) {
#ifdef __FMA__
    return fused(values, all(by), all(ROUNDER));
#else
    constexpr double WIDE = 6755399441055744.0;  // 1.5 * 2^52
    const Doubles product = __builtin_convertvector(values, Doubles) * double(by);
    return __builtin_convertvector(product + WIDE - WIDE, Floats) + ROUNDER;
#endif
}

// 1 / values by Newton's method, for positive numbers that are neither tiny nor huge; of others it is any number.
INLINE Floats reciprocal(Floats values) {
    Floats found = (Floats)(RECIPROCAL - (Ints)values);
    UNROLL
    for (int step = 0; step < NEWTON_STEPS; step++) found *= fused(-values, found, all(2.0f));
    return found;
}

// For low < 0 < high, and no NaN. As bits, positive numbers are ordered as signed integers, whose negative numbers stay
// below; negative ones as unsigned integers, whose positive numbers stay below. GCC has one instruction for each.
INLINE Floats clamp(Floats values, float low, float high) {
    const Ints top = (Ints)all(high);
    const Words bottom = (Words)all(low);
    const Ints below = (Ints)values < top ? (Ints)values : top;
    return (Floats)((Words)below < bottom ? (Words)below : bottom);
}

// To the numbers from 0 to 1, for no NaN; as signed integers, too, all negative numbers are below 0.
INLINE Floats clamp_share(Floats values) {
    const Ints above = (Ints)values > 0 ? (Ints)values : Ints{}, one = (Ints)all(1);
    return (Floats)(above < one ? above : one);
}

// The lowest byte of each; in two steps, too.
INLINE Bytes low_bytes(Ints integers) {
#ifdef __AVX512F__
    if constexpr (LANES == 16) {
        const __m128i narrow = _mm512_cvtepi32_epi8(read<__m512i>(&integers));
        return read<Bytes>(&narrow);
    }
#endif
    return __builtin_convertvector(__builtin_convertvector(integers, SignedShorts), Bytes);
}

// Lane i of the result is that of `values` which lane[i] says.
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

// Lanes i and i ^ distance change places.
template <int distance, class Vector> INLINE Vector exchange(Vector values) { return pick(values, lanes() ^ distance); }

// --- sums ---

// Elements, or sums of them, that are `distance` apart are added: of `parts` vectors remain half, or as many, in whose
// lanes sums stand several times.
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

// Merges lanes that are `distance` apart, in two vectors at once. Lanes whose number has that bit are then those of the
// other vector.
template <int distance, class Vector, class Merge> INLINE Vector merge_pair(Vector one, Vector other, Merge merge) {
    const Ints second = (lanes() & distance) != 0;
    return merge(second ? other : one, exchange<distance>(second ? one : other));
}

INLINE Floats add(Floats one, Floats other) { return one + other; }

// Adds lanes that are `distance` apart; of `parts` vectors half remain, or one.
template <int distance, int parts> INLINE void halve_runs(Floats* values) {
    UNROLL
    for (int p = 0; p < (parts + 1) / 2; p++) {
        if constexpr (parts > 1) values[p] = merge_pair<distance>(values[p], values[p + parts / 2], add);
        else values[p] += exchange<distance>(values[p]);
    }
}

// The sum over a group of products, where its order matters: of each block, and then of all blocks; in each case the
// second half is added to the first, again and again.
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
        // Sums of blocks now. Those blocks are farthest apart whose vectors became one first.
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
        constexpr int between = LANES < RUN ? LANES : RUN;  // blocks, now
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

// The hashes of all blocks of some groups, from group `first` on.
INLINE void hash_blocks(int64_t first, int groups, uint32_t key, uint32_t* hashes) {
    for (int block = 0; block < groups * BLOCKS; block += LANES) {
        const Words hashed = hash_32<Words>((lanes() + uint32_t(first * BLOCKS + block)) ^ key);
        memcpy(hashes + block, &hashed, sizeof hashed);
    }
}

// Words to reserve for them: whole vectors are written, and read from any group's first block on.
constexpr int hashes_of(int groups) { return groups * BLOCKS + 2 * LANES; }

// The signs of a group: bit 31 - place of the hash of a block's number.
struct Signs {
    Words words[WORDS];  // of the first ROW elements; what is a row further on is 8 places further on, too

    INLINE Signs of(const uint32_t* hashes) {  // of its blocks
        Signs signs;
        UNROLL
        for (int w = 0; w < WORDS; w++) {
            const Words element = lanes() + uint32_t(LANES * w);
            const Words place = element % RUN + element / ROW * RUN;
            const int block = LANES * w / RUN;  // the first of them
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

// Butterflies between elements of a block, widest first: those GROUP / 2, GROUP / 4, 4, 2 and 1 apart.
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
        const Floats sign = (lanes() & distance) != 0 ? all(-1) : all(1);  // of the second lane of each pair -1
        UNROLL
        for (int p = 0; p < PARTS; p++) x[p] = times_plus(x[p], sign, exchange<distance>(x[p]));
    }
    if constexpr (distance > 1) hadamard<distance == ROW ? RUN / 2 : distance / 2>(x);
}

// --- what codes stand for ---

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
    int64_t numel;      // of a chunk
    int64_t codes_at;   // bytes from the start of a row, of its first stretch
    int64_t scales_at;

    int64_t groups() const { return (numel + GROUP - 1) / GROUP; }
};

// Calls visit(member, chunk, first, last) for all groups of `chunks` chunks of each member, by up to `threads` threads.
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
"""
)

_QUANTIZE = r"""
// --- quantize ---

// Groups that go through each step together. A group alone is a chain of steps that wait for one another; and what
// there is once for each group, such as its scale, is a lane of a vector. Of 2048 elements all stays in the L1 cache.
constexpr int BATCH = GROUP * LANES <= 2048 ? LANES : 2048 / GROUP;

struct Place {
    const Grad* grad;
    int64_t present;  // elements of the gradient
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
    constexpr int bytes = CODE_BYTES / LANES;  // vectors of bytes: as many as the codes of a stretch fill
    constexpr int half = 1 << (BITS - 1), ones = 255 / ((1 << BITS) - 1);  // a one for each code of a byte
    UNROLL
    for (int p = 0; p < bytes; p++) {
        Floats packed = levels[p + (8 / BITS - 1) * bytes];
        UNROLL
        for (int place = 8 / BITS - 2; place >= 0; place--)
            packed = times_plus(packed, all(1 << BITS), levels[p + place * bytes]);
        // Codes plus `half`, so that none is negative and borrows from the next; that flips the top bit of each.
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

// The sum of each lane, for `totals` to add up, where no order changes it; else the whole sum.
INLINE Floats sum_of_products(const Floats* first, const Floats* second) {
    if constexpr (EXACT_SUMS) {
        Floats sum = first[0] * second[0];
        UNROLL
        for (int p = 1; p < PARTS; p++) sum = times_plus(first[p], second[p], sum);
        return sum;
    }
    return all(ordered_sum(first, second));
}

// Lane s of the result is values[s], of which all lanes are merged. `values` is overwritten.
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

struct Batch {  // groups that follow one another: where they come from and go to
    int count;
    const Grad* grad;
    Error* error;
    uint16_t* error_scale;
    uint8_t* codes;
    uint16_t* scale;
};

struct Tried {  // of a clipping level: c + b, <u, c + b> and |c + b|^2
    Floats levels[BATCH][PARTS];
    Floats along[BATCH] = {}, square[BATCH] = {};
};

template <int clip = 0> INLINE void try_levels(Floats integers, Tried* tried, int s, int p) {
    if constexpr (clip < CLIPS) {
        tried[clip].levels[s][p] = levels_of<clip>(integers);
        try_levels<clip + 1>(integers, tried, s, p);
    }
}

// What is no finite number becomes codes of 0, a scale of NaN, and leaves its error as it was.
INLINE void quantize_batch(const Batch& batch, const uint32_t* hashes) {
    Floats lost[BATCH][PARTS];  // first all that is to be sent
    Floats power[BATCH] = {};  // |u|^2
    Ints top[BATCH] = {};
    Tried tried[CLIPS];

    for (int s = 0; s < batch.count; s++) {
        const Signs signs = ROTATE ? Signs::of(hashes + s * BLOCKS) : Signs{};
        const float wide = FEEDBACK && ERROR_INT8 ? from_bf16(batch.error_scale[s]) : 1.0f;
        Floats* const rotated = tried[0].levels[s];  // until there are levels
        UNROLL
        for (int p = 0; p < PARTS; p++) {
            const int at = s * GROUP + p * LANES;
            rotated[p] = load(batch.grad + at);
            if constexpr (FEEDBACK) {
                const Floats old = load(batch.error + at);
                rotated[p] += ERROR_INT8 ? old * wide : old;
                // Kept is OLD_SHARE * old + LOST_SHARE * (whole - sent); in 8 bits all of it is divided by LOST_SHARE,
                // so that the code's size alone takes that factor.
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
                    store(error + p * LANES, OLD_SHARE * load(error + p * LANES) + LOST_SHARE * lost[s][p]);
            }
        }
    }
    if constexpr (FEEDBACK && ERROR_INT8) {
        const Floats most = (Floats)merge_lanes(top, larger);
        const Floats sizes = (Floats)(bf16_bits(most >= TINY ? most * LOST_SHARE_127TH : Floats{}) << 16);
        store(scale, sizes);
        store(inverse, sizes > 0 ? reciprocal(sizes) * LOST_SHARE : Floats{});
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
        // Groups in which neither the chunk nor the gradient ends; one in which it does is a batch by itself.
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
"""

_DEQUANTIZE = r"""
// --- dequantize ---

INLINE void unpack(const uint8_t* packed, Floats* levels) {
    constexpr int bytes = CODE_BYTES / LANES;
    UNROLL
    for (int p = 0; p < bytes; p++) {
        const Ints wide = ints_of(read<Chars>(packed + p * LANES));
        UNROLL
        for (int place = 0; place < 8 / BITS; place++) {  // up to the top, and down with its sign
            const Ints code = wide << (32 - (place + 1) * BITS) >> (32 - BITS);
            levels[p + place * bytes] = __builtin_convertvector(code, Floats) + AFTER;
        }
    }
}

struct Divisor {
    float value, inverse;
    bool power_of_two;  // then a multiplication gives the same bits, in a fraction of the time

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
"""
