"""Checkpoints that give way on the device and come back from the host: what the engine thread does about them.

1. `follow`, before anything is submitted that could overwrite what was evicted since the last call: copies of it to
   the host begin. The scheduler's checkpoints are a value, so what is gone is the difference to the one seen last.
2. `fetch`, before a sequence is admitted: where the host covers a page more of its prompt than the device does,
   the scheduler gives a place, and the content is copied there ahead of every frame to come.
3. `forget`, when the device state was lost: what gave way with it has no content any more.
"""

from __future__ import annotations

import numpy as np

from helios_jax.engine.host_copying import HostCopying
from helios_jax.engine.prefixes import PrefixKey, Scope, key_of
from helios_jax.engine.stats import HostTierStats
from helios_jax.errors import DeviceError
from helios_jax.scheduler.checkpoints import index_of
from helios_jax.scheduler.scheduler import Scheduler


class HostCheckpoints:
    """Used by the engine thread.

    Args:
        copying: Owns the tier.
        scope: Of all requests of the engine.
    """

    def __init__(self, scheduler: Scheduler, copying: HostCopying, scope: Scope) -> None:
        self._scheduler, self._copying, self._scope = scheduler, copying, scope
        self._seen = scheduler.state.retention.checkpoints

    def follow(self) -> None:
        """Begin to save what was evicted since the last call."""
        seen, known = self._seen, self._scheduler.state.retention.checkpoints
        self._seen = known
        if seen.keys is known.keys:
            return
        present = set(known.keys)
        gone = {key: place for place, key in enumerate(seen.keys) if key not in present}
        for key, place in gone.items():
            if isinstance(key, PrefixKey):
                self._copying.save(key.array, seen.pages[place], int(seen.rows[place]))

    def forget(self) -> None:
        """What was evicted since the last call is lost."""
        self._seen = self._scheduler.state.retention.checkpoints

    def fetch(self, prompt: np.ndarray, most: int, checkpoint: int, endpoint: int) -> bool:
        """Bring a longer checkpoint of a prompt to the device, if the host has one and there is a place.

        Args:
            prompt: int32 [n].
            most: Tokens of it that may be restored.
            checkpoint, endpoint: The best one on the device, 0 and 0 without.
        """
        state = self._scheduler.state
        found = self._copying.find(prompt[: most + 1], endpoint + state.limits.page_size - 1)
        if found is None:
            return False
        known = state.retention.checkpoints
        shared = known.pages[index_of(known, checkpoint)] if checkpoint else ()
        shared = shared[: endpoint // state.limits.page_size]  # the prompt may begin with a part of it only
        key = key_of(self._scope, prompt[: found.endpoint])
        place = self._scheduler.adopt_checkpoint(key, found.endpoint, shared)
        if place is None:
            return False
        self.follow()  # what gave way for it is still there
        lacking = found._replace(pages=found.pages[len(shared) :])
        try:
            if self._copying.bring_back(lacking, place.row, place.pages[len(shared) :], found.endpoint - endpoint):
                return True
        except DeviceError:
            pass  # the next submission meets it, and recovers
        self._scheduler.withdraw_checkpoint(place.checkpoint)
        self.forget()
        return False

    def stats(self) -> HostTierStats:
        return self._copying.stats()

    def settle(self) -> None:
        """Return once everything that is on its way has arrived."""
        self._copying.settle()

    def close(self) -> None:
        self._copying.close()
