"""Binding environments to a prompt source: any environment takes its prompts, and all their fields, at reset.

A bound environment has a torchrl ``DataLoadingPrimer`` whose loader is a :class:`PromptFeed`. The collector gives the
feed the members that it took for a reset; an environment that is reset by somebody else takes the next one itself.

Invariant: a prompt of the source reaches the environment under the key that it reads, and every other field under its
own name; nothing of a loader that the environment had before is used.

Threads: environments are built by the thread that builds or rebuilds the collector's slots. A feed belongs to its
environment and is used by one thread at a time, like it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from tensordict.tensorclass import NonTensorData
from torchrl.data import Composite, NonTensor, TensorSpec, Unbounded
from torchrl.data.llm import History
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.llm import DataLoadingPrimer, LLMEnv
from torchrl.envs.llm.chat import ChatEnv, DatasetChatEnv

from torchrl_llm.data import is_chat
from torchrl_llm.encoding import python_number
from torchrl_llm.errors import PromptsExhausted
from torchrl_llm.prompt_line import Member, Prompts

MESSAGE_KEYS = tuple(field.name for field in dataclasses.fields(History))
_building = threading.local()
_patched = threading.RLock()  # a bound constructor may call another one


class BoundEnv:
    """An environment constructor that binds what it builds to a source.

    Args:
        source: where prompts come from.
        make_env: builds the environment.
    """

    def __init__(self, source: Prompts, make_env: Callable[[], EnvBase]) -> None:
        if isinstance(make_env, EnvBase) or not callable(make_env):
            raise TypeError(
                f"make_env of type {type(make_env).__name__} is not allowed: pass a constructor () -> EnvBase, so that "
                "every slot gets an environment of its own"
            )
        self.source = source
        self.make_env = make_env

    def bound_to(self, source: Prompts) -> BoundEnv:
        """The same constructor for another source, such as a proxy of this one in another process."""
        return BoundEnv(source, self.make_env)

    def __call__(self) -> EnvBase:
        """Builds the environment.

        Raises:
            TypeError: if ``make_env`` gives no environment.
            ValueError: if it has several data primers, or one on Ray.
        """
        with _no_data_sets_loaded():
            env = self.make_env()
        if not isinstance(env, EnvBase):
            raise TypeError(f"make_env returned {type(env).__name__}, an EnvBase is needed")
        return bind(env, self.source)


class PromptFeed:
    """What a bound environment reads its data from: an endless iterator over rows.

    Args:
        source: the source.
        prompt_key: the key under which the environment reads its prompt; ``None`` for the datum's own.
        as_history: whether a chat becomes a ``History``.
        text_only: whether the environment reads nothing but strings.
        taken: entries that the environment makes itself.
    """

    def __init__(
        self,
        source: Prompts,
        prompt_key: str | tuple[str, ...] | None,
        as_history: bool,
        text_only: bool = False,
        taken: frozenset[str] = frozenset(),
    ) -> None:
        self.source = source
        self._prompt_key = prompt_key
        self._as_history = as_history
        self._text_only = text_only
        self._taken = taken
        self._given: deque[Member] = deque()
        # Every field seen so far has its place in each row: torchrl's primer carries them from turn to turn.
        self._fields: dict[str, None] = {}

    def give(self, members: list[Member]) -> None:
        """The members for the next reset."""
        self._given = deque(members)

    def __iter__(self) -> PromptFeed:
        return self

    def __next__(self) -> TensorDict:
        if self._given:
            return self.row(self._given.popleft())
        taken = self.source.take(1)
        if not taken:
            raise PromptsExhausted("the prompt source has run out")
        self.source.delivered(taken[0].group_id, taken[0].index)  # Whoever resets it himself has it by that.
        return self.row(taken[0])

    def row(self, member: Member) -> TensorDict:
        """A member as the TensorDict that the environment is reset with, of batch size ``()``.

        Raises:
            ValueError: if a field has a name that the environment needs, or a message an entry that is not known.
            TypeError: if the environment does not read prompts of this kind.
        """
        self._check(member)
        self._fields.update(dict.fromkeys(member.fields))
        row = TensorDict(batch_size=())
        for name in self._fields:
            row.set(name, _entry(member.fields.get(name)))
        row.set(self.prompt_key(member), self._prompt(member.prompt))
        return row

    def _check(self, member: Member) -> None:
        if self._text_only and not isinstance(member.prompt, str):
            raise TypeError(
                f"a prompt of type {type(member.prompt).__name__} is not allowed: an LLMEnv with from_text=True reads "
                "strings; a ChatEnv reads chats"
            )
        key = self.prompt_key(member)
        prompt_name = _top(key)
        if prompt_name in member.fields:
            raise ValueError(
                f"a datum has the field {prompt_name!r} beside its prompt, {member.name!r}: the environment reads its "
                "prompt there; rename it, or leave it out"
            )
        for name in (*member.fields, prompt_name):
            if name in self._taken:
                raise ValueError(
                    f"a datum has the field {name!r}, which is not allowed: the environment makes it itself; rename "
                    f"it, or leave it out. Taken are {', '.join(map(repr, sorted(self._taken)))}"
                )

    def prompt_key(self, member: Member | None) -> str | tuple[str, ...]:
        """The key of the prompt in a row."""
        if self._prompt_key is not None:
            return self._prompt_key
        return "query" if member is None else member.name

    def _prompt(self, prompt: Any) -> Any:
        if not self._as_history:
            return _entry(prompt)
        if is_chat(prompt):
            return History.from_chats([_message(message) for message in prompt])
        return _entry(prompt)

    def stack(self, rows: list[TensorDictBase]) -> TensorDictBase:
        """Rows that are reset together; strings become chats where others are, and every row has every field."""
        key = self.prompt_key(None) if self._prompt_key is not None else None
        if key is not None and any(isinstance(row.get(key), History) for row in rows):
            for row in rows:
                if not isinstance(row.get(key), History):
                    row.set(key, History.from_chats([{"role": "user", "content": row[key]}]))
        names = {name for row in rows for name in row.keys()}
        for row in rows:
            for name in names - set(row.keys()):
                row.set(name, _entry(None))
        return lazy_stack(rows)

    def spec(self, batch_size: torch.Size) -> Composite:
        """What the rows hold, by the next member of the source."""
        member = self.source.peek()
        leaves: dict[Any, TensorSpec] = {}
        row = TensorDict(batch_size=()) if member is None else self.row(member)
        for name in row.keys():
            leaves[name] = _leaf(row.get(name), batch_size)
        key = self.prompt_key(member)
        if member is None:
            leaves[key] = NonTensor(shape=batch_size, example_data="")
        return Composite(leaves, shape=batch_size)


class PromptPrimer(DataLoadingPrimer):
    """A ``DataLoadingPrimer`` that reads a :class:`PromptFeed`, and keeps what a partial reset has to say.

    torchrl's own hands the environment new rows without ``"_reset"``, so that one with a state resets all its rows.
    """

    def _reset_func(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if not tensordict_reset.batch_size:
            return tensordict_reset.update(self._load_from_dataloader())
        mask = tensordict.get("_reset", None)
        rows = [row.copy() for row in tensordict_reset.unbind(0)]
        for index, row in enumerate(rows):
            if mask is None or bool(mask[index].any()):
                row.update(self._load_from_dataloader())
        return self.stack_method(rows)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Puts the fields that the environment did not pass on beside what it observes."""
        if isinstance(tensordict, LazyStackedTensorDict) and tensordict_reset.batch_size:
            pairs = zip(tensordict.unbind(0), tensordict_reset.unbind(0), strict=True)
            return lazy_stack([self._reset(row, observed) for row, observed in pairs])
        known = set(tensordict_reset.keys())
        for key in self.data_keys:
            if isinstance(key, str) and key not in known and key in tensordict.keys():
                tensordict_reset.set(key, tensordict.get(key))
        return tensordict_reset

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Carries the fields on, row by row: one may be a tensor in a row, and another or none in the next."""
        if isinstance(tensordict, LazyStackedTensorDict) and next_tensordict.batch_size:
            pairs = zip(tensordict.unbind(0), next_tensordict.unbind(0), strict=True)
            return lazy_stack([super(PromptPrimer, self)._step(row, following) for row, following in pairs])
        return super()._step(tensordict, next_tensordict)


def find_feed(env: EnvBase) -> PromptFeed | None:
    """The feed of a bound environment; ``None`` for any other."""
    for module in env.modules():
        feed = getattr(module, "endless_dataloader", None)
        if isinstance(feed, PromptFeed):
            return feed
    return None


def bind(env: EnvBase, source: Prompts) -> EnvBase:
    """Lets ``env`` take its prompts from ``source``; the environment itself, or one around it.

    Raises:
        ValueError: if it has several data primers, or one on Ray, or needs a name that a field of the first datum has.
        TypeError: if it does not read prompts of the first datum's kind.
    """
    modules = list(env.modules())
    if any(type(module).__name__ == "RayDataLoadingPrimer" for module in modules):
        raise ValueError("the environment loads its data by a Ray actor: leave ray_backend out, the source replaces it")
    primers = [module for module in modules if isinstance(module, DataLoadingPrimer)]
    if len(primers) > 1:
        raise ValueError(f"the environment has {len(primers)} data primers; a source can replace one")
    base: Any = env
    while isinstance(base, TransformedEnv):
        base = base.base_env
    feed = PromptFeed(
        source,
        _key_of_prompt(base),
        as_history=isinstance(base, ChatEnv),
        text_only=isinstance(base, LLMEnv) and base.from_text,
        taken=_taken(env, base),
    )
    spec = feed.spec(env.batch_size)
    if primers:
        _refill(primers[0], feed, spec)
        for module in modules:
            if hasattr(module, "empty_cache"):
                module.empty_cache()
        return env
    primer = PromptPrimer(feed, primers=spec, batch_size=env.batch_size, stack_method=feed.stack)
    _refill(primer, feed, spec)
    if isinstance(env, TransformedEnv):
        env.insert_transform(0, primer)
        return env
    return TransformedEnv(env, primer)


def _refill(primer: DataLoadingPrimer, feed: PromptFeed, spec: Composite) -> None:
    primer.__class__ = PromptPrimer
    primer.dataloader = primer.endless_dataloader = feed
    primer.primers = spec
    primer.data_keys = list(spec.keys(True, True))
    primer.stack_method = feed.stack
    primer.repeats = 0
    primer._queue.clear()
    # A prompt may be of another length, and a field of another kind, than the first one's.
    primer._validated = True


def _key_of_prompt(env: EnvBase) -> str | tuple[str, ...] | None:
    if isinstance(env, LLMEnv):
        return env.str_key if env.from_text else env.token_key
    return getattr(env, "data_key", None)


def _taken(env: EnvBase, base: EnvBase) -> frozenset[str]:
    """Entries that a datum's field would overwrite, or that would overwrite it."""
    chat = list(base.observation_spec.keys()) if isinstance(base, ChatEnv) else []
    return frozenset(_top(key) for key in (*env.done_keys, *chat))


def _top(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else key[0]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's message as ``History`` takes it; what it does not know may be there without a value."""
    unknown = [key for key, value in message.items() if key not in MESSAGE_KEYS and value is not None]
    if unknown:
        raise ValueError(
            f"a message of a chat has {unknown[0]!r}, which is not allowed: torchrl's History takes "
            + ", ".join(map(repr, MESSAGE_KEYS))
        )
    return {key: value for key, value in message.items() if key in MESSAGE_KEYS}


def _entry(value: Any) -> Any:
    """A field as TensorDict keeps it: tensors and numbers as tensors, everything else as it is."""
    if isinstance(value, (torch.Tensor, History)):
        return value
    value = python_number(value)
    if isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return torch.tensor(value)
    return NonTensorData(value, batch_size=())


def _leaf(value: Any, batch_size: torch.Size) -> TensorSpec:
    if isinstance(value, torch.Tensor):
        return Unbounded(shape=(*batch_size, *(-1 for _ in value.shape)), dtype=value.dtype)
    example = "" if isinstance(value, History) else value.data
    return NonTensor(shape=batch_size, example_data=example)


@contextlib.contextmanager
def _no_data_sets_loaded() -> Iterator[None]:
    """Keeps torchrl's data set environments, built in this thread meanwhile, from loading a data set that is not used.

    They do that in their constructors, whatever data they are given later.
    """
    with _patched:
        load = DatasetChatEnv.__dict__["_dataloader_factory"]

        def load_nothing(**kwargs: Any) -> Any:
            if getattr(_building, "now", False):
                return [TensorDict(query=["-"], answer=["-"], batch_size=(1,))]
            return load.__func__(**kwargs)

        DatasetChatEnv._dataloader_factory = staticmethod(load_nothing)
        before, _building.now = getattr(_building, "now", False), True
        try:
            yield
        finally:
            _building.now = before
            DatasetChatEnv._dataloader_factory = load
