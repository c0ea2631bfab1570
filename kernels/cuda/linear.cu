// A few rows times a weight matrix: as fast as the weights can be read, and with what stands before and after a product
// in a model's layer, so that it costs no launch of its own.
//
// A block takes tiles of 16 weight rows. Its warps share the inputs between them, chunk by chunk, and each copies its
// own chunks of weights into shared memory some ahead. One more warp adds up what the others found in a tile, while
// they go on with the next.

namespace pagefork {

// At most ROWS <= 8 rows. `bias` and `add` may be null. GLU: silu(first half) * second half comes out. HELD: how many
// vectors of 8 inputs of a row a thread holds while they are normed; 0 where they are not.
template <typename T, int ROWS, int WARPS, int STAGES, bool GLU, int HELD>
struct Linear {
  static constexpr int CHUNK = 128;
  static constexpr int COPIERS = CHUNK / 8;  // lanes that copy one row of a chunk
  static constexpr int STAGE_BYTES = TILE * CHUNK * 2;
  static constexpr int OUTPUTS = GLU ? TILE / 2 : TILE;  // of a tile
  static constexpr int PUTS = (OUTPUTS * ROWS + 31) / 32;

  struct Shared {
    float sums[2][WARPS][ROWS][TILE + 1];
    float squares[WARPS][ROWS];
  };

  const T* x;        // [rows, inputs]
  const T* weights;  // [outputs, inputs]
  const T* gain;     // [inputs], with HELD: inputs are divided by their root mean square and multiplied by this first
  const T* bias;     // [outputs]
  const T* add;      // as y
  T* y;              // [rows, outputs], with GLU [rows, outputs / 2]
  int rows, inputs, outputs;
  Shared& shared;
  unsigned char* stages;  // [WARPS, STAGES, STAGE_BYTES], then [rows, pitch] inputs
  int warp, lane;

  __device__ __forceinline__ int tiles() const { return outputs / TILE; }
  __device__ __forceinline__ int pitch() const { return inputs + 32; }  // two rows side by side meet all banks
  __device__ __forceinline__ T* kept() const { return reinterpret_cast<T*>(stages + WARPS * STAGES * STAGE_BYTES); }

  // All warps, or those that multiply; each kind from its own place in the code.
  static __device__ __forceinline__ void meet() { asm volatile("barrier.sync 0;" ::: "memory"); }
  static __device__ __forceinline__ void meet_readers() {
    asm volatile("barrier.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
  }

  // The chunk at (tile, chunk) into a stage, and on to the warp's next one; an empty group of copies after the last.
  __device__ __forceinline__ void copy_next(int& tile, int& chunk, int stage) const {
    if (tile < tiles()) {
      int row = lane / COPIERS, vector = lane % COPIERS, column = chunk * CHUNK + vector * 8;
      int bytes = column < inputs ? 16 : 0;
      const T* from = weights + (long long)(tile * OUTPUTS + row) * inputs + (bytes ? column : 0);
      unsigned to = unsigned(__cvta_generic_to_shared(stages)) + (warp * STAGES + stage) * STAGE_BYTES;
#pragma unroll
      for (int r = 0; r < TILE; r += 32 / COPIERS, from += 32 / COPIERS * inputs) {
        if (GLU && r == TILE / 2) from += (long long)(outputs / 2 - TILE / 2) * inputs;
        copy16(to + (r + row) * CHUNK * 2 + (vector ^ ((r + row) % 2 * 4)) * 16, from, bytes);
      }
      chunk += WARPS;
      if (chunk * CHUNK >= inputs) chunk = warp, tile += gridDim.x;
    }
    commit_copies();
  }

  __device__ __forceinline__ void copy_inputs() const {
    unsigned to = unsigned(__cvta_generic_to_shared(kept()));
    for (int row = 0; row < rows; row++)
      for (int at = threadIdx.x * 8; at < inputs; at += WARPS * 32 * 8)
        copy16(to + (row * pitch() + at) * 2, x + row * inputs + at, 16);
    commit_copies();
  }

  using Held = uint4[ROWS + 1][HELD > 0 ? HELD : 1];  // the rows' inputs and `gain`, eight values each

  __device__ __forceinline__ int held_at(int i) const { return (i * WARPS * 32 + threadIdx.x) * 8; }

  // The inputs on their way to the registers, for `norm`.
  __device__ __forceinline__ void hold_inputs(Held& held) const {
#pragma unroll
    for (int row = 0; row <= ROWS; row++)
#pragma unroll
      for (int i = 0; i < HELD; i++)
        if (held_at(i) < inputs && (row < rows || row == ROWS))
          held[row][i] = *reinterpret_cast<const uint4*>((row < ROWS ? x + row * inputs : gain) + held_at(i));
  }

  static __device__ __forceinline__ float square(unsigned pair) {
    float2 two = Pair<T>::unpack(pair);
    return two.x * two.x + two.y * two.y;
  }

  // As MLX does it: what is normed is rounded before it is multiplied by the gain.
  static __device__ __forceinline__ unsigned normed(unsigned pair, float scale, unsigned gains) {
    asm volatile("" : "+r"(pair));  // else it is kept in two registers, as floats, from where its square was taken
    float2 two = Pair<T>::unpack(pair), gain = Pair<T>::unpack(gains);
    two = Pair<T>::unpack(Pair<T>::pack(two.x * scale, two.y * scale));
    return Pair<T>::pack(two.x * gain.x, two.y * gain.y);
  }

  __device__ __forceinline__ void norm(const Held& held, float epsilon) const {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      if (row >= rows) break;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < HELD; i++)
        if (held_at(i) < inputs)
          sum += square(held[row][i].x) + square(held[row][i].y) + square(held[row][i].z) + square(held[row][i].w);
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL, sum, step);
      if (lane == 0) shared.squares[warp][row] = sum;
    }
    meet_readers();
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      if (row >= rows) break;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += shared.squares[w][row];
      float scale = rsqrtf(sum / float(inputs) + epsilon);
#pragma unroll
      for (int i = 0; i < HELD; i++) {
        uint4 in = held[row][i], by = held[ROWS][i];
        if (held_at(i) < inputs)
          *reinterpret_cast<uint4*>(kept() + row * pitch() + held_at(i)) = make_uint4(
              normed(in.x, scale, by.x), normed(in.y, scale, by.y), normed(in.z, scale, by.z), normed(in.w, scale, by.w));
      }
    }
  }

  // Eight values side by side serve as two fragments: in which order the sum goes over the inputs does not matter.
  __device__ __forceinline__ void compute(int chunk, int stage, float (&sums)[2][4]) const {
    int row = lane / 4, part = lane % 4, column = chunk * CHUNK + part * 8;
    const unsigned char* from = stages + (warp * STAGES + stage) * STAGE_BYTES + row * CHUNK * 2;
    wait_copies<STAGES - 1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / 32; i++) {
      int at = ((i * 4 + part) ^ (row % 2 * 4)) * 16;
      uint4 a = *reinterpret_cast<const uint4*>(from + at);
      uint4 b = *reinterpret_cast<const uint4*>(from + 8 * CHUNK * 2 + at);
      uint4 c = make_uint4(0, 0, 0, 0);
      if (row < rows && column + i * 32 < inputs)
        c = *reinterpret_cast<const uint4*>(kept() + row * pitch() + column + i * 32);
      Pair<T>::mma(sums[0], {a.x, b.x, a.y, b.y}, c.x, c.y);
      Pair<T>::mma(sums[1], {a.z, b.z, a.w, b.w}, c.z, c.w);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void read(float epsilon) const {
    int ahead = blockIdx.x, next = warp;
    if constexpr (HELD > 0) {
      Held held;
      hold_inputs(held);
      for (int i = 0; i < STAGES - 1; i++) copy_next(ahead, next, i);
      norm(held, epsilon);
    } else {
      copy_inputs();
      for (int i = 0; i < STAGES - 1; i++) copy_next(ahead, next, i);
      wait_copies<STAGES - 1>();
    }
    meet_readers();
    for (int tile = blockIdx.x, turn = 0, item = 0; tile < tiles(); tile += gridDim.x, turn ^= 1) {
      float sums[2][4] = {};
      for (int chunk = warp; chunk * CHUNK < inputs; chunk += WARPS, item++) {
        copy_next(ahead, next, (item + STAGES - 1) % STAGES);
        compute(chunk, item % STAGES, sums);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int output = lane / 4 + i / 2 * 8, row = lane % 4 * 2 + i % 2;
        if (row < ROWS) shared.sums[turn][warp][row][output] = sums[0][i] + sums[1][i];
      }
      meet();
    }
    wait_copies<0>();
  }

  __device__ __forceinline__ float total(int turn, int row, int output, int column) const {
    float sum = bias ? float(bias[column]) : 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shared.sums[turn][w][row][output];
    return sum;
  }

  __device__ __forceinline__ void finish() const {
    int width = tiles() * OUTPUTS;
    for (int tile = blockIdx.x, turn = 0; tile < tiles(); tile += gridDim.x, turn ^= 1) {
      float added[PUTS];
#pragma unroll
      for (int i = 0; i < PUTS; i++) {
        int at = lane + i * 32, row = at / OUTPUTS;
        added[i] = add && row < rows ? float(add[row * width + tile * OUTPUTS + at % OUTPUTS]) : 0.0f;
      }
      meet();
#pragma unroll
      for (int i = 0; i < PUTS; i++) {
        int at = lane + i * 32, row = at / OUTPUTS, output = at % OUTPUTS, column = tile * OUTPUTS + output;
        if (row >= rows) continue;
        float sum = total(turn, row, output, column);
        if constexpr (GLU) sum = sum / (1.0f + __expf(-sum)) * total(turn, row, output + TILE / 2, width + column);
        y[row * width + column] = T(sum + added[i]);
      }
    }
  }

  __device__ __forceinline__ void run(float epsilon) const {
    if (warp < WARPS)
      read(epsilon);
    else
      finish();
  }
};

}  // namespace pagefork
