"""What a run's report says of how its numbers came about."""

from __future__ import annotations

import platform
from typing import Any

import torch

from data.artifact import versions
from eval.evaluate import Setting
from specdec.search import TreeConfig
from specdec.target import Target
from train.config import RunConfig


def run_facts(
    config: RunConfig,
    target: Target,
    setting: Setting,
    own: list[str],
    distilled: dict[str, Any],
    fitted: dict[str, Any],
) -> dict[str, str]:
    """Settings and conditions, for people; distilled and fitted are those stages' counts."""
    return {
        "target": f"{config.target.name} ({config.target.source}), {config.target.dtype}",
        "lossless against": lossless_against(config, fitted),
        "drafter": f"{config.kind}, {fitted['parameters'] / 1e6:.1f}M parameters, at most a {_tree(config.tree)}",
        "plan": _plan(setting),
        "target's forward": target.packed.describe() if target.packed else "as transformers has it",
        "trained on": f"{', '.join(own)}: {distilled['answer_tokens']} tokens, written by {distilled['writer']}",
        "fit": f"{fitted['steps']} steps, seed {config.seed}",
        "decoding": f"greedy, {config.eval.max_new_tokens} new tokens, one prompt at a time",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {target.device.type}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }


def lossless_against(config: RunConfig, fitted: dict[str, Any]) -> str:
    """Which model's output the drafter leaves as it is."""
    if config.target.train == "frozen":
        return "the target as it is; training did not change it"
    quality = fitted["quality"]
    return (
        f"the tuned target, {fitted['checkpoint']}/target, and not the original: on withheld texts it is "
        f"{quality['kl_original']:.4f} nats a token from it (KL), perplexity {quality['perplexity']:.3f} where the "
        f"original has {quality['perplexity_original']:.3f}"
    )


def _tree(tree: TreeConfig) -> str:
    if tree.kind == "chain":
        return f"chain of {tree.depth}"
    return f"{tree.kind} tree of {tree.most_nodes} nodes, {tree.longest} deep"


def _plan(setting: Setting) -> str:
    """What was decoded with, and the round times behind it."""
    costs = setting.costs.entries[0]
    times = f"a round reads 1 token in {1e3 * costs.reading(1):.1f} ms"
    if setting.plan is None:
        return f"adaptive; {times}"
    reading, drafting = costs.reading(setting.plan.nodes), costs.drafting(setting.plan.depth)
    return (
        f"{setting.plan}; {times}, {setting.plan.nodes} in {1e3 * reading:.1f} ms, and drafts {1e3 * drafting:.1f} ms"
    )
