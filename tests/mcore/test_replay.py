from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from launch.testbed.packed_sequences import pack
from tests.mcore.replayed_models import MICRO_BATCHES, build, chosen, routers, train_pass


def as_map(routes: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(routes), 8, dtype=torch.bool).scatter(1, routes.long(), True)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_router_call_uses_the_routes_of_its_micro_batch(
    megatron: Any, checkpoint: Path, recompute: str
) -> None:
    models, replay = build(checkpoint, recompute)
    seen = chosen(models)
    train_pass(models, replay)
    calls = 2 if recompute == "full" else 1
    for layer, maps in enumerate(seen):
        expected = [
            as_map(pack(m, range(3)).routes[:, layer]) for m in MICRO_BATCHES for _ in range(calls)
        ]
        assert len(maps) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(maps, expected, strict=True))


def test_live_choices_differ_from_the_replayed_ones(megatron: Any, checkpoint: Path) -> None:
    models, _ = build(checkpoint)
    seen = chosen(models)
    train_pass(models, None)
    forced = as_map(pack(MICRO_BATCHES[0], range(3)).routes[:, 0])
    assert not torch.equal(seen[0][0], forced)


def test_scores_of_the_replayed_experts_not_of_the_best_ones() -> None:
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

    target, scores, routes = (
        RouterTarget(recomputations=1),
        torch.eye(3),
        [torch.full((3, 1), expert) for expert in range(3)],
    )
    target.activate("replay", measure=False, forward_only=False)
    for batch, experts in enumerate(routes):
        target.begin_forward(batch, experts, None)
        with torch.no_grad():
            target.get_replay_topk(scores, 1, default_compute_topk=torch.topk)
        target.end_forward()
    again = [target.get_replay_topk(scores, 1, default_compute_topk=torch.topk)[1] for _ in routes]
    assert [experts[0].item() for experts in again] == [0, 1, 2]
    target.deactivate()
    assert target.faults == []


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gate_weights_are_the_replayed_experts_own(
    megatron: Any, checkpoint: Path, recompute: Any
) -> None:
    """p_e = exp(x · w_e) / Σ over the replayed experts exp(x · w), 0 for all others; no live choice
    enters.
    """
    models, replay = build(checkpoint, recompute)
    seen: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for router in routers(models):
        router.register_forward_hook(
            lambda m, inputs, out: seen.append((m, inputs[0].detach(), out[0].detach()))
        )
    train_pass(models, replay)
    assert len(seen) == len(routers(models)) * len(MICRO_BATCHES) * (
        2 if recompute == "full" else 1
    )
    routes = [pack(m, range(3)).routes for m in MICRO_BATCHES]
    for router, x, gates in seen:
        x = x.reshape(-1, x.shape[-1]).double()
        (forced,) = (r[:, routers(models).index(router)].long() for r in routes if len(r) == len(x))
        logits = x @ router.weight.detach().double().T
        assert (logits.topk(2).indices.sort().values != forced.sort().values).any(
            1
        ).float().mean() > 0.8
        chosen = logits.gather(1, forced).exp()
        expected = torch.zeros_like(logits).scatter(1, forced, chosen / chosen.sum(1, keepdim=True))
        torch.testing.assert_close(gates.double(), expected, rtol=1e-5, atol=1e-7)


def test_recomputation_gives_the_same_gradients(megatron: Any, checkpoint: Path) -> None:
    plain = train_pass(*build(checkpoint, "none"))
    again = train_pass(*build(checkpoint, "full"))
    for name, gradient in plain.items():
        torch.testing.assert_close(
            again[name], gradient, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_router_keeps_its_gradient_under_replay(megatron: Any, checkpoint: Path) -> None:
    gradients = train_pass(*build(checkpoint))
    assert all(g.norm() > 0 for name, g in gradients.items() if "router" in name)


def test_disagreement_is_zero_for_live_routes_and_counted_otherwise(
    megatron: Any, checkpoint: Path
) -> None:
    from dataclasses import replace

    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    seen = chosen(models)
    batch = pack(MICRO_BATCHES[0], range(3))

    def ignore(logits: torch.Tensor, index: int) -> tuple[None, None]:
        return None, None

    run_schedule(models, [batch], ignore, forward_only=True, replay=None)
    live = torch.stack([maps[0].int().topk(2, dim=1).indices for maps in seen], dim=1).to(
        torch.uint8
    )
    run_schedule(
        models,
        [replace(batch, routes=live)],
        ignore,
        forward_only=True,
        replay=replay,
        measure_routes=True,
    )
    assert replay.disagreement() == (0, live.shape[0] * 3)
    changed = live.clone()
    row = changed[4, 2]
    row[0] = next(
        e for e in range(8) if e not in row.tolist()
    )  # the last layer: nothing downstream moves
    run_schedule(
        models,
        [replace(batch, routes=changed)],
        ignore,
        forward_only=True,
        replay=replay,
        measure_routes=True,
    )
    assert replay.disagreement() == (1, live.shape[0] * 3)


WAITS = (
    "cpu",
    "item",
    "tolist",
    "nonzero",
    "__int__",
    "__bool__",
    "__getitem__",
)  # an index of bools has a size


class NoWaiting(TorchFunctionMode):
    """Fails where the host would wait for a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.__name__ in WAITS:
            pytest.fail(f"{function.__name__} waits")
        return function(*args, **(kwargs or {}))


def test_counting_disagreement_makes_no_router_wait_for_the_gpu() -> None:
    from megatron_rl.mcore.router_target import RouterTarget

    target, live = RouterTarget(), torch.eye(4)
    target.activate("replay", measure=True, forward_only=True)
    for batch, (experts, real) in enumerate(
        (([[0], [1], [3], [2]], [True, True, True, False]), ([[1], [1], [2], [0]], None))
    ):
        rows = None if real is None else torch.tensor(real)
        with NoWaiting():
            target.begin_forward(batch, torch.tensor(experts), rows)
            target.get_replay_topk(
                live, 1, default_compute_topk=lambda scores, topk, **_: scores.topk(topk, dim=1)
            )
            target.end_forward()
    assert target.disagreement.tolist() == [1 + 2, 3 + 4]
    assert target.load.tolist() == [1 + 1, 1 + 2, 0 + 1, 1 + 0], (
        "the fourth row of the first is padding"
    )


def test_a_stage_without_experts_has_nothing_to_disagree_about(megatron: Any) -> None:
    from megatron_rl.mcore.replay import RouteReplay

    assert RouteReplay([torch.nn.Linear(2, 2)]).disagreement() == (0, 0)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_nothing_is_left_for_the_next_pass(megatron: Any, checkpoint: Path, recompute: str) -> None:
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint, recompute)
    first = train_pass(models, replay)
    batches = [pack(m, range(3)) for m in reversed(MICRO_BATCHES)]
    run_schedule(
        models, batches, lambda logits, index: (None, None), forward_only=True, replay=replay
    )
    for name, gradient in train_pass(models, replay).items():
        assert torch.equal(gradient, first[name]), name


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
def test_settings_that_ignore_or_change_replayed_routes_are_refused(
    megatron: Any, checkpoint: Path, key: str, value: object
) -> None:
    from megatron_rl.mcore.router_target import ReplayError

    with pytest.raises(ReplayError, match=key):
        build(checkpoint, **{key: value})


def test_no_router_is_left_in_megatrons_global_list(megatron: Any, checkpoint: Path) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    build(checkpoint)
    assert not RouterReplay.global_router_replay_instances
