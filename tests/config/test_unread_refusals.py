"""Keys that nothing reads as the others are: refused where the command line gives them."""

from pathlib import Path

import pytest

from tests.support.configurations import accept, refusals

# overrides | key | value shown | part of the rule | part of the remedy
UNREAD = [
    (
        "run.keep_checkpoints=3",
        "run.keep_checkpoints",
        "3",
        "run.checkpoint_every=0",
        "run.checkpoint_every=N",
    ),
    (
        "run.background_saves=true",
        "run.background_saves",
        "true",
        "nothing is saved",
        "run.checkpoint_every=N",
    ),
    (
        "run.on_failed_save=continue",
        "run.on_failed_save",
        "go_on",
        "nothing is saved",
        "run.checkpoint_every=N",
    ),
    (
        "run.stop_within_s=9",
        "run.stop_within_s",
        "9.0",
        "nothing is saved",
        "run.checkpoint_every=N",
    ),
    ("mode=train_only eval.every=3", "eval.every", "3", "mode=train_only has no use", "Remove it"),
    (
        "mode=train_only engine.fake_quant=bf16",
        "engine.fake_quant",
        "bf16",
        "mode=train_only has no use",
        "Remove it",
    ),
    (
        "mode=train_only engine.count=2",
        "engine.count",
        "2",
        "mode=train_only has no use",
        "Remove it",
    ),
    (
        "mode=rollout_only eval.temperature=0.5",
        "eval.temperature",
        "0.5",
        "has no use for it",
        "Remove it",
    ),
    (
        "mode=rollout_only run.save_weights=true",
        "run.save_weights",
        "true",
        "has no use for it",
        "Remove it",
    ),
    ("mode=eval eval.every=3", "eval.every", "3", "mode=eval has no use", "Remove it"),
    ("mode=eval eval.start_step=3", "eval.start_step", "3", "has no use for it", "Remove it"),
    (
        "mode=eval run.save_weights=true",
        "run.save_weights",
        "true",
        "has no use for it",
        "Remove it",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "key", "value", "rule", "remedy"), UNREAD, ids=[case[0] for case in UNREAD]
)
def test_a_key_without_effect_is_refused_by_name(
    checkpoint: Path, overrides: str, key: str, value: str, rule: str, remedy: str
) -> None:
    lines = [str(refusal) for refusal in refusals(checkpoint, *overrides.split())]
    assert any(
        line.startswith(f"{key}={value}: ") and rule in line and remedy in line for line in lines
    ), lines


def test_keys_that_idle_pass_where_a_recipe_brings_them_or_they_say_what_happens(
    checkpoint: Path,
) -> None:
    assert accept(checkpoint, "experiment=quickstart", "mode=rollout_only").eval.every == 5
    assert accept(checkpoint, "mode=eval", "run.save_weights=false", "eval.every=0").mode == "eval"
    assert not accept(checkpoint, "run.background_saves=false").run.background_saves
    assert (
        accept(checkpoint, "run.keep_checkpoints=3", "run.checkpoint_every=2").run.keep_checkpoints
        == 3
    )
    assert accept(checkpoint, "run.resume=auto", "run.name=a").run.checkpoint_every == 0, (
        "a script may start any run"
    )


def test_what_an_engine_could_not_be_is_no_matter_where_none_is_started(
    checkpoint: Path, tmp_path: Path
) -> None:
    """A recipe's engine.start_timeout_s, here the default, would end in a refusal without a way
    out.
    """
    recorded = ("mode=train_only", f"rollout.recording={tmp_path}", "parallel.timeout_s=150")
    assert (
        accept(
            checkpoint, *recorded, "engine.fake_quant=off", "sync.timeout_s=9"
        ).engine.start_timeout_s
        == 180
    )
    assert (
        refusals(checkpoint, *recorded[2:], "sync.timeout_s=9")[0].key == "engine.start_timeout_s"
    )
