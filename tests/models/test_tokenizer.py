"""Tokenizers: encoding, decoding, end-of-sequence ids and errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.tokenizer import (
    REPLACEMENT,
    Tokenizer,
    TokenizerError,
    UnknownText,
    check_matches_model,
)
from tests.support.character_tokenizer import CHARACTERS, write_character_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


def write_byte_level_tokenizer(path: Path, eos: str | None = None) -> Path:
    """Write a byte-level BPE tokenizer without merges: 256 tokens, no unknown token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos} if eos else {}))
    return path


def test_known_ids(tokenizer: Tokenizer) -> None:
    # Ids 0 to 2 are special tokens. "0" is 3, "a" is 13, "+" is 39 and "=" is 43.
    assert tokenizer.encode("a38+=") == (13, 6, 11, 39, 43)
    assert tokenizer.vocab_size == 48
    assert tokenizer.eos_ids == (1,)


@pytest.mark.parametrize("length", [0, 1, 17, 18, 19, 100, 100_000])
@pytest.mark.parametrize("at_most", [0, 5, 17])
def test_a_text_with_more_tokens_is_read_up_to_there(
    tokenizer: Tokenizer, length: int, at_most: int
) -> None:
    text = "0" * length
    ids = tokenizer.encode(text)
    first_ids = tokenizer.encode(text, at_most=at_most)
    assert first_ids == ids[: len(first_ids)]
    assert first_ids == ids or at_most < len(first_ids) <= (at_most + 1) * tokenizer.longest_token


def test_white_space_that_a_token_takes_is_no_token(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("<tag>", rstrip=True)])
    tokenizer = Tokenizer(backend, [1])
    text = "<tag>" + " " * 100 + "01"
    assert tokenizer.encode(text, at_most=3) == tokenizer.encode(text)


def test_longest_token_counts_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token == max(len(tokenizer.decode([i])) for i in (0, 2, 3))


@settings(max_examples=100, deadline=None)
@given(text=st.text(CHARACTERS, max_size=60))
def test_encoded_text_decodes_to_itself(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, 1]) == text


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 60), max_size=40))
def test_all_ids_decode_to_some_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    text_ids = list(ids)
    while text_ids and text_ids[-1] == 1:
        text_ids.pop()
    names = {0: "<pad>", 1: "<eos>", 2: "<unk>"}
    texts = [names.get(i) or (CHARACTERS[i - 3] if i < 48 else REPLACEMENT) for i in text_ids]
    assert tokenizer.decode(ids) == "".join(texts)


def test_special_and_unknown_ids_do_not_join_digits(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("12")
    for between in (0, 1, 2, 48, 1000):
        assert tokenizer.decode([one, between, two]) != "12"


@pytest.mark.parametrize(
    ("text", "character"),
    [("1\n2", r"'\\n'"), ("Ab", "'A'"), ("1\x002", r"'\\x00'"), ("１", "'１'")],
)
def test_characters_without_a_token_are_named(
    tokenizer: Tokenizer, text: str, character: str
) -> None:
    with pytest.raises(UnknownText, match=character):
        tokenizer.encode(text)


def test_characters_that_the_tokenizer_drops_are_unknown(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("ab") == (0, 1)
    with pytest.raises(UnknownText, match="'x'"):
        tokenizer.encode("axb")


def test_byte_level_tokenizers_encode_any_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_byte_level_tokenizer(tmp_path))
    for text in ("Übung macht ½ 🎉\n\x00", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = [*tokenizer.encode("1"), 300, *tokenizer.encode("2")]
    assert tokenizer.decode(ids) == f"1{REPLACEMENT}2"


@pytest.mark.parametrize(
    ("eos_token", "generation", "config", "eos_ids"),
    [
        ("<eos>", None, None, (1,)),
        ({"content": "<eos>"}, [1, 0], None, (1, 0)),  # Qwen3: <|im_end|> has the larger id
        ("<eos>", [0, 1], [1], (1, 0)),
        ("<eos>", [0], None, (1, 0)),
        ("<eos>", None, [1, 0], (1, 0)),
        ("<eos>", 1, [5, 1, 7], (1, 5, 7)),
        ("<eos>", [9, 1], [5, 9], (1, 9, 5)),
        (None, [7, 0], None, (7, 0)),
        (None, 7, [7], (7,)),
        (None, None, 5, (5,)),
        (None, None, None, ()),
    ],
)
def test_all_files_name_ends_and_the_first_one_is_that_of_the_tokenizer(
    tmp_path: Path, eos_token: object, generation: object, config: object, eos_ids: tuple[int, ...]
) -> None:
    write_character_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    for name, ids in (("generation_config", generation), ("config", config)):
        if ids is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_ids == eos_ids
    for end in eos_ids:  # none of them stays in the text
        assert tokenizer.decode([*tokenizer.encode("ab"), end]) == "ab"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "holds no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer.json", "\x00", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json cannot be read: Expected `object`"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json cannot be read"),
        (
            "tokenizer_config.json",
            '{"eos_token": 5}',
            r"Expected `str \| object \| null`, got `int` - at `\$\.eos_token",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": "<nowhere>"}',
            "eos_token='<nowhere>' is not in the vocabulary",
        ),
        (
            "generation_config.json",
            '{"eos_token_id": "1"}',
            "generation_config.json cannot be read",
        ),
    ],
)
def test_invalid_files_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    write_character_tokenizer(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.from_directory(tmp_path)
    assert error.value.exit_code is ExitCode.BAD_DATA


def test_matching_tokenizer_is_accepted(tokenizer: Tokenizer) -> None:
    check_matches_model(tokenizer, vocab_size=48)
    check_matches_model(tokenizer, vocab_size=64)


def test_tokenizer_of_another_model_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"ids up to 47, the model's vocabulary ends at 39"):
        check_matches_model(tokenizer, vocab_size=40)
    with pytest.raises(TokenizerError, match="no end-of-sequence token"):
        check_matches_model(
            Tokenizer.from_directory(write_byte_level_tokenizer(tmp_path)), vocab_size=256
        )


def test_ends_of_different_models_are_refused(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 5]}')
    with pytest.raises(
        TokenizerError, match=r"ends sequences with \[2, 5\], the tokenizer with \[1\]"
    ):
        Tokenizer.from_directory(tmp_path)


def test_characters_must_be_distinct(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="once"):
        write_character_tokenizer(tmp_path, "00")


@pytest.mark.slow
def test_prompts_rewards_and_tokenizer_load_without_torch() -> None:
    code = """if True:
        import sys
        import megatron_rl.credit.advantages, megatron_rl.credit.group_kinds
        import megatron_rl.models.tokenizer, megatron_rl.prompts, megatron_rl.rewards
        print(*{"torch", "transformers", "hydra", "reasoning_gym"} & set(sys.modules))
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.stdout.strip(), result.stderr) == ("", "")


def test_transformers_loads_the_same_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    text = "a38b13=> .,x"
    assert tuple(reference(text)["input_ids"]) == tokenizer.encode(text)
    assert reference.decode(tokenizer.encode(text)) == text
    assert (reference.eos_token_id, reference.pad_token_id, len(reference)) == (1, 0, 48)
