"""FlashAttention-3's module, as its tests import it."""

from cutlass_kernels.flash_attn import *  # noqa: F403
