"""The search for places that only a GPU executes, and the record of their execution."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from tests.lab.pretended_device.branches.device_conditions import value_on_gpu
from tests.lab.pretended_device.branches.finder import find_in_texts
from tests.lab.pretended_device.branches.recorder import BranchRecorder


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tensor.is_cuda", True),
        ("not tensor.is_cuda", False),
        ("tensor.is_cpu", False),
        ("device.type == 'cuda'", True),
        ("'cuda' != device.type", False),
        ("device.type == 'cpu'", False),
        ("device in ('cuda', 'cpu')", None),
        ("torch.cuda.is_available() and size > 0", True),
        ("size > 0 or not torch.cuda.is_available()", False),
        ("(backend == 'nccl') != (device is not None and device.type == 'cuda')", False),
        ("get_backend(group) == Backend.NCCL", True),
        ("on_gpu", True),
        ("known", False),
        ("torch.cuda.device_count() > 1", None),
        ("size > 0", None),
    ],
)
def test_conditions_have_their_value_on_a_gpu(text: str, value: bool | None) -> None:
    assert value_on_gpu(ast.parse(text, mode="eval").body, {"known": False}) is value


def places_in(**texts: str) -> list[str]:
    files = find_in_texts({f"p/{name}.py": text for name, text in texts.items()})
    return sorted(str(place) for file in files.values() for place in file.places.values())


def test_conditions_and_expressions_are_found_and_annotations_are_not() -> None:
    text = """
def f(device: Literal["cuda"], size):
    is_large = size > 3
    on_device = device == "cuda"
    if on_device:
        torch.cuda.set_device(device)
    name = "nccl" if size else "gloo"
    return [x for x in size if x.is_cuda]
DEVICES = ("cpu", "cuda")
"""
    assert places_in(a=text) == [
        "p/a.py f: 'nccl'",
        "p/a.py f: device == 'cuda' is True",
        "p/a.py f: on_device is True",
        "p/a.py f: torch.cuda.set_device",
        "p/a.py f: x.is_cuda is True",
    ]


def test_functions_that_a_gpu_alone_reaches_are_found() -> None:
    """`both` is also called elsewhere, and `helper` only by `only`."""
    first = """
from p.b import Digest
def f(x):
    if not x.is_cuda:
        return both(x)
    match x:
        case "triton":
            launch(x)
    only(x)
    return Digest(), both(x)
def both(x): pass
def only(x): helper(x)
def helper(x): pass
def launch(x): pass
"""
    second = """
class Digest:
    def update(self): return _mix()
def _mix(): pass
"""
    third = "def _mix(): pass\n\ndef g(): return _mix()\n"
    places = places_in(a=first, b=second, c=third)
    functions = [place for place in places if ":" not in place]
    assert functions == [
        "p/a.py helper",
        "p/a.py launch",
        "p/a.py only",
        "p/b.py Digest.update",
        "p/b.py _mix",
    ]


def test_only_executed_places_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sglang_bridge"
    folder.mkdir()
    text = '''"""A module."""
from __future__ import annotations

def only(x):
    """Return a number."""
    return 3

def f(x):
    if x == "cuda":
        return only(x)
    return "nccl" if x == "never" else len(x)
'''
    (folder / "module_with_places.py").write_text(text)
    recorder = BranchRecorder(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [recorder, *sys.meta_path])
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("module_with_places")
    try:
        assert (module.f("cpu"), module.only.__doc__) == (3, "Return a number.")
        assert recorder.executed_places == set()
        assert module.f("cuda") == 3
        assert sorted(place.text for place in recorder.executed_places) == ["", "x == 'cuda'"]
        recorder.write(tmp_path / "out")
        (file,) = (tmp_path / "out").iterdir()
        assert "x == 'cuda' is True" in file.read_text()
    finally:
        del sys.modules["module_with_places"]


def test_modules_must_be_imported_after_the_recorder(tmp_path: Path) -> None:
    folder = tmp_path / "sglang_bridge"
    folder.mkdir()
    file = folder / "early.py"
    file.write_text("def f(x): return x.is_cuda\n")
    module = type(sys)("early")
    module.__file__ = str(file)
    sys.modules["early"] = module
    try:
        with pytest.raises(RuntimeError, match="early"):
            BranchRecorder(tmp_path).install(tmp_path)
    finally:
        del sys.modules["early"]
