from importlib import resources
from pathlib import Path

import pytest

from rocktokens.config import dump_config, parse_config

ROOT = Path(__file__).parents[1]
SHIPPED = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "recipes").glob("*.toml"))}
SHIPPED["demo.toml"] = resources.files("rocktokens.cli").joinpath("demo.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_is_valid_and_survives_being_written_out(name: str) -> None:
    config = parse_config(SHIPPED[name], name=name)
    assert parse_config(dump_config(config)) == config


def test_the_config_in_the_readme_is_valid() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.split("```toml\n")[1].split("```")[0]
    assert parse_config(block, name="README").task.name == "jsonl"
