"""Weights that several ranks send to two engines: bytes by link, collectives, memory and bits."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.torchrun import torchrun
from tests.support.weight_receiver import open_receivers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

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
# With the largest share of all bytes that rank 0 may send. Those of two ranks are daily.
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


# By grid: its ranks
FP8_GRIDS = {"ep2": 2, "pp2": 2, "tp2": 2, "cp2": 2, "tp2_ep2": 4, "tp2_ep2_etp2": 4}
FP8_CASES = [
    (grid, f"fp8:{dtype}", ranks)
    for grid, ranks in FP8_GRIDS.items()
    for dtype in ("float32", "bfloat16")
]
# One of experts that ranks share, and one of matrices that they share
FP8_DAILY = (("ep2", "fp8:bfloat16", 2), ("tp2", "fp8:bfloat16", 2))
DAILY = [case[:3] for case in CASES if case[2] == 2] + list(FP8_DAILY)
NIGHTLY = [case for case in (*(c[:3] for c in CASES), *FP8_CASES) if case not in DAILY]

Send = Callable[[str, str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The models of cases without and with FP8.

    That with FP8 has one block along most sides: two ranks of a trainer share every block.
    """
    folders = {}
    for has_fp8, sizes in ((False, {}), (True, FP8_SIZES)):
        folders[has_fp8] = tmp_path_factory.mktemp("model")
        (folders[has_fp8] / "config.json").write_text(json.dumps(CONFIG | sizes))
    return folders


@pytest.fixture(scope="module")
def send(tmp_path_factory: pytest.TempPathFactory, models: dict[bool, Path]) -> Iterator[Send]:
    """Sends the weights of a grid; returns what each rank reports.

    The daily cases, and the others of a size, run in one job.
    """
    folder = tmp_path_factory.mktemp("lanes")
    with open_receivers(folder, 2) as receivers:
        urls = ",".join(receiver.url for receiver in receivers)

        @functools.cache
        def run_job(cases: tuple[tuple[str, str, int], ...]) -> None:
            names = [
                f"{models[dtype.startswith('fp8:')]},{grid},{dtype}" for grid, dtype, _ in cases
            ]
            ranks = cases[0][2]
            # A job of one rank sends to one engine
            targets = urls if ranks > 1 else receivers[0].url
            torchrun(
                SCRIPT,
                str(folder),
                str(BUCKET_BYTES),
                targets,
                *names,
                ranks=ranks,
                timeout=500,
            )

        def run(grid: str, dtype: str, ranks: int) -> list[dict[str, Any]]:
            case = (grid, dtype, ranks)
            if case in DAILY:
                run_job(tuple(DAILY))
            elif case in NIGHTLY:
                run_job(tuple(other for other in NIGHTLY if other[2] == ranks))
            else:
                run_job((case,))
            files = [folder / f"{grid}-{dtype}-{rank}.json" for rank in range(ranks)]
            return [json.loads(file.read_text()) for file in files]

        yield run


def params(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The parameters of these cases. Those that are not daily are nightly."""
    return [
        pytest.param(*case, marks=() if case[:3] in DAILY else pytest.mark.nightly)
        for case in cases
    ]


@pytest.mark.parametrize(("grid", "dtype", "ranks", "share"), params(CASES))
def test_owners_share_the_bytes_and_engines_hold_the_same_bits(
    send: Send, grid: str, dtype: str, ranks: int, share: float
) -> None:
    reports = send(grid, dtype, ranks)
    # The bits that one rank with everything would send
    expected: dict[str, str] = {}
    for report in reports:
        expected |= report["of_stage"]
    assert reports[0]["on_rank_zero"] == expected
    for report in reports:
        assert report["on_every_rank"] == list(map(list, reports[0]["on_rank_zero"].items()))
    for engine, earlier in engines_of(reports):
        require_weights(engine, expected)
        assert len(engine["bytes"].keys() - earlier["bytes"].keys()) == ranks
    assert share_of_rank_zero(grid, dtype, reports[0]["bytes"]) <= share
    for report in reports:
        require_little_memory(report)
        assert not any(name.startswith("all_gather") for name in report["collectives"])


def engines_of(reports: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The state of each engine after the sync and before it."""
    return list(zip(reports[0]["engines"], reports[0]["engines_before"], strict=True))


def require_weights(engine: dict[str, Any], expected: dict[str, str]) -> None:
    """Require that an engine serves these weights."""
    state = engine["serving"][-1]
    assert state["version"] == "5"
    assert {name: state["weights"][name] for name in expected} == expected


@pytest.mark.parametrize(("grid", "dtype", "ranks"), params(FP8_CASES))
def test_every_grid_sends_the_codes_and_scales_of_one_rank(
    send: Send, grid: str, dtype: str, ranks: int
) -> None:
    """Shards of tensor parallelism cut blocks of 128 x 128, and are joined before."""
    (report_of_one,) = send("single", dtype, 1)
    stream = report_of_one["of_stage"]
    require_weights(report_of_one["engines"][0], stream)
    kinds = {kind.split()[0] for kind in stream.values()}
    assert kinds == {"torch.float8_e4m3fn", "torch.float32", f"torch.{dtype.removeprefix('fp8:')}"}
    reports = send(grid, dtype, ranks)
    assert reports[0]["on_rank_zero"] == stream
    for engine, earlier in engines_of(reports):
        assert len(engine["serving"]) > len(earlier["serving"])
        updates = engine["updates"][len(earlier["updates"]) :]
        names = [name for update in updates for name in update]
        assert sorted(names) == sorted(stream)  # each once
        require_weights(engine, stream)
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
