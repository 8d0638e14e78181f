"""What a policy reads from an environment, and what an environment reads from a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import ScriptedEnv, assert_settled, chat_env, echo
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import ChatEnv, LLMEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import AutoModelForCausalLM

from torchrl_llm import LLMCollector
from torchrl_llm.bridge import KeyBridge, as_key, make_bridge, merge_entry, set_entry, shallow_copy, show


@pytest.fixture(scope="module")
def model(tiny_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture
def wrapper(model: Any, tokenizer: Any) -> Callable[..., TransformersWrapper]:
    def make(mode: str) -> TransformersWrapper:
        return TransformersWrapper(
            model,
            tokenizer=tokenizer,
            input_mode=mode,
            pad_output=False,
            generate_kwargs={"max_new_tokens": 5, "do_sample": False},
        )

    return make


def text_env(**kwargs: Any) -> EnvBase:
    data = [{"text": [f"What is the capital of {name}?"]} for name in ("France", "Italy")]
    env = LLMEnv.from_dataloader(data, from_text=True, batch_size=(1,), **kwargs)
    return env.append_transform(StepCounter(max_steps=2))


def tokens_env(tokenizer: Any) -> EnvBase:
    data = [
        {"tokens": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.bool)}
        for ids in tokenizer(["What is the capital of France?", "It is Rome."])["input_ids"]
    ]
    env = LLMEnv.from_dataloader(data, from_text=False, batch_size=(1,), eos_token_id=tokenizer.eos_token_id)
    return env.append_transform(StepCounter(max_steps=2))


# LLMEnv with the wrappers


def test_llm_env_with_its_default_keys_and_a_wrapper_in_text_mode_L83(
    wrapper: Callable[..., TransformersWrapper], tokenizer: Any, model: Any
) -> None:
    collector = LLMCollector(text_env, wrapper("text"), trajectories_per_batch=2, total_steps=4)
    [batch] = collector
    rows = batch.unbind(0)
    assert [row["text"].prompt for row in rows[::2]] == [
        "What is the capital of France?",
        "What is the capital of Italy?",
    ]
    for dialog in (rows[:2], rows[2:]):
        ids = tokenizer(dialog[0]["text"].prompt)["input_ids"]
        for row in dialog:
            text = row["text"]
            assert row["text_response"] == text.response
            assert text.full == text.prompt + text.response == row["next", "text"]
            reference = model.generate(
                torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )[0].tolist()
            assert row["tokens"].response.tolist() == reference[len(ids) :]
            ids = reference
        assert dialog[1]["text"].prompt == dialog[0]["text"].full
    assert_settled(collector.stats())


def test_llm_env_with_its_default_keys_and_a_wrapper_in_tokens_mode_L83(
    wrapper: Callable[..., TransformersWrapper], tokenizer: Any
) -> None:
    collector = LLMCollector(lambda: tokens_env(tokenizer), wrapper("tokens"), trajectories_per_batch=2, total_steps=4)
    [batch] = collector
    rows = batch.unbind(0)
    prompts = tokenizer(["What is the capital of France?", "It is Rome."])["input_ids"]
    firsts = [row for row in rows if int(row["collector", "step"]) == 0]
    assert [row["tokens"].prompt.tolist() for row in firsts] == prompts
    for row in rows:
        tokens = row["tokens"]
        assert row["tokens_response"].tolist() == tokens.response.tolist()
        assert tokens.full.tolist() == tokens.prompt.tolist() + tokens.response.tolist()
        assert row["next", "tokens"].tolist() == tokens.full.tolist()
    assert_settled(collector.stats())


def test_llm_env_with_a_wrapper_in_history_mode_is_refused_with_a_hint_L83(
    wrapper: Callable[..., TransformersWrapper],
) -> None:
    with pytest.raises(ValueError) as raised:
        LLMCollector(text_env, wrapper("history"), steps_per_batch=1)
    message = str(raised.value)
    assert "offers nothing that the policy TransformersWrapper reads" in message
    assert "('history', 'prompt')" in message
    assert "'text'" in message
    assert "LLMEnv has no chat history: use ChatEnv, or a policy with input_mode='text'." in message


def test_chat_env_with_a_wrapper_of_another_mode_says_which_keys_each_side_has(
    wrapper: Callable[..., TransformersWrapper],
) -> None:
    with pytest.raises(ValueError) as raised:
        LLMCollector(chat_env, wrapper("tokens"), steps_per_batch=1)
    message = str(raised.value)
    assert "('tokens', 'prompt')" in message
    assert "('history', 'prompt'" in message


@pytest.mark.parametrize("batch_size", [1, 2])
def test_chat_env_with_a_wrapper_in_history_mode_needs_no_bridge(
    wrapper: Callable[..., TransformersWrapper], batch_size: int
) -> None:
    policy = wrapper("history")
    bridge = make_bridge(ChatEnv(batch_size=(batch_size,)), policy)
    assert bridge.inputs == bridge.actions == ()
    assert bridge.required == (("history", "full"),)
    collector = LLMCollector(
        lambda: chat_env(length=2, batch_size=batch_size), policy, trajectories_per_batch=2, total_steps=4
    )
    [batch] = collector
    for row in batch.unbind(0):
        answer = row["history"].full.unbind(0)[-1]
        assert answer.role == "assistant"
        assert row["tokens"].response.numel() <= 5
        assert row["text"].response.startswith(answer.content)
    stats = collector.stats()
    assert_settled(stats)
    assert stats["response_tokens"] == sum(row["tokens"].response.numel() for row in batch.unbind(0))
    assert stats["prompt_tokens"] == sum(row["tokens"].prompt.numel() for row in batch.unbind(0))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("generate", False, "a TransformersWrapper with generate=False; a collector needs generate=True"),
        ("num_samples", 2, "with num_samples=2; only one sample per prompt is allowed"),
    ],
)
def test_a_wrapper_that_cannot_answer_one_prompt_is_refused_L35(
    model: Any, tokenizer: Any, option: str, value: Any, message: str
) -> None:
    kwargs = {"generate_kwargs": {"max_new_tokens": 3, "do_sample": True}, option: value}
    policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode="history", pad_output=True, **kwargs)
    with pytest.raises(ValueError, match=message):
        LLMCollector(chat_env, policy, steps_per_batch=1)


# Other policies


def test_a_module_whose_in_keys_the_env_lacks_is_refused_with_the_keys_of_both_sides() -> None:
    policy = TensorDictModule(lambda x: x, in_keys=["observation"], out_keys=["answer"])
    with pytest.raises(ValueError) as raised:
        LLMCollector(ScriptedEnv, policy, steps_per_batch=1)
    assert str(raised.value) == (
        "the environment ScriptedEnv offers nothing that the policy TensorDictModule reads: it reads "
        "['observation'], the environment has ['text']."
    )


def test_a_function_reads_what_it_likes_and_must_write_the_actions() -> None:
    bridge = make_bridge(ScriptedEnv(), echo)
    assert bridge == KeyBridge(required=(("answer",),))
    assert bridge.missing_outputs(TensorDict(text="x")) == [("answer",)]
    assert bridge.missing_outputs(TensorDict(answer="x")) == []


def test_what_the_policy_wrote_beside_the_action_reaches_the_reader_but_not_the_next_observation() -> None:
    seen = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        for row in td.unbind(0):
            seen.append(sorted(row.keys()))
            row["answer"] = "x"
            row["value"] = torch.tensor([0.5])
            row["info"] = TensorDict(score=torch.tensor(3))
        return td

    [batch] = LLMCollector(lambda: ScriptedEnv(length=2), policy, steps_per_batch=2, total_steps=2)
    assert batch["value"].tolist() == [[0.5], [0.5]]
    assert batch["info", "score"].tolist() == [3, 3]
    assert seen[0] == seen[1]
    assert "value" not in seen[1]
    assert "reward" not in seen[1]


# The bridge itself


def test_a_key_is_shown_as_users_write_it() -> None:
    assert show([("text",), ("text", "prompt")]) == "['text', ('text', 'prompt')]"
    assert as_key("a") == ("a",)
    assert as_key(("a", ("b", "c"))) == ("a", "b", "c")


def test_inputs_and_actions_are_renamed_without_touching_the_originals() -> None:
    bridge = KeyBridge(
        inputs=((("text", "prompt"), ("text",)),),
        actions=(
            (("text_response",), ("text", "response")),
            (("tokens_response",), ("tokens", "response")),
        ),
        required=(("text", "response"),),
    )
    observation = TensorDict(text="hello", step=torch.tensor(1))
    given = bridge.policy_input(observation)
    assert given["text", "prompt"] == "hello"
    assert observation["text"] == "hello"
    output = TensorDict(text=TensorDict(prompt="hello", response="you"), log_probs=torch.zeros(2))
    assert bridge.missing_outputs(output) == []
    assert bridge.missing_outputs(TensorDict(text="plain")) == [("text", "response")]
    stepped = bridge.env_input(observation, output)
    assert (stepped["text"], stepped["text_response"]) == ("hello", "you")
    assert stepped["log_probs"].tolist() == [0, 0]
    assert "tokens_response" not in stepped.keys()
    assert sorted(observation.keys()) == ["step", "text"]
    turn = bridge.turn(TensorDict(text="hello", text_response="you"), output)
    assert turn["text", "response"] == "you"


def test_an_action_that_is_not_required_is_renamed_where_the_policy_wrote_it() -> None:
    bridge = KeyBridge(actions=((("tokens_response",), ("tokens", "response")),))
    output = TensorDict(tokens=TensorDict(response=torch.arange(3)))
    assert bridge.env_input(TensorDict(), output)["tokens_response"].tolist() == [0, 1, 2]


def test_nested_entries_are_merged_into_copies() -> None:
    inner = TensorDict(a=torch.tensor(1))
    row = TensorDict(nested=inner)
    copy = shallow_copy(row)
    assert copy["nested"] is inner
    merge_entry(copy, "nested", TensorDict(b=torch.tensor(2)))
    assert sorted(copy["nested"].keys()) == ["a", "b"]
    set_entry(copy, ("nested", "deeper", "c"), torch.tensor(3))
    assert int(copy["nested", "deeper", "c"]) == 3
    assert sorted(inner.keys()) == ["a"]
