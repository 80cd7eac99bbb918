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
    """Put a package `plugins` with a module `mine` on the path."""
    folder = tmp_path / "plugins"
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "deep" / "deeper" / "mine.py").write_text("class Name: pass\n")
    (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "plugins"


@pytest.fixture
def mine(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "needs.py").write_text("import not_to_be_found\n")
    (tmp_path / package / "broken.py").write_text("1 / 0\n")
    before = set(sys.modules)
    yield f"{package}.mine"
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_classes_and_functions_are_called_with_options(mine: str) -> None:
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
        ("plugins.mime:Limit", {}, r"there is no module plugins\.mime\. Put the folder"),
        ("plugins.mine.deeper:Limit", {}, r"there is no module plugins\.mine\.deeper"),
        (
            "plugins.needs:Limit",
            {},
            r"needs not_to_be_found, which is not installed",
        ),
        (
            "plugins.broken:Limit",
            {},
            r"importing plugins\.broken fails: ZeroDivisionError: division .*broken\.py:1",
        ),
        ("plugins.mine:Limt", {}, r"mine\.py has no class Limt\. Did you mean Limit\?"),
        ("plugins.mine:Other", {}, r"mine\.py has no class Other\. It has: Limit, Anything$"),
        ("plugins.mine", {}, r"reward\.name=plugins\.mine: .* is named package\.module:Name"),
        (
            "plugins.mine:Limit",
            {"limit": 1, "factr": 2},
            r"^reward\.options\.factr: .*Limit\(limit, \*, factor=0\.5",
        ),
        (
            "plugins.mine:Limit",
            {"limit": 1, "factr": 2},
            r"no such option\. Did you mean factor",
        ),
        (
            "plugins.mine:Limit",
            {"factor": 1},
            r"^reward\.options\.limit: missing\. .*Limit\(limit, .* requires it",
        ),
        (
            "plugins.mine:Limit",
            {"limit": -1},
            r"^reward\.options: .*Limit\(limit=-1\) refuses: limit must not be neg",
        ),
        (
            "plugins.mine:Limit",
            {"limit": "x"},
            r"^reward\.options: .*Limit\(limit='x'\) refuses: '<' not supported",
        ),
        ("plugins.mine:NUMBER", {}, r"refuses: 'int' object is not callable"),
    ],
)
def test_errors_name_the_key_and_the_cause(
    mine: str, name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PluginError, match=message) as error:
        load_plugin("reward.name", name, options)
    assert error.value.exit_code is ExitCode.REFUSED
    assert isinstance(error.value, ValueError)


def test_missing_method_is_refused(mine: str) -> None:
    assert load_plugin("reward.name", f"{mine}:Limit", {"limit": 1}, methods={"__str__": ()})
    with pytest.raises(
        PluginError,
        match=r"^reward\.name=.*:Limit: `settings` is not a method but tuple\. Define",
    ):
        load_plugin(
            "reward.name", f"{mine}:Limit", {"limit": 1}, methods={"settings": (), "score": ()}
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("plugins.mine:Limit", None),
        ("json:loads", None),
        ("plugins.mime:Limit", "There is no module plugins.mime"),
        ("plugins.mine.deeper:Limit", "There is no module plugins.mine.deeper"),
        ("no_such.mine:Limit", "There is no module no_such.mine"),
        ("plugins.deep.deeper.mine:Name", None),
    ],
)
def test_missing_module_imports_no_package(package: str, name: str, reason: str | None) -> None:
    assert missing_module(name) == reason
    assert package not in sys.modules
