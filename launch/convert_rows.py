"""Convert rows of slime or verl, or rows with other keys, to rows that the trainer reads.

    python launch/convert_rows.py train.parquet rows.jsonl --format verl
    python launch/convert_rows.py dapo.jsonl rows.parquet --format slime \\
        --input-key prompt --label-key label --apply-chat-template
    python launch/convert_rows.py gsm8k/train.parquet rows.jsonl --input-key question \\
        --label-key answer
    python launch/convert_rows.py rows.csv rows.jsonl --input-key question --label-key answer

IN is a JSONL, Parquet or CSV file. The first line of a CSV file names its columns. OUT is a new
file, with .jsonl or .parquet as its ending.

slime: the keys are those of its options --input-key, --label-key, --metadata-key and --tool-key.
With --apply-chat-template the input is a list of messages, or a text that becomes a user's message.
From the metadata, `id`, `task` and `difficulty` are kept.

verl: `prompt` becomes `messages`, `reward_model.ground_truth` becomes `answer`, `data_source`
becomes `task`. `extra_info.split` and `extra_info.index` become the `id`, and
`extra_info.difficulty` the difficulty. What only verl's own code reads is left out, such as
`ability` and `extra_info.tools_kwargs`.

Every row is checked as the trainer checks it. Rows that cannot be converted are listed with their
number and a reason, and nothing is written (exit code 3). With --skip they are left out.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.prompts.files.row import ChatMessage, parse_question
from megatron_rl.prompts.files.tables import write_parquet
from megatron_rl.prompts.question import shorten

MAX_PROBLEMS = 20
LABELS = ("id", "task", "difficulty")
Row = Mapping[str, msgspec.Raw]
"""The values of a row as JSON, so that numbers keep their digits."""


@dataclass(frozen=True)
class Keys:
    """The keys of slime's options.

    apply_chat_template: the input is messages, or becomes a user's message.
    """

    input: str = "prompt"
    label: str = "label"
    metadata: str = "metadata"
    tools: str | None = None
    apply_chat_template: bool = False


def main() -> int:
    """Run the command line."""
    arguments = parse_arguments()
    target = Path(arguments.target)
    if target.suffix not in (".jsonl", ".parquet"):
        return refuse(f"{target}: the output ends with .jsonl or .parquet. Rename it")
    if target.exists():
        return refuse(f"{target} exists already. Give another name, or remove it")
    keys = Keys(
        input=arguments.input_key,
        label=arguments.label_key,
        metadata=arguments.metadata_key,
        tools=arguments.tool_key,
        apply_chat_template=arguments.apply_chat_template,
    )
    convert = convert_verl if arguments.format == "verl" else lambda row: convert_slime(row, keys)
    try:
        rows, problems = convert_file(Path(arguments.source), convert)
    except (OSError, ValueError) as error:
        return refuse(
            f"{arguments.source} cannot be read ({error}). Give a JSONL, Parquet or CSV file"
        )
    print_problems(problems)
    if not rows:
        return refuse(f"none of the {len(problems)} rows of {arguments.source} can be converted")
    if problems and not arguments.skip:
        return refuse(
            f"{len(problems)} of {len(rows) + len(problems)} rows cannot be converted. Correct "
            "them, or leave them out with --skip"
        )
    write_rows(target, rows)
    print(f"{target}: {len(rows)} rows" + (f", {len(problems)} left out" if problems else ""))
    return ExitCode.OK


def print_problems(problems: Sequence[str]) -> None:
    """Print the first problems and the number of the others."""
    for problem in problems[:MAX_PROBLEMS]:
        print(shorten(problem), file=sys.stderr)
    if len(problems) > MAX_PROBLEMS:
        print(f"... and {len(problems) - MAX_PROBLEMS} more", file=sys.stderr)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or other arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="IN", help="a JSONL, Parquet or CSV file")
    parser.add_argument("target", metavar="OUT", help="a new .jsonl or .parquet file")
    parser.add_argument("--format", choices=("slime", "verl"), default="slime")
    parser.add_argument("--input-key", default=Keys.input)
    parser.add_argument("--label-key", default=Keys.label)
    parser.add_argument("--metadata-key", default=Keys.metadata)
    parser.add_argument("--tool-key")
    parser.add_argument("--apply-chat-template", action="store_true")
    parser.add_argument("--skip", action="store_true", help="leave out rows with problems")
    return parser.parse_args(arguments)


def refuse(problem: str) -> int:
    """Print a problem, and return the exit code of unusable data."""
    print(f"convert_rows.py: {problem}", file=sys.stderr)
    return ExitCode.BAD_DATA


def convert_file(
    source: Path, convert: Callable[[Row], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a file after conversion, and the problems of the others, by row.

    Raises ValueError or OSError if the file cannot be read.
    """
    rows = []
    problems = []
    origin_by_id: dict[str, str] = {}
    for origin, text in read_objects(source):
        try:
            row = convert(msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
            question = parse_question(
                msgspec.json.encode(row), origin, render_nothing, default_id=origin, default_task=""
            )
            first = origin_by_id.setdefault(question.id, origin)
            if first != origin:
                raise ValueError(f"id {question.id!r} is already used in {first}")
        except (ValueError, RecursionError) as error:
            problems.append(f"{origin}: {error}")
        else:
            rows.append(row)
    return rows, problems


def render_nothing(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Stand for a chat template: messages are rendered when the trainer reads them."""
    return "messages"


def read_objects(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the JSON text of every row. Raises ValueError or OSError."""
    with source.open("rb") as stream:
        is_parquet = stream.read(4) == b"PAR1"
    if is_parquet:
        import pyarrow.parquet

        number = 0
        for batch in pyarrow.parquet.ParquetFile(source).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                values = {key: value for key, value in row.items() if value is not None}
                yield f"{source} row {number}", msgspec.json.encode(values)
        return
    if source.suffix.lower() == ".csv":
        yield from read_csv(source)
        return
    with source.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content.strip():
                yield f"{source} line {number}", content


def read_csv(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the JSON text of every row of a CSV file. All values are texts.

    Raises ValueError if the file is not UTF-8, or a row has more values than the first line.
    """
    with source.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            for row in reader:
                place = f"{source} line {reader.line_num}"
                if None in row:
                    raise ValueError(f"{place}: more values than the first line has names")
                values = {key: value for key, value in row.items() if value}
                yield place, msgspec.json.encode(values)
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}") from error


def convert_slime(row: Row, keys: Keys) -> dict[str, Any]:
    """Convert a row that slime reads with these keys. Raises ValueError."""
    prompt = decode(row, keys.input)
    metadata = decode(row, keys.metadata, {})
    if not isinstance(metadata, dict):
        raise ValueError(f"`{keys.metadata}` is no object")
    result: dict[str, Any] = {}
    if keys.apply_chat_template and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    elif not keys.apply_chat_template and not isinstance(prompt, str):
        raise ValueError(f"`{keys.input}` holds messages. Give --apply-chat-template")
    result["messages" if keys.apply_chat_template else "prompt"] = prompt
    if keys.tools is not None and keys.tools in row:
        result["tools"] = decode_nested(row, keys.tools)
    result["answer"] = answer_of(require(row, keys.label), keys.label)
    return result | {name: metadata[name] for name in LABELS if metadata.get(name) is not None}


def convert_verl(row: Row) -> dict[str, Any]:
    """Convert a row that verl reads. Raises ValueError."""
    for key in ("images", "videos"):
        if decode(row, key, None):
            raise ValueError(f"the row has `{key}`, which the trainer does not read")
    judge = decode_raw(row, "reward_model")
    style = msgspec.json.decode(judge.get("style", msgspec.Raw(b'"rule"')))
    if style != "rule":
        raise ValueError(
            f"`reward_model.style` is {style!r}. Only `rule` compares with a reference answer"
        )
    extra_info = decode(row, "extra_info", {}) or {}
    task = decode(row, "data_source", "")
    result = {
        "messages": decode_nested(row, "prompt"),
        "answer": answer_of(
            require(judge, "ground_truth", "reward_model."), "reward_model.ground_truth"
        ),
    }
    if task:
        result["task"] = task
    if extra_info.get("index") is not None:
        parts = (task, extra_info.get("split"), extra_info["index"])
        result["id"] = "/".join(str(part) for part in parts if part not in (None, ""))
    if extra_info.get("difficulty") is not None:
        result["difficulty"] = extra_info["difficulty"]
    return result


def require(row: Row, key: str, section: str = "") -> msgspec.Raw:
    """Return a value as JSON. Raises ValueError without the key."""
    if key not in row:
        raise ValueError(f"`{section}{key}` is missing. The row has: {', '.join(row) or 'nothing'}")
    return row[key]


def decode(row: Row, key: str, *default: Any) -> Any:
    """Return a value. Raises ValueError if it is missing and there is no default."""
    if key not in row and default:
        return default[0]
    return msgspec.json.decode(require(row, key))


def decode_raw(row: Row, key: str) -> Row:
    """Return the values of an object as JSON. Raises ValueError for another value."""
    return msgspec.json.decode(require(row, key), type=dict[str, msgspec.Raw])


def decode_nested(row: Row, key: str) -> Any:
    """Return a list, which may be written as JSON text."""
    value = decode(row, key)
    return msgspec.json.decode(value) if isinstance(value, str) else value


def answer_of(value: msgspec.Raw, key: str) -> Any:
    """Return a reference answer: a text, a number as it is written, or the only one of a list."""
    content = msgspec.json.decode(value)
    if isinstance(content, list) and len(content) == 1:
        (value,) = msgspec.json.decode(value, type=list[msgspec.Raw])
        content = content[0]
    if isinstance(content, bool) or not isinstance(content, str | int | float):
        raise ValueError(
            f"`{key}` must be a text or a number, got {bytes(value)[:60].decode()}. Rewards that "
            "need more than one reference answer are your own code (reward=custom)"
        )
    return content if isinstance(content, str) else value


def write_rows(target: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write all rows, or nothing."""
    part = target.with_name(f"{target.name}.part")
    if target.suffix == ".parquet":
        write_parquet(part, rows)
    else:
        part.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    part.rename(target)


if __name__ == "__main__":
    sys.exit(main())
