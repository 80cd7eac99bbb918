import sys
from pathlib import Path

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.plugins import PluginError, load_plugin, missing_module

MODULE = """
import sys
from collections import OrderedDict

class Limit:
    def __init__(self, limit: int, *, factor: float = 0.5) -> None:
        if limit < 0:
            raise ValueError("limit must not be negative")
        self.settings = limit, factor

class Anything:
    def __init__(self, **settings: int) -> None:
        self.settings = settings

def double(limit):
    return 2 * limit

NUMBER = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of a user's own with a module `mine`, on the path, and forgotten afterwards."""
    folder = tmp_path / "own"
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "deep" / "deeper" / "mine.py").write_text("class Name: pass\n")
    (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "own"


@pytest.fixture
def mine(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "needs.py").write_text("import not_to_be_found\n")
    (tmp_path / package / "broken.py").write_text("1 / 0\n")
    before = set(sys.modules)
    yield f"{package}.mine"
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_class_or_a_function_is_called_with_its_options(mine: str) -> None:
    assert load_plugin("reward.name", f"{mine}:Limit", {"limit": 3}).settings == (3, 0.5)
    assert load_plugin("reward.name", f"{mine}:Anything", {"a": 1, "b": 2}).settings == {
        "a": 1,
        "b": 2,
    }
    assert load_plugin("reward.name", f"{mine}:double", {"limit": 3}) == 6
    assert list(load_plugin("reward.name", "collections:OrderedDict", {"a": 1})) == ["a"], (
        "no signature"
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "no_such.mine:Limit",
            {},
            r"^reward\.name=.*: there is no module no_such\. Put .* PYTHONPATH",
        ),
        ("own.mime:Limit", {}, r"there is no module own\.mime\. Put the folder"),
        ("own.mine.deeper:Limit", {}, r"there is no module own\.mine\.deeper"),
        ("own.needs:Limit", {}, r"own\.needs needs not_to_be_found, which is not installed"),
        (
            "own.broken:Limit",
            {},
            r"importing own\.broken fails: ZeroDivisionError: division .*broken\.py:1",
        ),
        ("own.mine:Limt", {}, r"mine\.py has no class Limt\. Did you mean Limit\?"),
        ("own.mine:Other", {}, r"mine\.py has no class Other\. It has: Limit, Anything$"),
        ("own.mine", {}, r"reward\.name=own\.mine: .* is named package\.module:Name"),
        (
            "own.mine:Limit",
            {"limit": 1, "factr": 2},
            r"^reward\.options\.factr: .*Limit\(limit, \*, factor=0\.5",
        ),
        ("own.mine:Limit", {"limit": 1, "factr": 2}, r"has no such option\. Did you mean factor\?"),
        (
            "own.mine:Limit",
            {"factor": 1},
            r"^reward\.options\.limit: missing\. .*Limit\(limit, .* needs it",
        ),
        (
            "own.mine:Limit",
            {"limit": -1},
            r"^reward\.options: .*Limit\(limit=-1\) refuses: limit must not be neg",
        ),
        (
            "own.mine:Limit",
            {"limit": "x"},
            r"^reward\.options: .*Limit\(limit='x'\) refuses: '<' not supported",
        ),
        ("own.mine:NUMBER", {}, r"refuses: 'int' object is not callable"),
    ],
)
def test_what_does_not_open_is_named(
    mine: str, name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        load_plugin("reward.name", name, options)
    assert caught.value.exit_code is ExitCode.REFUSED
    assert isinstance(caught.value, ValueError)


def test_what_lacks_a_method_is_refused(mine: str) -> None:
    assert load_plugin("reward.name", f"{mine}:Limit", {"limit": 1}, methods={"__str__": ()})
    with pytest.raises(
        PluginError,
        match=r"^reward\.name=.*:Limit: `settings` is no method but tuple\. Write a method",
    ):
        load_plugin(
            "reward.name", f"{mine}:Limit", {"limit": 1}, methods={"settings": (), "score": ()}
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own.mine:Limit", None),
        ("json:loads", None),
        ("own.mime:Limit", "There is no module own.mime"),
        ("own.mine.deeper:Limit", "There is no module own.mine.deeper"),
        ("no_such.mine:Limit", "There is no module no_such.mine"),
        ("own.deep.deeper.mine:Name", None),
    ],
)
def test_a_missing_module_is_found_out_without_importing_its_package(
    package: str, name: str, reason: str | None
) -> None:
    assert missing_module(name) == reason
    assert package not in sys.modules
