"""The records that pass between stages: arrays with their shapes, no torch, no behaviour beyond reading and writing.

Shape legend used in names everywhere: R rollouts, T tokens (response positions, concatenated rollout after rollout),
V vocabulary, D student width, E teacher width, K top-k.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from rocktokens.errors import RocktokensError, TokenizerMismatchError

if TYPE_CHECKING:
    import pandas as pd

ROCKS_SCHEMA_VERSION = 1
Verdict = Literal["untested", "pillar", "stumbling", "neutral", "undecided"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question with a verifiable answer.

    Example: ``Prompt(id="wordmath-test-17", text="Ann has 3 apples …", answer="12")``.
    """

    id: str
    text: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One student completion, as sampled: the ids are the data and are never decoded and tokenised again.

    Example: a prompt of 40 ids answered by 3 tokens and the end token has ``token_ids.shape == (4,)``.
    """

    rollout_id: int
    prompt_id: str
    sample: int
    prompt_ids: np.ndarray
    """int32 (P,): the prompt as the model saw it, template included."""
    token_ids: np.ndarray
    """int32 (T,): the sampled response, the end token included when it was sampled."""
    logprobs: np.ndarray
    """float32 (T,): the sampler's log-probability of each id at temperature 1, before any ban."""
    policy_step: int
    """The training step whose student wrote it (0: before training)."""
    finished: bool
    """True when it ended with an end token, False when it ran into the length limit."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per-token quantities of METHOD 2, one entry per response token, numpy or torch alike, all (T,) float32."""

    kl: Any
    logp_student: Any
    logp_teacher: Any
    entropy_student: Any
    entropy_teacher: Any
    grad_norm: Any

    def items(self) -> Iterator[tuple[str, Any]]:
        """Column names with their arrays, in the order of the trace schema."""
        for column in fields(self):
            yield column.name, getattr(self, column.name)


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The weight of every response token of one update and the denominator of its loss."""

    weights: Any
    """float (T,): detached."""
    denominator: float
    """Response tokens of the whole update ("all"), or the sum of weights over the whole update ("kept")."""


@dataclass(frozen=True, slots=True)
class RockToken:
    """One ranked vocabulary type."""

    id: int
    text: str
    rank: int
    freq: int
    mean_kl: float
    score: float
    ccr: float | None
    score_ctx: float | None
    category: str
    score_interval: tuple[float, float] | None = None
    p_in_top_k: float | None = None
    verdict: Verdict = "untested"
    delta: float | None = None
    delta_interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class RockSet:
    """The rocks of a run in rank order, with everything needed to reproduce and to refuse to misuse them."""

    tokenizer_sha256: str
    """Over the sorted vocabulary; "" when the trace did not come with a tokenizer."""
    criterion: dict[str, Any]
    source: dict[str, Any]
    summary: dict[str, Any]
    tokens: list[RockToken] = field(default_factory=list)

    @property
    def ids(self) -> np.ndarray:
        """int64 (K,): rock ids in rank order."""
        return np.array([token.id for token in self.tokens], dtype=np.int64)

    def require_tokenizer(self, sha256: str) -> None:
        """Refuse to be used with another vocabulary than the one the rocks were found with."""
        if self.tokenizer_sha256 and self.tokenizer_sha256 != sha256:
            raise TokenizerMismatchError(
                f"the rocks were found with tokenizer {self.tokenizer_sha256[:12]}, this model's is {sha256[:12]}: "
                "token ids mean other things there; run `rocktokens find` on a trace of this model"
            )

    def save(self, path: str | Path) -> None:
        """Write rocks.json, byte for byte the same for the same content."""
        record = {"schema_version": ROCKS_SCHEMA_VERSION, **asdict(self)}
        text = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read rocks.json; a newer schema or a damaged file is refused by name."""
        path = Path(path)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RocktokensError(f"{path} does not exist: run `rocktokens find` first") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RocktokensError(f"{path} is not valid JSON ({error}): write it anew with `rocktokens find`") from None
        except OSError as error:
            raise RocktokensError(
                f"{path} cannot be read ({error.strerror}): give the rocks.json that `rocktokens find` wrote"
            ) from None
        if not isinstance(record, dict):
            raise RocktokensError(f"{path} is not a JSON object: write it anew with `rocktokens find`")
        version = record.pop("schema_version", None)
        if version != ROCKS_SCHEMA_VERSION:
            raise RocktokensError(
                f"{path} has schema_version {version!r}, this rocktokens reads {ROCKS_SCHEMA_VERSION}: "
                "use the version that wrote it, or write it anew with `rocktokens find`"
            )
        try:
            tokens = [_rock_token(entry) for entry in record.pop("tokens")]
            return cls(tokens=tokens, **record)
        except (KeyError, TypeError, AttributeError) as error:
            raise RocktokensError(
                f"{path} lacks fields of rocks.json or has others ({error}): write it anew with `rocktokens find`"
            ) from None

    def to_frame(self) -> "pd.DataFrame":
        """The tokens as a pandas frame, one row each, in rank order."""
        import pandas as pd

        return pd.DataFrame([asdict(token) for token in self.tokens], columns=[f.name for f in fields(RockToken)])


def _rock_token(entry: dict[str, Any]) -> RockToken:
    intervals = {name: tuple(entry[name]) for name in ("score_interval", "delta_interval") if entry.get(name)}
    token = RockToken(**{**entry, **intervals})
    if not math.isfinite(token.score):
        raise RocktokensError(f"rock {token.id} has score {token.score}: rocks.json is damaged, run `rocktokens find`")
    return token
