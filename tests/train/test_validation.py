import torch

from data.texts import Text
from specdec import Limits, TreeConfig, generate
from specdec.drafters.eagle import EagleConfig, create
from specdec.drafters.none import Plain
from train.validation import decoded, prompt_of, withhold


def texts_of(prompts, answers_each):
    return [
        Text(torch.tensor([*prompt, 50 + n, 60]), ((len(prompt), len(prompt) + 2),), None)
        for prompt in prompts
        for n in range(answers_each)
    ]


def test_a_withheld_prompt_is_in_no_text_that_is_trained_on():
    texts = texts_of([[5, i] for i in range(20)], 3)
    withheld = withhold(texts, 4, seed=1)
    assert (len(withheld.prompts), len(withheld.held), len(withheld.texts)) == (4, 12, 48)
    apart = set(map(tuple, withheld.prompts))
    assert {prompt_of(text) for text in withheld.held} == apart
    assert not apart & {prompt_of(text) for text in withheld.texts}
    assert withhold(texts, 4, seed=1).prompts == withheld.prompts
    assert withhold(texts, 4, seed=2).prompts != withheld.prompts


def test_few_prompts_leave_most_for_training():
    assert len(withhold(texts_of([[5, i] for i in range(8)], 1), 12, seed=0).prompts) == 2


def test_the_accepted_length_is_that_of_an_ordinary_decode(target):
    counts = torch.arange(target.vocab_size, 0, -1).double()
    drafter = create(EagleConfig(draft_vocab_size=200), target, counts, torch.Generator().manual_seed(0)).double()
    drafter.tree = TreeConfig(depth=3)
    prompts = [[5, 6, 7], [9, 10]]
    values = decoded(target, drafter, prompts, 16)
    rounds = [
        one
        for prompt in prompts
        for one in generate(target, drafter, [prompt], Limits(16, target.stop_tokens))[0].rounds
    ]
    assert values["tau"] == sum(one.emitted for one in rounds) / len(rounds)
    assert decoded(target, Plain(), prompts, 16)["tau"] == 1.0
