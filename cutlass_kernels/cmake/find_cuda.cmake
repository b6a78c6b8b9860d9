# Chooses nvcc, enables CMake's CUDA language with it and provides the target CUDA::cudart_static. The PyPI packages
# (nvidia/cu13/{bin,include,lib,nvvm}) have no lib64 and no libcudart.so link, which CMake's own search expects.
set(CK_MIN_NVCC 12.4)

function(ck_nvcc_version nvcc result)
  set(${result} "" PARENT_SCOPE)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE code)
  if(code EQUAL 0 AND text MATCHES "release [0-9.]+, V([0-9.]+)")
    set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
  endif()
endfunction()

set(CK_NVCC "${CMAKE_CUDA_COMPILER}")  # a second configure run, or -DCMAKE_CUDA_COMPILER
set(CK_NVCC_REFUSED "")
if(NOT CK_NVCC AND CK_CUDA_TOOLKIT MATCHES "^(auto|system)$")
  find_program(CK_SYSTEM_NVCC NAMES nvcc NO_CACHE
    HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" PATHS /usr/local/cuda/bin)
  if(NOT "$ENV{CUDACXX}" STREQUAL "")
    set(CK_SYSTEM_NVCC "$ENV{CUDACXX}")
  endif()
  if(CK_SYSTEM_NVCC)
    ck_nvcc_version("${CK_SYSTEM_NVCC}" version)
    if(version VERSION_GREATER_EQUAL CK_MIN_NVCC)
      set(CK_NVCC "${CK_SYSTEM_NVCC}")
    else()
      set(CK_NVCC_REFUSED " (${CK_SYSTEM_NVCC} is '${version}')")
    endif()
  endif()
elseif(NOT CK_NVCC AND NOT CK_CUDA_TOOLKIT STREQUAL "pypi")
  set(CK_NVCC "${CK_CUDA_TOOLKIT}/bin/nvcc")
endif()
if(NOT CK_NVCC AND CK_CUDA_TOOLKIT MATCHES "^(auto|pypi)$")
  ck_locate(CK_PYPI_TOOLKIT nvidia-cuda-nvcc nvidia/cu13)
  if(CK_PYPI_TOOLKIT)
    ck_stable_path(CK_PYPI_TOOLKIT cuda_toolkit "${CK_PYPI_TOOLKIT}")
    set(CK_NVCC "${CK_PYPI_TOOLKIT}/bin/nvcc")
  endif()
endif()
if(NOT CK_NVCC)
  message(FATAL_ERROR "No nvcc >= ${CK_MIN_NVCC} found${CK_NVCC_REFUSED}, CK_CUDA_TOOLKIT=${CK_CUDA_TOOLKIT}. Install a "
    "CUDA toolkit, or one release of these packages: pip install nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* "
    "nvidia-cuda-crt==13.0.* nvidia-cuda-cccl==13.0.* nvidia-cuda-runtime==13.0.*, or build without kernels: "
    "CK_BUILD_KERNELS=OFF.")
endif()
ck_nvcc_version("${CK_NVCC}" CK_NVCC_VERSION)
if(NOT CK_NVCC_VERSION VERSION_GREATER_EQUAL CK_MIN_NVCC)
  message(FATAL_ERROR "${CK_NVCC} is version '${CK_NVCC_VERSION}': ${CK_MIN_NVCC} or newer is needed.")
endif()

get_filename_component(CK_NVCC_BIN "${CK_NVCC}" DIRECTORY)
get_filename_component(CK_CUDA_ROOT "${CK_NVCC_BIN}" DIRECTORY)
set(CK_CUDA_FROM_PYPI OFF)
if(EXISTS "${CK_CUDA_ROOT}/lib/libcudart_static.a" AND NOT EXISTS "${CK_CUDA_ROOT}/lib64")
  set(CK_CUDA_FROM_PYPI ON)
  # CMake's check of the compiler links a program; nvcc itself looks for lib64 only.
  set(ENV{LIBRARY_PATH} "${CK_CUDA_ROOT}/lib:$ENV{LIBRARY_PATH}")
endif()

set(CMAKE_CUDA_COMPILER "${CK_NVCC}" CACHE FILEPATH "nvcc")
set(CMAKE_CUDA_ARCHITECTURES OFF)  # -gencode flags are set per source file: see add_instances.cmake
set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # linked explicitly, and only statically
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)

if(CK_CUDA_FROM_PYPI)
  find_package(Threads REQUIRED)
  add_library(CUDA::cudart_static STATIC IMPORTED)
  set_target_properties(CUDA::cudart_static PROPERTIES
    IMPORTED_LOCATION "${CK_CUDA_ROOT}/lib/libcudart_static.a"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};rt")
  set(CUDAToolkit_INCLUDE_DIRS "${CK_CUDA_ROOT}/include")
else()
  find_package(CUDAToolkit REQUIRED)
  # CK_COMPILE_OPTIONS names the directory.
  set_target_properties(CUDA::cudart_static PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "" INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "")
endif()
find_path(CK_CUDA_HEADERS cuda_runtime_api.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH NO_CACHE REQUIRED)
ck_stable_path(CK_CUDA_INCLUDE cuda_include "${CK_CUDA_HEADERS}")
# Objects link against the runtime of their own release or a newer one.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" CK_NVCC_MAJOR_MINOR "${CK_NVCC_VERSION}")
