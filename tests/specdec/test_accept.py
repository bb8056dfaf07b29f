import functools

import pytest
import torch

from specdec import Sampling
from specdec.accept import Typical, Verdict, block, leviathan, lossless, siblings, target_walk
from specdec.sampling import Stream, draw, pick
from specdec.tree import Paths, TokenTree


def one_hot(*tokens, vocab=8):
    return torch.nn.functional.one_hot(torch.tensor([tokens]), vocab).float()


def walk(tree, probs, generator=None, rule=target_walk):
    positions = torch.zeros(tree.tokens.shape[0], dtype=torch.long)
    return rule(tree, probs, positions, Stream(generator))


def test_greedy_walk_follows_the_target_and_gives_its_correction():
    # root 3 -> {4, 5}; 5 -> {6}
    tree = TokenTree(torch.tensor([[3, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 2]]))
    verdict = walk(tree, one_hot(5, 0, 6, 7))
    assert verdict.paths.nodes.tolist() == [[0, 2, 3]]
    assert verdict.paths.lengths.tolist() == [3]
    assert verdict.next_tokens.tolist() == [7]


def test_rows_walk_on_their_own():
    tree = TokenTree.chain(torch.tensor([[3, 4, 5], [3, 4, 5]]))
    probs = torch.cat([one_hot(4, 5, 6), one_hot(0, 5, 6)])
    verdict = walk(tree, probs)
    assert verdict.paths.lengths.tolist() == [3, 1]
    assert verdict.next_tokens.tolist() == [6, 0]


def test_a_padding_node_is_never_a_child():
    tree = TokenTree(torch.tensor([[3, 4]]), torch.tensor([[-1, -2]]))
    assert walk(tree, one_hot(4, 4)).paths.lengths.tolist() == [1]


def test_sampled_walk_emits_the_targets_distribution(generator):
    """First emitted token of a one-child tree: accepted or corrected, it is a draw from the root's row."""
    rows, probs = 40_000, torch.tensor([0.1, 0.2, 0.4, 0.3])
    tree = TokenTree.chain(torch.tensor([[0, 2]]).expand(rows, -1))
    verdict = walk(tree, probs.expand(rows, 2, -1), generator)
    first = torch.where(verdict.paths.lengths == 2, torch.tensor(2), verdict.next_tokens)
    counts = torch.bincount(first, minlength=4).double()
    expected = probs.double() * rows
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, p = 0.001


def test_trees_drawn_by_chance_are_refused():
    tree = TokenTree(torch.tensor([[3]]), torch.tensor([[-1]]), torch.ones(1, 1, 8))
    with pytest.raises(ValueError, match="without chance"):
        walk(tree, one_hot(4))


# -- exactness on a toy language: every sequence of LENGTH tokens of V has a known probability ------------------------

V, LENGTH, ROWS = 3, 3, 300_000


class Toy:
    """p(next | prefix) and q(next | prefix) as tables over prefixes, some entries zero."""

    def __init__(self, seed, sampling=None):
        generator = torch.Generator().manual_seed(seed)

        def table(depth):
            logits = torch.randn(V**depth, V, generator=generator, dtype=torch.float64) * 1.5
            probs = logits.softmax(-1)
            probs[torch.rand(probs.shape, generator=generator) < 0.15] = 0.0
            probs[probs.sum(-1) == 0] = 1.0
            return probs / probs.sum(-1, keepdim=True)

        self.p, self.q = [table(d) for d in range(LENGTH + 1)], [table(d) for d in range(LENGTH + 1)]
        if sampling is not None:
            self.p = [sampling.probs(t.clamp(min=1e-12).log()) for t in self.p]

    def law(self):
        law = self.p[0][0]
        for depth in range(1, LENGTH):
            law = (law[:, None] * self.p[depth]).flatten()
        return law


def codes_of(tree):
    """Each node's prefix as a number, and its depth; the root is the empty prefix."""
    depth = tree.depths()
    codes = torch.zeros_like(tree.tokens)
    for node in range(1, tree.nodes):
        parent = tree.parents[:, node].clamp(min=0)
        codes[:, node] = codes.gather(1, parent[:, None])[:, 0] * V + tree.tokens[:, node]
    return codes, depth


def rows_of(tables, tree):
    """The tables' rows at every node: [B, N, V]."""
    codes, depth = codes_of(tree)
    out = torch.zeros(*tree.tokens.shape, V, dtype=torch.float64)
    for d in range(LENGTH + 1):
        at = depth == d
        out[at] = tables[d][codes[at].clamp(max=V**d - 1)]
    return out


def drawn_chain(toy, depth, generator):
    tree = TokenTree.chain(torch.zeros(ROWS, 1, dtype=torch.long))
    for _ in range(depth):
        law = rows_of(toy.q, tree)[:, -1]
        tree = TokenTree.chain(torch.cat([tree.tokens, draw(law, generator)[:, None]], 1))
    return TokenTree(tree.tokens, tree.parents, rows_of(toy.q, tree))


def drawn_tree(toy, children, depth, generator, replacement):
    """Each node gets `children` children drawn from q, with or without replacement."""
    tree = TokenTree.chain(torch.zeros(ROWS, 1, dtype=torch.long))
    level = [0]
    for _ in range(depth):
        laws, added = rows_of(toy.q, tree), []
        for node in level:
            law = laws[:, node]
            for _ in range(children):
                empty = law.sum(-1) <= 0
                token = draw(torch.where(empty[:, None], 1.0, law), generator)
                dead = empty | (tree.parents[:, node] == -2)
                parent = torch.where(dead, -2, node)
                tree = TokenTree(
                    torch.cat([tree.tokens, token[:, None]], 1), torch.cat([tree.parents, parent[:, None]], 1)
                )
                added.append(tree.nodes - 1)
                if not replacement:
                    law = law.scatter(1, token[:, None], 0.0)
        level = added
    return TokenTree(tree.tokens, tree.parents, rows_of(toy.q, tree))


def grown_tree(toy, paths):
    """Without chance: by rank of q."""
    index = {(): 0}
    tree = TokenTree.chain(torch.zeros(ROWS, 1, dtype=torch.long))
    for path in paths:
        parent = index[path[:-1]]
        order = rows_of(toy.q, tree)[:, parent].argsort(-1, descending=True)
        tree = TokenTree(
            torch.cat([tree.tokens, order[:, path[-1], None]], 1),
            torch.cat([tree.parents, torch.full((ROWS, 1), parent)], 1),
        )
        index[path] = tree.nodes - 1
    return tree


def sequences(toy, tree, rule, generator):
    """Emitted tokens, completed to LENGTH by plain sampling, as numbers."""
    verdict = walk(tree, rows_of(toy.p, tree), generator, rule)
    codes, _ = codes_of(tree)
    last = verdict.paths.nodes.gather(1, (verdict.paths.lengths - 1)[:, None])
    code = codes.gather(1, last)[:, 0] * V + verdict.next_tokens
    size = verdict.paths.lengths.clone()
    for d in range(1, LENGTH):
        at = size == d
        if bool(at.any()):
            code[at] = code[at] * V + draw(toy.p[d][code[at]], generator)
            size[at] += 1
    for extra in range(LENGTH + 2, LENGTH, -1):  # runs longer than LENGTH: look at the first LENGTH tokens
        at = size == extra
        code[at] = code[at] // V ** (extra - LENGTH)
    return code


def deviation(toy, tree, rule, seed):
    """χ² over its degrees of freedom's mean, in standard deviations; infinite if something impossible was emitted."""
    generator = torch.Generator().manual_seed(seed)
    code = sequences(toy, tree, rule, generator)
    counts = torch.bincount(code, minlength=V**LENGTH).double()
    expected = toy.law() * len(code)
    if bool((counts[expected == 0] > 0).any()):
        return float("inf")
    used = expected > 5
    chi2 = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    return (chi2 - freedom) / (2 * max(freedom, 1)) ** 0.5


EXACT = 4.0  # standard deviations; p is about 1e-3 for these skewed laws
seeds = pytest.mark.parametrize("seed", range(3))


@seeds
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rule", [leviathan, block], ids=["leviathan", "block"])
def test_chains_drawn_from_q_are_exact(seed, depth, rule):
    """T1, T2."""
    toy = Toy(seed)
    tree = drawn_chain(toy, depth, torch.Generator().manual_seed(seed))
    assert deviation(toy, tree, rule, seed + 100) < EXACT


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("children", [1, 2, 3])
@pytest.mark.parametrize("replacement", [True, False])
def test_siblings_drawn_from_q_are_exact(seed, children, replacement):
    """T3 (with replacement), T4 (without, its support exhausted at three children)."""
    toy = Toy(seed)
    tree = drawn_tree(toy, children, 2, torch.Generator().manual_seed(seed), replacement)
    rule = functools.partial(siblings, replacement=replacement)
    assert deviation(toy, tree, rule, seed + 100) < EXACT


PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]


@seeds
@pytest.mark.parametrize("sampling", [None, Sampling(0.5), Sampling(1.0, top_k=2), Sampling(0.8, top_p=0.8)])
def test_trees_grown_without_chance_are_exact(seed, sampling):
    """T5, T6, T7."""
    toy = Toy(seed, sampling)
    assert deviation(toy, grown_tree(toy, PATHS), target_walk, seed + 100) < EXACT


@seeds
def test_block_verification_is_never_shorter(seed):
    toy = Toy(seed)
    tree = drawn_chain(toy, 3, torch.Generator().manual_seed(seed))
    lengths = [
        walk(tree, rows_of(toy.p, tree), torch.Generator().manual_seed(1), rule).paths.lengths.double().mean()
        for rule in (leviathan, block)
    ]
    assert lengths[1] >= lengths[0] - 0.005


def test_the_target_walk_enumerated_exactly():
    """Probabilities in twelfths and coins at their midpoints: every outcome is counted, none sampled."""
    p = [torch.tensor([[3, 4, 5]]) / 12.0, torch.tensor([[6, 6, 0], [1, 2, 9], [4, 4, 4]]) / 12.0]
    coins = torch.cartesian_prod(torch.arange(12), torch.arange(12)).double() / 12 + 1 / 24

    class Grid:
        def __init__(self):
            self.turn = 0

        def flip(self, positions):  # noqa: ARG002
            self.turn += 1
            return coins[:, self.turn - 1]

    count = len(coins)
    tree = TokenTree(torch.tensor([[0, 1, 2]]).expand(count, -1), torch.tensor([[-1, 0, 0]]).expand(count, -1))
    rows = torch.stack([p[0][0], p[1][1], p[1][2]]).expand(count, -1, -1)
    verdict = target_walk(tree, rows, torch.zeros(count, dtype=torch.long), Grid())
    one = verdict.paths.lengths == 1
    first = torch.where(one, verdict.next_tokens, tree.tokens.gather(1, verdict.paths.nodes[:, -1:])[:, 0])
    assert torch.bincount(first, minlength=3).tolist() == [36, 48, 60]
    for token in (1, 2):
        second = verdict.next_tokens[(first == token) & ~one]
        assert torch.bincount(second, minlength=3).tolist() == (p[1][token] * 12 * (4 if token == 1 else 5)).tolist()


# -- T9: each known mistake must be seen by the same test ---------------------------------------------------------


def biased(toy, tree, rule):
    return max(deviation(toy, tree, rule, seed) for seed in (100, 101))


def test_no_residual_fails():
    """Drawing from p after a rejection, instead of from what p has over q."""
    toy = Toy(0)
    tree = drawn_chain(toy, 2, torch.Generator().manual_seed(0))

    def wrong(tree, p, positions, coins):
        verdict = leviathan(tree, p, positions, coins)
        at = (verdict.paths.lengths - 1)[:, None, None].expand(-1, 1, V)
        return Verdict(verdict.paths, pick(p.gather(1, at)[:, 0], coins.flip(positions)))

    assert biased(toy, tree, wrong) > 10 * EXACT


def test_raw_q_with_a_truncated_draw_fails():
    toy = Toy(1)
    honest = toy.q
    toy.q = [Sampling(1.0, top_k=2).probs(t.clamp(min=1e-12).log()) for t in honest]
    tree = drawn_chain(toy, 2, torch.Generator().manual_seed(0))
    toy.q = honest
    raw = TokenTree(tree.tokens, tree.parents, rows_of(honest, tree).clamp(min=1e-9))
    assert biased(toy, raw, leviathan) > 10 * EXACT


def test_best_of_two_draws_fails():
    """Choosing the likelier of two draws and verifying it as if it were one."""
    toy = Toy(0)
    pair = [drawn_chain(toy, 1, torch.Generator().manual_seed(s)) for s in (0, 1)]
    q = pair[0].draft_probs[:, 0]
    a, b = pair[0].tokens[:, 1:], pair[1].tokens[:, 1:]
    best = torch.where(q.gather(1, a) >= q.gather(1, b), a, b)
    tree = TokenTree.chain(torch.cat([pair[0].tokens[:, :1], best], 1))
    assert biased(toy, TokenTree(tree.tokens, tree.parents, rows_of(toy.q, tree)), leviathan) > 10 * EXACT


def test_dropping_a_drawn_token_for_its_low_probability_fails():
    toy = Toy(0)
    tree = drawn_chain(toy, 1, torch.Generator().manual_seed(0))
    q = tree.draft_probs[:, 0].gather(1, tree.tokens[:, 1:])
    parents = torch.cat([tree.parents[:, :1], torch.where(q < 0.4, -2, 0)], 1)
    assert biased(toy, TokenTree(tree.tokens, parents, tree.draft_probs), leviathan) > 10 * EXACT


def test_the_longest_of_independently_sampled_paths_fails():
    """A target token drawn per path and row, and the longest agreeing path kept (Medusa's nucleus mode)."""
    toy = Toy(0)
    tree = grown_tree(toy, [(0,), (1,), (0, 0), (1, 0)])

    def wrong(tree, p, positions, coins):
        verdicts = []
        for leaf in (3, 4):
            keep = tree.ancestors()[:, leaf] | (torch.arange(tree.nodes) == 0)
            alone = TokenTree(tree.tokens, torch.where(keep, tree.parents, -2))
            verdicts.append(target_walk(alone, p, positions, coins))
        a, b = verdicts
        width = max(a.paths.nodes.shape[1], b.paths.nodes.shape[1])
        pad = [torch.nn.functional.pad(v.paths.nodes, (0, width - v.paths.nodes.shape[1])) for v in verdicts]
        second = b.paths.lengths > a.paths.lengths
        nodes = torch.where(second[:, None], pad[1], pad[0])
        length = torch.where(second, b.paths.lengths, a.paths.lengths)
        return Verdict(Paths(nodes, length), torch.where(second, b.next_tokens, a.next_tokens))

    assert biased(toy, tree, wrong) > 10 * EXACT


def test_typical_acceptance_is_lossy_and_says_so():
    toy = Toy(0)
    assert biased(toy, grown_tree(toy, PATHS), Typical()) > 10 * EXACT
    assert Typical.lossy


def test_the_rule_for_drawn_trees_does_not_depend_on_what_was_drawn():
    """A drawn tree that happens to be a chain, its siblings cut for want of support, is still a drawn tree."""
    q = torch.zeros(1, 3, V, dtype=torch.float64)
    q[0, 0, 1] = q[0, 1, 2] = 1.0
    tree = TokenTree(torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 1]]), q, branching=True)
    p = torch.full((1, 3, V), 1 / 3, dtype=torch.float64)
    a = walk(tree, p, torch.Generator().manual_seed(0), lossless)
    b = walk(tree, p, torch.Generator().manual_seed(0), siblings)
    assert a.paths.nodes.tolist() == b.paths.nodes.tolist()
    assert a.next_tokens.tolist() == b.next_tokens.tolist()
