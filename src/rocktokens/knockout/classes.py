"""The stage ``knockout --classes``: whether the tokens of a class are interchangeable (docs/method.md, section 10).

1. The links of RUN/classes.json are completed by what replaces each token where it is banned (``class_links``). The
   links that are left make the classes, by complete linkage.
2. The bans of one sweep: each member of a class where another one is likely, all others where a member is likely, the
   whole class everywhere and, for comparison, each member everywhere. Equal bans count once.
3. A class is safe if all bans within it are neutral and changed some answers, unsafe if one of them is a pillar or a
   stumbling block; otherwise the prompts are too few to tell.
4. Links and sweep go into knockout-classes.json; classes and verdicts go into classes.json if a student of the run
   wrote the answers. What was decoded under bans is kept as it comes, as in ``rocktokens.knockout.knockout``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from rocktokens.classes import MAX_MEMBERS, Links, TokenClass, TokenClasses, link_classes
from rocktokens.config import Config
from rocktokens.display.text import visible
from rocktokens.errors import RocktokensError
from rocktokens.knockout.class_records import ClassLink, ClassSweep, banned_in, forced_in
from rocktokens.knockout.knockout import RunAnswers, earlier_traces, is_student
from rocktokens.knockout.records import Ban, BanKey, Knockout, KnockoutSweep, Mode
from rocktokens.progress import SILENT, Progress
from rocktokens.run_dir import MAKERS, RunDir
from rocktokens.types import Verdict

if TYPE_CHECKING:
    from rocktokens.traces.token_text import Vocabulary

NAMED = 3
"""A ban of more types than this is called by the first of them."""


def knockout_classes(
    run: RunDir, config: Config, *, checkpoint: str = "last", mode: Mode = "exact", progress: Progress = SILENT
) -> ClassSweep:
    """Test the classes of a run with bans; commit knockout-classes.json, and the student's verdicts in classes.json.

    Args:
        run: a run with classes.json.
        config: of the run.
        checkpoint: a traced checkpoint by number or name, "first", "last", "teacher", "student", or any model.
        mode: when a ban is settled, as in ``knockout_sweep``.
        progress: shows what is going on.
    """
    with progress.status("loading"):
        from rocktokens.traces.token_text import Vocabulary

    with run.lock():
        candidates = TokenClasses.load(run.verified(run.classes.name))
        candidates.require_tokenizer(run.manifest().get("tokenizer_sha256", candidates.tokenizer_sha256))
        links = _candidate_links(candidates, run)
        is_found = "manifest_sha256" in candidates.source  # else they were made by hand
        earlier = earlier_traces(run, candidates.source, run.classes.name) if is_found else []
        answers = RunAnswers.open(run, config, checkpoint, progress)
        candidates.require_tokenizer(answers.banned.tokenizer_sha256)
        candidates.require_width(answers.answering.sampler.vocab_size)
        vocabulary = Vocabulary(getattr(answers.answering.tokenizer, "backend_tokenizer", None))
        ends = sorted(answers.answering.sampler.eos_ids & {token_id for pair in links for token_id in pair})
        judged = _judge_links(links, ends, answers, config.knockout.num_samples, progress)
        kept = {(own.a, own.b): own.strength for own in judged if own.kept}
        groups = link_classes(kept, candidates.criterion.get("max_members", MAX_MEMBERS))
        bans = [ban for ids in groups for ban in class_bans(ids, vocabulary)]
        sweep = answers.sweep(bans, config, mode, progress=progress)
        named = ", ".join(repr(vocabulary.text(token_id)) for token_id in ends)
        left_out = [f"never banned, since no answer could end without them: {named}"] if ends else []
        sweep = replace(sweep, warnings=[*sweep.warnings, *left_out, *earlier])
        found = ClassSweep(tuple(_tested(ids, sweep, vocabulary) for ids in groups), judged, sweep)
        run.commit(run.knockout_classes.name, found.save)
        if is_student(run, config, answers.banned.identity):
            run.commit(run.classes.name, _with_tests(candidates, links, found).save)
    return found


def _candidate_links(candidates: TokenClasses, run: RunDir) -> Links:
    """Return the links the classes were found by; where they were made by hand, every pair of a class is linked."""
    from rocktokens.rocks.classes import candidate_links

    if "links" in candidates.source:
        links = candidate_links(candidates)
    else:
        links = {pair: 1.0 for ids in candidates.groups for pair in combinations(ids, 2)}
    if not links:
        raise RocktokensError(
            f"{run.classes} holds no classes to test: trace more prompts (trace.num_prompts) and run "
            f"`{MAKERS[run.classes.name]}` again"
        )
    return links


def _judge_links(
    links: Links, ends: Sequence[int], answers: RunAnswers, num_samples: int, progress: Progress
) -> tuple[ClassLink, ...]:
    """Judge the links of tokens that can be banned: those that end answers cannot."""
    from rocktokens.knockout.class_links import count_replacements, judge_links
    from rocktokens.knockout.outcomes import free_rollouts

    bannable = {pair: strength for pair, strength in links.items() if not set(ends).intersection(pair)}
    free = free_rollouts(answers.answering, num_samples, answers.journal, progress)
    token_ids = {token_id for pair in bannable for token_id in pair}
    return judge_links(bannable, count_replacements(answers.answering, free, token_ids, progress))


def class_bans(ids: tuple[int, ...], vocabulary: "Vocabulary") -> Iterator[Ban]:
    """Make the bans that test a class, then those of its members everywhere; in a class of two some are equal."""
    keys = [test(ids, member) for test in (banned_in, forced_in) for member in ids]
    for key in (*keys, BanKey(ids), *(BanKey((member,)) for member in ids)):
        yield Ban(key.ids, _name(key, vocabulary), alternatives=key.alternatives)


def _name(key: BanKey, vocabulary: "Vocabulary") -> str:
    """Name a ban: a single type by its text, any other by what is banned where."""

    def joined(ids: tuple[int, ...], word: str) -> str:
        more = [f"{len(ids) - NAMED} more"] if len(ids) > NAMED else []
        return f" {word} ".join([*(visible(vocabulary.text(token_id)) for token_id in ids[:NAMED]), *more])

    if key.alternatives:
        return f"{joined(key.ids, '+')} where {joined(key.alternatives, 'or')} is likely"
    return vocabulary.text(key.ids[0]) if len(key.ids) == 1 else joined(key.ids, "+")


def _tested(ids: tuple[int, ...], sweep: KnockoutSweep, vocabulary: "Vocabulary") -> TokenClass:
    """Return a class with the verdicts on it."""
    banned, forced = ([sweep.of_ban(test(ids, member)) for member in ids] for test in (banned_in, forced_in))
    texts = tuple(vocabulary.text(token_id) for token_id in ids)
    whole = sweep.of_ban(BanKey(ids)).verdict
    return TokenClass(ids, texts, _verdicts(banned), _verdicts(forced), whole, is_safe([*banned, *forced]))


def _verdicts(bans: Sequence[Knockout]) -> tuple[Verdict, ...]:
    return tuple(own.verdict for own in bans)


def is_safe(within: Sequence[Knockout]) -> bool | None:
    """Return whether members are interchangeable by the bans within their class; None if the prompts are too few.

    A ban that hardly ever acts changes nothing, which says nothing: each must have changed ``LEAST_PLACES`` answers.
    """
    from rocktokens.knockout.class_links import LEAST_PLACES

    if any(own.verdict in ("pillar", "stumbling") for own in within):
        return False
    is_shown = all(own.verdict == "neutral" and (own.changes.n_changed or 0) >= LEAST_PLACES for own in within)
    return True if is_shown else None


def _with_tests(candidates: TokenClasses, links: Links, found: ClassSweep) -> TokenClasses:
    """Return the tested classes with what the candidates were found in, and how they were tested.

    The links stay those of the candidates: another test, with more prompts, starts from the same.
    """
    from rocktokens.knockout.class_links import LEAST_PLACES, LEAST_SHARE
    from rocktokens.rollouts.decoding import LIKELY

    settings = found.sweep.settings
    names = ("model", "task", "n_prompts", "num_samples", "temperature", "mode", "seed", "alpha", "epsilon", "margin")
    tested = {
        **{name: getattr(settings, name) for name in names},
        "replaced": LEAST_SHARE,
        "places": LEAST_PLACES,
        "likely": LIKELY,
    }
    listed = [[a, b, strength] for (a, b), strength in links.items()]
    return TokenClasses(
        found.classes,
        tokenizer_sha256=candidates.tokenizer_sha256 or found.sweep.tokenizer_sha256,
        source={**candidates.source, "links": listed},
        criterion={**candidates.criterion, "tested": tested},
    )
