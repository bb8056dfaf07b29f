import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, SMALL, family_model, tiny_model, tiny_tokenizer
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from specdec import Target, TokenTree, UserError
from specdec.tree import Paths

PROMPTS = [[5, 6, 7, 8, 9], [9, 8]]


def full(target, ids):
    with target.stock() as model, torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True)


def test_start_reads_prompts_of_any_length(target):
    reading = target.start(PROMPTS, 16, (2, "final"))
    for row, prompt in enumerate(PROMPTS):
        expected = full(target, prompt)
        assert torch.allclose(reading.logits[row, 0], expected.logits[0, -1], atol=1e-12)
        got = reading.features[row, : len(prompt)]
        assert torch.allclose(got[:, 0], expected.hidden_states[2][0], atol=1e-12)
        assert torch.allclose(got[:, 1], expected.hidden_states[-1][0], atol=1e-12)


def test_a_tree_reads_each_path_as_if_it_were_the_text(target):
    target.start(PROMPTS, 16)
    tree = TokenTree(torch.tensor([[5, 6, 7, 8]] * 2), torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 1]]))
    logits = target.read(tree).logits
    paths = [[5], [5, 6], [5, 7], [5, 7, 8]], [[5], [5, 6], [5, 6, 7], [5, 6, 8]]
    for row, prompt in enumerate(PROMPTS):
        for node, path in enumerate(paths[row]):
            expected = full(target, prompt + path).logits[0, -1]
            assert torch.allclose(logits[row, node], expected, atol=1e-12)


def test_keep_moves_the_accepted_path_and_forgets_the_rest(target):
    target.start(PROMPTS, 16)
    target.read(TokenTree(torch.tensor([[5, 6, 7, 8]] * 2), torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 1]])))
    target.keep(Paths(torch.tensor([[0, 2, 3], [0, 0, 0]]), torch.tensor([3, 1])))
    assert target.lengths.tolist() == [8, 3]
    logits = target.read(TokenTree.chain(torch.tensor([[9, 10], [9, 10]]))).logits
    for row, text in enumerate(([5, 6, 7, 8, 9, 5, 7, 8, 9, 10], [9, 8, 5, 9, 10])):
        assert torch.allclose(logits[row, -1], full(target, text).logits[0, -1], atol=1e-12)


def test_rows_can_be_dropped(target):
    target.start(PROMPTS, 16)
    target.select(torch.tensor([1]))
    logits = target.read(TokenTree.chain(torch.tensor([[4]]))).logits
    assert torch.allclose(logits[0, 0], full(target, [9, 8, 4]).logits[0, -1], atol=1e-12)


def test_features_of_texts_equal_those_of_reading(target):
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    features = target.features(tokens, (1, 3))
    assert torch.allclose(features[0, :, 1], full(target, [5, 6, 7, 8]).hidden_states[3][0], atol=1e-12)
    assert torch.allclose(features[1, :2, 0], full(target, [5, 6]).hidden_states[1][0], atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_packed_texts_equal_those_of_each_alone(family):
    """Also where a row is longer than the window, as long as its texts are not: learned positions end there."""
    target = Target(family_model(family, 0, positions=16))
    sizes = [[9, 3, 7], [1], [14]]
    tokens, documents = torch.zeros(3, 19, dtype=torch.long), torch.full((3, 19), -1)
    alone = []
    for row, lengths in enumerate(sizes):
        start = 0
        for length in lengths:
            text = torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(length))
            tokens[row, start : start + length], documents[row, start : start + length] = text, len(alone)
            alone.append(target.features(text[None], (1, "final"))[0])
            start += length
    features = target.features(tokens, (1, "final"), documents)
    for number, expected in enumerate(alone):
        assert torch.allclose(features[documents == number], expected, atol=1e-12)


def test_one_document_a_row_has_the_features_it_always_had(target):
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    documents = torch.tensor([[0, 0, 0, 0], [1, 1, -1, -1]])
    assert torch.equal(target.features(tokens, (1, 3), documents), target.features(tokens, (1, 3)))


def test_the_head_scores_stored_states(target):
    reading = target.start([[3, 4]], 4, ("final",))
    assert torch.equal(target.head(reading.features[:, -1, 0]), reading.logits[:, 0])


def test_prompts_must_have_a_token_and_fit_the_window(target):
    with pytest.raises(UserError, match="prompt 1 is empty"):
        target.start([[1], []], 4)
    with pytest.raises(UserError, match="prompt 0 has 600 tokens"):
        target.start([[3] * 600], 4)


def test_models_whose_head_is_scaled_are_refused():
    model = tiny_model()
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = scaled
    with pytest.raises(UserError, match="would not be exact"):
        Target(model, tiny_tokenizer())


def test_sliding_window_models_are_refused():
    model = tiny_model()
    model.config.layer_types = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
    with pytest.raises(UserError, match="rolled back"):
        Target(model, tiny_tokenizer())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_trees_exactly(family, attention):
    """T16 on each architecture: every node's logits are those of a plain pass over its path."""
    target = Target(family_model(family, 0, attention))
    prompt, parents = [5, 6, 7], [-1, 0, 0, 1, 1, 3]
    target.start([prompt], 8)
    tokens = [8, 9, 10, 11, 12, 13]
    logits = target.read(TokenTree(torch.tensor([tokens]), torch.tensor([parents]))).logits[0]
    for node in range(6):
        path, at = [], node
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        # transformers' eager attention takes its softmax in fp32 whatever the model's dtype.
        close = 1e-3 if attention == "eager" else 1e-10
        assert torch.allclose(logits[node], full(target, prompt + path).logits[0, -1], atol=close)


def test_models_with_a_window_or_soft_caps_are_refused():
    window = MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8))
    with pytest.raises(UserError, match="sliding"):
        Target(window)
    gemma = Gemma2ForCausalLM(Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8))
    with pytest.raises(UserError, match="exact"):
        Target(gemma)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_trees_over_random_batches(data):
    """Any tree shape, any row lengths, padding anywhere: each real node scores as its path alone."""
    target = SHARED
    rows = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, 9))
    prompts = [[3 + (7 * r + i) % 200 for i in range(data.draw(st.integers(1, 9)))] for r in range(rows)]
    parents = []
    for _ in range(rows):
        row = [-1]
        for n in range(1, count):
            candidates = [p for p in range(n) if row[p] != -2]
            row.append(data.draw(st.sampled_from([*candidates, -2])))
        parents.append(row)
    tokens = torch.randint(3, 200, (rows, count), generator=torch.Generator().manual_seed(count * 31 + rows))
    target.start(prompts, 16)
    logits = target.read(TokenTree(tokens, torch.tensor(parents))).logits
    for r in range(rows):
        for node in range(count):
            if parents[r][node] == -2:
                continue
            path, at = [], node
            while at >= 0:
                path.insert(0, int(tokens[r, at]))
                at = parents[r][at]
            assert torch.allclose(logits[r, node], full(target, prompts[r] + path).logits[0, -1], atol=1e-10)


def test_features_with_gradients_are_the_same_and_lead_to_the_weights(target):
    tokens, documents = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1, -1]])
    plain = target.features(tokens, (2, "final"), documents)
    assert plain.is_inference()
    weight = target.model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    with_gradients = target.features(tokens, (2, "final"), documents, gradients=True)
    assert torch.equal(with_gradients, plain)
    with_gradients.sum().backward()
    assert bool((weight.grad != 0).any())


SHARED = Target(tiny_model())
