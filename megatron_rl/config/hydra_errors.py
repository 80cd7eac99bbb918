"""Refusals of what Hydra may not be asked, and of what it cannot compose."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hydra.errors import MissingConfigException, OverrideParseException

from megatron_rl.config.keys import declared_keys, unknown_key
from megatron_rl.contracts.paths import missing_directory
from megatron_rl.contracts.refusal import Refusal

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_QUESTIONS: dict[str, tuple[str, ...]] = {  # with the words that may follow
    "--help": (),
    "-h": (),
    "--hydra-help": (),
    "--version": (),
    "--resolve": (),
    "--cfg": ("job",),
    "-c": ("job",),
    "--info": _INFO,
    "-i": _INFO,
}
_COMPOSE = "The command python launch/train_rl.py --cfg job shows what is composed"
# What the libraries say | the rule, None for their own first line | the remedy
_KNOWN = (
    (r"[Ii]nterpolation", None, "Name an existing key in ${...}, or quote it for the shell"),
    (
        r"appears more than once|Multiple values for",
        "This group has a choice already",
        "Replace it, without the +",
    ),
    (r"item is already at", "This key has a value already", "Write it without the +: KEY=VALUE"),
    (r"Ambiguous value", "Hydra reads several values", "Quote it for the shell: 'KEY=\"VALUE\"'"),
    (
        r"override must be a string",
        "A group needs the name of one of its options",
        "Choose one that --help lists",
    ),
)


def split_override(text: str) -> tuple[str, str]:
    """Key and value of one `key=value` of the command line, its prefix +, ++ or ~ taken off."""
    key, _, value = text.partition("=")
    return key.lstrip("+~"), value


def settings_of(arguments: Sequence[str]) -> list[str]:
    """The arguments without questions and the words that belong to them."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [
        text
        for before, text in pairs
        if not text.startswith("-") and text not in _QUESTIONS.get(before, ())
    ]


def as_typed(override: str) -> str:
    """run.name=2026_11_21 in quotes, where text is wanted: Hydra would read the number 20261121."""
    key, value = split_override(override)
    declared = declared_keys().get(key)
    text = declared is not None and str(declared.type).split(" | ")[0] in ("str", "Name")
    plain = re.fullmatch(r"[\w.+-]+", value) and value != "null"
    return f"{override.removesuffix(value)}'{value}'" if text and plain else override


def forbidden_arguments(arguments: Sequence[str]) -> Iterator[Refusal]:
    """Hydra's options but for its questions, its own settings but for the place of a user's files,
    deleted keys.
    """
    for text, following in zip(arguments, [*arguments[1:], ""], strict=False):
        key, value = split_override(text)
        if text.startswith("-") and key not in _QUESTIONS:
            rule = "One torchrun is one run: it takes key=value, and Hydra's questions --help, --cfg and --info"
            own = key.lstrip("-") in declared_keys()
            remedy = "Loop in the shell; hydra.searchpath=[file://DIR] is for files of your own"
            yield Refusal(key, value, rule, f"Write {text.lstrip('-')}" if own else remedy)
        elif key in ("--cfg", "-c") and (value or following) != "job":
            yield Refusal(
                key, value or following, "It shows the configuration of a job", "Write --cfg job"
            )
        elif key == "hydra.searchpath" and (lost := missing_directory(value)):
            yield Refusal(
                key,
                value,
                f"There is no directory {lost}",
                "Write hydra.searchpath=[file:///DIRECTORY]",
            )
        elif key != "hydra.searchpath" and re.split("[@./]", key)[0] == "hydra":
            rule = "Hydra's own settings are fixed: one torchrun is one run, and only the run writes files"
            yield Refusal(
                key,
                value,
                rule,
                "run.root and run.name say where; loop in the shell for several runs",
            )
        elif text.startswith("~") and key in declared_keys():
            remedy = f"Leave out ~{key}, and set what should differ"
            yield Refusal(key, value, "Cannot be deleted: every key always exists", remedy)


def as_refusal(error: Exception, overrides: Sequence[str]) -> Refusal:
    """The refusal of a configuration that could not be composed.

    overrides: the command line's, for their values.
    """
    given = dict(map(split_override, overrides))
    if isinstance(error, OverrideParseException):
        key, value = split_override(error.override)
        if "=" not in error.override:
            return Refusal(key, value, "A setting is key=value, without spaces", f"Write {key}=...")
        items = ",".join(f"'{item.strip()}'" for item in value.strip("[]").split(","))
        example = f'"{key}=[{items}]"' if value.startswith("[") else f"'{key}=\"{value}\"'"
        return Refusal(key, value, "Hydra cannot parse this", f"Quote it for the shell: {example}")
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
        key = group or next(
            (key for key, value in given.items() if value == option), "configuration"
        )
        remedy = f"Choose one of {', '.join(error.options)}" if error.options else _COMPOSE
        return Refusal(
            key,
            option,
            f"There is no such file in {'/'.join(filter(None, ('hydra_conf', group)))}",
            remedy,
        )
    text = str(error.__cause__ or error).strip()
    key = _blamed(f"{error}\n{text}", given)
    if re.match(r"Key '.+?' is not in struct", text):
        return unknown_key(key, given.get(key, "?"))
    if type(error).__module__.startswith("yaml"):
        return Refusal(
            key,
            given.get(key, "?"),
            f"A file is not YAML: {' '.join(text.split())}",
            "Correct it there",
        )
    rule, remedy = next(
        ((r, m) for pattern, r, m in _KNOWN if re.search(pattern, text)), (None, _COMPOSE)
    )
    remedy = remedy.replace("KEY", key).replace("VALUE", given.get(key, "?"))
    return Refusal(
        key, given.get(key, "?"), rule or (text.splitlines() or [type(error).__name__])[0], remedy
    )


def _blamed(message: str, given: dict[str, str]) -> str:
    """The key that a message is about; where it names none, the only group chosen on the command
    line.
    """
    patterns = (
        r"full_key: (\S+)",
        r"Could not \w+ '(.+?)'",
        r"(\S+) appears more than once",
        r"values for (\S+?)\.",
        r"already at '(.+?)'",
        r"argument '\+*(.+?)=",
    )
    named = next((found[1] for pattern in patterns if (found := re.search(pattern, message))), None)
    groups = [key for key in given if "." not in key]
    groups = [
        key for key in groups if given[key] == "null" or not given[key][:1].isalpha()
    ] or groups
    named = named or (groups[0] if len(groups) == 1 else "configuration")
    return next((key for key in given if key.startswith(f"{named}.") and named not in given), named)
