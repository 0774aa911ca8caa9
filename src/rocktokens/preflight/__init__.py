"""What ``rocktokens check`` and ``rocktokens init`` look at before a run starts (docs/method.md, section 9)."""
