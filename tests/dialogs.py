"""Multi-turn environments and recomputed log-probs, shared by the tests of the language-model runners."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv


class Feedback(Transform):
    """Says FEEDBACK after every answer."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        prompt = next_tensordict["history"].prompt
        message = History(role="user", content="FEEDBACK")
        # Row by row: rows may be at different turns, and then have different numbers of messages.
        rows = [row.append(message, inplace=False, dim=-1) for row in prompt.unbind(0)]
        next_tensordict["history"].prompt = lazy_stack(rows)
        return next_tensordict


def chat_env(turns: int, questions: int = 5) -> EnvBase:
    """Dialogs of ``turns`` turns about questions of different length."""
    data = [{"query": [f"question {'long ' * n}{n}"]} for n in range(questions)]
    env = ChatEnv.from_dataloader(data, batch_size=(1,)).append_transform(Feedback())
    return env.append_transform(StepCounter(max_steps=turns))


def raw_log_probs(model: Any, prompt: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Log-probs of the response under the model's raw logits, float32, shape ``(len(full) - len(prompt),)``."""
    with torch.no_grad():
        logits = model(full[None]).logits[0].float()
    start = len(prompt)
    return torch.log_softmax(logits, -1)[start - 1 : -1].gather(1, full[start:, None])[:, 0]


def check_dialog(trajectory: TensorDictBase) -> None:
    """Token in, token out: prompts keep the ids of the turn before, and masks mark exactly what was sampled."""
    before: list[int] = []
    sampled: list[bool] = []
    for turn in trajectory.unbind(0):
        prompt, response = turn["tokens", "prompt"].tolist(), turn["tokens", "response"].tolist()
        assert prompt[: len(before)] == before
        sampled += [False] * (len(prompt) - len(sampled)) + [True] * len(response)
        assert turn["masks", "all_assistant_mask"].tolist() == sampled
        before = turn["tokens", "full"].tolist()
        assert before == prompt + response
        assert ("FEEDBACK" in turn["text", "prompt"]) == bool(turn["collector", "step"])
