"""How much memory a training step of EAGLE-3 takes on one row of 4096 tokens with a vocabulary of 128k.

Measured from outside torch, as the most that the process held, so each case is a process of its own: this file run as
a script. A minute or two each.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.batches import Batch
from specdec import Target
from specdec.drafters.eagle import EagleConfig, create
from train.objectives.eagle import EagleObjective, EagleObjectiveConfig
from train.optim import Average, Optimizers

ROOT = Path(__file__).parents[3]
TOKENS, VOCAB, DRAFT_VOCAB, WIDTH = 4096, 131072, 32768, 1024
MOST_MIB = 2560
RESET = Path("/proc/self/clear_refs")


def held_mib(key: str) -> float:
    """VmRSS, what the process holds, or VmHWM, the most it held since RESET."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def step_mib(heads: int, documents: int) -> tuple[float, float]:
    """One step of AdamW on a whole row: the most it took above weights, target and batch until the gradients were
    there, and in all. The optimiser's moments and the average of the weights count."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
    )
    target = Target(LlamaForCausalLM(config))
    counts = torch.arange(VOCAB, 0, -1).double()
    drafter = create(EagleConfig(draft_vocab_size=DRAFT_VOCAB), target, counts, torch.Generator().manual_seed(0))
    tokens = torch.randint(3, DRAFT_VOCAB // 2, (1, TOKENS))
    numbers = (torch.arange(TOKENS) * documents // TOKENS)[None]
    features = torch.randn(1, TOKENS, len(drafter.taps) + 1, WIDTH)
    batch = Batch(tokens, torch.ones_like(tokens).bool(), numbers, features)
    objective = EagleObjective(EagleObjectiveConfig(supervise_prompt=True), drafter, target)
    parameters = dict(drafter.named_parameters())
    RESET.write_text("5")
    before = held_mib("VmRSS")
    objective(drafter, batch)["loss"].sum.backward()
    gradients = held_mib("VmHWM") - before
    optimizer, average = Optimizers(parameters, "adamw", 1e-4, 0.01), Average(parameters, 0.99)
    torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    optimizer.step(1.0)
    average.update(parameters, 0)
    return gradients, held_mib("VmHWM") - before


@pytest.mark.slow
@pytest.mark.skipif(not RESET.exists(), reason="needs Linux")
@pytest.mark.parametrize(("heads", "documents"), [(16, 1), (8, 5)], ids=["heads of 64", "heads of 128, packed"])
def test_a_long_row_fits(heads, documents):
    command = [sys.executable, __file__, str(heads), str(documents)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    gradients, whole = map(float, done.stdout.split())
    print(f"{gradients:.0f} MiB until the gradients, {whole:.0f} MiB with the optimiser's step")
    assert gradients <= whole < MOST_MIB


if __name__ == "__main__":
    print(*step_mib(*map(int, sys.argv[1:])))
