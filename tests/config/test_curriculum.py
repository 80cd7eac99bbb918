"""Refusals of curriculum phases, which name the phase."""

from pathlib import Path

import pytest

from megatron_rl.config.curriculum import phases_of, sized_for_all_phases
from tests.support.configurations import accept, assert_refused, refusals

A = "{name: a, until: {steps: 5}}"
B = "{name: b}"
FIXED = "cannot change"

# phases, the setting as the refusal shows it, a fragment of the refusal
CASES = [
    ("[]", "curriculum=[]", "no phase"),
    ("3", "curriculum=3", "a list"),
    ("[3]", "curriculum.0=3", "a group of keys"),
    (f"[{A},{{name: b, parallel.tp: 2}}]", "curriculum[b].parallel.tp=2", FIXED),
    (f"[{A},{{name: b, seed.a: 2}}]", "curriculum[b].seed.a=2", FIXED),
    (f"[{A},{{name: b, train.total_steps: 9}}]", "curriculum[b].train.total_steps=9", FIXED),
    (
        f"[{A},{{name: b, credit.repetition_ngram: 4}}]",
        "curriculum[b].credit.repetition_ngram=4",
        FIXED,
    ),
    (f"[{A},{{name: b, credit.shaping: 0.9}}]", "curriculum[b].credit.shaping=0.9", "at most 0.5"),
    (
        f"[{A},{{name: b, rollout.temperature: 0}}]",
        "curriculum[b].rollout.temperature=0",
        "at least 0.01",
    ),
    (
        f"[{A},{{name: b, rollout.max_new_tokens: true}}]",
        "curriculum[b].rollout.max_new_tokens=true",
        "whole number",
    ),
    (f"[{A},{{name: b, algo.clip_low: 0.1}}]", "curriculum[b].algo.clip_low=0.1", "algo=grpo"),
    (f"[{A},{{name: b, step: 4}}]", "curriculum[b].step=4", "no such key"),
    (f"[{A},{A}]", "curriculum=a", "Two phases"),
    (f"[{B},{A}]", "curriculum[b].until=null", "never end"),
    (f"[{A},{{name: b, until: {{}}}}]", "curriculum[b].until=null", "never end"),
    (f"[{A},{{name: b, until: {{steps: 0}}}}]", "curriculum[b].until.steps=0", "at least 1"),
    (f"[{A},{{name: b, until: {{accuracy: 2}}}}]", "curriculum[b].until.accuracy=2", "at most 1"),
    (
        f"[{A},{{name: b, until: {{steps: 5}}}},{{name: c}}]",
        "curriculum[b].until.steps=5",
        "a lasts until 5",
    ),
    (
        "[{name: a, until: {tokens: 9}},{name: b, until: {tokens: 8}}]",
        "curriculum[b].until.tokens=8",
        "a lasts until 9",
    ),
    (
        f"[{{name: a, until: {{steps: 20}}}},{B}]",
        "curriculum[a].until.steps=20",
        "train.total_steps",
    ),
    (
        f"[{A},{{name: b, reset_certainty: all}}]",
        "curriculum[b].reset_certainty=all",
        "selection=belief",
    ),
    (
        f"[{A},{{name: b, reset_certainty: some}}]",
        "curriculum[b].reset_certainty=some",
        "one of all",
    ),
    (
        f"[{A},{{name: b, rollout.samples_per_prompt: 1}}]",
        "rollout.samples_per_prompt=1",
        "In phase b",
    ),
    (
        f"[{A},{{name: b, rollout.max_new_tokens: 4000}}]",
        "rollout.max_new_tokens=4000",
        "In phase b",
    ),
    (
        f"[{A},{{name: b, data.pass_rate_range: [0, 1]}}]",
        "data.pass_rate_range=[0.0, 1.0]",
        "In phase b",
    ),
]


@pytest.mark.parametrize(
    ("phases", "setting", "fragment"), CASES, ids=[f"{case[1]} in {case[0]}" for case in CASES]
)
def test_a_mistake_in_a_phase_is_refused_under_its_name(
    checkpoint: Path, phases: str, setting: str, fragment: str
) -> None:
    assert_refused(checkpoint, [f"curriculum={phases}"], setting, fragment)


def test_a_phase_needs_a_name(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, f"curriculum=[{A},{{until: {{steps: 6}}}}]")
    assert refusal.key == "curriculum[1].name"


def test_a_phase_cannot_count_the_tokens_of_an_aborted_surplus(checkpoint: Path) -> None:
    curriculum = f"curriculum=[{{name: a, until: {{tokens: 500}}}},{B}]"
    selection = "selection=oversample"
    assert len(phases_of(accept(checkpoint, curriculum, selection))) == 2
    assert_refused(
        checkpoint,
        [curriculum, selection, "selection.surplus=abort"],
        "curriculum[a].until.tokens=500",
        "would not repeat",
    )


def test_phases_that_end_by_accuracy_need_evaluations(checkpoint: Path) -> None:
    curriculum = f"curriculum=[{{name: a, until: {{accuracy: 0.5}}}},{B}]"
    assert len(phases_of(accept(checkpoint, curriculum))) == 2
    assert_refused(
        checkpoint,
        [curriculum, "eval.every=0"],
        "curriculum[a].until.accuracy=0.5",
        "eval.every=0",
    )


def test_only_training_has_a_curriculum(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, f"curriculum=[{A},{B}]", "mode=rollout_only")
    assert refusal.key == "curriculum" and "mode=rollout_only" in refusal.rule


def test_engines_are_sized_for_the_longest_responses_and_largest_groups(checkpoint: Path) -> None:
    short = "name: a, rollout.max_new_tokens: 8, rollout.samples_per_prompt: 16"
    long = "name: b, rollout.max_new_tokens: 16, rollout.samples_per_prompt: 4"
    c = accept(checkpoint, f"curriculum=[{{{short}, until: {{steps: 5}}}},{{{long}}}]")
    rollout = sized_for_all_phases(c).rollout
    assert (rollout.max_new_tokens, rollout.samples_per_prompt) == (16, 16)


def test_without_a_curriculum_nothing_is_resized(checkpoint: Path) -> None:
    c = accept(checkpoint)
    assert phases_of(c) == [] and sized_for_all_phases(c) == c
