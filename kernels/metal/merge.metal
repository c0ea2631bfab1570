// Merges the splits of every row and head. grid: (32, heads, rows); 32 threads serve one head.
constexpr int CHUNKS = DIM / 4;
const int head = int(thread_position_in_grid.y);
const int row = int(thread_position_in_grid.z);
const int splits = partial_shape[2];

const int high = max(lengths[row], 0);
const int low = WINDOW ? max(high - int(params[2]), 0) : 0;
const int blocks = (high + BLOCK - 1) / BLOCK - low / BLOCK;
const int share = blocks_per_split(blocks, splits, LEAST);
const int used = (blocks + share - 1) / share;

// A split's state is a whole number of vectors, so each of them is aligned.
const auto parts = (const device float4*)partial + (row * HEADS + head) * splits * (CHUNKS + 1);
float top = LOWEST;
for (int split = 0; split < used; ++split) {
  top = max(top, parts[split * (CHUNKS + 1) + CHUNKS].x);
}
const float sink = SINK_OF(head);
for (int chunk = int(thread_position_in_grid.x); chunk < CHUNKS; chunk += 32) {
  float sum = 0.0f;
  float4 value = float4(0.0f);
  for (int split = 0; split < used; ++split) {
    const float4 state = parts[split * (CHUNKS + 1) + CHUNKS];
    const float decay = exp2(state.x - top);
    sum += decay * state.y;
    value += decay * parts[split * (CHUNKS + 1) + chunk];
  }
  emit<false>(OUTPUT, row * HEADS + head, 0, 1, chunk, CHUNKS, value, top, sum, sink);
}
