// Phase 2: one block a row and query head adds up the partial results that phase 1 left for it.

namespace pagefork {

template <typename T, int D, int SEGMENTS, int GROUP, int LEAST, bool SINKS>
struct Merge {
  static constexpr int WARPS = 4;
  static constexpr int FOURS = (D / 4 + 31) / 32;

  static __device__ void run(
      const float* partial, const float* partial_sums, const int* lengths, const float* params, const T* sinks,
      int rows, int grid, bool windowed, T* out) {
    __shared__ float added[WARPS][D];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int row = blockIdx.x / (SEGMENTS * GROUP), head = blockIdx.x % (SEGMENTS * GROUP);
    int segment = head / GROUP, member = head % GROUP;
    int window = windowed ? int(params[2]) : 0;
    out += (long long)blockIdx.x * D;
    Span span = span_of(lengths[row], window);
    Line line = measure(lengths, rows, row, window, SEGMENTS, grid, LEAST);
    if (span.count == 0) {
      for (int d = threadIdx.x; d < D; d += WARPS * 32) out[d] = T(0.0f);
      return;
    }
    int begin = line.before + segment * span.count;
    int first = block_of(line, begin), parts = block_of(line, begin + span.count - 1) - first + 1;
    long long slot = (long long)row * SEGMENTS + segment + first;
    partial += (slot * GROUP + member) * D;
    partial_sums += (slot * GROUP + member) * 2;

    float top = LOWEST, sum = 0.0f, sink = LOWEST;
    if constexpr (SINKS) sink = float(sinks[head]) * LOG2E;
    for (int i = lane; i < parts; i += 32) top = fmaxf(top, partial_sums[i * GROUP * 2]);
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, step));
    top = fmaxf(top, sink);
    for (int i = lane; i < parts; i += 32)
      sum += partial_sums[i * GROUP * 2 + 1] * power2(partial_sums[i * GROUP * 2] - top);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL, sum, step);
    if constexpr (SINKS) sum += power2(sink - top);

    float4 total[FOURS];
    for (int j = 0; j < FOURS; ++j) total[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int i = warp; i < parts; i += WARPS) {
      float weight = power2(partial_sums[i * GROUP * 2] - top);
#pragma unroll
      for (int j = 0; j < FOURS; ++j) {
        int at = j * 32 + lane;
        if (at >= D / 4) continue;
        float4 x = reinterpret_cast<const float4*>(partial + (long long)i * GROUP * D)[at];
        total[j].x += weight * x.x, total[j].y += weight * x.y, total[j].z += weight * x.z, total[j].w += weight * x.w;
      }
    }
    for (int j = 0; j < FOURS; ++j)
      if (j * 32 + lane < D / 4) reinterpret_cast<float4*>(added[warp])[j * 32 + lane] = total[j];
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += WARPS * 32)
      out[d] = T((added[0][d] + added[1][d] + added[2][d] + added[3][d]) / sum);
  }
};

}  // namespace pagefork
