"""Errors that a user can act on. Each names the thing, the number and the remedy."""


class EngineError(Exception):
    """A failure of the engine itself, and the base of every named error.

    Args:
        what: one sentence naming the thing that is wrong.
        why: the figures behind it, if any.
        hint: a remedy that works as it is written, if there is one.
        code: a stable word for machines, as it stands in the records of `generate`.
    """

    default_code = "engine_error"

    def __init__(
        self,
        what: str,
        *,
        why: str | None = None,
        hint: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint
        self.code = code or self.default_code

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.hint) if part)


class ConfigError(EngineError):
    """A configuration value that is unknown, of the wrong type or out of range."""

    default_code = "invalid_config"


class CheckpointError(EngineError):
    """A model directory that cannot be read as a checkpoint of this family."""

    default_code = "invalid_checkpoint"


class CapacityError(EngineError):
    """Something that was asked for does not fit in memory."""

    default_code = "does_not_fit"


class RequestError(EngineError):
    """One request that cannot be served. Costs that request only, never the run."""

    default_code = "invalid_field"


class BackendUnavailable(EngineError):
    """A device or library that was asked for is not there."""

    default_code = "backend_unavailable"


class ConversionError(EngineError):
    """A conversion that cannot be started or completed; `code` says which way it failed."""

    default_code = "write_failed"
