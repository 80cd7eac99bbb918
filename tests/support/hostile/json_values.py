"""Responses that take long or much memory when they are read or validated as JSON."""

from __future__ import annotations

import json
from typing import Any

from tests.support.hostile.cases import HostileCases, make_prompt

_SCHEMAS: list[Any] = [
    {"type": "array", "uniqueItems": True},
    {"type": "object", "patternProperties": {"^(a+)+$": {"type": "integer"}}, "minProperties": 1},
    {"type": "string", "pattern": "^(a|aa)+$"},
    {
        "$defs": {
            "tree": {
                "anyOf": [
                    {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                    {"type": "integer", "multipleOf": 0.01},
                ]
            }
        },
        "$ref": "#/$defs/tree",
        "type": "array",
    },
]
_RESPONSES = [
    "[" * 200_000,
    "[" * 200_000 + "]" * 200_000,
    "[" * 1000 + "]" * 1000,
    "[" * 33 + "]" * 33,
    "[" * 32 + "]" * 32,
    '{"a":' * 100_000 + "1" + "}" * 100_000,
    '{"a":' * 500 + "1" + "}" * 500,
    "9" * 3_000_000,
    "[" + "9" * 5000 + "]",
    "[" + "9" * 300 + "]",
    "[" + "9" * 299 + ".5]",
    "-" * 1_000_000,
    "1e999999999",
    "[1e308, 1e-308]",
    "[1E400]",
    "[-1e99999]",
    "0." + "0" * 1_000_000 + "1",
    "[NaN]",
    "[Infinity]",
    "[-Infinity]",
    "NaN" * 100_000,
    json.dumps([{"a": n % 3} for n in range(900)]),
    json.dumps([[n] for n in range(900)]),
    json.dumps([{"a": n} for n in range(20_000)]),
    json.dumps(list(range(1900))),
    json.dumps(list(range(9000))),
    json.dumps([[]] * 1900),
    json.dumps({f"k{n}": n for n in range(1900)}),
    json.dumps({f"k{n}": n for n in range(90_000)}),
    '{"a": 1, "a": 1}',
    "{" + ",".join(['"a": 1'] * 1500) + "}",
    "{" + ",".join(['"a": 1'] * 100_000) + "}",
    json.dumps({"a" * 30 + "!": 1}),
    json.dumps({"a" * 5000 + "!": 1}),
    json.dumps({"a" * 60_000: 1}),
    json.dumps("a" * 45 + "!"),
    json.dumps("a" * 60_000 + "!"),
    json.dumps("a" * 3_000_000),
    json.dumps("\u0000" * 10_000),
    json.dumps("\U0001f600" * 4000),
    '"' + '\\"' * 30_000,
    '"' * 60_001,
    '"\\u' * 20_000,
    '"\\ud800"',
    "\\" * 60_000,
    " " * 3_000_000 + "[1]",
    "\n" * 3_000_000,
    "[1" + " " * 3_000_000 + "]",
    "```json\n" * 300_000,
    "```json\n[1]\n```\n" * 100_000,
    "```" * 500_000,
    "```json\n" + "[" * 200_000 + "\n```",
    '{"$ref": "http://127.0.0.1:9/x"}',
    '{"$schema": "file:///etc/passwd"}',
    '{"__class__": "os.system", "__reduce__": ["touch escaped"]}',
    "__import__('os').system('touch escaped')",
    "[" + "'a'," * 500 + "]",
    "[1,2,]",
    "[1 2]",
    "{'a': 1}",
    "\ufeff[1]",
    "[1]\x00",
    "[" + "true," * 1998 + "true]",
]

CASES = HostileCases(
    name="json_schema",
    options={},
    prompts=[make_prompt("", json.dumps({"schema": schema})) for schema in _SCHEMAS],
    responses=_RESPONSES,
    ordinary=["[1, 2]", "[1, 1]", '{"aa": 1}', '"aaa"', "x"],
)
