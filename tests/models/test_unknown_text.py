"""Texts that a tokenizer cannot encode whole, under normalizers that change their lengths."""

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from megatron_rl.models.tokenizer import Tokenizer, UnknownText

Backend = tokenizers.Tokenizer
LETTERS = "abefi01株()é"


def with_parts(
    model: models.Model,
    normalizer: normalizers.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
) -> Backend:
    backend = tokenizers.Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return backend


def bpe(
    normalizer: normalizers.Normalizer | None = None,
    *,
    unknown: bool = False,
    letters: str = LETTERS,
) -> Backend:
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    if not unknown:
        return with_parts(models.BPE(vocabulary, []), normalizer)
    vocabulary["<unk>"] = len(letters)
    backend = with_parts(models.BPE(vocabulary, [], unk_token="<unk>"), normalizer)
    backend.add_special_tokens(["<unk>"])
    return backend


def byte_level(normalizer: normalizers.Normalizer | None = None, *, lacks: str = "") -> Backend:
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(lacks))
    return with_parts(
        models.BPE({letter: number for number, letter in enumerate(alphabet)}, []),
        normalizer,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )


def sentence_piece(
    normalizer: normalizers.Normalizer | None = None,
    *,
    unknown: bool = True,
    letters: str = LETTERS,
) -> Backend:
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("ab", -1.0), *((letter, -2.0) for letter in letters)]
    model = models.Unigram(pieces, unk_id=0) if unknown else models.Unigram(pieces[1:])
    return with_parts(model, normalizer, pre_tokenizers.Metaspace())


def llama(normalizer: normalizers.Normalizer | None = None, *, fallback: bool = True) -> Backend:
    """SentencePiece's BPE: bytes stand for characters without a token."""
    names = ["<unk>", "▁", *LETTERS]
    if fallback:
        names += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return with_parts(model, normalizer, pre_tokenizers.Metaspace())


def bert(normalizer: normalizers.Normalizer | None = None) -> Backend:
    names = ["[UNK]", "ab", *LETTERS, *(f"##{letter}" for letter in LETTERS), "##g"]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=20)
    return with_parts(
        model, normalizer or normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    )


def precompiled_like() -> normalizers.Normalizer:
    """Stands for SentencePiece's tables: they join, divide, replace and remove characters."""
    return normalizers.Sequence(
        [
            normalizers.Replace("\u200b", " "),
            normalizers.Replace("\u00ad", ""),
            normalizers.NFKC(),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    )


NFC = normalizers.NFC()
NFKC = normalizers.NFKC()
STRIP_ACCENTS = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
E_AND_ACCENT = "e\N{COMBINING ACUTE ACCENT}"
SOFT_HYPHEN = "\N{SOFT HYPHEN}"

KNOWN = [
    (bpe(), "ab"),
    (bpe(NFC), E_AND_ACCENT),  # the accent alone has no token
    (bpe(NFKC, unknown=True), E_AND_ACCENT),
    (bpe(NFKC, unknown=True), "ﬁﬁé"),
    (bpe(NFKC, unknown=True), "a<unk>b"),  # the token itself
    (byte_level(NFC), f"{E_AND_ACCENT}☃\x00🎉\u200b"),
    (byte_level(NFKC), "㈱ﬁ☃"),
    (byte_level(lacks="!"), "☃"),
    (sentence_piece(NFKC), f"ﬁ ㈱ {E_AND_ACCENT}"),
    (sentence_piece(precompiled_like()), f"ﬁ\u200b ㈱  {E_AND_ACCENT}"),
    (sentence_piece(NFKC, unknown=False), "ﬁ ab"),
    (llama(NFKC), "☃ﬁ\x00🎉"),
    (bert(), f"É {E_AND_ACCENT}"),
    (bert(), "ag \t\n"),  # "g" has a token within words alone
    (bert(STRIP_ACCENTS), f"é {E_AND_ACCENT}"),
]


@pytest.mark.parametrize(("backend", "text"), KNOWN)
def test_text_with_tokens_is_encoded_as_the_library_does(backend: Backend, text: str) -> None:
    ids = tokenizers.Tokenizer.from_str(backend.to_str()).encode(text).ids
    assert Tokenizer(backend, [0]).encode(text) == tuple(ids) != ()


UNKNOWN = [
    (bpe(), "a☃b", "'☃'$"),
    (bpe(), "xé", "'x'$"),  # two bytes that a token has, for three
    (bpe(NFKC), "ﬁ☃", "'☃'$"),
    (bpe(NFKC), "ﬁﬁx", "'x'$"),
    (bpe(NFKC, letters="e\N{COMBINING ACUTE ACCENT}"), E_AND_ACCENT, "'é'$"),
    (bpe(NFKC, letters="fiabe"), "ﬁ㈱", "'㈱'$"),
    (bpe(NFKC, unknown=True), "㈱ﬁ☃", "'☃'$"),
    (bpe(NFKC, unknown=True), "<unk>☃", "'☃'$"),
    (bpe(NFKC, unknown=True, letters="e\N{COMBINING ACUTE ACCENT}"), E_AND_ACCENT, "'é'$"),
    (byte_level(NFKC, lacks="!"), "ﬁ!", "'!'$"),
    (byte_level(NFKC, lacks="\xe2"), "ﬁ☃", "'☃'$"),  # one of three bytes
    (sentence_piece(NFKC), "ﬁ☃", "'☃'$"),
    (sentence_piece(NFKC), "㈱xyz", "'x', 'y', 'z'$"),
    (sentence_piece(NFKC, unknown=False), "ﬁ☃", "'☃'$"),
    (sentence_piece(precompiled_like()), f"ﬁa{SOFT_HYPHEN}b", r"'\\xad'$"),
    (llama(NFKC, fallback=False), "ﬁ☃", "'☃'$"),
    (sentence_piece(), "a<unk>b", "'<', '>', 'k', 'n', 'u'$"),  # a piece, but no added token
    (sentence_piece(), "<unk>", "'<', '>', 'k', 'n', 'u'$"),
    (sentence_piece(letters="abe<unk>"), "a<unk> <unk>", "'<unk>'$"),
    (bert(), "ab [UNK]", r"'\[', '\]'$"),
    (bert(), "ab\x00", r"'\\x00'$"),
    (bert(), "a\x00b", r"'\\x00'$"),  # one token spans all three
    (bert(), "a\N{ZERO WIDTH JOINER}b", r"'\\u200d'$"),
    (bert(), "ab ☃é", "'☃'$"),
    (bert(), "क\u0941", r"'क'$|'ु'$"),  # a vowel, not an accent
    (bert(), "ab" * 11, f"'{'ab' * 11}'$"),  # a word that is too long
]


@pytest.mark.parametrize(("backend", "text", "words"), UNKNOWN)
def test_what_has_no_token_is_named(backend: Backend, text: str, words: str) -> None:
    tokenizer = Tokenizer(backend, [0])
    with pytest.raises(UnknownText, match=words):
        tokenizer.encode(text)
    assert tokenizer.encode("e"), "it goes on"


@pytest.mark.parametrize("text", ["<unk>", "a<unk>", "<unk><unk>"])
def test_the_name_of_the_unknown_token_can_be_text(text: str) -> None:
    """Quoted, it is not the token. Its characters have tokens here, or not."""
    for letters in (LETTERS + "<unk>", LETTERS):
        backend = bpe(NFKC, unknown=True, letters="".join(dict.fromkeys(letters)))
        tokenizer = Tokenizer(backend, [0])
        unknown_id = backend.token_to_id("<unk>")
        assert tokenizer.encode(text).count(unknown_id) == text.count("<")
        if "<" in letters:
            assert unknown_id not in tokenizer.encode(tokenizer.quote(text))
            assert unknown_id in tokenizer.encode(text + tokenizer.quote(text))
            continue
        with pytest.raises(UnknownText, match=r"'<', '>', 'k', 'n', 'u'$"):
            tokenizer.encode(tokenizer.quote(text))
        with pytest.raises(UnknownText, match=r"'<', '>', 'k', 'n', 'u'$"):
            tokenizer.encode(text + tokenizer.quote(text))


def test_no_file_truncates_or_pads_a_text() -> None:
    """Files of embedding models hold such limits."""
    backend = bpe()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert Tokenizer(backend, [0]).encode("abab") == (0, 1, 0, 1)
    assert Tokenizer(backend, [0]).encode("ab") == (0, 1)
