"""The rows of a decoding batch as tensors on the model's device, and the step that advances all of them at once.

1. A step feeds every row its last token and takes the next (``decoding.choose``), or the known one where a row retraces
   a rollout; records it and its log-probability; and moves the row on by one. A row that has ended stays where it is,
   and what it is still fed is ignored.
2. None of this waits for the device. ``look`` does: it says which rows are still live, and how far each has come.
3. On a GPU a step is hundreds of small kernels, and launching them would take longer than running them. So the step of
   each shape (rows, slots attended to) is captured once as a CUDA graph and replayed. All it touches stays in place:
   the rows are kept from call to call, and new weights are copied into the model's parameters. A model whose forward
   waits for the GPU (some mixtures of experts, some rotary positions) cannot be captured, and runs without a graph.

CUDA graphs: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rocktokens.rollouts.decoding import NO_TOKEN, DecodingSettings, StreamRequest, alternative_ids, choose
from rocktokens.rollouts.slots import SlotCache, mask_copies, takes_row_slots


class DecodingRows:
    """State of ``rows`` rollouts, all tensors (R, …) on the device."""

    def __init__(
        self,
        model: Any,
        settings: DecodingSettings,
        rows: int,
        capacity: int,
        *,
        bans: bool,
        alternatives: int,
        retraces: bool,
    ) -> None:
        """Make room for ``rows`` rollouts; what no rollout needs is left out, and costs nothing in any step.

        Args:
            model: the student.
            settings: how the next token is chosen.
            rows: how many rollouts advance at once.
            capacity: slots of each row, for its prompt and its response.
            bans: whether rows may have types banned.
            alternatives: the most types that a ban may depend on; 0 where all bans act everywhere.
            retraces: whether rows may be given tokens to follow.
        """
        device = model.device
        self.model, self.settings, self.capacity = model, settings, capacity
        self.cache = SlotCache(model.config, rows, capacity)
        self.names_slots = takes_row_slots(model)
        self.rows_R = torch.arange(rows, device=device)
        self.state_FR = torch.zeros(6, rows, dtype=torch.long, device=device)
        self.live_R = torch.zeros(rows, dtype=torch.bool, device=device)
        shape = rows, mask_copies(model), capacity
        self.mask_RGL = torch.full(shape, -torch.inf, dtype=model.dtype, device=device)
        # one column more than a response has, for what an ended row is still given
        self.tokens_RT = torch.zeros(rows, settings.max_new_tokens + 1, dtype=torch.long, device=device)
        self.logprobs_RT = torch.zeros_like(self.tokens_RT, dtype=torch.float32)
        self.known_RT = torch.full_like(self.tokens_RT, NO_TOKEN) if retraces else None
        self.banned_RV = torch.zeros(rows, settings.vocab_size, dtype=torch.bool, device=device) if bans else None
        self.alternatives_RA = (
            torch.full((rows, alternatives), NO_TOKEN, dtype=torch.long, device=device) if alternatives else None
        )
        self.eos_ids_E = torch.tensor(sorted(settings.eos_ids), dtype=torch.long, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._captures = device.type == "cuda"
        self._pool: Any = None

    def serves(
        self,
        settings: DecodingSettings,
        rows: int,
        capacity: int,
        *,
        bans: bool,
        alternatives: int,
        retraces: bool,
    ) -> bool:
        """Whether these rows can be used again, as if they had been made so."""
        room = 0 if self.alternatives_RA is None else self.alternatives_RA.shape[1]
        return (
            (self.settings, len(self.rows_R)) == (settings, rows)
            and self.capacity >= capacity
            and (self.banned_RV is not None) == bans
            and (room >= alternatives > 0 or room == alternatives)
            and (self.known_RT is not None) == retraces
        )

    def enter(self, rows: range, requests: Sequence[StreamRequest]) -> None:
        """Give each request a row, about to be fed its last token; its states are loaded into the cache separately."""
        here, fields, longest = slice(rows.start, rows.stop), [], self.settings.max_new_tokens
        hidden_nL = np.full((len(requests), self.capacity), -np.inf, np.float32)
        for hidden_L, request in zip(hidden_nL, requests, strict=True):
            step, prompt = request.start, request.prompt
            last_id = int(request.known[step - 1] if step else prompt[-1])
            slot, position = request.base + step - 1, len(prompt) + step - 1
            fields.append((last_id, slot, position, step, request.end(longest), request.stream_key))
            hidden_L[slot - position : slot] = 0
        self.state_FR[:, here] = torch.tensor(fields).T.to(self.state_FR.device)
        self.live_R[here] = True
        self.mask_RGL[here] = torch.from_numpy(hidden_nL).to(self.mask_RGL)[:, None]
        if self.banned_RV is not None:
            self.banned_RV[here] = False
            pairs = [(row, token) for row, request in zip(rows, requests, strict=True) for token in request.banned]
            if pairs:
                self.banned_RV[tuple(torch.tensor(pairs).T.to(self.banned_RV.device))] = True
        if self.alternatives_RA is not None:
            own_nA = alternative_ids(requests, self.alternatives_RA.shape[1])
            self.alternatives_RA[here] = own_nA.to(self.alternatives_RA.device)
        if self.known_RT is not None:
            known_nT = np.full((len(requests), self.known_RT.shape[1]), NO_TOKEN)
            for known_T, request in zip(known_nT, requests, strict=True):
                if request.branches:  # a row retraces; any other begins behind what it knows
                    known_T[: len(request.known)] = request.known
            self.known_RT[here] = torch.from_numpy(known_nT).to(self.known_RT.device)

    def advance(self, steps: int, rows: int, width: int) -> None:
        """Take some steps with the first rows, which look at the first ``width`` slots."""
        for _ in range(steps):
            graph = self._graphs.get((rows, width))
            if graph is not None:
                graph.replay()
                continue
            self._step(rows, width)
            if self._captures:
                self._capture(rows, width)

    def look(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of the first rows are live, and the response position that each would get next; waits for the GPU."""
        both = torch.stack([self.live_R[:rows].long(), self.state_FR[3, :rows]]).cpu().numpy()
        return both[0] > 0, both[1]

    def written(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (n, T + 1) and log-probabilities of these rows, by response position."""
        chosen = torch.tensor(rows, device=self.rows_R.device)
        return self.tokens_RT[chosen].to("cpu", torch.int32).numpy(), self.logprobs_RT[chosen].cpu().numpy()

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Put rows that have filled at most ``length`` slots in the places of others."""
        source_n, target_n = (torch.tensor(rows, device=self.rows_R.device) for rows in (sources, targets))
        self.cache.move(source_n, target_n, length)
        self.state_FR[:, target_n] = self.state_FR[:, source_n]
        recorded = (self.live_R, self.mask_RGL, self.tokens_RT, self.logprobs_RT, self.known_RT)
        for tensor in (*recorded, self.banned_RV, self.alternatives_RA):
            if tensor is not None:
                tensor[target_n] = tensor[source_n]

    def vacate(self, rows: range) -> None:
        """Let rows that no rollout is in look at one slot only."""
        here = slice(rows.start, rows.stop)
        self.live_R[here] = False
        self.state_FR[1:3, here] = 0  # slots and positions

    def _capture(self, rows: int, width: int) -> None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads, which write what was scored, may talk to the GPU meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(rows, width)
        except RuntimeError:
            self._captures = False
        else:
            self._graphs[rows, width] = graph

    def _step(self, rows: int, width: int) -> None:
        rows_A, live_A = self.rows_R[:rows], self.live_R[:rows]
        last_ids_A, slots_A, positions_A, steps_A, ends_A, stream_keys_A = self.state_FR[:, :rows]
        mask_AGL = self.mask_RGL[:rows]
        mask_AGL.scatter_(2, slots_A[:, None, None].expand(*mask_AGL.shape[:2], 1), 0.0)
        self.cache.place(rows_A, slots_A, width)
        mask_AG1L = mask_AGL[:, :, None, :width]
        slots_2A = self.state_FR[1:3, :rows]  # slots and positions
        named = {"row_slots": slots_2A, "row_mask": mask_AG1L} if self.names_slots else {}
        output = self.model(
            input_ids=last_ids_A[:, None],
            attention_mask=mask_AG1L,
            position_ids=positions_A[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **named,
        )
        logits_AV = output.logits[:, -1, : self.settings.vocab_size]
        banned_AV = None if self.banned_RV is None else self.banned_RV[:rows]
        alternatives_AA = None if self.alternatives_RA is None else self.alternatives_RA[:rows]
        chosen_A, logprobs_A = choose(
            logits_AV, banned_AV, alternatives_AA, stream_keys_A, steps_A, self.settings.temperature
        )
        is_free_A = torch.ones_like(live_A)
        if self.known_RT is not None:
            known_A = self.known_RT[rows_A, steps_A]
            is_free_A = known_A == NO_TOKEN
            chosen_A = torch.where(is_free_A, chosen_A, known_A)
        self.tokens_RT[rows_A, steps_A] = chosen_A
        self.logprobs_RT[rows_A, steps_A] = logprobs_A
        last_ids_A.copy_(chosen_A)
        self.state_FR[1:4, :rows] += live_A  # slots, positions, steps
        is_last_A = (chosen_A[:, None] == self.eos_ids_E).any(dim=1) | ~logprobs_A.isfinite()
        live_A &= ~(is_last_A & is_free_A | (steps_A == ends_A))
