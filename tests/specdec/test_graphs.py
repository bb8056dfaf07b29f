"""Recorded passes, with a stand-in for the recording: the same text, few recordings, and the memory they depend on.

On a machine with a GPU the real recording is tested too.
"""

from __future__ import annotations

import pytest
import torch
from makers import DRAFTERS
from tiny import tiny_model, tiny_tokenizer

from specdec import Limits, Target, UserError, generate
from specdec.drafters.none import Plain
from specdec.graphs import Graphs
from specdec.load import TargetConfig, load_target

PROMPTS = [[5, 9, 17, 33], [40, 8], [77, 12, 5, 9, 17, 33]]
LIMITS = Limits(30, (1,))


class Recorder:
    """As a graph does: reads only the memory it was recorded with, and overwrites its first outputs."""

    def __init__(self):
        self.recorded = 0

    def __call__(self, run):
        self.recorded += 1
        outputs = tuple(None if one is None else one.clone() for one in run())

        def replay():
            for place, new in zip(outputs, run(), strict=True):
                if new is not None:
                    place.copy_(new)

        return replay, outputs


def graphed():
    target = Target(tiny_model(), tiny_tokenizer(), fast_mode="off")
    target.graphs, target._bucket = Graphs(Recorder()), 256
    return target


@pytest.mark.parametrize("name", ["none", "ngram", "eagle-dynamic", "eagle-chain", "draft_model-static"])
def test_the_text_is_the_same(name):
    stock, target = Target(tiny_model(), tiny_tokenizer()), graphed()
    drafter = DRAFTERS[name](target)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[1:], PROMPTS):
        expected = [g.tokens for g in generate(stock, Plain(), prompts, LIMITS)]
        assert [g.tokens for g in generate(target, drafter, prompts, LIMITS)] == expected
        assert [g.tokens for g in generate(target, drafter, prompts, LIMITS, rows=2)] == expected


def test_a_second_request_records_nothing():
    target = graphed()
    generate(target, Plain(), PROMPTS, LIMITS)
    once = target.graphs.record.recorded
    assert 1 <= once <= len(PROMPTS)
    generate(target, Plain(), PROMPTS[::-1], LIMITS)
    assert target.graphs.record.recorded == once


def test_the_oldest_recording_goes_first():
    graphs = Graphs(Recorder())
    for size in range(1, Graphs.MOST + 10):
        out, none = graphs.run((), (torch.ones(size),), lambda x: (2 * x, None))
        assert out.sum() == 2 * size
        assert none is None
    assert len(graphs.known) == Graphs.MOST


def test_without_a_gpu_it_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"target.fast: graph needs a CUDA device"):
        load_target(TargetConfig("t", str(tmp_path), device="cpu", fast="graph"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_graphs_give_the_same_text():
    model = tiny_model().cuda()
    expected = [g.tokens for g in generate(Target(model), Plain(), PROMPTS, LIMITS)]
    target = Target(tiny_model().cuda(), fast_mode="graph")
    assert [g.tokens for g in generate(target, Plain(), PROMPTS, LIMITS)] == expected
    assert target.graphs.known
