"""Every error that helios_jax raises on purpose, in one tree.

    HeliosError                 the caller or the world; the message says what was given,
    |                           what is allowed and what to change
    |-- ConfigError             an option of the engine, the scheduler or the command line
    |-- RequestError            one request is wrong                      HTTP 400
    |   `-- UnknownModelError   the request names a model not served      HTTP 404
    |-- CapacityError           the queue is full                         HTTP 429
    |-- UnavailableError        not ready, draining or stuck              HTTP 503
    |-- CheckpointError         model files missing, broken or unknown
    |-- CoreError               a prepared core missing, foreign or damaged
    `-- DeviceError             an execution failed; the device state is lost until a reset
    RequestCancelled            the client went away or cancelled; nobody's fault
    InvariantError              our bug: the engine stops, dumps its state, answers everyone
    `-- StalePlanError          a plan outlived what it was made for; plan again

A `HeliosError` that reaches the command line is printed as one line, exit code 2.
"""

from __future__ import annotations


class HeliosError(Exception):
    """Base of the errors whose cause lies with the caller or the world."""


class ConfigError(HeliosError):
    """An option has a value that is not allowed."""


class RequestError(HeliosError):
    """One request cannot be served as it was given.

    Args:
        message: What was given, what is allowed, what to change.
        param: Name of the offending request field, for OpenAI's error body.
        code: Stable machine-readable reason such as `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModelError(RequestError):
    """The request names a model that this server does not serve."""


class CapacityError(HeliosError):
    """The bounded waiting queue is full; try again later."""


class UnavailableError(HeliosError):
    """The engine is not ready, is draining, or has stopped."""


class CheckpointError(HeliosError):
    """Model files are missing, truncated, of an unknown architecture or tensor type."""


class CoreError(HeliosError):
    """A prepared core is missing, damaged, or was made by another version."""


class DeviceError(HeliosError):
    """An execution failed on the device (out of memory, device lost); its state is gone."""


class RequestCancelled(Exception):
    """The request was cancelled before it finished."""


class InvariantError(Exception):
    """A numbered invariant does not hold: a bug of helios_jax, never of the caller."""


class StalePlanError(InvariantError):
    """A plan was committed after its requests or the window changed; nothing happened, plan again.

    The engine commits each plan right after making it, so meeting this error there is a bug.
    """
