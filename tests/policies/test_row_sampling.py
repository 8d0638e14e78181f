"""Sampling with a seed per row: the distribution that ``generate`` samples from, whatever the rows beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList

from torchrl_llm.policies.row_sampling import RowSampling, warpers_of


@pytest.fixture(scope="module")
def model(tiny_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


def first_tokens(model: Any, seeds: list[int], **options: Any) -> torch.Tensor:
    options = {"do_sample": True, "max_new_tokens": 1, "pad_token_id": 0, **options}
    warpers = warpers_of(model, options)
    assert warpers is not None
    sampling = LogitsProcessorList([RowSampling(warpers, seeds, model.device)])
    prompt = torch.tensor([[5, 6, 7]]).expand(len(seeds), -1)
    return model.generate(prompt, logits_processor=sampling, **options)[:, -1]


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_k": 0, "top_p": 0.1}, {"temperature": 0.5, "top_k": 4}])
def test_it_is_the_distribution_that_generate_samples_from(model: Any, options: dict[str, Any]) -> None:
    count = 3000
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1:]
    warpers = warpers_of(model, {"do_sample": True, **options})
    assert warpers is not None
    expected = torch.softmax(warpers(torch.tensor([[5, 6, 7]]), logits).float(), -1)[0]
    allowed = expected > 0
    assert 1 < int(allowed.sum()) < 200
    found = torch.bincount(first_tokens(model, list(range(count)), **options), minlength=len(expected)) / count
    assert not found[~allowed].any()
    assert (found - expected).abs().max() < 5 * (0.25 / count) ** 0.5


def test_a_row_is_sampled_by_its_seed_alone(model: Any) -> None:
    together = first_tokens(model, [1, 2, 3, 4])
    assert len(set(together.tolist())) > 1
    for seed in (1, 2, 3, 4):
        assert first_tokens(model, [seed]).tolist() == [together[seed - 1].item()]


def test_a_greedy_model_samples_nothing(model: Any) -> None:
    assert warpers_of(model, {"do_sample": False}) is None
