"""Shards, index and companion files of a checkpoint in Hugging Face format, and its replacement."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.models.hf_checkpoint.writer import (
    ShardWriter,
    begin_checkpoint,
    commit_checkpoint,
    discard_checkpoint,
)
from tests.support.disk_log import DiskLog


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint whose configuration and tokenizer are copied."""
    directory = tmp_path / "source"
    directory.mkdir()
    config = {"hidden_size": 8, "torch_dtype": "float32", "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "merges.txt").write_text("a b\n")
    (directory / "notes.txt").write_text("not copied")
    return directory


def tensor(num_bytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def write(
    target: Path, sizes: list[int], source: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write tensors t0, t1, ... of so many bytes, in shards of at most 100 bytes."""
    begin_checkpoint(target)
    writer = ShardWriter(target, shard_bytes=100)
    for index, size in enumerate(sizes):
        writer.add(f"t{index}", tensor(size, index))
    writer.close()
    commit_checkpoint(target, source=source, dtype=dtype)


def files_of(target: Path) -> list[str]:
    return sorted(path.name for path in target.iterdir())


def test_shards_are_cut_before_the_tensor_that_does_not_fit(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "out", [40, 60, 1, 200, 5, 95, 1], source)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    names = {f"t{i}": f"model-{n:05d}.safetensors" for i, n in enumerate([0, 0, 1, 2, 3, 3, 4])}
    assert index["weight_map"] == names
    assert index["metadata"]["total_size"] == 40 + 60 + 1 + 200 + 5 + 95 + 1


def test_the_index_finds_every_tensor_in_more_than_ten_shards(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "out", [100] * 12, source)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 12
    for number in range(12):
        weights = load_file(tmp_path / "out" / index["weight_map"][f"t{number}"])
        assert weights.keys() == {f"t{number}"}
        assert weights[f"t{number}"].tolist() == [number] * 100


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "vocab.txt",
        "chat_template.json",
        "preprocessor_config.json",
    ],
)
def test_files_of_the_tokenizer_are_copied(tmp_path: Path, source: Path, name: str) -> None:
    (source / name).write_bytes(b"\x00\xff")
    write(tmp_path / "out", [1], source)
    assert (tmp_path / "out" / name).read_bytes() == b"\x00\xff"


def test_code_that_auto_map_names_is_copied_with_what_it_imports(
    tmp_path: Path, source: Path
) -> None:
    config = {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModel": "modeling_x.X"}}
    (source / "config.json").write_text(json.dumps(config))
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    code = {
        "configuration_x.py": "import torch\n",
        "modeling_x.py": "from .configuration_x import XConfig\nfrom .layers.moe import Expert\n",
        "tokenization_x.py": "",
        "layers/moe.py": "from ..helpers import add\n",
        "helpers.py": "",
    }
    for name, text in code.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    write(tmp_path / "out", [1], source, dtype=torch.bfloat16)
    for name, text in code.items():
        assert (tmp_path / "out" / name).read_text() == text


def test_code_without_auto_map_or_of_another_repository_is_not_copied(
    tmp_path: Path, source: Path
) -> None:
    (source / "train.py").write_text("")
    write(tmp_path / "plain", [1], source)
    config = {"auto_map": {"AutoConfig": "owner/name--configuration_x.XConfig"}}
    (source / "config.json").write_text(json.dumps(config))
    write(tmp_path / "other", [1], source)
    assert files_of(tmp_path / "plain") == files_of(tmp_path / "other")
    assert "train.py" not in files_of(tmp_path / "plain")


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077, 0o027])
def test_all_files_follow_the_umask(tmp_path: Path, source: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "out", [100, 100], source, dtype=torch.bfloat16)
        write(tmp_path / "single", [1], source)
    finally:
        os.umask(before)
    for directory in (tmp_path / "out", tmp_path / "single"):
        modes = {file.name: file.stat().st_mode & 0o777 for file in directory.iterdir()}
        assert modes == dict.fromkeys(modes, 0o666 & ~umask)


def test_a_single_shard_has_no_index(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "out", [40, 60], source)
    assert files_of(tmp_path / "out") == ["config.json", "merges.txt", "model.safetensors"]
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"t0", "t1"}


def test_a_tensor_that_changes_after_it_was_added_is_written_as_it_was(
    tmp_path: Path, source: Path
) -> None:
    begin_checkpoint(tmp_path / "out")
    writer = ShardWriter(tmp_path / "out")
    buffer = tensor(4)
    writer.add("t", buffer)
    buffer.zero_()
    writer.close()
    commit_checkpoint(tmp_path / "out", source=source, dtype=None)
    assert load_file(tmp_path / "out/model.safetensors")["t"].tolist() == [1] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_configuration_names_the_dtype_of_the_files(
    tmp_path: Path, source: Path, dtype: torch.dtype
) -> None:
    write(tmp_path / "out", [1], source, dtype=dtype)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {"hidden_size": 8, "dtype": str(dtype).removeprefix("torch.")}


def test_without_a_dtype_the_configuration_stays(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "out", [1], source)
    assert (tmp_path / "out/config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_new_checkpoint_replaces_an_old_one_and_leaves_no_remains(
    tmp_path: Path, source: Path
) -> None:
    write(tmp_path / "out", [100, 100], source)
    begin_checkpoint(tmp_path / "out")  # an export that was killed
    (tmp_path / "out.partial" / "model-00009.safetensors").write_bytes(b"")
    (tmp_path / "out.old").mkdir()
    write(tmp_path / "out", [1], source)
    assert files_of(tmp_path / "out") == ["config.json", "merges.txt", "model.safetensors"]
    assert files_of(tmp_path) == ["out", "source"]


def test_a_checkpoint_that_is_not_completed_leaves_the_old_one(
    tmp_path: Path, source: Path
) -> None:
    write(tmp_path / "out", [1], source)
    begin_checkpoint(tmp_path / "out")
    ShardWriter(tmp_path / "out").close()
    discard_checkpoint(tmp_path / "out")
    discard_checkpoint(tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"t0"}
    assert files_of(tmp_path) == ["out", "source"]


def test_all_files_are_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DiskLog(monkeypatch)
    write(tmp_path / "out", [100, 100], source, dtype=torch.float32)
    partial = tmp_path / "out.partial"
    for path in (partial, *(partial / name for name in files_of(tmp_path / "out"))):
        assert log.is_in_order(("sync", path), ("rename", tmp_path / "out")), path
