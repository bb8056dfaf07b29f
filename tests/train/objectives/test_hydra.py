"""Hydra's own: what a head reads and learns, against a sum by hand; and what is refused."""

import pytest
import torch
from tiny import tiny_model
from trained import TRAINED

from data.batches import Batch
from specdec import Target, UserError
from train.objectives.hydra import HydraObjectiveConfig

TARGET = Target(tiny_model())


@pytest.mark.parametrize("teacher", ["soft", "hard"])
def test_the_loss_is_each_heads_kl_from_its_teacher(teacher):
    """Head k at slot t: reads f_t and x_{t+1} … x_{t+1+k}, taught by the target's row t + 1 + k or by x_{t+2+k}."""
    drafter = TRAINED["hydra"].stirred(TARGET)
    settings = {"teacher": teacher, "teacher_power": 1.5, "decay": 0.7}
    objective = TRAINED["hydra"].learning(drafter, TARGET, **settings)
    tokens = torch.randint(3, 190, (1, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(tokens).bool()
    mask[0, 4:8] = True
    final = TARGET.features(tokens, ("final",)).clone()
    totals = objective(drafter, Batch(tokens, mask, torch.zeros_like(tokens), final))
    loss = count = 0.0
    for head in range(3):
        for label in range(4, 8):
            slot = label - 2 - head
            if slot < 0:
                continue
            read = tokens[:, slot + 1 : label]
            log_q = drafter.output(head)(drafter.hidden(head, final[:, slot, -1], read))[0].detach().log_softmax(-1)
            p = (1.5 * TARGET.head(final[0, label - 1, -1])[drafter.draft_ids]).softmax(-1)
            if teacher == "hard":
                p = (drafter.draft_ids == tokens[0, label]).double()
            loss += 0.7**head * float((torch.special.xlogy(p, p) - p * log_q).sum())
            count += 0.7**head
    assert float(totals["loss"].sum.detach()) == pytest.approx(loss, rel=1e-9)
    assert float(totals["loss"].count) == pytest.approx(count)


@pytest.mark.parametrize("bad", [{"teacher": "softly"}, {"decay": 0.0}, {"teacher_power": -1.0}, {"weighting": "x"}])
def test_bad_settings_are_named(bad):
    with pytest.raises(UserError, match=rf"drafter\.objective\.{next(iter(bad))}"):
        HydraObjectiveConfig(**bad)
