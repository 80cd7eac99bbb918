"""Refusals of keys on the command line that have no effect."""

from pathlib import Path

import pytest

from tests.support.configurations import accept, assert_refused, refusals

NO_CHECKPOINT = "run.checkpoint_every=0"
NO_EFFECT = "no effect"

# overrides, the setting as the refusal shows it, a fragment of the refusal
UNREAD = [
    ("run.keep_checkpoints=3", "run.keep_checkpoints=3", NO_CHECKPOINT),
    ("run.background_saves=true", "run.background_saves=true", NO_CHECKPOINT),
    ("mode=rollout_only samples.every=3", "samples.every=3", NO_EFFECT),
    ("mode=eval samples.every=3", "samples.every=3", NO_EFFECT),
    ("mode=train_only eval.every=3", "eval.every=3", NO_EFFECT),
    ("mode=train_only engine.count=2", "engine.count=2", NO_EFFECT),
    ("mode=rollout_only eval.temperature=0.5", "eval.temperature=0.5", NO_EFFECT),
    ("mode=rollout_only run.save_weights=true", "run.save_weights=true", NO_EFFECT),
    *(
        (
            f"mode={mode} {key}=no.jsonl",
            "eval.sets={'hard': 'no.jsonl'}",
            f"mode={mode} measures no sets",
        )
        for mode in ("rollout_only", "train_only", "profile")
        for key in ("+eval.sets.hard", "+eval.sets.hard.path")
    ),
    ("mode=eval eval.every=3", "eval.every=3", NO_EFFECT),
    ("mode=eval eval.start_step=3", "eval.start_step=3", NO_EFFECT),
    ("mode=eval run.save_weights=true", "run.save_weights=true", NO_EFFECT),
    ("mode=profile data.pass_rates=r.jsonl eval.every=3", "eval.every=3", NO_EFFECT),
    ("mode=profile data.pass_rates=r.jsonl eval.start_step=3", "eval.start_step=3", NO_EFFECT),
    (
        "mode=profile data.pass_rates=r.jsonl run.save_weights=true",
        "run.save_weights=true",
        NO_EFFECT,
    ),
]


@pytest.mark.parametrize(
    ("overrides", "setting", "fragment"), UNREAD, ids=[case[0] for case in UNREAD]
)
def test_a_key_without_effect_is_refused(
    checkpoint: Path, overrides: str, setting: str, fragment: str
) -> None:
    assert_refused(checkpoint, overrides, setting, fragment)


@pytest.mark.slow
def test_unread_keys_of_an_experiment_and_empty_values_are_accepted(checkpoint: Path) -> None:
    assert accept(checkpoint, "experiment=quickstart", "mode=rollout_only").eval.every == 5
    assert accept(checkpoint, "mode=eval", "run.save_weights=false", "eval.every=0").mode == "eval"
    assert not accept(checkpoint, "run.background_saves=false").run.background_saves
    c = accept(checkpoint, "run.keep_checkpoints=3", "run.checkpoint_every=2")
    assert c.run.keep_checkpoints == 3
    c = accept(checkpoint, "run.resume=auto", "run.name=a")
    assert c.run.checkpoint_every == 0, "a script may pass run.resume to any run"


def test_the_demonstration_reads_its_options(checkpoint: Path) -> None:
    demonstration = ("algo=sft", "train.replay=off", "environment=demonstration")
    options = ("data=column_addition_calls", "+environment.options.tool=calculator")
    c = accept(checkpoint, *demonstration, *options, "data.max_prompt_tokens=60")
    assert c.environment.options == {"tool": "calculator"}
    single = ("environment=single_turn", "+environment.options.tool=calculator")
    assert_refused(
        checkpoint,
        ["data=column_addition_calls", *single],
        "environment.options={'tool': 'calculator'}",
        "reads no options",
    )


def test_profile_mode_reads_the_samples_of_evaluations(checkpoint: Path) -> None:
    profile = ("mode=profile", "data.pass_rates=r.jsonl")
    c = accept(checkpoint, *profile, "eval.samples_per_prompt=3", "run.save_weights=false")
    assert c.eval.samples_per_prompt == 3


def test_engine_rules_do_not_apply_where_no_engine_is_started(
    checkpoint: Path, tmp_path: Path
) -> None:
    """An experiment's engine.start_timeout_s would otherwise be refused without a remedy."""
    timeouts = ("parallel.timeout_s=150", "sync.timeout_s=9")
    train_only = ("mode=train_only", f"rollout.recording={tmp_path}", "engine.colocated=false")
    assert accept(checkpoint, *train_only, *timeouts).engine.start_timeout_s == 180
    assert refusals(checkpoint, *timeouts)[0].key == "engine.start_timeout_s"
