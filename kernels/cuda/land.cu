// Copies small arrays, one behind the other, into one that the host reads.

namespace pagefork {

__device__ __forceinline__ int* land(const void* from, int count, int* to) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    to[i] = static_cast<const int*>(from)[i];
  return to + count;
}

}  // namespace pagefork
