"""Acceptance: which proposed nodes are kept, and which token comes next.

A rule takes the tree, the target's distribution at every node and the coins, and leaves the emitted tokens distributed
exactly as the target's own; `typical` does not, and says so. Which rule is exact when: algorithms §1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.sampling import Coins, pick
from specdec.tree import Paths, TokenTree


@dataclass(frozen=True)
class Verdict:
    """paths: the accepted nodes, root first. next_tokens: [B], the token after the last accepted node."""

    paths: Paths
    next_tokens: Tensor


class AcceptanceRule(Protocol):
    """(tree, target_probs [B, N, V], positions [B], coins) -> Verdict.

    positions: the absolute index of each row's root; a child at depth d is at positions + d.
    """

    def __call__(self, tree: TokenTree, target_probs: Tensor, positions: Tensor, coins: Coins) -> Verdict: ...


def lossless(tree: TokenTree, target_probs: Tensor, positions: Tensor, coins: Coins) -> Verdict:
    """The default: the target walk for trees grown without chance; for drawn ones block verification of chains, and
    sibling by sibling where nodes have several children."""
    if tree.draft_probs is None:
        return target_walk(tree, target_probs, positions, coins)
    return (siblings if tree.branching else block)(tree, target_probs, positions, coins)


def target_walk(tree: TokenTree, target_probs: Tensor, positions: Tensor, coins: Coins) -> Verdict:
    """Draw from the target at each node and descend while a child carries the drawn token.

    Every emitted token is a draw from the target's own row, so the output distribution is the target's whatever the
    tree, provided its nodes were chosen without chance (algorithms §1.3, §1.5). With one-hot rows this is greedy
    verification. Raises ValueError for a tree that carries draft_probs: that is another rule's input.
    """
    if tree.draft_probs is not None:
        raise ValueError("target_walk takes trees grown without chance; this one carries draft_probs")
    rows = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)
    node = torch.zeros_like(rows)
    alive = torch.ones_like(rows, dtype=torch.bool)
    path, length = [node], torch.ones_like(rows)
    next_tokens = torch.zeros_like(tree.tokens[:, 0])
    while True:
        here = target_probs[:, 0] if tree.nodes == 1 else target_probs[rows, node]
        drawn = pick(here, coins.flip(positions + length))
        next_tokens = torch.where(alive, drawn, next_tokens)
        child = (tree.parents == node[:, None]) & (tree.tokens == drawn[:, None]) & alive[:, None]
        alive = child.any(-1)
        if not bool(alive.any()):
            return Verdict(Paths(torch.stack(path, 1), length), next_tokens)
        node = torch.where(alive, child.int().argmax(-1), node)
        path.append(node)
        length = length + alive.to(length.dtype)


def leviathan(tree: TokenTree, target_probs: Tensor, positions: Tensor, coins: Coins) -> Verdict:
    """Token by token: keep x with probability min(1, p(x)/q(x)), else draw from what p has over q.

    For chains drawn from draft_probs (Leviathan et al. 2211.17192, Chen et al. 2302.01318; algorithms §1.1–1.2).
    """
    p, q, x, drafted = _chain(tree, target_probs)
    count = x.shape[1]
    keep = [coins.flip(positions + 1 + i) for i in range(count)]
    # u·q < p, strictly: no division, and a token of target probability 0 is never kept.
    accepted = torch.stack(keep, 1) * _at(q, x) < _at(p[:, :count], x) if count else drafted
    length = (accepted & drafted).int().cumprod(1).sum(1)
    rows = torch.arange(len(length), device=length.device)
    here = p[rows, length]
    rejected = (length < drafted.sum(1))[:, None]
    residual = (here - q[rows, length.clamp(max=max(0, count - 1))]).clamp(min=0) if count else here
    law = torch.where(rejected, _or_else(residual, here), here)
    return _verdict(length, pick(law, coins.flip(positions + 1 + length)))


def block(tree: TokenTree, target_probs: Tensor, positions: Tensor, coins: Coins) -> Verdict:
    """Block verification of a chain (Sun et al. 2403.10444): exact, and never shorter on average than leviathan.

    With P_i = min(1, P_{i-1}·p_i(x_i)/q_i(x_i)), position i < γ is accepted with S_i / (S_i + 1 - P_i), where
    S_i = Σ relu(P_i·p_{i+1} - q_{i+1}), and the last with P_γ; the longest accepted prefix is kept (algorithms §1.6).
    """
    p, q, x, drafted = _chain(tree, target_probs)
    rows, count = x.shape
    total = drafted.sum(1)
    joint = torch.ones(rows, dtype=p.dtype, device=p.device)
    length = torch.zeros(rows, dtype=torch.long, device=p.device)
    law = _or_else((p[:, 0] - q[:, 0]).clamp(min=0), p[:, 0]) if count else p[:, 0]
    law = torch.where((total == 0)[:, None], p[:, 0], law)
    for i in range(1, count + 1):
        ratio = _at(p[:, i - 1], x[:, i - 1]) / _at(q[:, i - 1], x[:, i - 1]).clamp(min=torch.finfo(p.dtype).tiny)
        joint = (joint * ratio).clamp(max=1)
        last = total == i
        surplus = (joint[:, None] * p[:, i] - q[:, min(i, count - 1)]).clamp(min=0)
        mass = surplus.sum(1)
        share = torch.where(mass + 1 - joint > 0, mass / (mass + 1 - joint).clamp(min=1e-300), 1.0)
        kept = (coins.flip(positions + i) < torch.where(last, joint, share)) & (i <= total)
        length = torch.where(kept, i, length)
        law = torch.where(kept[:, None], torch.where(last[:, None], p[:, i], _or_else(surplus, p[:, i])), law)
    return _verdict(length, pick(law, coins.flip(positions + 1 + length)))


def siblings(
    tree: TokenTree, target_probs: Tensor, positions: Tensor, coins: Coins, replacement: bool = False
) -> Verdict:
    """Trees whose children were drawn from draft_probs, tested one after another at each node.

    A child x is kept with probability min(1, p(x)/q(x)); a rejection leaves p with what it has over q. Without
    replacement (Sequoia 2402.12374; the default) x then leaves q as well; with it (SpecInfer 2305.09781) q stays
    (algorithms §1.4 a, b).
    """
    if tree.draft_probs is None:
        raise ValueError("this rule needs draft_probs: what each node's children were drawn from")
    count = tree.tokens.shape[0]
    rows = torch.arange(count, device=tree.tokens.device)
    node, alive = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    path, length = [node], torch.ones_like(rows)
    law = target_probs[:, 0]
    while bool(alive.any()):
        p, q = target_probs[rows, node], tree.draft_probs[rows, node].to(target_probs.dtype)
        moved = torch.zeros_like(alive)
        start = node
        for child in range(1, tree.nodes):
            tried = alive & ~moved & (tree.parents[:, child] == start)
            if not bool(tried.any()):
                continue
            x = tree.tokens[:, child]
            kept = tried & (coins.flip(positions + length) * _at(q, x) < _at(p, x))
            lost = (tried & ~kept)[:, None]
            p = torch.where(lost, _share(_or_else((p - q).clamp(min=0), p)), p)
            if not replacement:
                q = torch.where(lost, _share(q.scatter(1, x[:, None], 0.0)), q)
            node, moved = torch.where(kept, child, node), moved | kept
        law = torch.where((alive & ~moved)[:, None], p, law)
        alive = moved
        if bool(alive.any()):
            path.append(node)
            length = length + alive.to(length.dtype)
    return Verdict(Paths(torch.stack(path, 1), length), pick(law, coins.flip(positions + length)))


@dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance: LOSSY. Keeps a child when p(x) > min(epsilon, delta·exp(-H(p))).

    The output is not distributed as the target's (2401.10774 §2.3.1; algorithms §1.7). Off unless asked for.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    lossy = True

    def __call__(self, tree: TokenTree, target_probs: Tensor, positions: Tensor, coins: Coins) -> Verdict:
        entropy = torch.special.entr(target_probs).sum(-1)
        bar = torch.minimum(torch.full_like(entropy, self.epsilon), self.delta * torch.exp(-entropy))  # [B, N]
        parents = tree.parents.clamp(min=0)
        rows = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)
        p = target_probs[rows[:, None], parents, tree.tokens]
        good = (p > bar.gather(1, parents)) & (tree.parents >= 0)
        good[:, 0] = True
        depth = tree.depths()
        whole = (good[:, None] | ~tree.ancestors()).all(-1) & (tree.parents != -2)
        best = torch.where(whole, depth.double() + p.double() * 0.5, -1.0).argmax(1)
        reach = tree.ancestors()[rows, best]
        length = reach.sum(1)
        nodes = torch.where(reach, torch.arange(tree.nodes, device=reach.device), tree.nodes).sort(1).values
        nodes = nodes[:, : int(length.max())].clamp(max=tree.nodes - 1)
        drawn = pick(target_probs[rows, best], coins.flip(positions + length))
        return Verdict(Paths(nodes, length), drawn)


def _chain(tree: TokenTree, p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p [B, K+1, V], q [B, K, V], drafted tokens [B, K] and whether each is real. Raises ValueError off chains."""
    if tree.draft_probs is None:
        raise ValueError("this rule needs draft_probs: what each token was drawn from")
    expected = torch.arange(-1, tree.nodes - 1, device=tree.parents.device)
    real = tree.parents == expected
    if not bool((real | (tree.parents == -2)).all()):
        raise ValueError("this rule takes chains only")
    drafted = real[:, 1:]  # no time shift: nodes after the root
    tokens = tree.tokens[:, 1:]  # no time shift: nodes after the root
    q = tree.draft_probs[:, : tree.nodes - 1].to(p.dtype)
    if bool(((_at(q, tokens) <= 0) & drafted).any()):
        raise ValueError("a drafted token has probability 0 under draft_probs: they are not what it was drawn from")
    return p, q, tokens, drafted


def _at(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(-1, tokens[..., None]).squeeze(-1)


def _or_else(residual: Tensor, fallback: Tensor) -> Tensor:
    """The residual where it has mass; else p: the rejection had probability 0 up to rounding."""
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, fallback)


def _share(mass: Tensor) -> Tensor:
    """Normalised; rows without mass stay zero (a draft law whose support is used up keeps nothing more)."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp(min=torch.finfo(mass.dtype).tiny), mass)


def _verdict(length: Tensor, next_tokens: Tensor) -> Verdict:
    nodes = torch.arange(int(length.max()) + 1, device=length.device).expand(len(length), -1)
    return Verdict(Paths(nodes, length + 1), next_tokens)
