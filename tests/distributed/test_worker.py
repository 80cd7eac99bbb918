"""One training step of two real ranks.

Covered: the exchange across nodes, agreement on NaN, skipped steps, and replay of own routes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import read_rollouts
from tests.support.sample_checks import Scenario, check_samples
from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("worker_steps.py")
# test_kept_samples.py has the other layouts and float32
SAMPLES = ("samples_bfloat16", "pipeline_samples_bfloat16")
DAILY = (
    "finite",
    "nan_on_rank_1",
    "nan_logits_on_rank_1",
    "skipped",
    "recorded",
    "fault_on_rank_1",
    "pipeline_finite",
    "pipeline_nan_logits_on_rank_1",
    "pipeline_recorded",
    *SAMPLES,
)
NIGHTLY = ("pipeline_skipped", "interleaved_recorded", "tensor_recorded", "context_recorded")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worker")


def run_job(directory: Path, scenarios: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Run scenarios in one job and return their results."""
    output = torchrun(SCRIPT, str(directory), *scenarios, ranks=2)
    lines = [line.split(" ", 2) for line in output.splitlines() if line.startswith("RESULT ")]
    return {scenario: json.loads(text) for _, scenario, text in lines}


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, dict[str, Any]]:
    """Results of the daily scenarios."""
    return run_job(directory, DAILY)


@pytest.fixture(scope="module")
def nightly_results(directory: Path) -> dict[str, dict[str, Any]]:
    """Results of the nightly scenarios."""
    return run_job(directory, NIGHTLY)


def rollout_ids(directory: Path) -> list[str]:
    return sorted(rollout.rollout_id for rollout in read_rollouts(directory))


ALL_IDS = [f"t{index}" for index in range(9)]


@pytest.mark.parametrize("scenario", ["finite", "pipeline_finite"])
def test_rollouts_cross_nodes_and_the_step_trains(
    results: dict[str, dict[str, Any]], scenario: str
) -> None:
    result = results[scenario]
    assert result["finite"] and result["optimizer_steps"] == 2
    assert result["metrics"]["train/grad_norm"] > 0.0
    assert 0.0 <= result["metrics"]["mismatch/route_disagreement"] <= 1.0
    assert result["metrics"]["policy/entropy"] > 0.0


@pytest.mark.parametrize("scenario", ["finite", "pipeline_finite"])
def test_the_effect_of_replay_is_measured_over_all_ranks(
    results: dict[str, dict[str, Any]], scenario: str
) -> None:
    """Each rank has half of the rows, or half of the layers."""
    metrics = results[scenario]["metrics"]
    disagreement = [metrics[f"routes/disagreement/layer_{layer}"] for layer in range(4)]
    assert sum(disagreement) / 4 == pytest.approx(metrics["mismatch/route_disagreement"])
    # The first layer has no layers before it that could be live
    assert metrics["routes/live_disagreement/layer_0"] == disagreement[0]
    shares = [metrics[f"routes/load/layer_3/expert_{expert}"] for expert in range(8)]
    assert sum(shares) == pytest.approx(1)
    assert metrics["routes/load_imbalance/layer_3"] == pytest.approx(8 * max(shares))
    # Top-2 with one byte each in every layer of the rank
    num_layers = 4 if scenario == "finite" else 2
    assert metrics["replay/bytes_per_token"] == 2 * num_layers


@pytest.mark.parametrize("scenario", ["finite", "pipeline_finite"])
def test_replayed_and_live_routing_have_different_mismatches(
    results: dict[str, dict[str, Any]], scenario: str
) -> None:
    metrics = results[scenario]["metrics"]
    replayed_mean = metrics["mismatch/replayed/logprob_abs_mean"]
    assert replayed_mean == pytest.approx(metrics["mismatch/logprob_abs_mean"])
    replayed_kl = metrics["mismatch/replayed/k3_kl"]
    assert metrics["mismatch/live/k3_kl"] != pytest.approx(replayed_kl, rel=1e-3)
    for kind in ("live", "replayed"):
        tail = metrics[f"mismatch/{kind}/logprob_abs_p99.9"]
        assert tail > metrics[f"mismatch/{kind}/logprob_abs_mean"]


def test_routes_and_mismatches_do_not_depend_on_the_layout(
    results: dict[str, dict[str, Any]],
) -> None:
    metrics, pipeline_metrics = (
        {
            key: value
            for key, value in results[scenario]["metrics"].items()
            if key.startswith(("routes/", "mismatch/"))
        }
        for scenario in ("finite", "pipeline_finite")
    )
    assert metrics == pytest.approx(pipeline_metrics, rel=2e-2)


@pytest.mark.parametrize(
    "scenario", ["nan_on_rank_1", "nan_logits_on_rank_1", "pipeline_nan_logits_on_rank_1"]
)
def test_a_nan_on_one_rank_stops_all_and_the_batch_is_recorded(
    results: dict[str, dict[str, Any]], directory: Path, scenario: str
) -> None:
    """The recording holds the routes of all layers, also with pipeline stages."""
    assert not results[scenario]["finite"] and results[scenario]["optimizer_steps"] == 0
    recording = directory / scenario / "nonfinite-step-3"
    assert rollout_ids(recording) == ALL_IDS
    for rollout in read_rollouts(recording):
        assert rollout.routes is not None and rollout.routes.shape[1] == 4


def test_a_step_without_trained_rollouts_is_skipped_by_all(
    results: dict[str, dict[str, Any]],
) -> None:
    assert results["skipped"]["finite"]


@pytest.mark.nightly
def test_a_step_without_trained_rollouts_is_skipped_by_all_stages(
    nightly_results: dict[str, dict[str, Any]],
) -> None:
    assert nightly_results["pipeline_skipped"]["finite"]


@pytest.mark.parametrize("scenario", ["recorded", "pipeline_recorded"])
def test_every_pass_of_an_update_uses_the_routes_of_the_old_policy(
    results: dict[str, dict[str, Any]], scenario: str
) -> None:
    """With full recomputation and several micro-batches. The ranks check each router's calls."""
    require_compared_routes(results[scenario])


@pytest.mark.nightly
@pytest.mark.parametrize("grid", ["interleaved", "tensor", "context"])
def test_every_pass_uses_the_routes_of_the_old_policy_in_other_layouts(
    nightly_results: dict[str, dict[str, Any]], grid: str
) -> None:
    require_compared_routes(nightly_results[f"{grid}_recorded"])


def require_compared_routes(result: dict[str, Any]) -> None:
    assert result["compared"] > 2 and result["would_differ"] > 0.1


def test_a_replay_fault_on_one_rank_stops_all_before_a_weight_changes(
    results: dict[str, dict[str, Any]], directory: Path
) -> None:
    message = results["fault_on_rank_1"]["error"]
    assert message.startswith("step 3: ") and "rank 1: layer 0, micro-batch 0: " in message
    assert "its router ran 2 times" in message
    assert rollout_ids(directory / "fault_on_rank_1" / "unreplayed-step-3") == ALL_IDS


@pytest.mark.parametrize("scenario", SAMPLES)
def test_samples_hold_what_the_ranks_computed(
    results: dict[str, dict[str, Any]], directory: Path, scenario: str
) -> None:
    """`kept_samples` checks that weights are the same, bit for bit, as without samples."""
    scenarios = {name: Scenario(directory / name, results[name]) for name in SAMPLES}
    check_samples(scenarios, scenario)
