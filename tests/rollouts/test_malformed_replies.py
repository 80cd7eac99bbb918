"""Every reply of an engine becomes a rollout with its contents, or a rejection with a reason.

These tests read each reply a second time, with the standard library alone, and compare the result
with the rollout.
"""

import asyncio
import base64
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.contracts.group import ENVIRONMENT_FAILURE
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import Role, Rollout
from megatron_rl.contracts.routes import RouteError, RouteShape
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.environments.rollout_builder import RolloutRejected
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.wire.messages import Drop, GroupDone, GroupRequest
from megatron_rl.rollouts.wire.store import read_rollout
from sglang_bridge.generation import Generation, GenerationRejected, decode_generation
from tests.support.collectors import Outbox
from tests.support.fake_engine import LAYERS, TOPK, configuration, fake_engine, serving
from tests.support.scripted_model import EOS, PROMPT, TOKENIZER

VOCABULARY = 48
EXPERTS = 8
BUDGET = 16
SHAPE = RouteShape(
    moe_layers=(0, 1, 2, 3), num_hidden_layers=LAYERS, num_experts=EXPERTS, topk=TOPK
)
SAMPLING = Sampling(max_new_tokens=BUDGET, temperature=1.0, stop_token_ids=(EOS,))
Reply = dict[str, Any]


@dataclass(frozen=True)
class ReplyContents:
    """Output of a reply.

    tokens: (token, log-probability, version) of each output token.
    rows: routes of each input token.
    """

    tokens: list[tuple[int, float, int]]
    rows: list[list[tuple[int, ...]]]


_UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    struct.error,
    RecursionError,
)


def read_reply(body: bytes, num_prompt: int, budget: int) -> ReplyContents | None:
    """Read a reply with the standard library alone. None if it cannot be trained on."""
    try:
        reply = json.loads(body, parse_constant=lambda name: 1 / 0)
        meta = reply["meta_info"]
        ids = reply["output_ids"]
        logprobs = [(float32(value), token) for value, token, _ in meta["output_token_logprobs"]]
        versions = read_versions(meta, len(ids))
        rows = read_routes(meta, num_prompt + len(ids) - 1)
        if versions is None or rows is None or not is_valid_output(meta, ids, logprobs, budget):
            return None
        values = [value for value, _ in logprobs]
        return ReplyContents(list(zip(ids, values, versions, strict=True)), rows)
    except _UNREADABLE:
        return None


def read_versions(meta: Reply, num_tokens: int) -> list[int] | None:
    """Return the version of each output token, None if the versions are invalid."""
    default = [{"version": meta["weight_version"], "start": 0, "end": num_tokens}]
    spans = meta.get("weight_versions") or default
    versions: list[int] = []
    for span in spans:
        version = int(span["version"].encode("ascii"))
        versions += [version] * len(range(span["start"], span["end"]))
    starts = [span["start"] for span in spans]
    ends = [span["end"] for span in spans]
    is_contiguous = starts == [0, *ends[:-1]] and len(versions) == num_tokens
    has_empty_span = any(span["start"] >= span["end"] for span in spans)
    is_ascending = versions == sorted(versions) and min(versions) >= 0
    is_rewritten = meta.get("num_retractions", 0) != 0 and len(set(versions)) != 1
    has_text = isinstance(meta["weight_version"], str)
    is_valid = all([is_contiguous, not has_empty_span, is_ascending, not is_rewritten, has_text])
    return versions if is_valid else None


def read_routes(meta: Reply, num_rows: int) -> list[list[tuple[int, ...]]] | None:
    """Return the routes of each input token, None if they are invalid."""
    raw = base64.b64decode(meta["routed_experts"], validate=True)
    experts = struct.unpack(f"<{len(raw) // 4}i", raw)
    if len(experts) != num_rows * LAYERS * TOPK:
        return None
    if any(expert not in range(EXPERTS) for expert in experts):
        return None
    choices = [experts[i : i + TOPK] for i in range(0, len(experts), TOPK)]
    if any(len(set(choice)) < TOPK for choice in choices):
        return None
    return [choices[i : i + LAYERS] for i in range(0, len(choices), LAYERS)]


def is_valid_output(
    meta: Reply, ids: list[int], logprobs: list[tuple[float, int]], budget: int
) -> bool:
    return (
        meta["finish_reason"]["type"] in ("stop", "length")
        and 0 < len(ids) <= budget
        and [token for _, token in logprobs] == ids
        and all(0 <= token < VOCABULARY for token in ids)
        and all(-1e4 <= value <= 1e-3 for value, _ in logprobs)
        and meta.get("num_retractions", 0) >= 0
        and meta.get("cached_tokens", 0) >= 0
    )


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def contents_of(rollout: Rollout) -> ReplyContents:
    """Return the output of a rollout."""
    assert rollout.segments[0].role is Role.PROMPT
    tokens = [
        (int(token), float(logprob), segment.version)
        for segment in rollout.segments
        if segment.role is Role.RESPONSE and segment.logprobs is not None
        for token, logprob in zip(segment.tokens, segment.logprobs, strict=True)
    ]
    assert rollout.routes is not None
    position = 0
    for segment in rollout.segments:
        assert segment.route_rows == (
            position,
            min(position + len(segment.tokens), len(rollout.routes)),
        )
        position += len(segment.tokens)
    assert position == len(rollout.routes) + 1
    return ReplyContents(
        tokens, [[tuple(choice) for choice in row] for row in rollout.routes.tolist()]
    )


def encode_routes(rows: list[list[tuple[int, int]]], form: str = "i") -> str:
    flat = [expert for row in rows for choice in row for expert in choice]
    return base64.b64encode(struct.pack(f"<{len(flat)}{form}", *flat)).decode()


def draw_routes(draw: st.DrawFn, count: int) -> list[list[tuple[int, int]]]:
    """Draw rows of distinct experts."""
    seed = draw(st.integers(0, 2**20))
    pairs = [
        (first, second) for first in range(EXPERTS) for second in range(EXPERTS) if first != second
    ]
    return [
        [pairs[(seed + 31 * row + 7 * layer) % len(pairs)] for layer in range(LAYERS)]
        for row in range(count)
    ]


@st.composite
def valid_reply(draw: st.DrawFn, num_prompt: int, budget: int = BUDGET) -> Reply:
    """Draw a valid reply of any length, with versions, retractions and a cached prefix."""
    count = draw(st.integers(1, budget))
    ids = draw(st.lists(st.integers(2, VOCABULARY - 1), min_size=count, max_size=count))
    cut = draw(st.integers(1, count))
    split = [("3", 0, cut), ("4", cut, count)] if cut < count else [("3", 0, count)]
    set_meta: Reply = {
        "finish_reason": {"type": draw(st.sampled_from(["stop", "length"]))},
        "weight_version": "3",
        "output_token_logprobs": [[draw(st.floats(-20, 0)), token, None] for token in ids],
        "routed_experts": encode_routes(draw_routes(draw, num_prompt + count - 1)),
        "cached_tokens": draw(st.integers(0, num_prompt)),
        "num_retractions": draw(st.integers(0, 2)) if cut == count else 0,
    }
    if draw(st.booleans()):
        set_meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in split]
    return {"output_ids": ids, "meta_info": set_meta}


def valid_routes(rows: int) -> str:
    return encode_routes([[(1, 2)] * LAYERS] * rows)


def change_routes(
    change: Callable[[list[list[tuple[int, int]]]], Any], form: str = "i"
) -> Callable[[Reply], None]:
    def damage(reply: Reply) -> None:
        raw = base64.b64decode(reply["meta_info"]["routed_experts"])
        flat = struct.unpack(f"<{len(raw) // 4}i", raw)
        choices = list(zip(flat[::TOPK], flat[1::TOPK], strict=True))
        rows = [choices[i : i + LAYERS] for i in range(0, len(choices), LAYERS)]
        reply["meta_info"]["routed_experts"] = encode_routes(change(rows) or rows, form)

    return damage


def set_meta(key: str, value: Any) -> Callable[[Reply], None]:
    """Set a key of `meta_info`.

    value: the new value, None to remove the key, or a function from the reply to one of these.
    """

    def damage(reply: Reply) -> None:
        new_value = value(reply) if callable(value) else value
        if new_value is None:
            reply["meta_info"].pop(key, None)
        else:
            reply["meta_info"][key] = new_value

    return damage


def change_logprobs(change: Callable[[list[list[Any]]], Any]) -> Callable[[Reply], None]:
    return lambda reply: change(reply["meta_info"]["output_token_logprobs"])


def set_versions(*parts: tuple[str, float, float]) -> Callable[[Reply], None]:
    """Set versions. parts: (version, start, end) as shares of the output tokens."""

    def new_value(reply: Reply) -> list[Reply]:
        n = len(reply["output_ids"])
        return [{"version": v, "start": round(a * n), "end": round(b * n)} for v, a, b in parts]

    return set_meta("weight_versions", new_value)


def set_first_choice(value: tuple[int, int]) -> Callable[[Reply], None]:
    return change_routes(lambda rows: [[value, *rows[0][1:]], *rows[1:]])


# Damages after which a valid reply must not be trained on, with the reason of the rejection
DAMAGES: dict[str, tuple[Callable[[Reply], None], str]] = {
    "a row too few": (change_routes(lambda rows: rows[:-1]), "routes_length"),
    "a row too many": (change_routes(lambda rows: [*rows, rows[-1]]), "routes_length"),
    "no rows": (change_routes(lambda rows: rows.clear()), "routes_length"),
    "a layer too few": (change_routes(lambda rows: [row[:-1] for row in rows]), "routes_length"),
    "an expert too few": (
        change_routes(lambda rows: [[(a,) for a, _ in row] for row in rows]),
        "routes_length",
    ),
    "16 bits": (change_routes(lambda rows: None, "h"), "routes_length"),
    "64 bits": (change_routes(lambda rows: None, "q"), "routes_length"),
    "floats": (change_routes(lambda rows: [[(1, 2)] * LAYERS for _ in rows], "f"), "routes_range"),
    "an expert that is not there": (set_first_choice((0, EXPERTS)), "routes_range"),
    "a negative expert": (set_first_choice((-1, 2)), "routes_range"),
    "an expert that is one in its lowest byte": (set_first_choice((256, 1)), "routes_range"),
    "an expert twice": (set_first_choice((5, 5)), "routes_duplicate"),
    "nothing recorded": (
        change_routes(lambda rows: [[(0, 0)] * LAYERS for _ in rows]),
        "routes_duplicate",
    ),
    "not base64": (
        set_meta("routed_experts", lambda r: "%" + r["meta_info"]["routed_experts"][1:]),
        "routes_encoding",
    ),
    "cut base64": (
        set_meta("routed_experts", lambda r: r["meta_info"]["routed_experts"][:-1]),
        "routes_encoding",
    ),
    "no routes": (set_meta("routed_experts", None), "routes_missing"),
    "a list of routes": (set_meta("routed_experts", [1, 2]), "malformed"),
    "no log-probabilities": (set_meta("output_token_logprobs", None), "logprobs_length"),
    "one fewer": (change_logprobs(lambda items: items.pop()), "logprobs_length"),
    "one more": (change_logprobs(lambda items: items.append(items[-1])), "logprobs_length"),
    "of other tokens": (
        change_logprobs(lambda items: items[0].__setitem__(1, 1)),
        "logprobs_length",
    ),
    "null": (change_logprobs(lambda items: items[-1].__setitem__(0, None)), "logprobs_nonfinite"),
    "NaN": (change_logprobs(lambda items: items[-1].__setitem__(0, float("nan"))), "malformed"),
    "minus infinity": (
        change_logprobs(lambda items: items[-1].__setitem__(0, float("-inf"))),
        "malformed",
    ),
    "beyond float32": (
        change_logprobs(lambda items: items[-1].__setitem__(0, -1e300)),
        "logprobs_nonfinite",
    ),
    "float32's lowest": (
        change_logprobs(lambda items: items[-1].__setitem__(0, -3.4028234663852886e38)),
        "logprobs_tiny",
    ),
    "positive": (change_logprobs(lambda items: items[0].__setitem__(0, 0.5)), "logprobs_positive"),
    "words": (change_logprobs(lambda items: items[0].__setitem__(0, "x")), "malformed"),
    "no version": (set_meta("weight_version", None), "malformed"),
    "a version that is a word": (
        set_meta(
            "weight_versions",
            lambda r: [{"version": "default", "start": 0, "end": len(r["output_ids"])}],
        ),
        "version",
    ),
    "a version in other digits": (set_versions(("٣", 0, 1)), "version"),
    "a version below zero": (set_versions(("-1", 0, 1)), "version"),
    "versions that end early": (set_versions(("3", 0, 0.4)), "versions"),
    "versions that start late": (set_versions(("3", 0.6, 1)), "versions"),
    "an empty span": (set_versions(("3", 0, 0), ("4", 0, 1)), "versions"),
    "an unknown end": (set_meta("finish_reason", {"type": "tired"}), "finish_reason"),
    "no end": (set_meta("finish_reason", None), "malformed"),
    "a token beyond the vocabulary": (
        lambda reply: reply["output_ids"].__setitem__(0, VOCABULARY),
        "token_range",
    ),
    "no tokens": (lambda reply: reply.update(output_ids=[]), "routes_length"),
    "retractions below zero": (set_meta("num_retractions", -1), "malformed"),
}


def order_versions_backwards(reply: Reply) -> None:
    set_versions(("4", 0, 0.5), ("3", 0.5, 1))(reply)


def retract_into_new_weights(reply: Reply) -> None:
    """Give the old tokens the routes of the new weights."""
    set_versions(("3", 0, 0.5), ("4", 0.5, 1))(reply)
    reply["meta_info"]["num_retractions"] = 1


DAMAGES_OF_TWO_TOKENS = {  # or more
    "an older version later": (order_versions_backwards, "versions"),
    "retracted into new weights": (retract_into_new_weights, "routes_rewritten"),
}


class CollectorBench:
    """A collector with an engine whose replies are given by the test.

    The engine is added again for each of them: one that keeps failing gets no requests.
    """

    def __init__(self) -> None:
        self.body = b""
        self.count = 0
        self._loop = asyncio.new_event_loop()
        self._outbox = Outbox()
        self._engine = fake_engine(lambda n, request: self.body, seconds=0.0)
        self._url = self._loop.run_until_complete(self._engine.__aenter__())
        self._collector = Collector(0, configuration(), self._outbox.put)

    def submit(self, body: bytes) -> Rollout | str:
        """Return the rollout of a reply, or the reason why there is none."""
        self.body = body
        self.count += 1
        return self._loop.run_until_complete(self._submit(f"g{self.count}"))

    async def _submit(self, name: str) -> Rollout | str:
        await self._collector.handle(serving(self._url))
        await self._collector.handle(
            GroupRequest(group_id=name, prompt=PROMPT, num_samples=1, sampling=SAMPLING)
        )
        message = await asyncio.wait_for(self._outbox.get(), 30)
        assert isinstance(message, GroupDone), message
        rollouts = [read_rollout(ref) for ref in message.group.rollouts]
        reasons = [
            reason for reason, count in message.group.rejections.items() for _ in range(count)
        ]
        assert len(rollouts) + len(reasons) == 1
        await self._collector.handle(Drop((name,)))
        await self._collector.handle(serving())
        return rollouts[0] if rollouts else reasons[0]

    def close(self) -> None:
        self._loop.run_until_complete(self._collector.close())
        self._loop.run_until_complete(self._engine.__aexit__(None, None, None))
        self._loop.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[CollectorBench]:
    test_bench = CollectorBench()
    yield test_bench
    test_bench.close()


N = len(PROMPT.token_ids)
quick = settings(suppress_health_check=[HealthCheck.too_slow])


def check(bench: CollectorBench, body: bytes) -> Rollout | str:
    result = bench.submit(body)
    contents = read_reply(body, N, BUDGET)
    if isinstance(result, str):
        assert result != ENVIRONMENT_FAILURE
    else:
        assert contents is not None
        assert contents_of(result) == contents
        assert result.segments[0].tokens.tolist() == list(PROMPT.token_ids)
    return result


@pytest.mark.slow
@quick
@given(st.data())
def test_a_valid_reply_becomes_a_rollout_with_its_contents(
    bench: CollectorBench, data: st.DataObject
) -> None:
    assert isinstance(check(bench, json.dumps(data.draw(valid_reply(N))).encode()), Rollout)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DAMAGES, *DAMAGES_OF_TWO_TOKENS])
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_a_damaged_reply_is_rejected_with_its_reason(
    bench: CollectorBench, name: str, data: st.DataObject
) -> None:
    damage, reason = (DAMAGES | DAMAGES_OF_TWO_TOKENS)[name]
    reply = data.draw(valid_reply(N).filter(lambda r: len(r["output_ids"]) > 1))
    damage(reply)
    body = json.dumps(reply).encode()
    assert read_reply(body, N, BUDGET) is None
    assert check(bench, body) == reason


@pytest.mark.slow
@quick
@given(st.data())
def test_several_damages_are_one_rejection_unless_they_cancel(
    bench: CollectorBench, data: st.DataObject
) -> None:
    reply = data.draw(valid_reply(N))
    for name in data.draw(
        st.lists(st.sampled_from(list(DAMAGES)), min_size=2, max_size=3, unique=True)
    ):
        try:
            DAMAGES[name][0](reply)
        except (LookupError, TypeError, ValueError, struct.error):
            continue  # nothing left to damage
    check(bench, json.dumps(reply).encode())


@pytest.mark.slow
@settings(quick, max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_replies_with_changed_bytes_are_rejected_or_read_as_they_are(
    bench: CollectorBench, data: st.DataObject
) -> None:
    body = bytearray(json.dumps(data.draw(valid_reply(N))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        if data.draw(st.booleans()):
            body[at] = data.draw(st.integers(0, 255))
        else:
            del body[at : at + data.draw(st.integers(1, 40))]
            body = body or bytearray(b"{")
    check(bench, bytes(body))


def test_input_that_breaks_parsers_is_malformed(bench: CollectorBench) -> None:
    for body in (
        b'{"x":' + b"[" * 200_000,
        b"",
        b"\xff\xfe",
        b'{"output_ids":[1],"meta_info":{"weight_version":"\xff"',
        b'{"output_ids":[2],"meta_info":{"finish_reason":{"type":"stop"},'
        b'"weight_version":"3","\x80":0,'
        b'"output_token_logprobs":[[-0.5,2,null]],"routed_experts":"%s"}}'
        % valid_routes(N).encode(),
    ):
        assert check(bench, body) == "malformed"


def test_a_reply_with_too_many_tokens_is_rejected(bench: CollectorBench) -> None:
    reply = {
        "output_ids": [5] * (BUDGET + 1),
        "meta_info": {
            "finish_reason": {"type": "length"},
            "weight_version": "3",
            "output_token_logprobs": [[-0.5, 5, None]] * (BUDGET + 1),
            "routed_experts": encode_routes([[(1, 2)] * LAYERS] * (N + BUDGET)),
        },
    }
    assert check(bench, json.dumps(reply).encode()) == "too_long"


Rejection = GenerationRejected | RolloutRejected | RouteError


async def play_two_turns(episode: Episode) -> None:
    await episode.respond()
    episode.observe("12")
    await episode.respond()


def two_turns(
    data: st.DataObject,
) -> tuple[Episode, list[tuple[bytes, int, int]], Rejection | None]:
    """Run an episode of two turns with drawn replies. The second one may be damaged.

    Returns the episode, its replies with the numbers of prompt tokens and of tokens that were
    allowed, and the error.
    """
    replies: list[tuple[bytes, int, int]] = []

    async def generate(tokens: Any, sampling: Sampling) -> Generation:
        reply = data.draw(valid_reply(len(tokens), sampling.max_new_tokens))
        if not replies:
            reply = data.draw(valid_reply(len(tokens), 4))
            reply["meta_info"]["finish_reason"] = {"type": "stop"}
        elif data.draw(st.booleans()):
            DAMAGES[data.draw(st.sampled_from(list(DAMAGES)))][0](reply)
        body = json.dumps(reply).encode()
        replies.append((body, len(tokens), sampling.max_new_tokens))
        return decode_generation(
            body, num_prompt_tokens=len(tokens), route_shape=(LAYERS, TOPK), vocab_size=VOCABULARY
        )

    rules = EpisodeRules(sampling=SAMPLING, routes=SHAPE, train_truncated=True)
    episode = Episode(PROMPT, generate, TOKENIZER, rules, rollout_id="g/0")

    try:
        asyncio.run(play_two_turns(episode))
    except (GenerationRejected, RolloutRejected, RouteError) as error:
        return episode, replies, error
    return episode, replies, None


@quick
@given(st.data())
def test_a_second_turn_keeps_the_routes_of_the_first(data: st.DataObject) -> None:
    """The routes of tokens that were read before are ignored in the second reply, valid or not."""
    episode, replies, error = two_turns(data)
    if error is not None:
        assert error.reason
        return
    contents = contents_of(episode.rollout())
    first, second = (read_reply(*reply) for reply in replies)
    assert first is not None
    num_known_rows = N + len(first.tokens) - 1
    assert contents.tokens[: len(first.tokens)] == first.tokens
    assert contents.rows[:num_known_rows] == first.rows
    if second is not None:
        assert contents.tokens[len(first.tokens) :] == second.tokens
        assert contents.rows[num_known_rows:] == second.rows[num_known_rows:]
