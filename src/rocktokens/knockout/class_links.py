"""Whether linked tokens replace each other: the second condition on classes (docs/method.md, section 10).

1. Each token is banned everywhere, and one step is decoded where each free answer first has it: what is written there
   instead has replaced it.
2. A link stays if each of the two replaces the other in at least ``LEAST_SHARE`` of these places. A token with fewer
   than ``LEAST_PLACES`` of them says nothing against a link.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rocktokens.classes import Links
from rocktokens.knockout.class_records import ClassLink, Replacement
from rocktokens.knockout.outcomes import NOWHERE, Answering, first_occurrences
from rocktokens.knockout.records import Ban
from rocktokens.progress import Progress
from rocktokens.rollouts.sampler import Branch, Completion
from rocktokens.types import Rollout

LEAST_SHARE = 0.1
LEAST_PLACES = 5


def count_replacements(
    answering: Answering, free: Sequence[Rollout], token_ids: Collection[int], progress: Progress
) -> dict[int, Counter[int]]:
    """Count, for each of these tokens, what is written in its place where free answers first have it."""
    ordered = sorted(token_ids)
    first_KR = first_occurrences(free, [Ban((token_id,), "") for token_id in ordered])
    branches = [
        Branch(int(place), int(first_KR[index, place]), frozenset({ordered[index]}), length=1)
        for place, index in np.argwhere(first_KR.T != NOWHERE)
    ]
    counts: dict[int, Counter[int]] = {token_id: Counter() for token_id in ordered}
    sampling = answering.sampling
    with progress.bar("decoding replacements", len(branches)) as advance:

        def done(index: int, completion: Completion) -> None:
            [banned] = branches[index].banned
            counts[banned][int(completion.token_ids[0])] += 1
            advance(1)

        answering.sampler.branch(
            free,
            branches,
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            seed=sampling.seed,
            on_done=done,
        )
    return counts


def judge_links(links: Links, counts: Mapping[int, Counter[int]]) -> tuple[ClassLink, ...]:
    """Judge every link by how often its tokens have replaced each other."""
    return tuple(_judged(a, b, strength, counts) for (a, b), strength in links.items())


def _judged(a: int, b: int, strength: float, counts: Mapping[int, Counter[int]]) -> ClassLink:
    b_for_a, a_for_b = _replacement(counts[a], b), _replacement(counts[b], a)
    shares = [own.share for own in (b_for_a, a_for_b) if own.share is not None]
    return ClassLink(a, b, strength, b_for_a, a_for_b, kept=all(share >= LEAST_SHARE for share in shares))


def _replacement(written: Counter[int], token_id: int) -> Replacement:
    places = written.total()
    return Replacement(places, written[token_id] / places if places >= LEAST_PLACES else None)
