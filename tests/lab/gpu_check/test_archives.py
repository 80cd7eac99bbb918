"""Archives that do not fit the machine are named and not used, and nothing else suffers."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.lab.gpu_check import check
from tests.lab.gpu_check.archives import Archives, open_archives, read_manifest
from tests.lab.gpu_check.facts import Facts
from tests.lab.gpu_check.stages import Stage
from tests.support.scripts import start_gpu_check

FACTS = Facts(python="3.12", torch="2.11.0", triton="3.6.0", cuda="13.0", architecture=90)
NAMES = ("base", "te", "engine")


def write_archive(file: Path, name: str, member: str = "package.py") -> dict[str, Any]:
    text = f"NAME = {name!r}\n".encode()
    with tarfile.open(file, "w:xz") as tar:
        info = tarfile.TarInfo(member)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"file": file.name, "sha256": checksum, "unpacked_bytes": len(text)}


@pytest.fixture
def carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as `make gpu-carry` writes it, and an empty TMPDIR."""
    folder = tmp_path / "carry"
    folder.mkdir()
    archives = {name: write_archive(folder / f"{name}.tar.xz", name) for name in NAMES}
    versions = {"python": "3.12", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13"}
    manifest = {**versions, "architecture": 90, "archives": archives}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    return folder


def open_all(carry: Path, facts: Facts = FACTS, *, small: bool = False) -> Archives:
    return open_archives(read_manifest(carry), NAMES, facts, small=small, log=lambda _: None)


def test_archives_that_fit_are_unpacked_once(carry: Path) -> None:
    archives = open_all(carry)
    assert archives.refusals == {}
    for name in NAMES:
        assert (archives.paths[name] / "package.py").read_text() == f"NAME = {name!r}\n"
    (archives.paths["te"] / "package.py").write_text("unchanged by the second call\n")
    assert "unchanged" in (open_all(carry).paths["te"] / "package.py").read_text()


class Misfit(NamedTuple):
    """A change of the machine, and the archives that it rules out."""

    change: dict[str, Any]
    left_out: tuple[str, ...]
    reason: str


@pytest.mark.parametrize(
    "case",
    [
        Misfit({"python": "3.11"}, ("base", "te", "engine"), "python 3.12"),
        Misfit({"torch": "2.12.0"}, ("te",), "torch 2.11.0, and this machine has torch 2.12.0"),
        Misfit({"cuda": "12.8"}, ("te",), "cuda 13"),
        Misfit({"cuda": None}, ("te",), "cuda None"),
        Misfit({"architecture": 100}, ("te",), "architecture 90"),
        Misfit({"architecture": None}, ("te",), "architecture None"),
        Misfit({"triton": "3.7.0"}, (), ""),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_and_left_out(carry: Path, case: Misfit) -> None:
    archives = open_all(carry, dataclasses.replace(FACTS, **case.change))
    assert archives.refusals.keys() == set(case.left_out)
    assert archives.paths.keys() == set(NAMES) - set(case.left_out)
    assert all(case.reason in reason for reason in archives.refusals.values())


def test_small_stages_need_no_gpu(carry: Path) -> None:
    facts = dataclasses.replace(FACTS, architecture=None)
    assert open_all(carry, facts, small=True).refusals == {}


def damage(carry: Path) -> None:
    with (carry / "te.tar.xz").open("r+b") as file:
        file.write(b"damage")


def truncate_with_its_checksum(carry: Path) -> None:
    """A file that was damaged before its checksum was taken."""
    file = carry / "te.tar.xz"
    file.write_bytes(file.read_bytes()[:70])
    manifest = json.loads((carry / "manifest.json").read_text())
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest["archives"]["te"]["sha256"] = checksum
    (carry / "manifest.json").write_text(json.dumps(manifest))


def leave_its_folder(carry: Path) -> None:
    manifest = json.loads((carry / "manifest.json").read_text())
    archive = write_archive(carry / "te.tar.xz", "te", member="../../outside.py")
    manifest["archives"]["te"] = archive
    (carry / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (damage, "is damaged"),
        (lambda carry: (carry / "te.tar.xz").unlink(), "cannot be read"),
        (truncate_with_its_checksum, "cannot be unpacked"),
        (leave_its_folder, "cannot be unpacked"),
    ],
)
def test_a_damaged_archive_is_left_out(
    carry: Path, harm: Callable[[Path], object], reason: str
) -> None:
    harm(carry)
    archives = open_all(carry)
    assert archives.refusals.keys() == {"te"} and reason in archives.refusals["te"]
    assert list(Path(tempfile.gettempdir()).rglob("outside.py")) == []
    names = {path.name for path in archives.paths["base"].parent.iterdir()}
    assert names == {path.name for path in archives.paths.values()}, "nothing half unpacked"


def test_too_little_space_is_named(carry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=1 << 30, used=974 << 20, free=50 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refusals = open_all(carry).refusals
    assert refusals.keys() == set(NAMES)
    assert "no space left on device" in refusals["base"] and "TMPDIR" in refusals["base"]


def test_an_unpacking_that_was_killed_is_done_again(carry: Path) -> None:
    manifest = read_manifest(carry)
    half = open_all(carry).paths["te"]
    half.rename(half.with_name(f".{half.name}"))  # as a killed call leaves it
    (half.with_name(f".{half.name}") / "package.py").write_text("half")
    archives = open_archives(manifest, ["te"], FACTS, small=False, log=lambda _: None)
    assert (archives.paths["te"] / "package.py").read_text() == "NAME = 'te'\n"


@pytest.mark.slow
def test_a_folder_that_others_can_change_is_refused(carry: Path, tmp_path: Path) -> None:
    """Its packages would run with this user's rights."""
    folder = open_all(carry).paths["te"].parent
    folder.chmod(0o777)
    options = ["--carry", str(carry), "--small", "--only", "quantize"]
    result = start_gpu_check(
        *options,
        "--out",
        str(tmp_path / "out"),
        cwd=tmp_path,
        TMPDIR=str(folder.parent),
    )
    assert result.returncode == 2 and "can be changed by others" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [None, "no json", "[]", '{"archives": {}}', '{"archives": {"base": 1}}']
)
def test_a_folder_without_a_manifest_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    result = start_gpu_check("--carry", str(tmp_path), "--out", str(tmp_path / "out"), cwd=tmp_path)
    assert result.returncode == 2
    assert "manifest.json" in result.stderr and "make gpu-carry" in result.stderr
    assert "Traceback" not in result.stderr


WHERE = """import json, sys
values = {"te": "", "base": ""}
for path in sys.path:
    try:
        text = open(path + "/package.py").read()
    except OSError:
        continue
    values[text.split("'")[1]] = "on the path"
print("GPU-CHECK " + json.dumps({"status": "passed", "reason": "", "values": values}))
"""
BOTH = ("base", "te")
TE_STAGES = {
    "machine": Stage(60, "machine", archives=BOTH, needs=(), compiles=False),
    "train": Stage(60, "train", archives=BOTH, compiles=False),
    "fp8_training": Stage(60, "fp8_training", archives=BOTH, needs=BOTH, compiles=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["", "code 1: no kernel image is available"])
def test_stages_run_without_a_library_that_the_driver_refuses(
    carry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    folder = tmp_path / "tests" / "lab" / "gpu_stages"
    folder.mkdir(parents=True)
    for name in TE_STAGES:
        (folder / f"{name}.py").write_text(WHERE)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "STAGES", TE_STAGES)
    monkeypatch.setattr(check, "read_facts", lambda _: FACTS)
    monkeypatch.setattr(check, "transformer_engine_problem", lambda _: problem)
    assert check.main(["--carry", str(carry), "--out", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out/check.json").read_text())
    machine, train, fp8 = record["stages"]
    assert train["values"] == {"base": "on the path", "te": "" if problem else "on the path"}
    assert ("te" in record["archives"]) and "engine" not in record["archives"]
    assert machine["values"]["archives"] == record["archives"]
    assert fp8["status"] == ("skipped" if problem else "passed")
    assert problem in fp8["reason"] and problem in record["archives"]["te"]
