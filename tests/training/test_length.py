"""A run gets another length, or is counted in epochs: what is the same as a run of that length, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from test_distill import distill_until, hashes, log_records, training_trace
from tiny_pair import tiny_config

from rocktokens.config import Config, TrainingSection, dump_config, load_config, parse_config
from rocktokens.errors import ConfigError, RunDirError
from rocktokens.progress import Silent
from rocktokens.run_dir import OPTIMIZER_FILE, RunDir
from rocktokens.tasks.wordmath import Wordmath
from rocktokens.training import length
from rocktokens.training.length import in_steps, recorded_steps
from rocktokens.training.loop import distill
from rocktokens.training.optim import learning_rates

CONSTANT = "training.lr_scheduler_type=constant"
TRAINED = ("checkpoints/", "rollouts/", "traces/")
TIMES = ("seconds_", "share_", "tokens_per_second", "rollouts_reused")


class Notes(Silent):
    """Keeps the lines that stay on the terminal."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def losses(run: RunDir) -> list[dict]:
    """The log without what depends on the clock."""
    return [{key: own for key, own in line.items() if not key.startswith(TIMES)} for line in log_records(run)]


def steps(count: int) -> str:
    return f"training.max_steps={count}"


def config_of(pair: Path, run: Path, count: int, *overrides: str) -> Config:
    return tiny_config(pair, run, steps(count), CONSTANT, *overrides)


@pytest.fixture(scope="module")
def short(pair, tmp_path_factory) -> Path:
    """Four steps at a constant rate, finished."""
    path = tmp_path_factory.mktemp("short") / "run"
    distill(config_of(pair, path, 4))
    return path


@pytest.fixture(scope="module")
def long(pair, tmp_path_factory) -> RunDir:
    """Eight of them."""
    path = tmp_path_factory.mktemp("long") / "run"
    distill(config_of(pair, path, 8))
    return RunDir(path)


@pytest.fixture
def copy(short: Path, tmp_path: Path) -> Path:
    return shutil.copytree(short, tmp_path / "run")


def test_an_extended_run_is_the_longer_run_byte_for_byte(pair, copy, long):
    config, notes = config_of(pair, copy, 8), Notes()
    result = distill(config, resume=True, progress=notes)
    run = RunDir(copy)
    assert (result.steps, result.already_complete) == (8, False)
    assert hashes(run, *TRAINED) == hashes(long, *TRAINED) and losses(run) == losses(long)
    assert load_config(run.config, [f"run.directory={copy}"]) == config
    assert run.manifest()["lengths"] == {"4": {"from": 4, "to": 8}} and "lengths" not in long.manifest()
    assert run.manifest()["max_steps"] == 8
    assert notes.lines[0] == (
        "goes on at step 4, to 8 steps instead of 4: the result is that of a run of 8 steps from the start"
    )
    assert distill(config, resume=True).already_complete


def test_a_run_that_ended_between_two_checkpoints_keeps_that_one_too(pair, tmp_path, long):
    distill(config_of(pair, tmp_path / "run", 3))
    distill(config_of(pair, tmp_path / "run", 8), resume=True)
    run = RunDir(tmp_path / "run")
    assert run.checkpoints() == [0, 2, 3, 4, 6, 8]
    for step in long.checkpoints():
        own, other = (hashes(each, f"checkpoints/step-{step}/") for each in (run, long))
        differing = {Path(path).name for path in own if own[path] != other[path]}
        assert differing <= {"trainer_state.json"}, "which counts the parts of the trace, one more here"
    assert hashes(run, "rollouts/") == hashes(long, "rollouts/") and losses(run) == losses(long)
    assert training_trace(run).equals(training_trace(long))


def test_what_ends_an_extension_is_continued_like_anything_else(pair, copy, long, monkeypatch):
    """Before the manifest knows of the new length, then between two checkpoints."""
    config, noted = config_of(pair, copy, 8), length.RunDir.update_manifest

    def killed(run: RunDir, **changes: object) -> None:
        if "lengths" in changes:
            raise KeyboardInterrupt
        noted(run, **changes)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunDir, "update_manifest", killed)
        distill(config, resume=True)
    distill_until(config, 5, resume=True)
    run = RunDir(copy)
    assert run.checkpoints()[-1] == 4
    distill(config, resume=True)
    assert hashes(run, *TRAINED) == hashes(long, *TRAINED) and losses(run) == losses(long)
    assert run.manifest()["lengths"] == {"4": {"from": 4, "to": 8}}


def test_a_decaying_schedule_goes_on_as_that_of_the_new_length(pair, tmp_path):
    """Not the rate that the shorter one had reached, which is 0: then the first update would be lost."""
    path, notes = tmp_path / "run", Notes()
    distill(tiny_config(pair, path, steps(4)))
    longer = tiny_config(pair, path, steps(8))
    distill(longer, resume=True, progress=notes)
    rates = [line["learning_rate"] for line in log_records(RunDir(path))]
    short_rates, long_rates = (learning_rates(TrainingSection(learning_rate=0.01, warmup_steps=2, max_steps=count), 8)
                               for count in (4, 8))  # fmt: skip
    assert rates == short_rates[:4] + long_rates[4:] and short_rates[4] == 0 < long_rates[4]
    assert "the learning rate follows the cosine schedule of 8 steps from here on (0.0061 now), so" in notes.lines[0]
    assert "not that of a run of 8 steps from the start" in notes.lines[0]


def test_within_the_warm_up_every_schedule_is_the_same(pair, tmp_path):
    warm = ("training.warmup_steps=4", "training.save_steps=2")
    distill(tiny_config(pair, tmp_path / "run", steps(2), *warm))
    notes = Notes()
    distill(tiny_config(pair, tmp_path / "run", steps(4), *warm), resume=True, progress=notes)
    distill(tiny_config(pair, tmp_path / "whole", steps(4), *warm))
    assert hashes(RunDir(tmp_path / "run"), *TRAINED) == hashes(RunDir(tmp_path / "whole"), *TRAINED)
    assert notes.lines[0].endswith("the result is that of a run of 4 steps from the start")


def test_an_interrupted_run_may_become_longer_and_its_later_rollouts_are_sampled_again(pair, tmp_path):
    """Under another schedule the students that wrote them are others."""
    path = tmp_path / "run"
    distill_until(tiny_config(pair, path, steps(6)), 4)  # step 2 is saved, and rollouts of steps 2 and 3 are stored
    kept = shutil.copytree(path, tmp_path / "kept")
    distill(tiny_config(pair, path, steps(12)), resume=True)
    run = RunDir(path)
    assert not any("rollouts_reused" in line for line in log_records(run))
    before, after = (hashes(each, "rollouts/training/step-2.", "rollouts/training/step-3.")
                     for each in (RunDir(kept), run))  # fmt: skip
    assert [before[path] == after[path] for path in sorted(before)] == [True, False]


@pytest.mark.parametrize("count", [4, 6])
def test_a_run_may_end_earlier_but_not_before_it_is(pair, tmp_path, long, count):
    path = tmp_path / "run"
    distill_until(config_of(pair, path, 8), 5)
    with pytest.raises(ConfigError, match=r"training.max_steps = 3, but the run has made 4 steps: ask for at least"):
        distill(config_of(pair, path, 3), resume=True)
    result = distill(config_of(pair, path, count), resume=True)
    assert (result.steps, result.already_complete) == (count, count == 4)
    whole = hashes(long, *(f"rollouts/training/step-{step}." for step in range(count)))
    assert hashes(RunDir(path), "rollouts/") == whole
    assert losses(RunDir(path)) == losses(long)[:count] and recorded_steps(RunDir(path)) == count
    assert training_trace(RunDir(path)).policy_step.max() == count - 1


def test_a_run_of_an_earlier_version_has_its_length_in_the_config_alone(pair, copy, long):
    run = RunDir(copy)
    manifest = run.manifest()
    del manifest["max_steps"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert distill(config_of(pair, copy, 4), resume=True).already_complete and run.manifest() == manifest
    distill(config_of(pair, copy, 8), resume=True)
    assert hashes(run, *TRAINED) == hashes(long, *TRAINED)


def test_a_run_without_its_optimizer_cannot_go_on(pair, copy):
    run = RunDir(copy)
    run.drop([f"checkpoints/step-4/{OPTIMIZER_FILE}"])
    before = run.manifest()
    with pytest.raises(RunDirError, match=r"step-4 has no optimizer.safetensors, which finished runs of a study drop"):
        distill(config_of(pair, copy, 8), resume=True)
    assert run.manifest() == before and distill(config_of(pair, copy, 4), resume=True).already_complete


# Epochs: the task has 40 prompts, a step four of them


def in_epochs(pair: Path, run: Path, epochs: float, *overrides: str) -> Config:
    return tiny_config(pair, run, f"training.num_train_epochs={epochs}", CONSTANT, *overrides)


def test_epochs_are_the_steps_they_come_to(pair, tmp_path, long):
    """0.8 epochs of 40 prompts, four a step; extended from 0.4, and written down as epochs."""
    path, notes = tmp_path / "run", Notes()
    distill(in_epochs(pair, path, 0.4))
    config = in_epochs(pair, path, 0.8)
    distill(config, resume=True, progress=notes)
    run = RunDir(path)
    assert hashes(run, *TRAINED) == hashes(long, *TRAINED) and losses(run) == losses(long)
    assert load_config(run.config) == config and "max_steps" not in run.config.read_text()
    assert run.manifest()["max_steps"] == 8
    assert [line["epoch"] for line in log_records(run)] == pytest.approx([0.1 * (step + 1) for step in range(8)])
    assert any(line.startswith("step 6 (epoch 0.60): kl ") for line in notes.lines)
    with pytest.raises(ConfigError, match=r"training.num_train_epochs = 0.5 \(5 steps\), but the run has made 8 steps"):
        distill(in_epochs(pair, path, 0.5), resume=True)


def test_an_epoch_is_every_prompt_once(pair, tmp_path):
    """Forty prompts, eight a step: five steps, and with a step of 12 prompts four, the last of which begins again."""
    config = in_steps(in_epochs(pair, tmp_path, 1), task := _task(pair), 8)
    ids = [prompt.id for step in range(config.training.max_steps) for prompt in task.batch(step, 8, seed=3)]
    assert sorted(ids) == sorted(prompt.id for prompt in task.items)
    assert in_steps(in_epochs(pair, tmp_path, 1), task, 12).training.max_steps == 4


@pytest.mark.parametrize(
    ("epochs", "per_step", "expected"),
    [(1.1, 1, 44), (1.1, 4, 11), (0.7, 4, 7), (2, 40, 2), (2, 41, 2), (2, 39, 3), (0.001, 4, 1), (3, 7, 18)],
)
def test_steps_of_an_epoch_are_counted_as_written(pair, tmp_path, epochs, per_step, expected):
    """In floats 1.1 × 40 is 44.000000000000007, and the ceiling 45."""
    assert in_steps(in_epochs(pair, tmp_path, epochs), _task(pair), per_step).training.max_steps == expected


def test_endless_prompts_have_no_epochs(pair, tmp_path):
    with pytest.raises(ConfigError, match=r"num_train_epochs = 2.0, but task.name = 'wordmath' makes prompts without"):
        in_steps(in_epochs(pair, tmp_path, 2), Wordmath(), 4)


def test_one_length_per_config(pair, tmp_path):
    text = dump_config(in_epochs(pair, tmp_path, 2))
    with pytest.raises(ConfigError, match=r"max_steps = 7 and num_train_epochs = 2.0 are two lengths of one run"):
        parse_config(text.replace("num_train_epochs", "max_steps = 7\nnum_train_epochs"))
    assert parse_config(text, [steps(7)]).training.num_train_epochs is None
    again = parse_config(dump_config(parse_config(text, [steps(7)])), ["training.num_train_epochs=2"])
    assert dump_config(again) == text
    for nonsense in ("0", "-1", "nan", "many"):
        with pytest.raises(ConfigError, match=f"training.num_train_epochs = .*{nonsense}.* is not valid"):
            parse_config(text, [f"training.num_train_epochs={nonsense}"])


def _task(pair: Path):
    from rocktokens.config import JsonlTask
    from rocktokens.tasks.jsonl import load_jsonl

    return load_jsonl(JsonlTask(name="jsonl", path=str(pair / "task.jsonl")))
