"""The protocol between a weight update and what holds a policy's weights.

An update goes over all targets in phases: :meth:`WeightTarget.stage` everywhere (checks, changes nothing), then
:meth:`WeightTarget.hold` everywhere, then the staged switches, each in the thread that owns the weights, then
:meth:`Hold.release`. The update's thread calls all of these; a switch runs in the owner's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torchrl_llm.policies.hold import Hold
from torchrl_llm.weight_forms import Weights

Switch = Callable[[int], None]


class WeightTarget(Protocol):
    """The weights of one policy, or of several that share an engine.

    ``name`` says what it is, for messages.
    """

    name: str

    @property
    def owner(self) -> object:
        """Whose thread switches the weights; targets with the same owner are switched once."""

    @property
    def gone(self) -> bool:
        """Whether the policy is dead or closed, so that nothing is to be switched."""

    def stage(self, weights: Weights) -> Switch:
        """Checks ``weights`` against the policy's and prepares the switch; changes nothing.

        Returns:
            Makes the weights those of the given version; to be run in the owner's thread.

        Raises:
            ValueError: listing the first mismatches of names, shapes and dtypes.
            TypeError: if the policy has no weights here; a transport of the user's may know better.
        """

    def refreshed(self, version: int) -> None:
        """The user's own transport has changed the weights to ``version``; to be run in the owner's thread."""

    def hold(self, mode: str) -> Hold:
        """Brings the owner to rest between two of its steps; see :class:`Hold`."""

    def fail(self, error: Exception) -> None:
        """Gives the policy up after a switch that failed half way; to be run in the owner's thread."""

    def dispose(self) -> None:
        """Removes what :meth:`stage` made for the switch."""
