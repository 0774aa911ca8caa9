"""Tiny random models in TRL's trainer, and the loss of METHOD 7 on its completions, naively and in float64.

As a script it is one of several processes that train together: ``trl_case.py FOLDER``.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
from trl import DistillationConfig, DistillationTrainer

from rocktokens.classes import TokenClasses
from rocktokens.integrations.trl import RockDistillationTrainer
from rocktokens.models import pebbles
from rocktokens.policies import Coarse, WeightPolicy, make_policy
from rocktokens.traces.store import TraceStore
from rocktokens.types import TokenScores

PROMPTS = [f"Ann has {count} apples and buys {count + 3} more." for count in range(2, 26)]
LENGTH = 10
ROCKS = list(range(0, 1301, 3))
"""A third of the vocabulary: a random student writes them all the time."""
CLASSES = TokenClasses([range(0, 500), range(500, 1300, 2)])


def tiny_model(seed: int, width: int) -> LlamaForCausalLM:
    """A random model; one token in thirteen ends an answer, so that answers are of unequal length."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1301,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=128,
            initializer_range=0.3,
            eos_token_id=[1, *range(7, 1301, 13)],
            pad_token_id=0,
        )
    )


class Gradients(TrainerCallback):
    """The gradients of every optimiser step, before it is made."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.steps.append({name: parameter.grad.clone() for name, parameter in named})


def make_trainer(
    kind: Callable[..., Any], tokenizer: Any, folder: Path, accumulate: int = 1, steps: int = 1, **extra: Any
) -> Any:
    """Four rollouts a step and process, whatever the accumulation."""
    settings = {
        "max_completion_length": LENGTH,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        **extra.pop("settings", {}),
    }
    args = DistillationConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4 // accumulate,
        gradient_accumulation_steps=accumulate,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        max_grad_norm=0.0,
        **settings,
    )
    trainer = kind(
        model=tiny_model(1, 16),
        teacher_model=tiny_model(2, 24),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:4]}),
        processing_class=tokenizer,
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def double_scores(student: Any, teacher: Any, micro: dict[str, Any]) -> tuple[TokenScores, torch.Tensor, torch.Tensor]:
    """Naive float64 scores of a micro-batch, with the tokens and the forward KL, differentiable in the student.

    The choice is that within ``CLASSES``.
    """
    ids = torch.cat([micro["prompt_ids"], micro["completion_ids"]], dim=1)
    mask = torch.cat([micro["prompt_mask"], micro["completion_mask"]], dim=1)
    kept = micro["completion_mask"].bool()
    first = micro["prompt_ids"].shape[1] - 1
    log_p, log_q = (
        torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits, -1)[:, first:-1][kept]
        for model in (student, teacher)
    )
    tokens = micro["completion_ids"][kept]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    forward = (log_q.exp() * (log_q - log_p)).sum(-1)
    logp_s, logp_t = (log.gather(-1, tokens[:, None]).squeeze(-1) for log in (log_p, log_q))
    gradient = log_p.exp() * (log_p - log_q - kl[:, None])
    entropies = [-(log.exp() * log).sum(-1) for log in (log_p, log_q)]
    choice = torch.zeros_like(kl)
    for members in map(list, CLASSES.groups):
        own, other = (log[:, members] - log[:, members].logsumexp(-1, keepdim=True) for log in (log_p, log_q))
        choice = choice + log_p[:, members].exp().sum(-1) * (own.exp() * (own - other)).sum(-1)
    columns = (kl, logp_s, logp_t, *entropies, gradient.norm(dim=-1))
    return TokenScores(*columns, kl_choice=choice), tokens, forward


def naive(
    micros: list[dict[str, Any]], policy: WeightPolicy, denominator: str = "all", shift: int = 0
) -> dict[str, torch.Tensor]:
    """The gradient of METHOD 7 on the completions of the first update, by autograd in float64."""
    student, teacher = tiny_model(1, 16).double(), tiny_model(2, 24).double()
    parts = [double_scores(student, teacher, micro) for micro in micros]
    names = [name for name, _ in parts[0][0].present()]
    scores = TokenScores(**{name: torch.cat([getattr(scores, name) for scores, _, _ in parts]) for name in names})
    tokens, forward = (torch.cat([part[index] for part in parts]) for index in (1, 2))
    lengths = torch.cat([micro["completion_mask"].sum(1) for micro in micros])
    rollouts = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    weights = policy(scores, torch.roll(tokens, shift), positions, rollouts, 0).double()
    term = scores.kl
    if policy.term == "asymmetric":
        term = torch.where(scores.logp_teacher > scores.logp_student, scores.kl, forward)
    if isinstance(policy.term, Coarse):
        term = term - (1 - policy.term.lam) * scores.kl_choice
    loss = (weights * term).sum() / (weights.sum() if denominator == "kept" else len(weights))
    names, parameters = zip(*student.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """As a share of the largest entry."""
    scale = max(float(values.abs().max()) for values in other.values())
    return max(float((one[name] - values).abs().max()) for name, values in other.items()) / scale


POLICIES = {
    "frozen": lambda: make_policy("rocks", rocks=ROCKS, lam=0.0),
    "soft": lambda: make_policy("rocks", rocks=ROCKS, lam=0.3),
    "asymmetric": lambda: make_policy("asymmetric"),
    "coarse": lambda: make_policy("coarse", classes=CLASSES),
    "coarse product": lambda: make_policy(
        "product", policies=[{"name": "coarse", "classes": CLASSES, "lam": 0.3}, {"name": "tip", "rho": 0.4}]
    ),
    "tip": lambda: make_policy("tip", rho=0.4),
    "product": lambda: make_policy(
        "product", policies=[{"name": "asymmetric"}, {"name": "prefix_importance"}, {"name": "rocks", "rocks": ROCKS}]
    ),
}


SHARED = (("tip", "kept"), ("frozen", "all"))
"""Policies and denominators that several processes share."""


def trained(*args: Any, **extra: Any) -> Any:
    """A trainer that has trained; TRL seeds its sampling when a trainer is made."""
    trainer = make_trainer(*args, **extra)
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    """Of training and evaluation."""
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


def training_rows(run: Path) -> Any:
    """The training traces in order."""
    return TraceStore(run, source="training").table().order_by(["rollout_id", "position"]).to_pyarrow()


def require_stock(tokenizer: Any, folder: Path) -> None:
    """Weights of 1 are TRL's own training, bit for bit, however many processes train."""
    stock = trained(DistillationTrainer, tokenizer, folder / "stock", 2, steps=2)
    for denominator in ("all", "kept"):
        extra = {"steps": 2, "denominator": denominator}
        ours = trained(RockDistillationTrainer, tokenizer, folder / denominator, 2, **extra)
        assert losses(ours) == losses(stock)
        assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), stock.model.parameters(), strict=True))


def main(folder: Path) -> None:
    """Train with the other processes; leave this one's gradients and completions of each case in the folder."""
    tokenizer = AutoTokenizer.from_pretrained(pebbles.directory("student"))
    require_stock(tokenizer, folder)
    for policy, denominator in SHARED:
        seen, place = Gradients(), folder / f"{policy}-{denominator}"
        trainer = make_trainer(
            RockDistillationTrainer,
            tokenizer,
            place / "trl",
            2,
            policy=POLICIES[policy](),
            denominator=denominator,
            trace_dir=place / "run",
            callbacks=[seen],
        )
        trainer.train()
        rank = trainer.accelerator.process_index
        save_file(seen.steps[0], place / f"gradients-{rank}.safetensors")
        for index, micro in enumerate(trainer._buffered_inputs):
            save_file({name: x.contiguous() for name, x in micro.items()}, place / f"micro-{rank}-{index}.safetensors")
    trainer.accelerator.wait_for_everyone()  # neither rank takes the store away while the other still talks to it
    trainer.accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
