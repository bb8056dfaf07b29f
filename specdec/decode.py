"""stream() and generate(): propose, read, accept, keep, until every row has stopped.

One loop for plain decoding (a tree with only a root) and for every drafter. What makes it exact lives elsewhere: the
rule in accept.py, the distribution in sampling.py, the cache in target.py, the ends in stopping.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.accept import AcceptanceRule, Verdict, lossless
from specdec.drafter import Context, Drafter
from specdec.errors import UserError
from specdec.sampling import Coins, Coupled, Sampling, Stream, pick, seen_on_paths
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


@dataclass
class Generation:
    """What one prompt got: new tokens (the one that ended it included), its rounds, and why it ended.

    finish: "stop", "stop_string" or "length". features: [positions read, S, D] when asked for; the last token is not
    always read.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: str = ""
    features: Tensor | None = None

    @property
    def accepted_length(self) -> float:
        """τ: mean tokens per round, bonus included; the token that the prompt's own reading gives is excluded."""
        return sum(r.emitted for r in self.rounds) / len(self.rounds) if self.rounds else float("nan")


def generate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    *,
    seed: int | None = None,
    rule: AcceptanceRule = lossless,
    keep_features: bool = False,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Generation]:
    """Decode a batch of prompts (lists of ids); the result is in the order of the prompts.

    seed: couple the noise to (seed, row, position): the text is then exactly that of plain decoding with the same seed.
    on_tokens is called with the number of tokens each step emitted. Raises UserError for an empty prompt, one that does
    not fit the target's window, or stop strings without a tokenizer.
    """
    done = [Generation() for _ in prompts]
    steps = stream(
        target, drafter, prompts, limits, sampling, generator, seed=seed, rule=rule, keep_features=keep_features
    )
    for step in steps:
        state = done[step.row]
        state.tokens += step.tokens
        if step.round is not None:
            state.rounds.append(step.round)
        state.finish, state.features = step.finish, step.features
        if on_tokens is not None:
            on_tokens(len(step.tokens))
    return done


def stream(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    *,
    seed: int | None = None,
    rule: AcceptanceRule = lossless,
    keep_features: bool = False,
) -> Iterator[Step]:
    """The same, yielding each row's tokens as its rounds end. See generate()."""
    sampling = sampling or Sampling()
    if limits.stop_strings and target.tokenizer is None:
        raise UserError("stop_strings need a target with a tokenizer")
    coins: Coins = Stream(generator) if seed is None else Coupled(seed, len(prompts))
    # Coupled noise leaves no room for the drafter's own chance, so it is asked to propose without.
    drafting = generator if seed is None else None
    with torch.inference_mode():
        batch = _Batch(target, drafter, prompts, limits, sampling, coins, keep_features)
        steps = batch.first()
    yield from steps
    while batch.rows:
        with torch.inference_mode():
            steps = batch.round(rule, drafting)
        yield from steps


class _Batch:
    """The rows still being decoded: their tokens, and the features the drafter has not seen yet."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        sampling: Sampling,
        coins: Coins,
        keep_features: bool,
    ) -> None:
        self.target, self.drafter, self.sampling, self.coins = target, drafter, sampling, coins
        self.limits, self.keep_features = limits, keep_features
        room = min(limits.max_new_tokens, target.window) + drafter.nodes
        reading = target.start(prompts, room, drafter.taps)
        self.session = target.session
        self.logits = reading.logits
        self.rows = list(range(len(prompts)))
        self.stoppers = [
            Stopper(limits, min(limits.max_new_tokens, target.window - len(p)), target.tokenizer) for p in prompts
        ]
        self.lengths = target.lengths.clone()
        width = int(self.lengths.max()) + room + 1
        self.tokens = torch.zeros(len(prompts), width, dtype=torch.long, device=target.device)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.as_tensor(prompt, device=target.device)
        self.features, self.counts = reading.features, self.lengths.clone()
        self.kept: list[list[Tensor]] = [[] for _ in prompts]
        self._store()
        drafter.reset(len(prompts), width)

    def first(self) -> list[Step]:
        """The token that the prompts' own reading gives."""
        root = TokenTree.chain(self.tokens.gather(1, (self.lengths - 1)[:, None]))
        probs = self._probs(self.logits, root)
        drawn = pick(probs[:, 0], self.coins.flip(self.target.lengths))
        return self._emit(drawn[:, None], torch.ones_like(drawn), None)

    def round(self, rule: AcceptanceRule, drafting: torch.Generator | None) -> list[Step]:
        """Propose, read, accept, keep."""
        if self.target.session is not self.session:
            raise UserError("this stream's target began to decode something else; finish one before the next")
        begun = time.perf_counter()
        context = Context(self.tokens, self.lengths, self.features, self.counts)
        tree = self._clip(self.drafter.propose(context, self.sampling, drafting))
        drafted = time.perf_counter()
        reading = self.target.read(tree)
        verdict = rule(tree, self._probs(reading.logits, tree), self.target.lengths, self.coins)
        self.target.keep(verdict.paths)
        self.counts = verdict.paths.lengths
        if reading.features is not None:
            rows = torch.arange(len(self.rows), device=self.target.device)[:, None]
            self.features = reading.features[rows, verdict.paths.nodes]
        self._store()
        proposed = torch.cat([tree.depths().masked_fill(tree.parents == PAD, -1), verdict.paths.nodes], 1).tolist()
        run, lengths = _run(tree, verdict)
        return self._emit(run, lengths, proposed, tree.nodes, drafted - begun, time.perf_counter() - drafted)

    def _probs(self, logits: Tensor, tree: TokenTree) -> Tensor:
        """The target's distribution after each node."""
        seen = None
        if self.sampling.needs_history:
            seen = seen_on_paths(self.tokens, self.lengths, tree, logits.shape[-1])
        if self.limits.min_new_tokens and self.limits.stop_tokens:
            made = torch.tensor([len(self.stoppers[row].tokens) for row in self.rows], device=logits.device)
            early = made[:, None] + tree.depths() < self.limits.min_new_tokens
            stops = torch.tensor(self.limits.stop_tokens, device=logits.device)
            banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device).index_fill_(0, stops, True)
            logits = logits.masked_fill(early[..., None] & banned, -torch.inf)
        return self.sampling.probs(logits, seen)

    def _clip(self, tree: TokenTree) -> TokenTree:
        """Nodes that could not be emitted, or lie outside the window, become padding."""
        room = [self.stoppers[row].left - 1 for row in self.rows]
        if min(room) >= tree.nodes - 1:
            return tree
        deep = tree.depths() > torch.tensor(room, device=tree.tokens.device)[:, None]
        return TokenTree(tree.tokens, tree.parents.masked_fill(deep, PAD), tree.draft_probs, tree.branching)

    def _store(self) -> None:
        if self.keep_features and self.features is not None:
            for index, (row, count) in enumerate(zip(self.rows, self.counts.tolist(), strict=True)):
                self.kept[row].append(self.features[index, :count].clone())

    def _emit(
        self,
        run: Tensor,
        counts: Tensor,
        proposed: list[list[int]] | None,
        nodes: int = 0,
        draft: float = 0.0,
        read: float = 0.0,
    ) -> list[Step]:
        """Append each row's run, cut where it ends, and drop the rows that ended.

        proposed: each row's depths of the tree's `nodes` nodes, then its accepted path.
        """
        at = self.lengths[:, None] + torch.arange(run.shape[1], device=run.device)
        self.tokens.scatter_(1, at, run)
        self.lengths = self.lengths + counts
        going, steps = [], []
        for index, (new, count) in enumerate(zip(run.tolist(), counts.tolist(), strict=True)):
            row = self.rows[index]
            stopper = self.stoppers[row]
            taken = stopper.take(new[:count])
            record = None
            if proposed is not None:
                depths, walked = tuple(proposed[index][:nodes]), proposed[index][nodes + 1 :]
                accepted, drafted = min(count - 1, len(taken)), sum(depth > 0 for depth in depths)
                path = tuple(walked[:accepted])
                record = Round(drafted, accepted, len(taken), max(depths), depths, path, draft, read)
            features = None
            if not stopper.finish:
                going.append(index)
            elif self.kept[row]:
                read_positions = int(self.target.lengths[index]) - max(0, count - len(taken))
                features = torch.cat(self.kept[row])[:read_positions]
                self.kept[row] = []
            steps.append(Step(row, taken, record, stopper.finish, features))
        if len(going) < len(self.rows):
            self._select(going)
        return steps

    def _select(self, going: list[int]) -> None:
        rows = torch.tensor(going, dtype=torch.long, device=self.tokens.device)
        self.rows = [self.rows[index] for index in going]
        self.tokens, self.lengths, self.counts = self.tokens[rows], self.lengths[rows], self.counts[rows]
        if self.features is not None:
            self.features = self.features[rows]
        self.target.select(rows)
        self.drafter.select(rows)
        self.coins.select(rows)


def _run(tree: TokenTree, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Accepted draft tokens and then the target's own: [B, M] and how many of them are real, [B]."""
    accepted = tree.tokens.gather(1, verdict.paths.nodes)
    run = accepted.roll(-1, 1)  # the root makes room at the end
    lengths = verdict.paths.lengths
    return run.scatter(1, (lengths - 1)[:, None], verdict.next_tokens[:, None]), lengths
