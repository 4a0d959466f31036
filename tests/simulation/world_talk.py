"""Conversations of the simulated world: prompts that begin as others did, in every way that reuse meets.

Shared system prompts, next turns that extend an answer, repeated prompts, edited histories, answers that were cut
short. Everything is drawn from a generator of its own, so that worlds without state rows are what they were.
"""

from __future__ import annotations

import random
from typing import Any

from tests.simulation.world_clients import AT_PLACE, MS, PLACES, Client
from tests.simulation.world_model import LETTERS

ROWS = (0, 0, 1, 2, 4, 12)  # 1: a spare one at best; 12: never short in most worlds
REUSE_PLACES = (
    "in restore, frames [] of",
    "in restore, frames [1] of 1",
    "in snapshot, frames [] of",
    "in snapshot, frames [1] of 1",
    "between end and publication",
)
SYSTEM_LENGTHS = (7, 16, 20, 33)


class Talk:
    """What a world's clients say to each other's texts.

    Args:
        seed: The world's.
        max_context: Prompts leave room for an answer of a few tokens.
    """

    def __init__(self, seed: int, max_context: int) -> None:
        self.rng = random.Random(f"talk of {seed}")
        self._most = max_context - 3
        self._systems = [[self.rng.choice(LETTERS) for _ in range(length)] for length in SYSTEM_LENGTHS]
        self._spoken: list[tuple[list[int], tuple[int, ...]]] = []  # texts and where their messages end

    def shape(self, client: Client) -> None:
        """Let a client that is about to arrive begin as somebody did, or with a system prompt."""
        rng = self.rng
        if len(client.prompt) > self._most or rng.random() < 0.2:
            return
        if self._spoken and rng.random() < 0.6:
            text, ends = rng.choice(self._spoken[-12:])
            if rng.random() < 0.3:
                text = _whole(text[: rng.randrange(1, len(text) + 1)])  # edited, or heard in part
        else:
            text = rng.choice(self._systems)
            ends = (len(text),)
        own = client.prompt[: rng.choice([0, 1, 3, 17, 40])]
        client.prompt = _whole([*text, *own][: self._most])
        known = (*(end for end in ends if end <= min(len(text), len(client.prompt))), len(client.prompt))
        client.message_ends = tuple(sorted(set(known))) if rng.random() < 0.7 else ()
        if client.leaves == AT_PLACE:
            client.leave_place = rng.choice((*REUSE_PLACES, *PLACES))

    def heard(self, client: Client, world: Any) -> None:
        """An answer is complete, or its client has left: others may go on with it, at once too."""
        text = _whole([*client.prompt, *client.tokens.get(0, [])])
        ends = (*client.message_ends, min(len(client.prompt), len(text)), len(text))
        self._spoken.append((text, tuple(sorted(set(ends)))))
        if world.may_arrive and self.rng.random() < 0.4:
            pause = self.rng.choice([0, 0, MS, 15 * MS])
            world.clock.after(pause, lambda: world.arrive_behind(text, ends))


def _whole(text: list[int]) -> list[int]:
    """Without the bytes of a character at the end that may not be complete: its rest would be half of one."""
    end = len(text)
    while end > 1 and 0x80 <= text[end - 1] < 0x100:
        end -= 1
    return text[:end]
