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

#pragma GCC visibility pop
