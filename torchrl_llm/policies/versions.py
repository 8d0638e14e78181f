"""Which version of the weights made each token of a response.

Pure; owned by the thread that runs the policy. The truth lies where tokens and switches are put in order: the engine's
thread. At a switch it notes how many tokens of each response are there already.
"""

from __future__ import annotations

import torch


class TokenVersions:
    """The switches that a response in the making has seen.

    Examples:
        >>> versions = TokenVersions()
        >>> versions.switched(tokens=2, version=0)
        >>> versions.of(length=5, current=1).tolist(), versions.ends(5, current=1)
        ([0, 0, 1, 1, 1], (0, 1))
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def switched(self, tokens: int, version: int) -> None:
        """Notes that the first ``tokens`` tokens were made by ``version`` or earlier ones, and later ones will not."""
        self._spans.append((tokens, version))

    def began(self) -> int | None:
        """The version that made the first token, if the weights have changed since; may be read by any thread."""
        return next((version for tokens, version in list(self._spans) if tokens > 0), None)

    def restarted(self) -> None:
        """Forgets everything: the tokens so far were thrown away."""
        self._spans.clear()

    def ends(self, length: int, current: int) -> tuple[int, int]:
        """The versions that made the first and the last of ``length`` tokens; ``current`` if there are none."""
        if length == 0:
            return current, current
        begin = next((version for tokens, version in self._spans if tokens > 0), current)
        end = next((version for tokens, version in self._spans if tokens >= length), current)
        return begin, end

    def of(self, length: int, current: int) -> torch.Tensor:
        """int64, shape ``(length,)``: the version of each token; ``current`` made those since the last switch."""
        versions = torch.full((length,), current, dtype=torch.int64)
        for tokens, version in reversed(self._spans):
            versions[:tokens] = version
        return versions
