"""Weights that several ranks send to two engines: bytes by link, collectives, memory and bits."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
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
# Two ranks cut the rows or columns of a block, and 192 is a block and a half
FP8_SIZES = {
    "hidden_size": 192,
    "moe_intermediate_size": 128,
    "num_attention_heads": 2,
    "head_dim": 64,
    "num_experts": 4,
}
# Four times a band of 128 rows in float32, which the kernel for CPUs quantizes at a time
QUANTISING_BYTES = 4 * 4 * 128 * FP8_SIZES["hidden_size"]


def fp8_cases() -> Iterator[Any]:
    """Every grid with two dtypes. One case of each way to hold shards and experts is daily."""
    daily = {("ep2", "bfloat16"), ("tp2", "bfloat16"), ("tp2_ep2", "float32")}
    grids = {"ep2": 2, "pp2": 2, "tp2": 2, "cp2": 2, "tp2_ep2": 4, "tp2_ep2_etp2": 4}
    for grid, ranks in grids.items():
        for dtype in ("float32", "bfloat16"):
            marks = () if (grid, dtype) in daily else (pytest.mark.nightly,)
            yield pytest.param(grid, f"fp8:{dtype}", ranks, marks=marks)


FP8_CASES = list(fp8_cases())


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
    for report in reports:
        assert report["on_every_rank"] == list(map(list, reports[0]["on_rank_zero"].items()))
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


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one block along most sides: two ranks of a trainer share every block."""
    folder = tmp_path_factory.mktemp("fp8-model")
    (folder / "config.json").write_text(json.dumps(CONFIG | FP8_SIZES))
    return folder


@pytest.fixture(scope="module")
def streams_of_one_rank(
    tmp_path_factory: pytest.TempPathFactory, fp8_model: Path
) -> Iterator[Callable[[str], dict[str, str]]]:
    """Returns what one rank with the whole model sends, by dtype."""
    folder = tmp_path_factory.mktemp("one-rank")

    @functools.cache
    def stream(dtype: str) -> dict[str, str]:
        with open_receivers(folder / dtype, 1) as receivers:
            (report,) = run(folder, fp8_model, "single", dtype, 1, [receivers[0].url])
            require_weights(receivers[0], report["of_stage"])
        weights: dict[str, str] = report["of_stage"]
        return weights

    yield stream


@pytest.mark.parametrize(("grid", "dtype", "ranks"), FP8_CASES)
def test_every_grid_sends_the_codes_and_scales_of_one_rank(
    tmp_path: Path,
    fp8_model: Path,
    receivers: list[ReceiverProcess],
    streams_of_one_rank: Callable[[str], dict[str, str]],
    grid: str,
    dtype: str,
    ranks: int,
) -> None:
    """Shards of tensor parallelism cut blocks of 128 x 128, and are joined before."""
    stream = streams_of_one_rank(dtype)
    kinds = {kind.split()[0] for kind in stream.values()}
    assert kinds == {"torch.float8_e4m3fn", "torch.float32", f"torch.{dtype.removeprefix('fp8:')}"}
    earlier = [len(receiver.state()["updates"]) for receiver in receivers]
    reports = run(tmp_path, fp8_model, grid, dtype, ranks, [receiver.url for receiver in receivers])
    assert reports[0]["on_rank_zero"] == stream
    for receiver, count in zip(receivers, earlier, strict=True):
        updates = receiver.state()["updates"][count:]
        names = [name for update in updates for name in update]
        assert sorted(names) == sorted(stream)  # each once
        require_weights(receiver, stream)
    for report in reports:
        require_little_memory(report, QUANTISING_BYTES)
        assert not any(name.startswith("all_gather") for name in report["collectives"])


def share_of_rank_zero(grid: str, dtype: str, links: dict[str, int]) -> float:
    """The share of all bytes that rank 0 sent. links: bytes by rank and engine."""
    total = sum(links.values())
    count = sum(count for link, count in links.items() if link.startswith("0 "))
    print(f"{grid} {dtype}: rank 0 sends {count} of {total}, {count / total:.0%}")
    for link, num_bytes in sorted(links.items()):
        print(f"  rank {link}: {num_bytes}")
    return count / total


def require_little_memory(report: dict[str, Any], quantising: int = 0) -> None:
    """Require that a rank held no more than its shard, two buckets and one parameter.

    quantising: the bytes that quantization needs meanwhile.
    """
    limit = report["shard"] + 2 * BUCKET_BYTES + report["largest"] + quantising
    print(f"  peak {report['peak']} of {limit}, with a shard of {report['shard']}")
    assert report["peak"] <= limit
