# The C++ library, static and shared, of the same objects, and what find_package(cutlass_kernels CONFIG) needs. All that
# is built and installed is the one that BUILD_SHARED_LIBS names; where both have been built, as pip does, either can
# be:
#   cmake --install <build directory> --component static|shared --prefix <prefix>
include(CMakePackageConfigHelpers)

set(CK_PACKAGE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/cutlass_kernels")
write_basic_package_version_file("${CK_GENERATED}/cutlass_kernels-config-version.cmake" COMPATIBILITY SameMinorVersion)

set(CK_DEFAULT_LINKAGE static)
if(BUILD_SHARED_LIBS)
  set(CK_DEFAULT_LINKAGE shared)
endif()

# ck_strip(TARGET): without symbols that nothing outside needs.
function(ck_strip target)
  if(CMAKE_STRIP)
    add_custom_command(TARGET ${target} POST_BUILD COMMAND "${CMAKE_STRIP}" --strip-unneeded $<TARGET_FILE:${target}>)
  endif()
endfunction()

function(ck_add_library linkage)
  set(library cutlass_kernels_${linkage})
  string(TOUPPER ${linkage} type)
  set(unless_asked "")
  if(NOT linkage STREQUAL CK_DEFAULT_LINKAGE)
    set(unless_asked EXCLUDE_FROM_ALL)
  endif()
  add_library(${library} ${type} ${unless_asked} $<TARGET_OBJECTS:cutlass_kernels_objects>)
  target_include_directories(${library} INTERFACE
    $<BUILD_INTERFACE:${CK_DIR}/include>
    $<BUILD_INTERFACE:${CK_GENERATED}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(${library} PUBLIC cxx_std_17)
  # PRIVATE: a shared library swallows the CUDA runtime; the consumer of a static one links it, which the exported
  # target then asks for (see the package configuration file).
  target_link_libraries(${library} PRIVATE CUDA::cudart_static)
  set_target_properties(${library} PROPERTIES OUTPUT_NAME cutlass_kernels EXPORT_NAME cutlass_kernels
    LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  if(linkage STREQUAL "shared")
    # The CUDA runtime's symbols stay ours: another copy in the process, of another version, must not mix with them.
    target_link_options(${library} PRIVATE "LINKER:--exclude-libs,ALL")
    target_link_libraries(${library} PRIVATE $<BUILD_INTERFACE:ck_old_runtime>)
    # The stubs of CK_MANYLINUX must not be found when a program runs.
    set_target_properties(${library} PROPERTIES BUILD_WITH_INSTALL_RPATH ON)
    ck_strip(${library})
  endif()

  set(rule COMPONENT ${linkage} ${unless_asked})
  install(TARGETS ${library} EXPORT ${library} ${rule})
  install(DIRECTORY "${CK_DIR}/include/cutlass_kernels" "${CK_GENERATED}/include/cutlass_kernels"
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" ${rule} FILES_MATCHING PATTERN "*.h")
  install(EXPORT ${library} NAMESPACE cutlass_kernels:: FILE ${library}_targets.cmake
    DESTINATION "${CK_PACKAGE_DIR}" ${rule})
  configure_package_config_file("${CK_DIR}/cmake/cutlass_kernels-config.cmake.in"
    "${CK_GENERATED}/${linkage}/cutlass_kernels-config.cmake" INSTALL_DESTINATION "${CK_PACKAGE_DIR}")
  install(FILES "${CK_GENERATED}/${linkage}/cutlass_kernels-config.cmake"
    "${CK_GENERATED}/cutlass_kernels-config-version.cmake" DESTINATION "${CK_PACKAGE_DIR}" ${rule})
endfunction()

ck_add_library(static)
ck_add_library(shared)
add_library(cutlass_kernels::cutlass_kernels ALIAS cutlass_kernels_${CK_DEFAULT_LINKAGE})
