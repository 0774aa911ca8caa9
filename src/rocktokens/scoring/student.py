"""The student as it is trained: float32 weights, LoRA adapters where the config asks for them, no dropout of its own.

A model's own dropout (0.1 in GPT-2 and OPT) would make loss and trace those of another student than the one that wrote
the rollouts, and another at every forward. It is a setting of how the model was pre-trained and stays in its config.
``lora.lora_dropout`` is a setting of this run, and acts.
"""

from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from rocktokens.config import Config
from rocktokens.errors import ConfigError
from rocktokens.models.load import LoadedModel, load_model
from rocktokens.models.whole import load_adapter
from rocktokens.run_dir import derive_seed
from rocktokens.scoring.packed import checkpointing_kwargs


def load_student(config: Config, checkpoint: Path | None, device: str) -> LoadedModel:
    """The student in float32, with trainable adapters if configured, from its checkpoint if there is one."""
    source = config.models.student if checkpoint is None or config.lora.enabled else str(checkpoint)
    student = load_model(source, dtype="float32", device=device)
    _disable_dropout(student.model)
    if config.lora.enabled:
        student.model.requires_grad_(False)
        torch.manual_seed(derive_seed(config.run.seed, "adapters"))
        student = replace(student, model=with_adapters(student.model, config, checkpoint))
    if config.training.gradient_checkpointing:
        student.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing_kwargs(student.model))
    return student


def _disable_dropout(model: nn.Module) -> None:
    """Set every probability to 0: of dropout modules, and those that layers keep as numbers of their own.

    Not by eval mode, in which layers would not checkpoint their gradients.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def with_adapters(model: PreTrainedModel, config: Config, checkpoint: Path | None) -> PeftModel:
    """The model with the config's adapters, which alone are trained, from a checkpoint if there is one."""
    if checkpoint is not None:
        return load_adapter(model, checkpoint, f"the adapter {str(checkpoint)!r}", is_trainable=True)
    settings = config.lora.model_dump(exclude={"enabled"})
    try:
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    except ValueError as error:
        raise ConfigError(
            f"lora.target_modules = {config.lora.target_modules!r} does not fit the student: {error}"
        ) from None
    base = Path(config.models.student)
    adapted.peft_config["default"].base_model_name_or_path = str(base.resolve() if base.is_dir() else base)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(module, BaseTunerLayer):
            raise ConfigError(
                f"lora.target_modules = {config.lora.target_modules!r} reaches the embeddings or the LM head, which "
                "the loss reads directly: use 'all-linear' or a pattern for the layers only"
            )
    return adapted
