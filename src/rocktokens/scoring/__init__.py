"""Per-token quantities of METHOD 2: the divergence and its gradient, batches of rollouts, and replay."""
