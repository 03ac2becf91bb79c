"""What each member of a batch is charged of a pass that several shared, and what cost curves learn of the whole."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.control.run_cost import RunCosts
from edgespec.generation.members import Member, num_rows_of
from edgespec.generation.run_state import PassShare


def share_draft(chosen: Sequence[Member], seconds: float) -> None:
    """Give each member its part of a draft model's pass, by rows."""
    num_rows = num_rows_of(chosen)
    for member in chosen:
        member.run.share = PassShare(seconds * member.asked.batch.width / num_rows, is_disturbed=False)


def share_target(chosen: Sequence[Member], seconds: float, num_passes: int, *, is_disturbed: bool) -> None:
    """Charge each member its share of a target pass, the `num_passes`th, and teach the curves what it took."""
    num_rows = num_rows_of(chosen)
    for member in chosen:
        rows = member.asked.batch.width
        member.latest_pass, member.latest_rows = num_passes, 1 if member.is_reading else rows
        member.run.share = PassShare(seconds * rows / num_rows, is_disturbed)
    decoding = [member for member in chosen if not member.is_reading]
    if not decoding:
        return
    widths = [member.asked.batch.width for member in decoding]
    prompt_rows = num_rows - sum(widths)
    context = sum(member.run.target.length for member in decoding) // len(decoding)
    taught: set[int] = set()  # curves, which controllers of several drafters share
    for costs in shared_costs(decoding):
        if not prompt_rows and not is_disturbed and id(costs.curve) not in taught:
            costs.observe_shared(widths, context, seconds)
            taught.add(id(costs.curve))
        parts = costs.parts_of(widths, prompt_rows, context)
        scale = 1.0 if prompt_rows else seconds / sum(parts)  # the cost of a prompt cannot be separated
        for member, part in zip(decoding, parts, strict=True):
            if member.controller is not None and member.controller.shared_costs is costs:
                member.run.share = PassShare(part * scale, is_disturbed)


def shared_costs(members: Sequence[Member]) -> list[RunCosts]:
    """The costs that their controllers decide by, where passes are shared: each once."""
    found = [None if member.controller is None else member.controller.shared_costs for member in members]
    return list({id(costs): costs for costs in found if costs is not None and costs.is_shared}.values())
