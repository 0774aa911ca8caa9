"""Which block of the student a parameter belongs to, so that gradients can be told apart by where they act.

1. Anything called a norm is in the block ``norms``, wherever it stands.
2. Inside layer i, attention is ``layer i attention``, the feed-forward part (experts and router included) is
   ``layer i mlp``, and what is neither is ``layer i other``. An adapter belongs to the layer it adapts.
3. Outside the layers: ``embeddings``, ``lm head``, ``other``. A matrix that is both is ``embeddings and lm head``.
"""

import re
from typing import Any

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.(.+)")
_NORM = re.compile(r"norm|(?:^|\.)ln_|layer_?norm|\.ln\d?\.", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention|mixer|linear_attn", re.IGNORECASE)
_MLP = re.compile(r"mlp|feed_forward|ffn|moe|expert|router|(?:^|\.)fc\d|dense_(?:h_to_4h|4h_to_h)", re.IGNORECASE)
_HEAD = re.compile(r"lm_head|embed_out|output_projection", re.IGNORECASE)
_EMBEDDINGS = re.compile(r"embed|(?:^|\.)w[tp]e\.", re.IGNORECASE)
TIED = "embeddings and lm head"


def block_of(name: str) -> str:
    """The block of a parameter by its name alone, such as ``model.layers.3.self_attn.q_proj.weight``."""
    if _NORM.search(name):
        return "norms"
    layer = _LAYER.search(name)
    if layer:
        index, inside = layer.groups()
        part = "attention" if _ATTENTION.search(inside) else "mlp" if _MLP.search(inside) else "other"
        return f"layer {index} {part}"
    if _HEAD.search(name):
        return "lm head"
    return "embeddings" if _EMBEDDINGS.search(name) else "other"


def trainable_blocks(student: Any) -> dict[str, str]:
    """The block of every trainable parameter, by the parameter's name, in the order of the model.

    Args:
        student: a transformers causal LM, PEFT-wrapped or not.
    """
    causal_lm = student.get_base_model() if hasattr(student, "get_base_model") else student
    embeddings, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is embeddings.weight
    return {
        name: TIED if tied and parameter is embeddings.weight else block_of(name)
        for name, parameter in student.named_parameters()
        if parameter.requires_grad
    }


def ordered(blocks: set[str]) -> list[str]:
    """Blocks in the order of a forward pass; norms and what is left over come last."""
    return sorted(blocks, key=_place)


def _place(block: str) -> tuple[int, int, str]:
    layer = re.fullmatch(r"layer (\d+) (\w+)", block)
    if layer:
        return 1, int(layer[1]), layer[2]
    outside = {"embeddings": 0, TIED: 0, "lm head": 2, "norms": 3}
    return outside.get(block, 4), 0, block
