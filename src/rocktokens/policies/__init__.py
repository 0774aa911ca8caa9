"""Weight policies: arrays in, the weight of each response token out; they know nothing of the trainer (METHOD 7).

A policy is one class in its own file and one entry of ``POLICIES``. Weights are keyed by the *predicted* token ids,
float32 and detached, numpy for numpy and torch for torch.
"""

import difflib
import inspect
from typing import Any, Protocol

from rocktokens.errors import ConfigError
from rocktokens.policies.rocks import RocksPolicy
from rocktokens.policies.uniform import UniformPolicy


class WeightPolicy(Protocol):
    """What a trainer asks of a policy."""

    name: str
    needs_scores: bool
    """Whether ``scores`` must be given; otherwise weights are known before either model runs."""

    def __call__(self, scores: Any, token_ids_T: Any, positions_T: Any, rollout_ids_T: Any, step: int) -> Any:
        """The weight of every response token, float32 (T,), in the kind and on the device of ``token_ids_T``."""
        ...


POLICIES: dict[str, type[WeightPolicy]] = {
    UniformPolicy.name: UniformPolicy,
    RocksPolicy.name: RocksPolicy,
}


def make_policy(name: str, **params: Any) -> WeightPolicy:
    """Build a policy by name, for example ``make_policy("rocks", rocks="runs/a/rocks.json", lam=0.0)``."""
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r} is not known{_did_you_mean(name, list(POLICIES))}")
    accepted = inspect.signature(POLICIES[name]).parameters
    for key in params:
        if key not in accepted:
            raise ConfigError(f"policy {name} has no parameter {key!r}{_did_you_mean(key, list(accepted))}")
    for key, parameter in accepted.items():
        if parameter.default is parameter.empty and key not in params:
            raise ConfigError(f"policy {name} needs parameter {key!r}: give it a value")
    return POLICIES[name](**params)


def _did_you_mean(name: str, known: list[str]) -> str:
    if not known:
        return ": it takes none"
    match = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {match[0]!r}?" if match else f": use one of {', '.join(known)}"
