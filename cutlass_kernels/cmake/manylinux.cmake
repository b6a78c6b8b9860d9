# CK_MANYLINUX: libraries that run where the C and C++ runtimes are as old as those of manylinux_2_28, linked on any
# newer machine. A symbol gets the version of the library that the linker finds it in. So for each symbol that a newer
# runtime has under a newer version, the linker first finds a stub that has the old one, which every newer runtime has,
# too. `auditwheel show` proves that the list is complete.
add_library(ck_old_runtime INTERFACE)
if(NOT CK_MANYLINUX)
  return()
endif()

# ck_stub(SONAME VERSION,SYMBOL,...  VERSION,SYMBOL,...)
function(ck_stub soname)
  set(folder "${PROJECT_BINARY_DIR}/old_runtime")
  set(source "")
  set(map "")
  foreach(symbols IN LISTS ARGN)
    string(REPLACE "," ";" symbols "${symbols}")
    list(POP_FRONT symbols version)
    foreach(symbol IN LISTS symbols)
      string(APPEND source ".globl ${symbol}\n.type ${symbol}, @function\n${symbol}:\n")
    endforeach()
    list(JOIN symbols "; " symbols)
    string(APPEND map "${version} { global: ${symbols}; };\n")
  endforeach()
  file(WRITE "${folder}/${soname}.s" ".text\n${source}")
  file(WRITE "${folder}/${soname}.map" "${map}")
  execute_process(
    COMMAND "${CMAKE_CXX_COMPILER}" -shared -nostdlib "-Wl,-soname,${soname}"
      "-Wl,--version-script=${folder}/${soname}.map" "${folder}/${soname}.s" -o "${folder}/${soname}"
    COMMAND_ERROR_IS_FATAL ANY)
  target_link_libraries(ck_old_runtime INTERFACE "${folder}/${soname}")
endfunction()

set(CK_PTHREAD_SYMBOLS
  pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join pthread_key_create
  pthread_key_delete pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy pthread_mutexattr_init
  pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once pthread_rwlock_destroy pthread_rwlock_init
  pthread_rwlock_rdlock pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock
  pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock pthread_rwlockattr_destroy
  pthread_rwlockattr_init pthread_rwlockattr_setpshared pthread_setspecific pthread_spin_destroy pthread_spin_init
  pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init sem_post sem_timedwait sem_trywait
  sem_wait)
list(JOIN CK_PTHREAD_SYMBOLS "," CK_PTHREAD_SYMBOLS)
ck_stub(libpthread.so.0 GLIBC_2.2.5,${CK_PTHREAD_SYMBOLS})
ck_stub(libdl.so.2 GLIBC_2.2.5,dlclose,dlerror,dlopen,dlsym,dlvsym GLIBC_2.3.4,dlmopen)
ck_stub(librt.so.1 GLIBC_2.2.5,shm_open,shm_unlink)
ck_stub(libm.so.6 GLIBC_2.2.5,exp,exp2,log,log2,pow)
# What older runtimes do not have at all.
add_library(ck_newer_runtime OBJECT "${CMAKE_CURRENT_SOURCE_DIR}/cutlass_kernels/cmake/newer_runtime.cpp")
target_link_libraries(ck_old_runtime INTERFACE $<TARGET_OBJECTS:ck_newer_runtime>)
