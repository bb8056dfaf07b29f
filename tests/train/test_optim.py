import itertools

import pytest
import torch
from torch import nn

from train.optim import SCHEDULES, Optimizers, schedule


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_rise_then_fall_to_their_floor(kind):
    factors = [schedule(kind, step, 100, 10, 0.1) for step in range(101)]
    assert all(a < b for a, b in itertools.pairwise(factors[:11]))
    assert factors[10] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))
    assert factors[100] == pytest.approx(1.0 if kind == "constant" else 0.1)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_each_parameter_moves_by_its_own_learning_rate(kind):
    parameters = {name: nn.Parameter(torch.zeros(4, 4)) for name in ("a.weight", "target.b", "lm_head.weight")}
    optimizer = Optimizers(parameters, kind, 1e-2, 0.0, {"target.b": 0.1})
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters.values():
        parameter.grad = torch.randn(4, 4, generator=generator)
    optimizer.step(0.5)
    moved = {name: float(parameter.detach().abs().max()) for name, parameter in parameters.items()}
    assert moved["lm_head.weight"] == pytest.approx(5e-3, rel=1e-3)
    assert moved["target.b"] == pytest.approx(5e-4, rel=1e-3)
    muon = [one for one in optimizer.all if isinstance(one, torch.optim.Muon)]
    assert len(muon) == (kind == "muon")
    for one in muon:
        assert [group["params"] for group in one.param_groups] == [[parameters["a.weight"]]], "hidden matrices only"


def test_every_parameter_is_in_one_group():
    parameters = {f"x{i}": nn.Parameter(torch.zeros(2, 2) if i % 2 else torch.zeros(2)) for i in range(6)}
    optimizer = Optimizers(parameters, "muon", 1e-2, 0.1, {"x1": 0.5, "x2": 0.5})
    held = [p for one in optimizer.all for group in one.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, parameters.values()))
