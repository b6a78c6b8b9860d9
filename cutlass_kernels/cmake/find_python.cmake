# A Python interpreter: it finds the headers of installed packages and runs the compiler guard. With CK_BUILD_PYTHON
# the extension is built for it, so -DPython3_EXECUTABLE (or -DPython_EXECUTABLE) also chooses the extension's version.
if(Python3_EXECUTABLE AND NOT Python_EXECUTABLE)
  set(Python_EXECUTABLE "${Python3_EXECUTABLE}")
endif()
set(Python_FIND_VIRTUALENV FIRST)
if(CK_BUILD_PYTHON)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
else()
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
endif()

# Interpreters to ask about installed packages: the one above, then the one on PATH. They differ where the extension is
# built for a Python in which the build requirements are not installed.
find_program(CK_PATH_PYTHON NAMES python3 python NO_CACHE)
set(CK_PYTHONS "${Python_EXECUTABLE}")
if(CK_PATH_PYTHON)
  list(APPEND CK_PYTHONS "${CK_PATH_PYTHON}")
endif()

# ck_locate(RESULT PACKAGE PATH): the path of a file or folder of an installed Python package, or "" if there is none.
# Asks the package's metadata and imports nothing.
function(ck_locate result package path)
  set(${result} "" PARENT_SCOPE)
  foreach(python IN LISTS CK_PYTHONS)
    execute_process(
      COMMAND "${python}" -c
        "import sys; from importlib.metadata import distribution as d; print(d(sys.argv[1]).locate_file(sys.argv[2]))"
        "${package}" "${path}"
      OUTPUT_VARIABLE found ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE code)
    if(code EQUAL 0 AND EXISTS "${found}")
      set(${result} "${found}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()
