"""The parts of :class:`~torchrl_llm.ray_collector.RayCollector`, one module each; importing them needs Ray."""

import importlib.util

if importlib.util.find_spec("ray") is None:
    raise ImportError("backend='ray' needs Ray: pip install 'torchrl_llm[ray]', or pip install ray")
