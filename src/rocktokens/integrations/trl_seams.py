"""The private parts of TRL that the adapter touches, listed and checked: they move from release to release.

1. TRL is installed, in a version the adapter is tested with.
2. Every function the adapter overrides, calls or stands in for has the parameters it had in that version.
3. ``through_heads`` is the one place where TRL's behaviour is changed: while TRL computes a loss, a function of ours
   gets the hidden states, heads and scales as TRL has worked them out, in the place of the one that sums over tokens.
"""

import importlib
import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import metadata
from operator import attrgetter
from types import ModuleType
from typing import Any, Self

import torch

from rocktokens.config import Divergence
from rocktokens.errors import RocktokensError
from rocktokens.models.head import LMHead
from rocktokens.policies import Coarse, Term, term_arguments
from rocktokens.scoring.divergence import token_scores, weighted_kl
from rocktokens.scoring.top_tokens import Top, likely_tokens
from rocktokens.types import TokenScores

TESTED = "1.16"
MODULE = "trl.trainer.distillation_trainer"
INSTALL = "pip install 'rocktokens[trl]'"
LOSS = "_chunked_divergence_loss"
SEAMS = {
    LOSS: (
        "student_hidden_states teacher_hidden_states student_lm_head_weight teacher_lm_head_weight completion_mask "
        "beta num_items_in_batch student_lm_head_bias teacher_lm_head_bias student_logit_scale teacher_logit_scale "
        "student_final_logit_softcapping teacher_final_logit_softcapping temperature"
    ),
    "ChunkedDivergenceFunction.forward": (
        "ctx student_hidden student_weight student_bias teacher_hidden teacher_weight teacher_bias beta temperature "
        "student_logit_scale student_final_logit_softcapping teacher_logit_scale teacher_final_logit_softcapping"
    ),
    "DistillationTrainer._compute_loss": "self unwrapped_student inputs num_items_in_batch",
    "DistillationTrainer._generate_and_score_completions": "self inputs",
    "DistillationTrainer.training_step": "self model inputs num_items_in_batch",
    "_ForwardRedirection.__call__": "self wrapper_module original_module method args kwargs",
    "split_tensor_dict": "tensor_dict num_chunks",
    "_use_triton": "device",
}
"""Names in TRL's module, with their parameters in order."""
LIKELY_CHUNK = 1024
"""Rows whose logits are in memory at once while the likeliest tokens are found."""
HEAD_PARTS = ("lm_head_weight", "lm_head_bias", "logit_scale", "final_logit_softcapping")
"""The fields of ``LMHead``, as TRL names them."""

LossParts = tuple[Any, Any, torch.Tensor]
"""What TRL's loss function returns: the loss, the summed entropy and the number of tokens."""
PerTokenLoss = Callable[["HeadInputs"], LossParts]


class MissingTRLError(RocktokensError, ImportError):
    """TRL is not installed."""


class UntestedTRLError(RocktokensError):
    """TRL is installed, but not as the adapter knows it."""


def require_tested_trl() -> ModuleType:
    """Return TRL's module, or refuse in one sentence that says which version is installed and which is needed."""
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise MissingTRLError(f"RockDistillationTrainer needs TRL, which is not installed: {INSTALL}") from None
    require_version(version)
    module = importlib.import_module(MODULE)
    require_seams(module, version)
    return module


def require_version(version: str) -> None:
    """Refuse a TRL version whose private parts are untested."""
    if not f"{version}.".startswith(f"{TESTED}."):
        raise UntestedTRLError(
            f"TRL {version} is installed, but RockDistillationTrainer is tested with TRL {TESTED}.x only: {INSTALL}"
        )


def require_seams(module: Any, version: str) -> None:
    """Refuse a TRL of a tested version whose functions differ, patched or rebuilt."""
    for name, parameters in SEAMS.items():
        found = _parameters(module, name)
        if found != parameters:
            raise UntestedTRLError(
                f"TRL {version} has {name}({found}), but RockDistillationTrainer is tested with that of TRL "
                f"{TESTED}.x, {name}({parameters}): reinstall it with {INSTALL}"
            )
    if LOSS not in module.DistillationTrainer._compute_loss.__code__.co_names:
        raise UntestedTRLError(
            f"TRL {version} does not compute its loss with {LOSS}, as the TRL {TESTED}.x does that "
            f"RockDistillationTrainer is tested with: reinstall it with {INSTALL}"
        )


def _parameters(module: Any, name: str) -> str:
    try:
        return " ".join(inspect.signature(attrgetter(name)(module)).parameters)
    except (AttributeError, TypeError, ValueError):
        return ""


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """What TRL has in hand when it is about to compute the loss of one micro-batch; N rows, padding included."""

    h_s_ND: torch.Tensor
    h_t_NE: torch.Tensor
    student: LMHead
    teacher: LMHead
    valid_N: torch.Tensor
    """Where there is a response token; row i is the state that predicts token i."""
    beta: float
    num_items: Any
    """What the loss is divided by on this process."""
    temperature: float

    @classmethod
    def of(cls, loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Self:
        """Read a call of TRL's loss function."""
        call = inspect.signature(loss).bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        student, teacher = (
            LMHead(*(given[f"{side}_{part}"] for part in HEAD_PARTS)) for side in ("student", "teacher")
        )
        return cls(
            given["student_hidden_states"].flatten(0, 1),
            given["teacher_hidden_states"].flatten(0, 1),
            student,
            teacher,
            given["completion_mask"].flatten() != 0,
            given["beta"],
            given["num_items_in_batch"],
            given["temperature"],
        )

    def divergence(self, rows: Any, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """TRL's divergence of some rows, differentiable in the student, and the student's entropy, which is not."""
        from trl.trainer.distillation_trainer import ChunkedDivergenceFunction

        student, teacher = self.student, self.teacher
        return ChunkedDivergenceFunction.apply(
            self.h_s_ND[rows],
            student.weight_VD,
            student.bias_V,
            self.h_t_NE[rows],
            teacher.weight_VD,
            teacher.bias_V,
            beta,
            self.temperature,
            student.scale,
            student.softcap,
            teacher.scale,
            teacher.softcap,
        )  # pyright: ignore[reportReturnType]

    def rows_of(self, kept_N: torch.Tensor) -> slice | torch.Tensor:
        """The rows that go through the heads: as many as TRL would take where none is left out, else the kept ones.

        Without Triton TRL takes the padding too. A product of other rows is rounded otherwise, so we do as it does.
        """
        from trl.trainer.distillation_trainer import _use_triton

        drops = bool((self.valid_N & ~kept_N).any())
        return kept_N if drops or _use_triton(self.h_s_ND.device) else slice(None)

    def coarse_sum(
        self,
        rows_N: torch.Tensor,
        token_ids_N: torch.Tensor,
        weights_N: torch.Tensor,
        divergence: Divergence,
        term: Coarse,
    ) -> tuple[torch.Tensor, TokenScores]:
        """Σ weight · (decision + λ · choice) of some rows, differentiable in the student, and their scores."""
        h_s_ND, h_t_NE = self.h_s_ND[rows_N], self.h_t_NE[rows_N]
        arrays = (h_s_ND, self.student, h_t_NE, self.teacher, token_ids_N[rows_N], weights_N[rows_N])
        return weighted_kl(*arrays, 1.0, divergence, self.temperature, **term_arguments(term))

    @torch.no_grad()
    def scores(
        self,
        rows_N: torch.Tensor,
        token_ids_N: torch.Tensor,
        divergence: Divergence,
        term: Term | None = None,
        extras: Collection[str] = (),
    ) -> TokenScores:
        """Our scores of some rows, at TRL's temperature; with the choice where the term has classes."""
        return token_scores(
            self.h_s_ND[rows_N].detach(),
            self.student,
            self.h_t_NE[rows_N],
            self.teacher,
            token_ids_N[rows_N],
            divergence,
            self.temperature,
            extras=extras,
            classes=term.classes if isinstance(term, Coarse) else None,
        )

    def likely(self, rows_N: torch.Tensor, token_ids_N: torch.Tensor, k: int) -> Top:
        """The token that was written and the ``k`` likeliest of both models at some rows, at TRL's temperature."""
        states = (self.h_s_ND[rows_N], self.student, self.h_t_NE[rows_N], self.teacher)
        return likely_tokens(*states, token_ids_N[rows_N], k, self.temperature, LIKELY_CHUNK)


_computes: dict[int, PerTokenLoss] = {}
"""What stands in for TRL's loss function now, by thread."""
_change = threading.Lock()


@contextmanager
def through_heads(module: Any, compute: PerTokenLoss) -> Iterator[None]:
    """In this block and thread TRL's loss of a micro-batch is what ``compute`` makes of its heads' inputs.

    Trainers in other threads keep TRL's own, or theirs. A block in which TRL did not ask for its loss is an error: it
    has computed one without weights.
    """
    asked = False

    def noting(heads: HeadInputs) -> LossParts:
        nonlocal asked
        asked = True
        return compute(heads)

    thread = threading.get_ident()
    with _change:
        assert thread not in _computes, "blocks do not nest"
        if not _computes:
            setattr(module, LOSS, _by_thread(getattr(module, LOSS)))
        _computes[thread] = noting
    try:
        yield
    finally:
        with _change:
            del _computes[thread]
            if not _computes:
                setattr(module, LOSS, getattr(module, LOSS).__wrapped__)
    if not asked:
        raise UntestedTRLError(
            "TRL computed a loss in a thread of its own, where weights do not reach it: launch one process per device "
            "(accelerate launch)"
        )


def _by_thread(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def loss(*args: Any, **kwargs: Any) -> Any:
        compute = _computes.get(threading.get_ident())
        return compute(HeadInputs.of(stock, *args, **kwargs)) if compute else stock(*args, **kwargs)

    return loss
