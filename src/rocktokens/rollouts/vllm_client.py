"""Talking to a vLLM server: one call for one answer, checked, with a deadline.

1. A server that is busy (429, 503) is asked again, later each time, until ``timeout`` has passed.
2. One that cannot be reached, or sends its answer too slowly or not whole, is lost: whoever asked must assume that it
   comes back with other weights, and starts over.
3. ``persist`` starts over, later each time, until ``timeout`` has passed or a server that is there has failed
   ``MOST_FAILURES`` times.
4. Everything else it refuses or says wrongly is a sentence for the user.

The endpoints are those of ``vllm serve``, with ``VLLM_SERVER_DEV_MODE=1`` for the ones that load weights and
``--runner pooling`` for the one that gives hidden states. They ask for no password: a server belongs on this machine or
in a private network.
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import httpx2
from pydantic import BaseModel, Field, ValidationError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
    wait_random_exponential,
)

from rocktokens.display.text import legible
from rocktokens.errors import RocktokensError
from rocktokens.interrupts import Terminated

BUSY = (429, 503)
FAILED = 500
"""From here on a status says that the server failed, not that it was asked wrongly."""
LONGEST_PAUSE = 10.0
SAID = 200
"""Characters that are shown of what a server says."""
MOST_FAILURES = 3
"""How often a server that answers, but wrongly, is asked the same."""
VERSIONS = "vLLM 0.26 to 0.32"
Answer = TypeVar("Answer", bound=BaseModel)
Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Use:
    """What a server is used for: how sentences name what is wrong with it."""

    section: Literal["rollouts", "teacher"]
    """Of the config."""
    model: str
    """What it serves."""
    started: str
    """How it is to be started, where an endpoint is missing."""
    room: str
    """What it must have room for."""


ROLLOUTS = Use("rollouts", "student", "VLLM_SERVER_DEV_MODE=1", "its prompts and answers")
STATES = Use("teacher", "teacher", "--runner pooling --convert embed", "the student's prompts and answers")
LIKELY = Use(
    "teacher",
    "teacher",
    "--runner generate",
    "the student's prompts and answers and one token more, and with --max-logprobs where teacher.top_k exceeds 20",
)


class ServerLostError(RocktokensError):
    """The server cannot be reached."""


class ServerFailedError(ServerLostError):
    """The server answers, but not what it was asked."""


class _ServerBusyError(Exception):
    """The server asks to be asked later."""


class Logprobs(BaseModel):
    """Of the tokens that were written."""

    token_logprobs: list[float]


class Logprob(BaseModel):
    """Of one token of the prompt."""

    logprob: float


class Choice(BaseModel):
    """One completion."""

    token_ids: list[int]
    logprobs: Logprobs | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class Judged(BaseModel):
    """What is said of the tokens of a prompt, the first of which has nothing before it."""

    prompt_logprobs: list[dict[int, Logprob] | None]


class Judgements(BaseModel):
    """The answer of /v1/completions where only the prompt counts."""

    choices: list[Judged] = Field(min_length=1)


class Completions(BaseModel):
    """The answer of /v1/completions."""

    choices: list[Choice] = Field(min_length=1)


class ServedModel(BaseModel):
    """A model that a server has."""

    id: str
    max_model_len: int | None = None


class ServedModels(BaseModel):
    """The answer of /v1/models."""

    data: list[ServedModel] = Field(min_length=1)


class Tokens(BaseModel):
    """The answer of /tokenize."""

    tokens: list[int]


class Pooled(BaseModel):
    """What the header of /pooling says of the bytes below it."""

    embed_dtype: str
    endianness: str
    shape: tuple[int, int]
    """Tokens, width."""


class PooledItems(BaseModel):
    """The header, which lists one item per sequence; one is asked for."""

    data: tuple[Pooled]


class Nothing(BaseModel):
    """An answer of which only the status matters."""


class VllmClient:
    """One server."""

    def __init__(self, url: str, timeout: float, connections: int, use: Use = ROLLOUTS) -> None:
        """Ask nothing yet.

        Args:
            url: of the server, with or without a slash at its end.
            timeout: seconds that one answer may take, and for which a busy server is asked again.
            connections: requests that are sent at once.
            use: what it serves.
        """
        self.url, self.timeout, self.use = url.rstrip("/"), timeout, use
        try:
            httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise RocktokensError(
                f"{use.section}.url = {url!r} is no address ({legible(str(error), SAID)}): use one such as "
                "http://127.0.0.1:8001"
            ) from None
        self._connections = connections
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx2.Client(timeout=timeout, limits=limits, trust_env=False)

    def models(self) -> list[ServedModel]:
        """Return what is served: the model, then its adapters if there are any."""
        return self._ask("GET", "/v1/models", None, ServedModels).data

    def complete(self, body: Mapping[str, Any]) -> Choice:
        """Return the completion of one prompt."""
        return self._ask("POST", "/v1/completions", body, Completions).choices[0]

    def judge(self, body: Mapping[str, Any]) -> list[dict[int, Logprob] | None]:
        """Return what the server finds likely in the place of each token of a prompt."""
        return self._ask("POST", "/v1/completions", body, Judgements).choices[0].prompt_logprobs

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the ids of a text, by the server's tokenizer."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self._ask("POST", "/tokenize", body, Tokens).tokens

    def pool(self, body: Mapping[str, Any]) -> tuple[Pooled, bytes]:
        """Return the last hidden states of one sequence, all of them, and what they are."""
        content, headers = self._send_patiently("POST", "/pooling", body)
        [pooled] = self._parsed(PooledItems, headers.get("metadata", "{}").encode(), "/pooling").data
        return pooled, content

    def ask_all(self, ask: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
        """Ask for all at once; a signal ends it without waiting for what the server still writes."""
        pool = ThreadPoolExecutor(self._connections)
        try:
            pending = [pool.submit(ask, item) for item in items]
            return [own.result() for own in pending]
        except (KeyboardInterrupt, SystemExit, Terminated):
            self.close()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def persist(self, ask: Callable[[], Value], *, agree: Callable[[bool], bool] = bool) -> Value:
        """Call until the server has answered; where that takes too long, say what to do.

        Args:
            ask: raises ``ServerLostError`` for a server that is gone.
            agree: tells processes that call at once whether they all give up, from whether this one would.
        """

        def gives_up(state: RetryCallState) -> bool:
            assert state.outcome is not None
            is_there = isinstance(state.outcome.exception(), ServerFailedError)
            failed = is_there and state.attempt_number >= MOST_FAILURES
            return agree(failed or (state.seconds_since_start or 0) >= self.timeout)

        retrying = Retrying(
            retry=retry_if_exception_type(ServerLostError),
            wait=wait_exponential(multiplier=0.2, max=LONGEST_PAUSE),
            stop=gives_up,
            reraise=True,
        )
        try:
            return retrying(ask)
        except ServerLostError as error:
            raise RocktokensError(
                f"{error}: start it again, or raise {self.use.section}.timeout = {self.timeout:g}; what was done is "
                "kept, and the command goes on where it stopped"
            ) from None

    def close(self) -> None:
        """Hang up; what is still asked for fails."""
        self._client.close()

    def load_weights(self, folder: str) -> None:
        """Replace the weights of the model by those in a folder, while nothing is being decoded."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self._ask("POST", "/pause?mode=wait", {}, Nothing)
        try:
            self._ask("POST", "/collective_rpc", reload, Nothing)
            self._ask("POST", "/reset_prefix_cache", {}, Nothing)
        finally:
            self._ask("POST", "/resume", {}, Nothing)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, form: type[Answer]) -> Answer:
        return self._parsed(form, self._send_patiently(method, path, body)[0] or b"{}", path)

    def _parsed(self, form: type[Answer], content: bytes, path: str) -> Answer:
        try:
            return form.model_validate_json(content)
        except ValidationError as error:
            if error.errors()[0]["type"] == "json_invalid":
                raise ServerFailedError(f"{self.name} sent an answer to {path} that is no JSON") from None
            raise RocktokensError(
                f"{self.name} answers {path} in another form ({_first_problem(error)}): serve the {self.use.model} "
                f"with {VERSIONS}"
            ) from None

    def _send_patiently(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Send again, later each time, while the server says that it is busy."""
        retrying = Retrying(
            retry=retry_if_exception_type(_ServerBusyError),
            wait=wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE),
            stop=stop_after_delay(self.timeout),
            reraise=True,
        )
        try:
            return retrying(self._send, method, path, body)
        except _ServerBusyError:
            raise ServerLostError(f"{self.name} was busy for {self.timeout:g} seconds") from None

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[bytes, Mapping[str, str]]:
        content, deadline = bytearray(), time.monotonic() + self.timeout
        try:
            with self._client.stream(method, self.url + path, json=body) as response:
                for chunk in response.iter_bytes():
                    content += chunk
                    if time.monotonic() > deadline:  # the client's own limit is one between two chunks
                        raise httpx2.ReadTimeout(f"not whole after {self.timeout:g} seconds")
        except (httpx2.TransportError, httpx2.StreamError, httpx2.DecodingError) as error:
            reason = legible(str(error) or type(error).__name__, SAID)
            raise ServerLostError(f"{self.name} does not answer ({reason})") from None
        if response.status_code in BUSY:
            raise _ServerBusyError
        if response.is_success:
            return bytes(content), response.headers
        said = f"{self.name} answered {path} with {response.status_code} ({_complaint(bytes(content))})"
        if response.status_code >= FAILED:
            raise ServerFailedError(said)
        if response.status_code == httpx2.codes.NOT_FOUND:
            raise RocktokensError(
                f"{said}: start vLLM with {self.use.started}, and name no path in {self.use.section}.url"
            )
        raise RocktokensError(f"{said}: serve the {self.use.model} of this run, with room for {self.use.room}")

    @property
    def name(self) -> str:
        """How sentences call the server."""
        return f"the vLLM server at {self.url}"


def _complaint(content: bytes) -> str:
    """Return what a server says is wrong, shortened."""
    text = content.decode(errors="replace")
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return legible(text.strip() or "no reason given", SAID)


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg'].lower()}"
