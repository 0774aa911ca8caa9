"""``rocktokens trace``: replay one probe set through several checkpoints."""

from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, ConfigPath, Overrides, output, print_json, terminal
from rocktokens.config import load_config


def trace(
    config: ConfigPath,
    restart: Annotated[bool, typer.Option("--restart", help="Drop the replay that is there and start again.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Score one probe set of rollouts under several checkpoints, without training.

    Example: [bold]rocktokens trace runs/mine/config.toml[/bold]

    Your own checkpoints:
    [bold]rocktokens trace run.toml --set 'trace.checkpoints=["ckpt/step-0", "ckpt/step-200"]'[/bold]
    """
    settings = load_config(config, overrides)
    with terminal.status("loading"):
        from rocktokens.replay.replay import replay
    result = replay(settings, restart=restart, progress=terminal)
    if as_json:
        return print_json(result.to_record())
    steps = ", ".join(map(str, result.checkpoints))
    output.print(f"{result.rollouts} rollouts, {result.tokens:,} tokens, replayed at checkpoints {steps}")
    output.print(f"next: rocktokens find {result.directory}", soft_wrap=True, markup=False)
