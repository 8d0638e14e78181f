"""Weight updates of engines in processes of their own, of engines that die, of tied models, and LoRA adapters."""

from __future__ import annotations

import json
import os
import queue
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import ENGINE_SETTINGS, make_multiprocess_llm
from fakes import PATIENCE, ScriptedEnv, assert_settled
from safetensors.torch import load_file, save_file
from telling_weights import check_answer, load_tiny, own_answer, perturbed, telling, token_of, vllm_policy

from torchrl_llm import CollectorError, LLMCollector
from torchrl_llm.weight_files import SHARED_MEMORY, write_safetensors

PROMPTS = ["What is the capital of France?", "a river", "2+2", "Once upon a time there was"]


def forever() -> Iterator[str]:
    while True:
        yield from PROMPTS


def shared_memory_folders() -> list[str]:
    return [name for name in os.listdir(SHARED_MEMORY) if name.startswith("torchrl_llm-weights-")]


@pytest.fixture(scope="module")
def own_process_engine(tiny_model: str) -> Iterator[Any]:
    llm = make_multiprocess_llm(tiny_model)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["continue", "wait", "restart"])
def test_an_engine_in_its_own_process_knows_each_tokens_version(
    mode: str, own_process_engine: Any, original: Any
) -> None:
    """Outputs that are on their way when the weights are switched are those of the old weights."""
    before = shared_memory_folders()
    policy = vllm_policy(own_process_engine, tokens=120)
    envs = [ScriptedEnv(forever()) for _ in range(4)]
    mixed = 0
    with LLMCollector(envs, policy, steps_per_batch=1, update_mode=mode, track_token_versions=True) as collector:
        collector.update_policy_weights_(telling(original, 1))
        for version in range(2, 20):
            collector.update_policy_weights_(telling(original, version))
            for _ in range(3):
                [row] = next(collector)
                versions = row["collector", "token_versions"].tolist()
                assert row["tokens"].response.tolist() == [token_of(v) for v in versions]
                mixed += len(set(versions)) > 1
    assert (mixed > 0) == (mode == "continue")
    assert shared_memory_folders() == before


@pytest.mark.slow
def test_an_engine_in_its_own_process_answers_as_the_new_weights_do(
    own_process_engine: Any, original: Any, tokenizer: Any, tmp_path: Path
) -> None:
    with LLMCollector(ScriptedEnv(forever()), vllm_policy(own_process_engine), steps_per_batch=1) as collector:
        for seed in (1, 2):
            new = perturbed(original, seed)
            if seed == 2:
                new.save_pretrained(tmp_path)
            collector.update_policy_weights_(new if seed == 1 else tmp_path)
            rows = [next(collector)[0] for _ in range(4)]
            for row in rows[1:]:
                check_answer(row, new, tokenizer)


def test_a_folder_with_a_wrappers_prefix_is_read_by_an_engine_that_reads_files(
    engine: Any, original: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl_llm.policies import weights_vllm_reload

    monkeypatch.setattr(weights_vllm_reload, "shares_memory", lambda engine: False)
    new = perturbed(original, 5)
    tensors = {"module." + name: tensor.contiguous() for name, tensor in new.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with LLMCollector(ScriptedEnv(forever()), vllm_policy(engine), steps_per_batch=1) as collector:
        collector.update_policy_weights_(tmp_path)
        assert collector.policy_version == 1
        check_answer(next(collector)[0], new, tokenizer)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.slow
def test_a_policy_that_is_rebuilt_answers_with_the_newest_weights(tiny_model: str, original: Any) -> None:
    engines: list[Any] = []

    def make_policy() -> Any:
        engines.append(make_multiprocess_llm(tiny_model))
        return vllm_policy(engines[-1], tokens=10)

    with LLMCollector(
        lambda: ScriptedEnv(forever()), make_policy, steps_per_batch=1, on_error="restart", track_token_versions=True
    ) as collector:
        next(collector)
        state = telling(original, 5)
        collector.update_policy_weights_(state, version=5)
        for tensor in state.values():
            tensor.zero_()  # the trainer goes on with its own
        engines[0].llm_engine.step = lambda: 1 / 0
        rows = [next(collector)[0] for _ in range(6)]
        assert len(engines) == 2
        assert collector.stats()["policy_restarts"] == 1
        for row in rows[-3:]:
            assert set(row["tokens"].response.tolist()) == {token_of(5)}
            assert row["collector", "token_versions"].tolist() == [5] * 10
        assert collector.policy_version == 5
        engines.clear()
    assert_settled(collector.stats())


# Names, ties, adapters


# The end of one in-process engine ends vLLM's process-wide groups, so that they all live as long as the session.
@pytest.fixture(scope="session")
def tied_engine(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model whose output head is its embedding."""
    from vllm import LLM

    folder = tmp_path_factory.mktemp("tied")
    model = load_tiny(tiny_model)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (Path(tiny_model) / name).exists():
            (folder / name).write_bytes((Path(tiny_model) / name).read_bytes())
    llm = LLM(str(folder), **ENGINE_SETTINGS)
    llm.folder = str(folder)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def lora_engine(tiny_model: str) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(tiny_model, enable_lora=True, max_lora_rank=8, **ENGINE_SETTINGS)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def lora_policy(llm: Any) -> Any:
    policy = vllm_policy(llm)
    # vLLM 0.32 on CPU cannot score prompts of an engine with adapters, whether there is an adapter or not.
    policy.sampling_params.prompt_logprobs = None
    return policy


def test_tied_weights_may_come_once_or_twice_and_must_agree(tied_engine: Any, tokenizer: Any) -> None:
    new = perturbed(load_tiny(tied_engine.folder), 4)
    assert new.lm_head.weight is new.model.embed_tokens.weight
    state = new.state_dict()
    once = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    with LLMCollector(ScriptedEnv(forever()), vllm_policy(tied_engine), steps_per_batch=1) as collector:
        for weights in (state, once, {"module." + name: tensor for name, tensor in state.items()}):
            collector.update_policy_weights_(weights)
            rows = [next(collector)[0] for _ in range(3)]
            check_answer(rows[-1], new, tokenizer)
        with pytest.raises(ValueError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
            collector.update_policy_weights_(once | {"lm_head.weight": state["lm_head.weight"] + 1})
        assert collector.policy_version == 3


def test_a_tied_head_that_would_keep_its_old_weights_is_refused(
    tied_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl_llm.policies import weights_vllm_reload

    monkeypatch.setattr(weights_vllm_reload, "shares_memory", lambda engine: False)
    with (
        LLMCollector(ScriptedEnv(forever()), vllm_policy(tied_engine), steps_per_batch=1) as collector,
        pytest.raises(ValueError, match=r"packed copy of a tied output head.*VLLM_ALLOW_INSECURE_SERIALIZATION=1"),
    ):
        collector.update_policy_weights_(load_tiny(tied_engine.folder))


def adapter_for(model: Any, folder: Path, seed: int, rank: int = 4) -> Any:
    """Writes a peft folder, and gives the model with the adapter merged into it."""
    generator = torch.Generator().manual_seed(seed)
    merged = perturbed(model, 0)
    merged.load_state_dict(model.state_dict())
    tensors = {}
    for name, module in merged.named_modules():
        if name.endswith(("q_proj", "o_proj", "gate_proj")):
            a = torch.randn(rank, module.in_features, generator=generator) * 0.1
            b = torch.randn(module.out_features, rank, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            with torch.no_grad():
                module.weight += 2.0 * b @ a
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "o_proj", "gate_proj"],
        "base_model_name_or_path": "tied",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


def test_lora_adapters_are_swapped_with_requests_in_flight(
    lora_engine: Any, original: Any, tokenizer: Any, tmp_path: Path
) -> None:
    merged = {seed: adapter_for(original, tmp_path / str(seed), seed) for seed in (1, 2, 3)}
    envs = [ScriptedEnv(forever()) for _ in range(3)]
    with LLMCollector(envs, lora_policy(lora_engine), steps_per_batch=1, track_token_versions=True) as collector:
        next(collector)
        for seed in (1, 2, 3):
            collector.update_policy_weights_(str(tmp_path / str(seed)), version=10 + seed)
            whole = []
            while len(whole) < 4:
                [row] = next(collector)
                versions = row["collector", "token_versions"]
                if (versions == 10 + seed).all():
                    whole.append(row)
            for row in whole:
                made, scores = own_answer(merged[seed], tokenizer, row["text"].prompt)
                assert row["tokens"].response.tolist() == made
                torch.testing.assert_close(row["log_probs"].response, scores, atol=1e-3, rtol=0)


@pytest.mark.parametrize("mode", ["continue", "wait"])
def test_whole_weights_take_the_adapter_off(
    mode: str, lora_engine: Any, original: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """With requests in flight that began with the adapter: their tokens are not stamped with the new version."""
    merged = adapter_for(original, tmp_path / "adapter", 1)
    new = perturbed(original, 3)
    models = {0: original, 1: original, 2: merged, 3: new}
    envs = [ScriptedEnv(forever()) for _ in range(3)]
    with LLMCollector(envs, lora_policy(lora_engine), steps_per_batch=1, track_token_versions=True) as collector:
        collector.update_policy_weights_(original)
        target: queue.Queue[Any] = queue.Queue()
        collector.start(target)
        checked = 0
        for version, what in ((2, tmp_path / "adapter"), (3, new)):
            target.get(timeout=PATIENCE)
            collector.update_policy_weights_(what, update_mode=mode)
            whole = 0
            while whole < 4:
                [row] = target.get(timeout=PATIENCE)
                versions = set(row["collector", "token_versions"].tolist())
                assert len(versions) == 1  # none goes on from one kind of weights to the other
                made, _ = own_answer(models[versions.pop()], tokenizer, row["text"].prompt)
                assert row["tokens"].response.tolist() == made
                whole += int(row["collector", "policy_version"]) == version
                checked += 1
        assert checked >= 8
        assert lora_engine.llm_engine.list_loras() == set()


def test_a_policy_that_is_rebuilt_has_base_weights_and_adapter(
    lora_engine: Any, original: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """The files that were passed are gone by then."""
    base = perturbed(original, 6)
    merged = adapter_for(base, tmp_path / "adapter", 2)
    shutil.copytree(tmp_path / "adapter", tmp_path / "passed")
    collector = LLMCollector(
        lambda: ScriptedEnv(forever()), lambda: lora_policy(lora_engine), steps_per_batch=1, on_error="restart"
    )
    with collector:
        collector.update_policy_weights_(base)
        collector.update_policy_weights_(tmp_path / "passed", version=7)
        shutil.rmtree(tmp_path / "passed")
        next(collector)
        for model in (merged, merged, base):
            if model is base:
                collector.update_policy_weights_(base, version=8)  # takes the adapter off, and is kept without it
            collector._pool.runners[0].close(time.monotonic() + PATIENCE)
            # The new policy's engine begins with its constructor's weights.
            lora_engine.llm_engine.remove_lora(1)
            lora_engine.llm_engine.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": list(original.state_dict().items())}
            )
            collector._pool.rebuild(0)
            rows = [next(collector)[0] for _ in range(3)]
            for row in rows[1:]:
                made, _ = own_answer(model, tokenizer, row["text"].prompt)
                assert row["tokens"].response.tolist() == made
                assert int(row["collector", "policy_version"]) == (8 if model is base else 7)


def test_an_adapter_alone_is_refused_where_the_base_weights_are_gone(
    lora_engine: Any, original: Any, tokenizer: Any, tmp_path: Path
) -> None:
    merged = adapter_for(original, tmp_path / "adapter", 1)
    with LLMCollector(ScriptedEnv(forever()), lora_policy(lora_engine), steps_per_batch=1) as collector:
        collector.sleep(2)
        collector.wake_up()
        with pytest.raises(CollectorError, match=r"discards their weights, and a LoRA adapter is not all of them"):
            collector.update_policy_weights_(tmp_path / "adapter")
        with pytest.raises(CollectorError, match="level 2"):
            next(collector)
        assert collector.policy_version == 0
        collector.update_policy_weights_(original)
        collector.update_policy_weights_(tmp_path / "adapter")
        row = [next(collector)[0] for _ in range(2)][-1]
        made, _ = own_answer(merged, tokenizer, row["text"].prompt)
        assert row["tokens"].response.tolist() == made


def test_adapters_that_do_not_fit_are_refused(lora_engine: Any, engine: Any, original: Any, tmp_path: Path) -> None:
    adapter_for(original, tmp_path / "good", 1)
    adapter_for(original, tmp_path / "high", 1, rank=16)
    adapter_for(original, tmp_path / "bad", 1)
    file = tmp_path / "bad" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file(tensors | {name: torch.zeros(4, 5)}, file)
    with LLMCollector(ScriptedEnv(forever()), lora_policy(lora_engine), steps_per_batch=1) as collector:
        with pytest.raises(ValueError, match="has rank 16; the engine's max_lora_rank is 8"):
            collector.update_policy_weights_(tmp_path / "high")
        with pytest.raises(ValueError, match=r"has shape \(4, 5\)"):
            collector.update_policy_weights_(tmp_path / "bad")
        assert collector.policy_version == 0
    with (
        LLMCollector(ScriptedEnv(forever()), vllm_policy(engine), steps_per_batch=1) as collector,
        pytest.raises(ValueError, match="build it with enable_lora=True"),
    ):
        collector.update_policy_weights_(tmp_path / "good")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_written_safetensors_are_read_as_they_were(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "b": torch.ones(4, 4).to(dtype).t()[1:],  # not contiguous
        "empty": torch.zeros(0, 3, dtype=dtype),
        "scalar": torch.ones((), dtype=dtype),
    }
    write_safetensors(str(tmp_path / "x.safetensors"), tensors)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor)
