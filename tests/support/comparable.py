"""Reads and compares what two runs with the same settings share bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_rl.records.effective_time import is_time


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run, without times."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not is_time(k)} for record in records]


def metrics_of_any_engines(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run, without times and without what their engines decide.

    The number of rollouts in flight is read at a moment, so it tells how fast engines are.
    """
    counts = ("sync/audit_compared", "sync/bytes", "sync/engines", "rollout/in_flight")
    return [
        {name: value for name, value in record.items() if not name.startswith(counts)}
        for record in metrics_of(run)
    ]


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the weights in Hugging Face format, which has a file for each pipeline stage."""
    files = (run / f"checkpoints/step-{step}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_weights(one: Path, other: Path, step: int) -> None:
    weights = weights_of(one, step)
    other_weights = weights_of(other, step)
    assert weights.keys() == other_weights.keys()
    assert len(weights) > 10
    assert [name for name, value in weights.items() if not value.equal(other_weights[name])] == []
