"""The ratios this project stands for, each measured in one run: what python -m eval.bench prints.

What is compared is run in turn, prompt by prompt, and every ratio is the median over prompts with the middle half.
Texts are compared as well: a ratio of two different texts would mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.speed import ratio, stock_answers
from specdec.assistant import DraftModel
from specdec.controller import adaptive
from specdec.cost import Plan, Profile, choices, plans
from specdec.decode import Generation, generate
from specdec.drafter import open_drafter
from specdec.drafters.eagle import EagleConfig, create
from specdec.drafters.ngram import Ngram
from specdec.drafters.none import Plain
from specdec.planned import measure
from specdec.search import TreeConfig
from specdec.stopping import Limits
from specdec.target import Target
from specdec.tree import TokenTree

SECTIONS = ("reading", "plain", "drafter", "assisted", "lookup", "useless", "replay", "distil", "overhead")
Tokens = list[int]


@dataclass(frozen=True)
class Bench:
    """What every section uses. prompts: held-out ones of the drafter's domain, as ids."""

    target: Target
    prompts: list[Tokens]
    others: list[Tokens]
    """Prompts that quote: summaries and questions about a text, for prompt lookup."""
    many: list[Tokens]
    """Training prompts, for batches."""
    limits: Limits
    drafter: Path | None
    repeats: int

    # -- reading ---------------------------------------------------------------------------------------------------

    def reading(self) -> None:
        """t(N): N nodes behind the first prompt, weights as they are and packed, in turn."""
        target, packed = self.target, self.target.packed
        most = 64 if target.device.type == "cuda" else 32
        counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most]
        target.start([self.prompts[0]], 128)
        generator = torch.Generator().manual_seed(0)
        trees = {
            n: TokenTree.chain(torch.randint(3, min(1000, target.vocab_size), (1, n), generator=generator))
            for n in counts
        }
        trees = {n: TokenTree(t.tokens.to(target.device), t.parents.to(target.device)) for n, t in trees.items()}
        seconds: dict[tuple[str, int], list[float]] = {}
        graphs = target.graphs
        for _ in range(max(5, self.repeats) + 1):
            for mode in ("eager", "fast"):
                if packed:
                    packed.release() if mode == "eager" else packed.engage()
                target.graphs = graphs if mode == "fast" else None
                for n, tree in trees.items():
                    for again in range(4):  # the first one after a change finds its weights in memory only
                        start = self._now()
                        target.read(tree)
                        if again:
                            seconds.setdefault((mode, n), []).append(self._now() - start)
        print("reading N tokens, ms (median; ratio to one):")
        for mode in ("eager", "fast"):
            middle = {n: statistics.median(seconds[mode, n]) for n in counts}
            cells = [f"{n}: {1e3 * middle[n]:.1f} ({middle[n] / middle[1]:.2f})" for n in counts]
            print(f"  {mode:6}" + "  ".join(cells))
        if packed:
            print(f"  {packed.describe()}")

    # -- one prompt at a time ----------------------------------------------------------------------------------------

    def plain(self) -> None:
        self._compare({"ours, plain": self._ours(Plain()), "model.generate": self._stock()}, self.prompts)

    def drafter_(self) -> None:
        if self.drafter is None:
            print("drafter: skipped, give --run")
            return
        drafter = open_drafter(self.drafter, self.target)
        whole = drafter.tree
        costs = measure(self.target, drafter, self.prompts[0]).entries[0]
        profile = Profile(whole.most_nodes, whole.longest)
        for prompt in self.prompts[-4:]:
            for one in generate(self.target, drafter, [prompt], self.limits)[0].rounds:
                profile.add(plans(whole)[-1], one.depths, one.path)
        best = choices(plans(whole), costs, profile)[0]
        plan = Plan(whole.most_nodes, whole.longest) if best.plan.off else best.plan
        drafter.tree = whole.limited(plan.nodes, plan.depth)
        print(f"drafter: plan {best}, chosen on the last 4 prompts, which are not measured")
        rounds: list[Any] = []
        ours = self._ours(drafter, rounds)
        self._compare(
            {"ours, drafter": ours, "ours, plain": self._ours(Plain()), "model.generate": self._stock()},
            self.prompts[:-4],
        )
        tau = sum(r.emitted for r in rounds) / max(1, len(rounds))
        print(f"  tau {tau:.2f}, predicted {costs.speedup(plan, tau):.2f}x over plain")

    def assisted(self) -> None:
        """A draft model that needs no training: the target's own first layers."""
        model = truncated(self.target.model, max(1, self.target.layers * 4 // 5))
        stock = truncated(self.target.model, max(1, self.target.layers * 4 // 5))
        ours = DraftModel(Target(model, self.target.tokenizer, "draft"), self.target, TreeConfig(depth=5))
        print(f"assisted: draft model is the target's first {model.config.num_hidden_layers} layers")
        self._compare(
            {
                "ours, draft model": self._ours(ours),
                "generate, assisted": self._stock(assistant_model=stock),
                "model.generate": self._stock(),
            },
            self.prompts[: self.repeats],
        )

    def lookup(self) -> None:
        self._compare(
            {
                "ours, prompt lookup": self._ours(Ngram()),
                "generate, prompt lookup": self._stock(prompt_lookup_num_tokens=5),
                "ours, plain": self._ours(Plain()),
            },
            self.others[: max(5, self.repeats)],
        )

    def useless(self) -> None:
        """2 000 tokens with a drafter of random weights under the adaptive controller."""
        drafter = untrained(self.target)
        drafter.tree = TreeConfig(kind="dynamic", depth=5, width=4, nodes=16)
        ours = adaptive(drafter, measure(self.target, drafter, self.prompts[0]))
        limits = Limits(250)
        seconds: dict[str, float] = {"adaptive": 0.0, "plain": 0.0}
        tokens, used, same = 0, 0, True
        for turn, prompt in enumerate((self.prompts * 8)[:8]):
            runs: dict[str, Any] = {"adaptive": ours, "plain": Plain()}
            texts = []
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                start = self._now()
                out = generate(self.target, runs[name], [prompt], limits)[0]
                seconds[name] += self._now() - start
                texts.append(out.tokens)
                if name == "adaptive":
                    tokens += len(out.tokens)
                    used += sum(r.depth > 0 for r in out.rounds)
            same &= texts[0] == texts[1]
        loss = 100 * (seconds["adaptive"] / seconds["plain"] - 1)
        print(
            f"useless drafter, adaptive: {tokens} tokens, {used} rounds drafted, {loss:+.1f} % time; identical: {same}"
        )

    def replay(self) -> None:
        """What an untrained EAGLE drafter would bring if it accepted as one did elsewhere: 76 % at each position."""
        drafter = untrained(self.target)
        drafter.tree = TreeConfig(depth=7)
        costs = measure(self.target, drafter, self.prompts[0]).entries[0]
        profile = Profile(8, 7)
        for accepted in range(8):  # rounds that end after each count, weighed by how often they do
            share = 0.76**accepted * (0.24 if accepted < 7 else 1.0)
            for _ in range(round(1000 * share)):
                profile.add(Plan(8, 7), range(8), range(1, accepted + 1))
        for choice in choices(plans(drafter.tree), costs, profile)[:3]:
            print(f"replayed acceptance of .76: {choice}")
        reads = ", ".join(f"{n}: {1e3 * seconds:.2f}" for n, seconds in costs.read.items())
        drafts = ", ".join(f"{d}: {1e3 * seconds:.2f}" for d, seconds in costs.draft.items())
        print(f"  a round of N tokens, ms: {reads}; drafting K deep: {drafts}")

    # -- many at a time ----------------------------------------------------------------------------------------------

    def distil(self) -> None:
        """Tokens per second of answering a set of prompts: ours with refill, generate in batches sorted by length."""
        prompts = sorted(self.many, key=len)
        rates = {}
        start = self._now()
        ours = [g.tokens for g in generate(self.target, Plain(), prompts[::-1], self.limits, rows=128)][::-1]
        rates["ours"] = sum(map(len, ours)) / (self._now() - start)
        print(f"distil: {len(prompts)} prompts; ours, 128 rows: {rates['ours']:.0f} tokens/s")
        for size in (8, 16, 32):
            some = range(0, len(prompts), max(1, len(prompts) // (2 * size)))
            start = self._now()
            found = stock_answers(self.target, [prompts[i] for i in some], self.limits, size)
            rates[str(size)] = sum(map(len, found)) / (self._now() - start)
            same = sum(ours[i] == one for i, one in zip(some, found, strict=True))
            print(f"  generate, batch {size}: {rates[str(size)]:.0f} tokens/s; identical rows {same}/{len(found)}")
        best = max(rate for name, rate in rates.items() if name != "ours")
        print(f"  ours / best batch of generate: {rates['ours'] / best:.2f}x")

    def overhead(self) -> None:
        """Share of a round that is neither the target's nor the drafter's forward pass."""
        drafters: dict[str, Any] = {"plain": Plain()}
        if self.drafter is not None:
            drafters["drafter"] = open_drafter(self.drafter, self.target)
        for name, drafter in drafters.items():
            inside = [0.0]
            read = self.target.read

            def timed(tree: TokenTree, start: int = 0, read: Any = read, inside: list[float] = inside) -> Any:
                begun = self._now()
                out = read(tree, start)
                inside[0] += self._now() - begun
                return out

            self.target.read = timed  # type: ignore[method-assign, assignment]
            try:
                rounds = generate(self.target, drafter, [self.prompts[0]], Limits(128))[0].rounds
            finally:
                del self.target.read
            whole = sum(r.draft_seconds + r.read_seconds for r in rounds)
            drafting = sum(r.draft_seconds for r in rounds) if name != "plain" else 0.0
            share = 100 * (whole - drafting - inside[0]) / whole
            print(f"overhead, {name}: {share:.1f} % of a round of {1e3 * whole / len(rounds):.1f} ms")

    # -- how --------------------------------------------------------------------------------------------------------

    def _compare(self, runs: dict[str, Callable[[Tokens], Tokens]], prompts: Sequence[Tokens]) -> None:
        """Time every way on every prompt, starting with another one each time; the first is compared with the rest."""
        for run in runs.values():
            run(prompts[0][:])  # first calls pay for allocation
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        rates: dict[str, list[float]] = {name: [] for name in runs}
        same = dict.fromkeys(runs, 0)
        names = list(runs)
        for turn, prompt in enumerate(prompts):
            texts = {}
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                start = self._now()
                texts[name] = runs[name](prompt)
                seconds[name].append(self._now() - start)
                rates[name].append(len(texts[name]) / seconds[name][-1])
            for name, text in texts.items():
                same[name] += text == texts[names[0]]
        print(f"{names[0]}: {statistics.median(rates[names[0]]):.1f} tokens/s, {len(prompts)} prompts")
        for name in names[1:]:
            print(
                f"  over {name} ({statistics.median(rates[name]):.1f} tokens/s): "
                f"{ratio(seconds[name], seconds[names[0]])}; identical text {same[name]}/{len(prompts)}"
            )

    def _ours(self, drafter: Any, rounds: list[Any] | None = None) -> Callable[[Tokens], Tokens]:
        def run(prompt: Tokens) -> Tokens:
            out: Generation = generate(self.target, drafter, [prompt], self.limits)[0]
            if rounds is not None:
                rounds.extend(out.rounds)
            return out.tokens

        return run

    def _stock(self, **settings: Any) -> Callable[[Tokens], Tokens]:
        def run(prompt: Tokens) -> Tokens:
            return stock_answers(self.target, [prompt], self.limits, 1, **settings)[0]

        return run

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def untrained(target: Target) -> Any:
    """An EAGLE drafter of random weights."""
    counts = torch.ones(target.vocab_size, dtype=torch.float64)
    size = min(4096, target.vocab_size)
    drafter = create(EagleConfig(draft_vocab_size=size), target, counts, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return drafter.to(target.model.dtype).eval()


def truncated(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the first `layers` layers, with weights of its own."""
    settings = model.config.to_dict() | {"num_hidden_layers": layers}
    settings.pop("layer_types", None)
    made = type(model)(type(model.config)(**settings)).to(model.device, model.dtype).eval()
    weights = model.state_dict()
    made.load_state_dict({name: weights[name] for name in made.state_dict()})
    return made
