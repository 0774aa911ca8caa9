"""Controls of classes of interchangeable tokens: as many tokens in as many classes, but not interchangeable ones.

See docs/method.md, section 10. Types are counted at the checkpoint the rocks were found at, over all prompts. Special
tokens, such as what ends a response, are in no control. A class of one token changes nothing and has none.

Random classes of the same frequencies, ``match``:

1. Every member gets a partner: a type that is in no class. A class becomes the class of its members' partners.
2. Partners are assigned one to one so that the sum of the absolute log ratios of frequencies, plus a random price on
   each pair, is least. A price is at most log 1.1, as much as a frequency 10 % off, so that draws differ where that
   costs little.
3. Few types of a small vocabulary are as frequent as a member. So no single ratio is refused, and all are recorded.
   All partners together must occur as often as all members, within a factor of 2: freezing both twins of a pair differs
   from freezing one by as much, so beyond it the amount could explain what the choice of tokens should.

Classes of non-rocks, ``draw``: random types that are in no class and no rocks, as frequent as `rocktokens find` wants
what it ranks. Their frequencies are recorded, not matched.

Twins, ``twins``: one random member of each class, for a policy that freezes types.

Shape legend: K members of classes, C candidates.
"""

from collections.abc import Collection
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.errors import ControlMatchError
from rocktokens.rocks.sums import occurrences, type_sums
from rocktokens.traces.store import TraceStore
from rocktokens.types import ControlDraw, ControlSet, RockSet

MATCHED_TO = "classes_sha256"
"""Key of a control's criterion: hash of the classes it was made for."""
LARGEST_PRICE = np.log(1.1)
LARGEST_TOTAL_RATIO = 2.0
REMEDY = "trace more prompts (trace.num_prompts), use fewer classes, or leave this control out"


class ClassControls:
    """What classes are compared with, drawn from the types of a trace.

    Args:
        store: the replay traces.
        classes: what controls are made for; those of one token are passed over.
        rocks: their criterion names the checkpoint.
        excluded: types that may not be in a control either, such as members of classes that are not used.
    """

    def __init__(
        self, store: TraceStore, classes: TokenClasses, rocks: RockSet, excluded: Collection[int] = ()
    ) -> None:
        self.store, self.classes, self.rocks = store, classes, rocks
        self.members = [token_id for ids in classes.groups for token_id in ids]
        self._rows: Any = occurrences(store.table(rocks.criterion["reference"]))
        self._excluded = {*self.members, *excluded}

    def match(self, seed: int) -> TokenClasses:
        """Make random classes of the same sizes whose members are about as frequent; they may be rocks.

        Raises:
            ControlMatchError: there are too few types, or they occur more than twice, or less than half, as often.
        """
        candidates = self._candidates
        self._require_enough(candidates, "that are in no class")
        member_freq_K, freq_C = (np.array(list(map(self._freq, ids))) for ids in (self.members, candidates))
        partners_K = nearest_partners(member_freq_K, freq_C, np.random.Generator(np.random.PCG64(seed)))
        made = self._made([candidates[index] for index in partners_K], "random classes of the same frequencies", seed)
        ratio = made.criterion["total_ratio"]
        if not 1 / LARGEST_TOTAL_RATIO <= ratio <= LARGEST_TOTAL_RATIO:
            raise ControlMatchError(
                f"random classes of the nearest frequencies occur {ratio:.2g} times as often as the classes, which is "
                f"off by more than a factor of {LARGEST_TOTAL_RATIO:g}: {REMEDY}"
            )
        return made

    def draw(self, seed: int, min_freq: int, min_prompts: int) -> TokenClasses:
        """Make random classes of the same sizes, of types that are no rocks and in no class.

        Raises:
            ControlMatchError: too few types occur ``min_freq`` times, in ``min_prompts`` prompts.
        """
        rocks = set(self.rocks.ids.tolist())
        frequent = [
            own
            for own in self._candidates
            if own not in rocks and self._freq(own) >= min_freq and self._prompts[own] >= min_prompts
        ]
        self._require_enough(frequent, "that are no rocks, in no class and frequent enough")
        drawn = np.random.Generator(np.random.PCG64(seed)).choice(frequent, len(self.members), replace=False)
        return self._made(drawn.tolist(), "classes of types that are no rocks", seed)

    def twins(self, seed: int, draws: int) -> ControlSet:
        """Draw one member of every class, several times; draw i is the same however many there are."""
        rock_freq = list(map(self._freq, self.rocks.ids.tolist()))
        return ControlSet(
            tokenizer_sha256=self.store.tokenizer_sha256,
            criterion=self._criterion("one member of each class", seed) | {"draws": draws},
            source={"manifest_sha256": self.store.manifest_sha256},
            rock_ids=self.rocks.ids.tolist(),
            rock_freq=rock_freq,
            draws=[self._twins([seed, index], sum(rock_freq)) for index in range(draws)],
        )

    def _twins(self, seed: list[int], rock_total: int) -> ControlDraw:
        rng = np.random.Generator(np.random.PCG64(seed))
        ids = [int(rng.choice(ids)) for ids in self.classes.groups]
        freq = list(map(self._freq, ids))
        return ControlDraw(ids, freq, sum(freq), sum(freq) / rock_total - 1 if rock_total else 0.0, max_gap=None)

    @cached_property
    def _counts(self) -> dict[int, int]:
        sums = type_sums(self._rows)
        return dict(zip(sums.token_id.tolist(), sums.freq.tolist(), strict=True))

    @cached_property
    def _prompts(self) -> dict[int, int]:
        """In how many prompts each type occurs."""
        counted = self._rows.group_by("token_id").agg(prompts=self._rows.prompt_id.nunique()).to_pyarrow()
        return dict(zip(counted["token_id"].to_pylist(), counted["prompts"].to_pylist(), strict=True))

    @property
    def _candidates(self) -> list[int]:
        """Types that occur, are not excluded and no special tokens, ascending."""
        is_special = self.store.vocabulary.is_special
        return [own for own in sorted(self._counts) if own not in self._excluded and not is_special(own)]

    def _freq(self, token_id: int) -> int:
        return self._counts.get(token_id, 0)

    def _require_enough(self, candidates: list[int], which: str) -> None:
        if len(candidates) < len(self.members):
            raise ControlMatchError(
                f"the classes have {len(self.members)} members and the trace has {len(candidates)} types {which}: "
                f"{REMEDY}"
            )

    def _made(self, partners: list[int], name: str, seed: int) -> TokenClasses:
        """Make classes of the members' partners, and record how often they occur beside the members."""
        freq, member_freq = (np.array(list(map(self._freq, ids))) for ids in (partners, self.members))
        ends = pairwise(accumulate((len(ids) for ids in self.classes.groups), initial=0))
        groups = [tuple(partners[slice(*own)]) for own in ends]
        return TokenClasses(
            [TokenClass(ids, tuple(self.store.token_texts(ids))) for ids in groups],
            tokenizer_sha256=self.store.tokenizer_sha256,
            source={"manifest_sha256": self.store.manifest_sha256},
            criterion=self._criterion(name, seed)
            | {
                "members": self.members,
                "freq_ratios": (freq / np.maximum(member_freq, 1)).tolist(),
                "total_ratio": float(freq.sum() / max(member_freq.sum(), 1)),
            },
        )

    def _criterion(self, name: str, seed: int) -> dict[str, Any]:
        reference = self.rocks.criterion["reference"]
        return {"control": name, "reference": reference, "seed": seed, MATCHED_TO: self.classes.sha256}


def nearest_partners(member_freq_K: np.ndarray, freq_C: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Assign a candidate to every member (K,) so that log ratios of frequencies plus random prices are least in sum.

    A member that never occurs counts as one occurrence.
    """
    ratios_KC = np.log(freq_C) - np.log(np.maximum(member_freq_K, 1))[:, None]
    return linear_sum_assignment(np.abs(ratios_KC) + LARGEST_PRICE * rng.random(ratios_KC.shape))[1]
