// A linear by weights of 4, 6 or 8 bits, for the few rows of a draft step: reference.py states the
// maths and the memory layout.
//
// With few rows the time goes into reading the weights, so each byte is read once, in order, and
// the integer dot products hide behind the reads. With AVX-512 VNNI one instruction multiplies 16
// channels by 4 inputs of one row. Elsewhere the same loops are plain C++.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#define SUBSPEC_VNNI 1
#include <immintrin.h>
#endif

namespace {

constexpr int kChannels = 16;      // output channels of a block: the lanes of a 512-bit vector
constexpr int kMaxRows = 8;        // rows at once: two accumulators each must stay in registers
constexpr int64_t kPrefetch = 4096;  // bytes ahead: past what the hardware looks ahead by itself
// Below this much work (bytes of codes times row chunks) a second thread costs more than it saves.
constexpr int64_t kThreadBytes = 1 << 15;
constexpr int64_t kThreadInputs = 1 << 15;
// A group below it is taken as zero: 127 / amax must stay finite.
constexpr float kTiny = 1e-35f;

// Activations of one call in int8. Rows come in chunks that the kernel takes at once; inside a
// chunk of R rows the four bytes of (quad, row) lie at quad * R + row, so that one pointer serves.
struct Activations {
  std::vector<int32_t> quads;  // [chunk][K / 4][R]
  std::vector<float> scale;    // [chunk][K / group_size][R]
  std::vector<int32_t> sum;    // the same: sums of the group's int8 values
};

struct Problem {
  const uint8_t* codes;
  const c10::Half* scales;
  int64_t rows, channels, inputs, group_size;
  int64_t groups() const { return inputs / group_size; }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// 9 rows are 5 + 4 rather than 8 + 1: a chunk of one row costs nearly as much as one of five.
inline int64_t rows_per_chunk(int64_t rows) { return ceil_div(rows, ceil_div(rows, kMaxRows)); }

#ifdef SUBSPEC_VNNI
inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const c10::Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512 load16(const c10::BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void store16(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline void store16(c10::Half* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store16(c10::BFloat16* p, __m512 v) {
  // Round to nearest even. NaN keeps its sign and stays NaN by the quiet bit.
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i top = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
  const __m512i out = _mm512_mask_mov_epi32(rounded, nan, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(out));
}
#endif

// One group of one row: quads go to out[0], out[stride], ...
template <typename T>
inline void quantize_group(const T* x, int64_t size, int32_t* out, int64_t stride, float* scale,
                           int32_t* sum) {
#ifdef SUBSPEC_VNNI
  __m512 top = _mm512_setzero_ps();
  for (int64_t k = 0; k < size; k += 16) top = _mm512_max_ps(top, _mm512_abs_ps(load16(x + k)));
  const float amax = _mm512_reduce_max_ps(top);
  const float inverse = amax > kTiny ? 127.0f / amax : 0.0f;
  const __m512 factor = _mm512_set1_ps(inverse);
  __m512i total = _mm512_setzero_si512();
  for (int64_t k = 0; k < size; k += 16) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(load16(x + k), factor));
    const __m128i bytes = _mm512_cvtsepi32_epi8(q);
    total = _mm512_add_epi32(total, _mm512_cvtepi8_epi32(bytes));
    if (stride == 1) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k / 4), bytes);
    } else {
      int32_t* const p = out + k / 4 * stride;
      p[0] = _mm_extract_epi32(bytes, 0);
      p[stride] = _mm_extract_epi32(bytes, 1);
      p[2 * stride] = _mm_extract_epi32(bytes, 2);
      p[3 * stride] = _mm_extract_epi32(bytes, 3);
    }
  }
  *sum = _mm512_reduce_add_epi32(total);
#else
  float amax = 0.0f;
  for (int64_t k = 0; k < size; ++k) amax = std::max(amax, std::fabs(static_cast<float>(x[k])));
  const float inverse = amax > kTiny ? 127.0f / amax : 0.0f;
  int32_t total = 0;
  for (int64_t k = 0; k < size; k += 4) {
    int8_t bytes[4];
    for (int i = 0; i < 4; ++i) {
      const float q = std::nearbyint(static_cast<float>(x[k + i]) * inverse);
      bytes[i] = q >= -127.0f && q <= 127.0f ? static_cast<int8_t>(q) : int8_t{-128};
      total += bytes[i];
    }
    std::memcpy(out + k / 4 * stride, bytes, 4);
  }
  *sum = total;
#endif
  *scale = amax > kTiny ? amax / 127.0f : 0.0f;
}

template <typename T>
void quantize_rows(const Problem& p, const T* x, Activations& out) {
  const int64_t groups = p.groups(), quads = p.inputs / 4, per_chunk = rows_per_chunk(p.rows);
  out.quads.resize(p.rows * quads);
  out.scale.resize(p.rows * groups);
  out.sum.resize(p.rows * groups);
  at::parallel_for(0, p.rows, ceil_div(kThreadInputs, p.inputs), [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
      const int64_t start = row / per_chunk * per_chunk, lane = row - start;
      const int64_t size = std::min(per_chunk, p.rows - start);
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t at = start * groups + g * size + lane;
        const int64_t quad = start * quads + g * (p.group_size / 4) * size + lane;
        quantize_group(x + row * p.inputs + g * p.group_size, p.group_size, &out.quads[quad], size,
                       &out.scale[at], &out.sum[at]);
      }
    }
  });
}

#ifdef SUBSPEC_VNNI

template <int R>
inline void dot(__m512i (&acc)[R], __m512i codes, const int32_t* x) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = _mm512_dpbusd_epi32(acc[r], codes, _mm512_set1_epi32(x[r]));
}

inline __m512i load64(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p + kPrefetch), _MM_HINT_T0);
  return _mm512_loadu_si512(p);
}

// acc += the dot products of four quads; low: one byte or one nibble a code, high: the other bits.
template <int B, int R>
inline void four_quads(__m512i (&acc)[R], const uint8_t* low, const uint8_t* high,
                       const int32_t* x) {
  if constexpr (B == 8) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) dot<R>(acc, load64(low + 64 * j), x + j * R);
  } else {
    const __m512i nibble = _mm512_set1_epi8(0x0f), two = _mm512_set1_epi8(0x30);
    const __m512i a = load64(low), b = load64(low + 64);
    __m512i q[4] = {
        _mm512_and_si512(a, nibble), _mm512_and_si512(_mm512_srli_epi16(a, 4), nibble),
        _mm512_and_si512(b, nibble), _mm512_and_si512(_mm512_srli_epi16(b, 4), nibble)};
    if constexpr (B == 6) {
      const __m512i h = load64(high);
      constexpr int and_or = 0xea;  // (x & y) | z
      q[0] = _mm512_ternarylogic_epi32(_mm512_slli_epi16(h, 4), two, q[0], and_or);
      q[1] = _mm512_ternarylogic_epi32(_mm512_slli_epi16(h, 2), two, q[1], and_or);
      q[2] = _mm512_ternarylogic_epi32(h, two, q[2], and_or);
      q[3] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(h, 2), two, q[3], and_or);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) dot<R>(acc, q[j], x + j * R);
  }
}

// R rows times one block of channels: y[r * stride + channel].
template <int B, int R, typename T>
void multiply_block(const Problem& p, const uint8_t* codes, const c10::Half* scales,
                    const int32_t* x, const float* x_scale, const int32_t* x_sum, T* y,
                    int64_t stride) {
  const int64_t quads = p.group_size / 4, groups = p.groups();
  __m512 acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512i total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      total[r] = B == 4 ? _mm512_setzero_si512() : _mm512_set1_epi32(-(1 << (B - 1)) * x_sum[r]);
    const uint8_t* const high = codes + quads * 32;
    for (int64_t q = 0; q < quads; q += 4)
      four_quads<B, R>(total, codes + q * (B == 8 ? 64 : 32), high + q * 16, x + q * R);
    const __m512 s = load16(scales);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512 xs = _mm512_set1_ps(x_scale[r]);
      acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(total[r]), xs), s, acc[r]);
      if constexpr (B == 4) {
        const __m512 sum = _mm512_set1_ps(x_scale[r] * static_cast<float>(x_sum[r]));
        acc[r] = _mm512_fmadd_ps(sum, load16(scales + kChannels), acc[r]);
      }
    }
    codes += quads * 8 * B;
    scales += kChannels * (B == 4 ? 2 : 1);
    x += quads * R;
    x_scale += R;
    x_sum += R;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store16(y + r * stride, acc[r]);
}

#else

template <int B>
inline void unpack_quad(const uint8_t* codes, const uint8_t* high, int64_t q, uint8_t* out) {
  if constexpr (B == 8) {
    std::memcpy(out, codes + q * 64, 64);
  } else {
    for (int i = 0; i < 64; ++i) {
      out[i] = (codes[q / 2 * 64 + i] >> (q % 2 * 4)) & 15;
      if constexpr (B == 6) out[i] |= ((high[q / 4 * 64 + i] >> (q % 4 * 2)) & 3) << 4;
    }
  }
}

template <int B, int R, typename T>
void multiply_block(const Problem& p, const uint8_t* codes, const c10::Half* scales,
                    const int32_t* x, const float* x_scale, const int32_t* x_sum, T* y,
                    int64_t stride) {
  const int64_t quads = p.group_size / 4, groups = p.groups();
  float acc[R][kChannels] = {};
  for (int64_t g = 0; g < groups; ++g) {
    int32_t total[R][kChannels] = {};
    for (int64_t q = 0; q < quads; ++q) {
      uint8_t w[64];
      unpack_quad<B>(codes, codes + quads * 32, q, w);
      for (int r = 0; r < R; ++r) {
        int8_t v[4];
        std::memcpy(v, x + q * R + r, 4);
        for (int c = 0; c < kChannels; ++c)
          total[r][c] += w[4 * c] * v[0] + w[4 * c + 1] * v[1] + w[4 * c + 2] * v[2] +
                         w[4 * c + 3] * v[3];
      }
    }
    for (int r = 0; r < R; ++r) {
      const int32_t offset = B == 4 ? 0 : (1 << (B - 1)) * x_sum[r];
      const float sum = x_scale[r] * static_cast<float>(x_sum[r]);
      for (int c = 0; c < kChannels; ++c) {
        acc[r][c] += static_cast<float>(total[r][c] - offset) * x_scale[r] *
                     static_cast<float>(scales[c]);
        if constexpr (B == 4) acc[r][c] += sum * static_cast<float>(scales[kChannels + c]);
      }
    }
    codes += quads * 8 * B;
    scales += kChannels * (B == 4 ? 2 : 1);
    x += quads * R;
    x_scale += R;
    x_sum += R;
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kChannels; ++c) y[r * stride + c] = static_cast<T>(acc[r][c]);
}

#endif

template <int B, typename T, int R = kMaxRows>
void multiply_rows(int64_t rows, const Problem& p, const uint8_t* codes, const c10::Half* scales,
                   const int32_t* x, const float* x_scale, const int32_t* x_sum, T* y) {
  if constexpr (R > 1)
    if (rows < R)
      return multiply_rows<B, T, R - 1>(rows, p, codes, scales, x, x_scale, x_sum, y);
  multiply_block<B, R, T>(p, codes, scales, x, x_scale, x_sum, y, p.channels);
}

template <int B, typename T>
void multiply(const Problem& p, const T* x, T* y) {
  // Kept between calls, since the caller is one thread of a model: the others only read it.
  thread_local Activations scratch;
  Activations& a = scratch;
  quantize_rows(p, x, a);
  const int64_t block_codes = kChannels * p.inputs * B / 8;
  const int64_t block_scales = kChannels * p.groups() * (B == 4 ? 2 : 1);
  const int64_t per_chunk = rows_per_chunk(p.rows);
  const int64_t work = block_codes * ceil_div(p.rows, per_chunk);
  at::parallel_for(
      0, p.channels / kChannels, ceil_div(kThreadBytes, work), [&](int64_t from, int64_t to) {
        for (int64_t block = from; block < to; ++block)
          for (int64_t row = 0; row < p.rows; row += per_chunk)  // chunks after the first hit L2
            multiply_rows<B, T>(std::min(per_chunk, p.rows - row), p,
                                p.codes + block * block_codes, p.scales + block * block_scales,
                                &a.quads[row * (p.inputs / 4)], &a.scale[row * p.groups()],
                                &a.sum[row * p.groups()],
                                y + row * p.channels + block * kChannels);
      });
}

template <typename T>
void multiply_bits(int64_t bits, const Problem& p, const T* x, T* y) {
  if (bits == 4) return multiply<4, T>(p, x, y);
  if (bits == 6) return multiply<6, T>(p, x, y);
  multiply<8, T>(p, x, y);
}

// What is checked here keeps the loops inside their buffers; Python explains it to users.
Problem check(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales, int64_t bits,
              int64_t group_size) {
  TORCH_CHECK(bits == 4 || bits == 6 || bits == 8, "bits must be 4, 6 or 8, not ", bits);
  TORCH_CHECK(group_size >= 16 && group_size % 16 == 0,
              "group_size must be a multiple of 16, not ", group_size);
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 2, "x and packed must be matrices");
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.is_contiguous(),
              "packed must be contiguous uint8");
  TORCH_CHECK(scales.scalar_type() == at::kHalf && scales.is_contiguous(),
              "scales must be contiguous float16");
  const int64_t channels = packed.size(0), inputs = x.size(1);
  TORCH_CHECK(channels % kChannels == 0 && inputs % group_size == 0 &&
                  packed.size(1) * 8 == inputs * bits,
              "packed ", packed.sizes(), " holds no ", bits, "-bit weight of ", inputs, " inputs");
  TORCH_CHECK(scales.numel() == channels * (inputs / group_size) * (bits == 4 ? 2 : 1), "scales ",
              scales.sizes(), " do not belong to a weight [", channels, ", ", inputs,
              "] of group_size ", group_size);
  return {nullptr, nullptr, x.size(0), channels, inputs, group_size};
}

at::Tensor lowbit_linear(const at::Tensor& input, const at::Tensor& packed,
                         const at::Tensor& scales, int64_t bits, int64_t group_size) {
  const at::Tensor x = input.contiguous();
  Problem p = check(x, packed, scales, bits, group_size);
  p.codes = packed.const_data_ptr<uint8_t>();
  p.scales = scales.const_data_ptr<c10::Half>();
  at::Tensor y = at::empty({p.rows, p.channels}, x.options());
  if (y.numel() == 0 || p.inputs == 0) return y.zero_();
  switch (x.scalar_type()) {
    case at::kFloat:
      multiply_bits(bits, p, x.const_data_ptr<float>(), y.mutable_data_ptr<float>());
      break;
    case at::kBFloat16:
      multiply_bits(bits, p, x.const_data_ptr<c10::BFloat16>(),
                    y.mutable_data_ptr<c10::BFloat16>());
      break;
    case at::kHalf:
      multiply_bits(bits, p, x.const_data_ptr<c10::Half>(), y.mutable_data_ptr<c10::Half>());
      break;
    default:
      TORCH_CHECK(false, "x must be float32, bfloat16 or float16, not ", x.scalar_type());
  }
  return y;
}

at::Tensor lowbit_linear_meta(const at::Tensor& x, const at::Tensor& packed, const at::Tensor&,
                              int64_t, int64_t) {
  return at::empty_symint({x.sym_size(0), packed.sym_size(0)}, x.options());
}

std::string lowbit_isa() {
#ifdef SUBSPEC_VNNI
  return "AVX-512 VNNI";
#else
  return "plain C++";
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(subspec, m) {
  m.def("lowbit_linear(Tensor x, Tensor packed, Tensor scales, int bits, int group_size) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("lowbit_isa() -> str", lowbit_isa);
}

TORCH_LIBRARY_IMPL(subspec, CPU, m) { m.impl("lowbit_linear", lowbit_linear); }
TORCH_LIBRARY_IMPL(subspec, Meta, m) { m.impl("lowbit_linear", lowbit_linear_meta); }
