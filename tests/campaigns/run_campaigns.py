"""Run the campaigns: kills, failing disks, damaged files, fuzzed inputs, model families, hostile texts.

    python tests/campaigns/run_campaigns.py                       # all of them, two hours on two cores
    python tests/campaigns/run_campaigns.py corruption fuzzing    # some
    python tests/campaigns/run_campaigns.py --case kills/find/3   # one case again, with what it found

Interrupted, the same command goes on; ``--restart`` forgets what is known. The exit code is 1 where a case failed or
is left over. See ``frame.py`` for how a campaign works, and docs/reliability.md for what the last ones found.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import corruption
import failing_calls
import families
import frame
import fuzzing
import hostile
import kills

CAMPAIGNS = {own.CAMPAIGN.name: own.CAMPAIGN for own in (corruption, fuzzing, hostile, families, failing_calls, kills)}
"""In the order of value."""
MINUTES = 20
"""Of each campaign, at most: six of them take two hours."""


def run_all(names: list[str], minutes: float, restart: bool) -> bool:
    """Run campaigns one after the other and print their tables; whether all cases were tried and none failed."""
    is_clean = True
    for name in names:
        campaign, began = CAMPAIGNS[name], time.monotonic()
        journal = frame.journal_of(campaign)
        if restart:
            journal.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"rocktokens-{name}-") as folder:
            results = frame.run_campaign(campaign, campaign.full, Path(folder), journal, 60 * minutes)
        print(frame.table_of(campaign, campaign.full, results))
        print(f"{(time.monotonic() - began) / 60:.1f} minutes now\n", flush=True)
        is_clean &= len(results) == sum(campaign.full.values()) and not any(own.failure for own in results)
    return is_clean


def run_case(case: str) -> bool:
    """Judge one case and print what came of it; whether it kept its promise."""
    name, kind, number = case.split("/")
    with tempfile.TemporaryDirectory(prefix=f"rocktokens-{name}-") as folder:
        [result] = frame.judged(CAMPAIGNS[name], [(kind, int(number))], Path(folder), float("inf"))
    print(f"{result.case}: {result.outcome}, {result.seconds} s\n{result.failure}")
    return not result.failure


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="*", help="default: all")
    parser.add_argument("--case", help="judge one case only")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of each campaign, at most")
    parser.add_argument("--restart", action="store_true", help="forget the results that are known")
    options = parser.parse_args()
    if options.case:
        is_clean = run_case(options.case)
    else:
        is_clean = run_all(options.campaigns or list(CAMPAIGNS), options.minutes, options.restart)
    raise SystemExit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
