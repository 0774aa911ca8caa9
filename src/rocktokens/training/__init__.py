"""On-policy distillation: the objective, the loop, checkpoints that survive a kill, and the health of a run."""
