"""Studies: arms × seeds over one base config, trained and evaluated alike, compared in pairs (METHOD 7)."""
