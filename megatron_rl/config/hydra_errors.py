"""Refusals of what Hydra may not be asked, and of what it cannot compose."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hydra.errors import MissingConfigException, OverrideParseException

from megatron_rl.config.keys import declared_keys, unknown_key
from megatron_rl.config.refusal import Refusal

_QUESTIONS = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
_ABOUT_QUESTIONS = {"--resolve", "--package", "-p"}
_COMPOSE = "The command python launch/train_rl.py --cfg job shows what is composed"
# What the libraries say | the rule, None for their own first line | the remedy
_KNOWN = (
    (r"[Ii]nterpolation", None, "Name an existing key in ${...}, or quote it for the shell"),
    (r"appears more than once|Multiple values for", "This group has a choice already", "Replace it, without the +"),
)


def split_override(text: str) -> tuple[str, str]:
    """Key and value of one `key=value` of the command line, its prefix +, ++ or ~ taken off."""
    key, _, value = text.partition("=")
    return key.lstrip("+~"), value


def forbidden_arguments(arguments: Sequence[str]) -> Iterator[Refusal]:
    """Hydra's options but for its questions, its own settings but for the place of a user's files, deleted keys."""
    asked = {text.partition("=")[0] for text in arguments}
    allowed = _QUESTIONS | (_ABOUT_QUESTIONS if asked & _QUESTIONS else set())
    for text in arguments:
        key, value = split_override(text)
        if text.startswith("-") and key not in allowed:
            rule = "One torchrun is one run: it takes key=value, and Hydra's questions --help, --cfg and --info"
            yield Refusal(key, value, rule, "Loop in the shell; hydra.searchpath=[file://DIR] is for files of your own")
        elif key != "hydra.searchpath" and re.split("[@./]", key)[0] == "hydra":
            rule = "Hydra's own settings are fixed: one torchrun is one run, and only the run writes files"
            yield Refusal(key, value, rule, "run.root and run.name say where; loop in the shell for several runs")
        elif text.startswith("~") and key in declared_keys():
            rule = "Cannot be deleted: every key always exists"
            yield Refusal(key, value, rule, f"Leave out ~{key}, and set what should differ")


def as_refusal(error: Exception, overrides: Sequence[str]) -> Refusal:
    """The refusal of a configuration that could not be composed. overrides: the command line's, for their values."""
    given = dict(map(split_override, overrides))
    if isinstance(error, OverrideParseException):
        key, value = split_override(error.override)
        if "=" not in error.override:
            return Refusal(key, value, "A setting is key=value, without spaces", f"Write {key}=...")
        example = "\"key=['a','b']\"" if value.startswith("[") else "'key=\"value\"'"
        return Refusal(key, value, "Hydra cannot parse this", f"Quote it for the shell: {example}")
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
        key = group or next((key for key, value in given.items() if value == option), "configuration")
        remedy = f"Choose one of {', '.join(error.options)}" if error.options else _COMPOSE
        return Refusal(key, option, f"There is no such file in {'/'.join(filter(None, ('hydra_conf', group)))}", remedy)
    text = str(error.__cause__ or error).strip()
    key = _blamed(f"{error}\n{text}", given)
    if re.match(r"Key '.+?' is not in struct", text):
        return unknown_key(key, given.get(key, "?"))
    if type(error).__module__.startswith("yaml"):
        return Refusal(key, given.get(key, "?"), f"A file is not YAML: {' '.join(text.split())}", "Correct it there")
    rule, remedy = next(((r, m) for pattern, r, m in _KNOWN if re.search(pattern, text)), (None, _COMPOSE))
    return Refusal(key, given.get(key, "?"), rule or (text.splitlines() or [type(error).__name__])[0], remedy)


def _blamed(message: str, given: dict[str, str]) -> str:
    """The key that a message is about; where it names none, the only group chosen on the command line."""
    patterns = (r"full_key: (\S+)", r"Could not \w+ '(.+?)'", r"(\S+) appears more than once", r"values for (\S+?)\.")
    named = next((found[1] for pattern in patterns if (found := re.search(pattern, message))), None)
    groups = [key for key in given if "." not in key]
    return named or (groups[0] if len(groups) == 1 else "configuration")
