"""Stream of training prompts from several sources, each with its share."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

from megatron_rl.config.schema import DataSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import PromptCursor
from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.shares import Shares
from megatron_rl.prompts.source import ExcludedRows, PromptSource


class PromptMixture(PromptSource):
    """Stream in which each source offers its share of the prompts.

    Every source has its own epochs and its own order. `Shares` decides whose turn it is, whatever
    became of earlier prompts. A source whose prompts are all in the step already loses its turn.

    prompts: training and held-out prompts of each source, by its name.
    """

    def __init__(
        self,
        prompts: Mapping[str, tuple[Sequence[Prompt], Sequence[Prompt]]],
        settings: DataSettings,
        excluded_rows: ExcludedRows | None = None,
        rates: Mapping[str, PassRate] | None = None,
    ) -> None:
        self._names = tuple(prompts)
        self._weights = [settings.sources[name].weight for name in prompts]
        self._shares = Shares(self._weights)
        self._sources = [
            PromptSource(train, held_out, settings, rates=rates, name=name)
            for name, (train, held_out) in prompts.items()
        ]
        self._index_by_name = {name: index for index, name in enumerate(self._names)}
        self._begin_id_counts()
        super().__init__(
            [prompt for train, _ in prompts.values() for prompt in train],
            [prompt for _, held_out in prompts.values() for prompt in held_out],
            settings,
            excluded_rows,
            rates,
        )

    @property
    def num_available(self) -> int:
        """Number of training prompts in the pass-rate range, of all sources."""
        return sum(source.num_available for source in self._sources)

    def set_pass_rate_range(self, pass_rate_range: Sequence[float] | None) -> None:
        """Offer only prompts whose pass rate lies in [low, high] from now on. None: all prompts."""
        super().set_pass_rate_range(pass_rate_range)
        for source in self._sources:
            source.set_pass_rate_range(pass_rate_range)

    def begin_step(self) -> None:
        """Begin a step. Prompts that the previous step could not take twice come first."""
        for source in self._sources:
            source.begin_step()
        self._begin_id_counts()

    def offer(self, ids_of_step: Collection[str]) -> tuple[Prompt, int] | None:
        """Return the next training prompt and the epoch of its source.

        Returns None if the step has all prompts. ids_of_step: ids that the step has already.
        """
        if len(ids_of_step) >= self.num_available:
            return None
        self._count_ids(ids_of_step)
        while True:
            index = self._shares.next_source()
            offer = self._sources[index].offer(self._ids_of_step[index])
            if offer is not None:
                self._last_id = offer[0].id
                return offer

    @property
    def cursor(self) -> PromptCursor:
        """Position in the stream and in each source, which `seek` takes."""
        cursors = tuple(source.cursor for source in self._sources)
        return PromptCursor(
            epoch=min(cursor.epoch for cursor in cursors),
            position=sum(self._shares.counts),
            digest=self._mixture_digest(cursors),
            sources=cursors,
            picks=tuple(self._shares.counts),
        )

    def seek(self, cursor: PromptCursor) -> None:
        """Continue after the prompts that an earlier run has taken.

        Raises `PromptDataError` if that run had other sources, weights or prompts, or other prompts
        in its range.
        """
        if len(cursor.sources) != len(self._sources) or len(cursor.picks) != len(self._sources):
            raise PromptDataError(
                f"run.resume: the checkpoint's run had {len(cursor.sources) or 'no'} sources in "
                f"data.sources, this run has {len(self._sources)}. Give it the same sources, or "
                "start another run"
            )
        for name, source, position in zip(self._names, self._sources, cursor.sources, strict=True):
            try:
                source.seek(position)
            except PromptDataError as error:
                raise PromptDataError(f"data.sources.{name}: {error}") from error
        if cursor.digest != self._mixture_digest(cursor.sources):
            raise PromptDataError(
                "run.resume: the checkpoint's run had other names or weights in data.sources. Give "
                "it the same ones, or start another run"
            )
        self._shares.counts = list(cursor.picks)
        self._begin_id_counts()

    def require(self, n: int) -> None:
        """Raise `PromptDataError` unless every source has enough prompts for a step of `n`."""
        super().require(n)
        for index, (name, source) in enumerate(zip(self._names, self._sources, strict=True)):
            max_prompts = self._shares.most_in(index, n)
            if source.num_available >= max_prompts:
                continue
            key = f"data.sources.{name}.weight={self._weights[index]:g}"
            in_range = ""
            if source.num_available < len(source.train):
                limits = list(self._pass_rate_range or ())
                in_range = f" in data.pass_rate_range={limits} (of {len(source.train)})"
            raise PromptDataError(
                f"{key}: a step of rollout.prompts_per_step={n} takes up to {max_prompts} "
                f"different prompts of this source, which has {source.num_available}{in_range}. "
                "Lower its weight or rollout.prompts_per_step, or give it more prompts"
            )

    def _begin_id_counts(self) -> None:
        self._ids_of_step: list[set[str]] = [set() for _ in self._names]
        self._num_ids = 0
        self._last_id = ""

    def _count_ids(self, ids_of_step: Collection[str]) -> None:
        """Sort the ids of the step by source. Usually the last offer is the only new one."""
        num_new = len(ids_of_step) - self._num_ids
        if num_new == 1 and self._last_id in ids_of_step:
            self._ids_of_step[self._index_of(self._last_id)].add(self._last_id)
        elif num_new:
            self._ids_of_step = [set() for _ in self._names]
            for prompt_id in ids_of_step:
                self._ids_of_step[self._index_of(prompt_id)].add(prompt_id)
        self._num_ids = len(ids_of_step)

    def _index_of(self, prompt_id: str) -> int:
        return self._index_by_name[prompt_id.partition("/")[0]]

    def _mixture_digest(self, cursors: Sequence[PromptCursor]) -> str:
        """Return a digest of the names, weights and prompts of all sources."""
        digest = hashlib.sha256()
        for name, weight, cursor in zip(self._names, self._weights, cursors, strict=True):
            digest.update(f"{name}\t{weight!r}\t{cursor.digest}\n".encode())
        return digest.hexdigest()
