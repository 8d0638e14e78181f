"""Weights that tell which they are, policies over a tiny Llama, and what its weights answer by themselves."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torchrl.modules.llm import TransformersWrapper, vLLMWrapper
from transformers import AutoModelForCausalLM

FIRST_TOKEN = 100


def token_of(version: int) -> int:
    """The token that the weights of ``version`` emit; different for up to 300 versions in a row."""
    return FIRST_TOKEN + version % 300


def telling(model: Any, version: int) -> dict[str, torch.Tensor]:
    """The state dict of a model like ``model`` that always emits ``token_of(version)``, whatever it reads."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    state["model.embed_tokens.weight"].fill_(1.0)
    state["model.norm.weight"].fill_(1.0)
    for name in state:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name].zero_()  # nothing is added to the constant embedding
    state["lm_head.weight"].zero_()
    state["lm_head.weight"][token_of(version)] = 0.1
    return state


def load_tiny(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def perturbed(model: Any, seed: int) -> Any:
    """Another model of the same shape."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return other


def vllm_policy(llm: Any, tokens: int = 12, **options: Any) -> Any:
    generate = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    return vLLMWrapper(llm, input_mode="text", generate_kwargs=generate, **options)


def transformers_policy(model: Any, tokenizer: Any, tokens: int = 12) -> Any:
    generate = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    return TransformersWrapper(model, tokenizer=tokenizer, input_mode="text", generate_kwargs=generate)


def own_answer(model: Any, tokenizer: Any, prompt: str, tokens: int = 12) -> tuple[list[int], torch.Tensor]:
    """The greedy answer of the model itself, and its log-probs."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    for _ in range(tokens):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits[0, -tokens - 1 : -1], dim=-1)
    made = ids[0, -tokens:]
    return made.tolist(), scores.gather(1, made[:, None])[:, 0]


def check_answer(row: Any, model: Any, tokenizer: Any, tokens: int = 12) -> None:
    prompt = row["text"].prompt
    made, scores = own_answer(model, tokenizer, prompt, tokens)
    assert row["tokens"].response.tolist() == made
    torch.testing.assert_close(row["log_probs"].response, scores, atol=2e-4, rtol=0)
