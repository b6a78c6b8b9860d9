# The Python extension cutlass_kernels._C: a thin layer over the shared library, which lies beside it. Installed as
# component `python`:
#   cmake --install build --component python --prefix python      puts both into the source tree
include("${CMAKE_CURRENT_LIST_DIR}/find_dlpack.cmake")
set(PYBIND11_NOPYTHON ON)  # headers are all it takes
set(CK_PYBIND11_PLACE "")  # the system's, where Python has none
ck_locate(CK_PYBIND11 pybind11 pybind11)
if(CK_PYBIND11)
  ck_stable_path(CK_PYBIND11 pybind11 "${CK_PYBIND11}")
  set(CK_PYBIND11_PLACE PATHS "${CK_PYBIND11}/share/cmake/pybind11" NO_DEFAULT_PATH)
endif()
find_package(pybind11 2.13 CONFIG REQUIRED ${CK_PYBIND11_PLACE})

# The commit of the sources when CMake was configured, for `info`, with a + where what is compiled had changed since;
# empty outside of a checkout. A new commit configures again.
set(CK_COMMIT "")
find_program(CK_GIT git)
if(CK_GIT AND EXISTS "${PROJECT_SOURCE_DIR}/.git")
  execute_process(COMMAND "${CK_GIT}" rev-parse --short=12 HEAD
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE CK_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  execute_process(COMMAND "${CK_GIT}" rev-parse --git-path logs/HEAD
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE CK_GIT_LOG OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  get_filename_component(CK_GIT_LOG "${CK_GIT_LOG}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
  if(CK_COMMIT)
    execute_process(COMMAND "${CK_GIT}" diff --quiet HEAD -- cutlass_kernels CMakeLists.txt
      WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" RESULT_VARIABLE CK_CHANGED ERROR_QUIET)
    if(NOT CK_CHANGED EQUAL 0)
      string(APPEND CK_COMMIT "+")
    endif()
    if(EXISTS "${CK_GIT_LOG}")
      set_property(DIRECTORY "${PROJECT_SOURCE_DIR}" APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CK_GIT_LOG}")
    endif()
  else()
    message(STATUS "git does not tell the commit of ${PROJECT_SOURCE_DIR}: `info` will not, either")
  endif()
endif()
configure_file("${CK_DIR}/bindings/commit.cpp.in" "${CK_GENERATED}/commit.cpp" @ONLY)

# The arguments of attention(), in the order of the rows of Call: kQ, kK, ..., kCuSeqlensQ, ...
set(CK_CALL "${PROJECT_SOURCE_DIR}/python/cutlass_kernels/_core/call_table.py")
set_property(DIRECTORY "${PROJECT_SOURCE_DIR}" APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CK_CALL}")
file(READ "${CK_CALL}" text)
string(REGEX MATCHALL "\n    [a-z0-9_]+: Annotated" rows "${text}")
set(CK_CALL_ARGUMENTS "")
set(CK_CALL_NAMES "")
foreach(row IN LISTS rows)
  string(REGEX REPLACE "\n    ([a-z0-9_]+):.*" "\\1" name "${row}")
  list(APPEND CK_CALL_NAMES "${name}")
  string(REGEX MATCHALL "_[a-z0-9]+" words "_${name}")
  string(APPEND CK_CALL_ARGUMENTS "  k")
  foreach(word IN LISTS words)
    string(SUBSTRING "${word}" 1 1 initial)
    string(SUBSTRING "${word}" 2 -1 rest)
    string(TOUPPER "${initial}" initial)
    string(APPEND CK_CALL_ARGUMENTS "${initial}${rest}")
  endforeach()
  string(APPEND CK_CALL_ARGUMENTS ",\n")
endforeach()
list(JOIN CK_CALL_NAMES " " CK_CALL_NAMES)
configure_file("${CK_DIR}/bindings/call_arguments.h.in" "${CK_GENERATED}/include/call_arguments.h" @ONLY)

list(JOIN CK_REAL_ARCHS "," CK_MACHINE_CODES)

# One unit, so names that are local to a file must differ: pybind11.h takes 8 of the 9 seconds of each.
set(CK_PYBIND11_SOURCES "${CK_DIR}/bindings/module.cpp" "${CK_DIR}/bindings/batch.cpp")
set_source_files_properties(${CK_PYBIND11_SOURCES} PROPERTIES UNITY_GROUP pybind11)

# ck_add_extension(NAME PYTHON): the extension for one interpreter, of which it needs the headers and the file suffix.
function(ck_add_extension name python)
  execute_process(
    COMMAND "${python}" -c
      "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep=';', end='')"
    OUTPUT_VARIABLE facts COMMAND_ERROR_IS_FATAL ANY)
  list(GET facts 0 include)
  list(GET facts 1 suffix)
  if(NOT EXISTS "${include}/Python.h")
    message(FATAL_ERROR "${python} has no headers (${include}/Python.h): install them (python3-dev).")
  endif()
  add_library(${name} MODULE
    ${CK_PYBIND11_SOURCES} "${CK_GENERATED}/commit.cpp"
    "${CK_DIR}/bindings/append.cpp" "${CK_DIR}/bindings/call.cpp" "${CK_DIR}/bindings/direct.cpp"
    "${CK_DIR}/bindings/fused.cpp" "${CK_DIR}/bindings/indices.cpp" "${CK_DIR}/bindings/merge.cpp"
    "${CK_DIR}/bindings/prepare.cpp" "${CK_DIR}/bindings/quantized.cpp" "${CK_DIR}/bindings/rope.cpp"
    "${CK_DIR}/bindings/run.cpp" "${CK_DIR}/bindings/slots.cpp" "${CK_DIR}/bindings/torch.cpp"
    "${CK_DIR}/bindings/unplanned.cpp")
  target_include_directories(${name} PRIVATE "${CK_DIR}/include" "${CK_DIR}/src" "${CK_GENERATED}/include")
  target_include_directories(${name} SYSTEM PRIVATE
    "${include}" "${pybind11_INCLUDE_DIR}" "${CK_DLPACK_INCLUDE}")
  target_compile_definitions(${name} PRIVATE "CK_CUTLASS_VERSION=\"${CK_CUTLASS_VERSION}\""
    CK_ARCHS_MIN=${CK_ARCHS_MIN} CK_ARCHS_MAX=${CK_ARCHS_MAX} "CK_MACHINE_CODES=${CK_MACHINE_CODES}"
    CK_PYBIND11_VERSION=${pybind11_VERSION})  # read by nobody, but makes objects of another out of date
  target_compile_options(${name} PRIVATE ${CK_COMPILE_OPTIONS})
  target_link_libraries(${name} PRIVATE cutlass_kernels_shared ck_old_runtime)
  target_link_options(${name} PRIVATE
    "LINKER:--version-script=${CMAKE_CURRENT_FUNCTION_LIST_DIR}/extension.map" "LINKER:--no-undefined-version")
  set_target_properties(${name} PROPERTIES PREFIX "" OUTPUT_NAME _C SUFFIX "${suffix}" LINKER_LANGUAGE CXX
    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN" UNITY_BUILD ON UNITY_BUILD_MODE GROUP
    LINK_DEPENDS "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/extension.map")
  ck_strip(${name})
  install(TARGETS ${name} DESTINATION cutlass_kernels COMPONENT python)
endfunction()

ck_add_extension(_C "${Python_EXECUTABLE}")
add_custom_target(cutlass_kernels_python DEPENDS _C)
set(CK_COUNT 0)
foreach(python IN LISTS CK_EXTENSION_PYTHONS)
  math(EXPR CK_COUNT "${CK_COUNT} + 1")
  ck_add_extension(_C_${CK_COUNT} "${python}")
  add_dependencies(cutlass_kernels_python _C_${CK_COUNT})
endforeach()
# Under the name by which the extension asks for it: a wheel holds no links.
install(FILES $<TARGET_FILE:cutlass_kernels_shared> DESTINATION cutlass_kernels COMPONENT python
  RENAME $<TARGET_SONAME_FILE_NAME:cutlass_kernels_shared>
  PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
