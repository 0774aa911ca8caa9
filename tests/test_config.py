"""A config is read strictly, overridden exactly, and written so that it reads back the same."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from rocktokens.config import (
    Config,
    EvaluationSection,
    GradientsSection,
    HubTask,
    JsonlTask,
    KnockoutSection,
    LoraSection,
    ModelsSection,
    PolicySection,
    RolloutsSection,
    RunSection,
    Section,
    TraceSection,
    TrainingSection,
    WordmathTask,
    apply_overrides,
    dump_config,
    dump_toml,
    evaluation_task,
    load_config,
    parse_config,
    validate,
)
from rocktokens.config.policies import RocksSection, UniformSection
from rocktokens.config.sentences import OTHER_NAMES, dotted_keys
from rocktokens.errors import ConfigError

MINIMAL = '[run]\ndirectory = "runs/a"\n[models]\nstudent = "pebbles-student"\nteacher = "pebbles-teacher"\n'

positive = st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False)
counts = st.integers(1, 2**31)
names = st.text(max_size=20)
tasks = st.one_of(
    st.builds(WordmathTask, split=st.sampled_from(["train", "test"]), max_steps=st.integers(1, 4)),
    st.builds(JsonlTask, name=st.just("jsonl"), path=names, id_field=st.none() | names, limit=st.none() | counts),
    st.builds(HubTask, name=st.just("hub"), path=names, subset=st.none() | names, template=names),
)
policies = st.builds(RocksSection, name=st.just("rocks"), rocks=st.text(min_size=1), lam=positive)
configs = st.builds(
    Config,
    run=st.builds(RunSection, directory=st.text(min_size=1, max_size=20), seed=st.integers(0, 2**63 - 1)),
    models=st.builds(ModelsSection, student=names, teacher=names, dtype=st.sampled_from(["float32", "bfloat16"])),
    task=tasks,
    rollouts=st.builds(RolloutsSection, temperature=positive, batch_size=counts, chat_template=st.booleans()),
    policy=policies,
    lora=st.builds(LoraSection, enabled=st.booleans(), lora_dropout=st.floats(0, 1, exclude_max=True)),
    training=st.builds(
        TrainingSection, learning_rate=positive, report_to=st.lists(st.sampled_from(["trackio", "wandb"]))
    ),
    trace=st.builds(TraceSection, checkpoints=st.lists(names, max_size=3)),
    evaluation=st.builds(EvaluationSection, task=st.none() | tasks, temperature=st.none() | positive),
    knockout=st.builds(
        KnockoutSection,
        top=counts,
        temperature=st.none() | positive,
        alpha=st.floats(0, 1, exclude_min=True, exclude_max=True),
        margin=st.floats(0, 1),
        never=st.integers(0, 2**31),
    ),
    gradients=st.builds(GradientsSection, batches=counts, sketch_width=st.none() | counts, memory=counts),
)


# Round trip


@given(configs)
def test_a_dumped_config_parses_to_itself(config):
    text = dump_config(config)
    assert parse_config(text) == config
    assert dump_config(parse_config(text)) == text


def test_every_default_is_written_out():
    text = dump_config(parse_config(MINIMAL))
    assert "seed = 0" in text
    assert "[evaluation]" in text
    assert "learning_rate = 0.0005" in text


def test_a_file_reads_like_its_text(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    assert load_config(path, ["run.seed=3"]) == parse_config(MINIMAL, ["run.seed=3"])


keys = st.text(max_size=8)
values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(keys, values, max_size=5))
def test_a_dumped_record_reads_back(record):
    assert tomllib.loads(dump_toml(record)) == record


@pytest.mark.parametrize("name", ['name = "uniform"\n', ""])
def test_a_config_written_before_policies_had_keys_of_their_own_still_loads(name):
    """`dump_config` used to write the keys of all policies under every one."""
    written = dump_config(parse_config(MINIMAL))
    new = '[policy]\nname = "uniform"\ndenominator = "all"\n'
    assert new in written
    old = written.replace(new, f'[policy]\n{name}lam = 0.0\ndenominator = "all"\n')
    assert parse_config(old) == parse_config(written)
    assert dump_config(parse_config(old)) == written
    assert parse_config(old, ["policy.name=tip"]).policy.name == "tip"
    with pytest.raises(ConfigError, match=r"policy\.lam is not a known key"):
        parse_config(old, ["policy.lam=0.5"])


# Other files than a run's


class Arm(Section):
    name: str
    policy: PolicySection = UniformSection()


class Plan(Section):
    arm: list[Arm] = Field(min_length=1)
    base: LoraSection = LoraSection()

    @model_validator(mode="after")
    def _names_differ(self):
        if len({arm.name for arm in self.arm}) < len(self.arm):
            raise ValueError("two arms have one name: give each its own")
        return self


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({}, "arm is missing: set it in the file"),
        ({"arm": [{}]}, "arm[0].name is missing: set it in the file"),
        ({"arm": [{"name": "a", "polcy": {}}]}, "arm[0].polcy is not a known key: did you mean arm[0].policy?"),
        (
            {"arm": [{"name": "a"}, {"name": "b", "policy": {"name": "tip", "roh": 1}}]},
            "arm[1].policy.roh is not a known key: did you mean arm[1].policy.rho?",
        ),
        (
            {"arm": [{"name": "a", "policy": {"rho": 1}}]},
            "arm[0].policy.rho is not a known key of policy uniform",
        ),
        (
            {"arm": [{"name": "a", "policy": "tip"}]},
            "arm[0].policy = 'tip' is not valid: Input should be a valid dictionary or object to extract fields from",
        ),
        ({"arm": [{"name": "a"}], "basis": {}}, "basis is not a known key: did you mean base?"),
        ({"arm": [{"name": "a"}], "base": {"zz": 1}}, "base.zz is not a known key"),
        ({"arm": [{"name": "a"}], "lora_alfa": 1}, "lora_alfa is not a known key: did you mean base.lora_alpha?"),
        ({"arm": [{"name": "a"}] * 2}, "two arms have one name: give each its own"),
    ],
)
def test_other_models_are_refused_in_the_same_words(record, sentence):
    with pytest.raises(ConfigError) as caught:
        validate(Plan, record, "study.toml")
    assert str(caught.value) == f"study.toml: {sentence}"


def test_overrides_reach_any_record():
    record = {"base": {"policy": {"name": "tip", "rho": 0.1, "protect": "x"}, "task": {"split": "test"}}}
    apply_overrides(
        record, ["base.policy.fraction=0.5", 'base.policy.name="prefix"', "base.task.name=wordmath", "a.b.c=1"]
    )
    assert record == {
        "base": {
            "policy": {"name": "prefix", "fraction": 0.5, "protect": "x"},
            "task": {"split": "test", "name": "wordmath"},
        },
        "a": {"b": {"c": 1}},
    }


def test_a_long_value_is_cut_short():
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL, [f"run.seed={'x' * 500}"])
    assert len(str(caught.value)) < 250 and "xxx…" in str(caught.value)


# What evaluation runs on


def test_accuracy_of_word_problems_is_measured_on_their_test_split():
    config = parse_config(MINIMAL, ["task.max_steps=2"])
    assert config.evaluation.task is None
    assert evaluation_task(config) == WordmathTask(split="test", max_steps=2)


def test_other_tasks_need_one_to_evaluate_on():
    jsonl = ["task.name=jsonl", "task.path=train"]
    with pytest.raises(ConfigError, match=r"evaluation\.task is not set, and the run's task is jsonl: set \[eval"):
        evaluation_task(parse_config(MINIMAL, jsonl))
    config = parse_config(MINIMAL, [*jsonl, "evaluation.task.name=jsonl", "evaluation.task.path=test"])
    assert evaluation_task(config) == JsonlTask(name="jsonl", path="test")


# Overrides


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("run.seed=7", "run", "seed", 7),
        ("run.directory=runs/b", "run", "directory", "runs/b"),
        ('run.directory="runs/b"', "run", "directory", "runs/b"),
        ("run.directory=a=b#c", "run", "directory", "a=b#c"),
        (" training.learning_rate = 1e-4 ", "training", "learning_rate", 1e-4),
        ("training.bf16=false", "training", "bf16", False),
        ("training.shard=true", "training", "shard", True),
        ('trace.checkpoints=["x", "y"]', "trace", "checkpoints", ["x", "y"]),
        ("task.max_steps=2", "task", "max_steps", 2),
    ],
)
def test_an_override_sets_one_key_and_no_other(override, section, key, value):
    base, changed = parse_config(MINIMAL).model_dump(), parse_config(MINIMAL, [override]).model_dump()
    assert changed[section][key] == value
    base[section][key] = value
    assert changed == base


@pytest.mark.parametrize("value", ["maybe", "1", "0.5", "[]"])
def test_a_switch_with_auto_takes_nothing_else(value):
    with pytest.raises(ConfigError, match=r"training\.shard = .* is not valid: .*give true, false or auto"):
        parse_config(MINIMAL, [f"training.shard={value}"])


def test_later_overrides_win_and_reach_nested_sections():
    config = parse_config(MINIMAL, ["run.seed=1", "run.seed=2", "evaluation.task.name=jsonl", "evaluation.task.path=x"])
    assert config.run.seed == 2
    assert isinstance(config.evaluation.task, JsonlTask)
    assert config.evaluation.task.path == "x"


def test_another_task_takes_the_place_of_the_one_in_the_file():
    """A run's own config has every default written out; the keys of its task are not those of another one."""
    written = dump_config(parse_config(MINIMAL, ["evaluation.task.split=test"]))
    chosen = ["evaluation.task.path=x", "evaluation.task.name=jsonl"]
    for overrides in (chosen, chosen[::-1]):
        assert parse_config(written, overrides).evaluation.task == JsonlTask(name="jsonl", path="x")
    same = parse_config(written, ["evaluation.task.name=wordmath", "evaluation.task.max_steps=2"]).evaluation.task
    assert same == WordmathTask(split="test", max_steps=2)
    with pytest.raises(ConfigError, match=r"evaluation\.task\.split is not a known key of task jsonl$"):
        parse_config(written, [*chosen, "evaluation.task.split=test"])


@pytest.mark.parametrize("override", ["run.seed", "seed=1", "run..seed=1", ".seed=1", "=1"])
def test_a_malformed_override_is_refused(override):
    with pytest.raises(ConfigError, match=r"is not of the form section\.key=value"):
        parse_config(MINIMAL, [override])


def test_an_override_below_a_value_is_refused():
    with pytest.raises(ConfigError, match="'seed' is a value, not a section"):
        parse_config(MINIMAL, ["run.seed=1", "run.seed.deep=2"])


# Refusals


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["training.learning_rat=1"], "training.learning_rat is not a known key: did you mean training.learning_rate?"),
        (["traning.max_steps=1"], "traning is not a known key: did you mean training?"),
        (["run.learning_rate=1"], "run.learning_rate is not a known key: did you mean training.learning_rate?"),
        (["task.max_step=1"], "task.max_step is not a known key: did you mean task.max_steps?"),
        (["evaluation.task.splits=x"], "did you mean evaluation.task.split?"),
        (["training.lr=1"], "training.lr is not a known key: did you mean training.learning_rate?"),
        (["run.lr=1"], "run.lr is not a known key: did you mean training.learning_rate?"),
        (["training.batch_size=1"], "did you mean training.per_device_train_batch_size?"),
        (["run.batch_size=1"], "did you mean rollouts.batch_size or training.per_device_train_batch_size?"),
        (["rollouts.max_new_tokens=1"], "did you mean rollouts.max_completion_length?"),
        (["training.max_length=1"], "did you mean rollouts.max_completion_length?"),
        (["training.steps=1"], "did you mean training.max_steps?"),
        (["training.epochs=1"], "did you mean training.num_train_epochs?"),
        (["rollouts.num_samples=1"], "did you mean rollouts.num_generations?"),
        (["find.num_samples=1"], "rollouts.num_generations"),
        (["model.student=a"], "model is not a known key: did you mean models?"),
        (["models.student_model=a"], "did you mean models.student?"),
        (["scoring.beta=1"], "did you mean scoring.divergence?"),
        (["training.KL=1"], "did you mean scoring.divergence?"),
        (["training.top_k=1"], "training.top_k is not a known key: did you mean teacher.top_k or trace.top_k?"),
        (["find.num_prompts=1"], "evaluation.num_prompts, knockout.num_prompts or trace.num_prompts?"),
        (["run.zzzzqqqq=1"], "run.zzzzqqqq is not a known key"),
        (["run.seed=-1"], "run.seed = -1 is not valid: Input should be greater than or equal to 0"),
        (["rollouts.temperature=hot"], "rollouts.temperature = 'hot' is not valid"),
        (["models.dtype=int8"], "models.dtype = 'int8' is not valid"),
        (["task.name=chess"], "task.name = 'chess' is not a task: use one of hub, jsonl, wordmath"),
        (["task.name=jsonl"], "task.path is missing: set it in the file or with --set task.path=…"),
        (["policy.name=rocks"], "policy.rocks is missing: set it in the file or with --set policy.rocks=…"),
        (["knockout.tops=3"], "knockout.tops is not a known key: did you mean knockout.top?"),
        (["knockout.alpha=0"], "knockout.alpha = 0 is not valid"),
        (["knockout.alpha=1"], "knockout.alpha = 1 is not valid"),
        (["knockout.margin=1.5"], "knockout.margin = 1.5 is not valid"),
        (["knockout.matched=-1"], "knockout.matched = -1 is not valid"),
        (["training.learning_rate=inf"], "training.learning_rate = inf is not valid"),
        (["training.learning_rate=nan"], "training.learning_rate = nan is not valid"),
    ],
)
def test_mistakes_are_one_sentence_that_names_field_value_and_remedy(overrides, sentence):
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL, overrides, name="run.toml")
    message = str(caught.value)
    assert message.startswith("run.toml: ")
    assert sentence in message
    assert "\n" not in message


def test_a_config_without_a_run_names_the_key_to_set():
    with pytest.raises(
        ConfigError, match=r"run\.directory is missing: set it in the file or with --set run\.directory=…"
    ):
        parse_config("")


@pytest.mark.parametrize("models", ["", '[models]\ndevice = "cpu"\n', '[models]\nteacher = "a"\n'])
def test_a_config_without_models_names_the_command_that_writes_one(models):
    with pytest.raises(ConfigError, match=r"models\.student is missing: set it .*or run `rocktokens init`"):
        parse_config(f'[run]\ndirectory = "runs/a"\n{models}')


def test_the_student_is_the_first_of_the_checkpoints_where_these_are_listed():
    text = '[run]\ndirectory = "runs/a"\n[models]\nteacher = "t"\n[trace]\ncheckpoints = ["one", "two"]\n'
    assert parse_config(text).models.student == "one"
    assert parse_config(text, ["models.student=own"]).models.student == "own"
    with pytest.raises(ConfigError, match=r"models\.student is missing"):
        parse_config(text, ["trace.checkpoints=[]"])


def test_other_names_are_of_keys_that_exist():
    known = set(dotted_keys(Config))
    assert set(OTHER_NAMES) <= known


def test_broken_toml_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
        parse_config("[run", name="run.toml")
    with pytest.raises(ConfigError, match="does not exist: give the path of a TOML file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"is a folder: give the path of a TOML file$"):
        load_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "latin.toml")


def test_a_config_cannot_be_changed_after_reading():
    config = parse_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 1


def test_a_key_that_was_removed_is_left_out_of_files_and_refused_as_an_override(tmp_path):
    text = dump_config(parse_config(MINIMAL))
    before = text.replace("[knockout]\n", "[knockout]\nresamples = 10000\n")
    assert before != text
    (tmp_path / "config.toml").write_text(before)
    assert dump_config(load_config(tmp_path / "config.toml")) == text
    with pytest.raises(ConfigError, match=r"knockout\.resamples is not a known key"):
        load_config(tmp_path / "config.toml", ["knockout.resamples=100"])


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[" * 5000 + "]" * 5000, "it is nested too deep"),
        ("9" * 6000, "it has a number of more digits than can be read"),
    ],
)
def test_toml_that_no_parser_takes_is_one_sentence(tmp_path, value, problem):
    path = tmp_path / "run.toml"
    path.write_text(f"{MINIMAL}\n[task]\nseed = {value}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"run\.toml is not valid TOML: {problem}"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"run\.seed"):
        parse_config(MINIMAL, [f"run.seed={value}"])
