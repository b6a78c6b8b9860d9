// Random numbers, the same ones on every machine that has the same standard library.
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <random>

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int in(int least, int most) { return std::uniform_int_distribution<int>(least, most)(engine_); }
  /// Small numbers as often as large ones.
  int log_in(int least, int most) {
    const double x = std::uniform_real_distribution<double>(std::log(least), std::log(most + 1.0))(engine_);
    return std::clamp(int(std::exp(x)), least, most);
  }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[in(0, int(values.size()) - 1)];
  }

 private:
  std::mt19937 engine_;
};
