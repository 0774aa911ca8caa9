"""Hold one pair against the claims about rocks: supported, contradicted or inconclusive, with what each rests on.

``python docs/results/claims.py runs/smollm2-renumbered --study runs/study-smollm2`` reads the records that
``rocktokens run`` and ``rocktokens study`` left and prints a table; ``--name smollm2`` also writes
docs/results/smollm2-claims.csv, and smollm2-rocks.csv with a row for every rock and its ban. Each claim is an
inequality that was written here before the pairs of docs/results were trained:

    few        rocks hold more than half of the remaining kl and are less than a tenth of the used types    interval
    stay       the kl of rocks fell by less than that of the rest, on the same tokens             disjoint intervals
    …          nine claims about gradients, which docs/gradients.md defines                           gradients.json
    neutral    a ban of a single rock changes the accuracy by less than the margin, for most rocks    Clopper–Pearson
    structure  most rocks are LaTeX, Markdown, line breaks, discourse markers or punctuation          Clopper–Pearson
    choice     more than half of the remaining kl is a choice among interchangeable tokens                   interval
    free       students trained without the rocks end no worse than others        the study's verdict at equal steps
    faster     they need fewer steps to an accuracy                             the study's verdict on steps to it

Supported: the whole interval lies on the side of the claim. Contradicted: on the other side; of bans, where most rocks
change the accuracy, since an undecided ban speaks for neither; of the share of types, which is counted and has no
interval, where it is a tenth or more. Inconclusive: neither, or the numbers do not exist. All but the choice of rocks
is measured on prompts that did not choose them. Claims are judged one by one at 5 %.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

from rocktokens.display.numbers import interval, percent, points, with_interval
from rocktokens.display.text import for_csv, visible
from rocktokens.errors import RocktokensError
from rocktokens.gradients.records import CONTRADICTED, INCONCLUSIVE, SUPPORTED, Claim, ClaimVerdict, GradientsRecord
from rocktokens.inference.proportions import clopper_pearson_interval
from rocktokens.knockout.records import KnockoutSweep
from rocktokens.rocks.records import FindRecord
from rocktokens.run_dir import RunDir
from rocktokens.studies.records import Comparison, StudyResult
from rocktokens.types import Interval, RockSet

RESULTS = Path(__file__).parent
STRUCTURE = ("latex_math", "markdown_whitespace", "discourse", "punctuation")
FOUND = ("rank", "token_id", "token", "category", "occurrences", "mean_kl", "score", "label", "held_out_label")
BANNED = ("verdict", "change", "change_low", "change_high", "q", "answers_changed", "lost_in_gold")
STAGES = ("gradients", "knockout")
"""Optional stages: without their records, their claims are left out."""
FROZEN = "rock freeze"
"""The arm that trains without the rocks."""


def main() -> None:
    """Print and write the claims of one pair."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=RunDir, help="folder of a run that `rocktokens run` has finished")
    parser.add_argument("--study", type=Path, help="folder of a finished study of the same pair")
    parser.add_argument("--name", help="of the CSV file to write")
    given = parser.parse_args()
    try:
        claims = [*run_claims(given.run)]
        if given.study is not None:
            claims += study_claims(StudyResult.load(given.study / "study.json"))
    except (RocktokensError, OSError) as error:
        parser.error(str(error))
    for own in claims:
        print(f"{own.name:10} {own.verdict:12} {own.claim}: {own.because}")
    for stage in (own for own in STAGES if not given.run.lists(f"{own}.json")):
        print(f"left out: what `rocktokens {stage} {given.run.path}` measures, which was not run")
    if given.name:
        write_claims(claims, RESULTS / f"{given.name}-claims.csv")
        write_rocks(given.run, RESULTS / f"{given.name}-rocks.csv")


def run_claims(run: RunDir) -> Iterator[Claim]:
    """Judge what a single run can tell."""
    rocks = RockSet.load(run.verified(run.rocks.name))
    found = FindRecord.load(run.verified("find.json"))
    yield few(rocks)
    yield stay(rocks)
    if run.lists(run.gradients.name):
        yield from GradientsRecord.load(run.verified(run.gradients.name)).claims
    if run.lists(run.knockout.name):
        yield neutral(KnockoutSweep.load(run.verified(run.knockout.name)))
    yield structure(rocks)
    yield choice(found)


def study_claims(result: StudyResult) -> list[Claim]:
    """Judge what freezing did, where the study has such an arm."""
    pairs = {own.kind: own for own in result.comparisons if (own.first, own.second) == (FROZEN, result.baseline)}
    return [free(pairs["equal_steps"], result), faster(pairs.get("steps_to_accuracy"), result)] if pairs else []


def side(interval: Interval | None, threshold: float) -> ClaimVerdict:
    """Say on which side of the threshold an interval lies; above it supports the claim."""
    if interval is None:
        return INCONCLUSIVE
    return SUPPORTED if interval[0] > threshold else CONTRADICTED if interval[1] < threshold else INCONCLUSIVE


def few(rocks: RockSet) -> Claim:
    """Do few types hold most of the loss?"""
    summary = rocks.summary
    intervals, vocabulary = summary["intervals"], summary["vocab_share"]
    verdict = side(intervals["kl_share"], 0.5) if vocabulary < 0.1 else CONTRADICTED
    tokens, kl = (with_interval(summary[name], intervals[name]) for name in ("token_share", "kl_share"))
    types = f"{len(rocks.tokens)} types, {percent(vocabulary)} of those that occur"
    because = f"{types}, are {tokens} of the tokens and hold {kl} of the kl"
    return Claim("few", "few types hold most of the loss that is left", because, verdict)


def stay(rocks: RockSet) -> Claim:
    """Did rocks keep their loss while the rest lost it?"""
    summary, intervals = rocks.summary, rocks.summary["intervals"]
    own, rest = intervals.get("kl_change_rocks"), intervals.get("kl_change_rest")
    claim = "the kl of rocks falls by less than that of other tokens"
    if own is None or rest is None:
        return Claim("stay", claim, "there are no two checkpoints to compare", INCONCLUSIVE)
    verdict = SUPPORTED if own[0] > rest[1] else CONTRADICTED if own[1] < rest[0] else INCONCLUSIVE
    because = (
        f"their kl changed by {with_interval(summary['kl_change_rocks'], own)} on the same tokens, that of the rest by "
        f"{with_interval(summary['kl_change_rest'], rest)}"
    )
    return Claim("stay", claim, because, verdict)


def neutral(sweep: KnockoutSweep) -> Claim:
    """Does the accuracy stay where a single rock is banned?"""
    tested, placebos = sweep.of_role("tested"), sweep.of_role("matched")
    count = sum(own.verdict == "neutral" for own in tested)
    changed = [own for own in tested if own.verdict in ("pillar", "stumbling")]
    corrected = sum(own.q is not None and own.q <= sweep.settings.alpha for own in changed)
    verdict = side(clopper_pearson_interval(count, len(tested), 0.05), 0.5)
    if verdict != SUPPORTED:
        most_change = side(clopper_pearson_interval(len(changed), len(tested), 0.05), 0.5) == SUPPORTED
        verdict = CONTRADICTED if most_change else INCONCLUSIVE
    of_placebos = sum(own.verdict in ("pillar", "stumbling") for own in placebos)
    because = (
        f"of {len(tested)} rocks banned one by one {count} are neutral within ±{100 * sweep.settings.margin:g} points, "
        f"{len(changed)} change the accuracy ({corrected} of them after correction) and the others are undecided, on "
        f"{sweep.settings.n_prompts} prompts; of {len(placebos)} equally frequent placebos {of_placebos} change it; "
        f"smallest loss detectable: {100 * sweep.detectable.single:.1f} points, "
        f"{100 * sweep.detectable.corrected:.1f} corrected"
    )
    return Claim("neutral", "banning a single rock changes nothing, for most rocks", because, verdict)


def structure(rocks: RockSet) -> Claim:
    """Are rocks structure rather than content?"""
    claim, total = "rocks are structure and discourse, not content", len(rocks.tokens)
    if not total:
        return Claim("structure", claim, "there are no rocks", INCONCLUSIVE)
    count = sum(token.category in STRUCTURE for token in rocks.tokens)
    ends = clopper_pearson_interval(count, total, 0.05)
    because = f"{count} of {total} rocks, {with_interval(count / total, ends)}, are in {', '.join(STRUCTURE)}"
    return Claim("structure", claim, because, side(ends, 0.5))


def choice(found: FindRecord) -> Claim:
    """Is what is left a choice among interchangeable tokens?"""
    claim = "most of the loss that is left is a choice among interchangeable tokens"
    if found.choice is None or found.choice.share is None:
        because = "no classes of interchangeable tokens were found, or the run was not scored with them"
        return Claim("choice", claim, because, INCONCLUSIVE)
    because = f"{with_interval(found.choice.share, found.choice.share_interval)} of the kl, by the classes found"
    return Claim("choice", claim, because, side(found.choice.share_interval, 0.5))


def free(own: Comparison, result: StudyResult) -> Claim:
    """Does freezing cost nothing?"""
    verdicts: dict[str, ClaimVerdict] = {"worse": CONTRADICTED, "equivalent": SUPPORTED, "better": SUPPORTED}
    collapsed = result.arm(FROZEN).collapsed
    runs = f"; {collapsed.count} of {collapsed.n_runs} runs collapsed" if collapsed and collapsed.count else ""
    difference = with_interval(own.difference, own.interval, points)
    because = f"{difference} points after {own.at:.0f} steps{runs}{could(own)}"
    verdict = verdicts.get(own.verdict, INCONCLUSIVE)
    return Claim("free", "leaving rocks out of the loss costs nothing", because, verdict)


def faster(own: Comparison | None, result: StudyResult) -> Claim:
    """Does freezing speed training up?"""
    claim = "leaving rocks out speeds training up"
    if own is None:
        return Claim("faster", claim, f"{result.baseline} gains nothing: there is no accuracy to reach", INCONCLUSIVE)
    if own.difference is None:
        is_lost = own.never[1] == len(result.arm(own.second).runs)
        because = f"no run of {own.second if is_lost else own.first} reaches {percent(own.at)}"
        return Claim("faster", claim, because, INCONCLUSIVE if is_lost else CONTRADICTED)
    verdicts: dict[str, ClaimVerdict] = {"worse": CONTRADICTED, "better": SUPPORTED}
    because = f"{with_interval(own.difference, own.interval, '{:+.0f}'.format)} steps to {percent(own.at)}"
    return Claim("faster", claim, because, verdicts.get(own.verdict, INCONCLUSIVE))


def could(own: Comparison) -> str:
    """Say what a study that decides nothing could have seen."""
    if own.verdict != "undecided" or own.detectable is None:
        return ""
    return f"; smallest effect detectable: {interval(own.detectable, points)} points"


def write_claims(claims: list[Claim], path: Path) -> None:
    """Write one row per claim."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("name", "claim", "verdict", "because"))
        rows.writerows((own.name, own.claim, own.verdict, own.because) for own in claims)


def write_rocks(run: RunDir, path: Path) -> None:
    """Write one row per rock, with what its ban did: Δ of the accuracy in points, and p corrected for all bans.

    The columns of a ban are empty where there was none, or its effect is not known.
    """
    is_swept = run.lists(run.knockout.name)
    tested = KnockoutSweep.load(run.verified(run.knockout.name)).of_role("tested") if is_swept else []
    bans = {own.ban.ids[0]: own for own in tested}
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(FOUND + BANNED)
        for own in RockSet.load(run.verified(run.rocks.name)).tokens:
            what = (own.rank, own.id, visible(own.text), own.category, own.freq, f"{own.mean_kl:.4g}")
            row = (*what, f"{own.score:.4g}", own.label, own.held_out_label)
            effect = ("",) * len(BANNED)
            if (ban := bans.get(own.id)) and ban.delta is not None and ban.interval is not None:
                change = (round(100 * value, 1) for value in (ban.delta, *ban.interval))
                q = None if ban.q is None else float(f"{ban.q:.2g}")
                effect = (ban.verdict, *change, q, ban.changes.n_prompts, ban.lost_in_gold)
            rows.writerow(map(for_csv, (*row, *effect)))


if __name__ == "__main__":
    main()
