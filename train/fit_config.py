"""FitConfig: conf/fit/*.yaml, what train/loop.py and train/validation.py do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from specdec.errors import UserError
from train.adapters import LoraConfig
from train.optim import KINDS, SCHEDULES

DTYPES = ("auto", "float32", "bfloat16")
KEEP = ("best", "last")


@dataclass(frozen=True)
class FitConfig:
    """conf/fit/*.yaml."""

    optimizer: str = "muon"
    """muon (matrices; the rest with AdamW) or adamw."""
    lr: float = 2e-3
    """Peak learning rate, the same for both."""
    schedule: str = "cosine"
    """cosine, linear or constant, after the warm-up."""
    min_lr_ratio: float = 0.02
    """Share of lr that cosine and linear end at."""
    epochs: float = 2.0
    """Passes over the distilled texts; ignored when max_steps is set."""
    max_steps: int | None = None
    """Optimiser steps."""
    batch_size: int = 4
    """Rows per batch: a text each, or as many as pack_tokens takes."""
    pack_tokens: int | None = None
    """Put several texts into one row of up to this many tokens; they do not see each other. null: a text a row."""
    gradient_accumulation_steps: int = 1
    """Batches per optimiser step."""
    warmup_ratio: float = 0.04
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.01
    """On matrices only."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    average_decay: float = 0.99
    """Of the moving average of the weights, which is what is saved; 0 turns it off."""
    dtype: str = "auto"
    """Of the arithmetic: auto is bfloat16 (autocast; the weights stay in fp32) on a GPU that has it, else float32."""
    lora: LoraConfig | None = None
    """Train low-rank adapters on the drafter's linear layers instead of its weights; they are merged when it is saved.
    For a draft model that can already draft."""
    save_steps: int = 100
    """Steps between checkpoints."""
    eval_steps: int | None = None
    """Steps between evaluations: prompts withheld from training are decoded with the drafter. null: none."""
    eval_prompts: int = 12
    """Prompts withheld for that, with all texts that begin with them."""
    eval_tokens: int = 64
    """Tokens decoded for each of them."""
    patience: int | None = None
    """End the fit after so many evaluations without a better accepted length. null: go on."""
    keep: str = "best"
    """Which checkpoint is used: best (that of the best evaluation, where there were any) or last."""

    def __post_init__(self) -> None:
        choices = {"optimizer": KINDS, "schedule": SCHEDULES, "dtype": DTYPES, "keep": KEEP}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise UserError(f"fit.{name}: '{value}' is not one of {', '.join(known)}")
        for name in ("batch_size", "gradient_accumulation_steps", "save_steps", "eval_prompts", "eval_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"fit.{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("pack_tokens", "eval_steps", "patience"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise UserError(f"fit.{name} must be 1 or more, or null, got {number}")
        numbers = (self.lr, self.epochs, 1 if self.max_steps is None else self.max_steps)
        if not all(0 < number < math.inf for number in numbers):
            raise UserError("fit.lr, fit.epochs and fit.max_steps must be above 0")
        if not 0 <= self.weight_decay < math.inf or not 0 <= self.warmup_ratio <= 1 or not self.max_grad_norm > 0:
            raise UserError("fit.weight_decay must be 0 or more, fit.warmup_ratio from 0 to 1, max_grad_norm above 0")
        if not 0 <= self.average_decay < 1 or not 0 <= self.min_lr_ratio <= 1:
            raise UserError("fit.average_decay must be from 0 to below 1, fit.min_lr_ratio from 0 to 1")
        if self.patience is not None and self.eval_steps is None:
            raise UserError("fit.patience counts evaluations: set fit.eval_steps")

    def steps(self, batches: int) -> int:
        """Optimiser steps, given the batches of one pass over the texts."""
        if self.max_steps is not None:
            return self.max_steps
        return max(1, round(self.epochs * batches / self.gradient_accumulation_steps))

    def evaluates(self, step: int, steps: int) -> bool:
        """Whether there is an evaluation after this step; the last one has one."""
        return self.eval_steps is not None and (step % self.eval_steps == 0 or step == steps)

    def half(self, device: torch.device) -> bool:
        """Whether a step computes in bfloat16."""
        if self.dtype == "auto":
            return device.type == "cuda" and torch.cuda.is_bf16_supported()
        return self.dtype == "bfloat16"
