"""Reads the samples of a run, which may be running.

for sample in read_samples(Path("runs/NAME")):
    print(sample.step, sample.text, sample.tokens.entropies.mean())
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.samples.columns import UnknownFormat, from_table
from megatron_rl.records.samples.files import sample_steps, samples_file
from megatron_rl.records.samples.sample import Sample


def read_samples(run: Path, step: int | None = None) -> Iterator[Sample]:
    """Yield the samples of one step, or of all steps, by step, group and place in the group.

    One file is in memory at a time. Raises `Failure`.
    """
    for kept_step in sample_steps(run) if step is None else [step]:
        yield from read_file(samples_file(run, kept_step))


def read_file(file: Path) -> Iterator[Sample]:
    """Yield the samples of one file. Raises `Failure`."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        yield from from_table(pa.parquet.read_table(file))
    except FileNotFoundError:
        raise Failure(
            f"{file}: there is no such file. The step kept no samples", ExitCode.REFUSED
        ) from None
    except (OSError, pa.ArrowException, UnknownFormat) as error:
        reason = str(error).partition("\n")[0]
        raise Failure(
            f"{file} cannot be read: {reason}. Remove it, or use the version that wrote it",
            ExitCode.REFUSED,
        ) from error
