"""`tests.lab.comparison --equal-accuracy` reports the rollout tokens until a common accuracy."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from tests.support.comparisons import Launcher, value_of

pytestmark = pytest.mark.slow

TWO = ("--seeds", "0,1", "--variant", "slow:", "algo=grpo", "--variant", "fast:", "algo=espo")


@pytest.fixture
def results(launcher: Launcher) -> Launcher:
    """`slow` gains 0.1 a step of 1,000 tokens, and `fast` twice as much.

    The second seed of `fast` has more tokens a step.
    """

    def outcome(overrides: Sequence[str]) -> dict[str, Any]:
        if "algo=grpo" in overrides:
            return {"accuracies": (0.2, 0.3, 0.4, 0.5, 0.6)}
        tokens = 1000.0 if value_of(overrides, "seed") == "0" else 1500.0
        return {"accuracies": (0.2, 0.4, 0.6, 0.8), "tokens": tokens}

    launcher.outcome = outcome
    return launcher


def test_tokens_until_the_highest_common_accuracy(
    compare: Callable[..., int],
    results: Launcher,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compare(*TWO, "--equal-accuracy", "--against", "slow") == ExitCode.OK
    text = (tmp_path / "out" / "tokens.md").read_text()
    assert text in capsys.readouterr().out
    assert text.startswith("Held-out accuracy 0.600, which all runs reach.")
    assert text.splitlines()[2:] == [
        "| variant | seed | start | end | rollout tokens to 0.600 | total | fewer than slow |",
        "|---|---|---|---|---|---|---|",
        "| slow | 0 | 0.200 | 0.600 | 4,000 | 4,000 | |",
        "| slow | 1 | 0.200 | 0.600 | 4,000 | 4,000 | |",
        "| **slow** | mean | | | **4,000** (4,000 to 4,000) | | **1.00×** (1.00 to 1.00) |",
        "| fast | 0 | 0.200 | 0.800 | 2,000 | 3,000 | |",
        "| fast | 1 | 0.200 | 0.800 | 3,000 | 4,500 | |",
        "| **fast** | mean | | | **2,500** (2,000 to 3,000) | | **1.60×** (1.33 to 2.00) |",
    ]
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())["level"] == 0.6
    assert (tmp_path / "out" / "tokens.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_another_level_needs_no_run(
    compare: Callable[..., int], results: Launcher, tmp_path: Path
) -> None:
    assert compare(*TWO) == ExitCode.OK
    results.commands.clear()
    assert compare(*TWO, "--equal-accuracy", "0.5") == ExitCode.OK
    assert results.commands == []
    text = (tmp_path / "out" / "tokens.md").read_text()
    assert "| **slow** | mean | | | **3,000** (3,000 to 3,000) | |\n" in text


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        ("0.7", "slow, seed 0, goes from 0.200 to 0.600, below 0.7"),
        pytest.param(
            "0.1",
            "slow, seed 0, goes from 0.200 to 0.600, and 0.1, which was requested",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_level_outside_a_curve_is_refused(
    compare: Callable[..., int],
    results: Launcher,
    capsys: pytest.CaptureFixture[str],
    level: str,
    reason: str,
) -> None:
    assert compare(*TWO, "--equal-accuracy", level) == ExitCode.REFUSED
    assert reason in capsys.readouterr().err


@pytest.mark.nightly
def test_a_variant_that_learns_nothing_is_named(
    compare: Callable[..., int], launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.outcome = lambda overrides: {
        "accuracies": (0.3, 0.3) if "optimizer.lr=0" in overrides else (0.2, 0.9)
    }
    variants = ("--variant", "a:", "--variant", "frozen:", "optimizer.lr=0")
    assert compare("--seeds", "0", *variants, "--equal-accuracy") == ExitCode.REFUSED
    reason = "frozen, seed 0, goes from 0.300 to 0.300, and 0.3, which is the highest"
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--against", "slow"], "--against slow: it needs --equal-accuracy"),
        (["--equal-accuracy", "--against", "other"], "the variants are slow, fast"),
    ],
)
def test_an_invalid_reference_variant_is_refused_before_anything_starts(
    compare: Callable[..., int],
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    assert compare(*TWO, *arguments) == ExitCode.REFUSED
    assert reason in capsys.readouterr().err
    assert launcher.commands == []
