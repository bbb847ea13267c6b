"""Redact the events of a run, including secrets that the model emits piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

from farhand.agent.events import Event, StepRetrying, StepText, StepThinking
from farhand.protocol.redaction import KnownSecrets, StreamRedactor


class EventRedactor:
    """Redacts the deltas of one run; whole texts in events are redacted where they leave the gateway."""

    def __init__(self, secrets: KnownSecrets) -> None:
        self._secrets = secrets
        self._open: tuple[type[StepText | StepThinking], int, StreamRedactor] | None = None

    def shown(self, event: Event) -> Iterator[Event]:
        """Yield the events to emit now: deltas may wait for the next one; other events come after what waited."""
        if not isinstance(event, StepText | StepThinking):
            if isinstance(event, StepRetrying) and event.void:
                self._open = None
            yield from self._rest()
            yield event
            return
        if self._open is None or self._open[:2] != (type(event), event.step):
            yield from self._rest()
            self._open = (type(event), event.step, StreamRedactor(self._secrets))
        if text := self._open[2].feed_text(event.text):
            yield type(event)(event.step, text)

    def _rest(self) -> Iterator[Event]:
        if self._open is not None:
            kind, step, redactor = self._open
            self._open = None
            if text := redactor.finish_text():
                yield kind(step, text)
