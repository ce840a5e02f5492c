// Attention of tree nodes to a paged context and to their ancestors: reference.py states the maths.
//
// The context is read where it lies, once, in tiles of keys that all queries of a key head share;
// softmax is online (the running maximum and sum of each query), so no score outlives its tile.
// Long contexts are split over threads and merged by log-sum-exp.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace {

typedef float Vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(64), aligned(4)));

constexpr int kLanes = 16;
constexpr int kTile = 32;      // keys at once: two vectors of scores a query
constexpr int kRows = 4;       // queries at once: their accumulators stay in registers
constexpr int64_t kMinChunk = 256;  // context positions below which a split costs more than it saves
constexpr float kMasked = -1e30f;

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec splat(float x) { return Vec{} + x; }

// exp within 2e-7 relative for x <= 0; 0 far below; NaN stays NaN.
inline Vec exp_neg(Vec x) {
  const Vec low = splat(-87.0f);
  x = x < low ? low : x;
  const Vec scaled = x * 1.44269504088896341f;
  const IntVec n = __builtin_convertvector(scaled - 0.5f, IntVec);  // toward zero: round, x <= 0
  const Vec whole = __builtin_convertvector(n, Vec);
  const Vec r = (x - whole * 0.693145751953125f) - whole * 1.428606765330187e-6f;
  Vec y = splat(1.0f / 5040.0f);
  y = y * r + 1.0f / 720.0f;
  y = y * r + 1.0f / 120.0f;
  y = y * r + 1.0f / 24.0f;
  y = y * r + 1.0f / 6.0f;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const IntVec bits = (n + 127) << 23;
  return y * (Vec)bits;  // the same bits
}

inline float max_of(Vec v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = std::max(best, v[i]);
  return best;
}

inline float sum_of(Vec v) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

template <typename T>
inline void widen(const T* from, float* to, int64_t count) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {  // the upper half of a float's bits
    const auto* bits = reinterpret_cast<const uint16_t*>(from);
    auto* wide = reinterpret_cast<uint32_t*>(to);
    for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<uint32_t>(bits[i]) << 16;
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
  }
}

// The queries of one (request, key head), and what they have gathered so far.
struct Queries {
  int64_t rows, dim;
  std::vector<float> query;         // [rows][dim], scaled
  std::vector<float> sum, maximum;  // [rows]
  std::vector<float> out;           // [rows][dim], not normalised
  Queries(int64_t rows, int64_t dim)
      : rows(rows), dim(dim), query(rows * dim), sum(rows, 0.0f), maximum(rows, kMasked),
        out(rows * dim, 0.0f) {}
};

struct Tile {
  std::vector<float> keys;    // [dim][kTile]
  std::vector<float> values;  // [kTile][dim]
  std::vector<float> scores;  // [rows][kTile]
  bool is_finite = true;      // the values are, or the tile is a rare one
  Tile(int64_t rows, int64_t dim)
      : keys(dim * kTile, 0.0f), values(kTile * dim, 0.0f), scores(rows * kTile) {}
};

// scores[r][key] = query[r] . keys[key]
template <int R>
void score_rows(const Queries& q, Tile& tile, int64_t row) {
  Vec low[R], high[R];
  for (int r = 0; r < R; ++r) low[r] = high[r] = Vec{};
  const float* query = q.query.data() + row * q.dim;
  for (int64_t d = 0; d < q.dim; ++d) {
    const Vec k0 = load(&tile.keys[d * kTile]), k1 = load(&tile.keys[d * kTile + kLanes]);
    for (int r = 0; r < R; ++r) {
      const float x = query[r * q.dim + d];
      low[r] += k0 * x;
      high[r] += k1 * x;
    }
  }
  for (int r = 0; r < R; ++r) {
    store(&tile.scores[(row + r) * kTile], low[r]);
    store(&tile.scores[(row + r) * kTile + kLanes], high[r]);
  }
}

// out[r][d] += weight[r][key] * values[key][d], for V vectors of d
template <int R, int V>
void gather_values(Queries& q, const Tile& tile, int64_t row, int64_t column, int64_t count) {
  Vec acc[R][V];
  float* out = q.out.data() + row * q.dim + column;
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = load(out + r * q.dim + v * kLanes);
  for (int64_t key = 0; key < count; ++key) {
    const float* value = &tile.values[key * q.dim + column];
    for (int r = 0; r < R; ++r) {
      const float weight = tile.scores[(row + r) * kTile + key];
      for (int v = 0; v < V; ++v) acc[r][v] += load(value + v * kLanes) * weight;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + r * q.dim + v * kLanes, acc[r][v]);
}

// The same for one query where values are not finite: zero times NaN is NaN, so what a query does
// not see must be left out.
void gather_seen_values(Queries& q, const Tile& tile, int64_t row, int64_t count) {
  for (int64_t key = 0; key < count; ++key) {
    const float weight = tile.scores[row * kTile + key];
    if (weight == 0) continue;
    const float* value = &tile.values[key * q.dim];
    for (int64_t d = 0; d < q.dim; ++d) q.out[row * q.dim + d] += value[d] * weight;
  }
}

template <int R>
void gather_row_values(Queries& q, const Tile& tile, int64_t row, int64_t count) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= q.dim; column += 4 * kLanes)
    gather_values<R, 4>(q, tile, row, column, count);
  for (; column < q.dim; column += kLanes) gather_values<R, 1>(q, tile, row, column, count);
}

struct Rules {
  float soft_cap;
  int64_t window;
};

inline Vec cap(Vec scores, float soft_cap) {
  const Vec x = scores * (2.0f / soft_cap);
  const Vec e = exp_neg(x > 0 ? -x : x);  // of -|x|
  const Vec tanh = (1.0f - e) / (1.0f + e);
  return (x > 0 ? tanh : -tanh) * soft_cap;
}

// Scores of a tile become weights, and the running maxima and sums take them in.
// allowed(row, key) says what a query may see; it is not asked where all_allowed is set.
template <typename Allowed>
void attend(Queries& q, Tile& tile, int64_t count, const Rules& rules, bool all_allowed,
            Allowed allowed) {
  int64_t row = 0;
  for (; row + kRows <= q.rows; row += kRows) score_rows<kRows>(q, tile, row);
  for (; row < q.rows; ++row) score_rows<1>(q, tile, row);
  for (row = 0; row < q.rows; ++row) {
    float* scores = &tile.scores[row * kTile];
    if (rules.soft_cap > 0)
      for (int lane = 0; lane < kTile; lane += kLanes)
        store(scores + lane, cap(load(scores + lane), rules.soft_cap));
    if (!all_allowed)
      for (int64_t key = 0; key < count; ++key)
        if (!allowed(row, key)) scores[key] = kMasked;
    std::fill(scores + count, scores + kTile, kMasked);
    Vec low = load(scores), high = load(scores + kLanes);
    const float maximum = std::max(q.maximum[row], max_of(low > high ? low : high));
    if (maximum <= kMasked) {  // nothing to see so far
      std::fill(scores, scores + kTile, 0.0f);
      continue;
    }
    // What is masked weighs exactly nothing, whatever the maximum; what is seen and NaN counts.
    const Vec nothing = Vec{}, masked = splat(kMasked);
    low = low <= masked ? nothing : exp_neg(low - maximum);
    high = high <= masked ? nothing : exp_neg(high - maximum);
    store(scores, low);
    store(scores + kLanes, high);
    const float before = q.maximum[row];
    if (maximum > before) {
      const float factor = before > kMasked ? std::exp(before - maximum) : 0.0f;
      q.sum[row] *= factor;
      for (int64_t d = 0; d < q.dim; ++d) q.out[row * q.dim + d] *= factor;
      q.maximum[row] = maximum;
    }
    q.sum[row] += sum_of(low + high);
  }
  row = 0;
  if (!tile.is_finite)
    for (; row < q.rows; ++row) gather_seen_values(q, tile, row, count);
  for (; row + kRows <= q.rows; row += kRows) gather_row_values<kRows>(q, tile, row, count);
  for (; row < q.rows; ++row) gather_row_values<1>(q, tile, row, count);
}

template <typename T>
struct Call {
  const T *query, *key_cache, *value_cache, *node_keys, *node_values;
  T* out;
  const int32_t *block_table, *context_lens, *levels;
  const bool* mask;
  int64_t requests, m, heads, dim, kv_heads, block, table_width, nodes;
  int64_t key_strides[3], value_strides[3];  // of [requests, kv_heads, s]
  int64_t mask_strides[3];                   // of [requests, m, s]
  int64_t query_strides[3];
  int64_t key_block, key_head, key_dim;  // strides of the key cache; its positions lie side by side
  int64_t value_block, value_head;       // of the value cache; a head's block is dense
  float scale;
  Rules rules;

  int64_t group() const { return heads / kv_heads; }

  // A query that sees no node, not even itself, is padding.
  bool is_padding(int64_t request, int64_t node) const {
    const bool* seen = mask + request * mask_strides[0] + node * mask_strides[1];
    for (int64_t i = 0; i < nodes; ++i)
      if (seen[i * mask_strides[2]]) return false;
    return true;
  }

  // The first position that a query looks back to: vLLM may have freed the blocks before it.
  int64_t first_position(int64_t request) const {
    if (rules.window < 1) return 0;
    const int64_t length = context_lens[request];
    int64_t first = length;
    for (int64_t node = 0; node < m; ++node)
      if (!is_padding(request, node))
        first = std::min(first, length + levels[request * m + node] - rules.window + 1);
    return std::max<int64_t>(first, 0);
  }

  void load_queries(int64_t request, int64_t head, Queries& q) const {
    for (int64_t row = 0; row < q.rows; ++row) {
      const int64_t node = row / group(), h = head * group() + row % group();
      const T* from = query + request * query_strides[0] + node * query_strides[1] +
                      h * query_strides[2];
      for (int64_t d = 0; d < dim; ++d) q.query[row * dim + d] = static_cast<float>(from[d]) * scale;
    }
  }

  void attend_context(int64_t request, int64_t head, int64_t begin, int64_t end, Queries& q,
                      Tile& tile) const {
    const int64_t length = context_lens[request];
    const int32_t* level = levels + request * m;
    begin = std::max(begin, first_position(request));
    while (begin < end) {
      const int64_t offset = begin % block;
      const int64_t count = std::min({end - begin, block - offset, int64_t{kTile}});
      const int64_t id = block_table[request * table_width + begin / block];
      const T* keys = key_cache + id * key_block + head * key_head + offset;
      const T* values = value_cache + id * value_block + head * value_head + offset * dim;
      for (int64_t d = 0; d < dim; ++d) widen(keys + d * key_dim, &tile.keys[d * kTile], count);
      widen(values, tile.values.data(), count * dim);
      attend(q, tile, count, rules, rules.window < 1, [&](int64_t row, int64_t key) {
        return begin + key > length + level[row / group()] - rules.window;
      });
      begin += count;
    }
  }

  void attend_nodes(int64_t request, int64_t head, Queries& q, Tile& tile) const {
    const T* keys = node_keys + request * key_strides[0] + head * key_strides[1];
    const T* values = node_values + request * value_strides[0] + head * value_strides[1];
    const bool* seen = mask + request * mask_strides[0];
    for (int64_t begin = 0; begin < nodes; begin += kTile) {
      const int64_t count = std::min(nodes - begin, int64_t{kTile});
      for (int64_t key = 0; key < count; ++key) {
        bool anybody = false;  // what nobody may look at can be NaN, and zero times NaN is NaN
        for (int64_t i = 0; i < m && !anybody; ++i)
          anybody = seen[i * mask_strides[1] + (begin + key) * mask_strides[2]];
        const T* k = keys + (begin + key) * key_strides[2];
        const T* v = values + (begin + key) * value_strides[2];
        for (int64_t d = 0; d < dim; ++d) {
          tile.keys[d * kTile + key] = anybody ? static_cast<float>(k[d]) : 0.0f;
          tile.values[key * dim + d] = anybody ? static_cast<float>(v[d]) : 0.0f;
        }
      }
      Vec probe{};
      for (int64_t i = 0; i < count * dim; i += kLanes) probe += load(&tile.values[i]) * 0.0f;
      tile.is_finite = sum_of(probe) == 0;
      attend(q, tile, count, rules, false, [&](int64_t row, int64_t key) {
        return seen[(row / group()) * mask_strides[1] + (begin + key) * mask_strides[2]];
      });
    }
  }

  // Chunks of a request's context; the last one takes the nodes along.
  void run() const {
    const int64_t pairs = requests * kv_heads;
    const int64_t wanted = std::max<int64_t>(1, 2 * at::get_num_threads() / pairs);
    const int64_t longest = *std::max_element(context_lens, context_lens + requests);
    const int64_t chunk = std::max(kMinChunk, (longest + wanted - 1) / wanted);
    const int64_t chunks = std::max<int64_t>(1, (longest + chunk - 1) / chunk);
    const int64_t rows = m * group();
    std::vector<Queries> parts(pairs * chunks, Queries(rows, dim));
    at::parallel_for(0, pairs * chunks, 1, [&](int64_t first, int64_t last) {
      Tile tile(rows, dim);
      for (int64_t task = first; task < last; ++task) {
        const int64_t pair = task / chunks, index = task % chunks;
        const int64_t request = pair / kv_heads, head = pair % kv_heads;
        const int64_t length = context_lens[request], begin = index * chunk;
        load_queries(request, head, parts[task]);
        attend_context(request, head, begin, std::min(begin + chunk, length), parts[task], tile);
        if (index == chunks - 1) attend_nodes(request, head, parts[task], tile);
      }
    });
    for (int64_t pair = 0; pair < pairs; ++pair) write(pair, &parts[pair * chunks], chunks);
  }

  void write(int64_t pair, const Queries* parts, int64_t chunks) const {
    const int64_t request = pair / kv_heads, head = pair % kv_heads;
    std::vector<float> merged(dim);
    for (int64_t row = 0; row < m * group(); ++row) {
      float maximum = kMasked, sum = 0;
      for (int64_t c = 0; c < chunks; ++c) maximum = std::max(maximum, parts[c].maximum[row]);
      std::fill(merged.begin(), merged.end(), 0.0f);
      for (int64_t c = 0; c < chunks; ++c) {
        if (parts[c].sum[row] == 0) continue;
        const float factor = std::exp(parts[c].maximum[row] - maximum);
        sum += parts[c].sum[row] * factor;
        for (int64_t d = 0; d < dim; ++d) merged[d] += parts[c].out[row * dim + d] * factor;
      }
      const int64_t node = row / group(), h = head * group() + row % group();
      T* to = out + ((request * m + node) * heads + h) * dim;
      if (is_padding(request, node)) {
        std::fill(to, to + dim, static_cast<T>(0.0f));
        continue;
      }
      for (int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(merged[d] / sum);
    }
  }
};

void copy_strides(const at::Tensor& tensor, int64_t* strides) {
  for (int i = 0; i < 3; ++i) strides[i] = tensor.stride(i);
}

// A block outside the cache would be read from anywhere in memory.
void check_blocks(const at::Tensor& key_cache, const at::Tensor& block_table,
                  const at::Tensor& context_lens) {
  const int64_t blocks = key_cache.size(0), block = key_cache.size(1);
  const int64_t width = block_table.size(1);
  const int32_t* table = block_table.const_data_ptr<int32_t>();
  for (int64_t request = 0; request < block_table.size(0); ++request) {
    const int64_t length = context_lens.const_data_ptr<int32_t>()[request];
    TORCH_CHECK(length >= 0 && length <= width * block, "context length ", length,
                " does not fit a block table of ", width, " blocks of ", block);
    for (int64_t i = 0; i * block < length; ++i) {
      const int32_t id = table[request * width + i];
      TORCH_CHECK(id >= 0 && id < blocks, "block ", id, " of request ", request,
                  " is outside the cache's ", blocks);
    }
  }
}

at::Tensor tree_attention(const at::Tensor& query, const at::Tensor& key_cache,
                          const at::Tensor& value_cache, const at::Tensor& block_table,
                          const at::Tensor& context_lens,
                          const at::Tensor& node_keys, const at::Tensor& node_values,
                          const at::Tensor& mask, const at::Tensor& levels, double scale,
                          double soft_cap, int64_t window) {
  TORCH_CHECK(query.dim() == 4 && key_cache.dim() == 4 && value_cache.dim() == 4 &&
                  node_keys.dim() == 4 && block_table.dim() == 2,
              "wrong ranks: queries, caches and nodes have 4 dimensions, the block table 2");
  const int64_t requests = query.size(0), m = query.size(1), heads = query.size(2);
  const int64_t dim = query.size(3), kv_heads = key_cache.size(2), block = key_cache.size(1);
  TORCH_CHECK(requests > 0 && m > 0, "there are no queries");
  TORCH_CHECK(dim % kLanes == 0, "head size ", dim, " is no multiple of ", kLanes);
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, heads, " heads do not share ", kv_heads,
              " key heads evenly");
  TORCH_CHECK(key_cache.size(3) == dim && value_cache.sizes() == key_cache.sizes(),
              "a cache does not fit the queries");
  TORCH_CHECK(key_cache.stride(1) == 1 && value_cache.stride(1) == dim && value_cache.stride(3) == 1,
              "a head's block must be dense: its keys [dim, block], its values [block, dim]");
  TORCH_CHECK(node_keys.size(0) == requests && node_keys.size(1) == kv_heads &&
                  node_keys.size(3) == dim && node_values.sizes() == node_keys.sizes(),
              "node keys and values must both be [requests, key heads, nodes, head size]");
  TORCH_CHECK(mask.sizes() == at::IntArrayRef({requests, m, node_keys.size(2)}),
              "the mask must be [requests, queries, nodes]");
  TORCH_CHECK(levels.sizes() == at::IntArrayRef({requests, m}),
              "levels must be [requests, queries]");
  TORCH_CHECK(block_table.size(0) == requests &&
                  context_lens.sizes() == at::IntArrayRef({requests}),
              "block table and context lengths must have one row a request");
  TORCH_CHECK(query.stride(3) == 1 && node_keys.stride(3) == 1 && node_values.stride(3) == 1,
              "heads must be dense");
  TORCH_CHECK(block_table.is_contiguous() && context_lens.is_contiguous() && levels.is_contiguous(),
              "tables must be contiguous");
  TORCH_CHECK(block_table.scalar_type() == at::kInt && context_lens.scalar_type() == at::kInt &&
                  levels.scalar_type() == at::kInt && mask.scalar_type() == at::kBool,
              "tables are int32, the mask is bool");
  TORCH_CHECK(key_cache.scalar_type() == query.scalar_type() &&
                  value_cache.scalar_type() == query.scalar_type() &&
                  node_keys.scalar_type() == query.scalar_type() &&
                  node_values.scalar_type() == query.scalar_type(),
              "queries, cache and nodes must have one dtype");
  check_blocks(key_cache, block_table, context_lens);
  at::Tensor out = at::empty(query.sizes(), query.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, query.scalar_type(), "tree_attention", [&] {
        Call<scalar_t> call;
        call.query = query.const_data_ptr<scalar_t>();
        call.key_cache = key_cache.const_data_ptr<scalar_t>();
        call.value_cache = value_cache.const_data_ptr<scalar_t>();
        call.node_keys = node_keys.const_data_ptr<scalar_t>();
        call.node_values = node_values.const_data_ptr<scalar_t>();
        call.out = out.mutable_data_ptr<scalar_t>();
        call.block_table = block_table.const_data_ptr<int32_t>();
        call.context_lens = context_lens.const_data_ptr<int32_t>();
        call.levels = levels.const_data_ptr<int32_t>();
        call.mask = mask.const_data_ptr<bool>();
        call.requests = requests, call.m = m, call.heads = heads;
        call.dim = dim, call.kv_heads = kv_heads, call.block = block;
        call.table_width = block_table.size(1), call.nodes = node_keys.size(2);
        copy_strides(query, call.query_strides);
        copy_strides(node_keys, call.key_strides);
        copy_strides(node_values, call.value_strides);
        copy_strides(mask, call.mask_strides);
        call.key_block = key_cache.stride(0), call.key_head = key_cache.stride(2);
        call.key_dim = key_cache.stride(3);
        call.value_block = value_cache.stride(0), call.value_head = value_cache.stride(2);
        call.scale = static_cast<float>(scale);
        call.rules = {static_cast<float>(soft_cap), window};
        call.run();
      });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(subspec, library) {
  library.def(
      "tree_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "Tensor context_lens, Tensor node_keys, Tensor node_values, Tensor mask, Tensor levels, "
      "float scale, float soft_cap, int window) -> Tensor");
}

TORCH_LIBRARY_IMPL(subspec, CPU, library) { library.impl("tree_attention", tree_attention); }
