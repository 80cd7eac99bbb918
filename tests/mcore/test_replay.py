"""Route replay in a whole model: choices, gradients, recomputation and measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_rl.contracts.exit_codes import Failure
from tests.mcore.replayed_models import (
    MICRO_BATCHES,
    build,
    record_routing_maps,
    routers,
    routing_map,
    train_pass,
)
from tests.support.packed_sequences import pack


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_router_call_uses_the_routes_of_its_micro_batch(
    megatron: Any, checkpoint: Path, recompute: str
) -> None:
    models, replay = build(checkpoint, recompute)
    maps_by_router = record_routing_maps(models)
    train_pass(models, replay)
    calls = 2 if recompute == "full" else 1
    for layer, maps in enumerate(maps_by_router):
        expected_maps = [
            routing_map(pack(sequences, range(3)).routes[:, layer])
            for sequences in MICRO_BATCHES
            for _ in range(calls)
        ]
        assert len(maps) == len(expected_maps)
        assert all(torch.equal(a, b) for a, b in zip(maps, expected_maps, strict=True))


def test_live_choices_differ_from_the_replayed_routes(megatron: Any, checkpoint: Path) -> None:
    models, _ = build(checkpoint)
    maps_by_router = record_routing_maps(models)
    train_pass(models, None)
    replayed_map = routing_map(pack(MICRO_BATCHES[0], range(3)).routes[:, 0])
    assert not torch.equal(maps_by_router[0][0], replayed_map)


def test_scores_are_those_of_the_replayed_experts() -> None:
    from megatron_rl.mcore.router_target import RouterTarget

    def best(scores: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, experts = scores.topk(topk, dim=1)
        return values, experts

    target = RouterTarget()
    target.activate("replay", measure=True, forward_only=True)
    target.begin_forward(0, torch.tensor([[1, 2], [3, 0]], dtype=torch.uint8), None)
    scores = torch.tensor([[9.0, 1.0, 5.0, 7.0], [2.0, 8.0, 4.0, 6.0]])
    values, experts = target.get_replay_topk(scores, 2, default_compute_topk=best)
    assert experts.tolist() == [[1, 2], [3, 0]]
    assert values.tolist() == [[1.0, 5.0], [6.0, 2.0]]
    assert target.disagreement.tolist() == [2, 2]


def test_pending_micro_batches_are_recomputed_oldest_first() -> None:
    from megatron_rl.mcore.router_target import RouterTarget

    target = RouterTarget(recomputations=1)
    scores = torch.eye(3)
    routes = [torch.full((3, 1), expert) for expert in range(3)]
    target.activate("replay", measure=False, forward_only=False)
    for batch, experts in enumerate(routes):
        target.begin_forward(batch, experts, None)
        with torch.no_grad():
            target.get_replay_topk(scores, 1, default_compute_topk=torch.topk)
        target.end_forward()
    recomputed_experts = [
        target.get_replay_topk(scores, 1, default_compute_topk=torch.topk)[1] for _ in routes
    ]
    assert [experts[0].item() for experts in recomputed_experts] == [0, 1, 2]
    target.deactivate()
    assert target.faults == []


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gate_weights_are_the_softmax_over_replayed_experts(
    megatron: Any, checkpoint: Path, recompute: Any
) -> None:
    """p_e = exp(x · w_e) / Σ exp(x · w) over the replayed experts, and 0 for all others.

    The live choice has no influence.
    """
    models, replay = build(checkpoint, recompute)
    calls: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for router in routers(models):
        router.register_forward_hook(
            lambda m, inputs, out: calls.append((m, inputs[0].detach(), out[0].detach()))
        )
    train_pass(models, replay)
    calls_per_batch = 2 if recompute == "full" else 1
    assert len(calls) == len(routers(models)) * len(MICRO_BATCHES) * calls_per_batch
    routes_by_length = {
        len(batch.routes): batch.routes
        for batch in (pack(sequences, range(3)) for sequences in MICRO_BATCHES)
    }
    assert len(routes_by_length) == len(MICRO_BATCHES), "the batches have different lengths"
    for router, x, gates in calls:
        x = x.reshape(-1, x.shape[-1])
        experts = routes_by_length[len(x)][:, routers(models).index(router)].long()
        check_gates(router, x, gates, experts)


def check_gates(router: Any, x: torch.Tensor, gates: torch.Tensor, experts: torch.Tensor) -> None:
    """Compare gates [rows, experts] with a float64 softmax over the replayed experts."""
    logits = x.double() @ router.weight.detach().double().T
    live_experts = logits.topk(2).indices
    differs = (live_experts.sort().values != experts.sort().values).any(1)
    assert differs.float().mean() > 0.5, "too few rows tell live from replayed experts"
    weights = logits.gather(1, experts).exp()
    weights = weights / weights.sum(1, keepdim=True)
    expected_gates = torch.zeros_like(logits).scatter(1, experts, weights)
    torch.testing.assert_close(gates.double(), expected_gates, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_recomputation_gives_the_same_gradients(megatron: Any, checkpoint: Path) -> None:
    gradients = train_pass(*build(checkpoint, "none"))
    recomputed_gradients = train_pass(*build(checkpoint, "full"))
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            recomputed_gradients[name],
            gradient,
            rtol=1e-6,
            atol=1e-8,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.slow
def test_router_has_a_gradient_under_replay(megatron: Any, checkpoint: Path) -> None:
    gradients = train_pass(*build(checkpoint))
    assert all(g.norm() > 0 for name, g in gradients.items() if "router" in name)


def test_disagreement_counts_rows_that_differ_from_live_routes(
    megatron: Any, checkpoint: Path
) -> None:
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    maps_by_router = record_routing_maps(models)
    batch = pack(MICRO_BATCHES[0], range(3))

    def ignore(logits: torch.Tensor, index: int) -> tuple[None, None]:
        return None, None

    def measure(routes: torch.Tensor) -> tuple[int, int]:
        batches = [replace(batch, routes=routes)]
        run_schedule(models, batches, ignore, forward_only=True, replay=replay, measure_routes=True)
        return replay.disagreement()

    run_schedule(models, [batch], ignore, forward_only=True, replay=None)
    live_experts = [maps[0].int().topk(2, dim=1).indices for maps in maps_by_router]
    live_routes = torch.stack(live_experts, dim=1).to(torch.uint8)
    rows = live_routes.shape[0] * 3
    assert measure(live_routes) == (0, rows)
    other_routes = live_routes.clone()
    row = other_routes[4, 2]  # of the last layer, so that no later layer changes
    row[0] = next(e for e in range(8) if e not in row.tolist())
    assert measure(other_routes) == (1, rows)


# Functions that wait for the GPU. An index of bools has a size that only the GPU knows.
WAITING_FUNCTIONS = ("cpu", "item", "tolist", "nonzero", "__int__", "__bool__", "__getitem__")


class NoWaiting(TorchFunctionMode):
    """Fails the test if the host would wait for a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.__name__ in WAITING_FUNCTIONS:
            pytest.fail(f"{function.__name__} waits")
        return function(*args, **(kwargs or {}))


def test_measuring_does_not_wait_for_the_gpu() -> None:
    from megatron_rl.mcore.router_target import RouterTarget

    target = RouterTarget()
    target.activate("replay", measure=True, forward_only=True)
    micro_batches = [
        (torch.tensor([[0], [1], [3], [2]]), torch.tensor([True, True, True, False])),
        (torch.tensor([[1], [1], [2], [0]]), None),
    ]
    scores = torch.eye(4)
    for batch, (experts, real_rows) in enumerate(micro_batches):
        with NoWaiting():
            target.begin_forward(batch, experts, real_rows)
            target.get_replay_topk(
                scores, 1, default_compute_topk=lambda scores, topk, **_: scores.topk(topk, dim=1)
            )
            target.end_forward()
    assert target.disagreement.tolist() == [1 + 2, 3 + 4]
    assert target.load.tolist() == [1 + 1, 1 + 2, 0 + 1, 1 + 0], (
        "the fourth row of the first micro-batch is padding"
    )


def test_stage_without_experts_has_no_disagreement(megatron: Any) -> None:
    from megatron_rl.mcore.replay import RouteReplay

    assert RouteReplay([torch.nn.Linear(2, 2)]).disagreement() == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_passes_are_independent(megatron: Any, checkpoint: Path, recompute: str) -> None:
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint, recompute)
    first_gradients = train_pass(models, replay)
    batches = [pack(sequences, range(3)) for sequences in reversed(MICRO_BATCHES)]
    run_schedule(
        models, batches, lambda logits, index: (None, None), forward_only=True, replay=replay
    )
    for name, gradient in train_pass(models, replay).items():
        assert torch.equal(gradient, first_gradients[name]), name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_aux_loss_coeff", 0.01),
        ("moe_router_force_load_balancing", True),
    ],
)
def test_settings_under_which_routers_ignore_replay_are_refused(
    megatron: Any, checkpoint: Path, key: str, value: object
) -> None:

    with pytest.raises(Failure, match=rf"{key}={value!r}.*train\.replay=off"):
        build(checkpoint, **{key: value})


def test_routers_are_not_in_the_global_list_of_megatron(megatron: Any, checkpoint: Path) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    build(checkpoint)
    assert not RouterReplay.global_router_replay_instances
