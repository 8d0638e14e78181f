"""What a prompt source reads: one datum after another, and the prompt in a datum.

Pure but for the reading itself: a reader calls the user's data, nothing else. Not thread-safe; the
:class:`~torchrl_llm.prompts.PromptSource` that owns a reader holds a lock.

Invariants: a reader is asked for the data of one epoch in order; what can be indexed is never copied, and what can be
iterated over only once is read once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch.utils.data import DataLoader, IterableDataset
from torchrl.data.llm import History

# Where a mapping has its prompt, in order of preference.
PROMPT_KEYS = ("query", "prompt", "messages", "question", "text")
# What no field can be called: turns have these entries themselves, or torchrl's specs refuse them.
RESERVED = ("next", "collector", "_reset", "shape", "device", "dtype", "space")


class Reader(Protocol):
    """Reads the data of a source, epoch by epoch."""

    indexed: bool
    one_shot: bool

    @property
    def length(self) -> int | None:
        """How many data there are, as far as they can be counted without being read."""

    def order_length(self, epoch: int) -> int | None:
        """Over how many data an epoch's shuffled order goes; ``None`` without one."""

    def begin(self, epoch: int, length: int) -> None:
        """Makes an epoch's shuffled order over the first ``length`` data."""

    def read(self, epoch: int, position: int) -> tuple[int | None, Any]:
        """The datum at a position of an epoch's order, with its index in the data if there are indices.

        Raises:
            StopIteration: if the epoch has no more.
        """

    def at(self, index: int) -> Any:
        """The datum at an index."""


class IndexedReader:
    """Reads data that have a length and can be indexed, in their order or in one shuffled anew for each epoch.

    Data may grow: what is added comes in this epoch if they are read in their order, and from the next one on if they
    are shuffled.

    Args:
        data: anything with ``__len__`` and ``__getitem__``.
        shuffle: whether to shuffle.
        seed: the order of epoch ``e`` depends on ``(seed, e)`` only.

    Examples:
        >>> reader = IndexedReader(["a", "b", "c"], shuffle=False, seed=0)
        >>> [reader.read(0, position)[1] for position in range(3)]
        ['a', 'b', 'c']
    """

    indexed = True
    one_shot = False

    def __init__(self, data: Any, shuffle: bool, seed: int) -> None:
        self._data = data
        self._shuffle = shuffle
        self._seed = seed
        self._order: torch.Tensor | None = None
        self._order_epoch = -1

    @property
    def length(self) -> int:
        """See :meth:`Reader.length`."""
        return len(self._data)

    def order_length(self, epoch: int) -> int | None:
        """See :meth:`Reader.order_length`."""
        if not self._shuffle:
            return None
        return len(self._data) if self._order is None or self._order_epoch != epoch else len(self._order)

    def begin(self, epoch: int, length: int) -> None:
        """See :meth:`Reader.begin`."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        self._order = torch.randperm(length, generator=generator)
        self._order_epoch = epoch

    def read(self, epoch: int, position: int) -> tuple[int | None, Any]:
        """See :meth:`Reader.read`."""
        if self._shuffle and self._order_epoch != epoch:
            self.begin(epoch, len(self._data))
        if position >= (len(self._data) if self._order is None else len(self._order)):
            raise StopIteration
        index = position if self._order is None else int(self._order[position])
        return index, self._data[index]

    def at(self, index: int) -> Any:
        """See :meth:`Reader.at`."""
        return self._data[index]


class StreamReader:
    """Reads data that can only be iterated over, as often as they can be started over.

    Args:
        data: an iterable; a ``DataLoader``'s batches are taken apart.

    Examples:
        >>> reader = StreamReader(iter(["a", "b"]))
        >>> reader.one_shot, reader.read(0, 0), reader.read(0, 1)
        (True, (None, 'a'), (None, 'b'))
    """

    indexed = False

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self.one_shot = isinstance(data, Iterator)
        self._pass: Iterator[Any] | None = None
        self._pass_epoch = -1
        self._position = 0

    @property
    def length(self) -> int | None:
        """See :meth:`Reader.length`. A ``DataLoader``'s batches are not counted, but its data set."""
        data = self._data.dataset if isinstance(self._data, DataLoader) else self._data
        if self.one_shot or isinstance(data, IterableDataset) or not isinstance(data, Sized):
            return None  # The length of an IterableDataset may be an estimate.
        with contextlib.suppress(TypeError, NotImplementedError):  # So say some that do not know it.
            return len(data)
        return None

    def order_length(self, epoch: int) -> None:
        """Streams are not shuffled here."""
        return None

    def begin(self, epoch: int, length: int) -> None:
        """Streams have no order."""
        raise TypeError("a stream has no order")

    def read(self, epoch: int, position: int) -> tuple[int | None, Any]:
        """See :meth:`Reader.read`. A pass that begins at a later position skips what comes before.

        Raises:
            RuntimeError: if data that can be read only once are past the position.
        """
        if self._pass is None or epoch != self._pass_epoch or position < self._position:
            if self.one_shot and self._pass is not None:
                if epoch == self._pass_epoch:
                    raise RuntimeError(f"datum {position} was read already, and the data can be read only once")
                raise StopIteration
            self._pass, self._pass_epoch, self._position = self._start(), epoch, 0
        while self._position < position:
            next(self._pass)
            self._position += 1
        datum = next(self._pass)
        self._position += 1
        return None, datum

    def at(self, index: int) -> Any:
        """Streams have no indices."""
        raise TypeError("a stream has no indices")

    def _start(self) -> Iterator[Any]:
        data = self._data
        if not isinstance(data, DataLoader) or (data.batch_size is None and data.batch_sampler is None):
            return iter(data)
        return (datum for batch in data for datum in rows_of_batch(batch))


def rows_of_batch(batch: Any) -> list[Any]:
    """The data in a batch of a ``DataLoader``: rows of a TensorDict, of a mapping of columns, or a list's items.

    Examples:
        >>> rows_of_batch({"query": ["a", "b"], "label": [1, 2]})
        [{'query': 'a', 'label': 1}, {'query': 'b', 'label': 2}]
    """
    if isinstance(batch, TensorDictBase):
        return list(batch.unbind(0))
    if isinstance(batch, Mapping):
        length = len(next(iter(batch.values()))) if batch else 0
        return [{key: column[row] for key, column in batch.items()} for row in range(length)]
    if isinstance(batch, (list, tuple)):
        return list(batch)
    raise TypeError(
        f"the DataLoader gave a batch of type {type(batch).__name__}; a mapping of columns, a TensorDict or a list of "
        "prompts is needed (collate_fn=list keeps the data as they are)"
    )


def make_reader(data: Any, shuffle: bool, seed: int) -> Reader:
    """The reader for a source's data.

    Raises:
        TypeError: if the data cannot be read one after another.
        ValueError: if they are empty, or cannot be shuffled.
    """
    if isinstance(data, (str, bytes)) or (isinstance(data, Mapping) and not isinstance(data, TensorDictBase)):
        hint = "choose one of its splits" if isinstance(data, Mapping) else "put it in a list"
        raise TypeError(f"data of type {type(data).__name__} is not allowed: {hint}")
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    # torch's IterableDataset has __getitem__ from Dataset, and it raises.
    if indexed and not isinstance(data, (DataLoader, IterableDataset)):
        if len(data) == 0:
            raise ValueError("data is empty: a PromptSource needs at least one prompt")
        return IndexedReader(data, shuffle, seed)
    if not isinstance(data, Iterable):
        raise TypeError(
            f"data of type {type(data).__name__} is not allowed: pass a sequence, an iterable, a torch Dataset or "
            "DataLoader, or a Hugging Face dataset"
        )
    if shuffle:
        raise ValueError(
            f"shuffle=True is not allowed with data of type {type(data).__name__}, which has no indices: pass a "
            "sequence (of a DataLoader its dataset, of a generator list(...)), or shuffle it yourself"
        )
    return StreamReader(data)


def split_datum(datum: Any, key: str | None) -> tuple[Any, str, dict[str, Any]]:
    """The prompt in a datum, and its other fields.

    Args:
        datum: a string, a chat, or a mapping.
        key: the mapping's field with the prompt; ``None`` for the first of :data:`PROMPT_KEYS` that it has.

    Returns:
        The prompt (a string, a list of messages, a ``History`` or a tensor of token ids), its field, and the others.

    Raises:
        TypeError: if there is no prompt of these kinds.
        KeyError: if the mapping has no prompt field.
        ValueError: if a field has a name that is taken: one of :data:`RESERVED`.

    Examples:
        >>> split_datum({"question": "1+1?", "answer": 2}, key=None)
        ('1+1?', 'question', {'answer': 2})
    """
    if isinstance(datum, (Mapping, TensorDictBase)) and not _is_message(datum):
        fields = {name: datum[name] for name in datum.keys()}
        name = key if key is not None else next((k for k in PROMPT_KEYS if k in fields), None)
        if name is None or name not in fields:
            wanted = repr(key) if key is not None else "one of " + ", ".join(map(repr, PROMPT_KEYS))
            raise KeyError(f"a datum has the fields {list(fields)}, its prompt is looked for under {wanted}: set key=")
        for field in fields:
            _check_name(field)
        prompt = fields.pop(name)
    else:
        prompt, name, fields = datum, "query", {}
    if isinstance(prompt, (str, History, torch.Tensor)) or is_chat(prompt):
        return prompt, name, fields
    hint = ""
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], str):
        hint = " (a list of strings is a batch: give single prompts)"
    raise TypeError(
        f"a prompt of type {type(prompt).__name__} is not allowed: pass a string, a chat (a list of mappings with "
        f"'role' and 'content'), a History, or a tensor of token ids{hint}"
    )


def _check_name(field: Any) -> None:
    if not isinstance(field, str):
        raise TypeError(f"a datum has the field {field!r}, of type {type(field).__name__}: fields are named by strings")
    if field in RESERVED:
        raise ValueError(
            f"a datum has the field {field!r}, which is not allowed: rename it, or leave it out. Taken are "
            + ", ".join(map(repr, RESERVED))
        )


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(_is_message(message) for message in prompt)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value and "content" in value
