"""Where the gradient goes, by type and by group: in logit space and parameter space (docs/method.md, section 5)."""
