"""One training step of two real ranks: exchange across nodes, agreement on NaN, skipped steps,
replay of own routes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import read_rollouts
from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("worker_steps.py")
GRIDS = ("pipeline", "interleaved", "tensor", "context")
SCENARIOS = (
    "finite",
    "nan_on_rank_1",
    "nan_logits_on_rank_1",
    "skipped",
    "recorded",
    "fault_on_rank_1",
    "pipeline_finite",
    "pipeline_nan_logits_on_rank_1",
    "pipeline_skipped",
    *(f"{grid}_recorded" for grid in GRIDS),
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worker")


@pytest.fixture(scope="module")
def results(saved: Path) -> dict[str, dict[str, Any]]:
    """Every scenario, played in one job."""
    output = torchrun(SCRIPT, str(saved), *SCENARIOS, ranks=2)
    lines = [line.split(" ", 2) for line in output.splitlines() if line.startswith("RESULT ")]
    return {scenario: json.loads(text) for _, scenario, text in lines}


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
def test_what_replay_changes_is_known_of_the_layers_and_tokens_of_all_ranks(
    results: dict[str, dict[str, Any]], scenario: str
) -> None:
    """Each rank has half of the rows, or of the layers."""
    metrics = results[scenario]["metrics"]
    by_layer = [metrics[f"routes/disagreement/layer_{layer}"] for layer in range(4)]
    assert sum(by_layer) / 4 == pytest.approx(metrics["mismatch/route_disagreement"])
    assert metrics["routes/live_disagreement/layer_0"] == by_layer[0], (
        "no layer is before the first one"
    )
    shares = [metrics[f"routes/load/layer_3/expert_{expert}"] for expert in range(8)]
    assert sum(shares) == pytest.approx(1) and metrics[
        "routes/load_imbalance/layer_3"
    ] == pytest.approx(8 * max(shares))
    assert metrics["mismatch/replayed/logprob_abs_mean"] == pytest.approx(
        metrics["mismatch/logprob_abs_mean"]
    )
    assert metrics["mismatch/live/k3_kl"] != pytest.approx(
        metrics["mismatch/replayed/k3_kl"], rel=1e-3
    )
    for kind in ("live", "replayed"):
        assert (
            metrics[f"mismatch/{kind}/logprob_abs_p99.9"]
            > metrics[f"mismatch/{kind}/logprob_abs_mean"]
        )
    other = results["pipeline_finite" if scenario == "finite" else "finite"]["metrics"]
    measured = {key for key in metrics if key.startswith(("routes/", "mismatch/"))}
    assert {key: metrics[key] for key in measured} == pytest.approx(
        {key: other[key] for key in measured}, rel=2e-2
    )
    assert metrics["replay/bytes_per_token"] == 2 * (4 if scenario == "finite" else 2), (
        "top-2, one byte each, a layer"
    )


@pytest.mark.parametrize("scenario", ["nan_on_rank_1", "nan_logits_on_rank_1"])
def test_a_nan_on_one_rank_stops_every_rank_and_the_batch_is_saved(
    results: dict[str, dict[str, Any]], saved: Path, scenario: str
) -> None:
    assert not results[scenario]["finite"] and results[scenario]["optimizer_steps"] == 0
    parts = [
        read_rollouts(saved / scenario / "nonfinite-step-3" / f"rank-{rank}.bin") for rank in (0, 1)
    ]
    assert sorted(r.rollout_id for part in parts for r in part) == [f"t{i}" for i in range(9)]


def test_a_nan_on_the_last_stage_stops_the_first_too(
    results: dict[str, dict[str, Any]], saved: Path
) -> None:
    """Only the last stage has logits and a loss.

    Each keeps all rollouts, with the routes of its own layers.
    """
    scenario = "pipeline_nan_logits_on_rank_1"
    assert not results[scenario]["finite"] and results[scenario]["optimizer_steps"] == 0
    parts = [
        read_rollouts(saved / scenario / "nonfinite-step-3" / f"rank-{rank}.bin") for rank in (0, 1)
    ]
    assert [sorted(r.rollout_id for r in part) for part in parts] == [
        [f"t{i}" for i in range(9)]
    ] * 2
    assert all(r.routes is not None and r.routes.shape[1] == 2 for part in parts for r in part)


@pytest.mark.parametrize("scenario", ["skipped", "pipeline_skipped"])
def test_nothing_to_train_is_skipped_by_all(
    results: dict[str, dict[str, Any]], scenario: str
) -> None:
    assert results[scenario]["finite"]


@pytest.mark.parametrize("scenario", ["recorded", *(f"{grid}_recorded" for grid in GRIDS)])
def test_every_pass_of_an_update_uses_the_routes_of_the_old_policy(
    results: dict[str, dict[str, Any]], scenario: str
) -> None:
    """With full recomputation, several micro-batches: the ranks compare each router's calls with
    what was recorded.
    """
    assert results[scenario]["compared"] > 2 and results[scenario]["would_differ"] > 0.1


def test_a_rank_that_replays_otherwise_stops_all_together_before_a_weight_moves(
    results: dict[str, dict[str, Any]], saved: Path
) -> None:
    said = results["fault_on_rank_1"]["error"]
    assert said.startswith(
        "step 3: routes were not replayed as recorded: rank 1: layer 0, micro-batch 0: "
    )
    assert "its router ran 2 times in one forward pass, not once" in said
    assert {path.name for path in (saved / "fault_on_rank_1" / "unreplayed-step-3").iterdir()} == {
        "rank-0.bin",
        "rank-1.bin",
    }
