"""FlashMLA's package, as its tests import it."""

from cutlass_kernels.flash_mla import *  # noqa: F403
