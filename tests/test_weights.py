"""Weight updates through the whole collector, on real vLLM and on TransformersWrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import ScriptedEnv
from telling_weights import check_answer, load_tiny, perturbed, telling, token_of
from tensordict import TensorDict
from torchrl.modules.llm import TransformersWrapper, vLLMWrapper

from torchrl_llm import LLMCollector

PROMPTS = ["What is the capital of France?", "a river", "2+2", "Once upon a time there was"]


@pytest.fixture(scope="module")
def original(tiny_model: str) -> Any:
    return load_tiny(tiny_model)


@pytest.fixture
def engine(vllm_llm: Any, original: Any) -> Any:
    """The session's engine; it has its first weights again afterwards."""
    yield vllm_llm
    assert not vllm_llm.llm_engine.has_unfinished_requests()
    weights = [(name, tensor) for name, tensor in original.state_dict().items()]
    vllm_llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    assert vllm_llm.reset_prefix_cache()


def vllm_policy(llm: Any, tokens: int = 12, **options: Any) -> Any:
    generate = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    return vLLMWrapper(llm, input_mode="text", generate_kwargs=generate, **options)


def transformers_policy(model: Any, tokenizer: Any, tokens: int = 12) -> Any:
    generate = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    return TransformersWrapper(model, tokenizer=tokenizer, input_mode="text", generate_kwargs=generate)


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_the_next_answer_after_an_update_is_the_new_weights_own(
    kind: str, engine: Any, original: Any, tokenizer: Any
) -> None:
    policy = vllm_policy(engine) if kind == "vllm" else transformers_policy(perturbed(original, 0), tokenizer)
    env = ScriptedEnv(PROMPTS * 10)
    with LLMCollector(env, policy, steps_per_batch=1) as collector:
        next(collector)
        for seed in (1, 2):
            new = perturbed(original, seed)
            with collector.pause():
                pass
            collector.update_policy_weights_(new)
            assert collector.policy_version == seed
            rows = [next(collector)[0] for _ in range(5)][1:]
            for row in rows:
                check_answer(row, new, tokenizer)
                assert int(row["collector", "policy_version"]) == seed
        assert collector.stats()["weight_updates"] == 2


FORMS = {
    "module": lambda model, folder: model,
    "state_dict": lambda model, folder: model.state_dict(),
    "tensordict": lambda model, folder: TensorDict.from_module(model),
    "iterator": lambda model, folder: iter(model.state_dict().items()),
    "folder": lambda model, folder: (model.save_pretrained(folder), str(folder))[1],
}


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_taken_in_every_form(
    form: str, kind: str, engine: Any, original: Any, tokenizer: Any, tmp_path: Any
) -> None:
    """L78."""
    policy = vllm_policy(engine) if kind == "vllm" else transformers_policy(perturbed(original, 0), tokenizer)
    new = perturbed(original, 7)
    with LLMCollector(ScriptedEnv(PROMPTS * 10), policy, steps_per_batch=1) as collector:
        collector.update_policy_weights_(FORMS[form](new, tmp_path))
        assert collector.policy_version == 1
        check_answer(next(collector)[0], new, tokenizer)


def test_tokens_are_told_by_the_version_that_made_them(engine: Any, original: Any) -> None:
    policy = vllm_policy(engine, tokens=100)
    env = [ScriptedEnv(prompt for _ in range(1000) for prompt in PROMPTS) for _ in range(4)]
    seen = set()
    with LLMCollector(env, policy, steps_per_batch=1, track_token_versions=True) as collector:
        collector.update_policy_weights_(telling(original, 1))
        for version in range(2, 20):
            collector.update_policy_weights_(telling(original, version))
            for _ in range(2):
                [row] = next(collector)
                versions = row["collector", "token_versions"]
                assert versions.dtype == torch.int64
                assert row["tokens"].response.tolist() == [token_of(v) for v in versions.tolist()]
                assert int(row["collector", "policy_version"]) == versions[0]
                assert int(row["collector", "policy_version_end"]) == versions[-1]
                seen.add(len(set(versions.tolist())))
    assert max(seen) > 1, "no response saw an update"
