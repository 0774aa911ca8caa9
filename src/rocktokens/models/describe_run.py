"""What a run directory says of its models before anything is computed: config, tokenizer, names and hashes."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from rocktokens.config import Config, dump_config
from rocktokens.models.fingerprints import vocabulary_sha256
from rocktokens.run_dir import RunDir


def describe_run(run: RunDir, config: Config, tokenizer: PreTrainedTokenizerBase, **facts: Any) -> None:
    """Commit the config and the tokenizer, and note models, seed and ``facts`` in the manifest."""
    run.commit_text(run.config.name, dump_config(config))
    save_tokenizer(run, tokenizer)
    run.record_start(
        seed=config.run.seed,
        student=config.models.student,
        teacher=config.models.teacher,
        tokenizer_sha256=vocabulary_sha256(tokenizer.get_vocab()),
        **facts,
    )


def save_tokenizer(run: RunDir, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save the tokenizer that the run's traces are read with, and list its files in the manifest."""
    folder = run.path / "tokenizer"
    tokenizer.save_pretrained(folder)
    run.adopt([path.relative_to(run.path).as_posix() for path in sorted(folder.iterdir())])
