// How the work of one decode step is dealt to thread blocks, computed by each of them from the lengths alone.
//
// The unit of work is a tile: 16 positions of one sequence for one segment (a KV head, or a part of its query heads).
// TOGETHER segments, whose rows lie side by side in memory, form a set; as many blocks, one a segment, form a team that
// reads the set's rows at about the same time, which DRAM rewards. The tiles of all sets stand in one line, row by row,
// set by set, position by position; team c of n takes the c-th n-th of the line. So every team gets the same number of
// tiles (+-1) however ragged the lengths are, and a long sequence is split over as many teams as its share of the line
// covers. A partial result goes to slot (row and set's index + team): along the line one of the two grows at every cut,
// so no two cuts share a slot.

namespace pagefork {

constexpr int TILE = 16;
constexpr unsigned FULL = 0xffffffffu;

// The tiles of a row that hold visible positions [low, length).
struct Span {
  int low, length, first, count;
};

__device__ __forceinline__ Span span_of(int length, int window) {
  Span s;
  s.length = max(length, 0);
  s.low = window > 0 ? max(s.length - window, 0) : 0;
  s.first = s.low / TILE;
  s.count = (s.length + TILE - 1) / TILE - s.first;
  return s;
}

// The line's length, how much of it lies before `row`, and how many teams share it.
struct Line {
  int total, before, teams;
};

// `least`: a team is not worth starting for fewer tiles than this. Called by whole warps.
__device__ __forceinline__ Line measure(
    const int* lengths, int rows, int row, int window, int sets, int teams, int least) {
  int lane = threadIdx.x % 32, total = 0, before = 0;
  for (int r = lane; r < rows; r += 32) {
    int n = span_of(lengths[r], window).count;
    total += n;
    before += r < row ? n : 0;
  }
  for (int step = 16; step > 0; step /= 2) {
    total += __shfl_xor_sync(FULL, total, step);
    before += __shfl_xor_sync(FULL, before, step);
  }
  Line line;
  line.total = total * sets;
  line.before = before * sets;
  line.teams = min(teams, (line.total + least - 1) / least);
  return line;
}

__device__ __forceinline__ int first_tile(const Line& line, int team) {
  return int((long long)team * line.total / line.teams);
}

__device__ __forceinline__ int team_of(const Line& line, int tile) {
  return int((((long long)tile + 1) * line.teams - 1) / line.total);
}

// A place in the line: `tile` counts from the start of the set.
struct Cursor {
  const int* lengths;
  int rows, window, sets;
  int row, set, tile;
  Span span;

  // Called by whole warps.
  __device__ __forceinline__ void seek(int target) {
    int lane = threadIdx.x % 32, passed = 0;
    for (int base = 0; base < rows; base += 32) {
      int r = base + lane;
      int own = r < rows ? span_of(lengths[r], window).count * sets : 0;
      int sum = own;
      for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(FULL, sum, step);
        sum += lane >= step ? other : 0;
      }
      unsigned beyond = __ballot_sync(FULL, passed + sum > target);
      if (beyond) {
        int found = __ffs(beyond) - 1;
        int start = passed + __shfl_sync(FULL, sum - own, found);
        row = base + found;
        span = span_of(lengths[row], window);
        set = (target - start) / span.count;
        tile = (target - start) % span.count;
        return;
      }
      passed += __shfl_sync(FULL, sum, 31);
    }
  }

  __device__ __forceinline__ void advance(int tiles) {
    tile += tiles;
    while (tile >= span.count) {
      tile -= span.count;
      if (++set == sets) {
        set = 0;
        do {
          if (++row >= rows) {
            row = rows - 1;  // past the line's end: nothing is read from here
            span.count = 0x7fffffff;
            return;
          }
          span = span_of(lengths[row], window);
        } while (span.count == 0);
      }
    }
  }
};

}  // namespace pagefork
