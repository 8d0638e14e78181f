"""The parts of :class:`~torchrl_llm.ray_collector.RayCollector`, one module each."""
