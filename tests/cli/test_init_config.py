"""``init`` writes a config that ``check`` passes, and never over another file; ``config`` shows what will be used."""

import json
import tomllib
from pathlib import Path

from command_line import changed, refuse, succeed

from rocktokens.config import load_config
from rocktokens.config.reference import json_schema
from rocktokens.models.load import load_model
from rocktokens.preflight.static_checks import check_static, sample_prompts
from rocktokens.tasks import make_task


def static_levels(path: Path) -> dict[str, str]:
    """What the static part of ``check`` says of a config, by name."""
    config = load_config(path, [f"run.directory={path.parent / 'run'}"])
    student, teacher = (load_model(name, device="cpu") for name in (config.models.student, config.models.teacher))
    task = make_task(config.task)
    _, lengths = sample_prompts(config, task, student.tokenizer)
    return {own.name: own.level for own in check_static(config, task, lengths, student, teacher)}


def test_the_config_of_the_embedded_pair_passes_the_static_checks(tmp_path: Path):
    path = tmp_path / "first.toml"
    next_steps = f"next: rocktokens check {path}, then rocktokens run {path}"
    assert next_steps in succeed("init", path).stdout.replace("\n", " ")
    assert set(static_levels(path).values()) == {"ok"}
    config = load_config(path)
    assert (config.models.student, config.run.directory) == ("pebbles-student", "runs/first")
    assert path.read_text(encoding="utf-8").count("#") > 20, "values without reasons"


def test_a_config_for_data_passes_the_static_checks(tmp_path: Path):
    prompts = make_task(load_config("pebbles").task).prompts(40, seed=1)
    records = [{"problem": prompt.text, "answer": prompt.answer} for prompt in prompts]
    data, path = tmp_path / "train.jsonl", tmp_path / "run.toml"
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    pair = ("--student", "pebbles-student", "--teacher", "pebbles-teacher", "--data", data)
    record = succeed("init", path, *pair, "--json").record
    assert record == {"file": str(path), "text": path.read_text(encoding="utf-8")}
    assert set(static_levels(path).values()) == {"ok"}
    assert load_config(path).trace.num_prompts == 40


def test_a_file_that_exists_is_replaced_only_by_force(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("mine", encoding="utf-8")
    refuse("init", path, naming=(str(path), "exists", "--force"))
    assert path.read_text(encoding="utf-8") == "mine"
    succeed("init", path, "--force")
    assert load_config(path).models.teacher == "pebbles-teacher"


def test_what_init_cannot_use_is_refused_and_nothing_is_written(tmp_path: Path):
    path = tmp_path / "run.toml"
    refuse("init", path, "--student", "a", naming=("--student", "without --teacher"))
    refuse("init", path, "--teacher", "a", naming=("--teacher", "without --student"))
    refuse("init", path, "--data", "d.jsonl", naming=("--data d.jsonl", "--student"))
    refuse("init", path, "--student", "no/model", "--teacher", "no/model", naming=("'no/model'", "config.json"))
    pair = ("--student", "pebbles-student", "--teacher", "pebbles-teacher")
    refuse("init", path, *pair, "--data", tmp_path / "none.jsonl", naming=("none.jsonl", "does not exist"))
    student = ("--student", tmp_path, "--teacher", "pebbles-teacher")
    refuse("init", path, *student, naming=(f"'{tmp_path}' is a folder without a config.json", "a saved model"))
    refuse("init", tmp_path / "no" / "run.toml", naming=("cannot be written", "no such file"))
    assert list(tmp_path.iterdir()) == []


def test_config_shows_what_will_be_used():
    shown = succeed("config", "pebbles", "--show", *changed("run.seed=7", "training.learning_rate=1e-3")).stdout
    expected = load_config("pebbles", ["run.seed=7", "training.learning_rate=1e-3"])
    assert tomllib.loads(shown) == expected.model_dump(mode="json", exclude_none=True)
    assert "adam_beta2 = 0.99" in shown
    assert succeed("config", "pebbles", "--show", "--json").record == load_config("pebbles").model_dump(mode="json")


def test_config_prints_the_schema_and_the_reference():
    assert succeed("config", "--schema").record == json_schema()
    page = succeed("config", "--reference").stdout
    assert page == succeed("config", "--reference", "--json").record["text"]
    assert "## `[knockout]`" in page and "## `[[arm]]`" in page


def test_config_wants_one_thing():
    refuse("config", naming=("--reference", "--schema", "--show"))
    refuse("config", "--reference", "--schema", naming=("one thing",))
    refuse("config", "--show", naming=("--show and a file",))
    refuse("config", "pebbles", "--schema", naming=("--show and a file",))
    refuse("config", "--reference", *changed("run.seed=7"), naming=("--set run.seed=7", "--show"))


def test_a_run_without_models_ends_with_one_sentence_that_names_init(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\ndirectory = "{tmp_path / "run"}"\n', encoding="utf-8")
    for verb in ("run", "distill", "check"):
        refuse(verb, path, naming=("models.student is missing", "`rocktokens init`"))
    assert not (tmp_path / "run").exists()
