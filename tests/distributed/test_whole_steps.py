"""Whole training steps of every accepted layout equal an independent float64 replica's.

The replica (`support.float64_model`, `support.float64_steps`) shares only the settings and the
rollouts with the trainer. The rollouts' routes are random, so that replaying them, and weighting
the experts by the router's own probabilities, makes a difference.

`DAILY` has each kind of parallelism once. The other cases are marked `nightly`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models.families import read_shape
from tests.support.batches import make_batch
from tests.support.float64_model import Float64Model, write_checkpoint
from tests.support.float64_steps import (
    Float64Trainer,
    advantages_of,
    entropy_advantages_of,
    weights_of,
)
from tests.support.judged_batches import judged_groups
from tests.support.layouts import (
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
    algorithm_settings,
    cases_of,
    reference_of,
)
from tests.support.recordings import read_rollouts, write_rollouts
from tests.support.tiny_families import deepseek_v3, randomize_weights
from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("whole_steps.py")
# Expert, tensor, pipeline and context parallelism, and bfloat16: all algorithms, every
# recomputation
DAILY = [
    LayoutCase("tp2_ep2-full", "espo"),
    LayoutCase("pp2-selective", "grpo"),
    LayoutCase("cp2-none", "espo"),
    LayoutCase("tp2_ep2-bfloat16", "cispo"),
]
assert set(DAILY) <= set(cases_of(2))
NIGHTLY = {ranks: [case for case in cases_of(ranks) if case not in DAILY] for ranks in RANKS}
LATENT_ATTENTION = {
    ranks: [LayoutCase(layout, "grpo", "deepseek") for layout in layouts]
    for ranks, layouts in DEEPSEEK.items()
}


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed differences from the replica.

    grad_norm: relative, of each optimizer step.
    weight: absolute, of every weight after the last step. Weights move by up to 3e-3.
    movement: norm of the error relative to the norm of the movement, over all weights.
    metric: absolute. All metrics are below 5.
    """

    grad_norm: float
    weight: float
    movement: float
    metric: float


TOLERANCES = {
    "float32": Tolerance(grad_norm=1e-5, weight=1e-6, movement=1e-4, metric=1e-5),
    # Exported weights are rounded to eight bits, by up to twice their movement, and noise decides
    # which tokens are clipped.
    "bfloat16": Tolerance(grad_norm=0.1, weight=1e-2, movement=0.6, metric=0.2),
}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

RunCase = Callable[[int, LayoutCase], dict[str, Any]]


@dataclass(frozen=True)
class Reference:
    """Results of the replica: its state after the last step, and the results of each batch.

    start: weights before the first step.
    """

    trainer: Float64Trainer
    start: dict[str, torch.Tensor]
    advantages: list[dict[str, tuple[float, float]]]
    metrics: list[dict[str, float]]


FindReference = Callable[[LayoutCase, list[list[list[str]]]], Reference]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and rollouts of each model."""
    root = tmp_path_factory.mktemp("whole_steps")
    for model, changes in MODELS.items():
        write_reference(write_checkpoint(root / model, **changes))
    randomize_weights(deepseek_v3()).save_pretrained(root / "deepseek")
    for model in (*MODELS, "deepseek"):
        _, rollouts, _ = make_batch(read_shape(root / model), BATCHES * BATCH)
        write_rollouts(root / model / "rollouts", rollouts)
    return root


def write_reference(checkpoint: Path) -> None:
    """Write the reference of a checkpoint, which differs from it in every weight."""
    generator = torch.Generator().manual_seed(5)
    reference = reference_of(checkpoint)
    reference.mkdir()
    config = (checkpoint / "config.json").read_bytes()
    (reference / "config.json").write_bytes(config)
    weights = load_file(checkpoint / "model.safetensors")
    for weight in weights.values():
        weight *= 1 + 0.2 * torch.randn(weight.shape, generator=generator)
    save_file(weights, reference / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def run_case(directory: Path) -> RunCase:
    """Return the trainer's results. The daily cases, and the others of a size, run in one job."""

    @cache
    def run_job(ranks: int, is_daily: bool) -> None:
        cases = DAILY if is_daily else [*NIGHTLY[ranks], *LATENT_ATTENTION.get(ranks, ())]
        torchrun(SCRIPT, str(directory), *map(str, cases), ranks=ranks, timeout=500)

    def run(ranks: int, case: LayoutCase) -> dict[str, Any]:
        run_job(ranks, case in DAILY)
        result: dict[str, Any] = torch.load(directory / f"{case}.pt", weights_only=True)
        return result

    return run


@pytest.fixture(scope="module")
def find_reference(directory: Path) -> Iterator[FindReference]:
    """Return the replica's results with the same rollouts in the same optimizer steps.

    The replica is small, so that one thread is fastest.
    """
    references: dict[tuple[str, str], tuple[Reference, list[list[list[str]]]]] = {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def find(case: LayoutCase, steps: list[list[list[str]]]) -> Reference:
        key = (case.algorithm, case.model)
        if key not in references:
            references[key] = (train_replica(directory, case, steps), steps)
        reference, reference_steps = references[key]
        assert reference_steps == steps, "layouts put rollouts into different optimizer steps"
        return reference

    yield find
    torch.set_num_threads(num_threads)


def train_replica(directory: Path, case: LayoutCase, steps: list[list[list[str]]]) -> Reference:
    """Train the replica. steps: ids of the rollouts by batch and optimizer step."""
    rollouts = read_rollouts(directory / case.model / "rollouts")
    model = Float64Model.read(directory / case.model)
    start = {name: weight.detach().clone() for name, weight in model.weights.items()}
    algo = algorithm_settings(case, directory)
    trainer = Float64Trainer(model, algo, OPTIMIZER, TOTAL_STEPS, TEMPERATURE)
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    advantages = []
    metrics = []
    for batch, batch_steps in enumerate(steps):
        groups = judged_groups(rollouts[batch * BATCH : (batch + 1) * BATCH])
        alphas = entropy_advantages_of(groups, CREDIT.zvp_alpha)
        batch_advantages = {name: (a, 0.0) for name, a in advantages_of(groups).items()}
        batch_advantages |= {name: (0.0, alpha) for name, alpha in alphas.items()}
        advantages.append(batch_advantages)
        weights = weights_of(groups)
        metrics.append(trainer.train(batch_steps, by_id, batch_advantages, weights))
    return Reference(trainer, start, advantages, metrics)


def all_cases() -> list[Any]:
    daily = [pytest.param(2, case, id=f"2-{case}") for case in DAILY]
    nightly = [
        pytest.param(ranks, case, id=f"{ranks}-{case}", marks=pytest.mark.nightly)
        for ranks, cases in NIGHTLY.items()
        for case in cases
    ]
    return [*daily, *nightly]


@pytest.mark.parametrize(("ranks", "case"), all_cases())
def test_whole_steps_are_exact(
    run_case: RunCase, find_reference: FindReference, ranks: int, case: LayoutCase
) -> None:
    result = run_case(ranks, case)
    tolerance = TOLERANCES[LAYOUTS[case.layout].dtype]
    reference = find_reference(case, [batch["steps"] for batch in result["batches"]])
    trainer = reference.trainer
    assert result["rates"] == pytest.approx(trainer.rates, rel=1e-12)
    check_advantages(result, reference)
    check_metrics(result, reference, tolerance, has_routers=case.model != "dense")
    assert result["grad_norms"] == pytest.approx(trainer.grad_norms, rel=tolerance.grad_norm)
    assert min(trainer.grad_norms) > OPTIMIZER.clip_grad, "clipping is part of every step"
    check_weights(case, result, reference, tolerance)


def check_advantages(result: dict[str, Any], reference: Reference) -> None:
    for batch, advantages in zip(result["batches"], reference.advantages, strict=True):
        assert batch["advantages"].keys() == advantages.keys()
        for name, pair in advantages.items():
            assert batch["advantages"][name] == pytest.approx(pair, rel=1e-12)
        alphas = {alpha for _, alpha in advantages.values()}
        assert alphas == {0.0, CREDIT.zvp_alpha, -CREDIT.zvp_alpha}


def check_metrics(
    result: dict[str, Any], reference: Reference, tolerance: Tolerance, *, has_routers: bool
) -> None:
    """Compare the metrics, and check that clipping and replay matter in these steps."""
    for batch, metrics in zip(result["batches"], reference.metrics, strict=True):
        batch_metrics = {name: batch["metrics"][name] for name in metrics}
        assert batch_metrics == pytest.approx(metrics, rel=0, abs=tolerance.metric)
        assert metrics["policy/clip_fraction_low"] > 0.01
        assert metrics["policy/clip_fraction_high"] > 0.01
        if has_routers:
            assert metrics["mismatch/route_disagreement"] > 0.9


def check_weights(
    case: LayoutCase, result: dict[str, Any], reference: Reference, tolerance: Tolerance
) -> None:
    weights = reference.trainer.model.weights
    assert result["weights"].keys() == weights.keys()
    errors = {
        name: result["weights"][name].double() - weight.detach() for name, weight in weights.items()
    }
    movements = [weight.detach() - reference.start[name] for name, weight in weights.items()]
    largest = {name: float(error.abs().max()) for name, error in errors.items()}
    worst = max(largest, key=lambda name: largest[name])
    error = norm(list(errors.values())) / norm(movements)
    print(f"{case}: worst weight {largest[worst]:.1e}, of the movement {error:.1e}")
    assert largest[worst] < tolerance.weight, (worst, largest[worst])
    assert error < tolerance.movement


@pytest.mark.nightly
@pytest.mark.parametrize("case", LATENT_ATTENTION[2], ids=str)
def test_steps_with_latent_attention_equal_those_of_one_rank(
    run_case: RunCase, directory: Path, case: LayoutCase
) -> None:
    """The routers' biases stay unchanged, bit for bit."""
    reference = run_case(1, LATENT_ATTENTION[1][0])
    result = run_case(2, case)
    start = load_file(directory / "deepseek" / "model.safetensors")
    assert result["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-5)
    assert result["weights"].keys() == reference["weights"].keys() == start.keys()
    for name, weight in result["weights"].items():
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(weight, start[name])
        else:
            assert float((reference["weights"][name] - start[name]).abs().max()) > 1e-4
            assert float((reference["weights"][name] - weight).abs().max()) < 1e-6


@pytest.mark.parametrize(("ranks", "case"), all_cases())
def test_every_router_call_is_replayed_and_has_a_gradient(
    run_case: RunCase, ranks: int, case: LayoutCase
) -> None:
    """In the old-policy pass, forward, recomputation and backward. The script compares the maps."""
    routers = run_case(ranks, case)["routers"]
    assert len(routers) == ranks
    num_calls = sum(count for count, _ in routers)
    gradients = [gradient for _, gradient in routers if gradient is not None]
    if case.model == "dense":
        assert num_calls == 0 and not gradients
    else:
        assert num_calls >= 2 * BATCHES * STEPS_PER_BATCH * 2 and min(gradients) > 0


def norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt())
