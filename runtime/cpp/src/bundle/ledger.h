// Rows of tensors, as the tensor ledger says where they lie. Mirrors src/headport/ledger.py.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "bundle/bundle.h"

namespace headport::internal {

// The entry that a graph reads under this name. Errors: HEADPORT_BUNDLE_ERROR if there is none.
const Tensor& find_tensor(const Manifest& manifest, const std::string& graph,
                          const std::string& initializer);

// A tensor [rows, …] of which rows are read as numbers.
class RowReader {
 public:
  // Errors: HEADPORT_BUNDLE_ERROR if the element type is not one of float, float16, bfloat16, double,
  // int8 and uint8, or the length does not fit the shape.
  RowReader(const Bundle& bundle, const Tensor& tensor);

  std::size_t rows() const { return rows_; }
  std::size_t width() const { return width_; }  // elements of a row
  const std::string& dtype() const { return dtype_; }
  // Errors: HEADPORT_BUNDLE_ERROR if the file cannot be read.
  void read(std::size_t row, std::vector<double>& values);

 private:
  std::string where_;
  std::string dtype_;
  std::size_t offset_, rows_, width_, element_;
  std::ifstream stream_;
  std::vector<char> bytes_;
};

// float16 ↔ numbers; to float16 is rounded to nearest, ties to even, and kept in its range.
double from_half(std::uint16_t half);
std::uint16_t to_half(double value);

}  // namespace headport::internal
