"""Files of a policy count by their content at a resume, wherever they lie; without a record of it, by their path."""

from pathlib import Path

import pytest

from rocktokens.config import Config, dump_config, parse_config
from rocktokens.config.policies import files_of
from rocktokens.errors import ConfigError
from rocktokens.run_dir import RunDir, file_sha256
from rocktokens.training.checkpoint import POLICY_FILES, open_run

POLICY = """
[models]
student = "pebbles-student"
teacher = "pebbles-teacher"
[policy]
name = "product"
protect = "{folder}/pillars.json"
policies = [{{ name = "rocks", rocks = "{folder}/rocks.json" }}, {{ name = "random_positions", rho = {rho} }}]
"""


def run_config(folder: Path, run: RunDir, rho: float = 0.5) -> Config:
    return parse_config(f'[run]\ndirectory = "{run.path}"\n' + POLICY.format(folder=folder, rho=rho))


@pytest.fixture
def began(tmp_path: Path) -> RunDir:
    """A run that was started with files in ``old``; the same files lie in ``new`` now."""
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        for name in ("rocks.json", "pillars.json"):
            (tmp_path / folder / name).write_text(name)
    run = RunDir(tmp_path / "run")
    config = run_config(tmp_path / "old", run)
    run.commit_text(run.config.name, dump_config(config))
    run.update_manifest(
        **{POLICY_FILES: {key: file_sha256(Path(path)) for key, path in files_of(config.policy).items()}}
    )
    return run


def test_files_may_have_moved(began: RunDir, tmp_path: Path):
    assert open_run(began, run_config(tmp_path / "new", began), 1, resume=True) is None


def test_another_content_is_refused_however_deep(began: RunDir, tmp_path: Path):
    (tmp_path / "new/rocks.json").write_text("others")
    with pytest.raises(ConfigError, match=r"policy\.policies\[0\]\.rocks = '.*/new/rocks\.json' is another file"):
        open_run(began, run_config(tmp_path / "new", began), 1, resume=True)


def test_what_is_no_file_is_still_compared(began: RunDir, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"policy\.policies = .*0\.25"):
        open_run(began, run_config(tmp_path / "new", began, rho=0.25), 1, resume=True)


def test_a_run_without_a_record_of_its_files_knows_them_by_path(began: RunDir, tmp_path: Path):
    bare = RunDir(tmp_path / "bare")
    bare.commit_text(bare.config.name, began.config.read_text())
    with pytest.raises(ConfigError, match=r"policy\.protect = "):
        open_run(bare, run_config(tmp_path / "new", bare), 1, resume=True)
