// Decode attention of one row's query heads that share a KV head, over one split of the row's keys.
// grid: (32 * SIMDGROUPS * rows, KV heads, splits). The SIMD groups take turns at the blocks of the split; all of them
// work for all the heads, so that a key is loaded once.
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int CHUNKS = DIM / 4;
constexpr int STEP = 32 / LANES * KEYS;
threadgroup float4 values_of[SIMDGROUPS * GROUP * CHUNKS];
threadgroup float tops_of[SIMDGROUPS * GROUP];
threadgroup float sums_of[SIMDGROUPS * GROUP];

const int row = int(threadgroup_position_in_grid.x);
const int kv_head = int(threadgroup_position_in_grid.y);
const int split = int(threadgroup_position_in_grid.z);
const int splits = int(threadgroups_per_grid.z);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const uint lane = thread_index_in_simdgroup;

const int high = max(lengths[row], 0);
const int low = WINDOW ? max(high - int(params[2]), 0) : 0;
const Span span = split_span(low, high, BLOCK, split, splits, LEAST);
if (SPLIT && span.first >= span.last) {
  return;
}

// Vectors of four: DIM is a multiple of 8 and MLX aligns buffers far beyond a vector's size.
const int first_head = row * HEADS + kv_head * GROUP;
const float cap = params[1];
typedef Team<T, GROUP, PADDED, KEYS, LANES, CHUNKS, SOFTCAP> Heads;
Heads team;
team.start(
    (const device vec<T, 4>*)q + first_head * CHUNKS, GROUP, params[0] * (SOFTCAP ? 1.0f / cap : LOG2E), lane);

const auto keys = (const device vec<T, 4>*)k_pool + kv_head * CHUNKS;
const auto values = (const device vec<T, 4>*)v_pool + kv_head * CHUNKS;
const auto table = tables + row * tables_shape[1];
constexpr int STRIDE = KV_HEADS * CHUNKS;

int next = span.first + simdgroup < span.last ? table[span.first + simdgroup] : 0;
for (int index = span.first + simdgroup; index < span.last; index += SIMDGROUPS) {
  const ulong block = ulong(next) * (BLOCK * STRIDE);
  next = index + SIMDGROUPS < span.last ? table[index + SIMDGROUPS] : 0;
  for (int offset = 0; offset < BLOCK; offset += STEP) {
    const int first = index * BLOCK + offset;
    if (first < high && first + STEP > low) {
      const ulong at = block + offset * STRIDE;
      team.attend(keys + at, values + at, STRIDE, first, low, high, cap);
    }
  }
}
team.finish();

if (team.base == 0) {
  UNROLL
  for (int head = 0; head < GROUP; ++head) {
    UNROLL
    for (int part = 0; part < Heads::PARTS; ++part) {
      if (team.has(part)) {
        values_of[(simdgroup * GROUP + head) * CHUNKS + int(lane) + part * LANES] = team.value[head][part];
      }
    }
  }
}
UNROLL
for (int head = 0; head < GROUP; ++head) {
  const float top = team.of_head(team.top, head);
  const float sum = team.of_head(team.sum, head);
  if (lane == 0) {
    tops_of[simdgroup * GROUP + head] = top;
    sums_of[simdgroup * GROUP + head] = sum;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int item = simdgroup * 32 + int(lane); item < GROUP * CHUNKS; item += SIMDGROUPS * 32) {
  const int head = item / CHUNKS;
  float top = LOWEST;
  for (int i = 0; i < SIMDGROUPS; ++i) {
    top = max(top, tops_of[i * GROUP + head]);
  }
  float sum = 0.0f;
  float4 value = float4(0.0f);
  for (int i = 0; i < SIMDGROUPS; ++i) {
    const float decay = fast::exp2(tops_of[i * GROUP + head] - top);
    sum += decay * sums_of[i * GROUP + head];
    value += decay * values_of[i * GROUP * CHUNKS + item];
  }
  const float sink = SINK_OF(kv_head * GROUP + head);
  emit<SPLIT>(OUTPUT, first_head + head, split, splits, item % CHUNKS, CHUNKS, value, top, sum, sink);
}
