"""Block-sparse attention: each block of query rows sees some blocks of keys."""

from ._sparse.block_sparse import BlockSparseAttentionWrapper, convert_bsr_mask_layout
from ._sparse.variable_blocks import VariableBlockSparseAttentionWrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]
