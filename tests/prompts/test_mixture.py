"""Mixtures: shares of every source, exact resume, and questions held out of all sources."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import DataSettings, SourceSettings
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.contracts.run_state import PromptCursor
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts
from megatron_rl.prompts.jsonl import is_line_id
from megatron_rl.prompts.mixture import PromptMixture
from megatron_rl.prompts.pass_rates import PassRate, identity_of
from megatron_rl.prompts.question import BadRows, PromptDataError
from megatron_rl.prompts.split import Split, keep_sources_apart
from tests.support.policies import TWO_DIGIT_ADDITION

NAMES = "abcdef"


def make_prompts(name: str, n: int) -> list[Prompt]:
    return [
        Prompt(id=f"{name}/{i}", token_ids=(i,), answer="0", task=name, source=name)
        for i in range(n)
    ]


def make_mixture(
    weights: Sequence[float], sizes: Sequence[int], *, names: str = NAMES, **changes: Any
) -> PromptMixture:
    sources = {
        name: SourceSettings(source="jsonl", train_path=f"{name}.jsonl", weight=weight)
        for name, weight in zip(names, weights, strict=False)
    }
    data = DataSettings(source="mixture", sources=sources)
    prompts = {
        name: (make_prompts(name, size), make_prompts(f"{name}/held_out", 1))
        for name, size in zip(sources, sizes, strict=True)
    }
    return PromptMixture(prompts, data, **changes)


def copy_at(mixture: PromptMixture, other: PromptMixture) -> PromptMixture:
    """Another mixture at the same position, which went through a checkpoint."""
    contents = msgspec.json.encode(mixture.cursor)
    other.seek(msgspec.json.decode(contents, type=PromptCursor))
    return other


MIXTURES = st.lists(
    st.tuples(st.floats(0.01, 100).map(lambda x: round(x, 2)), st.integers(40, 90)),
    min_size=1,
    max_size=5,
)
STEPS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@pytest.mark.slow
@given(mixture=MIXTURES, steps=STEPS, stop=st.integers(0, 11))
@settings(max_examples=60, deadline=None)
def test_a_resumed_mixture_is_one_that_never_stopped(
    mixture: list[tuple[float, int]], steps: list[int], stop: int
) -> None:
    weights, sizes = zip(*mixture, strict=True)
    whole_run = make_mixture(weights, sizes)
    resumed_run = make_mixture(weights, sizes)
    for index, n in enumerate(steps):
        if index == stop:
            resumed_run = copy_at(resumed_run, make_mixture(weights, sizes))
        assert resumed_run.take(n) == whole_run.take(n)
    assert resumed_run.cursor == whole_run.cursor


@given(mixture=MIXTURES, steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_shares_hold_in_every_prefix_of_a_mixture(
    mixture: list[tuple[float, int]], steps: list[int]
) -> None:
    weights, sizes = zip(*mixture, strict=True)
    prompts = make_mixture(weights, sizes)
    prompts_of_run = [prompt for n in steps for prompt in prompts.take(n)]
    counts = Counter[str]()
    for number, prompt in enumerate(prompts_of_run, 1):
        counts[prompt.source] += 1
        for name, weight in zip(NAMES, weights, strict=False):
            assert abs(counts[name] - number * weight / sum(weights)) < 1 + 1e-9


def test_each_source_has_its_own_epochs_and_order() -> None:
    mixture = make_mixture([3, 1], [6, 6])
    ids = [prompt.id for _ in range(8) for prompt in mixture.take(4)]
    of_a = [name for name in ids if name.startswith("a/")]
    of_b = [name for name in ids if name.startswith("b/")]
    for start in range(0, 24, 6):
        assert len(set(of_a[start : start + 6])) == 6
    assert len(set(of_b[:6])) == 6
    assert [name[2:] for name in of_a[:6]] != [name[2:] for name in of_b[:6]]
    cursor = mixture.cursor
    assert [source.epoch for source in cursor.sources] == [3, 1]
    assert (cursor.picks, cursor.position) == ((24, 8), 32)


def offer_ids(mixture: PromptMixture, n: int) -> list[str]:
    """Offers of a step that takes every second one, as a selection does."""
    mixture.begin_step()
    ids: dict[str, None] = {}
    offers = []
    for number in range(n):
        offer = mixture.offer(ids)
        if offer is None:
            break
        offers.append(offer[0].id)
        if number % 2:
            ids[offer[0].id] = None
    return offers


def test_offers_that_are_declined_count_and_resume() -> None:
    whole_run = make_mixture([2, 1], [9, 9])
    resumed_run = copy_at(whole_run, make_mixture([2, 1], [9, 9]))
    for n in (7, 12, 5, 30):
        resumed_run = copy_at(resumed_run, make_mixture([2, 1], [9, 9]))
        offers = offer_ids(whole_run, n)
        assert offer_ids(resumed_run, n) == offers
    counts = Counter(name[0] for name in offers)
    assert counts["a"] == pytest.approx(20, abs=2)


def test_a_step_that_has_all_prompts_of_a_source_goes_on_with_the_others() -> None:
    mixture = make_mixture([1, 1], [2, 6])
    mixture.begin_step()
    ids: list[str] = []
    while (offer := mixture.offer(ids)) is not None:
        ids.append(offer[0].id)
    assert sorted(ids) == sorted([f"a/{i}" for i in range(2)] + [f"b/{i}" for i in range(6)])


def test_ids_that_arrive_late_or_together_are_sorted_by_source() -> None:
    mixture = make_mixture([1, 1], [2, 2])
    mixture.begin_step()
    first = [mixture.offer(()) for _ in range(4)]
    ids = {offer[0].id for offer in first if offer is not None and offer[0].id != "b/1"}
    assert len(ids) == 3
    offer = mixture.offer(ids)
    assert offer is not None and offer[0].id == "b/1"
    assert mixture.offer(ids | {"b/1"}) is None


@pytest.mark.parametrize(
    ("weights", "sizes", "names", "words"),
    [
        ([1, 2], [9, 9], "ab", "names or weights in data.sources"),
        ([1, 1], [9, 9], "ba", r"data\.sources\.b: run\.resume"),
        ([1, 1], [9, 8], "ab", r"data\.sources\.b: run\.resume.*other training prompts"),
        ([1, 1, 1], [9, 9, 9], "abc", "had 2 sources in data.sources, this run has 3"),
    ],
)
def test_a_position_in_another_mixture_is_refused(
    weights: list[float], sizes: list[int], names: str, words: str
) -> None:
    mixture = make_mixture([1, 1], [9, 9])
    with pytest.raises(PromptDataError, match=words):
        make_mixture(weights, sizes, names=names).seek(mixture.cursor)
    with pytest.raises(PromptDataError, match="had no sources"):
        mixture.seek(PromptCursor(epoch=0, position=0, digest="d"))


def test_a_source_that_cannot_fill_its_share_is_refused() -> None:
    make_mixture([1, 1], [5, 99]).require(8)
    with pytest.raises(PromptDataError, match=r"sources\.a\.weight=1: .*up to 6 .*which has 5\."):
        make_mixture([1, 1], [5, 99]).require(10)
    with pytest.raises(PromptDataError, match="only 8 usable training prompts"):
        make_mixture([1, 1], [4, 4]).require(9)


def rates_of(low_ids: Sequence[str], n: int = 9) -> dict[str, PassRate]:
    ids = [f"{name}/{i}" for name in "ab" for i in range(n)]
    return {id_: PassRate(id=id_, correct=int(id_ not in low_ids), samples=1) for id_ in ids}


def test_a_source_that_runs_dry_under_its_range_is_refused() -> None:
    rates = rates_of([f"a/{i}" for i in range(7)])
    mixture = make_mixture([1, 1], [9, 9], rates=rates)
    mixture.require(4)
    mixture.set_pass_rate_range([0.5, 1.0])
    assert mixture.num_available == 11
    with pytest.raises(
        PromptDataError, match=r"sources\.a\..*has 2 in data\.pass_rate_range=\[0\.5, 1\.0\] \(of 9"
    ):
        mixture.require(4)
    mixture.require(2)
    assert {prompt.id for _ in range(9) for prompt in mixture.take(2) if prompt.source == "a"} == {
        "a/7",
        "a/8",
    }


def test_a_mixture_with_a_range_resumes_exactly() -> None:
    rates = rates_of(["a/0", "a/1", "b/5"])
    whole_run = make_mixture([1, 2], [9, 9], rates=rates)
    whole_run.take(3)
    whole_run.set_pass_rate_range([0.5, 1.0])
    resumed_run = make_mixture([1, 2], [9, 9], rates=rates)
    resumed_run.set_pass_rate_range([0.5, 1.0])
    resumed_run = copy_at(whole_run, resumed_run)
    for _ in range(9):
        assert resumed_run.take(4) == whole_run.take(4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(TWO_DIGIT_ADDITION)


def write_sums(path: Path, numbers: range, **labels: str) -> str:
    rows = [{"prompt": f"{n}+{n}=", "answer": 2 * n} | labels for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def open_mixture(tokenizer: Tokenizer, sources: dict[str, SourceSettings]) -> PromptMixture:
    data = DataSettings(source="mixture", sources=sources, num_train=50, num_eval=8)
    prompts = open_prompts(data, tokenizer)
    assert isinstance(prompts, PromptMixture)
    return prompts


def test_sources_of_a_mixture_are_opened_with_names(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sums = write_sums(tmp_path / "sums.jsonl", range(60))
    mixture = open_mixture(
        tokenizer,
        {
            "sums": SourceSettings(source="jsonl", train_path=sums, weight=1),
            "letters": SourceSettings(source="letter_sorting", weight=1, num_eval=5),
        },
    )
    first = mixture.train[0]
    last = mixture.train[-1]
    assert (first.source, first.task) == ("sums", "sums")
    assert first.id.startswith("sums/data.train_path:") and is_line_id(first.id)
    assert (last.source, last.task) == ("letters", "letter_sorting")
    assert last.id.startswith("letters/letter_sorting/")
    assert Counter(p.source for p in mixture.train) == {"sums": 45, "letters": 50}
    assert Counter(p.source for p in mixture.held_out) == {"sums": 8, "letters": 5}


def test_what_one_source_holds_out_no_other_trains(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Questions of both files: one side's reserve must not train from the other."""
    both = {
        "first": SourceSettings(
            source="jsonl", train_path=write_sums(tmp_path / "a.jsonl", range(60)), weight=1
        ),
        "second": SourceSettings(
            source="jsonl", train_path=write_sums(tmp_path / "b.jsonl", range(30, 99)), weight=1
        ),
    }
    mixture = open_mixture(tokenizer, both)
    alone = [
        open_prompts(DataSettings(source="jsonl", train_path=s.train_path, num_eval=8), tokenizer)
        for s in both.values()
    ]
    train_tokens = [prompt.token_ids for prompt in mixture.train]
    held_out = {prompt.token_ids for prompt in mixture.held_out}
    assert not held_out & set(train_tokens) and len(set(train_tokens)) == len(train_tokens)
    for source in alone:
        assert not {prompt.token_ids for prompt in source.held_out} & set(train_tokens)
    assert len(train_tokens) < sum(len(source.train) for source in alone)
    assert ", which is held out\n" in mixture.excluded_rows.report()


def test_a_variant_of_a_held_out_question_does_not_train() -> None:
    held_out, variant, other = (
        Question(id=name, text=name, answer="1", task="t", identity=identity)
        for name, identity in (("x", "i"), ("y", "i"), ("z", "k"))
    )
    splits = {"a": Split([], [held_out]), "b": Split([variant, other], [replace(held_out)])}
    results = keep_sources_apart(splits, BadRows("fail"))
    assert results["b"].train == [other] and results["b"].held_out == []
    assert results["a"].held_out == [held_out]
    assert (results["a"].overlapping, results["b"].overlapping) == (0, 1)


def test_a_training_text_does_not_hide_a_held_out_one() -> None:
    text = Question(id="x", text="x", answer="1", task="t")
    results = keep_sources_apart(
        {"a": Split([text], []), "b": Split([], [replace(text, id="y")])}, BadRows("fail")
    )
    assert results["a"].train == [] and len(results["b"].held_out) == 1


def make_question(text: str, answer: str = "1", *, origin: str = "") -> Question:
    return Question(id=text, text=text, answer=answer, task="t", origin=origin)


SIDES = ("train", "held_out", "reserved")


@pytest.mark.parametrize("second_side", SIDES)
@pytest.mark.parametrize("first_side", SIDES)
def test_a_question_with_two_answers_in_two_sources_is_a_bad_row(
    first_side: str, second_side: str
) -> None:
    first = make_question("2+2=", "4", origin="a 1")
    second = make_question(" 2+2=", "5", origin="b 1")
    other = make_question("1+1=", "2")
    sides: dict[str, list[Question]] = {side: [] for side in SIDES}
    splits = {
        "a": Split(**sides | {first_side: [first]}),
        "b": Split(**sides | {second_side: [second, other]}),
    }
    words = r"(b 1: .*a 1.*another answer \('5'\)|a 1: .*b 1.*another answer \('4'\))"
    with pytest.raises(PromptDataError, match=words):
        keep_sources_apart(splits, BadRows("fail"))
    bad_rows = BadRows("skip")
    results = keep_sources_apart(splits, bad_rows)
    assert bad_rows.count == 1
    rest = [q for split in results.values() for side in SIDES for q in getattr(split, side)]
    assert len(rest) == 2 and other in rest
    assert sum(split.duplicates + split.overlapping for split in results.values()) == 0
    if (first_side, second_side) == ("train", "held_out"):
        assert rest == [second, other], "an evaluation keeps its question"


@pytest.mark.parametrize("second_side", SIDES)
@pytest.mark.parametrize("first_side", SIDES)
def test_each_question_of_two_sources_is_counted(first_side: str, second_side: str) -> None:
    sides: dict[str, list[Question]] = {side: [] for side in SIDES}
    splits = {
        "a": Split(**sides | {first_side: [make_question("x")]}),
        "b": Split(**sides | {second_side: [make_question("X")]}, duplicates=3, overlapping=2),
    }
    bad_rows = BadRows("fail")
    results = keep_sources_apart(splits, bad_rows)
    is_overlap = (first_side == "train") != (second_side == "train")
    assert sum(split.overlapping for split in results.values()) == 2 + is_overlap
    assert sum(split.duplicates for split in results.values()) == 3 + (not is_overlap)
    assert len(bad_rows.messages) == 1
    if "held_out" in (first_side, second_side):
        assert sum(len(split.held_out) for split in results.values()) == 1


def test_texts_of_one_source_may_differ_in_case_alone() -> None:
    """A generator decides by itself which of its questions are the same."""
    split = Split([make_question("sort bA", "A"), make_question("sort Ba", "B")], [])
    results = keep_sources_apart({"a": split}, BadRows("fail"))
    assert results["a"].train == split.train


def test_variants_with_other_answers_are_no_contradiction() -> None:
    held_out, variant = (
        Question(id=text, text=text, answer=text, task="t", identity="i") for text in "12"
    )
    bad_rows = BadRows("fail")
    results = keep_sources_apart({"a": Split([variant], []), "b": Split([], [held_out])}, bad_rows)
    assert results["a"].train == [] and results["a"].overlapping == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_eval": 30}, r"data\.sources\.sums\.num_eval=30: .*Set at most data\.sources\.sums"),
        (
            {"train_path": "no.jsonl"},
            r"data\.sources\.sums\.train_path=no\.jsonl: .*cannot be read",
        ),
        ({"eval_path": "no.jsonl"}, r"data\.sources\.sums\.eval_path=no\.jsonl: .*cannot be read"),
    ],
)
def test_problems_of_a_source_name_its_key(
    tmp_path: Path, tokenizer: Tokenizer, change: dict[str, Any], words: str
) -> None:
    sums = write_sums(tmp_path / "sums.jsonl", range(60))
    source = SourceSettings(source="jsonl", train_path=sums, weight=1)
    with pytest.raises(PromptDataError, match=words):
        open_mixture(tokenizer, {"sums": replace(source, **change)})


def test_the_identity_of_a_mixture_is_that_of_its_sources(tmp_path: Path) -> None:
    sums = write_sums(tmp_path / "sums.jsonl", range(60))
    source = SourceSettings(source="jsonl", train_path=sums, weight=1)
    data = DataSettings(source="mixture", sources={"sums": source})
    (identity,) = identity_of(data)["sources"].values()
    assert identity == identity_of(DataSettings(source="jsonl", train_path=sums))
    heavier = replace(data, sources={"sums": replace(source, weight=2)})
    assert identity_of(heavier) == identity_of(data)
