"""Clients of a simulated world: what they ask, when they leave, and what they must have been told.

Life of a client: 1. `arrive` asks, or is refused at once; 2. the engine's outputs go into a real
`Mailbox`, which a slow client empties late; 3. some leave, at a time or at something they see;
4. `problem` compares all that came with the slow reference.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from helios_jax.engine.mailbox import Mailbox
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import OutputKind, SamplingParams
from helios_jax.errors import CapacityError, RequestError, UnavailableError
from tests.simulation.world_grammar import FORMS
from tests.simulation.world_model import LETTERS
from tests.simulation.world_reference import Answer, reference, shown

MS = 1_000_000
PATIENT, AT_TIME, AT_FIRST, AT_TEXT, AT_ONCE, AT_END = "patient", "time", "first output", "text", "at once", "end"
AT_PLACE = "place"
PLACES = (  # where a request can be when its client leaves; see `World.place`
    "before it was taken",
    "in the queue",
    "in initialize, frames [] of",
    "in initialize, frames [1] of 1",
    "in prompt, frames [] of 0",
    "in prompt, frames [] of 1",
    "in prompt, frames [1] of 1",
    "in decode, frames [] of 0",
    "in decode, frames [] of 1",
    "in decode, frames [1] of 1",
    "in decode, frames [1] of 2",
    "in decode, frames [2] of 2",
    "in decode, frames [1, 2] of 2",
    "between end and publication",
    "after its end",
)


@dataclasses.dataclass
class Client:
    """One request of the world, and all that came back.

    Attributes:
        leaves: When the client gives up, if it does: at a time, at its first output, once it has seen
            `leave_chars` characters, right after asking, when it sees the end (too late), or as soon
            as its request is at `leave_place`, one of `PLACES`.
        read_ns: How long it lets an output lie in its mailbox.
        refused: The error that it got instead of an accepted request.
        hurt: The world broke something of this request: it may fail.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    leaves: str = PATIENT
    leave_ns: int = 0
    leave_chars: int = 0
    leave_place: str = ""
    read_ns: int = 0
    message_ends: tuple[int, ...] = ()
    refused: Exception | None = None
    request: Any = None
    box: Mailbox | None = None
    has_left: bool = False
    hurt: bool = False
    is_reading: bool = False
    ends: int = 0
    cached: int = 0
    error: Exception | None = None
    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    text: dict[int, str] = dataclasses.field(default_factory=dict)
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    complaint: str = ""

    def arrive(self, world: Any) -> None:
        """Ask; a refusal is an answer."""
        try:
            self.request = world.intake.request(
                self.prompt, self.params, request_id=self.name, sink=world, arrival_ns=world.clock.now_ns,
                message_ends=self.message_ends,
            )  # fmt: skip
            self.box = Mailbox(self.params.output_kind)
            world.rig.engine.board.submit(self.request)
        except (CapacityError, RequestError, UnavailableError) as error:
            self.refused = error
            return
        if self.leaves == AT_TIME:
            world.clock.after(self.leave_ns, lambda: self.leave(world))
        elif self.leaves == AT_ONCE:
            self.leave(world)

    def leave(self, world: Any) -> None:
        """Give up, wherever the request is."""
        if not self.has_left:
            self.has_left = True
            world.note_leave(self)
            world.heard(self)
            world.rig.engine.board.abort(self.name)

    def told(self, item: RequestOutput | Exception, world: Any) -> None:
        """The engine delivers; a slow client looks later."""
        assert self.box is not None
        self.box.put(item)
        if self.read_ns == 0:
            self.read(world)
        elif not self.is_reading:
            self.is_reading = True
            world.clock.after(self.read_ns, lambda: self.read(world))

    def read(self, world: Any) -> None:
        """Take everything out of the mailbox."""
        self.is_reading = False
        assert self.box is not None
        while self.box._arrived.is_set() and not self.ends:
            try:
                self.box.get().send(None)
            except StopIteration as taken:
                self._take(taken.value, world)
            except Exception as error:
                self.error, self.ends = error, self.ends + 1
        seen = max((len(text) for text in self.text.values()), default=0)
        leaves = self.leaves == AT_FIRST and seen
        leaves = (
            leaves or (self.leaves == AT_TEXT and seen >= self.leave_chars) or (self.leaves == AT_END and self.ends)
        )
        if leaves:
            self.leave(world)

    def _take(self, output: RequestOutput, world: Any) -> None:
        delta = self.params.output_kind is OutputKind.DELTA
        for part in output.outputs:
            old = self.tokens.get(part.index, []), self.text.get(part.index, "")
            if part.index in self.reasons and (delta or part.finish_reason != self.reasons[part.index]):
                self.complaint = f"output {part.index} goes on after its end"
            self.tokens[part.index] = old[0] + part.token_ids if delta else list(part.token_ids)
            self.text[part.index] = old[1] + part.text if delta else part.text
            grows = self.tokens[part.index][: len(old[0])] == old[0] and self.text[part.index].startswith(old[1])
            if not grows:
                self.complaint = f"output {part.index} took back what it had said"
            if part.finish_reason is not None:
                self.reasons[part.index] = part.finish_reason
        self.cached = max(self.cached, output.num_cached_tokens or 0)
        self.ends += output.finished
        if output.finished and not self.has_left:
            world.heard(self)

    def problem(self, world: Any) -> str:
        """What is wrong with all that came, empty if nothing is."""
        if self.refused is not None:
            return "a refused client was told something" if self.ends or self.tokens else ""
        if self.complaint or self.ends != 1:
            return self.complaint or f"ended {self.ends} times"
        if self.error is not None:
            return "" if self.hurt or world.is_dead else f"failed without a cause: {self.error!r}"
        for index in range(self.params.n):
            room = world.intake.max_context - len(self.prompt)
            wanted = reference(self.prompt, self.params, index, room, world.tokenizer)
            wrong = self._wrong(index, wanted, world)
            if wrong:
                return f"output {index} {wrong}"
        return ""

    def _wrong(self, index: int, wanted: Answer, world: Any) -> str:
        tokens, text, reason = self.tokens.get(index, []), self.text.get(index, ""), self.reasons.get(index)
        if reason == wanted.reason and (tokens, text) == (wanted.tokens, wanted.text):
            return ""
        if reason not in ("abort", "error"):
            return f"ended by {reason} with {text!r} {tokens}, {wanted} was due"
        if reason == "abort" and not self.has_left:
            return "was aborted although its client waits"
        if reason == "error" and not self.hurt:
            return "failed without a cause"
        if tokens != wanted.tokens[: len(tokens)]:
            return f"has tokens {tokens}, the beginning of {wanted.tokens} was due"
        if not self.params.stop and text != shown(tokens, world.tokenizer):
            return f"shows {text!r} for tokens {tokens}"
        return ""


def new_client(rng: random.Random, name: str, max_context: int) -> Client:
    """Somebody who asks something."""
    longest = max(2, max_context - 2)
    length = min(longest, rng.choice([1, 2, 5, 9, 15, 16, 17, 30, 33, 64, 65, 80, max_context - 4, max_context + 9]))
    if rng.random() < 0.02:
        length = max_context + rng.randrange(3)  # can never fit
    phrase = bytes(rng.choice(LETTERS) for _ in range(rng.randrange(2, 9)))
    prompt = list((phrase * (length // len(phrase) + 1))[:length])
    ways = [PATIENT, AT_TIME, AT_FIRST, AT_TEXT, AT_ONCE, AT_END, AT_PLACE]
    return Client(
        name,
        prompt,
        _params(rng, phrase),
        leaves=rng.choices(ways, [60, 12, 5, 5, 3, 3, 12])[0],
        leave_ns=rng.choice([0, 1, 2, 5, 12, 40, 120]) * MS + rng.randrange(MS),
        leave_chars=rng.randrange(1, 12),
        leave_place=rng.choice(PLACES),
        read_ns=rng.choice([0, 0, 0, 0, MS, 20 * MS]),
    )


def _params(rng: random.Random, phrase: bytes) -> SamplingParams:
    sampled = rng.random() < 0.4
    options: dict[str, Any] = {"temperature": 1.0, "seed": rng.randrange(2**32)} if sampled else {"temperature": 0.0}
    options["max_tokens"] = rng.choice([1, 2, 3, 7, 16, 17, 30, 60, None]) if rng.random() > 0.02 else 0
    options["n"] = rng.choice([1] * 12 + [2, 3])
    options["output_kind"] = rng.choice(list(OutputKind) + [OutputKind.DELTA] * 3)
    options["ignore_eos"] = rng.random() < 0.15
    if rng.random() < 0.12:
        options |= {"structured_outputs": rng.choice(FORMS).asked, "ignore_eos": False}
    if rng.random() < 0.25:
        words = [phrase.decode()[:2], phrase.decode()[-3:], "e", "\N{GRINNING FACE}", "nt", "zz", " s"]
        options["stop"] = rng.sample(words, rng.randrange(1, 3))
        options["include_stop_str_in_output"] = rng.random() < 0.3
    if rng.random() < 0.1:
        options["stop_token_ids"] = [rng.choice(LETTERS)]
    if rng.random() < 0.1:
        options["logprobs"] = 2
    if rng.random() < 0.05:
        options["prompt_logprobs"] = 1
    if rng.random() < 0.05:
        options["logit_bias"] = {5: 1.0}  # too small to change anything; drafts cannot see it
    return SamplingParams(**options)
