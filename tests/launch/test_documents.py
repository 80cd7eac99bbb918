"""What README and docs/ tell a stranger to type is accepted, and what they promise is so."""

import re
import shlex
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.prompts.jsonl import read_jsonl
from megatron_rl.prompts.question import BadRows
from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
RUNS = ("rollout.recording=runs/", "run.resume=runs/", "selection.beliefs_from=runs/")
OTHERS = (
    "compare_runs",
    "export_hf",
    "heat_maps",
    "replay_gaps",
)  # scripts that take no configuration
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(file: Path) -> list[list[str]]:
    """The words of every command in an indented block, without its comment."""
    blocks = re.findall(r"(?:^ {4}.*\n)+", file.read_text().replace("\\\n", ""), flags=re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if "launch/" in line]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_links_and_folders_exist(file: Path) -> None:
    text = file.read_text()
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(r"`((?:launch|docs|tests|kernels|megatron_rl|hydra_conf)/[\w./]*)`", text)
    assert [path for path in linked if not (file.parent / path).exists()] == []
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_training_command_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rows in ("sums.jsonl", "more.jsonl"):
        (tmp_path / rows).write_text('{"prompt": "1+1=", "answer": 2}\n')
    tried = []
    for words in (words for file in DOCUMENTS for words in commands(file)):
        script = next(word for word in words if word.startswith("launch/"))
        assert (ROOT / script).is_file()
        if Path(script).stem in OTHERS or "parallel.ep=3" in words or "--cfg" in words:
            continue
        overrides = words[words.index(script) + 1 :]
        if script == "launch/studies/simulate_selection.py":
            load_script("simulate_selection").parser().parse_args(overrides)
            continue
        if script == "launch/profile_prompts.py":
            (tmp_path / overrides[overrides.index("--out") + 1]).unlink(missing_ok=True)
            overrides = load_script("profile_prompts").settings_of(overrides)
        ranks = 8 if "sbatch" in words else int(words[2]) if "--nproc-per-node" in words else 1
        for given in (word.partition("=")[2] for word in overrides if word.startswith(RUNS)):
            (tmp_path / given).mkdir(parents=True, exist_ok=True)  # the command before it makes one
        compose(overrides, facts=LaunchFacts(ranks, ranks))
        for out in (words[i + 1] for i, word in enumerate(words) if word == "--out"):
            (tmp_path / out).touch()  # what the command after it reads
        tried.append(script)
    assert {"launch/train_rl.py", "launch/preflight.py", "launch/slurm/train_rl.sbatch"} <= set(
        tried
    )


def test_the_comparison_behind_the_table_is_accepted(tmp_path: Path) -> None:
    (words,) = [w for w in commands(ROOT / "README.md") if "launch/comparison/__main__.py" in w]
    script = load_script("compare_runs")
    given: Namespace = script.parser("").parse_args(
        words[words.index("launch/comparison/__main__.py") + 1 :]
    )
    given.out = tmp_path
    planned = Counter(run.variant for run in script.plan(given))
    assert planned == {"espo": 3, "grpo": 3, "gspo": 3, "frozen": 1, "permuted": 1}


def test_every_comparison_is_accepted(tmp_path: Path) -> None:
    script = load_script("compare_runs")
    shown = [
        w
        for w in commands(ROOT / "docs" / "comparisons.md")
        if "launch/comparison/__main__.py" in w
    ]
    shown += [
        w for w in commands(ROOT / "docs" / "replay.md") if "launch/comparison/__main__.py" in w
    ]
    runs: list[object] = []
    for words in shown:
        given: Namespace = script.parser("").parse_args(words[2:])
        given.out = tmp_path
        script._check(given)
        if given.search:
            planned = script._read_contest(given)
            furthest = replace(
                planned, grids={name: points[-1:] for name, points in planned.grids.items()}
            )
            runs.append([len(points) for points in planned.grids.values()])
            assert "on each seed of 100 for 8 steps" in planned.budget(furthest.searched())
        else:
            runs.append(len(list(script.plan(given))))
    assert runs == [[4] * 6, 9, 6, 15]


def test_rows_that_are_shown_are_read(tmp_path: Path) -> None:
    rows = re.findall(r"^ {4}(\{.*\})$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    questions = read_jsonl(tmp_path / "rows.jsonl", BadRows("fail"), key="data.train_path")
    assert [(question.text, question.answer) for question in questions] == [
        ("17+25=", "42"),
        ("60+8=", "68"),
    ]


def test_every_exit_code_is_explained() -> None:
    table = re.findall(r"^\| ([\d, ]+) \| ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    told = {int(number) for cell in table for number in cell.split(",")}
    assert told == {1, *map(int, ExitCode)}
    looked_at = re.findall(
        r"^\| (\d+) \| ", (ROOT / "docs" / "faults.md").read_text(), flags=re.MULTILINE
    )
    assert set(map(int, looked_at)) == {code for code in told if 0 < code < 128}
