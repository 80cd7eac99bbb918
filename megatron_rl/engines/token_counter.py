"""Compares the token counts of engines and run.

The run knows the tokens of replies alone. An engine also counts what it sampled for requests whose
reply was lost, or that expired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import RequestFailed

_MAX_THREADS = 16


@dataclass(frozen=True)
class TokenComparison:
    """The tokens between two readings.

    engine_tokens: tokens that the engines count. uncounted_tokens: how many more these are than the
    run counts. Negative: the run counts more.
    """

    engine_tokens: int
    uncounted_tokens: int


class TokenCounter:
    """Reads the counters of all engines, from its creation on.

    A comparison needs the counters of all engines. If a counter cannot be read, there is none, and
    the next comparison covers its tokens too. A counter that went backwards belongs to a server
    that was started again. Comparisons then begin anew, without this server until `set_engines`
    names it again: its warm-up samples tokens too.

    log: writes a line for people. Each problem of an engine is written once.
    """

    def __init__(self, engines: Sequence[AdminClient], log: Callable[[str], None]) -> None:
        self._engines = engines
        self._log = log
        self._written_problems: set[tuple[str, str]] = set()
        self._counted_tokens = 0
        self._has_foreign_requests = False  # at the next reading
        self._counts = self._read()

    def set_engines(self, engines: Sequence[AdminClient], *, have_sampled: bool = True) -> None:
        """Read the counters of these engines from now on. Comparisons begin anew.

        have_sampled: requests of the run may be open, so that a reading now would be none of all
        tokens before or after it.
        """
        self._engines = engines
        self._counts = None if have_sampled else self._read()

    def restart(self) -> None:
        """Begin comparisons anew: tokens that a collector has received are known to nobody.

        The next reading begins none: the engines may still work on requests of that collector, and
        end those whose connection is closed within seconds.
        """
        self._counts = None
        self._has_foreign_requests = True

    def compare(self, counted_tokens: int) -> TokenComparison | None:
        """Compare the tokens since the last comparison. Returns None where a counter is missing.

        counted_tokens: the tokens that the run has counted since the last call. No request may run
        during the call: an engine counts a request when it ends.
        """
        self._counted_tokens += counted_tokens
        counts = self._read()
        if counts is None:
            return None
        earlier_counts = self._counts
        counted_tokens = self._counted_tokens
        self._counts = counts
        self._counted_tokens = 0
        if self._has_foreign_requests:
            self._has_foreign_requests = False
            self._counts = None
        if earlier_counts is None or self._counts is None:
            return None
        restarted_urls = [url for url, count in counts.items() if count < earlier_counts[url]]
        if restarted_urls:
            self._leave_out(restarted_urls, counts)
            return None
        engine_tokens = sum(counts.values()) - sum(earlier_counts.values())
        return TokenComparison(engine_tokens, engine_tokens - counted_tokens)

    def _leave_out(self, urls: Sequence[str], counts: dict[str, int]) -> None:
        """Count the tokens of other engines alone. counts: of all engines."""
        for url in urls:
            self._log(f"engine {url} was started again: it counts its tokens from 0")
        self._engines = [engine for engine in self._engines if engine.url not in urls]
        self._counts = {url: count for url, count in counts.items() if url not in urls}

    def _read(self) -> dict[str, int] | None:
        """Read all counters at the same time. Returns None if one is missing, or there is none."""
        if not self._engines:
            return None
        with ThreadPoolExecutor(min(_MAX_THREADS, len(self._engines))) as pool:
            readings = list(pool.map(self._read_one, self._engines))
        urls = [engine.url for engine in self._engines]
        counts = dict(zip(urls, readings, strict=True))
        complete_counts = {url: count for url, count in counts.items() if count is not None}
        return complete_counts if len(complete_counts) == len(counts) else None

    def _read_one(self, engine: AdminClient) -> int | None:
        try:
            count = engine.generated_tokens()
        except RequestFailed as error:
            self._write_problem(engine.url, "failure", f"its counter cannot be read ({error})")
            return None
        if count is None:
            self._write_problem(
                engine.url,
                "missing",
                "it does not count tokens. Start it with --enable-metrics",
            )
        return count

    def _write_problem(self, url: str, kind: str, text: str) -> None:
        if (url, kind) not in self._written_problems:
            self._written_problems.add((url, kind))
            self._log(f"account/engine_tokens is missing for engine {url}: {text}")
