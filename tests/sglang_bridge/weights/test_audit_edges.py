"""Edge cases of audits: length of a text, tensor parallelism alone, no MoE runner."""

import pytest
import torch

from sglang_bridge.engine import Engine
from sglang_bridge.errors import AuditUnsupported, RequestFailed
from sglang_bridge.weights.audit import Mismatch, audit_engine, require_auditable
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.fused_layout import RankPlace
from tests.sglang_bridge.weights.test_audit import (
    FUSED,
    QKV,
    FakeAdmin,
    correct_weights,
    expectation_of,
)


@pytest.mark.parametrize(
    ("count", "end"), [(2, "e-1"), (16, "e-15"), (17, "e-15 and 1 more"), (18, "e-15 and 2 more")]
)
def test_up_to_sixteen_fused_tensors_are_named(count: int, end: str) -> None:
    assert str(Mismatch("w13_weight", tuple(f"e-{i}" for i in range(count)), "x")).endswith(
        f", {end}"
    )


@pytest.mark.parametrize("ep", [1, 2])
def test_shards_of_fp8_weights_are_compared_by_value(ep: int) -> None:
    engine = Engine(url="http://127.0.0.1:1", tp=2, ep=ep, quantization="fp8")
    require_auditable(engine, {"device": "cpu"}, "cpu")


@pytest.mark.parametrize("size", ["attn_dp_size", "attn_cp_size", "moe_dp_size"])
def test_other_divisions_of_the_ranks_are_not_compared_by_value(size: str) -> None:
    engine = Engine(url="http://127.0.0.1:1", tp=2)
    require_auditable(engine, {"device": "cpu", size: 1}, "cpu")
    with pytest.raises(AuditUnsupported, match=f"{size}=2"):
        require_auditable(engine, {"device": "cpu", size: 2}, "cpu")


def test_a_rank_with_another_shard_is_named() -> None:
    """The engine swapped the shards of its ranks."""
    weights = {QKV[index]: torch.arange(8.0).view(4, 2) + index for index in range(3)}
    places = [RankPlace(rank, 2) for rank in range(2)]
    expectation = WeightExpectation(
        dtype=torch.float32, num_experts=1, places=places, num_key_value_heads=2
    )
    for name, tensor in weights.items():
        expectation.add(name, tensor)
    halves = [
        {FUSED: torch.cat([weights[name][2 * rank : 2 * rank + 2] for name in QKV])}
        for rank in range(2)
    ]
    assert audit_engine(FakeAdmin(*halves, tp=2), expectation).mismatches == ()
    (mismatch,) = audit_engine(FakeAdmin(*reversed(halves), tp=2), expectation).mismatches
    assert mismatch.tensors == QKV and "held by rank 0" in mismatch.reason
    halves[1][FUSED][0, 0] += 1
    (mismatch,) = audit_engine(FakeAdmin(*halves, tp=2), expectation).mismatches
    assert "held by rank 1" in mismatch.reason
    with pytest.raises(RequestFailed, match=r"checksums of 1 rank\(s\), and it has tp=2"):
        audit_engine(FakeAdmin(halves[0], tp=2), expectation)


def test_tensors_of_an_unknown_split_are_compared_by_name() -> None:
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    places = [RankPlace(rank, 2) for rank in range(2)]
    expectation = WeightExpectation(dtype=torch.float32, num_experts=1, places=places)
    expectation.add(name, torch.ones(2, 2))
    ranks = [{name: torch.ones(1, 2)}] * 2
    with pytest.raises(AuditUnsupported, match=r"how tp=2 ranks share .*kv_b_proj"):
        audit_engine(FakeAdmin(*ranks, tp=2), expectation)


def test_missing_moe_runner_counts_as_the_plain_one() -> None:
    weights, parameters = correct_weights()
    report = audit_engine(
        FakeAdmin(parameters, info={"device": "cuda"}), expectation_of(weights, "cuda")
    )
    assert (report.num_compared, report.mismatches) == (2, ())
