"""Edge cases of audits: length of a text, tensor parallelism alone, no MoE runner."""

import pytest

from sglang_bridge.engine import Engine
from sglang_bridge.errors import AuditUnsupported
from sglang_bridge.weights.audit import Mismatch, audit_engine, require_auditable
from tests.sglang_bridge.weights.test_audit import FakeAdmin, correct_weights, expectation_of


@pytest.mark.parametrize(
    ("count", "end"), [(2, "e-1"), (16, "e-15"), (17, "e-15 and 1 more"), (18, "e-15 and 2 more")]
)
def test_up_to_sixteen_fused_tensors_are_named(count: int, end: str) -> None:
    assert str(Mismatch("w13_weight", tuple(f"e-{i}" for i in range(count)), "x")).endswith(
        f", {end}"
    )


@pytest.mark.parametrize("shape", [{"tp": 2}, {"tp": 3}, {"tp": 2, "ep": 2}])
def test_sharded_engine_is_not_compared_by_value(shape: dict[str, int]) -> None:
    with pytest.raises(AuditUnsupported, match=f"tp={shape['tp']} "):
        require_auditable(Engine(url="http://127.0.0.1:1", **shape), {"device": "cpu"}, "cpu")


def test_missing_moe_runner_counts_as_the_plain_one() -> None:
    weights, parameters = correct_weights()
    report = audit_engine(
        FakeAdmin(parameters, info={"device": "cuda"}), expectation_of(weights, "cuda")
    )
    assert (report.num_compared, report.mismatches) == (2, ())
