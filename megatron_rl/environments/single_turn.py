"""One response to each prompt."""

from __future__ import annotations

from megatron_rl.environments.episode import Episode


class SingleTurn:
    """The model responds once."""

    async def play(self, episode: Episode) -> None:
        await episode.respond()
