"""Make a teacher for SmolLM2-135M-Instruct: the same model, fine-tuned on worked solutions (a GPU and a few minutes).

Run ``python examples/smollm2_teacher.py gsm8k-train.jsonl runs/smollm2-teacher``, then
``rocktokens distill smollm2-gsm8k --set models.teacher=runs/smollm2-teacher --set task.path=train.jsonl``.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import torch

from rocktokens.models.load import load_model
from rocktokens.rollouts.encode import encode_prompt
from rocktokens.types import Prompt

TEMPLATE = "{prompt}\nThink step by step and end with '#### ' and the answer."
CALCULATOR = re.compile(r"<<[^<>]*>>")
IGNORED = -100


def worked_solutions(path: Path, tokenizer, end_id: int) -> list[tuple[list[int], list[int]]]:
    """Prompt ids and solution ids of every record, the calculator marks of GSM8K removed."""
    pairs = []
    for index, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        record = json.loads(line)
        prompt = Prompt(str(index), TEMPLATE.replace("{prompt}", record["question"]))
        prompt_ids = encode_prompt(tokenizer, prompt, chat_template=True, max_prompt_length=1024).tolist()
        solution = tokenizer(CALCULATOR.sub("", record["answer"]), add_special_tokens=False)["input_ids"]
        pairs.append((prompt_ids, [*solution, end_id]))
    return pairs


def collate(pairs: list[tuple[list[int], list[int]]], device: torch.device) -> dict[str, torch.Tensor]:
    """Right-padded ids; only the solution is learned."""
    width = max(len(prompt) + len(solution) for prompt, solution in pairs)
    ids_RL = torch.zeros(len(pairs), width, dtype=torch.long)
    labels_RL = torch.full_like(ids_RL, IGNORED)
    mask_RL = torch.zeros_like(ids_RL)
    for row, (prompt, solution) in enumerate(pairs):
        end = len(prompt) + len(solution)
        ids_RL[row, :end] = torch.tensor([*prompt, *solution])
        labels_RL[row, len(prompt) : end] = torch.tensor(solution)
        mask_RL[row, :end] = 1
    return {
        name: tensor.to(device)
        for name, tensor in {"input_ids": ids_RL, "labels": labels_RL, "attention_mask": mask_RL}.items()
    }


def main() -> None:
    """Fine-tune with AdamW and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    loaded = load_model("smollm2-135m-instruct")
    model = loaded.model.float().train()
    pairs = worked_solutions(arguments.data, loaded.tokenizer, min(loaded.eos_ids))
    rng = np.random.default_rng(arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.learning_rate, total_steps=arguments.steps)
    for step in range(arguments.steps):
        chosen = [pairs[index] for index in rng.integers(0, len(pairs), arguments.batch_size)]
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = model(**collate(chosen, model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == arguments.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(arguments.out)
    loaded.tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
