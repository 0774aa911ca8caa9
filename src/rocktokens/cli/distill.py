"""``rocktokens distill``: on-policy distillation with a weight policy, traced as it trains."""

from typing import Annotated, Any

import typer

from rocktokens.cli.common import AsJson, ConfigPath, Overrides, notes, output, print_json, progress_bar
from rocktokens.config import Config, load_config


def distill(
    config: ConfigPath,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint of the run.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Distil a teacher into a student on the student's own rollouts, with every token traced.

    Example: [bold]rocktokens distill pebbles --set training.max_steps=50[/bold]

    Several devices: [bold]accelerate launch -m rocktokens.cli.main distill run.toml[/bold]
    """
    result = run_distill(load_config(config, overrides), resume=resume)
    if as_json:
        return print_json(result)
    done = "was complete already" if result["already_complete"] else "done"
    output.print(f"{done}: {result['steps']} steps, {result['tokens_seen']:,} response tokens")
    output.print(f"student: {result['checkpoint']}", soft_wrap=True, markup=False)
    output.print(f"next:    rocktokens trace {result['directory']}/config.toml", soft_wrap=True, markup=False)


def run_distill(config: Config, *, resume: bool) -> dict[str, Any]:
    """Train with a progress bar and return the result as a record."""
    with notes.status("loading"):
        from accelerate import PartialState

        from rocktokens.training.loop import distill as train

    with progress_bar("distilling", config.training.max_steps) as advance:
        made = 0

        def show(step: int, _total: int, record: dict[str, Any]) -> None:
            nonlocal made
            advance(step - made)
            made = step
            if step == 1 or step % config.training.save_steps == 0:
                notes.print(f"step {step}: kl {record['kl']:.3f}, {record['response_length']:.0f} tokens a response")

        result = train(config, resume=resume, progress=show)
        advance(config.training.max_steps - made)
    PartialState().destroy_process_group()
    return {
        "directory": str(result.directory),
        "checkpoint": str(result.checkpoint),
        "steps": result.steps,
        "tokens_seen": result.tokens_seen,
        "already_complete": result.already_complete,
    }
