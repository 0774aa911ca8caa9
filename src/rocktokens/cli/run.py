"""``rocktokens run``: everything from a config to its report, whatever of it is not done yet."""

from dataclasses import asdict

from rocktokens.cli.common import AsJson, ConfigPath, Overrides, output, print_json, terminal
from rocktokens.config import load_config


def run(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Do what is left of a run, from distill to knockout, and write one page with the answers.

    The stages are distill, trace, find, gradients, knockout and report. A stage whose result is there, made with the
    same settings from what is there now, is passed over. Without rocks, gradients and knockout are skipped.
    Interrupted, the same command continues where it was.

    Example: [bold]rocktokens run pebbles --set training.max_steps=50[/bold]
    """
    settings = load_config(config, overrides)
    with terminal.status("loading"):
        from rocktokens.pipeline import run as run_pipeline
    result = run_pipeline(settings, terminal)
    if as_json:
        return print_json(asdict(result))
    everything = "everything else" if result.skipped else "everything"
    output.print(f"made: {', '.join(result.made) or f'nothing, {everything} was up to date'}")
    for because in dict.fromkeys(result.skipped.values()):
        names = ", ".join(name for name, own in result.skipped.items() if own == because)
        output.print(f"skipped: {names}; {because}", soft_wrap=True, markup=False)
    output.print(f"report: {result.report}", soft_wrap=True, markup=False)
    output.print(
        f"open it in a browser; token by token: rocktokens explore {result.directory}", soft_wrap=True, markup=False
    )
