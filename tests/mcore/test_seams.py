"""Names of Megatron-Core that it does not promise to keep exist, and one module touches them."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.mcore import seams

ROOT = Path(__file__).resolve().parents[2]
NAMES = [(module, name) for module, names in seams.SEAMS.items() for name in names]
PRIVATE_NAMES = {name.rpartition(".")[2] for _, name in NAMES if name.rpartition(".")[2][0] == "_"}
SOURCES = [
    path
    for package in ("megatron_rl", "launch", "sglang_bridge", "kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path != Path(seams.__file__)
]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=".".join)
def test_the_name_exists(megatron: Any, module: str, name: str) -> None:
    owner = importlib.import_module(module)
    for part in name.split("."):
        owner = getattr(owner, part)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=".".join)
def test_the_name_was_read_in_the_installed_version(module: str, name: str) -> None:
    """Read the name in another version before its range names that version."""
    first, last = (read_version(text) for text in seams.SEAMS[module][name])
    assert first <= read_version(importlib.metadata.version("megatron-core")) <= last


def read_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def touches(source: str) -> Iterator[str]:
    """Private names of Megatron that a source touches, and names of it that the source replaces."""
    tree = ast.parse(source)
    imported = dict(imported_names(tree))
    yield from (name for name in imported.values() if "._" in name)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        is_of_megatron = owner in imported or owner.startswith("megatron.")
        is_replaced = is_of_megatron and not isinstance(node.ctx, ast.Load)
        is_private = is_of_megatron and node.attr.startswith("_")
        if is_replaced or is_private or node.attr in PRIVATE_NAMES:
            yield f"{imported.get(owner, owner)}.{node.attr}"


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that a source has of Megatron, with what each stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            pairs = [(alias.asname or alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            pairs = [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        else:
            continue
        yield from ((name, what) for name, what in pairs if what.startswith("megatron."))


def test_no_other_module_touches_such_a_name() -> None:
    assert SOURCES
    found = {str(path.relative_to(ROOT)): [*touches(path.read_text())] for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from megatron.core.utils import _private", "megatron.core.utils._private"),
        ("import megatron.core.utils as utils\nutils._private()", "megatron.core.utils._private"),
        ("import megatron.core.utils as u\nu.public = 1", "megatron.core.utils.public"),
        (
            "import megatron.core.utils\nmegatron.core.utils.public = 1",
            "megatron.core.utils.public",
        ),
        ("router._maintain_float32_expert_bias()", "router._maintain_float32_expert_bias"),
    ],
)
def test_touches_are_found(source: str, name: str) -> None:
    assert [*touches(source)] == [name]


def test_uses_of_public_names_are_none() -> None:
    source = "from megatron.core import utils\nmodel.name = utils.get_model_config(model)"
    assert [*touches(source)] == []


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_passes_with_and_without_gradients_weigh_experts_alike(megatron: Any, score: str) -> None:
    """Weights of several experts are divided by their sum, whose order decides its last bits."""
    import torch
    from megatron.core.transformer.moe import router

    logits = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))

    def weights() -> torch.Tensor:
        return router.topk_routing_with_score_function(logits, 8, score_function=score)[0]

    with torch.no_grad():
        without = weights()
    assert without.equal(weights()) and not without.requires_grad


def test_a_second_installation_sorts_nothing_twice(megatron: Any) -> None:
    from megatron.core.transformer.moe import router

    before = router.topk_routing_with_score_function
    seams.sort_chosen_experts()
    assert router.topk_routing_with_score_function is before
