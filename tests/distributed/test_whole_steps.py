"""Whole training steps in every accepted layout are those of an independent float64 replica.

The replica (`support.float64_model`, `support.float64_steps`) shares the settings and the rollouts
with the trainer and nothing else. The rollouts' routes are random: replaying them, and weighing the
experts by anything but their own probabilities, makes a difference.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launch.testbed.batches import make_batch
from launch.testbed.tiny_families import deepseek_v3, randomized
from megatron_rl.models.families import read_shape
from tests.support.float64_model import Float64Model, write_checkpoint
from tests.support.float64_steps import Float64Trainer, advantages_of, entropy_advantages_of
from tests.support.judged_batches import judged_groups
from tests.support.layouts import (
    ALGORITHMS,
    BATCH,
    BATCHES,
    CREDIT,
    DEEPSEEK,
    LAYOUTS,
    MODELS,
    OPTIMIZER,
    RANKS,
    STEPS_PER_BATCH,
    TEMPERATURE,
    TOTAL_STEPS,
    LayoutCase,
    cases_of,
)
from tests.support.recordings import read_rollouts, write_rollouts
from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("whole_steps.py")


@dataclass(frozen=True)
class Tolerance:
    """How far a run may be from the replica.

    grad_norm: relative, each optimizer step. weight: absolute, every weight after the last step;
    they have moved by up to 3e-3. movement: the error's norm relative to the movement's, over all
    weights. metric: absolute; all are below 5.
    """

    grad_norm: float
    weight: float
    movement: float
    metric: float


TOLERANCES = {
    "float32": Tolerance(grad_norm=1e-5, weight=1e-6, movement=1e-4, metric=1e-5),
    # Eight bits: weights are exported rounded, by up to twice what they have moved by; noise
    # decides what is clipped.
    "bfloat16": Tolerance(grad_norm=0.1, weight=1e-2, movement=0.6, metric=0.2),
}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Expected:
    trainer: Float64Trainer
    start: dict[str, torch.Tensor]
    advantages: list[dict[str, tuple[float, float]]]
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("whole_steps")
    for model, changes in MODELS.items():
        write_checkpoint(made / model, **changes)
        _, rollouts, _ = make_batch(read_shape(made / model), BATCHES * BATCH)
        write_rollouts(made / model / "rollouts", rollouts)
    randomized(deepseek_v3()).save_pretrained(made / "deepseek")
    _, rollouts, _ = make_batch(read_shape(made / "deepseek"), BATCHES * BATCH)
    write_rollouts(made / "deepseek" / "rollouts", rollouts)
    return made


@pytest.fixture(scope="module")
def trained(directory: Path) -> Callable[[LayoutCase], dict[str, Any]]:
    """What the trainer did, every case of a world size in one job."""

    @cache
    def play(ranks: int) -> None:
        cases = [
            *cases_of(ranks),
            *(LayoutCase(layout, "grpo", "deepseek") for layout in DEEPSEEK.get(ranks, ())),
        ]
        torchrun(SCRIPT, str(directory), *map(str, cases), ranks=ranks, timeout=500)

    def of(ranks: int, case: LayoutCase) -> dict[str, Any]:
        play(ranks)
        found: dict[str, Any] = torch.load(directory / f"{case}.pt", weights_only=True)
        return found

    return of


@pytest.fixture(scope="module")
def expected(directory: Path) -> Iterator[Callable[[LayoutCase, list[list[list[str]]]], Expected]]:
    """What the replica does with the same rollouts in the same optimizer steps; it is small, so one
    thread is best.
    """
    made: dict[tuple[str, str], tuple[Expected, Any]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def of(case: LayoutCase, steps: list[list[list[str]]]) -> Expected:
        key = case.algorithm, case.model
        if key not in made:
            made[key] = replay(directory, case, steps), steps
        assert made[key][1] == steps, "layouts put rollouts into different optimizer steps"
        return made[key][0]

    yield of
    torch.set_num_threads(threads)


def replay(directory: Path, case: LayoutCase, steps: list[list[list[str]]]) -> Expected:
    rollouts = read_rollouts(directory / case.model / "rollouts")
    model = Float64Model.read(directory / case.model)
    start = {name: weight.detach().clone() for name, weight in model.weights.items()}
    trainer = Float64Trainer(model, ALGORITHMS[case.algorithm], OPTIMIZER, TOTAL_STEPS, TEMPERATURE)
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    groups = [
        judged_groups(rollouts[batch * BATCH : (batch + 1) * BATCH]) for batch in range(BATCHES)
    ]
    alphas = [entropy_advantages_of(batch, CREDIT.zvp_alpha) for batch in groups]
    advantages = [
        {name: (a, 0.0) for name, a in advantages_of(batch).items()}
        | {name: (0.0, a) for name, a in own.items()}
        for batch, own in zip(groups, alphas, strict=True)
    ]
    metrics = [
        trainer.train(batch, by_id, known) for batch, known in zip(steps, advantages, strict=True)
    ]
    return Expected(trainer, start, advantages, metrics)


@pytest.mark.parametrize(
    ("ranks", "case"),
    [pytest.param(n, case, id=f"{n}-{case}") for n in RANKS for case in cases_of(n)],
)
def test_whole_steps_are_exact(trained: Any, expected: Any, ranks: int, case: LayoutCase) -> None:
    found, tolerance = trained(ranks, case), TOLERANCES[LAYOUTS[case.layout].dtype]
    exact: Expected = expected(case, [batch["steps"] for batch in found["batches"]])
    assert found["rates"] == pytest.approx(exact.trainer.rates, rel=1e-12)
    for batch, advantages, metrics in zip(
        found["batches"], exact.advantages, exact.metrics, strict=True
    ):
        assert batch["advantages"].keys() == advantages.keys()
        for name, pair in advantages.items():
            assert batch["advantages"][name] == pytest.approx(pair, rel=1e-12)
        assert {alpha for _, alpha in advantages.values()} == {
            0.0,
            CREDIT.zvp_alpha,
            -CREDIT.zvp_alpha,
        }
        assert {name: batch["metrics"][name] for name in metrics} == pytest.approx(
            metrics, rel=0, abs=tolerance.metric
        )
        # where nothing is clipped or only live experts are replayed, less is compared than it seems
        assert (
            metrics["policy/clip_fraction_low"] > 0.01
            and metrics["policy/clip_fraction_high"] > 0.01
        )
        assert case.model == "dense" or metrics["mismatch/route_disagreement"] > 0.9
    assert found["grad_norms"] == pytest.approx(exact.trainer.grad_norms, rel=tolerance.grad_norm)
    assert min(exact.trainer.grad_norms) > OPTIMIZER.clip_grad, "clipping is part of every step"
    weights = exact.trainer.model.weights
    assert found["weights"].keys() == weights.keys()
    errors = {
        name: found["weights"][name].double() - weight.detach() for name, weight in weights.items()
    }
    largest = {name: float(error.abs().max()) for name, error in errors.items()}
    worst = max(largest, key=lambda name: largest[name])
    error = norm(list(errors.values())) / norm(
        [w.detach() - exact.start[name] for name, w in weights.items()]
    )
    off = max(
        abs(a / b - 1) for a, b in zip(found["grad_norms"], exact.trainer.grad_norms, strict=True)
    )
    print(
        f"{case}: grad norm {off:.1e}, worst weight {largest[worst]:.1e}, of the movement {error:.1e}"
    )
    assert largest[worst] < tolerance.weight, (worst, largest[worst])
    assert error < tolerance.movement


@pytest.mark.parametrize("layout", DEEPSEEK[2])
def test_steps_with_latent_attention_are_those_of_one_rank(
    trained: Any, directory: Path, layout: str
) -> None:
    """And the routers' biases stay as they are, bit for bit."""
    alone, found = (
        trained(n, LayoutCase(name, "grpo", "deepseek"))
        for n, name in ((1, DEEPSEEK[1][0]), (2, layout))
    )
    start = load_file(directory / "deepseek" / "model.safetensors")
    assert found["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-5)
    assert found["weights"].keys() == alone["weights"].keys() == start.keys()
    for name, weight in found["weights"].items():
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(weight, start[name])
        else:
            assert float((alone["weights"][name] - start[name]).abs().max()) > 1e-4
            assert float((alone["weights"][name] - weight).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("ranks", "case"),
    [pytest.param(n, case, id=f"{n}-{case}") for n in RANKS for case in cases_of(n)],
)
def test_every_router_call_is_replayed_and_every_router_has_a_gradient(
    trained: Any, ranks: int, case: LayoutCase
) -> None:
    """In the old-policy pass, in forward, in recomputation and in backward; the script compares the
    maps themselves.
    """
    found = trained(ranks, case)["routers"]
    assert len(found) == ranks
    calls = sum(count for count, _ in found)
    smallest = [gradient for _, gradient in found if gradient is not None]
    if case.model == "dense":
        assert calls == 0 and not smallest
    else:
        assert calls >= 2 * BATCHES * STEPS_PER_BATCH * 2 and min(smallest) > 0


def norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt())
