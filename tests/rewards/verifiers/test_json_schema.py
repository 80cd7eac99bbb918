"""JSON that a schema accepts, within limits, and with nothing fetched."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.rewards import open_scorer
from megatron_rl.rewards.verifiers.json_schema import JsonSchemaVerifier
from megatron_rl.rewards.verifiers.json_text import last_json, read_json
from tests.support.questions import make_question

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


def grade(schema: Any, text: str) -> float | None:
    details = json.dumps({"schema": schema})
    prompt = Prompt(id="p", token_ids=(), answer="", task="t", details=details)
    return JsonSchemaVerifier().grade(prompt, text).reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"name": "Ann", "age": 3}', 1),
        ('Here:\n```json\n{"name": "Ann", "age": 3}\n```\nDone.', 1),
        ('```json\n{}\n```\n```json\n{"name": "Ann", "age": 3}\n```', 1),
        ('```json\n{"name": "Ann", "age": 3}\n```\n```\n{}\n```', 0),
        ('```python\n{}\n```\n{"name": "Ann", "age": 3}', 0),
        ('{"name": "Ann", "age": -3}', 0),
        ('{"name": "Ann"}', 0),
        ('{"name": "Ann", "age": 3, "age": 4}', 0),
        ('{"name": "Ann", "age": NaN}', 0),
        ('{"name": "Ann", "age": 1e999}', 0),
        ('{"name": "Ann", "age": ' + "9" * 301 + "}", 0),
        ('{"name": "Ann", "age": 3} and more', 0),
        ("no JSON", 0),
        ("", 0),
    ],
)
def test_json_of_a_response(text: str, reward: float) -> None:
    assert grade(PERSON, text) == reward


def test_limits_of_depth_and_size_hold_outside_strings() -> None:
    assert grade(True, "[" * 32 + "]" * 32) == 1
    assert grade(True, "[" * 33 + "]" * 33) == 0
    assert grade(True, json.dumps("[" * 100 + '\\"{' * 100)) == 1
    assert grade(True, json.dumps([0] * 1900)) == 1
    assert grade(True, json.dumps([0] * 2100)) == 0
    assert grade(True, json.dumps("x" * 70_000)) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    )
)
def test_values_come_back_from_plain_and_fenced_text(value: Any) -> None:
    for text in (json.dumps(value), f"x\n```json\n{json.dumps(value, indent=1)}\n```\ny"):
        assert read_json(last_json(text)) == value


@pytest.fixture
def requests() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that serves a schema, and the paths that were requested."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, *arguments: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()
    server.server_close()


def test_remote_references_are_refused_and_never_fetched(requests: tuple[str, list[str]]) -> None:
    url, paths = requests
    schema = {"$ref": f"{url}/schema.json"}
    with pytest.raises(ValueError, match=r"details .*#/\$defs/NAME"):
        JsonSchemaVerifier().check_answer(make_question("", json.dumps({"schema": schema})))
    with pytest.raises(Exception, match="Unresolvable"):
        grade(schema, "1")
    assert paths == []


@pytest.mark.parametrize(
    ("details", "problem"),
    [
        ("", "Expecting value"),
        ("{}", "no object with the one key schema"),
        ('{"schema": {}, "other": 1}', "no object with the one key schema"),
        ('{"schema": 3}', "neither an object nor a boolean"),
        ('{"schema": {"type": "person"}}', "is not valid under any"),
        ('{"schema": {"$ref": "#/$defs/none"}}', r"#/\$defs/none|none"),
        ('{"schema": {"pattern": "("}}', "is not a 'regex'"),
        ('{"schema": {"patternProperties": {"[": true}}}', "is not a 'regex'"),
        ('{"schema": {"$ref": "#"}}', "references have no end"),
    ],
)
def test_unusable_schemas_are_refused(details: str, problem: str) -> None:
    scorer = open_scorer(RewardSettings(name="json_schema"))
    with pytest.raises(ValueError, match=rf"(?s)details .*({problem}).*with a valid schema"):
        scorer.check_answer(make_question("", details))


def test_usable_schemas_are_accepted() -> None:
    verifier = JsonSchemaVerifier()
    draft7 = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {}}}
    for schema in (PERSON, True, {"const": {"$ref": "http://x"}}, draft7):
        verifier.check_answer(make_question("", json.dumps({"schema": schema})))
