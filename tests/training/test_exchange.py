"""Who hands which rollout to whom, as arithmetic and with all ranks as threads of this process."""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.testbed.rollout_refs import make_ref
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import RolloutLocation, RolloutRef
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.step_plan import Denominators, OptimizerStep, StepPlan
from megatron_rl.rollouts import codec
from megatron_rl.training.exchange import rollout_exchange as exchange
from megatron_rl.training.exchange.rollout_exchange import ExchangeFailed, exchange_rollouts
from megatron_rl.training.exchange.transfer_plan import Receiver, TransferPlan, rollout_indices
from tests.support.rollouts import assert_equal, make_rollout
from tests.support.torchrun import torchrun

LAYERS = 3


def on(node: int) -> RolloutLocation:
    return RolloutLocation(node=node, pid=1, fd=1, offset=0, nbytes=0)


shape_of = functools.cache(make_rollout)


def made(index: int) -> Rollout:
    rollout = shape_of(2 + index % 5, 3 + index % 3, layers=LAYERS)
    return Rollout(f"r{index}", "p", 0, rollout.finish_reason, rollout.segments, rollout.routes)


def plan_of(nodes: list[int], dp_size: int, *, optimizer_steps: int = 2) -> StepPlan:
    """Rollout i lies on nodes[i] and is trained by data-parallel rank i mod dp_size."""
    refs = tuple(make_ref(made(index), on(node)) for index, node in enumerate(nodes))
    half = [range(s, len(nodes), optimizer_steps) for s in range(optimizer_steps)]
    steps = tuple(
        OptimizerStep(
            micro_batches=tuple(
                (tuple(i for i in some if i % dp_size == dp), ()) for dp in range(dp_size)
            ),
            denominators=Denominators(sequences=1, tokens=1),
        )
        for some in half
    )
    return StepPlan(step=5, rollouts=refs, advantages=(1.0,) * len(nodes), optimizer_steps=steps)


def ranks_of(
    dp_size: int, tp: int, ranks_per_node: int, rows: tuple[int, ...] = (0, 1, 2)
) -> list[Receiver]:
    """Tensor-parallel ranks are neighbours, as in Megatron."""
    return [
        Receiver(dp_rank=rank // tp, node=rank // ranks_per_node, moe_rows=rows)
        for rank in range(dp_size * tp)
    ]


def parcels(plan: StepPlan, receivers: list[Receiver]) -> list[TransferPlan]:
    return [TransferPlan.for_rank(plan, receivers, rank) for rank in range(len(receivers))]


@pytest.mark.parametrize(
    ("dp_size", "tp", "ranks_per_node", "nodes"),
    [(4, 1, 2, 2), (4, 2, 4, 2), (3, 2, 2, 3), (2, 4, 4, 2)],
)
def test_every_rank_gets_each_of_its_rollouts_once(
    dp_size: int, tp: int, ranks_per_node: int, nodes: int
) -> None:
    plan = plan_of([i // 3 % nodes for i in range(23)], dp_size)
    receivers = ranks_of(dp_size, tp, ranks_per_node)
    everyone = parcels(plan, receivers)
    for rank, mine in enumerate(everyone):
        got = Counter(
            [*mine.own, *(i for indices in (*mine.incoming, *mine.handed_over) for i in indices)]
        )
        assert got == Counter(rollout_indices(plan, receivers[rank].dp_rank))
        assert all(plan.rollouts[i].location.node == receivers[rank].node for i in mine.own)
        for other, theirs in enumerate(everyone):
            assert mine.outgoing[other] == theirs.incoming[rank]
            assert mine.handed_on[other] == theirs.handed_over[rank]
            assert all(
                plan.rollouts[i].location.node == receivers[rank].node for i in mine.outgoing[other]
            )
            assert not mine.handed_on[other] or receivers[other] == receivers[rank]
            assert set(mine.handed_on[other]) <= {i for indices in mine.incoming for i in indices}
    assert len({(p.crosses, p.hands_on) for p in everyone}) == 1
    assert everyone[0].crosses and everyone[0].hands_on == (tp > 1)


def test_tensor_parallel_ranks_of_a_node_get_one_copy_over_the_network() -> None:
    plan = plan_of([0] * 24, dp_size=4)
    receivers = ranks_of(4, 2, 4)
    crossing = Counter(
        i for mine in parcels(plan, receivers) for indices in mine.outgoing for i in indices
    )
    assert crossing == Counter(
        i for dp in (2, 3) for i in rollout_indices(plan, dp)
    )  # those of node 1, once


def test_pipeline_stages_of_a_node_need_different_layers_and_hand_nothing_on() -> None:
    plan = plan_of([0] * 4, dp_size=1)
    receivers = [
        Receiver(dp_rank=0, node=1, moe_rows=(0,)),
        Receiver(dp_rank=0, node=1, moe_rows=(1,)),
    ]
    everyone = parcels(plan, [Receiver(dp_rank=0, node=0, moe_rows=(0,)), *receivers])
    assert everyone[0].outgoing == [[], [0, 1, 2, 3], [0, 1, 2, 3]] and not everyone[0].hands_on


def test_the_ranks_of_a_node_take_turns_at_sending() -> None:
    plan = plan_of([0] * 40, dp_size=4)
    counts = [sum(map(len, mine.outgoing)) for mine in parcels(plan, ranks_of(4, 1, 2))]
    assert counts == [10, 10, 0, 0]


def test_what_lies_on_this_node_crosses_nothing() -> None:
    for mine in parcels(plan_of([0] * 6, dp_size=2), ranks_of(2, 2, 4)):
        assert not mine.crosses and not mine.hands_on


def test_a_rollout_on_a_node_without_ranks_is_named() -> None:
    with pytest.raises(ValueError, match="rollout 1 lies on node 7, where no rank runs"):
        TransferPlan.for_rank(plan_of([0, 7], dp_size=1), ranks_of(1, 1, 1), 0)


def test_a_thousand_ranks_take_no_second() -> None:
    plan = plan_of([i % 128 for i in range(2048)], dp_size=128)
    receivers = ranks_of(128, 8, 8)
    start = time.process_time()
    TransferPlan.for_rank(plan, receivers, 77)
    assert time.process_time() - start < 0.3, (
        "0.87 s when each rollout's sender was looked for among all ranks"
    )


@dataclass
class Mail:
    """What all ranks of a pretended job put in and take out together; stands for a process group."""

    size: int
    shared: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shared = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=10)

    def everyones(self, rank: int, mine: Any) -> list[Any]:
        self.barrier.wait()
        self.shared[rank] = mine
        self.barrier.wait()
        return list(self.shared)


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], int]]:
    """Exchanges on as many threads as there are ranks: what each got or raised, and the bytes that
    were swapped.
    """
    swapped = 0

    def all_to_all(outgoing: list[bytes], group: tuple[Mail, int]) -> list[memoryview]:
        nonlocal swapped
        mail, rank = group
        swapped += sum(map(len, outgoing))
        return [memoryview(row[rank]) for row in mail.everyones(rank, outgoing)]

    monkeypatch.setattr(exchange, "_all_to_all", all_to_all)
    monkeypatch.setattr(
        exchange, "gather_bytes", lambda data, group: group[0].everyones(group[1], data)
    )

    def run(
        plan: StepPlan, receivers: list[Receiver], read: Callable[[RolloutRef], Rollout]
    ) -> tuple[list[Any], int]:
        mail, results = Mail(len(receivers)), [None] * len(receivers)

        def work(rank: int) -> None:
            try:
                results[rank] = exchange_rollouts(plan, receivers, rank, (mail, rank), read)  # type: ignore[arg-type, call-overload]
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(receivers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results, swapped

    return run


def read(ref: RolloutRef) -> Rollout:
    return made(int(ref.rollout_id[1:]))


def test_each_rank_holds_its_rollouts_with_its_layers(
    exchanged: Callable[..., tuple[list[Any], int]],
) -> None:
    plan = plan_of([i % 2 for i in range(9)], dp_size=2)
    receivers = ranks_of(2, 2, 2, rows=(2, 0))
    results, _ = exchanged(plan, receivers, read)
    for receiver, rollouts in zip(receivers, results, strict=True):
        assert sorted(rollouts) == rollout_indices(plan, receiver.dp_rank)
        for index, rollout in rollouts.items():
            assert_equal(rollout, codec.select_layers(made(index), (2, 0)))


@pytest.mark.parametrize("where", [0, 1])
def test_what_one_rank_cannot_read_every_rank_is_told(
    exchanged: Callable[..., tuple[list[Any], int]], where: int
) -> None:
    """Rollout 1 is trained on node 1; it lies there, or on the other node."""

    def broken(ref: RolloutRef) -> Rollout:
        if ref.rollout_id == "r1":
            raise OSError("no such file descriptor")
        return read(ref)

    plan = plan_of([0, where, 0, 1], dp_size=2)
    results, _ = exchanged(plan, ranks_of(2, 2, 2), broken)
    assert {str(error) for error in results} == {str(results[0])}
    assert all(
        isinstance(error, ExchangeFailed) and error.exit_code is ExitCode.ENGINE_FAILED
        for error in results
    )
    assert "step 5: rollouts cannot be trained on: rank" in str(results[0])
    assert "rollout r1: no such file descriptor" in str(results[0])


def shortened(rollout: Rollout) -> Rollout:
    return Rollout(
        rollout.rollout_id, "p", 0, rollout.finish_reason, rollout.segments[:1], rollout.routes
    )


def without_a_row(rollout: Rollout) -> Rollout:
    assert rollout.routes is not None
    return Rollout(
        rollout.rollout_id,
        "p",
        0,
        rollout.finish_reason,
        rollout.segments,
        np.array(rollout.routes[1:]),
    )


@pytest.mark.parametrize("damage", [shortened, without_a_row])
@pytest.mark.parametrize("where", [0, 1])
def test_a_rollout_that_is_not_what_was_planned_with_every_rank_is_told(
    exchanged: Callable[..., tuple[list[Any], int]],
    damage: Callable[[Rollout], Rollout],
    where: int,
) -> None:
    plan = plan_of([0, where, 0, 1], dp_size=2)
    results, _ = exchanged(
        plan,
        ranks_of(2, 1, 1),
        lambda ref: damage(read(ref)) if ref.rollout_id == "r1" else read(ref),
    )
    assert all(
        isinstance(error, ExchangeFailed) and "rank 1: rollout r1: " in str(error)
        for error in results
    )


def test_many_problems_are_counted(exchanged: Callable[..., tuple[list[Any], int]]) -> None:
    def gone(ref: RolloutRef) -> Rollout:
        raise OSError("gone")

    results, _ = exchanged(plan_of([0] * 12, dp_size=2), ranks_of(2, 1, 2), gone)
    assert str(results[0]).endswith("; and 8 more")


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_real_ranks_on_two_pretended_nodes() -> None:
    assert "exchanged on 3 ranks" in torchrun(Path(__file__).parent / "exchange_ranks.py", ranks=3)
