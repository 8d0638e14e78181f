"""The continuous runner through the whole collector, on a real engine."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from canned import run_rows
from dialogs import raw_log_probs
from fakes import PATIENCE, ScriptedEnv, assert_settled, chat_env, numbered
from same import assert_same
from tensordict import TensorDict, TensorDictBase, lazy_stack
from token_env import TokensEnv
from torchrl.data import Composite, NonTensor
from torchrl.data.llm import History
from torchrl.envs import EnvBase
from torchrl.envs.llm import ChatEnv, LLMEnv
from torchrl.envs.llm.datasets.countdown import CountdownEnv
from torchrl.modules.llm import vLLMWrapper
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens
from transformers import AutoModelForCausalLM

from torchrl_llm import LLMCollector
from torchrl_llm.policies.runner import Response, Ticket
from torchrl_llm.policies.vllm import ContinuousRunner

PROMPTS = ["What is the capital of France?", "a river 🏞️", "2+2", "Once upon a time there was"]
MODES = ("history", "text", "tokens")


@pytest.fixture(autouse=True)
def engine_left_without_requests(vllm_llm: Any) -> Any:
    """Whatever a test does, the user's engine can be used afterwards."""
    yield
    assert not vllm_llm.llm_engine.has_unfinished_requests()
    assert len(vllm_llm.generate(["hello"], use_tqdm=False)) == 1


def make_env(mode: str, tokenizer: Any) -> EnvBase:
    if mode == "history":
        return chat_env(PROMPTS)
    if mode == "text":
        return ScriptedEnv(PROMPTS)
    return TokensEnv([tokenizer(prompt)["input_ids"] for prompt in PROMPTS])


def make_policy(llm: Any, mode: str, *, tokenizer: Any = None, generate: dict[str, Any] | None = None, **options: Any):
    generate = {"temperature": 0.0, "max_tokens": 12} | (generate or {})
    return vLLMWrapper(llm, tokenizer=tokenizer, input_mode=mode, generate_kwargs=generate, **options)


def in_letters(policy: vLLMWrapper, tokenizer: Any) -> vLLMWrapper:
    """Lets the model, which is random, write only letters, and not halves of characters."""
    policy.sampling_params.allowed_token_ids = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    return policy


def collect(env: Any, policy: Any, **options: Any) -> list[TensorDictBase]:
    """All turns that there are, or the first ``total_steps``."""
    with LLMCollector(env, policy, steps_per_batch=1, **options) as collector:
        turns = [turn for batch in collector for turn in batch.unbind(0)]
    assert_settled(collector.stats())
    return turns


def text_of(turn: TensorDictBase, part: str) -> str:
    return getattr(turn["text"], part)


# What a turn says


@pytest.mark.parametrize("mode", MODES)
def test_a_turn_is_what_generate_gives_for_its_prompt(vllm_llm: Any, tokenizer: Any, mode: str) -> None:
    policy = make_policy(vllm_llm, mode, tokenizer=tokenizer)
    turns = collect(make_env(mode, tokenizer), policy, total_steps=len(PROMPTS))
    prompts = list(PROMPTS)
    if mode == "text":
        prompts = [f"{prompt}#0" for prompt in PROMPTS]  # so the environment puts it
    elif mode == "history":
        prompts = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in PROMPTS]
    given = prompts if mode == "text" else [{"prompt_token_ids": tokenizer(prompt)["input_ids"]} for prompt in prompts]
    outputs = vllm_llm.generate(given, policy.sampling_params, use_tqdm=False)
    for turn, prompt, output in zip(turns, prompts, outputs, strict=True):
        (completion,) = output.outputs
        assert turn["tokens"].response.tolist() == list(completion.token_ids)
        scores = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        torch.testing.assert_close(turn["log_probs"].response, torch.tensor(scores), atol=1e-5, rtol=0)
        if mode != "text":
            assert turn["tokens"].prompt.tolist() == output.prompt_token_ids
            assert turn["tokens"].full.tolist() == [*output.prompt_token_ids, *completion.token_ids]
        if mode != "tokens":
            assert text_of(turn, "prompt") == prompt
            assert text_of(turn, "response") == tokenizer.decode(completion.token_ids)
        if mode == "history":
            messages = [(message.role, message.content) for message in turn["history"].full.unbind(0)]
            assert messages[-1] == ("assistant", tokenizer.decode(completion.token_ids))
        assert turn["collector", "finish_reason"] == completion.finish_reason


def test_an_engine_runs_whatever_number_of_threads_torch_was_given(vllm_llm: Any, tokenizer: Any) -> None:
    """vLLM on CPU fails if the number changes in a step, as torch lets it do at the first use in a new thread."""
    threads = torch.get_num_threads()
    torch._C.set_num_threads(1 if threads > 1 else 2)  # vLLM puts a function that does nothing in place of torch's
    try:
        [turn] = collect(make_env("text", tokenizer), make_policy(vllm_llm, "text"), total_steps=1)
    finally:
        torch._C.set_num_threads(threads)
    assert len(turn["tokens"].response) == 12


@pytest.fixture(scope="module")
def transformers_model(tiny_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.mark.parametrize("mode", MODES)
def test_log_probs_are_those_that_transformers_computes_on_the_same_ids(
    vllm_llm: Any, tokenizer: Any, transformers_model: Any, mode: str
) -> None:
    policy = make_policy(vllm_llm, mode, tokenizer=tokenizer, generate={"temperature": 1.0, "seed": 3})
    for turn in collect(make_env(mode, tokenizer), policy, total_steps=len(PROMPTS)):
        response = turn["tokens"].response
        prompt = turn["tokens"].prompt
        if prompt is None:
            prompt = torch.tensor(tokenizer(text_of(turn, "prompt"))["input_ids"])
        expected = raw_log_probs(transformers_model, prompt, torch.cat([prompt, response]))
        torch.testing.assert_close(turn["log_probs"].response, expected, atol=1e-3, rtol=0)


def a_row(mode: str, tokenizer: Any, prompt: str) -> TensorDict:
    if mode == "history":
        messages = History(role=["user"], content=[prompt], batch_size=(1,))
        return TensorDict(history=ChatHistory._from_tensordict(TensorDict(prompt=messages)))
    if mode == "text":
        text = Text._from_tensordict(TensorDict())
        text.prompt = prompt
        return TensorDict(text=text)
    return TensorDict(tokens=Tokens(prompt=torch.tensor(tokenizer(prompt)["input_ids"])))


ENDINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "at a stop string": lambda stop: {"stop_sequences": [stop]},
    "at a stop string that is left out": lambda stop: {"stop_sequences": [stop], "include_stop_str_in_output": False},
    "at once": lambda stop: {"stop_token_ids": list(range(512))},
    "by length": lambda stop: {"ignore_eos": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pad_output", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_row_equals_the_wrappers_on_the_same_engine(
    vllm_llm: Any, tokenizer: Any, mode: str, pad_output: bool, ending: Callable[[str], dict[str, Any]]
) -> None:
    row = a_row(mode, tokenizer, "What is the capital?")
    (plain,) = run_rows(in_letters(make_policy(vllm_llm, mode, tokenizer=tokenizer), tokenizer), [row])
    stop = tokenizer.decode(plain["tokens"].response[4:6])
    # With pad_output the wrapper switches off what stop strings need.
    generate = {**ending(stop), "detokenize": True}
    policy = make_policy(vllm_llm, mode, tokenizer=tokenizer, generate=generate, pad_output=pad_output)
    in_letters(policy, tokenizer)
    expected = policy(lazy_stack([row.copy()]))[0].select(*policy.out_keys)
    (ours,) = run_rows(policy, [row])
    for key in policy.out_keys:
        assert_same(expected.get(key), ours.get(key), key)
    if "stop_sequences" in generate:
        assert stop in tokenizer.decode(ours["tokens"].response)
        assert ours["tokens"].response.numel() < plain["tokens"].response.numel()


# The environments that TorchRL has, and a user's own


def test_llm_env_with_its_default_keys_in_text_mode_L83(vllm_llm: Any, tokenizer: Any) -> None:
    def make() -> EnvBase:
        data = [{"text": ["hello there"]}]
        return LLMEnv.from_dataloader(data, from_text=True, eos_token_id=tokenizer.eos_token_id, batch_size=(1,))

    turns = collect(make, make_policy(vllm_llm, "text", tokenizer=tokenizer), total_steps=3)
    assert text_of(turns[0], "prompt") == "hello there"
    for turn in turns:
        assert turn["text_response"] == text_of(turn, "response")
        assert turn["tokens_response"].tolist() == turn["tokens"].response.tolist()
        assert turn["next", "text"] == text_of(turn, "prompt") + text_of(turn, "response")
        ended = tokenizer.eos_token_id in turn["tokens_response"].tolist()
        assert turn["next", "done"].item() == ended
    for before, after in itertools.pairwise(turns):
        if not before["next", "done"]:
            assert text_of(after, "prompt") == before["next", "text"]


def test_llm_env_with_its_default_keys_in_tokens_mode_L83(vllm_llm: Any, tokenizer: Any) -> None:
    ids = tokenizer("hello there")["input_ids"]

    def make() -> EnvBase:
        data = [{"tokens": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}]
        return LLMEnv.from_dataloader(data, from_text=False, eos_token_id=tokenizer.eos_token_id, batch_size=(1,))

    turns = collect(make, make_policy(vllm_llm, "tokens", tokenizer=tokenizer), total_steps=3)
    assert turns[0]["tokens"].prompt.tolist() == ids
    for turn in turns:
        assert turn["tokens_response"].tolist() == turn["tokens"].response.tolist()
        assert turn["next", "tokens"].tolist() == turn["tokens"].full.tolist()
        assert turn["next", "attention_mask"].shape == turn["next", "tokens"].shape
    for before, after in itertools.pairwise(turns):
        if not before["next", "done"]:
            assert after["tokens"].prompt.tolist() == before["tokens"].full.tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_chat_env_from_a_dataloader_in_each_mode(vllm_llm: Any, tokenizer: Any, mode: str, batch_size: int) -> None:
    def make() -> EnvBase:
        data = [{"query": [f"question {index}" for index in range(batch_size)]}]
        return ChatEnv.from_dataloader(data, batch_size=(batch_size,), input_mode=mode, tokenizer=tokenizer)

    turns = collect(make, make_policy(vllm_llm, mode, tokenizer=tokenizer), total_steps=2 * batch_size)
    first = {int(turn["collector", "traj_ids"]): turn for turn in turns if turn["collector", "step"] == 0}
    assert len(first) == batch_size
    for index, turn in first.items():
        prompt = f"<|im_start|>user\nquestion {index}<|im_end|>\n<|im_start|>assistant\n"
        if mode == "tokens":
            assert tokenizer.decode(turn["tokens"].prompt) == prompt
        else:
            assert text_of(turn, "prompt") == prompt
    for turn in turns:
        following = turn["next", mode].prompt
        now = turn[mode].full
        if mode == "history":
            assert following.content == now.content
        elif mode == "tokens":
            assert following.tolist() == now.tolist()
        else:
            assert following == now


def test_countdown_gives_rewards(vllm_llm: Any, tokenizer: Any) -> None:
    def make() -> EnvBase:
        return CountdownEnv(seed=1, tokenizer=tokenizer)

    turns = collect(make, make_policy(vllm_llm, "history", tokenizer=tokenizer), num_envs=2, total_steps=6)
    assert len(turns) == 6
    for turn in turns:
        assert turn["next", "reward"].numel() == 1 and turn["next", "done"].all()
        assert "create an arithmetic" in turn["history"].prompt.content[-1]


def test_a_users_own_environment_gets_the_response_that_its_specs_ask_for(vllm_llm: Any, tokenizer: Any) -> None:
    turns = collect(
        TokensEnv([[70, 71], [72]]),
        make_policy(vllm_llm, "tokens", tokenizer=tokenizer, generate={"max_tokens": 5, "ignore_eos": True}),
        total_steps=2,
    )
    assert [turn["tokens"].prompt.tolist() for turn in turns] == [[70, 71], [72]]
    assert all(turn["next", "reward"].item() == 5 for turn in turns)


# The wrapper's own configuration


def test_the_wrappers_chat_template_is_used(vllm_llm: Any, tokenizer: Any) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    (turn,) = collect(
        chat_env(["hi"]),
        make_policy(vllm_llm, "history", tokenizer=tokenizer, chat_template=template),
        total_steps=1,
    )
    assert text_of(turn, "prompt") == "[user]hi[assistant]"
    assert turn["tokens"].prompt.tolist() == tokenizer("[user]hi[assistant]")["input_ids"]


def test_the_chat_template_that_the_wrapper_names_is_used(vllm_llm: Any, tokenizer: Any) -> None:
    policy = make_policy(vllm_llm, "history", tokenizer=tokenizer, chat_template_name="qwen")
    (turn,) = collect(chat_env(["hi"]), policy, total_steps=1)
    row = a_row("history", tokenizer, "hi")
    assert text_of(turn, "prompt") == row["history"].prompt.apply_chat_template(
        tokenizer=tokenizer, chat_template_name="qwen", add_generation_prompt=True
    )
    assert text_of(turn, "prompt") != text_of(
        collect(chat_env(["hi"]), make_policy(vllm_llm, "history", tokenizer=tokenizer), total_steps=1)[0], "prompt"
    )


def test_a_stop_string_of_the_wrapper_ends_the_response(vllm_llm: Any, tokenizer: Any) -> None:
    policy = in_letters(make_policy(vllm_llm, "text", tokenizer=tokenizer), tokenizer)
    (plain,) = collect(ScriptedEnv(["hi"]), policy, total_steps=1)
    stop = tokenizer.decode(plain["tokens"].response[3:5])
    policy = make_policy(vllm_llm, "text", tokenizer=tokenizer, generate={"stop_sequences": [stop]})
    (turn,) = collect(ScriptedEnv(["hi"]), in_letters(policy, tokenizer), total_steps=1)
    assert stop in text_of(turn, "response")
    assert text_of(plain, "response").startswith(text_of(turn, "response"))
    assert turn["tokens"].response.numel() < plain["tokens"].response.numel()
    assert turn["collector", "finish_reason"] == "stop"


def test_an_input_key_of_the_users_is_read(vllm_llm: Any, tokenizer: Any) -> None:
    class Env(ScriptedEnv):
        def __init__(self) -> None:
            super().__init__(["hello"])
            self.observation_spec = Composite(
                text=NonTensor(shape=(), example_data="x"), question=NonTensor(shape=(), example_data="x")
            )

        def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
            return super()._reset(tensordict, **kwargs).set("question", "WHY?")

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            return super()._step(tensordict).set("question", "WHY?")

    policy = make_policy(vllm_llm, "text", tokenizer=tokenizer, input_key="question")
    (turn,) = collect(Env(), policy, total_steps=1)
    assert turn["question"] == "WHY?"
    assert text_of(turn, "prompt") == "WHY?"
    (output,) = vllm_llm.generate(["WHY?"], policy.sampling_params, use_tqdm=False)
    assert turn["tokens"].response.tolist() == list(output.outputs[0].token_ids)


def test_renamed_keys_of_the_wrapper_are_the_turns_keys(vllm_llm: Any, tokenizer: Any) -> None:
    names = {"text_key": "words", "tokens_key": "ids", "masks_key": "marks", "log_probs_key": "scores"}
    (turn,) = collect(chat_env(["hi"]), make_policy(vllm_llm, "history", tokenizer=tokenizer, **names), total_steps=1)
    (plain,) = collect(chat_env(["hi"]), make_policy(vllm_llm, "history", tokenizer=tokenizer), total_steps=1)
    for ours, theirs in [("words", "text"), ("ids", "tokens"), ("marks", "masks"), ("scores", "log_probs")]:
        assert ours not in plain.keys() and theirs not in turn.keys()
        assert_same(plain[theirs], turn[ours], ours)


def test_without_log_probs_there_is_no_such_key(vllm_llm: Any, tokenizer: Any) -> None:
    policy = make_policy(vllm_llm, "history", tokenizer=tokenizer, return_log_probs=False)
    (turn,) = collect(chat_env(["hi"]), policy, total_steps=1)
    assert "log_probs" not in turn.keys()
    assert turn["tokens"].response.numel()


def test_the_wrapper_is_left_as_it_was(vllm_llm: Any, tokenizer: Any) -> None:
    policy = make_policy(vllm_llm, "history", tokenizer=tokenizer)
    params, kept = repr(policy.sampling_params), policy.tokenizer
    collect(chat_env(["hi"]), policy, total_steps=1)
    assert repr(policy.sampling_params) == params
    assert policy.tokenizer is kept and policy.model is vllm_llm
    assert policy(lazy_stack([a_row("history", tokenizer, "hi")]))["text"].response


# Continuous


def of_length(llm: Any, max_tokens: int, mode: str = "text") -> vLLMWrapper:
    return make_policy(llm, mode, generate={"max_tokens": max_tokens, "ignore_eos": True}, return_log_probs=False)


def test_short_slots_complete_several_turns_while_a_long_response_is_under_way(vllm_llm: Any) -> None:
    """One response of 256 tokens and fifteen slots of 16: counted, not timed."""
    envs = [ScriptedEnv(numbered(f"slot {index}, "), length=100) for index in range(16)]
    with LLMCollector(
        envs,
        [of_length(vllm_llm, 256), of_length(vllm_llm, 16)],
        steps_per_batch=1,
        route=lambda env_id, loads: 0 if env_id == 0 else 1,
    ) as collector:
        turns = [0] * 16
        for batch in collector:
            (slot,) = batch["collector", "env_id"].tolist()
            assert batch[0]["tokens"].response.numel() == (256 if slot == 0 else 16)
            turns[slot] += 1
            if slot == 0:
                break
    assert turns[0] == 1
    assert min(turns[1:]) >= 4, turns  # in lockstep each would have made one


def test_all_slots_are_in_the_engine_at_once(vllm_llm: Any) -> None:
    most = 0
    step = vllm_llm.llm_engine.step

    def counting() -> Any:
        nonlocal most
        most = max(most, vllm_llm.llm_engine.get_num_unfinished_requests())
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_llm.llm_engine, "step", counting)
        envs = [ScriptedEnv(["hello"]) for _ in range(16)]
        turns = collect(envs, of_length(vllm_llm, 64), total_steps=16)
    assert len(turns) == 16
    assert most == 16


def test_two_wrappers_of_one_engine_answer_in_their_own_modes(vllm_llm: Any, tokenizer: Any) -> None:
    """Different environments, keys and lengths over one engine, in one collector."""
    policies = [of_length(vllm_llm, 24), make_policy(vllm_llm, "text", tokenizer=tokenizer, return_log_probs=True)]
    threads = set(threading.enumerate())
    with LLMCollector(
        [ScriptedEnv(), ScriptedEnv()], policies, steps_per_batch=1, total_steps=8, route="paired"
    ) as collector:
        batches = list(collector)
        engines = [t for t in set(threading.enumerate()) - threads if "engine" in t.name]
    assert engines == [], "at the end nobody holds the engine"
    for batch in batches:
        (turn,) = batch.unbind(0)
        assert turn["collector", "policy_id"] == turn["collector", "env_id"]
        assert ("log_probs" in turn.keys()) == bool(turn["collector", "policy_id"])
        assert (turn["tokens"].response.numel() == 24) == (turn["collector", "policy_id"] == 0)


def test_two_collectors_share_an_engine_at_the_same_time(vllm_llm: Any, tokenizer: Any) -> None:
    expected = [
        list(output.outputs[0].token_ids)
        for output in vllm_llm.generate(
            [f"{prompt}#0" for prompt in PROMPTS],
            make_policy(vllm_llm, "text", tokenizer=tokenizer).sampling_params,
            use_tqdm=False,
        )
    ]
    rooms: list[queue.Queue[Any]] = [queue.Queue(), queue.Queue()]
    policies = [make_policy(vllm_llm, "text", tokenizer=tokenizer) for _ in rooms]
    collectors = [LLMCollector(lambda: ScriptedEnv(PROMPTS * 4), policy, steps_per_batch=1) for policy in policies]
    for collector, room in zip(collectors, rooms, strict=True):
        collector.start(room)
    for collector, room in zip(collectors, rooms, strict=True):
        batches = list(iter(lambda room=room: room.get(timeout=PATIENCE), None))
        assert [batch[0]["tokens"].response.tolist() for batch in batches] == expected * 4
        assert collector.join(PATIENCE)
        assert_settled(collector.stats())


def test_an_engine_outlives_the_first_of_two_collectors_that_share_it(vllm_llm: Any) -> None:
    with LLMCollector(ScriptedEnv(), of_length(vllm_llm, 8), steps_per_batch=1) as second:
        with LLMCollector(ScriptedEnv(), of_length(vllm_llm, 400), steps_per_batch=1) as first:
            first.start(queue.Queue())
            next(second)
        assert vllm_llm.llm_engine.get_num_unfinished_requests() <= 1
        for _ in range(3):
            assert next(second)[0]["tokens"].response.numel() == 8


# Ending


def test_shutdown_in_the_middle_of_a_long_generation_aborts_it_in_the_engine(vllm_llm: Any) -> None:
    entered = threading.Event()
    step = vllm_llm.llm_engine.step

    def stepping() -> Any:
        entered.set()
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_llm.llm_engine, "step", stepping)
        envs = [ScriptedEnv() for _ in range(16)]
        collector = LLMCollector(envs, of_length(vllm_llm, 480), steps_per_batch=1)
        collector.start(queue.Queue())
        assert entered.wait(PATIENCE)
        started = time.monotonic()
        collector.shutdown()
        seconds = time.monotonic() - started
    assert vllm_llm.llm_engine.get_num_unfinished_requests() == 0
    assert not vllm_llm.llm_engine.engine_core.engine_core.scheduler.has_unfinished_requests()
    stats = collector.stats()
    assert stats["turns_finished"] == 0 and set(stats["recorded_by_reason"]) == {"shutdown"}
    assert_settled(stats)
    assert seconds < 2, "16 x 480 tokens take more than that"


def test_pause_lets_the_engine_go_on(vllm_llm: Any) -> None:
    with LLMCollector(ScriptedEnv(), of_length(vllm_llm, 8), steps_per_batch=1, total_steps=3) as collector:
        target: queue.Queue[Any] = queue.Queue()
        collector.start(target)
        with collector.pause():
            pass
        assert len(list(iter(lambda: target.get(timeout=PATIENCE), None))) == 3


# Giving up a request


def test_a_request_that_is_cut_gives_the_tokens_made_so_far(vllm_llm: Any, tokenizer: Any) -> None:
    def run(max_tokens: int) -> tuple[ContinuousRunner, Ticket]:
        generate = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "min_tokens": max_tokens}
        runner = ContinuousRunner(make_policy(vllm_llm, "tokens", tokenizer=tokenizer, generate=generate), answers.put)
        ticket = Ticket(0, 0, 0, 0, 0)
        runner.submit(ticket, runner.prepare(TensorDict(tokens=Tokens(prompt=torch.arange(5, 12))), None))
        return runner, ticket

    answers: queue.SimpleQueue[Response] = queue.SimpleQueue()
    long, ticket = run(max_tokens=200)
    short, _ = run(max_tokens=6)
    first = answers.get(timeout=PATIENCE)
    assert long.cut(ticket)
    cut = answers.get(timeout=PATIENCE)
    assert long.cut(ticket), "one that is answered already is left alone"
    assert (cut.ticket, cut.finish_reason) == (ticket, "abort")
    ids, log_probs = (cut.output[key].response for key in ("tokens", "log_probs"))
    expected = first.output["tokens"].response
    assert 6 <= cut.response_tokens == len(ids) == len(log_probs) < 200
    assert torch.equal(ids[:6], expected)
    for runner in (long, short):
        assert runner.close(time.monotonic() + PATIENCE) == []
    assert answers.empty()


def test_an_aborted_request_leaves_the_engine_and_is_not_answered(vllm_llm: Any, tokenizer: Any) -> None:
    answers: queue.SimpleQueue[Response] = queue.SimpleQueue()
    generate = {"max_tokens": 200, "ignore_eos": True}
    runner = ContinuousRunner(make_policy(vllm_llm, "tokens", tokenizer=tokenizer, generate=generate), answers.put)
    tickets = [Ticket(0, row, 0, row, 0) for row in range(2)]
    for ticket in tickets:
        runner.submit(ticket, runner.prepare(TensorDict(tokens=Tokens(prompt=torch.arange(5, 12))), None))
    runner.abort(tickets[0])
    assert answers.get(timeout=PATIENCE).ticket is tickets[1]
    assert runner.close(time.monotonic() + PATIENCE) == []
    assert answers.empty()
