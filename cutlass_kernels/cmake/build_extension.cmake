# The Python extension cutlass_kernels._C, from the same objects as the library. Installed as component `python`:
#   cmake --install build --component python --prefix python      puts it into the source tree
include("${CMAKE_CURRENT_LIST_DIR}/find_dlpack.cmake")
set(PYBIND11_FINDPYTHON ON)
set(CK_PYBIND11_PLACE "")  # the system's, where Python has none
ck_locate(CK_PYBIND11 pybind11 pybind11)
if(CK_PYBIND11)
  ck_stable_path(CK_PYBIND11 pybind11 "${CK_PYBIND11}")
  set(CK_PYBIND11_PLACE PATHS "${CK_PYBIND11}/share/cmake/pybind11" NO_DEFAULT_PATH)
endif()
find_package(pybind11 2.13 CONFIG REQUIRED ${CK_PYBIND11_PLACE})

pybind11_add_module(_C MODULE NO_EXTRAS
  "${CK_DIR}/bindings/module.cpp" "${CK_DIR}/bindings/append.cpp" "${CK_DIR}/bindings/batch.cpp"
  "${CK_DIR}/bindings/direct.cpp" "${CK_DIR}/bindings/fused.cpp" "${CK_DIR}/bindings/indices.cpp"
  "${CK_DIR}/bindings/merge.cpp" "${CK_DIR}/bindings/prepare.cpp" "${CK_DIR}/bindings/run.cpp"
  "${CK_DIR}/bindings/single.cpp" "${CK_DIR}/bindings/torch.cpp")
target_include_directories(_C PRIVATE "${CK_DIR}/include" "${CK_DIR}/src" "${CK_GENERATED}/include")
target_include_directories(_C SYSTEM PRIVATE "${CK_DLPACK_INCLUDE}")
target_compile_definitions(_C PRIVATE "CK_CUTLASS_VERSION=\"${CK_CUTLASS_VERSION}\""
  CK_ARCHS_MIN=${CK_ARCHS_MIN} CK_ARCHS_MAX=${CK_ARCHS_MAX}
  CK_PYBIND11_VERSION=${pybind11_VERSION})  # read by nobody, but makes objects of another out of date
target_compile_options(_C PRIVATE ${CK_COMPILE_OPTIONS})
target_link_libraries(_C PRIVATE cutlass_kernels_objects CUDA::cudart_static)
# libstdc++ and libgcc are the system's, everything else of ours is inside; only PyInit__C is visible.
target_link_options(_C PRIVATE "LINKER:--version-script=${CMAKE_CURRENT_LIST_DIR}/extension.map" "LINKER:--no-undefined-version")
set_target_properties(_C PROPERTIES LINKER_LANGUAGE CXX LINK_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/extension.map")
if(CMAKE_STRIP)
  add_custom_command(TARGET _C POST_BUILD COMMAND "${CMAKE_STRIP}" --strip-unneeded $<TARGET_FILE:_C>)
endif()
install(TARGETS _C DESTINATION cutlass_kernels COMPONENT python)
