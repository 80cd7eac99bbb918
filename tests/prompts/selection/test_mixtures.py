"""Every selector resumes a mixture exactly, and keeps its shares among the offered prompts."""

from collections import Counter

import msgspec
import pytest

from megatron_rl.config.schema import (
    DataSettings,
    RolloutSettings,
    SelectionSettings,
    SourceSettings,
)
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.mixture import PromptMixture
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.prompts.selection.selector import Selector
from tests.support.answers import play, play_steps

WEIGHTS = {"sums": 3.0, "letters": 1.0}
ROLLOUT = RolloutSettings(prompts_per_step=8, samples_per_prompt=4, max_new_tokens=8)


def make_selector(name: str) -> Selector:
    prompts = {
        source: (
            [
                Prompt(
                    id=f"{source}/{i}",
                    token_ids=(i,),
                    answer="0",
                    task=source,
                    difficulty=str(i % 4),
                    source=source,
                )
                for i in range(40)
            ],
            [],
        )
        for source in WEIGHTS
    }
    sources = {
        source: SourceSettings(source="jsonl", train_path=source, weight=weight)
        for source, weight in WEIGHTS.items()
    }
    mixture = PromptMixture(prompts, DataSettings(source="mixture", sources=sources))
    settings = SelectionSettings(name=name)  # type: ignore[arg-type]
    return open_selector(mixture, ROLLOUT, settings, seed=0)


def answer(prompt: Prompt, sample: int) -> float:
    """Correct for one label, incorrect for another, mixed for the rest."""
    return {"0": 1.0, "1": 0.0}.get(prompt.difficulty, float(sample % 2))


@pytest.mark.parametrize("name", ["uniform", "oversample", "belief"])
def test_a_resumed_selection_of_a_mixture_makes_the_same_choices(name: str) -> None:
    whole_run = make_selector(name)
    play_steps(whole_run, range(1, 6), answer)
    contents = msgspec.json.encode(whole_run.state())
    resumed_run = make_selector(name)
    resumed_run.restore(msgspec.json.decode(contents, type=SelectorState))
    results = play_steps(whole_run, range(6, 11), answer)
    assert play_steps(resumed_run, range(6, 11), answer) == results
    assert resumed_run.state() == whole_run.state()


@pytest.mark.parametrize("name", ["uniform", "oversample"])
def test_selections_that_take_every_offer_keep_the_shares(name: str) -> None:
    selector = make_selector(name)
    counts = Counter[str]()
    for step in range(1, 9):
        rounds, _ = play(selector.select(step), answer)
        counts.update(request.prompt.source for requests in rounds for request in requests)
    assert abs(counts["letters"] - sum(counts.values()) / 4) < 1


def test_beliefs_have_strata_of_each_source() -> None:
    selector = make_selector("belief")
    play_steps(selector, range(1, 4), answer)
    beliefs = selector.state().beliefs
    assert beliefs is not None
    assert {task for task, *_ in beliefs.strata} - {""} == set(WEIGHTS)
