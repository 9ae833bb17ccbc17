# What finds libkvx for C and C++: a CMake package with the target kvx::kvx, and a pkg-config file.
# Both look for library and headers from their own place, so that the tree can be moved.
#
# Takes KVX_LIB_DIR, KVX_INCLUDE_DIR (where library and headers are installed), KVX_PACKAGE_DIR (the
# files below go to its cmake/kvx and pkgconfig), absolute or relative to the prefix, and
# KVX_PC_PREFIX, what pkg-config calls the prefix.
include(CMakePackageConfigHelpers)

# Only a program that links libkvx.a has to know what that needs.
if(KVX_STATIC)
  set(KVX_CONFIG_DEPENDENCIES "include(CMakeFindDependencyMacro)\nfind_dependency(Threads)\n")
  set(KVX_PC_STATIC_LIBS " -lstdc++ -lm -ldl -pthread")
endif()

set(KVX_CMAKE_DIR "${KVX_PACKAGE_DIR}/cmake/kvx")
install(EXPORT kvxTargets NAMESPACE kvx:: DESTINATION "${KVX_CMAKE_DIR}")
configure_file(cmake/kvxConfig.cmake.in kvxConfig.cmake @ONLY)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/kvxConfigVersion.cmake"
                                 VERSION "${KVX_ABI_VERSION}" COMPATIBILITY SameMajorVersion)
install(FILES "${PROJECT_BINARY_DIR}/kvxConfig.cmake" "${PROJECT_BINARY_DIR}/kvxConfigVersion.cmake"
        DESTINATION "${KVX_CMAKE_DIR}")

set(KVX_PC_DIR "${KVX_PACKAGE_DIR}/pkgconfig")
set(KVX_PC_LIB "${KVX_LIB_DIR}")
set(KVX_PC_INCLUDE "${KVX_INCLUDE_DIR}")
cmake_path(ABSOLUTE_PATH KVX_PC_DIR BASE_DIRECTORY "${CMAKE_INSTALL_PREFIX}"
           OUTPUT_VARIABLE KVX_PC_BASE)
foreach(dir KVX_PC_PREFIX KVX_PC_LIB KVX_PC_INCLUDE)
  cmake_path(ABSOLUTE_PATH ${dir} BASE_DIRECTORY "${CMAKE_INSTALL_PREFIX}" NORMALIZE)
  cmake_path(RELATIVE_PATH ${dir} BASE_DIRECTORY "${KVX_PC_BASE}")
  string(REGEX REPLACE "/$" "" ${dir} "${${dir}}")
endforeach()
configure_file(cmake/kvx.pc.in kvx.pc @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/kvx.pc" DESTINATION "${KVX_PC_DIR}")
