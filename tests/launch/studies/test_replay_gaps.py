"""The table of gaps: what is refused before anything starts, and what it says."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.testbed.policies import TWO_DIGIT_ADDITION
from tests.support.scripts import load_script

script: Any = load_script("replay_gaps")
MODEL, KIND = (
    f"--model=moe={TWO_DIGIT_ADDITION}",
    ("--rollouts", "fp8:", "engine.fake_quant=fp8_blockwise"),
)
COMMON = ("--common", "experiment=smoke")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((f"--model={TWO_DIGIT_ADDITION}", *KIND, *COMMON), "Give NAME=PATH"),
        (("--model=moe=/nowhere", *KIND, *COMMON), "moe=/nowhere"),
        ((MODEL, "--rollouts", "engine.dtype=bfloat16", *COMMON), "begin with a name and a colon"),
        (
            (MODEL, "--rollouts", "fp8:", "engine.fake_quant=fp4", *COMMON),
            "Must be one of off, bf16, fp8_blockwise",
        ),
    ],
)
def test_mistakes_are_told_before_an_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    assert script.main(["--out", str(tmp_path / "gaps"), *words]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "gaps").exists()


def test_engines_record_routes_and_megatron_computes_in_float32(tmp_path: Path) -> None:
    given = script._parser().parse_args(["--out", str(tmp_path), MODEL, *KIND, *COMMON])
    (case,) = script.plan(given)
    overrides = script.drawn(case)
    assert {
        "mode=rollout_only",
        "train.replay=rollout",
        "model.dtype=float32",
        f"run.root={tmp_path}",
    } <= set(overrides)
    assert case.result == tmp_path / "moe-fp8.json"


def test_the_measurement_is_of_the_same_run_without_its_engines(tmp_path: Path) -> None:
    """`mode=train_only` refuses keys of engines, which only the run that draws has."""
    kinds = (*KIND, "engine.count=2", "train.optimizer_steps_per_batch=2")
    given = script._parser().parse_args(
        ["--out", str(tmp_path), MODEL, *kinds, *COMMON, "engine=managed"]
    )
    (case,) = script.plan(given)
    case.directory.mkdir()
    assert {"engine.fake_quant=fp8_blockwise", "engine.count=2", "engine=managed"} <= set(
        script.drawn(case)
    )
    measured = script.measured(case)
    assert not [override for override in measured if override.startswith("engine")]
    configuration = script.compose(measured)
    assert (configuration.mode, configuration.rollout.recording) == (
        "train_only",
        str(case.directory),
    )
    assert (configuration.train.optimizer_steps_per_batch, configuration.model.dtype) == (
        2,
        "float32",
    )


def test_a_row_for_each_way_to_replay_and_one_for_a_model_without_experts(tmp_path: Path) -> None:
    from megatron_rl.mcore import compat

    compat.install()
    from launch.studies.policy_gaps import Gap, Gaps

    def gaps(*names: str) -> bytes:
        found = {name: Gap(0.01 * i, 0.5, 1e-4, 2e-3) for i, name in enumerate(names, start=1)}
        return msgspec.json.encode(Gaps(51234, found, found, 0.0123 if len(names) > 1 else None))

    cases = [script.GapCase(f"{model} | fp8", tmp_path / model, ()) for model in ("moe", "dense")]
    cases[0].result.write_bytes(gaps("off", "trainer", "rollout"))
    cases[1].result.write_bytes(gaps("off"))
    head, _, *rows = script.table(cases)
    assert all(row.count("|") == head.count("|") for row in rows)
    assert [row.split(" | ")[4] for row in rows] == [
        "off",
        "R2 (trainer)",
        "R3 (rollout)",
        "no experts",
    ]
    gap = "3.00e-02 | 5.00e-01 | 1.00e-04 | 2.00e-03"
    assert rows[2] == f"| moe | fp8 | 51,234 | 1.23% | R3 (rollout) | {gap} | {gap} |"
