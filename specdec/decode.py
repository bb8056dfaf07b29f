"""generate(): propose, read, accept, keep, until every row has stopped.

One loop for plain decoding (a tree with only a root) and for every drafter. What makes it exact lives elsewhere:
the rule in accept.py, the distribution in sampling.py, the cache in target.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.accept import AcceptanceRule, Verdict, target_walk
from specdec.drafter import Context, Drafter
from specdec.errors import UserError
from specdec.sampling import Sampling, draw
from specdec.target import Target
from specdec.tree import TokenTree


@dataclass(frozen=True)
class Limits:
    """When a row ends: after a token of `stop_tokens` (which is emitted) or after `max_new_tokens`."""

    max_new_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens}")


@dataclass(frozen=True)
class Round:
    """One round of one row. proposed and accepted count draft tokens; emitted includes the target's own token.

    Tokens past a stop or the limit are in neither accepted nor emitted.
    """

    proposed: int
    accepted: int
    emitted: int


@dataclass
class Generation:
    """What one prompt got: new tokens (the stop token included), its rounds, and why it ended.

    features: [positions read, S, D] when asked for; the last token is never read and has none.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: str = ""
    features: Tensor | None = None

    @property
    def accepted_length(self) -> float:
        """τ: mean tokens per round, bonus included; the token that the prompt's own reading gives is excluded."""
        return sum(r.emitted for r in self.rounds) / len(self.rounds) if self.rounds else float("nan")


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    rule: AcceptanceRule = target_walk,
    keep_features: bool = False,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Generation]:
    """Decode a batch of prompts (lists of ids); the result is in the order of the prompts.

    on_tokens is called after each round with the number of tokens it emitted over all rows. Raises UserError for an
    empty prompt or one that does not fit the target's window.
    """
    sampling = sampling or Sampling()
    done = [Generation() for _ in prompts]
    batch = _Batch(target, drafter, prompts, limits, done, keep_features)
    first = draw(sampling.probs(batch.first_logits), generator)
    emitted = batch.emit(first[:, None], torch.ones_like(first), proposed=None)
    while batch.rows:
        if on_tokens is not None:
            on_tokens(emitted)
        tree = drafter.propose(batch.context(), sampling, generator)
        reading = target.read(tree)
        verdict = rule(tree, sampling.probs(reading.logits), generator)
        target.keep(verdict.paths)
        batch.see(reading.features, verdict.paths.nodes, verdict.paths.lengths)
        emitted = batch.emit(*_run(tree, verdict), proposed=(tree.parents >= 0).sum(-1))
    if on_tokens is not None:
        on_tokens(emitted)
    return done


def _run(tree: TokenTree, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Accepted draft tokens and then the target's own: [B, M] and how many of them are real, [B]."""
    accepted = tree.tokens.gather(1, verdict.paths.nodes)
    run = torch.cat([accepted[:, 1:], accepted[:, :1]], 1)  # align: no time shift, the root makes room at the end
    lengths = verdict.paths.lengths
    return run.scatter(1, (lengths - 1)[:, None], verdict.next_tokens[:, None]), lengths


class _Batch:
    """The rows still being decoded: their tokens, and the features the drafter has not seen yet."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        done: list[Generation],
        keep_features: bool,
    ) -> None:
        self.target, self.drafter, self.limits, self.done = target, drafter, limits, done
        self.keep_features = keep_features
        room = min(limits.max_new_tokens, target.window) + drafter.nodes
        reading = target.start(prompts, room, drafter.taps)
        self.first_logits = reading.logits[:, 0]
        self.rows = list(range(len(prompts)))
        self.lengths = target.lengths.clone()
        self.tokens = torch.zeros(
            len(prompts), int(self.lengths.max()) + room + 1, dtype=torch.long, device=target.device
        )
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.as_tensor(prompt, device=target.device)
        self.left = [min(limits.max_new_tokens, target.window - len(prompt)) for prompt in prompts]
        self.features, self.counts = reading.features, self.lengths.clone()
        self.kept: list[list[Tensor]] = [[] for _ in prompts]
        self._store()
        drafter.reset(len(prompts), self.tokens.shape[1])

    def context(self) -> Context:
        return Context(self.tokens, self.lengths, self.features, self.counts)

    def see(self, features: Tensor | None, nodes: Tensor, lengths: Tensor) -> None:
        """Features of the accepted nodes become what is new to the drafter."""
        self.counts = lengths
        if features is not None:
            rows = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
            self.features = features[rows, nodes]
        self._store()

    def _store(self) -> None:
        if not self.keep_features or self.features is None:
            return
        for index, row in enumerate(self.rows):
            self.kept[row].append(self.features[index, : int(self.counts[index])].clone())

    def emit(self, run: Tensor, counts: Tensor, proposed: Tensor | None) -> int:
        """Append each row's run, cut at its stop or limit, and drop the rows that ended."""
        at = self.lengths[:, None] + torch.arange(run.shape[1], device=run.device)
        self.tokens.scatter_(1, at, run)
        self.lengths = self.lengths + counts
        going, total = [], 0
        offered = proposed.tolist() if proposed is not None else None
        for index, (new, count) in enumerate(zip(run.tolist(), counts.tolist(), strict=True)):
            row = self.rows[index]
            new, finish = self._cut(new[: min(count, self.left[row])], count >= self.left[row])
            state = self.done[row]
            state.tokens += new
            self.left[row] -= len(new)
            total += len(new)
            if offered is not None:
                state.rounds.append(Round(offered[index], min(count - 1, len(new)), len(new)))
            if finish:
                state.finish = finish
                if self.keep_features and self.kept[row]:
                    read = int(self.target.lengths[index]) - max(0, count - len(new))
                    state.features = torch.cat(self.kept[row])[:read]
                    self.kept[row] = []
            else:
                going.append(index)
        if len(going) < len(self.rows):
            self._select(going)
        return total

    def _cut(self, new: list[int], limit: bool) -> tuple[list[int], str]:
        for index, token in enumerate(new):
            if token in self.limits.stop_tokens:
                return new[: index + 1], "stop"
        return new, "length" if limit else ""

    def _select(self, going: list[int]) -> None:
        rows = torch.tensor(going, dtype=torch.long, device=self.tokens.device)
        self.rows = [self.rows[index] for index in going]
        self.tokens, self.lengths, self.counts = self.tokens[rows], self.lengths[rows], self.counts[rows]
        if self.features is not None:
            self.features = self.features[rows]
        self.target.select(rows)
        self.drafter.select(rows)
