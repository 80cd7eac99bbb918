"""Compares an engine's weights with the weights that were sent to it.

Names are always compared, values where SGLang's checksums allow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import AuditUnsupported, WeightMismatch
from sglang_bridge.weights.expectation import WeightExpectation

# Runners that keep experts in the checkpoint's layout. SGLang reports "auto" if it has not chosen
# one.
_PLAIN_RUNNERS = ("auto", "triton")
# Names of one parameter's tensors in a text. The experts of a layer may be hundreds.
_MAX_NAMES = 16


@dataclass(frozen=True)
class Mismatch:
    """An engine parameter that differs from the weights that were sent.

    tensors: the Hugging Face names fused in it; empty if none was sent for it.
    """

    parameter: str
    tensors: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        if self.tensors in ((), (self.parameter,)):
            return f"{self.parameter} ({self.reason})"
        more = len(self.tensors) - _MAX_NAMES
        names = ", ".join(self.tensors[:_MAX_NAMES])
        if more > 0:
            names += f" and {more} more"
        return f"{self.parameter} ({self.reason}), which fuses {names}"


@dataclass(frozen=True)
class AuditReport:
    """Result of one engine's audit. num_compared: the parameters on either side."""

    url: str
    num_compared: int
    mismatches: tuple[Mismatch, ...]

    def raise_on_mismatch(self, version: int) -> None:
        """Raise `WeightMismatch` unless everything agrees."""
        if self.mismatches:
            raise WeightMismatch(self.url, version, [str(mismatch) for mismatch in self.mismatches])


def audit_engine(admin: AdminClient, expectation: WeightExpectation) -> AuditReport:
    """Compare the engine's checksums with those of a complete push, which `expectation` observed.

    SGLang silently skips names that it does not know. Names are therefore compared on every rank,
    and values where possible.

    Raises `AuditUnsupported` when the names agree and the values cannot be compared,
    `RequestFailed`, and `ValueError` when the weights that were sent lack a part of a parameter.
    """
    expectations = expectation.checksums()
    ranks = admin.checksums()
    names = {name for checksums in ranks for name in checksums}
    missing = {name for name in expectations if any(name not in rank for rank in ranks)}
    reasons = dict.fromkeys(missing, "the engine has no such parameter")
    reasons |= dict.fromkeys(names - expectations.keys(), "nothing was sent for it")
    if not reasons:
        require_auditable(admin.engine, admin.server_info(), expectation.device)
    if not reasons and expectation.compares_values:
        (checksums,) = ranks
        reasons = {
            name: f"sent {checksum}, held {checksums[name]}"
            for name, checksum in expectations.items()
            if checksum != checksums[name]
        }
    mismatches = []
    for name in sorted(reasons):
        tensors = expectation.tensors_of(name) if name in expectations else ()
        mismatches.append(Mismatch(name, tensors, reasons[name]))
    return AuditReport(admin.url, len(expectations.keys() | names), tuple(mismatches))


def value_obstacles(engine: Engine) -> list[str]:
    """Return the settings of an engine for which its checksums cannot be predicted."""
    obstacles = []
    if engine.tp > 1 or engine.ep > 1:
        obstacles.append(f"tp={engine.tp} ep={engine.ep} (each rank holds a shard)")
    if engine.quantization not in (None, "fp8"):
        obstacles.append(f"quantization={engine.quantization} (its checksums are not known)")
    return obstacles


def require_auditable(engine: Engine, info: Mapping[str, Any], device: str) -> None:
    """Raise `AuditUnsupported` for an engine whose checksums cannot be predicted.

    info: the engine's `/server_info`. device: the device whose checksums are predicted.
    """
    obstacles = value_obstacles(engine)
    engine_device = info.get("device")
    runner = info.get("moe_runner_backend", "auto")
    if engine_device != device:
        obstacles.append(
            f"device={engine_device} (SGLang computes other checksums there than on {device})"
        )
    elif device != "cpu" and runner not in _PLAIN_RUNNERS:
        obstacles.append(f"moe_runner_backend={runner} (it may keep experts in another layout)")
    if obstacles:
        raise AuditUnsupported(
            f"{engine.url} holds every parameter that was sent, by name; their values cannot be "
            f"compared: {', '.join(obstacles)}"
        )
