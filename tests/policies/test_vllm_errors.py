"""What goes wrong between prompts, responses and a vLLM engine, in each of the four ways to read."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from canned import LLM, make_output
from dialogs import Feedback
from fakes import WAYS, Outcome, ScriptedEnv, assert_settled, chat_env, raise_at, read_to_the_end
from token_env import TokensEnv
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.modules.llm import vLLMWrapper
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from torchrl_llm import LLMCollector, PolicyError, split_trajectories

EACH_WAY = pytest.mark.parametrize("way", WAYS)
CONTEXT = 512  # of the engine in conftest.py


def policy_of(llm: Any, mode: str, allowed: list[int] | None = None, **generate: Any) -> vLLMWrapper:
    policy = vLLMWrapper(llm, input_mode=mode, generate_kwargs={"temperature": 0.0, "max_tokens": 8, **generate})
    policy.sampling_params.allowed_token_ids = allowed
    return policy


def read(way: str, env: Any, policy: Any, **options: Any) -> tuple[Outcome, dict[str, Any]]:
    """Everything that a collector gives in one way of reading, and its books."""
    if "trajectories_per_batch" not in options:
        options["steps_per_batch"] = 1
    with LLMCollector(env, policy, **options) as collector:
        outcome = read_to_the_end(collector, way)
        stats = collector.stats()
    assert_settled(stats)
    return outcome, stats


def prompts_of(outcome: Outcome) -> list[str]:
    return [row["text"].prompt for row in outcome.rows]


# Prompts that do not fit


@EACH_WAY
def test_a_prompt_longer_than_the_context_is_skipped_and_counted_L64(vllm_llm: Any, way: str) -> None:
    env = ScriptedEnv(["short", "long " * CONTEXT, "short too"])
    outcome, stats = read(way, env, policy_of(vllm_llm, "text"))
    assert outcome.error is None
    assert prompts_of(outcome) == ["short#0", "short too#0"]
    assert stats["recorded_by_reason"] == {"prompt_too_long": 1}
    assert (stats["launched"], stats["delivered"], stats["errors"]) == (3, 2, 0)


@pytest.mark.parametrize("mode", ["text", "history"])
def test_a_prompt_that_just_fits_is_answered_by_one_token_L64(vllm_llm: Any, tokenizer: Any, mode: str) -> None:
    if mode == "text":
        make = lambda length: ScriptedEnv(["a" * length])  # noqa: E731
        overhead = len(tokenizer("#0")["input_ids"])
    else:
        make = lambda length: chat_env(["a" * length])  # noqa: E731
        overhead = len(tokenizer("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    single = tokenizer("a" * 100)["input_ids"]
    assert len(single) == 100, "each letter is a token"
    for length, turns in [(CONTEXT - 1 - overhead, 1), (CONTEXT - overhead, 0)]:
        outcome, stats = read("loop", make(length), policy_of(vllm_llm, mode))
        assert len(outcome.rows) == turns
        assert stats["recorded_by_reason"] == ({} if turns else {"prompt_too_long": 1})
        for row in outcome.rows:
            assert row["tokens"].response.numel() == 1
            assert row["collector", "finish_reason"] == "length"


def growing_chat() -> EnvBase:
    """One dialog that would go on for a hundred turns."""
    return TransformedEnv(chat_env(["how are you?"], length=100), Feedback())


@EACH_WAY
@pytest.mark.parametrize("unit", ["steps_per_batch", "trajectories_per_batch"])
def test_a_dialog_that_outgrows_the_context_ends_truncated_L65(vllm_llm: Any, way: str, unit: str) -> None:
    outcome, stats = read(
        way, growing_chat(), policy_of(vllm_llm, "history", max_tokens=100, ignore_eos=True), **{unit: 1}
    )
    assert outcome.error is None
    rows = outcome.rows
    assert [int(row["collector", "step"]) for row in rows] == list(range(len(rows))), "no turn is missing"
    assert len(rows) >= 4
    for row in rows:
        last = row is rows[-1]
        assert row["next", "truncated"].item() == last
        assert row["next", "done"].item() == last
        assert not row["next", "terminated"].item()
        assert row["tokens"].full.numel() <= CONTEXT
    assert (stats["launched"], stats["delivered"], stats["errors"]) == (1, 1, 0)


@EACH_WAY
def test_a_source_with_nothing_but_overlong_prompts_gives_an_error_L64(vllm_llm: Any, way: str) -> None:
    """Instead of a search without end."""
    outcome, stats = read(way, lambda: ScriptedEnv(iter(lambda: "long " * CONTEXT, None)), policy_of(vllm_llm, "text"))
    assert isinstance(outcome.error, PolicyError)
    assert "prompts in a row are too long" in str(outcome.error) and str(CONTEXT - 1) in str(outcome.error)
    assert outcome.rows == [] and set(stats["recorded_by_reason"]) == {"prompt_too_long"}


# Unusual responses


@EACH_WAY
@pytest.mark.parametrize("mode", ["history", "text"])
def test_an_empty_response_is_a_turn_like_any_other(tokenizer: Any, way: str, mode: str) -> None:
    """vLLM itself always has at least the token that ended the response; other engines need not."""
    llm = LLM(
        tokenizer, lambda ids: make_output(ids, [], log_probs=[], prompt_log_probs=[None] + [-1.0] * (len(ids) - 1))
    )
    env = chat_env(["hi", "ho"]) if mode == "history" else ScriptedEnv(["hi", "ho"])
    outcome, stats = read(way, env, vLLMWrapper(llm, tokenizer=tokenizer, input_mode=mode))
    assert outcome.error is None
    assert len(outcome.rows) == stats["turns"] == 2
    for row in outcome.rows:
        assert row["tokens"].response.shape == row["log_probs"].response.shape == (0,)
        assert row["text"].response == ""
        if mode == "history":
            assert [message.content for message in row["history"].full.unbind(0)][-1] == ""
            assert not row["masks"].all_assistant_mask.any()
    assert stats["response_tokens"] == 0


@EACH_WAY
@pytest.mark.parametrize("mode", ["history", "text"])
def test_a_response_that_ends_at_once_keeps_its_one_token(vllm_llm: Any, tokenizer: Any, way: str, mode: str) -> None:
    eos = tokenizer.eos_token_id
    env = chat_env(["hi", "ho"]) if mode == "history" else ScriptedEnv(["hi", "ho"])
    outcome, stats = read(way, env, policy_of(vllm_llm, mode, allowed=[eos]))
    assert outcome.error is None and len(outcome.rows) == 2
    for row in outcome.rows:
        assert row["tokens"].response.tolist() == [eos]
        assert row["log_probs"].response.shape == (1,)
        assert row["text"].response == "<|im_end|>"
        assert row["collector", "finish_reason"] == "stop"
    assert stats["response_tokens"] == 2


@EACH_WAY
@pytest.mark.parametrize("mode", ["history", "text"])
def test_a_response_cut_inside_a_character_keeps_its_tokens_L61(
    vllm_llm: Any, tokenizer: Any, way: str, mode: str
) -> None:
    first_bytes = tokenizer("🏞")["input_ids"][:1]
    assert "�" in tokenizer.decode(first_bytes)
    if mode == "history":
        env: EnvBase = TransformedEnv(chat_env(["hi"], length=2), Feedback())
    else:
        env = ScriptedEnv(["hi"], length=2)
    outcome, _ = read(way, env, policy_of(vllm_llm, mode, allowed=first_bytes, max_tokens=3))
    assert outcome.error is None
    first, second = outcome.rows
    for row in (first, second):
        assert row["tokens"].response.tolist() == first_bytes * 3
        assert "�" in row["text"].response
    if mode == "history":
        kept = first["tokens"].full.tolist()
        assert second["tokens"].prompt.tolist()[: len(kept)] == kept


# Engines and requests that fail


@EACH_WAY
def test_a_request_that_the_engine_refuses_gives_its_error_after_what_was_finished(vllm_llm: Any, way: str) -> None:
    outcome, stats = read(way, TokensEnv([[70], [71], [70, 99_999], [72]]), policy_of(vllm_llm, "tokens"))
    assert [row["tokens"].prompt.tolist() for row in outcome.rows] == [[70], [71]]
    assert isinstance(outcome.error, PolicyError)
    assert isinstance(outcome.error.__cause__, VLLMValidationError)
    assert "99999" in str(outcome.error) and (outcome.error.slot, outcome.error.trajectory) == (0, 2)
    assert stats["recorded_by_reason"] == {"failed": 1}


def test_a_request_that_the_engine_refuses_costs_its_trajectory_alone_with_restart(vllm_llm: Any) -> None:
    def make_env() -> EnvBase:
        return TokensEnv([[70], [70, 99_999], [71]])

    outcome, stats = read("loop", make_env, lambda: policy_of(vllm_llm, "tokens"), on_error="restart", total_steps=2)
    assert outcome.error is None
    assert [row["tokens"].prompt.tolist() for row in outcome.rows] == [[70], [71]]
    assert stats["policy_restarts"] == 0, "the engine is well"
    assert stats["recorded_by_reason"] == {"failed": 1}


@EACH_WAY
def test_an_engine_that_dies_gives_an_error_in_each_way_to_read(tokenizer: Any, way: str) -> None:
    llm = LLM(
        tokenizer,
        lambda ids: make_output(ids, [70], log_probs=[-1.0], prompt_log_probs=[None] + [-1.0] * (len(ids) - 1)),
        on_step=raise_at(3, EngineDeadError()),
    )
    outcome, stats = read(way, ScriptedEnv(), vLLMWrapper(llm, tokenizer=tokenizer, input_mode="text"))
    assert prompts_of(outcome) == ["q0#0", "q1#0", "q2#0"], "what was finished is delivered"
    assert isinstance(outcome.error, PolicyError)
    assert "EngineDeadError" in str(outcome.error)
    assert (outcome.error.slot, outcome.error.trajectory, outcome.error.turn) == (0, 3, 0)
    assert stats["recorded_by_reason"] == {"failed": 1}


def test_an_engine_that_dies_takes_all_its_requests_and_is_built_anew_once(tokenizer: Any) -> None:
    deaths = iter([raise_at(2, EngineDeadError()), lambda: None])
    built = []

    def make_policy() -> vLLMWrapper:
        llm = LLM(
            tokenizer,
            lambda ids: make_output(ids, [70], log_probs=[-1.0], prompt_log_probs=[None] + [-1.0] * (len(ids) - 1)),
            on_step=next(deaths),
        )
        built.append(threading.get_ident())
        return vLLMWrapper(llm, tokenizer=tokenizer, input_mode="text")

    outcome, stats = read("loop", lambda: ScriptedEnv(), make_policy, num_envs=8, on_error="restart", total_steps=40)
    assert outcome.error is None and len(outcome.rows) == 40
    assert len(built) == 2 and stats["policy_restarts"] == 1
    assert 1 <= stats["recorded_by_reason"]["failed"] <= 8


# Pairs that cannot work


@pytest.mark.parametrize("how", [{"num_samples": 2}, {"generate_kwargs": {"n": 3}}], ids=["num_samples", "n"])
def test_several_samples_for_a_prompt_are_refused_L35(vllm_llm: Any, how: dict[str, Any]) -> None:
    policy = vLLMWrapper(vllm_llm, input_mode="text", **how)
    with pytest.raises(ValueError, match=r"num_samples=\d.*only one sample per prompt.*repeat it in the data"):
        LLMCollector(ScriptedEnv(), policy, steps_per_batch=1)


def test_a_wrapper_that_only_scores_is_refused(vllm_llm: Any) -> None:
    policy = vLLMWrapper(vllm_llm, input_mode="text", generate=False)
    with pytest.raises(ValueError, match="generate=False"):
        LLMCollector(ScriptedEnv(), policy, steps_per_batch=1)


@pytest.mark.parametrize(
    ("make_env", "mode", "theirs", "ours"),
    [
        (lambda: chat_env(["hi"]), "text", "('history', 'prompt'", "('text', 'prompt')"),
        (lambda: chat_env(["hi"]), "tokens", "('history', 'prompt'", "('tokens', 'prompt')"),
        (lambda: ScriptedEnv(["hi"]), "history", "'text'", "('history', 'prompt')"),
        (lambda: ScriptedEnv(["hi"]), "tokens", "'text'", "('tokens', 'prompt')"),
        (lambda: TokensEnv([[70]]), "text", "('tokens', 'prompt')", "('text', 'prompt')"),
    ],
    ids=["text on chat", "tokens on chat", "history on text", "tokens on text", "text on tokens"],
)
def test_an_environment_that_offers_nothing_that_the_policy_reads_is_refused_with_both_sides_keys(
    vllm_llm: Any, make_env: Any, mode: str, theirs: str, ours: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        LLMCollector(make_env, policy_of(vllm_llm, mode), steps_per_batch=1)
    message = str(refusal.value)
    assert theirs in message and ours in message, message
    assert "input_mode" in message
    assert not vllm_llm.llm_engine.has_unfinished_requests()


def test_trajectories_of_several_rows_end_one_by_one_when_they_outgrow_the_context_L65(vllm_llm: Any) -> None:
    """An environment of two rows that step together: the long dialog ends, the short one goes on."""
    env = TransformedEnv(chat_env(["hi", "how are you? " * 50, "new"], length=3, batch_size=2), Feedback())
    outcome, _ = read(
        "loop",
        env,
        policy_of(vllm_llm, "history", max_tokens=110, ignore_eos=True),
        trajectories_per_batch=1,
        total_steps=6,
    )
    assert outcome.error is None
    endings = {}
    for batch in outcome.batches:
        (trajectory,) = split_trajectories(batch)
        assert trajectory["next", "done"].flatten().tolist() == [False] * (len(trajectory) - 1) + [True]
        endings[batch[0]["history"].prompt.content[0][:3]] = (
            len(trajectory),
            trajectory[-1]["next", "truncated"].item(),
        )
    assert endings["hi"] == endings["new"] == (3, False)
    assert endings["how"][0] < 3 and endings["how"][1]
