"""Finds changes of a configuration with which a rank fits, and rehearses each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import Configuration
from megatron_rl.models.shape import ModelShape

MAX_REMEDIES = 3
_GIB = 2**30
_MAX_RANK_FACTOR = 8
_REPORT_SECONDS = 10.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Remedy:
    """A change that may let a rank fit.

    arguments: of the command, which replace those of the same key. cost: in words.
    """

    arguments: tuple[str, ...]
    cost: str

    def __str__(self) -> str:
        return " ".join(self.arguments)


def remedies(c: Configuration, shape: ModelShape, ranks: int) -> Iterator[Remedy]:
    """Yield changes, those that need no more ranks first, and cheap ones before others."""
    yield from _settings(c)
    yield from _other_grids(c, shape, ranks)
    factor = 2
    while factor <= _MAX_RANK_FACTOR:
        more = f"ranks={ranks * factor}"
        cost = f"{factor} times the ranks"
        yield Remedy((more,), f"{cost}, which share the optimizer")
        if shape.num_experts and not shape.num_experts % (factor * c.parallel.ep):
            yield Remedy((more, f"parallel.ep={factor * c.parallel.ep}"), cost)
        if factor * c.parallel.pp <= shape.num_layers:
            yield Remedy((more, *_stages(factor * c.parallel.pp)), cost)
        factor *= 2


def _settings(c: Configuration) -> Iterator[Remedy]:
    """Yield changes of settings on the same grid."""
    longest = c.data.max_prompt_tokens + c.rollout.max_new_tokens
    tokens = c.train.tokens_per_micro_batch
    if tokens > longest:
        fewer = max(longest, tokens // 2)
        cost = f"{tokens / fewer:.1f} times as many micro-batches"
        yield Remedy((f"train.tokens_per_micro_batch={fewer}",), cost)
    if c.model.recompute != "full":
        yield Remedy(("model.recompute=full",), "a second forward pass in the backward pass")
    if c.model.dtype == "float32":
        yield Remedy(("model.dtype=bfloat16",), "less precise weights")


def _other_grids(c: Configuration, shape: ModelShape, ranks: int) -> Iterator[Remedy]:
    """Yield other grids of the same ranks."""
    p = c.parallel
    splits_experts = shape.num_experts and not shape.num_experts % (2 * p.ep)
    if splits_experts and not (ranks // p.pp) % (2 * p.ep):
        yield Remedy((f"parallel.ep={2 * p.ep}",), "more traffic between experts")
    if not ranks % (2 * p.tp * p.pp * p.cp) and 2 * p.pp <= shape.num_layers:
        yield Remedy(_stages(2 * p.pp), "more idle time at both ends of the pipeline")


def _stages(count: int) -> tuple[str, ...]:
    """The settings of a number of pipeline stages with equally many layers."""
    return (
        f"parallel.pp={count}",
        "parallel.first_stage_layers=null",
        "parallel.last_stage_layers=null",
    )


def rehearse_remedies(
    c: Configuration,
    shape: ModelShape,
    *,
    arguments: Sequence[str],
    rank: int,
    ranks: int,
    peak: int,
    flops: int,
) -> Iterator[str]:
    """Rehearse changes until three of them fit. Yields a line for each change.

    arguments: of the command that found that the rank does not fit. peak, flops: bytes and
    operations of the update that it measured.
    """
    num_fits = 0
    for remedy in remedies(c, shape, ranks):
        if num_fits == MAX_REMEDIES:
            return
        report, problem = _rehearse(arguments, remedy, rank, ranks)
        if report is None:
            yield f"cannot be rehearsed: {remedy}: {problem}"
            continue
        size = max(sum(kinds.values()) for kinds in report["memory"].values())
        work = report["flops"].get("update", 0) / max(1, flops)
        change = f"{(peak - size) / _GIB:.2f} GiB less on rank {report['place']['rank']}"
        fits = size <= report["place"]["gpu"]["memory"]
        num_fits += fits
        yield (
            f"{'fits' if fits else 'does not fit'}: {remedy}: {size / _GIB:.2f} GiB, {change}, "
            f"{work:.2f} times the matrix products of an update on a rank. Cost: {remedy.cost}"
        )
    if not num_fits:
        yield "none of these changes fits. Take a GPU with more memory, or shorter rollouts"


def _rehearse(
    arguments: Sequence[str], remedy: Remedy, rank: int, ranks: int
) -> tuple[dict[str, Any] | None, str]:
    """Rehearse a change in a new process, and return its report or the reason for none.

    Among more ranks, the rank at the same place in the pipeline is rehearsed.
    """
    changes = dict(argument.split("=", 1) for argument in remedy.arguments)
    rank = rank * int(changes.get("ranks", ranks)) // ranks
    keys = {"rank", "out", "remedies", *changes}
    others = [argument for argument in arguments if argument.partition("=")[0] not in keys]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        options = (f"rank={rank}", f"out={file}", "remedies=false")
        exit_code, text = _run([*others, *remedy.arguments, *options], str(remedy))
        if not file.exists():
            return None, text.splitlines()[-1] if text else f"exit code {exit_code}"
        report: dict[str, Any] = json.loads(file.read_text())
        return report, ""


def _run(arguments: Sequence[str], name: str) -> tuple[int, str]:
    """Run the command and print what it waits for. Returns exit code and error output."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.rehearsal", *arguments],
            env=os.environ,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        start = report_time = time.monotonic()
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - report_time > _REPORT_SECONDS:
                report_time = time.monotonic()
                print(f"rehearsing {name} for {report_time - start:.0f} s", flush=True)
        errors.seek(0)
        return process.returncode, errors.read().strip()
