"""`tests.lab.comparison --search` tries as many settings for every variant, on separate seeds."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.algorithms import EspoSettings, GspoSettings, SftSettings
from megatron_rl.contracts.exit_codes import ExitCode
from sglang_bridge.errors import EngineUnhealthy
from tests.lab.comparison.search import (
    CLIP_SCALE,
    NoUsableTrial,
    Point,
    Trial,
    best_trial,
    clip_range,
    has_configured_clip_range,
)
from tests.lab.comparison.variants import ComparisonRefused
from tests.support.comparisons import Launcher, value_of

pytestmark = pytest.mark.slow

Compare = Callable[..., int]
VARIANTS = ("--seeds", "0", "--variant", "espo:", "algo=espo", "--variant", "grpo:", "algo=grpo")
GRID = (
    "--search",
    "optimizer.lr=1e-4,1e-3",
    "clip_scale=1,10",
    "--search",
    "grpo:",
    "optimizer.lr=1e-4,1e-3",
    "clip_scale=1,0.5",
)
SEARCH = (*VARIANTS, *GRID, "--search-seeds", "7", "--search-common", "train.total_steps=2")
ONE_TRIAL = ("--seeds", "0", "--variant", "espo:", "--search", "optimizer.lr=1e-3")
TWO_TRIALS = (*VARIANTS, "--search", "optimizer.lr=1e-4,1e-3")


@pytest.fixture
def results(launcher: Launcher) -> Launcher:
    """Outcomes of all runs.

    espo is best with 10 times its clip range and the higher rate, which clips least. At its
    configured clip range both rates are equal. The higher rate of grpo diverges.
    """

    def outcome(overrides: Sequence[str]) -> dict[str, Any]:
        is_fast = value_of(overrides, "optimizer.lr") == "1e-3"
        is_wide = value_of(overrides, "algo.alpha") != ""
        if "algo=grpo" in overrides:
            return {"code": 5} if is_fast else {"accuracies": (0.25, 0.75), "clipped_share": 0.005}
        if is_wide:
            return {"accuracies": (0.25, 0.75 if is_fast else 0.625), "clipped_share": 0.01}
        return {"accuracies": (0.25, 0.5), "clipped_share": 0.25 if is_fast else 0.5}

    launcher.outcome = outcome
    return launcher


def test_trials_run_on_the_seeds_and_settings_of_the_search(
    compare: Compare, results: Launcher
) -> None:
    assert compare(*SEARCH) == ExitCode.OK
    trials = results.commands[:8]
    final_runs = results.commands[8:]
    assert results.names[:2] == ["espo-lr1e-4-clip_scale1-seed7", "espo-lr1e-4-clip_scale10-seed7"]
    assert all("train.total_steps=2" in command for command in trials)
    assert all("/search" in value_of(command, "run.root") for command in trials)
    assert {"algo.alpha=0.2", "algo.min_clip=0.003"} < set(trials[1]), "10 times 0.02 and 3e-4"
    assert {"algo.clip_low=0.1", "algo.clip_high=0.14"} < set(trials[5]), "half of 0.2 and 0.28"
    assert not any(value_of(command, "train.total_steps") for command in final_runs)
    assert [value_of(command, "run.name") for command in final_runs] == [
        "espo-lr1e-3-clip_scale10-seed0",
        "espo-lr1e-3-clip_scale1-seed0",  # equal accuracy, fewer clipped tokens
        "grpo-lr1e-4-clip_scale1-seed0",  # the best is at the configured clip range: one run
    ]


def test_the_report_has_final_runs_and_all_trials(
    compare: Compare, results: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*SEARCH) == ExitCode.OK
    text = (tmp_path / "out" / "contest.md").read_text()
    assert text in capsys.readouterr().out
    assert text.startswith("Search: 4 trials of each variant, on each seed of 7 for 2 steps.")
    for row in (
        "| espo | best | optimizer.lr=1e-3, clip_scale=10 | alpha=0.2, min_clip=0.003 | 1.0% "
        "| 0.750 | **+50.0** | 0 |",
        "| espo | best at the configured clip range | optimizer.lr=1e-3, clip_scale=1 "
        "| alpha=0.02, min_clip=0.0003 | 25.0% ",
        "| grpo | best, and at the configured clip range | optimizer.lr=1e-4, clip_scale=1 "
        "| clip_low=0.2, clip_high=0.28 ",
        "| grpo | optimizer.lr=1e-3, clip_scale=0.5 | diverged | 0.0% |  |",
    ):
        assert row in text
    record = json.loads((tmp_path / "out" / "contest.json").read_text())
    assert [len(trials) for trials in record["trials"].values()] == [4, 4]
    assert record["trials"]["grpo"][2]["accuracies"] == [None]
    assert record["reported"][0]["clip_range"] == {"alpha": 0.2, "min_clip": 0.003}
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| **espo, best at the configured clip range** | mean " in table


def test_an_interrupted_contest_continues(compare: Compare, results: Launcher) -> None:
    outcome = results.outcome

    def interrupt_fast_trials(overrides: Sequence[str]) -> dict[str, Any]:
        code = {"code": 130} if "optimizer.lr=1e-3" in overrides else {}
        return outcome(overrides) | code

    results.outcome = interrupt_fast_trials
    assert compare(*TWO_TRIALS) == ExitCode.INTERRUPTED
    assert results.names == ["espo-lr1e-4-seed100", "espo-lr1e-3-seed100"]
    results.commands.clear()
    results.outcome = outcome
    assert compare(*TWO_TRIALS) == ExitCode.OK
    assert results.names == [
        "espo-lr1e-3-seed100",
        "grpo-lr1e-4-seed100",
        "grpo-lr1e-3-seed100",
        "espo-lr1e-3-seed0",
        "grpo-lr1e-4-seed0",
    ]
    results.commands.clear()
    assert compare(*TWO_TRIALS) == ExitCode.OK
    assert results.commands == [], "trials that diverged are complete too"


def test_the_best_trial_has_the_highest_mean_over_its_seeds() -> None:
    narrow = Point(((CLIP_SCALE, "1"),))
    wide = Point(((CLIP_SCALE, "10"),))
    one_good_seed = Trial(narrow, (0.2, 0.9), 0.01)
    steady = Trial(wide, (0.6, 0.6), 0.02)
    weak = Trial(narrow, (0.3, 0.3), 0.02)
    divergent = Trial(narrow, (0.99, None), 0.0)
    trials = [one_good_seed, steady, weak, divergent]
    assert best_trial("a", trials) is steady
    assert best_trial("a", trials, has_configured_clip_range) is one_good_seed
    with pytest.raises(NoUsableTrial, match="a: every trial diverged"):
        best_trial("a", [steady, divergent], has_configured_clip_range)


def test_a_variant_whose_trials_all_diverge_ends_the_contest(
    compare: Compare, results: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    results.outcome = lambda overrides: {"code": 5}
    assert compare(*ONE_TRIAL) == ExitCode.NON_FINITE
    assert "espo: every trial diverged" in capsys.readouterr().err


def test_a_final_run_that_diverges_ends_the_contest(
    compare: Compare, results: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = results.outcome
    results.outcome = lambda overrides: (
        outcome(overrides) | ({"code": 5} if "seed=0" in overrides else {})
    )
    assert compare(*ONE_TRIAL) == ExitCode.NON_FINITE
    assert "espo-lr1e-3-seed0 failed (exit code 5)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["--search", "optimizer.lr=1,2", "--search", "grpo:", "optimizer.lr=1"],
            "not 2 for espo, 1 for grpo",
        ),
        (["--search", "grpo:", "optimizer.lr=1,2"], "espo would have no trials"),
        (["--search", "gspo:", "optimizer.lr=1"], "no such variant. Name one of espo, grpo"),
        (
            ["--search", "grpo:", "a=1", "--search", "grpo:", "b=1"],
            "--search grpo: this option is there twice",
        ),
        (["--search", "optimizer.lr"], "optimizer.lr: give key=v1,v2"),
        (["--search", "optimizer.lr=1,,2"], "give key=v1,v2"),
        (["--search", "optimizer.lr=1,1"], "a value is there twice"),
        (["--search", "optimizer.lr=1", "optimizer.lr=2"], "optimizer.lr is there twice"),
        (["--search", "seed=1,2"], "seed is set by --seeds"),
        (["--search", "clip_scale=10,100"], "Add 1"),
        (["--search", "clip_scale=1,-1"], "different numbers above 0"),
        (["--search", "clip_scale=1,1.0"], "different numbers above 0"),
        (["--search", "clip_scale=1,wide"], "different numbers above 0"),
        (["--search", "clip_scale=1,10"], "run grpo-clip_scale10-seed100: algo.clip_low=2"),
        (["--search", "optimizer.lr=1,fast"], "optimizer.lr=fast: "),
        (
            ["--search", "optimizer.lr=1", "--search-seeds", "0"],
            "--search-seeds 0: --variant espo is reported on the same seeds",
        ),
        (["--search-common", "train.total_steps=2"], "--search-common: there is no search"),
        (
            ["--search", "optimizer.lr=1", "--search-common", "run.name=x"],
            "--search-common: run.name=x: run.name is",
        ),
    ],
)
def test_an_unfair_search_is_refused_before_anything_starts(
    compare: Compare,
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    assert compare(*VARIANTS, *arguments) == ExitCode.REFUSED
    assert reason in capsys.readouterr().err
    assert launcher.commands == []


def test_the_clip_range_of_other_algorithms_is_unknown() -> None:
    with pytest.raises(ComparisonRefused, match=r"grpo, gspo and espo, and algo\.name=sft"):
        clip_range(SftSettings())
    assert clip_range(EspoSettings(fixed_clip=0.01)) == {"fixed_clip": 0.01}
    assert clip_range(GspoSettings()) == {"clip_low": 3e-4, "clip_high": 4e-4}


def test_runs_with_shared_engines_connect_to_them_and_are_the_same_runs(
    compare: Compare, results: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    (tmp_path / "keys.json").touch(mode=0o600)
    (tmp_path / "keys.json").write_text('{"api_key": "a", "admin_api_key": "b"}')

    @contextmanager
    def engines(configuration: Any, count: int, directory: Path) -> Iterator[list[tuple[str, ...]]]:
        counts.append(count)
        yield [
            (
                "engine.mode=external",
                f"engine.urls=['http://127.0.0.1:{9000 + i}']",
                f"engine.key_file={tmp_path}/keys.json",
            )
            for i in range(count)
        ]

    monkeypatch.setattr("tests.lab.comparison.__main__.shared_engines", engines)
    assert compare(*ONE_TRIAL, "--shared-engines") == ExitCode.OK
    assert counts == [1], "engines start once for trials and final runs"
    assert all("engine.urls=['http://127.0.0.1:9000']" in command for command in results.commands)
    results.commands.clear()
    assert compare(*ONE_TRIAL) == ExitCode.OK
    assert results.commands == [], "the location of the engine makes no difference"
    assert compare(*ONE_TRIAL, "--shared-engines") == ExitCode.OK
    assert counts == [1], "no engine starts without a run to train"


def test_engines_that_do_not_start_end_the_comparison_with_their_code(
    compare: Compare,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: Any) -> None:
        raise EngineUnhealthy("engine http://127.0.0.1:9000 was not healthy 180 s after its start")

    monkeypatch.setattr("tests.lab.comparison.__main__.shared_engines", fail)
    assert compare("--seeds", "0", "--variant", "a:", "--shared-engines") == ExitCode.ENGINE_FAILED
    assert "was not healthy 180 s" in capsys.readouterr().err
    assert launcher.commands == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--common", "engine.threads=2"], "a-seed0 has engine.threads=2, and a shared engine"),
        (
            ["--variant", "b:", "engine.max_running_requests=8"],
            "b-seed0 has engine.max_running_requests=8, and a-seed0",
        ),
        (
            ["--variant", "b:", "engine.dtype=bfloat16"],
            "b-seed0 has engine.dtype=bfloat16, and a-seed0 has float32",
        ),
    ],
)
def test_runs_that_one_engine_cannot_serve_are_refused(
    compare: Compare,
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    options = ("--shared-engines", "--seeds", "0", "--variant", "a:")
    assert compare(*options, *arguments) == ExitCode.REFUSED
    message = capsys.readouterr().err
    assert reason in message and "leave --shared-engines out" in message
    assert launcher.commands == []


def test_runs_with_other_replay_and_fake_quant_share_an_engine(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise EngineUnhealthy("the engine would have started")

    monkeypatch.setattr("tests.lab.comparison.__main__.shared_engines", fail)
    other = ("--variant", "b:", "train.replay=trainer", "engine.fake_quant=fp8_blockwise")
    options = ("--seeds", "0", "--variant", "a:", *other, "--shared-engines")
    assert compare(*options) == ExitCode.ENGINE_FAILED
    assert "the engine would have started" in capsys.readouterr().err
