"""`python -m launch.studies.sync_time`, its published times and the fit to them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from launch.studies import published_syncs, sync_time
from launch.studies.published_syncs import (
    DEEPSEEK_V3,
    KIMI_K2,
    PUBLISHED,
    QWEN3_30B,
    QWEN3_235B,
    fit,
)
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.sync_time import Fit, Hardware, Rates, count_stream
from megatron_rl.planning.sync_time import sync_time as estimate

CONFIGS = Path(__file__).parents[2] / "support" / "published"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen3_30b_a3b", QWEN3_30B),
        ("qwen3_235b_a22b", QWEN3_235B),
        ("deepseek_v3", DEEPSEEK_V3),
        ("kimi_k2", KIMI_K2),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_models_are_those_of_their_published_config(
    name: str, shape: ModelShape, dtype: sync_time.SentDtype
) -> None:
    assert count_stream(shape, dtype) == count_stream(read_shape(CONFIGS / name), dtype)


def test_fit_recovers_planted_constants() -> None:
    truth = Rates(Fit(network_share=0.7, tensor=2e-4))
    rows = []
    for row in PUBLISHED:
        if row.is_fitted:
            assert row.job is not None
            seconds = estimate(row.job, truth).total
            rows.append(replace(row, seconds=(seconds, seconds)))
    result = fit(rows)
    assert result.network_share == pytest.approx(0.7, rel=0.01)
    assert result.tensor == pytest.approx(2e-4, rel=0.01)


def test_fit_follows_the_fitted_rows_alone() -> None:
    others = [row if row.is_fitted else replace(row, seconds=(1000.0, 1000.0)) for row in PUBLISHED]
    assert fit(others) == fit(PUBLISHED)
    slower = [replace(row, seconds=(2 * row.seconds[0], 2 * row.seconds[1])) for row in PUBLISHED]
    assert fit(slower) != fit(PUBLISHED)


def test_a_nic_carries_at_most_its_own_rate() -> None:
    faster = [replace(row, seconds=(0.01, 0.01)) for row in PUBLISHED]
    assert fit(faster).network_share <= 1


def test_peers_table_has_every_published_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert sync_time.main(["--peers"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(PUBLISHED)
    fit_rows = [row for row in PUBLISHED if row.is_fitted]
    assert [row.seconds[0] for row in fit_rows] == [2.670, 10.7536, 53.2791]
    for line, row in zip(lines[2:], PUBLISHED, strict=True):
        assert line.endswith(f"{row.source} |")
        assert (" yes |" in line) == row.is_fitted


def test_estimates_stay_within_the_ratios_that_the_documentation_states() -> None:
    rates = Rates(fit(PUBLISHED))
    ratios = {
        (row.framework, row.model): estimate(row.job, rates).total / row.middle
        for row in PUBLISHED
        if row.job is not None
    }
    fit_ratios = [ratios[row.framework, row.model] for row in PUBLISHED if row.is_fitted]
    assert max(abs(math.log(ratio)) for ratio in fit_ratios) < math.log(1.6)
    assert max(ratios.values()) < 5 and min(ratios.values()) > 0.6


def test_results_follow_the_constants(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_time.main([])
    before = capsys.readouterr().out

    def halve(rows: object) -> Fit:
        constants = fit(PUBLISHED)
        return replace(constants, network_share=constants.network_share / 2)

    monkeypatch.setattr(sync_time, "fit", halve)
    sync_time.main([])
    after = capsys.readouterr().out
    changes = [
        a != b for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if "x tp" in a
    ]
    assert changes and all(changes)


def test_table_covers_the_models_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    sync_time.main([])
    text = capsys.readouterr().out
    for plan in sync_time.PLANS:
        for gpus in sync_time.GPUS:
            assert f"{plan.name} | {gpus} |" in text or f"{plan.name} on {gpus} GPUs" in text
    assert "Kimi-K2, 1T | 512 | tp8 pp8 ep32 | 8 x tp32 | bfloat16 | 2053" in text


def test_constants_table_tells_their_kinds_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert sync_time.main(["--constants"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()[2:]
    kinds = [line.split(" | ")[0].strip("| ") for line in lines]
    assert kinds.count("fitted") == 2
    assert set(kinds) == {"published", "assumption", "counted", "fitted"}
    constants = Rates(fit(PUBLISHED))
    assert f"{constants.fit.tensor:.3g}" in lines[-1]
    assert f"{Hardware().nic:.3g}" in "".join(lines)


def test_steps_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"trainer": 64, "tp": 4, "pp": 4, "ep": 16, "engines": 64, "engine-tp": 8}
    options = [f"--{name}={size}" for name, size in sizes.items()]
    model = str(CONFIGS / "qwen3_235b_a22b")
    assert sync_time.main(["--model", model, *options]) == ExitCode.OK
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--trainer", "7", "--tp", "2"], "must divide"),
        (["--engine-tp", "3"], "engines of 3"),
        (["--bucket-mb", "0"], "above 0"),
    ],
)
def test_a_job_that_is_impossible_is_refused(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = sync_time.main(["--model", str(CONFIGS / "qwen3_30b_a3b"), *options])
    assert code == ExitCode.REFUSED
    assert text in capsys.readouterr().err


def test_a_directory_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sync_time.main(["--model", str(tmp_path)]) == ExitCode.BAD_DATA
    assert "config.json" in capsys.readouterr().err


def test_every_published_time_has_an_address() -> None:
    for row in published_syncs.PUBLISHED:
        assert row.source.startswith("https://")
