"""Writes the samples of a step as one Parquet file, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.records.durable_files import sync_folder, write_synced
from megatron_rl.records.samples.columns import to_table
from megatron_rl.records.samples.sample import Sample


def write_samples(file: Path, samples: Sequence[Sample], max_bytes: int) -> int:
    """Write samples, replacing the file, and return the number of samples that fit.

    samples: the most important ones first. If the file would be larger than `max_bytes`, it does
    not contain the last ones. The file has them by group.

    Raises OSError. An older file then stays as it was.
    """
    num_samples = len(samples)
    data = encode(samples)
    while num_samples and len(data) > max_bytes:
        share = max_bytes / len(data)
        num_samples = min(num_samples - 1, int(num_samples * share))
        data = encode(samples[:num_samples])
    if num_samples:
        _replace(file, data)
    return num_samples


def encode(samples: Sequence[Sample]) -> bytes:
    """Return the bytes of a Parquet file with one row for each sample, by group."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = sorted(samples, key=lambda sample: (sample.group, sample.sample_index))
    stream = pa.BufferOutputStream()
    # Dictionaries make numbers larger and take half of the time; nothing reads the statistics
    pa.parquet.write_table(
        to_table(rows),
        stream,
        compression="zstd",
        use_dictionary=["prompt", "token_texts.list.element"],
        write_statistics=False,
    )
    return bytes(stream.getvalue())


def _replace(file: Path, data: bytes) -> None:
    """Write a file that is complete even after a power failure."""
    file.parent.mkdir(exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    try:
        write_synced(partial, data)
        os.replace(partial, file)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)
