"""What two runs of the same settings have in common, bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Every record but what clocks say."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in records]


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """In Hugging Face format, a file for each pipeline stage."""
    files = (run / f"checkpoints/step-{step}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_weights(one: Path, other: Path, step: int) -> None:
    weights, others = weights_of(one, step), weights_of(other, step)
    assert weights.keys() == others.keys() and len(weights) > 10
    assert [name for name, weight in weights.items() if not weight.equal(others[name])] == []
