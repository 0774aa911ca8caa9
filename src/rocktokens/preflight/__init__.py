"""What ``rocktokens check`` looks at before a run starts (docs/method.md, section 9)."""
