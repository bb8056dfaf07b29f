"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from specdec import Target


@pytest.fixture
def target() -> Target:
    """fp64, so that equality means equality."""
    return Target(tiny_model(), tiny_tokenizer(), "tiny")


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target as a folder, in fp32."""
    folder = tmp_path_factory.mktemp("targets") / "tiny"
    tiny_model().float().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two trees of a drafter that keeps nothing between rounds can wait for `make test-slow`: Medusa's laws do not
    depend on the path, and Hydra's that do are in its other trees."""
    waiting = ("medusa-static]", "medusa-drawn]", "hydra-chain]", "hydra-drawn]")
    for item in items:
        if isinstance(item, pytest.Function) and item.name.endswith(waiting):
            item.add_marker(pytest.mark.slow)
