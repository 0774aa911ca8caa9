"""Weight λ on rock types, 1 on every other token (docs/method.md, section 7): λ = 0 freezes the rocks out of the loss.

1. The rocks are a RockSet or plain ids in rank order; the first ``k``, or those of some categories, verdicts or
   labels, can be chosen from them. Protected types are no rocks, and have no window.
2. A position is a rock when the token *predicted* there is one; the input token that precedes it does not matter.
3. With ``window`` the positions of their windows weigh λ too, by the rule that comes with the rocks; not those of
   protected types.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rocktokens.errors import ConfigError
from rocktokens.policies.base import UpdateTokens, WeightPolicy
from rocktokens.types import RockSet, RockToken, has_tail
from rocktokens.windows import WindowRule, rock_windows


class RocksPolicy(WeightPolicy):
    """Weight ``lam`` where the predicted token is a rock.

    Args:
        rocks: a RockSet or token ids in rank order.
        lam: weight of a rock token.
        window: whether the windows of the rocks weigh ``lam`` too; that needs the kl of every token.
        protected: types that never weigh λ.
        chosen: ``k``, ``categories``, ``verdicts`` and ``labels`` of ``choose_rocks``.
    """

    name = "rocks"

    def __init__(
        self,
        rocks: RockSet | Sequence[int],
        lam: float = 0.0,
        window: bool = False,
        protected: Sequence[int] | np.ndarray = (),
        **chosen: Any,
    ) -> None:
        self.protected = np.array(protected, dtype=np.int64)
        rock_ids = choose_rocks(rocks, **chosen)
        self.lam, self.rock_ids = lam, rock_ids[~np.isin(rock_ids, self.protected)]
        self.rule = _window_rule(rocks) if window else None
        self.needs = frozenset({"kl"} if window else ())

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """λ at the marked tokens."""
        return np.where(self.marked(tokens), self.lam, 1.0)

    def marked(self, tokens: UpdateTokens) -> np.ndarray:
        """Where the rocks and, if asked for, their windows are: bool (T,)."""
        is_rock_T = np.isin(tokens.token_ids, self.rock_ids)
        if self.rule is None:
            return is_rock_T
        marked_T = rock_windows(is_rock_T, tokens.scores["kl"], tokens.rollout_ids, tokens.positions, self.rule)
        return marked_T & self.unprotected(tokens)

    def unprotected(self, tokens: UpdateTokens) -> np.ndarray:
        """Where the predicted token is not protected: bool (T,)."""
        return ~np.isin(tokens.token_ids, self.protected)


def choose_rocks(
    rocks: RockSet | Sequence[int],
    k: int | None = None,
    categories: Sequence[str] | None = None,
    verdicts: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
) -> np.ndarray:
    """int64 (K,): ids in rank order, of the first k rocks those of the categories, with the verdicts and labels."""
    choices = (("categories", "category", categories), ("verdicts", "verdict", verdicts), ("labels", "label", labels))
    if isinstance(rocks, RockSet):
        if labels and any(token.label is None for token in rocks.tokens):
            raise ConfigError(
                "policy.labels needs rocks with labels and these have none: write rocks.json again with "
                "`rocktokens find`"
            )
        kept = rocks.tokens[:k]
        for key, attribute, wanted in choices:
            kept = _only(kept, key, attribute, wanted)
        return np.array([token.id for token in kept], dtype=np.int64)
    if given := [key for key, _, wanted in choices if wanted]:
        raise ConfigError(
            f"policy.{given[0]} needs a rocks.json and token ids were given: give its path as policy.rocks"
        )
    return np.array(rocks[:k], dtype=np.int64)


def _only(tokens: list[RockToken], key: str, attribute: str, wanted: Sequence[str] | None) -> list[RockToken]:
    """The rocks whose attribute is one of those wanted, if any are; that none is left is refused."""
    kept = [token for token in tokens if wanted is None or getattr(token, attribute) in wanted]
    if tokens and not kept:
        there = ", ".join(sorted({str(getattr(token, attribute)) for token in tokens}))
        raise ConfigError(f"policy.{key} = {wanted} leaves no rock: give some of {there}")
    return kept


def _window_rule(rocks: RockSet | Sequence[int]) -> WindowRule:
    if isinstance(rocks, RockSet) and has_tail(rocks.teacher):
        raise ConfigError(
            f"policy.window = True needs rocks with a window rule, and the teacher of these gave {rocks.teacher}, "
            "whose kl holds for sums alone: leave it out, or find rocks by a teacher that gives all"
        )
    if not isinstance(rocks, RockSet) or rocks.windows is None:
        raise ConfigError(
            "policy.window = True needs rocks with a window rule and these have none: "
            "give a rocks.json of `rocktokens find`"
        )
    return WindowRule.from_dict(rocks.windows)
