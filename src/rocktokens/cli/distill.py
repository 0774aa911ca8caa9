"""``rocktokens distill``: on-policy distillation with a weight policy, traced as it trains."""

from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, ConfigPath, Overrides, output, print_json, terminal
from rocktokens.config import load_config


def distill(
    config: ConfigPath,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the latest checkpoint of the run; a finished one to a larger training.max_steps.",
        ),
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Distil a teacher into a student on the student's own rollouts, with every token traced.

    Example: [bold]rocktokens distill pebbles --set training.max_steps=50[/bold]

    Several devices: [bold]accelerate launch -m rocktokens.cli.main distill run.toml[/bold]
    """
    settings = load_config(config, overrides)
    with terminal.status("loading"):
        from accelerate import PartialState

        from rocktokens.training.loop import distill as train
    result = train(settings, resume=resume, progress=terminal)
    state = PartialState()
    state.destroy_process_group()
    if not state.is_main_process:
        return None
    if as_json:
        return print_json(result.to_record())
    done = "was complete already" if result.already_complete else "done"
    output.print(f"{done}: {result.steps} steps, {result.tokens_seen:,} response tokens")
    output.print(f"student: {result.checkpoint}", soft_wrap=True, markup=False)
    output.print(f"next:    rocktokens trace {result.directory}/config.toml", soft_wrap=True, markup=False)
