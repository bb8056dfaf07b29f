"""Low-rank adapters on a network's linear layers (LoRA, 2106.09685), through peft: the only file that imports it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import UserError

BASE, FACTORS = ".base_layer", ".lora_"


@dataclass(frozen=True)
class LoraConfig:
    """fit.lora and joint.lora."""

    rank: int = 16
    """Of the two factors."""
    alpha: float = 32.0
    """Their product is scaled by alpha / rank."""
    dropout: float = 0.0
    """On the adapters' input, while training."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0 or not 0 <= self.dropout < 1:
            raise UserError("lora.rank must be 1 or more, lora.alpha above 0 and lora.dropout from 0 to below 1")


def add_adapters(
    module: nn.Module, config: LoraConfig, generator: torch.Generator, within: str = ""
) -> dict[str, nn.Parameter]:
    """Freeze a network and put adapters on its linear layers whose names begin with `within`; output matrices excepted.

    They begin as nothing: the network says what it said. generator: a CPU's. Returns the factors by name. Raises
    UserError without peft, and where there is no layer to adapt.
    """
    peft = _peft()
    names = [
        name
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and name.startswith(within) and "lm_head" not in name and "outputs." not in name
    ]
    if not names:
        raise UserError("low-rank adapters need linear layers, and this network has none beside its output matrix")
    own = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=names, bias="none"
    )
    module.requires_grad_(False)
    wide = {name: parameter.dtype for name, parameter in module.named_parameters()}
    with torch.random.fork_rng():  # what peft draws is drawn again below
        peft.inject_adapter_in_model(own, module)
    factors = {name: p for name, p in module.named_parameters() if FACTORS in name}
    for name, parameter in factors.items():
        base = wide[name.split(FACTORS)[0] + ".weight"]
        parameter.data = parameter.data.to(torch.promote_types(base, torch.float32))
        parameter.requires_grad_(True)
        if f"{FACTORS}A" in name:  # the other factor is zero
            drawn = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.copy_((2 * drawn - 1) * parameter.shape[1] ** -0.5)
    return factors


@contextlib.contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Within, the network is what it was before add_adapters()."""
    layers = _adapted(module)
    trained = {name: p.requires_grad for name, p in module.named_parameters()}
    for _, layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for _, layer in layers:
            layer.enable_adapters(True)
        for name, parameter in module.named_parameters():  # enable_adapters() sets it as it sees fit
            parameter.requires_grad_(trained[name])


@torch.no_grad()
def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of the network with its adapters merged, under the names it had before; the network stays as it is."""
    state = {name: value for name, value in module.state_dict().items() if FACTORS not in name}
    for name, layer in _adapted(module):
        key = f"{name}{BASE}.weight"
        state[key] = state[key] + layer.get_delta_weight("default").to(state[key].dtype)
    return {name.replace(BASE + ".", "."): value for name, value in state.items()}


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Merge the adapters into the layers they are on, and remove them."""
    for name, layer in _adapted(module):
        layer.merge()
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, layer.get_base_layer())


def _adapted(module: nn.Module) -> list[tuple[str, Any]]:
    kind = _peft().tuners.tuners_utils.BaseTunerLayer
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, kind)]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError("low-rank adapters need the package peft: .venv/bin/pip install -e '.[peft]'") from error
    return peft
