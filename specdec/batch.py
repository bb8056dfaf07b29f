"""The rows being decoded together: one round of them, the rows that end, and the prompts that take their places.

What makes it exact lives elsewhere: the rule in accept.py, the distribution in sampling.py, the cache in target.py,
the ends in stopping.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.accept import AcceptanceRule, Verdict
from specdec.drafter import Context, Drafter
from specdec.errors import UserError
from specdec.sampling import Coins, Sampling, pick, seen_on_paths
from specdec.stopping import Limits, Stopper
from specdec.target import Target
from specdec.tree import PAD, TokenTree


@dataclass(frozen=True)
class Round:
    """One round of one row. proposed counts draft nodes, depth the longest path of them; accepted and emitted count
    what is emitted, the target's own token in the latter. depths: of every node of the tree (-1: padding); path: the
    accepted nodes' places in it.

    Tokens past a stop or the limit are in none of them. draft_seconds and read_seconds are the whole batch's, the
    latter with all that follows reading.
    """

    proposed: int
    accepted: int
    emitted: int
    depth: int
    depths: tuple[int, ...] = field(default=(), compare=False)
    path: tuple[int, ...] = field(default=(), compare=False)
    draft_seconds: float = field(default=0.0, compare=False)
    read_seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Step:
    """What one row got at once: its index among the prompts, new tokens, its round (None: the prompt's own reading),
    why it ended ("" while it goes on), and in the last step the features when asked for."""

    row: int
    tokens: list[int]
    round: Round | None
    finish: str
    features: Tensor | None = None


class Rows:
    """At most `rows` prompts at a time; the place of one that ends is taken by the next.

    Holds each row's tokens, and the features the drafter has not seen yet.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        rows: int,
        limits: Limits,
        sampling: Sampling,
        coins: Coins,
        keep_features: bool,
    ) -> None:
        self.target, self.drafter, self.sampling, self.coins = target, drafter, sampling, coins
        self.limits, self.keep_features = limits, keep_features
        self.prompts = prompts
        self.active = list(range(min(rows, len(prompts))))
        """The prompt in each row."""
        self.waiting = deque(range(len(self.active), len(prompts)))
        room = min(limits.max_new_tokens, target.window) + drafter.nodes
        self.reading = target.start(prompts[: len(self.active)], room, drafter.taps, prompts[len(self.active) :])
        self.session = target.session
        self.stoppers = [
            Stopper(limits, min(limits.max_new_tokens, target.window - len(p)), target.tokenizer) for p in prompts
        ]
        self.lengths = target.lengths.clone()
        width = max(map(len, prompts)) + room + 1
        self.tokens = torch.zeros(len(self.active), width, dtype=torch.long, device=target.device)
        self.features, self.counts = self.reading.features, self.lengths.clone()
        self.kept: list[list[Tensor]] = [[] for _ in prompts]
        drafter.reset(len(self.active), width)

    def first(self) -> list[Step]:
        """The tokens that the prompts' own reading gives."""
        return self._refilled(*self._begin(self._all(), self.reading.logits, self.reading.features))

    def round(self, rule: AcceptanceRule, drafting: torch.Generator | None) -> list[Step]:
        """Propose, read, accept, keep."""
        if self.target.session is not self.session:
            raise UserError("this stream's target began to decode something else; finish one before the next")
        begun = time.perf_counter()
        context = Context(self.tokens, self.lengths, self.features, self.counts)
        tree = self._clip(self.drafter.propose(context, self.sampling, drafting))
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()  # or the drafter's work would be counted as reading
        drafted = time.perf_counter()
        reading = self.target.read(tree)
        verdict = rule(tree, self._probs(reading.logits, tree, self._all()), self.target.lengths, self.coins)
        self.target.keep(verdict.paths)
        self.counts = verdict.paths.lengths
        if reading.features is not None:
            self.features = reading.features[self._all()[:, None], verdict.paths.nodes]
            self._store(self.active, self.features, self.counts)
        places = torch.cat([tree.depths().masked_fill(tree.parents == PAD, -1), verdict.paths.nodes], 1).tolist()
        seconds = drafted - begun, time.perf_counter() - drafted
        records = [(tuple(row[: tree.nodes]), tuple(row[tree.nodes + 1 :]), *seconds) for row in places]
        run, counts = _run(tree, verdict)
        return self._refilled(*self._emit(self._all(), run, counts, records))

    def _begin(self, at: Tensor, logits: Tensor, features: Tensor | None) -> tuple[list[Step], list[int]]:
        """Rows `at` hold prompts that were just read: their texts, features and first tokens."""
        prompts = [self.active[row] for row in at.tolist()]
        for row, prompt in zip(at.tolist(), prompts, strict=True):
            text = torch.as_tensor(self.prompts[prompt], device=self.tokens.device)
            self.tokens[row, : len(text)] = text
        if features is not None:
            self._store(prompts, features, self.lengths[at])
        root = TokenTree.chain(self.tokens[at].gather(1, (self.lengths[at] - 1)[:, None]))
        drawn = pick(self._probs(logits, root, at)[:, 0], self.coins.flip(self.lengths[at], prompts))
        return self._emit(at, drawn[:, None], torch.ones_like(drawn), [None] * len(prompts))

    def _probs(self, logits: Tensor, tree: TokenTree, at: Tensor) -> Tensor:
        """The target's distribution after each node of rows `at`."""
        seen = None
        if self.sampling.needs_history:
            seen = seen_on_paths(self.tokens[at], self.lengths[at], tree, logits.shape[-1])
        if self.limits.min_new_tokens and self.limits.stop_tokens:
            made = [len(self.stoppers[self.active[row]].tokens) for row in at.tolist()]
            early = torch.tensor(made, device=logits.device)[:, None] + tree.depths() < self.limits.min_new_tokens
            stops = torch.tensor(self.limits.stop_tokens, device=logits.device)
            banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device).index_fill_(0, stops, True)
            logits = logits.masked_fill(early[..., None] & banned, -torch.inf)
        return self.sampling.probs(logits, seen)

    def _clip(self, tree: TokenTree) -> TokenTree:
        """Nodes that could not be emitted, or lie outside the window, become padding."""
        room = [self.stoppers[prompt].left - 1 for prompt in self.active]
        if min(room) >= tree.nodes - 1:
            return tree
        deep = tree.depths() > torch.tensor(room, device=tree.tokens.device)[:, None]
        return TokenTree(tree.tokens, tree.parents.masked_fill(deep, PAD), tree.draft_probs, tree.branching)

    def _store(self, prompts: list[int], features: Tensor, counts: Tensor) -> None:
        if self.keep_features:
            for index, (prompt, count) in enumerate(zip(prompts, counts.tolist(), strict=True)):
                self.kept[prompt].append(features[index, :count].clone())

    def _emit(
        self,
        at: Tensor,
        run: Tensor,
        counts: Tensor,
        records: Sequence[tuple[tuple[int, ...], tuple[int, ...], float, float] | None],
    ) -> tuple[list[Step], list[int]]:
        """Append a run to each of rows `at`, cut where it ends; also the rows that ended.

        records: per row the depths of its tree's nodes, its accepted path, and seconds of drafting and reading.
        """
        self.tokens[at[:, None], self.lengths[at][:, None] + torch.arange(run.shape[1], device=run.device)] = run
        self.lengths = self.lengths.index_add(0, at, counts)  # not in place: a drafter may hold the old ones
        ended, steps = [], []
        for index, (row, new, count) in enumerate(zip(at.tolist(), run.tolist(), counts.tolist(), strict=True)):
            prompt = self.active[row]
            stopper = self.stoppers[prompt]
            taken = stopper.take(new[:count])
            record = None
            if entry := records[index]:
                depths, path, draft, read = entry
                accepted, drafted = min(count - 1, len(taken)), sum(depth > 0 for depth in depths)
                record = Round(drafted, accepted, len(taken), max(depths), depths, path[:accepted], draft, read)
            features = None
            if stopper.finish:
                ended.append(row)
                if self.kept[prompt]:
                    read_positions = int(self.target.lengths[row]) - max(0, count - len(taken))
                    features = torch.cat(self.kept[prompt])[:read_positions]
                    self.kept[prompt] = []
            steps.append(Step(prompt, taken, record, stopper.finish, features))
        return steps, ended

    def _refilled(self, steps: list[Step], ended: list[int]) -> list[Step]:
        """Let waiting prompts take the ended rows' places, and those of the prompts that end on their first token."""
        while ended:
            more, ended = self._replace(ended)
            steps += more
        return steps

    def _replace(self, ended: list[int]) -> tuple[list[Step], list[int]]:
        """Waiting prompts into ended rows; rows for which none is left are dropped first."""
        fresh = ended[: len(self.waiting)]
        if dropped := ended[len(fresh) :]:
            going = _survivors(len(self.active), set(dropped))
            fresh = [going.index(row) for row in fresh]
            self._select(going)
        if not fresh:
            return [], []
        prompts = [self.waiting.popleft() for _ in fresh]
        at = torch.tensor(fresh, device=self.tokens.device)
        for row, prompt in zip(fresh, prompts, strict=True):
            self.active[row] = prompt
        reading = self.target.admit(at, [self.prompts[prompt] for prompt in prompts])
        self.lengths = self.lengths.index_copy(0, at, self.target.lengths[at])
        self.coins.renew(at, prompts)
        self.drafter.renew(at)
        if reading.features is not None and self.drafter.nodes > 1 and self.features is not None:
            self.features = _overlaid(self.features, at, reading.features)
        self.counts = self.counts.index_copy(0, at, self.lengths[at])
        return self._begin(at, reading.logits, reading.features)

    def _select(self, going: list[int]) -> None:
        rows = torch.tensor(going, dtype=torch.long, device=self.tokens.device)
        self.active = [self.active[row] for row in going]
        self.tokens, self.lengths, self.counts = self.tokens[rows], self.lengths[rows], self.counts[rows]
        if self.features is not None:
            self.features = self.features[rows]
        self.target.select(rows)
        self.drafter.select(rows)
        self.coins.select(rows)

    def _all(self) -> Tensor:
        return torch.arange(len(self.active), device=self.target.device)


def _survivors(count: int, dropped: set[int]) -> list[int]:
    """Rows that stay, the last of them in the holes: large caches then need not be copied."""
    left = count - len(dropped)
    behind = [row for row in range(left, count) if row not in dropped]
    return [row if row not in dropped else behind.pop() for row in range(left)]


def _overlaid(features: Tensor, at: Tensor, new: Tensor) -> Tensor:
    """features [B, F, S, D] with rows `at` replaced by new [b, P, S, D], padded on the right to the longer."""
    width = max(features.shape[1], new.shape[1])
    whole = features.new_zeros(features.shape[0], width, *features.shape[2:])
    whole[:, : features.shape[1]] = features
    whole[at, : new.shape[1]] = new
    return whole


def _run(tree: TokenTree, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Accepted draft tokens and then the target's own: [B, M] and how many of them are real, [B]."""
    accepted = tree.tokens.gather(1, verdict.paths.nodes)
    run = accepted.roll(-1, 1)  # the root makes room at the end
    lengths = verdict.paths.lengths
    return run.scatter(1, (lengths - 1)[:, None], verdict.next_tokens[:, None]), lengths
