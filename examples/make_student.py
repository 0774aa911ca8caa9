"""Make a student: keep some layers of a causal LM, and heal it on a teacher's answers.

1. The layers of ``--layers`` stay, bit for bit and in order (``0-17,28-29``: the first 18 and the last 2 of 30), and
   so do embeddings, final norm and LM head.
2. With ``--teacher`` and ``--prompts`` the teacher answers the prompts, temperature 1 unless told otherwise; the pruned
   model is fine-tuned on the answers that ended within the length limit. On a GPU the teacher computes in bfloat16.
3. Answers are kept in OUT/.answers, a part at a time, and the fine-tuning in OUT/.unfinished: the same command resumes.

Run ``python examples/make_student.py runs/teacher runs/student --layers 0-21,28-29 --teacher runs/teacher
--prompts renumbered-train.jsonl --num-prompts 16000``. Without a teacher the model is only pruned.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from make_teacher import (
    Settings,
    add_training_options,
    fine_tune,
    identity,
    is_made,
    read_prompts,
    save_finished,
    settings_of,
)
from options import at_least, between, new_folder, run_main
from ticker import ticker
from torch import nn

from rocktokens.errors import RocktokensError
from rocktokens.models.fingerprints import same_tokenizer
from rocktokens.models.head import lm_head
from rocktokens.models.load import LoadedModel, load_model
from rocktokens.rollouts.encode import Sampling, make_rollouts
from rocktokens.rollouts.sampler import TransformersSampler
from rocktokens.rollouts.store import rollouts_table, table_rollouts
from rocktokens.run_dir import derive_seed, file_sha256
from rocktokens.types import Prompt, Rollout

PART = 1024
"""Answers that are kept together; a kill loses at most this many."""
DECODED_TOGETHER = 256
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Keys of a config that have an entry for every layer."""


def parse_layers(text: str, count: int) -> list[int]:
    """``0-2,5`` is [0, 1, 2, 5]; each layer once, in order, of those the model has."""
    try:
        spans = [[int(end) for end in span.split("-")] for span in text.split(",")]
        layers = [index for span in spans for index in range(span[0], span[-1] + 1)]
    except ValueError:
        raise RocktokensError(f"--layers is {text!r}: write indices and spans, such as 0-17,28-29") from None
    if not layers or layers != sorted(set(layers)) or layers[-1] >= count:
        raise RocktokensError(f"--layers is {text!r}: name layers in order, each once, from 0 to {count - 1}")
    return layers


def keep_layers(model: Any, kept: Sequence[int]) -> None:
    """Drop all layers but these, in place; each learns its new place, by which it finds its keys in a cache."""
    config = model.config.get_text_config()
    holder, name = layer_list(model, config.num_hidden_layers)
    layers = nn.ModuleList([getattr(holder, name)[index] for index in kept])
    setattr(holder, name, layers)
    for place, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
    config.num_hidden_layers = len(kept)
    for key in PER_LAYER:
        if entries := getattr(config, key, None):
            setattr(config, key, [entries[index] for index in kept])
    require_loadable(model)


def layer_list(model: Any, count: int) -> tuple[nn.Module, str]:
    """Return the module that holds the model's layers, and under which name."""
    for holder in model.base_model.modules():
        for name, child in holder.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return holder, name
    raise RocktokensError(f"{type(model).__name__} does not hold its {count} layers in one list: prune it by hand")


def require_loadable(model: Any) -> None:
    """Refuse a pruned model whose config describes other tensors: some configs say by number what a layer is."""
    with torch.device("meta"):
        described = type(model)(model.config)
    own, again = ({name: value.shape for name, value in m.named_parameters()} for m in (model, described))
    if own != again:
        name = min(key for key in own.keys() | again.keys() if own.get(key) != again.get(key))
        raise RocktokensError(
            f"--layers: {type(model).__name__} would not load again with these layers, since its config says by number "
            f"what a layer is and {name} would differ: keep other layers, or prune it by hand"
        )


def teacher_answers(
    teacher: LoadedModel, prompts: Sequence[Prompt], folder: Path, sampling: Sampling, batch_size: int
) -> list[Rollout]:
    """What the teacher answers, part by part; parts that are in ``folder`` are read instead."""
    folder.mkdir(parents=True, exist_ok=True)
    sampler = TransformersSampler(
        teacher.model,
        teacher.eos_ids,
        teacher.pad_id,
        batch_size=batch_size,
        vocab_size=lm_head(teacher.model).width,
        threads=1 if teacher.model.device.type == "cpu" else None,
    )
    answers: list[Rollout] = []
    with ticker("the teacher answers", len(prompts)) as advance:
        for first in range(0, len(prompts), PART):
            path = folder / f"part-{first // PART}.parquet"
            own = prompts[first : first + PART]
            if path.exists():
                answers += table_rollouts(pq.read_table(path))
                advance(len(own))
                continue
            part = make_rollouts(sampler, teacher.tokenizer, own, sampling, first_rollout_id=first, on_done=advance)
            temporary = path.with_name(f".{path.name}.tmp")
            pq.write_table(rollouts_table(part), temporary, compression="zstd")
            temporary.replace(path)
            answers += part
    return answers


def heal(student: LoadedModel, arguments: argparse.Namespace, source: dict[str, Any]) -> None:
    """Let the teacher answer, and fine-tune the student on what ended."""
    prompts = read_prompts(arguments.prompts, arguments.template, arguments.num_prompts)
    dtype = "bfloat16" if student.model.device.type == "cuda" else "float32"
    teacher = load_model(arguments.teacher, dtype, arguments.device)
    same_tokenizer(student.tokenizer, teacher.tokenizer)
    sampling = Sampling(
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
        seed=derive_seed(arguments.seed, "teacher answers"),
        max_prompt_length=arguments.max_prompt_length,
    )
    source |= {
        "teacher": identity(arguments.teacher),
        "prompts": file_sha256(arguments.prompts),
        "num_prompts": arguments.num_prompts,
        "template": arguments.template,
        "sampling": asdict(sampling),
        "dtype": dtype,
    }
    folder = arguments.out / ".answers"
    require_same(folder, source)
    answers = teacher_answers(teacher, prompts, folder, sampling, DECODED_TOGETHER)
    finished = [answer for answer in answers if answer.finished]
    print(f"{len(finished):,} of {len(answers):,} answers ended within {arguments.max_new_tokens} tokens")
    if not finished:
        raise RocktokensError("no answer of the teacher ended: raise --max-new-tokens")
    del teacher
    result = fine_tune(student, finished, settings_of(arguments), arguments.out, source, arguments.save_steps)
    shutil.rmtree(folder)
    print(f"{arguments.out}: {result['steps']} steps, loss {result['loss_first']:.3f} → {result['loss_last']:.3f}")


def require_same(folder: Path, source: dict[str, Any]) -> None:
    """Refuse to mix the answers of two calls that ask for different ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / "source.json", json.dumps(source, sort_keys=True)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise RocktokensError(f"{folder} holds answers of a call with other settings: repeat it, or remove the folder")
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def main() -> None:
    """Prune, heal if there is a teacher, and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="what to prune: hub id, folder or embedded id")
    parser.add_argument("out", type=new_folder, help="folder of the finished student")
    parser.add_argument("--layers", required=True, help="layers to keep, such as 0-17,28-29")
    parser.add_argument("--teacher", help="whose answers heal the student")
    parser.add_argument("--prompts", type=Path, help="JSON lines with the questions that the teacher answers")
    prompts_help = "use only this many from the top of the file"
    parser.add_argument("--num-prompts", type=at_least("--num-prompts", 1), help=prompts_help)
    temperature = between("--temperature", 0, with_low=True)
    parser.add_argument("--temperature", type=temperature, default=1.0, help="of the teacher's answers")
    parser.add_argument("--max-new-tokens", type=at_least("--max-new-tokens", 1), default=320)
    add_training_options(parser, Settings(learning_rate=1e-4))
    arguments = parser.parse_args()
    if (arguments.teacher is None) != (arguments.prompts is None):
        raise RocktokensError("--teacher and --prompts go together: give both to heal the student, none to prune only")
    if is_made(arguments.out):
        return
    student = load_model(arguments.model, device=arguments.device)
    count = student.model.config.get_text_config().num_hidden_layers
    kept = parse_layers(arguments.layers, count)
    keep_layers(student.model, kept)
    source: dict[str, Any] = {"model": identity(arguments.model), "layers": kept}
    print(f"{len(kept)} of {count} layers kept", flush=True)
    if arguments.teacher is None:
        return save_finished(student, arguments.out, source, arguments.dtype)
    heal(student, arguments, source)


if __name__ == "__main__":
    run_main(main)
