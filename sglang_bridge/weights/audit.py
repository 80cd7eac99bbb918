"""Compares by value what an engine holds with what was sent to it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import AuditUnsupported, WeightMismatch
from sglang_bridge.weights.expectation import WeightExpectation

_SHOWN_TENSORS = 16  # of one parameter, in a text; the experts of a layer are hundreds of them


@dataclass(frozen=True)
class Mismatch:
    """An engine parameter that differs. tensors: the Hugging Face names fused in it; empty if none was sent for it."""

    parameter: str
    tensors: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        if self.tensors in ((), (self.parameter,)):
            return f"{self.parameter} ({self.reason})"
        more = len(self.tensors) - _SHOWN_TENSORS
        names = ", ".join(self.tensors[:_SHOWN_TENSORS]) + (f" and {more} more" if more > 0 else "")
        return f"{self.parameter} ({self.reason}), which fuses {names}"


@dataclass(frozen=True)
class AuditReport:
    """One engine's audit. compared: how many parameters were, on either side."""

    url: str
    compared: int
    mismatches: tuple[Mismatch, ...]

    def raise_on_mismatch(self, version: int) -> None:
        """Raise `WeightMismatch` unless everything agrees."""
        if self.mismatches:
            raise WeightMismatch(self.url, version, [str(mismatch) for mismatch in self.mismatches])


def audit_engine(admin: AdminClient, expectation: WeightExpectation) -> AuditReport:
    """Ask the engine for its checksums and compare them with what `expectation` saw pass in a complete push.

    Raises `AuditUnsupported`, `RequestFailed`, and `ValueError` where what was sent is no complete parameter.
    """
    require_auditable(admin.engine, str(admin.server_info().get("device")))
    sent = expectation.checksums()
    (held,) = admin.checksums()
    mismatches = []
    for name in sorted(sent.keys() | held.keys()):
        if name not in held:
            mismatches.append(Mismatch(name, expectation.tensors_of(name), "the engine has no such parameter"))
        elif name not in sent:
            mismatches.append(Mismatch(name, (), "nothing was sent for it"))
        elif sent[name] != held[name]:
            reason = f"sent {sent[name]}, held {held[name]}"
            mismatches.append(Mismatch(name, expectation.tensors_of(name), reason))
    return AuditReport(admin.url, len(sent.keys() | held.keys()), tuple(mismatches))


def require_auditable(engine: Engine, device: str) -> None:
    """Raise `AuditUnsupported` for an engine whose checksums cannot be predicted. device: as it reports itself."""
    obstacles = []
    if engine.tp > 1 or engine.ep > 1:
        obstacles.append(f"tp={engine.tp} ep={engine.ep} (each rank holds a shard)")
    if engine.quantization is not None:
        obstacles.append(f"quantization={engine.quantization} (SGLang hashes dequantized values)")
    if device != "cpu":
        obstacles.append(f"device={device} (SGLang hashes with a GPU kernel of its own)")
    if obstacles:
        raise AuditUnsupported(
            f"{engine.url} cannot be audited by value: {', '.join(obstacles)}; set sync.audit_every=0 or audit an "
            "unquantized CPU engine of the same run"
        )
