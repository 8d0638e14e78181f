"""Policy runners: one module per way to run a policy."""
