"""A teacher behind a vLLM server that only writes text: of each token its likeliest replacements, and one tail.

The server is a stock ``vllm serve`` (docs/howto/served-teacher.md); nothing of the teacher is in memory here.

1. A sequence is one request for ``prompt_logprobs``: of every token the K likeliest at its place and the token itself,
   as JSON. The token comes as one of the K where it is among them, beside them where it is not. What is said of token
   i + 1 is row i, as a state would be: it was said after tokens 0 to i (``LikelyHead`` has the layout).
2. The tail has what the K leave of 1, but no more than all other tokens can have, of which none is likelier than the
   K-th, and no less than the written token where that is one of them. The server's numbers are float32: where less than
   ``RESOLUTION`` is left, the tail counts as that much or as those limits. The share of such places is counted
   (``tails``). More mass makes the divergence smaller: it stays a lower bound of the whole one. Elsewhere a tail Q is
   known to ``RESOLUTION``, and the divergence to P / Q times that.
3. The server is looked at as one that sends states (``served.py``): name, tokenizer, and a canary, whose tokens'
   log-probabilities are compared.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch

from rocktokens.config import Config, TeacherSection
from rocktokens.errors import RocktokensError
from rocktokens.models.head_file import ModelDescription, read_description
from rocktokens.models.likely_head import LARGEST_ID, LikelyHead
from rocktokens.models.load import LoadedModel, load_tokenizer
from rocktokens.rollouts.vllm_client import LIKELY, Logprob, VllmClient
from rocktokens.scoring.batch import RolloutBatch
from rocktokens.scoring.checks import TAIL_REMEDY, require_finite_divergence
from rocktokens.scoring.served import ServedTeacher, opened

RESOLUTION = 2.0**-20
"""What a sum of float32 probabilities is known to: a few roundings of numbers near 1."""
RULED_OUT = -9999.0
"""What vLLM writes for minus infinity."""
EXCESS = 1e-3
"""By how much probabilities may sum to more than 1: what is not normalised does by far more."""


@dataclass(frozen=True, slots=True)
class Tails:
    """What is known of the tails of some response tokens."""

    tokens: int = 0
    unresolved: int = 0
    """Where less than ``RESOLUTION`` is left to the tail."""
    mass: float = 0.0
    """Sum of the tails' probabilities."""

    def __add__(self, other: "Tails") -> "Tails":
        return Tails(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Tails") -> "Tails":
        return Tails(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mean_mass(self) -> float:
        """The teacher's probability of the tail, on average."""
        return self.mass / max(self.tokens, 1)

    @property
    def unresolved_share(self) -> float:
        """Share of the tokens where the tail is too small to be told from nothing."""
        return self.unresolved / max(self.tokens, 1)


class ServedLikely(ServedTeacher):
    """Asks for the likeliest tokens of a model of which nothing is here."""

    def __init__(self, description: ModelDescription, client: VllmClient, section: TeacherSection, name: str) -> None:
        """Ask nothing yet; ``name`` is that of the model in ``models.teacher``."""
        width = description.config.get_text_config().vocab_size
        super().__init__(description, width, client, section, name)
        if not section.top_k <= width <= LARGEST_ID:
            raise RocktokensError(
                f"teacher.top_k = {section.top_k}, and models.teacher = {name!r} has {width} tokens: ask for no more"
            )
        self.likely_head = self._head = LikelyHead(width, section.top_k)
        self.tails = Tails()
        """Of all response tokens asked for so far."""

    def open(self, tokenizer: Any) -> None:
        """Refuse a server that cannot be the teacher's; it writes one token of its own after every sequence."""
        super().open(tokenizer)
        if self.context_length is not None:
            self.context_length -= 1

    @torch.inference_mode()
    def states_of(self, batches: Sequence[RolloutBatch]) -> list[torch.Tensor]:
        """Ask for the rows of several batches at once, and count their tails; they are on the CPU.

        A response token that the teacher rules out is refused: its divergence is infinite, which no tail shows.
        """
        found = super().states_of(batches)
        for rows_TE in found:
            is_ruled_out_T = self._head.read(rows_TE).written_N <= RULED_OUT
            require_finite_divergence(is_ruled_out_T, torch.arange(len(rows_TE)), TAIL_REMEDY)
        self.tails = sum(map(self._tails, found), self.tails)
        return found

    def verify(self, input_ids: Sequence[int]) -> float | None:
        """Ask for these ids: there is no head whose logits could be another's."""
        self._persist(list(input_ids))

    def _tails(self, rows_TE: torch.Tensor) -> Tails:
        likely = self._head.read(rows_TE)
        mass_T = likely.tail_N.double().exp()
        left_T = 1.0 - likely.logp_NK.double().exp().sum(dim=1)
        unresolved = int((left_T < RESOLUTION).sum()) if self._head.k < self._head.width else 0
        return Tails(len(rows_TE), unresolved, float(mass_T.sum()))

    # Asking

    def _ask(self, ids: list[int]) -> torch.Tensor:
        body = {"model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": self._head.k}
        said = self.client.judge(body)
        if len(said) != len(ids):
            raise RocktokensError(
                f"{self.client.name} gives log-probabilities for {len(said)} tokens of {len(ids)}: serve the teacher "
                "of this run with vLLM"
            )
        rows_LE = np.full((len(ids), self._head.row_width), np.nan, dtype=np.float32)
        for place, own in enumerate(ids[1:]):  # the last row has no token to be about
            rows_LE[place] = self._row(own, said[place + 1] or {})
        return torch.from_numpy(rows_LE)

    def _row(self, written: int, said: dict[int, Logprob]) -> np.ndarray:
        """Lay out what is said in the place of one token."""
        k, width, logps = self._head.k, self._head.width, {id_: own.logprob for id_, own in said.items()}
        if written not in logps or len(logps) not in (k, k + 1):
            raise RocktokensError(
                f"{self.client.name} gives {len(logps)} log-probabilities where token {written} was written, not the "
                f"{k} likeliest and its own: serve the teacher of this run with vLLM, started with --max-logprobs {k} "
                "or more"
            )
        values = np.array([*logps.values()])
        if not np.isfinite(values).all() or values.max() > EXCESS or not 0 <= min(logps) <= max(logps) < width:
            raise RocktokensError(
                f"{self.client.name} gives log-probabilities that are none (from {values.min():g} to {values.max():g}, "
                f"of ids up to {max(logps)} for {width} tokens): serve the teacher of this run, in float32 or bfloat16"
            )
        is_named = len(logps) == k
        named = sorted((own for own in logps.items() if is_named or own[0] != written), key=_likeliest_first)
        ids_K, logp_K = (np.array(column) for column in zip(*named, strict=True))
        outside = -np.inf if is_named else logps[written]
        left = 1.0 - np.exp(logp_K).sum()
        if left < -EXCESS or outside > logp_K[-1] + self.section.max_gap:
            raise RocktokensError(
                f"{self.client.name} gives other numbers than the log-probabilities of the {k} likeliest tokens "
                f"(together {1 - left:.4g}): serve the teacher without --logprobs-mode"
            )
        most = (width - k) * np.exp(logp_K[-1])
        tail = max(min(max(left, RESOLUTION), most), np.exp(outside))
        logp_K[logp_K <= RULED_OUT] = -np.inf
        with np.errstate(divide="ignore"):  # of all tokens, none is left
            return np.concatenate([ids_K, logp_K, [np.log(tail), logps[written]]])

    # The look at the server

    def _require_own(self, rows_LE: torch.Tensor) -> None:
        """Nothing in a row tells one model from another; the canary does from now on."""

    def _logprobs(self, rows_LE: torch.Tensor) -> torch.Tensor:
        return self._head.read(rows_LE[:-1]).written_N


def load_served_likely(config: Config, device: str) -> LoadedModel:
    """Read the teacher's config and tokenizer, and look at its server."""
    name, section = config.models.teacher, config.teacher
    assert section.url is not None  # the config refuses an engine without one
    description, tokenizer = read_description(name), load_tokenizer(name)
    client = VllmClient(section.url, section.timeout, section.connections, LIKELY)
    return opened(ServedLikely(description, client, section, name), tokenizer, name, device)


def _likeliest_first(named: tuple[int, float]) -> tuple[float, int]:
    """Order ids with their log-probabilities; of equal ones the smaller id comes first."""
    return -named[1], named[0]
