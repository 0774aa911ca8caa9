"""Replay: score one probe set of rollouts under every checkpoint (docs/method.md, section 3).

``rocktokens.replay`` names this package and, in the public API, the stage: so the package itself can be called.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocktokens.replay.replay import Replayed


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> "Replayed":
        from rocktokens.replay.replay import replay

        return replay(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
