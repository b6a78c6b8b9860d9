# wgmma and TMA as compute capability 9.0 has them, and no other.
ck_backend(fa3 ARCHS 90a SOURCES tensor_map.cpp tensor_map_limits.cpp)
