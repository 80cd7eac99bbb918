"""Weights that several ranks send to two engines: bytes by link, collectives, memory and bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.torchrun import torchrun
from tests.support.weight_receiver import ReceiverProcess, open_receivers

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("lanes_of_ranks.py")
BUCKET_BYTES = 96 * 1024
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The largest share of all bytes that rank 0 may send
CASES = [
    ("ep2", "float32", 2, 0.6),
    ("pp2", "bfloat16", 2, 0.6),
    ("tp2", "float32", 2, 0.6),
    ("cp2", "bfloat16", 2, 0.6),
    ("ep4", "bfloat16", 4, 0.35),
    ("tp2_ep2", "float32", 4, 0.35),
    ("pp2_vpp2_ep2", "bfloat16", 4, 0.35),
    ("tp2_ep2_etp2", "float32", 4, 0.35),
    ("tp2_pp2", "bfloat16", 4, 0.35),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def receivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ReceiverProcess]]:
    with open_receivers(tmp_path_factory.mktemp("receivers"), 2) as processes:
        yield processes


def run(
    folder: Path, model: Path, grid: str, dtype: str, ranks: int, urls: list[str]
) -> list[dict[str, Any]]:
    """Send the weights of a grid; returns what each rank reports."""
    arguments = [str(folder), str(model), grid, dtype, str(BUCKET_BYTES), *urls]
    torchrun(SCRIPT, *arguments, ranks=ranks, timeout=200)
    files = [folder / f"{grid}-{dtype}-{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(("grid", "dtype", "ranks", "share"), CASES)
def test_owners_share_the_bytes_and_engines_hold_the_same_bits(
    tmp_path: Path,
    model: Path,
    receivers: list[ReceiverProcess],
    grid: str,
    dtype: str,
    ranks: int,
    share: float,
) -> None:
    urls = [receiver.url for receiver in receivers]
    states = [receiver.state() for receiver in receivers]
    reports = run(tmp_path, model, grid, dtype, ranks, urls)
    # The bits that one rank with everything would send
    expected: dict[str, str] = {}
    for report in reports:
        expected |= report["of_stage"]
    assert reports[0]["on_rank_zero"] == expected
    for receiver, earlier in zip(receivers, states, strict=True):
        require_weights(receiver, expected)
        lanes = receiver.state()["bytes"].keys() - earlier["bytes"].keys()
        assert len(lanes) == ranks
    assert share_of_rank_zero(grid, dtype, reports[0]["bytes"]) <= share
    for report in reports:
        require_little_memory(report)
        assert not any(name.startswith("all_gather") for name in report["collectives"])


def require_weights(receiver: ReceiverProcess, expected: dict[str, str]) -> None:
    """Require that an engine serves these weights."""
    state = receiver.state()["serving"][-1]
    assert state["version"] == "5"
    assert {name: state["weights"][name] for name in expected} == expected


def share_of_rank_zero(grid: str, dtype: str, links: dict[str, int]) -> float:
    """The share of all bytes that rank 0 sent. links: bytes by rank and engine."""
    total = sum(links.values())
    count = sum(count for link, count in links.items() if link.startswith("0 "))
    print(f"{grid} {dtype}: rank 0 sends {count} of {total}, {count / total:.0%}")
    for link, num_bytes in sorted(links.items()):
        print(f"  rank {link}: {num_bytes}")
    return count / total


def require_little_memory(report: dict[str, Any]) -> None:
    """Require that a rank held no more than its shard, two buckets and one parameter."""
    limit = report["shard"] + 2 * BUCKET_BYTES + report["largest"]
    print(f"  peak {report['peak']} of {limit}, with a shard of {report['shard']}")
    assert report["peak"] <= limit
