// Decode attention where the query heads of a KV head are too many for one SIMD group's registers.
// grid: (32 * SIMDGROUPS * rows, KV heads * PIECES, splits). All SIMD groups work on the same keys, which pass through
// threadgroup memory and so are loaded once; each keeps TILE heads of its own.
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int CHUNKS = DIM / 4;
constexpr int STEP = 32 / LANES * KEYS;
constexpr int THREADS = 32 * SIMDGROUPS;
threadgroup vec<T, 4> tile_of[2 * STAGE * CHUNKS];

const int row = int(threadgroup_position_in_grid.x);
const int kv_head = int(threadgroup_position_in_grid.y) / PIECES;
const int piece = int(threadgroup_position_in_grid.y) % PIECES;
const int split = int(threadgroup_position_in_grid.z);
const int splits = int(threadgroups_per_grid.z);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const uint lane = thread_index_in_simdgroup;
const int thread_x = simdgroup * 32 + int(lane);

const int high = max(lengths[row], 0);
const int low = WINDOW ? max(high - int(params[2]), 0) : 0;
const Span span = split_span(low, high, BLOCK, split, splits, LEAST);
if (SPLIT && span.first >= span.last) {
  return;
}

// Vectors of four: DIM is a multiple of 8 and MLX aligns buffers far beyond a vector's size.
const int tile = (piece * SIMDGROUPS + simdgroup) * TILE;
const int heads = clamp(GROUP - tile, 0, TILE);
const int first_head = row * HEADS + kv_head * GROUP + tile;
const float cap = params[1];
typedef Team<T, TILE, PADDED, KEYS, LANES, CHUNKS, SOFTCAP> Heads;
Heads team;
team.start(
    (const device vec<T, 4>*)q + first_head * CHUNKS, heads, params[0] * (SOFTCAP ? 1.0f / cap : LOG2E), lane);

const auto keys = (const device vec<T, 4>*)k_pool + kv_head * CHUNKS;
const auto values = (const device vec<T, 4>*)v_pool + kv_head * CHUNKS;
const auto table = tables + row * tables_shape[1];
constexpr int STRIDE = KV_HEADS * CHUNKS;

for (int index = span.first; index < span.last; ++index) {
  const ulong block = ulong(table[index]) * (BLOCK * STRIDE);
  for (int offset = 0; offset < BLOCK; offset += STAGE) {
    const int first = index * BLOCK + offset;
    if (first >= high || first + STAGE <= low) {
      continue;
    }
    for (int item = thread_x; item < STAGE * CHUNKS; item += THREADS) {
      const int key = item / CHUNKS;
      if (first + key >= low && first + key < high) {
        const ulong at = block + (offset + key) * STRIDE + item % CHUNKS;
        tile_of[item] = keys[at];
        tile_of[STAGE * CHUNKS + item] = values[at];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int step = 0; step < STAGE; step += STEP) {
      if (first + step < high && first + step + STEP > low) {
        team.attend(
            tile_of + step * CHUNKS, tile_of + (STAGE + step) * CHUNKS, CHUNKS, first + step, low, high, cap);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
team.finish();

UNROLL

for (int head = 0; head < TILE; ++head) {
  const float top = team.of_head(team.top, head);
  const float sum = team.of_head(team.sum, head);
  UNROLL
  for (int part = 0; part < Heads::PARTS; ++part) {
    if (head < heads && team.base == 0 && team.has(part)) {
      const float sink = SINK_OF(kv_head * GROUP + tile + head);
      emit<SPLIT>(
          OUTPUT, first_head + head, split, splits, int(lane) + part * LANES, CHUNKS, team.value[head][part], top, sum,
          sink);
    }
  }
}
