"""Compares what an engine holds with what was sent to it: names always, values where SGLang's
checksums allow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import AuditUnsupported, WeightMismatch
from sglang_bridge.weights.expectation import WeightExpectation

_PLAIN_RUNNERS = (
    "auto",
    "triton",
)  # "auto" is what SGLang reports where it has not chosen another one
_SHOWN_TENSORS = 16  # of one parameter, in a text; the experts of a layer are hundreds of them


@dataclass(frozen=True)
class Mismatch:
    """An engine parameter that differs.

    tensors: the Hugging Face names fused in it; empty if none was sent for it.
    """

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
    """Ask the engine for its checksums and compare them with what `expectation` saw pass in a
    complete push.

    SGLang skips names it does not know without a word, so names are compared on every rank, and
    values where they can be. Raises `AuditUnsupported` when the names agree and the values cannot
    be compared, `RequestFailed`, and `ValueError` where what was sent is no complete parameter.
    """
    sent, ranks = expectation.checksums(), admin.checksums()
    names = {name for held in ranks for name in held}
    missing = {name for name in sent if not all(name in held for held in ranks)}
    different = dict.fromkeys(missing, "the engine has no such parameter")
    different |= dict.fromkeys(names - sent.keys(), "nothing was sent for it")
    if not different:
        require_auditable(admin.engine, admin.server_info(), expectation.device)
        (held,) = ranks
        different = {
            name: f"sent {sent[name]}, held {held[name]}"
            for name in sent
            if sent[name] != held[name]
        }
    mismatches = (
        Mismatch(name, expectation.tensors_of(name) if name in sent else (), different[name])
        for name in sorted(different)
    )
    return AuditReport(admin.url, len(sent.keys() | names), tuple(mismatches))


def require_auditable(engine: Engine, info: Mapping[str, Any], device: str) -> None:
    """Raise `AuditUnsupported` for an engine whose checksums cannot be predicted.

    info: its `/server_info`. device: the kind of checksum that is predicted.
    """
    obstacles = []
    if engine.tp > 1 or engine.ep > 1:
        obstacles.append(f"tp={engine.tp} ep={engine.ep} (each rank holds a shard)")
    if engine.quantization is not None:
        obstacles.append(f"quantization={engine.quantization} (SGLang hashes dequantized values)")
    if (found := info.get("device")) != device:
        obstacles.append(f"device={found} (SGLang hashes otherwise there than on {device})")
    elif (
        device != "cpu" and (runner := info.get("moe_runner_backend", "auto")) not in _PLAIN_RUNNERS
    ):
        obstacles.append(
            f"moe_runner_backend={runner} (it may keep experts in a layout of its own)"
        )
    if obstacles:
        raise AuditUnsupported(
            f"{engine.url} holds every parameter that was sent, by name; their values cannot be compared: "
            f"{', '.join(obstacles)}"
        )
