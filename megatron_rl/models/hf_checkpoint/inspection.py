"""The start checkpoint: a supported model, whole weight files and a tokenizer that belongs to it."""

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
    """What is wrong with a checkpoint.

    remedy may be empty when the rule's text already holds it.
    """

    rule: str
    remedy: str = ""


def inspect_checkpoint(
    path: str, *, weights: bool = True
) -> tuple[ModelShape | None, list[Defect]]:
    """The model's shape, None when it cannot be read, and what is wrong with the checkpoint.

    weights False: the model starts from random weights; config.json and the tokenizer are enough.
    """
    directory = Path(path)
    if (rule := path_problem(path, folder=True)) is not None:
        return None, [
            Defect(
                rule,
                "Give a local directory in Hugging Face format; nothing is downloaded from a hub",
            )
        ]
    try:
        shape = read_shape(directory)
    except ModelConfigError as error:
        return None, [Defect(str(error))]
    problems = _check_tokenizer(directory, shape)
    return shape, [*(_check_weights(directory) if weights else ()), *problems]


def _check_weights(directory: Path) -> Iterator[Defect]:
    """At most one problem: a copy that broke off has many damaged files, and one says it."""
    try:
        check_weight_files(directory)
    except DamagedWeights as error:
        yield Defect(str(error), "Copy or download it again, or convert it with save_pretrained")


def _check_tokenizer(directory: Path, shape: ModelShape) -> Iterator[Defect]:
    try:
        tokenizer = Tokenizer.from_directory(directory)
        check_matches_model(tokenizer, vocab_size=shape.vocab_size, eos_ids=shape.eos_token_ids)
    except TokenizerError as error:
        yield Defect(str(error))
