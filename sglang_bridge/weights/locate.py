"""Names the very tensors that an engine holds wrong, and puts them right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from sglang_bridge.weights.audit import AuditReport
from sglang_bridge.weights.buckets import Bucket, NamedTensors
from sglang_bridge.weights.calls import EngineLink, Failures, call_each
from sglang_bridge.weights.updater import WeightUpdater


def push_and_locate(
    updater: WeightUpdater, named_tensors: NamedTensors, version: int, reports: Mapping[str, AuditReport]
) -> dict[str, tuple[str, ...]]:
    """Send the weights of `version` again to the engines whose audit failed; by URL, the tensors that were wrong.

    The stream must be the one that was audited. Costs one checksum of the model per candidate.
    Raises `WeightUpdateFailed`.
    """
    failed = {url: report for url, report in reports.items() if report.mismatches}
    search = _Search(failed)
    updater.push(named_tensors, version, urls=failed.keys(), alone=search.candidates, after_bucket=search.after_bucket)
    return {url: tuple(names) for url, names in search.found.items()}


class _Search:
    def __init__(self, reports: Mapping[str, AuditReport]) -> None:
        self.candidates = {name for report in reports.values() for name in report.tensors}
        self.found: dict[str, list[str]] = {url: [] for url in reports}
        self._held = {url: dict(report.held) for url, report in reports.items()}

    def after_bucket(self, bucket: Bucket, links: Sequence[EngineLink]) -> Failures:
        """Note for each engine whether a candidate changed it."""
        if bucket.names[0] not in self.candidates:
            return {}
        return call_each(links, partial(self._compare, bucket.names[0]))

    def _compare(self, name: str, link: EngineLink) -> None:
        (rank,) = link.admin.checksums()
        if rank.checksums != self._held[link.url]:
            self.found[link.url].append(name)
            self._held[link.url] = dict(rank.checksums)
