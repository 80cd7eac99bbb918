"""Files, folders and mixtures that cannot be read are refused with the key of their place."""

from pathlib import Path

import pytest

from tests.support.configurations import accept, refusals

PARQUET = "data=parquet data.train_path={0}/t.parquet"
FOLDER = "data=hf_dataset data.train_path={0}/folder"
SUMS = "source: jsonl, train_path: {0}/t.jsonl, weight: 1"
LETTERS = "letters: {{source: letter_sorting, weight: 1}}"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("t.parquet", "t.jsonl", "e.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    return tmp_path


def overrides_of(text: str, files: Path) -> list[str]:
    """Overrides are separated by ` data`, because those of a mixture hold spaces."""
    parts = text.format(files).split(" data")
    return [parts[0], *(f"data{part}" for part in parts[1:])]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ("data=parquet data.train_path={0}/t.jsonl", "data.train_path", "Use data=jsonl"),
        ("data=jsonl data.train_path={0}/t.parquet", "data.train_path", "Use data=parquet"),
        ("data=jsonl data.train_path={0}/folder", "data.train_path", "data=hf_dataset"),
        ("data=hf_dataset data.train_path={0}/t.parquet", "data.train_path", "Use data=parquet"),
        ("data=hf_dataset data.train_path={0}/t.jsonl", "data.train_path", "Use data=jsonl"),
        ("data=hf_dataset data.train_path={0}/no", "data.train_path", "There is no such file"),
        ("data=parquet data.train_path={0}/no.parquet", "data.train_path", "no such file"),
        ("data=parquet", "data.train_path", "data.train_path=train.parquet"),
        (PARQUET + " data.split=train", "data.split", "a file, which has no splits"),
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
        "data=jsonl data.train_path={0}/t.jsonl data.eval_path={0}/t.parquet",
        "data=mixture data.sources={{sums: {{" + SUMS + "}}}}",
    ],
)
def test_files_and_folders_of_all_formats_are_accepted(
    checkpoint: Path, files: Path, overrides: str
) -> None:
    accept(checkpoint, *overrides_of(overrides, files), "reward.answer=last_line")


@pytest.mark.parametrize(
    ("sources", "key", "words"),
    [
        ("sums: {{" + SUMS.replace("1", "0") + "}}", "sums.weight", "Must be greater than 0"),
        ("sums: {{" + SUMS.replace("1", "-2") + "}}", "sums.weight", "Must be greater than 0"),
        ("sums: {{" + SUMS.replace("1", "nan") + "}}", "sums.weight", "finite number"),
        ("sums: {{" + SUMS.replace("1", "inf") + "}}", "sums.weight", "finite number"),
        ("sums: {{" + SUMS.replace("1", "true") + "}}", "sums.weight", "Must be a number"),
        ("sums: {{" + SUMS.replace("weight", "wieght") + "}}", "sums.wieght", "sums.weight"),
        ("sums: {{source: jsonl, weight: 1}}", "sums.train_path", "Give one"),
        ("sums: {{source: csv, weight: 1}}", "sums.source", "Must be one of column_addition"),
        ("sums: {{" + SUMS + ", task: a}}", "sums.task", "use source=reasoning_gym"),
        ("sums: {{" + SUMS + ", options: {{a: 1}}}}", "sums.options", "user-defined class"),
        ("sums: {{source: 'no_such:A', weight: 1}}", "sums.source", "no_such"),
        ("sums: {{source: mixture, weight: 1}}", "sums.source", "Must be one of"),
        ("a.b: {{" + SUMS + "}}", None, "only letters, digits"),
        ("sums: 3", "sums", "Must be a group of keys"),
        (
            "a: {{" + SUMS + "}}, b: {{" + SUMS + "}}",
            None,
            "a and b read the same training file",
        ),
    ],
)
def test_sources_of_a_mixture_are_refused_by_key(
    checkpoint: Path, files: Path, sources: str, key: str | None, words: str
) -> None:
    text = f"data.sources={{{{{sources}}}}}".format(files)
    results = refusals(checkpoint, "data=mixture", text, "reward.answer=last_line")
    expectation = f"data.sources.{key}" if key else "data.sources"
    texts = {r.key: f"{r.rule}. {r.remedy}" for r in results}
    assert words in texts[expectation], texts
