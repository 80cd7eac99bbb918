"""Turns of engines, and engines that do not answer."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from sglang_bridge.weights.buckets import iterate_buckets
from sglang_bridge.weights.calls import TOO_LATE
from sglang_bridge.weights.courier import Courier, Lane
from sglang_bridge.weights.fused_layout import update_unit

CPU = torch.device("cpu")


class ScriptedDelivery:
    """A bucket on its way for `send` seconds, and then loaded after `load` seconds."""

    def __init__(self, send: float, load: float, failure: str | None) -> None:
        self._start = time.monotonic()
        self._send = send
        self._load = load
        self.failure = failure

    @property
    def is_sent(self) -> bool:
        return self.failure is not None or time.monotonic() > self._start + self._send

    @property
    def is_loaded(self) -> bool:
        return self.failure is not None or time.monotonic() > self._start + self._send + self._load


class ScriptedGroup:
    """An engine that takes as long as it is told, and notes what it gets."""

    def __init__(self, send: float = 0.0, load: float = 0.0, failure: str | None = None) -> None:
        self.names: list[str] = []
        self.values: list[float] = []
        self._times = (send, load)
        self._failure = failure

    def deliver(self, bucket: Any) -> Any:
        self.names += bucket.names
        self.values += bucket.flat.view(torch.float32).tolist()
        return ScriptedDelivery(*self._times, self._failure)


def carry(
    *groups: ScriptedGroup,
    count: int = 6,
    seconds: float = 5.0,
    lines: list[str] | None = None,
    **options: float,
) -> tuple[Courier, list[Lane]]:
    """Send buckets of one number each to all groups."""
    lanes = []
    for index, group in enumerate(groups):
        fake_group: Any = group
        lanes.append(Lane([f"http://{index}"], fake_group))
    log = (lines if lines is not None else []).append
    courier = Courier(lanes, time.monotonic() + seconds, CPU, log, **options)
    stream = ((f"w{i}", torch.tensor([float(i)])) for i in range(count))
    for bucket in iterate_buckets(stream, bucket_bytes=4, device=CPU, slots=2):
        courier.put(bucket)
    courier.finish()
    return courier, lanes


def test_every_engine_gets_every_bucket_once_and_in_order() -> None:
    groups = [ScriptedGroup(0.01), ScriptedGroup(0.0, 0.02), ScriptedGroup()]
    courier, lanes = carry(*groups)
    assert courier.failures == {}
    for group in groups:
        assert group.values == [0, 1, 2, 3, 4, 5]
    assert [lane.num_bytes for lane in lanes] == [24, 24, 24]


def test_an_engine_that_fails_gets_nothing_more_and_the_others_everything() -> None:
    failing = ScriptedGroup(failure="no session is open")
    good = ScriptedGroup()
    courier, _ = carry(failing, good)
    reason = "no session is open (it should take w0, 0.0 MB)"
    assert courier.failures == {"http://0": reason}
    assert failing.names == ["w0"] and good.values == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("frozen_group", [ScriptedGroup(send=60), ScriptedGroup(load=60)])
def test_an_engine_that_does_not_answer_costs_half_of_the_time_once(
    frozen_group: ScriptedGroup,
) -> None:
    """Small buckets vanish in the buffers of a connection: only the reply does not come."""
    groups = [frozen_group, ScriptedGroup(), ScriptedGroup(load=60)]
    start = time.monotonic()
    courier, _ = carry(*groups, seconds=8.0)
    assert set(courier.failures) == {"http://0", "http://2"}
    assert all(reason.startswith(TOO_LATE) for reason in courier.failures.values())
    assert groups[1].values == [0, 1, 2, 3, 4, 5]
    assert 3.6 < time.monotonic() - start < 7.5


def test_loading_overlaps_with_the_turns_of_others() -> None:
    """Two engines that load for 0.4 s each take 0.4 s a bucket together."""
    groups = [ScriptedGroup(load=0.4), ScriptedGroup(load=0.4)]
    start = time.monotonic()
    courier, _ = carry(*groups)
    assert courier.failures == {}
    assert 2.2 < time.monotonic() - start < 4.0  # of 4.8 one after another
    assert courier.seconds["load"] > 1.6 > courier.seconds["send"]


def test_a_long_wait_says_what_it_waits_for() -> None:
    lines: list[str] = []
    carry(ScriptedGroup(send=1.5), ScriptedGroup(), count=1, lines=lines, notice_seconds=0.1)
    assert "http://0 to take w0, 0.0 MB" in lines[0]


def test_a_bucket_that_an_engine_has_no_memory_for_names_the_setting() -> None:
    reason = "Failed to receive weights: CUDA out of memory"
    courier, _ = carry(ScriptedGroup(failure=reason))
    assert courier.failures["http://0"].endswith("0.0 MB). Lower sync.bucket_mb")


def test_an_unexpected_error_does_not_block_the_stream() -> None:
    class Broken(ScriptedGroup):
        def deliver(self, bucket: Any) -> Any:
            raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="a fault of ours"):
        carry(Broken())
    assert threading.active_count() < 50


@pytest.mark.parametrize(
    ("names", "is_together"),
    [
        (("a.self_attn.q_proj.weight", "a.self_attn.v_proj.weight"), True),
        (("a.self_attn.q_proj.weight", "a.self_attn.o_proj.weight"), False),
        (("a.self_attn.q_a_proj.weight", "a.self_attn.kv_a_proj_with_mqa.weight"), True),
        (("a.self_attn.q_a_proj.weight", "a.self_attn.q_b_proj.weight"), False),
        (("a.mlp.gate_proj.weight", "a.mlp.up_proj.weight_scale_inv"), True),
        (("a.mlp.shared_experts.gate_proj.weight", "a.mlp.shared_experts.up_proj.weight"), True),
        (("a.mlp.experts.3.gate_proj.weight", "a.mlp.experts.3.up_proj.weight"), True),
        (("a.mlp.experts.3.gate_proj.weight", "a.mlp.experts.4.up_proj.weight"), False),
        (("a.mlp.experts.3.up_proj.weight", "a.mlp.experts.3.down_proj.weight"), False),
        (
            ("a.block_sparse_moe.experts.3.w1.weight", "a.block_sparse_moe.experts.3.w3.weight"),
            True,
        ),
        (
            ("a.block_sparse_moe.experts.3.w1.weight", "a.block_sparse_moe.experts.3.w2.weight"),
            False,
        ),
        (("a.self_attn.o_proj.weight", "a.self_attn.o_proj.weight_scale_inv"), True),
        (("a.mlp.gate.weight", "a.mlp.gate_proj.weight"), False),
    ],
)
def test_tensors_that_travel_together(names: tuple[str, str], is_together: bool) -> None:
    first, second = names
    assert (update_unit(first) == update_unit(second)) == is_together
