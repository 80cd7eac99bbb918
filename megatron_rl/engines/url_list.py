"""A file with the URLs of external engines, which users change while a run goes on."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from sglang_bridge.addresses import repeated_url_refusals, url_refusal
from sglang_bridge.engine import Engine


class UrlList:
    """The file of `engine.urls`: one URL a line. Empty lines and those with # are comments.

    log: writes a line for people.
    """

    def __init__(self, settings: EngineSettings, log: Callable[[str], None]) -> None:
        assert settings.urls_file is not None
        self.path = settings.urls_file
        self._settings = settings
        self._log = log
        self._text: str | None = None
        self._problem = ""

    def read_first(self) -> list[str]:
        """Return the URLs at the start of the run. Raises `Failure`."""
        try:
            self._text = self.path.read_text()
            urls = parse_urls(self._text)
            if not urls:
                raise ValueError("it names no engine. Write one URL a line")
        except (OSError, ValueError) as error:
            raise Failure(f"engine.urls={self.path}: {error}", ExitCode.REFUSED) from error
        return urls

    def read(self) -> list[str] | None:
        """Return the URLs if the file has changed. A file that is unusable changes nothing."""
        try:
            text = self.path.read_text()
            # A look at the names of hosts may take its time
            urls = None if text == self._text else parse_urls(text)
        except (OSError, ValueError) as error:
            self._report(f"warning: engine.urls={self.path} changes no engine: {error}")
            return None
        self._problem = ""
        self._text = text
        return urls

    def engine(self, url: str, node: int) -> Engine:
        """Return the engine at a URL. node: the one whose collector sends it requests."""
        settings = self._settings
        return Engine(
            url=url, node=node, tp=settings.tp, ep=settings.ep, quantization=settings.quantization
        )

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._log(problem)


def parse_urls(text: str) -> list[str]:
    """Return the URLs of a list. Raises ValueError, which names the URL and the rule."""
    lines = (line.strip() for line in text.splitlines())
    urls = [line for line in lines if line and not line.startswith("#")]
    refusals = [*filter(None, map(url_refusal, urls)), *repeated_url_refusals(urls)]
    if refusals:
        raise ValueError("; ".join(map(str, refusals)))
    return urls
