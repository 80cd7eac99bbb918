"""`make mutants`: mutmut over the modules named in `pure.cfg` and `mcore.cfg`, in copies of the
tree.

    python launch/studies/mutants/__main__.py [pure|mcore ...] [--only 'megatron_rl.credit*']

Prints what no test noticed, then a table by module; ends with 1 when fewer than `ENOUGH` of all are
killed. Killed: a test failed, or ran out of time; a worker that crashed shows nothing. Strings are
left alone: messages are no logic.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STAGES = ROOT / "build" / "mutants"
TREE = (
    "megatron_rl",
    "sglang_bridge",
    "kernels",
    "launch",
    "hydra_conf",
    "tests",
    "pyproject.toml",
)
PARTS = ("pure", "mcore")
NOISE = {
    "operator_string",
    "operator_symmetric_string_methods_swap",
    "operator_unsymmetrical_string_methods_swap",
}
ENOUGH = 0.9


def stage(part: str) -> Path:
    """A copy of the tree: mutmut writes beside what it reads, and the tree may change meanwhile."""
    folder = STAGES / part
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in TREE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    shutil.copy(HERE / f"{part}.cfg", folder / "setup.cfg")
    return folder


def mutate(part: str, only: list[str]) -> None:
    """In the stage: run, then write what came of every mutant to `results.json`."""
    from mutmut.mutation import mutators

    mutators.mutation_operators[:] = [
        pair for pair in mutators.mutation_operators if pair[1].__name__ not in NOISE
    ]
    from mutmut.__main__ import cli
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code

    if part == "mcore":
        codes = fork_for_each(only)
    else:
        cli(["run", "--max-children", "2", *only], standalone_mode=False)
        codes = known()
    outcomes: dict[str, list[list[str]]] = {}
    for (module, name), code in codes.items():
        outcome = "timeout" if code == -signal.SIGALRM else status_by_exit_code[code]
        shown = (
            [] if outcome in ("killed", "timeout") else get_diff_for_mutant(name).splitlines()[2:]
        )
        outcomes.setdefault(module, []).append(
            [name, outcome, *(line for line in shown if line[:1] in ("+", "-"))]
        )
    Path("results.json").write_text(json.dumps(outcomes))


def known(*, tried: bool = True) -> dict[tuple[str, str], int]:
    """mutmut's exit codes by module and mutant."""
    return {
        (str(path)[8:-5], name): code
        for path in sorted(Path("mutants").glob("**/*.py.meta"))
        for name, code in json.loads(path.read_text())["exit_code_by_key"].items()
        if code is not None or not tried
    }


def fork_for_each(only: list[str]) -> dict[tuple[str, str], int]:
    """What mutmut's own workers cannot: a process that has run a backward pass must not be forked,
    so this one only imports. A child of it makes the mutants and finds which test runs which
    function."""
    if not (child := os.fork()):
        prepare()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the tests do not pass without a mutation")
    os.chdir("mutants")
    sys.path[:0] = [os.getcwd()]
    importlib.import_module("launch.studies.mutants.preload")
    stats = json.loads(Path("mutmut-stats.json").read_text())
    tests, seconds = stats["tests_by_mangled_function_name"], stats["duration_by_test"]
    os.chdir("..")
    codes, running = {}, {}

    def wait() -> None:
        pid, status = os.wait()
        codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)

    for key in known(tried=False):
        if only and not any(fnmatch.fnmatch(key[1], pattern) for pattern in only):
            continue
        chosen = sorted(
            tests.get(key[1].rpartition("__mutmut_")[0], ()),
            key=lambda test: seconds.get(test, 0.0),
        )
        if not chosen:
            codes[key] = 33  # mutmut's for no tests
            continue
        if not (child := os.fork()):
            try_one(key[1], chosen)
        running[child] = key
        if len(running) > 1:
            wait()
    while running:
        wait()
    os.environ.pop("MUTANT_UNDER_TEST", None)
    return codes


def prepare() -> None:
    """mutmut's first steps: the mutated tree, and statistics of one run of the tests."""
    from mutmut import __main__ as steps

    steps.set_mutant_under_test("mutant_generation")
    Path("mutants").mkdir(exist_ok=True)
    steps.copy_src_dir()
    steps.copy_also_copy_files()
    steps.setup_source_paths()
    steps.create_mutants(2)
    steps.collect_or_load_stats(steps.get_mutant_runner(2))


def try_one(mutant: str, tests: list[str]) -> None:
    """Never returns: ends with pytest's exit code, or by the alarm."""
    import pytest

    os.chdir("mutants")
    signal.alarm(120)
    os.environ["MUTANT_UNDER_TEST"] = mutant
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os._exit(int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])))


def report(found: dict[str, list[list[str]]]) -> float:
    """Prints survivors and the table; the share that was killed."""
    for mutants in found.values():
        for name, outcome, *changed in mutants:
            if outcome not in ("killed", "timeout"):
                print(f"{name}: {outcome}", *changed, sep="\n    ")
    print(
        "| module | mutants | killed | of these by time | survived | no test | other |",
        "|---" * 7 + "|",
        sep="\n",
    )
    total = Counter[str]()
    rows = [
        (module, Counter(outcome for _, outcome, *_ in mutants))
        for module, mutants in found.items()
    ]
    for _, counts in rows:
        total += counts
    for module, counts in [*rows, ("all", total)]:
        killed, survived, untested = (
            counts["killed"] + counts["timeout"],
            counts["survived"],
            counts["no tests"],
        )
        other = counts.total() - killed - survived - untested
        cells = (module, counts.total(), killed, counts["timeout"], survived, untested, other)
        print("| " + " | ".join(map(str, cells)) + " |")
    share = (total["killed"] + total["timeout"]) / max(total.total(), 1)
    print(f"{share:.1%} killed")
    return share


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all without one")
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants, with wildcards")
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        mutate(chosen.inside, chosen.only)
        return 0
    found = {}
    for part in chosen.parts or PARTS:
        folder = stage(part)
        command = [
            sys.executable,
            folder / "launch/studies/mutants/__main__.py",
            "--inside",
            part,
            "--only",
            *chosen.only,
        ]
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, check=True
        )
        found |= json.loads((folder / "results.json").read_text())
    return int(report(found) < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
