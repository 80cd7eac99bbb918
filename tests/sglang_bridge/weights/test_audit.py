"""Audits by value, with a fake engine."""

from typing import Any, Literal

import pytest
import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import AuditUnsupported, EngineError, WeightMismatch
from sglang_bridge.keys import create_keys
from sglang_bridge.weights.audit import Mismatch, audit_engine
from sglang_bridge.weights.digests import CpuDigest, Digest, GpuDigest
from sglang_bridge.weights.expectation import WeightExpectation

QKV = tuple(f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv")
FUSED = "model.layers.0.self_attn.qkv_proj.weight"
NORM = "model.norm.weight"


class FakeAdmin(AdminClient):
    """An engine that holds these tensors on its ranks, by the engine's parameter names."""

    def __init__(
        self, *ranks: dict[str, torch.Tensor], info: dict[str, Any] | None = None, **shape: Any
    ) -> None:
        super().__init__(Engine(url="http://127.0.0.1:1", **shape), create_keys())
        self._ranks = ranks
        self._info = info or {"device": "cpu"}

    def server_info(self) -> dict[str, Any]:
        return self._info

    def checksums(self, *, timeout: float = 300.0) -> list[dict[str, str]]:
        digest = GpuDigest if self._info["device"] == "cuda" else CpuDigest
        return [
            {name: checksum(digest(), tensor) for name, tensor in parameters.items()}
            for parameters in self._ranks
        ]


def checksum(digest: Digest, tensor: torch.Tensor) -> str:
    digest.update(tensor.view(-1).view(torch.uint8))
    return digest.hexdigest()


def correct_weights() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights to send, and the parameters of an engine that received them."""
    weights = {name: torch.full((2, 2), float(index)) for index, name in enumerate(QKV)} | {
        NORM: torch.ones(2)
    }
    return weights, {FUSED: torch.cat([weights[name] for name in QKV]), NORM: torch.ones(2)}


def expectation_of(
    weights: dict[str, torch.Tensor], device: Literal["cpu", "cuda"] = "cpu"
) -> WeightExpectation:
    expectation = WeightExpectation(dtype=torch.float32, num_experts=1, device=device)
    for name, tensor in weights.items():
        expectation.add(name, tensor)
    return expectation


def test_engine_with_the_sent_weights_passes() -> None:
    weights, parameters = correct_weights()
    report = audit_engine(FakeAdmin(parameters), expectation_of(weights))
    assert (report.url, report.num_compared, report.mismatches) == ("http://127.0.0.1:1", 2, ())
    report.raise_on_mismatch(3)


def test_one_flipped_bit_is_reported_with_the_fused_tensors() -> None:
    weights, parameters = correct_weights()
    parameters[FUSED].view(torch.int32)[5, 1] ^= 1
    report = audit_engine(FakeAdmin(parameters), expectation_of(weights))
    (mismatch,) = report.mismatches
    assert (mismatch.parameter, mismatch.tensors) == (FUSED, QKV)
    assert mismatch.reason.startswith("sent ")
    with pytest.raises(
        WeightMismatch, match=r"version 3: 1 parameter\(s\) differ: .*qkv_proj.*k_proj"
    ) as error_info:
        report.raise_on_mismatch(3)
    assert (error_info.value.exit_code, EngineError.exit_code) == (6, 4)


def test_parameter_without_a_sent_tensor_is_reported() -> None:
    weights, parameters = correct_weights()
    report = audit_engine(
        FakeAdmin({**parameters, "model.extra": torch.ones(1)}), expectation_of(weights)
    )
    assert report.mismatches == (Mismatch("model.extra", (), "nothing was sent for it"),)
    assert report.num_compared == 3


def test_sent_tensor_that_the_engine_lacks_is_reported() -> None:
    weights, parameters = correct_weights()
    del parameters[FUSED]
    report = audit_engine(FakeAdmin(parameters), expectation_of(weights))
    assert report.mismatches == (Mismatch(FUSED, QKV, "the engine has no such parameter"),)
    assert report.num_compared == 2


def test_incomplete_fused_parameter_raises() -> None:
    weights, parameters = correct_weights()
    del weights[QKV[1]]
    with pytest.raises(ValueError, match=r"qkv_proj\.weight has 2 of 3 tensors"):
        audit_engine(FakeAdmin(parameters), expectation_of(weights))


GPU = {"device": "cuda", "moe_runner_backend": "triton"}


def test_engine_on_a_gpu_is_compared_by_value() -> None:
    weights, parameters = correct_weights()
    report = audit_engine(FakeAdmin(parameters, info=GPU), expectation_of(weights, "cuda"))
    assert (report.num_compared, report.mismatches) == (2, ())
    parameters[FUSED].view(torch.int32)[5, 1] ^= 1
    (mismatch,) = audit_engine(
        FakeAdmin(parameters, info=GPU), expectation_of(weights, "cuda")
    ).mismatches
    assert (mismatch.parameter, mismatch.tensors) == (FUSED, QKV)


@pytest.mark.parametrize(
    ("device", "info", "shape", "words"),
    [
        ("cpu", {"device": "cuda"}, {}, "device=cuda"),
        ("cuda", {"device": "cpu"}, {}, "device=cpu"),
        (
            "cuda",
            {"device": "cuda", "moe_runner_backend": "flashinfer_trtllm"},
            {},
            "flashinfer_trtllm",
        ),
        ("cpu", {"device": "cpu", "attn_dp_size": 2}, {}, "attn_dp_size=2"),
        ("cpu", {"device": "cpu"}, {"quantization": "awq"}, "quantization=awq"),
        ("cpu", {"device": "cpu"}, {"tp": 2, "quantization": "awq"}, "quantization=awq"),
    ],
)
def test_engines_whose_checksums_cannot_be_predicted_are_compared_by_name(
    device: Literal["cpu", "cuda"], info: dict[str, Any], shape: dict[str, Any], words: str
) -> None:
    weights, parameters = correct_weights()
    ranks = [parameters] * shape.get("tp", 1)
    with pytest.raises(
        AuditUnsupported, match=rf"every parameter that was sent, by name; .*{words}"
    ):
        audit_engine(FakeAdmin(*ranks, info=info, **shape), expectation_of(weights, device))
    odd = {**parameters, "model.extra": torch.ones(1)}
    report = audit_engine(
        FakeAdmin(*ranks[1:], odd, info=info, **shape), expectation_of(weights, device)
    )
    assert report.mismatches == (Mismatch("model.extra", (), "nothing was sent for it"),)
    del odd["model.extra"], odd[NORM]
    report = audit_engine(
        FakeAdmin(*ranks[1:], odd, info=info, **shape), expectation_of(weights, device)
    )
    assert report.mismatches == (Mismatch(NORM, (NORM,), "the engine has no such parameter"),)


def test_unknown_name_is_reported_as_a_mismatch() -> None:
    """SGLang's loader drops such tensors silently."""
    weights, parameters = correct_weights()
    report = audit_engine(
        FakeAdmin(parameters), expectation_of({**weights, "model.nrom.weight": torch.ones(2)})
    )
    with pytest.raises(
        WeightMismatch, match=r"model\.nrom\.weight \(the engine has no such parameter\)"
    ):
        report.raise_on_mismatch(0)


def test_text_of_many_differences_is_abridged() -> None:
    expert = Mismatch(
        "w13_weight", tuple(f"expert-{index}" for index in range(100)), "sent a, held b"
    )
    assert str(expert).endswith("expert-15 and 84 more")
    error = WeightMismatch("http://127.0.0.1:1", 3, ["x"] * 20)
    assert "20 parameter(s) differ: x; x; x; x; x; x; x; x; and 12 more. " in str(error)
    assert len(error.differences) == 20
