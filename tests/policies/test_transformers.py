"""The runner for ``TransformersWrapper``: exact ids, log-probs, masks and reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dialogs import chat_env, check_dialog, raw_log_probs
from models import load_tokenizer
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import ChatEnv, LLMEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import AutoModelForCausalLM

from torchrl_llm import LLMCollector, PolicyError, split_trajectories


@pytest.fixture(scope="module")
def model(tiny_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture
def make_policy(model: Any, tiny_model: str) -> Callable[..., TransformersWrapper]:
    def make(mode: str = "history", pad_output: bool = False, **kwargs: Any) -> TransformersWrapper:
        return TransformersWrapper(
            model,
            tokenizer=load_tokenizer(tiny_model),
            input_mode=mode,
            pad_output=pad_output,
            generate_kwargs={"max_new_tokens": 8, **kwargs},
        )

    return make


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("pad_output", [False, True])
def test_log_probs_of_every_turn_are_those_of_the_raw_logits_L54_L55(
    make_policy: Callable[..., TransformersWrapper], model: Any, temperature: float, pad_output: bool
) -> None:
    policy = make_policy(pad_output=pad_output, do_sample=True, temperature=temperature)
    with LLMCollector(lambda: chat_env(3), policy, num_envs=3, trajectories_per_batch=3, total_steps=9) as collector:
        batch = next(collector)
    turns = list(batch.unbind(0))
    assert len(turns) == 9
    for turn in turns:
        tokens = turn["tokens"]
        expected = raw_log_probs(model, tokens.prompt, tokens.full)
        torch.testing.assert_close(turn["log_probs", "response"], expected, atol=1e-3, rtol=0)


def test_prompts_keep_the_sampled_ids_and_masks_mark_exactly_them(
    make_policy: Callable[..., TransformersWrapper],
) -> None:
    policy = make_policy(do_sample=True)
    with LLMCollector(lambda: chat_env(3), policy, num_envs=2, trajectories_per_batch=2, total_steps=6) as collector:
        batch = next(collector)
    for trajectory in split_trajectories(batch):
        check_dialog(trajectory)


def test_greedy_ids_are_the_models_own_whatever_shares_the_batch(
    make_policy: Callable[..., TransformersWrapper], model: Any
) -> None:
    policy = make_policy(do_sample=False)
    with LLMCollector(lambda: chat_env(1), policy, num_envs=4, steps_per_batch=8, total_steps=8) as collector:
        batch = next(collector)
    for turn in batch.unbind(0):
        prompt = turn["tokens", "prompt"]
        mask = torch.ones_like(prompt)[None]
        alone = model.generate(prompt[None], attention_mask=mask, max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        response = turn["tokens", "response"]
        assert response.tolist() == alone[: len(response)].tolist()


class Scripted(torch.nn.Module):
    """A model whose next token, and thus whose every answer, is written down."""

    def __init__(self, model: Any, answer: list[int]) -> None:
        super().__init__()
        self.config, self.generation_config, self.device = model.config, model.generation_config, model.device
        self.answer = answer

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        rows = input_ids.shape[0]
        sampled = torch.tensor(self.answer).expand(rows, -1)
        logits = [torch.nn.functional.one_hot(sampled[:, t], 512).float() for t in range(len(self.answer))]

        class Made:
            sequences = torch.cat([input_ids, sampled], 1)

        Made.logits = logits  # type: ignore[attr-defined]
        return Made


@pytest.mark.parametrize(
    ("answer", "kept", "reason"),
    [
        ([67, 68, "eos"], [67, 68, "eos"], "stop"),
        ([67, 68, 67, 68], [67, 68, 67, 68], "length"),
        ([67, "pad", 68, "pad", "eos"], [67, "pad", 68, "pad", "eos"], "stop"),
        ([67, "eos", "pad", "pad"], [67, "eos"], "stop"),
        (["eos", "pad"], ["eos"], "stop"),
    ],
)
def test_a_response_is_what_was_sampled_with_its_end_and_its_pad_ids_L57_L58_L59(
    model: Any, tiny_model: str, answer: list[Any], kept: list[Any], reason: str
) -> None:
    tok = load_tokenizer(tiny_model)
    names = {"eos": tok.eos_token_id, "pad": tok.pad_token_id}
    ids = [names.get(token, token) for token in answer]
    policy = TransformersWrapper(Scripted(model, ids), tokenizer=tok, generate_kwargs={"max_new_tokens": len(ids)})
    with LLMCollector(lambda: chat_env(1), policy, steps_per_batch=1, total_steps=1) as collector:
        turn = next(collector)[0]
    assert turn["tokens", "response"].tolist() == [names.get(token, token) for token in kept]
    assert len(turn["log_probs", "response"]) == len(kept)
    assert turn["collector", "finish_reason"] == reason


def test_a_response_ends_with_the_first_stop_string_not_with_the_padding_behind_it(model: Any, tiny_model: str) -> None:
    tok = load_tokenizer(tiny_model)
    tok.pad_token = tok.eos_token
    said = tok("one, two", add_special_tokens=False)["input_ids"]
    ids = [*said, tok.pad_token_id, tok.pad_token_id]
    policy = TransformersWrapper(Scripted(model, ids), tokenizer=tok, generate_kwargs={"max_new_tokens": len(ids)})
    # The wrapper's constructor does not take them over.
    policy.generate_kwargs["stop_strings"] = ["two", "one, two"]
    with LLMCollector(lambda: chat_env(1), policy, steps_per_batch=1, total_steps=1) as collector:
        turn = next(collector)[0]
    assert turn["tokens", "response"].tolist() == said
    assert turn["collector", "finish_reason"] == "stop"


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_llm_env_with_its_default_keys_works_in_text_and_tokens_mode_L83(
    make_policy: Callable[..., TransformersWrapper], model: Any, mode: str
) -> None:
    def make_env() -> EnvBase:
        if mode == "text":
            return LLMEnv.from_dataloader([{"text": ["abc"]}], batch_size=1, eos_token_id=1)
        return LLMEnv.from_dataloader(
            [{"tokens": torch.tensor([[40, 41, 42]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}],
            batch_size=1,
            from_text=False,
            eos_token_id=1,
        )

    with LLMCollector(make_env, make_policy(mode, do_sample=True), steps_per_batch=3, total_steps=3) as collector:
        batch = next(collector)
    for turn in batch.unbind(0):
        assert turn["tokens_response"].tolist() == turn["tokens", "response"].tolist()
        if mode == "text":
            assert turn["text_response"] == turn["text", "response"]
            assert turn["next", "text"] == turn["text", "prompt"] + turn["text", "response"]
        else:
            assert turn["next", "tokens"].tolist() == turn["tokens", "full"].tolist()


def test_a_prompt_that_leaves_no_room_is_skipped_and_a_response_ends_at_the_context(
    make_policy: Callable[..., TransformersWrapper], model: Any
) -> None:
    room = model.config.max_position_embeddings
    data = [{"query": ["x" * (2 * room)]}, {"query": ["short"]}]
    with LLMCollector(
        lambda: ChatEnv.from_dataloader(iter(data), batch_size=(1,)).append_transform(StepCounter(max_steps=1)),
        make_policy(),
        steps_per_batch=2,
    ) as collector:
        batches = list(collector)
        stats = collector.stats()
    assert [turn["query"] for batch in batches for turn in batch.unbind(0)] == ["short"]
    assert stats["recorded_by_reason"] == {"prompt_too_long": 1}


def test_beam_search_is_refused_by_name(make_policy: Callable[..., TransformersWrapper]) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        LLMCollector(lambda: chat_env(1), make_policy(num_beams=2), steps_per_batch=1)


def test_a_model_that_raises_is_a_policy_error_that_chains_it(model: Any, tiny_model: str) -> None:
    broken = Scripted(model, [1])
    broken.generate = lambda **kwargs: 1 / 0  # type: ignore[method-assign]
    policy = TransformersWrapper(broken, tokenizer=load_tokenizer(tiny_model))
    with (
        LLMCollector(lambda: chat_env(1), policy, steps_per_batch=1) as collector,
        pytest.raises(PolicyError, match="division by zero") as caught,
    ):
        next(collector)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_paired_environments_and_policies_need_only_each_others_keys(
    make_policy: Callable[..., TransformersWrapper],
) -> None:
    def llm_env() -> EnvBase:
        env = LLMEnv.from_dataloader([{"text": ["abc"]}], batch_size=1, eos_token_id=1)
        return env.append_transform(StepCounter(max_steps=1))

    envs, policies = [llm_env, lambda: chat_env(1)], [make_policy("text"), make_policy("history")]
    with pytest.raises(ValueError, match="offers nothing"):
        LLMCollector(envs, policies, steps_per_batch=2)
    with LLMCollector(envs, policies, route="paired", steps_per_batch=4, total_steps=4) as collector:
        turns = list(next(collector).unbind(0))
    for turn in turns:
        assert turn["collector", "policy_id"] == turn["collector", "env_id"]
        assert ("history" in turn) == (turn["collector", "env_id"] == 1)
