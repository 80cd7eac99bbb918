"""Estimate how long a weight sync takes on H100 nodes, and compare the estimate with peers.

Examples:

    python -m launch.studies.sync_time                  # three models on 8 to 512 GPUs
    python -m launch.studies.sync_time --peers          # beside times that others published
    python -m launch.studies.sync_time --constants      # what the estimates stand on
    python -m launch.studies.sync_time --model DIR --trainer 64 --tp 4 --pp 4 --ep 16 \\
        --engines 64 --engine-tp 8              # every step of one job

Output: Markdown tables, in seconds. Nothing is started, and nothing was measured by this project:
docs/weight_sync.md says what the model assumes. Without --model, half of the GPUs train and the
other half are engines.

    source, lanes, tree   ways to send: megatron_rl/planning/sync_time.py
    one, two              buffers: with two, the next bucket is collected while one is sent
    audit                 what an audit by value adds to `lanes`, in the syncs that are audited
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from launch.studies.published_syncs import KIMI_K2, PUBLISHED, QWEN3_30B, QWEN3_235B, fit
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.sync_time import (
    Engines,
    Rates,
    SentDtype,
    SyncJob,
    SyncTime,
    Trainer,
    Way,
    count_stream,
    list_constants,
    obstacle,
    sync_time,
)

GPUS = (8, 16, 32, 64, 128, 256, 512)
DTYPES: tuple[SentDtype, ...] = ("bfloat16", "fp8")
OUR_WAYS = (Way.SOURCE, Way.LANES, Way.TREE)
_FIT_SOURCE = "the rows of --peers that are marked as fitted"


class Plan(NamedTuple):
    """A model with the layouts that the table shows.

    trainer: tp, pp and ep. engine_tps: sizes of engines.
    """

    name: str
    shape: ModelShape
    trainer: tuple[int, int, int]
    engine_tps: tuple[int, ...]


PLANS = (
    Plan("Qwen3-30B-A3B", QWEN3_30B, (4, 1, 8), (2, 8)),
    Plan("Qwen3-235B-A22B", QWEN3_235B, (4, 4, 16), (8, 32)),
    Plan("Kimi-K2, 1T", KIMI_K2, (8, 8, 32), (16, 32)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit code."""
    options = parse_arguments(arguments)
    rates = Rates(fit(PUBLISHED))
    try:
        if options.model:
            lines = step_table(read_shape(options.model), options, rates)
        elif options.peers:
            lines = peer_table(rates)
        elif options.constants:
            lines = constant_table(rates)
        else:
            lines = plan_table(rates)
        print("\n".join(lines))
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    except ValueError as error:
        print(error, file=sys.stderr)
        return ExitCode.REFUSED
    return ExitCode.OK


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.studies.sync_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--peers", action="store_true", help="compare with published times")
    tables.add_argument("--constants", action="store_true", help="list all constants")
    tables.add_argument("--model", metavar="DIR", type=Path, help="directory with a config.json")
    job = parser.add_argument_group("the job of --model")
    job.add_argument("--trainer", type=int, default=8, metavar="GPUS", help="default: 8")
    for name in ("tp", "pp", "ep"):
        job.add_argument(f"--{name}", type=int, default=1, help="of the trainer; default: 1")
    job.add_argument("--engines", type=int, default=8, metavar="GPUS", help="default: 8")
    job.add_argument("--engine-tp", type=int, default=1, help="GPUs of an engine; default: 1")
    job.add_argument("--bucket-mb", type=float, default=1024.0, help="default: 1024")
    return parser.parse_args(arguments)


def plan_table(rates: Rates) -> Iterator[str]:
    """Yield the table of all plans, then the plans that cannot exist."""
    ways = [f"{way}, {buffers}" for way in OUR_WAYS for buffers in ("one", "two")]
    yield _row(["model", "GPUs", "trainer", "engines", "sent as", "GB", *ways, "audit"])
    yield _rule(7 + len(ways))
    obstacles = []
    for plan in PLANS:
        for gpus in GPUS:
            for line in _plan_rows(plan, gpus, rates):
                if isinstance(line, str):
                    yield line
                else:
                    obstacles.append(line)
    yield ""
    for item in obstacles:
        yield f"- {item.job} does not fit: {item.reason}"


class Obstacle(NamedTuple):
    """A job of the table that cannot exist."""

    job: str
    reason: str


def _plan_rows(plan: Plan, gpus: int, rates: Rates) -> Iterator[str | Obstacle]:
    """Yield the row of each engine size and dtype, or the reason why there is none."""
    half = gpus // 2
    tp, pp, ep = plan.trainer
    needs = pp * max(tp, ep)
    if half < needs:
        reason = f"the layout tp{tp} pp{pp} ep{ep} needs {needs} trainer GPUs"
        yield Obstacle(f"{plan.name} on {gpus} GPUs", reason)
        return
    trainer = Trainer(half, tp, pp, ep)
    for engine_tp in plan.engine_tps:
        if half < engine_tp:
            yield Obstacle(f"{plan.name} on {gpus} GPUs", f"an engine has {engine_tp} GPUs")
            continue
        engines = Engines(half, engine_tp)
        for dtype in DTYPES:
            yield _plan_row(plan, trainer, engines, dtype, rates)


def _plan_row(
    plan: Plan, trainer: Trainer, engines: Engines, dtype: SentDtype, rates: Rates
) -> str | Obstacle:
    job = SyncJob(plan.shape, trainer, engines, dtype, Way.LANES)
    gpus = trainer.gpus + engines.gpus
    reason = obstacle(job, rates)
    if reason:
        return Obstacle(f"{plan.name} on {gpus} GPUs, tp {engines.tp}, {dtype}", reason)
    cells = [
        plan.name,
        str(gpus),
        f"tp{trainer.tp} pp{trainer.pp} ep{trainer.ep}",
        f"{engines.count} x tp{engines.tp}",
        dtype,
        f"{count_stream(plan.shape, dtype).total / 1e9:.0f}",
    ]
    for way in OUR_WAYS:
        one = sync_time(SyncJob(plan.shape, trainer, engines, dtype, way, 1), rates)
        two = sync_time(SyncJob(plan.shape, trainer, engines, dtype, way, 2), rates)
        cells += [_seconds(one.total), _seconds(two.total)]
    return _row([*cells, _seconds(sync_time(job, rates).audit)])


def step_table(shape: ModelShape, options: argparse.Namespace, rates: Rates) -> Iterator[str]:
    """Yield the steps of one job, for each dtype and way.

    Raises ValueError for layouts that do not fill the GPUs, and for a job that cannot exist.
    """
    trainer = Trainer(options.trainer, options.tp, options.pp, options.ep)
    engines = Engines(options.engines, options.engine_tp)
    bucket_bytes = options.bucket_mb * 2**20
    if bucket_bytes <= 0:
        raise ValueError(f"--bucket-mb={options.bucket_mb}: it must be above 0")
    steps = [name for name in SyncTime._fields if name != "total"]
    yield _row(["sent as", "way", *steps, "total, one buffer", "total, two buffers"])
    yield _rule(len(steps) + 4)
    for dtype in DTYPES:
        for way in Way:
            job = SyncJob(shape, trainer, engines, dtype, way, 1, bucket_bytes)
            one = sync_time(job, rates)
            two = sync_time(replace(job, buffers=2), rates)
            cells = [_seconds(getattr(one, step)) for step in steps]
            yield _row([dtype, way, *cells, _seconds(one.total), _seconds(two.total)])
    reasons = {
        obstacle(SyncJob(shape, trainer, engines, dtype, Way.LANES), rates) for dtype in DTYPES
    }
    for reason in sorted(reasons - {""}):
        yield f"\nDoes not fit: {reason}"


def peer_table(rates: Rates) -> Iterator[str]:
    """Yield published times beside the estimates."""
    yield _row(
        [
            "framework",
            "model",
            "trainer → engines, GPUs",
            "hardware",
            "published",
            "estimate",
            "estimate / published",
            "fitted",
            "source",
        ]
    )
    yield _rule(9)
    for row in PUBLISHED:
        low, high = row.seconds
        range_text = _seconds(low) if low == high else f"{_seconds(low)} to {_seconds(high)}"
        estimate = "no network: not modelled"
        ratio = ""
        if row.job is not None:
            total = sync_time(row.job, rates).total
            estimate = f"{_seconds(total)} ({row.job.way})"
            ratio = f"{total / row.middle:.2f}"
        yield _row(
            [
                row.framework,
                row.model,
                row.layout,
                row.hardware,
                range_text,
                estimate,
                ratio,
                "yes" if row.is_fitted else "no",
                row.source,
            ]
        )


def constant_table(rates: Rates) -> Iterator[str]:
    """Yield all constants with their kinds."""
    yield _row(["kind", "constant", "value", "unit", "source"])
    yield _rule(5)
    for row in list_constants(rates, _FIT_SOURCE):
        yield _row([row.kind, row.name, f"{row.value:.3g}", row.unit, row.source])


def _seconds(value: float) -> str:
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(num_columns: int) -> str:
    return "|---" * num_columns + "|"


if __name__ == "__main__":
    sys.exit(main())
