"""Findings of a rehearsal and the table of compiled functions."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.lab.te_rehearsal.compiled.call_log import CallLog

_BEGIN = "<!-- calls: make te-rehearsal -->"
_END = "<!-- end of calls -->"


@dataclass(frozen=True)
class Finding:
    """The result of one check. detail: numbers, or what is wrong."""

    part: str
    name: str
    is_ok: bool
    detail: str


@dataclass
class Report:
    """Collects findings and prints each of them.

    part: the name of the part that runs now.
    """

    write: Callable[[str], None] = print
    findings: list[Finding] = field(default_factory=list)
    part: str = ""

    def add(self, name: str, is_ok: bool, detail: str) -> None:
        """Record a check."""
        self.findings.append(Finding(self.part, name, is_ok, detail))
        self.write(f"{'ok' if is_ok else 'FAILED':7} {self.part}: {name}: {detail}")

    def expect_nothing(self, name: str, faults: Sequence[str]) -> None:
        """Record a check that lists what is wrong. The message has the first three."""
        text = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if faults[3:] else "")
        self.add(name, not faults, text or "no difference")

    @property
    def has_failed(self) -> bool:
        """True if a check failed."""
        return not all(finding.is_ok for finding in self.findings)


def call_table(log: CallLog) -> list[str]:
    """Return the table of functions that were called, in Markdown, with the versions."""
    lines = [
        f"Transformer Engine {version('transformer_engine')}, "
        f"Megatron-Core {version('megatron-core')}, torch {version('torch')}:",
        "",
        "| compiled function | answer | calls |",
        "|---|---|---|",
    ]
    for name in log.functions:
        if log.counts[name]:
            lines.append(f"| `{name}` | {log.kind(name)} | {log.counts[name]} |")
    rest = [f"`{name}`" for name in log.functions if not log.counts[name]]
    text = f"Not called, {len(rest)} of {len(log.functions)}: {', '.join(rest)}."
    return [*lines, "", *textwrap.wrap(text, width=100)]


def write_table(path: Path, lines: Sequence[str]) -> None:
    """Replace the table in a document. Raises ValueError if it has no place for one."""
    text = path.read_text()
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{path}: add the lines {_BEGIN} and {_END}, between which the table goes")
    body = "\n".join(lines)
    path.write_text(f"{head}{begin}\n\n{body}\n\n{end}{tail}")
