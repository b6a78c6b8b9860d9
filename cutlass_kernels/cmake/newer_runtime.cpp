// Parts of the C and C++ runtimes that manylinux_2_28 lacks and newer headers refer to. Each library has its own.
#include <new>

#pragma GCC visibility push(hidden)

// Since glibc 2.32: whether std::shared_ptr may count without atomic operations. It may not.
extern "C" {
char __libc_single_threaded;
}

namespace std {
// Since GCC 11: what `new T[n]` throws where n is negative.
[[noreturn]] void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

// Since GCC 11 std::exception_ptr is copied and destroyed inline, by these. Before, the runtime did it, and still can.
extern "C" {
#pragma GCC visibility push(default)
void copy_exception(void* to, void* const* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception(void** held) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
#pragma GCC visibility pop

void add_reference(void** held) noexcept __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void add_reference(void** held) noexcept {
  void* copy;  // never destroyed
  copy_exception(&copy, held);
}

void release(void** held) noexcept __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release(void** held) noexcept {
  destroy_exception(held);
  *held = nullptr;
}
}

#pragma GCC visibility pop
