"""rocktokens: find, test and bypass the tokens that hold the loss on-policy distillation leaves behind.

The paper is arXiv 2605.09253.

Names are resolved on first use, so that statistics, policies and config work without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocktokens.classes import TokenClasses as TokenClasses
    from rocktokens.config import load_config as load_config
    from rocktokens.evaluation.evaluate import evaluate as evaluate
    from rocktokens.gradients.parameter_space import gradient_shares as gradient_shares
    from rocktokens.gradients.records import GradientsRecord as GradientsRecord
    from rocktokens.knockout.records import Ban as Ban
    from rocktokens.knockout.records import KnockoutSweep as KnockoutSweep
    from rocktokens.knockout.sweep import knockout_sweep as knockout_sweep
    from rocktokens.policies import make_policy as make_policy
    from rocktokens.replay.replay import replay as replay
    from rocktokens.report.build import build_report as build_report
    from rocktokens.report.views.run_view import RunView as RunView
    from rocktokens.rocks.classes import find_classes as find_classes
    from rocktokens.rocks.controls import match_controls as match_controls
    from rocktokens.rocks.find import find_rocks as find_rocks
    from rocktokens.rocks.persistence import paired_occurrences as paired_occurrences
    from rocktokens.rocks.records import FindRecord as FindRecord
    from rocktokens.scoring.divergence import token_scores as token_scores
    from rocktokens.scoring.divergence import weighted_kl as weighted_kl
    from rocktokens.studies.study import run_study as run_study
    from rocktokens.traces.store import TraceStore as TraceStore
    from rocktokens.traces.writer import TraceWriter as TraceWriter
    from rocktokens.training.loop import distill as distill
    from rocktokens.types import ControlSet as ControlSet
    from rocktokens.types import Message as Message
    from rocktokens.types import Prompt as Prompt
    from rocktokens.types import RockSet as RockSet
    from rocktokens.types import Rollout as Rollout
    from rocktokens.types import TokenScores as TokenScores

__version__ = "0.1.0"

_NAMES_IN = {
    "classes": ("TokenClasses",),
    "config": ("load_config",),
    "evaluation.evaluate": ("evaluate",),
    "gradients.parameter_space": ("gradient_shares",),
    "gradients.records": ("GradientsRecord",),
    "knockout.records": ("Ban", "KnockoutSweep"),
    "knockout.sweep": ("knockout_sweep",),
    "policies": ("make_policy",),
    "replay.replay": ("replay",),
    "report.build": ("build_report",),
    "report.views.run_view": ("RunView",),
    "rocks.classes": ("find_classes",),
    "rocks.controls": ("match_controls",),
    "rocks.find": ("find_rocks",),
    "rocks.persistence": ("paired_occurrences",),
    "rocks.records": ("FindRecord",),
    "scoring.divergence": ("token_scores", "weighted_kl"),
    "studies.study": ("run_study",),
    "traces.store": ("TraceStore",),
    "traces.writer": ("TraceWriter",),
    "training.loop": ("distill",),
    "types": ("ControlSet", "Message", "Prompt", "RockSet", "Rollout", "TokenScores"),
}
_HOME_OF = {name: f"{__name__}.{module}" for module, names in _NAMES_IN.items() for name in names}
__all__ = [*_HOME_OF, "__version__"]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name from its home module when it is first asked for (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rocktokens' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    """List the public names, whether they are resolved yet or not."""
    return sorted(__all__)
