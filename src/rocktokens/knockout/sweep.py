"""The knock-out sweep: what accuracy loses or gains when tokens may not be written (docs/method.md, section 6).

1. Every prompt is answered freely; the answers are graded. Placebos are chosen: types as frequent as the tested ones
   that are no rocks, and ids that no free rollout holds.
2. With common random numbers a ban changes nothing before a banned token would first have been written. So a rollout
   without one is its own outcome, and any other is decoded from there on only, with the states it has at that point.
   The jobs, one per ban and rollout, are decoded together, whatever ban they belong to.
3. The design decides after each block of prompts which bans are settled: at the end (exact), when nothing can change
   their verdict any more (curtailed), or by a group-sequential test (sequential).
4. The free rollouts are continued once more amid the jobs, each from a random position and under the ban of an id that
   none of them holds. In float32 on one CPU thread nothing may differ; where an engine's rounding depends on the batch,
   the change it makes by itself is reported, and widens every interval, so that it cannot pass as an effect.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.knockout.designs import Complete, Curtailed, Design
from rocktokens.knockout.journal import Journal
from rocktokens.knockout.outcomes import Answering, SweepDecoder, free_rollouts
from rocktokens.knockout.placebos import matched_placebos, never_emitted, token_counts
from rocktokens.knockout.records import Ban, BanKey, Conditions, KnockoutSweep, Mode, Role
from rocktokens.knockout.sequential import GroupSequential
from rocktokens.knockout.summary import summarise
from rocktokens.knockout.verdicts import VerdictRule
from rocktokens.models.fingerprints import vocabulary_sha256
from rocktokens.progress import SILENT, Progress
from rocktokens.rocks.categories import categorise_all
from rocktokens.rollouts.encode import Sampling
from rocktokens.rollouts.sampler import Sampler
from rocktokens.run_dir import derive_seed
from rocktokens.tasks.base import Task, require_answers
from rocktokens.traces.token_text import Vocabulary
from rocktokens.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DESIGNS: dict[str, Callable[[int, VerdictRule], Design]] = {
    "exact": Complete,
    "curtailed": Curtailed,
    "sequential": GroupSequential,
}


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """How a sweep is done, beside how its answers are sampled."""

    num_samples: int = 1
    """Answers per prompt."""
    mode: Mode = "exact"
    """When a ban is settled. "exact" looks at every prompt of every ban; "curtailed" stops where the verdict is
    certain, and then does not know the change; "sequential" stops early by a test that keeps α."""
    rule: VerdictRule | None = None
    """When a change counts; default: that of docs/method.md, with the seed of the sampling."""
    matched: int = 20
    """Most placebos as frequent as the banned types."""
    never: int = 20
    """Placebos that no free rollout holds."""
    tolerance: float = 0.25
    """Largest difference between the frequencies of a type and its placebo, as a share."""

    def __post_init__(self) -> None:
        if self.mode not in DESIGNS:
            raise RocktokensError(f"mode is {self.mode!r}: use one of {', '.join(DESIGNS)}")
        if self.num_samples < 1:
            raise RocktokensError(f"num_samples is {self.num_samples}: answer every prompt at least once")


def knockout_sweep(
    sampler: Sampler,
    tokenizer: "PreTrainedTokenizerBase",
    task: Task,
    prompts: Sequence[Prompt],
    bans: Sequence[Ban | int | Iterable[int]],
    *,
    sampling: Sampling | None = None,
    settings: SweepSettings | None = None,
    rocks: Collection[int] = (),
    columns: Mapping[str, Mapping[int, float]] | None = None,
    model: str = "unknown",
    conditions: Conditions | None = None,
    journal: Journal | None = None,
    progress: Progress = SILENT,
) -> KnockoutSweep:
    """Ban each of these while decoding, and measure what that does to accuracy on the same prompts.

    Args:
        sampler: writes the rollouts; a ``TransformersSampler`` with ``threads=1`` makes them exact on a CPU.
        tokenizer: the sampler's model's.
        task: grades the answers.
        prompts: with answers, each once.
        bans: what to ban: an id, ids that are banned together, or a ``Ban``, which may have alternatives; each counts
            once.
        sampling: how prompts are encoded and answered, and the seed of the placebos; default: temperature 1, responses
            of at most 160 tokens, seed 0.
        settings: answers per prompt, when bans are settled and judged, how many placebos.
        rocks: ids that are never taken for a placebo, besides those that are tested.
        columns: by name and id, what Δ is correlated with.
        model: what the result calls the model.
        conditions: what else the answers depend on, recorded among the settings of the result.
        journal: remembers what was decoded; default: nothing does.
        progress: shows what is going on.
    """
    sampling = sampling or Sampling(temperature=1.0, max_new_tokens=160, seed=0)
    settings = settings or SweepSettings()
    if not sampling.temperature >= 0:
        raise RocktokensError(f"temperature is {sampling.temperature}: give 0 for greedy answers, or a number above it")
    require_answers(task, prompts)
    _require_distinct(prompts)
    rule, journal = settings.rule or VerdictRule(seed=sampling.seed), journal or Journal()
    vocabulary = Vocabulary(getattr(tokenizer, "backend_tokenizer", None))
    first_of: dict[BanKey, Ban] = {}
    for ban in (_as_ban(ban, vocabulary) for ban in bans):
        first_of.setdefault(ban.key, ban)
    tested = [*first_of.values()]
    _require_bannable(tested, sampler)
    answering = Answering(sampler, tokenizer, task, prompts, sampling)
    free = free_rollouts(answering, settings.num_samples, journal, progress)
    placebos, unmatched = _placebos(answering, free, tested, rocks, settings, vocabulary)
    decoder = SweepDecoder(answering, free, [*tested, *placebos], settings.num_samples, journal)
    outcomes = decoder.settle(DESIGNS[settings.mode](len(prompts), rule), rule, progress)
    recorded = {
        "model": model,
        "conditions": conditions,
        "n_prompts": len(prompts),
        "task": task.name,
        **{name: getattr(sampling, name) for name in ("temperature", "max_new_tokens", "seed")},
        **{name: getattr(settings, name) for name in ("num_samples", "mode", "matched", "never", "tolerance")},
    }
    sha256 = vocabulary_sha256(tokenizer.get_vocab())
    gold_of = {prompt.id: "\n".join(prompt.answers) for prompt in prompts}
    return summarise(outcomes, rule, vocabulary, sha256, recorded, columns or {}, unmatched, gold_of)


def _placebos(
    answering: Answering,
    free: list[Rollout],
    tested: list[Ban],
    rocks: Collection[int],
    settings: SweepSettings,
    vocabulary: Vocabulary,
) -> tuple[list[Ban], list[int]]:
    """Choose bans to set beside the tested ones; also return the single types nothing could stand in for."""
    sampler = answering.sampler
    counts_V = token_counts(free, sampler.vocab_size)
    excluded = sampler.eos_ids | set(rocks) | {token for ban in tested for token in ban.ids}
    everything = range(sampler.vocab_size)
    forbidden = {token for token in everything if token in excluded or vocabulary.is_special(token)}
    allowed = [token for token in everything if token not in forbidden]
    single = [ban.ids[0] for ban in tested if ban.is_one_type and counts_V[ban.ids[0]]]
    partners = matched_placebos(counts_V, allowed, single, settings.tolerance, settings.matched)
    unheard = never_emitted(counts_V, forbidden, settings.never, derive_seed(answering.sampling.seed, "never emitted"))
    matched = [
        replace(_single(token, vocabulary, "matched"), beside=rock)
        for token, rock in zip(partners.ids, partners.rock_ids, strict=True)
    ]
    never = [_single(token, vocabulary, "never") for token in unheard]
    return [*matched, *never], partners.unmatched if settings.matched else []


def _single(token: int, vocabulary: Vocabulary, role: Role) -> Ban:
    text = vocabulary.text(token)
    return Ban((token,), text, role, categorise_all([text], vocabulary)[0])


def _as_ban(ban: Ban | int | Iterable[int], vocabulary: Vocabulary) -> Ban:
    if isinstance(ban, Ban):
        return ban
    if isinstance(ban, int | np.integer):
        return _single(int(ban), vocabulary, "tested")
    ids = tuple(sorted({int(token) for token in ban}))
    return Ban(ids, " ".join(vocabulary.text(token) for token in ids))


def _require_bannable(bans: Sequence[Ban], sampler: Sampler) -> None:
    for ban in bans:
        if not ban.ids:
            raise RocktokensError(f"ban {ban.name!r} holds no ids: give at least one")
        if ends := sampler.eos_ids.intersection(ban.ids):
            raise RocktokensError(
                f"ban {ban.name!r}: id {min(ends)} is an end token, and without it no answer could end: leave it out"
            )
        if outside := [token for token in (*ban.ids, *ban.alternatives) if not 0 <= token < sampler.vocab_size]:
            raise RocktokensError(
                f"ban {ban.name!r}: id {outside[0]} is outside the vocabulary of {sampler.vocab_size}: leave it out"
            )


def _require_distinct(prompts: Sequence[Prompt]) -> None:
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise RocktokensError(
            f"prompt {twice!r} is there more than once, and the interval takes them for different ones: "
            "lower knockout.num_prompts to what the task has"
        )
