"""The study of replay gaps refuses mistakes before anything starts, and writes a table."""

from pathlib import Path

import msgspec
import pytest

from tests.lab import replay_gaps
from tests.lab.replay_gaps import GapCase, generation_overrides, measurement_overrides
from tests.support.configurations import configuration_of
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.scripts import ROOT, start_module

pytestmark = pytest.mark.slow

MODEL = f"--model=moe={TWO_DIGIT_ADDITION}"
KIND = ("--rollouts", "bfloat16:", "engine.dtype=bfloat16")
COMMON = ("--common", "experiment=smoke")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((f"--model={TWO_DIGIT_ADDITION}", *KIND, *COMMON), "Give NAME=PATH"),
        (("--model=moe=/nowhere", *KIND, *COMMON), "moe=/nowhere"),
        ((MODEL, "--rollouts", "engine.dtype=bfloat16", *COMMON), "begin with a name and a colon"),
        (
            (MODEL, "--rollouts", "fp8:", "engine.quantization=fp4", *COMMON),
            "engine.quantization=fp4",
        ),
    ],
)
def test_mistakes_are_refused_before_an_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    assert replay_gaps.main(["--out", str(tmp_path / "gaps"), *words]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "gaps").exists()


def plan_case(out: Path, *words: str) -> GapCase:
    options = replay_gaps.make_parser().parse_args(["--out", str(out), MODEL, *words])
    (case,) = replay_gaps.plan_cases(options)
    return case


def test_engines_record_routes_and_the_model_is_in_float32(tmp_path: Path) -> None:
    case = plan_case(tmp_path, *KIND, *COMMON)
    settings = ("mode=rollout_only", "train.replay=rollout", "model.dtype=float32")
    assert {*settings, f"run.root={tmp_path}"} <= set(generation_overrides(case))
    assert case.result == tmp_path / "moe-bfloat16.json"


def test_the_measurement_has_the_same_settings_without_engines(tmp_path: Path) -> None:
    """`mode=train_only` refuses settings of engines, which only the generation has."""
    kind = (*KIND, "engine.count=2", "train.optimizer_steps_per_batch=2")
    case = plan_case(tmp_path, *kind, *COMMON, "engine=managed")
    case.directory.mkdir()
    engine_settings = {"engine.dtype=bfloat16", "engine.count=2", "engine=managed"}
    assert engine_settings <= set(generation_overrides(case))
    overrides = measurement_overrides(case)
    assert not [override for override in overrides if override.startswith("engine")]
    configuration = configuration_of(overrides)
    assert configuration.mode == "train_only"
    assert configuration.rollout.recording == str(case.directory)
    assert configuration.train.optimizer_steps_per_batch == 2
    assert configuration.model.dtype == "float32"


def encode_gaps(*names: str) -> bytes:
    """Encode gaps for these ways to replay routes."""
    from megatron_rl.mcore import compat

    compat.install()
    from tests.lab.policy_gaps import Gap, Gaps

    gaps = {name: Gap(0.01 * i, 0.5, 1e-4, 2e-3) for i, name in enumerate(names, start=1)}
    return msgspec.json.encode(Gaps(51234, gaps, gaps, 0.0123 if len(names) > 1 else None))


def test_processes_are_the_main_job_and_this_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []
    case = plan_case(tmp_path, *KIND, *COMMON)

    class Ended:
        returncode = 0

    def run(command: list[str], *, check: bool) -> Ended:
        commands.append(command)
        if "--measure" in command:
            case.result.write_bytes(encode_gaps("off"))
        return Ended()

    monkeypatch.setattr("tests.lab.replay_gaps.subprocess.run", run)
    assert replay_gaps.main(["--out", str(tmp_path), MODEL, *KIND, *COMMON]) == 0
    generation, measurement = commands
    assert generation[1:] == [str(ROOT / "launch/train_rl.py"), *generation_overrides(case)]
    assert measurement[1:4] == ["-m", "tests.lab.replay_gaps", "--measure"]
    assert measurement[4:] == [str(case.directory), *measurement_overrides(case)]
    assert "| moe | bfloat16 |" in (tmp_path / "table.md").read_text()


def test_the_table_has_a_row_for_each_way_to_replay(tmp_path: Path) -> None:
    cases = [GapCase(f"{model} | fp8", tmp_path / model, ()) for model in ("moe", "dense")]
    cases[0].result.write_bytes(encode_gaps("off", "trainer", "rollout"))
    cases[1].result.write_bytes(encode_gaps("off"))
    head, _, *rows = replay_gaps.table(cases)
    assert all(row.count("|") == head.count("|") for row in rows)
    names = [row.split(" | ")[4] for row in rows]
    assert names == ["off", "R2 (trainer)", "R3 (rollout)", "no experts"]
    gap = "3.00e-02 | 5.00e-01 | 1.00e-04 | 2.00e-03"
    assert rows[2] == f"| moe | fp8 | 51,234 | 1.23% | R3 (rollout) | {gap} | {gap} |"


@pytest.mark.parametrize(
    "name",
    [
        "replay_gaps",
        "simulate_selection",
        "faults",
        # They import torch and transformers before they read their arguments
        pytest.param("layer_differences", marks=pytest.mark.nightly),
        pytest.param("start_policy", marks=pytest.mark.nightly),
    ],
)
def test_help_of_every_study_shows_an_example_and_the_output(name: str) -> None:
    result = start_module(f"tests.lab.{name}", "--help")
    assert result.returncode == 0, result.stderr
    assert f"python -m tests.lab.{name}" in result.stdout
    assert "Output" in result.stdout
