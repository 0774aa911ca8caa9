"""Configuration files: TOML in and out, overrides by ``--set section.key=value``.

1. A file is read into a record, without keys that have since been removed, so that runs made before can be opened. An
   override replaces one value of it.
2. An override that chooses the task or the policy comes first, in whatever order they are given, and takes away the
   keys of the one that was there. One that gives the length of training takes the place of the length that was there,
   in steps or in epochs.
3. The record is validated (rocktokens.config.sentences).
"""

import json
import re
from pathlib import Path
from typing import Any

import tomli_w

from rocktokens.config.policies import PolicyBase
from rocktokens.config.sections import Config
from rocktokens.config.sentences import validate
from rocktokens.errors import ConfigError
from rocktokens.parsing import parse_toml
from rocktokens.recipes import recipes
from rocktokens.run_dir import RunDir, as_listed

_CHOICE = re.compile(r"\s*(?:\w+\.)*(task|policy)\.name\s*=")
_DEFAULT_NAMES = {"task": "wordmath", "policy": "uniform"}
_REMOVED = (("knockout", "resamples"),)
"""Keys that earlier versions wrote into every run: left out of a file, unknown to ``--set``."""
_LENGTHS = {"max_steps": "num_train_epochs", "num_train_epochs": "max_steps"}
"""The two keys for the length of training, each with the other."""


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file, apply ``section.key=value`` overrides, and validate."""
    return _config(read_toml(path), overrides, name=str(path))


def run_config(run: RunDir, overrides: list[str] | None = None) -> Config:
    """Return the config a run was started with, overrides applied, pointing at where the run lies now."""
    path = run.require().verified(run.config.name)
    return load_config(path, [*(overrides or []), f"run.directory={json.dumps(str(run.path))}"])


def has_config(run: RunDir) -> bool:
    """Whether a run comes with a config, sound or not (``run_config`` tells); a folder of traces alone does not."""
    return run.config.exists() or run.lists(run.config.name)


def parse_config(text: str, overrides: list[str] | None = None, name: str = "config") -> Config:
    """Validate TOML text; ``name`` is what error messages call it."""
    return _config(_parse_toml(text, name), overrides, name)


def dump_config(config: Config) -> str:
    """Write the config as TOML with every default; ``parse_config`` gives the same config back."""
    return dump_toml(config.model_dump(mode="json", exclude_none=True))


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the record in a TOML file, or in the recipe of that name where there is no such file."""
    path = Path(path)
    try:
        text = as_listed(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        recipe = recipes().get(str(path))
        if recipe is None:
            raise ConfigError(
                f"config file {path} does not exist: give the path of a TOML file, or a name that `rocktokens recipes` "
                "lists"
            ) from None
        text = recipe.text
    except IsADirectoryError:
        run = " (that of a run is its config.toml)" if RunDir(path).exists() else ""
        raise ConfigError(f"config file {path} is a folder: give the path of a TOML file{run}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read ({error}): give the path of a TOML file") from None
    return _parse_toml(text, str(path))


def apply_overrides(record: dict[str, Any], overrides: list[str]) -> None:
    """Set ``section.key=value`` in a record; of two for one key the later wins."""
    for override in sorted(overrides, key=lambda override: not _CHOICE.match(override)):
        _apply_override(record, override)


def dump_toml(record: dict[str, Any]) -> str:
    """Write a record without None as TOML; reading it gives the same record back."""
    return tomli_w.dumps(record)


def _config(record: dict[str, Any], overrides: list[str] | None, name: str) -> Config:
    if "study" in record:
        raise ConfigError(f"{name} has a [study], which no single run has: use `rocktokens study`")
    forget_removed(record)
    apply_overrides(record, overrides or [])
    return validate(Config, record, name)


def forget_removed(record: dict[str, Any]) -> None:
    """Take the keys out of a record that only earlier versions had."""
    for section, key in _REMOVED:
        if isinstance(table := record.get(section), dict):
            table.pop(key, None)


def _parse_toml(text: str, name: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None


def _apply_override(record: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    path, value = key.strip().split("."), _toml_value(text.strip())
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(f"--set {override!r} is not of the form section.key=value, for example run.seed=1")
    table = record
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override!r}: {part!r} is a value, not a section")
    choice = _CHOICE.match(override)
    if choice and table.get("name", _DEFAULT_NAMES[choice.group(1)]) != value:
        # Take away the keys of the task or policy that stood there.
        for key in table.keys() - (PolicyBase.common if choice.group(1) == "policy" else ()):
            del table[key]
    if path[-2] == "training":
        table.pop(_LENGTHS.get(path[-1], ""), None)
    table[path[-1]] = value


def _toml_value(text: str) -> Any:
    """Parse a TOML literal, or take the bare text: ``--set run.directory=runs/a`` needs no quotes."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text
