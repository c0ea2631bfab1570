// Tiles in shared memory, and the softmax's arithmetic.

namespace pagefork {

// A tile of 16 rows of D values, in 16-byte chunks laid out so that eight rows' chunks of one column touch all banks:
// by exclusive-or where a row is a multiple of 128 bytes, else by one chunk of padding.
template <typename T, int D>
struct Tile {
  static constexpr int CHUNKS = D * int(sizeof(T)) / 16;
  static constexpr int PITCH = CHUNKS % 8 == 0 ? CHUNKS * 16 : CHUNKS * 16 + 16;
  static constexpr int BYTES = TILE * PITCH;

  static __device__ __forceinline__ int at(int row, int chunk) {
    return row * PITCH + (CHUNKS % 8 == 0 ? (chunk ^ (row & 7)) : chunk) * 16;
  }
};

// `bytes` 0 writes zeros and reads nothing.
__device__ __forceinline__ void copy16(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -3.0e38f;  // below any score, yet LOWEST - LOWEST is 0 and not NaN

// A dot product as a logit in base 2. tanh by ex2: its absolute error stays near 1e-7, tanh.approx's is 5e-4.
template <bool SOFTCAP>
__device__ __forceinline__ float logit2(float dot, float scale, float cap) {
  if constexpr (SOFTCAP) {
    float e = power2(dot * scale * (2.0f * LOG2E) / cap);
    return cap * LOG2E * (1.0f - __fdividef(2.0f, 1.0f + e));
  } else {
    return dot * (scale * LOG2E);
  }
}

}  // namespace pagefork
