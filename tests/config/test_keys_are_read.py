"""The program reads every configuration key.

A key counts as read where its attribute is read in a module that names its section. This cannot
tell a use from a copy, so modules that only pass settings on do not count.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.config.algorithms import ALGORITHMS, AlgoSettings
from megatron_rl.config.keys import INNER_SECTIONS, SECTIONS, declared_keys
from megatron_rl.config.schema import Configuration
from sglang_bridge.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
PASSES_SETTINGS_ON = ("megatron_rl/config/", "megatron_rl/run/build.py")


def section_pattern(section: str) -> str:
    """A regular expression for the ways of naming a section: its attribute or its classes."""
    classes = {section: [INNER_SECTIONS.get(section, SECTIONS.get(section, Configuration))]}
    classes["algo"] = [AlgoSettings, *ALGORITHMS.values()]
    classes["engine"] = [SECTIONS["engine"], ServerSettings]
    names = [rf"\b{cls.__name__}\b" for cls in classes[section]]
    return "|".join([*names, rf"\.{section.rpartition('.')[2]}\b"] if section else names)


def unread_keys(sources: Mapping[str, str]) -> list[str]:
    """The keys that no module reads. sources: text by file name."""
    texts = [text for name, text in sources.items() if not name.startswith(PASSES_SETTINGS_ON)]
    unread = []
    for key in declared_keys():
        section, _, name = key.rpartition(".")
        if key in SECTIONS or key in INNER_SECTIONS or key == "algo":
            continue
        read = re.compile(rf"\.{name}\b(?!\s*=[^=])")
        naming = re.compile(section_pattern(section))
        if not any(naming.search(text) and read.search(text) for text in texts):
            unread.append(key)
    return unread


def test_every_key_is_read() -> None:
    files = [
        file
        for package in ("megatron_rl", "sglang_bridge")
        for file in (ROOT / package).rglob("*.py")
    ]
    assert unread_keys({str(file.relative_to(ROOT)): file.read_text() for file in files}) == []


def test_a_key_that_is_only_passed_on_or_written_is_reported() -> None:
    build = "def build(c: Configuration):\n    return Adam(lr=c.optimizer.lr)\n"
    assert "optimizer.lr" in unread_keys({"megatron_rl/run/build.py": build})
    write = "def f(settings: OptimizerSettings):\n    settings.lr = 1\n"
    assert "optimizer.lr" in unread_keys({"megatron_rl/a.py": write})
    elsewhere = "def f(other: Other):\n    return other.lr\n"
    assert "optimizer.lr" in unread_keys({"megatron_rl/a.py": elsewhere})


def test_ways_of_reading_a_key() -> None:
    sources = {
        "optimizer.lr": "def f(settings: OptimizerSettings): return settings.lr",
        "rollout.temperature": "def f(stage): return stage.rollout.temperature",
        "algo.kl.coef": "def f(s): return s.kl.coef",
        "algo.alpha": "def f(algo: EspoSettings): return algo.alpha",
        "engine.threads": "def f(settings: ServerSettings): return settings.threads",
        "seed": "def f(c: Configuration): return c.seed",
    }
    for key, source in sources.items():
        assert key not in unread_keys({"megatron_rl/a.py": source}), key
