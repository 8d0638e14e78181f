"""A seed per row in ``model.generate``: each row samples with a generator of its own.

``generate`` draws for all rows from one generator, so that a row's answer depends on the rows beside it. A
:class:`RowSampling` is a logits processor that samples itself, from the distribution that ``generate`` would sample
from, and leaves nothing but the chosen token for ``generate`` to choose. It is exact: the exponential race that it runs
is a draw from that distribution.

Owned by a runner, and called by its thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class RowSampling(LogitsProcessor):
    """Samples each row's next token with its own generator.

    Args:
        warpers: what ``generate`` does to the logits before it samples (temperature, top-k, top-p, ...).
        seeds: one per row.
        device: where the logits are.
    """

    def __init__(self, warpers: LogitsProcessorList, seeds: list[int], device: torch.device) -> None:
        self._warpers = warpers
        self._generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """The scores with all tokens but the sampled ones at minus infinity; both of shape ``(rows, vocabulary)``."""
        probabilities = torch.softmax(self._warpers(input_ids, scores).float(), dim=-1)
        race = torch.empty_like(probabilities)
        for row, generator in enumerate(self._generators):
            race[row].exponential_(generator=generator)
        chosen = (probabilities / race).argmax(dim=-1, keepdim=True)
        only: Any = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, chosen, 0.0)


def warpers_of(model: Any, generate_kwargs: Mapping[str, Any]) -> LogitsProcessorList | None:
    """What ``model.generate(**generate_kwargs)`` does to the logits just before it samples; ``None`` if it does not."""
    config, _ = model._prepare_generation_config(None, **generate_kwargs)
    if not config.do_sample:
        return None
    marker = RowSampling(LogitsProcessorList(), [], torch.device("cpu"))
    processors = model._get_logits_processor(
        generation_config=config, logits_processor=LogitsProcessorList([marker]), device=model.device
    )
    place = next(index for index, processor in enumerate(processors) if processor is marker)
    return LogitsProcessorList(processors[place + 1 :])
