"""A key costs few lines: its declaration, its messages and rules, and what hands it on."""

from dataclasses import fields
from pathlib import Path

from megatron_rl.config.curriculum import Entry, Until
from megatron_rl.config.keys import INNER, declared_keys

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES_PER_KEY, MOST_BUILD_LINES = 10.0, 100


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_lines_of_configuration_code_per_key() -> None:
    """Every file of the configuration and what builds a run, over all keys of all algorithms."""
    build = lines_of(ROOT / "megatron_rl" / "run" / "build.py")
    lines = build + sum(lines_of(file) for file in (ROOT / "megatron_rl" / "config").rglob("*.py"))
    sections = {key.partition(".")[0] for key in declared_keys() if "." in key} | set(INNER)
    keys = [key for key in declared_keys() if key not in sections]
    keys += [field.name for of_a_stage in (Entry, Until) for field in fields(of_a_stage)]
    assert build <= MOST_BUILD_LINES
    assert lines / len(keys) <= MOST_LINES_PER_KEY, f"{lines} lines for {len(keys)} keys"
