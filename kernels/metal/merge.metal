// Merges the splits of every row and head. grid: (32, heads, rows); a SIMD group serves one head, a lane every 32nd
// vector of its value, and, of what splits say about themselves, every 32nd split.
constexpr int CHUNKS = DIM / 4;
constexpr int PARTS = (CHUNKS + 31) / 32;
const int head = int(thread_position_in_grid.y);
const int row = int(thread_position_in_grid.z);
const int lane = int(thread_index_in_simdgroup);
const int splits = partial_shape[2];

const int high = max(lengths[row], 0);
const int low = WINDOW ? max(high - int(params[2]), 0) : 0;
const int blocks = (high + BLOCK - 1) / BLOCK - low / BLOCK;
const int share = blocks_per_split(blocks, splits, LEAST);
const int used = (blocks + share - 1) / share;

// A split's state is a whole number of vectors, so each of them is aligned.
const auto parts = (const device float4*)partial + (row * HEADS + head) * splits * (CHUNKS + 1);
float top = LOWEST;
for (int split = lane; split < used; split += 32) {
  top = max(top, parts[split * (CHUNKS + 1) + CHUNKS].x);
}
top = simd_max(top);

float sum = 0.0f;
float4 value[PARTS];
UNROLL
for (int part = 0; part < PARTS; ++part) {
  value[part] = float4(0.0f);
}
for (int base = 0; base < used; base += 32) {
  float decay = 0.0f;
  if (base + lane < used) {
    const float4 state = parts[(base + lane) * (CHUNKS + 1) + CHUNKS];
    decay = fast::exp2(state.x - top);
    sum += decay * state.y;
  }
  const int count = min(used - base, 32);
  UNROLL_BY_4
  for (int i = 0; i < count; ++i) {
    const float weight = simd_shuffle(decay, ushort(i));
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
      if (CHUNKS % 32 == 0 || lane + part * 32 < CHUNKS) {
        value[part] += weight * parts[(base + i) * (CHUNKS + 1) + lane + part * 32];
      }
    }
  }
}
sum = simd_sum(sum);

const float sink = SINK_OF(head);
UNROLL
for (int part = 0; part < PARTS; ++part) {
  if (CHUNKS % 32 == 0 || lane + part * 32 < CHUNKS) {
    emit<false>(OUTPUT, row * HEADS + head, 0, 1, lane + part * 32, CHUNKS, value[part], top, sum, sink);
  }
}
