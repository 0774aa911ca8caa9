"""Make a teacher: fine-tune a causal LM on the worked answers of a JSONL file.

1. A record's question becomes a prompt as in a run (template, chat template); its answer, without GSM8K's calculator
   marks, and an end token are learned. Nothing else is.
2. AdamW with a cosine schedule. The examples of a step are a pure function of seed and step. Weights are float32; a GPU
   computes in bfloat16, without padding where the model allows it.
3. Every ``--save-steps`` steps weights and optimizer go to OUT/.unfinished. The same command resumes there; on a CPU it
   ends with the same bytes as a run that was never interrupted. A finished OUT is left as it is.

Run ``python examples/make_teacher.py smollm2-135m-instruct renumbered-train.jsonl runs/teacher --epochs 2``. With
``--limit 4000 --epochs 1`` the same script makes a weaker model, such as a student that starts behind the teacher.
"""

import argparse
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options import at_least, between, new_folder, one_of, run_main
from safetensors.torch import load_file, save_file
from ticker import ticker
from torch.utils.checkpoint import checkpoint

from rocktokens.config import JsonlTask, TrainingSection
from rocktokens.errors import RocktokensError
from rocktokens.models.fingerprints import directory_fingerprint
from rocktokens.models.head import lm_head
from rocktokens.models.load import LoadedModel, load_model
from rocktokens.rollouts.encode import encode_prompt
from rocktokens.run_dir import derive_seed, file_sha256, package_versions
from rocktokens.scoring.batch import collate, response_states
from rocktokens.tasks.jsonl import load_jsonl
from rocktokens.training.checkpoint import OPTIMIZER_FILE, optimizer_tensors, restore_optimizer
from rocktokens.training.optim import make_optimizer, make_scheduler
from rocktokens.types import Prompt, Rollout

TEMPLATE = "{prompt}\nThink step by step and end with '#### ' and the answer."
CALCULATOR = re.compile(r"<<[^<>]*>>")
MADE = "made.json"
"""What a finished model says about how it was made."""
DTYPES = ("float32", "bfloat16")
LOGITS_AT_ONCE = 4096
READ_LOSS_EVERY = 20
"""Steps that a GPU may be ahead of the host."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is fine-tuned."""

    epochs: float = 1.0
    batch_size: int = 64
    micro_batch_size: int = 64
    learning_rate: float = 2e-4
    warmup_share: float = 0.03
    seed: int = 0
    dtype: str = "float32"
    """Of the finished weights; they are trained in float32."""


def read_prompts(path: Path, template: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file with questions and answers, templates filled in, in its order."""
    return load_jsonl(JsonlTask(name="jsonl", path=str(path), template=template, limit=limit)).items


def worked_answers(loaded: LoadedModel, prompts: Sequence[Prompt], max_prompt_length: int) -> list[Rollout]:
    """Prompts with the answers of their records, as if the model had sampled them."""
    end_id = end_token(loaded)
    examples = []
    for index, prompt in enumerate(prompts):
        prompt_ids = encode_prompt(loaded.tokenizer, prompt, True, max_prompt_length)
        text = CALCULATOR.sub("", prompt.answer or "")
        answer = [*loaded.tokenizer(text, add_special_tokens=False)["input_ids"], end_id]
        token_ids = np.array(answer, np.int32)
        logprobs = np.zeros(len(answer), np.float32)
        examples.append(Rollout(index, prompt.id, 0, prompt_ids, token_ids, logprobs, policy_step=0, finished=True))
    return examples


def end_token(loaded: LoadedModel) -> int:
    """Return the token that ends an answer in the chat template, which need not be the tokenizer's own."""
    tokenizer = loaded.tokenizer
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        written = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)["input_ids"]
        ends = [token_id for token_id in written if token_id in loaded.eos_ids]
        if ends:
            return ends[-1]
    return min(loaded.eos_ids) if tokenizer.eos_token_id is None else tokenizer.eos_token_id


def fine_tune(
    loaded: LoadedModel,
    examples: Sequence[Rollout],
    settings: Settings,
    out: Path,
    source: dict[str, Any],
    save_steps: int = 500,
) -> dict[str, Any]:
    """Learn the answers, from where an interrupted call left off, and save the model with its record.

    Args:
        loaded: The model to start from; trained in place.
        examples: Prompts and answers.
        settings: How.
        out: Folder of the finished model.
        source: What model and examples are, so that another pair is not resumed by mistake.
        save_steps: How often to write what a resumed call starts from.
    """
    steps = math.ceil(settings.epochs * len(examples) / settings.batch_size)
    section = TrainingSection(
        max_steps=steps,
        learning_rate=settings.learning_rate,
        warmup_steps=math.ceil(settings.warmup_share * steps),
        save_steps=save_steps,
    )
    record = {**source, "settings": asdict(settings), "examples": len(examples), "steps": steps}
    model = loaded.model.float().train()
    optimizer = make_optimizer(model, section)
    scheduler = make_scheduler(optimizer, section)
    unfinished = out / ".unfinished"
    first, losses = resume(unfinished, record, model, optimizer)
    for _ in range(first):
        scheduler.step()
    waiting: list[torch.Tensor] = []
    with ticker("fine-tuning", steps, done=first) as advance:
        for step in range(first, steps):
            waiting.append(update(loaded, step_examples(examples, step, settings), settings, optimizer))
            scheduler.step()
            if len(waiting) == READ_LOSS_EVERY or (step + 1) % save_steps == 0 or step + 1 == steps:
                losses += read_losses(waiting)
                waiting.clear()
            if (step + 1) % save_steps == 0 and step + 1 < steps:
                save_unfinished(unfinished, record, step + 1, losses, model, optimizer)
            advance(1, f"loss {np.mean(losses[-20:]):.4f}" if losses else "")
    result = {**record, "loss_first": float(np.mean(losses[:20])), "loss_last": float(np.mean(losses[-20:]))}
    versions = package_versions(("rocktokens", "torch", "transformers"))
    save_finished(loaded, out, {**result, "versions": versions}, settings.dtype)
    return result


def step_examples(examples: Sequence[Rollout], step: int, settings: Settings) -> list[Rollout]:
    """The examples of a step: the next ones of a walk through seeded permutations, one permutation per epoch."""
    chosen = []
    orders: dict[int, np.ndarray] = {}
    for place in range(step * settings.batch_size, (step + 1) * settings.batch_size):
        epoch, offset = divmod(place, len(examples))
        if epoch not in orders:
            seed = derive_seed(settings.seed, "fine-tuning epoch", epoch)
            orders[epoch] = np.random.default_rng(seed).permutation(len(examples))
        chosen.append(examples[orders[epoch][offset]])
    return chosen


def update(
    loaded: LoadedModel, examples: Sequence[Rollout], settings: Settings, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    """Make one update on the mean loss per answer token, which is returned without waiting for a GPU."""
    tokens = sum(len(example.token_ids) for example in examples)
    total = torch.zeros((), device=loaded.model.device)
    for first in range(0, len(examples), settings.micro_batch_size):
        loss = answer_loss(loaded, examples[first : first + settings.micro_batch_size]) / tokens
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def read_losses(waiting: Sequence[torch.Tensor]) -> list[float]:
    """The losses as numbers; one that is not finite stops the training."""
    losses = torch.stack(list(waiting)).tolist()
    if not all(map(math.isfinite, losses)):
        raise RocktokensError("the loss is no longer finite: lower --learning-rate")
    return losses


def answer_loss(loaded: LoadedModel, examples: Sequence[Rollout]) -> torch.Tensor:
    """Σ −log p over the answer tokens; logits exist for a few thousand positions at a time."""
    model, device = loaded.model, loaded.model.device
    batch = collate(examples, loaded.pad_id, device)
    layer, head = model.get_output_embeddings(), lm_head(model)

    def chunk_loss(h_TD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        logits_TV = layer(h_TD).float() * head.scale
        if head.softcap is not None:
            logits_TV = torch.tanh(logits_TV / head.softcap) * head.softcap
        return torch.nn.functional.cross_entropy(logits_TV, ids_T, reduction="sum")

    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        h_TD = response_states(model, batch)
        chunks = zip(h_TD.split(LOGITS_AT_ONCE), batch.token_ids_T.split(LOGITS_AT_ONCE), strict=True)
        parts = [checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(parts).sum()


def resume(
    folder: Path, record: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, list[float]]:
    """Restore weights and optimizer from the latest save; the number of steps that are done, and their losses."""
    saves = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    if not saves:
        return 0, []
    state = json.loads((saves[-1] / "state.json").read_text(encoding="utf-8"))
    if state["record"] != json.loads(json.dumps(record)):
        raise RocktokensError(
            f"{folder} was left by a call with other models, data or settings: repeat that call, or remove the folder"
        )
    with torch.no_grad():
        for name, tensor in load_file(saves[-1] / "weights.safetensors").items():
            model.get_parameter(name).copy_(tensor)
    restore_optimizer(saves[-1], model, optimizer)
    return state["step"], state["losses"]


def save_unfinished(
    folder: Path,
    record: dict[str, Any],
    step: int,
    losses: list[float],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Save what a resumed call starts from, then drop the save before it: a kill at any moment leaves a whole one."""
    target, temporary = folder / f"step-{step}", folder / ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weights = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    save_file(weights, temporary / "weights.safetensors")
    state_of = {name: tensor.detach().cpu().contiguous() for name, tensor in optimizer_tensors(model, optimizer)}
    save_file(state_of, temporary / OPTIMIZER_FILE)
    state = {"record": record, "step": step, "losses": losses}
    (temporary / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
    temporary.replace(target)
    for older in folder.glob("step-*"):
        if older != target:
            shutil.rmtree(older)


def save_finished(loaded: LoadedModel, out: Path, record: dict[str, Any], dtype: str) -> None:
    """Write model, tokenizer and, last of all, the record that says it is whole."""
    loaded.model.eval().to(getattr(torch, dtype)).save_pretrained(out)
    loaded.tokenizer.save_pretrained(out)
    (out / MADE).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(out / ".unfinished", ignore_errors=True)


def is_made(out: Path) -> bool:
    """Whether a finished model is there, which is never written over."""
    if (out / MADE).exists():
        print(f"{out} is finished: remove it to make it again")
        return True
    return False


def identity(model: str) -> str:
    """What a model is, wherever it lies: the hash of a folder's weights, else its name."""
    return directory_fingerprint(model) if Path(model).is_dir() else model


def add_training_options(parser: argparse.ArgumentParser, defaults: Settings) -> None:
    """The options that ``Settings`` are made of, and those of running."""
    readers = {
        "epochs": between("--epochs", 0),
        "batch_size": at_least("--batch-size", 1),
        "micro_batch_size": at_least("--micro-batch-size", 1),
        "learning_rate": between("--learning-rate", 0),
        "warmup_share": between("--warmup-share", 0, 1, with_low=True),
        "seed": at_least("--seed", 0),
        "dtype": one_of("--dtype", DTYPES),
    }
    for name, default in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=readers[name], default=default)
    save_help = "how often to save what a resumed call needs"
    parser.add_argument("--save-steps", type=at_least("--save-steps", 1), default=500, help=save_help)
    parser.add_argument("--template", default=TEMPLATE, help="text of the user turn; {prompt} is the question")
    parser.add_argument("--max-prompt-length", type=at_least("--max-prompt-length", 1), default=512)
    parser.add_argument("--device", default="auto")


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that the options give."""
    return Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})


def main() -> None:
    """Fine-tune and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="hub id, folder or embedded id")
    parser.add_argument("data", type=Path, help="JSON lines with question and answer")
    parser.add_argument("out", type=new_folder, help="folder of the finished model")
    limit_help = "use only this many records from the top of the file"
    parser.add_argument("--limit", type=at_least("--limit", 1), help=limit_help)
    add_training_options(parser, Settings())
    arguments = parser.parse_args()
    if is_made(arguments.out):
        return
    prompts = read_prompts(arguments.data, arguments.template, arguments.limit)
    loaded = load_model(arguments.model, device=arguments.device)
    examples = worked_answers(loaded, prompts, arguments.max_prompt_length)
    source = {"model": identity(arguments.model), "data": file_sha256(arguments.data), "template": arguments.template}
    result = fine_tune(loaded, examples, settings_of(arguments), arguments.out, source, arguments.save_steps)
    print(f"{arguments.out}: {result['steps']} steps, loss {result['loss_first']:.3f} → {result['loss_last']:.3f}")


if __name__ == "__main__":
    run_main(main)
