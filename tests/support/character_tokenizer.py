"""The tokenizer of the shipped tiny models: one token per character."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=>,. "
_PAD = "<pad>"
_EOS = "<eos>"
_UNKNOWN = "<unk>"
_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": _PAD,
    "eos_token": _EOS,
    "unk_token": _UNKNOWN,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1024,
}


def write_character_tokenizer(directory: str | Path, characters: str = CHARACTERS) -> None:
    """Write tokenizer.json and tokenizer_config.json of a tokenizer with one token per character.

    Ids: 0 `<pad>`, 1 `<eos>`, 2 `<unk>`, then the characters in order; the default alphabet makes a
    vocabulary of 48.
    """
    vocabulary = {token: i for i, token in enumerate([_PAD, _EOS, _UNKNOWN, *characters])}
    if len(vocabulary) != len(characters) + 3:
        raise ValueError(f"characters={characters!r}: every character must occur once")
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([_PAD, _EOS, _UNKNOWN])
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    backend.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(_SETTINGS, indent=2) + "\n", encoding="utf-8"
    )
