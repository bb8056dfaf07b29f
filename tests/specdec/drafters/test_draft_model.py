"""A distilled draft model: saved and opened, narrow heads, what is the drafter's own and what the target's."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import EOS, family_model, tiny_model, tiny_tokenizer

from specdec import Limits, Sampling, Target, TreeConfig, UserError, generate, open_drafter
from specdec.drafter import save_drafter
from specdec.drafters.draft_model import DraftModelConfig, config_of, create, vocabulary
from specdec.drafters.none import Plain
from specdec.subset import Lent

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3]]
TREE = TreeConfig(kind="dynamic", depth=3, width=3, nodes=9)
SUBSETS = {
    "subset": {"layers": [0, 2]},
    "own_head": {"layers": [1, 4], "head": "own"},
    "whole": {"layers": [3], "draft_vocab_size": None},
    "searched": {"layer_count": 2},
}
SOURCES = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "padded": {"vocab_size": 310, "tie_word_embeddings": True, "hidden_size": 24},
    "smaller": {"vocab_size": 290},
}


def made(target, **changes):
    config = DraftModelConfig(**({"draft_vocab_size": 200} | changes))
    counts = torch.rand(target.vocab_size, generator=torch.Generator().manual_seed(1)).double()
    texts = [torch.randint(3, 200, (30,), generator=torch.Generator().manual_seed(2))]
    drafter = create(config, target, counts, torch.Generator().manual_seed(0), texts).to(target.model.dtype)
    drafter.tree = TREE
    return drafter


def source_at(folder, **changes):
    tiny_model(9, **({"num_hidden_layers": 2} | changes)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def trained(drafter):
    """Every parameter moved, as training would."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).to(parameter)
    return drafter


def rounds(target, drafter):
    out = generate(target, drafter, PROMPTS, Limits(25, (EOS,)))
    assert [g.tokens for g in out] == [g.tokens for g in generate(target, Plain(), PROMPTS, Limits(25, (EOS,)))]
    return [g.rounds for g in out], generate(target, drafter, PROMPTS, Limits(9), Sampling(1.0), seed=1)[0].rounds


@pytest.mark.parametrize("kind", [*SUBSETS, *SOURCES, "whole_tied"])
def test_saved_and_opened_proposes_the_same(target, tmp_path, kind):
    place = tmp_path / "source"
    if kind in SUBSETS:
        changes = SUBSETS[kind]
    elif kind == "whole_tied":
        changes = {"source": source_at(place, **SOURCES["padded"]), "draft_vocab_size": None}
    else:
        changes = {"source": source_at(place, **SOURCES[kind])}
    drafter = trained(made(target, **changes))
    (tmp_path / "saved").mkdir()
    save_drafter(drafter, "draft_model", config_of(drafter), tmp_path / "saved")
    shutil.rmtree(place, ignore_errors=True)  # what was saved is enough
    state = torch.random.get_rng_state()
    again = open_drafter(tmp_path / "saved", target)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert again.tree == TREE
    assert again.shape == drafter.shape
    assert torch.equal(vocabulary(again), vocabulary(drafter))
    assert rounds(target, again) == rounds(target, drafter)


def test_of_a_subset_only_its_layers_and_norm_are_trained_and_saved(target, tmp_path):
    drafter = made(target, layers=[0, 2])
    save_drafter(drafter, "draft_model", config_of(drafter), tmp_path)
    names = set(load_file(tmp_path / "drafter.safetensors"))
    assert names == {name for name, _ in drafter.named_parameters()} | {"draft_ids"}
    assert all(name.startswith(("body.layers.0.", "body.layers.1.", "body.norm.")) for name in names - {"draft_ids"})
    one = sum(p.numel() for p in target.model.model.layers[0].parameters())
    assert sum(p.numel() for p in drafter.parameters()) == 2 * one + target.width
    assert all(p.requires_grad for p in drafter.parameters())
    assert not any(p.requires_grad for p in target.model.parameters())


def test_tied_matrices_are_saved_once_and_come_back_tied(target, tmp_path):
    drafter = made(target, source=source_at(tmp_path / "source", **SOURCES["tied"]))
    (tmp_path / "saved").mkdir()
    save_drafter(drafter, "draft_model", config_of(drafter), tmp_path / "saved")
    tables = [name for name, t in load_file(tmp_path / "saved/drafter.safetensors").items() if len(t) == 300]
    assert tables == ["body.embed_tokens.weight"]
    again = open_drafter(tmp_path / "saved", target)
    with torch.no_grad():
        again.body.embed_tokens.weight[7] = 3.0
    row = again.draft_ids.tolist().index(7)
    assert bool((again.head_rows()[row] == 3.0).all())


def test_an_opened_drafter_multiplies_only_the_rows_it_proposes(target, tmp_path):
    drafter = made(target, layers=[0, 2])
    save_drafter(drafter, "draft_model", config_of(drafter), tmp_path)
    again = open_drafter(tmp_path, target)
    assert again.output.weight.shape == (200, target.width)
    assert not [name for name in (*again.state_dict(), *dict(again.named_parameters())) if "output" in name]
    final = torch.randn(3, target.width, dtype=torch.float64)
    expected = target.head(final)[:, again.draft_ids]
    assert torch.allclose(again.model.head(final), expected)
    assert torch.allclose(again.output(final), expected)
    whole = made(target, layers=[0], draft_vocab_size=None)
    assert torch.allclose(whole.model.head(final), target.head(final)), "the target's own head, without a copy"


def test_rare_tokens_are_never_proposed(target):
    drafter = made(target, layers=[0, 1, 2], draft_vocab_size=20)
    known, seen = set(drafter.draft_ids.tolist()), []
    original = drafter.propose
    drafter.propose = lambda *arguments: seen.append(original(*arguments)) or seen[-1]
    generate(target, drafter, PROMPTS, Limits(12))
    assert seen
    for tree in seen:
        assert set(tree.tokens[tree.parents >= 0].tolist()) <= known


def test_adapters_on_its_layers_are_used_in_training_and_decoding(target):
    """What a training loop puts in a linear layer's place."""

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.up = torch.nn.Parameter(torch.zeros_like(base.weight))

        def forward(self, x):
            return self.base(x) + x @ self.up.T

    drafter = made(target, layers=[0, 2])
    tokens, documents = torch.tensor([[5, 6, 7, 8]]), torch.zeros(1, 4, dtype=torch.long)
    plain = drafter.states(tokens, documents).detach()
    mlp = drafter.get_submodule("body.layers.1.mlp")
    mlp.down_proj = Adapted(mlp.down_proj)
    assert torch.equal(drafter.states(tokens, documents), plain)
    before = rounds(target, drafter)
    torch.nn.init.normal_(mlp.down_proj.up, std=0.5)
    changed = drafter.states(tokens, documents)
    assert not torch.allclose(changed, plain)
    changed.sum().backward()
    assert bool((mlp.down_proj.up.grad != 0).any())
    assert rounds(target, drafter) != before


def test_dropout_stays_off():
    target = Target(family_model("gpt2", 0))
    drafter = made(target, layers=[0, 2])
    drafter.train()
    assert not any(module.training for module in drafter.modules())
    tokens, documents = torch.tensor([[5, 6, 7, 8]]), torch.zeros(1, 4, dtype=torch.long)
    assert torch.equal(drafter.states(tokens, documents), drafter.states(tokens, documents))


def test_a_half_precision_target_is_trained_in_fp32_with_exact_positions(tmp_path):
    target = Target(tiny_model(initializer_range=0.1).to(torch.bfloat16), tiny_tokenizer(), "half")
    drafter = create(DraftModelConfig(layers=[0, 2], draft_vocab_size=200), target, torch.ones(300), torch.Generator())
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert drafter.states(torch.tensor([[5, 6]]), torch.zeros(1, 2, dtype=torch.long)).dtype == torch.float32
    assert len(generate(target, drafter, PROMPTS, Limits(6))[0].tokens) == 6
    save_drafter(drafter, "draft_model", config_of(drafter), tmp_path)
    again = open_drafter(tmp_path, target)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert len(generate(target, again, PROMPTS, Limits(6))[0].tokens) == 6
    precise = open_drafter(tmp_path, target, torch.float32)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(precise.get_parameter(name), parameter)


def test_rotary_positions_of_a_source_are_not_rounded(target, tmp_path):
    drafter = made(target, source=source_at(tmp_path)).to(torch.bfloat16)
    (table,) = [module for module in drafter.modules() if isinstance(module, Lent)]
    assert table._part[0].inv_freq.dtype == torch.float32


def test_another_tokenizer_is_refused(target, tmp_path):
    place = source_at(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(place)
    with pytest.raises(UserError, match="another tokenizer than the target"):
        made(target, source=place)


def test_what_does_not_fit_is_named(target, tmp_path):
    with pytest.raises(UserError, match=r"drafter\.model\.source: 'nowhere/at/all' is not there"):
        made(target, source="nowhere/at/all")
    with pytest.raises(UserError, match=r"drafter\.model\.layers is \[0, 5\], the target has 5 layers"):
        made(target, layers=[0, 5])
    with pytest.raises(UserError, match=r"drafter\.model\.layer_count is 6, the target has 5"):
        made(target, layer_count=6)
    with pytest.raises(UserError, match=r"drafter\.model\.draft_vocab_size is 400, .* share 300"):
        made(target, layers=[0], draft_vocab_size=400)
    drafter = made(target, layers=[0, 4])
    save_drafter(drafter, "draft_model", config_of(drafter), tmp_path)
    with pytest.raises(UserError, match="made for a target with target_layers 5; shorter has 4"):
        open_drafter(tmp_path, Target(tiny_model(num_hidden_layers=4), None, "shorter"))


def test_a_head_with_a_bias_is_refused():
    model = tiny_model()
    model.lm_head = torch.nn.Linear(48, 300, bias=True).double()
    with pytest.raises(UserError, match="its head is not a plain matrix"):
        made(Target(model), layers=[0])


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"layer_count": 0}, "layer_count"),
        ({"draft_vocab_size": 2}, "draft_vocab_size"),
        ({"layers": [1, 1]}, "layers"),
        ({"layers": [-1]}, "layers"),
        ({"layers": [0], "source": "a/b"}, "layers"),
        ({"head": "frozn"}, "head"),
    ],
)
def test_bad_settings_are_named(bad, key):
    with pytest.raises(UserError, match=rf"drafter\.model\.{key}"):
        DraftModelConfig(**bad)
