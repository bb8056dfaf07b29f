"""CUDA graphs: a forward pass of one shape, recorded once and replayed without launching its kernels one by one.

Written for fast=graph; it has been run on a CPU with a stand-in for the recording, not on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, Tensor | None]
Record = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
"""A function without arguments -> (what runs it again, its outputs, which that overwrites)."""


def record_cuda(run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Record on the current device, after running twice on a stream of its own as CUDA graphs ask for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph.replay, outputs


@dataclass
class _Recorded:
    inputs: tuple[Tensor, ...]
    replay: Callable[[], None]
    outputs: Outputs


class Graphs:
    """Recorded forward passes by key and input shapes. The key must name everything else that a pass depends on: the
    memory it reads and writes as well."""

    MOST = 64  # shapes kept; the oldest goes first

    def __init__(self, record: Record = record_cuda) -> None:
        self.record = record
        self.known: dict[Hashable, _Recorded] = {}

    def run(self, key: tuple[Any, ...], inputs: tuple[Tensor, ...], forward: Callable[..., Outputs]) -> Outputs:
        """forward(*inputs), recorded the first time."""
        key = (key, *(tuple(tensor.shape) for tensor in inputs))
        if key not in self.known:
            held = tuple(tensor.clone() for tensor in inputs)
            replay, outputs = self.record(lambda: forward(*held))
            if len(self.known) >= self.MOST:
                del self.known[next(iter(self.known))]
            self.known[key] = _Recorded(held, replay, outputs)
        one = self.known[key]
        for place, tensor in zip(one.inputs, inputs, strict=True):
            place.copy_(tensor)
        one.replay()
        final, features = one.outputs
        return final.clone(), None if features is None else features.clone()
