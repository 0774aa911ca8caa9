"""How values are shown to people: escaped token text, numbers, tables. Used by commands, notebooks and pages."""
