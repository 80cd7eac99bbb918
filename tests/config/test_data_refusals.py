"""Files, folders and mixtures that cannot be read are refused with the key of their place."""

import re
from pathlib import Path

import pytest

from tests.support.configurations import accept, refusals

PARQUET = "data=parquet data.train_path={0}/t.parquet"
FOLDER = "data=hf_dataset data.train_path={0}/folder"
SUMS = "source: jsonl, train_path: {0}/t.jsonl, weight: 1"
LAST_LINE = "reward.answer=last_line"
LETTERS = "letters: {{source: letter_sorting, weight: 1}}"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("t.parquet", "t.jsonl", "t.csv", "e.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    return tmp_path


def overrides_of(text: str, files: Path) -> list[str]:
    """Return the overrides of a text. Those of a mixture and of sets hold spaces."""
    return re.split(r" (?=data[.=]|eval\.sets)", text.format(files))


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ("data=parquet data.train_path={0}/t.jsonl", "data.train_path", "Use data=jsonl"),
        ("data=jsonl data.train_path={0}/t.parquet", "data.train_path", "Use data=parquet"),
        ("data=jsonl data.train_path={0}/folder", "data.train_path", "data=hf_dataset"),
        ("data=hf_dataset data.train_path={0}/t.parquet", "data.train_path", "Use data=parquet"),
        ("data=hf_dataset data.train_path={0}/t.jsonl", "data.train_path", "Use data=jsonl"),
        ("data=parquet data.train_path={0}/no.parquet", "data.train_path", "no such file"),
        ("data=parquet", "data.train_path", "data.train_path=train.parquet"),
        (PARQUET + " data.eval_split=test", "data.eval_split", "a file, which has no splits"),
        (FOLDER + " data.eval_split=train", "data.eval_split", "It is the training split"),
        (FOLDER + " data.split=a data.eval_split=a", "data.eval_split", "training split"),
        (FOLDER + " data.eval_path={0}/folder", "data.eval_path", "It is the training file"),
        (FOLDER + " data.eval_path={0}/no", "data.eval_path", "path of a file or of a folder"),
        (
            FOLDER + " data.eval_path={0}/e.jsonl data.eval_split=a",
            "data.eval_split",
            "a file, which has no splits",
        ),
        (FOLDER + " data.eval_split=test data.num_eval=9", "data.num_eval", "data.eval_split"),
        ("data=csv data.train_path={0}/t.jsonl", "data.train_path", "or use data=jsonl"),
        ("data=csv data.train_path={0}/t.parquet", "data.train_path", "Use data=parquet"),
        ("data=jsonl data.train_path={0}/t.csv", "data.train_path", "Use data=csv"),
        ("data=parquet data.train_path={0}/t.csv", "data.train_path", "Use data=csv"),
        ("data=hf_dataset data.train_path={0}/t.csv", "data.train_path", "Use data=csv"),
        ("data=column_addition data.columns.prompt=q", "data.columns", "Remove it, or choose"),
        (PARQUET + " data.columns.qestion=q", "data.columns", "keys: prompt, messages, tools,"),
        (
            PARQUET + " data.columns.prompt=q data.columns.messages=m",
            "data.columns",
            "Name the column of one of them",
        ),
        (
            PARQUET + " eval.sets.s={{path: {0}/t.csv, columns: {{label: q}}}}",
            "eval.sets",
            "s.columns: A row has no key 'label'",
        ),
        ("data=column_addition data.split=a", "data.split", "Remove it, or choose data=hf"),
        ("data=letter_sorting", "reward.answer", "Use reward.answer=last_line"),
        ("data=mixture", "data.sources", "needs its sources by name"),
        ("data=column_addition data.sources={{" + LETTERS + "}}", "data.sources", "data=mixture"),
    ],
)
def test_files_and_folders_are_refused_by_key(
    checkpoint: Path, files: Path, overrides: str, key: str, words: str
) -> None:
    (refusal,) = refusals(checkpoint, *overrides_of(overrides, files))
    assert refusal.key == key
    assert words in f"{refusal.rule}. {refusal.remedy}"


@pytest.mark.parametrize(
    "overrides",
    [
        PARQUET,
        PARQUET + " data.eval_path={0}/e.jsonl",
        FOLDER + " data.split=a data.eval_split=b",
        FOLDER + " data.eval_path={0}/folder data.eval_split=test",
        FOLDER + " data.eval_path={0}/t.parquet",
        "data=parquet data.train_path={0}/folder",
        "data=csv data.train_path={0}/t.csv data.columns.prompt=question",
        PARQUET + " data.columns.prompt=q data.columns.answer=reward_model.ground_truth",
        PARQUET + " eval.sets.s={{path: {0}/t.csv, columns: {{prompt: q}}}}",
        "data=jsonl data.train_path={0}/t.jsonl data.eval_path={0}/t.parquet",
        "data=mixture data.sources={{sums: {{" + SUMS + "}}}}",
    ],
)
def test_files_and_folders_of_all_formats_are_accepted(
    checkpoint: Path, files: Path, overrides: str
) -> None:
    accept(checkpoint, *overrides_of(overrides, files), LAST_LINE)


def refusals_of_sources(checkpoint: Path, files: Path, **sources: str) -> dict[str, str]:
    """Rule and remedy of every refusal of a mixture, by the key after data.sources."""
    text = ", ".join(f"{name}: {{{value}}}" for name, value in sources.items())
    text = text.replace("FILE", f"source: jsonl, train_path: {files}/t.jsonl")
    results = refusals(checkpoint, "data=mixture", f"data.sources={{{text}}}", LAST_LINE)
    return {
        result.key.removeprefix("data.sources."): f"{result.rule}. {result.remedy}"
        for result in results
    }


def test_types_of_all_sources_are_refused_by_key(checkpoint: Path, files: Path) -> None:
    texts = refusals_of_sources(
        checkpoint,
        files,
        zero="FILE, weight: 0",
        negative="FILE, weight: -2",
        nan="FILE, weight: nan",
        infinite="FILE, weight: inf",
        boolean="FILE, weight: true",
        typo="FILE, wieght: 1",
        tsv="source: tsv, weight: 1",
        nested="source: mixture, weight: 1",
    )
    words = {
        "zero.weight": "Must be greater than 0",
        "negative.weight": "Must be greater than 0",
        "nan.weight": "Must be a finite number",
        "infinite.weight": "Must be a finite number",
        "boolean.weight": "Must be a number",
        "typo.wieght": "Did you mean data.sources.typo.weight?",
        "typo.weight": "",
        "tsv.source": "Must be one of column_addition",
        "nested.source": "Must be one of column_addition",
    }
    assert texts.keys() == words.keys()
    for key, text in words.items():
        assert text in texts[key], key
    (refusal,) = refusals(checkpoint, "data=mixture", "data.sources={a: 3}")
    assert refusal.key == "data.sources.a" and "group of keys" in refusal.rule


def test_rules_of_all_sources_are_refused_by_key(checkpoint: Path, files: Path) -> None:
    texts = refusals_of_sources(
        checkpoint,
        files,
        pathless="source: jsonl, weight: 1",
        other="source: jsonl, train_path: nowhere, weight: 1",
        task="source: reasoning_gym, weight: 1, options: {min_terms: 3}",
        options="source: letter_sorting, weight: 1, options: {a: 1}",
        module="source: 'no_such:A', weight: 1",
    )
    words = {
        "pathless.train_path": "Give one: data.sources.pathless.train_path=train.jsonl",
        "other.train_path": "There is no such file",
        "task.options": "Give one: data.sources.task.options.task=chain_sum",
        "options.options": "user-defined class",
        "module.source": "no_such",
    }
    assert texts.keys() - {"task.source"} == words.keys(), "reasoning-gym is an optional package"
    for key, text in words.items():
        assert text in texts[key], key


def test_names_and_files_of_sources_are_their_own(checkpoint: Path, files: Path) -> None:
    text = "a.b: {source: two_digit_addition, weight: 1}"
    (refusal,) = refusals(checkpoint, "data=mixture", f"data.sources={{{text}}}")
    assert refusal.key == "data.sources" and "only letters, digits" in refusal.rule
    texts = refusals_of_sources(checkpoint, files, a="FILE, weight: 1", b="FILE, weight: 2")
    (rule,) = texts.values()
    assert "a and b read the same training file" in rule


@pytest.mark.parametrize("source", ["jsonl", "parquet", "mixture"])
def test_questions_that_nothing_reads_need_no_file(
    checkpoint: Path, tmp_path: Path, source: str
) -> None:
    """mode=train_only reads a recording, and mode=eval the files of eval.sets."""
    questions = tmp_path / "sums.jsonl"
    questions.write_text("")
    data = (f"data={source}", "data.pass_rates=missing.jsonl", "data.pass_rate_range=[0,1]")
    recording = ("mode=train_only", f"rollout.recording={tmp_path}")
    sets = ("mode=eval", f"eval.sets={{sums: {questions}}}")
    for mode in (recording, sets):
        assert accept(checkpoint, *data, *mode).data.source == source
    needed = "data.sources" if source == "mixture" else "data.train_path"
    for mode in (sets[:1], ("mode=train", sets[1]), ("mode=rollout_only",), ("mode=profile",)):
        assert needed in {refusal.key for refusal in refusals(checkpoint, *data, *mode)}
