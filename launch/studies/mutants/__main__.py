"""Mutation testing: change the code, and check that a unit test notices each change.

Start it in the root of the repository:

    make mutants
    make mutants ARGS="pure --only 'megatron_rl.credit*'"
    python -m launch.studies.mutants pure          # with mutmut on PYTHONPATH

mutmut changes the modules that are listed in `pure.cfg` and `mcore.cfg`, in copies of the
repository in build/mutants. Strings are left alone, because messages are no logic.

Outputs: every mutant that no test noticed, then a Markdown table by module. A mutant is killed if
a test failed or ran out of time. Exit code: 0, or 1 if fewer than 90 % of all mutants are killed.
"""

import argparse
import fnmatch
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

CONFIGURATIONS = Path(__file__).resolve().parent
ROOT = CONFIGURATIONS.parents[2]
COPIES = ROOT / "build" / "mutants"
# The parts of the repository that a copy needs
CONTENTS = (
    "megatron_rl",
    "sglang_bridge",
    "kernels",
    "launch",
    "hydra_conf",
    "tests",
    "pyproject.toml",
)
PARTS = ("pure", "mcore")
IGNORED_OPERATORS = {
    "operator_string",
    "operator_symmetric_string_methods_swap",
    "operator_unsymmetrical_string_methods_swap",
}
MIN_KILLED_SHARE = 0.9
MUTANT_SECONDS = 120
# Exit code of mutmut for a mutant without tests
NO_TESTS = 33

Mutant = tuple[str, str]  # (module, name)
# By module: name, outcome, and the changed lines of a mutant that survived
Outcomes = dict[str, list[list[str]]]


def copy_repository(part: str) -> Path:
    """Copy the repository, because mutmut writes beside its sources and they may change."""
    folder = COPIES / part
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in CONTENTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    shutil.copy(CONFIGURATIONS / f"{part}.cfg", folder / "setup.cfg")
    return folder


def mutate(part: str, patterns: list[str]) -> None:
    """Try all mutants in a copy, and write their outcomes to `results.json`.

    patterns: names of mutants, with wildcards. Empty means all.
    """
    from mutmut.mutation import mutators

    mutators.mutation_operators[:] = [
        pair for pair in mutators.mutation_operators if pair[1].__name__ not in IGNORED_OPERATORS
    ]
    from mutmut.__main__ import cli

    if part == "mcore":
        codes = try_in_forks(patterns)
    else:
        cli(["run", "--max-children", "2", *patterns], standalone_mode=False)
        codes = {mutant: code for mutant, code in read_codes().items() if code is not None}
    outcomes: Outcomes = {}
    for (module, name), code in codes.items():
        outcomes.setdefault(module, []).append(describe(name, code))
    Path("results.json").write_text(json.dumps(outcomes))


def describe(name: str, code: int) -> list[str]:
    """The name, the outcome and, for a survivor, the changed lines of a mutant."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code

    outcome = "timeout" if code == -signal.SIGALRM else status_by_exit_code[code]
    if outcome in ("killed", "timeout"):
        return [name, outcome]
    lines = get_diff_for_mutant(name).splitlines()[2:]
    return [name, outcome, *(line for line in lines if line[:1] in ("+", "-"))]


def read_codes() -> dict[Mutant, int | None]:
    """Read the exit codes of mutmut. None stands for a mutant that was not tried."""
    codes: dict[Mutant, int | None] = {}
    for path in sorted(Path("mutants").glob("**/*.py.meta")):
        module = str(path)[len("mutants/") : -len(".meta")]
        for name, code in json.loads(path.read_text())["exit_code_by_key"].items():
            codes[module, name] = code
    return codes


def try_in_forks(patterns: list[str]) -> dict[Mutant, int]:
    """Try each mutant in a fork of this process, two at a time.

    The workers of mutmut fork from a process that has run the tests. After a backward pass a
    process must not fork, so this process only imports, and a child of it makes the mutants and
    finds which test runs which function.
    """
    _run_in_child(make_mutants, "the tests do not pass without a mutation")
    os.chdir("mutants")
    sys.path[:0] = [os.getcwd()]
    importlib.import_module("launch.studies.mutants.preload")
    tests_by_function = _read_tests()
    os.chdir("..")
    codes: dict[Mutant, int] = {}
    children: dict[int, Mutant] = {}

    def wait_for_one() -> None:
        pid, status = os.wait()
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)

    for mutant in read_codes():
        name = mutant[1]
        if patterns and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        tests = tests_by_function.get(name.rpartition("__mutmut_")[0], [])
        if not tests:
            codes[mutant] = NO_TESTS
            continue
        pid = os.fork()
        if pid == 0:
            try_mutant(name, tests)
        children[pid] = mutant
        if len(children) > 1:
            wait_for_one()
    while children:
        wait_for_one()
    os.environ.pop("MUTANT_UNDER_TEST", None)
    return codes


def _run_in_child(work: Callable[[], None], error: str) -> None:
    """Run `work` in a fork. Ends the program with an error if it fails."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(error)


def _read_tests() -> dict[str, list[str]]:
    """Read the tests of each function, the fastest first."""
    stats = json.loads(Path("mutmut-stats.json").read_text())
    seconds = stats["duration_by_test"]
    return {
        function: sorted(tests, key=lambda test: seconds.get(test, 0.0))
        for function, tests in stats["tests_by_mangled_function_name"].items()
    }


def make_mutants() -> None:
    """Run the first steps of mutmut: write the mutated files, and run the tests once."""
    from mutmut import __main__ as steps

    steps.set_mutant_under_test("mutant_generation")
    Path("mutants").mkdir(exist_ok=True)
    steps.copy_src_dir()
    steps.copy_also_copy_files()
    steps.setup_source_paths()
    steps.create_mutants(2)
    steps.collect_or_load_stats(steps.get_mutant_runner(2))


def try_mutant(mutant: str, tests: Sequence[str]) -> None:
    """Run the tests of a mutant and exit with the code of pytest, or end by SIGALRM."""
    import pytest

    os.chdir("mutants")
    signal.alarm(MUTANT_SECONDS)
    os.environ["MUTANT_UNDER_TEST"] = mutant
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os._exit(int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])))


def report(outcomes: Outcomes) -> float:
    """Print survivors and the table. Returns the share of mutants that were killed."""
    print_survivors(outcomes)
    print("| module | mutants | killed | of these by time | survived | no test | other |")
    print("|---" * 7 + "|")
    total = Counter[str]()
    for module, mutants in outcomes.items():
        counts = Counter(outcome for _, outcome, *_ in mutants)
        total += counts
        print(table_row(module, counts))
    print(table_row("all", total))
    share = (total["killed"] + total["timeout"]) / max(total.total(), 1)
    print(f"{share:.1%} killed")
    return share


def print_survivors(outcomes: Outcomes) -> None:
    """Print every mutant that no test noticed, with its changed lines."""
    for mutants in outcomes.values():
        for name, outcome, *lines in mutants:
            if outcome not in ("killed", "timeout"):
                print(f"{name}: {outcome}", *lines, sep="\n    ")


def table_row(module: str, counts: Mapping[str, int]) -> str:
    """A row of the table. counts: number of mutants by outcome."""
    total = sum(counts.values())
    num_killed = counts["killed"] + counts["timeout"]
    num_other = total - num_killed - counts["survived"] - counts["no tests"]
    cells = (
        module,
        total,
        num_killed,
        counts["timeout"],
        counts["survived"],
        counts["no tests"],
        num_other,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def try_part(part: str, patterns: Sequence[str]) -> Outcomes:
    """Try the mutants of a part in a process of its own."""
    folder = copy_repository(part)
    options = ["--inside", part, "--only", *patterns]
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    subprocess.run(
        [sys.executable, "-m", "launch.studies.mutants", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=True,
    )
    outcomes: Outcomes = json.loads((folder / "results.json").read_text())
    return outcomes


def main() -> int:
    """Try all mutants, print the report and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.studies.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", help=f"parts among {', '.join(PARTS)} (default: all)")
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants, with wildcards")
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        mutate(options.inside, options.only)
        return 0
    outcomes: Outcomes = {}
    for part in options.parts or PARTS:
        outcomes |= try_part(part, options.only)
    return int(report(outcomes) < MIN_KILLED_SHARE)


if __name__ == "__main__":
    sys.exit(main())
