"""What a request tells the plug-in of a vLLM server, as one string that any version of vLLM passes on."""

import json
from dataclasses import asdict, dataclass
from typing import Self

XARG = "rocktokens"
"""The name of the string in ``vllm_xargs``."""


@dataclass(frozen=True, slots=True)
class NoisyChoice:
    """How the tokens of one completion are chosen.

    Example: ``{"key": 5, "temperature": 1.0, "start": 3, "banned": [17], "alternatives": []}`` goes on behind three
    known response tokens, and never writes 17.
    """

    key: int
    """Of the completion's noise (``noise.stream_key``)."""
    temperature: float
    start: int
    """Response tokens that the prompt of the request ends with."""
    banned: tuple[int, ...]
    alternatives: tuple[int, ...]
    """As in ``sampler.SampleRequest``."""

    def to_json(self) -> str:
        """Return it as a request says it; JSON has no integers of 64 bits for every reader, but Python's has."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``to_json`` wrote; anything else is a ValueError."""
        try:
            said = json.loads(text)
            lists = {name: tuple(map(int, said[name])) for name in ("banned", "alternatives")}
            return cls(int(said["key"]), float(said["temperature"]), int(said["start"]), **lists)
        except (TypeError, KeyError) as error:
            raise ValueError(f"vllm_xargs.{XARG} is not what rocktokens writes: {error!r}") from None
