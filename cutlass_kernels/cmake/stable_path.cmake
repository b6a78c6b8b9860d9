# pip builds in a new environment each time: its path is new, and so are the dates of its files. Objects must stay up to
# date all the same, or every `pip install` without ccache takes nine minutes. So
#
# * commands name what lies in the environment by links in the build directory;
# * headers of packages are not dependencies; commands contain the packages' versions instead;
# * objects lie in a folder that scikit-build-core does not remove (CMakeLists.txt).

# ck_stable_path(RESULT NAME TARGET): sets RESULT to a link of this name to a file or folder.
function(ck_stable_path result name target)
  set(link "${PROJECT_BINARY_DIR}/${name}")
  file(REMOVE "${link}")
  file(CREATE_LINK "${target}" "${link}" SYMBOLIC)
  set(${result} "${link}" PARENT_SCOPE)
endfunction()

# Takes headers in system directories, where those of packages are, out of the dependencies. A macro, because CMake
# reads the variables where it finds the targets.
macro(ck_ignore_system_headers)
  foreach(language CXX CUDA)
    string(REPLACE "-MD " "-MMD " CMAKE_DEPFILE_FLAGS_${language} "${CMAKE_DEPFILE_FLAGS_${language}}")
  endforeach()
endmacro()
