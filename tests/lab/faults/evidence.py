"""Evidence in the directory of a run: how often it trained each rollout, and to which weights."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.rollouts.recording.reader import read_groups

# Settings of a run that leaves evidence
EVIDENCE_SETTINGS = ("run.save_weights=true", "logger.save_rollouts_every=1")


@dataclass(frozen=True)
class Evidence:
    """The evidence that a run left.

    steps: how often each step has a record. rollouts: how often each rollout was trained, by the
    step and its id. num_rejected: rollouts without a usable response. num_repeated: requests that
    were sent again. digest: SHA-256 of the last weights, empty if there are none.
    """

    steps: Counter[int]
    rollouts: Counter[str]
    num_rejected: int
    num_repeated: int
    digest: str

    @property
    def num_doubled(self) -> int:
        """The rollouts that were trained more than once, and the steps with more records."""
        counts = [*self.rollouts.values(), *self.steps.values()]
        return sum(count - 1 for count in counts)

    def num_lost(self, reference: Evidence) -> int:
        """The rollouts of an undisturbed run that this one lacks or rejected."""
        num_missing = len(reference.rollouts.keys() - self.rollouts.keys())
        return num_missing + max(0, self.num_rejected - reference.num_rejected)


def read_evidence(run: Path) -> Evidence:
    """Read what a run left in its directory."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Evidence(
        steps=Counter(int(record["step"]) for record in records),
        rollouts=_read_rollouts(run / "rollouts"),
        num_rejected=_sum(records, "rollout/rejected") + _sum(records, "eval/rejected"),
        num_repeated=_sum(records, "rollout/repeated"),
        digest=digest_weights(run),
    )


def digest_weights(run: Path) -> str:
    """Return the SHA-256 of the last weights in Hugging Face format, empty without any."""
    directories = sorted(
        (run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2])
    )
    if not directories:
        return ""
    digest = hashlib.sha256()
    for file in sorted(directories[-1].glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read_rollouts(directory: Path) -> Counter[str]:
    counts = Counter[str]()
    for batch in sorted(directory.glob("step-*")):
        for _, rollouts in read_groups(batch):
            counts.update(f"{batch.name}/{r.rollout_id}" for r in rollouts)
    return counts


def _sum(records: list[dict[str, float]], name: str) -> int:
    return round(sum(record.get(name, 0.0) for record in records))
