"""What ends a collection on a cluster: the first failure that nothing can be done about.

Guarded by the fleet's lock; any thread may ask for it.
"""

from __future__ import annotations

from torchrl_llm.errors import CollectorError, WorkerError
from torchrl_llm.ray.member import Member


class FirstFailure:
    """Keeps the first failure.

    Attributes:
        error: the failure; ``None`` as long as all is well.
    """

    def __init__(self) -> None:
        self.error: CollectorError | None = None

    def fail(self, failure: CollectorError, cause: BaseException | None) -> None:
        """Something has failed."""
        if self.error is None:
            failure.__cause__ = cause
            self.error = failure

    def fail_by(self, error: BaseException, member: Member) -> None:
        """A worker says why it cannot go on."""
        if isinstance(error, CollectorError):
            error.worker_id = member.worker  # type: ignore[attr-defined]
            self.fail(error, error.__cause__)
        else:
            # Wrong arguments that only the worker could see keep their type as the cause.
            self.fail(WorkerError(f"{member.name} cannot be built: {type(error).__name__}: {error}"), error)
