"""The engines of a run behind one `generate`, as one node's collector uses them.

Rank 0 alone decides which engines belong to the pool. The pool balances requests over them, and
repeats failed requests on others. An engine that keeps failing gets no requests, and rank 0 gets a
report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.collector.engines.gate import Gate
from megatron_rl.rollouts.collector.engines.members import Members
from megatron_rl.rollouts.collector.engines.partial_response import PartialResponse
from megatron_rl.rollouts.collector.engines.response_sampler import ResponseSampler
from megatron_rl.rollouts.wire.messages import (
    AbortRequests,
    FromCollector,
    Priority,
    slots_of_engine,
)
from megatron_rl.rollouts.wire.repetition import RepetitionStop
from sglang_bridge.client import GenerateClient
from sglang_bridge.engine import Engine
from sglang_bridge.generation import Generation
from sglang_bridge.settings import DEFAULT_KEEP_ALIVE_SECONDS, MANAGED_KEEP_ALIVE_SECONDS

# Of the deadline of a request, for each token of the longest response. A loaded engine takes up to
# some hundredths of a second for a token.
TOKEN_SECONDS = 0.1
# An engine aborts a request after its forward pass. An engine that takes so long hangs.
STOP_SECONDS = 120.0


@dataclass(frozen=True)
class RequestForm:
    """Properties that all requests share.

    longest_response: in tokens. The deadline of a request allows for a response of this length.
    route_shape: (hidden layers, top-k), needed to request routes.
    vocab_size: upper bound of token ids, None if it is unknown.
    """

    api_key: str | None
    longest_response: int
    route_shape: tuple[int, int] | None
    vocab_size: int | None


class EnginePool:
    """The engines of a run behind one `generate`. It starts without any.

    Requests go to the engines of the own node. While none of them can be used, they go to engines
    of other nodes. A request that runs there when an own engine comes back ends there.

    An engine that fails several times in a row, or that falls silent, gets no further requests as
    long as it stays in the set that rank 0 gives. Requests wait while there is no engine: rank 0
    limits that time.

    report: sends a message to rank 0. node: the own one.
    threads: decode large replies, and check responses for repetition.
    """

    def __init__(
        self,
        settings: EngineSettings,
        form: RequestForm,
        report: Callable[[FromCollector], Awaitable[None]],
        *,
        node: int = 0,
        threads: Executor | None = None,
    ) -> None:
        self._settings = settings
        self._form = form
        self._report = report
        self._threads = threads
        num_slots = slots_of_engine(settings.max_running_requests)
        self._members = Members(node, self._open_client, num_slots, report)
        self._gate = Gate()

    @property
    def num_slots(self) -> int:
        """The number of requests that may be in flight."""
        return self._members.slots.capacity

    @property
    def num_sampled(self) -> int:
        """The tokens that engines have sent."""
        return self._gate.num_sampled

    @property
    def idle_seconds(self) -> float:
        """The seconds in which the own node's engines worked on no request, as a mean over them."""
        return self._members.idle_seconds

    async def set_engines(self, engines: Sequence[Engine]) -> None:
        """Use exactly these engines from now on, and repeat requests of others elsewhere.

        An engine that the pool has already keeps its state. If it gets no requests, it must leave
        the pool and join again to get some.
        """
        await self._members.replace(engines)

    def set_version(self, version: int | None) -> None:
        """Use responses of these weights alone, from now on. None: of any weights."""
        self._members.version = version

    def pause(self) -> None:
        """Send no further request until `proceed`."""
        self._gate.shut()

    async def rest(self) -> None:
        """Wait until no engine works on a request.

        Requests that an engine aborts during a pause are continued after it. An engine that does
        not abort them within two minutes gets no requests, and others continue them.
        """
        if not await self._gate.rests_within(STOP_SECONDS):
            await self._members.leave_out_busy(
                f"it still worked on requests {STOP_SECONDS:g} s after they were aborted"
            )
        await self._gate.rest()

    def proceed(self) -> None:
        """Send requests again, and continue the responses that were interrupted."""
        self._gate.open()

    async def stop(self, group: str) -> int:
        """Request nothing more for a group, until `forget`. Its running requests are aborted.

        Returns the number of tokens that engines have sent for it, once no engine works on it.
        """
        return await self._gate.stop(group)

    def forget(self, group: str) -> None:
        """Count nothing for a group. It may be requested again."""
        self._gate.forget(group)

    async def close(self) -> None:
        """Close the connections to all engines."""
        await self._members.close()

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        rid: str,
        return_routes: bool,
        rejected_tokens: Counter[str],
        seed: int | None = None,
        priority: Priority = (0, 0),
        is_wanted: Callable[[], bool] = lambda: True,
        pieces: list[Generation] | None = None,
        stop: RepetitionStop | None = None,
        num_known_routes: int = 0,
    ) -> Generation:
        """Sample one response. Raises `EngineError` and `GenerationRejected`.

        A failed request goes to every other engine before it goes to the same one again. A response
        that cannot be used is sampled once more, by another engine. A request whose engine ends or
        falls silent is sampled again, with the same seed.

        rid: GROUP/ROLLOUT. rejected_tokens: receives the tokens of responses that cannot be used,
        by the reason. The tokens of a request without a reply are unknown.
        priority: among the responses that wait for a slot. It changes no token.
        is_wanted: if it returns False, nothing more is sent, and this waits until it is cancelled.
        pieces: the sampled part of the response. It receives further pieces as they arrive.
        stop: cuts a response off that repeats itself. Its finish reason is then LENGTH.
        num_known_routes: inputs, from the first, whose routes are not requested.
        """
        response = PartialResponse(
            token_ids, sampling, [] if pieces is None else pieces, num_known_routes
        )
        sampler = ResponseSampler(
            response,
            self._members,
            self._gate,
            rid=rid,
            priority=priority,
            return_routes=return_routes,
            seed=seed,
            is_wanted=is_wanted,
            stop=stop,
            rejected_tokens=rejected_tokens,
            threads=self._threads,
        )
        return await sampler.sample()

    def _open_client(self, engine: Engine) -> GenerateClient:
        deadline = self._settings.request_timeout_s
        deadline += TOKEN_SECONDS * self._form.longest_response
        is_managed = self._settings.mode == "managed"
        return GenerateClient(
            engine.url,
            api_key=self._form.api_key,
            deadline_seconds=deadline,
            route_shape=self._form.route_shape,
            vocab_size=self._form.vocab_size,
            abort=self._abort,
            threads=self._threads,
            server_keep_alive_seconds=(
                MANAGED_KEEP_ALIVE_SECONDS if is_managed else DEFAULT_KEEP_ALIVE_SECONDS
            ),
        )

    async def _abort(self, url: str, names: Sequence[str]) -> None:
        await self._report(AbortRequests(url, tuple(names)))
