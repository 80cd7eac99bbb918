"""Encodes and decodes text, without transformers or torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
import tokenizers

from megatron_rl.contracts.exit_codes import ExitCode, Failure

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece's vocabularies
_REMEDY = "take the file published with the model, or save it again with save_pretrained"
_OTHER_MODEL = "They belong to different models: use the tokenizer that the model was trained with"


class TokenizerError(Failure, ValueError):
    """The tokenizer's files are missing or broken, or it does not fit the model."""

    exit_code = ExitCode.BAD_DATA


class UnknownText(ValueError):
    """A text contains characters without a token."""


class Tokenizer:
    """A `tokenizer.json` with its end-of-sequence ids.

    eos_ids: ids that end a response, each once. The first one ends a text that holds no end: it is
    the tokenizer's `eos_token` if the files name one. Empty if they name none, which
    `check_matches_model` refuses.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_ids: Iterable[int]) -> None:
        self._backend = backend
        self._vocabulary = frozenset(backend.get_vocab(with_added_tokens=True).values())
        self._unknown_id = _unknown_id(backend)
        self.eos_ids = tuple(dict.fromkeys(eos_ids))

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Load a directory in Hugging Face format.

        Raises `TokenizerError` if its files are missing or broken, or name the ends of different
        models.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{directory} holds no tokenizer.json. The fast tokenizer format is required. "
                "Save it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for any broken file
            raise TokenizerError(f"{file} cannot be read: {error}; {_REMEDY}") from error
        return cls(backend, _eos_ids(directory, backend))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, including special tokens."""
        return max(self._vocabulary, default=-1) + 1

    @property
    def longest_token(self) -> int:
        """Number of characters of the longest token, including special tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)

    def has_same_ids(self, other: Tokenizer) -> bool:
        """Return whether both tokenizers give every token the same id."""
        return bool(self._backend.get_vocab(True) == other._backend.get_vocab(True))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without adding special tokens.

        Raises `UnknownText` naming characters without a token.
        """
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except Exception as error:  # a word-level model without an unknown token raises it
            raise UnknownText(f"the tokenizer cannot encode {text[:80]!r}: {error}") from error
        ids: list[int] = encoding.ids
        num_covered = sum(end - start for start, end in encoding.offsets)
        if num_covered < len(text) or self._unknown_id in ids:
            unknown = self._unknown_characters(text)
            if unknown:
                names = ", ".join(map(repr, unknown[:8]))
                raise UnknownText(f"the tokenizer has no token for {names}")
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without final end-of-sequence tokens.

        An id without a token becomes U+FFFD.
        """
        end = len(ids)
        while end and ids[end - 1] in self.eos_ids:
            end -= 1
        parts = []
        for is_token, run in groupby(ids[:end], key=self._vocabulary.__contains__):
            run_ids = list(run)
            if is_token:
                parts.append(self._backend.decode(run_ids, skip_special_tokens=False))
            else:
                parts.append(REPLACEMENT * len(run_ids))
        return "".join(parts)

    def token_text(self, token: int) -> str:
        """Return the text of one token, special tokens included.

        An id without a token, and bytes that form no character, become U+FFFD.
        """
        if token not in self._vocabulary:
            return REPLACEMENT
        text: str = self._backend.decode([token], skip_special_tokens=False)
        # Decoders of SentencePiece drop the space of the first token
        is_after_space = (self._backend.id_to_token(token) or "").startswith(_SPACE)
        return f" {text}" if is_after_space and not text.startswith(" ") else text

    def _unknown_characters(self, text: str) -> list[str]:
        """Return characters that give the unknown token, or no token, when encoded alone.

        White space without a token is not unknown.
        """
        unknown = []
        for character in sorted(set(text)):
            ids = self._backend.encode(character, add_special_tokens=False).ids
            if self._unknown_id in ids or (not ids and not character.isspace()):
                unknown.append(character)
        return unknown


def check_matches_model(tokenizer: Tokenizer, *, vocab_size: int) -> None:
    """Raise `TokenizerError` unless the tokenizer fits a model.

    vocab_size: rows of the model's embedding. It may exceed the tokenizer's ids, because models
    pad the embedding.
    """
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, "
            f"the model's vocabulary ends at {vocab_size - 1}. {_OTHER_MODEL}"
        )
    if not tokenizer.eos_ids:
        raise TokenizerError(
            "the tokenizer has no end-of-sequence token, so no response would end. Name one as "
            "eos_token in tokenizer_config.json or as eos_token_id in generation_config.json"
        )


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    model = json.loads(backend.to_str())["model"]
    token = model.get("unk_token")
    if token is None and isinstance(model.get("unk_id"), int):  # unigram models give the id instead
        return int(model["unk_id"])
    return backend.token_to_id(token) if isinstance(token, str) else None


class _AddedToken(msgspec.Struct):
    content: str


class _EosSettings(msgspec.Struct):
    eos_token: str | _AddedToken | None = None  # tokenizer_config.json
    eos_token_id: int | list[int] | None = None  # generation_config.json and config.json


def _eos_ids(directory: Path, backend: tokenizers.Tokenizer) -> list[int]:
    """Read the end-of-sequence ids: engines stop at each of them.

    tokenizer_config.json names one token. generation_config.json and config.json name one or
    several ids. Raises `TokenizerError` if config.json has none of the others.
    """
    own_ids = [
        *_read_eos_ids(directory / "tokenizer_config.json", backend),
        *_read_eos_ids(directory / "generation_config.json", backend),
    ]
    model_ids = _read_eos_ids(directory / "config.json", backend)
    if own_ids and model_ids and set(own_ids).isdisjoint(model_ids):
        raise TokenizerError(
            f"config.json ends sequences with {model_ids}, the tokenizer with {own_ids}. "
            f"{_OTHER_MODEL}"
        )
    return own_ids + model_ids


def _read_eos_ids(file: Path, backend: tokenizers.Tokenizer) -> list[int]:
    settings = _read_eos_settings(file)
    ids = settings.eos_token_id
    eos_ids = [ids] if isinstance(ids, int) else list(ids or ())
    if settings.eos_token is None:
        return eos_ids
    token = settings.eos_token
    text = token.content if isinstance(token, _AddedToken) else token
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise TokenizerError(f"{file}: eos_token={text!r} is not in the vocabulary; {_REMEDY}")
    return [token_id, *eos_ids]


def _read_eos_settings(file: Path) -> _EosSettings:
    if not file.is_file():
        return _EosSettings()
    try:
        return msgspec.convert(json.loads(file.read_bytes()), _EosSettings)
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}; {_REMEDY}") from error
