// Rotates a step's queries and keys and writes its keys and values into their slots, in place.
// grid: (threads, parts of a row, rows). A thread moves one unit: two vectors of a head that hold each other's partners.
// The cosines and sines of a row are computed once in each of its threadgroups.
constexpr int PAIRS = DIMS / 2;
constexpr int UNITS = DIM / 8;
constexpr int ROTATED = (HEADS + KV_HEADS) * UNITS;
constexpr int ALL = (HEADS + 2 * KV_HEADS) * UNITS;
threadgroup float cosines[PAIRS];
threadgroup float sines[PAIRS];

const int row = int(threadgroup_position_in_grid.z);
const int first = int(threadgroup_position_in_grid.y) * THREADS;
const int own = int(thread_position_in_threadgroup.x);
const int item = first + own;

// In float32 as MLX does it, but never by fast functions, which lose an angle of many turns.
if (first < ROTATED) {
  const float place = params[0] * float(positions[row]);
  for (int i = own; i < PAIRS; i += THREADS) {
    const float angle = place * FREQUENCY_OF(i);
    cosines[i] = precise::cos(angle);
    sines[i] = precise::sin(angle);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (item >= ALL) {
  return;
}

const int head = item / UNITS;
const int unit = item % UNITS;
const bool turned = unit < PAIRS / 4;
const int near = turned && !TRADITIONAL ? unit : 2 * unit;
const int far = near + (turned && !TRADITIONAL ? PAIRS / 4 : 1);
// Vectors of four: a head has a multiple of 8 elements and MLX aligns buffers far beyond a vector's size.
const device vec<T, 4>* source = (const device vec<T, 4>*)qkv;
source += (ulong(row) * (HEADS + 2 * KV_HEADS) + head) * (DIM / 4);
vec<T, 4> one = source[near];
vec<T, 4> two = source[far];
if (turned && item < ROTATED) {
  const int pair = 4 * unit;
  const float4 cosine = float4(cosines[pair], cosines[pair + 1], cosines[pair + 2], cosines[pair + 3]);
  const float4 sine = float4(sines[pair], sines[pair + 1], sines[pair + 2], sines[pair + 3]);
  const float4 x = TRADITIONAL ? float4(one.x, one.z, two.x, two.z) : float4(one);
  const float4 y = TRADITIONAL ? float4(one.y, one.w, two.y, two.w) : float4(two);
  const float4 a = x * cosine - y * sine;
  const float4 b = x * sine + y * cosine;
  one = vec<T, 4>(TRADITIONAL ? float4(a.x, b.x, a.y, b.y) : a);
  two = vec<T, 4>(TRADITIONAL ? float4(a.z, b.z, a.w, b.w) : b);
}

// The pools are inputs, hence const, and written where they are; vectors are aligned as above.
device vec<T, 4>* target = (device vec<T, 4>*)q;
if (head < HEADS) {
  target += (ulong(row) * HEADS + head) * (DIM / 4);
} else {
  const int slot = slots[row];
  if (slot < 0) {
    return;
  }
  const int kv_head = head - HEADS;
  target = (device vec<T, 4>*)(kv_head < KV_HEADS ? k_pool : v_pool);
  target += (ulong(slot) * KV_HEADS + kv_head % KV_HEADS) * (DIM / 4);
}
target[near] = one;
target[far] = two;
