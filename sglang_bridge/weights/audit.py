"""Compares by value what an engine holds with what was sent to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import AuditUnsupported, WeightMismatch
from sglang_bridge.handle import EngineHandle
from sglang_bridge.weights.expectation import WeightExpectation


@dataclass(frozen=True)
class Mismatch:
    """An engine parameter that differs. tensors: the Hugging Face names fused in it, one of which at least differs."""

    parameter: str
    tensors: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class AuditReport:
    """One engine's audit. held: the checksum of each of its parameters."""

    url: str
    held: Mapping[str, str]
    compared: int
    mismatches: tuple[Mismatch, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every Hugging Face name that may differ."""
        return tuple(name for mismatch in self.mismatches for name in mismatch.tensors)

    def raise_on_mismatch(self, version: int) -> None:
        """Raise `WeightMismatch` unless everything agrees."""
        if self.mismatches:
            raise WeightMismatch(self.url, version, self.tensors)


def audit_engine(handle: EngineHandle, admin: AdminClient, expectation: WeightExpectation) -> AuditReport:
    """Ask the engine for its checksums and compare. Raises `AuditUnsupported`, `RequestFailed`, `ValueError`."""
    require_auditable(handle, str(admin.server_info().get("device")))
    expected = expectation.checksums()
    (rank,) = admin.checksums()
    held = rank.checksums
    mismatches = []
    for name in sorted(expected.keys() | held.keys()):
        if name not in held:
            mismatches.append(Mismatch(name, expectation.tensors_of(name), "the engine has no such parameter"))
        elif name not in expected:
            mismatches.append(Mismatch(name, (name,), "nothing was sent for it"))
        elif expected[name] != held[name]:
            reason = f"sent {expected[name]}, held {held[name]}"
            mismatches.append(Mismatch(name, expectation.tensors_of(name), reason))
    return AuditReport(admin.url, held, len(expected.keys() | held.keys()), tuple(mismatches))


def require_auditable(handle: EngineHandle, device: str) -> None:
    """Raise `AuditUnsupported` for an engine whose checksums cannot be predicted."""
    obstacles = []
    if handle.tp > 1 or handle.ep > 1:
        obstacles.append(f"tp={handle.tp} ep={handle.ep} (each rank holds a shard)")
    if handle.quantization is not None:
        obstacles.append(f"quantization={handle.quantization} (SGLang hashes dequantized values)")
    if device != "cpu":
        obstacles.append(f"device={device} (SGLang hashes with a GPU kernel of its own)")
    if obstacles:
        raise AuditUnsupported(
            f"{handle.url} cannot be audited by value: {', '.join(obstacles)}; set sync.audit_every=0 or audit an "
            "unquantized CPU engine of the same run"
        )
