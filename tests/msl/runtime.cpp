// Runs a kernel's threads as fibers of one CPU thread, in a seeded random order, and watches what they do.
//
// A fiber gives up the processor only where it must wait: at a SIMD collective until the other lanes of its SIMD group
// have come to the same one, at a barrier until the other threads of its group have. Threadgroups run one after
// another in random order. The first fault ends the launch and is the report.
#include "runtime.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#if !defined(__x86_64__) && !(defined(__aarch64__) && defined(__clang__))
#include <ucontext.h>
#define MSL_UCONTEXT
#endif

namespace msl {
namespace {

struct Fault {};

enum State { Ready, Waiting, Done };

constexpr size_t STACK = 128 * 1024;
constexpr size_t SHARED_LIMIT = 32 * 1024;
constexpr uint32_t MANY = 0xffffffff;
constexpr int THREADGROUP_FLAG = 2;

struct Fiber {
  Thread where;
  State state;
  Kind kind;
  Site site;
  int flags;
  uint turn;  // collectives passed so far: values of odd and even ones lie apart, so that none is overwritten unread
#ifdef MSL_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer;
#endif
};

// When a thread touched a byte of threadgroup memory: which thread, after how many barriers.
struct Touch {
  uint32_t thread;  // plus one; MANY for several
  uint32_t group_epoch;
  uint32_t simd_epoch;
};

struct Cell {
  bool set;
  Touch store, load;
};

struct Block {
  bool used;
  size_t start;
  Buffer buffer;
};

struct Simd {
  uint live, waiting;
  uint32_t epoch;
  std::vector<unsigned char> values;
};

struct World {
  Launch* launch;
  void (*kernel)(Launch*);
  uint64_t random;
  uint64_t spent;
  bool failed;
  std::vector<Fiber> fibers;
  std::vector<Simd> simds;
  std::unique_ptr<char[]> stacks;
  size_t stack_count = 0;
  Fiber* current;
  uint waiting_at_barrier;
  uint32_t group_epoch;
  uint32_t first_thread;  // global number of the group's first thread
  std::vector<uint> ready;
  unsigned char* memory;
  size_t memory_used;
  std::vector<Cell> cells;
  std::vector<Block> blocks;
#ifdef MSL_UCONTEXT
  ucontext_t home;
#else
  void* home;
#endif
};

World world;

uint64_t next_random() {
  world.random ^= world.random << 13;
  world.random ^= world.random >> 7;
  world.random ^= world.random << 17;
  return world.random;
}

void report(const char* text) {
  if (!world.failed) {
    world.failed = true;
    snprintf(world.launch->report, world.launch->report_size, "%s", text);
  }
}

#if defined(__x86_64__)
__attribute__((naked, noinline)) void switch_stack(void** /*save*/, void* /*load*/) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}
constexpr size_t SAVED_WORDS = 6, RETURN_WORD = 6;
#elif !defined(MSL_UCONTEXT)
__attribute__((naked, noinline)) void switch_stack(void** /*save*/, void* /*load*/) {
  asm("sub sp, sp, #160\n"
      "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
      "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n"
      "stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
      "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
      "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
      "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n"
      "ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
      "add sp, sp, #160\n ret\n");
}
constexpr size_t SAVED_WORDS = 20, RETURN_WORD = 11;
#endif

void leave() {
  Fiber* fiber = world.current;
#ifdef MSL_UCONTEXT
  swapcontext(&fiber->context, &world.home);
#else
  switch_stack(&fiber->stack_pointer, world.home);
#endif
}

void enter(Fiber& fiber) {
  world.current = &fiber;
#ifdef MSL_UCONTEXT
  swapcontext(&world.home, &fiber.context);
#else
  switch_stack(&world.home, fiber.stack_pointer);
#endif
}

void body() {
  try {
    world.kernel(world.launch);
  } catch (const Fault&) {
  }
  world.current->state = Done;
  leave();
  abort();
}

void prepare(Fiber& fiber, char* stack) {
#ifdef MSL_UCONTEXT
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = STACK;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, body, 0);
#else
  // As switch_stack leaves it: saved registers, then the address to return to; x86 wants the stack 8 off 16 there.
  void** top = reinterpret_cast<void**>(stack + STACK - 64) - SAVED_WORDS - 2;
  memset(top, 0, (SAVED_WORDS + 2) * sizeof(void*));
  top[RETURN_WORD] = reinterpret_cast<void*>(&body);
  fiber.stack_pointer = top;
#endif
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Shuffle: return "a SIMD shuffle";
    case Reduce: return "a SIMD reduction";
    case SimdBarrier: return "simdgroup_barrier";
    default: return "threadgroup_barrier";
  }
}

bool same_place(const Fiber& a, const Fiber& b) {
  return a.kind == b.kind && a.site.line == b.site.line && strcmp(a.site.file, b.site.file) == 0;
}

// What a thread waits for, and where one stands that will never come.
void report_divergence() {
  const Fiber* waits = nullptr;
  const Fiber* absent = nullptr;
  for (const Fiber& fiber : world.fibers) {
    if (fiber.state == Waiting && !waits) {
      waits = &fiber;
    }
  }
  for (const Fiber& fiber : world.fibers) {
    const bool due = waits->kind == GroupBarrier || fiber.where.simd == waits->where.simd;
    if (due && (fiber.state == Done || !same_place(fiber, *waits))) {
      absent = &fiber;
    }
  }
  char text[512];
  snprintf(
      text, sizeof text, "divergence: thread %u waits at %s (%s:%d), but thread %u %s", waits->where.index,
      name_of(waits->kind), waits->site.file, waits->site.line, absent ? absent->where.index : 0,
      !absent ? "does not" : absent->state == Done ? "has ended" : "waits elsewhere");
  report(text);
}

// Everybody that a waiting thread waits for has come to some stop: let them pass if it is the same one.
void pass(uint first, uint last) {
  const Fiber& one = world.fibers[first];
  for (uint i = first; i < last; ++i) {
    if (world.fibers[i].state != Waiting || !same_place(world.fibers[i], one)) {
      return;
    }
  }
  if (one.kind == GroupBarrier) {
    world.group_epoch += one.flags & THREADGROUP_FLAG ? 1 : 0;
  } else if (one.kind == SimdBarrier) {
    world.simds[one.where.simd].epoch += one.flags & THREADGROUP_FLAG ? 1 : 0;
  }
  for (uint i = first; i < last; ++i) {
    world.fibers[i].state = Ready;
    ++world.fibers[i].turn;
    world.ready.push_back(i);
  }
}

void wait() {
  Fiber& fiber = *world.current;
  fiber.state = Waiting;
  const uint size = uint(world.fibers.size());
  if (fiber.kind == GroupBarrier) {
    if (++world.waiting_at_barrier == size) {
      world.waiting_at_barrier = 0;
      pass(0, size);
    }
  } else {
    Simd& simd = world.simds[fiber.where.simd];
    const uint first = fiber.where.simd * 32;
    if (++simd.waiting == simd.live) {
      simd.waiting = 0;
      pass(first, first + simd.live);
    }
  }
  leave();
  if (world.failed) {
    throw Fault();
  }
}

void spend() {
  if (++world.spent > world.launch->budget) {
    fault("does not end");
  }
}

void check_device(Buffer* buffer, int64_t offset, size_t size, bool store) {
  const uint32_t me = world.first_thread + world.current->where.index + 1;
  for (size_t i = offset / 2; i < (offset + size) / 2; ++i) {
    if (buffer->writers[i] && buffer->writers[i] != me) {
      fault("%s byte %zu of %s, which another thread wrote", store ? "writes" : "reads", i * 2, buffer->name);
    }
    if (store) {
      if (buffer->readers[i] && buffer->readers[i] != me) {
        fault("writes byte %zu of %s, which another thread read", i * 2, buffer->name);
      }
      buffer->writers[i] = me;
    } else {
      buffer->readers[i] = !buffer->readers[i] || buffer->readers[i] == me ? me : MANY;
    }
  }
  for (size_t i = offset; i < offset + size; ++i) {
    if (store) {
      buffer->valid[i] = 1;
    } else if (!buffer->valid[i]) {
      fault("reads byte %zu of %s, which is not set or not its own", i, buffer->name);
    }
  }
}

bool concurrent(const Touch& touch, uint32_t me) {
  if (!touch.thread || touch.thread == me || touch.group_epoch != world.group_epoch) {
    return false;
  }
  const uint simd = world.current->where.simd;
  const bool fellow = touch.thread != MANY && (touch.thread - 1) / 32 == simd;
  return !(fellow && touch.simd_epoch != world.simds[simd].epoch);
}

void check_shared(Buffer* buffer, int64_t offset, size_t size, bool store) {
  const uint32_t me = world.current->where.index + 1;
  const Touch now = {me, world.group_epoch, world.simds[world.current->where.simd].epoch};
  const size_t start = size_t(buffer->data - world.memory) + offset;
  for (size_t i = start; i < start + size; ++i) {
    Cell& cell = world.cells[i];
    if (!store && !cell.set) {
      fault("reads byte %zu of threadgroup memory %s, which is not set", i - start + offset, buffer->name);
    }
    if (concurrent(cell.store, me) || (store && concurrent(cell.load, me))) {
      fault("%s byte %zu of threadgroup memory %s in a race with a thread that %s it", store ? "writes" : "reads",
            i - start + offset, buffer->name, concurrent(cell.store, me) ? "writes" : "reads");
    }
    if (store) {
      cell.set = true;
      cell.store = now;
    } else {
      const bool other = cell.load.thread && cell.load.thread != me && cell.load.group_epoch == now.group_epoch;
      cell.load = now;
      cell.load.thread = other ? MANY : me;
    }
  }
}

void place(Fiber& fiber, uint index, const Position& group, const Position& size) {
  const Launch& launch = *world.launch;
  Thread& at = fiber.where;
  at.index = index;
  at.simd = index / 32;
  at.lane = index % 32;
  at.group = group;
  at.group_size = size;
  at.in_group = {index % size.x, index / size.x % size.y, index / size.x / size.y};
  at.in_grid = {
      group.x * launch.group[0] + at.in_group.x, group.y * launch.group[1] + at.in_group.y,
      group.z * launch.group[2] + at.in_group.z};
  at.grid_size = {launch.grid[0], launch.grid[1], launch.grid[2]};
  at.simds = (size.x * size.y * size.z + 31) / 32;
}

void run_group(const Position& group, const Position& groups) {
  const Launch& launch = *world.launch;
  const uint starts[3] = {group.x * launch.group[0], group.y * launch.group[1], group.z * launch.group[2]};
  uint sizes[3];
  for (int i = 0; i < 3; ++i) {
    const uint left = launch.grid[i] - starts[i];
    sizes[i] = left < launch.group[i] ? left : launch.group[i];
  }
  const uint count = sizes[0] * sizes[1] * sizes[2];
  world.fibers.assign(count, Fiber());
  world.simds.assign((count + 31) / 32, Simd());
  world.waiting_at_barrier = 0;
  world.group_epoch = 0;
  world.memory_used = 0;
  world.blocks.clear();
  world.blocks.resize(64);
  world.cells.assign(SHARED_LIMIT, Cell());
  memset(world.memory, 0xff, SHARED_LIMIT);  // NaN in every type
  world.ready.clear();
  for (uint i = 0; i < count; ++i) {
    place(world.fibers[i], i, group, {sizes[0], sizes[1], sizes[2]});
    world.fibers[i].where.groups = groups;
    prepare(world.fibers[i], world.stacks.get() + i * STACK);
    world.fibers[i].state = Ready;
    world.ready.push_back(i);
  }
  for (uint i = 0; i < world.simds.size(); ++i) {
    world.simds[i].live = count - i * 32 < 32 ? count - i * 32 : 32;
    world.simds[i].values.resize(2 * 32 * VALUE_SIZE);
  }
  while (!world.ready.empty() && !world.failed) {
    const size_t pick = next_random() % world.ready.size();
    const uint index = world.ready[pick];
    world.ready[pick] = world.ready.back();
    world.ready.pop_back();
    enter(world.fibers[index]);
  }
  for (const Fiber& fiber : world.fibers) {
    if (fiber.state != Done && !world.failed) {
      report_divergence();
    }
  }
}

}  // namespace

void fault(const char* format, ...) {
  char what[384], text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  const Thread& at = self();
  snprintf(
      text, sizeof text, "thread %u of group (%u, %u, %u) %s", at.index, at.group.x, at.group.y, at.group.z, what);
  report(text);
  throw Fault();
}

const Thread& self() { return world.current->where; }

bool lane_exists(uint lane) { return lane < world.simds[self().simd].live; }

Buffer* shared(int id, const char* name, size_t bytes) {
  Block& block = world.blocks[id];
  if (!block.used) {
    world.memory_used = (world.memory_used + 15) / 16 * 16;
    block.used = true;
    block.start = world.memory_used;
    world.memory_used += bytes;
    block.buffer = {name, world.memory + block.start, bytes, nullptr, 0, nullptr, nullptr};
    if (world.memory_used > SHARED_LIMIT) {
      fault("takes %zu bytes of threadgroup memory", world.memory_used);
    }
  }
  return &block.buffer;
}

void check(Buffer* buffer, Space space, int64_t offset, size_t size, bool store) {
  spend();
  if (offset < 0 || uint64_t(offset) + size > buffer->bytes) {
    fault("%s %zu bytes at %lld of %s, which has %llu: out of bounds", store ? "writes" : "reads", size,
          (long long)offset, buffer->name, (unsigned long long)buffer->bytes);
  }
  if (offset % int64_t(size) != 0) {
    fault("%s %zu bytes at %lld of %s: misaligned", store ? "writes" : "reads", size, (long long)offset, buffer->name);
  }
  if (space == Threadgroup) {
    check_shared(buffer, offset, size, store);
  } else {
    check_device(buffer, offset, size, store);
    buffer->loaded += store ? 0 : size;
  }
}

void meet(Kind kind, Site site, int flags) {
  spend();
  Fiber& fiber = *world.current;
  fiber.kind = kind;
  fiber.site = site;
  fiber.flags = flags;
  wait();
}

const unsigned char* exchange(Kind kind, Site site, const void* value, size_t size) {
  static_assert(VALUE_SIZE >= 16);
  Fiber& fiber = *world.current;
  unsigned char* values = world.simds[fiber.where.simd].values.data() + fiber.turn % 2 * 32 * VALUE_SIZE;
  memcpy(values + fiber.where.lane * VALUE_SIZE, value, size);
  meet(kind, site, 0);
  return values;
}

float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16;
  const int exponent = bits >> 10 & 31;
  const uint32_t fraction = bits & 1023;
  if (exponent == 0) {
    const float value = std::ldexp(float(fraction), -24);
    return sign ? -value : value;
  }
  const uint32_t raw = sign | uint32_t(exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  float value;
  memcpy(&value, &raw, 4);
  return value;
}

uint16_t float_to_half(float value) {
  uint32_t raw;
  memcpy(&raw, &value, 4);
  const uint16_t sign = uint16_t(raw >> 16 & 0x8000);
  const float size = std::fabs(value);
  if (size != size) {
    return sign | 0x7e00;
  }
  if (size >= 65520.0f) {
    return sign | 0x7c00;
  }
  if (size < 6.103515625e-05f) {
    return sign | uint16_t(std::nearbyint(std::ldexp(size, 24)));
  }
  const uint32_t magnitude = raw & 0x7fffffff;
  return sign | uint16_t((magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

float exp2(float value) { return std::exp2(value); }
float exp(float value) { return std::exp(value); }
float tanh(float value) { return std::tanh(value); }
float cos(float value) { return std::cos(value); }
float sin(float value) { return std::sin(value); }
float fma(float a, float b, float c) { return std::fma(a, b, c); }

int run(Launch* launch, void (*kernel)(Launch*)) {
  world.launch = launch;
  world.kernel = kernel;
  world.random = launch->seed * 0x9e3779b97f4a7c15ull + 0x853c49e6748fea9bull;
  world.spent = 0;
  world.failed = false;
  const size_t most = size_t(launch->group[0]) * launch->group[1] * launch->group[2];
  if (most > 1024) {
    report("more than 1024 threads in a threadgroup");
    return 1;
  }
  if (most > world.stack_count) {
    world.stacks.reset(new char[most * STACK + 64]);
    world.stack_count = most;
  }
  alignas(16) static unsigned char memory[SHARED_LIMIT];
  world.memory = memory;

  const Position groups = {
      (launch->grid[0] + launch->group[0] - 1) / launch->group[0],
      (launch->grid[1] + launch->group[1] - 1) / launch->group[1],
      (launch->grid[2] + launch->group[2] - 1) / launch->group[2]};
  std::vector<uint32_t> sequence(size_t(groups.x) * groups.y * groups.z);
  for (size_t i = 0; i < sequence.size(); ++i) {
    sequence[i] = uint32_t(i);
  }
  for (size_t i = sequence.size(); i > 1; --i) {
    std::swap(sequence[i - 1], sequence[next_random() % i]);
  }
  for (uint32_t i : sequence) {
    world.first_thread = i * uint32_t(most);
    run_group({i % groups.x, i / groups.x % groups.y, i / groups.x / groups.y}, groups);
    if (world.failed) {
      return 1;
    }
  }
  return 0;
}

}  // namespace msl

// The compiler's check of indices into a thread's own arrays ends here.
extern "C" void __ubsan_handle_out_of_bounds(void*, void*) { msl::fault("indexes its own array out of bounds"); }
extern "C" void __ubsan_handle_out_of_bounds_abort(void*, void*) { msl::fault("indexes its own array out of bounds"); }
