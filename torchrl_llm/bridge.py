"""Key bridging: what a policy reads from an environment, and what an environment reads from a policy.

TorchRL's language-model wrappers read ``("text", "prompt")`` and write ``("text", "response")``, while ``LLMEnv`` has
``"text"`` and ``"text_response"``; the pair fails in torchrl 0.14. A :class:`KeyBridge` is worked out once per pair of
environment and policy, from the environment's specs and the policy's keys, and then only copies references.

Where the two sides use one name for different things (``LLMEnv``'s ``"text"`` is a string, a wrapper's is a ``Text``),
the policy's value stands in the turn, since it holds the environment's as its ``prompt``; ``"next"`` is the
environment's own.

Owns nothing; used by the thread that drives the rollout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection, unravel_key
from tensordict.tensorclass import NonTensorDataBase, is_non_tensor
from torchrl.data import Composite, NonTensor, TensorSpec
from torchrl.envs import EnvBase
from torchrl.modules.llm.policies import LLMWrapperBase

Key = tuple[str, ...]


def as_key(key: NestedKey) -> Key:
    """A nested key as a tuple of strings."""
    key = unravel_key(key)
    return (key,) if isinstance(key, str) else key


def spec_leaves(spec: Composite) -> dict[Key, TensorSpec]:
    """The leaves of a composite spec by their keys."""
    return {as_key(key): leaf for key, leaf in spec.items(include_nested=True, leaves_only=True)}


def show(keys: Iterable[Key]) -> str:
    """Keys as users write them, for messages."""
    return "[" + ", ".join(repr(k[0] if len(k) == 1 else k) for k in keys) + "]"


@dataclass(frozen=True)
class KeyBridge:
    """Renames between one environment and one policy.

    Args:
        inputs: (policy key, environment key) pairs to add before the policy is called.
        actions: (environment key, policy key) pairs to add before the environment steps, if the policy wrote the key.
        required: keys that the policy's output must hold for the environment to step.
    """

    inputs: tuple[tuple[Key, Key], ...] = ()
    actions: tuple[tuple[Key, Key], ...] = ()
    required: tuple[Key, ...] = ()

    def policy_input(self, observation: TensorDictBase) -> TensorDictBase:
        """What the policy gets: the observation, with the keys under the names that the policy reads."""
        row = shallow_copy(observation)
        for target, source in self.inputs:
            set_entry(row, target, row.get(source))
        return row

    def missing_outputs(self, output: TensorDictBase) -> list[Key]:
        """The keys that the environment needs and the policy did not write."""
        return [key for key in self.required if not _holds(output, key)]

    def env_input(self, observation: TensorDictBase, output: TensorDictBase) -> TensorDictBase:
        """What the environment steps with: its own observation and the policy's output under its action keys."""
        row = shallow_copy(observation)
        renamed = {source[0] for _, source in self.inputs}
        for key in output.keys():
            if key not in renamed:
                merge_entry(row, key, output.get(key))
        for target, source in self.actions:
            value = output.get(source, None)
            if value is not None:
                set_entry(row, target, value)
        return row

    def turn(self, stepped: TensorDictBase, output: TensorDictBase) -> TensorDictBase:
        """The turn that the reader gets: the stepped row with everything that the policy wrote."""
        for key in {source[0] for _, source in self.inputs}:
            value = output.get(key, None)
            if value is not None:
                stepped.set(key, value)
        return stepped


def shallow_copy(row: TensorDictBase) -> TensorDict:
    """A TensorDict of its own with the very values of ``row``; those are not to be changed in place.

    ``TensorDict.copy`` copies the structure of all that is nested, which for chat histories costs milliseconds.
    """
    return TensorDict._new_unsafe({key: row._get_str(key, None) for key in row.keys()}, batch_size=row.batch_size)


def set_entry(row: TensorDictBase, key: Key, value: Any) -> None:
    """Sets a nested entry of a shallow copy; the containers on the way are replaced by copies, or made."""
    if len(key) > 1:
        old = row.get(key[0], None)
        # A plain value makes way for the structure of the same name.
        if isinstance(old, TensorDictBase):
            inner: Any = shallow_copy(old)
        else:
            inner = old.copy() if _is_container(old) else TensorDict(batch_size=row.batch_size)
        set_entry(inner, key[1:], value)
        value = inner
    row.set(key[0], value)


def merge_entry(row: TensorDictBase, key: str, value: Any) -> None:
    """Sets ``value`` in ``row``; plain nested TensorDicts are merged, everything else is replaced."""
    old = row.get(key, None)
    if type(value) is TensorDict and isinstance(old, TensorDictBase) and not is_non_tensor(old):
        row.set(key, old.copy().update(value))
    else:
        row.set(key, value)


def _is_container(value: Any) -> bool:
    return value is not None and is_tensor_collection(value) and not isinstance(value, NonTensorDataBase)


def _holds(output: TensorDictBase, key: Key) -> bool:
    value: Any = output
    for part in key:
        if not _is_container(value):
            return False
        value = value.get(part, None)
    return value is not None


def make_bridge(env: EnvBase, policy: Any) -> KeyBridge:
    """Works out the bridge between ``env`` and ``policy``.

    Args:
        env: the environment; its specs say what it offers and what it needs.
        policy: any policy; one without ``in_keys`` (a plain function) reads what it likes.

    Raises:
        ValueError: if the environment offers nothing that the policy reads, or the policy can write nothing that the
            environment needs. The message has the keys of both sides.
    """
    observed = spec_leaves(env.observation_spec) | spec_leaves(env.state_spec)
    needed = spec_leaves(env.full_action_spec)
    in_keys = [as_key(k) for k in getattr(policy, "in_keys", None) or ()]
    inputs = tuple((key, _source_of(key, observed, env, policy)) for key in in_keys if not _offers(observed, key))
    if not isinstance(policy, LLMWrapperBase):
        return KeyBridge(inputs=inputs, required=tuple(_parent_keys(needed)))
    roots = {name: as_key(getattr(policy, f"{name}_key")) for name in ("text", "tokens", "history")}
    written = {as_key(key) for key in policy.out_keys}
    actions = []
    required = []
    for key, leaf in needed.items():
        if any(key[: len(root)] == root for root in written):
            required.append(key[:2] if key[: len(roots["history"])] == roots["history"] else key)
            continue
        source = (*roots["text" if isinstance(leaf, NonTensor) else "tokens"], "response")
        if source[:-1] not in written:
            raise ValueError(
                f"the environment {type(env).__name__} steps with the action key {show([key])}, and the policy "
                f"{type(policy).__name__} (input_mode={policy.input_mode!r}) writes only {show(sorted(written))}. "
                f"Choose another input_mode of the policy, or add a transform that renames the key."
            )
        actions.append((key, source))
        required.append(source)
    actions += _token_actions(env, roots, written)
    return KeyBridge(inputs, tuple(actions), tuple(dict.fromkeys(required)))


def _parent_keys(needed: dict[Key, TensorSpec]) -> list[Key]:
    # Leaves below a History are for History itself to fill: ("history", "full") is what must be there.
    return list(dict.fromkeys(key[:2] if key[0] == "history" else key for key in needed))


def _offers(observed: dict[Key, TensorSpec], key: Key) -> bool:
    return any(leaf[: len(key)] == key for leaf in observed)


def _source_of(key: Key, observed: dict[Key, TensorSpec], env: EnvBase, policy: Any) -> Key:
    """The environment's key for a policy's input that it does not offer under that name."""
    base = getattr(env, "base_env", env)
    mode = getattr(policy, "input_mode", None)
    if mode in ("text", "tokens"):
        own = getattr(base, "str_key" if mode == "text" else "token_key", None)
        if own is not None and as_key(own) in observed:
            return as_key(own)
        wanted = NonTensor if mode == "text" else TensorSpec
        leaves = [
            leaf
            for leaf, spec in observed.items()
            if isinstance(spec, wanted)
            and (mode == "text" or not (isinstance(spec, NonTensor) or spec.dtype.is_floating_point))
        ]
        named = [leaf for leaf in leaves if leaf == key[:1]]
        if named or len(leaves) == 1:
            return (named or leaves)[0]
    hint = ""
    if mode == "history" and hasattr(base, "str_key"):
        hint = " LLMEnv has no chat history: use ChatEnv, or a policy with input_mode='text'."
    elif mode is not None:
        hint = " Choose the policy's input_mode or input_key, or the environment's, so that they meet."
    raise ValueError(
        f"the environment {type(env).__name__} offers nothing that the policy {type(policy).__name__} reads: it "
        f"reads {show([key])}, the environment has {show(sorted(observed))}.{hint}"
    )


def _token_actions(env: EnvBase, roots: dict[str, Key], written: set[Key]) -> list[tuple[Key, Key]]:
    """``LLMEnv`` in text mode finds its end-of-sequence token in the action's tokens, which no spec names."""
    base = getattr(env, "base_env", env)
    key = getattr(base, "_DEFAULT_ACTION_TOKENS_KEY", None)
    if key is None or roots["tokens"] not in written:
        return []
    return [(as_key(key), (*roots["tokens"], "response"))]
