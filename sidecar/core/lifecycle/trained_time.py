"""Time in which training ran: what a kill costs grows only while somebody trains."""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_SPANS = 64
"""Number of spans kept; beyond it the two oldest become one, with the pause between them."""


@dataclass(frozen=True, slots=True)
class TrainedTime:
    """Spans in which training ran, oldest first. All times are epoch seconds."""

    spans: tuple[tuple[float, float], ...] = ()
    runs: bool = False
    """Training ran when it was observed last: the newest span goes on."""

    def seen(self, *, trains: bool, now_s: float, began_s: float | None = None) -> TrainedTime:
        """Return the time with another observation.

        ``began_s``: when training began, if it runs and did not before; ``None``: now.
        """
        if not trains:
            return replace(self, runs=False)
        if self.runs:
            began_s, last_s = self.spans[-1]
            return replace(self, spans=(*self.spans[:-1], (began_s, max(last_s, now_s))))
        began_s = now_s if began_s is None else min(began_s, now_s)
        spans = (*self.spans, (began_s, now_s))
        if len(spans) > MOST_SPANS:
            spans = ((spans[0][0], spans[1][1]), *spans[2:])
        return TrainedTime(spans, runs=True)

    def between_s(self, from_s: float, until_s: float) -> float:
        """Return the seconds of training from one time to another; a span that goes on counts up to ``until_s``."""
        spans = [*self.spans[:-1], (self.spans[-1][0], until_s)] if self.runs else self.spans
        return sum(max(0.0, min(end_s, until_s) - max(began_s, from_s)) for began_s, end_s in spans)

    def at_risk_s(self, *, durable_at_s: float, finished_at_s: float | None, now_s: float) -> float:
        """Return the seconds of training that a kill now would undo.

        Args:
            durable_at_s: When the newest durable state was saved, or when the first training may have begun.
            finished_at_s: When the newest finished state was saved that is not durable yet; ``None``: there is none. While
                nobody trains, a kill cannot cost more than that state: later steps are lost already.
            now_s: Now.
        """
        until_s = now_s if self.runs else durable_at_s if finished_at_s is None else min(finished_at_s, now_s)
        return self.between_s(durable_at_s, until_s)
