"""The teacher's states of a micro-batch, computed beside the student's forward.

1. On a GPU the teacher runs on a stream of its own, from where the training's stream stands: the two forwards share the
   GPU. ``TeacherStates.wait`` joins the streams, just before the loss; the host waits for neither.
2. The states are marked as read by the stream that waits, so their memory is not handed out again too early. What the
   teacher needs on the way stays with its stream; where the student's graph leaves no room for both, the allocator
   takes it back, and the forwards run one after the other.
3. On a CPU the states are computed at once.
"""

from dataclasses import dataclass
from typing import Any

import torch

from rocktokens.scoring.batch import RolloutBatch, response_states


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """States (T, E) that may still be on their way."""

    h_TE: torch.Tensor
    """Not to be read before ``wait``."""
    stream: torch.cuda.Stream | None = None
    """Where they are computed, if that is not where they are read."""

    def wait(self) -> torch.Tensor:
        """The states, for work that is queued from here on."""
        if self.stream is not None:
            reader = torch.cuda.current_stream(self.h_TE.device)
            reader.wait_stream(self.stream)
            self.h_TE.record_stream(reader)
        return self.h_TE


@torch.no_grad()
def teacher_states(teacher: Any, batch: RolloutBatch, stream: torch.cuda.Stream | None) -> TeacherStates:
    """What the teacher predicts the response tokens from, on ``stream`` if there is one.

    The batch must live until the states have been waited for.
    """
    if stream is None:
        return TeacherStates(response_states(teacher, batch))
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        return TeacherStates(response_states(teacher, batch), stream)
