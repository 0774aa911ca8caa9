"""``rocktokens trace``: replay one probe set through several checkpoints, of a run or your own."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from rocktokens.classes import TokenClasses
from rocktokens.cli.common import AsJson, Overrides, Terminal, output, print_json, terminal
from rocktokens.config import Config, TraceOptions, checkpoint_label, checkpoint_names, load_config, parse_config
from rocktokens.errors import RocktokensError
from rocktokens.run_dir import RunDir


def trace(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.TOML",
            help="The config of the run, or a recipe's name; not needed with --student-checkpoints.",
            show_default=False,
        ),
    ] = None,
    student_checkpoints: Annotated[
        list[str] | None,
        typer.Option(metavar="CKPT", help="Your own students, folders or hub ids, such as ckpt/*."),
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="The teacher: a folder or hub id.")] = None,
    data: Annotated[str | None, typer.Option(help="Prompts, one JSON object a line.")] = None,
    prompt_field: Annotated[str | None, typer.Option(help="Field of --data with the prompt; default question.")] = None,
    answer_field: Annotated[str | None, typer.Option(help="Field of --data with the answer; default answer.")] = None,
    run: Annotated[
        str | None, typer.Option(help="Folder of the run; default runs/ and the name of the checkpoints' folder.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Drop the replay that is there and start again.")] = False,
    classes: Annotated[
        bool,
        typer.Option(
            "--classes",
            help="Also record how much of each token's kl is choice within the classes of RUN/classes.json.",
        ),
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Score one probe set of rollouts under several checkpoints, without training.

    Example: [bold]rocktokens trace runs/mine/config.toml[/bold]

    Your own checkpoints:
    [bold]rocktokens trace --student-checkpoints ckpt/* --teacher T --data prompts.jsonl --run runs/mine[/bold]

    Classes that were found since (only the last checkpoint is scored again):
    [bold]rocktokens trace runs/mine/config.toml --classes[/bold]
    """
    configs, students = _told_apart(paths or [], student_checkpoints or [])
    options = TraceOptions(students, teacher, data, run, prompt_field, answer_field)
    settings, decided = _settings(configs, options, overrides or [])
    if classes:
        run_dir = RunDir(settings.run.directory)
        found = TokenClasses.load(run_dir.verified(run_dir.classes.name))
        found.require_tokenizer(run_dir.manifest().get("tokenizer_sha256", found.tokenizer_sha256))
        chosen = f"trace.classes={json.dumps(str(run_dir.classes))}"
        settings, _ = _settings(configs, options, [*(overrides or []), chosen])
    with terminal.status("loading"):
        from rocktokens.replay.replay import replay
    result = replay(settings, restart=restart, progress=_Announcing(decided) if decided else terminal)
    if as_json:
        return print_json(result.to_record())
    names = checkpoint_names(settings)
    steps = ", ".join(checkpoint_label(step, names) for step in result.checkpoints)
    output.print(f"{result.rollouts} rollouts, {result.tokens:,} tokens, replayed at checkpoints {steps}", markup=False)
    output.print(f"next: rocktokens find {result.directory}", soft_wrap=True, markup=False)


class _Announcing(Terminal):
    """Prints notes when work begins: what is refused before that is answered with one sentence alone."""

    def __init__(self, notes: Sequence[str]) -> None:
        self._notes = list(notes)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar, after the notes if it is the first."""
        while self._notes:
            self.note(self._notes.pop(0))
        with super().bar(label, total) as advance:
            yield advance


def _told_apart(paths: Sequence[str], students: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell configs from checkpoints: a shell makes several words of ckpt/*, and only the first is the option's."""
    configs = [path for path in paths if not students or path.endswith(".toml")]
    if len(configs) > 1:
        raise RocktokensError(
            f"trace takes one RUN.TOML, {len(configs)} were given ({', '.join(configs)}): put --student-checkpoints "
            "before checkpoints"
        )
    return configs, [*students, *(path for path in paths if path not in configs)]


def _settings(configs: Sequence[str], options: TraceOptions, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the config of the file, or of the options alone, and notes on what they leave open."""
    given, decided = (options if configs else options.complete()).overrides()
    settings = [*given, *overrides]
    return load_config(configs[0], settings) if configs else parse_config("", settings, "the options"), decided
