"""Files of samples: what is written is read, whole or not at all, within the limit."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.group import Verdict
from megatron_rl.records.samples import writer
from megatron_rl.records.samples.columns import VERSION_KEY, schema
from megatron_rl.records.samples.files import move_samples, sample_steps, samples_file
from megatron_rl.records.samples.reader import read_samples
from megatron_rl.records.samples.sample import SampleKind
from megatron_rl.records.samples.writer import encode, write_samples
from tests.support.samples import assert_same, make_sample, write_step

ROOT = Path(__file__).resolve().parents[3]


def test_every_value_of_a_sample_is_read_as_it_was_written(tmp_path: Path) -> None:
    nothing = np.full(3, np.nan, np.float32)
    samples = [
        make_sample("4\x1b[2J\n\N{SNOWMAN}", tool="=42", kinds=(SampleKind.SHORTEST,)),
        make_sample(
            "abc",
            sample_index=1,
            is_trained=False,
            advantage=None,
            clips=None,
            logprobs=nothing,
            entropies=nothing,
            ratios=nothing,
            advantages=nothing,
            verdict=Verdict(reward=None, correctness=None, reason="timeout"),
        ),
        make_sample("", group=2, clips=np.empty(0, np.int8), texts=()),
    ]
    write_step(tmp_path, 10, samples)
    copies = list(read_samples(tmp_path, 10))
    assert len(copies) == 3
    for sample, copy in zip(samples, copies, strict=True):
        assert_same(sample, copy)
    assert copies[0].text == "4\x1b[2J\n\N{SNOWMAN}=42"
    assert copies[0].tokens.mean_mismatch == 0.25 and copies[0].tokens.clip_share == 1 / 7
    assert np.isnan(copies[0].tokens.mismatches[-3:]).all()
    assert (copies[1].tokens.clip_share, copies[1].tokens.mean_mismatch) == (None, None)
    assert copies[2].tokens.mean_logprob is None


def test_other_tools_read_lists_with_null_and_the_documented_columns(tmp_path: Path) -> None:
    file = write_step(tmp_path, 10, [make_sample("42", tool="!")])
    table = pa.parquet.read_table(file)
    assert table.column_names == schema().names and table.schema.metadata == schema().metadata
    row = table.to_pylist()[0]
    assert row["ratios"] == [1.0, 1.125, None] and row["clips"] == [1, 0, 0]
    assert row["tokens"] == [0, 1, 2] and row["token_texts"] == ["4", "2", "!"]
    assert row["segments"][1]["role"] == "tool" and row["num_tokens"] == 3
    page = (ROOT / "docs/samples.md").read_text()
    assert [name for name in table.column_names if f"`{name}`" not in page] == []


def test_samples_are_read_by_step_and_group(tmp_path: Path) -> None:
    write_step(tmp_path, 20, [make_sample(step=20)])
    important_first = [make_sample(group=2), make_sample(group=1, sample_index=1), make_sample()]
    write_step(tmp_path, 10, important_first)
    samples = list(read_samples(tmp_path))
    order = [(sample.step, sample.group, sample.sample_index) for sample in samples]
    assert order == [(10, 1, 0), (10, 1, 1), (10, 2, 0), (20, 1, 0)]
    assert sample_steps(tmp_path) == [10, 20]


def test_the_file_stays_below_its_limit_and_keeps_the_first_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(40, 1000, 2000))) for _ in range(20)]
    samples = [
        make_sample(text, group=20 - index, ratios=rng.random(2000).astype(np.float32))
        for index, text in enumerate(texts)
    ]
    file = samples_file(tmp_path, 10)
    limit = len(encode(samples)) // 2
    num_samples = write_samples(file, samples, limit)
    assert 3 <= num_samples < 12 and file.stat().st_size <= limit
    assert [s.text for s in read_samples(tmp_path)] == texts[:num_samples][::-1]
    assert write_samples(samples_file(tmp_path, 11), samples, 100) == 0
    assert sample_steps(tmp_path) == [10]


def test_a_step_that_trains_again_replaces_its_file(tmp_path: Path) -> None:
    write_step(tmp_path, 10, [make_sample("old"), make_sample("old", sample_index=1)])
    write_step(tmp_path, 10, [make_sample("new")])
    assert [sample.text for sample in read_samples(tmp_path)] == ["new"]


def test_a_full_disk_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, 10, [make_sample("old")])

    def fill_disk(file: Path, data: bytes) -> None:
        file.write_bytes(data[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "write_synced", fill_disk)
    with pytest.raises(OSError):
        write_samples(samples_file(tmp_path, 10), [make_sample("new")], 2**20)
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-0000010.parquet"]
    assert [sample.text for sample in read_samples(tmp_path)] == ["old"]


def test_a_partial_file_of_a_killed_run_is_no_step(tmp_path: Path) -> None:
    write_step(tmp_path, 10, [make_sample()])
    (tmp_path / "samples/step-0000020.parquet.partial").write_bytes(b"PAR1")
    assert sample_steps(tmp_path) == [10] and len(list(read_samples(tmp_path))) == 1


@pytest.mark.parametrize("damage", ["truncated", "version", "column", "format", "missing"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, damage: str) -> None:
    file = write_step(tmp_path, 10, [make_sample()])
    table = pa.parquet.read_table(file)
    metadata = table.schema.metadata
    match damage:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-9])
        case "version":
            newer = table.replace_schema_metadata(metadata | {VERSION_KEY: b"2"})
            pa.parquet.write_table(newer, file)
        case "column":
            pa.parquet.write_table(table.drop_columns(["ratios"]), file)
        case "format":
            pa.parquet.write_table(table.replace_schema_metadata({}), file)
        case "missing":
            file.unlink()
    reasons = {"version": "version '2'", "column": "ratios", "format": "'unknown'"}
    with pytest.raises(Failure, match=r"step-0000010\.parquet") as error:
        list(read_samples(tmp_path, 10))
    assert reasons.get(damage, "") in str(error.value)


def test_samples_after_the_checkpoint_move_to_the_archive(tmp_path: Path) -> None:
    for step in (1, 10, 20):
        write_step(tmp_path, step, [make_sample(step=step)])
    archive = tmp_path / "resumed/001"
    archive.mkdir(parents=True)
    move_samples(tmp_path, archive, after_step=10)
    assert sample_steps(tmp_path) == [1, 10] and sample_steps(archive) == [20]
    move_samples(tmp_path, archive, after_step=30)
    assert sample_steps(archive) == [20]


@pytest.mark.slow
def test_a_refusal_does_not_wait_for_pyarrow() -> None:
    code = (
        "import sys; import megatron_rl.config.cli, megatron_rl.records.samples.reader, "
        "megatron_rl.records.samples.writer; assert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
