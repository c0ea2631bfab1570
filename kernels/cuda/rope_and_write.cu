// Rotates a step's queries and keys and writes its keys and values into their slots, in place.
//
// A thread moves one unit, two vectors of a head that hold each other's partners; a few blocks share a row. Each block
// computes the row's cosines and sines once, while its values are on their way.

namespace pagefork {

template <int BYTES>
struct Word;
template <>
struct Word<16> {
  using Type = uint4;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<4> {
  using Type = unsigned;
};
template <>
struct Word<2> {
  using Type = unsigned short;
};

// VECTOR values: a power of two that divides half of DIMS, of at most 16 bytes.
template <typename T, int HEADS, int KV_HEADS, int D, int DIMS, int VECTOR, bool TRADITIONAL>
struct Rotation {
  static constexpr int PAIRS = DIMS / 2;
  static constexpr int UNITS = D / (2 * VECTOR);  // of a head
  static constexpr int ROTATED = (HEADS + KV_HEADS) * UNITS;
  static constexpr int ALL = ROTATED + KV_HEADS * UNITS;  // of a row
  using Raw = typename Word<VECTOR * int(sizeof(T))>::Type;

  struct alignas(sizeof(Raw)) Vector {
    T values[VECTOR];
    __device__ __forceinline__ void load(const T* from) {
      *reinterpret_cast<Raw*>(values) = *reinterpret_cast<const Raw*>(from);
    }
    __device__ __forceinline__ void store(T* to) const {
      *reinterpret_cast<Raw*>(to) = *reinterpret_cast<const Raw*>(values);
    }
  };

  const T* k_pool;
  const T* v_pool;
  const T* qkv;
  const int* slots;
  const int* positions;

  // As MLX does it: the angle in float32, its cosine and sine exact to the last places however large it is.
  static __device__ __forceinline__ void turn(float2* turns, int position, const float* params, const float* freqs) {
    float place = params[0] * float(position);
    for (int i = threadIdx.x; i < PAIRS; i += blockDim.x) {
      float frequency = freqs ? 1.0f / freqs[i] : exp2f(-(float(i) / float(PAIRS)) * params[1]);
      sincosf(place * frequency, &turns[i].y, &turns[i].x);
    }
  }

  static __device__ __forceinline__ void rotate(T& x, T& y, float2 turn) {
    float a = float(x), b = float(y);
    x = T(a * turn.x - b * turn.y);
    y = T(a * turn.y + b * turn.x);
  }

  __device__ void run(const float* params, const float* freqs, T* q) {
    __shared__ float2 turns[PAIRS];
    int blocks = (ALL + blockDim.x - 1) / blockDim.x;
    int row = blockIdx.x / blocks, first = blockIdx.x % blocks * blockDim.x, item = first + threadIdx.x;
    int head = item / UNITS, unit = item % UNITS;
    bool turned = unit < PAIRS / VECTOR;
    int near = turned && !TRADITIONAL ? unit * VECTOR : unit * 2 * VECTOR;
    int far = near + (turned && !TRADITIONAL ? PAIRS : VECTOR);

    const T* from = qkv + ((long long)row * (HEADS + 2 * KV_HEADS) + head) * D;
    Vector one, two;
    long long slot = -1;
    if (item < ALL) {
      one.load(from + near);
      two.load(from + far);
      slot = slots[row];
    }
    if (first < ROTATED) turn(turns, positions[row], params, freqs);
    __syncthreads();
    if (item >= ALL) return;

    if (turned && item < ROTATED) {
      const float2* mine = turns + unit * VECTOR;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        if constexpr (!TRADITIONAL || VECTOR == 1)
          rotate(one.values[i], two.values[i], mine[i]);
        else if (2 * i < VECTOR)
          rotate(one.values[2 * i], one.values[2 * i + 1], mine[i]);
        else
          rotate(two.values[2 * i - VECTOR], two.values[2 * i + 1 - VECTOR], mine[i]);
      }
    }
    T* to = q + ((long long)row * HEADS + head) * D;
    if (head >= HEADS) {
      if (slot < 0) return;
      int kv = head - HEADS;
      T* pool = const_cast<T*>(kv < KV_HEADS ? k_pool : v_pool);
      to = pool + (slot * KV_HEADS + kv % KV_HEADS) * D;
    }
    one.store(to + near);
    two.store(to + far);
  }
};

}  // namespace pagefork
