"""Text to token ids and back, without transformers or torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
import tokenizers

from megatron_rl.contracts.exit_codes import ExitCode, Failure

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_REMEDY = "take the file published with the model, or save it again with save_pretrained"


class TokenizerError(Failure, ValueError):
    """The tokenizer's files are missing or broken, or it does not fit the model."""

    exit_code = ExitCode.BAD_DATA


class UnknownText(ValueError):
    """A text holds characters that the tokenizer has no token for."""


class Tokenizer:
    """A `tokenizer.json` with its end-of-sequence ids.

    eos_ids: ids that end a response, ascending; empty when the files name none
    (`check_matches_model` refuses that).
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_ids: Iterable[int]) -> None:
        self._backend = backend
        self._vocabulary = frozenset(backend.get_vocab(with_added_tokens=True).values())
        self._unknown_id = _unknown_id(backend)
        self.eos_ids = tuple(sorted(set(eos_ids)))

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Load a directory in Hugging Face format.

        Raises `TokenizerError` when its files are missing or broken.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{directory} holds no tokenizer.json. A tokenizer in the fast format is needed: save it once with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except (
            Exception
        ) as error:  # the library raises plain Exception for whatever is wrong with the file
            raise TokenizerError(f"{file} cannot be read: {error}; {_REMEDY}") from error
        return cls(backend, _eos_ids(directory, backend))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""
        return max(self._vocabulary, default=-1) + 1

    @property
    def longest_token(self) -> int:
        """Characters of the longest token, special tokens included."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)

    def has_same_ids(self, other: Tokenizer) -> bool:
        """Whether both give every token the same id."""
        return bool(self._backend.get_vocab(True) == other._backend.get_vocab(True))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, no special tokens added.

        Raises `UnknownText` naming characters without a token.
        """
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except (
            Exception
        ) as error:  # a word-level model without an unknown token raises plain Exception
            raise UnknownText(f"the tokenizer cannot encode {text[:80]!r}: {error}") from error
        ids: list[int] = encoding.ids
        covered = sum(end - start for start, end in encoding.offsets)
        if covered < len(text) or self._unknown_id in ids:
            unknown = self._unknown_characters(text)
            if unknown:
                raise UnknownText(
                    f"the tokenizer has no token for {', '.join(map(repr, unknown[:8]))}"
                )
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without end-of-sequence tokens at its end; an id without a token reads
        as U+FFFD.
        """
        end = len(ids)
        while end and ids[end - 1] in self.eos_ids:
            end -= 1
        parts = []
        for known, run in groupby(ids[:end], key=self._vocabulary.__contains__):
            members = list(run)
            parts.append(
                self._backend.decode(members, skip_special_tokens=False)
                if known
                else REPLACEMENT * len(members)
            )
        return "".join(parts)

    def _unknown_characters(self, text: str) -> list[str]:
        """Characters that, encoded alone, give the unknown token or nothing; white space may give
        nothing.
        """
        unknown = []
        for character in sorted(set(text)):
            ids = self._backend.encode(character, add_special_tokens=False).ids
            if self._unknown_id in ids or (not ids and not character.isspace()):
                unknown.append(character)
        return unknown


def check_matches_model(
    tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Iterable[int] = ()
) -> None:
    """Raise `TokenizerError` unless the tokenizer fits a model.

    vocab_size: rows of the model's embedding; a tokenizer may have fewer ids (models pad), never
    more. eos_ids: the end-of-sequence ids that the model's config.json names, empty when it names
    none.
    """
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's vocabulary ends at "
            f"{vocab_size - 1}. They belong to different models: use the tokenizer the model was trained with"
        )
    if not tokenizer.eos_ids:
        raise TokenizerError(
            "the tokenizer has no end-of-sequence token, so no response would ever end. Name one as "
            "eos_token in tokenizer_config.json or as eos_token_id in generation_config.json"
        )
    expected = set(eos_ids)
    if expected and expected.isdisjoint(tokenizer.eos_ids):
        raise TokenizerError(
            f"config.json ends sequences with {sorted(expected)}, the tokenizer with "
            f"{list(tokenizer.eos_ids)}. They belong to different models: use the tokenizer the model was trained with"
        )


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    model = json.loads(backend.to_str())["model"]
    token = model.get("unk_token")
    if token is None and isinstance(model.get("unk_id"), int):  # unigram models name the id
        return int(model["unk_id"])
    return backend.token_to_id(token) if isinstance(token, str) else None


class _AddedToken(msgspec.Struct):
    content: str


class _Ends(msgspec.Struct):
    eos_token: str | _AddedToken | None = None  # tokenizer_config.json
    eos_token_id: int | list[int] | None = None  # generation_config.json


def _eos_ids(directory: Path, backend: tokenizers.Tokenizer) -> set[int]:
    """Ids that tokenizer_config.json (one token) and generation_config.json (one id or several) end
    a response with.
    """
    found: set[int] = set()
    for file in (directory / "tokenizer_config.json", directory / "generation_config.json"):
        ends = _read_ends(file)
        found.update(
            [ends.eos_token_id] if isinstance(ends.eos_token_id, int) else ends.eos_token_id or ()
        )
        if ends.eos_token is not None:
            text = (
                ends.eos_token.content
                if isinstance(ends.eos_token, _AddedToken)
                else ends.eos_token
            )
            token_id = backend.token_to_id(text)
            if token_id is None:
                raise TokenizerError(
                    f"{file}: eos_token={text!r} is not in the vocabulary; {_REMEDY}"
                )
            found.add(token_id)
    return found


def _read_ends(file: Path) -> _Ends:
    try:
        return msgspec.convert(json.loads(file.read_bytes()), _Ends) if file.is_file() else _Ends()
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}; {_REMEDY}") from error
