"""The documentation: its commands are accepted, its links exist, and its tables are complete."""

import importlib.util
import re
import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import checkpoint
from launch.profile_prompts import settings_of
from megatron_rl.config.keys import declared_keys
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.prompts.question import BadRows
from tests.engine.test_smoke_run import NAMES
from tests.lab import replay_gaps, simulate_selection
from tests.lab.comparison.__main__ import check_options, plan_runs
from tests.lab.comparison.arguments import make_parser
from tests.support.configurations import configuration_of
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.question_files import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCUMENTS += sorted(DOCS.rglob("*.md"))
FOLDERS = "launch|docs|tests|kernels|megatron_rl|sglang_bridge|hydra_conf"
# Options whose value is a directory that an earlier command of the page makes
DIRECTORY_OPTIONS = ("rollout.recording=runs/", "run.resume=runs/", "selection.beliefs_from=runs/")
# What a run with ESPO reports in addition to the smoke run, whose metrics its test holds
ESPO_METRICS = {
    f"policy/{name}{group}"
    for name in ("clip_fraction_low", "clip_fraction_high", "epsilon_mean", "ratio_square_mean")
    for group in ("", "/group0", "/group1")
} | {"policy/ratio_mean/group0", "sync/bytes/0", "sync/bytes/1/0_of_node_0"}
TRAINING_SCRIPTS = ("launch/train_rl.py", "launch/preflight.py", "launch/slurm/train_rl.sbatch")


def relative_name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def commands(file: Path) -> list[list[str]]:
    """The words of every command in an indented block, without its comment."""
    text = file.read_text().replace("\\\n", "")
    blocks = re.findall(r"(?:^ {4}.*\n)+", text, flags=re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [
        shlex.split(line, comments=True)
        for line in lines
        if "launch" in line or "tests.lab" in line
    ]


def script_commands(script: str) -> list[tuple[list[str], list[str]]]:
    """Every documented command of a script: its words before and after the script."""
    pairs = []
    for file in DOCUMENTS:
        for words in commands(file):
            if script in words:
                place = words.index(script)
                pairs.append((words[:place], words[place + 1 :]))
    return pairs


def comparisons(name: str) -> list[Namespace]:
    """The options of every comparison on a page."""
    marker = "tests.lab.comparison"
    pages = [words for words in commands(DOCS / name) if marker in words]
    return [make_parser("").parse_args(words[words.index(marker) + 1 :]) for words in pages]


def make_directories(folder: Path, overrides: list[str]) -> None:
    for override in overrides:
        path = folder / override.partition("=")[2]
        if override.startswith(DIRECTORY_OPTIONS):
            path.mkdir(parents=True, exist_ok=True)
        elif override.startswith("model.path=runs/") and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(TWO_DIGIT_ADDITION)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with the files that the commands read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "tests/plugins/examples")
    for name in ("sums.jsonl", "rows.jsonl", "more.jsonl", "reverse.jsonl", "rates.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "answer": 2}\n')
    (tmp_path / "sums.parquet").touch()
    (tmp_path / "rows.parquet").touch()
    (tmp_path / "rows.csv").touch()
    (tmp_path / "DIR").symlink_to(TWO_DIGIT_ADDITION)
    (tmp_path / "my_dataset").mkdir()
    return tmp_path


@pytest.mark.parametrize("file", DOCUMENTS, ids=relative_name)
def test_links_exist(file: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text())
    assert [target for target in targets if not (file.parent / target).exists()] == []


@pytest.mark.parametrize("file", DOCUMENTS, ids=relative_name)
def test_paths_exist(file: Path) -> None:
    paths = re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", file.read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("file", DOCUMENTS, ids=relative_name)
def test_anchors_exist(file: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", file.read_text()):
        page = file.parent / target if target else file
        headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", heading).lower() for heading in headings]
        assert anchor in [text.replace(" ", "-") for text in anchors], f"{target}#{anchor}"


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAINING_SCRIPTS)
def test_every_training_command_composes(
    workspace: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # wandb is an extra
    monkeypatch.setattr("megatron_rl.config.rules.logger.find_spec", lambda name: object())
    monkeypatch.setattr("megatron_rl.config.rules.data.find_spec", lambda name: object())
    pairs = script_commands(script)
    assert pairs
    for prefix, overrides in pairs:
        if "--cfg" in overrides:
            continue
        ranks = 8 if "sbatch" in prefix else 1
        if "--nproc-per-node" in prefix:
            ranks = int(prefix[prefix.index("--nproc-per-node") + 1])
        nodes = int(prefix[prefix.index("--nnodes") + 1]) if "--nnodes" in prefix else 1
        make_directories(workspace, overrides)
        configuration_of(overrides, facts=LaunchFacts(nodes * ranks, ranks))


@pytest.mark.slow
def test_every_profile_command_composes(workspace: Path) -> None:
    pairs = script_commands("launch/profile_prompts.py")
    assert pairs
    for _, arguments in pairs:
        (workspace / arguments[arguments.index("--out") + 1]).unlink()
        configuration_of(settings_of(arguments), facts=LaunchFacts(1, 1))


@pytest.mark.parametrize(
    ("program", "parse"),
    [
        ("launch/checkpoint.py", checkpoint.parse_arguments),
        ("tests.lab.replay_gaps", replay_gaps.make_parser().parse_args),
        ("tests.lab.simulate_selection", simulate_selection.make_parser().parse_args),
    ],
)
def test_arguments_of_other_commands_are_accepted(
    program: str, parse: Callable[[list[str]], Namespace]
) -> None:
    pairs = script_commands(program)
    assert pairs
    for _, arguments in pairs:
        parse(arguments)


def test_every_module_exists() -> None:
    names = set()
    for file in DOCUMENTS:
        names.update(re.findall(r"python -m ((?:launch|tests\.lab)\.[\w.]+)", file.read_text()))
    assert "tests.lab.comparison" in names
    missing_names = [name for name in names if importlib.util.find_spec(name) is None]
    assert missing_names == []


@pytest.mark.slow
def test_the_comparison_behind_the_table_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.lab.comparison.variants.compose", configuration_of)
    (options,) = comparisons("measurements.md")
    options.out = tmp_path
    counts = Counter(run.variant for run in plan_runs(options))
    assert counts == {"espo": 3, "grpo": 3, "gspo": 3, "frozen": 1}


@pytest.mark.slow
@pytest.mark.parametrize("page", ["comparisons.md", "results/selection.md"])
def test_every_comparison_is_accepted(
    tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.lab.comparison.variants.compose", configuration_of)
    all_options = comparisons(page)
    assert all_options
    for options in all_options:
        options.out = tmp_path
        check_options(options)
        assert list(plan_runs(options))


def test_rows_of_the_readme_are_read(tmp_path: Path) -> None:
    rows = re.findall(r"^ {4}(\{.*\})$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    questions = read_jsonl(tmp_path / "rows.jsonl", BadRows("fail"), key="data.train_path")
    pairs = [(question.text, question.answer) for question in questions]
    assert pairs == [("17+25=", "42"), ("60+8=", "68")]


def test_every_exit_code_is_explained() -> None:
    meanings, _, actions = (DOCS / "faults.md").read_text().partition("## What you can do")
    cells = re.findall(r"^\| ([\d, ]+) \| ", meanings, flags=re.MULTILINE)
    codes = {int(number) for cell in cells for number in cell.split(",")}
    assert codes == {1, *map(int, ExitCode)}
    action_codes = set(map(int, re.findall(r"^\| (\d+) \| ", actions, flags=re.MULTILINE)))
    assert action_codes == {code for code in codes if 0 < code < 128}


def test_the_readme_is_a_front_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    assert len(text.split()) <= 1000


def test_every_metric_is_explained() -> None:
    """In the first column of a table; capitals stand for names and numbers, `*` for any name."""
    cells = re.findall(r"^\| (`.*?) \|", (DOCS / "metrics.md").read_text(), flags=re.MULTILINE)
    names = re.findall(r"`([^`]+)`", " ".join(cells))
    patterns = [re.sub(r"\\\*|[A-Z]+", "[^/]+", re.escape(name)) for name in names]
    unexplained_names = {
        name
        for name in NAMES | ESPO_METRICS
        if not any(re.fullmatch(pattern, name) for pattern in patterns)
    }
    assert unexplained_names == set()


def test_keys_on_the_page_for_users_of_other_trainers_exist() -> None:
    """The last column of its tables names our keys: `section.key`, also with a value."""
    keys = set(declared_keys())
    unknown_keys = set()
    count = 0
    for line in (DOCS / "migration.md").read_text().splitlines():
        if line.startswith("| "):
            for word in re.findall(r"`([a-z_.]+\.[a-z_.]+)(?:=[^`]*)?`", line.split("|")[2]):
                count += 1
                # Names of columns are keys of a row, not declared keys
                key = word.rpartition(".")[0] if word.startswith("data.columns.") else word
                if key not in keys:
                    unknown_keys.add(word)
    assert count > 50
    assert unknown_keys == set()
