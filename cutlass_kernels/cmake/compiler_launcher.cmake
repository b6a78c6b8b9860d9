# Compilers run as: nvcc_guard.py (CUDA only) -> ccache (where installed) -> compiler. The guard is outermost because
# ccache replays the compiler's messages, so a hit is checked and reported like a fresh compilation.
if(CK_CCACHE)
  find_program(CK_CCACHE_PROGRAM NAMES ccache NO_CACHE)
endif()
if(CK_CCACHE_PROGRAM)
  if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CK_CCACHE_PROGRAM}")
  endif()
  set(CK_LAUNCHER_TAIL "${CK_CCACHE_PROGRAM}")
endif()
# A launcher of interpreters, as pyenv has, goes by the name it is called by: the link is to the interpreter itself.
execute_process(COMMAND "${Python_EXECUTABLE}" -c "import sys; print(sys.executable)"
  OUTPUT_VARIABLE CK_INTERPRETER OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
ck_stable_path(CK_GUARD_PYTHON guard_python "${CK_INTERPRETER}")
set(CMAKE_CUDA_COMPILER_LAUNCHER "${CK_GUARD_PYTHON};${CMAKE_CURRENT_LIST_DIR}/nvcc_guard.py;${CK_MAX_SPILL_BYTES};\
nvcc-${CK_NVCC_VERSION},cutlass-${CK_CUTLASS_VERSION};${CK_LAUNCHER_TAIL}")
list(REMOVE_ITEM CMAKE_CUDA_COMPILER_LAUNCHER "")
# Explicit, as each version of CMake has its own place for the standard, and spelling of the toolkit's directories: with
# the packages of the tests another one comes onto the PATH, whose commands should be the same.
set(CK_COMPILE_OPTIONS
  -std=c++17 "SHELL:-isystem \"${CK_CUTLASS_INCLUDE}\"" "SHELL:-isystem \"${CK_CUDA_INCLUDE}\"")
if(CK_CUTLASS_IS_PACKAGE)
  ck_ignore_system_headers()
endif()
