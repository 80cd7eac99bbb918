"""The start checkpoint: it exists, it is a Mixture-of-Experts model we can build, and its tokenizer belongs to it."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.refusal import Refusal
from megatron_rl.mcore.hf_config import ModelConfigError, MoeModelConfig, read_hf_config
from megatron_rl.tokenizer import Tokenizer, TokenizerError, check_matches_model


def inspect_model(path: str) -> tuple[MoeModelConfig | None, list[Refusal]]:
    """The model's shape, None when it cannot be read, and what is wrong with the checkpoint."""
    directory = Path(path)
    if not directory.is_dir():
        rule = "There is no such directory"
        if directory.exists():
            rule = "It is a file, not a directory"
        remedy = "Give a local directory in Hugging Face format; nothing is downloaded from a hub"
        return None, [Refusal("model.path", path, rule, remedy)]
    try:
        shape = read_hf_config(directory)
    except ModelConfigError as error:
        return None, [Refusal.from_error("model.path", path, error)]
    return shape, [*_check_weights(directory), *_check_tokenizer(directory, shape)]


def _check_weights(directory: Path) -> list[Refusal]:
    if any(directory.glob("*.safetensors")):
        return []
    rule = "The directory holds no *.safetensors file"
    return [Refusal("model.path", str(directory), rule, "Convert the weights with save_pretrained")]


def _check_tokenizer(directory: Path, shape: MoeModelConfig) -> list[Refusal]:
    try:
        tokenizer = Tokenizer.from_directory(directory)
        check_matches_model(tokenizer, vocab_size=shape.vocab_size, eos_ids=shape.eos_token_ids)
    except TokenizerError as error:
        return [Refusal.from_error("model.path", str(directory), error)]
    return []
