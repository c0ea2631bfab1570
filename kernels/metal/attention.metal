// Shared by the decode kernels. Scores are kept in units of log2, so that a softmax weight is one exp2.

// Loops over a thread's own arrays are unrolled whole, since only then do the arrays live in registers.
#define UNROLL _Pragma("clang loop unroll(full)")
// Four turns' loads at once, where the turns are not known to the compiler.
#define UNROLL_BY_4 _Pragma("clang loop unroll_count(4)")

constexpr constant float LOWEST = -3.0e38f;
constexpr constant float LOG2E = 1.44269504088896f;

// The blocks of a row that one split attends to: [first, last). Empty for splits that the row does not need.
struct Span {
  int first;
  int last;
};

inline int blocks_per_split(int blocks, int splits, int least) {
  return max((blocks + splits - 1) / splits, least);
}

inline Span split_span(int low, int high, int block, int split, int splits, int least) {
  const int begin = low / block;
  const int end = (high + block - 1) / block;
  const int share = blocks_per_split(end - begin, splits, least);
  Span span;
  span.first = min(begin + split * share, end);
  span.last = min(span.first + share, end);
  return span;
}

// Sums N values over teams of 2 * DISTANCE lanes, N a power of two. Each step hands half of the values to the other
// half of the lanes, so that N sums cost about N shuffles rather than N * log2(lanes). Afterwards lane l of a team
// of L lanes holds the sums of values l * N / L ... in its first max(1, N / L) places.
template <int N, int DISTANCE>
struct Fold {
  static void run(thread float* values, uint lane) {
    const bool upper = (lane & DISTANCE) != 0;
    UNROLL
    for (int i = 0; i < N / 2; ++i) {
      // Read before the choice: a choice of where to read would keep the array out of registers.
      const float near = values[i];
      const float far = values[i + N / 2];
      values[i] = (upper ? far : near) + simd_shuffle_xor(upper ? near : far, DISTANCE);
    }
    Fold<N / 2, DISTANCE / 2>::run(values, lane);
  }
};

template <int DISTANCE>
struct Fold<1, DISTANCE> {
  static void run(thread float* values, uint lane) {
    values[0] += simd_shuffle_xor(values[0], DISTANCE);
    Fold<1, DISTANCE / 2>::run(values, lane);
  }
};

template <int N>
struct Fold<N, 0> {
  static void run(thread float*, uint) {}
};

template <>
struct Fold<1, 0> {
  static void run(thread float*, uint) {}
};

// One SIMD group at work for TILE query heads. Its 32 lanes form 32 / LANES teams; a team takes KEYS keys at a time,
// a lane every LANES-th vector of four of a key's CHUNKS. Every team keeps a running softmax of its own keys.
//
// The scores of a step are numbered head * KEYS + key, heads padded to a power of two (SCORES in all). After the fold
// a lane of the team holds HELD consecutive scores (or shares one with its neighbours): it alone computes their
// weights and hands them round.
template <typename T, int TILE, int PADDED, int KEYS, int LANES, int CHUNKS, bool SOFTCAP>
struct Team {
  static constexpr constant int PARTS = (CHUNKS + LANES - 1) / LANES;
  static constexpr constant int TEAMS = 32 / LANES;
  static constexpr constant int SCORES = PADDED * KEYS;
  static constexpr constant int HELD = SCORES > LANES ? SCORES / LANES : 1;
  static constexpr constant int HELD_KEYS = HELD < KEYS ? HELD : KEYS;
  static constexpr constant int HELD_HEADS = HELD / HELD_KEYS;

  float4 query[TILE][PARTS];
  float4 value[TILE][PARTS];
  float top[HELD_HEADS];
  float sum[HELD_HEADS];
  uint lane;
  uint base;

  int team() const {
    return int(base) / LANES;
  }

  bool has(int part) const {
    return CHUNKS % LANES == 0 || int(lane) + part * LANES < CHUNKS;
  }

  // A value of every head's holder, on all lanes of the team.
  float of_head(thread const float* held, int head) const {
    const int score = head * KEYS;
    return simd_shuffle(held[score % HELD / HELD_KEYS], ushort(base + score * LANES / SCORES));
  }

  // `from`: the first of `heads` query heads, each CHUNKS vectors; a head past `heads` counts as zeros.
  void start(const device vec<T, 4>* from, int heads, float scale, uint simd_lane) {
    lane = simd_lane % LANES;
    base = simd_lane - lane;
    UNROLL
    for (int head = 0; head < TILE; ++head) {
      UNROLL
      for (int part = 0; part < PARTS; ++part) {
        const bool there = head < heads && has(part);
        query[head][part] = there ? float4(from[head * CHUNKS + int(lane) + part * LANES]) * scale : float4(0.0f);
        value[head][part] = float4(0.0f);
      }
    }
    UNROLL
    for (int i = 0; i < HELD_HEADS; ++i) {
      top[i] = LOWEST;
      sum[i] = 0.0f;
    }
  }

  template <typename P>
  vec<T, 4> load(P from, int at, bool there) const {
    if (there) {
      return from[at];
    }
    return vec<T, 4>(T(0.0f));
  }

  // Attends to the TEAMS * KEYS keys from position `first` on, of which [low, high) are visible; `keys` and `values`
  // point at the first one, `stride` vectors lie between neighbours. What is not visible is not loaded. Nearly all
  // steps are whole; theirs are loads without a condition, so that all of them are in flight at once.
  template <typename P>
  void attend(P keys, P values, int stride, int first, int low, int high, float cap) {
    vec<T, 4> k[KEYS][PARTS];
    vec<T, 4> v[KEYS][PARTS];
    if (first >= low && first + TEAMS * KEYS <= high) {
      UNROLL
      for (int key = 0; key < KEYS; ++key) {
        const int at = (team() + key * TEAMS) * stride + int(lane);
        UNROLL
        for (int part = 0; part < PARTS; ++part) {
          k[key][part] = load(keys, at + part * LANES, has(part));
          v[key][part] = load(values, at + part * LANES, has(part));
        }
      }
    } else {
      UNROLL
      for (int key = 0; key < KEYS; ++key) {
        const int place = team() + key * TEAMS;
        const bool visible = first + place >= low && first + place < high;
        UNROLL
        for (int part = 0; part < PARTS; ++part) {
          const int at = place * stride + int(lane) + part * LANES;
          k[key][part] = load(keys, at, visible && has(part));
          v[key][part] = load(values, at, visible && has(part));
        }
      }
    }

    float scores[SCORES];
    UNROLL
    for (int head = 0; head < PADDED; ++head) {
      UNROLL
      for (int key = 0; key < KEYS; ++key) {
        float score = 0.0f;
        UNROLL
        for (int part = 0; part < PARTS && head < TILE; ++part) {
          score += dot(query[head][part], float4(k[key][part]));
        }
        scores[head * KEYS + key] = score;
      }
    }
    Fold<SCORES, LANES / 2>::run(scores, lane);

    float weight[HELD];
    float decay[HELD_HEADS];
    UNROLL
    for (int i = 0; i < HELD_HEADS; ++i) {
      float highest = LOWEST;
      UNROLL
      for (int j = 0; j < HELD_KEYS; ++j) {
        const int held = i * HELD_KEYS + j;
        const int position = first + team() + (int(lane) * SCORES / LANES + held) % KEYS * TEAMS;
        const float score = SOFTCAP ? cap * LOG2E * precise::tanh(scores[held]) : scores[held];
        weight[held] = position >= low && position < high ? score : LOWEST;
        highest = max(highest, weight[held]);
      }
      UNROLL
      for (int j = HELD_KEYS; j < KEYS; j *= 2) {
        highest = max(highest, simd_shuffle_xor(highest, ushort(j * LANES / SCORES)));
      }
      highest = max(highest, top[i]);
      decay[i] = fast::exp2(top[i] - highest);
      top[i] = highest;
      sum[i] *= decay[i];
      UNROLL
      for (int j = 0; j < HELD_KEYS; ++j) {
        const int held = i * HELD_KEYS + j;
        weight[held] = weight[held] == LOWEST ? 0.0f : fast::exp2(weight[held] - highest);
        sum[i] += weight[held];
      }
    }

    UNROLL
    for (int head = 0; head < TILE; ++head) {
      const float shrink = of_head(decay, head);
      UNROLL
      for (int part = 0; part < PARTS; ++part) {
        value[head][part] *= shrink;
      }
      UNROLL
      for (int key = 0; key < KEYS; ++key) {
        const int score = head * KEYS + key;
        const float share = simd_shuffle(weight[score % HELD], ushort(base + score * LANES / SCORES));
        UNROLL
        for (int part = 0; part < PARTS; ++part) {
          value[head][part] = fma(float4(v[key][part]), float4(share), value[head][part]);
        }
      }
    }
  }

  // Merges the teams of the SIMD group; afterwards each of them holds the whole.
  void finish() {
    float decay[HELD_HEADS];
    UNROLL
    for (int i = 0; i < HELD_HEADS; ++i) {
      UNROLL
      for (int j = HELD_KEYS; j < KEYS; j *= 2) {
        sum[i] += simd_shuffle_xor(sum[i], ushort(j * LANES / SCORES));
      }
      float highest = top[i];
      UNROLL
      for (int distance = LANES; distance < 32; distance *= 2) {
        highest = max(highest, simd_shuffle_xor(highest, ushort(distance)));
      }
      decay[i] = fast::exp2(top[i] - highest);
      top[i] = highest;
      sum[i] *= decay[i];
      UNROLL
      for (int distance = LANES; distance < 32; distance *= 2) {
        sum[i] += simd_shuffle_xor(sum[i], ushort(distance));
      }
    }
    UNROLL
    for (int head = 0; head < TILE; ++head) {
      const float shrink = of_head(decay, head);
      UNROLL
      for (int part = 0; part < PARTS; ++part) {
        float4 total = value[head][part] * shrink;
        UNROLL
        for (int distance = LANES; distance < 32; distance *= 2) {
          total += simd_shuffle_xor(total, ushort(distance));
        }
        value[head][part] = total;
      }
    }
  }
};

// Puts one vector of a head's result where it belongs: normalised into the output, or, of one split among several,
// as it is, with its top and sum in a last vector of their own.
template <bool SPLIT, typename O>
inline void emit(
    device O* out, int head, int split, int splits, int chunk, int chunks,
    float4 value, float top, float sum, float sink) {
  // Outputs begin where MLX's allocations do, so vectors of four are aligned.
  device vec<O, 4>* to = (device vec<O, 4>*)out;
  if (SPLIT) {
    to += (head * splits + split) * (chunks + 1);
    to[chunk] = vec<O, 4>(value);
    if (chunk == 0) {
      to[chunks] = vec<O, 4>(float4(top, sum, 0.0f, 0.0f));
    }
    return;
  }
  // A row without keys has sum 0 and value 0.
  const float highest = max(top, sink);
  const float decay = fast::exp2(top - highest);
  const float total = sum * decay + (sink == LOWEST ? 0.0f : fast::exp2(sink - highest));
  to[head * chunks + chunk] = vec<O, 4>(value * (total > 0.0f ? decay / total : 0.0f));
}
