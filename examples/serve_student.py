"""Write the copy of a student that a vLLM server starts from, and print the command that starts it.

    python examples/serve_student.py path/or/hub-id served
    python examples/serve_student.py runs/mine/checkpoints/step-100 served --dtype bfloat16

The copy's LM head is not tied to the embedding: a server that loads new weights over a tied head may keep the old one.
The server's environment needs vLLM and this package, without what it depends on: pip install --no-deps rocktokens.
"""

import argparse
import shlex
from pathlib import Path

from safetensors.torch import save_file

from rocktokens.models.load import load_model
from rocktokens.models.plain_weights import plain_weights


def main() -> None:
    """Write the copy and say how to serve it."""
    arguments = parse_arguments()
    loaded = load_model(arguments.student, dtype="float32", device="cpu")
    config = loaded.model.config
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    arguments.folder.mkdir(parents=True)
    config.save_pretrained(arguments.folder)
    loaded.tokenizer.save_pretrained(arguments.folder)
    save_file(plain_weights(loaded.model), arguments.folder / "model.safetensors", {"format": "pt"})
    print("VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 " + shlex.join(command(arguments)))


def command(arguments: argparse.Namespace) -> list[str]:
    """The server: log-probabilities before any ban, choices by the plug-in, reached from this machine only."""
    return [
        *("vllm", "serve", str(arguments.folder), "--served-model-name", "student", "--dtype", arguments.dtype),
        *("--host", "127.0.0.1", "--port", str(arguments.port), "--logprobs-mode", "raw_logprobs"),
        *("--logits-processors", "rocktokens.integrations.vllm_noise:RockNoise"),
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("student", help="a model id or a folder, as models.student of the run")
    parser.add_argument("folder", type=Path, help="a new folder for the copy")
    parser.add_argument("--dtype", default="float32", help="of the server; the student is trained in float32")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
