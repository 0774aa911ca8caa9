"""The teacher as a config asks for it: in memory beside the student, elsewhere on this machine, or behind a server.

1. Beside the student (the default): the model itself.
2. On a device of its own (``models.teacher_device``), or spread over all GPUs and then the CPU by accelerate: batches
   go there, states come back to the student's device, where a copy of the head is (``PlacedModel``).
3. Behind a vLLM server (``teacher.engine``): ``served.py``, or ``served_likely.py`` for one that only writes text.

Whatever it is, it has a head, or a ``LikelyHead``, and a device, and ``response_states`` of it are on that device.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import align_module_device

from rocktokens.config import Config, why_not_top_k
from rocktokens.display.numbers import percent
from rocktokens.errors import ConfigError
from rocktokens.models.distant import DistantModel, linear_head
from rocktokens.models.head import hidden_states, lm_head, require_same_logits
from rocktokens.models.load import LoadedModel, load_model, load_spread, resolve_device
from rocktokens.progress import Progress
from rocktokens.run_dir import RunDir
from rocktokens.scoring.batch import RolloutBatch, response_states, to_device
from rocktokens.scoring.packed import packs

if TYPE_CHECKING:  # it needs an extra
    from rocktokens.scoring.served_likely import Tails

SPREAD = "spread"


class PlacedModel(DistantModel):
    """A causal LM in memory whose layers are on other devices than its head is read on."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """Copy the head of ``model``, wherever that lies, to ``device``."""
        layer = model.get_output_embeddings()
        with torch.no_grad(), align_module_device(layer):
            bias_V = None if layer.bias is None else layer.bias.to(device, copy=True)
            head = linear_head(layer.weight.to(device, copy=True), bias_V)
        super().__init__(model.config, model.generation_config, head)
        self._is_spread = is_spread(model)
        self._elsewhere = (
            model.requires_grad_(False),
        )  # no module of this one, which would be moved and counted with it

    @property
    def packs(self) -> bool:
        """Whether the model takes rows without padding where it is; hooks that move tensors know none."""
        return not self._is_spread and packs(self._elsewhere[0])

    def states(self, batch: RolloutBatch) -> torch.Tensor:
        """Run the model where it is."""
        [model] = self._elsewhere
        there = batch if self._is_spread else batch.to(model.device)
        return to_device(response_states(model, there), self.device)

    @torch.inference_mode()
    def verify(self, input_ids: Sequence[int]) -> float:
        """Compare the model's own logits with those of the head here."""
        [model] = self._elsewhere
        ids_RL = torch.tensor([list(input_ids)], device=None if self._is_spread else model.device)
        own_TV = model(input_ids=ids_RL, use_cache=False).logits[0].to(self.device)
        ours_TV = lm_head(self).logits(hidden_states(model, ids_RL)[0].to(self.device))
        return require_same_logits(model, own_TV, ours_TV)


def load_teacher(config: Config, device: str) -> LoadedModel:
    """Load the teacher for a student on ``device``."""
    name, dtype, place = config.models.teacher, config.models.dtype, config.models.teacher_device
    if config.teacher.engine == "vllm":
        if place is not None:
            raise ConfigError(
                f"models.teacher_device = {place!r} places a teacher in memory, but teacher.engine is 'vllm': leave "
                "out one of them"
            )
        if config.teacher.is_top_k and (reason := why_not_top_k(config)):
            raise ConfigError(reason)  # of a config that was changed after it was checked
        try:
            from rocktokens.scoring.served import load_served
            from rocktokens.scoring.served_likely import load_served_likely
        except ModuleNotFoundError as error:
            raise ConfigError(
                f'teacher.engine = "vllm" needs {error.name}, which is not installed: pip install "rocktokens[vllm]"'
            ) from None
        return load_served_likely(config, device) if config.teacher.is_top_k else load_served(config, device)
    if place is None:
        return load_model(name, dtype, device)
    if place == SPREAD:
        loaded = load_spread(name, dtype)
    else:
        loaded = load_model(name, dtype, str(resolve_device(place, "models.teacher_device")))
    return placed(loaded, resolve_device(device))


def placed(loaded: LoadedModel, device: torch.device) -> LoadedModel:
    """Return a model whose states arrive on ``device``, wherever it runs; itself where that is the same."""
    if loaded.model.device == torch.empty(0, device=device).device and not is_spread(loaded.model):
        return loaded
    return replace(loaded, model=PlacedModel(loaded.model, device).eval())


def is_spread(model: Any) -> bool:
    """Whether accelerate has laid a model over several devices."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


def require_noted(teacher: Any, run: RunDir, config: Config) -> None:
    """Refuse a served teacher that is not the one this run used before."""
    if config.teacher.engine == "vllm":
        teacher.require_noted(run, config)


def note_teacher(teacher: Any, run: RunDir, config: Config) -> None:
    """Do that, and note what a served teacher answers, so that it is known again; needs the run's lock."""
    require_noted(teacher, run, config)
    if config.teacher.engine == "vllm":
        teacher.note(run, config)


def note_tails(teacher: Any, config: Config, progress: Progress) -> None:
    """Say what is known of the tails of a teacher of which only the likeliest tokens are known, if it was asked."""
    if config.teacher.is_top_k and teacher.tails.tokens:
        progress.note(tail_sentence(teacher.tails, config.teacher.top_k))


def tail_sentence(tails: "Tails", top_k: int) -> str:
    """Say what the tail of a teacher holds, and how often it is too small to be told from nothing."""
    return (
        f"the tail beside the teacher's {top_k} likeliest tokens has probability {tails.mean_mass:.2g} on average; at "
        f"{percent(tails.unresolved_share)} of {tails.tokens:,} tokens it is too small to be told from 0, and counts "
        "as the most it can be"
    )
