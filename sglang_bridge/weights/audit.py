"""Compares an engine's weights with the weights that were sent to it.

Names are always compared, values where SGLang's checksums allow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import AuditUnsupported, RequestFailed, WeightMismatch
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.fused_layout import RankPlace, rank_places

# Runners that keep experts in the checkpoint's layout. SGLang reports "auto" if it has not chosen
# one.
_PLAIN_RUNNERS = ("auto", "triton")
# Sizes and options in `/server_info` with which ranks share tensors in another way
_OTHER_SHARDS = (
    "attn_dp_size",
    "attn_cp_size",
    "moe_dp_size",
    "dwdp_size",
    "enable_dp_attention",
    "enable_dp_lm_head",
)
_BY_NAME = "{} holds every parameter that was sent, by name; their values cannot be compared"
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
    """Compare the engine's checksums with a complete push, which `expectation` observed.

    SGLang silently skips names that it does not know. Names are therefore compared on every rank,
    and values where possible.

    Raises `AuditUnsupported` when the names agree and the values cannot be compared,
    `RequestFailed`, and `ValueError` when the weights that were sent lack a part of a parameter.
    """
    engine = admin.engine
    compares = expectation.compares_values and not value_obstacles(engine)
    places = rank_places(engine) if compares else (expectation.first_place,) * engine.tp
    expectations = [expectation.checksums(place) for place in places]
    ranks = admin.checksums()
    if len(ranks) != engine.tp:
        raise RequestFailed(
            f"{engine.url} reports checksums of {len(ranks)} rank(s), and it has tp={engine.tp}"
        )
    reasons = _differing_names(expectations[0].keys(), ranks)
    if not reasons:
        _require_known_splits(engine, expectation)
        require_auditable(engine, admin.server_info(), expectation.device)
        if expectation.compares_values:
            reasons = _differing_values(expectations, ranks)
    mismatches = [
        Mismatch(name, _tensors(expectation, places, name), reasons[name])
        for name in sorted(reasons)
    ]
    names = expectations[0].keys() | {name for checksums in ranks for name in checksums}
    return AuditReport(admin.url, len(names), tuple(mismatches))


def _differing_names(sent_names: Set[str], ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the parameters that one side lacks, with the reason."""
    names = {name for checksums in ranks for name in checksums}
    missing = {name for name in sent_names if any(name not in rank for rank in ranks)}
    reasons = dict.fromkeys(missing, "the engine has no such parameter")
    return reasons | dict.fromkeys(names - sent_names, "nothing was sent for it")


def _differing_values(
    expectations: Sequence[Mapping[str, str]], ranks: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """Return the parameters that differ on a rank. Both lists have one item for each rank."""
    reasons: dict[str, str] = {}
    for index, (expected_checksums, checksums) in enumerate(zip(expectations, ranks, strict=True)):
        where = f" by rank {index}" if len(ranks) > 1 else ""
        for name, checksum in expected_checksums.items():
            if checksum != checksums[name]:
                reasons.setdefault(name, f"sent {checksum}, held{where} {checksums[name]}")
    return reasons


def _tensors(
    expectation: WeightExpectation, places: Iterable[RankPlace], parameter: str
) -> tuple[str, ...]:
    """Return the Hugging Face names that make up a parameter on all ranks of an engine."""
    by_rank = (expectation.tensors_of(parameter, place) for place in dict.fromkeys(places))
    return tuple(dict.fromkeys(name for names in by_rank for name in names))


def _require_known_splits(engine: Engine, expectation: WeightExpectation) -> None:
    if engine.tp > 1 and expectation.unknown_splits:
        raise AuditUnsupported(
            f"{_BY_NAME.format(engine.url)}: it is not known how tp={engine.tp} ranks share "
            f"{expectation.unknown_splits[0]}"
        )


def value_obstacles(engine: Engine) -> list[str]:
    """Return the settings of an engine for which its checksums cannot be predicted."""
    if engine.quantization in (None, "fp8"):
        return []
    return [f"quantization={engine.quantization} (its checksums are not known)"]


def require_auditable(engine: Engine, info: Mapping[str, Any], device: str) -> None:
    """Raise `AuditUnsupported` for an engine whose checksums cannot be predicted.

    info: the engine's `/server_info`. device: the device whose checksums are predicted. Raises
    `RequestFailed` for information that SGLang does not give: it says nothing about checksums.
    """
    obstacles = value_obstacles(engine)
    engine_device = info.get("device")
    if not isinstance(engine_device, str):
        raise RequestFailed(f"{engine.url}/server_info names no device: {engine_device!r}")
    runner = info.get("moe_runner_backend", "auto")
    if engine_device != device:
        obstacles.append(
            f"device={engine_device} (SGLang computes other checksums there than on {device})"
        )
    elif device != "cpu" and runner not in _PLAIN_RUNNERS:
        obstacles.append(f"moe_runner_backend={runner} (it may keep experts in another layout)")
    obstacles += [
        f"{key}={info[key]} (ranks hold other shards)"
        for key in _OTHER_SHARDS
        if info.get(key) not in (None, False, 0, 1)
    ]
    if obstacles:
        raise AuditUnsupported(f"{_BY_NAME.format(engine.url)}: {', '.join(obstacles)}")
