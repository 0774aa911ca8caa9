"""What ``rocktokens study`` prints: a conclusion, a verdict for every pair, and what the arms reached and cost."""

from rocktokens.cli.common import output
from rocktokens.cli.tables import heading, print_lines, print_table
from rocktokens.display.numbers import level
from rocktokens.display.text import printable
from rocktokens.report.page.answers import gain_conclusion
from rocktokens.report.tables import arm_table, collapse_table, control_table, together
from rocktokens.studies.decisions import verdict_lines
from rocktokens.studies.records import StudyResult


def print_study(result: StudyResult) -> None:
    """Print the conclusion, the verdicts in the order of the pairs, then the arms, and how well controls match."""
    print_lines(gain_conclusion(result))
    if result.collapsed_arms:
        print_lines("")
        print_table(collapse_table(result))
    intervals = f"{level(result.alpha)} intervals for {together(result)}"
    heading("Verdicts", f"{intervals}, within each way to compare; denominator {result.denominator}")
    for line in (*verdict_lines(result), *result.notes):
        output.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    print_lines("")
    print_table(arm_table(result))
    if (controls := control_table(result)) is not None:
        print_table(controls)
