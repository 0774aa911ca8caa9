"""What cannot be done with a teacher of which only the likeliest tokens are known (``teacher.values = "top_k"``).

The divergence of k tokens and one tail has the sums of the whole one, nearly, and not its values at single tokens
(docs/howto/served-teacher.md). So what looks at all of the teacher's distribution, or compares the kl of single tokens
with a threshold, is refused before anything is loaded.
"""

from typing import TYPE_CHECKING

from rocktokens.config.policies import PolicyBase, sections_by_key

if TYPE_CHECKING:
    from rocktokens.config.sections import Config

WHOLE_DISTRIBUTION = {
    "teachable": "the teacher's mass on the student's 16 likeliest tokens",
    "entropy_mix": "the teacher's entropy",
    "asymmetric": "the forward KL",
    "coarse": "the teacher's mass of classes of tokens",
    "online_coarse": "the teacher's mass of classes of tokens",
}
"""Policies, and what they need of all of the teacher's distribution."""
SELECTKD_NEEDS = 5
"""Likeliest tokens of the teacher."""
REMEDY = 'set teacher.values = "states", or keep the teacher in memory'


def why_not_top_k(config: "Config") -> str:
    """Say in one sentence what a config asks for that a teacher with its likeliest tokens alone does not tell."""
    known = f'teacher.values = "top_k" gives {config.teacher.top_k} tokens'
    scoring, trace = config.scoring, config.trace
    if scoring.divergence != "reverse":
        return (
            f'scoring.divergence = "{scoring.divergence}" needs the whole distribution of the teacher, and {known}: '
            f'use "reverse", or {REMEDY}'
        )
    if scoring.temperature != 1:
        return (
            f"scoring.temperature = {scoring.temperature:g} tempers the whole distribution of the teacher, and "
            f"{known}: use 1, or {REMEDY}"
        )
    if trace.classes is not None:
        return f"trace.classes needs the teacher's mass of whole classes, and {known}: leave it out, or {REMEDY}"
    if trace.top_k > config.teacher.top_k:
        return (
            f"trace.top_k = {trace.top_k} keeps more of the teacher's tokens than there are, since {known}: lower it "
            "to that, or raise teacher.top_k"
        )
    if config.find.stage == "context":
        return (
            'find.stage = "context" compares the kl of single tokens with a threshold, and that of the likeliest '
            'tokens and a tail holds for sums alone: use "bound" or "score", or ' + REMEDY
        )
    parts = sections_by_key(config.policy).items()
    return next(filter(None, (_why_not(key, part, known, config.teacher.top_k) for key, part in parts)), "")


def _why_not(key: str, policy: PolicyBase, known: str, top_k: int) -> str:
    if needed := WHOLE_DISTRIBUTION.get(policy.name):
        return f'{key}.name = "{policy.name}" needs {needed}, and {known}: choose another policy, or {REMEDY}'
    if policy.name == "selectkd" and top_k < SELECTKD_NEEDS:
        return f'{key}.name = "selectkd" needs the teacher\'s {SELECTKD_NEEDS} likeliest tokens, and {known}: raise it'
    if getattr(policy, "window", False):
        return (
            f"{key}.window compares the kl of single tokens with a threshold, and {known} and a tail, whose kl holds "
            f"for sums alone: leave it out, or {REMEDY}"
        )
    return ""
