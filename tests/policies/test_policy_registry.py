"""One list of policies: sections, registry and docs agree, and mistakes read the same wherever they are made."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_oracle import CASES, CONTROLS, EXAMPLE, ROCKS, make, rock_set, weigh

from rocktokens.classes import TokenClasses
from rocktokens.config import Config, PolicySection, RunSection, dump_config, dump_toml, parse_config, validate
from rocktokens.config.policies import Category, files_of
from rocktokens.errors import ConfigError
from rocktokens.policies import POLICIES, make_policy, policy_from_section
from rocktokens.rocks.categories import CATEGORIES
from rocktokens.types import ControlSet, RockSet

SECTIONS = {
    section.model_fields["name"].annotation.__args__[0]: section for section in get_args(get_args(PolicySection)[0])
}
MODELS = {"student": "pebbles-student", "teacher": "pebbles-teacher"}
MINIMAL = '[run]\ndirectory = "runs/a"\n[models]\nstudent = "pebbles-student"\nteacher = "pebbles-teacher"\n'
DOCS = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


def test_every_section_has_a_policy():
    assert list(SECTIONS) == list(POLICIES)
    assert {name: make(name).name for name in CASES} == {name: name for name in CASES}


def test_draws_are_counted_from_0():
    assert make_policy("type_control", controls=CONTROLS, draw=1).control_ids.tolist() == [2, 5]
    with pytest.raises(ConfigError, match=r"policy\.draw = 2 is not valid: the controls have draws 0 to 1"):
        make_policy("type_control", controls=CONTROLS, draw=2)


def test_categories_are_those_that_rocks_have():
    assert get_args(Category) == CATEGORIES


# From TOML and from Python


def as_toml(value, folder: Path):
    """A parameter as a file can hold it: sets become files."""
    if isinstance(value, RockSet | ControlSet | TokenClasses):
        path = folder / f"{type(value).__name__}.json"
        value.save(path)
        return str(path)
    if isinstance(value, list):
        return [as_toml(each, folder) for each in value]
    return {key: as_toml(each, folder) for key, each in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("name", CASES)
def test_a_file_and_a_call_make_the_same_policy(name, tmp_path):
    text = MINIMAL + dump_toml({"policy": {"name": name, **as_toml(CASES[name], tmp_path)}})
    config = parse_config(text)
    assert parse_config(dump_config(config)) == config
    weights = weigh(policy_from_section(config.policy), EXAMPLE)
    assert weights.tobytes() == weigh(make(name), EXAMPLE).tobytes()


shares = st.floats(0, 1, exclude_min=True)
weights = st.floats(0, 1e300)
counts = st.integers(1, 2**40)
paths = st.text(min_size=1, max_size=9)
VALUES = {
    "rocks": paths | st.lists(st.integers(0, 2**40), max_size=4),
    "controls": paths,
    "classes": paths
    | st.lists(st.lists(st.integers(0, 2**40), max_size=3), max_size=3)
    | st.lists(st.lists(paths, min_size=1, max_size=3), min_size=1, max_size=3),
    "untested": st.booleans(),
    "protect": st.none() | paths,
    "denominator": st.sampled_from(["all", "kept"]),
    "categories": st.none() | st.lists(st.sampled_from(CATEGORIES), min_size=1, max_size=3),
    "verdicts": st.none() | st.lists(st.sampled_from(["neutral", "pillar"]), min_size=1),
    "labels": st.none() | st.lists(st.sampled_from(["stuck", "residual", "moved"]), min_size=1),
    "by": st.sampled_from(["kl", "grad_norm"]),
    "window": st.booleans(),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "w_max": st.floats(1, 9),
    "window_steps": st.integers(2, 99),
    "stop": st.none() | counts,
    **dict.fromkeys(["lam", "alpha", "beta"], weights),
    **dict.fromkeys(["rho", "fraction", "probe", "share"], shares),
    **dict.fromkeys(["decay", "min_share", "tolerance"], st.floats(0, 1, exclude_min=True, exclude_max=True)),
    **dict.fromkeys(["n", "k", "draw", "patience", "freeze_windows", "start", "min_freq"], counts),
}


def records(name: str, inner: bool) -> st.SearchStrategy:
    """Tables of a policy's section; those within another have no keys of the whole."""
    section = SECTIONS[name]
    keys = section.model_fields.keys() - {"name", "policies", "steps"} - (section.common if inner else set())
    return st.fixed_dictionaries({"name": st.just(name), **{key: VALUES[key] for key in sorted(keys)}})


simple = [name for name in SECTIONS if name not in ("product", "schedule")]
products = st.fixed_dictionaries(
    {
        "name": st.just("product"),
        "denominator": VALUES["denominator"],
        "policies": st.lists(
            st.sampled_from(simple).flatmap(lambda name: records(name, True)),
            min_size=1,
            max_size=3,
            unique_by=lambda part: part["name"],
        ),
    }
)


@given(st.sampled_from(simple).flatmap(lambda name: records(name, False)) | products)
def test_every_section_is_written_so_that_it_reads_back(record):
    config = Config.model_validate({"run": {"directory": "a"}, "models": MODELS, "policy": record})
    assert parse_config(dump_config(config)) == config


def test_a_schedule_of_a_product_is_written_so_that_it_reads_back():
    inner = {"name": "product", "policies": [{"name": "tip"}, {"name": "prefix", "fraction": 0.5}]}
    policy = {"name": "schedule", "steps": [0, 9], "policies": [inner, {"name": "uniform"}], "protect": "rocks.json"}
    config = Config.model_validate({"run": RunSection(directory="a"), "models": MODELS, "policy": policy})
    assert parse_config(dump_config(config)) == config


# Mistakes


def from_toml(name, params):
    parse_config(MINIMAL + dump_toml({"policy": {"name": name, **params}}), name="here")


@pytest.mark.parametrize(
    ("name", "params", "sentence"),
    [
        ("rock", {}, "policy.name = 'rock' is not a policy: did you mean rocks?"),
        ("zzz", {}, f"policy.name = 'zzz' is not a policy: use one of {', '.join(sorted(POLICIES))}"),
        ("rocks", {"rocks": [1], "lamb": 0}, "policy.lamb is not a known key: did you mean policy.lam?"),
        ("prefix", {"fracton": 0.5}, "policy.fracton is not a known key: did you mean policy.fraction?"),
        ("uniform", {"rho": 1}, "policy.rho is not a known key of policy uniform"),
        ("tip", {"k": 3}, "policy.k is not a known key of policy tip"),
        ("rocks", {"lam": 0}, "policy.rocks is missing: set it in the file or with --set policy.rocks=…"),
        (
            "rocks",
            {"rocks": [1], "lam": -0.5},
            "policy.lam = -0.5 is not valid: Input should be greater than or equal to 0",
        ),
        (
            "rocks",
            {"rocks": [1], "lam": float("nan")},
            "policy.lam = nan is not valid: Input should be a finite number",
        ),
        ("rocks", {"rocks": [1], "lam": "0"}, "policy.lam = '0' is not valid: Input should be a valid number"),
        ("rocks", {"rocks": [1], "lam": True}, "policy.lam = True is not valid: Input should be a valid number"),
        *(
            (
                "rocks",
                {"rocks": rocks},
                f"policy.rocks = {rocks!r} is not valid: give the path of a rocks.json, or token ids, whole numbers of "
                "0 or more",
            )
            for rocks in ([1.5], [-1], [True], ["a"], "", 3.0, {"id": 3})
        ),
        ("rocks", {"rocks": [1], "window": 5}, "policy.window = 5 is not valid: Input should be a valid boolean"),
        ("type_control", {"controls": [1]}, "policy.controls = [1] is not valid: give the path of a controls.json"),
        *(
            (
                "coarse",
                {"classes": classes},
                f"policy.classes = {classes!r} is not valid: give the path of a classes.json, or lists of texts, or "
                "lists of token ids",
            )
            for classes in ([1, 2], [[1, "a"]], [[1.5]], [[True]], [[-1]], [[""]], "", 3, {"ids": [3]})
        ),
        ("coarse", {"lam": 0}, "policy.classes is missing: set it in the file or with --set policy.classes=…"),
        ("uniform", {"protect": [1]}, "policy.protect = [1] is not valid: give the path of a rocks.json"),
        ("tip", {"rho": 0}, "policy.rho = 0 is not valid: Input should be greater than 0"),
        ("tip", {"rho": 1.5}, "policy.rho = 1.5 is not valid: Input should be less than or equal to 1"),
        ("first_n", {"n": 2.0}, "policy.n = 2.0 is not valid: Input should be a valid integer"),
        (
            "product",
            {"policies": [{"name": "tips"}]},
            "policy.policies[0].name = 'tips' is not a policy: did you mean tip?",
        ),
        (
            "product",
            {"policies": [{"name": "tip"}, {"name": "tip", "roh": 1}]},
            "policy.policies[1].roh is not a known key: did you mean policy.policies[1].rho?",
        ),
        (
            "schedule",
            {"policies": [{"name": "tip"}], "steps": [0, 1]},
            "policy: steps has 2 entries and policies 1: give one each",
        ),
        (
            "schedule",
            {"policies": [{"name": "tip"}] * 2, "steps": [1, 1]},
            "policy: steps = [1, 1] does not ascend: give each policy a later step than the one before",
        ),
        *(
            (
                "product",
                {"policies": [{"name": "online_rocks"}, other]},
                "policy: policies hold online_rocks more than once, and the log tells of one: keep one",
            )
            for other in ({"name": "online_rocks"}, {"name": "product", "policies": [{"name": "online_rocks"}]})
        ),
        (
            "online_rocks",
            {"stop": 0},
            "policy.stop = 0 is not valid: Input should be greater than or equal to 1",
        ),
    ],
)
def test_mistakes_read_the_same_from_a_file_and_from_a_call(name, params, sentence):
    with pytest.raises(ConfigError) as called:
        make_policy(name, **params)
    assert str(called.value) == f"make_policy: {sentence}"
    with pytest.raises(ConfigError) as read:
        from_toml(name, params)
    assert str(read.value) == f"here: {sentence}"


def test_keys_of_the_whole_stay_outside():
    part = {"name": "tip", "denominator": "kept"}
    with pytest.raises(
        ConfigError, match="denominator of policy 0 is for the whole: set it beside policies, not within"
    ):
        make_policy("product", policies=[part])
    with pytest.raises(ConfigError, match=r"policy\.denominator is no part of the weights: give it to the loss"):
        make_policy("tip", denominator="kept")


def test_another_policy_leaves_no_keys_of_the_one_before():
    written = dump_config(parse_config(MINIMAL, ["policy.name=rocks", "policy.rocks=x", "policy.denominator=kept"]))
    chosen = parse_config(written, ["policy.rho=0.5", "policy.name=tip"]).policy
    assert chosen == SECTIONS["tip"](name="tip", rho=0.5, denominator="kept")
    assert parse_config(written, ["policy.name=rocks", "policy.lam=0.5"]).policy.rocks == "x"


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ({"name": "rocks", "rocks": ROCKS}, r"policy\.rocks = RockSet.*: give the path of a rocks\.json"),
        ({"name": "uniform", "protect": ROCKS}, r"policy\.protect = RockSet.*: give the path of a rocks\.json"),
        (
            {"name": "type_control", "controls": CONTROLS},
            r"policy\.controls = ControlSet.*: give the path of a controls\.json",
        ),
        (
            {"name": "product", "policies": [{"name": "rocks", "rocks": ROCKS}]},
            r"policy\.policies\[0\]\.rocks = RockSet.*: give the path of a rocks\.json",
        ),
    ],
)
def test_a_config_holds_nothing_that_a_file_cannot(policy, sentence):
    with pytest.raises(ConfigError, match=sentence):
        validate(Config, {"run": {"directory": "a"}, "models": MODELS, "policy": policy}, "here")


def test_a_config_without_rocks_is_refused(tmp_path):
    rock_set().save(tmp_path / "rocks.json")
    for name in ("rocks", "occurrence_control", "loss_control", "weight_control"):
        for rocks in ("[]", f"{tmp_path}/rocks.json"):
            config = parse_config(MINIMAL, [f"policy.name={name}", f"policy.rocks={rocks}"])
            with pytest.raises(
                ConfigError, match=r"policy\.rocks = .* names no rock, so every token would weigh 1: give rocks, or"
            ):
                policy_from_section(config.policy)
    inner = 'policy.policies=[{name="uniform"}, {name="rocks", rocks=[]}]'
    with pytest.raises(ConfigError, match=r"policy\.rocks = \[\] names no rock"):
        policy_from_section(parse_config(MINIMAL, ["policy.name=product", inner]).policy)


def test_the_files_of_a_policy_are_known_by_key():
    inner = {"name": "product", "policies": [{"name": "rocks", "rocks": "a"}, {"name": "rocks", "rocks": [3]}]}
    parts = [{"name": "type_control", "controls": "b"}, inner]
    policy = {"name": "schedule", "steps": [0, 9], "policies": parts, "protect": "c"}
    assert files_of(
        validate(Config, {"run": {"directory": "a"}, "models": MODELS, "policy": policy}, "here").policy
    ) == {
        "policy.protect": "c",
        "policy.policies[0].controls": "b",
        "policy.policies[1].policies[0].rocks": "a",
    }


# The docs


def rows_of_the_table() -> dict[str, list[str]]:
    table = DOCS.split("| name |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in table]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_table_of_the_docs_is_the_registry():
    assert list(rows_of_the_table()) == list(POLICIES)


@pytest.mark.parametrize("name", CASES)
def test_the_table_of_the_docs_has_every_parameter_default_and_need(name):
    _, parameters, needs, _ = rows_of_the_table()[name]
    section = SECTIONS[name]
    documented = dict(re.findall(r"`(\w+)(?: = ([^`]+))?`", parameters))
    fields = {key: field for key, field in section.model_fields.items() if key not in section.common | {"name"}}
    assert documented.keys() == fields.keys()
    for key, default in documented.items():
        given = tomllib.loads(f"value = {default}")["value"] if default else None
        assert given == (None if fields[key].is_required() else fields[key].default), key
    if "policies" in fields:
        assert needs == "what its parts need"
    else:
        assert set(re.findall(r"`(\w+)`", needs)) - {"window"} == make(name).needs


def test_the_examples_of_the_docs_are_valid():
    blocks = [block.split("```")[0] for block in DOCS.split("```toml\n")[1:]]
    names = [parse_config(MINIMAL + block, name="docs/policies.md").policy.name for block in blocks]
    assert names == ["rocks", "coarse", "schedule", "rocks"]
