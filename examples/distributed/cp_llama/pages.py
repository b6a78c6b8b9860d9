"""The KV cache of one rank: pages for every layer, and a page table that all layers share."""

from __future__ import annotations

from typing import Any

import torch


class Pages:
    """Keys and values of the tokens that this rank holds, of every request and layer.

    Block i of a request is ``page_size`` tokens. Rank i % W holds it, in page i // W of the request. ``dcp_decode()``
    expects this with ``block_size=page_size``, and ``layout="interleaved"`` splits prompts alike: a prefill writes its
    keys where decode steps read them, and no key moves in between.

    Args:
        config: of the model.
        lengths: the most tokens of each request, on all ranks together.
        rank, world: this rank, and how many there are.
    """

    def __init__(
        self,
        config: Any,
        lengths: list[int],
        page_size: int,
        rank: int,
        world: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.page_size, self.rank, self.world = page_size, rank, world
        counts = [-(-n // (page_size * world)) for n in lengths]  # pages per request, enough on every rank
        # The order of pages is random, as in an engine that has served other requests before.
        order = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
        table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
        self.table = table.to(device)  # int32 [B, M]
        shape = (2, sum(counts), page_size, config.num_key_value_heads, config.head_dim)
        # [2, pages, P, Hkv, D] per layer: keys, values.
        self.layers = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)]

    def slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of tokens at these positions of these requests: int64 ``[n]``, -1 where another rank holds the token.

        Nothing is read back from the device: a CUDA graph can hold this.
        """
        block = positions // self.page_size
        page = self.table[requests, block // self.world].long()
        slot = page * self.page_size + positions % self.page_size
        return torch.where(block % self.world == self.rank, slot, -1)
