// Phase 2: adds up the partial results that phase 1 left for each row and query head. Four warps share one head where
// there are few heads to go round (long sequences, many parts), else each warp takes a head of its own.

namespace pagefork {

template <typename T, int D, int SEGMENTS, int GROUP, int TOGETHER, int LEAST, bool SINKS>
struct Merge {
  static constexpr int WARPS = 4;
  static constexpr int SETS = SEGMENTS / TOGETHER;
  static constexpr int STEP = TOGETHER * GROUP;  // from one partial result of a head to its next
  static constexpr int FOURS = (D / 4 + 31) / 32;
  static constexpr int AT_ONCE = 8 / FOURS;

  const float* partial;
  const float* sums;
  int parts, lane, share, first;  // this warp adds parts `first`, `first + share`, ...
  float top;
  float4 total[FOURS];

  __device__ __forceinline__ void load(float4 (&x)[AT_ONCE][FOURS], int from) const {
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u)
#pragma unroll
      for (int j = 0; j < FOURS; ++j) {
        int part = from + u * share, at = j * 32 + lane;
        if (part < parts && at < D / 4)
          x[u][j] = reinterpret_cast<const float4*>(partial + (long long)part * STEP * D)[at];
      }
  }

  __device__ __forceinline__ void add(const float4 (&x)[AT_ONCE][FOURS], int from) {
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      int part = from + u * share;
      if (part >= parts) continue;
      float weight = power2(sums[part * STEP * 2] - top);
#pragma unroll
      for (int j = 0; j < FOURS; ++j) {
        if (j * 32 + lane >= D / 4) continue;
        total[j].x += weight * x[u][j].x, total[j].y += weight * x[u][j].y;
        total[j].z += weight * x[u][j].z, total[j].w += weight * x[u][j].w;
      }
    }
  }

  // The sum of all weights, and `top` with it.
  __device__ __forceinline__ float reduce(float sink) {
    top = sink;
    float sum = 0.0f;
    for (int i = lane; i < parts; i += 32) top = fmaxf(top, sums[i * STEP * 2]);
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, step));
    for (int i = lane; i < parts; i += 32) sum += sums[i * STEP * 2 + 1] * power2(sums[i * STEP * 2] - top);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL, sum, step);
    return SINKS ? sum + power2(sink - top) : sum;
  }

  __device__ void run(
      const int* lengths, const float* params, const T* sinks, int rows, int teams, bool windowed, T* out) {
    __shared__ float4 added[WARPS][FOURS * 32];
    int warp = threadIdx.x / 32, window = windowed ? int(params[2]) : 0;
    share = int(gridDim.x) == rows * SEGMENTS * GROUP ? WARPS : 1;
    first = share == 1 ? 0 : warp;
    lane = threadIdx.x % 32;
    int item = share == 1 ? blockIdx.x * WARPS + warp : blockIdx.x;
    if (item >= rows * SEGMENTS * GROUP) return;  // never where warps share a head, so none misses the barrier
    int row = item / (SEGMENTS * GROUP), head = item % (SEGMENTS * GROUP), segment = head / GROUP, set = segment / TOGETHER;

    Span span = span_of(lengths[row], window);
    Line line = measure(lengths, rows, row, window, SETS, teams, LEAST);
    float sum = 1.0f;
    for (int j = 0; j < FOURS; ++j) total[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (span.count > 0) {
      int begin = line.before + set * span.count, team = team_of(line, begin);
      parts = team_of(line, begin + span.count - 1) - team + 1;
      long long slot = ((long long)row * SETS + set + team) * TOGETHER + segment % TOGETHER;
      partial += (slot * GROUP + head % GROUP) * D;
      sums += (slot * GROUP + head % GROUP) * 2;
      float4 x[AT_ONCE][FOURS];
      load(x, first);  // on its way while the weights are summed
      float sink = LOWEST;
      if constexpr (SINKS) sink = float(sinks[head]) * LOG2E;
      sum = reduce(sink);
      add(x, first);
      for (int from = first + AT_ONCE * share; from < parts; from += AT_ONCE * share) load(x, from), add(x, from);
    }
    if (share > 1) {
      for (int j = 0; j < FOURS; ++j) added[warp][j * 32 + lane] = total[j];
      __syncthreads();
      if (warp > 0) return;
      for (int w = 1; w < WARPS; ++w)
        for (int j = 0; j < FOURS; ++j) {
          float4 x = added[w][j * 32 + lane];
          total[j].x += x.x, total[j].y += x.y, total[j].z += x.z, total[j].w += x.w;
        }
    }
    T* to = out + (long long)item * D;
    for (int j = 0; j < FOURS; ++j) {
      int at = (j * 32 + lane) * 4;
      if (at >= D) continue;
      to[at] = T(total[j].x / sum), to[at + 1] = T(total[j].y / sum);
      to[at + 2] = T(total[j].z / sum), to[at + 3] = T(total[j].w / sum);
    }
  }
};

}  // namespace pagefork
