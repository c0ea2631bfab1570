// Writes a step's K and V rows into their slots and performs its block copies, in place.
// grid: (threads of one row, rows + copies * BLOCK, 2 pools); a threadgroup moves one row of one pool.
// Rows of a copy past its filled count belong to `slots` or to nobody, so no two threadgroups meet in one row.
constexpr int WIDTH = KV_HEADS * DIM / 4;
const int item = int(threadgroup_position_in_grid.y);
const bool second = threadgroup_position_in_grid.z == 1;
const uint thread_x = thread_position_in_grid.x;

if (item == 0 && !second && thread_x < 8) {
  written[thread_x] = T(0.0f);
}

// The pool is an input, hence const: MLX's outputs are always fresh, and a pool is written where it is.
// Vectors of four: a row has a multiple of 8 elements and MLX aligns buffers far beyond a vector's size.
device vec<T, 4>* pool = (device vec<T, 4>*)(second ? v_pool : k_pool);
const device vec<T, 4>* source = (const device vec<T, 4>*)(second ? v : k);
device vec<T, 4>* target = pool;

const int rows = slots_shape[0];
if (item < rows) {
  const int slot = slots[item];
  if (slot < 0) {
    return;
  }
  source += ulong(item) * WIDTH;
  target += ulong(slot) * WIDTH;
} else {
  const int copy = (item - rows) / BLOCK;
  const int offset = (item - rows) % BLOCK;
  if (offset >= copies[3 * copy + 2]) {
    return;
  }
  source = pool + (ulong(copies[3 * copy]) * BLOCK + offset) * WIDTH;
  target += (ulong(copies[3 * copy + 1]) * BLOCK + offset) * WIDTH;
}
for (int i = int(thread_x); i < WIDTH; i += THREADS) {
  target[i] = source[i];
}
