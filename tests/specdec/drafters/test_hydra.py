"""Hydra's own: how its heads begin, and that each node's children are guessed from its own path."""

import torch

from specdec import Limits, TokenTree, generate
from specdec.drafters import hydra
from specdec.drafters.hydra import HydraConfig, create, path_tokens

PROMPT = [5, 60, 7, 81, 9]
HEADS = 3


def drafter_for(target, **changes):
    counts = torch.arange(target.vocab_size, 0, -1).double()
    config = HydraConfig(**({"heads": HEADS, "draft_vocab_size": 200} | changes))
    return create(config, target, counts, torch.Generator().manual_seed(0)).double()


def stirred(drafter):
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.empty_like(parameter).normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
            parameter.add_(noise)
    return drafter


def test_every_head_begins_as_the_targets_own(target):
    drafter = drafter_for(target)
    final = target.features(torch.tensor([[5, 6, 7]]), ("final",))[0, :, -1].clone()
    expected = target.head(final)[:, drafter.draft_ids]
    for head in range(HEADS):
        tokens = torch.randint(0, 300, (3, 1 + head), generator=torch.Generator().manual_seed(head))
        assert torch.allclose(drafter.output(head)(drafter.hidden(head, final, tokens)), expected)


def test_a_head_heeds_every_token_and_their_order(target):
    drafter = stirred(drafter_for(target))
    final = target.features(torch.tensor([[5]]), ("final",))[0, :, -1].clone()
    whole = drafter.hidden(2, final, torch.tensor([[7, 8, 9]]))
    for other in ([3, 8, 9], [7, 3, 9], [7, 8, 3], [9, 8, 7]):
        assert not torch.allclose(drafter.hidden(2, final, torch.tensor([other])), whole)


def test_heads_share_no_weights_but_the_output(target):
    drafter = drafter_for(target, layers=2)
    own = HEADS * (1 + 2 * 2)  # mix; two blocks of matrix and bias
    assert len({p.data_ptr() for p in drafter.parameters()}) == own + 2  # the norm, the output
    assert len(list(drafter_for(target, layers=2, own_output=True).parameters())) == own + 1 + HEADS


def test_the_embedding_is_the_targets_and_not_its_own(target):
    drafter = drafter_for(target)
    held = {tensor.data_ptr() for tensor in target.model.state_dict().values()}
    assert not held & {tensor.data_ptr() for tensor in drafter.state_dict().values()}
    assert not any("embed" in name for name in drafter.state_dict())


def test_children_are_guessed_from_their_own_paths(target, monkeypatch):
    """Two rows, nodes of all depths in one call, padding among them, against each node's path walked by hand."""
    drafter = stirred(drafter_for(target))
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 0, -2, 3]])
    tree = TokenTree(torch.randint(3, 200, (2, 6), generator=torch.Generator().manual_seed(2)), parents)
    given = []

    def read(config, context, expand, *_):  # noqa: ARG001
        given.append((context, expand(tree, 0), expand(tree, 3)))
        return TokenTree.chain(context.pending()[:, None])

    monkeypatch.setattr(hydra, "grow", read)
    generate(target, drafter, [PROMPT, PROMPT[1:]], Limits(3))
    context, logits, later = given[0]
    assert torch.allclose(later, logits[:, 3:], atol=1e-12)
    for row in range(2):
        final = context.features[row, context.counts[row] - 1, -1]
        for node in range(6):
            path, at = [], node
            while at >= 0:
                path.insert(0, int(tree.tokens[row, at]))
                at = int(parents[row, at])
            head = len(path) - 1
            expected = drafter.output(head)(drafter.hidden(head, final[None], torch.tensor([path])))
            assert torch.allclose(logits[row, node], expected[0], atol=1e-12)


def test_path_tokens_begin_at_the_root():
    tree = TokenTree(torch.tensor([[10, 11, 12, 13]]), torch.tensor([[-1, 0, 0, 2]]))
    rows = torch.zeros(1, dtype=torch.long)
    assert path_tokens(tree, rows, torch.tensor([3]), 2).tolist() == [[10, 12, 13]]
    assert path_tokens(tree, rows, torch.tensor([0]), 0).tolist() == [[10]]
