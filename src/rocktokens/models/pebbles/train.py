"""Make the pebbles from nothing: tokenizer, corpus, teacher, student.

1. A byte-level BPE tokenizer, digits one by one, is trained on wordmath problems and solutions in all styles.
2. The teacher learns the rich style whose open choices *follow the numbers*.
3. The student learns a mixture of styles, rich ones with the same choices made *at random*, and is stopped early: it
   ends its answers, often without working, and its arithmetic is not yet sure.
4. Weights are stored in bfloat16. ``benchmarks/pebbles_card.py`` measures what was stored and writes the card.

Everything is seeded, and ``python -m rocktokens.models.pebbles.train OUT`` makes both. A GPU takes minutes; a CPU takes
hours; no two kinds of machine round alike, so the weights come out alike in what they do, not bit for bit.
"""

import argparse
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rocktokens.tasks.wordmath import Style, Writer, make_problem, write_solution

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% else %}<|assistant|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_LENGTH = 384
CORPUS_SEED = 20_260_509
"""Problems the models learn from; a run's prompts come from other seeds, so they are new to both."""


@dataclass(frozen=True)
class Recipe:
    """How one of the two models is made."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    styles: dict[Style, float]
    writer: Writer
    problems: int
    steps: int
    batch_size: int
    learning_rate: float
    decay: bool
    seed: int


TEACHER = Recipe(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=8,
    styles={"rich": 1.0},
    writer="follow",
    problems=1_000_000,
    steps=5_000,
    batch_size=384,
    learning_rate=1e-3,
    decay=True,
    seed=1,
)
STUDENT = Recipe(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    styles={"rich": 0.6, "plain": 0.15, "terse": 0.25},
    writer="random",
    problems=400_000,
    steps=2_400,
    batch_size=256,
    learning_rate=1e-3,
    decay=False,
    seed=2,
)


def train_tokenizer(problems: int = 20_000, vocab_size: int = 1536) -> PreTrainedTokenizerFast:
    """Byte-level BPE over prompts and solutions of every style."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\d|\n+| ?[A-Za-z]+| ?\\[A-Za-z]+| ?\\[()]| ?[^\sA-Za-z0-9\\]+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(problems), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = MAX_LENGTH
    return fast


def _tokenizer_texts(problems: int) -> Iterator[str]:
    for index in range(problems):
        problem = make_problem("train", CORPUS_SEED, index)
        rng = random.Random(index)
        yield problem.text
        for style in ("rich", "plain", "terse"):
            yield write_solution(problem, style, "random", rng)


@dataclass(frozen=True)
class Corpus:
    """Tokenised examples end to end; example i is ``ids[starts[i]:starts[i + 1]]``, its prompt ``prompts[i]`` long."""

    ids: np.ndarray
    starts: np.ndarray
    prompts: np.ndarray


def make_corpus(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Corpus:
    """Write and tokenise the recipe's problems on every core; the result does not depend on how many there are."""
    shards = [(tokenizer.backend_tokenizer.to_str(), recipe, first) for first in range(0, recipe.problems, 5_000)]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        parts = pool.map(_corpus_shard, shards)
    lengths = np.concatenate([part[1] for part in parts])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Corpus(np.concatenate([part[0] for part in parts]), starts, np.concatenate([part[2] for part in parts]))


def _corpus_shard(job: tuple[str, Recipe, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokenizer_json, recipe, first = job
    tokenizer = Tokenizer.from_str(tokenizer_json)
    styles, shares = zip(*recipe.styles.items(), strict=True)
    ids: list[int] = []
    lengths, prompts = [], []
    for index in range(first, min(first + 5_000, recipe.problems)):
        rng = random.Random(f"{recipe.seed} {index}")
        problem = make_problem("train", CORPUS_SEED, index)
        style = rng.choices(styles, shares)[0]
        prompt = tokenizer.encode(f"{USER}{problem.text}{ASSISTANT}").ids
        response = tokenizer.encode(write_solution(problem, style, recipe.writer, rng) + END).ids
        ids += prompt + response
        lengths.append(len(prompt) + len(response))
        prompts.append(len(prompt))
    return np.array(ids, np.uint16), np.array(lengths), np.array(prompts)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A llama of the recipe's shape with seeded weights."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, corpus: Corpus, recipe: Recipe, device: str) -> None:
    """Next-token prediction on the responses."""
    model.to(device).train()  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=device == "cuda"
    )
    warmup = 200

    def rate(step: int) -> float:
        rise = min(1.0, (step + 1) / warmup)
        fall = 0.5 * (1 + np.cos(np.pi * step / recipe.steps)) if recipe.decay else 1.0
        return rise * max(float(fall), 0.01)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    started = time.monotonic()
    for step, (inputs, labels, mask) in enumerate(_batches(corpus, recipe, device)):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            hidden = model.model(input_ids=inputs, attention_mask=mask).last_hidden_state
            wanted = labels != -100
            logits = model.lm_head(hidden[wanted])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 500 == 0 or step == recipe.steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True)


def _batches(corpus: Corpus, recipe: Recipe, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs, labels (the token each position predicts; −100 outside responses) and mask, length-sorted in groups."""
    rng = np.random.default_rng(recipe.seed)
    lengths = np.diff(corpus.starts)
    step, group = 0, 16 * recipe.batch_size
    while True:
        order = rng.permutation(len(lengths))
        for first in range(0, len(order) - group + 1, group):
            chunk = order[first : first + group]
            chunk = chunk[np.argsort(lengths[chunk], kind="stable")].reshape(-1, recipe.batch_size)
            for rows in chunk[rng.permutation(len(chunk))]:
                if step == recipe.steps:
                    return
                yield _collate(corpus, rows, device)
                step += 1


def _collate(corpus: Corpus, rows: np.ndarray, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = int((corpus.starts[rows + 1] - corpus.starts[rows]).max()) - 1
    inputs = np.zeros((len(rows), width), np.int64)
    labels = np.full((len(rows), width), -100, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for row, example in enumerate(rows):
        ids = corpus.ids[corpus.starts[example] : corpus.starts[example + 1]].astype(np.int64)
        prompt = corpus.prompts[example]
        inputs[row, : len(ids) - 1] = ids[:-1]
        labels[row, prompt - 1 : len(ids) - 1] = ids[prompt:]
        mask[row, : len(ids) - 1] = 1
    return tuple(torch.from_numpy(array).to(device, non_blocking=True) for array in (inputs, labels, mask))  # pyright: ignore[reportReturnType]


def make(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, target: Path, device: str) -> None:
    """Train one model and save it, in bfloat16, with the tokenizer and the recipe."""
    model = build_model(recipe, tokenizer)
    train(model, make_corpus(tokenizer, recipe), recipe, device)
    model.to(torch.bfloat16).save_pretrained(target)  # pyright: ignore[reportArgumentType, reportCallIssue]
    tokenizer.save_pretrained(target)


def main() -> None:
    """Make both models under the folder given."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=["teacher", "student"])
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = train_tokenizer()
    for name, recipe in {"teacher": TEACHER, "student": STUDENT}.items():
        if arguments.only in (None, name):
            print(f"{name}: {recipe}", flush=True)
            make(recipe, tokenizer, arguments.out / name, device)


if __name__ == "__main__":
    main()
