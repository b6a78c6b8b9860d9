# Sets CK_CUTLASS_INCLUDE, and CK_CUTLASS_VERSION for the summary and the extension. Order: CK_CUTLASS_INCLUDE_DIR, a
# checkout at third_party/cutlass, the headers inside the nvidia-cutlass package.
set(CK_CUTLASS_FOUND_IN "")
set(CK_CUTLASS_IS_PACKAGE OFF)
if(CK_CUTLASS_INCLUDE_DIR)
  set(CK_CUTLASS_FOUND_IN "${CK_CUTLASS_INCLUDE_DIR}")
elseif(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/third_party/cutlass/include/cute/layout.hpp")
  set(CK_CUTLASS_FOUND_IN "${CMAKE_CURRENT_SOURCE_DIR}/third_party/cutlass/include")
else()
  ck_locate(CK_CUTLASS_FOUND_IN nvidia-cutlass cutlass_library/source/include)
  set(CK_CUTLASS_IS_PACKAGE ON)
endif()
if(NOT EXISTS "${CK_CUTLASS_FOUND_IN}/cute/layout.hpp")
  message(FATAL_ERROR "No CUTLASS headers ('${CK_CUTLASS_FOUND_IN}' has no cute/layout.hpp). Install them with "
    "'pip install nvidia-cutlass', put a checkout at third_party/cutlass, or set CK_CUTLASS_INCLUDE_DIR.")
endif()

file(STRINGS "${CK_CUTLASS_FOUND_IN}/cutlass/version.h" lines REGEX "#define CUTLASS_(MAJOR|MINOR|PATCH) +[0-9]+")
list(TRANSFORM lines REPLACE "[^0-9]" "")
list(JOIN lines "." CK_CUTLASS_VERSION)
if(CK_CUTLASS_VERSION VERSION_LESS 3.8)
  message(FATAL_ERROR "CUTLASS ${CK_CUTLASS_VERSION} in ${CK_CUTLASS_FOUND_IN} is too old: 3.8 or newer is needed.")
endif()
ck_stable_path(CK_CUTLASS_INCLUDE cutlass_include "${CK_CUTLASS_FOUND_IN}")
