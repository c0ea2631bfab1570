// The part of the Metal standard library and of its language that the kernels use, for a C++ compiler.
// harness.py has replaced pointers with an address space by msl::Ptr, and threadgroup arrays by msl::Shared.
#pragma once
#include "runtime.h"

#define SITE msl::Site site = {__builtin_FILE(), __builtin_LINE()}

namespace msl {

template <typename T, typename U>
constexpr bool same = false;
template <typename T>
constexpr bool same<T, T> = true;
template <typename T>
struct plain_of { typedef T type; };
template <typename T>
struct plain_of<const T> { typedef T type; };

template <typename T, Space S>
T load(Buffer* buffer, int64_t offset) {
  check(buffer, S, offset, sizeof(T), false);
  T value;
  __builtin_memcpy(&value, buffer->data + offset, sizeof(T));
  return value;
}

template <typename T, Space S>
struct Ref {
  Buffer* buffer;
  int64_t offset;
  operator T() const { return load<T, S>(buffer, offset); }
  const Ref& operator=(const T& value) const {
    check(buffer, S, offset, sizeof(T), true);
    __builtin_memcpy(buffer->data + offset, &value, sizeof(T));
    return *this;
  }
  const Ref& operator=(const Ref& other) const { return *this = T(other); }
};

template <typename T, Space S>
struct Ptr {
  typedef typename plain_of<T>::type Plain;
  Buffer* buffer = nullptr;
  int64_t offset = 0;

  Ptr(Buffer* from, int64_t at = 0) : buffer(from), offset(at) {}
  template <typename U>
    requires(same<const U, T> && !same<U, T>)
  Ptr(const Ptr<U, S>& other) : buffer(other.buffer), offset(other.offset) {}
  template <typename U>
    requires(!same<const U, T> && !same<U, T>)
  explicit Ptr(const Ptr<U, S>& other) : buffer(other.buffer), offset(other.offset) {}

  Ptr operator+(int64_t n) const { return Ptr(buffer, offset + n * int64_t(sizeof(T))); }
  Ptr operator-(int64_t n) const { return *this + -n; }
  Ptr& operator+=(int64_t n) { return *this = *this + n; }
  auto operator[](int64_t n) const {
    if constexpr (same<const Plain, T>) {
      return load<Plain, S>(buffer, offset + n * int64_t(sizeof(T)));
    } else {
      return Ref<T, S>{buffer, offset + n * int64_t(sizeof(T))};
    }
  }
  auto operator*() const { return (*this)[0]; }
};

template <typename T, int ID>
struct Shared : Ptr<T, Threadgroup> {
  Shared(const char* name, size_t count) : Ptr<T, Threadgroup>(shared(ID, name, count * sizeof(T))) {}
};

}  // namespace msl

namespace metal {

struct half {
  uint16_t bits;
  half() = default;
  explicit half(float value) : bits(msl::float_to_half(value)) {}
  operator float() const { return msl::half_to_float(bits); }
};

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float value) {
    const uint32_t raw = __builtin_bit_cast(uint32_t, value);
    bits = value != value ? 0x7fc0 : uint16_t((raw + 0x7fff + (raw >> 16 & 1)) >> 16);
  }
  operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
};

typedef half float16_t;
typedef bfloat bfloat16_t;

template <typename T, int N>
struct vec;

template <typename T>
struct vec<T, 3> {
  T x, y, z;
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  explicit vec(T all) : x(all), y(all), z(all), w(all) {}
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  template <typename U>
    requires(!msl::same<T, U>)
  explicit vec(const vec<U, 4>& from) : x(T(from.x)), y(T(from.y)), z(T(from.z)), w(T(from.w)) {}
};

typedef vec<float, 4> float4;
typedef vec<uint, 3> uint3;

inline float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
inline float4 operator-(float4 a, float4 b) { return {a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w}; }
inline float4 operator*(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
inline float4 operator*(float4 a, float b) { return a * float4(b); }
inline float4 operator*(float a, float4 b) { return float4(a) * b; }
inline float4& operator+=(float4& a, float4 b) { return a = a + b; }
inline float4& operator*=(float4& a, float b) { return a = a * b; }

inline float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
inline float fma(float a, float b, float c) { return msl::fma(a, b, c); }
inline float4 fma(float4 a, float4 b, float4 c) {
  return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y), fma(a.z, b.z, c.z), fma(a.w, b.w, c.w)};
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline uint min(uint a, uint b) { return a < b ? a : b; }
inline uint max(uint a, uint b) { return a > b ? a : b; }
// As fmin and fmax: a NaN loses.
inline float min(float a, float b) { return a < b || b != b ? a : b; }
inline float max(float a, float b) { return a > b || b != b ? a : b; }
inline int clamp(int a, int low, int high) { return min(max(a, low), high); }
inline float exp2(float a) { return msl::exp2(a); }
inline float exp(float a) { return msl::exp(a); }
namespace fast {
inline float exp2(float a) { return msl::exp2(a); }
}  // namespace fast
namespace precise {
inline float tanh(float a) { return msl::tanh(a); }
inline float exp2(float a) { return msl::exp2(a); }
inline float cos(float a) { return msl::cos(a); }
inline float sin(float a) { return msl::sin(a); }
}  // namespace precise

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags flags, SITE) { msl::meet(msl::GroupBarrier, site, int(flags)); }
inline void simdgroup_barrier(mem_flags flags, SITE) { msl::meet(msl::SimdBarrier, site, int(flags)); }

template <typename T>
T value_of(const unsigned char* values, uint lane) {
  if (lane >= 32 || !msl::lane_exists(lane)) {
    msl::fault("takes the value of lane %u, which does not exist", lane);
  }
  T value;
  __builtin_memcpy(&value, values + lane * msl::VALUE_SIZE, sizeof(T));
  return value;
}

template <typename T>
T simd_shuffle(T value, ushort lane, SITE) {
  return value_of<T>(msl::exchange(msl::Shuffle, site, &value, sizeof(T)), lane);
}
template <typename T>
T simd_shuffle_xor(T value, ushort mask, SITE) {
  return value_of<T>(msl::exchange(msl::Shuffle, site, &value, sizeof(T)), msl::self().lane ^ mask);
}
// Lanes without a neighbour that far keep their own value.
template <typename T>
T simd_shuffle_down(T value, ushort delta, SITE) {
  const unsigned char* values = msl::exchange(msl::Shuffle, site, &value, sizeof(T));
  return msl::self().lane + delta < 32 ? value_of<T>(values, msl::self().lane + delta) : value;
}
template <typename T>
T simd_shuffle_up(T value, ushort delta, SITE) {
  const unsigned char* values = msl::exchange(msl::Shuffle, site, &value, sizeof(T));
  return msl::self().lane >= delta ? value_of<T>(values, msl::self().lane - delta) : value;
}
template <typename T>
T simd_broadcast(T value, ushort lane, SITE) {
  return value_of<T>(msl::exchange(msl::Shuffle, site, &value, sizeof(T)), lane);
}
template <typename T, typename F>
T reduce(T value, msl::Site site, F join) {
  const unsigned char* values = msl::exchange(msl::Reduce, site, &value, sizeof(T));
  T total = value_of<T>(values, 0);
  for (uint lane = 1; lane < 32; ++lane) {
    if (msl::lane_exists(lane)) {
      total = join(total, value_of<T>(values, lane));
    }
  }
  return total;
}
template <typename T>
T simd_sum(T value, SITE) {
  return reduce(value, site, [](T a, T b) { return a + b; });
}
template <typename T>
T simd_max(T value, SITE) {
  return reduce(value, site, [](T a, T b) { return max(a, b); });
}
template <typename T>
T simd_min(T value, SITE) {
  return reduce(value, site, [](T a, T b) { return min(a, b); });
}
inline bool simd_all(bool value, SITE) {
  return reduce(value, site, [](bool a, bool b) { return a && b; });
}
inline bool simd_any(bool value, SITE) {
  return reduce(value, site, [](bool a, bool b) { return a || b; });
}

inline uint3 triple(msl::Position p) { return {p.x, p.y, p.z}; }

}  // namespace metal

#undef SITE
#define constant
#define thread
