// A step's writes to one layer's pools, in place: one block a row that is written, one a row of a copied block.

namespace pagefork {

__device__ __forceinline__ void move(void* to, const void* from, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}

template <typename T, int ROW, int BLOCK>
__device__ void write_kv(
    const T* k_pool, const T* v_pool, const T* k, const T* v, const int* slots, const int* copies, int rows, T* order) {
  constexpr int BYTES = ROW * int(sizeof(T));
  T* k_rows = const_cast<T*>(k_pool);
  T* v_rows = const_cast<T*>(v_pool);
  int item = blockIdx.x;
  if (item == 0 && threadIdx.x < 8) order[threadIdx.x] = T(0.0f);
  if (item < rows) {
    long long slot = slots[item];
    if (slot < 0) return;
    move(k_rows + slot * ROW, k + (long long)item * ROW, BYTES);
    move(v_rows + slot * ROW, v + (long long)item * ROW, BYTES);
  } else {
    const int* copy = copies + (item - rows) / BLOCK * 3;
    int row = (item - rows) % BLOCK;
    if (row >= copy[2]) return;
    long long from = ((long long)copy[0] * BLOCK + row) * ROW, to = ((long long)copy[1] * BLOCK + row) * ROW;
    move(k_rows + to, k_rows + from, BYTES);
    move(v_rows + to, v_rows + from, BYTES);
  }
}

}  // namespace pagefork
