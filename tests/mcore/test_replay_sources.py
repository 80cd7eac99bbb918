"""Faults of routes that do not fit the model, and replay of routes that the trainer records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.contracts.exit_codes import Failure
from tests.mcore.replayed_models import MICRO_BATCHES, build, routers, train_pass
from tests.support.packed_sequences import pack


def ignore_logits(logits: torch.Tensor, index: int) -> tuple[None, None]:
    return None, None


@pytest.mark.parametrize(
    ("cut", "fault"),
    [
        pytest.param(
            lambda routes: routes[:-1],
            "layer 0, micro-batch 1: routes of shape (10, 2) for 11 rows",
            id="a row",
        ),
        pytest.param(
            lambda routes: routes[:, :2],
            "micro-batch 1: routes of shape (11, 2, 2), not [rows, 3 layers",
            id="a layer",
        ),
        pytest.param(
            lambda routes: routes[..., :1],
            "layer 3, micro-batch 1: routes of shape (11, 1) for 11",
            id="an expert",
        ),
        pytest.param(
            lambda routes: None,
            "layer 2, micro-batch 1: there are no routes for it",
            id="everything",
        ),
    ],
)
def test_missing_routes_are_a_fault_that_names_layer_and_micro_batch(
    megatron: Any, checkpoint: Path, cut: Any, fault: str
) -> None:
    """The pass completes, because other ranks would wait for a rank that raised an error."""
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    batches = [pack(sequences, range(3)) for sequences in MICRO_BATCHES]
    rows = len(batches[1].routes)
    batches[1] = replace(batches[1], routes=cut(batches[1].routes))
    run_schedule(models, batches, ignore_logits, forward_only=True, replay=replay)
    assert replay.has_faults
    assert fault.replace("11", str(rows)).replace("10", str(rows - 1)) in replay.take_faults()
    assert not replay.has_faults and replay.take_faults() == ""


def test_routes_of_other_layers_than_the_routers_are_refused(
    megatron: Any, checkpoint: Path
) -> None:

    _, replay = build(checkpoint)
    replay.require_layers((0, 2, 3))
    with pytest.raises(Failure, match=r"\[0, 2, 3\].*\[0, 1, 2\].*train\.replay=off"):
        replay.require_layers((0, 1, 2))


def test_skipped_recomputation_is_a_fault(megatron: Any, checkpoint: Path) -> None:
    """A loss that does not depend on the logits skips the backward pass and its recomputations."""
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint, "full")
    batches = [pack(sequences, range(3)) for sequences in MICRO_BATCHES]
    run_schedule(
        models,
        batches,
        lambda logits, index: (torch.zeros(()), None),
        forward_only=False,
        replay=replay,
    )
    faults = replay.take_faults()
    assert "layer 0, micro-batch 1: its router was recomputed 0 times, not 1" in faults
    assert "layer 2, micro-batch 0" in faults and faults.count(";") == 2 * 3 - 1


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_complete_pass_has_no_faults(megatron: Any, checkpoint: Path, recompute: Any) -> None:
    models, replay = build(checkpoint, recompute)
    train_pass(models, replay)
    assert replay.take_faults() == ""


def test_router_that_runs_twice_or_never_in_a_forward_pass_is_a_fault(
    megatron: Any, checkpoint: Path
) -> None:
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    first, _, last = routers(models)
    forward = first.forward

    def forward_twice(*inputs: Any, **options: Any) -> Any:
        forward(*inputs, **options)
        return forward(*inputs, **options)

    first.forward = forward_twice
    last_target = last.router_replay
    last.router_replay = None  # as a path through Megatron that does not call the target
    batches = [pack(sequences, range(3)) for sequences in MICRO_BATCHES]
    run_schedule(models, batches, ignore_logits, forward_only=True, replay=replay)
    faults = replay.take_faults()
    assert "layer 0, micro-batch 1: its router ran 2 times in one forward pass, not once" in faults
    assert "layer 3, micro-batch 0: its router ran 0 times in one forward pass, not once" in faults
    assert last_target.faults == []


def record_routes(models: list[Any], replay: Any, batches: list[Any]) -> list[Any]:
    from megatron_rl.mcore.schedule import run_schedule

    run_schedule(models, batches, ignore_logits, forward_only=True, replay=replay, routing="record")
    return replay.take_recorded_routes(len(batches))


def perturb(model: torch.nn.Module) -> None:
    """Add noise to all weights."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)


def changed_share(routes: torch.Tensor, other_routes: torch.Tensor) -> float:
    """Return the share of rows and layers with different sets of experts."""
    differs = (routes.sort().values != other_routes.sort().values).any(-1)
    return float(differs.float().mean())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recorded_routes_are_replayed_after_the_weights_change(
    megatron: Any, checkpoint: Path, recompute: Any
) -> None:
    """R2: the update uses the routers' choices of the old-policy pass, also in recomputation."""
    from megatron_rl.mcore.schedule import run_schedule
    from tests.support.routers import check_routers

    models, replay = build(checkpoint, recompute)
    batches = [pack(sequences) for sequences in MICRO_BATCHES]
    recorded_routes = record_routes(models, replay, batches)
    assert [routes.shape for routes in recorded_routes] == [(b.num_tokens, 3, 2) for b in batches]
    assert all(routes.dtype == torch.uint8 for routes in recorded_routes)
    perturb(models[0])
    live_routes = record_routes(models, replay, batches)
    shares = [changed_share(a, b) for a, b in zip(recorded_routes, live_routes, strict=True)]
    assert min(shares) > 0.2, "the routers would make the same choice again"
    batches = [replace(b, routes=r) for b, r in zip(batches, recorded_routes, strict=True)]
    with check_routers(models, batches, with_recomputation=recompute == "full"):
        run_schedule(
            models,
            batches,
            lambda logits, _: (logits.square().mean(), None),
            forward_only=False,
            replay=replay,
        )
    assert replay.take_faults() == ""


def test_router_that_recorded_nothing_is_a_fault(megatron: Any, checkpoint: Path) -> None:
    models, replay = build(checkpoint)
    batches = [pack(MICRO_BATCHES[0])]
    routers(models)[1].router_replay = None
    assert record_routes(models, replay, batches) == [None]
    assert "layer 2, micro-batch 0: its router recorded nothing" in replay.take_faults()
    assert replay.take_recorded_routes(1) == [None], "routes can be taken once"


def test_stage_without_experts_records_nothing_without_a_fault() -> None:
    from megatron_rl.mcore.replay import RouteReplay

    replay = RouteReplay([torch.nn.Linear(2, 2)], "trainer")
    assert replay.take_recorded_routes(2) == [None, None] and replay.take_faults() == ""
