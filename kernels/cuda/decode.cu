// Phase 1: each warp streams its own tiles through a ring of shared memory; at the end of a segment the block's warps
// are added up and leave one partial result. The ring runs ahead over segment borders, so memory never waits for that.

namespace pagefork {

// BLOCK is 8 or a multiple of 16: a tile lies in one block or fills two.
template <typename Warp, typename T, int D, int BLOCK, int KV_HEADS, int GROUP, int PARTS, int TOGETHER, int WARPS, int STAGES, bool SOFTCAP>
struct Decode {
  static constexpr int SEGMENTS = KV_HEADS * PARTS;
  static constexpr int SETS = SEGMENTS / TOGETHER;
  static constexpr int IDS = BLOCK < TILE ? TILE / BLOCK : 1;  // blocks under one tile
  using Rows = Tile<T, D>;
  static constexpr int STAGE = 2 * Rows::BYTES;
  static constexpr int ROW = KV_HEADS * D;  // values of a position in a pool

  const T* k_pool;
  const T* v_pool;
  const int* tables;
  int width;
  int member;  // of its team

  // The tile that is fetched next: its blocks' ids are read one tile ahead of its rows.
  Cursor ahead;
  int ids[IDS];

  __device__ __forceinline__ void read_ids() {
    int position = (ahead.span.first + ahead.tile) * TILE;
#pragma unroll
    for (int i = 0; i < IDS; ++i) {
      int p = position + i * BLOCK;
      bool seen = p < ahead.span.length && p + (BLOCK < TILE ? BLOCK : TILE) > ahead.span.low;
      ids[i] = seen ? __ldg(tables + (long long)ahead.row * width + p / BLOCK) : 0;
    }
  }

  __device__ __forceinline__ void fetch(unsigned stage) {
    int lane = threadIdx.x % 32;
    int position = (ahead.span.first + ahead.tile) * TILE;
    int inside = BLOCK > TILE ? position % BLOCK : 0;
    long long start[IDS];
#pragma unroll
    for (int i = 0; i < IDS; ++i)
      start[i] = ((long long)ids[i] * BLOCK + inside - i * BLOCK) * ROW + (ahead.set * TOGETHER + member) / PARTS * D;
#pragma unroll
    for (int i = 0; i < Rows::CHUNKS / 2; ++i) {
      int at = i * 32 + lane, row = at / Rows::CHUNKS, chunk = at % Rows::CHUNKS;
      long long from = (row < BLOCK ? start[0] : start[IDS - 1]) + row * ROW + chunk * (16 / int(sizeof(T)));
      int p = position + row;
      int bytes = p >= ahead.span.low && p < ahead.span.length ? 16 : 0;
      unsigned to = stage + Rows::at(row, chunk);
      copy16(to, k_pool + from, bytes);
      copy16(to + Rows::BYTES, v_pool + from, bytes);
    }
  }

  __device__ void run(
      const T* q, const int* lengths, const float* params, int rows, float* partial, float* partial_sums, bool windowed) {
    extern __shared__ __align__(128) unsigned char shared[];
    float* scratch = reinterpret_cast<float*>(shared);           // [WARPS, VALUES, 32]
    float* sums = scratch + WARPS * Warp::VALUES * 32;           // [WARPS, HEADS, 2]
    int warp = threadIdx.x / 32, team = blockIdx.x / TOGETHER;
    member = blockIdx.x % TOGETHER;
    float scale = params[0], cap = params[1];
    int window = windowed ? int(params[2]) : 0;

    Line line = measure(lengths, rows, 0, window, SETS, gridDim.x / TOGETHER, WARPS);
    if (team >= line.teams) return;
    int start = first_tile(line, team), stop = first_tile(line, team + 1);
    Cursor here{lengths, rows, window, SETS};
    here.seek(start);
    ahead = here;
    ahead.advance(warp);

    int to_fetch = (stop - start - warp + WARPS - 1) / WARPS;
    unsigned ring = unsigned(__cvta_generic_to_shared(sums + WARPS * Warp::HEADS * 2)) + warp * STAGES * STAGE;
    if (to_fetch > 0) read_ids();
    auto next = [&](unsigned stage) {
      if (to_fetch-- > 0) {
        fetch(stage);
        ahead.advance(WARPS);
        if (to_fetch > 0) read_ids();
      }
      commit_copies();
    };
    for (int s = 0; s < STAGES; ++s) next(ring + s * STAGE);

    int stage = 0, mine = start + warp;
    for (int at = start; at < stop;) {
      int begin = at - here.tile, end = min(begin + here.span.count, stop);
      Warp state;
      state.begin(q + ((long long)here.row * SEGMENTS + here.set * TOGETHER + member) * GROUP * D);
      for (; mine < end; mine += WARPS) {
        wait_copies<STAGES - 1>();
        __syncwarp();
        unsigned k = ring + stage * STAGE;
        state.attend(k, k + Rows::BYTES, (here.span.first + mine - begin) * TILE, here.span, scale, cap);
        __syncwarp();
        next(k);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
      long long slot = ((long long)here.row * SETS + here.set + team) * TOGETHER + member;
      add_up(state, scratch, sums, partial + slot * GROUP * D, partial_sums + slot * GROUP * 2);
      here.advance(end - at);
      at = end;
    }
  }

  // The warps' states as one: values relative to the highest score, not yet divided by the sum.
  __device__ __forceinline__ void add_up(Warp& state, float* scratch, float* sums, float* partial, float* partial_sums) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < Warp::VALUES; ++i) scratch[(warp * Warp::VALUES + i) * 32 + lane] = state.value(i);
    state.end(sums + warp * Warp::HEADS * 2);
    __syncthreads();
    for (int head = threadIdx.x; head < GROUP; head += WARPS * 32) {
      float top = LOWEST, sum = 0.0f;
      for (int w = 0; w < WARPS; ++w) top = fmaxf(top, sums[(w * Warp::HEADS + head) * 2]);
      for (int w = 0; w < WARPS; ++w)
        sum += sums[(w * Warp::HEADS + head) * 2 + 1] * power2(sums[(w * Warp::HEADS + head) * 2] - top);
      partial_sums[head * 2] = top;
      partial_sums[head * 2 + 1] = sum;
    }
    for (int i = warp; i < Warp::VALUES; i += WARPS) {
      int head = Warp::head_of(i, lane), dim = Warp::dim_of(i, lane);
      if (head >= GROUP || dim >= D) continue;
      float top = LOWEST, total = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) top = fmaxf(top, sums[(w * Warp::HEADS + head) * 2]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w)
        total += scratch[(w * Warp::VALUES + i) * 32 + lane] * power2(sums[(w * Warp::HEADS + head) * 2] - top);
      partial[head * D + dim] = total;
    }
    __syncthreads();
  }
};

}  // namespace pagefork
