"""rocktokens: find, test and bypass the tokens that on-policy distillation cannot move (arXiv 2605.09253).

Names are resolved on first use, so that statistics, policies and config work without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME_OF = {
    "Ban": "rocktokens.knockout.records",
    "ControlSet": "rocktokens.types",
    "KnockoutSweep": "rocktokens.knockout.records",
    "Prompt": "rocktokens.types",
    "Rollout": "rocktokens.types",
    "RockSet": "rocktokens.types",
    "TokenScores": "rocktokens.types",
    "TraceStore": "rocktokens.traces.store",
    "TraceWriter": "rocktokens.traces.writer",
    "evaluate": "rocktokens.evaluation.evaluate",
    "find_rocks": "rocktokens.rocks.find",
    "gradient_shares": "rocktokens.gradients.parameter_space",
    "knockout_sweep": "rocktokens.knockout.sweep",
    "make_policy": "rocktokens.policies",
    "match_controls": "rocktokens.rocks.controls",
    "paired_occurrences": "rocktokens.rocks.persistence",
    "token_scores": "rocktokens.scoring.divergence",
    "weighted_kl": "rocktokens.scoring.divergence",
}
__all__ = [
    "Ban",
    "ControlSet",
    "KnockoutSweep",
    "Prompt",
    "RockSet",
    "Rollout",
    "TokenScores",
    "TraceStore",
    "TraceWriter",
    "__version__",
    "evaluate",
    "find_rocks",
    "gradient_shares",
    "knockout_sweep",
    "make_policy",
    "match_controls",
    "paired_occurrences",
    "token_scores",
    "weighted_kl",
]

if TYPE_CHECKING:
    from rocktokens.evaluation.evaluate import evaluate
    from rocktokens.gradients.parameter_space import gradient_shares
    from rocktokens.knockout.records import Ban, KnockoutSweep
    from rocktokens.knockout.sweep import knockout_sweep
    from rocktokens.policies import make_policy
    from rocktokens.rocks.controls import match_controls
    from rocktokens.rocks.find import find_rocks
    from rocktokens.rocks.persistence import paired_occurrences
    from rocktokens.scoring.divergence import token_scores, weighted_kl
    from rocktokens.traces.store import TraceStore
    from rocktokens.traces.writer import TraceWriter
    from rocktokens.types import ControlSet, Prompt, RockSet, Rollout, TokenScores


def __getattr__(name: str) -> Any:
    """Import a public name from its home module when it is first asked for (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rocktokens' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
