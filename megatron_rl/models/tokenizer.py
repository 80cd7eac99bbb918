"""Encodes and decodes text, without transformers or torch."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path

import msgspec
import tokenizers

from megatron_rl.contracts.exit_codes import ExitCode, Failure

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece's vocabularies
# Stands before the name of a control token that is text. No text holds such a noncharacter.
_QUOTE = "\ufdd0"
# The unknown token of models without one. No vocabulary holds it: they raise, instead of leaving
# characters out.
_NO_TOKEN = "\ufdd1"
# At least one of these texts does not merge with what follows
_ANCHORS = ("\n", "=", ".", "0", "a")
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
        # Files of models for other uses may limit or fill up a text
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, tokenizers.models.BPE) and backend.model.unk_token is None:
            backend.model.unk_token = _NO_TOKEN
        self._backend = backend
        self._vocabulary = frozenset(backend.get_vocab(with_added_tokens=True).values())
        self._unknown_id = _unknown_id(backend)
        # The text that means this token itself. The name of a mere piece is text like any other.
        added_tokens = backend.get_added_tokens_decoder().items()
        names = [token.content for number, token in added_tokens if number == self._unknown_id]
        self._unknown_name = names[0] if names else ""
        self._control_tokens = _control_tokens(backend)
        # The longest one matches first
        control_names = sorted(self._control_tokens, key=len, reverse=True)
        self._control_names = re.compile("|".join(map(re.escape, control_names)) or r"(?!)")
        self._named = re.compile(f"{_QUOTE}?(?:{self._control_names.pattern})")
        self._adds_space = _adds_space(backend)
        self._is_dropped_by_character: dict[str, bool] = {}
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

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token, including special tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)

    def has_same_ids(self, other: Tokenizer) -> bool:
        """Return whether both tokenizers give every token the same id."""
        return bool(self._backend.get_vocab(True) == other._backend.get_vocab(True))

    def quote(self, text: str) -> str:
        """Return a text in which `encode` reads the names of control tokens as plain text.

        Control tokens are those that the tokenizer marks as special, and others such as `<|name|>`.
        """
        # A mark in the text itself would end the quotation.
        unmarked_text = re.sub(_QUOTE, REPLACEMENT, text)
        return self._control_names.sub(lambda match: _QUOTE + match[0], unmarked_text)

    def encode(self, text: str, *, at_most: int | None = None) -> tuple[int, ...]:
        """Return the token ids of a text, without adding special tokens.

        The names of control tokens become these tokens, except where `quote` has marked them.

        at_most: of a text with more tokens, the first ones are enough, but more than `at_most`.
        A megabyte of text takes seconds, in which no other thread runs.

        Raises `UnknownText` naming characters without a token.
        """
        if at_most is not None:
            beginning = text[: (at_most + 1) * self.longest_token]
            # Some tokens take the white space around them.
            first_ids = self.encode(beginning)
            if len(beginning) == len(text) or len(first_ids) > at_most:
                return first_ids
        return self._encode_whole(text)

    def _encode_whole(self, text: str) -> tuple[int, ...]:
        """Return all token ids of a text, as `encode` does."""
        self._refuse_dropped(text)
        backend = self._backend
        input_text = text
        unknown_name = self._unknown_name
        if _QUOTE in text:
            backend = self._renamed
            input_text = self._named.sub(_rename, text)
            unknown_name = self._renamed_piece(unknown_name)
        try:
            encoding = backend.encode(input_text, add_special_tokens=False)
        except Exception as error:  # a model without an unknown token raises it
            characters = self._unknown_characters(text)
            raise _unknown_text(characters, f"{text[:80]!r}: {error}") from error
        ids: list[int] = encoding.ids
        if self._unknown_id in ids:
            # The normalizer may have joined or divided characters. The spans refer to the text
            spans = {
                input_text[slice(*offsets)]
                for token, offsets in zip(ids, encoding.offsets, strict=True)
                if token == self._unknown_id
            }
            spans = {span for span in spans if span.strip() != unknown_name}
            if spans:
                names = self._unknown_characters("".join(spans)) or self._unknown_characters(text)
                raise _unknown_text(names or spans)
        return tuple(ids)

    def encode_continuation(self, text: str, *, at_most: int | None = None) -> tuple[int, ...]:
        """Return the token ids of a text that follows another text.

        Tokenizers of SentencePiece put a space before a text that stands alone.

        at_most: as for `encode`. Raises as `encode` does.
        """
        if not self._adds_space or not text:
            return self.encode(text, at_most=at_most)
        for anchor in _ANCHORS:
            try:
                beginning = self.encode(anchor)
            except UnknownText:
                continue
            limit = None if at_most is None else at_most + len(beginning)
            ids = self.encode(anchor + text, at_most=limit)
            if ids[: len(beginning)] == beginning:
                return ids[len(beginning) :]
        raise UnknownText(f"the tokenizer cannot encode {text[:80]!r} without a space before it")

    def encode_response(self, text: str, previous: int) -> tuple[int, ...]:
        """Return the token ids of a response, which end with an end-of-sequence token.

        previous: the token before the response. After a control token, the tokens are those that
        the whole conversation has there.

        The end is the first one in the text, or `eos_ids[0]` if the text holds none.

        Raises as `encode` does. Raises ValueError if text other than white space follows the end,
        or if the only control tokens in the text end nothing.
        """
        name = next((n for n, token in self._control_tokens.items() if token == previous), None)
        if self._adds_space and name is not None:
            ids = self.encode(name + text)[1:]
        else:
            ids = self.encode_continuation(text)
        length = next((n for n, token in enumerate(ids, 1) if token in self.eos_ids), 0)
        rest = self.decode(ids[length:]) if length else ""
        if rest.strip():
            raise ValueError(
                f"the response goes on after its end-of-sequence token: {rest[:40]!r}. Leave the "
                "token out"
            )
        control_ids = self._control_tokens.values()
        foreign = next((token for token in ids if token in control_ids), None)
        if not length and foreign is not None:
            raise ValueError(
                f"the response holds {self.token_text(foreign)!r}, which is no end-of-sequence "
                f"token. Leave it out, or name it in generation_config.json "
                f"(eos_token_id={foreign}) if it ends responses"
            )
        return ids[:length] if length else (*ids, self.eos_ids[0])

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

    @cached_property
    def _renamed(self) -> tokenizers.Tokenizer:
        """A copy whose control tokens have other names, so that `_rename` tells them from text."""
        settings = json.loads(self._backend.to_str())
        settings["post_processor"] = None  # it names control tokens, and nothing here needs it
        for token in settings["added_tokens"]:
            if token["content"] in self._control_tokens:
                token["content"] = _new_name(token["content"])
        model = settings["model"]
        if model.get("unk_token") in self._control_tokens:
            model["unk_token"] = _new_name(model["unk_token"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._renamed_piece(p): i for p, i in model["vocab"].items()}
        else:
            model["vocab"] = [[self._renamed_piece(p), *rest] for p, *rest in model["vocab"]]
        copy = tokenizers.Tokenizer.from_str(json.dumps(settings))
        assert all(
            copy.token_to_id(_new_name(name)) == token
            for name, token in self._control_tokens.items()
        )
        return copy

    def _renamed_piece(self, piece: str) -> str:
        return _new_name(piece) if piece in self._control_tokens else piece

    def _refuse_dropped(self, text: str) -> None:
        """Raise `UnknownText` for characters that the normalizer or the pre-tokenizer drops.

        White space may be dropped. An accent that makes one character with the letter before it
        counts as that character, and the name of a control token as none.
        """
        if not any(map(self._is_dropped, _composed(text))):
            return
        characters = _composed(self._named.sub(_unquoted_name, text))
        dropped = set(filter(self._is_dropped, characters))
        if dropped:
            raise _unknown_text(dropped)

    def _is_dropped(self, character: str) -> bool:
        if character not in self._is_dropped_by_character:
            is_dropped = not character.isspace() and self._ids_alone(character) == []
            self._is_dropped_by_character[character] = is_dropped
        return self._is_dropped_by_character[character]

    def _unknown_characters(self, text: str) -> set[str]:
        """Return the characters without a token, apart from the names of control tokens."""
        characters = _composed(self._named.sub(_unquoted_name, text))
        return set(filter(self._is_unknown, characters))

    def _is_unknown(self, character: str) -> bool:
        ids = self._ids_alone(character)
        return ids is None or self._unknown_id in ids

    def _ids_alone(self, character: str) -> list[int] | None:
        """Return the ids of a character that stands alone, None if it has no token."""
        try:
            ids: list[int] = self._backend.encode(character, add_special_tokens=False).ids
        except Exception:  # as in `encode`
            return None
        return ids


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


def _unknown_text(pieces: Iterable[str], rest: str = "") -> UnknownText:
    """Make the error that names pieces of text without a token.

    rest: the end of the message if there are no pieces.
    """
    names = ", ".join(map(repr, sorted(pieces)[:8]))
    if names:
        return UnknownText(f"the tokenizer has no token for {names}")
    return UnknownText(f"the tokenizer cannot encode {rest}")


def _composed(text: str) -> set[str]:
    return set(unicodedata.normalize("NFC", text))


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    model = json.loads(backend.to_str())["model"]
    token = model.get("unk_token")
    if token is None and isinstance(model.get("unk_id"), int):  # unigram models give the id instead
        return int(model["unk_id"])
    return backend.token_to_id(token) if isinstance(token, str) else None


def _control_tokens(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """Return the ids of control tokens by name.

    Families such as DeepSeek do not mark all of them as special: `<｜User｜>`. Tags such as
    `<think>` belong to what a model writes.
    """
    return {
        token.content: number
        for number, token in backend.get_added_tokens_decoder().items()
        if token.special or re.fullmatch(r"<[|｜].*[|｜]>", token.content)
    }


def _new_name(name: str) -> str:
    return f"{_QUOTE}{_QUOTE}{name}"


def _rename(match: re.Match[str]) -> str:
    """Return a name without its quote, or the new name of a control token."""
    name = match[0]
    return name[1:] if name.startswith(_QUOTE) else _new_name(name)


def _unquoted_name(match: re.Match[str]) -> str:
    """Return a name that is text, "" for a control token."""
    return match[0][1:] if match[0].startswith(_QUOTE) else ""


def _adds_space(backend: tokenizers.Tokenizer) -> bool:
    """Return whether a text that stands alone gets a space."""
    text = "0" if backend.normalizer is None else backend.normalizer.normalize_str("0")
    if backend.pre_tokenizer is not None:
        text = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    return text != "0"


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
