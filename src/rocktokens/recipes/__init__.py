"""Recipes: configs of runs and studies that ship with the package.

Wherever a command takes the path of a TOML file, it takes the bare name of a recipe too.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources

PARTS = frozenset({"demo-study"})
"""Files that only a command can complete."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A config that ships with the package."""

    name: str
    text: str

    @property
    def kind(self) -> str:
        """Which config it is: of a run or of a study."""
        return "study" if "study" in tomllib.loads(self.text) else "run"

    @property
    def summary(self) -> str:
        """The first sentence of the comment that opens it."""
        lines = self.text.split("\n\n", maxsplit=1)[0].splitlines()
        prose = " ".join(line.removeprefix("# ") for line in lines if not line.startswith("#   "))
        return prose.split(". ")[0].rstrip(".") + "."


def shipped(name: str) -> str:
    """Return the text of a shipped TOML file."""
    return resources.files("rocktokens.recipes").joinpath(f"{name}.toml").read_text(encoding="utf-8")


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name."""
    files = resources.files("rocktokens.recipes").iterdir()
    names = sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))
    return {name: Recipe(name, shipped(name)) for name in names if name not in PARTS}
