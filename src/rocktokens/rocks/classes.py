"""Find candidates for classes of interchangeable tokens, such as ``###`` and ``**`` (docs/method.md, section 10).

1. Over the occurrences O(a) of a type a at the reference checkpoint, with student p and teacher q,
   m(b|a) = Σ (p(b) + q(b)) / Σ (p(a) + q(a)): the mass of b where a is written, relative to a's own. An id outside the
   top tokens of a row counts 0, so m is a lower bound. The sums are whole numbers: m depends on no engine or order.
2. a and b are linked if m(b|a) and m(a|b) both reach ``share``; the smaller one is the strength of the link. Rare
   types, special tokens and end tokens are not linked.
3. Complete linkage: the link of two classes is the weakest one between their members, and there is none where any pair
   is not linked. The strongest link is merged first, up to ``max_members``; ties go to the smaller ids.
4. classes.json keeps what the candidates were found in: ``source`` has manifest_sha256, n_prompts and ``links``, a list
   of [a, b, strength] with a < b. Decoding may refute some links; ``link_classes`` makes classes of those that
   are left (``candidate_links`` reads them). ``criterion`` has the reference checkpoint and the parameters.
5. Verdicts in classes.json outlive another search only if that finds the same links in the same traces. A test that
   leaves no class is known by ``criterion["tested"]``.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir
import pyarrow as pa

from rocktokens.classes import MAKER, MAX_MEMBERS, TokenClass, TokenClasses, link_classes
from rocktokens.config import FindSection, student_name
from rocktokens.errors import RocktokensError, UnlistedStudentError
from rocktokens.progress import SILENT, Progress
from rocktokens.rocks.find import EVERYWHERE, FindOptions
from rocktokens.rocks.records import ChoiceShares
from rocktokens.rocks.sums import fixed_probability, occurrences, prompts_of, resolve_checkpoints, type_sums
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore
from rocktokens.types import LEAST_OF_HALF, RockSet, has_tail

TOPS = ("student_top", "teacher_top")


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """What a class amounts to at the reference checkpoint, over all prompts."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    weakest: float
    """Of the links between its members."""
    strongest: float
    token_share: float
    kl_share: float
    n_rocks: int


def find_classes(
    store: TraceStore,
    *,
    reference: int | None = None,
    share: float = 0.1,
    min_freq: int = 2,
    min_prompts: int = 5,
    max_members: int = MAX_MEMBERS,
) -> TokenClasses:
    """Find types that compete for the same places, from the top tokens of a trace; no verdicts yet.

    Args:
        store: replay traces of a run, with top tokens (``trace.top_k``).
        reference: the checkpoint to look at; default the last.
        share: of a type's own mass where it is written, what another one must have there to be linked to it.
        min_freq: types with fewer occurrences are not linked.
        min_prompts: nor are types in fewer prompts.
        max_members: of one class.
    """
    if not share > 0:
        raise RocktokensError(f"share = {share} is not valid: give a number above 0")
    rows, reference = rows_with_tops(store, reference)
    types, ends = _linkable(rows, min_freq, min_prompts), _end_ids(store.run, reference)
    is_text = [not (v in ends or store.vocabulary.is_special(v)) for v in types["token_id"].to_pylist()]
    links = _mutual_links(_one_way(rows, types.filter(pa.array(is_text, pa.bool_())), share))
    parameters = {"share": share, "min_freq": min_freq, "min_prompts": min_prompts, "max_members": max_members}
    parameters |= {"teacher": teacher} if has_tail(teacher := store.teacher(reference)) else {}
    return TokenClasses(
        (TokenClass(ids, tuple(store.token_texts(ids))) for ids in link_classes(links, max_members)),
        tokenizer_sha256=store.tokenizer_sha256,
        source={
            "manifest_sha256": store.manifest_sha256,
            "n_prompts": len(prompts_of(rows)),
            "links": [[a, b, strength] for (a, b), strength in links.items()],
        },
        criterion={"reference": reference, **parameters},
    )


def find_run_classes(
    run: RunDir, section: FindSection, options: FindOptions = EVERYWHERE, progress: Progress = SILENT
) -> TokenClasses:
    """Find the candidates of a run and commit classes.json; verdicts that are there stay where nothing has changed."""
    with run.lock(), progress.status("linking tokens"):
        store = TraceStore(run, engine=options.engine, threads=options.threads)
        least = {"min_freq": section.min_freq, "min_prompts": section.min_prompts}
        found = find_classes(store, reference=options.reference, **least)
        tested = _tested_before(run)
        if tested is not None and _same_candidates(tested, found):
            progress.note(f"{run.classes} keeps its verdicts: the same links were found in the same traces")
            return tested
        store.note_searched()
        run.commit(run.classes.name, found.save)
    if tested is not None:
        progress.note(f"{run.classes} had verdicts on other traces or links: its classes are untested now")
    return found


def rows_with_tops(store: TraceStore, reference: int | None = None) -> tuple[ir.Table, int]:
    """Return the occurrences at a checkpoint, by default the last, and its step; refused without top tokens."""
    reference, _ = resolve_checkpoints(store, reference, None)
    rows = store.table(reference)
    if not set(TOPS) <= set(rows.columns):
        raise RocktokensError("the traces have no top tokens: set trace.top_k = 8 and run `rocktokens trace --restart`")
    return occurrences(rows), reference


def candidate_links(classes: TokenClasses) -> dict[tuple[int, int], float]:
    """Return the links that classes.json was made from; refused where the classes were not found in traces."""
    try:
        return {(int(a), int(b)): float(strength) for a, b, strength in classes.source["links"]}
    except (KeyError, TypeError, ValueError):
        raise RocktokensError(f"the classes do not say which tokens are linked: find them with {MAKER}") from None


def summarise_classes(store: TraceStore, classes: TokenClasses, rocks: RockSet | None = None) -> list[ClassSummary]:
    """Say what each class amounts to, those with the most loss first; ``n_rocks`` is 0 without rocks."""
    links, rock_ids = candidate_links(classes), set() if rocks is None else set(rocks.ids.tolist())
    sums = type_sums(rows_with_tops(store, classes.criterion["reference"])[0])
    freq, kl = (dict(zip(sums.token_id.tolist(), values.tolist(), strict=True)) for values in (sums.freq, sums.kl))
    tokens, loss = sum(freq.values()), max(sum(kl.values()), 1)
    found = []
    for each in classes:
        strengths = [links[pair] for pair in combinations(sorted(each.ids), 2)]
        found.append(
            ClassSummary(
                ids=each.ids,
                texts=each.texts,
                weakest=min(strengths),
                strongest=max(strengths),
                token_share=sum(freq[token_id] for token_id in each.ids) / tokens,
                kl_share=sum(kl[token_id] for token_id in each.ids) / loss,
                n_rocks=len(rock_ids.intersection(each.ids)),
            )
        )
    return sorted(found, key=lambda own: (-own.kl_share, own.ids))


def was_tested(classes: TokenClasses) -> bool:
    """Whether bans have tested the links, even if they left no class."""
    return "tested" in classes.criterion or any(each.state != "untested" for each in classes)


def choice_is_of(run: RunDir, choice: ChoiceShares) -> bool:
    """Whether a share of choice is of the classes of RUN/classes.json, less those that bans have refuted.

    A run without that file has classes of ``trace.classes`` alone, and so has the share.
    """
    if not run.lists(run.classes.name):
        return True
    return choice.classes_sha256 == TokenClasses.load(run.verified(run.classes.name)).unrefuted.sha256


def too_few_prompts(classes: TokenClasses) -> str:
    """Say that there is too little data to find classes, and how much would do; "" where there is enough."""
    number = classes.source["n_prompts"]
    if number >= LEAST_OF_HALF:
        return ""
    prompts = "prompt is" if number == 1 else "prompts are"
    return f"{number} {prompts} too few to find classes: trace at least {LEAST_OF_HALF} (trace.num_prompts)"


def _linkable(rows: Any, min_freq: int, min_prompts: int) -> pa.Table:
    """The types that occur often enough, and their own mass in fixed point: token_id, own."""
    mass = (fixed_probability(rows.logp_student) + fixed_probability(rows.logp_teacher)).sum()
    own = rows.group_by("token_id").agg(freq=rows.count(), own=mass)
    pairs: Any = rows.select("token_id", "prompt_id").distinct()
    joined: Any = own.inner_join(pairs.group_by("token_id").agg(prompts=pairs.count()), "token_id")
    chosen = joined.filter(joined.freq >= min_freq, joined.prompts >= min_prompts, joined.own > 0)
    return chosen.select("token_id", "own").order_by("token_id").to_pyarrow()


def _one_way(rows: Any, types: pa.Table, share: float) -> pa.Table:
    """m(b|a) between the given types where it reaches ``share``: token_id (a), top_id (b), m."""
    known: Any = ibis.memtable(types)
    written: Any = rows.semi_join(known, "token_id")
    tops: Any = ibis.union(*(written.select("token_id", top=written[name].unnest()) for name in TOPS))
    entries = tops.select("token_id", top_id=tops.top["id"], logp=tops.top["logp"])
    others = entries.filter(entries.top_id != entries.token_id).semi_join(known, [("top_id", "token_id")])
    masses = others.group_by("token_id", "top_id").agg(mass=fixed_probability(others.logp).sum())
    sums = masses.inner_join(known, "token_id")
    ratios = sums.select("token_id", "top_id", m=sums.mass.cast("float64") / sums.own.cast("float64"))
    return ratios.filter(ratios.m >= share).to_pyarrow()


def _mutual_links(one_way: pa.Table) -> dict[tuple[int, int], float]:
    columns = (one_way[name].to_pylist() for name in ("token_id", "top_id", "m"))
    m = {(a, b): mass for a, b, mass in zip(*columns, strict=True)}
    return {(a, b): min(m[a, b], m[b, a]) for a, b in sorted(m) if a < b and (b, a) in m}


def _end_ids(run: RunDir, step: int) -> set[int]:
    """What the files of a checkpoint in a folder call an end; special tokens are known from the tokenizer."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in _configs(run, step)]
    ends = (content.get("eos_token_id") for file in files for content in (file, file.get("text_config") or {}))
    return {token_id for end in ends if end is not None for token_id in ([end] if isinstance(end, int) else end)}


def _configs(run: RunDir, step: int) -> list[Path]:
    """The files of a checkpoint that may name end tokens; the run's own must be listed."""
    names, own = ("generation_config.json", "config.json"), f"checkpoints/step-{step}"
    with suppress(UnlistedStudentError):
        folder = Path(student_name(run, step))
        if folder != run.checkpoint(step):
            return [path for path in (folder / name for name in names) if path.is_file()]
    return [run.verified(f"{own}/{name}") for name in names if run.lists(f"{own}/{name}")]


def _tested_before(run: RunDir) -> TokenClasses | None:
    """The run's classes if they were tested; a file that is damaged, gone or not the run's is made again."""
    with suppress(RocktokensError):
        before = TokenClasses.load(run.verified(run.classes.name))
        return before if was_tested(before) else None
    return None


def _same_candidates(tested: TokenClasses, found: TokenClasses) -> bool:
    """Whether the classes that were tested came from these links; the test may have added to what it read."""
    known = {**tested.source, **tested.criterion}
    return all(known.get(name) == value for name, value in {**found.source, **found.criterion}.items())
