"""What training in less memory does to losses, traces and scores, on the embedded pair.

1. The same run, with the same seed, is trained in float32, with moments in 8 bits, with weights in bfloat16 beside
   float32 master copies, and with both; and once more in float32 with another seed, for scale.
2. Rollouts of the first step: how many are those of the float32 run. Then they part, since a student that differs in
   the last digit draws another token sooner or later.
3. The final students score the same probe, that of the float32 run, in float32: the kl per token, the sum over all
   tokens, and how many of the types with the largest sums are those of the float32 run.

    python benchmarks/less_memory.py --steps 60

Moments in 8 bits need bitsandbytes (pip install 'rocktokens[bnb]'); without it those rows are left out.
"""

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rocktokens.config import Config, parse_config
from rocktokens.models.load import load_model
from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.scoring.score import score_rollouts
from rocktokens.training.loop import distill
from rocktokens.types import Rollout, TokenScores

TOP = 20
"""Types with the largest sums of kl that are compared."""
PROBE_STEPS = 4
"""The rollouts of this many last steps of the float32 run are the probe."""
HALF, EIGHT = {"models.student_dtype": "bfloat16"}, {"training.optim": "adamw_8bit"}
SETTINGS: dict[str, dict[str, object]] = {
    "float32": {},
    "8-bit Adam": EIGHT,
    "bfloat16 + master": HALF,
    "both": HALF | EIGHT,
    "float32, other seed": {"run.seed": 2},
}


class Trained(NamedTuple):
    """What a run left."""

    run: RunDir
    losses: list[float]


def make_config(folder: Path, steps: int, settings: dict[str, object]) -> Config:
    """Describe the run of one setting."""
    base = f"""
[run]
directory = "{folder}"
seed = 1
[models]
student = "pebbles-student"
teacher = "pebbles-teacher"
device = "cpu"
[rollouts]
max_completion_length = 64
[training]
max_steps = {steps}
save_steps = {steps}
per_device_train_batch_size = 16
learning_rate = 5e-4
"""
    return parse_config(base, [f"{key}={value}" for key, value in settings.items()])


def train(folder: Path, steps: int, settings: dict[str, object]) -> Trained:
    """Make the run; return its losses."""
    losses: list[float] = []
    result = distill(
        make_config(folder, steps, settings), on_step=lambda _made, _total, record: losses.append(record["loss"])
    )
    return Trained(RunDir(result.directory), losses)


def rollouts_of(run: RunDir, step: int) -> list[Rollout]:
    """Read the rollouts of a step."""
    return read_rollouts(run, f"rollouts/training/step-{step}.parquet")


def scores_of(run: RunDir, steps: int, probe: list[Rollout]) -> TokenScores:
    """Score the probe under the last student of a run, in float32."""
    student = load_model(str(run.checkpoint(steps)), "float32", "cpu")
    return score_rollouts(student, load_model("pebbles-teacher", "float32", "cpu"), probe)


def top_types(probe: list[Rollout], kl_T: np.ndarray) -> set[int]:
    """Return the types with the largest sums of kl."""
    ids_T = np.concatenate([rollout.token_ids for rollout in probe])
    sums = np.bincount(ids_T, weights=kl_T)
    return set(np.argsort(sums)[-TOP:].tolist())


def main() -> None:
    """Print a row per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    wanted = {name: own for name, own in SETTINGS.items() if "training.optim" not in own or find_spec("bitsandbytes")}
    with tempfile.TemporaryDirectory() as directory:
        trained = {
            name: train(Path(directory) / str(place), steps, own) for place, (name, own) in enumerate(wanted.items())
        }
        reference = trained["float32"]
        probe = [own for step in range(steps - PROBE_STEPS, steps) for own in rollouts_of(reference.run, step)]
        first = [own.token_ids for own in rollouts_of(reference.run, 0)]
        expected = scores_of(reference.run, steps, probe).kl
        print(f"{steps} steps of {len(first)} rollouts; probe of {len(expected):,} tokens, kl {np.mean(expected):.4f}")
        print("setting | same first rollouts | loss, last 10 | mean kl | mean change of a token's kl | largest types")
        for name, own in trained.items():
            same = sum(np.array_equal(a, b.token_ids) for a, b in zip(first, rollouts_of(own.run, 0), strict=True))
            kl_T = scores_of(own.run, steps, probe).kl
            changed, agreed = np.mean(np.abs(kl_T - expected)), len(top_types(probe, kl_T) & top_types(probe, expected))
            late = f"{np.mean(own.losses[-10:]):.4f} | {np.mean(kl_T):.4f}"
            print(f"{name} | {same} of {len(first)} | {late} | {changed:.4f} | {agreed} of {TOP}")


if __name__ == "__main__":
    main()
