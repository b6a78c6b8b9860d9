"""Every public call in a CUDA graph: replays compute what the call computes, also of other contents of its tensors."""

from __future__ import annotations

import torch
from captures import capture
from compare import assert_bitwise
from registry import Call, Data, Entry, each, several


def replayed(call: Call, tensors: tuple[torch.Tensor, ...]):
    """A function that replays the captured call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call.run(*(x.clone() for x in tensors))
    torch.cuda.current_stream().wait_stream(side)
    graph, results = capture(lambda: several(call.run(*tensors)), warm_up=0)

    def replay() -> tuple[torch.Tensor, ...]:
        graph.replay()
        return (*results, *tensors) if call.writes else results

    return replay


@each(lambda entry: not entry.name.startswith("distributed.") and entry.compiles != "no")
def test_replays(kernels, entry: Entry):
    for call in entry.calls(Data(kernels)):
        mine = call.copies()
        replay = replayed(call, mine)
        for factor in (1.0, 0.5):
            for x, first in zip(mine, call.tensors):
                x.copy_(first * factor if x.dtype == torch.float16 else first)
            want = call(tuple(x.clone() for x in mine))
            for a, b in zip(replay(), want):
                assert_bitwise(a, b)
