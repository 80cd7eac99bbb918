"""Text to token ids and back, without transformers or torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=>,. "
_PAD, _EOS, _UNKNOWN = "<pad>", "<eos>", "<unk>"


class TokenizerError(ValueError):
    """The tokenizer's files are missing or broken, or it does not fit the model."""


class UnknownText(ValueError):
    """A text holds characters that the tokenizer has no token for."""


class Tokenizer:
    """A `tokenizer.json` with its end-of-sequence ids.

    eos_ids: ids that end a response, ascending; empty when the files name none (`check_matches_model` refuses that).
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_ids: Iterable[int]) -> None:
        self._backend = backend
        self._vocabulary = frozenset(backend.get_vocab(with_added_tokens=True).values())
        self._unknown_id = _unknown_id(backend)
        self.eos_ids = tuple(sorted(set(eos_ids)))

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Load a directory in Hugging Face format. Raises `TokenizerError` when its files are missing or broken."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"model.path={path}: there is no tokenizer.json in it. A tokenizer in the fast format is needed: "
                "save it once with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
            raise TokenizerError(f"model.path={path}: tokenizer.json cannot be read: {error}") from error
        return cls(backend, _eos_ids(directory, backend))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""
        return max(self._vocabulary, default=-1) + 1

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, no special tokens added. Raises `UnknownText` naming characters without a token."""
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except Exception as error:  # a word-level model without an unknown token raises plain Exception
            raise UnknownText(f"the tokenizer cannot encode {text[:80]!r}: {error}") from error
        ids: list[int] = encoding.ids
        covered = sum(end - start for start, end in encoding.offsets)
        if covered < len(text) or self._unknown_id in ids:
            unknown = self._unknown_characters(text)
            if unknown:
                raise UnknownText(f"the tokenizer has no token for {', '.join(map(repr, unknown[:8]))}")
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without end-of-sequence tokens at its end; an id without a token reads as U+FFFD."""
        end = len(ids)
        while end and ids[end - 1] in self.eos_ids:
            end -= 1
        parts = []
        for known, run in groupby(ids[:end], key=self._vocabulary.__contains__):
            members = list(run)
            parts.append(
                self._backend.decode(members, skip_special_tokens=False) if known else REPLACEMENT * len(members)
            )
        return "".join(parts)

    def _unknown_characters(self, text: str) -> list[str]:
        """Characters that, encoded alone, give the unknown token or nothing; white space may give nothing."""
        unknown = []
        for character in sorted(set(text)):
            ids = self._backend.encode(character, add_special_tokens=False).ids
            if self._unknown_id in ids or (not ids and not character.isspace()):
                unknown.append(character)
        return unknown


def check_matches_model(tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Iterable[int] = ()) -> None:
    """Raise `TokenizerError` unless the tokenizer fits a model.

    vocab_size: rows of the model's embedding; a tokenizer may have fewer ids (models pad), never more. eos_ids: the
    end-of-sequence ids that the model's config.json names, empty when it names none.
    """
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"model.path: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's vocabulary ends at "
            f"{vocab_size - 1}. They belong to different models: use the tokenizer the model was trained with"
        )
    if not tokenizer.eos_ids:
        raise TokenizerError(
            "model.path: the tokenizer has no end-of-sequence token, so no response would ever end. Name one as "
            "eos_token in tokenizer_config.json or as eos_token_id in generation_config.json"
        )
    expected = set(eos_ids)
    if expected and expected.isdisjoint(tokenizer.eos_ids):
        raise TokenizerError(
            f"model.path: config.json ends sequences with {sorted(expected)}, the tokenizer with "
            f"{list(tokenizer.eos_ids)}. They belong to different models: use the tokenizer the model was trained with"
        )


def write_character_tokenizer(directory: str | Path, characters: str = CHARACTERS) -> None:
    """Write tokenizer.json and tokenizer_config.json of a tokenizer with one token per character.

    Ids: 0 `<pad>`, 1 `<eos>`, 2 `<unk>`, then the characters in order; the default alphabet makes a vocabulary of 48.
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
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _PAD,
        "eos_token": _EOS,
        "unk_token": _UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    model = json.loads(backend.to_str())["model"]
    token = model.get("unk_token")
    if token is None and isinstance(model.get("unk_id"), int):  # unigram models name the id
        return int(model["unk_id"])
    return backend.token_to_id(token) if isinstance(token, str) else None


def _eos_ids(directory: Path, backend: tokenizers.Tokenizer) -> set[int]:
    """Ids that tokenizer_config.json (one token) and generation_config.json (one id or several) end a response with."""
    found: set[int] = set()
    token = _read_json(directory / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        token_id = backend.token_to_id(text)
        if token_id is None:
            raise TokenizerError(f"{directory}/tokenizer_config.json: eos_token {text!r} is not in the vocabulary")
        found.add(token_id)
    ids = _read_json(directory / "generation_config.json").get("eos_token_id")
    found.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
    return found


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file}: expected a JSON object")
    return content
