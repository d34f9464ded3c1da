// What every generated unit starts with.  No #include: one standard header costs more than all kernels of a graph.
// Vectors have 16 lanes whatever the element: vf float, vi int, and as pairs of halves vd double, vl long.
// A mask is a vi of 0 and -1.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;
struct bf16 { u16 bits; };
struct f16 { u16 bits; };
#define AI static inline __attribute__((always_inline, unused))
#define VEC(T, N, BYTES) typedef T N __attribute__((vector_size(BYTES)))
#define RAW(T, N, BYTES, ALIGN) typedef T N __attribute__((vector_size(BYTES), aligned(ALIGN), may_alias))
VEC(float, vf, 64); VEC(int, vi, 64); VEC(u32, vu, 64); VEC(double, vd8, 64); VEC(long, vl8, 64); VEC(u64, vul8, 64);
VEC(float, vf8, 32); VEC(int, vi8, 32); VEC(u16, vh, 32); VEC(short, vs, 32); VEC(signed char, vc, 16); VEC(unsigned char, vb, 16);
RAW(float, rawf, 64, 4); RAW(double, rawd, 64, 8); RAW(long, rawl, 64, 8); RAW(int, rawi, 64, 4);
RAW(u16, rawh, 32, 2); RAW(short, raws, 32, 2); RAW(signed char, rawc, 16, 1); RAW(unsigned char, rawb, 16, 1);
#define INF __builtin_inff()
#define QNAN __builtin_nanf("")
#define LANES (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define LONG_LANES (vl{{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}})
#if defined(__AVX512F__)
#define FULL ((u16)-1)
#endif

AI long imin(long a, long b) { return a < b ? a : b; }
AI int near(long a) { return a < -1 ? -1 : a > 16 ? 16 : a; }  // among lane numbers, all that matters of a
AI long imax(long a, long b) { return a > b ? a : b; }

// Two halves of eight lanes: compilers keep these in registers, and vectors of 128 bytes in memory.
template <class H, class T> struct two;
typedef two<vd8, double> vd;
typedef two<vl8, long> vl;
#define FRIEND friend inline __attribute__((always_inline))
#define BOTH(R, op) \
  FRIEND R operator op(two a, two b) { return {a.lo op b.lo, a.hi op b.hi}; } \
  FRIEND R operator op(two a, T b) { return {a.lo op b, a.hi op b}; } \
  FRIEND R operator op(T a, two b) { return {a op b.lo, a op b.hi}; }
template <class H, class T> struct two {
  H lo, hi;
  T operator[](int l) const { return l < 8 ? lo[l] : hi[l - 8]; }
  FRIEND two operator-(two a) { return {-a.lo, -a.hi}; }
  FRIEND two& operator+=(two& a, two b) { return a = a + b; }
  BOTH(two, +) BOTH(two, -) BOTH(two, *) BOTH(two, /)
  BOTH(vl, <) BOTH(vl, <=) BOTH(vl, >) BOTH(vl, >=) BOTH(vl, ==) BOTH(vl, !=)
};
#define BITS(op) \
  AI vl operator op(vl a, vl b) { return {a.lo op b.lo, a.hi op b.hi}; } \
  AI vl operator op(vl a, long b) { return {a.lo op b, a.hi op b}; } \
  AI vl operator op(long a, vl b) { return {a op b.lo, a op b.hi}; }
BITS(&) BITS(|) BITS(^) BITS(<<) BITS(>>)
AI vl operator~(vl a) { return {~a.lo, ~a.hi}; }
#define LOWER8(v) __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7)
#define UPPER8(v) __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)
#define JOIN8(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
// From 16 lanes of one type to another with halves of different size.
#define SPREAD(V, H, v) V{__builtin_convertvector(LOWER8(v), H), __builtin_convertvector(UPPER8(v), H)}
#define GATHER8(H, v) JOIN8(__builtin_convertvector((v).lo, H), __builtin_convertvector((v).hi, H))
#define HALVES(V, H, v) V{__builtin_convertvector((v).lo, H), __builtin_convertvector((v).hi, H)}

// One number in all lanes.
AI vf splat(float s) { return s - (vf){}; }
AI vd splat(double s) { return {s - (vd8){}, s - (vd8){}}; }
AI vl splat(long s) { return {s - (vl8){}, s - (vl8){}}; }
AI vi splat(bool s) { return -(int)s - (vi){}; }

// Masks and choice.
AI vi narrow(vl m) { return GATHER8(vi8, m); }
AI vl widen(vi m) { return SPREAD(vl, vl8, m); }
AI vf select(vi m, vf a, vf b) { return m ? a : b; }
AI vi select(vi m, vi a, vi b) { return m ? a : b; }
template <class H, class T> AI two<H, T> select(vl m, two<H, T> a, two<H, T> b) {
  return {m.lo ? a.lo : b.lo, m.hi ? a.hi : b.hi};
}
template <class H, class T> AI two<H, T> select(vi m, two<H, T> a, two<H, T> b) { return select(widen(m), a, b); }
template <class T> AI T select(bool m, T a, T b) { return m ? a : b; }
AI vi first(int m) { return LANES < m; }
#if defined(__AVX512F__)
AI bool some(vi m) { return __builtin_ia32_ptestmd512(m, m, FULL) != 0; }
#else
AI bool some(vi m) { int r = 0; for (int l = 0; l < 16; l++) r |= m[l]; return r != 0; }
#endif

// Conversions between compute types, as C does them.
AI vf to_f32(vf a) { return a; }
AI vf to_f32(vd a) { return GATHER8(vf8, a); }
AI vf to_f32(vl a) { return GATHER8(vf8, a); }
AI vf to_f32(vi a) { return __builtin_convertvector(-a, vf); }
AI vd to_f64(vf a) { return SPREAD(vd, vd8, a); }
AI vd to_f64(vd a) { return a; }
AI vd to_f64(vl a) { return HALVES(vd, vd8, a); }
AI vd to_f64(vi a) { return SPREAD(vd, vd8, -a); }
AI vl to_i64(vf a) { return SPREAD(vl, vl8, a); }
AI vl to_i64(vd a) { return HALVES(vl, vl8, a); }
AI vl to_i64(vl a) { return a; }
AI vl to_i64(vi a) { return widen(-a); }
AI vi to_b1(vf a) { return a != 0.f; }
AI vi to_b1(vd a) { return narrow(a != 0.); }
AI vi to_b1(vl a) { return narrow(a != 0); }
AI vi to_b1(vi a) { return a; }

// Sixteen-bit floats: round to nearest even, NaN stays NaN.
AI float bits_float(u32 i) { float f; __builtin_memcpy(&f, &i, 4); return f; }
AI u32 float_bits(float f) { u32 i; __builtin_memcpy(&i, &f, 4); return i; }
AI vf from_bf16(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }
AI float from_bf16(bf16 h) { return bits_float((u32)h.bits << 16); }
AI vu bf16_bits(vf v) {
  vu u = (vu)v;
  return v != v ? (vu){} + 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
AI vh to_bf16(vf v) { return __builtin_convertvector(bf16_bits(v), vh); }
AI bf16 to_bf16(float v) {
  u32 u = float_bits(v);
  return bf16{(u16)(v != v ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
#if defined(__AVX512F__)
AI vf from_f16(vh h) { return (vf)__builtin_ia32_vcvtph2ps512_mask((vs)h, (vf){}, FULL, 4); }
AI vh to_f16(vf v) { return (vh)__builtin_ia32_vcvtps2ph512_mask(v, 0, (vs){}, FULL); }
AI float from_f16(f16 h) { return from_f16(vh{h.bits})[0]; }
AI f16 to_f16(float v) { return f16{to_f16(splat(v))[0]}; }
#else
// Without _Float16 in the language: scale so that the float unit does the rounding, subnormals included.
AI float from_f16(f16 h) {
  u32 m = h.bits & 0x7fff, s = (u32)(h.bits & 0x8000) << 16;
  float f = m >= 0x7c00 ? bits_float(0x7f800000 | (m & 0x3ff) << 13) : bits_float(m << 13) * 0x1p112f;
  return bits_float(float_bits(f) | s);
}
AI f16 to_f16(float v) {
  u32 u = float_bits(v), s = (u >> 16) & 0x8000, a = u & 0x7fffffff, r;
  if (a > 0x7f800000) r = 0x7e00;
  else if (a >= 0x477ff000) r = 0x7c00;
  else if (a < 0x38800000) r = float_bits(bits_float(a) + 0.5f) - 0x3f000000;
  else r = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  return f16{(u16)(s | r)};
}
AI vf from_f16(vh h) { vf r; for (int l = 0; l < 16; l++) r[l] = from_f16(f16{h[l]}); return r; }
AI vh to_f16(vf v) { vh r; for (int l = 0; l < 16; l++) r[l] = to_f16(v[l]).bits; return r; }
#endif

// Loads and stores of one element, widened to the compute type.
AI float get(const float* p) { return *p; }
AI float get(const bf16* p) { return from_bf16(*p); }
AI float get(const f16* p) { return from_f16(*p); }
AI double get(const double* p) { return *p; }
AI long get(const long* p) { return *p; }
AI long get(const int* p) { return *p; }
AI long get(const short* p) { return *p; }
AI long get(const signed char* p) { return *p; }
AI long get(const unsigned char* p) { return *p; }
AI bool get(const bool* p) { return *p; }
AI void put(float* p, float v) { *p = v; }
AI void put(bf16* p, float v) { *p = to_bf16(v); }
AI void put(f16* p, float v) { *p = to_f16(v); }
AI void put(double* p, double v) { *p = v; }
AI void put(long* p, long v) { *p = v; }
AI void put(int* p, long v) { *p = (int)v; }
AI void put(short* p, long v) { *p = (short)v; }
AI void put(signed char* p, long v) { *p = (signed char)v; }
AI void put(unsigned char* p, long v) { *p = (unsigned char)v; }
AI void put(bool* p, bool v) { *p = v; }

// Sixteen neighbours.
AI vf load(const float* p) { return *(const rawf*)p; }
AI vf load(const bf16* p) { return from_bf16(*(const rawh*)p); }
AI vf load(const f16* p) { return from_f16(*(const rawh*)p); }
AI vd load(const double* p) { return {*(const rawd*)p, *(const rawd*)(p + 8)}; }
AI vl load(const long* p) { return {*(const rawl*)p, *(const rawl*)(p + 8)}; }
AI vl load(const int* p) { return widen(*(const rawi*)p); }
AI vl load(const short* p) { return widen(__builtin_convertvector(*(const raws*)p, vi)); }
// By way of 16 bits: a compiler that is asked to widen fourfold goes lane by lane.
AI vi bytes(const signed char* p) { return __builtin_convertvector(__builtin_convertvector(*(const rawc*)p, vs), vi); }
AI vi bytes(const unsigned char* p) { return __builtin_convertvector(__builtin_convertvector(*(const rawb*)p, vs), vi); }
AI vl load(const signed char* p) { return widen(bytes(p)); }
AI vl load(const unsigned char* p) { return widen(bytes(p)); }
AI vi load(const bool* p) { return bytes((const unsigned char*)p) != 0; }
AI void store(float* p, vf v) { *(rawf*)p = v; }
AI void store(bf16* p, vf v) { *(rawh*)p = to_bf16(v); }
struct rounded { vf v; };  // to numbers of bf16 already
AI vh to_bf16(rounded r) { return __builtin_convertvector((vu)r.v >> 16, vh); }
AI void store(bf16* p, rounded r) { *(rawh*)p = to_bf16(r); }
AI void store(f16* p, vf v) { *(rawh*)p = to_f16(v); }
AI void store(double* p, vd v) { *(rawd*)p = v.lo; *(rawd*)(p + 8) = v.hi; }
AI void store(long* p, vl v) { *(rawl*)p = v.lo; *(rawl*)(p + 8) = v.hi; }
AI void store(int* p, vl v) { *(rawi*)p = narrow(v); }
AI void store(short* p, vl v) { *(raws*)p = __builtin_convertvector(narrow(v), vs); }
AI void store(signed char* p, vl v) { *(rawc*)p = __builtin_convertvector(narrow(v), vc); }
AI void store(unsigned char* p, vl v) { *(rawb*)p = __builtin_convertvector(narrow(v), vb); }
AI void store(bool* p, vi v) { *(rawb*)p = __builtin_convertvector(-v, vb); }

// The first m of sixteen: the rest of memory is neither read nor written.
template <class T> AI auto load(const T* p, int m) { T t[16] = {}; __builtin_memcpy(t, p, m * sizeof(T)); return load(t); }
template <class T, class V> AI void store(T* p, V v, int m) { T t[16]; store(t, v); __builtin_memcpy(p, t, m * sizeof(T)); }
#if defined(__AVX512F__)
AI u16 low(int m) { return (u16)((1u << m) - 1); }
AI vf load(const float* p, int m) { return (vf)__builtin_ia32_loadups512_mask(p, (vf){}, low(m)); }
AI void store(float* p, vf v, int m) { __builtin_ia32_storeups512_mask(p, v, low(m)); }
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__)
AI vf load(const bf16* p, int m) { return from_bf16((vh)__builtin_ia32_loaddquhi256_mask((const short*)p, (vs){}, low(m))); }
AI vf load(const f16* p, int m) { return from_f16((vh)__builtin_ia32_loaddquhi256_mask((const short*)p, (vs){}, low(m))); }
AI void store(bf16* p, vf v, int m) { __builtin_ia32_storedquhi256_mask((short*)p, (vs)to_bf16(v), low(m)); }
AI void store(bf16* p, rounded r, int m) { __builtin_ia32_storedquhi256_mask((short*)p, (vs)to_bf16(r), low(m)); }
AI void store(f16* p, vf v, int m) { __builtin_ia32_storedquhi256_mask((short*)p, (vs)to_f16(v), low(m)); }
#endif

// A function of the lane, lane by lane: strided and indirect access, and functions that only libm has.
template <class V> struct make {
  template <class F> AI V of(F f, int m) { V r = {}; for (int l = 0; l < m; l++) r[l] = f(l); return r; }
};
template <class H, class T> struct make<two<H, T>> {
  template <class F> AI two<H, T> of(F f, int m) {
    two<H, T> r = {};
    for (int l = 0; l < (m < 8 ? m : 8); l++) r.lo[l] = f(l);
    for (int l = 8; l < m; l++) r.hi[l - 8] = f(l);
    return r;
  }
};
template <class V, class F> AI V lanes(F f, int m = 16) { return make<V>::of(f, m); }
template <class F> AI vi lanes_b1(F f, int m = 16) { vi r = {}; for (int l = 0; l < m; l++) r[l] = -(int)f(l); return r; }

// Multiply-add in one rounding inside the functions below; user arithmetic never contracts.
#if defined(__AVX512F__)
AI vf mad(vf a, vf b, vf c) { return (vf)__builtin_ia32_vfmaddps512_mask(a, b, c, FULL, 4); }
#elif defined(__FMA__)
typedef float half8 __attribute__((vector_size(32)));
union halves { vf v; half8 h[2]; };
AI vf mad(vf a, vf b, vf c) {
  halves x = {a}, y = {b}, z = {c}, r;
  for (int i = 0; i < 2; i++) r.h[i] = __builtin_ia32_vfmaddps256(x.h[i], y.h[i], z.h[i]);
  return r.v;
}
#else
AI vf mad(vf a, vf b, vf c) { return a * b + c; }
#endif
#if defined(__FMA__) || defined(__AVX512F__)
AI vf Fma(vf a, vf b, vf c) { return mad(a, b, c); }
#else
AI vf Fma(vf a, vf b, vf c) { return lanes<vf>([&](int l) { return __builtin_fmaf(a[l], b[l], c[l]); }); }
#endif
AI vd Fma(vd a, vd b, vd c) { return lanes<vd>([&](int l) { return __builtin_fma(a[l], b[l], c[l]); }); }
AI float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
AI double Fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

// max and min keep NaN from either side.
#define MINMAX(T, SELECT) \
  AI T Max(T a, T b) { return SELECT((a > b) | (a != a), a, b); } \
  AI T Min(T a, T b) { return SELECT((a < b) | (a != a), a, b); }
#define CHOOSE(m, a, b) ((m) ? (a) : (b))
MINMAX(vd8, CHOOSE) MINMAX(vl8, CHOOSE) MINMAX(vd, select) MINMAX(vl, select) MINMAX(float, CHOOSE) MINMAX(double, CHOOSE) MINMAX(long, CHOOSE)
#if defined(__AVX512F__)
AI vf max_b(vf a, vf b) { return (vf)__builtin_ia32_maxps512_mask(a, b, a, FULL, 4); }  // b where either is NaN
AI vf min_b(vf a, vf b) { return (vf)__builtin_ia32_minps512_mask(a, b, a, FULL, 4); }
AI vf Max(vf a, vf b) { return a != a ? a : max_b(a, b); }
AI vf Min(vf a, vf b) { return a != a ? a : min_b(a, b); }
#else
AI vf max_b(vf a, vf b) { return a > b ? a : b; }
AI vf min_b(vf a, vf b) { return a < b ? a : b; }
MINMAX(vf, CHOOSE)
#endif

AI vf Abs(vf a) { return (vf)((vi)a & 0x7fffffff); }
AI vd Abs(vd a) { return {(vd8)((vl8)a.lo & 0x7fffffffffffffffL), (vd8)((vl8)a.hi & 0x7fffffffffffffffL)}; }
AI vl Abs(vl a) { return select(a < 0, -a, a); }
AI float Abs(float a) { return __builtin_fabsf(a); }
AI double Abs(double a) { return __builtin_fabs(a); }
AI long Abs(long a) { return a < 0 ? -a : a; }
AI vf with_sign(vf size, vf sign) { return (vf)(((vi)size & 0x7fffffff) | ((vi)sign & (int)0x80000000)); }

// Everything by libm, lane by lane; the vector forms of the common ones follow.
#define LIBM_SCALAR(NAME, fn) \
  AI float NAME(float a) { return __builtin_##fn##f(a); } \
  AI double NAME(double a) { return __builtin_##fn(a); }
#define LIBM_VD(NAME, fn) AI vd NAME(vd a) { return lanes<vd>([&](int l) { return __builtin_##fn(a[l]); }); }
#define LIBM_VF(NAME, fn) AI vf NAME(vf a) { return lanes<vf>([&](int l) { return __builtin_##fn##f(a[l]); }); }
#define LIBM2(NAME, fn) \
  AI float NAME(float a, float b) { return __builtin_##fn##f(a, b); } \
  AI double NAME(double a, double b) { return __builtin_##fn(a, b); } \
  AI vf NAME(vf a, vf b) { return lanes<vf>([&](int l) { return __builtin_##fn##f(a[l], b[l]); }); } \
  AI vd NAME(vd a, vd b) { return lanes<vd>([&](int l) { return __builtin_##fn(a[l], b[l]); }); }
#define LIBM(NAME, fn) LIBM_SCALAR(NAME, fn) LIBM_VD(NAME, fn)
LIBM_SCALAR(Exp, exp) LIBM(Expm1, expm1) LIBM(Log, log) LIBM(Log1p, log1p) LIBM(Tanh, tanh) LIBM(Erf, erf)
LIBM(Exp2, exp2) LIBM(Log2, log2) LIBM(Sin, sin) LIBM(Cos, cos)
LIBM(Sqrt, sqrt) LIBM(Floor, floor) LIBM(Ceil, ceil) LIBM(Trunc, trunc) LIBM(Rint, rint)
LIBM2(Pow, pow) LIBM2(Atan2, atan2)
#if defined(__AVX512F__)
AI vf Sqrt(vf a) { return (vf)__builtin_ia32_sqrtps512_mask(a, a, FULL, 4); }
#define ROUNDING(NAME, MODE) AI vf NAME(vf a) { return (vf)__builtin_ia32_rndscaleps_mask(a, MODE, a, FULL, 4); }
ROUNDING(Rint, 8) ROUNDING(Floor, 9) ROUNDING(Ceil, 10) ROUNDING(Trunc, 11)
AI vf scale2(vf a, vf n) { return (vf)__builtin_ia32_scalefps512_mask(a, n, a, FULL, 4); }
#else
LIBM_VF(Sqrt, sqrt) LIBM_VF(Floor, floor) LIBM_VF(Ceil, ceil) LIBM_VF(Trunc, trunc) LIBM_VF(Rint, rint)
AI vf scale2(vf a, vf n) {  // in two steps, so that subnormal and huge results round once
  vi e = __builtin_convertvector(n, vi), h = e >> 1;
  return a * (vf)((h + 127) << 23) * (vf)((e - h + 127) << 23);
}
#endif

// Vector functions of float, at most 2 ulp from the true value everywhere.
AI vf exp_near(vf r) {  // e^r - 1 for |r| < log(2) / 2
  vf p = mad(r, splat(0.0013939926f), splat(0.008369f));
  p = mad(p, r, splat(0.04166641f));
  p = mad(p, r, splat(0.16666518f));
  p = mad(p, r, splat(0.5f));
  return mad(r * r, p, r);
}
AI vf exp_split(vf x, vf* n) {  // e^x - 1 = 2^n (1 + result) - 1
  *n = mad(x, splat(1.44269504f), splat(12582912.f)) - 12582912.f;  // rounded
  return exp_near(mad(*n, splat(-1.42860677e-6f), mad(*n, splat(-0.693145752f), x)));
}
AI vf Exp(vf x) {
  vi none = x < -104.f;  // zero without passing through subnormals, which some units compute by slow assists
  vf n, q = exp_split(min_b(splat(89.f), none ? (vf){} : x), &n);
  return none ? (vf){} : scale2(q + 1.f, n);
}
AI vf Exp2(vf x) {
  vi none = x < -150.f;
  vf y = min_b(splat(129.f), none ? (vf){} : x), n = (y + 12582912.f) - 12582912.f;
  return none ? (vf){} : scale2(exp_near((y - n) * 0.693147181f) + 1.f, n);
}
AI vf Expm1(vf x) {
  vf n, q = exp_split(min_b(splat(89.f), max_b(splat(-30.f), x)), &n);
  vf s = (vf)((__builtin_convertvector(n, vi) + 126) << 23);  // 2^(n-1): 2^128 would overflow
  vf r = mad(s, q, s - 0.5f);
  return x == 0.f ? x : x != x ? x : r + r;
}
AI vf log_bend(vf f) {  // log(1 + f) - f + f^2 / 2
  vf p = mad(f, splat(0.06751627f), splat(-0.11672565f));
  p = mad(p, f, splat(0.11883888f));
  p = mad(p, f, splat(-0.124059096f));
  p = mad(p, f, splat(0.1422028f));
  p = mad(p, f, splat(-0.16668f));
  p = mad(p, f, splat(0.20002075f));
  p = mad(p, f, splat(-0.2500001f));
  p = mad(p, f, splat(0.33333313f));
  return p * f * f * f;
}
AI vf log_tail(vf f, vf e) {  // log(1 + f) + e log 2
  vf y = mad(f * f, splat(-0.5f), mad(e, splat(-2.12194440e-4f), log_bend(f)));
  return mad(e, splat(0.693359375f), f + y);
}
AI vi log_split(vf x) { return ((vi)x - 0x3f3504f3) >> 23; }  // e with x / 2^e in [sqrt 1/2, sqrt 2)
AI vf log_edges(vf r, vf x) {  // the argument of the logarithm
  r = x == INF ? x : r;
  r = x == 0.f ? splat(-INF) : r;
  return x < 0.f ? splat(QNAN) : x != x ? x : r;
}
AI vf Log(vf x) {
  vi tiny = x < 0x1p-126f;
  vf y = tiny ? x * 0x1p24f : x;
  vi e = log_split(y);
  vf f = (vf)((vi)y - (e << 23)) - 1.f;
  return log_edges(log_tail(f, __builtin_convertvector(tiny ? e - 24 : e, vf)), x);
}
AI vf Log2(vf x) {
  vi tiny = x < 0x1p-126f;
  vf y = tiny ? x * 0x1p24f : x;
  vi e = log_split(y);
  vf f = (vf)((vi)y - (e << 23)) - 1.f;
  vf a = mad(f * f, splat(-0.5f), log_bend(f));
  // (f + a) / log 2, the quotient of f in two parts
  vf q = mad(f, splat(1.92596299e-8f), a * 1.44269504f);
  q = mad(f, splat(1.44269504f), q);
  return log_edges(q + __builtin_convertvector(tiny ? e - 24 : e, vf), x);
}
AI vf Log1p(vf x) {
  vf u = x + 1.f;
  vi e = log_split(u);
  vf s = (vf)((127 - e) << 23);
  vf f = x > 0x1p30f ? (vf)((vi)u - (e << 23)) - 1.f : mad(x, s, s - 1.f);
  vf r = log_edges(log_tail(f, __builtin_convertvector(e, vf)), u);
  return Abs(x) < 0x1p-25f ? x : r;
}
#if defined(__AVX512F__)
// tanh and erf as x times a polynomial in |x|, one for each of 32 stretches: their coefficients sit in register pairs.
// A stretch is expanded around a point where the function over x is nearly a float, so that rounding it costs nothing.
#if defined(__clang__)
AI vf pick(const float* t, vi i) { return (vf)__builtin_ia32_vpermi2varps512(load(t), i, load(t + 16)); }
#else
AI vf pick(const float* t, vi i) { return __builtin_shuffle(load(t), load(t + 16), i); }
#endif
template <int N> AI vf stretches(const float (&table)[N][32], float per_unit, float end, vf x) {
  vf c = min_b(splat(end), max_b(splat(-end), x)), a = Abs(c);
  vi i = (vi)(a * per_unit + 12582912.f);  // its low bits count the stretches
  vf t = a - pick(table[0], i), p = pick(table[N - 1], i);
#pragma GCC unroll 8
  for (int n = N - 2; n > 0; n--) p = mad(p, t, pick(table[n], i));
  return c * p;
}
static const float tanh_table[7][32] = {
  {0.08405676f, 0.31407985f, 0.5620556f, 0.90129626f, 1.1812568f, 1.446736f, 1.7805429f, 2.0412507f, 2.3188999f,
   2.6129656f, 2.929105f, 3.202219f, 3.527542f, 3.8367667f, 4.1095724f, 4.404289f, 4.6816726f, 4.967953f, 5.2627177f,
   5.547049f, 5.8339777f, 6.16555f, 6.4281793f, 6.7195377f, 7.0146103f, 7.3468547f, 7.633884f, 7.927114f, 8.193603f,
   8.502065f, 8.776147f, 9.07631f},
  {0.99765146f, 0.9683656f, 0.90649575f, 0.7954415f, 0.70081925f, 0.61866546f, 0.5305986f, 0.4736454f, 0.4229711f,
   0.37861454f, 0.33945644f, 0.311252f, 0.28299463f, 0.26039386f, 0.24320322f, 0.22698356f, 0.21356222f, 0.20127065f,
   0.19000569f, 0.18027055f, 0.1714067f, 0.1621901f, 0.15556423f, 0.14881933f, 0.14255936f, 0.13611256f, 0.13099486f,
   0.12614928f, 0.12204642f, 0.11761848f, 0.113945216f, 0.11017693f},
  {-0.05572243f, -0.19380172f, -0.29549903f, -0.3433145f, -0.32689822f, -0.29015112f, -0.23765658f, -0.20007522f,
   -0.1660244f, -0.13675743f, -0.11201238f, -0.09513935f, -0.0792474f, -0.067383744f, -0.05891757f, -0.051401254f,
   -0.045543347f, -0.04047483f, -0.0360837f, -0.032487497f, -0.029374888f, -0.026302997f, -0.024198733f, -0.022146389f,
   -0.020322744f, -0.018526416f, -0.017159538f, -0.01591358f, -0.014895293f, -0.013834088f, -0.012983502f, -0.01213895f},
  {-0.3277207f, -0.26174065f, -0.14543293f, -0.0056858584f, 0.056211438f, 0.0775076f, 0.076466605f, 0.067114845f,
   0.055532973f, 0.0442841f, 0.03438481f, 0.027657747f, 0.021490103f, 0.017078785f, 0.014074687f, 0.011535079f,
   0.009654716f, 0.008108215f, 0.006836076f, 0.0058457525f, 0.0050292676f, 0.0042632604f, 0.003762853f, 0.0032949522f,
   0.0028967443f, 0.0025214527f, 0.0022476916f, 0.0020074237f, 0.0018178794f, 0.0016271251f, 0.001479396f,
   0.0013374261f},
  {0.044179343f, 0.1374697f, 0.16152908f, 0.10377125f, 0.046184957f, 0.010740806f, -0.009208817f, -0.013654562f,
   -0.013649148f, -0.011691694f, -0.009197428f, -0.0072781057f, -0.00544401f, -0.004129056f, -0.0032503197f,
   -0.002528396f, -0.0020131487f, -0.0016061433f, -0.0012853105f, -0.0010467925f, -0.00085824734f, -0.0006894461f,
   -0.000584298f, -0.0004898463f, -0.00041279927f, -0.0003431593f, -0.0002942609f, -0.00025320757f, -0.0002218894f,
   -0.00019140096f, -0.00016857647f, -0.00014741495f},
  {0.12740088f, 0.06653937f, -0.013739503f, -0.0556542f, -0.04314464f, -0.024035612f, -0.0077714953f, -0.0016408457f,
   0.0011292617f, 0.0019564235f, 0.001896001f, 0.0016020474f, 0.0012221057f, 0.00091618014f, 0.00070434937f,
   0.00052933034f, 0.00040582306f, 0.0003106091f, 0.00023750933f, 0.00018529574f, 0.00014520514f, 0.00011093623f,
   9.039464e-05f, 7.266788e-05f, 5.8554626e-05f, 4.6686295e-05f, 3.8414335e-05f, 3.1819083e-05f, 2.7111228e-05f,
   2.251182e-05f, 1.926401e-05f, 1.6257523e-05f},
  {-0.023174562f, -0.0671714f, -0.04793292f, -0.0034042683f, 0.014320965f, 0.012622297f, 0.007012033f, 0.0030057316f,
   0.00096473086f, 8.6965825e-05f, -0.00017321017f, -0.00022651999f, -0.00022606642f, -0.00018634305f, -0.00013927095f,
   -0.00011269174f, -8.443709e-05f, -5.6700526e-05f, -4.36275e-05f, -2.4795832e-05f, -2.118372e-05f, -2.1280533e-05f,
   -1.3330614e-05f, -8.629222e-06f, -3.3959589e-06f, -3.2182822e-06f, -8.22397e-06f, -3.7809414e-06f, -1.7841069e-06f,
   -1.481467e-06f, -1.8600758e-06f, 4.1543828e-07f}
};
AI vf Tanh(vf x) { return stretches(tanh_table, 3.4133334f, 9.07f, x); }
static const float erf_table[6][32] = {
  {0.036250185f, 0.13655472f, 0.2554075f, 0.3987413f, 0.50677073f, 0.64928347f, 0.7694183f, 0.89377236f, 1.0298585f,
   1.1683073f, 1.2779729f, 1.4256696f, 1.5579861f, 1.6710116f, 1.8150748f, 1.928837f, 2.0504265f, 2.1986985f,
   2.3295808f, 2.454485f, 2.5654705f, 2.7008991f, 2.8483388f, 2.9624178f, 3.101413f, 3.2147334f, 3.3525033f, 3.4801884f,
   3.6011739f, 3.7263842f, 3.856913f, 4.006859f},
  {1.1278851f, 1.1214045f, 1.1043161f, 1.0713248f, 1.0387926f, 0.98801094f, 0.940267f, 0.888106f, 0.82994795f,
   0.7716408f, 0.7271583f, 0.6707172f, 0.62415713f, 0.5875965f, 0.5452882f, 0.5151415f, 0.48588198f, 0.45396197f,
   0.42883858f, 0.40720633f, 0.38968077f, 0.3701976f, 0.3510621f, 0.33755267f, 0.32242996f, 0.3110661f, 0.29828393f,
   0.28734052f, 0.27768713f, 0.26835662f, 0.2592747f, 0.24957205f},
  {-0.027247813f, -0.101581894f, -0.18478313f, -0.27289945f, -0.32752454f, -0.3816133f, -0.41073638f, -0.42572185f,
   -0.42651704f, -0.4138105f, -0.39655384f, -0.36677223f, -0.33668578f, -0.31025997f, -0.27736622f, -0.25290254f,
   -0.22874904f, -0.20238729f, -0.18195449f, -0.164791f, -0.15128505f, -0.13678089f, -0.123132825f, -0.11388617f,
   -0.10393809f, -0.096751235f, -0.08896907f, -0.082562864f, -0.07710944f, -0.072015f, -0.067223266f, -0.06228618f},
  {-0.3752374f, -0.36364245f, -0.33363557f, -0.278112f, -0.22650997f, -0.1524923f, -0.090409815f, -0.031285007f,
   0.023455441f, 0.06601374f, 0.089924455f, 0.10944317f, 0.11649979f, 0.11652236f, 0.110965945f, 0.10378238f,
   0.09471187f, 0.08307566f, 0.07314546f, 0.0644095f, 0.057406276f, 0.049876526f, 0.042891536f, 0.03826943f,
   0.033438098f, 0.030059595f, 0.026523257f, 0.02371748f, 0.021409713f, 0.019324696f, 0.01742892f, 0.015544755f},
  {0.016331984f, 0.060185023f, 0.106452554f, 0.14852792f, 0.16754016f, 0.17502417f, 0.16709197f, 0.14804935f,
   0.11896319f, 0.08574173f, 0.059941713f, 0.029239668f, 0.0074352613f, -0.0064152083f, -0.018123547f, -0.02332717f,
   -0.02586975f, -0.02597084f, -0.024394592f, -0.022143735f, -0.019903285f, -0.017186204f, -0.014459431f, -0.012598482f,
   -0.010638679f, -0.00927847f, -0.007882903f, -0.006803386f, -0.00594005f, -0.0051848427f, -0.0045193615f,
   -0.0038803539f},
  {0.11235049f, 0.10600508f, 0.08754009f, 0.059904195f, 0.028641867f, -0.0028547554f, -0.029029323f, -0.047935076f,
   -0.058292057f, -0.06042423f, -0.056036383f, -0.04722096f, -0.03639828f, -0.025546253f, -0.015596596f, -0.007961296f,
   -0.0021955555f, 0.0016892524f, 0.003867113f, 0.0048742564f, 0.0050858324f, 0.004881811f, 0.0043710507f, 0.003824648f,
   0.0032464226f, 0.0027493285f, 0.002305841f, 0.0019317826f, 0.0016198667f, 0.001369062f, 0.0011607291f,
   0.00097597187f}
};
AI vf Erf(vf x) { return stretches(erf_table, 7.757576f, 3.95f, x); }
#else
AI vf Tanh(vf x) {
  vf a = Abs(x), z = a * a, n;
  vf p = mad(z, splat(0.0021408338f), splat(-0.008178281f));
  p = mad(p, z, splat(0.021702772f));
  p = mad(p, z, splat(-0.05394758f));
  p = mad(p, z, splat(0.13333218f));
  p = mad(p, z, splat(-0.3333333f));
  p = mad(p * z, a, a);
  vf q = exp_split(min_b(splat(20.f), a + a), &n);
  vf s = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
  vf big = 1.f - 2.f / mad(s, q, s + 1.f);
  vf r = with_sign(a < 0.625f ? p : big, x);
  return x != x ? x : r;
}
AI vf Erf(vf x) {
  vf a = Abs(x), z = a * a, n;
  vf p = mad(z, splat(7.996642e-05f), splat(-0.0008049769f));
  p = mad(p, z, splat(0.005192405f));
  p = mad(p, z, splat(-0.026855731f));
  p = mad(p, z, splat(0.11283626f));
  p = mad(p, z, splat(-0.3761263f));
  p = mad(p, z, splat(0.12837917f));
  p = mad(p, a, a);
  vf c = min_b(splat(4.f), a);  // erf(4) rounds to 1; log(1 - erf) is smooth up to there
  vf q = mad(c, splat(1.152093e-05f), splat(-0.00032564034f));
  q = mad(q, c, splat(0.0036537203f));
  q = mad(q, c, splat(-0.023785269f));
  q = mad(q, c, splat(0.10626307f));
  q = mad(q, c, splat(0.63513595f));
  q = mad(q, c, splat(0.12865216f));
  vf t = exp_split(-mad(q, c, c), &n);
  vf s = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
  vf big = 1.f - mad(s, t, s);
  vf r = with_sign(a < 0.927734375f ? p : big, x);
  return x != x ? x : r;
}
#endif
// sin and cos: off the nearest multiple of pi / 2 in three steps, far out by libm.
AI vf sin_shifted(vf x, int quarter) {
  vf s = mad(x, splat(0.636619772f), splat(12582912.f)), n = s - 12582912.f;
  vf r = mad(n, splat(-1.57079637f), x);
  r = mad(n, splat(4.37113883e-8f), r);
  r = mad(n, splat(1.71512451e-15f), r);
  vi q = (vi)s + quarter;
  vf z = r * r;
  vf a = mad(mad(mad(z, splat(-1.9515296e-4f), splat(8.3321609e-3f)), z, splat(-0.16666655f)), z * r, r);
  vf b = mad(mad(mad(z, splat(2.4433157e-5f), splat(-1.3887316e-3f)), z, splat(4.1666646e-2f)), z * z, mad(z, splat(-0.5f), splat(1.f)));
  vf v = (q & 1) != 0 ? b : a;
  return (vf)((vi)v ^ (q & 2) << 30);
}
AI vf Sin(vf x) {
#if defined(__AVX512F__) || defined(__FMA__)
  if (!some(!(Abs(x) < 8192.f))) return x == 0.f ? x : sin_shifted(x, 0);
#endif
  return lanes<vf>([&](int l) { return __builtin_sinf(x[l]); });
}
AI vf Cos(vf x) {
#if defined(__AVX512F__) || defined(__FMA__)
  if (!some(!(Abs(x) < 8192.f))) return sin_shifted(x, 1);
#endif
  return lanes<vf>([&](int l) { return __builtin_cosf(x[l]); });
}
AI vd8 exp8(vd8 x) {
  vd8 y = x > 710. ? (vd8){} + 710. : x < -746. ? (vd8){} - 746. : x;
  vd8 n = (y * 1.4426950408889634 + 0x1.8p52) - 0x1.8p52;
  vd8 r = (y - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  vd8 p = (vd8){} + 1. / 6227020800.;
  const double c[] = {1. / 479001600., 1. / 39916800., 1. / 3628800., 1. / 362880., 1. / 40320., 1. / 5040., 1. / 720., 1. / 120., 1. / 24., 1. / 6., 0.5};
#pragma GCC unroll 16
  for (int i = 0; i < 11; i++) p = p * r + c[i];
  p = (r + r * r * p) + 1.;
  vl8 i = __builtin_convertvector(n, vl8), h = i >> 1;
  return p * (vd8)((h + 1023) << 52) * (vd8)((i - h + 1023) << 52);
}
AI vd Exp(vd x) { return {exp8(x.lo), exp8(x.hi)}; }
AI vf Sigmoid(vf x) {  // never through 1 / (1 + inf): small results stay accurate
  vf e = Exp(-Abs(x)), r = e / (1.f + e), s = x < 0.f ? e : splat(1.f);
  return mad(-s, r, s);  // more exact than s / (1 + e)
}
AI float Sigmoid(float x) { float e = __builtin_expf(-Abs(x)); return (x < 0 ? e : 1.f) / (1.f + e); }
AI double Sigmoid(double x) { double e = __builtin_exp(-Abs(x)); return (x < 0 ? e : 1.) / (1. + e); }
AI vd Sigmoid(vd x) { vd e = Exp(-Abs(x)); return select(x < 0., e, splat(1.)) / (1. + e); }

// Sixteen lanes to one number, in a fixed order.
#define TURN8(v, a, b, c, d) __builtin_shufflevector(v, v, a, b, c, d, a, b, c, d)
#define FOLD8(NAME, V, S, OP) \
  AI S NAME(V v) { \
    v = OP(v, TURN8(v, 4, 5, 6, 7)); \
    v = OP(v, TURN8(v, 2, 3, 2, 3)); \
    return OP(v[0], v[1]); \
  }
#define FOLD(NAME, V, V8, S, OP) \
  FOLD8(NAME, V8, S, OP) \
  AI S NAME(V v) { return NAME((V8)OP(LOWER8(v), UPPER8(v))); }
#define FOLD2(NAME, V, V8, S, OP) \
  FOLD8(NAME, V8, S, OP) \
  AI S NAME(V v) { return NAME(OP(v.lo, v.hi)); }
#define ADD(a, b) ((a) + (b))
#define MUL(a, b) ((a) * (b))
#define OR(a, b) ((a) | (b))
#define AND(a, b) ((a) & (b))
AI vf8 Max(vf8 a, vf8 b) { return (a > b) | (a != a) ? a : b; }
AI vf8 Min(vf8 a, vf8 b) { return (a < b) | (a != a) ? a : b; }
FOLD(fold_sum, vf, vf8, float, ADD) FOLD2(fold_sum, vd, vd8, double, ADD) FOLD2(fold_sum, vl, vl8, long, ADD)
FOLD(fold_prod, vf, vf8, float, MUL) FOLD2(fold_prod, vd, vd8, double, MUL) FOLD2(fold_prod, vl, vl8, long, MUL)
FOLD(fold_max, vf, vf8, float, Max) FOLD2(fold_max, vd, vd8, double, Max) FOLD2(fold_max, vl, vl8, long, Max)
FOLD(fold_min, vf, vf8, float, Min) FOLD2(fold_min, vd, vd8, double, Min) FOLD2(fold_min, vl, vl8, long, Min)
FOLD(fold_or, vi, vi8, bool, OR) FOLD(fold_and, vi, vi8, bool, AND)
FOLD2(fold_or, vl, vl8, long, OR) FOLD2(fold_and, vl, vl8, long, AND)

// To the values of a storage dtype and back.
AI vf round_bf16(vf v) { return (vf)(bf16_bits(v) << 16); }
AI float round_bf16(float v) { return from_bf16(to_bf16(v)); }
AI vd round_bf16(vd v) { return to_f64(round_bf16(to_f32(v))); }
AI double round_bf16(double v) { return round_bf16((float)v); }
AI vf round_f16(vf v) { return from_f16(to_f16(v)); }
AI float round_f16(float v) { return from_f16(to_f16(v)); }
AI vd round_f16(vd v) { return to_f64(round_f16(to_f32(v))); }
AI double round_f16(double v) { return round_f16((float)v); }
AI vd round_f32(vd v) { return to_f64(to_f32(v)); }
AI double round_f32(double v) { return (float)v; }
AI vl round_i32(vl v) { return v << 32 >> 32; }
AI vl round_i16(vl v) { return v << 48 >> 48; }
AI vl round_i8(vl v) { return v << 56 >> 56; }
AI vl round_u8(vl v) { return v & 255; }
AI long round_i32(long v) { return (int)v; }
AI long round_i16(long v) { return (short)v; }
AI long round_i8(long v) { return (signed char)v; }
AI long round_u8(long v) { return (unsigned char)v; }

// An index that must lie in [0, size): else the kernel fails, and 0 stands in so that nothing is read outside.
AI void flag(int* fail) { __atomic_store_n(fail, 1, __ATOMIC_RELAXED); }
AI long check(long i, long size, int* fail) {
  if ((u64)i < (u64)size) return i;
  flag(fail);
  return 0;
}
AI vl check(vl i, long size, int* fail, int m = 16) {
  vi bad = narrow((i < 0) | (i >= size)) & first(m);
  if (!__builtin_expect(some(bad), 0)) return i;
  flag(fail);
  return select(bad, vl{}, i);
}

// Philox 4x32-10 on the counter (offset, 0), first word, as a number in [0, 1).
AI u32 high(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
#if defined(__AVX512F__)
typedef long long vq __attribute__((vector_size(64)));
AI vq mul32(vq a, long b) { return (vq)__builtin_ia32_pmuludq512_mask((vi)a, (vi)((vq){} + b), (vq){}, 255); }
// Even lanes, and odd ones, in the lower halves of 64 bits: products keep both words, and what lies above is ignored.
AI vu philox16(vu lo, vu hi, u32 k0, u32 k1) {
  vq a0 = (vq)lo, a1 = (vq)hi, a2 = {}, a3 = {};
  vq b0 = (vq)((vul8)lo >> 32), b1 = (vq)((vul8)hi >> 32), b2 = {}, b3 = {};
#pragma GCC unroll 10
  for (int i = 0; i < 10; i++) {
    vq p = mul32(a0, 0xD2511F53), q = mul32(a2, 0xCD9E8D57), r = mul32(b0, 0xD2511F53), s = mul32(b2, 0xCD9E8D57);
    vq x = (vq){} + (long)(k0 + i * 0x9E3779B9u), y = (vq){} + (long)(k1 + i * 0xBB67AE85u);
    a0 = (vq)((vul8)q >> 32) ^ a1 ^ x; a1 = q; a2 = (vq)((vul8)p >> 32) ^ a3 ^ y; a3 = p;
    b0 = (vq)((vul8)s >> 32) ^ b1 ^ x; b1 = s; b2 = (vq)((vul8)r >> 32) ^ b3 ^ y; b3 = r;
  }
  return (vu)((a0 & 0xffffffffL) | b0 << 32);
}
#else
AI vu high(vu a, u32 b) { vu r; for (int l = 0; l < 16; l++) r[l] = high(a[l], b); return r; }
#endif
template <class U> AI U philox(U c0, U c1, U c2, U c3, u32 k0, u32 k1) {
  for (int i = 0; i < 10; i++) {
    U h0 = high(c0, 0xD2511F53u), h1 = high(c2, 0xCD9E8D57u), l0 = c0 * 0xD2511F53u, l1 = c2 * 0xCD9E8D57u;
    c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  return c0;
}
#if !defined(__AVX512F__)
AI vu philox16(vu lo, vu hi, u32 k0, u32 k1) { return philox<vu>(lo, hi, (vu){}, (vu){}, k0, k1); }
#endif
AI float uniform(long seed, long offset) {
  u32 w = philox<u32>((u32)offset, (u32)((u64)offset >> 32), 0, 0, (u32)seed, (u32)((u64)seed >> 32));
  return (float)(w >> 8) * 0x1p-24f;
}
AI vf uniform(long seed, vu lo, vu hi) {
  vu w = philox16(lo, hi, (u32)seed, (u32)((u64)seed >> 32));
  return __builtin_convertvector((vi)(w >> 8), vf) * 0x1p-24f;
}
AI vf uniform(long seed, vl offset) {
  return uniform(seed, (vu)narrow(offset), (vu)narrow(offset >> 32));
}
AI vf uniform(long seed, long start, vi lane) {  // offset = start + lane
  vu lo = (vu){} + (u32)start + (vu)lane;
  return uniform(seed, lo, (vu){} + (u32)((u64)start >> 32) - (vu)(lo < (vu){} + (u32)start));
}
AI vf uniform(vl seed, vl offset) { return lanes<vf>([&](int l) { return uniform((long)seed[l], (long)offset[l]); }); }

// Sixteen rows of sixteen floats, turned.
#define TURN(N) \
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) if (!(i & N)) turn##N(r[i], r[i + N]);
AI void turn1(vf& a, vf& b) {
  vf t = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
  b = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  a = t;
}
AI void turn2(vf& a, vf& b) {
  vf t = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
  b = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  a = t;
}
AI void turn4(vf& a, vf& b) {
  vf t = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
  b = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  a = t;
}
AI void turn8(vf& a, vf& b) {
  vf t = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
  b = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  a = t;
}
AI void transpose(vf* r) { TURN(8) TURN(4) TURN(2) TURN(1) }
