"""A user's own environment over token ids, shared by the tests of the vLLM runner."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules.llm.policies import Tokens


class TokensEnv(EnvBase):
    """A user's own environment: observes ``("tokens", "prompt")`` and rewards the length of the response."""

    batch_locked = True

    def __init__(self, prompts: list[list[int]]) -> None:
        super().__init__(batch_size=())
        self._prompts = iter(prompts)
        ids = Unbounded(shape=(-1,), dtype=torch.int64)
        self.observation_spec = Composite(tokens=Composite(prompt=ids))
        self.full_action_spec = Composite(tokens=Composite(response=ids.clone()))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict(tokens=Tokens(prompt=torch.tensor(next(self._prompts))))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        response = tensordict["tokens", "response"]
        done = torch.tensor([True])
        return TensorDict(
            tokens=Tokens(prompt=tensordict["tokens"].prompt),
            reward=torch.tensor([float(len(response))]),
            done=done,
            terminated=done.clone(),
        )

    def _set_seed(self, seed: int | None) -> None:
        pass
