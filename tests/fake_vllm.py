"""A loopback server that speaks vLLM's protocol over a model in memory, and can be told to fail.

It decodes without a batch or a cache, choosing by the plug-in, whose base classes stand in for vLLM's, and says what it
finds likely in the place of each token of a prompt; or it gives the last hidden states of sequences, as vLLM does with
``--runner pooling``.
"""

import copy
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import load_file


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = 0
    SWAP = 1


def plug_in() -> Any:
    """The plug-in's module, with stand-ins for what it imports of vLLM."""
    processors = types.ModuleType("vllm.v1.sample.logits_processor")
    processors.LogitsProcessor = type("LogitsProcessor", (), {})  # pyright: ignore[reportAttributeAccessIssue]
    processors.MoveDirectionality = MoveDirectionality  # pyright: ignore[reportAttributeAccessIssue]
    names = ["vllm", "vllm.v1", "vllm.v1.sample"]
    before = {name: sys.modules.get(name) for name in [*names, processors.__name__]}
    sys.modules.update({name: types.ModuleType(name) for name in names} | {processors.__name__: processors})
    try:
        import rocktokens.integrations.vllm_noise as module
    finally:
        for name, own in before.items():
            sys.modules.pop(name) if own is None else sys.modules.update({name: own})
    return module


class Update:
    """What vLLM tells a processor of its batch."""

    def __init__(self, added: Any = (), removed: Any = (), moved: Any = ()) -> None:
        self.added, self.removed, self.moved = added, removed, moved


class Params:
    def __init__(self, xargs: dict[str, str] | None) -> None:
        self.extra_args = xargs


Reply = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]
"""Status, content, and headers if there are any."""
Fault = Callable[["FakeVllm", str, dict[str, Any]], Reply | None]
"""Given a path and what was asked: what to answer with instead, or None to answer as it should."""


class FakeVllm:
    """A server of one model; ``start_again`` forgets the weights it was given, as a process does that was killed."""

    def __init__(
        self, model: torch.nn.Module, has_plug_in: bool = True, name: str = "s", tokenizer: Any = None
    ) -> None:
        self._first = copy.deepcopy(model)
        self.model: Any = copy.deepcopy(model)
        self.has_plug_in, self.faults, self.asked = has_plug_in, list[Fault](), list[str]()
        self.keeps: frozenset[str] = frozenset()
        """Weights that loading leaves as they were."""
        self.name, self.tokenizer, self.max_model_len = name, tokenizer, 128
        self.max_logprobs = 20
        """As many as vLLM gives unless told otherwise."""
        self.drips = False
        self._lock = threading.Lock()

    def start_again(self) -> None:
        self.model = copy.deepcopy(self._first)

    def answer(self, path: str, said: dict[str, Any]) -> Reply:
        with self._lock:
            self.asked.append(path)
            for fault in list(self.faults):
                if (instead := fault(self, path, said)) is not None:
                    return instead
            if path == "/v1/models":
                return 200, json.dumps({"data": [{"id": self.name, "max_model_len": self.max_model_len}]}).encode()
            if path == "/tokenize":
                ids = self.tokenizer.encode(said["prompt"], add_special_tokens=said["add_special_tokens"])
                return 200, json.dumps({"tokens": ids}).encode()
            if path == "/pooling":
                return self._pool(said)
            if path == "/v1/completions":
                return self._completion(said)
            if path == "/collective_rpc":
                weights = load_file(f"{said['kwargs']['weights_path']}/model.safetensors")
                given = {name: own for name, own in weights.items() if name not in self.keeps}
                problems = self.model.load_state_dict(given, strict=False)
                assert not problems.unexpected_keys and set(problems.missing_keys) <= self.keeps
            return 200, b""

    def _completion(self, said: dict[str, Any]) -> Reply:
        if (asked := said.get("prompt_logprobs", 0)) > self.max_logprobs:
            refusal = f"Requested prompt logprobs of {asked}, which is greater than max allowed: {self.max_logprobs}"
            return 400, json.dumps({"error": {"message": refusal}}).encode()
        return 200, json.dumps({"choices": [self._complete(said)]}).encode()

    @torch.no_grad()
    def _complete(self, said: dict[str, Any]) -> dict[str, Any]:
        ids, written, logprobs = list(said["prompt"]), list[int](), list[float]()
        processor = plug_in().RockNoise(None, "cpu", False)
        processor.update_state(
            Update([(0, Params(said.get("vllm_xargs") if self.has_plug_in else None), ids, written)])
        )
        while len(written) < said["max_tokens"]:
            logits = self.model(input_ids=torch.tensor([ids + written])).logits[0]
            row = logits[-1:].clone()
            token = int(processor.apply(row).argmax())
            logprobs.append(float(logits[-1].log_softmax(0)[token]))
            written.append(token)
            if token in said.get("stop_token_ids", ()):
                break
        choice: dict[str, Any] = {"token_ids": written, "logprobs": {"token_logprobs": logprobs}}
        if "prompt_logprobs" in said:
            logp = self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(1)
            top = logp.topk(said["prompt_logprobs"], dim=1)
            known = [
                {str(id_): {"logprob": float(logp[place, id_])} for id_ in [own, *top.indices[place].tolist()]}
                for place, own in enumerate(ids[1:])
            ]
            choice["prompt_logprobs"] = [None, *known]
        return choice

    @torch.no_grad()
    def _pool(self, said: dict[str, Any]) -> Reply:
        assert said["model"] == self.name and said["task"] == "token_embed" and said["encoding_format"] == "bytes"
        h_LE = self.model.base_model(input_ids=torch.tensor([said["input"]])).last_hidden_state[0]
        return pooled(h_LE / h_LE.norm(dim=1, keepdim=True) if said["use_activation"] else h_LE, said["embed_dtype"])


def pooled(h_LE: torch.Tensor, dtype: str, **described: Any) -> Reply:
    """States as vLLM sends them; ``described`` is what the header says of them instead."""
    content = h_LE.to({"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]).contiguous()
    item = {"index": 0, "embed_dtype": dtype, "endianness": "little", "shape": list(h_LE.shape), **described}
    return 200, content.view(torch.uint8).numpy().tobytes(), {"metadata": json.dumps({"data": [item]})}


def dying_at(request: int) -> Fault:
    """Hang up at one request for a rollout, and be started again with the weights of before."""
    left = [request]

    def die(own: FakeVllm, path: str, said: dict[str, Any]) -> tuple[int, bytes] | None:
        left[0] -= "vllm_xargs" in said
        if left[0] != 0 or "vllm_xargs" not in said:
            return None
        own.start_again()
        return 0, b""

    return die


@contextmanager
def serving(fake: FakeVllm) -> Iterator[str]:
    """The server on a free port, and its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None: ...

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def _reply(self, said: dict[str, Any]) -> None:
            status, content, *headers = fake.answer(self.path.split("?")[0], said)
            if status == 0:  # hang up without a word
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in (headers[0] if headers else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content) + fake.drips))
            self.end_headers()
            if fake.drips:  # one byte less than was promised, until the other side gives up
                for byte in content:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    threading.Event().wait(0.02)
                threading.Event().wait(5)
                self.close_connection = True
            else:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda request, client_address: None  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
