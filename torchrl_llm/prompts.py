"""``PromptSource``: one stream of prompts for all slots; each prompt is handed out as a group of ``repeats`` members.

It is a :class:`~torchrl_llm.prompt_line.PromptLine` behind a lock, for any thread. Where several processes share one
stream, one of them owns the ``PromptSource``, and the others hold a proxy with the methods of
:class:`~torchrl_llm.prompt_line.Prompts`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torchrl.envs import EnvBase

from torchrl_llm.plan import check_int
from torchrl_llm.prompt_line import Member, PromptLine


class PromptSource:
    """One stream of prompts, shared by all environments of a collector.

    Each prompt is handed out ``repeats`` times, to whichever slots are free, with a group id of its own: turns carry
    ``("collector", "group_id")``, ``"group_index"`` (0 to ``repeats - 1``) and ``"epoch"``. Bind environments to it by
    :meth:`env`. Several collectors may share it, at once or one after the other: what one had not delivered when it
    ended is handed out again first.

    Args:
        data: a sequence, an iterable, a torch ``Dataset`` or ``DataLoader`` (its batches are taken apart), or a Hugging
            Face dataset, of prompts. A prompt is a string, a chat (a list of mappings with ``"role"`` and
            ``"content"``), or a mapping with one of these in a field; the other fields go to the environment and into
            the turns as they are (numbers and booleans as tensors, as TensorDict has them; ints beyond int64 as ints).

    Keyword Args:
        repeats: members of a group. Defaults to 1.
        shuffle: whether to hand the data out in an order shuffled anew for each epoch; for data with indices only.
        seed: of that order. By default the collector's ``seed``, or one drawn at random.
        epochs: passes over the data; ``None`` (default) for ever. An iterator is read once.
        key: the field of a mapping that holds the prompt. Defaults to the first of ``"query"``, ``"prompt"``,
            ``"messages"``, ``"question"`` and ``"text"`` that it has.

    Raises:
        TypeError: for data that cannot be read one after another, or are no prompts.
        KeyError: if a mapping has no prompt field.
        ValueError: for a field with a name that turns or torchrl's specs have themselves (``"next"``, ``"collector"``,
            ``"shape"``, ...), empty data, ``shuffle=True`` without indices, or several epochs of an iterator.

    Examples:
        >>> source = PromptSource([{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}], repeats=2)
        >>> [(member.group_id, member.index, member.prompt) for member in source.take(3)]
        [(0, 0, '1+1?'), (0, 1, '1+1?'), (1, 0, '2+2?')]
        >>> source.returned(0, 1)
        >>> source.take(1)[0]
        Member(group_id=0, index=1, epoch=0, repeats=2)
    """

    def __init__(
        self,
        data: Any,
        *,
        repeats: int = 1,
        shuffle: bool = False,
        seed: int | None = None,
        epochs: int | None = None,
        key: str | None = None,
    ) -> None:
        check_int("repeats", repeats, "an int of at least 1", minimum=1)
        if epochs is not None:
            check_int("epochs", epochs, "an int of at least 1", minimum=1)
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise TypeError(f"seed={seed!r} is not allowed: pass an int, or None")
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle={shuffle!r} is not allowed: pass True or False")
        if key is not None and not isinstance(key, str):
            raise TypeError(f"key={key!r} is not allowed: pass the name of a field, or None")
        self.repeats = repeats
        self._seeded = seed is not None
        drawn = seed if seed is not None else int(torch.empty((), dtype=torch.int64).random_()) % 2**31
        self._line = PromptLine(data, repeats, shuffle, drawn, epochs, key)
        self._lock = threading.Lock()

    def env(self, make_env: Callable[[], EnvBase]) -> Callable[[], EnvBase]:
        """An environment constructor whose environments take their prompts from this source.

        Args:
            make_env: builds an environment: a ``ChatEnv``, ``LLMEnv``, one of torchrl's data set environments (which
                then does not load its own data set), or any environment that reads its prompt from the TensorDict
                that it is reset with. A loader that the environment has is not used any more.

        Raises:
            TypeError: if ``make_env`` is no constructor.

        Examples:
            >>> from torchrl.envs.llm import ChatEnv
            >>> source = PromptSource([[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]])
            >>> env = source.env(lambda: ChatEnv(batch_size=(1,)))()
            >>> list(env.reset()["history"].prompt[0].role)
            ['system', 'user']
        """
        from torchrl_llm.binding import BoundEnv

        return BoundEnv(self, make_env)

    @property
    def pending(self) -> int:
        """Members that come before any new prompt: of groups that were begun, for the first time or again."""
        with self._lock:
            return self._line.pending

    def take(self, count: int = 1) -> list[Member]:
        """Hands out the next ``count`` members; fewer, or none, if there are no more (for now: some may come back)."""
        with self._lock:
            return self._line.take(count)

    def take_group(self) -> list[Member]:
        """Hands out the next member and all others of its group that are not handed out; none if there are no more."""
        with self._lock:
            return self._line.take_group()

    def delivered(self, group_id: int, index: int) -> None:
        """A member is done with: its trajectory was delivered."""
        with self._lock:
            self._line.delivered(group_id, index)

    def dropped(self, group_id: int, index: int) -> None:
        """A member is done with without having been delivered: it was filtered out, or given up."""
        self.delivered(group_id, index)

    def returned(self, group_id: int, index: int) -> None:
        """A member comes back without having been delivered; it is handed out again before any other."""
        with self._lock:
            self._line.returned(group_id, index)

    def give_back(self, keys: list[tuple[int, int]]) -> None:
        """Members, by group id and index, come back at once: who takes meanwhile gets all of a group, or none."""
        with self._lock:
            for group_id, index in keys:
                self._line.returned(group_id, index)

    def withdraw(self, group_id: int) -> None:
        """All members of a group are done with, also those that were not handed out yet."""
        with self._lock:
            self._line.withdraw(group_id)

    def peek(self) -> Member | None:
        """The next member, which stays the next one; ``None`` at the end of the data."""
        with self._lock:
            return self._line.peek()

    def reseed(self, seed: int) -> bool:
        """Sets the seed of the order, unless the user gave one or prompts were handed out; returns whether it did."""
        with self._lock:
            if self._seeded or self._line.begun:
                return False
            self._line.reseed(seed)
            return True

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data: order and position, group ids, and every prompt that is not done with.

        Prompts of data with indices are kept by their index, others with their content: TensorDicts and ``History``
        exactly, numbers and strings of derived types (``numpy.float64``) as builtin ones. ``torch.save`` and
        ``torch.load(weights_only=True)`` take it.

        Raises:
            TypeError: if a prompt that must be kept by its content is not plain data.
        """
        with self._lock:
            return self._line.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state: what was handed out and not delivered comes first, under its old group id and index.

        The source must have the same data in the same order; an iterable is read and skipped up to the position.
        A state that is refused changes nothing.

        Raises:
            ValueError: if the state is of a source with other ``repeats`` or ``shuffle``, or with data of another
                length.
            RuntimeError: if prompts were handed out already.
        """
        with self._lock:
            self._line.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"PromptSource(repeats={self.repeats})"
