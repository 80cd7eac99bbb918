"""The columns of a file of samples, described in docs/samples.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.rollout import FinishReason, Role
from megatron_rl.records.samples.sample import (
    Sample,
    SampleKind,
    SampleQuestion,
    SampleSegment,
    SampleTokens,
    SampleTraining,
)

if TYPE_CHECKING:
    import pyarrow as pa


FORMAT = "megatron_rl samples"
# A new version changes the meaning of a column, or removes one. A new column does not need one.
VERSION = 1
FORMAT_KEY = b"format"
VERSION_KEY = b"version"

_PLAIN_COLUMNS = {
    "step": "int32",
    "group": "int32",
    "group_kind": "string",
    "rollout_id": "string",
    "sample_index": "int32",
    "prompt_id": "string",
    "task": "string",
    "difficulty": "string",
    "prompt": "string",
    "expected_answer": "string",
    "reward": "float64",
    "correctness": "float64",
    "penalty": "float64",
    "answer": "string",
    "scoring_seconds": "float64",
    "no_reward_reason": "string",
    "repetition": "float64",
    "finish_reason": "string",
    "is_trained": "bool",
    "advantage": "float64",
    "weight": "float64",
    "num_tokens": "int32",
    "mean_logprob": "float64",
    "mean_mismatch": "float64",
    "clip_share": "float64",
}
# Tables of older runs lack it
_PARTS = "parts"
_FLOAT_LISTS = ("rollout_logprobs", "logprobs", "entropies", "ratios", "advantages")


class UnknownFormat(ValueError):
    """A table does not hold samples in a version that this program reads."""


def schema() -> pa.Schema:
    """Return the columns with their types, and the version."""
    import pyarrow as pa  # slow, and only runs that keep samples need it

    segment = pa.struct(
        {
            "role": pa.string(),
            "version": pa.int32(),
            "trainable": pa.bool_(),
            "start": pa.int32(),
            "stop": pa.int32(),
            "text": pa.string(),
        }
    )
    fields = {name: pa.type_for_alias(alias) for name, alias in _PLAIN_COLUMNS.items()}
    fields |= {"kinds": pa.list_(pa.string()), "segments": pa.list_(segment)}
    fields |= {"tokens": pa.list_(pa.int32()), "token_texts": pa.list_(pa.string())}
    fields |= {name: pa.list_(pa.float32()) for name in _FLOAT_LISTS}
    fields |= {"clips": pa.list_(pa.int8()), _PARTS: pa.map_(pa.string(), pa.float64())}
    return pa.schema(
        fields, metadata={FORMAT_KEY: FORMAT.encode(), VERSION_KEY: str(VERSION).encode()}
    )


def to_table(samples: Sequence[Sample]) -> pa.Table:
    """Return a table with one row for each sample."""
    import pyarrow as pa

    columns = schema()
    rows = [to_row(sample) for sample in samples]
    arrays = []
    for name in columns.names:
        values = [row[name] for row in rows]
        if name in _FLOAT_LISTS:
            arrays.append(_float_lists(values))
        else:
            if name == _PARTS:
                values = [list(parts.items()) for parts in values]
            arrays.append(pa.array(values, columns.field(name).type))
    return pa.Table.from_arrays(arrays, schema=columns)


def to_row(sample: Sample) -> dict[str, Any]:
    """Return the values of all columns. Lists of numbers are arrays, with NaN for null."""
    verdict = sample.verdict
    tokens = sample.tokens
    return {
        "step": sample.step,
        "group": sample.group,
        "sample_index": sample.sample_index,
        "rollout_id": sample.rollout_id,
        "kinds": [str(kind) for kind in sample.kinds],
        **vars(sample.question),
        "reward": verdict.reward,
        "correctness": verdict.correctness,
        "penalty": verdict.penalty,
        "answer": verdict.answer,
        "scoring_seconds": verdict.seconds,
        "no_reward_reason": verdict.reason,
        _PARTS: verdict.parts,
        "repetition": sample.repetition,
        "finish_reason": str(sample.finish_reason),
        **vars(sample.training),
        "segments": [vars(segment) | {"role": str(segment.role)} for segment in sample.segments],
        "num_tokens": len(tokens),
        "mean_logprob": tokens.mean_logprob,
        "mean_mismatch": tokens.mean_mismatch,
        "clip_share": tokens.clip_share,
        "tokens": tokens.ids,
        "token_texts": tokens.texts,
        "clips": tokens.clips,
        **{name: getattr(tokens, name) for name in _FLOAT_LISTS},
    }


def from_table(table: pa.Table) -> Iterator[Sample]:
    """Yield the samples of a table in the order of its rows. Raises `UnknownFormat`."""
    metadata = table.schema.metadata or {}
    version = metadata.get(VERSION_KEY, b"").decode(errors="replace")
    if metadata.get(FORMAT_KEY) != FORMAT.encode() or version != str(VERSION):
        name = metadata.get(FORMAT_KEY, b"unknown").decode(errors="replace")
        raise UnknownFormat(
            f"it has the format {name!r} version {version!r}, and this program reads "
            f"{FORMAT!r} version {VERSION}"
        )
    missing_columns = sorted(set(schema().names) - {*table.column_names, _PARTS})
    if missing_columns:
        raise UnknownFormat(f"it lacks the columns {', '.join(missing_columns)}")
    list_columns = {"tokens": np.int32} | dict.fromkeys(_FLOAT_LISTS, np.float32)
    rows = table.drop_columns([*list_columns]).to_pylist()
    lists = {name: _arrays(table[name], dtype) for name, dtype in list_columns.items()}
    for index, row in enumerate(rows):
        yield _sample(row, {name: arrays[index] for name, arrays in lists.items()})


def _float_lists(arrays: Sequence[np.ndarray]) -> pa.Array:
    """Return lists of float32, with null for NaN."""
    import pyarrow as pa

    values = np.concatenate([np.empty(0, np.float32), *arrays]).astype(np.float32)
    offsets = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values, mask=np.isnan(values)))


def _arrays(column: pa.ChunkedArray, dtype: type[np.generic]) -> list[np.ndarray]:
    """Return the lists of a column as arrays. Null becomes NaN."""
    return [
        row.values.to_numpy(zero_copy_only=False).astype(dtype)
        for chunk in column.chunks
        for row in chunk
    ]


def _part[Part: (SampleQuestion, SampleTraining)](kind: type[Part], row: Mapping[str, Any]) -> Part:
    """Make a part of a sample whose fields have the names of their columns."""
    return kind(**{field.name: row[field.name] for field in fields(kind)})


def _sample(row: dict[str, Any], arrays: dict[str, np.ndarray]) -> Sample:
    clips = row["clips"]
    segments = tuple(
        SampleSegment(**segment | {"role": Role(segment["role"])}) for segment in row["segments"]
    )
    verdict = Verdict(
        reward=row["reward"],
        correctness=row["correctness"],
        penalty=row["penalty"],
        answer=row["answer"],
        seconds=row["scoring_seconds"],
        reason=row["no_reward_reason"],
        parts=dict(row.get(_PARTS, ())),
    )
    return Sample(
        step=row["step"],
        group=row["group"],
        sample_index=row["sample_index"],
        rollout_id=row["rollout_id"],
        kinds=tuple(map(SampleKind, row["kinds"])),
        question=_part(SampleQuestion, row),
        verdict=verdict,
        repetition=row["repetition"],
        finish_reason=FinishReason(row["finish_reason"]),
        training=_part(SampleTraining, row),
        segments=segments,
        tokens=SampleTokens(
            ids=arrays["tokens"],
            texts=tuple(row["token_texts"]),
            clips=None if clips is None else np.array(clips, np.int8),
            **{name: arrays[name] for name in _FLOAT_LISTS},
        ),
    )
