// The searches of llama.cpp's reference for the scales of a group of numbers, step by step as it
// does them: every float32 operation and its order decide the bytes. `Real` is a float or, on the
// CPU, a vector with a group in each lane; Lanes<Real> has what floats and vectors write
// differently. Included by formats/fit.h and, once per instruction set, by cpu/kernels. Spec: E.10
// Source: llama.cpp v0.5.0, ggml/src/ggml-quants.c, make_qkx2_quants, make_qx_quants,
//   quantize_row_iq4_nl_impl

// Rounds to the nearest integer, ties to even. Past 2^22 the result is what its bits say:
// candidates of the search come there.
template <class Real>
KVX_HD auto whole_of(Real x) {
  return (Lanes<Real>::bits(x + 12582912.0f) & 0x7fffff) - 0x400000;
}

// The same, cut to least .. most.
template <class Real>
KVX_HD auto cut_whole(Real x, int least, int most) {
  const auto whole = whole_of<Real>(x);
  const auto above = whole > least ? whole : whole - whole + least;
  return above < most ? above : whole - whole + most;
}

// value = scale * level - least; `from` and `inverse` gave the levels that it was fitted to.
template <class Real>
struct LineFit {
  Real scale, least, from, inverse;

  KVX_HD auto level(Real x, int most) const {
    return cut_whole<Real>((x - from) * inverse, 0, most);
  }
};

// Fits a line with a least number of at most 0 to 32 numbers. If they are all the same, inverses
// are infinite and levels are those of NaN, 0. Levels are of kBits bits; candidates have `first`,
// `first` + 0.1 ... levels more than the largest one.
template <class Real, int kBits, bool kKeepsLevels, class XAt>
KVX_HD LineFit<Real> fit_line(XAt x_at) {
  constexpr int kNumbers = 32, kMost = (1 << kBits) - 1;
  constexpr int kSteps = kBits == 4 ? 20 : 15;
  constexpr float kFirst = kBits == 4 ? -1.0f : -0.5f;
  Real squares = x_at(0) * x_at(0);
  KVX_LOOP
  for (int i = 1; i < kNumbers; ++i) squares += x_at(i) * x_at(i);
  const Real average = Lanes<Real>::root(squares / static_cast<float>(kNumbers));
  const auto weight_of = [&](Real x) { return average + Lanes<Real>::magnitude(x); };

  Real least = x_at(0), largest = least, weights = weight_of(least), sum = weights * least;
  KVX_LOOP
  for (int i = 1; i < kNumbers; ++i) {
    const Real x = x_at(i), weight = weight_of(x);
    least = x < least ? x : least;
    largest = x > largest ? x : largest;
    weights += weight;
    sum += weight * x;
  }
  const Real zero = {};
  least = least > zero ? zero : least;
  const Real first_inverse = static_cast<float>(kMost) / (largest - least);
  LineFit<Real> best = {1.0f / first_inverse, least, least, first_inverse};
  Real best_error = zero;
  KVX_LOOP
  for (int i = 0; i < kNumbers; ++i) {
    const Real x = x_at(i),
               rest = best.scale * Lanes<Real>::number(best.level(x, kMost)) + least - x;
    best_error += weight_of(x) * (rest * rest);
  }
  Real kept[kKeepsLevels ? kNumbers : 1];
  Real from = least;
  KVX_LOOP
  for (int step = 0; step <= kSteps; ++step) {
    const Real inverse =
        (kFirst + 0.1f * static_cast<float>(step) + static_cast<float>(kMost)) / (largest - from);
    const LineFit<Real> tried = {zero, zero, from, inverse};
    Real levels = zero, squared = zero, products = zero;
    KVX_LOOP
    for (int i = 0; i < kNumbers; ++i) {
      const Real x = x_at(i), level = Lanes<Real>::number(tried.level(x, kMost));
      const Real weighted = weight_of(x) * level;
      if (kKeepsLevels) kept[i] = level;
      levels += weighted;
      squared += weighted * level;
      products += weighted * x;
    }
    const Real determinant = weights * squared - levels * levels;
    const Real fitted = (squared * sum - levels * products) / determinant;
    const auto is_above = fitted > zero;
    const Real line = (weights * products - sum * levels) / determinant;
    const Real scale = is_above ? products / squared : line;
    const Real low = is_above ? zero : fitted;
    Real error = zero;
    KVX_LOOP
    for (int i = 0; i < kNumbers; ++i) {
      const Real x = x_at(i);
      const Real level = kKeepsLevels ? kept[i] : Lanes<Real>::number(tried.level(x, kMost));
      const Real rest = scale * level + low - x;
      error += weight_of(x) * (rest * rest);
    }
    const auto is_better = (determinant > zero) & (error < best_error);
    best.scale = is_better ? scale : best.scale;
    best.from = is_better ? from : best.from;
    best.inverse = is_better ? inverse : best.inverse;
    best_error = is_better ? error : best_error;
    from = is_better ? low : from;
  }
  best.least = -from;
  return best;
}

// value = scale * (level - 32)
template <class Real>
struct RatioFit {
  Real scale, inverse;  // 0: all levels are 0
};

// Numbers of a smaller magnitude count as zeros.
constexpr float kLeastMagnitude = 1e-15f;

// The first number of the largest magnitude.
template <class Real, int kNumbers, class XAt>
KVX_HD Real first_largest(XAt x_at) {
  Real most = {};
  KVX_LOOP
  for (int i = 0; i < kNumbers; ++i) {
    const Real x = x_at(i);
    most = Lanes<Real>::magnitude(x) > Lanes<Real>::magnitude(most) ? x : most;
  }
  return most;
}

// Fits a scale to 16 numbers with levels of six bits.
template <class Real, class XAt>
KVX_HD RatioFit<Real> fit_ratio(XAt x_at) {
  constexpr int kNumbers = 16, kZero = 32;
  const Real most = first_largest<Real, kNumbers>(x_at), zero = {};
  RatioFit<Real> best = {zero, zero};
  Real best_sum = zero;
  KVX_LOOP
  for (int n = 0; n < 19; ++n) {
    const int step = n == 0 ? 0 : n <= 9 ? n - 10 : n - 9;  // 0, -9 .. -1, 1 .. 9
    const Real inverse = -(static_cast<float>(kZero) + 0.1f * static_cast<float>(step)) / most;
    Real products = zero, squared = zero;
    KVX_LOOP
    for (int i = 0; i < kNumbers; ++i) {
      const Real x = x_at(i);
      const Real level = Lanes<Real>::number(cut_whole<Real>(x * inverse, -kZero, kZero - 1));
      products += x * x * x * level;
      squared += x * x * level * level;
    }
    const Real scale = products / squared;
    const auto is_better =
        n == 0 ? squared == squared : (squared > zero) & (products * products > best_sum * squared);
    const Real found = squared != zero ? scale : zero;
    best.scale = is_better ? found : best.scale;
    best.inverse = is_better ? inverse : best.inverse;
    best_sum = is_better ? found * products : best_sum;
  }
  const auto is_nothing = Lanes<Real>::magnitude(most) < kLeastMagnitude;
  return {is_nothing ? zero : best.scale, is_nothing ? zero : best.inverse};
}

// One of IQ4_NL's steps, and its number.
template <class Real>
struct Step {
  Real value, level;
};

// The step nearest to x, the larger one if two are: counts the midpoints up to x.
template <class Real>
KVX_HD Step<Real> nearest_step(Real x) {
  constexpr float kSteps[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                              1,    13,   25,  38,  53,  69,  89,  113};
  const Real twice = x + x, zero = {};
  Step<Real> found = {zero + kSteps[0], zero};
  for (int i = 1; i < 16; ++i) {
    const auto is_up = twice >= kSteps[i - 1] + kSteps[i];
    found.value += is_up ? zero + (kSteps[i] - kSteps[i - 1]) : zero;
    found.level += is_up ? zero + 1.0f : zero;
  }
  return found;
}

template <class Real>
struct StepFit {
  Real scale, inverse;  // 0: all levels are 0
};

// Fits a scale to 32 numbers whose levels are steps.
template <class Real, class XAt>
KVX_HD StepFit<Real> fit_steps(XAt x_at) {
  constexpr int kNumbers = 32;
  const Real most = first_largest<Real, kNumbers>(x_at), zero = {};
  const Real inverse = 1.0f / (most / -127.0f);
  Real products = zero, squared = zero;
  KVX_LOOP
  for (int i = 0; i < kNumbers; ++i) {
    const Real x = x_at(i), step = nearest_step<Real>(x * inverse).value;
    products += x * x * step * x;
    squared += x * x * step * step;
  }
  const auto is_nothing = Lanes<Real>::magnitude(most) < kLeastMagnitude;
  const Real scale = squared > zero ? products / squared : zero;
  return {is_nothing ? zero : scale, is_nothing ? zero : inverse};
}
