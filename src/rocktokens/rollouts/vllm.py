"""Sampling from a vLLM server, whose weights follow the student's and are checked before they are trusted.

1. What is asked is checked and ordered as for the model in memory (``sampler``); the server decodes it.
2. Before that the server gets the student's weights, if they have changed since: one file in ``folder``, which it is
   told to load.
3. The canary: the log-probabilities of a fixed text by the server and by the student here. Where they differ by more
   than ``max_gap``, nothing is sampled. A server that loads weights and keeps an old LM head says that all went well;
   only this notices.
4. A server that is lost while it decodes, or whose canary differs afterwards (it was started again, with the weights
   on its disk), has its weights loaded again and decodes everything again that was asked together. Nothing is handed
   on before that.
5. With the plug-in ``integrations.vllm_noise`` rollouts are drawn with our noise: those of the model in memory, up to
   rounding. Without it the server draws with its own: rollouts come from the same distribution and repeat with the
   seed, but share no random numbers with others, so that a rollout cannot be continued under a ban.

Several processes share one server: the main one brings the weights, the others wait for it. What one of them finds
wrong, all know before any goes on, so they start over together.
"""

from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from rocktokens.config import Config
from rocktokens.errors import RocktokensError
from rocktokens.models.plain_weights import plain_weights
from rocktokens.rollouts.decoding import DecodingSettings, Ended, StreamRequest, require_logprobs
from rocktokens.rollouts.noisy_choice import XARG, NoisyChoice
from rocktokens.rollouts.sampler import Completion, TransformersSampler, evaluation_mode
from rocktokens.rollouts.vllm_client import VERSIONS, Choice, ServerLostError, VllmClient
from rocktokens.run_dir import write_atomically

CANARY_LENGTH = 64
TOGETHER = 4
"""Times ``batch_size`` requests that are sent, and checked, together."""
NEUTRAL = {
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""What a server would otherwise take from the generation_config.json of its model."""
NO_LOGIT = -100.0
"""What vLLM adds to a logit of a type that may not be written."""
Noise = Literal["plugin", "server"]
Value = TypeVar("Value")


class VllmSampler(TransformersSampler):
    """Samples a student from a server; the student in memory says what the server must be."""

    def __init__(self, client: VllmClient, folder: Path, noise: Noise, max_gap: float, **of_student: Any) -> None:
        """Wrap a server.

        Args:
            client: of the server.
            folder: where it finds new weights.
            noise: whose noise it draws with.
            max_gap: between log-probabilities of the server and of the student here, in nats.
            of_student: what ``TransformersSampler`` takes.
        """
        super().__init__(**of_student)
        width = self.model.config.get_text_config().vocab_size
        if self.vocab_size < width:
            raise RocktokensError(
                f"the student's head has {width} columns and shares {self.vocab_size} of them with the teacher's, and "
                'a server cannot leave out the others: set rollouts.engine = "transformers"'
            )
        self.client, self.folder, self.noise, self.max_gap = client, folder, noise, max_gap
        self.canary_L = np.linspace(0, width - 1, CANARY_LENGTH).astype(int).tolist()
        self._served = ""
        self._synced: object = None

    def _decode(
        self,
        requests: list[StreamRequest],
        temperature: float,
        max_new_tokens: int,
        on_done: Callable[[int, Completion], None],
    ) -> None:
        if self.refresh:
            self.refresh()
        if self.noise == "server" and any(own.branches or own.alternatives for own in requests):
            raise RocktokensError(
                'rollouts.noise = "server" shares no random numbers between answers with and without a ban: start the '
                'server with the plug-in rocktokens.integrations.vllm_noise and set rollouts.noise = "plugin"'
            )
        settings = self._settings(temperature, max_new_tokens)
        single = [single for request in requests for single in request.branches or (request,)]
        size = TOGETHER * self.batch_size
        for number in range(max(_of_all(ceil(len(single) / size)))):  # also where this process has nothing to ask
            asked = single[number * size : (number + 1) * size]
            for index, token_ids, logprobs, finished in self._answers(asked, settings):
                on_done(index, Completion(token_ids, logprobs, finished))

    def _answers(self, requests: Sequence[StreamRequest], settings: DecodingSettings) -> list[Ended]:
        """Ask for all of these until all were answered by the student's weights."""
        return self.client.persist(
            lambda: self._try_answers(requests, settings), agree=lambda gives_up: any(_of_all(gives_up))
        )

    def _try_answers(self, requests: Sequence[StreamRequest], settings: DecodingSettings) -> list[Ended]:
        try:
            self._bring_up_to_date()
            ended = _together(lambda: self.client.ask_all(lambda request: self._answer(request, settings), requests))
            if self._gap() > self.max_gap:
                raise ServerLostError(f"{self.client.name} has other weights than it was given")
        except ServerLostError:
            self._synced = None
            raise
        return ended

    def _answer(self, request: StreamRequest, settings: DecodingSettings) -> Ended:
        room = request.end(settings.max_new_tokens) - len(request.known)
        body = self._body(np.concatenate([request.prompt, request.known]).tolist(), room)
        body |= {"logprobs": 1, **self._choice(request, settings.temperature)}
        choice = self.client.complete(body)
        token_ids_T, logprobs_T = self._checked(request, choice, room)
        finished = int(token_ids_T[-1]) in self.eos_ids
        return request.index, token_ids_T, logprobs_T, finished

    def _body(self, prompt: list[int], room: int) -> dict[str, Any]:
        """Ask for tokens as ids; only ours end a response, whatever the server's copy of the model says."""
        return {
            "model": self._served,
            "prompt": prompt,
            "max_tokens": room,
            "temperature": 0.0,
            **NEUTRAL,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "ignore_eos": True,
            "stop_token_ids": sorted(self.eos_ids),
        }

    def _choice(self, request: StreamRequest, temperature: float) -> dict[str, Any]:
        """Say how the next token is chosen."""
        banned, key = sorted(request.banned), request.stream_key
        if self.noise == "plugin":
            own = NoisyChoice(key, temperature, len(request.known), tuple(banned), tuple(request.alternatives))
            return {"vllm_xargs": {XARG: own.to_json()}}
        bias = {"logit_bias": {str(token_id): NO_LOGIT for token_id in banned}} if banned else {}
        return {"temperature": temperature, "seed": key % 2**31, **bias}

    def _checked(self, request: StreamRequest, choice: Choice, room: int) -> tuple[np.ndarray, np.ndarray]:
        """Refuse a completion that cannot have been asked for."""
        token_ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs if choice.logprobs else []
        is_end = [token_id in self.eos_ids for token_id in token_ids]
        wrong = None
        if len(logprobs) != len(token_ids):
            wrong = f"{len(logprobs)} log-probabilities for {len(token_ids)} tokens"
        elif not 0 < len(token_ids) <= room:
            wrong = f"{len(token_ids)} tokens where at most {room} were asked for"
        elif outside := [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]:
            wrong = f"id {outside[0]}, which is outside the vocabulary of {self.vocab_size}"
        elif not request.alternatives and (banned := request.banned.intersection(token_ids)):
            wrong = f"id {min(banned)}, which is banned"
        elif any(is_end[:-1]) or not (is_end[-1] or len(token_ids) == room):
            wrong = "an answer that goes on behind its end token, or stops without one"
        if wrong:
            raise RocktokensError(
                f"prompt {request.name!r}: {self.client.name} wrote {wrong}: serve the student of "
                f"this run with {VERSIONS}"
            )
        logprobs_T = np.array(logprobs, np.float32)
        require_logprobs(request.name, len(request.known), logprobs_T)
        return np.array(token_ids, np.int32), logprobs_T

    # Weights

    def _bring_up_to_date(self) -> None:
        """Load the student's weights where they have changed, or where the server has others."""
        versions = [(parameter.data_ptr(), parameter._version) for parameter in self.model.parameters()]
        if not all(_of_all(self._synced == versions)) or self._gap() > self.max_gap:
            _together(self._look_at_server)
            _together(self._send_weights)
            gap = self._gap()
            if gap > self.max_gap:
                raise RocktokensError(
                    f"{self.client.name} was given the student's weights, but its log-probabilities "
                    f"differ by {gap:.3g} nats (rollouts.max_gap = {self.max_gap:g}): serve an untied copy of the "
                    "student (examples/serve_student.py makes one) in its dtype, or raise rollouts.max_gap for one of "
                    "half width"
                )
        if self.noise == "plugin":  # each time: a server that was started again may have come without it
            _together(self._require_plugin)
        self._synced = versions

    def _send_weights(self) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            path = self.folder.absolute() / "model.safetensors"
            write_atomically(path, lambda temporary: save_file(plain_weights(self.model), temporary, {"format": "pt"}))
            self.client.load_weights(str(path.parent))

    def _look_at_server(self) -> None:
        served = self.client.models()[0]
        self._served = served.id
        self.context_lengths["vLLM server"] = served.max_model_len

    def _gap(self) -> float:
        """Return the largest difference between log-probabilities of the canary here and there, for any process."""
        return max(_of_all(_together(self._own_gap)))

    def _own_gap(self) -> float:
        answered = self.client.complete(self._body(self.canary_L, 1) | {"prompt_logprobs": 0}).prompt_logprobs or []
        try:
            served = [(answered[place] or {})[own].logprob for place, own in enumerate(self.canary_L) if place]
        except (IndexError, KeyError):
            raise RocktokensError(
                f"{self.client.name} does not say how likely the tokens of a prompt are: start it "
                "without --max-logprobs 0"
            ) from None
        with torch.no_grad(), evaluation_mode(self.model):
            ids_1L = torch.tensor([self.canary_L], device=self.model.device)
            logp_LV = self.model(input_ids=ids_1L).logits[0, :-1].float().log_softmax(dim=1)
        own = logp_LV.gather(1, ids_1L[0, 1:, None])[:, 0].cpu()
        return float((own - torch.tensor(served)).abs().nan_to_num(torch.inf).max())

    def _require_plugin(self) -> None:
        """Ban the most probable token: only the plug-in then writes another one."""
        body = self._body(self.canary_L, 1)
        first = self.client.complete(body).token_ids
        ban = NoisyChoice(0, 0.0, 0, tuple(first), ()).to_json()
        if self.client.complete(body | {"vllm_xargs": {XARG: ban}}).token_ids == first:
            raise RocktokensError(
                f"{self.client.name} does not draw with our noise: start it with --logits-processors "
                'rocktokens.integrations.vllm_noise:RockNoise, or set rollouts.noise = "server"'
            )


def make_vllm_sampler(config: Config, of_student: dict[str, Any]) -> VllmSampler:
    """Make the sampler over the server that a config names."""
    rollouts = config.rollouts
    assert rollouts.url is not None  # the config refuses an engine without one
    return VllmSampler(
        VllmClient(rollouts.url, rollouts.timeout, rollouts.batch_size),
        Path(rollouts.sync_directory or Path(config.run.directory) / "sync"),
        rollouts.noise,
        rollouts.max_gap,
        **of_student,
    )


def _of_all(own: Value) -> list[Value]:
    """Return what the processes that sample from the same server have, in their order."""
    if not dist.is_initialized():
        return [own]
    values: list[Value | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return cast(list[Value], values)


def _together(ask: Callable[[], Value]) -> Value:
    """Return what the server gives this process; where any process got an error, raise the first on all of them."""
    given: list[Value] = []
    own_error = None
    try:
        given.append(ask())
    except (RocktokensError, OSError, SafetensorError) as error:  # the last two where weights cannot be written
        own_error = error
    for error in _of_all(own_error):
        if error is not None:
            raise error
    return given[0]
