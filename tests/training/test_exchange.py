"""Exchange of rollouts: the transfer plan, and its execution with one thread for each rank."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import RolloutLocation, RolloutRef
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.step_plan import Denominators, OptimizerStep, StepPlan
from megatron_rl.rollouts.wire import codec
from megatron_rl.rollouts.wire.store import RolloutGone
from megatron_rl.training.batch_recording import BatchRecorder
from megatron_rl.training.exchange import rollout_exchange as exchange
from megatron_rl.training.exchange.rollout_exchange import (
    RolloutsLost,
    exchange_rollouts,
)
from megatron_rl.training.exchange.transfer_plan import Receiver, TransferPlan, rollout_indices
from tests.support.processor_time import processor_seconds
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import assert_equal, make_rollout
from tests.support.thread_ranks import Group, gather_bytes, run_on_ranks
from tests.support.torchrun import torchrun

LAYERS = 3


def location_on(node: int) -> RolloutLocation:
    return RolloutLocation(node=node, pid=1, fd=1, offset=0, nbytes=0)


cached_rollout = functools.cache(make_rollout)


def rollout_of(index: int) -> Rollout:
    rollout = cached_rollout(2 + index % 5, 3 + index % 3, layers=LAYERS)
    return Rollout(f"r{index}", "p", 0, rollout.finish_reason, rollout.segments, rollout.routes)


def plan_of(nodes: list[int], dp_size: int, *, optimizer_steps: int = 2) -> StepPlan:
    """Plan a step.

    Rollout i is stored on nodes[i] and trained by data-parallel rank i mod dp_size.
    """

    def micro_batches(step: int, dp_rank: int) -> tuple[tuple[int, ...], ...]:
        indices = range(step, len(nodes), optimizer_steps)
        return tuple(i for i in indices if i % dp_size == dp_rank), ()

    refs = tuple(make_ref(rollout_of(index), location_on(node)) for index, node in enumerate(nodes))
    steps = tuple(
        OptimizerStep(
            micro_batches=tuple(micro_batches(step, dp_rank) for dp_rank in range(dp_size)),
            denominators=Denominators(sequences=1, tokens=1),
        )
        for step in range(optimizer_steps)
    )
    return StepPlan(step=5, rollouts=refs, advantages=(1.0,) * len(nodes), optimizer_steps=steps)


def ranks_of(
    dp_size: int, tp: int, ranks_per_node: int, rows: tuple[int, ...] = (0, 1, 2)
) -> list[Receiver]:
    """Return the receivers of all ranks. Tensor-parallel ranks are neighbours, as in Megatron."""
    return [
        Receiver(dp_rank=rank // tp, node=rank // ranks_per_node, moe_rows=rows)
        for rank in range(dp_size * tp)
    ]


def plan_for_all(plan: StepPlan, receivers: list[Receiver]) -> list[TransferPlan]:
    return [TransferPlan.for_rank(plan, receivers, rank) for rank in range(len(receivers))]


def flatten(lists: Iterable[list[int]]) -> list[int]:
    return [index for indices in lists for index in indices]


@pytest.mark.parametrize(
    ("dp_size", "tp", "ranks_per_node", "nodes"),
    [(4, 1, 2, 2), (4, 2, 4, 2), (3, 2, 2, 3), (2, 4, 4, 2)],
)
def test_every_rank_gets_each_of_its_rollouts_once(
    dp_size: int, tp: int, ranks_per_node: int, nodes: int
) -> None:
    plan = plan_of([i // 3 % nodes for i in range(23)], dp_size)
    receivers = ranks_of(dp_size, tp, ranks_per_node)
    transfers = plan_for_all(plan, receivers)
    nodes_of_rollouts = [ref.location.node for ref in plan.rollouts]
    for rank, mine in enumerate(transfers):
        counts = Counter(mine.local + flatten(mine.incoming) + flatten(mine.relay_incoming))
        assert counts == Counter(rollout_indices(plan, receivers[rank].dp_rank))
        readable = mine.local + flatten(mine.outgoing)
        assert {nodes_of_rollouts[i] for i in readable} <= {receivers[rank].node}
        assert set(flatten(mine.relay_outgoing)) <= set(flatten(mine.incoming))
    assert {(t.has_transfers, t.has_relays) for t in transfers} == {(True, tp > 1)}


def test_senders_and_receivers_have_the_same_plan() -> None:
    plan = plan_of([i // 3 % 2 for i in range(23)], 4)
    receivers = ranks_of(4, 2, 4)
    transfers = plan_for_all(plan, receivers)
    for rank, mine in enumerate(transfers):
        for other, theirs in enumerate(transfers):
            assert mine.outgoing[other] == theirs.incoming[rank]
            assert mine.relay_outgoing[other] == theirs.relay_incoming[rank]
            assert not mine.relay_outgoing[other] or receivers[other] == receivers[rank]


def test_tensor_parallel_ranks_of_a_node_get_one_copy_over_the_network() -> None:
    plan = plan_of([0] * 24, dp_size=4)
    transfers = plan_for_all(plan, ranks_of(4, 2, 4))
    crossings = Counter(index for mine in transfers for index in flatten(mine.outgoing))
    rollouts_of_node_1 = rollout_indices(plan, 2) + rollout_indices(plan, 3)
    assert crossings == Counter(rollouts_of_node_1)


def test_pipeline_stages_of_a_node_relay_nothing() -> None:
    """Pipeline stages need the routes of different layers."""
    plan = plan_of([0] * 4, dp_size=1)
    receivers = [
        Receiver(dp_rank=0, node=0, moe_rows=(0,)),
        Receiver(dp_rank=0, node=1, moe_rows=(0,)),
        Receiver(dp_rank=0, node=1, moe_rows=(1,)),
    ]
    first = plan_for_all(plan, receivers)[0]
    assert first.outgoing == [[], [0, 1, 2, 3], [0, 1, 2, 3]] and not first.has_relays


def test_the_ranks_of_a_node_take_turns_at_sending() -> None:
    plan = plan_of([0] * 40, dp_size=4)
    counts = [len(flatten(mine.outgoing)) for mine in plan_for_all(plan, ranks_of(4, 1, 2))]
    assert counts == [10, 10, 0, 0]


def test_rollouts_of_the_own_node_are_not_transferred() -> None:
    for mine in plan_for_all(plan_of([0] * 6, dp_size=2), ranks_of(2, 2, 4)):
        assert not mine.has_transfers and not mine.has_relays


def test_a_rollout_on_a_node_without_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"rollout 1 .* node 7, where no rank runs"):
        TransferPlan.for_rank(plan_of([0, 7], dp_size=1), ranks_of(1, 1, 1), 0)


def test_a_plan_for_a_thousand_ranks_takes_less_than_a_second() -> None:
    plan = plan_of([i % 128 for i in range(2048)], dp_size=128)
    receivers = ranks_of(128, 8, 8)
    seconds = processor_seconds(lambda: TransferPlan.for_rank(plan, receivers, 77), attempts=3)
    assert seconds < 0.5


Exchange = Callable[..., list[Any]]


@pytest.fixture
def run_exchange(monkeypatch: pytest.MonkeyPatch) -> Exchange:
    """Run an exchange with a thread for each rank, and return each rank's result or error."""

    def all_to_all_single(
        output: torch.Tensor,
        data: torch.Tensor,
        output_sizes: list[int] | None = None,
        sizes: list[int] | None = None,
        *,
        group: Group,
    ) -> None:
        mail, rank = group
        rows = mail.gather(rank, data.split(sizes or [1] * mail.size))
        parts = [row[rank] for row in rows]
        assert [len(part) for part in parts] == (output_sizes or [1] * mail.size)
        output.copy_(torch.cat(parts))

    monkeypatch.setattr(exchange.dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(exchange, "gather_bytes", gather_bytes)

    def run(
        plan: StepPlan, receivers: list[Receiver], read: Callable[[RolloutRef], Rollout]
    ) -> list[Any]:
        def work(group: Any) -> dict[int, Rollout]:
            return exchange_rollouts(plan, receivers, group[1], group, read)

        return run_on_ranks(len(receivers), work)

    return run


def read(ref: RolloutRef) -> Rollout:
    return rollout_of(int(ref.rollout_id[1:]))


def test_each_rank_gets_its_rollouts_with_its_layers(
    run_exchange: Exchange,
) -> None:
    plan = plan_of([i % 2 for i in range(9)], dp_size=2)
    receivers = ranks_of(2, 2, 2, rows=(2, 0))
    results = run_exchange(plan, receivers, read)
    for receiver, rollouts in zip(receivers, results, strict=True):
        assert sorted(rollouts) == rollout_indices(plan, receiver.dp_rank)
        for index, rollout in rollouts.items():
            assert_equal(rollout, codec.select_layers(rollout_of(index), (2, 0)))


def test_each_pipeline_stage_gets_its_own_layers_from_another_node(run_exchange: Exchange) -> None:
    """Two stages of one data-parallel rank, on two nodes that hold half of the rollouts each."""
    plan = plan_of([i % 2 for i in range(6)], dp_size=1)
    rows = [(0, 2), (1,)]
    receivers = [
        Receiver(dp_rank=0, node=node, moe_rows=moe_rows) for node, moe_rows in enumerate(rows)
    ]
    for moe_rows, rollouts in zip(rows, run_exchange(plan, receivers, read), strict=True):
        assert sorted(rollouts) == list(range(6))
        for index, rollout in rollouts.items():
            assert_equal(rollout, codec.select_layers(rollout_of(index), moe_rows))


def test_a_rollout_that_one_rank_cannot_keep_is_lost_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first rank of a node records rollouts that other ranks train on."""
    monkeypatch.setattr(exchange, "gather_bytes", gather_bytes)
    plan = plan_of([0, 0, 0, 0], dp_size=2)
    receivers = ranks_of(2, 1, 2)
    kept_ids: list[str] = []

    def keep(ref: RolloutRef) -> None:
        kept_ids.append(ref.rollout_id)
        if ref.rollout_id == "r3":
            raise RolloutGone("r3 is gone")

    def work(group: Any) -> dict[int, Rollout]:
        recorder = BatchRecorder(tmp_path, 0, receivers, group[1], group)
        refs = recorder.refs_to_record(plan)
        return exchange_rollouts(plan, receivers, group[1], group, read, keep=keep, kept_refs=refs)

    errors = run_on_ranks(2, work)
    assert kept_ids == ["r0", "r1", "r2", "r3"]
    assert [type(error) for error in errors] == [RolloutsLost, RolloutsLost]
    assert [error.rollout_ids for error in errors] == [("r3",), ("r3",)]


@pytest.mark.parametrize("node", [0, 1])
def test_a_rollout_that_one_rank_cannot_read_is_an_error_on_all(
    run_exchange: Exchange, node: int
) -> None:
    """Rollout 1 is trained on node 1 and stored there or on the other node."""

    def read_all_but_one(ref: RolloutRef) -> Rollout:
        if ref.rollout_id == "r1":
            raise OSError("no such file descriptor")
        return read(ref)

    plan = plan_of([0, node, 0, 1], dp_size=2)
    results = run_exchange(plan, ranks_of(2, 2, 2), read_all_but_one)
    assert {str(error) for error in results} == {str(results[0])}
    assert all(
        isinstance(error, Failure) and error.exit_code is ExitCode.ENGINE_FAILED
        for error in results
    )
    assert "step 5: rollouts cannot be trained on: rank" in str(results[0])
    assert "rollout r1: no such file descriptor" in str(results[0])
    # Both tensor-parallel ranks of node 1 read it there. Otherwise one rank of node 0 reads it
    assert str(results[0]).count("r1") == 1 + node


@pytest.mark.parametrize("node", [0, 1])
def test_rollouts_that_are_gone_with_their_collector_are_named_on_all_ranks(
    run_exchange: Exchange, node: int
) -> None:
    """Rank 0 lets them be sampled again."""

    def read_the_others(ref: RolloutRef) -> Rollout:
        if ref.rollout_id in ("r1", "r2"):
            raise RolloutGone("its collector has ended")
        return read(ref)

    plan = plan_of([0, node, 0, 1], dp_size=2)
    results = run_exchange(plan, ranks_of(2, 2, 2), read_the_others)
    assert all(type(error) is RolloutsLost for error in results)
    assert all(set(error.rollout_ids) == {"r1", "r2"} for error in results)
    assert "rollout r1: its collector has ended" in str(results[0])


def test_rollouts_that_are_gone_do_not_hide_another_error(run_exchange: Exchange) -> None:
    def read_some(ref: RolloutRef) -> Rollout:
        if ref.rollout_id == "r1":
            raise RolloutGone("its collector has ended")
        if ref.rollout_id == "r2":
            raise OSError("no memory")
        return read(ref)

    results = run_exchange(plan_of([0, 1, 0, 1], dp_size=2), ranks_of(2, 1, 1), read_some)
    assert all(type(error) is Failure for error in results)
    assert "r1" in str(results[0]) and "r2: no memory" in str(results[0])


def shorten(rollout: Rollout) -> Rollout:
    return Rollout(
        rollout.rollout_id, "p", 0, rollout.finish_reason, rollout.segments[:1], rollout.routes
    )


def drop_route_row(rollout: Rollout) -> Rollout:
    assert rollout.routes is not None
    return Rollout(
        rollout.rollout_id,
        "p",
        0,
        rollout.finish_reason,
        rollout.segments,
        np.array(rollout.routes[1:]),
    )


def drop_layer(rollout: Rollout) -> Rollout:
    assert rollout.routes is not None
    routes = np.array(rollout.routes[:, 1:])
    return Rollout(rollout.rollout_id, "p", 0, rollout.finish_reason, rollout.segments, routes)


def unlearn_response(rollout: Rollout) -> Rollout:
    prompt, response = rollout.segments
    segments = (prompt, dataclasses.replace(response, trainable=False))
    return Rollout(rollout.rollout_id, "p", 0, rollout.finish_reason, segments, rollout.routes)


@pytest.mark.parametrize("damage", [shorten, drop_route_row, drop_layer, unlearn_response])
@pytest.mark.parametrize("node", [0, 1])
def test_a_rollout_that_differs_from_the_plan_is_an_error_on_all_ranks(
    run_exchange: Exchange,
    damage: Callable[[Rollout], Rollout],
    node: int,
) -> None:
    plan = plan_of([0, node, 0, 1], dp_size=2)
    results = run_exchange(
        plan,
        ranks_of(2, 1, 1),
        lambda ref: damage(read(ref)) if ref.rollout_id == "r1" else read(ref),
    )
    assert all(isinstance(error, Failure) and ": rollout r1: " in str(error) for error in results)


def test_the_message_lists_few_problems_and_counts_the_others(run_exchange: Exchange) -> None:
    def fail(ref: RolloutRef) -> Rollout:
        raise OSError("gone")

    results = run_exchange(plan_of([0] * 12, dp_size=2), ranks_of(2, 1, 2), fail)
    assert str(results[0]).endswith("; and 8 more")


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_an_exchange_between_processes_on_two_simulated_nodes() -> None:
    assert "exchanged on 3 ranks" in torchrun(Path(__file__).parent / "exchange_ranks.py", ranks=3)
