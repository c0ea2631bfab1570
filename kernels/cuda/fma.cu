// One warp's share of a segment in float32: two lanes take a position's dot product, then each lane takes every 32nd
// of the head dimension.

namespace pagefork {

template <typename T, int D, int GROUP, bool SOFTCAP>
struct FmaWarp {
  static constexpr int PER_LANE = (D + 31) / 32;
  static constexpr int HEADS = GROUP;
  static constexpr int VALUES = GROUP * PER_LANE;
  using Rows = Tile<T, D>;

  const float* query;
  float out[GROUP][PER_LANE];
  float top[GROUP], sum[GROUP];

  static __device__ __forceinline__ int head_of(int value, int) {
    return value / PER_LANE;
  }
  static __device__ __forceinline__ int dim_of(int value, int lane) {
    return value % PER_LANE * 32 + lane;
  }
  __device__ __forceinline__ float value(int i) const {
    return out[i / PER_LANE][i % PER_LANE];
  }

  __device__ __forceinline__ void begin(const float* q) {
    query = q;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      top[g] = LOWEST, sum[g] = 0.0f;
      for (int j = 0; j < PER_LANE; ++j) out[g][j] = 0.0f;
    }
  }

  __device__ __forceinline__ void attend(unsigned k, unsigned v, int position, const Span& span, float scale, float cap) {
    constexpr int HALF = Rows::CHUNKS / 2;
    int lane = threadIdx.x % 32, mine = position + lane / 2, half = lane % 2 * HALF;
    bool see = mine >= span.low && mine < span.length;
    float dot[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) dot[g] = 0.0f;
#pragma unroll 4
    for (int c = 0; c < HALF; ++c) {
      float4 key = load(k + Rows::at(lane / 2, half + c));
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        float4 q = __ldg(reinterpret_cast<const float4*>(query + g * D) + half + c);
        dot[g] += key.x * q.x + key.y * q.y + key.z * q.z + key.w * q.w;
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      dot[g] += __shfl_xor_sync(FULL, dot[g], 1);
      float x = see ? logit2<SOFTCAP>(dot[g], scale, cap) : LOWEST;
      float high = x;
      for (int step = 2; step < 32; step *= 2) high = fmaxf(high, __shfl_xor_sync(FULL, high, step));
      high = fmaxf(high, top[g]);
      float shrink = power2(top[g] - high);
      top[g] = high;
      dot[g] = power2(x - high);
      sum[g] = sum[g] * shrink + dot[g];
      for (int j = 0; j < PER_LANE; ++j) out[g][j] *= shrink;
    }
#pragma unroll 4
    for (int t = 0; t < TILE; ++t) {
      float row[PER_LANE];
#pragma unroll
      for (int j = 0; j < PER_LANE; ++j) {
        int d = min(j * 32 + lane, D - 1);
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(row[j]) : "r"(v + Rows::at(t, d / 4) + d % 4 * 4) : "memory");
      }
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        float weight = __shfl_sync(FULL, dot[g], t * 2);
        for (int j = 0; j < PER_LANE; ++j) out[g][j] += weight * row[j];
      }
    }
  }

  __device__ __forceinline__ void end(float* to) {
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      float total = sum[g];
      for (int step = 2; step < 32; step *= 2) total += __shfl_xor_sync(FULL, total, step);
      if (threadIdx.x % 32 == 0) to[g * 2] = top[g], to[g * 2 + 1] = total;
    }
  }

 private:
  static __device__ __forceinline__ float4 load(unsigned at) {
    float4 r;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(at) : "memory");
    return r;
  }
};

}  // namespace pagefork
