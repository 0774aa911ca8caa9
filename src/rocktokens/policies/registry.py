"""From the name and the parameters of a policy to the policy.

1. Parameters are checked by the policy's section (rocktokens.config.policies), wherever they come from.
2. Files are read: a rocks.json, controls.json or classes.json of another tokenizer is refused, and so is a config
   without any rocks or classes. Classes given as texts need the tokenizer itself.
3. Random policies without a seed get the one that is given; the parts of a composed policy get one each.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from rocktokens.classes import TokenClasses
from rocktokens.config.base import Section
from rocktokens.config.policies import IN_PYTHON, PolicyBase, PolicySection
from rocktokens.config.sentences import validate
from rocktokens.errors import ConfigError, RocktokensError, TokenizerMismatchError
from rocktokens.policies import formulas
from rocktokens.policies.base import WeightPolicy
from rocktokens.policies.coarse import CoarsePolicy
from rocktokens.policies.compose import ProductPolicy, ProtectedPolicy, SchedulePolicy
from rocktokens.policies.controls import (
    LossControlPolicy,
    OccurrenceControlPolicy,
    RandomPositionsPolicy,
    TypeControlPolicy,
    WeightControlPolicy,
)
from rocktokens.policies.formulas import FormulaPolicy
from rocktokens.policies.online_coarse import OnlineCoarsePolicy
from rocktokens.policies.online_rocks import OnlineRocksPolicy
from rocktokens.policies.rocks import RocksPolicy
from rocktokens.run_dir import derive_seed
from rocktokens.types import ControlSet, RockSet

POLICIES: dict[str, Callable[..., WeightPolicy]] = {
    "uniform": partial(FormulaPolicy, formulas.uniform),
    "rocks": RocksPolicy,
    "online_rocks": OnlineRocksPolicy,
    "random_positions": RandomPositionsPolicy,
    "type_control": TypeControlPolicy,
    "occurrence_control": OccurrenceControlPolicy,
    "loss_control": LossControlPolicy,
    "weight_control": WeightControlPolicy,
    "top_frequency": partial(FormulaPolicy, formulas.top_frequency),
    "top_mean_loss": partial(FormulaPolicy, formulas.top_mean_loss),
    "top_grad_norm": partial(FormulaPolicy, formulas.top_grad_norm),
    "high_entropy": partial(FormulaPolicy, formulas.high_entropy),
    "tip": partial(FormulaPolicy, formulas.tip),
    "teachable": partial(FormulaPolicy, formulas.teachable),
    "selectkd": partial(FormulaPolicy, formulas.selectkd),
    "prefix": partial(FormulaPolicy, formulas.prefix),
    "first_n": partial(FormulaPolicy, formulas.first_n),
    "prefix_importance": partial(FormulaPolicy, formulas.prefix_importance),
    "entropy_mix": partial(FormulaPolicy, formulas.entropy_mix),
    "asymmetric": partial(FormulaPolicy, formulas.asymmetric, term="asymmetric"),
    "coarse": CoarsePolicy,
    "online_coarse": OnlineCoarsePolicy,
    "product": ProductPolicy,
    "schedule": SchedulePolicy,
}
_KNOW_PILLARS = ("rocks", "online_rocks", "occurrence_control", "loss_control", "weight_control", "coarse")
"""Policies that leave protected types out of what they mark, count and log, or out of their classes; ``online_coarse``
leaves out the ends of responses too."""


class _Call(Section):
    policy: PolicySection


def make_policy(name: str, **params: Any) -> WeightPolicy:
    """Build a policy by name, for example ``make_policy("rocks", rocks="runs/a/rocks.json", lam=0.0)``.

    Rocks, controls and classes may also be given as a RockSet, a ControlSet, TokenClasses or token ids.
    """
    if "denominator" in params:
        raise ConfigError("make_policy: policy.denominator is no part of the weights: give it to the loss")
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in params.items()}
    section = validate(_Call, {"policy": {**plain, "name": name}}, "make_policy", IN_PYTHON).policy
    return _protected(section, _Given())


def policy_from_section(
    section: PolicyBase,
    tokenizer_sha256: str = "",
    seed: int = 0,
    tokenizer: Any = None,
    end_ids: Iterable[int] = (),
) -> WeightPolicy:
    """Build the policy of a config; ``seed`` is for random policies whose section has none.

    Files made with another vocabulary than that of ``tokenizer_sha256`` are refused; "" checks nothing. ``tokenizer``
    is what turns classes that are given as texts into ids; without it they are refused. ``end_ids`` end a response: no
    policy takes one of them for another token's twin.
    """
    given = _Given(tokenizer_sha256, seed, allows_nothing=False, tokenizer=tokenizer, end_ids=tuple(end_ids))
    return _protected(section, given)


@dataclass(frozen=True, slots=True)
class _Given:
    """What a policy is built with besides its section; the parts of a whole share all but the seed."""

    tokenizer_sha256: str = ""
    seed: int = 0
    pillars: np.ndarray = field(default_factory=lambda: np.array([], dtype=np.int64))
    allows_nothing: bool = True
    """Whether a policy may have no rocks or classes to act on."""
    tokenizer: Any = None
    end_ids: tuple[int, ...] = ()


def _protected(section: PolicyBase, given: _Given) -> WeightPolicy:
    if section.protect is None:
        return _build(section, given)
    tokens = _rock_set(section.protect, given.tokenizer_sha256).tokens
    if all(token.verdict == "untested" for token in tokens):
        raise ConfigError(
            "policy.protect names rocks without a single verdict: run `rocktokens knockout` on them first"
        )
    pillars = np.array([token.id for token in tokens if token.verdict == "pillar"], dtype=np.int64)
    return ProtectedPolicy(_build(section, replace(given, pillars=pillars)), pillars)


def _build(section: PolicyBase, given: _Given) -> WeightPolicy:
    names = type(section).model_fields.keys() - {"name", *section.common}
    params = {name: getattr(section, name) for name in names}
    if "rocks" in params:
        params["rocks"] = _rocks(params["rocks"], given)
    if "controls" in params:
        params["controls"] = _control_set(params["controls"], given.tokenizer_sha256)
    if "classes" in params:
        params["classes"] = _classes(params["classes"], params.pop("untested"), given)
    if "seed" in params and params["seed"] is None:
        params["seed"] = given.seed
    if "policies" in params:
        parts = enumerate(params.pop("policies"))
        params["parts"] = [_build(part, replace(given, seed=derive_seed(given.seed, "part", i))) for i, part in parts]
    if section.name in _KNOW_PILLARS:
        params["protected"] = given.pillars
    if section.name == "online_coarse":
        params["protected"] = {*given.pillars.tolist(), *given.end_ids}
    return POLICIES[section.name](**params)


def _rocks(rocks: str | list[int] | RockSet, given: _Given) -> list[int] | RockSet:
    found = rocks if isinstance(rocks, list) else _rock_set(rocks, given.tokenizer_sha256)
    if not (found if isinstance(found, list) else found.tokens) and not given.allows_nothing:
        raise ConfigError(
            f"policy.rocks = {rocks!r} names no rock, so every token would weigh 1: give rocks, or choose uniform"
        )
    return found


def _classes(classes: str | list[list[int]] | list[list[str]] | TokenClasses, untested: bool, given: _Given) -> Any:
    """Make classes of what a section has; of a file the safe ones alone, unless untested ones are wanted too."""
    if isinstance(classes, list):
        found = _listed_classes(classes, given.tokenizer)
    else:
        found = classes if isinstance(classes, TokenClasses) else TokenClasses.load(classes)
        if given.tokenizer_sha256:
            found.require_tokenizer(given.tokenizer_sha256)
        takes_untested = untested or isinstance(classes, TokenClasses)
        found = found.only((True, None) if takes_untested else (True,))
    if not found.without(given.pillars).groups and not given.allows_nothing:
        raise ConfigError(
            f"policy.classes = {classes!r} has no class of two tokens that may be used and are not protected, so "
            "nothing would be left out: give classes, take untested ones too (policy.untested = true), or choose "
            "uniform"
        )
    return found


def _listed_classes(classes: list[list[Any]], tokenizer: Any) -> TokenClasses:
    has_texts = any(isinstance(each, str) for group in classes for each in group)
    if has_texts and tokenizer is None:
        raise ConfigError(
            f"policy.classes = {classes!r} holds texts, and there is no tokenizer here to say which ids they are: give "
            "ids, a classes.json, or TokenClasses.from_texts"
        )
    try:
        return TokenClasses.from_texts(tokenizer, classes) if has_texts else TokenClasses(classes)
    except RocktokensError as error:
        raise ConfigError(f"policy.classes = {classes!r} is not valid: {error}") from None


def _rock_set(rocks: str | RockSet, tokenizer_sha256: str) -> RockSet:
    rocks = rocks if isinstance(rocks, RockSet) else RockSet.load(rocks)
    if tokenizer_sha256:
        rocks.require_tokenizer(tokenizer_sha256)
    return rocks


def _control_set(controls: str | ControlSet, tokenizer_sha256: str) -> ControlSet:
    controls = controls if isinstance(controls, ControlSet) else ControlSet.load(controls)
    if tokenizer_sha256 and controls.tokenizer_sha256 not in ("", tokenizer_sha256):
        raise TokenizerMismatchError(
            f"the controls were matched with tokenizer {controls.tokenizer_sha256[:12]}, this model's is "
            f"{tokenizer_sha256[:12]}: token ids mean other things there; match them on a trace of this model"
        )
    return controls
