"""``rocktokens verify``: every file of a run against its hash, its schema and the rest of the run."""

import typer

from rocktokens.cli.common import AsJson, RunPath, output, print_json, terminal
from rocktokens.cli.tables import print_lines
from rocktokens.display.numbers import counted
from rocktokens.run_dir import RunDir


def verify(run: RunPath, as_json: AsJson = False) -> None:
    """Check every file of a run, and name the command that makes a damaged one again.

    Reads every byte, loads no model and changes nothing. A study's folder works too, with the runs of its arms. Ends
    with 0 where all is well, with 2 where a file is damaged, missing or of another run.

    Example: [bold]rocktokens verify runs/mine[/bold]
    """
    RunDir(run).require()
    with terminal.status("loading"):
        from rocktokens.integrity import verify_run

    result = verify_run(run, terminal)
    if as_json:
        print_json(result.to_record())
    else:
        read = f"{counted(result.n_files, 'file')}, {result.n_bytes / 1e6:,.1f} MB"
        if result.is_sound:
            output.print(f"[bold]All is well[/bold] ({read}).", highlight=False)
        else:
            wrong = counted(len(result.problems), "problem")
            output.print(f"[bold]{wrong}[/bold] ({read}):", highlight=False)
        print_lines(*(f"- {own.sentence}" for own in result.problems))
        if result.commands:
            print_lines("These make damaged files again, in this order:", *(f"  {own}" for own in result.commands))
        print_lines(*(f"note: {own.sentence}" for own in result.notes))
    if not result.is_sound:
        raise typer.Exit(2)
