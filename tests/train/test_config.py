"""Every recipe that comes with the project can be read."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from specdec import UserError
from train.config import CONF, read

ROWS = CONF.parent / "data" / "prompts" / "chat-train.jsonl"
RECIPES = sorted(str(p.relative_to(CONF / "experiment").with_suffix("")) for p in CONF.glob("experiment/**/*.yaml"))


def config(*overrides):
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return read(compose("config", list(overrides)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_and_says_where_its_values_come_from(name):
    own = () if not name.startswith("8b/") else ("data=jsonl", f"data.path={ROWS}")
    made = config(f"experiment={name}", *own)
    assert made.target.name == ("llama31-8b" if own else "smollm2-135m")
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("8b/") and name != "8b/text"])
def test_one_and_eight_gpus_see_the_same_texts_a_step(name):
    own = (f"experiment={name}", "data=jsonl", f"data.path={ROWS}")
    one, eight = config(*own), config(*own, "fit=gpu8")
    assert one.fit.batch_size * one.fit.gradient_accumulation_steps == 32
    assert 8 * eight.fit.batch_size * eight.fit.gradient_accumulation_steps == 32


def test_losses_are_sums_on_the_command_line():
    assert config("drafter.objective.loss=0.1*ce+0.9*jsd:0.5").objective.loss == "0.1*ce+0.9*jsd:0.5"
    assert config("fit.lora={rank: 4}").fit.lora.rank == 4


def test_a_target_is_not_tuned_for_a_drafter_that_reads_nothing_of_it():
    with pytest.raises(UserError, match=r"target\.train=lora tunes the states"):
        config("drafter=draft_model", "target.train=lora")


@pytest.mark.parametrize("name", ["eagle", "eagle1", "hass"])
def test_recipes_of_one_kind_have_folders_of_their_own(name):
    made = config(f"drafter={name}")
    assert made.kind == "eagle"
    assert made.out.name == f"smollm2-135m-{name}-maths"
    assert (made.model.generation, made.model.taps) == ((3, None) if name == "eagle" else (1, []))
    assert (made.objective.unroll, made.objective.detach) == ((1 if name == "eagle1" else 3), name == "hass")
    assert config("drafter.model.generation=1").model.taps == []
    with pytest.raises(UserError, match=r"fit\.lora puts adapters on the drafter alone"):
        config("drafter=medusa", "target.train=lora", "fit.lora={rank: 4}")
