"""Make a student for SmolLM2-135M-Instruct: the same model without some of its layers, so that there is a gap to close.

Run ``python examples/smollm2_student.py runs/smollm2-student``, then
``rocktokens distill smollm2-gsm8k --set models.student=runs/smollm2-student --set task.path=train.jsonl``.
"""

import argparse
from pathlib import Path

from torch import nn

from rocktokens.models.load import load_model


def main() -> None:
    """Drop every ``--every``-th layer of the upper half and save the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=5)
    arguments = parser.parse_args()
    loaded = load_model("smollm2-135m-instruct", device="cpu")
    model = loaded.model
    layers = list(model.model.layers)
    kept = [layer for index, layer in enumerate(layers) if index < len(layers) // 2 or index % arguments.every]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(kept)]
    model.save_pretrained(arguments.out)
    loaded.tokenizer.save_pretrained(arguments.out)
    print(f"{len(kept)} of {len(layers)} layers kept in {arguments.out}")


if __name__ == "__main__":
    main()
