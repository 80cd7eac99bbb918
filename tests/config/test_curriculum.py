"""What is wrong with the stages of a run is told by the stage's name."""

from pathlib import Path

import pytest

from megatron_rl.config.curriculum import phases_of, sized_for_all_phases
from tests.support.configurations import accept, refusals

A, B = "{name: a, until: {steps: 5}}", "{name: b}"


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ("[]", "curriculum=[]: It names no stage"),
        ("3", "curriculum=3: Must be a list"),
        ("[3]", "curriculum.0=3: Must be a group of keys"),
        (f"[{A},{{name: b, parallel.tp: 2}}]", "curriculum[b].parallel.tp=2: No stage changes it"),
        (f"[{A},{{name: b, seed.a: 2}}]", "curriculum[b].seed.a=2: No stage changes it"),
        (
            f"[{A},{{name: b, train.total_steps: 9}}]",
            "curriculum[b].train.total_steps=9: No stage changes it",
        ),
        (
            f"[{A},{{name: b, credit.repetition_ngram: 4}}]",
            "curriculum[b].credit.repetition_ngram=4: No stage changes it",
        ),
        (
            f"[{A},{{name: b, credit.shaping: 0.9}}]",
            "curriculum[b].credit.shaping=0.9: Must be at most 0.5",
        ),
        (
            f"[{A},{{name: b, rollout.temperature: 0}}]",
            "curriculum[b].rollout.temperature=0: Must be at least 0.01",
        ),
        (
            f"[{A},{{name: b, rollout.max_new_tokens: true}}]",
            "curriculum[b].rollout.max_new_tokens=true: Must be a whole",
        ),
        (
            f"[{A},{{name: b, algo.clip_low: 0.1}}]",
            "curriculum[b].algo.clip_low=0.1: There is no such key. It belongs to",
        ),
        (f"[{A},{{name: b, step: 4}}]", "curriculum[b].step=4: There is no such key"),
        (f"[{A},{{until: {{steps: 6}}}}]", "curriculum[1].name="),
        (f"[{A},{A}]", "curriculum=a: Two stages have this name"),
        (f"[{B},{A}]", "curriculum[b].until=null: Nothing would end it"),
        (f"[{A},{{name: b, until: {{}}}}]", "curriculum[b].until=null: Nothing would end it"),
        (
            f"[{A},{{name: b, until: {{steps: 0}}}}]",
            "curriculum[b].until.steps=0: Must be at least 1",
        ),
        (
            f"[{A},{{name: b, until: {{accuracy: 2}}}}]",
            "curriculum[b].until.accuracy=2: Must be at most 1",
        ),
        (
            f"[{A},{{name: b, until: {{steps: 5}}}},{{name: c}}]",
            "curriculum[b].until.steps=5: It ends before it begins: a",
        ),
        (
            "[{name: a, until: {tokens: 9}},{name: b, until: {tokens: 8}}]",
            "curriculum[b].until.tokens=8: It ends before",
        ),
        (
            f"[{{name: a, until: {{steps: 20}}}},{B}]",
            "curriculum[a].until.steps=20: The next stage would begin after",
        ),
        (
            f"[{A},{{name: b, reset_certainty: all}}]",
            "curriculum[b].reset_certainty=all: selection.name=uniform believes nothing",
        ),
        (
            f"[{A},{{name: b, reset_certainty: some}}]",
            "curriculum[b].reset_certainty=some: Must be one of all",
        ),
        (
            f"[{A},{{name: b, rollout.samples_per_prompt: 1}}]",
            "rollout.samples_per_prompt=1: In phase b: Advantages",
        ),
        (
            f"[{A},{{name: b, rollout.max_new_tokens: 4000}}]",
            "rollout.max_new_tokens=4000: In phase b: data.max_prompt",
        ),
        (
            f"[{A},{{name: b, data.pass_rate_range: [0, 1]}}]",
            "data.pass_rate_range=[0.0, 1.0]: In phase b: The pass rates",
        ),
    ],
)
def test_a_wrong_stage_is_refused_by_its_name(checkpoint: Path, stages: str, told: str) -> None:
    found = [str(refusal) for refusal in refusals(checkpoint, f"curriculum={stages}")]
    assert any(line.startswith(told) for line in found), found


def test_stages_that_end_by_accuracy_are_evaluated(checkpoint: Path) -> None:
    stages = f"curriculum=[{{name: a, until: {{accuracy: 0.5}}}},{B}]"
    assert len(phases_of(accept(checkpoint, stages))) == 2
    (refusal,) = refusals(checkpoint, stages, "eval.every=0")
    assert str(refusal).startswith("curriculum[a].until.accuracy=0.5: eval.every=0 measures none")


def test_only_training_has_stages(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, f"curriculum=[{A},{B}]", "mode=rollout_only")
    assert "mode=rollout_only does not train" in str(refusal)


def test_what_is_sized_once_is_sized_for_the_widest_stage(checkpoint: Path) -> None:
    short = (
        "{name: a, rollout.max_new_tokens: 8, rollout.samples_per_prompt: 16, until: {steps: 5}}"
    )
    c = accept(
        checkpoint,
        f"curriculum=[{short},{{name: b, rollout.max_new_tokens: 16, rollout.samples_per_prompt: 4}}]",
    )
    assert (
        sized_for_all_phases(c).rollout.max_new_tokens,
        sized_for_all_phases(c).rollout.samples_per_prompt,
    ) == (16, 16)
    assert (
        sized_for_all_phases(accept(checkpoint)) == accept(checkpoint)
        and phases_of(accept(checkpoint)) == []
    )
