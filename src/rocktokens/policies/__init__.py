"""Weight policies: arrays in, the weight of each response token out (docs/method.md, section 7).

They know nothing of the trainer. A policy is a pure function in the file of its family or a small class, one entry of
``POLICIES``, and one section of rocktokens.config.policies. Weights are keyed by the *predicted* token ids, float32 and
detached, numpy for numpy and torch for torch.
"""

from rocktokens.policies.base import Coarse, Term, WeightPolicy, term_arguments, term_classes
from rocktokens.policies.registry import POLICIES, make_policy, policy_from_section

__all__ = [
    "POLICIES",
    "Coarse",
    "Term",
    "WeightPolicy",
    "make_policy",
    "policy_from_section",
    "term_arguments",
    "term_classes",
]
