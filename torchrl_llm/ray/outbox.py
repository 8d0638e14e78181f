"""Where a worker's collector puts its batches until the driver takes them: a queue that holds ``prefetch`` of them.

For the collector it is one of the queues that it writes to. Invariant: batches that wait here, and the one that the
driver has taken and not yet made use of, are never more than ``prefetch``, until the worker ends; then there is room
for whatever was finished. The collector's thread puts, an actor thread takes; one condition guards what they share.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from tensordict import TensorDictBase

from torchrl_llm.ray.messages import TurnHead
from torchrl_llm.ray.transport import Packed, pack

Label = Callable[[TensorDictBase], TurnHead]
Letter = tuple[list[TurnHead], Packed]


class Outbox:
    """Takes batches, gives packed ones.

    Args:
        prefetch: how many batches may wait.
        label: gives a turn its ids in the cluster, and says what they are.

    Examples:
        >>> from tensordict import TensorDict, lazy_stack
        >>> outbox = Outbox(1, lambda turn: TurnHead(7, 0, 0, 0, -1, -1, 0, 0, True))
        >>> outbox.put(lazy_stack([TensorDict(text="a")]), timeout=0)
        >>> outbox.put(None, timeout=0)
        >>> [heads] = [outbox.take()[0]]
        >>> heads[0].traj_id, outbox.take()
        (7, None)
    """

    def __init__(self, prefetch: int, label: Label) -> None:
        self._prefetch = prefetch
        self._label = label
        self._changed = threading.Condition()
        self._letters: deque[Letter] = deque()
        self._taken = 0
        self._ended = False
        self._open = False

    def put(self, item: TensorDictBase | None, timeout: float | None = None) -> None:
        """Takes a batch, or the end.

        Raises:
            queue.Full: if there is no room within ``timeout`` seconds.
        """
        if item is None:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            return
        self._await_room(timeout)
        # Only this thread adds letters, so that there still is room afterwards.
        turns = list(item.unbind(0))
        letter = [self._label(turn) for turn in turns], pack(turns)
        with self._changed:
            self._letters.append(letter)
            self._changed.notify_all()

    def _await_room(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._open and len(self._letters) + self._taken >= self._prefetch:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise queue.Full
                self._changed.wait(left)

    def take(self) -> Letter | None:
        """Waits for the next batch; ``None`` when there will be no more. The one taken before has been made use of.

        The end is told once: who takes again waits for what comes when the worker goes on, unless that ends too.
        """
        with self._changed:
            self._taken = 0
            self._changed.notify_all()
            while not self._letters and not self._ended:
                self._changed.wait()
            if not self._letters:
                self._ended = self._open
                return None
            self._taken = 1
            return self._letters.popleft()

    def let_all_in(self) -> None:
        """From now on there is room for everything: the worker ends, and nothing that was finished may be lost."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def rest(self, timeout: float) -> list[Letter]:
        """What still waits when the end is put, or after ``timeout`` seconds; a waiting :meth:`take` gets nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, timeout)
            letters, self._letters = list(self._letters), deque()
            self._ended = True
            self._changed.notify_all()
            return letters
