"""Talking to a vLLM server: one call for one answer, checked, with a deadline.

1. A server that is busy (429, 503) is asked again, later each time, until ``timeout`` has passed.
2. One that cannot be reached, or sends its answer too slowly or not whole, is lost: whoever asked must assume that it
   comes back with other weights, and starts over.
3. Everything else it refuses or says wrongly is a sentence for the user.

The endpoints are those of ``vllm serve``, with ``VLLM_SERVER_DEV_MODE=1`` for the ones that load weights. These ask
for no password: a server belongs on this machine or in a private network.
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import httpx2
from pydantic import BaseModel, Field, ValidationError
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from rocktokens.display.text import legible
from rocktokens.errors import RocktokensError

BUSY = (429, 503)
FAILED = 500
"""From here on a status says that the server failed, not that it was asked wrongly."""
LONGEST_PAUSE = 10.0
SAID = 200
"""Characters that are shown of what a server says."""
Answer = TypeVar("Answer", bound=BaseModel)


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


class Nothing(BaseModel):
    """An answer of which only the status matters."""


class VllmClient:
    """One server."""

    def __init__(self, url: str, timeout: float, connections: int) -> None:
        """Ask nothing yet.

        Args:
            url: of the server, with or without a slash at its end.
            timeout: seconds that one answer may take, and for which a busy server is asked again.
            connections: requests that are sent at once.
        """
        self.url, self.timeout = url.rstrip("/"), timeout
        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx2.Client(timeout=timeout, limits=limits, trust_env=False)

    def model(self) -> ServedModel:
        """Return the model that is served; the first where there are adapters besides."""
        return self._ask("GET", "/v1/models", None, ServedModels).data[0]

    def complete(self, body: Mapping[str, Any]) -> Choice:
        """Return the completion of one prompt."""
        return self._ask("POST", "/v1/completions", body, Completions).choices[0]

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
        retrying = Retrying(
            retry=retry_if_exception_type(_ServerBusyError),
            wait=wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE),
            stop=stop_after_delay(self.timeout),
            reraise=True,
        )
        try:
            content = retrying(self._send, method, path, body)
        except _ServerBusyError:
            raise ServerLostError(f"{self._name} was busy for {self.timeout:g} seconds") from None
        try:
            return form.model_validate_json(content or b"{}")
        except ValidationError as error:
            if error.errors()[0]["type"] == "json_invalid":
                raise ServerFailedError(f"{self._name} sent an answer to {path} that is no JSON") from None
            raise RocktokensError(
                f"{self._name} answers {path} in another form ({_first_problem(error)}): serve the student with vLLM "
                "0.26 to 0.32"
            ) from None

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        content, deadline = bytearray(), time.monotonic() + self.timeout
        try:
            with self._client.stream(method, self.url + path, json=body) as response:
                for chunk in response.iter_bytes():
                    content += chunk
                    if time.monotonic() > deadline:  # the client's own limit is one between two chunks
                        raise httpx2.ReadTimeout(f"not whole after {self.timeout:g} seconds")
        except (httpx2.TransportError, httpx2.StreamError, httpx2.DecodingError) as error:
            reason = legible(str(error) or type(error).__name__, SAID)
            raise ServerLostError(f"{self._name} does not answer ({reason})") from None
        if response.status_code in BUSY:
            raise _ServerBusyError
        if response.is_success:
            return bytes(content)
        said = f"{self._name} answered {path} with {response.status_code} ({_complaint(bytes(content))})"
        if response.status_code >= FAILED:
            raise ServerFailedError(said)
        if response.status_code == httpx2.codes.NOT_FOUND:
            raise RocktokensError(f"{said}: start vLLM with VLLM_SERVER_DEV_MODE=1, and name no path in rollouts.url")
        raise RocktokensError(f"{said}: serve the student of this run, with room for its prompts and answers")

    @property
    def _name(self) -> str:
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
