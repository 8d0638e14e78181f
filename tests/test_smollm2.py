"""A real language model through the whole collector, on vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from dialogs import raw_log_probs
from engine_settings import make_multiprocess_llm
from fakes import assert_settled, chat_env
from torchrl.modules.llm import vLLMWrapper
from transformers import AutoModelForCausalLM

from torchrl_llm import LLMCollector

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2_llm(smollm2: str) -> Iterator[Any]:
    # In a process of its own: its end would take the parallel groups of the engines in this one along.
    llm = make_multiprocess_llm(smollm2, max_model_len=256, max_num_seqs=4)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def test_smollm2_knows_the_capital_of_france(smollm2: str, smollm2_llm: Any) -> None:
    questions = ["What is the capital of France?", "What is the capital of Italy?"]
    policy = vLLMWrapper(
        smollm2_llm,
        tokenizer=models.load_tokenizer(smollm2),
        input_mode="history",
        generate_kwargs={"temperature": 0.0, "max_tokens": 16},
    )
    with LLMCollector(
        [lambda question=question: chat_env([question]) for question in questions], policy, steps_per_batch=2
    ) as collector:
        turns = {turn["history"].prompt.content[-1]: turn for turn in next(collector).unbind(0)}
        assert next(collector, None) is None
    assert_settled(collector.stats())

    paris, rome = (turns[question] for question in questions)
    assert "Paris" in paris["history"].full.content[-1] and "Paris" in paris["text"].response
    assert "Rome" in rome["text"].response
    assert paris["collector", "finish_reason"] == "stop"

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    for turn in (paris, rome):
        expected = raw_log_probs(model, turn["tokens"].prompt, turn["tokens"].full)
        torch.testing.assert_close(turn["log_probs"].response, expected, atol=1e-3, rtol=0)
