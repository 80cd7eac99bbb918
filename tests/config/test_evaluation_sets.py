"""Sets of questions: each has its own sampling and interval, and a path alone is enough."""

from pathlib import Path

import pytest

from megatron_rl.config.curriculum import sized_for_all_phases, sized_for_engines
from megatron_rl.config.schema import Configuration
from tests.support.configurations import configuration_of


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    file.write_text('{"prompt": "1+2=", "answer": 3}\n')
    return file


def compose_sets(*overrides: str) -> Configuration:
    return configuration_of(["experiment=smoke", *overrides])


def test_a_set_may_be_the_path_of_its_file(questions: Path) -> None:
    evaluation = compose_sets(
        f"eval.sets={{sums: {questions}}}", "eval.samples_per_prompt=3", "eval.every=7"
    ).eval
    settings = evaluation.of_set("sums")
    assert evaluation.sets["sums"].path == str(questions)
    assert (settings.samples_per_prompt, settings.every) == (3, 7)
    assert settings == evaluation


def test_a_set_has_its_own_sampling_and_interval(questions: Path) -> None:
    keys = "every: 5, samples_per_prompt: 16, temperature: 0, top_p: 0.95, max_new_tokens: 64"
    evaluation = compose_sets(f"eval.sets={{hard: {{path: {questions}, {keys}}}}}").eval
    settings = evaluation.of_set("hard")
    assert (settings.every, settings.samples_per_prompt) == (5, 16)
    assert (settings.temperature, settings.top_p, settings.max_new_tokens) == (0.0, 0.95, 64)
    assert settings.start_step == evaluation.start_step
    assert (evaluation.every, evaluation.samples_per_prompt, evaluation.top_p) == (0, 2, 1.0)


def test_engines_have_room_for_the_longest_evaluation(questions: Path) -> None:
    c = compose_sets(
        f"eval.sets={{hard: {{path: {questions}, max_new_tokens: 90}}}}", "eval.max_new_tokens=70"
    )
    assert sized_for_engines(c).rollout.max_new_tokens == 90
    assert sized_for_all_phases(c).rollout.max_new_tokens == c.rollout.max_new_tokens < 70
    assert sized_for_engines(compose_sets()) == compose_sets()
