"""`compare_runs.py --search`: as many trials for every variant, on seeds that are not the reported
ones.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.comparison.search import (
    CLIP_SCALE,
    NoUsableTrial,
    Point,
    Trial,
    at_given_widths,
    best,
    clip_widths,
)
from launch.comparison.variants import ComparisonRefused
from megatron_rl.config.algorithms import EspoSettings, GspoSettings, SftSettings
from megatron_rl.contracts.exit_codes import ExitCode
from sglang_bridge.errors import EngineUnhealthy
from tests.support.comparisons import Launcher, value_of

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
ONE = ("--seeds", "0", "--variant", "espo:", "--search", "optimizer.lr=1e-3")
SMALL = (*VARIANTS, "--search", "optimizer.lr=1e-4,1e-3")


@pytest.fixture
def learnt(launcher: Launcher) -> Launcher:
    """espo is best with 10 times its widths and the higher rate, which clips least; at its own,
    both rates tie. grpo's higher rate diverges."""

    def outcome(overrides: Sequence[str]) -> dict[str, Any]:
        fast, wide = (
            value_of(overrides, "optimizer.lr") == "1e-3",
            value_of(overrides, "algo.alpha") != "",
        )
        if "algo=grpo" in overrides:
            return {"code": 5} if fast else {"accuracies": (0.25, 0.75), "clipped": 0.005}
        end = (0.75 if fast else 0.625) if wide else 0.5
        return {"accuracies": (0.25, end), "clipped": 0.01 if wide else 0.25 if fast else 0.5}

    launcher.outcome = outcome
    return launcher


def test_each_variant_is_reported_at_its_best_and_at_its_given_widths(
    compare: Compare, learnt: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*SEARCH) == ExitCode.OK
    trials, reported = learnt.commands[:8], learnt.commands[8:]
    assert learnt.names[:2] == ["espo-lr1e-4-clip_scale1-seed7", "espo-lr1e-4-clip_scale10-seed7"]
    assert all(
        "train.total_steps=2" in command and "/search" in value_of(command, "run.root")
        for command in trials
    )
    assert {"algo.alpha=0.2", "algo.min_clip=0.003"} < set(trials[1]), "ten times 0.02 and 3e-4"
    assert {"algo.clip_low=0.1", "algo.clip_high=0.14"} < set(trials[5]), "half of 0.2 and 0.28"
    assert [value_of(command, "run.name") for command in reported] == [
        "espo-lr1e-3-clip_scale10-seed0",
        "espo-lr1e-3-clip_scale1-seed0",
        "grpo-lr1e-4-clip_scale1-seed0",
    ], (
        "grpo's best are its given widths, and made once; equal accuracy goes to fewer clipped tokens"
    )
    assert not any(value_of(command, "train.total_steps") for command in reported)
    text = (tmp_path / "out" / "contest.md").read_text()
    assert text in capsys.readouterr().out
    assert text.splitlines()[0].startswith(
        "Search: 4 trials of each variant, on each seed of 7 for 2 steps;"
    )
    assert (
        "| espo | best | optimizer.lr=1e-3, clip_scale=10 | alpha=0.2, min_clip=0.003 | 1.0% | 0.750 "
        "| **+50.0** (+50.0 to +50.0) | 0 |"
    ) in text
    assert (
        "| espo | best at given widths | optimizer.lr=1e-3, clip_scale=1 | alpha=0.02, min_clip=0.0003 | 25.0% "
        in text
    )
    assert (
        "| grpo | best, and at given widths | optimizer.lr=1e-4, clip_scale=1 | clip_low=0.2, clip_high=0.28 "
        in text
    )
    assert "| grpo | optimizer.lr=1e-3, clip_scale=0.5 | diverged | 0.0% |  |" in text
    record = json.loads((tmp_path / "out" / "contest.json").read_text())
    assert [len(own) for own in record["trials"].values()] == [4, 4]
    assert record["trials"]["grpo"][2]["accuracies"] == [None]
    assert record["reported"][0]["clip_widths"] == {"alpha": 0.2, "min_clip": 0.003}
    assert "| **espo, best at given widths** | mean " in (tmp_path / "out" / "table.md").read_text()


def test_an_interrupted_contest_goes_on(compare: Compare, learnt: Launcher) -> None:
    outcome = learnt.outcome
    learnt.outcome = lambda overrides: (
        outcome(overrides) | ({"code": 130} if "optimizer.lr=1e-3" in overrides else {})
    )
    assert compare(*SMALL) == ExitCode.INTERRUPTED
    assert learnt.names == ["espo-lr1e-4-seed100", "espo-lr1e-3-seed100"]
    learnt.commands.clear()
    learnt.outcome = outcome
    assert compare(*SMALL) == ExitCode.OK
    assert learnt.names == [
        "espo-lr1e-3-seed100",
        "grpo-lr1e-4-seed100",
        "grpo-lr1e-3-seed100",
        "espo-lr1e-3-seed0",
        "grpo-lr1e-4-seed0",
    ]
    learnt.commands.clear()
    assert compare(*SMALL) == ExitCode.OK
    assert learnt.commands == [], "trials that diverged are complete too"


def test_a_point_is_as_good_as_the_mean_of_its_seeds() -> None:
    narrow, wide = Point(((CLIP_SCALE, "1"),)), Point(((CLIP_SCALE, "10"),))
    lucky, steady = Trial(narrow, (0.2, 0.9), 0.01), Trial(wide, (0.6, 0.6), 0.02)
    once, diverged = Trial(narrow, (0.3, 0.3), 0.02), Trial(narrow, (0.99, None), 0.0)
    assert best("a", [lucky, steady, once, diverged]) is steady
    assert best("a", [lucky, steady, once, diverged], at_given_widths) is lucky
    with pytest.raises(NoUsableTrial, match="a: every trial diverged"):
        best("a", [steady, diverged], at_given_widths)


def test_a_variant_that_always_diverges_has_no_best(
    compare: Compare, learnt: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    learnt.outcome = lambda overrides: {"code": 5}
    assert compare(*ONE) == ExitCode.NON_FINITE
    assert "espo: every trial diverged. Search smaller learning rates" in capsys.readouterr().err


def test_a_reported_run_that_diverges_ends_the_contest(
    compare: Compare, learnt: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = learnt.outcome
    learnt.outcome = lambda overrides: (
        outcome(overrides) | ({"code": 5} if "seed=0" in overrides else {})
    )
    assert compare(*ONE) == ExitCode.NON_FINITE
    assert "espo-lr1e-3-seed0 failed (exit code 5)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            ["--search", "optimizer.lr=1,2", "--search", "grpo:", "optimizer.lr=1"],
            "not 2 of espo, 1 of grpo. Even them",
        ),
        (
            ["--search", "grpo:", "optimizer.lr=1,2"],
            "espo would not be searched. Give --search key=v1,v2",
        ),
        (
            ["--search", "gspo:", "optimizer.lr=1"],
            "there is no such variant. Name one of espo, grpo",
        ),
        (
            ["--search", "grpo:", "a=1", "--search", "grpo:", "b=1"],
            "--search grpo: given twice. Put its keys together",
        ),
        (["--search", "optimizer.lr"], "optimizer.lr: give key=v1,v2 with plain words or numbers"),
        (["--search", "optimizer.lr=1,,2"], "give key=v1,v2 with plain words"),
        (["--search", "optimizer.lr=1,1"], "a key or a value comes twice"),
        (["--search", "seed=1,2"], "seed is set by --seeds. Leave it out"),
        (
            ["--search", "clip_scale=10,100"],
            "the widths as given are reported too, and need trials. Add 1",
        ),
        (["--search", "clip_scale=1,-1"], "Give different numbers above 0"),
        (["--search", "clip_scale=1,1.0"], "Give different numbers above 0"),
        (["--search", "clip_scale=1,wide"], "Give different numbers above 0"),
        (["--search", "clip_scale=1,10"], "run grpo-clip_scale10-seed100: algo.clip_low=2"),
        (["--search", "optimizer.lr=1,fast"], "optimizer.lr=fast: Must be a number"),
        (
            ["--search", "optimizer.lr=1", "--search-seeds", "0"],
            "--search-seeds 0: --variant espo is reported on the",
        ),
        (["--search-common", "train.total_steps=2"], "--search-common: there is no search"),
        (
            ["--search", "optimizer.lr=1", "--search-common", "run.name=x"],
            "--search-common: run.name=x: run.name is",
        ),
    ],
)
def test_a_search_that_would_not_be_fair_is_refused_before_anything_starts(
    compare: Compare,
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    asked: list[str],
    told: str,
) -> None:
    assert compare(*VARIANTS, *asked) == ExitCode.REFUSED
    assert told in capsys.readouterr().err
    assert launcher.commands == []


def test_widths_of_other_losses_are_not_guessed() -> None:
    with pytest.raises(
        ComparisonRefused,
        match=r"multiplies the widths of grpo, gspo and espo, and algo\.name=sft is",
    ):
        clip_widths(SftSettings())
    assert clip_widths(EspoSettings(fixed_clip=0.01)) == {"fixed_clip": 0.01}
    assert clip_widths(GspoSettings()) == {"clip_low": 3e-4, "clip_high": 4e-4}


def test_runs_that_share_engines_are_led_to_them_and_are_the_same_runs(
    compare: Compare, learnt: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    (tmp_path / "keys.json").touch(mode=0o600)
    (tmp_path / "keys.json").write_text('{"api_key": "a", "admin_api_key": "b"}')

    @contextmanager
    def engines(configuration: Any, count: int, directory: Path) -> Iterator[list[tuple[str, ...]]]:
        opened.append(count)
        yield [
            (
                "engine.mode=external",
                f"engine.urls=['http://127.0.0.1:{9000 + i}']",
                f"engine.key_file={tmp_path}/keys.json",
            )
            for i in range(count)
        ]

    monkeypatch.setattr("launch_compare_runs.shared_engines", engines)
    assert compare(*ONE, "--shared-engines") == ExitCode.OK
    assert opened == [1], "once, for the trials and for what is reported"
    assert all("engine.urls=['http://127.0.0.1:9000']" in command for command in learnt.commands)
    learnt.commands.clear()
    assert compare(*ONE) == ExitCode.OK
    assert learnt.commands == [], "where the engine is makes no difference"
    assert compare(*ONE, "--shared-engines") == ExitCode.OK
    assert opened == [1], "none is started for nothing"


def test_engines_that_do_not_start_end_the_comparison_with_their_code(
    compare: Compare,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def engines(*given: Any) -> None:
        raise EngineUnhealthy("engine http://127.0.0.1:9000 was not healthy 180 s after its start")

    monkeypatch.setattr("launch_compare_runs.shared_engines", engines)
    assert compare("--seeds", "0", "--variant", "a:", "--shared-engines") == ExitCode.ENGINE_FAILED
    assert "was not healthy 180 s" in capsys.readouterr().err
    assert launcher.commands == []


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            ["--common", "engine.threads=2"],
            "a-seed0 has engine.threads=2, and a shared server is started",
        ),
        (
            ["--variant", "b:", "engine.max_running_requests=8"],
            "b-seed0 has engine.max_running_requests=8 and a-seed0",
        ),
        (
            ["--variant", "b:", "engine.dtype=bfloat16"],
            "b-seed0 has engine.dtype=bfloat16 and a-seed0 float32",
        ),
    ],
)
def test_runs_that_one_server_cannot_serve_are_refused(
    compare: Compare,
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    asked: list[str],
    told: str,
) -> None:
    assert (
        compare("--shared-engines", "--seeds", "0", "--variant", "a:", *asked) == ExitCode.REFUSED
    )
    said = capsys.readouterr().err
    assert told in said and "leave --shared-engines out" in said
    assert launcher.commands == []


def test_ways_to_replay_and_to_round_share_a_server(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def engines(*given: Any) -> None:
        raise EngineUnhealthy("it would have started")

    monkeypatch.setattr("launch_compare_runs.shared_engines", engines)
    other = ("--variant", "b:", "train.replay=trainer", "engine.fake_quant=fp8_blockwise")
    assert (
        compare("--seeds", "0", "--variant", "a:", *other, "--shared-engines")
        == ExitCode.ENGINE_FAILED
    )
    assert "it would have started" in capsys.readouterr().err
