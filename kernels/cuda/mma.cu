// One warp's share of a segment on tensor cores (float16, bfloat16), by mma.m16n8k16.
//
// Query heads stand in N, so a group of up to 8 costs one pass: S^T = K Q^T has 16 positions in M, O^T = V^T P^T has 16
// of the head dimension in M. S^T comes out as (position, head), P^T goes in as (head, position): movmatrix turns it.

namespace pagefork {

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

__device__ __forceinline__ unsigned transpose(unsigned r) {
  unsigned t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(r));
  return t;
}

template <typename T, int D, int GROUP, bool SOFTCAP>
struct MmaWarp {
  static constexpr int STEPS = D / 16;             // of the head dimension
  static constexpr int EIGHTS = (GROUP + 7) / 8;   // of query heads
  static constexpr int HEADS = EIGHTS * 8;         // padding included
  static constexpr int VALUES = EIGHTS * STEPS * 4;
  using Rows = Tile<T, D>;

  unsigned query[EIGHTS][STEPS][2];
  float out[EIGHTS][STEPS][4];
  float top[EIGHTS][2], sum[EIGHTS][2];  // of heads 8 e + 2 (lane % 4) + {0, 1}

  static __device__ __forceinline__ int head_of(int value, int lane) {
    return value / (STEPS * 4) * 8 + lane % 4 * 2 + value % 2;
  }
  static __device__ __forceinline__ int dim_of(int value, int lane) {
    return value / 4 % STEPS * 16 + value % 4 / 2 * 8 + lane / 4;
  }
  __device__ __forceinline__ float value(int i) const {
    return out[i / (STEPS * 4)][i / 4 % STEPS][i % 4];
  }

  // `q`: the group's `[GROUP, D]`.
  __device__ __forceinline__ void begin(const T* q) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      int head = e * 8 + lane / 4;
      const T* at = q + (head < GROUP ? head : 0) * D + lane % 4 * 2;
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        unsigned low = *reinterpret_cast<const unsigned*>(at + s * 16);
        unsigned high = *reinterpret_cast<const unsigned*>(at + s * 16 + 8);
        query[e][s][0] = head < GROUP ? low : 0u;
        query[e][s][1] = head < GROUP ? high : 0u;
        for (int i = 0; i < 4; ++i) out[e][s][i] = 0.0f;
      }
      for (int i = 0; i < 2; ++i) top[e][i] = LOWEST, sum[e][i] = 0.0f;
    }
  }

  __device__ __forceinline__ void attend(unsigned k, unsigned v, int position, const Span& span, float scale, float cap) {
    int lane = threadIdx.x % 32;
    float score[EIGHTS][4], odd[EIGHTS][4];
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e)
      for (int i = 0; i < 4; ++i) score[e][i] = odd[e][i] = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      unsigned a[4];
      load_matrices(a, k + Rows::at(lane % 16, 2 * s + lane / 16));
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) Pair<T>::mma(s % 2 ? odd[e] : score[e], a, query[e][s][0], query[e][s][1]);
    }
    bool edge = position < span.low || position + TILE > span.length;
    int near = position + lane / 4, far = near + 8;
    bool see_near = !edge || (near >= span.low && near < span.length);
    bool see_far = !edge || (far >= span.low && far < span.length);
    unsigned weights[EIGHTS][2];
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      float shrink[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = logit2<SOFTCAP>(score[e][i] + odd[e][i], scale, cap);
        float y = logit2<SOFTCAP>(score[e][i + 2] + odd[e][i + 2], scale, cap);
        x = see_near ? x : LOWEST;
        y = see_far ? y : LOWEST;
        float high = fmaxf(x, y);
        high = fmaxf(high, __shfl_xor_sync(FULL, high, 4));
        high = fmaxf(high, __shfl_xor_sync(FULL, high, 8));
        high = fmaxf(high, __shfl_xor_sync(FULL, high, 16));
        high = fmaxf(high, top[e][i]);
        shrink[i] = power2(top[e][i] - high);
        top[e][i] = high;
        score[e][i] = power2(x - high);
        score[e][i + 2] = power2(y - high);
        sum[e][i] = sum[e][i] * shrink[i] + score[e][i] + score[e][i + 2];
      }
      weights[e][0] = transpose(Pair<T>::pack(score[e][0], score[e][1]));
      weights[e][1] = transpose(Pair<T>::pack(score[e][2], score[e][3]));
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
        for (int i = 0; i < 4; ++i) out[e][s][i] *= shrink[i % 2];
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      unsigned a[4];
      load_matrices_transposed(a, v + Rows::at(lane % 8 + lane / 16 * 8, 2 * s + lane / 8 % 2));
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) Pair<T>::mma(out[e][s], a, weights[e][0], weights[e][1]);
    }
  }

  // Put each head's (top, sum) where the block can find them: `to` is `[HEADS, 2]` in shared memory.
  __device__ __forceinline__ void end(float* to) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e)
      for (int i = 0; i < 2; ++i) {
        float total = sum[e][i];
        for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(FULL, total, step);
        if (lane < 4) {
          int head = e * 8 + lane * 2 + i;
          to[head * 2] = top[e][i];
          to[head * 2 + 1] = total;
        }
      }
  }
};

}  // namespace pagefork
