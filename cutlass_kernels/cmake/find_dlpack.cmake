# Sets CK_DLPACK_INCLUDE, where dlpack/dlpack.h of version 1.2 or newer is: the header of DLPack's exchange API. Order:
# CK_DLPACK_INCLUDE_DIR, a checkout at third_party/dlpack, the header inside the apache-tvm-ffi package.
set(CK_DLPACK_FOUND_IN "")
if(CK_DLPACK_INCLUDE_DIR)
  set(CK_DLPACK_FOUND_IN "${CK_DLPACK_INCLUDE_DIR}")
elseif(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/third_party/dlpack/include/dlpack/dlpack.h")
  set(CK_DLPACK_FOUND_IN "${CMAKE_CURRENT_SOURCE_DIR}/third_party/dlpack/include")
else()
  ck_locate(CK_DLPACK_FOUND_IN apache-tvm-ffi tvm_ffi/include)
endif()
set(CK_HAS_EXCHANGE_API "")
if(EXISTS "${CK_DLPACK_FOUND_IN}/dlpack/dlpack.h")
  file(STRINGS "${CK_DLPACK_FOUND_IN}/dlpack/dlpack.h" CK_HAS_EXCHANGE_API REGEX "} DLPackExchangeAPI;")
endif()
if(NOT CK_HAS_EXCHANGE_API)
  message(FATAL_ERROR "No DLPack header with its exchange API ('${CK_DLPACK_FOUND_IN}' has no dlpack/dlpack.h of version "
    "1.2 or newer). Install it with 'pip install apache-tvm-ffi', put a checkout at third_party/dlpack, or set "
    "CK_DLPACK_INCLUDE_DIR.")
endif()
ck_stable_path(CK_DLPACK_INCLUDE dlpack_include "${CK_DLPACK_FOUND_IN}")
