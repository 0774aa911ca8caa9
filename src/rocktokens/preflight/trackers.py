"""Whether the trackers of ``training.report_to`` can be used, without a word to any server.

1. The package of each is really imported: one that is there but broken would stop the run after the models are loaded.
2. A tracker that logs in to a server needs a key, or to be told to stay offline, as its own documentation says.
"""

import importlib
import netrc
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from urllib.parse import urlparse

from huggingface_hub import get_token

from rocktokens.preflight.findings import Finding

MODULES = {
    "trackio": ("trackio",),
    "wandb": ("wandb",),
    "tensorboard": ("torch.utils.tensorboard", "tensorboardX"),
}
"""What accelerate imports for a tracker: the first that is there."""
OFFLINE = frozenset({"offline", "disabled", "dryrun"})
"""Values of WANDB_MODE without a server."""


def check_trackers(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> Finding:
    """Import every tracker and look for what it logs in with."""
    ready, problems = [], []
    for name in names:
        module = _imported(name)
        problem = module if isinstance(module, str) else _missing_login(name, environment)
        if problem:
            problems.append(problem)
        else:
            ready.append(f"{name} {getattr(module, '__version__', '')}".strip())
    value = f"{', '.join(ready) or 'none'} of {', '.join(names)} can be used" if problems else ", ".join(ready)
    level = "fail" if problems else "ok"
    return Finding("trackers", level, value, "; ".join(problems), {"asked": [*names], "ready": ready})


def _imported(name: str) -> ModuleType | str:
    """Return the module of a tracker, or in one sentence why there is none."""
    error: Exception = ImportError()
    for module in MODULES[name]:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as missing:
            error = missing
        except Exception as broken:  # whatever a package does when it is imported
            reason = (str(broken).strip() or type(broken).__name__).splitlines()[0]
            return f"training.report_to names {name!r}, which cannot be imported ({reason}): install it again"
    missing = getattr(error, "name", None)
    needed = f" (it needs {missing})" if missing and missing not in MODULES[name] and missing != name else ""
    return f"training.report_to names {name!r}, which is not installed{needed}: pip install {name}"


def _missing_login(name: str, environment: Mapping[str, str]) -> str:
    """Say what a tracker would ask for; empty where it would not."""
    if name == "wandb" and environment.get("WANDB_MODE", "online") not in OFFLINE:
        host = urlparse(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        if not environment.get("WANDB_API_KEY") and not _has_password(host):
            return f"wandb has no key for {host}: run `wandb login`, or set WANDB_MODE=offline"
    if name == "trackio" and (space := environment.get("TRACKIO_SPACE_ID")) and not get_token():
        return f"trackio has no token to write to the Space {space}: run `hf auth login`, or unset TRACKIO_SPACE_ID"
    return ""


def _has_password(host: str) -> bool:
    """Whether the user's netrc file, where `wandb login` keeps the key, knows the host."""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
