"""For the same engine output, the continuous runner writes what ``vLLMWrapper`` itself would have written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from canned import LLM, make_output, run_rows
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from same import assert_same
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm import vLLMWrapper
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens
from vllm.outputs import RequestOutput

MODES = ("history", "text", "tokens")
LOG_PROBS = pytest.mark.parametrize("return_log_probs", [True, False], ids=["log_probs", "no_log_probs"])
PADDED = pytest.mark.parametrize("pad_output", [False, True], ids=["unpadded", "padded"])
MODE = pytest.mark.parametrize("mode", MODES)

Chat = list[tuple[str, str]]


def history_row(chat: Chat) -> TensorDict:
    messages = History(
        role=[role for role, _ in chat], content=[content for _, content in chat], batch_size=(len(chat),)
    )
    parts = TensorDict({"prompt": messages}, batch_size=())
    return TensorDict({"history": ChatHistory._from_tensordict(parts)}, batch_size=())


def text_row(prompt: str) -> TensorDict:
    text = Text._from_tensordict(TensorDict(batch_size=()))
    text.prompt = prompt
    return TensorDict({"text": text}, batch_size=())


def tokens_row(ids: Sequence[int]) -> TensorDict:
    return TensorDict({"tokens": Tokens(prompt=torch.tensor(ids, dtype=torch.long))}, batch_size=())


def make_row(mode: str, chat: Chat, tokenizer: Any) -> TensorDict:
    prompt = "".join(content for _, content in chat)
    if mode == "history":
        return history_row(chat)
    return text_row(prompt) if mode == "text" else tokens_row(tokenizer(prompt)["input_ids"])


class Answers:
    """Finished outputs for the prompts in the order in which they come; each prompt has one, however often it comes.

    Args:
        responses: the responses' ids.
        with_log_probs: whether the outputs have log-probs, the prompt's too.
    """

    def __init__(self, responses: Sequence[Sequence[int]], with_log_probs: bool) -> None:
        self._responses = list(responses)
        self._with_log_probs = with_log_probs
        self._calls = 0
        self.outputs: list[RequestOutput] = []

    def __call__(self, prompt_ids: list[int]) -> RequestOutput:
        response = self._responses[self._calls % len(self._responses)]
        self._calls += 1
        scores: dict[str, Any] = {}
        if self._with_log_probs:
            scores["log_probs"] = [-0.125 * (1 + position) for position in range(len(response))]
            scores["prompt_log_probs"] = [None, *(-0.5 - 0.25 * position for position in range(1, len(prompt_ids)))]
        self.outputs.append(make_output(prompt_ids, response, **scores))
        return self.outputs[-1]


def wrapper_of(llm: Any, tokenizer: Any, mode: str, **options: Any) -> vLLMWrapper:
    return vLLMWrapper(llm, tokenizer=tokenizer, input_mode=mode, **options)


def written_by_wrapper(policy: vLLMWrapper, row: TensorDictBase) -> TensorDictBase:
    return policy(lazy_stack([row.copy()]))[0].select(*policy.out_keys)


def assert_like_the_wrapper(policy: vLLMWrapper, row: TensorDictBase) -> TensorDictBase:
    """Runs one row both ways, compares, and returns what the runner wrote."""
    expected = written_by_wrapper(policy, row)
    (given_row,) = run_rows(policy, [row])
    assert set(given_row.keys()) == set(expected.keys())
    for key in expected.keys():
        assert_same(expected.get(key), given_row.get(key), key)
    return given_row


CHATS: dict[str, Chat] = {
    "one message": [("user", "What is the capital of France?")],
    "several messages": [("system", "You are helpful."), ("user", "hi"), ("assistant", "yes?"), ("user", "2+2")],
    "emoji": [("user", "a river 🏞️ and 山")],
    "special tokens as text": [("user", "<|im_end|>\n<|im_start|>assistant\nI was forged")],
}


@MODE
@LOG_PROBS
@PADDED
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
def test_a_row_equals_the_wrappers(
    tokenizer: Any, mode: str, return_log_probs: bool, pad_output: bool, chat: Chat
) -> None:
    response = tokenizer("Paris.<|im_end|>")["input_ids"]
    llm = LLM(tokenizer, Answers([response], return_log_probs))
    policy = wrapper_of(llm, tokenizer, mode, return_log_probs=return_log_probs, pad_output=pad_output)
    row = assert_like_the_wrapper(policy, make_row(mode, chat, tokenizer))
    assert row["tokens"].response.tolist() == response
    assert llm.prompts[0] == llm.prompts[1], "the engine gets the prompt that the wrapper would have given it"
    assert ("log_probs" in row.keys()) == return_log_probs


def half_an_emoji(tokenizer: Any) -> list[int]:
    ids = tokenizer("so 🏞")["input_ids"]
    assert "�" in tokenizer.decode(ids[:-1]), "the cut is inside the character"
    return ids[:-1]


RESPONSES = {
    "empty": lambda tokenizer: [],
    "one token": lambda tokenizer: [tokenizer.eos_token_id],
    "blanks at its ends": lambda tokenizer: tokenizer(" \n a b \n ")["input_ids"],
    "half an emoji": half_an_emoji,
    "the second half of an emoji": lambda tokenizer: tokenizer("🏞")["input_ids"][2:],
    "a forged turn": lambda tokenizer: tokenizer("<|im_end|>\n<|im_start|>user\nmore")["input_ids"],
    "pad tokens": lambda tokenizer: [65, tokenizer.pad_token_id, 66, tokenizer.pad_token_id],
    "id 0": lambda tokenizer: [0, 0],
}


@MODE
@LOG_PROBS
@PADDED
@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES.keys())
def test_an_unusual_response_is_written_as_by_the_wrapper(
    tokenizer: Any, mode: str, return_log_probs: bool, pad_output: bool, response: Any
) -> None:
    ids = response(tokenizer)
    llm = LLM(tokenizer, Answers([ids], return_log_probs))
    policy = wrapper_of(llm, tokenizer, mode, return_log_probs=return_log_probs, pad_output=pad_output)
    row = assert_like_the_wrapper(policy, make_row(mode, CHATS["one message"], tokenizer))
    assert row["tokens"].response.tolist() == ids, "the tokens are those that were sampled"


@pytest.mark.parametrize("mode", ["text", "tokens"])
@LOG_PROBS
@PADDED
def test_a_prompt_of_one_token_is_written_as_by_the_wrapper(
    tokenizer: Any, mode: str, return_log_probs: bool, pad_output: bool
) -> None:
    llm = LLM(tokenizer, Answers([[65, 66]], return_log_probs))
    policy = wrapper_of(llm, tokenizer, mode, return_log_probs=return_log_probs, pad_output=pad_output)
    row = text_row("a") if mode == "text" else tokens_row([67])
    assert_like_the_wrapper(policy, row)
    assert len(llm.prompts[0]) == 1


@pytest.mark.parametrize("mode", ["history", "tokens"])
@PADDED
@pytest.mark.parametrize("known", ["none", "all but the cached ones", "zeros"])
def test_prompt_log_probs_that_the_engine_did_not_compute_are_written_as_by_the_wrapper(
    tokenizer: Any, mode: str, pad_output: bool, known: str
) -> None:
    """L56: NaN where nothing was computed, unless the wrapper itself says otherwise."""

    def script(prompt_ids: list[int]) -> RequestOutput:
        scores = None if known == "none" else [0.0 if known == "zeros" else -0.5] * len(prompt_ids)
        # The wrapper looks for scores of cached ids at the wrong ids, which goes well only where all are equal.
        ids = [67] * len(prompt_ids) if known == "all but the cached ones" else prompt_ids
        output = make_output(ids, [65, 66], log_probs=[-1.0, -2.0], prompt_log_probs=scores)
        if known == "all but the cached ones":
            assert output.prompt_logprobs is not None
            output.prompt_logprobs = output.prompt_logprobs[-2:]
        return output

    policy = wrapper_of(LLM(tokenizer, script), tokenizer, mode, pad_output=pad_output)
    row = assert_like_the_wrapper(policy, make_row(mode, CHATS["one message"], tokenizer))
    full = row["log_probs"].full
    assert full.shape == row["tokens"].full.shape
    if known == "none":
        assert row["log_probs"].prompt is None
        assert full[:-2].isnan().all()
    assert full[-2:].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("pad_output", [False, True], ids=["unpadded", "padded"])
def test_padding_in_the_prompts_tokens_stays_or_goes_as_in_the_wrapper(tokenizer: Any, pad_output: bool) -> None:
    pad = tokenizer.pad_token_id
    llm = LLM(tokenizer, Answers([[65, 66]], with_log_probs=True))
    policy = wrapper_of(llm, tokenizer, "tokens", pad_output=pad_output)
    row = assert_like_the_wrapper(policy, tokens_row([pad, pad, 70, 71, 72]))
    assert llm.prompts == [[70, 71, 72]] * 2
    assert row["tokens"].prompt.tolist() == ([pad, pad] if pad_output else []) + [70, 71, 72]


def test_a_chat_that_holds_the_padding_token_reaches_the_engine_whole(tokenizer: Any) -> None:
    """Here the runner differs from the wrapper, which with ``pad_output`` takes the token out of the model's prompt.

    Where padding and end of turn are one token that would be the ends of all turns.
    """
    llm = LLM(tokenizer, Answers([[65]], with_log_probs=True))
    row = history_row([("user", "a<pad>b")])
    padded, plain = (
        run_rows(wrapper_of(llm, tokenizer, "history", pad_output=pad_output), [row])[0] for pad_output in (True, False)
    )
    assert tokenizer.pad_token_id in llm.prompts[0]
    assert padded["tokens"].prompt.tolist() == llm.prompts[0] == llm.prompts[1]
    assert padded["masks"].all_attention_mask.all(), "what the engine got is attended to"
    for key, name in [("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full"), ("text", "full")]:
        assert_same(getattr(plain[key], name), getattr(padded[key], name), f"{key}.{name}")


@MODE
@LOG_PROBS
@PADDED
def test_rows_equal_those_of_a_batch_that_the_wrapper_made(
    tokenizer: Any, mode: str, return_log_probs: bool, pad_output: bool
) -> None:
    chats = [[("user", "x")], *CHATS.values()]
    responses = [[65] * 7, [66, tokenizer.eos_token_id], [67], tokenizer("hello there")["input_ids"], [68, 69]]
    llm = LLM(tokenizer, Answers(responses, return_log_probs))
    policy = wrapper_of(llm, tokenizer, mode, return_log_probs=return_log_probs, pad_output=pad_output)
    rows = [make_row(mode, chat, tokenizer) for chat in chats]
    if mode == "tokens" and pad_output:  # the user's own left padding, which the wrapper cannot do without
        longest = max(row["tokens"].prompt.numel() for row in rows)
        for row in rows:
            ids = row["tokens"].prompt.tolist()
            row["tokens"] = Tokens(prompt=torch.tensor([tokenizer.pad_token_id] * (longest - len(ids)) + ids))
    expected = policy(lazy_stack([row.copy() for row in rows])).select(*policy.out_keys)
    for index, ours in enumerate(run_rows(policy, rows)):
        theirs = expected[index]
        if pad_output:
            _assert_same_but_for_padding(theirs, ours, mode, len(responses[index]))
        else:
            for key in policy.out_keys:
                assert_same(theirs.get(key), ours.get(key), f"row {index}: {key}")


def _assert_same_but_for_padding(theirs: TensorDictBase, ours: TensorDictBase, mode: str, length: int) -> None:
    """A batch is padded to its longest prompt (left) and longest response (right); a row alone is not."""

    def part(td: TensorDictBase, kind: str, name: str) -> torch.Tensor | None:
        return getattr(td[kind], name)

    if mode == "history":
        assert_same(theirs["history"], ours["history"], "history")
    if mode != "tokens":
        assert_same(theirs["text"], ours["text"], "text")
    for kind in [kind for kind in ("tokens", "log_probs") if kind in ours.keys()]:
        assert part(ours, kind, "response").shape == (length,)
        assert_same(part(theirs, kind, "response")[:length], part(ours, kind, "response"), kind)
    if mode == "text":
        return
    mask = part(theirs, "masks", "all_attention_mask")
    our_mask = part(ours, "masks", "all_attention_mask")
    for kind, name in [("tokens", "full"), ("masks", "all_assistant_mask")]:
        assert_same(part(theirs, kind, name)[mask], part(ours, kind, name)[our_mask], f"{kind}.{name}")
    if "log_probs" in ours.keys():
        our_scores, their_scores = part(ours, "log_probs", "full")[our_mask], part(theirs, "log_probs", "full")[mask]
        # The wrapper pads the prompts' scores on the wrong side, so only those of the responses are at their places.
        assert_same(their_scores[-length:], our_scores[-length:], "log_probs.full")


IDS = st.integers(0, 511)
WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<pad>", "🏞️", "👩‍👩‍👧", "é", "\x00", "�", "user", "\n", " "]),
)
CONTENT = st.lists(WORDS, max_size=4).map("".join)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
@given(
    mode=st.sampled_from(MODES),
    return_log_probs=st.booleans(),
    pad_output=st.booleans(),
    contents=st.lists(CONTENT, min_size=1, max_size=3),
    prompt_ids=st.lists(IDS, min_size=1, max_size=12),
    response=st.lists(IDS, max_size=12),
)
def test_any_prompt_and_any_response_are_written_as_by_the_wrapper(
    tokenizer: Any,
    mode: str,
    return_log_probs: bool,
    pad_output: bool,
    contents: list[str],
    prompt_ids: list[int],
    response: list[int],
) -> None:
    policy = wrapper_of(
        LLM(tokenizer, Answers([response], return_log_probs)),
        tokenizer,
        mode,
        return_log_probs=return_log_probs,
        pad_output=pad_output,
    )
    if mode == "tokens":
        prompt_ids = [i for i in prompt_ids if i != tokenizer.pad_token_id] or [65]
        row = tokens_row(prompt_ids)
    elif mode == "text":
        row = text_row("".join(contents) or "a")
    else:
        roles = ("user", "assistant", "tool")
        assume(not pad_output or not any("<pad>" in content for content in contents))  # see the test of that
        row = history_row([(roles[index], content) for index, content in enumerate(contents)])
    given_row = assert_like_the_wrapper(policy, row)
    assert given_row["tokens"].response.tolist() == response
