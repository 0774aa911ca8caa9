"""Studies: arms × seeds over one base config, trained, evaluated and compared alike (docs/method.md, section 7)."""
