"""The reference names every key there is, and the page made of it is up to date; the schema agrees with the models."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from rocktokens.config import Config, Section, parse_config
from rocktokens.config.policies import RocksSection
from rocktokens.config.reference import json_schema, markdown_reference, reference_page
from rocktokens.config.sentences import sections_of
from rocktokens.recipes import recipes
from rocktokens.studies.config import StudyConfig

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
README = PAGE.parents[1] / "README.md"
RUNS = {name: recipe.text for name, recipe in recipes().items() if recipe.kind == "run"}


def all_sections(model: type[Section]) -> Iterator[type[Section]]:
    yield model
    for field in model.model_fields.values():
        for section in sections_of(field.annotation):
            yield from all_sections(section)


def test_the_page_is_up_to_date():
    message = "make it again: rocktokens config --reference > docs/config.md"
    assert PAGE.read_text(encoding="utf-8") == reference_page(StudyConfig), message


@pytest.mark.parametrize("config", [Config, StudyConfig])
def test_every_key_has_a_meaning(config: type[Section]):
    unexplained = [
        f"{section.__name__}.{name}"
        for section in all_sections(config)
        for name, field in section.model_fields.items()
        if not field.description and name != "name" and not sections_of(field.annotation)
    ]
    assert set(unexplained) - {"StudyConfig.arm"} == set()


def test_a_row_has_type_bounds_default_and_meaning():
    rows = markdown_reference().splitlines()
    assert "| `max_steps` | whole number, ≥ 1 | `100` | updates of the run |" in rows
    assert sum(row.startswith("| `learning_rate` | number, &gt; 0 | `0.0005` |") for row in rows) == 1
    assert sum(row.startswith('| `k` | whole number or `"auto"` | `100` |') for row in rows) == 1
    assert any(row.startswith("| `rocks` | text or list of: whole number | *required* |") for row in rows)
    own = [name for name in RocksSection.model_fields if name not in {"name", *RocksSection.common}]
    table = "\n".join(rows).split('### `policy.name = "rocks"`')[1].split("###")[0]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == own


def test_the_schema_takes_what_the_models_take_and_refuses_what_they_refuse():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name, text in RUNS.items():
        validator.validate(tomllib.loads(text))
        whole = json.loads(json.dumps(parse_config(text, name=name).model_dump(mode="json")))
        validator.validate(whole)
    for block in README.read_text(encoding="utf-8").split("```toml\n")[1:]:
        parse_config(block.split("```")[0], name="README")
        validator.validate(tomllib.loads(block.split("```")[0]))
    good = tomllib.loads(RUNS["pebbles"])
    for bad in (
        {key: value for key, value in good.items() if key != "models"},
        {**good, "lr": 1},
        {**good, "training": {"max_steps": 0}},
        {**good, "task": {"name": "chess"}},
        {**good, "policy": {"name": "tip", "lam": 0.5}},
    ):
        assert not validator.is_valid(bad)
    steps = schema["$defs"]["TrainingSection"]["properties"]["max_steps"]
    assert (steps["description"], steps["default"], steps["minimum"]) == ("updates of the run", 100, 1)
