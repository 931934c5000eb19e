// Counts what operator new is asked for. A program that includes it replaces the operators, so one
// source file of it may.
#pragma once

#include <cstdlib>
#include <new>

namespace headport::test {

inline bool counting = false;
inline std::size_t allocations = 0;

inline void count_allocations(bool on) { counting = on; }

inline void* take(std::size_t size) {
  if (counting) ++allocations;
  void* memory = std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace headport::test

// Inlined, malloc and free would look like a pair that does not belong to new and delete.
#define HEADPORT_APART __attribute__((noinline))
HEADPORT_APART void* operator new(std::size_t size) { return headport::test::take(size); }
HEADPORT_APART void* operator new[](std::size_t size) { return headport::test::take(size); }
HEADPORT_APART void operator delete(void* memory) noexcept { std::free(memory); }
HEADPORT_APART void operator delete[](void* memory) noexcept { std::free(memory); }
HEADPORT_APART void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
HEADPORT_APART void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
