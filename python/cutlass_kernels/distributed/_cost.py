"""How long transfers and attention take, roughly: enough to choose between ways to do the same.

All ranks must choose alike, so estimates are made from what every rank knows, not from clocks or device facts.
"""

from __future__ import annotations

from ._plans import Plan

# Two H100s, 2026-11-26: copies over NVLink by the copy engines, and causal attention of 16k to 128k tokens.
LINK_BYTES_PER_SECOND = 350e9
FLOPS_PER_SECOND = 650e12

# A second turn of heads costs the host 0.15 ms, which only longer attention hides, but for calls in a graph. It pays
# where transfers are more than 3 % of the time (H100: nine requests of 512 to 32k tokens 0.95 of linear, not 0.91;
# with a window of 4k 0.93, not 1.00).
LEAST_SECONDS = 1e-3
LEAST_SHARE = 0.03


def turns(plan: Plan, num_qo_heads: int, row_bytes: int, head_dims: int, captured: bool) -> int:
    """Groups of heads whose keys are gathered one after another; ``row_bytes`` of a key and value of all heads,
    ``head_dims`` of QK and VO together."""
    seconds = max(g.pairs for g in plan.gathers) * 2 * head_dims * num_qo_heads / FLOPS_PER_SECOND
    transfer = max(g.pulled_rows for g in plan.gathers) * row_bytes / LINK_BYTES_PER_SECOND
    return 2 if transfer > LEAST_SHARE * seconds and (captured or seconds > LEAST_SECONDS) else 1
