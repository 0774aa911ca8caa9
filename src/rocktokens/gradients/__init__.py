"""Where the gradient goes, by type and by group: in logit space and in the space of the parameters (METHOD 5)."""
