"""Per-token quantities (docs/method.md, section 2): divergence and gradient, batches of rollouts, and replay."""
