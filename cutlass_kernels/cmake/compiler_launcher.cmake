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
set(CMAKE_CUDA_COMPILER_LAUNCHER
  "${Python_EXECUTABLE};${CMAKE_CURRENT_LIST_DIR}/nvcc_guard.py;${CK_MAX_SPILL_BYTES};${CK_LAUNCHER_TAIL}")
list(REMOVE_ITEM CMAKE_CUDA_COMPILER_LAUNCHER "")
