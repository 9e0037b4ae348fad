"""The C++ of the compression kernels for CPUs, which `zgraph.codegen.cpu_blocks` compiles and calls.

Written for a method and a dtype; sizes, ranks, the step and pointers are arguments.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import torch

from zgraph import exact
from zgraph.codegen import reference
from zgraph.codegen.reference import CodeBook
from zgraph.compression import HADAMARD, SCALE_DTYPE, BlockMethod

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
    if method.old_share is None:
        return "none is kept"
    if method.error_dtype.is_floating_point:
        return f"[stretches * world, groups, {method.group}] float"
    return f"[stretches * world, groups, {method.group}] int8, error_scale [stretches * world, groups] bf16"


def _error_bytes(method: BlockMethod) -> float:
    """Bytes of error that an element reads and writes."""
    if method.old_share is None:
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
    feedback = method.old_share is not None
    share = method.old_share or 0.0
    return f"""
#include <stdint.h>
#include <string.h>

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
    return __builtin_convertvector(__builtin_convertvector(chars, SignedShorts), Ints);
}

INLINE Floats load(const int8_t* from) { return __builtin_convertvector(ints_of(read<Chars>(from)), Floats); }

INLINE void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

INLINE void store(Bf16* to, Floats values) {
    const Words bits = (Words)values;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Shorts shorts = __builtin_convertvector(values == values ? rounded : Words{} + BF16_NAN, Shorts);
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

INLINE uint16_t to_bf16(float value) {
    const uint32_t bits = read<uint32_t>(&value);
    return value == value ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : BF16_NAN;
}

INLINE Ints magnitude_of(Floats values) { return (Ints)values & 0x7fffffff; }

// 1.5 * 2^23, to which adding rounds to an integer, which then stands in the low bits of the sum.
constexpr float ROUNDER = 12582912.0f;

// value * by + more, rounded once; without such an instruction by way of doubles, which hold the product and that sum.
INLINE Floats fused(Floats values, float by, float more) {
    Floats sums;
    UNROLL
    for (int i = 0; i < LANES; i++) {
#ifdef __FMA__
        sums[i] = __builtin_fmaf(values[i], by, more);
#else
        sums[i] = float(double(values[i]) * by + more);
#endif
    }
    return sums;
}

// The integer nearest to a product, which is not rounded before, plus ROUNDER.
INLINE Floats rounded_product(Floats values, float by) {
#ifdef __FMA__
    return fused(values, by, ROUNDER);
#else
    constexpr double WIDE = 6755399441055744.0;  // 1.5 * 2^52
    Floats integers;
    UNROLL
    for (int i = 0; i < LANES; i++) integers[i] = float(double(values[i]) * by + WIDE - WIDE);
    return integers + ROUNDER;
#endif
}

// 1 / value by Newton's method, for positive numbers that are neither tiny nor huge.
INLINE float reciprocal(float value) {
    const int32_t bits = RECIPROCAL - read<int32_t>(&value);
    float found = read<float>(&bits);
    UNROLL
    for (int step = 0; step < NEWTON_STEPS; step++) found *= float(2.0 - double(value) * found);
    return found;
}

// For low < 0 < high, and no NaN. As bits, positive numbers are ordered as signed integers, whose negative numbers stay
// below; negative ones as unsigned integers, whose positive numbers stay below. GCC has one instruction for each.
INLINE Floats clamp(Floats values, float low, float high) {
    const Ints top = (Ints)(Floats{} + high);
    const Words bottom = (Words)(Floats{} + low);
    const Ints below = (Ints)values < top ? (Ints)values : top;
    return (Floats)((Words)below < bottom ? (Words)below : bottom);
}

// Lanes i and i ^ distance change places.
template <int distance, class Vector> INLINE Vector exchange(Vector values) {
#ifdef __clang__
    Vector other;
    UNROLL
    for (int i = 0; i < LANES; i++) other[i] = values[i ^ distance];
    return other;
#else
    return __builtin_shuffle(values, lanes() ^ distance);
#endif
}

// --- sums ---

template <int distance = LANES / 2> INLINE float sum_of(Floats values) {
    if constexpr (distance == 0) return values[0];
    else return sum_of<distance / 2>(values + exchange<distance>(values));
}

template <int parts = PARTS> INLINE Floats fold(Floats* values) {
    if constexpr (parts == 1) return values[0];
    else {
        UNROLL
        for (int p = 0; p < parts / 2; p++) values[p] += values[p + parts / 2];
        return fold<parts / 2>(values);
    }
}

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

// The sum of a group, where its order matters: of each block, and then of all blocks; in each case the second half is
// added to the first, again and again.
INLINE float ordered_sum(Floats* values) {
    int parts = halve_down_to<GROUP / 2, ROW>(values, PARTS);
    parts = halve_down_to<RUN / 2, 1>(values, parts);
    constexpr int between = LANES < RUN ? LANES : RUN;  // blocks, now
    halve_down_to<between * BLOCKS / 2, between>(values, parts);
    return values[0][0];
}

INLINE float group_sum(Floats* values) {
    if constexpr (EXACT_SUMS) return sum_of(fold(values));
    else return ordered_sum(values);
}

template <int distance = LANES / 2> INLINE int32_t largest_of(Ints values) {
    if constexpr (distance == 0) return values[0];
    else {
        const Ints other = exchange<distance>(values);
        return largest_of<distance / 2>(values > other ? values : other);
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

// The signs of a group: bit 31 - place of the hash of a block's number.
struct Signs {
    Words words[WORDS];  // of the first ROW elements; what is a row further on is 8 places further on, too

    INLINE Signs of(int64_t group, uint32_t key) {
        Signs signs;
        UNROLL
        for (int w = 0; w < WORDS; w++) {
            const Words element = lanes() + uint32_t(LANES * w);
            const Words block = element / RUN % BLOCKS + uint32_t(group * BLOCKS);
            const Words place = element % RUN + element / ROW * RUN;
            signs.words[w] = hash_32<Words>(block ^ key) << place;
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
        const Words minus = (Words)((lanes() & distance) != 0) & 0x80000000;  // of the second lane of each pair
        UNROLL
        for (int p = 0; p < PARTS; p++) x[p] = exchange<distance>(x[p]) + (Floats)((Words)x[p] ^ minus);
    }
    if constexpr (distance > 1) hadamard<distance == ROW ? RUN / 2 : distance / 2>(x);
}

// --- what codes stand for ---

INLINE void decode(Floats* levels, float scale, const Signs& signs) {
    if constexpr (ROTATE) hadamard(levels);
    UNROLL
    for (int p = 0; p < PARTS; p++) {
        const Floats sizes = Floats{} + scale;
        levels[p] = levels[p] * (ROTATE ? signs.times(sizes, p) : sizes);
    }
}

// --- buckets ---

struct Member {  // a gradient of the bucket
    int64_t numel;      // of a chunk
    int64_t codes_at;   // bytes from the begin of a row, of its first stretch
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

constexpr int AT_ONCE = GROUP <= 128 ? 2 : 1;  // groups; a long one keeps the processor busy alone
#define EACH UNROLL for (int s = 0; s < SIDE; s++)  // of SIDE groups

struct Place {
    const Grad* grad;
    int64_t present;  // elements of the gradient
    void* error;
    uint16_t* error_scale;
};

// Levels c + b of integers u.
template <int clip> INLINE void levels_of(const Floats* integers, Floats* levels) {
    UNROLL
    for (int p = 0; p < PARTS; p++) {
        if constexpr (!ROTATE) {
            levels[p] = clamp(rounded_product(integers[p], SLOPES[clip]) - ROUNDER, LOW, HIGH);
        } else {
            Floats grid = integers[p] + ROUNDER;
            float begin = ROUNDER;
            if constexpr (CLIPPED[clip]) {
                // Less 1/2: clamp takes bounds of two signs. Both are exact.
                const Floats share = fused(integers[p], SLOPES[clip], 0.5f);
                const Floats inside = clamp(share - 0.5f, -0.5f, 0.5f) + 0.5f;
                grid = rounded_product(inside, 2 * TOP + 1);
                begin += TOP + 1;
            }
            const Floats floors = (Floats)((Ints)grid & -STEP) - begin;
            levels[p] = floors * (1.0f / STEP) + AFTER;
        }
    }
}

INLINE void pack(const Floats* levels, uint8_t* to) {
    constexpr int bytes = CODE_BYTES / LANES;  // vectors of bytes: as many as the codes of a stretch fill
    UNROLL
    for (int p = 0; p < bytes; p++) {
        Ints packed = {};
        UNROLL
        for (int place = 0; place < 8 / BITS; place++) {
            const Ints code = __builtin_convertvector(levels[p + place * bytes] - AFTER, Ints);
            packed |= (code & ((1 << BITS) - 1)) << (place * BITS);
        }
        const Bytes narrow = __builtin_convertvector(packed, Bytes);
        memcpy(to + p * LANES, &narrow, LANES);
    }
}

INLINE int32_t largest_in(const Floats* values) {
    Ints largest = {};
    UNROLL
    for (int p = 0; p < PARTS; p++) {
        const Ints magnitude = magnitude_of(values[p]);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest_of(largest);
}

struct Error {
    int8_t* codes;
    uint16_t* scale;
    float* floats;

    INLINE Error at(const Place& place, int64_t group) {
        if constexpr (ERROR_INT8) return {(int8_t*)place.error + group * GROUP, place.error_scale + group, nullptr};
        else return {nullptr, nullptr, (float*)place.error + group * GROUP};
    }

    inline __attribute__((always_inline)) Floats read(int part) const {  // without its scale
        if constexpr (ERROR_INT8) return load(codes + part * LANES);
        else return load(floats + part * LANES);
    }

    // Keep OLD_SHARE * old + LOST_SHARE * (whole - sent).
    inline __attribute__((always_inline)) void write(
        const Floats* old, float wide, const Floats* whole, const Floats* sent
    ) const {
        if constexpr (!ERROR_INT8) {
            UNROLL
            for (int p = 0; p < PARTS; p++)
                store(floats + p * LANES, OLD_SHARE * old[p] + LOST_SHARE * (whole[p] - sent[p]));
        } else {
            // All of it is divided by LOST_SHARE, so that the code's size alone takes that factor.
            Floats error[PARTS];
            UNROLL
            for (int p = 0; p < PARTS; p++) error[p] = whole[p] + old[p] * (wide * OLD_OVER_LOST) - sent[p];
            const int32_t bits = largest_in(error);
            const float largest = ::read<float>(&bits);
            *scale = to_bf16(largest >= TINY ? largest * LOST_SHARE_127TH : 0.0f);
            const float size = from_bf16(*scale);
            const float inverse = size > 0 ? reciprocal(size) * LOST_SHARE : 0.0f;
            UNROLL
            for (int p = 0; p < PARTS; p++) {
                const Chars narrow = __builtin_convertvector((Ints)rounded_product(error[p], inverse), Chars);
                memcpy(codes + p * LANES, &narrow, LANES);
            }
        }
    }
};

struct Group {  // where it comes from and goes to
    const Grad* grad;
    Error error;
    Signs signs;
    uint8_t* codes;
    uint16_t* scale;
};

// Groups side by side: each alone is a chain of steps that wait for one another. What is no finite number becomes codes
// of 0, a scale of NaN, and leaves its error as it was.
template <int clip = 0, int SIDE>
INLINE void choose_levels(const Floats (*integers)[PARTS], Floats (*levels)[PARTS], float* along, float* square) {
    if constexpr (clip < CLIPS) {
        EACH {
            Floats tried[PARTS], products[PARTS];
            levels_of<clip>(integers[s], tried);
            UNROLL
            for (int p = 0; p < PARTS; p++) products[p] = integers[s][p] * tried[p];
            const float this_along = group_sum(products);
            float this_square = 0.0f;
            if constexpr (CLIPS > 1 || !UNBIASED) {
                UNROLL
                for (int p = 0; p < PARTS; p++) products[p] = tried[p] * tried[p];
                this_square = group_sum(products);
            }
            if (clip == 0 || this_along * this_along * square[s] > along[s] * along[s] * this_square) {
                along[s] = this_along, square[s] = this_square;
                UNROLL
                for (int p = 0; p < PARTS; p++) levels[s][p] = tried[p];
            }
        }
        choose_levels<clip + 1, SIDE>(integers, levels, along, square);
    }
}

template <int SIDE> INLINE void quantize_groups(const Group* group) {
    Floats whole[SIDE][PARTS], old[SIDE][PARTS], integers[SIDE][PARTS], levels[SIDE][PARTS];
    float wide[SIDE], along[SIDE], square[SIDE], scale[SIDE], largest[SIDE];
    bool finite[SIDE], used[SIDE];

    EACH {
        wide[s] = FEEDBACK && ERROR_INT8 ? from_bf16(*group[s].error.scale) : 1.0f;
        UNROLL
        for (int p = 0; p < PARTS; p++) {
            whole[s][p] = load(group[s].grad + p * LANES);
            if constexpr (FEEDBACK) {
                old[s][p] = group[s].error.read(p);
                whole[s][p] += ERROR_INT8 ? old[s][p] * wide[s] : old[s][p];
            }
            integers[s][p] = ROTATE ? group[s].signs.times(whole[s][p], p) : whole[s][p];
        }
    }
    if constexpr (ROTATE) EACH hadamard(integers[s]);

    EACH {
        const int32_t bits = largest_in(integers[s]);
        largest[s] = read<float>(&bits);
        finite[s] = bits < HUGE_BITS;
        used[s] = finite[s] && largest[s] >= TINY;
        const float inverse = used[s] ? reciprocal(largest[s]) * TOP : 0.0f;
        UNROLL
        for (int p = 0; p < PARTS; p++)
            integers[s][p] = used[s] ? rounded_product(integers[s][p], inverse) - ROUNDER : Floats{};
    }
    choose_levels<0, SIDE>(integers, levels, along, square);

    EACH {
        pack(levels[s], group[s].codes);
        float over = along[s], under = square[s];
        if constexpr (UNBIASED) {
            UNROLL
            for (int p = 0; p < PARTS; p++) integers[s][p] = integers[s][p] * integers[s][p];
            over = group_sum(integers[s]), under = along[s];
        }
        const float ratio = used[s] ? over * reciprocal(under) * (largest[s] * UNIT) : 0.0f;
        const uint16_t rounded = finite[s] ? to_bf16(ratio) : NO_NUMBER;
        *group[s].scale = rounded;
        scale[s] = from_bf16(rounded);
    }

    if constexpr (FEEDBACK) {
        EACH decode(levels[s], scale[s], group[s].signs);
        EACH if (finite[s]) group[s].error.write(old[s], wide[s], whole[s], levels[s]);
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
        const auto group_at = [&](int64_t g) {
            const int64_t at = chunk / world * groups + g;
            return Group{
                place.grad + chunk * member.numel + g * GROUP,
                FEEDBACK ? Error::at(place, chunk * groups + g) : Error{},
                ROTATE ? Signs::of(g, key) : Signs{},
                row + member.codes_at + at * CODE_BYTES,
                (uint16_t*)(row + member.scales_at) + at,
            };
        };
        // Groups that neither the chunk nor the gradient ends in.
        int64_t present = place.present - chunk * member.numel;
        if (present > member.numel) present = member.numel;
        const int64_t full = present < 0 ? 0 : present / GROUP;
        int64_t g = first;
        for (; g + AT_ONCE <= last && g + AT_ONCE <= full; g += AT_ONCE) {
            Group side[AT_ONCE];
            for (int s = 0; s < AT_ONCE; s++) side[s] = group_at(g + s);
            quantize_groups<AT_ONCE>(side);
        }
        for (; g < last; g++) {
            Group group = group_at(g);
            Grad filled[GROUP];
            if (g >= full) {
                memset(filled, 0, sizeof filled);
                if (g * GROUP < present) memcpy(filled, group.grad, (present - g * GROUP) * sizeof(Grad));
                group.grad = filled;
            }
            quantize_groups<1>(&group);
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
            Floats sums[PARTS], values[PARTS];
            for (int64_t rank = 0; rank < ranks; rank++) {
                const uint8_t* row = received + rank * row_bytes;
                const float scale = from_bf16(((const uint16_t*)(row + member.scales_at))[at]);
                unpack(row + member.codes_at + at * CODE_BYTES, values);
                decode(values, scale, ROTATE ? Signs::of(g, sign_key(step, first_rank + rank, salt)) : Signs{});
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
