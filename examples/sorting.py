"""The task that the GRPO examples learn, and the model that learns it from nothing.

The prompt has three different letters, as in ``h c e``; the right answer is the same letters in order and then the end
of the turn: ``c e h <end>``. The reward is the share of the answer's four tokens that are right. The model is a Llama
of two layers with random weights, which can neither answer nor sort: it gets 0.08. One answer for all prompts gets
0.49 at the best (``BLIND_REWARD``); who gets more looks at the prompt.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tokenizers import Tokenizer, models, pre_tokenizers
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

LETTERS = "abcdefgh"
LENGTH = 3
ANSWER_TOKENS = LENGTH + 1
SPECIAL = ["<pad>", "<user>", "<assistant>", "<end>"]
# The generation marks, which leave the text as it is, are what makes torchrl use a tokenizer's own template.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<assistant> {% generation %}{{ message['content'] }}{% endgeneration %} "
    "{% else %}"
    "{{ '<' + message['role'] + '> ' + message['content'] + ' <end> ' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def problems() -> list[dict[str, str]]:
    """All 336 of them: ``{"query": "h c e", "answer": "c e h"}``, ..."""
    return [
        {"query": " ".join(letters), "answer": " ".join(sorted(letters))}
        for letters in itertools.permutations(LETTERS, LENGTH)
    ]


def _blind_reward() -> float:
    answers = [[*problem["answer"].split(), "<end>"] for problem in problems()]
    likeliest = [max(Counter(tokens).values()) for tokens in zip(*answers, strict=True)]
    return sum(likeliest) / (len(answers) * ANSWER_TOKENS)


BLIND_REWARD = _blind_reward()


def reward_of(response: str, answer: str) -> float:
    """The share of the tokens that are right; ``response`` ends with ``<end>``, if the model ended it."""
    wanted = [*answer.split(), "<end>"]
    pairs = zip(response.split(), wanted, strict=False)
    return sum(given == right for given, right in pairs) / len(wanted)


class SortingReward(Transform):
    """Writes the reward, of shape ``(*batch_size, 1, 1)`` as torchrl's own reward parsers do."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        answers: Sequence[str] = next_tensordict["answer"]
        responses = [messages[-1].content for messages in tensordict["history"].full.unbind(0)]
        rewards = [reward_of(*pair) for pair in zip(responses, answers, strict=True)]
        return next_tensordict.set("reward", torch.tensor(rewards).view(-1, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


def make_env() -> EnvBase:
    """A conversation of one turn. Where its prompts come from, the caller says: ``PromptSource.env(make_env)``."""
    env = ChatEnv(batch_size=(1,))
    env = env.append_transform(StepCounter(max_steps=1))
    return env.append_transform(SortingReward())


def make_tokenizer() -> PreTrainedTokenizerBase:
    """A token for each letter, and four special ones."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    words = Tokenizer(models.WordLevel(vocabulary))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(seed: int, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Some 100,000 random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()
