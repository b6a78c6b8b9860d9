# ck_instance(): one row of instances.cmake. Turns a row that passes the CK_* filters into a generated .cu file and a
# line of the registry table.
ck_only_known(CK_BACKENDS fa2 fa3)
ck_only_known(CK_DTYPES float16 bfloat16)
foreach(arch IN LISTS CK_ARCHS)
  if(NOT arch MATCHES "^(80|86|87|89|90|10[0-9]|110|12[0-9]|ptx)$")
    message(FATAL_ERROR "CK_ARCHS: '${arch}' is not known; give compute capabilities such as 80 or 90, and ptx")
  endif()
endforeach()

# -O3 and NDEBUG come from elsewhere (build type, target). -Xptxas -v feeds nvcc_guard.py.
set(CK_NVCC_FLAGS -O3 --expt-relaxed-constexpr -Xptxas -v)

# C++ spellings of the names used in rows.
set(CK_CPP_BACKEND_fa2 "Backend::kFa2")
set(CK_CPP_BACKEND_fa3 "Backend::kFa3")
set(CK_CPP_DTYPE_float16 "DType::kFloat16")
set(CK_CPP_DTYPE_bfloat16 "DType::kBFloat16")
set(CK_TOKEN_float16 fp16)
set(CK_TOKEN_bfloat16 bf16)
set(CK_CPP_FEATURE_interval_mask "kFeatureIntervalMask")
set(CK_CPP_FEATURE_soft_cap "kFeatureSoftCap")
set(CK_CPP_FEATURE_sinks "kFeatureSinks")
set(CK_CPP_FEATURE_ragged_kv "kFeatureRaggedKv")
set(CK_CPP_FEATURE_bit_mask "kFeatureBitMask")
set(CK_CPP_FEATURE_paged_kv "kFeaturePagedKv")
set(CK_CPP_FEATURE_alibi "kFeatureAlibi")
set(CK_CPP_FEATURE_device_scales "kFeatureDeviceScales")

# What each backend is compiled to. fa3 uses instructions that exist on compute capability 9.0 alone (sm_90a).
set(CK_GENCODE_fa2 "")
set(CK_GENCODE_fa3 "")
set(CK_REAL_ARCHS ${CK_ARCHS})
list(REMOVE_ITEM CK_REAL_ARCHS ptx)
list(SORT CK_REAL_ARCHS COMPARE NATURAL)
foreach(arch IN LISTS CK_REAL_ARCHS)
  list(APPEND CK_GENCODE_fa2 "--generate-code=arch=compute_${arch},code=sm_${arch}")
endforeach()
if("ptx" IN_LIST CK_ARCHS)
  list(APPEND CK_GENCODE_fa2 "--generate-code=arch=compute_80,code=compute_80")
endif()
if("90" IN_LIST CK_ARCHS)
  set(CK_GENCODE_fa3 "--generate-code=arch=compute_90a,code=sm_90a")
endif()

# Compute capabilities the fa2 machine code runs on: from the oldest GPU compiled for to the last of the newest GPU's
# generation (sm_80 code runs on 8.6, not on 9.0), or without end where there is portable code.
if("ptx" IN_LIST CK_ARCHS)
  set(CK_ARCHS_MIN 80)
  set(CK_ARCHS_MAX 0)
else()
  list(GET CK_REAL_ARCHS 0 CK_ARCHS_MIN)
  list(GET CK_REAL_ARCHS -1 CK_ARCHS_MAX)
  math(EXPR CK_ARCHS_MAX "${CK_ARCHS_MAX} / 10 * 10 + 9")
  # The range claims every generation between; without portable code each of them needs its own.
  set(previous "")
  foreach(arch IN LISTS CK_REAL_ARCHS)
    math(EXPR major "${arch} / 10")
    if(previous AND major GREATER previous)
      math(EXPR gap "${major} - ${previous}")
      if(gap GREATER 1)
        message(FATAL_ERROR "CK_ARCHS=${CK_ARCHS} leaves out the generations between ${previous}.x and ${major}.x: "
                            "name them or add ptx")
      endif()
    endif()
    set(previous ${major})
  endforeach()
endif()

set(CK_INSTANCE_SOURCES "")
set(CK_REGISTRY_DECLARATIONS "")
set(CK_REGISTRY_ROWS "")
set(CK_SUMMARY "")
set(CK_ALL_HEAD_DIMS "")
set(CK_BUILT_BACKENDS "")

# MIN_CC, MAX_CC: 10 * major + minor of the GPUs the kernel is written for; MAX_CC 0 means no limit.
macro(ck_instance CK_BACKEND CK_DTYPE_NAME CK_HEAD_DIM_QK CK_HEAD_DIM_VO CK_MIN_CC CK_MAX_CC)
  ck_add_instance("${CK_BACKEND}" "${CK_DTYPE_NAME}" "${CK_HEAD_DIM_QK}" "${CK_HEAD_DIM_VO}" "${CK_MIN_CC}" "${CK_MAX_CC}" "${ARGN}")
endmacro()

function(ck_add_instance CK_BACKEND dtype CK_HEAD_DIM_QK CK_HEAD_DIM_VO min_cc max_cc features)
  set(CK_ALL_HEAD_DIMS ${CK_ALL_HEAD_DIMS} ${CK_HEAD_DIM_QK} PARENT_SCOPE)
  if(NOT CK_BACKEND IN_LIST CK_BACKENDS OR NOT dtype IN_LIST CK_DTYPES OR NOT CK_HEAD_DIM_QK IN_LIST CK_HEAD_DIMS
     OR NOT CK_GENCODE_${CK_BACKEND})
    return()
  endif()

  set(CK_NAME "${CK_BACKEND}_${dtype}_hd${CK_HEAD_DIM_QK}")
  if(NOT CK_HEAD_DIM_QK EQUAL CK_HEAD_DIM_VO)
    string(APPEND CK_NAME "_${CK_HEAD_DIM_VO}")
  endif()
  set(dtype_enum "${CK_CPP_DTYPE_${dtype}}")  # DType::kFloat16
  set(CK_ELEMENT "${CK_TOKEN_${dtype}}")       # fp16
  set(source "${CK_GENERATED}/${CK_NAME}.cu")
  configure_file("${CK_DIR}/src/${CK_BACKEND}/attention.cu.in" "${source}" @ONLY)
  set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${CK_GENCODE_${CK_BACKEND}}")

  if(CK_BACKEND STREQUAL "fa2")  # fa3 rows state 90 to 90 themselves
    if(min_cc LESS CK_ARCHS_MIN)
      set(min_cc ${CK_ARCHS_MIN})
    endif()
    if(CK_ARCHS_MAX AND (NOT max_cc OR CK_ARCHS_MAX LESS max_cc))
      set(max_cc ${CK_ARCHS_MAX})
    endif()
  endif()

  set(feature_bits "")
  foreach(feature IN LISTS features)
    if(NOT CK_CPP_FEATURE_${feature})
      message(FATAL_ERROR "instances.cmake: ${CK_NAME} names the unknown feature '${feature}'")
    endif()
    list(APPEND feature_bits "${CK_CPP_FEATURE_${feature}}")
  endforeach()
  list(JOIN feature_bits " | " feature_bits)

  set(CK_INSTANCE_SOURCES ${CK_INSTANCE_SOURCES} "${source}" PARENT_SCOPE)
  set(CK_BUILT_BACKENDS ${CK_BUILT_BACKENDS} ${CK_BACKEND} PARENT_SCOPE)
  set(CK_REGISTRY_DECLARATIONS
    "${CK_REGISTRY_DECLARATIONS}namespace ${CK_BACKEND} {\nKernelEntry ${CK_NAME}_entry();\n}\n" PARENT_SCOPE)
  set(row "    {{\"${CK_NAME}\", ${CK_CPP_BACKEND_${CK_BACKEND}}, ${dtype_enum}, ${dtype_enum}, ${CK_HEAD_DIM_QK}, "
    "${CK_HEAD_DIM_VO},\n      ${feature_bits}, ${min_cc}, ${max_cc}},\n     &${CK_BACKEND}::${CK_NAME}_entry},\n")
  list(JOIN row "" row)
  set(CK_REGISTRY_ROWS "${CK_REGISTRY_ROWS}${row}" PARENT_SCOPE)
  list(JOIN features " " feature_names)
  if(max_cc)
    set(range "cc ${min_cc}..${max_cc}")
  else()
    set(range "cc ${min_cc}+")
  endif()
  set(CK_SUMMARY "${CK_SUMMARY}\n--   ${CK_NAME}  (${range}; ${feature_names})" PARENT_SCOPE)
endfunction()

# Called after the rows: writes the registry table, and stops if the filters left nothing.
macro(ck_finish_instances)
  list(REMOVE_DUPLICATES CK_ALL_HEAD_DIMS)
  ck_only_known(CK_HEAD_DIMS ${CK_ALL_HEAD_DIMS})
  if(NOT CK_INSTANCE_SOURCES)
    message(FATAL_ERROR "No row of instances.cmake is left by CK_BACKENDS=${CK_BACKENDS} CK_DTYPES=${CK_DTYPES} "
      "CK_HEAD_DIMS=${CK_HEAD_DIMS} CK_ARCHS=${CK_ARCHS}. For an installation without kernels: CK_BUILD_KERNELS=OFF.")
  endif()
  configure_file("${CK_DIR}/cmake/registry_table.cpp.in" "${CK_GENERATED}/registry_table.cpp" @ONLY)
endmacro()

function(ck_print_summary)
  list(LENGTH CK_INSTANCE_SOURCES units)
  list(JOIN CK_ARCHS ", " archs)
  set(ccache "not found, or switched off")
  if(CK_CCACHE_PROGRAM)
    set(ccache "${CK_CCACHE_PROGRAM}")
  endif()
  message(STATUS "cutlass_kernels ${PROJECT_VERSION}: ${units} kernel units for ${archs}${CK_SUMMARY}")
  message(STATUS "  nvcc     ${CK_NVCC_VERSION} (${CMAKE_CUDA_COMPILER})")
  message(STATUS "  CUTLASS  ${CK_CUTLASS_VERSION} (${CK_CUTLASS_FOUND_IN})")
  message(STATUS "  ccache   ${ccache}")
  if(CK_BUILD_PYTHON)
    message(STATUS "  Python   ${Python_VERSION} (${Python_EXECUTABLE})")
  endif()
endfunction()
