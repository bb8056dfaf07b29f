"""Fast products on a CPU: linear layers that read weights packed once, and training's products by oneDNN.

A plain matrix product of a few rows packs the whole weight at every call, so that reading 8 tokens costs twice reading
one. oneDNN and MKL can keep the packed form. Which of them wins at which number of rows differs between machines by a
factor of three, so it is measured, on the model's own shapes, when the model is opened (about a second). The operators
are private to torch (inductor uses them): each must give what the plain product gives, or it is not used.

Training changes its weights, so nothing is packed there; but MKL leaves half of an AMD processor's AVX-512 unused, and
oneDNN does not.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MODES = ("auto", "off", "packed", "graph")
ROWS = (1, 8, 32, 128)
"""Row counts that are measured; what lies between follows the nearest one."""
WORTHWHILE = 4_000_000  # weights; below this a forward is all overhead
_MKL_ROWS = 16  # MKL packs for one row count; fewer are padded up to it
Multiply = Callable[[Tensor], Tensor]


class _OneDNN:
    """Weights in oneDNN's blocked layout; one copy serves every row count above 1."""

    rows = ROWS[-1] * 1_000_000

    def __init__(self, layer: nn.Linear) -> None:
        self.bias = layer.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight.default(layer.weight.detach(), 2)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")


class _MKL:
    """Weights packed by MKL for _MKL_ROWS rows."""

    rows = _MKL_ROWS

    def __init__(self, layer: nn.Linear) -> None:
        self.weight, self.bias = layer.weight.detach(), layer.bias
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight.default(self.weight, _MKL_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        full = flat.new_zeros(_MKL_ROWS, x.shape[-1])
        full[: flat.shape[0]] = flat
        out = torch.ops.mkl._mkl_linear.default(full, self.packed, self.weight, self.bias, _MKL_ROWS)
        return out[: flat.shape[0]].reshape(*x.shape[:-1], -1)


_KINDS: dict[str, type[_OneDNN] | type[_MKL]] = {"onednn": _OneDNN, "mkl": _MKL}


@dataclass
class Packed:
    """A module's linear layers and their packed weights; engage() uses them, release() goes back.

    seconds: kind -> one product with every layer, per entry of ROWS, as measured.
    """

    kind: str
    seconds: dict[str, list[float]]
    chosen: list[bool]
    """Per entry of ROWS: whether the packed form is used."""
    layers: list[tuple[nn.Linear, Multiply]] = field(default_factory=list)

    def engage(self) -> None:
        for layer, forward in self.layers:
            layer.forward = forward  # type: ignore[method-assign, assignment]

    def release(self) -> None:
        for layer, _ in self.layers:
            vars(layer).pop("forward", None)

    def describe(self) -> str:
        """For people: what was chosen and what it gains."""
        parts = []
        for rows, on, plain, packed in zip(
            ROWS, self.chosen, self.seconds["plain"], self.seconds[self.kind], strict=True
        ):
            parts.append(f"{rows} rows {1e3 * plain:.0f} -> {1e3 * (packed if on else plain):.0f} ms")
        return f"{self.kind} packed weights ({', '.join(parts)})"


def pack(module: nn.Module, mode: str = "auto", memory: Path | None = None) -> Packed | None:
    """Pack the linear layers of a module in fp32 on the CPU and engage them; None where that brings nothing.

    auto leaves small modules alone, and those whose packed copy would take more than half of the free memory. memory: a
    file in which what was measured is kept, per machine and shapes: the next run chooses, and rounds, the same.
    """
    layers = [layer for layer in module.modules() if type(layer) is nn.Linear]
    if mode in ("off", "graph") or not layers:
        return None
    weights = [layer.weight for layer in layers]
    if any(weight.device.type != "cpu" or weight.dtype != torch.float32 for weight in weights):
        return None
    count = sum(weight.numel() for weight in weights)
    if mode == "auto" and (count < WORTHWHILE or 4 * count > _free_memory() / 2):
        return None
    known = _remembered(memory)
    key = _key(layers)
    if key not in known:
        with torch.inference_mode():
            known[key] = list(_measure(layers))
        if memory is not None:
            memory.parent.mkdir(parents=True, exist_ok=True)
            part = memory.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(known, indent=2) + "\n")
            part.replace(memory)
    kind, seconds = known[key]
    if kind == "plain":
        return None
    chosen = [1.1 * packed < plain for plain, packed in zip(seconds["plain"], seconds[kind], strict=True)]
    packed = Packed(kind, seconds, chosen)
    packed.layers = [(layer, _forward(layer, _KINDS[kind](layer), chosen)) for layer in layers]
    packed.engage()
    return packed


def _remembered(memory: Path | None) -> dict[str, Any]:
    try:
        return json.loads(memory.read_text()) if memory is not None else {}
    except (OSError, ValueError):
        return {}


def _key(layers: list[nn.Linear]) -> str:
    shapes = Counter(tuple(layer.weight.shape) for layer in layers)
    parts = [processor(), torch.get_num_threads(), torch.__version__, sorted(shapes.items())]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def processor() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _forward(layer: nn.Linear, multiply: _OneDNN | _MKL, chosen: list[bool]) -> Multiply:
    """A layer's forward: packed where that was measured faster and no gradient is asked for."""
    weight, bias, width, most = layer.weight, layer.bias, layer.in_features, multiply.rows
    version = weight._version
    one, few, some, many = chosen
    linear = nn.functional.linear

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // width
        use = one if rows == 1 else few if rows <= 16 else some if rows <= 64 else many
        if use and rows <= most and not torch.is_grad_enabled() and weight._version == version:
            return multiply(x)
        return linear(x, weight, bias)

    return forward


def _measure(layers: list[nn.Linear]) -> tuple[str, dict[str, list[float]]]:
    """The kind with the least time over ROWS, and seconds of one product with every layer, per kind and rows."""
    shapes = Counter(tuple(layer.weight.shape) for layer in layers)
    samples = {shape: next(layer for layer in layers if tuple(layer.weight.shape) == shape) for shape in shapes}
    seconds = {"plain": [0.0] * len(ROWS)} | {kind: [0.0] * len(ROWS) for kind in _KINDS}
    for shape, layer in samples.items():
        inputs = [torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(0)) for rows in ROWS]
        # A weight is read from memory, not from the cache it lies in after the last call: go through several copies.
        copies = max(1, min(shapes[shape], 12_000_000 // layer.weight.numel()))
        same = [one for one in layers if tuple(one.weight.shape) == shape][:copies]
        plain: list[Multiply] = [_plain(one) for one in same]
        expected = [plain[0](x) for x in inputs]
        seconds["plain"] = _add(seconds["plain"], [_time(plain, x) * shapes[shape] for x in inputs])
        for kind, make in _KINDS.items():
            times = [float("inf")] * len(ROWS)
            try:
                packed: list[Multiply] = [make(one) for one in same]
                for index, (x, reference) in enumerate(zip(inputs, expected, strict=True)):
                    # The same sum in another order: 1e-3 of the largest entry is far above its rounding.
                    close = 1e-3 * float(reference.abs().max())
                    if len(x) <= make.rows and float((packed[0](x) - reference).abs().max()) <= close:
                        times[index] = _time(packed, x) * shapes[shape]
            except (RuntimeError, AttributeError, NotImplementedError):  # a torch without these operators
                pass
            seconds[kind] = _add(seconds[kind], times)
    best = {
        kind: sum(min(a, b) / a for a, b in zip(seconds["plain"], times, strict=True))
        for kind, times in seconds.items()
    }
    return min(best, key=lambda kind: (best[kind] * (1.0 if kind == "plain" else 1.02), kind)), seconds


def _plain(layer: nn.Linear) -> Multiply:
    return lambda x: nn.functional.linear(x, layer.weight, layer.bias)


def _add(a: list[float], b: list[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _time(products: list[Multiply], x: Tensor) -> float:
    """Median seconds of one product, going through all of them."""
    seen = []
    for _ in range(3):
        start = time.perf_counter()
        for product in products:
            product(x)
        seen.append((time.perf_counter() - start) / len(products))
    return statistics.median(seen[1:])  # no time shift: the first pass warms up


class _Product(torch.autograd.Function):
    """x [n, i] and weight [o, i] to x @ weight.T, forward and backward by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x, to_weight = ctx.needs_input_grad
        return (
            _onednn(gradient, weight.t()) if to_x else None,
            _onednn(gradient.t(), x.t()) if to_weight else None,
        )


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., i] and weight [o, i] to x @ weight.T [..., o]; differentiable once."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32 or not mkl_is_slow():
        return nn.functional.linear(x, weight)
    return _Product.apply(x.reshape(-1, x.shape[-1]), weight).unflatten(0, x.shape[:-1])


@functools.cache
def mkl_is_slow() -> bool:
    """An AVX-512 processor that is not Intel's, and oneDNN's product at hand and right. Not measured: a run that is
    resumed must round as it did before."""
    try:
        vendor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    if "AuthenticAMD" not in vendor or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    x, weight = torch.randn(2, 64, 32).unbind()
    try:
        return torch.allclose(_onednn(x, weight.t().contiguous().t()), x @ weight.t(), atol=1e-4)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def train_fast(module: nn.Module) -> None:
    """Let every linear layer without bias multiply by product() from now on, also while gradients are taken."""
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.bias is None:
            layer.forward = functools.partial(_trained, layer)


def _trained(layer: nn.Linear, x: Tensor) -> Tensor:
    return product(x, layer.weight)


def _free_memory() -> float:
    """Bytes the machine can still give; without limit where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), float("inf"))
