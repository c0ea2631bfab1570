// What the compiled kernels and the scheduler share. No standard header that declares mathematics may be included
// here: its global names would mix with Metal's.
#pragma once
#include <cstddef>
#include <cstdint>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace msl {

// One array of a launch, as Python hands it over (ctypes mirror: harness.py).
struct Buffer {
  const char* name;
  unsigned char* data;
  uint64_t bytes;
  unsigned char* valid;  // a byte for each byte of data: may it be read? Set by a store.
  uint64_t loaded;       // bytes loaded by all threads
  uint32_t* writers;     // for every two bytes: the thread that wrote them, plus one
  uint32_t* readers;     // likewise the one that read them; MANY for several
};

struct Launch {
  Buffer* buffers;
  uint64_t count;
  uint32_t grid[3];
  uint32_t group[3];
  uint64_t seed;
  uint64_t budget;  // loads, stores and collectives before a launch counts as endless
  char* report;
  uint64_t report_size;
};

struct Position {
  uint x, y, z;
};

// Where a thread stands, in Metal's terms.
struct Thread {
  Position in_grid, in_group, group, groups, group_size, grid_size;
  uint index, simd, lane, simds;
};

struct Site {
  const char* file;
  int line;
};

enum Space { Device, Constant, Threadgroup };
enum Kind { Shuffle, Reduce, SimdBarrier, GroupBarrier };

[[noreturn]] void fault(const char* format, ...);
const Thread& self();
Buffer* shared(int id, const char* name, size_t bytes);
void check(Buffer* buffer, Space space, int64_t offset, size_t size, bool store);
void meet(Kind kind, Site site, int flags);
// Leaves this lane's value, waits for the others of the SIMD group and returns the values of all 32.
const unsigned char* exchange(Kind kind, Site site, const void* value, size_t size);
bool lane_exists(uint lane);
float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);
float exp2(float value);
float exp(float value);
float tanh(float value);
float cos(float value);
float sin(float value);
float fma(float a, float b, float c);

constexpr size_t VALUE_SIZE = 16;

int run(Launch* launch, void (*kernel)(Launch*));

}  // namespace msl
