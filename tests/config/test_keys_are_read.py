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


def section_names(section: str) -> tuple[set[str], str]:
    """The names of a section: its classes and its attribute, empty for the whole configuration."""
    classes = {section: [INNER_SECTIONS.get(section, SECTIONS.get(section, Configuration))]}
    classes["algo"] = [AlgoSettings, *ALGORITHMS.values()]
    classes["engine"] = [SECTIONS["engine"], ServerSettings]
    return {cls.__name__ for cls in classes[section]}, section.rpartition(".")[2]


def unread_keys(sources: Mapping[str, str]) -> list[str]:
    """The keys that no module reads. sources: text by file name."""
    texts = [text for name, text in sources.items() if not name.startswith(PASSES_SETTINGS_ON)]
    keys = [
        key.rpartition(".")
        for key in declared_keys()
        if key not in SECTIONS and key not in INNER_SECTIONS and key != "algo"
    ]
    words = [set(re.findall(r"\w+", text)) for text in texts]
    attributes = [set(re.findall(r"\.(\w+)", text)) for text in texts]
    read_attributes = [set(re.findall(r"\.(\w+)\b(?!\s*=[^=])", text)) for text in texts]

    def is_read(section: str, name: str) -> bool:
        classes, attribute = section_names(section)
        return any(
            name in read_attributes[i] and (classes & words[i] or attribute in attributes[i])
            for i in range(len(texts))
        )

    return [f"{section}{dot}{name}" for section, dot, name in keys if not is_read(section, name)]


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
        "engine.ep": "def f(settings: ServerSettings): return settings.ep",
        "seed": "def f(c: Configuration): return c.seed",
    }
    for key, source in sources.items():
        assert key not in unread_keys({"megatron_rl/a.py": source}), key
