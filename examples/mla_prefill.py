"""Prefill of a model with latent attention (DeepSeek-V2 and V3) over prefixes that are in the cache already, in chunks.

    python examples/mla_prefill.py                  on the GPU if there is one
    python examples/mla_prefill.py --device cpu --heads 4 --chunk 64

Decode steps read the latent cache itself (absorbed form, 576 columns). For long prompts it is cheaper to project the
latent vectors up to keys of 192 and values of 128 columns. Those of a whole prefix would not fit beside the cache, so
serving engines take a chunk of the prefix at a time, and merge the partial results by their LSEs:

    new tokens    causal attention to themselves
    each chunk    attention of the new tokens to the chunk, without a mask; merge_state_in_place() adds it

The result is compared with attention to all keys at once, and with the absorbed form.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

import cutlass_kernels as ck
from cutlass_kernels import mla

RANK, NOPE, ROPE, V_DIM = 512, 128, 64, 128  # DeepSeek's sizes
PAGE = 64
SCALE = (NOPE + ROPE) ** -0.5


@dataclass
class Weights:
    """The up-projections of one layer."""

    key: torch.Tensor  # [heads, NOPE, RANK]
    value: torch.Tensor  # [heads, V_DIM, RANK]

    def up(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[tokens, heads, 192]`` and values ``[tokens, heads, 128]`` of rows ``[tokens, 576]`` of the cache."""
        kv_c, k_pe = latent.split([RANK, ROPE], -1)
        k_nope = torch.einsum("tr,hdr->thd", kv_c, self.key)
        k_pe = k_pe.unsqueeze(1).expand(-1, k_nope.size(1), -1)
        return torch.cat([k_nope, k_pe], -1), torch.einsum("tr,hdr->thd", kv_c, self.value)


def indptr(lens: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=device)


def gather(cache: torch.Tensor, table: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """Tokens ``[begin, end)`` of each request, one request after the other: ``[tokens, 576]``."""
    slots = []
    for b, (begin, end) in enumerate(spans):
        at = torch.arange(begin, end, device=cache.device)
        slots.append(table[b, at // PAGE] * PAGE + at % PAGE)
    return cache.flatten(0, 1)[torch.cat(slots)]


def prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    weights: Weights,
    prefixes: list[int],
    new: list[int],
    chunk: int,
) -> torch.Tensor:
    """Attention of the new tokens to their prefixes and themselves. At most ``chunk`` tokens of a prefix at a time."""
    offsets = indptr(new, q.device.type)
    rows = dict(cu_seqlens_q=offsets, max_seqlen_q=max(new), sm_scale=SCALE, return_lse=True)
    k, v = weights.up(gather(cache, table, [(p, p + n) for p, n in zip(prefixes, new)]))
    out, lse = ck.attention(q, k, v, cu_seqlens_k=offsets, max_seqlen_k=max(new), causal=True, **rows)
    for begin in range(0, max(prefixes), chunk):
        spans = [(min(begin, p), min(begin + chunk, p)) for p in prefixes]
        lens = [end - start for start, end in spans]
        k, v = weights.up(gather(cache, table, spans))
        part, part_lse = ck.attention(q, k, v, cu_seqlens_k=indptr(lens, q.device.type), max_seqlen_k=max(lens), **rows)
        ck.merge_state_in_place(out, lse, part, part_lse)  # LSE -inf where a request has nothing in this chunk
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prefix at a time (default 1024)")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[3000, 0, 700], help="tokens in the cache")
    parser.add_argument("--new", type=int, nargs="+", default=[64, 200, 1], help="new tokens of each request")
    args = parser.parse_args()
    if len(args.prefixes) != len(args.new) or min(args.prefixes) < 0 or min([*args.new, args.chunk, args.heads]) < 1:
        parser.error(
            "--prefixes and --new need a number for each request, and --new, --chunk and --heads positive ones"
        )
    torch.manual_seed(0)
    device, dtype = args.device.split(":")[0], torch.bfloat16
    if args.device != device:
        torch.cuda.set_device(args.device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    # The cache: pages of 64 tokens in any order, written by slots, as engines do.
    lens = [p + n for p, n in zip(args.prefixes, args.new)]
    width = -(-max(lens) // PAGE)
    table = torch.randperm(len(lens) * width, device=device).to(torch.int32).view(len(lens), width)
    cache = torch.zeros(table.numel(), PAGE, RANK + ROPE, dtype=dtype, device=device)
    for b, count in enumerate(lens):
        at = torch.arange(count, device=device)
        slots = table[b, at // PAGE].long() * PAGE + at % PAGE
        mla.concat_and_cache_mla(random(count, RANK), random(count, ROPE), cache, slots)

    weights = Weights(random(args.heads, NOPE, RANK) / 16, random(args.heads, V_DIM, RANK) / 16)
    q = random(sum(args.new), args.heads, NOPE + ROPE)
    out = prefill(q, cache, table, weights, args.prefixes, args.new, args.chunk)

    # All keys at once.
    k, v = weights.up(gather(cache, table, [(0, n) for n in lens]))
    of_rows, of_keys = indptr(args.new, device), indptr(lens, device)
    whole = ck.attention(
        q, k, v, cu_seqlens_q=of_rows, cu_seqlens_k=of_keys, max_seqlen_q=max(args.new), causal=True, sm_scale=SCALE
    )
    # The absorbed form: queries in the latent space, and no keys but the cache.
    q_nope, q_pe = q.split([NOPE, ROPE], -1)
    absorbed = torch.einsum("thd,hdr->thr", q_nope, weights.key)
    ckv, kpe = (x.unsqueeze(2) for x in cache.split([RANK, ROPE], -1))
    latent = ck.attention(
        absorbed,
        ckv,
        ckv,
        q_rope=q_pe,
        k_rope=kpe,
        cu_seqlens_q=of_rows,
        max_seqlen_q=max(args.new),
        page_table=table,
        seqused_k=torch.tensor(lens, dtype=torch.int32, device=device),
        causal=True,
        sm_scale=SCALE,
    )
    latent = torch.einsum("thr,hdr->thd", latent, weights.value)

    print(f"{sum(args.new)} new tokens of {len(lens)} requests over {sum(args.prefixes)} cached ones, on {device}")
    for name, other in (("all keys at once", whole), ("the absorbed form", latent)):
        difference = (out.float() - other.float()).abs().max().item()
        print(f"largest difference from {name}: {difference:.4f} (largest value {other.abs().max().item():.2f})")
        torch.testing.assert_close(out, other, atol=5e-2, rtol=5e-2)
    print("equal up to rounding")


if __name__ == "__main__":
    main()
