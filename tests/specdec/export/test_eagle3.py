import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import UserError
from specdec.drafters.eagle import EagleConfig, create
from specdec.export import eagle3


@pytest.fixture(params=[True, False], ids=["3.1", "3"])
def drafter(target, request):
    flags = {"fc_norm": request.param, "norm_output": request.param}
    counts = torch.rand(target.vocab_size, generator=torch.Generator().manual_seed(1)).double()
    config = EagleConfig(draft_vocab_size=64, **flags)
    return create(config, target, counts, torch.Generator().manual_seed(0)).float()


def test_export_reads_back_the_same(drafter, target, tmp_path):
    target.model.float()
    differences = eagle3.export(drafter, target, tmp_path / "eagle3")
    assert all(value < 1e-6 for value in differences.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eagle3"]
    config = json.loads((tmp_path / "eagle3/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 64
    assert config["vocab_size"] == target.vocab_size
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    tensors = load_file(tmp_path / "eagle3/model.safetensors")
    assert torch.equal(tensors["d2t"] + torch.arange(64), drafter.draft_ids)
    assert tensors["t2d"].sum() == 64
    assert not any("embed" in name for name in tensors)


def test_other_dtypes(drafter, target, tmp_path):
    target.model.float()
    eagle3.export(drafter, target, tmp_path / "e", "bfloat16")
    assert load_file(tmp_path / "e/model.safetensors")["fc.weight"].dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"export\.dtype: 'int4'"):
        eagle3.export(drafter, target, tmp_path / "f", "int4")


def test_taps_other_than_the_default_are_written_in_both_numberings(target):
    counts = torch.ones(target.vocab_size).double()
    one = create(EagleConfig(draft_vocab_size=64, taps=[1, 2, 4]), target, counts, torch.Generator())
    config = eagle3.config_for(one.shape, target, "float32")
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation": 1}, r"no layout for EAGLE-1 \(drafter\.model\.generation=1\) yet"),
        ({"taps": [0, 1, 2, 4]}, r"engines load EAGLE-3 with three taps.*\[0, 1, 2, 4\]"),
    ],
)
def test_what_engines_do_not_load_is_refused(target, tmp_path, changes, message):
    config = EagleConfig(draft_vocab_size=64, **changes)
    one = create(config, target, torch.ones(target.vocab_size).double(), torch.Generator())
    with pytest.raises(UserError, match=message):
        eagle3.export(one, target, tmp_path / "e")
    assert list(tmp_path.iterdir()) == []
    assert eagle3.refusal("eagle", config)
    assert not eagle3.refusal("eagle", EagleConfig(draft_vocab_size=64))


def break_tensor(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors, name)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("midlayer.hidden_norm.weight", lambda t, n: t.pop(n), "midlayer.hidden_norm.weight: shape None"),
        ("fc.bias", lambda t, n: t.update({n: torch.ones(3)}), "fc.bias"),
        ("fc.weight", lambda t, n: t[n].fill_(float("nan")), "not finite"),
        ("d2t", lambda t, n: t[n].add_(torch.arange(64)), "d2t"),
        ("d2t", lambda t, n: t.update({n: t[n].flip(0)}), "d2t"),
        ("t2d", lambda t, n: t[n].fill_(False), "t2d"),
    ],
)
def test_the_check_sees_each_mistake_engines_load_silently(drafter, target, tmp_path, name, change, message):
    target.model.float()
    eagle3.export(drafter, target, tmp_path / "e")
    assert eagle3.check(tmp_path / "e", drafter.shape) == []
    break_tensor(tmp_path / "e", name, change)
    assert any(message in problem for problem in eagle3.check(tmp_path / "e", drafter.shape))


def test_a_failed_export_leaves_nothing(drafter, target, tmp_path):
    target.model.float()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="not finite"):
        eagle3.export(drafter, target, tmp_path / "e")
    assert list(tmp_path.iterdir()) == []
