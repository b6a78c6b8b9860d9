"""Attention of torch with its LSE, and how two states become one: what the peers are written with.

A state is the output ``[..., D]`` and its natural LSE ``[...]``, fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

aten = torch.ops.aten


class State(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


class Lengths(NamedTuple):
    """Of the segments of a varlen call: where they start, int32 on the device, and the longest."""

    starts: torch.Tensor
    longest: int


def lengths(counts: list[int], device: torch.device) -> Lengths:
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return Lengths(torch.tensor(ends, dtype=torch.int32, device=device), max(counts))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> State:
    """The operators beneath torch's SDPA, ``[B, H, L, D]``: cuDNN on a GPU. Causal with as many keys as rows."""
    if q.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    else:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        out, lse, *_ = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return State(out, lse.reshape(out.shape[:3]))  # cuDNN's has a last dimension of 1


def fa2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Lengths,
    keys: Lengths,
    causal: bool,
    used: torch.Tensor | None = None,
    window_left: int = -1,
) -> State:
    """FlashAttention-2 in torch, segments of ``[tokens, H, D]``. Rows stand last among their keys.

    ``used``: int32, keys of each segment, if not all up to the next one.
    """
    if not q.is_cuda:
        return _plain(q, k, v, rows, keys, causal, used, window_left)
    window = {"window_size_left": window_left, "window_size_right": 0} if window_left >= 0 else {}
    arguments = (rows.starts, keys.starts, rows.longest, keys.longest, 0.0, causal, False)
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *arguments, seqused_k=used, **window)
    if lse.shape != (q.size(1), q.size(0)):
        raise RuntimeError(f"FlashAttention-2 returned an LSE of shape {tuple(lse.shape)}, not [heads, rows]")
    return State(out, lse.t())


def fa2_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> State:
    """FlashAttention-2 in torch on ``[B, L, H, D]``: it splits keys between SMs where rows are few."""
    if q.is_cuda:
        out, lse, *_ = aten._flash_attention_forward(q, k, v, None, None, q.size(1), k.size(1), 0.0, causal, False)
        return State(out, lse.transpose(1, 2))
    rows, keys = (lengths([x.size(1)] * x.size(0), x.device) for x in (q, k))
    out, lse = _plain(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), rows, keys, causal, None, -1)
    return State(out.view_as(q), lse.view(q.shape[:3]))


def merge(state: State, other: State) -> None:
    """Adds ``other`` to ``state``, in place. Two passes over the outputs, in fp32; one rounding where out is bf16."""
    total = torch.logaddexp(state.lse, other.lse)
    scaled = state.out * torch.exp(state.lse - total)[..., None]
    torch.addcmul(scaled, other.out, torch.exp(other.lse - total)[..., None], out=state.out)
    state.lse.copy_(total)


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Lengths,
    keys: Lengths,
    causal: bool,
    used: torch.Tensor | None,
    window_left: int,
) -> State:
    """The same in plain PyTorch, for a dry run on the CPU."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    groups = q.size(1) // k.size(1)
    counts = keys.starts.diff() if used is None else used
    row_starts, key_starts = rows.starts.tolist(), keys.starts.tolist()
    for i, count in enumerate(counts.tolist()):
        here, there = slice(row_starts[i], row_starts[i + 1]), slice(key_starts[i], key_starts[i] + count)
        qs = q[here].float().transpose(0, 1)
        ks, vs = (x[there].float().repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
        scores = qs @ ks.mT * q.size(2) ** -0.5
        position = torch.arange(qs.size(1))[:, None] + count - qs.size(1)
        key = torch.arange(count)
        hidden = (key > position) if causal else torch.zeros(qs.size(1), count, dtype=torch.bool)
        if window_left >= 0:
            hidden = hidden | (key < position - window_left)
        scores = scores.masked_fill(hidden, -torch.inf)
        out[here] = (scores.softmax(-1) @ vs).transpose(0, 1).to(q.dtype)
        lse[here] = scores.logsumexp(-1).t()
    return State(out, lse)
