"""The demo: a whole run on the embedded pair, plus accuracies and a short study of what bypassing the rocks gains.

1. Distil, on-policy, every token traced; replay one probe set through the checkpoints and find the rocks.
2. Who owns the gradient? Do the rocks matter, if each of them is banned, and placebos too?
3. How good are teacher and student, and did accuracy suffer on the way?
4. What if the rocks are not trained at all, or only the choice within classes of interchangeable tokens is left out?
   A short study: all tokens, all but the rocks, all but as many others, all but the choice. The classes are candidates
   found in the replay; no ban has tested them.
5. All of it on one page, report.html.

Every stage leaves its files in the run directory; a second call makes only what is missing.
"""

import json
import tomllib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rocktokens.classes import TokenClasses
from rocktokens.config import Config
from rocktokens.display.rocks import why_none
from rocktokens.errors import RocktokensError
from rocktokens.evaluation.evaluate import evaluate
from rocktokens.evaluation.records import EvaluationRecord
from rocktokens.gradients.records import GradientsRecord
from rocktokens.knockout.records import KnockoutSweep
from rocktokens.pipeline import Skipped, Stage, run
from rocktokens.progress import SILENT, Progress
from rocktokens.recipes import shipped
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import CLASSES, StudyConfig, make_study
from rocktokens.studies.records import StudyResult
from rocktokens.types import RockSet

if TYPE_CHECKING:
    import pandas as pd

EVALUATED = ("teacher", "all")
STUDY_SEEDS = 2
LAST_STEPS = 5
"""One step has few rollouts; the last steps together tell where the loss ended."""


@dataclass(frozen=True, slots=True)
class Movement:
    """What training did to the loss: on-policy at its start and end, and on the replayed rollouts."""

    on_policy_kl_first: float
    on_policy_kl_last: float
    prompts: str
    """Which prompts the rest was measured on."""
    unmoved_rocks: int
    """Rocks that are stuck on both halves of the prompts; the shares below are theirs."""
    unmoved_token_share: float
    unmoved_kl_share: float
    unmoved_digit_token_share: float


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything the demo measured."""

    directory: str
    evaluations: list[EvaluationRecord]
    """The teacher, then the student as it trained."""
    rocks: RockSet
    movement: Movement
    types: "pd.DataFrame"
    """Every type with its kl before and after training."""
    gradients: GradientsRecord
    knockout: KnockoutSweep
    classes: TokenClasses
    """Those that the study used."""
    study: StudyResult
    report: str

    def to_record(self) -> dict[str, Any]:
        """Return what ``rocktokens demo --json`` prints."""
        names = ("name", "accuracy", "wilson_interval", "n_prompts")
        sweep = self.knockout
        return {
            "directory": self.directory,
            "evaluations": [{name: getattr(own, name) for name in names} for own in self.evaluations],
            "movement": asdict(self.movement),
            "rocks": {"summary": self.rocks.summary, "top": [token.text for token in self.rocks.tokens]},
            "gradients": {"claims": [claim.to_record() for claim in self.gradients.claims]},
            "knockout": {name: asdict(sweep)[name] for name in ("baseline", "counts", "noise")},
            "classes": [list(own.texts) for own in self.classes],
            "study": self.study.to_record(),
            "report": self.report,
        }


def run_demo(config: Config, progress: Progress = SILENT) -> DemoResult:
    """Make what is missing of the demo and read back what it measured."""
    also = (
        Stage("evaluate", "measure accuracy on new problems", _evaluate),
        Stage("study", "bypass the rocks", _study),
    )
    made = run(config, progress, also)
    directory = RunDir(config.run.directory)
    rocks = RockSet.load(directory.verified(directory.rocks.name))
    if made.skipped:
        raise RocktokensError(
            f"the demo ends here, without rocks to ban or to bypass ({why_none(rocks)}); what was measured: "
            f"{made.report}"
        )
    movement, types = measure_movement(directory, rocks)
    study = RunDir(directory.path / "study")
    return DemoResult(
        directory=made.directory,
        evaluations=evaluate(directory, config, EVALUATED),
        rocks=rocks,
        movement=movement,
        types=types,
        gradients=GradientsRecord.load(directory.verified(directory.gradients.name)),
        knockout=KnockoutSweep.load(directory.verified(directory.knockout.name)),
        classes=TokenClasses.load(study.classes) if study.lists(study.classes.name) else TokenClasses([]),
        study=StudyResult.load(study.verified("study.json")),
        report=made.report,
    )


def _evaluate(directory: RunDir, config: Config, progress: Progress) -> bool:
    before = directory.files(directory.evaluations.name)
    evaluate(directory, config, EVALUATED, progress)
    return directory.files(directory.evaluations.name) != before


def _study(directory: RunDir, config: Config, progress: Progress) -> bool | Skipped:
    if not (rocks := RockSet.load(directory.verified(directory.rocks.name))).tokens:
        return Skipped(why_none(rocks))
    with progress.status("loading"):
        from rocktokens.report.charts.figures import draw_stale
        from rocktokens.studies.study import run_study
    study = bypass_study(config, directory, _has_classes(directory, progress))
    own = RunDir(study.study.directory)
    before = own.files()
    run_study(study, progress, draw_stale)
    return own.files() != before


def _has_classes(directory: RunDir, progress: Progress) -> bool:
    """Give the candidates for classes to the study, once; False where there are none.

    The study keeps those it began with: bans may judge those of the run later.
    """
    study = RunDir(directory.path / "study")
    if study.lists(study.classes.name):
        return True
    if directory.lists(directory.classes.name):
        found = TokenClasses.load(directory.verified(directory.classes.name))
        if found.unrefuted.groups:
            study.commit(study.classes.name, found.save)
            return True
    progress.note("no classes of interchangeable tokens: the study goes without the arm that leaves out their choice")
    return False


def bypass_study(config: Config, directory: RunDir, has_classes: bool) -> StudyConfig:
    """Make the demo's study: no larger than the demo itself, with its rocks, on seeds that did not select them.

    With ``has_classes``, its folder has a classes.json; else no arm uses classes.
    """
    record = tomllib.loads(shipped("demo-study"))
    base = config.model_dump(mode="json", exclude_none=True, exclude={"run", "policy"})
    for section, limits in record["base"].items():
        base[section] |= {key: min(base[section][key], limit) for key, limit in limits.items()}
    record["base"] = base
    record["study"] = {
        "directory": str(directory.path / "study"),
        "rocks": str(directory.rocks),
        "seeds": [config.run.seed + 1 + index for index in range(STUDY_SEEDS)],
        "evaluate_every": base["training"]["max_steps"],
    }
    if has_classes:
        record["study"]["classes"] = str(directory.path / "study" / directory.classes.name)
    else:
        record["arm"] = [arm for arm in record["arm"] if arm["policy"].get("classes") != CLASSES]
    return make_study(record, "demo")


def measure_movement(directory: RunDir, rocks: RockSet) -> "tuple[Movement, pd.DataFrame]":
    """Measure what training did to the loss, and to each type.

    The types are measured on the prompts that did not select the rocks, where there are any.
    """
    from rocktokens.rocks.find import type_table
    from rocktokens.rocks.sums import prompts_of, split_prompts
    from rocktokens.traces.store import TraceStore

    kl = [json.loads(line)["kl"] for line in directory.logs.read_text(encoding="utf-8").splitlines()]
    last = kl[-LAST_STEPS:]
    store, reference, baseline = TraceStore(directory), rocks.criterion["reference"], rocks.criterion["baseline"]
    split = split_prompts(prompts_of(store.table(reference)), rocks.criterion["split"], rocks.criterion["seed"])
    types = type_table(store, reference, baseline, split.measuring).assign(
        token_share=lambda frame: frame["freq"] / frame["freq"].sum(),
        kept=lambda frame: frame["mean_kl"] / frame["mean_kl_baseline"].where(frame["mean_kl_baseline"] > 0),
    )
    token_share, kl_mass = types["token_share"].to_numpy(), (types["freq"] * types["mean_kl"]).to_numpy()
    unmoved = np.isin(types["token_id"].to_numpy(), [token.id for token in rocks.tokens if token.never_learned])
    digits = unmoved & (types["category"].to_numpy() == "digit")
    movement = Movement(
        on_policy_kl_first=kl[0],
        on_policy_kl_last=sum(last) / len(last),
        prompts="all prompts" if split.measuring is None else "held-out prompts",
        unmoved_rocks=int(unmoved.sum()),
        unmoved_token_share=float(token_share[unmoved].sum()),
        unmoved_kl_share=float(kl_mass[unmoved].sum() / kl_mass.sum()),
        unmoved_digit_token_share=float(token_share[digits].sum()),
    )
    return movement, types
