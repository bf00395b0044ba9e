// Declarations only, with Metal's four address spaces as types of their own: for clang -fsyntax-only, which then
// objects to what Apple's compiler would object to, where the headers in ../shim let it pass.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define kernel
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
#if __clang_major__ < 17
typedef half bfloat;  // its __bf16 cannot be computed with; that no float becomes one silently is seen when it runs
#else
typedef __bf16 bfloat;
#endif
typedef half float16_t;
typedef bfloat bfloat16_t;
inline half operator"" h(long double x) { return half(x); }

namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
}
template <class V, class... A> V msl_make(A...);
#define MSL_VECTORS(t) typedef metal::vec<t, 2> t##2; typedef metal::vec<t, 3> t##3; typedef metal::vec<t, 4> t##4;
#if __clang_major__ >= 15  // before that there are no vectors of bool
MSL_VECTORS(bool)
#endif
MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(short) MSL_VECTORS(ushort) MSL_VECTORS(int)
MSL_VECTORS(uint) MSL_VECTORS(long) MSL_VECTORS(ulong) MSL_VECTORS(half) MSL_VECTORS(float)
#define float2(...) msl_make<float2>(__VA_ARGS__)
#define float3(...) msl_make<float3>(__VA_ARGS__)
#define float4(...) msl_make<float4>(__VA_ARGS__)
#define half2(...) msl_make<half2>(__VA_ARGS__)
#define half4(...) msl_make<half4>(__VA_ARGS__)
#define int2(...) msl_make<int2>(__VA_ARGS__)
#define int4(...) msl_make<int4>(__VA_ARGS__)
#define uint2(...) msl_make<uint2>(__VA_ARGS__)
#define uint3(...) msl_make<uint3>(__VA_ARGS__)
#define uint4(...) msl_make<uint4>(__VA_ARGS__)

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define FLT_MAX __FLT_MAX__

template <class To, class From> To as_type(From);

namespace metal {
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <class A, class B> struct is_same { static constexpr bool value = __is_same(A, B); };
template <class A, class B> constexpr bool is_same_v = __is_same(A, B);
template <bool B, class X, class Y> struct conditional { typedef X type; };
template <class X, class Y> struct conditional<false, X, Y> { typedef Y type; };
template <bool B, class X, class Y> using conditional_t = typename conditional<B, X, Y>::type;
template <class T> struct numeric_limits {
  static constexpr T max(), min(), lowest(), infinity(), quiet_NaN(), epsilon();
};

template <class T> struct msl_real { static constexpr bool value = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>; };
template <class T, int N> struct msl_real<T __attribute__((ext_vector_type(N)))> : msl_real<T> {};
template <class T> using msl_if_real = enable_if_t<msl_real<T>::value, T>;
#define MSL_1(f) template <class T> msl_if_real<T> f(T);
#define MSL_2(f) template <class T> msl_if_real<T> f(T, T);
MSL_1(exp) MSL_1(exp2) MSL_1(exp10) MSL_1(log) MSL_1(log2) MSL_1(log10) MSL_1(sin) MSL_1(cos) MSL_1(tan) MSL_1(sinh) MSL_1(cosh) MSL_1(tanh)
MSL_1(asin) MSL_1(acos) MSL_1(atan) MSL_1(sqrt) MSL_1(rsqrt) MSL_1(floor) MSL_1(ceil) MSL_1(round) MSL_1(rint) MSL_1(trunc) MSL_1(fract)
MSL_1(fabs) MSL_1(saturate) MSL_1(sign) MSL_1(sinpi) MSL_1(cospi)
MSL_2(pow) MSL_2(powr) MSL_2(fmod) MSL_2(atan2) MSL_2(fmax) MSL_2(fmin) MSL_2(copysign) MSL_2(step)
template <class T> T abs(T);
template <class T> T max(T, T);
template <class T> T min(T, T);
template <class T> T max3(T, T, T);
template <class T> T min3(T, T, T);
template <class T> T clamp(T, T, T);
template <class T> T mix(T, T, T);
template <class T> msl_if_real<T> fma(T, T, T);
template <class T, class B> T select(T, T, B);
template <class T> bool isnan(T);
template <class T> bool isinf(T);
template <class T> bool isfinite(T);
template <class T, int N> T dot(vec<T, N>, vec<T, N>);
template <class T, int N> T length(vec<T, N>);
template <class V> bool all(V);
template <class V> bool any(V);
template <class T> T popcount(T);
template <class T> T clz(T);
template <class T> T ctz(T);
template <class T> T rotate(T, T);
template <class T> T mulhi(T, T);
template <class T> T extract_bits(T, uint, uint);
namespace precise { using namespace metal; }
namespace fast { using namespace metal; }

#define MSL_SIMD(f) template <class T> T f(T);
MSL_SIMD(simd_sum) MSL_SIMD(simd_product) MSL_SIMD(simd_max) MSL_SIMD(simd_min) MSL_SIMD(simd_and) MSL_SIMD(simd_or) MSL_SIMD(simd_xor)
MSL_SIMD(simd_broadcast_first) MSL_SIMD(simd_prefix_inclusive_sum) MSL_SIMD(simd_prefix_exclusive_sum)
#define MSL_SHUFFLE(f) template <class T> T f(T, ushort);
MSL_SHUFFLE(simd_shuffle) MSL_SHUFFLE(simd_broadcast) MSL_SHUFFLE(simd_shuffle_xor) MSL_SHUFFLE(simd_shuffle_up) MSL_SHUFFLE(simd_shuffle_down)
template <class T> T simd_shuffle_and_fill_up(T, T, ushort);
template <class T> T simd_shuffle_and_fill_down(T, T, ushort);
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
struct simd_vote { explicit operator ulong() const; bool all() const; bool any() const; };
simd_vote simd_ballot(bool);

template <class T, int R, int C> struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
template <class T, int R, int C> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
#define MSL_MATRIX(space)                                                                                                        \
  template <class T> void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong2 = 0, bool = false);        \
  template <class T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, ulong2 = 0, bool = false);
MSL_MATRIX(device) MSL_MATRIX(threadgroup)
template <class D, class A, class B, class C> void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B> void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);

enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T v; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
template <class T> struct msl_same { typedef T type; };
#define MSL_ATOMIC(space, f) template <class T> T atomic_##f##_explicit(volatile space atomic<T>*, typename msl_same<T>::type, memory_order);
#define MSL_ATOMICS(space)                                                                                                       \
  MSL_ATOMIC(space, fetch_add) MSL_ATOMIC(space, fetch_sub) MSL_ATOMIC(space, fetch_max) MSL_ATOMIC(space, fetch_min)             \
  MSL_ATOMIC(space, fetch_or) MSL_ATOMIC(space, fetch_and) MSL_ATOMIC(space, fetch_xor) MSL_ATOMIC(space, exchange)               \
  template <class T> T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                                      \
  template <class T> void atomic_store_explicit(volatile space atomic<T>*, typename msl_same<T>::type, memory_order);            \
  template <class T> bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, T*, typename msl_same<T>::type, memory_order, memory_order);
MSL_ATOMICS(device) MSL_ATOMICS(threadgroup)
}  // namespace metal
using namespace metal;

template <class T> struct Limits { static constexpr T max = T(1), min = T(1), finite_max = T(1), finite_min = T(1); };
template <class T, class U> T ceildiv(T, U);
template <class I = int64_t> I elem_to_loc(I, constant const int*, constant const int64_t*, int);
#pragma GCC poison double std virtual new delete goto throw try catch typeid dynamic_cast thread_local register asm printf malloc memcpy
// Words that mean something to Metal, which C++ would take as names.
#pragma GCC poison vertex fragment sampler visible stage_in texture1d texture2d texture3d depth2d ray_data object_data mesh imageblock half3x3 float3x3
