"""FlashAttention's package, as its tests import it: rotary embeddings are those of the checkout."""

import os

from cutlass_kernels.flash_attn import *  # noqa: F403

__path__.append(os.environ["CK_CONFORMANCE_CHECKOUT"] + "/flash_attn")  # noqa: F405
