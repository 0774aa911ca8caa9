"""A teacher behind a vLLM server: exact last hidden states over HTTP, its LM head here, and so the full divergence.

The server is a stock ``vllm serve --runner pooling --convert embed`` (docs/howto/served-teacher.md). One that only
writes text gives the likeliest tokens instead, by ``served_likely.py``, which shares what is not about states.

1. A sequence is one request, many are asked at once: ids go out, bytes come back, 4 or 2 per number. What came must be
   one finite state per token, in the width of the head and the dtype that was asked for.
2. Before anything else the server is looked at (``open``). It must name the teacher among its models, split sample
   texts as the teacher's tokenizer does, and send states that the teacher's final norm can have made. They may not be
   rounded further than the config says.
3. The canary, a fixed text, has the log-probabilities of its tokens compared: asked twice at first, again after every
   batch, and with those that the run has noted (``require_noted``). A server that comes back with another model says
   nothing; only this notices.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rocktokens.config import Config, TeacherSection
from rocktokens.errors import RocktokensError
from rocktokens.models.distant import DistantModel
from rocktokens.models.fingerprints import SAMPLES, model_identity
from rocktokens.models.head import LMHead, lm_head
from rocktokens.models.head_file import HeadFile, read_head
from rocktokens.models.load import DTYPES, LoadedModel, end_ids, load_tokenizer, resolve_device
from rocktokens.rollouts.vllm_client import STATES, VERSIONS, ServerLostError, VllmClient
from rocktokens.run_dir import RunDir
from rocktokens.scoring.batch import RolloutBatch

CANARY_LENGTH = 64
NORM_GAP = 4e-3
"""How far states may be from ones that the final norm made: by rounding to bfloat16, and by what a norm adds to the
mean square before it divides, which shows where that is below 1e-3."""
SERVED = "served_teachers"
"""Entry of the manifest: by what a teacher is, how its states came and in what width its head is read, the canary's
log-probabilities at first use."""
POOLER = """--pooler-config '{"task": "token_embed", "use_activation": false}'"""


class ServedTeacher(DistantModel):
    """Asks a server, which it looks at first, for a row of numbers for every token of a sequence."""

    def __init__(self, described: Any, width: int, client: VllmClient, section: TeacherSection, name: str) -> None:
        """Ask nothing yet.

        Args:
            described: has the model's config and generation config, and its head where that is here.
            width: tokens of the model.
            client: of the server.
            section: of the config.
            name: of the model in ``models.teacher``.
        """
        super().__init__(described.config, described.generation_config, described.head)
        self.client, self.section, self.name = client, section, section.model or name
        self._canary_ids: list[int] = np.linspace(0, width - 1, CANARY_LENGTH).astype(int).tolist()
        self._first: torch.Tensor | None = None

    @property
    def packs(self) -> bool:
        """Sequences travel as they are."""
        return True

    @torch.inference_mode()
    def states(self, batch: RolloutBatch) -> torch.Tensor:
        """Ask for the rows of one batch, and bring them to where they are read."""
        return self.states_of([batch])[0].to(self.device)

    @torch.inference_mode()
    def states_of(self, batches: Sequence[RolloutBatch]) -> list[torch.Tensor]:
        """Ask for the rows of several batches at once; they are on the CPU."""
        sequences = [_sequences(batch) for batch in batches]
        found = iter(self.client.ask_all(self._persist, [ids for own in sequences for ids in own]))
        self._compare(self._canary())
        return [
            torch.cat([next(found) for _ in own])[batch.row_index_T.cpu()]
            for batch, own in zip(batches, sequences, strict=True)
        ]

    # The look at the server

    def open(self, tokenizer: Any) -> None:
        """Refuse a server that cannot be the teacher's."""
        self.context_length = self._require_name()
        for text in SAMPLES:
            expected, found = (
                tokenizer.encode(text, add_special_tokens=False),
                self.client.persist(lambda text=text: self.client.tokenize(self.name, text)),
            )
            if found != expected:
                raise RocktokensError(
                    f"{self.client.name} splits {text!r} as {found}, the tokenizer of models.teacher as {expected}: "
                    "serve the teacher of this run"
                )
        rows_LE = self._persist(self._canary_ids)
        self._require_own(rows_LE)
        self._first = self._logprobs(rows_LE)
        self._compare(self._canary())

    def _require_name(self) -> int | None:
        """Return how many tokens the server's model sees, if one has the teacher's name."""
        served = self.client.persist(self.client.models)
        found = next((own for own in served if own.id == self.name), None)
        if found is None:
            raise RocktokensError(
                f"{self.client.name} has {', '.join(repr(own.id) for own in served)}, not {self.name!r}: serve the "
                "teacher of this run, or set teacher.model to the name that the server has for it"
            )
        return found.max_model_len

    # The canary

    def _canary(self) -> torch.Tensor:
        return self._logprobs(self._persist(self._canary_ids))

    def _compare(self, found: torch.Tensor) -> None:
        assert self._first is not None  # of ``open``
        self._require_close(self._first, found, "what it was at first")

    def _require_close(self, before: torch.Tensor, now: torch.Tensor, what: str) -> None:
        gap = float((before - now).abs().max())
        if not gap <= self.section.max_gap:
            raise RocktokensError(
                f"{self.client.name} is not {what}: log-probabilities of a fixed text differ by {gap:.3g} nats "
                f"(teacher.max_gap = {self.section.max_gap:g}): serve the same model in the same way, or raise "
                "teacher.max_gap for one in bfloat16"
            )

    def require_noted(self, run: RunDir, config: Config) -> None:
        """Refuse another server's model than the one this run used before."""
        noted = run.manifest().get(SERVED, {}) if run.exists() else {}
        if before := noted.get(_noted_as(run, config)):
            assert self._first is not None
            try:
                noted_T = torch.tensor(before, dtype=self._first.dtype)
            except (TypeError, ValueError):
                noted_T = torch.empty(0)
            if noted_T.shape != self._first.shape:
                raise run.damaged("manifest.json", f"has {SERVED} that are no log-probabilities of the fixed text")
            self._require_close(noted_T, self._first, f"what the run {run.path} used before")

    def note(self, run: RunDir, config: Config) -> None:
        """Note in the manifest what the canary is, unless that is noted; needs the run's lock."""
        assert self._first is not None
        noted: Mapping[str, Any] = run.manifest().get(SERVED, {})
        own = {_noted_as(run, config): [float(value) for value in self._first]}
        if not own.keys() <= noted.keys():
            run.update_manifest(**{SERVED: {**noted, **own}})

    # Asking

    def _persist(self, ids: list[int]) -> torch.Tensor:
        return self.client.persist(lambda: self._ask(ids))

    # What its rows are

    @abstractmethod
    def _ask(self, ids: list[int]) -> torch.Tensor:
        """Return a row for each token of a sequence (L, E), what is said after it, as it was sent."""

    @abstractmethod
    def _require_own(self, rows_LE: torch.Tensor) -> None:
        """Refuse rows that the teacher of this run cannot have given."""

    @abstractmethod
    def _logprobs(self, rows_LE: torch.Tensor) -> torch.Tensor:
        """Return how likely each next token of the canary is; the same on every device."""


class ServedModel(ServedTeacher):
    """Asks for the states of a model whose head is here."""

    def __init__(self, file: HeadFile, client: VllmClient, section: TeacherSection, name: str) -> None:
        """Ask nothing yet; ``name`` is that of the model in ``models.teacher``."""
        super().__init__(file, file.head.out_features, client, section, name)
        self._norm = file.norm
        self._wire_dtype, self._width = DTYPES[section.dtype], file.head.in_features
        head = lm_head(self)
        rows = torch.tensor(self._canary_ids)
        bias_V = head.bias_V
        self._canary_head = LMHead(
            head.weight_VD[rows].float(), None if bias_V is None else bias_V[rows].float(), head.scale, head.softcap
        )

    def verify(self, input_ids: Sequence[int]) -> float | None:
        """Compare the states of these ids with the final norm; return how far they are from ones that it made."""
        return self._require_norm(self._persist(list(input_ids)))

    def _require_own(self, rows_LE: torch.Tensor) -> None:
        self._require_width_of_numbers(rows_LE)
        self._require_norm(rows_LE)

    def _require_width_of_numbers(self, h_LE: torch.Tensor) -> None:
        """Refuse states that a server computes in half width and sends as if they were whole."""
        if h_LE.dtype != torch.float32:
            return
        for name in ("bfloat16", "float16"):  # vLLM's own choice for a model of float32 may be either
            if torch.equal(h_LE, h_LE.to(DTYPES[name]).float()):
                raise RocktokensError(
                    f"{self.client.name} computes in {name}, but teacher.dtype is 'float32': start it with --dtype "
                    "float32, or with --dtype bfloat16 and set teacher.dtype = 'bfloat16', which the traces then say"
                )

    def _require_norm(self, h_LE: torch.Tensor) -> float | None:
        if self._norm is None:
            return None
        if not (gap := self._norm.gap(h_LE)) <= NORM_GAP:
            raise RocktokensError(
                f"{self.client.name} sends states that the final norm of models.teacher cannot have made (off by "
                f"{gap:.2g}): serve this very model, with {POOLER}"
            )
        return gap

    def _logprobs(self, rows_LE: torch.Tensor) -> torch.Tensor:
        """Return how likely each next token of the canary is among all of its tokens; the same on every device."""
        with torch.autocast("cpu", enabled=False):
            logp_LL = self._canary_head.logits(rows_LE.float()).log_softmax(dim=1)
        return logp_LL.diagonal(1)

    def _ask(self, ids: list[int]) -> torch.Tensor:
        body = {"model": self.name, "input": ids, "task": "token_embed", "use_activation": False}
        body |= {"encoding_format": "bytes", "embed_dtype": self.section.dtype, "endianness": "little"}
        pooled, content = self.client.pool(body)
        length, width = len(ids), self._width
        wrong = None
        if (pooled.embed_dtype, pooled.endianness) != (self.section.dtype, "little"):
            wrong = f"{pooled.endianness}-endian {pooled.embed_dtype} numbers: use {VERSIONS}"
        elif pooled.shape[0] != length:
            wrong = f"states of {pooled.shape[0]} tokens for {length}: start it with {POOLER}"
        elif pooled.shape[1] != width:
            wrong = f"states of width {pooled.shape[1]} for a head of width {width}: serve the teacher of this run"
        if wrong:
            raise RocktokensError(f"{self.client.name} sends {wrong}")
        if len(content) != length * width * self._wire_dtype.itemsize:
            raise ServerLostError(f"{self.client.name} sent an answer to /pooling that is not whole")
        h_LE = torch.frombuffer(bytearray(content), dtype=self._wire_dtype).view(length, width)
        if not h_LE.isfinite().all():
            raise RocktokensError(
                f"{self.client.name} sends states that are NaN or infinite: serve the teacher in float32 or bfloat16"
            )
        return h_LE


def load_served(config: Config, device: str) -> LoadedModel:
    """Read the teacher's head and tokenizer, and look at its server."""
    name, section = config.models.teacher, config.teacher
    assert section.url is not None  # the config refuses an engine without one
    file, tokenizer = read_head(name, DTYPES[config.models.dtype]), load_tokenizer(name)
    client = VllmClient(section.url, section.timeout, section.connections, STATES)
    return opened(ServedModel(file, client, section, name), tokenizer, name, device)


def opened(model: ServedTeacher, tokenizer: Any, name: str, device: str) -> LoadedModel:
    """Look at the server of a model, and bring what is here of it to the device."""
    model = model.to(resolve_device(device)).eval()
    model.open(tokenizer)
    return LoadedModel(model, tokenizer, name, end_ids(model, tokenizer))


def _sequences(batch: RolloutBatch) -> list[list[int]]:
    """Return prompts with responses, in the order of the row that ``row_index_T`` points into."""
    starts = batch.row.starts.cpu().numpy()
    return [own.tolist() for own in np.split(batch.row.input_ids_N.cpu().numpy(), starts[1:-1])]


def _noted_as(run: RunDir, config: Config) -> str:
    values = config.teacher.label.removeprefix("states ")
    head = "" if config.teacher.is_top_k else f", head in {config.models.dtype}"
    return f"{model_identity(config.models.teacher, run)} {values}{head}"
