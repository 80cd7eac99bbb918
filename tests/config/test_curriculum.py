"""What is wrong with the stages of a run is told by the stage's name."""

from pathlib import Path

import pytest

from megatron_rl.config.curriculum import phases_of
from megatron_rl.run.widest import widest
from tests.config.test_refusals import accept, refusals

A, B = "{name: a, until: {steps: 5}}", "{name: b}"


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ("[]", "stages=[]: It names no stage"),
        ("3", "stages=3: Must be a list"),
        ("[3]", "stages.0=3: Must be a group of keys"),
        (f"[{A},{{name: b, parallel.tp: 2}}]", "stages[b].parallel.tp=2: No stage changes it"),
        (f"[{A},{{name: b, seed.a: 2}}]", "stages[b].seed.a=2: No stage changes it"),
        (
            f"[{A},{{name: b, train.total_steps: 9}}]",
            "stages[b].train.total_steps=9: No stage changes it",
        ),
        (
            f"[{A},{{name: b, credit.repetition_ngram: 4}}]",
            "stages[b].credit.repetition_ngram=4: No stage changes it",
        ),
        (
            f"[{A},{{name: b, credit.shaping: 0.9}}]",
            "stages[b].credit.shaping=0.9: Must be at most 0.5",
        ),
        (
            f"[{A},{{name: b, rollout.temperature: 0}}]",
            "stages[b].rollout.temperature=0: Must be at least 0.01",
        ),
        (
            f"[{A},{{name: b, rollout.max_new_tokens: true}}]",
            "stages[b].rollout.max_new_tokens=true: Must be a whole",
        ),
        (
            f"[{A},{{name: b, algo.clip_low: 0.1}}]",
            "stages[b].algo.clip_low=0.1: There is no such key. It belongs to",
        ),
        (f"[{A},{{name: b, step: 4}}]", "stages[b].step=4: There is no such key"),
        (f"[{A},{{until: {{steps: 6}}}}]", "stages[1].name="),
        (f"[{A},{A}]", "stages=a: Two stages have this name"),
        (f"[{B},{A}]", "stages[b].until=null: Nothing would end it"),
        (f"[{A},{{name: b, until: {{}}}}]", "stages[b].until=null: Nothing would end it"),
        (f"[{A},{{name: b, until: {{steps: 0}}}}]", "stages[b].until.steps=0: Must be at least 1"),
        (
            f"[{A},{{name: b, until: {{accuracy: 2}}}}]",
            "stages[b].until.accuracy=2: Must be at most 1",
        ),
        (
            f"[{A},{{name: b, until: {{steps: 5}}}},{{name: c}}]",
            "stages[b].until.steps=5: It ends before it begins: a",
        ),
        (
            "[{name: a, until: {tokens: 9}},{name: b, until: {tokens: 8}}]",
            "stages[b].until.tokens=8: It ends before",
        ),
        (
            f"[{{name: a, until: {{steps: 20}}}},{B}]",
            "stages[a].until.steps=20: The next stage would begin after",
        ),
        (
            f"[{A},{{name: b, reset_certainty: all}}]",
            "stages[b].reprofile=all: selection.name=uniform believes nothing",
        ),
        (
            f"[{A},{{name: b, reset_certainty: some}}]",
            "stages[b].reprofile=some: Must be one of all",
        ),
        (
            f"[{A},{{name: b, rollout.samples_per_prompt: 1}}]",
            "rollout.samples_per_prompt=1: In stage b: Advantages",
        ),
        (
            f"[{A},{{name: b, rollout.max_new_tokens: 4000}}]",
            "rollout.max_new_tokens=4000: In stage b: data.max_prompt",
        ),
        (
            f"[{A},{{name: b, data.band: [0, 1]}}]",
            "data.band=[0.0, 1.0]: In stage b: The pass rates",
        ),
    ],
)
def test_a_wrong_stage_is_refused_by_its_name(checkpoint: Path, stages: str, told: str) -> None:
    found = [str(refusal) for refusal in refusals(checkpoint, f"stages={stages}")]
    assert any(line.startswith(told) for line in found), found


def test_stages_that_end_by_accuracy_are_evaluated(checkpoint: Path) -> None:
    stages = f"stages=[{{name: a, until: {{accuracy: 0.5}}}},{B}]"
    assert len(phases_of(accept(checkpoint, stages))) == 2
    (refusal,) = refusals(checkpoint, stages, "eval.every=0")
    assert str(refusal).startswith("stages[a].until.accuracy=0.5: eval.every=0 measures none")


def test_only_training_has_stages(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, f"stages=[{A},{B}]", "mode=rollout_only")
    assert "mode=rollout_only does not train" in str(refusal)


def test_what_is_sized_once_is_sized_for_the_widest_stage(checkpoint: Path) -> None:
    short = (
        "{name: a, rollout.max_new_tokens: 8, rollout.samples_per_prompt: 16, until: {steps: 5}}"
    )
    c = accept(
        checkpoint,
        f"stages=[{short},{{name: b, rollout.max_new_tokens: 16, rollout.samples_per_prompt: 4}}]",
    )
    assert (widest(c).rollout.max_new_tokens, widest(c).rollout.samples_per_prompt) == (16, 16)
    assert widest(accept(checkpoint)) == accept(checkpoint) and phases_of(accept(checkpoint)) == []
