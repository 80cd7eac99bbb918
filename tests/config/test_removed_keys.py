"""Keys of older configurations: refused on a command line, with what to do instead."""

from pathlib import Path

from megatron_rl.config.keys import declared_keys
from megatron_rl.config.removed_keys import REMOVED_KEYS
from tests.support.configurations import refusals


def test_each_removed_key_is_refused_with_its_remedy(checkpoint: Path) -> None:
    results = refusals(checkpoint, *[f"{key}=1" for key in REMOVED_KEYS])
    assert {result.key: result.remedy for result in results} == REMOVED_KEYS


def test_no_removed_key_is_declared() -> None:
    assert REMOVED_KEYS.keys() & declared_keys().keys() == set()
