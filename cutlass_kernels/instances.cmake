# The compiled kernels: one row is one translation unit, generated from src/<backend>/attention.cu.in (of 8-bit queries
# attention_fp8.cu.in), and one entry of list_kernels(), or several (16bit: float16 and bfloat16; latent_528: the formats
# of quantized latent caches with 528 bytes per token). A unit contains every variant its kernel has for run-time
# features (masks, soft cap, sinks). A row may name another TEMPLATE of src/. Head dimensions between two rows are served
# by the larger one, zero-padded on load.
# Of two elements the first is that of the queries, the second that of the keys and values. Kernels write the type of
# the queries, those of fp8 queries both types of 16 bits; unsupported types are computed from copies of 16 bits.
#
# A backend is a folder of src/ with a file backend.cmake, which says what its kernels are compiled to, and an
# enumerator of Backend (types.h) of the same name. Where two serve a request, kAuto takes the first: the fastest, but
# for decoding.
ck_backends(fa3 fa2)

#           backend element                head_dim  compute      features
#                                          qk   vo   capability
#                                                    min max (0: no limit)
ck_instance(fa2     float16                64   64   80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa2     bfloat16               64   64   80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa2     float16                96   96   80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa2     bfloat16               96   96   80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa2     float16                128  128  80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa2     bfloat16               128  128  80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa2     float16                256  256  80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa2     bfloat16               256  256  80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa2     float16                512  512  80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa2     bfloat16               512  512  80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa2     16bit/float8_e4m3fn    64   64   80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa2     16bit/float8_e5m2      64   64   80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa2     16bit/float8_e4m3fn    128  128  80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa2     16bit/float8_e5m2      128  128  80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa2     16bit/float8_e4m3fn    256  256  80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa2     16bit/float8_e5m2      256  256  80  0        interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa2     float16                576  512  80  0        interval_mask soft_cap sinks ragged_kv paged_kv general_mask device_scales TEMPLATE latent/fa2/attention.cu.in)
ck_instance(fa2     bfloat16               576  512  80  0        interval_mask soft_cap sinks ragged_kv paged_kv general_mask device_scales TEMPLATE latent/fa2/attention.cu.in)
ck_instance(fa2     float16/float8_e4m3fn  576  512  80  0        interval_mask soft_cap sinks ragged_kv paged_kv general_mask device_scales TEMPLATE latent/fa2/attention.cu.in)
ck_instance(fa2     bfloat16/float8_e4m3fn 576  512  80  0        interval_mask soft_cap sinks ragged_kv paged_kv general_mask device_scales TEMPLATE latent/fa2/attention.cu.in)
ck_instance(fa3     float16                64   64   90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     bfloat16               64   64   90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     float16                96   96   90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     bfloat16               96   96   90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     float16                128  128  90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     bfloat16               128  128  90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     float16                192  128  90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     bfloat16               192  128  90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     float16                192  192  90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     bfloat16               192  192  90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     float16                256  256  90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     bfloat16               256  256  90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     float16                512  512  90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     bfloat16               512  512  90  90       interval_mask soft_cap sinks ragged_kv paged_kv bit_mask general_mask alibi device_scales stats)
ck_instance(fa3     float16/float8_e4m3fn  64   64   90  90       interval_mask soft_cap sinks paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa3     bfloat16/float8_e4m3fn 64   64   90  90       interval_mask soft_cap sinks paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa3     float16/float8_e4m3fn  128  128  90  90       interval_mask soft_cap sinks paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa3     bfloat16/float8_e4m3fn 128  128  90  90       interval_mask soft_cap sinks paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa3     float16/float8_e4m3fn  256  256  90  90       interval_mask soft_cap sinks paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa3     bfloat16/float8_e4m3fn 256  256  90  90       interval_mask soft_cap sinks paged_kv bit_mask general_mask alibi device_scales)
ck_instance(fa3     float8_e4m3fn          64   64   90  90       interval_mask soft_cap sinks ragged_kv paged_kv device_scales)
ck_instance(fa3     float8_e4m3fn          128  128  90  90       interval_mask soft_cap sinks ragged_kv paged_kv device_scales)
ck_instance(fa3     float8_e4m3fn          256  256  90  90       interval_mask soft_cap sinks ragged_kv paged_kv device_scales)
ck_instance(fa3     float16                576  512  90  90       interval_mask soft_cap sinks ragged_kv paged_kv general_mask TEMPLATE latent/fa3/attention.cu.in)
ck_instance(fa3     bfloat16               576  512  90  90       interval_mask soft_cap sinks ragged_kv paged_kv general_mask TEMPLATE latent/fa3/attention.cu.in)
ck_instance(fa3     bfloat16/latent_v32    576  512  90  90       interval_mask soft_cap sinks paged_kv TEMPLATE latent/fa3/quantized.cu.in)
ck_instance(fa3     bfloat16/latent_v4     512  512  90  90       interval_mask soft_cap sinks paged_kv TEMPLATE latent/fa3/quantized.cu.in)
ck_instance(fa3     bfloat16/latent_528    512  512  90  90       interval_mask soft_cap sinks paged_kv TEMPLATE latent/fa3/quantized.cu.in)
