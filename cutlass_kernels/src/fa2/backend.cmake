# mma.sync and cp.async: what compute capability 8.0 has, and every newer one.
ck_backend(fa2 EVERY_ARCH)
