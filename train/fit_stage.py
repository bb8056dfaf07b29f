"""The stage fit: texts and features of the stages before it in, a trained drafter out (and a tuned target)."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.artifact import write_text
from data.batches import Batch, batches, batches_per_epoch
from data.capture import attach
from data.draft_vocab import count_tokens, coverage, ranking
from data.texts import Text, read_texts
from eval.ranks import measured_tree
from specdec import fast
from specdec.drafter import CONFIG, described, drafter_module
from specdec.errors import UserError
from specdec.search import TreeConfig
from specdec.target import Target
from train import checkpoint
from train.checkpoint import Progress
from train.config import objective_module
from train.joint import Joint
from train.learner import Learner
from train.log import bar, say
from train.loop import Judgement
from train.loop import fit as train_loop
from train.optim import Average, Optimizers
from train.run import TUNED, Run
from train.validation import Withheld, decoded, prompt_of, teacher_forced, withhold

MEASURED_TOKENS = 128
"""Answers from which a static tree is measured are at most so long."""
SHOWN = ("loss", "tau", "eval/tau", "kl_original")


def fit(run: Run) -> None:
    """Train, continue to train, or find it done. Raises UserError."""
    run.need("distill")
    stage = run.open("fit")
    if run.skip(stage):
        return
    config = run.config
    joint = config.target.train != "frozen"
    target = run.target_to_train() if joint else run.target
    withheld = _texts(run)
    texts, batch_size, pack = withheld.texts, config.fit.batch_size, config.fit.pack_tokens
    evaluated = joint or config.fit.eval_steps is not None
    if evaluated and not withheld.prompts:
        raise UserError("fit.eval_steps and target.train need texts of 4 prompts or more: some are withheld to measure")
    steps = config.fit.steps(batches_per_epoch(texts, batch_size, config.seed, pack))
    subject = _subject(run, target, texts)
    drafter, learner = subject.drafter, subject.learner
    torch.set_flush_denormal(True)  # tiny gradients slow a CPU's backward pass twofold
    resume = checkpoint.latest(stage.folder)
    before = checkpoint.progress_of(resume) if resume else Progress()
    run.log.rewind("fit", before.step)
    parameters = sum(p.numel() for p in learner.parameters.values())
    say(
        f"fit       {parameters / 1e6:.1f}M parameters, {len(texts)} texts, {steps} steps"
        + f" from {before.step}" * bool(before.step)
    )
    shares = ", ".join(f"{domain} {100 * share:.1f} %" for domain, share in subject.coverage.items())
    say(f"          draft vocabulary of {len(subject.module.vocabulary(drafter))} tokens covers: {shares}")
    original = learner.original if isinstance(learner, Joint) else target

    def make_batches(start: int) -> Iterator[Batch]:
        supervise_prompt = config.objective.supervise_prompt
        return learner.originals(
            batches(texts, original, run.taps(), batch_size, config.seed, supervise_prompt, start, pack)
        )

    judge = _Judge(run, subject, original, withheld) if evaluated else None
    with bar("fit", steps, "step", before.step) as progress:

        def report(step: int, values: dict[str, float]) -> None:
            progress.update(step - progress.n)
            progress.set_postfix_str(" ".join(f"{k} {values[k]:.3g}" for k in SHOWN if k in values))
            run.log.record("fit", {**values, "peak_memory_gb": _peak_memory(target.device)}, step)

        def save(at: Progress, average: Average, optimizer: Optimizers) -> Path:
            own, state = subject.module.config_of(drafter), learner.state
            trained = learner.parameters
            return checkpoint.save(stage.folder, at, config.kind, own, drafter, trained, average, optimizer, state)

        path = train_loop(config.fit, learner, make_batches, steps, save, resume, report, judge, config.log.every)
    made = _made(path, stage.folder, parameters, len(texts), steps)
    if joint or config.tree.unmeasured:
        checkpoint.load_averaged(path, learner.parameters)
    if config.tree.unmeasured:
        made["tree"] = _measure_tree(run, subject, withheld, path)
    if isinstance(learner, Joint) and judge is not None:
        made["quality"] = _keep_tuned(learner, path, judge, run)
    stage.finish({**made, "coverage": subject.coverage})


def _texts(run: Run) -> Withheld:
    """What is trained on, and what is kept back where something is measured on it."""
    config = run.config
    texts = read_texts(run.need("distill").folder)
    if config.capture.enabled:
        texts = attach(texts, run.need("capture").folder)
    if config.fit.eval_steps is None and config.target.train == "frozen" and not config.tree.unmeasured:
        return Withheld(texts, [], [])
    return withhold(texts, config.fit.eval_prompts, config.seed)


@dataclass(frozen=True)
class _Subject:
    """What is trained: the drafter of a method's module, all that learns, and the share of each domain's labels that
    the draft vocabulary has."""

    module: Any
    drafter: Any
    learner: Learner | Joint
    coverage: dict[str, float]


def _subject(run: Run, target: Target, texts: list[Text]) -> _Subject:
    """A new drafter, ready to learn."""
    config, module = run.config, drafter_module(run.config.kind)
    counts = count_tokens(texts, target.vocab_size)
    ranked, some = ranking(texts, counts, target.vocab_size), [text.tokens for text in texts[:16]]
    drafter = module.create(config.model, target, ranked, torch.Generator().manual_seed(config.seed), some)
    drafter.tree = config.tree
    objective = objective_module(config.kind).Objective(config.objective, drafter, target)
    joint = config.target.train != "frozen"
    learner: Learner | Joint = (
        Joint(config.joint, config.target.train, target, drafter, objective, run.taps(), config.seed)
        if joint
        else Learner(drafter, objective, config.fit.lora, config.seed)
    )
    if config.target.fast != "off":
        fast.train_fast(drafter)
        if joint:
            fast.train_fast(target.model)
    return _Subject(module, drafter, learner, coverage(module.vocabulary(drafter), counts))


def _measure_tree(run: Run, subject: _Subject, withheld: Withheld, path: Path) -> list[list[int]]:
    """Give the drafter, and its checkpoint, a static tree measured on the withheld prompts; returns its paths."""
    # With very few prompts none could be withheld; better a tree from what was trained on than none.
    prompts = withheld.prompts or [list(prompt_of(text)) for text in withheld.texts]
    drafter = subject.drafter
    drafter.tree, _ = measured_tree(run.target, drafter, prompts, run.config.tree, MEASURED_TOKENS)
    write_text(path / CONFIG, described(run.config.kind, subject.module.config_of(drafter)))
    say(f"          static tree measured on {len(prompts)} prompts: {_shape(drafter.tree)}")
    return drafter.tree.paths


def _made(path: Path, folder: Path, parameters: int, texts: int, steps: int) -> dict[str, Any]:
    """What the manifest says of the fit."""
    last = checkpoint.latest(folder)
    assert last is not None
    end, used = checkpoint.progress_of(last), checkpoint.progress_of(path)
    made = {
        "steps": end.step,
        "texts": texts,
        "parameters": parameters,
        "checkpoint": path.name,
        "tokens": end.tokens,
        "supervised": end.supervised,
        "minutes": round(end.seconds / 60, 2),
    }
    if used.step != end.step or end.step != steps:
        say(f"          ended at step {end.step} of {steps}, the checkpoint of step {used.step} is used")
    if end.stopped:
        say(f"          because: {end.stopped}")
    return made | ({"best_tau": end.best} if end.best is not None else {})


class _Judge:
    """An evaluation within the fit: the withheld prompts are decoded, greedily, with a chain as deep as the drafter's
    tree, and the withheld texts read as training reads them.
    """

    def __init__(self, run: Run, subject: _Subject, original: Target, withheld: Withheld) -> None:
        self.run, self.learner, self.drafter, self.prompts = run, subject.learner, subject.drafter, withheld.prompts
        supervise = run.config.objective.supervise_prompt
        held = [withheld.held[start : start + 8] for start in range(0, len(withheld.held), 8)]
        self.batches = [next(batches(some, original, run.taps(), len(some), 0, supervise)) for some in held]

    def __call__(self, _: int) -> Judgement:
        held, self.drafter.tree = self.drafter.tree, TreeConfig(depth=self.drafter.tree.longest)
        values = decoded(self.run.target, self.drafter, self.prompts, self.run.config.fit.eval_tokens)
        self.drafter.tree = held
        values |= teacher_forced(self.learner, self.batches)
        score: float | None = values["tau"]
        stop = None
        if isinstance(self.learner, Joint):
            values |= self.learner.quality(self.batches)
            stop = self.learner.excess(values)
            score = score if stop is None else None
        return Judgement(values, score, stop)


def _shape(tree: TreeConfig) -> str:
    per_level = [sum(len(path) == depth for path in tree.paths) for depth in range(1, tree.longest + 1)]
    return f"{tree.most_nodes} nodes, {' + '.join(map(str, per_level))} below the root"


def _keep_tuned(learner: Joint, path: Path, judge: _Judge, run: Run) -> dict[str, float]:
    """Write the tuned target beside its drafter, as a folder any tool opens; returns how far it went."""
    quality = learner.quality(judge.batches)
    if excess := learner.excess(quality):
        raise UserError(
            f"{excess}, and no evaluation was within that: lower joint.lr_factor, evaluate earlier (fit.eval_steps) "
            "or allow more, with redo=[fit]"
        )
    learner.finish()
    folder, working = path / TUNED, path / f".{TUNED}.partial"
    shutil.rmtree(working, ignore_errors=True)
    run.target.model.save_pretrained(working)
    if run.target.tokenizer is not None:
        run.target.tokenizer.save_pretrained(working)
    shutil.rmtree(folder, ignore_errors=True)
    working.rename(folder)
    run.forget_target()
    say(f"          the tuned target is in {folder}")
    return quality


def _peak_memory(device: torch.device) -> float:
    """Of this process so far, in GB: on a GPU what torch allocated there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
