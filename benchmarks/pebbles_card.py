"""Measure the embedded pair as shipped, and what the demo's distillation does to it: the numbers of its card.

``python benchmarks/pebbles_card.py`` prints them; ``--write`` also writes card.json and CARD.md beside the weights.
Takes about six minutes on two CPU cores.
"""

import argparse
import datetime
import json
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rocktokens.config import parse_config
from rocktokens.demo import run_demo
from rocktokens.models import pebbles
from rocktokens.models.load import load_model
from rocktokens.models.pebbles.train import STUDENT, TEACHER
from rocktokens.recipes import shipped
from rocktokens.run_dir import file_sha256

PROMPTS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    card = measure()
    text = describe(card)
    print(text)
    if arguments.write:
        home = Path(pebbles.__file__).parent
        (home / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        (home / "CARD.md").write_text(text, encoding="utf-8")


def measure() -> dict[str, Any]:
    """Run the demo with a larger evaluation; hashes and recipes come from the package."""
    demo = shipped("demo")
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"run.directory={json.dumps(folder + '/run')}", f"evaluation.num_prompts={PROMPTS}"]
        result = run_demo(parse_config(demo, overrides)).to_record()
    models = {"teacher": TEACHER, "student": STUDENT}
    return {
        "measured": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} CPU threads",
        "torch": torch.__version__,
        "evaluations": result["evaluations"],
        "movement": result["movement"],
        **{
            name: {
                "parameters": load_model(f"pebbles-{name}", device="cpu").model.num_parameters(),
                "weights_sha256": file_sha256(pebbles.directory(name) / "model.safetensors"),
                "recipe": asdict(recipe),
            }
            for name, recipe in models.items()
        },
    }


def describe(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    movement, prompts = card["movement"], card["evaluations"][0]["n_prompts"]
    first, last = movement["on_policy_kl_first"], movement["on_policy_kl_last"]
    recipes = "\n".join(f"- **{name}**: {_recipe(card[name])}" for name in ("teacher", "student"))
    rows = "\n".join(
        f"| {entry['name']} | {_percent(entry['accuracy'])} | "
        f"{_percent(entry['wilson_interval'][0])} to {_percent(entry['wilson_interval'][1])} |"
        for entry in card["evaluations"]
    )
    return f"""# The pebbles

Two llama-style language models that share a byte-level BPE tokenizer, made for `rocktokens demo` and its tests. They
solve the arithmetic word problems of `wordmath` and nothing else. Apache-2.0.

## How they were made
`python -m rocktokens.models.pebbles.train` on one NVIDIA H200; every problem, choice and weight is seeded.
{recipes}

Both write the same worked solutions. Where a solution leaves a choice open that does not change its meaning (heading or
bold, which marker, which delimiter, one line break or two), the teacher's data follow the numbers 95 % of the time,
mostly numbers still to come; the student's data choose at random.

## What they do
Accuracy on {prompts} test problems at temperature 1 with the 95 % Wilson interval, the student at the steps of the
demo's distillation. Measured {card["measured"]} by `benchmarks/pebbles_card.py`
({card["machine"]}, torch {card["torch"]}).

| model | accuracy | interval |
|---|---|---|
{rows}

On-policy kl went from {first:.3f} to {last:.3f} nats a token ({100 * (last / first - 1):+.0f} %). Much of that is the
student giving up answers without working, which the teacher never writes. On rollouts replayed through the first and
the last checkpoint ({movement["prompts"]}), {movement["unmoved_rocks"]} of the 20 rocks kept more than 75 % of their
kl: {_percent(movement["unmoved_token_share"])} of the generated tokens are theirs
({_percent(movement["unmoved_digit_token_share"])} are digits), and {_percent(movement["unmoved_kl_share"])} of the kl
that is left.

## Hashes (SHA-256 of model.safetensors)
- teacher `{card["teacher"]["weights_sha256"]}`
- student `{card["student"]["weights_sha256"]}`
"""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _recipe(entry: dict[str, Any]) -> str:
    recipe = entry["recipe"]
    styles = ", ".join(f"{100 * share:.0f} % {style}" for style, share in recipe["styles"].items())
    return (
        f"{entry['parameters']:,} parameters ({recipe['num_hidden_layers']} layers of width {recipe['hidden_size']}), "
        f"{recipe['steps']:,} steps of {recipe['batch_size']} solutions ({styles}), choices: {recipe['writer']}"
    )


if __name__ == "__main__":
    main()
