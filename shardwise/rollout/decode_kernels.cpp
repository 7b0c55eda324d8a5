// See decode_kernels.py. Every number is float32 once it is loaded.

#include <ATen/cpu/vec/vec.h>
#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kWidth = Vec::size();
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

Vec load(const float* from) { return Vec::loadu(from); }
Vec load(const c10::BFloat16* from) {
  Vec loaded;
  at::vec::load_fp32_from_bf16(from, loaded);
  return loaded;
}
Vec load(const c10::Half* from) {
  Vec loaded;
  at::vec::load_fp32_from_fp16(from, loaded);
  return loaded;
}

// The first `count` numbers, and zeros.
template <typename T>
Vec load(const T* from, int64_t count) {
  T padded[kWidth] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

float total(Vec vector) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, vector);
}
float largest(Vec vector) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, vector);
}

// Asks for numbers that are read soon, without waiting for them. Nothing has to be there.
template <typename T>
void fetch(const T* from, int64_t count) {
  const char* const bytes = reinterpret_cast<const char*>(from);
  for (int64_t at = 0; at < count * int64_t(sizeof(T)); at += 64) __builtin_prefetch(bytes + at);
}
constexpr int64_t kTokensAhead = 8;

// Attention. The keys and values of a row lie in one piece, and each row reads no further than its own last token.
// d head dim of queries and keys, dv of values.

struct Head {
  int64_t d, dv;
  int64_t first, last;  // token
  float softcap;        // 0: none
  int64_t row_of_scores() const { return (last - first + kWidth) / kWidth * kWidth; }
};

// scores[i, t] = query[i] . keys[first + t], for i < N. Meanwhile the values come, which are read behind them.
template <int N, typename T>
void score(float* scores, const float* query, const T* keys, const T* values, const Head& head) {
  for (int64_t token = head.first; token <= head.last; token++) {
    const T* key = keys + token * head.d;
    fetch(key + kTokensAhead * head.d, head.d);
    fetch(values + token * head.dv, head.dv);
    Vec sums[N];
    for (int i = 0; i < N; i++) sums[i] = Vec(0);
    int64_t j = 0;
    for (; j + kWidth <= head.d; j += kWidth) {
      const Vec part = load(key + j);
      for (int i = 0; i < N; i++) sums[i] = at::vec::fmadd(load(query + i * head.d + j), part, sums[i]);
    }
    if (const int64_t rest = head.d - j; rest > 0) {
      const Vec part = load(key + j, rest);
      for (int i = 0; i < N; i++) sums[i] = at::vec::fmadd(load(query + i * head.d + j, rest), part, sums[i]);
    }
    for (int i = 0; i < N; i++) scores[i * head.row_of_scores() + token - head.first] = total(sums[i]);
  }
}

// Scores of one query become weights that sum to 1, but for what the sink takes.
void normalize(float* scores, float sink, const Head& head) {
  const int64_t size = head.row_of_scores();
  std::fill(scores + head.last - head.first + 1, scores + size, kMinusInfinity);
  Vec most(sink);
  for (int64_t t = 0; t < size; t += kWidth) {
    Vec part = Vec::loadu(scores + t);
    if (head.softcap != 0) {
      part = Vec(head.softcap) * (part / Vec(head.softcap)).tanh();
      part.store(scores + t, std::min(kWidth, head.last - head.first + 1 - t));  // the padding stays out
      part = Vec::loadu(scores + t);
    }
    most = at::vec::maximum(most, part);
  }
  const Vec top(largest(most));
  Vec sums(0);
  for (int64_t t = 0; t < size; t += kWidth) {
    const Vec weight = (Vec::loadu(scores + t) - top).exp();
    weight.store(scores + t);
    sums = sums + weight;
  }
  const float sink_weight = sink == kMinusInfinity ? 0 : std::exp(sink - largest(most));
  const Vec inverse(1 / (total(sums) + sink_weight));
  for (int64_t t = 0; t < size; t += kWidth) (Vec::loadu(scores + t) * inverse).store(scores + t);
}

// out[i, j : j + columns] = sum over t of weights[i, t] * values[first + t, the same columns], for i < N; columns
// fill M vectors, or a part of the only one.
template <int N, int M, typename T>
void mix(T* out, const float* weights, const T* values, int64_t j, int64_t columns, const Head& head) {
  Vec sums[N][M];
  for (int i = 0; i < N; i++)
    for (int m = 0; m < M; m++) sums[i][m] = Vec(0);
  for (int64_t token = head.first; token <= head.last; token++) {
    for (int m = 0; m < M; m++) {
      const T* from = values + token * head.dv + j + m * kWidth;
      const Vec part = columns == M * kWidth ? load(from) : load(from, columns);
      for (int i = 0; i < N; i++) {
        const Vec weight(weights[i * head.row_of_scores() + token - head.first]);
        sums[i][m] = at::vec::fmadd(weight, part, sums[i][m]);
      }
    }
  }
  for (int i = 0; i < N; i++)
    for (int m = 0; m < M; m++) {
      float mixed[kWidth];
      sums[i][m].store(mixed);
      const int64_t count = std::min(kWidth, columns - m * kWidth);
      for (int64_t c = 0; c < count; c++) out[i * head.dv + j + m * kWidth + c] = T(mixed[c]);
    }
}

// N queries that share keys. `room` holds their scores.
template <int N, typename T>
void attend(T* out, const float* query, const T* keys, const T* values, const float* sinks, float* room,
            const Head& head) {
  score<N>(room, query, keys, values, head);
  for (int i = 0; i < N; i++) normalize(room + i * head.row_of_scores(), sinks ? sinks[i] : kMinusInfinity, head);
  int64_t j = 0;
  for (; j + 4 * kWidth <= head.dv; j += 4 * kWidth) mix<N, 4>(out, room, values, j, 4 * kWidth, head);
  for (; j < head.dv; j += kWidth) mix<N, 1>(out, room, values, j, std::min(kWidth, head.dv - j), head);
}

struct Shape {
  int64_t rows, kv_heads, queries, d, dv, capacity;  // queries: that share a key/value head
};

template <typename T>
void attend_all(T* out, const T* query, const T* key, const T* value, T* keys, T* values, const int64_t* positions,
                const float* sinks, const Shape& shape, float scaling, float softcap, int64_t window, int64_t chunk,
                int threads) {
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(threads)
  for (int64_t row = 0; row < shape.rows; row++)
    for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
      const int64_t last = positions[row], at = row * shape.kv_heads + kv_head;
      const int64_t first = std::max<int64_t>(window > 0 ? last - window + 1 : 0, chunk > 0 ? last - last % chunk : 0);
      const Head head{shape.d, shape.dv, std::max<int64_t>(0, first), last, softcap};
      T* const own_keys = keys + at * shape.capacity * shape.d;
      T* const own_values = values + at * shape.capacity * shape.dv;
      std::memcpy(own_keys + last * shape.d, key + at * shape.d, shape.d * sizeof(T));
      std::memcpy(own_values + last * shape.dv, value + at * shape.dv, shape.dv * sizeof(T));

      thread_local std::vector<float> memory;
      memory.resize(shape.queries * shape.d + 4 * head.row_of_scores());
      float* const scaled = memory.data();
      float* const room = scaled + shape.queries * shape.d;
      for (int64_t j = 0; j < shape.queries * shape.d; j++)
        scaled[j] = float(query[at * shape.queries * shape.d + j]) * scaling;

      for (int64_t i = 0; i < shape.queries;) {
        T* const to = out + (at * shape.queries + i) * shape.dv;
        const float* const from = scaled + i * shape.d;
        const float* const own_sinks = sinks ? sinks + kv_head * shape.queries + i : nullptr;
        const int64_t left = shape.queries - i;
        if (left >= 4) {
          attend<4>(to, from, own_keys, own_values, own_sinks, room, head);
          i += 4;
        } else if (left >= 2) {
          attend<2>(to, from, own_keys, own_values, own_sinks, room, head);
          i += 2;
        } else {
          attend<1>(to, from, own_keys, own_values, own_sinks, room, head);
          i += 1;
        }
      }
    }
}

// Projection. out[r, v] = states[r] . weight[v] for R rows and V words; d hidden size, `words` of the vocabulary.
// A Lane is what one load brings and one multiplication takes: products of bfloat16 numbers are exact in float32, and
// where the processor adds up pairs of them nothing has to be converted.

template <typename T>
struct Lane {
  static constexpr int64_t width = kWidth;
  using Loaded = Vec;
  static Vec add(const Vec& sum, const Loaded& a, const Loaded& b) { return at::vec::fmadd(a, b, sum); }
  static Loaded take(const T* from) { return load(from); }
  static Loaded take(const T* from, int64_t count) { return load(from, count); }
};

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
template <>
struct Lane<c10::BFloat16> {
  static constexpr int64_t width = 2 * kWidth;
  using Loaded = __m512bh;
  static Vec add(const Vec& sum, const Loaded& a, const Loaded& b) { return _mm512_dpbf16_ps(sum, a, b); }
  static Loaded take(const c10::BFloat16* from) { return (Loaded)_mm512_loadu_si512(from); }
  static Loaded take(const c10::BFloat16* from, int64_t count) {
    c10::BFloat16 padded[width] = {};
    std::memcpy(padded, from, count * sizeof(c10::BFloat16));
    return take(padded);
  }
};
#endif

template <int R, int V, typename T>
void project_block(float* out, const T* states, const T* weight, int64_t d, int64_t words) {
  using L = Lane<T>;
  Vec sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = Vec(0);
  const auto add = [&](auto take) {
    typename L::Loaded of_words[V];
    for (int v = 0; v < V; v++) of_words[v] = take(weight + v * d);
    for (int r = 0; r < R; r++) {
      const auto state = take(states + r * d);
      for (int v = 0; v < V; v++) sums[r][v] = L::add(sums[r][v], state, of_words[v]);
    }
  };
  int64_t j = 0;
  for (; j + L::width <= d; j += L::width) add([&](const T* row) { return L::take(row + j); });
  if (const int64_t rest = d - j; rest > 0) add([&](const T* row) { return L::take(row + j, rest); });
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) out[r * words + v] = total(sums[r][v]);
}

template <int V, typename T>
void project_words(float* out, const T* states, const T* weight, int64_t rows, int64_t d, int64_t words) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) project_block<4, V>(out + r * words, states + r * d, weight, d, words);
  for (; r < rows; r++) project_block<1, V>(out + r * words, states + r * d, weight, d, words);
}

template <typename T>
void project_all(float* out, const T* states, const T* weight, int64_t rows, int64_t d, int64_t words, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t v = 0; v < words / 4; v++) project_words<4>(out + 4 * v, states, weight + 4 * v * d, rows, d, words);
  for (int64_t v = words / 4 * 4; v < words; v++) project_words<1>(out + v, states, weight + v * d, rows, d, words);
}

}  // namespace

#define ENTRY(NAME, T)                                                                                              \
  extern "C" void attend_##NAME(T* out, const T* query, const T* key, const T* value, T* keys, T* values,           \
                                const int64_t* positions, const float* sinks, const Shape* shape, float scaling,    \
                                float softcap, int64_t window, int64_t chunk, int threads) {                        \
    attend_all(out, query, key, value, keys, values, positions, sinks, *shape, scaling, softcap, window, chunk,     \
               threads);                                                                                            \
  }                                                                                                                 \
  extern "C" void project_##NAME(float* out, const T* states, const T* weight, int64_t rows, int64_t d,         \
                                 int64_t words, int threads) {                                                      \
    project_all(out, states, weight, rows, d, words, threads);                                                      \
  }

ENTRY(float32, float)
ENTRY(bfloat16, c10::BFloat16)
ENTRY(float16, c10::Half)
