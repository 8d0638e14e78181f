"""Weight updates through the whole collector, on real vLLM and on TransformersWrapper."""

from __future__ import annotations

import queue
from typing import Any

import psutil
import pytest
import torch
from fakes import PATIENCE, ScriptedEnv, assert_settled, echo
from telling_weights import check_answer, perturbed, telling, token_of, transformers_policy, vllm_policy
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.envs.llm.transforms import PolicyVersion

from torchrl_llm import CollectorError, LLMCollector

PROMPTS = ["What is the capital of France?", "a river", "2+2", "Once upon a time there was"]


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


class Background:
    """Reads a collector in another thread, until it is told to stop."""

    def __init__(self, collector: LLMCollector) -> None:
        self.target: queue.Queue[Any] = queue.Queue()
        collector.start(self.target)

    def rows(self, count: int) -> list[Any]:
        return [self.target.get(timeout=PATIENCE)[0] for _ in range(count)]

    def begun_with(self, version: int, count: int) -> list[Any]:
        """The next rows whose responses began with ``version``."""
        found: list[Any] = []
        while len(found) < count:
            found += [row for row in self.rows(1) if int(row["collector", "policy_version"]) == version]
        return found


@pytest.mark.parametrize("mode", ["continue", "wait", "restart"])
def test_requests_in_flight_obey_the_mode(mode: str, engine: Any, original: Any) -> None:
    policy = vllm_policy(engine, tokens=60)
    envs = [ScriptedEnv(prompt for _ in range(1000) for prompt in PROMPTS) for _ in range(4)]
    with LLMCollector(envs, policy, steps_per_batch=1, update_mode=mode, track_token_versions=True) as collector:
        collector.update_policy_weights_(telling(original, 1))
        background = Background(collector)
        mixed = 0
        for version in range(2, 12):
            background.rows(1)
            collector.update_policy_weights_(telling(original, version))
            assert collector.policy_version == version
            for row in background.rows(4):
                versions = row["collector", "token_versions"].tolist()
                assert row["tokens"].response.tolist() == [token_of(v) for v in versions]
                assert versions == sorted(versions)
                mixed += len(set(versions)) > 1
        assert (mixed > 0) == (mode == "continue")
        discarded = collector.stats()["tokens_discarded"]
        assert (discarded > 0) == (mode == "restart")


@pytest.mark.parametrize("mode", ["continue", "wait", "restart"])
def test_no_answer_comes_from_keys_and_values_of_the_old_weights_L79(
    mode: str, engine: Any, original: Any, tokenizer: Any
) -> None:
    """The same prompts again and again, with requests in flight at each update, so that the prefix cache is hit."""
    assert engine.llm_engine.vllm_config.cache_config.enable_prefix_caching
    long = "Once upon a time there was a small village where everyone knew everyone. " * 3
    policy = vllm_policy(engine, tokens=20)
    envs = [ScriptedEnv(long for _ in range(1000)) for _ in range(3)]
    with LLMCollector(envs, policy, steps_per_batch=1, track_token_versions=True) as collector:
        background = Background(collector)
        for seed in range(1, 6):
            background.rows(2)
            new = perturbed(original, seed)
            collector.update_policy_weights_(new, update_mode=mode)
            for row in background.begun_with(seed, 6):
                check_answer(row, new, tokenizer, tokens=20)


def test_after_an_update_in_flight_the_new_weights_read_the_whole_text_anew(
    engine: Any, original: Any, tokenizer: Any
) -> None:
    """Under "continue" the tokens after the switch are those of the new weights for the prompt and the old tokens."""
    policy = vllm_policy(engine, tokens=60)
    envs = [ScriptedEnv(prompt for _ in range(1000) for prompt in PROMPTS) for _ in range(2)]
    models = {0: original} | {seed: perturbed(original, seed) for seed in range(1, 9)}
    checked = 0
    with LLMCollector(envs, policy, steps_per_batch=1, track_token_versions=True) as collector:
        background = Background(collector)
        for seed in range(1, 9):
            rows = background.rows(2)
            collector.update_policy_weights_(models[seed])
            rows += background.rows(4)
            for row in rows:
                versions = row["collector", "token_versions"]
                if versions[0] == versions[-1]:
                    continue
                ids = torch.cat([torch.tensor(tokenizer(row["text"].prompt)["input_ids"]), row["tokens"].response])
                for version in set(versions.tolist()):
                    with torch.no_grad():
                        logits = models[version](ids[None]).logits[0, -len(versions) - 1 : -1]
                    own = versions == version
                    assert logits.argmax(-1)[own].tolist() == row["tokens"].response[own].tolist()
                    scores = torch.log_softmax(logits, -1).gather(1, row["tokens"].response[:, None])[:, 0]
                    torch.testing.assert_close(row["log_probs"].response[own], scores[own], atol=2e-4, rtol=0)
                checked += 1
    assert checked


def test_two_engines_switch_together(engine: Any, original: Any, tokenizer: Any) -> None:
    """An engine and a module: from the first delivery after the update on, nothing begins with old weights."""
    model = perturbed(original, 0)
    policies = [vllm_policy(engine, tokens=5), transformers_policy(model, tokenizer, tokens=5)]
    envs = [ScriptedEnv(prompt for _ in range(1000) for prompt in PROMPTS) for _ in range(4)]
    with LLMCollector(envs, policies, steps_per_batch=1, route="sticky") as collector:
        background = Background(collector)
        for version in range(1, 30):
            collector.update_policy_weights_(telling(original, version))
            rows = background.begun_with(version, 4)
            assert all(set(row["tokens"].response.tolist()) == {token_of(version)} for row in rows)
        assert [runner.version for runner in collector._weights._pool.runners] == [29, 29]


WRONG = {
    "a shape": (lambda s: s | {"lm_head.weight": torch.zeros(3, 128)}, r"'lm_head.weight' has shape \(3, 128\)"),
    "a dtype": (lambda s: s | {"lm_head.weight": s["lm_head.weight"].double()}, r"'lm_head.weight' is torch.float64"),
    "ints": (lambda s: s | {"lm_head.weight": s["lm_head.weight"].long()}, r"'lm_head.weight' is torch.int64"),
    "a name": (lambda s: s | {"lm_tail.weight": s["lm_head.weight"]}, r"'lm_tail.weight' is not a name"),
    "too few": (lambda s: {k: v for k, v in s.items() if "layers.1" not in k}, r"layers.1.* is missing.*and 4 more"),
}


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
@pytest.mark.parametrize("what", WRONG)
def test_wrong_weights_change_nothing_and_are_listed_L78(
    what: str, kind: str, engine: Any, original: Any, tokenizer: Any
) -> None:
    change, message = WRONG[what]
    mine = perturbed(original, 3)
    policy = vllm_policy(engine) if kind == "vllm" else transformers_policy(mine, tokenizer)
    with LLMCollector(ScriptedEnv(PROMPTS * 10), policy, steps_per_batch=1) as collector:
        collector.update_policy_weights_(mine)
        bad = change({name: tensor + 1 for name, tensor in original.state_dict().items()})
        with pytest.raises(ValueError, match=message):
            collector.update_policy_weights_(bad)
        assert collector.policy_version == 1
        check_answer(next(collector)[0], mine, tokenizer)


def test_two_hundred_updates_in_a_row_while_collecting(engine: Any, original: Any) -> None:
    policy = vllm_policy(engine, tokens=8)
    envs = [ScriptedEnv(prompt for _ in range(10_000) for prompt in PROMPTS) for _ in range(4)]
    process = psutil.Process()
    states = [telling(original, version) for version in range(4)]
    with LLMCollector(envs, policy, steps_per_batch=1, track_token_versions=True) as collector:
        buffer = ReplayBuffer(storage=LazyStackStorage(100), batch_size=1)
        collector.start(buffer)
        memory = []
        for version in range(1, 201):
            collector.update_policy_weights_(
                states[version % 4], update_mode=("continue", "wait", "restart")[version % 3]
            )
            memory.append(process.memory_info().rss)
        assert collector.is_running()
        assert collector.policy_version == 200
        assert len(buffer)
        for row in buffer[:]:
            versions = row["collector", "token_versions"].tolist()
            assert row["tokens"].response.tolist() == [token_of(v % 4) for v in versions]
    assert memory[-1] - memory[50] < 40e6, "the memory grows"
    assert_settled(collector.stats())


def test_versions_are_the_callers_numbers_and_grow(original: Any, tokenizer: Any) -> None:
    model = perturbed(original, 0)
    with LLMCollector(ScriptedEnv(PROMPTS * 10), transformers_policy(model, tokenizer), steps_per_batch=1) as collector:
        collector.update_policy_weights_(model, version=10)
        assert collector.policy_version == 10
        collector.update_policy_weights_(model)
        assert collector.policy_version == 11
        for version, error in ((11, ValueError), (3, ValueError), ("12", TypeError), (True, TypeError)):
            with pytest.raises(error, match=r"version=.* is not allowed"):
                collector.update_policy_weights_(model, version=version)
        assert int(next(collector)["collector", "policy_version"]) == 11


def test_torchrls_policy_version_transform_agrees(original: Any, tokenizer: Any) -> None:
    env = TransformedEnv(ScriptedEnv(PROMPTS * 10, length=2), PolicyVersion(version_type="int"))
    model = perturbed(original, 0)
    with LLMCollector(env, transformers_policy(model, tokenizer, tokens=2), steps_per_batch=1) as collector:
        for _ in range(8):
            [row] = next(collector)
            assert row["policy_version"] == row["collector", "policy_version"]
            assert row["next", "policy_version"] == row["collector", "policy_version_end"]
            collector.update_policy_weights_(model)
        assert env.transform[0].version == 8 if hasattr(env.transform, "__getitem__") else env.transform.version == 8


def test_what_has_no_weights_says_so() -> None:
    with LLMCollector(ScriptedEnv(PROMPTS), echo, steps_per_batch=1) as collector:
        with pytest.raises(TypeError, match="the policy is a function without weights that can be updated"):
            collector.update_policy_weights_({"w": torch.zeros(1)})
        for bad, message in ((3, "weights=int is not allowed"), ({"w": 3}, "int"), ([1], "int"), ({}, "no tensors")):
            with pytest.raises((TypeError, ValueError), match=message):
                collector.update_policy_weights_(bad)
        with pytest.raises(TypeError, match="needs weights"):
            collector.update_policy_weights_()
        with pytest.raises(ValueError, match="update_mode='later' is not allowed"):
            collector.update_policy_weights_({"w": torch.zeros(1)}, update_mode="later")
    with pytest.raises(CollectorError, match="was shut down"):
        collector.update_policy_weights_({"w": torch.zeros(1)})
    with pytest.raises(ValueError, match="update_mode='now' is not allowed"):
        LLMCollector(ScriptedEnv, echo, steps_per_batch=1, update_mode="now")
