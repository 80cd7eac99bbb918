"""The pinned versions keep what the packages that need them declare."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"


def pins(name: str) -> dict[str, str]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    found = [
        re.fullmatch(r"([\w.-]+)==(\S+)", line)
        for line in lines
        if line and not line.startswith("#")
    ]
    return {canonicalize_name(match[1]): match[2] for match in found if match is not None}


@pytest.mark.parametrize("needs", ["megatron-core", "sglang"])
def test_the_gpu_image_takes_versions_that_these_packages_declare(needs: str) -> None:
    """Among them Transformer Engine: Megatron's layers call its internals, and a newer one may have
    moved them.
    """
    installed, chosen = importlib.metadata.requires(needs), pins("gpu-constraints.txt")
    declared = [Requirement(text) for text in installed or ()]
    ranges = [(r.name, r.specifier) for r in declared if canonicalize_name(r.name) in chosen]
    assert ranges, "one of the versions is there because of this package"
    outside = {
        name: str(allowed)
        for name, allowed in ranges
        if chosen[canonicalize_name(name)] not in allowed
    }
    assert outside == {}
