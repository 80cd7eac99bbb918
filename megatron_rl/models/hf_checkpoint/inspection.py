"""Checks a start checkpoint: its model, weight files and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.contracts.paths import path_problem
from megatron_rl.models.families import read_shape
from megatron_rl.models.hf_checkpoint.weight_files import DamagedWeights, check_weight_files
from megatron_rl.models.shape import ModelConfigError, ModelShape
from megatron_rl.models.tokenizer import Tokenizer, TokenizerError, check_matches_model


@dataclass(frozen=True)
class Defect:
    """A defect of a checkpoint.

    remedy: empty if the rule contains it.
    """

    rule: str
    remedy: str = ""


def inspect_checkpoint(
    path: str, *, weights: bool = True
) -> tuple[ModelShape | None, list[Defect]]:
    """Return the model's shape, None if it cannot be read, and the checkpoint's defects.

    weights: False for a model with random weights, which requires no weight files.
    """
    directory = Path(path)
    if (rule := path_problem(path, folder=True)) is not None:
        remedy = "Give a local directory in Hugging Face format; nothing is downloaded from a hub"
        return None, [Defect(rule, remedy)]
    try:
        shape = read_shape(directory)
    except ModelConfigError as error:
        return None, [Defect(str(error))]
    defects = list(_check_weights(directory)) if weights else []
    return shape, [*defects, *_check_tokenizer(directory, shape)]


def _check_weights(directory: Path) -> Iterator[Defect]:
    """Yield at most one defect, because an incomplete copy has many with the same cause."""
    try:
        check_weight_files(directory)
    except DamagedWeights as error:
        yield Defect(str(error), "Copy or download it again, or convert it with save_pretrained")


def _check_tokenizer(directory: Path, shape: ModelShape) -> Iterator[Defect]:
    try:
        tokenizer = Tokenizer.from_directory(directory)
        check_matches_model(tokenizer, vocab_size=shape.vocab_size)
    except TokenizerError as error:
        yield Defect(str(error))
