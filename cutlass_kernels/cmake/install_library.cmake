# The C++ library and what find_package(cutlass_kernels CONFIG) needs.
include(CMakePackageConfigHelpers)

add_library(cutlass_kernels)
add_library(cutlass_kernels::cutlass_kernels ALIAS cutlass_kernels)
target_sources(cutlass_kernels PRIVATE $<TARGET_OBJECTS:cutlass_kernels_objects>)
target_include_directories(cutlass_kernels INTERFACE
  $<BUILD_INTERFACE:${CK_DIR}/include>
  $<BUILD_INTERFACE:${CK_GENERATED}/include>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(cutlass_kernels PUBLIC cxx_std_17)
# PRIVATE: a shared library swallows the CUDA runtime; the consumer of a static one links it, which the exported
# target then asks for (see the package configuration file).
target_link_libraries(cutlass_kernels PRIVATE CUDA::cudart_static)
set_target_properties(cutlass_kernels PROPERTIES
  LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
# The CUDA runtime's symbols stay ours: another copy in the process, of another version, must not mix with them.
target_link_options(cutlass_kernels PRIVATE "LINKER:--exclude-libs,ALL")

set(CK_PACKAGE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/cutlass_kernels")
install(TARGETS cutlass_kernels EXPORT cutlass_kernels_targets)
install(DIRECTORY "${CK_DIR}/include/cutlass_kernels" "${CK_GENERATED}/include/cutlass_kernels"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
install(EXPORT cutlass_kernels_targets NAMESPACE cutlass_kernels:: DESTINATION "${CK_PACKAGE_DIR}")
configure_package_config_file("${CK_DIR}/cmake/cutlass_kernels-config.cmake.in"
  "${CK_GENERATED}/cutlass_kernels-config.cmake" INSTALL_DESTINATION "${CK_PACKAGE_DIR}")
write_basic_package_version_file("${CK_GENERATED}/cutlass_kernels-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CK_GENERATED}/cutlass_kernels-config.cmake" "${CK_GENERATED}/cutlass_kernels-config-version.cmake"
  DESTINATION "${CK_PACKAGE_DIR}")
